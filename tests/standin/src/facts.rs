//! The stand-in's counts, which tests read in addition to its findings.

/// Counts of events and of existing objects.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(C)]
pub struct Facts {
    /// Calls of the driver's functions.
    pub calls: u64,
    /// Calls that made an object: memory, pinned or registered ranges, streams, events, modules.
    pub made: u64,
    /// Commands that were submitted and have not run.
    pub pending: u64,
    /// Bytes of device memory from the first allocated byte to the last byte that a command
    /// touched.
    pub touched_bytes: u64,
    /// Allocated bytes of device memory.
    pub device_bytes: u64,
    /// Existing streams, events, modules and ranges of host memory.
    pub exist: u64,
}
