//! The product of two matrices: the micro-kernels of `gemm-f32` and `gemm-f64`, which multiply a
//! tile of a few rows and columns at full speed, and our own loops around them.
//!
//! The loops in those crates allocate for each product. Ours keep one workspace for each thread,
//! made at the thread's first product, so that a step in steady state allocates nothing. The method
//! is Goto's: a block of the right factor is packed so that it stays in the second cache while
//! tiles use it. Cuts depend only on the shape. Measured on one core of Zen 3 (AVX2), f32, the
//! shapes of a small GPT-2 in all orders: 84 to 98 GFLOP/s, which is 0.92 to 1.06 times the speed
//! of the crate `gemm`'s loops; attention's small products 57 to 91, which is 0.97 to 1.03 times.
//! On one core of Zen 4 (AVX-512), whose limit is 118: 104 to 111. A product of few rows spends its
//! time on packing a right factor that is read transposed: squares of it are turned in registers.
//!
//! Products of bf16 have instructions of their own on some machines, see [`pairs`]. Otherwise
//! half-precision factors are widened to f32, a block at a time.

#![allow(
    unsafe_code,
    reason = "micro-kernels take pointers: those of the crates in `tiles`, our own in `banded`. \
              And vectors have types of their own: see `pack::turned_f32`"
)]

mod banded;
mod pack;
#[cfg(target_arch = "x86_64")]
mod pairs;

pub(super) use self::banded::{Banded, LINES, Rows, Steps, elements_of, pairs_of};
pub(super) use self::pack::pack;
use self::pack::{LINE_BYTES, Turned, fetch};
use super::vectors::Vectors;
use super::wide::{Scalar, Wide};
use crate::kernel::Window;
use half::{bf16, f16};
use std::cell::RefCell;
use std::ops::Range;

/// `(columns, rows, depth, y, w, x, y's row stride, y's column stride, w's row stride, x's column
/// stride, x's row stride, factor of y, factor of the product, 0: y is overwritten or 1: added to,
/// …)`. The crates swap rows and columns: a row-major `y` here is the transposed product there. It
/// computes `y[i][j] (+)= sum over l of x[i][l] w[l][j]` for a tile. `w`'s columns are next to each
/// other.
type Micro<R> = unsafe fn(
    usize,
    usize,
    usize,
    *mut R,
    *const R,
    *const R,
    isize,
    isize,
    isize,
    isize,
    isize,
    R,
    R,
    u8,
    bool,
    bool,
    bool,
    *const R,
);

/// The micro-kernels of a machine: one for each number of vectors in a tile's row and each number
/// of rows.
pub(super) struct Tile<R: 'static> {
    kernels: &'static [Micro<R>],
    /// The largest number of rows of a tile.
    rows: usize,
    /// The largest number of columns, in whole vectors.
    columns: usize,
    /// Numbers in a vector. Kernels read whole vectors of `w`.
    lanes: usize,
    /// Instructions for bf16, if there are.
    bf16: Option<&'static Bf16<R>>,
}

impl<R: Tiled> Tile<R> {
    /// Whether this number of columns of a right factor may be read in place: the columns must be
    /// whole vectors.
    pub(super) fn reads(&self, columns: usize) -> bool {
        columns.is_multiple_of(self.lanes)
    }
    /// Columns of a tile, and of a panel of a right factor.
    pub(super) fn columns(&self) -> usize {
        self.columns
    }
    /// Instructions for the numbers.
    pub(super) fn pairs(&self, are_bf16: bool) -> Option<&'static Bf16<R>> {
        self.bf16.filter(|_| are_bf16)
    }
    /// The tile that computes a product of the numbers, and its depth.
    pub(super) fn of(&self, are_bf16: bool, depth: usize) -> (&Tile<R>, usize) {
        match self.pairs(are_bf16) {
            Some(bf16) => (bf16.tile, depth.div_ceil(2)),
            None => (self, depth),
        }
    }
    /// Rows of a tile, and of a panel of a left factor.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }
    /// Packs rows of a left factor into panels: see [`pack::pack`].
    pub(super) fn pack_rows(
        &self,
        room: &mut [R],
        panel: usize,
        rows: (usize, usize),
        depth: (usize, usize),
        from: &[R],
    ) {
        pack(room, (self.rows, panel), rows, depth, from);
    }
    /// Packs columns of a right factor into panels: see [`pack::pack`].
    pub(super) fn pack_columns(
        &self,
        room: &mut [R],
        panel: usize,
        columns: (usize, usize),
        depth: (usize, usize),
        from: &[R],
    ) {
        pack(room, (self.columns, panel), columns, depth, from);
    }
    /// Whether rows of a left factor may be read in place if neighbouring elements of a row are
    /// `apart` bytes from each other, each in another cache line. A tile of many vectors computes
    /// long enough to hide the second cache's latency, unless the lines compete for the same set of
    /// the cache. Other tiles read packed rows.
    fn hides(&self, apart: usize) -> bool {
        16 <= self.rows * self.columns / self.lanes && !apart.is_multiple_of(4096)
    }
}

