//! Softmax along a dimension, layer norm, batch norm, and their derivatives. Statistics are
//! computed in f64; for batch norm, from sums of few elements in the type of the computation.

use super::math::{self, Float, Real};
use super::signature::{Checked, Signature, ensure, is_float, statistics_dtype};
use super::strides::{around, count};
use super::wide::{BLOCK, Sink, Source, Wide, blocks, floats, sink, source, wide_float};
use super::{Cut, Ran};
use crate::kernel::{Call, Element, Planes};
use artifact::DType;
use pulp::{Arch, Simd, WithSimd};
use std::marker::PhantomData;
use std::ops::Range;

/// Sums side by side: enough for vector registers, and the order of additions is fixed.
const LANES: usize = 16;

// --- checks ---

/// One or two operands of the result's type.
pub(super) fn check_along(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.dim("dim", 0)?;
    for i in 1..s.ins.len() {
        s.expect_same(i, 0)?;
    }
    s.results(&[(s.dtype(0), s.shape(0))])
}
/// The normalised shape and the shape of the statistics.
fn normalised<'a>(s: &Signature<'a>, x: usize) -> Result<(&'a [u64], Vec<u64>), String> {
    let (shape, rank) = (s.shape(x), s.rank(x));
    let dims = usize::try_from(s.int("dims")?)
        .ok()
        .filter(|&d| 1 <= d && d <= rank);
    let dims = dims.ok_or_else(|| format!("dims should be in 1..={rank}"))?;
    let (lead, norm) = shape.split_at(rank - dims);
    Ok((
        norm,
        lead.iter().copied().chain(norm.iter().map(|_| 1)).collect(),
    ))
}
pub(super) fn check_layer_norm(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.float("eps")?;
    let (norm, statistics) = normalised(s, 0)?;
    for i in 1..s.ins.len() {
        s.expect_shape(i, norm)?;
        s.expect_dtype(i, 0)?;
    }
    let statistics = (statistics_dtype(s.dtype(0)), &statistics[..]);
    s.results(&[(s.dtype(0), s.shape(0)), statistics, statistics])
}
pub(super) fn check_layer_norm_bwd(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.expect_same(0, 1)?;
    let (norm, statistics) = normalised(s, 1)?;
    for i in [2, 3] {
        s.expect_shape(i, &statistics)?;
        s.expect(i, statistics_dtype(s.dtype(1)))?;
    }
    if s.ins.len() == 5 {
        s.expect_shape(4, norm)?;
        s.expect_dtype(4, 1)?;
    }
    let w = (s.dtype(1), norm);
    s.masked_results(&[(s.dtype(1), s.shape(1)), w, w])
}
fn check_channels(s: &Signature<'_>, x: usize, channels: std::ops::Range<usize>) -> Checked {
    s.has_kernel(x, is_float)?;
    ensure(2 <= s.rank(x), || {
        format!("operand {x} should have rank 2 or more")
    })?;
    for i in channels {
        s.expect_shape(i, &s.shape(x)[1..2])?;
        s.expect_dtype(i, x)?;
    }
    Ok(())
}
pub(super) fn check_batch_norm(s: &Signature<'_>) -> Checked {
    s.float("eps")?;
    check_channels(s, 0, 1..3)?;
    let w = (s.dtype(1), s.shape(1));
    s.results(&[(s.dtype(0), s.shape(0)), w, w, w])
}
pub(super) fn check_batch_norm_bwd(s: &Signature<'_>) -> Checked {
    s.expect_same(0, 1)?;
    check_channels(s, 1, 2..5)?;
    let w = (s.dtype(1), &s.shape(1)[1..2]);
    s.masked_results(&[(s.dtype(1), s.shape(1)), w, w])
}

// --- lines ---

/// Up to [`BLOCK`] neighbouring lines along a dimension: line `j` has `n` elements from `at + j`
/// on, `stride` apart. With as many lines as the stride, all their elements follow each other.
#[derive(Clone, Copy)]
struct Lines {
    at: usize,
    n: usize,
    stride: usize,
    lines: usize,
}

/// A number for each line.
type PerLine = [f64; BLOCK];

