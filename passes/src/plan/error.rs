//! Why there is no program.

use super::options::Planner;
use std::fmt;
use thiserror::Error;

/// Why there is no program.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum Error {
    /// A graph pass cannot apply the options to the user's graph.
    #[error("{message}")]
    Graph {
        /// The pass.
        pass: &'static str,
        /// Its message.
        message: String,
    },
    /// Decisions that no schedule can carry out.
    #[error(transparent)]
    Illegal(#[from] Illegal),
    /// No plan fits.
    #[error(transparent)]
    Infeasible(Box<Infeasible>),
    /// No plan fits, because the host's pool is limited; with a larger one, a plan fits.
    #[error(transparent)]
    HostTooSmall(Box<HostTooSmall>),
    /// A pass broke the program: a bug of this compiler.
    #[error(
        "pass {pass} left a program that is not right ({summary}); this is a bug of lighterage"
    )]
    Broken {
        /// The pass.
        pass: &'static str,
        /// The number of findings, and the first one.
        summary: String,
        /// The program, with all findings under their lines.
        text: String,
    },
    /// The figures of the compiled program differ from those of the chosen plan: a bug of this
    /// compiler.
    #[error(
        "the chosen plan needs {planned} bytes and {planned_micros} us, the compiled program \
         {compiled} bytes and {compiled_micros} us; this is a bug of lighterage"
    )]
    Diverged {
        /// Peak of the device in the plan, bytes.
        planned: u64,
        /// Peak of the device in the program, bytes.
        compiled: u64,
        /// Step time of the plan, µs.
        planned_micros: f64,
        /// Step time of the program, µs.
        compiled_micros: f64,
    },
}

/// Decisions that no schedule can carry out.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum Illegal {
    /// No line computes an output.
    #[error("output {0} is not computed")]
    NotComputed(String),
    /// A chunk holds a state that lives on the device.
    #[error("chunk {chunk} holds {state}, which does not live on the host")]
    ChunkAtHome {
        /// The chunk's position.
        chunk: usize,
        /// The state's path.
        state: String,
    },
    /// A state is in two chunks.
    #[error("{0} is in two chunks")]
    InTwoChunks(String),
    /// The disk's pool is larger than it may be.
    #[error("the disk's pool needs {needs} bytes and may have {has}")]
    DiskTooSmall {
        /// What it needs, bytes.
        needs: u64,
        /// What it may have, bytes.
        has: u64,
    },
    /// A node that should run again is an update, or is not pure.
    #[error("{0} cannot run again")]
    Rerun(String),
    /// A value that should be computed again is an input or a state.
    #[error("%{0} cannot be computed again: no node computes it")]
    NoNode(String),
    /// A value that should be computed again needs an op that is not pure.
    #[error("%{value} cannot be computed again: {op} is not pure")]
    NotPure {
        /// The value.
        value: String,
        /// The op.
        op: String,
    },
}

/// No plan fits.
#[derive(Clone, PartialEq, Debug, Error)]
pub struct Infeasible {
    /// The pool's limit, bytes: the budget, if it is the device's.
    pub budget: u64,
    /// The smallest limit that would fit, bytes.
    pub smallest: u64,
    /// The line of the smallest plan that needs most.
    pub line: String,
    /// What is in memory there: name, bytes; largest first.
    pub live: Vec<(String, u64)>,
    /// The pool that does not have enough bytes: `device`, `host` or `disk`.
    pub pool: String,
    /// The planner that decided.
    pub planner: Planner,
}

impl fmt::Display for Infeasible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let largest: Vec<String> = self
            .live
            .iter()
            .take(6)
            .map(|(name, bytes)| format!("{name} {bytes}"))
            .collect();
        let Infeasible {
            pool,
            smallest,
            line,
            budget,
            ..
        } = self;
        let largest = largest.join(", ");
        write!(
            f,
            "does not fit: {pool} needs {smallest} bytes at `{line}`; "
        )?;
        match pool == "device" {
            true => write!(
                f,
                "the budget is {budget} bytes. Largest there: {largest}. `--budget {smallest}` fits"
            ),
            false => write!(f, "it has {budget}. Largest there: {largest}"),
        }
    }
}

/// No plan fits into the device and a pool of limited size behind its link.
#[derive(Clone, PartialEq, Debug, Error)]
#[error(
    "{infeasible}. The pool {pool} is limited to {limit} bytes; with `{option}{enough}` a plan \
     fits this budget"
)]
pub struct HostTooSmall {
    /// What does not fit with the limit.
    pub infeasible: Infeasible,
    /// The pool that is limited: `host`, or `disk`.
    pub pool: String,
    /// The option that limits it, up to the number.
    pub option: &'static str,
    /// The limit of the pool, bytes.
    pub limit: u64,
    /// Bytes of the pool with which a plan fits. Somewhat fewer may be enough, too.
    pub enough: u64,
}
