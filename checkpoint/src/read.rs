//! Reading a checkpoint. Everything is compared with its checksum.

use crate::error::at;
use crate::manifest::Manifest;
use crate::tensors::{self, Part, chunks};
use crate::{Error, FileRecord, MANIFEST, step_of};
use artifact::DType;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The checkpoints of a folder, whole or not: their steps and paths, those of later steps first.
pub fn newest_first(folder: &Path) -> Result<Vec<(u64, PathBuf)>, Error> {
    let mut found = vec![];
    for entry in fs::read_dir(folder).map_err(at(folder))? {
        let entry = entry.map_err(at(folder))?;
        if let Some(step) = entry.file_name().to_str().and_then(step_of) {
            found.push((step, entry.path()));
        }
    }
    found.sort_unstable_by(|a, b| b.cmp(a));
    Ok(found)
}

/// A tensor of a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Its element type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<u64>,
    /// The part of the checkpoint in which it lies.
    pub part: Part,
    /// Its checksum.
    pub crc32: u32,
    file: usize,
    bytes: Range<u64>,
}

impl Entry {
    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }
}

/// A checkpoint whose manifest and headers are whole. The tensors are checked when they are read.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    files: Vec<(PathBuf, File)>,
    entries: BTreeMap<String, Entry>,
}

impl Checkpoint {
    /// Opens a checkpoint's folder.
    pub fn open(path: &Path) -> Result<Checkpoint, Error> {
        Checkpoint::open_files(path, |_| true)
    }

    /// Opens some of its files, by their names.
    fn open_files(path: &Path, is_opened: impl Fn(&str) -> bool) -> Result<Checkpoint, Error> {
        let manifest = Manifest::read(&path.join(MANIFEST))?;
        if manifest.ranks != 1 {
            let why = format!("it is of {} processes; one can be read", manifest.ranks);
            return Err(Error::damaged(path, why));
        }
        let mut files = vec![];
        let mut entries = BTreeMap::new();
        for (name, record) in manifest.files.iter().filter(|(name, _)| is_opened(name)) {
            let part = Part::ALL.into_iter().find(|part| {
                let rest = name.strip_prefix(part.name());
                rest.is_some_and(|rest| rest.starts_with('-') && !rest.contains('/'))
            });
            let part = part.ok_or_else(|| Error::damaged(path, format!("no file {name:?}")))?;
            let file_path = path.join(name);
            let file = File::open(&file_path).map_err(at(&file_path))?;
            for (tensor, entry) in entries_of(&file_path, &file, record, part, files.len())? {
                if entries.insert(tensor.clone(), entry).is_some() {
                    return Err(Error::damaged(&file_path, format!("a second {tensor}")));
                }
            }
            files.push((file_path, file));
        }
        Ok(Checkpoint {
            path: path.to_path_buf(),
            manifest,
            files,
            entries,
        })
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// What it has beside tensors.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }
    /// Its tensors by name.
    pub fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }
    /// The bytes of all its files.
    pub fn file_bytes(&self) -> u64 {
        let files = fs::read_dir(&self.path).into_iter().flatten().flatten();
        let sizes = files.filter_map(|file| file.metadata().ok());
        sizes.map(|metadata| metadata.len()).sum()
    }

    /// Reads a tensor piece by piece: `take` gets the position and the bytes of each. If the bytes
    /// differ from the written ones, the error comes after the last piece.
    pub fn read<E: From<Error>>(
        &self,
        name: &str,
        mut take: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let entry = self
            .entries
            .get(name)
            .ok_or_else(|| Error::damaged(&self.path, format!("it has no {name}")))?;
        let (path, file) = &self.files[entry.file];
        let mut chunk = vec![0; tensors::CHUNK_BYTES.min(entry.bytes() as usize)];
        let mut checksum = crc32fast::Hasher::new();
        for range in chunks(entry.bytes()) {
            let chunk = &mut chunk[..(range.end - range.start) as usize];
            file.read_exact_at(chunk, entry.bytes.start + range.start)
                .map_err(at(path))?;
            checksum.update(chunk);
            take(range.start, chunk)?;
        }
        if checksum.finalize() != entry.crc32 {
            let why = format!("{name} does not match its checksum");
            return Err(Error::damaged(path, why).into());
        }
        Ok(())
    }

    /// Reads some bytes of a tensor, without its checksum.
    pub fn read_part(&self, name: &str, start: u64, bytes: &mut [u8]) -> io::Result<()> {
        let entry = self.entries.get(name).ok_or(io::ErrorKind::NotFound)?;
        let (_, file) = &self.files[entry.file];
        file.read_exact_at(bytes, entry.bytes.start + start)
    }

    /// Compares all tensors with their checksums.
    pub fn verify(&self) -> Result<(), Error> {
        let mut names = self.entries.keys();
        names.try_for_each(|name| self.read(name, |_, _| Ok::<(), Error>(())))
    }
}

/// Compares the tensors of a file with the checksums of the checkpoint in whose folder it lies.
/// A file that belongs to no checkpoint has none.
pub fn verify_file(path: &Path) -> Result<(), Error> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok(());
    };
    if !folder.join(MANIFEST).exists() {
        return Ok(());
    }
    Checkpoint::open_files(folder, |file| name == file)?.verify()
}

/// The tensors of a file, whose header is compared with its record.
fn entries_of(
    path: &Path,
    file: &File,
    record: &FileRecord,
    part: Part,
    number: usize,
) -> Result<Vec<(String, Entry)>, Error> {
    let length = file.metadata().map_err(at(path))?.len();
    let read = |start: u64, length: usize| -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        file.read_exact_at(&mut bytes, start)?;
        Ok(bytes)
    };
    let (header, metadata) = tensors::read_header(path, length, read)?;
    if crc32fast::hash(&header) != record.header {
        return Err(Error::damaged(
            path,
            "its header does not match its checksum",
        ));
    }
    let infos = metadata.tensors();
    if infos.len() != record.tensors.len() {
        return Err(Error::damaged(
            path,
            "its tensors are not those of the manifest",
        ));
    }
    let mut entries = vec![];
    for (name, &crc32) in &record.tensors {
        let info = infos.get(name);
        let info = info.ok_or_else(|| Error::damaged(path, format!("it has no {name}")))?;
        let dtype = tensors::dtype(info.dtype)
            .ok_or_else(|| Error::damaged(path, format!("{name} has an unknown type")))?;
        let (start, end) = info.data_offsets;
        let entry = Entry {
            dtype,
            shape: info.shape.iter().map(|&d| d as u64).collect(),
            part,
            crc32,
            file: number,
            bytes: header.len() as u64 + start as u64..header.len() as u64 + end as u64,
        };
        entries.push((name.clone(), entry));
    }
    Ok(entries)
}
