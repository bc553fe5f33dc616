//! Products by tensor cores, of bf16, and of f32 that may be rounded to TF32. A block of eight
//! warps computes a tile of 128 × 128, each warp 64 × 32 of it. Tiles of the factors, 64 deep (32
//! of f32), pass through shared memory: `cp.async` fetches the next ones while `ldmatrix` and
//! `mma.sync` use the present ones.
//!
//! Before: lines of the factors and of the result are multiples of 16 bytes, if they are bf16.
//! Nothing else decides whether this kernel is used. In particular, the number of terms does not,
//! unless a factor's lines go over them: chunks of a loss use the same kernel as the whole.
//!
//! After: sums in f32, rounded once. A sum starts from the addend and goes over its terms in order.
//! So it has the same bits if other products compute its first terms. How a tensor core adds up 16
//! products is not specified, so bits differ from the plain kernel's.
//!
//! f32 are rounded to TF32 when they leave shared memory, to the nearest, ties away from zero.
//! `ldmatrix` cannot transpose them, so a row of their tiles always goes over terms; lines that do
//! not are copied number by number.
//!
//! A tile of a factor has its lines as rows. Chunk `c` of 16 bytes of row `r` lies at chunk `c ^ (r
//! % 8)`, so that the rows that `ldmatrix` reads together are in different banks (CUTLASS's
//! swizzle).

use super::Kernel;
use super::grid::{Grid, kind_of};
use super::groups::{Over, Place, Size};
use super::product::{Factor, Sizes};
use crate::mlir::{Cache, Convert, Emit, Factors, Kind, Layout, Type, Value};
use ir::DType;

/// Rows and columns of a block's tile, and the depth of the factors' tiles.
pub(super) const TILE: u64 = 128;
pub(super) const DEPTH: u64 = 64;
/// Rows and columns of a warp's part. A thread has 64 sums in registers; with twice as many, ptxas
/// spills.
const PART: [u64; 2] = [64, 32];
pub(super) const THREADS: u32 = 256;
/// Bytes of a factor's tile. Shared memory has two tiles of each factor.
pub(super) const BYTES: u64 = 2 * TILE * DEPTH;
/// Numbers of bf16 in 16 bytes, which are copied at once.
pub(super) const CHUNK: u64 = 8;
/// Rows and columns of a product of `mma.sync`, and its depth in bf16.
const STEP: u64 = 16;
/// Columns of its second factor.
const COLUMNS: u64 = 8;
/// Tiles of rows that are computed together, so that the right factor's tiles stay in a cache.
const GROUPED: u64 = 8;

/// A thread's four sums of 16 × 8, or four registers of a factor of 16 × 16.
type Quad = [Value; 4];

/// A factor.
#[derive(Clone, Copy)]
struct Side {
    factor: Factor,
    depth: u64,
    /// Its lines go over rows of the left factor, or columns of the right one, and not over terms.
    across: bool,
    numbers: Factors,
}

/// Bytes of a number.
fn size(numbers: Factors) -> u64 {
    match numbers {
        Factors::Bf16 => 2,
        Factors::Tf32 => 4,
    }
}

/// Numbers in 16 bytes.
fn chunk(numbers: Factors) -> u64 {
    16 / size(numbers)
}

/// The depth of the factors' tiles.
fn depth(numbers: Factors) -> u64 {
    2 * DEPTH / size(numbers)
}

impl Side {
    fn new(s: &Sizes, is_left: bool, numbers: Factors) -> Side {
        let factor = if is_left { s.left } else { s.right };
        // Lines over grouped terms could begin anywhere.
        let is_grouped = s.grouped.is_some_and(|grouped| grouped.over == Over::Terms);
        Side {
            factor,
            depth: s.k,
            across: factor.steps[0] == 1 && (factor.steps[1] != 1 || is_grouped),
            numbers,
        }
    }
    /// Lines, and numbers in a line.
    fn lines(&self) -> [u64; 2] {
        match self.across {
            true => [self.depth, self.factor.outer],
            false => [self.factor.outer, self.depth],
        }
    }
    /// Whether the rows of its tiles are its lines, and do not go over terms.
    fn is_turned(&self) -> bool {
        self.across && self.numbers == Factors::Bf16
    }
}

/// Rows of a factor's tile, and numbers in a row.
fn shape(across: bool) -> [u64; 2] {
    match across {
        true => [DEPTH, TILE],
        false => [TILE, DEPTH],
    }
}

/// Bytes of a row of a factor's tile.
pub(super) fn pitch(across: bool) -> u64 {
    2 * shape(across)[1]
}

