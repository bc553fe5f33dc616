//! Products of matrices and vectors.

use super::Family;
use ir::op::OpKind;
use lower::{
    Call, Operand, Ref, Result, Results, Scalar, all, count, ensure, one, transposed, wrap,
};

pub(super) const OPS: Family = &[
    ("mm", |c| product(c, 2)),
    ("bmm", |c| product(c, 3)),
    ("addmm", |c| {
        let (a, b) = (c.tensor("mat1")?, c.tensor("mat2")?);
        add_product(c, a, b)
    }),
    ("baddbmm", |c| {
        let (a, b) = (c.tensor("batch1")?, c.tensor("batch2")?);
        add_product(c, a, b)
    }),
    ("mv", |c| general(c, "vec")),
    ("dot", |c| general(c, "tensor")),
    ("vdot", |c| general(c, "other")),
    ("matmul", |c| general(c, "other")),
    ("linear", linear),
    ("outer", outer),
    ("ger", outer),
    ("addr", add_outer),
    ("addbmm", add_products),
    ("inner", inner),
    ("kron", kron),
    ("tensordot", tensordot),
    ("bilinear", bilinear),
    ("linalg_cross", cross),
    ("linalg_multi_dot", chain),
    ("linalg_matrix_power", matrix_power),
    ("einsum", |c| {
        c.ignore(&["path"]);
        let equation = c.string_or("equation", "")?;
        let operands = c.tensors("tensors")?;
        one(c.einsum(&equation, &operands)?)
    }),
    ("addmv", |c| {
        let (a, b) = (c.tensor("mat")?, c.tensor("vec")?);
        let y = c.general_product(a, b)?;
        combined(c, y)
    }),
    ("cosine_similarity", cosine_similarity),
    ("pairwise_distance", |c| {
        let (a, b) = (c.tensor("x1")?, c.tensor("x2")?);
        let keepdim = c.bool_or("keepdim", false)?;
        one(distance(c, [a, b], keepdim)?)
    }),
    ("_grouped_mm", grouped_product),
    // Those of transformers for types that PyTorch cannot compile.
    ("transformers.grouped_mm_fallback", |c| {
        let (x, w, ends) = (c.tensor("input")?, c.tensor("weight")?, c.tensor("offs")?);
        one(c.grouped_product(x, w, ends, false)?)
    }),
    ("transformers.grouped_mm_fallback_backward", |c| {
        let (x, w, ends) = (c.tensor("input")?, c.tensor("weight")?, c.tensor("offs")?);
        let dy = c.tensor("grad_output")?;
        let dw = c.grouped_outer(x, dy, ends)?;
        let dx = c.grouped_product(dy, w, ends, true)?;
        all(vec![dx, dw])
    }),
    ("cdist", all_distances),
    ("triplet_margin_loss", triplet_margin_loss),
];

fn product(c: &mut Call<'_>, rank: usize) -> Result<Results> {
    let (a, b) = (c.tensor("self")?, c.tensor("mat2")?);
    ensure(c.rank(a) == rank, "the factors have another rank")?;
    one(c.product(a, b)?)
}

/// A product for each group of rows, of terms or of columns: that of which both factors have as
/// many dimensions decides.
fn grouped_product(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.tensor("self")?, c.tensor("mat2")?);
    let ends = c.opt_tensor("offs")?;
    let y = match (c.rank(a), c.rank(b), ends) {
        (2, 3, Some(ends)) => c.grouped_product(a, b, ends, false)?,
        (2, 2, Some(ends)) => {
            let a = c.permute(a, &[1, 0])?;
            c.grouped_outer(a, b, ends)?
        }
        // Groups of columns of b: the transposed of groups of rows.
        (3, 2, Some(ends)) => {
            let b = c.permute(b, &[1, 0])?;
            let y = c.grouped_product(b, a, ends, true)?;
            c.permute(y, &[1, 0])?
        }
        (3, 3, None) => c.product(a, b)?,
        _ => return Err("the factors and the ends of groups do not fit".into()),
    };
    let dtype = c.result()?.dtype();
    c.ignore(&["out_dtype"]);
    one(c.cast(y, dtype)?)
}

