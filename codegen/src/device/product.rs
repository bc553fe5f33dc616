//! Products of matrices. Those of bf16 are computed by tensor cores where sizes permit it, and
//! those of f32 if they may be rounded to TF32: [`super::tensor`]. Otherwise a block of threads
//! computes a tile of 64 × 64, each thread 4 × 4 of it. Tiles of the factors pass through shared
//! memory, 16 deep.
//!
//! A sum is a chain of fused multiply-adds that is cut every [`artifact::PRODUCT_DEPTH`] terms, as
//! in the plain kernel. The parts are added one after the other to the addend, or to nothing. So on
//! processors with fused multiply-adds both have the same bits, and a sum may be continued by
//! another product.

use super::Kernel;
use super::grid::{Grid, Tensor};
use super::groups::{Grouped, Over, Place, Size};
use super::moves::broadcast;
use super::tensor;
use crate::kernels::wide;
use crate::mlir::{Emit, Kind, Type, Value};
use ir::op::attrs::{GroupedProduct, Product};
use ir::op::groups::Groups;
use ir::{DType, TensorType};

/// Rows and columns of a tile, and its depth.
const TILE: u64 = 64;
const DEPTH: u64 = 16;
/// Rows and columns of a thread's part of a tile.
const EACH: u64 = 4;
/// A thread for each part of a tile.
const THREADS: u64 = (TILE / EACH) * (TILE / EACH);
/// Numbers from one row of a factor's tile to the next: not all in one bank of shared memory.
const PITCH: u64 = TILE + 4;
/// Steps until sums are cut.
const STEPS: u64 = artifact::PRODUCT_DEPTH as u64 / DEPTH;

/// A factor: the position of element (outer, depth) of a matrix. `outer` is a row of the left
/// factor or a column of the right one.
#[derive(Clone, Copy)]
pub(super) struct Factor {
    pub(super) operand: usize,
    pub(super) outer: u64,
    /// The strides along both.
    pub(super) steps: [u64; 2],
}

pub(super) struct Sizes {
    pub(super) batch: u64,
    pub(super) m: u64,
    pub(super) k: u64,
    pub(super) n: u64,
    pub(super) left: Factor,
    pub(super) right: Factor,
    /// The operand that is added, with its strides along the result's dimensions.
    pub(super) addend: Option<(usize, Vec<i64>)>,
    /// What is in groups, if anything is.
    pub(super) grouped: Option<Grouped>,
    /// The type of sums.
    sums: DType,
}

impl Sizes {
    /// The factors are operands `first` and `first + 1`.
    fn new(k: &Kernel<'_>, a: &Product, first: usize, addend: Option<usize>) -> Sizes {
        let last2 = |ty: &TensorType| [ty.shape()[ty.rank() - 2], ty.shape()[ty.rank() - 1]];
        let (x, w) = (last2(&k.operands[first]), last2(&k.operands[first + 1]));
        let [m, n] = last2(k.y());
        let depth = if a.ta { x[0] } else { x[1] };
        Sizes {
            batch: k.y().shape()[..k.y().rank() - 2].iter().product(),
            m,
            k: depth,
            n,
            left: Factor {
                operand: first,
                outer: m,
                steps: if a.ta { [1, x[1]] } else { [x[1], 1] },
            },
            right: Factor {
                operand: first + 1,
                outer: n,
                steps: if a.tb { [w[1], 1] } else { [1, w[1]] },
            },
            addend: addend.map(|i| (i, broadcast(k.operands[i].shape(), k.y().shape()))),
            grouped: None,
            sums: sums(k.y().dtype()),
        }
    }

    /// The number of rows of tiles of a matrix of the result.
    pub(super) fn rows(&self, tile: u64) -> u64 {
        match self.grouped {
            Some(Grouped {
                over: Over::Rows,
                groups,
            }) => groups.tiles(tile),
            _ => self.m.div_ceil(tile),
        }
    }

