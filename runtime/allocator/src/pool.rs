//! The source of memory: the GPU's driver, or the host, for tests and for trying a plan without a
//! GPU.

use std::collections::BTreeMap;
use std::num::TryFromIntError;
use thiserror::Error;

/// All work that was submitted to a stream before this was recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event(pub u64);

/// A device's error.
#[derive(Debug, Error)]
pub enum PoolError {
    /// The driver's library cannot be loaded.
    #[error("{library}: {source}")]
    Library {
        /// The library's name or path.
        library: String,
        /// The loader's error.
        source: libloading::Error,
    },
    /// The driver refused a call.
    #[error("{call}: {name} ({status})")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// The driver's name of the error.
        name: String,
        /// The number of the error.
        status: i32,
    },
    /// The host has too little memory.
    #[error("the host has no {bytes} bytes")]
    Host {
        /// The bytes that were asked for.
        bytes: u64,
    },
    /// More bytes than there are addresses.
    #[error(transparent)]
    TooLarge(#[from] TryFromIntError),
    /// The error of a pool of another crate.
    #[error("{0}")]
    Other(String),
}

/// A device's memory and its streams. Addresses and streams are the device's own numbers; 0 is its
/// default stream.
pub trait Pool: Send {
    /// New memory. Its address is a multiple of 512 bytes on the host, and of the driver's
    /// alignment (256) on a device.
    ///
    /// # Errors
    /// The device's error.
    fn allocate(&mut self, bytes: u64) -> Result<u64, PoolError>;

    /// Gives back memory of `allocate`, after all earlier work on the device.
    fn free(&mut self, address: u64);

    /// Marks the work that was submitted to `stream` so far.
    ///
    /// # Errors
    /// The device's error.
    fn record(&mut self, stream: u64) -> Result<Event, PoolError>;

    /// True when all work of the event is done.
    fn done(&mut self, event: Event) -> bool;

    /// Later work of `stream` begins after the event. This call does not wait.
    ///
    /// # Errors
    /// The device's error.
    fn wait(&mut self, stream: u64, event: Event) -> Result<(), PoolError>;

    /// The event is not needed any more.
    fn forget(&mut self, event: Event);

    /// Returns when the device has done all submitted work.
    fn synchronize(&mut self);
}

/// The unit of [`Host`]'s memory.
#[repr(align(512))]
struct Line {
    _bytes: [u8; 512],
}

/// Memory of the host. Its users write one after the other, so every event is complete when it is
/// recorded.
#[derive(Default)]
pub struct Host {
    blocks: BTreeMap<u64, Vec<Line>>,
}

impl Pool for Host {
    fn allocate(&mut self, bytes: u64) -> Result<u64, PoolError> {
        let mut lines: Vec<Line> = vec![];
        let n_lines = usize::try_from(bytes.div_ceil(512).max(1))?;
        // Reserved and not filled: a page costs nothing before the first write to it.
        lines
            .try_reserve_exact(n_lines)
            .map_err(|_| PoolError::Host { bytes })?;
        let address = lines.as_ptr() as u64;
        self.blocks.insert(address, lines);
        Ok(address)
    }

    fn free(&mut self, address: u64) {
        self.blocks.remove(&address);
    }

    fn record(&mut self, _: u64) -> Result<Event, PoolError> {
        Ok(Event(0))
    }

    fn done(&mut self, _: Event) -> bool {
        true
    }

    fn wait(&mut self, _: u64, _: Event) -> Result<(), PoolError> {
        Ok(())
    }

    fn forget(&mut self, _: Event) {}

    fn synchronize(&mut self) {}
}
