//! One row: the loops of its passes over columns, in whole vectors and then one by one,
//! and the sums that passes compute.

use super::dag::{Dag, Exponentials, Fold, Id, Prim, Span};
use super::emit::{Blocks, Elements, Emitter, Fetched, Threads};
use super::lower::Known;
use super::passes::Pass;
use crate::mlir::{Emit, Kind, Predicate, Type, Value};

/// The most bytes of a row that is prefetched into the first cache, and into the second, while the
/// row before it is computed.
const FETCHED: [u64; 2] = [16 << 10, 256 << 10];
/// Columns of a block of a long row; it is read twice and should stay in the first cache in
/// between.
pub(super) const BLOCK: u64 = 1024;
/// The number of blocks by which prefetches are ahead.
const AHEAD: u64 = 2;

/// The columns of a pass: whole vectors, then the rest one by one.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    /// Elements in whole vectors: of the whole row, or of the largest piece.
    pub(super) whole: u64,
    pub(super) rest: bool,
    /// The piece of the row; `None` for the whole row.
    pub(super) piece: Option<Piece>,
}

/// A piece of a row: the start and the end of its vectors, and the end of the rest.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) from: Value,
    pub(super) vectors: Value,
    pub(super) to: Value,
}

impl Columns {
    pub(super) fn all(columns: u64, lanes: u64) -> Columns {
        let whole = columns / lanes * lanes;
        Columns {
            whole,
            rest: whole != columns,
            piece: None,
        }
    }
}

/// A fold over a row, and the kind of its numbers.
#[derive(Clone, Copy)]
struct Folded {
    fold: Fold,
    kind: Kind,
}

