//! Pools: one allocation each, of exactly the planned size, and the few functions besides kernels
//! that touch its bytes.
//!
//! Everything here works on places that [`crate::validate`] proved to lie in their pool. The checks
//! are made once more where a place becomes an address. Only the order of accesses is not checked
//! here. Two threads touch the same byte, one of them writing, only with an event between them
//! (`validate` proves it for the commands). The host touches pools only while no step runs (the
//! machine's `idle`); it touches inputs and outputs also while no conflicting command runs or may
//! start (the machine's `io_idle`).

#![allow(
    unsafe_code,
    reason = "pools are shared by streams; see the module's text"
)]

use crate::kernel::Tensor;
use artifact::DType;
use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;
use std::sync::Arc;

/// Pools of a page or more start at a page, so that they can be pinned.
const PAGE: usize = 4096;
/// Pools of at least this many bytes start at a large page and request such pages: a kernel that
/// walks along columns, or over many tensors, then needs fewer page-table walks.
const LARGE_PAGE: usize = 2 << 20;

/// Requests large pages if the system has them; the answer changes only the speed.
#[cfg(target_os = "linux")]
fn large_pages(start: *mut u8, bytes: usize) {
    if bytes >= LARGE_PAGE {
        // SAFETY: the range is one allocation of ours, which begins at a page, and the advice
        // changes no byte of it.
        unsafe { libc::madvise(start.cast(), bytes / PAGE * PAGE, libc::MADV_HUGEPAGE) };
    }
}
#[cfg(not(target_os = "linux"))]
fn large_pages(_: *mut u8, _: usize) {}
/// The alignment that every place relies on.
const CACHE_LINE: usize = crate::validate::ALIGN as usize;

/// A pool's memory. It stays until the last loan of it has ended. A clone is the same memory.
#[derive(Clone)]
pub(crate) struct Arena {
    block: Arc<Block>,
}

/// One allocation.
struct Block {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a Block is an address and a size; code that touches its bytes is responsible for the
// order, see the module's text.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Arena {
    /// A zeroed pool of exactly `bytes` bytes; `None` if the memory is not available. The pages are
    /// touched here, so that a step has no page faults.
    pub(crate) fn new(bytes: u64) -> Option<Arena> {
        let bytes = usize::try_from(bytes).ok()?;
        let align = match bytes {
            LARGE_PAGE.. => LARGE_PAGE,
            PAGE.. => PAGE,
            _ => CACHE_LINE,
        };
        let layout = Layout::from_size_align(bytes, align).ok()?;
        if bytes == 0 {
            let start = NonNull::new(std::ptr::without_provenance_mut(layout.align()))?;
            return Some(Arena::of(start, layout));
        }
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc(layout) })?;
        large_pages(start.as_ptr(), bytes);
        // SAFETY: the allocation has `bytes` bytes.
        unsafe { start.as_ptr().write_bytes(0, bytes) };
        Some(Arena::of(start, layout))
    }

    fn of(start: NonNull<u8>, layout: Layout) -> Arena {
        Arena {
            block: Arc::new(Block { start, layout }),
        }
    }

    /// Keeps the memory.
    pub(crate) fn keeper(&self) -> Arc<dyn Send + Sync> {
        self.block.clone()
    }

    /// The pool's size.
    pub(crate) fn bytes(&self) -> u64 {
        self.block.layout.size() as u64
    }

    /// The address of `bytes` bytes at an offset. Panics if they are not in the pool.
    fn at(&self, offset: u64, bytes: u64) -> *mut u8 {
        let end = offset.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.bytes()),
            "a validated tensor should lie in its pool"
        );
        // SAFETY: offset is at most the size of the allocation, by the assertion.
        unsafe { self.block.start.as_ptr().add(offset as usize) }
    }

    /// Writes bytes from the host. Panics if they are not in the pool. The caller is responsible
    /// for the order with all other accesses, see the module; the same holds for `read` and `fill`.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        let to = self.at(offset, bytes.len() as u64);
        // SAFETY: `at` checked the range; a slice of the host does not lie in a pool (`read` copies
        // out), and nothing else touches the bytes: the machine does not use them now.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    /// Reads bytes to the host. Panics if they are not in the pool.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) {
        let from = self.at(offset, bytes.len() as u64);
        // SAFETY: as for `write`; pools are zeroed when allocated, so every byte is initialised.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Sets each of `bytes` bytes. Panics if they are not in the pool.
    pub(crate) fn fill(&self, offset: u64, bytes: u64, byte: u8) {
        let start = self.at(offset, bytes);
        // SAFETY: `at` checked the range; only an idle machine and the single thread of a shuffled
        // run fill.
        unsafe { std::ptr::write_bytes(start, byte, bytes as usize) }
    }

    /// A tensor in the pool. Panics if it is not in it, or not aligned: `validate` refuses such
    /// artifacts.
    pub(crate) fn tensor(&self, offset: u64, bytes: u64, dtype: DType, shape: &[u64]) -> Tensor {
        assert!(
            offset.is_multiple_of(CACHE_LINE as u64),
            "a validated tensor should be aligned"
        );
        let shape = shape
            .iter()
            .map(|&d| usize::try_from(d).expect("a validated dimension should fit"));
        Tensor {
            dtype,
            shape: shape.collect(),
            ..self.range(offset, bytes)
        }
    }

    /// Bytes of the pool as a tensor of bytes. Panics if they are not in the pool.
    pub(crate) fn range(&self, offset: u64, bytes: u64) -> Tensor {
        Tensor {
            dtype: DType::U8,
            shape: Box::new([bytes as usize]),
            data: self.at(offset, bytes),
            bytes: bytes as usize,
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.layout.size() > 0 {
            // SAFETY: allocated in `Arena::new` with this layout, and freed nowhere else.
            unsafe { dealloc(self.start.as_ptr(), self.layout) }
        }
    }
}

