//! Calls of a graph inside the graph: `torch.no_grad()` around a part of a forward becomes
//! `wrap_with_set_grad_enabled(enabled, graph, operands..)`.
//!
//! Before: a program as read. After: the nodes of such graphs stand in place of the calls, under
//! names of their own. `detach` gives each result its name, or `alias` if gradients are enabled.
//! Calls without gradients are marked. So the importer sees one list of nodes.

use crate::schema::{Argument, Graph, Item, Metadata, NamedArgument, Node};
use std::collections::BTreeMap;

/// The operator that runs a graph with or without gradients.
const REGION: &str = "torch.ops.higher_order.wrap_with_set_grad_enabled";

/// Puts the nodes of inner graphs in place of their calls. A call of another form stays.
pub(crate) fn inline(graph: &mut Graph) {
    let mut rest: Vec<Node> = std::mem::take(&mut graph.nodes);
    rest.reverse();
    while let Some(node) = rest.pop() {
        match nodes_of(&node, graph) {
            // They may call graphs themselves.
            Some(nodes) => rest.extend(nodes.into_iter().rev()),
            None => graph.nodes.push(node),
        }
    }
}

/// The nodes that a call of a graph means, with their tensors in `outer`; `None` for other calls.
fn nodes_of(call: &Node, outer: &mut Graph) -> Option<Vec<Node>> {
    let [enabled, region, operands @ ..] = &call.inputs[..] else {
        return None;
    };
    let (Argument::Bool(enabled), Argument::Region(inner)) = (&enabled.arg, &region.arg) else {
        return None;
    };
    let results: Vec<&String> = call.outputs.iter().flat_map(tensors).collect();
    let made: Vec<&String> = inner.outputs.iter().flat_map(tensors).collect();
    let given: Vec<&String> = operands.iter().flat_map(|arg| tensors(&arg.arg)).collect();
    let taken: Vec<&String> = inner.inputs.iter().flat_map(tensors).collect();
    let fits = results.len() == made.len() && given.len() == taken.len();
    if call.target != REGION || !fits {
        return None;
    }

    let mut names: BTreeMap<String, String> = BTreeMap::new();
    for (name, meta) in &inner.tensor_values {
        let mut new = format!("{name}_inner");
        while outer.tensor_values.contains_key(&new) {
            new.push('_');
        }
        outer.tensor_values.insert(new.clone(), meta.clone());
        names.insert(name.clone(), new);
    }
    // Operands keep their names.
    for (taken, given) in taken.into_iter().zip(given) {
        names.insert(taken.clone(), given.clone());
    }
    for (name, value) in &inner.sym_int_values {
        let known = outer.sym_int_values.entry(name.clone());
        known.or_insert_with(|| value.clone());
    }
    let mut nodes = inner.nodes.clone();
    for node in &mut nodes {
        node.is_detached |= !*enabled;
        let inputs = node.inputs.iter_mut().map(|input| &mut input.arg);
        inputs
            .chain(&mut node.outputs)
            .for_each(|arg| rename(arg, &names));
    }
    let target = if *enabled { "alias" } else { "detach" };
    nodes.extend(made.into_iter().zip(results).map(|(made, result)| {
        let made = names.get(made).unwrap_or(made).clone();
        Node {
            target: format!("torch.ops.aten.{target}.default"),
            inputs: vec![NamedArgument {
                name: "self".into(),
                arg: Argument::Tensor(made),
            }],
            outputs: vec![Argument::Tensor(result.clone())],
            metadata: Metadata::default(),
            name: None,
            is_detached: false,
        }
    }));
    Some(nodes)
}

/// The names of an argument's tensors.
fn tensors(arg: &Argument) -> Vec<&String> {
    match arg {
        Argument::Tensor(name) => vec![name],
        Argument::Tensors(items) => items.iter().filter_map(name_of).collect(),
        _ => vec![],
    }
}

fn name_of(item: &Item) -> Option<&String> {
    match item {
        Item::Name(name) => Some(name),
        Item::Int(_) | Item::None => None,
    }
}

/// Gives tensors their new names.
fn rename(arg: &mut Argument, names: &BTreeMap<String, String>) {
    let to_new = |name: &mut String| {
        if let Some(new) = names.get(name) {
            name.clone_from(new);
        }
    };
    match arg {
        Argument::Tensor(name) => to_new(name),
        Argument::Tensors(items) => {
            for item in items {
                if let Item::Name(name) = item {
                    to_new(name);
                }
            }
        }
        _ => {}
    }
}