/// What a machine has that multiplies pairs of bf16. A pair is two numbers in the bits of one.
pub(super) struct Bf16<R: 'static> {
    /// For matrices of pairs.
    pub(super) tile: &'static Tile<R>,
    /// For bands of images.
    pub(super) banded: &'static Banded<R>,
    product_part: Bf16Product<R>,
    /// Makes pairs of rows of so many widened numbers, in place: a row's pairs begin where it did.
    pub(super) pair_rows: fn(&mut [R], usize),
    /// The same for panels of so many lines of so many widened numbers: pairs of two lines.
    pub(super) pair_panels: fn(&mut [R], (usize, usize)),
}

/// [`product_part`] of bf16.
type Bf16Product<R> = fn(
    (usize, usize, usize),
    (Range<usize>, Range<usize>),
    (bool, bool),
    (&[bf16], &[bf16]),
    &mut Window<'_, R>,
    Start<'_, R>,
);

/// A factor's numbers. Half-precision numbers are widened a block at a time.
#[derive(Clone, Copy)]
pub(super) enum Numbers<'a, R> {
    Wide(&'a [R]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

impl<R: Wide> Numbers<'_, R> {
    fn len(&self) -> usize {
        match self {
            Numbers::Wide(x) => x.len(),
            Numbers::Bf16(x) => x.len(),
            Numbers::F16(x) => x.len(),
        }
    }
    /// Some of the numbers.
    pub(super) fn part(self, range: Range<usize>) -> Self {
        match self {
            Numbers::Wide(x) => Numbers::Wide(&x[range]),
            Numbers::Bf16(x) => Numbers::Bf16(&x[range]),
            Numbers::F16(x) => Numbers::F16(&x[range]),
        }
    }
}

impl<'a, R: Wide> Numbers<'a, R> {
    /// `n` vectors, `stride` apart, of `depth` numbers, `step` apart, and how far apart they are in
    /// the slice. One of `stride` and `step` is 1. Half-precision numbers are widened into `room`.
    fn widened(
        self,
        room: &'a mut [R],
        (n, stride): (usize, usize),
        (depth, step): (usize, usize),
    ) -> (&'a [R], usize, usize) {
        let (lines, length, apart) = if step == 1 {
            (n, depth, stride)
        } else {
            (depth, n, step)
        };
        let at = |line: usize| line * apart..line * apart + length;
        let rows = room.chunks_exact_mut(length).take(lines).enumerate();
        match self {
            Numbers::Wide(x) => return (x, stride, step),
            Numbers::Bf16(x) => rows.for_each(|(i, row)| R::load(&x[at(i)], row)),
            Numbers::F16(x) => rows.for_each(|(i, row)| R::load(&x[at(i)], row)),
        }
        if step == 1 {
            (room, depth, 1)
        } else {
            (room, 1, n)
        }
    }
}

/// The instruction sets with micro-kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Set {
    /// AVX-512 with products of bf16.
    Bf16,
    Avx512,
    Fma,
    Neon,
    Scalar,
}

impl Set {
    /// The best first.
    const ALL: [Set; 5] = [Set::Bf16, Set::Avx512, Set::Fma, Set::Neon, Set::Scalar];
}

