//! The file that says what a checkpoint is, and the checksums of everything in it.
//!
//! Its text ends in `,"crc32":N}`, where N is the checksum of the text before. So the whole text is
//! one JSON object, and no number is read before the checksum agrees.

use crate::{Error, error::at};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The version of the files.
pub(crate) const FORMAT: u32 = 1;
/// What comes before the checksum.
const CHECKSUM: &str = ",\"crc32\":";

/// What a checkpoint has beside its tensors.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Manifest {
    /// The version of the files.
    pub format: u32,
    /// The model's name.
    pub model: String,
    /// The number of steps that are done.
    pub step: u64,
    /// The number of batches that are read: the position in the data.
    pub batches: u64,
    /// The number of processes whose states it has.
    pub ranks: u32,
    /// A fingerprint of the compiled step. Results do not depend on it.
    pub plan: String,
    /// What results depend on, as text by name: options of the optimizer, its schedule, seeds, the
    /// order of the data.
    pub options: BTreeMap<String, String>,
    /// Numbers that the host keeps from step to step, floats by their bits.
    pub numbers: BTreeMap<String, u64>,
    /// The files with tensors.
    pub files: BTreeMap<String, FileRecord>,
}

/// The checksums (CRC-32) of a file with tensors.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct FileRecord {
    /// Of its first bytes, up to the tensors.
    pub header: u32,
    /// Of each tensor.
    pub tensors: BTreeMap<String, u32>,
}

impl Manifest {
    /// As text, with its checksum.
    pub(crate) fn encode(&self) -> String {
        let mut text = serde_json::to_string(self).expect("strings and numbers should be JSON");
        text.pop();
        let checksum = crc32fast::hash(text.as_bytes());
        text.push_str(&format!("{CHECKSUM}{checksum}}}"));
        text
    }

    /// Reads a file.
    pub(crate) fn read(path: &Path) -> Result<Manifest, Error> {
        let damaged = |why: &str| Error::damaged(path, why);
        let text = fs::read(path).map_err(at(path))?;
        let text = String::from_utf8(text).map_err(|_| damaged("it is not text"))?;
        let (body, checksum) = text
            .rsplit_once(CHECKSUM)
            .ok_or_else(|| damaged("it is cut off"))?;
        let checksum = checksum.strip_suffix('}').and_then(|c| c.parse().ok());
        if checksum != Some(crc32fast::hash(body.as_bytes())) {
            return Err(damaged("its checksum does not match"));
        }
        let manifest: Manifest = serde_json::from_str(&format!("{body}}}"))
            .map_err(|e| damaged(&format!("written by another version: {e}")))?;
        if manifest.format != FORMAT {
            return Err(damaged(&format!(
                "its format is {}, and this version reads {FORMAT}",
                manifest.format
            )));
        }
        Ok(manifest)
    }
}
