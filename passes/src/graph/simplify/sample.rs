//! Rules at their samples, as graphs. The test of the rules evaluates these graphs.

use super::rule::{Action, Close, Rule, add, rewrite, var};
use super::term::{Facts, Head, Literal, STEPS, Term, Terms};
use egg::{ENodeOrVar, Id, Pattern, PatternAst, Subst, Var};
use ir::graph::{self, Output, Phase};
use ir::op::{Attr, AttrError, Op, OpKind, ShapeError, attributes, parse_type};
use ir::types::TypeError;
use ir::{DType, Graph, TensorType, Value};
use std::collections::BTreeMap;
use thiserror::Error;

/// The two sides of one pair of a rule, at one sample. Both graphs have the same inputs and one
/// output, `out`.
pub struct Case {
    /// The rule and the bindings, for messages.
    pub what: String,
    /// The left side.
    pub left: Graph,
    /// The right side.
    pub right: Graph,
    /// How close they must be.
    pub close: Close,
}

/// Why a rule has no cases.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum SampleError {
    /// The rule has no sample.
    #[error("{0} has no sample")]
    NoSample(&'static str),
    /// The rule does not hold at a sample.
    #[error("{what}: {source}")]
    At {
        /// The rule and the sample.
        what: String,
        /// What does not hold.
        source: Broken,
    },
}