impl Lines {
    /// The elements of each line that are read at once.
    fn rows(&self) -> usize {
        if self.lines == self.stride {
            (BLOCK / self.lines).min(self.n).max(1)
        } else {
            1
        }
    }
    /// For each element of [`Lines::rows`], the number of its line.
    #[inline(always)]
    fn spread<R: Real>(&self, known: &PerLine) -> [R; BLOCK] {
        let mut spread = [R::ZERO; BLOCK];
        for row in spread[..self.rows() * self.lines].chunks_mut(self.lines) {
            for (to, &known) in row.iter_mut().zip(known) {
                *to = R::of_f64(known);
            }
        }
        spread
    }
}

pub(super) fn cut_lines(call: &Call<'_>) -> Cut {
    let (outer, n, inner) = around(call.out_shape(0), call.int("dim") as usize);
    Cut::of(outer, n * inner)
}
/// All lines of a part of a tensor.
fn lines(call: &Call<'_>) -> impl Iterator<Item = Lines> {
    let (outer, n, inner) = around(call.out_shape(0), call.int("dim") as usize);
    call.part(outer).flat_map(move |o| {
        blocks(inner).map(move |(j, lines)| Lines {
            at: o * n * inner + j,
            n,
            stride: inner,
            lines,
        })
    })
}

