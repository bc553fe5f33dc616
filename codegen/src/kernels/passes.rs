//! Passes over a row. The first pass computes sums that depend on no other sums, the next pass sums
//! that depend on those, and so on. Each pass stores the results that it can compute. Expensive
//! values that are needed again are kept in memory from the first pass that needs them: in a result
//! that is written last and through the caches, or in a buffer on the stack. If neither has room,
//! they are computed again.
//!
//! The largest element of a long row and the sum of the exponentials below it are found in one
//! reading, block by block, after Milakov and Gimelshein, "Online normalizer calculation for
//! softmax" (2018): exponentials relative to the block's largest element are kept. They are scaled
//! later by the difference from the row's largest element.

use super::dag::{Dag, Exponentials, Id, Prim};
use super::lower::{Known, storage};
use super::machine::Machine;
use super::plan::Plan;
use crate::mlir::Kind;
use std::collections::{BTreeMap, BTreeSet};

/// The most bytes of a row's buffer on the stack.
const MOST_BUFFER: u64 = 32 << 10;
/// The same for exponentials that are computed block by block. Together with the operands' next
/// blocks they stay in the second cache.
const MOST_EXPONENTIALS: u64 = 256 << 10;
/// Columns of a row that is long enough to be processed in blocks: the row and its kept values fill
/// the first cache.
const LONG: u64 = 4096;

/// The place of a value that outlives a pass.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Buffer {
    Stack(usize),
    Result(usize),
}

/// A pass over a row.
#[derive(Default, Debug)]
pub(super) struct Pass {
    pub(super) folds: Vec<Id>,
    /// Results stored: numbers.
    pub(super) stores: Vec<usize>,
    /// Results whose columns are summed: numbers.
    pub(super) sums: Vec<usize>,
    /// Values that are kept for later passes.
    pub(super) keeps: Vec<Id>,
    /// Instructions that vary along the row, in order.
    pub(super) needs: Vec<Id>,
    /// The values among these that an earlier pass kept.
    pub(super) kept: Vec<Id>,
}

/// Instructions that vary along the row and are needed for `roots`, in order; operands of
/// instructions in `stop` are not followed.
fn needs(dag: &Dag, roots: &[Id], stop: &BTreeSet<Id>) -> Vec<Id> {
    let mut found = BTreeSet::new();
    let mut work: Vec<Id> = roots.to_vec();
    while let Some(id) = work.pop() {
        let node = &dag.nodes[id];
        if !node.span.columns || !found.insert(id) || stop.contains(&id) {
            continue;
        }
        work.extend(&node.args);
    }
    found.into_iter().collect()
}

/// The passes of a kernel.
pub(super) struct Passes {
    pub(super) all: Vec<Pass>,
    /// The buffers of values that later passes need.
    pub(super) buffers: BTreeMap<Id, Buffer>,
    /// A pass that runs together with the next one, block by block: the first finds the largest
    /// elements, the second the sums.
    pub(super) blocks: Option<(usize, Exponentials)>,
}

/// The pass that may run together with the next one: the largest element is needed for nothing else
/// yet.
fn blocks<M: Machine>(plan: &Plan<'_>, passes: &[Pass]) -> Option<(usize, Exponentials)> {
    let found = plan.dag.exponentials.iter().find_map(|&found| {
        let p = passes
            .windows(2)
            .position(|pair| pair[0].folds == [found.max] && pair[1].folds == [found.sum])?;
        let next = &passes[p + 1];
        let alone = next.stores.is_empty()
            && next.sums.is_empty()
            && next.keeps.iter().all(|&id| id == found.e);
        // Kept values must still be scaled.
        let scaled = |pass: &Pass| pass.folds.is_empty() || !pass.kept.contains(&found.e);
        (alone && passes[p + 2..].iter().all(scaled)).then_some((p, found))
    });
    found.filter(|_| M::CACHES && plan.space.columns() >= LONG)
}

