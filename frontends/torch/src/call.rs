//! One traced call, and the nodes planned for it: reading arguments, and the steps from which `ops`
//! composes.
//!
//! Nothing here touches the graph: a plan is data, and a call that turns out not to be expressible
//! leaves no trace.

use crate::schema::{self, Argument, Item, Node};
use crate::symbols::Symbols;
use ir::{Attr, DType, Graph, Op, TensorType, Value};
use std::collections::BTreeMap;

/// An operand of a planned step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ref {
    /// A value that the graph has.
    Value(Value),
    /// A result of an earlier step, counted over all results of the plan.
    New(usize),
    /// The state of the random-number generator.
    Rng,
}

/// A node to be.
pub(crate) struct Step {
    pub(crate) op: Op,
    pub(crate) inputs: Vec<Ref>,
    pub(crate) n_results: usize,
}

/// The nodes for one call.
pub(crate) struct Plan {
    pub(crate) steps: Vec<Step>,
    /// The call's results; none where the file wants none.
    pub(crate) results: Vec<Option<Ref>>,
    /// The number of random nodes in the graph after this call; none if it adds none.
    pub(crate) streams: Option<i64>,
}

/// A number in a call.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Scalar {
    Bool(bool),
    Int(i64),
    Float(f64),
}

impl Scalar {
    pub(crate) fn float(self) -> f64 {
        match self {
            Scalar::Bool(b) => f64::from(u8::from(b)),
            Scalar::Int(i) => i as f64,
            Scalar::Float(x) => x,
        }
    }
    /// The element type that Python gives the number.
    fn dtype(self) -> DType {
        match self {
            Scalar::Bool(_) => DType::Bool,
            Scalar::Int(_) => DType::I64,
            Scalar::Float(_) => DType::F32,
        }
    }
    /// As an attribute of an op on `dtype`: an integer for integers, a float for floats.
    pub(crate) fn attr(self, dtype: DType) -> R<Attr> {
        match self {
            _ if dtype.is_float() => Ok(Attr::Float(self.float())),
            Scalar::Bool(b) => Ok(Attr::Int(b.into())),
            Scalar::Int(i) if dtype == DType::Bool => Ok(Attr::Int((i != 0).into())),
            Scalar::Int(i) => Ok(Attr::Int(i)),
            Scalar::Float(x) if x.fract() == 0.0 && x.abs() < 9e15 => Ok(Attr::Int(x as i64)),
            Scalar::Float(x) => Err(format!("the number {x} is no {dtype}")),
        }
    }
}

/// A tensor or a number.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operand {
    Tensor(Ref),
    Scalar(Scalar),
}

/// Results of planning; the error says what cannot be expressed.
pub(crate) type R<T> = Result<T, String>;

