//! Simulates a schedule in time. Each stream runs its lines in order. A line starts when its stream
//! is free and the lines that it waits for are done. Lines that run at the same time may slow each
//! other, as [`Shares`] says: the directions of a link that is not fully duplex, or kernels and
//! copies. So the simulation goes from one start or end to the next. Between two of them every
//! running line has a constant speed.
//!
//! Several steps are simulated one after the other, as the runtime runs them. The host launches
//! step k+1 as soon as step k has read its inputs and delivered its outputs. The rest of step k
//! overlaps step k+1 as far as waits permit. The result is a step in steady state, and the time
//! from one step to the next.

use crate::cost::{Cost, Lane, Shares, lane};
use ir::graph::Def;
use ir::schedule::{Access, Dep, InstrKind, Loc, Schedule, Why};
use ir::{Buffer, Graph, Id, Instr, Program, Stream, Table, text};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// When each line runs.
#[derive(Clone, PartialEq, Debug)]
pub struct Timeline {
    /// Start of each line, µs, counted from the first start of its step.
    pub start: Table<Instr, f64>,
    /// End of each line, µs, from the same moment. The last end may be after the next step's first
    /// start.
    pub end: Table<Instr, f64>,
    /// From the end of a step to the end of the next, µs.
    pub micros: f64,
    /// The busy time of each stream in a step, µs.
    pub busy: Table<Stream, f64>,
    /// Time of the reruns, µs.
    pub recomputed: f64,
    /// Bytes that swaps and hosted states send over the link.
    pub swapped_bytes: u64,
    /// Bytes that are read from the disk and written to it.
    pub disk_bytes: u64,
}

/// The most steps that are simulated. If they have not settled by then, the last ones are averaged.
const MOST_STEPS: usize = 10;
/// Number of steps that are averaged: a schedule may alternate between two or four different steps.
const AVERAGED: usize = 4;
/// Two steps are the same if their times differ by at most this share.
const SETTLED: f64 = 1e-9;

/// Simulates steps until they repeat.
pub fn simulate(graph: &Graph, schedule: &Schedule, cost: &dyn Cost) -> Timeline {
    let waits = Waits::new(
        schedule
            .instrs
            .values()
            .map(|data| data.after.iter().copied()),
    );
    let lines = Lines::new(graph, schedule, cost);
    let host_waits = lines.host_waits(graph);
    let mut player = Player::new(&lines, lines.in_order(), waits, host_waits, MOST_STEPS);
    let mut ends: Vec<f64> = vec![];
    while ends.len() < MOST_STEPS {
        let Some(end) = player.step() else { break };
        ends.push(end);
        let n = ends.len();
        if 3 <= n {
            let (last, before) = (ends[n - 1] - ends[n - 2], ends[n - 2] - ends[n - 3]);
            if (last - before).abs() <= SETTLED * last.abs() {
                return player.timeline(n - 1, last);
            }
        }
    }
    let n = ends.len();
    match n {
        0 => player.timeline(0, 0.0),
        1..=AVERAGED => player.timeline(n - 1, ends[n - 1] / n as f64),
        _ => player.timeline(
            n - 1,
            (ends[n - 1] - ends[n - 1 - AVERAGED]) / AVERAGED as f64,
        ),
    }
}

/// Simulates one step on a machine where every buffer has its own bytes, so that only data orders
/// lines. The schedule needs no plan and no waits.
pub fn unlimited(graph: &Graph, schedule: &Schedule, cost: &dyn Cost) -> Timeline {
    Lines::new(graph, schedule, cost).unlimited()
}

/// What a simulation needs to know about the lines of a schedule, in any order.
pub struct Lines<'a> {
    schedule: &'a Schedule,
    shares: Shares,
    /// The time of each line when it runs alone, µs, and its lane.
    alone: Vec<f64>,
    lanes: Vec<Lane>,
    /// Cells that lines touch, and whether they write them; and the end of each line's entries.
    touches: Vec<(u32, bool)>,
    ends: Vec<u32>,
    cells: Cells,
}

/// The parts of buffers that lines touch independently of each other: a buffer is one cell, unless
/// an update reads and writes it part by part.
struct Cells {
    /// The number of each buffer's first cell.
    first: Table<Buffer, u32>,
    /// Where the cells after the first begin, for buffers that have some.
    cuts: BTreeMap<Buffer, Vec<u64>>,
    /// The buffer of each cell.
    buffer: Vec<Buffer>,
}

