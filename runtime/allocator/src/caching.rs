//! Memory for requests without a plan: freed blocks are kept and cut up for later requests of the
//! same stream.
//!
//! The policy and the sizes are those of PyTorch's CUDACachingAllocator: blocks of a multiple of
//! 512 bytes, best fit among the free blocks of a stream; requests up to 1 MiB share segments of 2
//! MiB, those up to 10 MiB segments of 20 MiB, larger ones have a segment of their own in steps of
//! 2 MiB.
//!
//! If the cache is *expandable*, each stream has a range of addresses for small requests and one
//! for others, in which memory is mapped in steps of 2 and of 20 MiB. A request for which no free
//! block is large enough takes the addresses where the fewest bytes must be mapped, with the free
//! blocks between them. Memory that is given back leaves a hole, which is filled again.

use crate::error::AllocError;
use crate::pool::{Event, Pool, PoolError, Range};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

const MIB: u64 = 1 << 20;
/// Every block's size is a multiple of this.
const UNIT: u64 = 512;
/// The largest request that shares a small segment.
const SMALL: u64 = MIB;
/// A small segment, and the least that is mapped into a small range.
const SMALL_STEP: u64 = 2 * MIB;
/// A segment for requests below [`OWN`], and the least that is mapped into a large range.
const LARGE_STEP: u64 = 20 * MIB;
/// Requests of at least this size get a segment of their own size, a multiple of [`SMALL_STEP`].
const OWN: u64 = 10 * MIB;

#[derive(Clone, Copy)]
struct Chunk {
    bytes: u64,
    /// First address of the driver's block or of the range that it is a part of.
    segment: u64,
    stream: u64,
    small: bool,
    free: bool,
}

impl Chunk {
    fn key(&self, address: u64) -> (u64, bool, u64, u64) {
        (self.stream, self.small, self.bytes, address)
    }
}

/// The fallback.
pub(crate) struct Cache {
    /// All blocks, free or used, by address.
    chunks: BTreeMap<u64, Chunk>,
    /// Free blocks: stream, small or not, bytes, address.
    free: BTreeSet<(u64, bool, u64, u64)>,
    /// The ranges of an expandable cache, for each stream's small and other requests.
    ranges: Option<BTreeMap<(u64, bool), Range>>,
    /// Blocks that were freed while other streams still used them.
    waiting: VecDeque<(u64, Vec<Event>)>,
    /// Bytes that the driver gave and has not got back.
    pub(crate) reserved: u64,
    pub(crate) peak_reserved: u64,
    /// Bytes of blocks in use, including rounding.
    pub(crate) live: u64,
    pub(crate) peak_live: u64,
    /// How often the driver was asked.
    pub(crate) native: u64,
}

impl Cache {
    pub(crate) fn new() -> Cache {
        Cache {
            chunks: BTreeMap::new(),
            free: BTreeSet::new(),
            ranges: None,
            waiting: VecDeque::new(),
            reserved: 0,
            peak_reserved: 0,
            live: 0,
            peak_live: 0,
            native: 0,
        }
    }

    /// Makes the cache expandable, if the device can map memory: this is tried out.
    pub(crate) fn expand(&mut self, pool: &mut dyn Pool) -> Result<(), PoolError> {
        let range = pool.reserve(LARGE_STEP)?;
        pool.map(range, range.address, range.step)?;
        pool.unmap(range, range.address, range.step);
        self.ranges = Some(BTreeMap::from([((0, false), range)]));
        Ok(())
    }

    /// A block of at least `bytes` for `stream`.
    pub(crate) fn malloc(
        &mut self,
        bytes: u64,
        stream: u64,
        pool: &mut dyn Pool,
    ) -> Result<u64, AllocError> {
        if 1 << 62 <= bytes {
            return Err(AllocError::TooLarge { bytes });
        }
        self.settle(pool);
        let bytes = bytes.max(1).next_multiple_of(UNIT);
        let small = bytes <= SMALL;
        let found = self
            .free
            .range((stream, small, bytes, 0)..=(stream, small, u64::MAX, u64::MAX))
            .next()
            .copied();
        let address = match found {
            Some((.., address)) => address,
            None => self.grow(bytes, stream, small, pool)?,
        };
        let mut chunk = self.chunks[&address];
        self.free.remove(&chunk.key(address));
        chunk.free = false;
        let rest = chunk.bytes - bytes;
        // The rest of a large segment's block is split off only if a large request can use it. In a
        // range, memory that is mapped behind it may make it larger.
        let always = small || self.range(&chunk).is_some();
        if (if always { UNIT } else { SMALL + 1 }) <= rest {
            chunk.bytes = bytes;
            let left = Chunk {
                bytes: rest,
                free: true,
                ..chunk
            };
            self.chunks.insert(address + bytes, left);
            self.free.insert(left.key(address + bytes));
        }
        self.chunks.insert(address, chunk);
        self.live += chunk.bytes;
        self.peak_live = self.peak_live.max(self.live);
        Ok(address)
    }

