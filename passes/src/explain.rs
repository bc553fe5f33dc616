//! Why a value is where it is, and what else would cost. Nothing is decided here: the figures come
//! from the decisions' own reasons, from the simulator's timeline, and, for what was not chosen,
//! from building and simulating the whole step with that one decision changed.
//!
//! Before: a compiled program. After: an [`Explanation`] of one value as plain data, and its text.

use crate::graph::canonical;
use crate::occupants::{Occupants, Place, replay};
use crate::pipeline::Compiled;
use crate::plan::machine::DEVICE;
use crate::plan::{Decisions, Gap, Means, Problem, Reason};
use crate::realise;
use crate::schedule::lives::variants;
use ir::graph::Def;
use ir::schedule::{Loc, Why};
use ir::{Buffer, Graph, Instr, Phase, Pool, Program, StateKind, Table, TensorType, Value, text};
use std::collections::BTreeSet;
use std::fmt::Write;

/// What a tensor is to the step.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Class {
    Param,
    Buffer,
    Const,
    Moment,
    Rng,
    Input,
    Activation,
    Gradient,
    Update,
    Scratch,
}

impl Class {
    /// The word in reports.
    pub fn name(self) -> &'static str {
        match self {
            Class::Param => "param",
            Class::Buffer => "buffer",
            Class::Const => "const",
            Class::Moment => "moment",
            Class::Rng => "rng",
            Class::Input => "input",
            Class::Activation => "activation",
            Class::Gradient => "gradient",
            Class::Update => "update",
            Class::Scratch => "scratch",
        }
    }

    fn of_state(kind: StateKind) -> Class {
        match kind {
            StateKind::Param => Class::Param,
            StateKind::Buffer => Class::Buffer,
            StateKind::Const => Class::Const,
            StateKind::Moment => Class::Moment,
            StateKind::Rng => Class::Rng,
        }
    }
}

/// The class of a value. A state's new value is of the state's class: it takes the old one's place.
pub fn class(graph: &Graph, value: Value) -> Class {
    let root = graph.root(value);
    match graph.values[root].def {
        Def::Input(_) => Class::Input,
        Def::State(state) => Class::of_state(graph.states[state].kind),
        Def::Node(node, _) => match graph
            .states
            .values()
            .find(|state| graph.root(state.after) == root)
        {
            Some(state) => Class::of_state(state.kind),
            None => match graph.nodes[node].phase {
                Phase::Forward => Class::Activation,
                Phase::Backward => Class::Gradient,
                Phase::Optimizer => Class::Update,
            },
        },
    }
}

// --- peak ---

/// What lies on the device when most does.
#[derive(Clone, PartialEq, Debug)]
pub struct Peak {
    /// The moment in the step, µs.
    pub at: f64,
    /// The line that starts then and brings bytes; as text.
    pub text: String,
    /// Bytes taken then.
    pub bytes: u64,
    /// What they are, largest first.
    pub tensors: Vec<Residence>,
}

/// The moment at which most bytes of the device are taken, and what they are.
pub fn peak(compiled: &Compiled) -> Peak {
    let program = &compiled.program;
    let residences = residences(compiled);
    let (at, bytes) = fullest(&residences, DEVICE);
    let mut tensors: Vec<Residence> = residences
        .into_iter()
        .filter(|r| r.pool == DEVICE && r.is_at(at))
        .collect();
    tensors.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    let new = tensors.iter().filter(|r| r.from == at);
    let text = new.filter_map(|r| r.line).min().map_or_else(
        || "the start of the step".into(),
        |line| text::print_instr(&program.graph, &program.schedule, line),
    );
    Peak {
        at,
        text,
        bytes,
        tensors,
    }
}

// --- memory over time ---

/// A time for which a buffer is taken, in the simulated step.
#[derive(Clone, PartialEq, Debug)]
pub struct Residence {
    /// What lies there: the value's name, or the buffer's if it is scratch memory.
    pub name: String,
    /// The values in it; none in scratch memory. A state's old and new value take the same bytes.
    pub values: Vec<Value>,
    /// The line that brings it; none if it is there when the step starts.
    pub line: Option<Instr>,
    /// What it is.
    pub class: Class,
    /// Where.
    pub pool: Pool,
    /// Bytes.
    pub bytes: u64,
    /// From, µs.
    pub from: f64,
    /// Up to, µs; at most the time of a step.
    pub to: f64,
}

impl Residence {
    /// True if it is there at a moment, µs.
    pub fn is_at(&self, at: f64) -> bool {
        self.from <= at && at < self.to
    }
}

