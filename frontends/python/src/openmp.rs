//! Sleep for torch's threads while a step runs on the processor.
//!
//! After each parallel region, the threads of OpenMP poll for the next one, for several
//! milliseconds. A step that begins meanwhile would share its cores with them. So it runs inside of
//! a region of its own, whose other threads sleep until it ends.

#![allow(
    unsafe_code,
    reason = "OpenMP is a C library, which calls a function in each of its threads"
)]

use artifact::Artifact;
use pyo3::prelude::*;
use std::cell::Cell;
use std::ffi::{c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::thread::{self, ThreadId};

type Body = extern "C" fn(*mut c_void);
/// `GOMP_parallel(body, data, threads, flags)`: runs the body in this thread and in others, and
/// returns when all have. 0 threads are as many as the program has set.
type Parallel = unsafe extern "C" fn(Body, *mut c_void, c_uint, c_uint);

/// The function, and the time of the shortest step that has a region.
static PARALLEL: OnceLock<(Parallel, f64)> = OnceLock::new();

/// Time of a step, ms. In a shorter one, waking the other threads takes longer than sharing cores
/// with them. Measured with two threads: a region takes 0.05 to 0.2 ms.
const SHORT: f64 = 0.9;
/// The same in addition for each thread.
const FOR_EACH: f64 = 0.05;

/// Says where `GOMP_parallel` of torch's OpenMP is.
#[pyfunction]
pub(crate) fn use_openmp(address: usize) {
    if address != 0 {
        // SAFETY: the caller has the address from the library's table of symbols, and a library
        // that torch needs is never unloaded.
        let parallel = unsafe { std::mem::transmute::<*const c_void, Parallel>(address as _) };
        let threads = thread::available_parallelism().map_or(1, |n| n.get());
        PARALLEL.get_or_init(|| (parallel, SHORT + FOR_EACH * threads as f64));
    }
}

/// A region.
struct Region<F, T> {
    caller: ThreadId,
    /// Only the calling thread uses these two.
    work: Cell<Option<F>>,
    result: Cell<Option<thread::Result<T>>>,
    over: Mutex<bool>,
    end: Condvar,
}

/// The last time of a step, ms.
pub(crate) struct Lasted {
    bits: AtomicU64,
    /// Whether the step runs on the processor.
    is_here: bool,
}

impl Lasted {
    /// That of an artifact, which has not run yet.
    pub(crate) fn of(artifact: &Artifact) -> Lasted {
        Lasted {
            bits: AtomicU64::new(0),
            is_here: artifact.gpu().is_none(),
        }
    }

    pub(crate) fn note(&self, ms: f64) {
        self.bits.store(ms.to_bits(), Ordering::Relaxed);
    }

    /// Runs the step, while the threads of OpenMP sleep if it is long enough.
    pub(crate) fn alone<T>(&self, step: impl FnOnce() -> T) -> T {
        let ms = f64::from_bits(self.bits.load(Ordering::Relaxed));
        match PARALLEL.get() {
            Some(&(parallel, shortest)) if self.is_here && shortest < ms => region(parallel, step),
            _ => step(),
        }
    }
}

fn region<T, F: FnOnce() -> T>(parallel: Parallel, work: F) -> T {
    extern "C" fn body<T, F: FnOnce() -> T>(region: *mut c_void) {
        // SAFETY: `parallel` returns, and the region ends, after all of its threads have left this
        // function.
        let region = unsafe { &*region.cast::<Region<F, T>>() };
        let mut over = region.over.lock().unwrap_or_else(PoisonError::into_inner);
        if thread::current().id() == region.caller {
            drop(over);
            // A panic must not leave this function.
            let result = region
                .work
                .take()
                .map(|work| catch_unwind(AssertUnwindSafe(work)));
            region.result.set(result);
            *region.over.lock().unwrap_or_else(PoisonError::into_inner) = true;
            region.end.notify_all();
            return;
        }
        while !*over {
            over = region
                .end
                .wait(over)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
    let region = Region {
        caller: thread::current().id(),
        work: Cell::new(Some(work)),
        result: Cell::new(None),
        over: Mutex::new(false),
        end: Condvar::new(),
    };
    // SAFETY: the body takes what it is given here.
    unsafe { parallel(body::<T, F>, (&raw const region).cast_mut().cast(), 0, 0) };
    match region.result.into_inner() {
        Some(Ok(result)) => result,
        Some(Err(panic)) => resume_unwind(panic),
        None => unreachable!("the calling thread is one of the region's"),
    }
}