    /// True if the block was one of ours. `events` are events of other streams that have used it.
    pub(crate) fn free(&mut self, address: u64, events: Vec<Event>) -> bool {
        let waits = self.waiting.iter().any(|(waiting, _)| *waiting == address);
        let Some(chunk) = self
            .chunks
            .get(&address)
            .filter(|chunk| !chunk.free && !waits)
        else {
            return false;
        };
        self.live -= chunk.bytes;
        if events.is_empty() {
            self.release(address);
        } else {
            self.waiting.push_back((address, events));
        }
        true
    }

    pub(crate) fn stream(&self, address: u64) -> Option<u64> {
        self.chunks
            .get(&address)
            .filter(|chunk| !chunk.free)
            .map(|chunk| chunk.stream)
    }

    /// Gives unused segments back, and the unused steps of ranges.
    pub(crate) fn trim(&mut self, pool: &mut dyn Pool) {
        // The device must have done all work before memory is taken away from a range.
        if !self.waiting.is_empty() || self.ranges.is_some() {
            pool.synchronize();
            self.settle(pool);
        }
        for (.., address) in self.free.iter().copied().collect::<Vec<_>>() {
            let chunk = self.chunks[&address];
            let (end, range) = (address + chunk.bytes, self.range(&chunk));
            let (lo, hi) = match range {
                Some(range) => range.within(address, end),
                None if self.whole(address, &chunk) => (address, end),
                None => continue,
            };
            if hi <= lo {
                continue;
            }
            self.chunks.remove(&address);
            self.free.remove(&chunk.key(address));
            for (at, end) in [(address, lo), (hi, end)] {
                if at < end {
                    self.add(
                        at,
                        Chunk {
                            bytes: end - at,
                            ..chunk
                        },
                    );
                }
            }
            self.reserved -= hi - lo;
            match range {
                Some(range) => pool.unmap(range, lo, hi - lo),
                None => pool.free(lo),
            }
        }
    }

    /// The range of which a chunk is a part; none if it is a part of a segment.
    fn range(&self, chunk: &Chunk) -> Option<Range> {
        let range = self.ranges.as_ref()?.get(&(chunk.stream, chunk.small))?;
        (range.address == chunk.segment).then_some(*range)
    }

    /// True if a chunk is its whole segment.
    fn whole(&self, address: u64, chunk: &Chunk) -> bool {
        let next = self.chunks.range(address + 1..).next();
        address == chunk.segment && next.is_none_or(|(_, next)| next.segment != chunk.segment)
    }

    /// Gets memory for a request: the address of a free chunk that is large enough.
    fn grow(
        &mut self,
        bytes: u64,
        stream: u64,
        small: bool,
        pool: &mut dyn Pool,
    ) -> Result<u64, AllocError> {
        let grown = self.more(bytes, stream, small, pool).or_else(|_| {
            self.trim(pool);
            self.more(bytes, stream, small, pool)
        });
        grown.map_err(|source| AllocError::NoMemory {
            bytes,
            live: self.live,
            reserved: self.reserved,
            source,
        })
    }

    fn more(
        &mut self,
        bytes: u64,
        stream: u64,
        small: bool,
        pool: &mut dyn Pool,
    ) -> Result<u64, PoolError> {
        if let Some(ranges) = &mut self.ranges {
            let step = if small { SMALL_STEP } else { LARGE_STEP };
            let range = match ranges.entry((stream, small)) {
                Entry::Occupied(range) => Ok(*range.get()),
                Entry::Vacant(empty) => pool.reserve(step).map(|range| *empty.insert(range)),
            };
            // A stream without a range goes on with segments.
            if let Ok(range) = range {
                return self.fill(bytes, stream, small, range, pool);
            }
        }
        let size = match bytes {
            _ if small => SMALL_STEP,
            _ if bytes < OWN => LARGE_STEP,
            _ => bytes.next_multiple_of(SMALL_STEP),
        };
        self.native += 1;
        let address = pool.allocate(size)?;
        Ok(self.gain(address, size, address, stream, small))
    }

