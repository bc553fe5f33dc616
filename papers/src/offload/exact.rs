//! Solves small instances exactly: does a step without a pause exist that moves whole layers? Also
//! builds the instances of the hardness proof (Theorem 1): 3-partition as weight offloading.
//!
//! The search examines states over time: which layers are away, on the host, and on the link. At
//! each end of an operation or transfer it tries every transfer and every deletion. It does not
//! find schedules in which, at the start of the first forward, a transfer is in progress or a layer
//! is on both sides. Instances of 3-partition that have a step without a pause also have one
//! without these cases.

use super::{Instance, Layer, Op};
use std::collections::BTreeSet;

/// 3-partition as weight offloading: 3 m numbers to split into m parts of equal sum V. The instance
/// has a step of 2 µs per part if and only if such a split exists (each number must be between a
/// quarter and half of V; otherwise parts may have more or fewer than three numbers). None unless
/// there are 3 m numbers with the sum m V.
pub fn three_partition(numbers: &[u64]) -> Option<Instance> {
    let m = numbers.len() / 3;
    let sum: u64 = numbers.iter().sum();
    if m == 0 || numbers.len() != 3 * m || !sum.is_multiple_of(m as u64) {
        return None;
    }
    let part = sum / m as u64;
    let layer = |weight_bytes, forward_micros, backward_micros| Layer {
        weight_bytes,
        activation_bytes: 0,
        forward_micros,
        backward_micros,
    };
    let mut layers = Vec::new();
    for k in 0..m {
        layers.push(layer(part, 0.0, 0.0));
        layers.push(layer(0, if k + 1 == m { m as f64 } else { 0.0 }, 1.0));
    }
    layers.extend(numbers.iter().map(|&number| layer(number, 0.0, 0.0)));
    Some(Instance {
        layers,
        bytes_per_micro: part as f64,
        memory_bytes: sum + part,
    })
}

/// Where a layer's weights are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum At {
    /// Only on the host.
    Host,
    /// On the device, and changed since the last upload.
    Device,
    /// On both.
    Both,
    /// On the way to the device.
    Arriving,
    /// On the device and on the way to the host.
    Leaving,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct State {
    /// Time, in bytes that the link moves.
    now: u64,
    /// The next operation to start, from the first forward on.
    next: usize,
    /// When the one that runs ends.
    until: Option<u64>,
    /// The layer on the link and the end of its transfer, to the device and to the host.
    down: Option<(usize, u64)>,
    up: Option<(usize, u64)>,
    at: Vec<At>,
}

/// Decides whether a step exists that takes exactly as long as its operations, without splitting a
/// layer. None if this would examine more than `most` states. Times are rounded to the link's time
/// for one byte. Meant for at most a dozen layers with weights.
pub fn without_pause(instance: &Instance, most: usize) -> Option<bool> {
    let n_layers = instance.layers.len();
    let ops = instance.ops();
    let ops: Vec<Op> = ops[n_layers..]
        .iter()
        .chain(&ops[..n_layers])
        .copied()
        .collect();
    let heavy: Vec<usize> = (0..n_layers)
        .filter(|&layer| 0 < instance.weight(layer))
        .collect();
    let mut left = most;
    for code in 0..1u64.checked_shl(heavy.len() as u32)? {
        let mut at = vec![At::Device; n_layers];
        heavy
            .iter()
            .enumerate()
            .filter(|(k, _)| code >> k & 1 == 1)
            .for_each(|(_, &layer)| at[layer] = At::Host);
        let start = State {
            now: 0,
            next: 0,
            until: None,
            down: None,
            up: None,
            at,
        };
        if search(instance, &ops, start, &mut left)? {
            return Some(true);
        }
    }
    Some(false)
}

