//! Attaches an optimizer to a graph that computes gradients.
//!
//! Before: `graph.gradients` names the gradient of each trained parameter. After: each parameter's
//! new value is computed from its gradient; moments and the step count are states; the options
//! (learning rate, …) are one small input, so that they may change from step to step. Without an
//! optimizer the gradients become outputs `grad.PATH`.
//!
//! With a bound on the norm over all gradients, as `torch.nn.utils.clip_grad_norm_` has it, each
//! gradient's squares are summed as soon as it is there, and every update takes the factor that
//! follows from the sums. So updates stand after all gradients; a gradient may leave memory in
//! between, or be computed again, as any value may.
//!
//! Bytes of a parameter with its states, gradient not counted, under AdamW: 12 in f32; 6 in bf16,
//! whose moments are bf16 then; 12 in bf16 with [`Master::Split`]: 2 of the parameter, 2 that make
//! it an f32 master, and two moments in f32.

use ir::graph::{Output, State};
use ir::op::attrs::{ClipScale, Scalar};
use ir::op::{Number, Op};
use ir::{DType, Graph, Phase, StateKind, TensorType, Value};

ir::named! {
    /// An optimizer and the defaults of its options; these are PyTorch's.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum Optimizer {
        /// Gradients are outputs.
        #[default]
        None = "none",
        /// Stochastic gradient descent.
        Sgd = "sgd",
        /// The same with a momentum buffer for each parameter.
        SgdMomentum = "sgd-momentum",
        /// Adam with decoupled weight decay.
        AdamW = "adamw",
    }
}

impl Optimizer {
    /// The options in the order in which the `optimizer.hyper` input holds them, with their
    /// defaults.
    pub fn options(self) -> &'static [(&'static str, f64)] {
        match self {
            Optimizer::None => &[],
            Optimizer::Sgd => &[("lr", 1e-3), ("momentum", 0.0), ("weight_decay", 0.0)],
            Optimizer::SgdMomentum => &[("lr", 1e-3), ("momentum", 0.9), ("weight_decay", 0.0)],
            Optimizer::AdamW => &[
                ("lr", 1e-3),
                ("beta1", 0.9),
                ("beta2", 0.999),
                ("eps", 1e-8),
                ("weight_decay", 1e-2),
            ],
        }
    }
}

ir::named! {
    /// What a half-precision parameter is a rounding of.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum Master {
        /// Of nothing: it is updated as it is, in its own type.
        #[default]
        None = "none",
        /// Of an f32 that is updated: a bf16 parameter is its upper half, and a state `low.PATH` its
        /// lower 16 bits. Nothing of the f32 is lost, and nothing is stored twice. See the op
        /// `adamw_split`.
        Split = "split",
    }
}

/// What is attached.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Attach {
    /// The optimizer.
    pub optimizer: Optimizer,
    /// What half-precision parameters are roundings of.
    pub master: Master,
    /// The most that the norm over all gradients may be: larger ones are scaled down to it.
    pub clip_norm: Option<f64>,
}

impl From<Optimizer> for Attach {
    fn from(optimizer: Optimizer) -> Attach {
        Attach {
            optimizer,
            ..Attach::default()
        }
    }
}

/// The input that holds the options.
pub const HYPER: &str = artifact::OPTIMIZER_INPUT;

