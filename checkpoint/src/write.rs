//! Writing checkpoints to a folder.
//!
//! A checkpoint is written to a hidden folder, whose files and entries are synced. Then it gets its
//! name, and the folder of all checkpoints is synced. Then `latest` is replaced. Only then older
//! ones are removed: each loses its name before its first file. So each folder with a name is
//! whole at every moment, also after a power cut.

use crate::error::at;
use crate::manifest::{FORMAT, FileRecord, Manifest};
use crate::read::{Checkpoint, newest_first};
use crate::tensors::{self, Part, Source, Tensor};
use crate::{Error, INDEX, LATEST, MANIFEST, folder_name};
use rustix::fs::{FlockOperation, flock};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::num::NonZeroU64;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// The file that is locked while a process writes to the folder.
const LOCK: &str = ".lock";
/// The largest file, unless a tensor is larger: most file systems and services take it.
const SHARD_BYTES: u64 = 4 << 30;

/// Files with tensors, by name.
type Records = Vec<(String, FileRecord)>;

/// Which checkpoints are kept when a newer one is whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Kept {
    /// The last ones of this number. `None`: all.
    pub last: Option<NonZeroU64>,
    /// Those after each multiple of this number of steps, too.
    pub every: Option<NonZeroU64>,
}

impl Kept {
    /// Whether a checkpoint is kept; `newer` ones are whole.
    fn keeps(&self, step: u64, newer: u64) -> bool {
        let is_milestone = self
            .every
            .is_some_and(|every| step.is_multiple_of(every.get()));
        self.last.is_none_or(|last| newer < last.get()) || is_milestone
    }
}

/// A checkpoint that was written.
#[derive(Debug)]
pub struct Saved {
    /// Its folder.
    pub path: PathBuf,
    /// Why the link to the newest is an older one, or why older ones were not removed.
    pub not_done: Option<Error>,
}

/// A folder of checkpoints that this process alone writes to.
#[derive(Debug)]
pub struct Store {
    folder: PathBuf,
    kept: Kept,
    /// Released when the file is closed, also by the end of the process.
    _lock: File,
    /// A checkpoint of this run, whose frozen tensors are those of the run.
    frozen: Option<(PathBuf, Records)>,
}

impl Store {
    /// Makes the folder if there is none, locks it, and removes what killed processes left.
    pub fn open(folder: &Path, kept: Kept) -> Result<Store, Error> {
        if !folder.is_dir() {
            fs::create_dir_all(folder).map_err(at(folder))?;
            let parent = folder.parent().filter(|parent| *parent != Path::new(""));
            sync_folder(parent.unwrap_or(Path::new(".")))?;
        }
        let lock = lock(folder)?;
        let store = Store {
            folder: folder.to_path_buf(),
            kept,
            _lock: lock,
            frozen: None,
        };
        store.clear()?;
        Ok(store)
    }

