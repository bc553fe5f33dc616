//! Proves a finished program: graph, schedule and plan. It shares no code with planners, allocator
//! or `sync`, except [`Schedule::accesses`]. Before: nothing must hold; a malformed program gets
//! findings like a wrong one. After a proof: in every execution that the streams and `after`
//! permit, over any number of steps, each line reads the values that the graph says, and each step
//! leaves the right values.
//!
//! The rules:
//!
//! 1. *Form.* Every id is valid. Every node has the types that its op infers. Every place lies in
//!    its buffer, every buffer in its pool, and every pool is within its limit. Buffers, and the
//!    places that kernels touch, start at multiples of [`ALIGN`]. A line waits for earlier lines of
//!    its step, or for any line of the step before.
//! 2. *Contents.* If lines run from top to bottom, every operand is complete at its address.
//!    Reshapes share their operand's bytes and never run. Other pure nodes may run any number of
//!    times, opaque nodes exactly once. A line may compute a part of a node whose elements do not
//!    depend on each other.
//! 3. *Operands.* A line does not write what it reads, except for the in-place pairs of its op,
//!    with equal types and exactly the same bytes. Its results and its scratch are disjoint.
//! 4. *Order.* If two lines touch the same bytes, and one of them writes, they are ordered: by
//!    their stream, which continues from step to step, by `after`, or by the host between two
//!    steps.
//! 5. *Entry and exit.* The inputs and states at the start of a step are in disjoint bytes. At its
//!    end every state has its new value at the same place, and every output is in its place.
//!
//! Between two steps the host waits for the lines that write the outputs' places, and for all lines
//! that touch the inputs' places. Then it reads the outputs and writes the next inputs. Only then
//! does the next step start on any stream. The host waits for nothing else: the rest of step k may
//! still run when step k+1 starts.
//!
//! Why this is enough: the order of rule 4 always points down the list. So the list itself is one
//! of the permitted executions, and all others differ from it only in the order of lines that do
//! not conflict. In the list, step k+1 starts with the same contents as step k (rule 5), so rule 2
//! holds for all steps if it holds for one. Rule 4 is checked on the list appended to itself. Lines
//! that are two steps apart are then also ordered, because the line that writes also runs in the
//! step between.
//!
//! Contents and accesses are stored by byte range, in maps from the start of a range. Each line has
//! a vector clock (Mattern), which says how far each stream must have come before the line starts.
//! For each range only the last write and the latest reads matter (FastTrack, Flanagan and Freund
//! 2009): earlier accesses are ordered before them. So the work is near `n log n` in the number of
//! lines.

use crate::Program;
use crate::finding::{Finding, Place};
use crate::graph::{Def, Graph, Node, Value};
use crate::op::{Op, Scratch};
use crate::plan::Plan;
use crate::schedule::{ALIGN, Buffer, Extent, Instr, InstrKind, Loc, Part, Pool, Schedule, Stream};
use crate::table::{Id, Table};
use crate::types::TensorType;
use crate::verify::part_form;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The most clock entries: 512 MiB. No schedule with a reasonable number of streams reaches this:
/// 30,000 lines may use 2,000 streams.
const MAX_CLOCK_ENTRIES: usize = 1 << 27;

/// The numbers of a proof.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Proof {
    /// Lines of the schedule.
    pub lines: usize,
    /// Waits of the schedule: entries of `after`.
    pub waits: usize,
    /// Operands, states and outputs that were complete at their addresses.
    pub reads: usize,
    /// The number of conflicts in two steps, all of them ordered: two lines touch the same bytes,
    /// and one of them writes.
    pub conflicts: usize,
    /// Bytes that the copies of one step move.
    pub copied_bytes: u64,
    /// Size of each pool, bytes.
    pub peak: Table<Pool, u64>,
}

/// Proves that a program computes what its graph says. Otherwise returns what is wrong, in the
/// order of the text.
pub fn check(program: &Program) -> Result<Proof, Vec<Finding>> {
    let facts = form(program)?;
    let mut findings = vec![];
    let reads = contents(&facts, &mut findings);
    operands(&facts, &mut findings);
    let conflicts = conflicts(&facts, &mut findings);
    if !findings.is_empty() {
        findings.sort_by_key(|finding| finding.place);
        return Err(findings);
    }
    let instrs = &facts.schedule.instrs;
    let copied = instrs.values().map(|data| match data.kind {
        InstrKind::Copy { bytes, .. } => bytes,
        InstrKind::Run { .. } => 0,
    });
    Ok(Proof {
        lines: instrs.len(),
        waits: instrs.values().map(|data| data.after.len()).sum(),
        reads,
        conflicts,
        copied_bytes: copied.fold(0, u64::saturating_add),
        peak: facts.plan.peak.clone(),
    })
}

// --- facts ---

/// A well-formed program with the facts that all rules use. Invariant: every id can be looked up,
/// every place has an address, and no address overflows.
struct Facts<'a> {
    graph: &'a Graph,
    schedule: &'a Schedule,
    plan: &'a Plan,
    /// The value whose bytes a value shares.
    roots: Table<Value, Value>,
}

/// A range of bytes in a pool; not empty.
#[derive(Clone, PartialEq, Eq)]
struct Span {
    pool: Pool,
    range: Range<u64>,
}

impl Span {
    fn overlaps(&self, other: &Span) -> bool {
        self.pool == other.pool
            && self.range.start < other.range.end
            && other.range.start < self.range.end
    }
}

