//! Weights that are dropped: for each thread's scores, one block of random words for four of them.
//!
//! A block's four words are those of four neighbouring keys of a query. A thread has scores of two
//! queries and of two neighbours among eight keys (or the reverse), so four threads need parts of
//! four blocks. Each computes one of them, and they exchange words.

use super::Tensor;
use super::emit::{Emitter, Quad, Start};
use crate::mlir::{Arith, Convert, Kind, Type, Value};
use crate::philox;

/// What drops weights.
pub(super) struct Drops {
    drops: philox::Drops,
    /// The factor of the weights that are kept, f32.
    pub(super) scale: Value,
    /// Blocks of a query, 64 bits.
    blocks: Value,
    all: Value,
    clamp: Value,
}

/// For each of a thread's scores whether its weight is kept, as the bits of a word.
pub(super) struct Kept {
    bits: Value,
}

impl Drops {
    pub(super) fn new(e: &mut Emitter) -> Drops {
        let key = e.tensor(Tensor::Key);
        let numbers = [0u32, 8, 16, 24].map(|bytes| {
            let at = e.advance(key, bytes);
            e.b.load(at, Type::Scalar(Kind::I64), 8)
        });
        let drops = philox::Drops::new(&mut e.b, numbers);
        let blocks = e.with(Arith::Shrui, e.n_keys, 2);
        Drops {
            scale: e.b.convert(Convert::Truncf, drops.scale, Kind::F32),
            drops,
            blocks: e.b.wide(blocks),
            all: e.b.int(-1),
            clamp: e.b.int(31),
        }
    }

    /// The first block of a query of a head, 64 bits.
    fn of_query(&self, e: &mut Emitter, head: Value, query: Value) -> Value {
        let [head, n, query] = [head, e.n_queries, query].map(|x| e.b.wide(x));
        let first = e.b.muli(head, n);
        let row = e.b.addi(first, query);
        e.b.muli(row, self.blocks)
    }

    /// Of two words, the lane keeps the first one if its bit is 0, otherwise the second one. It
    /// gives the other one to the lane whose number differs in the bit, which does the same. Then
    /// both have the words of one place, in the order of the lanes.
    fn exchanged(
        &self,
        e: &mut Emitter,
        [first, second]: [Value; 2],
        is_second: Value,
        distance: i64,
    ) -> [Value; 2] {
        let given = e.b.select(is_second, first, second);
        let kept = e.b.select(is_second, second, first);
        let distance = e.b.int(distance);
        let got = e.b.butterfly(self.all, given, distance, self.clamp);
        [
            e.b.select(is_second, got, kept),
            e.b.select(is_second, kept, got),
        ]
    }

    fn is_set(e: &mut Emitter, x: Value, bit: i64) -> Value {
        let x = e.with(Arith::Shrui, x, bit);
        e.b.convert(Convert::Trunci, x, Kind::I1)
    }

    /// Sets the bits of the words that keep their weights.
    fn gathered(&self, e: &mut Emitter, words: impl IntoIterator<Item = Value>) -> Kept {
        let (mut bits, zero) = (e.b.int(0), e.b.int(0));
        for (i, word) in words.into_iter().enumerate() {
            let keeps = self.drops.keeps(&mut e.b, word);
            let bit = e.b.int(1 << i);
            let bit = e.b.select(keeps, bit, zero);
            bits = e.b.ori(bits, bit);
        }
        Kept { bits }
    }

    /// The first block of the query that a lane computes words for: of its first row of a tile of
    /// queries, or, if the lane is odd, of its second row. And whether it is odd.
    pub(super) fn rows(&self, e: &mut Emitter, s: &Start, head: Value, first: Value) -> Rows {
        let row = e.own_row(s, first);
        let second = e.with(Arith::Addi, row, 8);
        let is_odd = Self::is_set(e, s.place, 0);
        let row = e.b.select(is_odd, second, row);
        let half = e.with(Arith::Shrui, s.place, 1);
        let half = e.b.wide(half);
        let block = self.of_query(e, head, row);
        Rows {
            block: e.b.addi(block, half),
            is_odd,
        }
    }

