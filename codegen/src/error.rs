//! Why no artifact can be made for a program.

use crate::kernels::{GeneratorError, Unsupported};

/// Why code generation failed.
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
    /// Ops have no code for a GPU.
    #[error("{}", missing_text(.0))]
    NoDeviceCode(Vec<Missing>),
    /// The runtime's own kernels are for processors.
    #[error(
        "--kernels plain has no kernels for {0}; leave it out, or add --target cpu to compile for \
         this processor"
    )]
    PlainOnGpu(&'static str),
    /// Scratch differs by what runs the kernels.
    #[error("the step was planned for {planned} and cannot run on {target}: plan it for that")]
    Planned {
        /// What the schedule is for.
        planned: String,
        /// The target that was asked for.
        target: String,
    },
    /// The lines of a step in two parts are in a wrong order.
    #[error("line {line} runs before the pause, and needs what comes at the pause")]
    BeforePause {
        /// The line.
        line: String,
    },
    /// The schedule's buffers have no addresses.
    #[error("the program has no plan")]
    NoPlan,
    /// Kernels should be generated, but there is no target.
    #[error("no kernels are generated for this processor; --kernels plain has its own")]
    NoTarget,
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
        /// The reason.
        source: Unsupported,
    },
    /// A kernel needs more scratch than the plan gives it.
    #[error("node {node}: its kernel needs {needs} bytes of scratch, not {has}")]
    Scratch {
        /// The node.
        node: String,
        /// Bytes that the kernel needs.
        needs: u64,
        /// Bytes that the plan has.
        has: u64,
    },
    /// The size of a state's data differs from the state's size.
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

/// An op without code for a GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Missing {
    /// Its name.
    pub op: &'static str,
    /// The GPU's name.
    pub gpu: &'static str,
    /// The first node that computes it.
    pub node: String,
}

fn missing_text(missing: &[Missing]) -> String {
    let line = |m: &Missing| format!("\n  Unsupported: {} on {} (node {})", m.op, m.gpu, m.node);
    let lines: String = missing.iter().map(line).collect();
    format!(
        "the step has ops without kernels for this GPU; --target cpu compiles the same plan for \
         this processor{lines}"
    )
}
