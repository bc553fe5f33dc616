//! Reading and writing at indices. Negative indices count from the end.

use super::inputs::{Inputs, Row, op, op_with};
use crate::tensor;
use ir::op::OpKind;
use ir::{Attr, DType};
use lower::{Call, Error, Indexed, Operand, Ref, Result, Results, Scalar, ensure, one};

pub(super) const OPS: &[Row] = &[
    op("Gather", gather),
    op("GatherElements", gather_elements),
    op("GatherND", gather_nd),
    op("ScatterElements", scatter_elements),
    op("Scatter", scatter_elements),
    op("ScatterND", scatter_nd),
    op("TensorScatter", tensor_scatter),
    op_with("OneHot", &[1], one_hot),
    op("EyeLike", eye_like),
];

fn gather(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let x = inputs.at(c, 0)?;
    let axis = c.dim("axis", Some(0), c.rank(x))?;
    let index = inputs.get(1).ok_or("input 1 is missing")?;
    // One element is a part of the tensor.
    if let Some([at]) = index.known.and_then(|numbers| numbers.as_ints())
        && index.ty.rank() == 0
    {
        return one(c.select(x, axis, *at)?);
    }
    let index = inputs.at(c, 1)?;
    // A weight with rows of which some are taken is an embedding; its labels are not negative.
    if axis == 0 && c.rank(x) == 2 && inputs.is_trained(0) {
        let no_padding = [("padding", Attr::Int(-1))];
        return one(c.step(OpKind::Embedding, &no_padding, &[x, index])?);
    }
    let mut indices = vec![None; axis];
    indices.push(Some(index));
    one(Indexed::new(c, x, &indices)?.get(c)?)
}

/// Indices of which negative ones count from the end of a dimension of this size.
fn wrapped(c: &mut Call<'_>, index: Ref, size: u64) -> Result<Ref> {
    let index = c.cast(index, DType::I64)?;
    let negative = c.scalar_step(OpKind::LtScalar, index, Scalar::Int(0))?;
    let later = c.scalar_step(OpKind::AddScalar, index, Scalar::Int(size as i64))?;
    c.step(OpKind::Where, &[], &[negative, later, index])
}

fn dim_attr(dim: usize) -> (&'static str, Attr) {
    ("dim", Attr::Int(dim as i64))
}

fn gather_elements(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (x, index) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    let axis = c.dim("axis", Some(0), c.rank(x))?;
    let index = wrapped(c, index, c.shape_of(x)[axis])?;
    one(c.step(OpKind::Gather, &[dim_attr(axis)], &[x, index])?)
}

/// The indices of `x`'s dimensions in the last dimension of `index`; the first `batch` dimensions
/// of both belong together.
fn points(c: &mut Call<'_>, x: Ref, index: Ref, batch: usize) -> Result<Vec<Option<Ref>>> {
    let shape = c.shape_of(index);
    let (&n, lead) = shape.split_last().ok_or("the indices have no dimension")?;
    let fits = batch <= lead.len() && batch as u64 + n <= c.rank(x) as u64;
    ensure(fits, "the indices do not fit the tensor")?;
    let mut indices = vec![];
    for d in 0..batch {
        let mut beside = vec![1; lead.len()];
        beside[d] = lead[d];
        let at = c.arange(DType::I64, lead[d], Scalar::Int(0), Scalar::Int(1))?;
        indices.push(Some(c.reshape(at, &beside)?));
    }
    for i in 0..n as i64 {
        indices.push(Some(c.select(index, lead.len(), i)?));
    }
    Ok(indices)
}

fn gather_nd(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let batch = c.int_or("batch_dims", 0)?;
    let batch = usize::try_from(batch).map_err(|_| Error::from("batch_dims is negative"))?;
    let (x, index) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    let indices = points(c, x, index, batch)?;
    if indices.is_empty() {
        let lead = c.shape_of(index);
        let shape = [&lead[..lead.len() - 1], &c.shape_of(x)].concat();
        return one(c.expand(x, &shape)?);
    }
    one(Indexed::new(c, x, &indices)?.get(c)?)
}

