//! Attention by tiles, for all types that are computed in f32, and heads of up to 128 numbers.
//! Products are f32 multiply-adds of single threads, not those of tensor cores: f32 stays f32.
//!
//! The method is FlashAttention-2's (Dao, 2023), as in [`crate::attention`]. Forward: a block has
//! a tile of queries and goes over tiles of keys, with a running maximum and sum. Backward: one
//! phase has tiles of keys and goes over the queries of all heads that use them (dk, dv), another
//! one has tiles of queries and goes over keys (dq). Both compute the scores again, and each
//! query's delta, the sum over dout · out, too: it costs one in 256 operations, so it is not worth
//! scratch.
//!
//! A block's own tile has rows, the tiles that it goes over are columns of scores. A thread has
//! the scores of every eighth row and every 16th column, and sums of every eighth row and every
//! 16th four numbers. So 16 threads of one warp have all of a row: they alone write its
//! probabilities to shared memory and read them again. Every sum is computed by one thread, in the
//! order of the columns, so the number of blocks does not change bits.
//!
//! All tiles in shared memory have rows of f32. Between rows lie an odd number of four numbers (or,
//! for probabilities, an odd number of 16): then 16-byte loads of neighbouring rows have no bank
//! conflict.

use super::{Call, Kernel, Mask, Part, larger};
use crate::device::grid::{Grid, Tensor, kind_of};
use crate::mlir::{Arith, Convert, Emit, Kind, Predicate, Type, Value};
use crate::philox::Drops;
use ir::DType;

/// Threads: 8 groups, which have different rows, of 16 lanes, which have different columns.
const GROUPS: u64 = 8;
const LANES: u64 = 16;
const THREADS: u64 = GROUPS * LANES;
/// Numbers that are loaded at once.
const FOUR: u64 = 4;
/// The widest heads. Tiles of wider ones do not fit into the shared memory of all GPUs.
const WIDEST: u64 = 128;
/// Rows and columns of tiles are counted by 32-bit integers.
const LONGEST: u64 = 1 << 30;
/// Heads up to this width have larger tiles.
const NARROW: u64 = 64;
/// Bytes of shared memory that a kernel can have without asking for them.
const STATIC_BYTES: u64 = 48 << 10;

/// True if the kernels here compute the call.
pub(super) fn fit(call: &Call<'_>) -> bool {
    let fits = |width| (1..=WIDEST).contains(&width);
    let is_short = call.queries.max(call.keys) < LONGEST;
    call.dtype == DType::F32 && fits(call.width) && fits(call.values) && is_short
}

pub(super) fn attend(k: &mut Kernel<'_>, call: &Call<'_>) {
    let columns = if is_wide(call) { 32 } else { 64 };
    let form = Form::new([call.queries, call.keys], [64, columns]);
    let parts = call.heads * form.tiles();
    k.phase(THREADS as u32, parts, |g| {
        g.b.set_blocks(form.blocks(call, if is_wide(call) { 3 } else { 4 }));
        let start = Start::new(g);
        let sizes = form.sizes(call, true);
        // Probabilities take the place of keys.
        let [own, pairs, values] = [sizes.queries, sizes.keys.max(sizes.pairs), sizes.values];
        let rooms = rooms(g, [own, pairs, values]);
        g.parts(parts, |g, part| {
            let block = Block::new(g, call, &form, &start, part, true);
            block.forward(g, rooms);
        });
    });
}

pub(super) fn derive(k: &mut Kernel<'_>, call: &Call<'_>) {
    // Two tiles of rows and two of columns fit into the shared memory of all GPUs. Masks and
    // dropped weights need registers.
    let most = match (is_wide(call), call.mask.is_some() || call.key.is_some()) {
        (true, _) => [32, 32],
        (false, true) => [64, 32],
        (false, false) => [64, 64],
    };
    let form = Form::new([call.keys, call.queries], most);
    let parts = call.heads / call.group * form.tiles();
    k.phase(THREADS as u32, parts, |g| {
        g.b.set_blocks(form.blocks(call, 2));
        let start = Start::new(g);
        let s = form.sizes(call, false);
        let sizes = [s.keys, s.values, s.queries, s.out, s.pairs, form.columns];
        let rooms = rooms(g, sizes);
        g.parts(parts, |g, part| {
            let block = Block::new(g, call, &form, &start, part, false);
            block.of_keys(g, rooms);
        });
    });
    let form = Form::new([call.queries, call.keys], most);
    let parts = call.heads * form.tiles();
    k.phase(THREADS as u32, parts, |g| {
        g.b.set_blocks(form.blocks(call, 3));
        let start = Start::new(g);
        let s = form.sizes(call, true);
        // The gradients of scores take the place of values.
        let rooms = rooms(g, [s.queries, s.out, s.keys, s.values.max(s.pairs)]);
        g.parts(parts, |g, part| {
            let block = Block::new(g, call, &form, &start, part, true);
            block.of_queries(g, rooms);
        });
    });
}

fn is_wide(call: &Call<'_>) -> bool {
    call.width.max(call.values) > NARROW
}

/// Numbers from one row of a tile to the next.
fn pitch(width: u64) -> u64 {
    FOUR * (width.div_ceil(FOUR) | 1)
}

/// Shared memory for tiles of f32: more than a kernel can have by itself, if they need it.
fn rooms<const N: usize>(g: &mut Grid, numbers: [u64; N]) -> [Tensor; N] {
    let bytes = numbers.map(|n| (n * DType::F32.bytes()).next_multiple_of(16));
    let all = bytes.iter().sum();
    if all <= STATIC_BYTES {
        return numbers.map(|n| g.shared(n, DType::F32));
    }
    let base = g.tiles(all);
    let mut from = 0;
    bytes.map(|bytes| {
        let pointer = g.b.offset(base, from, Kind::I8);
        from += bytes;
        Tensor {
            pointer,
            dtype: DType::F32,
        }
    })
}

