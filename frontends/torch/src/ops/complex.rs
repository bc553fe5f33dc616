//! Operators on complex numbers, in terms of ops on real ones.
//!
//! A complex tensor is two real tensors of its shape: the real part and the imaginary part.
//! Autograd of torch gives a complex tensor the gradient `dL/d re + i dL/d im`, so the parts of its
//! gradient are the gradients of its parts.

use super::{bare, find};
use ir::DType;
use ir::op::OpKind;
use lower::{Call, Operand, Ref, Result, Results, Scalar, Transform, ensure, one, wrap};

/// How an operator on complex numbers becomes ops.
#[derive(Clone, Copy)]
pub(crate) enum Lowering {
    /// It moves or adds up elements: the operator for real numbers, on each part alone.
    ByPart,
    /// The ops for the whole call. A complex result is two results.
    Formula(Formula),
}

/// The ops of one call; see [`Lowering::Formula`].
pub(crate) type Formula = fn(&mut Parts<'_, '_>) -> Result<Results>;

/// The lowering of an operator for complex numbers, if there is one.
pub(crate) fn lowering(target: &str) -> Option<Lowering> {
    let key = bare(target);
    let name = key.split('.').next().unwrap_or(key);
    let formula = FORMULAS.iter().find(|(formula, _)| *formula == name);
    if let Some(&(_, formula)) = formula {
        return Some(Lowering::Formula(formula));
    }
    let is_known = BY_PART.contains(&name) && find(target).is_some();
    is_known.then_some(Lowering::ByPart)
}

/// True if the operator is one for complex numbers, whatever its operands are: the inverse
/// transform of a real spectrum may be real.
pub(crate) fn is_complex(target: &str) -> bool {
    bare(target).starts_with("fft_irfft")
}

/// True if a result of the operator, one of whose tensors is complex, may share its operand's
/// memory.
pub(crate) fn is_view(target: &str) -> bool {
    let name = bare(target).split('.').next().unwrap_or("");
    super::is_view(target)
        || matches!(
            name,
            "view_as_complex"
                | "view_as_real"
                | "real"
                | "imag"
                | "_conj"
                | "conj"
                | "resolve_conj"
        )
}

/// True if the operator reads no element of its operands.
pub(crate) fn is_fill(target: &str) -> bool {
    let name = bare(target).split('.').next().unwrap_or("");
    ["zero", "empty", "new_zeros", "new_empty"]
        .iter()
        .any(|start| name.starts_with(start))
}

/// Operators that move elements, add them up, or fill a tensor with zeros.
const BY_PART: &[&str] = &[
    "view",
    "_unsafe_view",
    "reshape",
    "view_copy",
    "_reshape_alias",
    "flatten",
    "squeeze",
    "squeeze_copy",
    "unsqueeze",
    "unsqueeze_copy",
    "unflatten",
    "view_as",
    "permute",
    "permute_copy",
    "transpose",
    "transpose_copy",
    "t",
    "t_copy",
    "mT",
    "numpy_T",
    "expand",
    "expand_copy",
    "expand_as",
    "repeat",
    "repeat_interleave",
    "broadcast_tensors",
    "movedim",
    "swapaxes",
    "swapdims",
    "unfold",
    "flip",
    "slice",
    "slice_copy",
    "narrow",
    "narrow_copy",
    "select",
    "select_copy",
    "unbind",
    "unbind_copy",
    "split",
    "split_with_sizes",
    "chunk",
    "slice_scatter",
    "select_scatter",
    "slice_backward",
    "select_backward",
    "cat",
    "concatenate",
    "stack",
    "roll",
    "constant_pad_nd",
    "tril",
    "triu",
    "alias",
    "clone",
    "contiguous",
    "detach",
    "lift_fresh",
    "lift_fresh_copy",
    "index",
    "index_select",
    "gather",
    "fft_fftshift",
    "fft_ifftshift",
    "neg",
    "sum",
    "mean",
    "cumsum",
    "zeros",
    "zeros_like",
    "new_zeros",
    "zero",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
];

