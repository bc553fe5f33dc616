//! The inputs of a kernel's generation: its instructions, their space, its operands and results.

use super::dag::Dag;
use super::lower::Known;
use ir::TensorType;
use ir::op::body::Space;

/// The inputs of a kernel's generation.
pub(super) struct Plan<'a> {
    pub(super) dag: &'a Dag,
    pub(super) space: &'a Space,
    pub(super) operands: &'a [TensorType],
    pub(super) results: &'a [Out],
}

/// A result.
pub(super) struct Out {
    /// The number of the body's value.
    pub(super) value: usize,
    pub(super) ty: TensorType,
    pub(super) known: Known,
}

impl Out {
    /// True for a sum over rows.
    pub(super) fn is_sum(&self) -> bool {
        matches!(self.known, Known::Columns { .. })
    }
}