impl<'a> Facts<'a> {
    fn bytes(&self, value: Value) -> u64 {
        self.graph.values[value].ty.bytes()
    }
    /// The range of `bytes` bytes at a place; `None` for zero bytes.
    fn span(&self, loc: Loc, bytes: u64) -> Option<Span> {
        let start = self.plan.address(loc);
        (0 < bytes).then(|| Span {
            pool: self.schedule.buffers[loc.buffer].pool,
            range: start..start + bytes,
        })
    }
    /// The range of a scratch: the rest of its buffer.
    fn scratch_span(&self, loc: Loc) -> Option<Span> {
        self.span(loc, self.schedule.buffers[loc.buffer].bytes - loc.offset)
    }
    fn value_name(&self, value: Value) -> &'a str {
        &self.graph.values[value].name
    }
    fn buffer_name(&self, buffer: Buffer) -> &'a str {
        &self.schedule.buffers[buffer].name
    }
    fn stream_name(&self, instr: Instr) -> &'a str {
        &self.schedule.streams[self.schedule.instrs[instr].stream].name
    }
    /// `device+256M`
    fn address(&self, pool: Pool, address: u64) -> String {
        format!("{}+{}", self.schedule.pools[pool].name, amount(address))
    }
    /// `device+0..64K`
    fn range(&self, span: &Span) -> String {
        format!(
            "{}..{}",
            self.address(span.pool, span.range.start),
            amount(span.range.end)
        )
    }
}

