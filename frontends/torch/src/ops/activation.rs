//! Activations. Those that the table of ops has are in `unary`.

use super::Family;
use super::unary::composed;
use ir::op::OpKind;
use lower::{Call, Range, Result, Results, Scalar, ensure, one};

pub(super) const OPS: Family = &[
    ("celu", |c| {
        let alpha = c.float_or("alpha", 1.0)?;
        exponential(c, [1.0, alpha, alpha])
    }),
    ("elu", elu),
    ("glu", glu),
    ("hardshrink", |c| shrink(c, false)),
    ("hardsigmoid", hard_sigmoid),
    ("hardswish", hard_swish),
    ("hardtanh", hardtanh),
    ("leaky_relu", leaky_relu),
    ("log_sigmoid", |c| composed(c, Call::log_sigmoid)),
    ("mish", |c| composed(c, Call::mish)),
    ("prelu", prelu),
    ("_prelu_kernel", prelu),
    ("relu6", |c| bounded(c, Scalar::Int(0), Scalar::Int(6))),
    ("selu", |c| {
        exponential(c, [SELU_SCALE, SELU_SCALE * SELU_ALPHA, 1.0])
    }),
    ("softplus", softplus),
    ("softshrink", |c| shrink(c, true)),
    ("threshold", threshold),
];

const SELU_ALPHA: f64 = 1.673_263_242_354_377_2;
const SELU_SCALE: f64 = 1.050_700_987_355_480_5;

/// Beyond this operand torch's softplus is its operand. Ours has the same bits in f32 without it.
const SOFTPLUS_THRESHOLD: f64 = 20.0;

fn exponential(c: &mut Call<'_>, factors: [f64; 3]) -> Result<Results> {
    let x = c.tensor("self")?;
    one(c.exponential_unit(x, factors)?)
}

fn elu(c: &mut Call<'_>) -> Result<Results> {
    let (alpha, scale) = (c.float_or("alpha", 1.0)?, c.float_or("scale", 1.0)?);
    let input_scale = c.float_or("input_scale", 1.0)?;
    exponential(c, [scale, alpha * scale, input_scale.recip()])
}

/// One half of a dimension, times the sigmoid of the other.
fn glu(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let dim = c.dim("dim", Some(-1), c.rank(x))?;
    let size = c.shape_of(x)[dim] as i64;
    ensure(size % 2 == 0, "the dimension has no halves")?;
    let value = c.slice(x, dim, Range::new(0, size / 2))?;
    let gate = c.slice(x, dim, Range::new(size / 2, size))?;
    let gate = c.map(OpKind::Sigmoid, gate)?;
    one(c.step(OpKind::Mul, &[], &[value, gate])?)
}

fn shrink(c: &mut Call<'_>, moves: bool) -> Result<Results> {
    let x = c.tensor("self")?;
    let lambda = c.float_or("lambd", 0.5)?;
    one(c.shrink(x, if moves { lambda } else { 0.0 }, lambda)?)
}

fn bounded(c: &mut Call<'_>, low: Scalar, high: Scalar) -> Result<Results> {
    let x = c.tensor("self")?;
    let x = c.cast(x, c.result()?.dtype())?;
    one(c.bounded(x, low, high)?)
}

fn hardtanh(c: &mut Call<'_>) -> Result<Results> {
    let low = c.scalar_or("min_val", Scalar::Float(-1.0))?;
    let high = c.scalar_or("max_val", Scalar::Float(1.0))?;
    bounded(c, low, high)
}

/// `x + 3` between 0 and 6.
fn gate_of_six(c: &mut Call<'_>) -> Result<[lower::Ref; 2]> {
    let x = c.tensor("self")?;
    let gate = c.scalar_step(OpKind::AddScalar, x, Scalar::Int(3))?;
    Ok([x, c.bounded(gate, Scalar::Int(0), Scalar::Int(6))?])
}

fn hard_sigmoid(c: &mut Call<'_>) -> Result<Results> {
    let [_, gate] = gate_of_six(c)?;
    one(c.scalar_step(OpKind::DivScalar, gate, Scalar::Int(6))?)
}

fn hard_swish(c: &mut Call<'_>) -> Result<Results> {
    let [x, gate] = gate_of_six(c)?;
    let y = c.step(OpKind::Mul, &[], &[x, gate])?;
    one(c.scalar_step(OpKind::DivScalar, y, Scalar::Int(6))?)
}

fn leaky_relu(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let slope = c.scalar_or("negative_slope", Scalar::Float(0.01))?;
    one(c.leaky(x, x, slope)?)
}

/// The slope is one number, or one for each channel.
fn prelu(c: &mut Call<'_>) -> Result<Results> {
    let (x, mut slope) = (c.tensor("self")?, c.tensor("weight")?);
    let (rank, n) = (c.rank(x), c.ty(slope).numel());
    if c.rank(slope) == 1 {
        let mut beside = vec![1; rank];
        if rank >= 2 {
            beside[1] = n;
        } else {
            ensure(n == 1, "there are no channels")?;
        }
        slope = c.reshape(slope, &beside)?;
    }
    one(c.parametric_leaky(x, slope)?)
}

fn softplus(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let beta = c.float_or("beta", 1.0)?;
    let threshold = c.float_or("threshold", SOFTPLUS_THRESHOLD)?;
    let scaled = match beta {
        1.0 => x,
        _ => c.scalar_step(OpKind::MulScalar, x, Scalar::Float(beta))?,
    };
    let mut y = c.softplus(scaled)?;
    if beta != 1.0 {
        y = c.scalar_step(OpKind::DivScalar, y, Scalar::Float(beta))?;
    }
    if threshold < SOFTPLUS_THRESHOLD {
        let is_plain = c.scalar_step(OpKind::GtScalar, scaled, Scalar::Float(threshold))?;
        y = c.step(OpKind::Where, &[], &[is_plain, x, y])?;
    }
    one(y)
}

fn threshold(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let (threshold, value) = (c.scalar("threshold")?, c.scalar("value")?);
    one(c.above(x, threshold, value)?)
}