const FORMULAS: &[(&str, Formula)] = &[
    ("view_as_complex", view_as_complex),
    ("view_as_real", view_as_real),
    ("complex", |p| p.pair("real", "imag")),
    ("polar", polar),
    ("real", |p| one(p.part("self")?.real)),
    ("imag", |p| one(p.part("self")?.imaginary)),
    ("_conj", conjugate),
    ("_conj_physical", conjugate),
    ("conj_physical", conjugate),
    ("conj", conjugate),
    ("resolve_conj", same),
    ("_to_copy", convert),
    ("to", convert),
    ("copy", copy),
    ("full", filled),
    ("full_like", filled),
    ("new_full", filled),
    ("ones", filled),
    ("ones_like", filled),
    ("new_ones", filled),
    ("scalar_tensor", filled),
    ("add", |p| sum(p, OpKind::Add, false)),
    ("sub", |p| sum(p, OpKind::Sub, false)),
    ("rsub", |p| sum(p, OpKind::Sub, true)),
    ("mul", |p| product(p, "other", Kind::Elements)),
    ("mm", |p| product(p, "mat2", Kind::Matrices)),
    ("bmm", |p| product(p, "mat2", Kind::Matrices)),
    ("matmul", |p| product(p, "other", Kind::Matrices)),
    ("mv", |p| product(p, "vec", Kind::Matrices)),
    ("dot", |p| product(p, "tensor", Kind::Matrices)),
    ("einsum", einsum),
    ("div", divide),
    ("true_divide", divide),
    ("reciprocal", reciprocal),
    ("exp", exp),
    ("log", log),
    ("angle", |p| {
        let x = p.part("self")?;
        one(p.call.atan2(x.imaginary, x.real)?)
    }),
    ("pow", power),
    ("square", |p| {
        let x = p.number("self")?;
        p.multiplied(x, x)
    }),
    ("abs", abs),
    ("sgn", sign),
    ("where", select),
    ("eq", |p| {
        equal(p, OpKind::Eq, OpKind::EqScalar, OpKind::LogicalAnd)
    }),
    ("ne", |p| {
        equal(p, OpKind::Ne, OpKind::NeScalar, OpKind::LogicalOr)
    }),
    ("_fft_c2c", transform),
    ("_fft_r2c", transform),
    ("_fft_c2r", transform),
    ("fft_fft", |p| signal(p, Some(1), true)),
    ("fft_rfft", |p| signal(p, Some(1), true)),
    ("fft_fft2", |p| signal(p, Some(2), true)),
    ("fft_rfft2", |p| signal(p, Some(2), true)),
    ("fft_fftn", |p| signal(p, None, true)),
    ("fft_rfftn", |p| signal(p, None, true)),
    ("fft_ifft", |p| signal(p, Some(1), false)),
    ("fft_irfft", |p| signal(p, Some(1), false)),
    ("fft_ifft2", |p| signal(p, Some(2), false)),
    ("fft_irfft2", |p| signal(p, Some(2), false)),
    ("fft_ifftn", |p| signal(p, None, false)),
    ("fft_irfftn", |p| signal(p, None, false)),
];

/// A number or a tensor in two parts. A real one has no second part.
#[derive(Clone, Copy)]
struct Number {
    real: Operand,
    imaginary: Option<Operand>,
}

/// A complex tensor.
struct Complex {
    real: Ref,
    imaginary: Ref,
}

/// A call one of whose tensors is complex. The call itself reads the real parts.
pub(crate) struct Parts<'c, 'a> {
    pub(crate) call: Call<'a>,
    /// The imaginary parts of an argument: one for a tensor or a number, one for each tensor of a
    /// list. None for a real one.
    pub(crate) imaginary: &'c dyn Fn(&str) -> Vec<Option<Operand>>,
}

impl Parts<'_, '_> {
    /// The element type of the parts of the result, and the result's shape.
    fn made(&self) -> Result<(DType, Vec<u64>)> {
        let ty = self.call.result()?;
        Ok((ty.dtype(), ty.shape().to_vec()))
    }

    fn number(&mut self, argument: &str) -> Result<Number> {
        let real = self.call.operand(argument)?;
        let imaginary = (self.imaginary)(argument);
        Ok(Number {
            real,
            imaginary: imaginary.first().copied().flatten(),
        })
    }

