//! Checks a schedule. It shares only types with the algorithms that make schedules.
//!
//! It proves these properties of a cyclic [`Schedule`]. Operations run one at a time, in order, for
//! their full duration. Each direction of the link carries one transfer at a time, at most at its
//! bandwidth. When an operation runs, all bytes of its layer are on the device. Deleted bytes were
//! uploaded after their layer's backward, and bytes that are away return once. At every moment the
//! activations, the gradient, the weights and the destinations of arriving bytes fit into the
//! memory. Times are compared with a tolerance of one billionth of the period, and transfers with a
//! tolerance of one byte.

use super::{Absence, Instance, Schedule, Transfer, Way};
use std::ops::Range;
use thiserror::Error;

/// An error in a schedule. Operations are counted from 0, in the order in which they run; times are
/// in µs.
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
/// The first error.
pub fn validate(instance: &Instance, schedule: &Schedule) -> Result<u64, Fault> {
    let cycle = Cycle::new(instance, schedule)?;
    cycle.check_operations()?;
    for way in [Way::ToDevice, Way::ToHost] {
        cycle.check_link(way)?;
    }
    let away = cycle.check_absences()?;
    cycle.check_uploads(&away)?;
    cycle.peak()
}

/// Bytes that are away, from and until.
type Away = (Range<u64>, f64, f64);

/// A schedule with its problem: what each check reads.
struct Cycle<'a> {
    instance: &'a Instance,
    schedule: &'a Schedule,
    period: f64,
    /// Times that differ by at most this are equal, µs.
    close: f64,
    /// The transfers of each layer, in the schedule's order.
    transfers: Vec<Vec<&'a Transfer>>,
}

