//! A GPU. Everything that is made of a device keeps its context, and is destroyed in it.

use super::context::Context;
use super::driver::{Attribute, DeviceRange, Driver, DriverError, Status};
use super::stream::{Event, Priority, Stream};
use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

/// A GPU, and its primary context. A clone is the same one.
#[derive(Clone, Debug)]
pub struct Device {
    context: Arc<Context>,
    name: String,
    sm: u32,
    version: u32,
    shared_bytes: u32,
}

/// What a driver tells of a GPU before it is used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// Its number, counted from 0.
    pub number: u32,
    /// Its name.
    pub name: String,
    /// Its architecture: 90 is `sm_90`.
    pub sm: u32,
    /// All bytes of its memory.
    pub bytes: u64,
}

impl Found {
    /// The GPUs of a machine, by number. No context is made for them.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn all(driver: &Driver) -> Result<Vec<Found>, DriverError> {
        let numbers = 0..driver.device_count()?;
        let found = |number: c_int| {
            let device = driver.device(number)?;
            Ok(Found {
                number: u32::try_from(number).unwrap_or(0),
                name: driver.device_name(device)?,
                sm: sm(driver, device)?,
                bytes: driver.device_bytes(device)?,
            })
        };
        numbers.map(found).collect()
    }
}

/// A device's architecture: 90 is `sm_90`.
fn sm(driver: &Driver, device: c_int) -> Result<u32, DriverError> {
    let attribute = |which| {
        let value = driver.attribute(device, which)?;
        Ok::<u32, DriverError>(u32::try_from(value).unwrap_or(0))
    };
    Ok(10 * attribute(Attribute::Major)? + attribute(Attribute::Minor)?)
}

impl Device {
    /// The GPU of that number, counted from 0, by its primary context. It is bound to the calling
    /// thread.
    ///
    /// # Errors
    /// There is no such device, or the driver refuses.
    pub fn new(driver: Driver, number: u32) -> Result<Device, DriverError> {
        let number = driver.device(c_int::try_from(number).unwrap_or(c_int::MAX))?;
        let sm = sm(&driver, number)?;
        let shared_bytes = driver.attribute(number, Attribute::MaxSharedOptIn)?;
        let shared_bytes = u32::try_from(shared_bytes).unwrap_or(0);
        let version = u32::try_from(driver.version()?).unwrap_or(0);
        let name = driver.device_name(number)?;
        let context = Context::new(driver, number)?;
        let device = Device {
            context: Arc::new(context),
            name,
            sm,
            version,
            shared_bytes,
        };
        device.bind()?;
        Ok(device)
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Its name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }
    /// Its architecture: 90 is `sm_90`.
    pub fn sm(&self) -> u32 {
        self.sm
    }
    /// The newest version of CUDA that its driver serves: 12020 is 12.2.
    pub fn driver_version(&self) -> u32 {
        self.version
    }
    /// The most shared memory that a block can have, bytes.
    pub fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }
    /// Bytes of its memory that are free, and all of them.
    pub fn memory(&self) -> Result<(u64, u64), DriverError> {
        self.context.call(Driver::memory_info)
    }

    /// Whether the driver knows an address: it does not know what a program allocates elsewhere.
    pub fn knows(&self, range: DeviceRange) -> Result<bool, DriverError> {
        let kind = self
            .context
            .call(|driver| driver.is_of_host(range.address()));
        match kind {
            Err(e) if e.status() == Some(Status::INVALID_VALUE) => Ok(false),
            kind => kind.map(|_| true),
        }
    }

    /// Makes the calling thread one that may use the device: the first thing it does with it.
    pub fn bind(&self) -> Result<(), DriverError> {
        self.context.bind()
    }
    /// Returns when the device has nothing more to do for this process.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        self.context.call(Driver::synchronize)
    }
    /// Counts the device as stuck: from now on every call is an error.
    pub fn give_up(&self, after: Duration) {
        self.context.note(&DriverError::stuck(after));
    }
    /// An error if the device has failed for good: the one it failed with. It calls no driver.
    pub fn alive(&self) -> Result<(), DriverError> {
        self.context.alive()
    }

    /// A queue of commands.
    pub fn stream(&self, priority: Priority) -> Result<Stream, DriverError> {
        Stream::new(&self.context, priority)
    }
    /// A mark in a stream.
    pub fn event(&self) -> Result<Event, DriverError> {
        Event::new(&self.context, false)
    }
    /// A mark that has the time at which it is reached.
    pub fn timed_event(&self) -> Result<Event, DriverError> {
        Event::new(&self.context, true)
    }
}
