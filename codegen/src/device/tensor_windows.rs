//! Convolutions of bf16 by tensor cores, as products whose factors are gathered from images
//! ("implicit GEMM" of cuDNN and CUTLASS). A block computes a tile of 128 × 128 of the product, as
//! in [`super::tensor`].
//!
//! | result | rows | columns | terms |
//! |---|---|---|---|
//! | y | channels of y | places of y | taps of all channels of x |
//! | dx | channels of x | places of x | taps of all channels of y |
//! | dw | channels of y | taps of all channels of x | places of y |
//!
//! A place of an image is an image, a row and a column. In dx, places whose remainders by the
//! strides differ meet different taps, so each pair of remainders is a product of its own. dw has
//! few elements and long sums: parts of the sums are products of their own, and are added up in
//! their order.
//!
//! Before: [`Windows::on_tensor_cores`]. After: sums in f32, rounded once; the bits do not depend
//! on the number of blocks.
//!
//! An element of a factor lies where the steps of its row or column, and those of its term, lead
//! together: [`Walk`]. Elements outside an image are zeros. The threads load the elements of the
//! next tiles while tensor cores multiply the present ones.

use super::Kernel;
use super::grid::Grid;
use super::tensor::{CHUNK, DEPTH, SUMS, THREADS, TILE, Tiles, arrive, pitch, swizzled};
use crate::mlir::{Arith, Cache, Convert, Emit, Factors, Kind, Predicate, Type, Value};
use ir::DType;
use ir::op::windows::{Axis, Windows};

/// A row outside every image.
const FAR: i64 = 1 << 29;
/// Bytes of an entry of a table of steps: an offset, a row, a column, and nothing.
const ENTRY: u64 = 16;

/// The steps to an element along one side of a matrix. A number is three coordinates; each leads
/// from the first element to others, by steps of an offset in the tensor, and of a row and a column
/// in the image.
#[derive(Clone, Copy)]
struct Walk {
    sizes: [u64; 3],
    steps: [[i64; 3]; 3],
    start: [i64; 3],
}

impl Walk {
    /// Numbers that lie in an array, `step` elements apart.
    fn line(n: u64, step: u64) -> Walk {
        Walk::flat([1, 1, n], [0, 0, step])
    }

    /// Coordinates with steps in the tensor alone.
    fn flat(sizes: [u64; 3], steps: [u64; 3]) -> Walk {
        Walk {
            sizes,
            steps: steps.map(|step| [step as i64, 0, 0]),
            start: [0; 3],
        }
    }

    fn n(&self) -> u64 {
        self.sizes.iter().product()
    }

    /// True if the elements of each 16 bytes of terms are next to each other and aligned.
    fn is_whole(&self) -> bool {
        let [far, middle, near] = self.steps;
        let aligned = |step: i64| step % CHUNK as i64 == 0;
        self.start == [0; 3]
            && near == [1, 0, 0]
            && self.sizes[2].is_multiple_of(CHUNK)
            && [far, middle]
                .iter()
                .all(|&[at, y, x]| aligned(at) && (y, x) == (0, 0))
    }

    /// Offset, row and column of number `i`, 32 bits; the row is far outside if there is no such
    /// number.
    fn at(&self, g: &mut Grid, i: Value) -> [Value; 3] {
        let inside = {
            let n = g.b.int(self.n() as i64);
            g.b.compare(Predicate::Ult, i, n)
        };
        let [rest, near] = split(g, i, self.sizes[2]);
        let [far, middle] = split(g, rest, self.sizes[1]);
        let mut sums = self.start.map(|start| g.b.int(start));
        for (at, steps) in [far, middle, near].into_iter().zip(self.steps) {
            for (sum, step) in sums.iter_mut().zip(steps).filter(|(_, step)| *step != 0) {
                let step = g.b.int(step);
                let past = g.b.muli(at, step);
                *sum = g.b.addi(*sum, past);
            }
        }
        let far = g.b.int(FAR);
        sums[1] = g.b.select(inside, sums[1], far);
        sums
    }
}

/// Quotient and remainder of a 32-bit integer by a known number.
fn split(g: &mut Grid, i: Value, n: u64) -> [Value; 2] {
    if n == 1 {
        return [i, g.b.int(0)];
    }
    let n = g.b.int(n as i64);
    [g.b.divui(i, n), g.b.remui(i, n)]
}

