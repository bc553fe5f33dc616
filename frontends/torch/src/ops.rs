//! What torch's operators are in terms of our op table: one match, and the compositions it needs.
//!
//! A call may become no node (another name of its operand), one, or several. Whatever the table
//! cannot express is an error with the reason; the importer makes an `extern` node of such a call.

use crate::call::{Call, Operand, Plan, R, Ref, Scalar, Step, attr_ints, wrap};
use ir::{Attr, DType, Op, TensorType, Value};

/// True for calls that only check something.
pub(crate) fn is_assertion(target: &str) -> bool {
    let name = target.strip_prefix("torch.ops.aten.").unwrap_or(target);
    name.starts_with("_assert")
        || name.starts_with("sym_constrain")
        || target.starts_with("_operator.")
}

/// True for operators that move, sum or convert elements: what autograd adds around the op that
/// matters.
pub(crate) fn is_shape(target: &str) -> bool {
    let name = target
        .strip_prefix("torch.ops.aten.")
        .and_then(|name| name.split('.').next())
        .unwrap_or("");
    matches!(
        name,
        "view"
            | "_unsafe_view"
            | "reshape"
            | "permute"
            | "t"
            | "transpose"
            | "squeeze"
            | "unsqueeze"
            | "sum"
            | "clone"
            | "alias"
            | "detach"
            | "_to_copy"
    )
}

/// A node for a call that the table cannot express.
pub(crate) fn external(target: &str, operands: &[Value], types: &[Option<TensorType>]) -> R<Plan> {
    let texts: Vec<String> = types.iter().flatten().map(|ty| ty.to_string()).collect();
    let op = Op::new(
        "extern",
        [
            ("name", Attr::Str(target.into())),
            ("types", Attr::Str(texts.join(" "))),
        ],
    )?;
    let inputs = operands.iter().map(|&value| Ref::Value(value)).collect();
    let mut new = (0..).map(Ref::New);
    let results = types
        .iter()
        .map(|ty| ty.as_ref().and_then(|_| new.next()))
        .collect();
    Ok(Plan {
        steps: vec![Step {
            op,
            inputs,
            n_results: texts.len(),
        }],
        results,
        streams: None,
    })
}

/// The nodes for a call.
pub(crate) fn lower(mut call: Call<'_, '_>) -> R<Plan> {
    let results = results(&mut call)?;
    call.finish(results)
}

fn one(x: Ref) -> R<Vec<Option<Ref>>> {
    Ok(vec![Some(x)])
}
fn all(list: Vec<Ref>) -> R<Vec<Option<Ref>>> {
    Ok(list.into_iter().map(Some).collect())
}
fn ensure(condition: bool, why: &str) -> R<()> {
    if condition { Ok(()) } else { Err(why.into()) }
}
/// The number of elements of a shape.
fn count(shape: &[u64]) -> R<u64> {
    let n = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
    n.ok_or_else(|| "too large".into())
}
fn dim_attr(dim: usize) -> (&'static str, Attr) {
    ("dim", Attr::Int(dim as i64))
}
fn ints(key: &'static str, list: &[i64]) -> (&'static str, Attr) {
    (key, Attr::Ints(list.to_vec()))
}

