//! How a machine runs.

use std::path::Path;
use std::time::Duration;

/// How a machine runs what it is given.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Options {
    /// Slows copies between the device's pool and the host's to this many bytes per second, each
    /// way: a machine with a slow link, played on this one.
    pub link_bandwidth: Option<f64>,
    /// Time that each of those copies takes in addition; counts only with a bandwidth.
    pub link_latency: Duration,
    /// Notes when each command ran, for [`Machine::trace`](super::Machine::trace).
    pub trace: bool,
    /// Runs on one thread, in an order drawn from this seed among those that events permit, and
    /// fills dead bytes with NaNs: a test of the plan.
    pub shuffle: Option<u64>,
    /// Number of threads that share a kernel's run, on any stream; `None` for all that the system
    /// lends this process. Results do not depend on it. A shuffled run has one thread for
    /// everything.
    pub threads: Option<usize>,
    /// The number of the GPU, from 0, that runs a step for GPUs.
    pub gpu: u32,
}

/// The files that a machine uses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Files<'a> {
    /// Keeps what a GPU's libraries choose from one run to the next. It is made if it does not
    /// exist.
    pub choices: Option<&'a Path>,
    /// The folder of pools that are on a disk: see [`artifact::MemorySpace::Disk`].
    pub disk: Option<&'a Path>,
}

impl Options {
    /// Number of threads that share a kernel's run.
    pub(crate) fn team(&self) -> usize {
        let available = || std::thread::available_parallelism().map_or(1, |n| n.get());
        if self.shuffle.is_some() {
            1
        } else {
            self.threads.unwrap_or_else(available).min(MOST_THREADS)
        }
    }
}

/// The most threads of a team.
const MOST_THREADS: usize = 1024;