/// What lies where, and when, in a step among others like it: what reaches into the next step
/// appears at the start, as what is left of the step before. A place is taken from the start of the
/// first line that touches it to the end of the last; what is there at entry or exit, always. In a
/// chunk each state's bytes count until their own last use: `sync` lets others use them then.
pub fn residences(compiled: &Compiled) -> Vec<Residence> {
    let program = &compiled.program;
    let schedule = &program.schedule;
    let occupants = Occupants::new(&program.graph, schedule);
    let spans = spans(compiled, &occupants);
    let mut tenants = Tenants {
        compiled,
        occupants: &occupants,
        classes: Table::filled(program.graph.values.len(), None),
        residences: vec![],
    };
    for buffer in schedule.buffers.ids() {
        for (place, &span) in occupants.places(buffer).iter().zip(&spans[buffer]) {
            tenants.add(buffer, place, span);
        }
    }
    tenants.residences
}

/// How long a place is taken.
#[derive(Clone, Copy, Debug)]
struct Span {
    /// From, µs.
    from: f64,
    /// Up to, µs; infinite for what is there at entry or exit.
    to: f64,
    /// The line that starts first.
    line: Option<Instr>,
}

/// The span of each place of each buffer.
fn spans(compiled: &Compiled, occupants: &Occupants<'_>) -> Table<Buffer, Vec<Span>> {
    let program = &compiled.program;
    let (schedule, timeline) = (&program.schedule, &compiled.timeline);
    let untouched = Span {
        from: f64::INFINITY,
        to: f64::NEG_INFINITY,
        line: None,
    };
    let mut spans = Table::new();
    for buffer in schedule.buffers.ids() {
        spans.push(vec![untouched; occupants.places(buffer).len()]);
    }
    // The places of an access: a chunk's copy touches all of them.
    let touched = |loc: Loc, bytes: u64| {
        let places = occupants.places(loc.buffer);
        let end = loc.offset + bytes;
        places
            .iter()
            .enumerate()
            .filter(move |(_, place)| place.offset < end && loc.offset < place.offset + place.bytes)
            .map(|(at, _)| at)
    };
    for instr in schedule.instrs.ids() {
        schedule.each_access(&program.graph, instr, |access| {
            for at in touched(access.loc, access.bytes) {
                let span: &mut Span = &mut spans[access.loc.buffer][at];
                if timeline.start[instr] < span.from {
                    (span.from, span.line) = (timeline.start[instr], Some(instr));
                }
                span.to = span.to.max(timeline.end[instr]);
            }
        });
    }
    for &(value, loc) in schedule.entry.iter().chain(&schedule.exit) {
        for at in touched(loc, program.graph.values[value].ty.bytes().max(1)) {
            spans[loc.buffer][at] = Span {
                from: 0.0,
                to: f64::INFINITY,
                line: None,
            };
        }
    }
    spans
}

/// Collects residences, place by place.
struct Tenants<'a> {
    compiled: &'a Compiled,
    occupants: &'a Occupants<'a>,
    classes: Table<Value, Option<Class>>,
    residences: Vec<Residence>,
}

impl Tenants<'_> {
    /// Adds the residences in a place.
    fn add(&mut self, buffer: Buffer, place: &Place, span: Span) {
        let values = &place.values;
        // A state's new value takes the old one's place: that is one stay.
        if values.is_empty() || span.to == f64::INFINITY {
            return self.stay(buffer, place.bytes, values, span);
        }
        let start = |instr: Option<Instr>| instr.map(|instr| self.compiled.timeline.start[instr]);
        let starts: Vec<Option<f64>> = values.iter().map(|&(instr, _)| start(instr)).collect();
        for k in 0..values.len() {
            let mut own = span;
            if let Some(from) = starts[k].filter(|_| k > 0) {
                (own.from, own.line) = (from, values[k].0);
            }
            own.to = starts.get(k + 1).copied().flatten().unwrap_or(span.to);
            self.stay(buffer, place.bytes, &values[k..=k], own);
        }
    }

    /// Adds one residence, in two parts if it reaches into the next step.
    fn stay(&mut self, buffer: Buffer, bytes: u64, values: &[(Option<Instr>, Value)], span: Span) {
        let first = values.first().map(|&(_, value)| value);
        let name = self.occupants.name(buffer, first);
        let class = first.map_or(Class::Scratch, |value| self.class(value));
        let step = self.compiled.timeline.micros;
        for (part, (from, to)) in folded(span.from, span.to, step).into_iter().enumerate() {
            self.residences.push(Residence {
                name: name.clone(),
                values: values.iter().map(|&(_, value)| value).collect(),
                line: span.line.filter(|_| part == 0 && to - from < step),
                class,
                pool: self.compiled.program.schedule.buffers[buffer].pool,
                bytes,
                from,
                to,
            });
        }
    }

    fn class(&mut self, value: Value) -> Class {
        let graph = &self.compiled.program.graph;
        *self.classes[value].get_or_insert_with(|| class(graph, value))
    }
}