/// The form of tiles of scores.
struct Form {
    /// Rows of the tensors of which a block has a tile, and of those that it goes over.
    all: [u64; 2],
    /// Rows and columns of a tile of scores.
    rows: u64,
    columns: u64,
}

/// Numbers of tiles in shared memory.
struct Room {
    queries: u64,
    keys: u64,
    values: u64,
    /// Of dout.
    out: u64,
    pairs: u64,
}

impl Form {
    /// Tiles of at most `most` rows and columns; smaller ones for few rows and columns.
    fn new(all: [u64; 2], most: [u64; 2]) -> Form {
        let size = |n: u64, unit: u64, most: u64| {
            let some = n.div_ceil(unit).clamp(1, most / unit);
            unit * some.next_power_of_two()
        };
        Form {
            all,
            rows: size(all[0], GROUPS, most[0]),
            columns: size(all[1], LANES, most[1]),
        }
    }

    /// The number of tiles that blocks have, for each head.
    fn tiles(&self) -> u64 {
        self.all[0].div_ceil(self.rows)
    }

    /// The number of blocks that a multiprocessor should hold, whose registers are enough: at
    /// most `most`. Masks, dropped weights, and tiles that go over the last row need more
    /// registers.
    fn blocks(&self, call: &Call<'_>, most: u32) -> u32 {
        let fills = self.all[1].is_multiple_of(self.columns);
        match (call.mask.is_some() || call.key.is_some(), fills) {
            (true, _) => 2,
            (false, true) => most,
            (false, false) => (most - 1).max(2),
        }
    }

    /// Rows and columns of a thread.
    fn each(&self) -> [u64; 2] {
        [self.rows / GROUPS, self.columns / LANES]
    }

    /// Numbers from one row of probabilities to the next.
    fn pitch(&self) -> u64 {
        LANES * ((self.columns / LANES) | 1)
    }

    fn sizes(&self, call: &Call<'_>, is_of_queries: bool) -> Room {
        let [q, v] = [call.width, call.values].map(pitch);
        let [queries, keys] = match is_of_queries {
            true => [self.rows, self.columns],
            false => [self.columns, self.rows],
        };
        Room {
            queries: queries * q,
            keys: keys * q,
            values: keys * v,
            out: queries * v,
            pairs: self.rows * self.pitch(),
        }
    }
}

/// The thread's place.
struct Start {
    group: Value,
    lane: Value,
}

impl Start {
    fn new(g: &mut Grid) -> Start {
        let [group, lane] = g.divided(g.thread, LANES);
        Start { group, lane }
    }
}

/// Rows of one head of a tensor.
#[derive(Clone, Copy)]
struct Rows {
    of: Tensor,
    /// The first number, and the numbers from a row to the next.
    first: Value,
    step: u64,
    /// The number of rows, and of the numbers in each.
    n: u64,
    width: u64,
    /// Whether four numbers can be moved at once.
    by_four: bool,
}

/// A tile in shared memory.
#[derive(Clone, Copy)]
struct Tile {
    room: Tensor,
    /// Numbers from a row to the next.
    pitch: u64,
    rows: u64,
}

/// The weights of a tile of scores that are dropped.
struct Dropping {
    /// For each of the thread's scores, in their order, a bit that is set if its weight is kept.
    kept: Value,
    /// The factor of the weights that are kept.
    scale: Value,
}

/// What a block computes.
struct Block<'a> {
    call: &'a Call<'a>,
    form: &'a Form,
    start: &'a Start,
    /// Whether rows are queries, and columns keys.
    is_of_queries: bool,
    /// A head of q if rows are queries, otherwise of k; over the batch.
    head: Value,
    /// The first row, and the thread's first row, 32 bits.
    first: Value,
    own: Value,
}

