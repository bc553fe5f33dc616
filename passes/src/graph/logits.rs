//! Keeps the logits of a loss instead of the logarithm of their softmax, if the logits are in half
//! precision and the loss is in f32.
//!
//! Before: forward and backward, with casts. After: `log_softmax(x)` is `(x - m) - l`. Each row has
//! two numbers: `m`, its largest element, and `l`, the logarithm of the sum of `e^(x - m)`. (Their
//! sum would be one number, but it would lose the last digits of `l` if `m` is large.) The loss
//! reads the logits of its targets alone, and the backward computes `(x - m) - l` again, inside its
//! own kernel. So the logits in f32 and the logarithms are never stored. Each of them has twice the
//! bytes of the logits, which are kept instead until the backward's result takes their place.
//!
//! `log_softmax_bwd(dy, y)` is `dy - e^y s`, where `s` is the sum over a row of `dy`. A row of the
//! loss's gradient has at most one number other than 0, so `s` is this number, and the backward is
//! elementwise.

use super::reshape_to;
use ir::graph::{self, Readers};
use ir::op::attrs::{Along, Cast, Full, NllLoss, NllLossBwd, Number, Reduction, Scalar};
use ir::{DType, Graph, Node, Op, Value};

/// The dimension of the classes.
const CLASSES: i64 = 1;

/// The number of a target that does not count; that of the others is 0.
const SKIPPED: i64 = 1;

/// A logarithm of a softmax, and what reads it.
struct Found {
    node: Node,
    /// The logits, as they are stored.
    logits: Value,
    rows: u64,
    /// Each loss, its targets, and the target that does not count.
    losses: Vec<(Node, Value, i64)>,
    /// Each backward, and the operands and attributes of the gradient of a loss that it reads.
    backwards: Vec<(Node, Vec<Value>, NllLossBwd)>,
}

/// Rewrites the graph.
pub fn run(graph: &mut Graph) {
    let readers = graph.readers();
    let found: Vec<Found> = graph
        .order
        .iter()
        .filter_map(|&node| Found::at(graph, &readers, node))
        .collect();
    if found.is_empty() {
        return;
    }
    for one in &found {
        one.rewrite(graph)
            .expect("a loss in other words should fit the graph");
    }
    super::canonical::remove_dead(graph);
}

impl Found {
    /// The logarithm of a softmax that a node computes, if only a loss and its backward read it.
    fn at(graph: &Graph, readers: &Readers, node: Node) -> Option<Found> {
        let data = &graph.nodes[node];
        if data.op != Op::LogSoftmax(Along { dim: CLASSES }) {
            return None;
        }
        let cast = graph.def_node(data.inputs[0])?;
        let logits = *graph.nodes[cast].inputs.first()?;
        let (result, from) = (data.outputs[0], &graph.values[logits].ty);
        let is_narrow = matches!(from.dtype(), DType::BF16 | DType::F16)
            && graph.values[result].ty.dtype() == DType::F32;
        if !matches!(graph.nodes[cast].op, Op::Cast(_)) || from.rank() != 2 || !is_narrow {
            return None;
        }
        let (mut losses, mut backwards) = (vec![], vec![]);
        for reader in &readers[result] {
            let reader = (*reader)?;
            let data = &graph.nodes[reader];
            let reads = |i: usize| data.inputs.get(i) == Some(&result);
            match &data.op {
                Op::NllLoss(loss) if loss.reduction != NllLoss::NONE && reads(0) => {
                    losses.push((reader, data.inputs[1], loss.ignore));
                }
                Op::NllSum(loss) if reads(0) => {
                    losses.push((reader, data.inputs[1], loss.ignore));
                }
                Op::LogSoftmaxBwd(along) if along.dim == CLASSES && reads(1) => {
                    let gradient = &graph.nodes[graph.def_node(data.inputs[0])?];
                    let Op::NllLossBwd(loss) = &gradient.op else {
                        return None;
                    };
                    backwards.push((reader, gradient.inputs.clone(), loss.clone()));
                }
                _ => return None,
            }
        }
        (!losses.is_empty() && !backwards.is_empty()).then_some(Found {
            node,
            logits,
            rows: from.shape()[0],
            losses,
            backwards,
        })
    }

