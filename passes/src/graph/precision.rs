//! Mixed precision as `torch.autocast` has it: products, convolutions and attention are computed in
//! half precision, what needs range or sums is computed in f32, and the rest in the widest type of
//! its operands.
//!
//! Before: forward and backward as they were traced, in f32. After: the same nodes on operands of
//! other types, with casts where types meet. Parameters, gradients, states and outputs have the
//! types that they had; with masters, some parameters and buffers are stored in half precision. A
//! value is cast once for each type. So is a parameter, once a step, and the planner decides
//! whether its cast stays for the backward or is computed again.
//!
//! The lists are those of autocast for GPUs (PyTorch's documentation, "Autocast Op Reference"); in
//! the backward, an op has the type of its forward. Tensors that were traced in another type than
//! f32 are left alone.
//!
//! Two products differ, and have the types of their operands. One is an outer product that depends
//! on no parameter. It computes the angles of rotary embeddings from positions. Models switch
//! autocast off for it, which a trace in f32 does not say: bf16 has no odd position above 256. The
//! other is a product with a matrix that is computed from nothing but numbers, in f64: that of a
//! Fourier transform, which autocast leaves in f32.

use super::optimizer::Master;
use ir::graph::{self, Output, Readers};
use ir::op::attrs::Cast;
use ir::op::{Op, OpKind};
use ir::{DType, Graph, Node, Phase, StateKind, Table, TensorType, Value};
use std::collections::{BTreeMap, BTreeSet};

ir::named! {
    /// The types in which a step traced in f32 is computed.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum Precision {
        /// f32.
        #[default]
        F32 = "f32",
        /// f32, and TF32 (11 bits of precision) in the tensor cores of a GPU.
        Tf32 = "tf32",
        /// bf16 as `torch.autocast` has it.
        Bf16 = "bf16",
        /// f16 as `torch.autocast` has it, with a scaled loss: see [`super::scale`].
        Fp16 = "fp16",
    }
}

/// The type of an op's operands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// Half precision.
    Half,
    /// f32.
    Full,
    /// The widest type of the operands.
    Widest,
}

fn place(op: &Op, phase: Phase) -> Place {
    use OpKind as K;
    match op.kind() {
        K::Matmul | K::Addmm | K::MatmulSum | K::Convolution | K::ConvolutionBwd => Place::Half,
        K::GroupedMatmul | K::GroupedOuter => Place::Half,
        K::Sdpa | K::SdpaBwd | K::SdpaRows | K::SdpaRowsBwd => Place::Half,
        // Their backward reads what the forward computed.
        K::Softmax | K::SoftmaxBwd | K::LogSoftmax | K::LogSoftmaxBwd => Place::Full,
        K::LayerNorm | K::LayerNormBwd | K::BatchNorm | K::BatchNormBwd => Place::Full,
        K::NllLoss | K::NllLossBwd | K::NllSum => Place::Full,
        K::Exp | K::Log | K::Reciprocal | K::Rsqrt | K::Pow | K::PowScalar | K::Cumsum
            if phase == Phase::Forward =>
        {
            Place::Full
        }
        K::Sum | K::Mean if phase == Phase::Forward => Place::Full,
        // What PyTorch computes was traced with results in f32.
        K::Extern => Place::Full,
        _ => Place::Widest,
    }
}

/// Computes a step in this precision. With masters, parameters that are read in half precision
/// alone are stored in it, and the optimizer updates an f32 beside each. Buffers that do not
/// change, such as frozen parameters, are stored in it without an f32. An error would be a bug: an
/// op that exists in f32 and not in half precision.
pub fn run(graph: &mut Graph, precision: Precision, master: Master) -> Result<(), graph::Error> {
    let half = match precision {
        Precision::F32 | Precision::Tf32 => return Ok(()),
        Precision::Bf16 => DType::BF16,
        Precision::Fp16 => DType::F16,
    };
    let mut mixed = Mixed::new(graph, half, &BTreeSet::new()).run()?;
    if master != Master::None {
        let stored = read_in_half(&mixed, half);
        mixed = Mixed::new(graph, half, &stored).run()?;
    }
    *graph = mixed;
    Ok(())
}

/// The f32 parameters and constant buffers that only casts to half precision read, by their paths.
fn read_in_half(graph: &Graph, half: DType) -> BTreeSet<String> {
    let readers = graph.readers();
    let is_cast = |node: Node| match &graph.nodes[node].op {
        Op::Cast(cast) => cast.dtype == half,
        _ => false,
    };
    let outputs = graph.outputs.iter().map(|output| output.value);
    let gradients = graph.gradients.iter().map(|&(_, gradient)| gradient);
    let leaving: BTreeSet<Value> = outputs.chain(gradients).map(|v| graph.root(v)).collect();
    let states = graph.states.values().filter(|state| {
        let value = state.before;
        let mut nodes = readers[value].iter().copied().flatten().peekable();
        matches!(state.kind, StateKind::Param | StateKind::Buffer)
            && state.after == value
            && graph.values[value].ty.dtype() == DType::F32
            && !leaving.contains(&value)
            && nodes.peek().is_some()
            && nodes.all(is_cast)
    });
    states.map(|state| state.path.clone()).collect()
}

