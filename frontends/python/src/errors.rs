//! Failures as the exceptions of `lighterage.errors`.

use passes::pipeline;
use passes::plan::Infeasible as NoFit;
use pyo3::prelude::*;
use report::size::bytes;

pyo3::import_exception!(lighterage.errors, Error);
pyo3::import_exception!(lighterage.errors, Infeasible);

/// The base of all exceptions, with a message.
pub(crate) fn error(message: impl ToString) -> PyErr {
    Error::new_err(message.to_string())
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
