//! Which elements an op of a body combines. Only here do bodies distinguish ops.

use crate::op::Op;
use crate::op::attrs::Reduction;

/// What an op combines. Ops that combine nothing compute each element separately.
#[derive(Clone, Copy, Debug)]
pub enum Combines<'a> {
    /// Elements along some dimensions become one.
    Dims(&'a Reduction),
    /// Each element depends on its line along a dimension.
    Line {
        /// The dimension.
        dim: i64,
    },
    /// Each element depends on its row, along the last dimensions.
    Rows {
        /// How many of the last dimensions a row has.
        dims: i64,
        /// The operand that is normalised.
        operand: usize,
        /// The layout of the results and the other operands.
        kind: Rows<'a>,
    },
    /// Each element depends on its row's element of the operands and on its place in the row. The
    /// result is a matrix; operands with an element per row have one dimension.
    Places,
    /// Nothing is combined.
    Nothing,
}

/// The layout of the operands and results of a normalisation.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// `layer_norm`: operands after the first are columns, results after the first are for rows.
    Forward,
    /// `layer_norm_bwd`: two operands are for rows, and the operands after them are columns. The
    /// results other than dx are sums over rows.
    Backward {
        /// 1 for each result that is needed: dx, dw, db.
        mask: &'a [i64],
    },
}

impl<'a> Combines<'a> {
    /// What an op combines.
    pub fn of(op: &'a Op) -> Combines<'a> {
        match op {
            Op::Sum(dims) | Op::Mean(dims) | Op::Amax(dims) | Op::Amin(dims) | Op::Any(dims) => {
                Combines::Dims(dims)
            }
            Op::Softmax(along)
            | Op::LogSoftmax(along)
            | Op::SoftmaxBwd(along)
            | Op::LogSoftmaxBwd(along) => Combines::Line { dim: along.dim },
            Op::LayerNorm(norm) => Combines::Rows {
                dims: norm.dims,
                operand: 0,
                kind: Rows::Forward,
            },
            Op::LayerNormBwd(norm) => Combines::Rows {
                dims: norm.dims,
                operand: 1,
                kind: Rows::Backward { mask: &norm.mask },
            },
            Op::NllLossBwd(_) => Combines::Places,
            // A test checks each op that reads whole rows.
            _ => Combines::Nothing,
        }
    }
}

/// The first result of an op that is a sum over rows, if the op may have one.
pub(super) fn first_sum(op: &Op) -> Option<usize> {
    match Combines::of(op) {
        // Kernels do not compute other reductions along columns.
        Combines::Dims(a) if sums(op) && a.dims.first() == Some(&0) => Some(0),
        Combines::Rows {
            kind: Rows::Backward { mask },
            ..
        } => Some(mask.first().map_or(0, |&dx| dx as usize)),
        _ => None,
    }
}

/// True for a reduction that kernels may compute along columns: parts of it are added up.
pub(super) fn sums(op: &Op) -> bool {
    matches!(op, Op::Sum(_) | Op::Mean(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{Access, Attr, Kind, OpKind, attributes};

    #[test]
    fn what_reads_rows_combines_them() {
        for &kind in OpKind::ALL {
            let attr = |&(key, kind): &(&'static str, Kind)| {
                let attr = match kind {
                    Kind::Int => Attr::Int(1),
                    Kind::Float | Kind::Number => Attr::Float(1.0),
                    Kind::Bool => Attr::Bool(true),
                    Kind::Ints => Attr::Ints(vec![0]),
                    Kind::Type => Attr::Type(crate::DType::F32),
                    Kind::Str => Attr::Str(String::new()),
                    Kind::Body => return None,
                };
                Some((key.to_string(), attr))
            };
            let Some(attrs) = attributes(kind).iter().map(attr).collect() else {
                continue;
            };
            let op = Op::of(kind, attrs).expect("the attributes should be the op's");
            let combines = !matches!(Combines::of(&op), Combines::Nothing);
            let reads_rows = kind.facts().access == Access::Row;
            assert_eq!(combines, reads_rows, "{}: see Combines::of", kind.name());
        }
    }
}
