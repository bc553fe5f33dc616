//! Pools in files instead of memory, for a step whose states and activations are more than memory
//! holds.
//!
//! The file has no name: the system frees it when the process ends, however it ends. Its bytes are
//! allocated when it is made, so that a full disk is found before the first step.

use crate::kernel::Tensor;
use crate::machine::backend::Copy;
use crate::memory;
use crate::sync::unpoisoned;
use artifact::{MemorySpace, PAGE, Place, Pool, Range};
use std::fs::File;
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Bytes that are read or written at once.
pub(crate) const PIECE: usize = 4 << 20;

/// Those pools of a step that are on a disk.
#[derive(Default)]
pub(crate) struct Disks {
    /// Where their files are made.
    folder: Option<PathBuf>,
    /// By the pool's number; `None` for pools in memory.
    pools: Vec<Option<Arc<Disk>>>,
    /// Those of another step.
    given: Vec<Option<Arc<Disk>>>,
}

/// A copy between a pool on a disk and memory.
pub(crate) enum DiskCopy {
    /// From the disk.
    Load { src: Place, dst: Tensor },
    /// To the disk.
    Store { src: Tensor, dst: Place },
}

impl DiskCopy {
    /// Its end in memory.
    pub(crate) fn memory_mut(&mut self) -> &mut Tensor {
        match self {
            DiskCopy::Load { dst, .. } => dst,
            DiskCopy::Store { src, .. } => src,
        }
    }
}

impl Disks {
    /// Whether no pool is on a disk.
    pub(crate) fn is_empty(&self) -> bool {
        self.pools.iter().all(Option::is_none)
    }

    /// No pools yet; files are made in `folder`.
    pub(crate) fn new(folder: Option<&Path>) -> Disks {
        Disks {
            folder: folder.map(Into::into),
            ..Disks::default()
        }
    }

    /// No pools yet; the next ones are those of another step.
    pub(crate) fn sharing(&self) -> Disks {
        Disks {
            folder: self.folder.clone(),
            pools: vec![],
            given: self.pools.clone(),
        }
    }

    /// Makes the next pool, if it is on a disk. False if it is not, or if it has no bytes.
    pub(crate) fn allocate(&mut self, pool: &Pool) -> Result<bool, crate::Error> {
        let number = self.pools.len();
        self.pools.push(None);
        if pool.space != MemorySpace::Disk || pool.bytes == 0 {
            return Ok(false);
        }
        let given = self.given.get(number).cloned().flatten();
        self.pools[number] = match (given, &self.folder) {
            (Some(disk), _) => Some(disk),
            (None, Some(folder)) => Some(Arc::new(Disk::new(folder, pool.bytes).map_err(|e| {
                let (bytes, folder) = (pool.bytes, folder.display());
                crate::Error::Resources(format!("{folder}: no file of {bytes} bytes: {e}"))
            })?)),
            (None, None) => {
                return Err(crate::Error::Unsupported(format!(
                    "the step keeps {} bytes on a disk; --disk DIR says in which folder",
                    pool.bytes
                )));
            }
        };
        Ok(true)
    }

    /// The next pool is not on a disk.
    pub(crate) fn skip(&mut self) {
        self.pools.push(None);
    }

    /// The pool of a place, if it is on a disk.
    fn of(&self, place: Place) -> Option<&Disk> {
        self.pools.get(place.pool as usize)?.as_deref()
    }

    /// True if a place is on a disk.
    pub(crate) fn has(&self, place: Place) -> bool {
        self.of(place).is_some()
    }

    /// A copy with an end on a disk, if it has one. `memory` gives the bytes of the other end.
    pub(crate) fn copy(&self, copy: &Copy, memory: impl Fn(Range) -> Tensor) -> Option<DiskCopy> {
        let Copy { src, dst, bytes } = *copy;
        let memory = |place| memory(Range { place, bytes });
        match (self.has(src), self.has(dst)) {
            (false, false) => None,
            (true, _) => Some(DiskCopy::Load {
                src,
                dst: memory(dst),
            }),
            (false, true) => Some(DiskCopy::Store {
                src: memory(src),
                dst,
            }),
        }
    }

    /// Runs a copy. Ends early when `stopped` is true.
    pub(crate) fn run(&self, copy: &DiskCopy, stopped: impl Fn() -> bool) -> Result<(), String> {
        let file = |place| self.of(place).expect("a copy's end should be on a disk");
        let done = match copy {
            DiskCopy::Load { src, dst } => file(*src).load(src.offset, dst, stopped),
            DiskCopy::Store { src, dst } => file(*dst).store(src, dst.offset, stopped),
        };
        done.map_err(of_disk)
    }

    /// Writes bytes of the host, if the place is on a disk.
    pub(crate) fn write(&self, to: Place, bytes: &[u8]) -> Option<Result<(), crate::Error>> {
        Some(self.of(to)?.write(to.offset, bytes).map_err(failed))
    }

