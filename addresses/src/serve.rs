//! Converts a recorded trace into a prologue and a step that repeats, and writes its plan file for
//! the allocator.
//!
//! Before: a trace of one pool. After [`step`]: time is counted in requests, block `i` is request
//! `i`, and a block of the step that lives on into the next step has a gap in which it does not
//! exist. Such a trace is placed like any other. [`write()`] makes the file that
//! `runtime/allocator` serves (its module `plan` has the format). [`plan`] does all of this.

use crate::dynamic::{Group, groups, statics};
use placement::trace::{Block, Span, Trace};
use placement::until_waited;
use std::fmt::Write;

/// Requests of a program that repeats a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// Block `i` is the `i`th request; times are numbers of requests.
    pub trace: Trace,
    /// The first request of the step. The requests before it occur once.
    pub first: usize,
}

/// The plan file of a recorded trace. `place` gives offsets, multiples of `align`, for the blocks
/// that are not dynamic. If streams wait for each other, `place` is called a second time, with all
/// streams as one and with blocks that live until other streams have waited for them. The smaller
/// pool is taken.
///
/// # Errors
/// The errors of `place`.
pub fn plan<E>(
    trace: &Trace,
    align: u64,
    place: impl Fn(&Trace) -> Result<Vec<u64>, E>,
) -> Result<String, E> {
    let placed = |step: Step, one_stream: bool| {
        let (mut fixed, which) = statics(&step.trace);
        if one_stream {
            fixed = fixed.one_stream();
        }
        let mut offsets = vec![0; step.trace.blocks.len()];
        which
            .into_iter()
            .zip(place(&fixed)?)
            .for_each(|(i, offset)| offsets[i] = offset);
        let ends = fixed_blocks(&step, &offsets).map(|(block, offset)| offset + block.bytes);
        Ok((ends.max().unwrap_or(0), write(&step, &offsets, align)))
    };
    let (pool, text) = placed(step(trace), false)?;
    if trace.waits.is_empty() {
        return Ok(text);
    }
    let mut waited = trace.clone();
    for (block, until) in waited.blocks.iter_mut().zip(until_waited(trace).blocks) {
        (block.start, block.end, block.gaps) = (until.start, until.end, until.gaps);
    }
    let (other, waited) = placed(step(&waited), true)?;
    Ok(if other < pool { waited } else { text })
}

/// The blocks that have a place in the plan, with their offsets.
fn fixed_blocks<'a>(step: &'a Step, offsets: &'a [u64]) -> impl Iterator<Item = (&'a Block, u64)> {
    step.trace
        .blocks
        .iter()
        .zip(offsets.iter().copied())
        .filter(|(block, _)| !block.origin.dynamic)
}

