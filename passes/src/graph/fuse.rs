//! Groups ops into kernels: chains of elementwise ops, broadcasts, reductions and normalisations
//! become one `fused` node. So the values between them need no bytes and no memory traffic.
//!
//! Before: a graph in canonical form, including updates. After: the same outputs, states and
//! gradients; groups are `fused` nodes. Their bodies have a [`Space`](ir::op::body::Space), so that
//! the generator of kernels can compute each in one pass over rows.
//!
//! What is grouped:
//! 1. Cheap values are computed where they are read. A constant or a broadcast is copied to each
//!    reader. An elementwise op that the backward reads is also copied, if its operands are kept
//!    anyway. Copies become steps of bodies. They are values of the resulting graph only if the ops
//!    of a group stay separate. So merging equal nodes stays right.
//! 2. A value and all its readers form a group. A value that a product or the backward also reads
//!    stays outside: it exists anyway, and recomputation works best with nodes that need few
//!    operands. (To compute a layer norm again, the sum before it should not be computed again.)
//!    Small values, one per row, may also be read elsewhere.
//! 3. Sums over rows join the kernel that computes the summed value, or else a kernel that reads
//!    it. They add a few numbers to the kernel and save one reading of the operand.
//! 4. Equal updates of small parameters form groups, if their gradients are computed at about the
//!    same time. A group keeps its gradients until the last is computed. All groups of a window
//!    together keep less than a thousandth of the operand bytes of the node that reads most.
//! 5. What updates a parameter and its moments joins one group. A number that several updates read
//!    is computed by none of their kernels, so that no update waits for the gradient of another.
//! 6. A cast of the backward to fewer bytes joins the kernel that computes its operand, which
//!    others read too: it saves one reading of the operand. (In the forward it stays apart, so that
//!    it can be computed again alone.)
//! 7. Ops that compute and read only tiny values and slices, such as a cell of a recurrent network,
//!    form a group, if no other node has to wait for it. Then one kernel starts instead of several.
//!    What is kept of them is computed again together.
//!
//! If a profile shows that a group is slower than its ops, the ops stay separate.
//!
//! A group has one phase and reaches over at most `REACH` nodes. Groups do not depend on each other
//! in a circle. A group must not keep more bytes alive than it saves, except for a few tiny values
//! (rule 7). A group that runs late keeps its operands alive, where separate ops would keep their
//! results. A group that runs early keeps its results alive. So the sum of three gradients that are
//! computed one after the other stays two sums. Updates come after all other nodes, and have their
//! own rule.

use super::canonical::remove_dead;
use super::steps::{REACH, may_join, moves};
use super::{reshape_to, views};
use crate::cost::Cost;
use ir::graph::{Edit, Readers};
use ir::op::Access;
use ir::op::attrs::{Fused, Sizes};
use ir::op::body::{Body, MOST_RESULTS, Step};
use ir::{Graph, Node, Op, Phase, StateKind, Table, TensorType, Value};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;

/// The most operands of a group.
const OPERANDS: usize = 24;
/// The most updates of a group. A GPU has 255 registers per thread. Four updates of `adamw_split`
/// take 235, six take too many.
const UPDATES: usize = 4;
/// Bytes of a gradient. The update of a smaller one takes hardly longer than the launch of its
/// kernel.
const SMALL_UPDATE: u64 = 64 << 10;
/// The updates of a window may keep alive the operand bytes of the node that reads most, divided by
/// this number. No plan needs fewer bytes than this node reads, so no peak rises by more than this
/// share.
const EXCESS: u64 = 1000;
/// Bytes of a tiny value. A kernel takes hardly longer for it than for its launch.
const TINY: u64 = 256 << 10;
/// Tiny values are also smaller than what the forward keeps, divided by this number.
const TINY_SHARE: u64 = 256;
/// A group around tiny values may keep alive the bytes of this number of them.
const TINY_HELD: u64 = 4;
/// A value is small compared with another value that has this number of times its elements.
const SMALL: u64 = 8;

/// Rewrites the graph.
pub fn run(graph: &mut Graph) {
    group(graph, |_| {});
}

/// The same, except that the ops of a group stay separate if `cost` has measured them to be faster
/// than the group.
pub fn run_where_faster(graph: &mut Graph, cost: &dyn Cost) {
    group(graph, |groups| groups.part_slow(cost));
}