/// `beta x + alpha a b`
fn add_product(c: &mut Call<'_>, a: Ref, b: Ref) -> Result<Results> {
    let x = c.tensor("self")?;
    let beta = c.scalar_or("beta", Scalar::Int(1))?;
    let alpha = c.scalar_or("alpha", Scalar::Int(1))?;
    let dtype = c.result()?.dtype();
    // torch does not read the summand if it is multiplied by zero.
    let x = if beta.float() == 0.0 {
        None
    } else {
        Some(c.scaled(Operand::Tensor(x), beta, dtype)?)
    };
    if let (Some(Operand::Tensor(x)), true) = (x, alpha.float() == 1.0) {
        return one(c.step(OpKind::Addmm, &transposed(false, false), &[x, a, b])?);
    }
    let y = c.product(a, b)?;
    let y = c.scaled(Operand::Tensor(y), alpha, dtype)?;
    match (x, y) {
        (Some(x), y) => one(c.arithmetic(OpKind::Add, x, y, dtype)?),
        (None, Operand::Tensor(y)) => one(y),
        (None, Operand::Scalar(_)) => Err("a product is no number".into()),
    }
}

/// The product of two vectors, each divided by its length, which is at least `eps`.
fn cosine_similarity(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.tensor("x1")?, c.tensor("x2")?);
    let eps = c.float_or("eps", 1e-8)?;
    let shape = ir::op::broadcast_shapes(c.ty(a).shape(), c.ty(b).shape())?;
    let dim = c.dim("dim", Some(1), shape.len())?;
    let mut sides = vec![];
    for x in [a, b] {
        let x = c.expand(x, &shape)?;
        let length = c.norm(x, 2.0, &[dim], true)?;
        let length = c.clamp(length, Some(Scalar::Float(eps)), None, c.dtype(x))?;
        sides.push(c.step(OpKind::Div, &[], &[x, length])?);
    }
    let product = c.step(OpKind::Mul, &[], &sides)?;
    one(c.reduce(OpKind::Sum, product, &[dim], false)?)
}

/// `|a - b + eps|` over the last dimension.
fn distance(c: &mut Call<'_>, [a, b]: [Ref; 2], keepdim: bool) -> Result<Ref> {
    let (order, eps) = (c.float_or("p", 2.0)?, c.float_or("eps", 1e-6)?);
    let d = c.step(OpKind::Sub, &[], &[a, b])?;
    let d = c.scalar_step(OpKind::AddScalar, d, Scalar::Float(eps))?;
    let last = c.rank(d).checked_sub(1).ok_or("has no dimension")?;
    c.norm(d, order, &[last], keepdim)
}

/// The distances of each row of one matrix from each row of another.
fn all_distances(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.tensor("x1")?, c.tensor("x2")?);
    let order = c.float_or("p", 2.0)?;
    // It chooses how torch computes.
    c.ignore(&["compute_mode"]);
    let beside = |c: &mut Call<'_>, x: Ref, back: usize| {
        let mut shape = c.shape_of(x);
        let at = shape.len().checked_sub(back).ok_or("is no matrix")?;
        shape.insert(at, 1);
        c.reshape(x, &shape)
    };
    let (a, b) = (beside(c, a, 1)?, beside(c, b, 2)?);
    let d = c.step(OpKind::Sub, &[], &[a, b])?;
    let last = c.rank(d) - 1;
    one(c.norm(d, order, &[last], false)?)
}

