//! Finds the best of all records without placing most drafts. Lower bounds of a draft's time and
//! bytes are known long before it is placed.
//!
//! Each variant of each draft gives a record, and the records have a fixed order. The result is the
//! first record that keeps the limits. At first each draft has these lower bounds: the work of its
//! busiest stream, and the bytes alive in it. Entries are taken in the order of their bounds. The
//! first entry is refined: its lines are built and simulated on a machine where every buffer has
//! its own bytes, which gives a better bound. The next time it is first, it is placed, and becomes
//! a record. When a record is first, all other entries come after it (best-first search: Hart,
//! Nilsson and Raphael, 1968).
//!
//! Invariant: bounds only rise. So the result is the same as if every draft were judged. It does
//! not depend on threads, or on which drafts a limit excludes: see [`decide`](super::decide) on why
//! peaks are monotone.

use super::record::{Draft, Record, least};
use crate::alloc::{Lifetime, live_peak};
use crate::plan::machine::{DEVICE, HOST};
use crate::plan::{Decisions, Limits, Problem};
use crate::realise::{self, Finished};
use crate::schedule::lives::{Variant, as_played, variants};
use ir::{Buffer, Schedule, Table};
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

/// Which record comes first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Aim {
    /// The fastest. Of equally fast ones, the one of the first problem, then the one with the
    /// fewest decisions.
    Fastest,
    /// The one with the lowest peak on the device.
    Smallest,
    /// The one with the lowest peak on the host.
    LeastOnHost,
}

/// The request: which record, within which limits.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// Which record.
    pub aim: Aim,
    /// The most memory that it may need.
    pub limits: Limits,
    /// Steps of at most this are equally fast, µs.
    pub as_fast: f64,
}

/// Finds the first record of all problems' drafts that keeps the limits, and the position of its
/// problem; `None` if no record keeps them.
pub fn best(
    problems: &[Problem<'_>],
    drafts: &[Vec<Draft>],
    asked: Asked,
) -> Option<(usize, Record)> {
    let mut queue = Queue {
        asked,
        heap: BinaryHeap::new(),
        entries: vec![],
    };
    for (problem, drafts) in drafts.iter().enumerate() {
        for (number, draft) in drafts.iter().enumerate() {
            let bound = Bound {
                micros: least(&problems[problem], draft),
                peak: draft.live,
                host: draft.host,
            };
            queue.push(Entry {
                problem,
                number,
                draft,
                variant: Variant::default(),
                bound,
                known: Known::Draft,
            });
        }
    }
    // Idle threads refine the entries that follow the first one. This changes no result: it only
    // refines them earlier than necessary.
    let most = rayon::current_num_threads();
    loop {
        let mut next = vec![];
        while next.len() < most {
            match queue.pop() {
                Some(Entry {
                    problem,
                    known: Known::Record(record),
                    ..
                }) if next.is_empty() => {
                    return Some((problem, record));
                }
                Some(entry) if matches!(entry.known, Known::Record(_)) => {
                    queue.push(entry);
                    break;
                }
                Some(entry) => next.push(entry),
                None => break,
            }
        }
        if next.is_empty() {
            return None;
        }
        let next = next.into_par_iter().with_max_len(1);
        let refined: Vec<Vec<Entry<'_>>> = next.map(|entry| entry.refined(problems)).collect();
        refined
            .into_iter()
            .flatten()
            .for_each(|entry| queue.push(entry));
    }
}

/// Entries in order.
struct Queue<'a> {
    asked: Asked,
    heap: BinaryHeap<Reverse<(Key, usize)>>,
    entries: Vec<Option<Entry<'a>>>,
}

/// Low bits of a time that are ignored: sums of the same numbers in another order differ by less
/// than 1e-9.
const BLURRED: u32 = 22;

/// The position of an entry: keys are compared from the first number to the last.
type Key = [u64; 6];

impl<'a> Queue<'a> {
    /// Adds an entry, if it may keep the limits.
    fn push(&mut self, entry: Entry<'a>) {
        let Limits { device, host } = self.asked.limits;
        if entry.bound.peak <= device && entry.bound.host <= host {
            self.heap
                .push(Reverse((self.key(&entry), self.entries.len())));
            self.entries.push(Some(entry));
        }
    }