fn group(graph: &mut Graph, revise: impl FnOnce(&mut Groups<'_>)) {
    views::rise(graph);
    *graph = graph.compact();
    let copies = copy(graph);
    let mut groups = Groups::alone(graph);
    groups.find(&copies);
    revise(&mut groups);
    *graph = groups.rewrite();
    views::absorb(graph);
    *graph = graph.compact();
}

fn numel(graph: &Graph, value: Value) -> u64 {
    graph.values[value].ty.numel()
}

// --- copies ---

/// Rule 1. Returns each copy with its reader: they become one group.
fn copy(graph: &mut Graph) -> Vec<(Node, Node)> {
    let mut readers = graph.readers();
    let mut pairs = vec![];
    let order = graph.order.clone();
    let mut edit = graph.edit();
    for node in order {
        for reader in copied_to(edit.graph(), &readers, node) {
            let made = add_copy(&mut edit, node, reader);
            let graph = edit.graph();
            let data = &graph.nodes[node];
            readers[data.outputs[0]].retain(|&other| other != Some(reader));
            // The copies' values are the last ones of the table, and have one reader each.
            for _ in made.iter().flat_map(|&new| &graph.nodes[new].outputs) {
                readers.push(vec![Some(reader)]);
            }
            let roots: BTreeSet<Value> = data.inputs.iter().map(|&v| graph.root(v)).collect();
            for root in roots {
                readers[root].push(Some(made[0]));
            }
            pairs.push((made[0], reader));
        }
    }
    edit.finish();
    remove_dead(graph);
    pairs
}

/// The readers that each get a copy of this node; none if it is not cheap, or if it would stay in
/// addition to its copies.
fn copied_to(graph: &Graph, readers: &Readers, node: Node) -> Vec<Node> {
    let data = &graph.nodes[node];
    let &[value] = &data.outputs[..] else {
        return vec![];
    };
    if !may_join(graph, node) || data.op.facts().access != Access::Element || data.op.is_alias() {
        return vec![];
    }
    let Some(all) = readers[value]
        .iter()
        .copied()
        .collect::<Option<Vec<Node>>>()
    else {
        return vec![];
    };
    let is_small = |&operand: &Value| numel(graph, operand) * SMALL <= numel(graph, value);
    let wide: Vec<Value> = data
        .inputs
        .iter()
        .filter(|v| !is_small(v))
        .map(|&v| graph.root(v))
        .collect();
    let backward = |&reader: &Node| graph.nodes[reader].phase == Phase::Backward;
    // An operand that is kept for a reader in the backward, with or without copies.
    let kept = |&root: &Value| {
        let later = |reader: &Option<Node>| reader.is_none_or(|reader| backward(&reader));
        graph.def_node(root).is_none() || readers[root].iter().any(later)
    };
    let to: Vec<Node> = match wide.is_empty() {
        true => all,
        false if data.phase == Phase::Forward && wide.iter().all(kept) => {
            all.into_iter().filter(backward).collect()
        }
        false => vec![],
    };
    let fits = |&reader: &Node| {
        let read: BTreeSet<Value> = graph.nodes[reader]
            .inputs
            .iter()
            .map(|&v| graph.root(v))
            .collect();
        let new = wide.iter().filter(|root| !read.contains(root)).count();
        may_join(graph, reader)
            && new <= 1
            && kernel(graph, readers, &[node, reader]).is_some_and(|kernel| kernel.is_narrow())
    };
    if to.iter().all(fits) { to } else { vec![] }
}

/// Adds a copy of a node before a reader, and copies of the aliases between them.
fn add_copy(edit: &mut Edit<'_>, node: Node, reader: Node) -> Vec<Node> {
    let graph = edit.graph();
    let data = &graph.nodes[node];
    let value = data.outputs[0];
    let name = format!("{}.{}", graph.values[value].name, graph.node_name(reader));
    let (op, inputs) = (data.op.clone(), data.inputs.clone());
    let read = graph.nodes[reader].inputs.clone();

    let made = edit.insert_before(reader, op, &inputs, std::slice::from_ref(&name));
    let made = made.expect("a copy should have the operands of what it copies");
    let copy = edit.graph().nodes[made].outputs[0];
    let mut all = vec![made];
    for (i, input) in read.into_iter().enumerate() {
        let graph = edit.graph();
        if graph.root(input) != value {
            continue;
        }
        if input == value {
            edit.set_input(reader, i, copy);
            continue;
        }
        let op = reshape_to(graph.values[input].ty.shape().iter().copied());
        let alias = edit.insert_before(reader, op, &[copy], &[format!("{name}.{i}")]);
        let alias = alias.expect("an alias should have as many elements as its root");
        edit.set_input(reader, i, edit.graph().nodes[alias].outputs[0]);
        all.push(alias);
    }
    all
}

// --- groups ---

/// A partition of a graph's nodes. An alias is alone in its group: other groups that need it have a
/// step for it.
struct Groups<'a> {
    graph: &'a Graph,
    /// The position of each node in the graph's order.
    position: Table<Node, usize>,
    readers: Readers,
    /// Each node's group.
    group: Table<Node, usize>,
    /// Nodes of each group, in the graph's order; empty once merged into another.
    members: Vec<Vec<Node>>,
    /// Nodes that must have their own kernel.
    apart: BTreeSet<Node>,
    /// Bytes that a group around tiny values may keep alive in addition to what it saves.
    more: u64,
}