/// The passes, with buffers for values that later passes need.
pub(super) fn kept_passes<M: Machine>(plan: &Plan<'_>) -> Passes {
    // Values without room are computed again.
    let mut homeless = BTreeSet::new();
    loop {
        let passes = passes(plan, &homeless);
        let blocks = blocks::<M>(plan, &passes);
        let (mut buffers, mut taken) = (BTreeMap::new(), BTreeSet::new());
        let known = homeless.len();
        for (p, pass) in passes.iter().enumerate() {
            for &id in &pass.keeps {
                let kind = plan.dag.kind(id);
                let in_blocks = blocks.is_some_and(|(_, found)| found.e == id);
                let most = if in_blocks {
                    MOST_EXPONENTIALS
                } else {
                    MOST_BUFFER
                };
                if let Some(j) = free_result::<M>(plan, &passes, p, kind, &taken) {
                    taken.insert(j);
                    buffers.insert(id, Buffer::Result(j));
                } else if plan.space.columns() * kind.bytes() <= most {
                    buffers.insert(id, Buffer::Stack(buffers.len()));
                } else {
                    homeless.insert(id);
                }
            }
        }
        if homeless.len() == known {
            return Passes {
                all: passes,
                buffers,
                blocks,
            };
        }
    }
}
/// A result that is written last and may hold numbers of a kind from pass `p` on. No operand that
/// may share its bytes is read later.
fn free_result<M: Machine>(
    plan: &Plan<'_>,
    passes: &[Pass],
    p: usize,
    kind: Kind,
    taken: &BTreeSet<usize>,
) -> Option<usize> {
    let later = |i: usize| {
        passes[p + 1..].iter().any(|q| {
            let reads = |&id: &Id| {
                !q.kept.contains(&id)
                    && matches!(&plan.dag.nodes[id].prim, Prim::Load(of, _) if *of == i)
            };
            q.needs.iter().any(reads)
        })
    };
    (0..plan.results.len()).find(|&j| {
        let out = &plan.results[j];
        plan.space.span(out.value).1
            && p + 1 < passes.len()
            && passes.last().is_some_and(|last| last.stores.contains(&j))
            && storage(out.ty.dtype()) == Some(kind)
            && !taken.contains(&j)
            && !M::streams(plan, j)
            && !(0..plan.operands.len()).any(|i| plan.operands[i] == out.ty && later(i))
    })
}

fn passes(plan: &Plan<'_>, homeless: &BTreeSet<Id>) -> Vec<Pass> {
    let dag = plan.dag;
    // All values that are needed.
    let mut used = BTreeSet::new();
    let mut work: Vec<Id> = vec![];
    for out in plan.results {
        match out.known {
            Known::Node(id) | Known::Columns { of: id, .. } => work.push(id),
        }
    }
    while let Some(id) = work.pop() {
        if used.insert(id) {
            work.extend(&dag.nodes[id].args);
        }
    }
    let last = used
        .iter()
        .map(|&id| dag.nodes[id].stage)
        .max()
        .unwrap_or(0);
    let mut passes: Vec<Pass> = (0..=last).map(|_| Pass::default()).collect();
    for &id in &used {
        let node = &dag.nodes[id];
        if let Prim::Fold(_) = node.prim {
            passes[node.stage - 1].folds.push(id);
        }
    }
    for (j, out) in plan.results.iter().enumerate() {
        match out.known {
            Known::Columns { of, .. } => passes[dag.nodes[of].stage].sums.push(j),
            Known::Node(id) if plan.space.span(out.value).1 => {
                // It may share the bytes of an operand that later passes read.
                let shared = plan.operands.contains(&out.ty);
                passes[if shared { last } else { dag.nodes[id].stage }]
                    .stores
                    .push(j);
            }
            Known::Node(_) => {}
        }
    }
    let roots = |pass: &Pass| -> Vec<Id> {
        let folds = pass.folds.iter().map(|&id| dag.nodes[id].args[0]);
        let outs = pass
            .stores
            .iter()
            .chain(&pass.sums)
            .map(|&j| match plan.results[j].known {
                Known::Node(id) | Known::Columns { of: id, .. } => id,
            });
        folds.chain(outs).collect()
    };
    // An expensive instruction that several passes need is kept by the first of them.
    let mut first: BTreeMap<Id, usize> = BTreeMap::new();
    let mut again = BTreeSet::new();
    for (p, pass) in passes.iter().enumerate() {
        for id in needs(dag, &roots(pass), &BTreeSet::new()) {
            if dag.dear[id] && !homeless.contains(&id) && *first.entry(id).or_insert(p) < p {
                again.insert(id);
            }
        }
    }
    let mut kept_by: BTreeMap<usize, BTreeSet<Id>> = BTreeMap::new();
    for (p, pass) in passes.iter_mut().enumerate() {
        let stop: BTreeSet<Id> = again.iter().copied().filter(|id| first[id] < p).collect();
        let found = needs(dag, &roots(pass), &stop);
        pass.kept = found
            .iter()
            .copied()
            .filter(|id| stop.contains(id))
            .collect();
        for id in &pass.kept {
            kept_by.entry(first[id]).or_default().insert(*id);
        }
        pass.needs = found;
    }
    for (p, ids) in kept_by {
        passes[p].keeps = ids.into_iter().collect();
    }
    passes
}
