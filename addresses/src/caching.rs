//! Simulates what a caching allocator would reserve for a trace, by PyTorch's rules
//! (`c10/cuda/CUDACachingAllocator.cpp`, 2.x, default settings).
//!
//! Memory comes from the system in segments and is never returned. Sizes are rounded up to 512
//! bytes. Requests of at most 1 MiB are served from small segments of 2 MiB. Other requests are
//! served from large segments: of 20 MiB for requests below 10 MiB, otherwise of the request's size
//! rounded up to 2 MiB. A request takes the smallest free block of its stream and kind that is
//! large enough; of several, the one with the lowest address. The rest of the block is split off if
//! it has at least 512 bytes in a small segment, or more than 1 MiB in a large one. A freed block
//! is joined with its free neighbours.
//!
//! With *expandable segments* each stream has one growing segment for each kind. It takes memory in
//! steps of 2 MiB and 20 MiB. Rests of at least 512 bytes are also split off large blocks.
//!
//! *GMLake* (C. Guo et al., ASPLOS 2024; `GMLake/src/CUDACachingAllocator.cpp` of
//! github.com/antgroup/glake) gives pages of 2 MiB several addresses. If no free block is large
//! enough for a request of at least a given limit, the largest free blocks are stitched together.
//! Large sizes are rounded up to pages. When all parts of a stitched block are free, it may serve
//! later requests of at least a tenth of its size.
//!
//! A block that another stream has used (`record_stream`) is not available when the program frees
//! it, but when the device has done the work. In a trace, it lives until then, and has a gap from
//! the free to its end.
//!
//! [`simulate_within`] has a device of limited memory. If it refuses a segment, PyTorch waits for
//! the device, returns all segments without a used block to the system, and tries again. With
//! expandable segments it returns all free steps. If that does not suffice, the program ends: out
//! of memory.
//!
//! [`replay`] compares a recorded history with the rules, and counts requests that get their real
//! address.

use placement::trace::Trace;
use std::collections::{BTreeMap, BTreeSet};

/// Sizes are rounded up to a multiple of this, and no block is smaller.
const ROUND: u64 = 512;
/// The largest request that is small.
const SMALL: u64 = 1 << 20;
/// A small segment, and the step of a small expandable one.
const SMALL_SEGMENT: u64 = 2 << 20;
/// A large segment for requests below [`OWN_SEGMENT`], and the step of a large expandable one.
const LARGE_SEGMENT: u64 = 20 << 20;
/// Requests of at least this size get a segment of their own size.
const OWN_SEGMENT: u64 = 10 << 20;
/// A page that can be stitched.
const PAGE: u64 = 2 << 20;
/// A stitched block serves only requests of at least its size divided by this: GMLake's
/// `reuseLimit`.
const REUSE: u64 = 10;
/// A segment of a request's own size is rounded up to a multiple of this.
const ROUND_LARGE: u64 = 2 << 20;

/// How memory comes from the system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Segments {
    /// Separate segments of fixed size.
    Fixed,
    /// In one growing segment for each stream and kind.
    Expandable,
    /// Separate segments. Free blocks are stitched together for requests of at least this number of
    /// bytes: GMLake's `fragLimit`, 512 MiB by default.
    Stitched(u64),
}

/// The memory that an allocator reserved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Held {
    /// The most bytes from the system.
    pub reserved_bytes: u64,
    /// The number of segments at the end.
    pub segments: usize,
}

/// A segment as a snapshot describes it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Segment {
    /// Its first byte.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
    /// The stream it serves.
    pub stream: u32,
    /// True if it serves small requests.
    pub small: bool,
    /// Blocks in use at the end of the history: address and size, as the allocator split them.
    pub used: Vec<(u64, u64)>,
}

/// An event of a history, with its address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// A request was served.
    Alloc {
        /// Its address.
        address: u64,
        /// The requested bytes.
        bytes: u64,
        /// The stream.
        stream: u32,
    },
    /// A block was freed.
    Free {
        /// Its first byte.
        address: u64,
        /// The requested bytes.
        bytes: u64,
    },
    /// A segment came from the system.
    Reserve {
        /// Its first byte.
        address: u64,
        /// Its size.
        bytes: u64,
        /// The stream it serves.
        stream: u32,
    },
    /// A segment went back to the system.
    Release {
        /// Its first byte.
        address: u64,
        /// Its size.
        bytes: u64,
        /// The stream it served.
        stream: u32,
    },
}

/// A recorded history: its events, and its segments at the end.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct History {
    /// Segments at the end.
    pub segments: Vec<Segment>,
    /// In order of time.
    pub events: Vec<Event>,
}

/// How far a history follows the rules.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Agreement {
    /// Requests of the history.
    pub requests: usize,
    /// Requests that get the same address by the rules.
    pub same: usize,
}

#[derive(Clone, Copy)]
struct Block {
    bytes: u64,
    used: bool,
    /// The first byte of its segment: blocks of different segments are not joined.
    segment: u64,
}

/// The kind of requests that a segment serves: the stream, and whether they are small.
type Kind = (u32, bool);

