//! Compiled kernels on disk, by a hash of all their inputs.
//!
//! Nothing here fails. A kernel that cannot be read is compiled. A kernel that cannot be written is
//! compiled again the next time. If the kernels take too many bytes, the least recently used ones
//! are removed.
//!
//! **Invariant:** only files with names that this module gives are read, counted or removed. The
//! folder may hold other files, such as the user's.
//!
//! **Invariant:** a kernel that is read runs as code. So it is read only from a folder and a file
//! that only this user can write ([`private`](super::private)).

use super::generator::{GeneratorError, Stage, find, run_all_until};
use super::{Generated, Target, private};
use passes::plan::Cancel;
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

/// The most bytes in the cache: the kernels of a few hundred models.
const MOST_BYTES: u64 = 256 << 20;
/// Hexadecimal digits of a key.
const KEY_DIGITS: usize = 64;
/// A part file of this age was left by a process that was killed.
const STALE: Duration = Duration::from_secs(3600);

/// The place of compiled kernels.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
    most_bytes: u64,
}

/// What a file of the folder is, by its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Entry {
    /// A kernel.
    Kernel,
    /// A kernel that is being written, or that a killed process left behind.
    Part,
}

impl Entry {
    /// The kind of file that a name belongs to; `None` for a file that is not ours.
    fn of(name: &str) -> Option<Entry> {
        let (key, rest) = name.split_at_checked(KEY_DIGITS)?;
        let is_key = key
            .bytes()
            .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        if !is_key {
            return None;
        }
        if rest.is_empty() {
            return Some(Entry::Kernel);
        }
        let number = rest.strip_prefix('.')?;
        let is_number = number.bytes().all(|b| b.is_ascii_digit() || b == b'-');
        (!number.is_empty() && is_number).then_some(Entry::Part)
    }
}

impl Cache {
    /// A cache that keeps nothing.
    pub fn off() -> Cache {
        Cache {
            folder: None,
            most_bytes: 0,
        }
    }

    /// A cache in a folder. The folder is created when the first kernel is written.
    pub fn at(folder: impl Into<PathBuf>) -> Cache {
        Cache {
            folder: Some(folder.into()),
            most_bytes: MOST_BYTES,
        }
    }

    /// The same cache with room for `most_bytes` bytes.
    pub fn of_bytes(self, most_bytes: u64) -> Cache {
        Cache { most_bytes, ..self }
    }

    /// The user's cache: `LIGHTERAGE_CACHE`, which is a folder or `off`. Without it,
    /// `lighterage/kernels` in the folder for caches, which is `XDG_CACHE_HOME` or `~/.cache`. Off
    /// if there is no home.
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
        // The standard for these folders says that a relative path is ignored.
        let caches = folder("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        let caches = caches.or_else(|| folder("HOME").map(|home| home.join(".cache")));
        caches.map_or(Cache::off(), |path| {
            Cache::at(path.join("lighterage").join("kernels"))
        })
    }

    /// The folder, created if needed; `None` if kernels must not be read from it or cannot be
    /// written to it.
    fn folder(&self) -> Option<&Path> {
        let folder = self.folder.as_deref()?;
        let usable = match private::check_folder(folder) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                private::create_folder(folder).and_then(|()| private::check_folder(folder))
            }
            checked => checked,
        };
        match usable {
            Ok(()) => Some(folder),
            Err(e) => {
                log::warn!(
                    "no compiled kernels are kept in {}: {e}; LIGHTERAGE_CACHE names another \
                     folder, or is off",
                    folder.display()
                );
                None
            }
        }
    }

    /// If there are too many bytes, removes the least recently used kernels until half of the room
    /// is free.
    fn trim(&self, folder: &Path) {
        let mut kernels: Vec<(SystemTime, PathBuf, u64)> = vec![];
        for file in fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = file.file_name();
            let Some(entry) = name.to_str().and_then(Entry::of) else {
                continue;
            };
            // The metadata of a link is that of the link itself.
            let Some(metadata) = file.metadata().ok().filter(fs::Metadata::is_file) else {
                continue;
            };
            let Ok(modified) = metadata.modified() else {
                continue;
            };
            match entry {
                Entry::Kernel => kernels.push((modified, file.path(), metadata.len())),
                Entry::Part if modified.elapsed().is_ok_and(|age| age > STALE) => {
                    let _ = fs::remove_file(file.path());
                }
                Entry::Part => {}
            }
        }

        let mut bytes: u64 = kernels.iter().map(|kernel| kernel.2).sum();
        if bytes <= self.most_bytes {
            return;
        }
        kernels.sort_unstable();
        for (_, path, len) in kernels {
            if bytes <= self.most_bytes / 2 {
                break;
            }
            log::debug!(
                "removing {}, which was not used for longest",
                path.display()
            );
            let _ = fs::remove_file(path);
            bytes -= len;
        }
    }
}

