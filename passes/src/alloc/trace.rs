//! What an address planner plans: blocks of memory over time, whoever asked for them. A schedule's
//! buffers are one source, traces of other programs are others.

/// A block of memory. Times are ticks: the block lives in `start..end`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Block {
    /// Its name or number in the trace.
    pub id: String,
    /// First tick.
    pub start: u64,
    /// One past the last tick; more than `start`.
    pub end: u64,
    /// Size.
    pub bytes: u64,
    /// Its address is to be a multiple of this, a power of two; 0 and 1 ask for nothing.
    pub alignment: u64,
    /// Where it has to be, if that is given.
    pub offset: Option<u64>,
    /// The position of a block in whose bytes it is made: it lies where that one lies. That one
    /// lives until this one begins, or longer, and is no smaller.
    pub within: Option<usize>,
    /// Times within `start..end`, ascending and apart, in which nobody needs its bytes: others may
    /// lie there.
    pub gaps: Vec<(u64, u64)>,
    /// What is known of who asked for it.
    pub origin: Origin,
}

/// Who asked for a block, and who let it go. Numbers are positions in the lists of [`Trace`]; 0 is
/// unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Origin {
    /// The computation phases (forward or backward of one micro-batch) in which it came and went.
    pub phases: (u32, u32),
    /// The modules that ran when it came and went.
    pub modules: (u32, u32),
    /// The stream that asked for it.
    pub stream: u32,
    /// True if its size is known only when it is asked for, as in an expert of a mixture.
    pub dynamic: bool,
}

/// A stream waits for all that another has been asked to do. What that one freed before this tick,
/// the waiting one may have after it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Wait {
    /// When.
    pub tick: u64,
    /// Who waits.
    pub stream: u32,
    /// For whom.
    pub on: u32,
}

/// Blocks of one pool.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Trace {
    /// The blocks, as they stand in the file.
    pub blocks: Vec<Block>,
    /// Names of phases in the order in which they begin, with their times; the first is unknown.
    pub phases: Vec<Span>,
    /// The same of modules. A module that runs several times stands here as often.
    pub modules: Vec<Span>,
    /// Waits of streams for each other, in order of time.
    pub waits: Vec<Wait>,
}

impl Trace {
    /// The trace as if one stream had asked for everything.
    pub fn one_stream(&self) -> Trace {
        let mut trace = self.clone();
        trace
            .blocks
            .iter_mut()
            .for_each(|block| block.origin.stream = 0);
        trace.waits.clear();
        trace
    }
}

/// A part of the step's time.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Span {
    /// `fwd.3`, `layers.7.mlp`.
    pub name: String,
    /// First tick.
    pub start: u64,
    /// One past the last.
    pub end: u64,
}
