//! Attention, a tile of keys and a block of a head's queries at a time, with the micro-kernels of
//! [`super::product`]: only the scores of one block and one tile exist, in a workspace of the
//! thread. Scores that `causal` forbids are computed only where a block crosses the diagonal. A
//! query that may use no key gives zeros, a logsumexp of 0 and no gradient, as in PyTorch.

use super::math::{self, Float, Real};
use super::product::{Left, Right, Tiled, tiles};
use super::signature::{Checked, Signature, broadcast_shapes, ensure, is_float};
use super::strides::Broadcast;
use super::wide::{Scalar, Wide, floats};
use super::{Cut, Ran};
use crate::kernel::{Call, Window};
use artifact::DType;
use pulp::{Arch, Simd, WithSimd};

// --- checks ---

/// q, k, v at operands `q`.. and a mask at `mask`, if any. The largest width of a head. A thread's
/// workspace has a few hundred rows of this width.
const MOST_WIDTH: u64 = 1 << 16;

fn check_attention(s: &Signature<'_>, q: usize, mask: usize) -> Checked {
    s.has_kernel(q, is_float)?;
    s.bool("causal")?;
    s.float("scale")?;
    let (qs, ks, vs) = (s.shape(q), s.shape(q + 1), s.shape(q + 2));
    ensure([qs, ks, vs].iter().all(|s| s.len() == 4), || {
        "q, k, v should have rank 4".into()
    })?;
    let heads = qs[1] == ks[1] || (0 < ks[1] && qs[1].is_multiple_of(ks[1]));
    let fits = qs[0] == ks[0] && heads && qs[3] == ks[3] && ks[..3] == vs[..3];
    ensure(fits, || "q, k, v do not fit together".into())?;
    ensure(qs[3] <= MOST_WIDTH && vs[3] <= MOST_WIDTH, || {
        format!("a head is wider than {MOST_WIDTH}")
    })?;
    s.expect_dtype(q, q + 1)?;
    s.expect_dtype(q, q + 2)?;
    if mask < s.ins.len() {
        let full = [qs[0], qs[1], qs[2], ks[2]];
        let fits = broadcast_shapes(s.shape(mask), &full)? == full;
        ensure(fits, || format!("the mask does not broadcast to {full:?}"))?;
        let dtype = s.dtype(mask);
        ensure(dtype == DType::Bool || dtype == s.dtype(q), || {
            "the mask should be bool or of q's type".into()
        })?;
    }
    Ok(())
}
pub(super) fn check_sdpa(s: &Signature<'_>) -> Checked {
    check_attention(s, 0, 3)?;
    let (q, v) = (s.shape(0), s.shape(2));
    s.results(&[
        (s.dtype(0), &[q[0], q[1], q[2], v[3]]),
        (DType::F32, &q[..3]),
    ])
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
// --- kernels ---

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
    /// The head of k and v that head `head` of q uses, both counted over the batch.
    fn key_head(&self, head: usize) -> usize {
        head / self.heads * self.groups + head % self.heads / (self.heads / self.groups)
    }
    /// The number of heads of q that use one head of k and v.
    fn group(&self) -> usize {
        self.heads.checked_div(self.groups).unwrap_or(0)
    }
    /// The number of keys that query `i` may use.
    fn reach(&self, causal: bool, i: usize) -> usize {
        if causal {
            self.keys.min(i + 1)
        } else {
            self.keys
        }
    }
}

/// Numbers that are added to scores, or bools that say which scores count.
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
    /// Applies the mask's elements, from `at` on, to scores.
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

/// The number of queries whose scores are computed together. It is so small that the scores and
/// probabilities stay in the second cache, and that few scores are computed that `causal` forbids.
/// Whole tiles.
const QUERIES: usize = 48;
/// The number of queries that use a tile of keys before the next tile: a tile is packed once for
/// all of them.
const ROWS: usize = 512;
/// The number of keys in a tile.
const KEYS: usize = 512;

/// The sizes of a run's rooms in a thread's workspace, in numbers.
struct Rooms<const N: usize>([usize; N]);

impl<const N: usize> Rooms<N> {
    /// Lends them. Each begins at a cache line.
    fn lend<W: Real>(self, f: impl FnOnce([&mut [W]; N])) {
        let whole = |n: usize| n.next_multiple_of(16);
        let all = self.0.iter().map(|&n| whole(n)).sum();
        W::with_space(all, |mut space| {
            f(self.0.map(|n| &mut take(&mut space, whole(n))[..n]))
        });
    }
}

