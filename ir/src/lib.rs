//! The language of Lighterage: [`Graph`] (what is computed), [`Schedule`] (in which order),
//! [`Plan`] (at which address) and [`Device`] (on what). No passes. The only input and output is
//! text.

pub mod check;
pub mod device;
pub mod finding;
pub mod graph;
mod named;
pub mod op;
mod part;
pub mod plan;
pub mod schedule;
pub mod table;
pub mod text;
pub mod types;
pub mod verify;

pub use device::{Device, Disk, Processor};
pub use finding::{Finding, Place};
pub use graph::{Graph, Node, Phase, State, StateKind, Value};
pub use op::body::Body;
pub use op::{Attr, Op};
pub use plan::Plan;
pub use schedule::{Buffer, Instr, Loc, Part, Pool, Schedule, Stream};
pub use table::{Id, Table};
pub use types::{DType, TensorType};

/// A graph, its schedule and, after `allocate`, its plan. The schedule passes change it.
#[derive(Clone, PartialEq, Debug)]
pub struct Program {
    /// What is computed.
    pub graph: Graph,
    /// In which order.
    pub schedule: Schedule,
    /// At which address; absent before `allocate`.
    pub plan: Option<Plan>,
}
