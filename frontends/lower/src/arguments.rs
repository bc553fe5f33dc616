//! A call's arguments, which each front end provides.

use crate::{Result, Scalar};
use ir::{DType, Value};

/// An argument, once names and symbolic sizes are resolved.
#[derive(Clone, PartialEq, Debug)]
pub enum Argument {
    /// A tensor of the graph.
    Tensor(Value),
    /// Tensors, some of which may be absent. An empty list also counts as a list of integers.
    Tensors(Vec<Option<Value>>),
    /// A boolean, an integer or a float.
    Number(Scalar),
    /// Integers: sizes, dimensions.
    Ints(Vec<i64>),
    /// Floats.
    Floats(Vec<f64>),
    /// Booleans.
    Bools(Vec<bool>),
    /// A string.
    Text(String),
    /// Strings.
    Texts(Vec<String>),
    /// An element type.
    Type(DType),
    /// Something that no op accepts.
    Other,
}

/// The arguments of one call, by name. They are resolved when they are read, so an argument that
/// nothing reads cannot fail.
pub trait Arguments {
    /// An argument; `None` if it is not given. It then counts as read.
    fn read(&mut self, name: &str) -> Result<Option<Argument>>;
    /// Counts an argument as read, if it is given. For an argument that does not change the
    /// results.
    fn skip(&mut self, name: &str);
    /// An error if an argument that may change the results was not read.
    fn finish(&self) -> Result<()>;
}
