//! Weight offloading (paper: O. Beaumont et al., "Weight Offloading Strategies for Training Large
//! DNN Models", 2022) as a planner of whole graphs: the model's blocks are the chain's layers,
//! activations stay, and every update is the device's. [`papers::offload`] says how much of
//! each block's weights leaves in which gap; whole parameters are taken until it is reached.
//!
//! A parameter that is to be away between forward and backward alone is away between steps too: a
//! state either lives on the device, all the time, or on the host.

use super::record::{Draft, propose};
use crate::plan::tuning::{FEWEST_LAYERS, WEIGHTS_LADDER};
use crate::plan::{Decisions, Gap, Means, Problem};
use ir::{Node, Phase};
use papers::offload::{Algorithm, Instance, Layer, solve};

/// Drafts for a ladder of memories.
pub fn drafts(problem: &Problem<'_>) -> Vec<Draft> {
    let graph = problem.graph;
    let blocks = &problem.blocks;
    if blocks.len() < FEWEST_LAYERS {
        return vec![];
    }
    let bytes = |state: usize| graph.values[graph.states[state].before].ty.bytes();
    let micros = |nodes: &[Node]| -> f64 {
        nodes
            .iter()
            .map(|&node| problem.cost.run(graph, node))
            .sum()
    };
    // What a block's forward leaves to be read in backward.
    let kept = |nodes: &[Node]| -> u64 {
        let values = nodes.iter().flat_map(|&node| &graph.nodes[node].outputs);
        let wanted = values.filter(|&&value| {
            let last = problem.uses[value]
                .last()
                .map(|&at| graph.nodes[problem.lines[at as usize]].phase);
            last.is_some_and(|phase| phase != Phase::Forward)
        });
        wanted.map(|&value| graph.values[value].ty.bytes()).sum()
    };
    let layers: Vec<Layer> = blocks
        .iter()
        .map(|block| Layer {
            weight_bytes: block.states.iter().map(|&state| bytes(state)).sum(),
            activation_bytes: kept(&block.forward),
            forward_micros: micros(&block.forward),
            backward_micros: micros(&block.backward),
        })
        .collect();
    let latency = problem.cost.link(0);
    let large = 1u64 << 30;
    let bytes_per_micro = large as f64 / (problem.cost.link(large) - latency);
    let all: u64 = layers
        .iter()
        .map(|l| 2 * l.weight_bytes + l.activation_bytes)
        .sum();
    let mut memory_bytes = all;
    let mut drafts = vec![];
    loop {
        memory_bytes = (memory_bytes as f64 * WEIGHTS_LADDER) as u64;
        let instance = Instance {
            layers: layers.clone(),
            bytes_per_micro,
            memory_bytes,
        };
        let Ok(solution) = solve(&instance, Algorithm::GreedyPlus) else {
            return drafts;
        };
        let away = solution.away_bytes();
        if away.iter().all(|&[outside, within]| outside + within == 0) {
            continue;
        }
        let mut decisions = Decisions::default();
        for (block, [outside, within]) in blocks.iter().zip(away) {
            let (mut out, mut inside) = (0, 0);
            for &state in &block.states {
                let value = graph.states[state].before;
                let reason = problem.hosted_reason(state);
                if out < outside.max(within) {
                    out += bytes(state);
                    decisions.hosted.insert(state, reason);
                    if inside < within {
                        inside += bytes(state);
                        if let Some(gap) = problem.between_phases(value) {
                            decisions
                                .cuts
                                .insert(Gap { value, gap }, (Means::Swap, reason));
                        }
                    }
                }
            }
        }
        propose(problem, &decisions, &mut drafts);
    }
}
