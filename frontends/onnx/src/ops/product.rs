//! Products of matrices, and sums of products by their letters.

use super::inputs::{Inputs, Row, flag, op};
use ir::op::OpKind;
use lower::{Call, Ref, Result, Results, Scalar, one, transposed};

pub(super) const OPS: &[Row] = &[op("MatMul", matmul), op("Gemm", gemm), op("Einsum", einsum)];

fn matmul(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (a, b) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    one(c.general_product(a, b)?)
}

/// `alpha a b + beta c`
fn gemm(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let (alpha, beta) = (c.float_or("alpha", 1.0)?, c.float_or("beta", 1.0)?);
    let sides = transposed(flag(c, "transA", false)?, flag(c, "transB", false)?);
    let (mut a, b) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    if alpha != 1.0 {
        a = c.scalar_step(OpKind::MulScalar, a, Scalar::Float(alpha))?;
    }
    let Some(mut summand) = inputs.opt(c, 2)?.filter(|_| beta != 0.0) else {
        return one(c.step(OpKind::Matmul, &sides, &[a, b])?);
    };
    if beta != 1.0 {
        summand = c.scalar_step(OpKind::MulScalar, summand, Scalar::Float(beta))?;
    }
    one(c.step(OpKind::Addmm, &sides, &[summand, a, b])?)
}

fn einsum(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let equation = c.string_or("equation", "")?;
    let operands: Result<Vec<Ref>> = (0..inputs.len()).map(|i| inputs.at(c, i)).collect();
    one(c.einsum(&equation, &operands?)?)
}
