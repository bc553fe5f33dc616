//! Ctrl-C while the compiler works, which takes seconds for a large model.
//!
//! Python notes a signal and answers it on its main thread, between two lines of a program. So the
//! work has a thread of its own, and the calling one looks for signals until it has ended. A signal
//! whose handler raises an exception, such as KeyboardInterrupt, sets the flag at which the
//! compiler looks. Its threads end first, then the exception goes on: nothing is left behind.

use crate::process::needs_threads;
use passes::plan::{Cancel, Cancelled};
use pyo3::prelude::*;
use std::panic::resume_unwind;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::{Builder, scope};
use std::time::Duration;

/// Between two looks for signals. A user does not notice a twentieth of a second, and a look takes
/// microseconds.
const PAUSE: Duration = Duration::from_millis(50);
/// Bytes of the thread's stack, as large as that of a main thread on Linux.
const STACK: usize = 8 << 20;

/// Runs the compiler without the GIL. Raises what the handler of a signal raised meanwhile.
pub(crate) fn interruptible<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&Cancel) -> PyResult<T> + Send,
) -> PyResult<T> {
    needs_threads()?;
    py.detach(|| {
        let cancel = Cancel::new();
        scope(|scope| {
            let (working, ended) = channel::<()>();
            let run = || {
                // Its end is the end of the channel, also if the work unwinds.
                let _working = working;
                work(&cancel)
            };
            let worker = Builder::new().stack_size(STACK).spawn_scoped(scope, run)?;
            let mut raised = None;
            while ended.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
                if raised.is_none() {
                    raised = Python::attach(|py| py.check_signals()).err();
                    raised.iter().for_each(|_| cancel.set());
                }
            }
            match (worker.join(), raised) {
                (Ok(result), None) => result,
                // Work that ended at the same moment is given up, too.
                (Ok(_), Some(raised)) => Err(raised),
                (Err(panic), Some(raised)) => {
                    let Cancelled = Cancelled::caught(panic);
                    Err(raised)
                }
                (Err(panic), None) => resume_unwind(panic),
            }
        })
    })
}
