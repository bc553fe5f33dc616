//! Which ops may be steps of a generated kernel.

use ir::op::Access;
use ir::op::body::View;
use ir::{DType, Graph, Node, Op, Value};

/// The largest distance in the graph's order from a group's first node to its last.
pub(super) const REACH: usize = 64;
/// The fewest elements of a view that follow each other. A kernel that reads fewer together waits
/// for memory as long as a copy does.
pub(super) const TOGETHER: u64 = 16;
/// Powers that are products, quotients and roots.
const POWERS: [f64; 7] = [1.0, 2.0, 3.0, 0.5, -0.5, -1.0, -2.0];

/// True if the op may be a step of a generated kernel: vector functions exist only for f32, and
/// only for few powers.
pub(super) fn may_join(graph: &Graph, node: Node) -> bool {
    let data = &graph.nodes[node];
    let facts = data.op.facts();
    let computable = |v: &Value| match graph.values[*v].ty.dtype() {
        DType::F8E4M3 | DType::F8E5M2 => false,
        DType::F64 => !facts.is_function,
        _ => true,
    };
    let is_power = match &data.op {
        Op::PowScalar(power) => {
            let is_real = graph.values[data.outputs[0]].ty.dtype().is_float();
            !is_real || POWERS.contains(&power.value.to_f64())
        }
        _ => true,
    };
    let fits = facts.access != Access::Whole && data.op.is_pure() && is_power;
    fits && data.inputs.iter().chain(&data.outputs).all(computable)
}

/// True for an op whose result has the elements of its operand at other places.
pub(super) fn moves(op: &Op) -> bool {
    View::is_made_by(op) && !op.is_alias()
}