/// The parts of a step in which something that lasts from `from` to `to` is there, if it is so in
/// every step.
fn folded(from: f64, to: f64, step: f64) -> Vec<(f64, f64)> {
    if step <= to - from {
        return vec![(0.0, step)];
    }
    // Nothing lasts for a step, so it is cut once at most; `from` may lie steps behind the first
    // start.
    let steps = (from / step).floor();
    let (from, to) = if step <= from {
        (from - steps * step, to - steps * step)
    } else {
        (from, to)
    };
    let parts = if to <= step {
        vec![(from, to)]
    } else {
        vec![(from, step), (0.0, to - step)]
    };
    parts.into_iter().filter(|(from, to)| from < to).collect()
}

/// The moment at which most bytes of a pool are taken, µs, and how many; the first of equally high
/// ones.
pub fn fullest(residences: &[Residence], pool: Pool) -> (f64, u64) {
    let here = || residences.iter().filter(|r| r.pool == pool);
    let starts = here().map(|r| (r.from, true, r.bytes));
    let mut changes: Vec<(f64, bool, u64)> = starts
        .chain(here().map(|r| (r.to, false, r.bytes)))
        .collect();
    // What ends makes room for what starts at the same moment.
    changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let (mut bytes, mut most) = (0, (0.0, 0));
    for (at, starts, size) in changes {
        bytes = if starts { bytes + size } else { bytes - size };
        if most.1 < bytes {
            most = (at, bytes);
        }
    }
    most
}

// --- tally ---

/// Decisions by kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tally {
    /// Values that stay on the device over at least one gap, all of their life.
    pub kept: Count,
    /// Gaps over which a value waits on the host.
    pub swap: Count,
    /// Gaps after which a value is computed again.
    pub recompute: Count,
    /// States that live on the host.
    pub hosted: Count,
}

/// How many, and how many bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Count {
    /// How many.
    pub count: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Count {
    fn add(&mut self, bytes: u64) {
        self.count += 1;
        self.bytes += bytes;
    }
}

/// Counts what was decided.
pub fn tally(problem: &Problem<'_>, decisions: &Decisions) -> Tally {
    let graph = problem.graph;
    let mut tally = Tally::default();
    let hosted = hosted(problem, decisions);
    let mut cut = Table::filled(graph.values.len(), false);
    for (gap, (means, _)) in &decisions.cuts {
        cut[gap.value] = true;
        // Not the reason's bytes: those are of all that was decided together.
        let bytes = graph.values[gap.value].ty.bytes();
        match (means, hosted.contains(&gap.value)) {
            // It is counted among the states on the host.
            (Means::Swap, true) => {}
            (Means::Swap, false) => tally.swap.add(bytes),
            (Means::Recompute, _) => tally.recompute.add(bytes),
        }
    }
    for gap in decisions.solved(problem).keys() {
        cut[gap.value] = true;
        tally.recompute.add(graph.values[gap.value].ty.bytes());
    }
    for &state in decisions.hosted.keys() {
        tally
            .hosted
            .add(graph.values[graph.states[state].before].ty.bytes());
    }
    for (value, data) in graph
        .values
        .iter()
        .filter(|&(value, _)| graph.root(value) == value && !cut[value])
        .filter(|(value, _)| !hosted.contains(value))
    {
        let bytes = data.ty.bytes();
        let kept = match data.def {
            Def::State(_) => true,
            Def::Input(_) | Def::Node(..) => problem.accesses[value]
                .windows(2)
                .any(|pair| pair[0] + 1 < pair[1]),
        };
        if kept && 0 < bytes {
            tally.kept.add(bytes);
        }
    }
    tally
}

/// The values of states that live on the host, before and after their updates.
fn hosted(problem: &Problem<'_>, decisions: &Decisions) -> BTreeSet<Value> {
    let graph = problem.graph;
    let states = decisions.hosted.keys().map(|&state| &graph.states[state]);
    states
        .flat_map(|state| [state.before, graph.root(state.after)])
        .collect()
}

/// What was decided for a value, in words.
pub fn decided(decisions: &Decisions, problem: &Problem<'_>, value: Value) -> String {
    let (mut swaps, mut reruns) = (0, 0);
    for (_, (means, _)) in decisions.cuts.range(
        Gap { value, gap: 0 }..=Gap {
            value,
            gap: u32::MAX,
        },
    ) {
        match means {
            Means::Swap => swaps += 1,
            Means::Recompute => reruns += 1,
        }
    }
    reruns += decisions
        .solved(problem)
        .keys()
        .filter(|gap| gap.value == value)
        .count() as u32;
    let times = |n: u32, what: &str| match n {
        0 => None,
        1 => Some(what.to_string()),
        n => Some(format!("{what} {n} times")),
    };
    // Such a state comes for its uses: that is no swap of its own.
    let is_hosted = hosted(problem, decisions).contains(&problem.graph.root(value));
    let hosted = is_hosted.then(|| {
        swaps = 0;
        "lives on the host".to_string()
    });
    let what: Vec<String> = [hosted, times(swaps, "swapped"), times(reruns, "recomputed")]
        .into_iter()
        .flatten()
        .collect();
    if what.is_empty() {
        "kept".into()
    } else {
        what.join(", ")
    }
}