impl Cells {
    fn new(graph: &Graph, schedule: &Schedule) -> Cells {
        let mut parts: BTreeSet<Buffer> = BTreeSet::new();
        for data in schedule.instrs.values() {
            let InstrKind::Run {
                node,
                args,
                outs,
                part: Some(part),
                ..
            } = &data.kind
            else {
                continue;
            };
            let node_data = &graph.nodes[*node];
            let values = node_data.inputs.iter().chain(&node_data.outputs);
            for (&value, &loc) in values.zip(args.iter().chain(outs)) {
                let whole = schedule.whole_place(graph, (*node, Some(*part)), value, loc);
                parts.extend(whole.is_none().then_some(loc.buffer));
            }
        }
        let mut cuts: BTreeMap<Buffer, Vec<u64>> = BTreeMap::new();
        if !parts.is_empty() {
            for data in schedule.instrs.values() {
                let InstrKind::Copy { src, dst, bytes } = data.kind else {
                    continue;
                };
                for (part, whole) in [(src, dst), (dst, src)] {
                    if parts.contains(&part.buffer) && !parts.contains(&whole.buffer) {
                        let ends = [whole.offset, whole.offset + bytes];
                        cuts.entry(whole.buffer).or_default().extend(ends);
                    }
                }
            }
        }
        let mut cells = Cells {
            first: Table::new(),
            cuts,
            buffer: vec![],
        };
        for (buffer, data) in schedule.buffers.iter() {
            cells.first.push(cells.buffer.len() as u32);
            cells.buffer.push(buffer);
            if let Some(cuts) = cells.cuts.get_mut(&buffer) {
                cuts.sort_unstable();
                cuts.dedup();
                cuts.retain(|&at| 0 < at && at < data.bytes);
                cells.buffer.extend(cuts.iter().map(|_| buffer));
            }
        }
        cells
    }

    /// The cells of an access.
    fn of(&self, access: &Access) -> Range<u32> {
        let Loc { buffer, offset } = access.loc;
        let first = self.first[buffer];
        let Some(cuts) = self.cuts.get(&buffer) else {
            return first..first + 1;
        };
        let cell = |at: u64| cuts.partition_point(|&cut| cut <= at) as u32;
        first + cell(offset)..first + cell(offset + access.bytes - 1) + 1
    }
}

/// No line.
const NONE: u32 = u32::MAX;

