//! The `.lit` file: a header of 64 bytes, the body, the data.
//!
//! ```text
//!  0  magic    89 4C 49 54 0D 0A 1A 0A    like PNG's: a transfer that rewrites line ends or
//!                                         cuts bit 7 breaks it
//!  8  version  u32                        all numbers are little-endian
//! 12  zero     u32
//! 16  body     u64                        its length in bytes
//! 24  data     u64                        its length in bytes
//! 32  crc      u32                        of the body with its padding
//! 36  crc      u32                        of the data
//! 40  signature  20 bytes                of the body with its padding; zeros if it has none
//! 60  crc      u32                        of the 60 bytes before
//! 64  body     postcard's encoding of an Artifact without its data, of the number of its other
//!              steps, and of each of them, then zeros up to a multiple of 64
//!     data     as it is; the file ends where it ends
//! ```
//!
//! The checksums are CRC-32. They find every flipped bit and every damaged run of up to 32 bits,
//! and miss other damage once in four billion times. They run at memory speed. They protect against
//! faults of disks and cables, not against people: a file with right checksums may still contain
//! anything, so safe code relies on the runtime's `validate`. A cryptographic hash would add
//! nothing here. Version and magic are read first, to distinguish files of a later version from
//! damaged ones.
//!
//! The signature says who compiled the file. This crate only carries it: the programs that write
//! and read files decide on the key, and on what a right signature permits. It covers only the
//! body: the data are initial values of states, not code.
//!
//! The body has postcard's encoding, because it is a published, stable format (one varint for each
//! number, no padding, no maps). So equal artifacts give equal bytes. Decoding allocates no more
//! than a constant times the body's length: a list reserves at most 1 MiB ahead of its elements
//! (serde's rule), and the worst element, an empty kernel, takes three bytes in the file and some
//! 200 in memory.

use crate::{Artifact, replace_file};
use serde::Serialize;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The version that [`write()`] writes and [`read()`] understands.
pub const FORMAT_VERSION: u32 = 9;

const MAGIC: [u8; 8] = *b"\x89LIT\r\n\x1a\n";
const HEADER: usize = 64;
/// The data starts at a multiple of this many bytes, so that tensors in a mapped file are aligned
/// as in a pool.
const ALIGN: u64 = 64;

/// A keyed hash of a file's body: see [`write_signed_file`].
pub type Signature = [u8; 20];

/// The signature of a file without one.
pub const UNSIGNED: Signature = [0; 20];

/// What a file's signature says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Signed {
    /// The file has no signature.
    No,
    /// The signature is right.
    Yes,
    /// The signature was made with another key, or for another body.
    Otherwise,
}

/// Why a file could not be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReadError {
    /// The operating system refuses.
    #[error("{}: {message}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        message: String,
    },
    /// The first bytes are not a `.lit` file's.
    #[error("not a .lit file: it does not start like one")]
    NotAnArtifact,
    /// A version that this program does not know.
    #[error("{}", version_text(*found))]
    Version {
        /// The file's version.
        found: u32,
    },
    /// The file is shorter or longer than its header says.
    #[error("{}", length_text(*expected, *found))]
    Length {
        /// The length that the header says, bytes; `None` if the header itself is cut off.
        expected: Option<u64>,
        /// The length that the file has, bytes.
        found: u64,
    },
    /// A part's bytes differ from the written bytes.
    #[error("the file is damaged: its {part} does not match its checksum")]
    Damaged {
        /// `header`, `body` or `data`.
        part: &'static str,
    },
    /// The checksums are right, but the body is not an artifact: another program wrote it.
    #[error("the file's body is not an artifact's: {message}")]
    Malformed {
        /// The decoder's error.
        message: String,
    },
    /// The file's data do not fit into memory.
    #[error("the file's data need {bytes} bytes of memory, which are not available")]
    Memory {
        /// The memory that the data need.
        bytes: u64,
    },
}

fn version_text(found: u32) -> String {
    if found > FORMAT_VERSION {
        format!(
            "the file has format version {found}, this program reads version {FORMAT_VERSION}: \
             it was written by a later release; update this one, or compile again with it"
        )
    } else if found > 0 {
        format!(
            "the file has format version {found}, this program reads version {FORMAT_VERSION}: \
             it was written by an earlier release; compile again with this one"
        )
    } else {
        format!("there is no format version {found}; this program reads version {FORMAT_VERSION}")
    }
}

