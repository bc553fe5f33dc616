//! Extends ProTrain's four numbers: each block has several ways to be kept, and may compute only a
//! part of itself again.
//!
//! ProTrain keeps a block, swaps it or computes all of it again. Often most of a block's bytes are
//! cheap to compute again (attention's scores, activations, norms), and most of its time is in
//! products. So a choice between keeping everything and computing everything again costs more than
//! necessary. Here each block has a list of [`Choice`]s. Persistent chunks, buffers and swaps keep
//! ProTrain's structure. This loses nothing compared with free placement (measured on its models).
//!
//! For each structure the best choices are found by dynamic programming along the forward, over
//! labels: bytes held so far and time of the backward so far. A label that another beats in both is
//! dropped, which is exact. If too many labels remain, bytes are rounded up. A second pass rounds
//! them down, which gives a lower bound. Structures are tried in the order of a lower bound of
//! their steps, in which choices may be fractional.

use super::protrain::{
    self, Activation, Config, Instance, Stages, Times, around, leaving, moved, stages, states,
    total,
};
use thiserror::Error;

/// A way to keep a block.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Choice {
    /// Bytes that the block holds from its forward for its backward.
    pub held: u64,
    /// What computing the rest again adds to its backward, µs.
    pub extra: f64,
}

/// The result.
#[derive(Clone, PartialEq, Debug)]
pub struct Found {
    /// The structure. Its `n_recompute` is 0, because `choices` say what is computed again.
    pub config: Config,
    /// For each block, the position of its choice; `None` if it is swapped.
    pub choices: Vec<Option<usize>>,
    /// Predicted times.
    pub times: Times,
    /// Peak of the device's memory, bytes.
    pub memory: u64,
    /// No placement of this structure gives a shorter step, µs.
    pub bound: f64,
}

/// The largest number of labels without rounding.
const LABELS: usize = 1024;
/// Times that differ by less than this share are equal.
const EQUAL: f64 = 1e-9;

/// The sums of a chunk's blocks: bytes held, the most bytes while they run in addition to the bytes
/// held before, and time added.
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

/// The choices for the first chunks.
#[derive(Clone, Copy, Debug)]
struct Label {
    held: u64,
    micros: f64,
    /// The label that it continues, and the combination of its chunk.
    from: usize,
    by: usize,
}

/// How bytes are rounded if there are too many labels.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rounding {
    /// The result fits.
    Up,
    /// The result is a lower bound.
    Down,
}

/// Why choices do not belong to an instance.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum SearchError {
    /// A block's list is missing or empty.
    #[error("there should be at least one choice for each block")]
    NoChoice,
    /// A block's chunk is before that of the block before it.
    #[error("blocks should be in the order of their chunks")]
    Unordered,
}

/// The fastest placement. `choices` has a list for each block, with one entry for blocks that are
/// not repeated. An error if a list is missing or empty, or if blocks are not in the order of their
/// chunks; `Ok(None)` if nothing fits.
pub fn search(instance: &Instance, choices: &[Vec<Choice>]) -> Result<Option<Found>, SearchError> {
    if choices.len() != instance.blocks.len() || choices.iter().any(Vec::is_empty) {
        return Err(SearchError::NoChoice);
    }
    if !instance.blocks.is_sorted_by_key(|block| block.chunk) {
        return Err(SearchError::Unordered);
    }
    let swaps: Vec<Swaps> = (0..=instance.most_swaps())
        .map(|n_swap| Swaps::new(instance, choices, n_swap))
        .collect();
    let mut combinations: Vec<Option<Vec<[Combinations; 2]>>> =
        swaps.iter().map(|_| None).collect();
    let mut best: Option<Found> = None;
    let mut bound = f64::INFINITY;
    for (least, config) in structures(instance, &swaps) {
        let incumbent = best
            .as_ref()
            .map_or(f64::INFINITY, |best| best.times.step());
        if incumbent * (1.0 - EQUAL) <= least {
            break;
        }
        let Some(room) = room(instance, &config) else {
            continue;
        };
        let swaps = &swaps[config.n_swap];
        let chunks = Chunks {
            combinations: combinations[config.n_swap]
                .get_or_insert_with(|| combine_all(instance, choices, swaps)),
            compute: &swaps.stages.backward,
            moved: (0..instance.chunks.len())
                .map(|c| moved(instance, &swaps.stages, &config, c).1)
                .collect(),
            room,
        };
        let around = around(instance, &swaps.stages, &config);
        let step = |backward: f64| Times { backward, ..around }.step();
        let (found, exact) = chunks.place(Rounding::Up);
        let low = if exact {
            found.as_ref().map(|found| found.backward)
        } else {
            let (low, _) = chunks.place(Rounding::Down);
            low.map(|low| low.backward)
        };
        bound = bound.min(low.map_or(f64::INFINITY, step));
        let faster = |found: &Placement| step(found.backward) < incumbent * (1.0 - EQUAL);
        if let Some(Placement { backward, choices }) = found.filter(faster) {
            best = Some(Found {
                config,
                choices,
                times: Times { backward, ..around },
                memory: 0,
                bound: 0.0,
            });
        }
    }
    Ok(best.map(|found| Found {
        memory: memory(instance, choices, &found),
        bound: bound.min(found.times.step()),
        ..found
    }))
}

