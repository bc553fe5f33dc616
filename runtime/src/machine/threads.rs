//! One thread for each stream. Threads wait for each other at events alone, and for the host at the
//! end of what is launched.

use super::backend::{EventId, Ran, StreamId};
use super::executor::{Executor, Part};
use super::program::Action;
use super::shared::Core;
use crate::Error;
use crate::float::Standard;
use crate::sync::Bell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// The longest time between two looks of the watchdog.
const LONGEST_PERIOD: Duration = Duration::from_secs(1);

/// The executor of an ordinary run.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    /// Looks whether a device is stuck.
    watchdog: Option<JoinHandle<()>>,
}

/// What the threads and the host tell each other. All numbers only grow.
struct Shared {
    core: Arc<Core>,
    bell: Bell,
    /// How many threads have started.
    started: AtomicUsize,
    /// The last step that may start.
    launched: AtomicU64,
    /// True if the second part of a step that pauses is what starts next.
    is_second: AtomicBool,
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
            is_second: AtomicBool::new(false),
            done: zeros(streams.len()),
            io: zeros(streams.len()),
            events: zeros(n_events),
        });
        // Made first, so that an error ends the threads that did start.
        let mut threads = Threads {
            shared,
            handles: Vec::new(),
            watchdog: None,
        };
        for (stream, name) in streams.iter().enumerate() {
            let shared = threads.shared.clone();
            // Thread names end at a zero byte, and so must not have one.
            let builder = Builder::new().name(name.replace('\0', " "));
            let handle = builder.spawn(move || shared.serve(StreamId(stream)));
            threads.handles.push(
                handle
                    .map_err(|e| Error::Resources(format!("no thread for stream {name}: {e}")))?,
            );
        }
        if let Some(patience) = core.backend.patience() {
            let shared = threads.shared.clone();
            let builder = Builder::new().name("watchdog".into());
            let handle = builder.spawn(move || shared.watch(patience));
            let handle = handle.map_err(|e| Error::Resources(format!("no watchdog: {e}")))?;
            threads.watchdog = Some(handle);
        }
        // What a thread sets up for itself is no part of a step.
        let shared = &threads.shared;
        shared
            .bell
            .wait(|| shared.started.load(Ordering::SeqCst) == streams.len());
        Ok(threads)
    }
}

impl Executor for Threads {
    fn launch(&mut self, step: u64) {
        self.shared.launched.store(step, Ordering::SeqCst);
        self.shared.bell.ring();
    }

    fn launch_part(&mut self, count: u64, part: Part) {
        let is_second = part == Part::Second;
        self.shared.is_second.store(is_second, Ordering::SeqCst);
        self.launch(count);
    }

    fn wait(&mut self) {
        let shared = &*self.shared;
        let launched = shared.launched.load(Ordering::SeqCst);
        let is_done = |done: &AtomicU64| done.load(Ordering::SeqCst) >= launched;
        shared
            .bell
            .wait(|| shared.done.iter().all(is_done) || shared.core.is_stuck());
    }

    fn wait_io(&mut self) {
        let shared = &*self.shared;
        let launched = shared.launched.load(Ordering::SeqCst);
        let streams = || shared.io.iter().zip(&shared.core.last_io);
        shared.bell.wait(|| {
            let is_done = |io: &AtomicU64| io.load(Ordering::SeqCst) >= launched;
            streams().all(|(io, last)| last.is_none() || is_done(io)) || shared.core.is_stuck()
        });
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.core.halt();
        self.shared.bell.ring();
        for handle in self.handles.drain(..).chain(self.watchdog.take()) {
            // A thread that is in a call of a stuck device's driver may never end; what it uses
            // stays with it.
            if self.shared.core.is_stuck() {
                continue;
            }
            // A thread whose panic escaped has nothing more to say.
            let _ = handle.join();
        }
    }
}

impl Shared {
    /// A stream's thread.
    fn serve(&self, stream: StreamId) {
        let _gone = Gone {
            shared: self,
            stream,
        };
        let _standard = Standard::enter();
        self.core.backend.enter(stream);
        self.started.fetch_add(1, Ordering::SeqCst);
        self.bell.ring();
        for step in 1.. {
            let launched = || step <= self.launched.load(Ordering::SeqCst);
            self.bell.wait(|| launched() || self.core.halted());
            if self.core.halted() || !self.step(stream, step) {
                return;
            }
            self.done[stream.0].store(step, Ordering::SeqCst);
            self.bell.ring();
        }
    }