// --- names ---

/// What a name on the command line stands for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Named {
    /// One value.
    Value(Value),
    /// The values and states of a module, in the graph's order.
    Module(Vec<Value>),
    /// The values in a buffer that holds several, as reports name it.
    Buffer(Vec<Value>),
    /// Scratch memory: the line that uses it.
    Scratch(Instr),
    /// A value of the traced graph that the passes removed; what took its place, if something did.
    Removed(Option<Value>),
    /// Nothing; names that are near.
    Unknown(Vec<String>),
}

/// Looks a name up: a value, with or without `%`; a state's path; an output; a module's path; a
/// buffer. `traced` is the graph before any pass.
pub fn named(program: &Program, traced: &Graph, name: &str) -> Named {
    let graph = &program.graph;
    let bare = name.strip_prefix('%').unwrap_or(name);
    if let Some(value) = value_named(graph, bare) {
        return Named::Value(value);
    }
    if let Some((old, _)) = traced.values.iter().find(|(_, data)| data.name == bare) {
        return traced_value(graph, traced, old);
    }
    let members = module_values(graph, bare);
    if !members.is_empty() {
        return Named::Module(members);
    }
    if let Some(found) = buffer_named(program, bare) {
        return found;
    }
    let values = graph.values.values().map(|data| data.name.as_str());
    let paths = graph.states.values().map(|state| state.path.as_str());
    Named::Unknown(nearest(bare, values.chain(paths)))
}

fn by_name(graph: &Graph, name: &str) -> Option<Value> {
    let mut values = graph.values.iter();
    let found = values.find(|(_, data)| data.name == name);
    found.map(|(value, _)| value)
}

/// The value, the state or the output of a name.
fn value_named(graph: &Graph, name: &str) -> Option<Value> {
    let state = || {
        let state = graph.states.values().find(|state| state.path == name);
        state.map(|state| state.before)
    };
    let output = || {
        let output = graph.outputs.iter().find(|output| output.name == name);
        output.map(|output| output.value)
    };
    by_name(graph, name).or_else(state).or_else(output)
}

/// What a buffer holds.
fn buffer_named(program: &Program, name: &str) -> Option<Named> {
    let Program {
        graph, schedule, ..
    } = program;
    let mut buffers = schedule.buffers.iter();
    let (buffer, _) = buffers.find(|(_, data)| data.name == name)?;
    let occupants = Occupants::new(graph, schedule);
    let places = occupants.places(buffer).iter();
    let values = places.flat_map(|place| &place.values);
    let mut values: Vec<Value> = values.map(|&(_, value)| value).collect();
    values.sort_unstable();
    values.dedup();
    // A state's new value takes the old one's place; what was decided is the old one's.
    let old = |value: Value| {
        let mut states = graph.states.values();
        let state = states.find(|state| graph.root(state.after) == value);
        state.map(|state| state.before)
    };
    let all = values.clone();
    values.retain(|&value| old(value).is_none_or(|old| old == value || !all.contains(&old)));
    let uses = |&instr: &Instr| {
        let mut found = false;
        schedule.each_access(graph, instr, |access| found |= access.loc.buffer == buffer);
        found
    };
    match values[..] {
        [] => schedule.instrs.ids().find(uses).map(Named::Scratch),
        [value] => Some(Named::Value(value)),
        _ => Some(Named::Buffer(values)),
    }
}

/// What became of a value of the traced graph.
fn traced_value(graph: &Graph, traced: &Graph, old: Value) -> Named {
    // A reshape that no node reads any more still has bytes: those of its root.
    let became =
        canonical::became(traced, old).or_else(|| canonical::became(traced, traced.root(old)));
    let Some(name) = became else {
        return Named::Removed(None);
    };
    // What is computed for each chunk of rows, or each micro-batch.
    let is_part = |other: &str| {
        let rest = other.strip_prefix(&name);
        let number = rest.and_then(|rest| rest.strip_prefix('.'));
        number.is_some_and(|number| number.parse::<u64>().is_ok())
    };
    let values = graph.values.iter();
    let parts: Vec<Value> = values
        .filter(|(_, data)| is_part(&data.name))
        .map(|(value, _)| value)
        .collect();
    if parts.is_empty() {
        Named::Removed(by_name(graph, &name))
    } else {
        Named::Module(parts)
    }
}

