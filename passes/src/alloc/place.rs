//! Places the blocks of a trace. To be replaced by the planner: one first fit, largest blocks first.

use super::trace::Trace;
use super::tree::Tree;
use std::fmt;

/// How long to look for a better plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Effort {
    /// One pass.
    Fast,
    /// About a second for some hundred blocks.
    #[default]
    Normal,
    /// As long as it pays.
    Max,
}

/// What a planner is asked for.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long to look.
    pub effort: Effort,
    /// Bytes of the pool; a plan that fits is good enough.
    pub capacity: Option<u64>,
    /// Every address and size is a multiple of this.
    pub align: u64,
    /// Threads that may search.
    pub threads: usize,
}

/// Addresses.
#[derive(Clone, Debug)]
pub struct Placement {
    /// One for each block of the trace.
    pub offsets: Vec<u64>,
    /// The highest address in use, bytes.
    pub peak: u64,
    /// No plan has a lower peak than this, bytes.
    pub lower_bound: u64,
    /// The peak is proved to be the lowest.
    pub optimal: bool,
    /// What found it.
    pub method: String,
}

/// Why there is no plan.
#[derive(Clone, Debug)]
pub struct Error(String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

/// Places all blocks. `progress` hears of each better plan: what found it, and its peak.
pub fn place(trace: &Trace, options: &Options, progress: &mut dyn FnMut(&str, u64)) -> Result<Placement, Error> {
    let mut times: Vec<u64> = trace.blocks.iter().flat_map(|block| [block.start, block.end]).collect();
    times.sort_unstable();
    times.dedup();
    let tick = |time: u64| times.partition_point(|&t| t < time) as u32;
    let mut tree = Tree::new(times.len().max(1) as u32);
    let mut offsets = vec![0; trace.blocks.len()];
    let mut order: Vec<usize> = (0..trace.blocks.len()).collect();
    let bytes = |block: usize| trace.blocks[block].bytes.next_multiple_of(options.align);
    order.sort_by_key(|&i| (std::cmp::Reverse((trace.blocks[i].offset.is_some(), bytes(i))), i));
    let mut peak = 0;
    for i in order {
        let block = &trace.blocks[i];
        let (start, end) = (tick(block.start), tick(block.end));
        let place = match block.offset {
            Some(offset) => offset,
            None => {
                let alignment = block.alignment.max(options.align);
                // Room to move up to the next multiple.
                let room = bytes(i) + alignment - options.align.max(1);
                tree.lowest(start, end, room).next_multiple_of(alignment)
            }
        };
        tree.insert(start, end, place, place + bytes(i));
        offsets[i] = place;
        peak = peak.max(place + bytes(i));
    }
    progress("first fit", peak);
    let lower_bound = lower_bound(trace, options.align);
    Ok(Placement { offsets, peak, lower_bound, optimal: peak == lower_bound, method: "first fit".into() })
}

/// The most bytes that are alive at a time, each block rounded up to a multiple of `align`.
pub fn lower_bound(trace: &Trace, align: u64) -> u64 {
    let mut change: Vec<(u64, i128)> = vec![];
    for block in &trace.blocks {
        let bytes = i128::from(block.bytes.next_multiple_of(align));
        change.extend([(block.start, bytes), (block.end, -bytes)]);
        change.extend(block.gaps.iter().flat_map(|gap| [(gap.0, -bytes), (gap.1, bytes)]));
    }
    change.sort_unstable();
    let mut live = 0;
    let peak = change.into_iter().map(|(_, bytes)| {
        live += bytes;
        live
    });
    peak.max().unwrap_or(0) as u64
}
