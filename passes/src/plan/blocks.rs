//! The repeated blocks of a model. Planners decide about a block as a whole.
//!
//! Before: any graph. After: every forward and backward node that is not a reshape is in one block,
//! and every parameter is in the block that uses it first. The nodes before the first repeated
//! block (embeddings) and after the last (the head, the loss) are also blocks, marked as not
//! repeated.
//!
//! If nodes have module paths, blocks are siblings whose names are numbers: `h.0`, `h.1`. Otherwise
//! blocks are periods of the repetition that covers the most work of the forward. The period is
//! searched only among the nodes that read parameters. Each block has its own parameters, so merged
//! equal nodes, shared masks and reordered cheap nodes do not break the pattern. The border between
//! two blocks is where the fewest bytes cross it: the residual stream.

use super::users::users;
use ir::graph::Def;
use ir::op::body::Step;
use ir::{Graph, Node, Phase, State, StateKind, Table, TensorType, Value};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// A part of a model that runs as one, forward and backward.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Block {
    /// The path of its module, or `block.N` without paths, or `before` or `after`.
    pub name: String,
    /// True for the repeated blocks; false for the blocks before and after them.
    pub repeated: bool,
    /// Its forward nodes, in the graph's order, without reshapes.
    pub forward: Vec<Node>,
    /// Its backward nodes, in the graph's order, without reshapes.
    pub backward: Vec<Node>,
    /// Its parameters, in order of first use. A tied parameter belongs to the first block that
    /// reads it.
    pub states: Vec<State>,
}

/// The blocks of a graph, in the order of the forward. A graph without repetition is one block that
/// is not repeated.
pub fn find(graph: &Graph) -> Vec<Block> {
    let lines = |phase: Phase| -> Vec<Node> {
        let of_phase =
            |&node: &Node| graph.nodes[node].phase == phase && !graph.nodes[node].op.is_alias();
        graph.order.iter().copied().filter(of_phase).collect()
    };
    let (forward, backward) = (lines(Phase::Forward), lines(Phase::Backward));
    let modules = by_modules(graph, &forward);
    let of_modules = |nodes: &[Node], modules: &[&str]| -> Vec<Option<usize>> {
        let paths: BTreeMap<&str, usize> = modules.iter().copied().zip(1..).collect();
        let nodes = nodes.iter();
        nodes
            .map(|&node| within(&graph.nodes[node].module, &paths))
            .collect()
    };
    let (names, own) = match &modules {
        Some(modules) => (
            modules.iter().map(|path| path.to_string()).collect(),
            of_modules(&forward, modules),
        ),
        None => by_repetition(graph, &forward),
    };
    let n = names.len();
    // Block 0 is before, 1..=n are repeated, n + 1 is after.
    let of_forward = in_between(&own, 0, n + 1);
    let of_backward = match &modules {
        _ if n == 0 => vec![0; backward.len()],
        Some(modules) => in_between(&of_modules(&backward, modules), n + 1, 0),
        None => {
            let mut block_of: Table<Node, Option<usize>> = Table::filled(graph.nodes.len(), None);
            for (&node, &block) in forward.iter().zip(&of_forward) {
                block_of[node] = Some(block);
            }
            by_operands(graph, &backward, &block_of, n + 1)
        }
    };

    let mut blocks = empty_blocks(names);
    let mut placed = BTreeSet::new();
    let forward = forward.into_iter().zip(of_forward);
    let backward = backward.into_iter().zip(of_backward);
    for (node, block) in forward.chain(backward) {
        let block = &mut blocks[block];
        match graph.nodes[node].phase {
            Phase::Forward => block.forward.push(node),
            _ => block.backward.push(node),
        }
        for &input in &graph.nodes[node].inputs {
            let state = parameter(graph, graph.root(input));
            block
                .states
                .extend(state.filter(|&state| placed.insert(state)));
        }
    }
    blocks.retain(|block| {
        !block.forward.is_empty() || !block.backward.is_empty() || !block.states.is_empty()
    });
    blocks
}