/// How threads fill a tile.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Filling {
    /// `cp.async` moves 16 bytes at a time: terms lie next to each other.
    Copies,
    /// The lanes of a warp load a term of different rows of the tile.
    Rows,
    /// The lanes of a warp load different terms of a row of the tile.
    Terms,
}

/// A factor: `outer` is a row of the left one, or a column of the right one.
#[derive(Clone, Copy)]
struct Factor {
    operand: usize,
    outer: Walk,
    terms: Walk,
    /// Rows and columns of an image.
    limits: [u64; 2],
    filling: Filling,
}

impl Factor {
    /// An operand without images.
    fn matrix(operand: usize, outer: Walk, terms: Walk, filling: Filling) -> Factor {
        let is_aligned = outer.steps[2][0] % CHUNK as i64 == 0;
        let filling = match is_aligned && terms.is_whole() {
            true => Filling::Copies,
            false => filling,
        };
        Factor {
            operand,
            outer,
            terms,
            limits: [1, 1],
            filling,
        }
    }
}

/// A product.
struct Call {
    factors: [Factor; 2],
    /// The operand that is added to rows of the result.
    bias: Option<usize>,
    /// Offsets in the result of its rows and columns.
    places: [Walk; 2],
    /// Where it goes.
    to: To,
}

#[derive(Clone, Copy)]
enum To {
    Result(usize),
    /// Sums of parts of the terms, to the scratch.
    Parts(u64),
}

/// Steps from place to place, and from tap to tap, of an image of x.
fn images(s: &Windows) -> [Walk; 2] {
    let [y, x] = s.axes;
    let [_, channels, rows, columns] = s.x();
    let line = columns as i64;
    let (plane, image) = (rows * columns, channels * rows * columns);
    let step = |[down, right]: [i64; 2]| [down * line + right, down, right];
    let places = Walk {
        sizes: [s.batch, y.output, x.output],
        steps: [
            [image as i64, 0, 0],
            step([y.stride as i64, 0]),
            step([0, x.stride as i64]),
        ],
        start: step([-y.padding, -x.padding]),
    };
    let taps = Walk {
        sizes: [s.inputs, y.taps, x.taps],
        steps: [
            [plane as i64, 0, 0],
            step([y.dilation as i64, 0]),
            step([0, x.dilation as i64]),
        ],
        start: [0; 3],
    };
    [places, taps]
}

/// (x, w, b) -> y.
pub(super) fn forward(k: &mut Kernel<'_>, s: &Windows) {
    let [outputs, inputs, taps_y, taps_x] = s.w();
    let terms = inputs * taps_y * taps_x;
    let [images, _, rows, columns] = s.y();
    let (places, taps) = (self::images(s)[0], self::images(s)[1]);
    let plane = rows * columns;
    let call = Call {
        factors: [
            Factor::matrix(
                1,
                Walk::line(outputs, terms),
                Walk::line(terms, 1),
                Filling::Terms,
            ),
            Factor {
                operand: 0,
                outer: places,
                terms: taps,
                limits: s.axes.map(|axis| axis.input),
                filling: Filling::Rows,
            },
        ],
        bias: (k.operands.len() == 3).then_some(2),
        places: [
            Walk::line(outputs, plane),
            Walk::flat([images, 1, plane], [outputs * plane, 0, 1]),
        ],
        to: To::Result(0),
    };
    product(k, &call);
}

/// The places of x with a remainder by the stride, and the taps that they meet.
struct Meeting {
    /// How many places; the first is the remainder, and a stride lies between them.
    places: u64,
    remainder: u64,
    /// The row of y of the first place and tap.
    first: i64,
    taps: u64,
    first_tap: u64,
    /// From a tap to the next: taps of w, and rows of y.
    steps: [i64; 2],
}