    /// A complex tensor.
    fn part(&mut self, argument: &str) -> Result<Complex> {
        match self.number(argument)? {
            Number {
                real: Operand::Tensor(real),
                imaginary: Some(Operand::Tensor(imaginary)),
            } => Ok(Complex { real, imaginary }),
            _ => Err(format!("{argument} is not a complex tensor").into()),
        }
    }

    /// A complex result of two real arguments.
    fn pair(&mut self, real: &str, imaginary: &str) -> Result<Results> {
        let (dtype, shape) = self.made()?;
        let mut both = vec![];
        for name in [real, imaginary] {
            let x = self.call.tensor(name)?;
            let x = self.call.cast(x, dtype)?;
            both.push(Some(self.call.expand(x, &shape)?));
        }
        Ok(both)
    }

    /// A result of the file's shape; a part that is absent is 0.
    fn result(&mut self, real: Option<Ref>, imaginary: Option<Ref>) -> Result<Results> {
        let (dtype, shape) = self.made()?;
        let mut both = vec![];
        for part in [real, imaginary] {
            both.push(Some(match part {
                Some(part) => self.call.expand(part, &shape)?,
                None => self.call.full(Scalar::Int(0), dtype, &shape)?,
            }));
        }
        Ok(both)
    }

    fn arithmetic(&mut self, op: OpKind, a: Operand, b: Operand) -> Result<Ref> {
        let dtype = self.made()?.0;
        self.call.arithmetic(op, a, b, dtype)
    }

    /// `(a + bi)(c + di)`
    fn multiplied(&mut self, x: Number, y: Number) -> Result<Results> {
        let dtype = self.made()?.0;
        bilinear(self, x, y, &mut |c, a, b| {
            c.arithmetic(OpKind::Mul, a, b, dtype)
        })
    }

    /// `|x|`, or 1 where it is 0; and where it is.
    fn length(&mut self, x: &Complex) -> Result<(Ref, Ref)> {
        let c = &mut self.call;
        let length = c.hypot(x.real, x.imaginary)?;
        let is_zero = c.scalar_step(OpKind::EqScalar, length, Scalar::Int(0))?;
        let unit = c.full(Scalar::Int(1), c.dtype(length), &[])?;
        let length = c.step(OpKind::Where, &[], &[is_zero, unit, length])?;
        Ok((length, is_zero))
    }
}

