//! A part of a source as a stream.

use crate::Source;
use std::io::{self, Read};

/// Bytes that are read at a time.
const PIECE: u64 = 1 << 16;

/// The bytes from a position to another one.
pub(crate) struct Section<'a> {
    source: &'a dyn Source,
    from: u64,
    end: u64,
    piece: Vec<u8>,
    /// The bytes of the piece that were taken.
    taken: usize,
}

impl<'a> Section<'a> {
    pub(crate) fn new(source: &'a dyn Source, from: u64, end: u64) -> Section<'a> {
        Section {
            source,
            from,
            end,
            piece: vec![],
            taken: 0,
        }
    }
}

impl Read for Section<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if self.taken == self.piece.len() {
            let length = PIECE.min(self.end.saturating_sub(self.from));
            self.piece = self.source.read(self.from, length as usize)?;
            self.from += length;
            self.taken = 0;
        }
        let rest = &self.piece[self.taken..];
        let n = rest.len().min(to.len());
        to[..n].copy_from_slice(&rest[..n]);
        self.taken += n;
        Ok(n)
    }
}