impl Meeting {
    fn new(axis: &Axis, remainder: u64) -> Meeting {
        let Axis {
            stride, dilation, ..
        } = *axis;
        let at = remainder as i64 + axis.padding;
        let row = |tap: u64| at - (tap * dilation) as i64;
        let meets: Vec<u64> = (0..axis.taps)
            .filter(|&tap| row(tap).rem_euclid(stride as i64) == 0)
            .collect();
        let step = if meets.len() > 1 {
            meets[1] - meets[0]
        } else {
            1
        };
        let first_tap = meets.first().copied().unwrap_or(0);
        Meeting {
            places: axis.input.saturating_sub(remainder).div_ceil(stride),
            remainder,
            first: row(first_tap).div_euclid(stride as i64),
            taps: meets.len() as u64,
            first_tap,
            steps: [step as i64, -((step * dilation / stride) as i64)],
        }
    }
}

/// (dy, x, w) -> dx as result `j`.
pub(super) fn inputs(k: &mut Kernel<'_>, s: &Windows, j: usize) {
    let [y, x] = s.axes;
    for below in 0..y.stride {
        for right in 0..x.stride {
            let meetings = [Meeting::new(&y, below), Meeting::new(&x, right)];
            if meetings.iter().all(|meeting| meeting.places > 0) {
                inputs_of(k, s, &meetings, j);
            }
        }
    }
}

fn inputs_of(k: &mut Kernel<'_>, s: &Windows, [down, right]: &[Meeting; 2], j: usize) {
    let [y, x] = s.axes;
    let [images, channels, rows, columns] = s.x();
    let to = Walk {
        start: [(down.remainder * columns + right.remainder) as i64, 0, 0],
        ..Walk::flat(
            [images, down.places, right.places],
            [channels * rows * columns, y.stride * columns, x.stride],
        )
    };
    let plane = rows * columns;
    let places = [Walk::line(channels, plane), to];
    if down.taps * right.taps == 0 {
        return zeros(k, &places, j);
    }
    let [_, outputs, of_rows, of_columns] = s.y();
    let line = of_columns as i64;
    let step = |[down, right]: [i64; 2]| [down * line + right, down, right];
    let of_place = outputs * of_rows * of_columns;
    let taps = y.taps * x.taps;
    let call = Call {
        factors: [
            Factor::matrix(
                2,
                Walk::line(channels, taps),
                Walk {
                    sizes: [outputs, down.taps, right.taps],
                    steps: [
                        [(channels * taps) as i64, 0, 0],
                        [down.steps[0] * x.taps as i64, 0, 0],
                        [right.steps[0], 0, 0],
                    ],
                    start: [(down.first_tap * x.taps + right.first_tap) as i64, 0, 0],
                },
                Filling::Rows,
            ),
            Factor {
                operand: 0,
                outer: Walk {
                    sizes: [images, down.places, right.places],
                    steps: [[of_place as i64, 0, 0], step([1, 0]), step([0, 1])],
                    start: step([down.first, right.first]),
                },
                terms: Walk {
                    sizes: [outputs, down.taps, right.taps],
                    steps: [
                        [(of_rows * of_columns) as i64, 0, 0],
                        step([down.steps[1], 0]),
                        step([0, right.steps[1]]),
                    ],
                    start: [0; 3],
                },
                limits: [of_rows, of_columns],
                filling: Filling::Rows,
            },
        ],
        bias: None,
        places,
        to: To::Result(j),
    };
    product(k, &call);
}

/// Writes zeros to places of result `j`.
fn zeros(k: &mut Kernel<'_>, places: &[Walk; 2], j: usize) {
    let columns = places[1].n();
    k.elements(places[0].n() * columns, |g, i| {
        let i = g.b.convert(Convert::Trunci, i, Kind::I32);
        let at = split(g, i, columns);
        let offset = offset(g, places, at);
        let (zero, dx) = (g.float(0.0, Kind::F32), g.result(j));
        g.put(dx, offset, zero);
    });
}