    /// What a row of tiles of a matrix of the result computes.
    pub(super) fn place(&self, g: &mut Grid, [batch, row]: [Value; 2], tile: u64) -> Place {
        if let Some(grouped) = &self.grouped {
            return grouped.place(g, [batch, row], [self.m, self.k], tile);
        }
        Place {
            matrices: [batch; 3],
            top: g.times(row, tile),
            rows: Size::Known(self.m),
            first: None,
            terms: Size::Known(self.k),
        }
    }

    /// Adds the phase that finds the groups, if there are any.
    pub(super) fn find_groups(&self, k: &mut Kernel<'_>, tile: u64) {
        if let Some(grouped) = &self.grouped {
            k.scratch_bytes = grouped.scratch_bytes();
            grouped.write(k, tile);
        }
    }
}

/// The type of sums of elements of a type.
fn sums(dtype: DType) -> DType {
    match wide(dtype) {
        Kind::F64 => DType::F64,
        Kind::I64 => DType::I64,
        _ => DType::F32,
    }
}

pub(super) fn matmul(k: &mut Kernel<'_>, a: &Product) {
    product(k, &Sizes::new(k, a, 0, None));
}

pub(super) fn addmm(k: &mut Kernel<'_>, a: &Product) {
    product(k, &Sizes::new(k, a, 1, Some(0)));
}

pub(super) fn matmul_sum(k: &mut Kernel<'_>, a: &Product) {
    let before = (k.operands.len() == 3).then_some(2);
    product(k, &Sizes::new(k, a, 0, before));
}

/// Each row times the matrix of its group.
pub(super) fn grouped_matmul(k: &mut Kernel<'_>, a: &GroupedProduct) {
    let (rows, depth) = (k.x().shape()[0], k.x().shape()[1]);
    let n = k.y().shape()[1];
    let s = Sizes {
        batch: 1,
        m: rows,
        k: depth,
        n,
        left: Factor {
            operand: 0,
            outer: rows,
            steps: [depth, 1],
        },
        right: Factor {
            operand: 1,
            outer: n,
            steps: if a.tb { [depth, 1] } else { [1, n] },
        },
        addend: None,
        grouped: Some(grouped(k, Over::Rows)),
        sums: sums(k.y().dtype()),
    };
    product(k, &s);
}

/// The product of the transposed rows of each group and its other rows.
pub(super) fn grouped_outer(k: &mut Kernel<'_>) {
    let (rows, m, n) = (k.x().shape()[0], k.y().shape()[1], k.y().shape()[2]);
    let side = |operand, outer| Factor {
        operand,
        outer,
        steps: [1, outer],
    };
    let s = Sizes {
        batch: k.y().shape()[0],
        m,
        k: rows,
        n,
        left: side(0, m),
        right: side(1, n),
        addend: None,
        grouped: Some(grouped(k, Over::Terms)),
        sums: sums(k.y().dtype()),
    };
    product(k, &s);
}

fn grouped(k: &Kernel<'_>, over: Over) -> Grouped {
    let groups = Groups {
        rows: k.x().shape()[0],
        groups: k.operands[2].numel(),
    };
    Grouped { over, groups }
}

fn product(k: &mut Kernel<'_>, s: &Sizes) {
    if let Some(numbers) = tensor::fits(k, s) {
        return tensor::product(k, s, numbers);
    }
    s.find_groups(k, TILE);
    let rows = s.rows(TILE);
    let parts = s.batch * rows * s.n.div_ceil(TILE);
    k.phase(THREADS as u32, parts, |g| {
        g.parts(parts, |g, part| {
            let [rest, left] = g.divided(part, s.n.div_ceil(TILE));
            let at = g.divided(rest, rows);
            let tile = Tile {
                s,
                place: s.place(g, at, TILE),
                left: g.times(left, TILE),
                rooms: [(); 2].map(|()| g.shared(DEPTH * PITCH, s.sums)),
            };
            let sums = tile.sums(g);
            tile.write(g, &sums);
        });
    });
}