/// How much farther the positive is than the negative, with a margin.
fn triplet_margin_loss(c: &mut Call<'_>) -> Result<Results> {
    let (anchor, positive) = (c.tensor("anchor")?, c.tensor("positive")?);
    let negative = c.tensor("negative")?;
    let margin = c.float_or("margin", 1.0)?;
    let near = distance(c, [anchor, positive], false)?;
    let mut far = distance(c, [anchor, negative], false)?;
    if c.bool_or("swap", false)? {
        let other = distance(c, [positive, negative], false)?;
        far = c.step(OpKind::Minimum, &[], &[far, other])?;
    }
    let d = c.step(OpKind::Sub, &[], &[near, far])?;
    let d = c.scalar_step(OpKind::AddScalar, d, Scalar::Float(margin))?;
    let loss = super::loss::at_least_0(c, d)?;
    super::loss::reduced(c, loss)
}

fn general(c: &mut Call<'_>, other: &str) -> Result<Results> {
    let (a, b) = (c.tensor("self")?, c.tensor(other)?);
    one(c.general_product(a, b)?)
}

fn linear(c: &mut Call<'_>) -> Result<Results> {
    let (x, w) = (c.tensor("input")?, c.tensor("weight")?);
    let bias = c.opt_tensor("bias")?;
    one(c.linear(x, w, bias)?)
}

fn outer(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.tensor("self")?, c.tensor("vec2")?);
    let column = [c.ty(a).numel(), 1];
    let a = c.reshape(a, &column)?;
    one(c.step(OpKind::Mul, &[], &[a, b])?)
}

/// `beta x + alpha y`
fn combined(c: &mut Call<'_>, y: Ref) -> Result<Results> {
    let x = c.tensor("self")?;
    let beta = c.scalar_or("beta", Scalar::Int(1))?;
    let alpha = c.scalar_or("alpha", Scalar::Int(1))?;
    let dtype = c.result()?.dtype();
    let y = c.scaled(Operand::Tensor(y), alpha, dtype)?;
    if beta.float() == 0.0 {
        return one(c.whole(y, dtype)?);
    }
    let x = c.scaled(Operand::Tensor(x), beta, dtype)?;
    one(c.arithmetic(OpKind::Add, x, y, dtype)?)
}

fn add_outer(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.tensor("vec1")?, c.tensor("vec2")?);
    let column = [c.ty(a).numel(), 1];
    let a = c.reshape(a, &column)?;
    let y = c.step(OpKind::Mul, &[], &[a, b])?;
    combined(c, y)
}

/// `beta x + alpha` times the sum of the products of a batch.
fn add_products(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.tensor("batch1")?, c.tensor("batch2")?);
    let y = c.product(a, b)?;
    let y = c.reduce(OpKind::Sum, y, &[0], false)?;
    combined(c, y)
}

/// Sums over the last dimension of both.
fn inner(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.tensor("self")?, c.tensor("other")?);
    let (m, n) = (c.rank(a), c.rank(b));
    if m == 0 || n == 0 {
        return one(c.step(OpKind::Mul, &[], &[a, b])?);
    }
    one(contracted(c, [a, b], [vec![m - 1], vec![n - 1]])?)
}

/// The sums over pairs of dimensions of `a` and `b`; the other dimensions of `a`, then of `b`,
/// stay.
fn contracted(c: &mut Call<'_>, x: [Ref; 2], dims: [Vec<usize>; 2]) -> Result<Ref> {
    let [a, b] = x;
    let [of_a, of_b] = dims;
    let rest = |rank: usize, dims: &[usize]| -> Vec<usize> {
        (0..rank).filter(|d| !dims.contains(d)).collect()
    };
    let (rest_a, rest_b) = (rest(c.rank(a), &of_a), rest(c.rank(b), &of_b));
    let sizes = |c: &Call<'_>, x: Ref, dims: &[usize]| -> Vec<u64> {
        let shape = c.shape_of(x);
        dims.iter().map(|&d| shape[d]).collect()
    };
    let (kept_a, kept_b) = (sizes(c, a, &rest_a), sizes(c, b, &rest_b));
    let summed = sizes(c, a, &of_a);
    ensure(
        summed == sizes(c, b, &of_b),
        "sums over dimensions of other sizes",
    )?;
    let n = count(&summed)?;
    let a = c.permute(a, &[rest_a, of_a].concat())?;
    let b = c.permute(b, &[of_b, rest_b].concat())?;
    let a = c.reshape(a, &[count(&kept_a)?, n])?;
    let b = c.reshape(b, &[n, count(&kept_b)?])?;
    let y = c.product(a, b)?;
    c.reshape(y, &[kept_a, kept_b].concat())
}

