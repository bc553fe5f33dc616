//! The optimizers: their options, the states of a parameter, and the nodes of its update.

use super::{Master, formula};
use ir::graph;
use ir::op::Op;
use ir::op::maps::BLOCK_8BIT;
use ir::types::TypeError;
use ir::{DType, Graph, Phase, TensorType, Value};
use std::collections::{BTreeMap, BTreeSet};

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
        /// The same with moments in bf16.
        AdamWBf16 = "adamw-bf16",
        /// The same with moments in blocks of 8-bit codes, as in the library bitsandbytes.
        AdamW8bit = "adamw-8bit",
        /// Signs of averages of gradients.
        Lion = "lion",
        /// Adam without a first moment, and with the second one by row and by column.
        Adafactor = "adafactor",
        /// The same as its paper has it: steps are relative to a parameter's size, and become
        /// smaller by themselves.
        AdafactorPaper = "adafactor-paper",
        /// The same with a first moment.
        AdafactorPaperMomentum = "adafactor-paper-momentum",
        /// Orthogonal updates of matrices, AdamW for other parameters.
        Muon = "muon",
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
    /// The same for groups whose moments are numbers, where an optimizer has codes.
    pub(super) whole_moments: Option<WholeMoments>,
    /// Adds the nodes of one parameter's update. Returns the new value of the parameter, then those
    /// of its moments.
    pub(super) update: fn(&mut Update<'_>) -> Result<Vec<Value>, graph::Error>,
}

/// The states of a parameter of a type, as numbers.
type WholeMoments = fn(&TensorType) -> Result<Vec<Moment>, TypeError>;

/// A state of a parameter.
pub(super) struct Moment {
    /// Its path is this name, a dot and the parameter's path.
    pub(super) name: &'static str,
    pub(super) ty: TensorType,
}

/// The parameters of which a path may be a moment: `fc.weight` of `exp_avg.fc.weight`.
pub fn parameters_of(path: &str) -> BTreeSet<&str> {
    // The moments depend on the type and the number of dimensions.
    let types = [
        (DType::F32, &[1][..]),
        (DType::F32, &[1, 1]),
        (DType::F32, &[FEWEST_IN_CODES]),
        (DType::BF16, &[1]),
    ];
    let types = types.map(|(dtype, shape)| TensorType::new(dtype, shape));
    let master = path.strip_prefix(super::MASTER);
    let master = master.and_then(|rest| rest.strip_prefix('.'));
    let mut parameters = BTreeSet::from_iter(master);
    for optimizer in Optimizer::ALL {
        let moments = types.iter().flatten();
        let moments = moments.flat_map(|ty| (optimizer.rule().moments)(ty, Master::Split));
        let rest = |moment: Moment| path.strip_prefix(moment.name)?.strip_prefix('.');
        parameters.extend(moments.flatten().filter_map(rest));
    }
    parameters
}

/// A moment of the parameter's shape.
fn moment(name: &'static str, dtype: DType, parameter: &TensorType) -> Result<Moment, TypeError> {
    let ty = TensorType::new(dtype, parameter.shape())?;
    Ok(Moment { name, ty })
}

const ADAMW: &[(&str, f64)] = &[
    ("lr", 1e-3),
    ("beta1", 0.9),
    ("beta2", 0.999),
    ("eps", 1e-8),
    ("weight_decay", 1e-2),
];

/// The numbers of the paper. The rate is the largest relative step. What the last one is for,
/// only updates with a first moment have.
const ADAFACTOR_PAPER: &[(&str, f64)] = &[
    ("lr", 1e-2),
    ("beta2_decay", -0.8),
    ("eps1", 1e-30),
    ("eps2", 1e-3),
    ("d", 1.0),
    ("weight_decay", 0.0),
    ("scale_parameter", 1.0),
    ("relative_step", 1.0),
    // The step rises by this much each time; 1 / sqrt(t) is never above 1.
    ("warmup_init", 1.0),
    ("beta1", 0.9),
];

