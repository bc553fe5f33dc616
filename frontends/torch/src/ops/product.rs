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
