//! Schedules transfers for operations with fixed times: prefetches as late as possible, uploads as
//! early as possible.
//!
//! Before: when the operations start, and how many bytes of each layer should be away in each gap.
//! After: a schedule, and how far each operation is from fitting the memory. With fixed operations,
//! late prefetches and early uploads minimise the bytes on the device at all moments, up to the
//! size of a piece. So no search among transfers is needed. Layers are split into pieces to fit the
//! link's free time.
//!
//! Bytes of a layer are numbered so that, as far as possible, the same bytes are away in both gaps:
//! the discount of Section 3.

use super::{Absence, Gap, Instance, Op, Schedule, Transfer, Way};
use std::ops::Range;

/// The input of a timetable.
pub(super) struct Draft<'a> {
    /// When operations start, µs.
    pub(super) starts: &'a [f64],
    /// A step, µs.
    pub(super) period: f64,
    /// Bytes away, by layer and [`Gap`].
    pub(super) away: &'a [[u64; 2]],
    /// The largest transfer.
    pub(super) piece_bytes: u64,
    /// True if uploads that only the gap before the backward needs go first. Otherwise they use the
    /// link's remaining time.
    pub(super) early_first: bool,
}

/// A timetable, and the bytes that do not fit.
pub(super) struct Timetable {
    pub(super) schedule: Schedule,
    /// For each operation, bytes above the memory while it runs or until the next one starts.
    pub(super) over: Vec<u64>,
}

/// The free time of one direction of the link, within a period.
struct Free {
    period: f64,
    /// Disjoint and ascending.
    spans: Vec<(f64, f64)>,
}

impl Free {
    fn new(period: f64) -> Free {
        Free {
            period,
            spans: vec![(0.0, period)],
        }
    }

    /// Takes `amount` of free time within `[from, from + length]`, from its start or from its end.
    /// Spans of at most `least` are skipped. Returns the taken spans, ascending, with times that
    /// count on from the period of `from`. They may be shorter than `amount`.
    fn take(
        &mut self,
        from: f64,
        length: f64,
        amount: f64,
        last: bool,
        least: f64,
    ) -> Vec<(f64, f64)> {
        let length = length.clamp(0.0, self.period);
        let turn = (from / self.period).floor() * self.period;
        let begin = from - turn;
        let end = begin + length;
        // The window within the period, and the part of it that wraps.
        let mut windows = vec![(begin, end.min(self.period), turn)];
        if self.period < end {
            windows.push((0.0, end - self.period, turn + self.period));
        }
        if last {
            windows.reverse();
        }
        let mut missing = amount;
        let mut taken = Vec::new();
        for (a, b, shift) in windows {
            let first = self.spans.partition_point(|span| span.1 <= a);
            let behind = self.spans.partition_point(|span| span.0 < b);
            let inside: Vec<usize> = if last {
                (first..behind).rev().collect()
            } else {
                (first..behind).collect()
            };
            // Cuts that are made later, because they change the numbers of spans.
            let mut cuts = Vec::new();
            for k in inside {
                if missing <= 0.0 {
                    break;
                }
                let (c, d) = (self.spans[k].0.max(a), self.spans[k].1.min(b));
                let room = d - c;
                if room <= least.min(missing) * (1.0 - 1e-9) || room <= 0.0 {
                    continue;
                }
                let used = room.min(missing);
                let (c, d) = if last { (d - used, d) } else { (c, c + used) };
                missing = if used == missing { 0.0 } else { missing - used };
                taken.push((c + shift, d + shift));
                cuts.push((k, c, d));
            }
            cuts.sort_by_key(|cut| cut.0);
            for (k, c, d) in cuts.into_iter().rev() {
                let (x, y) = self.spans[k];
                let rest = [(x, c), (d, y)].into_iter().filter(|(x, y)| x < y);
                self.spans.splice(k..k + 1, rest);
            }
        }
        if last {
            taken.reverse();
        }
        taken
    }
}

