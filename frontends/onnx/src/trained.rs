//! Which initializers are trained, and what a file that was made for inference lacks.

use crate::hints::PARAMETER;
use crate::proto::{GraphProto, TensorProto};
use crate::{Trainable, hints, tensor};
use ir::DType;
use std::collections::{BTreeMap, BTreeSet};

fn is_float(proto: &TensorProto) -> bool {
    let dtype = tensor::dtype(proto.data_type.unwrap_or(0).into());
    dtype.is_ok_and(|dtype: DType| dtype.is_float() && !dtype.is_eight_bit_float())
}

/// The names of the trained initializers.
pub(crate) fn names<'a>(graph: &'a GraphProto, trainable: &Trainable) -> BTreeSet<&'a str> {
    let statistics: BTreeSet<&str> = graph
        .node
        .iter()
        .filter(|node| node.op_type() == "BatchNormalization")
        .flat_map(|node| node.input.iter().skip(3))
        .map(String::as_str)
        .collect();
    let kinds = hints::kinds(graph);
    let is_chosen = |proto: &&TensorProto| {
        let name = proto.name();
        let is_parameter = match kinds
            .get(name)
            .copied()
            .or(hints::kind(&proto.metadata_props))
        {
            Some(kind) => kind == PARAMETER,
            None => name.contains('.'),
        };
        let is_named = match trainable {
            Trainable::Named => is_parameter,
            Trainable::All => !proto.dims.is_empty(),
            Trainable::Pattern(pattern) => pattern.split(',').any(|one| matches(one, name)),
        };
        is_named && is_float(proto) && !statistics.contains(name)
    };
    graph
        .initializer
        .iter()
        .filter(is_chosen)
        .map(|proto| proto.name())
        .collect()
}

/// True if a name matches a pattern with stars.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or("");
    let Some(mut rest) = name.strip_prefix(first) else {
        return false;
    };
    let mut last = None;
    for part in parts {
        // The text before this part was found as early as possible.
        if let Some(part) = last.replace(part) {
            match rest.find(part) {
                Some(at) => rest = &rest[at + part.len()..],
                None => return false,
            }
        }
    }
    last.map_or(rest.is_empty(), |last| rest.ends_with(last))
}

/// What a node does with an input that may be a weight.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// A factor of a product, or a table.
    Matrix,
    /// A bias, or the weight or bias of a normalisation.
    Vector,
    /// An operand of arithmetic.
    Operand,
}

fn role(op_type: &str, input: usize) -> Option<Role> {
    match (op_type, input) {
        ("MatMul", _) | ("Gemm", 0 | 1) | ("Conv" | "ConvTranspose", 1) | ("Gather", 0) => {
            Some(Role::Matrix)
        }
        ("Gemm" | "Conv" | "ConvTranspose", 2) => Some(Role::Vector),
        (
            "LayerNormalization"
            | "RMSNormalization"
            | "GroupNormalization"
            | "InstanceNormalization",
            1 | 2,
        ) => Some(Role::Vector),
        ("Add" | "Sub" | "Mul" | "Div", _) => Some(Role::Operand),
        _ => None,
    }
}

/// True if a tensor has more than two different elements, as a mask does not. Elements that lie in
/// another file or in fields for single numbers count as different.
fn is_varied(proto: &TensorProto) -> bool {
    let n: i64 = proto.dims.iter().product();
    let Some(raw) = proto.raw_data.as_ref().filter(|raw| !raw.is_empty()) else {
        return n > 1;
    };
    let size = usize::try_from(n)
        .map_or(1, |n| raw.len() / n.max(1))
        .max(1);
    let mut seen: Vec<&[u8]> = vec![];
    for element in raw.chunks_exact(size) {
        if !seen.contains(&element) {
            seen.push(element);
        }
        if seen.len() > 2 {
            return true;
        }
    }
    false
}

