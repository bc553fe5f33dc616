//! Chooses among equal formulas, so that a graph whose ops the tracer decomposed is as good as one
//! with whole ops. Views and scales fold away. Decomposed gelus, normalisations, losses and
//! attentions are recognised, with their gradients. The crate egg (Willsey et al., POPL 2021) holds
//! all forms at once, so the order of rules does not matter.
//!
//! Before: canonical form. After: a state, an output or a gradient needs each node. Values are the
//! same as before, up to the roundings that [`rules`] states for each rule. A node has the position
//! of the node that it replaces, and values keep their names.
//!
//! Limits: `ITERATIONS` rounds of matching, and at most `GROWTH` times the terms of the graph. No
//! clock is used. A formula that is not reached within the limits stays as it was traced.

mod extract;
mod known;
mod rule;
pub mod rules;
pub mod sample;
mod term;

pub use rule::{Close, Rule};

use egg::{Id, Language, Rewrite};
use ir::graph::{NodeData, Phase};
use ir::op::OpKind;
use ir::op::attention::Beside;
use ir::{Graph, Node, Table, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;
use term::{Facts, Head, Literal, Term, Terms};

/// Rounds of matching, for each set of rules. The longest chain of rules is attention's gradient
/// with scaled and permuted factors; it takes 8.
const ITERATIONS: usize = 12;

/// Terms for each term of the graph. Graphs of transformers grow 3 times.
const GROWTH: usize = 12;

static FORMS: LazyLock<Vec<Rewrite<Term, Facts>>> =
    LazyLock::new(|| rules::FORMS.iter().map(rule::rewrite).collect());
static ALL: LazyLock<Vec<Rewrite<Term, Facts>>> =
    LazyLock::new(|| rules::all().map(rule::rewrite).collect());

/// Which ops a rewritten graph may have that the traced one has not.
pub(super) type Allowed = fn(OpKind) -> bool;

/// Rewrites the graph. A graph with groups does not change: it was simplified before.
pub fn run(graph: &mut Graph) {
    run_with(graph, |_| true);
}

/// The same; new ops are `allowed` ones.
pub(super) fn run_with(graph: &mut Graph, allowed: Allowed) {
    if graph.nodes.values().any(|data| data.op.body().is_some()) {
        return;
    }
    let mut import = Import::new(graph);
    saturate(&mut import.terms, &FORMS);
    saturate(&mut import.terms, &ALL);
    let chosen = import.extract(allowed);
    *graph = Rebuild::new(&import, &chosen).run();
}

/// Applies the rules until nothing is new, or a limit is reached.
fn saturate(terms: &mut Terms, rules: &[Rewrite<Term, Facts>]) {
    let most = GROWTH * terms.total_size() + 1000;
    for _ in 0..ITERATIONS {
        let (n_terms, n_classes) = (terms.total_number_of_nodes(), terms.number_of_classes());
        let matches: Vec<_> = rules.iter().map(|rule| rule.search(terms)).collect();
        let mut changed = false;
        for (rule, matches) in rules.iter().zip(&matches) {
            let new = rule.apply(terms, matches).len();
            if 0 < new {
                log::trace!("{}: {new} classes", rule.name);
            }
            changed |= 0 < new;
            if most < terms.total_size() {
                break;
            }
        }
        terms.rebuild();
        log::trace!(
            "{} terms in {} classes",
            terms.total_number_of_nodes(),
            terms.number_of_classes()
        );
        let grown =
            n_terms != terms.total_number_of_nodes() || n_classes != terms.number_of_classes();
        if !changed && !grown || most < terms.total_size() {
            return;
        }
    }
}

/// A graph as terms.
struct Import<'a> {
    graph: &'a Graph,
    terms: Terms,
    class: Table<Value, Option<Id>>,
    /// The value of each leaf.
    leaves: Vec<Value>,
    /// The terms of the traced graph.
    traced: Vec<Term>,
}