struct Allocator {
    rule: Segments,
    /// All blocks by address. The blocks of a segment have no gaps between them.
    blocks: BTreeMap<u64, Block>,
    /// Free blocks by kind, size and address.
    free: BTreeSet<(Kind, u64, u64)>,
    /// Kinds of segments, by their first byte.
    segments: BTreeMap<u64, Kind>,
    /// Stitched blocks by size: addresses and sizes of their parts.
    stitched: BTreeMap<(u64, usize), Vec<(u64, u64)>>,
    /// Addresses of an expandable segment below its end that have no memory, and their sizes.
    holes: BTreeMap<u64, u64>,
    /// Now, not at most.
    held: Held,
}

impl Allocator {
    fn new(rule: Segments) -> Allocator {
        Allocator {
            rule,
            blocks: BTreeMap::new(),
            free: BTreeSet::new(),
            segments: BTreeMap::new(),
            stitched: BTreeMap::new(),
            holes: BTreeMap::new(),
            held: Held::default(),
        }
    }

    /// Adds a free segment, which is joined to no other.
    fn add_segment(&mut self, address: u64, bytes: u64, kind: Kind) {
        self.segments.insert(address, kind);
        self.blocks.insert(
            address,
            Block {
                bytes,
                used: false,
                segment: address,
            },
        );
        self.free.insert((kind, bytes, address));
        self.held.segments += 1;
        self.held.reserved_bytes = self.held.reserved_bytes.saturating_add(bytes);
    }

    /// The free block that a request of `bytes` (already rounded) would take.
    fn find(&self, bytes: u64, kind: Kind) -> Option<u64> {
        let mut fitting = self
            .free
            .range((kind, bytes, 0)..=(kind, u64::MAX, u64::MAX))
            .map(|&(_, _, address)| address);
        let mut best = fitting.next()?;
        if self.rule != Segments::Expandable {
            return Some(best);
        }
        // A block counts with the bytes without memory that follow it.
        for next in fitting {
            if self.extent(next) >= self.extent(best) {
                break;
            }
            best = next;
        }
        Some(best)
    }

    /// The size that a free block of an expandable segment can grow to.
    fn extent(&self, address: u64) -> u64 {
        let bytes = self.blocks[&address].bytes;
        match self.holes.get(&(address + bytes)) {
            Some(hole) => bytes + hole,
            None if address + bytes == self.end() => u64::MAX,
            None => bytes,
        }
    }

    /// The memory that a request of `bytes` (already rounded) needs from the system: addresses and
    /// sizes.
    fn growth(&self, bytes: u64, kind: Kind) -> Vec<(u64, u64)> {
        let small = kind.1;
        if self.rule == Segments::Expandable {
            return self.expansion(bytes, step(kind));
        }
        vec![(self.end(), segment_of(bytes, small))]
    }

    /// Reserves memory that [`Allocator::growth`] found. Returns the free block that contains it.
    fn reserve(&mut self, growth: &[(u64, u64)], kind: Kind) -> u64 {
        let mut found = 0;
        for &(address, bytes) in growth {
            if self.rule != Segments::Expandable {
                self.add_segment(address, bytes, kind);
                found = address;
                continue;
            }
            // Invariant: the one segment begins at 0.
            if self.segments.insert(0, kind).is_none() {
                self.held.segments += 1;
            }
            self.held.reserved_bytes += bytes;
            if let Some(hole) = self.holes.remove(&address).filter(|&hole| hole > bytes) {
                self.holes.insert(address + bytes, hole - bytes);
            }
            let block = Block {
                bytes,
                used: true,
                segment: 0,
            };
            self.blocks.insert(address, block);
            found = self.release(address);
        }
        found
    }

    /// Memory for an expandable segment, in steps: at the lowest addresses without memory where,
    /// with the free blocks beside them, `bytes` fit.
    fn expansion(&self, bytes: u64, step: u64) -> Vec<(u64, u64)> {
        let end = self.end();
        for &hole in self.holes.keys().chain([&end]) {
            let below = self.blocks.range(..hole).next_back();
            let below = below.filter(|(at, block)| !block.used && *at + block.bytes == hole);
            let mut at = below.map_or(hole, |(&at, _)| at);
            let (mut there, mut growth) = (0, vec![]);
            while there < bytes {
                let more = match (self.blocks.get(&at), self.holes.get(&at)) {
                    (Some(block), _) if block.used => break,
                    (Some(block), _) => block.bytes,
                    (None, hole) => {
                        let needed = (bytes - there).next_multiple_of(step);
                        let more = hole.map_or(needed, |&hole| hole.min(needed));
                        growth.push((at, more));
                        more
                    }
                };
                at += more;
                there += more;
            }
            if there >= bytes {
                return growth;
            }
        }
        unreachable!("an expandable segment should have room at its end")
    }

    /// Returns memory that no block uses to the system: whole segments, whose sizes are the result,
    /// or steps of an expandable one.
    fn trim(&mut self) -> Vec<u64> {
        let mut segments = vec![];
        let free: Vec<(Kind, u64, u64)> = self.free.iter().copied().collect();
        for (kind, bytes, address) in free {
            let segment = self.blocks[&address].segment;
            let is_outside = |other: Option<(&u64, &Block)>| {
                other.is_none_or(|(_, block)| block.segment != segment)
            };
            if self.rule == Segments::Expandable {
                self.unmap(kind, bytes, address);
            } else if is_outside(self.blocks.range(..address).next_back())
                && is_outside(self.blocks.range(address + 1..).next())
            {
                self.blocks.remove(&address);
                self.free.remove(&(kind, bytes, address));
                self.segments.remove(&segment);
                self.held.segments -= 1;
                self.held.reserved_bytes -= bytes;
                segments.push(bytes);
            }
        }
        segments
    }

