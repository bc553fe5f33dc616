//! Weight offloading (paper: O. Beaumont et al., "Weight Offloading Strategies for Training Large
//! DNN Models", 2022) as a planner for whole graphs. The model's blocks are the layers of the
//! chain. Activations stay, and the device runs all updates. [`papers::offload`] computes how many
//! bytes of each block's weights leave in which gap. Whole parameters are chosen until these bytes
//! are reached.
//!
//! A parameter that is away between forward and backward is also away between steps, because the
//! home of a state is either the device or the host.

use super::record::{Draft, propose};
use crate::plan::blocks::Block;
use crate::plan::tuning::{FEWEST_LAYERS, WEIGHTS_LADDER};
use crate::plan::{Decisions, Gap, Means, Problem};
use ir::{Node, Phase, State, Value};
use papers::offload::{Algorithm, Instance, Layer, solve};

/// Drafts for a ladder of memory sizes.
pub fn drafts(problem: &Problem<'_>) -> Vec<Draft> {
    let layers: Vec<Layer> = problem
        .blocks
        .iter()
        .map(|block| layer(problem, block))
        .collect();
    // Without weights nothing can leave, and every memory size has a solution, even 0 bytes.
    if layers.len() < FEWEST_LAYERS || layers.iter().all(|layer| layer.weight_bytes == 0) {
        return vec![];
    }
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
        if away.iter().any(|&[outside, within]| outside + within > 0) {
            propose(problem, &offloaded(problem, &away), &mut drafts);
        }
    }
}

/// A block as a layer of the chain.
fn layer(problem: &Problem<'_>, block: &Block) -> Layer {
    let graph = problem.graph;
    let micros = |nodes: &[Node]| -> f64 {
        let nodes = nodes.iter();
        nodes.map(|&node| problem.cost.run(graph, node)).sum()
    };
    // Forward results that a later phase reads.
    let is_kept = |value: &Value| {
        let last = problem.uses[*value].last();
        last.is_some_and(|&at| graph.nodes[problem.lines[at as usize]].phase != Phase::Forward)
    };
    let made = block
        .forward
        .iter()
        .flat_map(|&node| graph.nodes[node].outputs.iter().copied());
    Layer {
        weight_bytes: block.states.iter().map(|&s| bytes(problem, s)).sum(),
        activation_bytes: made
            .filter(is_kept)
            .map(|value| graph.values[value].ty.bytes())
            .sum(),
        forward_micros: micros(&block.forward),
        backward_micros: micros(&block.backward),
    }
}

/// Decisions that keep at least `away` bytes of each block's weights off the device: between steps,
/// and between forward and backward.
fn offloaded(problem: &Problem<'_>, away: &[[u64; 2]]) -> Decisions {
    let mut decisions = Decisions::default();
    for (block, &[outside, within]) in problem.blocks.iter().zip(away) {
        let (mut out, mut inside) = (0, 0);
        for &state in &block.states {
            if out >= outside.max(within) {
                break;
            }
            out += bytes(problem, state);
            let reason = problem.hosted_reason(state);
            decisions.hosted.insert(state, reason);
            if inside < within {
                inside += bytes(problem, state);
                let value = problem.graph.states[state].before;
                if let Some(gap) = problem.between_phases(value) {
                    let gap = Gap { value, gap };
                    decisions.cuts.insert(gap, (Means::Swap, reason));
                }
            }
        }
    }
    decisions
}

fn bytes(problem: &Problem<'_>, state: State) -> u64 {
    let value = problem.graph.states[state].before;
    problem.graph.values[value].ty.bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Roofline;
    use crate::devices;
    use ir::text::parse_graph;

    /// Four blocks and no backward. `given`: what the blocks' weights are.
    fn forward(given: impl Fn(usize) -> String) -> String {
        let weights: Vec<String> = (0..4).map(given).collect();
        format!(
            "graph g {{
                input %x : f32[64,64]
                {}
                fwd h.0 %a = matmul %x, %w0 ta=false tb=false : f32[64,64]
                fwd h.1 %b = matmul %a, %w1 ta=false tb=false : f32[64,64]
                fwd h.2 %c = matmul %b, %w2 ta=false tb=false : f32[64,64]
                fwd h.3 %d = matmul %c, %w3 ta=false tb=false : f32[64,64]
                output d = %d
            }}",
            weights.join("\n")
        )
    }

    fn n_drafts(text: &str) -> usize {
        let device = devices::named("test").unwrap();
        let graph = parse_graph(text).unwrap();
        let cost = Roofline::new(&device);
        let problem = Problem::new(&graph, &device, &cost);
        assert_eq!(problem.blocks.len(), 4);
        drafts(&problem).len()
    }

    #[test]
    fn only_blocks_with_states_have_drafts() {
        let inputs = forward(|i| format!("input %w{i} : f32[64,64]"));
        assert_eq!(n_drafts(&inputs), 0);
        let states = forward(|i| format!("state param %w{i} -> %w{i} : f32[64,64] \"w{i}\""));
        assert!(n_drafts(&states) > 0);
    }
}
