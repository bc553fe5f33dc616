//! What is known of a machine before anything is emitted for it: how wide its vectors are, how many
//! threads share a row, what its caches need. The instructions that only one machine has are in
//! [`super::emit::Threads`].

use super::dag::Functions;
use super::plan::Plan;

/// A machine that kernels are planned for.
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
    /// and rows to come are fetched.
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
    /// Whether a result is stored past the caches.
    fn streams(plan: &Plan<'_>, result: usize) -> bool;
    /// Whether one round of all threads goes over this many elements.
    fn one_round(&self, elements: u64) -> bool;
}