/// Blocks without nodes: `before`, the repeated blocks, and `after`.
fn empty_blocks(names: Vec<String>) -> Vec<Block> {
    let n = names.len();
    let names = std::iter::once("before".to_string())
        .chain(names)
        .chain(["after".to_string()]);
    names
        .enumerate()
        .map(|(i, name)| Block {
            name,
            repeated: (1..=n).contains(&i),
            forward: vec![],
            backward: vec![],
            states: vec![],
        })
        .collect()
}

/// The state of a value that is a parameter.
fn parameter(graph: &Graph, root: Value) -> Option<State> {
    match graph.values[root].def {
        Def::State(state) if graph.states[state].kind == StateKind::Param => Some(state),
        _ => None,
    }
}

/// The blocks of all nodes, from the blocks of some. Nodes before the first known one are in
/// `first`, nodes after the last known one in `last`, and nodes between are in the block of the
/// known node before them.
fn in_between(own: &[Option<usize>], first: usize, last: usize) -> Vec<usize> {
    let end = own.iter().rposition(Option::is_some).map_or(0, |i| i + 1);
    let mut current = first;
    let mut blocks = vec![];
    for (i, &block) in own.iter().enumerate() {
        current = if i < end {
            block.unwrap_or(current)
        } else {
            last
        };
        blocks.push(current);
    }
    // Without any known block, all nodes are in block 0.
    if end == 0 { vec![0; own.len()] } else { blocks }
}

/// Work of a node, for comparing parts of a model: operations and bytes.
fn work(graph: &Graph, node: Node) -> f64 {
    let data = &graph.nodes[node];
    let operands = data.inputs.iter().chain(&data.outputs);
    let bytes: u64 = operands.map(|&v| graph.values[v].ty.bytes()).sum();
    graph.work(node).flops + bytes as f64
}

/// The numeric components of a path, as (start, end). For `h.0.mlp.2.w` the ends give `h.0` and
/// `h.0.mlp.2`, and the starts give their containers, `h.` and `h.0.mlp.`.
fn numbers(path: &str) -> Vec<(usize, usize)> {
    let mut ends = vec![];
    let mut start = 0;
    for part in path.split('.') {
        let end = start + part.len();
        if !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()) {
            ends.push((start, end));
        }
        start = end + 1;
    }
    ends
}

/// The block that contains a module; `paths` has the blocks' paths.
fn within(module: &str, paths: &BTreeMap<&str, usize>) -> Option<usize> {
    numbers(module)
        .into_iter()
        .find_map(|(_, end)| paths.get(&module[..end]).copied())
}

/// A list of modules joins the list with the most work if its members do at least this share of the
/// work of that list's members. The encoder next to a decoder joins. A small classifier made of
/// numbered layers does not.
const JOINS: f64 = 0.1;
/// Inner members (`stages.2.0` in `stages.2`) are the blocks if they do at least this share of the
/// work of the outer ones.
const REFINES: f64 = 0.9;

