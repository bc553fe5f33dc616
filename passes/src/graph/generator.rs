//! The generator of a step's random numbers, for passes that add ops which draw some.

use ir::graph;
use ir::op::attrs::Attr;
use ir::{DType, Graph, Op, Phase, StateKind, TensorType, Value};

/// A source of random numbers. Each op has a stream of its own, so that a step draws the same bits
/// at every budget.
pub(super) struct Generator {
    /// Its state at the start of the step.
    pub(super) rng: Value,
    /// The next stream.
    stream: i64,
}

impl Generator {
    /// The generator of a graph. If it has none, one is added, whose state has this path.
    pub(super) fn of(graph: &mut Graph, path: &str) -> Result<Generator, graph::Error> {
        let mut states = graph.states.values();
        let known = states.find(|state| state.kind == StateKind::Rng);
        let rng = match known {
            Some(state) => state.before,
            None => {
                let state = graph.states.next_id();
                let ty = TensorType::new(DType::I64, [2]).expect("two integers should be a type");
                let rng = graph.add_state(path, path, StateKind::Rng, ty);
                let names = [format!("{path}.next")];
                let next = graph.add_node(Op::RngNext, &[rng], &names, Phase::Optimizer, "")?;
                graph.states[state].after = next[0];
                rng
            }
        };
        let nodes = graph.order.iter().map(|&node| &graph.nodes[node].op);
        let random = nodes.filter(|op| op.facts().is_random);
        let streams = random.filter_map(|op| match op.attrs().get("stream") {
            Some(Attr::Int(stream)) => Some(*stream),
            _ => None,
        });
        let stream = streams.max().map_or(0, |last| last + 1);
        Ok(Generator { rng, stream })
    }

    /// A stream that no other op has.
    pub(super) fn stream(&mut self) -> i64 {
        self.stream += 1;
        self.stream - 1
    }
}
