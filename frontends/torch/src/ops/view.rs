//! Operators whose results share their operand's memory, and what a write into such a view makes of
//! the operand.

use super::{bare, is_shape};
use lower::{Call, Plan, Range, Ref, Result, wrap};

/// The name without namespace and overload.
fn name(target: &str) -> &str {
    bare(target).split('.').next().unwrap_or("")
}

/// True if a result may share the operand's memory.
pub(crate) fn is_view(target: &str) -> bool {
    let name = name(target);
    is_shape(target) && !matches!(name, "sum" | "clone" | "_to_copy")
        || matches!(
            name,
            "contiguous"
                | "to"
                | "type_as"
                | "view_as"
                | "expand"
                | "expand_as"
                | "flatten"
                | "unflatten"
                | "slice"
                | "select"
                | "narrow"
                | "split"
                | "split_with_sizes"
                | "chunk"
                | "unbind"
                | "mT"
                | "numpy_T"
                | "movedim"
                | "moveaxis"
                | "swapaxes"
                | "swapdims"
                | "unfold"
                | "diagonal"
                | "tensor_split"
                | "hsplit"
                | "vsplit"
                | "dsplit"
                | "atleast_1d"
                | "atleast_2d"
                | "atleast_3d"
                | "ravel"
                | "positive"
                | "detach_"
                | "_reshape_alias"
        )
}

/// True if results share the memory of their operands, a list, or repeat its elements.
pub(crate) fn is_grid(target: &str) -> bool {
    matches!(name(target), "meshgrid" | "broadcast_tensors")
}

/// True for a dropout, which gives back its operand where it drops nothing.
pub(crate) fn is_dropout(target: &str) -> bool {
    matches!(
        name(target),
        "dropout" | "feature_dropout" | "alpha_dropout" | "feature_alpha_dropout"
    )
}

/// When an operator for views makes a copy instead.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Copies {
    Never,
    /// If the result has another element type.
    OtherType,
    /// If the operand does not lie in memory in the order of its elements.
    Scattered,
    /// Perhaps then: it depends on the shapes.
    PerhapsScattered,
}

/// When an operator for views makes a copy instead.
pub(crate) fn copies_if(target: &str) -> Copies {
    match name(target) {
        "to" | "type_as" => Copies::OtherType,
        "contiguous" => Copies::Scattered,
        "reshape" | "flatten" | "ravel" => Copies::PerhapsScattered,
        _ => Copies::Never,
    }
}

/// True if [`put_back`] knows the operator.
pub(crate) fn is_invertible(target: &str) -> bool {
    inverse(name(target)).is_some()
}

/// Plans the operand `x` of a view whose elements are now those of the second tensor.
type Inverse = fn(&mut Call<'_>, Ref, Ref) -> Result<Ref>;

fn inverse(name: &str) -> Option<Inverse> {
    Some(match name {
        "alias" | "contiguous" | "positive" | "to" | "type_as" => |c, _, part| {
            c.ignore(&["dtype", "other"]);
            Ok(part)
        },
        "view" | "_unsafe_view" | "_reshape_alias" | "reshape" | "flatten" | "unflatten"
        | "squeeze" | "unsqueeze" | "view_as" | "ravel" | "atleast_1d" | "atleast_2d"
        | "atleast_3d" => |c, x, part| {
            c.ignore(&["size", "shape", "stride", "start_dim", "end_dim"]);
            c.ignore(&["dim", "sizes", "other"]);
            let shape = c.shape_of(x);
            c.reshape(part, &shape)
        },
        "permute" => |c, x, part| {
            let rank = c.rank(x);
            let dims = c.ints("dims")?;
            let mut back = vec![0; rank];
            for (i, dim) in dims.into_iter().enumerate() {
                back[wrap(dim, rank)?] = i;
            }
            c.permute(part, &back)
        },
        "transpose" => |c, x, part| {
            let rank = c.rank(x);
            let mut dims: Vec<usize> = (0..rank).collect();
            let (a, b) = (c.dim("dim0", None, rank)?, c.dim("dim1", None, rank)?);
            dims.swap(a, b);
            c.permute(part, &dims)
        },
        "swapaxes" | "swapdims" => |c, x, part| {
            let dims = super::shape::swapped(c, c.rank(x))?;
            c.permute(part, &dims)
        },
        "movedim" | "moveaxis" => |c, x, part| {
            let order = super::shape::moved(c, c.rank(x))?;
            c.permute(part, &super::assemble::inverse(&order))
        },
        "diagonal" => super::assemble::with_diagonal,
        "dropout" | "feature_dropout" | "alpha_dropout" | "feature_alpha_dropout" => {
            |c, _, part| {
                c.ignore(&["p", "train"]);
                Ok(part)
            }
        }
        "t" | "numpy_T" => |c, x, part| {
            let dims: Vec<usize> = (0..c.rank(x)).rev().collect();
            c.permute(part, &dims)
        },
        "select" => |c, x, part| {
            let dim = c.dim("dim", None, c.rank(x))?;
            let at = c.int("index")?;
            c.select_scatter(x, part, dim, at)
        },
        "slice" => |c, x, part| {
            let dim = c.dim("dim", Some(0), c.rank(x))?;
            let range = Range {
                start: c.opt_int("start")?,
                end: c.opt_int("end")?,
                step: c.int_or("step", 1)?,
            };
            c.slice_scatter(x, part, dim, range)
        },
        _ => return None,
    })
}

/// The nodes for the operand of a view after a write into the view, whose elements `part` are.
pub(crate) fn put_back(target: &str, mut call: Call<'_>, part: Ref) -> Result<Plan> {
    let put = inverse(name(target)).ok_or(lower::Error::NoOp)?;
    let x = match call.opt_tensor("self")? {
        Some(x) => x,
        None => call.tensor("input")?,
    };
    let y = put(&mut call, x, part)?;
    call.finish(vec![Some(y)])
}