/// Every structure with a lower bound of its step, µs, best first. Most structures are never
/// examined.
fn structures(instance: &Instance, swaps: &[Swaps]) -> Vec<(f64, Config)> {
    let mut structures: Vec<(f64, Config)> = vec![];
    for (n_swap, swaps) in swaps.iter().enumerate() {
        for n_persist in 0..=instance.chunks.len() {
            let config = Config {
                n_persist,
                n_swap,
                ..Config::default()
            };
            if instance
                .host_capacity
                .is_some_and(|host| host < protrain::host_memory(instance, &config))
            {
                continue;
            }
            let (fewest, most) = instance.buffers(n_persist);
            for n_buffer in fewest..=most {
                let config = Config { n_buffer, ..config };
                let least =
                    room(instance, &config).and_then(|room| swaps.least(instance, &config, room));
                structures.extend(least.map(|least| (least, config)));
            }
        }
    }
    structures.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    structures
}

/// Bytes that a structure leaves for activations; `None` if it does not fit itself.
fn room(instance: &Instance, config: &Config) -> Option<u64> {
    // The inverse of `total`: the bytes that may be used, minus the used ones.
    let used = instance.base + states(instance)[config.n_persist][config.n_buffer];
    ((instance.capacity as f64 / instance.alpha) as u64).checked_sub(used)
}

/// Figures that depend on the number of swapped blocks.
struct Swaps {
    swapped: Vec<bool>,
    leaving: Vec<u64>,
    stages: Stages,
    /// The least bytes that all blocks except the last can hold, and the time that this adds to the
    /// backward.
    fewest: (u64, f64),
    /// The time that more bytes save, the largest saving per byte first: bytes, µs. The choices of
    /// each block are made convex.
    savings: Vec<(f64, f64)>,
}

impl Swaps {
    fn new(instance: &Instance, choices: &[Vec<Choice>], n_swap: usize) -> Swaps {
        let layout = Config {
            n_swap,
            ..Config::default()
        }
        .layout(instance);
        let swapped: Vec<bool> = layout
            .activation
            .iter()
            .map(|a| *a == Some(Activation::Swap))
            .collect();
        let (mut fewest, mut savings) = ((0u64, 0.0), vec![]);
        for (i, options) in choices
            .iter()
            .enumerate()
            .take(choices.len().saturating_sub(1))
        {
            if swapped[i] {
                continue;
            }
            let mut options = options.clone();
            options.sort_by(|a, b| a.held.cmp(&b.held).then(a.extra.total_cmp(&b.extra)));
            let mut at = options[0];
            fewest = (fewest.0 + at.held, fewest.1 + at.extra);
            // Along the lower hull: the next corner is the one that saves the most for its bytes.
            let rate = |at: Choice, to: &Choice| (at.extra - to.extra) / (to.held - at.held) as f64;
            while let Some(&next) = options
                .iter()
                .filter(|to| at.held < to.held && to.extra < at.extra)
                .max_by(|a, b| rate(at, a).total_cmp(&rate(at, b)))
            {
                savings.push(((next.held - at.held) as f64, at.extra - next.extra));
                at = next;
            }
        }
        savings.sort_by(|a, b| (b.1 / b.0).total_cmp(&(a.1 / a.0)));
        let leaving = leaving(instance, |i| swapped[i]);
        Swaps {
            leaving,
            stages: stages(instance, &layout.activation),
            swapped,
            fewest,
            savings,
        }
    }

