//! Graphs: kernels that are launched by one call. Each comes after the one before it.

use super::context::Context;
use super::device::Device;
use super::driver::{Arguments, DriverError, Grid, Handle};
use super::module::Function;
use super::stream::Stream;
use std::fmt;
use std::sync::Arc;

/// Kernels in an order, ready to be launched. A launch waits for the one before it.
pub struct Graph {
    context: Arc<Context>,
    handle: Handle,
    /// Their modules stay loaded.
    _functions: Vec<Function>,
}

/// A graph that is being made.
struct Draft<'a> {
    context: &'a Context,
    handle: Handle,
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        self.context
            .destroy(|driver| driver.graph_destroy(self.handle));
    }
}

impl Graph {
    /// A graph of these kernels with these arguments.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn new<'a>(
        device: &Device,
        kernels: impl IntoIterator<Item = (&'a Function, Grid, &'a Arguments)>,
    ) -> Result<Graph, DriverError> {
        let context = device.context();
        let handle = context.call(super::driver::Driver::graph_create)?;
        let draft = Draft { context, handle };
        let (mut last, mut functions) = (None, vec![]);
        for (function, grid, arguments) in kernels {
            let handle = function.handle();
            let node = context
                .call(|driver| driver.graph_kernel(draft.handle, last, handle, grid, arguments))?;
            last = Some(node);
            functions.push(function.clone());
        }
        let handle = context.call(|driver| driver.graph_instantiate(draft.handle))?;
        Ok(Graph {
            context: context.clone(),
            handle,
            _functions: functions,
        })
    }
}

impl Stream {
    /// Starts the kernels of a graph.
    pub fn launch_graph(&self, graph: &Graph) -> Result<(), DriverError> {
        self.context()
            .call(|driver| driver.graph_launch(graph.handle, self.handle()))
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Graph").field(&self.handle).finish()
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.context
            .destroy(|driver| driver.graph_exec_destroy(self.handle));
    }
}