/// Why a rule does not hold at a sample, or why a text is not a sample.
#[derive(Clone, PartialEq, Debug, Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum Broken {
    /// A formula that cannot be read, with the reader's message.
    #[error("{formula}: {why}")]
    Unreadable { formula: String, why: String },
    #[error("a formula that does not fit")]
    Formula,
    #[error("a literal without a value")]
    NoValue,
    #[error("the left side does not fit together")]
    FirstLeft,
    #[error("a left side does not fit together")]
    Left,
    #[error("the right side does not fit together")]
    Right,
    #[error("the rule's condition does not hold")]
    Condition,
    #[error("{left} became {right}")]
    OtherType { left: TensorType, right: TensorType },
    #[error("the rule did not make its sides equal")]
    Unequal,
    #[error("a side that is no tensor")]
    NoTensor,
    #[error("{0} is not bound")]
    Unbound(Var),
    #[error("{0} is not given")]
    NotGiven(Var),
    #[error("an empty formula")]
    Empty,
    #[error("a result of a literal")]
    OfLiteral,
    #[error("a leaf in a rule")]
    Leaf,
    #[error("{step} of {tensors} tensors")]
    Step { step: String, tensors: usize },
    #[error(transparent)]
    Type(#[from] TypeError),
    #[error(transparent)]
    Attributes(#[from] AttrError),
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error(transparent)]
    Graph(#[from] graph::Error),
}

/// The cases of a rule. An error says at which sample the rule does not hold, or why a text is not
/// a sample.
pub fn cases(rule: &'static Rule) -> Result<Vec<Case>, SampleError> {
    let mut cases = vec![];
    for text in rule
        .samples
        .split(';')
        .map(str::trim)
        .filter(|text| !text.is_empty())
    {
        let what = format!("{} at {text}", rule.name);
        match sample(rule, text, &what) {
            Ok(found) => cases.extend(found),
            Err(source) => return Err(SampleError::At { what, source }),
        }
    }
    if cases.is_empty() {
        Err(SampleError::NoSample(rule.name))
    } else {
        Ok(cases)
    }
}

fn sample(rule: &'static Rule, text: &str, what: &str) -> Result<Vec<Case>, Broken> {
    let mut terms = Terms::new(Facts::default());
    let mut subst = Subst::default();
    let mut given: BTreeMap<Id, Given> = BTreeMap::new();
    for (name, value) in bindings(text) {
        let id = if value.starts_with('(') {
            let pattern = pattern(&value)?;
            let id = add(&mut terms, &pattern.ast, &subst).ok_or(Broken::Formula)?;
            given.insert(id, Given::Formula(pattern.ast));
            id
        } else if let Some(literal) = Literal::from_text(&value) {
            let id = terms.add(Term::new(Head::Literal(literal), []));
            let Some(literal) = &terms[id].data.literal else {
                return Err(Broken::NoValue);
            };
            given.insert(id, Given::Literal(literal.clone()));
            id
        } else {
            let ty = parse_type(&value)?;
            terms.analysis.leaves.push(ty);
            let i = terms.analysis.leaves.len() - 1;
            let id = terms.add(Term::new(Head::Leaf(i as u32), []));
            given.insert(id, Given::Tensor(name.clone(), i));
            id
        };
        subst.insert(var(&format!("?{name}")), id);
    }
    // The left sides of later pairs also exist, once their variables are bound.
    let action = Action::new(rule);
    let root = add(&mut terms, &action.pairs[0].0, &subst).ok_or(Broken::FirstLeft)?;
    let bound = action.bind(&mut terms, &subst).ok_or(Broken::Condition)?;
    let lefts: Option<Vec<Id>> = action
        .pairs
        .iter()
        .map(|(left, _)| add(&mut terms, left, &bound))
        .collect();
    lefts.ok_or(Broken::Left)?;
    let bound = action.bind(&mut terms, &subst).ok_or(Broken::Condition)?;
    terms.rebuild();

    let mut cases = vec![];
    for (left, right) in &action.pairs {
        let graph = |ast: &PatternAst<Term>| Builder::new(&terms, &bound, &given).graph(ast);
        let (left, right) = (graph(left)?, graph(right)?);
        let ty = |graph: &Graph| graph.values[graph.outputs[0].value].ty.clone();
        if ty(&left) != ty(&right) {
            let (left, right) = (ty(&left), ty(&right));
            return Err(Broken::OtherType { left, right });
        }
        cases.push(Case {
            what: what.to_string(),
            left,
            right,
            close: rule.close,
        });
    }
    // egg finds and applies it.
    let rewrite = rewrite(rule);
    let matches = rewrite.search(&terms);
    let right = add(&mut terms, &action.pairs[0].1, &bound).ok_or(Broken::Right)?;
    rewrite.apply(&mut terms, &matches);
    terms.rebuild();
    if terms.find(root) != terms.find(right) {
        return Err(Broken::Unequal);
    }
    Ok(cases)
}

fn pattern(text: &str) -> Result<Pattern<Term>, Broken> {
    text.parse().map_err(|why| Broken::Unreadable {
        formula: text.to_string(),
        why: format!("{why}"),
    })
}

/// `name=value` pairs; a formula in parentheses has spaces.
fn bindings(text: &str) -> Vec<(String, String)> {
    let mut words: Vec<String> = vec![];
    for word in text.split_whitespace() {
        let is_open = |word: &String| word.matches('(').count() > word.matches(')').count();
        match words.last_mut().filter(|last| is_open(last)) {
            Some(last) => *last = format!("{last} {word}"),
            None => words.push(word.to_string()),
        }
    }
    let pair = |word: &String| {
        word.split_once('=')
            .map(|(name, value)| (name.to_string(), value.to_string()))
    };
    words.iter().filter_map(pair).collect()
}

/// The meaning of a variable.
enum Given {
    /// An input of this name; the position of its type.
    Tensor(String, usize),
    Literal(Literal),
    Formula(PatternAst<Term>),
}

/// A part of a formula.
#[derive(Clone)]
enum Part {
    Tensors(Vec<Value>),
    Literal(Literal),
}

struct Builder<'a> {
    terms: &'a Terms,
    subst: &'a Subst,
    given: &'a BTreeMap<Id, Given>,
    graph: Graph,
    inputs: BTreeMap<String, Value>,
}

