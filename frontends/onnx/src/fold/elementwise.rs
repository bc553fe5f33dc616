//! Functions of elements.

use super::{Fold, Folding, indices, picked, place};
use crate::tensor::{self, Elements, Numbers};
use ir::DType;

pub(super) const OPS: &[(&str, Fold)] = &[
    ("Identity", |f| Some(vec![f.at(0)?.clone()])),
    ("Cast", |f| {
        cast(f, tensor::dtype(f.attributes.int("to")?).ok()?)
    }),
    ("CastLike", |f| {
        cast(f, f.types.get(1).copied().flatten()?.dtype())
    }),
    ("Neg", |f| unary(f, i64::checked_neg, |x| -x)),
    ("Abs", |f| unary(f, i64::checked_abs, f64::abs)),
    ("Sign", |f| {
        unary(
            f,
            |x| Some(x.signum()),
            |x| if x == 0.0 { x } else { x.signum() },
        )
    }),
    ("Not", |f| unary(booleans(f)?, |x| Some(1 - x), |x| x)),
    ("Floor", |f| unary(f, Some, f64::floor)),
    ("Ceil", |f| unary(f, Some, f64::ceil)),
    ("Round", |f| unary(f, Some, f64::round_ties_even)),
    ("Relu", |f| {
        unary(f, |x| Some(x.max(0)), |x| if x < 0.0 { 0.0 } else { x })
    }),
    ("Sqrt", |f| unary(f, |_| None, f64::sqrt)),
    ("Reciprocal", |f| unary(f, |_| None, f64::recip)),
    ("Exp", |f| unary(f, |_| None, f64::exp)),
    ("Log", |f| unary(f, |_| None, f64::ln)),
    ("Add", |f| binary(f, i64::checked_add, |a, b| a + b)),
    ("Sub", |f| binary(f, i64::checked_sub, |a, b| a - b)),
    ("Mul", |f| binary(f, i64::checked_mul, |a, b| a * b)),
    ("Div", |f| binary(f, i64::checked_div, |a, b| a / b)),
    ("Mod", modulo),
    ("Pow", |f| binary(f, power, f64::powf)),
    ("Max", |f| {
        combined(
            f,
            |a, b| Some(a.max(b)),
            |a, b| if a.is_nan() || a > b { a } else { b },
        )
    }),
    ("Min", |f| {
        combined(
            f,
            |a, b| Some(a.min(b)),
            |a, b| if a.is_nan() || a < b { a } else { b },
        )
    }),
    ("Sum", |f| combined(f, i64::checked_add, |a, b| a + b)),
    ("And", |f| {
        binary(booleans(f)?, |a, b| Some(a & b), |a, _| a)
    }),
    ("Or", |f| binary(booleans(f)?, |a, b| Some(a | b), |a, _| a)),
    ("Xor", |f| {
        binary(booleans(f)?, |a, b| Some(a ^ b), |a, _| a)
    }),
    ("Equal", |f| compare(f, |a, b| a == b, |a, b| a == b)),
    ("Less", |f| compare(f, |a, b| a < b, |a, b| a < b)),
    ("LessOrEqual", |f| compare(f, |a, b| a <= b, |a, b| a <= b)),
    ("Greater", |f| compare(f, |a, b| a > b, |a, b| a > b)),
    ("GreaterOrEqual", |f| {
        compare(f, |a, b| a >= b, |a, b| a >= b)
    }),
    ("Where", select),
    ("IsNaN", |f| {
        let x = f.at(0)?;
        let is_nan = x
            .to_floats()
            .into_iter()
            .map(|x| x.is_nan().into())
            .collect();
        Some(vec![Numbers::ints(DType::Bool, x.ty.shape(), is_nan)?])
    }),
];

/// The node, if all inputs are booleans.
fn booleans<'f, 'n, 'a>(f: &'f Folding<'n, 'a>) -> Option<&'f Folding<'n, 'a>> {
    let is_bool = |x: &Option<&Numbers>| x.is_some_and(|x| x.ty.dtype() == DType::Bool);
    f.inputs.iter().all(is_bool).then_some(f)
}

fn cast(f: &Folding<'_, '_>, dtype: DType) -> Option<Vec<Numbers>> {
    let x = f.at(0)?;
    Some(vec![Numbers::of(dtype, x.ty.shape(), x.elements.clone())?])
}

fn unary(
    f: &Folding<'_, '_>,
    int: fn(i64) -> Option<i64>,
    float: fn(f64) -> f64,
) -> Option<Vec<Numbers>> {
    let x = f.at(0)?;
    let elements = match &x.elements {
        Elements::Ints(list) => {
            Elements::Ints(list.iter().map(|&x| int(x)).collect::<Option<_>>()?)
        }
        Elements::Floats(list) => Elements::Floats(list.iter().map(|&x| float(x)).collect()),
    };
    Some(vec![Numbers::of(x.ty.dtype(), x.ty.shape(), elements)?])
}

