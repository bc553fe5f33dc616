//! Reductions over any dimensions, without scratch: a block of threads has some results. Sums of
//! floating-point numbers are f64.

use super::Kernel;
use super::grid::Grid;
use super::moves::strides;
use crate::kernels::wide;
use crate::mlir::{Arith, Convert, Emit, Kind, Predicate, Type, Value};
use ir::DType;
use ir::op::attrs::Reduction;

/// How numbers are combined.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Fold {
    Sum,
    Mean,
    Largest,
    Smallest,
    Any,
}

/// The number of neighbouring results of a block, if their elements are neighbours too.
const COLUMNS: u64 = 32;

/// Kept or reduced dimensions: sizes and strides.
#[derive(Default)]
struct Dimensions {
    sizes: Vec<u64>,
    steps: Vec<i64>,
}

impl Dimensions {
    fn push(&mut self, size: u64, step: i64) {
        self.sizes.push(size);
        self.steps.push(step);
    }

    fn points(&self) -> u64 {
        self.sizes.iter().product()
    }

    fn offset(&self, g: &mut Grid, point: Value) -> Value {
        let at = g.coordinates(point, &self.sizes);
        g.offset(&at, &self.steps, 0)
    }
}

/// A reduction of operand 0 to result 0.
struct Plan {
    fold: Fold,
    kept: Dimensions,
    reduced: Dimensions,
    /// The type in which numbers are combined.
    dtype: DType,
}

pub(super) fn reduce(k: &mut Kernel<'_>, a: &Reduction, fold: Fold) {
    let (mut kept, mut reduced) = (Dimensions::default(), Dimensions::default());
    let steps = strides(k.x().shape());
    for (d, &size) in k.x().shape().iter().enumerate() {
        if a.dims.contains(&(d as i64)) {
            reduced.push(size, steps[d]);
        } else {
            kept.push(size, steps[d]);
        }
    }
    let kind = wide(k.x().dtype());
    let dtype = match fold {
        Fold::Sum | Fold::Mean if kind != Kind::I64 => DType::F64,
        Fold::Any => DType::I64,
        _ if kind == Kind::F32 => DType::F32,
        _ if kind == Kind::F64 => DType::F64,
        _ => DType::I64,
    };
    let beside = kept.steps.last() == Some(&1) && kept.points() > 1;
    let plan = Plan {
        fold,
        kept,
        reduced,
        dtype,
    };
    plan.write(k, if beside { COLUMNS } else { 1 });
}

impl Plan {
    /// Adds a phase in which a block has `columns` results. Its threads share their elements.
    fn write(&self, k: &mut Kernel<'_>, columns: u64) {
        let (results, points) = (self.kept.points(), self.reduced.points());
        let threads = if points > 256 { 1024 } else { 256 };
        let parts = results.div_ceil(columns);
        k.phase(threads, parts, |g| {
            g.parts(parts, |g, part| {
                let room = g.shared(threads.into(), self.dtype);
                let [row, column] = g.divided(g.thread, columns);
                let first = g.times(part, columns);
                let result = g.b.addi(first, column);
                let inside = g.below(result, results);
                let start = self.start(g);
                let own = g.choose(inside, &[start], |g| {
                    vec![self.own(g, result, row, u64::from(threads) / columns)]
                });
                let all = g.fold(own[0], room, columns, |g, a, b| self.combine(g, a, b));
                let zero = g.b.long(0);
                let leads = g.equal(row, zero);
                let writes = g.b.andi(leads, inside);
                g.when(writes, |g| self.finish(g, result, all));
            });
        });
    }

    /// A thread's part of a result: every `each`th of its elements, combined.
    fn own(&self, g: &mut Grid, result: Value, first: Value, each: u64) -> Value {
        let from = self.kept.offset(g, result);
        let start = self.start(g);
        let bounds = [first, g.b.long(self.reduced.points()), g.b.long(each)];
        let all = g.repeat(bounds, &[start], |g, point, so_far| {
            let past = self.reduced.offset(g, point);
            let at = g.b.addi(from, past);
            let x = g.operand(0);
            let x = g.get(x, at);
            let x = self.lifted(g, x);
            vec![self.combine(g, so_far[0], x)]
        });
        all[0]
    }

    fn lifted(&self, g: &mut Grid, x: Value) -> Value {
        match self.fold {
            Fold::Sum | Fold::Mean if self.dtype == DType::F64 => g.double(x),
            Fold::Sum | Fold::Mean | Fold::Largest | Fold::Smallest => x,
            Fold::Any => {
                let zero = g.b.constant(0, x.ty());
                let by = match x.ty().kind() {
                    Some(Kind::I64) => Predicate::Ne,
                    _ => Predicate::Une,
                };
                let bit = g.b.compare(by, x, zero);
                g.b.convert(Convert::Extui, bit, Kind::I64)
            }
        }
    }

    /// The neutral number of the combination.
    fn start(&self, g: &mut Grid) -> Value {
        let kind = wide(self.dtype);
        let ty = Type::Scalar(kind);
        match (self.fold, kind) {
            (Fold::Sum | Fold::Mean | Fold::Any, _) => g.b.constant(0, ty),
            (Fold::Largest, Kind::I64) => g.b.long(i64::MIN as u64),
            (Fold::Smallest, Kind::I64) => g.b.long(i64::MAX as u64),
            (Fold::Largest, _) => g.float(f64::NEG_INFINITY, kind),
            (Fold::Smallest, _) => g.float(f64::INFINITY, kind),
        }
    }

    /// NaN stays.
    fn combine(&self, g: &mut Grid, a: Value, b: Value) -> Value {
        let is_integer = self.dtype == DType::I64;
        match self.fold {
            Fold::Sum | Fold::Mean => g.add(a, b),
            Fold::Any => g.b.ori(a, b),
            Fold::Largest if is_integer => g.b.maxsi(a, b),
            Fold::Smallest if is_integer => g.b.minsi(a, b),
            Fold::Largest => g.b.arith(Arith::Maximumf, &[a, b]),
            Fold::Smallest => {
                let [a, b] = [a, b].map(|x| g.b.arith(Arith::Negf, &[x]));
                let most = g.b.arith(Arith::Maximumf, &[a, b]);
                g.b.arith(Arith::Negf, &[most])
            }
        }
    }

    /// Writes a result.
    fn finish(&self, g: &mut Grid, result: Value, mut x: Value) {
        let y = g.result(0);
        if self.fold == Fold::Mean {
            let n = g.float(self.reduced.points() as f64, Kind::F64);
            x = g.b.divf(x, n);
        }
        if matches!(self.fold, Fold::Sum | Fold::Mean) && self.dtype == DType::F64 {
            x = g.rounded(x, y.dtype);
        }
        g.put(y, result, x);
    }
}
