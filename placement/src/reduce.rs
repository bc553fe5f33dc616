//! Reduces blocks in the bytes of others, and streams, to plain blocks over time.
//!
//! **Blocks in the bytes of others** ([`Block::within`]) are merged with them. The merged block
//! lives while any of them lives, and has the size of the first, which is the largest.
//!
//! **Streams.** Another stream may use bytes that a stream has freed only after it has waited for
//! that stream. Without a wait, two blocks of different streams always conflict. With waits, a
//! block lives longer for other streams than for its own, which a single life cannot express. So
//! two conservative plans are made and the lower one is taken. In one, each stream has its own
//! region, which loses nothing if no stream waits. In the other, every block lives until all other
//! streams have waited for its stream.

use super::place::{self, Error, Options, Placement};
use super::problem::Problem;
use super::trace::{Block, Trace};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// With more streams than this, each has its own region and waits are ignored, because the table of
/// waits is quadratic.
const MOST_STREAMS: usize = 64;

/// Plans a trace without streams, for a capacity.
pub type Plan<'a> = dyn FnMut(&Trace, Option<u64>) -> Result<Placement, Error> + 'a;

/// Finds an address for every block. `progress` receives the method being tried and the lowest peak
/// so far.
///
/// # Errors
/// A block's life, gaps, size, alignment or fixed offset is invalid, its constraints contradict
/// each other, or blocks with fixed offsets overlap.
pub fn place(
    trace: &Trace,
    options: &Options,
    progress: &mut dyn FnMut(&str, u64),
) -> Result<Placement, Error> {
    reduced(
        trace,
        options.align,
        options.capacity,
        &mut |trace, capacity| {
            place::place(
                trace,
                &Options {
                    capacity,
                    ..*options
                },
                progress,
            )
        },
    )
}

/// No plan has a lower peak: the most bytes alive at once, or, if no stream waits for another, the
/// sum of this over the streams. 0 for a trace that [`place`] refuses.
pub fn lower_bound(trace: &Trace, align: u64) -> u64 {
    let Ok(merged) = Merged::new(trace) else {
        return 0;
    };
    bound(&merged.trace, align)
}

fn bound(trace: &Trace, align: u64) -> u64 {
    let streams = by_stream(trace);
    if streams.len() < 2 || !trace.waits.is_empty() {
        return place::lower_bound(trace, align);
    }
    streams
        .values()
        .map(|which| place::lower_bound(&part(trace, which), align))
        .fold(0, u64::saturating_add)
}

/// Plans a trace with a planner that supports only times.
pub fn reduced(
    trace: &Trace,
    align: u64,
    capacity: Option<u64>,
    plan: &mut Plan<'_>,
) -> Result<Placement, Error> {
    let merged = Merged::new(trace)?;
    let placement = over_streams(&merged.trace, align, capacity, plan);
    let mut placement = placement.map_err(|error| Error {
        block: merged.first[error.block],
        ..error
    })?;
    placement.offsets = merged.of.iter().map(|&i| placement.offsets[i]).collect();
    Ok(placement)
}

/// A trace without blocks in the bytes of others.
struct Merged<'a> {
    trace: Cow<'a, Trace>,
    /// For each block of the given trace, the merged block with its bytes.
    of: Vec<usize>,
    /// For each merged block, one block of the given trace.
    first: Vec<usize>,
}

impl Merged<'_> {
    fn new(trace: &Trace) -> Result<Merged<'_>, Error> {
        let roots = roots(&trace.blocks)?;
        let first: Vec<usize> = (0..roots.len()).filter(|&i| roots[i] == i).collect();
        if first.len() == roots.len() {
            return Ok(Merged {
                trace: Cow::Borrowed(trace),
                of: roots,
                first,
            });
        }
        let place: BTreeMap<usize, usize> = first.iter().copied().zip(0..).collect();
        let mut members = vec![vec![]; first.len()];
        for (block, root) in trace.blocks.iter().zip(&roots) {
            members[place[root]].push(block);
        }
        let blocks = first
            .iter()
            .zip(members)
            .map(|(&i, members)| union(&trace.blocks[i], &members))
            .collect();
        let of = roots.iter().map(|root| place[root]).collect();
        let whole = Trace {
            blocks,
            waits: trace.waits.clone(),
            ..Trace::default()
        };
        Ok(Merged {
            trace: Cow::Owned(whole),
            of,
            first,
        })
    }
}