/// Bytes as the text form writes them: `64M`, `192`.
fn amount(bytes: u64) -> String {
    let units = [(1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")];
    match units
        .into_iter()
        .find(|&(unit, _)| 0 < bytes && bytes.is_multiple_of(unit))
    {
        Some((unit, letter)) => format!("{}{letter}", bytes / unit),
        None => bytes.to_string(),
    }
}

// --- form ---

/// Rule 1, and the part of rule 5 that needs no simulation: which states and outputs have places.
fn form(program: &Program) -> Result<Facts<'_>, Vec<Finding>> {
    let Program {
        graph,
        schedule,
        plan,
    } = program;
    let Some(plan) = plan else {
        return Err(vec![Finding::new(
            Place::Schedule,
            "has no plan: buffers have no addresses yet",
        )]);
    };
    let mut findings = vec![];
    let scratch = graph_form(graph, &mut findings);
    // The following checks look up ids of the graph, so the graph must be well-formed.
    if findings.is_empty() {
        plan_form(schedule, plan, &mut findings);
    }
    if findings.is_empty() {
        for (instr, _) in schedule.instrs.iter() {
            line_form(graph, schedule, &scratch, instr, &mut findings);
        }
        findings.extend(ends_form(graph, schedule));
    }
    if findings.is_empty() {
        let facts = Facts {
            graph,
            schedule,
            plan,
            roots: roots(graph, &scratch),
        };
        findings = ends_meet(&facts);
        if findings.is_empty() {
            return Ok(facts);
        }
    }
    findings.sort_by_key(|finding| finding.place);
    Err(findings)
}

/// The scratch that each node of the order needs; `None` for nodes that are not part of the
/// step.
type Needs = Table<Node, Option<Scratch>>;

fn graph_form(graph: &Graph, findings: &mut Vec<Finding>) -> Needs {
    let mut scratch = Needs::filled(graph.nodes.len(), None);
    let defined =
        |value: Value, def: Def| graph.values.get(value).is_some_and(|data| data.def == def);
    for (i, &value) in graph.inputs.iter().enumerate() {
        if !defined(value, Def::Input(i)) {
            findings.push(Finding::new(
                Place::Graph,
                format!("input {i} names {value:?}, which is not defined as that"),
            ));
        }
    }
    for (i, state) in graph.states.iter() {
        if !defined(state.before, Def::State(i)) {
            let message = format!(
                "is {:?} before the step, which is not defined as that",
                state.before
            );
            findings.push(Finding::new(Place::State(i), message));
            continue;
        }
        let before = &graph.values[state.before];
        match graph.values.get(state.after) {
            None => findings.push(Finding::new(
                Place::State(i),
                format!("{:?} is no value", state.after),
            )),
            Some(after) if after.ty.bytes() != before.ty.bytes() => {
                let message = format!(
                    "%{} has {} bytes and cannot take the place of %{}, which has {}",
                    after.name,
                    after.ty.bytes(),
                    before.name,
                    before.ty.bytes()
                );
                findings.push(Finding::new(Place::State(i), message));
            }
            Some(_) => {}
        }
    }
    for (i, output) in graph.outputs.iter().enumerate() {
        if graph.values.get(output.value).is_none() {
            findings.push(Finding::new(
                Place::Output(i),
                format!("{:?} is no value", output.value),
            ));
        }
    }
    for &node in &graph.order {
        let mut refuse = |message| findings.push(Finding::new(Place::Node(node), message));
        let Some(data) = graph.nodes.get(node) else {
            findings.push(Finding::new(
                Place::Graph,
                format!("the order names {node:?}, which is no node"),
            ));
            continue;
        };
        if scratch[node].is_some() {
            refuse("stands in the order twice".to_string());
            continue;
        }
        if let Some(value) = data.inputs.iter().find(|&&v| graph.values.get(v).is_none()) {
            refuse(format!("operand {value:?} is no value"));
            continue;
        }
        let wrong = |&(i, &v): &(usize, &Value)| !defined(v, Def::Node(node, i));
        if let Some((i, value)) = data.outputs.iter().enumerate().find(wrong) {
            refuse(format!(
                "result {i} is {value:?}, which is not defined as that"
            ));
            continue;
        }
        match types_form(graph, node) {
            Ok(bytes) => scratch[node] = Some(bytes),
            Err(message) => refuse(message),
        }
    }
    scratch
}

/// Checks a node's types against its op; returns the scratch that it needs.
fn types_form(graph: &Graph, node: Node) -> Result<Scratch, String> {
    let data = &graph.nodes[node];
    let types: Vec<&TensorType> = data.inputs.iter().map(|&v| &graph.values[v].ty).collect();
    let results = data.op.infer(&types)?;
    if results.len() != data.outputs.len() {
        return Err(format!(
            "{} has {} results, not {}",
            data.op.name(),
            results.len(),
            data.outputs.len()
        ));
    }
    for (result, &value) in results.iter().zip(&data.outputs) {
        let value = &graph.values[value];
        if *result != value.ty {
            return Err(format!(
                "{} results in {result}, but %{} is {}",
                data.op.name(),
                value.name,
                value.ty
            ));
        }
    }
    Ok(data.op.work(&types, &results).scratch)
}

fn plan_form(schedule: &Schedule, plan: &Plan, findings: &mut Vec<Finding>) {
    if plan.offset.len() != schedule.buffers.len() || plan.peak.len() != schedule.pools.len() {
        let message = format!(
            "the plan is for {} buffers in {} pools, the schedule has {} in {}",
            plan.offset.len(),
            plan.peak.len(),
            schedule.buffers.len(),
            schedule.pools.len()
        );
        findings.push(Finding::new(Place::Schedule, message));
        return;
    }
    for (pool, data) in schedule.pools.iter() {
        let peak = plan.peak[pool];
        if let Some(limit) = data.limit.filter(|&limit| limit < peak) {
            let message = format!(
                "{} needs {peak} bytes, {} more than its limit {limit}",
                data.name,
                peak - limit
            );
            findings.push(Finding::new(Place::Pool(pool), message));
        }
    }
    for (buffer, data) in schedule.buffers.iter() {
        let mut refuse = |message| findings.push(Finding::new(Place::Buffer(buffer), message));
        let Some(pool) = schedule.pools.get(data.pool) else {
            refuse(format!(
                "{} lies in {:?}, which is no pool",
                data.name, data.pool
            ));
            continue;
        };
        let (offset, peak) = (plan.offset[buffer], plan.peak[data.pool]);
        if offset.checked_add(data.bytes).is_none_or(|end| peak < end) {
            let bytes = amount(data.bytes);
            refuse(format!(
                "{} at {}+{offset}:{bytes} ends beyond the pool's {peak} bytes",
                data.name, pool.name
            ));
        }
        if !offset.is_multiple_of(ALIGN) {
            refuse(format!(
                "{} at {}+{offset} is not at a multiple of {ALIGN}",
                data.name, pool.name
            ));
        }
    }
}

/// Checks that `bytes` bytes at a place lie in its buffer.
fn place_form(schedule: &Schedule, loc: Loc, bytes: u64) -> Result<(), String> {
    let Some(data) = schedule.buffers.get(loc.buffer) else {
        return Err(format!("names {:?}, which is no buffer", loc.buffer));
    };
    match loc.offset.checked_add(bytes) {
        Some(end) if end <= data.bytes => Ok(()),
        _ => Err(format!(
            "{bytes} bytes at {}+{} end beyond its {}",
            data.name,
            loc.offset,
            amount(data.bytes)
        )),
    }
}

/// The same for a place that a kernel touches. A kernel's loads and stores may be as wide as the
/// alignment of buffers.
fn kernel_place_form(schedule: &Schedule, loc: Loc, bytes: u64) -> Result<(), String> {
    place_form(schedule, loc, bytes)?;
    match 0 < bytes && !loc.offset.is_multiple_of(ALIGN) {
        true => Err(format!(
            "uses {}+{}, which is not at a multiple of {ALIGN}",
            schedule.buffers[loc.buffer].name, loc.offset
        )),
        false => Ok(()),
    }
}

fn line_form(
    graph: &Graph,
    schedule: &Schedule,
    scratch: &Needs,
    instr: Instr,
    findings: &mut Vec<Finding>,
) {
    let data = &schedule.instrs[instr];
    let mut refuse = |message| findings.push(Finding::new(Place::Instr(instr), message));
    if schedule.streams.get(data.stream).is_none() {
        refuse(format!("queues on {:?}, which is no stream", data.stream));
    }
    for dep in &data.after {
        match (schedule.instrs.get(dep.instr), dep.previous) {
            (None, _) => refuse(format!("waits for {:?}, which is no line", dep.instr)),
            (Some(_), false) if instr <= dep.instr => {
                refuse(format!(
                    "waits for {:?}, which does not stand before it: a step could not end",
                    dep.instr
                ));
            }
            (Some(_), _) => {}
        }
    }
    let result = match &data.kind {
        InstrKind::Run {
            node,
            args,
            outs,
            scratch: place,
            part,
        } => run_form(
            graph,
            schedule,
            scratch,
            (*node, *part),
            [args, outs],
            *place,
        ),
        &InstrKind::Copy { src, dst, bytes } => {
            place_form(schedule, src, bytes).and_then(|()| place_form(schedule, dst, bytes))
        }
    };
    if let Err(message) = result {
        refuse(message);
    }
}

fn run_form(
    graph: &Graph,
    schedule: &Schedule,
    scratch: &Needs,
    (node, part): (Node, Option<Part>),
    [args, outs]: [&Vec<Loc>; 2],
    place: Option<Loc>,
) -> Result<(), String> {
    let Some(&need) = scratch.get(node) else {
        return Err(format!("runs {node:?}, which is no node"));
    };
    let Some(need) = need else {
        return Err(format!("runs {node:?}, which is not part of the step"));
    };
    let data = &graph.nodes[node];
    let name = data.op.name();
    if data.op.is_alias() {
        return Err(format!(
            "runs {name}, which shares its operand's bytes and has no kernel"
        ));
    }
    part_form(graph, node, part)?;
    for (places, values, what) in [
        (args, &data.inputs, "operands"),
        (outs, &data.outputs, "results"),
    ] {
        if places.len() != values.len() {
            return Err(format!(
                "{name} has {} {what}, the line has places for {}",
                values.len(),
                places.len()
            ));
        }
        for (&loc, &value) in places.iter().zip(values) {
            kernel_place_form(schedule, loc, graph.extent(node, part, value).bytes)?;
        }
    }
    let need = match part {
        // A divisible op needs none.
        Some(_) => 0,
        None => need.on(schedule.runs_on(args, outs)),
    };
    match place {
        Some(loc) => kernel_place_form(schedule, loc, need),
        None if 0 < need => Err(format!(
            "{name} needs {need} bytes of scratch, the line has none"
        )),
        None => Ok(()),
    }
}

/// Checks the values and places of entry and exit.
fn ends_form(graph: &Graph, schedule: &Schedule) -> Vec<Finding> {
    let mut findings = vec![];
    let mut check_end = |place, value: Value, loc| {
        let result = match graph.values.get(value) {
            Some(data) => place_form(schedule, loc, data.ty.bytes()),
            None => Err(format!("names {value:?}, which is no value")),
        };
        let fits = result.is_ok();
        findings.extend(result.err().map(|message| Finding::new(place, message)));
        fits
    };
    let mut strangers = vec![];
    for (i, &(value, loc)) in schedule.entry.iter().enumerate() {
        if !check_end(Place::Entry(i), value, loc) {
            continue;
        }
        let data = &graph.values[value];
        let found = match data.def {
            Def::Input(input) => graph.inputs.get(input) == Some(&value),
            Def::State(state) => graph.states.get(state).is_some_and(|s| s.before == value),
            Def::Node(..) => false,
        };
        if !found {
            let message = format!(
                "%{} is neither an input nor a state: the step cannot find it",
                data.name
            );
            strangers.push(Finding::new(Place::Entry(i), message));
        }
    }
    for (i, &(value, loc)) in schedule.exit.iter().enumerate() {
        check_end(Place::Exit(i), value, loc);
    }
    findings.extend(strangers);
    findings
}

/// Checks that every input, state and output has a place, and that every state has the same place
/// at both ends.
fn ends_meet(facts: &Facts<'_>) -> Vec<Finding> {
    let Facts {
        graph,
        schedule,
        roots,
        ..
    } = facts;
    let mut findings = vec![];
    let mut found: BTreeMap<Value, Vec<Loc>> = BTreeMap::new();
    for &(value, loc) in &schedule.entry {
        found.entry(value).or_default().push(loc);
    }
    let left: BTreeSet<(Value, Loc)> = schedule
        .exit
        .iter()
        .map(|&(value, loc)| (roots[value], loc))
        .collect();
    let left_values: BTreeSet<Value> = left.iter().map(|&(value, _)| value).collect();
    for &value in &graph.inputs {
        if !found.contains_key(&value) {
            let message = format!("input %{} has no place at entry", facts.value_name(value));
            findings.push(Finding::new(Place::Value(value), message));
        }
    }
    for (i, state) in graph.states.iter() {
        let Some(locs) = found.get(&state.before) else {
            let message = format!("%{} has no place at entry", facts.value_name(state.before));
            findings.push(Finding::new(Place::State(i), message));
            continue;
        };
        for &loc in locs {
            if !left.contains(&(roots[state.after], loc)) {
                let message = format!(
                    "%{} is found in {}+{}, but %{} is not left there",
                    facts.value_name(state.before),
                    facts.buffer_name(loc.buffer),
                    amount(loc.offset),
                    facts.value_name(state.after)
                );
                findings.push(Finding::new(Place::State(i), message));
            }
        }
    }
    for (i, output) in graph.outputs.iter().enumerate() {
        if !left_values.contains(&roots[output.value]) {
            let message = format!("%{} has no place at exit", facts.value_name(output.value));
            findings.push(Finding::new(Place::Output(i), message));
        }
    }
    findings
}

/// For each value, the value whose bytes it shares: [`Graph::root`], but safe for cycles and for
/// values without a definition. Such values become roots that no line can write.
fn roots(graph: &Graph, scratch: &Needs) -> Table<Value, Value> {
    let shares = |value: Value| match graph.values[value].def {
        Def::Node(node, i) if scratch.get(node).is_some_and(Option::is_some) => {
            let data = &graph.nodes[node];
            (data.op.is_alias() && data.outputs.get(i) == Some(&value)).then(|| data.inputs[0])
        }
        _ => None,
    };
    let mut roots: Table<Value, Option<Value>> = Table::filled(graph.values.len(), None);
    for start in graph.values.ids() {
        let (mut path, mut value) = (vec![], start);
        while roots[value].is_none() {
            // A value on the path counts as its own root for now, so that a cycle ends here.
            roots[value] = Some(value);
            path.push(value);
            value = shares(value).unwrap_or(value);
        }
        for step in path {
            roots[step] = roots[value];
        }
    }
    graph
        .values
        .ids()
        .map(|value| roots[value].unwrap_or(value))
        .collect()
}

// --- contents ---

/// A map from every byte of a pool to a `T`: each key is valid up to the next. Invariant: byte 0
/// has a key.
struct Bytes<T> {
    from: BTreeMap<u64, T>,
}

impl<T: Clone> Bytes<T> {
    fn new(row: T) -> Bytes<T> {
        Bytes {
            from: BTreeMap::from([(0, row)]),
        }
    }
    /// The pieces of a range that is not empty, in order.
    fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, &T)> {
        let first = self
            .from
            .range(..=range.start)
            .next_back()
            .map_or(0, |(&start, _)| start);
        let mut rest = self.from.range(first..range.end).peekable();
        std::iter::from_fn(move || {
            let (&start, row) = rest.next()?;
            let end = rest.peek().map_or(range.end, |&(&next, _)| next);
            Some((start.max(range.start)..end, row))
        })
    }
    /// Cuts pieces at the start and the end of a range.
    fn cut(&mut self, range: &Range<u64>) {
        for at in [range.start, range.end] {
            let piece = self.from.range(..=at).next_back();
            if let Some(row) = piece
                .filter(|&(&start, _)| start != at)
                .map(|(_, row)| row.clone())
            {
                self.from.insert(at, row);
            }
        }
    }
    /// Replaces a range that is not empty by one piece.
    fn paint(&mut self, range: Range<u64>, row: T) {
        self.cut(&range);
        let inner: Vec<u64> = self
            .from
            .range(range.start + 1..range.end)
            .map(|(&start, _)| start)
            .collect();
        for start in inner {
            self.from.remove(&start);
        }
        self.from.insert(range.start, row);
    }
    /// Changes every piece of a range that is not empty.
    fn change(&mut self, range: Range<u64>, mut f: impl FnMut(&mut T)) {
        self.cut(&range);
        self.from.range_mut(range).for_each(|(_, row)| f(row));
    }
}

