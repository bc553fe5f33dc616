//! The calling thread runs all streams: command after command in the artifact's order, which events
//! permit. No thread is woken, and none waits for another. Where copies are the processor's own
//! work, as kernels are, nothing is lost: the team shares both.

use super::backend::StreamId;
use super::executor::{Executor, Part};
use super::program::Action;
use super::shared::Core;
use crate::float::Standard;
use std::sync::Arc;
use std::thread::{self, ThreadId};

/// The executor of steps on the processor alone.
pub(crate) struct Inline {
    core: Arc<Core>,
    /// The launches and copies of each part: their streams, and their positions there.
    parts: [Vec<(StreamId, usize)>; 2],
    /// The thread that last told the backend that it submits.
    entered: Option<ThreadId>,
}

impl Inline {
    pub(crate) fn new(core: &Arc<Core>) -> Inline {
        Inline {
            core: core.clone(),
            parts: [Part::First, Part::Second].map(|part| in_order(core, part)),
            entered: None,
        }
    }

    fn run(&mut self, step: u64, part: Part) {
        let _standard = Standard::enter();
        let core = &*self.core;
        let here = thread::current().id();
        if self.entered != Some(here) {
            (0..core.programs.len()).for_each(|stream| core.backend.enter(StreamId(stream)));
            self.entered = Some(here);
        }
        for &(stream, at) in &self.parts[usize::from(part == Part::Second)] {
            let mut ring = core.trace_ring(stream);
            // A failure stops the machine, which keeps it.
            if core.run(stream, at, step, ring.as_deref_mut()).is_err() || core.halted() {
                return;
            }
        }
    }
}

/// The launches and copies of a part, in the artifact's order.
fn in_order(core: &Core, part: Part) -> Vec<(StreamId, usize)> {
    let streams = (0..core.programs.len()).map(StreamId);
    let all = streams.flat_map(|stream| core.part(stream, part).map(move |at| (stream, at)));
    let instruction = |&(stream, at): &(StreamId, usize)| &core.programs[stream.0][at];
    let does = |at: &_| matches!(instruction(at).action, Action::Launch | Action::Copy);
    let mut found: Vec<_> = all.filter(does).collect();
    found.sort_by_key(|at| instruction(at).command);
    found
}

impl Executor for Inline {
    fn launch(&mut self, step: u64) {
        self.run(step, Part::First);
    }

    fn launch_part(&mut self, count: u64, part: Part) {
        self.run(count, part);
    }

    fn wait(&mut self) {}

    fn wait_io(&mut self) {}
}