    /// Reads bytes to the host, if the place is on a disk.
    pub(crate) fn read(&self, from: Place, bytes: &mut [u8]) -> Option<Result<(), crate::Error>> {
        Some(self.of(from)?.read(from.offset, bytes).map_err(failed))
    }

    /// Sets each byte, if the place is on a disk.
    pub(crate) fn fill(&self, range: Range, byte: u8) -> Option<Result<(), crate::Error>> {
        let Range { place, bytes } = range;
        let disk = self.of(place)?;
        Some(disk.fill(place.offset, bytes, byte).map_err(failed))
    }
}

/// An error of the disk, for the user.
fn of_disk(e: Error) -> String {
    format!("the disk: {e}")
}

pub(crate) fn failed(e: Error) -> crate::Error {
    crate::Error::Resources(of_disk(e))
}

/// A pool on disk.
pub(crate) struct Disk {
    file: File,
    /// The same file past the system's cache: bytes go between the disk and the pools without a
    /// copy, and take no memory. `None` if the file system has no such way.
    direct: Option<File>,
    bytes: u64,
    /// Through these go bytes that do not lie in pages. One for each direction, because both may be
    /// busy.
    pieces: [Mutex<Vec<u8>>; 2],
}

impl Disk {
    /// A pool of zeros, in a folder.
    pub(crate) fn new(folder: &Path, bytes: u64) -> Result<Disk, Error> {
        let file = nameless(folder)?;
        allocate(&file, bytes)?;
        let piece = || Mutex::new(vec![0; PIECE.min(bytes as usize)]);
        Ok(Disk {
            direct: past_cache(&file, bytes),
            file,
            bytes,
            pieces: [piece(), piece()],
        })
    }

    /// Reads bytes to the host. Panics if they are not in the pool.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.check(offset, bytes.len());
        self.file.read_exact_at(bytes, offset)
    }

    /// Writes bytes from the host. Panics if they are not in the pool.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.check(offset, bytes.len());
        self.file.write_all_at(bytes, offset)
    }

    /// Sets each of `bytes` bytes.
    fn fill(&self, offset: u64, bytes: u64, byte: u8) -> Result<(), Error> {
        let piece = vec![byte; PIECE.min(bytes as usize)];
        let end = offset + bytes;
        let mut from = offset;
        while from < end {
            let n = (end - from).min(PIECE as u64);
            self.write(from, &piece[..n as usize])?;
            from += n;
        }
        Ok(())
    }

    /// Copies bytes of the pool to a tensor in memory. Ends early when `stopped` is true.
    pub(crate) fn load(
        &self,
        offset: u64,
        to: &Tensor,
        stopped: impl Fn() -> bool,
    ) -> Result<(), Error> {
        self.check(offset, to.bytes);
        for (from, n, direct) in self.pieces(offset, to) {
            if stopped() {
                break;
            }
            let at = offset + from as u64;
            match direct {
                Some(file) => {
                    memory::with_part_mut(to, from, n, |bytes| file.read_exact_at(bytes, at))?
                }
                None => {
                    let mut piece = unpoisoned(&self.pieces[0]);
                    self.read(at, &mut piece[..n])?;
                    memory::write_part(to, from, &piece[..n]);
                    // It is in memory now: no second copy of it should stay in the system's cache.
                    forget(&self.file, at, n);
                }
            }
        }
        Ok(())
    }

    /// Copies a tensor in memory to the pool. Ends early when `stopped` is true.
    pub(crate) fn store(
        &self,
        from: &Tensor,
        offset: u64,
        stopped: impl Fn() -> bool,
    ) -> Result<(), Error> {
        self.check(offset, from.bytes);
        for (start, n, direct) in self.pieces(offset, from) {
            if stopped() {
                break;
            }
            let at = offset + start as u64;
            match direct {
                Some(file) => {
                    memory::with_part(from, start, n, |bytes| file.write_all_at(bytes, at))?;
                }
                None => {
                    let mut piece = unpoisoned(&self.pieces[1]);
                    memory::read_part(from, start, &mut piece[..n]);
                    self.write(at, &piece[..n])?;
                }
            }
        }
        Ok(())
    }

    /// The pieces of a transfer between the pool, from `offset` on, and a tensor: for each its
    /// start and size, and the file that whole pages go to.
    fn pieces<'a>(
        &'a self,
        offset: u64,
        tensor: &Tensor,
    ) -> impl Iterator<Item = (usize, usize, Option<&'a File>)> + use<'a> {
        let bytes = tensor.bytes;
        let before = (offset as usize).next_multiple_of(PAGE) - offset as usize;
        let is_paged = (tensor.data.addr() + before).is_multiple_of(PAGE);
        let pages = match (&self.direct, bytes.checked_sub(before)) {
            (Some(_), Some(rest)) if is_paged => before..before + rest / PAGE * PAGE,
            (Some(_) | None, _) => 0..0,
        };
        let direct = self.direct.as_ref().filter(|_| !pages.is_empty());
        let mut start = 0;
        std::iter::from_fn(move || {
            if start >= bytes {
                return None;
            }
            let (end, file) = match direct {
                Some(_) if start < pages.start => (pages.start, None),
                Some(_) if start < pages.end => (pages.end, direct),
                Some(_) | None => (bytes, None),
            };
            let n = PIECE.min(end - start);
            start += n;
            Some((start - n, n, file))
        })
    }

    fn check(&self, offset: u64, bytes: usize) {
        let end = offset.checked_add(bytes as u64);
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "a validated range should lie in its pool"
        );
    }
}