type Term<'t> = &'t mut dyn FnMut(&mut Call<'_>, Operand, Operand) -> Result<Ref>;

/// A product that is linear in each factor: of each part of the one with each part of the other.
fn bilinear(p: &mut Parts<'_, '_>, x: Number, y: Number, term: Term<'_>) -> Result<Results> {
    let c = &mut p.call;
    let both = |a: Option<Operand>, b: Option<Operand>| a.zip(b);
    let mut real = term(c, x.real, y.real)?;
    if let Some((a, b)) = both(x.imaginary, y.imaginary) {
        let lost = term(c, a, b)?;
        real = c.step(OpKind::Sub, &[], &[real, lost])?;
    }
    let mut imaginary = None;
    for (a, b) in [(Some(x.real), y.imaginary), (x.imaginary, Some(y.real))] {
        let Some((a, b)) = both(a, b) else { continue };
        let more = term(c, a, b)?;
        imaginary = Some(match imaginary {
            Some(part) => c.step(OpKind::Add, &[], &[part, more])?,
            None => more,
        });
    }
    p.result(Some(real), imaginary)
}

// --- parts ---

fn view_as_complex(p: &mut Parts<'_, '_>) -> Result<Results> {
    let c = &mut p.call;
    let x = c.tensor("self")?;
    let last = c.rank(x).checked_sub(1).ok_or("has no dimension")?;
    ensure(c.shape_of(x)[last] == 2, "the last dimension is not 2")?;
    Ok(vec![
        Some(c.select(x, last, 0)?),
        Some(c.select(x, last, 1)?),
    ])
}

fn view_as_real(p: &mut Parts<'_, '_>) -> Result<Results> {
    let x = p.part("self")?;
    one(joined(&mut p.call, x.real, x.imaginary)?)
}

/// Both parts along a new last dimension, as a complex tensor lies in memory.
pub(crate) fn joined(c: &mut Call<'_>, real: Ref, imaginary: Ref) -> Result<Ref> {
    c.stack(vec![real, imaginary], c.rank(real), c.dtype(real))
}

fn polar(p: &mut Parts<'_, '_>) -> Result<Results> {
    let c = &mut p.call;
    let (length, angle) = (c.tensor("abs")?, c.tensor("angle")?);
    let (cos, sin) = (c.map(OpKind::Cos, angle)?, c.map(OpKind::Sin, angle)?);
    let real = c.step(OpKind::Mul, &[], &[length, cos])?;
    let imaginary = c.step(OpKind::Mul, &[], &[length, sin])?;
    Ok(vec![Some(real), Some(imaginary)])
}

fn conjugate(p: &mut Parts<'_, '_>) -> Result<Results> {
    // A number, in the derivative of a product with it.
    let x = p.number("self")?;
    let dtype = p.made()?.0;
    let real = p.call.whole(x.real, dtype)?;
    let imaginary = x.imaginary.ok_or("of a real number")?;
    let imaginary = p.call.whole(imaginary, dtype)?;
    let imaginary = p.call.map(OpKind::Neg, imaginary)?;
    Ok(vec![Some(real), Some(imaginary)])
}

fn same(p: &mut Parts<'_, '_>) -> Result<Results> {
    let x = p.part("self")?;
    Ok(vec![Some(x.real), Some(x.imaginary)])
}

fn convert(p: &mut Parts<'_, '_>) -> Result<Results> {
    let x = p.number("self")?;
    p.call.opt_dtype("dtype")?;
    converted(p, x)
}

/// A number in the type of the result. A real result has the real part.
fn converted(p: &mut Parts<'_, '_>, x: Number) -> Result<Results> {
    let dtype = p.made()?.0;
    let real = p.call.whole(x.real, dtype)?;
    if p.call.n_results() == 1 {
        return one(real);
    }
    let imaginary = x.imaginary.map(|part| p.call.whole(part, dtype));
    p.result(Some(real), imaginary.transpose()?)
}

fn copy(p: &mut Parts<'_, '_>) -> Result<Results> {
    p.call.ignore(&["self"]);
    let source = p.number("src")?;
    converted(p, source)
}

/// A tensor of one real number.
fn filled(p: &mut Parts<'_, '_>) -> Result<Results> {
    for value in ["fill_value", "s"] {
        let is_real = (p.imaginary)(value).into_iter().all(|part| part.is_none());
        ensure(is_real, "fills a tensor with a complex number")?;
    }
    let (dtype, shape) = p.made()?;
    p.call.opt_dtype("dtype")?;
    p.call.ignore(&["self", "size"]);
    let value = match p.call.opt_scalar("fill_value")? {
        Some(value) => value,
        None => p.call.scalar_or("s", Scalar::Int(1))?,
    };
    let real = p.call.full(value, dtype, &shape)?;
    p.result(Some(real), None)
}

fn select(p: &mut Parts<'_, '_>) -> Result<Results> {
    let condition = p.call.tensor("condition")?;
    let (x, y) = (p.number("self")?, p.number("other")?);
    let (dtype, zero) = (p.made()?.0, Operand::Scalar(Scalar::Int(0)));
    let mut both = vec![];
    for (a, b) in [(Some(x.real), Some(y.real)), (x.imaginary, y.imaginary)] {
        let a = p.call.whole(a.unwrap_or(zero), dtype)?;
        let b = p.call.whole(b.unwrap_or(zero), dtype)?;
        both.push(Some(p.call.step(OpKind::Where, &[], &[condition, a, b])?));
    }
    Ok(both)
}

/// Whether both parts are equal, or one is not.
fn equal(p: &mut Parts<'_, '_>, op: OpKind, with: OpKind, both: OpKind) -> Result<Results> {
    let (x, y) = (p.number("self")?, p.number("other")?);
    let zero = Operand::Scalar(Scalar::Int(0));
    let real = p.call.compare(op, with, x.real, y.real)?;
    let (a, b) = match (x.imaginary, y.imaginary) {
        // A comparison takes a number on its right.
        (None, Some(b)) => (b, zero),
        (a, b) => (a.unwrap_or(zero), b.unwrap_or(zero)),
    };
    let imaginary = p.call.compare(op, with, a, b)?;
    one(p.call.step(both, &[], &[real, imaginary])?)
}

// --- arithmetic ---

/// `a op alpha b`; reversed, `b op alpha a`
fn sum(p: &mut Parts<'_, '_>, op: OpKind, is_reversed: bool) -> Result<Results> {
    let (mut a, mut b) = (p.number("self")?, p.number("other")?);
    if is_reversed {
        (a, b) = (b, a);
    }
    let is_real = (p.imaginary)("alpha")
        .into_iter()
        .all(|part| part.is_none());
    ensure(is_real, "a complex factor")?;
    let alpha = p.call.scalar_or("alpha", Scalar::Int(1))?;
    let dtype = p.made()?.0;
    let mut scaled = |part: Operand| p.call.scaled(part, alpha, dtype);
    let (real, imaginary) = (scaled(b.real)?, b.imaginary.map(scaled).transpose()?);
    let real = p.arithmetic(op, a.real, real)?;
    let zero = Operand::Scalar(Scalar::Int(0));
    let imaginary = match (a.imaginary, imaginary) {
        (Some(a), Some(b)) => Some(p.arithmetic(op, a, b)?),
        (Some(a), None) => Some(p.call.whole(a, dtype)?),
        (None, Some(b)) if op == OpKind::Add => Some(p.call.whole(b, dtype)?),
        (None, Some(b)) => Some(p.arithmetic(op, zero, b)?),
        (None, None) => None,
    };
    p.result(Some(real), imaginary)
}

/// What is multiplied.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Elements,
    Matrices,
}

