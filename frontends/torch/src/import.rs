//! From the file's JSON to an [`ir::Graph`]: names become values, traced calls become nodes, the
//! signature becomes inputs, states, outputs and gradients.
//!
//! Before: a file whose schema version is understood. After: every result has the type that the
//! file gives it; a call that the op table cannot express is an `extern` node and is listed in
//! [`Model::unsupported`]; names are unique.

use crate::archive::{Archive, json};
use crate::attribution::{self, Place, Roots, Source, Tag, Traced};
use crate::call::{self, Call, Plan, Ref};
use crate::error::Error;
use crate::ops;
use crate::schema::{self, Argument, ExportedProgram, InputSpec, Item, OutputSpec, TensorMeta};
use crate::symbols::Symbols;
use crate::{Model, Tensor, Unsupported};
use ir::graph::Output;
use ir::{Attr, DType, Graph, Op, Phase, StateKind, TensorType, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Seek};

/// Reads a model from an archive of `bytes` bytes.
pub(crate) fn model<R: Read + Seek>(
    reader: R,
    bytes: u64,
    name: &str,
    dims: &BTreeMap<String, u64>,
) -> Result<Model, Error> {
    let mut archive = Archive::open(reader, bytes)?;
    let program = archive.model()?;
    let symbols = Symbols::new(&program, dims)?;
    let (graph, unsupported) = Import::new(&program, symbols, name)?.run()?;
    let mut tensors = BTreeMap::new();
    for state in graph
        .states
        .iter()
        .filter(|state| state.kind != StateKind::Rng)
    {
        let ty = &graph.values[state.before].ty;
        if let Some(data) = archive.tensor(&state.path, ty)? {
            tensors.insert(
                state.path.clone(),
                Tensor {
                    ty: ty.clone(),
                    data,
                },
            );
        }
    }
    let mut tied = archive.shared();
    if let Some(text) = archive.entry(JOINT_STEP)? {
        let step: schema::JointStep = json(&text, JOINT_STEP)?;
        for mut group in step.tied {
            group.sort();
            if !tied.contains(&group) {
                tied.push(group);
            }
        }
    }
    tied.sort();
    Ok(Model {
        graph,
        tensors,
        unsupported,
        tied,
    })
}

/// What our exporter adds: weights that share their storage, for files without weights.
const JOINT_STEP: &str = "extra/joint_step.json";

/// torch's own tensors have no more than 64 dimensions.
const MAX_RANK: usize = 64;

/// A graph under construction.
struct Import<'a> {
    program: &'a ExportedProgram,
    symbols: Symbols<'a>,
    graph: Graph,
    /// The values of the file's names.
    env: BTreeMap<&'a str, Value>,
    /// The random-number generator's state, once a node has needed it.
    rng: Option<Value>,
    /// The number of random nodes so far.
    streams: i64,
    unsupported: Vec<Unsupported>,
}

