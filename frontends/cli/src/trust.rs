//! Which machine code may run without a question.
//!
//! A `.lit` file may hold machine code, and machine code can do anything that a program can.
//! `compile` signs each such file with a key that only this user can read, so `train` knows the
//! files that were compiled here. Other files with machine code run only with `--trust`.
//! docs/trust.md says which files are safe.
//!
//! The signature is HMAC-SHA256 of the file's body (RFC 2104), cut to its first 20 bytes.

use crate::failure::Failure;
use artifact::{Artifact, Signature, Signed};
use codegen::kernels::private;
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// Bytes of a key.
const KEY_BYTES: usize = 32;
/// Bytes of SHA-256's blocks.
const BLOCK_BYTES: usize = 64;
/// The signed bytes begin with this, so that the key signs nothing else by chance.
const PURPOSE: &[u8] = b"lighterage .lit body\0";

/// A user's key.
struct Key([u8; KEY_BYTES]);

impl Key {
    /// The user's key, made if there is none.
    fn get_or_make() -> io::Result<Key> {
        let path = path()?;
        match Key::read(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Key::make(&path),
            key => key,
        }
    }

    /// Reads a key; a file that others can write or that has another size is not a key.
    fn read(path: &Path) -> io::Result<Key> {
        let mut bytes = vec![];
        private::open(path)?
            .take(KEY_BYTES as u64 + 1)
            .read_to_end(&mut bytes)?;
        let key = bytes.try_into().map_err(|_| {
            io::Error::other(format!(
                "it does not have {KEY_BYTES} bytes; remove it to have a new one made"
            ))
        })?;
        Ok(Key(key))
    }

    /// Makes a key. If another process does this at the same time, the first key is used.
    fn make(path: &Path) -> io::Result<Key> {
        let folder = path.parent().unwrap_or(Path::new("."));
        private::create_folder(folder)?;
        private::check_folder(folder)?;
        let mut key = [0; KEY_BYTES];
        fs::File::open("/dev/urandom")?.read_exact(&mut key)?;
        let part = folder.join(format!("key.{}", std::process::id()));
        let written = private::create(&part).and_then(|mut file| {
            file.write_all(&key)?;
            file.sync_all()?;
            // Unlike a rename, a hard link replaces nothing.
            fs::hard_link(&part, path)
        });
        let _ = fs::remove_file(&part);
        match written {
            Ok(()) => Ok(Key(key)),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Key::read(path),
            Err(e) => Err(e),
        }
    }

    /// HMAC-SHA256 of a message in parts.
    fn hash(&self, message: &[&[u8]]) -> [u8; 32] {
        let pad = |byte: u8| {
            let mut block = [byte; BLOCK_BYTES];
            for (block, key) in block.iter_mut().zip(self.0) {
                *block ^= key;
            }
            Sha256::new_with_prefix(block)
        };
        let mut inner = pad(0x36);
        message.iter().for_each(|part| inner.update(part));
        let mut outer = pad(0x5c);
        outer.update(inner.finalize());
        outer.finalize().into()
    }

    fn sign(&self, body: &[u8]) -> Signature {
        let hash = self.hash(&[PURPOSE, body]);
        *hash
            .first_chunk()
            .expect("a hash should be longer than a signature")
    }
}

/// Where the user's key is.
fn path() -> io::Result<PathBuf> {
    let folder = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    if let Some(given) = folder("LIGHTERAGE_CONFIG") {
        return Ok(given.join("key"));
    }
    // The standard for these folders says that a relative path is ignored.
    let configs = folder("XDG_CONFIG_HOME").filter(|path| path.is_absolute());
    configs
        .or_else(|| folder("HOME").map(|home| home.join(".config")))
        .map(|configs| configs.join("lighterage").join("key"))
        .ok_or_else(|| {
            io::Error::other(
                "neither LIGHTERAGE_CONFIG nor XDG_CONFIG_HOME nor HOME names a folder",
            )
        })
}

/// Writes an artifact, with the user's signature if it has machine code. Returns the reason if a
/// needed signature could not be made.
pub(crate) fn write(path: &Path, artifact: &Artifact) -> Result<Option<String>, Failure> {
    let failed = |e: io::Error| Failure::System(format!("{}: {e}", path.display()));
    if !has_code(artifact) {
        artifact::write_file(path, artifact).map_err(failed)?;
        return Ok(None);
    }
    match Key::get_or_make() {
        Ok(key) => {
            artifact::write_signed_file(path, artifact, |body| key.sign(body)).map_err(failed)?;
            Ok(None)
        }
        Err(e) => {
            artifact::write_file(path, artifact).map_err(failed)?;
            let key = self::path().map_or("the key".into(), |path| path.display().to_string());
            Ok(Some(format!("{key}: {e}")))
        }
    }
}

/// Reads an artifact, and says whether this user signed it.
pub(crate) fn read(path: &Path) -> Result<(Artifact, Signed), Failure> {
    let is_right = |body: &[u8], signature: &Signature| {
        let key = self::path().and_then(|path| Key::read(&path));
        key.is_ok_and(|key| equal(&key.sign(body), signature))
    };
    artifact::read_signed_file(path, is_right).map_err(|e| {
        let (path, message) = (path.display().to_string(), e.to_string());
        Failure::Input(if message.starts_with(&path) {
            message
        } else {
            format!("{path}: {message}")
        })
    })
}

/// Compares two signatures in a time that does not depend on where they differ.
fn equal(a: &Signature, b: &Signature) -> bool {
    a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}

/// True if an artifact has machine code.
pub(crate) fn has_code(artifact: &Artifact) -> bool {
    let own = |artifact: &Artifact| {
        !artifact.objects.is_empty() || artifact.kernels.iter().any(|kernel| kernel.code.is_some())
    };
    own(artifact) || artifact.others.iter().any(own)
}

/// Refuses an artifact with machine code that is neither signed by this user nor trusted.
pub(crate) fn require(
    path: &Path,
    artifact: &Artifact,
    signed: Signed,
    trust: bool,
) -> Result<(), Failure> {
    if trust || signed == Signed::Yes || !has_code(artifact) {
        return Ok(());
    }
    let path = path.display();
    let why = match signed {
        Signed::Otherwise => "its signature is not yours: another user or machine compiled it",
        Signed::No | Signed::Yes => "it has no signature",
    };
    Err(Failure::Input(format!(
        "{path}: it has machine code, and {why}\n  machine code can do whatever a program can: \
         give --trust if you know where the file is from\n  `lighterage inspect {path}` says what \
         is in it; a file that is compiled with --kernels plain needs no trust"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4231, test case 1, whose key of 20 bytes is filled up with zeros.
    #[test]
    fn the_hash_is_hmac() {
        let mut key = [0; KEY_BYTES];
        key[..20].fill(0x0b);
        let hash = Key(key).hash(&[b"Hi ", b"There"]);
        let text: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            text,
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"
        );
    }

    #[test]
    fn signatures_differ_by_key_and_body() {
        let (a, b) = (Key([1; KEY_BYTES]), Key([2; KEY_BYTES]));
        assert!(equal(&a.sign(b"body"), &a.sign(b"body")));
        assert!(!equal(&a.sign(b"body"), &b.sign(b"body")));
        assert!(!equal(&a.sign(b"body"), &a.sign(b"bodY")));
    }
}
