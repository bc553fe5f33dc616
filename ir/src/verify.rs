//! Structure: is every id in its table, is every name unique, does every line fit its op and its
//! buffers? What the lines *mean*, and whether they are ordered, is checked by
//! [`check`](crate::check).
//!
//! Before: nothing must hold; any value may be given, and verifying never panics. After: if there
//! is no finding, printing and parsing give an equal compact value, and passes may index tables
//! without checks.
//!
//! Rules of a graph:
//!  1. every id is in its table;
//!  2. names of values, paths of states and names of outputs are unique;
//!  3. every value has one definition, the one that its `def` says, and every node at least one
//!     result: its name;
//!  4. the order is topological and has every node once;
//!  5. result types follow from the op's shape rule;
//!  6. a state has the same type before and after; lines define its value after the step, outputs
//!     and gradients;
//!  7. a state has at most one gradient, of its type; in half precision, f32 is another.
//!
//! Rules of a program, checked if its graph has no finding:
//!  1. every id is in its table; names of pools, of streams and of buffers are unique; there is a
//!     pool and a stream;
//!  2. a buffer has at least one byte; a place starts at a multiple of [`ALIGN`] and its bytes end
//!     within its buffer;
//!  3. a run has a place for each operand and result of its node; it has scratch if and only if its
//!     op needs some, and the scratch is large enough;
//!  4. a node that shares its operand's bytes has no line; a node that may not be repeated has at
//!     most one;
//!  5. a copy moves at least one byte; a disk has no place of a run, and not both ends of a copy;
//!  6. a line waits for lines above it, or for any line of the previous step;
//!  7. `entry` has each state's value before the step and each input, once; `exit` has each state's
//!     value after the step
//!     where its value before the step was found, and each output; neither has anything else;
//!  8. with a plan: offsets are multiples of [`ALIGN`]; a pool's peak is the end of its last
//!     buffer, and is within its limit.

use crate::Program;
use crate::finding::{Finding, Place};
use crate::graph::{Def, Graph, Node, Value};
use crate::op::Scratch;
use crate::plan::Plan;
use crate::schedule::{ALIGN, Buffer, Instr, InstrKind, Loc, MemorySpace, Part, Schedule};
use crate::table::{Id, Table};
use crate::types::{DType, TensorType};
use std::collections::{BTreeMap, BTreeSet};

/// The errors in a graph's structure, in the order of its lines.
pub fn graph(graph: &Graph) -> Vec<Finding> {
    let mut findings = Findings::default();
    graph_ids(graph, &mut findings);
    // The other rules index tables.
    if findings.list.is_empty() {
        let defined = graph_definitions(graph, &mut findings);
        graph_names(graph, &mut findings);
        graph_uses(graph, &defined, &mut findings);
    }
    findings.list
}

/// The errors in a program's structure: findings of its graph, or, if there are none, of its
/// schedule and its plan.
pub fn program(program: &Program) -> Vec<Finding> {
    let list = self::graph(&program.graph);
    if list.is_empty() {
        self::schedule(program)
    } else {
        list
    }
}

/// The errors in the schedule and the plan of a program whose graph is right.
pub fn schedule(program: &Program) -> Vec<Finding> {
    let Program {
        graph,
        schedule,
        plan,
    } = program;
    let mut findings = Findings::default();
    schedule_ids(graph, schedule, &mut findings);
    if let Some(plan) = plan {
        plan_sizes(schedule, plan, &mut findings);
    }
    if findings.list.is_empty() {
        schedule_names(schedule, &mut findings);
        boundary(graph, schedule, &mut findings);
        lines(graph, schedule, &mut findings);
        if let Some(plan) = plan {
            addresses(schedule, plan, &mut findings);
        }
    }
    findings.list
}

#[derive(Default)]
struct Findings {
    list: Vec<Finding>,
}

impl Findings {
    fn add(&mut self, place: Place, message: impl Into<String>) {
        self.list.push(Finding::new(place, message));
    }
    fn ensure(&mut self, condition: bool, place: Place, message: impl FnOnce() -> String) {
        if !condition {
            self.add(place, message());
        }
    }
}

// --- graph ---

