//! Formulas of integers and conditions that depend only on their coordinates. They prove that a
//! mask is causal, whatever comparisons of positions compute it, and that an index is not negative.
//!
//! An integer tensor is known if it is a sum of multiples of its coordinates. A condition is known
//! if it has the form "such a sum is at most 0".

use super::term::{Class, Term, Terms};
use egg::Id;
use ir::op::{Number, Op, broadcast_shapes};
use ir::{DType, TensorType};

/// offset + strides · coordinates. For integers this is the value. A condition holds where it is at
/// most 0.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Known {
    offset: i64,
    strides: Vec<i64>,
}

/// A condition that holds everywhere or nowhere.
fn constant(holds: bool, rank: usize) -> Known {
    Known {
        offset: i64::from(!holds),
        strides: vec![0; rank],
    }
}

impl Known {
    fn is_constant(&self) -> bool {
        self.strides.iter().all(|&s| s == 0)
    }
    /// Whether the condition holds exactly where the last coordinate is at most the one before.
    pub(super) fn is_causal(&self) -> bool {
        let [others @ .., -1, 1] = self.strides.as_slice() else {
            return false;
        };
        self.offset == 0 && others.iter().all(|&s| s == 0)
    }
    /// Whether the condition holds everywhere.
    pub(super) fn is_true(&self) -> bool {
        self.offset == 0 && self.is_constant()
    }
    /// Whether the condition holds nowhere.
    pub(super) fn is_false(&self) -> bool {
        self.offset == 1 && self.is_constant()
    }
    /// a self + b other, in the shape that both broadcast to.
    fn combine(&self, a: i64, other: &Known, b: i64) -> Option<Known> {
        let sum = |x: i64, y: i64| a.checked_mul(x)?.checked_add(b.checked_mul(y)?);
        let pairs = self.strides.iter().zip(&other.strides);
        let strides = pairs.map(|(&x, &y)| sum(x, y)).collect::<Option<_>>()?;
        Some(Known {
            offset: sum(self.offset, other.offset)?,
            strides,
        })
    }
    fn scaled(&self, a: i64) -> Option<Known> {
        self.combine(a, self, 0)
    }
    fn plus(mut self, x: i64) -> Option<Known> {
        self.offset = self.offset.checked_add(x)?;
        Some(self)
    }
    /// The least and the largest number in a tensor of this shape, which is not empty.
    fn range(&self, shape: &[u64]) -> Option<(i64, i64)> {
        let (mut least, mut most) = (self.offset, self.offset);
        for (&d, &stride) in shape.iter().zip(&self.strides) {
            let reach = stride.checked_mul(i64::try_from(d.checked_sub(1)?).ok()?)?;
            (least, most) = (
                least.checked_add(reach.min(0))?,
                most.checked_add(reach.max(0))?,
            );
        }
        Some((least, most))
    }
    /// The condition "at most 0". It is constant if the shape decides it.
    fn condition(self, shape: &[u64]) -> Option<Known> {
        let (least, most) = self.range(shape)?;
        Some(match (most <= 0, 0 < least) {
            (true, _) => constant(true, shape.len()),
            (_, true) => constant(false, shape.len()),
            _ => self,
        })
    }
}

