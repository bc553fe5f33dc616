//! Several ways to keep each block, beside the four numbers: what a block computes again may be a part of it.
//!
//! ProTrain keeps a block, swaps it or computes all of it again. Most of a block's bytes are often cheap to compute again
//! (attention's scores, activations, norms) and most of its time is not (products), so that a choice between the two ends
//! of that curve costs more than it has to. Here each block has a list of [`Choice`]s; persistent chunks, buffers and swaps
//! keep ProTrain's structure, which costs nothing against free placement (measured on its models).
//!
//! For each structure the best choices are found by dynamic programming along the forward, over labels: bytes held so far
//! and time of the backward so far. A label that is beaten in both is dropped, which is exact; if too many remain, bytes are
//! rounded up, and a second pass that rounds them down says how much that can have cost. So there is always a lower bound.

use super::protrain::{self, Activation, Config, Instance, Times, around, leaving, moved, stages, total};

/// A way to keep a block.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Choice {
    /// Bytes that the block holds from its forward for its backward.
    pub held: u64,
    /// What computing the rest again adds to its backward, µs.
    pub extra: f64,
}

/// What was found.
#[derive(Clone, PartialEq, Debug)]
pub struct Found {
    /// The structure; its `n_recompute` is 0, for `choices` say what is computed again.
    pub config: Config,
    /// For each block, the position of its choice; `None` if it is swapped.
    pub choices: Vec<Option<usize>>,
    /// Predicted times.
    pub times: Times,
    /// Peak of the device's memory, bytes.
    pub memory: u64,
    /// No placement of this structure makes a shorter step, µs.
    pub bound: f64,
}

/// Labels that are kept exactly.
const LABELS: usize = 1024;
/// Times that differ by less than this share are equal.
const EQUAL: f64 = 1e-9;

/// What a chunk's blocks come to together: bytes held, the most bytes while they run beyond those held before, time added.
#[derive(Clone, Debug)]
struct Combination {
    held: u64,
    peak: u64,
    extra: f64,
    choices: Vec<Option<usize>>,
}

/// The combinations of a chunk that no other beats, and whether their bytes are exact.
struct Combinations {
    all: Vec<Combination>,
    exact: bool,
}

/// A way through the first chunks.
#[derive(Clone, Copy, Debug)]
struct Label {
    held: u64,
    micros: f64,
    /// The label that it continues, and the combination of its chunk.
    from: usize,
    by: usize,
}

/// How bytes are rounded where labels are too many.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rounding {
    /// What is found fits.
    Up,
    /// What is found is a lower bound.
    Down,
}

/// The fastest placement. `choices` has a list for each block; what is not repeated has one entry. An error if a list is
/// missing or empty, or if blocks are not in the order of their chunks; `Ok(None)` if nothing fits.
pub fn search(instance: &Instance, choices: &[Vec<Choice>]) -> Result<Option<Found>, String> {
    if choices.len() != instance.blocks.len() || choices.iter().any(Vec::is_empty) {
        return Err("there should be at least one choice for each block".into());
    }
    if !instance.blocks.is_sorted_by_key(|block| block.chunk) {
        return Err("blocks should be in the order of their chunks".into());
    }
    let n_chunks = instance.chunks.len();
    let mut best: Option<Found> = None;
    let mut bound = f64::INFINITY;
    for n_swap in 0..=instance.most_swaps() {
        let layout = Config { n_swap, ..Config::default() }.layout(instance);
        let swapped = |i: usize| layout.activation[i] == Some(Activation::Swap);
        let stages = stages(instance, &layout.activation);
        let leaving = leaving(instance, swapped);
        let combinations: Vec<[Combinations; 2]> = (0..n_chunks)
            .map(|c| [Rounding::Up, Rounding::Down].map(|r| combine(instance, choices, &leaving, &swapped, c, r)))
            .collect();
        for n_persist in 0..=n_chunks {
            let persistent = instance.chunks[..n_persist].iter().map(|chunk| chunk.persistent_bytes).sum();
            let on_host = Config { n_persist, n_swap, ..Config::default() };
            if instance.host_capacity.is_some_and(|host| host < protrain::host_memory(instance, &on_host)) {
                continue;
            }
            let (fewest, most) = instance.buffers(n_persist);
            for n_buffer in fewest..=most {
                let fixed = total(instance, 0, persistent, n_buffer);
                if instance.capacity < fixed {
                    break;
                }
                // The inverse of `total`: what may be used, less what is.
                let used = instance.base + persistent + n_buffer as u64 * instance.buffer_bytes;
                let room = ((instance.capacity as f64 / instance.alpha) as u64).saturating_sub(used);
                let config = Config { n_persist, n_buffer, n_swap, n_recompute: 0 };
                let around = around(instance, &stages, &config);
                let moved: Vec<f64> = (0..n_chunks).map(|c| moved(instance, &stages, &config, c).1).collect();
                // Without any recompute: what even unlimited room for activations cannot undercut.
                let least = (0..n_chunks).map(|c| stages.backward[c].max(moved[c])).sum();
                let step = |backward: f64| Times { backward, ..around }.step();
                let incumbent = best.as_ref().map_or(f64::INFINITY, |best| best.times.step());
                if incumbent * (1.0 - EQUAL) <= step(least) {
                    continue;
                }
                let run = |r: Rounding| through(&combinations, &stages.backward, &moved, room, r);
                let (found, exact) = run(Rounding::Up);
                let low = if exact { found.as_ref().map(|f| f.0) } else { run(Rounding::Down).0.map(|f| f.0) };
                bound = bound.min(low.map_or(f64::INFINITY, step));
                let Some((backward, choices)) = found.filter(|f| step(f.0) < incumbent * (1.0 - EQUAL)) else {
                    continue;
                };
                let times = Times { backward, ..around };
                best = Some(Found { config, choices, times, memory: 0, bound: 0.0 });
            }
        }
    }
    Ok(best.map(|found| Found {
        memory: memory(instance, choices, &found),
        bound: bound.min(found.times.step()),
        ..found
    }))
}

