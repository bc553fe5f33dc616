//! Turns decisions into lines. Only this pass inserts reruns, and copies from and to the device.
//!
//! Before: an ordered graph and decisions. After: a schedule that computes the same as the graph,
//! run from top to bottom. Each value has its own buffer from its first access to its last.
//!
//! Nodes are processed in order. Before a node, each operand that is not on the device is brought
//! there. It is copied in if the host has it. Otherwise it is computed again, with everything that
//! this needs. After the node, values whose gap is cut leave. Copies in are directly before their
//! use; [`prefetch`](super::prefetch) moves them up.
//!
//! Nodes that the host runs read their operands from the host's pool and write their results there.
//! An operand that the host does not have yet, mostly a gradient, is copied out before. Hosted
//! states of one chunk lie in one buffer and come in one copy. If decided so, the gradients for its
//! updates lie in one buffer too and leave in one copy; the updates wait for it.
//!
//! A step in two parts has its inputs, outputs and states in pools of its caller. The lines of the
//! second part come after all lines of the first: an output that is an input which comes at the
//! pause is fetched there.
//!
//! If the host cannot update the states that live there, the device does, and large ones part by
//! part, so that it never holds all of a parameter and its moments.
//!
//! A state's new value is written over the old one if the op can do that in place. Otherwise, or if
//! a rerun reads the old value later, it stays in its own buffer until the end of the step.

use crate::plan::machine::{
    BACKWARD, COMPUTE, D2H, DEVICE, FORWARD, H2D, HOST, ON_HOST, PARAMETERS, beyond, stream_names,
};
use crate::plan::{Decisions, Gap, Illegal, Means, Problem};
use ir::graph::Def;
use ir::schedule::{
    Buffer, BufferData, Extent, InstrData, InstrKind, Loc, MemorySpace, Pool, PoolData, Schedule,
    Stream, StreamData, Why, buffer_bytes,
};
use ir::{Id, Node, Part, Phase, State, Table, Value};
use smallvec::SmallVec;
use std::collections::{BTreeMap, BTreeSet};

/// Builds the schedule; `named` gives its buffers names. An error if a decision is impossible: it
/// runs an op again that is not pure, or computes a value that no node computes.
pub fn run(problem: &Problem<'_>, decisions: &Decisions, named: bool) -> Result<Schedule, Illegal> {
    // States whose old value is still read after their update. Each round finds new ones, or is the
    // last.
    let mut held: BTreeSet<State> = BTreeSet::new();
    loop {
        let mut lines = Lines::new(problem, decisions, &held);
        lines.names = named.then(BTreeMap::new);
        lines.build()?;
        if lines.read_late.is_subset(&held) {
            return Ok(lines.schedule);
        }
        held.append(&mut lines.read_late);
    }
}

/// The pools of a schedule, in the order of their constants.
fn pools(problem: &Problem<'_>) -> Table<Pool, PoolData> {
    let (device, beyond) = (MemorySpace::Device(0), beyond(problem.device));
    let own = [device, beyond].map(|space| (space.name(), space));
    let lent = problem.parts.as_ref().map(|parts| {
        let io = match parts.on_device {
            true => device,
            false => MemorySpace::Host,
        };
        [("parameters", device), ("forward", io), ("backward", io)]
    });
    let lent = lent.into_iter().flatten();
    let lent = lent.map(|(name, space)| (name.to_string(), space));
    let mut pools: Table<Pool, PoolData> = own
        .into_iter()
        .chain(lent)
        .map(|(name, space)| PoolData {
            name,
            space,
            limit: None,
        })
        .collect();
    pools[HOST].limit = problem.host_limit;
    pools
}

/// Elements of a part of an update: 4 MiB of f32. A copy of it is long in comparison with the time
/// to start it, and a few parts are small in comparison with a large parameter. Offsets of parts
/// are multiples of a page in every type.
const PART: u64 = 1 << 20;

/// A place further on in a buffer.
fn moved(loc: Loc, bytes: u64) -> Loc {
    Loc {
        offset: loc.offset + bytes,
        ..loc
    }
}

/// Most lines read a few values.
type Operands = SmallVec<[Value; 8]>;

/// How a value is brought to the device.
#[derive(Clone, Copy)]
enum Bring {
    In(Value),
    Rerun(Node),
}

/// Facts about values in a cascade of copies and reruns. There are thousands of cascades, so an
/// entry is valid only if it has the cascade's number.
struct Cascades {
    number: u32,
    /// Values that its steps bring, and values that its steps so far have brought.
    done: Table<Value, u32>,
    brought: Table<Value, u32>,
    /// The last step that reads each value.
    last: Table<Value, (u32, usize)>,
}

/// Gradients for the host that leave by chunk.
#[derive(Default)]
struct GradientChunks {
    /// The chunk of each, and its place there. Empty if gradients do not leave by chunk.
    place: BTreeMap<Value, (usize, u64)>,
    chunks: Vec<GradientChunk>,
}

/// The gradients of one chunk.
#[derive(Default)]
struct GradientChunk {
    values: Vec<Value>,
    bytes: u64,
    /// How many are not complete yet.
    n_left: usize,
    /// Their buffer on the device, from the first one on.
    buffer: Option<Buffer>,
    /// The positions of updates that wait for the last one.
    waiting: Vec<u32>,
}