impl<'a> Lines<'a> {
    /// The lines of `schedule`.
    pub fn new(graph: &Graph, schedule: &'a Schedule, cost: &dyn Cost) -> Lines<'a> {
        let n = schedule.instrs.len();
        let (mut touches, mut ends) = (Vec::with_capacity(4 * n), Vec::with_capacity(n));
        let cells = Cells::new(graph, schedule);
        for instr in schedule.instrs.ids() {
            schedule.each_access(graph, instr, |access| {
                touches.extend(cells.of(&access).map(|cell| (cell, access.write)));
            });
            ends.push(touches.len() as u32);
        }
        Lines {
            schedule,
            shares: cost.shares(),
            alone: schedule
                .instrs
                .ids()
                .map(|instr| cost.line(graph, schedule, instr))
                .collect(),
            lanes: schedule
                .instrs
                .ids()
                .map(|instr| lane(schedule, instr))
                .collect(),
            touches,
            ends,
            cells,
        }
    }

    fn in_order(&self) -> std::ops::Range<usize> {
        0..self.alone.len()
    }

    fn touches(&self, line: usize) -> &[(u32, bool)] {
        let start = if line == 0 { 0 } else { self.ends[line - 1] };
        &self.touches[start as usize..self.ends[line] as usize]
    }

    fn stream(&self, line: usize) -> usize {
        self.schedule.instrs[Instr::new(line)].stream.index()
    }

    /// The work of the busiest stream, µs. With any order and any places, no step is shorter.
    pub fn busiest(&self) -> f64 {
        let mut busy = vec![0.0; self.schedule.streams.len()];
        (0..self.alone.len()).for_each(|line| busy[self.stream(line)] += self.alone[line]);
        busy.into_iter().fold(0.0, f64::max)
    }

    /// See [`unlimited`].
    pub fn unlimited(&self) -> Timeline {
        let mut player = self.player(self.in_order());
        let micros = player.step().unwrap_or(0.0);
        player.timeline(0, micros)
    }

    /// The time of the step, µs, with its lines in this order.
    pub fn unlimited_micros(&self, order: &[u32]) -> f64 {
        self.player(order.iter().map(|&line| line as usize))
            .step()
            .unwrap_or(0.0)
    }

    /// A simulation of one step on a machine where only data orders lines.
    fn player(&self, order: impl Iterator<Item = usize> + Clone) -> Player<'_> {
        let n_streams = self.schedule.streams.len();
        // The line that last wrote each cell, and each stream's last reader since then. Earlier
        // readers of the stream are done before it.
        let n_cells = self.cells.buffer.len();
        let mut writers = vec![NONE; n_cells];
        let mut readers = vec![NONE; n_streams * n_cells];
        let mut waits = Waits {
            deps: vec![],
            ends: vec![(0, 0); self.alone.len()],
        };
        for line in order.clone() {
            let stream = self.stream(line);
            let start = waits.deps.len() as u32;
            let mut wait = |other: u32| {
                // Lines of one stream are in order anyway.
                if other != NONE && self.stream(other as usize) != stream {
                    waits.deps.push(Dep {
                        instr: Instr::new(other as usize),
                        previous: false,
                    });
                }
            };
            for &(cell, write) in self.touches(line) {
                let cell = cell as usize;
                let readers = &mut readers[cell * n_streams..][..n_streams];
                wait(writers[cell]);
                if write {
                    readers
                        .iter_mut()
                        .for_each(|reader| wait(std::mem::replace(reader, NONE)));
                    writers[cell] = line as u32;
                } else {
                    readers[stream] = line as u32;
                }
            }
            waits.ends[line] = (start, waits.deps.len() as u32);
        }
        Player::new(self, order, waits, vec![], 1)
    }

    /// The lines that the host waits for before it launches the next step: lines that read or write
    /// the bytes of an input, because the host will write them, and lines that write an output,
    /// because the host will read it. The runtime's `wait_io` waits for the same.
    fn host_waits(&self, graph: &Graph) -> Vec<bool> {
        let schedule = self.schedule;
        let is_input = |value| matches!(graph.values[value].def, Def::Input(_));
        let [mut inputs, mut outputs] =
            [(); 2].map(|()| Table::filled(schedule.buffers.len(), false));
        for &(_, loc) in schedule.entry.iter().filter(|&&(value, _)| is_input(value)) {
            inputs[loc.buffer] = true;
        }
        for &(_, loc) in schedule.exit.get(graph.states.len()..).unwrap_or(&[]) {
            outputs[loc.buffer] = true;
        }
        let waits = |&(cell, write): &(u32, bool)| {
            let buffer = self.cells.buffer[cell as usize];
            inputs[buffer] || write && outputs[buffer]
        };
        self.in_order()
            .map(|line| self.touches(line).iter().any(waits))
            .collect()
    }
}

/// What each line waits for, in addition to its stream.
struct Waits {
    deps: Vec<Dep>,
    /// The range of each line's waits.
    ends: Vec<(u32, u32)>,
}

impl Waits {
    fn new(lines: impl Iterator<Item = impl Iterator<Item = Dep>>) -> Waits {
        let mut waits = Waits {
            deps: vec![],
            ends: vec![],
        };
        for line in lines {
            let start = waits.deps.len() as u32;
            waits.deps.extend(line);
            waits.ends.push((start, waits.deps.len() as u32));
        }
        waits
    }
    fn of(&self, line: usize) -> &[Dep] {
        let (start, end) = self.ends[line];
        &self.deps[start as usize..end as usize]
    }
}

/// A stream's next line, or its running line.
#[derive(Clone, Copy)]
struct Head {
    step: usize,
    /// A position in the stream's list.
    at: usize,
    /// The number of the line's waits that are known to be over, and the end of the last of them.
    seen: usize,
    ready: f64,
    state: State,
}

