//! How the loss of a large batch follows from the losses of its parts: as their mean or as their
//! sum, and which values count samples.
//!
//! The loss is read backwards from its end. A mean over the batch is the mean of the parts' means,
//! if parts are equally large; a sum is the sum of their sums. A quotient of a sum and a count is
//! neither, such as a mean over the targets that are not ignored. But it becomes a sum if every
//! part is divided by the count of all parts. The gradients that were traced read the same count,
//! so they become parts of the whole gradient too.
//!
//! The first dimension of inputs is the batch. Where this reading could be wrong, it is an error.

use super::autodiff;
use ir::graph::Def;
use ir::op::Access;
use ir::op::attrs::{NllLoss, Reduction, Scalar};
use ir::{Graph, Node, Op, Phase, StateKind, Table, Value};
use thiserror::Error;

ir::named! {
    /// How losses and gradients of micro-batches are put together.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum Combination {
        /// As those of one large batch: see this file.
        #[default]
        Auto = "auto",
        /// Their mean.
        Mean = "mean",
        /// Their sum.
        Sum = "sum",
    }
}

ir::named! {
    /// What a loss is a function of, for programs that compare it with another one.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum Kind {
        /// A mean over samples, or over those that count: equal batches have its value together.
        #[default]
        Mean = "mean",
        /// A sum: `n` equal batches have `n` times its value together.
        Sum = "sum",
        /// A sum of both.
        Mixed = "mixed",
    }
}

/// How the loss of all parts follows from theirs.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Whole {
    /// True if losses are added, false if they are averaged.
    pub sums: bool,
    /// Values that are replaced by those of all parts together.
    pub counts: Vec<Count>,
    /// What the loss is a function of.
    pub kind: Kind,
}

/// A number of samples, or a sum of their weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Count {
    /// The number.
    pub value: Value,
    /// How that of all parts follows from theirs.
    pub of: CountOf,
}

/// What a count is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CountOf {
    /// The second result of this `nll_loss`.
    Targets(Node),
    /// A sum.
    Sum,
    /// A mean.
    Mean,
}

/// Why the loss of several batches does not follow from theirs.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("%{value}, {what}")]
pub struct NotAdditive {
    /// The value that is no mean, no sum, and nothing that is made of them.
    pub value: String,
    /// Why.
    pub what: &'static str,
}

/// Reads the loss: the output `loss`. Without one, gradients are averaged.
pub fn of(graph: &Graph) -> Result<Whole, NotAdditive> {
    let Some(output) = graph.outputs.iter().find(|output| output.name == "loss") else {
        return Ok(Whole::default());
    };
    let mut reader = Reader::new(graph);
    let term = reader.term(output.value)?;
    Ok(Whole {
        sums: term.sums,
        counts: reader.counts,
        kind: match term.bare {
            None => Kind::Mean,
            Some(_) if term.counted => Kind::Mixed,
            Some(_) => Kind::Sum,
        },
    })
}

/// A part of the loss.
#[derive(Clone, Copy)]
struct Term {
    sums: bool,
    /// Present if it has sums that nothing counts: the number of elements that each adds, or 0 if
    /// these numbers differ.
    bare: Option<u64>,
    /// True if it has sums that are divided by counts.
    counted: bool,
}

const MEAN: Term = Term {
    sums: false,
    bare: None,
    counted: false,
};
const COUNTED: Term = Term {
    sums: true,
    bare: None,
    counted: true,
};

struct Reader<'a> {
    graph: &'a Graph,
    /// Values that depend on the batch.
    varies: Table<Value, bool>,
    /// Values in which samples are mixed already.
    mixed: Table<Value, bool>,
    /// Values that depend on parameters.
    trained: Table<Value, bool>,
    /// Samples of a batch.
    batch: u64,
    counts: Vec<Count>,
}

