//! Attention, a query at a time: its row of scores lies in scratch, the key and value rows that it meets follow each
//! other in memory. A query that may look at nothing gives zeros, a logsumexp of 0 and no gradient, as in PyTorch.

use super::Ran;
use super::math::{self, Real};
use super::signature::{Checked, Signature, broadcast_shapes, ensure, is_float, is_half};
use super::strides::Broadcast;
use super::wide::{Scalar, Wide, floats};
use crate::kernel::Call;
use artifact::DType;

// ------------------------------------------------------------------------------------------------------------ checks

/// q, k, v at operands `q`.. and a mask at `mask`, if there is one.
fn check_attention(s: &Signature<'_>, q: usize, mask: usize) -> Checked {
    s.has_kernel(q, is_float)?;
    s.bool("causal")?;
    s.float("scale")?;
    let (qs, ks, vs) = (s.shape(q), s.shape(q + 1), s.shape(q + 2));
    ensure([qs, ks, vs].iter().all(|s| s.len() == 4), || "q, k, v should have rank 4".into())?;
    let heads = qs[1] == ks[1] || (0 < ks[1] && qs[1].is_multiple_of(ks[1]));
    let fits = qs[0] == ks[0] && heads && qs[3] == ks[3] && ks[..3] == vs[..3];
    ensure(fits, || "q, k, v do not fit together".into())?;
    s.expect_dtype(q, q + 1)?;
    s.expect_dtype(q, q + 2)?;
    if mask < s.ins.len() {
        let full = [qs[0], qs[1], qs[2], ks[2]];
        let fits = broadcast_shapes(s.shape(mask), &full)? == full;
        ensure(fits, || format!("the mask does not broadcast to {full:?}"))?;
        let dtype = s.dtype(mask);
        ensure(dtype == DType::Bool || dtype == s.dtype(q), || "the mask should be bool or of q's type".into())?;
    }
    Ok(())
}
pub(super) fn check_sdpa(s: &Signature<'_>) -> Checked {
    check_attention(s, 0, 3)?;
    let (q, v) = (s.shape(0), s.shape(2));
    s.results(&[(s.dtype(0), &[q[0], q[1], q[2], v[3]]), (DType::F32, &q[..3])])
}
pub(super) fn check_sdpa_bwd(s: &Signature<'_>) -> Checked {
    check_attention(s, 1, 6)?;
    let (q, v) = (s.shape(1), s.shape(3));
    for i in [0, 4] {
        s.expect_shape(i, &[q[0], q[1], q[2], v[3]])?;
        s.expect_dtype(i, 1)?;
    }
    s.expect_shape(5, &q[..3])?;
    s.expect(5, DType::F32)?;
    s.results(&[1, 2, 3].map(|i| (s.dtype(i), s.shape(i))))
}
fn wide_bytes(dtype: DType) -> u64 {
    if dtype == DType::F64 { 8 } else { 4 }
}
/// A row of scores.
pub(super) fn sdpa_scratch(s: &Signature<'_>) -> u64 {
    wide_bytes(s.dtype(0)) * s.shape(1)[2]
}
/// A row of probabilities and one of their gradients; for half precision also the gradients of one head's keys and
/// values, which are sums over all queries.
pub(super) fn sdpa_bwd_scratch(s: &Signature<'_>) -> u64 {
    let (k, v) = (s.shape(2), s.shape(3));
    let sums = if is_half(s.dtype(1)) { 4 * k[2] * (k[3] + v[3]) } else { 0 };
    wide_bytes(s.dtype(1)) * 2 * k[2] + sums
}

// ----------------------------------------------------------------------------------------------------------- kernels

/// Sizes as in the compiler's table: q[B,H,S,D], k[B,G,T,D], v[B,G,T,E].
struct Sizes {
    batch: usize,
    heads: usize,
    groups: usize,
    queries: usize,
    keys: usize,
    width: usize,
    values: usize,
}

impl Sizes {
    fn new(q: &[usize], v: &[usize]) -> Sizes {
        Sizes {
            batch: q[0],
            heads: q[1],
            groups: v[1],
            queries: q[2],
            keys: v[2],
            width: q[3],
            values: v[3],
        }
    }
    /// How many keys query `i` may look at.
    fn reach(&self, causal: bool, i: usize) -> usize {
        if causal { self.keys.min(i + 1) } else { self.keys }
    }
}