#[derive(Clone, Copy)]
enum State {
    /// Waits are not over yet, or were not checked yet.
    Blocked,
    /// Starts at `Head::ready`.
    Due,
    /// Runs: at time `since`, `left` µs at full speed remained.
    Running { since: f64, left: f64, speed: f64 },
}

/// The starts and ends of one step's lines; infinite until they are known.
struct Played {
    start: Vec<f64>,
    end: Vec<f64>,
    /// The number of lines that have not ended, and of those that the host waits for before it
    /// launches the next step.
    left: usize,
    host_waits: usize,
    /// When it was launched; infinite before that.
    launch: f64,
    last_end: f64,
}

struct Player<'a> {
    lines: &'a Lines<'a>,
    waits: Waits,
    /// Whether the host waits for a line before it launches the next step; empty if it waits for
    /// none.
    host_waits: Vec<bool>,
    n_host_waits: usize,
    queues: Vec<Vec<u32>>,
    heads: Vec<Head>,
    free: Vec<f64>,
    steps: Vec<Played>,
    most_steps: usize,
    /// Lanes of running lines, stored for reuse; and whether lines have started or ended since
    /// speeds were set.
    running: Vec<Option<Lane>>,
    stale: bool,
    now: f64,
    /// The number of steps that are over.
    over: usize,
}

