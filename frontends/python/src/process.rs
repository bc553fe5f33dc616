//! What a fork leaves of a step: its memory, and none of its threads.
//!
//! A forked process, such as a worker of a data loader, may use the parameters as in any program.
//! Whatever waits for a thread would wait for ever there. So the compiler and steps refuse to run,
//! and a machine is never dropped there, because that ends its threads.

use crate::errors::error;
use pyo3::prelude::*;
use std::mem::forget;
use std::ops::{Deref, DerefMut};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

/// The process in which threads were started; 0 if none were.
static HOME: AtomicU32 = AtomicU32::new(0);

/// Says that threads are needed now.
pub(crate) fn needs_threads() -> PyResult<()> {
    let here = process::id();
    match HOME.compare_exchange(0, here, Ordering::Relaxed, Ordering::Relaxed) {
        Err(home) if home != here => Err(error(
            "this process was forked from one that compiled a step, and a fork has none of the \
             step's threads: start it with multiprocessing's \"spawn\", or compile after the fork \
             alone",
        )),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// What has threads. A forked process keeps it for ever.
pub(crate) struct Threaded<T> {
    /// Absent while it is dropped.
    inner: Option<T>,
    home: u32,
}

impl<T> Threaded<T> {
    pub(crate) fn new(inner: T) -> Threaded<T> {
        Threaded {
            inner: Some(inner),
            home: process::id(),
        }
    }
}

impl<T> Deref for Threaded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.inner
            .as_ref()
            .expect("it should be there until it is dropped")
    }
}

impl<T> DerefMut for Threaded<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner
            .as_mut()
            .expect("it should be there until it is dropped")
    }
}

impl<T> Drop for Threaded<T> {
    fn drop(&mut self) {
        if self.home != process::id() {
            forget(self.inner.take());
        }
    }
}