impl<'a> Block<'a> {
    fn new(
        g: &mut Grid,
        call: &'a Call<'a>,
        form: &'a Form,
        start: &'a Start,
        part: Value,
        is_of_queries: bool,
    ) -> Block<'a> {
        let n = form.tiles();
        let [head, tile] = if call.form.causal {
            // Blocks with the most columns start first: late queries, early keys.
            let heads = if is_of_queries {
                call.heads
            } else {
                call.heads / call.group
            };
            let [tile, head] = g.divided(part, heads);
            let last = g.b.long(n - 1);
            let turned = g.b.subi(last, tile);
            [head, if is_of_queries { turned } else { tile }]
        } else {
            g.divided(part, n)
        };
        let first = g.times(tile, form.rows);
        let own = g.b.addi(first, start.group);
        Block {
            call,
            form,
            start,
            is_of_queries,
            head,
            first,
            own: g.b.convert(Convert::Trunci, own, Kind::I32),
        }
    }

    // --- places ---

    /// Rows of a tensor. `head` is one of q or k, as the part says.
    fn tensor(&self, g: &mut Grid, of: Tensor, part: Part, head: Value) -> Rows {
        let place = self.call.place(part);
        let (layout, width) = (place.layout, place.width);
        let [batch, head] = g.divided(head, place.heads);
        let steps = [layout.batch, layout.head];
        let first = g.offset(
            &[batch, head],
            &steps.map(|step| step as i64),
            layout.first as i64,
        );
        let places = [layout.first, layout.batch, layout.head, layout.row, width];
        Rows {
            of,
            first,
            step: layout.row,
            n: place.rows,
            width,
            by_four: places.iter().all(|n| n.is_multiple_of(FOUR)),
        }
    }

    /// The rows of the block that a thread has.
    fn rows(&self, g: &mut Grid) -> Vec<Value> {
        let own = g.b.addi(self.first, self.start.group);
        let [n, _] = self.form.each();
        (0..n).map(|i| g.plus(own, (i * GROUPS) as i64)).collect()
    }

    /// The columns that a thread has of a tile.
    fn columns(&self, g: &mut Grid, first: Value) -> Vec<Value> {
        let own = g.b.addi(first, self.start.lane);
        let [_, n] = self.form.each();
        (0..n).map(|j| g.plus(own, (j * LANES) as i64)).collect()
    }

    /// The groups of four numbers of a thread in rows of `width`, and whether they exist. A group
    /// that does not is replaced by the last one.
    fn fours(&self, g: &mut Grid, width: u64) -> Vec<(Value, Option<Value>)> {
        let n = width.div_ceil(FOUR);
        let mut fours = vec![];
        for first in (0..n).step_by(LANES as usize) {
            let own = g.plus(self.start.lane, first as i64);
            fours.push(if first + LANES <= n {
                (own, None)
            } else {
                let last = g.b.long(n - 1);
                let inside = g.below(own, n);
                (g.b.minui(own, last), Some(inside))
            });
        }
        fours
    }

    fn tile(room: Tensor, rows: u64, width: u64) -> Tile {
        Tile {
            room,
            pitch: pitch(width),
            rows,
        }
    }

    /// Rows of probabilities.
    fn pairs(&self, room: Tensor) -> Tile {
        Tile {
            room,
            pitch: self.form.pitch(),
            rows: self.form.rows,
        }
    }

    /// Tiles from the first one with a column that counts to the last one.
    fn reach(&self, g: &mut Grid) -> [Value; 3] {
        let [_, all] = self.form.all;
        let n = self.form.columns;
        let [zero, one, end] = [0, 1, all.div_ceil(n)].map(|i| g.b.long(i));
        if !self.call.form.causal {
            return [zero, end, one];
        }
        if !self.is_of_queries {
            let [first, _] = g.divided(self.first, n);
            return [first, end, one];
        }
        let seen = g.plus(self.first, (self.form.rows + n - 1) as i64);
        let [seen, _] = g.divided(seen, n);
        [zero, g.b.minui(seen, end), one]
    }

    // --- tiles ---

    /// Copies a tile to shared memory; rows that do not exist are zeros.
    fn fill(&self, g: &mut Grid, tile: Tile, from: Rows, first: Value) {
        /// Loads that wait together.
        const AT_ONCE: u64 = 8;
        let n = from.width.div_ceil(FOUR);
        let lanes = n.next_power_of_two();
        let at_once = THREADS / lanes;
        let [row, four] = g.divided(g.thread, lanes);
        let rounds = tile.rows.div_ceil(at_once);
        let round = |g: &mut Grid, row: Value, rounds: u64| {
            let rows: Vec<Value> = (0..rounds)
                .map(|i| g.plus(row, (i * at_once) as i64))
                .collect();
            let mut found = vec![];
            for &row in &rows {
                let row = g.b.addi(first, row);
                found.push(from.four(g, row, four, tile.rows));
            }
            for (&row, numbers) in rows.iter().zip(found) {
                tile.put(g, row, four, &numbers);
            }
        };
        let all = |g: &mut Grid| {
            if rounds <= AT_ONCE {
                return round(g, row, rounds);
            }
            // Both are powers of two.
            g.count(rounds / AT_ONCE, &[], |g, i, _| {
                let past = g.times(i, AT_ONCE * at_once);
                let row = g.b.addi(row, past);
                round(g, row, AT_ONCE);
                vec![]
            });
        };
        let mut exists = vec![];
        if n < lanes {
            exists.push(g.below(four, n));
        }
        if tile.rows < at_once {
            exists.push(g.below(row, tile.rows));
        }
        match exists[..] {
            [] => all(g),
            [a] => g.when(a, all),
            _ => {
                let both = g.b.andi(exists[0], exists[1]);
                g.when(both, all);
            }
        }
    }

    /// The products of rows of two tiles, of `width` numbers: a thread's scores, row by row.
    fn products(&self, g: &mut Grid, a: Tile, b: Tile, width: u64) -> Vec<Value> {
        let [n, m] = self.form.each();
        let [from_a, from_b] = [(a, self.start.group), (b, self.start.lane)].map(|(of, row)| {
            let at = g.times(row, of.pitch);
            g.b.offset(of.room.pointer, at, Kind::F32)
        });
        let zero = g.float(0.0, Kind::F32);
        let fours = width.div_ceil(FOUR);
        let nothing = vec![zero; (n * m) as usize];
        g.count(fours, &nothing, |g, i, sums| {
            let at = g.times(i, FOUR);
            let [from_a, from_b] = [from_a, from_b].map(|from| g.b.offset(from, at, Kind::F32));
            let columns = 0..m;
            let right: Vec<[Value; 4]> = columns
                .map(|j| four(g, from_b, j * LANES * b.pitch))
                .collect();
            let mut sums = sums.to_vec();
            for (i, sums) in sums.chunks_mut(m as usize).enumerate() {
                let left = four(g, from_a, i as u64 * GROUPS * a.pitch);
                for (l, &left) in left.iter().enumerate() {
                    for (sum, right) in sums.iter_mut().zip(&right) {
                        *sum = g.b.fma(left, right[l], *sum);
                    }
                }
            }
            sums
        })
    }

    /// Adds the products of factors, which are a tile of scores, and rows of another tile to a
    /// thread's sums of rows of `width`: row by row.
    fn gathered(
        &self,
        g: &mut Grid,
        sums: &[Value],
        factors: Tile,
        b: Tile,
        width: u64,
    ) -> Vec<Value> {
        let fours = self.fours(g, width);
        let from = g.times(self.start.group, factors.pitch);
        let from = g.b.offset(factors.room.pointer, from, Kind::F32);
        let starts: Vec<Value> = fours
            .iter()
            .map(|&(own, _)| {
                let at = g.times(own, FOUR);
                g.b.offset(b.room.pointer, at, Kind::F32)
            })
            .collect();
        g.count(self.form.columns / FOUR, sums, |g, i, sums| {
            let at = g.times(i, FOUR);
            let from = g.b.offset(from, at, Kind::F32);
            let at = g.times(i, FOUR * b.pitch);
            let mut right = vec![];
            for &start in &starts {
                let start = g.b.offset(start, at, Kind::F32);
                right.push([0, 1, 2, 3].map(|l| four(g, start, l * b.pitch)));
            }
            let mut sums = sums.to_vec();
            for (i, sums) in sums.chunks_mut(4 * fours.len()).enumerate() {
                let left = four(g, from, i as u64 * GROUPS * factors.pitch);
                for (l, &left) in left.iter().enumerate() {
                    for (sums, right) in sums.chunks_mut(4).zip(&right) {
                        for (sum, &right) in sums.iter_mut().zip(&right[l]) {
                            *sum = g.b.fma(left, right, *sum);
                        }
                    }
                }
            }
            sums
        })
    }

    /// Sums of a thread's rows, before anything is added.
    fn nothing(&self, g: &mut Grid, width: u64) -> Vec<Value> {
        let [n, _] = self.form.each();
        let fours = width.div_ceil(FOUR).div_ceil(LANES);
        vec![g.float(0.0, Kind::F32); (4 * n * fours) as usize]
    }

    /// Writes a thread's scores for the threads that have the same rows.
    fn share(&self, g: &mut Grid, tile: Tile, numbers: &[Value]) {
        let at = g.times(self.start.group, tile.pitch);
        let at = g.b.addi(at, self.start.lane);
        let [_, m] = self.form.each();
        for (i, numbers) in numbers.chunks(m as usize).enumerate() {
            for (j, &x) in numbers.iter().enumerate() {
                let past = i as u64 * GROUPS * tile.pitch + j as u64 * LANES;
                let to = g.plus(at, past as i64);
                g.put(tile.room, to, x);
            }
        }
        g.b.warp_barrier();
    }

    /// Writes a thread's sums, times a factor for each row.
    fn write(&self, g: &mut Grid, to: Rows, sums: &[Value], factors: &[Value]) {
        let fours = self.fours(g, to.width);
        let rows = self.rows(g);
        for ((row, &factor), sums) in rows
            .into_iter()
            .zip(factors)
            .zip(sums.chunks(4 * fours.len()))
        {
            for (&(four, exists), sums) in fours.iter().zip(sums.chunks(4)) {
                let mut inside = exists;
                if !to.n.is_multiple_of(self.form.rows) {
                    let below = g.below(row, to.n);
                    inside = Some(match inside {
                        Some(exists) => g.b.andi(exists, below),
                        None => below,
                    });
                }
                let numbers: Vec<Value> = sums.iter().map(|&x| g.mul(x, factor)).collect();
                match inside {
                    Some(inside) => g.when(inside, |g| to.put(g, row, four, &numbers)),
                    None => to.put(g, row, four, &numbers),
                }
            }
        }
    }

    // --- numbers ---

    /// Combines the numbers of the lanes that have a row.
    fn over_lanes(&self, g: &mut Grid, op: Arith, mut x: Value) -> Value {
        let [all, most] = [-1, 31].map(|i| g.b.int(i));
        for distance in [8, 4, 2, 1] {
            let distance = g.b.int(distance);
            let other = g.b.butterfly(all, x, distance, most);
            x = g.b.arith(op, &[x, other]);
        }
        x
    }

    /// e^x of a number that is not positive, up to rounding.
    fn exp(&self, g: &mut Grid, x: Value) -> Value {
        let factor = g.float(std::f64::consts::LOG2_E, Kind::F32);
        let x = g.mul(x, factor);
        g.b.ex2(x)
    }

    /// Scores from products: scaled and masked. With them, which ones count: those of columns that
    /// exist and that rows see; none if all do. `first` is the tile's first column.
    fn scores(
        &self,
        g: &mut Grid,
        products: &[Value],
        head: Value,
        first: Value,
    ) -> (Vec<Value>, Vec<Option<Value>>) {
        let scale = g.float(self.call.form.scale, Kind::F32);
        let scores: Vec<Value> = products.iter().map(|&x| g.mul(x, scale)).collect();
        let scores = match &self.call.mask {
            Some(mask) => self.masked(g, mask, scores, head, first),
            None => scores,
        };
        let ([_, m], [_, all]) = (self.form.each(), self.form.all);
        let own = g.b.addi(first, self.start.lane);
        let own = g.b.convert(Convert::Trunci, own, Kind::I32);
        // A thread's rows and columns differ by known numbers: one difference serves for all.
        let [query, key] = self.turned([self.own, own]);
        let ahead = g.b.subi(key, query);
        let lowest = self.call.lowest(g);
        let (mut last, mut counts) = (vec![], vec![]);
        for (n, &score) in scores.iter().enumerate() {
            let (i, j) = (n as u64 / m, n as u64 % m);
            let (row, column) = ((i * GROUPS) as i64, (j * LANES) as i64);
            let mut count = None;
            if self.call.form.causal {
                let [query, key] = self.turned([row, column]);
                let most = g.b.int(query - key);
                count = Some(g.b.compare(Predicate::Sle, ahead, most));
            }
            if !all.is_multiple_of(self.form.columns) {
                let end = g.b.int(all as i64 - column);
                let exists = g.b.compare(Predicate::Slt, own, end);
                count = Some(match count {
                    Some(sees) => g.b.andi(sees, exists),
                    None => exists,
                });
            }
            last.push(match count {
                Some(count) => g.b.select(count, score, lowest),
                None => score,
            });
            counts.push(count);
        }
        (last, counts)
    }

    /// A row and a column as a query and a key.
    fn turned<T>(&self, [row, column]: [T; 2]) -> [T; 2] {
        if self.is_of_queries {
            [row, column]
        } else {
            [column, row]
        }
    }

    /// Scores after the mask.
    fn masked(
        &self,
        g: &mut Grid,
        mask: &Mask,
        scores: Vec<Value>,
        head: Value,
        first: Value,
    ) -> Vec<Value> {
        let [batch, head] = g.divided(head, self.call.heads_of_one);
        let places = [self.rows(g), self.columns(g, first)];
        // Places that do not exist are those of the last row or column.
        let [rows, columns] = [0, 1].map(|i| {
            let last = g.b.long(self.form.all[i].saturating_sub(1));
            let bounded = |&at: &Value| g.b.minui(at, last);
            places[i].iter().map(bounded).collect::<Vec<Value>>()
        });
        let of = g.operand(mask.operand);
        let lowest = self.call.lowest(g);
        let documents = (mask.dtype == DType::I64).then(|| {
            [&rows, &columns].map(|tokens| {
                let document = |&token: &Value| {
                    let at = g.offset(&[batch, token], &mask.steps, 0);
                    g.get(of, at)
                };
                tokens.iter().map(document).collect::<Vec<Value>>()
            })
        });
        let mut masked = vec![];
        for (n, score) in scores.into_iter().enumerate() {
            let (i, j) = (n / columns.len(), n % columns.len());
            if let Some([a, b]) = &documents {
                let is_same = g.b.compare(Predicate::Eq, a[i], b[j]);
                masked.push(g.b.select(is_same, score, lowest));
                continue;
            }
            let [query, key] = self.turned([rows[i], columns[j]]);
            let at = g.offset(&[batch, head, query, key], &mask.steps, 0);
            let given = g.get(of, at);
            masked.push(if mask.dtype == DType::Bool {
                let zero = g.b.long(0);
                let takes_part = g.b.compare(Predicate::Ne, given, zero);
                g.b.select(takes_part, score, lowest)
            } else {
                g.add(score, given)
            });
        }
        masked
    }

    /// A thread's numbers of a tile of out, `rows` rows from `first` on: of every eighth row, as
    /// groups of four.
    fn outs(&self, g: &mut Grid, out: Rows, first: Value, rows: u64) -> Vec<Vec<Value>> {
        let own = g.b.addi(first, self.start.group);
        let mut outs = vec![];
        for i in 0..rows / GROUPS {
            let row = g.plus(own, (i * GROUPS) as i64);
            for (four, _) in self.fours(g, out.width) {
                outs.push(out.four(g, row, four, rows));
            }
        }
        outs
    }

    /// The sums over dout · out of these rows, which all lanes of a row get.
    fn deltas(&self, g: &mut Grid, douts: Tile, outs: &[Vec<Value>]) -> Vec<Value> {
        let fours = self.fours(g, self.call.values);
        let from = g.times(self.start.group, douts.pitch);
        let from = g.b.offset(douts.room.pointer, from, Kind::F32);
        let mut deltas = vec![];
        for (i, outs) in outs.chunks(fours.len()).enumerate() {
            let mut sum = g.float(0.0, Kind::F32);
            for (&(place, exists), outs) in fours.iter().zip(outs) {
                let at = g.times(place, FOUR);
                let from = g.b.offset(from, at, Kind::F32);
                let numbers = four(g, from, i as u64 * GROUPS * douts.pitch);
                let mut next = sum;
                for (&a, &b) in numbers.iter().zip(outs) {
                    next = g.b.fma(a, b, next);
                }
                sum = match exists {
                    Some(exists) => g.b.select(exists, next, sum),
                    None => next,
                };
            }
            deltas.push(self.over_lanes(g, Arith::Addf, sum));
        }
        deltas
    }

    /// The logsumexp of queries; of the last one for those that do not exist.
    fn logs(&self, g: &mut Grid, head: Value, queries: &[Value]) -> Vec<Value> {
        let lse = g.operand(5);
        let first = g.times(head, self.call.queries);
        let last = g.b.long(self.call.queries.saturating_sub(1));
        let mut logs = vec![];
        for &query in queries {
            let query = g.b.minui(query, last);
            let at = g.b.addi(first, query);
            logs.push(g.get(lse, at));
        }
        logs
    }

    /// The weights of a tile of scores that are dropped. `head` is one of q, `first` the tile's
    /// first column. A loop: the words of a score take a hundred instructions.
    fn dropping(
        &self,
        g: &mut Grid,
        drops: &Option<(Drops, Value)>,
        head: Value,
        first: Value,
    ) -> Option<Dropping> {
        let (drops, scale) = drops.as_ref()?;
        let own = g.b.addi(self.first, self.start.group);
        let column = g.b.addi(first, self.start.lane);
        let [query, key] = self.turned([own, column]);
        let before = g.times(head, self.call.queries);
        let query = g.b.addi(before, query);
        let before = g.times(query, self.call.keys);
        let first = g.b.addi(before, key);
        let [n, m] = self.form.each();
        let apart = self.turned([GROUPS, LANES]);
        let [of_row, of_column] = self.turned([apart[0] * self.call.keys, apart[1]]);
        let [none, zero] = [g.b.int(0), g.b.int(0)];
        let kept = g.count(n * m, &[none], |g, i, kept| {
            let [row, column] = g.divided(i, m);
            let at = g.offset(&[row, column], &[of_row as i64, of_column as i64], 0);
            let at = g.b.addi(first, at);
            let keeps = drops.keeps_element(&mut g.b, at);
            let (one, place) = (g.b.int(1), g.b.convert(Convert::Trunci, i, Kind::I32));
            let bit = g.b.arith(Arith::Shli, &[one, place]);
            let bit = g.b.select(keeps, bit, zero);
            vec![g.b.ori(kept[0], bit)]
        });
        Some(Dropping {
            kept: kept[0],
            scale: *scale,
        })
    }

    /// Weights, as values are multiplied with them, and the gradients of unscaled scores. `logs`
    /// and `deltas` are of a row, or of a column if columns are queries.
    fn gradients(
        &self,
        g: &mut Grid,
        (scores, counts): (&[Value], &[Option<Value>]),
        (products, dropping): (&[Value], Option<Dropping>),
        logs: &[Value],
        deltas: &[Value],
    ) -> [Vec<Value>; 2] {
        let [_, m] = self.form.each();
        let zero = g.float(0.0, Kind::F32);
        let (mut all, mut gradients) = (vec![], vec![]);
        for (n, (&score, &dp)) in scores.iter().zip(products).enumerate() {
            let [query, _] = self.turned([n / m as usize, n % m as usize]);
            let below = g.sub(score, logs[query]);
            let p = self.exp(g, below);
            let (mut used, mut dp) = (p, dp);
            if let Some(dropping) = &dropping {
                let factor = dropping.factor(g, n);
                [used, dp] = [p, dp].map(|x| g.mul(x, factor));
            }
            let less = g.sub(dp, deltas[query]);
            let ds = g.mul(p, less);
            let [p, ds] = [used, ds].map(|x| match counts[n] {
                Some(counts) => g.b.select(counts, x, zero),
                None => x,
            });
            all.push(p);
            gradients.push(ds);
        }
        [all, gradients]
    }

    // --- kernels ---

    /// out and logsumexp of a tile of queries.
    fn forward(&self, g: &mut Grid, [own, pairs, values]: [Tensor; 3]) {
        let call = self.call;
        let [n, m] = self.form.each().map(|n| n as usize);
        let [kv, _] = g.divided(self.head, call.group);
        let [q, k, v] = [0, 1, 2].map(|i| g.operand(i));
        let q = self.tensor(g, q, Part::Q, self.head);
        let k = self.tensor(g, k, Part::K, kv);
        let v = self.tensor(g, v, Part::V, kv);
        let own = Self::tile(own, self.form.rows, call.width);
        let keys = Self::tile(pairs, self.form.columns, call.width);
        let values = Self::tile(values, self.form.columns, call.values);
        let pairs = self.pairs(pairs);
        self.fill(g, own, q, self.first);

        // Loop values: sums, and the maximum and this thread's part of the sum of each row.
        let (lowest, zero) = (call.lowest(g), g.float(0.0, Kind::F32));
        let nothing = self.nothing(g, call.values);
        let width = nothing.len();
        let starts = [nothing, vec![lowest; n], vec![zero; n]].concat();
        let drops = call.drops(g);
        let reach = self.reach(g);
        let last = g.repeat(reach, &starts, |g, tile, carried| {
            let (sums, rest) = carried.split_at(width);
            let (maxima, totals) = rest.split_at(n);
            let first = g.times(tile, self.form.columns);
            self.fill(g, keys, k, first);
            self.fill(g, values, v, first);
            g.b.barrier();
            let products = self.products(g, own, keys, call.width);
            let (scores, _) = self.scores(g, &products, self.head, first);
            let dropping = self.dropping(g, &drops, self.head, first);
            let (mut p, mut next) = (vec![], vec![]);
            let (mut new_maxima, mut new_totals) = (vec![], vec![]);
            for (i, scores) in scores.chunks(m).enumerate() {
                let mut max = scores[0];
                for &score in &scores[1..] {
                    max = larger(g, max, score);
                }
                let max = self.over_lanes(g, Arith::Maximumf, max);
                let max = larger(g, maxima[i], max);
                // If all scores are hidden, nothing is subtracted, and every exponential is 0.
                let none = g.equal(max, lowest);
                let shift = g.b.select(none, zero, max);
                let less = g.sub(maxima[i], shift);
                let shrink = self.exp(g, less);
                let mut total = g.mul(totals[i], shrink);
                for &score in scores {
                    let below = g.sub(score, shift);
                    let power = self.exp(g, below);
                    total = g.add(total, power);
                    p.push(match &dropping {
                        Some(dropping) => {
                            let factor = dropping.factor(g, p.len());
                            g.mul(power, factor)
                        }
                        None => power,
                    });
                }
                let each = width / n;
                for &sum in &sums[i * each..(i + 1) * each] {
                    next.push(g.mul(sum, shrink));
                }
                new_maxima.push(max);
                new_totals.push(total);
            }
            // All threads have read the keys.
            g.b.barrier();
            self.share(g, pairs, &p);
            let sums = self.gathered(g, &next, pairs, values, call.values);
            g.b.barrier();
            [sums, new_maxima, new_totals].concat()
        });
        let (sums, rest) = last.split_at(width);
        let (maxima, totals) = rest.split_at(n);
        let (mut inverses, mut logs) = (vec![], vec![]);
        let (one, ln_2) = (g.float(1.0, Kind::F32), std::f64::consts::LN_2);
        let ln_2 = g.float(ln_2, Kind::F32);
        for (&max, &total) in maxima.iter().zip(totals) {
            let total = self.over_lanes(g, Arith::Addf, total);
            let none = g.equal(max, lowest);
            let inverse = g.b.divf(one, total);
            inverses.push(g.b.select(none, zero, inverse));
            let log = g.b.lg2(total);
            let log = g.b.fma(log, ln_2, max);
            logs.push(g.b.select(none, zero, log));
        }
        let out = g.result(0);
        let out = self.tensor(g, out, Part::Out, self.head);
        self.write(g, out, sums, &inverses);
        self.write_logs(g, &logs);
    }

    fn write_logs(&self, g: &mut Grid, logs: &[Value]) {
        let rows = self.rows(g);
        let first = g.times(self.head, self.call.queries);
        let lse = g.result(1);
        let leads = g.below(self.start.lane, 1);
        g.when(leads, |g| {
            for (row, &log) in rows.into_iter().zip(logs) {
                let inside = g.below(row, self.call.queries);
                g.when(inside, |g| {
                    let at = g.b.addi(first, row);
                    g.put(lse, at, log);
                });
            }
        });
    }

    /// dk and dv of a tile of keys, over the queries of all heads that use it.
    fn of_keys(&self, g: &mut Grid, rooms: [Tensor; 6]) {
        let call = self.call;
        let [dout, q, k, v, out] = [0, 1, 2, 3, 4].map(|i| g.operand(i));
        let [to_k, to_v] = [1, 2].map(|j| call.gradient(g, j));
        let k = self.tensor(g, k, Part::K, self.head);
        let v = self.tensor(g, v, Part::V, self.head);
        let [n, columns] = [self.form.rows, self.form.columns];
        let keys = Self::tile(rooms[0], n, call.width);
        let values = Self::tile(rooms[1], n, call.values);
        let queries = Self::tile(rooms[2], columns, call.width);
        let douts = Self::tile(rooms[3], columns, call.values);
        let (pairs, room) = (self.pairs(rooms[4]), rooms[5]);
        self.fill(g, keys, k, self.first);
        self.fill(g, values, v, self.first);
        // Otherwise loads for the columns begin here, and registers run out.
        g.b.barrier();

        let [dk, dv] = [call.width, call.values].map(|width| self.nothing(g, width));
        let n_keys = dk.len();
        let first_head = g.times(self.head, call.group);
        let drops = call.drops(g);
        let reach = self.reach(g);
        let sums = g.count(call.group, &[dk, dv].concat(), |g, i, sums| {
            let head = g.b.addi(first_head, i);
            let q = self.tensor(g, q, Part::Q, head);
            let dout = self.tensor(g, dout, Part::Out, head);
            let out = self.tensor(g, out, Part::Out, head);
            g.repeat(reach, sums, |g, tile, sums| {
                let first = g.times(tile, columns);
                self.fill(g, queries, q, first);
                self.fill(g, douts, dout, first);
                let outs = self.outs(g, out, first, columns);
                let own = self.columns(g, first);
                let logs = self.logs(g, head, &own);
                g.b.barrier();
                let products = self.products(g, keys, queries, call.width);
                let (scores, counts) = self.scores(g, &products, head, first);
                let deltas = self.deltas(g, douts, &outs);
                self.lead(g, room, &deltas);
                let products = self.products(g, values, douts, call.values);
                // The deltas are there.
                g.b.barrier();
                let deltas = self.columns_of(g, room);
                let dropping = self.dropping(g, &drops, head, first);
                let of_scores = (&scores[..], &counts[..]);
                let of_weights = (&products[..], dropping);
                let [p, ds] = self.gradients(g, of_scores, of_weights, &logs, &deltas);
                let (dk, dv) = sums.split_at(n_keys);
                self.share(g, pairs, &p);
                let dv = self.gathered(g, dv, pairs, douts, call.values);
                g.b.warp_barrier();
                self.share(g, pairs, &ds);
                let dk = self.gathered(g, dk, pairs, queries, call.width);
                g.b.barrier();
                [dk, dv].concat()
            })
        });
        let (dk, dv) = sums.split_at(n_keys);
        let [n, _] = self.form.each().map(|n| n as usize);
        let [scale, one] = [call.form.scale, 1.0].map(|x| vec![g.float(x, Kind::F32); n]);
        let to_k = self.tensor(g, to_k, Part::Dk, self.head);
        let to_v = self.tensor(g, to_v, Part::Dv, self.head);
        self.write(g, to_k, dk, &scale);
        self.write(g, to_v, dv, &one);
    }

    /// Writes numbers that all lanes of a row have, of every eighth row, to shared memory.
    fn lead(&self, g: &mut Grid, room: Tensor, numbers: &[Value]) {
        let leads = g.below(self.start.lane, 1);
        g.when(leads, |g| {
            for (i, &x) in numbers.iter().enumerate() {
                let at = g.plus(self.start.group, (i as u64 * GROUPS) as i64);
                g.put(room, at, x);
            }
        });
    }

    /// A thread's columns of one row in shared memory.
    fn columns_of(&self, g: &mut Grid, room: Tensor) -> Vec<Value> {
        let zero = g.b.long(0);
        let columns = self.columns(g, zero);
        columns.into_iter().map(|at| g.get(room, at)).collect()
    }

    /// dq of a tile of queries.
    fn of_queries(&self, g: &mut Grid, rooms: [Tensor; 4]) {
        let call = self.call;
        let [kv, _] = g.divided(self.head, call.group);
        let [dout, q, k, v, out] = [0, 1, 2, 3, 4].map(|i| g.operand(i));
        let to = call.gradient(g, 0);
        let q = self.tensor(g, q, Part::Q, self.head);
        let k = self.tensor(g, k, Part::K, kv);
        let v = self.tensor(g, v, Part::V, kv);
        let [dout, out] = [dout, out].map(|of| self.tensor(g, of, Part::Out, self.head));
        let [n, columns] = [self.form.rows, self.form.columns];
        let queries = Self::tile(rooms[0], n, call.width);
        let douts = Self::tile(rooms[1], n, call.values);
        let keys = Self::tile(rooms[2], columns, call.width);
        let values = Self::tile(rooms[3], columns, call.values);
        let pairs = self.pairs(rooms[3]);
        self.fill(g, queries, q, self.first);
        self.fill(g, douts, dout, self.first);
        // Otherwise the next loads begin here, and registers run out.
        g.b.barrier();

        let rows = self.rows(g);
        let outs = self.outs(g, out, self.first, n);
        let deltas = self.deltas(g, douts, &outs);
        let logs = self.logs(g, self.head, &rows);
        let nothing = self.nothing(g, call.width);
        let drops = call.drops(g);
        let reach = self.reach(g);
        let sums = g.repeat(reach, &nothing, |g, tile, sums| {
            let first = g.times(tile, columns);
            self.fill(g, keys, k, first);
            self.fill(g, values, v, first);
            g.b.barrier();
            let products = self.products(g, queries, keys, call.width);
            let (scores, counts) = self.scores(g, &products, self.head, first);
            let products = self.products(g, douts, values, call.values);
            let dropping = self.dropping(g, &drops, self.head, first);
            let of_scores = (&scores[..], &counts[..]);
            let of_weights = (&products[..], dropping);
            let [_, ds] = self.gradients(g, of_scores, of_weights, &logs, &deltas);
            // All threads have read the values.
            g.b.barrier();
            self.share(g, pairs, &ds);
            let sums = self.gathered(g, sums, pairs, keys, call.width);
            g.b.barrier();
            sums
        });
        let scale = vec![g.float(call.form.scale, Kind::F32); deltas.len()];
        let to = self.tensor(g, to, Part::Dq, self.head);
        self.write(g, to, &sums, &scale);
    }
}