/// Attributes of a step.
pub(crate) type AttrList<'n> = &'n [(&'static str, Attr)];

/// A call while it is planned.
pub(crate) struct Call<'a, 's> {
    graph: &'a Graph,
    env: &'a BTreeMap<&'s str, Value>,
    symbols: &'a mut Symbols<'s>,
    node: &'a Node,
    /// The types that the file gives the results.
    types: &'a [Option<TensorType>],
    /// The arguments that have been read.
    used: Vec<bool>,
    steps: Vec<Step>,
    /// The types of the steps' results.
    made: Vec<TensorType>,
    streams: i64,
    rng: TensorType,
}

/// The type of the generator's state.
pub(crate) fn rng_type() -> TensorType {
    TensorType::new(DType::I64, [2]).expect("two integers should be a type")
}

/// Arguments that say where or how a tensor is stored, which is for the planner to decide.
const PLACEMENT: [&str; 8] = [
    "device",
    "pin_memory",
    "memory_format",
    "non_blocking",
    "implicit",
    "generator",
    "copy",
    "physical_layout",
];

impl<'a, 's> Call<'a, 's> {
    pub(crate) fn new(
        graph: &'a Graph,
        env: &'a BTreeMap<&'s str, Value>,
        symbols: &'a mut Symbols<'s>,
        node: &'a Node,
        types: &'a [Option<TensorType>],
        streams: i64,
    ) -> Call<'a, 's> {
        let used = vec![false; node.inputs.len()];
        Call {
            graph,
            env,
            symbols,
            node,
            types,
            used,
            steps: vec![],
            made: vec![],
            streams,
            rng: rng_type(),
        }
    }

    /// What is called, without the leading `torch.ops.`.
    pub(crate) fn target(&self) -> &'a str {
        self.node
            .target
            .strip_prefix("torch.ops.")
            .unwrap_or(&self.node.target)
    }

    /// The plan, once every argument has been taken into account.
    pub(crate) fn finish(self, results: Vec<Option<Ref>>) -> R<Plan> {
        for (arg, used) in self.node.inputs.iter().zip(&self.used) {
            let is_strided =
                arg.name == "layout" && matches!(arg.arg, Argument::Layout(schema::STRIDED));
            let is_idle = matches!(arg.arg, Argument::None)
                || is_strided
                || PLACEMENT.contains(&arg.name.as_str());
            if !used && !is_idle {
                return Err(format!("the argument {} is not known", arg.name));
            }
        }
        Ok(Plan {
            steps: self.steps,
            results,
            streams: Some(self.streams),
        })
    }

    // --- arguments ---

    /// An argument, if it is given and not None.
    fn arg(&mut self, name: &str) -> Option<&'a Argument> {
        let i = self.node.inputs.iter().position(|arg| arg.name == name)?;
        self.used[i] = true;
        Some(&self.node.inputs[i].arg).filter(|arg| !matches!(arg, Argument::None))
    }
    /// An argument, which has to be given.
    fn need(&mut self, name: &str) -> R<&'a Argument> {
        self.arg(name)
            .ok_or_else(|| format!("the argument {name} is missing"))
    }
    fn wrong<T>(&self, name: &str, expected: &str) -> R<T> {
        Err(format!("the argument {name} is not {expected}"))
    }
    /// Reads an argument without effect, so that it counts as known.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.arg(name);
        }
    }
    fn value(&self, name: &str) -> R<Ref> {
        let value = self
            .env
            .get(name)
            .ok_or_else(|| format!("{name} is not defined"))?;
        Ok(Ref::Value(*value))
    }
    pub(crate) fn tensor(&mut self, name: &str) -> R<Ref> {
        match self.need(name)? {
            Argument::Tensor(tensor) => self.value(tensor),
            _ => self.wrong(name, "a tensor"),
        }
    }
    pub(crate) fn opt_tensor(&mut self, name: &str) -> R<Option<Ref>> {
        match self.arg(name) {
            None => Ok(None),
            Some(Argument::Tensor(tensor)) => self.value(tensor).map(Some),
            Some(_) => self.wrong(name, "a tensor"),
        }
    }
    /// Tensors, some of which may be absent.
    pub(crate) fn opt_tensors(&mut self, name: &str) -> R<Vec<Option<Ref>>> {
        let Argument::Tensors(items) = self.need(name)? else {
            return self.wrong(name, "a list of tensors");
        };
        let one = |item: &Item| match item {
            Item::Name(tensor) => self.value(tensor).map(Some),
            Item::None => Ok(None),
            Item::Int(_) => self.wrong(name, "a list of tensors"),
        };
        items.iter().map(one).collect()
    }
    pub(crate) fn tensors(&mut self, name: &str) -> R<Vec<Ref>> {
        let list: Option<Vec<Ref>> = self.opt_tensors(name)?.into_iter().collect();
        list.ok_or_else(|| format!("a tensor of {name} is None"))
    }
    pub(crate) fn operand(&mut self, name: &str) -> R<Operand> {
        match self.need(name)? {
            Argument::Tensor(tensor) => self.value(tensor).map(Operand::Tensor),
            _ => self.scalar(name).map(Operand::Scalar),
        }
    }
    pub(crate) fn opt_scalar(&mut self, name: &str) -> R<Option<Scalar>> {
        match self.arg(name) {
            None => Ok(None),
            Some(&Argument::Int(i)) => Ok(Some(Scalar::Int(i))),
            Some(&Argument::Float(x)) => Ok(Some(Scalar::Float(x))),
            Some(&Argument::Bool(b)) => Ok(Some(Scalar::Bool(b))),
            Some(Argument::SymInt(symbol)) => {
                self.symbols.named(symbol).map(|i| Some(Scalar::Int(i)))
            }
            Some(_) => self.wrong(name, "a number"),
        }
    }
    pub(crate) fn scalar(&mut self, name: &str) -> R<Scalar> {
        self.opt_scalar(name)?
            .ok_or_else(|| format!("the argument {name} is missing"))
    }
    pub(crate) fn scalar_or(&mut self, name: &str, default: Scalar) -> R<Scalar> {
        Ok(self.opt_scalar(name)?.unwrap_or(default))
    }
    pub(crate) fn float(&mut self, name: &str) -> R<f64> {
        self.scalar(name).map(Scalar::float)
    }
    pub(crate) fn float_or(&mut self, name: &str, default: f64) -> R<f64> {
        Ok(self.opt_scalar(name)?.map_or(default, Scalar::float))
    }
    pub(crate) fn opt_int(&mut self, name: &str) -> R<Option<i64>> {
        match self.opt_scalar(name)? {
            None => Ok(None),
            Some(Scalar::Int(i)) => Ok(Some(i)),
            Some(_) => self.wrong(name, "an integer"),
        }
    }
    pub(crate) fn int(&mut self, name: &str) -> R<i64> {
        self.opt_int(name)?
            .ok_or_else(|| format!("the argument {name} is missing"))
    }
    pub(crate) fn int_or(&mut self, name: &str, default: i64) -> R<i64> {
        Ok(self.opt_int(name)?.unwrap_or(default))
    }
    pub(crate) fn bool_or(&mut self, name: &str, default: bool) -> R<bool> {
        match self.arg(name) {
            None => Ok(default),
            Some(&Argument::Bool(b)) => Ok(b),
            Some(_) => self.wrong(name, "a boolean"),
        }
    }
    pub(crate) fn bools(&mut self, name: &str) -> R<Vec<bool>> {
        match self.need(name)? {
            Argument::Bools(list) => Ok(list.clone()),
            _ => self.wrong(name, "a list of booleans"),
        }
    }
    pub(crate) fn string_or(&mut self, name: &str, default: &'a str) -> R<&'a str> {
        match self.arg(name) {
            None => Ok(default),
            Some(Argument::String(text)) => Ok(text),
            Some(_) => self.wrong(name, "a string"),
        }
    }
    /// A list of integers; a lone integer is a list of one.
    pub(crate) fn opt_ints(&mut self, name: &str) -> R<Option<Vec<i64>>> {
        let items = match self.arg(name) {
            None => return Ok(None),
            Some(Argument::Ints(items)) => items,
            // An empty list has no kind of its own.
            Some(Argument::Tensors(items)) if items.is_empty() => items,
            Some(_) => return self.opt_int(name).map(|i| i.map(|i| vec![i])),
        };
        let one = |item: &Item| match item {
            Item::Int(i) => Ok(*i),
            Item::Name(symbol) => self.symbols.named(symbol),
            Item::None => Err(format!("the argument {name} has a gap")),
        };
        items.iter().map(one).collect::<R<_>>().map(Some)
    }
    pub(crate) fn ints(&mut self, name: &str) -> R<Vec<i64>> {
        self.opt_ints(name)?
            .ok_or_else(|| format!("the argument {name} is missing"))
    }
    /// A list of `n` integers; a list of one stands for `n` equal ones, an absent or empty one for
    /// `default`.
    pub(crate) fn ints_of(&mut self, name: &str, n: usize, default: &[i64]) -> R<Vec<i64>> {
        match self.opt_ints(name)?.as_deref() {
            None | Some([]) => Ok(default.to_vec()),
            Some(&[one]) => Ok(vec![one; n]),
            Some(list) if list.len() == n => Ok(list.to_vec()),
            Some(_) => self.wrong(name, &format!("a list of {n}")),
        }
    }
    /// A dimension below `rank`, counted from the front.
    pub(crate) fn dim(&mut self, name: &str, default: Option<i64>, rank: usize) -> R<usize> {
        let dim = self
            .opt_int(name)?
            .or(default)
            .ok_or_else(|| format!("the argument {name} is missing"))?;
        wrap(dim, rank)
    }
    /// Sorted dimensions; all of them if none is named.
    pub(crate) fn dims(&mut self, name: &str, rank: usize) -> R<Vec<usize>> {
        match self.opt_ints(name)?.as_deref() {
            None | Some([]) => Ok((0..rank).collect()),
            // The one element of a scalar lies along dimension 0, which it does not have.
            Some([0 | -1]) if rank == 0 => Ok(vec![]),
            Some(list) => {
                let mut dims = list
                    .iter()
                    .map(|&d| wrap(d, rank))
                    .collect::<R<Vec<usize>>>()?;
                dims.sort_unstable();
                dims.dedup();
                Ok(dims)
            }
        }
    }
    /// A shape; no size is -1.
    pub(crate) fn shape(&mut self, name: &str) -> R<Vec<u64>> {
        let one = |d: i64| {
            u64::try_from(d).map_err(|_| format!("the argument {name} has the negative size {d}"))
        };
        self.ints(name)?.into_iter().map(one).collect()
    }
    pub(crate) fn opt_dtype(&mut self, name: &str) -> R<Option<DType>> {
        match self.arg(name) {
            None => Ok(None),
            Some(&Argument::ScalarType(number)) => {
                let dtype = schema::dtype(number)
                    .ok_or_else(|| format!("element type {number} is not known"))?;
                Ok(Some(dtype))
            }
            Some(_) => self.wrong(name, "an element type"),
        }
    }

    // --- types ---

    pub(crate) fn ty(&self, of: Ref) -> &TensorType {
        match of {
            Ref::Value(value) => &self.graph.values[value].ty,
            Ref::New(i) => &self.made[i],
            Ref::Rng => &self.rng,
        }
    }
    pub(crate) fn rank(&self, of: Ref) -> usize {
        self.ty(of).rank()
    }
    pub(crate) fn dtype(&self, of: Ref) -> DType {
        self.ty(of).dtype()
    }
    pub(crate) fn shape_of(&self, of: Ref) -> Vec<u64> {
        self.ty(of).shape().to_vec()
    }
    pub(crate) fn n_results(&self) -> usize {
        self.types.len()
    }
    /// The type that the file gives result `i`, if it wants that.
    pub(crate) fn wanted(&self, i: usize) -> Option<&'a TensorType> {
        self.types.get(i).and_then(Option::as_ref)
    }
    /// The type that the file gives the first result.
    pub(crate) fn result(&self) -> R<&'a TensorType> {
        self.wanted(0)
            .ok_or_else(|| "the file wants no first result".into())
    }
    /// torch's rule for the element type of mixed operands: tensors with dimensions come before
    /// those without, and those before numbers; a later group counts only if its kind (boolean,
    /// integer, float) is higher.
    pub(crate) fn promoted(&self, operands: &[Operand]) -> DType {
        let mut groups: [Option<DType>; 3] = [None; 3];
        for &operand in operands {
            let (group, dtype) = match operand {
                Operand::Tensor(tensor) => {
                    (usize::from(self.rank(tensor) == 0), self.dtype(tensor))
                }
                Operand::Scalar(scalar) => (2, scalar.dtype()),
            };
            groups[group] = Some(groups[group].map_or(dtype, |other| promote(other, dtype)));
        }
        let combine = |high: Option<DType>, low: Option<DType>| match (high, low) {
            (None, other) | (other, None) => other,
            (Some(high), Some(low))
                if !high.is_float() && (high == DType::Bool || low.is_float()) =>
            {
                Some(promote(high, low))
            }
            (high, _) => high,
        };
        let [tensors, zero_rank, numbers] = groups;
        combine(combine(tensors, zero_rank), numbers).unwrap_or(DType::F32)
    }

    // --- steps ---

    /// A step with any number of results.
    pub(crate) fn steps(&mut self, name: &str, attrs: AttrList<'_>, inputs: &[Ref]) -> R<Vec<Ref>> {
        let op = Op::new(name, attrs.iter().cloned())?;
        let types: Vec<&TensorType> = inputs.iter().map(|&input| self.ty(input)).collect();
        let results = op.infer(&types)?;
        let first = self.made.len();
        self.steps.push(Step {
            op,
            inputs: inputs.to_vec(),
            n_results: results.len(),
        });
        self.made.extend(results);
        Ok((first..self.made.len()).map(Ref::New).collect())
    }
    /// A step with one result.
    pub(crate) fn step(&mut self, name: &str, attrs: AttrList<'_>, inputs: &[Ref]) -> R<Ref> {
        Ok(self.steps(name, attrs, inputs)?[0])
    }
    /// A step on `x` without attributes.
    pub(crate) fn map(&mut self, name: &str, x: Ref) -> R<Ref> {
        self.step(name, &[], &[x])
    }
    pub(crate) fn cast(&mut self, x: Ref, dtype: DType) -> R<Ref> {
        if self.dtype(x) == dtype {
            return Ok(x);
        }
        self.step("cast", &[("dtype", Attr::Type(dtype))], &[x])
    }
    /// `x != 0`, or `x` itself if it is boolean.
    pub(crate) fn truth(&mut self, x: Ref) -> R<Ref> {
        match self.dtype(x) {
            DType::Bool => Ok(x),
            dtype => self.step("ne_scalar", &[("value", Scalar::Int(0).attr(dtype)?)], &[x]),
        }
    }
    pub(crate) fn reshape(&mut self, x: Ref, shape: &[u64]) -> R<Ref> {
        if self.ty(x).shape() == shape {
            return Ok(x);
        }
        self.step("reshape", &[("shape", attr_ints(shape)?)], &[x])
    }
    pub(crate) fn expand(&mut self, x: Ref, shape: &[u64]) -> R<Ref> {
        if self.ty(x).shape() == shape {
            return Ok(x);
        }
        self.step("expand", &[("shape", attr_ints(shape)?)], &[x])
    }
    pub(crate) fn permute(&mut self, x: Ref, dims: &[usize]) -> R<Ref> {
        if dims.len() == self.rank(x) {
            let shape = self.shape_of(x);
            // If only dimensions of size 1 move, no element does.
            let moving: Vec<usize> = dims
                .iter()
                .copied()
                .filter(|&d| shape.get(d).is_some_and(|&s| s != 1))
                .collect();
            let is_permutation = (0..dims.len()).all(|d| dims.contains(&d));
            if is_permutation && moving.is_sorted() {
                let shape: Vec<u64> = dims.iter().map(|&d| shape[d]).collect();
                return self.reshape(x, &shape);
            }
        }
        let dims = dims.iter().map(|&d| d as i64).collect();
        self.step("permute", &[("dims", Attr::Ints(dims))], &[x])
    }
    /// `x[.., start:end:step, ..]`, with Python's rules for negative and large bounds.
    pub(crate) fn slice(
        &mut self,
        x: Ref,
        dim: usize,
        start: Option<i64>,
        end: Option<i64>,
        step: i64,
    ) -> R<Ref> {
        match self.slice_attrs(x, dim, start, end, step)? {
            None => Ok(x),
            Some(attrs) => self.step("slice", &attrs, &[x]),
        }
    }
    /// The attributes of a slice; none if it is all of `x`.
    pub(crate) fn slice_attrs(
        &self,
        x: Ref,
        dim: usize,
        start: Option<i64>,
        end: Option<i64>,
        step: i64,
    ) -> R<Option<[(&'static str, Attr); 4]>> {
        let size = self
            .ty(x)
            .shape()
            .get(dim)
            .copied()
            .ok_or("no such dimension")? as i64;
        let clip = |i: i64| {
            if i < 0 {
                i.saturating_add(size).max(0)
            } else {
                i.min(size)
            }
        };
        let start = clip(start.unwrap_or(0));
        let end = clip(end.unwrap_or(size)).max(start);
        if (start, end, step) == (0, size, 1) {
            return Ok(None);
        }
        let int = Attr::Int;
        Ok(Some([
            ("dim", int(dim as i64)),
            ("end", int(end)),
            ("start", int(start)),
            ("step", int(step)),
        ]))
    }
    /// A tensor of one number.
    pub(crate) fn full(&mut self, value: Scalar, dtype: DType, shape: &[u64]) -> R<Ref> {
        let attrs = [
            ("dtype", Attr::Type(dtype)),
            ("shape", attr_ints(shape)?),
            ("value", value.attr(dtype)?),
        ];
        self.step("full", &attrs, &[])
    }
    /// An op with a number: `add_scalar` and the like.
    pub(crate) fn scalar_step(&mut self, name: &str, x: Ref, value: Scalar) -> R<Ref> {
        let value = value.attr(self.dtype(x))?;
        self.step(name, &[("value", value)], &[x])
    }
    /// `sum`, `mean`, `amax`, `amin` or `any` over `dims`; over none, what the reduction of one
    /// element is.
    pub(crate) fn reduce(&mut self, name: &str, x: Ref, dims: &[usize], keepdim: bool) -> R<Ref> {
        if dims.is_empty() {
            return Ok(x);
        }
        let dims = Attr::Ints(dims.iter().map(|&d| d as i64).collect());
        self.step(
            name,
            &[("dims", dims), ("keepdim", Attr::Bool(keepdim))],
            &[x],
        )
    }
    /// The number by which the next random op differs from all others.
    pub(crate) fn stream(&mut self) -> Attr {
        self.streams += 1;
        Attr::Int(self.streams - 1)
    }
    /// `rand` or `randn`.
    pub(crate) fn random(&mut self, name: &str, dtype: DType, shape: &[u64]) -> R<Ref> {
        let attrs = [
            ("dtype", Attr::Type(dtype)),
            ("shape", attr_ints(shape)?),
            ("stream", self.stream()),
        ];
        self.step(name, &attrs, &[Ref::Rng])
    }
}

