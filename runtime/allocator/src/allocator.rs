//! The allocator: planned places for planned requests, the plan's idle bytes for dynamic ones and
//! for those whose place is taken, a cache for the rest.
//!
//! **Invariant:** no two live blocks share a byte, for any requests and frees. The plan is proved
//! when it is read: blocks that are alive as planned are disjoint. So a planned place is free
//! unless a block lies there that is not alive as planned: a block that should have been freed, or
//! one that is elsewhere than planned. These few blocks are in `strangers`. A planned request looks
//! only there, so it takes constant time. If its place is taken, it gets bytes that the plan leaves
//! idle for its life, or else bytes of the cache, and this is counted.
//!
//! **Streams:** a block belongs to the stream of its request. Its bytes may go to another stream
//! only behind an event. If blocks of several streams share bytes in the plan, or if
//! `record_stream` was called, `residue` has the last users of freed bytes, and the next owner's
//! stream waits for them. The host never waits.
//!
//! Source: STAlloc (EuroSys 2026), sections 6 and 8. The paper routes requests with hooks on
//! modules; here the plan's own sequence says which requests are dynamic (see
//! [`sequence`](crate::sequence)).

use crate::caching::Cache;
use crate::error::AllocError;
use crate::plan::{Mark, Place, Plan};
use crate::pool::{Event, Pool, PoolError};
use crate::sequence::{Found, Mismatches, NONE, Sequence, State};
use crate::spans::Spans;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// Counts of the requests and how they were served. Every request is one of `planned`, `moved`,
/// `dynamic` and `fallback`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Requests for more than 0 bytes.
    pub requests: u64,
    /// Served at their planned place.
    pub planned: u64,
    /// Planned requests whose place was still taken, served from bytes of the plan that are idle
    /// for their planned life.
    pub moved: u64,
    /// Dynamic requests, served from the plan's idle bytes.
    pub dynamic: u64,
    /// Served by the cache, and how many bytes.
    pub fallback: u64,
    /// The same in bytes.
    pub fallback_bytes: u64,
    /// The part of `fallback` that is planned requests whose place was still taken, and for which
    /// the plan has no idle bytes.
    pub occupied: u64,
    /// The part of `fallback` that is dynamic requests without room, and their bytes.
    pub dynamic_fallback: u64,
    /// The same in bytes.
    pub dynamic_fallback_bytes: u64,
    /// How the requests differ from the plan's.
    pub mismatches: Mismatches,
    /// The first difference, in words.
    pub first_mismatch: Option<String>,
    /// Blocks freed.
    pub frees: u64,
    /// Freed addresses that were never given out, or were freed before.
    pub unknown_frees: u64,
    /// How often the plan's end was passed.
    pub steps: u64,
    /// How often a stream waited for another one before it got freed bytes.
    pub waits: u64,
    /// Bytes of the plan's pool.
    pub pool_bytes: u64,
    /// Bytes that the cache has from the device, now and at most.
    pub cache_bytes: u64,
    /// The same at most.
    pub peak_cache_bytes: u64,
    /// Bytes in use in the cache, now and at most.
    pub cache_live_bytes: u64,
    /// The same at most.
    pub peak_cache_live_bytes: u64,
    /// How often the device was asked for memory.
    pub native: u64,
}

impl fmt::Display for Stats {
    /// One object of JSON.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mismatches {
            reordered,
            extra,
            missing,
            resized,
            other_stream,
            dynamic_missing,
        } = self.mismatches;
        let numbers = [
            ("requests", self.requests),
            ("planned", self.planned),
            ("moved", self.moved),
            ("dynamic", self.dynamic),
            ("fallback", self.fallback),
            ("fallback_bytes", self.fallback_bytes),
            ("occupied", self.occupied),
            ("dynamic_fallback", self.dynamic_fallback),
            ("dynamic_fallback_bytes", self.dynamic_fallback_bytes),
            ("reordered", reordered),
            ("extra", extra),
            ("missing", missing),
            ("resized", resized),
            ("other_stream", other_stream),
            ("dynamic_missing", dynamic_missing),
            ("frees", self.frees),
            ("unknown_frees", self.unknown_frees),
            ("steps", self.steps),
            ("waits", self.waits),
            ("pool_bytes", self.pool_bytes),
            ("cache_bytes", self.cache_bytes),
            ("peak_cache_bytes", self.peak_cache_bytes),
            ("cache_live_bytes", self.cache_live_bytes),
            ("peak_cache_live_bytes", self.peak_cache_live_bytes),
            ("native", self.native),
        ];
        f.write_str("{")?;
        numbers
            .iter()
            .try_for_each(|(name, number)| write!(f, "\"{name}\": {number}, "))?;
        match &self.first_mismatch {
            // Names come from a file: characters that JSON escapes are left out.
            Some(text) => {
                write!(
                    f,
                    "\"first_mismatch\": \"{}\"}}",
                    text.replace(['"', '\\'], "'")
                        .replace(char::is_control, " ")
                )
            }
            None => f.write_str("\"first_mismatch\": null}"),
        }
    }
}

