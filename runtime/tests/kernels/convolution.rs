//! Convolutions and their gradients against plain loops over integers, whose sums are exact in any
//! order: all strides, paddings, dilations and groups, whole, on threads and in parts.

use super::generate::Rng;
use artifact::{Attr, DType};
use lighterage_runtime::Team;
use lighterage_runtime::kernels::owned::{OwnedTensor, Run};
use proptest::prelude::*;

/// A convolution of two dimensions; one dimension is tested if the first has size 1.
#[derive(Clone, Copy, Debug)]
struct Shape {
    batch: usize,
    groups: usize,
    /// Channels of a group: read and written.
    channels: [usize; 2],
    size: [usize; 2],
    taps: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
}

impl Shape {
    fn output(&self, d: usize) -> usize {
        let reach = self.dilation[d] * (self.taps[d] - 1) + 1;
        (self.size[d] + 2 * self.padding[d] - reach) / self.stride[d] + 1
    }
    fn fits(&self) -> bool {
        (0..2).all(|d| self.size[d] + 2 * self.padding[d] > self.dilation[d] * (self.taps[d] - 1))
    }
    /// The shapes of x, w and y.
    fn shapes(&self) -> [Vec<usize>; 3] {
        let [c, o] = self.channels;
        let (g, n) = (self.groups, self.batch);
        [
            vec![n, g * c, self.size[0], self.size[1]],
            vec![g * o, c, self.taps[0], self.taps[1]],
            vec![n, g * o, self.output(0), self.output(1)],
        ]
    }
    /// Calls `f` for each product, with its places in x, w and y.
    fn products(&self, mut f: impl FnMut(usize, usize, usize)) {
        let [c, o] = self.channels;
        let [xs, ws, ys] = self.shapes();
        let at =
            |shape: &[usize], c: [usize; 4]| c.iter().zip(shape).fold(0, |at, (&c, &d)| at * d + c);
        for n in 0..self.batch {
            for channel in 0..self.groups * o {
                for i in 0..ys[2] * ys[3] {
                    let (oy, ox) = (i / ys[3], i % ys[3]);
                    for k in 0..c * self.taps[0] * self.taps[1] {
                        let (kx, rest) = (k % self.taps[1], k / self.taps[1]);
                        let (ky, from) = (rest % self.taps[0], rest / self.taps[0]);
                        let place = |d: usize, o: usize, k: usize| {
                            (o * self.stride[d] + k * self.dilation[d])
                                .checked_sub(self.padding[d])
                                .filter(|&i| i < self.size[d])
                        };
                        let (Some(y), Some(x)) = (place(0, oy, ky), place(1, ox, kx)) else {
                            continue;
                        };
                        f(
                            at(&xs, [n, channel / o * c + from, y, x]),
                            at(&ws, [channel, from, ky, kx]),
                            at(&ys, [n, channel, oy, ox]),
                        );
                    }
                }
            }
        }
    }
}

fn integers(rng: &mut Rng, n: usize) -> Vec<f64> {
    (0..n).map(|_| rng.below(7) as f64 - 3.0).collect()
}

