//! A graph's formulas as egg sees them: an op with its operands, then its attributes as literals,
//! in the table's order. Attributes are terms, so patterns bind and compare them like operands:
//! `(mul_scalar ?x ?c)`. An op with several results is one term, and `r0`, `r1`, .. are its
//! results.
//!
//! Each class of equal terms has types. A rule whose sides have different types is not applied.

use super::known::{Known, is_never_negative, known};
use egg::{Analysis, DidMerge, EGraph, FromOp, FromOpError, Id, Language};
use ir::graph::Phase;
use ir::op::{Attr, Op, OpKind, attributes};
use ir::{DType, TensorType};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::fmt;

/// A graph of classes of equal terms.
pub(super) type Terms = EGraph<Term, Facts>;

/// One formula over classes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct Term {
    pub(super) head: Head,
    pub(super) children: SmallVec<[Id; 6]>,
}

/// What a term computes from its children.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) enum Head {
    /// An op.
    Op(OpKind),
    /// An intermediate step of recognition: see [`STEPS`]. It has no kernel and is never extracted.
    Step(u16),
    /// A result of its child.
    Result(u8),
    /// A tensor that no pure op computes; the position among the leaves.
    Leaf(u32),
    /// An attribute.
    Literal(Literal),
}

/// An attribute's value, with an order. Numbers are compared by bits.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) enum Literal {
    /// An absent operand.
    None,
    Int(i64),
    Float(u64),
    Bool(bool),
    Ints(Vec<i64>),
    Type(DType),
    Str(String),
}

/// Steps of recognition. Each names a value, independent of the way in which it is computed. The
/// steps of attention have the shape [B,H,S,T]: `scores(q, k, scale)`, `probs(q, k, mask or none,
/// scale, whether a row without keys is zeros)`, `dscores(dout, q, k, v, mask or none, scale)`;
/// with the same operands `dq` and `dk`, the gradients before the scale. `gelu_t(x)` is the tanh in
/// the approximation of gelu.
pub(super) const STEPS: [&str; 6] = ["scores", "probs", "dscores", "dq", "dk", "gelu_t"];

/// Facts about a class.
#[derive(Clone, Debug)]
pub(super) struct Class {
    /// The results' types; none for literals and for terms that are not well-formed.
    pub(super) types: Vec<TensorType>,
    pub(super) literal: Option<Literal>,
    /// The earliest phase in which it was traced; for new terms, the latest phase of their
    /// children.
    pub(super) phase: Phase,
    /// The formula of its numbers, if they depend only on their coordinates.
    pub(super) known: Option<Known>,
    /// Whether it has integers of which none is negative, such as positions.
    pub(super) never_negative: bool,
}

/// The analysis: the types of the leaves, from which all others follow.
#[derive(Clone, Default, Debug)]
pub(super) struct Facts {
    pub(super) leaves: Vec<TensorType>,
}

impl Term {
    pub(super) fn new(head: Head, children: impl IntoIterator<Item = Id>) -> Term {
        Term {
            head,
            children: children.into_iter().collect(),
        }
    }
    /// The op's name, or the step's.
    pub(super) fn name(&self) -> Option<&'static str> {
        match self.head {
            Head::Op(kind) => Some(kind.name()),
            Head::Step(i) => Some(STEPS[usize::from(i)]),
            _ => None,
        }
    }
    /// True if the term is this op.
    pub(super) fn is_op(&self, op: OpKind) -> bool {
        self.head == Head::Op(op)
    }
    /// True if a graph can have the term.
    pub(super) fn is_real(&self) -> bool {
        !matches!(self.head, Head::Step(_))
    }
    /// The classes of an op's operands.
    pub(super) fn operands<'a>(&'a self, terms: &'a Terms) -> impl Iterator<Item = Id> + 'a {
        let n_attrs = if let Head::Op(kind) = self.head {
            attributes(kind).len()
        } else {
            0
        };
        let operands = &self.children[..self.children.len() - n_attrs];
        operands
            .iter()
            .copied()
            .filter(|&id| terms[id].data.literal != Some(Literal::None))
    }
    /// The op with its attributes; none if the term is not an op, or if a literal does not fit the
    /// op.
    pub(super) fn op(&self, terms: &Terms) -> Option<Op> {
        let Head::Op(kind) = self.head else {
            return None;
        };
        let keys = attributes(kind);
        let first = self.children.len().checked_sub(keys.len())?;
        let mut attrs = BTreeMap::new();
        for (&(key, _), &id) in keys.iter().zip(&self.children[first..]) {
            attrs.insert(key.into(), terms[id].data.literal.as_ref()?.attr()?);
        }
        Op::of(kind, attrs).ok()
    }
}

