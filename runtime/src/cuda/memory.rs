//! Memory of the device, memory of the host that it can copy, and the ways between them.
//!
//! What is relied on without a check is order: a copy runs when its stream gets there, and until
//! then nothing else may touch its bytes on the host. For [`Pinned`] memory the borrows of one
//! thread's calls and the caller's waits say that.

#![allow(unsafe_code, reason = "the device reads and writes memory of the host")]

use super::context::Context;
use super::device::Device;
use super::driver::{DeviceRange, Driver, DriverError};
use super::stream::{Event, Priority, Stream};
use crate::kernel::Tensor;
use crate::memory::{Arena, Borrowed};
use crate::sync::unpoisoned;
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex};

/// A block of the device's memory, of exactly the bytes that were wanted.
pub struct DeviceBlock {
    context: Arc<Context>,
    address: u64,
    bytes: u64,
    is_of_host: bool,
}

impl DeviceBlock {
    /// A block. What is in it has no meaning.
    ///
    /// # Errors
    /// The device does not have as much.
    pub fn new(device: &Device, bytes: u64) -> Result<DeviceBlock, DriverError> {
        let context = device.context().clone();
        let n_bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut block = DeviceBlock {
            context,
            address: 0,
            bytes,
            is_of_host: false,
        };
        // There is no block without bytes, and no place in it has any.
        if n_bytes > 0 {
            let context = block.context.clone();
            block.address = context.call(|driver| driver.allocate(n_bytes))?;
            block.is_of_host = context.call(|driver| driver.is_of_host(block.address))?;
        }
        Ok(block)
    }

    /// Whether the host can use its addresses. No memory of a GPU is such.
    pub fn is_of_host(&self) -> bool {
        self.is_of_host
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Some of its bytes. Panics if they are not in it.
    pub fn range(&self, offset: u64, bytes: u64) -> DeviceRange {
        let end = offset.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "a validated tensor should lie in its pool"
        );
        DeviceRange {
            address: self.address + offset,
            bytes,
        }
    }
}

impl Drop for DeviceBlock {
    fn drop(&mut self) {
        if self.address != 0 {
            self.context.destroy(|driver| driver.free(self.address));
        }
    }
}

impl fmt::Debug for DeviceBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DeviceBlock").field(&self.bytes).finish()
    }
}

/// Memory of the host that the device copies without the host's help.
pub struct Pinned {
    context: Arc<Context>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: it is memory that it owns, as a boxed slice is: it is written through `&mut` alone.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Zeroed memory.
    ///
    /// # Errors
    /// The system does not lend as much.
    pub fn new(device: &Device, bytes: usize) -> Result<Pinned, DriverError> {
        let context = device.context().clone();
        let start = context.call(|driver| driver.host_allocate(bytes))?;
        // SAFETY: the driver gave memory of this size, and nothing else has it yet.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Pinned {
            context,
            start,
            bytes,
        })
    }

    /// Where it begins.
    pub fn address(&self) -> usize {
        self.start.addr()
    }

    fn check(&self, offset: usize, bytes: usize) {
        let end = offset.checked_add(bytes);
        let fits = end.is_some_and(|end| end <= self.bytes);
        assert!(fits, "the bytes should lie in the pinned memory");
    }

    /// Writes bytes from an offset on, which all copies out of them have read. Panics if they are
    /// not in it.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        // SAFETY: the range lies in the memory, which no other slice is of; no copy of the device
        // touches it, by this function's contract, or it reads bytes of one or the other time.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(offset), bytes.len());
        }
    }
    /// Reads bytes from an offset on, which all copies into them have written. Panics if they are
    /// not in it.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        self.check(offset, bytes.len());
        // SAFETY: as for `write`; all bytes are initialised.
        unsafe {
            ptr::copy_nonoverlapping(self.start.add(offset), bytes.as_mut_ptr(), bytes.len());
        }
    }

    /// Copies bytes from an offset on to the device, when the stream gets there. Panics if they are
    /// not in it.
    pub fn copy_in(
        &self,
        stream: &Stream,
        offset: usize,
        to: DeviceRange,
    ) -> Result<(), DriverError> {
        let bytes = to.bytes as usize;
        self.check(offset, bytes);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the range lies in the memory, whose drop waits for the device.
        let copy = |driver: &Driver| unsafe {
            driver.copy_in(to.address, self.start.add(offset), bytes, stream.handle())
        };
        stream.context().call(copy)
    }
    /// Copies bytes of the device to an offset, when the stream gets there. Panics if they do not
    /// fit.
    pub fn copy_out(
        &mut self,
        stream: &Stream,
        offset: usize,
        from: DeviceRange,
    ) -> Result<(), DriverError> {
        let bytes = from.bytes as usize;
        self.check(offset, bytes);
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: as for `copy_in`.
        let copy = |driver: &Driver| unsafe {
            driver.copy_out(self.start.add(offset), from.address, bytes, stream.handle())
        };
        stream.context().call(copy)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // After a fatal error the device has stopped, and the memory stays the driver's.
        self.context.destroy(|driver| {
            driver.synchronize()?;
            // SAFETY: the driver gave this address, and the device is done with it.
            unsafe { driver.host_free(self.start) }
        });
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pinned").field(&self.bytes).finish()
    }
}