impl<'a> Cycle<'a> {
    /// A fault if the period is not a positive time, or if an operation has no start.
    fn new(instance: &'a Instance, schedule: &'a Schedule) -> Result<Cycle<'a>, Fault> {
        let period = schedule.period;
        if !(period.is_finite() && period >= 0.0) {
            return Err(Fault::Period(period));
        }
        let operations = 2 * instance.layers.len();
        if schedule.starts.len() != operations {
            return Err(Fault::Starts {
                starts: schedule.starts.len(),
                operations,
            });
        }
        // A transfer of a layer that does not exist is a fault of its link.
        let mut transfers = vec![vec![]; instance.layers.len()];
        for transfer in &schedule.transfers {
            if let Some(transfers) = transfers.get_mut(transfer.layer) {
                transfers.push(transfer);
            }
        }
        Ok(Cycle {
            instance,
            schedule,
            period,
            close: 1e-9 * period,
            transfers,
        })
    }

    fn n_layers(&self) -> usize {
        self.instance.layers.len()
    }

    /// The time of operation `j`, µs.
    fn micros(&self, j: usize) -> f64 {
        let n_layers = self.n_layers();
        if j < n_layers {
            self.instance.layers[n_layers - 1 - j].backward_micros
        } else {
            self.instance.layers[j - n_layers].forward_micros
        }
    }

    /// The start and the end of operation `j`, µs.
    fn operation(&self, j: usize) -> (f64, f64) {
        let start = self.schedule.starts[j];
        (start, start + self.micros(j))
    }

    fn backward(&self, layer: usize) -> (f64, f64) {
        self.operation(self.n_layers() - 1 - layer)
    }

    fn forward(&self, layer: usize) -> (f64, f64) {
        self.operation(self.n_layers() + layer)
    }

    /// True if a layer has these bytes, and the range is not empty.
    fn has(&self, layer: usize, bytes: &Range<u64>) -> bool {
        let layer = self.instance.layers.get(layer);
        bytes.start < bytes.end && layer.is_some_and(|layer| bytes.end <= layer.weight_bytes)
    }

    /// True if [a, b) and [c, d) overlap when both repeat every period.
    fn meet(&self, (a, b): (f64, f64), (c, d): (f64, f64)) -> bool {
        (-3..=3).any(|turn| {
            let by = turn as f64 * self.period;
            a.max(c + by) + self.close < b.min(d + by)
        })
    }

    /// True if a moment lies strictly between two others, when it repeats every period.
    fn is_within(&self, at: f64, (a, b): (f64, f64)) -> bool {
        (-3..=3).any(|turn| {
            let at = at + turn as f64 * self.period;
            a + self.close < at && at < b - self.close
        })
    }

    /// True if an operation runs in an interval. An operation without time counts if it is strictly
    /// inside.
    fn touches(&self, (a, b): (f64, f64), interval: (f64, f64)) -> bool {
        self.meet((a, b), interval) || self.is_within(0.5 * (a + b), interval)
    }

    /// The transfers of a layer in one direction.
    fn transfers(&self, layer: usize, way: Way) -> impl Iterator<Item = &'a Transfer> {
        let transfers = self.transfers[layer].iter().copied();
        transfers.filter(move |transfer| transfer.way == way)
    }

    /// Operations run one at a time, in order.
    fn check_operations(&self) -> Result<(), Fault> {
        let starts = &self.schedule.starts;
        for j in 0..starts.len() {
            let (start, end) = self.operation(j);
            let next = starts.get(j + 1).copied().unwrap_or(self.period);
            if !(-self.close <= start && end <= next + self.close) {
                return Err(Fault::Overlap {
                    operation: j,
                    start,
                    end,
                    next,
                });
            }
        }
        Ok(())
    }

    /// The link carries one transfer at a time in this direction, at most at its bandwidth.
    fn check_link(&self, way: Way) -> Result<(), Fault> {
        let transfers = self.schedule.transfers.iter();
        let mut busy: Vec<&Transfer> = transfers.filter(|transfer| transfer.way == way).collect();
        busy.sort_by(|a, b| a.start.total_cmp(&b.start));
        for (k, &transfer) in busy.iter().enumerate() {
            let (start, end) = (transfer.start, transfer.end);
            let timely = 0.0 <= start && start <= self.period && start <= end;
            if !(self.has(transfer.layer, &transfer.bytes) && timely) {
                return Err(Fault::NoTransfer(transfer.clone()));
            }
            let bytes = transfer.bytes.end - transfer.bytes.start;
            let takes = (bytes - 1) as f64 / self.instance.bytes_per_micro;
            if end - start < takes - self.close {
                let transfer = transfer.clone();
                return Err(Fault::TooFast { transfer, takes });
            }
            let next = busy
                .get(k + 1)
                .map_or(busy[0].start + self.period, |next| next.start);
            if next + self.close < end {
                let transfer = transfer.clone();
                return Err(Fault::LinkBusy { transfer, next });
            }
        }
        Ok(())
    }

    /// Every absence begins with bytes that are on the host and ends before they are needed.
    /// Returns the absences of each layer.
    fn check_absences(&self) -> Result<Vec<Vec<Away>>, Fault> {
        let mut away: Vec<Vec<Away>> = vec![Vec::new(); self.n_layers()];
        for absence in &self.schedule.absences {
            let (layer, bytes) = (absence.layer, &absence.bytes);
            let timely =
                0.0 <= absence.from && absence.from <= absence.until && absence.until.is_finite();
            if !(self.has(layer, bytes) && timely) {
                return Err(Fault::NoAbsence(absence.clone()));
            }
            let arrived = self.arrival(absence)?;
            let gone = (absence.from, arrived);
            if self.period + self.close < arrived - absence.from {
                return Err(Fault::TooLong(absence.clone()));
            }
            let operations = [
                ("forward", self.forward(layer)),
                ("backward", self.backward(layer)),
            ];
            for (what, at) in operations {
                if self.touches(at, gone) {
                    return Err(Fault::Missed {
                        absence: absence.clone(),
                        what,
                        at,
                        arrived,
                    });
                }
            }
            self.check_uploaded(absence)?;
            let away = &mut away[layer];
            let mut others = away.iter();
            if others.any(|(other, from, until)| {
                overlap(other, bytes) && self.meet(gone, (*from, *until))
            }) {
                return Err(Fault::AwayAlready(absence.clone()));
            }
            away.push((bytes.clone(), gone.0, gone.1));
        }
        Ok(away)
    }

    /// When the last byte of an absence is back, µs. Every byte comes back by one prefetch that
    /// begins when the absence ends. Before the prefetch ends the bytes cannot be used.
    fn arrival(&self, absence: &Absence) -> Result<f64, Fault> {
        let bytes = &absence.bytes;
        let period = self.period.max(f64::MIN_POSITIVE);
        let begins = |transfer: &&Transfer| {
            let late = (transfer.start - absence.until).rem_euclid(period);
            late <= self.close || self.period - late <= self.close
        };
        let mut prefetches: Vec<&Transfer> = self
            .transfers(absence.layer, Way::ToDevice)
            .filter(begins)
            .filter(|transfer| overlap(&transfer.bytes, bytes))
            .collect();
        prefetches.sort_by_key(|transfer| transfer.bytes.start);
        let (mut at, mut arrived) = (bytes.start, absence.until);
        for transfer in prefetches {
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
        Ok(arrived)
    }

    /// The bytes of an absence were uploaded before the deletion, and after the last backward that
    /// ended before it.
    fn check_uploaded(&self, absence: &Absence) -> Result<(), Fault> {
        let (_, changed) = self.backward(absence.layer);
        let steps = ((absence.from + self.close - changed) / self.period).floor();
        let changed = changed + steps * self.period;
        let is_fresh = |transfer: &&Transfer| {
            (-3..=3).any(|turn| {
                let by = turn as f64 * self.period;
                changed - self.close <= transfer.start + by
                    && transfer.end + by <= absence.from + self.close
            })
        };
        let mut uploads: Vec<&Transfer> = self
            .transfers(absence.layer, Way::ToHost)
            .filter(is_fresh)
            .collect();
        uploads.sort_by_key(|transfer| transfer.bytes.start);
        let mut at = absence.bytes.start;
        for transfer in uploads {
            if transfer.bytes.start <= at {
                at = at.max(transfer.bytes.end);
            }
        }
        if at < absence.bytes.end {
            return Err(Fault::NotUploaded {
                absence: absence.clone(),
                byte: at,
            });
        }
        Ok(())
    }

    /// Uploads send bytes that are on the device and that no backward changes during the upload.
    fn check_uploads(&self, away: &[Vec<Away>]) -> Result<(), Fault> {
        for (layer, away) in away.iter().enumerate() {
            for transfer in self.transfers(layer, Way::ToHost) {
                let time = (transfer.start, transfer.end);
                if self.meet(time, self.backward(layer)) {
                    return Err(Fault::DuringBackward(transfer.clone()));
                }
                let absent = away.iter().find(|(bytes, from, until)| {
                    overlap(bytes, &transfer.bytes) && self.meet(time, (*from, *until))
                });
                if let Some(absent) = absent {
                    return Err(Fault::SendsAway {
                        transfer: transfer.clone(),
                        away: absent.clone(),
                    });
                }
            }
        }
        Ok(())
    }

    /// The peak of the memory, bytes: all weights minus the bytes that are away, plus activations
    /// and gradients of the operations. A fault if it exceeds the device's memory.
    fn peak(&self) -> Result<u64, Fault> {
        let weights: u64 = self.instance.layers.iter().map(|l| l.weight_bytes).sum();
        let activations = self.activations();
        let mut level = i128::from(weights) + i128::from(activations[self.n_layers()]);
        let mut changes = vec![];
        for absence in &self.schedule.absences {
            level -= self.away_at_start(absence);
            changes.extend(self.changes_by_absence(absence));
        }
        changes.extend(self.changes_by_operations(&activations));
        // Stable: changes of the same moment and rank stay in this order.
        changes.sort_by(|a, b| a.when.total_cmp(&b.when).then(a.rank.cmp(&b.rank)));

        let memory_bytes = self.instance.memory_bytes;
        let mut peak = level;
        for change in changes {
            level += change.bytes;
            peak = peak.max(level);
            if i128::from(memory_bytes) < level {
                return Err(Fault::TooMuch {
                    when: change.when,
                    bytes: level,
                    memory_bytes,
                });
            }
        }
        u64::try_from(peak).map_err(|_| Fault::MoreAway(peak))
    }

    /// The bytes of activations that the first forwards leave, by the number of forwards.
    fn activations(&self) -> Vec<u64> {
        let mut sums = vec![0];
        for layer in &self.instance.layers {
            sums.push(sums[sums.len() - 1] + layer.activation_bytes);
        }
        sums
    }

    /// True for an operation that takes no time, within the tolerance.
    fn is_brief(&self, j: usize) -> bool {
        self.micros(j) <= 2.0 * self.close
    }

    /// The memory that operations take and release: activations and gradients.
    fn changes_by_operations(&self, activations: &[u64]) -> Vec<Change> {
        let n_layers = self.n_layers();
        let mut changes = vec![];
        let mut held = i128::from(activations[n_layers]);
        for (j, &start) in self.schedule.starts.iter().enumerate() {
            let (during, then) = if j < n_layers {
                let layer = n_layers - 1 - j;
                let gradient = self.instance.layers[layer].weight_bytes;
                (activations[layer + 1] + gradient, activations[layer])
            } else {
                let left = activations[j - n_layers + 1];
                (left, left)
            };
            let (during, then) = (i128::from(during), i128::from(then));
            changes.push(Change {
                when: start + self.close,
                rank: 2 * j + 1,
                bytes: during - held,
            });
            let (when, rank) = if self.is_brief(j) {
                (start + self.close, 2 * j + 2)
            } else {
                (start + self.micros(j), 0)
            };
            let bytes = then - during;
            changes.push(Change { when, rank, bytes });
            held = then;
        }
        changes
    }

    /// The end of an absence, counted from the start of the period in which it begins, and the
    /// number of period starts that it spans.
    fn turns(&self, absence: &Absence) -> (f64, f64) {
        let from = absence.from.rem_euclid(self.period);
        let until = from + (absence.until - absence.from);
        (until, (until / self.period).floor())
    }

    /// Bytes of an absence that are away when the period starts, counted once for each wrap.
    fn away_at_start(&self, absence: &Absence) -> i128 {
        let (_, turns) = self.turns(absence);
        i128::from(absence.bytes.end - absence.bytes.start) * turns as i128
    }

    /// The memory that an absence releases and takes.
    fn changes_by_absence(&self, absence: &Absence) -> [Change; 2] {
        let bytes = i128::from(absence.bytes.end - absence.bytes.start);
        let from = absence.from.rem_euclid(self.period);
        let (until, turns) = self.turns(absence);
        let starts = &self.schedule.starts;
        let n_layers = self.n_layers();
        let own = [n_layers - 1 - absence.layer, n_layers + absence.layer];
        // A deletion after a brief operation of its layer comes after the release of the operation.
        let brief = own
            .into_iter()
            .find(|&j| self.is_brief(j) && (from - starts[j]).abs() <= 2.0 * self.close);
        let (when, rank) = match brief {
            Some(j) => (starts[j] + self.close, 2 * j + 2),
            None => (from, 0),
        };
        [
            Change {
                when,
                rank,
                bytes: -bytes,
            },
            Change {
                when: until - turns * self.period + self.close,
                rank: 0,
                bytes,
            },
        ]
    }
}

/// A change of the memory in use. Times are inexact, so taken bytes count a little later than
/// released bytes. An operation of zero length takes and releases at the same moment. Then the rank
/// decides.
struct Change {
    /// µs.
    when: f64,
    /// At the same moment, the change with the lower rank comes first: 0, or a rank from the
    /// operation's position.
    rank: usize,
    bytes: i128,
}

/// True if two ranges share bytes.
fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}