/// Can a step start from `start` and come back to it without a pause?
fn search(instance: &Instance, ops: &[Op], start: State, left: &mut usize) -> Option<bool> {
    let limit = instance.memory_bytes;
    let weights = |at: &[At]| -> u64 {
        let there = at.iter().enumerate().filter(|(_, at)| **at != At::Host);
        there.map(|(layer, _)| instance.weight(layer)).sum()
    };
    let ticks = |micros: f64| (micros * instance.bytes_per_micro).round() as u64;
    let begin = start.at.clone();
    // Without a pause, the starts of operations are fixed; the last entry is the end.
    let mut clock = vec![0];
    ops.iter()
        .for_each(|op| clock.push(clock[clock.len() - 1] + ticks(op.micros)));
    // Enough time must remain for prefetches that an operation needs, and for uploads before the
    // end.
    let in_time = |state: &State| {
        let mut missing = 0;
        let in_need = (state.next..ops.len()).all(|j| {
            let layer = ops[j].layer;
            let first = ops[state.next..j].iter().all(|op| op.layer != layer);
            if first && state.at[layer] == At::Host {
                missing += instance.weight(layer);
            }
            !first || missing == 0 || state.at[layer] != At::Host || state.now + missing <= clock[j]
        });
        let mut leaving = 0;
        let until = clock[ops.len()];
        let out = (0..ops.len())
            .rev()
            .filter(|&j| ops[j].backward && begin[ops[j].layer] == At::Host)
            .all(|j| {
                let layer = ops[j].layer;
                let ready = clock[j] + ticks(ops[j].micros);
                leaving += match state.at[layer] {
                    // It has left the device after its backward.
                    At::Host | At::Both
                        if j < state.next && !(j + 1 == state.next && state.until.is_some()) =>
                    {
                        0
                    }
                    At::Leaving if j < state.next => state.up.map_or(0, |(_, end)| end - state.now),
                    _ => instance.weight(layer),
                };
                leaving == 0 || ready.max(state.now) + leaving <= until
            });
        in_need && out
    };
    let mut seen = BTreeSet::new();
    let mut open = vec![start];
    while let Some(state) = open.pop() {
        if !seen.insert(state.clone()) {
            continue;
        }
        *left = left.checked_sub(1)?;
        let running = state.until.map(|_| &ops[state.next - 1]);
        let (activations, busy) = match (running, state.next) {
            (Some(op), _) => (op.held_bytes, Some(op.layer)),
            (None, 0) => (0, None),
            (None, next) => (ops[next - 1].left_bytes, None),
        };
        let used = weights(&state.at) + activations;
        if limit < used || !in_time(&state) {
            continue;
        }
        // Everything that may start now, in addition to starting nothing.
        for layer in (0..state.at.len()).filter(|&layer| 0 < instance.weight(layer)) {
            let mut next = state.clone();
            let end = state.now + instance.weight(layer);
            match state.at[layer] {
                At::Both if busy != Some(layer) => next.at[layer] = At::Host,
                At::Host if state.down.is_none() && used + instance.weight(layer) <= limit => {
                    (next.at[layer], next.down) = (At::Arriving, Some((layer, end)));
                }
                // A running backward changes them.
                At::Device
                    if state.up.is_none()
                        && !(busy == Some(layer) && running.is_some_and(|op| op.backward)) =>
                {
                    (next.at[layer], next.up) = (At::Leaving, Some((layer, end)));
                }
                _ => continue,
            }
            open.push(next);
        }
        let mut next = state.clone();
        let Some(until) = state.until else {
            let Some(op) = ops.get(state.next) else {
                // The same state as at the start, or a better one: bytes may be on both sides.
                let idle = state.up.is_none() && state.down.is_none();
                let same = state.at.iter().zip(&begin);
                if idle
                    && same
                        .into_iter()
                        .all(|(now, then)| now == then || (*now, *then) == (At::Both, At::Device))
                {
                    return Some(true);
                }
                continue;
            };
            let there = match state.at[op.layer] {
                At::Device | At::Both => true,
                // A forward only reads the bytes being sent; a backward would change them.
                At::Leaving => !op.backward,
                At::Host | At::Arriving => false,
            };
            if there && weights(&state.at) + op.held_bytes <= limit {
                next.next += 1;
                next.until = Some(state.now + ticks(op.micros));
                open.push(settle(next, ops));
            }
            continue;
        };
        next.now = [state.down, state.up]
            .into_iter()
            .flatten()
            .fold(until, |least, (_, end)| least.min(end));
        open.push(settle(next, ops));
    }
    Some(false)
}

/// Ends the operations and transfers that end now.
fn settle(mut state: State, ops: &[Op]) -> State {
    if let Some((layer, end)) = state.down
        && end <= state.now
    {
        (state.down, state.at[layer]) = (None, At::Both);
    }
    if let Some((layer, end)) = state.up
        && end <= state.now
    {
        (state.up, state.at[layer]) = (None, At::Both);
    }
    if state.until.is_some_and(|until| until <= state.now) {
        state.until = None;
        let op = &ops[state.next - 1];
        if op.backward {
            state.at[op.layer] = At::Device;
        }
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Can the numbers be divided into sets with this sum?
    fn parts(numbers: &[u64], part: u64) -> bool {
        let Some((&first, rest)) = numbers.split_first() else {
            return true;
        };
        (0..1u32 << rest.len()).any(|set| {
            let chosen = |k: usize| set >> k & 1 == 1;
            let sum = first
                + (0..rest.len())
                    .filter(|&k| chosen(k))
                    .map(|k| rest[k])
                    .sum::<u64>();
            let others: Vec<u64> = (0..rest.len())
                .filter(|&k| !chosen(k))
                .map(|k| rest[k])
                .collect();
            sum == part && parts(&others, part)
        })
    }

    #[test]
    fn theorem_1() {
        for numbers in [
            [4u64, 4, 5, 4, 4, 5],
            [4, 4, 4, 4, 4, 6],
            [5, 5, 5, 5, 7, 7],
            [6, 6, 6, 7, 7, 8],
        ] {
            let part = numbers.iter().sum::<u64>() / 2;
            let instance = three_partition(&numbers).unwrap();
            assert_eq!(instance.compute_micros(), 4.0);
            assert_eq!(
                without_pause(&instance, 20_000_000),
                Some(parts(&numbers, part)),
                "{numbers:?}"
            );
        }
    }

    #[test]
    fn a_search_that_is_too_long_says_so() {
        let instance = three_partition(&[4, 4, 4, 4, 4, 6]).unwrap();
        assert_eq!(without_pause(&instance, 100), None);
        assert_eq!(three_partition(&[1, 2]), None);
        assert_eq!(three_partition(&[1, 2, 3, 4, 5, 6]), None);
    }
}
