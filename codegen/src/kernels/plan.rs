//! What a kernel is made from: its instructions, the space they run over, and what goes in and out.

use super::dag::Dag;
use super::lower::Known;
use ir::TensorType;
use ir::op::body::Space;

/// What a kernel is made from.
pub(super) struct Plan<'a> {
    pub(super) dag: &'a Dag,
    pub(super) space: &'a Space,
    pub(super) operands: &'a [TensorType],
    pub(super) results: &'a [Out],
}

/// A result.
pub(super) struct Out {
    /// Which value of the body it is.
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
