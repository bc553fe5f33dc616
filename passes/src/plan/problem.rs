//! What planners read: [`Problem`], a graph on a machine, with tables of uses, blocks and groups of
//! states.

use super::blocks::{self, Block};
use super::cancel::Cancel;
use super::decisions::{Decisions, Gap, Means, Reason};
use super::homes::Homes;
use super::parts::Parts;
use super::tuning::{FILLED_HOSTS, Heuristics, LARGE, LATENCIES};
use super::users::users;
use crate::cost::Cost;
use artifact::PAGE;
use ir::graph::Def;
use ir::op::Scratch;
use ir::schedule::{ALIGN, buffer_bytes};
use ir::{Device, Graph, Node, State, Table, Value};
use papers::protrain::Fixed;
use std::collections::{BTreeMap, BTreeSet};

/// What a planner reads.
pub struct Problem<'a> {
    /// The graph; its order is final.
    pub graph: &'a Graph,
    /// The machine.
    pub device: &'a Device,
    /// Times.
    pub cost: &'a dyn Cost,
    /// The nodes that become lines: the graph's order without reshapes.
    pub lines: Vec<Node>,
    /// The position of each node in `lines`.
    pub position: Table<Node, Option<u32>>,
    /// [`Graph::root`] of each value.
    pub root: Table<Value, Value>,
    /// The states whose new value each value is; filled for roots.
    pub renews: Table<Value, Vec<State>>,
    /// The positions in `lines` that read each value, ascending; filled for roots.
    pub uses: Table<Value, Vec<u32>>,
    /// The positions in `lines` that access each value, ascending: its definition, if a line
    /// defines it, then its uses.
    pub accesses: Table<Value, Vec<u32>>,
    /// Roots that must exist at the end of the step: new values of states, and outputs.
    pub leaves: Table<Value, bool>,
    /// The parts of the model.
    pub blocks: Vec<Block>,
    /// The repeated block that each node is in.
    pub block_of: Table<Node, Option<usize>>,
    /// States that may live on the host and be updated there, together.
    pub groups: Table<Group, GroupData>,
    /// Bytes that each node's kernel may use while it runs.
    pub scratch: Table<Node, Scratch>,
    /// The limit of the host's pool, bytes; `None` if there is none. Planners and schedules read it
    /// only here.
    pub host_limit: Option<u64>,
    /// The most bytes of the pool on the disk behind the host; 0 if there is no disk.
    pub disk_limit: u64,
    /// The parts of a step that pauses: its states stay where the caller has them.
    pub parts: Option<Parts>,
    /// The states that live on the disk behind the host, if another step says where states live.
    pub on_disk: Option<BTreeSet<State>>,
    /// Decisions that every plan has, if another step says where the states live. Planners start
    /// from them, and move no state.
    fixed_homes: Option<Decisions>,
    /// The heuristics that planners use.
    pub heuristics: Heuristics,
    /// Buffers, and tensors in chunks, start at multiples of so many bytes.
    pub unit: u64,
    /// Ends planning from outside.
    pub cancel: Cancel,
    /// Those of ProTrain's numbers that the user gives.
    pub fixed: Fixed,
}

ir::ids! {
    /// A group of states that move to the host together.
    Group = "g";
}

/// The states of one block of the model, and the nodes that update them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GroupData {
    /// Parameters, in the order in which the step first uses them.
    pub params: Vec<State>,
    /// The same parameters in chunks: a chunk is copied as one, and is long enough for the link.
    pub chunks: Vec<Vec<State>>,
    /// The other states that their updates change: moments.
    pub moments: Vec<State>,
    /// The updates that the host may run.
    pub updates: Vec<Node>,
}

impl GroupData {
    /// Lets the host update the states, which will live on the host, and lets those come in chunks
    /// that do not live there yet.
    pub(crate) fn add_to(&self, decisions: &mut Decisions) {
        let moves = |state: &State| !decisions.hosted.contains_key(state);
        let chunks = self.chunks.iter();
        let chunks = chunks.filter(|chunk| 1 < chunk.len() && chunk.iter().all(moves));
        decisions.chunks.extend(chunks.cloned());
        decisions.on_host.extend(&self.updates);
    }
}

