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
use artifact::{Artifact, CommandKind, Operand, Range};
use std::collections::BTreeMap;

/// The number of byte ranges that the walk may visit. Plans need a few for each command; this limit
/// ends the search on hostile files with millions of ranges for every access.
const MAX_LOOKS: u64 = 1 << 27;

/// The written bytes of a pool: ends of disjoint ranges by their starts. No two ranges touch.
#[derive(Default)]
struct Written(BTreeMap<u64, u64>);

impl Written {
    /// The first unwritten byte of a range.
    fn missing(&self, start: u64, end: u64) -> Option<u64> {
        match self.0.range(..=start).next_back() {
            Some((_, &to)) if to >= end => None,
            Some((_, &to)) if to > start => Some(to),
            _ => Some(start),
        }
    }

    /// Removes bytes; returns the number of visited ranges.
    fn remove(&mut self, start: u64, end: u64) -> u64 {
        let mut looks = 1;
        if let Some((&from, &to)) = self.0.range(..start).next_back()
            && to > start
        {
            self.0.insert(from, start);
            if to > end {
                self.0.insert(end, to);
            }
        }
        while let Some((&from, &to)) = self.0.range(start..end).next() {
            looks += 1;
            self.0.remove(&from);
            if to > end {
                self.0.insert(end, to);
            }
        }
        looks
    }

    /// Adds bytes; returns the number of visited ranges.
    fn add(&mut self, mut start: u64, mut end: u64) -> u64 {
        let looks = self.remove(start, end);
        // Ranges that touch become one.
        if let Some((&from, &to)) = self.0.range(..start).next_back()
            && to == start
        {
            self.0.remove(&from);
            start = from;
        }
        if let Some(to) = self.0.remove(&end) {
            end = to;
        }
        self.0.insert(start, end);
        looks
    }

    /// The written parts of a range.
    fn parts(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let before = self.0.range(..start).next_back();
        let within = self.0.range(start..end);
        before
            .into_iter()
            .chain(within)
            .map(|(&from, &to)| (from.max(start), to.min(end)))
            .filter(|(from, to)| from < to)
            .collect()
    }
}

struct Walk<'a> {
    artifact: &'a Artifact,
    pools: Vec<Written>,
    looks: u64,
}

pub(super) fn check(artifact: &Artifact) -> Result<(), Error> {
    let mut walk = Walk {
        artifact,
        pools: artifact.pools.iter().map(|_| Written::default()).collect(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Ranges behave like a list of bytes.
        #[test]
        fn ranges_are_sets_of_bytes(
            edits in prop::collection::vec((any::<bool>(), 0u64..64, 1u64..40), 0..40),
            (start, len) in (0u64..64, 1u64..64),
        ) {
            let (mut ranges, mut bytes) = (Written::default(), [false; 128]);
            for (adds, start, len) in edits {
                if adds {
                    ranges.add(start, start + len);
                } else {
                    ranges.remove(start, start + len);
                }
                bytes[start as usize..(start + len) as usize].fill(adds);
            }
            let end = start + len;
            let missing = (start..end).find(|&byte| !bytes[byte as usize]);
            prop_assert_eq!(ranges.missing(start, end), missing);
            let mut parts = [false; 128];
            for (from, to) in ranges.parts(start, end) {
                parts[from as usize..to as usize].fill(true);
            }
            let expected = |byte: u64| (start..end).contains(&byte) && bytes[byte as usize];
            prop_assert!((0..128).all(|byte| parts[byte as usize] == expected(byte)));
            let sorted: Vec<(u64, u64)> = ranges.0.into_iter().collect();
            prop_assert!(sorted.iter().all(|(from, to)| from < to));
            prop_assert!(sorted.windows(2).all(|pair| pair[0].1 < pair[1].0));
        }
    }
}