/// By heads of all the batch.
pub(super) fn cut(call: &Call<'_>) -> Cut {
    let s = Sizes::new(call.in_shape(0), call.in_shape(2));
    Cut::of(
        s.batch * s.heads,
        s.queries * s.keys * (s.width + s.values) / 16,
    )
}
fn rooms<T: Float>(s: &Sizes) -> Rooms<9> {
    let tile = T::Wide::tile();
    let (rows, keys, queries) = (
        ROWS.min(s.queries),
        KEYS.min(s.keys),
        QUERIES.min(s.queries),
    );
    let v_room = if tile.reads(s.values) {
        0
    } else {
        Right::room(&tile, keys, s.values)
    };
    Rooms([
        queries * keys,
        Right::room(&tile, s.width, keys),
        v_room,
        rows,
        rows,
        T::room(keys * s.width),
        T::room(keys * s.values),
        T::room(queries * s.width),
        T::room(rows * s.values),
    ])
}
pub(super) fn prepare(call: &Call<'_>) -> Ran {
    let s = Sizes::new(call.in_shape(0), call.in_shape(2));
    if s.batch == 0 {
        return Ok(());
    }
    floats!(call.out_dtype(0), T => rooms::<T>(&s).lend::<<T as Float>::Wide>(|_| {}));
    Ok(())
}
pub(super) fn sdpa(call: &Call<'_>) -> Ran {
    // Without a batch there is nothing to write, and no need for a workspace.
    if call.in_shape(0)[0] > 0 {
        floats!(call.out_dtype(0), T => sdpa_of::<T>(call));
    }
    Ok(())
}
/// A tile of keys at a time (Dao et al., "FlashAttention", 2022): probabilities are relative to the
/// largest score so far, and results are scaled down when this score grows.
fn sdpa_of<T: Float>(call: &Call<'_>) {
    let s = Sizes::new(call.in_shape(0), call.in_shape(2));
    let (all_q, all_k, all_v) = (call.input::<T>(0), call.input::<T>(1), call.input::<T>(2));
    let mask = Mask::<T>::new(call, 3, &s);
    let (out, logsumexp) = (call.output::<T>(0), call.output::<f32>(1));
    let (causal, scale) = (call.bool("causal"), T::Wide::of_f64(call.float("scale")));
    let (d, e, tile) = (s.width, s.values, T::Wide::tile());
    let heads = call.part(s.batch * s.heads);
    rooms::<T>(&s).lend::<T::Wide>(
        |[
            scores,
            k_packed,
            v_packed,
            maxima,
            sums,
            k_room,
            v_room,
            q_room,
            out_room,
        ]| {
            for (head, top) in heads
                .clone()
                .flat_map(|head| (0..s.queries).step_by(ROWS).map(move |top| (head, top)))
            {
                let (kv, rows) = (s.key_head(head), ROWS.min(s.queries - top));
                let (maxima, sums) = (&mut maxima[..rows], &mut sums[..rows]);
                maxima.fill(T::Wide::LOWEST);
                sums.fill(T::Wide::ZERO);
                // The number of the first row: counted over the batch and the heads, and within
                // this part.
                let first = head * s.queries + top;
                let own = first - heads.start * s.queries;
                T::rounded(&mut out[own * e..][..rows * e], out_room, |out| {
                    if s.keys == 0 {
                        out.fill(T::Wide::ZERO);
                    }
                    for left in (0..s.keys)
                        .step_by(KEYS)
                        .take_while(|&left| !causal || left < top + rows)
                    {
                        let n_keys = KEYS.min(s.keys - left);
                        let at = kv * s.keys + left;
                        let k = T::widened(&all_k[at * d..][..n_keys * d], k_room);
                        let k = Right::packed(&tile, k_packed, (n_keys, d), (d, 1), k);
                        let v = T::widened(&all_v[at * e..][..n_keys * e], v_room);
                        let v = Right::rows(&tile, v_packed, v, (n_keys, e));
                        for low in (0..rows).step_by(QUERIES) {
                            let n = QUERIES.min(rows - low);
                            let reach = if causal {
                                n_keys.min((top + low + n).saturating_sub(left))
                            } else {
                                n_keys
                            };
                            let out = &mut out[low * e..][..n * e];
                            if reach == 0 {
                                continue;
                            }
                            let q = T::widened(&all_q[(first + low) * d..][..n * d], q_room);
                            let p = &mut scores[..n * reach];
                            let (q, mut window) =
                                (Left::rows(&tile, q, d), Window::new(p, n, reach));
                            tiles(&tile, d, q, k, scale, &mut window, false);
                            Arch::new().dispatch(Exponentials {
                                sizes: &s,
                                mask: &mask,
                                row: first + low,
                                left,
                                causal,
                                scores: p,
                                maxima: &mut maxima[low..][..n],
                                sums: &mut sums[low..][..n],
                                out,
                            });
                            let p = Left::rows(&tile, p, reach);
                            tiles(
                                &tile,
                                reach,
                                p,
                                v,
                                T::Wide::ONE,
                                &mut Window::new(out, n, e),
                                0 < left,
                            );
                        }
                    }
                    for i in 0..rows {
                        let none = maxima[i] == T::Wide::LOWEST;
                        let inverse = if none {
                            T::Wide::ZERO
                        } else {
                            T::Wide::ONE / sums[i]
                        };
                        out[i * e..][..e]
                            .iter_mut()
                            .for_each(|out| *out = *out * inverse);
                        logsumexp[own + i] = if none {
                            0.0
                        } else {
                            (maxima[i].to_f64() + sums[i].to_f64().ln()) as f32
                        };
                    }
                });
            }
        },
    );
}

