//! Statistics of a trace: sizes, classes by life, the most bytes alive.
//!
//! The classes are the ones of STAlloc (paper section 2.3). *Persistent* blocks exist before the
//! first phase and after the last one, like weights. *Scoped* blocks are allocated in one phase and
//! freed in another, like activations. *Transient* blocks live within one phase. If phases are
//! unknown, blocks are persistent if they start before any block ends and end after the last one
//! starts. The others are split by length of life, at the threshold that separates the logarithms
//! best (Otsu's threshold).

use placement::trace::{Block, Trace};
use std::collections::BTreeMap;

ir::named! {
    /// The class of a block.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    pub enum Class {
        /// It lives all the time.
        Persistent = "persistent",
        /// It lives from one phase to another.
        Scoped = "scoped",
        /// It lives within a phase.
        Transient = "transient",
    }
}

/// Blocks of a class.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Share {
    /// The number of blocks.
    pub blocks: usize,
    /// The sum of their bytes, even if they are not alive at the same time.
    pub bytes: u64,
    /// Their bytes at the moment at which the most bytes of all classes are alive.
    pub peak_bytes: u64,
}

/// The statistics of a trace.
#[derive(Clone, PartialEq, Debug)]
pub struct Stats {
    /// Blocks.
    pub blocks: usize,
    /// Blocks of more than 512 bytes.
    pub above_512: usize,
    /// The number of different sizes of these blocks.
    pub sizes_above_512: usize,
    /// The most frequent sizes and how many blocks have them; the most frequent first.
    pub frequent: Vec<(u64, usize)>,
    /// Blocks whose size is known only at run time.
    pub dynamic: Share,
    /// The most requested bytes alive at once.
    pub live_peak_bytes: u64,
    /// The first tick with this maximum.
    pub peak_tick: u64,
    /// Persistent, scoped and transient blocks.
    pub classes: [Share; 3],
    /// True if classes come from phases, and not from the lengths of lives.
    pub by_phases: bool,
    /// Phases with known names.
    pub phases: usize,
    /// Runs of modules.
    pub modules: usize,
    /// Streams.
    pub streams: usize,
    /// One past the last tick.
    pub ticks: u64,
}

/// The class of each block, and whether classes come from phases.
pub fn classes(trace: &Trace) -> (Vec<Class>, bool) {
    let blocks = &trace.blocks;
    let first_end = blocks.iter().map(|block| block.end).min().unwrap_or(0);
    let last_start = blocks.iter().map(|block| block.start).max().unwrap_or(0);
    let by_phases = blocks
        .iter()
        .any(|block| block.origin.phases.0 != 0 && block.origin.phases.1 != 0);
    let first_phase = trace.phases.get(1).map_or(0, |span| span.start);
    let last_phase = trace.phases.last().map_or(0, |span| span.end);
    let persists = |block: &Block| match by_phases {
        true => block.origin.phases.0 == 0 && block.start <= first_phase && last_phase <= block.end,
        false => block.start < first_end && last_start < block.end,
    };
    let span = |block: &Block| ((block.end - block.start).max(1) as f64).log2();
    let threshold = match by_phases {
        true => 0.0,
        false => otsu(blocks.iter().filter(|block| !persists(block)).map(span)),
    };
    let class = |block: &Block| match (persists(block), by_phases) {
        (true, _) => Class::Persistent,
        (false, true) if block.origin.phases.0 == block.origin.phases.1 => Class::Transient,
        (false, false) if span(block) <= threshold => Class::Transient,
        _ => Class::Scoped,
    };
    (blocks.iter().map(class).collect(), by_phases)
}

/// The threshold that divides numbers into two classes with the largest variance between them (N.
/// Otsu, 1979). Numbers up to it are the lower class. If all numbers are equal, all are in it.
fn otsu(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_unstable_by(f64::total_cmp);
    let sum: f64 = numbers.iter().sum();
    let n = numbers.len() as f64;
    let (mut best, mut threshold, mut below) = (0.0, numbers.last().copied().unwrap_or(0.0), 0.0);
    for (i, pair) in numbers.windows(2).enumerate() {
        below += pair[0];
        if pair[0] == pair[1] {
            continue;
        }
        let k = (i + 1) as f64;
        let between = k * (n - k) * (below / k - (sum - below) / (n - k)).powi(2);
        if best < between {
            (best, threshold) = (between, pair[0]);
        }
    }
    threshold
}

/// Requested bytes alive over time: the ticks at which the sum changes, ascending, with the sum
/// after each.
pub fn live_bytes(trace: &Trace) -> Vec<(u64, u64)> {
    let mut change: BTreeMap<u64, i128> = BTreeMap::new();
    for block in &trace.blocks {
        let bytes = i128::from(block.bytes);
        let gaps = block
            .gaps
            .iter()
            .flat_map(|&(start, end)| [(start, -bytes), (end, bytes)]);
        for (tick, bytes) in gaps.chain([(block.start, bytes), (block.end, -bytes)]) {
            *change.entry(tick).or_insert(0) += bytes;
        }
    }
    let mut live = 0;
    change
        .into_iter()
        .map(|(tick, bytes)| {
            live += bytes;
            (tick, live as u64)
        })
        .collect()
}

