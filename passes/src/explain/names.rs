//! What a name on the command line stands for.

use super::chunk::Chunk;
use crate::graph::canonical;
use crate::occupants::Occupants;
use ir::graph::Def;
use ir::{Graph, Instr, Program, Value};

/// What a name on the command line stands for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Named {
    /// One value.
    Value(Value),
    /// The values and states of a module, in the graph's order.
    Module(Vec<Value>),
    /// The values in a buffer that holds several, as reports name it.
    Buffer(Vec<Value>),
    /// States that come to the device in one copy.
    Chunk(Chunk),
    /// Scratch memory: the line that uses it.
    Scratch(Instr),
    /// A value of the traced graph that the passes removed; what took its place, if something did.
    Removed(Option<Value>),
    /// Nothing; names that are near.
    Unknown(Vec<String>),
}

/// Looks a name up: a value, with or without `%`; a state's path; an output; a module's path; a
/// buffer. `traced` is the graph before any pass.
pub fn named(program: &Program, traced: &Graph, name: &str) -> Named {
    let graph = &program.graph;
    let bare = name.strip_prefix('%').unwrap_or(name);
    if let Some(value) = value_named(graph, bare) {
        return Named::Value(value);
    }
    if let Some((old, _)) = traced.values.iter().find(|(_, data)| data.name == bare) {
        return traced_value(graph, traced, old);
    }
    let members = module_values(graph, bare);
    if !members.is_empty() {
        return Named::Module(members);
    }
    if let Some(found) = buffer_named(program, bare) {
        return found;
    }
    let values = graph.values.values().map(|data| data.name.as_str());
    let paths = graph.states.values().map(|state| state.path.as_str());
    Named::Unknown(nearest(bare, values.chain(paths)))
}

fn by_name(graph: &Graph, name: &str) -> Option<Value> {
    let mut values = graph.values.iter();
    let found = values.find(|(_, data)| data.name == name);
    found.map(|(value, _)| value)
}

/// The value, the state or the output of a name.
fn value_named(graph: &Graph, name: &str) -> Option<Value> {
    let of_path = |path: &str| {
        let state = graph.states.values().find(|state| state.path == path);
        state.map(|state| state.before)
    };
    // A moment is `exp_avg.PATH`; `PATH.exp_avg` is understood.
    let state = || {
        let (path, part) = name.rsplit_once('.').unwrap_or_default();
        of_path(name).or_else(|| of_path(&format!("{part}.{path}")))
    };
    let output = || {
        let output = graph.outputs.iter().find(|output| output.name == name);
        output.map(|output| output.value)
    };
    by_name(graph, name).or_else(state).or_else(output)
}

/// What a buffer holds.
fn buffer_named(program: &Program, name: &str) -> Option<Named> {
    let Program {
        graph, schedule, ..
    } = program;
    let mut buffers = schedule.buffers.iter();
    let (buffer, _) = buffers.find(|(_, data)| data.name == name)?;
    if let Some(chunk) = Chunk::found_in(program, buffer) {
        return Some(Named::Chunk(chunk));
    }
    let occupants = Occupants::new(graph, schedule);
    let places = occupants.places(buffer).iter();
    let values = places.flat_map(|place| &place.values);
    let mut values: Vec<Value> = values.map(|&(_, value)| value).collect();
    values.sort_unstable();
    values.dedup();
    // A state's new value takes the old one's place; what was decided is the old one's.
    let old = |value: Value| {
        let mut states = graph.states.values();
        let state = states.find(|state| graph.root(state.after) == value);
        state.map(|state| state.before)
    };
    let all = values.clone();
    values.retain(|&value| old(value).is_none_or(|old| old == value || !all.contains(&old)));
    let uses = |&instr: &Instr| {
        let mut found = false;
        schedule.each_access(graph, instr, |access| found |= access.loc.buffer == buffer);
        found
    };
    match values[..] {
        [] => schedule.instrs.ids().find(uses).map(Named::Scratch),
        [value] => Some(Named::Value(value)),
        _ => Some(Named::Buffer(values)),
    }
}

/// What became of a value of the traced graph.
fn traced_value(graph: &Graph, traced: &Graph, old: Value) -> Named {
    // A reshape that no node reads any more still has bytes: those of its root.
    let became =
        canonical::became(traced, old).or_else(|| canonical::became(traced, traced.root(old)));
    let Some(name) = became else {
        return Named::Removed(None);
    };
    // What is computed for each chunk of rows, or each micro-batch.
    let is_part = |other: &str| {
        let rest = other.strip_prefix(&name);
        let number = rest.and_then(|rest| rest.strip_prefix('.'));
        number.is_some_and(|number| number.parse::<u64>().is_ok())
    };
    let values = graph.values.iter();
    let parts: Vec<Value> = values
        .filter(|(_, data)| is_part(&data.name))
        .map(|(value, _)| value)
        .collect();
    if parts.is_empty() {
        Named::Removed(by_name(graph, &name))
    } else {
        Named::Module(parts)
    }
}

/// The roots of a module and of the modules in it; none for the model as a whole.
fn module_values(graph: &Graph, module: &str) -> Vec<Value> {
    if module.is_empty() {
        return vec![];
    }
    let within = |path: &str| {
        path.strip_prefix(module)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    let of_module = |value: Value| match graph.values[value].def {
        Def::Input(_) => false,
        Def::State(state) => within(&graph.states[state].path),
        Def::Node(node, _) => within(&graph.nodes[node].module),
    };
    let values = graph.values.ids();
    values
        .filter(|&value| graph.root(value) == value && of_module(value))
        .collect()
}

/// The names that are nearest to `wanted`: those that contain it first, then by edit distance.
pub fn nearest<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let wanted: Vec<char> = wanted.to_lowercase().chars().take(LONGEST_NAME).collect();
    let mut near: Vec<(usize, &str)> = names
        .filter_map(|name| {
            let lower: Vec<char> = name.to_lowercase().chars().take(LONGEST_NAME).collect();
            let contains =
                2 < wanted.len() && lower.windows(wanted.len()).any(|window| window == wanted);
            let edits = edits(&wanted, &lower);
            // A third of the characters may be wrong, and two in a short name: a swapped pair.
            let is_near = contains || 3 * edits <= wanted.len() + 2;
            is_near.then_some((if contains { 0 } else { 1 + edits }, name))
        })
        .collect();
    near.sort_unstable_by_key(|&(distance, name)| (distance, name.len(), name));
    near.dedup();
    near.into_iter()
        .take(5)
        .map(|(_, name)| name.to_string())
        .collect()
}

/// Characters of a name that are compared: the distance takes quadratic time.
const LONGEST_NAME: usize = 100;

/// How many characters must be inserted, removed or replaced (Levenshtein).
fn edits(a: &[char], b: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_near_are_found() {
        let names = ["gelu", "gelu_1", "gelu_bwd", "view", "model.h.0.attn"];
        let near = |wanted: &str| nearest(wanted, names.into_iter());
        assert_eq!(near("gelu_2"), ["gelu_1", "gelu"]);
        assert_eq!(near("attn"), ["model.h.0.attn"]);
        assert_eq!(near("veiw"), ["view"]);
        assert!(near("entirely_different").is_empty());
        assert!(near("").is_empty());
    }
}