/// The runs of a shape: whole, on threads, and in parts, each with the expected results.
fn agrees(shape: &Shape, dtype: DType, teams: &[Team], mask: [i64; 3], lines: bool) {
    let rng = &mut Rng(7);
    let shapes = shape.shapes();
    let counts = shapes.clone().map(|s| s.iter().product::<usize>());
    let [x, w, dy] = counts.map(|n| integers(rng, n));
    let bias = integers(rng, shapes[1][0]);
    let plane = shapes[2][2] * shapes[2][3];

    let mut y: Vec<f64> = (0..counts[2])
        .map(|i| bias[i / plane % shapes[1][0]])
        .collect();
    let (mut dx, mut dw) = (vec![0.0; counts[0]], vec![0.0; counts[1]]);
    shape.products(|i, k, o| {
        y[o] += x[i] * w[k];
        dx[i] += dy[o] * w[k];
        dw[k] += dy[o] * x[i];
    });
    let mut db = vec![0.0; shapes[1][0]];
    dy.iter()
        .enumerate()
        .for_each(|(i, dy)| db[i / plane % shapes[1][0]] += dy);

    // One dimension: the second.
    let cut = |s: &[usize]| {
        if lines {
            vec![s[0], s[1], s[3]]
        } else {
            s.to_vec()
        }
    };
    let tensor = |s: &[usize], numbers: &[f64]| OwnedTensor::from_f64s(dtype, &cut(s), numbers);
    let ints = |list: [usize; 2]| {
        let list = list.map(|i| i as i64);
        Attr::Ints(if lines {
            list[1..].to_vec()
        } else {
            list.to_vec()
        })
    };
    let attrs = vec![
        ("dilation".to_string(), ints(shape.dilation)),
        ("groups".to_string(), Attr::Int(shape.groups as i64)),
        ("padding".to_string(), ints(shape.padding)),
        ("stride".to_string(), ints(shape.stride)),
    ];
    let channels = [shapes[1][0]];
    let biases = OwnedTensor::from_f64s(dtype, &channels, &bias);
    let (x, w, dy) = (
        tensor(&shapes[0], &x),
        tensor(&shapes[1], &w),
        tensor(&shapes[2], &dy),
    );
    let expected = OwnedTensor::from_f64s(dtype, &cut(&shapes[2]), &y);
    let outs = [(dtype, cut(&shapes[2]))];
    check(
        "convolution",
        &attrs,
        &[&x, &w, &biases],
        &outs,
        &[expected],
        teams,
    );

    let mut attrs = attrs;
    attrs.push(("mask".to_string(), Attr::Ints(mask.into())));
    let all = [
        (cut(&shapes[0]), dx),
        (cut(&shapes[1]), dw),
        (channels.to_vec(), db),
    ];
    let wanted = all.iter().zip(mask).filter(|(_, m)| *m == 1);
    let (outs, expected): (Vec<_>, Vec<_>) = wanted
        .map(|((s, numbers), _)| {
            let expected = OwnedTensor::from_f64s(dtype, s, numbers);
            ((dtype, s.clone()), expected)
        })
        .unzip();
    check(
        "convolution_bwd",
        &attrs,
        &[&dy, &x, &w],
        &outs,
        &expected,
        teams,
    );
}

fn check(
    op: &str,
    attrs: &[(String, Attr)],
    ins: &[&OwnedTensor],
    outs: &[(DType, Vec<usize>)],
    expected: &[OwnedTensor],
    teams: &[Team],
) {
    let run = || Run::new(op, attrs, ins, outs, 0, &[]).unwrap();
    let same = |run: &Run<'_>, how: &str| {
        for (j, (result, expected)) in run.results.iter().zip(expected).enumerate() {
            let (is, should) = (result.to_f64s(), expected.to_f64s());
            let wrong = is.iter().zip(&should).position(|(a, b)| a != b);
            assert_eq!(wrong, None, "{op} {how}: result {j}, {attrs:?} {outs:?}");
        }
    };
    let mut whole = run();
    whole.run().unwrap();
    same(&whole, "whole");
    for team in teams {
        let mut shared = run();
        shared.run_on(Some(team), || {}).unwrap();
        same(&shared, "on threads");
    }
    for lengths in [[1, 2, 1], [5, 40, 3], [131, 7, 300]] {
        let mut parts = run();
        parts.run_in_parts(&lengths).unwrap();
        same(&parts, "in parts");
    }
}

fn shape(
    [batch, groups, c, o]: [usize; 4],
    size: [usize; 2],
    taps: [usize; 2],
    [stride, padding, dilation]: [usize; 3],
) -> Shape {
    Shape {
        batch,
        groups,
        channels: [c, o],
        size,
        taps,
        stride: [stride; 2],
        padding: [padding; 2],
        dilation: [dilation; 2],
    }
}

