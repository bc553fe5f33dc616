//! Ctrl-C, and the signals by which a system ends processes: the first one ends a run after the
//! current step, the second one ends it at once.

use crate::out;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;

/// What shells add to a signal's number for the exit code.
const SIGNALLED: i32 = 128;

/// The first signal; 0 before it.
static STOP: AtomicI32 = AtomicI32::new(0);

/// True once the run should end.
pub(crate) fn pressed() -> bool {
    STOP.load(Ordering::SeqCst) != 0
}

/// The exit code of a run that a signal has ended.
pub(crate) fn code() -> u8 {
    (SIGNALLED + STOP.load(Ordering::SeqCst)) as u8
}

/// From here on, the first signal sets a flag, and the second one ends the process. If no handler
/// can be set, the first one ends it too.
pub(crate) fn listen() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    // A shell script starts its background jobs with Ctrl-C ignored, and `nohup` ignores the end of
    // the terminal; this must stay so.
    let signals = [SIGINT, SIGTERM, SIGHUP];
    let signals = signals.iter().filter(|&&signal| !ignores(&status, signal));
    let Ok(mut signals) = Signals::new(signals) else {
        return;
    };
    let listen = move || {
        for signal in signals.forever() {
            if STOP.swap(signal, Ordering::SeqCst) != 0 {
                std::process::exit(SIGNALLED + signal);
            }
            let name = if signal == SIGINT {
                "Ctrl-C"
            } else {
                "a signal"
            };
            out::note(&format!(
                "stopping after the step under way; {name} again ends it at once"
            ));
        }
    };
    // Without the thread, signals do nothing, as if they were ignored.
    let _ = thread::Builder::new().name("signals".into()).spawn(listen);
}

/// Whether the parent started this process with a signal ignored, by the system's text about a
/// process.
fn ignores(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // Signal n is bit n - 1.
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ignored_signal_is_found_in_the_systems_text() {
        let status = |mask: &str| format!("Name:\tx\nSigBlk:\t0002\nSigIgn:\t{mask}\nSigCgt:\t2\n");
        assert!(ignores(&status("0000000000000002"), SIGINT));
        assert!(ignores(&status("0000000000001006"), SIGINT));
        assert!(!ignores(&status("0000000000001000"), SIGINT));
        assert!(ignores(&status("0000000000000001"), SIGHUP));
        assert!(!ignores("no such line", SIGINT));
    }
}