impl Dropping {
    /// The factor of the thread's score number `n`: 0 if its weight is dropped.
    fn factor(&self, g: &mut Grid, n: usize) -> Value {
        let place = g.b.int(n as i64);
        let bit = g.b.shrui(self.kept, place);
        let keeps = g.b.convert(Convert::Trunci, bit, Kind::I1);
        let zero = g.float(0.0, Kind::F32);
        g.b.select(keeps, self.scale, zero)
    }
}

impl Rows {
    /// Four numbers of a row; zeros beyond the last row, which tiles of `some` rows may reach, and
    /// beyond the row's end.
    fn four(&self, g: &mut Grid, row: Value, four: Value, some: u64) -> Vec<Value> {
        if self.n.is_multiple_of(some) {
            return self.four_of(g, row, four);
        }
        let last = g.b.long(self.n.saturating_sub(1));
        let bounded = g.b.minui(row, last);
        let numbers = self.four_of(g, bounded, four);
        let (inside, zero) = (g.below(row, self.n), g.float(0.0, Kind::F32));
        let bounded = numbers.into_iter().map(|x| g.b.select(inside, x, zero));
        bounded.collect()
    }

    /// Four numbers of a row that exists.
    fn four_of(&self, g: &mut Grid, row: Value, four: Value) -> Vec<Value> {
        let past = g.times(row, self.step);
        let first = g.b.addi(self.first, past);
        let column = g.times(four, FOUR);
        if self.by_four {
            let at = g.b.addi(first, column);
            let kind = kind_of(self.of.dtype);
            let from = g.b.offset(self.of.pointer, at, kind);
            let all = g.b.load(from, Type::Vector(4, kind), FOUR * kind.bytes());
            return (0..FOUR)
                .map(|i| {
                    let x = g.b.extract(all, i);
                    g.widened(x, self.of.dtype)
                })
                .collect();
        }
        let (end, zero) = (g.b.long(self.width - 1), g.float(0.0, Kind::F32));
        (0..FOUR)
            .map(|i| {
                let column = g.plus(column, i as i64);
                let bounded = g.b.minui(column, end);
                let at = g.b.addi(first, bounded);
                let x = g.get(self.of, at);
                let inside = g.below(column, self.width);
                g.b.select(inside, x, zero)
            })
            .collect()
    }

