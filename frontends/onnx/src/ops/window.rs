//! Convolutions and pooling.

use super::inputs::{Inputs, Row, flag, op, op_with};
use ir::Attr;
use ir::op::OpKind;
use lower::{Call, Error, Ref, Result, Results, Rounding, Scalar, ensure, one};

pub(super) const OPS: &[Row] = &[
    op("Conv", convolution),
    op("ConvTranspose", transposed),
    op("MaxPool", max_pool),
    op("AveragePool", average_pool),
    op("LpPool", lp_pool),
    op("GlobalAveragePool", |c, x| global(c, x, OpKind::Mean)),
    op("GlobalMaxPool", |c, x| global(c, x, OpKind::Amax)),
    op("GlobalLpPool", global_lp_pool),
    op_with("MaxUnpool", &[2], max_unpool),
    op_with("Col2Im", &[1, 2], columns_to_images),
];

/// Elements before and after each dimension.
type Pads = Vec<(i64, i64)>;

/// How windows lie in the spatial dimensions of a tensor.
#[derive(Clone)]
struct Windows {
    kernel: Vec<i64>,
    stride: Vec<i64>,
    dilation: Vec<i64>,
    /// Elements before and after each dimension.
    pads: Pads,
    /// Elements after the padding, into which the last window reaches.
    extra: Vec<i64>,
}

