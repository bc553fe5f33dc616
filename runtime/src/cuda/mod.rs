//! CUDA devices: the driver, and what it has for a process.
//!
//! [`Driver`] is the table of the driver's functions, found when a program runs. [`Device`] is a
//! GPU with its context; it makes [`Stream`]s and [`Event`]s. [`DeviceBlock`] is memory of the
//! device, [`Pinned`] memory of the host that it may copy, [`Staging`] a way in and out for the
//! host's bytes. A [`Module`] is PTX that the driver has compiled. [`Products`] is cuBLASLt.
//!
//! All of them may be used from any thread to which the device is [bound](Device::bind). After the
//! first error that is [fatal](DriverError::is_fatal) no function of the driver is called again,
//! not even to free: every call returns that error.
//!
//! What orders commands of different streams is the caller's: the machine's proof
//! ([`crate::validate()`]) in an ordinary run.

mod context;
mod device;
mod driver;
mod graph;
mod memory;
mod module;
mod products;
mod stream;

pub use device::{Device, Found};
pub use driver::{Arguments, DeviceRange, Driver, DriverError, Grid, Refused, Status};
pub use graph::Graph;
pub(crate) use memory::{Cut, Registered, Transfer};
pub use memory::{DeviceBlock, Pinned, Staging};
pub use module::{Function, Module, ModuleError};
pub use products::{Addend, Algorithm, Number, Places, Product, ProductError, Products, Shape};
pub use stream::{Event, Priority, Stream};