fn graph_ids(graph: &Graph, findings: &mut Findings) {
    let mut value = |v: Value, place: Place| {
        let known = graph.values.get(v).is_some();
        findings.ensure(known, place, || {
            format!("{v:?} is not in the table of values")
        });
    };
    for &v in &graph.inputs {
        value(v, Place::Value(v));
    }
    for (i, state) in graph.states.iter() {
        value(state.before, Place::State(i));
        value(state.after, Place::State(i));
    }
    for &node in &graph.order {
        let Some(data) = graph.nodes.get(node) else {
            continue;
        };
        for &v in data.inputs.iter().chain(&data.outputs) {
            value(v, Place::Node(node));
        }
    }
    for (i, output) in graph.outputs.iter().enumerate() {
        value(output.value, Place::Output(i));
    }
    for (i, &(_, v)) in graph.gradients.iter().enumerate() {
        value(v, Place::Gradient(i));
    }
    for &node in &graph.order {
        let known = graph.nodes.get(node).is_some();
        findings.ensure(known, Place::Node(node), || {
            format!("{node:?} is not in the table of nodes")
        });
    }
    for (i, &(state, _)) in graph.gradients.iter().enumerate() {
        let known = graph.states.get(state).is_some();
        findings.ensure(known, Place::Gradient(i), || {
            format!("there is no state {}", state.index())
        });
    }
}

/// Rules 3, 4 and 5. Returns the values that a line defines.
fn graph_definitions(graph: &Graph, findings: &mut Findings) -> Table<Value, bool> {
    let mut defined: Table<Value, bool> = Table::filled(graph.values.len(), false);
    let mut define = |findings: &mut Findings, v: Value, def: Def, place: Place| {
        let name = &graph.values[v].name;
        if std::mem::replace(&mut defined[v], true) {
            findings.add(place, format!("%{name} is defined by an earlier line too"));
        } else if graph.values[v].def != def {
            findings.add(
                place,
                format!(
                    "%{name} says of itself that it is {:?}, not {def:?}",
                    graph.values[v].def
                ),
            );
        }
    };
    for (i, &v) in graph.inputs.iter().enumerate() {
        define(findings, v, Def::Input(i), Place::Value(v));
    }
    for (i, state) in graph.states.iter() {
        define(findings, state.before, Def::State(i), Place::State(i));
    }
    // Operands are checked later, line by line. `position` says whether a definition is above or
    // below.
    let mut position: Table<Node, Option<usize>> = Table::filled(graph.nodes.len(), None);
    for (i, &node) in graph.order.iter().enumerate() {
        if position[node].is_some() {
            findings.add(Place::Node(node), "this node stands twice in the order");
            continue;
        }
        position[node] = Some(i);
        let data = &graph.nodes[node];
        findings.ensure(!data.outputs.is_empty(), Place::Node(node), || {
            format!(
                "{} should have a result: a node has the name of its first",
                data.op.name()
            )
        });
        for (k, &v) in data.outputs.iter().enumerate() {
            define(findings, v, Def::Node(node, k), Place::Node(node));
        }
    }
    for (i, &node) in graph.order.iter().enumerate() {
        let data = &graph.nodes[node];
        let place = Place::Node(node);
        for &v in &data.inputs {
            let name = &graph.values[v].name;
            let above = match graph.values[v].def {
                Def::Node(def, _) => position.get(def).copied().flatten().is_some_and(|p| p < i),
                _ => true,
            };
            match (defined[v], above) {
                (false, _) => findings.add(place, format!("reads %{name}, which no line defines")),
                (true, false) => {
                    findings.add(place, format!("reads %{name}, which a line below defines"))
                }
                (true, true) => {}
            }
        }
        graph_types(graph, node, findings);
    }
    defined
}

/// Rule 5.
fn graph_types(graph: &Graph, node: Node, findings: &mut Findings) {
    let data = &graph.nodes[node];
    let types: Vec<&TensorType> = data.inputs.iter().map(|&v| &graph.values[v].ty).collect();
    let results = match data.op.infer(&types) {
        Ok(results) => results,
        Err(error) => return findings.add(Place::Node(node), error),
    };
    findings.ensure(
        results.len() == data.outputs.len(),
        Place::Node(node),
        || {
            format!(
                "{} has {} results, not {}",
                data.op.name(),
                results.len(),
                data.outputs.len()
            )
        },
    );
    for (&v, ty) in data.outputs.iter().zip(&results) {
        let value = &graph.values[v];
        findings.ensure(value.ty == *ty, Place::Node(node), || {
            format!(
                "%{} is {}, but {ty} follows from the operands",
                value.name, value.ty
            )
        });
    }
}