/// The attributes of a convolution.
pub(super) fn attrs(
    dilation: &[i64],
    stride: &[i64],
    padding: &[i64],
    groups: i64,
) -> [(&'static str, Attr); 4] {
    [
        ("dilation", Attr::Ints(dilation.to_vec())),
        ("groups", Attr::Int(groups)),
        ("padding", Attr::Ints(padding.to_vec())),
        ("stride", Attr::Ints(stride.to_vec())),
    ]
}

fn spatial(shape: &[u64]) -> Result<Vec<i64>> {
    let inner = shape.get(2..).filter(|inner| !inner.is_empty());
    let inner = inner.ok_or("there are no images")?;
    let size = |&d: &u64| i64::try_from(d).ok().filter(|&d| d < 1 << 32);
    let sizes: Option<Vec<i64>> = inner.iter().map(size).collect();
    sizes.ok_or_else(|| "the images are too large".into())
}

impl Windows {
    /// The windows of a node over `sizes`; `kernel` is their size unless an attribute gives it.
    fn read(c: &mut Call<'_>, sizes: &[i64], kernel: &[i64]) -> Result<Windows> {
        let n = sizes.len();
        let kernel = c.ints_of("kernel_shape", n, kernel)?;
        let stride = c.ints_of("strides", n, &vec![1; n])?;
        let dilation = c.ints_of("dilations", n, &vec![1; n])?;
        let lists = [&kernel, &stride, &dilation];
        let fits =
            |list: &&Vec<i64>| list.len() == n && list.iter().all(|d| (1..1 << 28).contains(d));
        ensure(lists.iter().all(fits), "a window has no size")?;
        let reach: Vec<i64> = (0..n).map(|i| (kernel[i] - 1) * dilation[i] + 1).collect();
        let given = c.opt_ints("pads")?;
        let auto = c.string_or("auto_pad", "NOTSET")?;
        let pads = match auto.as_str() {
            "NOTSET" => match given {
                None => vec![(0, 0); n],
                Some(pads) => {
                    let fits = pads.len() == 2 * n && pads.iter().all(|p| (0..1 << 28).contains(p));
                    ensure(fits, "the paddings do not fit the windows")?;
                    (0..n).map(|i| (pads[i], pads[n + i])).collect()
                }
            },
            "VALID" => vec![(0, 0); n],
            "SAME_UPPER" | "SAME_LOWER" => {
                let total = |i: usize| {
                    let count = (sizes[i] + stride[i] - 1) / stride[i];
                    ((count - 1) * stride[i] + reach[i] - sizes[i]).max(0)
                };
                let halves = |t: i64| {
                    if auto == "SAME_UPPER" {
                        (t / 2, t - t / 2)
                    } else {
                        (t - t / 2, t / 2)
                    }
                };
                (0..n).map(|i| halves(total(i))).collect()
            }
            other => return Err(format!("no automatic padding {other}").into()),
        };
        Ok(Windows {
            kernel,
            stride,
            dilation,
            pads,
            extra: vec![0; n],
        })
    }

    /// The same with a last window that reaches over the border, if it starts before it.
    fn rounded_up(mut self, sizes: &[i64]) -> Windows {
        for (i, &size) in sizes.iter().enumerate() {
            let (before, after) = self.pads[i];
            let reach = (self.kernel[i] - 1) * self.dilation[i] + 1;
            let room = size + before + after - reach;
            let mut steps = (room + self.stride[i] - 1) / self.stride[i];
            if steps * self.stride[i] >= size + before {
                steps -= 1;
            }
            self.extra[i] = (steps * self.stride[i] - room).max(0);
        }
        self
    }

    /// True if nothing lies beside the tensor.
    fn is_inside(&self) -> bool {
        self.pads.iter().all(|&pad| pad == (0, 0)) && self.extra.iter().all(|&n| n == 0)
    }

    /// The same padding at both borders of each dimension, if it is.
    fn symmetric(&self) -> Option<Vec<i64>> {
        let one = |(&(before, after), &extra): (&(i64, i64), &i64)| {
            (before == after && extra == 0).then_some(before)
        };
        self.pads.iter().zip(&self.extra).map(one).collect()
    }

    /// `x` with a number around it, and the windows over it.
    fn pad(&self, c: &mut Call<'_>, x: Ref, value: Scalar) -> Result<(Ref, Windows)> {
        let mut inside = self.clone();
        if self.is_inside() {
            return Ok((x, inside));
        }
        let both = self.pads.iter().zip(&self.extra).rev();
        let pads: Vec<i64> = both
            .flat_map(|(&(before, after), &extra)| [before, after + extra])
            .collect();
        inside.pads.fill((0, 0));
        inside.extra.fill(0);
        Ok((c.pad(x, &pads, value)?, inside))
    }

    /// The number of windows along a dimension.
    fn count(&self, i: usize, size: i64) -> i64 {
        let reach = (self.kernel[i] - 1) * self.dilation[i] + 1;
        let room = size + self.pads[i].0 + self.pads[i].1 - reach;
        room.div_euclid(self.stride[i]) + 1
    }

    fn elements(&self) -> f64 {
        self.kernel.iter().map(|&k| k as f64).product()
    }

    /// The windows over some of the dimensions.
    fn over(&self, dims: std::ops::Range<usize>) -> Windows {
        Windows {
            kernel: self.kernel[dims.clone()].to_vec(),
            stride: self.stride[dims.clone()].to_vec(),
            dilation: self.dilation[dims.clone()].to_vec(),
            pads: self.pads[dims.clone()].to_vec(),
            extra: self.extra[dims].to_vec(),
        }
    }
}

// --- convolutions ---

fn convolution(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (x, w) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    let sizes = spatial(&c.shape_of(x))?;
    ensure(
        sizes.len() <= 2,
        "a convolution of more than two dimensions",
    )?;
    let kernel = spatial(&c.shape_of(w))?;
    let windows = Windows::read(c, &sizes, &kernel)?;
    let groups = c.int_or("group", 1)?;
    let bias = inputs.opt(c, 2)?;
    let (x, padding, windows) = match windows.symmetric() {
        Some(padding) => (x, padding, windows),
        None => {
            let (x, windows) = windows.pad(c, x, Scalar::Int(0))?;
            (x, vec![0; sizes.len()], windows)
        }
    };
    let attrs = attrs(&windows.dilation, &windows.stride, &padding, groups);
    let operands: Vec<Ref> = [x, w].into_iter().chain(bias).collect();
    one(c.step(OpKind::Convolution, &attrs, &operands)?)
}

fn transposed(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (x, w) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    let sizes = spatial(&c.shape_of(x))?;
    ensure(
        sizes.len() <= 2,
        "a convolution of more than two dimensions",
    )?;
    let kernel = spatial(&c.shape_of(w))?;
    let n = sizes.len();
    let wanted = c.opt_ints("output_shape")?;
    let more = c.ints_of("output_padding", n, &vec![0; n])?;
    let auto = c.string_or("auto_pad", "NOTSET")?;
    // The windows over the result, without padding.
    c.ignore(&["auto_pad"]);
    let windows = Windows::read_transposed(c, n, &kernel)?;
    let groups = c.int_or("group", 1)?;
    let bias = inputs.opt(c, 2)?;
    let (full, pads) = windows.result(&sizes, &more, wanted.as_deref(), &auto)?;

    let channels = c.shape_of(w)[1]
        .checked_mul(groups.max(1) as u64)
        .ok_or("too large")?;
    let mut shape = vec![c.shape_of(x)[0], channels];
    shape.extend(full.iter().map(|&d| d as u64));
    let attrs = attrs(&windows.dilation, &windows.stride, &vec![0; n], groups);
    let y = c.transposed_convolution(&attrs, [x, w], bias, &shape)?;
    if pads.iter().all(|&pad| pad == (0, 0)) {
        return one(y);
    }
    let cut: Vec<i64> = pads.iter().rev().flat_map(|&(a, b)| [-a, -b]).collect();
    one(c.pad(y, &cut, Scalar::Int(0))?)
}

impl Windows {
    /// The windows of a transposed convolution; `pads` are cut from its result.
    fn read_transposed(c: &mut Call<'_>, n: usize, kernel: &[i64]) -> Result<Windows> {
        let kernel = c.ints_of("kernel_shape", n, kernel)?;
        let stride = c.ints_of("strides", n, &vec![1; n])?;
        let dilation = c.ints_of("dilations", n, &vec![1; n])?;
        let lists = [&kernel, &stride, &dilation];
        let fits =
            |list: &&Vec<i64>| list.len() == n && list.iter().all(|d| (1..1 << 28).contains(d));
        ensure(lists.iter().all(fits), "a window has no size")?;
        let pads = match c.opt_ints("pads")? {
            None => vec![(0, 0); n],
            Some(pads) => {
                let fits = pads.len() == 2 * n && pads.iter().all(|p| (0..1 << 28).contains(p));
                ensure(fits, "the paddings do not fit the windows")?;
                (0..n).map(|i| (pads[i], pads[n + i])).collect()
            }
        };
        Ok(Windows {
            kernel,
            stride,
            dilation,
            pads,
            extra: vec![0; n],
        })
    }

    /// The sizes of a transposed convolution's result before it is cut, and what is cut.
    fn result(
        &self,
        sizes: &[i64],
        more: &[i64],
        wanted: Option<&[i64]>,
        auto: &str,
    ) -> Result<(Vec<i64>, Pads)> {
        let n = sizes.len();
        let fits = more
            .iter()
            .zip(&self.stride)
            .all(|(more, stride)| (0..*stride).contains(more));
        ensure(
            fits && more.len() == n,
            "the padding of the output does not fit the strides",
        )?;
        let full: Vec<i64> = (0..n)
            .map(|i| {
                let reach = (self.kernel[i] - 1) * self.dilation[i] + 1;
                self.stride[i] * (sizes[i] - 1) + reach + more[i]
            })
            .collect();
        let same = auto == "SAME_UPPER" || auto == "SAME_LOWER";
        let target: Vec<i64> = match wanted {
            Some(wanted) => wanted.to_vec(),
            None if same => (0..n).map(|i| sizes[i] * self.stride[i]).collect(),
            None => return Ok((full, self.pads.clone())),
        };
        let is_size = |d: &i64| (0..1 << 40).contains(d);
        ensure(
            target.len() == n && target.iter().all(is_size),
            "the shape of the output does not fit the input",
        )?;
        let halves = |i: usize| {
            let total = full[i] - target[i];
            let half = total.div_euclid(2);
            if auto == "SAME_UPPER" {
                (half, total - half)
            } else {
                (total - half, half)
            }
        };
        let pads = (0..n).map(halves).collect();
        Ok((full, pads))
    }
}

// --- pooling ---

fn max_pool(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let by_columns = flag(c, "storage_order", false)?;
    let ceil = flag(c, "ceil_mode", false)?;
    let x = inputs.at(c, 0)?;
    let shape = c.shape_of(x);
    let sizes = spatial(&shape)?;
    let mut windows = Windows::read(c, &sizes, &[])?;
    if ceil {
        windows = windows.rounded_up(&sizes);
    }
    if inputs.wants(1) {
        let (y, index) = maxima(c, x, &windows)?;
        let index = flat_index(c, index, &shape, &sizes, by_columns)?;
        return lower::all(vec![y, index]);
    }
    let (least, _) = lower::bounds(c.dtype(x));
    let fits = windows.symmetric().is_some_and(|padding| {
        padding
            .iter()
            .zip(&windows.kernel)
            .all(|(&p, &k)| 2 * p <= k)
    });
    let (x, windows) = if fits {
        (x, windows)
    } else {
        windows.pad(c, x, least)?
    };
    match sizes.len() {
        1 | 2 => one(maxima(c, x, &windows)?.0),
        // The maximum of a box is a maximum of maxima.
        3 => {
            let shape = c.shape_of(x);
            let rows = [shape[0] * shape[1], shape[2], shape[3], shape[4]];
            let x = c.reshape(x, &rows)?;
            let y = maxima(c, x, &windows.over(1..3))?.0;
            let inner = c.shape_of(y);
            let columns = inner[2] * inner[3];
            let y = c.reshape(y, &[rows[0], 1, rows[1], columns])?;
            let mut depth = windows.over(0..1);
            depth.widen();
            let y = maxima(c, y, &depth)?.0;
            let deep = c.shape_of(y)[2];
            one(c.reshape(y, &[shape[0], shape[1], deep, inner[2], inner[3]])?)
        }
        _ => Err("windows of more than three dimensions".into()),
    }
}

impl Windows {
    /// Adds a last dimension in which nothing happens.
    fn widen(&mut self) {
        self.kernel.push(1);
        self.stride.push(1);
        self.dilation.push(1);
        self.pads.push((0, 0));
        self.extra.push(0);
    }
}

/// The maxima of windows over one or two dimensions, and their places in the image.
fn maxima(c: &mut Call<'_>, x: Ref, windows: &Windows) -> Result<(Ref, Ref)> {
    let shape = c.shape_of(x);
    let mut windows = windows.clone();
    let mut x = x;
    if shape.len() == 3 {
        windows.widen();
        x = c.reshape(x, &[shape[0], shape[1], shape[2], 1])?;
    }
    let padding = windows
        .symmetric()
        .ok_or("the place of a maximum beside uneven padding")?;
    let attrs = [
        ("ceil", Attr::Bool(false)),
        ("dilation", Attr::Ints(windows.dilation)),
        ("kernel", Attr::Ints(windows.kernel)),
        ("padding", Attr::Ints(padding)),
        ("stride", Attr::Ints(windows.stride)),
    ];
    let mut made = c.steps(OpKind::MaxPool2d, &attrs, &[x])?;
    if shape.len() == 3 {
        for y in &mut made {
            let shape = c.shape_of(*y);
            *y = c.reshape(*y, &shape[..3])?;
        }
    }
    Ok((made[0], made[1]))
}

/// Places in images as places in the whole tensor, by rows or by columns.
fn flat_index(
    c: &mut Call<'_>,
    index: Ref,
    shape: &[u64],
    sizes: &[i64],
    by_columns: bool,
) -> Result<Ref> {
    let mut index = index;
    if let (true, &[height, width]) = (by_columns, sizes) {
        let whole = lower::Operand::Tensor(index);
        let width_of = lower::Operand::Scalar(Scalar::Int(width));
        let row = c.quotient(whole, width_of, ir::DType::I64, Rounding::Floor)?;
        let start = c.scalar_step(OpKind::MulScalar, row, Scalar::Int(width))?;
        let column = c.step(OpKind::Sub, &[], &[index, start])?;
        let column = c.scalar_step(OpKind::MulScalar, column, Scalar::Int(height))?;
        index = c.step(OpKind::Add, &[], &[column, row])?;
    }
    let size: i64 = sizes.iter().product();
    let images = shape[0] * shape[1];
    let first = c.arange(ir::DType::I64, images, Scalar::Int(0), Scalar::Int(size))?;
    let mut beside = vec![1; shape.len()];
    (beside[0], beside[1]) = (shape[0], shape[1]);
    let first = c.reshape(first, &beside)?;
    c.step(OpKind::Add, &[], &[index, first])
}

/// The sum of each window, as a convolution with ones.
fn sums(c: &mut Call<'_>, x: Ref, windows: &Windows) -> Result<Ref> {
    let (x, windows) = windows.pad(c, x, Scalar::Int(0))?;
    let shape = c.shape_of(x);
    let n = shape.len() - 2;
    let images = shape[0] * shape[1];
    let y = if n <= 2 {
        let x = c.reshape(x, &[&[images, 1], &shape[2..]].concat())?;
        ones(c, x, &windows)?
    } else {
        ensure(n == 3, "windows of more than three dimensions")?;
        // The sum over a box is a sum of sums.
        let x = c.reshape(x, &[images * shape[2], 1, shape[3], shape[4]])?;
        let y = ones(c, x, &windows.over(1..3))?;
        let inner = c.shape_of(y);
        let y = c.reshape(y, &[images, 1, shape[2], inner[2] * inner[3]])?;
        let mut depth = windows.over(0..1);
        depth.widen();
        let y = ones(c, y, &depth)?;
        let deep = c.shape_of(y)[2];
        c.reshape(y, &[images, 1, deep, inner[2], inner[3]])?
    };
    let inner = c.shape_of(y);
    c.reshape(y, &[&shape[..2], &inner[2..]].concat())
}

fn ones(c: &mut Call<'_>, x: Ref, windows: &Windows) -> Result<Ref> {
    let kernel: Vec<u64> = windows.kernel.iter().map(|&k| k as u64).collect();
    let ones = c.full(Scalar::Int(1), c.dtype(x), &[&[1, 1], &kernel[..]].concat())?;
    let padding = vec![0; kernel.len()];
    let attrs = attrs(&windows.dilation, &windows.stride, &padding, 1);
    c.step(OpKind::Convolution, &attrs, &[x, ones])
}

fn average_pool(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let ceil = flag(c, "ceil_mode", false)?;
    let counts_padding = flag(c, "count_include_pad", false)?;
    let x = inputs.at(c, 0)?;
    let shape = c.shape_of(x);
    let sizes = spatial(&shape)?;
    let mut windows = Windows::read(c, &sizes, &[])?;
    if ceil {
        windows = windows.rounded_up(&sizes);
    }
    let sum = sums(c, x, &windows)?;
    let has_extra = windows.extra.iter().any(|&n| n > 0);
    if windows.is_inside() || (counts_padding && !has_extra) {
        return one(c.scalar_step(OpKind::DivScalar, sum, Scalar::Float(windows.elements()))?);
    }
    // The number of elements of each window that count.
    let mut counted = [&[1, 1], &shape[2..]].concat();
    if counts_padding {
        for (size, pads) in counted[2..].iter_mut().zip(&mut windows.pads) {
            *size += (pads.0 + pads.1) as u64;
            *pads = (0, 0);
        }
    }
    let ones = c.full(Scalar::Int(1), c.dtype(x), &counted)?;
    let count = sums(c, ones, &windows)?;
    one(c.step(OpKind::Div, &[], &[sum, count])?)
}

/// The root of order p of a sum of powers.
fn lp_root(c: &mut Call<'_>, y: Ref, p: i64) -> Result<Ref> {
    match p {
        1 => Ok(y),
        2 => c.map(OpKind::Sqrt, y),
        _ => c.scalar_step(OpKind::PowScalar, y, Scalar::Float(1.0 / p as f64)),
    }
}

/// `|x|^p`
fn lp_power(c: &mut Call<'_>, x: Ref, p: i64) -> Result<Ref> {
    ensure(p >= 1, "no norm of this order")?;
    match p {
        1 => c.map(OpKind::Abs, x),
        2 => c.step(OpKind::Mul, &[], &[x, x]),
        _ => {
            let x = c.map(OpKind::Abs, x)?;
            c.scalar_step(OpKind::PowScalar, x, Scalar::Float(p as f64))
        }
    }
}

fn lp_pool(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (ceil, p) = (flag(c, "ceil_mode", false)?, c.int_or("p", 2)?);
    let x = inputs.at(c, 0)?;
    let sizes = spatial(&c.shape_of(x))?;
    let mut windows = Windows::read(c, &sizes, &[])?;
    if ceil {
        windows = windows.rounded_up(&sizes);
    }
    let x = lp_power(c, x, p)?;
    let sum = sums(c, x, &windows)?;
    one(lp_root(c, sum, p)?)
}

fn spatial_dims(c: &Call<'_>, x: Ref) -> Result<Vec<usize>> {
    let rank = c.rank(x);
    if rank > 2 {
        Ok((2..rank).collect())
    } else {
        Err(Error::from("there are no images"))
    }
}

fn global(c: &mut Call<'_>, inputs: &Inputs<'_>, op: OpKind) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let dims = spatial_dims(c, x)?;
    one(c.reduce(op, x, &dims, true)?)
}

