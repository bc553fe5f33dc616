//! Proves that every byte that a kernel or the host reads was written before: in this step, in the
//! one before, or by the host. On a GPU, unwritten bytes may come from another program.
//!
//! One walk over the list, twice, with the set of written bytes of each pool. Before each step the
//! host has written the inputs, and before the first one all states. A launch reads its operands
//! and writes its results; afterwards its scratch counts as not written. A copy's destination
//! counts as written where its source is written: buffers are copied with the padding after their
//! values. After each step the host may read outputs and states.
//!
//! Everything can run in the order of the list, and every conflict has this order in every run
//! ([`races`](super::races)). So a fact about the list holds in every run. Two steps are enough:
//! the second starts with the bytes that the first leaves, and so does each later step.

use crate::Error;
use crate::access::Access;
use crate::ranges::Ranges;
use artifact::{Artifact, CommandKind, Operand, Range};

/// The number of byte ranges that the walk may visit. Plans need a few for each command; this limit
/// ends the search on hostile files with millions of ranges for every access.
const MAX_LOOKS: u64 = 1 << 27;

struct Walk<'a> {
    artifact: &'a Artifact,
    pools: Vec<Ranges>,
    looks: u64,
}

pub(super) fn check(artifact: &Artifact) -> Result<(), Error> {
    let mut walk = Walk {
        artifact,
        pools: artifact.pools.iter().map(|_| Ranges::default()).collect(),
        looks: 0,
    };
    for state in &artifact.states {
        walk.write(&state.operand).map_err(Error::Invalid)?;
    }
    for step in ["the step", "the step after it"] {
        for input in &artifact.inputs {
            walk.write(&input.operand).map_err(Error::Invalid)?;
        }
        for command in &artifact.commands {
            let line = &artifact.lines[command.line as usize].name;
            walk.command(&command.kind)
                .map_err(|e| in_line(line, step, &e))?;
        }
        for output in &artifact.outputs {
            let read = walk.read(&output.operand);
            read.map_err(|e| Error::Invalid(format!("output {} after {step}: {e}", output.name)))?;
        }
        for state in &artifact.states {
            let read = walk.read(&state.operand);
            read.map_err(|e| Error::Invalid(format!("state {} after {step}: {e}", state.path)))?;
        }
    }
    Ok(())
}

fn in_line(line: &str, step: &str, error: &str) -> Error {
    Error::Invalid(if step == "the step" {
        format!("line {line}: {error}")
    } else {
        format!("line {line} of {step}: {error}")
    })
}

impl Walk<'_> {
    fn command(&mut self, kind: &CommandKind) -> Result<(), String> {
        match kind {
            CommandKind::Launch {
                ins, outs, scratch, ..
            } => {
                for x in ins {
                    self.read(x)?;
                }
                if let &Some(Range { place, bytes }) = scratch
                    && let Some(scratch) = Access::new(place, bytes, true)
                {
                    let looks = self.pools[scratch.pool].remove(scratch.start, scratch.end);
                    self.look(looks)?;
                }
                for y in outs {
                    self.write(y)?;
                }
                Ok(())
            }
            &CommandKind::Copy { src, dst, bytes } => {
                let (Some(src), Some(dst)) = (
                    Access::new(src, bytes, false),
                    Access::new(dst, bytes, true),
                ) else {
                    return Ok(());
                };
                let parts = self.pools[src.pool].parts(src.start, src.end);
                let removed = self.pools[dst.pool].remove(dst.start, dst.end);
                self.look(removed + parts.len() as u64)?;
                for (from, to) in parts {
                    let at = |byte: u64| byte - src.start + dst.start;
                    let looks = self.pools[dst.pool].add(at(from), at(to));
                    self.look(looks)?;
                }
                Ok(())
            }
            CommandKind::Record { .. } | CommandKind::Wait { .. } => Ok(()),
        }
    }

    fn read(&self, operand: &Operand) -> Result<(), String> {
        let Some(read) = Access::of(operand, false) else {
            return Ok(());
        };
        let pool = &self.artifact.pools[read.pool].name;
        match self.pools[read.pool].missing(read.start, read.end) {
            None => Ok(()),
            Some(byte) => Err(format!(
                "reads bytes {}..{} of pool {pool}, and nothing has written byte {byte}",
                read.start, read.end
            )),
        }
    }

    fn write(&mut self, operand: &Operand) -> Result<(), String> {
        let Some(write) = Access::of(operand, true) else {
            return Ok(());
        };
        let looks = self.pools[write.pool].add(write.start, write.end);
        self.look(looks)
    }

    fn look(&mut self, looks: u64) -> Result<(), String> {
        self.looks += looks;
        if self.looks > MAX_LOOKS {
            return Err("its accesses are too fragmented to be proved written before".into());
        }
        Ok(())
    }
}
