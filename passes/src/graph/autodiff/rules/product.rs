//! Products of matrices.

use super::{Call, Fault, Given};
use crate::graph::autodiff::adjoints::Adjoint;
use crate::graph::autodiff::tape::{Made, Tape};
use ir::op::attrs::{GroupedProduct, Product};
use ir::{Op, Value};

pub(in super::super) fn product(t: &mut Tape<'_>, c: &Call<'_>) -> Given {
    let dy = c.dy;
    match c.op {
        Op::Matmul(flags) => {
            let factors = [c.inputs[0], c.inputs[1]];
            factors_of(t, flags, factors, [c.needs[0], c.needs[1]], dy)
        }
        // c + a b
        Op::Addmm(flags) => {
            let added = match c.needs[0] {
                true => Some(t.unbroadcast(dy, &t.shape(c.inputs[0]))?.into()),
                false => None,
            };
            let factors = [c.inputs[1], c.inputs[2]];
            let mut given = factors_of(t, flags, factors, [c.needs[1], c.needs[2]], dy)?;
            given.insert(0, added);
            Ok(given)
        }
        // The result is f32, the factors are in half precision.
        Op::MatmulSum(flags) => {
            let factors = [c.inputs[0], c.inputs[1]];
            let rounded = t.cast(dy, t.dtype(factors[0]))?;
            let mut given = factors_of(t, flags, factors, [c.needs[0], c.needs[1]], rounded)?;
            given.push(Some(dy.into()));
            Ok(given)
        }
        // The weights' adjoint comes first, as in `factors_of`.
        Op::GroupedMatmul(GroupedProduct { tb }) => {
            let [x, w, ends] = [c.inputs[0], c.inputs[1], c.inputs[2]];
            let [first, second] = if *tb { [dy, x] } else { [x, dy] };
            let dw = match c.needs[1] {
                true => Some(t.one(Op::GroupedOuter, &[first, second, ends])?.into()),
                false => None,
            };
            let dx = match c.needs[0] {
                true => Some(t.one(grouped(!tb), &[dy, w, ends])?.into()),
                false => None,
            };
            Ok(vec![dx, dw, None])
        }
        Op::GroupedOuter => {
            let [x, y, ends] = [c.inputs[0], c.inputs[1], c.inputs[2]];
            let mut of = |needed: bool, other: Value, tb: bool| -> Result<_, Fault> {
                match needed {
                    true => Ok(Some(t.one(grouped(tb), &[other, dy, ends])?.into())),
                    false => Ok(None),
                }
            };
            let dx = of(c.needs[0], y, true)?;
            let dy = of(c.needs[1], x, false)?;
            Ok(vec![dx, dy, None])
        }
        _ => Err(Fault::STRAY),
    }
}

fn grouped(tb: bool) -> Op {
    Op::GroupedMatmul(GroupedProduct { tb })
}

/// The adjoints of the factors of a b, of which `flags` transposes some. That of a parameter comes
/// first: its update can follow at once, and what it reads may leave memory before the other one
/// takes some.
fn factors_of(
    t: &mut Tape<'_>,
    flags: &Product,
    [a, b]: [Value; 2],
    needs: [bool; 2],
    dy: Value,
) -> Given {
    let &Product { ta, tb } = flags;
    let mut given: Vec<Option<Adjoint>> = vec![None, None];
    let order = if t.is_state(a) { [0, 1] } else { [1, 0] };
    for i in order.into_iter().filter(|&i| needs[i]) {
        let d = match (i, ta, tb) {
            (0, false, _) => multiply(t, dy, b, false, !tb)?,
            (0, true, _) => multiply(t, b, dy, tb, true)?,
            (_, _, false) => multiply(t, a, dy, !ta, false)?,
            (_, _, true) => multiply(t, dy, a, true, ta)?,
        };
        given[i] = Some(d.into());
    }
    Ok(given)
}

/// The product of two matrices, or of each pair of matrices.
pub(super) fn multiply(t: &mut Tape<'_>, a: Value, b: Value, ta: bool, tb: bool) -> Made {
    t.one(Op::Matmul(Product { ta, tb }), &[a, b])
}