impl<'a> Groups<'a> {
    /// Each node is its own group.
    fn alone(graph: &'a Graph) -> Groups<'a> {
        let mut members = vec![vec![]; graph.nodes.len()];
        for &node in &graph.order {
            members[ir::Id::index(node)].push(node);
        }
        let group = graph.nodes.ids().map(ir::Id::index).collect();
        Groups {
            graph,
            position: graph.positions(),
            readers: graph.readers(),
            group,
            members,
            apart: BTreeSet::new(),
            more: 0,
        }
    }

    /// Rules 2 to 7. Each copy is grouped with its reader first.
    fn find(&mut self, copies: &[(Node, Node)]) {
        for &(copy, reader) in copies {
            self.merge(&[copy, reader]);
        }
        // Some readers can become one group only after others have.
        let mut merged = true;
        while merged {
            merged = false;
            for &node in &self.graph.order {
                merged |= may_join(self.graph, node) && self.join_readers(node);
            }
        }
        for &node in &self.graph.order {
            if self.is_sum(node) {
                self.join_neighbour(node);
            }
        }
        for &node in &self.graph.order {
            if let Some(maker) = self.narrowed(node) {
                self.merge(&[node, maker]);
            }
        }
        self.join_tiny();
        self.join_moments();
        self.join_updates();
    }

    /// Separates groups that are slower than their ops.
    fn part_slow(&mut self, cost: &dyn Cost) {
        // `cost` needs a graph that has the node of the kernel.
        let mut fused: Option<Graph> = None;
        for g in 0..self.members.len() {
            let members = &self.members[g];
            let apart: Option<f64> = members
                .iter()
                .map(|&node| cost.least(self.graph, node))
                .sum();
            let Some(apart) = apart.filter(|_| self.worth_it(members)) else {
                continue;
            };
            let Some(kernel) = kernel(self.graph, &self.readers, members) else {
                continue;
            };
            let fused = fused.get_or_insert_with(|| self.graph.clone());
            let node = kernel.add_to(fused, members[0]);
            if cost
                .least(fused, node)
                .is_some_and(|together| apart < together)
            {
                for node in std::mem::take(&mut self.members[g]) {
                    self.group[node] = ir::Id::index(node);
                    self.members[ir::Id::index(node)] = vec![node];
                    self.apart.insert(node);
                }
            }
        }
    }

    /// True for a sum over rows, alone in its group or not.
    fn is_sum(&self, node: Node) -> bool {
        let data = &self.graph.nodes[node];
        let small =
            || numel(self.graph, data.outputs[0]) * SMALL <= numel(self.graph, data.inputs[0]);
        let over_rows = match &data.op {
            Op::Sum(sum) => sum.dims.first() == Some(&0),
            _ => false,
        };
        over_rows && may_join(self.graph, node) && small()
    }

    /// Rule 2: the node and the readers of its results.
    fn join_readers(&mut self, node: Node) -> bool {
        let mut nodes = vec![node];
        let mut small = vec![];
        for &value in &self.graph.nodes[node].outputs {
            let readers = || {
                self.readers[value]
                    .iter()
                    .copied()
                    .flatten()
                    .filter(|&r| may_join(self.graph, r))
            };
            let around = readers().chain(self.members[self.group[node]].iter().copied());
            let widest = around.map(|node| self.widest(node)).max().unwrap_or(0);
            if numel(self.graph, value) * SMALL <= widest {
                small.extend(readers());
            } else if self.readers[value].contains(&None) {
                nodes.clear();
                break;
            } else {
                nodes.extend(self.readers[value].iter().flatten());
            }
        }
        let mut merged = self.merge(&nodes);
        for reader in small {
            merged |= self.merge(&[node, reader]);
        }
        merged
    }

    /// Elements of the widest operand or result.
    fn widest(&self, node: Node) -> u64 {
        let data = &self.graph.nodes[node];
        data.inputs
            .iter()
            .chain(&data.outputs)
            .map(|&v| numel(self.graph, v))
            .max()
            .unwrap_or(0)
    }

    /// Rule 3: the group of a sum, if it computes no wide value, joins a group that computes or
    /// reads one of its wide operands.
    fn join_neighbour(&mut self, node: Node) {
        let members = self.members[self.group[node]].clone();
        let widest = members
            .iter()
            .map(|&member| self.widest(member))
            .max()
            .unwrap_or(0);
        let is_wide = |&value: &Value| widest < numel(self.graph, value) * SMALL;
        let inside = |node: &Node| members.contains(node);
        let leaves = |v: &&Value| {
            self.readers[**v]
                .iter()
                .any(|reader| reader.is_none_or(|r| !inside(&r)))
        };
        if members
            .iter()
            .flat_map(|&m| &self.graph.nodes[m].outputs)
            .filter(leaves)
            .any(is_wide)
        {
            return;
        }
        let roots = members
            .iter()
            .flat_map(|&m| &self.graph.nodes[m].inputs)
            .map(|&v| self.graph.root(v));
        let wide: BTreeSet<Value> = roots.filter(is_wide).collect();
        let makers = wide.iter().filter_map(|&root| self.graph.def_node(root));
        let readers = wide
            .iter()
            .flat_map(|&root| self.readers[root].iter().copied().flatten());
        let others: Vec<Node> = makers.chain(readers).filter(|node| !inside(node)).collect();
        for other in others {
            if self.merge(&[node, other]) {
                return;
            }
        }
    }

    /// Rule 6: the node that computes the operand of a cast of the backward to fewer bytes.
    fn narrowed(&self, node: Node) -> Option<Node> {
        let (graph, data) = (self.graph, &self.graph.nodes[node]);
        if !matches!(data.op, Op::Cast(_)) || data.phase != Phase::Backward {
            return None;
        }
        let (from, to) = (data.inputs[0], data.outputs[0]);
        let bytes = |value: Value| graph.values[value].ty.bytes();
        let maker = graph.def_node(graph.root(from))?;
        (bytes(to) < bytes(from)).then_some(maker)
    }

    /// Rule 7: what computes a tiny value and what reads it.
    fn join_tiny(&mut self) {
        let graph = self.graph;
        let most = TINY.min(self.kept_bytes() / TINY_SHARE);
        self.more = TINY_HELD * most;
        let tiny = |&node: &Node| {
            let data = &graph.nodes[node];
            let read = data.inputs.iter().filter(|_| !moves(&data.op));
            let mut all = read.chain(&data.outputs);
            all.all(|&value| graph.values[value].ty.bytes() <= most)
        };
        for &node in graph.order.iter().filter(|node| tiny(node)) {
            let outputs = graph.nodes[node].outputs.iter();
            let readers = outputs.flat_map(|&v| self.readers[v].iter().flatten());
            let around = readers.chain([&node]).copied();
            let around = around.filter(|reader| tiny(reader) && may_join(graph, *reader));
            let phase = |node: Node| graph.nodes[node].phase;
            let mut around: Vec<(Phase, usize, Node)> = around
                .map(|reader| (phase(reader), self.position[reader], reader))
                .collect();
            around.sort_unstable();
            around.dedup();
            for pair in around.windows(2) {
                let [(phase, _, a), (other, _, b)] = [pair[0], pair[1]];
                if phase != other || phase == Phase::Optimizer {
                    continue;
                }
                let groups = BTreeSet::from([self.group[a], self.group[b]]);
                let members = self.joined(&groups);
                if members.iter().all(tiny) && !self.makes_others_wait(&members) {
                    self.merge_within(&[a, b], self.more);
                }
            }
        }
    }

    /// The most bytes of the forward that are kept for the backward at a time.
    fn kept_bytes(&self) -> u64 {
        let graph = self.graph;
        // By position, the bytes that a node makes and those that die after it.
        let mut made = vec![0; graph.order.len()];
        let mut dead = made.clone();
        for (value, data) in graph.values.iter() {
            let Some(node) = graph.def_node(value) else {
                continue;
            };
            let is_kept =
                graph.nodes[node].phase == Phase::Forward && !graph.nodes[node].op.is_alias();
            let readers = self.readers[value].iter().flatten();
            let later = readers.filter(|&&reader| graph.nodes[reader].phase == Phase::Backward);
            let last = later.map(|&reader| self.position[reader]).max();
            if let Some(last) = last.filter(|_| is_kept) {
                made[self.position[node]] += data.ty.bytes();
                dead[last] += data.ty.bytes();
            }
        }
        let alive = made.iter().zip(dead).scan(0, |alive, (made, dead)| {
            let most = *alive + made;
            *alive = most - dead;
            Some(most)
        });
        alive.max().unwrap_or(0)
    }

    /// Joins the groups of these nodes to one group, if that is allowed.
    fn merge(&mut self, nodes: &[Node]) -> bool {
        self.merge_within(nodes, 0)
    }

    /// The same for groups that keep at most `more` bytes alive in addition to what they save.
    fn merge_within(&mut self, nodes: &[Node], more: u64) -> bool {
        let groups: BTreeSet<usize> = nodes.iter().map(|&node| self.group[node]).collect();
        let Some(&first) = groups.first().filter(|_| 1 < groups.len()) else {
            return false;
        };
        let members = self.joined(&groups);
        let phase = self.graph.nodes[members[0]].phase;
        let alike =
            |&node: &Node| may_join(self.graph, node) && self.graph.nodes[node].phase == phase;
        if !members.iter().all(alike)
            || self.makes_updates_wait(&members)
            || self.circular(&groups, &members)
            || self.place(&members, more).is_none()
        {
            return false;
        }
        if !kernel(self.graph, &self.readers, &members).is_some_and(|kernel| kernel.is_narrow()) {
            return false;
        }
        for &group in groups.iter().skip(1) {
            self.members[group].clear();
        }
        members.iter().for_each(|&node| self.group[node] = first);
        self.members[first] = members;
        true
    }

    /// The members of groups, in the graph's order.
    fn joined(&self, groups: &BTreeSet<usize>) -> Vec<Node> {
        let members = groups.iter().flat_map(|&g| &self.members[g]);
        let mut members: Vec<Node> = members.copied().collect();
        members.sort_unstable_by_key(|&node| self.position[node]);
        members
    }

    /// True if a node that runs before the last of these members would wait for it, because it
    /// needs one of the others.
    fn makes_others_wait(&self, members: &[Node]) -> bool {
        let mut waiting: BTreeSet<Node> = BTreeSet::new();
        let [first, .., last] = members else {
            return false;
        };
        let (start, end) = (self.position[*first], self.position[*last]);
        if REACH < end - start {
            return true;
        }
        let between = &self.graph.order[start..end];
        between.iter().any(|&node| {
            let waits = !members.contains(&node) && self.needs_one(node, members, &waiting);
            if waits {
                waiting.insert(node);
            }
            waits && !self.graph.nodes[node].op.is_alias()
        })
    }

    /// True if a node reads what one of these nodes computes.
    fn needs_one(&self, node: Node, members: &[Node], others: &BTreeSet<Node>) -> bool {
        let inputs = self.graph.nodes[node].inputs.iter();
        let mut made = inputs.filter_map(|&value| self.graph.def_node(value));
        made.any(|node| members.contains(&node) || others.contains(&node))
    }

    /// True if a number for several updates would be computed by the kernel of one of them, for
    /// whose gradient the others would wait.
    fn makes_updates_wait(&self, members: &[Node]) -> bool {
        let of_optimizer = |node: &&Node| self.graph.nodes[**node].phase == Phase::Optimizer;
        let mut updates = members.iter().filter(of_optimizer);
        let leaves = |node: &Node| {
            let outputs = &self.graph.nodes[*node].outputs;
            let mut readers = outputs
                .iter()
                .flat_map(|&v| self.readers[v].iter().flatten());
            self.widest(*node) <= 1 && readers.any(|reader| !members.contains(reader))
        };
        members.iter().any(|&node| 1 < self.widest(node)) && updates.any(leaves)
    }

    /// Rule 5: what updates one parameter and its moments, which may have no value in common.
    fn join_moments(&mut self) {
        let graph = self.graph;
        let update_of = |value: Value| {
            let node = graph.def_node(graph.root(value));
            node.filter(|&node| graph.nodes[node].phase == Phase::Optimizer)
        };
        let of_kind = |kind| {
            let states = graph.states.values();
            states.filter(move |state| state.kind == kind)
        };
        let moments = of_kind(StateKind::Moment);
        let moments: BTreeMap<Value, Value> = moments.map(|m| (m.before, m.after)).collect();
        for parameter in of_kind(StateKind::Param) {
            let Some(update) = update_of(parameter.after) else {
                continue;
            };
            let read: BTreeSet<Value> = self.members[self.group[update]]
                .iter()
                .flat_map(|&node| &graph.nodes[node].inputs)
                .map(|&value| graph.root(value))
                .collect();
            let own = read.iter().filter_map(|value| moments.get(value));
            for other in own.filter_map(|&after| update_of(after)) {
                self.merge(&[update, other]);
            }
        }
    }

    /// Rule 4: equal updates whose gradients are computed at about the same time, as long as all
    /// these gradients may be kept at once.
    fn join_updates(&mut self) {
        let graph = self.graph;
        // The nodes that compute the operands of a node, and the position of the last one that is
        // neither an update nor an option.
        let makers = |node: Node| {
            graph.nodes[node]
                .inputs
                .iter()
                .filter_map(|&value| Some((value, graph.def_node(graph.root(value))?)))
        };
        let of_optimizer = |node: Node| graph.nodes[node].phase == Phase::Optimizer;
        let mut ready = Table::filled(graph.nodes.len(), 0);
        for &node in &graph.order {
            let place = |(_, maker)| {
                if of_optimizer(maker) {
                    ready[maker]
                } else {
                    self.position[maker]
                }
            };
            ready[node] = makers(node).map(place).max().unwrap_or(0);
        }
        let bytes = |node: Node| {
            let members = self.members[self.group[node]].iter();
            let operands = members.flat_map(|&member| makers(member));
            let gradients = operands.filter(|&(_, maker)| !of_optimizer(maker));
            gradients
                .map(|(value, _)| graph.values[value].ty.bytes())
                .sum::<u64>()
        };
        let most = self.neediest() / EXCESS;
        // Each window gets a few updates.
        let small =
            |&&node: &&Node| self.is_update(node) && bytes(node) <= SMALL_UPDATE.min(most / 4);
        let mut updates: Vec<Node> = graph.order.iter().filter(small).copied().collect();
        updates.sort_by_key(|&node| (ready[node], self.position[node]));
        // One window at a time: its groups hold at most its own gradients, and none of another
        // window.
        let mut groups: Vec<Vec<Node>> = vec![];
        let (mut held, mut window) = (0, 0);
        for node in updates {
            held += bytes(node);
            if most < held {
                (held, window) = (bytes(node), groups.len());
            }
            let like = |group: &&mut Vec<Node>| group.len() < UPDATES && self.alike(group[0], node);
            match groups[window..].iter_mut().find(like) {
                Some(group) => group.push(node),
                None => groups.push(vec![node]),
            }
        }
        for group in groups {
            let all = group
                .iter()
                .flat_map(|&node| &self.members[self.group[node]]);
            let mut members: Vec<Node> = all.copied().collect();
            if kernel(graph, &self.readers, &members).is_none() {
                continue;
            }
            members.sort_unstable_by_key(|&node| self.position[node]);
            let first = self.group[members[0]];
            for &node in &members {
                self.members[self.group[node]].clear();
                self.group[node] = first;
            }
            self.members[first] = members;
        }
    }

    /// True for an update, if no node reads its results, and if its group is it alone or it and
    /// casts.
    fn is_update(&self, node: Node) -> bool {
        let data = &self.graph.nodes[node];
        let leaves = |&value: &Value| self.readers[value].iter().all(Option::is_none);
        let is_cast = |other: &Node| matches!(self.graph.nodes[*other].op, Op::Cast(_));
        let mut members = self.members[self.group[node]].iter();
        data.phase == Phase::Optimizer
            && members.all(|other| *other == node || is_cast(other))
            && may_join(self.graph, node)
            && data.outputs.iter().all(leaves)
    }

    /// True if two updates differ only in what they update.
    fn alike(&self, node: Node, other: Node) -> bool {
        let [a, b] = [node, other].map(|node| &self.members[self.group[node]]);
        let same = |(&a, &b): (&Node, &Node)| {
            let [a, b] = [a, b].map(|node| &self.graph.nodes[node]);
            let ty = |&value: &Value| &self.graph.values[value].ty;
            a.op == b.op && a.inputs.iter().map(ty).eq(b.inputs.iter().map(ty))
        };
        a.len() == b.len() && a.iter().zip(b).all(same)
    }

    /// The most bytes that a node of forward or backward reads, among nodes that no group can
    /// contain.
    fn neediest(&self) -> u64 {
        let graph = self.graph;
        let alone =
            |&&node: &&Node| graph.nodes[node].phase != Phase::Optimizer && !may_join(graph, node);
        let reads = |&node: &Node| {
            let operands: BTreeSet<Value> = graph.nodes[node]
                .inputs
                .iter()
                .map(|&value| graph.root(value))
                .collect();
            operands
                .into_iter()
                .map(|value| graph.values[value].ty.bytes())
                .sum()
        };
        graph
            .order
            .iter()
            .filter(alone)
            .map(reads)
            .max()
            .unwrap_or(0)
    }

    /// True if a group of these members would depend on itself, or reach too far.
    fn circular(&self, groups: &BTreeSet<usize>, members: &[Node]) -> bool {
        let place = |node: &Node| self.position[*node];
        let (start, end) = (
            members.first().map_or(0, place),
            members.last().map_or(0, place),
        );
        if REACH < end - start {
            return true;
        }
        // Groups that need the members, as far as a group can reach.
        let mut seen: BTreeSet<usize> = groups.clone();
        let mut stack: Vec<(Node, bool)> = members.iter().map(|&node| (node, false)).collect();
        while let Some((node, outside)) = stack.pop() {
            for reader in self.graph.nodes[node]
                .outputs
                .iter()
                .flat_map(|&v| self.readers[v].iter().copied().flatten())
            {
                let group = self.group[reader];
                if groups.contains(&group) {
                    if outside {
                        return true;
                    }
                } else if self.members[group]
                    .first()
                    .is_some_and(|m| place(m) <= end + 2 * REACH)
                    && seen.insert(group)
                {
                    stack.extend(self.members[group].iter().map(|&member| (member, true)));
                }
            }
        }
        false
    }

    /// The position at which a group of these members keeps at most `more` bytes alive in addition
    /// to those of separate members: late, or as soon as its operands are computed. `None` if it
    /// keeps more at both positions.
    fn place(&self, members: &[Node], more: u64) -> Option<usize> {
        let makers = members
            .iter()
            .flat_map(|&node| &self.graph.nodes[node].inputs);
        let makers = makers.filter_map(|&value| self.graph.def_node(self.graph.root(value)));
        let makers = makers
            .filter(|node| !members.contains(node))
            .map(|node| self.position[node]);
        let early = makers.chain([self.position[members[0]]]).max()?;
        [self.position[self.last_wide(members)], early]
            .into_iter()
            .find(|&place| !self.holds(members, place, more))
    }

    /// True if, while other nodes run, a group of these members at this place keeps more bytes
    /// alive than separate members and `more`.
    fn holds(&self, members: &[Node], end: usize, more: u64) -> bool {
        // Nodes that need a member run after the group. All other nodes up to the group's place run
        // before it.
        let mut after: BTreeSet<Node> = BTreeSet::new();
        (1..members.len()).any(|i| {
            let (before, rest) = members.split_at(i);
            let seam = Seam {
                members,
                before,
                rest,
                next: self.position[rest[0]],
            };
            let (some_before, some_after) = self.between(&seam, end, &mut after);
            some_before && more < self.waiting_holds(&seam)
                || some_after && more < self.hurrying_holds(&seam)
        })
    }

    /// Whether nodes between the members around a seam run before a group at `end`, and whether
    /// some run after it. Adds the nodes that need a member to `after`.
    fn between(&self, seam: &Seam<'_>, end: usize, after: &mut BTreeSet<Node>) -> (bool, bool) {
        let graph = self.graph;
        let last = self.position[seam.before[seam.before.len() - 1]];
        let (mut some_before, mut some_after) = (false, false);
        for &node in &graph.order[last + 1..seam.next] {
            let needs = self.needs_one(node, seam.members, after);
            if needs {
                after.insert(node);
            }
            let runs = !graph.nodes[node].op.is_alias();
            some_after |= runs && (needs || end < self.position[node]);
            some_before |= runs && !needs && self.position[node] <= end;
        }
        (some_before, some_after)
    }

    /// The bytes that the members before a seam keep alive by waiting, less those that they save:
    /// without the group their operands would have died, and their results would live.
    fn waiting_holds(&self, seam: &Seam<'_>) -> u64 {
        let is_read_later = |value: &Value| self.is_read(*value, seam.next, |_| true);
        let held = self.operands(seam.before, seam.members);
        let saved = self.results(seam.before);
        let held = self.bytes(held.filter(|value| !is_read_later(value)));
        held.saturating_sub(self.bytes(saved.filter(is_read_later)))
    }

    /// The bytes that the members after a seam keep alive by running early, less those that they
    /// save: their results live earlier, and values that only members read later die earlier.
    fn hurrying_holds(&self, seam: &Seam<'_>) -> u64 {
        let by_others =
            |value: Value, at: usize| self.is_read(value, at, |node| !seam.members.contains(&node));
        let is_made = |value: &Value| {
            let def = self.graph.def_node(*value);
            def.is_some_and(|node| self.position[node] < seam.next)
        };
        let dies = |value: &Value| {
            self.is_read(*value, seam.next, |_| true) && !by_others(*value, seam.next)
        };
        let kept = self
            .operands(seam.rest, seam.members)
            .chain(self.results(seam.before));
        let early = self.results(seam.rest);
        let held = self.bytes(early.filter(|&value| by_others(value, 0)));
        held.saturating_sub(self.bytes(kept.filter(is_made).filter(dies)))
    }

    /// True if a node at or after position `at` reads the value, or if the value leaves the step.
    fn is_read(&self, value: Value, at: usize, by: impl Fn(Node) -> bool) -> bool {
        let mut readers = self.readers[self.graph.root(value)].iter();
        readers.any(|reader| reader.is_none_or(|node| at <= self.position[node] && by(node)))
    }

    fn results(&self, of: &[Node]) -> impl Iterator<Item = Value> {
        of.iter()
            .flat_map(|&node| self.graph.nodes[node].outputs.iter().copied())
    }

    /// The operands of nodes that are not computed by members. Small views are left out: the
    /// kernel will read them from what they are views of.
    fn operands(&self, of: &[Node], members: &[Node]) -> impl Iterator<Item = Value> {
        let graph = self.graph;
        let inputs = of.iter().flat_map(|&node| &graph.nodes[node].inputs);
        let widest = members.iter().map(|&node| self.widest(node)).max();
        let widest = widest.unwrap_or(0);
        inputs
            .map(|&value| graph.root(value))
            .filter(move |&value| {
                let counts = |node: Node| {
                    let small = numel(graph, value) * SMALL <= widest;
                    let is_view = moves(&graph.nodes[node].op);
                    !(members.contains(&node) || small && is_view)
                };
                graph.def_node(value).is_some_and(counts)
            })
    }

    /// The bytes of values, each counted once.
    fn bytes(&self, values: impl Iterator<Item = Value>) -> u64 {
        let values: BTreeSet<Value> = values.collect();
        let bytes = values.iter().map(|&v| self.graph.values[v].ty.bytes());
        bytes.sum()
    }

    /// The last wide member. The readers of its results come after it.
    fn last_wide(&self, members: &[Node]) -> Node {
        let last = members
            .iter()
            .rev()
            .find(|&&node| !self.is_sum(node))
            .or(members.last());
        *last.expect("a group should have members")
    }

    /// The graph with a node for each group.
    fn rewrite(&self) -> Graph {
        let mut new = self.graph.clone();
        let units = self.units();
        new.order = self
            .sorted(&units)
            .into_iter()
            .map(|g| {
                let unit = &units[&g];
                match &unit.kernel {
                    Some(kernel) => kernel.add_to(&mut new, unit.node),
                    None => unit.node,
                }
            })
            .collect();
        // Aliases of values inside a group are still in the graph, and are dead.
        remove_dead(&mut new);
        new
    }

    /// The unit of each group with members.
    fn units(&self) -> BTreeMap<usize, Unit> {
        let groups = self.members.iter().enumerate();
        groups
            .filter(|(_, members)| !members.is_empty())
            .map(|(g, members)| {
                let node = self.last_wide(members);
                let kernel = self
                    .worth_it(members)
                    .then(|| kernel(self.graph, &self.readers, members))
                    .flatten();
                let is_update = self.graph.nodes[node].phase == Phase::Optimizer;
                let more = if is_update { 0 } else { self.more };
                let place = self.place(members, 0);
                let place = place.or_else(|| self.place(members, more));
                let place = place.unwrap_or(self.position[node]);
                let unit = Unit {
                    node,
                    kernel,
                    place,
                };
                (g, unit)
            })
            .collect()
    }

    /// The groups in order of their places, each after the groups that it needs.
    fn sorted(&self, units: &BTreeMap<usize, Unit>) -> Vec<usize> {
        let mut missing: BTreeMap<usize, usize> = BTreeMap::new();
        let mut needed_by: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for &g in units.keys() {
            let needs = self.needs(g);
            missing.insert(g, needs.len());
            for other in needs {
                needed_by.entry(other).or_default().push(g);
            }
        }
        let free = missing
            .iter()
            .filter(|&(_, &n)| n == 0)
            .map(|(&g, _)| Reverse((units[&g].place, g)));
        let mut ready: BinaryHeap<Reverse<(usize, usize)>> = free.collect();
        let mut order = vec![];
        while let Some(Reverse((_, g))) = ready.pop() {
            order.push(g);
            for &other in needed_by.get(&g).map_or(&[][..], |list| list) {
                let n = missing
                    .get_mut(&other)
                    .expect("each group should have its needs");
                *n -= 1;
                if *n == 0 {
                    ready.push(Reverse((units[&other].place, other)));
                }
            }
        }
        assert_eq!(
            order.len(),
            units.len(),
            "groups should not need each other in a circle"
        );
        order
    }

    /// The other groups that compute operands of a group's members.
    fn needs(&self, g: usize) -> BTreeSet<usize> {
        let graph = self.graph;
        let maker = |value: Value| graph.def_node(value).map(|node| self.group[node]);
        let mut needs: BTreeSet<usize> = BTreeSet::new();
        for &value in self.members[g]
            .iter()
            .flat_map(|&member| &graph.nodes[member].inputs)
        {
            let root = maker(graph.root(value));
            if root != Some(g) {
                needs.extend(root);
                needs.extend(maker(value));
            }
        }
        needs
    }

    /// True if a group needs a generated kernel: it has several ops, or it sums over rows, for
    /// which the op's own kernel has no scratch.
    fn worth_it(&self, members: &[Node]) -> bool {
        let sums = |&node: &Node| {
            self.is_sum(node) || matches!(self.graph.nodes[node].op, Op::LayerNormBwd(_))
        };
        let alone =
            |node: &Node| sums(node) && may_join(self.graph, *node) && !self.apart.contains(node);
        1 < members.len() || members.iter().any(alone)
    }
}

/// The members of a group, split at a place where other nodes run between them.
struct Seam<'a> {
    members: &'a [Node],
    before: &'a [Node],
    rest: &'a [Node],
    /// The position of the first member after the split.
    next: usize,
}

