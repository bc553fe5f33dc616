//! Lets a product start from what it is added to: `x + a b` becomes `addmm(x, a, b)`. A residual
//! stream, and the sum of gradients of a value that several products read, then need no kernel and
//! no bytes but the product's own.
//!
//! Before: any graph. After: a product that only a sum in the same phase reads starts from the
//! sum's other operand, if that is as large and was there before the product. So nothing lives
//! longer than it did: the other operand was wanted until the sum, which came after the product,
//! and the sum takes the product's bytes. Of two products the later one takes the other; a gradient
//! that is not there yet is not waited for.

use super::{Readers, add_beside, readers, reshape_to};
use ir::graph::Def;
use ir::{Graph, Node, Op, Table, Value};
use std::collections::BTreeMap;

/// Rewrites the graph.
pub fn run(graph: &mut Graph) {
    let readers = readers(graph);
    let mut position = Table::filled(graph.nodes.len(), usize::MAX);
    for (i, &node) in graph.order.iter().enumerate() {
        position[node] = i;
    }
    // Reshapes that stand before a product now, and sums that are no line any more.
    let mut before: BTreeMap<Node, Node> = BTreeMap::new();
    let mut gone = Table::filled(graph.nodes.len(), false);
    for sum in graph.order.clone() {
        let Some((product, start)) = product_of(graph, &readers, &position, sum) else {
            continue;
        };
        let (from, to) = (graph.nodes[product].outputs[0], graph.nodes[sum].outputs[0]);
        let same = |value: Value| graph.values[value].ty == graph.values[from].ty;
        let (start_fits, sum_fits) = (same(start), same(to));
        let start = if start_fits {
            start
        } else {
            let ty = graph.values[from].ty.clone();
            let name = format!("{}.{}", graph.values[start].name, graph.values[from].name);
            let op = reshape_to(ty.shape().iter().copied());
            let (node, value) = add_beside(graph, product, op, vec![start], ty, name);
            before.insert(product, node);
            value
        };
        let data = &mut graph.nodes[product];
        data.op = Op::new("addmm", data.op.attrs().clone())
            .expect("addmm should have a product's attributes");
        data.inputs.insert(0, start);
        if sum_fits {
            data.outputs = vec![to];
            graph.values[to].def = Def::Node(product, 0);
            gone[sum] = true;
        } else {
            graph.nodes[sum].op = reshape_to(graph.values[to].ty.shape().iter().copied());
            graph.nodes[sum].inputs = vec![from];
        }
    }
    let order = std::mem::take(&mut graph.order);
    let order = order.into_iter().filter(|node| !gone[*node]);
    graph.order = order
        .flat_map(|node| before.remove(&node).into_iter().chain([node]))
        .collect();
    super::canonical::remove_dead(graph);
}

/// The product that may start from what a sum adds to it, and what that is: a value that is no
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
    if data.op.name() != "add" || ty(x) != ty(y) {
        return None;
    }
    let place = |value: Value| graph.def_node(graph.root(value)).map(|node| position[node]);
    let (start, product) = if place(x) < place(y) { (x, y) } else { (y, x) };
    let (start, product) = (graph.root(start), graph.root(product));
    let node = graph.def_node(product).filter(|_| start != product)?;
    let is_product =
        graph.nodes[node].op.name() == "matmul" && graph.nodes[node].phase == data.phase;
    // Another reader, or the step's end, wants the product by itself.
    (is_product && readers[product] == [Some(sum)]).then_some((node, start))
}
