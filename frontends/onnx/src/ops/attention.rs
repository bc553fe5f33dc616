//! Attention and rotary embeddings.

use super::inputs::{Inputs, Row, flag, op};
use ir::op::OpKind;
use ir::{Attr, DType};
use lower::{Call, Error, Range, Ref, Result, Results, Scalar, ensure, one};

pub(super) const OPS: &[Row] = &[op("Attention", attention), op("RotaryEmbedding", rotary)];

/// The number of an attribute, which is at least 1 if it is given.
fn count(c: &mut Call<'_>, name: &str) -> Result<Option<u64>> {
    match c.opt_int(name)? {
        None | Some(0) => Ok(None),
        Some(n) => u64::try_from(n)
            .map(Some)
            .map_err(|_| Error::from("a count is negative")),
    }
}

/// `[B,S,H D]` as `[B,H,S,D]`.
fn heads(c: &mut Call<'_>, x: Ref, n: Option<u64>) -> Result<Ref> {
    let shape = c.shape_of(x);
    let &[batch, rows, width] = &shape[..] else {
        ensure(
            shape.len() == 4,
            "the operands have neither 3 nor 4 dimensions",
        )?;
        return Ok(x);
    };
    let n = n.ok_or("the number of heads is missing")?;
    ensure(width.is_multiple_of(n), "the heads do not fit the width")?;
    let x = c.reshape(x, &[batch, rows, n, width / n])?;
    c.permute(x, &[0, 2, 1, 3])
}

fn attention(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let causal = flag(c, "is_causal", false)?;
    let (q_heads, kv_heads) = (count(c, "q_num_heads")?, count(c, "kv_num_heads")?);
    let (scale, cap) = (c.opt_scalar("scale")?, c.float_or("softcap", 0.0)?);
    let mode = c.int_or("qk_matmul_output_mode", 0)?;
    let (left, right) = (
        c.int_or("left_window_size", -1)?,
        c.int_or("right_window_size", -1)?,
    );
    // Softmaxes are computed in f32 at least.
    c.ignore(&["softmax_precision"]);
    let q = inputs.at(c, 0)?;
    let flat = c.rank(q) == 3;
    let q = heads(c, q, q_heads)?;
    let (k, v) = (inputs.at(c, 1)?, inputs.at(c, 2)?);
    let (mut k, mut v) = (heads(c, k, kv_heads)?, heads(c, v, kv_heads)?);
    let mut before = 0;
    if let (Some(past_k), Some(past_v)) = (inputs.opt(c, 4)?, inputs.opt(c, 5)?) {
        before = *c
            .ty(past_k)
            .shape()
            .get(2)
            .ok_or("the past has other dimensions")? as i64;
        k = c.cat(&[past_k, k], 2)?;
        v = c.cat(&[past_v, v], 2)?;
    }
    let sizes = [c.shape_of(q), c.shape_of(k)];
    let width = sizes[0][3];
    ensure(width > 0, "the queries are empty")?;
    let masks = Masks {
        causal,
        left,
        right,
        before,
        lengths: inputs.opt(c, 6)?,
    };
    let given = inputs.opt(c, 3)?;
    let mask = masks.combined(c, given, (sizes[0][2], sizes[1][2]))?;
    let scale = scale.map_or(1.0 / (width as f64).sqrt(), Scalar::float);

    let plain = cap == 0.0 && !inputs.wants(3) && c.dtype(q) != DType::F64;
    let (y, scores) = if plain {
        let attrs = [
            ("causal", Attr::Bool(masks.by_op(given.is_some()))),
            ("scale", Attr::Float(scale)),
        ];
        let operands: Vec<Ref> = [q, k, v].into_iter().chain(mask).collect();
        (c.steps(OpKind::Sdpa, &attrs, &operands)?[0], None)
    } else {
        let mask = match (mask, masks.by_op(given.is_some())) {
            (None, true) => Some(c.diagonals(OpKind::Le, sizes[0][2], sizes[1][2], 0)?),
            (mask, _) => mask,
        };
        let (y, scores) = composed(c, [q, k, v], mask, (scale, cap), mode)?;
        (y, Some(scores))
    };
    let y = if flat {
        let y = c.permute(y, &[0, 2, 1, 3])?;
        let shape = c.shape_of(y);
        c.reshape(y, &[shape[0], shape[1], shape[2] * shape[3]])?
    } else {
        y
    };
    Ok(vec![Some(y), Some(k), Some(v), scores])
}