/// Peak of the device's memory of what was found, bytes.
fn memory(instance: &Instance, choices: &[Vec<Choice>], found: &Found) -> u64 {
    let leaving = leaving(instance, |i| found.choices[i].is_none());
    let (mut held, mut peak) = (0, 0);
    for (i, block) in instance.blocks.iter().enumerate() {
        peak = peak.max(held + leaving[i] + block.activation + block.transient);
        held += found.choices[i].map_or(0, |choice| choices[i][choice].held);
    }
    let persistent = instance.chunks[..found.config.n_persist].iter().map(|chunk| chunk.persistent_bytes).sum();
    total(instance, peak, persistent, found.config.n_buffer)
}

/// The combinations of a chunk's blocks that no other beats in held bytes, peak and time.
fn combine(
    instance: &Instance,
    choices: &[Vec<Choice>],
    leaving: &[u64],
    swapped: &impl Fn(usize) -> bool,
    chunk: usize,
    rounding: Rounding,
) -> Combinations {
    let mut exact = true;
    let mut all = vec![Combination { held: 0, peak: 0, extra: 0.0, choices: vec![] }];
    for (i, block) in instance.blocks.iter().enumerate().filter(|(_, block)| block.chunk == chunk) {
        let running = leaving[i] + block.activation + block.transient;
        let options: Vec<(Option<usize>, Choice)> = match swapped(i) {
            true => vec![(None, Choice { held: 0, extra: 0.0 })],
            false => choices[i].iter().copied().enumerate().map(|(k, choice)| (Some(k), choice)).collect(),
        };
        let mut next = vec![];
        for one in &all {
            for &(position, choice) in &options {
                let mut choices = one.choices.clone();
                choices.push(position);
                let (held, peak) = (one.held + choice.held, one.peak.max(one.held + running));
                next.push(Combination { held, peak, extra: one.extra + choice.extra, choices });
            }
        }
        all = undominated(next);
        // Very large chunks: fewer combinations, by rounding their bytes.
        let most = all.iter().map(|c| c.held).max().unwrap_or(0);
        if LABELS < all.len() {
            exact = false;
            let unit = (most / LABELS as u64).max(1);
            for c in &mut all {
                c.held = round(c.held, unit, rounding);
                c.peak = round(c.peak, unit, rounding);
            }
            all = undominated(all);
        }
    }
    Combinations { all, exact }
}

fn round(bytes: u64, unit: u64, rounding: Rounding) -> u64 {
    match rounding {
        Rounding::Up => bytes.next_multiple_of(unit),
        Rounding::Down => bytes / unit * unit,
    }
}

fn undominated(mut all: Vec<Combination>) -> Vec<Combination> {
    all.sort_by(|a, b| a.held.cmp(&b.held).then(a.peak.cmp(&b.peak)).then(a.extra.total_cmp(&b.extra)));
    let mut kept: Vec<Combination> = vec![];
    for c in all {
        if kept.iter().all(|k| c.peak < k.peak || c.extra < k.extra) {
            kept.push(c);
        }
    }
    kept
}

/// The shortest backward that fits into `room` bytes of activations, and each block's choice; and whether nothing was
/// rounded.
#[allow(clippy::type_complexity, reason = "a name for it would say no more")]
fn through(
    combinations: &[[Combinations; 2]],
    compute: &[f64],
    moved: &[f64],
    room: u64,
    rounding: Rounding,
) -> (Option<(f64, Vec<Option<usize>>)>, bool) {
    let side = usize::from(rounding == Rounding::Down);
    let mut exact = true;
    let mut layers = vec![vec![Label { held: 0, micros: 0.0, from: 0, by: 0 }]];
    for (c, combinations) in combinations.iter().enumerate() {
        let combinations = &combinations[side];
        exact &= combinations.exact;
        let before = &layers[c];
        let mut labels = vec![];
        for (from, label) in before.iter().enumerate() {
            for (by, combination) in combinations.all.iter().enumerate() {
                if label.held + combination.peak <= room {
                    let micros = label.micros + (compute[c] + combination.extra).max(moved[c]);
                    labels.push(Label { held: label.held + combination.held, micros, from, by });
                }
            }
        }
        labels = front(labels);
        if LABELS < labels.len() {
            exact = false;
            let unit = (room / LABELS as u64).max(1);
            for label in &mut labels {
                label.held = round(label.held, unit, rounding);
            }
            labels = front(labels);
        }
        layers.push(labels);
    }
    let last = layers.len() - 1;
    let Some(end) = (0..layers[last].len()).min_by(|&a, &b| layers[last][a].micros.total_cmp(&layers[last][b].micros))
    else {
        return (None, exact);
    };
    let micros = layers[last][end].micros;
    let (mut at, mut parts) = (end, vec![]);
    for c in (0..last).rev() {
        let label = layers[c + 1][at];
        parts.push(&combinations[c][side].all[label.by].choices);
        at = label.from;
    }
    (Some((micros, parts.into_iter().rev().flatten().copied().collect())), exact)
}

/// The labels that no other beats in both bytes and time.
fn front(mut labels: Vec<Label>) -> Vec<Label> {
    labels.sort_by(|a, b| a.held.cmp(&b.held).then(a.micros.total_cmp(&b.micros)));
    let mut least = f64::INFINITY;
    labels.retain(|label| {
        let better = label.micros < least * (1.0 - EQUAL);
        least = least.min(label.micros);
        better
    });
    labels
}
