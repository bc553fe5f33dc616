//! Where memory comes from: the GPU's driver, or the host for tests and for trying a plan without a
//! GPU.

use std::collections::BTreeMap;
use std::num::TryFromIntError;
use thiserror::Error;

/// Everything that a stream had been asked to do when this was recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event(pub u64);

/// What a device says when it refuses.
#[derive(Debug, Error)]
pub enum PoolError {
    /// The driver's library cannot be loaded.
    #[error("{library}: {source}")]
    Library {
        /// The library's name or path.
        library: String,
        /// What the loader said.
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
    /// What another pool than this crate's says.
    #[error("{0}")]
    Other(String),
}

/// A device's memory and its streams. Addresses and streams are the device's own numbers, 0 being
/// its default stream.
pub trait Pool: Send {
    /// New memory, at a multiple of 512 bytes at least on the host and of what the driver gives on
    /// a device (256).
    ///
    /// # Errors
    /// What the device said.
    fn allocate(&mut self, bytes: u64) -> Result<u64, PoolError>;

    /// Gives back what `allocate` gave, after all work on the device that was submitted before.
    fn free(&mut self, address: u64);

    /// Marks what `stream` has been asked to do so far.
    ///
    /// # Errors
    /// What the device said.
    fn record(&mut self, stream: u64) -> Result<Event, PoolError>;

    /// True once all that the event stands for has been done.
    fn done(&mut self, event: Event) -> bool;

    /// What `stream` is asked to do from now on begins after the event. Does not wait itself.
    ///
    /// # Errors
    /// What the device said.
    fn wait(&mut self, stream: u64, event: Event) -> Result<(), PoolError>;

    /// The event is needed no more.
    fn forget(&mut self, event: Event);

    /// Returns when the device has done everything it was asked to do.
    fn synchronize(&mut self);
}

/// The unit of [`Host`]'s memory.
#[repr(align(512))]
struct Line {
    _bytes: [u8; 512],
}

/// Memory of the host. Whoever writes to it does so in turn, so that every event is over when it is
/// recorded.
#[derive(Default)]
pub struct Host {
    blocks: BTreeMap<u64, Vec<Line>>,
}

impl Pool for Host {
    fn allocate(&mut self, bytes: u64) -> Result<u64, PoolError> {
        let mut lines: Vec<Line> = vec![];
        let n_lines = usize::try_from(bytes.div_ceil(512).max(1))?;
        // Reserved and not filled: a page costs nothing until somebody writes to it.
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
