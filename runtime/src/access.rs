//! The bytes that a command reads and writes. The race check, the dead bytes of a shuffled run and
//! the measured peak all use this module.

use artifact::{Command, CommandKind, Operand, Place, Range};

/// Some bytes of a pool, and whether they are written. Never empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Access {
    /// An index into the artifact's pools.
    pub(crate) pool: usize,
    /// The first byte.
    pub(crate) start: u64,
    /// One past the last byte.
    pub(crate) end: u64,
    /// True if the bytes are written.
    pub(crate) write: bool,
}

/// How far something reaches into a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Reach {
    /// An index into the artifact's pools.
    pub(crate) pool: usize,
    /// One past the last byte.
    pub(crate) end: u64,
}

impl Access {
    /// An access of `bytes` bytes at a place; `None` if `bytes` is 0. The place is validated: its
    /// end does not overflow.
    pub(crate) fn new(place: Place, bytes: u64, write: bool) -> Option<Access> {
        let Place { pool, offset } = place;
        (bytes > 0).then_some(Access {
            pool: pool as usize,
            start: offset,
            end: offset + bytes,
            write,
        })
    }

    /// An access of a whole tensor.
    pub(crate) fn of(operand: &Operand, write: bool) -> Option<Access> {
        Access::new(
            operand.place,
            operand
                .bytes()
                .expect("a validated tensor should have a size"),
            write,
        )
    }

    /// How far it reaches into its pool.
    pub(crate) fn reach(&self) -> Reach {
        Reach {
            pool: self.pool,
            end: self.end,
        }
    }

    /// Whether both touch a byte.
    pub(crate) fn overlaps(&self, other: &Access) -> bool {
        self.pool == other.pool && self.start < other.end && other.start < self.end
    }
}

/// The accesses of a validated command: reads first, then writes.
pub(crate) fn accesses(command: &Command) -> Vec<Access> {
    match &command.kind {
        CommandKind::Launch {
            ins, outs, scratch, ..
        } => {
            let reads = ins.iter().map(|x| Access::of(x, false));
            let writes = outs.iter().map(|y| Access::of(y, true));
            let scratch = scratch
                .iter()
                .map(|&Range { place, bytes }| Access::new(place, bytes, true));
            reads.chain(writes).chain(scratch).flatten().collect()
        }
        &CommandKind::Copy { src, dst, bytes } => [
            Access::new(src, bytes, false),
            Access::new(dst, bytes, true),
        ]
        .into_iter()
        .flatten()
        .collect(),
        CommandKind::Record { .. } | CommandKind::Wait { .. } => Vec::new(),
    }
}