    /// Maps memory until a free chunk of a range is large enough for a request.
    fn fill(
        &mut self,
        bytes: u64,
        stream: u64,
        small: bool,
        range: Range,
        pool: &mut dyn Pool,
    ) -> Result<u64, PoolError> {
        let holes = self
            .holes(bytes, range)
            .ok_or(PoolError::RangeFull { bytes })?;
        let mut grown = range.address;
        for (address, bytes) in holes {
            self.native += 1;
            pool.map(range, address, bytes)?;
            grown = self.gain(address, bytes, range.address, stream, small);
        }
        Ok(grown)
    }

    /// The parts of a range where memory must be mapped for a request: as few bytes as possible,
    /// and of several such places the lowest. None if the range has no room.
    fn holes(&self, bytes: u64, range: Range) -> Option<Vec<(u64, u64)>> {
        let chunks = self
            .chunks
            .range(range.address..range.address + range.bytes);
        // It begins at a free chunk, or behind a used one.
        let starts = chunks.map(|(&at, chunk)| if chunk.free { at } else { at + chunk.bytes });
        [range.address]
            .into_iter()
            .chain(starts)
            .filter_map(|start| {
                let holes = self.holes_from(start, bytes, range)?;
                let new: u64 = holes.iter().map(|(_, bytes)| bytes).sum();
                Some((new, start, holes))
            })
            .min()
            .map(|(_, _, holes)| holes)
    }

    /// The same for a request at `start`.
    fn holes_from(&self, start: u64, bytes: u64, range: Range) -> Option<Vec<(u64, u64)>> {
        let end = range.address + range.bytes;
        let mut chunks = self.chunks.range(start..end).peekable();
        let (mut at, mut there, mut holes) = (start, 0, vec![]);
        while there < bytes {
            let next = chunks.peek().map_or(end, |(at, _)| **at);
            let more = if at < next {
                let more = (bytes - there).next_multiple_of(range.step).min(next - at);
                holes.push((at, more));
                more
            } else {
                let (_, chunk) = chunks.next().filter(|(_, chunk)| chunk.free)?;
                chunk.bytes
            };
            at += more;
            there += more;
        }
        Some(holes)
    }

    /// New memory: the address of the free chunk that it is a part of.
    fn gain(&mut self, address: u64, bytes: u64, segment: u64, stream: u64, small: bool) -> u64 {
        self.reserved += bytes;
        self.peak_reserved = self.peak_reserved.max(self.reserved);
        let chunk = Chunk {
            bytes,
            segment,
            stream,
            small,
            free: false,
        };
        self.chunks.insert(address, chunk);
        self.release(address)
    }

    fn add(&mut self, address: u64, chunk: Chunk) {
        self.free.insert(chunk.key(address));
        self.chunks.insert(address, chunk);
    }

    /// Frees blocks that other streams have finished with.
    fn settle(&mut self, pool: &mut dyn Pool) {
        for _ in 0..self.waiting.len() {
            let (address, events) = self.waiting.pop_front().expect("as many as were counted");
            if events.iter().all(|event| pool.done(*event)) {
                events.into_iter().for_each(|event| pool.forget(event));
                self.release(address);
            } else {
                self.waiting.push_back((address, events));
            }
        }
    }

    /// Marks a chunk as free and joins it with free neighbours of its segment or range; the address
    /// of the result.
    fn release(&mut self, mut address: u64) -> u64 {
        let mut chunk = self
            .chunks
            .remove(&address)
            .expect("a freed chunk should be listed");
        chunk.free = true;
        let joins = |other: &Chunk| other.free && other.segment == chunk.segment;
        let next = address + chunk.bytes;
        let after = self.chunks.get(&next).copied().filter(joins);
        let before = self.chunks.range(..address).next_back();
        let before = before.map(|(&at, &before)| (at, before));
        let before = before.filter(|(at, before)| joins(before) && at + before.bytes == address);
        if let Some(after) = after {
            self.chunks.remove(&next);
            self.free.remove(&after.key(next));
            chunk.bytes += after.bytes;
        }
        if let Some((previous, before)) = before {
            self.free.remove(&before.key(previous));
            chunk.bytes += before.bytes;
            address = previous;
        }
        self.add(address, chunk);
        address
    }
}