/// Finds the step that the end of a trace repeats, by bytes, streams and lengths of lives. If there
/// is none, or if its repetitions cover less than half of the trace, the whole trace is one step,
/// and blocks alive at its end are freed there.
///
/// The step's requests are those of its first repetition. Their lives come from the second-last
/// repetition, because the recording contains everything after it. Blocks of zero bytes are left
/// out, because they are never served.
pub fn step(trace: &Trace) -> Step {
    let mut order: Vec<usize> = (0..trace.blocks.len())
        .filter(|&i| 0 < trace.blocks[i].bytes)
        .collect();
    order.sort_by_key(|&i| trace.blocks[i].start);
    let starts: Vec<u64> = order.iter().map(|&i| trace.blocks[i].start).collect();
    let requests_before = |tick: u64| starts.partition_point(|start| *start < tick);
    let over = trace
        .blocks
        .iter()
        .map(|block| block.end)
        .max()
        .unwrap_or(0);
    let n = order.len();
    // The size of a dynamic request is not compared.
    let key = |i: usize| {
        let block = &trace.blocks[order[i]];
        (
            if block.origin.dynamic { 0 } else { block.bytes },
            block.origin.stream,
            block.origin.dynamic,
        )
    };
    let gone = |i: usize| {
        let end = trace.blocks[order[i]].end;
        (end < over).then(|| requests_before(end))
    };
    // Forward and backward may make the same requests but free them differently. Blocks of the last
    // repetition may live beyond the trace.
    let alike = |i: usize, period: usize| match (gone(i), gone(i + period)) {
        (Some(first), Some(second)) => first + period == second,
        (Some(first), None) => n <= first + period,
        (None, second) => second.is_none(),
    };
    let n_unlike = |period: usize| {
        (n - 2 * period..n - period)
            .filter(|&i| !alike(i, period))
            .count()
    };
    let periods = periods(&(0..n).rev().map(key).collect::<Vec<_>>());
    let with = |most: fn(usize) -> usize| {
        periods
            .iter()
            .copied()
            .find(|&(period, _)| n_unlike(period) <= most(period))
    };
    // A few blocks may differ, because the program's garbage collector may free them at any time.
    let found = with(|_| 0).or_else(|| with(|period| period / 16));
    let (period, first) = found.map_or((n, 0), |(period, repeats)| {
        // Requests before the first step may by chance equal requests at the end of a step, but
        // their lives differ.
        let early = n - repeats..(n - repeats + period).min(n - 2 * period);
        let unlike = early.clone().rev().find(|&i| !alike(i, period));
        (period, unlike.map_or(early.start, |i| i + 1))
    });
    // The second-last repetition, or the only one.
    let window = first + n.saturating_sub(first + 2 * period) / period.max(1) * period;
    let end = first + period;
    // Requests between the first repetition and the window are not part of the plan.
    let number = |i: usize| {
        if i <= first {
            i
        } else {
            first + i.saturating_sub(window).min(period)
        }
    };
    let block = |i: usize, number: usize| {
        let (mut from, mut to, mut gaps) = (number, end, vec![]);
        match gone(i) {
            // A block of the prologue may be freed in the first step. If it lives longer, it is
            // never freed.
            Some(gone) if i < first => to = gone.min(end),
            Some(gone) if gone <= i - number + end => to = gone - (i - number),
            // A next repetition is not known.
            None if found.is_none() => {}
            gone => {
                let next = gone.map_or(number, |gone| (gone - (i - number) - period).min(number));
                if first <= i {
                    from = first;
                    gaps = if next < number {
                        vec![(next as u64, number as u64)]
                    } else {
                        vec![]
                    };
                }
            }
        }
        Block {
            start: from as u64,
            end: to as u64,
            gaps,
            within: None,
            ..trace.blocks[order[i]].clone()
        }
    };
    let requests = (0..first).chain(window..window + period).zip(0..);
    let blocks = requests.map(|(i, number)| block(i, number)).collect();
    let span = |span: &Span| {
        let at = |tick| number(requests_before(tick)) as u64;
        Span {
            name: span.name.clone(),
            start: at(span.start),
            end: at(span.end),
        }
    };
    let (phases, modules) = (
        trace.phases.iter().map(span).collect(),
        trace.modules.iter().map(span).collect(),
    );
    Step {
        trace: Trace {
            blocks,
            phases,
            modules,
            waits: vec![],
        },
        first,
    }
}

/// The periods of the beginning of a list, shortest first, and the length over which each repeats.
/// A period repeats at least twice and over at least half of the list. Periods that repeat over
/// clearly less than the best one are dropped.
fn periods<T: PartialEq>(list: &[T]) -> Vec<(usize, usize)> {
    // The length of the match between the list and its rest at each position: the Z function
    // (Gusfield, 1.4).
    let n = list.len();
    let mut again = vec![0; n];
    let (mut lo, mut hi) = (0, 0);
    for i in 1..n {
        let mut length = if i < hi { again[i - lo].min(hi - i) } else { 0 };
        while i + length < n && list[length] == list[i + length] {
            length += 1;
        }
        again[i] = length;
        if hi < i + length {
            (lo, hi) = (i, i + length);
        }
    }
    let repeats =
        |period: usize| Some((period, again[period] + period)).filter(|_| period <= again[period]);
    let longest = (1..n)
        .filter_map(repeats)
        .map(|(_, length)| length)
        .max()
        .unwrap_or(0);
    // A period may match a little longer than another by chance, because of the requests before the
    // first step.
    let enough = (longest - longest / 16).max(n.div_ceil(2));
    (1..n)
        .filter_map(repeats)
        .filter(|(_, length)| enough <= *length)
        .collect()
}

