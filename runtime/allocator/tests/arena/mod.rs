//! A device for tests: every 512 bytes know their owner, and streams run as late as possible.

#![allow(dead_code, reason = "each test uses what it needs")]

use lighterage_alloc::pool::{Event, Pool, PoolError};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

pub(crate) const UNIT: u64 = 512;
const BASE: u64 = 1 << 40;

/// The work of each stream that a stream has seen.
type Clock = BTreeMap<u64, u64>;

#[derive(Default)]
struct Streams {
    clocks: HashMap<u64, Clock>,
    events: HashMap<u64, Clock>,
    n_events: u64,
    /// All work before this clock is done.
    done: Clock,
    /// The streams that have worked on a unit since it last went to another stream behind an event.
    users: HashMap<u64, Clock>,
}

/// Memory and streams.
pub(crate) struct Arena {
    /// 0: no owner.
    owners: Vec<AtomicU64>,
    next: AtomicU64,
    given: Mutex<BTreeMap<u64, u64>>,
    streams: Mutex<Streams>,
}

impl Arena {
    pub(crate) fn new(bytes: u64) -> Arc<Arena> {
        let owners = (0..bytes / UNIT).map(|_| AtomicU64::new(0)).collect();
        let (given, streams) = (Mutex::new(BTreeMap::new()), Mutex::new(Streams::default()));
        Arc::new(Arena {
            owners,
            next: AtomicU64::new(0),
            given,
            streams,
        })
    }

    pub(crate) fn pool(self: &Arc<Arena>) -> Box<dyn Pool> {
        Box::new(OfArena(self.clone()))
    }

    /// Bytes that the device has given out and not got back.
    pub(crate) fn given(&self) -> u64 {
        self.given.lock().unwrap().values().sum()
    }

    fn units(&self, address: u64, bytes: u64) -> impl Iterator<Item = usize> {
        assert_eq!(address % UNIT, 0, "an address should be aligned");
        let first = (address - BASE) / UNIT;
        (first..first + bytes.div_ceil(UNIT)).map(|unit| unit as usize)
    }

    /// The guard: these bytes must have no owner; now `owner` has them.
    pub(crate) fn own(&self, address: u64, bytes: u64, owner: u64) {
        for unit in self.units(address, bytes) {
            let before = self.owners[unit].swap(owner, Ordering::Relaxed);
            assert_eq!(before, 0, "block {owner} got bytes of block {before}");
        }
    }

    /// The bytes must still be `owner`'s; now they have no owner.
    pub(crate) fn disown(&self, address: u64, bytes: u64, owner: u64) {
        for unit in self.units(address, bytes) {
            let before = self.owners[unit].swap(0, Ordering::Relaxed);
            assert_eq!(before, owner, "block {before} got bytes of block {owner}");
        }
    }

    /// A stream works on a block: its first use after a change of owner must come after all earlier
    /// users.
    pub(crate) fn work(&self, address: u64, bytes: u64, stream: u64, first: bool) {
        let mut streams = self.streams.lock().unwrap();
        let streams = &mut *streams;
        let clock = streams.clocks.entry(stream).or_default();
        let stamp = clock.entry(stream).or_default();
        *stamp += 1;
        let stamp = *stamp;
        for unit in self.units(address, bytes) {
            let users = streams.users.entry(unit as u64).or_default();
            if first {
                for (user, stamp) in std::mem::take(users) {
                    let seen = clock
                        .get(&user)
                        .max(streams.done.get(&user))
                        .copied()
                        .unwrap_or(0);
                    assert!(
                        stamp <= seen,
                        "stream {stream} took bytes that stream {user} still uses"
                    );
                }
            }
            users.insert(stream, stamp);
        }
    }
}

struct OfArena(Arc<Arena>);

impl Pool for OfArena {
    fn allocate(&mut self, bytes: u64) -> Result<u64, PoolError> {
        let bytes = bytes.next_multiple_of(UNIT);
        let at = self.0.next.load(Ordering::Relaxed);
        if self.0.owners.len() as u64 * UNIT < at.saturating_add(bytes) {
            return Err(PoolError::Other("the arena is full".into()));
        }
        self.0.next.store(at + bytes, Ordering::Relaxed);
        self.0.given.lock().unwrap().insert(BASE + at, bytes);
        Ok(BASE + at)
    }

    fn free(&mut self, address: u64) {
        let bytes = self
            .0
            .given
            .lock()
            .unwrap()
            .remove(&address)
            .expect("only what was given comes back");
        // As the driver does.
        self.synchronize();
        for unit in self.0.units(address, bytes) {
            assert_eq!(
                self.0.owners[unit].load(Ordering::Relaxed),
                0,
                "a block is still in use"
            );
        }
    }

    fn record(&mut self, stream: u64) -> Result<Event, PoolError> {
        let mut streams = self.0.streams.lock().unwrap();
        streams.n_events += 1;
        let (event, clock) = (
            streams.n_events,
            streams.clocks.get(&stream).cloned().unwrap_or_default(),
        );
        streams.events.insert(event, clock);
        Ok(Event(event))
    }

    fn done(&mut self, event: Event) -> bool {
        let streams = self.0.streams.lock().unwrap();
        let clock = &streams.events[&event.0];
        clock
            .iter()
            .all(|(stream, stamp)| stamp <= streams.done.get(stream).unwrap_or(&0))
    }

    fn wait(&mut self, stream: u64, event: Event) -> Result<(), PoolError> {
        let mut streams = self.0.streams.lock().unwrap();
        let seen = streams.events[&event.0].clone();
        let clock = streams.clocks.entry(stream).or_default();
        for (other, stamp) in seen {
            let known = clock.entry(other).or_default();
            *known = stamp.max(*known);
        }
        Ok(())
    }

    fn forget(&mut self, event: Event) {
        let forgotten = self.0.streams.lock().unwrap().events.remove(&event.0);
        assert!(forgotten.is_some(), "an event is forgotten once");
    }

    fn synchronize(&mut self) {
        let mut streams = self.0.streams.lock().unwrap();
        let all: Vec<(u64, u64)> = streams
            .clocks
            .iter()
            .map(|(s, clock)| (*s, clock.get(s).copied().unwrap_or(0)))
            .collect();
        streams.done.extend(all);
    }
}
