//! The sort by which a GPU brings together what has the same destination, such as the gradients of
//! the same row of a table: its passes, and the scratch that it takes.
//!
//! A radix sort of items by keys, the lowest digits first (Knuth, The Art of Computer Programming,
//! section 5.2.5). It is stable: items with the same key keep their order, so sums over them do not
//! depend on the GPU.

use crate::types::DType;

/// The number of items that a block counts and moves.
pub const TILE: u64 = 1024;

/// A sort of items `0..items` by keys in `0..=keys`. The last key stands for no destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sorting {
    /// The number of items.
    pub items: u64,
    /// The number of destinations.
    pub keys: u64,
}

impl Sorting {
    /// The number of passes, each of which sorts by a digit.
    pub fn passes(&self) -> u32 {
        /// A block has a thread for each digit: 512.
        const MOST_BITS: u32 = 9;
        self.bits().div_ceil(MOST_BITS)
    }

    /// Bits of a key.
    fn bits(&self) -> u32 {
        u64::BITS - self.keys.max(1).leading_zeros()
    }

    /// Bits of a digit.
    pub fn digit_bits(&self) -> u32 {
        /// The digits of a warp.
        const FEWEST_BITS: u32 = 5;
        self.bits().div_ceil(self.passes()).max(FEWEST_BITS)
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
        ];
        for keys in cases {
            let sorting = Sorting { items: 3000, keys };
            let bits = sorting.passes() * sorting.digit_bits();
            assert!(keys >> bits == 0, "{keys}");
            assert!((32..=512).contains(&sorting.digits()), "{keys}");
        }
        let vocabulary = Sorting {
            items: 65_536,
            keys: 50_304,
        };
        assert_eq!(vocabulary.passes(), 2);
        assert_eq!(vocabulary.scratch_bytes(), 4 * (4 * 65_536 + 256 * 64));
    }
}
