//! The modules of tensors, as reports print them.

use ir::graph::Def;
use ir::{Graph, Value};
use passes::explain::Residence;

/// The most characters of a path in a table.
const MOST: usize = 40;

/// The module of what lies in memory: the one in which its first value was traced, or the path of a
/// state. Empty for inputs and scratch memory.
pub fn of<'a>(graph: &'a Graph, residence: &Residence) -> &'a str {
    let first = residence.values.first();
    first.map_or("", |&value| of_value(graph, value))
}

fn of_value(graph: &Graph, value: Value) -> &str {
    match graph.values[value].def {
        Def::Input(_) => "",
        Def::State(state) => &graph.states[state].path,
        Def::Node(node, _) => &graph.nodes[node].module,
    }
}

/// A path of at most 40 characters: a long one loses its first parts.
pub fn short(path: &str) -> String {
    let length = path.chars().count();
    if length <= MOST {
        return path.to_string();
    }
    let cut = "...";
    let tail: String = path.chars().skip(length - (MOST - cut.len())).collect();
    // The first part of the rest is not whole.
    let whole = tail
        .split_once('.')
        .map_or(tail.as_str(), |(_, parts)| parts);
    format!("{cut}{whole}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_paths_lose_their_first_parts() {
        assert_eq!(short("model.layers.3.mlp"), "model.layers.3.mlp");
        let long = "model.language_model.layers.31.self_attention.out_projection";
        assert_eq!(short(long), "...31.self_attention.out_projection");
        assert_eq!(short(&"é".repeat(60)), format!("...{}", "é".repeat(37)));
    }
}
