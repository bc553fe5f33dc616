//! Selects which layers leave in which gap: Algorithm 1 of the paper, a variant that considers
//! time, and two selections of others that the paper names.
//!
//! A choice (layer, gap) covers the operations during which the layer would be away. The most
//! profitable choice is taken until no operation exceeds the memory. The profit is the excess that
//! the choice removes over all operations that it covers, per byte that it moves. A layer that is
//! already away in one gap moves half as many bytes for the other.

use super::{Instance, Op};

/// Bytes away, by layer and gap.
pub(super) type Away = Vec<[u64; 2]>;

/// Positions of the operations that a choice covers: two half-open intervals.
fn covered(n_layers: usize, layer: usize, gap: usize) -> [(usize, usize); 2] {
    let (backward, forward) = (n_layers - 1 - layer, n_layers + layer);
    match gap {
        0 => [(backward + 1, forward), (0, 0)],
        _ => [(forward + 1, 2 * n_layers), (0, backward)],
    }
}

/// The bytes by which each operation exceeds the memory minus a reserve, if all weights are on the
/// device.
fn excess(instance: &Instance, ops: &[Op], reserve: f64) -> Vec<f64> {
    let (total, limit) = (
        instance.weight_bytes() as f64,
        instance.memory_bytes as f64 - reserve,
    );
    ops.iter()
        .map(|op| total + op.held_bytes as f64 - limit)
        .collect()
}

/// Algorithm 1, with `reserve` bytes left free.
pub(super) fn greedy(instance: &Instance, ops: &[Op], reserve: f64) -> Option<Away> {
    choose(instance, ops, excess(instance, ops, reserve), 0.0)
}

/// Algorithm 1 with a reserve for each operation, and only choices that cover at least `windows`
/// times the time that the layer takes to move.
pub(super) fn windowed(
    instance: &Instance,
    ops: &[Op],
    reserve: &[f64],
    windows: f64,
) -> Option<Away> {
    let excess = excess(instance, ops, 0.0)
        .iter()
        .zip(reserve)
        .map(|(excess, reserve)| excess + reserve)
        .collect();
    choose(instance, ops, excess, windows)
}

fn choose(instance: &Instance, ops: &[Op], mut excess: Vec<f64>, windows: f64) -> Option<Away> {
    let n_layers = instance.layers.len();
    let mut away = vec![[0u64; 2]; n_layers];
    let mut open = choices(instance, ops, windows);
    // Layers of one size share the prefix sums of the excess that a choice would remove.
    let mut sizes: Vec<u64> = open
        .iter()
        .map(|&(layer, _)| instance.weight(layer))
        .collect();
    sizes.sort_unstable();
    sizes.dedup();
    while excess.iter().any(|&excess| excess > 0.0) {
        let sums: Vec<Vec<f64>> = sizes
            .iter()
            .map(|&size| sums(excess.iter().map(|e| e.clamp(0.0, size as f64))))
            .collect();
        let profit = |&(layer, gap): &(usize, usize)| {
            let size = instance.weight(layer);
            let sums = &sums[sizes.partition_point(|&other| other < size)];
            let removed = over_covered(sums, n_layers, layer, gap);
            let is_away = away[layer][1 - gap] > 0;
            let moves = if is_away { 1.0 } else { 2.0 };
            removed / (moves * size as f64)
        };
        // The first of the most profitable.
        let (mut best, mut most) = (None, 0.0);
        for (k, choice) in open.iter().enumerate() {
            let profit = profit(choice);
            if most < profit {
                (best, most) = (Some(k), profit);
            }
        }
        let (layer, gap) = open.remove(best?);
        away[layer][gap] = instance.weight(layer);
        remove(&mut excess, instance, layer, gap);
    }
    Some(away)
}

/// The choices of layers with weights that cover at least `windows` times the time that the layer
/// takes to move.
fn choices(instance: &Instance, ops: &[Op], windows: f64) -> Vec<(usize, usize)> {
    let n_layers = instance.layers.len();
    let clock = sums(ops.iter().map(|op| op.micros));
    let is_allowed = |layer: usize, gap: usize| {
        let time = over_covered(&clock, n_layers, layer, gap);
        let moves = instance.weight(layer) as f64 / instance.bytes_per_micro;
        windows * moves <= time * (1.0 + 1e-9)
    };
    (0..n_layers)
        .flat_map(|layer| [(layer, 0), (layer, 1)])
        .filter(|&(layer, gap)| instance.weight(layer) > 0 && is_allowed(layer, gap))
        .collect()
}

/// Prefix sums: of no number, of one, of two, ….
fn sums(numbers: impl ExactSizeIterator<Item = f64>) -> Vec<f64> {
    let mut sums = Vec::with_capacity(numbers.len() + 1);
    let mut sum = 0.0;
    sums.push(sum);
    for number in numbers {
        sum += number;
        sums.push(sum);
    }
    sums
}

/// The sum over the operations that a choice covers, from the sums of the first operations.
fn over_covered(sums: &[f64], n_layers: usize, layer: usize, gap: usize) -> f64 {
    let covered = covered(n_layers, layer, gap).into_iter();
    covered.map(|(from, to)| sums[to] - sums[from]).sum()
}

/// Subtracts a choice's bytes from the excess of the operations that it covers.
fn remove(excess: &mut [f64], instance: &Instance, layer: usize, gap: usize) {
    for (from, to) in covered(instance.layers.len(), layer, gap) {
        for excess in &mut excess[from..to] {
            *excess -= instance.weight(layer) as f64;
        }
    }
}