/// Sums side by side: enough for vector registers, and the order of additions is fixed.
const LANES: usize = 16;

/// Turns the scores of a block of queries and a tile of keys into exponentials relative to the
/// largest score so far. Scales the sums and results so far to the same score.
struct Exponentials<'a, 'b, T, W> {
    sizes: &'a Sizes,
    mask: &'a Mask<'b, T>,
    /// The first query, counted over the batch and the heads.
    row: usize,
    /// The first key.
    left: usize,
    causal: bool,
    scores: &'a mut [W],
    maxima: &'a mut [W],
    sums: &'a mut [W],
    out: &'a mut [W],
}

impl<T: Scalar, W: Real> WithSimd for Exponentials<'_, '_, T, W> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Exponentials {
            sizes: s,
            mask,
            row,
            left,
            causal,
            scores,
            maxima,
            sums,
            out,
        } = self;
        let (n, e) = (maxima.len(), s.values);
        let reach = scores.len() / n;
        for i in 0..n {
            let scores = &mut scores[i * reach..][..reach];
            let seen = s
                .reach(causal, (row + i) % s.queries)
                .saturating_sub(left)
                .min(reach);
            let (scores, beyond) = scores.split_at_mut(seen);
            beyond.fill(W::ZERO);
            mask.apply((row + i) * s.keys + left, scores);
            let max = folded(scores, W::LOWEST, |max, score| max.larger(score)).larger(maxima[i]);
            if max == W::LOWEST {
                scores.fill(W::ZERO);
                continue;
            }
            scores
                .iter_mut()
                .for_each(|score| *score = math::exp(*score - max));
            let sum = folded(scores, W::ZERO, |sum, score| sum + score);
            if 0 < left {
                let factor = math::exp(maxima[i] - max);
                sums[i] = sums[i] * factor + sum;
                out[i * e..][..e]
                    .iter_mut()
                    .for_each(|out| *out = *out * factor);
            } else {
                sums[i] = sum;
            }
            maxima[i] = max;
        }
    }
}

/// Combines numbers, [`LANES`] at a time.
#[inline(always)]
fn folded<W: Real>(numbers: &[W], start: W, combine: impl Fn(W, W) -> W) -> W {
    let mut lanes = [start; LANES];
    let (whole, rest) = numbers.as_chunks::<LANES>();
    for numbers in whole {
        (0..LANES).for_each(|i| lanes[i] = combine(lanes[i], numbers[i]));
    }
    lanes
        .iter_mut()
        .zip(rest)
        .for_each(|(lane, &number)| *lane = combine(*lane, number));
    lanes.into_iter().fold(start, combine)
}

