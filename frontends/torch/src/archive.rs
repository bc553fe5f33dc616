//! The zip around a .pt2 file, and the tensors in it. Allocations are limited by the file's length:
//! the size in a header is checked first, and all reads use up one [`Archive::allowance`].

use crate::Error;
use crate::schema::{self, Payload, PayloadConfig, SymInt, TensorMeta};
use crate::zip::Zip;
use ir::{DType, TensorType};
use std::collections::BTreeMap;
use std::io::{Read, Seek};

/// An opened file.
pub(crate) struct Archive<R> {
    zip: Zip<R>,
    /// The folder that holds all entries, with its slash.
    root: String,
    /// Bytes that may still be allocated.
    allowance: u64,
    /// Parameters and persistent buffers, then constants and other buffers.
    payloads: [BTreeMap<String, Payload>; 2],
}

/// The folders of the two kinds of payloads, and their tables.
const PAYLOADS: [(&str, &str); 2] = [
    ("data/weights", "model_weights_config.json"),
    ("data/constants", "model_constants_config.json"),
];

/// Text deflates to a tenth; expanded and shared tensors are written once and read several times. A
/// factor of 16 plus 16 MiB is enough for all of this, but not for a zip bomb.
fn allowance(file_bytes: u64) -> u64 {
    file_bytes.saturating_mul(16).saturating_add(16 << 20)
}

impl<R: Read + Seek> Archive<R> {
    /// Opens an archive of `bytes` bytes and reads its tables of tensors.
    pub(crate) fn open(reader: R, bytes: u64) -> Result<Archive<R>, Error> {
        let zip = Zip::open(reader, bytes).map_err(|e| {
            Error::new("", format!("is not a whole zip archive: {e}")).help(
                "a .pt2 file is what torch.export.save writes; this one may be cut off or \
                    of another kind",
            )
        })?;
        let Some(model) = zip.names().find(|name| name.ends_with(MODEL)) else {
            let old = zip
                .names()
                .any(|name| name.ends_with("serialized_exported_program.json"));
            let help = if old {
                "it was written by torch before 2.8; export it again with torch 2.11"
            } else {
                "a .pt2 file is what torch.export.save writes"
            };
            return Err(Error::new("", format!("has no entry {MODEL}")).help(help));
        };
        let root = model[..model.len() - MODEL.len()].to_string();
        let payloads = [BTreeMap::new(), BTreeMap::new()];
        let mut archive = Archive {
            zip,
            root,
            allowance: allowance(bytes),
            payloads,
        };
        let order = archive
            .entry("byteorder")?
            .ok_or_else(|| Error::new("byteorder", "the entry is missing"))?;
        if order != b"little" {
            let order = String::from_utf8_lossy(&order[..order.len().min(16)]).into_owned();
            return Err(Error::new(
                "byteorder",
                format!("is {order:?}, should be \"little\""),
            ));
        }
        for (i, (folder, table)) in PAYLOADS.into_iter().enumerate() {
            let place = format!("{folder}/{table}");
            if let Some(text) = archive.entry(&place)? {
                let config: PayloadConfig = json(&text, &place)?;
                archive.payloads[i] = config.config;
            }
        }
        Ok(archive)
    }

    /// The bytes of the entry with this name, if any.
    pub(crate) fn entry(&mut self, name: &str) -> Result<Option<Vec<u8>>, Error> {
        let path = format!("{}{name}", self.root);
        let Some(size) = self.zip.size(&path) else {
            return Ok(None);
        };
        if self.allowance < size {
            let message = format!("claims {size} bytes, more than a file of this length warrants");
            return Err(Error::new(name, message));
        }
        self.allowance -= size;
        self.zip
            .read(&path)
            .map(Some)
            .map_err(|e| Error::new(name, format!("cannot be read: {e}")))
    }

    /// The model's JSON, after a check of its version.
    pub(crate) fn model(&mut self) -> Result<schema::ExportedProgram, Error> {
        let text = self
            .entry(MODEL)?
            .ok_or_else(|| Error::new(MODEL, "the entry is missing"))?;
        let header: schema::Header = json(&text, MODEL)?;
        let version = header.schema_version;
        if version.major != 8 {
            let message = format!(
                "has schema version {}.{}, written by torch {}; version 8 is understood",
                version.major, version.minor, header.torch_version
            );
            return Err(Error::new(MODEL, message).help("export it again with torch 2.11"));
        }
        json(&text, MODEL)
    }