/// A shape as an attribute.
pub(crate) fn attr_ints(shape: &[u64]) -> R<Attr> {
    let one = |&d: &u64| i64::try_from(d).map_err(|_| format!("the size {d} is too large"));
    shape.iter().map(one).collect::<R<_>>().map(Attr::Ints)
}

/// A dimension counted from the front.
pub(crate) fn wrap(dim: i64, rank: usize) -> R<usize> {
    let front = if dim < 0 {
        dim.checked_add(rank as i64)
    } else {
        Some(dim)
    };
    let front = front
        .and_then(|d| usize::try_from(d).ok())
        .filter(|&d| d < rank);
    front.ok_or_else(|| format!("dimension {dim} is not below rank {rank}"))
}

/// The element type in which tensors of two types meet.
fn promote(a: DType, b: DType) -> DType {
    let rank = |d: DType| match d {
        DType::Bool => 0,
        DType::U8 | DType::I8 => 1,
        DType::I16 => 2,
        DType::I32 => 3,
        DType::I64 => 4,
        DType::F8E4M3 | DType::F8E5M2 => 5,
        DType::F16 | DType::BF16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
    };
    match (a, b) {
        _ if a == b => a,
        (DType::U8, DType::I8) | (DType::I8, DType::U8) => DType::I16,
        (DType::F16, DType::BF16) | (DType::BF16, DType::F16) => DType::F32,
        _ if rank(a) < rank(b) => b,
        _ => a,
    }
}