/// (dy, x, w) -> dw as result `j`. The scratch has [`Windows::weight_scratch`] bytes.
pub(super) fn weights(k: &mut Kernel<'_>, s: &Windows, j: usize) {
    let [images, outputs, rows, columns] = s.y();
    let plane = rows * columns;
    let [places, taps] = self::images(s);
    let n = s.w().iter().product();
    let parts = s.weight_parts();
    let call = Call {
        factors: [
            Factor::matrix(
                0,
                Walk::line(outputs, plane),
                Walk::flat([images, 1, plane], [outputs * plane, 0, 1]),
                Filling::Terms,
            ),
            Factor {
                operand: 1,
                outer: taps,
                terms: places,
                limits: s.axes.map(|axis| axis.input),
                filling: Filling::Terms,
            },
        ],
        bias: None,
        places: [Walk::line(outputs, taps.n()), Walk::line(taps.n(), 1)],
        to: match parts {
            1 => To::Result(j),
            _ => To::Parts(parts),
        },
    };
    product(k, &call);
    if parts == 1 {
        return;
    }
    k.elements(n, |g, i| {
        let sums = g.scratch(0, DType::F32);
        let zero = g.float(0.0, Kind::F32);
        let sum = g.count(parts, &[zero], |g, part, sum| {
            let first = g.times(part, n);
            let at = g.b.addi(first, i);
            let x = g.get(sums, at);
            vec![g.add(sum[0], x)]
        });
        let dw = g.result(j);
        g.put(dw, i, sum[0]);
    });
}

/// The offset of a row and a column of the result, 64 bits.
fn offset(g: &mut Grid, places: &[Walk; 2], at: [Value; 2]) -> Value {
    let [row, column] = [0, 1].map(|i| places[i].at(g, at[i])[0]);
    let at = g.b.addi(row, column);
    g.b.wide(at)
}

fn product(k: &mut Kernel<'_>, call: &Call) {
    let [rows, columns] = [0, 1].map(|i| call.factors[i].outer.n().div_ceil(TILE));
    let rounds = call.factors[0].terms.n().div_ceil(DEPTH);
    let splits = match call.to {
        To::Parts(parts) => parts,
        To::Result(_) => 1,
    };
    let parts = splits * rows * columns;
    k.phase(THREADS, parts, |g| {
        let gather = Gather::new(g, call);
        g.parts(parts, |g, part| {
            let [rest, row] = g.divided(part, rows);
            let [split, column] = g.divided(rest, columns);
            let corner = [row, column].map(|at| g.times(at, TILE));
            // Parts of the terms differ by a round at most.
            let [first, end] = [0, 1].map(|i| {
                let split = g.plus(split, i);
                let past = g.times(split, rounds);
                g.divided(past, splits)[0]
            });
            let sums = gather.tile(g, corner, [first, end]);
            gather.write(g, split, corner, &sums);
        });
    });
}

/// A product, and what a thread knows about its place in it.
struct Gather<'a> {
    call: &'a Call,
    tiles: Tiles,
    /// For each factor, its table of steps: of the terms of even and odd rounds, or of the rows of
    /// the tile.
    tables: [Value; 2],
    /// For each factor, where the thread's first elements go in its tile.
    own: [Value; 2],
    lane: Value,
    warp: Value,
}

/// A thread's part of the next tile of a factor.
type Loaded = Vec<Value>;

/// Elements that a thread loads of a tile.
const EACH: usize = (TILE * DEPTH / THREADS as u64) as usize;
/// Warps of a block, and halves of it that have a thread for each row of a tile.
const WARPS: u64 = THREADS as u64 / 32;
const HALVES: u64 = THREADS as u64 / TILE;