/// The content of bytes, and the line that wrote it; `None` for the start of the step.
#[derive(Clone, Copy)]
struct Held {
    what: What,
    since: Option<Instr>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    /// No content that may be read.
    Nothing,
    /// The scratch of a kernel.
    Scratch,
    /// Bytes of a root value. `base` is the address that the value's first byte would have, modulo
    /// 2^64. So the meaning of a piece does not depend on where it is cut, and parts of a value
    /// that are joined again are equal.
    Value { root: Value, base: u64 },
}

type Memory = Table<Pool, Bytes<Held>>;

/// Rules 2 and 5, by simulating one step; returns the number of reads.
fn contents(facts: &Facts<'_>, findings: &mut Vec<Finding>) -> usize {
    let Facts {
        graph,
        schedule,
        roots,
        ..
    } = facts;
    let nothing = Held {
        what: What::Nothing,
        since: None,
    };
    let mut memory: Memory = schedule.pools.iter().map(|_| Bytes::new(nothing)).collect();
    for (i, &(value, loc)) in schedule.entry.iter().enumerate() {
        let Some(span) = facts.span(loc, facts.bytes(value)) else {
            continue;
        };
        let mut pieces = memory[span.pool].pieces(span.range.clone());
        if let Some(What::Value { root, .. }) =
            pieces.find_map(|(_, held)| Some(held.what).filter(|&w| w != What::Nothing))
        {
            let message = format!(
                "%{} in {} ({}) shares bytes with %{}",
                facts.value_name(value),
                facts.buffer_name(loc.buffer),
                facts.range(&span),
                facts.value_name(root)
            );
            findings.push(Finding::new(Place::Entry(i), message));
        }
        drop(pieces);
        hold(&mut memory, &span, (roots[value], 0), None);
    }
    let mut reads = 0;
    let mut ran: Table<Node, Option<Instr>> = Table::filled(graph.nodes.len(), None);
    for (instr, data) in schedule.instrs.iter() {
        let mut refuse = |message| findings.push(Finding::new(Place::Instr(instr), message));
        match &data.kind {
            InstrKind::Run {
                node,
                args,
                outs,
                scratch,
                part,
            } => {
                let data = &graph.nodes[*node];
                let extent = |value| graph.extent(*node, *part, value);
                for (&value, &loc) in data.inputs.iter().zip(args) {
                    reads += 1;
                    if let Err(holds) = find(facts, &memory, value, (loc, extent(value))) {
                        let buffer = facts.buffer_name(loc.buffer);
                        refuse(format!(
                            "reads {buffer} for %{} {holds}",
                            facts.value_name(value)
                        ));
                    }
                }
                if let Some(span) = scratch.and_then(|loc| facts.scratch_span(loc)) {
                    memory[span.pool].paint(
                        span.range,
                        Held {
                            what: What::Scratch,
                            since: Some(instr),
                        },
                    );
                }
                for (&value, &loc) in data.outputs.iter().zip(outs) {
                    let Extent { start, bytes } = extent(value);
                    if let Some(span) = facts.span(loc, bytes) {
                        hold(&mut memory, &span, (roots[value], start), Some(instr));
                    }
                }
                match ran[*node].replace(instr) {
                    Some(first) if !data.op.is_pure() => {
                        refuse(format!(
                            "runs {} again after {first:?}, but it may have effects",
                            data.op.name()
                        ));
                    }
                    _ => {}
                }
            }
            &InstrKind::Copy { src, dst, bytes } => {
                if let (Some(src), Some(dst)) = (facts.span(src, bytes), facts.span(dst, bytes)) {
                    carry(&mut memory, &src, &dst, instr);
                }
            }
        }
    }
    for &node in &graph.order {
        let op = &graph.nodes[node].op;
        if !op.is_pure() && ran[node].is_none() {
            findings.push(Finding::new(
                Place::Node(node),
                format!("no line runs {}, which may have effects", op.name()),
            ));
        }
    }
    for (i, &(value, loc)) in schedule.exit.iter().enumerate() {
        reads += 1;
        let all = Extent {
            start: 0,
            bytes: facts.bytes(value),
        };
        if let Err(holds) = find(facts, &memory, value, (loc, all)) {
            let buffer = facts.buffer_name(loc.buffer);
            let message = format!(
                "should leave %{} in {buffer} {holds}",
                facts.value_name(value)
            );
            findings.push(Finding::new(Place::Exit(i), message));
        }
    }
    reads
}

