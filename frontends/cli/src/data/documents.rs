//! Documents in a stream of tokens, one in each row, in batches of rows of one length.
//!
//! A document ends with a given token, which belongs to it, or where its file says so. Its row has
//! the smallest length that holds it; the rest of the row is padding without labels. A batch has
//! documents of one length of rows. Those that are left of a length go to the next one.

use super::packed::{Piece, Row, pieces};
use super::tokens::{Tokens, write_row};
use super::{Batch, Source, Value};
use crate::failure::Failure;

/// Batches of documents.
pub(crate) struct Documents {
    tokens: Tokens,
    /// The token that ends documents, and fills rows.
    end: i64,
    batches: Vec<Rows>,
    documents: u64,
    /// Documents that fill no batch.
    n_left: usize,
    n_cut: usize,
}

/// The documents of a batch, and the length of its rows.
struct Rows {
    length: u64,
    pieces: Vec<Piece>,
}

impl Documents {
    /// Reads all tokens once to find documents. `lengths` are those of rows, ascending; the last
    /// one is that of `tokens`. An error if no batch is filled.
    pub(crate) fn of(tokens: Tokens, end: i64, lengths: &[u64]) -> Result<Documents, Failure> {
        let (pieces, documents) = pieces(&tokens, end)?;
        let n_cut = pieces.len() - documents as usize;
        let rows = tokens.rows as usize;
        let mut batches = vec![];
        let mut left: Vec<Piece> = vec![];
        let mut from = 0;
        for &length in lengths {
            let here = |piece: &&Piece| (from + 1..=length).contains(&piece.length);
            left.extend(pieces.iter().filter(here));
            let whole = left.len() / rows * rows;
            let rest = left.split_off(whole);
            batches.extend(left.chunks(rows).map(|pieces| Rows {
                length,
                pieces: pieces.to_vec(),
            }));
            (left, from) = (rest, length);
        }
        if batches.is_empty() {
            return Err(Failure::Input(format!(
                "--documents: {} are {documents} documents, and a batch has {rows}",
                tokens.amount()
            )));
        }
        Ok(Documents {
            tokens,
            end,
            batches,
            documents,
            n_left: left.len(),
            n_cut,
        })
    }

    /// What was found, for the user.
    pub(crate) fn note(&self) -> String {
        let rows = self.tokens.rows;
        let pieces = self.batches.iter().flat_map(|batch| &batch.pieces);
        let total: u64 = pieces.clone().map(|piece| piece.length).sum();
        let longest = pieces.map(|piece| piece.length).max().unwrap_or(0);
        let padding = |all: u64| 100.0 * (all - total) as f64 / all.max(1) as f64;
        let all = self.batches.iter().map(|batch| batch.length * rows).sum();
        let n_batches = self.batches.len() as u64;
        let cut = match self.n_cut {
            0 => String::new(),
            n => format!(" ({n} cuts of those that are longer)"),
        };
        let left = match self.n_left {
            0 => String::new(),
            n => format!(", {n} left out"),
        };
        format!(
            "note: {}: {} documents{cut} in {n_batches} batches of {rows}{left}, {:.1} % padding \
             (padded to the longest: {:.1} %); {}",
            self.tokens.amount(),
            self.documents,
            padding(all),
            padding(longest * rows * n_batches),
            self.tokens.inputs()
        )
    }
}

impl Source for Documents {
    fn units(&self) -> u64 {
        self.batches.len() as u64
    }

    fn units_per_batch(&self) -> u64 {
        1
    }

    fn with_rows(&self) -> Vec<bool> {
        vec![true; self.tokens.slots.len()]
    }

    fn batch(&self, units: &[u64]) -> Result<Batch, Failure> {
        let unit = units.first().copied().unwrap_or(0);
        let Rows { length, pieces } = &self.batches[unit as usize];
        let mut inputs = vec![vec![]; self.tokens.slots.len()];
        for piece in pieces {
            let mut row = Row::default();
            let more = u64::from(!piece.ends);
            let tokens = self.tokens.read(piece.start, piece.length + more)?;
            row.add(&tokens, piece.length as usize);
            row.fill(self.end, (length - piece.length) as usize);
            for (slot, bytes) in self.tokens.slots.iter().zip(&mut inputs) {
                write_row(&row.values(slot.role), slot, bytes)?;
            }
        }
        let mut batch = self.tokens.values(inputs);
        for Value { shape, .. } in &mut batch {
            // A mask has the length twice.
            for size in shape.iter_mut().skip(1) {
                if *size == self.tokens.length {
                    *size = *length;
                }
            }
        }
        Ok(batch)
    }
}
