//! The rules: from the adjoint of a node's first result to those of its operands, by families of
//! ops. A rule adds nodes only for operands that need an adjoint. If an op has a `_bwd` op, its
//! rule is that op. If a derivative can be computed from the result as well as from the operand,
//! the rule reads the result, unless a `_bwd` op decides it: readers of the result often keep it.
//!
//! Where a function has no derivative, a rule takes PyTorch's: its `derivatives.yaml` and
//! `FunctionsManual.cpp`.

mod attention;
mod elementwise;
mod loss;
mod norm;
mod product;
mod reduction;
mod shape;
mod table;
mod window;

use super::adjoints::Adjoint;
use super::tape::Tape;
pub(super) use attention::attention;
pub(super) use elementwise::{binary, dropout, scalar, unary};
use ir::graph;
use ir::{Op, Value};
pub(super) use loss::loss;
pub(super) use norm::norm;
pub(super) use product::product;
pub(super) use reduction::reduction;
pub(super) use shape::shape;
pub(super) use table::table;
pub(super) use window::window;

/// The node that is differentiated.
pub(super) struct Call<'a> {
    pub(super) op: &'a Op,
    pub(super) inputs: &'a [Value],
    pub(super) outputs: &'a [Value],
    /// Whether each operand needs an adjoint.
    pub(super) needs: &'a [bool],
    /// The adjoint of the first result.
    pub(super) dy: Value,
}

/// The adjoints of the operands, in their order; `None`, or nothing at the end, if there is none.
pub(super) type Given = Result<Vec<Option<Adjoint>>, Fault>;

/// A rule.
pub(super) type Apply = fn(&mut Tape<'_>, &Call<'_>) -> Given;

/// Why a rule gives nothing.
pub(super) enum Fault {
    /// The op with these attributes or operands has no derivative.
    Refused(&'static str),
    /// A node does not fit the graph.
    Graph(graph::Error),
}

impl Fault {
    /// The op is of another family: an entry in the table of rules is wrong.
    const STRAY: Fault = Fault::Refused("its rule is missing");
}

impl From<graph::Error> for Fault {
    fn from(error: graph::Error) -> Fault {
        Fault::Graph(error)
    }
}

/// The adjoint of the only operand.
fn only(value: Value) -> Given {
    Ok(vec![Some(value.into())])
}