/// Writes a value, from one of its bytes on.
fn hold(memory: &mut Memory, span: &Span, (root, from): (Value, u64), since: Option<Instr>) {
    let what = What::Value {
        root,
        base: span.range.start.wrapping_sub(from),
    };
    memory[span.pool].paint(span.range.clone(), Held { what, since });
}

/// Copies the contents of `src` piece by piece: one value, several values or none.
fn carry(memory: &mut Memory, src: &Span, dst: &Span, instr: Instr) {
    let distance = dst.range.start.wrapping_sub(src.range.start);
    let pieces: Vec<(Range<u64>, Held)> = memory[src.pool]
        .pieces(src.range.clone())
        .map(|(r, &held)| (r, held))
        .collect();
    for (range, held) in pieces {
        let what = match held.what {
            What::Value { root, base } => What::Value {
                root,
                base: base.wrapping_add(distance),
            },
            other => other,
        };
        let range = range.start.wrapping_add(distance)..range.end.wrapping_add(distance);
        memory[dst.pool].paint(
            range,
            Held {
                what,
                since: Some(instr),
            },
        );
    }
}

/// Checks that a value, or the part of it that a line reads, is complete at a place; otherwise says
/// what is there.
fn find(
    facts: &Facts<'_>,
    memory: &Memory,
    value: Value,
    (loc, extent): (Loc, Extent),
) -> Result<(), String> {
    let Some(span) = facts.span(loc, extent.bytes) else {
        return Ok(());
    };
    let wanted = What::Value {
        root: facts.roots[value],
        base: span.range.start.wrapping_sub(extent.start),
    };
    let wrong = memory[span.pool]
        .pieces(span.range.clone())
        .find(|(_, held)| held.what != wanted);
    let Some((range, held)) = wrong else {
        return Ok(());
    };
    let since = held
        .since
        .map_or("the start of the step".to_string(), |line| {
            format!("{line:?}")
        });
    let holds = match held.what {
        What::Nothing => "nothing yet".to_string(),
        What::Scratch => format!("scratch since {since}"),
        What::Value { root, base } if base == range.start => {
            format!("%{} since {since}", facts.value_name(root))
        }
        What::Value { root, base } => {
            let from = range.start.wrapping_sub(base);
            format!(
                "%{} from its byte {} on since {since}",
                facts.value_name(root),
                amount(from)
            )
        }
    };
    let at = facts.address(span.pool, span.range.start);
    if range.start == span.range.start {
        return Err(format!("at {at}, which holds {holds}"));
    }
    // An earlier part is right. The finding should name what overwrote the rest.
    let from = facts.address(span.pool, range.start);
    Err(format!("at {at}, which from {from} on holds {holds}"))
}

