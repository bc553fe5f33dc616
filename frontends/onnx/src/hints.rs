//! What torch's exporter notes in a file beside ONNX's own fields.

use crate::proto::{GraphProto, NodeProto, StringStringEntryProto};
use std::collections::BTreeMap;

/// Where the exporter says what an initializer was: `PARAMETER`, `BUFFER`.
const KIND: &str = "pkg.torch.export.graph_signature.InputSpec.kind";

/// The kind of what is trained.
pub(crate) const PARAMETER: &str = "PARAMETER";

/// What an initializer was.
pub(crate) fn kind(entries: &[StringStringEntryProto]) -> Option<&str> {
    entries
        .iter()
        .find(|entry| entry.key() == KIND)
        .map(|entry| entry.value())
}

/// What the initializers were of which the graph's types say it, by name.
pub(crate) fn kinds(graph: &GraphProto) -> BTreeMap<&str, &str> {
    let infos = graph.value_info.iter().chain(&graph.input);
    infos
        .filter_map(|info| Some((info.name(), kind(&info.metadata_props)?)))
        .collect()
}

/// The module in which torch's exporter saw a node: the scope before the node's own.
pub(crate) fn module(node: &NodeProto) -> Option<String> {
    let scopes = node
        .metadata_props
        .iter()
        .find(|p| p.key() == "pkg.torch.onnx.name_scopes")?;
    let list = scopes.value().strip_prefix('[')?.strip_suffix(']')?;
    let scopes: Vec<&str> = list.split(", ").collect();
    let module = scopes.len().checked_sub(2).map_or("", |i| scopes[i]);
    Some(module.trim_matches(['\'', '"']).to_string())
}
