//! Passes over a row. The first computes the sums that need nothing, the next those that need these, and so on; each stores the
//! results that it knows. What is dear to compute and needed again is kept in memory from the first pass that needs it: in a
//! result that is written last and through the caches, or in a buffer on the stack; what has room in neither is computed again.

use super::dag::{Dag, Id, Kind, Prim};
use super::emit::Plan;
use super::lower::{Known, storage};
use std::collections::{BTreeMap, BTreeSet};

/// The most bytes of a row's buffer on the stack.
const MOST_BUFFER: u64 = 32 << 10;

/// Where something that outlives a pass is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Buffer {
    Stack(usize),
    Result(usize),
}

/// What a pass over a row does.
#[derive(Default, Debug)]
pub(super) struct Pass {
    pub(super) folds: Vec<Id>,
    /// Results stored: numbers.
    pub(super) stores: Vec<usize>,
    /// Results whose columns are summed: numbers.
    pub(super) sums: Vec<usize>,
    /// What is kept for later passes.
    pub(super) keeps: Vec<Id>,
    /// Instructions that vary along the row, in order.
    pub(super) needs: Vec<Id>,
    /// Of these, what an earlier pass kept.
    pub(super) kept: Vec<Id>,
}

/// Instructions that vary along the row and are needed for `roots`, in order; instructions in `stop` are not looked into.
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

/// The passes and where they keep what later passes need.
pub(super) fn kept_passes(plan: &Plan<'_>) -> (Vec<Pass>, BTreeMap<Id, Buffer>) {
    // What no room is found for is computed again.
    let mut homeless = BTreeSet::new();
    loop {
        let passes = passes(plan, &homeless);
        let (mut buffers, mut taken) = (BTreeMap::new(), BTreeSet::new());
        let known = homeless.len();
        for (p, pass) in passes.iter().enumerate() {
            for &id in &pass.keeps {
                let kind = plan.dag.kind(id);
                if let Some(j) = free_result(plan, &passes, p, kind, &taken) {
                    taken.insert(j);
                    buffers.insert(id, Buffer::Result(j));
                } else if plan.space.columns() * kind.bytes() <= MOST_BUFFER {
                    buffers.insert(id, Buffer::Stack(buffers.len()));
                } else {
                    homeless.insert(id);
                }
            }
        }
        if homeless.len() == known {
            return (passes, buffers);
        }
    }
}
/// A result that is written last and may keep numbers of a kind from pass `p` on: none of the operands that might lie there
/// is read later.
fn free_result(plan: &Plan<'_>, passes: &[Pass], p: usize, kind: Kind, taken: &BTreeSet<usize>) -> Option<usize> {
    let later = |i: usize| {
        passes[p + 1..].iter().any(|q| {
            let reads =
                |&id: &Id| !q.kept.contains(&id) && matches!(plan.dag.nodes[id].prim, Prim::Load(of, _) if of == i);
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
            && !plan.streams(j)
            && !(0..plan.operands.len()).any(|i| plan.operands[i] == out.ty && later(i))
    })
}

fn passes(plan: &Plan<'_>, homeless: &BTreeSet<Id>) -> Vec<Pass> {
    let dag = plan.dag;
    // What anything is needed for.
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
    let last = used.iter().map(|&id| dag.nodes[id].stage).max().unwrap_or(0);
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
                // It may lie on an operand that later passes read.
                let shared = plan.operands.contains(&out.ty);
                passes[if shared { last } else { dag.nodes[id].stage }].stores.push(j);
            }
            Known::Node(_) => {}
        }
    }
    let roots = |pass: &Pass| -> Vec<Id> {
        let folds = pass.folds.iter().map(|&id| dag.nodes[id].args[0]);
        let outs = pass.stores.iter().chain(&pass.sums).map(|&j| match plan.results[j].known {
            Known::Node(id) | Known::Columns { of: id, .. } => id,
        });
        folds.chain(outs).collect()
    };
    // Dear instructions that more than one pass needs are kept by the first that does.
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
        pass.kept = found.iter().copied().filter(|id| stop.contains(id)).collect();
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
