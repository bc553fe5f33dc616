//! Attaches an optimizer to a graph that computes gradients.
//!
//! Before: `graph.gradients` names the gradient of each trained parameter. After: each parameter's
//! new value is computed from its gradient; moments and the step count are states; the options
//! (learning rate, …) are one small input, so that they may change from step to step. Without an
//! optimizer the gradients become outputs `grad.PATH`.
//!
//! The norm over all gradients may be clipped, as `torch.nn.utils.clip_grad_norm_` does. Then each
//! gradient's squares are summed as soon as it is computed, and every update uses a factor that is
//! computed from the sums. So updates come after all gradients. In between, a gradient may leave
//! memory or be computed again, like any value.
//!
//! Bytes of a parameter with its states under AdamW, without the gradient: 12 in f32. 6 in bf16,
//! with moments in bf16. 12 in bf16 with [`Master::Split`]: 2 of the parameter, 2 that extend it to
//! an f32 master, and two moments in f32. 14 with [`Master::Full`].
//!
//! Scaled gradients are divided by their scale, and if one of them is not finite, no state is
//! updated: see [`super::scale`].

mod formula;
mod norm;
mod rounding;
mod rules;
mod scaling;
mod updates;

use super::scale::LossScale;
pub use artifact::{LOW, MASTER};
use ir::graph::{self, Output, StateData};
use ir::op::attrs::Scalar;
use ir::op::{Number, Op};
use ir::types::TypeError;
use ir::{DType, Graph, Phase, State, StateKind, TensorType, Value};
use rounding::Random;
pub use rules::{Optimizer, parameters_of};
pub use scaling::{FOUND_INF, GROWTH_TRACKER, LOSS_SCALE};
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;
use updates::{Factors, Nodes, Updates, factors};

ir::named! {
    /// The f32 master of a half-precision parameter.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum Master {
        /// No master: the parameter is updated in its own type.
        #[default]
        None = "none",
        /// An f32 is updated. The bf16 parameter is its upper half, and a state `low.PATH` has its
        /// lower 16 bits. No bit of the f32 is lost or stored twice. See the op `adamw_split`.
        Split = "split",
        /// An f32 is updated, a state `master.PATH`, and the parameter is what it rounds to. An f32
        /// that does not round to the parameter becomes the parameter first.
        Full = "full",
    }
}

ir::named! {
    /// How new values of bf16 parameters without masters are rounded.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum Rounding {
        /// To the nearest.
        #[default]
        Nearest = "nearest",
        /// To one of the two neighbours at random, so that the mean is the value. Moments are f32.
        Stochastic = "stochastic",
    }
}

impl Rounding {
    /// True if new values of a parameter of this type are rounded at random.
    fn is_random(self, ty: &TensorType) -> bool {
        self == Rounding::Stochastic && ty.dtype() == DType::BF16
    }
}

impl Master {
    /// True if a parameter of this type is stored in two halves.
    fn splits(self, ty: &TensorType) -> bool {
        self == Master::Split && ty.dtype() == DType::BF16
    }

    /// True if a parameter of this type is updated in an f32 beside it.
    fn widens(self, ty: &TensorType) -> bool {
        self == Master::Full && matches!(ty.dtype(), DType::BF16 | DType::F16)
    }
}

/// What the pass attaches.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Attach {
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The masters of half-precision parameters.
    pub master: Master,
    /// How parameters without masters are rounded.
    pub rounding: Rounding,
    /// The largest norm over all gradients. Larger ones are scaled down to it.
    pub clip_norm: Option<f64>,
    /// The norm over all gradients, before they are clipped, becomes the output [`GRAD_NORM`].
    pub grad_norm: bool,
    /// Groups of parameters with options of their own: the group of a parameter, by its path. A
    /// parameter that is not listed is in group 0.
    pub groups: BTreeMap<String, usize>,
    /// The groups whose moments are numbers where the optimizer has codes.
    pub whole: BTreeSet<usize>,
    /// How the scale of the loss changes, if gradients are scaled.
    pub loss_scale: Option<LossScale>,
}

impl From<Optimizer> for Attach {
    fn from(optimizer: Optimizer) -> Attach {
        Attach {
            optimizer,
            ..Attach::default()
        }
    }
}

