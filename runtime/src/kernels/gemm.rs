//! Products of matrices, each by [`super::product`]. Half-precision factors of a half-precision
//! result are widened into scratch, one matrix of the batch at a time; integers are plain loops.
//!
//! Threads may share a product: each computes some rows or columns, whose bits do not depend on the
//! others.

use super::elementwise::is_number;
use super::math::Float;
use super::product::{Numbers, Start, Tiled, Write, product_part};
use super::signature::{Checked, Signature, broadcast_shapes, ensure, is_float, is_half};
use super::strides::{Broadcast, count};
use super::wide::{Scalar, Source, Wide, blocks, sink, source};
use super::{Cut, DataError, ELEMENTS, Ran};
use crate::kernel::{Call, Element, Window};
use artifact::DType;

// --- checks ---

/// Rows, inner, columns of a product of operands `a` and `a + 1`, and the result's shape.
fn product_shape(s: &Signature<'_>, a: usize) -> Result<([u64; 3], Vec<u64>), String> {
    s.has_kernel(a, is_number)?;
    s.expect_dtype(a, a + 1)?;
    let (x, y) = (s.shape(a), s.shape(a + 1));
    let fits = x.len() == y.len() && (2..=3).contains(&x.len());
    ensure(fits, || {
        "the factors should both have rank 2, or both 3".into()
    })?;
    let last2 = |shape: &[u64], transposed: bool| {
        let (p, q) = (shape[shape.len() - 2], shape[shape.len() - 1]);
        if transposed { (q, p) } else { (p, q) }
    };
    let ((m, k), (k2, n)) = (last2(x, s.bool("ta")?), last2(y, s.bool("tb")?));
    let (batch, batch2) = (&x[..x.len() - 2], &y[..y.len() - 2]);
    ensure(k == k2 && batch == batch2, || {
        "inner or batch dimensions differ".into()
    })?;
    Ok(([m, k, n], batch.iter().copied().chain([m, n]).collect()))
}
pub(super) fn check_matmul(s: &Signature<'_>) -> Checked {
    let (_, shape) = product_shape(s, 0)?;
    s.results(&[(s.dtype(0), &shape)])
}
pub(super) fn check_addmm(s: &Signature<'_>) -> Checked {
    let (_, shape) = product_shape(s, 1)?;
    s.expect_dtype(0, 1)?;
    let fits = broadcast_shapes(s.shape(0), &shape)? == shape;
    ensure(fits, || {
        "operand 0 does not broadcast to the product".into()
    })?;
    s.results(&[(s.dtype(0), &shape)])
}
/// The sum has the type in which half-precision numbers are added up.
pub(super) fn check_matmul_sum(s: &Signature<'_>) -> Checked {
    let (_, shape) = product_shape(s, 0)?;
    ensure(is_half(s.dtype(0)), || {
        "the factors should be BF16 or F16".into()
    })?;
    if s.ins.len() == 3 {
        s.expect(2, DType::F32)?;
        s.expect_shape(2, &shape)?;
    }
    s.results(&[(DType::F32, &shape)])
}
/// Room for both factors and the product in f32.
pub(super) fn scratch(s: &Signature<'_>) -> u64 {
    let a = s.ins.len() - 2;
    match product_shape(s, a) {
        Ok(([m, k, n], _)) if is_half(s.dtype(a)) => 4 * (m * k + k * n + m * n),
        _ => 0,
    }
}

// --- kernels ---

/// The sizes of a product: each matrix product of the batch is `m` by `k` times `k` by `n`.
struct Sizes {
    m: usize,
    k: usize,
    n: usize,
    ta: bool,
    tb: bool,
}

impl Sizes {
    /// Of operands `a` and `a + 1`.
    fn new(call: &Call<'_>, a: usize) -> Sizes {
        let (shape, y) = (call.in_shape(a), call.out_shape(0));
        let rank = shape.len();
        let (ta, tb) = (call.bool("ta"), call.bool("tb"));
        let k = if ta { shape[rank - 2] } else { shape[rank - 1] };
        Sizes {
            m: y[rank - 2],
            k,
            n: y[rank - 1],
            ta,
            tb,
        }
    }
}

pub(super) fn matmul(call: &Call<'_>) -> Ran {
    run(call, 0)
}
pub(super) fn addmm(call: &Call<'_>) -> Ran {
    run(call, 1)
}
pub(super) fn matmul_sum(call: &Call<'_>) -> Ran {
    let factors = match call.in_dtype(0) {
        DType::BF16 => [0, 1].map(|i| Numbers::Bf16(call.input(i))),
        DType::F16 => [0, 1].map(|i| Numbers::F16(call.input(i))),
        other => return Err(DataError::NoKernel(other)),
    };
    let before = (call.n_inputs() == 3).then_some(2);
    float::<f32>(call, factors, before, &Sizes::new(call, 0));
    Ok(())
}

