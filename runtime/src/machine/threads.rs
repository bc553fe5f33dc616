//! Runs steps on one thread a stream. Threads wait for one another at events alone, and at the end
//! of what is launched.

use super::Core;
use crate::Error;
use crate::program::Action;
use crate::sync::Bell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

/// The executor of an ordinary run.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
}

/// What the threads and the host tell each other. All of it only grows.
struct Shared {
    core: Arc<Core>,
    bell: Bell,
    /// How many threads have started.
    started: AtomicUsize,
    /// The last step that may start.
    launched: AtomicU64,
    /// The last step that each stream has finished; `u64::MAX` once its thread is gone.
    done: Box<[AtomicU64]>,
    /// The last step in which each stream has done all that the host waits for in `wait_io`;
    /// `u64::MAX` as above.
    io: Box<[AtomicU64]>,
    /// The last step that recorded each event.
    events: Box<[AtomicU64]>,
}

impl Threads {
    pub(crate) fn new(
        core: &Arc<Core>,
        streams: &[String],
        n_events: usize,
    ) -> Result<Threads, Error> {
        let zeros = |n: usize| (0..n).map(|_| AtomicU64::new(0)).collect();
        let shared = Arc::new(Shared {
            core: core.clone(),
            bell: Bell::default(),
            started: AtomicUsize::new(0),
            launched: AtomicU64::new(0),
            done: zeros(streams.len()),
            io: zeros(streams.len()),
            events: zeros(n_events),
        });
        // Made first, so that an error ends the threads that did start.
        let mut threads = Threads {
            shared,
            handles: Vec::new(),
        };
        for (stream, name) in streams.iter().enumerate() {
            let shared = threads.shared.clone();
            // Thread names end at a zero byte, and so must not have one.
            let builder = Builder::new().name(name.replace('\0', " "));
            let handle = builder.spawn(move || shared.serve(stream));
            threads.handles.push(
                handle
                    .map_err(|e| Error::Resources(format!("no thread for stream {name}: {e}")))?,
            );
        }
        // What a thread sets up for itself is no part of a step.
        let shared = &threads.shared;
        shared
            .bell
            .wait(|| shared.started.load(Ordering::SeqCst) == streams.len());
        Ok(threads)
    }

    /// Lets steps up to `step` start.
    pub(crate) fn launch(&self, step: u64) {
        self.shared.launched.store(step, Ordering::SeqCst);
        self.shared.bell.ring();
    }

    /// Returns when every stream has finished what is launched, or has given up: then no thread
    /// touches a pool.
    pub(crate) fn wait(&self) {
        let launched = self.shared.launched.load(Ordering::SeqCst);
        self.shared.bell.wait(|| {
            self.shared
                .done
                .iter()
                .all(|done| launched <= done.load(Ordering::SeqCst))
        });
    }

    /// Returns when every stream has done what `wait_io` waits for, or has given up.
    pub(crate) fn wait_io(&self) {
        let shared = &*self.shared;
        let launched = shared.launched.load(Ordering::SeqCst);
        let streams = || shared.io.iter().zip(&shared.core.last_io);
        shared.bell.wait(|| {
            streams().all(|(io, last)| last.is_none() || launched <= io.load(Ordering::SeqCst))
        });
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.core.halt();
        self.shared.bell.ring();
        for handle in self.handles.drain(..) {
            // A thread whose panic escaped has nothing more to say.
            let _ = handle.join();
        }
    }
}

impl Shared {
    /// A stream's thread.
    fn serve(&self, stream: usize) {
        let _gone = Gone {
            shared: self,
            stream,
        };
        self.core.programs[stream]
            .iter()
            .filter_map(|i| i.action.launch())
            .for_each(|launch| launch.prepare());
        self.started.fetch_add(1, Ordering::SeqCst);
        self.bell.ring();
        for step in 1.. {
            let launched = || step <= self.launched.load(Ordering::SeqCst);
            self.bell.wait(|| launched() || self.core.halted());
            if self.core.halted() || !self.step(stream, step) {
                return;
            }
            self.done[stream].store(step, Ordering::SeqCst);
            self.bell.ring();
        }
    }

    /// Runs one step of a stream; false if the machine stopped meanwhile.
    fn step(&self, stream: usize, step: u64) -> bool {
        let core = &*self.core;
        let mut ring = core.trace_ring(stream);
        for (at, instruction) in core.programs[stream].iter().enumerate() {
            match instruction.action {
                Action::Record { event } => {
                    self.events[event].store(step, Ordering::SeqCst);
                    self.bell.ring();
                }
                Action::Wait { event, previous } => {
                    let start = ring.is_some().then(Instant::now);
                    let recorded =
                        || step - u64::from(previous) <= self.events[event].load(Ordering::SeqCst);
                    self.bell.wait(|| recorded() || core.halted());
                    if let (Some(ring), Some(start)) = (&mut ring, start) {
                        ring.note(at, step, start);
                    }
                }
                _ => {
                    if core.run(stream, at, step, ring.as_deref_mut()).is_err() {
                        return false;
                    }
                }
            }
            if core.halted() {
                return false;
            }
            if core.last_io[stream] == Some(at) {
                self.io[stream].store(step, Ordering::SeqCst);
                self.bell.ring();
            }
        }
        true
    }
}

/// Tells, however a thread ends, that it has.
struct Gone<'a> {
    shared: &'a Shared,
    stream: usize,
}

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        self.shared.core.halt();
        self.shared.done[self.stream].store(u64::MAX, Ordering::SeqCst);
        self.shared.io[self.stream].store(u64::MAX, Ordering::SeqCst);
        self.shared.bell.ring();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::Link;
    use crate::program::Instruction;
    use std::sync::Mutex;
    use std::sync::atomic::AtomicBool;

    /// Two streams; the second waits for what the first never records, since `run` comes before.
    fn failing(run: fn() -> Result<(), String>) -> Error {
        let instruction = |action| Instruction {
            command: 0,
            line: 0,
            device_end: 0,
            bytes: 0,
            action,
        };
        let first = [Action::Misbehave(run), Action::Record { event: 0 }];
        let second = [Action::Wait {
            event: 0,
            previous: false,
        }];
        let core = Arc::new(Core {
            programs: vec![
                first.map(instruction).into(),
                second.map(instruction).into(),
            ],
            last_io: vec![None; 2],
            team: None,
            pools: Vec::new(),
            _arenas: Vec::new(),
            lines: vec![artifact::Line {
                name: "h1".into(),
                why: "run".into(),
            }],
            link: Link::new(None),
            trace: None,
            touched: AtomicU64::new(0),
            halted: AtomicBool::new(false),
            failure: Mutex::new(None),
        });
        let threads =
            Threads::new(&core, &["a".into(), "b\0".into()], 1).expect("two threads should start");
        threads.launch(1);
        threads.launch(2);
        threads.wait();
        let failure = core
            .failure
            .lock()
            .expect("nobody should panic under the lock")
            .clone();
        failure.expect("the failure should be kept")
    }

    #[test]
    fn a_failure_releases_the_streams_that_wait() {
        let failure = failing(|| Err("index 9 is not in 0..4".into()));
        assert_eq!(
            failure.to_string(),
            "line h1 failed: index 9 is not in 0..4"
        );
    }

    #[test]
    fn a_panic_is_a_failure() {
        let failure = failing(|| panic!("a kernel's bug"));
        assert_eq!(
            failure.to_string(),
            "line h1 failed: its kernel panicked: a kernel's bug"
        );
    }
}
