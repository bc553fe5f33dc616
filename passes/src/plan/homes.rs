//! Where the states of a step live, so that steps on batches of other sizes can share them.
//!
//! Several steps run on one set of states without a copy if each finds every state at the same
//! address. Addresses follow from two facts: which states live on the host, and in which chunks.
//! For in each pool, the states come first, in the order of the graph: see
//! [`states_first`](crate::alloc::states_first). So the first step is planned freely, and all
//! others start from its [`Homes`], which their planners do not change.

use super::decisions::Decisions;
use super::problem::Problem;
use ir::{Graph, Node, State};
use std::collections::{BTreeMap, BTreeSet};

/// Where states live, by path: the graphs of two steps number them differently.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Homes {
    /// States that live on the host.
    hosted: BTreeSet<String>,
    /// Those that come in one copy.
    chunks: Vec<Vec<String>>,
    /// Nodes that the host runs, by name: updates of hosted states.
    on_host: BTreeSet<String>,
}

impl Homes {
    /// The homes of a planned step.
    pub fn of(graph: &Graph, decisions: &Decisions) -> Homes {
        let path = |state: &State| graph.states[*state].path.clone();
        let name = |node: &Node| graph.node_name(*node).to_string();
        Homes {
            hosted: decisions.hosted.keys().map(path).collect(),
            chunks: decisions
                .chunks
                .iter()
                .map(|chunk| chunk.iter().map(path).collect())
                .collect(),
            on_host: decisions.on_host.iter().map(name).collect(),
        }
    }

    /// True if a state lives on the host.
    pub fn has_hosted(&self) -> bool {
        !self.hosted.is_empty()
    }

    /// The decisions that every plan of a step with these homes has.
    pub(crate) fn decisions(&self, problem: &Problem<'_>) -> Decisions {
        let graph = problem.graph;
        let states: BTreeMap<&str, State> = graph
            .states
            .iter()
            .map(|(state, data)| (data.path.as_str(), state))
            .collect();
        let found = |path: &String| states.get(path.as_str()).copied();
        let hosted = self.hosted.iter().filter_map(found);
        let runs = |node: &Node| self.on_host.contains(graph.node_name(*node));
        Decisions {
            hosted: hosted.map(|s| (s, problem.hosted_reason(s))).collect(),
            chunks: self
                .chunks
                .iter()
                .map(|chunk| chunk.iter().filter_map(found).collect())
                .collect(),
            on_host: problem.lines.iter().copied().filter(runs).collect(),
            ..Decisions::default()
        }
    }
}