/// Paths of the blocks, in order of the forward, if there are at least two siblings whose names are
/// numbers.
fn by_modules<'g>(graph: &'g Graph, forward: &[Node]) -> Option<Vec<&'g str>> {
    let module = |node: Node| graph.nodes[node].module.as_str();
    let mut children: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for &node in forward {
        let path = module(node);
        for (start, end) in numbers(path) {
            children
                .entry(&path[..start])
                .or_default()
                .insert(&path[..end]);
        }
    }
    // The outermost list with more than one member. Lists with one member are skipped.
    let outermost = |path: &'g str| {
        let several = |&(start, _): &(usize, usize)| {
            children.get(&path[..start]).is_some_and(|c| 1 < c.len())
        };
        numbers(path).into_iter().find(several)
    };
    let mut member: Vec<Option<(usize, usize)>> = forward
        .iter()
        .map(|&node| outermost(module(node)))
        .collect();
    while let Some(finer) = refined(graph, forward, &member) {
        member = finer;
    }

    let mut containers: BTreeMap<&str, (f64, BTreeSet<&str>)> = BTreeMap::new();
    for (&node, at) in forward.iter().zip(&member) {
        if let &Some((start, end)) = at {
            let container = containers.entry(&module(node)[..start]).or_default();
            container.0 += work(graph, node);
            container.1.insert(&module(node)[..end]);
        }
    }
    let mean = |(work, members): &(f64, BTreeSet<&str>)| work / members.len() as f64;
    let main = containers
        .values()
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(mean)?;
    let joined: BTreeSet<&str> = containers
        .iter()
        .filter(|(_, container)| JOINS * main <= mean(container))
        .map(|(&path, _)| path)
        .collect();
    let mut paths = vec![];
    for (&node, at) in forward.iter().zip(&member) {
        if let &Some((start, end)) = at {
            let path = module(node);
            if joined.contains(&path[..start]) && !paths.contains(&&path[..end]) {
                paths.push(&path[..end]);
            }
        }
    }
    (1 < paths.len()).then_some(paths)
}

/// The next numbered components, if they are blocks and not parts of a block. Then there are more
/// of them, they do nearly all of the work, and most of them read results of the one before and
/// have the same ops. So the stages of a residual network are refined. Experts are not, because
/// they run side by side. The layers of a sequential block are not, because they differ.
fn refined(
    graph: &Graph,
    forward: &[Node],
    member: &[Option<(usize, usize)>],
) -> Option<Vec<Option<(usize, usize)>>> {
    let module = |node: Node| graph.nodes[node].module.as_str();
    let (mut all, mut kept) = (0.0, 0.0);
    let mut finer = vec![];
    let mut coarse: BTreeSet<&str> = BTreeSet::new();
    let mut order: Vec<&str> = vec![];
    let mut position: BTreeMap<&str, usize> = BTreeMap::new();
    let mut ops: Vec<BTreeSet<&str>> = vec![];
    let mut of: Table<Node, Option<usize>> = Table::filled(graph.nodes.len(), None);
    let mut follows: BTreeSet<usize> = BTreeSet::new();
    for (&node, at) in forward.iter().zip(member) {
        let path = module(node);
        let next =
            at.and_then(|(_, end)| numbers(path).into_iter().find(|&(start, _)| end < start));
        finer.push(next);
        if let Some((_, end)) = at {
            coarse.insert(&path[..*end]);
            all += work(graph, node);
        }
        let Some((_, end)) = next else { continue };
        kept += work(graph, node);
        let at = *position.entry(&path[..end]).or_insert_with(|| {
            order.push(&path[..end]);
            ops.push(BTreeSet::new());
            ops.len() - 1
        });
        ops[at].insert(graph.nodes[node].op.name());
        of[node] = Some(at);
        let reads = |&value: &Value| graph.def_node(graph.root(value)).and_then(|n| of[n]);
        if graph.nodes[node]
            .inputs
            .iter()
            .filter_map(reads)
            .any(|from| from + 1 == at)
        {
            follows.insert(at);
        }
    }
    let alike = (1..ops.len())
        .filter(|&at| follows.contains(&at) && ops[at] == ops[at - 1])
        .count();
    (coarse.len() < order.len() && REFINES * all <= kept && ops.len() - 1 <= 2 * alike)
        .then_some(finer)
}

/// At both ends of the repetition, an incomplete period is a block if it has at least this share of
/// the period's parameters. For example, the first block may begin differently.
const PARTIAL: f64 = 0.5;