/// Serves requests. Callers take turns: the C interface has a lock for each device.
pub struct Allocator {
    pool: Box<dyn Pool>,
    planned: Option<Planned>,
    cache: Cache,
    /// Other streams that use a block, by address.
    recorded: HashMap<u64, Vec<u64>>,
    stats: Stats,
}

/// A plan at work.
struct Planned {
    plan: Plan,
    base: u64,
    sequence: Sequence,
    cells: Cells,
    strangers: Spans<Stranger>,
    /// The places of blocks that are there, from the first place that was taken until there are no
    /// strangers any more.
    in_use: Option<Spans<()>>,
    residue: Spans<Vec<User>>,
    streams: Streams,
    /// For each stream of the plan, the bytes that its requests may get.
    users: Vec<(u32, Spans<()>)>,
}

/// A block in the pool that is not alive as planned.
#[derive(Clone, Copy)]
enum Stranger {
    /// It is at its place, and should have been freed.
    Late,
    /// It is at no place of the plan.
    Unplanned { stream: u64 },
}

/// A stream that may still use freed bytes. Without an event, all work submitted to the stream may
/// use them.
#[derive(Clone)]
struct User {
    stream: u64,
    event: Option<Arc<Event>>,
}

impl Allocator {
    /// An allocator without a plan: a cache.
    pub fn caching(pool: Box<dyn Pool>) -> Allocator {
        Allocator {
            pool,
            planned: None,
            cache: Cache::new(),
            recorded: HashMap::new(),
            stats: Stats::default(),
        }
    }

    /// An allocator with a plan: takes the plan's bytes from the device.
    ///
    /// # Errors
    /// The device's error if it has too little memory.
    pub fn planned(mut pool: Box<dyn Pool>, plan: Plan) -> Result<Allocator, AllocError> {
        let bytes = plan.bytes();
        let refused = |source| AllocError::Plan { bytes, source };
        let mut base = pool.allocate(bytes.max(1)).map_err(refused)?;
        if !base.is_multiple_of(plan.align()) {
            // Places are aligned within the pool, and some plans need a larger alignment than the
            // device gives.
            pool.free(base);
            base = pool
                .allocate(bytes + plan.align())
                .map_err(refused)?
                .next_multiple_of(plan.align());
        }
        let users = users(&plan);
        let crosses = |lo, hi, stream| {
            users
                .iter()
                .any(|(other, spans)| *other != stream && spans.first_meeting(lo, hi).is_some())
        };
        let mut cells = Cells::new(plan.requests().len());
        let sequence = Sequence::new(&plan, crosses, |offset| cells.add(offset));
        let (strangers, residue, streams) = (Spans::new(), Spans::new(), Streams::new());
        let stats = Stats {
            pool_bytes: bytes,
            native: 1,
            ..Stats::default()
        };
        let planned = Planned {
            plan,
            base,
            sequence,
            cells,
            strangers,
            in_use: None,
            residue,
            streams,
            users,
        };
        Ok(Allocator {
            planned: Some(planned),
            stats,
            ..Allocator::caching(pool)
        })
    }

    /// Lets the cache map memory in steps into one range of addresses for each stream, instead of
    /// taking separate blocks from the device. So a free block can grow, and the cache takes less
    /// memory where requests have many sizes.
    ///
    /// # Errors
    /// The device cannot map memory. The cache stays as it was.
    pub fn expand(&mut self) -> Result<(), PoolError> {
        self.cache.expand(self.pool.as_mut())
    }

