//! The error for a budget in which no plan fits.

use super::record::Record;
use crate::alloc::{Lifetime, live_bytes};
use crate::occupants::Occupants;
use crate::plan::machine::DEVICE;
use crate::plan::{Error, Infeasible, Planner, Problem};
use crate::realise;
use crate::schedule::lives::lives;
use ir::Pool;

/// Why the smallest record does not fit: its line with the most bytes, and the tensors in memory
/// there.
pub(super) fn infeasible(
    problem: &Problem<'_>,
    planner: Planner,
    record: &Record,
    budget: u64,
    pool: Pool,
) -> Error {
    let schedule =
        realise::lines(problem, &record.decisions).expect("a recorded plan should build");
    let lives = lives(problem, &schedule, record.variant);
    let live = live_bytes(&schedule, &lives, pool);
    let line = (0..live.len())
        .rev()
        .max_by_key(|&line| live[line])
        .unwrap_or(0);
    let here = |life: Lifetime| life.start as usize <= line && line < life.end as usize;
    let occupants = Occupants::new(problem.graph, &schedule);
    let mut live: Vec<(String, u64)> = vec![];
    for (buffer, _) in schedule
        .buffers
        .iter()
        .filter(|(buffer, data)| data.pool == pool && here(lives[*buffer]))
    {
        for place in occupants.places(buffer) {
            let name = occupants.name(buffer, place.at(ir::table::Id::new(line)));
            live.push((name, place.bytes));
        }
    }
    live.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    let line = match schedule.instrs.get(ir::table::Id::new(line)) {
        Some(_) => ir::text::print_instr(problem.graph, &schedule, ir::table::Id::new(line)),
        None => "the start of the step".into(),
    };
    let smallest = if pool == DEVICE {
        record.peak
    } else {
        record.host
    };
    Error::Infeasible(Box::new(Infeasible {
        budget,
        smallest,
        line,
        live,
        pool: schedule.pools[pool].name.clone(),
        planner,
    }))
}
