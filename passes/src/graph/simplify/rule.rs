//! What a rule is and does: if its left side matches, the right side is added to the same class. A
//! rule may equate several pairs at once, for ops with several results.

use super::known::Known;
use super::term::{Facts, Head, Literal, Term, Terms, single};
use egg::{Applier, ENodeOrVar, Id, Language, Pattern, PatternAst, Rewrite, Subst, Symbol, Var};
use ir::graph::Phase;
use ir::op::OpKind;
use ir::{DType, TensorType};

/// How close the two sides are, on numbers of ordinary size.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Close {
    /// The same bits, also for NaN and infinities. All NaNs count as equal.
    Exact,
    /// The same up to rounding: |left - right| <= this share of the larger of 1 and the largest
    /// |left|.
    Within(f64),
}

/// A rule: the left and the right side of the first pair, then pairs that hold for the same
/// variables. The left side of a later pair is only looked up. If it does not exist, the pair is
/// skipped.
pub struct Rule {
    /// Its name.
    pub name: &'static str,
    /// (left, right)
    pub pairs: &'static [(&'static str, &'static str)],
    /// Binds further variables of the right side; `None` if the rule does not hold here.
    pub when: fn(&mut Scope<'_>) -> Option<()>,
    /// How close the sides are.
    pub close: Close,
    /// Bindings at which the rule holds, for its test: `x=f32[2,3] c=0.5`. Several, split by `;`.
    pub samples: &'static str,
}

/// A match, which `when` reads and extends.
pub struct Scope<'a> {
    terms: &'a mut Terms,
    subst: Subst,
    pairs: &'a [(PatternAst<Term>, PatternAst<Term>)],
}

/// The variable of a name.
pub(super) fn var(name: &str) -> Var {
    name.parse().expect("a variable should begin with ?")
}

impl Scope<'_> {
    /// The class of a variable.
    pub(super) fn id(&self, name: &str) -> Option<Id> {
        self.subst.get(var(name)).copied()
    }
    /// The type of a variable.
    pub(super) fn ty(&self, name: &str) -> Option<&TensorType> {
        single(self.terms, self.id(name)?)
    }
    pub(super) fn shape(&self, name: &str) -> Option<&[u64]> {
        self.ty(name).map(TensorType::shape)
    }
    /// The formula of a variable's numbers, if it is known.
    pub(super) fn known(&self, name: &str) -> Option<&Known> {
        self.terms[self.id(name)?].data.known.as_ref()
    }
    /// Whether a variable is computed before the gradients.
    pub(super) fn is_forward(&self, name: &str) -> bool {
        self.id(name)
            .is_some_and(|id| self.terms[id].data.phase == Phase::Forward)
    }
    pub(super) fn literal(&self, name: &str) -> Option<&Literal> {
        self.terms[self.id(name)?].data.literal.as_ref()
    }
    /// A number.
    pub(super) fn number(&self, name: &str) -> Option<f64> {
        match self.literal(name)? {
            Literal::Float(bits) => Some(f64::from_bits(*bits)),
            Literal::Int(i) => Some(*i as f64),
            _ => None,
        }
    }
    pub(super) fn int(&self, name: &str) -> Option<i64> {
        if let Literal::Int(i) = self.literal(name)? {
            Some(*i)
        } else {
            None
        }
    }
    pub(super) fn ints(&self, name: &str) -> Option<Vec<i64>> {
        if let Literal::Ints(v) = self.literal(name)? {
            Some(v.clone())
        } else {
            None
        }
    }
    pub(super) fn dtype(&self, name: &str) -> Option<DType> {
        if let Literal::Type(d) = self.literal(name)? {
            Some(*d)
        } else {
            None
        }
    }
    /// Binds a variable to a literal.
    pub(super) fn bind(&mut self, name: &str, literal: Literal) {
        let id = self.terms.add(Term::new(Head::Literal(literal), []));
        self.subst.insert(var(name), id);
    }
    pub(super) fn bind_float(&mut self, name: &str, x: f64) {
        self.bind(name, Literal::Float(x.to_bits()));
    }
    pub(super) fn bind_shape(&mut self, name: &str, shape: &[u64]) {
        self.bind(
            name,
            Literal::Ints(shape.iter().map(|&d| d as i64).collect()),
        );
    }
    /// The class of a formula over bound variables, if it exists.
    pub(super) fn find(&self, text: &str) -> Option<Id> {
        lookup(self.terms, &parse(text).ast, &self.subst)
    }
    /// Whether the left side of pair `i` exists.
    pub(super) fn has(&self, i: usize) -> bool {
        lookup(self.terms, &self.pairs[i].0, &self.subst).is_some()
    }
    /// Whether a variable's class is computed by op `name` from another class.
    pub(super) fn is_a(&self, name: &str, op: OpKind) -> bool {
        let Some(id) = self.id(name).map(|id| self.terms.find(id)) else {
            return false;
        };
        self.terms[id]
            .nodes
            .iter()
            .any(|t| t.is_op(op) && t.children.iter().all(|&c| self.terms.find(c) != id))
    }
    /// Binds a variable to the operand that `choose` selects from an `op` that computes its class.
    pub(super) fn replace_by_operand<const N: usize>(
        &mut self,
        variable: &str,
        op: OpKind,
        choose: impl Fn(&Scope<'_>, [Id; N]) -> Option<Id>,
    ) {
        let Some(id) = self.id(variable) else { return };
        let found = self.terms[id]
            .nodes
            .iter()
            .filter(|term| term.is_op(op))
            .find_map(|term| {
                let operands: Vec<Id> = term.operands(self.terms).collect();
                choose(self, operands.try_into().ok()?)
            });
        if let Some(operand) = found {
            self.subst.insert(var(variable), operand);
        }
    }
    /// The number in a class of one constant element.
    pub(super) fn constant(&self, id: Id) -> Option<f64> {
        let full = self.terms[id]
            .nodes
            .iter()
            .find(|term| term.is_op(OpKind::Full))?;
        (single(self.terms, id)?.numel() == 1).then_some(())?;
        match self.terms[*full.children.last()?].data.literal.as_ref()? {
            Literal::Float(bits) => Some(f64::from_bits(*bits)),
            Literal::Int(i) => Some(*i as f64),
            _ => None,
        }
    }
    pub(super) fn same(&self, a: Option<Id>, b: Option<Id>) -> Option<()> {
        (self.terms.find(a?) == self.terms.find(b?)).then_some(())
    }
}