impl<'a> Player<'a> {
    fn new(
        lines: &'a Lines<'a>,
        order: impl Iterator<Item = usize>,
        waits: Waits,
        host_waits: Vec<bool>,
        most_steps: usize,
    ) -> Player<'a> {
        let mut queues = vec![vec![]; lines.schedule.streams.len()];
        order.for_each(|line| queues[lines.stream(line)].push(line as u32));
        let head = Head {
            step: 0,
            at: 0,
            seen: 0,
            ready: 0.0,
            state: State::Blocked,
        };
        Player {
            lines,
            waits,
            n_host_waits: host_waits.iter().filter(|&&waits| waits).count(),
            host_waits,
            heads: vec![head; queues.len()],
            free: vec![0.0; queues.len()],
            queues,
            steps: vec![],
            most_steps,
            running: vec![],
            stale: false,
            now: 0.0,
            over: 0,
        }
    }

    /// Simulates until one more step is over. Returns its end, or `None` if there are no lines.
    fn step(&mut self) -> Option<f64> {
        if self.lines.alone.is_empty() {
            return None;
        }
        if self.steps.is_empty() {
            self.begin_step(0.0);
        }
        while self.steps.get(self.over).is_none_or(|step| 0 < step.left) {
            self.start_lines();
            self.set_speeds();
            // A line waits only for earlier lines of the list, or for the step before. So some line
            // can always run.
            let next = self.next_end_or_start()?;
            self.now = self.now.max(next);
            self.end_lines();
        }
        self.over += 1;
        Some(self.steps[self.over - 1].last_end)
    }

    fn begin_step(&mut self, launch: f64) {
        let n = self.lines.alone.len();
        self.steps.push(Played {
            start: vec![f64::INFINITY; n],
            end: vec![f64::INFINITY; n],
            left: n,
            host_waits: self.n_host_waits,
            launch,
            last_end: launch,
        });
        if self.n_host_waits == 0 {
            self.launch_next(launch);
        }
    }

    fn launch_next(&mut self, when: f64) {
        if self.steps.len() < self.most_steps {
            // The host wakes, and wakes the streams.
            self.begin_step(when + 2.0 * self.lines.shares.handoff);
        }
    }

    /// Starts every line that may start now.
    fn start_lines(&mut self) {
        for stream in 0..self.heads.len() {
            if matches!(self.heads[stream].state, State::Blocked) {
                self.look(stream);
            }
            let head = self.heads[stream];
            if let State::Due = head.state
                && head.ready <= self.now
            {
                let line = self.queues[stream][head.at] as usize;
                self.steps[head.step].start[line] = self.now;
                self.heads[stream].state = State::Running {
                    since: self.now,
                    left: self.lines.alone[line],
                    speed: 0.0,
                };
                self.stale = true;
            }
        }
    }

    /// Checks whether the waits of a stream's next line are over.
    fn look(&mut self, stream: usize) {
        let mut head = self.heads[stream];
        let Some(&line) = self.queues[stream].get(head.at) else {
            return;
        };
        let Some(step) = self.steps.get(head.step) else {
            return;
        };
        let lanes = &self.lines.lanes;
        let deps = self.waits.of(line as usize);
        while let Some(dep) = deps.get(head.seen) {
            // Before the first step nothing runs.
            let end = match (dep.previous, head.step) {
                (true, 0) => f64::NEG_INFINITY,
                (true, step) => self.steps[step - 1].end[dep.instr.index()],
                (false, _) => step.end[dep.instr.index()],
            };
            if self.now < end {
                break;
            }
            let on_host =
                |line: usize| matches!(lanes[line], Lane::Host | Lane::Load | Lane::Store);
            let handoff = match on_host(line as usize) || on_host(dep.instr.index()) {
                true => self.lines.shares.host_handoff,
                false => 0.0,
            };
            head.ready = head.ready.max(end + handoff);
            head.seen += 1;
        }
        if head.seen == deps.len() {
            // A stream that had to wait sleeps, and wakes up a little later.
            let free = self.free[stream];
            if free < head.ready {
                head.ready += self.lines.shares.handoff;
            }
            head.ready = head.ready.max(free).max(step.launch);
            head.state = State::Due;
        }
        self.heads[stream] = head;
    }

    /// Sets the speed of every running line, given the other running lines.
    fn set_speeds(&mut self) {
        if !std::mem::take(&mut self.stale) {
            return;
        }
        self.running.clear();
        for (head, queue) in self.heads.iter().zip(&self.queues) {
            let running = matches!(head.state, State::Running { .. });
            self.running
                .push(running.then(|| self.lines.lanes[queue[head.at] as usize]));
        }
        for (stream, head) in self.heads.iter_mut().enumerate() {
            let (State::Running { since, left, speed }, Some(lane)) =
                (head.state, self.running[stream])
            else {
                continue;
            };
            let mut kept = 1.0;
            for (_, other) in self
                .running
                .iter()
                .enumerate()
                .filter(|&(other, _)| other != stream)
            {
                kept *= other.map_or(1.0, |other| {
                    self.lines.shares.keeps[lane as usize][other as usize]
                });
            }
            if kept != speed {
                let left = (left - (self.now - since) * speed).max(0.0);
                head.state = State::Running {
                    since: self.now,
                    left,
                    speed: kept,
                };
            }
        }
    }

    /// The next moment at which a line ends or a due one starts.
    fn next_end_or_start(&self) -> Option<f64> {
        let times = self.heads.iter().filter_map(|head| match head.state {
            State::Running { since, left, speed } => Some(since + left / speed),
            State::Due => Some(head.ready),
            State::Blocked => None,
        });
        times.min_by(f64::total_cmp)
    }

    /// Ends every line that is finished by now.
    fn end_lines(&mut self) {
        for stream in 0..self.heads.len() {
            let head = self.heads[stream];
            let State::Running { since, left, speed } = head.state else {
                continue;
            };
            if self.now < since + left / speed {
                continue;
            }
            self.stale = true;
            let line = self.queues[stream][head.at] as usize;
            let now = self.now;
            self.free[stream] = now;
            let step = &mut self.steps[head.step];
            step.end[line] = now;
            step.last_end = step.last_end.max(now);
            step.left -= 1;
            if self.host_waits.get(line).is_some_and(|&waits| waits) {
                step.host_waits -= 1;
                if step.host_waits == 0 {
                    self.launch_next(now);
                }
            }
            let last = head.at + 1 == self.queues[stream].len();
            let (step, at) = if last {
                (head.step + 1, 0)
            } else {
                (head.step, head.at + 1)
            };
            self.heads[stream] = Head {
                step,
                at,
                seen: 0,
                ready: 0.0,
                state: State::Blocked,
            };
        }
    }

    /// The timeline of a simulated step.
    fn timeline(&self, step: usize, micros: f64) -> Timeline {
        let schedule = self.lines.schedule;
        let Some(played) = self.steps.get(step) else {
            return Timeline {
                start: Table::default(),
                end: Table::default(),
                micros,
                busy: Table::filled(schedule.streams.len(), 0.0),
                recomputed: 0.0,
                swapped_bytes: 0,
                disk_bytes: 0,
            };
        };
        let origin = played.start.iter().copied().fold(f64::INFINITY, f64::min);
        let mut busy = Table::filled(schedule.streams.len(), 0.0);
        let (mut recomputed, mut swapped_bytes, mut disk_bytes) = (0.0, 0, 0);
        for (instr, data) in schedule.instrs.iter() {
            let micros = played.end[instr.index()] - played.start[instr.index()];
            busy[data.stream] += micros;
            match data.why {
                Why::Recompute => recomputed += micros,
                Why::SwapOut | Why::SwapIn | Why::Gather | Why::Offload => {
                    if let InstrKind::Copy { bytes, .. } = data.kind {
                        swapped_bytes += bytes;
                    }
                }
                Why::Load | Why::Store => {
                    if let InstrKind::Copy { bytes, .. } = data.kind {
                        disk_bytes += bytes;
                    }
                }
                Why::Model | Why::Update | Why::Feed | Why::Fetch => {}
            }
        }
        let since_origin = |times: &[f64]| times.iter().map(|time| time - origin).collect();
        Timeline {
            start: since_origin(&played.start),
            end: since_origin(&played.end),
            micros,
            busy,
            recomputed,
            swapped_bytes,
            disk_bytes,
        }
    }
}