fn results(c: &mut Call<'_, '_>) -> R<Vec<Option<Ref>>> {
    let target = c.target();
    let (namespace, rest) = target.split_once('.').unwrap_or(("", target));
    let (name, overload) = rest.split_once('.').unwrap_or((rest, ""));
    if namespace != "aten" && (namespace, name) != ("prims", "convert_element_type") {
        return Err("no op for it".into());
    }
    match name {
        // --- the same tensor by another name ---
        "alias" | "alias_copy" | "detach" | "detach_" | "detach_copy" | "clone" | "contiguous"
        | "lift_fresh" | "lift_fresh_copy" => one(c.tensor("self")?),
        "_to_copy" | "to" | "type_as" | "convert_element_type" => {
            let x = c.tensor(if name == "convert_element_type" {
                "a"
            } else {
                "self"
            })?;
            c.opt_dtype("dtype")?;
            c.ignore(&["other"]);
            let dtype = c.result()?.dtype();
            one(c.cast(x, dtype)?)
        }
        "copy" => {
            let (x, source) = (c.tensor("self")?, c.tensor("src")?);
            let shape = c.shape_of(x);
            let source = c.cast(source, c.dtype(x))?;
            one(c.expand(source, &shape)?)
        }

        // --- one operand, by elements ---
        "neg" | "abs" | "sign" | "sgn" | "exp" | "log" | "sqrt" | "rsqrt" | "reciprocal"
        | "tanh" | "sigmoid" | "sin" | "cos" | "erf" | "relu" | "silu" => {
            let x = c.tensor("self")?;
            let x = c.cast(x, c.result()?.dtype())?;
            one(c.map(if name == "sgn" { "sign" } else { name }, x)?)
        }
        "gelu" => {
            let (x, tanh) = (c.tensor("self")?, approximation(c)?);
            one(c.step("gelu", &[tanh], &[x])?)
        }
        "bitwise_not" => {
            let x = c.tensor("self")?;
            one(if c.dtype(x) == DType::Bool {
                c.map("logical_not", x)?
            } else {
                c.map("bitwise_not", x)?
            })
        }
        "logical_not" => {
            let x = c.tensor("self")?;
            let x = c.truth(x)?;
            one(c.map("logical_not", x)?)
        }
        "square" => {
            let x = c.tensor("self")?;
            one(c.step("mul", &[], &[x, x])?)
        }
        "log2" | "log10" => {
            let x = c.tensor("self")?;
            let x = c.cast(x, c.result()?.dtype())?;
            let y = c.map("log", x)?;
            let base: f64 = if name == "log2" {
                std::f64::consts::LN_2
            } else {
                std::f64::consts::LN_10
            };
            one(c.scalar_step("div_scalar", y, Scalar::Float(base))?)
        }
        "exp2" => {
            let x = c.tensor("self")?;
            let x = c.cast(x, c.result()?.dtype())?;
            let x = c.scalar_step("mul_scalar", x, Scalar::Float(std::f64::consts::LN_2))?;
            one(c.map("exp", x)?)
        }
        "isnan" | "isinf" | "isfinite" => {
            let x = c.tensor("self")?;
            let x = if c.dtype(x).is_float() {
                x
            } else {
                c.cast(x, DType::F32)?
            };
            if name == "isnan" {
                return one(c.step("ne", &[], &[x, x])?);
            }
            let x = c.map("abs", x)?;
            let op = if name == "isinf" {
                "eq_scalar"
            } else {
                "lt_scalar"
            };
            one(c.scalar_step(op, x, Scalar::Float(f64::INFINITY))?)
        }
        "floor" | "ceil" | "trunc" => {
            let x = c.tensor("self")?;
            one(rounded(c, x, name)?)
        }
        "leaky_relu" => {
            let (x, slope) = (
                c.tensor("self")?,
                c.scalar_or("negative_slope", Scalar::Float(0.01))?,
            );
            let low = c.scalar_step("mul_scalar", x, slope)?;
            let positive = c.scalar_step("gt_scalar", x, Scalar::Float(0.0))?;
            one(c.step("where", &[], &[positive, x, low])?)
        }
        "leaky_relu_backward" => {
            let (dy, x) = (c.tensor("grad_output")?, c.tensor("self")?);
            let slope = c.scalar("negative_slope")?;
            // The sign of the result is that of the operand, unless the slope is negative.
            let of_result = c.bool_or("self_is_result", false)?;
            ensure(
                !of_result || 0.0 <= slope.float(),
                "a negative slope hides the operand's sign",
            )?;
            let low = c.scalar_step("mul_scalar", dy, slope)?;
            let positive = c.scalar_step("gt_scalar", x, Scalar::Float(0.0))?;
            one(c.step("where", &[], &[positive, dy, low])?)
        }
        "clamp" | "clamp_min" | "clamp_max" | "hardtanh" | "relu6" => {
            if overload == "Tensor" {
                return clamp_by_tensors(c, name);
            }
            let (min, max) = match name {
                "hardtanh" => (
                    Some(c.scalar_or("min_val", Scalar::Float(-1.0))?),
                    Some(c.scalar_or("max_val", Scalar::Float(1.0))?),
                ),
                "relu6" => (Some(Scalar::Int(0)), Some(Scalar::Int(6))),
                _ => (c.opt_scalar("min")?, c.opt_scalar("max")?),
            };
            let x = c.tensor("self")?;
            let dtype = c.result()?.dtype();
            let x = c.cast(x, dtype)?;
            let (least, most) = bounds(dtype);
            let attrs = [
                ("max", max.unwrap_or(most).attr(dtype)?),
                ("min", min.unwrap_or(least).attr(dtype)?),
            ];
            one(c.step("clamp", &attrs, &[x])?)
        }
        "hardtanh_backward" => {
            let (dy, x) = (c.tensor("grad_output")?, c.tensor("self")?);
            let (min, max) = (c.scalar("min_val")?, c.scalar("max_val")?);
            let (above, below) = (
                c.scalar_step("gt_scalar", x, min)?,
                c.scalar_step("lt_scalar", x, max)?,
            );
            let inside = c.step("logical_and", &[], &[above, below])?;
            one(masked(c, inside, dy)?)
        }

        // --- two operands, with promotion ---
        "add" | "sub" => {
            let (a, b) = (c.operand("self")?, c.operand("other")?);
            let alpha = c.scalar_or("alpha", Scalar::Int(1))?;
            let dtype = c.result()?.dtype();
            let b = scaled(c, b, alpha, dtype)?;
            one(arithmetic(c, name, a, b, dtype)?)
        }
        "rsub" => {
            let (a, b) = (c.operand("self")?, c.operand("other")?);
            let alpha = c.scalar_or("alpha", Scalar::Int(1))?;
            let dtype = c.result()?.dtype();
            let a = scaled(c, a, alpha, dtype)?;
            one(arithmetic(c, "sub", b, a, dtype)?)
        }
        "mul" | "maximum" | "minimum" => {
            let (a, b) = (c.operand("self")?, c.operand("other")?);
            let dtype = c.result()?.dtype();
            one(arithmetic(c, name, a, b, dtype)?)
        }
        "div" | "true_divide" | "floor_divide" => {
            let (a, b) = (c.operand("self")?, c.operand("other")?);
            let dtype = c.result()?.dtype();
            let rounding = if name == "floor_divide" {
                "floor"
            } else {
                c.string_or("rounding_mode", "")?
            };
            one(match rounding {
                "" => arithmetic(c, "div", a, b, dtype)?,
                rounding => quotient(c, a, b, dtype, rounding)?,
            })
        }
        "remainder" => {
            let (a, b) = (c.operand("self")?, c.operand("other")?);
            let dtype = c.result()?.dtype();
            let whole_times = quotient(c, a, b, dtype, "floor")?;
            let product = arithmetic(c, "mul", Operand::Tensor(whole_times), b, dtype)?;
            one(arithmetic(c, "sub", a, Operand::Tensor(product), dtype)?)
        }
        "pow" => {
            let (a, b) = (c.operand("self")?, c.operand("exponent")?);
            let dtype = c.result()?.dtype();
            one(arithmetic(c, "pow", a, b, dtype)?)
        }
        "eq" | "ne" | "lt" | "le" | "gt" | "ge" => {
            let (a, b) = (c.operand("self")?, c.operand("other")?);
            one(compare(c, name, a, b)?)
        }
        "bitwise_and" | "bitwise_or" | "bitwise_xor" | "__and__" | "__or__" | "__xor__" => {
            let (a, b) = (c.operand("self")?, c.operand("other")?);
            let dtype = c.result()?.dtype();
            let op = match name {
                "bitwise_and" | "__and__" => "bitwise_and",
                "bitwise_or" | "__or__" => "bitwise_or",
                _ => "bitwise_xor",
            };
            let (a, b) = (whole(c, a, dtype)?, whole(c, b, dtype)?);
            one(c.step(op, &[], &[a, b])?)
        }
        "logical_and" | "logical_or" | "logical_xor" => {
            let (a, b) = (c.tensor("self")?, c.tensor("other")?);
            let (a, b) = (c.truth(a)?, c.truth(b)?);
            one(c.step(
                if name == "logical_xor" { "ne" } else { name },
                &[],
                &[a, b],
            )?)
        }
        "where" => {
            let condition = c.tensor("condition")?;
            let (a, b) = (c.operand("self")?, c.operand("other")?);
            let dtype = c.result()?.dtype();
            let condition = c.truth(condition)?;
            let (a, b) = (whole(c, a, dtype)?, whole(c, b, dtype)?);
            one(c.step("where", &[], &[condition, a, b])?)
        }
        "masked_fill" => {
            let (x, mask, value) = (c.tensor("self")?, c.tensor("mask")?, c.operand("value")?);
            let mask = c.truth(mask)?;
            let value = whole(c, value, c.dtype(x))?;
            one(c.step("where", &[], &[mask, value, x])?)
        }
        "addcmul" | "addcdiv" => {
            let (x, a, b) = (
                c.tensor("self")?,
                c.tensor("tensor1")?,
                c.tensor("tensor2")?,
            );
            let value = c.scalar_or("value", Scalar::Int(1))?;
            let dtype = c.result()?.dtype();
            let op = if name == "addcmul" { "mul" } else { "div" };
            let y = arithmetic(c, op, Operand::Tensor(a), Operand::Tensor(b), dtype)?;
            let y = scaled(c, Operand::Tensor(y), value, dtype)?;
            one(arithmetic(c, "add", Operand::Tensor(x), y, dtype)?)
        }
        "lerp" => {
            let (x, end, weight) = (c.tensor("self")?, c.tensor("end")?, c.operand("weight")?);
            let dtype = c.result()?.dtype();
            let span = c.step("sub", &[], &[end, x])?;
            let part = arithmetic(c, "mul", Operand::Tensor(span), weight, dtype)?;
            one(c.step("add", &[], &[x, part])?)
        }

        // --- derivatives of functions by elements ---
        "tanh_backward" | "sigmoid_backward" => {
            let (dy, y) = (c.tensor("grad_output")?, c.tensor("output")?);
            let op = if name == "tanh_backward" {
                "tanh_bwd"
            } else {
                "sigmoid_bwd"
            };
            one(c.step(op, &[], &[dy, y])?)
        }
        "silu_backward" => {
            let (dy, x) = (c.tensor("grad_output")?, c.tensor("self")?);
            one(c.step("silu_bwd", &[], &[dy, x])?)
        }
        "gelu_backward" => {
            let (dy, x, tanh) = (
                c.tensor("grad_output")?,
                c.tensor("self")?,
                approximation(c)?,
            );
            one(c.step("gelu_bwd", &[tanh], &[dy, x])?)
        }
        "threshold_backward" => {
            let (dy, x, value) = (
                c.tensor("grad_output")?,
                c.tensor("self")?,
                c.scalar("threshold")?,
            );
            let value = value.attr(c.dtype(x))?;
            one(c.step("threshold_bwd", &[("value", value)], &[dy, x])?)
        }

        // --- reductions ---
        "sum" | "mean" => {
            let x = c.tensor("self")?;
            let (dims, keepdim) = (c.dims("dim", c.rank(x))?, c.bool_or("keepdim", false)?);
            c.opt_dtype("dtype")?;
            let x = c.cast(x, c.result()?.dtype())?;
            one(c.reduce(name, x, &dims, keepdim)?)
        }
        "amax" | "amin" => {
            let x = c.tensor("self")?;
            let (dims, keepdim) = (c.dims("dim", c.rank(x))?, c.bool_or("keepdim", false)?);
            one(c.reduce(name, x, &dims, keepdim)?)
        }
        "max" | "min" if overload == "other" => {
            let (a, b) = (c.operand("self")?, c.operand("other")?);
            let dtype = c.result()?.dtype();
            one(arithmetic(
                c,
                if name == "max" { "maximum" } else { "minimum" },
                a,
                b,
                dtype,
            )?)
        }
        "max" | "min" if overload == "default" => {
            let x = c.tensor("self")?;
            let dims: Vec<usize> = (0..c.rank(x)).collect();
            one(c.reduce(if name == "max" { "amax" } else { "amin" }, x, &dims, false)?)
        }
        "max" | "min" if overload == "dim" => {
            let x = c.tensor("self")?;
            let dim = c.dim("dim", None, c.rank(x))?;
            let keepdim = c.bool_or("keepdim", false)?;
            all(extreme(c, x, dim, keepdim, name == "max")?)
        }
        "argmax" | "argmin" => {
            let mut x = c.tensor("self")?;
            let keepdim = c.bool_or("keepdim", false)?;
            let dim = match c.opt_int("dim")? {
                Some(dim) => wrap(dim, c.rank(x))?,
                None => {
                    ensure(!keepdim, "keeps the dimensions of a flattened tensor")?;
                    let n = c.ty(x).numel();
                    x = c.reshape(x, &[n])?;
                    0
                }
            };
            one(extreme(c, x, dim, keepdim, name == "argmax")?[1])
        }
        "any" | "all" => {
            let x = c.tensor("self")?;
            let (dims, keepdim) = (c.dims("dim", c.rank(x))?, c.bool_or("keepdim", false)?);
            let mut y = c.truth(x)?;
            if name == "all" {
                y = c.map("logical_not", y)?;
            }
            y = c.reduce("any", y, &dims, keepdim)?;
            if name == "all" {
                y = c.map("logical_not", y)?;
            }
            // any() of bytes is a byte.
            one(c.cast(y, c.result()?.dtype())?)
        }
        "cumsum" => {
            let x = c.tensor("self")?;
            let dim = c.dim("dim", None, c.rank(x))?;
            c.opt_dtype("dtype")?;
            let x = c.cast(x, c.result()?.dtype())?;
            one(c.step("cumsum", &[dim_attr(dim)], &[x])?)
        }
        "topk" => {
            let (x, k) = (c.tensor("self")?, c.int("k")?);
            let dim = c.dim("dim", Some(-1), c.rank(x))?;
            let largest = c.bool_or("largest", true)?;
            // Sorted results are right where any order would be.
            c.bool_or("sorted", true)?;
            all(topk(c, x, dim, k, largest)?)
        }
        "sort" if overload == "default" => {
            let x = c.tensor("self")?;
            let dim = c.dim("dim", Some(-1), c.rank(x))?;
            let (descending, size) = (c.bool_or("descending", false)?, c.ty(x).shape()[dim]);
            all(topk(c, x, dim, size as i64, descending)?)
        }
        "var" | "std" | "var_mean" | "std_mean" => variance(c, name),
        "logsumexp" => {
            let x = c.tensor("self")?;
            let (dims, keepdim) = (c.dims("dim", c.rank(x))?, c.bool_or("keepdim", false)?);
            let max = c.reduce("amax", x, &dims, true)?;
            // A row of -inf has no finite maximum to subtract.
            let finite = c.map("abs", max)?;
            let finite = c.scalar_step("lt_scalar", finite, Scalar::Float(f64::INFINITY))?;
            let max = masked(c, finite, max)?;
            let y = c.step("sub", &[], &[x, max])?;
            let y = c.map("exp", y)?;
            let y = c.reduce("sum", y, &dims, true)?;
            let y = c.map("log", y)?;
            let y = c.step("add", &[], &[y, max])?;
            let shape = c.result()?.shape().to_vec();
            ensure(
                keepdim || c.ty(y).numel() == count(&shape)?,
                "the shapes do not fit",
            )?;
            one(c.reshape(y, &shape)?)
        }
        "linalg_vector_norm" | "norm" => {
            let x = c.tensor("self")?;
            let order = c.float_or(if name == "norm" { "p" } else { "ord" }, 2.0)?;
            let (dims, keepdim) = (c.dims("dim", c.rank(x))?, c.bool_or("keepdim", false)?);
            c.opt_dtype("dtype")?;
            let x = c.cast(x, c.result()?.dtype())?;
            one(if order == 2.0 {
                let y = c.step("mul", &[], &[x, x])?;
                let y = c.reduce("sum", y, &dims, keepdim)?;
                c.map("sqrt", y)?
            } else if order == 1.0 || order == f64::INFINITY {
                let y = c.map("abs", x)?;
                c.reduce(if order == 1.0 { "sum" } else { "amax" }, y, &dims, keepdim)?
            } else {
                return Err(format!("no norm of order {order}"));
            })
        }

        // --- softmax ---
        "_softmax" | "_log_softmax" | "softmax" | "log_softmax" | "_safe_softmax" => {
            let x = c.tensor("self")?;
            let dim = c.dim("dim", None, c.rank(x))?;
            c.bool_or("half_to_float", false)?;
            c.opt_dtype("dtype")?;
            let x = c.cast(x, c.result()?.dtype())?;
            let op = if name.ends_with("log_softmax") {
                "log_softmax"
            } else {
                "softmax"
            };
            let y = c.step(op, &[dim_attr(dim)], &[x])?;
            if name != "_safe_softmax" {
                return one(y);
            }
            // A row of -inf gives zeros instead of NaN.
            let live = c.scalar_step("ne_scalar", x, Scalar::Float(f64::NEG_INFINITY))?;
            let live = c.reduce("any", live, &[dim], true)?;
            one(masked(c, live, y)?)
        }
        "_softmax_backward_data" | "_log_softmax_backward_data" => {
            let (dy, y) = (c.tensor("grad_output")?, c.tensor("output")?);
            let dim = c.dim("dim", None, c.rank(y))?;
            c.opt_dtype("input_dtype")?;
            let op = if name == "_softmax_backward_data" {
                "softmax_bwd"
            } else {
                "log_softmax_bwd"
            };
            let dx = c.step(op, &[dim_attr(dim)], &[dy, y])?;
            one(c.cast(dx, c.result()?.dtype())?)
        }

        // --- normalisation ---
        "native_layer_norm" => layer_norm(c),
        "native_layer_norm_backward" => layer_norm_backward(c),
        "_fused_rms_norm" => rms_norm(c),
        "_fused_rms_norm_backward" => rms_norm_backward(c),
        "native_group_norm" => group_norm(c),
        "native_group_norm_backward" => group_norm_backward(c),
        "_native_batch_norm_legit_functional" => {
            let training = c.bool_or("training", true)?;
            if training {
                batch_norm(c)
            } else {
                batch_norm_eval(c)
            }
        }
        "_batch_norm_with_update_functional" => {
            let made = batch_norm(c)?;
            let reserve = placeholder(c, 3)?;
            Ok(vec![made[0], made[1], made[2], reserve, made[3], made[4]])
        }
        "_native_batch_norm_legit_no_training" => batch_norm_eval(c),
        "native_batch_norm_backward" | "batch_norm_backward" => batch_norm_backward(c),

        // --- products ---
        "mm" | "bmm" => {
            let (a, b) = (c.tensor("self")?, c.tensor("mat2")?);
            ensure(
                c.rank(a) == if name == "mm" { 2 } else { 3 },
                "the factors have another rank",
            )?;
            one(product(c, a, b)?)
        }
        "addmm" | "baddbmm" => {
            let (x, a, b) = match name {
                "addmm" => (c.tensor("self")?, c.tensor("mat1")?, c.tensor("mat2")?),
                _ => (c.tensor("self")?, c.tensor("batch1")?, c.tensor("batch2")?),
            };
            let beta = c.scalar_or("beta", Scalar::Int(1))?;
            let alpha = c.scalar_or("alpha", Scalar::Int(1))?;
            let dtype = c.result()?.dtype();
            // torch does not even read the summand if it is multiplied by zero.
            let x = if beta.float() == 0.0 {
                None
            } else {
                Some(scaled(c, Operand::Tensor(x), beta, dtype)?)
            };
            if let (Some(Operand::Tensor(x)), true) = (x, alpha.float() == 1.0) {
                return one(c.step("addmm", &transposed(false, false), &[x, a, b])?);
            }
            let y = product(c, a, b)?;
            let y = scaled(c, Operand::Tensor(y), alpha, dtype)?;
            match (x, y) {
                (Some(x), y) => one(arithmetic(c, "add", x, y, dtype)?),
                (None, Operand::Tensor(y)) => one(y),
                (None, Operand::Scalar(_)) => Err("a product is no number".into()),
            }
        }
        "mv" => {
            let (a, b) = (c.tensor("self")?, c.tensor("vec")?);
            one(general_product(c, a, b)?)
        }
        "dot" | "vdot" => {
            let (a, b) = (
                c.tensor("self")?,
                c.tensor(if name == "dot" { "tensor" } else { "other" })?,
            );
            one(general_product(c, a, b)?)
        }
        "matmul" => {
            let (a, b) = (c.tensor("self")?, c.tensor("other")?);
            one(general_product(c, a, b)?)
        }
        "linear" => {
            let (x, w, bias) = (
                c.tensor("input")?,
                c.tensor("weight")?,
                c.opt_tensor("bias")?,
            );
            ensure(c.rank(w) == 2 && 1 <= c.rank(x), "the weight is no matrix")?;
            let lead = c.shape_of(x)[..c.rank(x) - 1].to_vec();
            let inner = c.ty(w).shape()[1];
            let rows = c.reshape(x, &[count(&lead)?, inner])?;
            let y = match bias {
                Some(bias) => c.step("addmm", &transposed(false, true), &[bias, rows, w])?,
                None => c.step("matmul", &transposed(false, true), &[rows, w])?,
            };
            let shape: Vec<u64> = lead.into_iter().chain([c.ty(w).shape()[0]]).collect();
            one(c.reshape(y, &shape)?)
        }
        "outer" => {
            let (a, b) = (c.tensor("self")?, c.tensor("vec2")?);
            let column = [c.ty(a).numel(), 1];
            let a = c.reshape(a, &column)?;
            one(c.step("mul", &[], &[a, b])?)
        }
        "convolution" | "conv1d" | "conv2d" => {
            let (x, w, bias) = (
                c.tensor("input")?,
                c.tensor("weight")?,
                c.opt_tensor("bias")?,
            );
            let attrs = convolution(c, w)?;
            let operands: Vec<Ref> = [Some(x), Some(w), bias].into_iter().flatten().collect();
            one(c.step("convolution", &attrs, &operands)?)
        }
        "convolution_backward" => {
            let (dy, x, w) = (
                c.tensor("grad_output")?,
                c.tensor("input")?,
                c.tensor("weight")?,
            );
            c.ignore(&["bias_sizes"]);
            let mut attrs = convolution(c, w)?;
            masked_results(c, 3, |c, mask| {
                attrs.push(mask);
                c.steps("convolution_bwd", &attrs, &[dy, x, w])
            })
        }
        "max_pool2d_with_indices" => {
            let x = c.tensor("self")?;
            let attrs = pooling(c)?;
            let shape = c.shape_of(x);
            let x = images(c, x)?;
            let mut made = c.steps("max_pool2d", &attrs, &[x])?;
            for y in &mut made {
                let all = c.shape_of(*y);
                *y = c.reshape(*y, if shape.len() == 3 { &all[1..] } else { &all })?;
            }
            all(made)
        }
        "max_pool2d_with_indices_backward" => {
            let (dy, x, index) = (
                c.tensor("grad_output")?,
                c.tensor("self")?,
                c.tensor("indices")?,
            );
            // The indices say which element of the window it was.
            pooling(c)?;
            let shape = c.shape_of(x);
            let (dy, index) = (images(c, dy)?, images(c, index)?);
            let full: Vec<u64> = if shape.len() == 3 {
                [&[1], &shape[..]].concat()
            } else {
                shape.clone()
            };
            let dx = c.step(
                "max_pool2d_bwd",
                &[("shape", attr_ints(&full)?)],
                &[dy, index],
            )?;
            one(c.reshape(dx, &shape)?)
        }
        "_adaptive_avg_pool2d" | "adaptive_avg_pool2d" => {
            let (x, size) = (c.tensor("self")?, c.ints("output_size")?);
            let rank = c.rank(x);
            ensure(
                size == [1, 1] && 2 <= rank,
                "only the average of whole images is known",
            )?;
            one(c.reduce("mean", x, &[rank - 2, rank - 1], true)?)
        }
        "_adaptive_avg_pool2d_backward" => {
            let (dy, x) = (c.tensor("grad_output")?, c.tensor("self")?);
            let (rank, shape) = (c.rank(x), c.shape_of(x));
            ensure(
                2 <= rank && c.shape_of(dy).ends_with(&[1, 1]),
                "only the average of whole images is known",
            )?;
            let n = (shape[rank - 2] * shape[rank - 1]) as f64;
            let dy = c.scalar_step("div_scalar", dy, Scalar::Float(n))?;
            one(c.expand(dy, &shape)?)
        }

        // --- attention ---
        "_scaled_dot_product_flash_attention_for_cpu"
        | "_scaled_dot_product_efficient_attention"
        | "_scaled_dot_product_flash_attention" => attention(c, name),
        "_scaled_dot_product_flash_attention_for_cpu_backward"
        | "_scaled_dot_product_efficient_attention_backward"
        | "_scaled_dot_product_flash_attention_backward" => attention_backward(c, name),

        // --- tables and losses ---
        "embedding" => {
            let (w, index) = (c.tensor("weight")?, c.tensor("indices")?);
            // These speak of the gradient, which is an operator of its own.
            c.ignore(&["padding_idx", "scale_grad_by_freq", "sparse"]);
            one(c.step("embedding", &[], &[w, index])?)
        }
        "embedding_dense_backward" => {
            let (dy, index) = (c.tensor("grad_output")?, c.tensor("indices")?);
            let (rows, padding) = (c.int("num_weights")?, c.int("padding_idx")?);
            ensure(
                !c.bool_or("scale_grad_by_freq", false)?,
                "scales by frequency",
            )?;
            let padding = padding.max(-1);
            one(c.step(
                "embedding_bwd",
                &[("padding", Attr::Int(padding)), ("rows", Attr::Int(rows))],
                &[dy, index],
            )?)
        }
        "nll_loss_forward" | "nll_loss2d_forward" => nll_loss(c),
        "nll_loss_backward" | "nll_loss2d_backward" => nll_loss_backward(c),
        "mse_loss" => {
            let (x, t, reduction) = (
                c.tensor("self")?,
                c.tensor("target")?,
                c.int_or("reduction", 1)?,
            );
            let d = c.step("sub", &[], &[x, t])?;
            let y = c.step("mul", &[], &[d, d])?;
            let dims: Vec<usize> = (0..c.rank(y)).collect();
            one(match reduction {
                0 => y,
                1 => c.reduce("mean", y, &dims, false)?,
                _ => c.reduce("sum", y, &dims, false)?,
            })
        }
        "mse_loss_backward" => {
            let (dy, x, t) = (
                c.tensor("grad_output")?,
                c.tensor("self")?,
                c.tensor("target")?,
            );
            let reduction = c.int("reduction")?;
            let d = c.step("sub", &[], &[x, t])?;
            let scale = if reduction == 1 {
                2.0 / c.ty(d).numel() as f64
            } else {
                2.0
            };
            let d = c.scalar_step("mul_scalar", d, Scalar::Float(scale))?;
            one(c.step("mul", &[], &[d, dy])?)
        }

        // --- indices ---
        "gather" | "take_along_dim" => {
            let (x, index) = (
                c.tensor("self")?,
                c.tensor(if name == "gather" { "index" } else { "indices" })?,
            );
            let dim = c.dim("dim", None, c.rank(x))?;
            c.bool_or("sparse_grad", false)?;
            ensure(c.rank(x) == c.rank(index), "the index has another rank")?;
            one(c.step("gather", &[dim_attr(dim)], &[x, index])?)
        }
        "scatter" | "scatter_add" | "scatter_reduce" => {
            let (x, index) = (c.tensor("self")?, c.tensor("index")?);
            let dim = c.dim("dim", None, c.rank(x))?;
            let reduce = c.string_or("reduce", "")?;
            let op = match (name, reduce) {
                ("scatter", "") => "scatter",
                ("scatter_add", _) | (_, "add") => "scatter_add",
                ("scatter_reduce", "sum") if c.bool_or("include_self", true)? => "scatter_add",
                _ => return Err(format!("no scatter that reduces by {reduce:?}")),
            };
            if overload == "value" {
                let value = c.scalar("value")?.attr(c.dtype(x))?;
                return one(c.step(
                    "scatter_value",
                    &[dim_attr(dim), ("value", value)],
                    &[x, index],
                )?);
            }
            let source = c.tensor("src")?;
            one(c.step(op, &[dim_attr(dim)], &[x, index, source])?)
        }
        "index" | "_unsafe_index" => index(c),
        "index_put" | "_unsafe_index_put" => index_put(c),
        "index_select" => {
            let (x, i) = (c.tensor("self")?, c.tensor("index")?);
            let dim = c.dim("dim", None, c.rank(x))?;
            let n = c.ty(i).numel();
            let i = c.reshape(i, &[n])?;
            let mut indices = vec![None; dim];
            indices.push(Some(i));
            let front = Front::new(c, x, &indices)?;
            let y = front.index(c)?;
            one(front.back(c, y)?)
        }
        "index_add" => {
            let (x, i, source) = (c.tensor("self")?, c.tensor("index")?, c.tensor("source")?);
            let dim = c.dim("dim", None, c.rank(x))?;
            let alpha = c.scalar_or("alpha", Scalar::Int(1))?;
            let dtype = c.dtype(x);
            let Operand::Tensor(source) = scaled(c, Operand::Tensor(source), alpha, dtype)? else {
                return Err("the source is no tensor".into());
            };
            let n = c.ty(i).numel();
            let i = c.reshape(i, &[n])?;
            let mut indices = vec![None; dim];
            indices.push(Some(i));
            let front = Front::new(c, x, &indices)?;
            one(front.put(c, source, true)?)
        }

        // --- shapes ---
        "view" | "_unsafe_view" | "reshape" | "view_copy" | "_reshape_alias" => {
            let x = c.tensor("self")?;
            if overload == "dtype" {
                return Err("reads the bits as another type".into());
            }
            let size = c.ints("size").or_else(|_| c.ints("shape"))?;
            c.ignore(&["stride"]);
            let shape = resolved(c, x, &size)?;
            one(c.reshape(x, &shape)?)
        }
        "flatten" | "squeeze" | "squeeze_copy" | "unsqueeze" | "unsqueeze_copy" | "unflatten"
        | "view_as" => {
            // The file's type of the result is the shape; the table checks that it has as many
            // elements.
            let x = c.tensor("self")?;
            c.ignore(&["start_dim", "end_dim", "dim", "sizes", "other"]);
            let shape = c.result()?.shape().to_vec();
            one(c.reshape(x, &shape)?)
        }
        "permute" | "permute_copy" => {
            let x = c.tensor("self")?;
            let rank = c.rank(x);
            let dims: R<Vec<usize>> = c.ints("dims")?.into_iter().map(|d| wrap(d, rank)).collect();
            one(c.permute(x, &dims?)?)
        }
        "t" | "numpy_T" | "mT" | "transpose" | "transpose_copy" | "t_copy" => {
            let x = c.tensor("self")?;
            let rank = c.rank(x);
            let mut dims: Vec<usize> = (0..rank).collect();
            match name {
                "transpose" | "transpose_copy" if 0 < rank => {
                    let (a, b) = (c.dim("dim0", None, rank)?, c.dim("dim1", None, rank)?);
                    dims.swap(a, b);
                }
                "transpose" | "transpose_copy" => c.ignore(&["dim0", "dim1"]),
                "mT" if 2 <= rank => dims.swap(rank - 2, rank - 1),
                "numpy_T" => dims.reverse(),
                _ => {
                    ensure(rank <= 2, "more than two dimensions")?;
                    dims.reverse();
                }
            }
            one(c.permute(x, &dims)?)
        }
        "expand" | "expand_copy" | "expand_as" => {
            let x = c.tensor("self")?;
            c.bool_or("implicit", false)?;
            let shape = if name == "expand_as" {
                let other = c.tensor("other")?;
                c.shape_of(other)
            } else {
                let size = c.ints("size")?;
                ensure(
                    c.rank(x) <= size.len(),
                    "fewer dimensions than the operand has",
                )?;
                let new = size.len() - c.rank(x);
                let kept = |(i, d): (usize, i64)| match (d, i.checked_sub(new)) {
                    (-1, Some(i)) => Ok(c.ty(x).shape()[i]),
                    _ => u64::try_from(d).map_err(|_| format!("the size {d} is negative")),
                };
                size.into_iter()
                    .enumerate()
                    .map(kept)
                    .collect::<R<Vec<u64>>>()?
            };
            one(c.expand(x, &shape)?)
        }
        "repeat" => {
            let (x, repeats) = (c.tensor("self")?, c.shape("repeats")?);
            ensure(
                c.rank(x) <= repeats.len(),
                "fewer dimensions than the operand has",
            )?;
            let mut shape = vec![1; repeats.len() - c.rank(x)];
            shape.extend(c.shape_of(x));
            // [a, b] -> [1, a, 1, b] -> [m, a, n, b] -> [m a, n b]
            let apart: Vec<u64> = shape.iter().flat_map(|&d| [1, d]).collect();
            let wide: Vec<u64> = shape
                .iter()
                .zip(&repeats)
                .flat_map(|(&d, &n)| [n, d])
                .collect();
            let whole: Option<Vec<u64>> = shape
                .iter()
                .zip(&repeats)
                .map(|(&d, &n)| d.checked_mul(n))
                .collect();
            let x = c.reshape(x, &apart)?;
            let x = c.expand(x, &wide)?;
            one(c.reshape(x, &whole.ok_or("too large")?)?)
        }
        "flip" => {
            let x = c.tensor("self")?;
            let dims: Vec<i64> = c
                .dims("dims", c.rank(x))?
                .into_iter()
                .map(|d| d as i64)
                .collect();
            one(c.step("flip", &[ints("dims", &dims)], &[x])?)
        }
        "slice" | "slice_copy" => {
            let x = c.tensor("self")?;
            let dim = c.dim("dim", Some(0), c.rank(x))?;
            let (start, end, step) = (c.opt_int("start")?, c.opt_int("end")?, c.int_or("step", 1)?);
            one(c.slice(x, dim, start, end, step)?)
        }
        "narrow" | "narrow_copy" => {
            let x = c.tensor("self")?;
            let dim = c.dim("dim", None, c.rank(x))?;
            let (start, length) = (c.int("start")?, c.int("length")?);
            let start = if start < 0 {
                start.saturating_add(c.ty(x).shape()[dim] as i64)
            } else {
                start
            };
            one(c.slice(x, dim, Some(start), Some(start.saturating_add(length)), 1)?)
        }
        "select" | "select_copy" => {
            let x = c.tensor("self")?;
            let (dim, at) = (c.dim("dim", None, c.rank(x))?, c.int("index")?);
            one(select(c, x, dim, at)?)
        }
        "unbind" | "unbind_copy" => {
            let x = c.tensor("self")?;
            let dim = c.dim("dim", Some(0), c.rank(x))?;
            let n = c.n_results();
            ensure(
                c.ty(x).shape()[dim] == n as u64,
                "another number of results",
            )?;
            let parts: R<Vec<Ref>> = (0..n).map(|i| select(c, x, dim, i as i64)).collect();
            all(parts?)
        }
        "split_with_sizes" | "split_with_sizes_copy" | "split" | "chunk" => {
            let x = c.tensor("self")?;
            let dim = c.dim("dim", Some(0), c.rank(x))?;
            let size = c.ty(x).shape()[dim] as i64;
            let sizes = match name {
                "chunk" => {
                    let n = c.int("chunks")?;
                    ensure(0 < n, "no chunks")?;
                    equal_parts(size, size / n + i64::from(size % n != 0), c.n_results())?
                }
                "split" if overload == "Tensor" => {
                    equal_parts(size, c.int("split_size")?, c.n_results())?
                }
                "split" => c.ints("split_size")?,
                _ => c.ints("split_sizes")?,
            };
            let mut start = 0i64;
            let mut parts = vec![];
            for length in sizes {
                let end = start
                    .checked_add(length)
                    .filter(|&end| start <= end && end <= size);
                let end = end.ok_or("the parts do not fit the tensor")?;
                parts.push(c.slice(x, dim, Some(start), Some(end), 1)?);
                start = end;
            }
            ensure(start == size, "the parts do not fit the tensor")?;
            all(parts)
        }
        "slice_scatter" => {
            let (x, source) = (c.tensor("self")?, c.tensor("src")?);
            let dim = c.dim("dim", Some(0), c.rank(x))?;
            let (start, end, step) = (c.opt_int("start")?, c.opt_int("end")?, c.int_or("step", 1)?);
            one(slice_scatter(c, x, source, dim, start, end, step)?)
        }
        "select_scatter" => {
            let (x, source) = (c.tensor("self")?, c.tensor("src")?);
            let (dim, at) = (c.dim("dim", None, c.rank(x))?, c.int("index")?);
            one(select_scatter(c, x, source, dim, at)?)
        }
        "slice_backward" => {
            let (dy, shape) = (c.tensor("grad_output")?, c.shape("input_sizes")?);
            let dim = c.dim("dim", None, shape.len())?;
            let (start, end, step) = (c.opt_int("start")?, c.opt_int("end")?, c.int_or("step", 1)?);
            let zeros = c.full(Scalar::Int(0), c.dtype(dy), &shape)?;
            one(slice_scatter(c, zeros, dy, dim, start, end, step)?)
        }
        "select_backward" => {
            let (dy, shape) = (c.tensor("grad_output")?, c.shape("input_sizes")?);
            let (dim, at) = (c.dim("dim", None, shape.len())?, c.int("index")?);
            let zeros = c.full(Scalar::Int(0), c.dtype(dy), &shape)?;
            one(select_scatter(c, zeros, dy, dim, at)?)
        }
        "cat" | "concatenate" => {
            let parts = c.tensors("tensors")?;
            let dtype = c.result()?.dtype();
            let rank = c.result()?.rank();
            let dim = c.dim("dim", Some(0), rank)?;
            // An empty vector is a part of any concatenation, of whatever rank.
            let parts: Vec<Ref> = parts
                .into_iter()
                .filter(|&x| c.rank(x) == rank && (rank != 1 || c.ty(x).numel() != 0))
                .collect();
            let parts: R<Vec<Ref>> = parts.into_iter().map(|x| c.cast(x, dtype)).collect();
            match parts?.as_slice() {
                &[x] => one(x),
                parts => one(c.step("cat", &[dim_attr(dim)], parts)?),
            }
        }
        "stack" => {
            let parts = c.tensors("tensors")?;
            let dtype = c.result()?.dtype();
            let dim = c.dim("dim", Some(0), c.result()?.rank())?;
            let mut flat = vec![];
            for x in parts {
                let mut shape = c.shape_of(x);
                ensure(dim <= shape.len(), "the parts have fewer dimensions")?;
                shape.insert(dim, 1);
                let x = c.cast(x, dtype)?;
                flat.push(c.reshape(x, &shape)?);
            }
            one(if flat.len() == 1 {
                flat[0]
            } else {
                c.step("cat", &[dim_attr(dim)], &flat)?
            })
        }
        "roll" => {
            let mut x = c.tensor("self")?;
            let (shifts, dims) = (c.ints("shifts")?, c.opt_ints("dims")?.unwrap_or_default());
            let shape = c.shape_of(x);
            let n = c.ty(x).numel();
            let is_flat = dims.is_empty();
            if is_flat {
                x = c.reshape(x, &[n])?;
            }
            let dims = if is_flat { vec![0] } else { dims };
            ensure(
                shifts.len() == dims.len(),
                "as many shifts as dimensions are needed",
            )?;
            for (shift, dim) in shifts.into_iter().zip(dims) {
                let dim = wrap(dim, c.rank(x))?;
                let size = c.ty(x).shape()[dim] as i64;
                if size == 0 || shift % size == 0 {
                    continue;
                }
                let cut = size - shift.rem_euclid(size);
                let (head, tail) = (
                    c.slice(x, dim, None, Some(cut), 1)?,
                    c.slice(x, dim, Some(cut), None, 1)?,
                );
                x = c.step("cat", &[dim_attr(dim)], &[tail, head])?;
            }
            one(c.reshape(x, &shape)?)
        }
        "constant_pad_nd" | "pad" => {
            let (x, pad) = (c.tensor("self")?, c.ints("pad")?);
            ensure(
                c.string_or("mode", "constant")? == "constant",
                "pads with something that is not constant",
            )?;
            let value = c.scalar_or("value", Scalar::Int(0))?.attr(c.dtype(x))?;
            // torch counts from the innermost dimension, and leaves out the outer ones.
            let rank = c.rank(x);
            ensure(
                pad.len() % 2 == 0 && pad.len() <= 2 * rank,
                "another number of paddings",
            )?;
            let mut full = vec![0; 2 * rank];
            for (i, pair) in pad.chunks(2).enumerate() {
                full[2 * (rank - 1 - i)..2 * (rank - i)].copy_from_slice(pair);
            }
            one(c.step("pad", &[ints("pad", &full), ("value", value)], &[x])?)
        }
        "tril" | "triu" => {
            let (x, diagonal) = (c.tensor("self")?, c.int_or("diagonal", 0)?);
            ensure(2 <= c.rank(x), "fewer than two dimensions")?;
            let shape = c.shape_of(x);
            let (rows, columns) = (shape[shape.len() - 2], shape[shape.len() - 1]);
            // Element (r, c) is on diagonal c - r.
            let row = arange(c, DType::I64, rows, Scalar::Int(diagonal), Scalar::Int(1))?;
            let row = c.reshape(row, &[rows, 1])?;
            let column = arange(c, DType::I64, columns, Scalar::Int(0), Scalar::Int(1))?;
            let kept = c.step(
                if name == "tril" { "le" } else { "ge" },
                &[],
                &[column, row],
            )?;
            one(masked(c, kept, x)?)
        }

        // --- sources ---
        "full" | "zeros" | "ones" | "empty" | "empty_permuted" | "empty_strided"
        | "scalar_tensor" | "new_full" | "new_zeros" | "new_ones" | "new_empty"
        | "new_empty_strided" | "full_like" | "zeros_like" | "ones_like" | "empty_like"
        | "fill" | "zero" => {
            let value = match name {
                "full" | "new_full" | "full_like" => c.scalar("fill_value")?,
                "scalar_tensor" => c.scalar("s")?,
                "fill" => match c.operand("value")? {
                    Operand::Scalar(value) => value,
                    Operand::Tensor(value) => {
                        let x = c.tensor("self")?;
                        let (value, shape) = (c.cast(value, c.dtype(x))?, c.shape_of(x));
                        return one(c.expand(value, &shape)?);
                    }
                },
                "ones" | "new_ones" | "ones_like" => Scalar::Int(1),
                // What an empty tensor holds is nobody's business, but it should be the same every
                // time.
                _ => Scalar::Int(0),
            };
            c.opt_dtype("dtype")?;
            c.ignore(&["stride"]);
            let shape = if name.ends_with("_like") || matches!(name, "fill" | "zero") {
                let x = c.tensor("self")?;
                c.shape_of(x)
            } else if name == "scalar_tensor" {
                vec![]
            } else {
                c.ignore(&["self"]);
                c.shape("size")?
            };
            let dtype = c.result()?.dtype();
            one(c.full(value, dtype, &shape)?)
        }
        "arange" => {
            let (start, step) = (
                c.scalar_or("start", Scalar::Int(0))?,
                c.scalar_or("step", Scalar::Int(1))?,
            );
            let end = c.scalar("end")?;
            c.opt_dtype("dtype")?;
            let n = match (start, end, step) {
                (Scalar::Int(start), Scalar::Int(end), Scalar::Int(step)) if step != 0 => {
                    let (span, step) = (i128::from(end) - i128::from(start), i128::from(step));
                    (span / step + i128::from(span % step != 0)) as f64
                }
                _ => ((end.float() - start.float()) / step.float()).ceil(),
            };
            ensure(
                (0.0..9e15).contains(&n),
                "the bounds and the step do not fit together",
            )?;
            let dtype = c.result()?.dtype();
            one(arange(c, dtype, n as u64, start, step)?)
        }
        "eye" => {
            let n = c.shape("n")?[0];
            let m = c
                .opt_int("m")?
                .map_or(Ok(n), u64::try_from)
                .map_err(|_| "the size is negative")?;
            c.opt_dtype("dtype")?;
            let row = arange(c, DType::I64, n, Scalar::Int(0), Scalar::Int(1))?;
            let row = c.reshape(row, &[n, 1])?;
            let column = arange(c, DType::I64, m, Scalar::Int(0), Scalar::Int(1))?;
            let y = c.step("eq", &[], &[row, column])?;
            one(c.cast(y, c.result()?.dtype())?)
        }

        // --- random numbers ---
        "rand" | "rand_like" | "randn" | "randn_like" | "uniform" | "normal_functional"
        | "exponential" => {
            c.opt_dtype("dtype")?;
            c.ignore(&["self", "size"]);
            let ty = c.result()?;
            let (dtype, shape) = (ty.dtype(), ty.shape());
            one(match name {
                "rand" | "rand_like" => c.random("rand", dtype, shape)?,
                "randn" | "randn_like" => c.random("randn", dtype, shape)?,
                "uniform" => {
                    let (low, high) = (c.float_or("from", 0.0)?, c.float_or("to", 1.0)?);
                    let x = c.random("rand", dtype, shape)?;
                    let x = c.scalar_step("mul_scalar", x, Scalar::Float(high - low))?;
                    c.scalar_step("add_scalar", x, Scalar::Float(low))?
                }
                "normal_functional" => {
                    let (mean, std) = (c.float_or("mean", 0.0)?, c.float_or("std", 1.0)?);
                    let x = c.random("randn", dtype, shape)?;
                    let x = c.scalar_step("mul_scalar", x, Scalar::Float(std))?;
                    c.scalar_step("add_scalar", x, Scalar::Float(mean))?
                }
                _ => {
                    let lambda = c.float_or("lambd", 1.0)?;
                    let x = c.random("rand", dtype, shape)?;
                    let x = c.scalar_step("rsub_scalar", x, Scalar::Float(1.0))?;
                    let x = c.map("log", x)?;
                    c.scalar_step("div_scalar", x, Scalar::Float(-lambda))?
                }
            })
        }
        "randint" | "randint_like" => {
            let (low, high) = (c.int_or("low", 0)?, c.int("high")?);
            c.opt_dtype("dtype")?;
            c.ignore(&["self", "size"]);
            let ty = c.result()?;
            ensure(
                low < high && high.saturating_sub(low) < 1 << 50,
                "the range is empty or too large",
            )?;
            // In 64 bits no product rounds up to the excluded bound.
            let x = c.random("rand", DType::F64, ty.shape())?;
            let x = c.scalar_step("mul_scalar", x, Scalar::Float((high - low) as f64))?;
            let x = c.cast(x, DType::I64)?;
            let x = c.scalar_step("add_scalar", x, Scalar::Int(low))?;
            one(c.cast(x, ty.dtype())?)
        }
        "bernoulli" => {
            let x = c.tensor("self")?;
            let p = match overload {
                "p" => Some(Operand::Scalar(c.scalar("p")?)),
                "Tensor" => Some(Operand::Tensor(c.tensor("p")?)),
                _ => None,
            };
            let dtype = c.result()?.dtype();
            let shape = c.shape_of(x);
            let precise = if dtype == DType::F64 {
                DType::F64
            } else {
                DType::F32
            };
            let u = c.random("rand", precise, &shape)?;
            let hit = match p {
                Some(Operand::Scalar(p)) => c.scalar_step("lt_scalar", u, p)?,
                Some(Operand::Tensor(p)) => {
                    let p = c.cast(p, precise)?;
                    c.step("lt", &[], &[u, p])?
                }
                None => {
                    let p = c.cast(x, precise)?;
                    c.step("lt", &[], &[u, p])?
                }
            };
            one(c.cast(hit, dtype)?)
        }
        "native_dropout" => {
            let (x, p, train) = (c.tensor("input")?, c.float("p")?, c.bool_or("train", true)?);
            if !train {
                let shape = c.shape_of(x);
                let mask = c.full(Scalar::Bool(true), DType::Bool, &shape)?;
                return all(vec![x, mask]);
            }
            let stream = c.stream();
            all(c.steps(
                "dropout",
                &[("p", Attr::Float(p)), ("stream", stream)],
                &[x, Ref::Rng],
            )?)
        }
        "dropout" => {
            let (x, p) = (c.tensor("input")?, c.float("p")?);
            if !c.bool_or("train", true)? {
                return one(x);
            }
            let stream = c.stream();
            one(c.step(
                "dropout",
                &[("p", Attr::Float(p)), ("stream", stream)],
                &[x, Ref::Rng],
            )?)
        }
        "native_dropout_backward" => {
            let (dy, mask, scale) = (
                c.tensor("grad_output")?,
                c.tensor("mask")?,
                c.float("scale")?,
            );
            one(c.step("dropout_bwd", &[("scale", Attr::Float(scale))], &[dy, mask])?)
        }
        _ => Err("no op for it".into()),
    }
}