// --- operands ---

/// Rule 3.
fn operands(facts: &Facts<'_>, findings: &mut Vec<Finding>) {
    let Facts {
        graph, schedule, ..
    } = facts;
    for (instr, data) in schedule.instrs.iter() {
        let mut refuse = |message| findings.push(Finding::new(Place::Instr(instr), message));
        let (id, args, outs, scratch, part) = match &data.kind {
            InstrKind::Run {
                node,
                args,
                outs,
                scratch,
                part,
            } => (*node, args, outs, scratch, *part),
            &InstrKind::Copy { src, dst, bytes } => {
                if let (Some(from), Some(to)) = (facts.span(src, bytes), facts.span(dst, bytes))
                    && from.overlaps(&to)
                {
                    refuse(format!(
                        "copies {} onto itself: {}",
                        facts.range(&from),
                        facts.range(&to)
                    ));
                }
                continue;
            }
        };
        let node = &graph.nodes[id];
        let placed = |values: &[Value], locs: &[Loc]| -> Vec<(usize, Value, Span)> {
            let places = values.iter().zip(locs).enumerate();
            let span = |v: Value, loc: Loc| facts.span(loc, graph.extent(id, part, v).bytes);
            places
                .filter_map(|(i, (&v, &loc))| Some((i, v, span(v, loc)?)))
                .collect()
        };
        let args = placed(&node.inputs, args);
        let outs = placed(&node.outputs, outs);
        for (i, (_, result, to)) in outs.iter().enumerate() {
            for (_, other, too) in &outs[..i] {
                if to.overlaps(too) {
                    let (a, b) = (facts.value_name(*other), facts.value_name(*result));
                    refuse(format!(
                        "writes %{a} and %{b} to the same bytes: {}, {}",
                        facts.range(too),
                        facts.range(to)
                    ));
                }
            }
        }
        for (o, result, to) in &outs {
            for (i, operand, from) in &args {
                if from.overlaps(to)
                    && !may_share(facts, &node.op, (*i, *operand, from), (*o, *result, to))
                {
                    let (a, b) = (facts.value_name(*operand), facts.value_name(*result));
                    let (from, to) = (facts.range(from), facts.range(to));
                    refuse(format!(
                        "overwrites its operand %{a} ({from}) with %{b} ({to})"
                    ));
                }
            }
        }
        if let Some(span) = scratch.and_then(|loc| facts.scratch_span(loc)) {
            for (_, value, other) in args.iter().chain(&outs) {
                if span.overlaps(other) {
                    let value = facts.value_name(*value);
                    refuse(format!(
                        "has its scratch ({}) in the bytes of %{value} ({})",
                        facts.range(&span),
                        facts.range(other)
                    ));
                }
            }
        }
    }
}

