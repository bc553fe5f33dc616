//! Why a value is where it is, and what else would cost. Nothing is decided here: the figures come
//! from the decisions' own reasons, from the simulator's timeline, and, for what was not chosen,
//! from building and simulating the whole step with that one decision changed.
//!
//! Before: a compiled program. After: plain data, and its text.

mod alternatives;
mod chunk;
mod data;
mod lines;
mod memory;
mod names;
mod print;
mod tally;
mod value;

pub use chunk::{Chunk, ChunkExplanation, explain_chunk};
pub use data::{Choice, Event, Explanation, GapChoice, Hosted, Outcome, Stay, Together, Way};
pub use lines::{LineBytes, lines};
pub use memory::{Peak, Residence, fullest, peak, residences};
pub use names::{Named, named, nearest};
pub use tally::{Count, Tally, decided, hosted_values, tally};
pub use value::explain;

use ir::graph::Def;
use ir::{Graph, Phase, StateKind, Value};

/// What a tensor is to the step.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Class {
    Param,
    Buffer,
    Const,
    Moment,
    Rng,
    Input,
    Activation,
    Gradient,
    Update,
    Scratch,
}

impl Class {
    /// The word in reports.
    pub fn name(self) -> &'static str {
        match self {
            Class::Param => "param",
            Class::Buffer => "buffer",
            Class::Const => "const",
            Class::Moment => "moment",
            Class::Rng => "rng",
            Class::Input => "input",
            Class::Activation => "activation",
            Class::Gradient => "gradient",
            Class::Update => "update",
            Class::Scratch => "scratch",
        }
    }

    fn of_state(kind: StateKind) -> Class {
        match kind {
            StateKind::Param => Class::Param,
            StateKind::Buffer => Class::Buffer,
            StateKind::Const => Class::Const,
            StateKind::Moment => Class::Moment,
            StateKind::Rng => Class::Rng,
        }
    }
}

/// The class of a value. A state's new value is of the state's class: it takes the old one's place.
pub fn class(graph: &Graph, value: Value) -> Class {
    let root = graph.root(value);
    match graph.values[root].def {
        Def::Input(_) => Class::Input,
        Def::State(state) => Class::of_state(graph.states[state].kind),
        Def::Node(node, _) => match graph
            .states
            .values()
            .find(|state| graph.root(state.after) == root)
        {
            Some(state) => Class::of_state(state.kind),
            None => match graph.nodes[node].phase {
                Phase::Forward => Class::Activation,
                Phase::Backward => Class::Gradient,
                Phase::Optimizer => Class::Update,
            },
        },
    }
}