fn length_text(expected: Option<u64>, found: u64) -> String {
    match expected {
        None => {
            format!("the file is cut off: it has {found} bytes, its header alone has {HEADER}")
        }
        Some(expected) if found < expected => {
            format!("the file is cut off: it has {found} bytes of {expected}")
        }
        Some(expected) => {
            let more = found - expected;
            format!("the file has {found} bytes, {more} more than it should")
        }
    }
}

/// The header's fields after magic and version.
struct Header {
    body: u64,
    data: u64,
    body_crc: u32,
    data_crc: u32,
    signature: Signature,
}

impl Header {
    fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.body.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.data.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.body_crc.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.data_crc.to_le_bytes());
        bytes[40..60].copy_from_slice(&self.signature);
        let crc = crc32fast::hash(&bytes[..60]);
        bytes[60..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Decodes the start of a file that is `found` bytes long.
    fn decode(bytes: &[u8], found: u64) -> Result<Header, ReadError> {
        let whole = MAGIC.len().min(bytes.len());
        if bytes[..whole] != MAGIC[..whole] {
            return Err(ReadError::NotAnArtifact);
        }
        let Some(bytes) = bytes.first_chunk::<HEADER>() else {
            return Err(ReadError::Length {
                expected: None,
                found,
            });
        };
        let version = u32_at(bytes, 8);
        if version != FORMAT_VERSION {
            return Err(ReadError::Version { found: version });
        }
        if u32_at(bytes, 60) != crc32fast::hash(&bytes[..60]) {
            return Err(ReadError::Damaged { part: "header" });
        }
        let header = Header {
            body: u64_at(bytes, 16),
            data: u64_at(bytes, 24),
            body_crc: u32_at(bytes, 32),
            data_crc: u32_at(bytes, 36),
            signature: *bytes[40..]
                .first_chunk()
                .expect("a header's fields should lie in it"),
        };
        match header.file_bytes() {
            Some(expected) if expected == found => Ok(header),
            Some(expected) => Err(ReadError::Length {
                expected: Some(expected),
                found,
            }),
            None => Err(ReadError::Malformed {
                message: "its lengths are beyond any file's".into(),
            }),
        }
    }

    fn padded_body(&self) -> Option<u64> {
        self.body.checked_next_multiple_of(ALIGN)
    }

    fn file_bytes(&self) -> Option<u64> {
        self.padded_body()?
            .checked_add(self.data)?
            .checked_add(HEADER as u64)
    }

    /// The artifact of a body with its padding and of its data. Their lengths are the header's.
    fn finish(&self, body: &[u8], data: Vec<u8>) -> Result<Artifact, ReadError> {
        if crc32fast::hash(body) != self.body_crc {
            return Err(ReadError::Damaged { part: "body" });
        }
        if crc32fast::hash(&data) != self.data_crc {
            return Err(ReadError::Damaged { part: "data" });
        }
        let malformed = |message: String| ReadError::Malformed { message };
        let (body, padding) = body.split_at(self.body as usize);
        if padding.iter().any(|&b| b != 0) {
            return Err(malformed("its padding is not zero".into()));
        }
        let take = |body| {
            postcard::take_from_bytes::<Artifact>(body).map_err(|e| malformed(e.to_string()))
        };
        let (mut artifact, rest) = take(body)?;
        let (n_others, mut rest) =
            postcard::take_from_bytes::<u32>(rest).map_err(|e| malformed(e.to_string()))?;
        for _ in 0..n_others {
            let (other, left) = take(rest)?;
            artifact.others.push(other);
            rest = left;
        }
        if !rest.is_empty() {
            return Err(malformed(format!("{} bytes follow it", rest.len())));
        }
        artifact.data = data;
        Ok(artifact)
    }
}

/// The bytes of an artifact's file. Equal artifacts give equal bytes.
pub fn write(artifact: &Artifact) -> Vec<u8> {
    let (header, body) = encode(artifact, |_| UNSIGNED);
    [&header[..], &body[..], &artifact.data[..]].concat()
}

/// Reads a file's bytes.
pub fn read(bytes: &[u8]) -> Result<Artifact, ReadError> {
    let header = Header::decode(bytes, bytes.len() as u64)?;
    let body = header
        .padded_body()
        .expect("decode should have checked the lengths") as usize;
    let (body, data) = bytes[HEADER..].split_at(body);
    let mut owned = reserve(data.len() as u64)?;
    owned.extend_from_slice(data);
    header.finish(body, owned)
}

/// Reads a file. Its lengths are compared with the file's before anything of that size is
/// allocated.
pub fn read_file(path: impl AsRef<Path>) -> Result<Artifact, ReadError> {
    read_signed_file(path, |_, _| false).map(|(artifact, _)| artifact)
}