impl<'a> Reader<'a> {
    fn new(graph: &'a Graph) -> Reader<'a> {
        let first = |&v: &Value| graph.values[v].ty.shape().first().copied();
        let batch = graph.inputs.iter().find_map(first).unwrap_or(1);
        let n = graph.values.len();
        let (mut varies, mut mixed) = (Table::filled(n, false), Table::filled(n, false));
        graph.inputs.iter().for_each(|&v| varies[v] = true);
        for state in graph.states.values() {
            varies[state.before] = state.kind == StateKind::Rng;
        }
        for &node in &graph.order {
            let data = &graph.nodes[node];
            let any = |table: &Table<Value, bool>| data.inputs.iter().any(|&v| table[v]);
            let (varying, mixing) = (any(&varies), any(&mixed) || mixes(graph, node, batch));
            for &v in &data.outputs {
                varies[v] = varying;
                mixed[v] = varying && mixing;
            }
        }
        Reader {
            graph,
            varies,
            mixed,
            trained: autodiff::dependents(graph),
            batch,
            counts: vec![],
        }
    }

    fn refused(&self, value: Value, what: &'static str) -> NotAdditive {
        NotAdditive {
            value: self.graph.values[value].name.clone(),
            what,
        }
    }

    fn numel(&self, value: Value) -> u64 {
        self.graph.values[value].ty.numel()
    }

    /// How a term of the loss, one number, follows from those of parts.
    fn term(&mut self, value: Value) -> Result<Term, NotAdditive> {
        if !self.varies[value] {
            return Ok(MEAN);
        }
        let Def::Node(node, _) = self.graph.values[value].def else {
            return Err(self.refused(value, "an input: whether it is a mean is not known"));
        };
        let data = &self.graph.nodes[node];
        let inputs = &data.inputs;
        match &data.op {
            Op::Cast(_) | Op::Neg | Op::Reshape(_) => self.term(inputs[0]),
            Op::MulScalar(Scalar { value: factor }) => {
                self.scaled(value, inputs[0], factor.to_f64())
            }
            Op::DivScalar(Scalar { value: factor }) => {
                self.scaled(value, inputs[0], 1.0 / factor.to_f64())
            }
            Op::Add | Op::Sub => self.both(value, inputs[0], inputs[1]),
            Op::Mul if !self.varies[inputs[0]] => self.term(inputs[1]),
            Op::Mul | Op::Div if !self.varies[inputs[1]] => self.term(inputs[0]),
            Op::Div => self.quotient(value, inputs[0], inputs[1]),
            Op::Sum(_) | Op::Mean(_) if self.numel(inputs[0]) == 1 => self.term(inputs[0]),
            Op::Mean(_) => self.reduced(value, inputs[0]).map(|_| MEAN),
            Op::Sum(_) => self.reduced(value, inputs[0]).map(bare),
            Op::NllLoss(NllLoss { reduction, .. }) if *reduction == NllLoss::MEAN => {
                self.count(data.outputs[1], CountOf::Targets(node));
                Ok(COUNTED)
            }
            Op::NllLoss(_) | Op::NllSum(_) => Ok(bare(self.numel(inputs[1]))),
            _ => Err(self.refused(value, data.op.name())),
        }
    }

    /// The number of elements of a sum or a mean over whole samples.
    fn reduced(&self, value: Value, operand: Value) -> Result<u64, NotAdditive> {
        match self.mixed[operand] {
            true => Err(self.refused(value, "which reads what mixes samples already")),
            false => Ok(self.numel(operand)),
        }
    }

    /// A term times a number, which may be what makes a mean of a sum.
    fn scaled(&mut self, value: Value, term: Value, factor: f64) -> Result<Term, NotAdditive> {
        let term = self.term(term)?;
        let Some(elements) = term.bare else {
            return Ok(term);
        };
        let parts = (1.0 / factor).round();
        let is_share = parts >= 2.0 && (parts * factor - 1.0).abs() < 1e-6;
        let parts = if is_share { parts as u64 } else { 1 };
        // With one sample, every share may be one of its positions.
        let may_be_of_batch = match self.batch {
            1 => parts > 2 && elements.is_multiple_of(parts),
            batch => parts > 1 && parts.is_multiple_of(batch),
        };
        if parts > 1 && parts == elements && !term.counted {
            return Ok(MEAN);
        }
        match may_be_of_batch {
            true => Err(self.refused(value, "a sum divided by what may be the batch's size")),
            false => Ok(term),
        }
    }

    /// A sum of two terms.
    fn both(&mut self, value: Value, a: Value, b: Value) -> Result<Term, NotAdditive> {
        let (a, b) = (self.term(a)?, self.term(b)?);
        if a.sums != b.sums {
            return Err(self.refused(value, "a mean and a sum, or a mean over those that count"));
        }
        Ok(Term {
            sums: a.sums,
            bare: match (a.bare, b.bare) {
                (Some(a), Some(b)) => Some(if a == b { a } else { 0 }),
                (a, b) => a.or(b),
            },
            counted: a.counted || b.counted,
        })
    }

    /// A term divided by what depends on the batch.
    fn quotient(&mut self, value: Value, term: Value, by: Value) -> Result<Term, NotAdditive> {
        let term = self.term(term)?;
        if self.trained[by] {
            return Err(self.refused(value, "divided by what depends on parameters"));
        }
        let Some((count, of)) = self.counted(by)? else {
            return Ok(term);
        };
        if term.sums == (of == CountOf::Mean) {
            return Err(self.refused(value, "a sum divided by a mean, or a mean by a sum"));
        }
        self.count(count, of);
        Ok(if term.sums { COUNTED } else { MEAN })
    }

    fn count(&mut self, value: Value, of: CountOf) {
        if !self.counts.iter().any(|count| count.value == value) {
            self.counts.push(Count { value, of });
        }
    }

    /// What counts in a divisor, behind what is done with the number; none if the batch gives the
    /// number itself, for all parts.
    fn counted(&self, mut value: Value) -> Result<Option<(Value, CountOf)>, NotAdditive> {
        loop {
            let Def::Node(node, result) = self.graph.values[value].def else {
                return match self.numel(value) {
                    1 => Ok(None),
                    _ => Err(self.refused(value, "which is no count")),
                };
            };
            let data = &self.graph.nodes[node];
            let is_alone = data.op.facts().access == Access::Element && data.outputs.len() == 1;
            let mut varying = data.inputs.iter().filter(|&&v| self.varies[v]);
            match &data.op {
                Op::NllLoss(_) if result == 1 => {
                    return Ok(Some((value, CountOf::Targets(node))));
                }
                Op::Sum(_) if self.numel(data.inputs[0]) > 1 => {
                    self.reduced(value, data.inputs[0])?;
                    return Ok(Some((value, CountOf::Sum)));
                }
                Op::Mean(_) if self.numel(data.inputs[0]) > 1 => {
                    self.reduced(value, data.inputs[0])?;
                    return Ok(Some((value, CountOf::Mean)));
                }
                Op::Reshape(_) | Op::Sum(_) | Op::Mean(_) => value = data.inputs[0],
                _ if is_alone => match (varying.next(), varying.next()) {
                    (Some(&one), None) => value = one,
                    _ => return Err(self.refused(value, data.op.name())),
                },
                _ => return Err(self.refused(value, data.op.name())),
            }
        }
    }
}

fn bare(elements: u64) -> Term {
    Term {
        sums: true,
        bare: Some(elements),
        counted: false,
    }
}

/// Whether a node of the forward reduces over the samples of a batch.
fn mixes(graph: &Graph, node: Node, batch: u64) -> bool {
    let data = &graph.nodes[node];
    let (Op::Sum(Reduction { dims, .. })
    | Op::Mean(Reduction { dims, .. })
    | Op::Amax(Reduction { dims, .. })
    | Op::Amin(Reduction { dims, .. })
    | Op::Any(Reduction { dims, .. })) = &data.op
    else {
        return false;
    };
    let shape = graph.values[data.inputs[0]].ty.shape();
    let over_batch = dims.contains(&0) && shape[0].is_multiple_of(batch.max(1));
    data.phase == Phase::Forward && over_batch
}
