//! Attaches a loss to a forward: the step that comes before [`autodiff`](super::autodiff).
//!
//! Before: a forward, whatever read it. After: its only output is `loss`, one floating-point
//! number. Other outputs are dropped, because a training step would keep them in memory until its
//! end, and the logits would not be cut (see [`loss`](super::loss)).
//!
//! A loss compares an output, the logits, with labels, a new input of the step. It is computed in
//! f32, or in f64 for logits in f64, and is a mean, as PyTorch's functions of the same names:
//!
//! | loss | logits | labels | value |
//! |---|---|---|---|
//! | `cross-entropy` | `[.., classes]` | `i64[..]` | mean of -log softmax at labels except -100 |
//! | `mse` | any shape | the same type | mean of (x - t)^2 |
//! | `bce` | any shape | the same type | mean of -t log s(x) - (1 - t) log(1 - s(x)), s: sigmoid |
//! | `l1` | any shape | the same type | mean of abs(x - t) |

use super::autodiff::LOSS;
use ir::graph::{self, Output};
use ir::op::Number;
use ir::op::attrs::{Along, Cast, Full, NllLoss, Pad, Reduction, Scalar};
use ir::types::TypeError;
use ir::{DType, Graph, Op, Phase, TensorType, Value};
use thiserror::Error;

ir::named! {
    /// A loss.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum Loss {
        /// The forward computes it: an output with one element.
        #[default]
        None = "none",
        /// `torch.nn.functional.cross_entropy`, with classes in the last dimension.
        CrossEntropy = "cross-entropy",
        /// `torch.nn.functional.mse_loss`.
        Mse = "mse",
        /// `torch.nn.functional.binary_cross_entropy_with_logits`.
        Bce = "bce",
        /// `torch.nn.functional.l1_loss`.
        L1 = "l1",
    }
}

/// What is attached.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Criterion {
    /// The loss.
    pub loss: Loss,
    /// The output that it reads. If absent, the output `logits`, else the only floating-point
    /// output. Of [`Loss::None`]: the output that is the loss.
    pub logits: Option<String>,
    /// The name of the input with the labels; `labels` if absent. An input of this name is used if
    /// it has the type that the loss needs.
    pub labels: Option<String>,
    /// With cross-entropy: position i predicts the label of position i + 1, as in causal language
    /// models. Positions are the second-last dimension of the logits.
    pub shift: bool,
}

/// The target that does not count, PyTorch's default.
const IGNORED: i64 = -100;