impl Optimizer {
    /// Everything about an optimizer except its name. A new optimizer needs a variant, an arm here,
    /// and its ops.
    pub(super) fn rule(self) -> Rule {
        match self {
            Optimizer::None => Rule {
                options: &[],
                counts_steps: false,
                moments: |_, _| Ok(vec![]),
                whole_moments: None,
                update: |update| Ok(vec![update.parameter]),
            },
            Optimizer::Sgd => Rule {
                options: &[("lr", 1e-3), ("momentum", 0.0), ("weight_decay", 0.0)],
                counts_steps: false,
                moments: |_, _| Ok(vec![]),
                whole_moments: None,
                update: |update| update.single(Op::Sgd),
            },
            Optimizer::SgdMomentum => Rule {
                options: &[("lr", 1e-3), ("momentum", 0.9), ("weight_decay", 0.0)],
                counts_steps: false,
                moments: |ty, _| Ok(vec![moment("momentum_buffer", ty.dtype(), ty)?]),
                whole_moments: None,
                update: |update| update.single(Op::SgdMomentum),
            },
            Optimizer::AdamWBf16 => Rule {
                options: ADAMW,
                counts_steps: true,
                moments: |ty, _| moments(&["exp_avg", "exp_avg_sq"], DType::BF16, ty),
                whole_moments: None,
                update: formula::adamw_of_other_types,
            },
            Optimizer::AdamW8bit => Rule {
                options: ADAMW,
                counts_steps: true,
                moments: |ty, _| adamw_8bit_moments(ty),
                whole_moments: Some(|ty| moments(&CODES, DType::F32, ty)),
                update: |update| match update.graph.values[update.moments[0]].ty.dtype() {
                    DType::U8 => update.single(Op::Adamw8bit),
                    _ => formula::adamw_of_other_types(update),
                },
            },
            Optimizer::Lion => Rule {
                options: &[
                    ("lr", 1e-4),
                    ("beta1", 0.9),
                    ("beta2", 0.99),
                    ("weight_decay", 0.0),
                ],
                counts_steps: false,
                moments: |ty, _| moments(&["exp_avg"], ty.dtype(), ty),
                whole_moments: None,
                update: formula::lion,
            },
            Optimizer::Adafactor => Rule {
                options: &[
                    ("lr", 1e-2),
                    ("beta2_decay", -0.8),
                    ("eps2", 1e-3),
                    ("d", 1.0),
                    ("weight_decay", 0.0),
                ],
                counts_steps: true,
                moments: |ty, _| adafactor_moments(ty),
                whole_moments: None,
                update: formula::adafactor,
            },
            Optimizer::AdafactorPaper => Rule {
                options: ADAFACTOR_PAPER.split_at(ADAFACTOR_PAPER.len() - 1).0,
                counts_steps: true,
                moments: |ty, _| adafactor_paper_moments(ty),
                whole_moments: None,
                update: |update| formula::adafactor_paper(update, false),
            },
            Optimizer::AdafactorPaperMomentum => Rule {
                options: ADAFACTOR_PAPER,
                counts_steps: true,
                moments: |ty, _| {
                    let mut all = adafactor_paper_moments(ty)?;
                    all.push(moment("exp_avg", at_least_f32(ty.dtype()), ty)?);
                    Ok(all)
                },
                whole_moments: None,
                update: |update| formula::adafactor_paper(update, true),
            },
            Optimizer::Muon => Rule {
                options: &[
                    ("lr", 1e-3),
                    ("momentum", 0.95),
                    ("weight_decay", 0.1),
                    ("beta1", 0.9),
                    ("beta2", 0.999),
                    ("eps", 1e-8),
                ],
                counts_steps: true,
                moments: |ty, _| match ty.shape() {
                    [_, _] => moments(&["momentum_buffer"], ty.dtype(), ty),
                    _ => moments(&["exp_avg", "exp_avg_sq"], ty.dtype(), ty),
                },
                whole_moments: None,
                update: formula::muon,
            },
            Optimizer::AdamW => Rule {
                options: ADAMW,
                counts_steps: true,
                moments: adamw_moments,
                whole_moments: None,
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

fn moments(
    names: &[&'static str],
    dtype: DType,
    parameter: &TensorType,
) -> Result<Vec<Moment>, TypeError> {
    let names = names.iter();
    names.map(|name| moment(name, dtype, parameter)).collect()
}

/// The least number of elements of a parameter whose moments are in codes: that of bitsandbytes.
const FEWEST_IN_CODES: u64 = 4096;

/// The names of bitsandbytes.
const CODES: [&str; 2] = ["state1", "state2"];

/// The states of bitsandbytes.
fn adamw_8bit_moments(ty: &TensorType) -> Result<Vec<Moment>, TypeError> {
    if ty.numel() < FEWEST_IN_CODES {
        return moments(&CODES, DType::F32, ty);
    }
    let blocks = TensorType::new(DType::F32, [ty.numel().div_ceil(BLOCK_8BIT)])?;
    let codes = moments(&CODES, DType::U8, ty)?;
    let largest = moments(&["absmax1", "absmax2"], DType::F32, &blocks)?;
    Ok(codes.into_iter().chain(largest).collect())
}

/// The mean squares of rows and of columns; of elements for a vector.
fn adafactor_moments(ty: &TensorType) -> Result<Vec<Moment>, TypeError> {
    let [.., rows, columns] = *ty.shape() else {
        return moments(&["variance"], ty.dtype(), ty);
    };
    let of = |name, last: [u64; 2]| {
        let mut shape = ty.shape().to_vec();
        shape.truncate(shape.len() - 2);
        shape.extend(last);
        let ty = TensorType::new(ty.dtype(), shape)?;
        Ok(Moment { name, ty })
    };
    Ok(vec![
        of("row_var", [rows, 1])?,
        of("col_var", [1, columns])?,
    ])
}

/// The same in the shapes and types of transformers.
fn adafactor_paper_moments(ty: &TensorType) -> Result<Vec<Moment>, TypeError> {
    let dtype = at_least_f32(ty.dtype());
    let [ref outer @ .., rows, columns] = *ty.shape() else {
        return moments(&["exp_avg_sq"], dtype, ty);
    };
    let of = |name, last: u64| {
        let ty = TensorType::new(dtype, [outer, &[last]].concat())?;
        Ok(Moment { name, ty })
    };
    Ok(vec![
        of("exp_avg_sq_row", rows)?,
        of("exp_avg_sq_col", columns)?,
    ])
}

/// The type in which moments of a parameter in half precision are kept.
fn at_least_f32(dtype: DType) -> DType {
    match dtype {
        DType::F64 => dtype,
        _ => DType::F32,
    }
}

fn adamw_moments(ty: &TensorType, master: Master) -> Result<Vec<Moment>, TypeError> {
    let own = ty.dtype();
    let moments: &[(&'static str, DType)] = if master.splits(ty) {
        &[
            (super::LOW, DType::I16),
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
    /// The names of the options, and their defaults.
    pub(super) options: &'static [(&'static str, f64)],
    /// Numbers that are computed once for all parameters of a group, by its options and a name.
    pub(super) shared: &'a mut BTreeMap<(Value, String), Value>,
    /// True while one of them is added.
    pub(super) is_shared: bool,
}

impl Update<'_> {
    /// Adds one node that computes the whole update: op(parameter, gradient, moments.., [step,]
    /// options [, scale]).
    pub(super) fn single(&mut self, op: Op) -> Result<Vec<Value>, graph::Error> {
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
    pub(super) fn node(
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