    fn pop(&mut self) -> Option<Entry<'a>> {
        let Reverse((_, at)) = self.heap.pop()?;
        self.entries[at].take()
    }

    fn key(&self, entry: &Entry<'_>) -> Key {
        let Bound { micros, peak, host } = entry.bound;
        // For numbers that are not negative, the order of the bits is the order of the numbers.
        let time = micros.max(self.asked.as_fast).max(0.0).to_bits() >> BLURRED;
        let Decisions { reruns, .. } = &*entry.draft.decisions;
        // All reruns of a solver count as one decision.
        let decisions = entry.draft.decisions.count() + usize::from(!reruns.is_empty());
        let [problem, decisions] = [entry.problem, decisions].map(|n| n as u64);
        let last = entry.number as u64 * Variant::ALL.len() as u64 + entry.variant as u64;
        match self.asked.aim {
            Aim::Fastest => [time, problem, decisions, peak, last, 0],
            Aim::Smallest => [peak, time, problem, decisions, last, 0],
            Aim::LeastOnHost => [host, peak, time, problem, decisions, last],
        }
    }
}

/// One variant of a draft, or all of them before they are separated.
struct Entry<'a> {
    problem: usize,
    /// Its position among the problem's drafts.
    number: usize,
    draft: &'a Draft,
    variant: Variant,
    bound: Bound,
    known: Known,
}

/// No record of an entry is below this.
#[derive(Clone, Copy)]
struct Bound {
    micros: f64,
    peak: u64,
    host: u64,
}

/// What is known about an entry.
enum Known {
    /// The figures of the draft.
    Draft,
    /// Its lines, and how long their buffers live.
    Lines(Arc<Schedule>, Table<Buffer, Lifetime>),
    /// Everything.
    Record(Record),
}

impl<'a> Entry<'a> {
    /// The refined entries that replace it.
    fn refined(self, problems: &[Problem<'_>]) -> Vec<Entry<'a>> {
        let problem = &problems[self.problem];
        match self.known {
            Known::Draft => {
                let Ok(schedule) = realise::unnamed(problem, &self.draft.decisions) else {
                    return vec![];
                };
                let (micros, schedule) = (
                    realise::with_own_bytes(problem, &schedule),
                    Arc::new(schedule),
                );
                let of = |(variant, lives): (Variant, Table<Buffer, Lifetime>)| {
                    let [peak, host] =
                        [DEVICE, HOST].map(|pool| live_peak(&schedule, &lives, pool));
                    let bound = Bound { micros, peak, host }.above(self.bound);
                    Entry {
                        variant,
                        bound,
                        known: Known::Lines(schedule.clone(), lives),
                        ..self
                    }
                };
                variants(problem, &schedule).into_iter().map(of).collect()
            }
            Known::Lines(schedule, lives) => {
                let (figures, timeline) = realise::finish(problem, &schedule, &lives);
                let Finished { peak, host, micros } = figures;
                let (decisions, variant) = (self.draft.decisions.clone(), self.variant);
                log::debug!(
                    "{variant:?}: {peak} bytes, {host} on the host, {micros:.0} µs; at least \
                     {:.0} µs",
                    self.bound.micros
                );
                let record = Record {
                    origin: self.draft.origin,
                    decisions,
                    peak,
                    host,
                    micros,
                    variant,
                };
                let mut entries = vec![Entry {
                    bound: Bound { micros, peak, host }.above(self.bound),
                    known: Known::Record(record),
                    ..self
                }];
                if variant == Variant::WhereFree && realise::waits(problem, &schedule, micros) {
                    let lives = as_played(&schedule, &timeline);
                    let [peak, host] =
                        [DEVICE, HOST].map(|pool| live_peak(&schedule, &lives, pool));
                    let micros = self.bound.micros;
                    entries.push(Entry {
                        variant: Variant::AsPlayed,
                        bound: Bound { micros, peak, host },
                        known: Known::Lines(schedule, lives),
                        ..self
                    });
                }
                entries
            }
            Known::Record(_) => vec![self],
        }
    }
}

impl Bound {
    /// The larger of two bounds: rounding, or lines that slow each other down, may make the new one
    /// smaller.
    fn above(self, known: Bound) -> Bound {
        Bound {
            micros: self.micros.max(known.micros),
            peak: self.peak.max(known.peak),
            host: self.host.max(known.host),
        }
    }
}