/// A file once more, past the system's cache; `None` if the file system refuses that.
fn past_cache(file: &File, bytes: u64) -> Option<File> {
    #[cfg(target_os = "linux")]
    if bytes >= PAGE as u64 {
        use std::os::fd::AsRawFd;
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let direct = options.open(path).ok()?;
        // Some systems open it and refuse to read. The pool is kept until then: a tensor of it does
        // not keep it.
        let pool = crate::memory::Arena::new(PAGE as u64)?;
        let page = pool.range(0, PAGE as u64);
        let read = memory::with_part_mut(&page, 0, PAGE, |bytes| direct.read_exact_at(bytes, 0));
        drop(pool);
        return read.is_ok().then_some(direct);
    }
    let _ = (file, bytes);
    None
}

/// A new file without a name: nothing stays of it, however the process ends.
pub fn nameless(folder: &Path) -> Result<File, Error> {
    let mut options = File::options();
    options.read(true).write(true).mode(0o600);
    #[cfg(target_os = "linux")]
    {
        let mut nameless = options.clone();
        nameless.custom_flags(libc::O_TMPFILE);
        match nameless.open(folder) {
            // Some file systems have no such files.
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
            Err(e) if e.kind() == ErrorKind::IsADirectory => {}
            opened => return opened,
        }
    }
    let path = folder.join(format!(".lighterage-{}", std::process::id()));
    let file = options.create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

/// Gives the file its size, and its blocks where the system can.
fn allocate(file: &File, bytes: u64) -> Result<(), Error> {
    file.set_len(bytes)?;
    #[cfg(target_os = "linux")]
    if bytes > 0 {
        use rustix::fs::{FallocateFlags, fallocate};
        match fallocate(file, FallocateFlags::empty(), 0, bytes) {
            // Then a full disk is found when a step writes.
            Err(rustix::io::Errno::OPNOTSUPP) => {}
            other => other?,
        }
    }
    Ok(())
}

/// Lets the system drop pages of the file from its cache. It is advice; nothing depends on it.
fn forget(file: &File, offset: u64, bytes: usize) {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{Advice, fadvise};
        let length = std::num::NonZeroU64::new(bytes as u64);
        let _ = fadvise(file, offset, length, Advice::DontNeed);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Arena;

    #[test]
    fn bytes_go_there_and_back() {
        let disk = Disk::new(&std::env::temp_dir(), 3 * PIECE as u64).unwrap();
        let n = PIECE + 3 * PAGE;
        let arena = Arena::new(n as u64).unwrap();
        let bytes: Vec<u8> = (0..n).map(|i| (i % 251) as u8).collect();
        // Where pages of the file and of memory match, and where they do not.
        for (at, offset, n) in [
            (0, 64, PIECE + 1000),
            (64, 64, PIECE + 2 * PAGE + 100),
            (0, 0, n),
            (128, PAGE as u64 + 128, 1000),
        ] {
            arena.write(0, &bytes);
            let part = arena.range(at, n as u64);
            disk.store(&part, offset, || false).unwrap();
            arena.fill(at, n as u64, 0);
            disk.load(offset, &part, || false).unwrap();
            let mut found = vec![1; bytes.len()];
            arena.read(0, &mut found);
            assert!(found == bytes, "{at} {offset} {n}");
            let mut read = vec![1; n];
            disk.read(offset, &mut read).unwrap();
            assert!(read == bytes[at as usize..][..n], "{at} {offset} {n}");
        }
        disk.fill(0, 64, 0).unwrap();
        let mut before = [1; 64];
        disk.read(0, &mut before).unwrap();
        assert_eq!(before, [0; 64]);
        disk.fill(0, 64, 7).unwrap();
        disk.read(0, &mut before).unwrap();
        assert_eq!(before, [7; 64]);
    }

    #[test]
    fn no_folder_and_no_space_are_answers() {
        assert!(Disk::new(Path::new("/no/such/folder"), 64).is_err());
        assert!(Disk::new(&std::env::temp_dir(), 1 << 60).is_err());
    }
}