    /// Returns the whole steps of a free block of an expandable segment.
    fn unmap(&mut self, kind: Kind, bytes: u64, address: u64) {
        let step = step(kind);
        let end = address + bytes;
        let (lo, hi) = (address.next_multiple_of(step), end / step * step);
        if lo >= hi {
            return;
        }
        let block = self.blocks[&address];
        self.blocks.remove(&address);
        self.free.remove(&(kind, bytes, address));
        for (from, to) in [(address, lo), (hi, end)] {
            if from < to {
                let bytes = to - from;
                self.blocks.insert(from, Block { bytes, ..block });
                self.free.insert((kind, bytes, from));
            }
        }
        self.held.reserved_bytes -= hi - lo;
        let (mut from, mut to) = (lo, hi);
        if let Some((&below, &size)) = self.holes.range(..lo).next_back()
            && below + size == lo
        {
            from = below;
        }
        if let Some(size) = self.holes.remove(&hi) {
            to += size;
        }
        self.holes.insert(from, to - from);
        // Above the last block there is no end of addresses.
        let last = self.end();
        self.holes.retain(|&at, _| at < last);
    }

    /// One past the last byte.
    fn end(&self) -> u64 {
        self.blocks
            .last_key_value()
            .map_or(0, |(address, block)| address + block.bytes)
    }

    /// Uses the free block at `address` for a request of `bytes` (already rounded), and splits off
    /// the rest.
    fn take(&mut self, address: u64, bytes: u64) {
        let block = self.blocks[&address];
        let kind = self.segments[&block.segment];
        self.free.remove(&(kind, block.bytes, address));
        let rest = block.bytes - bytes;
        let splits = match self.rule {
            _ if kind.1 => ROUND <= rest,
            Segments::Fixed => SMALL < rest,
            Segments::Expandable => ROUND <= rest,
            Segments::Stitched(_) => PAGE <= rest,
        };
        let taken = if splits { bytes } else { block.bytes };
        self.blocks.insert(
            address,
            Block {
                bytes: taken,
                used: true,
                ..block
            },
        );
        if splits {
            self.blocks.insert(
                address + bytes,
                Block {
                    bytes: rest,
                    used: false,
                    ..block
                },
            );
            self.free.insert((kind, rest, address + bytes));
        }
    }

    /// Frees the block at `address`, and joins it with its neighbours. Returns the start of the
    /// free block.
    fn release(&mut self, address: u64) -> u64 {
        let block = self.blocks[&address];
        let kind = self.segments[&block.segment];
        let (mut lo, mut hi) = (address, address + block.bytes);
        let joins = |other: &Block| !other.used && other.segment == block.segment;
        if let Some((&at, other)) = self
            .blocks
            .range(..address)
            .next_back()
            .filter(|(at, other)| joins(other) && *at + other.bytes == address)
        {
            lo = at;
            self.free.remove(&(kind, other.bytes, at));
        }
        if let Some(other) = self.blocks.get(&hi).copied().filter(joins) {
            self.free.remove(&(kind, other.bytes, hi));
            self.blocks.remove(&hi);
            hi += other.bytes;
        }
        self.blocks.remove(&address);
        self.blocks.insert(
            lo,
            Block {
                bytes: hi - lo,
                used: false,
                segment: block.segment,
            },
        );
        self.free.insert((kind, hi - lo, lo));
        lo
    }

    /// Serves a request of `bytes` (already rounded) from free memory. Returns its address, or the
    /// addresses of its parts if it was stitched. None if no free memory suffices.
    fn alloc(&mut self, bytes: u64, kind: Kind) -> Option<Vec<u64>> {
        if let Some(address) = self.find(bytes, kind) {
            self.take(address, bytes);
            return Some(vec![address]);
        }
        let parts = self.stitch(bytes, kind)?;
        parts
            .iter()
            .for_each(|&(address, bytes)| self.carve(address, bytes));
        Some(parts.into_iter().map(|(address, _)| address).collect())
    }

    /// Free parts with `bytes` in total, if no single free block is large enough: blocks that were
    /// stitched before if possible, otherwise the largest ones.
    fn stitch(&mut self, bytes: u64, kind: Kind) -> Option<Vec<(u64, u64)>> {
        let Segments::Stitched(limit) = self.rule else {
            return None;
        };
        if kind.1 {
            return None;
        }
        let fitting = (bytes, 0)..=(bytes.saturating_mul(REUSE), usize::MAX);
        let free = |&&(address, bytes): &&(u64, u64)| {
            let there = self.blocks.range(..=address).next_back();
            there.is_some_and(|(&at, block)| !block.used && address + bytes <= at + block.bytes)
        };
        let known = self
            .stitched
            .range(fitting)
            .map(|(_, parts)| parts)
            .find(|parts| parts.iter().all(|part| free(&part)));
        let largest = || {
            let all = self.free.range((kind, 0, 0)..=(kind, u64::MAX, u64::MAX));
            all.rev()
                .map(|&(_, bytes, address)| (address, bytes))
                .collect()
        };
        let parts: Vec<(u64, u64)> = match known {
            Some(parts) => parts.clone(),
            None if bytes < limit => return None,
            None => largest(),
        };
        let mut missing = bytes;
        let mut taken = vec![];
        for (address, size) in parts {
            let part = size.min(missing);
            missing -= part;
            taken.push((address, part));
            if missing == 0 {
                self.stitched
                    .insert((bytes, self.stitched.len()), taken.clone());
                return Some(taken);
            }
        }
        None
    }

