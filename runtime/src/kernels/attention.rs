//! Attention, a block of a head's queries at a time: their scores lie in scratch, and the products are those of
//! [`super::product`]. A query that may look at nothing gives zeros, a logsumexp of 0 and no gradient, as in PyTorch.

use super::Ran;
use super::math::{self, Float, Real};
use super::product::product;
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
/// How many queries are computed together: the products are then large enough for [`super::product`], and a block's scores
/// small beside the keys.
const QUERIES: u64 = 32;

/// The scores of a block of queries; in half precision, room for a head's keys and values and a block's queries and
/// results.
pub(super) fn sdpa_scratch(s: &Signature<'_>) -> u64 {
    let (q, k, v) = (s.shape(0), s.shape(1), s.shape(2));
    let block = q[2].min(QUERIES);
    let room = if is_half(s.dtype(0)) { (block + k[2]) * (k[3] + v[3]) } else { 0 };
    wide_bytes(s.dtype(0)) * (block * k[2] + room)
}
/// Two blocks of scores, probabilities and their gradients; in half precision, room for a head's keys, values and their
/// gradients, and for a block's queries, results and their gradients.
pub(super) fn sdpa_bwd_scratch(s: &Signature<'_>) -> u64 {
    let (q, k, v) = (s.shape(1), s.shape(2), s.shape(3));
    let block = q[2].min(QUERIES);
    let room = if is_half(s.dtype(1)) { 2 * (block + k[2]) * (k[3] + v[3]) } else { 0 };
    wide_bytes(s.dtype(1)) * (2 * block * k[2] + room)
}
fn wide_bytes(dtype: DType) -> u64 {
    if dtype == DType::F64 { 8 } else { 4 }
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
        Sizes { batch: q[0], heads: q[1], groups: v[1], queries: q[2], keys: v[2], width: q[3], values: v[3] }
    }
    /// The head of k and v that head `head` of q looks at, both counted over the batch.
    fn key_head(&self, head: usize) -> usize {
        head / self.heads * self.groups + head % self.heads / (self.heads / self.groups)
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

/// Takes `n` elements off the front.
fn take<'a, W>(from: &mut &'a mut [W], n: usize) -> &'a mut [W] {
    let (taken, rest) = std::mem::take(from).split_at_mut(n);
    *from = rest;
    taken
}

/// Scales a block of scores whose first query is `row`, counted over the batch and the heads, and masks them.
fn mask_scores<T: Scalar, W: Real>(
    s: &Sizes,
    mask: &Mask<'_, T>,
    causal: bool,
    scale: W,
    row: usize,
    scores: &mut [W],
) {
    for (i, scores) in scores.chunks_mut(s.keys).enumerate() {
        scores.iter_mut().for_each(|score| *score = *score * scale);
        mask.apply((row + i) * s.keys, scores);
        scores[s.reach(causal, (row + i) % s.queries)..].fill(W::LOWEST);
    }
}

pub(super) fn sdpa(call: &Call<'_>) -> Ran {
    floats!(call.out_dtype(0), T => sdpa_of::<T>(call));
    Ok(())
}
fn sdpa_of<T: Float>(call: &Call<'_>) {
    let s = Sizes::new(call.in_shape(0), call.in_shape(2));
    let (q, k, v) = (call.input::<T>(0), call.input::<T>(1), call.input::<T>(2));
    let mask = Mask::<T>::new(call, 3, &s);
    let (out, logsumexp) = (call.output::<T>(0), call.output::<f32>(1));
    let (causal, scale) = (call.bool("causal"), T::Wide::of_f64(call.float("scale")));
    let (d, e, keys, most) = (s.width, s.values, s.keys, s.queries.min(QUERIES as usize));
    let mut scratch = call.scratch::<T::Wide>();
    let scores = take(&mut scratch, most * keys);
    let [k_room, v_room, q_room, out_room] =
        [keys * d, keys * e, most * d, most * e].map(|n| take(&mut scratch, T::room(n)));
    for head in 0..s.batch * s.heads {
        let kv = s.key_head(head);
        let k = T::widened(&k[kv * keys * d..][..keys * d], k_room);
        let v = T::widened(&v[kv * keys * e..][..keys * e], v_room);
        for at in (0..s.queries).step_by(most.max(1)) {
            let (n, row) = (most.min(s.queries - at), head * s.queries + at);
            let (q, p) = (T::widened(&q[row * d..][..n * d], q_room), &mut scores[..n * keys]);
            product((n, d, keys), (false, true), q, k, p, false);
            if keys == 0 {
                logsumexp[row..][..n].fill(0.0);
            } else {
                mask_scores(&s, &mask, causal, scale, row, p);
                p.chunks_mut(keys).zip(&mut logsumexp[row..]).for_each(|(p, sum)| *sum = softmax(p) as f32);
            }
            T::rounded(&mut out[row * e..][..n * e], out_room, |out| {
                product((n, keys, e), (false, false), p, v, out, false);
            });
        }
    }
}
/// Makes a row of scores probabilities; the logarithm of the sum of their exponentials.
fn softmax<W: Real>(scores: &mut [W]) -> f64 {
    let max = scores.iter().fold(W::LOWEST, |max, &score| max.larger(score));
    if max == W::LOWEST {
        scores.fill(W::ZERO);
        return 0.0;
    }
    scores.iter_mut().for_each(|score| *score = math::exp(*score - max));
    let sum = super::norm::total(scores, Wide::to_f64);
    let inverse = W::of_f64(1.0 / sum);
    scores.iter_mut().for_each(|score| *score = *score * inverse);
    max.to_f64() + sum.ln()
}

