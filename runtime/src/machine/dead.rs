//! Which bytes are dead after which command, for shuffled runs: they are then filled with NaNs, so
//! that a command that reads what it should not, or too late, spoils the result for all to see.
//!
//! An artifact has no lifetimes, so they are read off its accesses. Take one byte and all that
//! touches it in list order, the step being cyclic, and the host among them: it writes inputs and
//! states before the step, and reads outputs and states after it (and inputs that no command
//! overwrites, since the next step may find them there). A value lives from a write to the last
//! read before the next write. The commands in that run, the write and the reads, are a *group*:
//! once all of them have run, in whatever order, the byte is dead, and every later write of it is
//! still to come, for [`crate::validate`] proved that write to be ordered after each of them. So
//! the byte may be filled at once. For the same reason the same group of the next step starts only
//! after this one is through, and one counter for each group suffices. A state's run goes from its
//! last write in one step to its last read before the first write in the next: in the first step,
//! the part before the border counts as done.
//!
//! Bytes are left alone where death cannot be proved or does not come:
//! * the host reads them after the step;
//! * the next write is by a command that also reads them (in place): the value passes over;
//! * the run ends with the step, and the next step's first access is a read that no host write
//!   precedes: then the byte carries something over, and whether that is right is not ours to say.

use super::backend::{Backend, CommandId};
use crate::Error;
use crate::access::{Access, accesses};
use artifact::{Artifact, Place, Range};
use std::collections::{BTreeMap, BTreeSet};

/// How many accesses the sweep may look at: a shuffled run is a test of small plans.
const MAX_LOOKS: usize = 1 << 27;

/// Bytes that die together.
struct Group {
    bytes: Range,
    members: u32,
    left: u32,
}

/// All groups.
pub(crate) struct Dead {
    groups: Vec<Group>,
    /// The groups that each command is a member of.
    of: Vec<Vec<u32>>,
}

/// Something that touches a byte: its place in the list (0 is the host before the step), and
/// whether it writes. A command that does both reads first.
type Touch = (usize, bool);

impl Dead {
    /// Finds the groups of a validated artifact. `survives` tells of each input whether the next
    /// step may find it.
    pub(crate) fn new(artifact: &Artifact, survives: &[bool]) -> Result<Dead, Error> {
        let end = artifact.commands.len() + 1;
        let touches = touches(artifact, survives, end);
        // A sweep over each pool's bytes: what touches the bytes between two borders is known at
        // the first of them.
        let mut borders: BTreeMap<(usize, u64), Vec<usize>> = BTreeMap::new();
        for (id, (access, _)) in touches.iter().enumerate() {
            borders
                .entry((access.pool, access.start))
                .or_default()
                .push(id);
            borders
                .entry((access.pool, access.end))
                .or_default()
                .push(id);
        }
        let mut dead = Dead {
            groups: Vec::new(),
            of: vec![Vec::new(); artifact.commands.len()],
        };
        let mut active: BTreeSet<(usize, bool, usize)> = BTreeSet::new();
        let mut looks = 0;
        let ends = borders.keys().skip(1).map(|&(_, at)| at).chain([0]);
        for ((&(pool, start), ids), end_of_range) in borders.iter().zip(ends) {
            for &id in ids {
                let (access, at) = touches[id];
                let touch = (at, access.write, id);
                if access.start == start {
                    active.insert(touch);
                } else {
                    active.remove(&touch);
                }
            }
            looks += active.len();
            if looks > MAX_LOOKS {
                return Err(Error::Unsupported(
                    "shuffle: the plan is too large for it".into(),
                ));
            }
            let sequence: Vec<Touch> = active.iter().map(|&(at, write, _)| (at, write)).collect();
            for Run { members, before } in runs(&sequence, end) {
                let id = dead.groups.len() as u32;
                members.iter().for_each(|&at| dead.of[at - 1].push(id));
                let bytes = Range {
                    place: Place {
                        pool: pool as u32,
                        offset: start,
                    },
                    bytes: end_of_range - start,
                };
                let members = members.len() as u32;
                dead.groups.push(Group {
                    bytes,
                    members,
                    left: members - before,
                });
            }
        }
        Ok(dead)
    }

    /// A command has run: fills what is dead now.
    pub(crate) fn ran(&mut self, command: CommandId, backend: &dyn Backend) -> Result<(), Error> {
        for &group in &self.of[command.0] {
            let group = &mut self.groups[group as usize];
            group.left -= 1;
            if group.left == 0 {
                group.left = group.members;
                backend.fill(group.bytes, 0xFF)?;
            }
        }
        Ok(())
    }
}