/// Combines the elements of each line: `combine(lift(x0, x1, known), ..)`, where `known` is a
/// number of the line.
#[inline(always)]
fn fold<R: Real, const N: usize>(
    l: Lines,
    xs: &[Source<'_>; N],
    y: &Sink<'_>,
    known: &PerLine,
    start: f64,
    lift: impl Fn([R; N], R) -> R,
    combine: impl Fn(f64, f64) -> f64,
) -> PerLine {
    let mut result = [start; BLOCK];
    let mut buffers = [[R::ZERO; BLOCK]; N];
    if l.stride == 1 {
        let mut lanes = [start; LANES];
        let mut lifted = [R::ZERO; BLOCK];
        let known = R::of_f64(known[0]);
        for (block, len) in blocks(l.n) {
            (0..N).for_each(|i| xs[i].load(y, l.at + block, &mut buffers[i][..len]));
            // Two loops: the first lifts and becomes vector code, the second combines.
            (0..len).for_each(|j| lifted[j] = lift(std::array::from_fn(|i| buffers[i][j]), known));
            for part in lifted[..len].chunks(LANES) {
                lanes
                    .iter_mut()
                    .zip(part)
                    .for_each(|(lane, x)| *lane = combine(*lane, x.to_f64()));
            }
        }
        let mut width = LANES;
        while 1 < width {
            width /= 2;
            (0..width).for_each(|i| lanes[i] = combine(lanes[i], lanes[i + width]));
        }
        result[0] = lanes[0];
        return result;
    }
    let rows = l.rows();
    let known = l.spread::<R>(known);
    for i in (0..l.n).step_by(rows) {
        let len = l.lines * rows.min(l.n - i);
        for (x, buffer) in xs.iter().zip(&mut buffers) {
            x.load(y, l.at + i * l.stride, &mut buffer[..len]);
        }
        // As above: two loops.
        let mut lifted = [R::ZERO; BLOCK];
        (0..len).for_each(|j| lifted[j] = lift(std::array::from_fn(|i| buffers[i][j]), known[j]));
        for (all, x) in result.iter_mut().zip(&lifted[..len]) {
            *all = combine(*all, x.to_f64());
        }
    }
    let (first, others) = result.split_at_mut(l.lines);
    for row in others[..(rows - 1) * l.lines].chunks(l.lines) {
        for (all, &one) in first.iter_mut().zip(row) {
            *all = combine(*all, one);
        }
    }
    result
}

/// Writes `f` of the elements and two numbers of their line.
#[inline(always)]
fn apply<R: Real, const N: usize>(
    l: Lines,
    xs: &[Source<'_>; N],
    y: &mut Sink<'_>,
    known: [&PerLine; 2],
    f: impl Fn([R; N], [R; 2]) -> R,
) {
    let mut buffers = [[R::ZERO; BLOCK]; N];
    let mut ys = [R::ZERO; BLOCK];
    if l.stride == 1 {
        let known = known.map(|k| R::of_f64(k[0]));
        for (block, len) in blocks(l.n) {
            (0..N).for_each(|i| xs[i].load(y, l.at + block, &mut buffers[i][..len]));
            (0..len).for_each(|j| ys[j] = f(std::array::from_fn(|i| buffers[i][j]), known));
            y.store(l.at + block, &ys[..len]);
        }
        return;
    }
    let rows = l.rows();
    let known = known.map(|known| l.spread::<R>(known));
    for i in (0..l.n).step_by(rows) {
        let (at, len) = (l.at + i * l.stride, l.lines * rows.min(l.n - i));
        (0..N).for_each(|i| xs[i].load(y, at, &mut buffers[i][..len]));
        for j in 0..len.min(BLOCK) {
            ys[j] = f(
                std::array::from_fn(|i| buffers[i][j]),
                [known[0][j], known[1][j]],
            );
        }
        y.store(at, &ys[..len]);
    }
}

const NOTHING: PerLine = [0.0; BLOCK];

#[inline(always)]
fn larger(a: f64, b: f64) -> f64 {
    if a > b || a.is_nan() { a } else { b }
}
#[inline(always)]
fn plus(a: f64, b: f64) -> f64 {
    a + b
}

/// A kernel that computes lines of floats. Its code exists for each set of instructions, so all of
/// it is inlined.
trait OfLines {
    fn run<R: Real>(call: &Call<'_>);
}

fn in_vectors<K: OfLines>(call: &Call<'_>) -> Ran {
    match call.out_dtype(0) {
        // Its exponential is not vector code.
        DType::F64 => K::run::<f64>(call),
        _ => Arch::new().dispatch(InVectors::<K>(call, PhantomData)),
    }
    Ok(())
}

struct InVectors<'a, 'b, K>(&'a Call<'b>, PhantomData<K>);

impl<K: OfLines> WithSimd for InVectors<'_, '_, K> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        K::run::<f32>(self.0);
    }
}

/// The maximum of each line, and the sum of its exponentials below that.
#[inline(always)]
fn softmax_sums<R: Real>(l: Lines, x: &[Source<'_>; 1], y: &Sink<'_>) -> (PerLine, PerLine) {
    let max = fold(
        l,
        x,
        y,
        &NOTHING,
        f64::NEG_INFINITY,
        |[x]: [R; 1], _| x,
        larger,
    );
    let sum = fold(
        l,
        x,
        y,
        &max,
        0.0,
        |[x]: [R; 1], max| math::exp(x - max),
        plus,
    );
    (max, sum)
}
pub(super) fn softmax(call: &Call<'_>) -> Ran {
    in_vectors::<Softmax>(call)
}
struct Softmax;
impl OfLines for Softmax {
    #[inline(always)]
    fn run<R: Real>(call: &Call<'_>) {
        let (x, mut y) = ([source(call, 0)], sink(call, 0));
        for l in lines(call) {
            let (max, sum) = softmax_sums::<R>(l, &x, &y);
            apply(l, &x, &mut y, [&max, &sum], |[x]: [R; 1], [max, sum]| {
                math::exp(x - max) / sum
            });
        }
    }
}
pub(super) fn log_softmax(call: &Call<'_>) -> Ran {
    in_vectors::<LogSoftmax>(call)
}
struct LogSoftmax;
impl OfLines for LogSoftmax {
    #[inline(always)]
    fn run<R: Real>(call: &Call<'_>) {
        let (x, mut y) = ([source(call, 0)], sink(call, 0));
        for l in lines(call) {
            let (max, sum) = softmax_sums::<R>(l, &x, &y);
            let log = sum.map(f64::ln);
            apply(l, &x, &mut y, [&max, &log], |[x]: [R; 1], [max, log]| {
                x - max - log
            });
        }
    }
}
pub(super) fn softmax_bwd(call: &Call<'_>) -> Ran {
    in_vectors::<SoftmaxBwd>(call)
}
/// dx = (dy - sum(dy y)) y
struct SoftmaxBwd;
impl OfLines for SoftmaxBwd {
    #[inline(always)]
    fn run<R: Real>(call: &Call<'_>) {
        let (xs, mut dx) = ([source(call, 0), source(call, 1)], sink(call, 0));
        for l in lines(call) {
            let sum = fold(
                l,
                &xs,
                &dx,
                &NOTHING,
                0.0,
                |[dy, y]: [R; 2], _| dy * y,
                plus,
            );
            apply(
                l,
                &xs,
                &mut dx,
                [&sum, &NOTHING],
                |[dy, y]: [R; 2], [sum, _]| (dy - sum) * y,
            );
        }
    }
}
pub(super) fn log_softmax_bwd(call: &Call<'_>) -> Ran {
    in_vectors::<LogSoftmaxBwd>(call)
}
/// dx = dy - exp(y) sum(dy)
struct LogSoftmaxBwd;
impl OfLines for LogSoftmaxBwd {
    #[inline(always)]
    fn run<R: Real>(call: &Call<'_>) {
        let (xs, mut dx) = ([source(call, 0), source(call, 1)], sink(call, 0));
        for l in lines(call) {
            let sum = fold(l, &xs, &dx, &NOTHING, 0.0, |[dy, _]: [R; 2], _| dy, plus);
            apply(
                l,
                &xs,
                &mut dx,
                [&sum, &NOTHING],
                |[dy, y]: [R; 2], [sum, _]| dy - math::exp(y) * sum,
            );
        }
    }
}

// --- layer norm ---

/// Rows and their length.
fn rows(shape: &[usize], dims: i64) -> (usize, usize) {
    let (lead, norm) = shape.split_at(shape.len() - dims as usize);
    (count(lead), count(norm))
}

pub(super) fn cut_rows(call: &Call<'_>) -> Cut {
    let (rows, n) = rows(call.in_shape(0), call.int("dims"));
    Cut::of(rows, n)
}
pub(super) fn layer_norm(call: &Call<'_>) -> Ran {
    wide_float!(call.out_dtype(0), W => layer_norm_of::<W>(call));
    Ok(())
}
fn layer_norm_of<R: Real>(call: &Call<'_>) {
    let (rows, n) = rows(call.in_shape(0), call.int("dims"));
    let eps = call.float("eps");
    let x = [source(call, 0)];
    let w = (1 < call.n_inputs()).then(|| source(call, 1));
    let b = (2 < call.n_inputs()).then(|| source(call, 2));
    let (mut y, mut means, mut rstds) = (sink(call, 0), sink(call, 1), sink(call, 2));
    let (mut xs, mut ws, mut bs) = ([R::ZERO; BLOCK], [R::ONE; BLOCK], [R::ZERO; BLOCK]);
    for row in call.part(rows) {
        let l = Lines {
            at: row * n,
            n,
            stride: 1,
            lines: 1,
        };
        let mut mean = fold(l, &x, &y, &NOTHING, 0.0, |[x]: [R; 1], _| x, plus);
        mean[0] /= n as f64;
        let squares = |[x]: [R; 1], mean| (x - mean) * (x - mean);
        let var = fold(l, &x, &y, &mean, 0.0, squares, plus)[0] / n as f64;
        let rstd = 1.0 / (var + eps).sqrt();
        means.store(row, &[mean[0]]);
        rstds.store(row, &[rstd]);
        let (mean, rstd) = (R::of_f64(mean[0]), R::of_f64(rstd));
        for (block, len) in blocks(n) {
            x[0].load(&y, row * n + block, &mut xs[..len]);
            if let Some(w) = &w {
                w.load(&y, block, &mut ws[..len]);
            }
            if let Some(b) = &b {
                b.load(&y, block, &mut bs[..len]);
            }
            (0..len).for_each(|j| xs[j] = (xs[j] - mean) * rstd * ws[j] + bs[j]);
            y.store(row * n + block, &xs[..len]);
        }
    }
}

/// The number of each of the three results of a mask; none if the mask excludes it.
fn places(call: &Call<'_>) -> [Option<usize>; 3] {
    let mask = call.ints("mask");
    std::array::from_fn(|i| (mask[i] == 1).then(|| mask[..i].iter().sum::<i64>() as usize))
}
/// The number of rows of a chunk: a column is summed within each chunk first. At most 32 chunks;
/// very small chunks would cost time.
fn chunk(rows: u64) -> u64 {
    rows.div_ceil(32).max(64)
}
/// Each chunk's sums of the columns of dw and db, f64.
pub(super) fn layer_norm_bwd_scratch(s: &Signature<'_>) -> u64 {
    let (lead, norm) = s
        .shape(1)
        .split_at(s.rank(1) - s.int("dims").unwrap_or(0) as usize);
    let (rows, n): (u64, u64) = (lead.iter().product(), norm.iter().product());
    if s.ints("mask").is_ok_and(|mask| mask[1..] == [0, 0]) {
        0
    } else {
        16 * n * rows.div_ceil(chunk(rows))
    }
}
pub(super) fn cut_rows_bwd(call: &Call<'_>) -> Cut {
    let (rows, n) = rows(call.in_shape(1), call.int("dims"));
    Cut {
        align: chunk(rows as u64) as usize,
        ..Cut::of(rows, n)
    }
}
pub(super) fn layer_norm_bwd(call: &Call<'_>) -> Ran {
    wide_float!(call.in_dtype(1), W => layer_norm_bwd_of::<W>(call));
    Ok(())
}
/// With x̂ = (x - mean) rstd and g = dy w: dx = rstd (g - mean(g) - x̂ mean(g x̂)), dw = Σ dy x̂,
/// db = Σ dy. Here, rows are summed within chunks only; [`layer_norm_bwd_sums`] adds up the chunks'
/// sums.
fn layer_norm_bwd_of<R: Real>(call: &Call<'_>) {
    let (rows, n) = rows(call.in_shape(1), call.int("dims"));
    let chunk = chunk(rows as u64) as usize;
    let (dy, x, means, rstds) = (
        source(call, 0),
        source(call, 1),
        source(call, 2),
        source(call, 3),
    );
    let w = (4 < call.n_inputs()).then(|| source(call, 4));
    let [dx, dw, db] = places(call);
    let mut dx = dx.map(|j| sink(call, j));
    let sums = if dw.or(db).is_some() {
        call.scratch_part::<f64>(rows, chunk, 2 * n)
    } else {
        &mut []
    };
    sums.fill(0.0);
    // A single row of dy may lie on dw, which is written at the end; here, no result is written.
    let none = &if dx.is_none() && call.inplace(0).is_some() {
        sink(call, 0)
    } else {
        Sink::none()
    };
    let (mut dys, mut xs, mut ws) = ([R::ZERO; BLOCK], [R::ZERO; BLOCK], [R::ONE; BLOCK]);
    let part = call.part(rows);
    for row in part.clone() {
        let on = dx.as_ref().unwrap_or(none);
        let (mean, rstd): (R, R) = (means.one(on, row), rstds.one(on, row));
        let (mut lanes_g, mut lanes_gx) = ([0.0; LANES], [0.0; LANES]);
        for (block, len) in blocks(n) {
            let on = dx.as_ref().unwrap_or(none);
            dy.load(on, row * n + block, &mut dys[..len]);
            x.load(on, row * n + block, &mut xs[..len]);
            (0..len).for_each(|j| xs[j] = (xs[j] - mean) * rstd);
            if !sums.is_empty() {
                let (dw, db) = sums[(row - part.start) / chunk * 2 * n..][..2 * n].split_at_mut(n);
                let (dw, db) = (&mut dw[block..][..len], &mut db[block..][..len]);
                for j in 0..len {
                    dw[j] += (dys[j] * xs[j]).to_f64();
                    db[j] += dys[j].to_f64();
                }
            }
            if dx.is_none() {
                continue;
            }
            if let Some(w) = &w {
                w.load(on, block, &mut ws[..len]);
            }
            for j in (0..len).step_by(LANES) {
                for i in 0..LANES.min(len - j) {
                    let g = dys[j + i] * ws[j + i];
                    lanes_g[i] += g.to_f64();
                    lanes_gx[i] += (g * xs[j + i]).to_f64();
                }
            }
        }
        let Some(dx) = &mut dx else { continue };
        let total = |lanes: &[f64; LANES]| R::of_f64(lanes.iter().sum::<f64>() / n as f64);
        let (mean_g, mean_gx) = (total(&lanes_g), total(&lanes_gx));
        for (block, len) in blocks(n) {
            dy.load(dx, row * n + block, &mut dys[..len]);
            x.load(dx, row * n + block, &mut xs[..len]);
            if let Some(w) = &w {
                w.load(dx, block, &mut ws[..len]);
            }
            for j in 0..len {
                let normal = (xs[j] - mean) * rstd;
                xs[j] = rstd * (dys[j] * ws[j] - mean_g - normal * mean_gx);
            }
            dx.store(row * n + block, &xs[..len]);
        }
    }
}
/// Adds up the chunks' sums, in their order.
pub(super) fn layer_norm_bwd_sums(call: &Call<'_>) -> Ran {
    let (rows, n) = rows(call.in_shape(1), call.int("dims"));
    let [_, dw, db] = places(call);
    let sums: &[f64] = if dw.or(db).is_some() {
        call.scratch()
    } else {
        &[]
    };
    let chunks = rows.div_ceil(chunk(rows as u64) as usize);
    for (which, j) in [dw, db].into_iter().enumerate() {
        let Some(mut result) = j.map(|j| sink(call, j)) else {
            continue;
        };
        for (block, len) in blocks(n) {
            let mut total = [0.0; BLOCK];
            for chunk in 0..chunks {
                let sums = &sums[(2 * chunk + which) * n + block..][..len];
                total
                    .iter_mut()
                    .zip(sums)
                    .for_each(|(total, sum)| *total += sum);
            }
            result.store(block, &total[..len]);
        }
    }
    Ok(())
}
// --- batch norm ---

/// Elements of an image's neighbouring channels that a thread reads at least. Shorter runs, far
/// from each other, would be slow to fetch.
const RUN: usize = 128;

/// The units are the channels.
pub(super) fn cut_channels(call: &Call<'_>) -> Cut {
    let (batch, channels, inner) = around(call.in_shape(0), 1);
    Cut {
        align: (RUN / inner.max(1)).max(1),
        ..Cut::of(channels, batch * inner)
    }
}

/// A tensor of images: channel `c` of image `b` has `inner` elements from `(b * channels + c) *
/// inner` on.
#[derive(Clone, Copy)]
struct Images {
    batch: usize,
    channels: usize,
    inner: usize,
}

impl Images {
    fn new(shape: &[usize]) -> Images {
        let (batch, channels, inner) = around(shape, 1);
        Images {
            batch,
            channels,
            inner,
        }
    }
    /// The number of elements of a channel.
    fn n(&self) -> f64 {
        (self.batch * self.inner) as f64
    }
    /// Channels that are read together: as many neighbours as fill a block.
    fn groups(&self, part: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let part = part.start..part.end.min(self.channels);
        let each = (BLOCK / self.inner.max(1)).max(1);
        let last = part.end;
        part.step_by(each).map(move |c| c..last.min(c + each))
    }
    /// Calls `f` with the start and length of each run of a group's elements: of one image, at
    /// most a block.
    #[inline(always)]
    fn runs(&self, group: &Range<usize>, mut f: impl FnMut(usize, usize)) {
        for b in 0..self.batch {
            for (block, len) in blocks(group.len() * self.inner) {
                f((b * self.channels + group.start) * self.inner + block, len);
            }
        }
    }
    /// For each element of a run, the number of its channel.
    fn spread<R: Real>(&self, group: &Range<usize>, of: &dyn Fn(usize) -> f64) -> [R; BLOCK] {
        let mut spread = [R::ZERO; BLOCK];
        let each = self.inner.clamp(1, BLOCK);
        for (channel, c) in spread.chunks_mut(each).zip(group.clone()) {
            channel.fill(R::of_f64(of(c)));
        }
        spread
    }
    /// A result of this shape as a row for each image. Threads share its channels.
    fn output<'a, T: Element>(&self, call: &Call<'a>, j: usize) -> Planes<'a, T> {
        let columns = self.channels * self.inner;
        call.output_planes(j, 0..self.channels.max(1), [1, 1, columns])
    }
    /// Calls `f` with the start of each run of a group's elements and its part of the result.
    #[inline(always)]
    fn write<T>(
        &self,
        y: &mut Planes<'_, T>,
        group: &Range<usize>,
        mut f: impl FnMut(usize, &mut [T]),
    ) {
        if self.inner == 0 {
            return;
        }
        let columns = group.start * self.inner..group.end * self.inner;
        let mut y = y.window(0, 0..self.batch, columns);
        for b in 0..self.batch {
            let first = (b * self.channels + group.start) * self.inner;
            for (y, block) in y.row(b).chunks_mut(BLOCK).zip((0..).step_by(BLOCK)) {
                f(first + block, y);
            }
        }
    }
}

