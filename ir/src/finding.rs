//! What [`verify`](crate::verify) and [`check`](crate::check) report: a sentence and the line that
//! it is about. The text printer prints each finding under its line.

use crate::graph::{Node, State, Value};
use crate::schedule::{Buffer, Instr, Pool, Stream};
use crate::table::Id;
use std::fmt;

/// An error in a program, and its place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// The line it is about.
    pub place: Place,
    /// A sentence in the user's language: what is wrong, by how much, what would help.
    pub message: String,
}

/// A line of the text form.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Place {
    /// The graph as a whole: its first line.
    Graph,
    /// The line that defines a value.
    Value(Value),
    /// A node's line.
    Node(Node),
    /// The line of a state.
    State(State),
    /// The line of an output, by its position in `outputs`.
    Output(usize),
    /// The line of a gradient, by its position in `gradients`.
    Gradient(usize),
    /// The schedule as a whole: its first line.
    Schedule,
    /// A pool's line.
    Pool(Pool),
    /// A stream's line.
    Stream(Stream),
    /// The line that names a buffer for the first time.
    Buffer(Buffer),
    /// An entry line, by its position in `entry`.
    Entry(usize),
    /// A line of the schedule.
    Instr(Instr),
    /// An exit line, by its position in `exit`.
    Exit(usize),
}

impl Finding {
    /// A finding at a place.
    pub fn new(place: Place, message: impl Into<String>) -> Finding {
        Finding {
            place,
            message: message.into(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            Place::Graph | Place::Schedule => write!(f, "{}", self.message),
            Place::Value(value) => write!(f, "{value:?}: {}", self.message),
            Place::Node(node) => write!(f, "{node:?}: {}", self.message),
            Place::State(state) => write!(f, "state {}: {}", state.index(), self.message),
            Place::Output(i) => write!(f, "output {i}: {}", self.message),
            Place::Gradient(i) => write!(f, "gradient {i}: {}", self.message),
            Place::Pool(pool) => write!(f, "{pool:?}: {}", self.message),
            Place::Stream(stream) => write!(f, "{stream:?}: {}", self.message),
            Place::Buffer(buffer) => write!(f, "{buffer:?}: {}", self.message),
            Place::Entry(i) => write!(f, "entry {i}: {}", self.message),
            Place::Instr(instr) => write!(f, "{instr:?}: {}", self.message),
            Place::Exit(i) => write!(f, "exit {i}: {}", self.message),
        }
    }
}