    /// Takes bytes within a free block.
    fn carve(&mut self, address: u64, bytes: u64) {
        let (&at, &block) = self
            .blocks
            .range(..=address)
            .next_back()
            .expect("a part should be of a block");
        if at < address {
            let kind = self.segments[&block.segment];
            self.free.remove(&(kind, block.bytes, at));
            for (lo, hi) in [(at, address), (address, at + block.bytes)] {
                self.blocks.insert(
                    lo,
                    Block {
                        bytes: hi - lo,
                        ..block
                    },
                );
                self.free.insert((kind, hi - lo, lo));
            }
        }
        self.take(address, bytes);
    }
}

fn rounded(bytes: u64) -> u64 {
    bytes.max(1).next_multiple_of(ROUND)
}

/// Bytes of the segment that comes from the system for a request of `bytes` (already rounded).
fn segment_of(bytes: u64, small: bool) -> u64 {
    match bytes {
        _ if small => SMALL_SEGMENT,
        bytes if bytes < OWN_SEGMENT => LARGE_SEGMENT,
        bytes => bytes.next_multiple_of(ROUND_LARGE),
    }
}

/// The allocator (separate segments) on a system with a limit, one request at a time. Sizes must
/// add up to less than 2^62 bytes.
///
/// A request that fits neither in a cached block nor in the system's memory is refused. PyTorch
/// then waits for the device, returns its cached segments ([`Limited::release_cached`]) and tries
/// once more: a *retry*. The caller does this, because the caller has the clocks.
pub struct Limited {
    allocator: Allocator,
    limit: u64,
}

/// A request that was served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Served {
    /// The first byte.
    pub address: u64,
    /// Bytes that came from the system for it; 0 if a cached block was large enough.
    pub reserved_bytes: u64,
}

impl Limited {
    /// An empty allocator on a system with `limit` bytes.
    pub fn new(limit: u64) -> Limited {
        Limited {
            allocator: Allocator::new(Segments::Fixed),
            limit,
        }
    }

    /// Serves a request, or refuses it: no cached block of its stream is large enough, and a new
    /// segment would pass the limit.
    pub fn alloc(&mut self, bytes: u64, stream: u32) -> Option<Served> {
        let bytes = rounded(bytes);
        let kind = (stream, bytes <= SMALL);
        if let Some(address) = self.allocator.find(bytes, kind) {
            self.allocator.take(address, bytes);
            return Some(Served {
                address,
                reserved_bytes: 0,
            });
        }
        let growth = self.allocator.growth(bytes, kind);
        let segment = growth.iter().map(|&(_, bytes)| bytes).sum();
        if self.reserved_bytes() + segment > self.limit {
            return None;
        }
        let address = self.allocator.reserve(&growth, kind);
        self.allocator.take(address, bytes);
        Some(Served {
            address,
            reserved_bytes: segment,
        })
    }

    /// Frees the block at `address`, which [`Limited::alloc`] returned.
    pub fn free(&mut self, address: u64) {
        self.allocator.release(address);
    }

    /// Returns all segments without a used block to the system. Returns their sizes.
    pub fn release_cached(&mut self) -> Vec<u64> {
        self.allocator.trim()
    }

    /// Bytes from the system.
    pub fn reserved_bytes(&self) -> u64 {
        self.allocator.held.reserved_bytes
    }
}

/// The step in which an expandable segment grows.
fn step(kind: Kind) -> u64 {
    if kind.1 { SMALL_SEGMENT } else { LARGE_SEGMENT }
}

/// What the allocator reserves for the trace's requests, starting empty. Sizes must add up to less
/// than 2^62 bytes; readers of traces check this.
pub fn simulate(trace: &Trace, rule: Segments) -> Held {
    simulate_within(trace, rule, u64::MAX).expect("memory without a limit should suffice")
}

/// The same on a device with `capacity` bytes. None if the program would end: out of memory.
pub fn simulate_within(trace: &Trace, rule: Segments, capacity: u64) -> Option<Held> {
    simulate_seen(trace, rule, capacity, &mut |_, _| ())
}

/// The same. `see` is called for each request that needs memory from the system, with its block's
/// position in the trace and the bytes.
pub fn simulate_seen(
    trace: &Trace,
    rule: Segments,
    capacity: u64,
    see: &mut dyn FnMut(usize, u64),
) -> Option<Held> {
    let mut device = Device {
        trace,
        rule,
        capacity,
        allocators: BTreeMap::new(),
        places: vec![vec![]; trace.blocks.len()],
        freed: BTreeSet::new(),
    };
    let mut most = 0;
    for (tick, comes, block) in happenings(trace) {
        if !comes {
            device.release(block);
            continue;
        }
        let more = device.alloc(block, tick)?;
        if more > 0 {
            see(block, more);
        }
        most = most.max(device.reserved());
    }
    let segments = device.allocators.values();
    Some(Held {
        reserved_bytes: most,
        segments: segments.map(|allocator| allocator.held.segments).sum(),
    })
}

