//! Documents in a stream of tokens, packed into rows of the model's length: first-fit decreasing.
//!
//! A document ends with a given token, which belongs to it, or where its file says that it ends. A
//! document that is longer than a row is cut into pieces. In a row, positions begin with 0 in each
//! piece, no piece sees another one, and no label is a token of another piece. The end of a row is
//! padding, a piece of its own without labels.

use super::tokens::{Labels, Role, Tokens, write_row};
use super::{Batch, Source};
use crate::failure::Failure;
use papers::packing::{first_fit_decreasing, padded};
use std::borrow::Cow;

/// Tokens that are read at a time to find the ends of documents.
const READ: u64 = 1 << 16;
/// The label that does not count, PyTorch's default.
pub(crate) const IGNORED: i64 = -100;

/// A document, or a part of one that is too long for a row.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) start: u64,
    pub(super) length: u64,
    /// False if the document goes on after it.
    pub(super) ends: bool,
}

/// Rows of documents.
pub(crate) struct Packed {
    tokens: Tokens,
    /// The token that ends documents, and fills rows.
    end: i64,
    documents: u64,
    pieces: Vec<Piece>,
    /// The pieces of each row.
    bins: Vec<Vec<usize>>,
}

impl Packed {
    /// Reads all tokens once to find documents, and packs them. An error if they fill no batch.
    pub(crate) fn of(tokens: Tokens, end: i64) -> Result<Packed, Failure> {
        let (pieces, documents) = pieces(&tokens, end)?;
        let lengths: Vec<u64> = pieces.iter().map(|piece| piece.length).collect();
        let bins = first_fit_decreasing(&lengths, tokens.length)
            .expect("a piece should be no longer than a row");
        if (bins.len() as u64) < tokens.rows {
            return Err(Failure::Input(format!(
                "--pack: {} are {documents} documents, which fill {} rows of {}, and a batch has \
                 {} rows",
                tokens.amount(),
                bins.len(),
                tokens.length,
                tokens.rows
            )));
        }
        Ok(Packed {
            tokens,
            end,
            documents,
            pieces,
            bins,
        })
    }

    /// What was found, for the user.
    pub(crate) fn note(&self) -> String {
        let (rows, length) = (self.bins.len() as u64, self.tokens.length);
        let total = self.tokens.total();
        let share = |all: u64| 100.0 * (all - total) as f64 / all as f64;
        let lengths: Vec<u64> = self.pieces.iter().map(|piece| piece.length).collect();
        let cut = match self.pieces.len() as u64 - self.documents {
            0 => String::new(),
            n => format!(" ({n} cuts of those that are longer)"),
        };
        format!(
            "note: {}: {} documents{cut} in {rows} rows of {length}, {:.1} % padding (one in a \
             row, padded to the longest: {:.1} %); {} batches of {}; {}",
            self.tokens.amount(),
            self.documents,
            share(rows * length),
            share(padded(&lengths)),
            rows / self.tokens.rows,
            self.tokens.rows,
            self.tokens.inputs()
        )
    }

    /// A row as it was packed.
    fn row(&self, bin: &[usize]) -> Result<Row, Failure> {
        let mut row = Row::default();
        for &i in bin {
            let piece = self.pieces[i];
            let more = u64::from(!piece.ends);
            let tokens = self.tokens.read(piece.start, piece.length + more)?;
            row.add(&tokens, piece.length as usize);
        }
        let rest = self.tokens.length as usize - row.ids.len();
        row.fill(self.end, rest);
        Ok(row)
    }
}

impl Source for Packed {
    fn units(&self) -> u64 {
        self.bins.len() as u64
    }

    fn units_per_batch(&self) -> u64 {
        self.tokens.rows
    }

    fn with_rows(&self) -> Vec<bool> {
        vec![true; self.tokens.slots.len()]
    }

    fn batch(&self, units: &[u64]) -> Result<Batch, Failure> {
        let mut inputs = vec![vec![]; self.tokens.slots.len()];
        for &unit in units {
            let row = self.row(&self.bins[unit as usize])?;
            for (slot, bytes) in self.tokens.slots.iter().zip(&mut inputs) {
                write_row(&row.values(slot.role), slot, bytes)?;
            }
        }
        Ok(self.tokens.values(inputs))
    }
}

