//! Convolutions and pooling.

use super::Family;
use ir::Attr;
use ir::op::OpKind;
use lower::{Call, Ref, Result, Results, Scalar, all, attr_ints, ensure, one};

pub(super) const OPS: Family = &[
    ("convolution", convolution),
    ("conv1d", convolution),
    ("conv2d", convolution),
    ("convolution_backward", convolution_backward),
    ("max_pool2d_with_indices", max_pool),
    ("max_pool2d_with_indices_backward", max_pool_backward),
    ("_adaptive_avg_pool2d", average_pool),
    ("adaptive_avg_pool2d", average_pool),
    ("_adaptive_avg_pool2d_backward", average_pool_backward),
];

type NamedAttrs = Vec<(&'static str, Attr)>;

/// The attributes of a convolution with the weight `w`.
fn attrs(c: &mut Call<'_>, w: Ref) -> Result<NamedAttrs> {
    let n = c.rank(w).checked_sub(2);
    let n = n.ok_or("the weight has too few dimensions")?;
    ensure(!c.bool_or("transposed", false)?, "is transposed")?;
    let output_padding = c.ints_of("output_padding", n, &[])?;
    ensure(output_padding.iter().all(|&p| p == 0), "pads the output")?;
    let (ones, zeros) = (vec![1; n], vec![0; n]);
    Ok(vec![
        ("dilation", Attr::Ints(c.ints_of("dilation", n, &ones)?)),
        ("groups", Attr::Int(c.int_or("groups", 1)?)),
        ("padding", Attr::Ints(c.ints_of("padding", n, &zeros)?)),
        ("stride", Attr::Ints(c.ints_of("stride", n, &ones)?)),
    ])
}

fn convolution(c: &mut Call<'_>) -> Result<Results> {
    let (x, w) = (c.tensor("input")?, c.tensor("weight")?);
    let bias = c.opt_tensor("bias")?;
    let attrs = attrs(c, w)?;
    let operands: Vec<Ref> = [x, w].into_iter().chain(bias).collect();
    one(c.step(OpKind::Convolution, &attrs, &operands)?)
}

fn convolution_backward(c: &mut Call<'_>) -> Result<Results> {
    let dy = c.tensor("grad_output")?;
    let (x, w) = (c.tensor("input")?, c.tensor("weight")?);
    c.ignore(&["bias_sizes"]);
    let attrs = attrs(c, w)?;
    let mask = c.bools("output_mask")?;
    ensure(mask.len() == 3, "output_mask has another length")?;
    c.masked_steps(OpKind::ConvolutionBwd, &attrs, &mask, &[dy, x, w])
}

// --- pooling ---

fn pooling(c: &mut Call<'_>) -> Result<NamedAttrs> {
    let kernel = c.ints_of("kernel_size", 2, &[])?;
    Ok(vec![
        ("ceil", Attr::Bool(c.bool_or("ceil_mode", false)?)),
        ("dilation", Attr::Ints(c.ints_of("dilation", 2, &[1, 1])?)),
        ("padding", Attr::Ints(c.ints_of("padding", 2, &[0, 0])?)),
        ("stride", Attr::Ints(c.ints_of("stride", 2, &kernel)?)),
        ("kernel", Attr::Ints(kernel)),
    ])
}

fn max_pool(c: &mut Call<'_>) -> Result<Results> {
    let x = c.tensor("self")?;
    let attrs = pooling(c)?;
    let is_single = c.rank(x) == 3;
    let x = c.images(x)?;
    let mut made = c.steps(OpKind::MaxPool2d, &attrs, &[x])?;
    for y in &mut made {
        let shape = c.shape_of(*y);
        *y = c.reshape(*y, if is_single { &shape[1..] } else { &shape })?;
    }
    all(made)
}

fn max_pool_backward(c: &mut Call<'_>) -> Result<Results> {
    let (dy, x) = (c.tensor("grad_output")?, c.tensor("self")?);
    let index = c.tensor("indices")?;
    // The indices give the position of the maximum.
    pooling(c)?;
    let shape = c.shape_of(x);
    let (dy, index) = (c.images(dy)?, c.images(index)?);
    let full = if shape.len() == 3 {
        [&[1], &shape[..]].concat()
    } else {
        shape.clone()
    };
    let attrs = [("shape", attr_ints(&full)?)];
    let dx = c.step(OpKind::MaxPool2dBwd, &attrs, &[dy, index])?;
    one(c.reshape(dx, &shape)?)
}

const WHOLE_IMAGES: &str = "only the average of whole images is known";

fn average_pool(c: &mut Call<'_>) -> Result<Results> {
    let (x, size) = (c.tensor("self")?, c.ints("output_size")?);
    let rank = c.rank(x);
    ensure(size == [1, 1] && rank >= 2, WHOLE_IMAGES)?;
    one(c.reduce(OpKind::Mean, x, &[rank - 2, rank - 1], true)?)
}

fn average_pool_backward(c: &mut Call<'_>) -> Result<Results> {
    let (dy, x) = (c.tensor("grad_output")?, c.tensor("self")?);
    let shape = c.shape_of(x);
    ensure(c.shape_of(dy).ends_with(&[1, 1]), WHOLE_IMAGES)?;
    let [.., rows, columns] = shape[..] else {
        return Err(WHOLE_IMAGES.into());
    };
    let n = rows.checked_mul(columns).ok_or("too large")? as f64;
    let dy = c.scalar_step(OpKind::DivScalar, dy, Scalar::Float(n))?;
    one(c.expand(dy, &shape)?)
}