/// The numbers that tensor cores multiply, if the product can be computed by this kernel.
pub(super) fn fits(k: &Kernel<'_>, s: &Sizes) -> Option<Factors> {
    let sides = [true, false].map(|is_left| Side::new(s, is_left, Factors::Bf16));
    let are = |dtype| {
        let is = |side: &Side| k.operands[side.factor.operand].dtype() == dtype;
        sides.iter().all(is)
    };
    let aligned = |side: &Side| side.lines()[1].is_multiple_of(CHUNK);
    let of_bf16 = are(DType::BF16)
        && sides.iter().all(aligned)
        && matches!(k.y().dtype(), DType::BF16 | DType::F32)
        && s.n.is_multiple_of(CHUNK);
    let of_f32 = k.tf32 && are(DType::F32) && k.y().dtype() == DType::F32;
    match (of_bf16, of_f32) {
        _ if s.k == 0 => None,
        (true, _) => Some(Factors::Bf16),
        (_, true) => Some(Factors::Tf32),
        _ => None,
    }
}

/// Writes the kernel.
pub(super) fn product(k: &mut Kernel<'_>, s: &Sizes, numbers: Factors) {
    s.find_groups(k, TILE);
    let tiles = [s.rows(TILE), s.n.div_ceil(TILE)];
    let parts = s.batch * tiles[0] * tiles[1];
    let grouped = GROUPED.min(1 << tiles[0].trailing_zeros());
    k.phase(THREADS, parts, |g| {
        let tensor = Tensors::new(g, s, numbers);
        g.parts(parts, |g, part| {
            let [batch, rest] = g.divided(part, tiles[0] * tiles[1]);
            let [group, rest] = g.divided(rest, grouped * tiles[1]);
            let [column, row] = g.divided(rest, grouped);
            let first = g.times(group, grouped);
            let row = g.b.addi(first, row);
            let place = s.place(g, [batch, row], TILE);
            let corner = [place.top, g.times(column, TILE)];
            tensor.tile(g, &place, corner);
        });
    });
}

/// The kernel, and what a thread knows about its place in it.
struct Tensors<'a> {
    s: &'a Sizes,
    sides: [Side; 2],
    tiles: Tiles,
}