/// Rule 2.
fn graph_names(graph: &Graph, findings: &mut Findings) {
    let results = graph.order.iter().flat_map(|&node| {
        graph.nodes[node]
            .outputs
            .iter()
            .map(move |&v| (v, Place::Node(node)))
    });
    let states = graph
        .states
        .iter()
        .map(|(i, state)| (state.before, Place::State(i)));
    let values = graph
        .inputs
        .iter()
        .map(|&v| (v, Place::Value(v)))
        .chain(states)
        .chain(results);
    let mut names: BTreeMap<&str, Value> = BTreeMap::new();
    for (v, place) in values {
        let name = graph.values[v].name.as_str();
        // Two definitions of the same value violate rule 3.
        findings.ensure(*names.entry(name).or_insert(v) == v, place, || {
            format!("another value has the name %{name} too")
        });
    }
    let mut paths = BTreeSet::new();
    for (i, state) in graph.states.iter() {
        let new = paths.insert(state.path.as_str());
        findings.ensure(new, Place::State(i), || {
            format!("another state has the path {:?} too", state.path)
        });
    }
    let mut names = BTreeSet::new();
    for (i, output) in graph.outputs.iter().enumerate() {
        let new = names.insert(output.name.as_str());
        findings.ensure(new, Place::Output(i), || {
            format!("another output has the name {:?} too", output.name)
        });
    }
}

/// Rules 6 and 7.
fn graph_uses(graph: &Graph, defined: &Table<Value, bool>, findings: &mut Findings) {
    let undefined = |v: Value| format!("no line defines %{}", graph.values[v].name);
    for (i, state) in graph.states.iter() {
        let (before, after) = (&graph.values[state.before], &graph.values[state.after]);
        findings.ensure(defined[state.after], Place::State(i), || {
            undefined(state.after)
        });
        findings.ensure(before.ty == after.ty, Place::State(i), || {
            format!(
                "is {} before the step, but %{} leaves {} after it",
                before.ty, after.name, after.ty
            )
        });
    }
    for (i, output) in graph.outputs.iter().enumerate() {
        findings.ensure(defined[output.value], Place::Output(i), || {
            undefined(output.value)
        });
    }
    let mut seen = BTreeSet::new();
    for (i, &(state, v)) in graph.gradients.iter().enumerate() {
        let place = Place::Gradient(i);
        findings.ensure(defined[v], place, || undefined(v));
        findings.ensure(seen.insert(state), place, || {
            "this state has a gradient already".to_string()
        });
        let (of, gradient) = (
            &graph.values[graph.states[state].before].ty,
            &graph.values[v].ty,
        );
        let is_half = matches!(of.dtype(), DType::BF16 | DType::F16);
        let is_wide = is_half && gradient.dtype() == DType::F32 && of.shape() == gradient.shape();
        findings.ensure(of == gradient || is_wide, place, || {
            format!("the gradient is {gradient}, but its state is {of}")
        });
    }
}

// --- schedule ---

/// Rule 1: ids.
fn schedule_ids(graph: &Graph, schedule: &Schedule, findings: &mut Findings) {
    findings.ensure(!schedule.pools.is_empty(), Place::Schedule, || {
        "a schedule should have a pool".to_string()
    });
    findings.ensure(!schedule.streams.is_empty(), Place::Schedule, || {
        "a schedule should have a stream".to_string()
    });
    for (buffer, data) in schedule.buffers.iter() {
        let known = schedule.pools.get(data.pool).is_some();
        findings.ensure(known, Place::Buffer(buffer), || {
            format!("{} lies in {:?}, which is no pool", data.name, data.pool)
        });
    }
    let place_of = |findings: &mut Findings, loc: Loc, place: Place| {
        let known = schedule.buffers.get(loc.buffer).is_some();
        findings.ensure(known, place, || {
            format!("{:?} is not in the table of buffers", loc.buffer)
        });
    };
    let value = |findings: &mut Findings, v: Value, place: Place| {
        let known = graph.values.get(v).is_some();
        findings.ensure(known, place, || {
            format!("{v:?} is not in the table of values")
        });
    };
    for (i, &(v, loc)) in schedule.entry.iter().enumerate() {
        value(findings, v, Place::Entry(i));
        place_of(findings, loc, Place::Entry(i));
    }
    for (instr, data) in schedule.instrs.iter() {
        let place = Place::Instr(instr);
        let known = schedule.streams.get(data.stream).is_some();
        findings.ensure(known, place, || format!("{:?} is no stream", data.stream));
        if let InstrKind::Run { node, .. } = data.kind {
            let known = graph.nodes.get(node).is_some();
            findings.ensure(known, place, || {
                format!("{node:?} is not in the table of nodes")
            });
        }
        for loc in data.kind.places() {
            place_of(findings, loc, place);
        }
    }
    for (i, &(v, loc)) in schedule.exit.iter().enumerate() {
        value(findings, v, Place::Exit(i));
        place_of(findings, loc, Place::Exit(i));
    }
}

