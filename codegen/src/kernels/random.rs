//! Random words, as `runtime::kernels::random` makes them: Philox 4 × 32 with ten rounds. Word
//! `i % 4` of block `i / 4` belongs to the element with the number `i`.

use super::emit::{Emitter, Threads};
use crate::mlir::{Convert, Kind, Predicate, Type, Value};

/// The factors of a round.
const FACTORS: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// The numbers that are added to the key in each round.
const ADDED: [u64; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;
/// The bits of a word.
const WORD: u64 = 0xFFFF_FFFF;

/// The blocks of four words of a vector of elements, and their layout in registers.
struct Shape {
    /// Elements.
    width: u64,
    /// Blocks that are computed.
    n: u64,
    /// True if each block's four words belong to four consecutive elements. Otherwise a block is
    /// computed for each element, which uses one word of it.
    whole: bool,
}

impl Shape {
    /// A vector of 64-bit numbers, one for each block; a vector even if there is only one.
    fn wide(&self) -> Type {
        Type::Vector(self.n as u32, Kind::I64)
    }

    /// The place of a block in the vector. Blocks are in groups of four, in an order that cheap
    /// instructions correct at the end.
    fn place(&self, i: u64) -> u64 {
        if self.whole && self.n.is_multiple_of(4) {
            i / 4 * 4 + [0, 2, 1, 3][i as usize % 4]
        } else {
            i
        }
    }
}

impl<M: Threads> Emitter<'_, M> {
    /// Random words for the elements `at..at + width` of the row.
    pub(super) fn random(
        &mut self,
        [seed, step]: [Value; 2],
        stream: u32,
        at: Value,
        width: u64,
    ) -> Value {
        let space = self.plan.space;
        // Rows that do not begin with a block would need parts of blocks.
        let whole =
            width.is_multiple_of(4) && (space.rows() == 1 || space.columns().is_multiple_of(4));
        let shape = Shape {
            width,
            n: if whole { width / 4 } else { width },
            whole,
        };
        let element = self.numbers(&shape, at);
        let words = self.philox(&shape, [seed, step], stream, element);
        if whole {
            self.interleaved(&shape, words)
        } else {
            self.chosen(&shape, words, element)
        }
    }

    /// The number of each block's first element, or of each element.
    fn numbers(&mut self, shape: &Shape, at: Value) -> Value {
        let space = self.plan.space;
        let (row, depth) = (self.row, self.row_depth);
        let columns = self.index(space.columns());
        let base = if space.rows() == 1 {
            self.index(0)
        } else {
            self.b.outside(depth, |b| b.muli(row, columns))
        };
        let first = self.b.addi(base, at);
        let each = if shape.whole { 4 } else { 1 };
        let numbers: Vec<u64> = (0..shape.n).map(|i| shape.place(i) * each).collect();
        let lanes = self.b.outside(0, |b| b.longs(numbers));
        let first = self.b.broadcast(first, shape.wide());
        self.b.addi(first, lanes)
    }

    /// The same number for each block.
    fn each(&mut self, shape: &Shape, i: u64) -> Value {
        let wide = shape.wide();
        self.b.outside(0, |b| b.constant(i, wide))
    }

    /// The four words of each block.
    ///
    /// Each word is stored in twice its bits, so that products have room. The upper bits are
    /// arbitrary. The processor's products of words do not read them, so the masks before the
    /// products cost nothing.
    fn philox(
        &mut self,
        shape: &Shape,
        [seed, step]: [Value; 2],
        stream: u32,
        element: Value,
    ) -> [Value; 4] {
        let wide = shape.wide();
        let [two, half, mask] = [2, 32, WORD].map(|i| self.each(shape, i));
        let block = self.b.shrui(element, two);
        let high = self.b.shrui(block, half);
        // Seed and step are scalars.
        let (shift, all) = (self.index(32), self.index(WORD));
        let (mut key, step) = self.b.outside(0, |b| {
            let key = [b.andi(seed, all), b.shrui(seed, shift)];
            let step = b.andi(step, all);
            (key, b.broadcast(step, wide))
        });
        let stream = self.each(shape, stream.into());
        let mut counter = [block, high, stream, step];
        let factors = FACTORS.map(|factor| self.each(shape, factor));
        for round in 0..ROUNDS {
            if round != 0 {
                for (key, added) in key.iter_mut().zip(ADDED) {
                    let added = self.index(added);
                    *key = self.b.outside(0, |b| {
                        let sum = b.addi(*key, added);
                        b.andi(sum, all)
                    });
                }
            }
            let keys = key.map(|key| self.b.outside(0, |b| b.broadcast(key, wide)));
            let products = [(0, factors[0]), (2, factors[1])].map(|(i, factor)| {
                let word = self.b.andi(counter[i], mask);
                let product = self.b.muli(word, factor);
                (product, self.b.shrui(product, half))
            });
            let mut mixed = |high: Value, word: Value, key: Value| {
                let x = self.b.xori(high, word);
                self.b.xori(x, key)
            };
            let first = mixed(products[1].1, counter[1], keys[0]);
            let third = mixed(products[0].1, counter[3], keys[1]);
            counter = [first, products[1].0, third, products[0].0];
        }
        counter
    }

    /// Puts the words of a block in order: 0 1 and 2 3 are joined to one number each, then the two
    /// are placed next to each other.
    fn interleaved(&mut self, shape: &Shape, words: [Value; 4]) -> Value {
        let n = shape.n;
        let halves = Type::Vector(2 * n as u32, Kind::I32);
        let words = words.map(|words| self.b.vector_bitcast(words, halves));
        let lower: Vec<u64> = (0..n).flat_map(|i| [2 * i, 2 * (n + i)]).collect();
        let [a, b] = [0, 2].map(|i| {
            let pair = self.b.shuffle(words[i], words[i + 1], lower.clone());
            self.b.vector_bitcast(pair, shape.wide())
        });
        let order = (0..n).flat_map(|i| [shape.place(i), n + shape.place(i)]);
        let blocks = self.b.shuffle(a, b, order.collect());
        let ty = Type::Vector(shape.width as u32, Kind::I32);
        self.b.vector_bitcast(blocks, ty)
    }

    /// Each element's word of its block.
    fn chosen(&mut self, shape: &Shape, words: [Value; 4], element: Value) -> Value {
        let words = words.map(|words| self.b.convert(Convert::Trunci, words, Kind::I32));
        let three = self.each(shape, 3);
        let which = self.b.andi(element, three);
        let mut chosen = words[3];
        for (i, &words) in words.iter().enumerate().take(3) {
            let number = self.each(shape, i as u64);
            let this = self.b.compare(Predicate::Eq, which, number);
            chosen = self.b.select(this, words, chosen);
        }
        if shape.width == 1 {
            self.b.extract(chosen, 0)
        } else {
            chosen
        }
    }
}
