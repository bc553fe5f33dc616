//! If the system refuses memory, the command ends with an exit code and does not crash.
//!
//! Rust ends a process by SIGABRT if an allocation fails that the code does not check. A line on
//! standard error gives the number of bytes. This module turns the signal into the exit code for a
//! refusal by the system.

#![allow(
    unsafe_code,
    reason = "a handler of a signal can be set by an unsafe function alone"
)]

use std::sync::atomic::{AtomicBool, Ordering};

/// True after a panic was reported: an abort after that is our bug.
static PANICKED: AtomicBool = AtomicBool::new(false);

/// Exit codes: see `Failure::code`.
const SYSTEM: i32 = 1;
const BUG: i32 = 101;

/// Records a panic.
pub(crate) fn panicked() {
    PANICKED.store(true, Ordering::Relaxed);
}

/// From here on, the process ends with an exit code when memory runs out.
pub(crate) fn exit_where_it_ends() {
    #[cfg(unix)]
    {
        let handler: extern "C" fn(libc::c_int) = ended;
        // SAFETY: the handler calls only `write` and `_exit`, which are allowed in a signal
        // handler, and does not return.
        unsafe { libc::signal(libc::SIGABRT, handler as libc::sighandler_t) };
    }
}

#[cfg(unix)]
extern "C" fn ended(_: libc::c_int) {
    const MESSAGE: &[u8] = b"error: out of memory; see the line above\n";
    let code = if PANICKED.load(Ordering::Relaxed) {
        BUG
    } else {
        // SAFETY: pointer and length belong to one slice.
        unsafe { libc::write(libc::STDERR_FILENO, MESSAGE.as_ptr().cast(), MESSAGE.len()) };
        SYSTEM
    };
    // SAFETY: it ends the process at once.
    unsafe { libc::_exit(code) }
}
