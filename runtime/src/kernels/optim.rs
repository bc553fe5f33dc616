//! Optimizers: PyTorch's single-tensor formulas in PyTorch's order; each element is rounded once.
//! Where PyTorch's kernels for processors fuse a product with a sum (`lerp`, `addcmul`, and `add`
//! with a factor), so do these. So the results have PyTorch's bits, except where its square root is
//! not the nearest number, as that of MKL. Coefficients are computed in f64, then rounded to the
//! parameter's wide type. An optional last operand has the wide type too; the gradient is first
//! multiplied by it.
//!
//! Each formula is a loop over slices that do not overlap. It is compiled for every set of vector
//! instructions that the machine may have. Formulas say which products and sums are fused, and no
//! compiler fuses others, so the bits are the same as for one number at a time. Elements are
//! independent, so threads may share a run, see [`super::Cut`].

use super::blocks::{EIGHT, SIGNED_MAP, UNSIGNED_MAP};
use super::halves::{join, split};
use super::math::{Float, Real, fma, sqrt};
use super::signature::{Checked, Signature, ensure, is_float, statistics_dtype};
use super::wide::{BLOCK, Scalar, Sink, Wide, blocks_of, floats, sink, source, wide_float};
use super::{Cut, Ran};
use crate::kernel::{Call, Element};
use artifact::DType;
use half::bf16;
use pulp::{Arch, Simd, WithSimd};
use std::marker::PhantomData;

// --- checks ---

fn check_hyper(s: &Signature<'_>, i: usize, n: u64) -> Checked {
    s.expect(i, DType::F64)?;
    s.expect_shape(i, &[n])
}
/// The optional operand `i` is the gradient's factor.
fn check_scale(s: &Signature<'_>, i: usize) -> Checked {
    if s.ins.len() <= i {
        return Ok(());
    }
    s.expect(i, statistics_dtype(s.dtype(0)))?;
    s.expect_shape(i, &[])
}
fn check_step(s: &Signature<'_>, i: usize) -> Checked {
    s.expect(i, DType::I64)?;
    s.expect_shape(i, &[])
}
pub(super) fn check_adamw(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    for i in 1..4 {
        s.expect_same(0, i)?;
    }
    check_step(s, 4)?;
    check_hyper(s, 5, 5)?;
    check_scale(s, 6)?;
    let p = (s.dtype(0), s.shape(0));
    s.results(&[p, p, p])
}
pub(super) fn check_adamw_split(s: &Signature<'_>) -> Checked {
    let gradient = match s.dtype(1) {
        DType::F32 => DType::F32,
        _ => DType::BF16,
    };
    let dtypes = [DType::BF16, gradient, DType::I16, DType::F32, DType::F32];
    for (i, dtype) in dtypes.into_iter().enumerate() {
        s.expect(i, dtype)?;
        s.expect_shape(i, s.shape(0))?;
    }
    check_step(s, 5)?;
    check_hyper(s, 6, 5)?;
    check_scale(s, 7)?;
    let of = |dtype| (dtype, s.shape(0));
    s.results(&[
        of(DType::BF16),
        of(DType::I16),
        of(DType::F32),
        of(DType::F32),
    ])
}
pub(super) fn check_adamw_8bit(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.expect_same(0, 1)?;
    let shape = s.shape(0);
    let blocks = [shape.iter().product::<u64>().div_ceil(EIGHT as u64)];
    for (i, dtype, shape) in [
        (2, DType::U8, shape),
        (3, DType::U8, shape),
        (4, DType::F32, &blocks),
        (5, DType::F32, &blocks),
    ] {
        s.expect(i, dtype)?;
        s.expect_shape(i, shape)?;
    }
    check_step(s, 6)?;
    check_hyper(s, 7, 5)?;
    check_scale(s, 8)?;
    let (codes, largest) = ((DType::U8, shape), (DType::F32, &blocks[..]));
    s.results(&[(s.dtype(0), shape), codes, codes, largest, largest])
}
pub(super) fn check_sgd(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.expect_same(0, 1)?;
    check_hyper(s, 2, 3)?;
    check_scale(s, 3)?;
    s.results(&[(s.dtype(0), s.shape(0))])
}
pub(super) fn check_sgd_momentum(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.expect_same(0, 1)?;
    s.expect_same(0, 2)?;
    check_hyper(s, 3, 3)?;
    check_scale(s, 4)?;
    let p = (s.dtype(0), s.shape(0));
    s.results(&[p, p])
}
pub(super) fn check_sum_squares(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.results(&[(DType::F64, &[])])
}
pub(super) fn check_clip_scale(s: &Signature<'_>) -> Checked {
    for i in 0..s.ins.len() {
        s.expect(i, DType::F64)?;
        s.expect_shape(i, &[])?;
    }
    let most = s.float("max_norm")?;
    ensure(0.0 <= most, || {
        format!("max_norm should not be negative, is {most}")
    })?;
    let dtype = s.dtype_attr("dtype")?;
    ensure(matches!(dtype, DType::F32 | DType::F64), || {
        format!("dtype should be f32 or f64, is {dtype:?}")
    })?;
    s.results(&[(dtype, &[])])
}

