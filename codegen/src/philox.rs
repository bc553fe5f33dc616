//! Random words of a GPU's kernels: those of the plain kernels, Philox 4 × 32 with ten rounds
//! (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

use crate::mlir::{Arith, Builder, Convert, Kind, Predicate, Type, Value};

/// The factors of a round.
const FACTORS: [i64; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// The numbers that are added to the key in each round.
const ADDED: [i64; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// The words of one op in one step, of 32 bits as its parts are.
pub(crate) struct Words {
    key: [Value; 2],
    stream: Value,
    step: Value,
}

impl Words {
    /// The seed and the step have 64 bits, the stream 32.
    pub(crate) fn new(b: &mut Builder, seed: Value, step: Value, stream: Value) -> Words {
        let [step, _] = halves(b, step);
        Words {
            key: halves(b, seed),
            stream,
            step,
        }
    }

    /// Block `i` of four words; `i` has 64 bits.
    pub(crate) fn block(&self, b: &mut Builder, i: Value) -> [Value; 4] {
        let mut key = self.key;
        let [low, high] = halves(b, i);
        let mut counter = [low, high, self.stream, self.step];
        for round in 0..ROUNDS {
            if round != 0 {
                for (key, added) in key.iter_mut().zip(ADDED) {
                    let added = b.int(added);
                    *key = b.addi(*key, added);
                }
            }
            let [first, second] = FACTORS.map(|factor| b.int(factor));
            let [low0, high0] = product(b, counter[0], first);
            let [low1, high1] = product(b, counter[2], second);
            let mut mixed = |high: Value, word: Value, key: Value| {
                let x = b.xori(high, word);
                b.xori(x, key)
            };
            let one = mixed(high1, counter[1], key[0]);
            let three = mixed(high0, counter[3], key[1]);
            counter = [one, low1, three, low0];
        }
        counter
    }
}

/// A product of two words: its lower and its higher word.
fn product(b: &mut Builder, x: Value, y: Value) -> [Value; 2] {
    let [x, y] = [x, y].map(|x| b.wide(x));
    let all = b.muli(x, y);
    halves(b, all)
}

/// A 64-bit number's words, the lower one first.
fn halves(b: &mut Builder, x: Value) -> [Value; 2] {
    let places = b.long(32);
    let high = b.shrui(x, places);
    [x, high].map(|x| b.convert(Convert::Trunci, x, Kind::I32))
}

/// What drops elements, from the numbers that `dropout_key` writes.
pub(crate) struct Drops {
    pub(crate) words: Words,
    /// A word below it drops its element.
    threshold: Value,
    /// The factor of the elements that are kept, f64.
    pub(crate) scale: Value,
}

impl Drops {
    /// The numbers have 64 bits.
    pub(crate) fn new(b: &mut Builder, [seed, step, stream, p]: [Value; 4]) -> Drops {
        let [stream, _] = halves(b, stream);
        let words = Words::new(b, seed, step, stream);
        let p = b.bitcast(p, Type::Scalar(Kind::F64));
        let [zero, one, all] = [0.0f64, 1.0, 4_294_967_296.0]
            .map(|x| b.constant(x.to_bits(), Type::Scalar(Kind::F64)));
        let threshold = b.mulf(p, all);
        let threshold = b.convert(Convert::Fptosi, threshold, Kind::I64);
        // If all elements are dropped, one whose word is the largest has the factor 0, too.
        let most = b.long(u32::MAX.into());
        let threshold = b.minui(threshold, most);
        let rest = b.subf(one, p);
        let scale = b.divf(one, rest);
        let drops_all = b.compare(Predicate::Oeq, p, one);
        Drops {
            words,
            threshold: b.convert(Convert::Trunci, threshold, Kind::I32),
            scale: b.select(drops_all, zero, scale),
        }
    }

    /// Whether the element of a word is kept.
    pub(crate) fn keeps(&self, b: &mut Builder, word: Value) -> Value {
        b.compare(Predicate::Ule, self.threshold, word)
    }

    /// Whether element `i` is kept; `i` has 64 bits.
    pub(crate) fn keeps_element(&self, b: &mut Builder, i: Value) -> Value {
        let [places, last] = [2, 3].map(|x| b.long(x));
        let block = b.shrui(i, places);
        let words = self.words.block(b, block);
        let place = b.arith(Arith::Andi, &[i, last]);
        let mut word = words[3];
        for (n, &other) in words.iter().enumerate().take(3) {
            let n = b.long(n as u64);
            let is_this = b.compare(Predicate::Eq, place, n);
            word = b.select(is_this, other, word);
        }
        self.keeps(b, word)
    }
}