/// The text of a program with the times of its lines as comments.
pub fn print(program: &Program, timeline: &Timeline) -> String {
    text::print_program_with(program, &|instr| {
        let (start, end) = (timeline.start.get(instr)?, timeline.end.get(instr)?);
        Some(format!("{start:.1}..{end:.1} us"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Roofline;
    use crate::devices;

    /// x comes in and y goes out at the same time. There are no dependencies, also not between
    /// steps.
    const BOTH_WAYS: &str = "graph g {\n  state  param %x -> %x : f32[500] \"x\"\n  state  param \
        %y -> %y : f32[500] \"y\"\n  \
        output z = %x\n}\nschedule g on test {\n  pool device peak 4096\n  pool host peak 4096\n  \
        stream compute\n  \
        stream h2d\n  stream d2h\n  entry %x = x.host@host+0:2048\n  entry %y = y@device+0:2048\n  \
        i0   h2d     gather  x.host -> x@device+2048:2048\n  i1   d2h     swapout y -> \
        y.host@host+2048:2048\n  \
        exit %x = x.host\n  exit %y = y\n  exit %x = x.host\n}\n";

    struct Sharing(Roofline, Shares);

    impl Cost for Sharing {
        fn run(&self, graph: &Graph, node: ir::Node) -> f64 {
            self.0.run(graph, node)
        }
        fn host(&self, graph: &Graph, node: ir::Node) -> f64 {
            self.0.host(graph, node)
        }
        fn link(&self, bytes: u64) -> f64 {
            self.0.link(bytes)
        }
        // Twice as fast to the device.
        fn link_way(&self, bytes: u64, to_device: bool) -> f64 {
            if to_device {
                self.0.link(bytes) / 2.0
            } else {
                self.0.link(bytes)
            }
        }
        fn local(&self, bytes: u64) -> f64 {
            self.0.local(bytes)
        }
        fn shares(&self) -> Shares {
            self.1
        }
    }

    fn both_ways(keeps: f64) -> (f64, f64) {
        let program = text::parse_program(BOTH_WAYS).unwrap();
        let roofline = Roofline::new(&devices::named("test").unwrap());
        let mut shares = Shares::default();
        shares.keeps[Lane::In as usize][Lane::Out as usize] = keeps;
        shares.keeps[Lane::Out as usize][Lane::In as usize] = keeps;
        let timeline = unlimited(
            &program.graph,
            &program.schedule,
            &Sharing(roofline, shares),
        );
        (timeline.end[Instr::new(0)], timeline.end[Instr::new(1)])
    }

    /// 2048 bytes at 2 ns each plus 1 µs take 5.096 µs. To the device they take half of it.
    #[test]
    fn directions_of_a_link_share_it() {
        let alone = 5.096;
        assert_eq!(both_ways(1.0), (alone / 2.0, alone));
        // The short one takes twice as long, which is the time of the other one alone. Then half of
        // the other is done, and its rest has the link for itself.
        let (short, long) = both_ways(0.5);
        assert!(
            (short - alone).abs() < 1e-9 && (long - 1.5 * alone).abs() < 1e-9,
            "{short} {long}"
        );
    }
}