// --- formulas ---

/// An update of `N` numbers of each element, the parameter first, by a gradient. All slices have
/// the length of a block: formulas loop over the block once for each number that they change. One
/// loop over all numbers of an element would have half the speed: tensors of equal size often lie
/// at equal distances from a page's start, and a processor confuses a read with a recent write at
/// the same distance in another page.
trait Formula<R, const N: usize>: Copy {
    fn apply(self, numbers: [&mut [R]; N], gradient: &[R]);
}

/// AdamW's coefficients (Loshchilov and Hutter 2019, algorithm 2).
#[derive(Clone, Copy)]
struct AdamW<R> {
    keep: R,
    weight: R,
    /// PyTorch's lerp starts from the nearer end.
    near: bool,
    beta2: R,
    rest2: R,
    eps: R,
    correction2: R,
    step_size: R,
    scale: R,
}

impl<R: Real> AdamW<R> {
    /// `None` unless there are five options; `check` refuses other numbers.
    fn new(hyper: &[f64], step: i64, scale: R) -> Option<AdamW<R>> {
        let &[lr, beta1, beta2, eps, decay] = hyper else {
            return None;
        };
        let step = step as f64;
        let step_size = lr / (1.0 - beta1.powf(step));
        let correction2 = (1.0 - beta2.powf(step)).sqrt();
        Some(AdamW {
            keep: R::of_f64(1.0 - lr * decay),
            weight: R::of_f64(1.0 - beta1),
            near: 1.0 - beta1 < 0.5,
            beta2: R::of_f64(beta2),
            rest2: R::of_f64(1.0 - beta2),
            eps: R::of_f64(eps),
            correction2: R::of_f64(correction2),
            step_size: R::of_f64(-step_size),
            scale,
        })
    }
    #[inline(always)]
    fn each(self, p: &mut [R], m: &mut [R], v: &mut [R], g: &[R], lerp: impl Fn(R, R) -> R) {
        for (m, &g) in m.iter_mut().zip(g) {
            *m = lerp(*m, g * self.scale);
        }
        for (v, &g) in v.iter_mut().zip(g) {
            let g = g * self.scale;
            *v = fma(self.rest2 * g, g, *v * self.beta2);
        }
        for ((p, &m), &v) in p.iter_mut().zip(&*m).zip(&*v) {
            let denominator = sqrt(v) / self.correction2 + self.eps;
            *p = *p * self.keep + self.step_size * m / denominator;
        }
    }
}

impl<R: Real> Formula<R, 3> for AdamW<R> {
    #[inline(always)]
    fn apply(self, [p, m, v]: [&mut [R]; 3], g: &[R]) {
        match self.near {
            true => self.each(p, m, v, g, |m, g| fma(self.weight, g - m, m)),
            false => self.each(p, m, v, g, |m, g| fma(self.weight - R::ONE, g - m, g)),
        }
    }
}

#[derive(Clone, Copy)]
struct Sgd<R> {
    lr: R,
    decay: R,
    scale: R,
}

impl<R: Real> Formula<R, 1> for Sgd<R> {
    #[inline(always)]
    fn apply(self, [p]: [&mut [R]; 1], g: &[R]) {
        for (p, &g) in p.iter_mut().zip(g) {
            let g = fma(self.decay, *p, g * self.scale);
            *p = fma(-self.lr, g, *p);
        }
    }
}

