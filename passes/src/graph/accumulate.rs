//! Lets a product start from the value that it is added to: `x + a b` becomes `addmm(x, a, b)`. So
//! residual streams, and sums of gradients of a value that several products read, need no kernel
//! and no bytes in addition to the product's own.
//!
//! Before: any graph. After: a product starts from the other operand of a sum if only this sum
//! reads the product, the sum is in the same phase, and the other operand has the same size and is
//! computed before the product. So no value lives longer than before: the other operand was needed
//! until the sum anyway, which came after the product, and the sum takes the product's bytes. If
//! both operands are products, the later one starts from the earlier one. A product never waits for
//! a value that is computed later.

use super::reshape_to;
use ir::graph::Readers;
use ir::{Graph, Node, Op, Table, Value};

/// Rewrites the graph.
pub fn run(graph: &mut Graph) {
    let (readers, position) = (graph.readers(), graph.positions());
    let order = graph.order.clone();
    let mut edit = graph.edit();
    for sum in order {
        let graph = edit.graph();
        let Some((product, start)) = product_of(graph, &readers, &position, sum) else {
            continue;
        };
        let (from, to) = (graph.nodes[product].outputs[0], graph.nodes[sum].outputs[0]);
        let ty = |value: Value| &graph.values[value].ty;
        let (start_fits, sum_fits) = (ty(start) == ty(from), ty(to) == ty(from));
        let to_shape = reshape_to(ty(to).shape().iter().copied());
        let Op::Matmul(flags) = graph.nodes[product].op.clone() else {
            continue;
        };
        let addmm = Op::Addmm(flags);
        let factors = graph.nodes[product].inputs.clone();

        let start = if start_fits {
            start
        } else {
            let name = format!("{}.{}", graph.values[start].name, graph.values[from].name);
            let op = reshape_to(ty(from).shape().iter().copied());
            let node = edit
                .insert_before(product, op, &[start], &[name])
                .expect("a product's start should have as many elements as the product");
            edit.graph().nodes[node].outputs[0]
        };
        edit.set_op(product, addmm, [&[start], &factors[..]].concat());
        if sum_fits {
            edit.steal_result(product, 0, to);
        } else {
            edit.set_op(sum, to_shape, vec![from]);
        }
    }
    edit.finish();
    super::canonical::remove_dead(graph);
}

/// The product that may start from the other operand of a sum, and this operand, which is not an
/// alias.
fn product_of(
    graph: &Graph,
    readers: &Readers,
    position: &Table<Node, usize>,
    sum: Node,
) -> Option<(Node, Value)> {
    let data = &graph.nodes[sum];
    let &[x, y] = &data.inputs[..] else {
        return None;
    };
    let ty = |value: Value| &graph.values[value].ty;
    if data.op != Op::Add || ty(x) != ty(y) {
        return None;
    }
    let place = |value: Value| graph.def_node(graph.root(value)).map(|node| position[node]);
    let (start, product) = if place(x) < place(y) { (x, y) } else { (y, x) };
    let (start, product) = (graph.root(start), graph.root(product));
    let node = graph.def_node(product).filter(|_| start != product)?;
    let is_product =
        matches!(graph.nodes[node].op, Op::Matmul(_)) && graph.nodes[node].phase == data.phase;
    // Another reader, or the end of the step, needs the product alone.
    (is_product && readers[product] == [Some(sum)]).then_some((node, start))
}
