//! The negative log likelihood loss, and the norm over gradients.

use super::Kernel;
use super::grid::{Grid, THREADS, Tensor, Unit, kind_of};
use crate::mlir::{Arith, Emit, Kind, Predicate, Type, Value};
use ir::DType;
use ir::op::attrs::{ClipScale, NllLoss, NllSum};
use ir::op::square_parts;

/// The terms of some rows: -logp[i, target[i]], and whether the row counts.
struct Terms {
    rows: u64,
    classes: u64,
    ignore: i64,
}

impl Terms {
    fn new(k: &Kernel<'_>, ignore: i64) -> Terms {
        Terms {
            rows: k.x().shape()[0],
            classes: k.x().shape()[1],
            ignore,
        }
    }

    /// A row's term as f64, 0 if it does not count, and 1 or 0.
    fn of(&self, g: &mut Grid, row: Value) -> [Value; 2] {
        let (logp, targets) = (g.operand(0), g.operand(1));
        let target = g.get(targets, row);
        let ignored = g.b.long(self.ignore as u64);
        let counts = g.b.compare(Predicate::Ne, target, ignored);
        let [zero, one, nan] = [0.0, 1.0, f64::NAN].map(|x| g.float(x, Kind::F64));
        let inside = g.below(target, self.classes);
        let term = g.choose(inside, &[nan], |g| {
            let first = g.times(row, self.classes);
            let at = g.b.addi(first, target);
            let x = g.get(logp, at);
            let x = g.double(x);
            vec![g.b.arith(Arith::Negf, &[x])]
        });
        [
            g.b.select(counts, term[0], zero),
            g.b.select(counts, one, zero),
        ]
    }
}

/// The loss of each row and the number of rows that count; or the sum, computed by one block.
pub(super) fn nll_loss(k: &mut Kernel<'_>, a: &NllLoss) {
    let (terms, dtype) = (Terms::new(k, a.ignore), k.y().dtype());
    if a.reduction == NllLoss::NONE {
        k.elements(terms.rows, |g, row| {
            let [term, _] = terms.of(g, row);
            let (loss, term) = (g.result(0), g.rounded(term, dtype));
            g.put(loss, row, term);
        });
    }
    k.phase(THREADS, 1, |g| {
        g.parts(1, |g, _| {
            let start = g.float(0.0, Kind::F64);
            let [sum, counted] = in_order(g, &terms, start);
            g.once(|g| {
                let zero = g.b.long(0);
                let (loss, weight) = (g.result(0), g.result(1));
                let result = match a.reduction {
                    NllLoss::MEAN => g.b.divf(sum, counted),
                    _ => sum,
                };
                if a.reduction != NllLoss::NONE {
                    let result = g.rounded(result, dtype);
                    g.put(loss, zero, result);
                }
                let counted = g.rounded(counted, dtype);
                g.put(weight, zero, counted);
            });
        });
    });
}

/// The sum of the terms and the number of terms that count, in the order of the rows, like the
/// plain kernel. The threads fetch the terms together, and each thread adds all of them.
fn in_order(g: &mut Grid, terms: &Terms, start: Value) -> [Value; 2] {
    let n = u64::from(THREADS);
    let room = [(); 2].map(|()| g.shared(n, DType::F64));
    let zero = g.float(0.0, Kind::F64);
    let sums = g.count(terms.rows.div_ceil(n), &[start, zero], |g, round, sums| {
        let first = g.times(round, n);
        let row = g.b.addi(first, g.thread);
        let inside = g.below(row, terms.rows);
        let own = g.choose(inside, &[zero, zero], |g| terms.of(g, row).to_vec());
        for (room, own) in room.into_iter().zip(own) {
            g.put(room, g.thread, own);
        }
        g.b.barrier();
        let sums = g.count(n, sums, |g, i, sums| {
            let one = |g: &mut Grid, room: Tensor, sum| {
                let x = g.get(room, i);
                g.add(sum, x)
            };
            vec![one(g, room[0], sums[0]), one(g, room[1], sums[1])]
        });
        g.b.barrier();
        sums
    });
    [sums[0], sums[1]]
}

