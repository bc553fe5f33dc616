//! The planners' form of a trace: blocks over *sections* of time, independent of the trace's unit
//! of time.
//!
//! The set of live blocks changes with every start and end. But only the moments just before an end
//! matter: at any other time a subset of the same blocks is alive. So a section begins with the
//! first start after an end (sections are the maximal cliques of the interval graph; two blocks
//! overlap in time exactly if they share a section). Traces of training steps have a third to a
//! half as many sections as events.

use super::trace::{Block, Trace};
use super::tree::Tree;
use std::fmt;

/// Why a trace has no plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    /// The block in question: its position in the trace.
    pub block: usize,
    /// What is wrong with it, and what would help.
    pub message: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.message)
    }
}

impl std::error::Error for Error {}

/// A block to place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    /// Sections from the first to one past the last.
    pub(super) start: u32,
    pub(super) end: u32,
    /// How long it lives in the trace's units.
    pub(super) ticks: u64,
    /// The range of its spans in [`Problem::spans`], if it has gaps. Otherwise it is empty, and
    /// `start..end` is the only span.
    pub(super) spans: (u32, u32),
    /// Position in the trace.
    pub(super) block: u32,
    pub(super) bytes: u64,
    /// At least 1; a power of two.
    pub(super) align: u64,
    /// The fixed offset, or [`FREE`].
    pub(super) fixed: u64,
}

/// The lowest multiple of a power of two at or above `at`. `next_multiple_of` would divide, and
/// this runs in inner loops.
pub(super) fn aligned(at: u64, align: u64) -> u64 {
    (at + (align - 1)) & !(align - 1)
}

/// No fixed offset.
pub(super) const FREE: u64 = u64::MAX;

impl Item {
    /// The number of sections in which it lives, including gaps.
    pub(super) fn sections(&self) -> u64 {
        u64::from(self.end - self.start)
    }
}

/// Blocks to place, in the order in which they start.
pub(super) struct Problem {
    pub(super) items: Vec<Item>,
    /// Spans of items with gaps.
    pub(super) spans: Vec<(u32, u32)>,
    /// Bytes alive in each section.
    pub(super) live: Vec<u64>,
}

/// A block's bytes, rounded up to a multiple of `align`. `sum` is the sum of the bytes that the
/// blocks so far may take; this block's bytes are added. An error says why no address fits the
/// block.
fn rounded_bytes(block: &Block, align: u64, sum: &mut u64) -> Result<u64, String> {
    if block.end <= block.start {
        return Err(format!(
            "it lives from {} to {}, which is no time",
            block.start, block.end
        ));
    }
    let own = block.alignment.max(align);
    if !own.is_power_of_two() || !align.is_power_of_two() {
        return Err(format!(
            "alignments of {own} and {align} bytes; both have to be powers of two"
        ));
    }
    // All other blocks may lie below a block, each with the bytes that its alignment loses, and
    // blocks with fixed places.
    let rounded = block.bytes.checked_next_multiple_of(align);
    let room = rounded.and_then(|bytes| {
        let aligned = bytes.checked_add(own)?;
        aligned.checked_add(block.offset.unwrap_or(0))
    });
    let total = room.and_then(|room| room.checked_add(*sum));
    let (Some(bytes), Some(total)) = (rounded, total) else {
        return Err(format!(
            "with its {} bytes, addresses are more than 64 bits can count",
            block.bytes
        ));
    };
    *sum = total;
    match block.offset {
        Some(offset) if offset % own != 0 => Err(format!(
            "its offset {offset} is no multiple of its alignment, {own}"
        )),
        _ => Ok(bytes),
    }
}

/// Adds the times between a block's gaps. An error says which gap is wrong.
fn add_spans(block: &Block, item: u32, spans: &mut Vec<Span>) -> Result<(), String> {
    let mut add = |from: u64, to: u64| {
        if from < to {
            spans.push(Span {
                from,
                to,
                start: 0,
                end: 0,
                item,
            });
        }
    };
    let mut from = block.start;
    for &(lo, hi) in &block.gaps {
        if lo < from || hi <= lo || block.end < hi {
            return Err(format!(
                "its gap {lo}..{hi} is not in its life, or not after the one before"
            ));
        }
        add(from, lo);
        from = hi;
    }
    add(from, block.end);
    Ok(())
}

