//! Streams, which are queues of a device's commands, and events, which are marks in them.

use super::context::Context;
use super::driver::{DeviceRange, DriverError, Handle};
use std::fmt;
use std::sync::Arc;

/// Whose commands go first where several streams could use the same part of the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Priority {
    /// Kernels.
    Usual,
    /// Copies: others wait for them.
    High,
}

/// A queue of commands, which run in its order.
pub struct Stream {
    context: Arc<Context>,
    handle: Handle,
}

/// A mark that a stream reaches.
pub struct Event {
    context: Arc<Context>,
    handle: Handle,
}

impl Stream {
    pub(super) fn new(context: &Arc<Context>, priority: Priority) -> Result<Stream, DriverError> {
        // Numbers out of a device's range mean the end of the range.
        let priority = match priority {
            Priority::Usual => 0,
            Priority::High => -1,
        };
        let handle = context.call(|driver| driver.stream_create(priority))?;
        Ok(Stream {
            context: context.clone(),
            handle,
        })
    }
    pub(super) fn handle(&self) -> Handle {
        self.handle
    }
    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// Marks the event as reached once all commands so far are done.
    pub fn record(&self, event: &Event) -> Result<(), DriverError> {
        self.context
            .call(|driver| driver.event_record(event.handle, self.handle))
    }
    /// Commands from now on start when the last call of [`Stream::record`] for that event, which
    /// must have returned, is reached.
    pub fn wait(&self, event: &Event) -> Result<(), DriverError> {
        self.context
            .call(|driver| driver.stream_wait(self.handle, event.handle))
    }
    /// Returns when all commands so far are done.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        self.context.wait(|driver| driver.stream_query(self.handle))
    }
    /// Whether all commands so far are done.
    pub fn is_done(&self) -> Result<bool, DriverError> {
        self.context.call(|driver| driver.stream_query(self.handle))
    }
    /// Copies bytes on the device; as many as the shorter range has.
    pub fn copy(&self, to: DeviceRange, from: DeviceRange) -> Result<(), DriverError> {
        let bytes = to.bytes.min(from.bytes) as usize;
        if bytes == 0 {
            return Ok(());
        }
        self.context
            .call(|driver| driver.copy_within(to.address, from.address, bytes, self.handle))
    }
    /// Sets each byte of a range.
    pub fn fill(&self, range: DeviceRange, byte: u8) -> Result<(), DriverError> {
        if range.bytes == 0 {
            return Ok(());
        }
        let bytes = range.bytes as usize;
        self.context
            .call(|driver| driver.fill(range.address, byte, bytes, self.handle))
    }
}

impl Event {
    pub(super) fn new(context: &Arc<Context>, timed: bool) -> Result<Event, DriverError> {
        let handle = context.call(|driver| driver.event_create(timed))?;
        Ok(Event {
            context: context.clone(),
            handle,
        })
    }
    /// Returns when the last call of [`Stream::record`] for it is reached.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        self.context.wait(|driver| driver.event_query(self.handle))
    }
    /// Whether the last call of [`Stream::record`] for it is reached.
    pub fn is_reached(&self) -> Result<bool, DriverError> {
        self.context.call(|driver| driver.event_query(self.handle))
    }
    /// Milliseconds from this event to another, both of them timed and reached. The number has 24
    /// bits.
    pub fn elapsed(&self, to: &Event) -> Result<f32, DriverError> {
        self.context
            .call(|driver| driver.event_elapsed(self.handle, to.handle))
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Stream").field(&self.handle).finish()
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Event").field(&self.handle).finish()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.context
            .destroy(|driver| driver.stream_destroy(self.handle));
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.context
            .destroy(|driver| driver.event_destroy(self.handle));
    }
}
