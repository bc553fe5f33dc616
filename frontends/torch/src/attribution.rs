//! Which part of the step a traced node belongs to, and which module.
//!
//! Files of our exporter say so in each node's `custom` metadata. Of other files we know less: what the loss depends on
//! is forward and the rest backward; a node that reads the parameter `a.b.weight` belongs to module `a.b`, other forward
//! nodes to the module of what they read, and backward nodes to that of the parameter or activation they use.

use ir::Phase;
use serde::Deserialize;

/// Where an operand comes from.
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

/// A traced node, as far as attribution looks at it.
pub(crate) struct Traced {
    /// Its operands.
    pub(crate) reads: Vec<Source>,
    /// What the file says about it.
    pub(crate) tag: Tag,
    /// True if it only moves or sums elements.
    pub(crate) is_shape: bool,
}

/// The metadata that our exporter writes.
#[derive(Deserialize, Default)]
pub(crate) struct Tag {
    phase: Option<String>,
    path: Option<String>,
}

impl Tag {
    /// Reads a node's `custom` metadata. Other tools may write anything there, so what is not ours is no error.
    pub(crate) fn parse(custom: Option<&str>) -> Tag {
        custom.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
    }
}

/// What the step gives back.
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
}

/// The place of each node. `modules` has the module of each input spec that is a state.
pub(crate) fn attribute(nodes: &[Traced], roots: &Roots, modules: &[&str]) -> Vec<Place> {
    let phases = phases(nodes, roots);
    let names = paths(nodes, roots, modules, &phases);
    phases.into_iter().zip(names).map(|(phase, module)| Place { phase, module: module.to_string() }).collect()
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
            for source in &nodes[n].reads {
                if let &Source::Node(m) = source {
                    forward[m] = true;
                }
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
        // Whatever the file says, no forward node reads what backward computes.
        let read = node.reads.iter().filter_map(|s| if let Source::Node(m) = s { Some(phases[*m]) } else { None });
        phases.push(read.fold(own, Phase::max));
    }
    phases
}

fn paths<'a>(nodes: &'a [Traced], roots: &Roots, modules: &[&'a str], phases: &[Phase]) -> Vec<&'a str> {
    let tagged = nodes.iter().any(|node| node.tag.path.is_some());
    let mut known: Vec<Option<&str>> = nodes.iter().map(|node| node.tag.path.as_deref()).collect();
    if !tagged {
        // The node that computes a parameter's gradient, before it is summed, transposed or reshaped.
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
    }
    // Parameters, and what is computed from one parameter alone by moving its elements.
    let mut param_of: Vec<Option<usize>> = vec![];
    for node in nodes {
        param_of.push(match node.reads[..] {
            [Source::Param(p)] if node.is_shape => Some(p),
            [Source::Node(m)] if node.is_shape => param_of[m],
            _ => None,
        });
    }
    let mut found: Vec<&str> = vec![];
    for (n, node) in nodes.iter().enumerate() {
        let param = node.reads.iter().find_map(|source| match source {
            &Source::Param(p) => Some(modules[p]),
            &Source::Node(m) => param_of[m].map(|p| modules[p]),
            _ => None,
        });
        // The operand computed last is the one that this node was waiting for.
        let latest = |wanted: &dyn Fn(usize) -> bool| {
            let read = node.reads.iter().filter_map(|s| if let Source::Node(m) = s { Some(*m) } else { None });
            read.filter(|&m| wanted(m) && !found[m].is_empty()).max().map(|m| found[m])
        };
        let activation = || match phases[n] {
            Phase::Backward => latest(&|m| phases[m] == Phase::Forward),
            _ => None,
        };
        let state = || node.reads.iter().find_map(|s| if let Source::State(s) = s { Some(modules[*s]) } else { None });
        let path = match known[n] {
            Some(path) => Some(path),
            // In a file with paths, a node without one adds gradients: it stands where the later of them was computed.
            None if tagged => latest(&|_| true),
            None => param.or_else(activation).or_else(|| latest(&|_| true)).or_else(state),
        };
        found.push(path.unwrap_or_default());
    }
    // What is left was computed from nothing: it belongs to whoever reads it first.
    let mut reader: Vec<Option<usize>> = vec![None; nodes.len()];
    for n in (0..nodes.len()).rev() {
        for source in &nodes[n].reads {
            if let &Source::Node(m) = source {
                reader[m] = Some(n);
            }
        }
    }
    for n in (0..nodes.len()).rev() {
        if found[n].is_empty()
            && let Some(m) = reader[n]
        {
            found[n] = found[m];
        }
    }
    found
}

/// The module of a parameter or buffer.
pub(crate) fn module_of(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(module, _)| module)
}
