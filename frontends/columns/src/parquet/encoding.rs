//! The encodings of levels and integers in a page:
//! <https://parquet.apache.org/docs/file-format/data-pages/encodings/>.

use crate::bits::{self, varint, zigzag};

/// Runs of equal numbers, and numbers of a few bits each. Levels and numbers in a dictionary.
pub(super) struct Hybrid<'a> {
    rest: &'a [u8],
    width: u32,
    /// Numbers that are left of the run.
    left: u64,
    run: Run<'a>,
}

enum Run<'a> {
    Equal(u64),
    /// Bytes, and the next number's bit.
    Packed(&'a [u8], u64),
}

impl<'a> Hybrid<'a> {
    /// Numbers of `width` bits; `None` if there are no such numbers.
    pub(super) fn new(rest: &'a [u8], width: u32) -> Option<Hybrid<'a>> {
        let run = Run::Equal(0);
        (width <= 32).then_some(Hybrid {
            rest,
            width,
            left: 0,
            run,
        })
    }

    /// The next number; `None` beyond the end.
    pub(super) fn next(&mut self) -> Option<u64> {
        while self.left == 0 {
            self.start()?;
        }
        self.left -= 1;
        match &mut self.run {
            Run::Equal(value) => Some(*value),
            Run::Packed(bytes, bit) => {
                let value = bits::at(bytes, *bit, self.width)?;
                *bit += u64::from(self.width);
                Some(value)
            }
        }
    }

    /// Reads the header of a run.
    fn start(&mut self) -> Option<()> {
        let (head, rest) = varint(self.rest)?;
        let n = head >> 1;
        if head & 1 == 0 {
            let (value, rest) = rest.split_at_checked(self.width.div_ceil(8) as usize)?;
            let value = value.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b));
            (self.left, self.run, self.rest) = (n, Run::Equal(value), rest);
            return Some(());
        }
        // Groups of 8 numbers. Some writers leave the end of the last one out.
        let bytes = n.checked_mul(u64::from(self.width))?;
        let bytes = usize::try_from(bytes).ok()?.min(rest.len());
        let (packed, rest) = rest.split_at(bytes);
        (self.left, self.run, self.rest) = (n.checked_mul(8)?, Run::Packed(packed, 0), rest);
        Some(())
    }
}

