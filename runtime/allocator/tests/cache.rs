//! The cache: its blocks share no byte and lie in memory of the device, also if it is expandable.

use lighterage_alloc::Allocator;
use lighterage_alloc::pool::{Event, Pool, PoolError, Range};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

const MIB: u64 = 1 << 20;

/// A device's memory: what is given out or mapped, by address.
#[derive(Default)]
struct Memory {
    limit: u64,
    parts: BTreeMap<u64, u64>,
    ranges: u64,
}

impl Memory {
    fn bytes(&self) -> u64 {
        self.parts.values().sum()
    }

    /// Adds memory, if there is as much.
    fn add(&mut self, address: u64, bytes: u64) -> Result<(), PoolError> {
        if self.limit < self.bytes() + bytes {
            return Err(PoolError::Other("out of memory".into()));
        }
        let before = self.parts.insert(address, bytes);
        assert!(before.is_none(), "{address:#x} has memory");
        Ok(())
    }

    /// True if all bytes of a block have memory.
    fn has(&self, mut address: u64, bytes: u64) -> bool {
        let end = address + bytes;
        while address < end {
            match self.parts.range(..=address).next_back() {
                Some((at, bytes)) if address < at + bytes => address = at + bytes,
                _ => return false,
            }
        }
        true
    }
}

struct Device {
    memory: Arc<Mutex<Memory>>,
    next: u64,
    /// Ranges that it can reserve.
    most_ranges: u64,
}

/// A device, and an expandable cache of its memory.
fn device(limit: u64, most_ranges: u64) -> (Arc<Mutex<Memory>>, Allocator) {
    let memory = Arc::new(Mutex::new(Memory {
        limit,
        ..Memory::default()
    }));
    let device = Device {
        memory: memory.clone(),
        next: 1 << 40,
        most_ranges,
    };
    let mut allocator = Allocator::caching(Box::new(device));
    allocator.expand().unwrap();
    (memory, allocator)
}

impl Pool for Device {
    fn allocate(&mut self, bytes: u64) -> Result<u64, PoolError> {
        self.memory.lock().unwrap().add(self.next, bytes)?;
        self.next += bytes + MIB;
        Ok(self.next - bytes - MIB)
    }
    fn free(&mut self, address: u64) {
        let bytes = self.memory.lock().unwrap().parts.remove(&address);
        assert!(bytes.is_some(), "only what was given comes back");
    }
    fn reserve(&mut self, step: u64) -> Result<Range, PoolError> {
        let mut memory = self.memory.lock().unwrap();
        if memory.ranges == self.most_ranges {
            return Err(PoolError::NoMapping);
        }
        memory.ranges += 1;
        let range = Range {
            // Not a multiple of the step.
            address: self.next + MIB,
            bytes: 2 * memory.limit / step * step,
            step,
        };
        self.next += 2 * memory.limit + 2 * MIB;
        Ok(range)
    }
    fn map(&mut self, range: Range, address: u64, bytes: u64) -> Result<(), PoolError> {
        assert!(range.address <= address && address + bytes <= range.address + range.bytes);
        let whole = [address - range.address, bytes].map(|n| n % range.step);
        assert_eq!(whole, [0, 0], "memory is mapped in whole steps");
        let mut memory = self.memory.lock().unwrap();
        if memory.limit < memory.bytes() + bytes {
            return Err(PoolError::Other("out of memory".into()));
        }
        (address..address + bytes)
            .step_by(range.step as usize)
            .try_for_each(|at| memory.add(at, range.step))
    }
    fn unmap(&mut self, range: Range, address: u64, bytes: u64) {
        let mut memory = self.memory.lock().unwrap();
        for at in (address..address + bytes).step_by(range.step as usize) {
            let bytes = memory.parts.remove(&at);
            assert_eq!(bytes, Some(range.step), "only what was mapped comes back");
        }
    }
    fn record(&mut self, _: u64) -> Result<Event, PoolError> {
        Ok(Event(0))
    }
    fn done(&mut self, _: Event) -> bool {
        true
    }
    fn wait(&mut self, _: u64, _: Event) -> Result<(), PoolError> {
        Ok(())
    }
    fn forget(&mut self, _: Event) {}
    fn synchronize(&mut self) {}
}

