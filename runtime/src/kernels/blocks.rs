//! Numbers as codes of a map and the largest magnitude of each block: see [`ops::maps`].

use super::signature::{Checked, Signature, ensure, is_float};
use super::wide::floats;
use super::{Cut, Ran};
use crate::kernel::Call;
use artifact::DType;
use ops::maps::{BLOCK_8BIT, BLOCK_NF4, DYNAMIC, NF4, UNSIGNED, middles};

/// Numbers in a block of 8-bit codes, and of NF4 codes.
pub(super) const EIGHT: usize = BLOCK_8BIT as usize;
const FOUR: usize = BLOCK_NF4 as usize;

/// A map of 256 numbers and the numbers between them.
pub(super) struct Map {
    numbers: &'static [f32; 256],
    middles: [f32; 256],
    /// For numbers of both signs, not negative ones first: a cell is all numbers with the same
    /// sign, exponent and upper mantissa bits, and has the number of middles below it. No cell has
    /// two middles.
    cells: [[u8; CELLS]; 2],
}

/// The bits of a number below those that all numbers of a cell share.
const CELL_BITS: u32 = 16;
/// What the magnitudes of the first cell and of the last one, which is 1, begin with. No middle is
/// as small as 2^-23, so that all smaller numbers are in the first cell.
const FIRST_CELL: u32 = (127 - 23) << (23 - CELL_BITS);
const LAST_CELL: u32 = 1f32.to_bits() >> CELL_BITS;
const CELLS: usize = (LAST_CELL - FIRST_CELL + 1) as usize;

/// The dynamic maps.
pub(super) static SIGNED_MAP: Map = Map::of(&DYNAMIC);
pub(super) static UNSIGNED_MAP: Map = Map::of(&UNSIGNED);
static NF4_MIDDLES: [f32; 16] = middles(&NF4);

impl Map {
    const fn of(numbers: &'static [f32; 256]) -> Map {
        let middles = middles(numbers);
        Map {
            numbers,
            cells: [below(&middles, false), below(&middles, true)],
            middles,
        }
    }

    /// The code of a number from -1 to 1: how many middles are below it. That of NaN is 0.
    #[inline(always)]
    fn code(&self, x: f32) -> u8 {
        let bits = x.to_bits();
        let cell = (bits & i32::MAX as u32) >> CELL_BITS;
        let cell = cell.clamp(FIRST_CELL, LAST_CELL) - FIRST_CELL;
        let below = self.cells[(bits >> 31) as usize][cell as usize];
        let code = below + u8::from(self.middles[usize::from(below)] < x);
        if x.is_nan() { 0 } else { code }
    }

    /// The numbers of a block.
    #[inline(always)]
    pub(super) fn decode(&self, codes: &[u8], largest: f32, to: &mut [f32]) {
        for (to, &code) in to.iter_mut().zip(codes) {
            *to = self.numbers[usize::from(code)] * largest;
        }
    }

    /// The codes of a block; returns its largest magnitude. NaN counts as nothing, and has code 0.
    #[inline(always)]
    pub(super) fn encode(&self, numbers: &[f32], codes: &mut [u8]) -> f32 {
        let larger = |most: f32, &x: &f32| if x.abs() > most { x.abs() } else { most };
        let largest = numbers.iter().fold(0.0, larger);
        let mut scaled = [0f32; EIGHT];
        let scaled = &mut scaled[..numbers.len()];
        for (scaled, x) in scaled.iter_mut().zip(numbers) {
            *scaled = x / largest;
        }
        for (code, x) in codes.iter_mut().zip(&*scaled) {
            *code = self.code(*x);
        }
        largest
    }
}

/// The number of middles below the smallest number of each cell.
const fn below(middles: &[f32; 256], is_negative: bool) -> [u8; CELLS] {
    let mut all = [0; CELLS];
    let (mut i, mut n) = (0, 0);
    while i < CELLS {
        // From the smallest number on.
        let cell = if is_negative { CELLS - 1 - i } else { i };
        let first = FIRST_CELL + cell as u32;
        let smallest = match is_negative {
            true => -f32::from_bits(((first + 1) << CELL_BITS) - 1),
            false if cell == 0 => 0.0,
            false => f32::from_bits(first << CELL_BITS),
        };
        while middles[n] < smallest {
            n += 1;
        }
        all[cell] = n as u8;
        i += 1;
    }
    all
}

// --- NF4 ---

/// The bytes of numbers in NF4: the operands of the op `nf4`.
#[derive(Clone, PartialEq, Debug)]
pub struct Nf4 {
    /// Two codes to a byte, the first in its upper half.
    pub codes: Vec<u8>,
    /// For each block of 64 numbers, a code of its largest magnitude less `offset`.
    pub sizes: Vec<u8>,
    /// For each 256 sizes, the largest of these differences.
    pub largest: Vec<f32>,
    /// The mean of all blocks' largest magnitudes.
    pub offset: f32,
}

