//! Why a command fails, and its exit code.

use crate::interrupt;
use crate::size::{bytes, short};
use codegen::kernels::GeneratorError;
use passes::decide::{Infeasible, Planner};
use passes::plan::HostTooSmall;
use serde_json::{Value as Json, json};
use std::fmt;

/// Why a command failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The user's files or options are wrong.
    Input(String),
    /// No plan fits.
    NoFit(Box<Infeasible>),
    /// No plan fits, because the host's pool or the disk's is too small.
    HostTooSmall(Box<HostTooSmall>),
    /// No schedule of an offloading problem, or no plan of addresses, fits: the reason, and what
    /// `--json` prints of it, if it has not printed that already.
    NoSchedule(String, Option<Json>),
    /// The system refused: a disk is full, memory is short.
    System(String),
    /// Training computed NaNs or infinities, which would be saved.
    NotFinite(String),
    /// Our bug.
    Bug(String),
    /// Ctrl-C, or a signal.
    Interrupted(String),
}

impl From<gpu::Error> for Failure {
    fn from(error: gpu::Error) -> Failure {
        Failure::Input(format!("--{error}"))
    }
}

impl Failure {
    /// The exit code.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Failure::System(_) => 1,
            Failure::Input(_) => 2,
            Failure::NoFit(_) | Failure::HostTooSmall(_) | Failure::NoSchedule(..) => 3,
            Failure::NotFinite(_) => 4,
            Failure::Bug(_) => 101,
            Failure::Interrupted(_) => interrupt::code(),
        }
    }

    /// What `--json` prints: an object, if no plan fits.
    pub(crate) fn json(&self) -> Option<Json> {
        match self {
            Failure::NoFit(infeasible) => Some(shortage(infeasible)),
            Failure::HostTooSmall(host) => {
                let mut object = shortage(&host.infeasible);
                // The pool is the host's or the disk's.
                object[format!("{}_limit_bytes", host.pool)] = host.limit.into();
                object[format!("{}_bytes_that_fit", host.pool)] = host.enough.into();
                Some(object)
            }
            Failure::NoSchedule(_, object) => object.clone(),
            Failure::Input(_)
            | Failure::System(_)
            | Failure::NotFinite(_)
            | Failure::Bug(_)
            | Failure::Interrupted(_) => None,
        }
    }
}

/// The object that says that no plan fits.
fn shortage(infeasible: &Infeasible) -> Json {
    let live = infeasible
        .live
        .iter()
        .take(LISTED)
        .map(|(name, bytes)| json!({"name": name, "bytes": bytes}));
    json!({
        "error": "does not fit",
        "pool": infeasible.pool,
        "budget_bytes": infeasible.budget,
        "smallest_feasible_bytes": infeasible.smallest,
        "line": infeasible.line,
        "tensors": live.collect::<Vec<_>>(),
    })
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
            | Failure::NoSchedule(message, _)
            | Failure::NotFinite(message) => write!(f, "error: {message}"),
            Failure::NoFit(infeasible) => write!(f, "error: {}", no_fit(infeasible, None)),
            Failure::HostTooSmall(host) => {
                write!(f, "error: {}", no_fit(&host.infeasible, Some(host)))
            }
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
/// The same in an object.
const LISTED: usize = 10;

/// The tensors that do not fit, the pool, and what would fit: a larger budget, or, if the pool
/// behind the link is too small, a larger one.
fn no_fit(infeasible: &Infeasible, host: Option<&HostTooSmall>) -> String {
    let Infeasible {
        budget,
        smallest,
        line,
        live,
        pool,
        planner,
    } = infeasible;
    let (what, option) = match pool.as_str() {
        "host" => ("the host's pool", "--host "),
        "disk" => ("the disk's pool", "--disk DIR:"),
        _ => ("the device", "--budget "),
    };
    let mut text = format!(
        "the step does not fit {what}: it needs {}, and the limit is {}, {} too little",
        bytes(*smallest),
        bytes(*budget),
        short(smallest.saturating_sub(*budget))
    );
    text.push_str(&format!("\n  most is needed at  {line}"));
    push_tensors(&mut text, live);
    match host {
        None => text.push_str(&format!("\n  the smallest that fits: {option}{smallest}")),
        Some(host) => push_host(&mut text, infeasible, host),
    }
    if *planner != Planner::Auto {
        text.push_str("; --planner auto may do with less: it runs all planners");
    }
    // A budget below any tensor: the sign was forgotten.
    if pool == "device" && (1..=100).contains(budget) {
        text.push_str(&format!("; did you mean --budget {budget}%?"));
    }
    text
}

/// Adds what lies where most is needed.
fn push_tensors(text: &mut String, live: &[(String, u64)]) {
    let named = || live.iter().take(NAMED);
    let width = named().map(|(name, _)| name.len()).max().unwrap_or(0);
    for (k, (name, size)) in named().enumerate() {
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
}

/// Adds what fits if the pool behind the link is too small.
fn push_host(text: &mut String, infeasible: &Infeasible, host: &HostTooSmall) {
    let HostTooSmall {
        pool,
        option,
        limit,
        enough,
        ..
    } = host;
    let more = short(enough.saturating_sub(*limit));
    if infeasible.pool != *pool {
        text.push_str(&format!(
            "\n  a reason is the limit of the {pool}'s pool, {}\n  with this limit, the smallest \
             that fits: --budget {}",
            bytes(*limit),
            infeasible.smallest
        ));
    }
    text.push_str(&format!(
        "\n  with this budget fits: {option}{enough}, {more} more"
    ));
}
