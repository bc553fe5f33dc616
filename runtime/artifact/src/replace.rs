//! Replacing files so that a file is always either the old one or the whole new one.

use rustix::fs::{FlockOperation, flock};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Writes a file. At every moment, even if a process is killed or a disk is full, `path` is either
/// the old file or the whole new one: the bytes go to another file in the same folder, which is
/// renamed when they are on the disk. The new file has the permissions of the old one. What killed
/// processes left of earlier attempts is removed.
///
/// # Errors
/// The system's error; then `path` is unchanged.
pub fn replace_file(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    replace_file_with(path, |file| {
        parts.iter().try_for_each(|part| file.write_all(part))
    })
}

/// The same, with a function that writes the bytes.
///
/// # Errors
/// The system's error, or the function's; then `path` is unchanged.
pub fn replace_file_with<T, E: From<io::Error>>(
    path: &Path,
    write: impl FnOnce(&mut File) -> Result<T, E>,
) -> Result<T, E> {
    let (target, permissions) = match fs::metadata(path) {
        // A device (`/dev/null`) or a pipe is written directly; a rename would replace it.
        Ok(metadata) if !metadata.is_file() => {
            let mut file = File::options().write(true).open(path)?;
            return write(&mut file);
        }
        // Links are followed, so that the file is replaced and not the link.
        Ok(metadata) => (fs::canonicalize(path)?, Some(metadata.permissions())),
        Err(_) => (path.to_path_buf(), None),
    };
    let name = target
        .file_name()
        .ok_or_else(|| io::Error::other(format!("{} names no file", path.display())))?;
    let folder = match target.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    remove_leftovers(folder, name);
    let (mut file, temporary) = create_locked(folder, name)?;

    let written = permissions
        // Before the first byte is written, so that private data stay private.
        .map_or(Ok(()), |permissions| file.set_permissions(permissions))
        .map_err(E::from)
        .and_then(|()| write(&mut file))
        .and_then(|written| {
            file.sync_all()?;
            fs::rename(&temporary, &target)?;
            Ok(written)
        });
    match written {
        // The rename is on the disk when the folder is synced. Not every system can sync a folder;
        // an error is ignored.
        Ok(_) => {
            let _ = File::open(folder).and_then(|folder| folder.sync_all());
        }
        Err(_) => {
            let _ = fs::remove_file(&temporary);
        }
    }
    written
}

/// The ends of the names of files that are being written.
fn affixes(name: &OsStr) -> (String, &'static str) {
    (format!(".{}.", name.to_string_lossy()), ".tmp")
}

/// A new file, which this process has locked.
fn create_locked(folder: &Path, name: &OsStr) -> io::Result<(File, PathBuf)> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let (head, tail) = affixes(name);
    loop {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("{head}{}-{count}{tail}", std::process::id()));
        // A new file follows no link.
        let file = match File::options().write(true).create_new(true).open(&path) {
            // Of a process that had the same number.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
            file => file?,
        };
        // Not every system has locks. Without them, leftovers stay.
        let _ = flock(&file, FlockOperation::NonBlockingLockExclusive);
        // Another process may have removed the file before it was locked.
        if file.metadata()?.nlink() > 0 {
            return Ok((file, path));
        }
    }
}

/// Removes what killed processes left: files that no process has locked.
fn remove_leftovers(folder: &Path, name: &OsStr) {
    let (head, tail) = affixes(name);
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let is_temporary = name.starts_with(&head) && name.ends_with(tail);
        if !is_temporary || !entry.file_type().is_ok_and(|ty| ty.is_file()) {
            continue;
        }
        let file = File::options().write(true).open(entry.path());
        let lock = FlockOperation::NonBlockingLockExclusive;
        if file.is_ok_and(|file| flock(&file, lock).is_ok()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}