struct Lines<'a> {
    problem: &'a Problem<'a>,
    decisions: &'a Decisions,
    /// States whose update waits for the end of the step.
    held: &'a BTreeSet<State>,
    schedule: Schedule,
    /// The place of each root on the device, and on the host. Invariant: the place holds the value.
    on_device: Table<Value, Option<Loc>>,
    on_host: Table<Value, Option<Loc>>,
    /// In a step that pauses, the nodes that run before, and whether it has paused.
    early: Option<Table<Node, bool>>,
    is_paused: bool,
    /// The number of homes of states and inputs, which are never freed. They are the first buffers.
    n_pinned: usize,
    /// Outputs by the root of their value.
    fetches: BTreeMap<Value, Vec<usize>>,
    /// States that live on the host, and those whose update has been written over their old value.
    hosted: Table<State, bool>,
    updated: Table<State, bool>,
    /// Nodes that the host runs.
    on_host_runs: Table<Node, bool>,
    /// Gaps that are cut, and the range of each value's gaps.
    cuts: Vec<(u32, Means)>,
    cuts_of: Table<Value, (u32, u32)>,
    /// States whose old value was needed after that.
    read_late: BTreeSet<State>,
    home: Table<State, Loc>,
    /// The chunk of each state, and the chunks' homes.
    chunk: Table<State, Option<usize>>,
    chunk_home: Vec<Buffer>,
    /// The last copy of each chunk, and the states whose old value it holds.
    chunk_copy: Vec<Option<(Buffer, BTreeSet<State>)>>,
    /// The gradients that leave by chunk.
    gradients: GradientChunks,
    output: Vec<Option<Loc>>,
    cascades: Cascades,
    /// The number of buffers with each name so far; absent if buffers get no names.
    names: Option<BTreeMap<String, u32>>,
}

