//! What differs between kernels for CPUs and for GPUs: how they are started, which threads
//! compute which part of a row, and how a row's sums are combined.

use super::dag::{Fold, Functions};
use super::emit::{Emitter, Plan};
use crate::mlir::{Builder, Value};

/// A machine as emitters see it.
pub(super) trait Machine: Sized {
    /// The largest alignment that a load or store states: that of the widest register.
    const MOST_ALIGN: u64;
    /// How functions such as the exponential are computed.
    const FUNCTIONS: Functions;
    /// Loops over a row are unrolled twice where their sums wait for each other. GPUs have other
    /// threads to run meanwhile.
    const UNROLLS: bool;
    /// Loops stay loops. LLVM and ptxas would unroll those of a GPU until registers run out.
    const ROLLED: bool;
    /// Rows pass through caches that a kernel should help: long rows are gone through in blocks,
    /// rows to come are fetched, and large results are stored past the caches.
    const CACHES: bool;
    /// One call computes parts that follow each other, so that their rows are one loop.
    const PARTS_FOLLOW: bool;

    /// The machine for a kernel.
    fn new(plan: &Plan<'_>) -> Self;
    /// Elements of a vector.
    fn lanes(&self) -> u64;
    /// Threads that share a row.
    fn threads(&self) -> u64;
    /// Elements of a part, about.
    fn part(&self) -> u64;
    /// Columns of a part of the phase that adds up sums over rows.
    fn combined(&self) -> u64;
    /// Begins a function of `n` addresses; the addresses.
    fn begin(&mut self, symbol: &str, n: usize) -> (Builder, Vec<Value>);
    /// The loop over the parts that a call computes, of `parts`: from, to and step.
    fn parts(e: &mut Emitter<'_, Self>, parts: u64) -> [Value; 3];
    /// Where a thread's share of a loop begins, of which all threads take `step` elements a round
    /// and one thread `each`; and the step.
    fn share(e: &mut Emitter<'_, Self>, from: Value, step: u64, each: u64) -> [Value; 2];
    /// Whether one round of all threads goes over this many elements.
    fn one_round(&self, elements: u64) -> bool;
    /// The numbers that threads have found of a row as one, known to all of them; `slot` is the
    /// fold's number among the row's.
    fn across(e: &mut Emitter<'_, Self>, fold: Fold, x: Value, slot: u64) -> Value;
    /// Waits until every thread has read what others may overwrite.
    fn synchronize(e: &mut Emitter<'_, Self>);
    /// A bit that is true for the one thread that writes what all know; none if there is one
    /// thread.
    fn leads(e: &mut Emitter<'_, Self>) -> Option<Value>;
    /// What remains to be said of a function.
    fn end(&self, symbol: &str, builder: &mut Builder);
}
