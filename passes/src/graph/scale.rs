//! Scales the loss, so that gradients in f16 do not vanish: the derivative of the loss by itself,
//! where the backward starts, becomes a number, the scale, that is a state of the step.
//!
//! Before: a step with gradients. After: each gradient is the former one times the scale. The pass
//! `optimizer` divides gradients by it, leaves out the update if one of them is not finite, and
//! changes the scale (Micikevicius et al., 2018, arXiv 1710.03740; `torch.amp.GradScaler`).
//!
//! A step that PyTorch traced has its backward, and does not say where it starts. The start is a
//! constant of the backward on which every gradient depends linearly. This is proved for the
//! constant that is taken: all nodes between it and the gradients are linear in it, and nothing
//! else that leaves the step depends on it. So it does not matter which constant is found.

use ir::graph;
use ir::op::attrs::{Cast, Full, Scalar, Sizes};
use ir::op::{Number, OpKind};
use ir::types::TypeError;
use ir::{DType, Graph, Node, Op, Phase, StateKind, Table, TensorType, Value};
use thiserror::Error;

/// The path of the scale, a state, f32. 0 stands for the first scale.
pub const SCALE: &str = "optimizer.scale";

/// How the scale changes. The defaults are those of `torch.amp.GradScaler`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LossScale {
    /// The first scale.
    pub init: f64,
    /// The factor of the scale after `interval` updates without an overflow.
    pub growth: f64,
    /// The factor of the scale after an overflow.
    pub backoff: f64,
    /// Updates until the scale grows.
    pub interval: u32,
}

impl Default for LossScale {
    fn default() -> LossScale {
        LossScale {
            init: 65536.0,
            growth: 2.0,
            backoff: 0.5,
            interval: 2000,
        }
    }
}

impl LossScale {
    /// Parses `init=1024,growth=2,backoff=0.5,interval=500`; what is not given has its default.
    ///
    /// # Errors
    ///
    /// A part is not a known name and a number, or the numbers do not make a scale.
    pub fn parse(text: &str) -> Result<LossScale, ScaleError> {
        let mut numbers = LossScale::default();
        for part in text.split(',') {
            let wrong = || ScaleError::Text(part.to_string());
            let (name, value) = part.split_once('=').ok_or_else(wrong)?;
            let value = value.trim();
            let number = || value.parse::<f64>().map_err(|_| wrong());
            match name.trim() {
                "init" => numbers.init = number()?,
                "growth" => numbers.growth = number()?,
                "backoff" => numbers.backoff = number()?,
                "interval" => numbers.interval = value.parse().map_err(|_| wrong())?,
                _ => return Err(wrong()),
            }
        }
        match numbers.fault() {
            Some(fault) => Err(ScaleError::Numbers(fault)),
            None => Ok(numbers),
        }
    }

    /// What is wrong with the numbers, if something is.
    pub fn fault(&self) -> Option<&'static str> {
        let is_scale = |x: f64| x > 0.0 && (x as f32).is_finite() && x as f32 > 0.0;
        if !is_scale(self.init) {
            Some("init should be a positive number that f32 has")
        } else if !(self.growth > 1.0 && self.growth.is_finite()) {
            Some("growth should be above 1")
        } else if !(self.backoff > 0.0 && self.backoff < 1.0) {
            Some("backoff should be between 0 and 1")
        } else if self.interval == 0 || i32::try_from(self.interval).is_err() {
            Some("interval should be a number of steps from 1")
        } else {
            None
        }
    }
}