/// Reads a kernel; `None` if it does not exist or is incomplete.
fn read(folder: &Path, key: &str) -> Option<Vec<u8>> {
    let path = folder.join(key);
    let mut file = match private::open(&path) {
        Ok(file) => file,
        Err(e) => {
            if e.kind() != io::ErrorKind::NotFound {
                log::warn!("{} is not used: {e}", path.display());
            }
            return None;
        }
    };
    let mut bytes = vec![];
    file.read_to_end(&mut bytes).ok()?;
    // Marks the kernel as used now.
    let _ = file.set_modified(SystemTime::now());
    // The hash of the object stands in front of it.
    let (hash, object) = bytes.split_at_checked(32)?;
    (Sha256::digest(object)[..] == *hash).then(|| object.to_vec())
}

/// Writes a kernel. Another process may read or write the same one at this moment, so the file is
/// complete before it has its name.
fn write(folder: &Path, key: &str, object: &[u8]) {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let part = folder.join(format!("{key}.{}-{count}", std::process::id()));
    let written = private::create(&part).and_then(|mut file| {
        file.write_all(&Sha256::digest(object))?;
        file.write_all(object)?;
        drop(file);
        fs::rename(&part, folder.join(key))
    });
    if let Err(e) = written {
        let _ = fs::remove_file(&part);
        log::debug!("{key} is not kept in {}: {e}", folder.display());
    }
}

/// The identity of the program that compiles, because another one may compile differently.
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
    compile_kernels_until(kernels, target, cache, &Cancel::default())
}

/// The same, with a look at `cancel` before each kernel.
pub fn compile_kernels_until(
    kernels: &[&Generated],
    target: &Target,
    cache: &Cache,
    cancel: &Cancel,
) -> Result<Vec<Vec<u8>>, GeneratorError> {
    let stage = if target.is_gpu() {
        Stage::Asm
    } else {
        Stage::Object
    };
    if kernels.is_empty() {
        return Ok(vec![]);
    }
    let Some(folder) = cache.folder() else {
        return run_all_until(kernels, target, stage, cancel);
    };

    let program = program()?;
    let key = |kernel: &Generated| {
        let hash = Sha256::digest(format!("{program}\n{target}\n{}", kernel.mlir));
        hash.iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    let keys: Vec<String> = kernels.iter().map(|&kernel| key(kernel)).collect();
    let mut objects: Vec<Option<Vec<u8>>> = keys.iter().map(|key| read(folder, key)).collect();

    let missing: Vec<usize> = (0..kernels.len())
        .filter(|&i| objects[i].is_none())
        .collect();
    log::debug!(
        "{} of {} kernels are in the cache",
        kernels.len() - missing.len(),
        kernels.len()
    );
    let wanted: Vec<&Generated> = missing.iter().map(|&i| kernels[i]).collect();
    for (&i, object) in missing
        .iter()
        .zip(run_all_until(&wanted, target, stage, cancel)?)
    {
        write(folder, &keys[i], &object);
        objects[i] = Some(object);
    }
    if !missing.is_empty() {
        cache.trim(folder);
    }
    Ok(objects.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_the_cache_are_its_own() {
        let key = "0123456789abcdef".repeat(4);
        assert_eq!(Entry::of(&key), Some(Entry::Kernel));
        assert_eq!(Entry::of(&format!("{key}.77")), Some(Entry::Part));
        assert_eq!(Entry::of(&format!("{key}.77-3")), Some(Entry::Part));
        for other in [
            "checkpoint.safetensors".to_string(),
            String::new(),
            key.to_uppercase(),
            key[1..].to_string(),
            format!("{key}0"),
            format!("{key}."),
            format!("{key}.safetensors"),
            format!("{}é", &key[1..]),
        ] {
            assert_eq!(Entry::of(&other), None, "{other}");
        }
    }

    #[test]
    fn a_full_cache_removes_its_own_files_alone() {
        let folder = std::env::temp_dir().join(format!("lighterage-trim-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        private::create_folder(&folder).unwrap();
        let key = |digit: &str| digit.repeat(KEY_DIGITS);
        let old = SystemTime::now() - Duration::from_secs(7200);
        for name in ["checkpoint.safetensors", &format!("{}.9-0", key("e"))] {
            let file = fs::File::create(folder.join(name)).unwrap();
            (&file).write_all(&[1; 1000]).unwrap();
            file.set_modified(old).unwrap();
        }
        for digit in ["a", "b", "c"] {
            write(&folder, &key(digit), &[7; 1000]);
        }

        Cache::at(&folder).of_bytes(2500).trim(&folder);

        let names = fs::read_dir(&folder).unwrap();
        let names: Vec<String> = names
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        fs::remove_dir_all(&folder).unwrap();
        assert!(names.contains(&"checkpoint.safetensors".to_string()));
        assert!(!names.contains(&format!("{}.9-0", key("e"))), "{names:?}");
        assert_eq!(names.len(), 2, "{names:?}");
    }
}