/// Rules 1 and 2: names, and sizes of buffers.
fn schedule_names(schedule: &Schedule, findings: &mut Findings) {
    let mut names = BTreeSet::new();
    for (pool, data) in schedule.pools.iter() {
        let new = names.insert(data.name.as_str());
        findings.ensure(new, Place::Pool(pool), || {
            format!("another pool has the name {} too", data.name)
        });
    }
    names.clear();
    for (stream, data) in schedule.streams.iter() {
        let new = names.insert(data.name.as_str());
        findings.ensure(new, Place::Stream(stream), || {
            format!("another stream has the name {} too", data.name)
        });
    }
    names.clear();
    for (buffer, data) in schedule.buffers.iter() {
        let place = Place::Buffer(buffer);
        let new = names.insert(data.name.as_str());
        findings.ensure(new, place, || {
            format!("another buffer has the name {} too", data.name)
        });
        findings.ensure(0 < data.bytes, place, || {
            format!("{} should have at least one byte", data.name)
        });
    }
}

/// Rule 2: `what` takes `bytes` bytes at `loc`.
fn fits(
    schedule: &Schedule,
    loc: Loc,
    bytes: u64,
    what: &str,
    place: Place,
    findings: &mut Findings,
) {
    let buffer = &schedule.buffers[loc.buffer];
    let inside = loc
        .offset
        .checked_add(bytes)
        .is_some_and(|end| end <= buffer.bytes);
    findings.ensure(inside, place, || {
        let at = if loc.offset == 0 {
            String::new()
        } else {
            format!(" at offset {}", loc.offset)
        };
        format!(
            "{what} needs {bytes} bytes{at}, but {} has {}",
            buffer.name, buffer.bytes
        )
    });
    findings.ensure(loc.offset.is_multiple_of(ALIGN), place, || {
        format!(
            "{what} is at offset {} of {}, which is no multiple of {ALIGN}",
            loc.offset, buffer.name
        )
    });
}