/// The roots of a module and of the modules in it; none for the model as a whole.
fn module_values(graph: &Graph, module: &str) -> Vec<Value> {
    if module.is_empty() {
        return vec![];
    }
    let within = |path: &str| {
        path.strip_prefix(module)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let of_module = |value: Value| match graph.values[value].def {
        Def::Input(_) => false,
        Def::State(state) => within(&graph.states[state].path),
        Def::Node(node, _) => within(&graph.nodes[node].module),
    };
    let values = graph.values.ids();
    values
        .filter(|&value| graph.root(value) == value && of_module(value))
        .collect()
}

/// The names that are nearest to `wanted`: those that contain it first, then by edit distance.
pub fn nearest<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let wanted: Vec<char> = wanted.to_lowercase().chars().take(LONGEST_NAME).collect();
    let mut near: Vec<(usize, &str)> = names
        .filter_map(|name| {
            let lower: Vec<char> = name.to_lowercase().chars().take(LONGEST_NAME).collect();
            let contains =
                2 < wanted.len() && lower.windows(wanted.len()).any(|window| window == wanted);
            let edits = edits(&wanted, &lower);
            // A third of the characters may be wrong, and two in a short name: a swapped pair.
            let is_near = contains || 3 * edits <= wanted.len() + 2;
            is_near.then_some((if contains { 0 } else { 1 + edits }, name))
        })
        .collect();
    near.sort_unstable_by_key(|&(distance, name)| (distance, name.len(), name));
    near.dedup();
    near.into_iter()
        .take(5)
        .map(|(_, name)| name.to_string())
        .collect()
}

/// Characters of a name that are compared: the distance takes quadratic time.
const LONGEST_NAME: usize = 100;

/// How many characters must be inserted, removed or replaced (Levenshtein).
fn edits(a: &[char], b: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

// --- explanation ---

/// Everything that is known of one value.
#[derive(Clone, PartialEq, Debug)]
pub struct Explanation {
    /// Its name.
    pub name: String,
    /// Its type.
    pub ty: TensorType,
    /// What it is.
    pub class: Class,
    /// The module it was traced in, or its path as a state.
    pub module: String,
    /// How it comes to be: its node as text, `an input of the step`, ….
    pub defined: String,
    /// The value asked for, then those whose bytes it shares, down to the one that is explained.
    pub shares: Vec<String>,
    /// The lines that touch it, in order.
    pub events: Vec<Event>,
    /// When and where it lies on the device and on the host.
    pub stays: Vec<Stay>,
    /// True if it is on the device at the line where most bytes are.
    pub at_peak: bool,
    /// The line where most bytes are, as text.
    pub peak_line: String,
    /// What was decided for it as a state; absent for other values.
    pub home: Option<Choice>,
    /// What was decided for each gap between two accesses that are not neighbours.
    pub gaps: Vec<GapChoice>,
    /// Time of the step as planned, µs.
    pub micros: f64,
    /// The budget, bytes.
    pub budget: Option<u64>,
    /// The planner that decided, and the search that found the plan.
    pub planner: String,
}

/// A line that touches the value.
#[derive(Clone, PartialEq, Debug)]
pub struct Event {
    /// The line.
    pub instr: Instr,
    /// Its text.
    pub text: String,
    /// When it starts, µs.
    pub start: f64,
    /// When it ends, µs.
    pub end: f64,
}

/// A time at an address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stay {
    /// The buffer.
    pub buffer: String,
    /// Its pool.
    pub pool: String,
    /// Its offset, bytes.
    pub address: u64,
    /// The first line that touches it there; none: it is there when the step starts.
    pub from: Option<Instr>,
    /// The last; none: it is there when the step ends.
    pub to: Option<Instr>,
}

ir::named! {
    /// What is done with a value while no line reads it.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Way {
        /// It stays on the device.
        Keep = "keep",
        /// It waits on the host.
        Swap = "swap",
        /// It is computed again.
        Recompute = "recompute",
    }
}

impl Way {
    fn done(self) -> &'static str {
        match self {
            Way::Keep => "kept",
            Way::Swap => "swapped",
            Way::Recompute => "recomputed",
        }
    }
}

/// A decision and the ways that were not taken.
#[derive(Clone, PartialEq, Debug)]
pub struct Choice {
    /// What was chosen.
    pub way: Way,
    /// The planner's figures; absent for what is kept.
    pub reason: Option<Reason>,
    /// The other ways, and what the step would come to; an error says why it cannot be, or that it
    /// was not looked at.
    pub others: Vec<(Way, Result<Outcome, String>)>,
}

/// The decision for a gap.
#[derive(Clone, PartialEq, Debug)]
pub struct GapChoice {
    /// The number of the access before it.
    pub gap: u32,
    /// The line before it; none: the start of the step.
    pub from: Option<Instr>,
    /// The line after it.
    pub to: Option<Instr>,
    /// How long it is, µs.
    pub micros: f64,
    /// What was decided.
    pub choice: Choice,
}

/// What a whole step comes to.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Outcome {
    /// Its time, µs.
    pub micros: f64,
    /// Peak of the device, bytes.
    pub peak: u64,
    /// True if that is within the budget.
    pub fits: bool,
}

