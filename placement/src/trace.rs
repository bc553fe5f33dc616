//! The input of an address planner: blocks of memory over time. A schedule's buffers are one
//! source, traces of other programs are others.

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
    /// The address must be a multiple of this power of two; 0 and 1 mean any address.
    pub alignment: u64,
    /// Its fixed address, if it has one.
    pub offset: Option<u64>,
    /// The position of the block in whose bytes this one is made. The two have the same address.
    /// That block lives at least until this one begins, and is at least as large.
    pub within: Option<usize>,
    /// Times within `start..end`, ascending and disjoint, at which its bytes are not needed and
    /// other blocks may use them.
    pub gaps: Vec<(u64, u64)>,
    /// What is known about its request.
    pub origin: Origin,
}

/// Where a block was allocated and freed. Numbers are positions in the lists of [`Trace`]; 0 means
/// unknown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Origin {
    /// The computation phases (forward or backward of one micro-batch) in which it was allocated
    /// and freed.
    pub phases: (u32, u32),
    /// The modules that ran when it was allocated and freed.
    pub modules: (u32, u32),
    /// The stream that requested it.
    pub stream: u32,
    /// True if its size is known only at run time, as in an expert of a mixture.
    pub dynamic: bool,
}

/// A stream waits for all work that was submitted to another. Bytes that the other stream freed
/// before this tick are available to the waiting stream after it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Wait {
    /// When.
    pub tick: u64,
    /// The stream that waits.
    pub stream: u32,
    /// The stream that is waited for.
    pub on: u32,
}

/// Blocks of one pool.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Trace {
    /// The blocks, in the order of the file.
    pub blocks: Vec<Block>,
    /// Names of phases in the order in which they begin, with their times; the first is unknown.
    pub phases: Vec<Span>,
    /// The same for modules. A module that runs several times has an entry for each run.
    pub modules: Vec<Span>,
    /// Waits of streams for each other, in order of time.
    pub waits: Vec<Wait>,
}

impl Trace {
    /// The trace as if one stream had made all requests.
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
