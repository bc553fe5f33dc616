//! What the threads of a machine share: the programs, the backend, and whether to go on.

use super::backend::{Backend, CommandError, StreamId};
use super::program::{Action, Instruction, Program};
use crate::Error;
use crate::sync::unpoisoned;
use crate::team::caught;
use crate::trace::{Ring, Trace};
use artifact::Line;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

/// Shared by the machine's front and its executor.
pub(crate) struct Core {
    pub(crate) backend: Box<dyn Backend>,
    /// Each stream's program.
    pub(crate) programs: Vec<Program>,
    /// In each stream's program, the last instruction that the host waits for in `wait_io`.
    pub(crate) last_io: Vec<Option<usize>>,
    pub(crate) lines: Vec<Line>,
    pub(crate) trace: Option<Trace>,
    /// One past the last byte of device 0's pool that was touched.
    pub(crate) touched: AtomicU64,
    /// True once no command shall start: something failed, or the machine is dropped.
    halted: AtomicBool,
    /// The first failure.
    failure: Mutex<Option<Error>>,
}

/// A command failed; the core has the reason.
pub(crate) struct Stopped;

impl Core {
    pub(crate) fn new(
        backend: Box<dyn Backend>,
        programs: Vec<Program>,
        last_io: Vec<Option<usize>>,
        lines: Vec<Line>,
        trace: Option<Trace>,
    ) -> Core {
        Core {
            backend,
            programs,
            last_io,
            lines,
            trace,
            touched: AtomicU64::new(0),
            halted: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    pub(crate) fn halted(&self) -> bool {
        self.halted.load(Ordering::SeqCst)
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
        let start = ring.is_some().then(Instant::now);
        self.told(instruction, || self.submit(stream, instruction, step))?;
        self.touch(instruction.device_end);
        if let (Some(ring), Some(start)) = (ring, start)
            && matches!(instruction.action, Action::Launch | Action::Copy)
        {
            ring.note(at, step, start);
        }
        if self.last_io[stream.0] == Some(at) {
            self.told(instruction, || self.backend.mark_io(stream, step))?;
        }
        Ok(())
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
        caught(run).map_err(|e| {
            self.fail(&self.lines[instruction.line as usize].name, e.why);
            Stopped
        })
    }

    /// Waits for the backend's part of what the host waits for; a failure stops the machine.
    pub(crate) fn synchronize(&self, wait: impl Fn(StreamId) -> Result<(), CommandError>) {
        for stream in (0..self.programs.len()).map(StreamId) {
            if let Err(e) = wait(stream) {
                self.fail("?", e.why);
            }
        }
    }

    /// Stops the machine. The first failure is the one that is told.
    pub(crate) fn fail(&self, line: &str, why: String) {
        unpoisoned(&self.failure).get_or_insert(Error::Failed {
            line: line.into(),
            why,
        });
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

    pub(crate) fn touch(&self, device_end: u64) {
        self.touched.fetch_max(device_end, Ordering::Relaxed);
    }
}
