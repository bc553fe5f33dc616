//! Runs steps on one thread, choosing at every command among the streams whose next command may
//! run. What events permit, some seed does: a plan that is right under many seeds does not lean on
//! timing. Steps that are launched together overlap as far as events let them. Dead bytes are
//! filled with NaNs, see [`dead`](super::dead).

use super::Core;
use super::dead::Dead;
use crate::init::mix;
use crate::program::Action;

/// The executor of a shuffled run.
pub(crate) struct Shuffle {
    seed: u64,
    dead: Dead,
    /// The last step that recorded each event.
    events: Vec<u64>,
    /// Where each stream is: its step, and its position in its program.
    at: Vec<(u64, usize)>,
    /// The last step in which each stream has done all that the host waits for in `wait_io`.
    io: Vec<u64>,
    /// Streams that may advance; kept to be reused.
    ready: Vec<usize>,
}

impl Shuffle {
    pub(crate) fn new(seed: u64, dead: Dead, n_events: usize, n_streams: usize) -> Shuffle {
        Shuffle {
            seed,
            dead,
            events: vec![0; n_events],
            at: vec![(1, 0); n_streams],
            io: vec![0; n_streams],
            ready: Vec::with_capacity(n_streams),
        }
    }

    /// Runs every stream up to the end of step `launched`.
    pub(crate) fn run(&mut self, core: &Core, launched: u64) {
        self.run_until(core, launched, |_| false);
    }

    /// Runs only until what touches inputs and outputs in step `launched` is done, wherever that
    /// leaves the rest.
    pub(crate) fn run_io(&mut self, core: &Core, launched: u64) {
        let done = |io: &[u64]| {
            io.iter()
                .zip(&core.last_io)
                .all(|(&io, last)| last.is_none() || launched <= io)
        };
        self.run_until(core, launched, done);
    }

    fn run_until(&mut self, core: &Core, launched: u64, enough: impl Fn(&[u64]) -> bool) {
        while !enough(&self.io) {
            self.ready.clear();
            for (stream, at) in self.at.iter_mut().enumerate() {
                let program = &core.programs[stream];
                if at.0 <= launched && at.1 == program.len() {
                    *at = if program.is_empty() {
                        (launched + 1, 0)
                    } else {
                        (at.0 + 1, 0)
                    };
                }
                let (step, next) = *at;
                let waits = match program.get(next).map(|instruction| &instruction.action) {
                    Some(&Action::Wait { event, previous }) => {
                        self.events[event] < step - u64::from(previous)
                    }
                    _ => false,
                };
                if step <= launched && !waits {
                    self.ready.push(stream);
                }
            }
            if self.ready.is_empty() {
                if self.at.iter().any(|&(step, _)| step <= launched) {
                    core.fail(
                        "?",
                        "no stream can run, though validation proved that one always can".into(),
                    );
                }
                return;
            }
            self.seed = mix(self.seed);
            let stream = self.ready[(self.seed % self.ready.len() as u64) as usize];
            let (step, next) = self.at[stream];
            let instruction = &core.programs[stream][next];
            match instruction.action {
                Action::Record { event } => self.events[event] = step,
                Action::Wait { .. } => {}
                _ => {
                    if core
                        .run(stream, next, step, core.trace_ring(stream).as_deref_mut())
                        .is_err()
                    {
                        return;
                    }
                }
            }
            self.dead.ran(instruction.command as usize);
            if core.last_io[stream] == Some(next) {
                self.io[stream] = step;
            }
            self.at[stream].1 += 1;
        }
    }
}
