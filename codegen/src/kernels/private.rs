//! Files and folders that only this user can write.
//!
//! Compiled kernels and the signing key are trusted when they are read again. So they are read only
//! from folders and files that belong to the user of this process and that no other user can write.

use std::fs::{self, File, Metadata};
use std::io;
use std::path::Path;

/// Creates a folder, with the folders above it, that only this user can enter.
///
/// # Errors
/// The system's error.
pub fn create_folder(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// Checks that a path is a folder that only this user can write.
///
/// # Errors
/// The reason if it is not, or the system's error.
pub fn check_folder(path: &Path) -> io::Result<()> {
    let metadata = fs::metadata(path)?;
    if !metadata.is_dir() {
        return Err(io::Error::other("it is not a folder"));
    }
    check(&metadata)
}

/// Opens a regular file that only this user can write. It follows no link and waits for no pipe.
///
/// # Errors
/// The reason if it is not such a file, or the system's error.
pub fn open(path: &Path) -> io::Result<File> {
    // Check before opening, because opening a pipe waits for a writer.
    if !fs::symlink_metadata(path)?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let file = File::open(path)?;
    check(&file.metadata()?)?;
    Ok(file)
}

/// Creates a new file that only this user can read and write. A file or link with the same name is
/// removed first, so no link is followed.
///
/// # Errors
/// The system's error.
pub fn create(path: &Path) -> io::Result<File> {
    let _ = fs::remove_file(path);
    let mut options = File::options();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// Write permission of the group and of others.
#[cfg(unix)]
const OTHERS_WRITE: u32 = 0o022;

/// Checks the owner and the permissions of a file or folder.
#[cfg(unix)]
fn check(metadata: &Metadata) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    let (owner, user) = (metadata.uid(), rustix::process::geteuid().as_raw());
    if owner != user {
        return Err(io::Error::other(format!(
            "it belongs to user {owner}, and this process runs as user {user}"
        )));
    }
    if metadata.mode() & OTHERS_WRITE != 0 {
        let mode = metadata.mode() & 0o777;
        return Err(io::Error::other(format!(
            "other users can write it (mode {mode:o}); `chmod go-w` ends that"
        )));
    }
    Ok(())
}

/// Other systems have other permissions, which are not checked.
#[cfg(not(unix))]
fn check(_: &Metadata) -> io::Result<()> {
    Ok(())
}
