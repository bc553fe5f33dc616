//! The graph under construction: tensors of the file, of which some are known while the file is
//! read, and the nodes that compute the others.

use crate::attributes::Attributes;
use crate::external::Files;
use crate::ops::{Input, Inputs, Row};
use crate::proto::TensorProto;
use crate::tensor::{self, Numbers};
use crate::{BatchNorm, Error};
use ir::{Graph, Phase, State, StateKind, TensorType, Value};
use lower::{Call, Generator, Outside, Plan, Result, Results, Tensor};
use std::collections::{BTreeMap, BTreeSet};

/// The most elements of a tensor that is computed while the file is read. Shapes, axes and masks of
/// short sequences have fewer; larger tensors are computed in each step.
pub(crate) const SMALL: u64 = 4096;

/// All tensors that are computed while the file is read have together at most this many elements,
/// and for each node as many as a long shape.
const FOLDED: u64 = 1 << 22;

/// A tensor of the file, by its number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Slot(usize);

/// Where a tensor's elements are.
#[derive(Clone, Debug)]
enum Source<'a> {
    /// They are computed in each step.
    Step,
    /// They are known.
    Known(Numbers),
    /// They are in the file, and not needed yet.
    Stored(&'a TensorProto),
}

/// A tensor of the file.
#[derive(Clone, Debug)]
struct Entry<'a> {
    name: &'a str,
    ty: TensorType,
    source: Source<'a>,
    /// Its value in the graph, once it has one.
    value: Option<Value>,
}

/// The place of a node: its outputs' names, and the module in which it was traced.
pub(crate) struct Place<'n> {
    /// The names of the results; empty for a result that nothing uses.
    pub(crate) names: Vec<&'n str>,
    pub(crate) module: &'n str,
}