/// The number of sizes in a report.
const FREQUENT: usize = 8;

/// Computes the statistics of a trace. Sizes must add up to less than 2^62 bytes; readers of traces
/// check this.
pub fn stats(trace: &Trace) -> Stats {
    let blocks = &trace.blocks;
    let (class, by_phases) = classes(trace);
    let (mut peak_tick, mut live_peak_bytes) = (0, 0);
    for (tick, bytes) in live_bytes(trace) {
        if live_peak_bytes < bytes {
            (peak_tick, live_peak_bytes) = (tick, bytes);
        }
    }
    let alive = |block: &Block| {
        let within = |&(start, end): &(u64, u64)| start <= peak_tick && peak_tick < end;
        within(&(block.start, block.end)) && !block.gaps.iter().any(within)
    };
    let share = |chosen: &dyn Fn(usize) -> bool| {
        let mut share = Share::default();
        for block in blocks
            .iter()
            .enumerate()
            .filter(|&(i, _)| chosen(i))
            .map(|(_, block)| block)
        {
            share.blocks += 1;
            share.bytes += block.bytes;
            share.peak_bytes += if alive(block) { block.bytes } else { 0 };
        }
        share
    };
    let mut sizes: BTreeMap<u64, usize> = BTreeMap::new();
    for block in blocks.iter().filter(|block| 512 < block.bytes) {
        *sizes.entry(block.bytes).or_insert(0) += 1;
    }
    let mut frequent: Vec<(u64, usize)> = sizes.iter().map(|(&bytes, &n)| (bytes, n)).collect();
    frequent.sort_by_key(|&(bytes, n)| (std::cmp::Reverse(n), bytes));
    frequent.truncate(FREQUENT);
    let streams: std::collections::BTreeSet<u32> =
        blocks.iter().map(|block| block.origin.stream).collect();
    Stats {
        blocks: blocks.len(),
        above_512: sizes.values().sum(),
        sizes_above_512: sizes.len(),
        frequent,
        dynamic: share(&|i| blocks[i].origin.dynamic),
        live_peak_bytes,
        peak_tick,
        classes: Class::ALL.map(|of| share(&|i| class[i] == of)),
        by_phases,
        phases: trace.phases.len().saturating_sub(1),
        modules: trace.modules.len().saturating_sub(1),
        streams: streams.len(),
        ticks: blocks.iter().map(|block| block.end).max().unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use placement::trace::{Origin, Span};

    fn block(start: u64, end: u64, bytes: u64, phases: (u32, u32)) -> Block {
        Block {
            start,
            end,
            bytes,
            origin: Origin {
                phases,
                ..Origin::default()
            },
            ..Block::default()
        }
    }

    #[test]
    fn phases_tell_classes() {
        // A weight, an activation, and temporary blocks of a forward and a backward.
        let blocks = vec![
            block(0, 10, 1000, (0, 0)),
            block(1, 8, 600, (1, 2)),
            block(2, 3, 50, (1, 1)),
            block(6, 7, 600, (2, 2)),
        ];
        let span = |name: &str, start, end| Span {
            name: name.into(),
            start,
            end,
        };
        let phases = vec![Span::default(), span("fwd.0", 1, 5), span("bwd.0", 5, 9)];
        let trace = Trace {
            blocks,
            phases,
            ..Trace::default()
        };
        let stats = stats(&trace);
        assert!(stats.by_phases);
        assert_eq!(stats.classes.map(|share| share.blocks), [1, 1, 2]);
        assert_eq!(
            stats.classes.map(|share| share.peak_bytes),
            [1000, 600, 600]
        );
        assert_eq!((stats.live_peak_bytes, stats.peak_tick), (2200, 6));
        assert_eq!(
            (stats.above_512, stats.sizes_above_512, stats.phases),
            (3, 2, 2)
        );
        assert_eq!(stats.frequent, [(600, 2), (1000, 1)]);
    }

    #[test]
    fn without_phases_lives_tell() {
        let mut blocks = vec![block(0, 101, 8, (0, 0))];
        for i in 1..40 {
            blocks.push(block(i, 100 - i, 8, (0, 0)));
            blocks.push(block(i, i + 1, 8, (0, 0)));
        }
        let trace = Trace {
            blocks,
            ..Trace::default()
        };
        let (classes, by_phases) = classes(&trace);
        assert!(!by_phases);
        assert_eq!(classes[0], Class::Persistent);
        let transient = classes
            .iter()
            .filter(|&&class| class == Class::Transient)
            .count();
        // The innermost nested blocks live as short as some other blocks.
        assert!((39..45).contains(&transient), "{transient}");
    }

    #[test]
    fn nothing_is_nothing() {
        let stats = stats(&Trace::default());
        assert_eq!(
            (stats.blocks, stats.live_peak_bytes, stats.classes),
            (0, 0, [Share::default(); 3])
        );
    }
}
