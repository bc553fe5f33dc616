//! Where the tokens of a file lie.

use super::files::Input;
use crate::failure::Failure;
use std::path::Path;

/// An integer in a file, in little-endian order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Integer {
    pub(super) bytes: usize,
    signed: bool,
}

impl Integer {
    pub(super) const fn new(bytes: usize, signed: bool) -> Integer {
        Integer { bytes, signed }
    }

    /// The value of a token; `None` if it is too large for any input.
    pub(super) fn value(self, bytes: &[u8]) -> Option<i64> {
        let mut wide = [0; 8];
        wide[..self.bytes].copy_from_slice(bytes);
        let unsigned = u64::from_le_bytes(wide);
        if self.signed {
            let unused = u64::BITS - 8 * self.bytes as u32;
            return Some((unsigned << unused) as i64 >> unused);
        }
        i64::try_from(unsigned).ok()
    }
}

/// Where the tokens lie in a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Span {
    /// The first token's byte.
    pub(super) start: u64,
    /// The number of tokens.
    pub(super) count: u64,
    pub(super) integer: Integer,
}

impl Span {
    /// One past the last byte.
    pub(super) fn end(&self) -> Option<u64> {
        let bytes = self.count.checked_mul(self.integer.bytes as u64)?;
        self.start.checked_add(bytes)
    }
}

/// The tokens of a file.
pub(super) struct Part {
    pub(super) input: Input,
    pub(super) span: Span,
    /// The numbers of tokens at the ends of its documents, as far as the file says them.
    pub(super) documents: Vec<u64>,
    /// The number of tokens of all files up to its end.
    pub(super) end: u64,
}

impl Part {
    /// The tokens of a file alone.
    pub(super) fn of(input: Input, span: Span, documents: Vec<u64>) -> Part {
        Part {
            input,
            span,
            documents,
            end: span.count,
        }
    }
}

/// The error of a file without tokens.
pub(super) fn none(path: &Path) -> Failure {
    Failure::Input(format!("{}: no tokens", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_keep_their_values() {
        let of = |bytes: &[u8], signed| Integer::new(bytes.len(), signed).value(bytes);
        assert_eq!(of(&[0xFE, 0xFF], false), Some(0xFFFE));
        assert_eq!(of(&[0xFE, 0xFF], true), Some(-2));
        assert_eq!(of(&[0xFF; 8], true), Some(-1));
        assert_eq!(of(&[0xFF; 8], false), None);
        assert_eq!(of(&[7], true), Some(7));
    }
}
