//! Convolutions and pooling.

use super::Family;
use ir::Attr;
use ir::op::OpKind;
use lower::{Call, Ref, Result, Results, Scalar, all, attr_ints, ensure, one};

pub(super) const OPS: Family = &[
    ("convolution", convolution),
    ("conv1d", convolution),
    ("conv2d", convolution),
    ("convolution_backward", convolution_backward),
    ("max_pool2d", |c| {
        Ok(max_pool(c)?.into_iter().take(1).collect())
    }),
    ("max_pool2d_with_indices", max_pool),
    ("max_pool2d_with_indices_backward", max_pool_backward),
    ("avg_pool2d", average_pool),
    ("avg_pool2d_backward", average_pool_backward),
    ("_adaptive_avg_pool2d", adaptive_average_pool),
    ("adaptive_avg_pool2d", adaptive_average_pool),
    (
        "_adaptive_avg_pool2d_backward",
        adaptive_average_pool_backward,
    ),
];

type NamedAttrs = Vec<(&'static str, Attr)>;

/// The attributes of a convolution with the weight `w`, and whether it is transposed.
fn attrs(c: &mut Call<'_>, w: Ref) -> Result<(NamedAttrs, bool)> {
    let n = c.rank(w).checked_sub(2);
    let n = n.ok_or("the weight has too few dimensions")?;
    let is_transposed = c.bool_or("transposed", false)?;
    let output_padding = c.ints_of("output_padding", n, &[])?;
    let is_padded = output_padding.iter().any(|&p| p != 0);
    ensure(is_transposed || !is_padded, "pads the output")?;
    let (ones, zeros) = (vec![1; n], vec![0; n]);
    let attrs = vec![
        ("dilation", Attr::Ints(c.ints_of("dilation", n, &ones)?)),
        ("groups", Attr::Int(c.int_or("groups", 1)?)),
        ("padding", Attr::Ints(c.ints_of("padding", n, &zeros)?)),
        ("stride", Attr::Ints(c.ints_of("stride", n, &ones)?)),
    ];
    Ok((attrs, is_transposed))
}

fn convolution(c: &mut Call<'_>) -> Result<Results> {
    let (x, w) = (c.tensor("input")?, c.tensor("weight")?);
    let bias = c.opt_tensor("bias")?;
    let (attrs, is_transposed) = attrs(c, w)?;
    if is_transposed {
        let shape = c.result()?.shape().to_vec();
        return one(c.transposed_convolution(&attrs, [x, w], bias, &shape)?);
    }
    let operands: Vec<Ref> = [x, w].into_iter().chain(bias).collect();
    one(c.step(OpKind::Convolution, &attrs, &operands)?)
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

impl Windows {
    /// Those of `avg_pool2d`.
    fn read(c: &mut Call<'_>) -> Result<Windows> {
        let kernel = c.ints_of("kernel_size", 2, &[])?;
        let stride = c.ints_of("stride", 2, &kernel)?;
        let padding = c.ints_of("padding", 2, &[0, 0])?;
        ensure(!c.bool_or("ceil_mode", false)?, EQUAL_WINDOWS)?;
        let counts = c.bool_or("count_include_pad", true)?;
        ensure(counts || padding == [0, 0], EQUAL_WINDOWS)?;
        let divisor = c.opt_int("divisor_override")?;
        ensure(
            divisor.is_none(),
            "divides by another number than the window's size",
        )?;
        let sizes = |list: &[i64]| -> Result<[u64; 2]> {
            let size = |i: usize| u64::try_from(list[i]).map_err(|_| "a negative size");
            Ok([size(0)?, size(1)?])
        };
        let windows = Windows {
            kernel: sizes(&kernel)?,
            stride: sizes(&stride)?,
            padding: sizes(&padding)?,
        };
        let positive = windows.kernel.iter().chain(&windows.stride).all(|&n| n > 0);
        ensure(positive, "a window without elements")?;
        Ok(windows)
    }

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

fn average_pool(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let windows = Windows::read(c)?;
    one(windows.average(c, x)?)
}

fn average_pool_backward(c: &mut Call<'_>) -> Result<Results> {
    let (dy, x) = (c.tensor("grad_output")?, c.tensor("self")?);
    let windows = Windows::read(c)?;
    one(windows.gradient(c, dy, x)?)
}

fn adaptive_average_pool(c: &mut Call<'_>) -> Result<Results> {
    let (x, size) = (c.tensor("self")?, c.ints("output_size")?);
    let size: Vec<u64> = size.iter().map(|&n| n.max(0) as u64).collect();
    let images = c.shape_of(x);
    if let ([.., rows, columns], [1, 1]) = (&images[..], &size[..])
        && rows * columns > 0
    {
        let rank = images.len();
        return one(c.reduce(OpKind::Mean, x, &[rank - 2, rank - 1], true)?);
    }
    one(Windows::adaptive(&images, &size)?.average(c, x)?)
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
