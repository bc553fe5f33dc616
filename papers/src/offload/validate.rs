//! Checks a schedule. It shares only types with the algorithms that make schedules, and reads the
//! problem anew.
//!
//! It proves of a cyclic [`Schedule`]: operations run one at a time, in order, for their full
//! duration; each direction of the link carries one transfer at a time, at most at its bandwidth;
//! an operation finds all bytes of its layer on the device; deleted bytes have been uploaded since
//! their layer's backward, and bytes that are away return once; at every moment the activations,
//! the gradient, the weights and the destinations of arriving bytes fit the memory. Times are
//! compared with a tolerance of one billionth of the period, and transfers with a tolerance of one
//! byte.

use super::{Absence, Instance, Schedule, Transfer, Way};
use std::ops::Range;
use thiserror::Error;

/// What is wrong with a schedule. Operations are counted from 0, in the order in which they run;
/// times are in µs.
#[derive(Clone, PartialEq, Debug, Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum Fault {
    #[error("the period is {0}")]
    Period(f64),
    #[error("{starts} starts for {operations} operations")]
    Starts { starts: usize, operations: usize },
    #[error("operation {operation} runs from {start} to {end}, and the next one starts at {next}")]
    Overlap {
        operation: usize,
        start: f64,
        end: f64,
        next: f64,
    },
    /// Bytes that the layer does not have, or times outside of the period.
    #[error("{0:?} makes no sense")]
    NoTransfer(Transfer),
    #[error("{transfer:?} is faster than the link: {takes}")]
    TooFast { transfer: Transfer, takes: f64 },
    #[error("{transfer:?} overlaps the next, at {next}")]
    LinkBusy { transfer: Transfer, next: f64 },
    /// Bytes that the layer does not have, or times in the wrong order.
    #[error("{0:?} makes no sense")]
    NoAbsence(Absence),
    #[error("{absence:?}: byte {byte} does not come back")]
    Lost { absence: Absence, byte: u64 },
    #[error("{0:?} is longer than a step")]
    TooLong(Absence),
    #[error("{absence:?}: its {what} at {at:?} does not find it; it is back at {arrived}")]
    Missed {
        absence: Absence,
        /// `forward` or `backward`.
        what: &'static str,
        /// From and to.
        at: (f64, f64),
        arrived: f64,
    },
    #[error("{absence:?}: byte {byte} is not on the host when it is deleted")]
    NotUploaded { absence: Absence, byte: u64 },
    #[error("{0:?}: away already")]
    AwayAlready(Absence),
    #[error("{0:?} runs during the layer's backward")]
    DuringBackward(Transfer),
    #[error("{transfer:?} sends what is away: {away:?}")]
    SendsAway {
        transfer: Transfer,
        /// Bytes, from and until.
        away: (Range<u64>, f64, f64),
    },
    #[error("at {when} µs {bytes} bytes are in use, and there are {memory_bytes}")]
    TooMuch {
        when: f64,
        bytes: i128,
        memory_bytes: u64,
    },
    #[error("more is away than there is: {0}")]
    MoreAway(i128),
}