/// Runs whose terms are added up before they are added to sums in f64.
const RUNS: usize = 16;

/// `N` sums over the elements of each channel of a group. Elements at the same place of their runs
/// have sums of their own, which are added up in the end. So a channel's sum does not depend on the
/// group's other channels.
struct Sums<R, const N: usize> {
    few: [[R; BLOCK]; N],
    /// The runs that were added to `few`.
    runs: usize,
    lanes: [PerLine; N],
}

impl<R: Real, const N: usize> Sums<R, N> {
    const NONE: Sums<R, N> = Sums {
        few: [[R::ZERO; BLOCK]; N],
        runs: 0,
        lanes: [NOTHING; N],
    };
    /// Adds the terms of a run's elements.
    #[inline(always)]
    fn add(&mut self, len: usize, terms: impl Fn(usize) -> [R; N]) {
        for j in 0..len.min(BLOCK) {
            let terms = terms(j);
            for (few, term) in self.few.iter_mut().zip(terms) {
                few[j] = few[j] + term;
            }
        }
        self.runs += 1;
        if self.runs == RUNS {
            self.flush();
        }
    }
    #[inline(always)]
    fn flush(&mut self) {
        for (lanes, few) in self.lanes.iter_mut().zip(&mut self.few) {
            for (lane, few) in lanes.iter_mut().zip(few) {
                *lane += few.to_f64();
                *few = R::ZERO;
            }
        }
        self.runs = 0;
    }
    /// The sums of a group's channels.
    #[inline(always)]
    fn channels(mut self, images: &Images, group: &Range<usize>) -> [PerLine; N] {
        self.flush();
        self.lanes.map(|lanes| {
            let mut sums = NOTHING;
            let lanes = lanes.chunks(images.inner.clamp(1, BLOCK)).take(group.len());
            for (sum, lanes) in sums.iter_mut().zip(lanes) {
                *sum = lanes.iter().sum();
            }
            sums
        })
    }
}