/// The smallest number of first layers, in both gaps, that fits into the memory with `reserve`
/// bytes left free.
pub(super) fn first(instance: &Instance, ops: &[Op], reserve: f64) -> Option<Away> {
    let n_layers = instance.layers.len();
    let mut excess = excess(instance, ops, reserve);
    let mut away = vec![[0u64; 2]; n_layers];
    for (layer, away) in away.iter_mut().enumerate() {
        if excess.iter().all(|&excess| excess <= 0.0) {
            break;
        }
        *away = [instance.weight(layer); 2];
        for gap in [0, 1] {
            remove(&mut excess, instance, layer, gap);
        }
    }
    excess.iter().all(|&excess| excess <= 0.0).then_some(away)
}

/// A priority of AutoSwap (J. Zhang, S. H. Yeung, Y. Shu, B. He, W. Wang, "Efficient Memory
/// Management for GPU-based Deep Learning Systems", 2019, Section 4), for a layer and a gap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Score {
    /// Duration of absence (DOA): the time of the covered operations minus the transfers' time.
    Absence,
    /// Area of absence (AOA): this time multiplied by the bytes. A negative one is divided by them.
    Area,
    /// Weighted duration (WDOA): the integral of the excess over the covered operations.
    Weighted,
    /// Submodular (SWDOA): the same, of the excess that is left after each choice.
    Submodular,
}

/// AutoSwap: choices in the order of their priority until nothing exceeds the memory minus
/// `reserve`. AutoSwap swaps whole tensors; here a tensor is a layer's weights.
pub(super) fn by_score(
    instance: &Instance,
    ops: &[Op],
    score: Score,
    reserve: f64,
) -> Option<Away> {
    let n_layers = instance.layers.len();
    let mut away = vec![[0u64; 2]; n_layers];
    let mut left = excess(instance, ops, reserve);
    let first = left.clone();
    let clock = sums(ops.iter().map(|op| op.micros));
    let mut open = choices(instance, ops, 0.0);
    while left.iter().any(|&excess| excess > 0.0) {
        let weighing = if score == Score::Submodular {
            &left
        } else {
            &first
        };
        let weighted = sums(
            ops.iter()
                .zip(weighing)
                .map(|(op, excess)| op.micros * excess.max(0.0)),
        );
        let of = |&(layer, gap): &(usize, usize)| {
            let bytes = instance.weight(layer) as f64;
            let absent =
                over_covered(&clock, n_layers, layer, gap) - 2.0 * bytes / instance.bytes_per_micro;
            match score {
                Score::Absence => absent,
                Score::Area if absent < 0.0 => absent / bytes,
                Score::Area => absent * bytes,
                Score::Weighted | Score::Submodular => {
                    over_covered(&weighted, n_layers, layer, gap)
                }
            }
        };
        // The first of the highest.
        let highest = |best: usize, k: usize| {
            if of(&open[best]) < of(&open[k]) {
                k
            } else {
                best
            }
        };
        let best = (0..open.len()).reduce(highest)?;
        let (layer, gap) = open.remove(best);
        away[layer][gap] = instance.weight(layer);
        remove(&mut left, instance, layer, gap);
    }
    Some(away)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::offload::Layer;

    /// Three layers of 10, no activations. The memory holds two weights and a gradient.
    fn three() -> Instance {
        let layer = Layer {
            weight_bytes: 10,
            activation_bytes: 0,
            forward_micros: 1.0,
            backward_micros: 2.0,
        };
        Instance {
            layers: vec![layer; 3],
            bytes_per_micro: 10.0,
            memory_bytes: 30,
        }
    }

    #[test]
    fn algorithm_1_by_hand() {
        // With all 30 bytes and a gradient, each backward exceeds the memory by 10, and no forward
        // does. Away between backward and forward, layer 2 helps B_1 and B_0; away between forward
        // and backward, layer 0 helps B_2 and B_1. Of two equal profits the first is taken: (0, 1).
        // Then B_0 is left: (2, 0) covers it, and (1, 0) too: the lower layer.
        let instance = three();
        let ops = instance.ops();
        assert_eq!(
            greedy(&instance, &ops, 0.0),
            Some(vec![[0, 10], [10, 0], [0, 0]])
        );
    }

    #[test]
    fn first_takes_as_few_layers_as_fit() {
        let instance = three();
        let ops = instance.ops();
        // Layer 0 helps B_2 and B_1. For B_0, only layer 1 is left.
        assert_eq!(
            first(&instance, &ops, 0.0),
            Some(vec![[10, 10], [10, 10], [0, 0]])
        );
    }

    #[test]
    fn autoswap_takes_the_longest_absence_first() {
        // Gap 1 of layer 0 covers F_1, F_2, B_2, B_1: 6 µs, the most; it helps B_2 and B_1. Gap 0
        // of layer 2 covers B_1, B_0, F_0, F_1: 6 µs; it helps B_0.
        let instance = three();
        let ops = instance.ops();
        let taken = Some(vec![[0, 10], [0, 0], [10, 0]]);
        for score in [Score::Absence, Score::Area] {
            assert_eq!(by_score(&instance, &ops, score, 0.0), taken, "{score:?}");
        }
        // By the integral of the excess, both are equal, and 2 µs above the others.
        for score in [Score::Weighted, Score::Submodular] {
            let away = by_score(&instance, &ops, score, 0.0).unwrap();
            let helps = excess(&instance, &ops, 0.0);
            assert!(helps.iter().any(|&excess| excess > 0.0));
            assert!(away.iter().flatten().any(|&bytes| bytes > 0), "{score:?}");
        }
    }
}
