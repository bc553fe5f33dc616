//! Proves that conflicting accesses are ordered: of two commands that touch the same byte, one of
//! them writing it, one has ended before the other starts, in every run.
//!
//! One walk over the list, twice, because step k+1 may overlap step k. A vector clock, one entry
//! for each stream, says which commands have ended before a command: streams order their own
//! commands, a record publishes its stream's clock, a wait joins it. Streams and events respect the
//! order of the list (waits come after records), so only the later of two commands is compared with
//! the earlier. Each byte range stores the accesses to compare with: the last write, and each
//! stream's last read since then (FastTrack: Flanagan and Freund, PLDI 2009). An ordered write
//! replaces them all.
//!
//! Two steps are enough. Waits for the previous step order nothing in the first step, so any two
//! consecutive steps are ordered at least as well as these two. Steps further apart follow, because
//! the second access also comes after the same access of the step in between.

use crate::Error;
use crate::access::{Access, accesses};
use artifact::{Artifact, CommandKind};
use std::collections::BTreeMap;

/// The number of byte ranges that the walk may visit. Plans need a few dozen for each command; this
/// is enough for a million commands, and ends the search on hostile files with millions of ranges
/// for every access.
const MAX_LOOKS: u64 = 1 << 27;

/// The number of clock entries that events may publish: a million events on sixteen streams.
const MAX_PUBLISHED: u64 = 1 << 24;

/// A command of the walk: its stream, and its number counted over both steps, from 1.
#[derive(Clone, Copy)]
struct Epoch {
    stream: u32,
    at: u64,
}

/// A byte range's history.
#[derive(Clone)]
struct Segment {
    end: u64,
    /// The last write.
    write: Option<Epoch>,
    /// Each stream's last read since.
    reads: Vec<Epoch>,
}

/// The commands that have ended: the highest number of each stream's commands.
type Clock = Vec<u64>;

pub(super) fn check(artifact: &Artifact) -> Result<(), Error> {
    let n_streams = artifact.streams.len();
    let n_commands = artifact.commands.len() as u64;
    if MAX_PUBLISHED < n_streams as u64 * u64::from(artifact.events) {
        return Err(Error::Invalid(format!(
            "{} events on {n_streams} streams are too many",
            artifact.events
        )));
    }
    let mut clocks: Vec<Clock> = vec![vec![0; n_streams]; n_streams];
    let mut pools: Vec<BTreeMap<u64, Segment>> = vec![BTreeMap::new(); artifact.pools.len()];
    // Only recorded clocks are kept. A recorded clock is never empty, because a stream recorded it.
    let mut recorded: Vec<Clock> = vec![Vec::new(); artifact.events as usize];
    let mut looks = 0;
    for step in 0..2 {
        let before = std::mem::replace(&mut recorded, vec![Vec::new(); artifact.events as usize]);
        for (i, command) in artifact.commands.iter().enumerate() {
            let stream = command.stream as usize;
            let epoch = Epoch {
                stream: command.stream,
                at: step * n_commands + i as u64 + 1,
            };
            clocks[stream][stream] = epoch.at;
            match command.kind {
                CommandKind::Record { event } => recorded[event as usize] = clocks[stream].clone(),
                CommandKind::Wait { event, previous } => {
                    let known = if previous { &before } else { &recorded };
                    for (mine, &theirs) in clocks[stream].iter_mut().zip(&known[event as usize]) {
                        *mine = theirs.max(*mine);
                    }
                }
                _ => {}
            }
            for access in accesses(command) {
                let other = touch(
                    &mut pools[access.pool],
                    access,
                    epoch,
                    &clocks[stream],
                    &mut looks,
                );
                if let Some(other) = other {
                    return Err(Error::Invalid(race(artifact, other, epoch, access)));
                }
                if MAX_LOOKS < looks {
                    return Err(Error::Invalid(
                        "its accesses are too fragmented to be proved free of races".into(),
                    ));
                }
            }
        }
    }
    Ok(())
}

/// Records an access; returns a conflicting access that may not have ended.
fn touch(
    segments: &mut BTreeMap<u64, Segment>,
    access: Access,
    epoch: Epoch,
    clock: &Clock,
    looks: &mut u64,
) -> Option<Epoch> {
    let Access {
        start, end, write, ..
    } = access;
    let unordered = |e: &Epoch| clock[e.stream as usize] < e.at;
    split(segments, start);
    split(segments, end);
    let mut gaps = Vec::new();
    let mut at = start;
    let mut keys = Vec::new();
    for (&from, segment) in segments.range_mut(start..end) {
        *looks += 1 + segment.reads.len() as u64;
        if let Some(other) = segment.write.iter().find(|e| unordered(e)) {
            return Some(*other);
        }
        if write {
            if let Some(other) = segment.reads.iter().find(|e| unordered(e)) {
                return Some(*other);
            }
            keys.push(from);
        } else {
            match segment.reads.iter_mut().find(|e| e.stream == epoch.stream) {
                Some(read) => *read = epoch,
                None => segment.reads.push(epoch),
            }
            if at < from {
                gaps.push((at, from));
            }
            at = segment.end;
        }
    }
    if write {
        for key in keys {
            segments.remove(&key);
        }
        segments.insert(
            start,
            Segment {
                end,
                write: Some(epoch),
                reads: Vec::new(),
            },
        );
    } else {
        if at < end {
            gaps.push((at, end));
        }
        let fresh = |(from, to)| {
            (
                from,
                Segment {
                    end: to,
                    write: None,
                    reads: vec![epoch],
                },
            )
        };
        segments.extend(gaps.into_iter().map(fresh));
    }
    None
}

/// Splits the segment that contains `at`, if any.
fn split(segments: &mut BTreeMap<u64, Segment>, at: u64) {
    if let Some((_, segment)) = segments.range_mut(..at).next_back()
        && at < segment.end
    {
        let right = segment.clone();
        segment.end = at;
        segments.insert(at, right);
    }
}

fn race(artifact: &Artifact, first: Epoch, second: Epoch, access: Access) -> String {
    let n_commands = artifact.commands.len() as u64;
    let name = |e: Epoch| {
        let command = &artifact.commands[((e.at - 1) % n_commands) as usize];
        (
            &artifact.lines[command.line as usize].name,
            &artifact.streams[command.stream as usize],
        )
    };
    let ((a, a_stream), (b, b_stream)) = (name(first), name(second));
    let later = if (first.at - 1) / n_commands < (second.at - 1) / n_commands {
        "the next step's "
    } else {
        ""
    };
    format!(
        "race: {a} on {a_stream} and {later}{b} on {b_stream} both touch bytes {}..{} of pool {}, \
         one of them writes, and \
         no event orders them",
        access.start, access.end, artifact.pools[access.pool].name
    )
}