/// The op of an element that is written: 0 replaces, 1 adds.
fn adds(c: &mut Call<'_>) -> Result<bool> {
    match c.string_or("reduction", "none")?.as_str() {
        "none" => Ok(false),
        "add" => Ok(true),
        other => Err(format!("no scatter that reduces by {other}").into()),
    }
}

fn scatter_elements(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let op = if adds(c)? {
        OpKind::ScatterAdd
    } else {
        OpKind::Scatter
    };
    let (x, index, updates) = (inputs.at(c, 0)?, inputs.at(c, 1)?, inputs.at(c, 2)?);
    let axis = c.dim("axis", Some(0), c.rank(x))?;
    let index = wrapped(c, index, c.shape_of(x)[axis])?;
    one(c.step(op, &[dim_attr(axis)], &[x, index, updates])?)
}

fn scatter_nd(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let accumulate = adds(c)?;
    let (x, index, updates) = (inputs.at(c, 0)?, inputs.at(c, 1)?, inputs.at(c, 2)?);
    let indices = points(c, x, index, 0)?;
    ensure(!indices.is_empty(), "the indices are empty")?;
    one(Indexed::new(c, x, &indices)?.put(c, updates, accumulate)?)
}

/// A cache whose elements along a dimension are replaced, from a place on that each batch names.
fn tensor_scatter(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let is_circular = match c.string_or("mode", "linear")?.as_str() {
        "linear" => false,
        "circular" => true,
        other => return Err(format!("no mode {other}").into()),
    };
    let (x, updates) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    let axis = c.dim("axis", Some(-2), c.rank(x))?;
    ensure(axis > 0, "replaces whole batches")?;
    let (size, shape) = (c.shape_of(x)[axis], c.shape_of(updates));
    ensure(
        shape.len() == c.rank(x),
        "the update does not fit the cache",
    )?;
    let mut at = c.arange(DType::I64, shape[axis], Scalar::Int(0), Scalar::Int(1))?;
    let mut beside = vec![1; shape.len()];
    beside[axis] = shape[axis];
    at = c.reshape(at, &beside)?;
    if let Some(start) = inputs.opt(c, 2)? {
        let mut beside = vec![1; shape.len()];
        beside[0] = shape[0];
        let start = c.cast(start, DType::I64)?;
        let start = c.reshape(start, &beside)?;
        at = c.step(OpKind::Add, &[], &[start, at])?;
    }
    if is_circular {
        let size = Operand::Scalar(Scalar::Int(size as i64));
        at = c.remainder(Operand::Tensor(at), size, DType::I64)?;
    }
    let at = c.expand(at, &shape)?;
    one(c.step(OpKind::Scatter, &[dim_attr(axis)], &[x, at, updates])?)
}

/// One of two values at each class.
fn one_hot(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let index = inputs.at(c, 0)?;
    let rank = c.rank(index);
    let axis = c.dim("axis", Some(-1), rank + 1)?;
    let depth = inputs.opt_number(1)?.ok_or("input 1 is missing")?.float();
    ensure((0.0..1e9).contains(&depth), "the depth is no size")?;
    let mut shape = c.shape_of(index);
    shape.insert(axis, 1);
    let index = wrapped(c, index, depth as u64)?;
    let index = c.reshape(index, &shape)?;
    shape[axis] = depth as u64;
    let is_class = c.is_class(index, axis, shape[axis])?;
    let values = inputs.at(c, 2)?;
    let (off, on) = (c.select(values, 0, 0)?, c.select(values, 0, 1)?);
    one(c.step(OpKind::Where, &[], &[is_class, on, off])?)
}

fn eye_like(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let ty = inputs.get(0).ok_or("input 0 is missing")?.ty;
    let &[rows, columns] = ty.shape() else {
        return Err("is no matrix".into());
    };
    let dtype = match c.opt_int("dtype")? {
        Some(number) => tensor::dtype(number)?,
        None => ty.dtype(),
    };
    let k = c.int_or("k", 0)?;
    let y = c.diagonals(OpKind::Eq, rows, columns, k)?;
    one(c.cast(y, dtype)?)
}