/// Names of the blocks, and the block of each forward node, from the repetition of the nodes that
/// read parameters.
fn by_repetition(graph: &Graph, forward: &[Node]) -> (Vec<String>, Vec<Option<usize>>) {
    let none = || (vec![], vec![None; forward.len()]);
    let anchors = anchors(graph, forward);
    let Some((from, to, period)) = longest_run(graph, forward, &anchors) else {
        return none();
    };
    let crossing = crossing(graph, forward);
    // The cheapest border between anchor `a - 1` and anchor `a`, as a position in `forward`. Of
    // equal ones, the first.
    let border = |a: usize| {
        let low = if a == 0 { 0 } else { anchors[a - 1].0 + 1 };
        (low..=anchors[a].0)
            .min_by_key(|&at| crossing[at])
            .unwrap_or(low)
    };
    let offset = (0..period)
        .min_by_key(|&o| {
            let borders: Vec<u64> = (from + o..to)
                .step_by(period)
                .map(|a| crossing[border(a)])
                .collect();
            // The fewest bytes on average; then the most complete blocks; then the latest, because
            // the nodes before the first block may look like the end of a block (the norm of the
            // embeddings, in a model whose blocks end with a norm).
            (
                borders.iter().sum::<u64>() / borders.len() as u64,
                Reverse((to - from - o) / period),
                Reverse(o),
            )
        })
        .unwrap_or(0);
    let mut starts: Vec<usize> = (from + offset..to).step_by(period).map(border).collect();
    // The rest behind the last complete block is a block if it is large enough. Otherwise it
    // belongs to `after`.
    let rest = (to - from - offset) % period;
    let enough = |anchors: usize| PARTIAL * period as f64 <= anchors as f64;
    let mut end = match rest {
        0 => next_border(&anchors, to, border, &crossing),
        _ if enough(rest) => next_border(&anchors, to, border, &crossing),
        _ => starts.pop().unwrap_or(0),
    };
    if enough(offset) {
        // The first block begins before the repetition, at most by the number of anchors that it
        // lacks.
        let low = from.saturating_sub(period - offset);
        let first = (low..=from)
            .rev()
            .min_by_key(|&a| crossing[border(a)])
            .unwrap_or(from);
        starts.insert(0, border(first));
    }
    if starts.len() < 2 {
        return none();
    }
    end = end.max(starts[starts.len() - 1] + 1);
    let own = (0..forward.len())
        .map(|i| {
            if i < end {
                starts
                    .partition_point(|&start| start <= i)
                    .checked_sub(1)
                    .map(|b| b + 1)
            } else {
                None
            }
        })
        .collect();
    (
        (0..starts.len()).map(|i| format!("block.{i}")).collect(),
        own,
    )
}

/// The end of the last block: the border before the next anchor, or the cheapest place behind the
/// last anchor.
fn next_border(
    anchors: &[(usize, usize)],
    to: usize,
    border: impl Fn(usize) -> usize,
    crossing: &[u64],
) -> usize {
    if to < anchors.len() {
        return border(to);
    }
    let low = anchors[to - 1].0 + 1;
    // The first of the cheapest, because the loss follows.
    (low..crossing.len())
        .min_by_key(|&at| (crossing[at] == 0, crossing[at]))
        .unwrap_or(low)
}

/// The forward nodes that read a parameter and something else: position in `forward`, number of
/// their kind. A kind is the op, its attributes and all types.
fn anchors(graph: &Graph, forward: &[Node]) -> Vec<(usize, usize)> {
    // True for parameters, and for values that are computed from one parameter alone: a transposed
    // or cast weight.
    let mut weight: Table<Value, bool> = Table::filled(graph.values.len(), false);
    for state in graph
        .states
        .values()
        .filter(|state| state.kind == StateKind::Param)
    {
        weight[state.before] = true;
    }
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    let mut anchors = vec![];
    let positions: BTreeMap<Node, usize> = forward.iter().copied().zip(0..).collect();
    for &node in graph
        .order
        .iter()
        .filter(|&&node| graph.nodes[node].phase == Phase::Forward)
    {
        let data = &graph.nodes[node];
        if !data.inputs.iter().any(|&value| weight[value]) {
            continue;
        }
        if data.inputs.iter().all(|&value| weight[value]) && data.inputs.len() == 1 {
            for &output in &data.outputs {
                weight[output] = true;
            }
            continue;
        }
        let types: Vec<&TensorType> = data
            .inputs
            .iter()
            .chain(&data.outputs)
            .map(|&v| &graph.values[v].ty)
            .collect();
        let kind = format!("{} {:?} {types:?}", data.op.name(), data.op.attrs());
        let next = kinds.len();
        if let Some(&at) = positions.get(&node) {
            anchors.push((at, *kinds.entry(kind).or_insert(next)));
        }
    }
    anchors
}

