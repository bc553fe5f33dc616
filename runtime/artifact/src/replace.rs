//! Replacing files so that a file is always either the old one or the whole new one.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// Writes a file. At every moment, even if a process is killed or a disk is full, `path` is either
/// the old file or the whole new one: the bytes go to another file in the same folder, which is
/// renamed when they are on the disk. The new file has the permissions of the old one.
///
/// # Errors
/// The system's error; then `path` is unchanged.
pub fn replace_file(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let (target, permissions) = match fs::metadata(path) {
        // A device (`/dev/null`) or a pipe is written directly; a rename would replace it.
        Ok(metadata) if !metadata.is_file() => {
            let mut file = File::options().write(true).open(path)?;
            return parts.iter().try_for_each(|part| file.write_all(part));
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
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let temporary = folder.join(format!(
        ".{}.{}-{count}.tmp",
        name.to_string_lossy(),
        std::process::id()
    ));

    let written =
        write_new(&temporary, parts, permissions).and_then(|()| fs::rename(&temporary, &target));
    match written {
        // The rename is on the disk when the folder is synced. Not every system can sync a folder;
        // an error is ignored.
        Ok(()) => {
            let _ = File::open(folder).and_then(|folder| folder.sync_all());
        }
        Err(_) => {
            let _ = fs::remove_file(&temporary);
        }
    }
    written
}

fn write_new(path: &Path, parts: &[&[u8]], permissions: Option<fs::Permissions>) -> io::Result<()> {
    // A killed process with the same number may have left this file. A new file follows no link.
    let _ = fs::remove_file(path);
    let mut file = File::options().write(true).create_new(true).open(path)?;
    // Before the first byte is written, so that private data stay private.
    if let Some(permissions) = permissions {
        file.set_permissions(permissions)?;
    }
    parts.iter().try_for_each(|part| file.write_all(part))?;
    file.sync_all()
}
