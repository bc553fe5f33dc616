//! What a swap adds to the step, estimated from the last simulation.

use super::cut::Cut;
use crate::plan::machine::{COMPUTE, D2H, H2D, ON_HOST};
use crate::plan::tuning::{HIDDEN_COPY, HOST_HIDES, LINK_HIDES};
use crate::plan::{Group, Problem};
use crate::sim::Timeline;
use ir::{Id, Instr};

/// The prices of swaps.
pub(super) struct Prices<'a> {
    pub(super) problem: &'a Problem<'a>,
    pub(super) timeline: &'a Timeline,
}

/// Time that the choices of a round so far add to the link and to the host's updates, µs.
#[derive(Clone, Copy, Default)]
pub(super) struct Load {
    pub(super) link: f64,
    pub(super) host: f64,
}

impl Prices<'_> {
    /// When a line starts, µs; for the line after the last, when the step ends.
    pub(super) fn start(&self, line: usize) -> f64 {
        if line < self.timeline.start.len() {
            self.timeline.start[Instr::new(line)]
        } else {
            self.timeline.micros
        }
    }

    /// What a swap adds to the step, µs: the part of its copies and of the host's updates that is
    /// not hidden, minus the device's updates.
    pub(super) fn swap(&self, cut: &Cut, load: Load) -> f64 {
        let room = if cut.group.is_some() {
            self.timeline.micros
        } else {
            cut.room
        };
        let link = self.link(cut, room, load);
        let Some(group) = cut.group else { return link };
        let busy = self.timeline.busy.get(ON_HOST).copied().unwrap_or(0.0);
        let hidden = busy + load.host + cut.host <= HOST_HIDES * self.timeline.busy[COMPUTE];
        let updates = &self.problem.groups[group].updates;
        let spared: f64 = updates
            .iter()
            .map(|&node| self.problem.cost.run(self.problem.graph, node))
            .sum();
        // The gradient's copy, the update and the weights' copy must end between the gradient and
        // the next use. Groups with more time between are better: the last blocks have the first
        // gradients, and their weights are read last (ProTrain, section 3.1.1).
        let late = (cut.host + 2.0 * self.problem.cost.link(cut.sent) - cut.room).max(0.0);
        let share = if hidden {
            HIDDEN_COPY * (2.0 - cut.room / self.timeline.micros)
        } else {
            1.0
        };
        link + late + cut.host * share - spared
    }

    /// The price of a cut's copies within `room` µs. It is nearly zero if the link has spare time
    /// and the copies fit into the room. Otherwise it is the full time of the copies.
    fn link(&self, cut: &Cut, room: f64, load: Load) -> f64 {
        let (copies, micros) = (cut.copies, self.problem.cost.link(cut.sent));
        let busy = self.timeline.busy[H2D].max(self.timeline.busy[D2H]);
        let idle = LINK_HIDES * self.timeline.busy[COMPUTE] - busy - load.link;
        let hidden = copies * micros <= room && micros <= idle;
        // Even a hidden copy takes link time from others.
        copies * micros * if hidden { HIDDEN_COPY } else { 1.0 }
    }

    /// Time that the host takes for the updates of a group, µs.
    pub(super) fn host(&self, group: Group) -> f64 {
        let updates = self.problem.groups[group].updates.iter();
        updates
            .map(|&node| self.problem.cost.host(self.problem.graph, node))
            .sum()
    }
}
