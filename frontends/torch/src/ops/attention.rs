//! Attention. Each of torch's kernels has its own operators. Their results differ only in tensors
//! for their own derivatives.

use super::Family;
use ir::op::OpKind;
use ir::{Attr, DType};
use lower::{Call, Ref, Result, Results, Scalar, count, ensure, one};

pub(super) const OPS: Family = &[
    ("scaled_dot_product_attention", whole),
    ("_scaled_dot_product_flash_attention_for_cpu", |c| {
        attention(c, FLASH)
    }),
    ("_scaled_dot_product_flash_attention", |c| {
        attention(c, FLASH)
    }),
    ("_scaled_dot_product_efficient_attention", |c| {
        attention(c, EFFICIENT)
    }),
    ("_scaled_dot_product_cudnn_attention", |c| {
        attention(c, CUDNN)
    }),
    (
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        |c| backward(c, FLASH),
    ),
    ("_scaled_dot_product_flash_attention_backward", |c| {
        backward(c, FLASH)
    }),
    ("_scaled_dot_product_efficient_attention_backward", |c| {
        backward(c, EFFICIENT)
    }),
    ("_scaled_dot_product_cudnn_attention_backward", |c| {
        backward(c, CUDNN)
    }),
];

/// The operator from which torch chooses a kernel. Its operands may have any number of leading
/// dimensions.
fn whole(c: &mut Call<'_>) -> Result<Results> {
    let (q, k, v) = (c.tensor("query")?, c.tensor("key")?, c.tensor("value")?);
    c.ignore(&["enable_gqa"]);
    let dropout = c.float_or("dropout_p", 0.0)?;
    if c.dtype(q) == DType::F64 {
        return by_parts(c, [q, k, v], dropout);
    }
    let shape = c.result()?.shape().to_vec();
    let mut operands = vec![heads(c, q)?, heads(c, k)?, heads(c, v)?];
    let attrs = attrs(c, operands[0])?;
    operands.extend(mask(c, FLASH, q)?);
    operands.extend(dropout_key(c)?);
    let out = c.steps(OpKind::Sdpa, &attrs, &operands)?[0];
    one(c.reshape(out, &shape)?)
}

/// What drops weights, if some are dropped.
fn dropout_key(c: &mut Call<'_>) -> Result<Option<Ref>> {
    let p = c.float_or("dropout_p", 0.0)?;
    if p == 0.0 {
        return Ok(None);
    }
    let attrs = [("p", Attr::Float(p)), ("stream", c.stream())];
    c.step(OpKind::DropoutKey, &attrs, &[Ref::Rng]).map(Some)
}

/// `[batch.., rows, width]` with two leading dimensions.
fn heads(c: &mut Call<'_>, x: Ref) -> Result<Ref> {
    let shape = c.shape_of(x);
    let [lead @ .., rows, width] = &shape[..] else {
        return Err("an operand has too few dimensions".into());
    };
    let (batch, heads) = match lead {
        [] => (1, 1),
        [lead @ .., heads] => (count(lead)?, *heads),
    };
    c.reshape(x, &[batch, heads, *rows, *width])
}

/// Attention as scores, softmax, dropout and the weighted sum.
fn by_parts(c: &mut Call<'_>, [q, k, v]: [Ref; 3], dropout: f64) -> Result<Results> {
    let (causal, shape) = (c.bool_or("is_causal", false)?, c.shape_of(q));
    let width = shape.last().filter(|&&width| width > 0);
    let width = *width.ok_or("the queries are empty")?;
    let scale = c.float_or("scale", 1.0 / (width as f64).sqrt())?;
    let q = c.scalar_step(OpKind::MulScalar, q, Scalar::Float(scale))?;
    let rank = c.rank(k);
    ensure(rank == shape.len() && rank >= 2, "the ranks differ")?;
    ensure(
        c.ty(k).shape()[..rank - 2] == shape[..rank - 2],
        "attention with dropout and grouped queries",
    )?;
    let dims: Vec<usize> = (0..rank - 2).chain([rank - 1, rank - 2]).collect();
    let k = c.permute(k, &dims)?;
    let mut scores = c.general_product(q, k)?;
    let lost = Scalar::Float(f64::NEG_INFINITY);
    if causal {
        let [.., rows, keys] = c.shape_of(scores)[..] else {
            return Err("the scores have another rank".into());
        };
        let lower = c.diagonals(OpKind::Le, rows, keys, 0)?;
        let lost = c.full(lost, c.dtype(scores), &[])?;
        scores = c.step(OpKind::Where, &[], &[lower, scores, lost])?;
    }
    if let Some(mask) = mask(c, FLASH, q)? {
        scores = match c.dtype(mask) {
            DType::Bool => {
                let lost = c.full(lost, c.dtype(scores), &[])?;
                c.step(OpKind::Where, &[], &[mask, scores, lost])?
            }
            _ => c.step(OpKind::Add, &[], &[scores, mask])?,
        };
    }
    let along = ("dim", Attr::Int(rank as i64 - 1));
    let mut weights = c.step(OpKind::Softmax, &[along], &[scores])?;
    if dropout > 0.0 {
        let attrs = [("p", Attr::Float(dropout)), ("stream", c.stream())];
        weights = c.steps(OpKind::Dropout, &attrs, &[weights, Ref::Rng])?[0];
    }
    one(c.general_product(weights, v)?)
}

