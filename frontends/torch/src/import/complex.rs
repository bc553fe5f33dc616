//! Calls on complex numbers. A name of the file that is complex has two values: its real part,
//! under the name, and its imaginary part. Inputs, states and outputs are one tensor, whose last
//! dimension has both parts of each number, as in memory of torch.

use super::{Import, output_names, tensor_names};
use crate::Error;
use crate::arguments::NodeArguments;
use crate::attribution::Place;
use crate::ops;
use crate::ops::complex::{Formula, Lowering, Parts, joined};
use crate::schema::{self, Argument, Item};
use ir::{Phase, TensorType, Value};
use lower::{Added, Arguments, Call, Operand, Outside, Plan, Ref, Scalar};
use std::collections::BTreeMap;

/// One part of each number.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Real,
    Imaginary,
}

const WRITTEN: &str = "writes into a tensor; export with .run_decompositions({}), which makes new \
                       tensors of such writes";

/// Nodes of a call, with the names and the types of their results.
struct Planned {
    plan: Plan,
    names: Vec<Option<String>>,
    types: Vec<Option<TensorType>>,
}

/// The arguments of a call that has none.
struct Nothing;

impl Arguments for Nothing {
    fn read(&mut self, _: &str) -> lower::Result<Option<lower::Argument>> {
        Ok(None)
    }
    fn skip(&mut self, _: &str) {}
    fn finish(&self) -> lower::Result<()> {
        Ok(())
    }
}

fn failed(error: lower::Error) -> Error {
    Error::new("", error.to_string())
}

impl<'a> Import<'a> {
    fn is_complex(&self, name: &str) -> bool {
        let meta = self.program.graph_module.graph.tensor_values.get(name);
        meta.is_some_and(|meta| schema::part(meta.dtype).is_some())
    }

    /// True if a call is one on complex numbers.
    pub(super) fn has_complex(&self, node: &schema::Node) -> bool {
        let mut names = tensor_names(&node.inputs).chain(output_names(node).flatten());
        let is_number = |argument: &Argument| matches!(argument, Argument::Complex(_));
        names.any(|name| self.is_complex(name))
            || node.inputs.iter().any(|it| is_number(&it.arg))
            || ops::complex::is_complex(&node.target)
    }

    /// The type of an input, a state or an output of the graph.
    pub(super) fn stored(&mut self, name: &str) -> Result<TensorType, Error> {
        let ty = self.declared(name)?;
        if !self.is_complex(name) {
            return Ok(ty);
        }
        let shape = [ty.shape(), &[2]].concat();
        TensorType::new(ty.dtype(), shape).map_err(|e| Error::new(name, e.to_string()))
    }

    /// Gives the name of an input or a state its value, in two parts if it is complex.
    pub(super) fn bind_stored(&mut self, name: &'a str, value: Value) -> Result<(), Error> {
        if !self.is_complex(name) {
            return self.bind(name, value);
        }
        let place = Place {
            phase: Phase::Forward,
            module: String::new(),
            is_pure: true,
        };
        let parts = self.parts(name, value, &format!("{name}.real"), &place)?;
        self.bind_parts(name, &parts)
    }

    /// The parts of a tensor whose last dimension has both. `real` is the name of the first one.
    fn parts(
        &mut self,
        name: &str,
        value: Value,
        real: &str,
        place: &Place,
    ) -> Result<Vec<Option<Value>>, Error> {
        let part = self.declared(name)?;
        let types = [Some(part.clone()), Some(part)];
        let mut nothing = Nothing;
        let mut call = Call::new(&self.graph, &self.generator, &mut nothing, &types);
        let last = call.rank(Ref::Value(value)) - 1;
        let mut select = |at| call.select(Ref::Value(value), last, at).map(Some);
        let results = vec![select(0).map_err(failed)?, select(1).map_err(failed)?];
        let plan = call.finish(results).map_err(failed)?;
        let imaginary = format!("{name}.imag");
        let names = [Some(real), Some(imaginary.as_str())];
        Ok(self.complex_added(&plan, &names, &types, place)?.results)
    }

    /// A value of one tensor for a name that may be complex.
    pub(super) fn whole(&mut self, name: &'a str, value: Value) -> Result<Value, Error> {
        let Some(&imaginary) = self.imaginary.get(name) else {
            return Ok(value);
        };
        let types = [Some(self.stored(name)?)];
        let mut nothing = Nothing;
        let mut call = Call::new(&self.graph, &self.generator, &mut nothing, &types);
        let whole = joined(&mut call, Ref::Value(value), Ref::Value(imaginary));
        let plan = whole.and_then(|whole| call.finish(vec![Some(whole)]));
        let node = self
            .graph
            .def_node(value)
            .map(|node| &self.graph.nodes[node]);
        let place = Place {
            phase: node.map_or(Phase::Forward, |node| node.phase),
            module: node.map_or_else(String::new, |node| node.module.clone()),
            is_pure: true,
        };
        let again = format!("{name}.whole{}", self.graph.values.len());
        let plan = plan.map_err(failed)?;
        let added = self.complex_added(&plan, &[Some(&again)], &types, &place)?;
        Ok(added.results[0].unwrap_or(value))
    }