/// Steps that are built and simulated for one explanation, at most: each takes as long as one round
/// of a planner.
const SIMULATIONS: usize = 16;

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
        gaps: vec![],
        micros: compiled.timeline.micros,
        budget: compiled.decided.budget,
        planner: compiled.planner(),
    };
    if data.ty.bytes() > 0 {
        let mut bench = Bench {
            compiled,
            problem,
            left: SIMULATIONS,
        };
        explanation.home = bench.home(value);
        explanation.gaps = bench.gaps(value);
    }
    explanation
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
    let timeline = &compiled.timeline;
    let text = |instr| text::print_instr(graph, schedule, instr);
    instrs
        .into_iter()
        .map(|instr| Event {
            instr,
            text: text(instr),
            start: timeline.start[instr],
            end: timeline.end[instr],
        })
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
        let data = &schedule.buffers[loc.buffer];
        Stay {
            buffer: data.name.clone(),
            pool: schedule.pools[data.pool].name.clone(),
            address: program.plan.as_ref().map_or(0, |plan| plan.address(loc)),
            from,
            to: to.filter(|_| !is_last(loc)),
        }
    };
    places.into_iter().map(stay).collect()
}

/// Where other decisions are tried.
struct Bench<'a> {
    compiled: &'a Compiled,
    problem: &'a Problem<'a>,
    /// How many more steps may be simulated.
    left: usize,
}

impl Bench<'_> {
    /// The step with the decisions that `change` leaves.
    fn outcome(&mut self, change: impl FnOnce(&mut Decisions)) -> Result<Outcome, String> {
        if self.left == 0 {
            return Err("not simulated: the value has too many gaps".into());
        }
        self.left -= 1;
        let mut decisions = self.compiled.decided.decisions.clone();
        change(&mut decisions);
        let budget = self.compiled.decided.budget.unwrap_or(u64::MAX);
        let schedule = realise::lines(self.problem, &decisions).map_err(|e| e.to_string())?;
        let variants = variants(self.problem, &schedule);
        let finished = variants
            .iter()
            .map(|(_, lives)| realise::finish(self.problem, &schedule, lives));
        let outcomes = finished.map(|r| Outcome {
            micros: r.micros,
            peak: r.peak,
            fits: r.peak <= budget,
        });
        // The fastest that fits; if none does, the smallest.
        let best = outcomes.min_by(|a, b| {
            let within = b.fits.cmp(&a.fits);
            within.then(if a.fits {
                a.micros.total_cmp(&b.micros)
            } else {
                a.peak.cmp(&b.peak)
            })
        });
        best.ok_or_else(|| "the step has no line".into())
    }

    /// Figures of a decision that no planner made: nothing reads them.
    fn unreasoned(&self, value: Value) -> Reason {
        Reason {
            bytes: self.problem.graph.values[value].ty.bytes(),
            swap: None,
            recompute: None,
            line: 0,
        }
    }

    /// What was decided for a state as a whole.
    fn home(&mut self, value: Value) -> Option<Choice> {
        let Def::State(state) = self.problem.graph.values[value].def else {
            return None;
        };
        let reason = self.compiled.decided.decisions.hosted.get(&state).copied();
        let (way, other) = if reason.is_some() {
            (Way::Swap, Way::Keep)
        } else {
            (Way::Keep, Way::Swap)
        };
        let new = self.unreasoned(value);
        let outcome = self.outcome(|decisions| {
            if reason.is_some() {
                decisions.hosted.remove(&state);
                decisions.cuts.retain(|gap, _| gap.value != value);
                decisions
                    .chunks
                    .iter_mut()
                    .for_each(|chunk| chunk.retain(|&other| other != state));
                decisions.chunks.retain(|chunk| !chunk.is_empty());
            } else {
                decisions.hosted.insert(state, new);
            }
        });
        Some(Choice {
            way,
            reason,
            others: vec![(other, outcome)],
        })
    }

    /// What was decided for each gap.
    fn gaps(&mut self, value: Value) -> Vec<GapChoice> {
        let graph = self.problem.graph;
        let decided = &self.compiled.decided.decisions;
        // A state at home never leaves it.
        if matches!(graph.values[value].def, Def::State(state)
            if !decided.hosted.contains_key(&state))
        {
            return vec![];
        }
        let mut gaps = self.decided_gaps(value);
        // The longest gaps first: where simulations are few, those are of interest.
        let mut order: Vec<usize> = (0..gaps.len()).collect();
        order.sort_by(|&a, &b| gaps[b].micros.total_cmp(&gaps[a].micros).then(a.cmp(&b)));
        for k in order {
            gaps[k].choice.others = self.other_ways(value, &gaps[k]);
        }
        gaps
    }

    /// The gaps between accesses and what was decided for each, without the ways not taken. Gaps
    /// without a line in between are left out, unless they are cut.
    fn decided_gaps(&self, value: Value) -> Vec<GapChoice> {
        let schedule = &self.compiled.program.schedule;
        let instrs = schedule.instrs.iter();
        let models: Vec<Instr> = instrs
            .filter(|(_, data)| data.why == Why::Model)
            .map(|(i, _)| i)
            .collect();
        let timeline = &self.compiled.timeline;
        let decided = &self.compiled.decided.decisions;
        let solved = decided.solved(self.problem);
        let mut gaps = vec![];
        for (number, pair) in (0..).zip(self.problem.accesses[value].windows(2)) {
            let gap = Gap { value, gap: number };
            let cut = decided.cuts.get(&gap).copied();
            let cut = cut.or_else(|| solved.get(&gap).map(|&reason| (Means::Recompute, reason)));
            if cut.is_none() && pair[1] <= pair[0] + 1 {
                continue;
            }
            let line = |position: u32| models.get(position as usize).copied();
            let (from, to) = (line(pair[0]), line(pair[1]));
            let micros = match (from, to) {
                (Some(from), Some(to)) => (timeline.start[to] - timeline.end[from]).max(0.0),
                _ => 0.0,
            };
            let way = match cut {
                None => Way::Keep,
                Some((Means::Swap, _)) => Way::Swap,
                Some((Means::Recompute, _)) => Way::Recompute,
            };
            gaps.push(GapChoice {
                gap: number,
                from,
                to,
                micros,
                choice: Choice {
                    way,
                    reason: cut.map(|(_, reason)| reason),
                    others: vec![],
                },
            });
        }
        gaps
    }

    /// What the step would come to with each way that was not taken for a gap.
    fn other_ways(
        &mut self,
        value: Value,
        decided: &GapChoice,
    ) -> Vec<(Way, Result<Outcome, String>)> {
        let graph = self.problem.graph;
        let gap = Gap {
            value,
            gap: decided.gap,
        };
        let reason = decided.choice.reason.unwrap_or(self.unreasoned(value));
        // The lines between the accesses, before which a solver may have put reruns.
        let accesses = &self.problem.accesses[value];
        let between = accesses[gap.gap as usize] + 1..=accesses[gap.gap as usize + 1];
        let spare = |decisions: &mut Decisions| {
            for (_, nodes) in decisions.reruns.range_mut(between.clone()) {
                nodes.retain(|&node| !graph.nodes[node].outputs.contains(&value));
            }
        };
        let mut outcome = |way: Way| match way {
            Way::Recompute if graph.def_node(value).is_none() => Err("no node computes it".into()),
            Way::Keep => self.outcome(|decisions| {
                spare(decisions);
                decisions.cuts.remove(&gap);
            }),
            Way::Swap => self.outcome(|decisions| {
                spare(decisions);
                decisions.cuts.insert(gap, (Means::Swap, reason));
            }),
            Way::Recompute => self.outcome(|decisions| {
                decisions.cuts.insert(gap, (Means::Recompute, reason));
            }),
        };
        let others = Way::ALL.into_iter();
        others
            .filter(|&way| way != decided.choice.way)
            .map(|way| (way, outcome(way)))
            .collect()
    }
}

