//! Schedules of whole layers, with each transfer and operation as soon as possible: the paper's
//! Algorithm 2, and layer to layer.
//!
//! Prefetches have the order in which they are needed, uploads the order in which their bytes are
//! ready. A prefetch waits for the link and for its place in memory. An operation waits for its
//! weights, for the operation before it, and for its place. The cycle is cut at its last backward:
//! a number of prefetches ("the cut") run at the end of the step before, and all other transfers
//! begin and end within the step. The best of all cuts is returned.

use super::select::Away;
use super::{Absence, Gap, Instance, Op, Schedule, Transfer, Way};

/// A step that is being scheduled.
struct Step<'a> {
    instance: &'a Instance,
    ops: &'a [Op],
    starts: Vec<f64>,
    transfers: Vec<Transfer>,
    absences: Vec<Absence>,
    /// When memory is taken and released: ascending; at the same time, releases come first.
    changes: Vec<(f64, i64)>,
    /// The memory in use after all changes.
    level: i64,
    /// The end of the operation before.
    ready: f64,
    /// The bytes that it leaves.
    left: i64,
    /// When the link is free, to the device and to the host.
    to_device: f64,
    to_host: f64,
    /// The shortest time of an operation, µs: nearly zero.
    instant: f64,
}

impl Step<'_> {
    /// The first time from `at` on after which `bytes` more always fit, given the changes so far.
    fn fits(&self, at: f64, bytes: i64) -> Option<f64> {
        let limit = self.instance.memory_bytes as i64;
        let mut level = self.level;
        if limit < level + bytes {
            return None;
        }
        for &(when, by) in self.changes.iter().rev() {
            if when <= at {
                return Some(at);
            }
            level -= by;
            if limit < level + bytes {
                return Some(when);
            }
        }
        Some(at)
    }

    fn change(&mut self, at: f64, by: i64) {
        let key = (at, 0 < by);
        let place = self
            .changes
            .partition_point(|&(when, by)| (when, 0 < by) <= key);
        self.changes.insert(place, (at, by));
        self.level += by;
    }

    fn transfer(&mut self, layer: usize, way: Way, start: f64) -> f64 {
        let bytes = self.instance.weight(layer);
        let end = start + bytes as f64 / self.instance.bytes_per_micro;
        self.transfers.push(Transfer {
            layer,
            way,
            bytes: 0..bytes,
            start,
            end,
        });
        match way {
            Way::ToDevice => self.to_device = end,
            Way::ToHost => self.to_host = end,
        }
        end
    }

    /// Prefetches a layer, not before `at`. Returns the start and the end.
    fn prefetch(&mut self, layer: usize, at: f64) -> Option<(f64, f64)> {
        let bytes = self.instance.weight(layer) as i64;
        let start = self.fits(self.to_device.max(at), bytes)?;
        self.change(start, bytes);
        Some((start, self.transfer(layer, Way::ToDevice, start)))
    }

    /// Uploads a layer, not before `at`. Returns the end.
    fn upload(&mut self, layer: usize, at: f64) -> f64 {
        self.transfer(layer, Way::ToHost, self.to_host.max(at))
    }

    fn delete(&mut self, layer: usize, at: f64) {
        self.change(at, -(self.instance.weight(layer) as i64));
    }

    fn absent(&mut self, layer: usize, gap: Gap, from: f64, until: f64) {
        self.absences.push(Absence {
            layer,
            gap,
            bytes: 0..self.instance.weight(layer),
            from,
            until,
        });
    }

    /// Runs the next operation, not before `at`. Returns its end.
    fn run(&mut self, at: f64) -> Option<f64> {
        let op = &self.ops[self.starts.len()];
        let (held, left) = (op.held_bytes as i64, op.left_bytes as i64);
        let start = self.fits(self.ready.max(at), held - self.left)?;
        self.change(start, held - self.left);
        // At the same moment, releases come first. So an operation without any time would also take
        // no memory.
        let end = start + op.micros.max(self.instant);
        self.change(end, left - held);
        (self.ready, self.left) = (end, left);
        self.starts.push(start);
        Some(end)
    }
}

/// Begins a step with these layers absent.
fn begin<'a>(
    instance: &'a Instance,
    ops: &'a [Op],
    absent: impl Iterator<Item = usize>,
) -> Option<Step<'a>> {
    let left = ops[ops.len() - 1].left_bytes as i64;
    let absent: i64 = absent.map(|layer| instance.weight(layer) as i64).sum();
    let level = instance.weight_bytes() as i64 - absent + left;
    let step = Step {
        instance,
        ops,
        starts: Vec::new(),
        transfers: Vec::new(),
        absences: Vec::new(),
        changes: Vec::new(),
        level,
        ready: 0.0,
        left,
        to_device: 0.0,
        to_host: 0.0,
        instant: 1e-8
            * (instance.compute_micros()
                + 3.0 * instance.weight_bytes() as f64 / instance.bytes_per_micro),
    };
    (level <= instance.memory_bytes as i64).then_some(step)
}

/// Algorithm 2: the shortest step over all cuts; none if for every cut some transfer or operation
/// never finds its place. Without `discount`, a layer that leaves in both gaps is uploaded twice.
pub(super) fn schedule(
    instance: &Instance,
    ops: &[Op],
    away: &Away,
    discount: bool,
) -> Option<Schedule> {
    let n_layers = instance.layers.len();
    // A gap without an operation of another layer does not count.
    let gap = |layer: usize, gap: usize| {
        let none = (layer == 0 && gap == 0) || (layer + 1 == n_layers && gap == 1);
        !none && 0 < away[layer][gap]
    };
    let first: Vec<usize> = (0..n_layers).rev().filter(|&layer| gap(layer, 1)).collect();
    let steps =
        (0..=first.len()).filter_map(|cut| at_cut(instance, ops, &gap, &first, cut, discount));
    // The first of the shortest.
    steps.reduce(|best, step| {
        if step.period < best.period {
            step
        } else {
            best
        }
    })
}

