//! Windows over images: convolutions and pooling, in any number of dimensions that the ops allow.

use crate::call::Attrs;
use crate::{Call, Ref, Result, Scalar, ensure};
use ir::Attr;
use ir::op::OpKind;

/// How windows lie in the spatial dimensions of a tensor.
#[derive(Clone, PartialEq, Debug)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub struct Windows {
    pub kernel: Vec<i64>,
    pub stride: Vec<i64>,
    pub dilation: Vec<i64>,
    /// Elements before and after each dimension.
    pub pads: Vec<(i64, i64)>,
    /// Elements after the padding, into which the last window reaches.
    extra: Vec<i64>,
}

/// The attributes of a convolution.
pub fn convolution_attrs(
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

/// The sizes of images `[N,C,..]`.
pub fn spatial(shape: &[u64]) -> Result<Vec<i64>> {
    let inner = shape.get(2..).filter(|inner| !inner.is_empty());
    let inner = inner.ok_or("there are no images")?;
    let size = |&d: &u64| i64::try_from(d).ok().filter(|&d| d < 1 << 32);
    let sizes: Option<Vec<i64>> = inner.iter().map(size).collect();
    sizes.ok_or_else(|| "the images are too large".into())
}

impl Windows {
    /// Windows of which each list has a number for each dimension.
    pub fn new(
        kernel: Vec<i64>,
        stride: Vec<i64>,
        dilation: Vec<i64>,
        pads: Vec<(i64, i64)>,
    ) -> Result<Windows> {
        let n = kernel.len();
        let lists = [&kernel, &stride, &dilation];
        let fits =
            |list: &&Vec<i64>| list.len() == n && list.iter().all(|d| (1..1 << 28).contains(d));
        ensure(lists.iter().all(fits), "a window has no size")?;
        let is_small = |p: i64| (0..1 << 28).contains(&p);
        let fits = pads.len() == n && pads.iter().all(|&(a, b)| is_small(a) && is_small(b));
        ensure(fits, "the paddings do not fit the windows")?;
        Ok(Windows {
            extra: vec![0; n],
            kernel,
            stride,
            dilation,
            pads,
        })
    }

    /// The elements from the first to the last that a window sees along a dimension.
    pub fn reach(&self, i: usize) -> i64 {
        (self.kernel[i] - 1) * self.dilation[i] + 1
    }

    /// The same with a last window that reaches over the border, if it starts before it.
    pub fn rounded_up(mut self, sizes: &[i64]) -> Windows {
        for (i, &size) in sizes.iter().enumerate() {
            let (before, after) = self.pads[i];
            let room = size + before + after - self.reach(i);
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
    pub fn symmetric(&self) -> Option<Vec<i64>> {
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
    pub fn count(&self, i: usize, size: i64) -> i64 {
        let room = size + self.pads[i].0 + self.pads[i].1 - self.reach(i);
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

    /// Adds a last dimension in which nothing happens.
    fn widen(&mut self) {
        self.kernel.push(1);
        self.stride.push(1);
        self.dilation.push(1);
        self.pads.push((0, 0));
        self.extra.push(0);
    }
}

// --- convolutions ---

impl Call<'_> {
    /// A convolution, whose padding may differ at the two borders of a dimension.
    pub fn convolution(
        &mut self,
        [x, w]: [Ref; 2],
        bias: Option<Ref>,
        windows: &Windows,
        groups: i64,
    ) -> Result<Ref> {
        ensure(
            windows.kernel.len() <= 2,
            "a convolution of more than two dimensions",
        )?;
        let (x, padding) = match windows.symmetric() {
            Some(padding) => (x, padding),
            None => {
                let (x, _) = windows.pad(self, x, Scalar::Int(0))?;
                (x, vec![0; windows.kernel.len()])
            }
        };
        let attrs = convolution_attrs(&windows.dilation, &windows.stride, &padding, groups);
        let operands: Vec<Ref> = [x, w].into_iter().chain(bias).collect();
        self.step(OpKind::Convolution, &attrs, &operands)
    }

    /// A transposed convolution with a result of this shape: the gradient of a convolution's
    /// operand. Of this operand only the shape counts.
    pub fn transposed_convolution(
        &mut self,
        attrs: Attrs<'_>,
        [x, w]: [Ref; 2],
        bias: Option<Ref>,
        shape: &[u64],
    ) -> Result<Ref> {
        let operand = self.full(Scalar::Int(0), self.dtype(x), shape)?;
        let mask = [("mask", Attr::Ints(vec![1, 0, 0]))];
        let attrs = [attrs, &mask].concat();
        let y = self.step(OpKind::ConvolutionBwd, &attrs, &[x, operand, w])?;
        let Some(bias) = bias else { return Ok(y) };
        let mut beside = vec![1; shape.len()];
        beside[1] = *shape.get(1).ok_or("there are no channels")?;
        let bias = self.reshape(bias, &beside)?;
        self.step(OpKind::Add, &[], &[y, bias])
    }
}

// --- pooling ---

impl Call<'_> {
    /// The maximum of each window over one, two or three dimensions.
    pub fn max_pool(&mut self, x: Ref, windows: &Windows) -> Result<Ref> {
        let (least, _) = crate::bounds(self.dtype(x));
        let fits = windows.symmetric().is_some_and(|padding| {
            let mut both = padding.iter().zip(&windows.kernel);
            both.all(|(&p, &k)| 2 * p <= k)
        });
        let (x, windows) = if fits {
            (x, windows.clone())
        } else {
            windows.pad(self, x, least)?
        };
        match windows.kernel.len() {
            1 | 2 => Ok(self.maxima(x, &windows)?.0),
            // The maximum of a box is a maximum of maxima.
            3 => {
                let shape = self.shape_of(x);
                let rows = [shape[0] * shape[1], shape[2], shape[3], shape[4]];
                let x = self.reshape(x, &rows)?;
                let y = self.maxima(x, &windows.over(1..3))?.0;
                let inner = self.shape_of(y);
                let columns = inner[2] * inner[3];
                let y = self.reshape(y, &[rows[0], 1, rows[1], columns])?;
                let mut depth = windows.over(0..1);
                depth.widen();
                let y = self.maxima(y, &depth)?.0;
                let deep = self.shape_of(y)[2];
                self.reshape(y, &[shape[0], shape[1], deep, inner[2], inner[3]])
            }
            _ => Err("windows of more than three dimensions".into()),
        }
    }

    /// The maxima of windows over one or two dimensions, and their places in the image.
    pub fn maxima(&mut self, x: Ref, windows: &Windows) -> Result<(Ref, Ref)> {
        let shape = self.shape_of(x);
        let mut windows = windows.clone();
        let mut x = x;
        if shape.len() == 3 {
            windows.widen();
            x = self.reshape(x, &[shape[0], shape[1], shape[2], 1])?;
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
        let mut made = self.steps(OpKind::MaxPool2d, &attrs, &[x])?;
        if shape.len() == 3 {
            for y in &mut made {
                let shape = self.shape_of(*y);
                *y = self.reshape(*y, &shape[..3])?;
            }
        }
        Ok((made[0], made[1]))
    }

    /// The sum of each window, as a convolution with ones.
    pub fn window_sums(&mut self, x: Ref, windows: &Windows) -> Result<Ref> {
        let (x, windows) = windows.pad(self, x, Scalar::Int(0))?;
        let shape = self.shape_of(x);
        let n = shape.len() - 2;
        let images = shape[0] * shape[1];
        let y = if n <= 2 {
            let x = self.reshape(x, &[&[images, 1], &shape[2..]].concat())?;
            self.ones(x, &windows)?
        } else {
            ensure(n == 3, "windows of more than three dimensions")?;
            // The sum over a box is a sum of sums.
            let x = self.reshape(x, &[images * shape[2], 1, shape[3], shape[4]])?;
            let y = self.ones(x, &windows.over(1..3))?;
            let inner = self.shape_of(y);
            let y = self.reshape(y, &[images, 1, shape[2], inner[2] * inner[3]])?;
            let mut depth = windows.over(0..1);
            depth.widen();
            let y = self.ones(y, &depth)?;
            let deep = self.shape_of(y)[2];
            self.reshape(y, &[images, 1, deep, inner[2], inner[3]])?
        };
        let inner = self.shape_of(y);
        self.reshape(y, &[&shape[..2], &inner[2..]].concat())
    }

    fn ones(&mut self, x: Ref, windows: &Windows) -> Result<Ref> {
        let kernel: Vec<u64> = windows.kernel.iter().map(|&k| k as u64).collect();
        let ones = self.full(
            Scalar::Int(1),
            self.dtype(x),
            &[&[1, 1], &kernel[..]].concat(),
        )?;
        let padding = vec![0; kernel.len()];
        let attrs = convolution_attrs(&windows.dilation, &windows.stride, &padding, 1);
        self.step(OpKind::Convolution, &attrs, &[x, ones])
    }

    /// The mean of each window. Padding counts as zeros if `counts_padding`; what lies beyond it
    /// never counts.
    pub fn average_pool(&mut self, x: Ref, windows: &Windows, counts_padding: bool) -> Result<Ref> {
        let shape = self.shape_of(x);
        let sum = self.window_sums(x, windows)?;
        let has_extra = windows.extra.iter().any(|&n| n > 0);
        if windows.is_inside() || (counts_padding && !has_extra) {
            return self.scalar_step(OpKind::DivScalar, sum, Scalar::Float(windows.elements()));
        }
        // The number of elements of each window that count.
        let mut windows = windows.clone();
        let mut counted = [&[1, 1], &shape[2..]].concat();
        if counts_padding {
            for (size, pads) in counted[2..].iter_mut().zip(&mut windows.pads) {
                *size += (pads.0 + pads.1) as u64;
                *pads = (0, 0);
            }
        }
        let ones = self.full(Scalar::Int(1), self.dtype(x), &counted)?;
        let count = self.window_sums(ones, &windows)?;
        self.step(OpKind::Div, &[], &[sum, count])
    }
}
