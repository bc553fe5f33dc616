//! Brings graphs from any tracer into one form, so that later passes see fewer forms.
//!
//! After: no node is unused. No two nodes compute the same. (Recomputation exists only in
//! schedules, so sharing is always right in a graph.) No operation leaves its operand unchanged. A
//! transposition before or after a product is the product's `ta` and `tb`. No `expand` stands
//! before an operation that broadcasts. A chain of reshapes and permutes is one node. No
//! concatenation has more operands than a kernel can have. No value is detached: gradients are
//! known. Values keep their names from the trace.

use super::reshape_to;
use ir::graph::{NodeData, Output};
use ir::op::attrs::Product;
use ir::op::{Op, OpKind, broadcast_shapes};
use ir::{DType, Graph, Node, Table, TensorType, Value};
use std::collections::BTreeMap;

/// The most operands of a concatenation: GPUs pass a few hundred addresses to a kernel.
const MOST_JOINED: usize = 256;

/// Rewrites the graph.
pub fn run(graph: &mut Graph) {
    rewrite(graph, false);
}

/// The same before gradients are known: detached values stay so.
pub(super) fn run_before_autodiff(graph: &mut Graph) {
    rewrite(graph, true);
}

fn rewrite(graph: &mut Graph, detaches: bool) {
    let mut rewrite = Rewrite {
        detaches,
        ..Rewrite::new(graph)
    };
    for &node in &graph.order {
        rewrite.node(node);
    }
    let mut new = rewrite.finish();
    remove_dead(&mut new);
    *graph = new.compact();
}

/// The name that a value has after the pass, for a graph before the pass; `None` if the value is
/// unused.
pub fn became(graph: &Graph, value: Value) -> Option<String> {
    let mut rewrite = Rewrite::new(graph);
    for &node in &graph.order {
        rewrite.node(node);
    }
    let new = rewrite.value[value]?;
    let mut graph = rewrite.finish();
    remove_dead(&mut graph);
    let is_live = graph
        .def_node(new)
        .is_none_or(|node| graph.order.contains(&node));
    is_live.then(|| graph.values[new].name.clone())
}

/// Keeps only nodes that a state, an output or a gradient needs, and nodes with unknown effects.
pub(super) fn remove_dead(graph: &mut Graph) {
    let live = live(graph);
    let mut order = std::mem::take(&mut graph.order);
    order.retain(|&node| live[node]);
    graph.set_order(order);
}

/// The nodes that [`remove_dead`] keeps.
fn live(graph: &Graph) -> Table<Node, bool> {
    let mut live = Table::filled(graph.nodes.len(), false);
    let mut stack: Vec<Node> = graph.wanted().filter_map(|v| graph.def_node(v)).collect();
    stack.extend(
        graph
            .order
            .iter()
            .filter(|&&node| !graph.nodes[node].op.is_pure()),
    );
    while let Some(node) = stack.pop() {
        if !std::mem::replace(&mut live[node], true) {
            stack.extend(
                graph.nodes[node]
                    .inputs
                    .iter()
                    .filter_map(|&v| graph.def_node(v)),
            );
        }
    }
    live
}

struct Rewrite<'a> {
    old: &'a Graph,
    new: Graph,
    /// Detached values stay so.
    detaches: bool,
    /// The new value of each old value.
    value: Table<Value, Option<Value>>,
    /// How often needed nodes read each old value.
    n_uses: Table<Value, u32>,
    /// Nodes by op and operands.
    known: BTreeMap<(String, Vec<Value>), Node>,
}

