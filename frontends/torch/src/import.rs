//! From the file's JSON to an [`ir::Graph`]: names become values, traced calls become nodes, the
//! signature becomes inputs, states, outputs and gradients.
//!
//! Before: a file whose schema version is understood. After: every result has its type in the file;
//! a call that the op table cannot express is an `extern` node and is listed in
//! [`Model::unsupported`]; names are unique.

mod complex;

use crate::archive::{Archive, json};
use crate::arguments::NodeArguments;
use crate::attribution::{self, Place, Roots, Source, Tag, Traced};
use crate::names::{Names, View};
use crate::ops;
use crate::regions;
use crate::schema::{self, Argument, ExportedProgram, InputSpec, Item, OutputSpec, TensorMeta};
use crate::symbols::Symbols;
use crate::{Error, Model, Tensor, Unsupported};
use ir::graph::Output;
use ir::op::attrs::Cast;
use ir::{DType, Graph, Id, Op, Phase, State, StateKind, TensorType, Value};
use lower::{Call, Generator, Outside, Plan, Ref};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Seek};

/// The symbolic sizes of a model in an archive of `bytes` bytes.
pub(crate) fn symbols<R: Read + Seek>(reader: R, bytes: u64) -> Result<Vec<String>, Error> {
    let mut program = Archive::open(reader, bytes)?.model()?;
    regions::inline(&mut program.graph_module.graph);
    Ok(Symbols::names(&program))
}

/// Reads a model from an archive of `bytes` bytes.
pub(crate) fn model<R: Read + Seek>(
    reader: R,
    bytes: u64,
    name: &str,
    dims: &BTreeMap<String, u64>,
) -> Result<Model, Error> {
    let mut archive = Archive::open(reader, bytes)?;
    let mut program = archive.model()?;
    regions::inline(&mut program.graph_module.graph);
    let symbols = Symbols::new(&program, dims)?;
    let (graph, unsupported) = Import::new(&program, symbols, name, archive.shared())?.run()?;
    let mut tensors = BTreeMap::new();
    for state in graph
        .states
        .values()
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

/// Our exporter's addition, for files without weights: the weights that share their storage.
const JOINT_STEP: &str = "extra/joint_step.json";

const VIEWED: &str = "writes into a tensor that shares memory with others in a way that is not \
                      known; export with .run_decompositions({}), which makes new tensors of such \
                      writes";

/// Tensors of torch have at most 64 dimensions.
const MAX_RANK: usize = 64;

/// A graph under construction.
struct Import<'a> {
    program: &'a ExportedProgram,
    symbols: Symbols<'a>,
    graph: Graph,
    names: Names<'a>,
    /// The imaginary parts of complex tensors, by name; `names` has the real parts.
    imaginary: BTreeMap<&'a str, Value>,
    generator: Generator,
    unsupported: Vec<Unsupported>,
    /// Paths that name one parameter. The first of them in the file becomes a state.
    tied: Vec<Vec<String>>,
    /// The tensors that are operands or leave the graph.
    used: BTreeSet<&'a str>,
    /// The file computes no gradient.
    is_forward: bool,
}