/// Why a loss is not attached.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum CriterionError {
    /// No output has the name.
    #[error("the model has no output {name}; its outputs are {outputs}")]
    NoOutput {
        /// The name.
        name: String,
        /// The names of the outputs, with types.
        outputs: String,
    },
    /// No output is one number.
    #[error(
        "the model gives no scalar, so it has no loss: name a loss with --loss; its outputs are \
         {outputs}"
    )]
    NoScalar {
        /// The names of the outputs, with types.
        outputs: String,
    },
    /// No output has logits.
    #[error("no output has floating-point elements that a loss could read; they are {outputs}")]
    NoLogits {
        /// The names of the outputs, with types.
        outputs: String,
    },
    /// Several outputs could be meant.
    #[error("several outputs may be meant: name one with --logits; they are {outputs}")]
    Several {
        /// The names of these outputs, with types.
        outputs: String,
    },
    /// The loss has another shape or type.
    #[error("the output {name} is {ty}, and {needs}")]
    Unfit {
        /// The output.
        name: String,
        /// Its type.
        ty: String,
        /// What is needed.
        needs: &'static str,
    },
    /// The name of the labels is in use.
    #[error("the model has %{name} already, {found}; the labels are {ty}: name them with --labels")]
    Taken {
        /// The name.
        name: String,
        /// What has the name.
        found: String,
        /// The type of the labels.
        ty: String,
    },
    /// Options that belong to a loss are given without one.
    #[error("{0}: the loss is the model's own output; name a loss with --loss")]
    NoLabels(&'static str),
    /// Labels are shifted for one loss alone.
    #[error("--shift is for --loss cross-entropy, not for {}", .0.name())]
    NoShift(Loss),
    /// The type of the labels is not possible.
    #[error(transparent)]
    Type(#[from] TypeError),
    /// A node of the loss does not fit the graph.
    #[error(transparent)]
    Graph(#[from] graph::Error),
}

/// Attaches a loss to a graph. An error says why this is not possible.
pub fn attach(graph: &mut Graph, criterion: &Criterion) -> Result<(), CriterionError> {
    criterion.check()?;
    let loss = match criterion.loss {
        Loss::None => own(graph, criterion)?,
        _ => Builder::new(graph, criterion)?.run()?,
    };
    let name = LOSS.to_string();
    graph.outputs = vec![Output { name, value: loss }];
    Ok(())
}

impl Criterion {
    /// Refuses options that exclude each other.
    fn check(&self) -> Result<(), CriterionError> {
        match self.loss {
            Loss::None if self.labels.is_some() => Err(CriterionError::NoLabels("--labels")),
            Loss::None if self.shift => Err(CriterionError::NoLabels("--shift")),
            Loss::CrossEntropy | Loss::None => Ok(()),
            loss if self.shift => Err(CriterionError::NoShift(loss)),
            _ => Ok(()),
        }
    }

    /// The output that is meant: the one of the given name, else the one that is `usual`, else the
    /// only one for which `fits` is true.
    fn output(
        &self,
        graph: &Graph,
        usual: &str,
        fits: fn(&TensorType) -> bool,
        none: fn(String) -> CriterionError,
    ) -> Result<Output, CriterionError> {
        let find = |name: &str| graph.outputs.iter().find(|output| output.name == name);
        if let Some(name) = &self.logits {
            return find(name).cloned().ok_or_else(|| CriterionError::NoOutput {
                name: name.clone(),
                outputs: listed(graph, graph.outputs.iter()),
            });
        }
        let ty = |output: &&Output| fits(&graph.values[output.value].ty);
        if let Some(output) = find(usual).filter(ty) {
            return Ok(output.clone());
        }
        let fitting: Vec<&Output> = graph.outputs.iter().filter(ty).collect();
        match fitting[..] {
            [only] => Ok(only.clone()),
            [] => Err(none(listed(graph, graph.outputs.iter()))),
            _ => Err(CriterionError::Several {
                outputs: listed(graph, fitting.into_iter()),
            }),
        }
    }
}

/// The most outputs that an error lists.
const LISTED: usize = 8;

/// Outputs with their types, for errors.
fn listed<'a>(graph: &Graph, outputs: impl ExactSizeIterator<Item = &'a Output>) -> String {
    let n = outputs.len();
    let name = |output: &Output| format!("{} {}", output.name, graph.values[output.value].ty);
    let mut names: Vec<String> = outputs.take(LISTED).map(name).collect();
    if n > LISTED {
        names.push(format!("and {} more", n - LISTED));
    }
    match n {
        0 => "none".to_string(),
        _ => names.join(", "),
    }
}

fn is_real(ty: &TensorType) -> bool {
    ty.dtype().is_float() && !ty.dtype().is_eight_bit_float()
}

/// The loss that the forward computes.
fn own(graph: &mut Graph, criterion: &Criterion) -> Result<Value, CriterionError> {
    let output = criterion.output(
        graph,
        LOSS,
        |ty| is_real(ty) && ty.numel() == 1,
        |outputs| CriterionError::NoScalar { outputs },
    )?;
    let ty = &graph.values[output.value].ty;
    if !is_real(ty) || ty.numel() != 1 {
        return Err(CriterionError::Unfit {
            name: output.name,
            ty: ty.to_string(),
            needs: "a loss is one floating-point number: name a loss with --loss",
        });
    }
    if ty.rank() == 0 {
        return Ok(output.value);
    }
    let mut builder = Nodes { graph };
    builder.one(super::reshape_to([]), &[output.value])
}

/// Adds nodes to the forward.
struct Nodes<'g> {
    graph: &'g mut Graph,
}

impl Nodes<'_> {
    /// Adds a node; returns its first result.
    fn one(&mut self, op: Op, inputs: &[Value]) -> Result<Value, CriterionError> {
        let types: Vec<TensorType> = self.graph.types(inputs);
        let n_results = op
            .infer(&types.iter().collect::<Vec<_>>())
            .map_err(graph::Error::from)?
            .len();
        let names: Vec<String> = (0..n_results).map(|i| self.fresh(op.name(), i)).collect();
        let made = self
            .graph
            .add_node(op, inputs, &names, Phase::Forward, LOSS)?;
        Ok(made[0])
    }
    /// A name that no value has.
    fn fresh(&self, op: &str, result: usize) -> String {
        let n = self.graph.values.len() + result;
        let mut name = format!("loss.{op}.{n}");
        while self.graph.values.values().any(|value| value.name == name) {
            name.push('_');
        }
        name
    }
    fn ty(&self, value: Value) -> &TensorType {
        &self.graph.values[value].ty
    }
    /// A function of a tensor and a number.
    fn with(
        &mut self,
        op: fn(Scalar) -> Op,
        x: Value,
        number: f64,
    ) -> Result<Value, CriterionError> {
        let value = Number::Float(number);
        self.one(op(Scalar { value }), &[x])
    }
    /// x in f32, unless it is in f64.
    fn widened(&mut self, x: Value) -> Result<Value, CriterionError> {
        match self.ty(x).dtype() {
            DType::F32 | DType::F64 => Ok(x),
            _ => self.one(Op::Cast(Cast { dtype: DType::F32 }), &[x]),
        }
    }
    /// The mean of all elements.
    fn mean(&mut self, x: Value) -> Result<Value, CriterionError> {
        let dims = (0..self.ty(x).rank() as i64).collect();
        self.one(
            Op::Mean(Reduction {
                dims,
                keepdim: false,
            }),
            &[x],
        )
    }
}

/// A loss that is being built.
struct Builder<'g> {
    nodes: Nodes<'g>,
    loss: Loss,
    shift: bool,
    logits: Value,
    labels: Value,
}

