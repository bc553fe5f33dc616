//! What the tests share: fixtures, archives taken apart and put together again.

// Each test binary uses a part of it.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::BTreeMap;
use std::io::{Cursor, Read, Write};
use std::path::PathBuf;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// A file below `tests/data`.
pub(crate) fn data(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data").join(path)
}

/// The bytes of a file below `tests/data`.
pub(crate) fn bytes(path: &str) -> Vec<u8> {
    std::fs::read(data(path)).unwrap()
}

/// No symbolic sizes.
pub(crate) fn fixed() -> BTreeMap<String, u64> {
    BTreeMap::new()
}

/// The entries of an archive, without their root folder.
pub(crate) fn entries(bytes: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let mut zip = ZipArchive::new(Cursor::new(bytes)).unwrap();
    let mut entries = BTreeMap::new();
    for i in 0..zip.len() {
        let mut file = zip.by_index(i).unwrap();
        let name = String::from_utf8(file.name_raw().to_vec()).unwrap();
        let mut bytes = vec![];
        file.read_to_end(&mut bytes).unwrap();
        entries.insert(name.split_once('/').unwrap().1.to_string(), bytes);
    }
    entries
}

/// An archive of entries.
pub(crate) fn archive(entries: &BTreeMap<String, Vec<u8>>, method: CompressionMethod) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(vec![]));
    for (name, bytes) in entries {
        zip.start_file(format!("root/{name}"), SimpleFileOptions::default().compression_method(method)).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

/// An archive whose model is `edit` of the model in `bytes`.
pub(crate) fn edited(bytes: &[u8], edit: impl FnOnce(&mut serde_json::Value)) -> Vec<u8> {
    let mut entries = entries(bytes);
    let mut model = serde_json::from_slice(&entries[MODEL]).unwrap();
    edit(&mut model);
    entries.insert(MODEL.into(), serde_json::to_vec(&model).unwrap());
    archive(&entries, CompressionMethod::Stored)
}

/// The model's entry.
pub(crate) const MODEL: &str = "models/model.json";

/// A generator of numbers with a seed, for tests that try many inputs.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    /// A number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }
}
