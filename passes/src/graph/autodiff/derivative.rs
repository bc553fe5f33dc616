//! The derivative of each op: its rule, zero, or why there is none.

use super::rules::{self, Apply};
use ir::op::OpKind;

/// How an op is differentiated.
#[derive(Clone, Copy)]
pub enum Derivative {
    /// The adjoints of its operands follow from that of its first result.
    Rule(Rule),
    /// It is zero or not defined: the op compares, rounds, counts, or reads no parameter.
    Zero,
    /// None, for this reason.
    Refused(&'static str),
}

/// A rule.
#[derive(Clone, Copy)]
pub struct Rule(pub(super) Apply);

use Derivative::{Refused, Zero};

const fn rule(apply: Apply) -> Derivative {
    Derivative::Rule(Rule(apply))
}

/// Why a derivative has none.
pub(super) const SECOND: &str = "it is a derivative itself, and there are no second derivatives";
const UPDATE: Derivative = Refused("it belongs to an optimizer, which comes after the backward");

/// The derivative of an op.
pub fn derivative(op: OpKind) -> Derivative {
    use OpKind::*;
    match op {
        Neg | Abs | Exp | Log | Sqrt | Rsqrt | Reciprocal | Tanh | Sigmoid | Sin | Cos | Atan
        | Erf | Relu | Silu | Gelu | Cast | Clamp => rule(rules::unary),
        AddScalar | MulScalar | DivScalar | RsubScalar | PowScalar => rule(rules::scalar),
        Add | Sub | Mul | Div | Pow | Maximum | Minimum | Where => rule(rules::binary),
        Sum | Mean | Amax | Amin | Cumsum | TopK | Softmax | LogSoftmax => rule(rules::reduction),
        LayerNorm | BatchNorm => rule(rules::norm),
        Matmul | Addmm | MatmulSum | GroupedMatmul | GroupedOuter => rule(rules::product),
        // Of an operand alone, it is a transposed convolution.
        Convolution | ConvolutionBwd | MaxPool2d => rule(rules::window),
        Sdpa | SdpaRows => rule(rules::attention),
        NllLoss | NllSum => rule(rules::loss),
        Embedding | Gather | Scatter | ScatterAdd | ScatterValue | Index | IndexPut => {
            rule(rules::table)
        }
        Reshape | Permute | Expand | Flip | Slice | SliceScatter | Cat | Pad => rule(rules::shape),
        Dropout => rule(rules::dropout),

        Sign | BitwiseNot | LogicalNot | EqScalar | NeScalar | LtScalar | LeScalar | GtScalar
        | GeScalar | BitwiseAnd | BitwiseOr | BitwiseXor | Eq | Ne | Lt | Le | Gt | Ge
        | LogicalAnd | LogicalOr | Any | Detach | Nf4 | Full | Arange | Rand | Randn
        | DropoutKey | RngNext => Zero,

        TanhBwd | SigmoidBwd | SiluBwd | GeluBwd | ThresholdBwd | SoftmaxBwd | LogSoftmaxBwd
        | LayerNormBwd | BatchNormBwd | MaxPool2dBwd | SdpaBwd | SdpaRowsBwd | EmbeddingBwd
        | NllLossBwd | DropoutBwd => Refused(SECOND),
        SumSquares | ClipScale | RoundRandom | Adamw | AdamwSplit | Adamw8bit | Sgd
        | SgdMomentum => UPDATE,
        Fused => Refused("it is a kernel of several ops; differentiate the graph before `fuse`"),
        Extern => Refused("the op is not known, so neither is its derivative"),
    }
}