/// With a buffer that starts at zero this is PyTorch's momentum with dampening 0.
#[derive(Clone, Copy)]
struct Momentum<R> {
    lr: R,
    momentum: R,
    decay: R,
    scale: R,
}

impl<R: Real> Formula<R, 2> for Momentum<R> {
    #[inline(always)]
    fn apply(self, [p, b]: [&mut [R]; 2], g: &[R]) {
        for ((b, &g), &p) in b.iter_mut().zip(g).zip(&*p) {
            *b = self.momentum * *b + fma(self.decay, p, g * self.scale);
        }
        for (p, &b) in p.iter_mut().zip(&*b) {
            *p = fma(-self.lr, b, *p);
        }
    }
}

// --- kernels ---

pub(super) fn adamw(call: &Call<'_>) -> Ran {
    wide_float!(call.out_dtype(0), W => {
        let formula = AdamW::<W>::new(call.input(5), call.input(4)[0], scale(call, 6));
        formula.into_iter().for_each(|formula| update(call, [0, 2, 3], formula));
    });
    Ok(())
}
pub(super) fn sgd(call: &Call<'_>) -> Ran {
    wide_float!(call.out_dtype(0), W => {
        let &[lr, _, decay] = call.input::<f64>(2) else { return Ok(()) };
        let formula = Sgd { lr: W::of(lr), decay: W::of(decay), scale: scale(call, 3) };
        update::<W, 1>(call, [0], formula);
    });
    Ok(())
}
pub(super) fn sgd_momentum(call: &Call<'_>) -> Ran {
    wide_float!(call.out_dtype(0), W => {
        let &[lr, momentum, decay] = call.input::<f64>(3) else { return Ok(()) };
        let [lr, momentum, decay] = [lr, momentum, decay].map(W::of);
        update::<W, 2>(call, [0, 2], Momentum { lr, momentum, decay, scale: scale(call, 4) });
    });
    Ok(())
}

/// The gradient's factor: the optional operand `i`.
fn scale<R: Real + Element>(call: &Call<'_>, i: usize) -> R {
    if i < call.n_inputs() {
        call.input::<R>(i)[0]
    } else {
        R::ONE
    }
}

/// Runs a formula over operand 1 (the gradient) and the operands `olds`. The results are their new
/// values, in the same order.
fn update<R: Real + Scalar, const N: usize>(
    call: &Call<'_>,
    olds: [usize; N],
    formula: impl Formula<R, N>,
) {
    if call.out_dtype(0) == R::DTYPE {
        let news = std::array::from_fn(|k| Changed::new(call, olds[k], k));
        Arch::new().dispatch(Direct {
            news,
            gradient: call.input_part(1),
            formula,
        });
    } else {
        Arch::new().dispatch(Widened {
            call,
            olds,
            formula,
            wide: PhantomData,
        });
    }
}

/// A tensor that changes: the result. If it lies on the operand, it holds the old elements already.
struct Changed<'a, T> {
    old: Option<&'a [T]>,
    new: &'a mut [T],
}

impl<'a, T: Element> Changed<'a, T> {
    fn new(call: &Call<'a>, i: usize, j: usize) -> Changed<'a, T> {
        Changed {
            old: call.inplace(i).is_none().then(|| call.input_part(i)),
            new: call.output(j),
        }
    }
    /// The same for a kernel of which each of `units` units changes `each` elements.
    fn blocks(call: &Call<'a>, i: usize, j: usize, units: usize, each: usize) -> Changed<'a, T> {
        let is_apart = call.inplace(i).is_none();
        Changed {
            old: is_apart.then(|| call.input_blocks(i, units, each)),
            new: call.output_blocks(j, units, each),
        }
    }
    /// The old elements from `at` on, which the caller replaces.
    #[inline(always)]
    fn block(&mut self, at: usize, len: usize) -> &mut [T] {
        let new = &mut self.new[at..at + len];
        if let Some(old) = self.old {
            new.copy_from_slice(&old[at..at + len]);
        }
        new
    }
}

/// A formula on tensors of its own type.
struct Direct<'a, R, F, const N: usize> {
    news: [Changed<'a, R>; N],
    gradient: &'a [R],
    formula: F,
}

impl<R: Real + Element, F: Formula<R, N>, const N: usize> WithSimd for Direct<'_, R, F, N> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _: S) {
        for (gradient, at) in self.gradient.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
            let news = self
                .news
                .each_mut()
                .map(|new| new.block(at, gradient.len()));
            self.formula.apply(news, gradient);
        }
    }
}

