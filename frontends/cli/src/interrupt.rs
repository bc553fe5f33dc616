//! Ctrl-C: the first one ends a run after the current step, the second one ends it at once.

use crate::out;
use std::sync::atomic::{AtomicBool, Ordering};

/// The exit code after Ctrl-C.
const INTERRUPTED: i32 = 130;

/// True once the user has pressed Ctrl-C.
static STOP: AtomicBool = AtomicBool::new(false);

/// True once the user has pressed Ctrl-C.
pub(crate) fn pressed() -> bool {
    STOP.load(Ordering::SeqCst)
}

/// From here on, the first Ctrl-C sets a flag, and the second one ends the process. If no handler
/// can be set, the first one ends it too.
pub(crate) fn listen() {
    // A shell script starts its background jobs with the signal ignored; this must stay so.
    if is_ignored() {
        return;
    }
    let _ = ctrlc::set_handler(|| {
        if STOP.swap(true, Ordering::SeqCst) {
            std::process::exit(INTERRUPTED);
        }
        out::note("stopping after the step under way; Ctrl-C again ends it at once");
    });
}

/// True if the parent started this process with the signal ignored.
fn is_ignored() -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| ignores_interrupt(&status))
}

/// Reads it from the system's text about a process.
fn ignores_interrupt(status: &str) -> bool {
    /// SIGINT is signal 2, which is bit 1.
    const SIGINT_BIT: u64 = 1 << 1;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & SIGINT_BIT != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ignored_signal_is_found_in_the_systems_text() {
        let status = |mask: &str| format!("Name:\tx\nSigBlk:\t0002\nSigIgn:\t{mask}\nSigCgt:\t2\n");
        assert!(ignores_interrupt(&status("0000000000000002")));
        assert!(ignores_interrupt(&status("0000000000001006")));
        assert!(!ignores_interrupt(&status("0000000000001000")));
        assert!(!ignores_interrupt("no such line"));
    }
}