fn global_lp_pool(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let p = c.int_or("p", 2)?;
    let x = inputs.at(c, 0)?;
    let dims = spatial_dims(c, x)?;
    let x = lp_power(c, x, p)?;
    let sum = c.reduce(OpKind::Sum, x, &dims, true)?;
    one(lp_root(c, sum, p)?)
}

// --- back to images ---

/// Zeros with the elements at the places that `MaxPool` gave.
fn max_unpool(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (x, index) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    let wanted = inputs.opt_ints(2)?;
    let shape = c.shape_of(x);
    let sizes = spatial(&shape)?;
    let windows = Windows::read(c, &sizes, &[])?;
    let mut made = shape[..2].to_vec();
    for (i, &size) in sizes.iter().enumerate() {
        let (before, after) = windows.pads[i];
        let size = (size - 1) * windows.stride[i] + windows.kernel[i] - before - after;
        made.push(u64::try_from(size).map_err(|_| Error::from("an image has no size"))?);
    }
    let numel = [c.ty(x).numel()];
    let (x, index) = (c.reshape(x, &numel)?, c.reshape(index, &numel)?);
    let zeros = c.full(Scalar::Int(0), c.dtype(x), &[lower::count(&made)?])?;
    let dim = [("dim", Attr::Int(0))];
    let y = c.step(OpKind::Scatter, &dim, &[zeros, index, x])?;
    let y = c.reshape(y, &made)?;
    let Some(wanted) = wanted else { return one(y) };
    ensure(
        wanted.len() == made.len(),
        "the shape of the output does not fit the input",
    )?;
    let both = wanted.iter().zip(&made).rev();
    let pad: Vec<i64> = both
        .flat_map(|(&wanted, &made)| [0, wanted.saturating_sub(made as i64)])
        .collect();
    one(c.pad(y, &pad, Scalar::Int(0))?)
}