/// A pool of the host's that the device may copy: its memory, pinned.
///
/// **Invariant:** the arena outlives it.
pub(crate) struct Registered {
    context: Arc<Context>,
    /// Where each piece begins that was pinned.
    pieces: Vec<Tensor>,
}

impl Registered {
    /// Pins an arena, in pieces of so many bytes: a single call for hundreds of GiB fails. The
    /// caller keeps the arena longer than what this returns.
    pub(crate) fn new(
        device: &Device,
        arena: &Arena,
        piece_bytes: u64,
    ) -> Result<Registered, DriverError> {
        let mut registered = Registered {
            context: device.context().clone(),
            pieces: vec![],
        };
        for (offset, bytes) in pieces(0, arena.bytes(), piece_bytes, piece_bytes) {
            let piece = arena.range(offset, bytes);
            // SAFETY: the range lies in the arena, which is one allocation and outlives this value,
            // whose drop undoes it.
            let register =
                |driver: &Driver| unsafe { driver.host_register(piece.data, piece.bytes) };
            registered.context.call(register)?;
            // So that an error undoes what was done.
            registered.pieces.push(piece);
        }
        Ok(registered)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        for piece in &self.pieces {
            self.context
                .destroy(|driver| driver.host_unregister(piece.data));
        }
    }
}

/// A copy between pools, one of which is the device's.
pub(crate) struct Transfer {
    way: Mutex<Way>,
    /// Offsets and sizes of what is copied at a time.
    pieces: Box<[(u64, u64)]>,
}

enum Way {
    In { from: Tensor, to: DeviceRange },
    Out { from: DeviceRange, to: Tensor },
    Within { from: DeviceRange, to: DeviceRange },
}

/// Into which pieces copies are cut.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    /// The most bytes of a copy: an urgent one waits for no more than one that has begun.
    pub(crate) copy_bytes: u64,
    /// A copy lies in one piece of what was registered: at multiples of so many bytes of a pool the
    /// next begins.
    pub(crate) register_bytes: u64,
}

impl Transfer {
    /// From the host, where the bytes begin at an offset of their pool.
    pub(crate) fn copy_in(from: Tensor, offset: u64, to: DeviceRange, cut: Cut) -> Transfer {
        let pieces = pieces(offset, to.bytes, cut.copy_bytes, cut.register_bytes);
        Transfer::new(Way::In { from, to }, pieces)
    }
    /// To the host, where the bytes begin at an offset of their pool.
    pub(crate) fn copy_out(from: DeviceRange, to: Tensor, offset: u64, cut: Cut) -> Transfer {
        let pieces = pieces(offset, from.bytes, cut.copy_bytes, cut.register_bytes);
        Transfer::new(Way::Out { from, to }, pieces)
    }
    /// On the device.
    pub(crate) fn within(from: DeviceRange, to: DeviceRange) -> Transfer {
        let pieces = Box::new([(0, to.bytes)]);
        Transfer::new(Way::Within { from, to }, pieces)
    }