/// The integers of a page, as the file has them: without a meaning of their highest bit.
pub(super) enum Values<'a> {
    /// Integers of this many bytes, one after the other.
    Plain(&'a [u8], usize),
    /// Numbers of integers in a dictionary.
    Dictionary(Hybrid<'a>, &'a [i64]),
    Delta(Delta<'a>),
    /// All first bytes, all second bytes, ...: bytes of an integer, the number of the next one.
    Split(&'a [u8], usize, usize),
}

/// Encodings by their numbers in files.
const PLAIN: i64 = 0;
const PLAIN_DICTIONARY: i64 = 2;
const DELTA_BINARY_PACKED: i64 = 5;
const RLE_DICTIONARY: i64 = 8;
const BYTE_STREAM_SPLIT: i64 = 9;

impl<'a> Values<'a> {
    /// The integers of a page, of `width` bytes; `None` for an encoding of other values, or without
    /// the dictionary.
    pub(super) fn new(
        encoding: i64,
        bytes: &'a [u8],
        width: usize,
        dictionary: Option<&'a [i64]>,
    ) -> Option<Values<'a>> {
        Some(match encoding {
            PLAIN => Values::Plain(bytes, width),
            PLAIN_DICTIONARY | RLE_DICTIONARY => {
                // A page of nulls alone may have no bytes.
                let (&bits, rest) = bytes.split_first().unwrap_or((&0, bytes));
                Values::Dictionary(Hybrid::new(rest, u32::from(bits))?, dictionary?)
            }
            DELTA_BINARY_PACKED => Values::Delta(Delta::new(bytes, width)?),
            BYTE_STREAM_SPLIT => Values::Split(bytes, width, 0),
            _ => return None,
        })
    }

    /// The next integer; `None` beyond the end.
    pub(super) fn next(&mut self) -> Option<i64> {
        match self {
            Values::Plain(bytes, width) => {
                let (value, rest) = bytes.split_at_checked(*width)?;
                *bytes = rest;
                Some(signed(value.iter().rev().copied(), *width))
            }
            Values::Dictionary(indices, dictionary) => {
                let index = usize::try_from(indices.next()?).ok()?;
                dictionary.get(index).copied()
            }
            Values::Delta(delta) => delta.next(),
            Values::Split(bytes, width, at) => {
                let n = bytes.len() / *width;
                if *at >= n {
                    return None;
                }
                let value = signed((0..*width).rev().map(|k| bytes[k * n + *at]), *width);
                *at += 1;
                Some(value)
            }
        }
    }
}

/// An integer from its bytes, the highest first.
fn signed(bytes: impl Iterator<Item = u8>, width: usize) -> i64 {
    let value = bytes.fold(0u64, |n, byte| n << 8 | u64::from(byte));
    narrow(value as i64, width)
}

/// An integer that has `width` bytes: beyond the largest one the smallest follows.
fn narrow(value: i64, width: usize) -> i64 {
    let unused = 64 - 8 * width as u32;
    value << unused >> unused
}

/// Differences of neighbours, in blocks: each has its least difference, and miniblocks of what the
/// others are larger, with as many bits as each needs.
pub(super) struct Delta<'a> {
    rest: &'a [u8],
    width: usize,
    /// Numbers of a miniblock.
    mini: u64,
    /// Miniblocks of a block.
    minis: u64,
    /// Integers that are left.
    left: u64,
    next: i64,
    least: i64,
    /// The bits of each miniblock that is left of the block.
    widths: &'a [u8],
    /// The miniblock, the next number's bit, and the bits of a number.
    packed: (&'a [u8], u64, u32),
    /// Numbers that are left of the miniblock.
    here: u64,
}

/// More numbers than any writer puts into a block.
const MOST_IN_BLOCK: u64 = 1 << 20;

impl<'a> Delta<'a> {
    fn new(bytes: &'a [u8], width: usize) -> Option<Delta<'a>> {
        let (block, rest) = varint(bytes)?;
        let (minis, rest) = varint(rest)?;
        let (left, rest) = varint(rest)?;
        let (first, rest) = varint(rest)?;
        let mini = block.checked_div(minis)?;
        let fits = block <= MOST_IN_BLOCK && mini > 0 && mini.is_multiple_of(8);
        (fits && mini * minis == block).then_some(Delta {
            rest,
            width,
            mini,
            minis,
            left,
            next: narrow(zigzag(first), width),
            least: 0,
            widths: &[],
            packed: (&[], 0, 0),
            here: 0,
        })
    }

    fn next(&mut self) -> Option<i64> {
        self.left = self.left.checked_sub(1)?;
        let value = self.next;
        if self.left > 0 {
            let more = self.difference()?;
            self.next = narrow(value.wrapping_add(more), self.width);
        }
        Some(value)
    }

    fn difference(&mut self) -> Option<i64> {
        if self.here == 0 {
            self.start()?;
        }
        self.here -= 1;
        let (bytes, bit, width) = &mut self.packed;
        let more = bits::at(bytes, *bit, *width)?;
        *bit += u64::from(*width);
        Some(self.least.wrapping_add(more as i64))
    }

    /// Goes on to the next miniblock.
    fn start(&mut self) -> Option<()> {
        if self.widths.is_empty() {
            let (least, rest) = varint(self.rest)?;
            self.least = zigzag(least);
            (self.widths, self.rest) = rest.split_at_checked(self.minis as usize)?;
        }
        let (&width, widths) = self.widths.split_first()?;
        self.widths = widths;
        // The end of the last miniblock may be left out.
        let bytes = self.mini / 8 * u64::from(width);
        let bytes = usize::try_from(bytes).ok()?.min(self.rest.len());
        let (packed, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        self.packed = (packed, 0, u32::from(width));
        self.here = self.mini;
        (width <= 64).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_and_packed_numbers_are_read() {
        // 3 times 5; then 0 to 7.
        let bytes = [0x06, 5, 0x03, 0x88, 0xC6, 0xFA];
        let mut numbers = Hybrid::new(&bytes, 3).unwrap();
        let all: Vec<u64> = std::iter::from_fn(|| numbers.next()).collect();
        assert_eq!(all, [5, 5, 5, 0, 1, 2, 3, 4, 5, 6, 7]);
        assert!(Hybrid::new(&bytes, 33).is_none());
    }

    #[test]
    fn differences_wrap() {
        // Blocks of 128 in 4 miniblocks; 2 integers, from the largest one; 1 more, in 0 bits.
        let bytes = [0x80, 1, 4, 2, 0xFE, 0xFF, 0xFF, 0xFF, 0x0F, 2, 0, 0, 0, 0];
        let mut values = Values::new(DELTA_BINARY_PACKED, &bytes, 4, None).unwrap();
        assert_eq!(values.next(), Some(i64::from(i32::MAX)));
        assert_eq!(values.next(), Some(i64::from(i32::MIN)));
        assert_eq!(values.next(), None);
        for (block, minis) in [(0, 1), (8, 0), (12, 1), (8, 3)] {
            assert!(Delta::new(&[block, minis, 1, 0], 4).is_none());
        }
    }

    #[test]
    fn split_bytes_are_joined() {
        let mut values = Values::new(BYTE_STREAM_SPLIT, &[1, 2, 0, 1, 0, 0, 0, 255], 4, None);
        let mut next = || values.as_mut().unwrap().next();
        assert_eq!(next(), Some(1));
        assert_eq!(next(), Some(2 + 256 - (1 << 24)));
        assert_eq!(next(), None);
    }
}