    fn rewrite(&self, graph: &mut Graph) -> Result<(), graph::Error> {
        let name = graph.values[graph.nodes[self.node].outputs[0]].name.clone();
        let mut edit = graph.edit();
        let mut add = |at: Node, op: Op, inputs: &[Value], what: String| {
            let node = edit.insert_before(at, op, inputs, &[format!("{name}.{what}")])?;
            Ok::<Value, graph::Error>(edit.graph().nodes[node].outputs[0])
        };
        let first = |what: &str| what.to_string();
        let over_classes = || Reduction {
            dims: vec![CLASSES],
            keepdim: true,
        };
        let wide = || Op::Cast(Cast { dtype: DType::F32 });

        let x = add(self.node, wide(), &[self.logits], first("x"))?;
        let most = add(self.node, Op::Amax(over_classes()), &[x], first("most"))?;
        let below = add(self.node, Op::Sub, &[x, most], first("below"))?;
        let powers = add(self.node, Op::Exp, &[below], first("powers"))?;
        let sum = add(self.node, Op::Sum(over_classes()), &[powers], first("sum"))?;
        let log = add(self.node, Op::Log, &[sum], first("log"))?;

        // A target that does not count becomes class 0 here, and is told apart by a number.
        let mut picked = vec![];
        for (i, &(loss, targets, ignore)) in self.losses.iter().enumerate() {
            let names = |what: &str| format!("{what}.{i}");
            let value = Number::Int(ignore);
            let long = Op::Cast(Cast { dtype: DType::I64 });
            let skipped = Op::EqScalar(Scalar { value });
            let skipped = add(loss, skipped, &[targets], names("skipped"))?;
            let skipped = add(loss, long, &[skipped], names("number"))?;
            let value = Number::Int(1);
            let counts = add(
                loss,
                Op::RsubScalar(Scalar { value }),
                &[skipped],
                names("counts"),
            )?;
            let class = add(loss, Op::Mul, &[targets, counts], names("class"))?;
            let class = add(loss, reshape_to([self.rows, 1]), &[class], names("column"))?;
            let of = Op::Gather(Along { dim: CLASSES });
            let logit = add(loss, of, &[self.logits, class], names("logit_of_target"))?;
            let logit = add(loss, wide(), &[logit], names("wide"))?;
            let below = add(loss, Op::Sub, &[logit, most], names("below"))?;
            let logarithm = add(loss, Op::Sub, &[below, log], names("logarithm"))?;
            picked.push((loss, [logarithm, skipped]));
        }
        let mut again = vec![];
        for (i, (node, gradient, loss)) in self.backwards.iter().enumerate() {
            let (node, names) = (*node, |what: &str| format!("{what}.{i}"));
            let x = add(node, wide(), &[self.logits], names("x"))?;
            let below = add(node, Op::Sub, &[x, most], names("again"))?;
            let logarithms = add(node, Op::Sub, &[below, log], names("logarithms"))?;
            let powers = add(node, Op::Exp, &[logarithms], names("e"))?;
            // The number of a row that counts, and 0 for the others.
            let mut number = gradient[0];
            if loss.reduction == NllLoss::MEAN {
                number = add(node, Op::Div, &[number, gradient[2]], names("mean"))?;
            } else if loss.reduction == NllLoss::NONE {
                number = add(
                    node,
                    reshape_to([self.rows, 1]),
                    &[number],
                    names("of_rows"),
                )?;
            }
            let number = add(node, Op::Neg, &[number], names("negative"))?;
            let none = Op::Full(Full {
                dtype: DType::F32,
                shape: vec![],
                value: Number::Float(0.0),
            });
            let none = add(node, none, &[], names("none"))?;
            let value = Number::Int(loss.ignore);
            let counts = add(
                node,
                Op::NeScalar(Scalar { value }),
                &[gradient[1]],
                names("left"),
            )?;
            let counts = add(node, reshape_to([self.rows, 1]), &[counts], names("rows"))?;
            let sum = add(node, Op::Where, &[counts, number, none], names("row_sum"))?;
            let share = add(node, Op::Mul, &[powers, sum], names("share"))?;
            again.push((node, share));
        }

        for (loss, [logarithm, skipped]) in picked {
            let data = &edit.graph().nodes[loss];
            let mut inputs = data.inputs.clone();
            (inputs[0], inputs[1]) = (logarithm, skipped);
            let mut op = data.op.clone();
            match &mut op {
                Op::NllLoss(loss) => loss.ignore = SKIPPED,
                Op::NllSum(loss) => loss.ignore = SKIPPED,
                other => unreachable!("{} should be a loss", other.name()),
            }
            edit.set_op(loss, op, inputs);
        }
        for (node, share) in again {
            let dy = edit.graph().nodes[node].inputs[0];
            edit.set_op(node, Op::Sub, vec![dy, share]);
        }
        edit.finish();
        Ok(())
    }
}
