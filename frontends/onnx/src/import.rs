//! From a file's messages to a graph: names become tensors, nodes are folded, inlined or lowered.
//!
//! Before: messages that were decoded. After: a graph of phase `fwd` with the file's outputs; a
//! node that the op table cannot express is an `extern` node if the file states its results' types,
//! else an error.

use crate::attributes::{Attributes, Given};
use crate::builder::{Builder, Place, SMALL, Slot};
use crate::external::Files;
use crate::fold::{self, Folding};
use crate::ops;
use crate::proto::{FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto};
use crate::sequence::{self, Item};
use crate::tensor::{Elements, Numbers};
use crate::tight::Tight;
use crate::{BatchNorm, Error, Model, Options, Unsupported, control, dims, hints, trained};
use ir::graph::Output;
use ir::{DType, State, StateKind, TensorType};
use std::collections::{BTreeMap, BTreeSet};

/// The accepted versions of the operators.
const OPSETS: std::ops::RangeInclusive<i64> = 13..=28;

/// The most nodes of functions, branches and loops that are read. They count whenever a body is
/// read.
const NODES: u64 = 100_000;

/// The deepest nesting of functions, branches and loops.
const DEPTH: usize = 40;

/// Operators that are neither lowered nor folded: they give names, values or structure.
pub(crate) const STRUCTURAL: &[&str] = &[
    "Constant",
    "If",
    "Loop",
    "OptionalGetElement",
    "OptionalHasElement",
    "Scan",
];

/// Operators that are refused, with the reasons. An operator that is in no table is refused too.
pub(crate) const REFUSED: &[(&str, &str)] = &[
    ("Bernoulli", "its random numbers have no counterpart"),
    ("Compress", SHAPE_FROM_DATA),
    ("ConvInteger", QUANTISED),
    ("DeformConv", "there is no op for it"),
    ("ImageDecoder", "reads images, not tensors"),
    ("Multinomial", "its random numbers have no counterpart"),
    ("NonMaxSuppression", SHAPE_FROM_DATA),
    ("NonZero", SHAPE_FROM_DATA),
    ("QLinearConv", QUANTISED),
    ("RoiAlign", "there is no op for it"),
    ("StringNormalizer", "there are no strings"),
    ("Unique", SHAPE_FROM_DATA),
];

const SHAPE_FROM_DATA: &str = "the shape of its result depends on the data";
const QUANTISED: &str = "products of quantised numbers are not trained";

/// Where nodes are read: in the model's graph, a function, or the body of a branch or loop.
pub(crate) struct Frame<'a> {
    /// The names that are visible.
    pub(crate) scope: usize,
    /// The attributes of the call of the function around it.
    pub(crate) given: Given<'a>,
    /// The version of the operators.
    pub(crate) opset: i64,
    pub(crate) depth: usize,
    /// The module of the call of the function around it.
    pub(crate) module: String,
}

/// Names with their values.
struct Scope<'a> {
    items: BTreeMap<&'a str, Item>,
    /// The scope around it, for the body of a branch or loop.
    outer: Option<usize>,
}

/// A model while it is read.
pub(crate) struct Import<'a> {
    options: &'a Options,
    functions: BTreeMap<[&'a str; 3], &'a FunctionProto>,
    pub(crate) builder: Builder<'a>,
    scopes: Vec<Scope<'a>>,
    /// The types that the file states, by name.
    declared: BTreeMap<&'a str, TensorType>,
    unsupported: Vec<Unsupported>,
    /// How many more nodes may be read.
    left: u64,
}

/// Reads a model.
pub(crate) fn model(
    proto: &ModelProto,
    name: &str,
    files: Files,
    options: &Options,
) -> Result<Model, Error> {
    let graph = proto.graph.as_ref();
    let graph = graph.ok_or_else(|| Error::new("", "is no ONNX model: it has no graph"))?;
    let opset = opset(&proto.opset_import, "")?;
    let mut functions = BTreeMap::new();
    for f in &proto.functions {
        let key = [domain(f.domain()), f.name(), f.overload()];
        if functions.insert(key, f).is_some() {
            return Err(Error::new(f.name(), "two functions have this name"));
        }
    }
    let mut import = Import {
        options,
        functions,
        builder: Builder::new(name, files),
        scopes: vec![Scope {
            items: BTreeMap::new(),
            outer: None,
        }],
        declared: BTreeMap::new(),
        unsupported: vec![],
        left: NODES + weight(&graph.node),
    };
    let trained = import.start(graph)?;
    let frame = Frame {
        scope: 0,
        given: Given::new(),
        opset,
        depth: 0,
        module: String::new(),
    };
    let outputs: Vec<&str> = graph.output.iter().map(|info| info.name()).collect();
    import.nodes(&graph.node, &outputs, &frame)?;
    import.finish(graph)?;
    Ok(import.result(trained, graph))
}