impl<'a> Import<'a> {
    fn new(
        program: &'a ExportedProgram,
        symbols: Symbols<'a>,
        name: &str,
    ) -> Result<Import<'a>, Error> {
        let graph = Graph::new(name);
        Ok(Import {
            program,
            symbols,
            graph,
            env: BTreeMap::new(),
            rng: None,
            streams: 0,
            unsupported: vec![],
        })
    }

    fn run(mut self) -> Result<(Graph, Vec<Unsupported>), Error> {
        self.inputs()?;
        let places = self.places()?;
        let program = self.program;
        for (node, place) in program.graph_module.graph.nodes.iter().zip(&places) {
            self.node(node, place)?;
        }
        self.advance_rng()?;
        self.outputs()?;
        Ok((self.graph, self.unsupported))
    }

    /// The type that the file gives a tensor.
    fn declared(&mut self, name: &str) -> Result<TensorType, Error> {
        let meta = self.program.graph_module.graph.tensor_values.get(name);
        let meta =
            meta.ok_or_else(|| Error::new(name, "the file describes no tensor of this name"))?;
        tensor_type(meta, &mut self.symbols).map_err(|e| Error::new(name, e))
    }

    /// Gives a name of the file its value.
    fn bind(&mut self, name: &'a str, value: Value) -> Result<(), Error> {
        match self.env.insert(name, value) {
            None => Ok(()),
            Some(_) => Err(Error::new(name, "the name is defined twice")),
        }
    }

    fn lookup(&self, name: &str) -> Result<Value, Error> {
        self.env
            .get(name)
            .copied()
            .ok_or_else(|| Error::new(name, "the tensor is used but never defined"))
    }

    /// Inputs and states, in the order of the file.
    fn inputs(&mut self) -> Result<(), Error> {
        let program = self.program;
        let mut paths = BTreeSet::new();
        for spec in &program.graph_module.signature.input_specs {
            let (arg, path, kind) = match spec {
                InputSpec::UserInput {
                    arg: Argument::Tensor(name),
                } => {
                    check_name(name)?;
                    let ty = self.declared(name)?;
                    let value = self.graph.add_input(name, ty);
                    self.bind(name, value)?;
                    continue;
                }
                InputSpec::Parameter {
                    arg,
                    parameter_name,
                } => (arg, parameter_name, StateKind::Param),
                InputSpec::Buffer { arg, buffer_name } => (arg, buffer_name, StateKind::Buffer),
                InputSpec::TensorConstant {
                    arg,
                    tensor_constant_name,
                } => (arg, tensor_constant_name, StateKind::Const),
                // Numbers among the inputs are fixed when the model is traced, and sizes are known
                // by their symbols.
                InputSpec::UserInput { .. } | InputSpec::CustomObj(_) | InputSpec::Token(_) => {
                    continue;
                }
                InputSpec::ConstantInput(_) => continue,
            };
            check_name(&arg.name)?;
            if !paths.insert(path) {
                return Err(Error::new(path, "two inputs of the graph have this path"));
            }
            let ty = self.declared(&arg.name)?;
            let value = self.graph.add_state(&arg.name, path, kind, ty);
            self.bind(&arg.name, value)?;
        }
        Ok(())
    }

    /// Phase and module of each node.
    fn places(&self) -> Result<Vec<Place>, Error> {
        let module = &self.program.graph_module;
        let mut sources = BTreeMap::new();
        let mut modules = vec![];
        let mut specs = BTreeMap::new();
        for (i, spec) in module.signature.input_specs.iter().enumerate() {
            let (name, path, source) = match spec {
                InputSpec::Parameter {
                    arg,
                    parameter_name,
                } => (&arg.name, parameter_name.as_str(), Source::Param(i)),
                InputSpec::Buffer { arg, buffer_name } => {
                    (&arg.name, buffer_name.as_str(), Source::State(i))
                }
                InputSpec::TensorConstant {
                    arg,
                    tensor_constant_name,
                } => (&arg.name, tensor_constant_name.as_str(), Source::State(i)),
                _ => {
                    modules.push("");
                    continue;
                }
            };
            sources.insert(name.as_str(), source);
            specs.insert(path, i);
            modules.push(attribution::module_of(path));
        }
        let mut nodes = vec![];
        for (n, node) in module.graph.nodes.iter().enumerate() {
            let read = |name: &str| sources.get(name).copied().unwrap_or(Source::Input);
            let reads = tensor_names(&node.inputs).map(read).collect();
            let tag = Tag::parse(node.metadata.custom.as_deref());
            nodes.push(Traced {
                reads,
                tag,
                is_shape: ops::is_shape(&node.target),
            });
            for name in output_names(node).flatten() {
                sources.insert(name, Source::Node(n));
            }
        }
        let find = |name: &str| sources.get(name).copied().unwrap_or(Source::Input);
        let mut roots = Roots {
            forward: vec![],
            gradients: vec![],
        };
        for spec in &module.signature.output_specs {
            match spec {
                OutputSpec::LossOutput { arg }
                | OutputSpec::BufferMutation { arg, .. }
                | OutputSpec::ParameterMutation { arg, .. }
                | OutputSpec::UserInputMutation { arg, .. } => roots.forward.push(find(&arg.name)),
                OutputSpec::UserOutput {
                    arg: Argument::Tensor(name),
                } => roots.forward.push(find(name)),
                OutputSpec::GradientToParameter {
                    arg,
                    parameter_name,
                } => {
                    if let Some(&spec) = specs.get(parameter_name.as_str()) {
                        roots.gradients.push((find(&arg.name), spec));
                    }
                }
                _ => (),
            }
        }
        Ok(attribution::attribute(&nodes, &roots, &modules))
    }

    /// One traced call: its results become values, by new nodes or as other names of values that
    /// exist.
    fn node(&mut self, node: &'a schema::Node, place: &Place) -> Result<(), Error> {
        let label = node
            .name
            .as_deref()
            .or_else(|| output_names(node).flatten().next())
            .unwrap_or(&node.target);
        let at = || format!("node {label} ({})", node.target);
        if node.outputs.iter().any(|o| matches!(o, Argument::Other)) {
            return Err(Error::new(
                at(),
                "gives back something that is neither a tensor nor a size",
            ));
        }
        let names: Vec<Option<&'a str>> = output_names(node).collect();
        if names.iter().all(Option::is_none) {
            // Sizes are known by their expressions, and assertions about them have been paid for by
            // the exporter.
            let is_size = node
                .outputs
                .iter()
                .any(|o| matches!(o, Argument::SymInt(_) | Argument::Int(_)));
            if !is_size && !ops::is_assertion(&node.target) {
                let why = "has no result".to_string();
                self.unsupported.push(Unsupported {
                    target: node.target.clone(),
                    node: label.to_string(),
                    why,
                });
            }
            return Ok(());
        }
        let mut types = vec![];
        for name in &names {
            types.push(match name {
                Some(name) => {
                    check_name(name)?;
                    Some(self.declared(name).map_err(|e| Error {
                        place: format!("{}: {}", at(), e.place),
                        ..e
                    })?)
                }
                None => None,
            });
        }
        let mut operands = vec![];
        for name in tensor_names(&node.inputs) {
            operands.push(self.lookup(name).map_err(|e| Error {
                place: format!("{}: {}", at(), e.place),
                ..e
            })?);
        }
        let call = Call::new(
            &self.graph,
            &self.env,
            &mut self.symbols,
            node,
            &types,
            self.streams,
        );
        let plan = match ops::lower(call) {
            Ok(plan) => plan,
            Err(why) => {
                self.unsupported.push(Unsupported {
                    target: node.target.clone(),
                    node: label.to_string(),
                    why,
                });
                let plan = ops::external(&node.target, &operands, &types);
                plan.map_err(|e| Error::new(at(), e))?
            }
        };
        self.streams = plan.streams.unwrap_or(self.streams);
        self.commit(&plan, &names, &types, place)
            .map_err(|e| Error::new(at(), e))
    }

    /// Adds a plan's steps to the graph and binds the names of its results.
    fn commit(
        &mut self,
        plan: &Plan,
        names: &[Option<&'a str>],
        types: &[Option<TensorType>],
        place: &Place,
    ) -> Result<(), String> {
        let base = names
            .iter()
            .flatten()
            .next()
            .expect("a call without results should not be planned");
        let mut own: BTreeMap<usize, &str> = BTreeMap::new();
        for (result, name) in plan.results.iter().zip(names) {
            if let (Some(Ref::New(i)), Some(name)) = (result, name) {
                own.entry(*i).or_insert(name);
            }
        }
        let mut made: Vec<Value> = vec![];
        let mut n_helpers = 0;
        for step in &plan.steps {
            let mut inputs = vec![];
            for &input in &step.inputs {
                inputs.push(match input {
                    Ref::Value(value) => value,
                    Ref::New(i) => made[i],
                    Ref::Rng => self.rng(),
                });
            }
            // The file's names are identifiers, so a name with a dot is new.
            let names: Vec<String> = (0..step.n_results)
                .map(|i| match own.get(&(made.len() + i)) {
                    Some(name) => name.to_string(),
                    None => {
                        n_helpers += 1;
                        format!("{base}.{}", n_helpers - 1)
                    }
                })
                .collect();
            made.extend(self.graph.add_node(
                step.op.clone(),
                &inputs,
                &names,
                place.phase,
                &*place.module,
            )?);
        }
        for ((name, ty), i) in names.iter().zip(types).zip(0..) {
            let (Some(name), Some(ty)) = (name, ty) else {
                continue;
            };
            let value = match plan.results.get(i) {
                Some(Some(Ref::Value(value))) => *value,
                Some(Some(Ref::New(i))) => made[*i],
                _ => return Err(format!("result {name} is not computed")),
            };
            let inferred = &self.graph.values[value].ty;
            if inferred != ty {
                return Err(format!(
                    "the file gives {name} the type {ty}, its operands give {inferred}"
                ));
            }
            self.bind(name, value)
                .map_err(|e| format!("{}: {}", e.place, e.message))?;
        }
        Ok(())
    }

    /// The generator's state, added when the first random node needs it.
    fn rng(&mut self) -> Value {
        if let Some(value) = self.rng {
            return value;
        }
        let is_taken = |name: &str| {
            self.program
                .graph_module
                .graph
                .tensor_values
                .contains_key(name)
        };
        let name = if is_taken("rng") { "rng.state" } else { "rng" };
        let ty = call::rng_type();
        let value = self.graph.add_state(name, "rng", StateKind::Rng, ty);
        self.rng = Some(value);
        value
    }

    fn advance_rng(&mut self) -> Result<(), Error> {
        let Some(rng) = self.rng else { return Ok(()) };
        let paths: Vec<&str> = self
            .graph
            .states
            .iter()
            .map(|s| s.path.as_str())
            .filter(|&p| p == "rng")
            .collect();
        if 1 < paths.len() {
            let error = Error::new(
                "rng",
                "is the path of a parameter or buffer, and of the random-number generator",
            );
            return Err(error.help("rename it in the model"));
        }
        let op = Op::new("rng_next", []).expect("the table should have rng_next");
        let name = format!("{}.next", self.graph.values[rng].name);
        let made = self
            .graph
            .add_node(op, &[rng], &[name], Phase::Optimizer, "");
        let after = made.map_err(|e| Error::new("rng", e))?[0];
        let state = self
            .graph
            .states
            .iter_mut()
            .find(|state| state.before == rng);
        state.expect("the generator should be a state").after = after;
        Ok(())
    }

    /// Outputs, gradients and what the states become; the file lists them in any order.
    fn outputs(&mut self) -> Result<(), Error> {
        let program = self.program;
        let paths: BTreeMap<String, usize> = self
            .graph
            .states
            .iter()
            .enumerate()
            .map(|(i, state)| (state.path.clone(), i))
            .collect();
        let state = |path: &str| {
            let index = paths.get(path).copied();
            index.ok_or_else(|| {
                Error::new(
                    path,
                    "the graph gives back something for a path that it does not take",
                )
            })
        };
        let mut graded = BTreeSet::new();
        let mut outputs: Vec<(String, Value)> = vec![];
        let mut afters: Vec<(usize, Value)> = vec![];
        for spec in &program.graph_module.signature.output_specs {
            match spec {
                OutputSpec::LossOutput { arg } => {
                    outputs.insert(0, ("loss".into(), self.lookup(&arg.name)?))
                }
                OutputSpec::UserOutput {
                    arg: Argument::Tensor(name),
                } => {
                    outputs.push((name.clone(), self.lookup(name)?));
                }
                OutputSpec::UserOutput { .. } | OutputSpec::Token(_) => (),
                OutputSpec::UserInputMutation {
                    arg,
                    user_input_name,
                } => {
                    outputs.push((user_input_name.clone(), self.lookup(&arg.name)?));
                }
                OutputSpec::GradientToUserInput {
                    arg,
                    user_input_name,
                } => {
                    outputs.push((format!("grad.{user_input_name}"), self.lookup(&arg.name)?));
                }
                OutputSpec::GradientToParameter {
                    arg,
                    parameter_name,
                } => {
                    let (index, gradient) = (state(parameter_name)?, self.lookup(&arg.name)?);
                    self.expect_type(gradient, index, "gradient")?;
                    if !graded.insert(index) {
                        return Err(Error::new(parameter_name, "has two gradients"));
                    }
                    self.graph.gradients.push((index, gradient));
                }
                OutputSpec::BufferMutation {
                    arg,
                    buffer_name: path,
                }
                | OutputSpec::ParameterMutation {
                    arg,
                    parameter_name: path,
                } => {
                    let (index, after) = (state(path)?, self.lookup(&arg.name)?);
                    self.expect_type(after, index, "new value")?;
                    afters.push((index, after));
                }
            }
        }
        let mut names: BTreeMap<String, Value> = BTreeMap::new();
        for (i, (name, value)) in outputs.into_iter().enumerate() {
            let is_taken = names.get(&name).is_some_and(|&other| other != value);
            let name = if is_taken {
                format!("{name}.{i}")
            } else {
                name
            };
            match names.insert(name.clone(), value) {
                None => self.graph.outputs.push(Output { name, value }),
                Some(other) if other == value => (),
                Some(_) => return Err(Error::new(name, "two outputs have this name")),
            }
        }
        let mut left = BTreeSet::new();
        for (index, after) in afters {
            let before = self.graph.states[index].before;
            let root = self.graph.root(after);
            // A view of the old value with the old shape is the old value.
            self.graph.states[index].after = if root == before {
                before
            } else if self.graph.def_node(root).is_none() || !left.insert(root) {
                // Two states cannot end in the same bytes, nor one in those that another, or an
                // input, began with.
                self.copy(after, index)?
            } else {
                after
            };
        }
        Ok(())
    }

    /// A copy of a value, to leave in a state.
    fn copy(&mut self, value: Value, index: usize) -> Result<Value, Error> {
        let data = &self.graph.values[value];
        let op = Op::new("cast", [("dtype", Attr::Type(data.ty.dtype()))])
            .expect("the table should have cast");
        let name = format!("{}.after{index}", data.name);
        let phase = self
            .graph
            .def_node(value)
            .map_or(Phase::Forward, |node| self.graph.nodes[node].phase);
        let module = attribution::module_of(&self.graph.states[index].path).to_string();
        let made = self.graph.add_node(op, &[value], &[name], phase, module);
        Ok(made.map_err(|e| Error::new(&self.graph.states[index].path, e))?[0])
    }

    fn expect_type(&self, value: Value, index: usize, what: &str) -> Result<(), Error> {
        let state = &self.graph.states[index];
        let (found, expected) = (
            &self.graph.values[value].ty,
            &self.graph.values[state.before].ty,
        );
        if found == expected {
            return Ok(());
        }
        Err(Error::new(
            &state.path,
            format!("is {expected}, but its {what} is {found}"),
        ))
    }
}

