//! Updates of gradients that are multiples of a scale: see [`super::super::scale`].
//!
//! As `torch.amp.GradScaler` has it: gradients are divided by the scale; if one is not finite, no
//! state that the optimizer changes gets a new value, and the scale falls; after enough updates in
//! a row it grows. So updates come after all gradients.

use super::{AttachError, norm};
use crate::graph::scale::{self, LossScale};
use ir::graph::{self, Output};
use ir::op::attrs::{Cast, Full, Scalar};
use ir::op::{Number, Op};
use ir::{DType, Graph, Phase, State, StateKind, TensorType, Value};

/// The path of the number of updates since the scale changed, a state, i32.
pub const GROWTH_TRACKER: &str = "optimizer.growth_tracker";
/// The output that is the scale of the step, f32.
pub const LOSS_SCALE: &str = "loss_scale";
/// The output that is 1 if a gradient is not finite, else 0, f32.
pub const FOUND_INF: &str = "found_inf";

/// What updates of scaled gradients read.
pub(super) struct Scaling {
    /// The factor of gradients, f32.
    pub(super) inverse: Value,
    /// The sum of squares of all gradients without the scale, f64.
    pub(super) squares: Value,
    /// True if the update is left out.
    pub(super) skipped: Value,
}

/// Adds the nodes that all updates read, and the new scale. `scale`: its state; `squares`: sums of
/// the squares of all gradients, in f64, where no square of an f32 overflows.
pub(super) fn add(
    graph: &mut Graph,
    scale: State,
    numbers: &LossScale,
    squares: &[Value],
) -> Result<Scaling, AttachError> {
    let tracker_state = graph.states.next_id();
    let ty = TensorType::new(DType::I32, [])?;
    let tracker = graph.add_state(GROWTH_TRACKER, GROWTH_TRACKER, StateKind::Moment, ty);
    let state = graph.states[scale].before;
    let total = norm::total(graph, squares)?;
    let mut add = |op, inputs: &[Value], part: &str| {
        let name = format!("{LOSS_SCALE}.{part}");
        Ok::<_, graph::Error>(graph.add_node(op, inputs, &[name], Phase::Optimizer, "")?[0])
    };
    let now = scale::current(state, numbers, &mut add)?;
    let wide = add(Op::Cast(Cast { dtype: DType::F64 }), &[now], "f64")?;
    let inverse = add(Op::Reciprocal, &[wide], "reciprocal")?;
    let inverse = add(Op::Cast(Cast { dtype: DType::F32 }), &[inverse], "inverse")?;
    let factor = add(
        Op::Cast(Cast { dtype: DType::F64 }),
        &[inverse],
        "inverse.f64",
    )?;
    let unscaled = add(Op::Mul, &[total, factor], "unscaled")?;
    let unscaled = add(Op::Mul, &[unscaled, factor], "squares")?;
    // Neither NaN nor infinite.
    let finite = add(Op::LtScalar(number(f64::INFINITY)), &[total], "finite")?;
    let skipped = add(Op::LogicalNot, &[finite], "skipped")?;

    // The scale does not grow beyond f32.
    let grown = add(Op::MulScalar(number(numbers.growth)), &[wide], "grown.f64")?;
    let grown = add(Op::Cast(Cast { dtype: DType::F32 }), &[grown], "grown")?;
    let fits = add(Op::LtScalar(number(f64::INFINITY)), &[grown], "fits")?;
    let grown = add(Op::Where, &[fits, grown, now], "grown.fits")?;
    let less = add(Op::MulScalar(number(numbers.backoff)), &[wide], "less.f64")?;
    let less = add(Op::Cast(Cast { dtype: DType::F32 }), &[less], "less")?;
    let count = add(Op::AddScalar(integer(1)), &[tracker], "count")?;
    let is_due = add(
        Op::EqScalar(integer(numbers.interval.into())),
        &[count],
        "is_due",
    )?;
    let next = add(Op::Where, &[is_due, grown, now], "next")?;
    let next = add(Op::Where, &[skipped, less, next], "new")?;
    let zero = Full {
        dtype: DType::I32,
        shape: vec![],
        value: Number::Int(0),
    };
    let zero = add(Op::Full(zero), &[], "zero")?;
    let starts = add(Op::LogicalOr, &[skipped, is_due], "starts")?;
    let count = add(Op::Where, &[starts, zero, count], "count.new")?;
    let found = add(Op::Cast(Cast { dtype: DType::F32 }), &[skipped], FOUND_INF)?;

    graph.states[scale].after = next;
    graph.states[tracker_state].after = count;
    for (name, value) in [(LOSS_SCALE, now), (FOUND_INF, found)] {
        let name = name.to_string();
        graph.outputs.push(Output { name, value });
    }
    Ok(Scaling {
        inverse,
        squares: unscaled,
        skipped,
    })
}

fn number(value: f64) -> Scalar {
    Scalar {
        value: Number::Float(value),
    }
}
fn integer(value: i64) -> Scalar {
    Scalar {
        value: Number::Int(value),
    }
}