impl<'a> Import<'a> {
    fn new(
        program: &'a ExportedProgram,
        symbols: Symbols<'a>,
        name: &str,
        tied: Vec<Vec<String>>,
    ) -> Result<Import<'a>, Error> {
        let taken = &program.graph_module.graph.tensor_values;
        // The file's names are identifiers, so a name with a dot is free.
        let rng = if taken.contains_key("rng") {
            "rng.state"
        } else {
            "rng"
        };
        Ok(Import {
            program,
            symbols,
            graph: Graph::new(name),
            names: Names::default(),
            imaginary: BTreeMap::new(),
            generator: Generator::new(rng),
            unsupported: vec![],
            tied,
            used: used(program),
            is_forward: !program
                .graph_module
                .signature
                .output_specs
                .iter()
                .any(is_gradient),
        })
    }

    fn run(mut self) -> Result<(Graph, Vec<Unsupported>), Error> {
        self.inputs()?;
        let places = self.places();
        let program = self.program;
        for (node, place) in program.graph_module.graph.nodes.iter().zip(&places) {
            self.node(node, place)?;
        }
        self.generator.advance(&mut self.graph)?;
        self.outputs()?;
        Ok((self.graph, self.unsupported))
    }

    /// A tensor's type in the file: that of its parts if it is complex.
    fn declared(&mut self, name: &str) -> Result<TensorType, Error> {
        let meta = self.program.graph_module.graph.tensor_values.get(name);
        let meta =
            meta.ok_or_else(|| Error::new(name, "the file describes no tensor of this name"))?;
        tensor_type(meta, &mut self.symbols).map_err(|e| Error::new(name, e))
    }

    /// Gives a name of the file its value.
    fn bind(&mut self, name: &'a str, value: Value) -> Result<(), Error> {
        match self.names.bind(name, value) {
            true => Ok(()),
            false => Err(Error::new(name, "the name is defined twice")),
        }
    }

    /// The tensor that leaves the graph under a name.
    fn lookup(&mut self, name: &'a str) -> Result<Value, Error> {
        let place = Place {
            phase: Phase::Forward,
            module: String::new(),
            is_pure: true,
        };
        self.refresh(name, &place)?;
        let value = self.value(name)?;
        self.whole(name, value)
    }

    /// The value that a name has now: the real part of a complex one.
    fn value(&self, name: &str) -> Result<Value, Error> {
        self.names
            .values()
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
                    let ty = self.stored(name)?;
                    let value = self.graph.add_input(name, ty);
                    self.bind_stored(name, value)?;
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
                // Numbers among the inputs are fixed when the model is traced, and sizes are given
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
            let ty = self.stored(&arg.name)?;
            if let Some(value) = self.tied_to(path, &ty) {
                self.bind_stored(&arg.name, value)?;
                continue;
            }
            let kind = match kind {
                StateKind::Param if self.is_frozen(&arg.name) => StateKind::Buffer,
                kind => kind,
            };
            let value = self.graph.add_state(&arg.name, path, kind, ty);
            self.bind_stored(&arg.name, value)?;
        }
        Ok(())
    }

    /// The parameter that this path names too, if a state has it already.
    fn tied_to(&self, path: &str, ty: &TensorType) -> Option<Value> {
        let group = self
            .tied
            .iter()
            .find(|group| group.iter().any(|p| p == path))?;
        let mut states = self.graph.states.values();
        let other = states.find(|state| group.contains(&state.path))?;
        (self.graph.values[other.before].ty == *ty).then_some(other.before)
    }

    /// True for a parameter of a forward that is not to be trained. A file with gradients says by
    /// them what is trained.
    fn is_frozen(&self, name: &str) -> bool {
        let meta = self.program.graph_module.graph.tensor_values.get(name);
        self.is_forward && meta.is_some_and(|meta| meta.requires_grad == Some(false))
    }

    /// Phase and module of each node.
    fn places(&self) -> Vec<Place> {
        let graph = &self.program.graph_module.graph;
        let Given {
            mut sources,
            modules,
            parameters,
        } = self.given();
        let mut nodes = vec![];
        for (n, node) in graph.nodes.iter().enumerate() {
            let read = |name: &str| sources.get(name).copied().unwrap_or(Source::Input);
            let reads = tensor_names(&node.inputs).map(read).collect();
            let mut tag = Tag::parse(node.metadata.custom.as_deref());
            if self.is_forward {
                tag = tag.within(node.metadata.nn_module_stack.as_deref());
            }
            nodes.push(Traced {
                reads,
                tag,
                is_shape: ops::is_shape(&node.target),
            });
            for name in output_names(node).flatten() {
                sources.insert(name, Source::Node(n));
            }
        }
        let roots = self.roots(&sources, &parameters);
        attribution::attribute(&nodes, &roots, &modules)
    }

    /// The graph's inputs: sources by name, the module of each input, and parameters by path.
    fn given(&self) -> Given<'a> {
        let mut given = Given::default();
        let specs = &self.program.graph_module.signature.input_specs;
        for (i, spec) in specs.iter().enumerate() {
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
                    given.modules.push("");
                    continue;
                }
            };
            given.sources.insert(name.as_str(), source);
            given.parameters.insert(path, i);
            given.modules.push(attribution::module_of(path));
        }
        given
    }

    /// The ends of the forward and of the gradients.
    fn roots(&self, sources: &BTreeMap<&str, Source>, parameters: &BTreeMap<&str, usize>) -> Roots {
        let find = |name: &str| sources.get(name).copied().unwrap_or(Source::Input);
        let mut roots = Roots {
            forward: vec![],
            gradients: vec![],
        };
        for spec in &self.program.graph_module.signature.output_specs {
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
                    if let Some(&spec) = parameters.get(parameter_name.as_str()) {
                        roots.gradients.push((find(&arg.name), spec));
                    }
                }
                _ => (),
            }
        }
        roots
    }

    /// One traced call: its results become new nodes or other names of existing values.
    fn node(&mut self, node: &'a schema::Node, place: &Place) -> Result<(), Error> {
        let label = node
            .name
            .as_deref()
            .or_else(|| output_names(node).flatten().next())
            .unwrap_or(&node.target);
        let at = format!("node {label} ({})", node.target);
        if node.outputs.iter().any(|o| matches!(o, Argument::Other)) {
            let message = "gives back something that is neither a tensor nor a size";
            return Err(Error::new(at, message));
        }
        let names: Vec<Option<&'a str>> = output_names(node).collect();
        if names.iter().all(Option::is_none) {
            if !is_needless(node) {
                self.unsupported(node, label, "has no result".into());
            }
            return Ok(());
        }
        self.call(node, label, &names, place)
            .map_err(|e| e.within(&at))
    }

    /// A call with results.
    fn call(
        &mut self,
        node: &'a schema::Node,
        label: &str,
        names: &[Option<&'a str>],
        place: &Place,
    ) -> Result<(), Error> {
        let mut types = vec![];
        for name in names {
            types.push(match name {
                Some(name) => {
                    check_name(name)?;
                    Some(self.declared(name)?)
                }
                None => None,
            });
        }
        let mut operands = vec![];
        for name in tensor_names(&node.inputs) {
            self.refresh(name, place)?;
            operands.push(self.value(name)?);
        }
        if self.has_complex(node) {
            return self.complex_call(node, label, names, &types, place);
        }

        let whole_call = |e: lower::Error| Error::new("", e.to_string());
        let plan = match self.plan(node, &types) {
            Ok(plan) => plan,
            Err(why) => {
                self.unsupported(node, label, why.to_string());
                let outside = Outside {
                    target: &node.target,
                    node: label,
                    is_pure: place.is_pure,
                };
                Plan::external(outside, &operands, &types).map_err(whole_call)?
            }
        };
        // torch names all results of an operator, also gradients that are not asked for.
        let is_there = |i, name: &&str| plan.computes(i) || self.used.contains(name);
        let each = names.iter().enumerate();
        let names: Vec<_> = each
            .map(|(i, name)| name.filter(|name| is_there(i, name)))
            .collect();
        if names.iter().all(Option::is_none) {
            return Ok(());
        }
        let names = &names[..];
        let added = plan
            .add_to(
                &mut self.graph,
                &mut self.generator,
                names,
                &types,
                (place.phase, &place.module),
            )
            .map_err(whole_call)?;
        for (name, value) in names.iter().zip(added.results) {
            if let (Some(name), Some(value)) = (name, value) {
                let value = match self.is_forward && ops::is_detached(&node.target) {
                    true => self.detached(value, name, place)?,
                    false => value,
                };
                self.bind(name, value)?;
            }
        }
        for (argument, mut value) in added.written {
            if let Some(tensor) = tensor_of(node, argument) {
                if self.is_forward && node.is_detached {
                    let name = format!("{tensor}.{}.detached", self.graph.values.len());
                    value = self.detached(value, &name, place)?;
                }
                // A call that writes into `self` returns it.
                let result = names.first().copied().flatten();
                let result = result.filter(|_| argument == "self");
                self.write(tensor, value, result, place)?;
            }
        }
        self.share(node, names)
    }

    /// Records that results of a call share memory with its operand.
    fn share(&mut self, node: &'a schema::Node, names: &[Option<&'a str>]) -> Result<(), Error> {
        if ops::is_grid(&node.target) {
            let operands = tensor_names(&node.inputs);
            self.names
                .blur(operands.chain(names.iter().copied().flatten()));
        }
        let of = match ops::is_view(&node.target) {
            true => tensor_of(node, "self"),
            false => self.passed(node, names),
        };
        let Some(of) = of else { return Ok(()) };
        for (result, &name) in names.iter().enumerate() {
            let Some(name) = name else { continue };
            match self.sharing(&node.target, of, name)? {
                Sharing::View => self.names.share(name, View { of, node, result }),
                Sharing::Unknown => self.names.blur([of, name]),
                Sharing::Copy => (),
            }
        }
        Ok(())
    }

    /// The operand of a dropout that drops nothing: its result is its operand.
    fn passed(&self, node: &'a schema::Node, names: &[Option<&'a str>]) -> Option<&'a str> {
        let of = tensor_of(node, "input").filter(|_| ops::is_dropout(&node.target))?;
        let value = |name: &str| self.names.values().get(name).copied();
        let result = names.first().copied().flatten()?;
        (value(of)? == value(result)?).then_some(of)
    }

    /// How the result of an operator for views shares its operand's memory.
    fn sharing(&mut self, target: &str, of: &str, result: &str) -> Result<Sharing, Error> {
        let kind = ops::copies_if(target);
        if kind == ops::Copies::OtherType {
            let same = self.declared(of)?.dtype() == self.declared(result)?.dtype();
            return Ok(if same { Sharing::View } else { Sharing::Copy });
        }
        if kind == ops::Copies::Never || self.is_contiguous(of)? {
            return Ok(Sharing::View);
        }
        Ok(match kind {
            ops::Copies::Scattered => Sharing::Copy,
            _ => Sharing::Unknown,
        })
    }

    /// True if a tensor lies in memory in the order of its elements.
    fn is_contiguous(&mut self, name: &str) -> Result<bool, Error> {
        let meta = self.program.graph_module.graph.tensor_values.get(name);
        let meta =
            meta.ok_or_else(|| Error::new(name, "the file describes no tensor of this name"))?;
        let mut expected = 1i64;
        for (size, stride) in meta.sizes.iter().zip(&meta.strides).rev() {
            let size = self.symbols.size(size).map_err(|e| Error::new(name, e))?;
            let stride = self.symbols.size(stride).map_err(|e| Error::new(name, e))?;
            if size != 1 && stride != expected {
                return Ok(false);
            }
            expected = expected.saturating_mul(size);
        }
        Ok(true)
    }

    /// A call wrote into a tensor. The tensors of which it is a part get new values too.
    fn write(
        &mut self,
        tensor: &'a str,
        value: Value,
        result: Option<&'a str>,
        place: &Place,
    ) -> Result<(), Error> {
        let n_writes = self.names.write(tensor, value, result);
        let (mut part, mut value) = (tensor, value);
        while let Some(view) = self.names.view(part) {
            let ty = self.graph.values[self.value(view.of)?].ty.clone();
            let types = [Some(ty)];
            let plan = {
                let env = self.names.values();
                let mut arguments = NodeArguments::new(view.node, env, &mut self.symbols);
                let call = Call::new(&self.graph, &self.generator, &mut arguments, &types);
                ops::put_back(&view.node.target, call, Ref::Value(value))
            };
            let name = format!("{}.written{n_writes}", view.of);
            value = self.added(plan, &[Some(name.as_str())], &types, place)?[0];
            self.names.renew(view.of, value);
            part = view.of;
        }
        Ok(())
    }

    /// Repeats the calls that made a view and the tensors of which it is a part, if one of them was
    /// written since.
    fn refresh(&mut self, name: &'a str, place: &Place) -> Result<(), Error> {
        let mut stale = vec![];
        let mut next = name;
        while let (true, Some(view)) = (self.names.is_stale(next), self.names.view(next)) {
            stale.push((next, view));
            next = view.of;
        }
        for (name, view) in stale.into_iter().rev() {
            let ty = self.graph.values[self.value(name)?].ty.clone();
            let mut types: Vec<Option<TensorType>> =
                output_names(view.node).map(|_| None).collect();
            types[view.result] = Some(ty);
            let again = format!("{name}.{}", self.graph.values.len());
            let mut names = vec![None; types.len()];
            names[view.result] = Some(again.as_str());
            let plan = self.plan(view.node, &types);
            let mut value = self.added(plan, &names, &types, place)?[view.result];
            if self.is_forward && ops::is_detached(&view.node.target) {
                value = self.detached(value, &format!("{again}.detached"), place)?;
            }
            self.names.renew(name, value);
        }
        Ok(())
    }

    /// Adds nodes that no call of the file stands for; a result that nothing uses counts as the
    /// first value.
    fn added(
        &mut self,
        plan: lower::Result<Plan>,
        names: &[Option<&str>],
        types: &[Option<TensorType>],
        place: &Place,
    ) -> Result<Vec<Value>, Error> {
        let failed = |e: lower::Error| Error::new("a view after a write", e.to_string());
        let added = plan.map_err(failed)?.add_to(
            &mut self.graph,
            &mut self.generator,
            names,
            types,
            (place.phase, &place.module),
        );
        let results = added.map_err(failed)?.results;
        let none = Value::new(0);
        Ok(results
            .into_iter()
            .map(|value| value.unwrap_or(none))
            .collect())
    }

    /// The same value without its gradient.
    fn detached(&mut self, value: Value, name: &str, place: &Place) -> Result<Value, Error> {
        if !self.graph.values[value].ty.dtype().is_float() {
            return Ok(value);
        }
        let (phase, module) = (place.phase, place.module.clone());
        let made = self
            .graph
            .add_node(Op::Detach, &[value], &[name.to_string()], phase, module);
        let made = made.map_err(|e| Error::new("", e.to_string()))?;
        Ok(made[0])
    }

    /// Refuses a call that writes into a tensor if other tensors would change in a way that is not
    /// known.
    fn check_written(&self, node: &'a schema::Node, plan: &Plan) -> lower::Result<()> {
        for (argument, _) in &plan.written {
            let Some(tensor) = tensor_of(node, argument) else {
                continue;
            };
            let views = self.names.writable(tensor).ok_or(VIEWED)?;
            lower::ensure(
                views
                    .iter()
                    .all(|view| ops::is_invertible(&view.node.target)),
                VIEWED,
            )?;
        }
        Ok(())
    }

    /// Records a call that cannot be expressed.
    fn unsupported(&mut self, node: &schema::Node, label: &str, why: String) {
        self.unsupported.push(Unsupported {
            target: node.target.clone(),
            node: label.to_string(),
            why,
        });
    }

    /// The nodes for a call.
    fn plan(
        &mut self,
        node: &'a schema::Node,
        types: &[Option<TensorType>],
    ) -> lower::Result<Plan> {
        let mut arguments = NodeArguments::new(node, self.names.values(), &mut self.symbols);
        let call = Call::new(&self.graph, &self.generator, &mut arguments, types);
        let plan = ops::lower(&node.target, call)?;
        self.check_written(node, &plan)?;
        Ok(plan)
    }

    /// Outputs, gradients and the states' new values; the file lists them in any order.
    fn outputs(&mut self) -> Result<(), Error> {
        let program = self.program;
        let paths: BTreeMap<String, State> = self
            .graph
            .states
            .iter()
            .map(|(state, data)| (data.path.clone(), state))
            .collect();
        let mut outputs: Vec<(String, Value)> = vec![];
        let mut afters: Vec<(State, Value)> = vec![];
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
                    let state = state_of(&paths, parameter_name)?;
                    let gradient = self.lookup(&arg.name)?;
                    self.gradient(state, gradient)?;
                }
                OutputSpec::BufferMutation {
                    arg,
                    buffer_name: path,
                }
                | OutputSpec::ParameterMutation {
                    arg,
                    parameter_name: path,
                } => {
                    let (state, after) = (state_of(&paths, path)?, self.lookup(&arg.name)?);
                    self.expect_type(after, state, "new value")?;
                    afters.push((state, after));
                }
            }
        }
        let given: BTreeSet<State> = afters.iter().map(|&(state, _)| state).collect();
        for (state, data) in self.graph.states.iter() {
            let name = self.graph.values[data.before].name.as_str();
            let written = self
                .names
                .values()
                .get(name)
                .filter(|&&after| after != data.before)
                // No call writes into a part of a complex tensor.
                .filter(|_| !self.imaginary.contains_key(name));
            if let (Some(&after), false) = (written, given.contains(&state)) {
                afters.push((state, after));
            }
        }
        self.name_outputs(outputs)?;
        self.leave_states(afters)
    }

    fn gradient(&mut self, state: State, gradient: Value) -> Result<(), Error> {
        self.expect_type(gradient, state, "gradient")?;
        if self
            .graph
            .gradients
            .iter()
            .any(|&(other, _)| other == state)
        {
            let path = &self.graph.states[state].path;
            return Err(Error::new(path, "has two gradients"));
        }
        self.graph.gradients.push((state, gradient));
        Ok(())
    }

    /// Gives the outputs unique names. A value that the file lists twice is one output.
    fn name_outputs(&mut self, outputs: Vec<(String, Value)>) -> Result<(), Error> {
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
        Ok(())
    }

    /// Sets the states' values after the step.
    fn leave_states(&mut self, afters: Vec<(State, Value)>) -> Result<(), Error> {
        let mut left = BTreeSet::new();
        for (state, after) in afters {
            let before = self.graph.states[state].before;
            let root = self.graph.root(after);
            // A view of the old value with the old shape is the old value.
            self.graph.states[state].after = if root == before {
                before
            } else if self.graph.def_node(root).is_none() || !left.insert(root) {
                // Two states cannot end in the same bytes. A state also cannot end in the bytes in
                // which another state, or an input, began.
                self.copy(after, state)?
            } else {
                after
            };
        }
        Ok(())
    }

    /// A copy of a value, to leave in a state.
    fn copy(&mut self, value: Value, state: State) -> Result<Value, Error> {
        let data = &self.graph.values[value];
        let dtype = data.ty.dtype();
        let name = format!("{}.after{}", data.name, state.index());
        let phase = self
            .graph
            .def_node(value)
            .map_or(Phase::Forward, |node| self.graph.nodes[node].phase);
        let module = attribution::module_of(&self.graph.states[state].path).to_string();
        let made = self
            .graph
            .add_node(Op::Cast(Cast { dtype }), &[value], &[name], phase, module);
        Ok(made.map_err(|e| Error::new(&self.graph.states[state].path, e.to_string()))?[0])
    }

    fn expect_type(&self, value: Value, state: State, what: &str) -> Result<(), Error> {
        let data = &self.graph.states[state];
        let (found, expected) = (
            &self.graph.values[value].ty,
            &self.graph.values[data.before].ty,
        );
        if found == expected {
            return Ok(());
        }
        Err(Error::new(
            &data.path,
            format!("is {expected}, but its {what} is {found}"),
        ))
    }
}

