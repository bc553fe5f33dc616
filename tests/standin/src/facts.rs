//! What a test asks of the stand-in beside its findings.

/// Counts of what happened, and of what there is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(C)]
pub struct Facts {
    /// Calls of the driver's functions.
    pub calls: u64,
    /// Calls that made something: memory, pinned or registered ranges, streams, events, modules.
    pub made: u64,
    /// Commands that were submitted and have not run.
    pub pending: u64,
    /// Bytes of device memory from the first one that ever was allocated to the last one that a
    /// command touched.
    pub touched_bytes: u64,
    /// Bytes of device memory that are allocated.
    pub device_bytes: u64,
    /// Streams, events, modules and ranges of host memory that exist.
    pub exist: u64,
}