    /// Names of tensors that are the same elements of one payload.
    pub(crate) fn shared(&self) -> Vec<Vec<String>> {
        let mut names: BTreeMap<(&str, Option<Strided>), Vec<&str>> = BTreeMap::new();
        for (name, payload) in &self.payloads[0] {
            let meta = payload.tensor_meta.as_ref();
            let view = meta.and_then(|meta| Strided::new(meta).ok());
            let same = names.entry((&payload.path_name, view)).or_default();
            same.push(name);
        }
        // 0 bytes mean that a tensor is absent: all absent tensors share one name.
        let is_present = |path: &str| {
            let entry = format!("{}{}/{path}", self.root, PAYLOADS[0].0);
            self.zip.size(&entry).is_some_and(|bytes| bytes > 0)
        };
        let groups = names
            .into_iter()
            .filter(|((path, _), names)| names.len() > 1 && is_present(path));
        groups
            .map(|(_, names)| names.into_iter().map(str::to_string).collect())
            .collect()
    }

    /// The bytes of a tensor, row-major and contiguous; none if the file has no weights.
    pub(crate) fn tensor(&mut self, path: &str, ty: &TensorType) -> Result<Option<Vec<u8>>, Error> {
        let kind = self
            .payloads
            .iter()
            .position(|table| table.contains_key(path));
        let Some(kind) = kind else { return Ok(None) };
        let (folder, table) = PAYLOADS[kind];
        let payload = &self.payloads[kind][path];
        let place = format!("{folder}/{table}: {path}");
        let Some(meta) = payload.tensor_meta.as_ref().filter(|_| !payload.use_pickle) else {
            let error = Error::new(place, "is stored as a Python pickle, which is not read");
            return Err(
                error.help("use plain tensors, not tensor subclasses, as parameters and buffers")
            );
        };
        let strided = Strided::new(meta).map_err(|e| Error::new(&place, e))?;
        if strided.dtype != ty.dtype() || strided.sizes != ty.shape() {
            let message = format!(
                "is {}{:?}, but the graph takes {ty}",
                strided.dtype, strided.sizes
            );
            return Err(Error::new(place, message));
        }
        let entry = format!("{folder}/{}", payload.path_name);
        let storage = self.entry(&entry)?;
        let storage = storage
            .ok_or_else(|| Error::new(place.clone(), format!("its bytes, {entry}, are missing")))?;
        if ty.numel() == 0 {
            return Ok(Some(vec![]));
        }
        if storage.is_empty() {
            return Ok(None);
        }
        strided
            .check(storage.len() as u64)
            .map_err(|e| Error::new(&place, e))?;
        if strided.is_whole(storage.len() as u64) {
            return Ok(Some(storage));
        }
        if self.allowance < ty.bytes() {
            let message = format!(
                "takes {} bytes, more than a file of this length warrants",
                ty.bytes()
            );
            return Err(Error::new(place, message));
        }
        self.allowance -= ty.bytes();
        Ok(Some(strided.gather(&storage)))
    }
}

/// The model's entry below the root folder.
const MODEL: &str = "models/model.json";

/// Reads JSON; serde_json limits the depth.
pub(crate) fn json<T: serde::de::DeserializeOwned>(text: &[u8], place: &str) -> Result<T, Error> {
    serde_json::from_slice(text)
        .map_err(|e| Error::new(place, format!("is not the JSON expected here: {e}")))
}

/// A tensor as a view of its storage; all numbers count elements.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Strided {
    dtype: DType,
    sizes: Vec<u64>,
    strides: Vec<u64>,
    offset: u64,
}