impl Nf4 {
    /// Numbers in NF4 with double quantisation, as `bitsandbytes.functional.quantize_4bit` with
    /// `compress_statistics` has them.
    pub fn of(numbers: &[f32]) -> Nf4 {
        let mut codes = vec![0; numbers.len().div_ceil(2)];
        let mut blocks = vec![];
        for (block, codes) in numbers.chunks(FOUR).zip(codes.chunks_mut(FOUR / 2)) {
            let largest = block.iter().fold(0f32, |most, x| most.max(x.abs()));
            let inverse = 1.0 / largest.max(1e-38);
            let code = |x: &f32| {
                let x = (x * inverse).clamp(-1.0, 1.0);
                NF4_MIDDLES.iter().filter(|&&middle| middle < x).count() as u8
            };
            for (byte, pair) in codes.iter_mut().zip(block.chunks(2)) {
                // What stands after the last number is 0, whose code is 7.
                *byte = code(&pair[0]) << 4 | pair.get(1).map_or(7, code);
            }
            blocks.push(largest);
        }
        let sum: f64 = blocks.iter().map(|&x| f64::from(x)).sum();
        let offset = (sum / blocks.len().max(1) as f64) as f32;
        let mut sizes = vec![0; blocks.len()];
        blocks.iter_mut().for_each(|x| *x -= offset);
        let pairs = blocks.chunks(EIGHT).zip(sizes.chunks_mut(EIGHT));
        let largest = pairs.map(|(blocks, sizes)| SIGNED_MAP.encode(blocks, sizes));
        Nf4 {
            codes,
            largest: largest.collect(),
            sizes,
            offset,
        }
    }

    /// The first `n` numbers, as the op `nf4` computes them; `None` if there are fewer codes.
    pub fn numbers(&self, n: usize) -> Option<Vec<f32>> {
        let mut numbers = vec![0.0; n];
        let codes = self.codes.get(..n.div_ceil(2))?.chunks(FOUR / 2);
        let sizes = self.sizes.get(..n.div_ceil(FOUR))?;
        let blocks = numbers.chunks_mut(FOUR).zip(codes);
        for ((i, (numbers, codes)), &size) in blocks.enumerate().zip(sizes) {
            let size = nf4_size(size, *self.largest.get(i / EIGHT)?, self.offset);
            decode_nf4(&NF4.map(|x| x * size), codes, numbers);
        }
        Some(numbers)
    }
}

/// The largest magnitude of a block.
fn nf4_size(code: u8, largest: f32, offset: f32) -> f32 {
    DYNAMIC[usize::from(code)] * largest + offset
}

/// The numbers of a block whose 16 numbers are `map`.
fn decode_nf4<T: Copy>(map: &[T; 16], codes: &[u8], numbers: &mut [T]) {
    for (pair, &byte) in numbers.chunks_mut(2).zip(codes) {
        pair[0] = map[usize::from(byte >> 4)];
        if let [_, second] = pair {
            *second = map[usize::from(byte & 15)];
        }
    }
}

pub(super) fn check_nf4(s: &Signature<'_>) -> Checked {
    let (dtype, shape) = (s.dtype_attr("dtype")?, s.sizes("shape")?);
    ensure(is_float(dtype), || format!("no kernel for {dtype:?}"))?;
    s.results(&[(dtype, &shape)])?;
    let n: u64 = shape.iter().product();
    let blocks = n.div_ceil(BLOCK_NF4);
    s.expect(0, DType::U8)?;
    s.expect_shape(0, &[n.div_ceil(2)])?;
    s.expect(1, DType::U8)?;
    s.expect_shape(1, &[blocks])?;
    s.expect(2, DType::F32)?;
    s.expect_shape(2, &[blocks.div_ceil(BLOCK_8BIT)])?;
    s.expect(3, DType::F32)?;
    s.expect_shape(3, &[])
}

/// A unit is a block.
pub(super) fn cut_nf4(call: &Call<'_>) -> Cut {
    Cut::of(call.in_shape(1)[0], FOUR)
}

pub(super) fn nf4(call: &Call<'_>) -> Ran {
    let units = cut_nf4(call).units;
    let first = call.part(units).start;
    let codes = call.input_blocks::<u8>(0, units, FOUR / 2);
    let sizes = call.input_blocks::<u8>(1, units, 1);
    let (largest, offset) = (call.input::<f32>(2), call.input::<f32>(3)[0]);
    floats!(call.out_dtype(0), T => {
        let numbers = call.output_blocks::<T>(0, units, FOUR);
        let blocks = numbers.chunks_mut(FOUR).zip(codes.chunks(FOUR / 2));
        for ((i, (numbers, codes)), &size) in (first..).zip(blocks).zip(sizes) {
            let size = nf4_size(size, largest[i / EIGHT], offset);
            let map = NF4.map(|x| <T as super::wide::Scalar>::cast_f32(x * size));
            decode_nf4(&map, codes, numbers);
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_the_number_of_middles_below() {
        for map in [&SIGNED_MAP, &UNSIGNED_MAP] {
            let expected = |x: f32| map.middles.iter().filter(|&&middle| middle < x).count();
            let check = |x: f32| assert_eq!(usize::from(map.code(x)), expected(x), "{x:e}");
            // The ends of all cells, and the neighbours of all middles and numbers.
            let ends = (0..=LAST_CELL)
                .flat_map(|cell| [cell << CELL_BITS, (cell << CELL_BITS).saturating_sub(1)]);
            let ends = ends.map(|bits| f32::from_bits(bits & i32::MAX as u32));
            ends.filter(|x| *x <= 1.0)
                .for_each(|x| [x, -x].into_iter().for_each(check));
            let near = map.middles.iter().chain(map.numbers);
            let near = near.flat_map(|x| [x.next_down(), *x, x.next_up()]);
            near.filter(|x| x.abs() <= 1.0).for_each(check);
            [f32::NAN, 0.0, -0.0, 1.0, -1.0].into_iter().for_each(check);
        }
    }

    #[test]
    fn no_cell_has_two_middles() {
        for map in [&SIGNED_MAP, &UNSIGNED_MAP] {
            let cell = |x: f32| {
                (
                    x.is_sign_negative(),
                    (x.abs().to_bits() >> CELL_BITS).max(FIRST_CELL),
                )
            };
            for pair in map.middles[..255].windows(2) {
                assert_ne!(cell(pair[0]), cell(pair[1]), "{pair:?}");
            }
        }
    }
}