impl Gather<'_> {
    fn new<'a>(g: &mut Grid, call: &'a Call) -> Gather<'a> {
        const TABLE: u64 = ENTRY * TILE;
        let tiles = Tiles::new(g, [false; 2], Factors::Bf16, 2 * TABLE);
        let tables = [0, 1].map(|i| tiles.behind(g, i * TABLE));
        let [warp, lane] = g.divided(g.thread, 32);
        let own = call.factors.each_ref().map(|factor| match factor.filling {
            Filling::Copies => {
                let [row, chunk] = g.divided(g.thread, DEPTH / CHUNK);
                swizzled(g, pitch(false), row, chunk)
            }
            Filling::Rows => {
                let [half, row] = g.divided(g.thread, TILE);
                swizzled(g, pitch(false), row, half)
            }
            Filling::Terms => {
                let [chunk, pair] = g.divided(lane, CHUNK / 2);
                let start = swizzled(g, pitch(false), warp, chunk);
                let past = g.times(pair, 4);
                g.b.addi(start, past)
            }
        });
        Gather {
            call,
            tiles,
            tables,
            own,
            lane,
            warp,
        }
    }

    /// The sums of a tile over some rounds.
    fn tile(&self, g: &mut Grid, corner: [Value; 2], [first, end]: [Value; 2]) -> Vec<Value> {
        // Rows of the tile that a thread fills, if it fills the same in all rounds.
        let rows = [0, 1].map(|i| self.rows(g, i, corner[i]));
        let one = g.b.long(1);
        let second = g.b.addi(first, one);
        for round in [first, second] {
            self.write_terms(g, round);
        }
        g.b.barrier();
        let loaded = self.load(g, corner, &rows, first);
        self.store(g, &loaded, first);
        arrive(g);
        let zero = g.float(0.0, Kind::F32);
        g.repeat([first, end, one], &[zero; SUMS], |g, round, sums| {
            let next = g.plus(round, 1);
            let more = g.less(next, end);
            let nothing = g.b.constant(0, Type::Scalar(Kind::I16));
            let others = vec![nothing; self.count()];
            let loaded = g.choose(more, &others, |g| self.load(g, corner, &rows, next));
            // The table of this round has been read.
            let after = g.plus(round, 2);
            self.write_terms(g, after);
            let sums = self.tiles.round(g, round, sums);
            self.store(g, &loaded, next);
            arrive(g);
            sums
        })
    }

    /// How many elements a thread holds until their tiles are free.
    fn count(&self) -> usize {
        let held = |factor: &&Factor| factor.filling != Filling::Copies;
        EACH * self.call.factors.iter().filter(held).count()
    }

    /// The steps of a thread's row of the tile; or a table of the steps of all rows.
    fn rows(&self, g: &mut Grid, i: usize, corner: Value) -> Option<[Value; 3]> {
        let factor = &self.call.factors[i];
        let [_, row] = g.divided(g.thread, TILE);
        let at = g.b.addi(corner, row);
        let at = g.b.convert(Convert::Trunci, at, Kind::I32);
        match factor.filling {
            Filling::Copies => None,
            Filling::Rows => Some(factor.outer.at(g, at)),
            Filling::Terms => {
                let first = g.below(g.thread, TILE);
                g.when(first, |g| {
                    let steps = factor.outer.at(g, at);
                    put_entry(g, self.tables[i], row, steps);
                });
                None
            }
        }
    }

    /// Writes the tables of the terms of a round.
    fn write_terms(&self, g: &mut Grid, round: Value) {
        for (i, factor) in self.call.factors.iter().enumerate() {
            if factor.filling != Filling::Rows {
                continue;
            }
            let table = self.table(g, i, round);
            let first = g.below(g.thread, DEPTH);
            g.when(first, |g| {
                let start = g.times(round, DEPTH);
                let term = g.b.addi(start, g.thread);
                let term = g.b.convert(Convert::Trunci, term, Kind::I32);
                let steps = factor.terms.at(g, term);
                put_entry(g, table, g.thread, steps);
            });
        }
    }

    /// The table of a round's terms.
    fn table(&self, g: &mut Grid, i: usize, round: Value) -> Value {
        let [_, odd] = g.divided(round, 2);
        let past = g.times(odd, DEPTH * ENTRY);
        g.b.offset(self.tables[i], past, Kind::I8)
    }

    /// Begins to fill the tiles of a round; the elements that are still to be stored.
    fn load(
        &self,
        g: &mut Grid,
        corner: [Value; 2],
        rows: &[Option<[Value; 3]>; 2],
        round: Value,
    ) -> Loaded {
        let mut loaded = vec![];
        for (i, factor) in self.call.factors.iter().enumerate() {
            match factor.filling {
                Filling::Copies => self.copy(g, i, corner[i], round),
                Filling::Rows => {
                    let row = rows[i].expect("a thread should know its row");
                    loaded.extend(self.load_row(g, i, row, round));
                }
                Filling::Terms => loaded.extend(self.load_terms(g, i, round)),
            }
        }
        g.b.commit();
        loaded
    }

    /// Copies rows of a matrix, 16 bytes at a time.
    fn copy(&self, g: &mut Grid, i: usize, corner: Value, round: Value) {
        let factor = &self.call.factors[i];
        let chunks = DEPTH / CHUNK;
        let [row, chunk] = g.divided(g.thread, chunks);
        let start = g.times(round, DEPTH);
        let past = g.times(chunk, CHUNK);
        let term = g.b.addi(start, past);
        let term = g.b.convert(Convert::Trunci, term, Kind::I32);
        let [term, far, _] = factor.terms.at(g, term);
        let exists = {
            let one = g.b.int(1);
            g.b.compare(Predicate::Ult, far, one)
        };
        let to = self.to(g, i, round);
        let row = g.b.addi(corner, row);
        let x = g.operand(factor.operand);
        let (all, none) = (g.b.int(16), g.b.int(0));
        let each = u64::from(THREADS) / chunks;
        for past in (0..TILE).step_by(each as usize) {
            let row = g.plus(row, past as i64);
            let within = g.below(row, factor.outer.n());
            let inside = g.b.andi(exists, within);
            let bytes = g.b.select(inside, all, none);
            let row = g.b.convert(Convert::Trunci, row, Kind::I32);
            let [row, ..] = factor.outer.at(g, row);
            let at = g.b.addi(row, term);
            let zero = g.b.int(0);
            let at = g.b.select(inside, at, zero);
            let at = g.b.wide(at);
            let from = g.b.offset(x.pointer, at, Kind::BF16);
            let to = g.b.offset(to, past * pitch(false), Kind::I8);
            g.b.copy_async(to, from, 16, bytes, Cache::Second);
        }
    }

    /// Loads a half of the chunks of the thread's row.
    fn load_row(&self, g: &mut Grid, i: usize, row: [Value; 3], round: Value) -> Loaded {
        let table = self.table(g, i, round);
        let [half, _] = g.divided(g.thread, TILE);
        let first = g.times(half, CHUNK * ENTRY);
        let table = g.b.offset(table, first, Kind::I8);
        let terms = (0..DEPTH / CHUNK / HALVES)
            .flat_map(|chunk| (0..CHUNK).map(move |term| HALVES * chunk * CHUNK + term));
        let mut loaded = vec![];
        for term in terms {
            let steps = entry(g, table, term);
            loaded.push(self.element(g, i, row, steps));
        }
        loaded
    }

    /// Loads two terms of every eighth row.
    fn load_terms(&self, g: &mut Grid, i: usize, round: Value) -> Loaded {
        let factor = &self.call.factors[i];
        let (start, past) = (g.times(round, DEPTH), g.times(self.lane, 2));
        let term = g.b.addi(start, past);
        let terms = [0, 1].map(|second| {
            let term = g.plus(term, second);
            let term = g.b.convert(Convert::Trunci, term, Kind::I32);
            factor.terms.at(g, term)
        });
        let first = g.times(self.warp, ENTRY);
        let table = g.b.offset(self.tables[i], first, Kind::I8);
        let mut loaded = vec![];
        for row in (0..TILE).step_by(WARPS as usize) {
            let steps = entry(g, table, row);
            for term in terms {
                loaded.push(self.element(g, i, term, steps));
            }
        }
        loaded
    }

    /// The bits of the element where two walks lead together; zeros outside its image.
    fn element(&self, g: &mut Grid, i: usize, a: [Value; 3], b: [Value; 3]) -> Value {
        let factor = &self.call.factors[i];
        let [at, y, x] = std::array::from_fn(|j| g.b.addi(a[j], b[j]));
        let mut below = |at, n: u64| {
            let n = g.b.int(n as i64);
            g.b.compare(Predicate::Ult, at, n)
        };
        let (in_y, in_x) = (below(y, factor.limits[0]), below(x, factor.limits[1]));
        let inside = match factor.limits {
            [1, 1] => in_y,
            _ => g.b.andi(in_y, in_x),
        };
        let nothing = g.b.constant(0, Type::Scalar(Kind::I16));
        let bits = g.choose(inside, &[nothing], |g| {
            let x = g.operand(factor.operand);
            let at = g.b.wide(at);
            let from = g.b.offset(x.pointer, at, Kind::I16);
            vec![g.b.load(from, Type::Scalar(Kind::I16), 2)]
        });
        bits[0]
    }

    /// Where the thread's first elements of a round go.
    fn to(&self, g: &mut Grid, i: usize, round: Value) -> Value {
        let tile = self.tiles.of(g, i, round);
        g.b.offset(tile, self.own[i], Kind::I8)
    }

    /// Writes loaded elements to the tiles of their round.
    fn store(&self, g: &mut Grid, loaded: &[Value], round: Value) {
        let mut rest = loaded;
        for (i, factor) in self.call.factors.iter().enumerate() {
            if factor.filling == Filling::Copies {
                continue;
            }
            let (own, others) = rest.split_at(EACH);
            rest = others;
            let pairs: Vec<Value> = own
                .as_chunks::<2>()
                .0
                .iter()
                .map(|&pair| packed(g, pair))
                .collect();
            match factor.filling {
                Filling::Rows => self.store_row(g, i, &pairs, round),
                _ => {
                    let to = self.to(g, i, round);
                    for (n, &pair) in pairs.iter().enumerate() {
                        let to = g.b.offset(to, n as u64 * WARPS * pitch(false), Kind::I8);
                        g.b.store(pair, to, 4);
                    }
                }
            }
        }
    }

    fn store_row(&self, g: &mut Grid, i: usize, pairs: &[Value], round: Value) {
        let tile = self.tiles.of(g, i, round);
        for (n, pairs) in pairs.as_chunks::<4>().0.iter().enumerate() {
            // A chunk's number changes the same bits in every row.
            let bits = g.b.long(16 * HALVES * n as u64);
            let at = g.b.xori(self.own[i], bits);
            let to = g.b.offset(tile, at, Kind::I8);
            let chunk = vector(g, pairs);
            g.b.store(chunk, to, 16);
        }
    }

    /// Writes a thread's sums, to the result or to a part of the scratch.
    fn write(&self, g: &mut Grid, part: Value, corner: [Value; 2], sums: &[Value]) {
        let (to, first) = match self.call.to {
            To::Result(j) => (g.result(j), None),
            To::Parts(_) => {
                let n = self.call.places.iter().map(Walk::n).product();
                (g.scratch(0, DType::F32), Some(g.times(part, n)))
            }
        };
        let sizes = self.call.places.map(|walk| walk.n());
        let places = self.tiles.places(g, corner);
        for ([row, column], pair) in places.into_iter().zip(sums.as_chunks::<2>().0) {
            let within = g.below(row, sizes[0]);
            g.when(within, |g| {
                let row32 = g.b.convert(Convert::Trunci, row, Kind::I32);
                let [of_row, ..] = self.call.places[0].at(g, row32);
                let bias = self.call.bias.map(|operand| {
                    let b = g.operand(operand);
                    g.get(b, row)
                });
                for (i, &sum) in pair.iter().enumerate() {
                    let column = g.plus(column, i as i64);
                    let within = g.below(column, sizes[1]);
                    g.when(within, |g| {
                        let column = g.b.convert(Convert::Trunci, column, Kind::I32);
                        let [of_column, ..] = self.call.places[1].at(g, column);
                        let at = g.b.addi(of_row, of_column);
                        let at = g.b.wide(at);
                        let at = first.map_or(at, |first| g.b.addi(first, at));
                        let sum = bias.map_or(sum, |bias| g.add(sum, bias));
                        g.put(to, at, sum);
                    });
                }
            });
        }
    }
}