/// By heads of keys of all the batch.
pub(super) fn cut_bwd(call: &Call<'_>) -> Cut {
    let s = Sizes::new(call.in_shape(1), call.in_shape(3));
    Cut::of(
        s.batch * s.groups,
        s.group() * s.queries * s.keys * (s.width + s.values) / 8,
    )
}
/// Gradients of queries in half precision are rounded once, so a tile has all keys.
fn tile_keys<T: Float>(s: &Sizes) -> usize {
    if T::room(1) == 0 {
        KEYS.min(s.keys)
    } else {
        s.keys
    }
}
fn rooms_bwd<T: Float>(s: &Sizes) -> Rooms<15> {
    let tile = T::Wide::tile();
    let (d, e, keys, queries) = (s.width, s.values, tile_keys::<T>(s), QUERIES.min(s.queries));
    let packed = |depth, columns| {
        if tile.reads(columns) {
            0
        } else {
            Right::room(&tile, depth, columns)
        }
    };
    Rooms([
        queries * keys,
        queries * keys,
        Right::room(&tile, d, keys),
        Right::room(&tile, e, keys),
        packed(keys, d),
        packed(queries, d),
        packed(queries, e),
        T::room(keys * d),
        T::room(keys * e),
        T::room(s.keys * d),
        T::room(s.keys * e),
        T::room(queries * d),
        T::room(queries * d),
        T::room(queries * e),
        T::room(queries * e),
    ])
}
pub(super) fn prepare_bwd(call: &Call<'_>) -> Ran {
    let s = Sizes::new(call.in_shape(1), call.in_shape(3));
    if s.batch == 0 {
        return Ok(());
    }
    floats!(call.in_dtype(1), T => rooms_bwd::<T>(&s).lend::<<T as Float>::Wide>(|_| {}));
    Ok(())
}
pub(super) fn sdpa_bwd(call: &Call<'_>) -> Ran {
    if call.in_shape(1)[0] > 0 {
        floats!(call.in_dtype(1), T => sdpa_bwd_of::<T>(call));
    }
    Ok(())
}
/// With p = exp(scores - logsumexp): dv = pᵀ dout, dp = dout vᵀ, ds = p (dp - Σ dout out) scale, dq
/// = ds k, dk = dsᵀ q.
fn sdpa_bwd_of<T: Float>(call: &Call<'_>) {
    let s = Sizes::new(call.in_shape(1), call.in_shape(3));
    let [all_dout, all_q, all_k, all_v, all_out] = std::array::from_fn(|i| call.input::<T>(i));
    let logsumexp = call.input::<f32>(5);
    let mask = Mask::<T>::new(call, 6, &s);
    let [all_dq, all_dk, all_dv] = std::array::from_fn(|j| call.output::<T>(j));
    let (causal, scale) = (call.bool("causal"), T::Wide::of_f64(call.float("scale")));
    let (d, e, tile, most) = (
        s.width,
        s.values,
        T::Wide::tile(),
        tile_keys::<T>(&s).max(1),
    );
    let (one, group, part) = (T::Wide::ONE, s.group(), call.part(s.batch * s.groups));
    rooms_bwd::<T>(&s).lend::<T::Wide>(|rooms| {
        let [
            all_p,
            all_dp,
            k_packed,
            v_packed,
            k_rows,
            q_rows,
            dout_rows,
            rooms @ ..,
        ] = rooms;
        let [
            k_room,
            v_room,
            dk_room,
            dv_room,
            q_room,
            dq_room,
            out_room,
            dout_room,
        ] = rooms;
        if s.keys == 0 {
            all_dq.fill(T::cast_f64(0.0));
        }
        for kv in part.clone() {
            let own = kv - part.start;
            // Sums over all queries of all heads of the group.
            T::rounded(
                &mut all_dk[own * s.keys * d..][..s.keys * d],
                dk_room,
                |dk| {
                    T::rounded(
                        &mut all_dv[own * s.keys * e..][..s.keys * e],
                        dv_room,
                        |dv| {
                            dk.fill(T::Wide::ZERO);
                            dv.fill(T::Wide::ZERO);
                            for left in (0..s.keys).step_by(most) {
                                let n_keys = most.min(s.keys - left);
                                let k = T::widened(
                                    &all_k[(kv * s.keys + left) * d..][..n_keys * d],
                                    k_room,
                                );
                                let v = T::widened(
                                    &all_v[(kv * s.keys + left) * e..][..n_keys * e],
                                    v_room,
                                );
                                let k_columns =
                                    Right::packed(&tile, k_packed, (n_keys, d), (d, 1), k);
                                let v_columns =
                                    Right::packed(&tile, v_packed, (n_keys, e), (e, 1), v);
                                let k = Right::rows(&tile, k_rows, k, (n_keys, d));
                                for head in kv * group..(kv + 1) * group {
                                    for low in (0..s.queries).step_by(QUERIES) {
                                        let (n, row) =
                                            (QUERIES.min(s.queries - low), head * s.queries + low);
                                        let reach = if causal {
                                            n_keys.min((low + n).saturating_sub(left))
                                        } else {
                                            n_keys
                                        };
                                        let own = row - part.start * group * s.queries;
                                        let dq = &mut all_dq[own * d..][..n * d];
                                        if reach == 0 {
                                            continue;
                                        }
                                        let q = T::widened(&all_q[row * d..][..n * d], q_room);
                                        let out =
                                            T::widened(&all_out[row * e..][..n * e], out_room);
                                        let dout =
                                            T::widened(&all_dout[row * e..][..n * e], dout_room);
                                        let (p, dp) =
                                            (&mut all_p[..n * reach], &mut all_dp[..n * reach]);
                                        let x = Left::rows(&tile, q, d);
                                        tiles(
                                            &tile,
                                            d,
                                            x,
                                            k_columns,
                                            scale,
                                            &mut Window::new(p, n, reach),
                                            false,
                                        );
                                        let x = Left::rows(&tile, dout, e);
                                        tiles(
                                            &tile,
                                            e,
                                            x,
                                            v_columns,
                                            one,
                                            &mut Window::new(dp, n, reach),
                                            false,
                                        );
                                        let logsumexp = &logsumexp[row..][..n];
                                        let (sizes, mask) = (&s, &mask);
                                        let gradients = Gradients {
                                            sizes,
                                            mask,
                                            row,
                                            left,
                                            causal,
                                            scale,
                                            p,
                                            dp,
                                            logsumexp,
                                            out,
                                            dout,
                                        };
                                        Arch::new().dispatch(gradients);
                                        let keys = left..left + reach;
                                        let dout = Right::rows(&tile, dout_rows, dout, (n, e));
                                        let dv = &mut Window::new(
                                            &mut dv[keys.start * e..keys.end * e],
                                            reach,
                                            e,
                                        );
                                        tiles(
                                            &tile,
                                            n,
                                            Left::transposed(&tile, p, reach),
                                            dout,
                                            one,
                                            dv,
                                            true,
                                        );
                                        let q = Right::rows(&tile, q_rows, q, (n, d));
                                        let dk = &mut Window::new(
                                            &mut dk[keys.start * d..keys.end * d],
                                            reach,
                                            d,
                                        );
                                        tiles(
                                            &tile,
                                            n,
                                            Left::transposed(&tile, dp, reach),
                                            q,
                                            one,
                                            dk,
                                            true,
                                        );
                                        T::rounded(dq, dq_room, |dq| {
                                            let dq = &mut Window::new(dq, n, d);
                                            tiles(
                                                &tile,
                                                reach,
                                                Left::rows(&tile, dp, reach),
                                                k,
                                                one,
                                                dq,
                                                0 < left,
                                            );
                                        });
                                    }
                                }
                            }
                        },
                    );
                },
            );
        }
    });
}

