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
//! an f32 master, and two moments in f32.

mod formula;
mod norm;
mod rules;

use ir::graph::{self, Output, StateData};
use ir::op::attrs::Scalar;
use ir::op::{Number, Op};
use ir::types::TypeError;
use ir::{DType, Graph, Phase, State, StateKind, TensorType, Value};
use rules::{Moment, Update};
pub use rules::{Optimizer, parameters_of};
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

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
    }
}

impl Master {
    /// True if a parameter of this type is stored in two halves.
    fn splits(self, ty: &TensorType) -> bool {
        self == Master::Split && ty.dtype() == DType::BF16
    }
}

/// What the pass attaches.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Attach {
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The masters of half-precision parameters.
    pub master: Master,
    /// The largest norm over all gradients. Larger ones are scaled down to it.
    pub clip_norm: Option<f64>,
    /// The norm over all gradients, before they are clipped, becomes the output [`GRAD_NORM`].
    pub grad_norm: bool,
    /// Groups of parameters with options of their own: the group of a parameter, by its path. A
    /// parameter that is not listed is in group 0.
    pub groups: BTreeMap<String, usize>,
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
    /// The optimizer keeps no masters.
    #[error("masters are kept by adamw alone, not by {}", .0.name())]
    NoMasters(Optimizer),
    /// No parameter is bf16.
    #[error("masters are kept for bf16 parameters, and the model has none")]
    NoRoundings,
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
    let Attach {
        optimizer,
        master,
        clip_norm,
        grad_norm,
        ref groups,
    } = attach;
    attach.check_options()?;
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
    attach.check_graph(graph, &gradients)?;
    let rule = optimizer.rule();
    let hypers = hyper_inputs(graph, &gradients, rule.options.len(), groups)?;
    let step = if rule.counts_steps {
        Some(step_count(graph)?)
    } else {
        None
    };
    let mut shared = BTreeMap::new();
    let mut scale = None;
    if clip_norm.is_some() || grad_norm {
        let squares = norm::squares(graph, &gradients)?;
        if let Some(norm) = clip_norm {
            scale = Some(norm::clip_scale(graph, &squares, norm)?);
        }
        if grad_norm {
            let (name, value) = (GRAD_NORM.to_string(), norm::norm(graph, &squares)?);
            graph.outputs.push(Output { name, value });
        }
    }
    for (state, gradient) in gradients {
        let path = graph.states[state].path.clone();
        let parameter = graph.states[state].before;
        let name = graph.values[parameter].name.clone();
        let ty = graph.values[parameter].ty.clone();

        let mut changed = vec![state];
        let mut moments = vec![];
        for Moment { name: moment, ty } in (rule.moments)(&ty, master)? {
            changed.push(graph.states.next_id());
            moments.push(graph.add_state(
                format!("{moment}.{name}"),
                format!("{moment}.{path}"),
                StateKind::Moment,
                ty,
            ));
        }
        let mut update = Update {
            graph: &mut *graph,
            module: module_of(&path),
            parameter,
            gradient,
            moments,
            step,
            hyper: hypers[&group_of(groups, &path)],
            scale,
            is_split: master.splits(&ty),
            options: rule.options,
            shared: &mut shared,
            is_shared: false,
        };
        let after = (rule.update)(&mut update).map_err(|source| AttachError::Update {
            optimizer,
            path,
            source,
        })?;
        assert_eq!(
            after.len(),
            changed.len(),
            "an update should give the parameter and each moment"
        );
        for (state, after) in changed.into_iter().zip(after) {
            graph.states[state].after = after;
        }
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
        let splits = |state: &StateData| master.splits(&graph.values[state.before].ty);
        if master == Master::Split && !states.any(splits) {
            return Err(AttachError::NoRoundings);
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

/// Adds the count of steps, a state; returns its new value.
fn step_count(graph: &mut Graph) -> Result<Value, AttachError> {
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
    Ok(after[0])
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