/// The repetition with the most work: anchors `from..to`, and their period. Of equal ones, the
/// shortest period.
fn longest_run(
    graph: &Graph,
    forward: &[Node],
    anchors: &[(usize, usize)],
) -> Option<(usize, usize, usize)> {
    let n = anchors.len();
    let mut sums = vec![0.0];
    for &(at, _) in anchors {
        sums.push(sums[sums.len() - 1] + work(graph, forward[at]));
    }
    let mut best: Option<(f64, (usize, usize, usize))> = None;
    for period in 1..=n / 2 {
        let mut from = 0;
        for i in 0..=n - period {
            if i + period < n && anchors[i].1 == anchors[i + period].1 {
                continue;
            }
            // Each of the anchors from..i equals the anchor one period later. A repetition has at
            // least two periods.
            if from + period <= i {
                let covered = sums[i + period] - sums[from];
                if best.is_none_or(|(most, _)| most < covered) {
                    best = Some((covered, (from, i + period, period)));
                }
            }
            from = i + 1;
        }
    }
    best.map(|(_, run)| run)
}

/// Bytes of forward values that are computed before each position of `forward` and read by a
/// forward node at or after it; there is one entry more than nodes. Only values that depend on a
/// parameter count, because masks and tables cross every border.
fn crossing(graph: &Graph, forward: &[Node]) -> Vec<u64> {
    let positions: BTreeMap<Node, usize> = forward.iter().copied().zip(0..).collect();
    let users = users(graph, &graph.order);
    let mut change = vec![0i128; forward.len() + 2];
    let mut trained: Table<Node, bool> = Table::filled(graph.nodes.len(), false);
    for (at, &node) in forward.iter().enumerate() {
        trained[node] = graph.nodes[node]
            .inputs
            .iter()
            .map(|&value| graph.root(value))
            .any(|root| {
                parameter(graph, root).is_some()
                    || graph.def_node(root).is_some_and(|def| trained[def])
            });
        if !trained[node] {
            continue;
        }
        for &value in &graph.nodes[node].outputs {
            let last = users[value]
                .iter()
                .filter_map(|user| positions.get(user))
                .max();
            if let Some(&last) = last {
                let bytes = i128::from(graph.values[value].ty.bytes());
                change[at + 1] += bytes;
                change[last + 1] -= bytes;
            }
        }
    }
    let mut live = 0;
    let sum = |change: &i128| {
        live += change;
        live as u64
    };
    change[..=forward.len()].iter().map(sum).collect()
}

