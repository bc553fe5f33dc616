//! Tensors of equal or of evenly spaced numbers.

use super::Family;
use ir::op::OpKind;
use lower::{Call, Error, Operand, Result, Results, Scalar, one};

pub(super) const OPS: Family = &[
    ("full", |c| filled(c, "fill_value")),
    ("new_full", |c| filled(c, "fill_value")),
    ("full_like", |c| filled_like(c, "fill_value")),
    ("zeros", |c| sized(c, ZERO)),
    ("ones", |c| sized(c, ONE)),
    ("new_zeros", |c| sized(c, ZERO)),
    ("new_ones", |c| sized(c, ONE)),
    ("zeros_like", |c| like(c, ZERO)),
    ("ones_like", |c| like(c, ONE)),
    ("zero", |c| like(c, ZERO)),
    // No result depends on the contents of an empty tensor, but they should be the same in every
    // run.
    ("empty", |c| sized(c, ZERO)),
    ("empty_permuted", |c| sized(c, ZERO)),
    ("empty_strided", |c| sized(c, ZERO)),
    ("new_empty", |c| sized(c, ZERO)),
    ("new_empty_strided", |c| sized(c, ZERO)),
    ("empty_like", |c| like(c, ZERO)),
    ("scalar_tensor", scalar_tensor),
    ("fill", fill),
    ("arange", arange),
    ("eye", eye),
];

const ZERO: Scalar = Scalar::Int(0);
const ONE: Scalar = Scalar::Int(1);

/// One number, in the element type of the result.
fn full(c: &mut Call<'_>, value: Scalar, shape: &[u64]) -> Result<Results> {
    c.opt_dtype("dtype")?;
    c.ignore(&["stride"]);
    let dtype = c.result()?.dtype();
    one(c.full(value, dtype, shape)?)
}

fn sized(c: &mut Call<'_>, value: Scalar) -> Result<Results> {
    c.ignore(&["self"]);
    let shape = c.shape("size")?;
    full(c, value, &shape)
}

fn like(c: &mut Call<'_>, value: Scalar) -> Result<Results> {
    let x = c.tensor("self")?;
    let shape = c.shape_of(x);
    full(c, value, &shape)
}

fn filled(c: &mut Call<'_>, value: &str) -> Result<Results> {
    let value = c.scalar(value)?;
    sized(c, value)
}

fn filled_like(c: &mut Call<'_>, value: &str) -> Result<Results> {
    let value = c.scalar(value)?;
    like(c, value)
}

fn scalar_tensor(c: &mut Call<'_>) -> Result<Results> {
    let value = c.scalar("s")?;
    full(c, value, &[])
}

fn fill(c: &mut Call<'_>) -> Result<Results> {
    match c.operand("value")? {
        Operand::Scalar(value) => like(c, value),
        Operand::Tensor(value) => {
            let x = c.tensor("self")?;
            let (value, shape) = (c.cast(value, c.dtype(x))?, c.shape_of(x));
            one(c.expand(value, &shape)?)
        }
    }
}

fn arange(c: &mut Call<'_>) -> Result<Results> {
    let (start, step) = (c.scalar_or("start", ZERO)?, c.scalar_or("step", ONE)?);
    let end = c.scalar("end")?;
    c.opt_dtype("dtype")?;
    let dtype = c.result()?.dtype();
    one(c.arange_to(dtype, start, end, step)?)
}

fn eye(c: &mut Call<'_>) -> Result<Results> {
    let size = |n: i64| u64::try_from(n).map_err(|_| Error::from("the size is negative"));
    let rows = size(c.int("n")?)?;
    let columns = c.opt_int("m")?.map_or(Ok(rows), size)?;
    c.opt_dtype("dtype")?;
    let y = c.diagonals(OpKind::Eq, rows, columns, 0)?;
    let dtype = c.result()?.dtype();
    one(c.cast(y, dtype)?)
}
