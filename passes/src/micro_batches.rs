//! Chooses the number of micro-batches into which a batch is cut: that with the fastest step whose
//! plan fits the budget.
//!
//! More micro-batches need less memory for activations, and run smaller kernels more often. Which
//! number is best depends on what a plan has to swap and recompute, so plans are made and their
//! predicted times compared. A number need not be planned if the kernels of its forward and
//! backward alone take as long as the best plan so far (branch and bound).

use crate::cost::Cost;
use crate::pipeline::Compiled;
use ir::Phase;
use ir::schedule::InstrKind;

/// A number of micro-batches that was considered.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Considered {
    /// The number.
    pub n: u64,
    /// What its step takes.
    pub time: StepTime,
}

/// What a step takes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum StepTime {
    /// The predicted time of its plan, µs.
    Planned(f64),
    /// At least this time, µs, which is not better than another number's: there is no plan.
    AtLeast(f64),
    /// It does not fit.
    TooLarge,
}

/// The numbers into which a batch can be cut, ascending, up to `most`.
pub fn divisors(batch: u64, most: u64) -> Vec<u64> {
    (1..=batch.min(most))
        .filter(|&n| batch.is_multiple_of(n))
        .collect()
}

/// Considers numbers of micro-batches in their order. `least`: what kernels of the forward and the
/// backward of all `n` micro-batches take at least, µs. `plan`: the predicted time of the plan for
/// `n`, µs, or none if nothing fits.
pub fn consider<E>(
    numbers: &[u64],
    mut least: impl FnMut(u64) -> Result<f64, E>,
    mut plan: impl FnMut(u64) -> Result<Option<f64>, E>,
) -> Result<Vec<Considered>, E> {
    let mut considered = vec![];
    let mut best = f64::INFINITY;
    for &n in numbers {
        let at_least = match best.is_finite() {
            true => least(n)?,
            false => 0.0,
        };
        let time = if at_least >= best {
            StepTime::AtLeast(at_least)
        } else {
            plan(n)?.map_or(StepTime::TooLarge, StepTime::Planned)
        };
        if let StepTime::Planned(micros) = time {
            best = best.min(micros);
        }
        considered.push(Considered { n, time });
    }
    Ok(considered)
}

/// The number with the fastest plan; of equal ones the smallest. None if nothing fits.
pub fn fastest(considered: &[Considered]) -> Option<u64> {
    let planned = considered.iter().filter_map(|c| match c.time {
        StepTime::Planned(micros) => Some((micros, c.n)),
        StepTime::AtLeast(_) | StepTime::TooLarge => None,
    });
    planned.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, n)| n)
}

/// The time of the kernels of a step's forward and backward, µs, if nothing is computed twice.
pub fn kernel_micros(compiled: &Compiled, cost: &dyn Cost) -> f64 {
    let graph = &compiled.program.graph;
    let mut nodes = std::collections::BTreeSet::new();
    let lines = compiled.program.schedule.instrs.values();
    let time = |data: &ir::schedule::InstrData| match data.kind {
        InstrKind::Run { node, .. }
            if graph.nodes[node].phase != Phase::Optimizer && nodes.insert(node) =>
        {
            cost.run(graph, node)
        }
        InstrKind::Run { .. } | InstrKind::Copy { .. } => 0.0,
    };
    lines.map(time).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without a plan that fits, no number is left out; with one, those that cannot be faster are.
    #[test]
    fn numbers_that_cannot_be_faster_are_not_planned() {
        let times = [(1, None), (2, Some(90.0)), (4, Some(80.0)), (8, Some(85.0))];
        let time = |n| times.iter().find(|t| t.0 == n).and_then(|t| t.1);
        let of = |least: fn(u64) -> f64| {
            let plan = |n| Ok::<_, ()>(time(n));
            consider(&divisors(8, 4096), |n| Ok(least(n)), plan).unwrap()
        };
        let all = of(|n| 70.0 + n as f64);
        assert_eq!(fastest(&all), Some(4));
        assert_eq!(all[0].time, StepTime::TooLarge);
        assert_eq!(all[3].time, StepTime::Planned(85.0));
        let some = of(|n| 78.0 + n as f64 / 2.0);
        assert_eq!(fastest(&some), Some(4));
        assert_eq!(some[3].time, StepTime::AtLeast(82.0));
        assert_eq!(divisors(12, 4), [1, 2, 3, 4]);
    }
}
