//! torch's operators in terms of the op table: tables by family, keyed by the operator's name, and
//! functions that read the arguments by torch's names. Compositions of several ops are in
//! [`lighterage_lower`], for every front end.
//!
//! A call may become no node (another name of its operand), one, or several. A call that the op
//! table cannot express gives an error with the reason; the importer makes an `extern` node of it.

mod activation;
mod assemble;
mod attention;
mod binary;
pub(crate) mod complex;
mod convolution;
mod copy;
mod index;
mod loss;
mod norm;
mod product;
mod random;
mod recurrent;
mod reduce;
mod resize;
mod sample;
mod shape;
mod softmax;
mod source;
mod special;
mod unary;
mod view;

use lower::{Call, Error, Plan, Result, Results};

pub(crate) use view::{Copies, copies_if, is_dropout, is_grid, is_invertible, is_view, put_back};

use std::collections::BTreeMap;
use std::sync::LazyLock;

/// Reads the arguments of a call and plans its nodes.
type Lowering = fn(&mut Call<'_>) -> Result<Results>;

/// Operators with their lowerings. A key is the name in the namespace `aten`: with the overload
/// (`max.dim`) if overloads differ, without it (`neg`) if one lowering is for all overloads.
type Family = &'static [(&'static str, Lowering)];

const FAMILIES: [Family; 20] = [
    activation::OPS,
    assemble::OPS,
    attention::OPS,
    binary::OPS,
    convolution::OPS,
    copy::OPS,
    index::OPS,
    loss::OPS,
    norm::OPS,
    product::OPS,
    random::OPS,
    recurrent::OPS,
    reduce::OPS,
    resize::OPS,
    sample::OPS,
    shape::OPS,
    softmax::OPS,
    source::OPS,
    special::OPS,
    unary::OPS,
];

static TABLE: LazyLock<BTreeMap<&'static str, Lowering>> =
    LazyLock::new(|| FAMILIES.into_iter().flatten().copied().collect());

/// The entry of an operator: for its overload, or for all its overloads.
fn find(target: &str) -> Option<(&'static str, Lowering)> {
    let key = bare(target);
    let for_all = || TABLE.get_key_value(key.rsplit_once('.')?.0);
    let (&key, &lowering) = TABLE.get_key_value(key).or_else(for_all)?;
    Some((key, lowering))
}

/// The nodes for a call of an operator. `add_` is `add`, whose result is written into `self`.
pub(crate) fn lower(target: &str, mut call: Call<'_>) -> Result<Plan> {
    if let Some((_, lowering)) = find(target) {
        let results = lowering(&mut call)?;
        return call.finish(results);
    }
    let functional = out_of_place(target).ok_or(Error::NoOp)?;
    let (_, lowering) = find(&functional).ok_or(Error::NoOp)?;
    let results = lowering(&mut call)?;
    let results = call.as_wanted(results)?;
    match results.first() {
        Some(&Some(result)) => call.write("self", result)?,
        _ => return Err(Error::NoOp),
    }
    call.finish(results)
}

/// `add.Tensor` for `add_.Tensor`.
fn out_of_place(target: &str) -> Option<String> {
    let (name, overload) = bare(target).split_once('.')?;
    let name = name.strip_suffix('_').filter(|name| !name.ends_with('_'))?;
    Some(format!("{name}.{overload}"))
}

/// True if the operator writes its result into its operand.
pub(crate) fn is_in_place(target: &str) -> bool {
    out_of_place(target).is_some()
}

/// True if autograd passes no gradient through the operator, which changes no element.
pub(crate) fn is_detached(target: &str) -> bool {
    let name = bare(target).split('.').next();
    matches!(name, Some("detach" | "detach_" | "detach_copy"))
}

/// An operator's name without the most common namespaces.
fn bare(target: &str) -> &str {
    let name = target.strip_prefix("torch.ops.").unwrap_or(target);
    name.strip_prefix("aten.").unwrap_or(name)
}

/// True for calls that only check something.
pub(crate) fn is_assertion(target: &str) -> bool {
    let name = target.strip_prefix("torch.ops.aten.").unwrap_or(target);
    name.starts_with("_assert")
        || name.starts_with("sym_constrain")
        || target.starts_with("_operator.")
}

/// True for operators that move, sum or convert elements: autograd adds them around the main op.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operator_stands_in_one_family() {
        let mut seen = BTreeMap::new();
        for (key, _) in FAMILIES.into_iter().flatten() {
            assert_eq!(seen.insert(key, ()), None, "{key} stands twice");
        }
    }

    #[test]
    fn an_overload_comes_before_the_lowering_for_all() {
        let key = |target: &str| find(target).map(|(key, _)| key);
        assert_eq!(key("torch.ops.aten.max.dim"), Some("max.dim"));
        assert_eq!(key("torch.ops.aten.bernoulli.p"), Some("bernoulli.p"));
        assert_eq!(key("torch.ops.aten.bernoulli.default"), Some("bernoulli"));
        assert_eq!(key("torch.ops.aten.max.names_dim"), None);
        assert_eq!(key("torch.ops.mylib.neg.default"), None);
        assert_eq!(key("torch.ops.aten.foo.default"), None);
        let functional = |target: &str| out_of_place(target);
        assert_eq!(
            functional("torch.ops.aten.add_.Tensor").as_deref(),
            Some("add.Tensor")
        );
        assert_eq!(functional("torch.ops.aten.__and__.Tensor"), None);
        assert_eq!(functional("torch.ops.aten.add.Tensor"), None);
    }
}