// --- text ---

impl Explanation {
    /// The text for people. `bytes` and `micros` say how numbers are written.
    pub fn print(&self, bytes: &dyn Fn(u64) -> String, micros: &dyn Fn(f64) -> String) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = self.write(&mut out, bytes, micros);
        out
    }

    fn write(
        &self,
        out: &mut String,
        bytes: &dyn Fn(u64) -> String,
        micros: &dyn Fn(f64) -> String,
    ) -> std::fmt::Result {
        self.write_value(out, bytes)?;

        writeln!(out, "\nlines that touch it")?;
        for event in &self.events {
            writeln!(
                out,
                "  {:<72} ; {} .. {}",
                event.text,
                micros(event.start),
                micros(event.end)
            )?;
        }
        if self.events.is_empty() {
            writeln!(out, "  none")?;
        }
        self.write_choices(out, bytes, micros)
    }

    /// What the value is, and where it lies.
    fn write_value(&self, out: &mut String, bytes: &dyn Fn(u64) -> String) -> std::fmt::Result {
        if let [asked, sharing @ ..] = &self.shares[..]
            && !sharing.is_empty()
        {
            let sharing: Vec<String> = sharing.iter().map(|name| format!("%{name}")).collect();
            writeln!(
                out,
                "%{asked} is a reshape: it shares the bytes of {}",
                sharing.join(", which shares those of ")
            )?;
            writeln!(out)?;
        }
        writeln!(
            out,
            "%{} : {}, {}, {}",
            self.name,
            self.ty,
            bytes(self.ty.bytes()),
            self.class.name()
        )?;
        if !self.module.is_empty() && self.class != Class::Input {
            writeln!(out, "  module    {}", self.module)?;
        }
        writeln!(out, "  defined   {}", self.defined)?;
        for stay in &self.stays {
            let from = line_name(stay.from, "the start");
            let to = line_name(stay.to, "the end");
            writeln!(
                out,
                "  lies      {}@{}+{} from {from} to {to}",
                stay.buffer, stay.pool, stay.address
            )?;
        }
        let at = if self.at_peak {
            "on the device"
        } else {
            "not on the device"
        };
        writeln!(out, "  peak      {at} at the peak, at {}", self.peak_line)
    }

    /// What was decided, and what else would cost.
    fn write_choices(
        &self,
        out: &mut String,
        bytes: &dyn Fn(u64) -> String,
        micros: &dyn Fn(f64) -> String,
    ) -> std::fmt::Result {
        if let Some(home) = &self.home {
            let is = if home.way == Way::Keep {
                "lives on the device"
            } else {
                "lives on the host, and comes for its uses"
            };
            writeln!(out, "\nas a state it {is}")?;
            self.choice(out, home, bytes, micros, |way| match way {
                Way::Keep => "on the device",
                _ => "on the host",
            })?;
        }
        for gap in &self.gaps {
            let (from, to) = (line_name(gap.from, "the end"), line_name(gap.to, "the end"));
            writeln!(
                out,
                "\nfrom {from} to {to}, for {}, it is {}",
                micros(gap.micros),
                gap.choice.way.done()
            )?;
            self.choice(out, &gap.choice, bytes, micros, Way::name)?;
        }
        if self.home.is_none() && self.gaps.is_empty() {
            writeln!(
                out,
                "\nnothing was to be decided: no line lies between two of its accesses"
            )?;
        }
        Ok(())
    }

    fn choice(
        &self,
        out: &mut String,
        choice: &Choice,
        bytes: &dyn Fn(u64) -> String,
        micros: &dyn Fn(f64) -> String,
        word: fn(Way) -> &'static str,
    ) -> std::fmt::Result {
        match &choice.reason {
            Some(reason) => {
                // A planner prices only the means that it weighs.
                let prices = [("a swap", reason.swap), ("a recompute", reason.recompute)];
                let prices: String = prices
                    .iter()
                    .filter_map(|(means, price)| Some((means, micros((*price)?))))
                    .map(|(means, price)| format!("; {means} was estimated at {price}"))
                    .collect();
                writeln!(
                    out,
                    "  because   planner {}: this frees {}{prices}",
                    self.planner,
                    bytes(reason.bytes)
                )?;
            }
            None => writeln!(
                out,
                "  because   planner {} did not need its bytes, or found cheaper ones",
                self.planner
            )?,
        }
        for (way, outcome) in &choice.others {
            let word = word(*way);
            match outcome {
                // The time of the smallest variant would be compared with that of a faster one.
                Ok(outcome) if !outcome.fits => writeln!(
                    out,
                    "  {word:<9} instead: does not fit: peak {} or more",
                    bytes(outcome.peak)
                )?,
                Ok(outcome) => {
                    let change = outcome.micros - self.micros;
                    let (sign, better) = if change < 0.0 {
                        ("-", ": faster than the plan")
                    } else {
                        ("+", "")
                    };
                    writeln!(
                        out,
                        "  {word:<9} instead: step {} ({sign}{}), peak {}{better}",
                        micros(outcome.micros),
                        micros(change.abs()),
                        bytes(outcome.peak)
                    )?;
                }
                Err(why) => writeln!(out, "  {word:<9} instead: {why}")?,
            }
        }
        Ok(())
    }
}

