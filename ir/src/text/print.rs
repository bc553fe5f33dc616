//! Values to text. Never fails: an invalid id prints as `"?v7"`, so that `verify` can point at it.

use super::{RESERVED, is_word};
use crate::finding::{Finding, Place};
use crate::graph::{Graph, Node, Value};
use crate::plan::Plan;
use crate::schedule::{
    Instr, InstrData, InstrKind, Loc, MemorySpace, Part, Pool, Schedule, Stream, Why,
};
use crate::table::Id;
use crate::{Attr, Body, Op, Program};
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

/// The column at which comments start, unless the line is longer.
const COMMENT_COLUMN: usize = 64;

pub(super) fn graph(graph: &Graph, findings: &[Finding]) -> String {
    let mut lines = Lines::new(findings);
    graph_block(&mut lines, graph);
    lines.finish()
}

pub(super) fn program(
    program: &Program,
    comment: &dyn Fn(Instr) -> Option<String>,
    findings: &[Finding],
) -> String {
    let mut lines = Lines::new(findings);
    graph_block(&mut lines, &program.graph);
    schedule_block(&mut lines, program, comment);
    lines.finish()
}

pub(super) fn instr_alone(graph: &Graph, schedule: &Schedule, instr: Instr) -> String {
    let mut mentions = Mentions {
        schedule,
        plan: None,
        seen: vec![true; schedule.buffers.len()],
    };
    match schedule.instrs.get(instr) {
        Some(data) => instr_line(graph, &mut mentions, instr, data),
        None => format!("{instr:?}"),
    }
}

pub(super) fn op_alone(op: &Op) -> String {
    call_text(op, "")
}

// --- lines ---

/// The text so far, and the findings whose line was not printed yet.
struct Lines {
    text: String,
    findings: BTreeMap<Place, Vec<String>>,
    /// Ends of the first lines of the graph and of the schedule: findings without a line go there.
    heads: [Option<usize>; 2],
}

impl Lines {
    fn new(findings: &[Finding]) -> Lines {
        let mut by_place: BTreeMap<Place, Vec<String>> = BTreeMap::new();
        for finding in findings {
            // A comment ends with its line, so a message of several lines becomes one line.
            let message = finding.message.replace(char::is_control, " ");
            by_place.entry(finding.place).or_default().push(message);
        }
        Lines {
            text: String::new(),
            findings: by_place,
            heads: [None, None],
        }
    }

    /// Adds a line, then the findings that are about it.
    fn push(&mut self, line: &str, places: &[Place]) {
        self.text.push_str(line.trim_end());
        self.text.push('\n');
        for place in places {
            for message in self.findings.remove(place).unwrap_or_default() {
                self.text.push_str(&format!("  ; error: {message}\n"));
            }
        }
    }

    fn finish(mut self) -> String {
        // The schedule's head first: inserting there does not move the graph's head.
        for (block, head) in self.heads.into_iter().enumerate().rev() {
            let Some(head) = head else { continue };
            let is_here =
                |place: &Place| (block == 1) == is_of_schedule(*place) || self.heads[1].is_none();
            let left: Vec<Place> = self.findings.keys().copied().filter(is_here).collect();
            let mut text = String::new();
            for place in left {
                for message in self.findings.remove(&place).unwrap_or_default() {
                    text.push_str(&format!("  ; error: {}\n", Finding::new(place, message)));
                }
            }
            self.text.insert_str(head, &text);
        }
        self.text
    }
}

fn is_of_schedule(place: Place) -> bool {
    match place {
        Place::Graph
        | Place::Value(_)
        | Place::Node(_)
        | Place::State(_)
        | Place::Output(_)
        | Place::Gradient(_) => false,
        Place::Schedule
        | Place::Pool(_)
        | Place::Stream(_)
        | Place::Buffer(_)
        | Place::Entry(_)
        | Place::Instr(_)
        | Place::Exit(_) => true,
    }
}

// --- graph ---