/// For each block, the block that owns its bytes, through any chain of blocks; itself if it owns
/// them.
///
/// # Errors
/// A block is in its own bytes, or in the bytes of a missing, smaller or already freed block, or of
/// another stream's block; a dynamic block is involved, which gets its address at run time; fixed
/// addresses differ.
pub fn roots(blocks: &[Block]) -> Result<Vec<usize>, Error> {
    let mut roots: Vec<Option<usize>> = blocks
        .iter()
        .enumerate()
        .map(|(i, b)| b.within.is_none().then_some(i))
        .collect();
    for i in 0..blocks.len() {
        let block = &blocks[i];
        let Some(other) = block.within else { continue };
        let error = |message: String| {
            Err(Error {
                block: i,
                message: format!("block {}: {message}", block.id),
            })
        };
        let Some(there) = blocks.get(other) else {
            return error("it is in a block that is not there".into());
        };
        let id = &there.id;
        if there.bytes < block.bytes {
            return error(format!(
                "its {} bytes are more than those of {id}, {}, in which it is",
                block.bytes, there.bytes
            ));
        }
        if block.start < there.start || there.end < block.start {
            let (begin, from, to) = (block.start, there.start, there.end);
            return error(format!(
                "it begins at {begin} in the bytes of {id}, which lives from {from} to {to}"
            ));
        }
        if block.origin.stream != there.origin.stream {
            return error(format!(
                "it is in the bytes of {id}, which belongs to another stream"
            ));
        }
        if block.origin.dynamic || there.origin.dynamic {
            return error(format!(
                "it is in the bytes of {id}, and the place of a dynamic block is not planned"
            ));
        }
        // Invariant: blocks on the path have no root yet.
        let mut path = vec![];
        let mut at = i;
        let root = loop {
            if let Some(root) = roots[at] {
                break root;
            }
            path.push(at);
            at = blocks[at].within.unwrap_or(at);
            if blocks.len() < path.len() {
                return error(format!("it is in the bytes of {id}, which is in its own"));
            }
            if blocks.len() <= at {
                return error("it is in a block that is not there".into());
            }
        };
        path.into_iter().for_each(|at| roots[at] = Some(root));
    }
    let roots: Vec<usize> = roots
        .into_iter()
        .enumerate()
        .map(|(i, root)| root.unwrap_or(i))
        .collect();
    let mut given: BTreeMap<usize, usize> = BTreeMap::new();
    for (i, block) in blocks
        .iter()
        .enumerate()
        .filter(|(_, block)| block.offset.is_some())
    {
        let other = &blocks[*given.entry(roots[i]).or_insert(i)];
        if other.offset != block.offset {
            let message = format!(
                "block {}: its address is given, and that of {} another, whose bytes it shares",
                block.id, other.id
            );
            return Err(Error { block: i, message });
        }
    }
    Ok(roots)
}

/// One block for all blocks that share the bytes of the first.
fn union(first: &Block, members: &[&Block]) -> Block {
    let mut needed: Vec<(u64, u64)> = members.iter().flat_map(|block| spans(block)).collect();
    needed.sort_unstable();
    Block {
        alignment: members
            .iter()
            .map(|block| block.alignment)
            .max()
            .unwrap_or(0),
        offset: members.iter().find_map(|block| block.offset),
        ..during(first, &needed)
    }
}

/// The times when a block needs its bytes: its life without its gaps.
fn spans(block: &Block) -> impl Iterator<Item = (u64, u64)> {
    let starts = std::iter::once(block.start).chain(block.gaps.iter().map(|gap| gap.1));
    let ends = block.gaps.iter().map(|gap| gap.0).chain([block.end]);
    starts.zip(ends).filter(|(start, end)| start < end)
}

/// The block, with these times as the times when it needs its bytes. They are in order of their
/// starts.
fn during(block: &Block, needed: &[(u64, u64)]) -> Block {
    let (mut gaps, mut end) = (vec![], 0);
    for (i, &(from, to)) in needed.iter().enumerate() {
        if 0 < i && end < from {
            gaps.push((end, from));
        }
        end = end.max(to);
    }
    match needed.first() {
        Some(&(start, _)) => Block {
            start,
            end,
            gaps,
            within: None,
            ..block.clone()
        },
        None => Block {
            within: None,
            ..block.clone()
        },
    }
}

/// Blocks of more than zero bytes, by stream.
fn by_stream(trace: &Trace) -> BTreeMap<u32, Vec<usize>> {
    let mut streams: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (i, block) in trace.blocks.iter().enumerate() {
        streams.entry(block.origin.stream).or_default().push(i);
    }
    streams
}

/// Some blocks of a trace, without the parts that planners do not read.
fn part(trace: &Trace, which: &[usize]) -> Trace {
    let blocks = which.iter().map(|&i| trace.blocks[i].clone()).collect();
    Trace {
        blocks,
        ..Trace::default()
    }
}

fn over_streams(
    trace: &Trace,
    align: u64,
    capacity: Option<u64>,
    plan: &mut Plan<'_>,
) -> Result<Placement, Error> {
    let streams = by_stream(trace);
    if streams.len() < 2 {
        return plan(trace, capacity);
    }
    // The whole trace is valid, so a part of it is too.
    Problem::new(trace, align)?;
    let fixed = trace.blocks.iter().any(|block| block.offset.is_some());
    let bound = bound(trace, align);
    let mut best = match fixed {
        // Regions cannot have fixed addresses.
        true => None,
        false => Some(apart(trace, &streams, align, capacity, plan)?),
    };
    let enough = capacity.map_or(bound, |capacity| capacity.max(bound));
    let good = best.as_ref().is_some_and(|best| best.peak <= enough);
    if fixed || !good && !trace.waits.is_empty() && streams.len() <= MOST_STREAMS {
        let together = plan(&until_waited(trace), capacity)?;
        if best.as_ref().is_none_or(|best| together.peak < best.peak) {
            best = Some(Placement {
                method: format!("{}, streams together", together.method),
                ..together
            });
        }
    }
    let best = best.expect("one of both should have been tried");
    // A planner's proof is only about the lives that it got.
    let lower_bound = if trace.waits.is_empty() && !fixed {
        best.lower_bound
    } else {
        bound
    };
    Ok(Placement {
        lower_bound,
        optimal: best.peak == lower_bound,
        ..best
    })
}

