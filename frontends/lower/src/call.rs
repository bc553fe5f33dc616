//! One traced call while its nodes are planned: the single ops of which operators consist.
//!
//! Nothing here touches the graph: a plan is data.

use crate::{
    Arguments, Error, Generator, Operand, Plan, Ref, Result, Results, Scalar, Step, attr_ints,
    promote,
};
use ir::op::OpKind;
use ir::{Attr, DType, Graph, Op, TensorType};

/// Attributes of a step.
pub type Attrs<'n> = &'n [(&'static str, Attr)];

/// A call while it is planned.
pub struct Call<'a> {
    graph: &'a Graph,
    pub(crate) arguments: &'a mut dyn Arguments,
    /// The results' types in the file.
    types: &'a [Option<TensorType>],
    steps: Vec<Step>,
    /// The types of the steps' results.
    made: Vec<TensorType>,
    /// The number of random nodes in the graph before this call.
    random_before: i64,
    n_random: i64,
    rng: TensorType,
    written: Vec<(&'static str, Ref)>,
}

impl<'a> Call<'a> {
    /// A call without nodes. `types` are the results' types in the file, `None` for a result that
    /// nothing uses.
    pub fn new(
        graph: &'a Graph,
        generator: &Generator,
        arguments: &'a mut dyn Arguments,
        types: &'a [Option<TensorType>],
    ) -> Call<'a> {
        Call {
            graph,
            arguments,
            types,
            steps: vec![],
            made: vec![],
            random_before: generator.n_random(),
            n_random: 0,
            rng: Generator::ty(),
            written: vec![],
        }
    }

    /// The plan. An error if an argument was not read, or if a result has other elements than in
    /// the file.
    pub fn finish(self, results: Results) -> Result<Plan> {
        self.arguments.finish()?;
        for (i, (result, wanted)) in results.iter().zip(self.types).enumerate() {
            let (Some(result), Some(wanted)) = (result, wanted) else {
                continue;
            };
            let made = self.ty(*result);
            if made.dtype() != wanted.dtype() {
                return Err(Error::Type {
                    name: format!("result {i}"),
                    declared: wanted.to_string(),
                    inferred: made.to_string(),
                });
            }
        }
        Ok(Plan {
            steps: self.steps,
            results,
            n_random: self.n_random,
            written: self.written,
        })
    }

    // --- types ---

    /// The type of an operand.
    pub fn ty(&self, of: Ref) -> &TensorType {
        match of {
            Ref::Value(value) => &self.graph.values[value].ty,
            Ref::New(i) => &self.made[i],
            Ref::Rng => &self.rng,
        }
    }
    /// The number of dimensions of an operand.
    pub fn rank(&self, of: Ref) -> usize {
        self.ty(of).rank()
    }
    /// The element type of an operand.
    pub fn dtype(&self, of: Ref) -> DType {
        self.ty(of).dtype()
    }
    /// The shape of an operand.
    pub fn shape_of(&self, of: Ref) -> Vec<u64> {
        self.ty(of).shape().to_vec()
    }
    /// The number of the call's results.
    pub fn n_results(&self) -> usize {
        self.types.len()
    }
    /// The type of result `i` in the file; `None` if nothing uses it.
    pub fn wanted(&self, i: usize) -> Option<&'a TensorType> {
        self.types.get(i).and_then(Option::as_ref)
    }
    /// The first result's type in the file.
    pub fn result(&self) -> Result<&'a TensorType> {
        self.wanted(0)
            .ok_or_else(|| "the file wants no first result".into())
    }
    /// True if a tensor counts from 0 in steps of `step`.
    pub fn counts_by(&self, x: Ref, step: i64) -> bool {
        let Ref::Value(value) = x else { return false };
        let node = self.graph.def_node(value);
        node.is_some_and(|node| match &self.graph.nodes[node].op {
            Op::Arange(it) => (it.start.to_f64(), it.step.to_f64()) == (0.0, step as f64),
            _ => false,
        })
    }
    /// The element type of mixed operands, by PyTorch's rule: first tensors with dimensions, then
    /// tensors without, then numbers. A later group counts only if its kind (boolean, integer,
    /// float) is higher.
    pub fn promoted(&self, operands: &[Operand]) -> DType {
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
    //
    // The tables of the front ends call these at hundreds of places, where size counts and time
    // does not: inlined by the linker, they would be there as often.

    /// A step with any number of results.
    pub fn steps(&mut self, op: OpKind, attrs: Attrs<'_>, inputs: &[Ref]) -> Result<Vec<Ref>> {
        let attrs = attrs
            .iter()
            .map(|(key, attr)| (key.to_string(), attr.clone()));
        let op = Op::of(op, attrs.collect())?;
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
    #[inline(never)]
    pub fn step(&mut self, op: OpKind, attrs: Attrs<'_>, inputs: &[Ref]) -> Result<Ref> {
        Ok(self.steps(op, attrs, inputs)?[0])
    }
    /// A step on `x` without attributes.
    #[inline(never)]
    pub fn map(&mut self, op: OpKind, x: Ref) -> Result<Ref> {
        self.step(op, &[], &[x])
    }
    /// An op with a number: `add_scalar` and the like.
    #[inline(never)]
    pub fn scalar_step(&mut self, op: OpKind, x: Ref, value: Scalar) -> Result<Ref> {
        let value = value.attr(self.dtype(x))?;
        self.step(op, &[("value", value)], &[x])
    }
    /// `x` in another element type.
    #[inline(never)]
    pub fn cast(&mut self, x: Ref, dtype: DType) -> Result<Ref> {
        if self.dtype(x) == dtype {
            return Ok(x);
        }
        self.step(OpKind::Cast, &[("dtype", Attr::Type(dtype))], &[x])
    }
    /// `x != 0`, or `x` itself if it is boolean.
    #[inline(never)]
    pub fn truth(&mut self, x: Ref) -> Result<Ref> {
        match self.dtype(x) {
            DType::Bool => Ok(x),
            dtype => self.step(
                OpKind::NeScalar,
                &[("value", Scalar::Int(0).attr(dtype)?)],
                &[x],
            ),
        }
    }
    /// `x` with other dimensions.
    #[inline(never)]
    pub fn reshape(&mut self, x: Ref, shape: &[u64]) -> Result<Ref> {
        if self.ty(x).shape() == shape {
            return Ok(x);
        }
        self.step(OpKind::Reshape, &[("shape", attr_ints(shape)?)], &[x])
    }
    /// `x` broadcast to a shape.
    #[inline(never)]
    pub fn expand(&mut self, x: Ref, shape: &[u64]) -> Result<Ref> {
        if self.ty(x).shape() == shape {
            return Ok(x);
        }
        self.step(OpKind::Expand, &[("shape", attr_ints(shape)?)], &[x])
    }
    /// `x` with its dimensions in another order: dimension `i` of the result is `dims[i]` of `x`.
    #[inline(never)]
    pub fn permute(&mut self, x: Ref, dims: &[usize]) -> Result<Ref> {
        if dims.len() == self.rank(x) {
            let shape = self.shape_of(x);
            // If only dimensions of size 1 move, no element moves.
            let is_wide = |d: &usize| shape.get(*d).is_some_and(|&size| size != 1);
            let is_permutation = (0..dims.len()).all(|d| dims.contains(&d));
            if is_permutation && dims.iter().filter(|d| is_wide(d)).is_sorted() {
                let shape: Vec<u64> = dims.iter().map(|&d| shape[d]).collect();
                return self.reshape(x, &shape);
            }
        }
        let dims = dims.iter().map(|&d| d as i64).collect();
        self.step(OpKind::Permute, &[("dims", Attr::Ints(dims))], &[x])
    }
    /// A tensor of one number.
    #[inline(never)]
    pub fn full(&mut self, value: Scalar, dtype: DType, shape: &[u64]) -> Result<Ref> {
        let attrs = [
            ("dtype", Attr::Type(dtype)),
            ("shape", attr_ints(shape)?),
            ("value", value.attr(dtype)?),
        ];
        self.step(OpKind::Full, &attrs, &[])
    }
    /// `sum`, `mean`, `amax`, `amin` or `any` over `dims`. Without dimensions, the result is the
    /// operand.
    #[inline(never)]
    pub fn reduce(&mut self, op: OpKind, x: Ref, dims: &[usize], keepdim: bool) -> Result<Ref> {
        if dims.is_empty() {
            return Ok(x);
        }
        let dims = Attr::Ints(dims.iter().map(|&d| d as i64).collect());
        let attrs = [("dims", dims), ("keepdim", Attr::Bool(keepdim))];
        self.step(op, &attrs, &[x])
    }
    /// A number that differs for each random op of the graph.
    pub fn stream(&mut self) -> Attr {
        self.n_random += 1;
        Attr::Int(self.random_before + self.n_random - 1)
    }
    /// `rand` or `randn`.
    pub fn random(&mut self, op: OpKind, dtype: DType, shape: &[u64]) -> Result<Ref> {
        let attrs = [
            ("dtype", Attr::Type(dtype)),
            ("shape", attr_ints(shape)?),
            ("stream", self.stream()),
        ];
        self.step(op, &attrs, &[Ref::Rng])
    }

    // --- results ---

    /// Records that the call writes into an argument: its elements are those of `x` from now on, in
    /// the argument's own type.
    pub fn write(&mut self, argument: &'static str, x: Ref) -> Result<()> {
        let tensor = self.tensor(argument)?;
        let x = self.cast(x, self.dtype(tensor))?;
        if self.ty(x) != self.ty(tensor) {
            return Err("writes a tensor of another shape".into());
        }
        self.written.push((argument, x));
        Ok(())
    }

    /// Zeros for result `i`, if the file uses it. For a result that only the operator's own
    /// derivative reads; our derivative does not need it.
    pub fn placeholder(&mut self, i: usize) -> Result<Option<Ref>> {
        let Some(ty) = self.wanted(i) else {
            return Ok(None);
        };
        self.full(Scalar::Int(0), ty.dtype(), ty.shape()).map(Some)
    }
    /// Results in the file's types: mixed precision is computed in the wider type.
    pub fn as_wanted(&mut self, results: Results) -> Result<Results> {
        let mut cast = |(i, result): (usize, Option<Ref>)| match (result, self.wanted(i)) {
            (Some(result), Some(ty)) => self.cast(result, ty.dtype()).map(Some),
            (result, _) => Ok(result),
        };
        results.into_iter().enumerate().map(&mut cast).collect()
    }
}
