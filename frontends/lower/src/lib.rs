//! Shared code of the front ends: one traced call becomes nodes of an [`ir::Graph`].
//!
//! A front end implements [`Arguments`] for its calls and makes a [`Call`] of each. An operator
//! reads its arguments from the call by name and plans nodes with it: a single op ([`Call::step`]),
//! or a composition of several (`elementwise`, `fourier`, `index`, `norm`, `product`, `reduce`,
//! `shape`, `source`). The result is a [`Plan`], which [`Plan::add_to`] adds to the graph. A call
//! that cannot be expressed leaves no trace in the graph; [`Plan::external`] makes one `extern`
//! node of it, so that the graph can still be planned.
//!
//! Nothing here depends on a file format or on the names of a framework's operators.

mod activation;
mod arguments;
mod call;
mod dims;
mod einsum;
mod elementwise;
mod error;
mod fourier;
mod index;
mod loss;
mod model;
mod norm;
mod number;
mod plan;
mod product;
mod readers;
mod recurrent;
mod reduce;
mod resize;
mod shape;
mod source;
mod window;

pub use arguments::{Argument, Arguments};
pub use call::{Attrs, Call};
pub use dims::{Range, attr_ints, count, wrap};
pub use elementwise::Rounding;
pub use error::{Error, FileError, Result};
pub use fourier::{ComplexParts, Transform};
pub use index::Indexed;
pub use model::{Tensor, Unsupported};
pub use norm::{Saved, Weights, statistics};
pub use number::{Operand, Scalar, bounds, promote};
pub use plan::{Added, Generator, Outside, Plan, Ref, Step};
pub use product::transposed;
pub use recurrent::{Cell, CellWeights, Function, Recurrence, STEPS};
pub use resize::{Axis, Kernel, LARGEST, Nearest};
pub use shape::Border;
pub use window::{Windows, convolution_attrs, spatial};

/// The results of a call; `None` for a result that nothing uses.
pub type Results = Vec<Option<Ref>>;

/// The result of a call with one result.
pub fn one(x: Ref) -> Result<Results> {
    Ok(vec![Some(x)])
}

/// The results of a call; all may be used.
pub fn all(list: Vec<Ref>) -> Result<Results> {
    Ok(list.into_iter().map(Some).collect())
}

/// An error with this reason, unless the condition holds.
pub fn ensure(condition: bool, why: &'static str) -> Result<()> {
    if condition {
        Ok(())
    } else {
        Err(Error::Inexpressible(why.into()))
    }
}
