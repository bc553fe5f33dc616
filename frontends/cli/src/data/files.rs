//! Files that are read in pieces, and files that are either old or whole.

use crate::failure::Failure;
use crate::size;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Reads a whole file. A named pipe is refused, because reading it could wait forever. The file of
/// the shell's `<(..)` is read.
pub(crate) fn read_whole(path: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |e: io::Error| Failure::Input(format!("{}: {e}", path.display()));
    if !is_open_already(path) {
        check_regular(path)?;
    }
    fs::read(path).map_err(failed)
}

/// True for the file of the shell's `<(..)`, and for standard input.
fn is_open_already(path: &Path) -> bool {
    path.starts_with("/dev/fd")
        || path.starts_with("/proc/self/fd")
        || path == Path::new("/dev/stdin")
}

fn check_regular(path: &Path) -> Result<(), Failure> {
    let metadata =
        fs::metadata(path).map_err(|e| Failure::Input(format!("{}: {e}", path.display())))?;
    if metadata.is_file() {
        return Ok(());
    }
    Err(Failure::Input(format!(
        "{}: not a regular file",
        path.display()
    )))
}

/// The source of a file's bytes.
enum Source {
    /// An open file, which may be larger than memory.
    File(File),
    /// The whole file, from a pipe.
    Memory(Vec<u8>),
}

/// An open file, of which parts are read when they are needed.
pub(crate) struct Input {
    path: PathBuf,
    source: Source,
    length: u64,
}

impl Input {
    /// Opens a file. A named pipe is refused; the file of the shell's `<(..)` is read to its end.
    pub(crate) fn open(path: &Path) -> Result<Input, Failure> {
        let failed = |e: io::Error| Failure::Input(format!("{}: {e}", path.display()));
        let (source, length) = if is_open_already(path) {
            let bytes = read_whole(path)?;
            let length = bytes.len() as u64;
            (Source::Memory(bytes), length)
        } else {
            // Before it is opened: opening a named pipe waits for a writer.
            check_regular(path)?;
            let file = File::open(path).map_err(failed)?;
            let length = file.metadata().map_err(failed)?.len();
            (Source::File(file), length)
        };
        Ok(Input {
            path: path.to_path_buf(),
            source,
            length,
        })
    }

    /// An open file in place of the one with this path.
    pub(crate) fn in_place_of(path: &Path, file: File, length: u64) -> Input {
        Input {
            path: path.to_path_buf(),
            source: Source::File(file),
            length,
        }
    }

    /// The file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Its bytes when it was opened.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Reads `length` bytes from a position. A file that was cut meanwhile is an error.
    pub(crate) fn read(&self, start: u64, length: usize) -> io::Result<Vec<u8>> {
        match &self.source {
            Source::Memory(bytes) => {
                let rest = usize::try_from(start).ok().and_then(|at| bytes.get(at..));
                let read = rest.and_then(|rest| rest.get(..length));
                let read = read.ok_or(io::ErrorKind::UnexpectedEof)?;
                Ok(read.to_vec())
            }
            Source::File(file) => {
                let mut bytes = vec![0; length];
                file.read_exact_at(&mut bytes, start)?;
                Ok(bytes)
            }
        }
    }
}

/// Writes a file atomically: at every moment `path` is either the old file or the whole new one.
pub(crate) fn save_atomically(path: &Path, parts: &[&[u8]]) -> Result<(), Failure> {
    artifact::replace_file(path, parts)
        .map_err(|e| Failure::System(format!("{}: {e}", path.display())))
}

/// Checks that a file can be written, before hours of work on its contents.
pub(crate) fn check_writable(option: &str, path: &Path) -> Result<(), Failure> {
    let refused = |why: String| {
        Err(Failure::Input(format!(
            "{option} {}: {why}",
            path.display()
        )))
    };
    if path.is_dir() {
        return refused("a folder; name a file".into());
    }
    let folder = path
        .parent()
        .filter(|folder| *folder != Path::new(""))
        .unwrap_or(Path::new("."));
    match fs::metadata(folder) {
        Ok(metadata) if metadata.is_dir() => Ok(()),
        Ok(_) => refused(format!("{} is not a folder", folder.display())),
        Err(e) => refused(format!("folder {}: {e}", folder.display())),
    }
}

/// The size of a file as text, for notes.
pub(crate) fn file_size(path: &Path) -> String {
    fs::metadata(path).map_or("?".into(), |metadata| size::short(metadata.len()))
}