/// A piece of a layer in transfer: its bytes, start and end. Times count on from the gap's period.
type Piece = (Range<u64>, f64, f64);

/// Makes the timetable. Bytes that find no time on the link stay on the device.
pub(super) fn timetable(instance: &Instance, ops: &[Op], draft: &Draft<'_>) -> Timetable {
    let n_layers = instance.layers.len();
    let mut away = draft.away.to_vec();
    // Bytes whose prefetch would begin before their upload ends stay on the device. Then other
    // bytes may move at other times, so everything is rebuilt. Two rounds are nearly always enough,
    // and any number is correct.
    loop {
        let links = link(instance, ops, draft, &away);
        let mut crossed = vec![[0u64; 2]; n_layers];
        let mut absences = Vec::new();
        for (layer, gap) in gaps(n_layers) {
            let fresh = |bytes: u64| links.uploaded(ops, draft, layer, gap, bytes);
            for (bytes, start, _) in &links.prefetches[layer][gap as usize] {
                let mut at = bytes.start;
                while at < bytes.end {
                    let (from, end) = fresh(at);
                    let end = end.min(bytes.end);
                    match from < *start {
                        true => absences.push(Absence {
                            layer,
                            gap,
                            bytes: at..end,
                            from,
                            until: *start,
                        }),
                        false => crossed[layer][gap as usize] += end - at,
                    }
                    at = end;
                }
            }
        }
        let trimmed = crossed.iter().flatten().any(|&bytes| 0 < bytes);
        if !trimmed {
            let schedule = links.schedule(draft, absences);
            let over = over(instance, ops, &schedule);
            return Timetable { schedule, over };
        }
        for (away, crossed) in away.iter_mut().zip(&crossed) {
            (0..2).for_each(|gap| away[gap] -= crossed[gap].min(away[gap]));
        }
    }
}

/// All gaps of all layers.
fn gaps(n_layers: usize) -> impl Iterator<Item = (usize, Gap)> {
    (0..n_layers).flat_map(|layer| {
        [
            (layer, Gap::BackwardToForward),
            (layer, Gap::ForwardToBackward),
        ]
    })
}

/// When a gap starts, and how long it is.
fn span(ops: &[Op], draft: &Draft<'_>, layer: usize, gap: Gap) -> (f64, f64) {
    let n_layers = ops.len() / 2;
    let (backward, forward) = (n_layers - 1 - layer, n_layers + layer);
    let end = |j: usize| draft.starts[j] + ops[j].micros;
    match gap {
        Gap::BackwardToForward => (end(backward), draft.starts[forward] - end(backward)),
        Gap::ForwardToBackward => (
            end(forward),
            draft.period + draft.starts[backward] - end(forward),
        ),
    }
}

/// Transfers by layer; prefetches also by gap.
struct Links {
    prefetches: Vec<[Vec<Piece>; 2]>,
    uploads: Vec<Vec<Piece>>,
}