/// Convolutions of networks, with small sizes, and sizes around the borders of blocks.
#[test]
fn convolutions_of_networks() {
    let shapes = [
        // Sizes around blocks of columns and of depth.
        shape([2, 1, 60, 5], [13, 11], [3, 3], [1, 1, 1]),
        shape([1, 1, 3, 17], [33, 31], [7, 7], [2, 3, 1]),
        shape([5, 1, 130, 6], [4, 4], [3, 3], [1, 1, 1]),
        shape([1, 1, 3, 4], [40, 30], [3, 3], [1, 1, 1]),
        shape([2, 1, 8, 16], [16, 32], [1, 1], [1, 0, 1]),
        // Shortcuts, patches, a window as large as the image.
        shape([3, 1, 6, 9], [9, 9], [1, 1], [2, 0, 1]),
        shape([2, 1, 3, 20], [32, 16], [8, 8], [8, 0, 1]),
        shape([2, 1, 4, 7], [6, 5], [6, 5], [1, 0, 1]),
        // Rows of weights that compete for sets of the cache are packed.
        shape([2, 1, 512, 9], [3, 3], [1, 1], [1, 0, 1]),
        // Many rows of weights.
        shape([1, 1, 3, 1030], [3, 3], [1, 1], [1, 0, 1]),
        shape([1, 1, 1030, 3], [2, 3], [3, 1], [1, 1, 1]),
        // Depthwise, with two results a channel, and groups.
        shape([2, 9, 1, 1], [12, 7], [3, 3], [1, 1, 1]),
        shape([1, 5, 1, 1], [15, 16], [7, 7], [1, 3, 1]),
        shape([2, 4, 1, 2], [9, 10], [3, 3], [2, 1, 1]),
        // Depthwise, with several rectangles of a plane, of rows and of columns.
        shape([2, 3, 1, 1], [40, 60], [3, 3], [1, 1, 1]),
        shape([2, 3, 1, 1], [70, 61], [3, 3], [2, 1, 1]),
        shape([1, 2, 1, 1], [33, 90], [5, 3], [3, 6, 3]),
        shape([1, 3, 1, 1], [1, 5000], [1, 4], [1, 0, 1]),
        shape([1, 2, 1, 1], [2, 4999], [1, 3], [2, 0, 1]),
        shape([2, 5, 1, 1], [41, 53], [1, 1], [1, 0, 1]),
        shape([2, 5, 1, 1], [41, 53], [1, 1], [2, 0, 1]),
        shape([2, 3, 4, 5], [8, 9], [3, 3], [1, 1, 1]),
        // Dilated.
        shape([1, 1, 5, 6], [17, 19], [3, 3], [1, 4, 4]),
        shape([2, 1, 4, 3], [11, 12], [3, 2], [3, 2, 2]),
        shape([2, 1, 3, 3], [11, 12], [3, 2], [2, 2, 2]),
        // Bands: several of rows, and of columns.
        shape([1, 1, 60, 5], [40, 40], [3, 3], [1, 1, 1]),
        shape([1, 1, 40, 3], [2, 2000], [3, 3], [1, 1, 1]),
        // Products of packed patches: many results, small images, many taps.
        shape([1, 1, 60, 260], [13, 11], [3, 3], [1, 1, 1]),
        shape([2, 1, 3, 200], [4, 4], [3, 3], [1, 1, 1]),
        shape([2, 1, 200, 3], [4, 4], [3, 3], [1, 1, 1]),
        shape([1, 1, 2, 3], [24, 24], [23, 23], [1, 11, 1]),
        shape([2, 1, 2, 3], [25, 24], [23, 23], [2, 11, 1]),
        // More channels than places: parts share the channels.
        shape([1, 1, 64, 70], [3, 4], [3, 3], [1, 1, 1]),
        shape([1, 2, 64, 80], [4, 5], [3, 3], [2, 1, 1]),
        shape([3, 1, 128, 1100], [2, 2], [1, 1], [2, 0, 1]),
        // Windows that lie in the padding.
        shape([1, 1, 3, 3], [1, 2], [3, 3], [1, 4, 1]),
    ];
    let teams = [2, 3].map(|threads| Team::new(threads).unwrap());
    for shape in &shapes {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            agrees(shape, dtype, &teams, [1, 1, 1], false);
        }
    }
    // As many weights of one tap as are packed at once, which are widened first.
    let many = shape([1, 1, 1030, 516], [6, 43], [1, 1], [1, 0, 1]);
    agrees(&many, DType::BF16, &teams, [1, 0, 0], false);
    // Products of bands of pairs: an odd number of channels, several bands, more taps than are in a
    // table, and more weights and results than are packed or summed at once.
    let pairs = [
        shape([2, 1, 61, 20], [13, 11], [3, 3], [1, 1, 1]),
        shape([1, 1, 130, 70], [16, 15], [3, 3], [1, 1, 1]),
        shape([2, 1, 40, 17], [40, 40], [3, 3], [1, 1, 1]),
        shape([1, 1, 21, 33], [35, 37], [3, 3], [2, 1, 1]),
        shape([1, 2, 5, 16], [30, 26], [3, 2], [3, 2, 2]),
        shape([1, 1, 3, 530], [20, 30], [3, 3], [1, 1, 1]),
        shape([1, 1, 52, 512], [16, 16], [3, 3], [1, 1, 1]),
        shape([1, 1, 200, 210], [6, 16], [5, 5], [1, 2, 1]),
        // No channels.
        shape([2, 1, 0, 20], [13, 11], [3, 3], [1, 1, 1]),
        shape([2, 1, 20, 0], [13, 11], [3, 3], [1, 1, 1]),
    ];
    for shape in &pairs {
        agrees(shape, DType::BF16, &teams, [1, 1, 1], false);
    }
    // One dimension: an audio model's first layers, and its convolution of positions.
    let lines = [
        shape([2, 1, 8, 10], [1, 201], [1, 3], [1, 0, 1]),
        shape([1, 1, 5, 26], [1, 300], [1, 10], [1, 0, 1]),
        shape([2, 4, 3, 3], [1, 50], [1, 16], [1, 0, 1]),
        // More weights than are packed at once; as many weights of a result as possible.
        shape([1, 1, 1030, 180], [1, 20], [1, 3], [1, 0, 1]),
        shape([1, 1, 248, 4], [1, 512], [1, 512], [1, 0, 1]),
    ];
    for (mut shape, stride, padding) in lines
        .into_iter()
        .zip([2, 5, 1, 1, 1])
        .zip([1, 0, 8, 1, 0])
        .map(|((shape, stride), padding)| (shape, stride, padding))
    {
        shape.stride[1] = stride;
        shape.padding[1] = padding;
        for dtype in [DType::F32, DType::BF16] {
            agrees(&shape, dtype, &teams, [1, 1, 1], true);
        }
    }
}

fn sizes(most: usize) -> impl Strategy<Value = [usize; 2]> {
    prop::array::uniform2(1..=most)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn convolutions_of_any_sizes(
        batch in 0usize..4, groups in 1usize..4, channels in sizes(20), size in sizes(14),
        taps in sizes(4), stride in sizes(4), padding in prop::array::uniform2(0usize..4),
        dilation in sizes(3), mask in 1i64..8, dtype in 0usize..4,
    ) {
        let shape = Shape { batch, groups, channels, size, taps, stride, padding, dilation };
        prop_assume!(shape.fits());
        let mask = [mask & 1, mask >> 1 & 1, mask >> 2];
        let dtype = [DType::F32, DType::F64, DType::BF16, DType::F16][dtype];
        agrees(&shape, dtype, &[], mask, false);
    }
}