/// Plans a region for each stream.
fn apart(
    trace: &Trace,
    streams: &BTreeMap<u32, Vec<usize>>,
    align: u64,
    capacity: Option<u64>,
    plan: &mut Plan<'_>,
) -> Result<Placement, Error> {
    let mut parts: Vec<(u64, &Vec<usize>, Trace)> = streams
        .values()
        .map(|which| {
            let own = which
                .iter()
                .map(|&i| trace.blocks[i].alignment)
                .max()
                .unwrap_or(0);
            (own.max(align).max(1), which, part(trace, which))
        })
        .collect();
    // In descending order of alignment, so that no bytes are lost between regions.
    parts.sort_by_key(|(own, ..)| Reverse(*own));
    let bounds: Vec<u64> = parts
        .iter()
        .map(|(_, _, part)| place::lower_bound(part, align))
        .collect();
    let mut offsets = vec![0; trace.blocks.len()];
    let (mut base, mut lower_bound, mut methods) = (0u64, 0, BTreeSet::new());
    for (k, (own, which, part)) in parts.iter().enumerate() {
        base = base.next_multiple_of(*own);
        let above: u64 = bounds[k + 1..].iter().sum();
        let capacity = capacity.map(|capacity| capacity.saturating_sub(base).saturating_sub(above));
        let placement = plan(part, capacity).map_err(|error| Error {
            block: which[error.block],
            ..error
        })?;
        which
            .iter()
            .zip(&placement.offsets)
            .for_each(|(&i, at)| offsets[i] = base + at);
        base += placement.peak;
        lower_bound += placement.lower_bound;
        methods.insert(placement.method);
    }
    let methods: Vec<String> = methods.into_iter().collect();
    let method = format!("{}, {} streams apart", methods.join(" and "), parts.len());
    Ok(Placement {
        offsets,
        peak: base,
        lower_bound,
        optimal: base == lower_bound,
        method,
    })
}

/// The trace as a single stream, in which every block lives until all other allocating streams have
/// waited for its own stream. Without such a wait it lives to the end.
pub fn until_waited(trace: &Trace) -> Trace {
    let asking: BTreeSet<u32> = trace
        .blocks
        .iter()
        .map(|block| block.origin.stream)
        .collect();
    let named = trace.waits.iter().flat_map(|wait| [wait.stream, wait.on]);
    let number: BTreeMap<u32, usize> = asking
        .iter()
        .copied()
        .chain(named)
        .collect::<BTreeSet<u32>>()
        .into_iter()
        .zip(0..)
        .collect();
    let over = trace
        .blocks
        .iter()
        .map(|block| block.end)
        .max()
        .unwrap_or(0);
    let mut ends: Vec<(u64, usize)> = vec![];
    for (i, block) in trace.blocks.iter().enumerate() {
        ends.extend(spans(block).map(|(_, to)| (to, i)));
    }
    ends.sort_unstable();
    let mut waits: Vec<_> = trace.waits.iter().collect();
    waits.sort_by_key(|wait| wait.tick);
    // From the last tick to the first: when each stream has waited for all work that was submitted
    // to another by now.
    let never = u64::MAX;
    let mut knows = vec![vec![never; number.len()]; number.len()];
    let mut until: BTreeMap<(u64, u32), u64> = BTreeMap::new();
    for &(to, i) in ends.iter().rev() {
        while let Some(wait) = waits.pop_if(|wait| to < wait.tick) {
            let (stream, on) = (number[&wait.stream], number[&wait.on]);
            if stream == on {
                continue;
            }
            let news = knows[stream].clone();
            knows[on]
                .iter_mut()
                .zip(news)
                .for_each(|(known, new)| *known = new.min(*known));
            knows[on][stream] = wait.tick;
        }
        let own = trace.blocks[i].origin.stream;
        let known = asking
            .iter()
            .filter(|&&other| other != own)
            .map(|other| knows[number[&own]][number[other]])
            .max();
        // A request at the tick of the wait itself may come before it.
        until.insert(
            (to, own),
            known.unwrap_or(0).saturating_add(1).min(over).max(to),
        );
    }
    let blocks = trace.blocks.iter().map(|block| {
        let own = block.origin.stream;
        let needed: Vec<(u64, u64)> = spans(block)
            .map(|(from, to)| (from, until[&(to, own)]))
            .collect();
        during(block, &needed)
    });
    Trace {
        blocks: blocks.collect(),
        ..Trace::default()
    }
    .one_stream()
}
