//! Waiting: a bell that rings when a value changes that a thread may wait for.
//!
//! Threads wait for numbers in atomics that only grow: an event's counter is the last step that
//! recorded it. A thread that changes a number rings the bell. A waiting thread checks the number,
//! spins for a moment, then sleeps until the bell rings. Ringing costs one load while no thread
//! sleeps, and nothing here allocates.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The number of checks before sleeping. They take about a microsecond: less than a sleep and a
/// wake cost, and little waste if there are more streams than cores.
const SPINS: u32 = 64;

/// Wakes the threads that wait.
#[derive(Default)]
pub(crate) struct Bell {
    lock: Mutex<()>,
    rung: Condvar,
    sleepers: AtomicU32,
}

impl Bell {
    /// Returns once `ready` is true. A thread that makes it true stores with `SeqCst` and rings
    /// afterwards.
    pub(crate) fn wait(&self, ready: impl Fn() -> bool) {
        for _ in 0..SPINS {
            if ready() {
                return;
            }
            std::hint::spin_loop();
        }
        // This thread announces itself, then checks; the ringer stores, then checks for sleepers.
        // At least one of them sees the other, so no ring is lost. All four are SeqCst.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut guard = unpoisoned(&self.lock);
        while !ready() {
            guard = self
                .rung
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        }
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// The same, but it returns after `most` at the latest; whether `ready` was true.
    pub(crate) fn wait_at_most(&self, most: Duration, ready: impl Fn() -> bool) -> bool {
        let end = Instant::now() + most;
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut guard = unpoisoned(&self.lock);
        let mut is_ready = ready();
        while !is_ready && Instant::now() < end {
            let left = end.saturating_duration_since(Instant::now());
            let waited = self.rung.wait_timeout(guard, left);
            guard = waited.unwrap_or_else(PoisonError::into_inner).0;
            is_ready = ready();
        }
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        is_ready
    }

    /// Wakes every sleeping thread, which then checks again.
    pub(crate) fn ring(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // With the lock: a thread that has checked and does not sleep yet still holds it.
            let _guard = unpoisoned(&self.lock);
            self.rung.notify_all();
        }
    }
}

/// Locks. A panic in another thread under the lock leaves these values consistent, so this thread
/// need not panic.
pub(crate) fn unpoisoned<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
