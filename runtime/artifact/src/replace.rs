//! Replacing files so that a file is always either the old one or the whole new one.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// Writes a file such that at every moment, whatever is killed or full, `path` is either what it
/// was or the whole new file: the bytes go to a file beside it, which takes its name once they are
/// on the disk. The new file has the permissions of the old one.
///
/// # Errors
/// What the system says; `path` is then what it was.
pub fn replace_file(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let (target, permissions) = match fs::metadata(path) {
        // A device or a pipe is written to, as /dev/null expects; a rename would replace it.
        Ok(metadata) if !metadata.is_file() => {
            let mut file = File::options().write(true).open(path)?;
            return parts.iter().try_for_each(|part| file.write_all(part));
        }
        // Through links, so that the file is replaced and not the link.
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
        // The rename itself is on the disk once the folder is. Not every system can sync one; there
        // it is as good as it gets.
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
    // A killed process of the same number may have left one. A new file follows no link.
    let _ = fs::remove_file(path);
    let mut file = File::options().write(true).create_new(true).open(path)?;
    // Before any byte is in it: what was private stays private.
    if let Some(permissions) = permissions {
        file.set_permissions(permissions)?;
    }
    parts.iter().try_for_each(|part| file.write_all(part))?;
    file.sync_all()
}