    /// Removes the folder if nothing was written to it: a run could not begin.
    pub fn abandon(self) {
        let is_lock = |entry: std::io::Result<fs::DirEntry>| {
            entry.is_ok_and(|entry| entry.file_name() == LOCK)
        };
        let is_empty = fs::read_dir(&self.folder).is_ok_and(|mut all| all.all(is_lock));
        if is_empty {
            // What cannot be removed stays, and does no harm.
            let _ = fs::remove_file(self.folder.join(LOCK));
            let _ = fs::remove_dir(&self.folder);
        }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The run goes on from a checkpoint of this folder: frozen tensors are as there, and their
    /// files need not be written again. A process that was killed may not have linked the newest.
    pub fn resumed(&mut self, from: &Checkpoint) -> Result<(), Error> {
        let manifest = from.manifest();
        let name = folder_name(manifest.step);
        self.frozen = Some((self.folder.join(&name), frozen_files(manifest)));
        let is_linked = fs::read_link(self.folder.join(LATEST)).is_ok_and(|to| to == *name);
        match is_linked {
            true => Ok(()),
            false => self.link_latest(&name),
        }
    }

    /// Whether frozen tensors are written already, so that [`Store::save`] does not read them.
    pub fn has_frozen(&self) -> bool {
        self.frozen.is_some()
    }

    /// Writes a checkpoint. `manifest` has everything but its files; `source` gives the tensors'
    /// bytes. If it fails, the checkpoints before it are as they were.
    pub fn save(
        &mut self,
        mut manifest: Manifest,
        tensors: &[Tensor],
        source: &mut Source<'_>,
    ) -> Result<Saved, Error> {
        let name = folder_name(manifest.step);
        let path = self.folder.join(&name);
        let hidden = self.folder.join(format!(".{name}"));
        manifest.format = FORMAT;
        manifest.ranks = 1;
        let written = self.write(&hidden, &mut manifest, tensors, source);
        let named = written.and_then(|()| self.name(&hidden, &path));
        if let Err(error) = named {
            // The disk may be full: what is left would not leave room for the next one.
            let _ = fs::remove_dir_all(&hidden);
            return Err(error);
        }
        self.frozen = Some((path.clone(), frozen_files(&manifest)));
        let linked = self.link_latest(&name);
        let pruned = linked.and_then(|()| self.prune(manifest.step));
        Ok(Saved {
            path,
            not_done: pruned.err(),
        })
    }

    fn write(
        &mut self,
        hidden: &Path,
        manifest: &mut Manifest,
        tensors: &[Tensor],
        source: &mut Source<'_>,
    ) -> Result<(), Error> {
        self.clear()?;
        fs::create_dir(hidden).map_err(at(hidden))?;
        let linked = self.link_frozen(hidden)?;
        let is_written = |part: Part| linked.is_none() || !part.is_frozen();
        let parts = Part::ALL.into_iter().filter(|&part| is_written(part));
        manifest.files = write_files(hidden, tensors, parts, source)?;
        manifest.files.extend(linked.into_iter().flatten());
        write_index(hidden, tensors, &manifest.files)?;
        write_text(&hidden.join(MANIFEST), &manifest.encode())?;
        sync_folder(hidden)
    }

    /// Links the frozen files of a checkpoint of this run, or copies them if the system has no
    /// links. `None` if there are none yet. After an error they are written again.
    fn link_frozen(&mut self, hidden: &Path) -> Result<Option<Records>, Error> {
        let Some((from, files)) = self.frozen.take() else {
            return Ok(None);
        };
        for (name, _) in &files {
            let (old, new) = (from.join(name), hidden.join(name));
            if fs::hard_link(&old, &new).is_err() {
                let copied = fs::copy(&old, &new).and_then(|_| File::open(&new)?.sync_all());
                copied.map_err(at(&old))?;
            }
        }
        self.frozen = Some((from, files.clone()));
        Ok(Some(files))
    }

    /// Gives a checkpoint its name.
    fn name(&self, hidden: &Path, path: &Path) -> Result<(), Error> {
        // A run that was resumed from an older checkpoint replaces a damaged one.
        self.hide(path)?;
        fs::rename(hidden, path).map_err(at(path))?;
        sync_folder(&self.folder)
    }

    fn link_latest(&self, name: &str) -> Result<(), Error> {
        let latest = self.folder.join(LATEST);
        let new = self.folder.join(".latest");
        let _ = fs::remove_file(&new);
        symlink(name, &new).map_err(at(&new))?;
        fs::rename(&new, &latest).map_err(at(&latest))?;
        sync_folder(&self.folder)
    }

    /// Removes the checkpoints that are not to be kept. One that is not whole counts for none.
    fn prune(&self, newest: u64) -> Result<(), Error> {
        let mut whole = 0;
        for (step, path) in newest_first(&self.folder)? {
            if step > newest {
                continue;
            }
            if self.kept.keeps(step, whole) {
                whole += u64::from(step == newest || Checkpoint::open(&path).is_ok());
            } else {
                self.hide(&path)?;
            }
        }
        self.clear()
    }

    /// Takes its name from a checkpoint, if there is one.
    fn hide(&self, path: &Path) -> Result<(), Error> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let hidden = self.folder.join(format!(".{name}.old"));
        match fs::rename(path, &hidden) {
            Ok(()) => sync_folder(&self.folder),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(at(path)(e)),
        }
    }

    /// Removes what has no name: checkpoints that are not kept, and those that were not finished.
    fn clear(&self) -> Result<(), Error> {
        for entry in fs::read_dir(&self.folder).map_err(at(&self.folder))? {
            let path = entry.map_err(at(&self.folder))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(".step-") {
                fs::remove_dir_all(&path).map_err(at(&path))?;
            }
        }
        Ok(())
    }
}

/// Writes the tensors of a model to a new folder, as Hugging Face's libraries read them.
pub fn write_model(
    folder: &Path,
    tensors: &[Tensor],
    source: &mut Source<'_>,
) -> Result<(), Error> {
    fs::create_dir(folder).map_err(at(folder))?;
    let files = write_files(folder, tensors, [Part::Model], source)?;
    write_index(folder, tensors, &files)?;
    sync_folder(folder)
}

/// Writes the files of some parts, and returns their records.
fn write_files(
    folder: &Path,
    tensors: &[Tensor],
    parts: impl IntoIterator<Item = Part>,
    source: &mut Source<'_>,
) -> Result<BTreeMap<String, FileRecord>, Error> {
    let mut files = BTreeMap::new();
    for part in parts {
        let shards = shards(tensors, part, SHARD_BYTES);
        let count = shards.len();
        for (number, shard) in (1..).zip(shards) {
            let name = format!("{}-{number:05}-of-{count:05}.safetensors", part.name());
            let path = folder.join(&name);
            let mut file = create(&path)?;
            let written = tensors::write(&mut file, tensors, &shard, true, source);
            let written = written.map_err(at(&path))?;
            file.sync_all().map_err(at(&path))?;
            let names = shard.iter().map(|&number| tensors[number].name.clone());
            let record = FileRecord {
                header: written.header,
                tensors: names.zip(written.tensors).collect(),
            };
            files.insert(name, record);
        }
    }
    Ok(files)
}