/// The graph under construction.
pub(crate) struct Builder<'a> {
    pub(crate) graph: Graph,
    /// The values of states, by path.
    pub(crate) tensors: BTreeMap<String, Tensor>,
    generator: Generator,
    entries: Vec<Entry<'a>>,
    /// The names of values, each with the number of values that want it.
    names: BTreeMap<String, u64>,
    paths: BTreeSet<String>,
    initializers: BTreeMap<&'a str, Slot>,
    files: Files,
    /// The tensors of the file, by the addresses of their messages: the body of a loop is read
    /// several times.
    stored: BTreeMap<usize, Slot>,
    /// How many more elements may be computed while the file is read.
    folded: u64,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(name: &str, files: Files) -> Builder<'a> {
        Builder {
            graph: Graph::new(name),
            tensors: BTreeMap::new(),
            // Names of values have no dots.
            generator: Generator::new("rng.state"),
            entries: vec![],
            names: BTreeMap::new(),
            paths: BTreeSet::new(),
            initializers: BTreeMap::new(),
            files,
            stored: BTreeMap::new(),
            folded: FOLDED,
        }
    }

    /// Adds what happens at a step's end: other random numbers in the next step.
    pub(crate) fn finish(&mut self) -> std::result::Result<(), Error> {
        self.generator.advance(&mut self.graph)
    }

    // --- tensors ---

    fn push(&mut self, name: &'a str, ty: TensorType, source: Source<'a>) -> Slot {
        self.entries.push(Entry {
            name,
            ty,
            source,
            value: None,
        });
        Slot(self.entries.len() - 1)
    }
    /// An input of the step.
    pub(crate) fn input(&mut self, name: &'a str, ty: TensorType) -> Slot {
        let free = self.free(name);
        let value = self.graph.add_input(free, ty.clone());
        let slot = self.push(name, ty, Source::Step);
        self.entries[slot.0].value = Some(value);
        slot
    }
    /// A tensor of the file.
    pub(crate) fn stored(
        &mut self,
        name: &'a str,
        proto: &'a TensorProto,
    ) -> std::result::Result<Slot, Error> {
        let address = std::ptr::from_ref(proto) as usize;
        if let Some(&slot) = self.stored.get(&address) {
            return Ok(slot);
        }
        let ty = tensor::tensor_type(proto)?;
        let mut source = Source::Stored(proto);
        if ty.numel() <= SMALL && self.take(ty.numel()) {
            let data = tensor::bytes(proto, &ty, &mut self.files)?;
            if let Some(numbers) = Numbers::from_bytes(&ty, &data) {
                source = Source::Known(numbers);
            }
        }
        let slot = self.push(name, ty, source);
        self.stored.insert(address, slot);
        Ok(slot)
    }
    /// An initializer of the graph: its name is the path of its state, and of no other state, such
    /// as a constant in a function.
    pub(crate) fn initializer(
        &mut self,
        name: &'a str,
        proto: &'a TensorProto,
    ) -> std::result::Result<Slot, Error> {
        let slot = self.stored(name, proto)?;
        self.initializers.insert(name, slot);
        Ok(slot)
    }
    /// A tensor that was computed.
    pub(crate) fn known(&mut self, name: &'a str, numbers: Numbers) -> Slot {
        self.push(name, numbers.ty.clone(), Source::Known(numbers))
    }
    /// Counts elements that are computed now. False if there would be too many.
    pub(crate) fn take(&mut self, n: u64) -> bool {
        let left = self.folded.checked_sub(n);
        self.folded = left.unwrap_or(0);
        left.is_some()
    }
    /// A tensor's type.
    pub(crate) fn ty(&self, slot: Slot) -> &TensorType {
        &self.entries[slot.0].ty
    }
    /// A tensor's elements, if they are known.
    pub(crate) fn numbers(&self, slot: Slot) -> Option<&Numbers> {
        match &self.entries[slot.0].source {
            Source::Known(numbers) => Some(numbers),
            _ => None,
        }
    }
    /// The state that a tensor is.
    pub(crate) fn state_of(&self, slot: Slot) -> Option<State> {
        let value = self.entries[slot.0].value?;
        match self.graph.values[value].def {
            ir::graph::Def::State(state) => Some(state),
            _ => None,
        }
    }

    /// True for a tensor of the file, known or not.
    pub(crate) fn is_stored(&self, slot: Slot) -> bool {
        let entry = &self.entries[slot.0];
        entry.value.is_none() && !matches!(entry.source, Source::Step)
    }
    /// From now on, the tensor's elements are not known: each step may change them.
    pub(crate) fn forget(&mut self, slot: Slot) {
        self.entries[slot.0].source = Source::Step;
    }

    /// A name for a value that no other value has. It has no dot, so that names of helpers, which
    /// have one, are free.
    fn free(&mut self, name: &str) -> String {
        let name = if name.is_empty() { "value" } else { name };
        let mut free = name.replace('.', "_");
        loop {
            let n = self.names.entry(free.clone()).or_insert(0);
            *n += 1;
            if *n == 1 {
                return free;
            }
            free = format!("{free}_{n}");
        }
    }

    /// Makes a tensor of the file a state.
    pub(crate) fn state(
        &mut self,
        slot: Slot,
        kind: StateKind,
    ) -> std::result::Result<Value, Error> {
        let entry = &self.entries[slot.0];
        let (name, ty) = (entry.name, entry.ty.clone());
        let data = match &entry.source {
            Source::Known(numbers) => numbers.bytes(),
            Source::Stored(proto) => tensor::bytes(proto, &ty, &mut self.files)?,
            Source::Step => return Err(Error::new(name, "is computed, and cannot be a state")),
        };
        let mut path = name.to_string();
        let mut n = 1;
        let of_another = |path: &str| self.initializers.get(path).is_some_and(|&own| own != slot);
        while of_another(&path) || !self.paths.insert(path.clone()) {
            n += 1;
            path = format!("{name}.{n}");
        }
        let free = self.free(name);
        let value = self.graph.add_state(free, &path, kind, ty.clone());
        self.tensors.insert(path, Tensor { ty, data });
        self.entries[slot.0].value = Some(value);
        Ok(value)
    }

    /// A tensor's value in the graph: known elements become a node if they are equal, else a
    /// constant.
    pub(crate) fn value(&mut self, slot: Slot) -> std::result::Result<Value, Error> {
        let entry = &self.entries[slot.0];
        if let Some(value) = entry.value {
            return Ok(value);
        }
        let name = entry.name;
        let uniform = match &entry.source {
            Source::Known(numbers) => numbers.uniform(),
            _ => None,
        };
        let Some(number) = uniform else {
            return self.state(slot, StateKind::Const);
        };
        let ty = entry.ty.clone();
        let place = Place {
            names: vec![name],
            module: "",
        };
        let made = self.compose(&place, &mut |c| {
            lower::one(c.full(number, ty.dtype(), ty.shape())?)
        });
        let made = made.map_err(|e| Error::new(name, e.to_string()))?;
        let made = made.into_iter().next().flatten();
        let made = made.and_then(|made| self.entries[made.0].value);
        self.entries[slot.0].value = made;
        made.ok_or_else(|| Error::new(name, "is not computed"))
    }

    // --- nodes ---

    /// Adds the nodes of one operator. Inputs that need not be known become values first.
    pub(crate) fn lower(
        &mut self,
        row: &'static Row,
        attributes: &mut Attributes<'a>,
        inputs: &[Option<Slot>],
        place: &Place<'_>,
        (opset, batch_norm): (i64, Option<BatchNorm>),
    ) -> Result<Vec<Option<Slot>>> {
        for (i, slot) in inputs.iter().enumerate() {
            let Some(slot) = *slot else { continue };
            let entry = &self.entries[slot.0];
            let is_uniform = match &entry.source {
                Source::Known(numbers) => numbers.uniform().is_some(),
                _ => false,
            };
            if entry.value.is_none() && !is_uniform && !row.is_known(i) {
                self.state(slot, StateKind::Const)
                    .map_err(|e| e.to_string())?;
            }
        }
        let attribute = attributes.tensor("value").and_then(|value| {
            let ty = tensor::tensor_type(value)
                .ok()
                .filter(|ty| ty.numel() <= SMALL)?;
            Numbers::from_bytes(&ty, &tensor::inline(value, &ty)?)
        });
        let inputs = Inputs {
            attribute: attribute.as_ref(),
            list: inputs
                .iter()
                .map(|slot| slot.map(|slot| self.as_input(slot)))
                .collect(),
            wanted: place.names.iter().map(|name| !name.is_empty()).collect(),
            opset,
            batch_norm,
            read: std::cell::Cell::new(0),
        };
        let types: Vec<Option<TensorType>> = vec![None; place.names.len()];
        let mut call = Call::new(&self.graph, &self.generator, attributes, &types);
        let results = row.lower(&mut call, &inputs)?;
        let types = result_types(&call, &results, place);
        let plan = call.finish(results)?;
        self.add(&plan, &types, place)
    }

    fn as_input(&self, slot: Slot) -> Input<'_> {
        let entry = &self.entries[slot.0];
        let known = match &entry.source {
            Source::Known(numbers) => Some(numbers),
            _ => None,
        };
        let state = self.state_of(slot).map(|state| &self.graph.states[state]);
        let is_trained = state.is_some_and(|state| state.kind == StateKind::Param);
        Input {
            ty: &entry.ty,
            value: entry.value,
            known,
            is_trained,
        }
    }

    /// Adds the nodes that a function plans.
    pub(crate) fn compose(
        &mut self,
        place: &Place<'_>,
        plan: &mut dyn FnMut(&mut Call<'_>) -> Result<Results>,
    ) -> Result<Vec<Option<Slot>>> {
        let mut nothing = Attributes::none();
        let types: Vec<Option<TensorType>> = vec![None; place.names.len()];
        let mut call = Call::new(&self.graph, &self.generator, &mut nothing, &types);
        let results = plan(&mut call)?;
        let types = result_types(&call, &results, place);
        let plan = call.finish(results)?;
        self.add(&plan, &types, place)
    }

    /// One node for an operator that cannot be expressed; `types` are its results' types.
    pub(crate) fn external(
        &mut self,
        (target, node): (&str, &str),
        inputs: &[Option<Slot>],
        types: &[Option<TensorType>],
        place: &Place<'_>,
    ) -> Result<Vec<Option<Slot>>> {
        let mut operands = vec![];
        for &slot in inputs.iter().flatten() {
            operands.push(self.value(slot).map_err(|e| e.to_string())?);
        }
        // Nothing is known about it, so it runs once.
        let outside = Outside {
            target,
            node,
            is_pure: false,
        };
        let plan = Plan::external(outside, &operands, types)?;
        self.add(&plan, types, place)
    }

    fn add(
        &mut self,
        plan: &Plan,
        types: &[Option<TensorType>],
        place: &Place<'_>,
    ) -> Result<Vec<Option<Slot>>> {
        let free: Vec<Option<String>> = place
            .names
            .iter()
            .map(|name| (!name.is_empty()).then(|| self.free(name)))
            .collect();
        let names: Vec<Option<&str>> = free.iter().map(Option::as_deref).collect();
        if names.iter().all(Option::is_none) {
            return Ok(vec![]);
        }
        let at = (Phase::Forward, place.module);
        let made = plan.add_to(&mut self.graph, &mut self.generator, &names, types, at)?;
        let slot = |(value, ty): (Option<Value>, &Option<TensorType>)| {
            let (value, ty) = (value?, ty.clone()?);
            let slot = self.push("", ty, Source::Step);
            self.entries[slot.0].value = Some(value);
            Some(slot)
        };
        Ok(made.results.into_iter().zip(types).map(slot).collect())
    }
}

/// The types of a call's results, each with a name.
fn result_types(call: &Call<'_>, results: &Results, place: &Place<'_>) -> Vec<Option<TensorType>> {
    let ty = |(i, name): (usize, &&str)| {
        let result = results.get(i).copied().flatten();
        result
            .filter(|_| !name.is_empty())
            .map(|result| call.ty(result).clone())
    };
    place.names.iter().enumerate().map(ty).collect()
}