/// A formula on tensors of another type, which are converted block by block.
struct Widened<'a, 'b, R, F, const N: usize> {
    call: &'a Call<'b>,
    olds: [usize; N],
    formula: F,
    wide: PhantomData<R>,
}

impl<R: Real, F: Formula<R, N>, const N: usize> WithSimd for Widened<'_, '_, R, F, N> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let olds = self.olds.map(|i| source(self.call, i));
        let gradient = source(self.call, 1);
        let mut news: [Sink<'_>; N] = std::array::from_fn(|k| sink(self.call, k));
        let (mut numbers, mut gs) = ([[R::ZERO; BLOCK]; N], [R::ZERO; BLOCK]);
        for (at, len) in blocks_of(self.call.elements()) {
            for k in 0..N {
                olds[k].load(&news[k], at, &mut numbers[k][..len]);
            }
            gradient.load(&news[0], at, &mut gs[..len]);
            self.formula.apply(
                numbers.each_mut().map(|numbers| &mut numbers[..len]),
                &gs[..len],
            );
            for k in 0..N {
                news[k].store(at, &numbers[k][..len]);
            }
        }
    }
}

// --- masters in halves ---

pub(super) fn adamw_split(call: &Call<'_>) -> Ran {
    let Some(formula) = AdamW::new(call.input(6), call.input(5)[0], scale(call, 7)) else {
        return Ok(());
    };
    match call.in_dtype(1) {
        DType::F32 => Arch::new().dispatch(Halves::<f32>::of(call, formula)),
        _ => Arch::new().dispatch(Halves::<bf16>::of(call, formula)),
    }
    Ok(())
}

/// AdamW on masters in halves.
struct Halves<'a, G> {
    high: Changed<'a, bf16>,
    low: Changed<'a, i16>,
    m: Changed<'a, f32>,
    v: Changed<'a, f32>,
    gradient: &'a [G],
    formula: AdamW<f32>,
}

impl<'a, G: Scalar> Halves<'a, G> {
    fn of(call: &'a Call<'a>, formula: AdamW<f32>) -> Halves<'a, G> {
        Halves {
            high: Changed::new(call, 0, 0),
            low: Changed::new(call, 2, 1),
            m: Changed::new(call, 3, 2),
            v: Changed::new(call, 4, 3),
            gradient: call.input_part(1),
            formula,
        }
    }
}

impl<G: Scalar> WithSimd for Halves<'_, G> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _: S) {
        let (mut masters, mut gs) = ([0.0; BLOCK], [0.0; BLOCK]);
        for (gradient, at) in self.gradient.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
            let n = gradient.len();
            let (high, low) = (self.high.block(at, n), self.low.block(at, n));
            let (masters, gs) = (&mut masters[..n], &mut gs[..n]);
            for j in 0..n {
                masters[j] = join(high[j].to_bits(), low[j] as u16);
            }
            f32::load(gradient, gs);
            self.formula
                .apply([masters, self.m.block(at, n), self.v.block(at, n)], gs);
            for j in 0..n {
                let (h, l) = split(masters[j]);
                (high[j], low[j]) = (bf16::from_bits(h), l as i16);
            }
        }
    }
}

// --- moments in blocks of codes ---

/// A unit is a block.
pub(super) fn cut_blocks(call: &Call<'_>) -> Cut {
    Cut::of(call.in_shape(4)[0], EIGHT)
}

