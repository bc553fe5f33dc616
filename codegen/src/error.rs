//! Why a program has no artifact.

use crate::kernels::{GeneratorError, Unsupported};

/// What stops code generation.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An op that no kernel computes.
    #[error("Unsupported: {op} (node {node})")]
    Unsupported {
        /// The op's name where it was traced.
        op: String,
        /// The node.
        node: String,
    },
    /// The schedule's buffers have no addresses.
    #[error("the program has no plan")]
    NoPlan,
    /// Kernels are to be generated, and there is no target.
    #[error("no kernels are generated for this processor; --kernels plain has its own")]
    NoTarget,
    /// An artifact cannot hold code for a target.
    #[error("artifacts have no code for {target}")]
    NotInArtifacts {
        /// The target's name.
        target: &'static str,
    },
    /// A group of ops needs a generated kernel.
    #[error("node {node} is several ops in one kernel: compile with --kernels generated")]
    Group {
        /// The node.
        node: String,
    },
    /// A group of ops has no kernel.
    #[error("node {node}: {source}")]
    NoKernel {
        /// The node.
        node: String,
        /// What about it.
        source: Unsupported,
    },
    /// A kernel needs more scratch than the plan has for it.
    #[error("node {node}: its kernel needs {needs} bytes of scratch, not {has}")]
    Scratch {
        /// The node.
        node: String,
        /// Bytes that the kernel needs.
        needs: u64,
        /// Bytes that the plan has.
        has: u64,
    },
    /// A state's data have another size than the state.
    #[error("{path} should have {bytes} bytes, {given} are given")]
    Data {
        /// The state.
        path: String,
        /// The state's bytes.
        bytes: u64,
        /// The data's bytes.
        given: u64,
    },
    /// The program that compiles kernels failed.
    #[error(transparent)]
    Generator(#[from] GeneratorError),
}