#[test]
fn a_free_block_grows() {
    let (memory, mut cache) = device(1000 * MIB, 9);
    let small = cache.malloc(30 * MIB, 0).unwrap();
    assert!(cache.free(small));
    // It gets one step more, at the same address.
    assert_eq!(cache.malloc(45 * MIB, 0).unwrap(), small);
    assert_eq!(memory.lock().unwrap().bytes(), 60 * MIB);
    // Requests of many sizes, in any order: hardly more is taken than they need.
    let (_, mut cache) = device(1000 * MIB, 9);
    for sizes in [[70, 130, 40, 90], [130, 90, 70, 40], [40, 70, 90, 130]] {
        let blocks = sizes.map(|mib| cache.malloc(mib * MIB, 0).unwrap());
        assert!(blocks.into_iter().all(|block| cache.free(block)));
    }
    assert_eq!(cache.stats().peak_cache_bytes, 340 * MIB);
}

#[test]
fn unused_steps_are_used_elsewhere() {
    let (memory, mut cache) = device(80 * MIB, 9);
    let [first, second, third] = [20, 20, 40].map(|mib| cache.malloc(mib * MIB, 0).unwrap());
    assert!(cache.free(first) && cache.free(third));
    // 60 MiB are free, but in two parts. The first has its memory taken away.
    let large = cache.malloc(60 * MIB, 0).unwrap();
    assert_eq!(large, third);
    assert!(cache.malloc(1, 0).is_err(), "all memory is in use");
    // Another stream gets memory that this one gives back.
    assert!(cache.free(second));
    let other = cache.malloc(1, 7).unwrap();
    assert_eq!(memory.lock().unwrap().bytes(), 62 * MIB);
    // A hole is filled again.
    assert!(cache.free(large) && cache.free(other));
    cache.trim();
    assert_eq!(memory.lock().unwrap().bytes(), 0);
    assert_eq!(cache.malloc(2 * MIB, 0).unwrap(), first);
}

#[test]
fn a_device_without_mapping_has_segments() {
    let mut host = Allocator::caching(Box::<lighterage_alloc::Host>::default());
    let error = host.expand().unwrap_err().to_string();
    assert_eq!(error, "the device cannot map memory");
    assert!(host.malloc(100, 0).is_ok());
    // One range only: a second stream has segments.
    let (memory, mut cache) = device(100 * MIB, 1);
    let [range, segment] = [0, 1].map(|stream| cache.malloc(3 * MIB, stream).unwrap());
    assert_eq!(memory.lock().unwrap().bytes(), 40 * MIB);
    assert!(cache.free(range) && cache.free(segment));
    cache.trim();
    assert_eq!(cache.stats().cache_bytes, 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Blocks share no byte and have memory; what the cache counts is what the device has given;
    /// when all is free, the device gets everything back.
    #[test]
    fn blocks_are_disjoint_and_have_memory(
        limit in 30u64..400,
        events in prop::collection::vec((0u8..10, 0u64..60 * MIB, 0u64..3, 0usize..50), 1..120),
    ) {
        let (memory, mut cache) = device(limit * MIB, 5);
        let mut live: BTreeMap<u64, u64> = BTreeMap::new();
        for (what, bytes, stream, which) in events {
            match what {
                0..5 => {
                    // Half of the requests are small.
                    let bytes = 1 + if what < 2 { bytes / 40 } else { bytes };
                    match cache.malloc(bytes, stream) {
                        Ok(address) => {
                            let before = live.range(..address + bytes).next_back();
                            prop_assert!(before.is_none_or(|(at, n)| at + n <= address));
                            prop_assert!(memory.lock().unwrap().has(address, bytes));
                            live.insert(address, bytes);
                        }
                        // What is left is less than the steps that the request needs.
                        Err(_) => {
                            let taken = memory.lock().unwrap().bytes();
                            prop_assert!(limit * MIB < taken + bytes.next_multiple_of(20 * MIB));
                        }
                    }
                }
                5..9 if !live.is_empty() => {
                    let at = *live.keys().nth(which % live.len()).unwrap();
                    live.remove(&at);
                    prop_assert!(cache.free(at) && !cache.free(at));
                }
                9 => cache.trim(),
                _ => {}
            }
            prop_assert_eq!(memory.lock().unwrap().bytes(), cache.stats().cache_bytes);
        }
        for (&at, &bytes) in &live {
            prop_assert!(memory.lock().unwrap().has(at, bytes));
            prop_assert!(cache.free(at));
        }
        cache.trim();
        prop_assert_eq!(memory.lock().unwrap().bytes(), 0);
    }
}
