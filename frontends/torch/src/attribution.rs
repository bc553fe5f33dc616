//! Finds the phase and the module of each traced node.
//!
//! Files of our exporter have both in each node's `custom` metadata. In a file with a forward
//! alone, `nn_module_stack` has the module. Other files have less information: nodes that the loss
//! depends on are forward, the rest is backward. A node that reads the parameter `a.b.weight`
//! belongs to module `a.b`; other forward nodes belong to the module of their operands, and
//! backward nodes to the module of the parameter or activation that they use.

use ir::Phase;
use serde::Deserialize;

/// The source of an operand.
#[derive(Clone, Copy)]
pub(crate) enum Source {
    /// A traced node, by its position. Invariant: before the node that reads it.
    Node(usize),
    /// A parameter, by its position among the input specs.
    Param(usize),
    /// Another state, by its position among the input specs.
    State(usize),
    /// Fed at every step.
    Input,
}

/// A traced node, with the fields that attribution uses.
pub(crate) struct Traced {
    /// Its operands.
    pub(crate) reads: Vec<Source>,
    /// The file's metadata about it.
    pub(crate) tag: Tag,
    /// True if it only moves or sums elements.
    pub(crate) is_shape: bool,
}

/// The metadata that our exporter writes.
#[derive(Deserialize, Default)]
pub(crate) struct Tag {
    phase: Option<String>,
    path: Option<String>,
    /// Whether a repeated call gives the same bits.
    #[serde(default)]
    pub(crate) pure: bool,
}

impl Tag {
    /// Reads a node's `custom` metadata. Other tools may write anything there, so unknown metadata
    /// are not an error.
    pub(crate) fn parse(custom: Option<&str>) -> Tag {
        custom
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default()
    }

    /// The tag with the path of the innermost module of a stack, `KEY,PATH,CLASS;..`, unless it has
    /// a path.
    pub(crate) fn within(self, stack: Option<&str>) -> Tag {
        let innermost = || Some(stack?.rsplit(';').next()?.split(',').nth(1)?.to_string());
        Tag {
            path: self.path.or_else(innermost),
            ..self
        }
    }
}

/// The results of the step.
pub(crate) struct Roots {
    /// Loss, new buffers, user outputs: the forward pass computes them.
    pub(crate) forward: Vec<Source>,
    /// Gradients and the input specs of their parameters.
    pub(crate) gradients: Vec<(Source, usize)>,
}

/// A node's place in the step and in the model.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) phase: Phase,
    pub(crate) module: String,
    /// Whether the file says that a repeated call gives the same bits.
    pub(crate) is_pure: bool,
}

/// The place of each node. `modules` has the module of each input spec that is a state.
pub(crate) fn attribute(nodes: &[Traced], roots: &Roots, modules: &[&str]) -> Vec<Place> {
    let phases = phases(nodes, roots);
    let names = paths(nodes, roots, modules, &phases);
    phases
        .into_iter()
        .zip(names)
        .zip(nodes)
        .map(|((phase, module), node)| Place {
            phase,
            module: module.to_string(),
            is_pure: node.tag.pure,
        })
        .collect()
}

fn phases(nodes: &[Traced], roots: &Roots) -> Vec<Phase> {
    let mut forward = vec![roots.gradients.is_empty(); nodes.len()];
    for source in &roots.forward {
        if let &Source::Node(n) = source {
            forward[n] = true;
        }
    }
    for n in (0..nodes.len()).rev() {
        if forward[n] {
            for m in read_nodes(&nodes[n]) {
                forward[m] = true;
            }
        }
    }
    let mut phases: Vec<Phase> = vec![];
    for (n, node) in nodes.iter().enumerate() {
        let own = match node.tag.phase.as_deref() {
            Some("fwd") => Phase::Forward,
            Some("bwd") => Phase::Backward,
            _ if forward[n] => Phase::Forward,
            _ => Phase::Backward,
        };
        // Even if the file says otherwise, no forward node reads a result of the backward.
        phases.push(read_nodes(node).map(|m| phases[m]).fold(own, Phase::max));
    }
    phases
}

