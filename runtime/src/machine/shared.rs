//! What the threads of a machine share: the programs, the backend, and whether to go on.

use super::backend::{Backend, CommandError, CommandId, Ran, StreamId};
use super::executor::Part;
use super::program::{Action, Instruction, Program};
use crate::Error;
use crate::access::Reach;
use crate::float::Standard;
use crate::sync::unpoisoned;
use crate::team::caught;
use crate::trace::{Ring, Trace};
use artifact::Line;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

/// Shared by the machine's front and its executor.
pub(crate) struct Core {
    pub(crate) backend: Box<dyn Backend>,
    /// Each stream's program.
    pub(crate) programs: Vec<Program>,
    /// In a step that pauses, the number of each stream's instructions before the pause.
    pub(crate) cuts: Option<Vec<usize>>,
    /// In each stream's program, the last instruction that the host waits for in `wait_io`.
    pub(crate) last_io: Vec<Option<usize>>,
    pub(crate) lines: Vec<Line>,
    pub(crate) trace: Option<Trace>,
    /// One past the last byte of each pool that was touched.
    pub(crate) touched: Box<[AtomicU64]>,
    /// True once no command shall start: something failed, or the machine is dropped.
    halted: AtomicBool,
    /// True once the device is stuck: threads may never return from its driver.
    is_stuck: AtomicBool,
    /// The first failure.
    failure: Mutex<Option<Error>>,
}

/// In a traced run, a command of a device begins once this many steps before it ran it to its end:
/// the backend keeps the times of that many.
const QUEUED_STEPS: u64 = 2;

/// A command failed; the core has the reason.
pub(crate) struct Stopped;

