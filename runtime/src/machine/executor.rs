//! In which order the streams' commands reach the backend.

/// A part of a step that pauses. A step that does not is its first part.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Part {
    /// What comes before the pause.
    #[default]
    First,
    /// What comes after it.
    Second,
}

/// Submits each stream's instructions in their order, and those of different streams in an order
/// that events permit.
pub(crate) trait Executor: Send + Sync {
    /// Lets steps up to `step` start.
    fn launch(&mut self, step: u64);

    /// Lets one part of a step start. Parts are counted like steps, and nothing runs meanwhile.
    fn launch_part(&mut self, count: u64, part: Part);

    /// Returns when every stream has submitted what is launched, or has given up: then no thread of
    /// the executor calls the backend.
    fn wait(&mut self);

    /// Returns when every stream has submitted all that touches inputs and outputs, or has given
    /// up.
    fn wait_io(&mut self);
}