/// Reads a file as [`read_file`] does. `is_right` says whether a signature belongs to a body.
pub fn read_signed_file(
    path: impl AsRef<Path>,
    is_right: impl FnOnce(&[u8], &Signature) -> bool,
) -> Result<(Artifact, Signed), ReadError> {
    let path = path.as_ref();
    let io = |e: io::Error| ReadError::Io {
        path: path.to_path_buf(),
        message: e.to_string(),
    };
    // Checked before opening: opening a pipe without a writer would wait forever.
    let metadata = fs::metadata(path).map_err(io)?;
    if !metadata.is_file() {
        return Err(io(io::Error::other("not a regular file")));
    }
    let mut file = File::open(path).map_err(io)?;
    let found = file.metadata().map_err(io)?.len();
    let mut start = Vec::with_capacity(HEADER);
    (&mut file)
        .take(HEADER as u64)
        .read_to_end(&mut start)
        .map_err(io)?;
    let header = Header::decode(&start, found)?;
    let mut section = |bytes: u64| {
        let mut section = reserve(bytes)?;
        (&mut file)
            .take(bytes)
            .read_to_end(&mut section)
            .map_err(io)?;
        match section.len() as u64 == bytes {
            true => Ok(section),
            // The file became shorter after its length was read.
            false => Err(ReadError::Length {
                expected: header.file_bytes(),
                found: section.len() as u64,
            }),
        }
    };
    let body = section(
        header
            .padded_body()
            .expect("decode should have checked the lengths"),
    )?;
    let data = section(header.data)?;
    let signed = match &header.signature {
        &UNSIGNED => Signed::No,
        signature if is_right(&body, signature) => Signed::Yes,
        _ => Signed::Otherwise,
    };
    header
        .finish(&body, data)
        .map(|artifact| (artifact, signed))
}

/// Writes a file. At every moment it is either the old or the whole new file: see [`replace_file`].
pub fn write_file(path: impl AsRef<Path>, artifact: &Artifact) -> io::Result<()> {
    write_signed_file(path, artifact, |_| UNSIGNED)
}

/// Writes a file with the signature that `sign` makes from the bytes of its body.
pub fn write_signed_file(
    path: impl AsRef<Path>,
    artifact: &Artifact,
    sign: impl FnOnce(&[u8]) -> Signature,
) -> io::Result<()> {
    let (header, body) = encode(artifact, sign);
    replace_file(path.as_ref(), &[&header, &body, &artifact.data])
}

/// A checksum of everything in an artifact except the values that states start from. Equal plans
/// have equal ones.
pub fn fingerprint(artifact: &Artifact) -> u32 {
    crc32fast::hash(&body(artifact))
}

fn encoded(value: &impl Serialize) -> Vec<u8> {
    postcard::to_allocvec(value).expect("strings, numbers and lists of known length should encode")
}

fn body(artifact: &Artifact) -> Vec<u8> {
    let n_others = artifact.others.len() as u32;
    let mut body = encoded(&(artifact, n_others));
    for other in &artifact.others {
        body.append(&mut encoded(other));
    }
    body
}

fn encode(artifact: &Artifact, sign: impl FnOnce(&[u8]) -> Signature) -> ([u8; HEADER], Vec<u8>) {
    let mut body = body(artifact);
    let bytes = body.len() as u64;
    body.resize(bytes.next_multiple_of(ALIGN) as usize, 0);
    let header = Header {
        body: bytes,
        data: artifact.data.len() as u64,
        body_crc: crc32fast::hash(&body),
        data_crc: crc32fast::hash(&artifact.data),
        signature: sign(&body),
    };
    (header.encode(), body)
}

fn reserve(bytes: u64) -> Result<Vec<u8>, ReadError> {
    let mut v = Vec::new();
    let fits = usize::try_from(bytes).is_ok_and(|n| v.try_reserve_exact(n).is_ok());
    if fits {
        Ok(v)
    } else {
        Err(ReadError::Memory { bytes })
    }
}

fn u32_at(bytes: &[u8; HEADER], at: usize) -> u32 {
    u32::from_le_bytes(
        *bytes[at..]
            .first_chunk()
            .expect("a header's fields should lie in it"),
    )
}

fn u64_at(bytes: &[u8; HEADER], at: usize) -> u64 {
    u64::from_le_bytes(
        *bytes[at..]
            .first_chunk()
            .expect("a header's fields should lie in it"),
    )
}