    /// A lower bound of the step of a structure. Choices may be fractional, and only the last
    /// block's peak counts. `None` if even this does not fit.
    fn least(&self, instance: &Instance, config: &Config, room: u64) -> Option<f64> {
        let last = instance.blocks.len().checked_sub(1)?;
        let running =
            self.leaving[last] + instance.blocks[last].activation + instance.blocks[last].transient;
        let mut left = room.checked_sub(running)?.checked_sub(self.fewest.0)? as f64;
        let mut extra = self.fewest.1;
        for &(bytes, micros) in &self.savings {
            let part = (left / bytes).min(1.0);
            extra -= part * micros;
            left -= part * bytes;
            if part < 1.0 {
                break;
            }
        }
        let (mut compute, mut stages) = (0.0, 0.0);
        for (c, &backward) in self.stages.backward.iter().enumerate() {
            compute += backward;
            stages += backward.max(moved(instance, &self.stages, config, c).1);
        }
        // Sums in another order differ slightly. An equal structure must not be excluded.
        let backward = stages.max((compute + extra) * (1.0 - EQUAL));
        Some(
            Times {
                backward,
                ..around(instance, &self.stages, config)
            }
            .step(),
        )
    }
}

/// Peak of the device's memory of the result, bytes.
fn memory(instance: &Instance, choices: &[Vec<Choice>], found: &Found) -> u64 {
    let leaving = leaving(instance, |i| found.choices[i].is_none());
    let (mut held, mut peak) = (0, 0);
    for (i, block) in instance.blocks.iter().enumerate() {
        peak = peak.max(held + leaving[i] + block.activation + block.transient);
        held += found.choices[i].map_or(0, |choice| choices[i][choice].held);
    }
    let Config {
        n_persist,
        n_buffer,
        ..
    } = found.config;
    total(instance, peak, states(instance)[n_persist][n_buffer])
}

/// The combinations of each chunk, for each way to round.
fn combine_all(
    instance: &Instance,
    choices: &[Vec<Choice>],
    swaps: &Swaps,
) -> Vec<[Combinations; 2]> {
    let both = |chunk: usize| {
        [Rounding::Up, Rounding::Down]
            .map(|rounding| combine(instance, choices, swaps, chunk, rounding))
    };
    (0..instance.chunks.len()).map(both).collect()
}