fn graph_block(lines: &mut Lines, graph: &Graph) {
    lines.push(&format!("graph {} {{", name(&graph.name)), &[Place::Graph]);
    lines.heads[0] = Some(lines.text.len());
    for &value in &graph.inputs {
        let line = format!(
            "  input  {} : {}",
            value_name(graph, value),
            value_type(graph, value)
        );
        lines.push(&line, &[Place::Value(value)]);
    }
    for (state, data) in graph.states.iter() {
        let before = data.before;
        let mut line = format!(
            "  state  {:<6} {}",
            data.kind.name(),
            value_name(graph, before)
        );
        if data.after != before {
            line.push_str(&format!(" -> {}", value_name(graph, data.after)));
        }
        line.push_str(&format!(
            " : {} {}",
            value_type(graph, before),
            quoted(&data.path)
        ));
        lines.push(&line, &[Place::State(state), Place::Value(before)]);
    }
    for &node in &graph.order {
        let mut places = vec![Place::Node(node)];
        if let Some(data) = graph.nodes.get(node) {
            places.extend(data.outputs.iter().map(|&v| Place::Value(v)));
        }
        lines.push(&node_line(graph, node), &places);
    }
    for (i, output) in graph.outputs.iter().enumerate() {
        let line = format!(
            "  output {} = {}",
            name(&output.name),
            value_name(graph, output.value)
        );
        lines.push(&line, &[Place::Output(i)]);
    }
    for (i, &(state, value)) in graph.gradients.iter().enumerate() {
        let path = graph
            .states
            .get(state)
            .map_or(format!("?{state:?}"), |s| s.path.clone());
        let line = format!(
            "  gradient {} = {}",
            quoted(&path),
            value_name(graph, value)
        );
        lines.push(&line, &[Place::Gradient(i)]);
    }
    lines.push("}", &[]);
}

fn node_line(graph: &Graph, node: Node) -> String {
    let Some(data) = graph.nodes.get(node) else {
        return format!("  ; {node:?} is not in the table of nodes");
    };
    let module = if data.module.is_empty() {
        "-".to_string()
    } else {
        name(&data.module)
    };
    let names = |values: &[Value]| joined(values.iter().map(|&v| value_name(graph, v)));
    let call = call_text(&data.op, &names(&data.inputs));
    let types = joined(data.outputs.iter().map(|&v| value_type(graph, v)));
    format!(
        "  {} {module:<10} {} = {call} : {types}",
        data.phase.name(),
        names(&data.outputs)
    )
}

fn value_name(graph: &Graph, value: Value) -> String {
    match graph.values.get(value) {
        Some(data) => format!("%{}", name(&data.name)),
        None => format!("%\"?{value:?}\""),
    }
}

fn value_type(graph: &Graph, value: Value) -> String {
    graph
        .values
        .get(value)
        .map_or("?".to_string(), |data| data.ty.to_string())
}

pub(super) fn attr_text(attr: &Attr) -> String {
    match attr {
        Attr::Int(i) => i.to_string(),
        Attr::Float(x) => float(*x),
        Attr::Bool(b) => b.to_string(),
        Attr::Ints(list) => {
            let list: Vec<String> = list.iter().map(i64::to_string).collect();
            format!("[{}]", list.join(","))
        }
        Attr::Type(dtype) => dtype.to_string(),
        Attr::Str(text) => quoted(text),
        Attr::Body(body) => body_text(body),
    }
}

/// `{%2 = add %0, %1 | %3 = relu %2 | %3}`
fn body_text(body: &Body) -> String {
    let numbers = |list: &[usize]| joined(list.iter().map(|v| format!("%{v}")));
    let mut next = body.operands();
    let mut parts = vec![];
    for step in body.steps() {
        let results: Vec<usize> = (next..next + step.outputs).collect();
        next += step.outputs;
        parts.push(format!(
            "{} = {}",
            numbers(&results),
            call_text(&step.op, &numbers(&step.inputs))
        ));
    }
    parts.push(numbers(body.results()));
    format!("{{{}}}", parts.join(" | "))
}

/// `gelu %h tanh=true`
fn call_text(op: &Op, operands: &str) -> String {
    let mut text = name(op.name());
    if !operands.is_empty() {
        text.push_str(&format!(" {operands}"));
    }
    for (key, attr) in op.attrs() {
        text.push_str(&format!(" {key}={}", attr_text(&attr)));
    }
    text
}