/// The plan file. `offsets` has a number for each block of the step's trace. The numbers of dynamic
/// blocks are ignored; `align` divides all others.
pub fn write(step: &Step, offsets: &[u64], align: u64) -> String {
    let Step { trace, first } = step;
    let (n, groups) = (trace.blocks.len(), groups(trace, offsets));
    let pool = fixed_blocks(step, offsets)
        .map(|(block, offset)| offset + block.bytes)
        .max()
        .unwrap_or(0);
    let mut out = format!(
        "lighterage-plan 1\npool {pool} {}\nrequests {n} {first}\n",
        align.max(1)
    );
    let mut group_of = vec![0; n];
    for (g, Group { blocks, space, .. }) in groups.iter().enumerate() {
        blocks.iter().for_each(|&i| group_of[i] = g);
        let ranges: Vec<String> = space.iter().map(|(lo, hi)| format!(" {lo}:{hi}")).collect();
        // Writing to a String cannot fail.
        let _ = writeln!(out, "space{}", ranges.concat());
    }
    let (mut phase, mut module) = (0, 0);
    for (i, (block, offset)) in trace.blocks.iter().zip(offsets).enumerate() {
        let origin = block.origin;
        for (word, now, last, spans) in [
            ("phase", origin.phases.0, &mut phase, &trace.phases),
            ("module", origin.modules.0, &mut module, &trace.modules),
        ] {
            if now != *last {
                let name = spans
                    .get(now as usize)
                    .map_or("", |span| span.name.as_str());
                let _ = writeln!(out, "{word} {name}");
                *last = now;
            }
        }
        let _ = if origin.dynamic {
            writeln!(out, "d {} {}", group_of[i], origin.stream)
        } else {
            let end = match gone(step, i) {
                Some(end) => end.to_string(),
                None => "-".into(),
            };
            writeln!(out, "s {} {} {offset} {end}", block.bytes, origin.stream)
        };
    }
    out.push_str("end\n");
    out
}