/// Everything that touches bytes, with its place in the list; the host's turn after the step is at
/// `end`.
fn touches(artifact: &Artifact, survives: &[bool], end: usize) -> Vec<(Access, usize)> {
    let mut touches: Vec<(Access, usize)> = Vec::new();
    let mut touch =
        |access: Option<Access>, at: usize| touches.extend(access.map(|access| (access, at)));
    for (input, &survives) in artifact.inputs.iter().zip(survives) {
        touch(Access::of(&input.operand, true), 0);
        touch(Access::of(&input.operand, false).filter(|_| survives), end);
    }
    for state in &artifact.states {
        touch(Access::of(&state.operand, true), 0);
        touch(Access::of(&state.operand, false), end);
    }
    artifact
        .outputs
        .iter()
        .for_each(|output| touch(Access::of(&output.operand, false), end));
    for (i, command) in artifact.commands.iter().enumerate() {
        accesses(command)
            .into_iter()
            .for_each(|access| touch(Some(access), i + 1));
    }
    touches
}

/// A group of one byte: places in the list, and how many of them belong to the step before.
#[derive(PartialEq, Eq, Debug)]
struct Run {
    members: Vec<usize>,
    before: u32,
}

/// The groups of one byte, from all that touches it in order.
fn runs(sequence: &[Touch], end: usize) -> Vec<Run> {
    let writes: Vec<usize> = (0..sequence.len()).filter(|&i| sequence[i].1).collect();
    let (Some(&first), Some(&last)) = (writes.first(), writes.last()) else {
        return Vec::new();
    };
    // The commands of a part of the sequence, each once: one may read a byte as two operands.
    let commands = |part: &[Touch]| -> Vec<usize> {
        let places: BTreeSet<usize> = part
            .iter()
            .map(|&(at, _)| at)
            .filter(|&at| at != 0 && at != end)
            .collect();
        places.into_iter().collect()
    };
    // Whether the write at `next` reads what it writes over, as an in-place kernel does.
    let passes_over = |part: &[Touch], next: usize| part.contains(&(sequence[next].0, false));
    let host_writes = sequence[0] == (0, true);
    let host_reads = sequence.iter().any(|&(at, _)| at == end);
    let mut runs = Vec::new();
    for pair in writes.windows(2) {
        let part = &sequence[pair[0]..pair[1]];
        // What the host finds after the step it does not write before the next: that run starts in
        // the step before.
        let across = host_writes && host_reads && pair[0] == first;
        if !across && !passes_over(part, pair[1]) {
            runs.push(Run {
                members: commands(part),
                before: 0,
            });
        }
    }
    let tail = commands(&sequence[last..]);
    if !host_reads {
        // The host writes anew, or a command does without having read.
        if sequence[0].1 {
            runs.push(Run {
                members: tail,
                before: 0,
            });
        }
    } else if host_writes && first < last {
        let head = &sequence[first..writes[1]];
        // Without a reader in the next step there is no moment after the host's reading to fill it.
        if !passes_over(head, writes[1]) && !commands(head).is_empty() {
            let before = tail.len() as u32;
            runs.push(Run {
                members: [commands(head), tail].concat(),
                before,
            });
        }
    }
    runs.retain(|run| !run.members.is_empty());
    runs
}

#[cfg(test)]
mod tests {
    use super::{Run, runs};

    const R: bool = false;
    const W: bool = true;

    fn within(members: &[usize]) -> Run {
        Run {
            members: members.to_vec(),
            before: 0,
        }
    }

    #[test]
    fn a_value_dies_with_its_last_reader() {
        assert_eq!(
            runs(&[(1, W), (2, R), (3, R), (5, W), (6, R)], 9),
            [within(&[1, 2, 3]), within(&[5, 6])]
        );
    }
    #[test]
    fn what_nobody_reads_dies_at_once() {
        assert_eq!(runs(&[(4, W)], 9), [within(&[4])]);
    }
    #[test]
    fn in_place_passes_over() {
        assert_eq!(
            runs(&[(1, W), (2, R), (2, W), (3, R)], 9),
            [within(&[2, 3])]
        );
    }
    /// It is read in one step by 6, and in the next by 1 and 2: steps overlap, so 6 may come last.
    #[test]
    fn a_state_dies_between_its_last_read_and_its_update() {
        let state = [(0, W), (1, R), (2, R), (4, W), (6, R), (9, R)];
        assert_eq!(
            runs(&state, 9),
            [Run {
                members: vec![1, 2, 4, 6],
                before: 2
            }]
        );
    }
    #[test]
    fn a_state_that_is_updated_in_place_never_dies() {
        assert_eq!(
            runs(&[(0, W), (1, R), (4, R), (4, W), (6, R), (9, R)], 9),
            []
        );
    }
    #[test]
    fn an_output_lives_at_the_end() {
        assert_eq!(
            runs(&[(1, W), (2, R), (4, W), (9, R)], 9),
            [within(&[1, 2])]
        );
    }
    #[test]
    fn what_the_step_finds_without_the_host_is_carried_over() {
        assert_eq!(runs(&[(1, R), (2, W), (3, R)], 9), []);
    }
    #[test]
    fn an_input_dies_with_its_last_reader() {
        assert_eq!(
            runs(&[(0, W), (1, R), (3, W), (4, R)], 9),
            [within(&[1]), within(&[3, 4])]
        );
    }
}
