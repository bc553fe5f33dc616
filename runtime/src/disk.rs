//! A pool in a file instead of memory: the host's side of a step whose states and activations are
//! more than memory holds.
//!
//! The file has no name: the system frees it when the process ends, however it ends. Its bytes are
//! allocated when it is made, so that a full disk is found before the first step.

use crate::kernel::Tensor;
use crate::memory;
use crate::sync::unpoisoned;
use std::fs::File;
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Mutex;

/// Bytes that are read or written at once.
const PIECE: usize = 4 << 20;

/// A pool on disk.
pub(crate) struct Disk {
    file: File,
    bytes: u64,
    /// Through these, bytes go from the file to memory and back. One for each direction, because
    /// both may be busy.
    pieces: [Mutex<Vec<u8>>; 2],
}

impl Disk {
    /// A pool of zeros, in a folder.
    pub(crate) fn new(folder: &Path, bytes: u64) -> Result<Disk, Error> {
        let file = nameless(folder)?;
        allocate(&file, bytes)?;
        let piece = || Mutex::new(vec![0; PIECE.min(bytes as usize)]);
        Ok(Disk {
            file,
            bytes,
            pieces: [piece(), piece()],
        })
    }

    /// Reads bytes to the host. Panics if they are not in the pool.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.check(offset, bytes.len());
        self.file.read_exact_at(bytes, offset)
    }

    /// Writes bytes from the host. Panics if they are not in the pool.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.check(offset, bytes.len());
        self.file.write_all_at(bytes, offset)
    }

    /// Sets each of `bytes` bytes.
    pub(crate) fn fill(&self, offset: u64, bytes: u64, byte: u8) -> Result<(), Error> {
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
        let mut piece = unpoisoned(&self.pieces[0]);
        for (from, n) in pieces(to.bytes) {
            if stopped() {
                break;
            }
            self.read(offset + from as u64, &mut piece[..n])?;
            memory::write_part(to, from, &piece[..n]);
        }
        // What was read is in memory now: no second copy of it should stay in the system's cache.
        forget(&self.file, offset, to.bytes);
        Ok(())
    }

    /// Copies a tensor in memory to the pool. Ends early when `stopped` is true.
    pub(crate) fn store(
        &self,
        from: &Tensor,
        offset: u64,
        stopped: impl Fn() -> bool,
    ) -> Result<(), Error> {
        let mut piece = unpoisoned(&self.pieces[1]);
        for (at, n) in pieces(from.bytes) {
            if stopped() {
                break;
            }
            memory::read_part(from, at, &mut piece[..n]);
            self.write(offset + at as u64, &piece[..n])?;
        }
        Ok(())
    }

    fn check(&self, offset: u64, bytes: usize) {
        let end = offset.checked_add(bytes as u64);
        assert!(
            end.is_some_and(|end| end <= self.bytes),
            "a validated range should lie in its pool"
        );
    }
}

/// Start and size of each piece of `bytes` bytes.
fn pieces(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..bytes)
        .step_by(PIECE)
        .map(move |from| (from, PIECE.min(bytes - from)))
}

/// A new file without a name.
fn nameless(folder: &Path) -> Result<File, Error> {
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
        let n = PIECE + 1000;
        let arena = Arena::new(n as u64).unwrap();
        let bytes: Vec<u8> = (0..n).map(|i| (i % 251) as u8).collect();
        arena.write(0, &bytes);
        let all = arena.range(0, n as u64);
        disk.store(&all, 64, || false).unwrap();
        arena.fill(0, n as u64, 0);
        disk.load(64, &all, || false).unwrap();
        let mut found = vec![1; n];
        arena.read(0, &mut found);
        assert!(found == bytes);
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