impl<'a> Builder<'a> {
    fn new(terms: &'a Terms, subst: &'a Subst, given: &'a BTreeMap<Id, Given>) -> Builder<'a> {
        let mut graph = Graph::new("sample");
        let mut inputs = BTreeMap::new();
        for given in given.values() {
            if let Given::Tensor(name, i) = given {
                let value = graph.add_input(name.clone(), terms.analysis.leaves[*i].clone());
                inputs.insert(name.clone(), value);
            }
        }
        Builder {
            terms,
            subst,
            given,
            graph,
            inputs,
        }
    }

    fn graph(mut self, ast: &PatternAst<Term>) -> Result<Graph, Broken> {
        match self.build(ast)? {
            Part::Tensors(values) => {
                self.graph.outputs = vec![Output {
                    name: "out".into(),
                    value: values[0],
                }];
                Ok(self.graph)
            }
            Part::Literal(_) => Err(Broken::NoTensor),
        }
    }

    fn build(&mut self, ast: &PatternAst<Term>) -> Result<Part, Broken> {
        let mut parts: Vec<Part> = vec![];
        for node in ast {
            let part = match node {
                ENodeOrVar::Var(var) => {
                    let id = *self.subst.get(*var).ok_or(Broken::Unbound(*var))?;
                    match self.given.get(&id) {
                        Some(Given::Tensor(name, _)) => Part::Tensors(vec![self.inputs[name]]),
                        Some(Given::Literal(literal)) => Part::Literal(literal.clone()),
                        Some(Given::Formula(ast)) => self.build(ast)?,
                        None => match &self.terms[id].data.literal {
                            Some(literal) => Part::Literal(literal.clone()),
                            None => return Err(Broken::NotGiven(*var)),
                        },
                    }
                }
                ENodeOrVar::ENode(term) => {
                    let children: Vec<Part> = term
                        .children
                        .iter()
                        .map(|&child| parts[usize::from(child)].clone())
                        .collect();
                    self.term(&term.head, &children)?
                }
            };
            parts.push(part);
        }
        parts.pop().ok_or(Broken::Empty)
    }

    fn term(&mut self, head: &Head, children: &[Part]) -> Result<Part, Broken> {
        let tensors = |parts: &[Part]| -> Vec<Value> {
            let tensor = |part: &Part| {
                if let Part::Tensors(values) = part {
                    Some(values[0])
                } else {
                    None
                }
            };
            parts.iter().filter_map(tensor).collect()
        };
        match head {
            Head::Literal(literal) => Ok(Part::Literal(literal.clone())),
            Head::Result(i) => match &children[0] {
                Part::Tensors(values) => Ok(Part::Tensors(vec![values[usize::from(*i)]])),
                Part::Literal(_) => Err(Broken::OfLiteral),
            },
            Head::Op(kind) => {
                let literals = children.iter().filter_map(|part| match part {
                    Part::Literal(literal) => literal.attr(),
                    Part::Tensors(_) => None,
                });
                let attrs: Vec<(&'static str, Attr)> = attributes(*kind)
                    .iter()
                    .map(|&(key, _)| key)
                    .zip(literals)
                    .collect();
                Ok(Part::Tensors(self.op(*kind, attrs, &tensors(children))?))
            }
            Head::Step(i) => {
                let scale = children.iter().find_map(|part| match part {
                    Part::Literal(Literal::Float(bits)) => Some(f64::from_bits(*bits)),
                    _ => None,
                });
                let value = self.step(
                    STEPS[usize::from(*i)],
                    &tensors(children),
                    scale.unwrap_or(1.0),
                )?;
                Ok(Part::Tensors(vec![value]))
            }
            Head::Leaf(_) => Err(Broken::Leaf),
        }
    }

    fn op(
        &mut self,
        op: OpKind,
        attrs: Vec<(&'static str, Attr)>,
        inputs: &[Value],
    ) -> Result<Vec<Value>, Broken> {
        let attrs = attrs.into_iter().map(|(key, attr)| (key.into(), attr));
        let op = Op::of(op, attrs.collect())?;
        let types: Vec<_> = inputs.iter().map(|&v| &self.graph.values[v].ty).collect();
        let n = self.graph.nodes.len();
        let names: Vec<String> = (0..op.infer(&types)?.len())
            .map(|i| format!("t{n}.{i}"))
            .collect();
        Ok(self
            .graph
            .add_node(op, inputs, &names, Phase::Forward, "")?)
    }

    fn one(
        &mut self,
        op: OpKind,
        attrs: Vec<(&'static str, Attr)>,
        inputs: &[Value],
    ) -> Result<Value, Broken> {
        Ok(self.op(op, attrs, inputs)?[0])
    }

    fn reshape(&mut self, x: Value, shape: &[u64]) -> Result<Value, Broken> {
        self.one(
            OpKind::Reshape,
            vec![(
                "shape",
                Attr::Ints(shape.iter().map(|&d| d as i64).collect()),
            )],
            &[x],
        )
    }

    /// A product of the last two dimensions of two tensors of rank 4.
    fn product(&mut self, a: Value, b: Value, ta: bool, tb: bool) -> Result<Value, Broken> {
        let shape = |graph: &Graph, v: Value| graph.values[v].ty.shape().to_vec();
        let (sa, sb) = (shape(&self.graph, a), shape(&self.graph, b));
        let a = self.reshape(a, &[sa[0] * sa[1], sa[2], sa[3]])?;
        let b = self.reshape(b, &[sb[0] * sb[1], sb[2], sb[3]])?;
        let c = self.one(
            OpKind::Matmul,
            vec![("ta", Attr::Bool(ta)), ("tb", Attr::Bool(tb))],
            &[a, b],
        )?;
        let sc = shape(&self.graph, c);
        self.reshape(c, &[sa[0], sa[1], sc[1], sc[2]])
    }

    /// The attributes and the generator of a dropout key; none if the value is no key.
    fn drops(&self, value: Value) -> Option<(Vec<(&'static str, Attr)>, Value)> {
        let data = &self.graph.nodes[self.graph.def_node(value)?];
        let is_key = data.op.kind() == OpKind::DropoutKey;
        is_key.then(|| (data.op.attrs().into_iter().collect(), data.inputs[0]))
    }

    /// The ops of a step.
    fn step(&mut self, name: &str, tensors: &[Value], scale: f64) -> Result<Value, Broken> {
        let value = |x: f64| vec![("value", Attr::Float(x))];
        let dim = || vec![("dim", Attr::Int(3))];
        match (name, tensors) {
            ("gelu_t", &[x]) => {
                let square = self.one(OpKind::Mul, vec![], &[x, x])?;
                let cube = self.one(OpKind::Mul, vec![], &[square, x])?;
                let cube = self.one(OpKind::MulScalar, value(0.044715), &[cube])?;
                let sum = self.one(OpKind::Add, vec![], &[x, cube])?;
                let scaled = self.one(
                    OpKind::MulScalar,
                    value((2.0 / std::f64::consts::PI).sqrt()),
                    &[sum],
                )?;
                self.one(OpKind::Tanh, vec![], &[scaled])
            }
            ("scores", &[q, k]) => {
                let scores = self.product(q, k, false, true)?;
                self.one(OpKind::MulScalar, value(scale), &[scores])
            }
            ("probs", [q, k, mask @ ..]) => {
                let mut scores = self.step("scores", &[*q, *k], scale)?;
                if let &[mask] = mask {
                    let dtype = self.graph.values[scores].ty.dtype();
                    scores = match self.graph.values[mask].ty.dtype() {
                        DType::Bool => {
                            let attrs = vec![
                                ("dtype", Attr::Type(dtype)),
                                ("shape", Attr::Ints(vec![])),
                                ("value", Attr::Float(f64::NEG_INFINITY)),
                            ];
                            let lost = self.one(OpKind::Full, attrs, &[])?;
                            self.one(OpKind::Where, vec![], &[mask, scores, lost])?
                        }
                        _ => self.one(OpKind::Add, vec![], &[scores, mask])?,
                    };
                }
                self.one(OpKind::Softmax, dim(), &[scores])
            }
            ("dscores", [dout, q, k, v, beside @ ..]) => {
                let drops = beside.iter().find_map(|&key| self.drops(key));
                let mask = &beside[..beside.len() - usize::from(drops.is_some())];
                let of_probs = [&[*q, *k], mask].concat();
                let probs = self.step("probs", &of_probs, scale)?;
                let mut dprobs = self.product(*dout, *v, false, true)?;
                if let Some((attrs, rng)) = drops {
                    dprobs = self.op(OpKind::Dropout, attrs, &[dprobs, rng])?[0];
                }
                self.one(OpKind::SoftmaxBwd, dim(), &[dprobs, probs])
            }
            ("dq", [_, _, k, ..]) => {
                let dscores = self.step("dscores", tensors, scale)?;
                self.product(dscores, *k, false, false)
            }
            ("dk", [_, q, ..]) => {
                let dscores = self.step("dscores", tensors, scale)?;
                self.product(dscores, *q, true, false)
            }
            _ => Err(Broken::Step {
                step: name.to_string(),
                tensors: tensors.len(),
            }),
        }
    }
}