/// True if an operand and a result are an in-place pair of the op, on the same bytes.
fn may_share(
    facts: &Facts<'_>,
    op: &Op,
    operand: (usize, Value, &Span),
    result: (usize, Value, &Span),
) -> bool {
    let values = &facts.graph.values;
    op.inplace().contains(&(operand.0, result.0))
        && values[operand.1].ty == values[result.1].ty
        && operand.2 == result.2
}

// --- conflicts ---

/// An access of a line in one of the two steps.
#[derive(Clone, Copy)]
struct Touch {
    /// The line's position in the list appended to itself.
    line: usize,
    /// The position of its stream among the streams in use.
    queue: usize,
    /// Its position on its stream, counted from 1 over both steps.
    count: u32,
    /// The buffer through which it touches the bytes.
    buffer: Buffer,
}

/// The last accesses of bytes.
#[derive(Clone, Default)]
struct Touched {
    write: Option<Touch>,
    /// Reads since that write, except reads that are ordered before another read.
    reads: Vec<Touch>,
}

/// How far each stream must have come.
type Clock = [u32];

fn join(clock: &mut Clock, other: &Clock) {
    clock
        .iter_mut()
        .zip(other)
        .for_each(|(a, &b)| *a = b.max(*a));
}

/// Rule 4 on two steps; returns the number of compared pairs.
fn conflicts(facts: &Facts<'_>, findings: &mut Vec<Finding>) -> usize {
    let Facts {
        graph, schedule, ..
    } = facts;
    let n_lines = schedule.instrs.len();
    let mut queue: Table<Stream, Option<usize>> = Table::filled(schedule.streams.len(), None);
    let mut n_queues = 0;
    for data in schedule.instrs.values() {
        if queue[data.stream].is_none() {
            queue[data.stream] = Some(n_queues);
            n_queues += 1;
        }
    }
    let Some(n_entries) = (2 * n_lines)
        .checked_mul(n_queues)
        .filter(|&n| n <= MAX_CLOCK_ENTRIES)
    else {
        let message = format!(
            "{n_lines} lines on {n_queues} streams are too many to prove: use fewer streams"
        );
        findings.push(Finding::new(Place::Schedule, message));
        return 0;
    };
    let mut clocks = vec![0u32; n_entries];
    let mut last: Vec<Option<usize>> = vec![None; n_queues];
    let mut counts = vec![0u32; n_queues];
    let mut touched: Table<Pool, Bytes<Touched>> = schedule
        .pools
        .iter()
        .map(|_| Bytes::new(Touched::default()))
        .collect();
    let mut host = Host::new(facts, n_queues);
    // The lines that the host has waited for when a step starts.
    let mut start = vec![0u32; n_queues];
    let mut races = Races {
        facts,
        seen: BTreeSet::new(),
        findings,
        n_pairs: 0,
    };
    for first in [0, n_lines] {
        for (instr, data) in schedule.instrs.iter() {
            let line = first + instr.index();
            let queue = queue[data.stream].expect("the stream of a line should have a queue");
            let (before, rest) = clocks.split_at_mut(line * n_queues);
            let clock = &mut rest[..n_queues];
            clock.copy_from_slice(&start);
            let same_stream = last[queue].replace(line);
            let deps = data.after.iter().filter_map(|dep| match dep.previous {
                false => Some(first + dep.instr.index()),
                // Before the first step there is no step to wait for.
                true => (first != 0).then(|| dep.instr.index()),
            });
            for other in same_stream.into_iter().chain(deps) {
                join(clock, &before[other * n_queues..][..n_queues]);
            }
            counts[queue] += 1;
            clock[queue] = counts[queue];
            for access in schedule.accesses(graph, instr) {
                let Some(span) = facts.span(access.loc, access.bytes) else {
                    continue;
                };
                let touch = Touch {
                    line,
                    queue,
                    count: counts[queue],
                    buffer: access.loc.buffer,
                };
                races.meet(&mut touched[span.pool], &span, touch, access.write, clock);
                if first == 0 {
                    host.watch(&span, access.write, clock);
                }
            }
        }
        start = host.clock(n_queues);
    }
    races.n_pairs
}

