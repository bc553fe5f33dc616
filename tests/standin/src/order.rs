//! The order of accesses: vector clocks of streams and host threads, over blocks of bytes.
//!
//! An access must come after the last write of each block that it touches, and a write also after
//! all reads since then. It does if the actor's clock has reached the time of these accesses.

use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes of a block: the alignment of every place in a plan, so two places share no block.
pub const BLOCK: u64 = 64;

/// A stream or a host thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Actor(pub(crate) usize);

/// For each actor, the number of its steps that come before.
#[derive(Clone, Default, Debug)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    /// Steps before another clock are now also before this one.
    pub(crate) fn join(&mut self, other: &Clock) {
        self.0.resize(self.0.len().max(other.0.len()), 0);
        let pairs = self.0.iter_mut().zip(&other.0);
        pairs.for_each(|(mine, &theirs)| *mine = (*mine).max(theirs));
    }
    /// The actor takes a step.
    pub(crate) fn tick(&mut self, actor: Actor) {
        self.0.resize(self.0.len().max(actor.0 + 1), 0);
        self.0[actor.0] += 1;
    }
    fn of(&self, actor: Actor) -> u64 {
        self.0.get(actor.0).copied().unwrap_or(0)
    }
    fn is_after(&self, stamp: &Stamp) -> bool {
        stamp.time <= self.of(stamp.actor)
    }
}

/// A step of an actor.
#[derive(Clone, Copy, Debug)]
struct Stamp {
    actor: Actor,
    time: u64,
}

/// The last accesses of a block.
#[derive(Default, Debug)]
struct Block {
    write: Option<Stamp>,
    /// The last read of each actor since the write.
    reads: Vec<Stamp>,
}

/// An access that is not ordered after a conflicting one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Conflict {
    /// The first byte of the block.
    pub(crate) address: u64,
    pub(crate) earlier: Actor,
    /// The earlier access is a write.
    pub(crate) wrote: bool,
}

/// Blocks that are looked up together.
const PAGE: u64 = 64;

/// The accesses of all bytes.
#[derive(Default, Debug)]
pub(crate) struct Ledger {
    /// Blocks by their numbers, in pages of [`PAGE`].
    pages: BTreeMap<u64, Vec<Block>>,
}

impl Ledger {
    /// An actor with this clock accesses bytes. Returns the first conflict, if any.
    pub(crate) fn access(
        &mut self,
        actor: Actor,
        clock: &Clock,
        bytes: Range<u64>,
        write: bool,
    ) -> Option<Conflict> {
        let now = Stamp {
            actor,
            time: clock.of(actor),
        };
        let mut conflict = None;
        let numbers = bytes.start / BLOCK..bytes.end.div_ceil(BLOCK);
        let mut next = numbers.start;
        while next < numbers.end {
            let page = next / PAGE;
            let end = numbers.end.min((page + 1) * PAGE);
            let fresh = || (0..PAGE).map(|_| Block::default()).collect();
            let blocks = self.pages.entry(page).or_insert_with(fresh);
            let from = (next % PAGE) as usize;
            for (number, block) in (next..end).zip(&mut blocks[from..]) {
                let found = block.access(now, clock, write);
                conflict = conflict.or(found.map(|(earlier, wrote)| Conflict {
                    address: number * BLOCK,
                    earlier,
                    wrote,
                }));
            }
            next = end;
        }
        conflict
    }

    /// Bytes were freed: later accesses belong to other memory.
    pub(crate) fn forget(&mut self, bytes: Range<u64>) {
        for number in bytes.start / BLOCK..bytes.end.div_ceil(BLOCK) {
            if let Some(blocks) = self.pages.get_mut(&(number / PAGE)) {
                blocks[(number % PAGE) as usize] = Block::default();
            }
        }
    }
}

impl Block {
    /// An actor accesses the block. Returns the actor of an earlier access that is not ordered
    /// before this one, and whether it was a write.
    fn access(&mut self, now: Stamp, clock: &Clock, write: bool) -> Option<(Actor, bool)> {
        let unordered = |stamp: &&Stamp| !clock.is_after(stamp);
        let wrote = self
            .write
            .as_ref()
            .filter(unordered)
            .map(|s| (s.actor, true));
        if !write {
            self.reads.retain(|stamp| stamp.actor != now.actor);
            self.reads.push(now);
            return wrote;
        }
        let read = self.reads.iter().find(unordered).map(|s| (s.actor, false));
        self.write = Some(now);
        self.reads.clear();
        wrote.or(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Actor = Actor(0);
    const B: Actor = Actor(1);

    fn stepped(actor: Actor, clock: &Clock) -> Clock {
        let mut clock = clock.clone();
        clock.tick(actor);
        clock
    }

    #[test]
    fn a_read_comes_after_the_write() {
        let mut ledger = Ledger::default();
        let a = stepped(A, &Clock::default());
        assert_eq!(ledger.access(A, &a, 0..256, true), None);
        let mut b = stepped(B, &Clock::default());
        let conflict = Conflict {
            address: 128,
            earlier: A,
            wrote: true,
        };
        assert_eq!(ledger.access(B, &b, 130..131, false), Some(conflict));
        b.join(&a);
        assert_eq!(ledger.access(B, &b, 0..256, false), None);
    }

    #[test]
    fn a_write_comes_after_every_read() {
        let mut ledger = Ledger::default();
        let a = stepped(A, &Clock::default());
        assert_eq!(ledger.access(A, &a, 0..64, false), None);
        let b = stepped(B, &Clock::default());
        assert_eq!(ledger.access(B, &b, 0..64, false), None, "two readers");
        let conflict = Conflict {
            address: 0,
            earlier: A,
            wrote: false,
        };
        assert_eq!(ledger.access(B, &b, 0..64, true), Some(conflict));
        assert_eq!(ledger.access(A, &a, 64..65, true), None, "another block");
    }

    #[test]
    fn freed_bytes_have_no_past() {
        let mut ledger = Ledger::default();
        let a = stepped(A, &Clock::default());
        ledger.access(A, &a, 0..128, true);
        ledger.forget(0..64);
        let b = stepped(B, &Clock::default());
        assert_eq!(ledger.access(B, &b, 0..64, true), None);
        assert!(ledger.access(B, &b, 64..128, true).is_some());
    }
}