    /// The address of `bytes` bytes for `stream`; 0 if `bytes` is 0.
    ///
    /// # Errors
    /// The device has no more memory.
    pub fn malloc(&mut self, bytes: u64, stream: u64) -> Result<u64, AllocError> {
        if bytes == 0 {
            return Ok(0);
        }
        self.stats.requests += 1;
        if let Some(planned) = &mut self.planned
            && let Some(address) = planned.serve(bytes, stream, self.pool.as_mut(), &mut self.stats)
        {
            return Ok(address);
        }
        self.stats.fallback += 1;
        self.stats.fallback_bytes += bytes;
        let address = self.cache.malloc(bytes, stream, self.pool.as_mut());
        if address.is_err() {
            // It got no memory, so it does not count as a served request.
            self.stats.requests -= 1;
            self.stats.fallback -= 1;
            self.stats.fallback_bytes -= bytes;
        }
        address
    }

    /// Frees a block of `malloc`; any thread may. False, and counted, if the address is not in use.
    pub fn free(&mut self, address: u64) -> bool {
        if address == 0 {
            return true;
        }
        let others = if self.recorded.is_empty() {
            vec![]
        } else {
            self.recorded.remove(&address).unwrap_or_default()
        };
        let mut events = vec![];
        for stream in others {
            match self.pool.record(stream) {
                Ok(event) => events.push((stream, event)),
                // Then no stream uses it any more.
                Err(_) => self.pool.synchronize(),
            }
        }
        let known = match &mut self.planned {
            Some(planned) if planned.covers(address) => planned.free(address, events),
            _ => self.cache.free(
                address,
                events.into_iter().map(|(_, event)| event).collect(),
            ),
        };
        self.stats.frees += u64::from(known);
        self.stats.unknown_frees += u64::from(!known);
        known
    }

    /// Says that `stream` uses a block of another stream: after the free, its bytes are given out
    /// only behind the work that was submitted to `stream` by then.
    pub fn record_stream(&mut self, address: u64, stream: u64) {
        let owner = match &self.planned {
            Some(planned) if planned.covers(address) => planned.owner(address),
            _ => self.cache.stream(address),
        };
        if owner.is_some_and(|owner| owner != stream) {
            let streams = self.recorded.entry(address).or_default();
            if !streams.contains(&stream) {
                streams.push(stream);
            }
        }
    }

    /// Gives the cache's unused memory back. The plan's pool stays.
    pub fn trim(&mut self) {
        self.cache.trim(self.pool.as_mut());
    }

    /// The statistics until now.
    pub fn stats(&self) -> Stats {
        let planned = self.planned.as_ref();
        Stats {
            mismatches: planned
                .map(|planned| planned.sequence.mismatches())
                .unwrap_or_default(),
            steps: planned.map_or(0, |planned| planned.sequence.steps),
            cache_bytes: self.cache.reserved,
            peak_cache_bytes: self.cache.peak_reserved,
            cache_live_bytes: self.cache.live,
            peak_cache_live_bytes: self.cache.peak_live,
            native: self.stats.native + self.cache.native,
            ..self.stats.clone()
        }
    }
}

impl Planned {
    /// A place in the pool, if the plan has one and it is free.
    #[inline]
    fn serve(
        &mut self,
        bytes: u64,
        stream: u64,
        pool: &mut dyn Pool,
        stats: &mut Stats,
    ) -> Option<u64> {
        let number = self.streams.number(stream);
        let expected = self.sequence.next();
        let found = self.sequence.find(bytes, number);
        if found != Found::At(expected) && stats.first_mismatch.is_none() {
            stats.first_mismatch = self.describe(expected, found, bytes, number);
        }
        let strangers = &mut self.strangers;
        let late = |_, item: &crate::sequence::Item| {
            strangers.insert(item.place, item.place + item.bytes, Stranger::Late)
        };
        let i = match found {
            Found::At(i) => {
                self.sequence.advance(i, late);
                i
            }
            Found::Skipped(i) => {
                self.sequence.reorder(i);
                i
            }
            Found::OtherStream(i) => {
                self.sequence.other_stream(i, late);
                return None;
            }
            Found::Nowhere => {
                self.sequence.stray();
                return None;
            }
        };
        let item = self.sequence.items[i as usize];
        if item.is_dynamic() {
            return self.dynamic(item.place as usize, bytes, stream, pool, stats);
        }
        let (lo, hi) = (item.place, item.place + bytes);
        if !self.strangers.is_empty() && self.strangers.first_meeting(lo, hi).is_some() {
            return self.moved(i, bytes, stream, pool, stats);
        }
        if !self.residue.is_empty() {
            self.claim(lo, hi, stream, pool, stats);
        }
        self.sequence.state[i as usize] = State::Alive;
        self.cells.set(item.cell, i);
        if let Some(in_use) = &mut self.in_use {
            in_use.insert(lo, hi, ());
        }
        stats.planned += 1;
        Some(self.base + lo)
    }