/// Whether a result shares its operand's memory.
enum Sharing {
    View,
    Copy,
    Unknown,
}

/// A graph's inputs, in terms of attribution.
#[derive(Default)]
struct Given<'a> {
    sources: BTreeMap<&'a str, Source>,
    /// The module that each input belongs to.
    modules: Vec<&'a str>,
    /// Positions of inputs by the paths of their states.
    parameters: BTreeMap<&'a str, usize>,
}

/// The name of the tensor that is an argument of a call.
fn tensor_of<'n>(node: &'n schema::Node, argument: &str) -> Option<&'n str> {
    let named = node.inputs.iter().find(|arg| arg.name == argument)?;
    match &named.arg {
        Argument::Tensor(name) => Some(name),
        _ => None,
    }
}

fn is_gradient(spec: &OutputSpec) -> bool {
    matches!(
        spec,
        OutputSpec::GradientToParameter { .. } | OutputSpec::GradientToUserInput { .. }
    )
}

/// The state of a path.
fn state_of(paths: &BTreeMap<String, State>, path: &str) -> Result<State, Error> {
    let message = "the graph gives back something for a path that it does not take";
    let state = paths.get(path).copied();
    state.ok_or_else(|| Error::new(path, message))
}

/// True for a call without results that can be left out: sizes are given by their expressions, and
/// assertions about them were true when the model was traced.
fn is_needless(node: &schema::Node) -> bool {
    let is_size = |output: &Argument| matches!(output, Argument::SymInt(_) | Argument::Int(_));
    node.outputs.iter().any(is_size) || ops::is_assertion(&node.target)
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

/// The names of tensors that are operands of a node, or outputs.
fn used(program: &ExportedProgram) -> BTreeSet<&str> {
    let graph = &program.graph_module.graph;
    let operands = graph
        .nodes
        .iter()
        .flat_map(|node| tensor_names(&node.inputs));
    operands.chain(names_of(&graph.outputs).flatten()).collect()
}

/// The names of a node's results in order; none for a result that is absent or not a tensor. A list
/// of tensors counts as its elements.
fn output_names(node: &schema::Node) -> impl Iterator<Item = Option<&str>> {
    names_of(&node.outputs)
}
fn names_of(outputs: &[Argument]) -> impl Iterator<Item = Option<&str>> {
    outputs.iter().flat_map(|output| {
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
    let dtype: Option<DType> = schema::dtype(meta.dtype).or(schema::part(meta.dtype));
    let dtype =
        dtype.ok_or_else(|| format!("element type {} has no counterpart here", meta.dtype))?;
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
    Ok(TensorType::new(dtype, shape)?)
}