/// The combinations of a chunk's blocks that no other combination beats in held bytes, peak and
/// time.
fn combine(
    instance: &Instance,
    choices: &[Vec<Choice>],
    swaps: &Swaps,
    chunk: usize,
    rounding: Rounding,
) -> Combinations {
    let mut exact = true;
    let mut all = vec![Combination {
        held: 0,
        peak: 0,
        extra: 0.0,
        choices: vec![],
    }];
    for (i, block) in instance
        .blocks
        .iter()
        .enumerate()
        .filter(|(_, block)| block.chunk == chunk)
    {
        let running = swaps.leaving[i] + block.activation + block.transient;
        let options = options(&choices[i], swaps.swapped[i]);
        let longer = |one: &Combination| -> Vec<Combination> {
            let of = options.iter();
            of.map(|&option| one.with(option, running)).collect()
        };
        all = undominated(all.iter().flat_map(longer).collect());
        // Very large chunks: fewer combinations, by rounding their bytes.
        let most = all.iter().map(|c| c.held).max().unwrap_or(0);
        if all.len() > LABELS {
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

/// The ways to keep a block, with their positions. A swapped block has one way, without a position:
/// it holds nothing.
fn options(choices: &[Choice], is_swapped: bool) -> Vec<(Option<usize>, Choice)> {
    if is_swapped {
        let nothing = Choice {
            held: 0,
            extra: 0.0,
        };
        return vec![(None, nothing)];
    }
    let choices = choices.iter().copied().enumerate();
    choices.map(|(k, choice)| (Some(k), choice)).collect()
}

impl Combination {
    /// The same with the next block, which takes `running` bytes while it runs.
    fn with(&self, (position, choice): (Option<usize>, Choice), running: u64) -> Combination {
        let mut choices = self.choices.clone();
        choices.push(position);
        Combination {
            held: self.held + choice.held,
            peak: self.peak.max(self.held + running),
            extra: self.extra + choice.extra,
            choices,
        }
    }
}

fn round(bytes: u64, unit: u64, rounding: Rounding) -> u64 {
    match rounding {
        Rounding::Up => bytes.next_multiple_of(unit),
        Rounding::Down => bytes / unit * unit,
    }
}

fn undominated(mut all: Vec<Combination>) -> Vec<Combination> {
    all.sort_by(|a, b| {
        a.held
            .cmp(&b.held)
            .then(a.peak.cmp(&b.peak))
            .then(a.extra.total_cmp(&b.extra))
    });
    let mut kept: Vec<Combination> = vec![];
    for c in all {
        if kept.iter().all(|k| c.peak < k.peak || c.extra < k.extra) {
            kept.push(c);
        }
    }
    kept
}

/// The chunks of a structure.
struct Chunks<'a> {
    /// The combinations of each chunk's blocks, for each way to round.
    combinations: &'a [[Combinations; 2]],
    /// Arithmetic of each chunk's backward, µs.
    compute: &'a [f64],
    /// The time of the transfers during each chunk's backward, µs.
    moved: Vec<f64>,
    /// Bytes for activations.
    room: u64,
}

/// A backward, and how each block is kept.
struct Placement {
    /// µs.
    backward: f64,
    /// For each block, the position of its choice; `None` if it is swapped.
    choices: Vec<Option<usize>>,
}

impl Chunks<'_> {
    /// The placement with the shortest backward that fits; and whether nothing was rounded.
    fn place(&self, rounding: Rounding) -> (Option<Placement>, bool) {
        let mut exact = true;
        let mut layers = vec![vec![Label {
            held: 0,
            micros: 0.0,
            from: 0,
            by: 0,
        }]];
        for c in 0..self.combinations.len() {
            exact &= self.of(c, rounding).exact;
            let mut labels = front(self.longer(&layers[c], c, rounding));
            if labels.len() > LABELS {
                exact = false;
                let unit = (self.room / LABELS as u64).max(1);
                for label in &mut labels {
                    label.held = round(label.held, unit, rounding);
                }
                labels = front(labels);
            }
            layers.push(labels);
        }
        let last = &layers[layers.len() - 1];
        let end = last.iter().min_by(|a, b| a.micros.total_cmp(&b.micros));
        let placement = end.map(|&end| Placement {
            backward: end.micros,
            choices: self.choices(&layers, end, rounding),
        });
        (placement, exact)
    }

    /// The combinations of chunk `c`.
    fn of(&self, c: usize, rounding: Rounding) -> &Combinations {
        &self.combinations[c][usize::from(rounding == Rounding::Down)]
    }

    /// The labels for the first chunks and chunk `c`, from the labels for the first chunks.
    fn longer(&self, before: &[Label], c: usize, rounding: Rounding) -> Vec<Label> {
        let mut labels = vec![];
        for (from, label) in before.iter().enumerate() {
            for (by, combination) in self.of(c, rounding).all.iter().enumerate() {
                if label.held + combination.peak <= self.room {
                    let stage = (self.compute[c] + combination.extra).max(self.moved[c]);
                    labels.push(Label {
                        held: label.held + combination.held,
                        micros: label.micros + stage,
                        from,
                        by,
                    });
                }
            }
        }
        labels
    }

    /// The choices of the label `end`, for all chunks.
    fn choices(&self, layers: &[Vec<Label>], end: Label, rounding: Rounding) -> Vec<Option<usize>> {
        let (mut label, mut parts) = (end, vec![]);
        for c in (0..self.combinations.len()).rev() {
            parts.push(&self.of(c, rounding).all[label.by].choices);
            label = layers[c][label.from];
        }
        parts.into_iter().rev().flatten().copied().collect()
    }
}

/// The labels that no other label beats in both bytes and time.
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

#[cfg(test)]
mod tests {
    use super::protrain::tests::instances;
    use super::*;
    use proptest::prelude::*;

    /// Every structure with every choice for every block.
    fn brute(instance: &Instance, choices: &[Vec<Choice>]) -> Option<f64> {
        let mut best: Option<f64> = None;
        for n_swap in 0..=instance.most_swaps() {
            let layout = Config {
                n_swap,
                ..Config::default()
            }
            .layout(instance);
            let stages = stages(instance, &layout.activation);
            for n_persist in 0..=instance.chunks.len() {
                let (fewest, most) = instance.buffers(n_persist);
                for n_buffer in fewest..=most {
                    let config = Config {
                        n_persist,
                        n_buffer,
                        n_swap,
                        n_recompute: 0,
                    };
                    let host = protrain::host_memory(instance, &config);
                    if instance.host_capacity.is_some_and(|limit| limit < host) {
                        continue;
                    }
                    let mut picks: Vec<Vec<Option<usize>>> = vec![vec![]];
                    for (i, options) in choices.iter().enumerate() {
                        let swapped = layout.activation[i] == Some(Activation::Swap);
                        let of_block: Vec<_> = if swapped {
                            vec![None]
                        } else {
                            (0..options.len()).map(Some).collect()
                        };
                        let longer = |pick: &Vec<Option<usize>>| {
                            of_block
                                .iter()
                                .map(|&o| pick.iter().copied().chain([o]).collect())
                                .collect::<Vec<_>>()
                        };
                        picks = picks.iter().flat_map(longer).collect();
                    }
                    for pick in picks {
                        let mut compute = stages.backward.clone();
                        for ((block, options), pick) in
                            instance.blocks.iter().zip(choices).zip(&pick)
                        {
                            compute[block.chunk] += pick.map_or(0.0, |p| options[p].extra);
                        }
                        let stage = |(c, &compute): (usize, &f64)| {
                            compute.max(moved(instance, &stages, &config, c).1)
                        };
                        let backward = compute.iter().enumerate().map(stage).sum();
                        let times = Times {
                            backward,
                            ..around(instance, &stages, &config)
                        };
                        let found = Found {
                            config,
                            choices: pick,
                            times,
                            memory: 0,
                            bound: 0.0,
                        };
                        if memory(instance, choices, &found) <= instance.capacity {
                            let step = times.step();
                            best = Some(best.map_or(step, |best| best.min(step)));
                        }
                    }
                }
            }
        }
        best
    }

    /// Three choices for each block that is repeated: all, half, the input.
    fn three(instance: &Instance) -> Vec<Vec<Choice>> {
        let of_block = |block: &protrain::BlockCost| match block.repeated {
            true => vec![
                Choice {
                    held: block.activation,
                    extra: 0.0,
                },
                Choice {
                    held: (block.activation + block.input) / 2,
                    extra: block.forward / 4.0,
                },
                Choice {
                    held: block.input,
                    extra: block.recompute,
                },
            ],
            false => vec![Choice {
                held: block.activation,
                extra: 0.0,
            }],
        };
        instance.blocks.iter().map(of_block).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
        #[test]
        fn nothing_is_faster(mut instance in instances()) {
            instance.alpha = 1.0;
            let choices = three(&instance);
            let found = search(&instance, &choices).unwrap();
            let best = brute(&instance, &choices);
            prop_assert_eq!(found.is_some(), best.is_some());
            if let (Some(found), Some(best)) = (found, best) {
                prop_assert!((found.times.step() - best).abs() <= 1e-6 * best, "{found:?} {best}");
                prop_assert!((found.bound - best).abs() <= 1e-6 * best, "nothing was rounded: \
                    {found:?} {best}");
                prop_assert!(found.memory <= instance.capacity);
                // ProTrain's own choices are among these.
                let protrain = protrain::search(&instance).map(|(_, p)| p.times.step());
                prop_assert!(protrain.is_none_or(|step| found.times.step() <= step * (1.0 + 1e-6)));
            }
        }

        /// Rounded labels still fit, and the bound stays below them.
        #[test]
        fn rounding_is_safe(instance in instances(),
            seeds in prop::collection::vec(1u64..1_000_000, 60)) {
            let mut instance = instance;
            // Bytes without a common unit, so that there are many labels.
            for (i, block) in instance.blocks.iter_mut().enumerate() {
                block.chunk = 0;
                block.activation = 1_000_000 * block.activation + seeds[i];
            }
            instance.chunks.truncate(1);
            instance.capacity *= 1_000_000;
            instance.host_capacity = None;
            let choices: Vec<Vec<Choice>> = instance.blocks.iter().enumerate().map(|(i, block)| {
                let held = |k: u64| block.activation - block.activation / 13 * k
                    + seeds[7 + 8 * i + k as usize] % 97;
                (0..8u64).map(|k| Choice { held: held(k), extra: k as f64
                    + seeds[i + k as usize] as f64 * 1e-6 }).collect()
            }).collect();
            if let Some(found) = search(&instance, &choices).unwrap() {
                prop_assert!(found.memory <= instance.capacity);
                prop_assert!(found.bound <= found.times.step());
                prop_assert!(0.0 < found.bound);
            }
        }
    }

    #[test]
    fn what_cannot_be_searched_is_refused() {
        let blocks = vec![
            protrain::BlockCost {
                chunk: 1,
                ..Default::default()
            },
            Default::default(),
        ];
        let instance = Instance {
            blocks,
            chunks: vec![Default::default(); 2],
            ..Default::default()
        };
        let keep = vec![Choice {
            held: 0,
            extra: 0.0,
        }];
        assert_eq!(
            search(&instance, std::slice::from_ref(&keep)).unwrap_err(),
            SearchError::NoChoice
        );
        assert_eq!(
            search(&instance, &[keep.clone(), vec![]]).unwrap_err(),
            SearchError::NoChoice
        );
        assert_eq!(
            search(&instance, &[keep.clone(), keep]).unwrap_err(),
            SearchError::Unordered
        );
    }
}