/// The names of a node's tensor operands, in order.
fn tensor_names(args: &[schema::NamedArgument]) -> impl Iterator<Item = &str> {
    args.iter().flat_map(|arg| {
        let (one, many): (Option<&str>, &[Item]) = match &arg.arg {
            Argument::Tensor(name) => (Some(name), &[]),
            Argument::Tensors(items) => (None, items),
            _ => (None, &[]),
        };
        let many = many.iter().filter_map(|item| {
            if let Item::Name(name) = item {
                Some(name.as_str())
            } else {
                None
            }
        });
        one.into_iter().chain(many)
    })
}

/// The names of a node's results in order, none for those that are absent or no tensors. A list of
/// tensors counts as its elements.
fn output_names(node: &schema::Node) -> impl Iterator<Item = Option<&str>> {
    node.outputs.iter().flat_map(|output| {
        let (one, many): (Option<Option<&str>>, &[Item]) = match output {
            Argument::Tensor(name) => (Some(Some(name)), &[]),
            Argument::Tensors(items) => (None, items),
            _ => (Some(None), &[]),
        };
        let many = many.iter().map(|item| {
            if let Item::Name(name) = item {
                Some(name.as_str())
            } else {
                None
            }
        });
        one.into_iter().chain(many)
    })
}

/// Names of tensors are Python identifiers. The names of helper nodes have a dot, so they never
/// collide.
fn check_name(name: &str) -> Result<(), Error> {
    let mut chars = name.chars();
    let starts = chars.next().is_some_and(|c| c.is_alphabetic() || c == '_');
    if starts && chars.all(|c| c.is_alphanumeric() || c == '_') {
        return Ok(());
    }
    Err(Error::new(
        "",
        format!("the tensor name {name:?} is not an identifier"),
    ))
}

fn tensor_type<'a>(meta: &'a TensorMeta, symbols: &mut Symbols<'a>) -> Result<TensorType, String> {
    let dtype: DType = schema::dtype(meta.dtype).ok_or_else(|| {
        format!(
            "element type {} has no counterpart here (complex numbers, for one)",
            meta.dtype
        )
    })?;
    if meta.layout != schema::STRIDED {
        return Err(format!("layout {} is not strided", meta.layout));
    }
    if MAX_RANK < meta.sizes.len() {
        return Err(format!(
            "has {} dimensions; {MAX_RANK} are the most",
            meta.sizes.len()
        ));
    }
    let mut shape = vec![];
    for size in &meta.sizes {
        let size = symbols.size(size)?;
        shape.push(u64::try_from(size).map_err(|_| format!("has the negative size {size}"))?);
    }
    TensorType::new(dtype, shape)
}
