//! The planned nodes of one call, and how they are added to the graph.

use crate::{Error, FileError, Result, Results};
use ir::op::attrs::Extern;
use ir::{DType, Graph, Op, Phase, StateKind, TensorType, Value};
use std::collections::BTreeMap;

/// An operand of a planned step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ref {
    /// A value of the graph.
    Value(Value),
    /// A result of an earlier step, counted over all results of the plan.
    New(usize),
    /// The state of the random-number generator.
    Rng,
}

/// A planned node.
#[derive(Clone, PartialEq, Debug)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub struct Step {
    pub op: Op,
    pub inputs: Vec<Ref>,
    pub n_results: usize,
}

/// The nodes for one call.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// The nodes, each after the nodes that it reads.
    pub steps: Vec<Step>,
    /// The call's results; `None` for a result that nothing uses.
    pub results: Results,
    /// The number of random nodes that the call adds.
    pub n_random: i64,
    /// New values of arguments that the call writes into, by the argument's name.
    pub written: Vec<(&'static str, Ref)>,
}

/// The values of a call, after its plan was added to a graph.
#[derive(Clone, PartialEq, Debug)]
pub struct Added {
    /// The call's results; `None` for a result that nothing uses.
    pub results: Vec<Option<Value>>,
    /// New values of arguments that the call writes into, by the argument's name.
    pub written: Vec<(&'static str, Value)>,
}

/// A call that no op expresses, as its own program knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outside<'a> {
    /// The operator.
    pub target: &'a str,
    /// The name of the call.
    pub node: &'a str,
    /// True if a repeated run is known to give the same bits.
    pub is_pure: bool,
}

/// The state of the random-number generator of a graph. It is added to the graph when the first
/// random node needs it.
#[derive(Clone, PartialEq, Debug)]
pub struct Generator {
    name: String,
    state: Option<Value>,
    /// The number of random nodes so far. Each node gets its own number and so its own stream.
    n_random: i64,
}

/// The path of the generator's state.
const RNG: &str = "rng";

impl Generator {
    /// The generator of a graph without random nodes; `name` is the name of its state.
    pub fn new(name: impl Into<String>) -> Generator {
        Generator {
            name: name.into(),
            state: None,
            n_random: 0,
        }
    }

    /// The type of the generator's state.
    pub(crate) fn ty() -> TensorType {
        TensorType::new(DType::I64, [2]).expect("two integers should be a type")
    }

    /// The number of random nodes so far.
    pub(crate) fn n_random(&self) -> i64 {
        self.n_random
    }

    /// The state, and the stream of one more random node.
    pub fn draw(&mut self, graph: &mut Graph) -> (Value, i64) {
        self.n_random += 1;
        (self.state(graph), self.n_random - 1)
    }

    fn state(&mut self, graph: &mut Graph) -> Value {
        *self.state.get_or_insert_with(|| {
            graph.add_state(&self.name, RNG, StateKind::Rng, Generator::ty())
        })
    }

    /// If the step draws random numbers, makes the next step draw others. Called once, after the
    /// last node.
    pub fn advance(&self, graph: &mut Graph) -> std::result::Result<(), FileError> {
        let Some(rng) = self.state else { return Ok(()) };
        if graph.states.values().filter(|s| s.path == RNG).count() > 1 {
            let message =
                "is the path of a parameter or buffer, and of the random-number generator";
            return Err(FileError::new(RNG, message).help("rename it in the model"));
        }
        let name = format!("{}.next", graph.values[rng].name);
        let after = graph
            .add_node(Op::RngNext, &[rng], &[name], Phase::Optimizer, "")
            .map_err(|e| FileError::new(RNG, e.to_string()))?[0];
        let state = graph.states.values_mut().find(|state| state.before == rng);
        state.expect("the generator should be a state").after = after;
        Ok(())
    }
}

