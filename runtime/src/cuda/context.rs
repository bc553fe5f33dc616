//! A device's context, and whether it can still be used.
//!
//! Once a call has returned a fatal status, nothing calls the driver any more: what the context had
//! is lost until the process ends.

use super::driver::{Driver, DriverError, Handle};
use std::ffi::c_int;
use std::sync::OnceLock;

/// The context that a device's memory, streams and modules belong to.
#[derive(Debug)]
pub(super) struct Context {
    driver: Driver,
    number: c_int,
    handle: Handle,
    /// The first fatal error.
    fatal: OnceLock<DriverError>,
}

impl Context {
    /// Takes a device's primary context.
    pub(super) fn new(driver: Driver, number: c_int) -> Result<Context, DriverError> {
        let handle = driver.retain(number)?;
        Ok(Context {
            driver,
            number,
            handle,
            fatal: OnceLock::new(),
        })
    }

    /// The calling thread's calls are for this context.
    pub(super) fn bind(&self) -> Result<(), DriverError> {
        self.call(|driver| driver.bind(self.handle))
    }
}

impl Context {
    /// Calls the driver, unless it has failed for good.
    pub(super) fn call<T>(
        &self,
        does: impl FnOnce(&Driver) -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        self.alive()?;
        let done = does(&self.driver);
        if let Err(error) = &done {
            self.note(error);
        }
        done
    }

    /// An error if the driver has failed for good: the one it failed with.
    pub(super) fn alive(&self) -> Result<(), DriverError> {
        match self.fatal.get() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Returns once something is done, which `done` asks of the driver. The thread asks again and
    /// again: an edge between device and host costs microseconds then, and a device that is given
    /// up ends the wait, which no call of the driver would.
    pub(super) fn wait(
        &self,
        done: impl Fn(&Driver) -> Result<bool, DriverError>,
    ) -> Result<(), DriverError> {
        while !self.call(&done)? {
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Remembers an error after which nothing may be called.
    pub(super) fn note(&self, error: &DriverError) {
        if error.is_fatal() {
            self.fatal.get_or_init(|| error.clone());
        }
    }

    /// Destroys something, on whichever thread. An error has nobody to tell: it is of earlier work,
    /// or fatal, and then the next call returns it.
    pub(super) fn destroy(&self, does: impl FnOnce(&Driver) -> Result<(), DriverError>) {
        if self.bind().is_ok() {
            let _ = self.call(does);
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Nothing of the context is left: all that was made of it kept it.
        let _ = self.call(|driver| driver.release(self.number));
    }
}
