//! Why a command fails, and its exit code.

use crate::size::bytes;
use codegen::kernels::GeneratorError;
use passes::decide::{Infeasible, Planner};
use std::fmt;

/// Why a command failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The user's files or options are wrong.
    Input(String),
    /// No plan fits.
    NoFit(Box<Infeasible>),
    /// No schedule of an offloading problem, or no plan of addresses, fits: the reason.
    NoSchedule(String),
    /// The system refused: a disk is full, memory is short.
    System(String),
    /// Training computed NaNs or infinities, which would be saved.
    NotFinite(String),
    /// Our bug.
    Bug(String),
    /// The user pressed Ctrl-C.
    Interrupted(String),
}

impl Failure {
    /// The exit code.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Failure::System(_) => 1,
            Failure::Input(_) => 2,
            Failure::NoFit(_) | Failure::NoSchedule(_) => 3,
            Failure::NotFinite(_) => 4,
            Failure::Bug(_) => 101,
            Failure::Interrupted(_) => 130,
        }
    }
}

impl From<codegen::Error> for Failure {
    fn from(error: codegen::Error) -> Failure {
        match &error {
            codegen::Error::Generator(GeneratorError::System(_)) => {
                Failure::System(error.to_string())
            }
            _ => Failure::Input(error.to_string()),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Input(message)
            | Failure::System(message)
            | Failure::NoSchedule(message)
            | Failure::NotFinite(message) => write!(f, "error: {message}"),
            Failure::NoFit(infeasible) => write!(f, "error: {}", no_fit(infeasible)),
            Failure::Bug(message) => {
                write!(
                    f,
                    "internal error: {message}; this is a bug of lighterage, please report it"
                )
            }
            Failure::Interrupted(message) => f.write_str(message),
        }
    }
}

/// The largest number of listed tensors that do not fit.
const NAMED: usize = 8;

/// The tensors that do not fit, the pool, and the smallest budget that fits.
fn no_fit(infeasible: &Infeasible) -> String {
    let Infeasible {
        budget,
        smallest,
        line,
        live,
        pool,
        planner,
    } = infeasible;
    let (what, option) = match pool.as_str() {
        "host" => ("the host's pool", "--host"),
        _ => ("the device", "--budget"),
    };
    let mut text = format!(
        "the step does not fit {what}: it needs {}, and the limit is {}",
        bytes(*smallest),
        bytes(*budget)
    );
    text.push_str(&format!("\n  most is needed at  {line}"));
    let width = live
        .iter()
        .take(NAMED)
        .map(|(name, _)| name.len())
        .max()
        .unwrap_or(0);
    for (k, (name, size)) in live.iter().take(NAMED).enumerate() {
        let head = if k == 0 { "what lies there  " } else { "" };
        text.push_str(&format!("\n  {head:<17}  {name:<width$}  {}", bytes(*size)));
    }
    if NAMED < live.len() {
        let rest: u64 = live[NAMED..].iter().map(|(_, size)| size).sum();
        text.push_str(&format!(
            "\n  {:<17}  and {} more, {}",
            "",
            live.len() - NAMED,
            bytes(rest)
        ));
    }
    text.push_str(&format!("\n  the smallest that fits: {option} {smallest}"));
    if *planner != Planner::Auto {
        text.push_str("; --planner auto may do with less: it runs all planners");
    }
    // A budget below any tensor: the sign was forgotten.
    if (1..=100).contains(budget) {
        text.push_str(&format!("; did you mean {option} {budget}%?"));
    }
    text
}
