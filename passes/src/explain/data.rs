//! The data of explanations.

use super::Class;
use crate::pipeline::Compiled;
use crate::plan::Reason;
use ir::schedule::Loc;
use ir::{Instr, Program, TensorType, text};

/// Everything that is known of one value.
#[derive(Clone, PartialEq, Debug)]
pub struct Explanation {
    /// Its name.
    pub name: String,
    /// Its type.
    pub ty: TensorType,
    /// What it is.
    pub class: Class,
    /// The module it was traced in, or its path as a state.
    pub module: String,
    /// How it comes to be: its node as text, `an input of the step`, ….
    pub defined: String,
    /// The value asked for, then those whose bytes it shares, down to the one that is explained.
    pub shares: Vec<String>,
    /// The lines that touch it, in order.
    pub events: Vec<Event>,
    /// When and where it lies, in each pool.
    pub stays: Vec<Stay>,
    /// True if it is on the device at the line where most bytes are.
    pub at_peak: bool,
    /// The line where most bytes are, as text.
    pub peak_line: String,
    /// What was decided for it as a state; absent for other values.
    pub home: Option<Choice>,
    /// Where it is updated, if it is a state that lives on the host or on a disk.
    pub hosted: Option<Hosted>,
    /// The memory behind the device's link: `host`, or `disk`.
    pub beyond: String,
    /// What was decided for each gap between two accesses that are not neighbours.
    pub gaps: Vec<GapChoice>,
    /// Time of the step as planned, µs.
    pub micros: f64,
    /// The budget, bytes.
    pub budget: Option<u64>,
    /// The planner that decided, and the search that found the plan.
    pub planner: String,
}

/// A line that touches the value.
#[derive(Clone, PartialEq, Debug)]
pub struct Event {
    /// The line.
    pub instr: Instr,
    /// Its text.
    pub text: String,
    /// When it starts, µs.
    pub start: f64,
    /// When it ends, µs.
    pub end: f64,
}

impl Event {
    pub(super) fn new(compiled: &Compiled, instr: Instr) -> Event {
        let Program {
            graph, schedule, ..
        } = &compiled.program;
        Event {
            instr,
            text: text::print_instr(graph, schedule, instr),
            start: compiled.timeline.start[instr],
            end: compiled.timeline.end[instr],
        }
    }
}

/// A time at an address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stay {
    /// The buffer.
    pub buffer: String,
    /// Its pool.
    pub pool: String,
    /// Its offset, bytes.
    pub address: u64,
    /// The first line that touches it there; none: it is there when the step starts.
    pub from: Option<Instr>,
    /// The last; none: it is there when the step ends.
    pub to: Option<Instr>,
}

impl Stay {
    /// A time at a place of a buffer.
    pub(super) fn new(program: &Program, loc: Loc, from: Option<Instr>, to: Option<Instr>) -> Stay {
        let schedule = &program.schedule;
        let data = &schedule.buffers[loc.buffer];
        Stay {
            buffer: data.name.clone(),
            pool: schedule.pools[data.pool].name.clone(),
            address: program.plan.as_ref().map_or(0, |plan| plan.address(loc)),
            from,
            to,
        }
    }
}

ir::named! {
    /// What is done with a value while no line reads it.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Way {
        /// It stays on the device.
        Keep = "keep",
        /// It waits on the host.
        Swap = "swap",
        /// It is computed again.
        Recompute = "recompute",
    }
}

impl Way {
    pub(super) fn done(self) -> &'static str {
        match self {
            Way::Keep => "kept",
            Way::Swap => "swapped",
            Way::Recompute => "recomputed",
        }
    }
}

/// A decision and the ways that were not taken.
#[derive(Clone, PartialEq, Debug)]
pub struct Choice {
    /// What was chosen.
    pub way: Way,
    /// The planner's figures; absent for what is kept.
    pub reason: Option<Reason>,
    /// The other ways, and what the step would come to; an error says why it cannot be, or that it
    /// was not looked at.
    pub others: Vec<(Way, Result<Outcome, String>)>,
}

/// What happens to a state that lives on the host or on a disk.
#[derive(Clone, PartialEq, Debug)]
pub struct Hosted {
    /// The pool of its home: `host`, or `disk`.
    pub pool: String,
    /// True if lines of the device read it.
    pub comes: bool,
    /// True if the host updates it.
    pub updated_there: bool,
    /// The chunk that it comes in, if it comes with others.
    pub chunk: Option<Together>,
}

/// The chunk that a state comes in.
#[derive(Clone, PartialEq, Debug)]
pub struct Together {
    /// The name of the chunk.
    pub name: String,
    /// How many states it has.
    pub states: usize,
    /// Bytes of one copy.
    pub bytes: u64,
    /// Time of one copy, µs.
    pub micros: f64,
}

/// The decision for a gap.
#[derive(Clone, PartialEq, Debug)]
pub struct GapChoice {
    /// The number of the access before it.
    pub gap: u32,
    /// The line before it; none: the start of the step.
    pub from: Option<Instr>,
    /// The line after it.
    pub to: Option<Instr>,
    /// How long it is, µs.
    pub micros: f64,
    /// What was decided.
    pub choice: Choice,
}

/// What a whole step comes to.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Outcome {
    /// Its time, µs.
    pub micros: f64,
    /// Peak of the device, bytes.
    pub peak: u64,
    /// True if that is within the budget.
    pub fits: bool,
}