/// Writes the index under which other programs find the model's tensors.
fn write_index(
    folder: &Path,
    tensors: &[Tensor],
    files: &BTreeMap<String, FileRecord>,
) -> Result<(), Error> {
    let model = tensors.iter().filter(|tensor| tensor.part.is_model());
    let model: BTreeMap<&str, &Tensor> =
        model.map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let mut places = BTreeMap::new();
    for (file, record) in files {
        let names = record.tensors.keys();
        let names = names.filter(|name| model.contains_key(name.as_str()));
        places.extend(names.map(|name| (name, file)));
    }
    let total: u64 = model.values().map(|tensor| tensor.bytes()).sum();
    let index = json!({"metadata": {"total_size": total}, "weight_map": places});
    write_text(&folder.join(INDEX), &index.to_string())
}

/// The tensors of a part, by file.
fn shards(tensors: &[Tensor], part: Part, most: u64) -> Vec<Vec<usize>> {
    let mut numbers: Vec<usize> = (0..tensors.len()).collect();
    numbers.retain(|&number| tensors[number].part == part);
    numbers.sort_by(|&a, &b| tensors::by_alignment(&tensors[a], &tensors[b]));
    let mut shards: Vec<Vec<usize>> = vec![];
    let mut bytes = 0;
    for number in numbers {
        let size = tensors[number].bytes();
        match shards.last_mut() {
            Some(shard) if bytes + size <= most => {
                bytes += size;
                shard.push(number);
            }
            _ => {
                bytes = size;
                shards.push(vec![number]);
            }
        }
    }
    shards
}

/// The records of the files whose tensors no step changes.
fn frozen_files(manifest: &Manifest) -> Records {
    let is_frozen = |name: &str| {
        let mut parts = Part::ALL.into_iter().filter(|part| part.is_frozen());
        parts.any(|part| name.starts_with(part.name()))
    };
    let files = manifest.files.iter().filter(|(name, _)| is_frozen(name));
    files
        .map(|(name, record)| (name.clone(), record.clone()))
        .collect()
}

/// Locks a folder until the file is closed.
fn lock(folder: &Path) -> Result<File, Error> {
    let path = folder.join(LOCK);
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(false);
    let mut file = options.open(&path).map_err(at(&path))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut holder = String::new();
            let _ = file.read_to_string(&mut holder);
            let holder = holder.trim();
            return Err(Error::Locked {
                path: folder.to_path_buf(),
                holder: match holder.parse::<u32>() {
                    Ok(holder) => format!(" ({holder})"),
                    Err(_) => String::new(),
                },
            });
        }
        Err(e) => return Err(at(&path)(e.into())),
    }
    // Only for messages.
    let _ = file.set_len(0);
    let _ = file.write_all(format!("{}\n", std::process::id()).as_bytes());
    Ok(file)
}

fn create(path: &Path) -> Result<File, Error> {
    let mut options = File::options();
    let file = options.write(true).create_new(true).open(path);
    file.map_err(at(path))
}

fn write_text(path: &Path, text: &str) -> Result<(), Error> {
    let mut file = create(path)?;
    let written = file.write_all(text.as_bytes());
    written.and_then(|()| file.sync_all()).map_err(at(path))
}

/// Puts a folder's entries on the disk.
fn sync_folder(folder: &Path) -> Result<(), Error> {
    let synced = File::open(folder).and_then(|file| file.sync_all());
    match synced {
        // Some systems cannot sync folders, and need not.
        Err(e) if e.kind() == io::ErrorKind::InvalidInput => Ok(()),
        synced => synced.map_err(at(folder)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use artifact::DType;

    #[test]
    fn files_have_a_largest_size_and_all_tensors() {
        let tensor = |name: &str, n: u64, part| Tensor {
            name: name.into(),
            dtype: DType::F32,
            shape: vec![n],
            part,
        };
        let tensors = [
            tensor("c", 10, Part::Model),
            tensor("a", 10, Part::Model),
            tensor("huge", 100, Part::Model),
            tensor("m", 10, Part::Training),
            tensor("b", 10, Part::Model),
        ];
        assert_eq!(
            shards(&tensors, Part::Model, 80),
            [vec![1, 4], vec![0], vec![2]]
        );
        assert_eq!(shards(&tensors, Part::Training, 80), [[3]]);
    }

    #[test]
    fn the_last_and_the_milestones_are_kept() {
        let kept = |last: u64, every: u64| Kept {
            last: NonZeroU64::new(last),
            every: NonZeroU64::new(every),
        };
        let after = |kept: Kept| -> Vec<u64> {
            let steps = (1..=10).rev().zip(0..);
            let steps = steps.filter(|&(step, newer)| kept.keeps(step, newer));
            steps.map(|(step, _)| step).collect()
        };
        assert_eq!(after(kept(2, 0)), [10, 9]);
        assert_eq!(after(kept(2, 4)), [10, 9, 8, 4]);
        assert_eq!(after(kept(0, 4)).len(), 10);
    }
}