    fn new(way: Way, pieces: Box<[(u64, u64)]>) -> Transfer {
        let way = Mutex::new(way);
        Transfer { way, pieces }
    }

    /// Says where its source, or else its destination, lies from now on: `offset` bytes into memory
    /// of the caller on the device. Panics if the bytes are not in it.
    pub(crate) fn point(&self, is_source: bool, memory: &Borrowed, offset: u64) {
        let mut way = unpoisoned(&self.way);
        let end = match &mut *way {
            Way::In { to, .. } => to,
            Way::Out { from, .. } => from,
            Way::Within { from, .. } if is_source => from,
            Way::Within { to, .. } => to,
        };
        *end = DeviceRange::borrowed(memory, offset, end.bytes);
    }

    /// False if an end of it is memory of the caller that no [`Transfer::point`] gave.
    pub(crate) fn has_memory(&self) -> bool {
        let has_memory = |end: &DeviceRange| end.address != 0;
        match &*unpoisoned(&self.way) {
            Way::In { to: end, .. } | Way::Out { from: end, .. } => has_memory(end),
            Way::Within { from, to } => has_memory(from) && has_memory(to),
        }
    }

    /// Submits it. Tensors are ranges of pools, which the machine keeps until the device is done;
    /// that nothing else touches their bytes meanwhile is `validate`'s proof.
    pub(crate) fn submit(&self, stream: &Stream) -> Result<(), DriverError> {
        let way = unpoisoned(&self.way);
        let mut pieces = self.pieces.iter();
        pieces.try_for_each(|&(at, bytes)| way.piece(stream, at, bytes))
    }
}

impl Way {
    fn piece(&self, stream: &Stream, at: u64, bytes: u64) -> Result<(), DriverError> {
        let (offset, n) = (at as usize, bytes as usize);
        let host = |tensor: &Tensor| {
            assert!(offset + n <= tensor.bytes, "a piece should lie in its copy");
            // SAFETY: by the assertion.
            unsafe { tensor.data.add(offset) }
        };
        match self {
            Way::In { from, to } => {
                let (from, to) = (host(from), to.part(at, bytes).address);
                // SAFETY: a Tensor lies in its pool, which the machine keeps until the device is
                // done; no other command writes the bytes meanwhile, by `validate`'s race check.
                let copy =
                    |driver: &Driver| unsafe { driver.copy_in(to, from, n, stream.handle()) };
                stream.context().call(copy)
            }
            Way::Out { from, to } => {
                let (from, to) = (from.part(at, bytes).address, host(to));
                // SAFETY: as above; no other command touches the bytes meanwhile.
                let copy =
                    |driver: &Driver| unsafe { driver.copy_out(to, from, n, stream.handle()) };
                stream.context().call(copy)
            }
            Way::Within { from, to } => stream.copy(to.part(at, bytes), from.part(at, bytes)),
        }
    }
}

/// Offsets and sizes of the pieces of `bytes` bytes that begin at `offset` of a pool: each at most
/// `most` long, and none across a multiple of `border`.
fn pieces(offset: u64, bytes: u64, most: u64, border: u64) -> Box<[(u64, u64)]> {
    let mut pieces = vec![];
    let mut at = 0;
    while at < bytes {
        let to_border = border - (offset + at) % border;
        let piece = most.min(to_border).min(bytes - at);
        pieces.push((at, piece));
        at += piece;
    }
    pieces.into()
}

/// A way in and out of the device's memory for bytes of the host that are not pinned: two pieces of
/// pinned memory in turn, so that one is filled while the other is copied.
#[derive(Debug)]
pub struct Staging {
    stream: Stream,
    halves: [Half; 2],
    bytes: usize,
}