pub(super) fn sdpa_bwd(call: &Call<'_>) -> Ran {
    floats!(call.in_dtype(1), T => sdpa_bwd_of::<T>(call));
    Ok(())
}
/// With p = exp(scores - logsumexp): dv = pᵀ dout, dp = dout vᵀ, ds = p (dp - Σ dout out) scale, dq = ds k, dk = dsᵀ q.
fn sdpa_bwd_of<T: Float>(call: &Call<'_>) {
    let s = Sizes::new(call.in_shape(1), call.in_shape(3));
    let [dout, q, k, v, out] = std::array::from_fn(|i| call.input::<T>(i));
    let logsumexp = call.input::<f32>(5);
    let mask = Mask::<T>::new(call, 6, &s);
    let [dq, dk, dv] = std::array::from_fn(|j| call.output::<T>(j));
    let (causal, scale) = (call.bool("causal"), T::Wide::of_f64(call.float("scale")));
    let (d, e, keys, most) = (s.width, s.values, s.keys, s.queries.min(QUERIES as usize));
    let mut scratch = call.scratch::<T::Wide>();
    let [all_p, all_dp] = [most * keys; 2].map(|n| take(&mut scratch, n));
    let [k_room, v_room, dk_room, dv_room, q_room, dq_room, out_room, dout_room] =
        [keys * d, keys * e, keys * d, keys * e, most * d, most * d, most * e, most * e]
            .map(|n| take(&mut scratch, T::room(n)));
    let group = s.heads.checked_div(s.groups).unwrap_or(0);
    for kv in 0..s.batch * s.groups {
        let (ks, vs) = (kv * keys * d..(kv + 1) * keys * d, kv * keys * e..(kv + 1) * keys * e);
        let (k, v) = (T::widened(&k[ks.clone()], k_room), T::widened(&v[vs.clone()], v_room));
        // Sums over all queries of all heads of the group.
        T::rounded(&mut dk[ks], dk_room, |dk| {
            T::rounded(&mut dv[vs], dv_room, |dv| {
                dk.fill(T::Wide::ZERO);
                dv.fill(T::Wide::ZERO);
                for head in kv * group..(kv + 1) * group {
                    for at in (0..s.queries).step_by(most.max(1)) {
                        let (n, row) = (most.min(s.queries - at), head * s.queries + at);
                        let q = T::widened(&q[row * d..][..n * d], q_room);
                        let out = T::widened(&out[row * e..][..n * e], out_room);
                        let dout = T::widened(&dout[row * e..][..n * e], dout_room);
                        let (p, dp) = (&mut all_p[..n * keys], &mut all_dp[..n * keys]);
                        product((n, d, keys), (false, true), q, k, p, false);
                        product((n, e, keys), (false, true), dout, v, dp, false);
                        if keys != 0 {
                            mask_scores(&s, &mask, causal, scale, row, p);
                        }
                        for i in 0..n {
                            let shift = T::Wide::of(logsumexp[row + i]);
                            let delta = dot(&dout[i * e..][..e], &out[i * e..][..e]);
                            let (p, dp) = (&mut p[i * keys..][..keys], &mut dp[i * keys..][..keys]);
                            for (p, dp) in p.iter_mut().zip(dp) {
                                *p = math::exp(*p - shift);
                                *dp = *p * (*dp - delta) * scale;
                            }
                        }
                        product((keys, n, e), (true, false), p, dout, dv, true);
                        product((keys, n, d), (true, false), dp, q, dk, true);
                        T::rounded(&mut dq[row * d..][..n * d], dq_room, |dq| {
                            product((n, keys, d), (false, false), dp, k, dq, false);
                        });
                    }
                }
            });
        });
    }
}
fn dot<W: Real>(a: &[W], b: &[W]) -> W {
    W::of_f64(a.iter().zip(b).map(|(&a, &b)| (a * b).to_f64()).sum())
}
