//! Random numbers and dropout.

use super::inputs::{Inputs, Row, op, op_with};
use crate::tensor;
use ir::op::OpKind;
use ir::{Attr, DType};
use lower::{Call, Error, Result, Results, Scalar, one};

pub(super) const OPS: &[Row] = &[
    op_with("Dropout", &[1, 2], dropout),
    op("RandomNormal", |c, x| random(c, x, OpKind::Randn)),
    op("RandomNormalLike", |c, x| random(c, x, OpKind::Randn)),
    op("RandomUniform", |c, x| random(c, x, OpKind::Rand)),
    op("RandomUniformLike", |c, x| random(c, x, OpKind::Rand)),
];

/// The run's seed replaces the file's.
fn dropout(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    c.ignore(&["seed"]);
    let ratio = inputs.opt_number(1)?.map_or(0.5, Scalar::float);
    let training = inputs
        .opt_number(2)?
        .is_some_and(|flag| flag.float() != 0.0);
    let x = inputs.at(c, 0)?;
    if training && ratio > 0.0 {
        let attrs = [("p", Attr::Float(ratio)), ("stream", c.stream())];
        return lower::all(c.steps(OpKind::Dropout, &attrs, &[x, lower::Ref::Rng])?);
    }
    let shape = c.shape_of(x);
    let mask = c.full(Scalar::Bool(true), DType::Bool, &shape)?;
    lower::all(vec![x, mask])
}

fn random(c: &mut Call<'_>, inputs: &Inputs<'_>, op: OpKind) -> Result<Results> {
    c.ignore(&["seed"]);
    let like = inputs.get(0).map(|input| input.ty.clone());
    let dtype = match (c.opt_int("dtype")?, &like) {
        (Some(number), _) => tensor::dtype(number)?,
        (None, Some(ty)) => ty.dtype(),
        (None, None) => DType::F32,
    };
    let shape = match like {
        Some(ty) => ty.shape().to_vec(),
        None => c.shape("shape")?,
    };
    let between = match op {
        OpKind::Randn => (c.float_or("mean", 0.0)?, c.float_or("scale", 1.0)?),
        OpKind::Rand => {
            let (low, high) = (c.float_or("low", 0.0)?, c.float_or("high", 1.0)?);
            (low, high - low)
        }
        _ => return Err(Error::NoOp),
    };
    one(c.random_between(op, dtype, &shape, between)?)
}