    /// Submits one step of a stream; false if the machine stopped meanwhile.
    fn step(&self, stream: StreamId, step: u64) -> bool {
        let core = &*self.core;
        let mut ring = core.trace_ring(stream);
        let part = match self.is_second.load(Ordering::SeqCst) {
            true => Part::Second,
            false => Part::First,
        };
        for at in core.part(stream, part) {
            let instruction = &core.programs[stream.0][at];
            let start = ring.is_some().then(Instant::now);
            if let Action::Wait { event, previous } = instruction.action {
                self.wait_for(event, step - u64::from(previous));
                if core.halted() {
                    return false;
                }
            }
            if core.run(stream, at, step, ring.as_deref_mut()).is_err() || core.halted() {
                return false;
            }
            // Where the device waits, this thread did not.
            if let (Some(ring), Some(start)) = (&mut ring, start)
                && matches!(instruction.action, Action::Wait { .. })
                && !core.backend.is_queued(instruction.command)
            {
                let end = Instant::now();
                ring.note(at, step, Ran { start, end });
            }
            if let Action::Record { event } = instruction.action {
                self.events[event.0].store(step, Ordering::SeqCst);
                self.bell.ring();
            }
            if core.last_io[stream.0] == Some(at) {
                self.io[stream.0].store(step, Ordering::SeqCst);
                self.bell.ring();
            }
        }
        true
    }

    /// The watchdog's thread: stops the machine if the device has something to do and nothing
    /// moves.
    fn watch(&self, patience: Duration) {
        let core = &*self.core;
        let period = (patience / 8).min(LONGEST_PERIOD);
        let (mut before, mut since) = (None, Instant::now());
        while !self.bell.wait_at_most(period, || core.halted()) {
            let progress = core.backend.progress();
            if progress.is_none() || progress != before {
                (before, since) = (progress, Instant::now());
            } else if since.elapsed() > patience {
                core.give_up();
                self.bell.ring();
                return;
            }
        }
    }

    /// Returns when a step has recorded an event, or the machine has stopped.
    fn wait_for(&self, event: EventId, step: u64) {
        let recorded = || self.events[event.0].load(Ordering::SeqCst) >= step;
        self.bell.wait(|| recorded() || self.core.halted());
    }
}

/// Tells, however a thread ends, that it has.
struct Gone<'a> {
    shared: &'a Shared,
    stream: StreamId,
}

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        self.shared.core.halt();
        self.shared.done[self.stream.0].store(u64::MAX, Ordering::SeqCst);
        self.shared.io[self.stream.0].store(u64::MAX, Ordering::SeqCst);
        self.shared.bell.ring();
    }
}

#[cfg(test)]
mod tests {
    use super::super::backend::{Backend, CommandError, CommandId, Copy, Launch};
    use super::super::program::Instruction;
    use super::*;
    use artifact::{Kernel, Object, Place, Pool, Range};

    /// A backend whose launches do what a test wants.
    struct Misbehaving(fn() -> Result<(), CommandError>);

    impl Backend for Misbehaving {
        fn allocate(&mut self, _: &Pool) -> Result<(), Error> {
            Ok(())
        }
        fn load_object(&mut self, _: &Object) -> Result<(), Error> {
            Ok(())
        }
        fn load_kernel(&mut self, _: &Kernel) -> Result<(), Error> {
            Ok(())
        }
        fn prepare_launch(
            &mut self,
            _: CommandId,
            _: StreamId,
            _: Launch<'_>,
        ) -> Result<(), Error> {
            Ok(())
        }
        fn prepare_copy(&mut self, _: CommandId, _: StreamId, _: Copy) -> Result<(), Error> {
            Ok(())
        }
        fn write(&self, _: Place, _: &[u8]) -> Result<(), Error> {
            Ok(())
        }
        fn read(&self, _: Place, _: &mut [u8]) -> Result<(), Error> {
            Ok(())
        }
        fn fill(&self, _: Range, _: u8) -> Result<(), Error> {
            Ok(())
        }
        fn launch(&self, _: CommandId) -> Result<(), CommandError> {
            (self.0)()
        }
        fn copy(&self, _: CommandId) -> Result<(), CommandError> {
            Ok(())
        }
    }

    /// Two streams; the second waits for an event that the first never records, since its launch
    /// fails before.
    fn failing(run: fn() -> Result<(), CommandError>) -> Error {
        let instruction = |action| Instruction {
            command: CommandId(0),
            line: 0,
            reaches: [].into(),
            bytes: 0,
            action,
        };
        let event = EventId(0);
        let first = [Action::Launch, Action::Record { event }];
        let second = [Action::Wait {
            event,
            previous: false,
        }];
        let programs = vec![
            first.map(instruction).into(),
            second.map(instruction).into(),
        ];
        let lines = vec![artifact::Line {
            name: "h1".into(),
            why: "run".into(),
        }];
        let backend = Box::new(Misbehaving(run));
        let core = Arc::new(Core::new(backend, programs, vec![None; 2], lines, 0, None));
        let mut threads =
            Threads::new(&core, &["a".into(), "b\0".into()], 1).expect("two threads should start");
        threads.launch(1);
        threads.launch(2);
        threads.wait();
        core.failure().expect("the failure should be kept")
    }

    #[test]
    fn a_failure_releases_the_streams_that_wait() {
        let failure = failing(|| Err("index 9 is not in 0..4".to_string().into()));
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