/// Why an optimizer cannot be attached to a graph.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum AttachError {
    /// The largest norm of gradients is not above 0, or not finite.
    #[error("gradients cannot be clipped to a norm of {0}; it should be a positive number")]
    NoNorm(f64),
    /// The norm of gradients is wanted, but there is no optimizer.
    #[error(
        "the norm over all gradients is computed for an optimizer's updates, and there is none"
    )]
    NoUpdates,
    /// The optimizer keeps no masters in halves.
    #[error(
        "--master split is for adamw alone, not for {}; --master full is for all optimizers",
        .0.name()
    )]
    NoMasters(Optimizer),
    /// Parameters with masters are rounded to the nearest.
    #[error("--rounding stochastic is for parameters without masters; leave --master out")]
    RoundedMasters,
    /// No parameter is rounded.
    #[error("--rounding stochastic is for bf16 parameters, and the model has none")]
    NoBf16,
    /// No parameter has a master.
    #[error(
        "--master {} is for parameters in {}, and the model has none", .0.name(),
        if *.0 == Master::Split { "bf16 (full is also for f16)" } else { "bf16 and f16" }
    )]
    NoRoundings(Master),
    /// The graph has no gradients.
    #[error(
        "{} cannot be attached: the graph computes no gradient; --differentiate adds the backward \
         of a forward",
        .0.name()
    )]
    NoGradient(Optimizer),
    /// The graph already has the input with an optimizer's options.
    #[error("%{HYPER} is there already: the graph has an optimizer")]
    Attached,
    /// The graph updates a parameter itself.
    #[error(
        "{} cannot be attached: the graph has an update of {state} already",
        .optimizer.name()
    )]
    Updated {
        /// The optimizer.
        optimizer: Optimizer,
        /// The parameter's path.
        state: String,
    },
    /// The update does not fit a parameter.
    #[error("{} cannot be attached to {path}: {source}", .optimizer.name())]
    Update {
        /// The optimizer.
        optimizer: Optimizer,
        /// The parameter's path.
        path: String,
        /// What does not fit.
        source: graph::Error,
    },
    /// The type of a state or of the options is not possible.
    #[error(transparent)]
    Type(#[from] TypeError),
    /// The node of the clipping or of the count of steps does not fit the graph.
    #[error(transparent)]
    Graph(#[from] graph::Error),
}

/// The input that holds the options, of group 0 if there are several.
pub const HYPER: &str = artifact::OPTIMIZER_INPUT;

/// The output that is the norm over all gradients, f64.
pub const GRAD_NORM: &str = "grad_norm";

/// The input that holds the options of a group.
pub fn hyper_of(group: usize) -> String {
    match group {
        0 => HYPER.to_string(),
        _ => format!("{HYPER}.{group}"),
    }
}

/// Attaches an optimizer. An error says why this is not possible.
pub fn run(graph: &mut Graph, attach: impl Into<Attach>) -> Result<(), AttachError> {
    let attach = attach.into();
    let optimizer = attach.optimizer;
    attach.check_options()?;
    let gradients = std::mem::take(&mut graph.gradients);
    if optimizer == Optimizer::None {
        return as_outputs(graph, &attach, gradients);
    }
    attach.check_graph(graph, &gradients)?;
    let rule = optimizer.rule();
    let mut updates = Updates {
        hypers: hyper_inputs(graph, &gradients, rule.options.len(), &attach.groups)?,
        shared: BTreeMap::new(),
        factors: Factors::default(),
        step: None,
        random: None,
        attach: &attach,
        rule,
    };
    let count = match updates.rule.counts_steps {
        true => Some(step_count(graph)?),
        false => None,
    };
    updates.factors = factors(graph, &attach, &gradients)?;
    if let Some(count) = count {
        updates.count(graph, count)?;
    }
    if attach.rounding == Rounding::Stochastic {
        updates.random = Some(Random::of(graph)?);
    }
    for (state, gradient) in gradients {
        let path = graph.states[state].path.clone();
        let added = updates.add(graph, state, gradient);
        added.map_err(|error| match error {
            AttachError::Graph(source) => AttachError::Update {
                optimizer,
                path,
                source,
            },
            other => other,
        })?;
    }
    Ok(())
}

/// Makes the gradients outputs; scaled ones are divided by the scale.
fn as_outputs(
    graph: &mut Graph,
    attach: &Attach,
    gradients: Vec<(State, Value)>,
) -> Result<(), AttachError> {
    let factor = factors(graph, attach, &gradients)?.scale;
    for (state, mut value) in gradients {
        let name = format!("grad.{}", graph.states[state].path);
        if let Some(factor) = factor {
            let dtype = graph.values[value].ty.dtype();
            let module = &module_of(&graph.states[state].path);
            let mut nodes = Nodes { graph, module };
            let factor = nodes.cast(factor, dtype, &format!("{name}.factor"))?;
            value = nodes.add(Op::Mul, &[value, factor], &name)?;
        }
        graph.outputs.push(Output { name, value });
    }
    Ok(())
}

impl Attach {
    /// Refuses options that exclude each other.
    fn check_options(&self) -> Result<(), AttachError> {
        let norm = self.clip_norm;
        if let Some(norm) = norm.filter(|norm| !(norm.is_finite() && *norm > 0.0)) {
            return Err(AttachError::NoNorm(norm));
        }
        if self.optimizer == Optimizer::None && (norm.is_some() || self.grad_norm) {
            return Err(AttachError::NoUpdates);
        }
        if self.master == Master::Split && self.optimizer != Optimizer::AdamW {
            return Err(AttachError::NoMasters(self.optimizer));
        }
        if self.rounding == Rounding::Stochastic && self.master != Master::None {
            return Err(AttachError::RoundedMasters);
        }
        Ok(())
    }

    /// Refuses a graph to which the optimizer cannot be attached.
    fn check_graph(&self, graph: &Graph, gradients: &[(State, Value)]) -> Result<(), AttachError> {
        let (optimizer, master) = (self.optimizer, self.master);
        if gradients.is_empty() {
            return Err(AttachError::NoGradient(optimizer));
        }
        if graph.values.values().any(|data| data.name == HYPER) {
            return Err(AttachError::Attached);
        }
        let mut states = gradients.iter().map(|&(state, _)| &graph.states[state]);
        if let Some(state) = states.clone().find(|state| state.before != state.after) {
            return Err(AttachError::Updated {
                optimizer,
                state: state.path.clone(),
            });
        }
        let is_random = |state: &StateData| self.rounding.is_random(&graph.values[state.before].ty);
        if self.rounding == Rounding::Stochastic && !states.clone().any(is_random) {
            return Err(AttachError::NoBf16);
        }
        let has_master = |state: &StateData| {
            let ty = &graph.values[state.before].ty;
            master.splits(ty) || master.widens(ty)
        };
        if master != Master::None && !states.any(has_master) {
            return Err(AttachError::NoRoundings(master));
        }
        Ok(())
    }
}

fn group_of(groups: &BTreeMap<String, usize>, path: &str) -> usize {
    groups.get(path).copied().unwrap_or(0)
}

/// Adds the input with the options of each group that has a gradient.
fn hyper_inputs(
    graph: &mut Graph,
    gradients: &[(State, Value)],
    n_options: usize,
    groups: &BTreeMap<String, usize>,
) -> Result<BTreeMap<usize, Value>, TypeError> {
    let ty = TensorType::new(DType::F64, [n_options as u64])?;
    let states = gradients.iter().map(|&(state, _)| &graph.states[state]);
    let used: BTreeSet<usize> = states.map(|state| group_of(groups, &state.path)).collect();
    let input = |group| (group, graph.add_input(hyper_of(group), ty.clone()));
    Ok(used.into_iter().map(input).collect())
}

/// The module of a parameter.
fn module_of(path: &str) -> String {
    path.rsplit_once('.')
        .map_or("", |(module, _)| module)
        .to_string()
}

/// The path of the count of steps.
pub const STEP: &str = "optimizer.step";

/// Adds the count of steps, a state.
fn step_count(graph: &mut Graph) -> Result<State, AttachError> {
    let state = graph.states.next_id();
    let ty = TensorType::new(DType::I64, [])?;
    let before = graph.add_state(STEP, STEP, StateKind::Moment, ty);
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
    Ok(state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_group_of_parameters_reads_an_input_of_its_own() {
        let mut graph = ir::text::parse_graph(
            r#"graph two {
                 input  %x : f32[4]
                 state  param  %a -> %a : f32[4] "a"
                 state  param  %b -> %b : f32[4] "b"
                 fwd m  %p = mul %x, %a : f32[4]
                 fwd m  %q = mul %p, %b : f32[4]
                 fwd m  %loss = sum %q dims=[0] keepdim=false : f32[]
                 output loss = %loss
                 gradient "a" = %q
                 gradient "b" = %p
               }"#,
        )
        .expect("the text should be a graph");
        let attach = Attach {
            optimizer: Optimizer::Sgd,
            groups: BTreeMap::from([("b".to_string(), 1), ("absent".to_string(), 2)]),
            ..Attach::default()
        };
        run(&mut graph, attach).expect("sgd should fit the graph");
        let names = graph.inputs.iter().map(|&v| graph.values[v].name.as_str());
        let names: Vec<&str> = names.collect();
        assert_eq!(names, ["x", "optimizer.hyper", "optimizer.hyper.1"]);
        let text = ir::text::print_graph(&graph);
        assert!(text.contains("sgd %a, %q, %optimizer.hyper :"), "{text}");
        assert!(text.contains("sgd %b, %p, %optimizer.hyper.1 :"), "{text}");
    }
}