/// Rule 7.
fn boundary(graph: &Graph, schedule: &Schedule, findings: &mut Findings) {
    let name = |v: Value| format!("%{}", graph.values[v].name);
    let mut found: BTreeMap<Value, Loc> = BTreeMap::new();
    for (i, &(v, loc)) in schedule.entry.iter().enumerate() {
        let place = Place::Entry(i);
        fits(
            schedule,
            loc,
            graph.values[v].ty.bytes(),
            &name(v),
            place,
            findings,
        );
        // For values of the graph, `def` was verified before.
        let enters = match graph.values[v].def {
            Def::Input(i) => graph.inputs.get(i) == Some(&v),
            Def::State(i) => graph.states.get(i).is_some_and(|state| state.before == v),
            Def::Node(..) => false,
        };
        findings.ensure(enters, place, || {
            format!(
                "{} is no input and no state's value before the step",
                name(v)
            )
        });
        let new = found.insert(v, loc).is_none();
        findings.ensure(new, place, || {
            format!("another entry line has {} too", name(v))
        });
    }
    for v in graph
        .inputs
        .iter()
        .copied()
        .chain(graph.states.values().map(|state| state.before))
    {
        findings.ensure(found.contains_key(&v), Place::Schedule, || {
            format!("no entry line says where {} is found", name(v))
        });
    }

    let mut left: BTreeSet<(Value, Loc)> = BTreeSet::new();
    let homes: BTreeSet<(Value, Option<Loc>)> = graph
        .states
        .values()
        .map(|state| (state.after, found.get(&state.before).copied()))
        .collect();
    let afters: BTreeSet<Value> = graph.states.values().map(|state| state.after).collect();
    let outputs: BTreeSet<Value> = graph.outputs.iter().map(|output| output.value).collect();
    for (i, &(v, loc)) in schedule.exit.iter().enumerate() {
        let place = Place::Exit(i);
        fits(
            schedule,
            loc,
            graph.values[v].ty.bytes(),
            &name(v),
            place,
            findings,
        );
        findings.ensure(left.insert((v, loc)), place, || {
            "another exit line is the same".to_string()
        });
        match (outputs.contains(&v), afters.contains(&v)) {
            (true, _) => {}
            (false, true) => findings.ensure(homes.contains(&(v, Some(loc))), place, || {
                format!("{} should be left where its state was found", name(v))
            }),
            (false, false) => findings.add(
                place,
                format!(
                    "{} is no output and no state's value after the step",
                    name(v)
                ),
            ),
        }
    }
    for state in graph.states.values() {
        // Without an entry line there already is a finding.
        let Some(&loc) = found.get(&state.before) else {
            continue;
        };
        let (before, after) = (name(state.before), name(state.after));
        findings.ensure(left.contains(&(state.after, loc)), Place::Schedule, || {
            format!("no exit line leaves {after} where {before} is found")
        });
    }
    let first = Loc {
        buffer: Buffer::new(0),
        offset: 0,
    };
    for output in &graph.outputs {
        let is_left = left
            .range((output.value, first)..)
            .next()
            .is_some_and(|&(v, _)| v == output.value);
        findings.ensure(is_left, Place::Schedule, || {
            format!("no exit line says where {} is left", name(output.value))
        });
    }
}

/// Rules 2 to 6.
fn lines(graph: &Graph, schedule: &Schedule, findings: &mut Findings) {
    let mut in_order: Table<Node, bool> = Table::filled(graph.nodes.len(), false);
    for &node in &graph.order {
        in_order[node] = true;
    }
    let mut has_run: Table<Node, Option<Instr>> = Table::filled(graph.nodes.len(), None);
    for (instr, data) in schedule.instrs.iter() {
        let place = Place::Instr(instr);
        match data.kind {
            InstrKind::Run { node, .. } if !in_order[node] => {
                findings.add(
                    place,
                    format!("runs {node:?}, which is not part of the step"),
                );
            }
            InstrKind::Run {
                node,
                ref args,
                ref outs,
                scratch,
                part,
            } => {
                let op = &graph.nodes[node].op;
                let earlier = has_run[node].replace(instr);
                if let (Some(earlier), false) = (earlier, op.is_pure()) {
                    let name = op.name();
                    findings.add(
                        place,
                        format!("{name} may not be repeated, and {earlier:?} runs the same node"),
                    );
                }
                match part_form(graph, node, part) {
                    Ok(()) => run(
                        graph,
                        schedule,
                        (node, part),
                        [args, outs],
                        scratch,
                        place,
                        findings,
                    ),
                    Err(message) => findings.add(place, message),
                }
            }
            InstrKind::Copy { src, dst, bytes } => {
                findings.ensure(0 < bytes, place, || {
                    "a copy should move at least one byte".to_string()
                });
                fits(schedule, src, bytes, "the copy", place, findings);
                fits(schedule, dst, bytes, "the copy", place, findings);
                let on_disk = [src, dst].map(|loc| is_on_disk(schedule, loc));
                findings.ensure(on_disk != [true; 2], place, || {
                    "a copy from the disk to the disk".to_string()
                });
            }
        }
        for dep in &data.after {
            let known = schedule.instrs.get(dep.instr).is_some();
            findings.ensure(known, place, || {
                format!("waits for {:?}, but there is no such line", dep.instr)
            });
            findings.ensure(!known || dep.previous || dep.instr < instr, place, || {
                format!(
                    "waits for {0:?}, which does not stand above it; ^{0:?} is the previous step's",
                    dep.instr
                )
            });
        }
    }
}

fn is_on_disk(schedule: &Schedule, loc: Loc) -> bool {
    let pool = schedule.buffers[loc.buffer].pool;
    schedule
        .pools
        .get(pool)
        .is_some_and(|data| data.space == MemorySpace::Disk)
}

