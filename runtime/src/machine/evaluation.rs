//! One output of a step without the rest of it: the loss of a batch that is not learned from.
//!
//! The commands that an output depends on are found backwards from its bytes (a backward slice:
//! Weiser, "Program Slicing", 1981; a list without branches makes it exact). A command that writes
//! a byte that is still needed belongs to them; what it writes is not needed before it, what it
//! reads is. Left out are the backward, updates, and copies for both.
//!
//! Run in the order of the list, they compute the bits that a whole step computes, because each
//! command finds the values that it finds there: bytes that are needed are written last by the
//! command that the slice has. They write bytes that a step overwrites before it reads them,
//! and no state: this is checked here. So the next step does not notice them.

use super::backend::StreamId;
use super::program::Program;
use crate::access::{Access, accesses};
use crate::ranges::Ranges;
use crate::{Error, validate};
use artifact::{Artifact, CommandKind, StateKind};

/// The commands that compute one output of a step.
#[derive(Debug)]
pub struct Evaluation {
    output: String,
    /// Streams, and positions in their programs, in the order of the list.
    commands: Vec<(StreamId, usize)>,
    /// Numbers of the inputs that they read.
    inputs: Vec<usize>,
    /// The number of commands of the whole step.
    n_all: usize,
}

/// Why an output has no value of its own, without a step's effects.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum NotEvaluable {
    /// The artifact cannot be run.
    #[error(transparent)]
    Invalid(#[from] Error),
    /// There is no such output.
    #[error("the step has no output {0}")]
    NoOutput(String),
    /// The step runs in parts.
    #[error("the step runs in parts")]
    InParts,
    /// The output depends on random numbers, so it is a sample of what it means.
    #[error("the model draws random numbers ({0}), as dropout does")]
    Random(String),
    /// The step updates a buffer, so it computes with statistics of the batch.
    #[error("the model updates a buffer ({0}), as batch norm does while it trains")]
    Buffer(String),
    /// The plan writes a state before the output is known.
    #[error("the plan writes {0} before the loss is known")]
    State(String),
}

impl Evaluation {
    /// Finds what an output needs. An error if the commands would change a state, or if the output
    /// is that of a model in training mode.
    pub fn of(artifact: &Artifact, output: &str) -> Result<Evaluation, NotEvaluable> {
        validate(artifact)?;
        if artifact.pause.is_some() {
            return Err(NotEvaluable::InParts);
        }
        let found = artifact.outputs.iter().find(|o| o.name == output);
        let found = found.ok_or_else(|| NotEvaluable::NoOutput(output.into()))?;

        let slice = Slice::of(artifact, Access::of(&found.operand, false));
        for state in &artifact.states {
            let Some(access) = Access::of(&state.operand, true) else {
                continue;
            };
            let path = || state.path.clone();
            if state.kind == StateKind::Rng && slice.read.meet(&access) {
                return Err(NotEvaluable::Random(path()));
            }
            if state.kind == StateKind::Buffer && slice.written_by_all.meet(&access) {
                return Err(NotEvaluable::Buffer(path()));
            }
            if slice.written.meet(&access) {
                return Err(NotEvaluable::State(path()));
            }
        }
        let inputs = artifact.inputs.iter().enumerate();
        let is_read = |operand| Access::of(operand, false).is_some_and(|a| slice.read.meet(&a));
        let inputs = inputs.filter(|(_, input)| is_read(&input.operand));
        Ok(Evaluation {
            output: output.into(),
            inputs: inputs.map(|(at, _)| at).collect(),
            commands: positions(artifact, &slice.commands),
            n_all: artifact.commands.len(),
        })
    }

    /// The output's name.
    pub fn output(&self) -> &str {
        &self.output
    }

    /// The number of launches and copies.
    pub fn n_commands(&self) -> usize {
        self.commands.len()
    }

    pub(super) fn commands(&self) -> &[(StreamId, usize)] {
        &self.commands
    }

    pub(super) fn inputs(&self) -> impl Iterator<Item = usize> {
        self.inputs.iter().copied()
    }

    /// Whether it may be an evaluation of the artifact that has these programs.
    pub(super) fn is_of(&self, programs: &[Program]) -> bool {
        let n_all: usize = programs.iter().map(|program| program.len()).sum();
        let is_there = |&(stream, at): &(StreamId, usize)| {
            let program = programs.get(stream.0);
            program.is_some_and(|program| at < program.len())
        };
        n_all == self.n_all && self.commands.iter().all(is_there)
    }
}

/// Bytes of all pools.
struct Bytes(Vec<Ranges>);

impl Bytes {
    fn none(artifact: &Artifact) -> Bytes {
        Bytes(artifact.pools.iter().map(|_| Ranges::default()).collect())
    }

    fn add(&mut self, access: &Access) {
        self.0[access.pool].add(access.start, access.end);
    }

    fn remove(&mut self, access: &Access) {
        self.0[access.pool].remove(access.start, access.end);
    }

    fn meet(&self, access: &Access) -> bool {
        !self.0[access.pool]
            .parts(access.start, access.end)
            .is_empty()
    }
}

/// The commands that some bytes depend on.
struct Slice {
    /// Their positions in the list, in order.
    commands: Vec<usize>,
    /// The bytes that they read and do not write before.
    read: Bytes,
    /// The bytes that they write.
    written: Bytes,
    /// The bytes that any command of the step writes.
    written_by_all: Bytes,
}

impl Slice {
    fn of(artifact: &Artifact, bytes: Option<Access>) -> Slice {
        let mut slice = Slice {
            commands: vec![],
            read: Bytes::none(artifact),
            written: Bytes::none(artifact),
            written_by_all: Bytes::none(artifact),
        };
        bytes.iter().for_each(|access| slice.read.add(access));
        for (at, command) in artifact.commands.iter().enumerate().rev() {
            let accesses = accesses(command);
            let (writes, reads): (Vec<Access>, Vec<Access>) =
                accesses.iter().partition(|access| access.write);
            writes.iter().for_each(|w| slice.written_by_all.add(w));
            if !writes.iter().any(|w| slice.read.meet(w)) {
                continue;
            }
            slice.commands.push(at);
            for write in &writes {
                slice.written.add(write);
                slice.read.remove(write);
            }
            reads.iter().for_each(|read| slice.read.add(read));
        }
        slice.commands.reverse();
        slice
    }
}

/// The streams and positions in their programs of some commands.
fn positions(artifact: &Artifact, commands: &[usize]) -> Vec<(StreamId, usize)> {
    let mut next = vec![0; artifact.streams.len()];
    let mut wanted = commands.iter().peekable();
    let mut positions = vec![];
    for (at, command) in artifact.commands.iter().enumerate() {
        let stream = command.stream as usize;
        if wanted.next_if_eq(&&at).is_some() {
            debug_assert!(matches!(
                command.kind,
                CommandKind::Launch { .. } | CommandKind::Copy { .. }
            ));
            positions.push((StreamId(stream), next[stream]));
        }
        next[stream] += 1;
    }
    positions
}