/// A type in which products are computed.
pub(super) trait Tiled: Vectors + Scalar + Turned {
    /// The micro-kernels for these instructions, if the machine has them.
    fn tile_of(set: Set) -> Option<Tile<Self>>;
    /// The best micro-kernels that this machine has.
    fn tile() -> Tile<Self> {
        Set::ALL
            .into_iter()
            .find_map(Self::tile_of)
            .expect("every machine should have scalars")
    }
    /// Lends this thread's workspace: [`ROOM`] numbers.
    fn with_room(f: impl FnOnce(&mut [Self]));
    /// Lends another of this thread's workspaces, which grows to `n` numbers if it has fewer.
    fn with_space(n: usize, f: impl FnOnce(&mut [Self]));
}

/// The depth of a packed block: a tile's rows of `x` then stay in the first cache. Sums are cut
/// there.
const DEPTH: usize = artifact::PRODUCT_DEPTH;
/// The number of columns of `w` that are packed at once: 256 KiB of f32 in the second cache. A
/// multiple of every tile's columns.
const COLUMNS: usize = 128;
/// The number of rows of `x` that are packed or widened at once.
const ROWS: usize = 1024;
/// Packed rows, with a line between panels.
const LEFT: usize = ROWS * (DEPTH + LINE_BYTES / size_of::<f32>());
/// And columns of `w`, packed and widened.
const ROOM: usize = LEFT + 2 * DEPTH * COLUMNS;
/// The most columns of a tile.
pub(super) const MOST_WIDE: usize = 64;

/// Products of bf16 are summed in f32.
fn bf16_instructions() -> Option<&'static Bf16<f32>> {
    #[cfg(target_arch = "x86_64")]
    return pairs::instructions();
    #[cfg(not(target_arch = "x86_64"))]
    None
}

macro_rules! tiled {
    ($ty:ident, $micro:ident, $bf16:expr,
     avx512 $avx512:literal, fma $fma:literal, neon $neon:literal) => {
        impl Tiled for $ty {
            fn tile_of(set: Set) -> Option<Tile<$ty>> {
                macro_rules! tile {
                    ($set:ident, $lanes:literal) => {{
                        use $micro::microkernel::$set::$ty::{MR_DIV_N, NR, UKR};
                        const COLUMNS: usize = MR_DIV_N * $lanes;
                        Tile {
                            kernels: UKR.as_flattened(),
                            rows: NR,
                            columns: COLUMNS,
                            lanes: $lanes,
                            bf16: None,
                        }
                    }};
                }
                match set {
                    #[cfg(target_arch = "x86_64")]
                    Set::Bf16 => $bf16.and_then(|bf16| {
                        let tile = <$ty>::tile_of(Set::Avx512)?;
                        Some(Tile {
                            bf16: Some(bf16),
                            ..tile
                        })
                    }),
                    #[cfg(target_arch = "x86_64")]
                    Set::Avx512 => std::arch::is_x86_feature_detected!("avx512f")
                        .then(|| tile!(avx512f, $avx512)),
                    #[cfg(target_arch = "x86_64")]
                    Set::Fma => {
                        std::arch::is_x86_feature_detected!("fma").then(|| tile!(fma, $fma))
                    }
                    #[cfg(target_arch = "aarch64")]
                    Set::Neon => {
                        std::arch::is_aarch64_feature_detected!("neon").then(|| tile!(neon, $neon))
                    }
                    Set::Scalar => Some(tile!(scalar, 1)),
                    _ => None,
                }
            }
            fn with_room(f: impl FnOnce(&mut [$ty])) {
                thread_local! {
                    static MEMORY: RefCell<Vec<$ty>> = const { RefCell::new(Vec::new()) };
                }
                MEMORY.with_borrow_mut(|memory| f(lines(memory, ROOM)));
            }
            fn with_space(n: usize, f: impl FnOnce(&mut [$ty])) {
                thread_local! {
                    static MEMORY: RefCell<Vec<$ty>> = const { RefCell::new(Vec::new()) };
                }
                MEMORY.with_borrow_mut(|memory| f(lines(memory, n)));
            }
        }
    };
}
/// The first `n` numbers from a cache line on.
fn lines<R: Tiled>(memory: &mut Vec<R>, n: usize) -> &mut [R] {
    let enough = n + LINE_BYTES / size_of::<R>();
    if memory.len() < enough {
        memory.resize(enough, R::ZERO);
    }
    let skip = memory.as_ptr().align_offset(LINE_BYTES);
    &mut memory[skip..][..n]
}
tiled!(f32, gemm_f32, bf16_instructions(), avx512 16, fma 8, neon 4);
tiled!(f64, gemm_f64, None, avx512 8, fma 4, neon 2);