// --- by elements ---

/// The attribute of gelu.
fn approximation(c: &mut Call<'_, '_>) -> R<(&'static str, Attr)> {
    match c.string_or("approximate", "none")? {
        "none" => Ok(("tanh", Attr::Bool(false))),
        "tanh" => Ok(("tanh", Attr::Bool(true))),
        other => Err(format!("no approximation {other}")),
    }
}

/// The least and the greatest number of a type.
fn bounds(dtype: DType) -> (Scalar, Scalar) {
    let ints = |least: i64, most: i64| (Scalar::Int(least), Scalar::Int(most));
    match dtype {
        DType::Bool => ints(0, 1),
        DType::U8 => ints(0, u8::MAX.into()),
        DType::I8 => ints(i8::MIN.into(), i8::MAX.into()),
        DType::I16 => ints(i16::MIN.into(), i16::MAX.into()),
        DType::I32 => ints(i32::MIN.into(), i32::MAX.into()),
        DType::I64 => ints(i64::MIN, i64::MAX),
        _ => (
            Scalar::Float(f64::NEG_INFINITY),
            Scalar::Float(f64::INFINITY),
        ),
    }
}

/// An operand as a tensor of `dtype`.
fn whole(c: &mut Call<'_, '_>, x: Operand, dtype: DType) -> R<Ref> {
    match x {
        Operand::Tensor(x) => c.cast(x, dtype),
        Operand::Scalar(value) => c.full(value, dtype, &[]),
    }
}

