//! What lies where in the simulated step, and when most bytes are taken.

use super::{Class, class};
use crate::occupants::{Occupants, Place};
use crate::pipeline::Compiled;
use crate::plan::machine::DEVICE;
use ir::schedule::Loc;
use ir::{Buffer, Instr, Pool, Table, Value, text};

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
}
