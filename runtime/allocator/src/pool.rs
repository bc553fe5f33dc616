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
    /// A range of addresses is used up.
    #[error("no range of addresses has {bytes} bytes")]
    RangeFull {
        /// The bytes that were asked for.
        bytes: u64,
    },
    /// The device has no addresses without memory.
    #[error("the device cannot map memory")]
    NoMapping,
    /// The error of a pool of another crate.
    #[error("{0}")]
    Other(String),
}

/// Addresses into which memory is mapped, and from which it is taken away, in steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// The first address.
    pub address: u64,
    /// The number of addresses: a multiple of `step`, and at least the device's bytes.
    pub bytes: u64,
    /// The bytes of a step, counted from the first address.
    pub step: u64,
}

impl Range {
    /// The whole steps between two addresses: from the first to the second of the results, if that
    /// is larger.
    pub(crate) fn within(self, lo: u64, hi: u64) -> (u64, u64) {
        let lo = (lo - self.address).next_multiple_of(self.step);
        let hi = (hi - self.address) / self.step * self.step;
        (self.address + lo, self.address + hi)
    }
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

    /// New addresses, all without memory. Steps have at least `step` bytes.
    ///
    /// # Errors
    /// The device's error, or [`PoolError::NoMapping`] for a device without such addresses.
    fn reserve(&mut self, _step: u64) -> Result<Range, PoolError> {
        Err(PoolError::NoMapping)
    }

    /// Maps new memory: whole steps of a range, which have none.
    ///
    /// # Errors
    /// The device's error. Then none of the steps has memory.
    fn map(&mut self, _range: Range, _address: u64, _bytes: u64) -> Result<(), PoolError> {
        Err(PoolError::NoMapping)
    }

    /// Gives back memory of `map`: whole steps, which no submitted work uses.
    fn unmap(&mut self, _range: Range, _address: u64, _bytes: u64) {}

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
