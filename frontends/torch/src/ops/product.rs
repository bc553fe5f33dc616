//! Products of matrices and vectors.

use super::Family;
use ir::op::OpKind;
use lower::{Call, Operand, Ref, Result, Results, Scalar, ensure, one, transposed};

pub(super) const OPS: Family = &[
    ("mm", |c| product(c, 2)),
    ("bmm", |c| product(c, 3)),
    ("addmm", |c| {
        let (a, b) = (c.tensor("mat1")?, c.tensor("mat2")?);
        add_product(c, a, b)
    }),
    ("baddbmm", |c| {
        let (a, b) = (c.tensor("batch1")?, c.tensor("batch2")?);
        add_product(c, a, b)
    }),
    ("mv", |c| general(c, "vec")),
    ("dot", |c| general(c, "tensor")),
    ("vdot", |c| general(c, "other")),
    ("matmul", |c| general(c, "other")),
    ("linear", linear),
    ("outer", outer),
    ("einsum", |c| {
        c.ignore(&["path"]);
        let equation = c.string_or("equation", "")?;
        let operands = c.tensors("tensors")?;
        one(c.einsum(&equation, &operands)?)
    }),
    ("addmv", |c| {
        let (a, b) = (c.tensor("mat")?, c.tensor("vec")?);
        add_general_product(c, a, b)
    }),
    ("cosine_similarity", cosine_similarity),
    ("pairwise_distance", |c| {
        let (a, b) = (c.tensor("x1")?, c.tensor("x2")?);
        let keepdim = c.bool_or("keepdim", false)?;
        one(distance(c, [a, b], keepdim)?)
    }),
    ("cdist", all_distances),
    ("triplet_margin_loss", triplet_margin_loss),
];

fn product(c: &mut Call<'_>, rank: usize) -> Result<Results> {
    let (a, b) = (c.tensor("self")?, c.tensor("mat2")?);
    ensure(c.rank(a) == rank, "the factors have another rank")?;
    one(c.product(a, b)?)
}

/// `beta x + alpha a b`
fn add_product(c: &mut Call<'_>, a: Ref, b: Ref) -> Result<Results> {
    let x = c.tensor("self")?;
    let beta = c.scalar_or("beta", Scalar::Int(1))?;
    let alpha = c.scalar_or("alpha", Scalar::Int(1))?;
    let dtype = c.result()?.dtype();
    // torch does not read the summand if it is multiplied by zero.
    let x = if beta.float() == 0.0 {
        None
    } else {
        Some(c.scaled(Operand::Tensor(x), beta, dtype)?)
    };
    if let (Some(Operand::Tensor(x)), true) = (x, alpha.float() == 1.0) {
        return one(c.step(OpKind::Addmm, &transposed(false, false), &[x, a, b])?);
    }
    let y = c.product(a, b)?;
    let y = c.scaled(Operand::Tensor(y), alpha, dtype)?;
    match (x, y) {
        (Some(x), y) => one(c.arithmetic(OpKind::Add, x, y, dtype)?),
        (None, Operand::Tensor(y)) => one(y),
        (None, Operand::Scalar(_)) => Err("a product is no number".into()),
    }
}

/// `beta x + alpha a b`, of any ranks.
fn add_general_product(c: &mut Call<'_>, a: Ref, b: Ref) -> Result<Results> {
    let x = c.tensor("self")?;
    let beta = c.scalar_or("beta", Scalar::Int(1))?;
    let alpha = c.scalar_or("alpha", Scalar::Int(1))?;
    let dtype = c.result()?.dtype();
    let y = c.general_product(a, b)?;
    let y = c.scaled(Operand::Tensor(y), alpha, dtype)?;
    let x = c.scaled(Operand::Tensor(x), beta, dtype)?;
    one(c.arithmetic(OpKind::Add, x, y, dtype)?)
}

/// The product of two vectors, each divided by its length, which is at least `eps`.
fn cosine_similarity(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.tensor("x1")?, c.tensor("x2")?);
    let eps = c.float_or("eps", 1e-8)?;
    let shape = ir::op::broadcast_shapes(c.ty(a).shape(), c.ty(b).shape())?;
    let dim = c.dim("dim", Some(1), shape.len())?;
    let mut sides = vec![];
    for x in [a, b] {
        let x = c.expand(x, &shape)?;
        let length = c.norm(x, 2.0, &[dim], true)?;
        let length = c.clamp(length, Some(Scalar::Float(eps)), None, c.dtype(x))?;
        sides.push(c.step(OpKind::Div, &[], &[x, length])?);
    }
    let product = c.step(OpKind::Mul, &[], &sides)?;
    one(c.reduce(OpKind::Sum, product, &[dim], false)?)
}

/// `|a - b + eps|` over the last dimension.
fn distance(c: &mut Call<'_>, [a, b]: [Ref; 2], keepdim: bool) -> Result<Ref> {
    let (order, eps) = (c.float_or("p", 2.0)?, c.float_or("eps", 1e-6)?);
    let d = c.step(OpKind::Sub, &[], &[a, b])?;
    let d = c.scalar_step(OpKind::AddScalar, d, Scalar::Float(eps))?;
    let last = c.rank(d).checked_sub(1).ok_or("has no dimension")?;
    c.norm(d, order, &[last], keepdim)
}

/// The distances of each row of one matrix from each row of another.
fn all_distances(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.tensor("x1")?, c.tensor("x2")?);
    let order = c.float_or("p", 2.0)?;
    // It chooses how torch computes.
    c.ignore(&["compute_mode"]);
    let beside = |c: &mut Call<'_>, x: Ref, back: usize| {
        let mut shape = c.shape_of(x);
        let at = shape.len().checked_sub(back).ok_or("is no matrix")?;
        shape.insert(at, 1);
        c.reshape(x, &shape)
    };
    let (a, b) = (beside(c, a, 1)?, beside(c, b, 2)?);
    let d = c.step(OpKind::Sub, &[], &[a, b])?;
    let last = c.rank(d) - 1;
    one(c.norm(d, order, &[last], false)?)
}

/// How much farther the positive is than the negative, with a margin.
fn triplet_margin_loss(c: &mut Call<'_>) -> Result<Results> {
    let (anchor, positive) = (c.tensor("anchor")?, c.tensor("positive")?);
    let negative = c.tensor("negative")?;
    let margin = c.float_or("margin", 1.0)?;
    let near = distance(c, [anchor, positive], false)?;
    let mut far = distance(c, [anchor, negative], false)?;
    if c.bool_or("swap", false)? {
        let other = distance(c, [positive, negative], false)?;
        far = c.step(OpKind::Minimum, &[], &[far, other])?;
    }
    let d = c.step(OpKind::Sub, &[], &[near, far])?;
    let d = c.scalar_step(OpKind::AddScalar, d, Scalar::Float(margin))?;
    let loss = c.map(OpKind::Relu, d)?;
    super::loss::reduced(c, loss)
}

fn general(c: &mut Call<'_>, other: &str) -> Result<Results> {
    let (a, b) = (c.tensor("self")?, c.tensor(other)?);
    one(c.general_product(a, b)?)
}

fn linear(c: &mut Call<'_>) -> Result<Results> {
    let (x, w) = (c.tensor("input")?, c.tensor("weight")?);
    let bias = c.opt_tensor("bias")?;
    one(c.linear(x, w, bias)?)
}

fn outer(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.tensor("self")?, c.tensor("vec2")?);
    let column = [c.ty(a).numel(), 1];
    let a = c.reshape(a, &column)?;
    one(c.step(OpKind::Mul, &[], &[a, b])?)
}