impl Tensors<'_> {
    fn new<'a>(g: &mut Grid, s: &'a Sizes, numbers: Factors) -> Tensors<'a> {
        let sides = [true, false].map(|is_left| Side::new(s, is_left, numbers));
        Tensors {
            s,
            sides,
            tiles: Tiles::new(g, sides.map(|side| side.is_turned()), numbers, 0),
        }
    }

    /// Computes a tile of the result.
    fn tile(&self, g: &mut Grid, place: &Place, corner: [Value; 2]) {
        let n = place.steps(g, depth(self.sides[0].numbers));
        let zero = g.b.long(0);
        self.fill(g, place, corner, zero);
        g.b.commit();
        arrive(g);
        let starts = self.starts(g, place, corner);
        let bounds = [g.b.long(0), n.value(g), g.b.long(1)];
        let sums = g.repeat(bounds, &starts.concat(), |g, round, sums| {
            let next = g.plus(round, 1);
            let more = n.is_above(g, next);
            g.when(more, |g| self.fill(g, place, corner, next));
            g.b.commit();
            let sums = self.tiles.round(g, round, sums);
            arrive(g);
            sums
        });
        self.write(g, place, corner, &sums);
    }

    /// Begins to fill the tiles of a round.
    fn fill(&self, g: &mut Grid, place: &Place, corner: [Value; 2], round: Value) {
        let depth = g.times(round, depth(self.sides[0].numbers));
        let depth = place.term(g, depth);
        let outer = [place.rows, Size::Known(self.s.n)];
        for (i, side) in self.sides.iter().enumerate() {
            let tile = self.tiles.of(g, i, round);
            let (first, ends) = match side.across {
                true => ([depth, corner[i]], [place.terms, outer[i]]),
                false => ([corner[i], depth], [outer[i], place.terms]),
            };
            let region = Region {
                matrix: place.matrices[i],
                first,
                ends,
            };
            match side.is_turned() == side.across
                && side.lines()[1].is_multiple_of(chunk(side.numbers))
            {
                true => fill(g, side, tile, &region),
                false => fill_by_numbers(g, side, tile, &region),
            }
        }
    }

    /// What a thread's sums start from.
    fn starts(&self, g: &mut Grid, place: &Place, corner: [Value; 2]) -> Vec<Quad> {
        let zero = g.float(0.0, Kind::F32);
        let Some((operand, steps)) = &self.s.addend else {
            return vec![[zero; 4]; SUMS / 4];
        };
        let mut starts = vec![];
        for (at, inside) in self.places(g, place, corner) {
            let pair = g.choose(inside, &[zero; 2], |g| {
                let from = g.offset(&at[3 - steps.len()..], steps, 0);
                let c = g.operand(*operand);
                let next = g.plus(from, steps[steps.len() - 1]);
                let first = g.get(c, from);
                if self.s.n.is_multiple_of(2) {
                    return vec![first, g.get(c, next)];
                }
                let second = self.second(g, at);
                let others = g.choose(second, &[zero], |g| vec![g.get(c, next)]);
                vec![first, others[0]]
            });
            starts.extend(pair);
        }
        starts.as_chunks::<4>().0.to_vec()
    }

    /// Writes a thread's sums.
    fn write(&self, g: &mut Grid, place: &Place, corner: [Value; 2], sums: &[Value]) {
        let steps = [self.s.m * self.s.n, self.s.n, 1].map(|step| step as i64);
        let places = self.places(g, place, corner);
        for ((at, inside), pair) in places.into_iter().zip(sums.as_chunks::<2>().0) {
            g.when(inside, |g| {
                let (to, y) = (g.offset(&at, &steps, 0), g.result(0));
                let pointer = g.b.offset(y.pointer, to, kind_of(y.dtype));
                if y.dtype == DType::BF16 {
                    let pair = g.b.pair(pair[0], pair[1]);
                    g.b.store(pair, pointer, 4);
                    return;
                }
                if !self.s.n.is_multiple_of(2) {
                    g.put(y, to, pair[0]);
                    let second = self.second(g, at);
                    return g.when(second, |g| {
                        let next = g.plus(to, 1);
                        g.put(y, next, pair[1]);
                    });
                }
                let mut both = g.b.undef(Type::Vector(2, Kind::F32));
                for (i, &sum) in pair.iter().enumerate() {
                    both = g.b.insert(sum, both, i as u64);
                }
                g.b.store(both, pointer, 8);
            });
        }
    }

    /// Whether the second element of a pair exists.
    fn second(&self, g: &mut Grid, [.., column]: [Value; 3]) -> Value {
        let next = g.plus(column, 1);
        g.below(next, self.s.n)
    }

    /// The first elements of the pairs of a thread's sums: matrix, row and column of each, and
    /// whether it exists.
    fn places(&self, g: &mut Grid, place: &Place, corner: [Value; 2]) -> Vec<([Value; 3], Value)> {
        let places = self.tiles.places(g, corner).into_iter();
        let within = places.map(|[row, column]| {
            let [a, b] = [place.rows.is_above(g, row), g.below(column, self.s.n)];
            ([place.matrices[2], row, column], g.b.andi(a, b))
        });
        within.collect()
    }
}

/// Sums of a thread.
pub(super) const SUMS: usize = (PART[0] * PART[1] / 32) as usize;

/// The factors' tiles in shared memory, and a thread's place in the result's tile.
pub(super) struct Tiles {
    /// For each factor, whether the rows of its tile go over rows of the left factor, or columns of
    /// the right one, and not over terms.
    across: [bool; 2],
    numbers: Factors,
    /// The first row and column of the thread's sums in a tile.
    place: [Value; 2],
    /// Shared memory. The factors' tiles for even rounds, those for odd rounds, and the rest.
    memory: Value,
    /// For each factor, addresses for `ldmatrix` in its first tile.
    fragments: [[Value; 4]; 2],
}

impl Tiles {
    /// Tiles, with `more` bytes of shared memory behind them.
    pub(super) fn new(g: &mut Grid, across: [bool; 2], numbers: Factors, more: u64) -> Tiles {
        let memory = g.tiles(4 * BYTES + more);
        let [warp, lane] = g.divided(g.thread, 32);
        let parts = g.divided(warp, TILE / PART[1]);
        let [group, pair] = g.divided(lane, 4);
        let own = [group, g.times(pair, 2)];
        let place = [0, 1].map(|i| {
            let first = g.times(parts[i], PART[i]);
            g.b.addi(first, own[i])
        });
        let fragments = [0, 1].map(|i| {
            let tile = g.b.offset(memory, i as u64 * BYTES, Kind::I8);
            fragments(g, (i == 0, across[i]), tile, lane, parts[i])
        });
        Tiles {
            across,
            numbers,
            place,
            memory,
            fragments,
        }
    }

    /// The memory behind the tiles, from a byte on.
    pub(super) fn behind(&self, g: &mut Grid, from: u64) -> Value {
        g.b.offset(self.memory, 4 * BYTES + from, Kind::I8)
    }