/// The properties of one of torch's kernels for attention.
#[derive(Clone, Copy)]
struct Variant {
    /// The argument with the mask.
    mask: &'static str,
    /// The kernel rounds the rows of its logsumexp up, or leaves them out.
    pads_rows: bool,
    /// The logsumexp has a last dimension, which is 1.
    has_columns: bool,
    /// The mask's derivative is a result too, and an argument selects the results.
    has_output_mask: bool,
}

const FLASH: Variant = Variant {
    mask: "attn_mask",
    pads_rows: false,
    has_columns: false,
    has_output_mask: false,
};

const CUDNN: Variant = Variant {
    mask: "attn_bias",
    has_columns: true,
    ..FLASH
};

const EFFICIENT: Variant = Variant {
    mask: "attn_bias",
    pads_rows: true,
    has_columns: false,
    has_output_mask: true,
};

/// The attributes that forward and backward share.
fn attrs(c: &mut Call<'_>, q: Ref) -> Result<[(&'static str, Attr); 2]> {
    let &[_, _, _, width] = c.ty(q).shape() else {
        return Err("the queries have another rank".into());
    };
    ensure(width > 0, "the queries are empty")?;
    // Our logsumexp is f32, and would lose half of the digits.
    ensure(c.dtype(q) != DType::F64, "attention in f64")?;
    let causal = c.bool_or("is_causal", false)?;
    let scale = c.float_or("scale", 1.0 / (width as f64).sqrt())?;
    Ok([
        ("causal", Attr::Bool(causal)),
        ("scale", Attr::Float(scale)),
    ])
}

/// The mask of attention to `q`, in its element type or boolean.
fn mask(c: &mut Call<'_>, variant: Variant, q: Ref) -> Result<Option<Ref>> {
    match c.opt_tensor(variant.mask)? {
        Some(mask) if c.dtype(mask) != DType::Bool => c.cast(mask, c.dtype(q)).map(Some),
        mask => Ok(mask),
    }
}

/// Of an operation whose kernel alone knows which weights it drops.
fn drops_nothing(c: &mut Call<'_>) -> Result<()> {
    let dropout = c.float_or("dropout_p", 0.0)?;
    ensure(dropout == 0.0, "attention with dropout")
}

fn attention(c: &mut Call<'_>, variant: Variant) -> Result<Results> {
    drops_nothing(c)?;
    let (q, k, v) = (c.tensor("query")?, c.tensor("key")?, c.tensor("value")?);
    let attrs = attrs(c, q)?;
    let mask = mask(c, variant, q)?;
    c.ignore(&["compute_log_sumexp"]);
    let debug = c.bool_or("return_debug_mask", false)?;
    ensure(!debug, "returns a debug mask")?;
    let operands: Vec<Ref> = [q, k, v].into_iter().chain(mask).collect();
    let mut made = c.steps(OpKind::Sdpa, &attrs, &operands)?;
    if let Some(ty) = c.wanted(1).filter(|_| variant.pads_rows) {
        let &[_, _, wanted] = ty.shape() else {
            return Err("logsumexp has another rank".into());
        };
        let rows = c.ty(made[1]).shape()[2];
        let more = i64::try_from(wanted).map_err(|_| "too large")? - rows as i64;
        if more != 0 {
            made[1] = c.pad(made[1], &[0, more], Scalar::Float(0.0))?;
        }
    }
    if variant.has_columns && c.wanted(1).is_some() {
        let rows = c.shape_of(made[1]);
        made[1] = c.reshape(made[1], &[&rows[..], &[1]].concat())?;
    }
    let mut results: Results = made.into_iter().map(Some).collect();
    for i in 2..c.n_results() {
        results.push(c.placeholder(i)?);
    }
    Ok(results)
}

fn backward(c: &mut Call<'_>, variant: Variant) -> Result<Results> {
    drops_nothing(c)?;
    let dy = match c.opt_tensor("grad_out")? {
        Some(dy) => dy,
        None => c.tensor("grad_out_")?,
    };
    let (q, k, v) = (c.tensor("query")?, c.tensor("key")?, c.tensor("value")?);
    let (out, mut logsumexp) = (c.tensor("out")?, c.tensor("logsumexp")?);
    let attrs = attrs(c, q)?;
    let mask = mask(c, variant, q)?;
    // Only torch's kernel needs these: lengths of sequences, and the state of its dropout.
    c.ignore(&["cum_seq_q", "cum_seq_k", "max_q", "max_k"]);
    c.ignore(&["philox_seed", "philox_offset", "rng_state", "unused"]);
    if variant.has_columns {
        let shape = c.shape_of(logsumexp);
        let rows = shape.strip_suffix(&[1]);
        logsumexp = c.reshape(logsumexp, rows.ok_or("logsumexp has another rank")?)?;
    }
    let mut wanted = vec![true; 3];
    if variant.has_output_mask {
        wanted = c.bools("grad_input_mask")?;
        ensure(
            wanted.len() == 4 && !wanted[3],
            "takes the derivative of the mask",
        )?;
        ensure(c.rank(logsumexp) == 3, "logsumexp has another rank")?;
        let rows = c.ty(q).shape()[2] as i64;
        logsumexp = c.slice(logsumexp, 2, lower::Range::new(0, rows))?;
    }
    let operands: Vec<Ref> = [dy, q, k, v, out, logsumexp]
        .into_iter()
        .chain(mask)
        .collect();
    let made = c.steps(OpKind::SdpaBwd, &attrs, &operands)?;
    let results = made.into_iter().zip(wanted);
    let mut results: Results = results
        .map(|(d, is_wanted)| is_wanted.then_some(d))
        .collect();
    if c.n_results() > 3 {
        results.push(c.placeholder(3)?);
    }
    Ok(results)
}