/// The sum of the rows' losses, starting from operand 2 if it exists.
pub(super) fn nll_sum(k: &mut Kernel<'_>, a: &NllSum) {
    let terms = Terms::new(k, a.ignore);
    let continues = k.operands.len() == 3;
    k.phase(THREADS, 1, |g| {
        g.parts(1, |g, _| {
            let zero = g.b.long(0);
            let start = if continues {
                let before = g.operand(2);
                g.get(before, zero)
            } else {
                g.float(0.0, Kind::F64)
            };
            let [sum, _] = in_order(g, &terms, start);
            let loss = g.result(0);
            g.once(|g| g.put(loss, zero, sum));
        });
    });
}

/// The sum of squares in f64: of each part by a block, then of the parts.
pub(super) fn sum_squares(k: &mut Kernel<'_>) {
    /// The number of loads that a block's threads can have in flight.
    const MANY: u32 = 512;
    let (n, dtype) = (k.x().numel(), k.x().dtype());
    let unit = Unit::dividing([k.x().bytes()]);
    let each = unit.0 / dtype.bytes();
    let units = n / each;
    let parts = square_parts(n);
    let in_part = units.div_ceil(parts);
    k.scratch_bytes = match parts {
        1 => 0,
        _ => (8 * parts).next_multiple_of(64),
    };
    k.phase(MANY, parts, |g| {
        let sums = match parts {
            1 => g.result(0),
            _ => g.scratch(0, DType::F64),
        };
        g.parts(parts, |g, part| {
            let x = g.operand(0);
            let first = g.times(part, in_part);
            let (end, all) = (g.plus(first, in_part as i64), g.b.long(units));
            let (end, step) = (g.b.minui(end, all), g.b.long(MANY.into()));
            let from = g.b.addi(first, g.thread);
            let start = g.float(0.0, Kind::F64);
            let sum = g.repeat([from, end, step], &[start], |g, i, sum| {
                let ty = Type::of(kind_of(dtype), each);
                let pointer = g.b.offset_by(x.pointer, i.into(), unit.ty());
                let all = g.b.load(pointer, ty, unit.0);
                let mut sum = sum[0];
                for at in 0..each {
                    let one = if each == 1 { all } else { g.b.extract(all, at) };
                    let one = g.widened(one, dtype);
                    let one = g.double(one);
                    let square = g.mul(one, one);
                    sum = g.add(sum, square);
                }
                vec![sum]
            });
            let room = g.shared(MANY.into(), DType::F64);
            let total = g.total(sum[0], room);
            g.once(|g| g.put(sums, part, total));
        });
    });
    if parts == 1 {
        return;
    }
    k.phase(MANY, 1, |g| {
        g.parts(1, |g, _| {
            let sums = g.scratch(0, DType::F64);
            let start = g.float(0.0, Kind::F64);
            let sum = g.share(parts, &[start], |g, part, sum| {
                let one = g.get(sums, part);
                vec![g.add(sum[0], one)]
            });
            let room = g.shared(MANY.into(), DType::F64);
            let total = g.total(sum[0], room);
            let (y, zero) = (g.result(0), g.b.long(0));
            g.once(|g| g.put(y, zero, total));
        });
    });
}

/// The factor of the gradients: `min(1, max_norm / (norm + 1e-6))`; NaN stays.
pub(super) fn clip_scale(k: &mut Kernel<'_>, a: &ClipScale) {
    let n = k.operands.len();
    k.elements(1, |g, i| {
        let mut sum = g.float(0.0, Kind::F64);
        for operand in 0..n {
            let x = g.operand(operand);
            let x = g.get(x, i);
            sum = g.add(sum, x);
        }
        let [most, little, one] = [a.max_norm, 1e-6, 1.0].map(|x| g.float(x, Kind::F64));
        let norm = g.b.arith(Arith::Sqrt, &[sum]);
        let norm = g.add(norm, little);
        let scale = g.b.divf(most, norm);
        let above = g.less(one, scale);
        let scale = g.b.select(above, one, scale);
        let (y, scale) = (g.result(0), g.rounded(scale, a.dtype));
        g.put(y, i, scale);
    });
}
