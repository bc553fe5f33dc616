//! Greedy+: turns the optimum of the relaxed problem into a schedule.
//!
//! 1. Tries whole layers by [`select::windowed`], without a pause. If this fits, it is optimal, and
//!    takes milliseconds.
//! 2. Otherwise [`bound::relax`] computes how much of each layer leaves in which gap and where the
//!    pauses are. [`timetable`] finds times. A piece in transfer occupies its place from start to
//!    end, which the relaxed plan ignores. So if memory is exceeded somewhere, the relaxed problem
//!    is solved again with a reserve there. Then pauses are shortened one by one, as long as the
//!    timetable says that everything fits.
//! 3. If the step is further from the bound than [`CLOSE`], pieces are made smaller. If it still
//!    is, the paper's algorithms may be better. This happens for chains of a few layers, where a
//!    piece is a large part of the whole.

use super::timetable::{Draft, Timetable, timetable};
use super::{Algorithm, Instance, Op, Schedule, bound, lists, select, whole_layers};

/// The relative distance to the bound that is good enough.
const CLOSE: f64 = 0.005;
/// The number of pieces of the largest layer, at first and at most.
const PIECES: [u64; 2] = [32, 128];
/// The smallest piece. For smaller ones the start-up cost of a transfer would matter.
const LEAST_PIECE: u64 = 1 << 20;
/// Rounds of reserves.
const ROUNDS: usize = 10;

/// The starts of operations with these pauses after them; the period comes last.
fn starts(ops: &[Op], idle: &[f64]) -> Vec<f64> {
    let mut starts = vec![0.0];
    ops.iter()
        .zip(idle)
        .for_each(|(op, idle)| starts.push(starts[starts.len() - 1] + op.micros + idle));
    starts
}

/// The better timetable for these pauses: with early uploads last, or first.
fn best(
    instance: &Instance,
    ops: &[Op],
    idle: &[f64],
    away: &[[u64; 2]],
    piece_bytes: u64,
) -> Timetable {
    let starts = starts(ops, idle);
    let (period, starts) = starts.split_last().expect("a chain should have operations");
    let draft = |early_first| Draft {
        starts,
        period: *period,
        away,
        piece_bytes,
        early_first,
    };
    let first = timetable(instance, ops, &draft(false));
    if excess(&first) == 0 || away.iter().all(|away| away[1] <= away[0]) {
        return first;
    }
    let second = timetable(instance, ops, &draft(true));
    if excess(&second) < excess(&first) {
        second
    } else {
        first
    }
}

fn excess(timetable: &Timetable) -> u64 {
    timetable.over.iter().sum()
}

/// A schedule, and the bound if it was computed, µs.
pub(super) fn fit(instance: &Instance, ops: &[Op]) -> (Schedule, Option<f64>) {
    let largest = instance
        .layers
        .iter()
        .map(|layer| layer.weight_bytes)
        .max()
        .unwrap_or(0);
    let pieces = |n: u64| (largest / n).max(LEAST_PIECE.min(largest)).max(1);
    if let Some(schedule) = whole(instance, ops, pieces(8)) {
        return (schedule, None);
    }
    let relaxed = bound::relax(instance, ops, &vec![0.0; ops.len()]);
    let mut schedule = lists::layer_to_layer(instance, ops);
    // The reserve for larger pieces, in proportion, is a good start for smaller ones.
    let mut reserve = vec![0.0; ops.len()];
    for n in PIECES {
        reserve.iter_mut().for_each(|reserve| *reserve *= 0.25);
        if let Some(found) = pauses(instance, ops, &relaxed, &mut reserve, pieces(n)) {
            schedule = shorter(schedule, found);
        }
        if schedule.period <= relaxed.micros * (1.0 + CLOSE) || pieces(n) <= LEAST_PIECE {
            break;
        }
    }
    if relaxed.micros * (1.0 + CLOSE) < schedule.period {
        for algorithm in [
            Algorithm::Greedy,
            Algorithm::AutoSwapSwdoa,
            Algorithm::FirstHalf,
        ] {
            if let Some(found) = whole_layers(instance, ops, algorithm) {
                schedule = shorter(schedule, found);
            }
        }
    }
    (schedule, Some(relaxed.micros))
}

/// The shorter of two; the first, if they are equal.
fn shorter(first: Schedule, second: Schedule) -> Schedule {
    if second.period < first.period {
        second
    } else {
        first
    }
}

/// Whole layers without a pause.
fn whole(instance: &Instance, ops: &[Op], piece_bytes: u64) -> Option<Schedule> {
    let idle = vec![0.0; ops.len()];
    for windows in [2.0, 1.0] {
        let mut reserve = vec![0.0; ops.len()];
        for _ in 0..3 {
            let Some(away) = select::windowed(instance, ops, &reserve, windows) else {
                break;
            };
            // All bytes that leave must come back within a step.
            let moved: u64 = away.iter().flatten().sum();
            if instance.compute_micros() < moved as f64 / instance.bytes_per_micro {
                break;
            }
            let timetable = best(instance, ops, &idle, &away, piece_bytes);
            if excess(&timetable) == 0 {
                return Some(timetable.schedule);
            }
            reserve
                .iter_mut()
                .zip(&timetable.over)
                .for_each(|(reserve, over)| *reserve += *over as f64);
        }
    }
    None
}

/// The relaxed plan in pieces.
fn pauses(
    instance: &Instance,
    ops: &[Op],
    relaxed: &bound::Relaxed,
    reserve: &mut [f64],
    piece_bytes: u64,
) -> Option<Schedule> {
    let mut plan = match reserve.iter().all(|&reserve| reserve == 0.0) {
        true => relaxed.clone(),
        false => bound::relax(instance, ops, reserve),
    };
    for round in 0..ROUNDS {
        let away: Vec<[u64; 2]> = (0..instance.layers.len())
            .map(|layer| {
                plan.away[layer]
                    .map(|bytes| (bytes.max(0.0).round() as u64).min(instance.weight(layer)))
            })
            .collect();
        let timetable = best(instance, ops, &plan.idle, &away, piece_bytes);
        if excess(&timetable) == 0 {
            return Some(timetable.schedule);
        }
        // A little more each time, so that the last bytes do not need many rounds.
        let more = |over: u64| over as f64 * (1.0 + 0.1 * round as f64) + 0.01 * piece_bytes as f64;
        let over = timetable
            .over
            .iter()
            .zip(reserve.iter_mut())
            .filter(|(over, _)| 0 < **over);
        over.for_each(|(&over, reserve)| *reserve += more(over));
        plan = bound::relax(instance, ops, reserve);
    }
    None
}