fn tensordot(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.tensor("self")?, c.tensor("other")?);
    let mut dims = [vec![], vec![]];
    for (x, (list, name)) in [a, b]
        .into_iter()
        .zip(dims.iter_mut().zip(["dims_self", "dims_other"]))
    {
        let rank = c.rank(x);
        for dim in c.ints(name)? {
            list.push(wrap(dim, rank)?);
        }
    }
    one(contracted(c, [a, b], dims)?)
}

/// Each element of `a` times all of `b`, in blocks.
fn kron(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.tensor("self")?, c.tensor("other")?);
    let rank = c.rank(a).max(c.rank(b));
    let padded = |shape: Vec<u64>| [vec![1; rank - shape.len()], shape].concat();
    let (m, n) = (padded(c.shape_of(a)), padded(c.shape_of(b)));
    let apart = |sizes: &[u64], is_left: bool| -> Vec<u64> {
        let pair = |&size: &u64| if is_left { [size, 1] } else { [1, size] };
        sizes.iter().flat_map(pair).collect()
    };
    let (a, b) = (
        c.reshape(a, &apart(&m, true))?,
        c.reshape(b, &apart(&n, false))?,
    );
    let y = c.step(OpKind::Mul, &[], &[a, b])?;
    let shape: Vec<u64> = m.iter().zip(&n).map(|(m, n)| m * n).collect();
    one(c.reshape(y, &shape)?)
}

/// `x w[o] y + bias[o]` for each row.
fn bilinear(c: &mut Call<'_>) -> Result<Results> {
    let (x, y) = (c.tensor("input1")?, c.tensor("input2")?);
    let w = c.tensor("weight")?;
    let bias = c.opt_tensor("bias")?;
    let z = c.einsum("...i,oij,...j->...o", &[x, w, y])?;
    one(match bias {
        Some(bias) => c.step(OpKind::Add, &[], &[z, bias])?,
        None => z,
    })
}

/// The cross product of vectors of three numbers.
fn cross(c: &mut Call<'_>) -> Result<Results> {
    let (a, b) = (c.tensor("self")?, c.tensor("other")?);
    let shape = ir::op::broadcast_shapes(c.ty(a).shape(), c.ty(b).shape())?;
    let dim = c.dim("dim", Some(-1), shape.len())?;
    ensure(shape[dim] == 3, "the vectors do not have three numbers")?;
    let (a, b) = (c.expand(a, &shape)?, c.expand(b, &shape)?);
    let mut terms = vec![];
    for (i, j) in [(-1, -2), (-2, -1)] {
        let factors = [c.roll(a, &[(i, dim)])?, c.roll(b, &[(j, dim)])?];
        terms.push(c.step(OpKind::Mul, &[], &factors)?);
    }
    one(c.step(OpKind::Sub, &[], &terms)?)
}

/// The product of several matrices, from the left.
fn chain(c: &mut Call<'_>) -> Result<Results> {
    let list = c.tensors("tensors")?;
    let (&first, rest) = list.split_first().ok_or("there is no matrix")?;
    let mut product = first;
    for &next in rest {
        product = c.general_product(product, next)?;
    }
    one(product)
}

fn matrix_power(c: &mut Call<'_>) -> Result<Results> {
    let (x, n) = (c.tensor("self")?, c.int("n")?);
    ensure((1..=64).contains(&n), "this power of a matrix")?;
    let mut power = x;
    for _ in 1..n {
        power = c.general_product(power, x)?;
    }
    one(power)
}