impl<M: Threads> Emitter<'_, M> {
    /// Emits one row, in the open block.
    pub(super) fn row(&mut self, row: Value, columns: &Columns) {
        self.row_depth = self.b.depth();
        self.row = row;
        self.held.values.clear();
        let slots = self.all_passes(columns);
        self.singles(columns, slots);
    }

    /// Emits the passes over a row. Returns the number of their folds.
    fn all_passes(&mut self, columns: &Columns) -> u64 {
        let passes = self.passes;
        let mut slots = 0;
        for (p, pass) in passes.all.iter().enumerate() {
            self.fetched.clear();
            let idle = pass.folds.is_empty() && pass.stores.is_empty() && pass.sums.is_empty();
            match passes.blocks.filter(|(first, _)| *first <= p) {
                Some((first, found)) if p == first => {
                    self.largest_and_sum([pass, &passes.all[p + 1]], found);
                }
                Some((first, _)) if p == first + 1 => {}
                Some((_, found)) if pass.kept.contains(&found.e) => self.scaled(pass, found.e),
                _ if idle => {}
                blocks => {
                    if p == 1 && blocks.is_none() {
                        self.fetched = self.next_row(&passes.all[0]);
                    }
                    self.pass(pass, columns, slots);
                }
            }
            slots += pass.folds.len() as u64;
        }
        slots
    }

    /// Stores the results that have one element per row.
    fn singles(&mut self, columns: &Columns, slots: u64) {
        let plan = self.plan;
        let mut values = vec![];
        for (j, out) in plan.results.iter().enumerate() {
            if let Known::Node(id) = out.known
                && !plan.space.span(out.value).1
            {
                values.push((j, self.scalar(id)));
            }
        }
        if !values.is_empty() || slots != 0 {
            // Every thread has read the bytes that may be at these places, and the shared memory of
            // this row.
            M::synchronize(self);
        }
        if values.is_empty() {
            return;
        }

        // All pieces of a row know the number; the first one writes it.
        let zero = self.index(0);
        let leads = M::leads(self);
        let first = columns
            .piece
            .map(|piece| self.b.compare(Predicate::Eq, piece.from, zero));
        let condition = match (leads, first) {
            (Some(a), Some(b)) => Some(self.b.andi(a, b)),
            (one, other) => one.or(other),
        };
        let Some(condition) = condition else {
            for (j, x) in values {
                self.store_result(j, x, zero);
            }
            return;
        };
        // Addresses belong to the row, not to the branch.
        for &(j, _) in &values {
            self.result(j);
        }
        self.when(condition, |e| {
            for (j, x) in values {
                e.store_result(j, x, zero);
            }
        });
    }

    // --- passes ---

    /// A pass over some columns of the row; `slot` is the number of its first fold among the row's.
    fn pass(&mut self, pass: &Pass, columns: &Columns, slot: u64) {
        let folds: Vec<Folded> = pass
            .folds
            .iter()
            .map(|&id| match self.plan.dag.nodes[id].prim {
                Prim::Fold(fold) => Folded {
                    fold,
                    kind: self.plan.dag.kind(id),
                },
                _ => unreachable!("a pass's folds should be folds"),
            })
            .collect();
        let mut totals = vec![None; folds.len()];
        if columns.whole > 0 {
            self.vectors(pass, columns, &folds, &mut totals);
        }
        if columns.rest {
            self.rest(pass, columns, &folds, &mut totals);
        }
        for (f, folded) in folds.iter().enumerate() {
            let total = totals[f].unwrap_or_else(|| self.start(folded.fold, folded.kind, 1));
            let total = M::across(self, folded.fold, total, slot + f as u64);
            self.tables.scalars.insert(pass.folds[f], total);
        }
    }

    /// The number of vectors in a round of a pass's loop.
    fn unroll(&self, pass: &Pass, columns: &Columns) -> u64 {
        let lanes = self.lanes;
        // Sums depend on each other. Two vectors at a time keep the adders busy, if nothing else
        // does.
        let busy = pass.folds.is_empty() || pass.needs.iter().any(|&id| self.plan.dag.dear[id]);
        // A piece may have an odd number of vectors.
        let odd = columns.piece.is_some() && !columns.whole.is_multiple_of(2 * lanes);
        if busy || odd || !M::UNROLLS || columns.whole < 2 * lanes {
            1
        } else {
            2
        }
    }

    /// The whole vectors of a pass.
    fn vectors(
        &mut self,
        pass: &Pass,
        columns: &Columns,
        folds: &[Folded],
        totals: &mut [Option<Value>],
    ) {
        if let Some(slots) = self.machine.slots() {
            return self.held_vectors(pass, columns, folds, totals, slots);
        }
        let (lanes, n) = (self.lanes, folds.len());
        let unroll = self.unroll(pass, columns);
        let round = lanes * unroll;
        let main = columns.whole / round * round;
        let [from, to] = match columns.piece {
            None => [self.index(0), self.index(main)],
            Some(piece) => [piece.from, piece.vectors],
        };
        // For each vector of a round, its folds.
        let mut sums: Vec<Value> = vec![];
        for _ in 0..unroll {
            for folded in folds {
                sums.push(self.start(folded.fold, folded.kind, lanes));
            }
        }
        if main > 0 {
            let [from, step] = M::share(self, from, round, lanes);
            let body = |e: &mut Self, at: Value, sums: &[Value]| {
                let mut next = vec![];
                for u in 0..unroll {
                    let at = if u == 0 {
                        at
                    } else {
                        let more = e.index(u * lanes);
                        e.b.addi(at, more)
                    };
                    let before = &sums[u as usize * n..][..n];
                    next.extend(e.body(pass, at, lanes, folds, before));
                }
                next
            };
            let once = columns.piece.is_none() && self.machine.one_round(main);
            sums = if once {
                body(self, from, &sums)
            } else {
                self.repeat([from, to, step], &sums, body)
            };
        }
        // The remaining whole vectors.
        for (u, at) in (main..columns.whole).step_by(lanes as usize).enumerate() {
            let at = self.index(at);
            let before = sums[u * n..][..n].to_vec();
            let next = self.body(pass, at, lanes, folds, &before);
            sums[u * n..][..n].copy_from_slice(&next);
        }
        for (f, folded) in folds.iter().enumerate() {
            let mut sum = sums[f];
            for &other in sums.iter().skip(f + n).step_by(n) {
                sum = self.combine(folded.fold, sum, other);
            }
            totals[f] = Some(self.across_lanes(folded.fold, sum));
        }
    }

    /// The whole vectors of a pass if each thread has `slots` of them.
    fn held_vectors(
        &mut self,
        pass: &Pass,
        columns: &Columns,
        folds: &[Folded],
        totals: &mut [Option<Value>],
        slots: u64,
    ) {
        let (lanes, n) = (self.lanes, folds.len());
        let round = lanes * self.machine.threads();
        let vectors = self.plan.space.columns() / lanes * lanes;
        let mut so_far: Vec<Value> = folds
            .iter()
            .map(|folded| self.start(folded.fold, folded.kind, lanes))
            .collect();
        for slot in 0..slots {
            let wanted = self.wanted(pass, slot);
            let mut starts = so_far.clone();
            starts.extend(pass.sums.iter().map(|&j| self.held.sums[&(j, slot)]));
            for &id in &wanted {
                starts.push(self.constant(0, self.plan.dag.kind(id), lanes));
            }
            let body = |e: &mut Self, at: Value, values: &[Value]| {
                for (i, &j) in pass.sums.iter().enumerate() {
                    e.held.sums.insert((j, slot), values[n + i]);
                }
                (e.held.slot, e.held.wanted) = (Some(slot), wanted.clone());
                let mut next = e.body(pass, at, lanes, folds, &values[..n]);
                e.held.slot = None;
                next.extend(pass.sums.iter().map(|&j| e.held.sums[&(j, slot)]));
                next.extend(wanted.iter().map(|&id| e.held.values[&(id, slot)]));
                next
            };
            let [at, to] = self.slot(columns, slot);
            // Whether every thread has this vector, in each piece of the row.
            let full = match columns.piece {
                None => (slot + 1) * round <= columns.whole,
                Some(_) => vectors.is_multiple_of(round * slots),
            };
            let last = if full {
                body(self, at, &starts)
            } else {
                // It runs at most once.
                let step = self.index(round * slots);
                self.repeat([at, to, step], &starts, body)
            };
            so_far = last[..n].to_vec();
            for (i, &j) in pass.sums.iter().enumerate() {
                self.held.sums.insert((j, slot), last[n + i]);
            }
            for (i, &id) in wanted.iter().enumerate() {
                let value = last[n + pass.sums.len() + i];
                self.held.values.insert((id, slot), value);
            }
        }
        for (f, folded) in folds.iter().enumerate() {
            totals[f] = Some(self.across_lanes(folded.fold, so_far[f]));
        }
    }

    /// The first column of a thread's vector, and the end of the vectors.
    pub(super) fn slot(&mut self, columns: &Columns, slot: u64) -> [Value; 2] {
        let past = slot * self.lanes * self.machine.threads();
        let [mut from, mut to] = [past, columns.whole].map(|i| self.index(i));
        if let Some(piece) = columns.piece {
            from = self.b.addi(piece.from, from);
            to = piece.vectors;
        }
        let [at, _] = M::share(self, from, self.lanes, self.lanes);
        [at, to]
    }

    /// The values of a pass that later passes need.
    fn wanted(&self, pass: &Pass, slot: u64) -> Vec<Id> {
        let later = self
            .passes
            .all
            .iter()
            .skip_while(|p| !std::ptr::eq(*p, pass));
        let later: Vec<&Pass> = later.skip(1).collect();
        let is_wanted = |&id: &Id| {
            let is_load = matches!(self.plan.dag.nodes[id].prim, Prim::Load(..));
            let again = is_load && later.iter().any(|p| p.needs.contains(&id));
            (again || pass.keeps.contains(&id)) && !self.held.values.contains_key(&(id, slot))
        };
        pass.needs.iter().copied().filter(is_wanted).collect()
    }

    /// The columns of a pass after the last whole vector.
    fn rest(
        &mut self,
        pass: &Pass,
        columns: &Columns,
        folds: &[Folded],
        totals: &mut [Option<Value>],
    ) {
        let [from, to] = match columns.piece {
            None => [columns.whole, self.plan.space.columns()].map(|i| self.index(i)),
            Some(piece) => [piece.vectors, piece.to],
        };
        let mut starts = vec![];
        for folded in folds {
            starts.push(self.start(folded.fold, folded.kind, 1));
        }
        let [from, step] = M::share(self, from, 1, 1);
        let sums = self.repeat([from, to, step], &starts, |e, at, sums| {
            e.body(pass, at, 1, folds, sums)
        });
        for (f, folded) in folds.iter().enumerate() {
            totals[f] = Some(match totals[f] {
                Some(total) => self.combine(folded.fold, total, sums[f]),
                None => sums[f],
            });
        }
    }

    /// Emits a pass over the elements `at..at + width`. Returns the folds' next values.
    fn body(
        &mut self,
        pass: &Pass,
        at: Value,
        width: u64,
        folds: &[Folded],
        before: &[Value],
    ) -> Vec<Value> {
        let plan = self.plan;
        if width == self.lanes {
            for fetched in self.fetched.clone() {
                let pointer = self.b.offset(fetched.pointer, at, fetched.kind);
                self.b.prefetch(pointer, 3 - fetched.cache);
            }
        }
        let known = self.elements(pass, at, width);
        if let Some(slot) = self.held.slot {
            for id in std::mem::take(&mut self.held.wanted) {
                self.held.values.insert((id, slot), known[&id]);
            }
        }
        let mut next = vec![];
        for (f, folded) in folds.iter().enumerate() {
            let of = plan.dag.nodes[pass.folds[f]].args[0];
            let x = self.element(of, width, &known);
            next.push(self.combine(folded.fold, before[f], x));
        }

        // All bytes that are overwritten now have been read.
        if self.held.slot.is_none() {
            for &id in &pass.keeps {
                let to = self.buffer(id);
                self.store(known[&id], to, at);
            }
        }
        for &j in &pass.sums {
            if let Known::Columns { of, .. } = plan.results[j].known {
                let x = self.element(of, width, &known);
                if let Some(slot) = self.held.slot {
                    let new = self.combine(Fold::Sum, self.held.sums[&(j, slot)], x);
                    self.held.sums.insert((j, slot), new);
                    continue;
                }
                let sums = self.partial(j);
                let old = self.load(sums, at, width);
                let new = self.combine(Fold::Sum, old, x);
                self.store(new, sums, at);
            }
        }
        for &j in &pass.stores {
            if let Known::Node(id) = plan.results[j].known {
                let x = self.element(id, width, &known);
                self.store_result(j, x, at);
            }
        }
        next
    }

    // --- long rows ---

    /// Two passes in one reading of a long row. The first finds the largest element, the second the
    /// sum of the exponentials relative to it. Both process each block, with the block's own
    /// largest element, and its sum is scaled at the end.
    fn largest_and_sum(&mut self, passes: [&Pass; 2], found: Exponentials) {
        let [scales, sums] = self.block_scratch();
        let ahead = self.ahead(passes[0]);
        self.each_block(|e, block, columns| {
            e.pass(passes[0], columns, 0);
            // Elements of minus infinity must give 0, even if the block has no other elements.
            let max = e.tables.scalars[&found.max];
            let least = e.constant(f32::MIN.to_bits().into(), Kind::F32, 1);
            let max = e.combine(Fold::MaxNumber, max, least);
            e.store(max, scales, block);
            e.tables.scalars.insert(found.max, max);
            e.fetched.clone_from(&ahead);
            e.pass(passes[1], columns, 0);
            e.fetched.clear();
            e.store(e.tables.scalars[&found.sum], sums, block);
        });

        let n = self.plan.space.columns().div_ceil(BLOCK);
        let bounds = [0, n, 1].map(|i| self.index(i));
        let start = self.start(Fold::MaxNumber, Kind::F32, 1);
        let max = self.repeat(bounds, &[start], |e, block, max| {
            let x = e.load(scales, block, 1);
            vec![e.combine(Fold::MaxNumber, x, max[0])]
        })[0];
        let start = self.start(Fold::Sum, Kind::F32, 1);
        let sum = self.repeat(bounds, &[start], |e, block, sum| {
            let x = e.load(scales, block, 1);
            let below = e.b.subf(x, max);
            let scale = e.exponential(below);
            e.store(scale, scales, block);
            let part = e.load(sums, block, 1);
            let part = e.b.mulf(part, scale);
            vec![e.combine(Fold::Sum, sum[0], part)]
        })[0];
        self.tables.scalars.insert(found.max, max);
        self.tables.scalars.insert(found.sum, sum);
    }

    /// The places of two numbers for each block: its scale and its sum.
    fn block_scratch(&self) -> [Elements; 2] {
        let Blocks { scales, sums } = self.blocks.expect("a function should have its buffers");
        [scales, sums].map(|pointer| Elements {
            pointer,
            kind: Kind::F32,
            align: Kind::F32.bytes(),
        })
    }

    /// e^x of an x that is at most 0.
    fn exponential(&mut self, x: Value) -> Value {
        let mut dag = Dag::new(M::FUNCTIONS);
        let load = dag.outside(Kind::F32, Span::default());
        let e = dag.exp_below(load);
        self.apart(&dag, load, x, e)
    }

    /// A later pass, which reads the exponentials that were kept.
    fn scaled(&mut self, pass: &Pass, kept: Id) {
        let [scales, _] = self.block_scratch();
        self.each_block(|e, block, columns| {
            let scalar = e.load(scales, block, 1);
            let vector = e.b.broadcast(scalar, Type::of(Kind::F32, e.lanes));
            e.scale = Some((kept, [scalar, vector]));
            e.pass(pass, columns, 0);
            e.scale = None;
        });
    }

    /// Processes a row in blocks: `body` gets a block's number and columns.
    fn each_block(&mut self, body: impl Fn(&mut Self, Value, &Columns)) {
        let columns = self.plan.space.columns();
        let (full, whole) = (columns / BLOCK, columns / self.lanes * self.lanes);
        if full > 0 {
            let bounds = [0, full, 1].map(|i| self.index(i));
            let size = self.index(BLOCK);
            self.repeat(bounds, &[], |e, number, _| {
                let from = e.b.muli(number, size);
                let to = e.b.addi(from, size);
                let piece = Piece {
                    from,
                    vectors: to,
                    to,
                };
                let columns = Columns {
                    whole: BLOCK,
                    rest: false,
                    piece: Some(piece),
                };
                e.one_block(number, &columns, &body);
                vec![]
            });
        }
        if full * BLOCK < columns {
            let [number, from, vectors, to] =
                [full, full * BLOCK, whole, columns].map(|i| self.index(i));
            let last = Columns {
                whole: whole - full * BLOCK,
                rest: whole != columns,
                piece: Some(Piece { from, vectors, to }),
            };
            self.one_block(number, &last, &body);
        }
    }

    /// One block. Values of a block are known only inside it.
    fn one_block(
        &mut self,
        number: Value,
        columns: &Columns,
        body: &impl Fn(&mut Self, Value, &Columns),
    ) {
        let tables = self.tables.clone();
        let row_depth = std::mem::replace(&mut self.row_depth, self.b.depth());
        body(self, number, columns);
        self.row_depth = row_depth;
        self.tables = tables;
    }

    // --- what is fetched ---

    /// Prefetches of the operands that a pass reads, some blocks ahead.
    fn ahead(&mut self, pass: &Pass) -> Vec<Fetched> {
        let distance = self.index(AHEAD * BLOCK);
        let mut found = vec![];
        for &id in pass.needs.iter().filter(|id| !pass.kept.contains(id)) {
            let node = &self.plan.dag.nodes[id];
            if let Prim::Load(i, place) = &node.prim {
                let from = self.row_elements(*i, place, node.kind);
                found.push(self.fetched_at(from, distance, 0));
            }
        }
        found
    }

    /// Prefetches of the operands that the first of several passes reads: the start of each one's
    /// next row, and the cache into which it fits. Otherwise the memory would be idle while passes
    /// compute over a row that is in a cache.
    fn next_row(&mut self, first: &Pass) -> Vec<Fetched> {
        let columns = self.plan.space.columns();
        let mut found = vec![];
        for &id in &first.needs {
            let node = &self.plan.dag.nodes[id];
            let Prim::Load(i, place) = &node.prim else {
                continue;
            };
            let follows = place.strides.last() == Some(&(columns as i64));
            let bytes = columns * node.kind.bytes();
            let fits = FETCHED.iter().position(|&most| bytes <= most);
            let wanted = M::CACHES && follows && !first.kept.contains(&id);
            if let Some(cache) = fits.filter(|_| wanted) {
                let from = self.row_elements(*i, place, node.kind);
                let distance = self.index(columns);
                found.push(self.fetched_at(from, distance, cache));
            }
        }
        found
    }

    fn fetched_at(&mut self, from: Elements, distance: Value, cache: usize) -> Fetched {
        let (depth, kind) = (self.row_depth, from.kind);
        let pointer = self
            .b
            .outside(depth, |b| b.offset(from.pointer, distance, kind));
        Fetched {
            pointer,
            kind,
            cache,
        }
    }
}