impl Problem {
    /// The blocks of a trace that have bytes; sizes are rounded up to multiples of `align`.
    pub(super) fn new(trace: &Trace, align: u64) -> Result<Problem, Error> {
        let align = align.max(1);
        let mut items: Vec<Item> = Vec::with_capacity(trace.blocks.len());
        let mut spans: Vec<Span> = Vec::with_capacity(trace.blocks.len());
        let mut sum = 0u64;
        for (i, block) in trace.blocks.iter().enumerate() {
            let refused = |message: String| Error {
                block: i,
                message: format!("block {}: {message}", block.id),
            };
            let bytes = rounded_bytes(block, align, &mut sum).map_err(refused)?;
            if bytes == 0 {
                continue;
            }
            let first = spans.len() as u32;
            add_spans(block, items.len() as u32, &mut spans).map_err(refused)?;
            if (first as usize) < spans.len() {
                items.push(Item {
                    start: 0,
                    end: 0,
                    ticks: block.end - block.start,
                    spans: (first, spans.len() as u32),
                    block: i as u32,
                    bytes,
                    align: block.alignment.max(align),
                    fixed: block.offset.unwrap_or(FREE),
                });
            }
        }
        let mut problem = Problem::over_sections(items, spans);
        problem.items.sort_by_key(|item| (item.start, item.block));
        Ok(problem)
    }

    /// The problem of those items that `takes` takes, over its own sections, and the position here
    /// of each.
    pub(super) fn part(&self, takes: impl Fn(&Item) -> bool) -> (Problem, Vec<u32>) {
        let taken = self.items.iter().enumerate();
        let taken = taken.filter(|(_, item)| takes(item));
        let (mut items, mut spans) = (vec![], vec![]);
        let mut positions = vec![];
        for (i, item) in taken {
            let first = spans.len() as u32;
            spans.extend(self.spans(item).iter().map(|(from, to)| Span {
                from: from.into(),
                to: to.into(),
                start: 0,
                end: 0,
                item: items.len() as u32,
            }));
            items.push(Item {
                spans: (first, spans.len() as u32),
                ..*item
            });
            positions.push(i as u32);
        }
        (Problem::over_sections(items, spans), positions)
    }

    /// The problem of items whose `spans` is the range of their times in `spans`.
    fn over_sections(mut items: Vec<Item>, mut spans: Vec<Span>) -> Problem {
        let live = sections(&items, &mut spans);
        let mut kept = vec![];
        for item in &mut items {
            let own = &spans[item.spans.0 as usize..item.spans.1 as usize];
            (item.start, item.end) = (own[0].start, own[own.len() - 1].end);
            let first = kept.len() as u32;
            if own.len() > 1 {
                kept.extend(own.iter().map(|span| (span.start, span.end)));
            }
            item.spans = (first, kept.len() as u32);
        }
        Problem {
            items,
            spans: kept,
            live,
        }
    }

    /// The number of sections.
    pub(super) fn sections(&self) -> u32 {
        self.live.len() as u32
    }

    /// The sections of an item.
    pub(super) fn spans<'a>(&'a self, item: &'a Item) -> Spans<'a> {
        match &self.spans[item.spans.0 as usize..item.spans.1 as usize] {
            [] => Spans::One((item.start, item.end)),
            spans => Spans::Several(spans),
        }
    }

    /// Whether two items need their bytes at the same time.
    pub(super) fn meet(&self, a: &Item, b: &Item) -> bool {
        a.start < b.end
            && b.start < a.end
            && (a.spans.0 == a.spans.1 && b.spans.0 == b.spans.1
                || self
                    .spans(a)
                    .iter()
                    .any(|x| self.spans(b).iter().any(|y| x.0 < y.1 && y.0 < x.1)))
    }