/// Checks that lines may compute a part of a node.
pub(crate) fn part_form(graph: &Graph, node: Node, part: Option<Part>) -> Result<(), String> {
    let Some(Part { start, end }) = part else {
        return Ok(());
    };
    let name = graph.nodes[node].op.name();
    match graph.divisible(node) {
        None => Err(format!("{name} cannot run in parts")),
        Some(n) if start < end && end <= n => Ok(()),
        Some(n) => Err(format!(
            "{name} has {n} elements, and {start}..{end} is no part of them"
        )),
    }
}

/// Rules 2, 3 and 4 for one run.
fn run(
    graph: &Graph,
    schedule: &Schedule,
    (node, part): (Node, Option<Part>),
    [args, outs]: [&[Loc]; 2],
    scratch: Option<Loc>,
    place: Place,
    findings: &mut Findings,
) {
    let data = &graph.nodes[node];
    let op = &data.op;
    if op.is_alias() {
        let message = format!(
            "{} shares its operand's bytes and should have no line",
            graph.node_name(node)
        );
        return findings.add(place, message);
    }
    for (locs, values, what) in [
        (args, &data.inputs, "operands"),
        (outs, &data.outputs, "results"),
    ] {
        if locs.len() != values.len() {
            findings.add(
                place,
                format!(
                    "{} has {} {what}, but {} places are given",
                    op.name(),
                    values.len(),
                    locs.len()
                ),
            );
            continue;
        }
        for (&loc, &v) in locs.iter().zip(values) {
            let value = &graph.values[v];
            fits(
                schedule,
                loc,
                graph.extent(node, part, v).bytes,
                &format!("%{}", value.name),
                place,
                findings,
            );
        }
    }
    let mut places = args.iter().chain(outs).copied().chain(scratch);
    findings.ensure(!places.any(|loc| is_on_disk(schedule, loc)), place, || {
        format!("{} cannot run on a disk", op.name())
    });
    let need = match part {
        // A divisible op needs none.
        Some(_) => Scratch::default(),
        None => graph.work(node).scratch,
    };
    match (need.on(schedule.runs_on(args, outs)), scratch) {
        (0, None) => {}
        (0, Some(_)) => findings.add(place, format!("{} needs no scratch", op.name())),
        (bytes, None) => findings.add(
            place,
            format!("{} needs {bytes} bytes of scratch", op.name()),
        ),
        (bytes, Some(loc)) => fits(schedule, loc, bytes, "scratch", place, findings),
    }
}

// --- plan ---

/// Rule 1: a row for each buffer and each pool.
fn plan_sizes(schedule: &Schedule, plan: &Plan, findings: &mut Findings) {
    let (n, buffers) = (plan.offset.len(), schedule.buffers.len());
    findings.ensure(n == buffers, Place::Schedule, || {
        format!("the plan has {n} offsets for {buffers} buffers")
    });
    let (n, pools) = (plan.peak.len(), schedule.pools.len());
    findings.ensure(n == pools, Place::Schedule, || {
        format!("the plan has {n} peaks for {pools} pools")
    });
}

/// Rule 8.
fn addresses(schedule: &Schedule, plan: &Plan, findings: &mut Findings) {
    let mut ends = Table::filled(schedule.pools.len(), 0u64);
    for (buffer, data) in schedule.buffers.iter() {
        let (place, offset) = (Place::Buffer(buffer), plan.offset[buffer]);
        findings.ensure(offset.is_multiple_of(ALIGN), place, || {
            format!(
                "{} lies at {offset}, which is no multiple of {ALIGN}",
                data.name
            )
        });
        match offset.checked_add(data.bytes) {
            Some(end) => ends[data.pool] = ends[data.pool].max(end),
            None => findings.add(place, format!("{} ends above 2^64", data.name)),
        }
    }
    for (pool, data) in schedule.pools.iter() {
        let (place, peak, end) = (Place::Pool(pool), plan.peak[pool], ends[pool]);
        findings.ensure(peak == end, place, || {
            format!("the peak is {peak}, but the last buffer ends at {end}")
        });
        if let Some(limit) = data.limit {
            findings.ensure(end <= limit, place, || {
                format!(
                    "needs {end} bytes, {} above its limit of {limit}",
                    end - limit
                )
            });
        }
    }
}