pub(super) fn batch_norm(call: &Call<'_>) -> Ran {
    floats!(call.out_dtype(0), T => Arch::new().dispatch(BatchNorm::<T>(call, PhantomData)));
    Ok(())
}

/// The forward of some channels.
struct BatchNorm<'a, 'b, T>(&'a Call<'b>, PhantomData<T>);

impl<T: Float> WithSimd for BatchNorm<'_, '_, T> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let call = self.0;
        let images = Images::new(call.in_shape(0));
        let eps = call.float("eps");
        let [x, w, b] = [0, 1, 2].map(|i| call.input::<T>(i));
        let mut y = images.output::<T>(call, 0);
        let [mut means, mut rstds, mut vars] = [1, 2, 3].map(|j| sink(call, j));
        let n = images.n();
        let (mut xs, mut ys) = ([T::Wide::ZERO; BLOCK], [T::Wide::ZERO; BLOCK]);

        for group in images.groups(call.part(images.channels.max(1))) {
            let (mean, squares) = statistics(&images, x, &group);
            for (i, c) in group.clone().enumerate() {
                means.store(c, &[mean[i]]);
                rstds.store(c, &[1.0 / (squares[i] / n + eps).sqrt()]);
                vars.store(c, &[squares[i] / (n - 1.0)]);
            }
            let of = |c: usize| c - group.start;
            let scale = |c: usize| w[c].f64() / (squares[of(c)] / n + eps).sqrt();
            let means = images.spread::<T::Wide>(&group, &|c| mean[of(c)]);
            let scales = images.spread::<T::Wide>(&group, &scale);
            let shifts = images.spread::<T::Wide>(&group, &|c| b[c].f64());
            images.write(&mut y, &group, |at, y| {
                let n = y.len();
                let xs = T::widened(&x[at..at + n], &mut xs);
                T::rounded(y, &mut ys, |y| {
                    let known = means[..n].iter().zip(&scales).zip(&shifts);
                    for ((y, &x), ((&mean, &scale), &shift)) in y.iter_mut().zip(xs).zip(known) {
                        *y = (x - mean) * scale + shift;
                    }
                });
            });
        }
    }
}