fn link(instance: &Instance, ops: &[Op], draft: &Draft<'_>, away: &[[u64; 2]]) -> Links {
    let n_layers = instance.layers.len();
    let rate = instance.bytes_per_micro;
    let mut uploads = vec![Vec::new(); n_layers];
    let mut prefetches: Vec<[Vec<Piece>; 2]> = vec![Default::default(); n_layers];
    // A gap's bytes as pieces in the time taken for them, and the number of bytes that found time.
    let least = 0.125 * draft.piece_bytes as f64 / rate;
    let place = |free: &mut Free,
                 (from, length): (f64, f64),
                 bytes: Range<u64>,
                 last: bool,
                 out: &mut Vec<Piece>| {
        let taken = free.take(
            from,
            length,
            (bytes.end - bytes.start) as f64 / rate,
            last,
            least,
        );
        let (mut at, mut sum) = (bytes.start, 0.0);
        for (k, (a, b)) in taken.iter().enumerate() {
            let n_pieces = ((b - a) * rate / draft.piece_bytes as f64 - 1e-6)
                .ceil()
                .max(1.0);
            for piece in 0..n_pieces as u64 {
                let part = |piece: u64| a + (b - a) * piece as f64 / n_pieces;
                let (start, end) = (
                    part(piece),
                    if piece + 1 == n_pieces as u64 {
                        *b
                    } else {
                        part(piece + 1)
                    },
                );
                sum += end - start;
                let whole = k + 1 == taken.len() && piece + 1 == n_pieces as u64;
                let next = bytes.start + (sum * rate + if whole { 0.5 } else { 0.0 }) as u64;
                let next = next.clamp(at, bytes.end);
                if at < next {
                    out.push((at..next, start, end));
                }
                at = next;
            }
        }
        at
    };
    // Shortest gaps first, because they have the least choice. For the memory it does not matter
    // which layer's bytes move at which time.
    let mut order: Vec<(usize, Gap)> = gaps(n_layers)
        .filter(|&(layer, gap)| 0 < away[layer][gap as usize])
        .collect();
    order.sort_by(|&(i, a), &(k, b)| {
        span(ops, draft, i, a)
            .1
            .total_cmp(&span(ops, draft, k, b).1)
            .then(i.cmp(&k))
    });
    let mut free = Free::new(draft.period);
    let mut kept = away.to_vec();
    let late = |free: &mut Free, uploads: &mut Vec<Vec<Piece>>, kept: &mut Vec<[u64; 2]>| {
        for &(layer, gap) in order
            .iter()
            .filter(|(_, gap)| *gap == Gap::BackwardToForward)
        {
            let window = span(ops, draft, layer, gap);
            let placed = place(free, window, 0..away[layer][0], false, &mut uploads[layer]);
            kept[layer][0] = placed;
            if draft.early_first && placed < away[layer][0] {
                // Bytes behind bytes without time are no longer adjacent.
                kept[layer][1] = kept[layer][1].min(placed);
            }
        }
    };
    let early = |free: &mut Free, uploads: &mut Vec<Vec<Piece>>, kept: &mut Vec<[u64; 2]>| {
        for layer in 0..n_layers {
            if away[layer][1] <= kept[layer][0] {
                continue;
            }
            // From its backward to the next one.
            let (from, _) = span(ops, draft, layer, Gap::BackwardToForward);
            let window = (from, draft.period - ops[n_layers - 1 - layer].micros);
            let mut pieces = Vec::new();
            kept[layer][1] = place(
                free,
                window,
                kept[layer][0]..away[layer][1],
                false,
                &mut pieces,
            );
            uploads[layer].extend(pieces);
        }
    };
    match draft.early_first {
        false => {
            late(&mut free, &mut uploads, &mut kept);
            early(&mut free, &mut uploads, &mut kept);
        }
        true => {
            early(&mut free, &mut uploads, &mut kept);
            late(&mut free, &mut uploads, &mut kept);
        }
    }
    let mut free = Free::new(draft.period);
    for &(layer, gap) in &order {
        let bytes = kept[layer][gap as usize];
        let mut pieces = Vec::new();
        place(
            &mut free,
            span(ops, draft, layer, gap),
            0..bytes,
            true,
            &mut pieces,
        );
        prefetches[layer][gap as usize] = pieces;
    }
    Links {
        prefetches,
        uploads,
    }
}

impl Links {
    /// When a byte may be deleted in a gap, and up to which byte the same holds.
    fn uploaded(
        &self,
        ops: &[Op],
        draft: &Draft<'_>,
        layer: usize,
        gap: Gap,
        byte: u64,
    ) -> (f64, u64) {
        let (from, _) = span(ops, draft, layer, gap);
        let piece = self.uploads[layer]
            .iter()
            .find(|(bytes, _, _)| bytes.contains(&byte));
        let (bytes, _, end) = piece.expect("a prefetched byte should have been uploaded");
        (from.max(*end), bytes.end)
    }

