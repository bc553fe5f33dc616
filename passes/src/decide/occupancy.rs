//! Where values lie on the device while a schedule runs, and over which lines they lie idle.

use crate::plan::Problem;
use crate::plan::machine::DEVICE;
use ir::schedule::{Buffer, InstrKind, Loc, Schedule, Why};
use ir::{Id, Instr, Table, Value};
use smallvec::SmallVec;

/// A value that lies in a buffer over lines `from..to`, and is touched only at both ends.
pub(super) struct Idle {
    pub(super) value: Value,
    pub(super) buffer: Buffer,
    pub(super) from: usize,
    pub(super) to: usize,
    /// The gap of the value: the number of accesses so far, minus one. `None` before the first
    /// access, `u32::MAX` after the last of a state.
    pub(super) gap: Option<u32>,
}

/// What the device's buffers hold, and when.
pub(super) struct Occupancy {
    /// All idle stretches on the device.
    pub(super) idle: Vec<Idle>,
    /// Lines that touch each buffer of the device, ascending.
    pub(super) touched: Table<Buffer, SmallVec<[u32; 4]>>,
    /// Buffers that hold several values.
    pub(super) shared: Table<Buffer, bool>,
    /// Buffers that states have at entry.
    pub(super) home: Table<Buffer, bool>,
    /// The number of lines of the model before each line.
    pub(super) position: Vec<u32>,
    /// The line that runs each position of the model.
    line: Vec<u32>,
    /// When each value is on the device: lines `from..=to`, ascending.
    resident: Table<Value, SmallVec<[(u32, u32); 2]>>,
}

impl Occupancy {
    /// What the buffers of a schedule hold.
    pub(super) fn new(problem: &Problem<'_>, schedule: &Schedule) -> Occupancy {
        let mut scan = Scan::new(problem, schedule);
        let mut touches = vec![];
        for (instr, data) in schedule.instrs.iter() {
            scan.touches(&data.kind, &mut touches);
            for (loc, value) in touches.drain(..) {
                scan.touch(instr.index(), loc, value);
            }
        }
        scan.finish()
    }

    /// When the value is on the device: lines `from..=to`, ascending.
    pub(super) fn resident(&self, value: Value) -> &[(u32, u32)] {
        &self.resident[value]
    }

    /// The lines of the model that access the value.
    pub(super) fn lines_of(
        &self,
        problem: &Problem<'_>,
        value: Value,
    ) -> impl Iterator<Item = usize> {
        let accesses = problem.accesses[value].iter();
        accesses.filter_map(|&at| self.line.get(at as usize).map(|&line| line as usize))
    }

    /// True if the value lies on the device at `line`.
    pub(super) fn is_resident(&self, value: Value, line: usize) -> bool {
        let span = self.last_span(value, line);
        span.is_some_and(|(_, to)| line <= to as usize)
    }

    /// The last line at which a value that lies on the device at `line` does so without a break.
    pub(super) fn resident_until(&self, value: Value, line: usize) -> usize {
        let span = self.last_span(value, line);
        span.map_or(line, |(_, to)| line.max(to as usize))
    }

    /// The last span of a value that begins at or before `line`.
    fn last_span(&self, value: Value, line: usize) -> Option<(u32, u32)> {
        let spans = &self.resident[value];
        let k = spans.partition_point(|span| span.0 as usize <= line);
        spans[..k].last().copied()
    }
}

/// A value at an offset of a buffer, and the line that touched it last.
struct Held {
    offset: u64,
    value: Value,
    since: usize,
}

/// Reads a schedule from top to bottom.
struct Scan<'a> {
    problem: &'a Problem<'a>,
    schedule: &'a Schedule,
    /// The values that each buffer holds now; a chunk holds several.
    holds: Table<Buffer, SmallVec<[Held; 1]>>,
    found: Occupancy,
}

