//! Random numbers for the rounding of parameters.
//!
//! They come from the generator that the step has for dropout, at numbers of streams that no other
//! op of the graph has. So a step draws the same bits at every budget. A step without a generator
//! gets one.

use super::AttachError;
use super::updates::Nodes;
use ir::graph;
use ir::op::Op;
use ir::op::attrs::{Attr, Stream};
use ir::{DType, Graph, StateKind, TensorType, Value};

/// The path of the generator's state if the step has none.
const RNG: &str = "optimizer.rng";

/// A source of random numbers.
pub(super) struct Random {
    /// The state of the generator, at the start of the step.
    rng: Value,
    /// The next stream.
    stream: i64,
}

impl Random {
    /// The generator of the graph, which is added if there is none.
    pub(super) fn of(graph: &mut Graph) -> Result<Random, AttachError> {
        let known = graph
            .states
            .values()
            .find(|state| state.kind == StateKind::Rng);
        let rng = match known {
            Some(state) => state.before,
            None => {
                let state = graph.states.next_id();
                let ty = TensorType::new(DType::I64, [2])?;
                let rng = graph.add_state(RNG, RNG, StateKind::Rng, ty);
                let mut nodes = Nodes { graph, module: "" };
                let next = nodes.add(Op::RngNext, &[rng], "optimizer.rng.next")?;
                graph.states[state].after = next;
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
        Ok(Random { rng, stream })
    }

    /// A value in f32 that is rounded to bf16.
    pub(super) fn rounded(
        &mut self,
        nodes: &mut Nodes<'_>,
        value: Value,
        name: &str,
    ) -> Result<Value, graph::Error> {
        let stream = self.stream;
        self.stream += 1;
        nodes.add(Op::RoundRandom(Stream { stream }), &[value, self.rng], name)
    }
}
