//! What lies in the buffers of a schedule, and how reports name it.

use ir::schedule::{InstrKind, Loc, Schedule, buffer_bytes};
use ir::{Buffer, Graph, Instr, Table, Value};
use std::collections::BTreeMap;

/// The values that the lines of a schedule put into its buffers.
#[derive(Clone, Debug)]
pub struct Occupants<'a> {
    graph: &'a Graph,
    schedule: &'a Schedule,
    places: Table<Buffer, Vec<Place>>,
}

/// Values in the order in which they come, each with the line that brings it; `None` for what is
/// there when the step starts.
pub type Arrivals = Vec<(Option<Instr>, Value)>;

/// A part of a buffer that holds one value at a time: a chunk has one for each of its states, every
/// other buffer has one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// Offset in the buffer, bytes.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
    /// What it holds. Empty for scratch memory.
    pub values: Arrivals,
}

impl Place {
    /// The value after a line, or the first one; `None` for scratch memory.
    pub fn at(&self, line: Instr) -> Option<Value> {
        let came = |from: &Option<Instr>| from.is_none_or(|from| from <= line);
        let last = self.values.iter().rev().find(|(from, _)| came(from));
        last.or(self.values.first()).map(|&(_, value)| value)
    }
}

impl<'a> Occupants<'a> {
    /// The occupants of every buffer.
    pub fn new(graph: &'a Graph, schedule: &'a Schedule) -> Occupants<'a> {
        let mut places: Table<Buffer, BTreeMap<u64, Arrivals>> =
            Table::filled(schedule.buffers.len(), BTreeMap::new());
        replay(graph, schedule, |instr, loc, value| {
            let values = places[loc.buffer].entry(loc.offset).or_default();
            if values.last().is_none_or(|&(_, last)| last != value) {
                values.push((instr, value));
            }
        });
        let bytes = |value: Value| buffer_bytes(graph.values[value].ty.bytes());
        let place = |(offset, values): (u64, Arrivals)| Place {
            offset,
            bytes: values.iter().map(|&(_, v)| bytes(v)).max().unwrap_or(0),
            values,
        };
        let mut table = Table::new();
        for (data, places) in schedule.buffers.values().zip(places.values_mut()) {
            let mut places: Vec<Place> = std::mem::take(places).into_iter().map(place).collect();
            if let [] | [_] = places[..] {
                let values = places.pop().map_or(vec![], |place| place.values);
                places = vec![Place {
                    offset: 0,
                    bytes: data.bytes,
                    values,
                }];
            }
            table.push(places);
        }
        Occupants {
            graph,
            schedule,
            places: table,
        }
    }

    /// The places of a buffer by offset, at least one.
    pub fn places(&self, buffer: Buffer) -> &[Place] {
        &self.places[buffer]
    }

    /// How reports name a place while it holds `value`: by the value; scratch memory by its buffer.
    pub fn name(&self, buffer: Buffer, value: Option<Value>) -> String {
        let own = &self.schedule.buffers[buffer].name;
        value
            .map_or(own, |value| &self.graph.values[value].name)
            .clone()
    }
}

/// Tells, line by line, which root each touched place holds after the line. What is there at entry
/// comes first.
pub fn replay(graph: &Graph, schedule: &Schedule, mut seen: impl FnMut(Option<Instr>, Loc, Value)) {
    let mut holds: BTreeMap<Loc, Value> = BTreeMap::new();
    for &(value, loc) in &schedule.entry {
        holds.insert(loc, graph.root(value));
        seen(None, loc, graph.root(value));
    }
    for (instr, data) in schedule.instrs.iter() {
        match &data.kind {
            InstrKind::Run {
                node,
                args,
                outs,
                part,
                ..
            } => {
                let data = &graph.nodes[*node];
                // A part of a value lies where the value does, or alone in its buffer.
                let place = |value: Value, loc: Loc| {
                    let whole = schedule.whole_place(graph, (*node, *part), value, loc);
                    whole.unwrap_or(loc)
                };
                for (&loc, &value) in args.iter().zip(&data.inputs) {
                    seen(Some(instr), place(value, loc), graph.root(value));
                }
                for (&loc, &value) in outs.iter().zip(&data.outputs) {
                    let loc = place(value, loc);
                    holds.insert(loc, value);
                    seen(Some(instr), loc, value);
                }
            }
            // A chunk's copy takes all of its tensors along.
            InstrKind::Copy { src, dst, bytes } => {
                let end = Loc {
                    offset: src.offset + (*bytes).max(1),
                    ..*src
                };
                let moved: Vec<(Loc, Value)> =
                    holds.range(*src..end).map(|(&loc, &v)| (loc, v)).collect();
                for (from, value) in moved {
                    let to = Loc {
                        buffer: dst.buffer,
                        offset: dst.offset + (from.offset - src.offset),
                    };
                    // A part comes to the rest of its value.
                    let mut before = holds.range(Loc { offset: 0, ..to }..to);
                    let covers = |(loc, value): (&Loc, &Value)| {
                        to.offset < loc.offset + graph.values[*value].ty.bytes()
                    };
                    if before.next_back().is_some_and(covers) {
                        continue;
                    }
                    holds.insert(to, value);
                    seen(Some(instr), from, value);
                    seen(Some(instr), to, value);
                }
            }
        }
    }
}
