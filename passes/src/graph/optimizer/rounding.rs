//! Random numbers for the rounding of parameters.

use super::AttachError;
use super::updates::Nodes;
use crate::graph::generator::Generator;
use ir::graph;
use ir::op::Op;
use ir::op::attrs::Stream;
use ir::{Graph, Value};

/// The path of the generator's state if the step has none.
const RNG: &str = "optimizer.rng";

/// A source of random numbers.
pub(super) struct Random(Generator);

impl Random {
    /// The generator of the graph, which is added if there is none.
    pub(super) fn of(graph: &mut Graph) -> Result<Random, AttachError> {
        Ok(Random(Generator::of(graph, RNG)?))
    }

    /// A value in f32 that is rounded to bf16.
    pub(super) fn rounded(
        &mut self,
        nodes: &mut Nodes<'_>,
        value: Value,
        name: &str,
    ) -> Result<Value, graph::Error> {
        let op = Op::RoundRandom(Stream {
            stream: self.0.stream(),
        });
        nodes.add(op, &[value, self.0.rng], name)
    }
}