/// Memory of the caller that a machine works on: a state, an input or an output. For a machine of
/// a GPU it is memory of this GPU.
#[derive(Clone, Copy, Debug)]
pub struct Borrowed {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: as for Arena. The maker of a Borrowed is responsible for the memory.
unsafe impl Send for Borrowed {}
// SAFETY: as above.
unsafe impl Sync for Borrowed {}

impl Borrowed {
    /// `bytes` bytes at `start`; `None` if that is null.
    ///
    /// # Safety
    ///
    /// From when a machine gets it until the machine is dropped, or gets another one for the same
    /// tensor, the machine may read and write the bytes whenever it runs commands that have the
    /// tensor as an operand. They are allocated then, and nothing else touches them.
    pub unsafe fn new(start: *mut u8, bytes: usize) -> Option<Borrowed> {
        NonNull::new(start).map(|start| Borrowed { start, bytes })
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// True if kernels may work on it: they rely on the alignment of places.
    pub fn is_aligned(&self) -> bool {
        self.start.addr().get().is_multiple_of(CACHE_LINE)
    }

    /// The address of some of the bytes. Panics if they are not in it.
    pub(crate) fn at(&self, offset: u64, bytes: u64) -> *mut u8 {
        let end = offset.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.bytes as u64),
            "a validated tensor should lie in the caller's memory"
        );
        self.start.as_ptr().wrapping_add(offset as usize)
    }

    /// Some of the bytes as a tensor of bytes. Panics if they are not in it.
    pub(crate) fn range(&self, offset: u64, bytes: u64) -> Tensor {
        Tensor {
            data: self.at(offset, bytes),
            ..nowhere(bytes)
        }
    }
}

/// A tensor that has no memory yet: nothing may touch it.
pub(crate) fn nowhere(bytes: u64) -> Tensor {
    Tensor {
        dtype: DType::U8,
        shape: Box::new([bytes as usize]),
        data: std::ptr::null_mut(),
        bytes: bytes as usize,
    }
}

/// Copies bytes `from..to` of `src` to the same positions of `dst`. The caller is responsible for
/// the order with all other accesses, see the module.
pub(crate) fn copy(src: &Tensor, dst: &Tensor, from: usize, to: usize) {
    assert!(
        from <= to && to <= src.bytes && to <= dst.bytes,
        "a copy should lie in both of its ranges"
    );
    assert!(
        !src.data.is_null() && !dst.data.is_null(),
        "both ends of a copy should have memory"
    );
    // SAFETY: by the assertion both ranges lie in a Tensor, which lies in its pool, which outlives
    // it; `ptr::copy` allows overlap, though `validate` refuses it; nothing else touches the bytes
    // meanwhile, by `validate`'s race check.
    unsafe { std::ptr::copy(src.data.add(from), dst.data.add(from), to - from) }
}

/// Sets every byte.
pub(crate) fn fill(tensor: &Tensor, byte: u8) {
    // SAFETY: a Tensor lies in its pool, and nothing else touches it: only an idle machine and the
    // single thread of a shuffled run fill.
    unsafe { std::ptr::write_bytes(tensor.data, byte, tensor.bytes) }
}