/// The requests and frees of a trace in order of time: the tick, true for a request, the block.
/// Frees come first.
fn happenings(trace: &Trace) -> Vec<(u64, bool, usize)> {
    let of = |(i, block): (usize, &placement::trace::Block)| {
        [(block.start, true, i), (block.end, false, i)]
    };
    let mut events: Vec<(u64, bool, usize)> = trace
        .blocks
        .iter()
        .enumerate()
        .filter(|(_, block)| block.bytes > 0)
        .flat_map(of)
        .collect();
    events.sort_unstable();
    events
}

/// The allocators of all kinds, which share nothing but the device's memory.
struct Device<'a> {
    trace: &'a Trace,
    rule: Segments,
    capacity: u64,
    allocators: BTreeMap<Kind, Allocator>,
    /// Addresses of the parts of each live block.
    places: Vec<Vec<u64>>,
    /// Live blocks whose bytes are not needed from a tick on: the program has freed them, and
    /// another stream may still use them.
    freed: BTreeSet<(u64, usize)>,
}

impl Device<'_> {
    fn kind(&self, block: usize) -> Kind {
        let block = &self.trace.blocks[block];
        (block.origin.stream, rounded(block.bytes) <= SMALL)
    }

    fn of(&mut self, kind: Kind) -> &mut Allocator {
        let rule = self.rule;
        self.allocators
            .entry(kind)
            .or_insert_with(|| Allocator::new(rule))
    }

    fn reserved(&self) -> u64 {
        let of = |allocator: &Allocator| allocator.held.reserved_bytes;
        self.allocators
            .values()
            .fold(0, |sum, allocator| u64::saturating_add(sum, of(allocator)))
    }

    /// Serves a block's request. Returns the bytes that came from the system for it. None if the
    /// device has too little memory.
    fn alloc(&mut self, block: usize, tick: u64) -> Option<u64> {
        let kind = self.kind(block);
        let of = &self.trace.blocks[block];
        let bytes = rounded(of.bytes);
        let pages = matches!(self.rule, Segments::Stitched(_)) && !kind.1;
        let bytes = if pages {
            bytes.next_multiple_of(PAGE)
        } else {
            bytes
        };
        if let Some(&(from, _)) = of.gaps.last().filter(|&&(_, to)| to == of.end) {
            self.freed.insert((from, block));
        }
        if let Some(places) = self.of(kind).alloc(bytes, kind) {
            self.places[block] = places;
            return Some(0);
        }
        let mut growth = self.of(kind).growth(bytes, kind);
        if !self.fits(&growth) {
            // The host waits for the device. Then no stream uses a block that the program freed.
            let freed: Vec<usize> = self.freed.range(..(tick, 0)).map(|&(_, i)| i).collect();
            freed.into_iter().for_each(|block| self.release(block));
            self.allocators.values_mut().for_each(|allocator| {
                allocator.trim();
            });
            // What was found before may have been returned.
            growth = self.of(kind).growth(bytes, kind);
            if !self.fits(&growth) {
                return None;
            }
        }
        let allocator = self.of(kind);
        let address = allocator.reserve(&growth, kind);
        allocator.take(address, bytes);
        self.places[block] = vec![address];
        Some(growth.iter().map(|&(_, bytes)| bytes).sum())
    }

    /// Frees a block, unless it is free already.
    fn release(&mut self, block: usize) {
        let places = std::mem::take(&mut self.places[block]);
        let allocator = self.of(self.kind(block));
        for address in places {
            allocator.release(address);
        }
        if let Some(&(from, _)) = self.trace.blocks[block].gaps.last() {
            self.freed.remove(&(from, block));
        }
    }

    fn fits(&self, growth: &[(u64, u64)]) -> bool {
        let more: u64 = growth.iter().map(|&(_, bytes)| bytes).sum();
        self.reserved().saturating_add(more) <= self.capacity
    }
}

/// Replays a history from its initial state, which is derived from its end. If the rules give a
/// request another address, this is counted, and the request gets its recorded address. So one
/// difference does not cause others. None if the history contradicts itself, as a history with
/// expandable segments does.
pub fn replay(history: &History) -> Option<Agreement> {
    let mut allocator = first_state(history)?;
    let mut agreement = Agreement::default();
    for &event in &history.events {
        match event {
            Event::Alloc {
                address,
                bytes,
                stream,
            } => {
                agreement.requests += 1;
                let bytes = rounded(bytes);
                let kind = (stream, bytes <= SMALL);
                if allocator.find(bytes, kind) == Some(address) {
                    agreement.same += 1;
                    allocator.take(address, bytes);
                    continue;
                }
                allocator.force(address, bytes)?;
            }
            Event::Free { address, .. } => {
                allocator.blocks.get(&address).filter(|block| block.used)?;
                allocator.release(address);
            }
            Event::Reserve {
                address,
                bytes,
                stream,
            } => {
                // A new segment serves the next request, because the recorder writes the segment
                // first.
                let clash = allocator
                    .blocks
                    .range(..address.checked_add(bytes)?)
                    .next_back();
                if clash.is_some_and(|(&at, block)| address < at + block.bytes) {
                    return None;
                }
                allocator.add_segment(address, bytes, (stream, bytes == SMALL_SEGMENT));
            }
            Event::Release { address, bytes, .. } => allocator.remove_segment(address, bytes)?,
        }
    }
    Some(agreement)
}

