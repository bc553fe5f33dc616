//! Convolutions and pooling.

use super::Family;
use ir::op::OpKind;
use ir::{Attr, DType};
use lower::{
    Call, Indexed, Operand, Ref, Result, Results, Rounding, Scalar, all, attr_ints, count, ensure,
    one,
};

pub(super) const OPS: Family = &[
    ("convolution", convolution),
    ("conv1d", convolution),
    ("conv1d.padding", padded_convolution),
    ("conv2d", convolution),
    ("conv2d.padding", padded_convolution),
    ("conv_transpose1d", |c| transposed_convolution(c, 1)),
    ("conv_transpose2d", |c| transposed_convolution(c, 2)),
    ("convolution_backward", convolution_backward),
    ("max_unpool2d", max_unpool),
    ("max_pool1d_with_indices", |c| {
        let x = c.tensor("self")?;
        let x = batch(c, x, 1)?;
        ensure(!c.bool_or("ceil_mode", false)?, "windows beyond the end")?;
        let windows = windows(c, 1)?;
        let (y, places) = c.maxima(x, &windows)?;
        let shape = c.result()?.shape();
        all(vec![c.reshape(y, shape)?, c.reshape(places, shape)?])
    }),
    ("max_pool1d", |c| maxima_of_windows(c, 1)),
    ("max_pool2d", |c| {
        Ok(max_pool(c)?.into_iter().take(1).collect())
    }),
    ("max_pool3d", |c| maxima_of_windows(c, 3)),
    ("max_pool2d_with_indices", max_pool),
    ("max_pool2d_with_indices_backward", max_pool_backward),
    ("avg_pool1d", |c| average_pool(c, 1)),
    ("avg_pool2d", |c| average_pool(c, 2)),
    ("avg_pool3d", |c| average_pool(c, 3)),
    ("avg_pool2d_backward", average_pool_backward),
    ("adaptive_avg_pool1d", adaptive_average_pool),
    ("_adaptive_avg_pool2d", adaptive_average_pool),
    ("adaptive_avg_pool2d", adaptive_average_pool),
    ("adaptive_max_pool1d", |c| adaptive_max_pool(c, 1)),
    ("adaptive_max_pool2d", |c| adaptive_max_pool(c, 2)),
    (
        "_adaptive_avg_pool2d_backward",
        adaptive_average_pool_backward,
    ),
];

