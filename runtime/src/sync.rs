//! Waiting: a bell that rings whenever something may have changed that a thread waits for.
//!
//! Threads wait for numbers in atomics that only grow: an event's counter is the last step that
//! recorded it. A thread that changes one rings the bell. A thread that waits looks, spins a
//! moment, then sleeps on the bell. Ringing costs one load while no thread sleeps, and nothing here
//! allocates.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// How often to look before sleeping: about a microsecond, less than a sleep and a wake cost, and
/// little enough to waste where streams outnumber cores.
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
        // The order of these two, announce and look, against the ringer's, store and look, is what
        // loses no ring: one of both sees the other. All four are SeqCst.
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

    /// Wakes every sleeper, to look again.
    pub(crate) fn ring(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            // With the lock: a sleeper that has looked and not yet slept still holds it.
            let _guard = unpoisoned(&self.lock);
            self.rung.notify_all();
        }
    }
}

/// Locks. A panic elsewhere under the lock leaves these values whole, so it is no reason to panic
/// as well.
pub(crate) fn unpoisoned<T>(lock: &Mutex<T>) -> MutexGuard<'_, T> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
