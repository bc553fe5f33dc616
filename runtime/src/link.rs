//! The link between a device's pool and the host's. On the CPU both are the same memory, so a copy
//! takes the time of a memcpy. With a bandwidth, each direction is slowed to it: the machine
//! simulates a slow link, so that an offloading plan can be timed without a device.
//!
//! The link is full duplex: the directions do not slow each other. Copies in one direction take
//! turns in the order of their requests, on any stream.

use crate::kernel::Tensor;
use crate::memory;
use crate::sync::unpoisoned;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    ToDevice,
    FromDevice,
}

/// The link's speed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Pace {
    /// Bytes per second in each direction.
    pub(crate) bandwidth: f64,
    /// Additional time of each copy.
    pub(crate) latency: Duration,
}

/// Both directions.
pub(crate) struct Link {
    pace: Option<Pace>,
    /// The time at which each direction is free again.
    free: [Mutex<Option<Instant>>; 2],
}

/// A paced copy advances in pieces of about this much time, so that it takes bandwidth evenly, like
/// a real copy.
const PIECE: Duration = Duration::from_millis(2);
/// Sleeping overshoots by less than this (Linux adds 50 µs of slack); the rest is spent yielding.
const SLACK: Duration = Duration::from_micros(100);
/// A sleeping thread checks this often whether the machine has stopped.
const NAP: Duration = Duration::from_millis(10);

impl Link {
    pub(crate) fn new(pace: Option<Pace>) -> Link {
        Link {
            pace,
            free: [Mutex::new(None), Mutex::new(None)],
        }
    }

    /// Whether it is as fast as memory copies.
    pub(crate) fn is_unlimited(&self) -> bool {
        self.pace.is_none()
    }

    /// Copies over the link. Ends early, with some bytes copied, when `stopped` is true.
    pub(crate) fn copy(&self, way: Way, src: &Tensor, dst: &Tensor, stopped: impl Fn() -> bool) {
        let Some(pace) = self.pace else {
            return memory::copy(src, dst, 0, src.bytes);
        };
        let seconds = |bytes: usize| Duration::from_secs_f64(bytes as f64 / pace.bandwidth);
        let start = {
            let mut free = unpoisoned(&self.free[way as usize]);
            let now = Instant::now();
            let start = free.map_or(now, |free| free.max(now)) + pace.latency;
            *free = Some(start + seconds(src.bytes));
            start
        };
        // At least a cache line, at most what a usize holds: casts of floats saturate.
        let piece = ((pace.bandwidth * PIECE.as_secs_f64()) as usize).max(64);
        let mut from = 0;
        while from < src.bytes && !stopped() {
            let to = from.saturating_add(piece).min(src.bytes);
            memory::copy(src, dst, from, to);
            sleep_until(start + seconds(to), &stopped);
            from = to;
        }
    }
}

fn sleep_until(time: Instant, stopped: impl Fn() -> bool) {
    loop {
        let left = time.saturating_duration_since(Instant::now());
        if left.is_zero() || stopped() {
            return;
        }
        match left.checked_sub(SLACK) {
            Some(sleep) if !sleep.is_zero() => std::thread::sleep(sleep.min(NAP)),
            _ => std::thread::yield_now(),
        }
    }
}