/// Images whose elements are the sums of what lies there in the windows, which are columns.
fn columns_to_images(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (sizes, kernel) = (inputs.ints(1)?, inputs.ints(2)?);
    let n = sizes.len();
    let x = inputs.at(c, 0)?;
    let fits = |list: &[i64]| list.len() == n && list.iter().all(|d| (1..1 << 28).contains(d));
    ensure(fits(&sizes) && fits(&kernel), "a window has no size")?;
    c.ignore(&["kernel_shape", "auto_pad"]);
    let windows = Windows::read(c, &sizes, &kernel)?;
    let &[batch, rows, columns] = &c.shape_of(x)[..] else {
        return Err("the columns do not have three dimensions".into());
    };
    let counts: Vec<i64> = (0..n).map(|i| windows.count(i, sizes[i])).collect();
    ensure(
        counts.iter().all(|&n| n > 0),
        "a window does not fit the image",
    )?;
    let whole = |list: &[i64]| -> Result<u64> {
        let list: Vec<u64> = list.iter().map(|&d| d as u64).collect();
        lower::count(&list)
    };
    let (elements, places) = (whole(&kernel)?, whole(&counts)?);
    let fits = rows.is_multiple_of(elements) && columns == places;
    ensure(fits, "the columns do not fit the windows")?;
    let channels = rows / elements;
    // The place of each element of each window in the image with its padding.
    let padded: Vec<i64> = (0..n)
        .map(|i| sizes[i] + windows.pads[i].0 + windows.pads[i].1)
        .collect();
    let mut place = None;
    for i in 0..n {
        let inner = padded[i + 1..].iter().product::<i64>();
        for (dim, size, step) in [
            (i, kernel[i], windows.dilation[i]),
            (n + i, counts[i], windows.stride[i]),
        ] {
            let step = Scalar::Int(step.saturating_mul(inner));
            let at = c.arange(ir::DType::I64, size as u64, Scalar::Int(0), step)?;
            let mut beside = vec![1; 2 * n];
            beside[dim] = size as u64;
            let at = c.reshape(at, &beside)?;
            place = Some(match place {
                Some(place) => c.step(OpKind::Add, &[], &[place, at])?,
                None => at,
            });
        }
    }
    let place = place.ok_or("the images have no dimension")?;
    let place = c.reshape(place, &[elements * places])?;
    let images = batch * channels;
    let x = c.reshape(x, &[images, elements * places])?;
    let x = c.permute(x, &[1, 0])?;
    let zeros = c.full(Scalar::Int(0), c.dtype(x), &[whole(&padded)?, images])?;
    let put = [("accumulate", Attr::Bool(true))];
    let y = c.step(OpKind::IndexPut, &put, &[zeros, x, place])?;
    let y = c.permute(y, &[1, 0])?;
    let inner: Vec<u64> = padded.iter().map(|&d| d as u64).collect();
    let y = c.reshape(y, &[&[batch, channels], &inner[..]].concat())?;
    let cut = windows.pads.iter().rev();
    let cut: Vec<i64> = cut.flat_map(|&(a, b)| [-a, -b]).collect();
    one(c.pad(y, &cut, Scalar::Int(0))?)
}