/// The pattern of a text. Rules are constants, so a text that is not a pattern is a bug.
fn parse(text: &str) -> Pattern<Term> {
    text.parse()
        .unwrap_or_else(|e| panic!("{text} should be a pattern: {e}"))
}

/// The class of a formula under a substitution, if it exists.
fn lookup(terms: &Terms, ast: &PatternAst<Term>, subst: &Subst) -> Option<Id> {
    let mut ids: Vec<Id> = Vec::with_capacity(ast.len());
    for node in ast {
        ids.push(match node {
            ENodeOrVar::Var(var) => *subst.get(*var)?,
            ENodeOrVar::ENode(term) => {
                terms.lookup(term.clone().map_children(|id| ids[usize::from(id)]))?
            }
        });
    }
    ids.last().map(|&id| terms.find(id))
}

/// The class of a formula under a substitution.
pub(super) fn add(terms: &mut Terms, ast: &PatternAst<Term>, subst: &Subst) -> Option<Id> {
    let mut ids: Vec<Id> = Vec::with_capacity(ast.len());
    for node in ast {
        ids.push(match node {
            ENodeOrVar::Var(var) => *subst.get(*var)?,
            ENodeOrVar::ENode(term) => {
                let id = terms.add(term.clone().map_children(|id| ids[usize::from(id)]));
                let data = &terms[id].data;
                // A term without a type is not well-formed here.
                if data.literal.is_none() && data.types.is_empty() {
                    return None;
                }
                id
            }
        });
    }
    ids.last().copied()
}

/// A rule as egg runs it.
pub(super) struct Action {
    when: fn(&mut Scope<'_>) -> Option<()>,
    pub(super) pairs: Vec<(PatternAst<Term>, PatternAst<Term>)>,
}

impl Action {
    pub(super) fn new(rule: &Rule) -> Action {
        let pairs = rule
            .pairs
            .iter()
            .map(|(left, right)| (parse(left).ast, parse(right).ast))
            .collect();
        Action {
            when: rule.when,
            pairs,
        }
    }
    /// The substitution with the further variables of the right sides.
    pub(super) fn bind(&self, terms: &mut Terms, subst: &Subst) -> Option<Subst> {
        let mut scope = Scope {
            terms,
            subst: subst.clone(),
            pairs: &self.pairs,
        };
        (self.when)(&mut scope)?;
        Some(scope.subst)
    }
}

impl Applier<Term, Facts> for Action {
    fn apply_one(
        &self,
        terms: &mut Terms,
        class: Id,
        subst: &Subst,
        _: Option<&PatternAst<Term>>,
        _: Symbol,
    ) -> Vec<Id> {
        let Some(subst) = self.bind(terms, subst) else {
            return vec![];
        };
        let mut changed = vec![];
        for (i, (left, right)) in self.pairs.iter().enumerate() {
            let left = if i == 0 {
                Some(class)
            } else {
                lookup(terms, left, &subst)
            };
            let Some(left) = left else { continue };
            let Some(right) = add(terms, right, &subst) else {
                continue;
            };
            if terms[left].data.types == terms[right].data.types && terms.union(left, right) {
                changed.push(left);
            }
        }
        changed
    }
}

/// The rule for egg.
pub(super) fn rewrite(rule: &Rule) -> Rewrite<Term, Facts> {
    Rewrite::new(rule.name, parse(rule.pairs[0].0), Action::new(rule))
        .expect("a rule without declared variables is valid")
}