    /// The weights of `n` times eight keys from `first` on that are kept. Rows are queries.
    pub(super) fn of_keys(&self, e: &mut Emitter, rows: &Rows, first: Value, n: usize) -> Kept {
        let first = e.with(Arith::Shrui, first, 2);
        let first = e.b.wide(first);
        let block = e.b.addi(rows.block, first);
        let mut all = vec![];
        for column in 0..n {
            let past = e.b.long(2 * column as u64);
            let block = e.b.addi(block, past);
            let [a, b, c, d] = self.drops.words.block(&mut e.b, block);
            // Even lanes have the first two keys of four, odd ones the others; what a lane keeps is
            // of its row, what it gets is of the other one.
            let [one, other] = [[a, c], [b, d]].map(|pair| self.exchanged(e, pair, rows.is_odd, 1));
            all.extend([one[0], other[0], one[1], other[1]]);
        }
        self.gathered(e, all)
    }

    /// What a lane needs where rows are keys and columns are queries.
    pub(super) fn columns(&self, e: &mut Emitter, s: &Start, first: Value) -> Columns {
        let key = e.own_row(s, first);
        let bits = [0, 1].map(|bit| Self::is_set(e, s.group, bit));
        let block = e.with(Arith::Shrui, key, 2);
        let block = e.b.wide(block);
        let [nothing, second] = [0, 2].map(|x| e.b.long(x));
        let lower = e.b.select(bits[1], second, nothing);
        let low = e.with(Arith::Andi, s.group, 1);
        let pair = e.with(Arith::Shli, s.place, 1);
        Columns {
            block: e.b.addi(block, lower),
            query: e.b.addi(pair, low),
            bits,
        }
    }

    /// The weights of `n` times eight queries of a head, from `first` on, that are kept. Rows are
    /// keys.
    pub(super) fn of_queries(
        &self,
        e: &mut Emitter,
        columns: &Columns,
        (head, first): (Value, Value),
        n: usize,
    ) -> Kept {
        let query = e.b.addi(first, columns.query);
        let block = self.of_query(e, head, query);
        let mut block = e.b.addi(block, columns.block);
        let eight = e.b.long(8);
        let next = e.b.muli(self.blocks, eight);
        let mut all = vec![];
        for _ in 0..n {
            let [a, b, c, d] = self.drops.words.block(&mut e.b, block);
            // Four lanes have words of four blocks, for four keys each; then each has those of its
            // key, of four blocks.
            let [low, high] = columns.bits;
            let [a, b] = self.exchanged(e, [a, b], low, 4);
            let [c, d] = self.exchanged(e, [c, d], low, 4);
            let [a, c] = self.exchanged(e, [a, c], high, 8);
            let [b, d] = self.exchanged(e, [b, d], high, 8);
            all.extend([a, b, c, d]);
            block = e.b.addi(block, next);
        }
        self.gathered(e, all)
    }
}

/// See [`Drops::rows`].
pub(super) struct Rows {
    block: Value,
    is_odd: Value,
}

/// See [`Drops::columns`].
pub(super) struct Columns {
    /// The block of the lane's keys in a query, 64 bits, and its query among eight.
    block: Value,
    query: Value,
    /// The two lowest bits of its key.
    bits: [Value; 2],
}

impl Kept {
    /// The numbers of the weights that are kept, and 0 for the others.
    pub(super) fn only(&self, e: &mut Emitter, numbers: &[Quad]) -> Vec<Quad> {
        let zero = e.b.float(0.0);
        let mut kept = vec![];
        for (column, quad) in numbers.iter().enumerate() {
            kept.push(std::array::from_fn(|i| {
                let bit = Drops::is_set(e, self.bits, (4 * column + i) as i64);
                e.b.select(bit, quad[i], zero)
            }));
        }
        kept
    }
}