/// AdamW whose moments are decoded, and encoded again after the update, one block after the other:
/// so no moment is ever a tensor of numbers.
pub(super) fn adamw_8bit(call: &Call<'_>) -> Ran {
    floats!(call.out_dtype(0), T => {
        type W = <T as Float>::Wide;
        let formula = AdamW::<W>::new(call.input(7), call.input(6)[0], scale(call, 8));
        let Some(formula) = formula else { return Ok(()) };
        let units = cut_blocks(call).units;
        Arch::new().dispatch(Blocks::<T> {
            parameter: Changed::blocks(call, 0, 0, units, EIGHT),
            gradient: call.input_blocks(1, units, EIGHT),
            codes: [2, 3].map(|i| Changed::blocks(call, i, i - 1, units, EIGHT)),
            largest: [4, 5].map(|i| Changed::blocks(call, i, i - 1, units, 1)),
            formula,
        });
    });
    Ok(())
}

/// AdamW on moments in codes.
struct Blocks<'a, T: Float> {
    parameter: Changed<'a, T>,
    gradient: &'a [T],
    codes: [Changed<'a, u8>; 2],
    largest: [Changed<'a, f32>; 2],
    formula: AdamW<T::Wide>,
}

impl<T: Float> WithSimd for Blocks<'_, T> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _: S) {
        let maps = [&SIGNED_MAP, &UNSIGNED_MAP];
        let (mut ps, mut gs) = ([T::Wide::ZERO; EIGHT], [T::Wide::ZERO; EIGHT]);
        let (mut moments, mut numbers) = ([[T::Wide::ZERO; EIGHT]; 2], [0f32; EIGHT]);
        for (block, gradient) in self.gradient.chunks(EIGHT).enumerate() {
            let (at, n) = (block * EIGHT, gradient.len());
            let parameter = self.parameter.block(at, n);
            let codes = self.codes.each_mut().map(|codes| codes.block(at, n));
            let largest = self.largest.each_mut().map(|all| all.block(block, 1));
            let (ps, gs) = (&mut ps[..n], &mut gs[..n]);
            T::Wide::load(parameter, ps);
            T::Wide::load(gradient, gs);
            for k in 0..2 {
                maps[k].decode(codes[k], largest[k][0], &mut numbers[..n]);
                T::Wide::load(&numbers[..n], &mut moments[k][..n]);
            }
            let [m, v] = moments.each_mut().map(|moment| &mut moment[..n]);
            self.formula.apply([ps, m, v], gs);
            T::Wide::store(ps, parameter);
            for (k, (codes, largest)) in codes.into_iter().zip(largest).enumerate() {
                T::Wide::store(&moments[k][..n], &mut numbers[..n]);
                largest[0] = maps[k].encode(&numbers[..n], codes);
            }
        }
    }
}

// --- norms ---

/// The sum of the squares, in f64: 16 sums of every 16th element, added up at the end, on any
/// machine.
pub(super) fn sum_squares(call: &Call<'_>) -> Ran {
    floats!(call.in_dtype(0), T => {
        call.output::<f64>(0)[0] = Arch::new().dispatch(Squares::<'_, T>(call.input(0)));
    });
    Ok(())
}

struct Squares<'a, T>(&'a [T]);

impl<T: Float> WithSimd for Squares<'_, T> {
    type Output = f64;
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> f64 {
        let mut sums = [0.0; LANES];
        let mut room = [T::Wide::ZERO; BLOCK];
        for x in self.0.chunks(BLOCK) {
            let (whole, rest) = T::widened(x, &mut room).as_chunks::<LANES>();
            for x in whole.iter().map(|x| &x[..]).chain([rest]) {
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum += x.to_f64() * x.to_f64();
                }
            }
        }
        sums.iter().sum()
    }
}

/// Sums at a time. A divisor of [`BLOCK`].
const LANES: usize = 16;

/// `min(1, max_norm / (norm + 1e-6))`, as in `torch.nn.utils.clip_grad_norm_`; a NaN norm gives
/// NaN.
pub(super) fn clip_scale(call: &Call<'_>) -> Ran {
    let sum: f64 = (0..call.n_inputs()).map(|i| call.input::<f64>(i)[0]).sum();
    let scale = call.float("max_norm") / (sum.sqrt() + 1e-6);
    let scale = if 1.0 < scale { 1.0 } else { scale };
    if call.out_dtype(0) == DType::F64 {
        call.output::<f64>(0)[0] = scale;
    } else {
        call.output::<f32>(0)[0] = scale as f32;
    }
    Ok(())
}