    /// Best fit for a planned request whose place is taken: among the bytes that are free of
    /// strangers, and that the plan does not use until the request's block is freed. A request that
    /// did not come leaves such bytes: a later one of the same size may have got its place, and
    /// then keeps it for longer than planned.
    #[cold]
    fn moved(
        &mut self,
        i: u32,
        bytes: u64,
        stream: u64,
        pool: &mut dyn Pool,
        stats: &mut Stats,
    ) -> Option<u64> {
        let lo = self.idle_until_end(i, bytes);
        let lo = lo.and_then(|idle| self.best_fit(&idle, bytes));
        let Some(lo) = lo else {
            stats.occupied += 1;
            return None;
        };
        stats.moved += 1;
        Some(self.settle(lo, bytes, stream, pool, stats))
    }

    /// Ranges that no block uses, and no request of the plan until the block of request `i` is
    /// freed; `None` if none has `bytes` bytes, or if these requests are too many.
    fn idle_until_end(&mut self, i: u32, bytes: u64) -> Option<Vec<(u64, u64)>> {
        let in_use = self.in_use.get_or_insert_with(|| {
            let mut spans = Spans::new();
            let places = self.sequence.places_in_use();
            places.for_each(|(lo, hi)| spans.insert(lo, hi, ()));
            spans
        });
        let large = |(lo, hi): &(u64, u64)| bytes <= hi - lo;
        let strangers = &self.strangers;
        let holes: Vec<(u64, u64)> = in_use
            .holes(0, self.plan.bytes())
            .filter(large)
            .flat_map(|(lo, hi)| strangers.holes(lo, hi))
            .filter(large)
            .collect();
        if holes.is_empty() {
            return None;
        }
        let mut coming = self.sequence.places_until_end(i)?;
        // No stream gets bytes of another one, except where the plan says so.
        let own = self.sequence.items[i as usize].stream;
        for (_, spans) in self.users.iter().filter(|(user, _)| *user != own) {
            coming.extend(spans.ranges());
        }
        unite(&mut coming);
        let mut idle = vec![];
        for (mut lo, hi) in holes {
            let first = coming.partition_point(|(_, end)| *end <= lo);
            for &(from, to) in coming[first..].iter().take_while(|(from, _)| *from < hi) {
                if lo < from {
                    idle.push((lo, from));
                }
                lo = to;
            }
            if lo < hi {
                idle.push((lo, hi));
            }
        }
        Some(idle)
    }

    /// Best fit among the bytes that are idle in the plan and free of strangers: A_c = A_a ∩ A_i
    /// (Eq 7).
    fn dynamic(
        &mut self,
        group: usize,
        bytes: u64,
        stream: u64,
        pool: &mut dyn Pool,
        stats: &mut Stats,
    ) -> Option<u64> {
        let Some(lo) = self.best_fit(&self.plan.spaces()[group], bytes) else {
            stats.dynamic_fallback += 1;
            stats.dynamic_fallback_bytes += bytes;
            return None;
        };
        stats.dynamic += 1;
        Some(self.settle(lo, bytes, stream, pool, stats))
    }

    /// The lowest of the smallest holes in `idle` that have room for `bytes` bytes between
    /// strangers.
    fn best_fit(&self, idle: &[(u64, u64)], bytes: u64) -> Option<u64> {
        let align = self.plan.align();
        let holes = idle
            .iter()
            .flat_map(|&(lo, hi)| self.strangers.holes(lo, hi));
        let candidates = holes.filter_map(|(lo, hi)| {
            let lo = lo.next_multiple_of(align);
            // No sum here: a request may be for 2^63 bytes.
            (lo <= hi && bytes <= hi - lo).then(|| (hi - lo, lo))
        });
        candidates.min().map(|(_, lo)| lo)
    }