/// The means of a group's channels, and the sums of their elements' squared differences from them.
#[inline(always)]
fn statistics<T: Float>(images: &Images, x: &[T], group: &Range<usize>) -> (PerLine, PerLine) {
    let mut room = [T::Wide::ZERO; BLOCK];
    let mut sums = Sums::<T::Wide, 1>::NONE;
    images.runs(group, |at, len| {
        let xs = T::widened(&x[at..at + len], &mut room);
        sums.add(len, |j| [xs[j]]);
    });
    let [sums] = sums.channels(images, group);
    let means = sums.map(|sum| sum / images.n());
    let of_element = images.spread::<T::Wide>(group, &|c| means[c - group.start]);
    let mut squares = Sums::<T::Wide, 1>::NONE;
    images.runs(group, |at, len| {
        let xs = T::widened(&x[at..at + len], &mut room);
        let means = &of_element[..len];
        squares.add(len, |j| [(xs[j] - means[j]) * (xs[j] - means[j])]);
    });
    let [squares] = squares.channels(images, group);
    (means, squares)
}

pub(super) fn batch_norm_bwd(call: &Call<'_>) -> Ran {
    floats!(call.in_dtype(1), T => Arch::new().dispatch(BatchNormBwd::<T>(call, PhantomData)));
    Ok(())
}