/// The product of operands `a` and `a + 1`, plus operand 0 if `a` is 1.
fn run(call: &Call<'_>, a: usize) -> Ran {
    let sizes = Sizes::new(call, a);
    let added = (a == 1).then_some(0);
    match call.out_dtype(0) {
        DType::F32 => float::<f32>(call, factors(call, a), added, &sizes),
        DType::F64 => float::<f64>(call, factors(call, a), added, &sizes),
        DType::BF16 => half_float::<half::bf16>(call, a, added, &sizes),
        DType::F16 => half_float::<half::f16>(call, a, added, &sizes),
        DType::U8 => integer::<u8>(call, a, &sizes),
        DType::I8 => integer::<i8>(call, a, &sizes),
        DType::I16 => integer::<i16>(call, a, &sizes),
        DType::I32 => integer::<i32>(call, a, &sizes),
        DType::I64 => integer::<i64>(call, a, &sizes),
        other => return Err(DataError::NoKernel(other)),
    }
    Ok(())
}

/// Operands `a` and `a + 1`, which are not widened.
fn factors<'a, R: Element>(call: &Call<'a>, a: usize) -> [Numbers<'a, R>; 2] {
    [a, a + 1].map(|i| Numbers::Wide(call.input(i)))
}

/// True if threads share a product by columns, false if by rows of the whole batch. Each part packs
/// what it reads of the right factor, and of a transposed left factor. Not every part should pack
/// the larger factor.
fn by_columns(call: &Call<'_>, s: &Sizes) -> bool {
    let one = count(call.out_shape(0)) == s.m * s.n
        && is_float(call.out_dtype(0))
        && !is_half(call.out_dtype(0));
    one && 2 * LEAST_COLUMNS <= s.n && if s.ta { s.m <= s.n } else { s.k <= DEEP }
}
/// If the rows of a left factor are longer than this, only one thread should read them: they do not
/// stay in a cache.
const DEEP: usize = 4096;
/// The smallest numbers of columns and of rows of a part. With fewer, packing costs too much.
const LEAST_COLUMNS: usize = 192;
const LEAST_ROWS: usize = 96;
/// A multiple of the columns of every machine's tiles.
const TILES: usize = 64;

pub(super) fn cut(call: &Call<'_>) -> Cut {
    cut_of(call, &Sizes::new(call, call.n_inputs() - 2))
}
pub(super) fn cut_sum(call: &Call<'_>) -> Cut {
    cut_of(call, &Sizes::new(call, 0))
}

fn cut_of(call: &Call<'_>, s: &Sizes) -> Cut {
    // At least about ten microseconds of work.
    let least = |other: usize| (ELEMENTS * 32).div_ceil((s.k * other).max(1));
    if is_half(call.out_dtype(0)) {
        // The scratch holds the factors of one matrix at a time.
        Cut::NO
    } else if by_columns(call, s) {
        Cut {
            units: s.n,
            align: TILES,
            grain: LEAST_COLUMNS.max(least(s.m)),
            per_thread: 4,
        }
    } else {
        let batches = count(call.out_shape(0)).checked_div(s.m * s.n).unwrap_or(0);
        // Matrices with few rows are cut between matrices only.
        let (align, grain, per_thread) = if s.m < 2 * LEAST_ROWS {
            (s.m.max(1), 1, 4)
        } else {
            (1, LEAST_ROWS, 1)
        };
        Cut {
            units: (batches * s.m).max(1),
            align,
            grain: grain.max(least(s.n)),
            per_thread,
        }
    }
}

pub(super) fn prepare(call: &Call<'_>) -> Ran {
    match call.out_dtype(0) {
        DType::F64 => f64::with_room(|_| {}),
        dtype if is_float(dtype) => f32::with_room(|_| {}),
        _ => {}
    }
    Ok(())
}

/// The numbers to which a product is added.
#[allow(
    clippy::large_enum_variant,
    reason = "there is one, on the stack: kernels do not allocate"
)]
enum Added<'a, T> {
    Nothing,
    /// They lie on the result.
    Result,
    Operand(&'a [T], Broadcast),
}

