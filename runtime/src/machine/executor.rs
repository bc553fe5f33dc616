//! In which order the streams' commands reach the backend.

/// Submits each stream's instructions in their order, and those of different streams in an order
/// that events permit.
pub(crate) trait Executor: Send + Sync {
    /// Lets steps up to `step` start.
    fn launch(&mut self, step: u64);

    /// Returns when every stream has submitted what is launched, or has given up: then no thread of
    /// the executor calls the backend.
    fn wait(&mut self);

    /// Returns when every stream has submitted all that touches inputs and outputs, or has given
    /// up.
    fn wait_io(&mut self);
}