fn product(p: &mut Parts<'_, '_>, other: &str, kind: Kind) -> Result<Results> {
    let (a, b) = (p.number("self")?, p.number(other)?);
    match kind {
        Kind::Elements => p.multiplied(a, b),
        Kind::Matrices => {
            let dtype = p.made()?.0;
            bilinear(p, a, b, &mut |c, a, b| {
                let (a, b) = (c.whole(a, dtype)?, c.whole(b, dtype)?);
                c.general_product(a, b)
            })
        }
    }
}

fn einsum(p: &mut Parts<'_, '_>) -> Result<Results> {
    p.call.ignore(&["path"]);
    let equation = p.call.string_or("equation", "")?;
    let real = p.call.tensors("tensors")?;
    let imaginary = (p.imaginary)("tensors");
    let (&[a, b], &[c, d]) = (&real[..], &imaginary[..]) else {
        return Err("complex tensors, other than two".into());
    };
    let number = |real: Ref, imaginary| Number {
        real: Operand::Tensor(real),
        imaginary,
    };
    let dtype = p.made()?.0;
    bilinear(p, number(a, c), number(b, d), &mut |call, x, y| {
        let (x, y) = (call.whole(x, dtype)?, call.whole(y, dtype)?);
        call.einsum(&equation, &[x, y])
    })
}

fn divide(p: &mut Parts<'_, '_>) -> Result<Results> {
    let (a, b) = (p.number("self")?, p.number("other")?);
    quotient(p, a, b)
}

fn reciprocal(p: &mut Parts<'_, '_>) -> Result<Results> {
    let unit = Number {
        real: Operand::Scalar(Scalar::Int(1)),
        imaginary: None,
    };
    let x = p.number("self")?;
    quotient(p, unit, x)
}