impl Literal {
    pub(super) fn of(attr: &Attr) -> Literal {
        match attr {
            Attr::Int(i) => Literal::Int(*i),
            Attr::Float(x) => Literal::Float(x.to_bits()),
            Attr::Bool(b) => Literal::Bool(*b),
            Attr::Ints(v) => Literal::Ints(v.clone()),
            Attr::Type(d) => Literal::Type(*d),
            Attr::Str(s) => Literal::Str(s.clone()),
            Attr::Body(_) => Literal::Str(ir::text::print_attr(attr)),
        }
    }
    pub(super) fn attr(&self) -> Option<Attr> {
        Some(match self {
            Literal::None => return None,
            Literal::Int(i) => Attr::Int(*i),
            Literal::Float(x) => Attr::Float(f64::from_bits(*x)),
            Literal::Bool(b) => Attr::Bool(*b),
            Literal::Ints(v) => Attr::Ints(v.clone()),
            Literal::Type(d) => Attr::Type(*d),
            Literal::Str(s) => Attr::Str(s.clone()),
        })
    }
    /// A literal from a pattern's text: `true`, `3`, `0.5`, `-inf`, `[0,1]`, `i64`, `none`.
    pub(super) fn from_text(text: &str) -> Option<Literal> {
        if let Some(dtype) = DType::from_name(text) {
            return Some(Literal::Type(dtype));
        }
        if let Some(list) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
            let numbers = list.split(',').filter(|n| !n.is_empty()).map(str::parse);
            return Some(Literal::Ints(numbers.collect::<Result<_, _>>().ok()?));
        }
        Some(match text {
            "none" => Literal::None,
            "true" => Literal::Bool(true),
            "false" => Literal::Bool(false),
            _ => match text.parse::<i64>() {
                Ok(i) => Literal::Int(i),
                Err(_) => Literal::Float(text.parse::<f64>().ok()?.to_bits()),
            },
        })
    }
}

impl Language for Term {
    type Discriminant = (u8, u16);

    fn discriminant(&self) -> (u8, u16) {
        match &self.head {
            Head::Op(kind) => (0, *kind as u16),
            Head::Step(i) => (1, *i),
            Head::Result(i) => (2, u16::from(*i)),
            Head::Leaf(_) => (3, 0),
            Head::Literal(_) => (4, 0),
        }
    }
    fn matches(&self, other: &Term) -> bool {
        self.head == other.head && self.children.len() == other.children.len()
    }
    fn children(&self) -> &[Id] {
        &self.children
    }
    fn children_mut(&mut self) -> &mut [Id] {
        &mut self.children
    }
}

impl fmt::Display for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.head {
            Head::Result(i) => write!(f, "r{i}"),
            Head::Leaf(i) => write!(f, "leaf{i}"),
            Head::Literal(literal) => write!(f, "{literal:?}"),
            Head::Op(_) | Head::Step(_) => f.write_str(self.name().unwrap_or_default()),
        }
    }
}

impl FromOp for Term {
    type Error = FromOpError;