/// Attaches an optimizer. An error says what it does not go with.
pub fn run(graph: &mut Graph, attach: impl Into<Attach>) -> Result<(), String> {
    let Attach {
        optimizer,
        master,
        clip_norm,
    } = attach.into();
    if let Some(norm) = clip_norm.filter(|norm| !(norm.is_finite() && 0.0 < *norm)) {
        return Err(format!(
            "gradients cannot be clipped to a norm of {norm}; it should be a positive number"
        ));
    }
    if clip_norm.is_some() && optimizer == Optimizer::None {
        return Err("gradients are clipped for an optimizer's updates, and there is none".into());
    }
    if master == Master::Split && optimizer != Optimizer::AdamW {
        return Err(format!(
            "masters are kept by adamw alone, not by {}",
            optimizer.name()
        ));
    }
    let gradients = std::mem::take(&mut graph.gradients);
    if optimizer == Optimizer::None {
        for (state, gradient) in gradients {
            let name = format!("grad.{}", graph.states[state].path);
            graph.outputs.push(Output {
                name,
                value: gradient,
            });
        }
        return Ok(());
    }
    if gradients.is_empty() {
        return Err(format!(
            "{} cannot be attached: the graph computes no gradient",
            optimizer.name()
        ));
    }
    if let Some((_, v)) = graph.values.iter().find(|(_, v)| v.name == HYPER) {
        return Err(format!(
            "%{} is there already: the graph has an optimizer",
            v.name
        ));
    }
    let updated = gradients
        .iter()
        .map(|&(state, _)| &graph.states[state])
        .find(|state| state.before != state.after);
    if let Some(state) = updated {
        return Err(format!(
            "{} cannot be attached: the graph has an update of {} already",
            optimizer.name(),
            state.path
        ));
    }
    let is_split = |graph: &Graph, state: usize| {
        master == Master::Split
            && graph.values[graph.states[state].before].ty.dtype() == DType::BF16
    };
    if master == Master::Split && !gradients.iter().any(|&(state, _)| is_split(graph, state)) {
        return Err("masters are kept for bf16 parameters, and the model has none".into());
    }
    let n_options = optimizer.options().len() as u64;
    let hyper = graph.add_input(HYPER, TensorType::new(DType::F64, [n_options])?);
    let step = match optimizer {
        Optimizer::AdamW => Some(step_count(graph)?),
        _ => None,
    };
    let scale = clip_norm
        .map(|norm| clip_scale(graph, &gradients, norm))
        .transpose()?;
    for (state, gradient) in gradients {
        let path = graph.states[state].path.clone();
        let parameter = graph.states[state].before;
        let name = graph.values[parameter].name.clone();
        let shape = graph.values[parameter].ty.shape().to_vec();
        let module = module_of(&path);
        let mut inputs = vec![parameter, gradient];
        let mut changed = vec![state];
        let own = graph.values[parameter].ty.dtype();
        let (op, moments): (Op, &[(&str, DType)]) = match optimizer {
            Optimizer::None | Optimizer::Sgd => (Op::Sgd, &[]),
            Optimizer::SgdMomentum => (Op::SgdMomentum, &[("momentum_buffer", own)]),
            Optimizer::AdamW if is_split(graph, state) => (
                Op::AdamwSplit,
                &[
                    ("low", DType::I16),
                    ("exp_avg", DType::F32),
                    ("exp_avg_sq", DType::F32),
                ],
            ),
            Optimizer::AdamW => (Op::Adamw, &[("exp_avg", own), ("exp_avg_sq", own)]),
        };
        for &(moment, dtype) in moments {
            let ty = TensorType::new(dtype, shape.clone())?;
            changed.push(graph.states.len());
            inputs.push(graph.add_state(
                format!("{moment}.{name}"),
                format!("{moment}.{path}"),
                StateKind::Moment,
                ty,
            ));
        }
        inputs.extend(step);
        inputs.push(hyper);
        inputs.extend(scale);
        let names: Vec<String> = changed
            .iter()
            .map(|&s| format!("{}'", graph.values[graph.states[s].before].name))
            .collect();
        let after = graph
            .add_node(op, &inputs, &names, Phase::Optimizer, module)
            .map_err(|e| format!("{} cannot be attached to {path}: {e}", optimizer.name()))?;
        for (state, after) in changed.into_iter().zip(after) {
            graph.states[state].after = after;
        }
    }
    Ok(())
}

/// The module of a parameter.
fn module_of(path: &str) -> String {
    path.rsplit_once('.')
        .map_or("", |(module, _)| module)
        .to_string()
}

/// Adds the factor by which gradients are multiplied so that the norm over all of them is at most
/// `norm`.
fn clip_scale(graph: &mut Graph, gradients: &[(usize, Value)], norm: f64) -> Result<Value, String> {
    let mut sums = vec![];
    for &(state, gradient) in gradients {
        let State { before, path, .. } = &graph.states[state];
        let (name, module) = (
            format!("sum_squares.{}", graph.values[*before].name),
            module_of(path),
        );
        sums.extend(graph.add_node(
            Op::SumSquares,
            &[gradient],
            &[name],
            Phase::Optimizer,
            module,
        )?);
    }
    let op = Op::ClipScale(ClipScale { max_norm: norm });
    Ok(graph.add_node(op, &sums, &["clip_scale".into()], Phase::Optimizer, "")?[0])
}

/// Adds the count of steps, a state; returns its new value.
fn step_count(graph: &mut Graph) -> Result<Value, String> {
    let state = graph.states.len();
    let ty = TensorType::new(DType::I64, [])?;
    let before = graph.add_state("optimizer.step", "optimizer.step", StateKind::Moment, ty);
    let op = Op::AddScalar(Scalar {
        value: Number::Int(1),
    });
    let after = graph.add_node(
        op,
        &[before],
        &["optimizer.step'".into()],
        Phase::Optimizer,
        "",
    )?;
    graph.states[state].after = after[0];
    Ok(after[0])
}