#[derive(Debug)]
struct Half {
    memory: Pinned,
    /// Its last copy.
    copied: Event,
    is_used: bool,
}

impl Half {
    /// Returns when its last copy is done.
    fn wait(&mut self) -> Result<(), DriverError> {
        if std::mem::take(&mut self.is_used) {
            self.copied.synchronize()?;
        }
        Ok(())
    }
    fn used(&mut self, stream: &Stream) -> Result<(), DriverError> {
        self.is_used = true;
        stream.record(&self.copied)
    }
}

impl Staging {
    /// Two pieces of so many bytes each, at least one.
    ///
    /// # Errors
    /// There is no such memory.
    pub fn new(device: &Device, bytes: usize) -> Result<Staging, DriverError> {
        let bytes = bytes.max(1);
        let half = || -> Result<Half, DriverError> {
            Ok(Half {
                memory: Pinned::new(device, bytes)?,
                copied: device.event()?,
                is_used: false,
            })
        };
        Ok(Staging {
            stream: device.stream(Priority::High)?,
            halves: [half()?, half()?],
            bytes,
        })
    }

    /// Writes bytes to the device, as many as the range has; they are there when it returns.
    /// Nothing else may touch them meanwhile.
    pub fn write(&mut self, to: DeviceRange, bytes: &[u8]) -> Result<(), DriverError> {
        assert_eq!(
            to.bytes,
            bytes.len() as u64,
            "a range should be written whole"
        );
        let mut from = 0;
        for (i, piece) in bytes.chunks(self.bytes).enumerate() {
            let half = &mut self.halves[i % 2];
            half.wait()?;
            half.memory.write(0, piece);
            let to = to.part(from, piece.len() as u64);
            half.memory.copy_in(&self.stream, 0, to)?;
            half.used(&self.stream)?;
            from += piece.len() as u64;
        }
        self.halves.iter_mut().try_for_each(Half::wait)
    }

    /// Reads bytes of the device, as many as the range has. Nothing may write them meanwhile.
    pub fn read(&mut self, from: DeviceRange, bytes: &mut [u8]) -> Result<(), DriverError> {
        assert_eq!(
            from.bytes,
            bytes.len() as u64,
            "a range should be read whole"
        );
        let piece_bytes = self.bytes;
        let n = bytes.len().div_ceil(piece_bytes);
        // The copy of each piece is submitted before the piece before it is read.
        let begin = |staging: &mut Staging, i: usize| {
            let at = i * piece_bytes;
            let piece = piece_bytes.min(from.bytes as usize - at);
            let half = &mut staging.halves[i % 2];
            let from = from.part(at as u64, piece as u64);
            half.memory.copy_out(&staging.stream, 0, from)?;
            half.used(&staging.stream)
        };
        if n > 0 {
            begin(self, 0)?;
        }
        for (i, piece) in bytes.chunks_mut(piece_bytes).enumerate() {
            if i + 1 < n {
                begin(self, i + 1)?;
            }
            let half = &mut self.halves[i % 2];
            half.wait()?;
            half.memory.read(0, piece);
        }
        Ok(())
    }

    /// Sets each byte of a range; they are there when it returns.
    pub fn fill(&mut self, range: DeviceRange, byte: u8) -> Result<(), DriverError> {
        self.stream.fill(range, byte)?;
        self.stream.synchronize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_cut_where_they_are_too_long_and_where_a_registered_piece_ends() {
        let cut = |offset, bytes| pieces(offset, bytes, 64, 100).into_vec();
        assert_eq!(cut(0, 0), []);
        assert_eq!(cut(0, 64), [(0, 64)]);
        assert_eq!(cut(0, 65), [(0, 64), (64, 1)]);
        assert_eq!(cut(90, 70), [(0, 10), (10, 60)]);
        assert_eq!(
            cut(100, 201),
            [(0, 64), (64, 36), (100, 64), (164, 36), (200, 1)]
        );
    }
}
