//! Buffers of the host that may wait on the disk, and their visits to the host.

use crate::cost::Cost;
use crate::lines::Stretch;
use crate::plan::Problem;
use crate::plan::machine::HOST;
use ir::graph::Def;
use ir::schedule::{Access, Buffer, Schedule, buffer_bytes};
use ir::{Id, State, Table};
use std::collections::BTreeSet;
use std::ops::Range;

/// What one line does with a range of a buffer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Touch {
    pub(super) line: usize,
    pub(super) bytes: Range<u64>,
    pub(super) reads: bool,
    pub(super) writes: bool,
    /// Whether it writes the whole range by one access.
    fills: bool,
}

/// A buffer that may wait on the disk.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Held {
    pub(super) buffer: Buffer,
    pub(super) bytes: u64,
    /// Whether states have their home in it: then it has content before the step and after.
    pub(super) is_home: bool,
    /// What lines do with it, in their order.
    pub(super) touches: Vec<Touch>,
    /// Whether its home is on the disk.
    pub(super) spills: bool,
    /// Whether its bytes leave the host after each of the touches. Counts if it spills.
    pub(super) cuts: Vec<bool>,
}

/// A stay of a part of a spilled buffer on the host: a range of its touches.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Visit {
    pub(super) buffer: Buffer,
    pub(super) bytes: Range<u64>,
    /// From the first line that touches it to the last.
    pub(super) first: usize,
    pub(super) last: usize,
    /// Whether its bytes come from the disk.
    pub(super) loads: bool,
    /// The line after which its bytes go to the disk, if they do.
    pub(super) stores: Option<usize>,
}

impl Visit {
    /// The size of its buffer on the host.
    pub(super) fn size(&self) -> u64 {
        buffer_bytes(self.bytes.end - self.bytes.start)
    }

    /// The time of its copies, µs: from the disk, and to it.
    pub(super) fn micros(&self, cost: &dyn Cost) -> [f64; 2] {
        let bytes = self.bytes.end - self.bytes.start;
        let time = |copies: bool, reads| if copies { cost.disk(bytes, reads) } else { 0.0 };
        [time(self.loads, true), time(self.stores.is_some(), false)]
    }
}

impl Held {
    /// Whether the bytes must leave after a touch if the buffer spills: another part follows, or
    /// the home of a state.
    fn must_cut(&self, after: usize) -> bool {
        match self.touches.get(after + 1) {
            Some(next) => next.bytes != self.touches[after].bytes,
            None => self.is_home,
        }
    }

    /// The same buffer with its home on the disk.
    pub(super) fn spilled(&self) -> Held {
        Held {
            spills: true,
            cuts: (0..self.touches.len()).map(|i| self.must_cut(i)).collect(),
            ..self.clone()
        }
    }

    /// Its visits to the host; none if it does not spill.
    pub(super) fn visits(&self) -> Vec<Visit> {
        let mut visits: Vec<Visit> = vec![];
        if !self.spills {
            return visits;
        }
        let n = self.touches.len();
        let mut begins = true;
        for (i, touch) in self.touches.iter().enumerate() {
            if begins {
                visits.push(Visit {
                    buffer: self.buffer,
                    bytes: touch.bytes.clone(),
                    first: touch.line,
                    last: touch.line,
                    loads: touch.reads || !touch.fills,
                    stores: None,
                });
            }
            let visit = visits.last_mut().expect("a touch should be in a visit");
            visit.last = touch.line;
            if touch.writes {
                visit.stores = Some(touch.line);
            }
            begins = self.cuts[i];
            // Nothing reads later what the last visit of a value leaves.
            if i + 1 == n && !self.is_home {
                visit.stores = None;
            }
        }
        visits
    }

    /// The lines at which it takes bytes of the host, and how many. `n` is the number of lines.
    pub(super) fn footprint(&self, n: usize) -> Vec<Stretch> {
        if self.spills {
            let visits = self.visits().into_iter();
            return visits.map(|v| (v.first, v.last + 1, v.size())).collect();
        }
        let (from, to) = match (self.touches.first(), self.touches.last()) {
            (Some(first), Some(last)) if !self.is_home => (first.line, last.line + 1),
            _ => (0, n),
        };
        vec![(from, to, self.bytes)]
    }

