//! Which parameters are trained, and with which options: patterns of their paths.

use crate::args::{Compiling, Group, Paths};
use crate::failure::Failure;
use ir::graph::StateData;
use ir::{Graph, StateKind};
use passes::graph::optimizer::Optimizer;
use std::collections::{BTreeMap, BTreeSet};

/// The groups of a graph's parameters.
#[derive(Default)]
pub(crate) struct Groups {
    /// The group of a parameter, by its path, if it is not 0.
    pub(crate) of: BTreeMap<String, usize>,
    /// The options of groups from 1 on that differ from those of group 0.
    pub(crate) options: Vec<Vec<(String, f64)>>,
    /// The groups whose moments are numbers where the optimizer has codes.
    pub(crate) whole: BTreeSet<usize>,
}

/// The option of a group that says whether its moments are in 8 or in 32 bits. A plan depends on
/// it, so it is none of those that a step reads.
const BITS: &str = "bits";

/// Removes the gradients of frozen parameters. In a forward, whose gradients do not exist yet, they
/// become buffers.
pub(crate) fn freeze(graph: &mut Graph, compiling: &Compiling) -> Result<(), Failure> {
    for paths in &compiling.freeze {
        let trained = trained(graph, compiling);
        if !trained.iter().any(|(path, _)| paths.has(path)) {
            return Err(unknown("--freeze", paths, &trained));
        }
        let states = &mut graph.states;
        graph
            .gradients
            .retain(|&(state, _)| !paths.has(&states[state].path));
        if compiling.forward.differentiate {
            let frozen = states.values_mut().filter(|state| paths.has(&state.path));
            frozen
                .filter(|state| state.kind == StateKind::Param)
                .for_each(|state| state.kind = StateKind::Buffer);
        }
    }
    if !compiling.freeze.is_empty() && trained(graph, compiling).is_empty() {
        return Err(Failure::Input(
            "--freeze: no parameter is left to train".into(),
        ));
    }
    Ok(())
}

/// The groups that the options ask for. Of several `--group` for one parameter, the last one that
/// has an option wins.
pub(crate) fn of(graph: &Graph, compiling: &Compiling) -> Result<Groups, Failure> {
    let optimizer = compiling.optimizer.unwrap_or_default();
    let trained = trained(graph, compiling);
    for group in &compiling.group {
        if !trained.iter().any(|(path, _)| group.patterns.has(path)) {
            return Err(unknown("--group", &group.patterns, &trained));
        }
        check_options(group, optimizer)?;
    }
    let decays = optimizer
        .options()
        .iter()
        .any(|(key, _)| *key == "weight_decay");
    if compiling.no_decay && !decays {
        let name = optimizer.name();
        return Err(Failure::Input(format!(
            "--no-decay: the optimizer {name} has no weight decay; --optimizer names one that has"
        )));
    }
    let mut groups = Groups::default();
    for (path, rank) in trained {
        let mut options = BTreeMap::new();
        if compiling.no_decay && rank < 2 {
            options.insert("weight_decay".to_string(), 0.0);
        }
        let matching = compiling
            .group
            .iter()
            .filter(|group| group.patterns.has(&path));
        options.extend(matching.flat_map(|group| group.options.iter().cloned()));
        if options.is_empty() {
            continue;
        }
        let options: Vec<(String, f64)> = options.into_iter().collect();
        let known = groups.options.iter().position(|known| *known == options);
        let number = known.unwrap_or_else(|| {
            groups.options.push(options);
            groups.options.len() - 1
        });
        groups.of.insert(path, number + 1);
    }
    for (number, options) in groups.options.iter_mut().enumerate() {
        if options.contains(&(BITS.to_string(), 32.0)) {
            groups.whole.insert(number + 1);
        }
        options.retain(|(key, _)| key != BITS);
    }
    Ok(groups)
}

/// Path and number of dimensions of each parameter that is trained.
fn trained(graph: &Graph, compiling: &Compiling) -> Vec<(String, usize)> {
    let of = |state: &StateData| {
        let rank = graph.values[state.before].ty.shape().len();
        (state.path.clone(), rank)
    };
    if compiling.forward.differentiate {
        let states = graph.states.values();
        return states
            .filter(|state| state.kind == StateKind::Param)
            .map(of)
            .collect();
    }
    graph
        .gradients
        .iter()
        .map(|&(state, _)| of(&graph.states[state]))
        .collect()
}

fn unknown(option: &str, paths: &Paths, trained: &[(String, usize)]) -> Failure {
    let names = trained.iter().map(|(path, _)| path.as_str());
    let near = passes::explain::nearest(&paths.text, names.clone());
    let shown = match near.is_empty() {
        false => near.join(", "),
        true => names.take(3).collect::<Vec<_>>().join(", "),
    };
    Failure::Input(format!(
        "{option} {}: no trained parameter matches; there are {shown}, ..",
        paths.text
    ))
}

fn check_options(group: &Group, optimizer: Optimizer) -> Result<(), Failure> {
    let mut has: Vec<&str> = optimizer.options().iter().map(|(key, _)| *key).collect();
    if optimizer == Optimizer::AdamW8bit {
        has.push(BITS);
    }
    let bits = group.options.iter().find(|(key, _)| key == BITS);
    if let Some((_, bits)) =
        bits.filter(|(_, bits)| has.contains(&BITS) && ![8.0, 32.0].contains(bits))
    {
        let paths = &group.patterns.text;
        return Err(Failure::Input(format!(
            "--group {paths}: moments have 8 or 32 bits, not {bits}"
        )));
    }
    let Some((key, _)) = group.options.iter().find(|(key, _)| !has.contains(&&**key)) else {
        return Ok(());
    };
    let (paths, name) = (&group.patterns.text, optimizer.name());
    Err(Failure::Input(match has.is_empty() {
        true => format!("--group {paths}: options are an optimizer's; --optimizer names one"),
        false => format!(
            "--group {paths}: {name} has no option {key}; it has {}",
            has.join(", ")
        ),
    }))
}
