//! The functions of a kernel: the rows of each part, and the second phase, which adds up the parts'
//! sums over rows.

use super::dag::{Dag, Fold, Id, Span};
use super::emit::{Blocks, Elements, Emitter, Function, Threads};
use super::lower::Known;
use super::passes::Buffer;
use super::rows::{BLOCK, Columns, Piece};
use crate::mlir::{Convert, Emit, Kind, Predicate, Value};
use ir::DType;

impl<M: Threads> Emitter<'_, M> {
    /// The first phase: all rows, or all elements. For sums over rows, there are `sum_parts` parts
    /// of `rows_each` rows.
    pub(super) fn main(&mut self, rows_each: u64, sum_parts: u64) -> Function {
        self.stack_buffers();
        let columns = self.plan.space.columns();
        let folds = self.passes.all.iter().any(|pass| !pass.folds.is_empty());
        let parts = if !self.sums.is_empty() {
            self.sums_of_rows(rows_each, sum_parts, folds)
        } else if !folds && columns > 2 * self.machine.part() {
            self.pieces_of_rows()
        } else {
            self.whole_rows(folds)
        };
        self.function(parts)
    }

    /// A part has some rows, and also sums their columns. Rows without folds are cut into pieces,
    /// if threads keep their sums. Returns the number of parts.
    fn sums_of_rows(&mut self, rows_each: u64, sum_parts: u64, folds: bool) -> u64 {
        let (rows, columns) = (self.plan.space.rows(), self.plan.space.columns());
        let slots = self.machine.slots();
        let size = slots.map(|slots| slots * self.lanes * self.machine.threads());
        let pieces = size
            .filter(|_| !folds)
            .map_or(1, |size| columns.div_ceil(size));
        let bounds = M::parts(self, sum_parts * pieces);
        self.repeat(bounds, &[], |e, number, _| {
            let (mut part, mut range) = (number, Columns::all(columns, e.lanes));
            if let Some(size) = size.filter(|_| pieces > 1) {
                let n = e.index(pieces);
                part = e.b.divui(number, n);
                let piece = e.b.remui(number, n);
                range = e.columns_of(piece, size);
            }
            for (&j, sums) in e.sums {
                let scratch = e.arguments[e.arguments.len() - 1];
                let [offset, stride] = [sums.offset, columns].map(|i| e.index(i));
                let base = e.b.outside(0, |b| b.offset(scratch, offset, Kind::I8));
                let at = e.b.muli(part, stride);
                let partial = e.b.offset(base, at, sums.kind);
                e.partial.insert(j, partial);
                e.clear(j, &range, slots.is_some());
            }
            let [each, all, one] = [rows_each, rows, 1].map(|i| e.index(i));
            let from = e.b.muli(part, each);
            let to = e.b.addi(from, each);
            let to = e.b.minui(to, all);
            // The sums that threads keep.
            let held: Vec<(usize, u64)> = (e.sums.keys())
                .flat_map(|&j| (0..slots.unwrap_or(0)).map(move |slot| (j, slot)))
                .collect();
            let starts: Vec<Value> = held
                .iter()
                .map(|(j, _)| e.constant(0, e.sums[j].kind, e.lanes))
                .collect();
            let totals = e.repeat([from, to, one], &starts, |e, row, totals| {
                e.held.sums = held.iter().copied().zip(totals.iter().copied()).collect();
                e.row(row, &range);
                held.iter().map(|key| e.held.sums[key]).collect()
            });
            for (&(j, slot), total) in held.iter().zip(totals) {
                let [at, end] = e.slot(&range, slot);
                let inside = e.b.compare(Predicate::Ult, at, end);
                let sums = e.partial(j);
                e.when(inside, |e| e.store(total, sums, at));
            }
            vec![]
        });
        sum_parts * pieces
    }

    /// The columns of a piece of `size` columns.
    fn columns_of(&mut self, piece: Value, size: u64) -> Columns {
        let columns = self.plan.space.columns();
        let whole = columns / self.lanes * self.lanes;
        let [each, all, vectors] = [size, columns, whole].map(|i| self.index(i));
        let from = self.b.muli(piece, each);
        let to = self.b.addi(from, each);
        let to = self.b.minui(to, all);
        let vectors = self.b.minui(to, vectors);
        Columns {
            whole: size.min(whole),
            rest: whole != columns,
            piece: Some(Piece { from, vectors, to }),
        }
    }

    /// Rows are long, so a part is a piece of one. Returns the number of parts.
    fn pieces_of_rows(&mut self) -> u64 {
        let (rows, columns) = (self.plan.space.rows(), self.plan.space.columns());
        let each = self.machine.part();
        let pieces = columns.div_ceil(each);
        let parts = M::parts(self, rows * pieces);
        self.repeat(parts, &[], |e, part, _| {
            let pieces = e.index(pieces);
            let (row, piece) = if rows == 1 {
                (e.index(0), part)
            } else {
                (e.b.divui(part, pieces), e.b.remui(part, pieces))
            };
            let range = e.columns_of(piece, each);
            e.row(row, &range);
            vec![]
        });
        rows * pieces
    }

    /// A part has some rows. Returns the number of parts.
    fn whole_rows(&mut self, folds: bool) -> u64 {
        let (rows, columns) = (self.plan.space.rows(), self.plan.space.columns());
        // A row with sums keeps all threads of a block busy, and short ones do so together.
        let together = self.machine.rows_at_once();
        let each = if together > 1 || folds && !M::PARTS_FOLLOW {
            together
        } else {
            (self.machine.part() / columns.max(1)).max(1)
        };
        let n = rows.div_ceil(each);
        let [each, all] = [each, rows].map(|i| self.index(i));
        let columns = Columns::all(columns, self.lanes);
        let [first, end, step] = M::parts(self, n);
        if M::PARTS_FOLLOW {
            let from = self.b.muli(first, each);
            let to = self.b.muli(end, each);
            self.rows_between(from, to, all, &columns);
        } else {
            self.repeat([first, end, step], &[], |e, part, _| {
                let mut from = e.b.muli(part, each);
                let mut n = each;
                if let Some(row) = M::row_of_part(e) {
                    (from, n) = (e.b.addi(from, row), e.index(1));
                }
                let to = e.b.addi(from, n);
                e.rows_between(from, to, all, &columns);
                vec![]
            });
        }
        n
    }

    /// The rows `from..to` of `all`; `to` may be too large.
    fn rows_between(&mut self, from: Value, to: Value, all: Value, columns: &Columns) {
        let one = self.index(1);
        let to = self.b.minui(to, all);
        self.repeat([from, to, one], &[], |e, row, _| {
            e.row(row, columns);
            vec![]
        });
    }

    /// Makes room on the stack for kept values that no result has room for.
    fn stack_buffers(&mut self) {
        let columns = self.plan.space.columns();
        for (&id, &buffer) in &self.passes.buffers {
            if let Buffer::Stack(n) = buffer {
                let (size, kind) = (self.index(columns), self.plan.dag.kind(id));
                let buffer = self.b.alloca(size, kind, Some(64));
                self.buffers.insert(n, buffer);
            }
        }
        if self.passes.blocks.is_some() {
            let n = self.index(columns.div_ceil(BLOCK));
            let [scales, sums] = [(); 2].map(|()| self.b.alloca(n, Kind::F32, None));
            self.blocks = Some(Blocks { scales, sums });
        }
    }

    /// Clears a part's sums; those of whole vectors are left out if threads keep them.
    fn clear(&mut self, j: usize, columns: &Columns, kept: bool) {
        let all = self.plan.space.columns();
        let sums = self.partial(j);
        let [zero, whole, all] = [0, columns.whole, all].map(|i| self.index(i));
        let [vectors, end] = columns
            .piece
            .map_or([whole, all], |piece| [piece.vectors, piece.to]);
        let widths = [
            (self.lanes, zero, vectors, columns.whole != 0 && !kept),
            (1, vectors, end, columns.rest),
        ];
        for (width, from, to, some) in widths {
            if !some {
                continue;
            }
            let zero = self.constant(0, sums.kind, width);
            let [from, step] = M::share(self, from, width, width);
            self.repeat([from, to, step], &[], |e, at, _| {
                e.store(zero, sums, at);
                vec![]
            });
        }
    }

    /// The second phase: the parts' sums, added in order.
    pub(super) fn combine_parts(&mut self, sum_parts: u64) -> Function {
        let columns = self.plan.space.columns();
        let each = self.machine.combined();
        let parts = columns.div_ceil(each);
        let bounds = M::parts(self, parts);
        self.repeat(bounds, &[], |e, part, _| {
            let lanes = if M::SUMS_AT_ONCE > 1 { 1 } else { e.lanes };
            let whole = columns / lanes * lanes;
            let [size, all, vectors] = [each, columns, whole].map(|i| e.index(i));
            let from = e.b.muli(part, size);
            let to = e.b.addi(from, size);
            let to = e.b.minui(to, all);
            let end = e.b.minui(to, vectors);
            for &j in e.sums.keys() {
                let sums = e.all_sums(j);
                if whole > 0 {
                    e.add_parts(j, sums, lanes, [from, end], sum_parts);
                }
                if whole != columns {
                    e.add_parts(j, sums, 1, [end, to], sum_parts);
                }
            }
            vec![]
        });
        self.function(parts)
    }

    /// The place of all parts' sums of a result.
    fn all_sums(&mut self, j: usize) -> Elements {
        let scratch = self.arguments[self.arguments.len() - 1];
        let (kind, offset) = (self.sums[&j].kind, self.sums[&j].offset);
        let offset = self.index(offset);
        Elements {
            pointer: self.b.outside(0, |b| b.offset(scratch, offset, Kind::I8)),
            kind,
            align: self.sum_align(kind),
        }
    }

    /// Adds up the parts' sums of some columns of a result, `width` at a time.
    fn add_parts(
        &mut self,
        j: usize,
        sums: Elements,
        width: u64,
        [from, to]: [Value; 2],
        sum_parts: u64,
    ) {
        let memory = self.memory(j);
        let result = Elements {
            pointer: self.arguments[self.plan.operands.len() + j],
            kind: memory,
            align: (self.lanes * memory.bytes()).min(M::MOST_ALIGN),
        };
        let [from, step] = M::share(self, from, width, width);
        self.repeat([from, to, step], &[], |e, at, _| {
            let whole = sum_parts / M::SUMS_AT_ONCE * M::SUMS_AT_ONCE;
            let bounds = [0, whole, M::SUMS_AT_ONCE].map(|i| e.index(i));
            let zero = e.constant(0, sums.kind, width);
            let starts = vec![zero; M::SUMS_AT_ONCE as usize];
            let totals = e.repeat(bounds, &starts, |e, part, before| {
                let parts = (0..M::SUMS_AT_ONCE).map(|i| e.sum_of_part(sums, part, i, at, width));
                let parts: Vec<Value> = parts.collect();
                let pairs = before.iter().zip(parts);
                pairs
                    .map(|(&before, x)| e.combine(Fold::Sum, before, x))
                    .collect()
            });
            let mut total = totals[0];
            for &more in &totals[1..] {
                total = e.combine(Fold::Sum, total, more);
            }
            for i in 0..sum_parts - whole {
                let part = e.index(whole);
                let x = e.sum_of_part(sums, part, i, at, width);
                total = e.combine(Fold::Sum, total, x);
            }
            let x = e.finished(j, total);
            e.store(x, result, at);
            vec![]
        });
    }

    /// The sums of part `part + i` for `width` columns from `at` on.
    fn sum_of_part(&mut self, sums: Elements, part: Value, i: u64, at: Value, width: u64) -> Value {
        let [stride, past] = [self.plan.space.columns(), i].map(|i| self.index(i));
        let part = if i == 0 {
            part
        } else {
            self.b.addi(part, past)
        };
        let row = self.b.muli(part, stride);
        let place = self.b.addi(row, at);
        self.load(sums, place, width)
    }

    /// A sum over all rows in the type of its result.
    fn finished(&mut self, j: usize, mut x: Value) -> Value {
        let out = &self.plan.results[j];
        let kind = self.sums[&j].kind;
        if let Known::Columns {
            divisor: Some(n), ..
        } = out.known
        {
            let bits = if kind == Kind::F32 {
                (n as f32).to_bits().into()
            } else {
                (n as f64).to_bits()
            };
            let ty = x.ty();
            let n = self.b.outside(0, |b| b.constant(bits, ty));
            x = self.b.divf(x, n);
        }
        let memory = self.memory(j);
        match out.ty.dtype() {
            DType::BF16 => {
                let mut dag = Dag::new(M::FUNCTIONS);
                let span = Span {
                    rows: false,
                    columns: true,
                };
                let load: Id = dag.outside(Kind::F32, span);
                let rounded = dag.rounded_bf16(load);
                self.apart(&dag, load, x, rounded)
            }
            DType::F16 => self.b.convert(Convert::Truncf, x, memory),
            _ if memory == kind => x,
            _ => self.b.convert(Convert::Trunci, x, memory),
        }
    }
}