    /// The tile of factor `i` in a round.
    pub(super) fn of(&self, g: &mut Grid, i: usize, round: Value) -> Value {
        let stage = stage(g, round);
        let tile = g.b.offset(self.memory, stage, Kind::I8);
        g.b.offset(tile, i as u64 * BYTES, Kind::I8)
    }

    /// Adds the products of a round.
    pub(super) fn round(&self, g: &mut Grid, round: Value, sums: &[Value]) -> Vec<Value> {
        let stage = stage(g, round);
        let mut sums: Vec<Quad> = sums.as_chunks::<4>().0.to_vec();
        let per_row = (PART[1] / COLUMNS) as usize;
        // A row of a tile has as many bytes of each kind of numbers, and so has a step.
        for step in 0..DEPTH / STEP {
            let [left, right] = [0, 1].map(|i| {
                let load = |at| self.load(g, i, stage, at, step);
                (0..PART[i] / STEP).map(load).collect::<Vec<Quad>>()
            });
            for (row, a) in left.iter().enumerate() {
                for (column, b) in right.iter().enumerate() {
                    let at = row * per_row + 2 * column;
                    for (sum, b) in sums[at..at + 2].iter_mut().zip(b.as_chunks::<2>().0) {
                        *sum = g.b.multiply_as(self.numbers, *a, *b, *sum);
                    }
                }
            }
        }
        sums.concat()
    }

    /// 16 × 16 numbers of factor `i`, or 16 × 8 of f32: the 16 rows or columns `at` of the warp's
    /// part, and the terms `step` of the tile.
    fn load(&self, g: &mut Grid, i: usize, stage: Value, at: u64, step: u64) -> Quad {
        let (known, row, layout) = match self.across[i] {
            true => (at, step, Layout::Columns),
            false => (step, at, Layout::Rows),
        };
        let pointer =
            g.b.offset(self.fragments[i][known as usize], stage, Kind::I8);
        let pointer =
            g.b.offset(pointer, row * STEP * pitch(self.across[i]), Kind::I8);
        let quad = g.b.load_matrices(pointer, layout);
        match self.numbers {
            Factors::Bf16 => quad,
            Factors::Tf32 => quad.map(|x| {
                let x = g.b.convert(Convert::Bitcast, x, Kind::F32);
                g.b.tf32(x)
            }),
        }
    }

    /// Row and column of the first of each pair of a thread's sums.
    pub(super) fn places(&self, g: &mut Grid, corner: [Value; 2]) -> Vec<[Value; 2]> {
        let [row, column] = [0, 1].map(|i| g.b.addi(corner[i], self.place[i]));
        let mut places = vec![];
        for down in (0..PART[0]).step_by(16) {
            for right in (0..PART[1]).step_by(8) {
                for lower in [0, 8] {
                    let row = g.plus(row, (down + lower) as i64);
                    places.push([row, g.plus(column, right as i64)]);
                }
            }
        }
        places
    }
}

/// The offset of a round's tiles.
fn stage(g: &mut Grid, round: Value) -> Value {
    let [_, odd] = g.divided(round, 2);
    g.times(odd, 2 * BYTES)
}

/// Waits until every copy of every thread has arrived.
pub(super) fn arrive(g: &mut Grid) {
    g.b.wait_all();
    g.b.barrier();
}

/// The offset of a chunk of a row in a tile whose rows have `pitch` bytes.
pub(super) fn swizzled(g: &mut Grid, pitch: u64, row: Value, chunk: Value) -> Value {
    let [_, low] = g.divided(row, 8);
    let moved = g.b.xori(chunk, low);
    let [moved, start] = [g.times(moved, 16), g.times(row, pitch)];
    g.b.addi(start, moved)
}

/// Addresses for `ldmatrix` in a warp's part of a factor's tile: one for each 16 numbers of a row.
fn fragments(
    g: &mut Grid,
    (is_left, across): (bool, bool),
    tile: Value,
    lane: Value,
    part: Value,
) -> [Value; 4] {
    // The lanes of a warp address four matrices of 8 × 8, in the order of the registers of a
    // factor.
    let [lines, low] = g.divided(lane, 8);
    let [far, near] = g.divided(lines, 2);
    let (lower, half) = match is_left != across {
        true => (near, far),
        false => (far, near),
    };
    let lower = g.times(lower, 8);
    let row = g.b.addi(low, lower);
    let first = swizzled(g, pitch(across), row, half);
    let size = PART[usize::from(!is_left)];
    let first = match across {
        true => {
            let skipped = g.times(part, 2 * size);
            g.b.xori(first, skipped)
        }
        false => {
            let skipped = g.times(part, size * pitch(across));
            g.b.addi(first, skipped)
        }
    };
    [0, 1, 2, 3].map(|i| {
        // 16 numbers are two chunks, and change the same bits in every row.
        let bits = g.b.long(i * 2 * STEP);
        let at = g.b.xori(first, bits);
        g.b.offset(tile, at, Kind::I8)
    })
}