/// Turns scores into probabilities, and gradients of probabilities into gradients of scores before
/// scaling.
struct Gradients<'a, 'b, T, W> {
    sizes: &'a Sizes,
    mask: &'a Mask<'b, T>,
    /// The first query, counted over the batch and the heads.
    row: usize,
    /// The first key.
    left: usize,
    causal: bool,
    scale: W,
    p: &'a mut [W],
    dp: &'a mut [W],
    logsumexp: &'a [f32],
    out: &'a [W],
    dout: &'a [W],
}

impl<T: Scalar, W: Real + Scalar> WithSimd for Gradients<'_, '_, T, W> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Gradients {
            sizes: s,
            mask,
            row,
            left,
            causal,
            scale,
            p,
            dp,
            logsumexp,
            out,
            dout,
        } = self;
        let (n, e) = (logsumexp.len(), s.values);
        let reach = p.len() / n;
        for i in 0..n {
            let seen = s
                .reach(causal, (row + i) % s.queries)
                .saturating_sub(left)
                .min(reach);
            let (p, beyond) = p[i * reach..][..reach].split_at_mut(seen);
            beyond.fill(W::ZERO);
            let (dp, beyond) = dp[i * reach..][..reach].split_at_mut(seen);
            beyond.fill(W::ZERO);
            mask.apply((row + i) * s.keys + left, p);
            let (shift, delta) = (
                W::of(logsumexp[i]),
                dot(&dout[i * e..][..e], &out[i * e..][..e]),
            );
            for (p, dp) in p.iter_mut().zip(dp) {
                *p = math::exp(*p - shift);
                *dp = *p * (*dp - delta) * scale;
            }
        }
    }
}
#[inline(always)]
fn dot<W: Real>(a: &[W], b: &[W]) -> W {
    let mut lanes = [W::ZERO; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        (0..LANES).for_each(|i| lanes[i] = lanes[i] + a[i] * b[i]);
    }
    lanes
        .iter_mut()
        .zip(a_rest)
        .zip(b_rest)
        .for_each(|((lane, &a), &b)| *lane = *lane + a * b);
    W::of_f64(lanes.into_iter().map(Wide::to_f64).sum())
}