/// Blocks of backward nodes, by their operands and results, for models without module paths.
fn by_operands(
    graph: &Graph,
    backward: &[Node],
    forward: &Table<Node, Option<usize>>,
    after: usize,
) -> Vec<usize> {
    let users = users(graph, &graph.order);
    // First and last block whose forward reads a value.
    let readers = |root: Value| {
        let blocks = users[root].iter().filter_map(|&user| forward[user]);
        blocks.fold(None, |span: Option<(usize, usize)>, b| {
            Some(span.map_or((b, b), |(low, high)| (low.min(b), high.max(b))))
        })
    };
    let only_reader = |root: Value| {
        readers(root)
            .filter(|(low, high)| low == high)
            .map(|(block, _)| block)
    };
    // A node that computes a parameter's gradient, before it is summed, transposed or reshaped,
    // belongs to the parameter's block.
    let mut known: Table<Node, Option<usize>> = Table::filled(graph.nodes.len(), None);
    for (state, gradient) in gradients(graph) {
        let Some(block) = only_reader(graph.states[state].before) else {
            continue;
        };
        let mut value = gradient;
        while let Some(node) = graph
            .def_node(value)
            .filter(|&node| graph.nodes[node].phase == Phase::Backward)
        {
            known[node].get_or_insert(block);
            match graph.nodes[node].inputs[..] {
                [only] => value = only,
                _ => break,
            }
        }
    }
    let mut found: Table<Node, Option<usize>> = Table::filled(graph.nodes.len(), None);
    let mut latest = after;
    let mut blocks = vec![];
    for &node in backward {
        let roots: Vec<Value> = graph.nodes[node]
            .inputs
            .iter()
            .map(|&value| graph.root(value))
            .collect();
        let weights = || {
            roots
                .iter()
                .filter(|&&r| parameter(graph, r).is_some())
                .find_map(|&r| only_reader(r))
        };
        // Values of `before`, and values that several blocks read (masks, tables), give no
        // information. The input of a block is a result of the block before, and belongs to the
        // block that reads it.
        let activation = |&root: &Value| {
            let def = forward[graph.def_node(root)?].filter(|&block| 0 < block)?;
            match readers(root) {
                None => Some(def),
                Some((low, high)) => (low == high && high <= def + 1).then_some(high),
            }
        };
        let operand = |&root: &Value| found[graph.def_node(root)?];
        let block = known[node]
            .or_else(weights)
            .or_else(|| roots.iter().filter_map(activation).max())
            .or_else(|| roots.iter().filter_map(operand).min())
            .unwrap_or(latest);
        found[node] = Some(block);
        latest = block;
        blocks.push(block);
    }
    blocks
}

/// Parameters and their gradients, with or without an optimizer attached: state, gradient.
fn gradients(graph: &Graph) -> Vec<(State, Value)> {
    let mut all = graph.gradients.clone();
    for output in &graph.outputs {
        let state = output
            .name
            .strip_prefix("grad.")
            .and_then(|path| graph.states.iter().find(|(_, state)| state.path == path));
        all.extend(state.map(|(state, _)| (state, output.value)));
    }
    for &node in graph
        .order
        .iter()
        .filter(|&&node| graph.nodes[node].phase == Phase::Optimizer)
    {
        let data = &graph.nodes[node];
        let computed = |value: &Value| {
            graph
                .def_node(graph.root(*value))
                .is_some_and(|def| graph.nodes[def].phase == Phase::Backward)
        };
        let pair = |inputs: &[Value]| {
            let state = inputs
                .iter()
                .find_map(|&value| parameter(graph, graph.root(value)));
            state.zip(inputs.iter().copied().find(computed))
        };
        // A group may have several updates, one per step.
        let steps = data.op.body().map_or(&[][..], |body| body.steps());
        let operands = |step: &Step| {
            step.inputs
                .iter()
                .filter_map(|&i| data.inputs.get(i).copied())
                .collect::<Vec<_>>()
        };
        let pairs: Vec<_> = steps
            .iter()
            .filter_map(|step| pair(&operands(step)))
            .collect();
        all.extend(if pairs.is_empty() {
            pair(&data.inputs).into_iter().collect()
        } else {
            pairs
        });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbered_components_are_found() {
        assert_eq!(numbers("h.0.mlp.2.w"), [(2, 3), (8, 9)]);
        assert_eq!(numbers("0"), [(0, 1)]);
        assert_eq!(numbers("model.ln1"), []);
        assert_eq!(numbers(""), []);
    }

    #[test]
    fn what_stands_between_blocks_belongs_to_the_last_that_began() {
        assert_eq!(
            in_between(&[None, Some(1), None, Some(2), None], 0, 3),
            [0, 1, 1, 2, 3]
        );
        assert_eq!(in_between(&[None, None], 0, 1), [0, 0]);
    }
}