impl Allocator {
    /// Takes `bytes` at `address`, against the rules. None if they are not free.
    fn force(&mut self, address: u64, bytes: u64) -> Option<()> {
        let (&lo, &block) = self
            .blocks
            .range(..=address)
            .next_back()
            .filter(|(_, block)| !block.used)?;
        let kind = self.segments[&block.segment];
        let hi = lo + block.bytes;
        if hi < address.checked_add(bytes)? {
            return None;
        }
        self.free.remove(&(kind, block.bytes, lo));
        if lo < address {
            self.blocks.insert(
                lo,
                Block {
                    bytes: address - lo,
                    ..block
                },
            );
            self.free.insert((kind, address - lo, lo));
        }
        self.blocks.insert(
            address,
            Block {
                bytes: hi - address,
                ..block
            },
        );
        self.free.insert((kind, hi - address, address));
        self.take(address, bytes);
        Some(())
    }

    /// Removes a segment. None if it does not exist, or is not free.
    fn remove_segment(&mut self, address: u64, bytes: u64) -> Option<()> {
        self.blocks
            .get(&address)
            .filter(|block| !block.used && block.bytes == bytes)?;
        let kind = self.segments.remove(&address)?;
        self.blocks.remove(&address);
        self.free.remove(&(kind, bytes, address));
        Some(())
    }
}

/// The allocator at the start of a history: its end, with all events undone.
fn first_state(history: &History) -> Option<Allocator> {
    // Segments and used blocks, going back in time. For a freed block only the requested bytes are
    // known; bytes that were not split off it are added below.
    let mut segments: BTreeMap<u64, (u64, Kind)> = BTreeMap::new();
    let mut used: BTreeMap<u64, u64> = BTreeMap::new();
    for segment in &history.segments {
        segments.insert(
            segment.address,
            (segment.bytes, (segment.stream, segment.small)),
        );
        used.extend(segment.used.iter().copied());
    }
    for &event in history.events.iter().rev() {
        match event {
            Event::Alloc { address, .. } => used.remove(&address).map(|_| ())?,
            Event::Free { address, bytes } => match used.insert(address, rounded(bytes)) {
                None => {}
                Some(_) => return None,
            },
            Event::Reserve { address, bytes, .. } => {
                segments
                    .remove(&address)
                    .filter(|&(there, _)| there == bytes)?;
            }
            Event::Release {
                address,
                bytes,
                stream,
            } => match segments.insert(address, (bytes, (stream, bytes == SMALL_SEGMENT))) {
                None => {}
                Some(_) => return None,
            },
        }
    }
    let mut allocator = Allocator::new(Segments::Fixed);
    let mut before = 0;
    for (&address, &(bytes, kind)) in &segments {
        let end = address.checked_add(bytes)?;
        if address < before || bytes == 0 {
            return None;
        }
        before = end;
        let mut inside: Vec<(u64, u64)> = used
            .range(address..end)
            .map(|(&at, &size)| (at, size))
            .collect();
        for i in 0..inside.len() {
            let next = inside.get(i + 1).map_or(end, |next| next.0);
            let (at, size) = inside[i];
            let room = next.checked_sub(at.checked_add(size)?)?;
            // Free blocks of large segments have more than 1 MiB. A smaller rest belongs to the
            // block below.
            if !kind.1 && room <= SMALL {
                inside[i].1 += room;
            }
        }
        allocator.add_segment(address, bytes, kind);
        let mut at = address;
        for (next, size) in inside {
            // Cut the free rest in two at the block, and take it whole.
            let rest = allocator.blocks[&at];
            allocator.free.remove(&(kind, rest.bytes, at));
            allocator.blocks.remove(&at);
            if at < next {
                allocator.blocks.insert(
                    at,
                    Block {
                        bytes: next - at,
                        ..rest
                    },
                );
                allocator.free.insert((kind, next - at, at));
            }
            allocator.blocks.insert(
                next,
                Block {
                    bytes: size,
                    used: true,
                    ..rest
                },
            );
            at = next + size;
            if at < end {
                allocator.blocks.insert(
                    at,
                    Block {
                        bytes: end - at,
                        ..rest
                    },
                );
                allocator.free.insert((kind, end - at, at));
            }
        }
    }
    // Blocks outside of every segment.
    let inside = allocator.blocks.values().filter(|block| block.used).count();
    (inside == used.len()).then_some(allocator)
}

#[cfg(test)]
mod tests {
    use super::*;
    use placement::trace::{Block, Origin};
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn trace(items: &[(u64, u64, u64)]) -> Trace {
        let block = |&(start, end, bytes): &(u64, u64, u64)| Block {
            start,
            end,
            bytes,
            ..Block::default()
        };
        Trace {
            blocks: items.iter().map(block).collect(),
            ..Trace::default()
        }
    }

