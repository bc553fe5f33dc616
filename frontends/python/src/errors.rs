//! Failures as the exceptions of `lighterage.errors`.

use passes::pipeline;
use passes::plan::Infeasible as NoFit;
use pyo3::prelude::*;
use report::size::bytes;

pyo3::import_exception!(lighterage.errors, Error);
pyo3::import_exception!(lighterage.errors, Infeasible);

/// The base of all exceptions, with a message.
pub(crate) fn error(message: impl ToString) -> PyErr {
    Error::new_err(in_python(&message.to_string()))
}

/// Options of the command line that are keywords of the package too.
const KEYWORDS: [&str; 10] = [
    "base",
    "budget",
    "device",
    "host",
    "kernels",
    "master",
    "precision",
    "profile",
    "reduction",
    "rounding",
];

/// Values of these options in messages.
const VALUES: [&str; 7] = [
    "full",
    "generated",
    "mean",
    "plain",
    "split",
    "stochastic",
    "sum",
];

/// A message of the compiler in Python's words: `master="split"` for `--master split`.
fn in_python(message: &str) -> String {
    let (mut said, mut rest) = (String::new(), message);
    while let Some((before, after)) = rest.split_once("--") {
        said.push_str(before);
        let end = after.find(|c: char| !c.is_ascii_lowercase() && c != '-');
        let (name, later) = after.split_at(end.unwrap_or(after.len()));
        if !KEYWORDS.contains(&name) {
            said.push_str("--");
            rest = after;
            continue;
        }
        said.push_str(name);
        rest = later;
        let Some(text) = later.strip_prefix(' ') else {
            continue;
        };
        let end = text.find(|c: char| !c.is_ascii_alphanumeric());
        let (value, later) = text.split_at(end.unwrap_or(text.len()));
        let is_number = value.parse::<u64>().is_ok();
        let is_size = value.starts_with(|c: char| c.is_ascii_digit());
        if is_size || VALUES.contains(&value) {
            let quote = if is_number { "" } else { "\"" };
            said.push_str(&format!("={quote}{value}{quote}"));
            rest = later;
        }
    }
    said + rest
}

/// A step that the compiler refused.
pub(crate) fn refused(error: pipeline::Error) -> PyErr {
    match error {
        pipeline::Error::Infeasible(no_fit) => infeasible(&no_fit, ""),
        pipeline::Error::HostTooSmall(host) => {
            let enough = bytes(host.enough);
            let help = format!("; with host={enough} a plan fits this budget");
            infeasible(&host.infeasible, &help)
        }
        other @ (pipeline::Error::Graph { .. }
        | pipeline::Error::Illegal(_)
        | pipeline::Error::Broken { .. }
        | pipeline::Error::Diverged { .. }) => self::error(other),
    }
}

fn infeasible(no_fit: &NoFit, help: &str) -> PyErr {
    let NoFit {
        budget, smallest, ..
    } = *no_fit;
    let message = format!(
        "no plan fits {} of {} memory; the smallest budget for which one was found is {}, and its \
         fullest line is `{}`{help}",
        bytes(budget),
        no_fit.pool,
        bytes(smallest),
        no_fit.line
    );
    Infeasible::new_err((message, budget, smallest))
}

/// A call without a kernel: the operator, the node, the path of its module, the reason.
pub(crate) type Call = (String, String, String, String);