/// Two tensors, broadcast against each other, and their shape.
fn broadcast(a: &Numbers, b: &Numbers) -> Option<(Vec<u64>, Elements, Elements)> {
    let shape = ir::op::broadcast_shapes(a.ty.shape(), b.ty.shape()).ok()?;
    let wide = |x: &Numbers| {
        let places: Option<Vec<usize>> = indices(&shape)?
            .iter()
            .map(|index| place(x.ty.shape(), index))
            .collect();
        picked(&x.elements, &places?)
    };
    let (a, b) = (wide(a)?, wide(b)?);
    Some((shape, a, b))
}

fn with(
    a: &Numbers,
    b: &Numbers,
    int: fn(i64, i64) -> Option<i64>,
    float: fn(f64, f64) -> f64,
) -> Option<Numbers> {
    let (shape, x, y) = broadcast(a, b)?;
    let elements = match (x, y) {
        (Elements::Ints(x), Elements::Ints(y)) => {
            let both = x.into_iter().zip(y);
            Elements::Ints(both.map(|(x, y)| int(x, y)).collect::<Option<_>>()?)
        }
        (Elements::Floats(x), Elements::Floats(y)) => {
            Elements::Floats(x.into_iter().zip(y).map(|(x, y)| float(x, y)).collect())
        }
        // Only a power has operands of different kinds.
        (Elements::Floats(x), Elements::Ints(y)) => Elements::Floats(
            x.into_iter()
                .zip(y)
                .map(|(x, y)| float(x, y as f64))
                .collect(),
        ),
        _ => return None,
    };
    Numbers::of(a.ty.dtype(), &shape, elements)
}

fn binary(
    f: &Folding<'_, '_>,
    int: fn(i64, i64) -> Option<i64>,
    float: fn(f64, f64) -> f64,
) -> Option<Vec<Numbers>> {
    Some(vec![with(f.at(0)?, f.at(1)?, int, float)?])
}

fn combined(
    f: &Folding<'_, '_>,
    int: fn(i64, i64) -> Option<i64>,
    float: fn(f64, f64) -> f64,
) -> Option<Vec<Numbers>> {
    let mut y = f.at(0)?.clone();
    for i in 1..f.inputs.len() {
        y = with(&y, f.at(i)?, int, float)?;
    }
    Some(vec![y])
}

fn power(a: i64, b: i64) -> Option<i64> {
    a.checked_pow(u32::try_from(b).ok()?)
}

fn modulo(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let as_c = f.attributes.int("fmod").unwrap_or(0) != 0;
    let of_divisor = |a: i64, b: i64| {
        let rest = a.checked_rem(b)?;
        Some(if rest != 0 && (rest < 0) != (b < 0) {
            rest + b
        } else {
            rest
        })
    };
    binary(
        f,
        if as_c { i64::checked_rem } else { of_divisor },
        |a, b| a % b,
    )
}

fn compare(
    f: &Folding<'_, '_>,
    int: fn(&i64, &i64) -> bool,
    float: fn(&f64, &f64) -> bool,
) -> Option<Vec<Numbers>> {
    let (shape, a, b) = broadcast(f.at(0)?, f.at(1)?)?;
    let all = match (a, b) {
        (Elements::Ints(a), Elements::Ints(b)) => {
            a.iter().zip(&b).map(|(a, b)| int(a, b).into()).collect()
        }
        (Elements::Floats(a), Elements::Floats(b)) => {
            a.iter().zip(&b).map(|(a, b)| float(a, b).into()).collect()
        }
        _ => return None,
    };
    Some(vec![Numbers::ints(DType::Bool, &shape, all)?])
}

fn select(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let (condition, a, b) = (f.at(0)?, f.at(1)?, f.at(2)?);
    let shape = ir::op::broadcast_shapes(a.ty.shape(), b.ty.shape()).ok()?;
    let shape = ir::op::broadcast_shapes(&shape, condition.ty.shape()).ok()?;
    let conditions = condition.as_ints()?;
    let all = indices(&shape)?;
    let wide = |x: &Numbers| {
        let places: Option<Vec<usize>> =
            all.iter().map(|index| place(x.ty.shape(), index)).collect();
        picked(&x.elements, &places?)
    };
    let chosen: Option<Vec<bool>> = all
        .iter()
        .map(|index| Some(*conditions.get(place(condition.ty.shape(), index)?)? != 0))
        .collect();
    let chosen = chosen?.into_iter();
    let elements = match (wide(a)?, wide(b)?) {
        (Elements::Ints(a), Elements::Ints(b)) => {
            let both = a.into_iter().zip(b).zip(chosen);
            Elements::Ints(
                both.map(|((a, b), first)| if first { a } else { b })
                    .collect(),
            )
        }
        (Elements::Floats(a), Elements::Floats(b)) => {
            let both = a.into_iter().zip(b).zip(chosen);
            Elements::Floats(
                both.map(|((a, b), first)| if first { a } else { b })
                    .collect(),
            )
        }
        _ => return None,
    };
    Some(vec![Numbers::of(a.ty.dtype(), &shape, elements)?])
}