impl<'g> Builder<'g> {
    /// Finds the logits and adds the labels.
    fn new(graph: &'g mut Graph, criterion: &Criterion) -> Result<Builder<'g>, CriterionError> {
        let loss = criterion.loss;
        let output = criterion.output(
            graph,
            "logits",
            |ty| is_real(ty) && ty.rank() > 0,
            |outputs| CriterionError::NoLogits { outputs },
        )?;
        let ty = graph.values[output.value].ty.clone();
        let unfit = |needs| CriterionError::Unfit {
            name: output.name.clone(),
            ty: ty.to_string(),
            needs,
        };
        if !is_real(&ty) {
            return Err(unfit("a loss reads floating-point numbers"));
        }
        let labels = match (loss, ty.shape()) {
            (Loss::CrossEntropy, [rows @ .., _]) => {
                if criterion.shift && rows.is_empty() {
                    return Err(unfit("--shift needs positions before the classes"));
                }
                TensorType::new(DType::I64, rows)?
            }
            (Loss::CrossEntropy, []) => return Err(unfit("cross-entropy needs classes")),
            _ => ty.clone(),
        };
        let name = criterion.labels.as_deref().unwrap_or("labels");
        let labels = input(graph, name, labels)?;
        Ok(Builder {
            nodes: Nodes { graph },
            loss,
            shift: criterion.shift,
            logits: output.value,
            labels,
        })
    }

    /// Adds the nodes; returns the loss.
    fn run(mut self) -> Result<Value, CriterionError> {
        if self.loss == Loss::CrossEntropy {
            return self.cross_entropy();
        }
        let n = &mut self.nodes;
        let (x, t) = (n.widened(self.logits)?, n.widened(self.labels)?);
        let each = match self.loss {
            Loss::L1 => {
                let d = n.one(Op::Sub, &[x, t])?;
                n.one(Op::Abs, &[d])?
            }
            Loss::Bce => bce(n, x, t)?,
            _ => {
                let d = n.one(Op::Sub, &[x, t])?;
                n.one(Op::Mul, &[d, d])?
            }
        };
        n.mean(each)
    }

    fn cross_entropy(&mut self) -> Result<Value, CriterionError> {
        let n = &mut self.nodes;
        let shape = n.ty(self.logits).shape().to_vec();
        let (classes, rows) = match shape[..] {
            [ref rows @ .., classes] => (classes, rows.iter().product()),
            [] => (1, 1),
        };
        let mut labels = self.labels;
        if self.shift {
            // The first label is cut, and the last position has none. So no logits are copied.
            let mut pad = vec![0; 2 * (shape.len() - 1)];
            let last = pad.len() - 2;
            (pad[last], pad[last + 1]) = (-1, 1);
            let value = Number::Int(IGNORED);
            labels = n.one(Op::Pad(Pad { pad, value }), &[labels])?;
        }
        let logits = n.widened(self.logits)?;
        let logits = n.one(super::reshape_to([rows, classes]), &[logits])?;
        let labels = n.one(super::reshape_to([rows]), &[labels])?;
        let logp = n.one(Op::LogSoftmax(Along { dim: 1 }), &[logits])?;
        let op = Op::NllLoss(NllLoss {
            ignore: IGNORED,
            reduction: NllLoss::MEAN,
        });
        n.one(op, &[logp, labels])
    }
}

/// (1 - t) x + softplus(-x) for each element. softplus(-x) = max(-x, 0) + log(1 + exp(-|x|)), which
/// does not overflow. At x = 0 the derivative of the maximum, shared by its equal operands, is that
/// of softplus.
fn bce(n: &mut Nodes<'_>, x: Value, t: Value) -> Result<Value, CriterionError> {
    let rest = n.with(Op::RsubScalar, t, 1.0)?;
    let linear = n.one(Op::Mul, &[rest, x])?;
    let minus = n.one(Op::Neg, &[x])?;
    let zero = Full {
        dtype: n.ty(x).dtype(),
        shape: vec![],
        value: Number::Float(0.0),
    };
    let zero = n.one(Op::Full(zero), &[])?;
    let most = n.one(Op::Maximum, &[minus, zero])?;
    let size = n.one(Op::Abs, &[x])?;
    let down = n.one(Op::Neg, &[size])?;
    let exp = n.one(Op::Exp, &[down])?;
    let sum = n.with(Op::AddScalar, exp, 1.0)?;
    let log = n.one(Op::Log, &[sum])?;
    let softplus = n.one(Op::Add, &[most, log])?;
    n.one(Op::Add, &[linear, softplus])
}

/// The input of the labels.
fn input(graph: &mut Graph, name: &str, ty: TensorType) -> Result<Value, CriterionError> {
    let taken = graph.values.iter().find(|(_, value)| value.name == name);
    let Some((value, data)) = taken else {
        return Ok(graph.add_input(name, ty));
    };
    if data.ty == ty && graph.inputs.contains(&value) {
        return Ok(value);
    }
    Err(CriterionError::Taken {
        name: name.to_string(),
        found: data.ty.to_string(),
        ty: ty.to_string(),
    })
}