/// The shortest text that parses to the same bits, and not to an integer.
fn float(x: f64) -> String {
    if x.is_nan() && x.to_bits() != f64::NAN.to_bits() {
        return format!("nan.{:016x}", x.to_bits());
    }
    // Debug, not Display: 1.0 keeps its `.0`, and 1e300 its exponent.
    format!("{x:?}").to_lowercase()
}

// --- schedule ---

/// The buffers that the text has named. The first mention gives a buffer's place.
struct Mentions<'a> {
    schedule: &'a Schedule,
    plan: Option<&'a Plan>,
    seen: Vec<bool>,
}

impl Mentions<'_> {
    /// The text of a place; the buffer is added to `places` if this is its first mention.
    fn loc(&mut self, loc: Loc, places: &mut Vec<Place>) -> String {
        let Some(data) = self.schedule.buffers.get(loc.buffer) else {
            return format!("\"?{:?}\"", loc.buffer);
        };
        let mut text = name(&data.name);
        if !std::mem::replace(&mut self.seen[loc.buffer.index()], true) {
            places.push(Place::Buffer(loc.buffer));
            text.push_str(&format!("@{}", pool_name(self.schedule, data.pool)));
            if let Some(offset) = self.plan.and_then(|plan| plan.offset.get(loc.buffer)) {
                text.push_str(&format!("+{}", Bytes(*offset)));
            }
            text.push_str(&format!(":{}", Bytes(data.bytes)));
        }
        if 0 < loc.offset {
            text.push_str(&format!("+{}", Bytes(loc.offset)));
        }
        text
    }
}

fn schedule_block(lines: &mut Lines, program: &Program, comment: &dyn Fn(Instr) -> Option<String>) {
    let Program {
        graph,
        schedule,
        plan,
    } = program;
    let sm = schedule.sm.map_or(String::new(), |sm| format!(" sm_{sm}"));
    let head = format!(
        "schedule {} on {}{sm} {{",
        name(&schedule.name),
        name(&schedule.device)
    );
    lines.push(&head, &[Place::Schedule]);
    lines.heads[1] = Some(lines.text.len());
    for (pool, data) in schedule.pools.iter() {
        let mut line = format!("  pool {}", name(&data.name));
        // Most pools have the name of their space.
        if MemorySpace::of_pool_named(&data.name) != data.space {
            line.push_str(&format!(" in {}", data.space.name()));
        }
        if let Some(limit) = data.limit {
            line.push_str(&format!(" limit {}", Bytes(limit)));
        }
        if let Some(&peak) = plan.as_ref().and_then(|plan| plan.peak.get(pool)) {
            line.push_str(&format!(" peak {}", Bytes(peak)));
        }
        lines.push(&line, &[Place::Pool(pool)]);
    }
    for (stream, data) in schedule.streams.iter() {
        lines.push(
            &format!("  stream {}", name(&data.name)),
            &[Place::Stream(stream)],
        );
    }
    let mut mentions = Mentions {
        schedule,
        plan: plan.as_ref(),
        seen: vec![false; schedule.buffers.len()],
    };
    for (i, &(value, loc)) in schedule.entry.iter().enumerate() {
        let mut places = vec![Place::Entry(i)];
        let loc = mentions.loc(loc, &mut places);
        lines.push(
            &format!("  entry {} = {loc}", value_name(graph, value)),
            &places,
        );
    }
    for (instr, data) in schedule.instrs.iter() {
        let mut places = vec![Place::Instr(instr)];
        let mut line = format!(
            "  {}",
            instr_text(graph, &mut mentions, instr, data, &mut places)
        );
        if let Some(comment) = comment(instr) {
            let comment = comment.replace(char::is_control, " ");
            line = format!("{line:<COMMENT_COLUMN$} ; {comment}");
        }
        lines.push(&line, &places);
    }
    for (i, &(value, loc)) in schedule.exit.iter().enumerate() {
        let mut places = vec![Place::Exit(i)];
        let loc = mentions.loc(loc, &mut places);
        lines.push(
            &format!("  exit {} = {loc}", value_name(graph, value)),
            &places,
        );
    }
    for buffer in schedule.buffers.ids() {
        if !mentions.seen[buffer.index()] {
            let mut places = vec![];
            let loc = mentions.loc(buffer.into(), &mut places);
            lines.push(&format!("  buffer {loc}"), &places);
        }
    }
    lines.push("}", &[]);
}

