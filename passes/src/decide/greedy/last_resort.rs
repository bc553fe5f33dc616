//! The candidates of a round whose target no other candidates reach. They move states that other
//! cuts leave at home, in one chunk, or with their update on the device. They come last because
//! each adds copies, and most of a copy of few bytes is latency.

use super::cut::{Cut, Frees, Gaps};
use super::prices::Load;
use super::round::{Home, Round, frees_above};
use crate::lines::Above;
use crate::plan::Decisions;
use ir::{State, Table, Value};

impl Round<'_> {
    /// Everything that frees a line above the target if nothing else does.
    pub(super) fn last_resorts(
        &self,
        homes: &Table<State, Option<Home>>,
        above: &Above,
    ) -> Vec<Cut> {
        let chunks = self.decisions.chunks.iter();
        let several = chunks.filter(|chunk| 1 < chunk.len());
        let halves = several.map(|chunk| self.halved(chunk));
        let halves = halves.filter(|cut| frees_above(&cut.frees, above));
        let at_home = homes.iter();
        let at_home = at_home.filter_map(|(state, home)| Some((state, home.as_ref()?)));
        let between = at_home.filter_map(|(state, home)| self.between_uses(state, home, above));
        let on_host = &self.decisions.on_host;
        let groups = self.problem.groups.iter();
        let on_device = groups.filter(|(_, group)| {
            let mut updates = group.updates.iter();
            updates.any(|node| !on_host.contains(node))
        });
        let updated = on_device.filter_map(|(id, _)| self.group(id, homes, above));
        halves.chain(between).chain(updated).collect()
    }

    /// The candidate of a state at home that would live on the host, and also leaves the device
    /// between two uses where memory is short.
    fn between_uses(&self, state: State, home: &Home, above: &Above) -> Option<Cut> {
        let value = self.problem.graph.states[state].before;
        let bytes = self.bytes(home.buffer);
        let (mut gaps, mut frees) = (Gaps::new(), Frees::new());
        for idle in &self.occupancy.idle {
            let inner = idle.buffer == home.buffer && idle.gap.is_some_and(|gap| gap != u32::MAX);
            if inner && above.any(idle.from + 1, idle.to) {
                gaps.push((value, idle.gap));
                frees.push((idle.from + 1, idle.to, bytes));
            }
        }
        let first = frees.first()?.0;
        gaps.push((value, None));
        frees.extend(home.frees.iter().copied());
        let changes = self.problem.root[self.problem.graph.states[state].after] != value;
        let mut cut = Cut {
            copies: (gaps.len() + usize::from(changes)) as f64,
            room: self.prices.timeline.micros,
            line: first as u32,
            ..Cut::new(gaps, frees, bytes)
        };
        cut.swap = self.prices.swap(&cut, Load::default());
        Some(cut)
    }

    /// The candidate of a chunk that is halved: where no line reads one half, it is not there.
    fn halved(&self, chunk: &[State]) -> Cut {
        let graph = self.problem.graph;
        let value = |state: State| graph.states[state].before;
        let (front, back) = Decisions::halves(graph, chunk);
        let mut frees = Frees::new();
        for &(from, to) in self.occupancy.resident(value(chunk[0])) {
            let (from, to) = (from as usize, to as usize);
            for half in [front, back] {
                let values = half.iter().map(|&state| value(state));
                let bytes = values.clone().map(|v| graph.values[v].ty.bytes()).sum();
                let lines = self.lines_within(values, from, to);
                if let (Some(&first), Some(&last)) = (lines.iter().min(), lines.iter().max()) {
                    frees.extend([(from, first, bytes), (last + 1, to + 1, bytes)]);
                }
            }
        }
        let bytes = frees.iter().map(|&(.., bytes)| bytes).max().unwrap_or(0);
        let mut cut = Cut {
            copies: frees.len() as f64,
            sent: 0,
            halved: Some(chunk[0]),
            ..Cut::new(Gaps::from_iter([(value(chunk[0]), None)]), frees, bytes)
        };
        cut.swap = self.prices.swap(&cut, Load::default());
        cut
    }

    /// The lines of the model in `from..=to` that access one of the values.
    fn lines_within(
        &self,
        values: impl Iterator<Item = Value>,
        from: usize,
        to: usize,
    ) -> Vec<usize> {
        values
            .flat_map(|value| self.occupancy.lines_of(self.problem, value))
            .filter(|line| (from..=to).contains(line))
            .collect()
    }
}
