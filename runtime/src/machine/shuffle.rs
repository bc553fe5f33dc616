//! One thread for all streams. It chooses at every command among the streams whose next command may
//! run. What events permit, some seed does: a plan that is right under many seeds does not depend
//! on timing. Steps that are launched together overlap as far as events let them. Dead bytes are
//! filled with NaNs, see [`dead`](super::dead).

use super::backend::StreamId;
use super::dead::Dead;
use super::executor::{Executor, Part};
use super::program::Action;
use super::shared::Core;
use crate::init::mix;
use std::sync::Arc;
use std::thread::{self, ThreadId};

/// The executor of a shuffled run.
pub(crate) struct Shuffle {
    core: Arc<Core>,
    seed: u64,
    dead: Dead,
    /// The last step that may start.
    launched: u64,
    /// The last step that recorded each event.
    events: Vec<u64>,
    /// Where each stream is: its step, and its position in its program.
    at: Vec<(u64, usize)>,
    /// The last step in which each stream has done all that the host waits for in `wait_io`.
    io: Vec<u64>,
    /// Streams that may advance; kept to be reused.
    ready: Vec<StreamId>,
    /// The thread that last told the backend that it submits.
    entered: Option<ThreadId>,
}

impl Shuffle {
    pub(crate) fn new(core: &Arc<Core>, seed: u64, dead: Dead, n_events: usize) -> Shuffle {
        let n_streams = core.programs.len();
        Shuffle {
            core: core.clone(),
            seed,
            dead,
            launched: 0,
            events: vec![0; n_events],
            at: vec![(1, 0); n_streams],
            io: vec![0; n_streams],
            ready: Vec::with_capacity(n_streams),
            entered: None,
        }
    }

    /// Runs commands until there is none left, or until `enough` says so of `io`.
    fn run_until(&mut self, enough: impl Fn(&[u64]) -> bool) {
        self.enter();
        while !self.core.halted() && !enough(&self.io) {
            self.find_ready();
            if self.ready.is_empty() {
                if self.at.iter().any(|&(step, _)| step <= self.launched) {
                    self.core.fail(
                        "?",
                        "no stream can run, though validation proved that one always can".into(),
                    );
                }
                return;
            }

            self.seed = mix(self.seed);
            let stream = self.ready[(self.seed % self.ready.len() as u64) as usize];
            self.advance(stream);
        }
    }

    /// Tells the backend which thread submits, if it is another than before.
    fn enter(&mut self) {
        let here = thread::current().id();
        if self.entered != Some(here) {
            (0..self.at.len()).for_each(|stream| self.core.backend.enter(StreamId(stream)));
            self.entered = Some(here);
        }
    }

    /// Lists the streams whose next command may run.
    fn find_ready(&mut self) {
        self.ready.clear();
        for (stream, at) in self.at.iter_mut().enumerate() {
            let program = &self.core.programs[stream];
            if at.0 <= self.launched && at.1 == program.len() {
                let step = if program.is_empty() {
                    self.launched + 1
                } else {
                    at.0 + 1
                };
                *at = (step, 0);
            }
            let (step, next) = *at;
            let waits = match program.get(next).map(|instruction| instruction.action) {
                Some(Action::Wait { event, previous }) => {
                    self.events[event.0] < step - u64::from(previous)
                }
                _ => false,
            };
            if step <= self.launched && !waits {
                self.ready.push(StreamId(stream));
            }
        }
    }

    /// Runs a stream's next command to its end.
    fn advance(&mut self, stream: StreamId) {
        let core = &*self.core;
        let (step, next) = self.at[stream.0];
        let instruction = &core.programs[stream.0][next];
        let mut ring = core.trace_ring(stream);
        if core.run(stream, next, step, ring.as_deref_mut()).is_err() {
            return;
        }
        match instruction.action {
            Action::Record { event } => self.events[event.0] = step,
            Action::Wait { .. } => {}
            // Bytes may be filled only after the command that read them has ended.
            Action::Launch | Action::Copy => {
                let line = &core.lines[instruction.line as usize].name;
                if let Err(e) = core.backend.synchronize(stream) {
                    return core.fail_at(&e.at(instruction.command));
                }
                if let Err(e) = self.dead.ran(instruction.command, &*core.backend) {
                    return core.fail(line, e.to_string());
                }
            }
        }
        if core.last_io[stream.0] == Some(next) {
            self.io[stream.0] = step;
        }
        self.at[stream.0].1 += 1;
    }
}

impl Executor for Shuffle {
    /// Nothing runs before the host waits.
    fn launch(&mut self, step: u64) {
        self.launched = step;
    }

    fn launch_part(&mut self, _: u64, _: Part) {
        self.core.fail("?", "a shuffled run has no parts".into());
    }

    fn wait(&mut self) {
        self.run_until(|_| false);
    }

    /// Leaves what does not touch inputs and outputs wherever the order has it then.
    fn wait_io(&mut self) {
        let core = self.core.clone();
        let launched = self.launched;
        self.run_until(|io| {
            let mut streams = io.iter().zip(&core.last_io);
            streams.all(|(&io, last)| last.is_none() || io >= launched)
        });
    }
}