    fn schedule(self, draft: &Draft<'_>, absences: Vec<Absence>) -> Schedule {
        let mut transfers = Vec::new();
        let mut add = |layer: usize, way: Way, (bytes, start, end): Piece| {
            let turn = (start / draft.period).floor() * draft.period;
            transfers.push(Transfer {
                layer,
                way,
                bytes,
                start: start - turn,
                end: end - turn,
            });
        };
        for (layer, pieces) in self.uploads.into_iter().enumerate() {
            pieces
                .into_iter()
                .for_each(|piece| add(layer, Way::ToHost, piece));
        }
        for (layer, gaps) in self.prefetches.into_iter().enumerate() {
            gaps.into_iter()
                .flatten()
                .for_each(|piece| add(layer, Way::ToDevice, piece));
        }
        transfers.sort_by(|a, b| a.start.total_cmp(&b.start).then(a.way.cmp(&b.way)));
        let absences = absences.into_iter().map(|absence| {
            let turn = (absence.from / draft.period).floor() * draft.period;
            Absence {
                from: absence.from - turn,
                until: absence.until - turn,
                ..absence
            }
        });
        Schedule {
            period: draft.period,
            starts: draft.starts.to_vec(),
            transfers,
            absences: absences.collect(),
        }
    }
}

/// Bytes above the memory, for each operation and the pause after it.
fn over(instance: &Instance, ops: &[Op], schedule: &Schedule) -> Vec<u64> {
    let n_ops = ops.len();
    let period = schedule.period;
    let close = 1e-9 * period;
    // At the same moment, taken bytes count after released ones, as in the validator. Brief
    // operations are the exception.
    let brief = |j: usize| ops[j].micros <= 2.0 * close;
    let mut changes: Vec<(f64, usize, i64)> =
        Vec::with_capacity(2 * schedule.absences.len() + 2 * n_ops);
    let mut level = instance.weight_bytes() as i64;
    for absence in &schedule.absences {
        let bytes = (absence.bytes.end - absence.bytes.start) as i64;
        let own = [n_ops / 2 - 1 - absence.layer, n_ops / 2 + absence.layer][match absence.gap {
            Gap::BackwardToForward => 0,
            Gap::ForwardToBackward => 1,
        }];
        match brief(own) && (absence.from - schedule.starts[own]).abs() <= 2.0 * close {
            true => changes.push((schedule.starts[own] + close, 2 * own + 2, -bytes)),
            false => changes.push((absence.from, 0, -bytes)),
        }
        let turns = (absence.until / period).floor();
        level -= turns as i64 * bytes;
        changes.push((absence.until - turns * period + close, 0, bytes));
    }
    let mut held = ops[n_ops - 1].left_bytes as i64;
    level += held;
    for (j, op) in ops.iter().enumerate() {
        let (start, during, left) = (
            schedule.starts[j],
            op.held_bytes as i64,
            op.left_bytes as i64,
        );
        changes.push((start + close, 2 * j + 1, during - held));
        let end = if brief(j) {
            (start + close, 2 * j + 2)
        } else {
            (start + op.micros, 0)
        };
        changes.push((end.0, end.1, left - during));
        held = left;
    }
    changes.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let limit = instance.memory_bytes as i64;
    let mut over = vec![0u64; n_ops];
    let mut op = n_ops - 1;
    // Bytes in use at the start belong to the pause of the last operation.
    over[op] = u64::try_from(level - limit).unwrap_or(0);
    for (_, order, by) in changes {
        level += by;
        if order % 2 == 1 {
            op = (order - 1) / 2;
        }
        over[op] = over[op].max(u64::try_from(level - limit).unwrap_or(0));
    }
    over
}