    fn bind_parts(&mut self, name: &'a str, parts: &[Option<Value>]) -> Result<(), Error> {
        let &[Some(real), Some(imaginary)] = parts else {
            return Err(Error::new(name, "a part of it is not computed"));
        };
        self.bind(name, real)?;
        self.imaginary.insert(name, imaginary);
        Ok(())
    }

    fn complex_added(
        &mut self,
        plan: &Plan,
        names: &[Option<&str>],
        types: &[Option<TensorType>],
        place: &Place,
    ) -> Result<Added, Error> {
        let at = (place.phase, place.module.as_str());
        let added = plan.add_to(&mut self.graph, &mut self.generator, names, types, at);
        added.map_err(failed)
    }

    /// A call one of whose tensors is complex. Nothing is added to the graph before all of its
    /// nodes are planned: a call that cannot be expressed becomes one `extern` node under the same
    /// names.
    pub(super) fn complex_call(
        &mut self,
        node: &'a schema::Node,
        label: &str,
        names: &[Option<&'a str>],
        types: &[Option<TensorType>],
        place: &Place,
    ) -> Result<(), Error> {
        let plans = match ops::complex::lowering(&node.target) {
            Some(Lowering::ByPart) => self.by_part(node, names, types),
            Some(Lowering::Formula(formula)) => self.by_formula(node, names, types, formula),
            None if ops::is_in_place(&node.target) => Err(WRITTEN.into()),
            None => Err(lower::Error::NoOp),
        };
        let results = match plans {
            Ok(plans) => self.planned(node, plans, names.len(), place)?,
            Err(why) => {
                self.unsupported(node, label, format!("of complex numbers: {why}"));
                self.complex_extern(node, label, names, place)?
            }
        };
        for (name, parts) in names.iter().zip(results) {
            let Some(name) = name else { continue };
            match self.is_complex(name) {
                true => self.bind_parts(name, &parts)?,
                false => {
                    let value = parts.into_iter().next().flatten();
                    let missing = || Error::new(*name, "is not computed");
                    self.bind(name, value.ok_or_else(missing)?)?;
                }
            }
        }
        if ops::complex::is_view(&node.target) {
            let operands = tensor_names(&node.inputs);
            self.names
                .blur(operands.chain(names.iter().copied().flatten()));
        }
        Ok(())
    }

    /// Adds the nodes of a call. Returns the parts of each result.
    fn planned(
        &mut self,
        node: &schema::Node,
        plans: Vec<Planned>,
        n_results: usize,
        place: &Place,
    ) -> Result<Vec<Vec<Option<Value>>>, Error> {
        let mut results = vec![vec![]; n_results];
        for it in plans {
            let names: Vec<Option<&str>> = it.names.iter().map(Option::as_deref).collect();
            let added = self.complex_added(&it.plan, &names, &it.types, place)?;
            for (i, (value, name)) in added.results.into_iter().zip(names).enumerate() {
                let value = match (value, name) {
                    (Some(value), Some(name))
                        if self.is_forward && ops::is_detached(&node.target) =>
                    {
                        Some(self.detached(value, &format!("{name}.detached"), place)?)
                    }
                    (value, _) => value,
                };
                // The parts of a single result are planned together.
                results[i.min(n_results - 1)].push(value);
            }
        }
        Ok(results)
    }

    /// Each part of the results by the operator for real numbers.
    fn by_part(
        &mut self,
        node: &'a schema::Node,
        names: &[Option<&'a str>],
        types: &[Option<TensorType>],
    ) -> lower::Result<Vec<Planned>> {
        let is_number = |it: &schema::NamedArgument| matches!(it.arg, Argument::Complex(_));
        lower::ensure(!node.inputs.iter().any(is_number), "takes a complex number")?;
        let is_zero = |argument: &Argument| match argument {
            Argument::Int(0) | Argument::None => true,
            Argument::Float(x) => *x == 0.0,
            _ => false,
        };
        let mut values = node.inputs.iter().filter(|it| it.name == "value");
        let fills_with_0 = values.all(|it| is_zero(&it.arg));
        lower::ensure(fills_with_0, "fills with another number than 0")?;
        let mut plans = vec![];
        for part in [Part::Real, Part::Imaginary] {
            let env = self.part(node, part)?;
            let mut arguments = NodeArguments::new(node, &env, &mut self.symbols);
            let call = Call::new(&self.graph, &self.generator, &mut arguments, types);
            let plan = ops::lower(&node.target, call)?;
            lower::ensure(plan.written.is_empty(), "writes into its operand")?;
            let suffix = match part {
                Part::Real => "",
                Part::Imaginary => ".imag",
            };
            let named = |name: &Option<&str>| name.map(|name| format!("{name}{suffix}"));
            plans.push(Planned {
                plan,
                names: names.iter().map(named).collect(),
                types: types.to_vec(),
            });
        }
        Ok(plans)
    }

    /// The values of a call's operands: one part of the complex ones, and the indices and masks.
    fn part(&self, node: &'a schema::Node, part: Part) -> lower::Result<BTreeMap<&'a str, Value>> {
        let mut env = BTreeMap::new();
        for argument in &node.inputs {
            // Real numbers have no imaginary part that could be moved.
            let is_index = matches!(argument.name.as_str(), "index" | "indices" | "other");
            for name in tensor_names(std::slice::from_ref(argument)) {
                let undefined = || lower::Error::Op(format!("{name} is not defined"));
                let real = self.names.values().get(name).copied();
                let real = real.ok_or_else(undefined)?;
                let imaginary = self.imaginary.get(name).copied();
                let is_known =
                    is_index || imaginary.is_some() || ops::complex::is_fill(&node.target);
                lower::ensure(is_known, "some operands are real")?;
                let value = match part {
                    Part::Imaginary => imaginary.unwrap_or(real),
                    Part::Real => real,
                };
                env.insert(name, value);
            }
        }
        Ok(env)
    }

    /// The results of an operator's own formula.
    fn by_formula(
        &mut self,
        node: &'a schema::Node,
        names: &[Option<&'a str>],
        types: &[Option<TensorType>],
        formula: Formula,
    ) -> lower::Result<Vec<Planned>> {
        let &[Some(name)] = names else {
            return Err("has several results".into());
        };
        let (mut flat_names, mut flat_types) = (vec![Some(name.to_string())], types.to_vec());
        if self.is_complex(name) {
            flat_names.push(Some(format!("{name}.imag")));
            flat_types.push(types[0].clone());
        }
        let imaginary = |argument: &str| {
            let named = node.inputs.iter().find(|it| it.name == argument);
            let part = |name: &str| {
                let value = self.imaginary.get(name).copied();
                value.map(|value| Operand::Tensor(Ref::Value(value)))
            };
            match named.map(|it| &it.arg) {
                Some(Argument::Tensor(name)) => vec![part(name)],
                Some(Argument::Complex(x)) => vec![Some(Operand::Scalar(Scalar::Float(x.imag)))],
                Some(Argument::Tensors(list)) => list
                    .iter()
                    .map(|item| match item {
                        Item::Name(name) => part(name),
                        _ => None,
                    })
                    .collect(),
                _ => vec![],
            }
        };
        let env = self.names.values();
        let mut arguments = NodeArguments::new(node, env, &mut self.symbols);
        let mut parts = Parts {
            call: Call::new(&self.graph, &self.generator, &mut arguments, &flat_types),
            imaginary: &imaginary,
        };
        let results = formula(&mut parts)?;
        let plan = parts.call.finish(results)?;
        Ok(vec![Planned {
            plan,
            names: flat_names,
            types: flat_types,
        }])
    }

    /// An `extern` node for a call that cannot be expressed. Its complex operands and results are
    /// one tensor each.
    fn complex_extern(
        &mut self,
        node: &'a schema::Node,
        label: &str,
        names: &[Option<&'a str>],
        place: &Place,
    ) -> Result<Vec<Vec<Option<Value>>>, Error> {
        let mut operands = vec![];
        for name in tensor_names(&node.inputs) {
            let value = self.value(name)?;
            operands.push(self.whole(name, value)?);
        }
        let (mut flat, mut types) = (vec![], vec![]);
        for name in names {
            let whole = |name: &&str| match self.is_complex(name) {
                true => format!("{name}.whole"),
                false => name.to_string(),
            };
            flat.push(name.as_ref().map(whole));
            types.push(name.map(|name| self.stored(name)).transpose()?);
        }
        let outside = Outside {
            target: &node.target,
            node: label,
            is_pure: place.is_pure,
        };
        let plan = Plan::external(outside, &operands, &types).map_err(failed)?;
        let flat: Vec<Option<&str>> = flat.iter().map(Option::as_deref).collect();
        let added = self.complex_added(&plan, &flat, &types, place)?;
        let mut results = vec![];
        for (name, value) in names.iter().zip(added.results) {
            results.push(match (name, value) {
                (Some(name), Some(value)) if self.is_complex(name) => {
                    self.parts(name, value, name, place)?
                }
                (_, value) => vec![value],
            });
        }
        Ok(results)
    }
}