/// Why a loss is not scaled.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum ScaleError {
    /// The numbers do not make a scale.
    #[error("the scale of the loss: {0}")]
    Numbers(&'static str),
    /// A part of the text is not understood.
    #[error("{0:?}: write init=65536,growth=2,backoff=0.5,interval=2000, or some of these")]
    Text(String),
    /// The backward does not show where it starts.
    #[error(
        "fp16 scales the loss, and no constant of the backward is its start: {0}. \
         --differentiate adds a backward to the forward alone; --precision bf16 needs no scale"
    )]
    NoStart(String),
    /// The type of the state is not possible.
    #[error(transparent)]
    Type(#[from] TypeError),
    /// A node does not fit the graph.
    #[error(transparent)]
    Graph(#[from] graph::Error),
}

/// Scales the loss. A graph without gradients is left alone.
pub fn run(graph: &mut Graph, numbers: &LossScale) -> Result<(), ScaleError> {
    if let Some(fault) = numbers.fault() {
        return Err(ScaleError::Numbers(fault));
    }
    if graph.gradients.is_empty() {
        return Ok(());
    }
    let (start, full) = start(graph)?;
    let state = graph.add_state(
        SCALE,
        SCALE,
        StateKind::Moment,
        TensorType::new(DType::F32, [])?,
    );
    let name = graph.node_name(start).to_string();
    let mut edit = graph.edit();
    let mut add = |op, inputs: &[Value], part: &str| -> Made {
        let node = edit.insert_before(start, op, inputs, &[format!("{name}.{part}")])?;
        Ok(edit.graph().nodes[node].outputs[0])
    };
    let mut scale = current(state, numbers, &mut add)?;
    if full.dtype != DType::F32 {
        scale = add(Op::Cast(Cast { dtype: full.dtype }), &[scale], "cast")?;
    }
    let value = Number::Float(full.value.to_f64());
    scale = add(Op::MulScalar(Scalar { value }), &[scale], "scaled")?;
    let shape = full.shape;
    edit.set_op(start, Op::Expand(Sizes { shape }), vec![scale]);
    edit.finish();
    Ok(())
}

/// The value that a new node computes.
type Made = Result<Value, graph::Error>;

/// The scale of this step: the state, or the first scale if the state is 0. `add` adds a node with
/// one result, whose name ends in the given word.
pub fn current(
    state: Value,
    numbers: &LossScale,
    add: &mut dyn FnMut(Op, &[Value], &str) -> Made,
) -> Made {
    let value = Number::Float(0.0);
    let is_new = add(Op::EqScalar(Scalar { value }), &[state], "is_new")?;
    let init = Full {
        dtype: DType::F32,
        shape: vec![],
        value: Number::Float(numbers.init),
    };
    let init = add(Op::Full(init), &[], "init")?;
    add(Op::Where, &[is_new, init, state], "scale")
}

/// How a value depends on a constant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Depends {
    /// Not at all.
    Not,
    /// It is zero.
    Zero,
    /// It is a multiple of it.
    Linear,
}

/// The node that starts the backward, and its number.
fn start(graph: &Graph) -> Result<(Node, Full), ScaleError> {
    let mut why = None;
    for &node in &graph.order {
        let data = &graph.nodes[node];
        let Op::Full(full) = &data.op else { continue };
        let value = full.value.to_f64();
        let starts = full.dtype.is_float() && value != 0.0 && value.is_finite();
        if data.phase != Phase::Backward || !starts {
            continue;
        }
        match depends(graph, node) {
            Ok(()) => return Ok((node, full.clone())),
            // The first constant is where a backward starts.
            Err(fault) => why = why.or(Some(fault)),
        }
    }
    let none = || "it has no constant but zeros".to_string();
    Err(ScaleError::NoStart(why.unwrap_or_else(none)))
}

/// Checks that all gradients are linear in the constant, and that nothing else depends on it.
fn depends(graph: &Graph, constant: Node) -> Result<(), String> {
    let mut known = Table::filled(graph.values.len(), Depends::Not);
    for &node in &graph.order {
        let data = &graph.nodes[node];
        let found = if node == constant {
            Some(Depends::Linear)
        } else {
            let operands: Vec<Depends> = data.inputs.iter().map(|&v| known[v]).collect();
            of_results(&data.op, &operands)
        };
        let Some(found) = found else {
            let (start, at) = (graph.node_name(constant), graph.node_name(node));
            return Err(format!(
                "%{at}, {}, is not linear in %{start}",
                data.op.name()
            ));
        };
        data.outputs.iter().for_each(|&v| known[v] = found);
    }
    let name = |value: Value| &graph.values[value].name;
    let gradients = graph.gradients.iter();
    if let Some(&(_, other)) = gradients.clone().find(|g| known[g.1] == Depends::Not) {
        let start = graph.node_name(constant);
        return Err(format!(
            "the gradient %{} does not depend on %{start}",
            name(other)
        ));
    }
    if let Some(left) = graph.left().find(|&v| known[v] == Depends::Linear) {
        return Err(format!(
            "%{}, which leaves the step, depends on it",
            name(left)
        ));
    }
    let is_scaled = |g: &(ir::State, Value)| known[g.1] == Depends::Linear;
    match gradients.clone().any(is_scaled) {
        true => Ok(()),
        false => Err("all gradients are zero".into()),
    }
}