/// Bytes of states from which on a few bytes for each buffer do not matter.
const MANY: u64 = 64 << 20;

/// What buffers start at multiples of. If a pool is a file, in a large step it is a page: then the
/// file is read and written straight from another pool, past the system's cache.
fn unit(graph: &Graph, device: &Device) -> u64 {
    let states = graph.states.values();
    let bytes: u64 = states.map(|s| graph.values[s.before].ty.bytes()).sum();
    let has_disk = device.host_is_disk || device.disk.is_some();
    match has_disk && bytes >= MANY {
        true => PAGE as u64,
        false => ALIGN,
    }
}

/// The positions that read each value, ascending.
fn uses(graph: &Graph, position: &Table<Node, Option<u32>>) -> Table<Value, Vec<u32>> {
    let at = |node: Node| position[node].expect("a reader should be a line");
    users(graph, &graph.order)
        .values()
        .map(|nodes| nodes.iter().map(|&node| at(node)).collect())
        .collect()
}

/// The repeated block that each node is in.
fn block_of(graph: &Graph, blocks: &[Block]) -> Table<Node, Option<usize>> {
    let mut block_of = Table::filled(graph.nodes.len(), None);
    for (i, block) in blocks.iter().enumerate() {
        for &node in block.forward.iter().chain(&block.backward) {
            if block.repeated {
                block_of[node] = Some(i);
            }
        }
    }
    block_of
}

impl<'a> Problem<'a> {
    /// The problem of a graph on a machine.
    pub fn new(graph: &'a Graph, device: &'a Device, cost: &'a dyn Cost) -> Problem<'a> {
        let order = graph.order.iter().copied();
        let lines: Vec<Node> = order.filter(|&n| !graph.nodes[n].op.is_alias()).collect();
        let mut position = Table::filled(graph.nodes.len(), None);
        for (i, &node) in lines.iter().enumerate() {
            position[node] = Some(i as u32);
        }
        let uses = uses(graph, &position);
        let accesses = |(value, uses): (Value, &Vec<u32>)| {
            let def = graph.def_node(value).and_then(|node| position[node]);
            def.into_iter().chain(uses.iter().copied()).collect()
        };
        let accesses = uses.iter().map(accesses).collect();
        let root: Table<Value, Value> = graph.values.ids().map(|value| graph.root(value)).collect();
        let mut leaves = Table::filled(graph.values.len(), false);
        for value in graph.left() {
            leaves[root[value]] = true;
        }
        let mut renews = Table::filled(graph.values.len(), vec![]);
        for (state, data) in graph.states.iter() {
            renews[root[data.after]].push(state);
        }
        let scratch = graph.nodes.ids().map(|node| graph.work(node).scratch);
        let blocks = blocks::find(graph);
        let mut problem = Problem {
            graph,
            device,
            cost,
            lines,
            position,
            root,
            renews,
            uses,
            accesses,
            leaves,
            block_of: block_of(graph, &blocks),
            blocks,
            groups: Table::new(),
            scratch: scratch.collect(),
            host_limit: None,
            disk_limit: device.disk.as_ref().map_or(0, |disk| disk.bytes),
            parts: None,
            on_disk: None,
            fixed_homes: None,
            heuristics: Heuristics::default(),
            unit: unit(graph, device),
            cancel: Cancel::default(),
            fixed: Fixed::default(),
        };
        problem.groups = problem.groups();
        problem
    }

    /// True if a round of planning takes long, and a small share of the peak holds many tensors.
    pub fn is_large(&self) -> bool {
        self.lines.len() >= LARGE
    }

    /// The same problem for planners with these heuristics.
    pub fn with_heuristics(self, heuristics: Heuristics) -> Problem<'a> {
        Problem { heuristics, ..self }
    }