impl<'a, T: Float> Added<'a, T> {
    fn new(call: &Call<'a>, operand: Option<usize>) -> Added<'a, T> {
        match operand {
            None => Added::Nothing,
            Some(i) if call.inplace(i).is_some() => Added::Result,
            Some(i) => {
                let order = Broadcast::new(call.in_shape(i), call.out_shape(0));
                Added::Operand(call.input(i), order)
            }
        }
    }
    /// Writes those of the result's elements from `at` on, unless they lie there.
    fn write(&self, at: usize, y: &mut [T::Wide]) {
        let Added::Operand(c, order) = self else {
            return;
        };
        order.runs(at, y.len(), |range, from, follow| match follow {
            true => T::Wide::load(&c[from..from + range.len()], &mut y[range]),
            false => y[range].fill(T::Wide::of(c[from])),
        });
    }
    /// How a product starts: `write` writes elements.
    fn start<'b>(&self, write: &'b Write<'b, T::Wide>) -> Start<'b, T::Wide> {
        match self {
            Added::Nothing => Start::Zero,
            Added::Result | Added::Operand(..) => Start::From(write),
        }
    }
}

/// This part of the product of two factors, added to operand `added`.
fn float<R: Float<Wide = R> + Tiled>(
    call: &Call<'_>,
    [x, w]: [Numbers<'_, R>; 2],
    added: Option<usize>,
    s: &Sizes,
) {
    let tile = R::tile();
    let (sizes, flags) = ((s.m, s.k, s.n), (s.ta, s.tb));
    let added = Added::<R>::new(call, added);
    if by_columns(call, s) {
        let columns = call.part(s.n);
        let y = call.output_columns::<R>(0, s.n);
        let write = |i: usize, j: usize, y: &mut [R]| added.write(i * s.n + j, y);
        let start = added.start(&write);
        return product_part(&tile, sizes, (0..s.m, columns), flags, (x, w), y, start);
    }
    let y = call.output::<R>(0);
    let (xs, ws, ys) = (s.m * s.k, s.k * s.n, s.m * s.n);
    let rows = call.part(count(call.out_shape(0)).checked_div(s.n).unwrap_or(0));
    let part = rows.start * s.n..rows.end * s.n;
    for b in part.start / ys.max(1)..part.end.div_ceil(ys.max(1)) {
        let (x, w) = (x.part(b * xs..(b + 1) * xs), w.part(b * ws..(b + 1) * ws));
        // The part's elements of this matrix.
        let (from, to) = (part.start.max(b * ys), part.end.min((b + 1) * ys));
        let rows = (from - b * ys) / s.n..(to - b * ys) / s.n;
        let y = &mut y[from - part.start..to - part.start];
        let write = |i: usize, j: usize, y: &mut [R]| added.write(b * ys + i * s.n + j, y);
        let start = added.start(&write);
        let y = Window::new(y, rows.len(), s.n);
        product_part(&tile, sizes, (rows, 0..s.n), flags, (x, w), y, start);
    }
}

/// The product of operands `a` and `a + 1` through scratch, added to operand `added`.
fn half_float<T: Float>(call: &Call<'_>, a: usize, added: Option<usize>, s: &Sizes) {
    let (x, w, tile) = (call.input::<T>(a), call.input::<T>(a + 1), T::Wide::tile());
    let added = Added::<T>::new(call, added);
    let y = call.output::<T>(0);
    let (xs, ws, ys) = (s.m * s.k, s.k * s.n, s.m * s.n);
    let (x_room, rest) = call.scratch::<T::Wide>().split_at_mut(xs);
    let (w_room, y_room) = rest.split_at_mut(ws);
    for (b, y) in y.chunks_mut(ys.max(1)).enumerate() {
        let (x, w) = (
            T::widened(&x[b * xs..][..xs], x_room),
            T::widened(&w[b * ws..][..ws], w_room),
        );
        let product = |y: &mut [T::Wide]| {
            let write =
                |i: usize, j: usize, y: &mut [T::Wide]| added.write(b * ys + i * s.n + j, y);
            product_part(
                &tile,
                (s.m, s.k, s.n),
                (0..s.m, 0..s.n),
                (s.ta, s.tb),
                (Numbers::Wide(x), Numbers::Wide(w)),
                Window::new(y, s.m, s.n),
                added.start(&write),
            );
        };
        match added {
            Added::Result => T::changed(y, y_room, product),
            Added::Nothing | Added::Operand(..) => T::rounded(y, y_room, product),
        }
    }
}

fn integer<T: Scalar>(call: &Call<'_>, a: usize, s: &Sizes) {
    let (x, w, mut y) = (call.input::<T>(a), call.input::<T>(a + 1), sink(call, 0));
    let c: Option<(Source<'_>, Broadcast)> = (a == 1).then(|| {
        (
            source(call, 0),
            Broadcast::new(call.in_shape(0), call.out_shape(0)),
        )
    });
    let (x_strides, w_strides) = (
        if s.ta { (1, s.m) } else { (s.k, 1) },
        if s.tb { (1, s.k) } else { (s.n, 1) },
    );
    let rows = call.part(count(call.out_shape(0)).checked_div(s.n).unwrap_or(0));
    for row in rows {
        let (b, i) = (row / s.m, row % s.m);
        let (x, w) = (&x[b * s.m * s.k..], &w[b * s.k * s.n..]);
        for (j, len) in blocks(s.n) {
            let at = row * s.n + j;
            let mut sums = [0i64; super::wide::BLOCK];
            if let Some((c, order)) = &c {
                c.load_broadcast(order, &y, at, &mut sums[..len]);
            }
            for k in 0..s.k {
                let factor = x[i * x_strides.0 + k * x_strides.1].i64();
                for (l, sum) in sums[..len].iter_mut().enumerate() {
                    *sum = sum.wrapping_add(
                        factor.wrapping_mul(w[k * w_strides.0 + (j + l) * w_strides.1].i64()),
                    );
                }
            }
            y.store(at, &sums[..len]);
        }
    }
}
