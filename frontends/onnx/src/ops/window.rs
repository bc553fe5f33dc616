//! Convolutions and pooling.

use super::inputs::{Inputs, Row, flag, op, op_with};
use ir::Attr;
use ir::op::OpKind;
use lower::{
    Call, Error, Ref, Result, Results, Rounding, Scalar, Windows, convolution_attrs, ensure, one,
    spatial,
};

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

/// The windows of a node over `sizes`; `kernel` is their size unless an attribute gives it.
fn read(c: &mut Call<'_>, sizes: &[i64], kernel: &[i64]) -> Result<Windows> {
    let n = sizes.len();
    let auto = c.string_or("auto_pad", "NOTSET")?;
    let mut windows = explicit(c, n, kernel)?;
    windows.pads = match auto.as_str() {
        "NOTSET" => windows.pads,
        "VALID" => vec![(0, 0); n],
        "SAME_UPPER" | "SAME_LOWER" => {
            let total = |i: usize| {
                let stride = windows.stride[i];
                let count = (sizes[i] + stride - 1) / stride;
                ((count - 1) * stride + windows.reach(i) - sizes[i]).max(0)
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
    Ok(windows)
}

/// The windows of a node with the padding that the attribute `pads` states.
fn explicit(c: &mut Call<'_>, n: usize, kernel: &[i64]) -> Result<Windows> {
    let kernel = c.ints_of("kernel_shape", n, kernel)?;
    let stride = c.ints_of("strides", n, &vec![1; n])?;
    let dilation = c.ints_of("dilations", n, &vec![1; n])?;
    let pads = match c.opt_ints("pads")? {
        None => vec![(0, 0); n],
        Some(pads) => {
            ensure(pads.len() == 2 * n, "the paddings do not fit the windows")?;
            (0..n).map(|i| (pads[i], pads[n + i])).collect()
        }
    };
    ensure(kernel.len() == n, "a window has no size")?;
    Windows::new(kernel, stride, dilation, pads)
}

// --- convolutions ---

fn convolution(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (x, w) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    let sizes = spatial(&c.shape_of(x))?;
    let kernel = spatial(&c.shape_of(w))?;
    let windows = read(c, &sizes, &kernel)?;
    let groups = c.int_or("group", 1)?;
    let bias = inputs.opt(c, 2)?;
    one(c.convolution([x, w], bias, &windows, groups)?)
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
    let windows = explicit(c, n, &kernel)?;
    let groups = c.int_or("group", 1)?;
    let bias = inputs.opt(c, 2)?;
    let (full, pads) = result(&windows, &sizes, &more, wanted.as_deref(), &auto)?;

    let channels = c.shape_of(w)[1]
        .checked_mul(groups.max(1) as u64)
        .ok_or("too large")?;
    let mut shape = vec![c.shape_of(x)[0], channels];
    shape.extend(full.iter().map(|&d| d as u64));
    let attrs = convolution_attrs(&windows.dilation, &windows.stride, &vec![0; n], groups);
    let y = c.transposed_convolution(&attrs, [x, w], bias, &shape)?;
    if pads.iter().all(|&pad| pad == (0, 0)) {
        return one(y);
    }
    let cut: Vec<i64> = pads.iter().rev().flat_map(|&(a, b)| [-a, -b]).collect();
    one(c.pad(y, &cut, Scalar::Int(0))?)
}

/// The sizes of a transposed convolution's result before it is cut, and what is cut.
fn result(
    windows: &Windows,
    sizes: &[i64],
    more: &[i64],
    wanted: Option<&[i64]>,
    auto: &str,
) -> Result<(Vec<i64>, Pads)> {
    let n = sizes.len();
    let fits = more
        .iter()
        .zip(&windows.stride)
        .all(|(more, stride)| (0..*stride).contains(more));
    ensure(
        fits && more.len() == n,
        "the padding of the output does not fit the strides",
    )?;
    let full: Vec<i64> = (0..n)
        .map(|i| windows.stride[i] * (sizes[i] - 1) + windows.reach(i) + more[i])
        .collect();
    let same = auto == "SAME_UPPER" || auto == "SAME_LOWER";
    let target: Vec<i64> = match wanted {
        Some(wanted) => wanted.to_vec(),
        None if same => (0..n).map(|i| sizes[i] * windows.stride[i]).collect(),
        None => return Ok((full, windows.pads.clone())),
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

// --- pooling ---

fn max_pool(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let by_columns = flag(c, "storage_order", false)?;
    let ceil = flag(c, "ceil_mode", false)?;
    let x = inputs.at(c, 0)?;
    let shape = c.shape_of(x);
    let sizes = spatial(&shape)?;
    let mut windows = read(c, &sizes, &[])?;
    if ceil {
        windows = windows.rounded_up(&sizes);
    }
    if inputs.wants(1) {
        let (y, index) = c.maxima(x, &windows)?;
        let index = flat_index(c, index, &shape, &sizes, by_columns)?;
        return lower::all(vec![y, index]);
    }
    one(c.max_pool(x, &windows)?)
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

fn average_pool(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let ceil = flag(c, "ceil_mode", false)?;
    let counts_padding = flag(c, "count_include_pad", false)?;
    let x = inputs.at(c, 0)?;
    let sizes = spatial(&c.shape_of(x))?;
    let mut windows = read(c, &sizes, &[])?;
    if ceil {
        windows = windows.rounded_up(&sizes);
    }
    one(c.average_pool(x, &windows, counts_padding)?)
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
    let mut windows = read(c, &sizes, &[])?;
    if ceil {
        windows = windows.rounded_up(&sizes);
    }
    let x = lp_power(c, x, p)?;
    let sum = c.window_sums(x, &windows)?;
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
    let windows = read(c, &sizes, &[])?;
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
    let windows = read(c, &sizes, &kernel)?;
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
