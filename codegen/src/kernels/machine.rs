//! The properties of a machine that planning a kernel needs: the width of its vectors, the number
//! of threads that share a row, and its caches. The instructions that only one machine has are in
//! [`super::emit::Threads`].

use super::dag::Functions;
use super::plan::Plan;
use ir::Processor;

/// A machine for which kernels are planned.
pub(super) trait Machine: Sized {
    /// Its kind.
    const PROCESSOR: Processor;
    /// The largest alignment that a load or store states: the one of the widest register.
    const MOST_ALIGN: u64;
    /// How functions such as the exponential are computed.
    const FUNCTIONS: Functions;
    /// Loops over a row are unrolled twice if their sums depend on each other. GPUs run other
    /// threads meanwhile.
    const UNROLLS: bool;
    /// Loops are not unrolled. LLVM and ptxas would unroll a GPU's loops until registers run out.
    const ROLLED: bool;
    /// A kernel should help the caches: it processes long rows in blocks, and prefetches the next
    /// rows.
    const CACHES: bool;
    /// One call computes consecutive parts, so their rows are one loop.
    const PARTS_FOLLOW: bool;
    /// Parts whose sums over rows are added up at the same time: loads that wait for memory
    /// together. If there are several, a thread has one column of them.
    const SUMS_AT_ONCE: u64;

    /// The machine for a kernel.
    fn new(plan: &Plan<'_>) -> Self;
    /// Elements of a vector.
    fn lanes(&self) -> u64;
    /// Threads that share a row.
    fn threads(&self) -> u64;
    /// The number of vectors of a row that a thread has, if it is the same for each row: it then
    /// keeps them, and its sums over rows, in registers.
    fn slots(&self) -> Option<u64>;
    /// Rows with folds that the threads of a block compute at the same time, each by its own
    /// threads.
    fn rows_at_once(&self) -> u64;
    /// The approximate number of elements of a part.
    fn part(&self) -> u64;
    /// Columns of a part of the phase that adds up sums over rows.
    fn combined(&self) -> u64;
    /// Whether storing a result bypasses the caches.
    fn streams(plan: &Plan<'_>, result: usize) -> bool;
    /// Whether one round of all threads processes this number of elements.
    fn one_round(&self, elements: u64) -> bool;
}
