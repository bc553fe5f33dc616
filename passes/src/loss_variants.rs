//! The variants of the loss: the results of [`PER_VARIANT`] with the loss whole and in chunks of
//! rows. Planning decides among them.
//!
//! More chunks make more lines, and each further chunk saves fewer bytes. So at most one variant is
//! planned in addition to the whole loss. Two figures are compared: the bytes that keeping
//! everything needs, and the bytes of the neediest line, which no plan can go below. The variant
//! has the smallest power of two of chunks for which both figures exceed those of the largest
//! number by at most the share [`worth_a_chunk`]. This does not depend on the budget: see
//! [`decide`](crate::decide) on why peaks are monotone.

use crate::alloc;
use crate::cost::{Cost, Tabled};
use crate::graph::loss::{self, Chunks};
use crate::list::{GraphContext, PER_VARIANT};
use crate::manager::{Manager, Ran, run_graph};
use crate::plan::machine::DEVICE;
use crate::plan::tuning::{MOST_LOSS_CHUNKS, worth_a_chunk};
use crate::plan::{Error, Options, Problem};
use crate::realise;
use ir::{Device, Graph};
use std::sync::OnceLock;

/// The numbers of chunks that are tried are powers of two; each has a slot.
const SLOTS: usize = MOST_LOSS_CHUNKS.ilog2() as usize + 1;

/// A graph after its last pass.
pub(crate) struct LossVariant<'a> {
    /// The number of chunks of rows of the loss; 1 if it is whole.
    pub(crate) chunks: u64,
    /// The graph, compact.
    pub(crate) graph: Graph,
    /// Times of its nodes.
    pub(crate) cost: Tabled<'a>,
    /// The passes that made it. They are reported after a variant is chosen. Empty if they were
    /// reported while they ran.
    pub(crate) passes: Vec<Ran>,
}

/// Room for the variants that are tried. Each is built at most once.
pub(crate) struct Slots<'c>([OnceLock<LossVariant<'c>>; SLOTS]);

/// Room for their problems, which borrow the variants. Each is built at most once.
pub(crate) struct Problems<'a>([OnceLock<Problem<'a>>; SLOTS]);

impl<'c> Slots<'c> {
    pub(crate) fn new() -> Slots<'c> {
        Slots(std::array::from_fn(|_| OnceLock::new()))
    }
}

impl<'a> Problems<'a> {
    pub(crate) fn new() -> Problems<'a> {
        Problems(std::array::from_fn(|_| OnceLock::new()))
    }
}

/// What variants are made from.
pub(crate) struct Stage<'s, 'a, 'c> {
    /// The graph after the shared passes.
    pub(crate) graph: &'s Graph,
    /// What the user chose.
    pub(crate) options: &'s Options,
    /// The machine.
    pub(crate) device: &'a Device,
    /// Times.
    pub(crate) cost: &'c dyn Cost,
    /// Where variants are kept.
    pub(crate) slots: &'a Slots<'c>,
    /// Where their problems are kept.
    pub(crate) problems: &'s Problems<'a>,
}

/// Bytes that a variant needs: when everything is kept, and at its neediest line.
type Needs = [u64; 2];

impl<'a, 'c> Stage<'_, 'a, 'c> {
    /// Builds the variants among which planning decides; returns their slots, the whole loss first.
    /// If there is only one variant, its passes are reported as they end.
    pub(crate) fn run(&self, manager: &mut Manager<'_, '_>) -> Result<Vec<usize>, Error> {
        let most = match self.options.loss_chunks {
            // The factor of the loss's gradient comes after the forward.
            Chunks::Auto if self.options.parts.is_some() => return self.single(1, manager),
            Chunks::Of(n) => return self.single(n, manager),
            Chunks::Auto => loss::chunks(self.graph, MOST_LOSS_CHUNKS),
        };
        if most < 2 {
            return self.single(1, manager);
        }
        let most = most.ilog2() as usize;
        let (whole, last) = rayon::join(|| self.needs(0), || self.needs(most));
        let (whole, least) = (whole?, last?);
        let close = |needs| is_close(needs, least, worth_a_chunk(self.device.processor()));
        if close(whole) {
            return Ok(vec![0]);
        }
        let mut slot = most;
        while slot > 1 && close(self.needs(slot - 1)?) {
            slot -= 1;
        }
        log::debug!("loss: whole or in {} chunks", 1u64 << slot);
        Ok(vec![0, slot])
    }

    /// The only variant, with the loss in `n` chunks of rows at most.
    fn single(&self, n: u64, manager: &mut Manager<'_, '_>) -> Result<Vec<usize>, Error> {
        let variant = self.build(n, &mut |ran| manager.tell(&ran))?;
        self.keep(0, variant);
        Ok(vec![0])
    }

    /// What the variant of a slot needs.
    fn needs(&self, slot: usize) -> Result<Needs, Error> {
        let mut passes = vec![];
        let variant = self.build(1 << slot, &mut |ran| passes.push(ran))?;
        let problem = self.keep(slot, LossVariant { passes, ..variant });
        let schedule = realise::unnamed(problem, &problem.start())?;
        let keep = alloc::live_peak(&schedule, &alloc::lifetimes(&schedule), DEVICE);
        Ok([keep, alloc::neediest(&schedule, DEVICE)])
    }

    /// Runs the passes of a variant.
    fn build(&self, n: u64, ended: &mut dyn FnMut(Ran)) -> Result<LossVariant<'c>, Error> {
        let context = GraphContext {
            options: self.options,
            cost: self.cost,
            loss_chunks: n,
        };
        let mut graph = self.graph.clone();
        run_graph(&PER_VARIANT, &mut graph, &context, ended)?;
        let graph = graph.compact();
        Ok(LossVariant {
            chunks: loss::chunks(self.graph, n),
            cost: Tabled::new(self.cost, &graph),
            graph,
            passes: vec![],
        })
    }

    /// Puts a variant into its slot, with its problem.
    fn keep(&self, slot: usize, variant: LossVariant<'c>) -> &Problem<'a> {
        let slots: &'a Slots<'c> = self.slots;
        let variant = slots.0[slot].get_or_init(|| variant);
        let host = self.options.host.unwrap_or(self.device.host_bytes);
        self.problems.0[slot].get_or_init(|| {
            Problem::new(&variant.graph, self.device, &variant.cost)
                .with_host_limit(host)
                .with_fixed(self.options.protrain)
                .with_parts(self.options.parts.as_ref())
                .with_homes(self.options.homes.as_ref())
                .with_cancel(&self.options.cancel)
        })
    }
}

/// True if a variant needs at most this share more than another.
fn is_close(needs: Needs, least: Needs, share: f64) -> bool {
    needs
        .iter()
        .zip(least)
        .all(|(&needs, least)| needs as f64 <= least as f64 * (1.0 + share))
}

/// The variants of slots.
pub(crate) fn taken<'s, 'c>(slots: &'s Slots<'c>, taken: &[usize]) -> Vec<&'s LossVariant<'c>> {
    let variant = |&slot: &usize| slots.0[slot].get().expect("a slot should be filled");
    taken.iter().map(variant).collect()
}

/// The problems of slots.
pub(crate) fn problems<'a>(mut problems: Problems<'a>, taken: &[usize]) -> Vec<Problem<'a>> {
    let take = |&slot: &usize| problems.0[slot].take().expect("a slot should be filled");
    taken.iter().map(take).collect()
}