/// The gradients of some channels. With x̂ = (x - mean) rstd: dw = Σ dy x̂, db = Σ dy, dx = w rstd
/// (dy - db / n - x̂ dw / n).
struct BatchNormBwd<'a, 'b, T>(&'a Call<'b>, PhantomData<T>);

impl<T: Float> WithSimd for BatchNormBwd<'_, '_, T> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let call = self.0;
        let images = Images::new(call.in_shape(1));
        let [dy, x, w, means, rstds] = std::array::from_fn(|i| call.input::<T>(i));
        let [dx, dw, db] = places(call);
        let mut dx = dx.map(|j| images.output::<T>(call, j));
        let [mut dw, mut db] = [dw, db].map(|j| j.map(|j| call.output::<T>(j)));
        let n = images.n();
        let [mut dys, mut xs, mut room] = [[T::Wide::ZERO; BLOCK]; 3];

        let part = call.part(images.channels.max(1));
        for group in images.groups(part.clone()) {
            let mean = images.spread::<T::Wide>(&group, &|c| means[c].f64());
            let mut sums = Sums::<T::Wide, 2>::NONE;
            images.runs(&group, |at, len| {
                let dys = T::widened(&dy[at..at + len], &mut dys);
                let xs = T::widened(&x[at..at + len], &mut xs);
                let mean = &mean[..len];
                sums.add(len, |j| [(xs[j] - mean[j]) * dys[j], dys[j]]);
            });
            let [mut sums_dw, sums_db] = sums.channels(&images, &group);
            for (c, sum) in group.clone().zip(&mut sums_dw) {
                *sum *= rstds[c].f64();
            }
            for (result, sums) in [(&mut dw, &sums_dw), (&mut db, &sums_db)] {
                if let Some(result) = result {
                    for (c, &sum) in group.clone().zip(sums) {
                        result[c - part.start] = T::cast_f64(sum);
                    }
                }
            }

            let Some(dx) = &mut dx else { continue };
            // dx = scale ((dy - shift) - slope (x - mean))
            let of = |c: usize| c - group.start;
            let scale = |c: usize| w[c].f64() * rstds[c].f64();
            let slope = |c: usize| rstds[c].f64() * sums_dw[of(c)] / n;
            let shift = |c: usize| sums_db[of(c)] / n;
            let scales = images.spread::<T::Wide>(&group, &scale);
            let slopes = images.spread::<T::Wide>(&group, &slope);
            let shifts = images.spread::<T::Wide>(&group, &shift);
            images.write(dx, &group, |at, dx| {
                let n = dx.len();
                let dys = T::widened(&dy[at..at + n], &mut dys);
                let xs = T::widened(&x[at..at + n], &mut xs);
                let (mean, scales, slopes, shifts) =
                    (&mean[..n], &scales[..n], &slopes[..n], &shifts[..n]);
                T::rounded(dx, &mut room, |dx| {
                    for (j, dx) in dx.iter_mut().enumerate() {
                        *dx = scales[j] * ((dys[j] - shifts[j]) - slopes[j] * (xs[j] - mean[j]));
                    }
                });
            });
        }
    }
}
