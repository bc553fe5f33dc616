//! The optimizers: their options, the states of a parameter, and the nodes of its update.

use super::Master;
use ir::graph;
use ir::op::Op;
use ir::types::TypeError;
use ir::{DType, Graph, Phase, TensorType, Value};

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
pub(super) struct Rule {
    /// Options in the order in which the input [`HYPER`] holds them, with PyTorch's defaults.
    pub(super) options: &'static [(&'static str, f64)],
    /// True if updates read the number of the step, from 1.
    pub(super) counts_steps: bool,
    /// The states of a parameter of a type. Their shapes may differ from the parameter's: a
    /// factored second moment has a row and a column.
    pub(super) moments: fn(&TensorType, Master) -> Result<Vec<Moment>, TypeError>,
    /// Adds the nodes of one parameter's update. Returns the new value of the parameter, then those
    /// of its moments.
    pub(super) update: fn(&mut Update<'_>) -> Result<Vec<Value>, graph::Error>,
}

/// A state of a parameter.
pub(super) struct Moment {
    /// Its path is this name, a dot and the parameter's path.
    pub(super) name: &'static str,
    pub(super) ty: TensorType,
}

/// A moment of the parameter's shape.
fn moment(name: &'static str, dtype: DType, parameter: &TensorType) -> Result<Moment, TypeError> {
    let ty = TensorType::new(dtype, parameter.shape())?;
    Ok(Moment { name, ty })
}

impl Optimizer {
    /// Everything about an optimizer except its name. A new optimizer needs a variant, an arm here,
    /// and its ops.
    pub(super) fn rule(self) -> Rule {
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
pub(super) struct Update<'a> {
    pub(super) graph: &'a mut Graph,
    /// The module of the parameter.
    pub(super) module: String,
    pub(super) parameter: Value,
    pub(super) gradient: Value,
    /// The parameter's moments, in the order of the rule.
    pub(super) moments: Vec<Value>,
    /// The number of the step, if the optimizer counts steps.
    pub(super) step: Option<Value>,
    /// The options.
    pub(super) hyper: Value,
    /// The factor of the gradient, if gradients are clipped.
    pub(super) scale: Option<Value>,
    /// True if the parameter is the upper half of an f32.
    pub(super) is_split: bool,
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