/// `x` where `kept`, 0 elsewhere.
fn masked(c: &mut Call<'_, '_>, kept: Ref, x: Ref) -> R<Ref> {
    let zero = c.full(Scalar::Int(0), c.dtype(x), &[])?;
    c.step("where", &[], &[kept, x, zero])
}

/// `x` times `factor`, in `dtype`.
fn scaled(c: &mut Call<'_, '_>, x: Operand, factor: Scalar, dtype: DType) -> R<Operand> {
    match (x, factor) {
        (x, factor) if factor.float() == 1.0 => Ok(x),
        (Operand::Tensor(x), factor) => {
            let x = c.cast(x, dtype)?;
            c.scalar_step("mul_scalar", x, factor).map(Operand::Tensor)
        }
        (Operand::Scalar(Scalar::Int(x)), Scalar::Int(factor)) => {
            let product = x
                .checked_mul(factor)
                .ok_or("a product of numbers overflows")?;
            Ok(Operand::Scalar(Scalar::Int(product)))
        }
        (Operand::Scalar(x), factor) => {
            Ok(Operand::Scalar(Scalar::Float(x.float() * factor.float())))
        }
    }
}

/// A whole number beside `x`, by way of integers. What lies beyond 2^52 has no fraction, and stays
/// as it is; so do infinities and NaN.
fn rounded(c: &mut Call<'_, '_>, x: Ref, how: &str) -> R<Ref> {
    if !c.dtype(x).is_float() {
        return Ok(x);
    }
    let whole = c.cast(x, DType::I64)?;
    let whole = c.cast(whole, c.dtype(x))?;
    // The cast goes towards zero.
    let y = match how {
        "floor" | "ceil" => {
            let op = if how == "floor" { "gt" } else { "lt" };
            let passed = c.step(op, &[], &[whole, x])?;
            let passed = c.cast(passed, c.dtype(x))?;
            c.step(
                if how == "floor" { "sub" } else { "add" },
                &[],
                &[whole, passed],
            )?
        }
        "trunc" => whole,
        other => return Err(format!("no rounding {other}")),
    };
    let size = c.map("abs", x)?;
    let has_fraction = c.scalar_step("lt_scalar", size, Scalar::Float((1u64 << 52) as f64))?;
    c.step("where", &[], &[has_fraction, y, x])
}

