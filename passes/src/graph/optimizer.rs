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

use ir::graph::{self, Output, StateData};
use ir::op::attrs::{ClipScale, Scalar};
use ir::op::{Number, Op};
use ir::types::TypeError;
use ir::{DType, Graph, Phase, State, StateKind, TensorType, Value};
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

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

/// What an optimizer does.
struct Rule {
    /// Options in the order in which the input [`HYPER`] holds them, with PyTorch's defaults.
    options: &'static [(&'static str, f64)],
    /// True if updates read the number of the step, from 1.
    counts_steps: bool,
    /// The states of a parameter of a type. Their shapes may differ from the parameter's: a
    /// factored second moment has a row and a column.
    moments: fn(&TensorType, Master) -> Result<Vec<Moment>, TypeError>,
    /// Adds the nodes of one parameter's update. Returns the new value of the parameter, then those
    /// of its moments.
    update: fn(&mut Update<'_>) -> Result<Vec<Value>, graph::Error>,
}

/// A state of a parameter.
struct Moment {
    /// Its path is this name, a dot and the parameter's path.
    name: &'static str,
    ty: TensorType,
}

/// A moment of the parameter's shape.
fn moment(name: &'static str, dtype: DType, parameter: &TensorType) -> Result<Moment, TypeError> {
    let ty = TensorType::new(dtype, parameter.shape())?;
    Ok(Moment { name, ty })
}

impl Optimizer {
    /// Everything about an optimizer except its name. A new optimizer needs a variant, an arm here,
    /// and its ops.
    fn rule(self) -> Rule {
        match self {
            Optimizer::None => Rule {
                options: &[],
                counts_steps: false,
                moments: |_, _| Ok(vec![]),
                update: |update| Ok(vec![update.parameter]),
            },
            Optimizer::Sgd => Rule {
                options: &[("lr", 1e-3), ("momentum", 0.0), ("weight_decay", 0.0)],
                counts_steps: false,
                moments: |_, _| Ok(vec![]),
                update: |update| update.single(Op::Sgd),
            },
            Optimizer::SgdMomentum => Rule {
                options: &[("lr", 1e-3), ("momentum", 0.9), ("weight_decay", 0.0)],
                counts_steps: false,
                moments: |ty, _| Ok(vec![moment("momentum_buffer", ty.dtype(), ty)?]),
                update: |update| update.single(Op::SgdMomentum),
            },
            Optimizer::AdamW => Rule {
                options: &[
                    ("lr", 1e-3),
                    ("beta1", 0.9),
                    ("beta2", 0.999),
                    ("eps", 1e-8),
                    ("weight_decay", 1e-2),
                ],
                counts_steps: true,
                moments: adamw_moments,
                update: |update| {
                    let op = if update.is_split {
                        Op::AdamwSplit
                    } else {
                        Op::Adamw
                    };
                    update.single(op)
                },
            },
        }
    }

    /// The options in the order in which the `optimizer.hyper` input holds them, with their
    /// defaults, which are PyTorch's.
    pub fn options(self) -> &'static [(&'static str, f64)] {
        self.rule().options
    }
}

fn adamw_moments(ty: &TensorType, master: Master) -> Result<Vec<Moment>, TypeError> {
    let own = ty.dtype();
    let moments: &[(&'static str, DType)] = if master.splits(ty) {
        &[
            ("low", DType::I16),
            ("exp_avg", DType::F32),
            ("exp_avg_sq", DType::F32),
        ]
    } else {
        &[("exp_avg", own), ("exp_avg_sq", own)]
    };
    let moments = moments.iter();
    moments
        .map(|&(name, dtype)| moment(name, dtype, ty))
        .collect()
}

/// The update of one parameter that is being built.
struct Update<'a> {
    graph: &'a mut Graph,
    /// The module of the parameter.
    module: String,
    parameter: Value,
    gradient: Value,
    /// The parameter's moments, in the order of the rule.
    moments: Vec<Value>,
    /// The number of the step, if the optimizer counts steps.
    step: Option<Value>,
    /// The options.
    hyper: Value,
    /// The factor of the gradient, if gradients are clipped.
    scale: Option<Value>,
    /// True if the parameter is the upper half of an f32.
    is_split: bool,
}

impl Update<'_> {
    /// Adds one node that computes the whole update: op(parameter, gradient, moments.., [step,]
    /// options [, scale]).
    fn single(&mut self, op: Op) -> Result<Vec<Value>, graph::Error> {
        let mut inputs = vec![self.parameter, self.gradient];
        inputs.extend(&self.moments);
        inputs.extend(self.step);
        inputs.push(self.hyper);
        inputs.extend(self.scale);
        let before = [self.parameter].into_iter().chain(self.moments.clone());
        let names: Vec<String> = before
            .map(|value| format!("{}'", self.graph.values[value].name))
            .collect();
        self.node(op, &inputs, &names)
    }
    /// Adds a node of the update.
    fn node(
        &mut self,
        op: Op,
        inputs: &[Value],
        names: &[String],
    ) -> Result<Vec<Value>, graph::Error> {
        let module = self.module.clone();
        self.graph
            .add_node(op, inputs, names, Phase::Optimizer, module)
    }
}

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
    /// Gradients should be clipped, but there is no optimizer.
    #[error("gradients are clipped for an optimizer's updates, and there is none")]
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
    let scale = clip_norm
        .map(|norm| clip_scale(graph, &gradients, norm))
        .transpose()?;
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
        if norm.is_some() && self.optimizer == Optimizer::None {
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

/// The most sums of squares that one kernel reads: GPUs pass a few hundred addresses to a kernel.
const MOST_SUMS: usize = 192;

/// Adds the factor by which gradients are multiplied so that the norm over all of them is at most
/// `norm`.
fn clip_scale(
    graph: &mut Graph,
    gradients: &[(State, Value)],
    norm: f64,
) -> Result<Value, graph::Error> {
    let mut sums: Vec<Value> = vec![];
    for &(state, gradient) in gradients {
        let StateData { before, path, .. } = &graph.states[state];
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
    // The first sums are added up before: the same additions in the same order.
    while sums.len() > MOST_SUMS {
        let name = format!("squares.{}", sums.len() - MOST_SUMS);
        let added = graph.add_node(Op::Add, &sums[..2], &[name], Phase::Optimizer, "")?;
        sums.splice(..2, added);
    }
    let op = Op::ClipScale(ClipScale { max_norm: norm });
    Ok(graph.add_node(op, &sums, &["clip_scale".into()], Phase::Optimizer, "")?[0])
}

/// Adds the count of steps, a state; returns its new value.
fn step_count(graph: &mut Graph) -> Result<Value, AttachError> {
    let state = graph.states.next_id();
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