/// Writes numbers of a result: it gets a row, a column and the numbers from there on.
pub(super) type Write<'a, R> = dyn Fn(usize, usize, &mut [R]) + 'a;

/// The numbers to which a product is added.
#[derive(Clone, Copy)]
pub(super) enum Start<'a, R> {
    /// Nothing.
    Zero,
    /// The numbers of the result.
    Result,
    /// The numbers that the function writes. The product is added while they are in the first
    /// cache.
    From(&'a Write<'a, R>),
}

/// Some rows and columns of the product of an `m` by `k` and a `k` by `n` matrix; `ta` and `tb` say
/// whether they are read transposed. `y` has only these rows and columns. Their bits do not depend
/// on which others are computed with them.
pub(super) fn product_part<R: Tiled>(
    tile: &Tile<R>,
    (m, k, n): (usize, usize, usize),
    (rows, columns): (Range<usize>, Range<usize>),
    (ta, tb): (bool, bool),
    (x, w): (Numbers<'_, R>, Numbers<'_, R>),
    mut y: Window<'_, R>,
    start: Start<'_, R>,
) {
    if rows.is_empty() || columns.is_empty() {
        return;
    }
    if k == 0 {
        (0..y.rows()).for_each(|i| match start {
            Start::Zero => y.row(i).fill(R::ZERO),
            Start::Result => {}
            Start::From(f) => f(rows.start + i, columns.start, y.row(i)),
        });
        return;
    }
    let whole = x.len() == m * k && w.len() == k * n && rows.end <= m && columns.end <= n;
    let whole = whole && (y.rows(), y.columns()) == (rows.len(), columns.len());
    assert!(
        whole,
        "slices should be whole matrices, and the result some of their product"
    );
    if let (Some(bf16), Numbers::Bf16(x), Numbers::Bf16(w)) = (tile.bf16, x, w) {
        let part = (rows, columns);
        return (bf16.product_part)((m, k, n), part, (ta, tb), (x, w), &mut y, start);
    }
    let (x_row, x_column) = if ta { (1, m) } else { (k, 1) };
    let (w_row, w_column) = if tb { (1, k) } else { (n, 1) };
    let far = ta && 2 * tile.columns < columns.len() && !tile.hides(m * size_of::<R>());
    let wide = matches!(x, Numbers::Wide(_));
    let pack_x = far || ta && !wide;
    // The room of packed rows, and of rows that are widened first.
    let (packed, most_rows) = match (pack_x, wide) {
        (true, true) => (LEFT, ROWS / tile.rows * tile.rows),
        (true, false) => (LEFT / 2, ROWS / 2 / tile.rows * tile.rows),
        (false, true) => (0, rows.len()),
        (false, false) => (0, ROWS),
    };
    R::with_room(|room| {
        let (x_room, room) = room.split_at_mut(LEFT);
        let (x_room, x_widened) = x_room.split_at_mut(packed);
        let (w_room, w_widened) = room.split_at_mut(COLUMNS * DEPTH);
        for top in rows.clone().step_by(most_rows) {
            let height = most_rows.min(rows.end - top);
            for shallow in (0..k).step_by(DEPTH) {
                let depth = DEPTH.min(k - shallow);
                let x = x.part(top * x_row + shallow * x_column..x.len());
                let (x, row, column) = x.widened(x_widened, (height, x_row), (depth, x_column));
                let x = if pack_x {
                    Left::packed(tile, x_room, (height, row), (depth, column), x)
                } else {
                    Left {
                        x,
                        row,
                        column,
                        panel: tile.rows * row,
                    }
                };
                for left in columns.clone().step_by(COLUMNS) {
                    let width = COLUMNS.min(columns.end - left);
                    let w = w.part(shallow * w_row + left * w_column..w.len());
                    let (w, column, row) = w.widened(w_widened, (width, w_column), (depth, w_row));
                    // A few rows read w in place if its columns are whole vectors.
                    let pack_w = tb || !width.is_multiple_of(tile.lanes) || 8 * tile.rows < height;
                    let w = if pack_w {
                        Right::packed(tile, w_room, (width, column), (depth, row), w)
                    } else {
                        Right {
                            w,
                            row,
                            panel: tile.columns,
                        }
                    };
                    let (i, j) = (top - rows.start, left - columns.start);
                    let y = &mut y.part(i..i + height, j..j + width);
                    match start {
                        Start::From(f) if shallow == 0 => {
                            for low in (0..height).step_by(STARTED * tile.rows) {
                                let high = height.min(low + STARTED * tile.rows);
                                let y = &mut y.part(low..high, 0..width);
                                (low..high).for_each(|l| f(top + l, left, y.row(l - low)));
                                let x = Left {
                                    x: &x.x[low / tile.rows * x.panel..],
                                    ..x
                                };
                                tiles(tile, depth, x, w, R::ONE, y, true);
                            }
                        }
                        _ => {
                            let add = 0 < shallow || matches!(start, Start::Result);
                            tiles(tile, depth, x, w, R::ONE, y, add);
                        }
                    }
                }
            }
        }
    });
}