    /// The address of a block that is not alive as planned.
    fn settle(
        &mut self,
        lo: u64,
        bytes: u64,
        stream: u64,
        pool: &mut dyn Pool,
        stats: &mut Stats,
    ) -> u64 {
        self.claim(lo, lo + bytes, stream, pool, stats);
        self.strangers
            .insert(lo, lo + bytes, Stranger::Unplanned { stream });
        self.base + lo
    }

    /// Makes `stream` wait for the streams that may still use `lo..hi`.
    fn claim(&mut self, lo: u64, hi: u64, stream: u64, pool: &mut dyn Pool, stats: &mut Stats) {
        // A stream waits only once for parts of one block or blocks of one stream.
        let mut behind: Vec<(u64, Option<Event>)> = vec![];
        for User {
            stream: other,
            event,
        } in self.residue.cut(lo, hi).into_iter().flatten()
        {
            let key = (other, event.as_deref().copied());
            if other != stream && !behind.contains(&key) {
                behind.push(key);
                let waited = match key.1 {
                    Some(event) if pool.done(event) => Ok(()),
                    Some(event) => pool.wait(stream, event).map(|()| stats.waits += 1),
                    None => pool.record(other).and_then(|event| {
                        let waited = pool.wait(stream, event);
                        pool.forget(event);
                        stats.waits += 1;
                        waited
                    }),
                };
                if waited.is_err() {
                    pool.synchronize();
                }
            }
            // Another part of the same block may still need the event.
            if let Some(event) = event.and_then(Arc::into_inner) {
                pool.forget(event);
            }
        }
    }

    fn covers(&self, address: u64) -> bool {
        address.wrapping_sub(self.base) < self.plan.bytes()
    }

    /// Frees a block of the pool. `events` are events of other streams that have used it.
    #[inline]
    fn free(&mut self, address: u64, events: Vec<(u64, Event)>) -> bool {
        let lo = address - self.base;
        let (hi, stream, crosses) = if let Some(i) = self.cells.take(lo) {
            let item = self.sequence.items[i as usize];
            if self.sequence.state[i as usize] == State::Late {
                self.strangers.remove(lo);
            }
            self.sequence.state[i as usize] = State::Idle;
            if let Some(in_use) = &mut self.in_use {
                in_use.remove(lo);
            }
            (lo + item.bytes, item.stream, item.crosses)
        } else if let Some(Stranger::Unplanned { stream }) = self.strangers.get(lo).copied() {
            let (hi, _) = self.strangers.remove(lo).expect("the block was just seen");
            (hi, self.streams.number(stream), 1 < self.users.len())
        } else {
            return false;
        };
        if self.strangers.is_empty() {
            self.in_use = None;
        }
        if crosses || !events.is_empty() {
            let mut users: Vec<User> = vec![];
            if crosses {
                users.push(User {
                    stream: self.streams.handle(stream),
                    event: None,
                });
            }
            users.extend(events.into_iter().map(|(stream, event)| User {
                stream,
                event: Some(Arc::new(event)),
            }));
            self.residue.insert(lo, hi, users);
        }
        true
    }

    fn owner(&self, address: u64) -> Option<u64> {
        let lo = address - self.base;
        match self.cells.get(lo) {
            Some(i) => Some(self.streams.handle(self.sequence.items[i as usize].stream)),
            None => match self.strangers.get(lo)? {
                Stranger::Unplanned { stream } => Some(*stream),
                Stranger::Late => None,
            },
        }
    }

    #[cold]
    fn describe(&self, expected: u32, found: Found, bytes: u64, stream: u32) -> Option<String> {
        let request = self.plan.requests()[expected as usize];
        // Fewer dynamic requests than planned are normal.
        let Place::Static { bytes: planned, .. } = request.place else {
            return None;
        };
        let phase = self
            .plan
            .name(Mark::Phase, expected)
            .map(|name| format!(", phase {name}"))
            .unwrap_or_default();
        let module = self
            .plan
            .name(Mark::Module, expected)
            .map(|name| format!(", module {name}"))
            .unwrap_or_default();
        let came = match found {
            Found::At(i) => format!("request {i} came"),
            Found::Skipped(i) => format!("request {i} came late"),
            Found::OtherStream(_) | Found::Nowhere => {
                format!("{bytes} bytes on stream {stream} were asked for")
            }
        };
        let steps = self.sequence.steps;
        let expected = format!(
            "request {expected}{phase}{module}: {planned} bytes on stream {}",
            request.stream
        );
        Some(format!("step {steps}, {expected} were planned, and {came}"))
    }
}

