//! Chunks: states that lie next to each other on the host and come to the device in one copy.

use super::alternatives::Bench;
use super::data::{Event, Outcome, Stay};
use crate::pipeline::Compiled;
use crate::plan::Problem;
use ir::schedule::InstrKind;
use ir::{Buffer, Instr, Program, State};

/// The home of states on the host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Chunk {
    /// Its buffer on the host.
    pub home: Buffer,
    /// The states, in the graph's order.
    pub states: Vec<State>,
}

impl Chunk {
    /// The home of a state.
    pub fn of(program: &Program, state: State) -> Option<Chunk> {
        // Entries are the states, in order, then the inputs.
        let (_, loc) = program.schedule.entry.get(ir::Id::index(state))?;
        Chunk::at(program, loc.buffer)
    }

    /// The states whose home is a buffer; `None` if there are none.
    pub fn at(program: &Program, home: Buffer) -> Option<Chunk> {
        let states = program.graph.states.ids();
        let entries = states.zip(&program.schedule.entry);
        let here = entries.filter(|(_, (_, loc))| loc.buffer == home);
        let states: Vec<State> = here.map(|(state, _)| state).collect();
        (!states.is_empty()).then_some(Chunk { home, states })
    }

    /// The chunk of several states whose home, or whose copy on the device, is a buffer.
    pub(super) fn found_in(program: &Program, buffer: Buffer) -> Option<Chunk> {
        let mut copies = program
            .schedule
            .instrs
            .values()
            .filter_map(|data| match data.kind {
                InstrKind::Copy { src, dst, .. } if dst.buffer == buffer => Some(src.buffer),
                _ => None,
            });
        let chunk = Chunk::at(program, buffer);
        let chunk = chunk.or_else(|| copies.find_map(|home| Chunk::at(program, home)));
        chunk.filter(|chunk| 1 < chunk.states.len())
    }

    /// Its name: that of its first copy on the device.
    pub fn name(&self, program: &Program) -> String {
        let name = &program.schedule.buffers[self.home].name;
        let stem = name.strip_suffix(".host");
        let stem = stem.or_else(|| name.strip_suffix(".disk"));
        stem.unwrap_or(name).to_string()
    }

    /// Bytes of one copy.
    pub fn bytes(&self, program: &Program) -> u64 {
        program.schedule.buffers[self.home].bytes
    }
}

/// Everything that is known of a chunk.
#[derive(Clone, PartialEq, Debug)]
pub struct ChunkExplanation {
    /// Its name.
    pub name: String,
    /// How many states it has.
    pub states: usize,
    /// Bytes of one copy.
    pub bytes: u64,
    /// The pool of its home: `host`, or `disk`.
    pub pool: String,
    /// When and where it lies there, and its copies on the device.
    pub stays: Vec<Stay>,
    /// The lines that copy it to the device.
    pub copies: Vec<Event>,
    /// True if the host updates one of its states.
    pub updated_there: bool,
    /// Time of the step as planned, µs.
    pub micros: f64,
    /// What the step would come to if its states lived on the device; an error says why not.
    pub at_home: Result<Outcome, String>,
}

/// Explains a chunk. `problem` is the compiled program's.
pub fn explain_chunk(
    compiled: &Compiled,
    problem: &Problem<'_>,
    chunk: &Chunk,
) -> ChunkExplanation {
    let program = &compiled.program;
    let schedule = &program.schedule;
    let copies: Vec<(Instr, Buffer)> = schedule
        .instrs
        .iter()
        .filter_map(|(instr, data)| match data.kind {
            InstrKind::Copy { src, dst, bytes }
                if src.buffer == chunk.home && bytes == chunk.bytes(program) =>
            {
                Some((instr, dst.buffer))
            }
            _ => None,
        })
        .collect();
    let mut stays = vec![Stay::new(program, chunk.home.into(), None, None)];
    for &(_, buffer) in &copies {
        let touches = |&instr: &Instr| {
            let mut places = schedule.instrs[instr].kind.places();
            places.any(|loc| loc.buffer == buffer)
        };
        let lines: Vec<Instr> = schedule.instrs.ids().filter(touches).collect();
        let (from, to) = (lines.first().copied(), lines.last().copied());
        stays.push(Stay::new(program, buffer.into(), from, to));
    }
    let at_home = Bench::new(compiled, problem)
        .outcome(|decisions| decisions.bring_home(problem.graph, &chunk.states));
    ChunkExplanation {
        name: chunk.name(program),
        states: chunk.states.len(),
        bytes: chunk.bytes(program),
        pool: schedule.pools[schedule.buffers[chunk.home].pool]
            .name
            .clone(),
        stays,
        copies: copies
            .iter()
            .map(|&(instr, _)| Event::new(compiled, instr))
            .collect(),
        updated_there: chunk.states.iter().any(|&state| {
            let decisions = &compiled.decided.decisions;
            decisions.is_updated_on_host(problem.graph, state)
        }),
        micros: compiled.timeline.micros,
        at_home,
    }
}