/// The conflicts without an order so far. A pair of lines is reported once, and not again for the
/// second step.
struct Races<'a, 'b> {
    facts: &'a Facts<'a>,
    seen: BTreeSet<(usize, usize)>,
    findings: &'b mut Vec<Finding>,
    n_pairs: usize,
}

impl Races<'_, '_> {
    /// Compares an access with the earlier accesses of the same bytes, and records it.
    fn meet(
        &mut self,
        touched: &mut Bytes<Touched>,
        span: &Span,
        touch: Touch,
        write: bool,
        clock: &Clock,
    ) {
        let ordered = |earlier: &Touch| earlier.count <= clock[earlier.queue];
        if write {
            for (_, piece) in touched.pieces(span.range.clone()) {
                for (earlier, wrote) in piece
                    .write
                    .iter()
                    .map(|t| (t, true))
                    .chain(piece.reads.iter().map(|t| (t, false)))
                {
                    self.compare(span, (touch, true), (*earlier, wrote), ordered(earlier));
                }
            }
            touched.paint(
                span.range.clone(),
                Touched {
                    write: Some(touch),
                    reads: vec![],
                },
            );
            return;
        }
        touched.change(span.range.clone(), |piece| {
            if let Some(earlier) = &piece.write {
                self.compare(span, (touch, false), (*earlier, true), ordered(earlier));
            }
            piece.reads.retain(|earlier| !ordered(earlier));
            piece.reads.push(touch);
        });
    }
    fn compare(
        &mut self,
        span: &Span,
        later: (Touch, bool),
        earlier: (Touch, bool),
        ordered: bool,
    ) {
        let ((touch, writes), (other, wrote)) = (later, earlier);
        if touch.line == other.line {
            return;
        }
        self.n_pairs += 1;
        let schedule = self.facts.schedule;
        let n_lines = schedule.instrs.len();
        // Two lines of the second step have the same order as in the first.
        if ordered || n_lines <= other.line || !self.seen.insert((touch.line, other.line)) {
            return;
        }
        let verb = |writes| if writes { "writes" } else { "reads" };
        let other_instr = Instr::new(other.line);
        let (when, of) = match touch.line < n_lines {
            true => ("", ""),
            false => ("in the next step ", " of this step"),
        };
        let message = format!(
            "{when}{} {} ({}) while {other_instr:?}{of} on {} still {} {}: no wait orders them",
            verb(writes),
            self.facts.buffer_name(touch.buffer),
            self.facts.range(span),
            self.facts.stream_name(other_instr),
            verb(wrote),
            self.facts.buffer_name(other.buffer),
        );
        self.findings.push(Finding::new(
            Place::Instr(Instr::new(touch.line % n_lines)),
            message,
        ));
    }
}

/// What the host waits for between two steps.
struct Host {
    /// For each watched place: whether only writes count, and how far the streams have come when
    /// the counted accesses have ended.
    watches: Vec<(bool, Vec<u32>)>,
    /// The watches of each byte.
    at: Table<Pool, Bytes<Vec<usize>>>,
    /// The watches of the inputs' places.
    inputs: Vec<usize>,
    /// For each output, the watches of all its places at exit.
    outputs: Vec<Vec<usize>>,
}

impl Host {
    fn new(facts: &Facts<'_>, n_queues: usize) -> Host {
        let Facts {
            graph,
            schedule,
            roots,
            ..
        } = facts;
        let mut host = Host {
            watches: vec![],
            at: schedule.pools.iter().map(|_| Bytes::new(vec![])).collect(),
            inputs: vec![],
            outputs: vec![],
        };
        for &(value, loc) in &schedule.entry {
            if let Def::Input(_) = graph.values[value].def {
                let watch = host.add(facts.span(loc, facts.bytes(value)), false, n_queues);
                host.inputs.push(watch);
            }
        }
        let mut left: BTreeMap<Value, Vec<usize>> = graph
            .outputs
            .iter()
            .map(|output| (roots[output.value], vec![]))
            .collect();
        for &(value, loc) in &schedule.exit {
            if let Some(watches) = left.get_mut(&roots[value]) {
                watches.push(host.add(facts.span(loc, facts.bytes(value)), true, n_queues));
            }
        }
        host.outputs = left.into_values().collect();
        host
    }
    fn add(&mut self, span: Option<Span>, writes: bool, n_queues: usize) -> usize {
        let watch = self.watches.len();
        self.watches.push((writes, vec![0; n_queues]));
        if let Some(span) = span {
            self.at[span.pool].change(span.range, |watches| watches.push(watch));
        }
        watch
    }
    /// Records an access of a line.
    fn watch(&mut self, span: &Span, write: bool, clock: &Clock) {
        for (_, watches) in self.at[span.pool].pieces(span.range.clone()) {
            for &watch in watches {
                let (writes_alone, seen) = &mut self.watches[watch];
                if write || !*writes_alone {
                    join(seen, clock);
                }
            }
        }
    }
    /// How far the streams have surely come when the host continues.
    fn clock(&self, n_queues: usize) -> Vec<u32> {
        let mut clock = vec![0; n_queues];
        for &watch in &self.inputs {
            join(&mut clock, &self.watches[watch].1);
        }
        for places in &self.outputs {
            // An output with several places is read from one of them. Which one is not known here.
            let surely = (0..n_queues).map(|queue| {
                places
                    .iter()
                    .map(|&w| self.watches[w].1[queue])
                    .min()
                    .unwrap_or(0)
            });
            join(&mut clock, &surely.collect::<Vec<u32>>());
        }
        clock
    }
}

#[cfg(test)]
mod tests;