impl<'a> Rewrite<'a> {
    fn new(old: &'a Graph) -> Rewrite<'a> {
        let mut n_uses = Table::filled(old.values.len(), 0);
        let live = live(old);
        let reads = old
            .order
            .iter()
            .filter(|&&node| live[node])
            .flat_map(|&node| old.nodes[node].inputs.iter().copied());
        for value in reads.chain(old.wanted()) {
            n_uses[value] += 1;
        }
        let mut new = Graph::new(old.name.clone());
        let mut value = Table::filled(old.values.len(), None);
        for &input in &old.inputs {
            let data = &old.values[input];
            value[input] = Some(new.add_input(data.name.clone(), data.ty.clone()));
        }
        for state in old.states.values() {
            let data = &old.values[state.before];
            value[state.before] = Some(new.add_state(
                data.name.clone(),
                state.path.clone(),
                state.kind,
                data.ty.clone(),
            ));
        }
        Rewrite {
            old,
            new,
            detaches: false,
            value,
            n_uses,
            known: BTreeMap::new(),
        }
    }

    fn finish(mut self) -> Graph {
        let to =
            |v: Value| self.value[v].expect("every value of the order should have been rewritten");
        for (i, state) in self.old.states.iter() {
            self.new.states[i].after = to(state.after);
        }
        self.new.outputs = self
            .old
            .outputs
            .iter()
            .map(|o| Output {
                name: o.name.clone(),
                value: to(o.value),
            })
            .collect();
        self.new.gradients = self
            .old
            .gradients
            .iter()
            .map(|&(state, v)| (state, to(v)))
            .collect();
        self.new
    }

    fn ty(&self, value: Value) -> &TensorType {
        &self.new.values[value].ty
    }

    fn node(&mut self, node: Node) {
        let data = &self.old.nodes[node];
        let inputs: Vec<Value> = data
            .inputs
            .iter()
            .map(|&v| self.value[v].expect("operands should come before their readers"))
            .collect();
        let (op, inputs) = self.fold(data, data.op.clone(), inputs);
        if let Some(same) = self.unchanged(&op, &inputs) {
            self.value[data.outputs[0]] = Some(same);
            return;
        }
        let key = (format!("{op:?}"), inputs.clone());
        if op.is_pure()
            && let Some(&known) = self.known.get(&key)
        {
            for (i, &output) in data.outputs.iter().enumerate() {
                self.value[output] = Some(self.new.nodes[known].outputs[i]);
            }
            return;
        }
        let names: Vec<String> = data
            .outputs
            .iter()
            .map(|&v| self.old.values[v].name.clone())
            .collect();
        let inputs = match &op {
            Op::Cat(_) if inputs.len() > MOST_JOINED => self.joined(data, &op, &inputs),
            _ => inputs,
        };
        let outputs = self
            .new
            .add_node(op, &inputs, &names, data.phase, data.module.clone())
            .expect("a rewritten node should be typed like the one before");
        for (&before, &after) in data.outputs.iter().zip(&outputs) {
            debug_assert_eq!(self.old.values[before].ty, self.new.values[after].ty);
            self.value[before] = Some(after);
        }
        let added = *self.new.order.last().expect("a node was just added");
        self.known.insert(key, added);
    }

    /// Concatenates runs of the operands of a concatenation.
    fn joined(&mut self, data: &NodeData, op: &Op, inputs: &[Value]) -> Vec<Value> {
        let name = self.old.values[data.outputs[0]].name.clone();
        let mut joined = vec![];
        for (i, run) in inputs.chunks(MOST_JOINED).enumerate() {
            let names = [format!("{name}.part{i}")];
            let module = data.module.clone();
            let part = self
                .new
                .add_node(op.clone(), run, &names, data.phase, module);
            joined.extend(part.expect("a run of operands should fit together as all of them do"));
        }
        joined
    }

    /// The op and operands that a node becomes.
    fn fold(&self, data: &NodeData, mut op: Op, mut inputs: Vec<Value>) -> (Op, Vec<Value>) {
        match &mut op {
            Op::Matmul(product) | Op::Addmm(product) | Op::MatmulSum(product) => {
                let first = match data.op {
                    Op::Addmm(_) => 1,
                    _ => 0,
                };
                for (k, flag) in [(first, &mut product.ta), (first + 1, &mut product.tb)] {
                    while let Some(source) = self.transposed(inputs[k]) {
                        inputs[k] = source;
                        *flag = !*flag;
                    }
                }
            }
            Op::GroupedMatmul(product) => {
                while let Some(source) = self.transposed(inputs[1]) {
                    inputs[1] = source;
                    product.tb = !product.tb;
                }
            }
            Op::Reshape(_) => {
                while let Some(source) = self.operand_of(inputs[0], OpKind::Reshape) {
                    inputs[0] = source;
                }
            }
            Op::Permute(permute) => {
                // (a b)^T = b^T a^T: the product writes its result transposed, and no copy is
                // needed.
                if let Some(transposed) = self.only_product(data, inputs[0], &permute.dims) {
                    return transposed;
                }
                while let Some((inner, source)) = self.permuted(inputs[0]) {
                    permute
                        .dims
                        .iter_mut()
                        .for_each(|d| *d = inner[*d as usize]);
                    inputs[0] = source;
                }
                // If only dimensions of size one move, no byte moves.
                let shape = self.ty(inputs[0]).shape();
                let size = |d: i64| shape[d as usize];
                let moved = permute.dims.iter().filter(|&&d| size(d) != 1);
                if moved.is_sorted() {
                    let op = reshape_to(permute.dims.iter().map(|&d| size(d)));
                    return self.fold(data, op, inputs);
                }
            }
            _ => {}
        }
        if op.facts().broadcasts {
            self.drop_expands(
                &op,
                &mut inputs,
                self.old.values[data.outputs[0]].ty.shape(),
            );
        }
        (op, inputs)
    }

    /// The value of which `value` is the transposition of the last two dimensions.
    fn transposed(&self, value: Value) -> Option<Value> {
        let (dims, source) = self.permuted(value)?;
        swaps_last_two(dims).then_some(source)
    }

    /// The value that a permutation to `value` reads, and its dimensions.
    fn permuted(&self, value: Value) -> Option<(&[i64], Value)> {
        let data = &self.new.nodes[self.new.def_node(value)?];
        match &data.op {
            Op::Permute(permute) => Some((&permute.dims, data.inputs[0])),
            _ => None,
        }
    }

    /// The transposed of the product whose only reader is this node, if `dims` transpose its
    /// result.
    fn only_product(
        &self,
        data: &NodeData,
        value: Value,
        dims: &[i64],
    ) -> Option<(Op, Vec<Value>)> {
        if self.n_uses[data.inputs[0]] != 1 || !swaps_last_two(dims) {
            return None;
        }
        let product = &self.new.nodes[self.new.def_node(value)?];
        let mut inputs = product.inputs.clone();
        let op = match &product.op {
            Op::Matmul(flags) => Op::Matmul(Product {
                ta: !flags.tb,
                tb: !flags.ta,
            }),
            Op::GroupedOuter => Op::GroupedOuter,
            _ => return None,
        };
        inputs.swap(0, 1);
        Some((op, inputs))
    }

    /// The operand of the node that computes `value`, if its op is of this kind.
    fn operand_of(&self, value: Value, kind: OpKind) -> Option<Value> {
        let data = &self.new.nodes[self.new.def_node(value)?];
        (data.op.kind() == kind).then(|| data.inputs[0])
    }

    /// Removes expands from operands that still broadcast to `shape` without them.
    fn drop_expands(&self, op: &Op, inputs: &mut [Value], shape: &[u64]) {
        for k in 0..inputs.len() {
            let Some(source) = self.operand_of(inputs[k], OpKind::Expand) else {
                continue;
            };
            let before = inputs[k];
            inputs[k] = source;
            let all = inputs
                .iter()
                .try_fold(vec![], |all, &v| broadcast_shapes(&all, self.ty(v).shape()));
            let types: Vec<&TensorType> = inputs.iter().map(|&v| self.ty(v)).collect();
            if all.is_ok_and(|all| all == shape) && op.infer(&types).is_ok() {
                continue;
            }
            inputs[k] = before;
        }
    }

    /// The operand that the node's result equals, bit for bit.
    fn unchanged(&self, op: &Op, inputs: &[Value]) -> Option<Value> {
        let &input = inputs.first()?;
        let ty = self.ty(input);
        let same_type = || {
            let types: Vec<&TensorType> = inputs.iter().map(|&v| self.ty(v)).collect();
            op.infer(&types)
                .is_ok_and(|results| results.len() == 1 && results[0] == *ty)
        };
        let same = match op {
            Op::Cast(_) | Op::Reshape(_) | Op::Expand(_) => same_type(),
            Op::Detach => !self.detaches,
            Op::Slice(slice) => same_type() && slice.step == 1,
            Op::Cat(_) => inputs.len() == 1,
            Op::Pad(pad) => pad.pad.iter().all(|&n| n == 0),
            Op::MulScalar(scalar) | Op::DivScalar(scalar) => scalar.value.to_f64() == 1.0,
            // x + 0 is not x for x = -0.
            Op::AddScalar(scalar) => {
                let is_integer = !ty.dtype().is_float() && ty.dtype() != DType::Bool;
                scalar.value.to_f64() == 0.0 && is_integer
            }
            _ => false,
        };
        same.then_some(input)
    }
}

fn swaps_last_two(dims: &[i64]) -> bool {
    let n = dims.len() as i64;
    (2..=3).contains(&n)
        && dims.iter().enumerate().all(|(i, &d)| {
            let i = i as i64;
            d == if i == n - 1 {
                n - 2
            } else if i == n - 2 {
                n - 1
            } else {
                i
            }
        })
}