/// Checks a schedule; its peak of memory in bytes if it is right.
///
/// # Errors
///
/// The first thing that is wrong.
pub fn validate(instance: &Instance, schedule: &Schedule) -> Result<u64, Fault> {
    let period = schedule.period;
    let n_layers = instance.layers.len();
    if !(period.is_finite() && 0.0 <= period) {
        return Err(Fault::Period(period));
    }
    let close = 1e-9 * period;
    let fits = |layer: usize, bytes: &Range<u64>| {
        layer < n_layers
            && bytes.start < bytes.end
            && bytes.end <= instance.layers[layer].weight_bytes
    };
    // Operations: one at a time, in order.
    if schedule.starts.len() != 2 * n_layers {
        return Err(Fault::Starts {
            starts: schedule.starts.len(),
            operations: 2 * n_layers,
        });
    }
    let micros = |j: usize| match j < n_layers {
        true => instance.layers[n_layers - 1 - j].backward_micros,
        false => instance.layers[j - n_layers].forward_micros,
    };
    for (j, &start) in schedule.starts.iter().enumerate() {
        let end = start + micros(j);
        let next = schedule.starts.get(j + 1).copied().unwrap_or(period);
        if !(-close <= start && end <= next + close) {
            return Err(Fault::Overlap {
                operation: j,
                start,
                end,
                next,
            });
        }
    }
    let backward = |layer: usize| {
        let j = n_layers - 1 - layer;
        (schedule.starts[j], schedule.starts[j] + micros(j))
    };
    let forward = |layer: usize| {
        (
            schedule.starts[n_layers + layer],
            schedule.starts[n_layers + layer] + micros(n_layers + layer),
        )
    };
    // The link: one transfer at a time each way.
    for way in [Way::ToDevice, Way::ToHost] {
        let mut busy: Vec<&Transfer> = schedule
            .transfers
            .iter()
            .filter(|transfer| transfer.way == way)
            .collect();
        busy.sort_by(|a, b| a.start.total_cmp(&b.start));
        for (k, &transfer) in busy.iter().enumerate() {
            let Transfer {
                layer,
                bytes,
                start,
                end,
                ..
            } = transfer;
            if !(fits(*layer, bytes) && 0.0 <= *start && *start <= period && start <= end) {
                return Err(Fault::NoTransfer(transfer.clone()));
            }
            let takes = (bytes.end - bytes.start - 1) as f64 / instance.bytes_per_micro;
            if end - start < takes - close {
                let transfer = transfer.clone();
                return Err(Fault::TooFast { transfer, takes });
            }
            let next = busy
                .get(k + 1)
                .map_or(busy[0].start + period, |next| next.start);
            if next + close < *end {
                let transfer = transfer.clone();
                return Err(Fault::LinkBusy { transfer, next });
            }
        }
    }
    // Do [a, b) and [c, d) meet, when both repeat every period?
    let meet = |(a, b): (f64, f64), (c, d): (f64, f64)| {
        (-3..=3).any(|turn| {
            let by = turn as f64 * period;
            a.max(c + by) + close < b.min(d + by)
        })
    };
    // An instant strictly inside counts as well: operations may take no time.
    let within = |at: f64, (a, b): (f64, f64)| {
        (-3..=3).any(|turn| {
            let at = at + turn as f64 * period;
            a + close < at && at < b - close
        })
    };
    let touches = |(a, b): (f64, f64), interval: (f64, f64)| {
        meet((a, b), interval) || within(0.5 * (a + b), interval)
    };
    let mut away: Vec<Vec<(Range<u64>, f64, f64)>> = vec![Vec::new(); n_layers];
    let mut prefetches: Vec<Vec<&Transfer>> = vec![Vec::new(); n_layers];
    let mut uploads: Vec<Vec<&Transfer>> = vec![Vec::new(); n_layers];
    for transfer in &schedule.transfers {
        match transfer.way {
            Way::ToDevice => prefetches[transfer.layer].push(transfer),
            Way::ToHost => uploads[transfer.layer].push(transfer),
        }
    }
    for absence in &schedule.absences {
        let (layer, bytes) = (absence.layer, &absence.bytes);
        let timely =
            0.0 <= absence.from && absence.from <= absence.until && absence.until.is_finite();
        if !(fits(layer, bytes) && timely) {
            return Err(Fault::NoAbsence(absence.clone()));
        }
        // Every byte comes back by one prefetch that begins as the absence ends; until its end they
        // are of no use.
        let mut arrived = absence.until;
        let mut covered: Vec<_> = prefetches[layer]
            .iter()
            .filter(|transfer| {
                let late =
                    (transfer.start - absence.until).rem_euclid(period.max(f64::MIN_POSITIVE));
                late <= close || period - late <= close
            })
            .filter(|transfer| transfer.bytes.start < bytes.end && bytes.start < transfer.bytes.end)
            .collect();
        covered.sort_by_key(|transfer| transfer.bytes.start);
        let mut at = bytes.start;
        for transfer in covered {
            if transfer.bytes.start <= at {
                at = at.max(transfer.bytes.end);
                arrived = arrived.max(absence.until + transfer.end - transfer.start);
            }
        }
        if at < bytes.end {
            return Err(Fault::Lost {
                absence: absence.clone(),
                byte: at,
            });
        }
        let gone = (absence.from, arrived);
        if period + close < arrived - absence.from {
            return Err(Fault::TooLong(absence.clone()));
        }
        for (what, op) in [("forward", forward(layer)), ("backward", backward(layer))] {
            if touches(op, gone) {
                return Err(Fault::Missed {
                    absence: absence.clone(),
                    what,
                    at: op,
                    arrived,
                });
            }
        }
        // Uploaded since the backward that ended last before the deletion, and before the deletion.
        let changed = backward(layer).1;
        let changed = changed + ((absence.from + close - changed) / period).floor() * period;
        let mut at = bytes.start;
        let mut sorted = uploads[layer].clone();
        sorted.sort_by_key(|transfer| transfer.bytes.start);
        for transfer in sorted {
            let fresh = (-3..=3).any(|turn| {
                let by = turn as f64 * period;
                changed - close <= transfer.start + by && transfer.end + by <= absence.from + close
            });
            if fresh && transfer.bytes.start <= at {
                at = at.max(transfer.bytes.end);
            }
        }
        if at < bytes.end {
            return Err(Fault::NotUploaded {
                absence: absence.clone(),
                byte: at,
            });
        }
        for (other, from, until) in &away[layer] {
            if other.start < bytes.end && bytes.start < other.end && meet(gone, (*from, *until)) {
                return Err(Fault::AwayAlready(absence.clone()));
            }
        }
        away[layer].push((bytes.clone(), gone.0, gone.1));
    }
    for (layer, uploads) in uploads.iter().enumerate() {
        for transfer in uploads {
            if meet((transfer.start, transfer.end), backward(layer)) {
                return Err(Fault::DuringBackward((*transfer).clone()));
            }
            let absent = away[layer].iter().find(|(bytes, from, until)| {
                bytes.start < transfer.bytes.end
                    && transfer.bytes.start < bytes.end
                    && meet((transfer.start, transfer.end), (*from, *until))
            });
            if let Some(absent) = absent {
                return Err(Fault::SendsAway {
                    transfer: (*transfer).clone(),
                    away: absent.clone(),
                });
            }
        }
    }
    // Memory: all weights minus those that are away, plus activations and gradients of the
    // operations.
    let weights: u64 = instance.layers.iter().map(|layer| layer.weight_bytes).sum();
    let mut level = i128::from(weights);
    // (time, operation if it matters, change in bytes). Times are inexact, so bytes that are taken
    // count a little later than bytes that are released. An operation of zero length takes and
    // releases at the same moment. Then their order decides, and deletions after it follow it.
    let brief = |j: usize| micros(j) <= 2.0 * close;
    let mut changes: Vec<(f64, usize, i128)> = Vec::new();
    for absence in &schedule.absences {
        let bytes = i128::from(absence.bytes.end - absence.bytes.start);
        let from = absence.from.rem_euclid(period);
        let until = from + (absence.until - absence.from);
        let turns = (until / period).floor();
        // It spans the start of a period as often as it wraps.
        level -= bytes * turns as i128;
        let own = [n_layers - 1 - absence.layer, n_layers + absence.layer];
        match own
            .into_iter()
            .find(|&j| brief(j) && (from - schedule.starts[j]).abs() <= 2.0 * close)
        {
            Some(j) => changes.push((schedule.starts[j] + close, 2 * j + 2, -bytes)),
            None => changes.push((from, 0, -bytes)),
        }
        changes.push((until - turns * period + close, 0, bytes));
    }
    let mut activations = vec![0u64];
    instance.layers.iter().for_each(|layer| {
        activations.push(activations[activations.len() - 1] + layer.activation_bytes)
    });
    let mut held = i128::from(activations[n_layers]);
    level += held;
    for (j, &start) in schedule.starts.iter().enumerate() {
        let (during, then) = match j < n_layers {
            true => {
                let layer = n_layers - 1 - j;
                (
                    activations[layer + 1] + instance.layers[layer].weight_bytes,
                    activations[layer],
                )
            }
            false => (activations[j - n_layers + 1], activations[j - n_layers + 1]),
        };
        let (during, then) = (i128::from(during), i128::from(then));
        changes.push((start + close, 2 * j + 1, during - held));
        match brief(j) {
            true => changes.push((start + close, 2 * j + 2, then - during)),
            false => changes.push((start + micros(j), 0, then - during)),
        }
        held = then;
    }
    changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut peak = level;
    for (when, _, by) in changes {
        level += by;
        peak = peak.max(level);
        if i128::from(instance.memory_bytes) < level {
            return Err(Fault::TooMuch {
                when,
                bytes: level,
                memory_bytes: instance.memory_bytes,
            });
        }
    }
    u64::try_from(peak).map_err(|_| Fault::MoreAway(peak))
}