/// What is added to scores, or says which take part.
enum Mask<'a, T> {
    None,
    Added(&'a [T], Broadcast),
    Bool(&'a [u8], Broadcast),
}

impl<'a, T: Scalar> Mask<'a, T> {
    fn new(call: &Call<'a>, i: usize, s: &Sizes) -> Mask<'a, T> {
        if call.n_inputs() <= i {
            return Mask::None;
        }
        let order = Broadcast::new(call.in_shape(i), &[s.batch, s.heads, s.queries, s.keys]);
        match call.in_dtype(i) {
            DType::Bool => Mask::Bool(call.input(i), order),
            _ => Mask::Added(call.input(i), order),
        }
    }
    /// Applies the mask's elements from `at` on to scores.
    fn apply<W: Real>(&self, at: usize, scores: &mut [W]) {
        match self {
            Mask::None => {}
            Mask::Added(mask, order) => order.runs(at, scores.len(), |range, from, follow| {
                for (i, score) in scores[range].iter_mut().enumerate() {
                    *score = *score + W::of(mask[if follow { from + i } else { from }]);
                }
            }),
            Mask::Bool(mask, order) => order.runs(at, scores.len(), |range, from, follow| {
                for (i, score) in scores[range].iter_mut().enumerate() {
                    if mask[if follow { from + i } else { from }] == 0 {
                        *score = W::LOWEST;
                    }
                }
            }),
        }
    }
}

const LANES: usize = 16;

fn dot<T: Scalar, W: Real>(a: &[T], b: &[T]) -> W {
    let mut lanes = [W::ZERO; LANES];
    let (a_parts, b_parts) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_parts.remainder().iter().zip(b_parts.remainder());
    for (lane, (&a, &b)) in lanes.iter_mut().zip(rest) {
        *lane = W::of(a) * W::of(b);
    }
    for (a, b) in a_parts.zip(b_parts) {
        for ((lane, &a), &b) in lanes.iter_mut().zip(a).zip(b) {
            *lane = *lane + W::of(a) * W::of(b);
        }
    }
    lanes.into_iter().fold(W::ZERO, |sum, lane| sum + lane)
}
/// to += factor * x
fn add_scaled<T: Scalar, W: Real>(to: &mut [W], factor: W, x: &[T]) {
    to.iter_mut().zip(x).for_each(|(to, &x)| *to = *to + factor * W::of(x));
}

pub(super) fn sdpa(call: &Call<'_>) -> Ran {
    floats!(call.out_dtype(0), T, W => {
        sdpa_of::<T, W>(call);
        Ok(())
    })
}
fn sdpa_of<T: Scalar, W: Real + Scalar>(call: &Call<'_>) {
    let s = Sizes::new(call.in_shape(0), call.in_shape(2));
    let (q, k, v) = (call.input::<T>(0), call.input::<T>(1), call.input::<T>(2));
    let mask = Mask::<T>::new(call, 3, &s);
    let (out, logsumexp) = (call.output::<T>(0), call.output::<f32>(1));
    let (causal, scale) = (call.bool("causal"), W::of_f64(call.float("scale")));
    let scratch = call.scratch::<W>();
    for row in 0..s.batch * s.heads * s.queries {
        let (b, h, i) = (row / s.queries / s.heads, row / s.queries % s.heads, row % s.queries);
        let head = b * s.groups + h * s.groups / s.heads;
        let (k, v) = (&k[head * s.keys * s.width..], &v[head * s.keys * s.values..]);
        let q = &q[row * s.width..][..s.width];
        let scores = &mut scratch[..s.reach(causal, i)];
        for (t, score) in scores.iter_mut().enumerate() {
            *score = dot::<T, W>(q, &k[t * s.width..][..s.width]) * scale;
        }
        mask.apply(row * s.keys, scores);
        let max = scores.iter().fold(W::LOWEST, |max, &score| max.larger(score));
        let nothing = max == W::LOWEST;
        let max = if nothing { W::ZERO } else { max };
        scores.iter_mut().for_each(|score| *score = math::exp(*score - max));
        let sum = super::norm::total(scores, Wide::to_f64);
        logsumexp[row] = if nothing { 0.0 } else { (max.to_f64() + sum.ln()) as f32 };
        let inverse = if nothing { W::ZERO } else { W::of_f64(1.0 / sum) };
        // A block of the result at a time, so that it is summed on the stack and rounded once.
        for (block, len) in super::wide::blocks(s.values) {
            let mut sums = [W::ZERO; super::wide::BLOCK];
            for (t, &score) in scores.iter().enumerate() {
                add_scaled(&mut sums[..len], score * inverse, &v[t * s.values + block..][..len]);
            }
            W::store(&sums[..len], &mut out[row * s.values + block..][..len]);
        }
    }
}

pub(super) fn sdpa_bwd(call: &Call<'_>) -> Ran {
    floats!(call.in_dtype(1), T, W => {
        sdpa_bwd_of::<T, W>(call);
        Ok(())
    })
}
/// With p = exp(scores - logsumexp): dv = pᵀ dout, dp = dout vᵀ, ds = p (dp - Σ dout out) scale, dq = ds k, dk = dsᵀ q.
fn sdpa_bwd_of<T: Scalar, W: Real + Scalar>(call: &Call<'_>) {
    let s = Sizes::new(call.in_shape(1), call.in_shape(3));
    let [dout, q, k, v, out] = std::array::from_fn(|i| call.input::<T>(i));
    let logsumexp = call.input::<f32>(5);
    let mask = Mask::<T>::new(call, 6, &s);
    let [dq, dk, dv] = std::array::from_fn(|j| call.output::<T>(j));
    let (causal, scale) = (call.bool("causal"), W::of_f64(call.float("scale")));
    let (rows, sums) = call.scratch::<W>().split_at_mut(2 * s.keys);
    let (p_row, dp_row) = rows.split_at_mut(s.keys);
    let group = s.heads.checked_div(s.groups).unwrap_or(0);
    let (ks, vs) = (s.keys * s.width, s.keys * s.values);
    for head in 0..s.batch * s.groups {
        let (k, v) = (&k[head * ks..][..ks], &v[head * vs..][..vs]);
        // In half precision the sums over queries are kept in scratch.
        let mut sums = is_half(T::DTYPE).then(|| sums[..ks + vs].split_at_mut(ks));
        match &mut sums {
            Some((dk, dv)) => {
                dk.fill(W::ZERO);
                dv.fill(W::ZERO);
            }
            None => {
                dk[head * ks..][..ks].fill(T::cast_f32(0.0));
                dv[head * vs..][..vs].fill(T::cast_f32(0.0));
            }
        }
        for row in head * group * s.queries..(head + 1) * group * s.queries {
            let reach = s.reach(causal, row % s.queries);
            let (q, dq) = (&q[row * s.width..][..s.width], &mut dq[row * s.width..][..s.width]);
            let (dout, out) = (&dout[row * s.values..][..s.values], &out[row * s.values..][..s.values]);
            let (p, dp) = (&mut p_row[..reach], &mut dp_row[..reach]);
            for (t, p) in p.iter_mut().enumerate() {
                *p = dot::<T, W>(q, &k[t * s.width..][..s.width]) * scale;
            }
            mask.apply(row * s.keys, p);
            let shift = W::of(logsumexp[row]);
            p.iter_mut().for_each(|p| *p = math::exp(*p - shift));
            let delta = dot::<T, W>(dout, out);
            for (t, (dp, &p)) in dp.iter_mut().zip(&*p).enumerate() {
                *dp = p * (dot::<T, W>(dout, &v[t * s.values..][..s.values]) - delta) * scale;
            }
            match &mut sums {
                Some((dk, dv)) => {
                    for t in 0..reach {
                        add_scaled(&mut dv[t * s.values..][..s.values], p[t], dout);
                        add_scaled(&mut dk[t * s.width..][..s.width], dp[t], q);
                    }
                }
                None => {
                    let (dk, dv) = (&mut dk[head * ks..][..ks], &mut dv[head * vs..][..vs]);
                    for t in 0..reach {
                        add_scaled_to(&mut dv[t * s.values..][..s.values], p[t], dout);
                        add_scaled_to(&mut dk[t * s.width..][..s.width], dp[t], q);
                    }
                }
            }
            for (block, len) in super::wide::blocks(s.width) {
                let mut sums = [W::ZERO; super::wide::BLOCK];
                for (t, &ds) in dp.iter().enumerate() {
                    add_scaled(&mut sums[..len], ds, &k[t * s.width + block..][..len]);
                }
                W::store(&sums[..len], &mut dq[block..][..len]);
            }
        }
        if let Some((dk_sums, dv_sums)) = sums {
            W::store(dk_sums, &mut dk[head * ks..][..ks]);
            W::store(dv_sums, &mut dv[head * vs..][..vs]);
        }
    }
}
/// to += factor * x, in the element type.
fn add_scaled_to<T: Scalar, W: Real>(to: &mut [T], factor: W, x: &[T]) {
    to.iter_mut().zip(x).for_each(|(to, &x)| *to = (W::of(*to) + factor * W::of(x)).narrow());
}
