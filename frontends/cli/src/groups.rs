//! Which parameters are trained, and with which options: patterns of their paths.

use crate::args::Compiling;
use crate::failure::Failure;
use glob::Pattern;
use ir::graph::StateData;
use ir::{Graph, StateKind};
use passes::graph::optimizer::Optimizer;
use std::collections::BTreeMap;

/// `PATTERN[|PATTERN..]:OPTION=VALUE,..` of `--group`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Group {
    patterns: Paths,
    options: Vec<(String, f64)>,
}

impl Group {
    /// Parses the value of the flag.
    pub(crate) fn parse(text: &str) -> Result<Group, String> {
        let bad = || format!("{text:?}: write PATTERN:OPTION=VALUE, as in *.bias:weight-decay=0");
        let (patterns, options) = text.rsplit_once(':').ok_or_else(bad)?;
        let option = |option: &str| -> Result<(String, f64), String> {
            let (name, value) = option.split_once('=').ok_or_else(bad)?;
            let value: f64 = value.trim().parse().map_err(|_| bad())?;
            if !value.is_finite() || value < 0.0 {
                return Err(format!("{text:?}: {value} is not a number from 0"));
            }
            Ok((name.trim().replace('-', "_"), value))
        };
        Ok(Group {
            patterns: Paths::parse(patterns)?,
            options: options.split(',').map(option).collect::<Result<_, _>>()?,
        })
    }
}

/// `PATTERN[|PATTERN..]`: `*` is any text, `?` any letter, `[ab]` one of these.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Paths {
    text: String,
    patterns: Vec<Pattern>,
}

impl Paths {
    /// Parses the value of a flag.
    pub(crate) fn parse(text: &str) -> Result<Paths, String> {
        let pattern = |text: &str| Pattern::new(text).map_err(|e| format!("{text:?}: {e}"));
        Ok(Paths {
            text: text.to_string(),
            patterns: text.split('|').map(pattern).collect::<Result<_, _>>()?,
        })
    }

    fn has(&self, path: &str) -> bool {
        self.patterns.iter().any(|pattern| pattern.matches(path))
    }
}

/// The groups of a graph's parameters.
#[derive(Default)]
pub(crate) struct Groups {
    /// The group of a parameter, by its path, if it is not 0.
    pub(crate) of: BTreeMap<String, usize>,
    /// The options of groups from 1 on that differ from those of group 0.
    pub(crate) options: Vec<Vec<(String, f64)>>,
}

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
            "--no-decay: the optimizer {name} has no weight decay"
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
    let has: Vec<&str> = optimizer.options().iter().map(|(key, _)| *key).collect();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_patterns_and_options() {
        let group = Group::parse("*.bias|h.?.ln:weight-decay=0,lr=1e-4").unwrap();
        assert_eq!(
            group.options,
            [("weight_decay".to_string(), 0.0), ("lr".to_string(), 1e-4)]
        );
        assert!(group.patterns.has("h.1.fc.bias") && group.patterns.has("h.1.ln"));
        assert!(!group.patterns.has("h.1.fc.weight"));
        for bad in ["*.bias", "*:lr", "*:lr=x", "*:lr=-1", "[:lr=1", "*:lr=inf"] {
            assert!(Group::parse(bad).is_err(), "{bad}");
        }
    }
}