type NamedAttrs = Vec<(&'static str, Attr)>;

/// The number of dimensions of a convolution's images.
fn n_spatial(c: &Call<'_>, w: Ref) -> Result<usize> {
    let n = c.rank(w).checked_sub(2);
    n.ok_or_else(|| "the weight has too few dimensions".into())
}

/// The attributes of a convolution with the weight `w`, and whether it is transposed.
fn attrs(c: &mut Call<'_>, w: Ref) -> Result<(NamedAttrs, bool)> {
    let n = n_spatial(c, w)?;
    let is_transposed = c.bool_or("transposed", false)?;
    let (attrs, is_padded) = window_attrs(c, n)?;
    ensure(is_transposed || !is_padded, "pads the output")?;
    Ok((attrs, is_transposed))
}

/// The attributes of windows over `n` dimensions, and whether the output is padded.
fn window_attrs(c: &mut Call<'_>, n: usize) -> Result<(NamedAttrs, bool)> {
    let output_padding = c.ints_of("output_padding", n, &[])?;
    let is_padded = output_padding.iter().any(|&p| p != 0);
    let (ones, zeros) = (vec![1; n], vec![0; n]);
    let attrs = vec![
        ("dilation", Attr::Ints(c.ints_of("dilation", n, &ones)?)),
        ("groups", Attr::Int(c.int_or("groups", 1)?)),
        ("padding", Attr::Ints(c.ints_of("padding", n, &zeros)?)),
        ("stride", Attr::Ints(c.ints_of("stride", n, &ones)?)),
    ];
    Ok((attrs, is_padded))
}

/// A batch for `n` dimensions of images: images without one become a batch of one.
fn batch(c: &mut Call<'_>, x: Ref, n: usize) -> Result<Ref> {
    let shape = c.shape_of(x);
    if shape.len() == n + 1 {
        c.reshape(x, &[&[1], &shape[..]].concat())
    } else {
        Ok(x)
    }
}

/// The operands of a convolution, with a batch.
fn operands(c: &mut Call<'_>) -> Result<([Ref; 2], Option<Ref>)> {
    let (x, w) = (c.tensor("input")?, c.tensor("weight")?);
    let n = n_spatial(c, w)?;
    Ok(([batch(c, x, n)?, w], c.opt_tensor("bias")?))
}

/// A result without a batch that was added.
fn as_declared(c: &mut Call<'_>, y: Ref) -> Result<Results> {
    let shape = c.result()?.shape();
    one(c.reshape(y, shape)?)
}

fn convolution(c: &mut Call<'_>) -> Result<Results> {
    let ([x, w], bias) = operands(c)?;
    let (attrs, is_transposed) = attrs(c, w)?;
    if is_transposed {
        let shape = c.result()?.shape().to_vec();
        return one(c.transposed_convolution(&attrs, [x, w], bias, &shape)?);
    }
    let operands: Vec<Ref> = [x, w].into_iter().chain(bias).collect();
    let y = c.step(OpKind::Convolution, &attrs, &operands)?;
    as_declared(c, y)
}

/// A convolution whose padding is a word.
fn padded_convolution(c: &mut Call<'_>) -> Result<Results> {
    let ([x, w], bias) = operands(c)?;
    let n = n_spatial(c, w)?;
    let stride = c.ints_of("stride", n, &vec![1; n])?;
    let dilation = c.ints_of("dilation", n, &vec![1; n])?;
    let groups = c.int_or("groups", 1)?;
    let kernel = lower::spatial(&c.shape_of(w))?;
    let pads = vec![(0, 0); n];
    let mut windows = lower::Windows::new(kernel, stride, dilation, pads)?;
    match c.string_or("padding", "valid")?.as_str() {
        "valid" => (),
        // The longer part comes after the images.
        "same" => {
            let total = |i: usize| windows.reach(i) - 1;
            windows.pads = (0..n)
                .map(|i| (total(i) / 2, total(i) - total(i) / 2))
                .collect();
        }
        other => return Err(format!("no padding {other}").into()),
    }
    let y = c.convolution([x, w], bias, &windows, groups)?;
    as_declared(c, y)
}

fn transposed_convolution(c: &mut Call<'_>, n: usize) -> Result<Results> {
    let ([x, w], bias) = operands(c)?;
    let (attrs, _) = window_attrs(c, n)?;
    let mut shape = c.result()?.shape().to_vec();
    if shape.len() == n + 1 {
        shape.insert(0, 1);
    }
    let y = c.transposed_convolution(&attrs, [x, w], bias, &shape)?;
    as_declared(c, y)
}

fn convolution_backward(c: &mut Call<'_>) -> Result<Results> {
    let dy = c.tensor("grad_output")?;
    let (x, w) = (c.tensor("input")?, c.tensor("weight")?);
    c.ignore(&["bias_sizes"]);
    let (attrs, is_transposed) = attrs(c, w)?;
    let mask = c.bools("output_mask")?;
    ensure(mask.len() == 3, "output_mask has another length")?;
    if !is_transposed {
        return c.masked_steps(OpKind::ConvolutionBwd, &attrs, &mask, &[dy, x, w]);
    }
    // The operand and its gradient change places.
    let mut made = vec![None; 3];
    if mask[0] {
        made[0] = Some(c.step(OpKind::Convolution, &attrs, &[dy, w])?);
    }
    if mask[1] {
        let attrs = with_mask(&attrs, [false, true, false]);
        made[1] = Some(c.step(OpKind::ConvolutionBwd, &attrs, &[x, dy, w])?);
    }
    if mask[2] {
        let dims: Vec<usize> = (0..c.rank(dy)).filter(|&dim| dim != 1).collect();
        made[2] = Some(c.reduce(OpKind::Sum, dy, &dims, false)?);
    }
    Ok(made)
}

fn with_mask(attrs: &NamedAttrs, mask: [bool; 3]) -> NamedAttrs {
    let mask = Attr::Ints(mask.map(i64::from).to_vec());
    let mut attrs = attrs.clone();
    attrs.push(("mask", mask));
    attrs.sort_by_key(|(key, _)| *key);
    attrs
}

// --- pooling ---

fn pooling(c: &mut Call<'_>) -> Result<NamedAttrs> {
    let kernel = c.ints_of("kernel_size", 2, &[])?;
    Ok(vec![
        ("ceil", Attr::Bool(c.bool_or("ceil_mode", false)?)),
        ("dilation", Attr::Ints(c.ints_of("dilation", 2, &[1, 1])?)),
        ("padding", Attr::Ints(c.ints_of("padding", 2, &[0, 0])?)),
        ("stride", Attr::Ints(c.ints_of("stride", 2, &kernel)?)),
        ("kernel", Attr::Ints(kernel)),
    ])
}

fn max_pool(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let attrs = pooling(c)?;
    let is_single = c.rank(x) == 3;
    let x = c.images(x)?;
    let mut made = c.steps(OpKind::MaxPool2d, &attrs, &[x])?;
    for y in &mut made {
        let shape = c.shape_of(*y);
        *y = c.reshape(*y, if is_single { &shape[1..] } else { &shape })?;
    }
    all(made)
}

fn max_pool_backward(c: &mut Call<'_>) -> Result<Results> {
    let (dy, x) = (c.tensor("grad_output")?, c.tensor("self")?);
    let index = c.tensor("indices")?;
    let mut attrs = pooling(c)?;
    let shape = c.shape_of(x);
    let (dy, index) = (c.images(dy)?, c.images(index)?);
    let full = if shape.len() == 3 {
        [&[1], &shape[..]].concat()
    } else {
        shape.clone()
    };
    attrs.push(("shape", attr_ints(&full)?));
    let dx = c.step(OpKind::MaxPool2dBwd, &attrs, &[dy, index])?;
    one(c.reshape(dx, &shape)?)
}

const EQUAL_WINDOWS: &str = "averages of windows of different sizes are not known";

/// Windows of an average: kernel, stride and padding of rows and columns. Padding counts as zeros.
struct Windows {
    kernel: [u64; 2],
    stride: [u64; 2],
    padding: [u64; 2],
}

/// The arguments of an average over windows.
struct Averages {
    windows: lower::Windows,
    rounds_up: bool,
    counts_padding: bool,
}

/// Kernel, stride, padding and dilation of pooling over `n` dimensions.
fn windows(c: &mut Call<'_>, n: usize) -> Result<lower::Windows> {
    let kernel = c.ints_of("kernel_size", n, &[])?;
    let stride = c.ints_of("stride", n, &kernel)?;
    let padding = c.ints_of("padding", n, &vec![0; n])?;
    let dilation = c.ints_of("dilation", n, &vec![1; n])?;
    let pads = padding.into_iter().map(|p| (p, p)).collect();
    lower::Windows::new(kernel, stride, dilation, pads)
}

impl Averages {
    fn read(c: &mut Call<'_>, n: usize) -> Result<Averages> {
        let divisor = c.opt_int("divisor_override")?;
        ensure(
            divisor.is_none(),
            "divides by another number than the window's size",
        )?;
        Ok(Averages {
            windows: windows(c, n)?,
            rounds_up: c.bool_or("ceil_mode", false)?,
            counts_padding: c.bool_or("count_include_pad", true)?,
        })
    }

    /// The windows over rows and columns, if all have the same number of elements.
    fn equal(&self) -> Result<Windows> {
        ensure(!self.rounds_up, EQUAL_WINDOWS)?;
        let lower::Windows {
            kernel,
            stride,
            pads,
            ..
        } = &self.windows;
        let padding: Vec<i64> = pads.iter().map(|&(before, _)| before).collect();
        ensure(
            self.counts_padding || padding.iter().all(|&p| p == 0),
            EQUAL_WINDOWS,
        )?;
        ensure(kernel.len() == 2, EQUAL_WINDOWS)?;
        let sizes = |list: &[i64]| -> Result<[u64; 2]> {
            let size = |i: usize| u64::try_from(list[i]).map_err(|_| "a negative size");
            Ok([size(0)?, size(1)?])
        };
        Ok(Windows {
            kernel: sizes(kernel)?,
            stride: sizes(stride)?,
            padding: sizes(&padding)?,
        })
    }
}

impl Windows {
    /// Those of an adaptive average from images of one size to images of another, if they are
    /// equal.
    fn adaptive(images: &[u64], size: &[u64]) -> Result<Windows> {
        let [.., rows, columns] = images[..] else {
            return Err("has too few dimensions".into());
        };
        let &[out_rows, out_columns] = size else {
            return Err("the size of images has two numbers".into());
        };
        let is_multiple = |n: u64, of: u64| of > 0 && n.is_multiple_of(of);
        let equal = is_multiple(rows, out_rows) && is_multiple(columns, out_columns);
        ensure(equal, EQUAL_WINDOWS)?;
        let kernel = [rows / out_rows, columns / out_columns];
        ensure(kernel.iter().all(|&n| n > 0), "a window without elements")?;
        Ok(Windows {
            kernel,
            stride: kernel,
            padding: [0, 0],
        })
    }

    fn elements(&self) -> f64 {
        self.kernel[0] as f64 * self.kernel[1] as f64
    }

    /// True if windows lie side by side and cover images with this many rows and columns.
    fn tile(&self, rows: u64, columns: u64) -> bool {
        self.stride == self.kernel
            && self.padding == [0, 0]
            && rows.is_multiple_of(self.kernel[0])
            && columns.is_multiple_of(self.kernel[1])
    }

    /// The convolution that averages each channel: its attributes and its weight.
    fn convolution(&self, c: &mut Call<'_>, x: Ref) -> Result<(NamedAttrs, Ref)> {
        let channels = c.shape_of(x)[1];
        let weight = [channels, 1, self.kernel[0], self.kernel[1]];
        let part = Scalar::Float(self.elements().recip());
        let attrs = vec![
            ("dilation", Attr::Ints(vec![1, 1])),
            ("groups", Attr::Int(channels as i64)),
            ("padding", attr_ints(&self.padding)?),
            ("stride", attr_ints(&self.stride)?),
        ];
        Ok((attrs, c.full(part, c.dtype(x), &weight)?))
    }

    fn average(&self, c: &mut Call<'_>, x: Ref) -> Result<Ref> {
        let wanted = c.result()?.shape().to_vec();
        let x = c.images(x)?;
        let shape = c.shape_of(x);
        let [images, channels, rows, columns] = shape[..] else {
            return Err("has too few dimensions".into());
        };
        let y = if self.tile(rows, columns) {
            let [height, width] = self.kernel;
            let tiles = [
                images * channels,
                rows / height,
                height,
                columns / width,
                width,
            ];
            let x = c.reshape(x, &tiles)?;
            c.reduce(OpKind::Mean, x, &[2, 4], false)?
        } else {
            let (attrs, weight) = self.convolution(c, x)?;
            c.step(OpKind::Convolution, &attrs, &[x, weight])?
        };
        c.reshape(y, &wanted)
    }

    fn gradient(&self, c: &mut Call<'_>, dy: Ref, x: Ref) -> Result<Ref> {
        let wanted = c.shape_of(x);
        let (dy, x) = (c.images(dy)?, c.images(x)?);
        let shape = c.shape_of(x);
        let [images, channels, rows, columns] = shape[..] else {
            return Err("has too few dimensions".into());
        };
        let dx = if self.tile(rows, columns) {
            let [height, width] = self.kernel;
            let (down, right) = (rows / height, columns / width);
            let dy = c.scalar_step(OpKind::DivScalar, dy, Scalar::Float(self.elements()))?;
            let dy = c.reshape(dy, &[images * channels, down, 1, right, 1])?;
            c.expand(dy, &[images * channels, down, height, right, width])?
        } else {
            let (attrs, weight) = self.convolution(c, x)?;
            let attrs = with_mask(&attrs, [true, false, false]);
            c.step(OpKind::ConvolutionBwd, &attrs, &[dy, x, weight])?
        };
        c.reshape(dx, &wanted)
    }
}

fn average_pool(c: &mut Call<'_>, n: usize) -> Result<Results> {
    let x = c.tensor("self")?;
    let averages = Averages::read(c, n)?;
    if let Ok(windows) = averages.equal() {
        return one(windows.average(c, x)?);
    }
    let x = batch(c, x, n)?;
    let sizes = lower::spatial(&c.shape_of(x))?;
    let mut windows = averages.windows;
    if averages.rounds_up {
        windows = windows.rounded_up(&sizes);
    }
    let y = c.average_pool(x, &windows, averages.counts_padding)?;
    as_declared(c, y)
}

fn average_pool_backward(c: &mut Call<'_>) -> Result<Results> {
    let (dy, x) = (c.tensor("grad_output")?, c.tensor("self")?);
    let windows = Averages::read(c, 2)?.equal()?;
    one(windows.gradient(c, dy, x)?)
}

/// Maxima without their places.
fn maxima_of_windows(c: &mut Call<'_>, n: usize) -> Result<Results> {
    let x = c.tensor("self")?;
    let x = batch(c, x, n)?;
    let mut windows = windows(c, n)?;
    if c.bool_or("ceil_mode", false)? {
        let sizes = lower::spatial(&c.shape_of(x))?;
        windows = windows.rounded_up(&sizes);
    }
    let y = c.max_pool(x, &windows)?;
    as_declared(c, y)
}

/// For each place of the result, the elements from `start` to `end` of each dimension: equal
/// windows if the sizes are multiples.
fn adaptive_max_pool(c: &mut Call<'_>, n: usize) -> Result<Results> {
    let x = c.tensor("self")?;
    let x = batch(c, x, n)?;
    let wanted = c.ints_of("output_size", n, &[])?;
    let sizes = lower::spatial(&c.shape_of(x))?;
    ensure(sizes.len() == n && wanted.len() == n, "has another rank")?;
    let fits = |(&size, &wanted): (&i64, &i64)| wanted > 0 && size % wanted == 0;
    if !sizes.iter().zip(&wanted).all(fits) {
        return uneven_maxima(c, x, &sizes, &wanted);
    }
    let kernel: Vec<i64> = sizes.iter().zip(&wanted).map(|(n, m)| n / m).collect();
    let windows = lower::Windows::new(kernel.clone(), kernel, vec![1; n], vec![(0, 0); n])?;
    let (y, places) = c.maxima(x, &windows)?;
    let shape = c.result()?.shape();
    all(vec![c.reshape(y, shape)?, c.reshape(places, shape)?])
}

/// Maxima at their places in larger images, which are 0 elsewhere.
fn max_unpool(c: &mut Call<'_>) -> Result<Results> {
    let (x, places) = (c.tensor("self")?, c.tensor("indices")?);
    c.ignore(&["output_size"]);
    let (given, made) = (c.shape_of(x), c.result()?.shape());
    ensure(
        given.len() >= 2 && made.len() == given.len(),
        "has another rank",
    )?;
    let flat = |shape: &[u64]| {
        let (lead, images) = shape.split_at(shape.len() - 2);
        Ok([count(lead)?, count(images)?])
    };
    let (from, to): (Result<[u64; 2]>, Result<[u64; 2]>) = (flat(&given), flat(made));
    let (from, to) = (from?, to?);
    let (x, places) = (c.reshape(x, &from)?, c.reshape(places, &from)?);
    let zeros = c.full(Scalar::Int(0), c.dtype(x), &to)?;
    let y = c.step(
        OpKind::Scatter,
        &[("dim", Attr::Int(1))],
        &[zeros, places, x],
    )?;
    one(c.reshape(y, made)?)
}

/// Maxima of windows of different sizes, and their places. A window has its elements in a dimension
/// of its own, the last of them several times.
fn uneven_maxima(c: &mut Call<'_>, x: Ref, sizes: &[i64], wanted: &[i64]) -> Result<Results> {
    let (mut y, first) = (x, c.rank(x) - sizes.len());
    // The place of each element of each window: `[windows.., elements..]`.
    let mut place: Option<Ref> = None;
    let n = sizes.len();
    for (d, (&old, &new)) in sizes.iter().zip(wanted).enumerate() {
        let fits = (1..1 << 20).contains(&new) && (1..1 << 20).contains(&old);
        ensure(fits, "windows of this size")?;
        let at = uneven_windows(c, old, new)?;
        let most = c.shape_of(at)[1];
        y = Indexed::along(c, y, first + 2 * d, at)?.get(c)?;
        let mut shape = c.shape_of(y);
        shape[first + 2 * d] = new as u64;
        shape.insert(first + 2 * d + 1, most);
        y = c.reshape(y, &shape)?;

        let mut own = vec![1; 2 * n];
        (own[d], own[n + d]) = (new as u64, most);
        let own = c.reshape(at, &own)?;
        place = Some(match place {
            None => own,
            Some(place) => {
                let rows = c.scalar_step(OpKind::MulScalar, place, Scalar::Int(old))?;
                c.step(OpKind::Add, &[], &[rows, own])?
            }
        });
    }
    let lead = 0..first;
    let windows = (0..n).map(|d| first + 2 * d);
    let elements = (0..n).map(|d| first + 2 * d + 1);
    let order: Vec<usize> = lead.chain(windows).chain(elements).collect();
    let y = c.permute(y, &order)?;
    let mut shape = c.shape_of(y);
    let inner = count(&shape.split_off(first + n))?;
    shape.push(inner);
    let y = c.reshape(y, &shape)?;
    let found = c.topk(y, first + n, 1, true)?;
    let place = place.ok_or("has no dimension")?;
    let place = c.reshape(place, &shape[first..])?;
    let place = c.expand(place, &shape)?;
    let dim = Attr::Int((first + n) as i64);
    let place = c.step(OpKind::Gather, &[("dim", dim)], &[place, found[1]])?;
    let shape = c.result()?.shape();
    all(vec![c.reshape(found[0], shape)?, c.reshape(place, shape)?])
}

/// The elements of each window of a dimension, `[windows, elements]`: from `i old / new`, rounded
/// down, up to `(i + 1) old / new`, rounded up.
fn uneven_windows(c: &mut Call<'_>, old: i64, new: i64) -> Result<Ref> {
    let bounds = |i: i64| (i * old / new, ((i + 1) * old + new - 1) / new);
    let most = (0..new)
        .map(|i| bounds(i).1 - bounds(i).0)
        .max()
        .unwrap_or(1);
    let window = c.arange(DType::I64, new as u64, Scalar::Int(0), Scalar::Int(1))?;
    let mut divided = |more: i64, plus: i64| {
        let next = c.scalar_step(OpKind::AddScalar, window, Scalar::Int(more))?;
        let far = c.scalar_step(OpKind::MulScalar, next, Scalar::Int(old))?;
        let far = c.scalar_step(OpKind::AddScalar, far, Scalar::Int(plus))?;
        let by = Operand::Scalar(Scalar::Int(new));
        let at = c.quotient(Operand::Tensor(far), by, DType::I64, Rounding::Floor)?;
        c.reshape(at, &[new as u64, 1])
    };
    let (start, end) = (divided(0, 0)?, divided(1, new - 1)?);
    let within = c.arange(DType::I64, most as u64, Scalar::Int(0), Scalar::Int(1))?;
    let at = c.step(OpKind::Add, &[], &[start, within])?;
    let last = c.scalar_step(OpKind::AddScalar, end, Scalar::Int(-1))?;
    c.step(OpKind::Minimum, &[], &[at, last])
}

fn adaptive_average_pool(c: &mut Call<'_>) -> Result<Results> {
    let (x, size) = (c.tensor("self")?, c.ints("output_size")?);
    let size: Vec<u64> = size.iter().map(|&n| n.max(0) as u64).collect();
    let images = c.shape_of(x);
    let n = size.len();
    ensure(images.len() >= n, "has too few dimensions")?;
    let first = images.len() - n;
    let inner = &images[first..];
    if size.iter().all(|&n| n == 1) && inner.iter().all(|&n| n > 0) {
        let dims: Vec<usize> = (first..images.len()).collect();
        return one(c.reduce(OpKind::Mean, x, &dims, true)?);
    }
    if let (2, Ok(windows)) = (n, Windows::adaptive(&images, &size)) {
        return one(windows.average(c, x)?);
    }
    let mut y = x;
    for (i, (&old, &new)) in inner.iter().zip(&size).enumerate() {
        y = averaged(c, y, first + i, old, new)?;
    }
    one(y)
}

/// Means of neighbours along a dimension, from `floor(i old / new)` up to `ceil((i + 1) old /
/// new)`, as a product with the matrix of their weights.
fn averaged(c: &mut Call<'_>, x: Ref, dim: usize, old: u64, new: u64) -> Result<Ref> {
    ensure(old > 0 && new > 0, "a window without elements")?;
    ensure(old < 1 << 20 && new < 1 << 20, "too large")?;
    let dtype = c.dtype(x);
    // Element j counts for result i if (j + 1) new > i old and j new < (i + 1) old.
    let element = c.arange(DType::I64, old, Scalar::Int(0), Scalar::Int(new as i64))?;
    let element = c.reshape(element, &[old, 1])?;
    let place = c.arange(DType::I64, new, Scalar::Int(0), Scalar::Int(old as i64))?;
    let next = c.scalar_step(OpKind::AddScalar, element, Scalar::Int(new as i64))?;
    let end = c.scalar_step(OpKind::AddScalar, place, Scalar::Int(old as i64))?;
    let starts = c.step(OpKind::Gt, &[], &[next, place])?;
    let ends = c.step(OpKind::Lt, &[], &[element, end])?;
    let counts = c.step(OpKind::LogicalAnd, &[], &[starts, ends])?;
    let counts = c.cast(counts, dtype)?;
    let n = c.reduce(OpKind::Sum, counts, &[0], true)?;
    let weights = c.step(OpKind::Div, &[], &[counts, n])?;
    c.along(x, dim, weights)
}

fn adaptive_average_pool_backward(c: &mut Call<'_>) -> Result<Results> {
    let (dy, x) = (c.tensor("grad_output")?, c.tensor("self")?);
    let (images, made) = (c.shape_of(x), c.shape_of(dy));
    let size = made.len().checked_sub(2).map(|from| &made[from..]);
    let size = size.ok_or("has too few dimensions")?;
    if let ([.., rows, columns], [1, 1]) = (&images[..], size) {
        let n = rows.checked_mul(*columns).ok_or("too large")? as f64;
        let dy = c.scalar_step(OpKind::DivScalar, dy, Scalar::Float(n))?;
        return one(c.expand(dy, &images)?);
    }
    one(Windows::adaptive(&images, size)?.gradient(c, dy, x)?)
}