/// A tile of the result.
struct Tile<'a> {
    s: &'a Sizes,
    place: Place,
    left: Value,
    /// Tiles of the factors: row `l` has the numbers of depth `l`.
    rooms: [Tensor; 2],
}

impl Tile<'_> {
    /// The sums of a thread's part.
    fn sums(&self, g: &mut Grid) -> Vec<Value> {
        let zero = zero(g, self.s.sums);
        let nothing = vec![zero; (EACH * EACH) as usize];
        let steps = self.place.steps(g, DEPTH);
        if let Size::Known(steps @ ..=STEPS) = steps {
            let sums = g.count(steps, &nothing, |g, step, sums| self.step(g, step, sums));
            let starts = self.starts(g);
            let pairs = starts.iter().zip(&sums);
            return pairs.map(|(&start, &sum)| g.add(start, sum)).collect();
        }
        let starts = self.starts(g);
        let cuts = self.cuts(g, steps);
        g.repeat(cuts, &starts, |g, cut, totals| {
            let first = g.times(cut, STEPS);
            let (end, all) = (g.plus(first, STEPS as i64), steps.value(g));
            let (end, one) = (g.b.minui(end, all), g.b.long(1));
            let sums = g.repeat([first, end, one], &nothing, |g, step, sums| {
                self.step(g, step, sums)
            });
            let pairs = totals.iter().zip(&sums);
            pairs.map(|(&total, &sum)| g.add(total, sum)).collect()
        })
    }

    /// The bounds of a loop over the parts of sums of so many steps.
    fn cuts(&self, g: &mut Grid, steps: Size) -> [Value; 3] {
        let zero = g.b.long(0);
        let end = match steps {
            Size::Known(steps) => g.b.long(steps.div_ceil(STEPS)),
            Size::Found(steps) => {
                // Of no terms there is one part, too: it makes the sum 0, and not -0.
                let (one, more) = (g.b.long(1), g.plus(steps, STEPS as i64 - 1));
                let [cuts, _] = g.divided(more, STEPS);
                g.b.maxsi(cuts, one)
            }
        };
        [zero, end, g.b.long(1)]
    }

    /// Adds the products of [`DEPTH`] terms.
    fn step(&self, g: &mut Grid, step: Value, sums: &[Value]) -> Vec<Value> {
        let depth = g.times(step, DEPTH);
        let depth = self.place.term(g, depth);
        self.fetch(g, 0, [self.place.top, depth]);
        self.fetch(g, 1, [self.left, depth]);
        g.b.barrier();
        let [row, column] = g.divided(g.thread, TILE / EACH);
        let [row, column] = [row, column].map(|x| g.times(x, EACH));
        const AT_ONCE: u64 = 4;
        let sums = g.count(DEPTH / AT_ONCE, sums, |g, some, sums| {
            let first = g.times(some, AT_ONCE * PITCH);
            let mut sums = sums.to_vec();
            for i in 0..AT_ONCE {
                let at = g.plus(first, (i * PITCH) as i64);
                let xs = self.four(g, self.rooms[0], at, row);
                let ws = self.four(g, self.rooms[1], at, column);
                for (sum, (x, w)) in sums.iter_mut().zip(pairs(&xs, &ws)) {
                    *sum = if self.s.sums == DType::I64 {
                        let product = g.mul(x, w);
                        g.add(*sum, product)
                    } else {
                        g.b.fma(x, w, *sum)
                    };
                }
            }
            sums
        });
        g.b.barrier();
        sums
    }

    /// Fills the tile of factor `i` from row or column `first` and from a depth on; zeros lie
    /// beyond the matrix.
    fn fetch(&self, g: &mut Grid, i: usize, [first, depth]: [Value; 2]) {
        let (room, place) = (self.rooms[i], &self.place);
        let (factor, end) = match i {
            0 => (self.s.left, place.rows),
            _ => (self.s.right, Size::Known(self.s.n)),
        };
        let matrix = g.times(place.matrices[i], factor.outer * self.s.k);
        let x = g.operand(factor.operand);
        for i in 0..TILE * DEPTH / THREADS {
            let number = g.plus(g.thread, (i * THREADS) as i64);
            // Neighbouring threads fetch neighbouring elements.
            let [outer, deep] = if factor.steps[0] == 1 {
                let [deep, outer] = g.divided(number, TILE);
                [outer, deep]
            } else {
                g.divided(number, DEPTH)
            };
            let (row, column) = (g.b.addi(first, outer), g.b.addi(depth, deep));
            let [a, b] = [(end, row), (place.terms, column)].map(|(end, at)| end.is_above(g, at));
            let inside = g.b.andi(a, b);
            let nothing = zero(g, self.s.sums);
            let number = g.choose(inside, &[nothing], |g| {
                let from = g.times(row, factor.steps[0]);
                let past = g.times(column, factor.steps[1]);
                let from = g.b.addi(from, past);
                let from = g.b.addi(matrix, from);
                vec![g.get(x, from)]
            });
            let to = g.times(deep, PITCH);
            let to = g.b.addi(to, outer);
            g.put(room, to, number[0]);
        }
    }

    /// Four numbers of a tile's row.
    fn four(&self, g: &mut Grid, room: Tensor, row: Value, at: Value) -> Vec<Value> {
        let kind = wide(self.s.sums);
        let from = g.b.addi(row, at);
        let pointer = g.b.offset(room.pointer, from, kind);
        let all = g.b.load(pointer, Type::Vector(EACH as u32, kind), 16);
        (0..EACH).map(|i| g.b.extract(all, i)).collect()
    }

    /// What the sums of a thread's part are added to: the addend, or the number that changes none.
    fn starts(&self, g: &mut Grid) -> Vec<Value> {
        let none = match self.s.sums {
            DType::I64 => zero(g, self.s.sums),
            sums => g.float(-0.0, wide(sums)),
        };
        let Some((operand, steps)) = &self.s.addend else {
            return vec![none; (EACH * EACH) as usize];
        };
        let mut starts = vec![];
        for (at, inside) in self.places(g) {
            let start = g.choose(inside, &[none], |g| {
                let from = g.offset(&at[3 - steps.len()..], steps, 0);
                let c = g.operand(*operand);
                vec![g.get(c, from)]
            });
            starts.push(start[0]);
        }
        starts
    }

    /// Writes a thread's part of the result.
    fn write(&self, g: &mut Grid, sums: &[Value]) {
        let steps = [self.s.m * self.s.n, self.s.n, 1].map(|step| step as i64);
        for ((at, inside), &sum) in self.places(g).into_iter().zip(sums) {
            g.when(inside, |g| {
                let (to, y) = (g.offset(&at, &steps, 0), g.result(0));
                g.put(y, to, sum);
            });
        }
    }

    /// The elements of a thread's part: batch, row and column of each, and whether it exists.
    fn places(&self, g: &mut Grid) -> Vec<([Value; 3], Value)> {
        let s = self.s;
        let [row, column] = g.divided(g.thread, TILE / EACH);
        let [row, column] = [(row, self.place.top), (column, self.left)].map(|(at, first)| {
            let past = g.times(at, EACH);
            g.b.addi(first, past)
        });
        let mut places = vec![];
        for number in 0..EACH * EACH {
            let row = g.plus(row, (number / EACH) as i64);
            let column = g.plus(column, (number % EACH) as i64);
            let [a, b] = [self.place.rows.is_above(g, row), g.below(column, s.n)];
            let inside = g.b.andi(a, b);
            places.push(([self.place.matrices[2], row, column], inside));
        }
        places
    }
}

/// Every pair of two lists, row by row.
fn pairs(xs: &[Value], ws: &[Value]) -> Vec<(Value, Value)> {
    let row = |&x: &Value| ws.iter().map(move |&w| (x, w));
    xs.iter().flat_map(row).collect()
}

fn zero(g: &mut Grid, dtype: DType) -> Value {
    g.b.constant(0, Type::Scalar(wide(dtype)))
}