/// A rounded quotient of integers, exact where both are below 2^52. Floats are left out: torch does
/// not round their rounded quotient, but their exact one.
fn quotient(c: &mut Call<'_, '_>, a: Operand, b: Operand, dtype: DType, how: &str) -> R<Ref> {
    ensure(
        !dtype.is_float() && dtype != DType::Bool,
        "a rounded quotient of floats",
    )?;
    let (a, b) = (whole(c, a, DType::F64)?, whole(c, b, DType::F64)?);
    let y = c.step("div", &[], &[a, b])?;
    let y = rounded(c, y, how)?;
    c.cast(y, dtype)
}

/// An operation of two operands whose element type is that of the result.
fn arithmetic(c: &mut Call<'_, '_>, op: &str, a: Operand, b: Operand, dtype: DType) -> R<Ref> {
    // Booleans are added and multiplied by logic.
    let op = match (op, dtype) {
        ("add", DType::Bool) => "bitwise_or",
        ("mul", DType::Bool) => "bitwise_and",
        _ => op,
    };
    let by_number = match (op, a, b) {
        ("add" | "mul", Operand::Tensor(x), Operand::Scalar(value))
        | ("add" | "mul", Operand::Scalar(value), Operand::Tensor(x)) => Some((x, value)),
        ("div" | "pow", Operand::Tensor(x), Operand::Scalar(value)) => Some((x, value)),
        ("sub", Operand::Tensor(x), Operand::Scalar(value)) => {
            let negative = match value {
                Scalar::Float(value) => Scalar::Float(-value),
                Scalar::Int(value) => Scalar::Int(value.checked_neg().ok_or("a number overflows")?),
                Scalar::Bool(_) => return Err("subtracts a boolean".into()),
            };
            let x = c.cast(x, dtype)?;
            return c.scalar_step("add_scalar", x, negative);
        }
        ("sub", Operand::Scalar(value), Operand::Tensor(x)) => {
            let x = c.cast(x, dtype)?;
            return c.scalar_step("rsub_scalar", x, value);
        }
        _ => None,
    };
    if let Some((x, value)) = by_number {
        let x = c.cast(x, dtype)?;
        return c.scalar_step(&format!("{op}_scalar"), x, value);
    }
    let (a, b) = (whole(c, a, dtype)?, whole(c, b, dtype)?);
    c.step(op, &[], &[a, b])
}

fn compare(c: &mut Call<'_, '_>, op: &str, a: Operand, b: Operand) -> R<Ref> {
    let mut dtype = c.promoted(&[a, b]);
    match (a, b) {
        (Operand::Tensor(x), Operand::Scalar(value)) => {
            // A number compared with booleans makes integers of them.
            if dtype == DType::Bool {
                dtype = DType::I64;
            }
            let x = c.cast(x, dtype)?;
            c.scalar_step(&format!("{op}_scalar"), x, value)
        }
        _ => {
            let (a, b) = (whole(c, a, dtype)?, whole(c, b, dtype)?);
            c.step(op, &[], &[a, b])
        }
    }
}

fn clamp_by_tensors(c: &mut Call<'_, '_>, name: &str) -> R<Vec<Option<Ref>>> {
    let mut x = c.tensor("self")?;
    let (min, max) = match name {
        "clamp" => (c.opt_tensor("min")?, c.opt_tensor("max")?),
        "clamp_min" => (Some(c.tensor("min")?), None),
        "clamp_max" => (None, Some(c.tensor("max")?)),
        _ => return Err("no op for it".into()),
    };
    let dtype = c.result()?.dtype();
    for (op, bound) in [("maximum", min), ("minimum", max)] {
        if let Some(bound) = bound {
            x = arithmetic(c, op, Operand::Tensor(x), Operand::Tensor(bound), dtype)?;
        }
    }
    one(x)
}

// --- reductions ---

fn topk(c: &mut Call<'_, '_>, x: Ref, dim: usize, k: i64, largest: bool) -> R<Vec<Ref>> {
    c.steps(
        "topk",
        &[
            dim_attr(dim),
            ("k", Attr::Int(k)),
            ("largest", Attr::Bool(largest)),
        ],
        &[x],
    )
}

/// The greatest or least elements along a dimension, and where they are.
fn extreme(c: &mut Call<'_, '_>, x: Ref, dim: usize, keepdim: bool, largest: bool) -> R<Vec<Ref>> {
    let found = topk(c, x, dim, 1, largest)?;
    let mut shape = c.shape_of(found[0]);
    if !keepdim {
        shape.remove(dim);
    }
    found.into_iter().map(|y| c.reshape(y, &shape)).collect()
}

fn variance(c: &mut Call<'_, '_>, name: &str) -> R<Vec<Option<Ref>>> {
    let x = c.tensor("self")?;
    let (dims, keepdim) = (c.dims("dim", c.rank(x))?, c.bool_or("keepdim", false)?);
    let correction = match c.opt_scalar("correction")? {
        Some(correction) => correction.float(),
        None => f64::from(u8::from(c.bool_or("unbiased", true)?)),
    };
    let shape = c.shape_of(x);
    let n: u64 = dims.iter().map(|&d| shape[d]).product();
    let mean = c.reduce("mean", x, &dims, true)?;
    let d = c.step("sub", &[], &[x, mean])?;
    let d = c.step("mul", &[], &[d, d])?;
    let sum = c.reduce("sum", d, &dims, keepdim)?;
    let mut y = c.scalar_step(
        "div_scalar",
        sum,
        Scalar::Float((n as f64 - correction).max(0.0)),
    )?;
    if name.starts_with("std") {
        y = c.map("sqrt", y)?;
    }
    let shape = c.shape_of(y);
    let mean = c.reshape(mean, &shape)?;
    Ok(if name.ends_with("mean") {
        vec![Some(y), Some(mean)]
    } else {
        vec![Some(y)]
    })
}

