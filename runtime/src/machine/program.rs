//! What each stream runs: the artifact's commands, sorted by stream, with what the machine needs to
//! know of each. Made once, when an artifact is loaded, so that a step allocates nothing.

use super::backend::{CommandId, EventId, StreamId};
use crate::access::{Access, Reach, accesses};
use artifact::{Artifact, Binding, CommandKind, Operand, Pool};
use std::collections::BTreeMap;

/// One stream's instructions, in order.
pub(crate) type Program = Box<[Instruction]>;

/// One command.
pub(crate) struct Instruction {
    /// Its position in the artifact's list, by which the backend knows it.
    pub(crate) command: CommandId,
    /// Its line in the schedule.
    pub(crate) line: u32,
    /// How far it reaches into each pool that it touches.
    pub(crate) reaches: Box<[Reach]>,
    /// Number of bytes that it reads and writes.
    pub(crate) bytes: u64,
    /// What it does.
    pub(crate) action: Action,
}

/// What an instruction does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    /// Runs a kernel.
    Launch,
    /// Copies bytes.
    Copy,
    /// Marks an event as reached.
    Record { event: EventId },
    /// Waits for an event of this step or of the one before.
    Wait { event: EventId, previous: bool },
}

/// In a step that pauses, the number of each stream's instructions before the pause.
pub(crate) fn cuts(artifact: &Artifact, programs: &[Program]) -> Option<Vec<usize>> {
    let pause = artifact.pause? as usize;
    let before = |program: &Program| program.partition_point(|i| i.command.0 < pause);
    Some(programs.iter().map(before).collect())
}

/// The waits that a stream needs. In a step that pauses, the host waits for all streams at the end
/// of each part, so only waits for records of the same part are left.
fn waits(artifact: &Artifact) -> impl Fn(usize, &CommandKind) -> bool {
    let pause = artifact.pause.map(|pause| pause as usize);
    let mut recorded = vec![0; artifact.events as usize];
    for (i, command) in artifact.commands.iter().enumerate() {
        if let CommandKind::Record { event } = command.kind {
            recorded[event as usize] = i;
        }
    }
    move |i, kind| match (pause, kind) {
        (Some(pause), &CommandKind::Wait { event, previous }) => {
            let same_part = (i < pause) == (recorded[event as usize] < pause);
            !previous && same_part
        }
        _ => true,
    }
}

/// Each stream's program.
pub(crate) fn programs(artifact: &Artifact) -> Vec<Program> {
    let is_needed = waits(artifact);
    let mut programs: Vec<Vec<Instruction>> = artifact.streams.iter().map(|_| Vec::new()).collect();
    for (i, command) in artifact.commands.iter().enumerate() {
        if !is_needed(i, &command.kind) {
            continue;
        }
        let touched = accesses(command);
        let action = match command.kind {
            CommandKind::Launch { .. } => Action::Launch,
            CommandKind::Copy { .. } => Action::Copy,
            CommandKind::Record { event } => Action::Record {
                event: EventId(event as usize),
            },
            CommandKind::Wait { event, previous } => Action::Wait {
                event: EventId(event as usize),
                previous,
            },
        };
        programs[command.stream as usize].push(Instruction {
            command: CommandId(i),
            line: command.line,
            reaches: reaches(&artifact.pools, &touched),
            bytes: touched.iter().map(|access| access.end - access.start).sum(),
            action,
        });
    }
    programs.into_iter().map(Vec::into_boxed_slice).collect()
}

/// The stream that records each event.
pub(crate) fn recorders(artifact: &Artifact) -> Vec<StreamId> {
    let mut recorders = vec![StreamId(0); artifact.events as usize];
    for command in &artifact.commands {
        if let CommandKind::Record { event } = command.kind {
            recorders[event as usize] = StreamId(command.stream as usize);
        }
    }
    recorders
}

/// How far a tensor reaches into its pool; `None` if it has no bytes of the machine's.
pub(crate) fn reach(pools: &[Pool], operand: &Operand) -> Option<Reach> {
    let access = Access::of(operand, true)?;
    (!pools[access.pool].lent).then(|| access.reach())
}

/// How far accesses reach into each pool that is the machine's.
fn reaches(pools: &[Pool], accesses: &[Access]) -> Box<[Reach]> {
    let mut ends: BTreeMap<usize, u64> = BTreeMap::new();
    for access in accesses.iter().filter(|access| !pools[access.pool].lent) {
        let end = ends.entry(access.pool).or_default();
        *end = access.end.max(*end);
    }
    ends.into_iter()
        .map(|(pool, end)| Reach { pool, end })
        .collect()
}

/// Which inputs no command overwrites.
pub(crate) fn survivors(artifact: &Artifact) -> Vec<bool> {
    let written = Spans::new(
        artifact
            .commands
            .iter()
            .flat_map(accesses)
            .filter(|access| access.write),
    );
    let survives = |input: &Binding| {
        Access::of(&input.operand, true).is_none_or(|access| !written.meet(&access))
    };
    artifact.inputs.iter().map(survives).collect()
}

/// In each stream's program, the last instruction that touches an input's bytes, which the host
/// will write, or writes an output's, which it will read.
pub(crate) fn last_io(artifact: &Artifact, programs: &[Program]) -> Vec<Option<usize>> {
    let spans = |bindings: &[Binding]| {
        Spans::new(bindings.iter().filter_map(|b| Access::of(&b.operand, true)))
    };
    let (inputs, outputs) = (spans(&artifact.inputs), spans(&artifact.outputs));
    let is_io = |instruction: &Instruction| {
        let touched = accesses(&artifact.commands[instruction.command.0]);
        touched
            .iter()
            .any(|access| inputs.meet(access) || access.write && outputs.meet(access))
    };
    programs
        .iter()
        .map(|program| program.iter().rposition(is_io))
        .collect()
}

/// Bytes as disjoint intervals: pool and start to end.
struct Spans(BTreeMap<(usize, u64), u64>);

impl Spans {
    fn new(accesses: impl Iterator<Item = Access>) -> Spans {
        let mut sorted: Vec<Access> = accesses.collect();
        sorted.sort_by_key(|access| (access.pool, access.start));
        let mut spans: BTreeMap<(usize, u64), u64> = BTreeMap::new();
        for Access {
            pool, start, end, ..
        } in sorted
        {
            match spans.range_mut(..=(pool, start)).next_back() {
                Some((&(p, _), last)) if p == pool && start <= *last => *last = end.max(*last),
                _ => {
                    spans.insert((pool, start), end);
                }
            }
        }
        Spans(spans)
    }

    /// Whether a byte of the access is in one of them.
    fn meet(&self, access: &Access) -> bool {
        let last = self.0.range(..(access.pool, access.end)).next_back();
        last.is_some_and(|(&(pool, _), &end)| pool == access.pool && access.start < end)
    }
}