/// What fills a tile of a factor.
struct Region {
    /// The matrix of the factor.
    matrix: Value,
    /// The first line, and the first number in it.
    first: [Value; 2],
    /// Where lines end, and numbers in them. Zeros lie beyond.
    ends: [Size; 2],
}

/// Begins to fill a tile with a factor's lines, which are multiples of 16 bytes.
fn fill(g: &mut Grid, side: &Side, tile: Value, region: &Region) {
    let (first, ends) = (region.first, region.ends);
    let row_bytes = pitch(side.is_turned());
    let [rows, _] = shape(side.is_turned());
    let [_, length] = side.lines();
    let chunks = row_bytes / 16;
    let [row, number] = g.divided(g.thread, chunks);
    let to = swizzled(g, row_bytes, row, number);
    let to = g.b.offset(tile, to, Kind::I8);
    let past = g.times(number, chunk(side.numbers));
    let (line, at) = (g.b.addi(first[0], row), g.b.addi(first[1], past));
    let from = begin(g, side, region.matrix, [line, at]);
    let (all, none) = (g.b.int(16), g.b.int(0));
    let within = ends[1].is_above(g, at);
    // Rows that all threads fill at once: a multiple of 8, so that a thread's chunk has the same
    // place in all of its rows.
    let each = u64::from(THREADS) / chunks;
    for i in (0..rows).step_by(each as usize) {
        let line = g.plus(line, i as i64);
        let inside = ends[0].is_above(g, line);
        let inside = g.b.andi(inside, within);
        let bytes = g.b.select(inside, all, none);
        let (to, from) = (
            g.b.offset(to, i * row_bytes, Kind::I8),
            g.b.offset(from, i * length * size(side.numbers), Kind::I8),
        );
        g.b.copy_async(to, from, 16, bytes, Cache::Second);
    }
}

/// The address of a number of a line.
fn begin(g: &mut Grid, side: &Side, matrix: Value, [line, at]: [Value; 2]) -> Value {
    let [lines, length] = side.lines();
    let matrix = g.times(matrix, lines * length);
    let start = g.times(line, length);
    let start = g.b.addi(start, at);
    let start = g.b.addi(matrix, start);
    let bytes = g.times(start, size(side.numbers));
    let x = g.operand(side.factor.operand);
    g.b.offset(x.pointer, bytes, Kind::I8)
}

/// The same for f32, number by number, of any lines. A tile's row goes over terms.
fn fill_by_numbers(g: &mut Grid, side: &Side, tile: Value, region: &Region) {
    let (first, ends) = (region.first, region.ends);
    let [_, length] = side.lines();
    let (deep, threads) = (depth(side.numbers), u64::from(THREADS));
    // Neighbouring threads copy neighbouring numbers of a line.
    let [far, near] = match side.across {
        true => g.divided(g.thread, TILE),
        false => g.divided(g.thread, deep),
    };
    let (line, at) = (g.b.addi(first[0], far), g.b.addi(first[1], near));
    let from = begin(g, side, region.matrix, [line, at]);
    let within = ends[1].is_above(g, at);
    let (all, none) = (g.b.int(4), g.b.int(0));
    // Lines that all threads copy at once.
    let each = if side.across {
        threads / TILE
    } else {
        threads / deep
    };
    let of_tile = if side.across { deep } else { TILE };
    for i in (0..of_tile).step_by(each as usize) {
        let line = g.plus(line, i as i64);
        let inside = ends[0].is_above(g, line);
        let inside = g.b.andi(inside, within);
        let bytes = g.b.select(inside, all, none);
        let past = g.plus(far, i as i64);
        let [row, term] = if side.across {
            [near, past]
        } else {
            [past, near]
        };
        let [number, word] = g.divided(term, chunk(side.numbers));
        let to = swizzled(g, pitch(false), row, number);
        let word = g.times(word, 4);
        let to = g.b.addi(to, word);
        let (to, from) = (
            g.b.offset(tile, to, Kind::I8),
            g.b.offset(from, i * length * size(side.numbers), Kind::I8),
        );
        g.b.copy_async(to, from, 4, bytes, Cache::All);
    }
}