/// `a / b`, or `a conj(b) / |b|^2`
fn quotient(p: &mut Parts<'_, '_>, a: Number, b: Number) -> Result<Results> {
    let Some(imaginary) = b.imaginary else {
        let real = p.arithmetic(OpKind::Div, a.real, b.real)?;
        let imaginary = a
            .imaginary
            .map(|part| p.arithmetic(OpKind::Div, part, b.real));
        return p.result(Some(real), imaginary.transpose()?);
    };
    let dtype = p.made()?.0;
    let divisor = Complex {
        real: p.call.whole(b.real, dtype)?,
        imaginary: p.call.whole(imaginary, dtype)?,
    };
    let negated = p.call.map(OpKind::Neg, divisor.imaginary)?;
    // Of the size of 1, so that its square is no larger than a number can be.
    let c = &mut p.call;
    let scale = c.larger_size(divisor.real, divisor.imaginary)?;
    let mut shares = [divisor.real, negated];
    let mut squares = vec![];
    for part in &mut shares {
        *part = c.step(OpKind::Div, &[], &[*part, scale])?;
        squares.push(c.step(OpKind::Mul, &[], &[*part, *part])?);
    }
    let norm = c.step(OpKind::Add, &[], &squares)?;
    let conjugate = Number {
        real: Operand::Tensor(shares[0]),
        imaginary: Some(Operand::Tensor(shares[1])),
    };
    let mut parts = p.multiplied(a, conjugate)?;
    for part in parts.iter_mut().flatten() {
        *part = p.call.step(OpKind::Div, &[], &[*part, norm])?;
        *part = p.call.step(OpKind::Div, &[], &[*part, scale])?;
    }
    Ok(parts)
}

/// `e^re (cos im + i sin im)`
fn exp(p: &mut Parts<'_, '_>) -> Result<Results> {
    let x = p.part("self")?;
    let c = &mut p.call;
    let length = c.map(OpKind::Exp, x.real)?;
    let mut parts = vec![];
    for wave in [OpKind::Cos, OpKind::Sin] {
        let wave = c.map(wave, x.imaginary)?;
        parts.push(Some(c.step(OpKind::Mul, &[], &[length, wave])?));
    }
    Ok(parts)
}

/// `log |x| + i angle(x)`
fn log(p: &mut Parts<'_, '_>) -> Result<Results> {
    let x = p.part("self")?;
    let angle = p.call.atan2(x.imaginary, x.real)?;
    let length = p.call.hypot(x.real, x.imaginary)?;
    let real = p.call.map(OpKind::Log, length)?;
    Ok(vec![Some(real), Some(angle)])
}

fn power(p: &mut Parts<'_, '_>) -> Result<Results> {
    let x = p.number("self")?;
    let exponent = p.number("exponent")?;
    match exponent.real {
        Operand::Scalar(number) if number.float() == 2.0 && exponent.imaginary.is_none() => {
            p.multiplied(x, x)
        }
        _ => Err("a power of a complex number, other than 2".into()),
    }
}

fn abs(p: &mut Parts<'_, '_>) -> Result<Results> {
    let x = p.part("self")?;
    one(p.call.hypot(x.real, x.imaginary)?)
}

/// `x / |x|`, and 0 for 0
fn sign(p: &mut Parts<'_, '_>) -> Result<Results> {
    let x = p.part("self")?;
    let (length, is_zero) = p.length(&x)?;
    let c = &mut p.call;
    let zero = c.full(Scalar::Int(0), c.dtype(length), &[])?;
    let mut parts = vec![];
    for part in [x.real, x.imaginary] {
        let part = c.step(OpKind::Div, &[], &[part, length])?;
        parts.push(Some(c.step(OpKind::Where, &[], &[is_zero, zero, part])?));
    }
    Ok(parts)
}

// --- Fourier transforms ---

/// A transform along several dimensions.
struct Spectrum {
    /// The dimensions with their lengths as signals. If one has only half of its spectrum, it is
    /// the last one.
    dims: Vec<(usize, u64)>,
    is_forward: bool,
    /// Half of the spectrum is made of a real signal.
    to_half: bool,
    factor: f64,
}

impl Spectrum {
    /// The dimensions are transformed one after another: first the one whose other half is not
    /// needed, or last. A real result is made of half a spectrum.
    fn of(self, p: &mut Parts<'_, '_>, x: Number) -> Result<Results> {
        let dtype = p.made()?.0;
        let is_real = p.call.n_results() == 1;
        let real = p.call.whole(x.real, dtype)?;
        let imaginary = x.imaginary.map(|part| p.call.whole(part, dtype));
        let mut parts = (real, imaginary.transpose()?);
        let mut dims = self.dims;
        if !is_real {
            dims.reverse();
        }
        let mut factor = self.factor;
        let n_dims = dims.len();
        for (i, (dim, n)) in dims.into_iter().enumerate() {
            let transform = Transform {
                n,
                is_forward: self.is_forward,
                from_half: is_real && i + 1 == n_dims,
                to_half: self.to_half && i == 0,
                factor: std::mem::replace(&mut factor, 1.0),
            };
            parts = transform.along(&mut p.call, parts, dim)?;
        }
        match is_real {
            true => one(parts.0),
            false => p.result(Some(parts.0), parts.1),
        }
    }
}