/// Which keys a query may use, besides the mask that is given.
struct Masks {
    causal: bool,
    left: i64,
    right: i64,
    /// The number of keys before those of the queries.
    before: i64,
    /// For each batch, the number of keys.
    lengths: Option<Ref>,
}

impl Masks {
    /// True if the op's own causal mask is all that is needed.
    fn by_op(&self, has_mask: bool) -> bool {
        let plain = self.before == 0 && self.lengths.is_none() && self.left < 0 && self.right < 0;
        self.causal && plain && !has_mask
    }

    /// One mask for `rows` queries and `columns` keys.
    fn combined(
        &self,
        c: &mut Call<'_>,
        given: Option<Ref>,
        (rows, columns): (u64, u64),
    ) -> Result<Option<Ref>> {
        let mut mask = given;
        if let Some(x) = given {
            // A short mask forbids the keys after it.
            let last = c
                .shape_of(x)
                .last()
                .copied()
                .ok_or("the mask has no dimension")?;
            let more = columns as i64 - last as i64;
            let is_bool = c.dtype(x) == DType::Bool;
            let none = if is_bool {
                Scalar::Bool(false)
            } else {
                Scalar::Float(f64::NEG_INFINITY)
            };
            if more > 0 {
                mask = Some(c.pad(x, &[0, more], none)?);
            }
        }
        if self.by_op(given.is_some()) {
            return Ok(None);
        }
        // Column minus row, less what lies before the queries.
        let row = c.arange(DType::I64, rows, Scalar::Int(self.before), Scalar::Int(1))?;
        let row = c.reshape(row, &[rows, 1])?;
        let column = c.arange(DType::I64, columns, Scalar::Int(0), Scalar::Int(1))?;
        let mut distance = c.step(OpKind::Sub, &[], &[column, row])?;
        let mut allowed = vec![];
        if let Some(lengths) = self.lengths {
            let n = c.ty(lengths).numel();
            let lengths = c.cast(lengths, DType::I64)?;
            let lengths = c.reshape(lengths, &[n, 1, 1, 1])?;
            allowed.push(c.step(OpKind::Lt, &[], &[column, lengths])?);
            let offset = c.scalar_step(OpKind::AddScalar, lengths, Scalar::Int(-(rows as i64)))?;
            distance = c.step(OpKind::Sub, &[], &[distance, offset])?;
        }
        if self.causal {
            allowed.push(c.scalar_step(OpKind::LeScalar, distance, Scalar::Int(0))?);
        }
        if self.left >= 0 {
            allowed.push(c.scalar_step(OpKind::GeScalar, distance, Scalar::Int(-self.left))?);
        }
        if self.right >= 0 {
            allowed.push(c.scalar_step(OpKind::LeScalar, distance, Scalar::Int(self.right))?);
        }
        for other in allowed {
            mask = Some(match mask {
                None => other,
                Some(mask) if c.dtype(mask) == DType::Bool => {
                    c.step(OpKind::LogicalAnd, &[], &[mask, other])?
                }
                Some(mask) => {
                    let none = Scalar::Float(f64::NEG_INFINITY);
                    let none = c.full(none, c.dtype(mask), &[])?;
                    c.step(OpKind::Where, &[], &[other, mask, none])?
                }
            });
        }
        Ok(mask)
    }
}