impl<'a> Import<'a> {
    fn new(graph: &'a Graph) -> Import<'a> {
        let mut import = Import {
            graph,
            terms: Terms::new(Facts::default()),
            class: Table::filled(graph.values.len(), None),
            leaves: vec![],
            traced: vec![],
        };
        for &value in graph
            .inputs
            .iter()
            .chain(graph.states.values().map(|s| &s.before))
        {
            import.leaf(value);
        }
        for &node in &graph.order {
            import.node(&graph.nodes[node]);
        }
        import.terms.rebuild();
        import
    }

    fn leaf(&mut self, value: Value) {
        let head = Head::Leaf(
            u32::try_from(self.leaves.len()).expect("a graph should have fewer than 2^32 values"),
        );
        self.terms
            .analysis
            .leaves
            .push(self.graph.values[value].ty.clone());
        self.leaves.push(value);
        self.class[value] = Some(self.terms.add(Term::new(head, [])));
    }

    fn node(&mut self, data: &NodeData) {
        if !data.op.is_pure() {
            data.outputs.iter().for_each(|&v| self.leaf(v));
            return;
        }
        let operands = data
            .inputs
            .iter()
            .map(|&v| self.class[v].expect("operands should come before their readers"));
        let mut children: Vec<Id> = operands.collect();
        if let Some(first) = beside(data.op.kind()) {
            // Operands that are missing have a place, so that a rule has one form for all.
            let types = data.inputs[first..]
                .iter()
                .map(|&v| &self.graph.values[v].ty);
            let Beside { mask, key } = Beside::of(first, types);
            let none = self.terms.add(Term::new(Head::Literal(Literal::None), []));
            let both = [mask, key].map(|i| i.map_or(none, |i| children[i]));
            children.truncate(first);
            children.extend(both);
        }
        for attr in data.op.attrs().values() {
            children.push(
                self.terms
                    .add(Term::new(Head::Literal(Literal::of(attr)), [])),
            );
        }
        let term = Term::new(Head::Op(data.op.kind()), children);
        self.traced.push(term.clone());
        let is_new = self.terms.lookup(term.clone()).is_none();
        let class = self.terms.add(term);
        if is_new {
            self.terms[class].data.phase = data.phase;
        }
        if let &[output] = data.outputs.as_slice() {
            self.class[output] = Some(class);
            return;
        }
        for (i, &output) in data.outputs.iter().enumerate() {
            let head = Head::Result(u8::try_from(i).expect("an op should have few results"));
            self.class[output] = Some(self.terms.add(Term::new(head, [class])));
        }
    }

    /// The values that must be computed: values that leave the step, and operands of opaque nodes.
    fn roots(&self) -> Vec<Value> {
        let graph = self.graph;
        let opaque = graph
            .order
            .iter()
            .map(|&node| &graph.nodes[node])
            .filter(|data| !data.op.is_pure());
        let opaque = opaque.flat_map(|data| data.inputs.iter().copied());
        graph.wanted().chain(opaque).collect()
    }

    fn class(&self, value: Value) -> Id {
        self.terms
            .find(self.class[value].expect("every value of the order should have a class"))
    }

    fn extract(&self, allowed: Allowed) -> BTreeMap<Id, Term> {
        let roots: Vec<Id> = self.roots().into_iter().map(|v| self.class(v)).collect();
        let find = |term: &Term| term.clone().map_children(|id| self.terms.find(id));
        let traced: BTreeSet<Term> = self.traced.iter().map(find).collect();
        extract::extract(&self.terms, &roots, &traced, allowed)
    }
}

/// The number of the first of an attention's operands that may be missing: a mask and a dropout
/// key.
fn beside(op: OpKind) -> Option<usize> {
    match op {
        OpKind::Sdpa => Some(3),
        OpKind::SdpaBwd => Some(6),
        _ => None,
    }
}

/// Builds the graph of the chosen terms.
struct Rebuild<'a> {
    import: &'a Import<'a>,
    chosen: &'a BTreeMap<Id, Term>,
    new: Graph,
    /// The values of a class: its results.
    values: BTreeMap<Id, Vec<Value>>,
    /// The first traced value of each class, and its node.
    origin: BTreeMap<Id, (Value, Option<Node>)>,
    names: BTreeSet<String>,
}

