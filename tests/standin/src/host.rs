//! Host memory that the program registered, or that the driver allocated for it.
//!
//! **Invariant:** the bytes of a range in [`Pinned`] may be read and written until it is removed.
//! `cuMemHostRegister` promises it for ranges of the program.

#![allow(unsafe_code, reason = "copies go to memory of the program")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr;

/// The alignment of memory allocated here: a page.
const ALIGN: usize = 4096;

/// A range of host memory.
struct Region {
    bytes: u64,
    /// It was allocated here and will be freed here.
    ours: bool,
}

/// Ranges of host memory, by their addresses.
#[derive(Default)]
pub(crate) struct Pinned {
    regions: BTreeMap<u64, Region>,
}

impl Pinned {
    /// Adds a range of the program; false if it overlaps another.
    ///
    /// # Safety
    /// The bytes may be read and written until [`Pinned::remove`].
    pub(crate) unsafe fn register(&mut self, address: u64, bytes: u64) -> bool {
        let end = address + bytes;
        let before = self.regions.range(..end).next_back();
        let free = before.is_none_or(|(at, region)| at + region.bytes <= address);
        if free {
            let ours = false;
            self.regions.insert(address, Region { bytes, ours });
        }
        free
    }

    /// Allocates memory; its address.
    pub(crate) fn allocate(&mut self, bytes: usize) -> Option<u64> {
        let layout = Layout::from_size_align(bytes.max(1), ALIGN).ok()?;
        // SAFETY: the layout has at least a byte.
        let address = unsafe { alloc_zeroed(layout) } as u64;
        let region = Region {
            bytes: bytes as u64,
            ours: true,
        };
        if address == 0 {
            return None;
        }
        self.regions.insert(address, region);
        Some(address)
    }

    /// Removes the range that begins at an address and frees it if it is `ours`; false if there is
    /// no such range.
    pub(crate) fn remove(&mut self, address: u64, ours: bool) -> bool {
        let Some(region) = self.regions.get(&address).filter(|r| r.ours == ours) else {
            return false;
        };
        if ours && let Ok(layout) = Layout::from_size_align(region.bytes.max(1) as usize, ALIGN) {
            // SAFETY: `allocate` allocated it with this layout.
            unsafe { dealloc(address as *mut u8, layout) };
        }
        self.regions.remove(&address).is_some()
    }

    /// Address and size of each range that the program registered.
    pub(crate) fn registered(&self) -> Vec<[u64; 2]> {
        let regions = self.regions.iter().filter(|(_, region)| !region.ours);
        regions.map(|(&at, region)| [at, region.bytes]).collect()
    }

    /// The number of ranges.
    pub(crate) fn len(&self) -> usize {
        self.regions.len()
    }

    /// True if the bytes lie in one range.
    pub(crate) fn contains(&self, address: u64, bytes: usize) -> bool {
        let region = self.regions.range(..=address).next_back();
        region.is_some_and(|(at, region)| address - at + bytes as u64 <= region.bytes)
    }

    /// The start of the range, allocated by the driver, that has a byte.
    pub(crate) fn of_driver(&self, address: u64) -> Option<u64> {
        let (&start, region) = self.regions.range(..=address).next_back()?;
        (region.ours && address - start < region.bytes).then_some(start)
    }

    /// The bytes of a range.
    pub(crate) fn bytes(&self, start: u64) -> Vec<u8> {
        let mut bytes = vec![0; self.regions.get(&start).map_or(0, |r| r.bytes as usize)];
        self.read(start, &mut bytes);
        bytes
    }

    /// Reads host memory.
    ///
    /// # Panics
    /// If the bytes do not lie in a range.
    pub(crate) fn read(&self, address: u64, into: &mut [u8]) {
        assert!(
            self.contains(address, into.len()),
            "a range should be pinned"
        );
        // SAFETY: the bytes lie in a range, so they may be read (invariant of this file); device
        // memory is not host memory, so they do not overlap.
        unsafe { ptr::copy_nonoverlapping(address as *const u8, into.as_mut_ptr(), into.len()) };
    }

    /// Writes host memory.
    ///
    /// # Panics
    /// If the bytes do not lie in a range.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) {
        assert!(
            self.contains(address, bytes.len()),
            "a range should be pinned"
        );
        // SAFETY: as in `read`.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
    }
}