/// Writes the tensor's bytes from the host. Panics if the sizes differ.
pub(crate) fn write(tensor: &Tensor, bytes: &[u8]) {
    assert_eq!(
        tensor.bytes,
        bytes.len(),
        "the host's bytes should be as many as the tensor's"
    );
    // SAFETY: a Tensor lies in its pool, the sizes are equal by the assertion, a slice of the host
    // does not lie in a pool (`Arena::read` copies out), and nothing else touches the bytes: the
    // machine is idle, or does not use them now.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), tensor.data, bytes.len()) }
}

/// Writes some of the tensor's bytes from the host, from byte `from` on. Panics if they are not in
/// it.
pub(crate) fn write_part(tensor: &Tensor, from: usize, bytes: &[u8]) {
    let fits = from
        .checked_add(bytes.len())
        .is_some_and(|to| to <= tensor.bytes);
    assert!(fits, "the host's bytes should lie in the tensor");
    // SAFETY: as for `write`; the range lies in the tensor by the assertion.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), tensor.data.add(from), bytes.len()) }
}

/// Reads the tensor's bytes to the host. Panics if the sizes differ.
pub(crate) fn read(tensor: &Tensor, bytes: &mut [u8]) {
    assert_eq!(
        tensor.bytes,
        bytes.len(),
        "the host's bytes should be as many as the tensor's"
    );
    // SAFETY: as for `write`; pools are zeroed when allocated, so every byte is initialised.
    unsafe { std::ptr::copy_nonoverlapping(tensor.data, bytes.as_mut_ptr(), bytes.len()) }
}

/// Reads some of the tensor's bytes to the host, from byte `from` on. Panics if they are not in it.
pub(crate) fn read_part(tensor: &Tensor, from: usize, bytes: &mut [u8]) {
    let fits = from
        .checked_add(bytes.len())
        .is_some_and(|to| to <= tensor.bytes);
    assert!(fits, "the host's bytes should lie in the tensor");
    // SAFETY: as for `read`; the range lies in the tensor by the assertion.
    unsafe { std::ptr::copy_nonoverlapping(tensor.data.add(from), bytes.as_mut_ptr(), bytes.len()) }
}

/// Lets `f` read some of the tensor's bytes where they lie, from byte `from` on. Panics if they are
/// not in it.
pub(crate) fn with_part<R>(
    tensor: &Tensor,
    from: usize,
    n: usize,
    f: impl FnOnce(&[u8]) -> R,
) -> R {
    let fits = from.checked_add(n).is_some_and(|to| to <= tensor.bytes);
    assert!(
        fits && !tensor.data.is_null(),
        "the bytes should lie in the tensor"
    );
    // SAFETY: the range lies in the tensor by the assertion, which lies in its pool, whose bytes
    // are all initialised. Nothing writes them while `f` runs, by `validate`'s race check.
    f(unsafe { std::slice::from_raw_parts(tensor.data.add(from), n) })
}

/// The same for an `f` that writes them.
pub(crate) fn with_part_mut<R>(
    tensor: &Tensor,
    from: usize,
    n: usize,
    f: impl FnOnce(&mut [u8]) -> R,
) -> R {
    let fits = from.checked_add(n).is_some_and(|to| to <= tensor.bytes);
    assert!(
        fits && !tensor.data.is_null(),
        "the bytes should lie in the tensor"
    );
    // SAFETY: as for `with_part`; nothing else touches the bytes while `f` runs.
    f(unsafe { std::slice::from_raw_parts_mut(tensor.data.add(from), n) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_memory_is_an_answer() {
        assert!(Arena::new(u64::MAX).is_none());
        assert!(Arena::new(isize::MAX as u64 - 8192).is_none());
    }

    #[test]
    fn an_empty_pool_has_empty_tensors() {
        let arena = Arena::new(0).expect("no bytes should be available");
        let tensor = arena.range(0, 0);
        fill(&tensor, 1);
        arena.fill(0, 0, 1);
        arena.write(0, &[]);
        assert_eq!(arena.bytes(), 0);
    }

    #[test]
    fn bytes_come_back() {
        let arena = Arena::new(256).expect("256 bytes should be available");
        let (a, b) = (arena.range(0, 64), arena.range(128, 64));
        arena.write(0, &[7; 64]);
        copy(&a, &b, 0, 32);
        let mut back = [1; 64];
        arena.read(128, &mut back);
        assert_eq!((back[31], back[32]), (7, 0));
    }
}
