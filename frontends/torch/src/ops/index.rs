//! Reading and writing at indices.

use super::Family;
use ir::op::OpKind;
use ir::{Attr, DType};
use lower::{Call, Indexed, Operand, Result, Results, Scalar, ensure, one};

pub(super) const OPS: Family = &[
    ("embedding", embedding),
    ("embedding_dense_backward", embedding_backward),
    ("embedding_bag", embedding_bag),
    ("one_hot", one_hot),
    ("index_fill.int_Scalar", index_fill),
    ("index_fill.int_Tensor", index_fill),
    ("index_copy", index_copy),
    ("gather", |c| gather(c, "index")),
    ("take_along_dim", |c| gather(c, "indices")),
    ("scatter", |c| scatter(c, Scatter::Replace)),
    ("scatter.value", scatter_value),
    ("scatter_add", |c| scatter(c, Scatter::Add)),
    ("scatter_reduce", scatter_reduce),
    ("index", index),
    ("_unsafe_index", index),
    ("index_put", index_put),
    ("_unsafe_index_put", index_put),
    ("index_select", index_select),
    ("index_add", index_add),
];

fn dim_attr(dim: usize) -> (&'static str, Attr) {
    ("dim", Attr::Int(dim as i64))
}

// --- tables ---

fn embedding(c: &mut Call<'_>) -> Result<Results> {
    let (w, index) = (c.tensor("weight")?, c.tensor("indices")?);
    // These concern the gradient. A forward alone needs the padding for it.
    c.ignore(&["scale_grad_by_freq", "sparse"]);
    let padding = c.int_or("padding_idx", -1)?.max(-1);
    one(c.step(
        OpKind::Embedding,
        &[("padding", Attr::Int(padding))],
        &[w, index],
    )?)
}

fn embedding_backward(c: &mut Call<'_>) -> Result<Results> {
    let (dy, index) = (c.tensor("grad_output")?, c.tensor("indices")?);
    let (rows, padding) = (c.int("num_weights")?, c.int("padding_idx")?);
    let by_frequency = c.bool_or("scale_grad_by_freq", false)?;
    ensure(!by_frequency, "scales by frequency")?;
    let attrs = [
        ("padding", Attr::Int(padding.max(-1))),
        ("rows", Attr::Int(rows)),
    ];
    one(c.step(OpKind::EmbeddingBwd, &attrs, &[dy, index])?)
}

/// Sums or means of rows of a table. The bags are equally long: torch's module makes the offsets of
/// a matrix of indices from its shape. The other results are for torch's own derivative.
fn embedding_bag(c: &mut Call<'_>) -> Result<Results> {
    let (w, index) = (c.tensor("weight")?, c.tensor("indices")?);
    let offsets = c.tensor("offsets")?;
    c.ignore(&["scale_grad_by_freq", "sparse"]);
    ensure(
        !c.bool_or("include_last_offset", false)?,
        "bags of different lengths",
    )?;
    let padding = c.opt_int("padding_idx")?.unwrap_or(-1);
    ensure(padding < 0, "bags with a padding index")?;
    ensure(
        c.opt_tensor("per_sample_weights")?.is_none(),
        "bags with weights of their own",
    )?;
    let (n, bags) = (c.ty(index).numel(), c.ty(offsets).numel());
    ensure(
        bags > 0 && n.is_multiple_of(bags) && c.counts_by(offsets, (n / bags) as i64),
        "bags of different lengths",
    )?;
    let index = c.reshape(index, &[bags, n / bags])?;
    let rows = c.step(
        OpKind::Embedding,
        &[("padding", Attr::Int(-1))],
        &[w, index],
    )?;
    let op = match c.int_or("mode", 0)? {
        0 => OpKind::Sum,
        1 => OpKind::Mean,
        _ => OpKind::Amax,
    };
    let mut results = vec![Some(c.reduce(op, rows, &[1], false)?)];
    for i in 1..c.n_results() {
        results.push(c.placeholder(i)?);
    }
    Ok(results)
}

fn one_hot(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    c.ignore(&["num_classes"]);
    let (rank, shape) = (c.rank(x), c.result()?.shape().to_vec());
    let classes = *shape.last().ok_or("there are no classes")?;
    let beside = [&c.shape_of(x)[..], &[1]].concat();
    let x = c.cast(x, DType::I64)?;
    let x = c.reshape(x, &beside)?;
    let is_class = c.is_class(x, rank, classes)?;
    one(c.cast(is_class, DType::I64)?)
}

// --- along a dimension ---

fn gather(c: &mut Call<'_>, index: &str) -> Result<Results> {
    let (x, index) = (c.tensor("self")?, c.tensor(index)?);
    let dim = c.dim("dim", None, c.rank(x))?;
    c.bool_or("sparse_grad", false)?;
    ensure(c.rank(x) == c.rank(index), "the index has another rank")?;
    one(c.step(OpKind::Gather, &[dim_attr(dim)], &[x, index])?)
}

/// How an operator changes an element.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scatter {
    Replace,
    Add,
    /// By the argument `reduce`, with the old elements if `include_self`.
    Reduce,
}

/// The op for an operator and its argument `reduce`.
fn scatter_op(c: &mut Call<'_>, what: Scatter) -> Result<OpKind> {
    let reduce = c.string_or("reduce", "")?;
    match (what, reduce.as_str()) {
        (Scatter::Replace, "") => Ok(OpKind::Scatter),
        (Scatter::Add, _) | (_, "add") => Ok(OpKind::ScatterAdd),
        (Scatter::Reduce, "sum") if c.bool_or("include_self", true)? => Ok(OpKind::ScatterAdd),
        _ => Err(format!("no scatter that reduces by {reduce:?}").into()),
    }
}