/// Tiles of rows that [`Start::From`] writes before a product is added to them.
const STARTED: usize = 4;

/// A left factor: number `l` of row `i` of panel `p`, of a tile's rows, lies at `p * panel + i *
/// row + l * column`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a, R> {
    pub(super) x: &'a [R],
    pub(super) row: usize,
    pub(super) column: usize,
    pub(super) panel: usize,
}

impl<'a, R: Tiled> Left<'a, R> {
    /// Rows `stride` apart.
    pub(super) fn rows(tile: &Tile<R>, x: &'a [R], stride: usize) -> Left<'a, R> {
        Left {
            x,
            row: stride,
            column: 1,
            panel: tile.rows * stride,
        }
    }
    /// Panels of a tile's rows, `depth` numbers apart in each row.
    pub(super) fn panels(tile: &Tile<R>, x: &'a [R], depth: usize) -> Left<'a, R> {
        Left {
            x,
            row: 1,
            column: tile.rows,
            panel: tile.rows * depth,
        }
    }
    /// The transposed of rows `stride` apart.
    pub(super) fn transposed(tile: &Tile<R>, x: &'a [R], stride: usize) -> Left<'a, R> {
        Left {
            x,
            row: 1,
            column: stride,
            panel: tile.rows,
        }
    }
    /// Rows `stride` apart of `depth` numbers, `step` apart, packed. One of `stride` and `step` is
    /// 1.
    pub(super) fn packed(
        tile: &Tile<R>,
        room: &'a mut [R],
        rows: (usize, usize),
        (depth, step): (usize, usize),
        from: &[R],
    ) -> Left<'a, R> {
        // A line between panels keeps them from competing for the same set of the first cache.
        let panel = tile.rows * depth + LINE_BYTES / size_of::<R>();
        tile.pack_rows(room, panel, rows, (depth, step), from);
        Left {
            x: room,
            row: 1,
            column: tile.rows,
            panel,
        }
    }
}

/// A right factor: column `j` of row `l` of panel `p`, of a tile's columns, lies at `p * panel + l
/// * row + j`. Whole vectors are read.
#[derive(Clone, Copy)]
pub(super) struct Right<'a, R> {
    pub(super) w: &'a [R],
    pub(super) row: usize,
    pub(super) panel: usize,
}

impl<'a, R: Tiled> Right<'a, R> {
    /// The room that packed columns need.
    pub(super) fn room(tile: &Tile<R>, depth: usize, columns: usize) -> usize {
        columns.next_multiple_of(tile.columns) * depth
    }
    /// `depth` rows of `columns` numbers, in place if possible, else packed.
    pub(super) fn rows(
        tile: &Tile<R>,
        room: &'a mut [R],
        w: &'a [R],
        (depth, columns): (usize, usize),
    ) -> Right<'a, R> {
        match tile.reads(columns) {
            true => Right {
                w,
                row: columns,
                panel: tile.columns,
            },
            false => Right::packed(tile, room, (columns, 1), (depth, columns), w),
        }
    }
    /// Columns `stride` apart of `depth` numbers, `step` apart, packed. One of `stride` and `step`
    /// is 1.
    pub(super) fn packed(
        tile: &Tile<R>,
        room: &'a mut [R],
        (columns, stride): (usize, usize),
        (depth, step): (usize, usize),
        from: &[R],
    ) -> Right<'a, R> {
        let panel = tile.columns * depth;
        tile.pack_columns(room, panel, (columns, stride), (depth, step), from);
        Right {
            w: room,
            row: tile.columns,
            panel,
        }
    }
}