/// `_fft_r2c`, `_fft_c2r` and `_fft_c2c`
fn transform(p: &mut Parts<'_, '_>) -> Result<Results> {
    let x = p.number("self")?;
    let (dtype, made) = p.made()?;
    let given = p.call.whole(x.real, dtype)?;
    let is_real = p.call.n_results() == 1;
    let list = p.call.ints("dim")?;
    let mut dims = vec![];
    for (i, &dim) in list.iter().enumerate() {
        let dim = wrap(dim, made.len())?;
        let is_last = i + 1 == list.len();
        let n = if is_real && is_last {
            made[dim]
        } else {
            p.call.shape_of(given)[dim]
        };
        dims.push((dim, n));
    }
    let n = dims.iter().map(|&(_, n)| n as f64).product::<f64>();
    let factor = match p.call.int("normalization")? {
        0 => 1.0,
        1 => 1.0 / n.sqrt(),
        2 => 1.0 / n,
        _ => return Err("an unknown normalization".into()),
    };
    p.call.ignore(&["last_dim_size"]);
    let spectrum = Spectrum {
        dims,
        is_forward: p.call.bool_or("forward", !is_real)?,
        to_half: p.call.bool_or("onesided", false)? && x.imaginary.is_none(),
        factor,
    };
    spectrum.of(p, x)
}

/// `torch.fft.fft` and the like, as torch exports them before it decomposes them. `last` are the
/// dimensions that are transformed by default; `None` for all.
fn signal(p: &mut Parts<'_, '_>, last: Option<usize>, is_forward: bool) -> Result<Results> {
    let mut x = p.number("self")?;
    let (dtype, made) = p.made()?;
    let is_real = p.call.n_results() == 1;
    let sizes = match p.call.opt_ints("n")? {
        Some(n) => Some(n),
        None => p.call.opt_ints("s")?,
    };
    let dims = match (p.call.opt_ints("dim")?, &sizes) {
        (Some(dims), _) => dims,
        (None, Some(sizes)) if last.is_none() => (-(sizes.len() as i64)..0).collect(),
        (None, _) => (-(last.unwrap_or(made.len()) as i64)..0).collect(),
    };
    let given = p.call.whole(x.real, dtype)?;
    let given = p.call.shape_of(given);
    let to_half = !is_real && x.imaginary.is_none() && is_forward;
    let mut spectrum = Spectrum {
        dims: vec![],
        is_forward,
        // Only `rfft` makes half of a spectrum: then the last dimension is not as long as before.
        to_half: false,
        factor: 1.0,
    };
    for (i, &dim) in dims.iter().enumerate() {
        let dim = wrap(dim, made.len())?;
        let is_last = i + 1 == dims.len();
        let n = match sizes.as_ref().and_then(|sizes| sizes.get(i)) {
            Some(&n) if n >= 0 => n as u64,
            _ if is_real && is_last => made[dim],
            _ => given[dim],
        };
        let half = n / 2 + 1;
        spectrum.to_half |= to_half && is_last && made[dim] == half && half < n;
        let size = if is_real && is_last { half } else { n };
        let mut sized = |part: Operand| {
            let part = p.call.whole(part, dtype)?;
            p.call.resized(part, dim, size).map(Operand::Tensor)
        };
        x.real = sized(x.real)?;
        x.imaginary = x.imaginary.map(sized).transpose()?;
        spectrum.dims.push((dim, n));
    }
    let n = spectrum
        .dims
        .iter()
        .map(|&(_, n)| n as f64)
        .product::<f64>();
    spectrum.factor = match (p.call.string_or("norm", "backward")?.as_str(), is_forward) {
        ("backward", true) | ("forward", false) => 1.0,
        ("backward", false) | ("forward", true) => 1.0 / n,
        ("ortho", _) => 1.0 / n.sqrt(),
        _ => return Err("an unknown normalization".into()),
    };
    spectrum.of(p, x)
}