/// How the results of an op depend on the constant; `None` if they are not linear in it.
fn of_results(op: &Op, operands: &[Depends]) -> Option<Depends> {
    let LinearIn { terms, factors } = linear_in(op, operands.len());
    let is = |i: &usize, depends| operands[*i] == depends;
    if !operands.contains(&Depends::Linear) {
        let is_sum = !terms.is_empty() || !factors.is_empty();
        let no_product = factors.is_empty() || factors.iter().any(|i| is(i, Depends::Zero));
        let no_sum = is_sum && no_product && terms.iter().all(|i| is(i, Depends::Zero));
        let is_zero = no_sum || matches!(op, Op::Full(full) if full.value.to_f64() == 0.0);
        return Some(if is_zero { Depends::Zero } else { Depends::Not });
    }
    let linear: Vec<usize> = (0..operands.len())
        .filter(|i| is(i, Depends::Linear))
        .collect();
    let n_factors = linear.iter().filter(|i| factors.contains(i)).count();
    let are_known = linear
        .iter()
        .all(|i| terms.contains(i) || factors.contains(i));
    // What is added to a multiple should be one, too.
    let no_product = factors.is_empty() || factors.iter().any(|i| is(i, Depends::Zero));
    let terms_fit = terms.iter().all(|i| !is(i, Depends::Not));
    let fits = are_known && terms_fit && (n_factors == 1 || n_factors == 0 && no_product);
    fits.then_some(Depends::Linear)
}

/// The operands in which an op is linear.
struct LinearIn {
    /// The op is linear in all of them together.
    terms: Vec<usize>,
    /// It is linear in each of them alone: the factors of a product.
    factors: Vec<usize>,
}

fn linear_in(op: &Op, n: usize) -> LinearIn {
    use OpKind as K;
    let is_affine = match op {
        Op::AddScalar(Scalar { value }) => value.to_f64() != 0.0,
        Op::Pad(pad) => pad.value.to_f64() != 0.0,
        Op::ScatterValue(scatter) => scatter.value.to_f64() != 0.0,
        Op::Cast(Cast { dtype }) => !dtype.is_float(),
        _ => false,
    };
    let (terms, factors): (Vec<usize>, Vec<usize>) = match op.kind() {
        _ if is_affine => (vec![], vec![]),
        K::Neg | K::Cast | K::MulScalar | K::DivScalar | K::AddScalar => (vec![0], vec![]),
        K::Sum | K::Mean | K::Cumsum | K::Gather | K::Index | K::ScatterValue => (vec![0], vec![]),
        K::Reshape | K::Permute | K::Expand | K::Flip | K::Slice | K::Pad => (vec![0], vec![]),
        K::Div => (vec![0], vec![]),
        // The derivatives have the gradient first.
        K::TanhBwd | K::SigmoidBwd | K::SiluBwd | K::GeluBwd | K::ThresholdBwd => (vec![0], vec![]),
        K::SoftmaxBwd | K::LogSoftmaxBwd | K::LayerNormBwd | K::BatchNormBwd => (vec![0], vec![]),
        K::ConvolutionBwd | K::MaxPool2dBwd | K::SdpaBwd | K::SdpaRowsBwd => (vec![0], vec![]),
        K::EmbeddingBwd | K::NllLossBwd | K::DropoutBwd => (vec![0], vec![]),
        K::Add | K::Sub | K::SliceScatter | K::IndexPut => (vec![0, 1], vec![]),
        K::Scatter | K::ScatterAdd => (vec![0, 2], vec![]),
        K::Where => (vec![1, 2], vec![]),
        K::Cat => ((0..n).collect(), vec![]),
        K::Mul | K::Matmul | K::GroupedMatmul | K::GroupedOuter => (vec![], vec![0, 1]),
        K::Addmm => (vec![0], vec![1, 2]),
        K::MatmulSum | K::Convolution => ((2..n).collect(), vec![0, 1]),
        _ => (vec![], vec![]),
    };
    LinearIn { terms, factors }
}
