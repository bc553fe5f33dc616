//! Batch normalisation: a block of threads has a channel.

use super::Kernel;
use super::grid::{Grid, Tensor};
use super::moves::around;
use crate::mlir::{Arith, Kind, Value};
use ir::DType;
use ir::op::attrs::{BatchNorm, BatchNormBwd};

/// Threads of a block.
const THREADS: u32 = 256;

/// A channel of images: element `i` of it, of `n`.
struct Channel {
    channels: u64,
    inner: u64,
    n: u64,
    number: Value,
}

impl Channel {
    /// The position of element `i`.
    fn at(&self, g: &mut Grid, i: Value) -> Value {
        let [image, place] = g.divided(i, self.inner);
        let row = g.times(image, self.channels);
        let row = g.b.addi(row, self.number);
        let first = g.times(row, self.inner);
        g.b.addi(first, place)
    }

    /// The sums of `f` of each element's place over the channel, in f64.
    fn sums<const N: usize>(
        &self,
        g: &mut Grid,
        room: Tensor,
        f: impl FnOnce(&mut Grid, Value) -> [Value; N],
    ) -> [Value; N] {
        let starts = [(); N].map(|()| g.float(0.0, Kind::F64));
        let own = g.share(self.n, &starts, |g, i, sums| {
            let at = self.at(g, i);
            let xs = f(g, at);
            let both = sums.iter().zip(xs);
            both.map(|(&sum, x)| {
                let x = g.double(x);
                g.add(sum, x)
            })
            .collect()
        });
        std::array::from_fn(|i| g.total(own[i], room))
    }

    /// Loops over the thread's elements of the channel.
    fn each(&self, g: &mut Grid, f: impl FnOnce(&mut Grid, Value)) {
        g.share(self.n, &[], |g, i, _| {
            let at = self.at(g, i);
            f(g, at);
            vec![]
        });
    }
}

/// Adds a phase with a block for each channel of a tensor of images.
fn channels(k: &mut Kernel<'_>, shape: &[u64], body: impl FnOnce(&mut Grid, &Channel, Tensor)) {
    let [batch, channels, inner] = around(shape, 1);
    k.phase(THREADS, channels, |g| {
        g.parts(channels, |g, number| {
            let room = g.shared(THREADS.into(), DType::F64);
            let channel = Channel {
                channels,
                inner,
                n: batch * inner,
                number,
            };
            body(g, &channel, room);
        });
    });
}

pub(super) fn batch_norm(k: &mut Kernel<'_>, a: &BatchNorm) {
    let (shape, dtype) = (k.x().shape().to_vec(), k.x().dtype());
    let types: Vec<DType> = k.results.iter().map(ir::TensorType::dtype).collect();
    channels(k, &shape, |g, channel, room| {
        let (x, count) = (g.operand(0), channel.n as f64);
        let [sum] = channel.sums(g, room, |g, at| [g.get(x, at)]);
        let n = g.float(count, Kind::F64);
        let mean = g.b.divf(sum, n);
        let [squares] = channel.sums(g, room, |g, at| {
            let x = g.get(x, at);
            let x = g.double(x);
            let off = g.sub(x, mean);
            [g.mul(off, off)]
        });
        let [eps, one, less] = [a.eps, 1.0, count - 1.0].map(|x| g.float(x, Kind::F64));
        let var = g.b.divf(squares, n);
        let var = g.add(var, eps);
        let root = g.b.arith(Arith::Sqrt, &[var]);
        let rstd = g.b.divf(one, root);
        let sample = g.b.divf(squares, less);
        g.once(|g| {
            for (j, x) in [(1, mean), (2, rstd), (3, sample)] {
                let (to, x) = (g.result(j), g.rounded(x, types[j]));
                g.put(to, channel.number, x);
            }
        });
        let [mean, rstd] = [mean, rstd].map(|x| g.rounded(x, dtype));
        let [w, b] = [1, 2].map(|i| {
            let of = g.operand(i);
            g.get(of, channel.number)
        });
        let y = g.result(0);
        channel.each(g, |g, at| {
            let x = g.get(x, at);
            let off = g.sub(x, mean);
            let normal = g.mul(off, rstd);
            let scaled = g.mul(normal, w);
            let value = g.add(scaled, b);
            g.put(y, at, value);
        });
    });
}

/// With x̂ = (x - mean) rstd: dw = Σ dy x̂, db = Σ dy, dx = w rstd (dy - db / n - x̂ dw / n).
pub(super) fn batch_norm_bwd(k: &mut Kernel<'_>, a: &BatchNormBwd) {
    let (shape, dtype) = (k.operands[1].shape().to_vec(), k.operands[1].dtype());
    let place = |i: usize| (a.mask[i] == 1).then(|| a.mask[..i].iter().sum::<i64>() as usize);
    let places = [0, 1, 2].map(place);
    channels(k, &shape, |g, channel, room| {
        let (dy, x) = (g.operand(0), g.operand(1));
        let [w, mean, rstd] = [2, 3, 4].map(|i| {
            let of = g.operand(i);
            g.get(of, channel.number)
        });
        let normal = |g: &mut Grid, at| {
            let x = g.get(x, at);
            let off = g.sub(x, mean);
            g.mul(off, rstd)
        };
        let [dw, db] = channel.sums(g, room, |g, at| {
            let (normal, dy) = (normal(g, at), g.get(dy, at));
            [g.mul(normal, dy), dy]
        });
        g.once(|g| {
            for (j, sum) in [(places[1], dw), (places[2], db)] {
                if let Some(j) = j {
                    let (to, sum) = (g.result(j), g.rounded(sum, dtype));
                    g.put(to, channel.number, sum);
                }
            }
        });
        let Some(j) = places[0] else { return };
        let n = g.float(channel.n as f64, Kind::F64);
        let [mean_gx, mean_g] = [dw, db].map(|sum| {
            let mean = g.b.divf(sum, n);
            g.rounded(mean, dtype)
        });
        let (scale, dx) = (g.mul(w, rstd), g.result(j));
        channel.each(g, |g, at| {
            let (normal, dy) = (normal(g, at), g.get(dy, at));
            let less = g.sub(dy, mean_g);
            let product = g.mul(normal, mean_gx);
            let less = g.sub(less, product);
            let value = g.mul(scale, less);
            g.put(dx, at, value);
        });
    });
}