/// Two elements in a word, the first in the lower half.
fn packed(g: &mut Grid, pair: [Value; 2]) -> Value {
    let [low, high] = pair.map(|x| g.b.convert(Convert::Extui, x, Kind::I32));
    let places = g.b.int(16);
    let high = g.b.arith(Arith::Shli, &[high, places]);
    g.b.ori(low, high)
}

/// Four words together.
fn vector(g: &mut Grid, words: &[Value; 4]) -> Value {
    let mut all = g.b.undef(Type::Vector(4, Kind::I32));
    for (i, &word) in words.iter().enumerate() {
        all = g.b.insert(word, all, i as u64);
    }
    all
}

/// Writes an entry of a table.
fn put_entry(g: &mut Grid, table: Value, at: Value, [offset, y, x]: [Value; 3]) {
    let nothing = g.b.int(0);
    let all = vector(g, &[offset, y, x, nothing]);
    let past = g.times(at, ENTRY);
    let to = g.b.offset(table, past, Kind::I8);
    g.b.store(all, to, 16);
}

/// An entry of a table.
fn entry(g: &mut Grid, table: Value, at: u64) -> [Value; 3] {
    let from = g.b.offset(table, at * ENTRY, Kind::I8);
    let all = g.b.load(from, Type::Vector(4, Kind::I32), 16);
    [0, 1, 2].map(|i| g.b.extract(all, i))
}