/// The name of the standard's domain is empty.
fn domain(name: &str) -> &str {
    if name == "ai.onnx" { "" } else { name }
}

/// The version of the standard's operators.
pub(crate) fn opset(list: &[OperatorSetIdProto], of: &str) -> Result<i64, Error> {
    let entry = list.iter().find(|entry| domain(entry.domain()).is_empty());
    let missing = || Error::new(of, "names no version of the operators (opset)");
    let version = entry.ok_or_else(missing)?.version();
    if OPSETS.contains(&version) {
        return Ok(version);
    }
    let (least, most) = (OPSETS.start(), OPSETS.end());
    let error = Error::new(
        of,
        format!("uses version {version} of the operators (opset)"),
    );
    Err(if version < *least {
        error.help(format!(
            "convert it to {least} or later with onnx.version_converter"
        ))
    } else {
        error.help(format!("export it with opset_version={most} or earlier"))
    })
}

impl<'a> Import<'a> {
    /// Inputs and initializers. Returns the names of those that are trained.
    fn start(&mut self, graph: &'a GraphProto) -> Result<BTreeSet<&'a str>, Error> {
        if !graph.sparse_initializer.is_empty() {
            return Err(Error::new("", "has sparse tensors, which no op reads"));
        }
        let initializers: BTreeSet<&str> = graph.initializer.iter().map(|p| p.name()).collect();
        let is_input = |info: &&_| !initializers.contains(crate::proto::ValueInfoProto::name(info));
        let inputs: Vec<_> = graph.input.iter().filter(is_input).collect();
        let types = dims::inputs(&inputs, &self.options.dims)?;
        for (info, ty) in inputs.iter().zip(types) {
            let slot = self.builder.input(info.name(), ty);
            self.bind(info.name(), Item::Tensor(slot), 0)?;
        }
        for info in graph.value_info.iter().chain(&graph.output) {
            if let Some(ty) = dims::declared(info, &self.options.dims) {
                self.declared.insert(info.name(), ty);
            }
        }
        let trained = trained::names(graph, &self.options.trainable);
        for proto in &graph.initializer {
            let slot = self.builder.initializer(proto.name(), proto)?;
            if trained.contains(proto.name()) {
                self.builder.state(slot, StateKind::Param)?;
                self.builder.forget(slot);
            }
            self.bind(proto.name(), Item::Tensor(slot), 0)?;
        }
        Ok(trained)
    }

    /// The outputs, and the end of the step.
    fn finish(&mut self, graph: &'a GraphProto) -> Result<(), Error> {
        let mut names = BTreeSet::new();
        for info in &graph.output {
            let name = info.name();
            let Item::Tensor(slot) = self.item(name, 0)? else {
                return Err(Error::new(name, "is a sequence, not a tensor"));
            };
            if !names.insert(name) {
                return Err(Error::new(name, "two outputs have this name"));
            }
            let made = self.builder.ty(slot);
            if let Some(declared) = self.declared.get(name).filter(|ty| *ty != made) {
                let message = format!("the file says {declared}, but it is computed as {made}");
                return Err(Error::new(name, message));
            }
            let value = self.builder.value(slot)?;
            self.builder.graph.outputs.push(Output {
                name: name.into(),
                value,
            });
        }
        self.builder.finish()
    }

    fn result(self, trained: BTreeSet<&str>, graph: &GraphProto) -> Model {
        let builder = self.builder;
        let of = |kind: StateKind| -> Vec<State> {
            let states = builder.graph.states.iter();
            states
                .filter(|(_, state)| state.kind == kind)
                .map(|(state, _)| state)
                .collect()
        };
        Model {
            trained: of(StateKind::Param),
            frozen: of(StateKind::Const),
            notes: trained::notes(graph, &trained, &self.options.trainable),
            graph: builder.graph,
            tensors: builder.tensors,
            unsupported: self.unsupported,
        }
    }

    // --- names ---

    /// A new scope, with the names of another around it or none.
    pub(crate) fn scope(&mut self, outer: Option<usize>) -> usize {
        self.scopes.push(Scope {
            items: BTreeMap::new(),
            outer,
        });
        self.scopes.len() - 1
    }
    /// Removes the last scope.
    pub(crate) fn leave(&mut self) {
        self.scopes.pop();
    }
    /// Gives a name its value. A name has one value in its scope.
    pub(crate) fn bind(&mut self, name: &'a str, item: Item, scope: usize) -> Result<(), Error> {
        match self.scopes[scope].items.insert(name, item) {
            None => Ok(()),
            Some(_) => Err(Error::new(name, "the name is defined twice")),
        }
    }
    /// The value of a name.
    pub(crate) fn item(&self, name: &str, scope: usize) -> Result<Item, Error> {
        let mut at = Some(scope);
        while let Some(scope) = at {
            if let Some(item) = self.scopes[scope].items.get(name) {
                return Ok(item.clone());
            }
            at = self.scopes[scope].outer;
        }
        Err(Error::new(name, "is used but never defined before"))
    }

    // --- nodes ---

    /// Reads the nodes that these outputs need.
    pub(crate) fn nodes(
        &mut self,
        nodes: &'a [Tight],
        outputs: &[&'a str],
        frame: &Frame<'a>,
    ) -> Result<(), Error> {
        self.charge(weight(nodes))?;
        for (node, is_live) in nodes.iter().zip(live(nodes, outputs)) {
            if is_live {
                self.node(node, frame)?;
            }
        }
        Ok(())
    }

    /// Counts work. An error if there is too much.
    pub(crate) fn charge(&mut self, work: u64) -> Result<(), Error> {
        let left = self.left.checked_sub(work);
        let message = || format!("functions and loops have more than {NODES} nodes");
        self.left = left.ok_or_else(|| Error::new("", message()))?;
        Ok(())
    }

    fn node(&mut self, node: &'a NodeProto, frame: &Frame<'a>) -> Result<(), Error> {
        let at = format!("node {} ({})", label(node), node.op_type());
        self.read(node, frame).map_err(|error| error.within(&at))
    }

    fn read(&mut self, node: &'a NodeProto, frame: &Frame<'a>) -> Result<(), Error> {
        let attributes = Attributes::of(node, &frame.given).map_err(whole)?;
        let mut items = vec![];
        for name in &node.input {
            items.push(match name.as_str() {
                "" => None,
                name => match self.item(name, frame.scope)? {
                    Item::Absent => None,
                    item => Some(item),
                },
            });
        }
        let module = hints::module(node).unwrap_or_else(|| frame.module.clone());
        let key = [domain(node.domain()), node.op_type(), node.overload()];
        if let Some(&function) = self.functions.get(&key) {
            let call = (node, attributes.given(), items);
            return control::function(self, function, call, (frame, module));
        }
        if !key[0].is_empty() {
            let why = format!(
                "there are no operators of the domain {}{}",
                key[0],
                advice(key[0])
            );
            return self.refuse(node, &items, frame, why);
        }
        match node.op_type() {
            "Constant" => self.constant(node, &attributes, frame),
            // A value that is given is one; nothing else is optional here.
            "OptionalGetElement" => {
                let given = items.into_iter().next().flatten();
                let given = given.ok_or_else(|| Error::new("", "the value is missing"))?;
                self.bind_all(node, vec![Some(given)], frame)
            }
            "OptionalHasElement" => {
                let has = Numbers::boolean(items.into_iter().next().flatten().is_some());
                let has = has.ok_or_else(|| Error::new("", "is no boolean"))?;
                let name = node.output.first().map_or("", String::as_str);
                let slot = self.builder.known(name, has);
                self.bind_all(node, vec![Some(Item::Tensor(slot))], frame)
            }
            "If" => control::branch(self, node, &attributes, items, frame),
            "Loop" => control::repeat(self, node, &attributes, items, frame),
            "Scan" => control::scan(self, node, &attributes, items, frame),
            op if sequence::OPS.contains(&op) => {
                let place = Place {
                    names: names(node),
                    module: &module,
                };
                let item = sequence::run(&mut self.builder, op, &items, &attributes, &place);
                self.bind_all(node, vec![Some(item.map_err(whole)?)], frame)
            }
            "Identity" if matches!(items[..], [Some(Item::Sequence(_))]) => {
                self.bind_all(node, items, frame)
            }
            _ => self.tensors(node, attributes, items, (frame, &module)),
        }
    }

    /// The frame of a body; `outer` is the scope around it.
    pub(crate) fn inner(
        &mut self,
        frame: &Frame<'a>,
        module: String,
        outer: Option<usize>,
    ) -> Result<Frame<'a>, Error> {
        if frame.depth >= DEPTH {
            let message = format!("functions and branches are nested more than {DEPTH} deep");
            return Err(Error::new("", message).help("a function may not call itself"));
        }
        Ok(Frame {
            scope: self.scope(outer),
            given: if outer.is_some() {
                frame.given.clone()
            } else {
                Given::new()
            },
            opset: frame.opset,
            depth: frame.depth + 1,
            module,
        })
    }

    /// Gives a node's outputs their values.
    pub(crate) fn bind_all(
        &mut self,
        node: &'a NodeProto,
        items: Vec<Option<Item>>,
        frame: &Frame<'a>,
    ) -> Result<(), Error> {
        for (name, item) in node.output.iter().zip(items) {
            if let (false, Some(item)) = (name.is_empty(), item) {
                self.bind(name, item, frame.scope)?;
            }
        }
        Ok(())
    }

    fn constant(
        &mut self,
        node: &'a NodeProto,
        attributes: &Attributes<'a>,
        frame: &Frame<'a>,
    ) -> Result<(), Error> {
        let name = node.output.first().map_or("", String::as_str);
        let slot = if let Some(value) = attributes.tensor("value") {
            self.builder.stored(name, value)?
        } else {
            let numbers = constant(attributes);
            let numbers = numbers.ok_or_else(|| Error::new("", "its value is no tensor"))?;
            self.builder.known(name, numbers)
        };
        self.bind_all(node, vec![Some(Item::Tensor(slot))], frame)
    }

    /// A node of tensors: folded if it can be, else lowered.
    fn tensors(
        &mut self,
        node: &'a NodeProto,
        mut attributes: Attributes<'a>,
        items: Vec<Option<Item>>,
        (frame, module): (&Frame<'a>, &str),
    ) -> Result<(), Error> {
        let mut inputs = vec![];
        for item in &items {
            inputs.push(match item {
                None => None,
                Some(Item::Tensor(slot)) => Some(*slot),
                Some(Item::Sequence(_) | Item::Absent) => {
                    return Err(Error::new("", "an input is a sequence, not a tensor"));
                }
            });
        }
        if let Some(results) = self.folded(node, &attributes, &inputs) {
            let mut slots = vec![];
            for (numbers, name) in results.into_iter().zip(&node.output) {
                slots.push(Some(Item::Tensor(self.builder.known(name, numbers))));
            }
            return self.bind_all(node, slots, frame);
        }
        let Some(row) = ops::find(node.op_type()) else {
            let reason = REFUSED.iter().find(|(op, _)| *op == node.op_type());
            let why = reason.map_or("there is no op for it", |(_, why)| why);
            return self.refuse(node, &items, frame, why.into());
        };
        let statistics = self.statistics(node, &attributes, &inputs)?;
        let mut names = names(node);
        let extra: Vec<String> = statistics
            .iter()
            .map(|state| format!("after_{state:?}"))
            .collect();
        for (i, extra) in extra.iter().enumerate() {
            names.resize(names.len().max(i + 2), "");
            if names[i + 1].is_empty() {
                names[i + 1] = extra;
            }
        }
        let place = Place { names, module };
        let version = (frame.opset, self.options.batch_norm);
        let before = self.builder.graph.order.len();
        let made = self
            .builder
            .lower(row, &mut attributes, &inputs, &place, version);
        // A recurrent cell has nodes for each step.
        self.charge((self.builder.graph.order.len() - before) as u64 / 64)?;
        match made {
            Ok(slots) => {
                for (state, slot) in statistics.iter().zip(slots.iter().skip(1)) {
                    self.leave_state(*state, *slot)?;
                }
                let items = slots
                    .into_iter()
                    .map(|slot| slot.map(Item::Tensor))
                    .collect();
                self.bind_all(node, items, frame)
            }
            Err(why) => self.refuse(node, &items, frame, why.to_string()),
        }
    }

    /// The results of a node whose inputs are known.
    fn folded(
        &mut self,
        node: &NodeProto,
        attributes: &Attributes<'a>,
        inputs: &[Option<Slot>],
    ) -> Option<Vec<Numbers>> {
        let (fold, n_read) = fold::find(node.op_type())?;
        let numbers: Vec<Option<&Numbers>> = inputs
            .iter()
            .map(|slot| slot.and_then(|slot| self.builder.numbers(slot)))
            .collect();
        let is_known = |(slot, numbers): (&Option<Slot>, &Option<&Numbers>)| {
            slot.is_none() || numbers.is_some()
        };
        if !inputs.iter().zip(&numbers).take(n_read).all(is_known) {
            return None;
        }
        let types = inputs
            .iter()
            .map(|slot| slot.map(|slot| self.builder.ty(slot)))
            .collect();
        let folding = Folding {
            inputs: numbers,
            types,
            attributes,
            n_results: node.output.len(),
        };
        let results = fold(&folding)?;
        let n: u64 = results.iter().map(|numbers| numbers.ty.numel()).sum();
        (n <= SMALL && self.builder.take(n + 1)).then_some(results)
    }

    /// The running statistics that a batch normalisation in training updates. Stored ones become
    /// states.
    fn statistics(
        &mut self,
        node: &NodeProto,
        attributes: &Attributes<'a>,
        inputs: &[Option<Slot>],
    ) -> Result<Vec<State>, Error> {
        if node.op_type() != "BatchNormalization" {
            return Ok(vec![]);
        }
        let training = attributes.int("training_mode").unwrap_or(0) != 0;
        let choice = self.options.batch_norm;
        if !training && choice.is_none() {
            let message = "normalises with stored statistics";
            return Err(Error::new("", message).help(
                "choose --batch-norm train (statistics of each batch) or --batch-norm frozen",
            ));
        }
        let stored: Vec<Slot> = inputs.iter().skip(3).take(2).copied().flatten().collect();
        for &slot in &stored {
            if self.builder.is_stored(slot) {
                self.builder.state(slot, StateKind::Buffer)?;
                self.builder.forget(slot);
            }
        }
        // Nothing updates them. They are states so that other values may be given.
        if !training && choice == Some(BatchNorm::Frozen) {
            return Ok(vec![]);
        }
        let mut states = vec![];
        for slot in stored {
            match self.builder.state_of(slot) {
                Some(state) if self.builder.graph.states[state].kind == StateKind::Buffer => {
                    states.push(state);
                }
                // Statistics that the file computes stay its own.
                _ => return Ok(vec![]),
            }
        }
        Ok(states)
    }

    /// Leaves a new value in a state.
    fn leave_state(&mut self, state: State, slot: Option<Slot>) -> Result<(), Error> {
        let Some(slot) = slot else { return Ok(()) };
        let value = self.builder.value(slot)?;
        let data = &mut self.builder.graph.states[state];
        if data.after != data.before {
            let message = "two batch normalisations update these statistics";
            return Err(Error::new(&data.path, message));
        }
        data.after = value;
        Ok(())
    }

    /// A node that cannot be expressed: an `extern` node if its results' types are known.
    fn refuse(
        &mut self,
        node: &'a NodeProto,
        items: &[Option<Item>],
        frame: &Frame<'a>,
        why: String,
    ) -> Result<(), Error> {
        let refused = |why: String| Err(Error::new("", why));
        let mut inputs = vec![];
        for item in items.iter().flatten() {
            match item {
                Item::Tensor(slot) => inputs.push(Some(*slot)),
                Item::Sequence(_) | Item::Absent => return refused(why),
            }
        }
        let declared = |name: &String| self.declared.get(name.as_str()).cloned();
        let types: Vec<Option<TensorType>> = node.output.iter().map(declared).collect();
        let named = node.output.iter().zip(&types);
        if frame.scope != 0
            || named
                .clone()
                .any(|(name, ty)| !name.is_empty() && ty.is_none())
        {
            return refused(why);
        }
        let module = hints::module(node).unwrap_or_default();
        let place = Place {
            names: names(node),
            module: &module,
        };
        let target = match domain(node.domain()) {
            "" => node.op_type().to_string(),
            domain => format!("{domain}::{}", node.op_type()),
        };
        let label = label(node);
        let made = self
            .builder
            .external((&target, label), &inputs, &types, &place);
        let Ok(made) = made else { return refused(why) };
        self.unsupported.push(Unsupported {
            target,
            node: label.into(),
            why,
        });
        let items = made
            .into_iter()
            .map(|slot| slot.map(Item::Tensor))
            .collect();
        self.bind_all(node, items, frame)
    }
}

pub(crate) fn whole(error: lower::Error) -> Error {
    Error::new("", error.to_string())
}

/// A node's name, or its first output's.
fn label(node: &NodeProto) -> &str {
    match node.name() {
        "" => node.output.first().map_or("", String::as_str),
        name => name,
    }
}

/// The names of a node's outputs.
pub(crate) fn names(node: &NodeProto) -> Vec<&str> {
    node.output.iter().map(String::as_str).collect()
}

/// How a file without operators of a domain is made.
fn advice(domain: &str) -> &'static str {
    match domain {
        "com.microsoft" => ": export without the optimiser of ONNX Runtime",
        "ai.onnx.ml" => ": classical models are not trained by gradients",
        _ => "",
    }
}

/// The work of reading nodes, at least 1: their number, more for those with long lists, and those
/// of bodies within them.
fn weight(nodes: &[Tight]) -> u64 {
    let of = |node: &Tight| {
        let attributes = node.attribute.iter();
        let lists = attributes
            .clone()
            .map(|a| 1 + a.ints.len() + a.floats.len() + a.strings.len());
        let names = node.input.len() + node.output.len() + node.metadata_props.len();
        let bodies = attributes
            .filter_map(|a| a.g.as_ref())
            .map(|body| weight(&body.node));
        1 + (lists.sum::<usize>() + names) as u64 / 16 + bodies.sum::<u64>()
    };
    1 + nodes.iter().map(of).sum::<u64>()
}

/// Which nodes the outputs need.
fn live(nodes: &[Tight], outputs: &[&str]) -> Vec<bool> {
    let mut needed: BTreeSet<&str> = outputs.iter().copied().collect();
    let mut live = vec![false; nodes.len()];
    for (node, live) in nodes.iter().zip(&mut live).rev() {
        if node
            .output
            .iter()
            .any(|name| needed.contains(name.as_str()))
        {
            *live = true;
            read_names(node, &mut needed);
        }
    }
    live
}

/// The names that a node reads, also in its bodies. The nesting of messages is limited.
fn read_names<'n>(node: &'n NodeProto, names: &mut BTreeSet<&'n str>) {
    names.extend(node.input.iter().map(String::as_str));
    for body in node
        .attribute
        .iter()
        .filter_map(|attribute| attribute.g.as_ref())
    {
        names.extend(body.output.iter().map(|info| info.name()));
        for node in &body.node {
            read_names(node, names);
        }
    }
}

/// The numbers of a `Constant` that are not a tensor.
fn constant(attributes: &Attributes<'_>) -> Option<Numbers> {
    if let Some(x) = attributes.float("value_float") {
        return Numbers::floats(DType::F32, &[], vec![x]);
    }
    if let Some(x) = attributes.int("value_int") {
        return Numbers::ints(DType::I64, &[], vec![x]);
    }
    if attributes.has("value_floats") {
        let list = attributes.floats("value_floats")?;
        let elements = Elements::Floats(list.iter().map(|&x| x.into()).collect());
        return Numbers::of(DType::F32, &[list.len() as u64], elements);
    }
    let list = attributes.ints("value_ints")?;
    Numbers::ints(DType::I64, &[list.len() as u64], list.to_vec())
}
