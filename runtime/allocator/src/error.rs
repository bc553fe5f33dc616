//! Why a request, or a plan, gets no memory.

use crate::pool::PoolError;
use thiserror::Error;

/// Why a request, or a plan, gets no memory.
#[derive(Debug, Error)]
pub enum AllocError {
    /// The device has no room for the plan.
    #[error("the plan's pool of {bytes} bytes: {source}")]
    Plan {
        /// The plan's bytes.
        bytes: u64,
        /// The device's error.
        source: PoolError,
    },
    /// More bytes than any device has.
    #[error("no device has {bytes} bytes")]
    TooLarge {
        /// The bytes that were asked for.
        bytes: u64,
    },
    /// The device has no more memory.
    #[error("{source}: {bytes} bytes were asked for, {live} are in use, {reserved} reserved")]
    NoMemory {
        /// The bytes that were asked for.
        bytes: u64,
        /// Bytes in use.
        live: u64,
        /// Bytes taken from the device.
        reserved: u64,
        /// The device's error.
        source: PoolError,
    },
}