impl<'a> Scan<'a> {
    fn new(problem: &'a Problem<'a>, schedule: &'a Schedule) -> Scan<'a> {
        let n_buffers = schedule.buffers.len();
        let mut n_model = 0;
        let position = schedule.instrs.values().map(|data| {
            let before = n_model;
            n_model += u32::from(data.why == Why::Model);
            before
        });
        let lines = schedule.instrs.iter();
        let of_model = lines.filter(|(_, data)| data.why == Why::Model);
        let line = of_model.map(|(instr, _)| instr.index() as u32).collect();
        let mut scan = Scan {
            problem,
            schedule,
            holds: schedule.buffers.ids().map(|_| SmallVec::new()).collect(),
            found: Occupancy {
                idle: vec![],
                touched: Table::filled(n_buffers, SmallVec::new()),
                shared: Table::filled(n_buffers, false),
                home: Table::filled(n_buffers, false),
                position: position.collect(),
                line,
                resident: Table::filled(problem.graph.values.len(), SmallVec::new()),
            },
        };
        for &(value, loc) in &schedule.entry {
            scan.found.home[loc.buffer] = true;
            scan.holds[loc.buffer].push(Held {
                offset: loc.offset,
                value: problem.root[value],
                since: 0,
            });
        }
        scan
    }

    /// Adds the places that a line touches, and the value that each holds after it.
    fn touches(&self, line: &InstrKind, touches: &mut Vec<(Loc, Value)>) {
        match line {
            // Values of which a part lies in a buffer are no whole values, and what the other parts
            // touch was touched by the first.
            InstrKind::Run {
                part: Some(part), ..
            } if part.start > 0 => {}
            InstrKind::Run {
                node,
                args,
                outs,
                part,
                ..
            } => {
                let data = &self.problem.graph.nodes[*node];
                let ran = (*node, *part);
                for (&loc, &input) in args.iter().zip(&data.inputs) {
                    let whole = self
                        .schedule
                        .whole_place(self.problem.graph, ran, input, loc);
                    touches.extend(whole.map(|loc| (loc, self.problem.root[input])));
                }
                for (&loc, &output) in outs.iter().zip(&data.outputs) {
                    let whole = self
                        .schedule
                        .whole_place(self.problem.graph, ran, output, loc);
                    touches.extend(whole.map(|loc| (loc, output)));
                }
            }
            &InstrKind::Copy { src, dst, bytes } => {
                let copied = src.offset..src.offset + bytes;
                for held in &self.holds[src.buffer] {
                    if copied.contains(&held.offset) {
                        let from = Loc {
                            buffer: src.buffer,
                            offset: held.offset,
                        };
                        let to = Loc {
                            buffer: dst.buffer,
                            offset: dst.offset + held.offset - src.offset,
                        };
                        touches.extend([(from, held.value), (to, held.value)]);
                    }
                }
            }
        }
    }

    /// Notes that a line touches a place that holds `value` after it.
    fn touch(&mut self, line: usize, loc: Loc, value: Value) {
        let since = self.hold(line, loc, value);
        if !self.is_on_device(loc.buffer) {
            return;
        }
        let number = line as u32;
        let touched = &mut self.found.touched[loc.buffer];
        if touched.last() != Some(&number) {
            touched.push(number);
        }
        match since {
            Some(since) => self.stay(value, loc.buffer, since, line),
            None => self.found.resident[value].push((number, number)),
        }
    }

    /// Notes that a place holds `value` after a line. If it held the value before, returns the line
    /// that touched it last.
    fn hold(&mut self, line: usize, loc: Loc, value: Value) -> Option<usize> {
        let held = Held {
            offset: loc.offset,
            value,
            since: line,
        };
        let holds = &mut self.holds[loc.buffer];
        let Some(place) = holds.iter_mut().find(|held| held.offset == loc.offset) else {
            holds.push(held);
            return None;
        };
        let before = std::mem::replace(place, held);
        (before.value == value).then_some(before.since)
    }

    /// Notes that a value lies in a buffer of the device from line `since` to `line`, which touch
    /// it.
    fn stay(&mut self, value: Value, buffer: Buffer, since: usize, line: usize) {
        let at_entry = self.found.home[buffer] && since == 0;
        let done = self.accesses_done(value, since, at_entry);
        if since + 1 < line {
            self.found.idle.push(Idle {
                value,
                buffer,
                from: since,
                to: line,
                gap: done.checked_sub(1),
            });
        }
        let resident = &mut self.found.resident[value];
        match resident.last_mut() {
            Some(last) if last.1 == since as u32 => last.1 = line as u32,
            _ => resident.push((since as u32, line as u32)),
        }
    }

    /// The number of accesses of `value` at or before `line`; for a state `at_entry`, before it.
    fn accesses_done(&self, value: Value, line: usize, at_entry: bool) -> u32 {
        let model = self.schedule.instrs[Instr::new(line)].why == Why::Model && !at_entry;
        let position = self.found.position[line] + u32::from(model);
        self.problem.accesses[value].partition_point(|&at| at < position) as u32
    }

    /// The result, with the states that lie at home until the step ends.
    fn finish(mut self) -> Occupancy {
        for (buffer, held) in self.holds.iter() {
            self.found.shared[buffer] = held.len() > 1;
        }
        let n = self.schedule.instrs.len();
        for &(value, loc) in &self.schedule.entry {
            let held = self.holds[loc.buffer]
                .iter()
                .find(|held| held.offset == loc.offset);
            if let Some(held) = held.filter(|_| self.is_on_device(loc.buffer)) {
                self.found.idle.push(Idle {
                    value,
                    buffer: loc.buffer,
                    from: held.since,
                    to: n,
                    gap: Some(u32::MAX),
                });
                self.found.resident[held.value].push((held.since as u32, n as u32));
            }
        }
        self.found
    }

    fn is_on_device(&self, buffer: Buffer) -> bool {
        self.schedule.buffers[buffer].pool == DEVICE
    }
}