impl Strided {
    fn new(meta: &TensorMeta) -> Result<Strided, String> {
        let part = schema::part(meta.dtype);
        let dtype = schema::dtype(meta.dtype).or(part);
        let dtype = dtype.ok_or_else(|| format!("element type {} is not known", meta.dtype))?;
        if meta.layout != schema::STRIDED {
            return Err(format!("layout {} is not strided", meta.layout));
        }
        let number = |size: &SymInt| match size {
            &SymInt::AsInt(i) => {
                u64::try_from(i).map_err(|_| format!("{i} should not be negative"))
            }
            SymInt::AsExpr(e) => Err(format!(
                "the size {} of a stored tensor should be a number",
                e.expr_str
            )),
        };
        let sizes: Vec<u64> = meta.sizes.iter().map(number).collect::<Result<_, _>>()?;
        let strides: Vec<u64> = meta.strides.iter().map(number).collect::<Result<_, _>>()?;
        if sizes.len() != strides.len() {
            return Err(format!(
                "has {} sizes and {} strides",
                sizes.len(),
                strides.len()
            ));
        }
        let strided = Strided {
            dtype,
            sizes,
            strides,
            offset: number(&meta.storage_offset)?,
        };
        match part {
            Some(_) => strided.of_parts(),
            None => Ok(strided),
        }
    }
    /// Complex numbers as pairs of parts, which are the last dimension.
    fn of_parts(mut self) -> Result<Strided, String> {
        let doubled = |n: u64| n.checked_mul(2).ok_or("a stride overflows");
        for stride in &mut self.strides {
            *stride = doubled(*stride)?;
        }
        self.offset = doubled(self.offset)?;
        self.sizes.push(2);
        self.strides.push(1);
        Ok(self)
    }
    /// Checks that a tensor that is not empty lies within `bytes` bytes.
    fn check(&self, bytes: u64) -> Result<(), String> {
        let mut spans = self
            .sizes
            .iter()
            .zip(&self.strides)
            .map(|(&size, &stride)| (size - 1).checked_mul(stride));
        let last = spans.try_fold(self.offset, |sum, span| sum.checked_add(span?));
        let end = last.and_then(|last| last.checked_add(1)?.checked_mul(self.dtype.bytes()));
        match end {
            Some(end) if end <= bytes => Ok(()),
            _ => Err(format!(
                "sizes {:?}, strides {:?}, offset {} reach beyond its {bytes} bytes",
                self.sizes, self.strides, self.offset
            )),
        }
    }
    /// True if the tensor is the whole storage, in order.
    fn is_whole(&self, bytes: u64) -> bool {
        let mut expected = 1;
        for (&size, &stride) in self.sizes.iter().zip(&self.strides).rev() {
            if size != 1 && stride != expected {
                return false;
            }
            expected *= size;
        }
        self.offset == 0 && expected * self.dtype.bytes() == bytes
    }
    /// The tensor's elements in row-major order. The storage holds them: see [`Strided::check`].
    fn gather(&self, storage: &[u8]) -> Vec<u8> {
        let width = self.dtype.bytes();
        let numel: u64 = self.sizes.iter().product();
        let mut bytes = Vec::with_capacity((numel * width) as usize);
        let mut index = vec![0; self.sizes.len()];
        let mut at = self.offset;
        for _ in 0..numel {
            let start = (at * width) as usize;
            bytes.extend_from_slice(&storage[start..start + width as usize]);
            for d in (0..index.len()).rev() {
                index[d] += 1;
                at += self.strides[d];
                if index[d] < self.sizes[d] {
                    break;
                }
                at -= self.strides[d] * index[d];
                index[d] = 0;
            }
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_become_contiguous() {
        let bytes: Vec<u8> = (0..12).collect();
        let view = |sizes: &[u64], strides: &[u64], offset| Strided {
            dtype: DType::U8,
            sizes: sizes.to_vec(),
            strides: strides.to_vec(),
            offset,
        };
        assert!(view(&[3, 4], &[4, 1], 0).is_whole(12));
        let transposed = view(&[2, 3], &[1, 4], 1);
        assert!(!transposed.is_whole(12));
        assert_eq!(transposed.gather(&bytes), [1, 5, 9, 2, 6, 10]);
        assert_eq!(view(&[2, 2], &[0, 1], 3).gather(&bytes), [3, 4, 3, 4]);
        assert!(view(&[3, 4], &[4, 1], 0).check(12).is_ok());
        assert!(view(&[3, 4], &[4, 1], 1).check(12).is_err());
        assert!(view(&[2, 2], &[u64::MAX, 1], 0).check(12).is_err());
    }
}
