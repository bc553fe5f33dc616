//! What the functions of operators read: a node's inputs by position, and the rows of their tables.

use crate::BatchNorm;
use crate::tensor::{Elements, Numbers};
use ir::{TensorType, Value};
use lower::{Call, Error, Operand, Ref, Result, Results, Scalar, wrap};
use std::cell::Cell;

/// Reads the inputs and attributes of a node and plans its nodes.
type Lowering = fn(&mut Call<'_>, &Inputs<'_>) -> Result<Results>;

/// An operator: its name, the inputs that must be known while the file is read, its lowering.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) known: &'static [usize],
    lower: Lowering,
}

impl Row {
    /// The nodes for a node of this operator. An error if an input was not read.
    pub(crate) fn lower(&self, call: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
        let results = (self.lower)(call, inputs)?;
        let is_unread =
            |i: &usize| inputs.list[*i].is_some() && inputs.read.get() >> i.min(&63) & 1 == 0;
        match (0..inputs.len()).find(is_unread) {
            Some(i) => Err(Error::Unread(format!("input {i}"))),
            None => Ok(results),
        }
    }
    /// True if input `i` must be known.
    pub(crate) fn is_known(&self, i: usize) -> bool {
        self.known.contains(&i)
    }
}

/// An operator whose inputs are all data.
pub(super) const fn op(name: &'static str, lower: Lowering) -> Row {
    Row {
        name,
        known: &[],
        lower,
    }
}

/// An operator of which some inputs must be known.
pub(super) const fn op_with(name: &'static str, known: &'static [usize], lower: Lowering) -> Row {
    Row { name, known, lower }
}

/// One input of a node.
#[derive(Clone, Copy)]
pub(crate) struct Input<'n> {
    pub(crate) ty: &'n TensorType,
    /// Its value in the graph, if it has one.
    pub(crate) value: Option<Value>,
    /// Its elements, if they are known.
    pub(crate) known: Option<&'n Numbers>,
    /// True for a trained parameter.
    pub(crate) is_trained: bool,
}

/// A node's inputs, and what else its meaning depends on.
pub(crate) struct Inputs<'n> {
    /// The inputs by position; `None` for one that is left out.
    pub(crate) list: Vec<Option<Input<'n>>>,
    /// For each output, whether it has a name.
    pub(crate) wanted: Vec<bool>,
    /// The version of the operators.
    pub(crate) opset: i64,
    pub(crate) batch_norm: Option<BatchNorm>,
    /// The attribute `value`, if it is a small tensor.
    pub(crate) attribute: Option<&'n Numbers>,
    /// A bit for each of the first 64 inputs that was read.
    pub(crate) read: Cell<u64>,
}