    /// The same problem with these numbers of ProTrain's.
    pub fn with_fixed(self, fixed: Fixed) -> Problem<'a> {
        Problem { fixed, ..self }
    }

    /// The same problem on a host whose pool may hold `bytes`.
    pub fn with_host_limit(self, bytes: u64) -> Problem<'a> {
        Problem {
            host_limit: Some(bytes),
            ..self
        }
    }

    /// The same problem, whose planning ends when a flag is set.
    pub fn with_cancel(self, cancel: &Cancel) -> Problem<'a> {
        Problem {
            cancel: cancel.clone(),
            ..self
        }
    }

    /// The same problem for a step that may pause. The states of one that does are the caller's,
    /// and planners move none.
    pub fn with_parts(mut self, parts: Option<&Parts>) -> Problem<'a> {
        self.parts = parts.cloned();
        if parts.is_some() {
            self.blocks
                .iter_mut()
                .for_each(|block| block.states.clear());
            self.groups = Table::new();
        }
        self
    }

    /// The same problem for a step whose states live where another step has them.
    pub fn with_homes(mut self, homes: Option<&Homes>) -> Problem<'a> {
        if let Some(homes) = homes {
            self.fixed_homes = Some(self.at_home(homes));
            let states = self.graph.states.iter();
            let on_disk = states.filter(|(_, data)| homes.on_disk.contains(&data.path));
            self.on_disk = Some(on_disk.map(|(state, _)| state).collect());
            self.blocks
                .iter_mut()
                .for_each(|block| block.states.clear());
            self.groups = Table::new();
        }
        self
    }

    /// The decisions that every plan of a step with these homes has.
    fn at_home(&self, homes: &Homes) -> Decisions {
        let graph = self.graph;
        let states = graph.states.iter();
        let states: BTreeMap<&str, State> = states
            .map(|(state, data)| (data.path.as_str(), state))
            .collect();
        let found = |path: &String| states.get(path.as_str()).copied();
        let hosted = homes.hosted.iter().filter_map(found);
        let chunk = |chunk: &Vec<String>| chunk.iter().filter_map(found).collect();
        let runs = |node: &Node| homes.on_host.contains(graph.node_name(*node));
        Decisions {
            hosted: hosted.map(|s| (s, self.hosted_reason(s))).collect(),
            chunks: homes.chunks.iter().map(chunk).collect(),
            on_host: self.lines.iter().copied().filter(runs).collect(),
            ..Decisions::default()
        }
    }

    /// The decisions that planners start from: none, unless the homes of states are fixed.
    pub fn start(&self) -> Decisions {
        self.fixed_homes.clone().unwrap_or_default()
    }

    /// Whether decisions leave all states where they should be.
    pub fn keeps_homes(&self, decisions: &Decisions) -> bool {
        self.fixed_homes.as_ref().is_none_or(|fixed| {
            fixed.hosted.keys().eq(decisions.hosted.keys()) && fixed.chunks == decisions.chunks
        })
    }

    /// Parameters that one optimizer node updates, with all states that it updates. Parameters of a
    /// block form one group, other parameters one group each.
    fn groups(&self) -> Table<Group, GroupData> {
        let graph = self.graph;
        let mut by_node: BTreeMap<Node, Vec<State>> = BTreeMap::new();
        for (state, data) in graph.states.iter() {
            if let Some(node) = graph.def_node(graph.root(data.after)) {
                by_node.entry(node).or_default().push(state);
            }
        }
        let mut groups: BTreeMap<(u32, Option<usize>), GroupData> = BTreeMap::new();
        let mut firsts: BTreeMap<usize, u32> = BTreeMap::new();
        let mut updates: Vec<(u32, Node, Vec<State>)> = vec![];
        for (&node, states) in &by_node {
            let is_param = |&state: &State| graph.states[state].kind == ir::StateKind::Param;
            let first = states
                .iter()
                .filter(|state| is_param(state))
                .filter_map(|&state| self.uses[graph.states[state].before].first())
                .min();
            let (Some(&first), ir::Phase::Optimizer) = (first, graph.nodes[node].phase) else {
                continue;
            };
            for part in self.parts(node) {
                let states = by_node.get(&part).cloned().unwrap_or_default();
                updates.push((first, part, states));
            }
            updates.push((first, node, states.clone()));
        }
        updates.sort_unstable();
        for (first, node, states) in updates {
            let block = self.block_of[self.lines[first as usize]];
            let first = block.map_or(first, |block| *firsts.entry(block).or_insert(first));
            let group = groups.entry((first, block)).or_default();
            if !self.device.host_is_disk {
                group.updates.push(node);
            }
            for state in states {
                let param = graph.states[state].kind == ir::StateKind::Param;
                if param {
                    &mut group.params
                } else {
                    &mut group.moments
                }
                .push(state);
            }
        }
        let mut table = Table::new();
        let across = self.updated_across_blocks(&by_node);
        for mut group in groups.into_values() {
            group.chunks = self.chunks(&group.params, &across);
            table.push(group);
        }
        table
    }

    /// The other nodes of the update whose last node is `update`: nodes of the optimizer that only
    /// the update needs, and that read, directly or through each other, a gradient and a moment. So
    /// the count of steps is not one of them, because it reads no gradient. The sums of squares for
    /// clipping are not, because they read no moment.
    fn parts(&self, update: Node) -> Vec<Node> {
        let graph = self.graph;
        let mut inside = BTreeSet::from([update]);
        let mut stack = vec![update];
        while let Some(node) = stack.pop() {
            for &operand in &graph.nodes[node].inputs {
                let maker = graph.def_node(self.root[operand]).filter(|maker| {
                    let data = &graph.nodes[*maker];
                    let mut readers = data.outputs.iter().flat_map(|&v| &self.uses[v]);
                    data.phase == ir::Phase::Optimizer
                        && readers.all(|&at| inside.contains(&self.lines[at as usize]))
                });
                if let Some(maker) = maker.filter(|&maker| inside.insert(maker)) {
                    stack.push(maker);
                }
            }
        }
        inside.remove(&update);

        // Whether each node reads a gradient, and whether it reads a moment.
        let mut reads: BTreeMap<Node, (bool, bool)> = BTreeMap::new();
        let mut parts: Vec<Node> = inside.into_iter().collect();
        parts.sort_by_key(|&node| self.position[node]);
        for &node in &parts {
            let mut read = (false, false);
            for &operand in &graph.nodes[node].inputs {
                let (gradient, moment) = match graph.values[self.root[operand]].def {
                    Def::Node(maker, _) => match reads.get(&maker) {
                        Some(&read) => read,
                        None => (graph.nodes[maker].phase != ir::Phase::Optimizer, false),
                    },
                    Def::State(state) => (false, graph.states[state].kind == ir::StateKind::Moment),
                    Def::Input(_) => (false, false),
                };
                read = (read.0 || gradient, read.1 || moment);
            }
            reads.insert(node, read);
        }
        parts.retain(|node| reads[node] == (true, true));
        parts
    }

    /// The number of groups that a share of them is. A share below 1 leaves at least one out.
    pub(crate) fn n_hosted(&self, share: f64) -> usize {
        let n_groups = self.groups.len();
        let most = n_groups.saturating_sub(usize::from(share < 1.0));
        ((n_groups as f64 * share).round() as usize).min(most)
    }

    /// The shares of the groups whose states fill the host, with room for gradients and for swaps;
    /// none if the host holds the states of all.
    pub(crate) fn filling_shares(&self) -> Vec<f64> {
        let bytes = |state: &State| {
            let value = self.graph.states[*state].before;
            buffer_bytes(self.graph.values[value].ty.bytes())
        };
        let groups = self.groups.values().rev();
        let sizes = groups.map(|group| {
            let states = group.params.iter().chain(&group.moments);
            states.map(bytes).sum::<u64>()
        });
        let sums: Vec<u64> = sizes
            .scan(0, |sum, bytes| {
                *sum += bytes;
                Some(*sum)
            })
            .collect();
        let capacity = self.capacity_beyond();
        if self.host_limit.is_none() || sums.last().is_none_or(|&all| all <= capacity) {
            return vec![];
        }
        let filled = FILLED_HOSTS.map(|share| (capacity as f64 * share) as u64);
        let n = filled.map(|bytes| sums.partition_point(|&sum| sum <= bytes));
        let shares = n.iter().filter(|&&n| 0 < n);
        shares.map(|&n| n as f64 / sums.len() as f64).collect()
    }

    /// Decisions that let a share of the groups live on the host. The groups of the last blocks are
    /// taken: their gradients are ready first, and their parameters are read last (ProTrain,
    /// section 3.1.1).
    pub fn hosted(&self, share: f64) -> Decisions {
        let mut decisions = self.start();
        for group in self.groups.values().rev().take(self.n_hosted(share)) {
            group.add_to(&mut decisions);
            for &state in group.params.iter().chain(&group.moments) {
                decisions.hosted.insert(state, self.hosted_reason(state));
            }
        }
        decisions
    }

    /// The reason for a state on the host if no alternative was priced.
    pub(crate) fn hosted_reason(&self, state: State) -> Reason {
        let bytes = self.graph.values[self.graph.states[state].before]
            .ty
            .bytes();
        Reason {
            bytes,
            swap: Some(self.cost.link(bytes)),
            recompute: None,
            line: 0,
        }
    }

    /// Lets hosted parameters leave the device between forward and backward.
    pub fn stream_hosted(&self, decisions: &mut Decisions) {
        for (&state, &reason) in &decisions.hosted {
            let value = self.graph.states[state].before;
            if let Some(gap) = self.between_phases(value) {
                decisions
                    .cuts
                    .insert(Gap { value, gap }, (Means::Swap, reason));
            }
        }
        self.feed_again(decisions);
    }

    /// Lets inputs of a few bytes come once more for the backward, if states live on the host.
    /// Otherwise the first copy in of each step writes where the backward of the step before still
    /// reads, and the copies of states queue behind it.
    pub fn feed_again(&self, decisions: &mut Decisions) {
        if !decisions.hosted.is_empty() {
            self.feed_twice(decisions, 2.0 * self.cost.link(0));
        }
    }

    /// Lets inputs come once more for the backward, if a copy takes at most `most` µs.
    pub fn feed_twice(&self, decisions: &mut Decisions, most: f64) {
        if self.parts.is_some() {
            return;
        }
        for &value in &self.graph.inputs {
            let bytes = self.graph.values[value].ty.bytes();
            let micros = self.cost.link(bytes);
            let Some(gap) = self.between_phases(value) else {
                continue;
            };
            if micros <= most {
                let reason = Reason {
                    bytes,
                    swap: Some(micros),
                    recompute: None,
                    line: self.uses[value][gap as usize + 1],
                };
                decisions
                    .cuts
                    .insert(Gap { value, gap }, (Means::Swap, reason));
            }
        }
    }

    /// The gap of a state or an input between its last use in the forward and its next use, if both
    /// exist.
    pub fn between_phases(&self, before: Value) -> Option<u32> {
        let forward =
            |&at: &u32| self.graph.nodes[self.lines[at as usize]].phase == ir::Phase::Forward;
        let uses = &self.uses[before];
        let n_forward = uses.iter().take_while(|at| forward(at)).count();
        (0 < n_forward && n_forward < uses.len()).then(|| n_forward as u32 - 1)
    }

    /// The parameters that one node updates with those of another block, each with this node.
    fn updated_across_blocks(&self, by_node: &BTreeMap<Node, Vec<State>>) -> BTreeMap<State, Node> {
        let block = |state: &State| {
            let first = self.uses[self.graph.states[*state].before].first()?;
            self.block_of[self.lines[*first as usize]]
        };
        let is_param = |state: &&State| self.graph.states[**state].kind == ir::StateKind::Param;
        let mut across = BTreeMap::new();
        for (&node, states) in by_node {
            let params = || states.iter().filter(is_param);
            let blocks: BTreeSet<Option<usize>> = params().map(block).collect();
            if 1 < blocks.len() {
                across.extend(params().map(|&state| (state, node)));
            }
        }
        across
    }

    /// Joins parameters to chunks. A copy of a chunk is so long that the link's latency is small in
    /// comparison. It is not longer than that, because small pieces need less room. Neighbours are
    /// used one after the other. Parameters that are updated with those of another block have
    /// chunks of their own: otherwise each of these blocks fetches the chunk, and the block in
    /// which the update runs waits for it.
    fn chunks(&self, params: &[State], across: &BTreeMap<State, Node>) -> Vec<Vec<State>> {
        let worth = LATENCIES * self.device.link_micros * 1e-6 * self.device.link_bandwidth;
        let mut chunks: Vec<(f64, Option<Node>, Vec<State>)> = vec![];
        for &state in params {
            let bytes = self.graph.values[self.graph.states[state].before]
                .ty
                .bytes() as f64;
            let update = across.get(&state).copied();
            let last = chunks.iter_mut().rfind(|(_, of, _)| *of == update);
            match last {
                Some((sum, _, chunk)) if *sum < worth => {
                    *sum += bytes;
                    chunk.push(state);
                }
                _ => chunks.push((bytes, update, vec![state])),
            }
        }
        chunks.into_iter().map(|(.., chunk)| chunk).collect()
    }

    /// True if the host may hold this number of bytes.
    pub fn host_holds(&self, bytes: u64) -> bool {
        self.host_limit.is_none_or(|limit| bytes <= limit)
    }

    /// The bytes that the host and the disk behind it may hold.
    pub fn capacity_beyond(&self) -> u64 {
        let host = self.host_limit.unwrap_or(self.device.host_bytes);
        host.saturating_add(self.disk_limit)
    }

    /// True if they may hold this number of bytes.
    pub fn holds_beyond(&self, bytes: u64) -> bool {
        self.host_limit.is_none() || bytes <= self.capacity_beyond()
    }

    /// False if the states and inputs that are never on the device alone exceed the limits of the
    /// host and the disk. Then further decisions cannot help.
    pub fn host_has_room(&self, decisions: &Decisions) -> bool {
        let states = decisions
            .hosted
            .keys()
            .map(|&state| self.graph.states[state].before);
        let values = states.chain(self.graph.inputs.iter().copied());
        self.holds_beyond(
            values
                .map(|value| buffer_bytes(self.graph.values[value].ty.bytes()))
                .sum(),
        )
    }
    /// The bytes that `bytes` bytes of content take among others in a buffer.
    pub fn place_bytes(&self, bytes: u64) -> u64 {
        bytes.max(1).next_multiple_of(self.unit)
    }

    /// True for values that are on the host when a step starts: all inputs, and hosted states.
    pub fn comes_from_host(&self, root: Value, decisions: &Decisions) -> bool {
        match self.graph.values[root].def {
            Def::Input(_) => true,
            Def::State(state) => decisions.hosted.contains_key(&state),
            Def::Node(..) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Roofline;

    /// An update of three nodes: the first updates a moment, the sums of squares of rows, the
    /// second scales the gradient by them, and the third updates the parameter.
    #[test]
    fn an_update_of_several_nodes_is_one_group() {
        let text = "graph g {
            input %x : f32[4,8]
            input %hyper : f64[3]
            state param %w -> %w' : f32[4,8] \"a.weight\"
            state moment %row -> %row' : f32[4,1] \"row.a.weight\"
            state moment %step -> %step' : i64[] \"optimizer.step\"
            fwd a %h = mul %x, %w : f32[4,8]
            bwd a %dw = mul %h, %x : f32[4,8]
            opt - %step' = add_scalar %step value=1 : i64[]
            opt a %sums = sum_squares %dw : f64[]
            opt a %clip = clip_scale %sums dtype=f32 max_norm=1.0 : f32[]
            opt a %mean = mean %dw dims=[1] keepdim=true : f32[4,1]
            opt a %row' = add %row, %mean : f32[4,1]
            opt a %scaled = mul %dw, %row' : f32[4,8]
            opt a %w' = sgd %w, %scaled, %hyper, %clip : f32[4,8]
            output h = %h
        }";
        let graph = ir::text::parse_graph(text).unwrap();
        let device = crate::devices::named("test").unwrap();
        let cost = Roofline::new(&device);
        let problem = Problem::new(&graph, &device, &cost);
        assert_eq!(problem.groups.len(), 1);
        let group = &problem.groups[Group::nth(0)];
        let names: Vec<&str> = group.updates.iter().map(|&n| graph.node_name(n)).collect();
        // The mean reads only the gradient; the count of steps and the clipping are shared by all.
        assert_eq!(names, ["row'", "scaled", "w'"]);
        assert_eq!(group.params, [State::nth(0)]);
        assert_eq!(group.moments, [State::nth(1)]);
    }
}