/// Attention step by step, and the scores of a stage: 0 products, 1 after the cap, 2 with the mask,
/// 3 after the softmax.
fn composed(
    c: &mut Call<'_>,
    [q, k, v]: [Ref; 3],
    mask: Option<Ref>,
    (scale, cap): (f64, f64),
    mode: i64,
) -> Result<(Ref, Ref)> {
    let n = c.shape_of(q)[1];
    let (k, v) = (repeated(c, k, n)?, repeated(c, v, n)?);
    let k = c.permute(k, &[0, 1, 3, 2])?;
    let mut scores = c.general_product(q, k)?;
    scores = c.scalar_step(OpKind::MulScalar, scores, Scalar::Float(scale))?;
    let mut stages = vec![scores];
    if cap > 0.0 {
        scores = c.scalar_step(OpKind::DivScalar, scores, Scalar::Float(cap))?;
        scores = c.map(OpKind::Tanh, scores)?;
        scores = c.scalar_step(OpKind::MulScalar, scores, Scalar::Float(cap))?;
    }
    stages.push(scores);
    if let Some(mask) = mask {
        scores = if c.dtype(mask) == DType::Bool {
            let none = c.full(Scalar::Float(f64::NEG_INFINITY), c.dtype(scores), &[])?;
            c.step(OpKind::Where, &[], &[mask, scores, none])?
        } else {
            c.step(OpKind::Add, &[], &[scores, mask])?
        };
    }
    stages.push(scores);
    // A query without keys has a row of zeros.
    let shape = c.shape_of(scores);
    let last = shape.len() - 1;
    let live = c.scalar_step(OpKind::NeScalar, scores, Scalar::Float(f64::NEG_INFINITY))?;
    let live = c.reduce(OpKind::Any, live, &[last], true)?;
    let soft = c.step(
        OpKind::Softmax,
        &[("dim", Attr::Int(last as i64))],
        &[scores],
    )?;
    let soft = c.masked(live, soft)?;
    stages.push(soft);
    let y = c.general_product(soft, v)?;
    let stage = usize::try_from(mode).ok().and_then(|mode| stages.get(mode));
    Ok((y, *stage.ok_or("no such stage of the scores")?))
}

/// Heads of keys, each as often as queries share it.
fn repeated(c: &mut Call<'_>, x: Ref, heads: u64) -> Result<Ref> {
    let shape = c.shape_of(x);
    if shape[1] == heads {
        return Ok(x);
    }
    ensure(
        shape[1] > 0 && heads.is_multiple_of(shape[1]),
        "the heads do not fit together",
    )?;
    let x = c.reshape(x, &[shape[0], shape[1], 1, shape[2], shape[3]])?;
    let x = c.expand(
        x,
        &[shape[0], shape[1], heads / shape[1], shape[2], shape[3]],
    )?;
    c.reshape(x, &[shape[0], heads, shape[2], shape[3]])
}

/// Rotates pairs of a head's elements by angles whose cosines and sines are given.
fn rotary(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let interleaved = flag(c, "interleaved", false)?;
    let (n, part) = (count(c, "num_heads")?, count(c, "rotary_embedding_dim")?);
    let x = inputs.at(c, 0)?;
    let flat = c.rank(x) == 3;
    let x = heads(c, x, n)?;
    let shape = c.shape_of(x);
    let width = shape[3] as i64;
    let part = part.map_or(width, |part| part as i64);
    ensure(
        part <= width && part % 2 == 0,
        "the rotated part does not fit the heads",
    )?;
    let mut angles = vec![];
    for i in [1, 2] {
        let mut table = inputs.at(c, i)?;
        if let Some(positions) = inputs.opt(c, 3)? {
            table = c.step(OpKind::Index, &[], &[table, positions])?;
        }
        let rows = c.shape_of(table);
        ensure(rows.len() == 3, "the cosines have other dimensions")?;
        angles.push(c.reshape(table, &[rows[0], 1, rows[1], rows[2]])?);
    }
    let turned = c.slice(x, 3, Range::new(0, part))?;
    let rest = c.slice(x, 3, Range::new(part, width))?;
    let half = part / 2;
    let (a, b) = if interleaved {
        let every = |start: i64| Range {
            start: Some(start),
            end: None,
            step: 2,
        };
        (c.slice(turned, 3, every(0))?, c.slice(turned, 3, every(1))?)
    } else {
        let parts = c.split(turned, 3, &[half, half])?;
        (parts[0], parts[1])
    };
    let mut times = |x: Ref, angle: usize| c.step(OpKind::Mul, &[], &[x, angles[angle]]);
    let products = [times(a, 0)?, times(b, 1)?, times(a, 1)?, times(b, 0)?];
    let real = c.step(OpKind::Sub, &[], &products[..2])?;
    let imaginary = c.step(OpKind::Add, &[], &products[2..])?;
    let y = if interleaved {
        let dtype = c.dtype(x);
        let pairs = c.stack(vec![real, imaginary], 4, dtype)?;
        let mut shape = shape.clone();
        shape[3] = part as u64;
        c.reshape(pairs, &shape)?
    } else {
        c.cat(&[real, imaginary], 3)?
    };
    let y = if part < width {
        c.cat(&[y, rest], 3)?
    } else {
        y
    };
    if !flat {
        return one(y);
    }
    let y = c.permute(y, &[0, 2, 1, 3])?;
    one(c.reshape(y, &[shape[0], shape[2], shape[1] * shape[3]])?)
}