    fn reserved(items: &[(u64, u64, u64)], rule: Segments) -> u64 {
        simulate(&trace(items), rule).reserved_bytes
    }

    #[test]
    fn segments_are_as_large_as_the_rules_say() {
        for (bytes, segment) in [
            (1, 2 * MIB),
            (MIB, 2 * MIB),
            (MIB + 1, 20 * MIB),
            (10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB),
            (11 * MIB, 12 * MIB),
        ] {
            assert_eq!(
                reserved(&[(0, 1, bytes)], Segments::Fixed),
                segment,
                "{bytes}"
            );
        }
    }

    #[test]
    fn a_large_block_is_split_if_more_than_a_mebibyte_remains() {
        // 19 MiB of 20 leave 1 MiB, which is not split off. A second block of 1 MiB and one byte
        // does not fit there.
        assert_eq!(
            reserved(&[(0, 9, 9 * MIB), (1, 9, 9 * MIB)], Segments::Fixed),
            20 * MIB
        );
        assert_eq!(
            reserved(
                &[(0, 9, 9 * MIB), (1, 9, 9 * MIB), (2, 9, MIB + 1)],
                Segments::Fixed
            ),
            20 * MIB
        );
        assert_eq!(
            reserved(
                &[(0, 9, 9 * MIB), (1, 9, 9 * MIB + 512), (2, 9, 2 * MIB)],
                Segments::Fixed
            ),
            40 * MIB
        );
    }

    #[test]
    fn streams_share_nothing() {
        let mut two = trace(&[(0, 1, 4096), (1, 2, 4096)]);
        assert_eq!(
            simulate(&two, Segments::Fixed),
            Held {
                reserved_bytes: 2 * MIB,
                segments: 1
            }
        );
        two.blocks[1].origin = Origin {
            stream: 7,
            ..Origin::default()
        };
        assert_eq!(
            simulate(&two, Segments::Fixed),
            Held {
                reserved_bytes: 4 * MIB,
                segments: 2
            }
        );
    }

    /// 30 MiB cannot be served from 20 and 20 cached MiB. After both went back to the system, they
    /// can. A segment with a used block stays.
    #[test]
    fn cached_segments_go_back_at_the_limit() {
        let mut limited = Limited::new(50 * MIB);
        let first = limited.alloc(20 * MIB, 0).unwrap();
        let second = limited.alloc(20 * MIB, 1).unwrap();
        assert_eq!((first.address, second.reserved_bytes), (0, 20 * MIB));
        limited.free(first.address);
        limited.free(second.address);
        assert_eq!(limited.alloc(30 * MIB, 0), None);
        let small = limited.alloc(1, 0).unwrap();
        assert_eq!(limited.release_cached(), [20 * MIB; 2]);
        assert_eq!(limited.reserved_bytes(), 2 * MIB);
        let large = limited.alloc(30 * MIB, 0).unwrap();
        assert_ne!(large.address, small.address);
        // The same block again comes from the cache.
        limited.free(large.address);
        let again = limited.alloc(30 * MIB, 0).unwrap();
        assert_eq!((again.address, again.reserved_bytes), (large.address, 0));
    }

    #[test]
    fn expandable_segments_grow_by_what_is_missing() {
        // 30 MiB are allocated and freed. Then 35 MiB need 5 MiB more, in one step of 20.
        let items = [(0, 1, 30 * MIB), (1, 2, 35 * MIB)];
        assert_eq!(reserved(&items, Segments::Expandable), 40 * MIB);
        assert_eq!(reserved(&items, Segments::Fixed), 66 * MIB);
        assert_eq!(
            reserved(&[(0, 1, 30 * MIB), (1, 2, 45 * MIB)], Segments::Expandable),
            60 * MIB
        );
    }

    /// Segments of 30 and 40 MiB are free when 60 MiB are requested from a device of 80: they go
    /// back. A used block in one of them keeps it.
    #[test]
    fn a_full_device_gets_free_segments_back() {
        let items = [(0, 2, 30 * MIB), (1, 2, 40 * MIB), (3, 4, 60 * MIB)];
        let within = |items: &[(u64, u64, u64)], rule| {
            simulate_within(&trace(items), rule, 80 * MIB).map(|held| held.reserved_bytes)
        };
        assert_eq!(reserved(&items, Segments::Fixed), 130 * MIB);
        assert_eq!(within(&items, Segments::Fixed), Some(70 * MIB));
        assert_eq!(within(&items, Segments::Expandable), Some(80 * MIB));
        let pinned = [
            (0, 2, 30 * MIB),
            (1, 2, 40 * MIB),
            (3, 5, 2 * MIB),
            (4, 5, 60 * MIB),
        ];
        assert_eq!(within(&pinned, Segments::Fixed), None);
        // An expandable segment returns all steps but the one in use: 20 MiB at the start.
        assert_eq!(within(&pinned, Segments::Expandable), Some(80 * MIB));
        assert_eq!(within(&[(0, 1, 81 * MIB)], Segments::Expandable), None);
    }

