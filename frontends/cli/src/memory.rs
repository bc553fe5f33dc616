//! Memory that the system refuses: an exit code, and no crash.
//!
//! Rust ends a process by SIGABRT where an allocation fails and nobody asked whether it might. The
//! line on standard error says how many bytes were asked for. This module turns the signal into the
//! exit code for what the system refuses.

#![allow(
    unsafe_code,
    reason = "a handler of a signal can be set by an unsafe function alone"
)]

use std::sync::atomic::{AtomicBool, Ordering};

/// True once a panic was told: what aborts after that is our bug.
static PANICKED: AtomicBool = AtomicBool::new(false);

/// Exit codes: see `Failure::code`.
const SYSTEM: i32 = 1;
const BUG: i32 = 101;

/// Notes a panic.
pub(crate) fn panicked() {
    PANICKED.store(true, Ordering::Relaxed);
}

/// From here on the process ends with an exit code where memory ends.
pub(crate) fn exit_where_it_ends() {
    #[cfg(unix)]
    {
        let handler: extern "C" fn(libc::c_int) = ended;
        // SAFETY: the handler calls `write` and `_exit` alone, which a handler of a signal may, and
        // does not return.
        unsafe { libc::signal(libc::SIGABRT, handler as libc::sighandler_t) };
    }
}

#[cfg(unix)]
extern "C" fn ended(_: libc::c_int) {
    const MESSAGE: &[u8] = b"error: out of memory; see the line above\n";
    let code = if PANICKED.load(Ordering::Relaxed) {
        BUG
    } else {
        // SAFETY: the pointer and the length are those of one slice.
        unsafe { libc::write(libc::STDERR_FILENO, MESSAGE.as_ptr().cast(), MESSAGE.len()) };
        SYSTEM
    };
    // SAFETY: it ends the process without running any more of it.
    unsafe { libc::_exit(code) }
}