/// The formula of a term's result of type `ty`, if it is known.
pub(super) fn known(terms: &Terms, term: &Term, op: &Op, ty: &TensorType) -> Option<Known> {
    if !matches!(ty.dtype(), DType::I64 | DType::Bool) || ty.numel() == 0 {
        return None;
    }
    let operands: Vec<&Class> = term.operands(terms).map(|id: Id| &terms[id].data).collect();
    let shape = ty.shape();
    let of = |i: usize| operands.get(i)?.known.as_ref();
    // Operand i, broadcast to the shape of the result.
    let read = |i: usize| broadcast(of(i)?, operands[i].types[0].shape(), shape);
    let at_most = |known: Option<Known>| known?.condition(shape);
    let difference = || read(0)?.combine(1, &read(1)?, -1);
    let above = |x: Option<i64>| of(0)?.clone().plus(x?.checked_neg()?);
    let never_negative = || operands.first().is_some_and(|x| x.never_negative);
    match op {
        Op::Arange(a) => Some(Known {
            offset: integer(a.start)?,
            strides: vec![integer(a.step)?],
        }),
        Op::Full(a) if ty.dtype() == DType::Bool => {
            Some(constant(integer(a.value)? != 0, shape.len()))
        }
        Op::Full(a) => Some(Known {
            offset: integer(a.value)?,
            strides: vec![0; shape.len()],
        }),
        Op::Reshape(_) => {
            let from = operands[0].types[0].shape();
            let kept = |shape: &[u64]| {
                shape
                    .iter()
                    .copied()
                    .filter(|&d| d != 1)
                    .collect::<Vec<_>>()
            };
            let x = of(0)?;
            (x.is_constant() || kept(from) == kept(shape)).then_some(())?;
            let mut strides = from
                .iter()
                .zip(&x.strides)
                .filter(|&(&d, _)| d != 1)
                .map(|(_, &s)| s);
            let stride = |&d: &u64| {
                if d == 1 {
                    0
                } else {
                    strides.next().unwrap_or(0)
                }
            };
            Some(Known {
                offset: x.offset,
                strides: shape.iter().map(stride).collect(),
            })
        }
        Op::Expand(_) => read(0),
        Op::Permute(a) => {
            let x = of(0)?;
            let strides = a.dims.iter().map(|&d| x.strides[d as usize]).collect();
            Some(Known {
                offset: x.offset,
                strides,
            })
        }
        Op::Slice(a) => {
            let (mut x, dim) = (of(0)?.clone(), a.dim as usize);
            x.offset = x.offset.checked_add(x.strides[dim].checked_mul(a.start)?)?;
            x.strides[dim] = x.strides[dim].checked_mul(a.step)?;
            Some(x)
        }
        Op::Cat(a) => cat(&operands, a.dim as usize),
        // A running sum of a constant counts up.
        Op::Cumsum(a) => {
            let mut x = of(0).filter(|x| x.is_constant())?.clone();
            x.strides[a.dim as usize] = x.offset;
            Some(x)
        }
        Op::Index => {
            let x = of(0).filter(|x| x.is_constant())?;
            Some(Known {
                offset: x.offset,
                strides: vec![0; shape.len()],
            })
        }
        Op::Cast(_) => {
            let (x, from) = (of(0)?, operands[0].types[0].dtype());
            match (from == DType::Bool, ty.dtype() == DType::Bool) {
                (true, false) if x.is_constant() => Some(Known {
                    offset: i64::from(x.is_true()),
                    ..x.clone()
                }),
                (false, true) if x.is_constant() => Some(constant(x.offset != 0, shape.len())),
                (false, false) => Some(x.clone()),
                _ => None,
            }
        }
        Op::Neg => of(0)?.scaled(-1),
        Op::Add if ty.dtype() != DType::Bool => read(0)?.combine(1, &read(1)?, 1),
        Op::Sub if ty.dtype() != DType::Bool => difference(),
        Op::AddScalar(a) => of(0)?.clone().plus(integer(a.value)?),
        Op::MulScalar(a) => of(0)?.scaled(integer(a.value)?),
        Op::RsubScalar(a) => of(0)?.scaled(-1)?.plus(integer(a.value)?),
        Op::Le if numbers(&operands) => at_most(difference()),
        Op::Lt if numbers(&operands) => at_most(difference()?.plus(1)),
        Op::Ge if numbers(&operands) => at_most(difference()?.scaled(-1)),
        Op::Gt if numbers(&operands) => at_most(difference()?.scaled(-1)?.plus(1)),
        Op::Eq if numbers(&operands) => equal(difference()?, true),
        Op::Ne if numbers(&operands) => equal(difference()?, false),
        Op::LeScalar(a) if numbers(&operands) => at_most(above(integer(a.value))),
        Op::LtScalar(a) if never_negative() && integer(a.value)? <= 0 => {
            Some(constant(false, shape.len()))
        }
        Op::LtScalar(a) if numbers(&operands) => at_most(above(integer(a.value))?.plus(1)),
        Op::GeScalar(a) if numbers(&operands) => at_most(above(integer(a.value))?.scaled(-1)),
        Op::GtScalar(a) if numbers(&operands) => {
            at_most(above(integer(a.value))?.scaled(-1)?.plus(1))
        }
        Op::EqScalar(a) if numbers(&operands) => equal(above(integer(a.value))?, true),
        Op::NeScalar(a) if numbers(&operands) => equal(above(integer(a.value))?, false),
        Op::LogicalNot | Op::BitwiseNot if !numbers(&operands) => {
            of(0)?.scaled(-1)?.plus(1)?.condition(shape)
        }
        Op::BitwiseAnd | Op::LogicalAnd if !numbers(&operands) => match (read(0), read(1)) {
            (Some(a), Some(b)) if a.is_true() || a == b => Some(b),
            (Some(a), Some(b)) if b.is_true() => Some(a),
            (Some(x), _) | (_, Some(x)) if x.is_constant() && !x.is_true() => Some(x),
            _ => None,
        },
        _ => None,
    }
}

