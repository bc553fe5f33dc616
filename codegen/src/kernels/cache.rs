//! Compiled kernels on disk, by a hash of all that they are made from. Nothing here fails: what
//! cannot be read is compiled, what cannot be written is compiled again the next time. Of too many,
//! those go that were not used for longest.

use super::generator::{GeneratorError, Stage, find, run_all};
use super::{Generated, Target};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The most bytes that are kept: some hundred models' kernels.
const MOST_BYTES: u64 = 256 << 20;

/// Where compiled kernels are kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
    most_bytes: u64,
}

impl Cache {
    /// No cache.
    pub fn off() -> Cache {
        Cache {
            folder: None,
            most_bytes: 0,
        }
    }
    /// A cache in a folder, which need not be there.
    pub fn at(folder: impl Into<PathBuf>) -> Cache {
        Cache {
            folder: Some(folder.into()),
            most_bytes: MOST_BYTES,
        }
    }
    /// The same with room for so many bytes.
    pub fn of_bytes(self, most_bytes: u64) -> Cache {
        Cache { most_bytes, ..self }
    }
    /// The user's: `LIGHTERAGE_CACHE`, a folder or `off`; else `lighterage/kernels` in the folder
    /// for caches, which is `XDG_CACHE_HOME` or `~/.cache`. None if there is no home.
    pub fn user() -> Cache {
        let folder = |name: &str| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        match folder("LIGHTERAGE_CACHE") {
            Some(given) if given == Path::new("off") => return Cache::off(),
            Some(given) => return Cache::at(given),
            None => {}
        }
        // A relative path is to be ignored, says the standard for these folders.
        let caches = folder("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        let caches = caches.or_else(|| folder("HOME").map(|home| home.join(".cache")));
        caches.map_or(Cache::off(), |path| {
            Cache::at(path.join("lighterage").join("kernels"))
        })
    }

    fn read(&self, key: &str) -> Option<Vec<u8>> {
        let mut file = fs::File::open(self.folder.as_ref()?.join(key)).ok()?;
        let mut bytes = vec![];
        file.read_to_end(&mut bytes).ok()?;
        // It was used now.
        let _ = file.set_modified(SystemTime::now());
        // The hash of the rest stands in front.
        let (hash, object) = bytes.split_at_checked(32)?;
        (Sha256::digest(object)[..] == *hash).then(|| object.to_vec())
    }
    fn write(&self, key: &str, object: &[u8]) {
        let Some(folder) = &self.folder else { return };
        // Another process may read or write it at this moment: a file is complete before it has its
        // name.
        let part = folder.join(format!("{key}.{}", std::process::id()));
        let written = fs::create_dir_all(folder).and_then(|()| {
            let mut file = fs::File::create(&part)?;
            file.write_all(&Sha256::digest(object))?;
            file.write_all(object)?;
            drop(file);
            fs::rename(&part, folder.join(key))
        });
        if let Err(e) = written {
            let _ = fs::remove_file(&part);
            log::debug!("{} is not kept in {}: {e}", key, folder.display());
        }
    }
    /// Removes what was not used for longest, if there is too much, until half of the room is free.
    fn trim(&self) {
        let files = self
            .folder
            .iter()
            .flat_map(fs::read_dir)
            .flatten()
            .filter_map(|entry| {
                let entry = entry.ok()?;
                let data = entry.metadata().ok().filter(fs::Metadata::is_file)?;
                Some((data.modified().ok()?, entry.path(), data.len()))
            });
        let mut files: Vec<(SystemTime, PathBuf, u64)> = files.collect();
        let mut bytes: u64 = files.iter().map(|file| file.2).sum();
        if bytes <= self.most_bytes {
            return;
        }
        files.sort_unstable();
        for (_, path, len) in files {
            if bytes <= self.most_bytes / 2 {
                break;
            }
            let _ = fs::remove_file(path);
            bytes -= len;
        }
    }
}

/// What the program that compiles is: another one may compile differently.
fn program() -> Result<String, GeneratorError> {
    let path = find()?;
    let missing = |e| GeneratorError::Missing(format!("{}: {e}", path.display()));
    let data = fs::metadata(&path).map_err(missing)?;
    let changed = data
        .modified()
        .ok()
        .and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
    Ok(format!(
        "{} {} {}",
        env!("CARGO_PKG_VERSION"),
        data.len(),
        changed.map_or(0, |time| time.as_nanos())
    ))
}

/// Compiles kernels: an ELF object for each, or, for a GPU, PTX. The same kernels give the same
/// bytes.
pub fn compile_kernels(
    kernels: &[&Generated],
    target: &Target,
    cache: &Cache,
) -> Result<Vec<Vec<u8>>, GeneratorError> {
    let stage = if target.is_gpu() {
        Stage::Asm
    } else {
        Stage::Object
    };
    if kernels.is_empty() || cache.folder.is_none() {
        return run_all(kernels, target, stage);
    }
    let program = program()?;
    let key = |kernel: &Generated| {
        let hash = Sha256::digest(format!("{program}\n{target}\n{}", kernel.mlir));
        hash.iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    let keys: Vec<String> = kernels.iter().map(|&kernel| key(kernel)).collect();
    let mut objects: Vec<Option<Vec<u8>>> = keys.iter().map(|key| cache.read(key)).collect();
    let missing: Vec<usize> = (0..kernels.len())
        .filter(|&i| objects[i].is_none())
        .collect();
    let wanted: Vec<&Generated> = missing.iter().map(|&i| kernels[i]).collect();
    for (&i, object) in missing.iter().zip(run_all(&wanted, target, stage)?) {
        cache.write(&keys[i], &object);
        objects[i] = Some(object);
    }
    if !missing.is_empty() {
        cache.trim();
    }
    Ok(objects.into_iter().flatten().collect())
}