fn paths<'a>(
    nodes: &'a [Traced],
    roots: &Roots,
    modules: &[&'a str],
    phases: &[Phase],
) -> Vec<&'a str> {
    let tagged = nodes.iter().any(|node| node.tag.path.is_some());
    let known = if tagged {
        nodes.iter().map(|node| node.tag.path.as_deref()).collect()
    } else {
        by_parameters(nodes, roots, modules, phases)
    };
    // True for nodes that depend on a parameter. Masks and tables do not; many modules share them.
    let mut trained: Vec<bool> = vec![];
    let mut found: Vec<&str> = vec![];
    for (n, node) in nodes.iter().enumerate() {
        trained.push(node.reads.iter().any(|source| match source {
            Source::Param(_) => true,
            Source::Node(m) => trained[*m],
            Source::State(_) | Source::Input => false,
        }));
        // This node had to wait for the operand that was computed last.
        let latest = |wanted: &dyn Fn(usize) -> bool| {
            let read = read_nodes(node).filter(|&m| wanted(m) && !found[m].is_empty());
            read.max().map(|m| found[m])
        };
        let activation = || match phases[n] {
            Phase::Backward => latest(&|m| trained[m] && phases[m] == Phase::Forward),
            _ => None,
        };
        let state = || {
            node.reads.iter().find_map(|s| {
                if let Source::State(s) = s {
                    Some(modules[*s])
                } else {
                    None
                }
            })
        };
        let path = match known[n] {
            Some(path) => Some(path),
            // In a file with paths, a node without a path adds gradients: it gets the path of the
            // later gradient.
            None if tagged => latest(&|_| true),
            None => activation()
                .or_else(|| latest(&|m| trained[m]))
                .or_else(|| latest(&|_| true))
                .or_else(state),
        };
        found.push(path.unwrap_or_default());
    }
    fill_from_readers(nodes, &mut found);
    found
}

/// Gives nodes without operands the path of the innermost module that contains all their readers.
fn fill_from_readers<'a>(nodes: &[Traced], found: &mut [&'a str]) {
    let mut readers: Vec<Option<&'a str>> = vec![None; nodes.len()];
    for n in (0..nodes.len()).rev() {
        if found[n].is_empty() {
            found[n] = readers[n].unwrap_or_default();
        }
        for m in read_nodes(&nodes[n]) {
            readers[m] = Some(readers[m].map_or(found[n], |other| common(other, found[n])));
        }
    }
}

/// The innermost module that contains both.
fn common<'a>(a: &'a str, b: &str) -> &'a str {
    let mut end = 0;
    for (part, other) in a.split_inclusive('.').zip(b.split_inclusive('.')) {
        if part.trim_end_matches('.') != other.trim_end_matches('.') {
            break;
        }
        end += part.len();
    }
    a[..end].trim_end_matches('.')
}

/// The modules of nodes that work for one parameter.
fn by_parameters<'a>(
    nodes: &[Traced],
    roots: &Roots,
    modules: &[&'a str],
    phases: &[Phase],
) -> Vec<Option<&'a str>> {
    // Parameters, and nodes that only move the elements of one parameter.
    let mut param_of: Vec<Option<usize>> = vec![];
    let mut known: Vec<Option<&str>> = vec![];
    for node in nodes {
        let from = |source: &Source| match source {
            &Source::Param(p) => Some(p),
            &Source::Node(m) => param_of[m],
            Source::State(_) | Source::Input => None,
        };
        known.push(node.reads.iter().find_map(from).map(|p| modules[p]));
        let moved = if let [only] = &node.reads[..] {
            from(only)
        } else {
            None
        };
        param_of.push(moved.filter(|_| node.is_shape));
    }
    // The node that computes a parameter's gradient, before the gradient is summed, transposed or
    // reshaped.
    for &(source, param) in &roots.gradients {
        let mut source = source;
        while let Source::Node(n) = source {
            known[n].get_or_insert(modules[param]);
            match nodes[n].reads.first() {
                Some(&next) if nodes[n].is_shape => source = next,
                _ => break,
            }
        }
    }
    // A node belongs to a module if only this module reads it: for example the mean in a norm,
    // which is computed before the norm reads its weight. The outer option is none without readers,
    // the inner one if the readers differ.
    let mut reader: Vec<Option<Option<&str>>> = vec![None; nodes.len()];
    for n in (0..nodes.len())
        .rev()
        .filter(|&n| phases[n] == Phase::Forward)
    {
        known[n] = known[n].or(reader[n].flatten());
        for m in read_nodes(&nodes[n]) {
            reader[m] = Some(match reader[m] {
                Some(other) if other != known[n] => None,
                _ => known[n],
            });
        }
    }
    known
}

fn read_nodes(node: &Traced) -> impl Iterator<Item = usize> {
    node.reads.iter().filter_map(|source| {
        if let Source::Node(m) = source {
            Some(*m)
        } else {
            None
        }
    })
}

/// The module of a parameter or buffer.
pub(crate) fn module_of(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(module, _)| module)
}

#[cfg(test)]
mod tests {
    use super::common;

    #[test]
    fn modules_meet() {
        assert_eq!(common("model.h.0.attn", "model.h.1.attn"), "model.h");
        assert_eq!(common("model.h.1", "model.h.10"), "model.h");
        assert_eq!(common("model.h", "model.h.10"), "model.h");
        assert_eq!(common("model.h", ""), "");
    }
}