/// Initializers that look like weights and are not trained.
fn constants<'a>(graph: &'a GraphProto, trained: &BTreeSet<&str>) -> Vec<&'a TensorProto> {
    let mut roles: BTreeMap<&str, Vec<Role>> = BTreeMap::new();
    for node in &graph.node {
        for (i, name) in node.input.iter().enumerate() {
            roles
                .entry(name)
                .or_default()
                .extend(role(node.op_type(), i));
        }
    }
    let is_weight = |proto: &&TensorProto| {
        let roles = roles.get(proto.name()).map_or(&[][..], Vec::as_slice);
        let has = |role: Role| roles.contains(&role);
        let rank = proto.dims.len();
        rank >= 2 && has(Role::Matrix)
            || rank >= 1 && has(Role::Vector)
            || rank >= 1 && has(Role::Operand) && is_varied(proto)
    };
    let kinds = hints::kinds(graph);
    let is_known = |proto: &TensorProto| {
        let kind = kinds.get(proto.name()).copied();
        kind.or(hints::kind(&proto.metadata_props))
            .is_some_and(|kind| kind != PARAMETER)
    };
    let open = graph
        .initializer
        .iter()
        .filter(|proto| is_float(proto) && !trained.contains(proto.name()) && !is_known(proto));
    open.filter(is_weight).collect()
}

/// For trained vectors that other modules read too, the number of these: the exporter merges equal
/// parameters.
fn merged<'a>(graph: &'a GraphProto, trained: &BTreeSet<&str>) -> BTreeMap<&'a str, usize> {
    let mut readers: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for node in &graph.node {
        let Some(module) = hints::module(node) else {
            continue;
        };
        for (i, name) in node.input.iter().enumerate() {
            if role(node.op_type(), i) == Some(Role::Vector) && trained.contains(name.as_str()) {
                readers.entry(name).or_default().insert(module.clone());
            }
        }
    }
    let more = readers
        .into_iter()
        .map(|(name, modules)| (name, modules.len() - 1));
    more.filter(|&(_, n)| n > 0).collect()
}

/// Advice about weights that are not trained: exporters for inference fold, merge, transpose and
/// rename them.
pub(crate) fn notes(
    graph: &GraphProto,
    trained: &BTreeSet<&str>,
    trainable: &Trainable,
) -> Vec<String> {
    // Who gives a pattern has chosen.
    if matches!(trainable, Trainable::Pattern(_)) {
        return vec![];
    }
    let (constants, merged) = (constants(graph, trained), merged(graph, trained));
    let mut found = vec![];
    if !constants.is_empty() {
        let shown = constants.iter().take(SHOWN);
        let mut names: Vec<String> = shown.map(|proto| proto.name().to_string()).collect();
        if constants.len() > SHOWN {
            names.push("..".into());
        }
        found.push(format!(
            "{} of the model's weights are constants and are not trained ({})",
            constants.len(),
            names.join(", ")
        ));
    }
    if let Some(name) = merged.keys().next() {
        let n: usize = merged.values().sum();
        found.push(format!(
            "{n} others are merged with equal ones, such as {name}"
        ));
    }
    if found.is_empty() {
        return vec![];
    }
    vec![format!(
        "{}; if the file was exported for inference, export it with model.train() and \
         torch.onnx.export(model, args, dynamo=True, optimize=False); if constants should be \
         trained, give --trainable all or a pattern",
        found.join(", and ")
    )]
}

/// The most names that a note lists.
const SHOWN: usize = 4;

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn patterns_match_as_a_whole() {
        let names = ["fc.weight", "fc.bias", "head.fc.weight", "fc"];
        let found = |pattern: &str| names.map(|name| matches(pattern, name));
        assert_eq!(found("fc.weight"), [true, false, false, false]);
        assert_eq!(found("*.weight"), [true, false, true, false]);
        assert_eq!(found("*fc*"), [true; 4]);
        assert_eq!(found("fc.*"), [true, true, false, false]);
        assert_eq!(found("*"), [true; 4]);
        assert_eq!(found("h*w*t"), [false, false, true, false]);
        assert!(!matches("a*a", "a"));
    }
}
