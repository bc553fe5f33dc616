//! Graphs of a stream's launches: kernels between which the stream neither waits, nor records an
//! event, nor copies are submitted by one call.
//!
//! A run of launches is submitted when its first one is. Nothing of another stream can be awaited
//! in between, so that changes no order.

use super::backend::CommandId;
use super::host::put;
use crate::cuda::{Arguments, Device, DriverError, Function, Graph, Grid, Stream};
use std::sync::Arc;

/// A kernel with its arguments.
pub(super) type Start<'a> = (&'a Function, Grid, Arc<Arguments>);

/// What a launch does if its stream has graphs.
enum Part {
    /// It launches a graph with itself and those that follow.
    First(Graph),
    /// A launch before it has done it.
    Done,
}

/// Graphs by their commands.
#[derive(Default)]
pub(super) struct Graphs {
    parts: Vec<Option<Part>>,
}

impl Graphs {
    /// Makes a graph of a run of launches, if it has more than one kernel.
    pub(super) fn add(
        &mut self,
        device: &Device,
        run: &[CommandId],
        starts: &[Start<'_>],
    ) -> Result<(), DriverError> {
        let [first, rest @ ..] = run else {
            return Ok(());
        };
        if starts.len() < 2 {
            return Ok(());
        }
        let starts = starts
            .iter()
            .map(|(f, grid, arguments)| (*f, *grid, &**arguments));
        let graph = Graph::new(device, starts)?;
        put(&mut self.parts, *first, Part::First(graph));
        for command in rest {
            put(&mut self.parts, *command, Part::Done);
        }
        Ok(())
    }

    /// Submits a launch that is part of a graph; false if it is part of none.
    pub(super) fn submit(&self, queue: &Stream, command: CommandId) -> Result<bool, DriverError> {
        match self.parts.get(command.0).and_then(Option::as_ref) {
            Some(Part::First(graph)) => queue.launch_graph(graph).map(|()| true),
            Some(Part::Done) => Ok(true),
            None => Ok(false),
        }
    }
}
