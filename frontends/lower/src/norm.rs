//! Normalisations and their derivatives. Results have the types of the file, unless stated
//! otherwise.

use crate::{Call, Operand, Ref, Result, Results, Scalar, ensure};
use ir::op::OpKind;
use ir::{Attr, DType};

/// The factor and the summand of a normalised tensor.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub struct Weights {
    pub weight: Option<Ref>,
    pub bias: Option<Ref>,
}

/// Statistics of the forward, or running statistics of training.
#[derive(Clone, Copy, Debug)]
pub struct Saved {
    /// The mean.
    pub mean: Ref,
    /// The reciprocal of the standard deviation; in running statistics, the variance.
    pub spread: Ref,
}

/// The type in which statistics of `dtype` are kept.
pub fn statistics(dtype: DType) -> DType {
    if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    }
}

/// An output mask as an attribute.
fn mask_attr(mask: &[bool]) -> (&'static str, Attr) {
    ("mask", Attr::Ints(mask.iter().map(|&m| m.into()).collect()))
}

fn has_length(mask: &[bool], n: usize) -> Result<()> {
    ensure(mask.len() == n, "output_mask has another length")
}

impl Call<'_> {
    /// Makes the results that `mask` selects, with the mask as an attribute, and puts each at its
    /// place.
    pub fn masked_steps(
        &mut self,
        op: OpKind,
        attrs: &[(&'static str, Attr)],
        mask: &[bool],
        inputs: &[Ref],
    ) -> Result<Results> {
        let attrs = [attrs, &[mask_attr(mask)]].concat();
        let mut made = self.steps(op, &attrs, inputs)?.into_iter();
        let place = |&is_wanted: &bool| if is_wanted { made.next() } else { None };
        Ok(mask.iter().map(place).collect())
    }

    /// Casts operands to the type in which a normalisation computes, and returns this type.
    fn widen(&mut self, operands: &mut [&mut Ref]) -> Result<DType> {
        let tensors: Vec<Operand> = operands.iter().map(|x| Operand::Tensor(**x)).collect();
        let dtype = self.promoted(&tensors);
        for x in operands {
            **x = self.cast(**x, dtype)?;
        }
        Ok(dtype)
    }

    /// The last `n` dimensions.
    fn trailing(&self, x: Ref, n: usize) -> Result<Vec<usize>> {
        let rank = self.rank(x);
        ensure(
            (1..=rank).contains(&n),
            "normalises more dimensions than exist",
        )?;
        Ok((rank - n..rank).collect())
    }

    /// The shape of a vector over channels that broadcasts to `x[N,C,..]`.
    fn beside(&self, x: Ref) -> Result<Vec<u64>> {
        let mut shape = vec![1; self.rank(x)];
        *shape.get_mut(1).ok_or("there are no channels")? = self.ty(x).shape()[1];
        Ok(shape)
    }

    /// All dimensions of `x[N,C,..]` except the channels.
    fn all_but_channels(&self, x: Ref) -> Vec<usize> {
        (0..self.rank(x)).filter(|&d| d != 1).collect()
    }

    // --- over the last dimensions ---

    /// Normalises over the last dimensions, which have this shape. The results are y, mean and
    /// rstd.
    pub fn layer_norm(
        &mut self,
        x: Ref,
        shape: &[u64],
        weights: Weights,
        eps: f64,
    ) -> Result<Results> {
        // The table has no bias without a weight.
        let w = match (weights.weight, weights.bias) {
            (None, Some(b)) => Some(self.full(Scalar::Int(1), self.dtype(b), shape)?),
            (w, _) => w,
        };
        let mut operands: Vec<Ref> = [Some(x), w, weights.bias].into_iter().flatten().collect();
        self.widen(&mut operands.iter_mut().collect::<Vec<_>>())?;
        let attrs = [
            ("dims", Attr::Int(shape.len() as i64)),
            ("eps", Attr::Float(eps)),
        ];
        let made = self.steps(OpKind::LayerNorm, &attrs, &operands)?;
        self.as_wanted(made.into_iter().map(Some).collect())
    }

    /// The derivatives of [`Call::layer_norm`] by x, weight and bias.
    pub fn layer_norm_backward(
        &mut self,
        (dy, x): (Ref, Ref),
        n_dims: usize,
        saved: Saved,
        weight: Option<Ref>,
        mask: &[bool],
    ) -> Result<Results> {
        let (mut dy, mut x, mut w) = (dy, x, weight);
        let mut operands: Vec<&mut Ref> = [&mut dy, &mut x].into_iter().chain(&mut w).collect();
        let dtype = statistics(self.widen(&mut operands)?);
        let mean = self.cast(saved.mean, dtype)?;
        let rstd = self.cast(saved.spread, dtype)?;
        has_length(mask, 3)?;
        let operands: Vec<Ref> = [dy, x, mean, rstd].into_iter().chain(w).collect();
        let attrs = [("dims", Attr::Int(n_dims as i64))];
        let results = self.masked_steps(OpKind::LayerNormBwd, &attrs, mask, &operands)?;
        self.as_wanted(results)
    }

    /// `y = x / rms(x) * w`, and `1 / rms(x)`, over the last dimensions.
    pub fn rms_norm(
        &mut self,
        x: Ref,
        n_dims: usize,
        weight: Option<Ref>,
        eps: f64,
    ) -> Result<Results> {
        let dims = self.trailing(x, n_dims)?;
        let x = self.cast(x, statistics(self.dtype(x)))?;
        let square = self.step(OpKind::Mul, &[], &[x, x])?;
        let mean = self.reduce(OpKind::Mean, square, &dims, true)?;
        let mean = self.scalar_step(OpKind::AddScalar, mean, Scalar::Float(eps))?;
        let rstd = self.map(OpKind::Rsqrt, mean)?;
        let mut y = self.step(OpKind::Mul, &[], &[x, rstd])?;
        if let Some(w) = weight {
            let w = self.cast(w, self.dtype(y))?;
            y = self.step(OpKind::Mul, &[], &[y, w])?;
        }
        self.as_wanted(vec![Some(y), Some(rstd)])
    }

    /// The derivatives of [`Call::rms_norm`] by x and the weight. With n = x rstd and g = dy w:
    /// dx = rstd (g - n mean(g n)), dw = sum(dy n).
    pub fn rms_norm_backward(
        &mut self,
        (dy, x): (Ref, Ref),
        n_dims: usize,
        rstd: Ref,
        weight: Option<Ref>,
        mask: &[bool],
    ) -> Result<Results> {
        has_length(mask, 2)?;
        let dims = self.trailing(x, n_dims)?;
        let dtype = statistics(self.dtype(x));
        let (dy, x) = (self.cast(dy, dtype)?, self.cast(x, dtype)?);
        let rstd = self.cast(rstd, dtype)?;
        let n = self.step(OpKind::Mul, &[], &[x, rstd])?;
        let mut results = vec![None, None];
        if mask[0] {
            let g = match weight {
                Some(w) => {
                    let w = self.cast(w, dtype)?;
                    self.step(OpKind::Mul, &[], &[dy, w])?
                }
                None => dy,
            };
            let gn = self.step(OpKind::Mul, &[], &[g, n])?;
            let mean = self.reduce(OpKind::Mean, gn, &dims, true)?;
            let part = self.step(OpKind::Mul, &[], &[n, mean])?;
            let dx = self.step(OpKind::Sub, &[], &[g, part])?;
            results[0] = Some(self.step(OpKind::Mul, &[], &[dx, rstd])?);
        }
        if mask[1] && weight.is_some() {
            let lead: Vec<usize> = (0..self.rank(x) - dims.len()).collect();
            let dw = self.step(OpKind::Mul, &[], &[dy, n])?;
            results[1] = Some(self.reduce(OpKind::Sum, dw, &lead, false)?);
        }
        self.as_wanted(results)
    }

    // --- over groups of channels ---

    /// The shape of the rows of `x[N,C,..]` that are normalised together: [N groups, C/groups ..].
    fn group_rows(&self, x: Ref, groups: u64) -> Result<[u64; 2]> {
        let shape = self.ty(x).shape();
        ensure(
            shape.len() >= 2 && groups > 0 && shape[1].is_multiple_of(groups),
            "the groups do not fit",
        )?;
        let inner: u64 = shape[2..].iter().product();
        let rows = shape[0].checked_mul(groups).ok_or("too large")?;
        Ok([rows, shape[1] / groups * inner])
    }

    /// Normalises over groups of channels and the dimensions after them. The results are y, mean
    /// and rstd.
    pub fn group_norm(
        &mut self,
        x: Ref,
        groups: u64,
        weights: Weights,
        eps: f64,
    ) -> Result<Results> {
        let rows = self.group_rows(x, groups)?;
        let beside = self.beside(x)?;
        let shape = self.shape_of(x);
        let x = self.reshape(x, &rows)?;
        let attrs = [("dims", Attr::Int(1)), ("eps", Attr::Float(eps))];
        let made = self.steps(OpKind::LayerNorm, &attrs, &[x])?;
        let mut y = self.reshape(made[0], &shape)?;
        for (op, factor) in [(OpKind::Mul, weights.weight), (OpKind::Add, weights.bias)] {
            if let Some(factor) = factor {
                let factor = self.reshape(factor, &beside)?;
                y = self.step(op, &[], &[y, factor])?;
            }
        }
        let mean = self.reshape(made[1], &[shape[0], groups])?;
        let rstd = self.reshape(made[2], &[shape[0], groups])?;
        self.as_wanted(vec![Some(y), Some(mean), Some(rstd)])
    }

    /// The derivatives of [`Call::group_norm`] by x, weight and bias.
    pub fn group_norm_backward(
        &mut self,
        (dy, x): (Ref, Ref),
        groups: u64,
        saved: Saved,
        weight: Option<Ref>,
        mask: &[bool],
    ) -> Result<Results> {
        has_length(mask, 3)?;
        let rows = self.group_rows(x, groups)?;
        let (beside, others) = (self.beside(x)?, self.all_but_channels(x));
        let shape = self.shape_of(x);
        let dtype = statistics(self.dtype(x));
        let (dy, x) = (self.cast(dy, dtype)?, self.cast(x, dtype)?);
        let mean = self.cast(saved.mean, dtype)?;
        let rstd = self.cast(saved.spread, dtype)?;
        let mean = self.reshape(mean, &[rows[0], 1])?;
        let rstd = self.reshape(rstd, &[rows[0], 1])?;
        let x = self.reshape(x, &rows)?;
        let mut results = vec![None; 3];
        if mask[0] {
            let g = match weight {
                Some(w) => {
                    let w = self.cast(w, dtype)?;
                    let w = self.reshape(w, &beside)?;
                    self.step(OpKind::Mul, &[], &[dy, w])?
                }
                None => dy,
            };
            let g = self.reshape(g, &rows)?;
            let attrs = [("dims", Attr::Int(1)), mask_attr(&[true, false, false])];
            let dx = self.step(OpKind::LayerNormBwd, &attrs, &[g, x, mean, rstd])?;
            results[0] = Some(self.reshape(dx, &shape)?);
        }
        if mask[1] {
            let n = self.step(OpKind::Sub, &[], &[x, mean])?;
            let n = self.step(OpKind::Mul, &[], &[n, rstd])?;
            let n = self.reshape(n, &shape)?;
            let dw = self.step(OpKind::Mul, &[], &[dy, n])?;
            results[1] = Some(self.reduce(OpKind::Sum, dw, &others, false)?);
        }
        if mask[2] {
            results[2] = Some(self.reduce(OpKind::Sum, dy, &others, false)?);
        }
        self.as_wanted(results)
    }

    // --- over batches ---

    /// A vector over the channels of `x[N,C,..]`; without one, the default number for each channel.
    pub fn per_channel(&mut self, vector: Option<Ref>, x: Ref, default: i64) -> Result<Ref> {
        if let Some(vector) = vector {
            return Ok(vector);
        }
        let channels = self.ty(x).shape().get(1);
        let channels = *channels.ok_or("there are no channels")?;
        self.full(Scalar::Int(default), self.dtype(x), &[channels])
    }

    /// Normalises over all dimensions except the channels, in training. The results are y, mean,
    /// rstd and the new running statistics, in the type of the computation.
    pub fn batch_norm(
        &mut self,
        x: Ref,
        weights: Weights,
        running: Saved,
        momentum: f64,
        eps: f64,
    ) -> Result<Results> {
        let mut x = x;
        let mut w = self.per_channel(weights.weight, x, 1)?;
        let mut b = self.per_channel(weights.bias, x, 0)?;
        let (mut mean, mut var) = (running.mean, running.spread);
        self.widen(&mut [&mut x, &mut w, &mut b, &mut mean, &mut var])?;
        let mut results =
            self.steps(OpKind::BatchNorm, &[("eps", Attr::Float(eps))], &[x, w, b])?;
        let of_batch = [results[1], results.pop().expect("the variance comes last")];
        // Separate steps: the results of a batch norm can be recomputed, an average over all
        // batches cannot.
        for (running, of_batch) in [mean, var].into_iter().zip(of_batch) {
            let old = Scalar::Float(1.0 - momentum);
            let old = self.scalar_step(OpKind::MulScalar, running, old)?;
            let new = self.scalar_step(OpKind::MulScalar, of_batch, Scalar::Float(momentum))?;
            results.push(self.step(OpKind::Add, &[], &[old, new])?);
        }
        Ok(results.into_iter().map(Some).collect())
    }

    /// The derivatives of [`Call::batch_norm`] by x, weight and bias.
    pub fn batch_norm_backward(
        &mut self,
        (dy, x): (Ref, Ref),
        weight: Ref,
        saved: Saved,
        mask: &[bool],
    ) -> Result<Results> {
        let (mut dy, mut x, mut w) = (dy, x, weight);
        let (mut mean, mut rstd) = (saved.mean, saved.spread);
        self.widen(&mut [&mut dy, &mut x, &mut w, &mut mean, &mut rstd])?;
        has_length(mask, 3)?;
        let operands = [dy, x, w, mean, rstd];
        let results = self.masked_steps(OpKind::BatchNormBwd, &[], mask, &operands)?;
        self.as_wanted(results)
    }

    /// A batch norm in evaluation, where the statistics are constants: y = (x - mean) / sqrt(var +
    /// eps) * w + b. The results are the same as for [`Call::batch_norm`].
    pub fn batch_norm_eval(
        &mut self,
        x: Ref,
        weights: Weights,
        running: Saved,
        eps: f64,
    ) -> Result<Results> {
        let mut x = x;
        let mut w = self.per_channel(weights.weight, x, 1)?;
        let mut b = self.per_channel(weights.bias, x, 0)?;
        let (mut mean, mut var) = (running.mean, running.spread);
        self.widen(&mut [&mut x, &mut w, &mut b, &mut mean, &mut var])?;
        let rstd = self.scalar_step(OpKind::AddScalar, var, Scalar::Float(eps))?;
        let rstd = self.map(OpKind::Rsqrt, rstd)?;
        let beside = self.beside(x)?;
        let mut y = x;
        let factor = self.step(OpKind::Mul, &[], &[rstd, w])?;
        for (op, factor) in [(OpKind::Sub, mean), (OpKind::Mul, factor), (OpKind::Add, b)] {
            let factor = self.reshape(factor, &beside)?;
            y = self.step(op, &[], &[y, factor])?;
        }
        let (save_mean, save_rstd) = (self.placeholder(1)?, self.placeholder(2)?);
        let (mean, var) = (Some(running.mean), Some(running.spread));
        self.as_wanted(vec![Some(y), save_mean, save_rstd, mean, var])
    }

    /// The derivatives of [`Call::batch_norm_eval`] by x, weight and bias.
    pub fn batch_norm_eval_backward(
        &mut self,
        (dy, x): (Ref, Ref),
        weight: Ref,
        running: Saved,
        eps: f64,
        mask: &[bool],
    ) -> Result<Results> {
        has_length(mask, 3)?;
        let (mut dy, mut x, mut w) = (dy, x, weight);
        let (mut mean, mut var) = (running.mean, running.spread);
        self.widen(&mut [&mut dy, &mut x, &mut w, &mut mean, &mut var])?;
        let rstd = self.scalar_step(OpKind::AddScalar, var, Scalar::Float(eps))?;
        let rstd = self.map(OpKind::Rsqrt, rstd)?;
        let (beside, others) = (self.beside(x)?, self.all_but_channels(x));
        let mut results = vec![None; 3];
        if mask[0] {
            let factor = self.step(OpKind::Mul, &[], &[rstd, w])?;
            let factor = self.reshape(factor, &beside)?;
            results[0] = Some(self.step(OpKind::Mul, &[], &[dy, factor])?);
        }
        if mask[1] {
            let (mean, rstd) = (self.reshape(mean, &beside)?, self.reshape(rstd, &beside)?);
            let n = self.step(OpKind::Sub, &[], &[x, mean])?;
            let n = self.step(OpKind::Mul, &[], &[n, rstd])?;
            let dw = self.step(OpKind::Mul, &[], &[dy, n])?;
            results[1] = Some(self.reduce(OpKind::Sum, dw, &others, false)?);
        }
        if mask[2] {
            results[2] = Some(self.reduce(OpKind::Sum, dy, &others, false)?);
        }
        self.as_wanted(results)
    }
}