    /// The time of all its copies, µs.
    pub(super) fn micros(&self, cost: &dyn Cost) -> f64 {
        let visits = self.visits();
        let times = visits.iter().flat_map(|visit| visit.micros(cost));
        times.sum()
    }
}

/// The buffers of the host that may wait on the disk: all except inputs, outputs, and those that a
/// line names without touching a byte.
pub(super) fn held(problem: &Problem<'_>, schedule: &Schedule) -> Vec<Held> {
    let graph = problem.graph;
    let mut stays: Table<Buffer, bool> = Table::filled(schedule.buffers.len(), false);
    let mut is_home = stays.clone();
    let mut touches: Table<Buffer, Vec<Touch>> = Table::filled(schedule.buffers.len(), vec![]);
    for (i, &(value, loc)) in schedule.entry.iter().chain(&schedule.exit).enumerate() {
        let is_state = i < schedule.entry.len() && matches!(graph.values[value].def, Def::State(_));
        let is_kept = i >= schedule.entry.len() && i - schedule.entry.len() < graph.states.len();
        match is_state || is_kept {
            true => is_home[loc.buffer] = true,
            false => stays[loc.buffer] = true,
        }
    }
    for (instr, data) in schedule.instrs.iter() {
        let accesses = schedule.accesses(graph, instr);
        let on_host = |access: &&Access| schedule.buffers[access.loc.buffer].pool == HOST;
        for access in accesses.iter().filter(on_host) {
            touch(&mut touches[access.loc.buffer], instr.index(), access);
        }
        for loc in data.kind.places() {
            let here = |access: &Access| access.loc == loc;
            stays[loc.buffer] |= !accesses.iter().any(here);
        }
    }
    if let Some(on_disk) = &problem.on_disk {
        keep_homes(schedule, on_disk, &mut stays);
    }
    let buffers = schedule.buffers.iter();
    let may_wait =
        |buffer: Buffer| !stays[buffer] && (is_home[buffer] || touches[buffer].len() > 1);
    buffers
        .filter(|&(buffer, data)| data.pool == HOST && may_wait(buffer))
        .map(|(buffer, data)| Held {
            buffer,
            bytes: data.bytes,
            is_home: is_home[buffer],
            cuts: vec![false; touches[buffer].len()],
            touches: touches[buffer].clone(),
            spills: false,
        })
        .collect()
}

/// Adds an access to the touches of its buffer. Accesses of one line that overlap are one touch.
fn touch(touches: &mut Vec<Touch>, line: usize, access: &Access) {
    let start = access.loc.offset;
    let mut new = Touch {
        line,
        bytes: start..start + access.bytes,
        reads: !access.write,
        writes: access.write,
        fills: access.write,
    };
    let meets = |old: &Touch, new: &Touch| {
        old.line == line && old.bytes.start < new.bytes.end && new.bytes.start < old.bytes.end
    };
    while let Some(at) = touches.iter().rposition(|old| meets(old, &new)) {
        let old = touches.remove(at);
        let bytes = old.bytes.start.min(new.bytes.start)..old.bytes.end.max(new.bytes.end);
        let fills = |one: &Touch| one.fills && one.bytes == bytes;
        new = Touch {
            line,
            reads: old.reads || new.reads,
            writes: old.writes || new.writes,
            fills: fills(&old) || fills(&new),
            bytes,
        };
    }
    touches.push(new);
}

/// If another step says which states live on the disk, the homes of all others stay.
fn keep_homes(schedule: &Schedule, on_disk: &BTreeSet<State>, stays: &mut Table<Buffer, bool>) {
    // The states come first.
    for (state, &(_, loc)) in schedule.exit.iter().enumerate() {
        stays[loc.buffer] |= !on_disk.contains(&State::new(state));
    }
}
