//! The pools and streams that every schedule has.

use ir::schedule::MemorySpace;
use ir::{Device, Pool, Stream};

/// The device's memory.
pub const DEVICE: Pool = Pool::nth(0);
/// What is behind the device's link: the host's memory, or the disk in its place.
pub const HOST: Pool = Pool::nth(1);

/// The caller's memory with the states of a step in two parts. Such a step also has the pools
/// below.
pub const PARAMETERS: Pool = Pool::nth(2);
/// The caller's memory with the inputs that are there from the start, and the outputs that leave at
/// the pause. The step pauses after the last line that writes it.
pub const FORWARD: Pool = Pool::nth(3);
/// The caller's memory with the other inputs and outputs. No line before the pause reads it.
pub const BACKWARD: Pool = Pool::nth(4);

/// The stream that runs nodes on the device.
pub const COMPUTE: Stream = Stream::nth(0);
/// The stream of copies from the host to the device.
pub const H2D: Stream = Stream::nth(1);
/// The stream of copies from the device to the host.
pub const D2H: Stream = Stream::nth(2);
/// The stream of nodes that the host runs. A schedule has it only if there are such nodes.
pub const ON_HOST: Stream = Stream::nth(3);

/// The memory behind a device's link.
pub fn beyond(device: &Device) -> MemorySpace {
    match device.host_is_disk {
        true => MemorySpace::Disk,
        false => MemorySpace::Host,
    }
}

/// The names of [`COMPUTE`], [`H2D`] and [`D2H`].
pub(crate) fn stream_names(device: &Device) -> [&'static str; 3] {
    match beyond(device) {
        MemorySpace::Disk => ["compute", "disk2d", "d2disk"],
        MemorySpace::Host | MemorySpace::Device(_) => ["compute", "h2d", "d2h"],
    }
}