/// The request before which a block is freed, counted through the next step; `None` if it is never
/// freed.
fn gone(step: &Step, i: usize) -> Option<usize> {
    let (block, n) = (&step.trace.blocks[i], step.trace.blocks.len());
    let period = n - step.first;
    match block.gaps.first() {
        Some(gap) => Some(gap.0 as usize + period),
        None if i < step.first => Some(block.end as usize).filter(|end| *end < n),
        // It lives until it is requested again in the next step.
        None if (block.start as usize) < i => Some(i + period),
        None => Some(block.end as usize),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use placement::trace::Origin;

    fn block(start: u64, end: u64, bytes: u64) -> Block {
        Block {
            start,
            end,
            bytes,
            ..Block::default()
        }
    }

    /// A weight, a warm-up, then three steps; block 30 of each step lives into the next.
    #[test]
    fn a_step_is_found_and_closed() {
        let mut blocks = vec![block(0, 100, 1000), block(1, 4, 77), block(2, 3, 10)];
        for k in 0..3u64 {
            let at = 10 + 10 * k;
            blocks.extend([
                block(at, at + 3, 10),
                block(at + 2, at + 5, 20),
                block(at + 6, at + 11, 30),
            ]);
        }
        // Not freed before the end of the trace.
        blocks[11].end = 100;
        let Step { trace, first } = step(&Trace {
            blocks,
            ..Trace::default()
        });
        let times: Vec<_> = trace
            .blocks
            .iter()
            .map(|block| (block.bytes, block.start, block.end))
            .collect();
        let expected = [
            (1000, 0, 6),
            (77, 1, 3),
            (10, 2, 3),
            (10, 3, 5),
            (20, 4, 5),
            (30, 3, 6),
        ];
        assert_eq!((first, &times[..]), (3, &expected[..]));
        let gaps: Vec<_> = trace
            .blocks
            .iter()
            .flat_map(|block| &block.gaps)
            .copied()
            .collect();
        assert_eq!(gaps, [(4, 5)]);
        let text = write(
            &Step { trace, first },
            &[0, 1024, 2048, 1024, 2048, 3072],
            512,
        );
        let lines = "pool 3102 512\nrequests 6 3\ns 1000 0 0 -\ns 77 0 1024 3\ns 10 0 2048 3\ns \
            10 0 1024 5\ns 20 0 2048 5\ns 30 0 3072 7";
        assert_eq!(text, format!("lighterage-plan 1\n{lines}\nend\n"));
    }

    /// A short repetition is not the step if a longer one covers more. Dynamic sizes do not matter.
    #[test]
    fn the_longest_end_has_the_period() {
        let mut blocks = vec![];
        for k in 0..4u64 {
            for (i, bytes) in [5, 9, 7, 7, 7].into_iter().enumerate() {
                let start = 10 * k + 2 * i as u64;
                let origin = Origin {
                    dynamic: i == 1,
                    ..Origin::default()
                };
                let bytes = if i == 1 { bytes + k } else { bytes };
                blocks.push(Block {
                    origin,
                    ..block(start, start + 1, bytes)
                });
            }
        }
        let step = step(&Trace {
            blocks,
            ..Trace::default()
        });
        assert_eq!((step.first, step.trace.blocks.len()), (0, 5));
    }

    /// Forward and backward make the same requests but free them differently: the step is both.
    #[test]
    fn lives_belong_to_the_period() {
        let mut blocks = vec![];
        for at in [0, 10, 20] {
            blocks.extend([
                block(at, at + 9, 5),
                block(at + 1, at + 8, 6),
                block(at + 4, at + 5, 5),
                block(at + 6, at + 7, 6),
            ]);
        }
        let step = step(&Trace {
            blocks,
            ..Trace::default()
        });
        assert_eq!((step.first, step.trace.blocks.len()), (0, 4));
    }

    /// A weight with the size of the last block of a step is not part of the step. A trace may end
    /// within a step.
    #[test]
    fn a_prologue_may_look_like_a_step() {
        let mut blocks = vec![block(0, 100, 9), block(1, 100, 4)];
        for at in [10, 20, 30, 40] {
            blocks.extend([
                block(at, at + 3, 8),
                block(at + 1, at + 2, 9),
                block(at + 4, at + 5, 4),
            ]);
        }
        blocks.pop();
        let Step { trace, first } = step(&Trace {
            blocks,
            ..Trace::default()
        });
        let times: Vec<_> = trace
            .blocks
            .iter()
            .map(|block| (block.bytes, block.start, block.end))
            .collect();
        assert_eq!(
            (first, times),
            (
                2,
                vec![(9, 0, 5), (4, 1, 5), (8, 2, 4), (9, 3, 4), (4, 4, 5)]
            )
        );
    }

    /// A repetition at the end is not the step if most of the trace is different.
    #[test]
    fn a_short_end_is_no_step() {
        let blocks = (0..40)
            .map(|i| block(2 * i, 2 * i + 1, if i < 30 { 100 + i } else { 7 }))
            .collect();
        assert_eq!(
            step(&Trace {
                blocks,
                ..Trace::default()
            })
            .trace
            .blocks
            .len(),
            40
        );
    }

    /// Without a period the whole trace is the step.
    #[test]
    fn what_does_not_repeat_is_one_step() {
        let trace = Trace {
            blocks: vec![block(0, 2, 5), block(1, 9, 6), block(3, 9, 7)],
            ..Trace::default()
        };
        let step = step(&trace);
        assert_eq!((step.first, step.trace.blocks.len()), (0, 3));
        assert_eq!(step.trace.blocks[0].end, 2);
        assert!(write(&step, &[0, 512, 1024], 512).contains("\ns 5 0 0 2\ns 6 0 512 3\n"));
    }
}