/// For each stream of a plan, the bytes that its requests may get.
fn users(plan: &Plan) -> Vec<(u32, Spans<()>)> {
    let mut ranges: std::collections::BTreeMap<u32, Vec<(u64, u64)>> =
        std::collections::BTreeMap::new();
    for request in plan.requests() {
        let ranges = ranges.entry(request.stream).or_default();
        match request.place {
            Place::Static { bytes, offset, .. } => ranges.push((offset, offset + bytes)),
            Place::Dynamic { group } => ranges.extend(&plan.spaces()[group as usize]),
        }
        // The same spaces repeat: merge them.
        if ranges.len() == 1 << 16 {
            unite(ranges);
        }
    }
    let spans = |mut ranges: Vec<(u64, u64)>| {
        unite(&mut ranges);
        let mut spans = Spans::new();
        ranges
            .into_iter()
            .for_each(|(lo, hi)| spans.insert(lo, hi, ()));
        spans
    };
    ranges
        .into_iter()
        .map(|(stream, ranges)| (stream, spans(ranges)))
        .collect()
}

fn unite(ranges: &mut Vec<(u64, u64)>) {
    ranges.sort_unstable();
    ranges.dedup_by(|next, last| {
        let meets = next.0 <= last.1;
        if meets {
            last.1 = last.1.max(next.1);
        }
        meets
    });
}

/// The device's streams in the order of their first requests, like the numbers in a recorded trace;
/// the default stream is the first.
struct Streams {
    handles: Vec<u64>,
    /// The position of the latest.
    latest: u32,
}

impl Streams {
    fn new() -> Streams {
        Streams {
            handles: vec![0],
            latest: 0,
        }
    }

    #[inline]
    fn number(&mut self, handle: u64) -> u32 {
        if self.handles[self.latest as usize] != handle {
            let found = self.handles.iter().position(|known| *known == handle);
            self.latest = found.unwrap_or(self.handles.len()) as u32;
            if found.is_none() {
                self.handles.push(handle);
            }
        }
        self.latest
    }

    fn handle(&self, number: u32) -> u64 {
        self.handles[number as usize]
    }
}

/// The request whose block begins at an offset: an open-addressed table of the plan's offsets,
/// filled once.
struct Cells {
    /// Offset and request; an empty cell has no offset.
    cells: Vec<(u64, u32)>,
    shift: u32,
}

const EMPTY: u64 = u64::MAX;

impl Cells {
    fn new(n: usize) -> Cells {
        let len = (2 * n).next_power_of_two().max(2);
        Cells {
            cells: vec![(EMPTY, NONE); len],
            shift: 64 - len.ilog2(),
        }
    }

    /// The cell of an offset, or the empty one where it would be.
    #[inline]
    fn find(&self, offset: u64) -> usize {
        // Fibonacci hashing (Knuth, volume 3, 6.4): offsets are multiples of powers of two.
        let mut at = (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize;
        while self.cells[at].0 != offset && self.cells[at].0 != EMPTY {
            at = (at + 1) & (self.cells.len() - 1);
        }
        at
    }

    fn add(&mut self, offset: u64) -> u32 {
        let at = self.find(offset);
        self.cells[at].0 = offset;
        at as u32
    }

    #[inline]
    fn set(&mut self, cell: u32, request: u32) {
        self.cells[cell as usize].1 = request;
    }

    fn get(&self, offset: u64) -> Option<u32> {
        Some(self.cells[self.find(offset)].1).filter(|request| *request != NONE)
    }

    #[inline]
    fn take(&mut self, offset: u64) -> Option<u32> {
        let at = self.find(offset);
        let request = std::mem::replace(&mut self.cells[at].1, NONE);
        (request != NONE).then_some(request)
    }
}