/// A line's name, or a word where there is no line.
fn line_name(instr: Option<Instr>, none: &str) -> String {
    instr.map_or(none.into(), |instr| format!("{instr:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_reaches_into_the_next_step_is_left_of_the_one_before() {
        assert_eq!(folded(1.0, 3.0, 10.0), [(1.0, 3.0)]);
        assert_eq!(folded(8.0, 13.0, 10.0), [(8.0, 10.0), (0.0, 3.0)]);
        assert_eq!(folded(12.0, 15.0, 10.0), [(2.0, 5.0)]);
        assert_eq!(folded(2.0, 12.0, 10.0), [(0.0, 10.0)]);
        assert_eq!(folded(0.0, f64::INFINITY, 10.0), [(0.0, 10.0)]);
        assert!(folded(4.0, 4.0, 10.0).is_empty());
    }

    #[test]
    fn names_that_are_near_are_found() {
        let names = ["gelu", "gelu_1", "gelu_bwd", "view", "model.h.0.attn"];
        let near = |wanted: &str| nearest(wanted, names.into_iter());
        assert_eq!(near("gelu_2"), ["gelu_1", "gelu"]);
        assert_eq!(near("attn"), ["model.h.0.attn"]);
        assert_eq!(near("veiw"), ["view"]);
        assert!(near("entirely_different").is_empty());
        assert!(near("").is_empty());
    }
}
