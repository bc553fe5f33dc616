//! What every reader returns besides the graph.

use ir::TensorType;

/// A tensor's type and elements.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tensor {
    /// Element type and shape.
    pub ty: TensorType,
    /// Row-major, contiguous, little-endian.
    pub data: Vec<u8>,
}

/// A call without a counterpart in the op table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unsupported {
    /// The called operator: `torch.ops.aten.sort.default`, `NonZero`.
    pub target: String,
    /// The node's name in the file.
    pub node: String,
    /// The reason.
    pub why: String,
}