fn scatter(c: &mut Call<'_>, what: Scatter) -> Result<Results> {
    let (x, index) = (c.tensor("self")?, c.tensor("index")?);
    let dim = c.dim("dim", None, c.rank(x))?;
    let op = scatter_op(c, what)?;
    let source = c.tensor("src")?;
    one(c.step(op, &[dim_attr(dim)], &[x, index, source])?)
}

/// Sums, or means, of which the old element may be a part.
fn scatter_reduce(c: &mut Call<'_>) -> Result<Results> {
    if c.string_or("reduce", "")? != "mean" {
        return scatter(c, Scatter::Reduce);
    }
    let (x, index, source) = (c.tensor("self")?, c.tensor("index")?, c.tensor("src")?);
    let dim = [dim_attr(c.dim("dim", None, c.rank(x))?)];
    let include_self = c.bool_or("include_self", true)?;
    ensure(c.dtype(x).is_float(), "means of integers")?;
    let (dtype, shape) = (c.dtype(x), c.shape_of(x));
    let unit = c.full(Scalar::Int(1), dtype, &c.shape_of(index))?;
    let none = c.full(Scalar::Int(0), dtype, &shape)?;
    let n = c.step(OpKind::ScatterAdd, &dim, &[none, index, unit])?;
    let is_changed = c.scalar_step(OpKind::GtScalar, n, Scalar::Int(0))?;
    if include_self {
        let sum = c.step(OpKind::ScatterAdd, &dim, &[x, index, source])?;
        let n = c.scalar_step(OpKind::AddScalar, n, Scalar::Int(1))?;
        return one(c.step(OpKind::Div, &[], &[sum, n])?);
    }
    let sum = c.step(OpKind::ScatterAdd, &dim, &[none, index, source])?;
    let least = Some(Scalar::Int(1));
    let n = c.clamp(n, least, None, dtype)?;
    let mean = c.step(OpKind::Div, &[], &[sum, n])?;
    one(c.step(OpKind::Where, &[], &[is_changed, mean, x])?)
}

fn scatter_value(c: &mut Call<'_>) -> Result<Results> {
    let (x, index) = (c.tensor("self")?, c.tensor("index")?);
    let dim = c.dim("dim", None, c.rank(x))?;
    let value = c.scalar("value")?.attr(c.dtype(x))?;
    let attrs = [dim_attr(dim), ("value", value)];
    one(c.step(OpKind::ScatterValue, &attrs, &[x, index])?)
}

// --- by tensors of indices ---

fn index(c: &mut Call<'_>) -> Result<Results> {
    let (x, indices) = (c.tensor("self")?, c.opt_tensors("indices")?);
    if indices.iter().all(Option::is_none) {
        return one(x);
    }
    one(Indexed::new(c, x, &indices)?.get(c)?)
}

fn index_put(c: &mut Call<'_>) -> Result<Results> {
    let (x, indices) = (c.tensor("self")?, c.opt_tensors("indices")?);
    let values = c.tensor("values")?;
    let accumulate = c.bool_or("accumulate", false)?;
    c.ignore(&["unsafe"]);
    // Writing one value where a mask is true needs no sizes that depend on the data.
    if let [Some(mask)] = indices[..]
        && c.dtype(mask) == DType::Bool
        && c.ty(values).numel() == 1
        && !accumulate
    {
        let mut shape = c.shape_of(mask);
        ensure(shape.len() <= c.rank(x), "the mask has more dimensions")?;
        shape.resize(c.rank(x), 1);
        let (mask, value) = (c.reshape(mask, &shape)?, c.reshape(values, &[])?);
        return one(c.step(OpKind::Where, &[], &[mask, value, x])?);
    }
    one(Indexed::new(c, x, &indices)?.put(c, values, accumulate)?)
}

fn index_select(c: &mut Call<'_>) -> Result<Results> {
    let (x, index) = (c.tensor("self")?, c.tensor("index")?);
    let dim = c.dim("dim", None, c.rank(x))?;
    one(Indexed::along(c, x, dim, index)?.get(c)?)
}

fn index_fill(c: &mut Call<'_>) -> Result<Results> {
    let (x, index, value) = (c.tensor("self")?, c.tensor("index")?, c.operand("value")?);
    let dim = c.dim("dim", None, c.rank(x))?;
    let value = c.whole(value, c.dtype(x))?;
    one(Indexed::along(c, x, dim, index)?.put(c, value, false)?)
}

fn index_copy(c: &mut Call<'_>) -> Result<Results> {
    let (x, index, source) = (c.tensor("self")?, c.tensor("index")?, c.tensor("source")?);
    let dim = c.dim("dim", None, c.rank(x))?;
    one(Indexed::along(c, x, dim, index)?.put(c, source, false)?)
}

fn index_add(c: &mut Call<'_>) -> Result<Results> {
    let (x, index) = (c.tensor("self")?, c.tensor("index")?);
    let source = c.tensor("source")?;
    let dim = c.dim("dim", None, c.rank(x))?;
    let alpha = c.scalar_or("alpha", Scalar::Int(1))?;
    let Operand::Tensor(source) = c.scaled(Operand::Tensor(source), alpha, c.dtype(x))? else {
        return Err("the source is no tensor".into());
    };
    one(Indexed::along(c, x, dim, index)?.put(c, source, true)?)
}