    /// 40 MiB were freed at 1 and are held to 9. They are not available at 2, unless the device is
    /// full.
    #[test]
    fn a_full_device_waits_for_other_streams() {
        let mut held = trace(&[(0, 9, 40 * MIB), (2, 9, 40 * MIB)]);
        held.blocks[0].gaps = vec![(1, 9)];
        let within = |mib: u64| {
            let held = simulate_within(&held, Segments::Fixed, mib * MIB);
            held.map(|held| held.reserved_bytes / MIB)
        };
        assert_eq!(within(80), Some(80));
        assert_eq!(within(79), Some(40));
        assert_eq!(within(39), None);
    }

    /// 40 MiB between two used blocks go back when 50 are requested, and 20 of them come again.
    #[test]
    fn an_expandable_segment_has_holes() {
        let items = [
            (0, 9, 20 * MIB),
            (1, 3, 40 * MIB),
            (2, 9, 20 * MIB),
            (4, 9, 50 * MIB),
            (5, 9, 20 * MIB),
        ];
        let within = |mib: u64| {
            let held = simulate_within(&trace(&items), Segments::Expandable, mib * MIB);
            held.map(|held| held.reserved_bytes / MIB)
        };
        assert_eq!(within(140), Some(140));
        assert_eq!(within(139), Some(120));
        assert_eq!(within(120), Some(120));
        assert_eq!(within(119), None);
    }

    /// 10 MiB between two blocks of 12 MiB stay; then 24 MiB are requested while the two are free.
    #[test]
    fn free_blocks_are_stitched() {
        let items = [
            (0, 9, 12 * MIB),
            (1, 20, 10 * MIB),
            (2, 9, 12 * MIB),
            (10, 20, 24 * MIB),
        ];
        assert_eq!(reserved(&items, Segments::Fixed), 58 * MIB);
        assert_eq!(reserved(&items, Segments::Stitched(24 * MIB)), 34 * MIB);
        assert_eq!(reserved(&items, Segments::Stitched(25 * MIB)), 58 * MIB);
        // A stitched block also serves requests below the limit, and its last page stays available.
        let again = [
            &items[..3],
            &[(10, 11, 24 * MIB), (12, 20, 21 * MIB), (13, 20, MIB + 1)],
        ]
        .concat();
        assert_eq!(reserved(&again, Segments::Stitched(24 * MIB)), 34 * MIB);
    }

    #[test]
    fn a_history_is_followed_back_and_forth() {
        // One segment of 20 MiB: a block of 4 MiB was freed, and a block of 2 MiB took its place.
        let at = 1 << 30;
        let segment = |used| Segment {
            address: at,
            bytes: 20 * MIB,
            stream: 0,
            small: false,
            used,
        };
        let alloc = |address, bytes| Event::Alloc {
            address,
            bytes,
            stream: 0,
        };
        let free = |address, bytes| Event::Free { address, bytes };
        let events = vec![free(at, 4 * MIB), alloc(at, 2 * MIB)];
        let history = History {
            segments: vec![segment(vec![(at, 2 * MIB)])],
            events: events.clone(),
        };
        assert_eq!(
            replay(&history),
            Some(Agreement {
                requests: 1,
                same: 1
            })
        );
        // The same request elsewhere is against the rules.
        let there = at + 4 * MIB;
        let events = vec![
            free(at, 4 * MIB),
            alloc(there, 2 * MIB),
            free(there, 2 * MIB),
            alloc(at, 2 * MIB),
        ];
        let history = History {
            segments: vec![segment(vec![(at, 2 * MIB)])],
            events,
        };
        assert_eq!(
            replay(&history),
            Some(Agreement {
                requests: 2,
                same: 1
            })
        );
        // A free block cannot be freed.
        let history = History {
            segments: vec![segment(vec![])],
            events: vec![alloc(at, 2 * MIB)],
        };
        assert_eq!(replay(&history), None);
    }

    proptest! {
        /// Never less than what is alive; free and used blocks tile the segments.
        #[test]
        fn holds_what_is_alive(
            items in prop::collection::vec((0u64..40, 1u64..20, 1u64..30_000_000, 0u32..2), 1..60),
        ) {
            let block = |&(start, span, bytes, stream): &(u64, u64, u64, u32)| Block {
                start,
                end: start + span,
                bytes,
                origin: Origin { stream, ..Origin::default() },
                ..Block::default()
            };
            let trace = Trace { blocks: items.iter().map(block).collect(), ..Trace::default() };
            let live = placement::lower_bound(&trace, ROUND);
            for rule in [Segments::Fixed, Segments::Expandable, Segments::Stitched(0),
                Segments::Stitched(30 << 20)] {
                let held = simulate(&trace, rule);
                prop_assert!(live <= held.reserved_bytes);
                // A device with as much memory changes nothing. With a little less, free memory
                // goes back to it, also to other streams, or the program ends.
                let enough = simulate_within(&trace, rule, held.reserved_bytes);
                prop_assert_eq!(enough, Some(held));
                let less = simulate_within(&trace, rule, held.reserved_bytes - 1);
                let at_once = placement::lower_bound(&trace.one_stream(), ROUND);
                let between = at_once..held.reserved_bytes;
                prop_assert!(less.is_none_or(|less| between.contains(&less.reserved_bytes)));
            }
        }
    }
}
