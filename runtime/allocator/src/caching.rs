//! Memory for requests without a plan: freed blocks are kept and cut up for later requests of the
//! same stream.
//!
//! The policy and the sizes are those of PyTorch's CUDACachingAllocator: blocks of a multiple of
//! 512 bytes, best fit among the free blocks of a stream; requests up to 1 MiB share segments of 2
//! MiB, those up to 10 MiB segments of 20 MiB, larger ones have a segment of their own in steps of
//! 2 MiB.

use crate::error::AllocError;
use crate::pool::{Event, Pool};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

const MIB: u64 = 1 << 20;
/// Every block's size is a multiple of this.
const UNIT: u64 = 512;
/// The largest request that shares a small segment.
const SMALL: u64 = MIB;

#[derive(Clone, Copy)]
struct Chunk {
    bytes: u64,
    /// Address of the driver's block from which it was cut.
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
            waiting: VecDeque::new(),
            reserved: 0,
            peak_reserved: 0,
            live: 0,
            peak_live: 0,
            native: 0,
        }
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
            None => self.segment(bytes, stream, small, pool)?,
        };
        let chunk = self
            .chunks
            .get_mut(&address)
            .expect("a free chunk should be listed");
        self.free.remove(&chunk.key(address));
        chunk.free = false;
        let rest = chunk.bytes - bytes;
        // The rest of a large block is split off only if a large request can use it.
        if (if small { UNIT } else { SMALL + 1 }) <= rest {
            chunk.bytes = bytes;
            let left = Chunk {
                bytes: rest,
                free: true,
                ..*chunk
            };
            self.chunks.insert(address + bytes, left);
            self.free.insert(left.key(address + bytes));
        }
        self.live += self.chunks[&address].bytes;
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

    /// Gives unused segments back.
    pub(crate) fn trim(&mut self, pool: &mut dyn Pool) {
        if !self.waiting.is_empty() {
            pool.synchronize();
            self.settle(pool);
        }
        let whole = |(address, chunk): (&u64, &Chunk)| {
            let next = self.chunks.range(address + 1..).next();
            let alone = next.is_none_or(|(_, next)| next.segment != chunk.segment);
            (chunk.free && *address == chunk.segment && alone).then_some(*address)
        };
        for address in self.chunks.iter().filter_map(whole).collect::<Vec<_>>() {
            let chunk = self
                .chunks
                .remove(&address)
                .expect("the chunk was just seen");
            self.free.remove(&chunk.key(address));
            self.reserved -= chunk.bytes;
            pool.free(address);
        }
    }

    fn segment(
        &mut self,
        bytes: u64,
        stream: u64,
        small: bool,
        pool: &mut dyn Pool,
    ) -> Result<u64, AllocError> {
        let size = match bytes {
            _ if small => 2 * MIB,
            _ if bytes < 10 * MIB => 20 * MIB,
            _ => bytes.next_multiple_of(2 * MIB),
        };
        self.native += 1;
        let address = pool.allocate(size).or_else(|_| {
            self.trim(pool);
            self.native += 1;
            pool.allocate(size)
        });
        let address = address.map_err(|source| AllocError::NoMemory {
            bytes,
            live: self.live,
            reserved: self.reserved,
            source,
        })?;
        self.reserved += size;
        self.peak_reserved = self.peak_reserved.max(self.reserved);
        let chunk = Chunk {
            bytes: size,
            segment: address,
            stream,
            small,
            free: true,
        };
        self.chunks.insert(address, chunk);
        self.free.insert(chunk.key(address));
        Ok(address)
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

    /// Marks a chunk as free and joins it with free neighbours of its segment.
    fn release(&mut self, mut address: u64) {
        let mut chunk = self
            .chunks
            .remove(&address)
            .expect("a freed chunk should be listed");
        chunk.free = true;
        if let Some((&next, &after)) = self.chunks.range(address + 1..).next()
            && after.free
            && after.segment == chunk.segment
        {
            self.chunks.remove(&next);
            self.free.remove(&after.key(next));
            chunk.bytes += after.bytes;
        }
        if let Some((&previous, &before)) = self.chunks.range(..address).next_back()
            && before.free
            && before.segment == chunk.segment
        {
            self.free.remove(&before.key(previous));
            chunk.bytes += before.bytes;
            address = previous;
        }
        self.free.insert(chunk.key(address));
        self.chunks.insert(address, chunk);
    }
}