/// A group that becomes one node, or one node that does not change.
struct Unit {
    /// The node that replaces it.
    node: Node,
    kernel: Option<Kernel>,
    place: usize,
}

// --- kernels ---

struct Kernel {
    operands: Vec<Value>,
    body: Body,
    results: Vec<Value>,
}

/// The kernel of these nodes: its operands, its body, the values that leave it. `None` if no kernel
/// computes them.
fn kernel(graph: &Graph, readers: &Readers, members: &[Node]) -> Option<Kernel> {
    let inside: BTreeSet<Node> = members.iter().copied().collect();
    let mut steps = Steps::new(graph, members, &inside);
    let mut results: Vec<(Value, usize)> = vec![];
    for &node in members {
        let data = &graph.nodes[node];
        let inputs = data.inputs.iter().map(|&value| steps.operand(value));
        let inputs = inputs.collect();
        let start = steps.push(data.op.clone(), inputs, data.outputs.len());
        for (&value, at) in data.outputs.iter().zip(start..) {
            steps.number.insert(value, at);
            let leaves = readers[value]
                .iter()
                .any(|reader| reader.is_none_or(|reader| !inside.contains(&reader)));
            if leaves && results.iter().any(|&(_, other)| other == at) {
                return None;
            }
            if leaves {
                results.push((value, at));
            }
        }
    }
    if results.is_empty() || results.len() > MOST_RESULTS {
        return None;
    }
    let (results, numbers) = results.into_iter().unzip();
    let operands = steps.operands;
    let body = Body::new(operands.len(), steps.steps, numbers).ok()?;
    let types: Vec<&TensorType> = operands
        .iter()
        .map(|&value| &graph.values[value].ty)
        .collect();
    body.infer(&types).ok()?;
    Some(Kernel {
        operands,
        body,
        results,
    })
}

