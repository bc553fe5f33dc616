//! Explains one value.

use super::alternatives::Bench;
use super::chunk::Chunk;
use super::class;
use super::data::{Event, Explanation, Hosted, Stay, Together};
use super::memory::peak;
use crate::occupants::replay;
use crate::pipeline::Compiled;
use crate::plan::Problem;
use crate::plan::machine::HOST;
use ir::graph::Def;
use ir::schedule::Loc;
use ir::{Graph, Instr, Value, text};

/// Explains a value. `problem` is the compiled program's.
pub fn explain(compiled: &Compiled, problem: &Problem<'_>, asked: Value) -> Explanation {
    let program = &compiled.program;
    let graph = &program.graph;
    let value = graph.root(asked);
    let data = &graph.values[value];
    let (module, defined) = definition(graph, value);
    let peak = peak(compiled);
    let mut explanation = Explanation {
        name: data.name.clone(),
        ty: data.ty.clone(),
        class: class(graph, value),
        module,
        defined,
        shares: shares(graph, asked),
        events: events(compiled, value),
        stays: stays(compiled, value),
        at_peak: peak.tensors.iter().any(|r| r.values.contains(&value)),
        peak_line: peak.text,
        home: None,
        hosted: hosted(compiled, problem, value),
        beyond: compiled.program.schedule.pools[HOST].name.clone(),
        gaps: vec![],
        micros: compiled.timeline.micros,
        budget: compiled.decided.budget,
        planner: compiled.planner(),
    };
    if data.ty.bytes() > 0 {
        let mut bench = Bench::new(compiled, problem);
        explanation.home = bench.home(value);
        // A state of a chunk stays as long as the chunk.
        let chunk = explanation.hosted.as_ref().and_then(|h| h.chunk.as_ref());
        if chunk.is_none() {
            explanation.gaps = bench.gaps(value);
        }
    }
    explanation
}

/// What happens to a state that lives on the host or on a disk; `None` for other values.
fn hosted(compiled: &Compiled, problem: &Problem<'_>, value: Value) -> Option<Hosted> {
    let Compiled {
        program, decided, ..
    } = compiled;
    let graph = &program.graph;
    let Def::State(state) = graph.values[value].def else {
        return None;
    };
    decided.decisions.hosted.get(&state)?;
    let home = program
        .schedule
        .entry
        .iter()
        .find(|entry| entry.0 == value)?
        .1;
    let pool = program.schedule.buffers[home.buffer].pool;
    let chunk = Chunk::of(program, state).filter(|chunk| 1 < chunk.states.len());
    let reads = |node: ir::Node| !decided.decisions.on_host.contains(&node);
    let mut uses = problem.uses[value].iter();
    Some(Hosted {
        pool: program.schedule.pools[pool].name.clone(),
        comes: uses.any(|&at| reads(problem.lines[at as usize])),
        updated_there: decided.decisions.is_updated_on_host(graph, state),
        chunk: chunk.map(|chunk| Together {
            name: chunk.name(program),
            states: chunk.states.len(),
            bytes: chunk.bytes(program),
            micros: problem.cost.link(chunk.bytes(program)),
        }),
    })
}

/// The names of the values whose bytes a value shares, from itself to its root.
fn shares(graph: &Graph, asked: Value) -> Vec<String> {
    let name = |value: Value| graph.values[value].name.clone();
    let mut names = vec![name(asked)];
    let mut value = asked;
    while value != graph.root(asked) {
        let node = graph
            .def_node(value)
            .expect("a value that shares bytes should be a node's");
        value = graph.nodes[node].inputs[0];
        names.push(name(value));
    }
    names
}

/// The module of a value, and the text of its definition.
fn definition(graph: &Graph, value: Value) -> (String, String) {
    match graph.values[value].def {
        Def::Input(_) => (
            String::new(),
            "an input: the host feeds it at every step".to_string(),
        ),
        Def::State(state) => {
            let path = &graph.states[state].path;
            (path.clone(), format!("a state, {path:?}"))
        }
        Def::Node(node, _) => (graph.nodes[node].module.clone(), node_text(graph, node)),
    }
}

/// A node's line, without its place.
fn node_text(graph: &Graph, node: ir::Node) -> String {
    let data = &graph.nodes[node];
    let names = |values: &[Value]| {
        values
            .iter()
            .map(|&v| format!("%{}", graph.values[v].name))
            .collect::<Vec<_>>()
            .join(", ")
    };
    let call = format!("{} = {}", names(&data.outputs), text::print_op(&data.op));
    if data.inputs.is_empty() {
        call
    } else {
        format!("{call} of {}", names(&data.inputs))
    }
}

fn events(compiled: &Compiled, value: Value) -> Vec<Event> {
    let program = &compiled.program;
    let (graph, schedule) = (&program.graph, &program.schedule);
    let mut instrs: Vec<Instr> = vec![];
    replay(graph, schedule, |instr, _, held| {
        instrs.extend(instr.filter(|_| held == value))
    });
    instrs.dedup();
    instrs
        .into_iter()
        .map(|instr| Event::new(compiled, instr))
        .collect()
}

fn stays(compiled: &Compiled, value: Value) -> Vec<Stay> {
    let program = &compiled.program;
    let (graph, schedule) = (&program.graph, &program.schedule);
    // Places in the order of their first touch, with the first and the last line that find the
    // value there.
    let mut places: Vec<(Loc, Option<Instr>, Option<Instr>)> = vec![];
    replay(graph, schedule, |instr, loc, held| {
        if held != value {
            return;
        }
        match places.iter_mut().rev().find(|place| place.0 == loc) {
            Some(place) => place.2 = instr,
            None => places.push((loc, instr, instr)),
        }
    });
    let is_last = |loc: Loc| {
        schedule
            .exit
            .iter()
            .any(|&(v, at)| graph.root(v) == value && at == loc)
    };
    let stay = |(loc, from, to): (Loc, Option<Instr>, Option<Instr>)| {
        Stay::new(program, loc, from, to.filter(|_| !is_last(loc)))
    };
    places.into_iter().map(stay).collect()
}