// As in `lower::Call`, size counts here and time does not.
impl<'n> Inputs<'n> {
    /// The number of inputs.
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }
    /// An input, if it is given.
    pub(crate) fn get(&self, i: usize) -> Option<Input<'n>> {
        self.read.set(self.read.get() | 1 << i.min(63));
        self.list.get(i).copied().flatten()
    }
    fn given(&self, i: usize) -> Result<Input<'n>> {
        self.get(i)
            .ok_or_else(|| format!("input {i} is missing").into())
    }
    /// True if an input is a trained parameter.
    pub(crate) fn is_trained(&self, i: usize) -> bool {
        self.get(i).is_some_and(|input| input.is_trained)
    }
    /// True if output `i` has a name.
    pub(crate) fn wants(&self, i: usize) -> bool {
        self.wanted.get(i).copied().unwrap_or(false)
    }
    /// An input as a tensor.
    #[inline(never)]
    pub(crate) fn at(&self, c: &mut Call<'_>, i: usize) -> Result<Ref> {
        let input = self.given(i)?;
        if let Some(value) = input.value {
            return Ok(Ref::Value(value));
        }
        let number = input.known.and_then(Numbers::uniform);
        let number = number.ok_or_else(|| Error::from(format!("input {i} is no tensor")))?;
        c.full(number, input.ty.dtype(), input.ty.shape())
    }
    /// An input as a tensor, if it is given.
    #[inline(never)]
    pub(crate) fn opt(&self, c: &mut Call<'_>, i: usize) -> Result<Option<Ref>> {
        match self.get(i) {
            Some(_) => self.at(c, i).map(Some),
            None => Ok(None),
        }
    }
    /// An input as a number, if its only element is known, else as a tensor.
    #[inline(never)]
    pub(crate) fn operand(&self, c: &mut Call<'_>, i: usize) -> Result<Operand> {
        match self.given(i)?.known.and_then(Numbers::scalar) {
            Some(number) => Ok(Operand::Scalar(number)),
            None => self.at(c, i).map(Operand::Tensor),
        }
    }
    /// The known elements of an input, if it is given. An error if they are computed in each step.
    #[inline(never)]
    pub(crate) fn known(&self, i: usize) -> Result<Option<&'n Numbers>> {
        let Some(input) = self.get(i) else {
            return Ok(None);
        };
        let unknown =
            || format!("input {i} must be known when the file is read, but each step computes it");
        input.known.map(Some).ok_or_else(|| unknown().into())
    }
    /// Known integers.
    #[inline(never)]
    pub(crate) fn opt_ints(&self, i: usize) -> Result<Option<Vec<i64>>> {
        match self.known(i)?.map(|numbers| &numbers.elements) {
            None => Ok(None),
            Some(Elements::Ints(list)) => Ok(Some(list.clone())),
            Some(Elements::Floats(_)) => Err(format!("input {i} has no integers").into()),
        }
    }
    #[inline(never)]
    pub(crate) fn ints(&self, i: usize) -> Result<Vec<i64>> {
        self.opt_ints(i)?
            .ok_or_else(|| format!("input {i} is missing").into())
    }
    /// A known number.
    #[inline(never)]
    pub(crate) fn opt_number(&self, i: usize) -> Result<Option<Scalar>> {
        let Some(numbers) = self.known(i)? else {
            return Ok(None);
        };
        let number = Numbers::scalar(numbers);
        number
            .map(Some)
            .ok_or_else(|| format!("input {i} is no single number").into())
    }
    #[inline(never)]
    pub(crate) fn opt_int(&self, i: usize) -> Result<Option<i64>> {
        match self.opt_number(i)? {
            None => Ok(None),
            Some(Scalar::Int(x)) => Ok(Some(x)),
            Some(_) => Err(format!("input {i} is no integer").into()),
        }
    }
    /// Dimensions of a tensor of this rank, from an input or, in older versions, an attribute.
    /// Sorted; `None` if none are given.
    #[inline(never)]
    pub(crate) fn axes(
        &self,
        c: &mut Call<'_>,
        i: usize,
        rank: usize,
    ) -> Result<Option<Vec<usize>>> {
        let axes = match self.opt_ints(i)? {
            Some(axes) => {
                c.ignore(&["axes"]);
                Some(axes)
            }
            None => c.opt_ints("axes")?,
        };
        let Some(axes) = axes else { return Ok(None) };
        let axes: Result<Vec<usize>> = axes.into_iter().map(|axis| wrap(axis, rank)).collect();
        let mut axes = axes?;
        axes.sort_unstable();
        if axes.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err("names a dimension twice".into());
        }
        Ok(Some(axes))
    }
}

/// An attribute that is a boolean as 0 or 1.
pub(super) fn flag(c: &mut Call<'_>, name: &str, default: bool) -> Result<bool> {
    Ok(c.int_or(name, default.into())? != 0)
}

/// Dimensions counted from the front.
pub(super) fn wrap_all(dims: &[i64], rank: usize) -> Result<Vec<usize>> {
    dims.iter().map(|&d| wrap(d, rank)).collect()
}
