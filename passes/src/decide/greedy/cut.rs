//! The candidates of a round: [`Cut`], and the taste that chooses its means.

use crate::lines::Stretch;
use crate::plan::{Decisions, Gap, Group, Means, Problem, Reason};
use ir::graph::Def;
use ir::{State, Value};
use smallvec::SmallVec;
use std::cmp::Ordering;

/// The means that a trajectory prefers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Taste {
    /// The means with the lower estimated price.
    Cheaper,
    /// Always swap.
    Swap,
    /// Recompute if that is possible.
    Recompute,
    /// Whole blocks first. The means is the one with the lower estimated price for everything that
    /// a block holds from forward to backward.
    Block,
}

/// All tastes.
pub const TASTES: [Taste; 4] = [Taste::Cheaper, Taste::Swap, Taste::Recompute, Taste::Block];

/// The gaps of a cut. Most cuts have one, and a round has thousands of cuts.
pub(super) type Gaps = SmallVec<[(Value, Option<u32>); 1]>;
/// The lines over which a cut frees memory of the device, and how many bytes.
pub(super) type Frees = SmallVec<[Stretch; 1]>;

/// Price per byte. If it is equal, more bytes come first, then the first value and gap.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Score(f64, u64, Value, Option<u32>);

impl Eq for Score {}
impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Score) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Score {
    fn cmp(&self, other: &Score) -> Ordering {
        let places = (self.2, self.3).cmp(&(other.2, other.3));
        self.0
            .total_cmp(&other.0)
            .then(other.1.cmp(&self.1))
            .then(places)
    }
}

/// A candidate.
#[derive(Clone)]
pub(super) struct Cut {
    /// The gaps: one, or all of a block. A gap of `None` moves a state's home to the host.
    pub(super) gaps: Gaps,
    pub(super) means: Means,
    /// The memory that it frees.
    pub(super) frees: Frees,
    /// The sum of its bytes.
    pub(super) bytes: u64,
    /// The bytes that a swap sends over the link.
    pub(super) sent: u64,
    /// The number of copies of a swap.
    pub(super) copies: f64,
    /// The time between the accesses at both ends, µs.
    pub(super) room: f64,
    /// Estimated price of a swap, µs.
    pub(super) swap: f64,
    /// Estimated price of computing the values again, µs; `None` if that is impossible.
    pub(super) recompute: Option<f64>,
    /// The first line whose memory it frees.
    pub(super) line: u32,
    /// The group whose states move to the host and are updated there.
    pub(super) group: Option<Group>,
    /// Time that the host's updates take, µs.
    pub(super) host: f64,
    /// The first state of a chunk that is halved; nothing else is cut then.
    pub(super) halved: Option<State>,
}

impl Cut {
    /// A swap of all bytes in one copy, without a price.
    pub(super) fn new(gaps: Gaps, frees: Frees, bytes: u64) -> Cut {
        Cut {
            gaps,
            means: Means::Swap,
            frees,
            bytes,
            sent: bytes,
            copies: 1.0,
            room: 0.0,
            swap: 0.0,
            recompute: None,
            line: 0,
            group: None,
            host: 0.0,
            halved: None,
        }
    }

    /// Chooses the means that the taste prefers.
    pub(super) fn choose(&mut self, taste: Taste) {
        self.means = match (taste, self.recompute) {
            (Taste::Recompute, Some(_)) => Means::Recompute,
            (Taste::Cheaper | Taste::Block, Some(price)) if price < self.swap => Means::Recompute,
            _ => Means::Swap,
        };
    }

    /// Estimated price of the chosen means, µs.
    pub(super) fn price(&self) -> f64 {
        if self.means == Means::Recompute {
            self.recompute.unwrap_or(f64::INFINITY)
        } else {
            self.swap
        }
    }

    pub(super) fn score(&self) -> Score {
        let (value, gap) = self.gaps[0];
        Score(self.price() / self.bytes as f64, self.bytes, value, gap)
    }

    pub(super) fn add_to(&self, decisions: &mut Decisions, problem: &Problem<'_>) {
        if let Some(first) = self.halved {
            return decisions.halve(problem.graph, first);
        }
        let reason = Reason {
            bytes: self.bytes,
            swap: Some(self.swap),
            recompute: self.recompute,
            line: self.line,
        };
        if let Some(group) = self.group {
            problem.groups[group].add_to(decisions);
        }
        for &(value, gap) in &self.gaps {
            match (gap, problem.graph.values[value].def) {
                (Some(gap), _) => {
                    let gap = Gap { value, gap };
                    decisions.cuts.insert(gap, (self.means, reason));
                }
                (None, Def::State(state)) => {
                    decisions.hosted.insert(state, reason);
                }
                (None, _) => {}
            }
        }
    }
}

/// The gaps over which cuts compute values again.
pub(super) fn recomputed(cuts: &[Cut]) -> impl Iterator<Item = (Value, u32)> {
    let again = cuts.iter().filter(|cut| cut.means == Means::Recompute);
    again.flat_map(|cut| {
        let gaps = cut.gaps.iter();
        gaps.map(|&(value, gap)| (value, gap.unwrap_or(u32::MAX)))
    })
}
