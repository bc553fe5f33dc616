//! Shared code of the tests: fixtures, and archives that are split into entries and rebuilt.

// Each test binary uses only a part of it.

use flate2::Compression;
use flate2::write::DeflateEncoder;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

/// A file below `tests/data`.
pub(crate) fn data(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/data")
        .join(path)
}

/// The bytes of a file below `tests/data`.
pub(crate) fn bytes(path: &str) -> Vec<u8> {
    std::fs::read(data(path)).unwrap()
}

/// No symbolic sizes.
pub(crate) fn fixed() -> BTreeMap<String, u64> {
    BTreeMap::new()
}

/// The entries of an archive of torch, without their root folder.
pub(crate) fn entries(bytes: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let number = |at: usize, n: usize| {
        (0..n)
            .rev()
            .fold(0, |number, i| number << 8 | usize::from(bytes[at + i]))
    };
    let end = bytes.len() - 22;
    let mut at = number(end + 16, 4);
    let mut entries = BTreeMap::new();
    for _ in 0..number(end + 10, 2) {
        let (size, n_name, n_extra) = (number(at + 24, 4), number(at + 28, 2), number(at + 30, 2));
        let name = String::from_utf8(bytes[at + 46..at + 46 + n_name].to_vec()).unwrap();
        let local = number(at + 42, 4);
        let data = local + 30 + number(local + 26, 2) + number(local + 28, 2);
        entries.insert(
            name.split_once('/').unwrap().1.to_string(),
            bytes[data..data + size].to_vec(),
        );
        at += 46 + n_name + n_extra;
    }
    entries
}

/// An archive of entries.
pub(crate) fn archive(entries: &BTreeMap<String, Vec<u8>>, deflated: bool) -> Vec<u8> {
    let (mut bytes, mut directory) = (vec![], vec![]);
    for (name, data) in entries {
        let name = format!("root/{name}");
        let stored = if deflated {
            let mut encoder = DeflateEncoder::new(vec![], Compression::default());
            encoder.write_all(data).unwrap();
            encoder.finish().unwrap()
        } else {
            data.clone()
        };
        let mut header = [0, if deflated { 8u16 } else { 0 }, 0, 0]
            .map(u16::to_le_bytes)
            .concat();
        header.extend(
            [
                crc32fast::hash(data),
                stored.len() as u32,
                data.len() as u32,
            ]
            .map(u32::to_le_bytes)
            .concat(),
        );
        header.extend([name.len() as u16, 0].map(u16::to_le_bytes).concat());
        directory.extend(
            [
                b"PK\x01\x02\0\0\0\0",
                &header[..],
                &[0; 10],
                &(bytes.len() as u32).to_le_bytes(),
            ]
            .concat(),
        );
        directory.extend(name.as_bytes());
        bytes.extend([b"PK\x03\x04\0\0", &header[..], name.as_bytes(), &stored].concat());
    }
    let n = entries.len() as u16;
    let start = bytes.len() as u32;
    bytes.extend(&directory);
    bytes.extend(
        [
            &b"PK\x05\x06\0\0\0\0"[..],
            &n.to_le_bytes(),
            &n.to_le_bytes(),
        ]
        .concat(),
    );
    bytes.extend([(directory.len() as u32).to_le_bytes(), start.to_le_bytes()].concat());
    bytes.extend([0, 0]);
    bytes
}

/// The archive in `bytes` after `edit` of its model.
pub(crate) fn edited(bytes: &[u8], edit: impl FnOnce(&mut serde_json::Value)) -> Vec<u8> {
    let mut entries = entries(bytes);
    let mut model = serde_json::from_slice(&entries[MODEL]).unwrap();
    edit(&mut model);
    entries.insert(MODEL.into(), serde_json::to_vec(&model).unwrap());
    archive(&entries, false)
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
