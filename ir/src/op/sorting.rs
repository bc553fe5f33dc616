//! The sort by which a GPU brings together what has the same destination, such as the gradients of
//! the same row of a table, and finds the first elements of lines: its passes, and the scratch that
//! it takes.
//!
//! A radix sort of items by keys, the lowest digits first (Knuth, The Art of Computer Programming,
//! section 5.2.5). It is stable: items with the same key keep their order, so sums over them do not
//! depend on the GPU.

use crate::types::{DType, TensorType};

/// The number of items that a block counts and moves.
pub const TILE: u64 = 1024;

/// A sort of items `0..items` by keys in `0..=keys`. If keys are destinations, the last one stands
/// for none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sorting {
    /// The number of items.
    pub items: u64,
    /// The number of destinations, or the largest key.
    pub keys: u64,
    /// The number of lines of items, which have the same lengths. Each is sorted by itself.
    pub lines: u64,
}

/// Bits of a number.
fn bits(number: u64) -> u32 {
    u64::BITS - number.leading_zeros()
}

impl Sorting {
    /// The sort of the lines of a tensor along a dimension by all bits of their elements, if a GPU
    /// finds the first `k` by it. Otherwise a thread for each line inserts its elements into the
    /// first ones, which takes no scratch.
    pub fn of_lines(x: &TensorType, dim: usize, k: u64) -> Option<Sorting> {
        /// So few are never sorted: most elements are not among them.
        const FEWEST: u64 = 64;
        /// Insertion moves elements in main memory, a sort counts digits in shared memory.
        const SLOWER: u64 = 4;
        let n = x.shape()[dim];
        if k <= FEWEST || n < k {
            return None;
        }
        let items = x.numel();
        let sorting = Sorting {
            items,
            keys: u64::MAX >> (64 - 8 * x.dtype().bytes()),
            lines: items / n,
        };
        // What a thread does one after the other: it inserts elements, or counts the digits of a
        // tile and moves its items, and adds up the counts of all tiles.
        let of_insertion = (SLOWER * n).saturating_mul(k / 2);
        let of_sort = 2 * u64::from(sorting.passes()) * (TILE + sorting.tiles());
        (of_sort < of_insertion).then_some(sorting)
    }

    /// The number of passes, each of which sorts by a digit: those of keys, then those of lines.
    pub fn passes(&self) -> u32 {
        self.key_passes() + bits(self.lines.saturating_sub(1)).div_ceil(self.digit_bits())
    }

    /// The number of passes over the digits of keys.
    pub fn key_passes(&self) -> u32 {
        /// A block has a thread for each digit: 512.
        const MOST_BITS: u32 = 9;
        self.key_bits().div_ceil(MOST_BITS)
    }

    fn key_bits(&self) -> u32 {
        bits(self.keys.max(1))
    }

    /// Items of a line.
    pub fn length(&self) -> u64 {
        self.items / self.lines.max(1)
    }

    /// Bits of a digit.
    pub fn digit_bits(&self) -> u32 {
        /// The digits of a warp.
        const FEWEST_BITS: u32 = 5;
        self.key_bits().div_ceil(self.key_passes()).max(FEWEST_BITS)
    }

    /// The number of digits.
    pub fn digits(&self) -> u64 {
        1 << self.digit_bits()
    }

    /// The number of tiles.
    pub fn tiles(&self) -> u64 {
        self.items.div_ceil(TILE)
    }

    /// The type of keys and items in scratch.
    pub fn dtype(&self) -> DType {
        match self.items.max(self.keys) >> 31 {
            0 => DType::I32,
            _ => DType::I64,
        }
    }

    /// Bytes of scratch: keys and items before and after a pass, and how many items with each digit
    /// a tile has.
    pub fn scratch_bytes(&self) -> u64 {
        (4 * self.items + self.digits() * self.tiles()) * self.dtype().bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_cover_all_keys() {
        let cases = [
            0,
            1,
            31,
            32,
            511,
            512,
            1024,
            50_304,
            1 << 18,
            1 << 31,
            1 << 40,
            u64::MAX,
        ];
        for keys in cases {
            let sorting = Sorting {
                items: 3000,
                keys,
                lines: 1,
            };
            let bits = sorting.passes() * sorting.digit_bits();
            assert!(keys.checked_shr(bits).unwrap_or(0) == 0, "{keys}");
            assert!((32..=512).contains(&sorting.digits()), "{keys}");
        }
        let vocabulary = Sorting {
            items: 65_536,
            keys: 50_304,
            lines: 1,
        };
        assert_eq!(vocabulary.passes(), 2);
        assert_eq!(vocabulary.scratch_bytes(), 4 * (4 * 65_536 + 256 * 64));
    }

    #[test]
    fn long_lines_are_sorted() {
        let sorting = |dtype, shape: &[u64], k| {
            let x = TensorType::new(dtype, shape).unwrap();
            Sorting::of_lines(&x, shape.len() - 1, k)
        };
        let one = sorting(DType::I64, &[65_536], 65_536).unwrap();
        assert_eq!((one.passes(), one.digits(), one.length()), (8, 256, 65_536));
        let several = sorting(DType::BF16, &[300, 1000], 500).unwrap();
        assert_eq!((several.key_passes(), several.passes()), (2, 4));
        assert_eq!(several.length(), 1000);
        assert_eq!(sorting(DType::F32, &[65_536], 64), None);
        assert_eq!(sorting(DType::F32, &[1 << 20, 65], 65), None);
        assert_eq!(sorting(DType::F32, &[0], 0), None);
    }
}
