//! Tensors in files beside the model. A file's name must lead to the model's folder or below it,
//! also after links are followed; offset and length must lie in the file.

use crate::proto::TensorProto;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Component, Path, PathBuf};

/// Tensors may share bytes of a file, as tied weights do. All tensors together are at most this
/// many times as large as the files.
const SHARED: u64 = 3;

/// The files beside a model.
pub(crate) struct Files {
    /// The model's folder without links; `None` if the model is not a file.
    folder: Option<PathBuf>,
    /// The sizes of the files read so far, bytes, each time that a tensor names them first.
    sizes: std::collections::BTreeMap<PathBuf, u64>,
    /// The bytes read so far.
    read: u64,
}

impl Files {
    /// The files beside the model at `path`.
    pub(crate) fn beside(path: Option<&Path>) -> Files {
        let folder = path.and_then(|path| {
            let parent = path
                .parent()
                .filter(|parent| !parent.as_os_str().is_empty());
            parent.unwrap_or(Path::new(".")).canonicalize().ok()
        });
        Files {
            folder,
            sizes: std::collections::BTreeMap::new(),
            read: 0,
        }
    }

    /// The files read so far.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        self.sizes.keys()
    }

    /// A tensor's `bytes` bytes. An error says why they cannot be read.
    pub(crate) fn read(&mut self, proto: &TensorProto, bytes: u64) -> Result<Vec<u8>, String> {
        let given = |key: &str| {
            let entry = proto.external_data.iter().find(|entry| entry.key() == key);
            entry.map(|entry| entry.value())
        };
        let number = |key: &str| match given(key) {
            None => Ok(None),
            Some(text) => text.parse::<u64>().map(Some).map_err(|_| {
                format!("its external data has the {key} {text:?}, which is no number of bytes")
            }),
        };
        let location = given("location").ok_or("its external data has no location")?;
        let offset = number("offset")?.unwrap_or(0);
        let length = number("length")?.unwrap_or(bytes);
        if length != bytes {
            return Err(format!(
                "needs {bytes} bytes, but its external data has {length}"
            ));
        }
        let path = self.path(location)?;
        let wrong = |e: std::io::Error| format!("{location:?} cannot be read ({e})");
        let mut file = File::open(&path).map_err(wrong)?;
        let meta = file.metadata().map_err(wrong)?;
        if !meta.is_file() {
            return Err(format!("{location:?} is not a file"));
        }
        let end = offset.checked_add(length);
        if end.is_none_or(|end| end > meta.len()) {
            let size = meta.len();
            return Err(format!(
                "lies at {offset} + {length} in {location:?}, which has {size} bytes"
            ));
        }
        self.sizes.insert(path, meta.len());
        self.read = self.read.saturating_add(length);
        let most = self.sizes.values().sum::<u64>().saturating_mul(SHARED);
        if self.read > most {
            return Err(format!(
                "{SHARED} times as many bytes are used as {location:?} has"
            ));
        }
        file.seek(SeekFrom::Start(offset)).map_err(wrong)?;
        // The file has these bytes.
        let mut data = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
        file.take(length).read_to_end(&mut data).map_err(wrong)?;
        Ok(data)
    }

    /// The file that a location names.
    fn path(&self, location: &str) -> Result<PathBuf, String> {
        let Some(folder) = &self.folder else {
            return Err("has its data in another file, but the model has no folder".into());
        };
        let relative = Path::new(location);
        let is_inside = relative
            .components()
            .all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
        let outside = || {
            format!("{location:?} is outside of the model's folder; copy the file beside the model")
        };
        if !is_inside || location.is_empty() {
            return Err(outside());
        }
        let path = folder.join(relative).canonicalize();
        let path = path.map_err(|e| format!("{location:?} cannot be read ({e})"))?;
        if path.starts_with(folder) {
            Ok(path)
        } else {
            Err(outside())
        }
    }
}