/// The values of a row, for each kind of input.
#[derive(Default)]
pub(super) struct Row {
    ids: Vec<i64>,
    /// Labels for a model that shifts them: the first token of a piece has none.
    same: Vec<i64>,
    next: Vec<i64>,
    positions: Vec<i64>,
    segments: Vec<i64>,
    pieces: i64,
}

impl Row {
    /// Adds a piece of this length; one more token follows if the document goes on.
    pub(super) fn add(&mut self, tokens: &[i64], length: usize) {
        let piece = &tokens[..length];
        self.ids.extend(piece);
        self.same.push(IGNORED);
        self.same.extend(&piece[1..]);
        self.next.extend(&tokens[1..]);
        if tokens.len() == length {
            self.next.push(IGNORED);
        }
        self.place(length);
    }

    /// Adds padding.
    pub(super) fn fill(&mut self, token: i64, length: usize) {
        let all = self.ids.len() + length;
        self.ids.resize(all, token);
        self.same.resize(all, IGNORED);
        self.next.resize(all, IGNORED);
        self.place(length);
    }

    /// What an input gets of it.
    pub(super) fn values(&self, role: Role) -> Cow<'_, [i64]> {
        Cow::Borrowed(match role {
            Role::Ids => &self.ids,
            Role::Labels(Labels::Same) => &self.same,
            Role::Labels(Labels::Next) => &self.next,
            Role::Positions => &self.positions,
            Role::Segments => &self.segments,
            Role::Mask => return Cow::Owned(self.mask()),
            // The documents are the first piece.
            Role::Attended => {
                let is_first = self.segments.iter().map(|&piece| i64::from(piece == 0));
                return Cow::Owned(is_first.collect());
            }
        })
    }

    fn place(&mut self, length: usize) {
        self.positions.extend(0..length as i64);
        let all = self.segments.len() + length;
        self.segments.resize(all, self.pieces);
        self.pieces += 1;
    }

    /// For each token and each other one, 1 if it sees it: those of its piece up to itself.
    fn mask(&self) -> Vec<i64> {
        let n = self.segments.len();
        let sees = |i: usize, j: usize| j <= i && self.segments[i] == self.segments[j];
        let pairs = (0..n).flat_map(|i| (0..n).map(move |j| (i, j)));
        pairs.map(|(i, j)| i64::from(sees(i, j))).collect()
    }
}

/// The documents of a stream, cut into pieces that fit into rows; and the number of documents.
pub(super) fn pieces(tokens: &Tokens, end: i64) -> Result<(Vec<Piece>, u64), Failure> {
    let (mut pieces, mut documents) = (vec![], 0);
    let mut start = 0;
    let mut add = |start: u64, stop: u64| {
        documents += u64::from(stop > start);
        let mut at = start;
        while at < stop {
            let length = tokens.length.min(stop - at);
            pieces.push(Piece {
                start: at,
                length,
                ends: at + length == stop,
            });
            at += length;
        }
    };
    let total = tokens.total();
    let mut ends = tokens.documents().peekable();
    let mut from = 0;
    while from < total {
        let count = READ.min(total - from);
        for (at, token) in (from..).zip(tokens.read(from, count)?) {
            let mut ends_here = token == end;
            while ends.next_if_eq(&(at + 1)).is_some() {
                ends_here = true;
            }
            if ends_here {
                add(start, at + 1);
                start = at + 1;
            }
        }
        from += count;
    }
    // The last document may lack its end.
    add(start, total);
    Ok((pieces, documents))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_piece_of_a_row_sees_another_one() {
        let mut row = Row::default();
        row.add(&[5, 6, 7], 3);
        // A document that goes on.
        row.add(&[8, 9, 1], 2);
        row.fill(0, 2);
        assert_eq!(row.ids, [5, 6, 7, 8, 9, 0, 0]);
        assert_eq!(row.same, [-100, 6, 7, -100, 9, -100, -100]);
        assert_eq!(row.next, [6, 7, -100, 9, 1, -100, -100]);
        assert_eq!(row.positions, [0, 1, 2, 0, 1, 0, 1]);
        assert_eq!(row.segments, [0, 0, 0, 1, 1, 2, 2]);
        let seen: Vec<i64> = row.mask().chunks(7).map(|row| row.iter().sum()).collect();
        assert_eq!(seen, [1, 2, 3, 1, 2, 1, 2]);
    }
}