impl Plan {
    /// One `extern` node: a call that cannot be expressed. `types` are its results' types.
    pub fn external(
        call: Outside<'_>,
        operands: &[Value],
        types: &[Option<TensorType>],
    ) -> Result<Plan> {
        let texts: Vec<String> = types.iter().flatten().map(|ty| ty.to_string()).collect();
        let external = Extern {
            name: call.target.into(),
            node: call.node.into(),
            pure: call.is_pure,
            types: texts.join(" "),
        };
        let step = Step {
            op: Op::Extern(external),
            inputs: operands.iter().map(|&value| Ref::Value(value)).collect(),
            n_results: texts.len(),
        };
        let mut new = (0..).map(Ref::New);
        let result = |ty: &Option<TensorType>| ty.as_ref().and_then(|_| new.next());
        Ok(Plan {
            steps: vec![step],
            results: types.iter().map(result).collect(),
            n_random: 0,
            written: vec![],
        })
    }

    /// Adds the steps to a graph and returns the values of the named results and of what is
    /// written. `names` are the results' names, at least one of which is given; `types` are their
    /// types in the file. Any other step's result gets the first name with a dot and a number: such
    /// a name is free in a format whose names are identifiers.
    pub fn add_to(
        &self,
        graph: &mut Graph,
        generator: &mut Generator,
        names: &[Option<&str>],
        types: &[Option<TensorType>],
        (phase, module): (Phase, &str),
    ) -> Result<Added> {
        let base = names.iter().flatten().next();
        let base = base.expect("a call without results should not be planned");
        let mut own: BTreeMap<usize, &str> = BTreeMap::new();
        for (result, name) in self.results.iter().zip(names) {
            if let (Some(Ref::New(i)), Some(name)) = (result, name) {
                own.entry(*i).or_insert(name);
            }
        }

        let mut made: Vec<Value> = vec![];
        let mut helpers = (0..).map(|i| format!("{base}.{i}"));
        for step in &self.steps {
            let operand = |&input: &Ref| match input {
                Ref::Value(value) => value,
                Ref::New(i) => made[i],
                Ref::Rng => generator.state(graph),
            };
            let inputs: Vec<Value> = step.inputs.iter().map(operand).collect();
            let mut name = |i: usize| match own.get(&i) {
                Some(name) => name.to_string(),
                None => helpers.next().expect("numbers should not end"),
            };
            let numbers = made.len()..made.len() + step.n_results;
            let names: Vec<String> = numbers.map(&mut name).collect();
            made.extend(graph.add_node(step.op.clone(), &inputs, &names, phase, module)?);
        }
        generator.n_random += self.n_random;

        let named = names.iter().zip(types).enumerate();
        let results = named.map(|(i, (name, ty))| match (name, ty) {
            (Some(name), Some(ty)) => self.result(graph, i, &made, name, ty).map(Some),
            _ => Ok(None),
        });
        let results = results.collect::<Result<_>>()?;
        let written = self.written.iter().filter_map(|&(name, of)| match of {
            Ref::Value(value) => Some((name, value)),
            Ref::New(i) => Some((name, made[i])),
            Ref::Rng => None,
        });
        let written = written.collect();
        Ok(Added { results, written })
    }

    /// True if the call has a result `i`.
    pub fn computes(&self, i: usize) -> bool {
        matches!(self.results.get(i), Some(Some(_)))
    }

    /// Result `i` of the call. An error if its type differs from the file's.
    fn result(
        &self,
        graph: &Graph,
        i: usize,
        made: &[Value],
        name: &str,
        declared: &TensorType,
    ) -> Result<Value> {
        let value = match self.results.get(i) {
            Some(Some(Ref::Value(value))) => *value,
            Some(Some(Ref::New(i))) => made[*i],
            _ => return Err(Error::NotComputed(name.to_string())),
        };
        let inferred = &graph.values[value].ty;
        if inferred == declared {
            return Ok(value);
        }
        Err(Error::Type {
            name: name.to_string(),
            declared: declared.to_string(),
            inferred: inferred.to_string(),
        })
    }
}