impl<'a> Lines<'a> {
    fn new(
        problem: &'a Problem<'a>,
        decisions: &'a Decisions,
        held: &'a BTreeSet<State>,
    ) -> Lines<'a> {
        let graph = problem.graph;
        let mut fetches: BTreeMap<Value, Vec<usize>> = BTreeMap::new();
        for (i, output) in graph.outputs.iter().enumerate() {
            fetches
                .entry(problem.root[output.value])
                .or_default()
                .push(i);
        }
        let mut hosted = Table::filled(graph.states.len(), false);
        decisions
            .hosted
            .keys()
            .for_each(|&state| hosted[state] = true);
        let mut on_host_runs = Table::filled(graph.nodes.len(), false);
        decisions
            .on_host
            .iter()
            .for_each(|&node| on_host_runs[node] = true);
        let mut cuts = Vec::with_capacity(decisions.cuts.len());
        let mut cuts_of = Table::filled(graph.values.len(), (0, 0));
        for (&Gap { value, gap }, &(means, _)) in &decisions.cuts {
            let of = &mut cuts_of[value];
            if of.1 == 0 {
                of.0 = cuts.len() as u32;
            }
            cuts.push((gap, means));
            of.1 = cuts.len() as u32;
        }
        let stream = |name: &str| StreamData { name: name.into() };
        let on_host = (!decisions.on_host.is_empty()).then_some("host");
        let schedule = Schedule {
            name: graph.name.clone(),
            device: problem.device.name.clone(),
            sm: problem.device.sm,
            // In the order of `DEVICE` and `HOST`.
            pools: pools(problem),
            streams: stream_names(problem.device)
                .into_iter()
                .chain(on_host)
                .map(stream)
                .collect(),
            ..Schedule::default()
        };
        Lines {
            problem,
            decisions,
            held,
            schedule,
            on_device: Table::filled(graph.values.len(), None),
            on_host: Table::filled(graph.values.len(), None),
            early: problem.parts.as_ref().map(|parts| parts.early_nodes(graph)),
            is_paused: false,
            n_pinned: 0,
            fetches,
            hosted,
            updated: Table::filled(graph.states.len(), false),
            on_host_runs,
            cuts,
            cuts_of,
            read_late: BTreeSet::new(),
            home: Table::new(),
            chunk: Table::filled(graph.states.len(), None),
            chunk_home: vec![],
            chunk_copy: vec![None; decisions.chunks.len()],
            gradients: GradientChunks::default(),
            output: vec![None; graph.outputs.len()],
            cascades: Cascades {
                number: 0,
                done: Table::filled(graph.values.len(), 0),
                brought: Table::filled(graph.values.len(), 0),
                last: Table::filled(graph.values.len(), (0, 0)),
            },
            names: None,
        }
    }

    fn build(&mut self) -> Result<(), Illegal> {
        let graph = self.problem.graph;
        let in_chunks = self.chunk_homes()?;
        self.gradients = self.gradients_by_chunk();
        for (state, data) in graph.states.iter() {
            let hosted = self.hosted[state];
            let loc = match in_chunks[state] {
                Some(loc) => loc,
                None if hosted => self.buffer(data.before, HOST),
                None => self.buffer(data.before, self.home_pool()),
            };
            let place = if hosted {
                &mut self.on_host
            } else {
                &mut self.on_device
            };
            place[data.before] = Some(loc);
            self.home.push(loc);
            self.schedule.entry.push((data.before, loc));
        }
        for &input in &graph.inputs {
            let loc = self.buffer(input, self.input_pool(input));
            self.on_host[input] = Some(loc);
            self.schedule.entry.push((input, loc));
        }
        self.n_pinned = self.schedule.buffers.len();
        let late = self.found_not_computed()?;
        let pause = self.pause();
        for position in 0..=self.problem.lines.len() {
            if position == pause {
                self.pause_here()?;
            }
            if position < self.problem.lines.len() {
                self.line(position as u32)?;
            }
        }
        for (state, from) in late {
            self.go_home(state, from);
        }
        for &state in self.held {
            let value = self.problem.root[graph.states[state].after];
            let from = self.on_device[value].or(self.on_host[value]);
            if let Some(from) = from.filter(|_| graph.def_node(value).is_some()) {
                self.go_home(state, from);
            }
        }
        for (state, &loc) in graph.states.values().zip(self.home.values()) {
            self.schedule.exit.push((state.after, loc));
        }
        for (output, loc) in graph.outputs.iter().zip(&self.output) {
            let loc = loc.ok_or_else(|| Illegal::NotComputed(output.name.clone()))?;
            self.schedule.exit.push((output.value, loc));
        }
        Ok(())
    }

    /// The pool of a state that is not on the host.
    fn home_pool(&self) -> Pool {
        match self.problem.parts {
            Some(_) => PARAMETERS,
            None => DEVICE,
        }
    }

    fn input_pool(&self, input: Value) -> Pool {
        match &self.problem.parts {
            Some(parts) if parts.is_late(self.problem.graph, input) => BACKWARD,
            Some(_) => FORWARD,
            None => HOST,
        }
    }

    fn output_pool(&self, output: usize) -> Pool {
        let name = &self.problem.graph.outputs[output].name;
        match &self.problem.parts {
            Some(parts) if parts.early.contains(name) => FORWARD,
            Some(_) => BACKWARD,
            None => HOST,
        }
    }

    /// The position of the first line after the pause; one past the last line if there is none.
    fn pause(&self) -> usize {
        let lines = &self.problem.lines;
        let late = self.early.as_ref().and_then(|early| {
            let mut lines = lines.iter();
            lines.position(|&node| !early[node])
        });
        late.unwrap_or(lines.len())
    }

    /// Makes each chunk's buffer on the host; returns the places of its states.
    fn chunk_homes(&mut self) -> Result<Table<State, Option<Loc>>, Illegal> {
        let graph = self.problem.graph;
        let mut homes = Table::filled(graph.states.len(), None);
        for (k, chunk) in self.decisions.chunks.iter().enumerate() {
            let mut bytes = 0;
            let mut offsets = vec![];
            for &state in chunk {
                let path = || graph.states[state].path.clone();
                if !self.hosted[state] {
                    return Err(Illegal::ChunkAtHome {
                        chunk: k,
                        state: path(),
                    });
                }
                if self.chunk[state].replace(k).is_some() {
                    return Err(Illegal::InTwoChunks(path()));
                }
                offsets.push((state, bytes));
                bytes += self
                    .problem
                    .place_bytes(self.bytes(graph.states[state].before));
            }
            let home = beyond(self.problem.device);
            let name = self.fresh(|| format!("c{k}.{}", home.name()));
            let buffer = self.schedule.buffers.push(BufferData {
                name,
                pool: HOST,
                bytes,
            });
            self.chunk_home.push(buffer);
            offsets
                .into_iter()
                .for_each(|(state, offset)| homes[state] = Some(Loc { buffer, offset }));
        }
        Ok(homes)
    }

    /// The gradients that leave by chunk: of each chunk, those that the host's updates of its
    /// states read, if at least two can wait for each other.
    fn gradients_by_chunk(&self) -> GradientChunks {
        let mut gradients = GradientChunks::default();
        if !self.decisions.gradients_by_chunk {
            return gradients;
        }
        let problem = self.problem;
        let graph = problem.graph;
        let again: BTreeSet<Node> = self.decisions.reruns.values().flatten().copied().collect();
        for chunk in &self.decisions.chunks {
            let mut of = GradientChunk::default();
            for &state in chunk {
                let update = graph.def_node(problem.root[graph.states[state].after]);
                let Some(update) = update.filter(|&node| self.on_host_runs[node]) else {
                    continue;
                };
                let operands = graph.nodes[update].inputs.iter();
                for value in operands.map(|&value| problem.root[value]) {
                    let is_gradient = graph.def_node(value).is_some_and(|node| {
                        graph.nodes[node].phase == Phase::Backward
                            && !self.on_host_runs[node]
                            && !again.contains(&node)
                    });
                    let (first, end) = self.cuts_of[value];
                    let stays = first == end && problem.renews[value].is_empty();
                    if is_gradient
                        && stays
                        && 0 < self.bytes(value)
                        && !gradients.place.contains_key(&value)
                        && self.readers_on_host_can_wait(value)
                    {
                        gradients
                            .place
                            .insert(value, (gradients.chunks.len(), of.bytes));
                        of.bytes += self.problem.place_bytes(self.bytes(value));
                        of.values.push(value);
                    }
                }
            }
            of.n_left = of.values.len();
            if 1 < of.n_left {
                gradients.chunks.push(of);
            } else {
                of.values.iter().for_each(|value| {
                    gradients.place.remove(value);
                });
            }
        }
        gradients
    }

    /// True if no line reads what the host computes of a value. Then the host may compute it later.
    fn readers_on_host_can_wait(&self, value: Value) -> bool {
        let problem = self.problem;
        let nodes = problem.uses[value].iter();
        nodes.map(|&at| problem.lines[at as usize]).all(|node| {
            let mut outputs = problem.graph.nodes[node].outputs.iter();
            !self.on_host_runs[node]
                || outputs.all(|&output| problem.uses[problem.root[output]].is_empty())
        })
    }

    /// The chunk of gradients that a node of the host waits for.
    fn awaited(&self, node: Node) -> Option<usize> {
        if self.gradients.chunks.is_empty() || !self.on_host_runs[node] {
            return None;
        }
        let inputs = self.problem.graph.nodes[node].inputs.iter();
        let mut chunks = inputs.filter_map(|&value| {
            let root = self.problem.root[value];
            self.gradients.place.get(&root).map(|&(chunk, _)| chunk)
        });
        chunks.find(|&chunk| 0 < self.gradients.chunks[chunk].n_left)
    }

    /// The place of a gradient that leaves by chunk.
    fn place_in_chunk(&mut self, value: Value) -> Option<Loc> {
        let &(chunk, offset) = self.gradients.place.get(&value)?;
        let of = &self.gradients.chunks[chunk];
        let (bytes, known) = (of.bytes, of.buffer);
        let buffer = known.unwrap_or_else(|| {
            let name = self.fresh(|| format!("c{chunk}.gradients"));
            let pool = DEVICE;
            self.schedule.buffers.push(BufferData { name, pool, bytes })
        });
        let of = &mut self.gradients.chunks[chunk];
        of.buffer = Some(buffer);
        of.n_left -= 1;
        Some(Loc { buffer, offset })
    }

    /// Sends a chunk of gradients to the host after its last one, and runs the updates that waited.
    fn send_gradients(&mut self, value: Value) -> Result<(), Illegal> {
        let Some(&(chunk, _)) = self.gradients.place.get(&value) else {
            return Ok(());
        };
        let of = &mut self.gradients.chunks[chunk];
        let Some(src) = of.buffer.filter(|_| of.n_left == 0) else {
            return Ok(());
        };
        of.buffer = None;
        let bytes = of.bytes;
        let values = std::mem::take(&mut of.values);
        let waiting = std::mem::take(&mut of.waiting);
        let name = self.fresh(|| format!("c{chunk}.gradients.host"));
        let pool = HOST;
        let buffer = self.schedule.buffers.push(BufferData { name, pool, bytes });
        let kind = InstrKind::Copy {
            src: src.into(),
            dst: buffer.into(),
            bytes,
        };
        self.push(kind, D2H, Why::Offload);
        for value in values {
            let (_, offset) = self.gradients.place[&value];
            self.on_host[value] = Some(Loc { buffer, offset });
        }
        waiting
            .into_iter()
            .try_for_each(|position| self.line(position))
    }

    /// Handles outputs and new values of states that are inputs or old values of states: they are
    /// fetched at the start, before they are overwritten. Returns the states, with copies of their
    /// new values.
    fn found_not_computed(&mut self) -> Result<Vec<(State, Loc)>, Illegal> {
        let graph = self.problem.graph;
        let found = |&&value: &&Value| {
            graph.def_node(value).is_none() && self.input_pool(value) != BACKWARD
        };
        let renewed = graph.states.ids().filter(|&state| self.is_renewed(state));
        let renewed: Vec<Value> = renewed
            .map(|state| self.problem.root[graph.states[state].after])
            .collect();
        let wanted: BTreeSet<Value> = renewed
            .iter()
            .chain(self.fetches.keys())
            .filter(found)
            .copied()
            .collect();
        let mut late = vec![];
        for value in wanted {
            self.bring(&[value], None)?;
            self.fetch(value);
            for state in self.updates(value) {
                let from = self.on_device[value].expect("a brought value should be there");
                let to = self.buffer(value, DEVICE);
                self.copy(from, to, value, COMPUTE, Why::Update);
                late.push((state, to));
            }
            if self.problem.uses[value].first() != Some(&0) {
                self.give_up(value);
            }
        }
        Ok(late)
    }

    /// The second part of the step begins: outputs that the first part found or computed, and that
    /// leave at the end, are fetched now, before they are overwritten.
    fn pause_here(&mut self) -> Result<(), Illegal> {
        self.is_paused = true;
        let graph = self.problem.graph;
        let is_there = |&&value: &&Value| {
            let early = self.early.as_ref();
            let node = graph.def_node(value);
            early.is_some_and(|early| node.is_none_or(|node| early[node]))
        };
        let there: Vec<Value> = self.fetches.keys().filter(is_there).copied().collect();
        for value in there {
            let leaves = |&output: &usize| self.output_pool(output) == BACKWARD;
            if !self.fetches[&value].iter().any(leaves) {
                continue;
            }
            self.bring(&[value], None)?;
            self.fetch(value);
            if self.problem.uses[value].is_empty() {
                self.give_up(value);
            }
        }
        Ok(())
    }

    /// One node: brings its operands, runs it, and lets values leave after it.
    fn line(&mut self, position: u32) -> Result<(), Illegal> {
        let graph = self.problem.graph;
        let node = self.problem.lines[position as usize];
        if let Some(chunk) = self.awaited(node) {
            self.gradients.chunks[chunk].waiting.push(position);
            return Ok(());
        }
        let data = &graph.nodes[node];
        let mut operands: Operands = data.inputs.iter().map(|&v| self.problem.root[v]).collect();
        operands.sort_unstable();
        operands.dedup();
        self.reruns(position)?;
        if let Some(parts) = self.parts(position, node) {
            return self.in_parts(position, node, &operands, &parts);
        }
        let pool = if self.on_host_runs[node] {
            HOST
        } else {
            DEVICE
        };
        match pool {
            HOST => self.bring_to_host(&operands, position)?,
            _ => self.bring(&operands, Some(position))?,
        }
        let outs = data
            .outputs
            .iter()
            .enumerate()
            .map(|(j, &v)| self.result_place(node, j, v, pool))
            .collect();
        self.run_node(node, outs, pool, Why::Model);
        for &value in data
            .outputs
            .iter()
            .filter(|&&value| self.problem.leaves[value])
        {
            self.fetch(value);
            self.update(value, position);
        }
        for value in operands.into_iter().chain(data.outputs.iter().copied()) {
            self.leave(value, position);
        }
        let mut outputs = data.outputs.iter();
        outputs.try_for_each(|&value| self.send_gradients(value))
    }

    /// The parts of an update whose states live on a host that cannot update them: see
    /// [`Lines::in_parts`]. `None` if it runs as a whole.
    fn parts(&self, position: u32, node: Node) -> Option<Vec<Part>> {
        let (problem, graph) = (self.problem, self.problem.graph);
        let data = &graph.nodes[node];
        if !problem.device.host_is_disk || data.phase != Phase::Optimizer {
            return None;
        }
        let n = graph.divisible(node)?;
        if n <= PART || self.on_host_runs[node] {
            return None;
        }
        // Each result is a state's new value and nothing else, and no later line reads the old one.
        let is_state = |&value: &Value| {
            let &[state] = &self.updates(value)[..] else {
                return false;
            };
            let before = graph.states[state].before;
            let read_again = problem.uses[before].last();
            self.hosted[state]
                && !self.held.contains(&state)
                && graph.values[before].ty == graph.values[value].ty
                && read_again.is_none_or(|&last| last <= position)
                && problem.uses[value].is_empty()
                && !self.fetches.contains_key(&value)
        };
        let starts = (0..n).step_by(PART as usize);
        let part = |start: u64| Part {
            start,
            end: n.min(start + PART),
        };
        let is_even = data.outputs.iter().all(is_state);
        is_even.then(|| starts.map(part).collect())
    }

    /// Runs an update part by part: the device needs bytes only for a few parts of the parameter
    /// and its moments, not for all of each. Operands that are on the device stay where they are;
    /// of others a part comes from the host for each line. Results go home part by part.
    fn in_parts(
        &mut self,
        position: u32,
        node: Node,
        operands: &[Value],
        parts: &[Part],
    ) -> Result<(), Illegal> {
        let graph = self.problem.graph;
        let data = &graph.nodes[node];
        let all = parts.first().copied();
        let is_cut = |value: Value| {
            let whole = graph.values[value].ty.bytes();
            graph.extent(node, all, value).bytes < whole
        };
        let comes_in_parts = |&root: &Value| {
            let mut inputs = data.inputs.iter();
            self.on_device[root].is_none()
                && self.on_host[root].is_some()
                && inputs.all(|&value| self.problem.root[value] != root || is_cut(value))
        };
        let (by_parts, whole): (Operands, Operands) =
            operands.iter().copied().partition(comes_in_parts);
        self.bring(&whole, Some(position))?;
        by_parts.iter().for_each(|&root| self.note_late_read(root));

        for (k, &part) in parts.iter().enumerate() {
            let part = Some(part);
            let mut args = vec![];
            for &value in &data.inputs {
                let root = self.problem.root[value];
                let extent = graph.extent(node, part, value);
                let place = self.on_device[root].map(|loc| moved(loc, extent.start));
                args.push(match place {
                    Some(place) => place,
                    None => self.part_in(root, extent),
                });
            }
            let mut outs = vec![];
            for (j, &value) in data.outputs.iter().enumerate() {
                let extent = graph.extent(node, part, value);
                let over = data.op.inplace().iter().find(|&&(i, to)| {
                    let input = data.inputs[i];
                    to == j
                        && by_parts.contains(&self.problem.root[input])
                        && graph.values[input].ty == graph.values[value].ty
                });
                outs.push(match over {
                    Some(&(i, _)) => args[i],
                    None => self.part_buffer(value, extent),
                });
            }
            // The first line stands for the node.
            let why = match k {
                0 => Why::Model,
                _ => Why::Update,
            };
            let kind = InstrKind::Run {
                node,
                args,
                outs: outs.clone(),
                scratch: None,
                part,
            };
            self.push(kind, COMPUTE, why);
            for (&value, src) in data.outputs.iter().zip(outs) {
                let extent = graph.extent(node, part, value);
                for state in self.updates(value) {
                    let dst = moved(self.home[state], extent.start);
                    let bytes = extent.bytes;
                    self.push(InstrKind::Copy { src, dst, bytes }, D2H, Why::Offload);
                }
            }
        }
        for &value in &data.outputs {
            for state in self.updates(value) {
                self.on_host[value] = Some(self.home[state]);
                self.updated[state] = true;
            }
        }
        operands
            .iter()
            .for_each(|&operand| self.leave(operand, position));
        Ok(())
    }

    /// Copies a part of a value in.
    fn part_in(&mut self, root: Value, extent: Extent) -> Loc {
        let from = self.on_host[root].expect("a value that comes in parts should be on the host");
        let dst = self.part_buffer(root, extent);
        let kind = InstrKind::Copy {
            src: moved(from, extent.start),
            dst,
            bytes: extent.bytes,
        };
        self.push(kind, H2D, Why::Gather);
        dst
    }

    /// A buffer for a part of a value.
    fn part_buffer(&mut self, value: Value, extent: Extent) -> Loc {
        let name = self.fresh(|| format!("{}.part", self.problem.graph.values[value].name));
        let bytes = buffer_bytes(extent.bytes);
        let pool = DEVICE;
        self.schedule
            .buffers
            .push(BufferData { name, pool, bytes })
            .into()
    }

    /// Runs nodes again before a line. Their results replace earlier copies.
    fn reruns(&mut self, position: u32) -> Result<(), Illegal> {
        let decisions = self.decisions;
        for &node in decisions
            .reruns
            .get(&position)
            .map_or(&[][..], |nodes| nodes)
        {
            let data = &self.problem.graph.nodes[node];
            if !data.op.is_pure() || data.phase == Phase::Optimizer {
                return Err(Illegal::Rerun(self.problem.graph.node_name(node).into()));
            }
            let operands: Operands = data.inputs.iter().map(|&v| self.problem.root[v]).collect();
            self.bring(&operands, Some(position))?;
            let outs: Vec<Loc> = data
                .outputs
                .iter()
                .map(|&value| self.buffer(value, DEVICE))
                .collect();
            self.run_node(node, outs.clone(), DEVICE, Why::Recompute);
            for (&value, loc) in data.outputs.iter().zip(outs) {
                self.on_device[value] = Some(loc);
            }
        }
        Ok(())
    }

    /// The place of a node's result: over a state's old value if that is allowed, otherwise in a
    /// new buffer.
    fn result_place(&mut self, node: Node, j: usize, value: Value, pool: Pool) -> Loc {
        let graph = self.problem.graph;
        let data = &graph.nodes[node];
        let mut place = None;
        for state in self.updates(value) {
            let before = graph.states[state].before;
            let position =
                self.problem.position[node].expect("a line's node should have a position");
            let read_again = self.problem.uses[before]
                .last()
                .is_some_and(|&last| position < last);
            let mut from =
                (0..data.inputs.len()).filter(|&i| self.problem.root[data.inputs[i]] == before);
            let only = from.next().filter(|_| from.next().is_none());
            let pair = only.is_some_and(|i| data.op.inplace().contains(&(i, j)));
            let same_type = graph.values[value].ty == graph.values[before].ty;
            let here = self.hosted[state] == (pool == HOST);
            let at_home = here && !self.held.contains(&state);
            if place.is_none() && pair && same_type && at_home && !read_again {
                place = Some(self.home[state]);
                self.updated[state] = true;
            }
        }
        let in_chunk = match place {
            None if pool == DEVICE => self.place_in_chunk(value),
            _ => None,
        };
        let place = place
            .or(in_chunk)
            .unwrap_or_else(|| self.buffer(value, pool));
        if pool == HOST {
            self.on_host[value] = Some(place);
        } else {
            self.on_device[value] = Some(place);
        }
        place
    }

    /// Sends a state's new value home after the last line that reads the old one.
    fn update(&mut self, value: Value, position: u32) {
        let graph = self.problem.graph;
        for state in self.updates(value) {
            let before = graph.states[state].before;
            let read_again = self.problem.uses[before]
                .last()
                .is_some_and(|&last| position < last);
            if self.updated[state] || self.held.contains(&state) {
                continue;
            }
            if read_again {
                // A later line reads the old value, which is handled like a read by a rerun.
                self.read_late.insert(state);
                continue;
            }
            let from = self.on_device[value]
                .or(self.on_host[value])
                .expect("a computed value should be somewhere");
            self.go_home(state, from);
            self.updated[state] = true;
        }
    }

    /// True if the step changes the state's value.
    fn is_renewed(&self, state: State) -> bool {
        let state = &self.problem.graph.states[state];
        self.problem.root[state.after] != state.before
    }

    /// The states that get this root as their new value.
    fn updates(&self, value: Value) -> SmallVec<[State; 2]> {
        self.problem.renews[value]
            .iter()
            .copied()
            .filter(|&state| self.is_renewed(state))
            .collect()
    }

    /// Copies a state's new value over the old one.
    fn go_home(&mut self, state: State, from: Loc) {
        let value = self.problem.root[self.problem.graph.states[state].after];
        let home = self.home[state];
        if from == home {
            return;
        }
        let hosted = self.hosted[state];
        let (stream, why) = match (self.pool(from), hosted) {
            (DEVICE, true) => (D2H, Why::Offload),
            (DEVICE, false) => (COMPUTE, Why::Update),
            (_, true) => (ON_HOST, Why::Update),
            (_, false) => (H2D, Why::Update),
        };
        self.copy(from, home, value, stream, why);
        let place = if hosted {
            &mut self.on_host
        } else {
            &mut self.on_device
        };
        place[value] = Some(home);
    }

    fn is_pinned(&self, loc: Loc) -> bool {
        loc.buffer.index() < self.n_pinned
    }

    fn pool(&self, loc: Loc) -> Pool {
        self.schedule.buffers[loc.buffer].pool
    }

    /// Copies a computed output to the host.
    fn fetch(&mut self, value: Value) {
        for output in self.fetches.get(&value).cloned().unwrap_or_default() {
            // Each part of a step writes its own outputs.
            if (self.output_pool(output) == BACKWARD) != self.is_paused {
                continue;
            }
            let from = self.on_device[value]
                .or(self.on_host[value])
                .expect("an output should be somewhere");
            let to = self.buffer(value, self.output_pool(output));
            let stream = match self.pool(from) {
                HOST => ON_HOST,
                _ => D2H,
            };
            self.copy(from, to, value, stream, Why::Fetch);
            self.output[output] = Some(to);
        }
    }

    /// After an access: a value leaves if it is no longer needed, or if its gap is cut.
    fn leave(&mut self, value: Value, position: u32) {
        let Some(loc) = self.on_device[value] else {
            return;
        };
        if self.is_pinned(loc) {
            return;
        }
        let accesses = &self.problem.accesses[value];
        let is_last = accesses.last().is_none_or(|&last| last <= position);
        // A held state's new value stays until the end.
        let held = !self.held.is_empty()
            && self
                .updates(value)
                .iter()
                .any(|state| self.held.contains(state));
        if is_last {
            // A rerun may still read it, so it is not dropped here: its buffer ends at its last
            // read.
            if !held && self.decisions.reruns.is_empty() {
                self.on_device[value] = None;
            }
            return;
        }
        let (first, end) = self.cuts_of[value];
        if first == end || held {
            return;
        }
        let number = accesses.partition_point(|&at| at < position) as u32;
        let cuts = &self.cuts[first as usize..end as usize];
        let Some(&(_, means)) = cuts.iter().find(|cut| cut.0 == number) else {
            return;
        };
        if means == Means::Swap && self.on_host[value].is_none() && 0 < self.bytes(value) {
            let to = self.buffer(value, HOST);
            self.copy(loc, to, value, D2H, Why::SwapOut);
            self.on_host[value] = Some(to);
        }
        self.on_device[value] = None;
    }

    /// Drops a value that was brought temporarily.
    fn give_up(&mut self, value: Value) {
        if let Some(loc) = self.on_device[value]
            && !self.is_pinned(loc)
        {
            self.on_device[value] = None;
        }
    }

    /// Brings values to the device. `position` is the line that needs them; `None` is the start of
    /// the step.
    fn bring(&mut self, wanted: &[Value], position: Option<u32>) -> Result<(), Illegal> {
        if wanted.iter().all(|&value| self.on_device[value].is_some()) {
            wanted.iter().for_each(|&value| self.note_late_read(value));
            return Ok(());
        }
        let steps = self.cascade(wanted)?;
        if steps.is_empty() {
            return Ok(());
        }
        let graph = self.problem.graph;
        // The last step that reads each value. Values that only the cascade needs are dropped after
        // it.
        let number = self.cascades.number;
        for (k, step) in steps.iter().enumerate() {
            if let Bring::Rerun(node) = step {
                for &input in &graph.nodes[*node].inputs {
                    self.cascades.last[self.problem.root[input]] = (number, k);
                }
            }
        }
        let mut done = Operands::new();
        for (k, &step) in steps.iter().enumerate() {
            match step {
                Bring::In(value) => {
                    // It may have come with its chunk.
                    if self.on_device[value].is_none() {
                        self.copy_in(value, position);
                    }
                    self.cascades.brought[value] = number;
                }
                Bring::Rerun(node) => {
                    let outs = self.rerun_places(node);
                    self.run_node(node, outs, DEVICE, Why::Recompute);
                    let data = &graph.nodes[node];
                    let Cascades { brought, last, .. } = &mut self.cascades;
                    let inputs = data.inputs.iter().map(|&v| self.problem.root[v]);
                    done.extend(inputs.filter(|&v| last[v] == (number, k) && brought[v] == number));
                    done.extend(
                        data.outputs
                            .iter()
                            .copied()
                            .filter(|&v| last[v].0 != number),
                    );
                    data.outputs.iter().for_each(|&v| brought[v] = number);
                }
            }
            for value in done.drain(..) {
                if !wanted.contains(&value) && !self.wanted_later(value, position) {
                    self.give_up(value);
                }
            }
        }
        Ok(())
    }

    /// Brings values to the host, from the device if the host does not have them.
    fn bring_to_host(&mut self, wanted: &[Value], position: u32) -> Result<(), Illegal> {
        for &value in wanted {
            if self.on_host[value].is_some() {
                self.note_late_read(value);
                continue;
            }
            self.bring(&[value], Some(position))?;
            let from = self.on_device[value].expect("a brought value should be there");
            let to = self.buffer(value, HOST);
            self.copy(from, to, value, D2H, Why::Offload);
            self.on_host[value] = Some(to);
        }
        Ok(())
    }

    /// True if a line after `position` reads the value.
    fn wanted_later(&self, value: Value, position: Option<u32>) -> bool {
        let last = self.problem.uses[value].last();
        last.is_some_and(|&last| position.is_none_or(|position| position < last))
    }

    /// Places for a rerun's results. A result that is already on the device, or that no line needs,
    /// gets a buffer that no line reads.
    fn rerun_places(&mut self, node: Node) -> Vec<Loc> {
        let outputs = &self.problem.graph.nodes[node].outputs;
        outputs
            .iter()
            .map(|&value| {
                let loc = self.buffer(value, DEVICE);
                if self.on_device[value].is_none() {
                    self.on_device[value] = Some(loc);
                }
                loc
            })
            .collect()
    }

    /// The copies and reruns that bring `wanted` to the device, each after the ones that it needs.
    fn cascade(&mut self, wanted: &[Value]) -> Result<Vec<Bring>, Illegal> {
        let graph = self.problem.graph;
        let mut steps = vec![];
        self.cascades.number += 1;
        let number = self.cascades.number;
        // (value, the next operand of its node)
        let mut stack: Vec<(Value, usize)> = wanted.iter().rev().map(|&v| (v, 0)).collect();
        while let Some((value, next)) = stack.pop() {
            if self.on_device[value].is_some() {
                self.note_late_read(value);
                continue;
            }
            if self.cascades.done[value] == number {
                continue;
            }
            if self.on_host[value].is_some() {
                self.note_late_read(value);
                self.cascades.done[value] = number;
                steps.push(Bring::In(value));
                continue;
            }
            let name = &graph.values[value].name;
            let Def::Node(node, _) = graph.values[value].def else {
                return Err(Illegal::NoNode(name.clone()));
            };
            let data = &graph.nodes[node];
            if !data.op.is_pure() {
                return Err(Illegal::NotPure {
                    value: name.clone(),
                    op: data.op.name().into(),
                });
            }
            match data.inputs.get(next) {
                Some(&input) => {
                    stack.push((value, next + 1));
                    stack.push((self.problem.root[input], 0));
                }
                None => {
                    data.outputs
                        .iter()
                        .for_each(|&v| self.cascades.done[v] = number);
                    steps.push(Bring::Rerun(node));
                }
            }
        }
        Ok(steps)
    }

    /// Notes that a state's old value is read when its home already holds the new one.
    fn note_late_read(&mut self, value: Value) {
        if let Def::State(state) = self.problem.graph.values[value].def
            && self.updated[state]
        {
            self.read_late.insert(state);
        }
    }

    fn copy_in(&mut self, value: Value, position: Option<u32>) {
        let from = self.on_host[value].expect("a value to copy in should be on the host");
        if let Def::State(state) = self.problem.graph.values[value].def
            && let Some(chunk) = self.chunk[state]
        {
            match self.found_in_chunk(chunk, state, position) {
                Some(loc) => self.on_device[value] = Some(loc),
                None => self.gather(chunk, state),
            }
            return;
        }
        let to = self.buffer(value, DEVICE);
        let why = match self.problem.graph.values[value].def {
            Def::Input(_) => Why::Feed,
            Def::State(_) => Why::Gather,
            Def::Node(..) if self.is_pinned(from) => Why::Gather,
            Def::Node(..) => Why::SwapIn,
        };
        self.copy(from, to, value, H2D, why);
        self.on_device[value] = Some(to);
    }

    /// The place of a state's old value in a copy of its chunk that stays on the device for other
    /// states.
    fn found_in_chunk(&self, chunk: usize, state: State, position: Option<u32>) -> Option<Loc> {
        let (buffer, _) = self.chunk_copy[chunk]
            .as_ref()
            .filter(|(_, states)| states.contains(&state))?;
        let read_on_device = |&at: &u32| {
            position.is_none_or(|position| position <= at)
                && !self.on_host_runs[self.problem.lines[at as usize]]
        };
        let stays = |&other: &State| {
            let value = self.problem.graph.states[other].before;
            self.on_device[value].is_some_and(|loc| loc.buffer == *buffer)
                && self.problem.uses[value].iter().any(read_on_device)
        };
        let others = self.decisions.chunks[chunk].iter().any(stays);
        others.then_some(Loc {
            buffer: *buffer,
            offset: self.home[state].offset,
        })
    }

    /// Copies a chunk in, because one of its states is needed. The other states are then also on
    /// the device, except those that have been updated meanwhile.
    fn gather(&mut self, chunk: usize, wanted: State) {
        let home = self.chunk_home[chunk];
        let bytes = self.schedule.buffers[home].bytes;
        let name = self.fresh(|| format!("c{chunk}"));
        let buffer = self.schedule.buffers.push(BufferData {
            name,
            pool: DEVICE,
            bytes,
        });
        self.push(
            InstrKind::Copy {
                src: home.into(),
                dst: buffer.into(),
                bytes,
            },
            H2D,
            Why::Gather,
        );
        let chunk_states = &self.decisions.chunks[chunk];
        let old = chunk_states
            .iter()
            .copied()
            .filter(|&state| !self.updated[state])
            .collect();
        self.chunk_copy[chunk] = Some((buffer, old));
        for &state in chunk_states {
            let before = self.problem.graph.states[state].before;
            if state == wanted || (self.on_device[before].is_none() && !self.updated[state]) {
                self.on_device[before] = Some(Loc {
                    buffer,
                    offset: self.home[state].offset,
                });
            }
        }
    }

    fn run_node(&mut self, node: Node, outs: Vec<Loc>, pool: Pool, why: Why) {
        let graph = self.problem.graph;
        let data = &graph.nodes[node];
        let places = if pool == HOST {
            &self.on_host
        } else {
            &self.on_device
        };
        let place = |&v: &Value| places[self.problem.root[v]].expect("an operand should be there");
        let args: Vec<Loc> = data.inputs.iter().map(place).collect();
        let scratch = self.problem.scratch[node].on(self.schedule.processor(pool));
        let scratch = (0 < scratch).then(|| {
            let name = self.fresh(|| format!("{}.scratch", graph.node_name(node)));
            let bytes = buffer_bytes(scratch);
            self.schedule
                .buffers
                .push(BufferData { name, pool, bytes })
                .into()
        });
        let stream = if pool == HOST { ON_HOST } else { COMPUTE };
        self.push(
            InstrKind::Run {
                node,
                args,
                outs,
                scratch,
                part: None,
            },
            stream,
            why,
        );
    }

    fn copy(&mut self, src: Loc, dst: Loc, value: Value, stream: Stream, why: Why) {
        let bytes = self.bytes(value);
        // Zero bytes need no copy: every zero-byte buffer holds every zero-byte value.
        if 0 < bytes {
            self.push(InstrKind::Copy { src, dst, bytes }, stream, why);
        }
    }

    fn push(&mut self, kind: InstrKind, stream: Stream, why: Why) {
        self.schedule.instrs.push(InstrData {
            kind,
            stream,
            after: vec![],
            why,
        });
    }

    fn bytes(&self, value: Value) -> u64 {
        self.problem.graph.values[value].ty.bytes()
    }

    fn buffer(&mut self, value: Value, pool: Pool) -> Loc {
        let name = &self.problem.graph.values[value].name;
        let home = beyond(self.problem.device);
        let name = self.fresh(|| match pool {
            HOST => format!("{name}.{}", home.name()),
            FORWARD | BACKWARD => format!("{name}.host"),
            _ => name.clone(),
        });
        let bytes = buffer_bytes(self.bytes(value));
        self.schedule
            .buffers
            .push(BufferData { name, pool, bytes })
            .into()
    }

    /// `name`, or `name.2`, `name.3`, … if it is taken.
    fn fresh(&mut self, name: impl Fn() -> String) -> String {
        let Some(names) = &mut self.names else {
            return String::new();
        };
        let name = name();
        loop {
            let count = names.entry(name.clone()).or_insert(0);
            *count += 1;
            if *count == 1 {
                return name;
            }
            let fresh = format!("{name}.{count}");
            if !names.contains_key(&fresh) {
                names.insert(fresh.clone(), 1);
                return fresh;
            }
        }
    }
}