    /// Writes four numbers of a row that exists.
    fn put(&self, g: &mut Grid, row: Value, four: Value, numbers: &[Value]) {
        let past = g.times(row, self.step);
        let first = g.b.addi(self.first, past);
        let column = g.times(four, FOUR);
        if self.by_four {
            let at = g.b.addi(first, column);
            let kind = kind_of(self.of.dtype);
            let to = g.b.offset(self.of.pointer, at, kind);
            let numbers: Vec<Value> = numbers
                .iter()
                .map(|&x| g.narrowed(x, self.of.dtype))
                .collect();
            let all = together(g, &numbers, kind);
            return g.b.store(all, to, FOUR * kind.bytes());
        }
        for (i, &x) in numbers.iter().enumerate() {
            let column = g.plus(column, i as i64);
            let inside = g.below(column, self.width);
            g.when(inside, |g| {
                let at = g.b.addi(first, column);
                g.put(self.of, at, x);
            });
        }
    }
}

impl Tile {
    fn put(&self, g: &mut Grid, row: Value, four: Value, numbers: &[Value]) {
        let at = g.times(row, self.pitch);
        let column = g.times(four, FOUR);
        let at = g.b.addi(at, column);
        let to = g.b.offset(self.room.pointer, at, Kind::F32);
        let all = together(g, numbers, Kind::F32);
        g.b.store(all, to, 16);
    }
}

/// Four numbers in shared memory, at a known distance.
fn four(g: &mut Grid, from: Value, past: u64) -> [Value; 4] {
    let from = g.b.offset(from, past, Kind::F32);
    let all = g.b.load(from, Type::Vector(4, Kind::F32), 16);
    [0, 1, 2, 3].map(|i| g.b.extract(all, i))
}

/// Four numbers as a vector.
fn together(g: &mut Grid, numbers: &[Value], kind: Kind) -> Value {
    let none = g.b.undef(Type::Vector(4, kind));
    let numbers = numbers.iter().zip(0..);
    numbers.fold(none, |all, (&x, i)| g.b.insert(x, all, i))
}