// --- normalisation ---

/// The results that `output_mask` asks for, at their places.
fn masked_results<'a, 's>(
    c: &mut Call<'a, 's>,
    n: usize,
    make: impl FnOnce(&mut Call<'a, 's>, (&'static str, Attr)) -> R<Vec<Ref>>,
) -> R<Vec<Option<Ref>>> {
    let mask = c.bools("output_mask")?;
    ensure(mask.len() == n, "output_mask has another length")?;
    let list: Vec<i64> = mask.iter().map(|&m| m.into()).collect();
    let mut made = make(c, ("mask", Attr::Ints(list)))?.into_iter();
    Ok(mask
        .into_iter()
        .map(|m| if m { made.next() } else { None })
        .collect())
}

/// Results in the types that the file gives them: mixed precision is computed in the wider type.
fn as_wanted(c: &mut Call<'_, '_>, results: Vec<Option<Ref>>) -> R<Vec<Option<Ref>>> {
    let one = |(i, result): (usize, Option<Ref>)| match (result, c.wanted(i)) {
        (Some(result), Some(ty)) => c.cast(result, ty.dtype()).map(Some),
        (result, _) => Ok(result),
    };
    results.into_iter().enumerate().map(one).collect()
}

/// The element type in which a normalisation computes, and its operands in that type.
fn widened(c: &mut Call<'_, '_>, operands: &mut [&mut Ref]) -> R<DType> {
    let tensors: Vec<Operand> = operands.iter().map(|x| Operand::Tensor(**x)).collect();
    let dtype = c.promoted(&tensors);
    for x in operands {
        **x = c.cast(**x, dtype)?;
    }
    Ok(dtype)
}

/// The type in which statistics of `dtype` are kept.
fn statistics(dtype: DType) -> DType {
    if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    }
}

fn layer_norm(c: &mut Call<'_, '_>) -> R<Vec<Option<Ref>>> {
    let (mut x, shape) = (c.tensor("input")?, c.shape("normalized_shape")?);
    let (w, b, eps) = (
        c.opt_tensor("weight")?,
        c.opt_tensor("bias")?,
        c.float("eps")?,
    );
    // The table has no bias without a weight.
    let w = match (w, b) {
        (None, Some(b)) => Some(c.full(Scalar::Int(1), c.dtype(b), &shape)?),
        (w, _) => w,
    };
    let mut rest: Vec<Ref> = w.into_iter().chain(b).collect();
    let mut operands: Vec<&mut Ref> = [&mut x].into_iter().chain(&mut rest).collect();
    widened(c, &mut operands)?;
    rest.insert(0, x);
    let made = c.steps(
        "layer_norm",
        &[
            ("dims", Attr::Int(shape.len() as i64)),
            ("eps", Attr::Float(eps)),
        ],
        &rest,
    )?;
    as_wanted(c, made.into_iter().map(Some).collect())
}

fn layer_norm_backward(c: &mut Call<'_, '_>) -> R<Vec<Option<Ref>>> {
    let (mut dy, mut x) = (c.tensor("grad_out")?, c.tensor("input")?);
    let (shape, mean, rstd) = (
        c.shape("normalized_shape")?,
        c.tensor("mean")?,
        c.tensor("rstd")?,
    );
    let mut w = c.opt_tensor("weight")?;
    c.ignore(&["bias"]);
    let mut operands: Vec<&mut Ref> = [&mut dy, &mut x].into_iter().chain(&mut w).collect();
    let dtype = statistics(widened(c, &mut operands)?);
    let (mean, rstd) = (c.cast(mean, dtype)?, c.cast(rstd, dtype)?);
    let results = masked_results(c, 3, |c, mask| {
        let operands: Vec<Ref> = [dy, x, mean, rstd].into_iter().chain(w).collect();
        c.steps(
            "layer_norm_bwd",
            &[("dims", Attr::Int(shape.len() as i64)), mask],
            &operands,
        )
    })?;
    as_wanted(c, results)
}

/// y = x / rms(x) * w, and 1 / rms(x).
fn rms_norm(c: &mut Call<'_, '_>) -> R<Vec<Option<Ref>>> {
    let (x, shape, w) = (
        c.tensor("input")?,
        c.shape("normalized_shape")?,
        c.opt_tensor("weight")?,
    );
    let eps = c
        .float("eps")
        .map_err(|_| "eps is left to the element type")?;
    let dims = trailing(c, x, shape.len())?;
    let x = c.cast(x, statistics(c.dtype(x)))?;
    let square = c.step("mul", &[], &[x, x])?;
    let mean = c.reduce("mean", square, &dims, true)?;
    let mean = c.scalar_step("add_scalar", mean, Scalar::Float(eps))?;
    let rstd = c.map("rsqrt", mean)?;
    let mut y = c.step("mul", &[], &[x, rstd])?;
    if let Some(w) = w {
        let w = c.cast(w, c.dtype(y))?;
        y = c.step("mul", &[], &[y, w])?;
    }
    as_wanted(c, vec![Some(y), Some(rstd)])
}

/// With n = x rstd and g = dy w: dx = rstd (g - n mean(g n)), dw = sum(dy n).
fn rms_norm_backward(c: &mut Call<'_, '_>) -> R<Vec<Option<Ref>>> {
    let (dy, x, shape) = (
        c.tensor("grad_out")?,
        c.tensor("input")?,
        c.shape("normalized_shape")?,
    );
    let (rstd, w, mask) = (
        c.tensor("rstd")?,
        c.opt_tensor("weight")?,
        c.bools("output_mask")?,
    );
    ensure(mask.len() == 2, "output_mask has another length")?;
    let dims = trailing(c, x, shape.len())?;
    let dtype = statistics(c.dtype(x));
    let (dy, x, rstd) = (c.cast(dy, dtype)?, c.cast(x, dtype)?, c.cast(rstd, dtype)?);
    let n = c.step("mul", &[], &[x, rstd])?;
    let mut results = vec![None, None];
    if mask[0] {
        let g = match w {
            Some(w) => {
                let w = c.cast(w, dtype)?;
                c.step("mul", &[], &[dy, w])?
            }
            None => dy,
        };
        let gn = c.step("mul", &[], &[g, n])?;
        let mean = c.reduce("mean", gn, &dims, true)?;
        let part = c.step("mul", &[], &[n, mean])?;
        let dx = c.step("sub", &[], &[g, part])?;
        results[0] = Some(c.step("mul", &[], &[dx, rstd])?);
    }
    if mask[1] && w.is_some() {
        let lead: Vec<usize> = (0..c.rank(x) - dims.len()).collect();
        let dw = c.step("mul", &[], &[dy, n])?;
        results[1] = Some(c.reduce("sum", dw, &lead, false)?);
    }
    as_wanted(c, results)
}

/// The last `n` dimensions.
fn trailing(c: &Call<'_, '_>, x: Ref, n: usize) -> R<Vec<usize>> {
    let rank = c.rank(x);
    ensure(
        1 <= n && n <= rank,
        "normalises more dimensions than there are",
    )?;
    Ok((rank - n..rank).collect())
}

/// The rows of x[N,C,..] that are normalised together, [N groups, C/groups ..], and the shape of a
/// weight beside x.
fn groups(c: &mut Call<'_, '_>, x: Ref) -> R<([u64; 2], Vec<u64>, u64)> {
    c.ignore(&["N", "C", "HxW"]);
    let groups = u64::try_from(c.int("group")?).map_err(|_| "the number of groups is negative")?;
    let shape = c.shape_of(x);
    ensure(
        2 <= shape.len() && 0 < groups && shape[1].is_multiple_of(groups),
        "the groups do not fit",
    )?;
    let inner: u64 = shape[2..].iter().product();
    let mut beside = vec![1; shape.len()];
    beside[1] = shape[1];
    let rows = shape[0].checked_mul(groups).ok_or("too large")?;
    Ok(([rows, shape[1] / groups * inner], beside, groups))
}

fn group_norm(c: &mut Call<'_, '_>) -> R<Vec<Option<Ref>>> {
    let x = c.tensor("input")?;
    let (w, b, eps) = (
        c.opt_tensor("weight")?,
        c.opt_tensor("bias")?,
        c.float("eps")?,
    );
    let (rows, beside, groups) = groups(c, x)?;
    let shape = c.shape_of(x);
    let x = c.reshape(x, &rows)?;
    let made = c.steps(
        "layer_norm",
        &[("dims", Attr::Int(1)), ("eps", Attr::Float(eps))],
        &[x],
    )?;
    let mut y = c.reshape(made[0], &shape)?;
    for (op, factor) in [("mul", w), ("add", b)] {
        if let Some(factor) = factor {
            let factor = c.reshape(factor, &beside)?;
            y = c.step(op, &[], &[y, factor])?;
        }
    }
    let (mean, rstd) = (
        c.reshape(made[1], &[shape[0], groups])?,
        c.reshape(made[2], &[shape[0], groups])?,
    );
    as_wanted(c, vec![Some(y), Some(mean), Some(rstd)])
}

fn group_norm_backward(c: &mut Call<'_, '_>) -> R<Vec<Option<Ref>>> {
    let (dy, x) = (c.tensor("grad_out")?, c.tensor("input")?);
    let (mean, rstd, w) = (
        c.tensor("mean")?,
        c.tensor("rstd")?,
        c.opt_tensor("weight")?,
    );
    let mask = c.bools("output_mask")?;
    ensure(mask.len() == 3, "output_mask has another length")?;
    let (rows, beside, _) = groups(c, x)?;
    let shape = c.shape_of(x);
    let dtype = statistics(c.dtype(x));
    let (dy, x) = (c.cast(dy, dtype)?, c.cast(x, dtype)?);
    let (mean, rstd) = (c.cast(mean, dtype)?, c.cast(rstd, dtype)?);
    let (mean, rstd) = (
        c.reshape(mean, &[rows[0], 1])?,
        c.reshape(rstd, &[rows[0], 1])?,
    );
    let x = c.reshape(x, &rows)?;
    let mut results = vec![None; 3];
    if mask[0] {
        let g = match w {
            Some(w) => {
                let w = c.cast(w, dtype)?;
                let w = c.reshape(w, &beside)?;
                c.step("mul", &[], &[dy, w])?
            }
            None => dy,
        };
        let g = c.reshape(g, &rows)?;
        let only_dx = [("dims", Attr::Int(1)), ("mask", Attr::Ints(vec![1, 0, 0]))];
        let dx = c.step("layer_norm_bwd", &only_dx, &[g, x, mean, rstd])?;
        results[0] = Some(c.reshape(dx, &shape)?);
    }
    let others: Vec<usize> = (0..shape.len()).filter(|&d| d != 1).collect();
    if mask[1] {
        let n = c.step("sub", &[], &[x, mean])?;
        let n = c.step("mul", &[], &[n, rstd])?;
        let n = c.reshape(n, &shape)?;
        let dw = c.step("mul", &[], &[dy, n])?;
        results[1] = Some(c.reduce("sum", dw, &others, false)?);
    }
    if mask[2] {
        results[2] = Some(c.reduce("sum", dy, &others, false)?);
    }
    as_wanted(c, results)
}

/// The weight of a batch norm, or ones or zeros in its place.
fn per_channel(c: &mut Call<'_, '_>, x: Ref, name: &str, default: i64) -> R<Ref> {
    match c.opt_tensor(name)? {
        Some(w) => Ok(w),
        None => {
            let channels = c
                .ty(x)
                .shape()
                .get(1)
                .copied()
                .ok_or("there are no channels")?;
            c.full(Scalar::Int(default), c.dtype(x), &[channels])
        }
    }
}

fn batch_norm(c: &mut Call<'_, '_>) -> R<Vec<Option<Ref>>> {
    let mut x = c.tensor("input")?;
    let (mut w, mut b) = (
        per_channel(c, x, "weight", 1)?,
        per_channel(c, x, "bias", 0)?,
    );
    let (mut mean, mut var) = (c.tensor("running_mean")?, c.tensor("running_var")?);
    let (momentum, eps) = (c.float("momentum")?, c.float("eps")?);
    widened(c, &mut [&mut x, &mut w, &mut b, &mut mean, &mut var])?;
    let attrs = [
        ("eps", Attr::Float(eps)),
        ("momentum", Attr::Float(momentum)),
    ];
    let made = c.steps("batch_norm", &attrs, &[x, w, b, mean, var])?;
    as_wanted(c, made.into_iter().map(Some).collect())
}

/// In evaluation the statistics are constants: y = (x - mean) / sqrt(var + eps) * w + b.
fn batch_norm_eval(c: &mut Call<'_, '_>) -> R<Vec<Option<Ref>>> {
    let mut x = c.tensor("input")?;
    let (mut w, mut b) = (
        per_channel(c, x, "weight", 1)?,
        per_channel(c, x, "bias", 0)?,
    );
    let (old_mean, old_var) = (c.tensor("running_mean")?, c.tensor("running_var")?);
    let eps = c.float("eps")?;
    c.ignore(&["momentum"]);
    let (mut mean, mut var) = (old_mean, old_var);
    widened(c, &mut [&mut x, &mut w, &mut b, &mut mean, &mut var])?;
    let rstd = c.scalar_step("add_scalar", var, Scalar::Float(eps))?;
    let rstd = c.map("rsqrt", rstd)?;
    let beside = beside(c, x)?;
    let mut y = x;
    let factor = c.step("mul", &[], &[rstd, w])?;
    for (op, factor) in [("sub", mean), ("mul", factor), ("add", b)] {
        let factor = c.reshape(factor, &beside)?;
        y = c.step(op, &[], &[y, factor])?;
    }
    let (save_mean, save_rstd) = (placeholder(c, 1)?, placeholder(c, 2)?);
    let results = vec![Some(y), save_mean, save_rstd, Some(old_mean), Some(old_var)];
    as_wanted(c, results)
}

/// The shape of a vector over channels beside x[N,C,..].
fn beside(c: &Call<'_, '_>, x: Ref) -> R<Vec<u64>> {
    let mut shape = vec![1; c.rank(x)];
    *shape.get_mut(1).ok_or("there are no channels")? = c.ty(x).shape()[1];
    Ok(shape)
}

fn batch_norm_backward(c: &mut Call<'_, '_>) -> R<Vec<Option<Ref>>> {
    let mut dy = c
        .opt_tensor("grad_out")?
        .map_or_else(|| c.tensor("grad_output"), Ok)?;
    let mut x = c.tensor("input")?;
    let mut w = per_channel(c, x, "weight", 1)?;
    let training = c.bool_or("train", true)? && c.bool_or("update", true)?;
    let eps = c.float("eps")?;
    c.ignore(&["reserve"]);
    if training {
        c.ignore(&["running_mean", "running_var"]);
        let mut mean = c.tensor("save_mean")?;
        let mut rstd = c
            .opt_tensor("save_invstd")?
            .map_or_else(|| c.tensor("save_var"), Ok)?;
        widened(c, &mut [&mut dy, &mut x, &mut w, &mut mean, &mut rstd])?;
        let results = masked_results(c, 3, |c, mask| {
            c.steps("batch_norm_bwd", &[mask], &[dy, x, w, mean, rstd])
        })?;
        return as_wanted(c, results);
    }
    c.ignore(&["save_mean", "save_invstd", "save_var"]);
    let (mut mean, mut var) = (c.tensor("running_mean")?, c.tensor("running_var")?);
    let mask = c.bools("output_mask")?;
    ensure(mask.len() == 3, "output_mask has another length")?;
    widened(c, &mut [&mut dy, &mut x, &mut w, &mut mean, &mut var])?;
    let rstd = c.scalar_step("add_scalar", var, Scalar::Float(eps))?;
    let rstd = c.map("rsqrt", rstd)?;
    let beside = beside(c, x)?;
    let others: Vec<usize> = (0..c.rank(x)).filter(|&d| d != 1).collect();
    let mut results = vec![None; 3];
    if mask[0] {
        let factor = c.step("mul", &[], &[rstd, w])?;
        let factor = c.reshape(factor, &beside)?;
        results[0] = Some(c.step("mul", &[], &[dy, factor])?);
    }
    if mask[1] {
        let (mean, rstd) = (c.reshape(mean, &beside)?, c.reshape(rstd, &beside)?);
        let n = c.step("sub", &[], &[x, mean])?;
        let n = c.step("mul", &[], &[n, rstd])?;
        let dw = c.step("mul", &[], &[dy, n])?;
        results[1] = Some(c.reduce("sum", dw, &others, false)?);
    }
    if mask[2] {
        results[2] = Some(c.reduce("sum", dy, &others, false)?);
    }
    as_wanted(c, results)
}

// --- products ---

fn transposed(a: bool, b: bool) -> [(&'static str, Attr); 2] {
    [("ta", Attr::Bool(a)), ("tb", Attr::Bool(b))]
}

fn product(c: &mut Call<'_, '_>, a: Ref, b: Ref) -> R<Ref> {
    c.step("matmul", &transposed(false, false), &[a, b])
}

/// A product of any ranks: vectors become matrices, batches broadcast.
fn general_product(c: &mut Call<'_, '_>, a: Ref, b: Ref) -> R<Ref> {
    let (mut x, mut y) = (c.shape_of(a), c.shape_of(b));
    ensure(!x.is_empty() && !y.is_empty(), "a factor has no dimension")?;
    let (is_row, is_column) = (x.len() == 1, y.len() == 1);
    if is_row {
        x.insert(0, 1);
    }
    if is_column {
        y.push(1);
    }
    let (x_lead, x_last) = x.split_at(x.len() - 2);
    let (y_lead, y_last) = y.split_at(y.len() - 2);
    let mut shape;
    let made = if y_lead.is_empty() {
        // One matrix on the right: the batch is more rows.
        shape = [x_lead, &[x_last[0]]].concat();
        let a = c.reshape(a, &[count(&shape)?, x_last[1]])?;
        let b = c.reshape(b, y_last)?;
        product(c, a, b)?
    } else {
        let lead = ir::op::broadcast_shapes(x_lead, y_lead)?;
        let n = count(&lead)?;
        let (a, b) = (c.reshape(a, &x)?, c.reshape(b, &y)?);
        let (a, b) = (
            c.expand(a, &[&lead[..], x_last].concat())?,
            c.expand(b, &[&lead[..], y_last].concat())?,
        );
        let (a, b) = (
            c.reshape(a, &[n, x_last[0], x_last[1]])?,
            c.reshape(b, &[n, y_last[0], y_last[1]])?,
        );
        shape = [&lead[..], &[x_last[0]]].concat();
        product(c, a, b)?
    };
    if is_row {
        shape.pop();
    }
    if !is_column {
        shape.push(y_last[1]);
    }
    c.reshape(made, &shape)
}

/// The attributes of a convolution with the weight `w`.
fn convolution(c: &mut Call<'_, '_>, w: Ref) -> R<Vec<(&'static str, Attr)>> {
    let n = c
        .rank(w)
        .checked_sub(2)
        .ok_or("the weight has too few dimensions")?;
    ensure(!c.bool_or("transposed", false)?, "is transposed")?;
    ensure(
        c.ints_of("output_padding", n, &[])?.iter().all(|&p| p == 0),
        "pads the output",
    )?;
    let ones = vec![1; n];
    let (stride, padding) = (
        c.ints_of("stride", n, &ones)?,
        c.ints_of("padding", n, &vec![0; n])?,
    );
    let dilation = c.ints_of("dilation", n, &ones)?;
    let groups = c.int_or("groups", 1)?;
    let list = [
        ("dilation", dilation),
        ("padding", padding),
        ("stride", stride),
    ];
    Ok(list
        .into_iter()
        .map(|(key, list)| (key, Attr::Ints(list)))
        .chain([("groups", Attr::Int(groups))])
        .collect())
}

fn pooling(c: &mut Call<'_, '_>) -> R<Vec<(&'static str, Attr)>> {
    let kernel = c.ints_of("kernel_size", 2, &[])?;
    let (stride, padding) = (
        c.ints_of("stride", 2, &kernel)?,
        c.ints_of("padding", 2, &[0, 0])?,
    );
    let (dilation, ceil) = (
        c.ints_of("dilation", 2, &[1, 1])?,
        c.bool_or("ceil_mode", false)?,
    );
    let list = [
        ("dilation", dilation),
        ("kernel", kernel),
        ("padding", padding),
        ("stride", stride),
    ];
    Ok(list
        .into_iter()
        .map(|(key, list)| (key, Attr::Ints(list)))
        .chain([("ceil", Attr::Bool(ceil))])
        .collect())
}

/// x[C,H,W] as one image of a batch.
fn images(c: &mut Call<'_, '_>, x: Ref) -> R<Ref> {
    let shape = c.shape_of(x);
    if shape.len() == 3 {
        c.reshape(x, &[&[1], &shape[..]].concat())
    } else {
        Ok(x)
    }
}

// --- attention ---

/// Zeros for a result that only the operator's own derivative reads, and which ours does without.
fn placeholder(c: &mut Call<'_, '_>, i: usize) -> R<Option<Ref>> {
    let Some(ty) = c.wanted(i) else {
        return Ok(None);
    };
    c.full(Scalar::Int(0), ty.dtype(), ty.shape()).map(Some)
}

/// The attributes that forward and backward share.
fn attention_attrs(c: &mut Call<'_, '_>, q: Ref) -> R<[(&'static str, Attr); 2]> {
    ensure(
        c.float_or("dropout_p", 0.0)? == 0.0,
        "attention with dropout",
    )?;
    ensure(
        c.rank(q) == 4 && 0 < c.ty(q).shape()[3],
        "the queries have another rank",
    )?;
    // Our logsumexp is f32, which would lose half of the digits.
    ensure(c.dtype(q) != DType::F64, "attention in f64")?;
    let causal = c.bool_or("is_causal", false)?;
    let scale = c.float_or("scale", 1.0 / (c.ty(q).shape()[3] as f64).sqrt())?;
    Ok([
        ("causal", Attr::Bool(causal)),
        ("scale", Attr::Float(scale)),
    ])
}

/// The mask of attention to `q`, in its element type or boolean.
fn attention_mask(c: &mut Call<'_, '_>, name: &str, q: Ref) -> R<Option<Ref>> {
    let key = if name.contains("efficient") {
        "attn_bias"
    } else {
        "attn_mask"
    };
    match c.opt_tensor(key)? {
        Some(mask) if c.dtype(mask) != DType::Bool => c.cast(mask, c.dtype(q)).map(Some),
        mask => Ok(mask),
    }
}

fn attention(c: &mut Call<'_, '_>, name: &str) -> R<Vec<Option<Ref>>> {
    let (q, k, v) = (c.tensor("query")?, c.tensor("key")?, c.tensor("value")?);
    let attrs = attention_attrs(c, q)?;
    let mask = attention_mask(c, name, q)?;
    c.ignore(&["compute_log_sumexp"]);
    ensure(
        !c.bool_or("return_debug_mask", false)?,
        "returns a debug mask",
    )?;
    let operands: Vec<Ref> = [q, k, v].into_iter().chain(mask).collect();
    let mut made = c.steps("sdpa", &attrs, &operands)?;
    if let Some(ty) = c.wanted(1).filter(|_| name.contains("efficient")) {
        // This kernel rounds the rows of its logsumexp up, or leaves them out.
        let (rows, shape) = (c.ty(made[1]).shape()[2], ty.shape());
        ensure(shape.len() == 3, "logsumexp has another rank")?;
        let more = i64::try_from(shape[2]).map_err(|_| "too large")? - rows as i64;
        if more != 0 {
            let pad = [
                ints("pad", &[0, 0, 0, 0, 0, more]),
                ("value", Attr::Float(0.0)),
            ];
            made[1] = c.step("pad", &pad, &[made[1]])?;
        }
    }
    let mut results: Vec<Option<Ref>> = made.into_iter().map(Some).collect();
    for i in 2..c.n_results() {
        results.push(placeholder(c, i)?);
    }
    Ok(results)
}

fn attention_backward(c: &mut Call<'_, '_>, name: &str) -> R<Vec<Option<Ref>>> {
    let dy = c
        .opt_tensor("grad_out")?
        .map_or_else(|| c.tensor("grad_out_"), Ok)?;
    let (q, k, v) = (c.tensor("query")?, c.tensor("key")?, c.tensor("value")?);
    let (out, mut logsumexp) = (c.tensor("out")?, c.tensor("logsumexp")?);
    let attrs = attention_attrs(c, q)?;
    let mask = attention_mask(c, name, q)?;
    c.ignore(&[
        "cum_seq_q",
        "cum_seq_k",
        "max_q",
        "max_k",
        "philox_seed",
        "philox_offset",
        "rng_state",
        "unused",
    ]);
    let mut wanted = vec![true; 3];
    if name.contains("efficient") {
        wanted = c.bools("grad_input_mask")?;
        ensure(
            wanted.len() == 4 && !wanted[3],
            "takes the derivative of the mask",
        )?;
        ensure(c.rank(logsumexp) == 3, "logsumexp has another rank")?;
        let rows = c.ty(q).shape()[2];
        logsumexp = c.slice(logsumexp, 2, Some(0), Some(rows as i64), 1)?;
    }
    let operands: Vec<Ref> = [dy, q, k, v, out, logsumexp]
        .into_iter()
        .chain(mask)
        .collect();
    let made = c.steps("sdpa_bwd", &attrs, &operands)?;
    let mut results: Vec<Option<Ref>> = made
        .into_iter()
        .zip(wanted)
        .map(|(d, m)| Some(d).filter(|_| m))
        .collect();
    if 3 < c.n_results() {
        results.push(placeholder(c, 3)?);
    }
    Ok(results)
}

// --- nll loss ---

/// Log-probabilities [N,C,d..] as rows [N d.., C].
fn class_rows(c: &mut Call<'_, '_>, x: Ref) -> R<Ref> {
    let shape = c.shape_of(x);
    match shape.len() {
        0 => Err("there are no classes".into()),
        1 => c.reshape(x, &[1, shape[0]]),
        2 => Ok(x),
        rank => {
            let dims: Vec<usize> = [0].into_iter().chain(2..rank).chain([1]).collect();
            let x = c.permute(x, &dims)?;
            c.reshape(x, &[count(&shape)? / shape[1].max(1), shape[1]])
        }
    }
}

fn nll_loss(c: &mut Call<'_, '_>) -> R<Vec<Option<Ref>>> {
    let (x, target) = (c.tensor("self")?, c.tensor("target")?);
    ensure(c.opt_tensor("weight")?.is_none(), "weighs the classes")?;
    let (reduction, ignore) = (c.int("reduction")?, c.int("ignore_index")?);
    let shape = c.shape_of(target);
    let x = class_rows(c, x)?;
    let n = c.ty(target).numel();
    let target = c.reshape(target, &[n])?;
    let attrs = [
        ("ignore", Attr::Int(ignore)),
        ("reduction", Attr::Int(reduction)),
    ];
    let made = c.steps("nll_loss", &attrs, &[x, target])?;
    let loss = if reduction == 0 {
        c.reshape(made[0], &shape)?
    } else {
        made[0]
    };
    Ok(vec![Some(loss), Some(made[1])])
}

fn nll_loss_backward(c: &mut Call<'_, '_>) -> R<Vec<Option<Ref>>> {
    let (dy, x, target) = (
        c.tensor("grad_output")?,
        c.tensor("self")?,
        c.tensor("target")?,
    );
    ensure(c.opt_tensor("weight")?.is_none(), "weighs the classes")?;
    let (reduction, ignore, weight) = (
        c.int("reduction")?,
        c.int("ignore_index")?,
        c.tensor("total_weight")?,
    );
    let (shape, dtype, n) = (c.shape_of(x), c.dtype(x), c.ty(target).numel());
    let classes = *shape
        .get(1)
        .or(shape.first())
        .ok_or("there are no classes")?;
    let target = c.reshape(target, &[n])?;
    let dy = if reduction == 0 {
        c.reshape(dy, &[n])?
    } else {
        dy
    };
    let attrs = [
        ("dtype", Attr::Type(dtype)),
        ("ignore", Attr::Int(ignore)),
        ("reduction", Attr::Int(reduction)),
        ("shape", attr_ints(&[n, classes])?),
    ];
    let dx = c.step("nll_loss_bwd", &attrs, &[dy, target, weight])?;
    if shape.len() <= 2 {
        return one(c.reshape(dx, &shape)?);
    }
    let rank = shape.len();
    let last: Vec<u64> = [shape[0]]
        .into_iter()
        .chain(shape[2..].iter().copied())
        .chain([classes])
        .collect();
    let dx = c.reshape(dx, &last)?;
    let dims: Vec<usize> = [0, rank - 1].into_iter().chain(1..rank - 1).collect();
    one(c.permute(dx, &dims)?)
}

// --- indices ---

/// A tensor whose indexed dimensions stand in front, as the table wants them.
struct Front {
    /// The tensor, permuted.
    x: Ref,
    /// For each dimension of `x`, where it was.
    order: Vec<usize>,
    indices: Vec<Ref>,
    /// The rank of the indices together.
    n_index: usize,
    /// Where torch puts the dimensions of the indices in the result.
    at: usize,
}

impl Front {
    fn new(c: &mut Call<'_, '_>, x: Ref, indices: &[Option<Ref>]) -> R<Front> {
        let rank = c.rank(x);
        ensure(indices.len() <= rank, "more indices than dimensions")?;
        let indexed: Vec<usize> = (0..indices.len())
            .filter(|&d| indices[d].is_some())
            .collect();
        let (Some(&first), Some(&last)) = (indexed.first(), indexed.last()) else {
            return Err("no index".into());
        };
        let order: Vec<usize> = indexed
            .iter()
            .copied()
            .chain((0..rank).filter(|d| !indexed.contains(d)))
            .collect();
        let list: Vec<Ref> = indices.iter().copied().flatten().collect();
        for &i in &list {
            ensure(
                matches!(c.dtype(i), DType::I64 | DType::I32),
                "a mask is used as an index: the size of the result depends on the data",
            )?;
        }
        let n_index = list.iter().map(|&i| c.rank(i)).max().unwrap_or(0);
        // Indices that are not neighbours come first in the result.
        let at = if last - first + 1 == indexed.len() {
            first
        } else {
            0
        };
        let x = if is_identity(&order) {
            x
        } else {
            c.permute(x, &order)?
        };
        Ok(Front {
            x,
            order,
            indices: list,
            n_index,
            at,
        })
    }
    fn index(&self, c: &mut Call<'_, '_>) -> R<Ref> {
        let operands: Vec<Ref> = [self.x]
            .into_iter()
            .chain(self.indices.iter().copied())
            .collect();
        c.step("index", &[], &operands)
    }
    /// For each dimension of torch's result, where it stands in ours.
    fn result_order(&self) -> Vec<usize> {
        let (n, rest) = (self.n_index, self.order.len() - self.indices.len());
        (n..n + self.at)
            .chain(0..n)
            .chain(n + self.at..n + rest)
            .collect()
    }
    /// The result with its dimensions where torch has them.
    fn back(&self, c: &mut Call<'_, '_>, y: Ref) -> R<Ref> {
        let order = self.result_order();
        if is_identity(&order) {
            Ok(y)
        } else {
            c.permute(y, &order)
        }
    }
    /// The tensor with `values`, which broadcast to torch's result, at the indices.
    fn put(&self, c: &mut Call<'_, '_>, values: Ref, accumulate: bool) -> R<Ref> {
        let order = self.result_order();
        let mut values = values;
        if !is_identity(&order) {
            let mut lead = vec![];
            for &i in &self.indices {
                lead = ir::op::broadcast_shapes(&lead, c.ty(i).shape())?;
            }
            let ours: Vec<u64> = lead
                .iter()
                .chain(&c.ty(self.x).shape()[self.indices.len()..])
                .copied()
                .collect();
            let theirs: Vec<u64> = order.iter().map(|&d| ours[d]).collect();
            values = c.expand(values, &theirs)?;
            values = c.permute(values, &inverse(&order))?;
        }
        let operands: Vec<Ref> = [self.x, values]
            .into_iter()
            .chain(self.indices.iter().copied())
            .collect();
        let y = c.step(
            "index_put",
            &[("accumulate", Attr::Bool(accumulate))],
            &operands,
        )?;
        if is_identity(&self.order) {
            Ok(y)
        } else {
            c.permute(y, &inverse(&self.order))
        }
    }
}

fn is_identity(order: &[usize]) -> bool {
    order.iter().enumerate().all(|(i, &d)| i == d)
}

fn inverse(order: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; order.len()];
    for (i, &d) in order.iter().enumerate() {
        inverse[d] = i;
    }
    inverse
}

fn index(c: &mut Call<'_, '_>) -> R<Vec<Option<Ref>>> {
    let (x, indices) = (c.tensor("self")?, c.opt_tensors("indices")?);
    if indices.iter().all(Option::is_none) {
        return one(x);
    }
    let front = Front::new(c, x, &indices)?;
    let y = front.index(c)?;
    one(front.back(c, y)?)
}

fn index_put(c: &mut Call<'_, '_>) -> R<Vec<Option<Ref>>> {
    let (x, indices, values) = (
        c.tensor("self")?,
        c.opt_tensors("indices")?,
        c.tensor("values")?,
    );
    let accumulate = c.bool_or("accumulate", false)?;
    c.ignore(&["unsafe"]);
    // One value where a mask is true needs no sizes that depend on the data.
    if let [Some(mask)] = indices[..]
        && c.dtype(mask) == DType::Bool
        && c.ty(values).numel() == 1
        && !accumulate
    {
        let mut shape = c.shape_of(mask);
        ensure(shape.len() <= c.rank(x), "the mask has more dimensions")?;
        shape.resize(c.rank(x), 1);
        let (mask, value) = (c.reshape(mask, &shape)?, c.reshape(values, &[])?);
        return one(c.step("where", &[], &[mask, value, x])?);
    }
    let front = Front::new(c, x, &indices)?;
    one(front.put(c, values, accumulate)?)
}

// --- shapes ---

/// A list of sizes in which one -1 stands for what is left.
fn resolved(c: &Call<'_, '_>, x: Ref, size: &[i64]) -> R<Vec<u64>> {
    let known = size
        .iter()
        .filter(|&&d| d != -1)
        .try_fold(1u64, |n, &d| n.checked_mul(u64::try_from(d).ok()?));
    let known = known.ok_or("a size is negative or too large")?;
    ensure(
        size.iter().filter(|&&d| d == -1).count() <= 1,
        "two sizes are left open",
    )?;
    let rest = c.ty(x).numel().checked_div(known).unwrap_or(0);
    Ok(size
        .iter()
        .map(|&d| if d == -1 { rest } else { d as u64 })
        .collect())
}

fn arange(c: &mut Call<'_, '_>, dtype: DType, n: u64, start: Scalar, step: Scalar) -> R<Ref> {
    let (start, step) = (start.attr(dtype)?, step.attr(dtype)?);
    let attrs = [
        ("dtype", Attr::Type(dtype)),
        ("shape", attr_ints(&[n])?),
        ("start", start),
        ("step", step),
    ];
    c.step("arange", &attrs, &[])
}

/// `x[.., at, ..]`
fn select(c: &mut Call<'_, '_>, x: Ref, dim: usize, at: i64) -> R<Ref> {
    let mut shape = c.shape_of(x);
    let at = wrap(at, shape[dim] as usize)? as i64;
    shape.remove(dim);
    let y = c.slice(x, dim, Some(at), Some(at + 1), 1)?;
    c.reshape(y, &shape)
}

fn select_scatter(c: &mut Call<'_, '_>, x: Ref, source: Ref, dim: usize, at: i64) -> R<Ref> {
    let mut shape = c.shape_of(x);
    let at = wrap(at, shape[dim] as usize)? as i64;
    shape[dim] = 1;
    let source = c.reshape(source, &shape)?;
    slice_scatter(c, x, source, dim, Some(at), Some(at + 1), 1)
}

fn slice_scatter(
    c: &mut Call<'_, '_>,
    x: Ref,
    source: Ref,
    dim: usize,
    start: Option<i64>,
    end: Option<i64>,
    step: i64,
) -> R<Ref> {
    let source = c.cast(source, c.dtype(x))?;
    let attrs = c.slice_attrs(x, dim, start, end, step)?;
    match attrs {
        // All of it is replaced.
        None => {
            let shape = c.shape_of(x);
            c.expand(source, &shape)
        }
        Some(attrs) => c.step("slice_scatter", &attrs, &[x, source]),
    }
}

/// Sizes of parts that are equal but for the last; `n` is how many there should be.
fn equal_parts(size: i64, part: i64, n: usize) -> R<Vec<i64>> {
    if size == 0 && n == 1 {
        return Ok(vec![0]);
    }
    ensure(
        0 < part && (size / part) as usize + usize::from(size % part != 0) == n,
        "another number of results",
    )?;
    Ok((0..n as i64).map(|i| part.min(size - i * part)).collect())
}