struct Mixed<'a> {
    old: &'a Graph,
    readers: Readers,
    half: DType,
    graph: Graph,
    /// Names that are in use.
    names: BTreeSet<String>,
    /// The new value of each old one.
    here: Table<Value, Option<Value>>,
    /// Casts of new values.
    casts: BTreeMap<(Value, DType), Value>,
    /// The old values that depend on a parameter.
    learnt: Table<Value, bool>,
    /// The old values that depend on no input and no state.
    constant: Table<Value, bool>,
    /// Those of them that were computed in f64.
    precise: Table<Value, bool>,
}

impl<'a> Mixed<'a> {
    fn new(old: &'a Graph, half: DType, stored: &BTreeSet<String>) -> Mixed<'a> {
        let mut it = Mixed {
            old,
            readers: old.readers(),
            half,
            graph: Graph::new(old.name.clone()),
            names: old.values.values().map(|data| data.name.clone()).collect(),
            here: Table::filled(old.values.len(), None),
            casts: BTreeMap::new(),
            learnt: Table::filled(old.values.len(), false),
            constant: Table::filled(old.values.len(), false),
            precise: Table::filled(old.values.len(), false),
        };
        for state in old.states.values() {
            let data = &old.values[state.before];
            let (name, path) = (data.name.clone(), state.path.clone());
            let ty = match stored.contains(&state.path) {
                true => TensorType::new(half, data.ty.shape()).expect("half the bytes should fit"),
                false => data.ty.clone(),
            };
            let before = it.graph.add_state(name, path, state.kind, ty);
            it.here[state.before] = Some(before);
            it.learnt[state.before] = state.kind == StateKind::Param;
        }
        for &input in &old.inputs {
            let data = &old.values[input];
            it.here[input] = Some(it.graph.add_input(data.name.clone(), data.ty.clone()));
        }
        it
    }

    fn run(mut self) -> Result<Graph, graph::Error> {
        let old = self.old;
        let gradients: BTreeSet<Value> = old.gradients.iter().map(|&(_, value)| value).collect();
        for &node in &old.order {
            self.node(node)?;
            // A gradient has its type before the next node, so that its update need not wait for
            // the end of the backward.
            for value in &old.nodes[node].outputs {
                if gradients.contains(value) {
                    self.as_traced(*value)?;
                }
            }
        }
        for (i, state) in old.states.values().enumerate() {
            let after = self.as_traced(state.after)?;
            let new = self.graph.states.ids().nth(i);
            let new = new.expect("both graphs have the same states");
            self.graph.states[new].after = after;
        }
        for output in &old.outputs {
            let value = self.as_traced(output.value)?;
            let name = output.name.clone();
            self.graph.outputs.push(Output { name, value });
        }
        for &(state, gradient) in &old.gradients {
            let gradient = self.as_traced(gradient)?;
            self.graph.gradients.push((state, gradient));
        }
        Ok(self.graph)
    }

    fn now(&self, value: Value) -> Value {
        self.here[value].expect("a graph's order should be topological")
    }

    fn dtype(&self, value: Value) -> DType {
        self.graph.values[value].ty.dtype()
    }

    /// The new value in the type that the old one has.
    fn as_traced(&mut self, value: Value) -> Result<Value, graph::Error> {
        let (phase, module) = match self.old.def_node(value) {
            Some(node) => (
                self.old.nodes[node].phase,
                self.old.nodes[node].module.clone(),
            ),
            None => return Ok(self.now(value)),
        };
        let dtype = self.old.values[value].ty.dtype();
        self.cast(self.now(value), dtype, phase, &module)
    }

    fn cast(
        &mut self,
        value: Value,
        dtype: DType,
        phase: Phase,
        module: &str,
    ) -> Result<Value, graph::Error> {
        if self.dtype(value) == dtype {
            return Ok(value);
        }
        if let Some(&known) = self.casts.get(&(value, dtype)) {
            return Ok(known);
        }
        let mut name = format!("{}.{}", self.graph.values[value].name, dtype.name());
        while !self.names.insert(name.clone()) {
            name.push('_');
        }
        let op = Op::Cast(Cast { dtype });
        let cast = self.graph.add_node(op, &[value], &[name], phase, module)?[0];
        self.casts.insert((value, dtype), cast);
        Ok(cast)
    }

    fn node(&mut self, node: Node) -> Result<(), graph::Error> {
        let data = &self.old.nodes[node];
        let learnt = data.inputs.iter().any(|&input| self.learnt[input]);
        let constant = data.inputs.iter().all(|&input| self.constant[input]);
        let constant = constant && data.op.kind() != OpKind::Extern;
        let is_f64 = |v: Value| self.old.values[v].ty.dtype() == DType::F64;
        let precise = data.inputs.iter().any(|&v| self.precise[v] || is_f64(v));
        for &output in &data.outputs {
            self.learnt[output] = learnt;
            self.constant[output] = constant;
            self.precise[output] = constant && precise;
        }
        let (phase, module) = (data.phase, &data.module);
        let mut inputs: Vec<Value> = data.inputs.iter().map(|&v| self.now(v)).collect();
        let mut op = data.op.clone();
        if let Op::Cast(cast) = &op
            && self.dtype(inputs[0]) == cast.dtype
        {
            self.here[data.outputs[0]] = Some(inputs[0]);
            return Ok(());
        }
        // Operands that were traced in f32 have a type to choose.
        let free: Vec<usize> = (0..inputs.len())
            .filter(|&i| self.old.values[data.inputs[i]].ty.dtype() == DType::F32)
            .filter(|&i| !stays_full(&op, i))
            .collect();
        let is_half = |&i: &usize| self.dtype(inputs[i]) != DType::F32;
        let dtype = match place(&op, phase) {
            Place::Full => DType::F32,
            Place::Half if !self.is_exact(node, learnt) => self.half,
            Place::Widest if !free.is_empty() && free.iter().all(is_half) => self.half,
            Place::Widest if !free.is_empty() && self.is_for_products(node, learnt) => self.half,
            Place::Half | Place::Widest => DType::F32,
        };
        // A sum over products stays in f32.
        let adds_to_sum = dtype == self.half && self.is_sum(node);
        // Rows that are added up in f32 need not be copied to f32 first.
        let adds_rows = dtype == DType::F32
            && matches!(&op, Op::IndexPut(put) if put.accumulate)
            && is_half(&1);
        let stays = |i| (adds_to_sum && i == 0) || (adds_rows && i == 1);
        for i in free.into_iter().filter(|&i| !stays(i)) {
            inputs[i] = self.cast(inputs[i], dtype, phase, module)?;
        }
        if let (true, Op::Addmm(product)) = (adds_to_sum, &op) {
            op = Op::MatmulSum(product.clone());
            inputs[0] = self.cast(inputs[0], DType::F32, phase, module)?;
            inputs.rotate_left(1);
        }
        let names = data
            .outputs
            .iter()
            .map(|&v| self.old.values[v].name.clone());
        let names: Vec<String> = names.collect();
        let outputs = self
            .graph
            .add_node(op, &inputs, &names, phase, module.clone())?;
        for (&old, new) in data.outputs.iter().zip(outputs) {
            self.here[old] = Some(new);
        }
        Ok(())
    }

    /// True for a product that autocast does not compute in half precision. `learnt`: it depends on
    /// a parameter.
    fn is_exact(&self, node: Node, learnt: bool) -> bool {
        let data = &self.old.nodes[node];
        let factors = match data.op.kind() {
            OpKind::Matmul => &data.inputs[..],
            OpKind::Addmm => &data.inputs[1..],
            _ => return false,
        };
        let is_precise = factors.iter().any(|&factor| self.precise[factor]);
        is_precise || (!learnt && self.is_outer(node))
    }

    /// True for a product of one column and one row.
    fn is_outer(&self, node: Node) -> bool {
        let data = &self.old.nodes[node];
        let Op::Matmul(product) = &data.op else {
            return false;
        };
        let shape = self.old.values[data.inputs[0]].ty.shape();
        let inner = shape.iter().rev().nth(usize::from(product.ta));
        inner == Some(&1)
    }

    /// True for rows that are taken by index and then only multiplied, such as the tokens of
    /// experts, if there are more of them than in what they are taken from. Then that is cast, and
    /// not the rows: the numbers are the same.
    fn is_for_products(&self, node: Node, learnt: bool) -> bool {
        let data = &self.old.nodes[node];
        let numel = |value: Value| self.old.values[value].ty.numel();
        let is_product = |reader: &Option<Node>| {
            reader.is_some_and(|reader| {
                use OpKind as K;
                let kind = self.old.nodes[reader].op.kind();
                matches!(kind, K::Matmul | K::GroupedMatmul | K::GroupedOuter)
                    && !self.is_exact(reader, learnt)
            })
        };
        matches!(data.op, Op::Index)
            && numel(data.inputs[0]) <= numel(data.outputs[0])
            && self.readers[data.outputs[0]].iter().all(is_product)
    }

    /// True for `addmm` that adds a product to a tensor of its shape, such as a gradient so far,
    /// not to a bias.
    fn is_sum(&self, node: Node) -> bool {
        let data = &self.old.nodes[node];
        let shape = |value: Value| self.old.values[value].ty.shape();
        matches!(data.op, Op::Addmm(_))
            && data.phase != Phase::Forward
            && shape(data.inputs[0]) == shape(data.outputs[0])
    }
}

/// True for operands that are f32 whatever the others are: the logarithms of attention's sums, the
/// sums of products, and the numbers of `nll_loss`.
fn stays_full(op: &Op, operand: usize) -> bool {
    match op.kind() {
        OpKind::SdpaBwd | OpKind::SdpaRowsBwd => operand == 5,
        OpKind::MatmulSum => operand == 2,
        _ => false,
    }
}
