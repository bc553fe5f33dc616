//! Products of matrices, each by [`super::product`]; integers are plain loops.
//!
//! Threads may share a product: each computes some rows or columns, whose bits do not depend on the
//! others.

use super::elementwise::is_number;
use super::factor::Factor;
use super::math::Float;
use super::product::{Numbers, Start, Tiled, Write, product_part};
use super::signature::{Checked, Signature, broadcast_shapes, ensure, is_float, is_half};
use super::strides::{Broadcast, count};
use super::wide::{Scalar, Source, Wide, blocks, sink, source};
use super::{Cut, DataError, ELEMENTS, Ran};
use crate::kernel::{Call, Window};
use artifact::DType;
use std::ops::Range;

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
    fn sizes(&self) -> (usize, usize, usize) {
        (self.m, self.k, self.n)
    }
    /// Whether the factors are read transposed.
    fn flags(&self) -> (bool, bool) {
        (self.ta, self.tb)
    }
}

pub(super) fn matmul(call: &Call<'_>) -> Ran {
    run(call, 0)
}
pub(super) fn addmm(call: &Call<'_>) -> Ran {
    run(call, 1)
}
/// A product of halves in f32.
pub(super) fn matmul_sum(call: &Call<'_>) -> Ran {
    let [x, w] = match call.in_dtype(0) {
        DType::BF16 => [0, 1].map(|i| Numbers::Bf16(call.input(i))),
        DType::F16 => [0, 1].map(|i| Numbers::F16(call.input(i))),
        other => return Err(DataError::NoKernel(other)),
    };
    let added = (call.n_inputs() == 3).then_some(2);
    let (s, tile) = (Sizes::new(call, 0), f32::tile());
    float::<f32>(call, added, &s, |[of_x, of_w], part, y, start| {
        let factors = (x.part(of_x), w.part(of_w));
        product_part(&tile, s.sizes(), part, s.flags(), factors, y, start);
    });
    Ok(())
}

/// The product of operands `a` and `a + 1`, plus operand 0 if `a` is 1.
fn run(call: &Call<'_>, a: usize) -> Ran {
    let sizes = Sizes::new(call, a);
    let added = (a == 1).then_some(0);
    match call.out_dtype(0) {
        DType::F32 => of_factors::<f32>(call, a, added, &sizes),
        DType::F64 => of_factors::<f64>(call, a, added, &sizes),
        DType::BF16 => of_factors::<half::bf16>(call, a, added, &sizes),
        DType::F16 => of_factors::<half::f16>(call, a, added, &sizes),
        DType::U8 => integer::<u8>(call, a, &sizes),
        DType::I8 => integer::<i8>(call, a, &sizes),
        DType::I16 => integer::<i16>(call, a, &sizes),
        DType::I32 => integer::<i32>(call, a, &sizes),
        DType::I64 => integer::<i64>(call, a, &sizes),
        other => return Err(DataError::NoKernel(other)),
    }
    Ok(())
}

/// True if threads share a product by columns, false if by rows of the whole batch. Each part packs
/// what it reads of the right factor, and of a transposed left factor. Not every part should pack
/// the larger factor.
fn by_columns(call: &Call<'_>, s: &Sizes) -> bool {
    // Without a matrix, the factors have no numbers.
    let n = count(call.out_shape(0));
    let one = 0 < n && n == s.m * s.n && is_float(call.out_dtype(0));
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
    if by_columns(call, s) {
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
            Added::Result => Start::Result,
            Added::Operand(..) => Start::From(write),
        }
    }
}

/// This part of the product of operands `a` and `a + 1`, added to operand `added`.
fn of_factors<T: Factor>(call: &Call<'_>, a: usize, added: Option<usize>, s: &Sizes) {
    let (x, w, tile) = (call.input::<T>(a), call.input::<T>(a + 1), T::Wide::tile());
    float::<T>(call, added, s, |[of_x, of_w], part, y, start| {
        let factors = (&x[of_x], &w[of_w]);
        T::product_part(&tile, s.sizes(), part, s.flags(), factors, y, start);
    });
}

/// Rows and columns of a product.
type Part = (Range<usize>, Range<usize>);

/// This part of a product, added to operand `added`. `product` computes some rows and columns of a
/// product of two matrices, which lie where the first argument says in the factors.
fn float<T: Float>(
    call: &Call<'_>,
    added: Option<usize>,
    s: &Sizes,
    product: impl Fn([Range<usize>; 2], Part, Window<'_, T>, Start<'_, T::Wide>),
) {
    let added = Added::<T>::new(call, added);
    let (xs, ws, ys) = (s.m * s.k, s.k * s.n, s.m * s.n);
    if by_columns(call, s) {
        let columns = call.part(s.n);
        let y = call.output_columns::<T>(0, s.n);
        let write = |i: usize, j: usize, y: &mut [T::Wide]| added.write(i * s.n + j, y);
        return product([0..xs, 0..ws], (0..s.m, columns), y, added.start(&write));
    }
    let y = call.output::<T>(0);
    let rows = call.part(count(call.out_shape(0)).checked_div(s.n).unwrap_or(0));
    let part = rows.start * s.n..rows.end * s.n;
    for b in part.start / ys.max(1)..part.end.div_ceil(ys.max(1)) {
        let matrices = [xs, ws].map(|numbers| b * numbers..(b + 1) * numbers);
        // The part's elements of this matrix.
        let (from, to) = (part.start.max(b * ys), part.end.min((b + 1) * ys));
        let rows = (from - b * ys) / s.n..(to - b * ys) / s.n;
        let y = &mut y[from - part.start..to - part.start];
        let write = |i: usize, j: usize, y: &mut [T::Wide]| added.write(b * ys + i * s.n + j, y);
        let y = Window::new(y, rows.len(), s.n);
        product(matrices, (rows, 0..s.n), y, added.start(&write));
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