impl Core {
    pub(crate) fn new(
        backend: Box<dyn Backend>,
        programs: Vec<Program>,
        last_io: Vec<Option<usize>>,
        lines: Vec<Line>,
        n_pools: usize,
        trace: Option<Trace>,
    ) -> Core {
        Core {
            backend,
            programs,
            cuts: None,
            last_io,
            lines,
            trace,
            touched: (0..n_pools).map(|_| AtomicU64::new(0)).collect(),
            halted: AtomicBool::new(false),
            is_stuck: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    /// The positions of a stream's program that a part of a step runs.
    pub(crate) fn part(&self, stream: StreamId, part: Part) -> Range<usize> {
        let length = self.programs[stream.0].len();
        let cut = self.cuts.as_ref().map(|cuts| cuts[stream.0]);
        match (cut, part) {
            (None, _) => 0..length,
            (Some(cut), Part::First) => 0..cut,
            (Some(cut), Part::Second) => cut..length,
        }
    }

    pub(crate) fn halted(&self) -> bool {
        self.halted.load(Ordering::SeqCst)
    }

    pub(crate) fn is_stuck(&self) -> bool {
        self.is_stuck.load(Ordering::SeqCst)
    }

    /// The device is stuck: stops the machine, and nobody waits for its threads any more.
    pub(crate) fn give_up(&self) {
        // Threads that wait for the device end with errors of their own once it is given up. This
        // one comes before them, because it says what helps.
        self.fail_at(&self.backend.diagnose());
        self.backend.give_up();
        self.is_stuck.store(true, Ordering::SeqCst);
    }

    /// No command starts from now on.
    pub(crate) fn halt(&self) {
        self.halted.store(true, Ordering::SeqCst);
        self.backend.halt();
    }

    pub(crate) fn trace_ring(&self, stream: StreamId) -> Option<MutexGuard<'_, Ring>> {
        self.trace.as_ref().map(|trace| trace.ring(stream.0))
    }

    /// Has the backend run the instruction at a position of a stream's program. A wait's event is
    /// recorded already.
    pub(crate) fn run(
        &self,
        stream: StreamId,
        at: usize,
        step: u64,
        ring: Option<&mut Ring>,
    ) -> Result<(), Stopped> {
        let instruction = &self.programs[stream.0][at];
        match ring {
            Some(ring) => self.timed(stream, at, step, ring)?,
            None => self.told(instruction, || self.submit(stream, instruction, step))?,
        }
        self.touch(&*instruction.reaches);
        if self.last_io[stream.0] == Some(at) {
            self.told(instruction, || self.backend.mark_io(stream, step))?;
        }
        Ok(())
    }

    /// Has the backend run launches and copies, by stream and position, one after the other, while
    /// nothing else runs. Events do not change.
    pub(crate) fn run_alone(&self, commands: &[(StreamId, usize)]) -> Result<(), Stopped> {
        let _standard = Standard::enter();
        // Another thread than the streams' submits.
        (0..self.programs.len()).for_each(|stream| self.backend.enter(StreamId(stream)));
        for &(stream, at) in commands {
            let instruction = &self.programs[stream.0][at];
            self.told(instruction, || {
                self.submit(stream, instruction, 0)?;
                self.backend.synchronize(stream)
            })?;
            self.touch(&*instruction.reaches);
        }
        Ok(())
    }

    /// Has the backend run an instruction and notes when it ran: now, or once it is known.
    fn timed(
        &self,
        stream: StreamId,
        at: usize,
        step: u64,
        ring: &mut Ring,
    ) -> Result<(), Stopped> {
        let instruction = &self.programs[stream.0][at];
        let command = instruction.command;
        if self.backend.is_queued(command) {
            return self.told(instruction, || {
                if let Some(before) = step.checked_sub(QUEUED_STEPS) {
                    self.note_queued(at, command, before, ring)?;
                }
                self.backend.begin(stream, command, step)?;
                self.submit(stream, instruction, step)?;
                self.backend.end(stream, command, step)
            });
        }
        let start = Instant::now();
        self.told(instruction, || self.submit(stream, instruction, step))?;
        match instruction.action {
            Action::Launch | Action::Copy => {
                let end = Instant::now();
                ring.note(at, step, Ran { start, end });
            }
            // A wait is noted by the thread that waits.
            Action::Record { .. } | Action::Wait { .. } => {}
        }
        Ok(())
    }

    /// Notes when the device ran a command, if it did.
    fn note_queued(
        &self,
        at: usize,
        command: CommandId,
        step: u64,
        ring: &mut Ring,
    ) -> Result<(), CommandError> {
        if let Some(ran) = self.backend.ran(command, step)? {
            ring.note(at, step, ran);
        }
        Ok(())
    }

    /// Once everything up to a step is done: notes when the device ran what is not noted yet.
    pub(crate) fn note_last(&self, step: u64) {
        if self.trace.is_none() || self.halted() {
            return;
        }
        for stream in (0..self.programs.len()).map(StreamId) {
            let Some(mut ring) = self.trace_ring(stream) else {
                return;
            };
            for step in step.saturating_sub(QUEUED_STEPS - 1)..=step {
                for (at, instruction) in self.programs[stream.0].iter().enumerate() {
                    let noted = self.told(instruction, || {
                        self.note_queued(at, instruction.command, step, &mut ring)
                    });
                    if noted.is_err() {
                        return;
                    }
                }
            }
        }
    }

    fn submit(
        &self,
        stream: StreamId,
        instruction: &Instruction,
        step: u64,
    ) -> Result<(), CommandError> {
        let command = instruction.command;
        match instruction.action {
            Action::Launch => self.backend.launch(command),
            Action::Copy => self.backend.copy(command),
            Action::Record { event } => self.backend.record(stream, event, step),
            Action::Wait { event, previous } => {
                let step = step - u64::from(previous);
                // What no step has recorded, no step waits for.
                if step == 0 {
                    return Ok(());
                }
                self.backend.wait(stream, event, step)
            }
        }
    }

    /// Calls the backend for an instruction; a failure, or a panic, stops the machine.
    fn told(
        &self,
        instruction: &Instruction,
        run: impl FnOnce() -> Result<(), CommandError>,
    ) -> Result<(), Stopped> {
        // Kernels return errors. A panic is a bug in one; it must not leave the other streams
        // waiting for this one.
        caught(run).map_err(|e: CommandError| {
            self.fail_at(&e.at(instruction.command));
            Stopped
        })
    }

    /// The line of a command.
    fn line(&self, command: CommandId) -> u32 {
        let mut all = self.programs.iter().flat_map(|program| program.iter());
        let found = all.find(|instruction| instruction.command == command);
        found.map_or(0, |instruction| instruction.line)
    }

    /// Waits for the backend's part of what the host waits for; a failure stops the machine.
    pub(crate) fn synchronize(&self, wait: impl Fn(StreamId) -> Result<(), CommandError>) {
        for stream in (0..self.programs.len()).map(StreamId) {
            if let Err(e) = wait(stream) {
                self.fail_at(&e);
            }
        }
    }

    /// Stops the machine for an error that says at which command, if at any.
    pub(crate) fn fail_at(&self, error: &CommandError) {
        let line = error.command.map(|command| self.line(command) as usize);
        let line = line.map_or("?", |line| &self.lines[line].name);
        let (line, why) = (line.to_string(), error.why.clone());
        self.stop(match error.of_device {
            true => Error::Device { line, why },
            false => Error::Failed { line, why },
        });
    }

    /// Stops the machine for a reason in a line.
    pub(crate) fn fail(&self, line: &str, why: String) {
        let line = line.into();
        self.stop(Error::Failed { line, why });
    }

    /// Stops the machine. The first failure is the one that is told.
    fn stop(&self, error: Error) {
        unpoisoned(&self.failure).get_or_insert(error);
        self.halt();
    }

    /// Why the machine has stopped, if it has.
    pub(crate) fn failure(&self) -> Option<Error> {
        if !self.halted() {
            return None;
        }
        let ended = || Error::Failed {
            line: "?".into(),
            why: "a stream's thread ended".into(),
        };
        Some(unpoisoned(&self.failure).clone().unwrap_or_else(ended))
    }

    /// Notes how far something reached into pools.
    pub(crate) fn touch<'a>(&self, reaches: impl IntoIterator<Item = &'a Reach>) {
        for reach in reaches {
            self.touched[reach.pool].fetch_max(reach.end, Ordering::Relaxed);
        }
    }
}