/// `y = scale x w`, or `y += scale x w`: a tile at a time, the factors in place.
pub(super) fn tiles<R: Tiled>(
    tile: &Tile<R>,
    depth: usize,
    x: Left<'_, R>,
    w: Right<'_, R>,
    scale: R,
    y: &mut Window<'_, R>,
    add: bool,
) {
    let (rows, columns, stride) = (y.rows(), y.columns(), y.stride());
    if rows == 0 || columns == 0 {
        return;
    }
    if depth == 0 {
        if !add {
            (0..rows).for_each(|i| y.row(i).fill(R::ZERO));
        }
        return;
    }
    // One past the last number of a factor's first row or column that is read. All panels except
    // the last are whole.
    let end = |last: usize, panel: usize, whole: usize, rest: usize| {
        let before = last
            .checked_sub(1)
            .map_or(0, |before| before * panel + whole);
        before.max(last * panel + rest)
    };
    let (last_x, high) = ((rows - 1) / tile.rows, (rows - 1) % tile.rows);
    let (last_w, wide) = (
        (columns - 1) / tile.columns,
        (columns - 1) % tile.columns + 1,
    );
    let x_end = end(
        last_x,
        x.panel,
        (tile.rows - 1) * x.row + 1,
        high * x.row + 1,
    ) + (depth - 1) * x.column;
    let w_end = end(
        last_w,
        w.panel,
        tile.columns,
        wide.next_multiple_of(tile.lanes),
    ) + (depth - 1) * w.row;
    assert!(
        x_end <= x.x.len() && w_end <= w.w.len(),
        "factors should have what their product reads"
    );
    let start = y.as_mut_ptr();
    for i in (0..rows).step_by(tile.rows) {
        let height = tile.rows.min(rows - i);
        let x = Left {
            x: &x.x[i / tile.rows * x.panel..],
            ..x
        };
        for j in (0..columns).step_by(tile.columns) {
            let width = tile.columns.min(columns - j);
            let w_panel = &w.w[j / tile.columns * w.panel..];
            let kernel = tile.kernels[(width.div_ceil(tile.lanes) - 1) * tile.rows + height - 1];
            // The kernel touches y when it is done with the factors.
            (0..height).for_each(|l| fetch(start.wrapping_add((i + l) * stride + j)));
            // SAFETY: the kernel writes `height` rows of `width` numbers, `stride` apart, of y.
            // They lie in the window, because i + height <= rows and j + width <= columns. It reads
            // `depth` rows of w, in whole vectors, and `depth` columns of x: the assertion above
            // says that the last numbers of the last panels exist, and all other panels lie before
            // them. y is a mutable window and overlaps neither. The machine has the kernel's
            // instructions: `tile_of` checked it.
            unsafe {
                kernel(
                    width,
                    height,
                    depth,
                    start.add(i * stride + j),
                    w_panel.as_ptr(),
                    x.x.as_ptr(),
                    stride as isize,
                    1,
                    w.row as isize,
                    x.column as isize,
                    x.row as isize,
                    R::ONE,
                    scale,
                    u8::from(add),
                    false,
                    false,
                    false,
                    std::ptr::null(),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small integers: sums are exact in any order.
    fn integers<R: Tiled>(n: usize, seed: usize) -> Vec<R> {
        (0..n)
            .map(|i| R::of_f64(((i * 7 + seed * 13 + i * i / 5) % 9) as f64 - 4.0))
            .collect()
    }

    fn narrowed<S: Scalar, R: Tiled>(x: &[R]) -> Vec<S> {
        x.iter().map(|x| x.narrow()).collect()
    }

    fn agrees<R: Tiled>(set: Set) {
        let Some(tile) = R::tile_of(set) else { return };
        assert!(
            COLUMNS.is_multiple_of(tile.columns)
                && tile.rows <= ROWS
                && tile.columns <= MOST_WIDE
                && tile.columns.is_multiple_of(tile.lanes)
        );
        // Sizes around the borders of tiles, panels and blocks.
        let (ms, ns) = (
            [1, 2, 5, 6, 7, 13, 49, 515],
            [1, 3, 4, 8, 15, 16, 17, 24, 33, 127, 129, 260],
        );
        let sizes = ms
            .into_iter()
            .flat_map(|m| ns.map(|n| (m, n)))
            .flat_map(|(m, n)| {
                let ks = [1, 2, 3, 16, 17, 65, 513]
                    .into_iter()
                    .filter(move |k| k * m * n < 1 << 18);
                ks.map(move |k| (m, k, n))
            });
        // Rows of a transposed factor: more than are packed together; a multiple of a page apart,
        // and not.
        for (m, k, n) in sizes.chain([
            (2048, 3, 130),
            (2 * ROWS + 3, 2, 130),
            (1024, 17, 129),
            (1100, 513, 6),
        ]) {
            let (x, w, start) = (
                integers::<R>(m * k, 1),
                integers::<R>(k * n, 2),
                integers::<R>(m * n, 3),
            );
            for (ta, tb, add) in (0..8).map(|bits| (bits & 1 == 1, bits & 2 == 2, bits & 4 == 4)) {
                let at = |i: usize, l: usize, columns, rows, t| {
                    if t { l * rows + i } else { i * columns + l }
                };
                let mut expected = start.clone();
                for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                    let products = (0..k)
                        .map(|l| x[at(i, l, k, m, ta)].to_f64() * w[at(l, j, n, k, tb)].to_f64());
                    let sum =
                        products.sum::<f64>() + if add { start[i * n + j].to_f64() } else { 0.0 };
                    expected[i * n + j] = R::of_f64(sum);
                }
                let from = |i: usize, j: usize, y: &mut [R]| {
                    y.copy_from_slice(&start[i * n + j..][..y.len()])
                };
                let start = if add { Start::From(&from) } else { Start::Zero };
                let [x16, w16] = [&x, &w].map(|x| narrowed::<bf16, R>(x));
                let [half_x, half_w] = [&x, &w].map(|x| narrowed::<f16, R>(x));
                let factors = [
                    (Numbers::Wide(&x[..]), Numbers::Wide(&w[..])),
                    (Numbers::Bf16(&x16), Numbers::Bf16(&w16)),
                    (Numbers::F16(&half_x), Numbers::F16(&half_w)),
                ];
                // Half precision is widened to f32 alone.
                let n_factors = if size_of::<R>() == size_of::<f32>() {
                    3
                } else {
                    1
                };
                for factors in factors.into_iter().take(n_factors) {
                    let mut y = vec![R::ONE; m * n];
                    let window = Window::new(&mut y, m, n);
                    let (sizes, part) = ((m, k, n), (0..m, 0..n));
                    product_part(&tile, sizes, part, (ta, tb), factors, window, start);
                    assert!(
                        y == expected,
                        "{set:?}: {m} x {k} x {n}, ta {ta}, tb {tb}, add {add}"
                    );
                }
            }
        }
    }

    #[test]
    fn products_are_sums_of_products() {
        for set in Set::ALL {
            agrees::<f32>(set);
            agrees::<f64>(set);
        }
    }
}