    /// Refuses a trace in which two blocks with fixed places overlap.
    pub(super) fn fixed_apart(&self, trace: &Trace) -> Result<(), Error> {
        let mut tree = Tree::new(self.sections().max(1));
        let fixed = || self.items.iter().filter(|item| item.fixed != FREE);
        for item in fixed() {
            for span in self.spans(item).iter() {
                if tree.lowest(span, item.bytes, 1, item.fixed) != item.fixed {
                    let meets = |other: &&Item| {
                        other.block != item.block
                            && self.meet(item, other)
                            && other.fixed < item.fixed + item.bytes
                            && item.fixed < other.fixed + other.bytes
                    };
                    let other = fixed()
                        .find(meets)
                        .expect("what is in the way should be a block");
                    let name = |item: &Item| &trace.blocks[item.block as usize].id;
                    return Err(Error {
                        block: item.block as usize,
                        message: format!(
                            "block {}: its {} bytes at {} meet those of block {} at {}; both \
                             offsets are fixed",
                            name(item),
                            item.bytes,
                            item.fixed,
                            name(other),
                            other.fixed
                        ),
                    });
                }
            }
            for (start, end) in self.spans(item).iter() {
                tree.insert(start, end, item.fixed, item.fixed + item.bytes);
            }
        }
        Ok(())
    }

    /// Removes the items that live from the first section to the last, unless one has a fixed
    /// address, and stacks them. They conflict with every item, so this loses nothing. Items whose
    /// size is not a multiple of all alignments stay, because items on top of them would not be
    /// aligned. Returns their offsets and the start of the rest.
    pub(super) fn stack_whole(&mut self) -> (Vec<(u32, u64)>, u64) {
        if self.items.iter().any(|item| item.fixed != FREE) {
            return (vec![], 0);
        }
        let sections = self.sections();
        let align = self.items.iter().map(|item| item.align).max().unwrap_or(1);
        let whole =
            |item: &Item| item.start == 0 && item.end == sections && item.spans.0 == item.spans.1;
        let stacked = self
            .items
            .extract_if(.., |item| whole(item) && item.bytes.is_multiple_of(align));
        let mut base = 0u64;
        let places = stacked.map(|item| {
            let at = base;
            base += item.bytes;
            (item.block, at)
        });
        let places = places.collect();
        self.live.iter_mut().for_each(|live| *live -= base);
        (places, base)
    }

    /// No plan has a lower peak: the most bytes alive in a section, or the end of a block with a
    /// fixed place.
    pub(super) fn bound(&self) -> u64 {
        let fixed = self
            .items
            .iter()
            .filter(|item| item.fixed != FREE)
            .map(|item| item.fixed + item.bytes);
        fixed.chain(self.live.iter().copied()).max().unwrap_or(0)
    }
}

/// The sections in which an item needs its bytes.
pub(super) enum Spans<'a> {
    One((u32, u32)),
    Several(&'a [(u32, u32)]),
}

impl Spans<'_> {
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, u32)> {
        match self {
            Spans::One(span) => std::slice::from_ref(span).iter().copied(),
            Spans::Several(spans) => spans.iter().copied(),
        }
    }
}

/// A time in which an item needs its bytes, in ticks and in sections.
struct Span {
    from: u64,
    to: u64,
    start: u32,
    end: u32,
    item: u32,
}

/// Finds the sections of spans, and the bytes alive in each.
fn sections(items: &[Item], spans: &mut [Span]) -> Vec<u64> {
    // At the same tick, blocks end before other blocks start.
    let mut events: Vec<(u64, bool, u32)> = Vec::with_capacity(2 * spans.len());
    for (i, span) in spans.iter().enumerate() {
        events.push((span.from, true, i as u32));
        events.push((span.to, false, i as u32));
    }
    events.sort_unstable();
    let (mut live, mut bytes, mut open) = (vec![], 0, false);
    for (_, comes, i) in events {
        let span = &mut spans[i as usize];
        let size = items[span.item as usize].bytes;
        if comes {
            if !open {
                live.push(0);
                open = true;
            }
            bytes += size;
            span.start = live.len() as u32 - 1;
        } else {
            if open {
                *live.last_mut().expect("a section should be open") = bytes;
                open = false;
            }
            bytes -= size;
            span.end = live.len() as u32;
        }
    }
    live
}
