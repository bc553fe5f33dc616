//! The pools and streams that every schedule has.

use ir::{Pool, Stream};

/// The device's memory.
pub const DEVICE: Pool = Pool::nth(0);
/// The host's memory.
pub const HOST: Pool = Pool::nth(1);

/// The stream that runs nodes on the device.
pub const COMPUTE: Stream = Stream::nth(0);
/// The stream of copies from the host to the device.
pub const H2D: Stream = Stream::nth(1);
/// The stream of copies from the device to the host.
pub const D2H: Stream = Stream::nth(2);
/// The stream of nodes that the host runs. A schedule has it only if there are such nodes.
pub const ON_HOST: Stream = Stream::nth(3);