/// The steps of a kernel that is being built.
struct Steps<'a> {
    graph: &'a Graph,
    operands: Vec<Value>,
    /// The kernel's number of a value.
    number: BTreeMap<Value, usize>,
    /// The operand that has the bytes of a root, by root and row length. A vector may be a row in
    /// one place and a column in another. So aliases with other rows are separate operands.
    by_root: BTreeMap<(Value, Option<u64>), Value>,
    steps: Vec<Step>,
    /// The number of each step's first result, and of the next step's.
    first: Vec<usize>,
    next: usize,
}

impl<'a> Steps<'a> {
    /// No steps yet, and the operands of the members.
    fn new(graph: &'a Graph, members: &[Node], inside: &BTreeSet<Node>) -> Steps<'a> {
        let mut steps = Steps {
            graph,
            operands: vec![],
            number: BTreeMap::new(),
            by_root: BTreeMap::new(),
            steps: vec![],
            first: vec![],
            next: 0,
        };
        for &value in members.iter().flat_map(|&node| &graph.nodes[node].inputs) {
            let key = steps.key(value);
            let maker = graph.def_node(key.0);
            let from_outside = maker.is_none_or(|node| !inside.contains(&node));
            if from_outside && !steps.by_root.contains_key(&key) {
                steps.number.insert(value, steps.operands.len());
                steps.by_root.insert(key, value);
                steps.operands.push(value);
            }
        }
        steps.next = steps.operands.len();
        steps
    }

    /// The root of a value and the length of the value's rows.
    fn key(&self, value: Value) -> (Value, Option<u64>) {
        let row = self.graph.values[value].ty.shape().last().copied();
        (self.graph.root(value), row)
    }

    /// The number of a value that a step reads. If the kernel has the value in another shape, the
    /// alias becomes a step.
    fn operand(&mut self, value: Value) -> usize {
        if let Some(&number) = self.number.get(&value) {
            return number;
        }
        let shape = self.graph.values[value].ty.shape();
        let shape = shape.iter().map(|&size| size as i64).collect();
        let key = self.key(value);
        let from = self.number[self.by_root.get(&key).unwrap_or(&key.0)];
        let number = self.push(Op::Reshape(Sizes { shape }), vec![from], 1);
        self.number.insert(value, number);
        number
    }

    /// Adds a step, unless an equal step exists: copies may compute the same. Returns the number of
    /// its first result.
    fn push(&mut self, op: Op, inputs: Vec<usize>, outputs: usize) -> usize {
        let same = |step: &Step| step.op == op && step.inputs == inputs;
        if let Some(i) = self.steps.iter().position(same) {
            return self.first[i];
        }
        self.steps.push(Step {
            op,
            inputs,
            outputs,
        });
        let first = self.next;
        self.first.push(first);
        self.next += outputs;
        first
    }
}

impl Kernel {
    /// False if it has too many operands for one kernel.
    fn is_narrow(&self) -> bool {
        self.operands.len() <= OPERANDS
    }
    /// Adds the kernel's node, which computes its results. Phase and module are those of `like`.
    fn add_to(&self, graph: &mut Graph, like: Node) -> Node {
        let op = Op::Fused(Fused {
            body: Arc::new(self.body.clone()),
        });
        let (phase, module) = (graph.nodes[like].phase, graph.nodes[like].module.clone());
        graph.define(&self.results, op, self.operands.clone(), phase, module)
    }
}
