//! Which initializers are trained, and what a file that was made for inference lacks.

use crate::Trainable;
use crate::proto::{GraphProto, StringStringEntryProto, TensorProto};
use crate::tensor;
use ir::DType;
use std::collections::{BTreeMap, BTreeSet};

/// Where torch's exporter says what an initializer was: `PARAMETER`, `BUFFER`.
const KIND: &str = "pkg.torch.export.graph_signature.InputSpec.kind";

fn is_float(proto: &TensorProto) -> bool {
    let dtype = tensor::dtype(proto.data_type.unwrap_or(0).into());
    dtype.is_ok_and(|dtype: DType| dtype.is_float() && !dtype.is_eight_bit_float())
}

fn kind(entries: &[StringStringEntryProto]) -> Option<&str> {
    entries
        .iter()
        .find(|entry| entry.key() == KIND)
        .map(|entry| entry.value())
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
    let infos = graph.value_info.iter().chain(&graph.input);
    let kinds: BTreeMap<&str, &str> = infos
        .filter_map(|info| Some((info.name(), kind(&info.metadata_props)?)))
        .collect();
    let is_chosen = |proto: &&TensorProto| {
        let name = proto.name();
        let is_parameter = match kinds.get(name).copied().or(kind(&proto.metadata_props)) {
            Some(kind) => kind == "PARAMETER",
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

/// Advice about weights that are not trained: exporters for inference fold, transpose and rename
/// them.
pub(crate) fn notes(
    graph: &GraphProto,
    trained: &BTreeSet<&str>,
    trainable: &Trainable,
) -> Vec<String> {
    // Who gives a pattern has chosen.
    if matches!(trainable, Trainable::Pattern(_)) {
        return vec![];
    }
    const READERS: [&str; 4] = ["MatMul", "Gemm", "Conv", "Gather"];
    let read: BTreeSet<&str> = graph
        .node
        .iter()
        .filter(|node| READERS.contains(&node.op_type()))
        .flat_map(|node| &node.input)
        .map(String::as_str)
        .collect();
    let is_weight = |proto: &&TensorProto| {
        is_float(proto) && proto.dims.len() >= 2 && read.contains(proto.name())
    };
    let weights = graph.initializer.iter().filter(is_weight);
    let n_frozen = weights
        .filter(|proto| !trained.contains(proto.name()))
        .count();
    if n_frozen == 0 {
        return vec![];
    }
    vec![format!(
        "{n_frozen} of the model's weights are constants and are not trained; if the file was \
         exported for inference, export it with model.train() and torch.onnx.export(model, args, \
         dynamo=True, optimize=False); if they should be trained, give --trainable all or a pattern"
    )]
}

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