/// Whether a term's result of type `ty`, whose formula is `known`, has integers of which none is
/// negative.
pub(super) fn is_never_negative(
    terms: &Terms,
    term: &Term,
    op: &Op,
    ty: &TensorType,
    known: Option<&Known>,
) -> bool {
    let of = |n| {
        term.operands(terms)
            .take(n)
            .all(|id| terms[id].data.never_negative)
    };
    ty.dtype() == DType::I64
        && match op {
            Op::Reshape(_) | Op::Expand(_) | Op::Permute(_) | Op::Slice(_) => of(1),
            Op::Gather(_) | Op::Index => of(1),
            Op::Cat(_) => of(usize::MAX),
            _ => known
                .and_then(|x| x.range(ty.shape()))
                .is_some_and(|(least, _)| 0 <= least),
        }
}

/// Whether the operands are integers, not conditions.
fn numbers(operands: &[&Class]) -> bool {
    operands
        .iter()
        .all(|x| x.types.first().is_some_and(|ty| ty.dtype() == DType::I64))
}

fn integer(number: Number) -> Option<i64> {
    match number {
        Number::Int(i) => Some(i),
        Number::Float(_) => None,
    }
}

/// Whether a known difference is 0, if it does not depend on the coordinates.
fn equal(difference: Known, when: bool) -> Option<Known> {
    let holds = (difference.offset == 0) == when;
    difference
        .is_constant()
        .then(|| constant(holds, difference.strides.len()))
}

/// `x` of shape `from`, read in the larger shape `to`.
fn broadcast(x: &Known, from: &[u64], to: &[u64]) -> Option<Known> {
    (broadcast_shapes(from, to).ok()? == to).then_some(())?;
    let mut strides = vec![0; to.len() - from.len()];
    strides.extend(
        from.iter()
            .zip(&x.strides)
            .map(|(&d, &s)| if d == 1 { 0 } else { s }),
    );
    Some(Known {
        offset: x.offset,
        strides,
    })
}

/// Pieces that each continue where the one before ends.
fn cat(pieces: &[&Class], dim: usize) -> Option<Known> {
    let mut all: Option<Known> = None;
    let mut at = 0i64;
    for piece in pieces {
        let (x, n) = (
            piece.known.clone()?,
            i64::try_from(piece.types[0].shape()[dim]).ok()?,
        );
        all = Some(match all {
            None => x,
            Some(mut all) => {
                // A piece with one element has no stride; the next piece gives it.
                let step = x.offset.checked_sub(all.offset)?;
                if at == 1 {
                    all.strides[dim] = step;
                }
                let goes_on = all.strides[dim].checked_mul(at)? == step;
                let same = x.strides.iter().zip(&all.strides).enumerate();
                let mut same = same.filter(|&(d, _)| d != dim || n != 1);
                (goes_on && same.all(|(_, (a, b))| a == b)).then_some(())?;
                all
            }
        });
        at = at.checked_add(n)?;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::Known;

    #[test]
    fn causal_is_the_last_coordinate_at_most_the_one_before() {
        let known = |offset, strides: &[i64]| Known {
            offset,
            strides: strides.to_vec(),
        };
        assert!(known(0, &[-1, 1]).is_causal() && known(0, &[0, 0, -1, 1]).is_causal());
        for other in [
            known(1, &[-1, 1]),
            known(0, &[1, -1]),
            known(0, &[1, -1, 1]),
            known(0, &[1]),
            known(0, &[]),
        ] {
            assert!(!other.is_causal(), "{other:?}");
        }
    }

    #[test]
    fn a_condition_that_the_shape_decides_is_constant() {
        let known = |offset| Known {
            offset,
            strides: vec![-1, 1],
        };
        assert!(known(-3).condition(&[4, 4]).unwrap().is_true());
        assert!(!known(-2).condition(&[4, 4]).unwrap().is_constant());
        let never = known(4).condition(&[4, 4]).unwrap();
        assert!(never.is_constant() && !never.is_true());
    }
}