    fn from_op(text: &str, children: Vec<Id>) -> Result<Term, FromOpError> {
        let position = |i: usize| u16::try_from(i).ok();
        let op = OpKind::from_name(text);
        let step = STEPS
            .iter()
            .position(|&step| step == text)
            .and_then(position);
        let result = text.strip_prefix('r').and_then(|i| i.parse().ok());
        let head = match (op, step, result) {
            (Some(kind), _, _) => Head::Op(kind),
            (_, Some(i), _) => Head::Step(i),
            (_, _, Some(i)) => Head::Result(i),
            _ => match Literal::from_text(text) {
                Some(literal) if children.is_empty() => Head::Literal(literal),
                _ => return Err(FromOpError::new(text, children)),
            },
        };
        Ok(Term::new(head, children))
    }
}

impl Analysis<Term> for Facts {
    type Data = Class;

    fn make(terms: &mut Terms, term: &Term, _: Id) -> Class {
        let (mut place, mut never_negative) = (None, false);
        let types = match &term.head {
            Head::Literal(literal) => {
                return Class {
                    types: vec![],
                    literal: Some(literal.clone()),
                    phase: Phase::Forward,
                    known: None,
                    never_negative: false,
                };
            }
            Head::Leaf(i) => vec![terms.analysis.leaves[*i as usize].clone()],
            Head::Result(i) => {
                let of = &terms[term.children[0]];
                never_negative = *i == 1 && of.nodes.iter().any(|term| term.is_op(OpKind::TopK));
                let ty = of.data.types.get(usize::from(*i));
                ty.map_or(vec![], |ty| vec![ty.clone()])
            }
            Head::Step(_) => step_type(terms, term).map_or(vec![], |ty| vec![ty]),
            Head::Op(_) => {
                let operands: Option<Vec<&TensorType>> =
                    term.operands(terms).map(|id| single(terms, id)).collect();
                match (term.op(terms), operands) {
                    (Some(op), Some(operands)) => {
                        let types = op.infer(&operands).unwrap_or_default();
                        if let [ty] = types.as_slice() {
                            place = known(terms, term, &op, ty);
                            never_negative =
                                is_never_negative(terms, term, &op, ty, place.as_ref());
                        }
                        types
                    }
                    _ => vec![],
                }
            }
        };
        let phase = term
            .children
            .iter()
            .map(|&id| terms[id].data.phase)
            .max()
            .unwrap_or(Phase::Forward);
        Class {
            types,
            literal: None,
            phase,
            known: place,
            never_negative,
        }
    }
    fn remake(terms: &mut Terms, _: &Term, id: Id) -> Class {
        // Types do not change when classes merge.
        terms[id].data.clone()
    }
    fn merge(&mut self, a: &mut Class, b: Class) -> DidMerge {
        debug_assert_eq!(a.types, b.types, "equal terms should have equal types");
        a.phase = a.phase.min(b.phase);
        a.known = a.known.take().or(b.known);
        a.never_negative |= b.never_negative;
        // Classes above were made when all traced types were known. So merging gives no new facts
        // for them.
        DidMerge(false, false)
    }
}

/// The type of a class with one result.
pub(super) fn single(terms: &Terms, id: Id) -> Option<&TensorType> {
    match terms[id].data.types.as_slice() {
        [ty] => Some(ty),
        _ => None,
    }
}

fn step_type(terms: &Terms, term: &Term) -> Option<TensorType> {
    let (q, k) = match term.name()? {
        "gelu_t" => return single(terms, term.children[0]).cloned(),
        "dq" => return single(terms, term.children[1]).cloned(),
        "dk" => return single(terms, term.children[2]).cloned(),
        "dscores" => (term.children[1], term.children[2]),
        _ => (term.children[0], term.children[1]),
    };
    let (q, k) = (single(terms, q)?, single(terms, k)?);
    let [b, h, s, d] = *q.shape() else {
        return None;
    };
    let [kb, kh, t, kd] = *k.shape() else {
        return None;
    };
    ((b, h, d) == (kb, kh, kd)).then(|| TensorType::new(q.dtype(), [b, h, s, t]).ok())?
}