fn at_cut(
    instance: &Instance,
    ops: &[Op],
    gap: &dyn Fn(usize, usize) -> bool,
    first: &[usize],
    cut: usize,
    discount: bool,
) -> Option<Schedule> {
    let n_layers = instance.layers.len();
    let mut step = begin(instance, ops, first[cut..].iter().copied())?;
    // When a layer's bytes are on the host, when its absence from the step before ends, and when
    // its absence of this step begins.
    let mut on_host: Vec<Option<f64>> = vec![None; n_layers];
    let mut returned = vec![None; n_layers];
    let mut waiting: Vec<(usize, f64)> = Vec::new();
    for layer in (0..n_layers).rev() {
        let mut at = 0.0;
        if gap(layer, 1) && first[cut..].contains(&layer) {
            let (start, end) = step.prefetch(layer, 0.0)?;
            returned[layer] = Some(start);
            at = end;
        }
        let end = step.run(at)?;
        if gap(layer, 0) {
            // Uploads that only the other gap needs, if they end before this one is ready; the
            // smallest first.
            while let Some((k, start)) = waiting
                .iter()
                .enumerate()
                .min_by_key(|&(_, &(layer, _))| instance.weight(layer))
                .map(|(k, &(_, ready))| (k, step.to_host.max(ready)))
            {
                let bytes = instance.weight(waiting[k].0) as f64;
                if end - start < bytes / instance.bytes_per_micro {
                    break;
                }
                let (layer, _) = waiting.remove(k);
                on_host[layer] = Some(step.upload(layer, start));
            }
            let end = step.upload(layer, end);
            step.delete(layer, end);
            on_host[layer] = Some(end);
        } else if gap(layer, 1) {
            waiting.push((layer, end));
        }
    }
    let mut deleted = vec![0.0; n_layers];
    for layer in 0..n_layers {
        let mut at = 0.0;
        if gap(layer, 0) {
            let from = on_host[layer].expect("a layer that left should have been uploaded");
            let (start, end) = step.prefetch(layer, from)?;
            step.absent(layer, Gap::BackwardToForward, from, start);
            at = end;
        }
        let end = step.run(at)?;
        if gap(layer, 1) {
            let uploaded = if discount || !gap(layer, 0) {
                on_host[layer]
            } else {
                None
            };
            let from = match uploaded {
                Some(uploaded) => end.max(uploaded),
                None => step.upload(layer, end),
            };
            step.delete(layer, from);
            deleted[layer] = from;
        }
    }
    for &layer in &first[..cut] {
        let (start, _) = step.prefetch(layer, deleted[layer])?;
        step.absent(layer, Gap::ForwardToBackward, deleted[layer], start);
    }
    let period = step
        .changes
        .last()
        .map_or(step.ready, |change| change.0.max(step.ready));
    let period = period.max(step.to_device).max(step.to_host);
    for &layer in &first[cut..] {
        let start = returned[layer].expect("a layer behind the cut should have come back");
        step.absent(
            layer,
            Gap::ForwardToBackward,
            deleted[layer],
            period + start,
        );
    }
    Some(Schedule {
        period,
        starts: step.starts,
        transfers: step.transfers,
        absences: step.absences,
    })
}

/// Layer to layer (L2L): before each operation its layer is prefetched while nothing else runs, and
/// after it the layer is uploaded. The wait also happens for a layer that is already on the device.
/// It fits any memory that some schedule fits.
pub(super) fn layer_to_layer(instance: &Instance, ops: &[Op]) -> Schedule {
    let n_layers = instance.layers.len();
    let moves = |layer: usize| 0 < instance.weight(layer);
    let absent = (0..n_layers - 1).filter(|&layer| moves(layer));
    let fits = "one layer at a time should fit a memory that holds the largest operation";
    let mut step = begin(instance, ops, absent).expect(fits);
    let mut on_host = vec![0.0; n_layers];
    let mut returned = vec![0.0; n_layers];
    let mut deleted = vec![0.0; n_layers];
    for op in ops {
        let layer = op.layer;
        let stays = layer == if op.backward { n_layers - 1 } else { 0 };
        let at = match stays || !moves(layer) {
            true => step.ready + instance.weight(layer) as f64 / instance.bytes_per_micro,
            false => {
                let (start, end) = step
                    .prefetch(layer, step.ready.max(on_host[layer]))
                    .expect(fits);
                match op.backward {
                    true => returned[layer] = start,
                    false => step.absent(layer, Gap::BackwardToForward, on_host[layer], start),
                }
                end
            }
        };
        let end = step.run(at).expect(fits);
        if !moves(layer) {
            continue;
        }
        if op.backward && n_layers > 1 {
            on_host[layer] = step.upload(layer, end);
            if layer != 0 {
                step.delete(layer, on_host[layer]);
            }
        } else if !op.backward && layer + 1 != n_layers {
            deleted[layer] = end.max(on_host[layer]);
            step.delete(layer, deleted[layer]);
        }
    }
    let period = step.ready.max(step.to_host).max(step.to_device);
    let period = step
        .changes
        .last()
        .map_or(period, |change| change.0.max(period));
    for layer in (0..n_layers - 1).filter(|&layer| moves(layer)) {
        step.absent(
            layer,
            Gap::ForwardToBackward,
            deleted[layer],
            period + returned[layer],
        );
    }
    Schedule {
        period,
        starts: step.starts,
        transfers: step.transfers,
        absences: step.absences,
    }
}
