//! The same elements under another name or in another element type.

use super::Family;
use lower::{Call, Result, Results, one};

pub(super) const OPS: Family = &[
    ("alias", same),
    ("alias_copy", same),
    ("clone", same),
    ("contiguous", same),
    ("detach", same),
    ("detach_", same),
    ("detach_copy", same),
    ("lift_fresh", same),
    ("lift_fresh_copy", same),
    ("_to_copy", |c| convert(c, "self")),
    ("to", |c| convert(c, "self")),
    ("type_as", |c| convert(c, "self")),
    ("prims.convert_element_type", |c| convert(c, "a")),
    ("copy", copy),
];

fn same(c: &mut Call<'_>) -> Result<Results> {
    one(c.tensor("self")?)
}

fn convert(c: &mut Call<'_>, operand: &str) -> Result<Results> {
    let x = c.tensor(operand)?;
    c.opt_dtype("dtype")?;
    c.ignore(&["other"]);
    let dtype = c.result()?.dtype();
    one(c.cast(x, dtype)?)
}

fn copy(c: &mut Call<'_>) -> Result<Results> {
    let (x, source) = (c.tensor("self")?, c.tensor("src")?);
    let shape = c.shape_of(x);
    let source = c.cast(source, c.dtype(x))?;
    one(c.expand(source, &shape)?)
}