impl<'a> Rebuild<'a> {
    fn new(import: &'a Import<'a>, chosen: &'a BTreeMap<Id, Term>) -> Rebuild<'a> {
        let graph = import.graph;
        let mut origin = BTreeMap::new();
        for &value in graph
            .inputs
            .iter()
            .chain(graph.states.values().map(|s| &s.before))
        {
            origin.entry(import.class(value)).or_insert((value, None));
        }
        for &node in &graph.order {
            for &value in &graph.nodes[node].outputs {
                origin
                    .entry(import.class(value))
                    .or_insert((value, Some(node)));
            }
        }
        let names = graph
            .values
            .values()
            .map(|data| data.name.clone())
            .collect();
        Rebuild {
            import,
            chosen,
            new: Graph::new(graph.name.clone()),
            values: BTreeMap::new(),
            origin,
            names,
        }
    }

    fn run(mut self) -> Graph {
        let graph = self.import.graph;
        for &input in &graph.inputs {
            let data = &graph.values[input];
            let value = self.new.add_input(data.name.clone(), data.ty.clone());
            self.values.insert(self.import.class(input), vec![value]);
        }
        for state in graph.states.values() {
            let data = &graph.values[state.before];
            let value = self.new.add_state(
                data.name.clone(),
                state.path.clone(),
                state.kind,
                data.ty.clone(),
            );
            self.values
                .insert(self.import.class(state.before), vec![value]);
        }
        for &node in &graph.order {
            let data = &graph.nodes[node];
            if !data.op.is_pure() {
                self.opaque(data);
                continue;
            }
            for &output in &data.outputs {
                let class = self.import.class(output);
                if self.chosen.contains_key(&class) {
                    self.compute(class, data);
                }
            }
        }
        for (i, state) in graph.states.iter() {
            self.new.states[i].after = self.value(state.after);
        }
        self.new.outputs = graph.outputs.clone();
        for (i, output) in graph.outputs.iter().enumerate() {
            self.new.outputs[i].value = self.value(output.value);
        }
        self.new.gradients = graph
            .gradients
            .iter()
            .map(|&(state, v)| (state, self.value(v)))
            .collect();
        self.new.compact()
    }

    /// The new value of a traced value that is needed.
    fn value(&self, value: Value) -> Value {
        self.values[&self.import.class(value)][0]
    }

    fn opaque(&mut self, data: &NodeData) {
        for &input in &data.inputs {
            self.compute(self.import.class(input), data);
        }
        let inputs: Vec<Value> = data.inputs.iter().map(|&v| self.value(v)).collect();
        let names: Vec<String> = data
            .outputs
            .iter()
            .map(|&v| self.import.graph.values[v].name.clone())
            .collect();
        let added = self.new.add_node(
            data.op.clone(),
            &inputs,
            &names,
            data.phase,
            data.module.clone(),
        );
        let outputs = added.expect("a node with the same operands should be typed as before");
        for (&before, after) in data.outputs.iter().zip(outputs) {
            self.values.insert(self.import.class(before), vec![after]);
        }
    }

    /// Adds the nodes that compute a class, at the place of the traced node `reader`.
    fn compute(&mut self, class: Id, reader: &NodeData) {
        // With an explicit stack, because chosen terms may be deep.
        let mut stack = vec![class];
        while let Some(&class) = stack.last() {
            if self.values.contains_key(&class) {
                stack.pop();
                continue;
            }
            let term = &self.chosen[&class];
            let operands: Vec<Id> = match term.head {
                Head::Result(_) => term.children.to_vec(),
                _ => term.operands(&self.import.terms).collect(),
            };
            let missing: Vec<Id> = operands
                .iter()
                .copied()
                .filter(|id| !self.values.contains_key(id))
                .collect();
            if missing.is_empty() {
                let values = self.add(class, term, &operands, reader);
                self.values.insert(class, values);
                stack.pop();
            } else {
                stack.extend(missing.into_iter().rev());
            }
        }
    }

    fn add(&mut self, class: Id, term: &Term, operands: &[Id], reader: &NodeData) -> Vec<Value> {
        if let Head::Result(i) = term.head {
            return vec![self.values[&operands[0]][usize::from(i)]];
        }
        let graph = self.import.graph;
        let op = term
            .op(&self.import.terms)
            .expect("a chosen term should be an op");
        // The node that it replaces: for an op with several results, the node of the first traced
        // result.
        let n_results = self.import.terms[class].data.types.len();
        let classes: Vec<Option<Id>> = match n_results {
            1 => vec![Some(class)],
            n => (0..n).map(|i| self.result(class, i)).collect(),
        };
        // Another class may compute this result alone, at a lower cost. Then that class gets the
        // name.
        let is_here = |id: &Id| {
            n_results == 1
                || self
                    .chosen
                    .get(id)
                    .is_some_and(|term| term.children.contains(&class))
        };
        let classes = classes.into_iter().map(|id| id.filter(is_here));
        let origins: Vec<_> = classes
            .map(|id| id.and_then(|id| self.origin.get(&id).copied()))
            .collect();
        let node = origins
            .iter()
            .flatten()
            .find_map(|&(_, node)| node)
            .map(|node| &graph.nodes[node]);
        let (phase, module) = match node {
            Some(node) => (node.phase.min(reader.phase), &node.module),
            None => (reader.phase, &reader.module),
        };
        let base = origins
            .iter()
            .flatten()
            .next()
            .map_or(reader.outputs[0], |&(value, _)| value);
        let names: Vec<String> = origins
            .iter()
            .enumerate()
            .map(|(i, origin)| match origin {
                Some((value, _)) => graph.values[*value].name.clone(),
                None if n_results == 1 => {
                    self.fresh(&format!("{}.{}", graph.values[base].name, op.name()))
                }
                None => self.fresh(&format!("{}.{i}", graph.values[base].name)),
            })
            .collect();
        let inputs: Vec<Value> = operands.iter().map(|id| self.values[id][0]).collect();
        let added = self.new.add_node(
            op,
            &inputs,
            &names,
            phase.min(Phase::Optimizer),
            module.clone(),
        );
        added.expect("a chosen term should be well-formed")
    }

    /// The class of result `i` of `class`.
    fn result(&self, class: Id, i: usize) -> Option<Id> {
        let head = Head::Result(u8::try_from(i).expect("an op should have few results"));
        self.import.terms.lookup(Term::new(head, [class]))
    }

    /// An unused name.
    fn fresh(&mut self, base: &str) -> String {
        let mut name = base.to_string();
        for i in 2.. {
            if self.names.insert(name.clone()) {
                break;
            }
            name = format!("{base}.{i}");
        }
        name
    }
}