fn instr_line(
    graph: &Graph,
    mentions: &mut Mentions<'_>,
    instr: Instr,
    data: &InstrData,
) -> String {
    instr_text(graph, mentions, instr, data, &mut vec![])
}

fn instr_text(
    graph: &Graph,
    mentions: &mut Mentions<'_>,
    instr: Instr,
    data: &InstrData,
    places: &mut Vec<Place>,
) -> String {
    let why = data.why;
    let mut word = why.name().to_string();
    if runs(why) != matches!(data.kind, InstrKind::Run { .. }) {
        word.push_str(if runs(why) { ":copy" } else { ":run" });
    }
    let stream = stream_name(mentions.schedule, data.stream);
    let mut line = format!("{:<4} {stream:<7} {word:<7} ", format!("{instr:?}"));
    match &data.kind {
        InstrKind::Run {
            node,
            args,
            outs,
            scratch,
            part,
        } => {
            line.push_str(&node_name(graph, *node));
            if !args.is_empty() {
                line.push_str(&format!(
                    " {}",
                    joined(args.iter().map(|&loc| mentions.loc(loc, places)))
                ));
            }
            line.push_str(" ->");
            if !outs.is_empty() {
                line.push_str(&format!(
                    " {}",
                    joined(outs.iter().map(|&loc| mentions.loc(loc, places)))
                ));
            }
            if let Some(scratch) = scratch {
                line.push_str(&format!(" scratch {}", mentions.loc(*scratch, places)));
            }
            if let &Some(Part { start, end }) = part {
                line.push_str(&format!(" part start={} end={}", Bytes(start), Bytes(end)));
            }
        }
        &InstrKind::Copy { src, dst, bytes } => {
            line.push_str(&format!("{} -> ", mentions.loc(src, places)));
            line.push_str(&mentions.loc(dst, places));
            let whole = mentions
                .schedule
                .buffers
                .get(dst.buffer)
                .map(|data| data.bytes);
            if whole != Some(bytes) {
                line.push_str(&format!(" bytes={}", Bytes(bytes)));
            }
        }
    }
    if !data.after.is_empty() {
        line.push_str(" after");
        for dep in &data.after {
            line.push_str(&format!(
                " {}{:?}",
                if dep.previous { "^" } else { "" },
                dep.instr
            ));
        }
    }
    line
}

/// True if a line with this reason runs a node, unless the text says otherwise.
pub(super) fn runs(why: Why) -> bool {
    matches!(why, Why::Model | Why::Recompute)
}

fn node_name(graph: &Graph, node: Node) -> String {
    let first = graph.nodes.get(node).and_then(|data| data.outputs.first());
    match first.and_then(|&v| graph.values.get(v)) {
        Some(data) => name(&data.name),
        None => format!("\"?{node:?}\""),
    }
}

fn pool_name(schedule: &Schedule, pool: Pool) -> String {
    schedule
        .pools
        .get(pool)
        .map_or(format!("\"?{pool:?}\""), |data| name(&data.name))
}

fn stream_name(schedule: &Schedule, stream: Stream) -> String {
    schedule
        .streams
        .get(stream)
        .map_or(format!("\"?{stream:?}\""), |data| name(&data.name))
}

/// A number of bytes: with K, M or G if it is an exact multiple.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (suffix, shift) in [("G", 30), ("M", 20), ("K", 10)] {
            if 0 < self.0 && self.0.is_multiple_of(1 << shift) {
                return write!(f, "{}{suffix}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}

// --- names ---

fn joined(texts: impl Iterator<Item = String>) -> String {
    texts.collect::<Vec<_>>().join(", ")
}

/// A name, in quotes if it is not a bare word.
fn name(text: &str) -> String {
    let is_bare = !text.is_empty() && text.bytes().all(is_word) && !RESERVED.contains(&text);
    if is_bare {
        text.to_string()
    } else {
        quoted(text)
    }
}

fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            ' '..='~' => out.push(c),
            _ if c.is_alphanumeric() => out.push(c),
            // Characters that could be invisible, or change the direction of the text, are written
            // by their number.
            _ => write!(out, "\\u{{{:x}}}", u32::from(c)).expect("a String should take text"),
        }
    }
    out.push('"');
    out
}
