//! The numbers of block-wise quantisation, which kernels of every machine share.
//!
//! A block of numbers is stored as codes and as its largest magnitude: a code's number is
//! `map[code] * largest`. Maps are sorted, and the code of `x` is the nearest: the number of
//! [`middles`] below `x / largest`.
//!
//! Sources: Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization" (dynamic maps);
//! Dettmers et al., 2023, "QLoRA" (NF4). The numbers are those of the library `bitsandbytes`, bit
//! for bit.

/// Numbers in a block of 8-bit codes.
pub const BLOCK_8BIT: u64 = 256;
/// Numbers in a block of NF4 codes.
pub const BLOCK_NF4: u64 = 64;

/// The dynamic map for numbers of both signs, from -0.993 to 1.
pub static DYNAMIC: [f32; 256] = dynamic(true);
/// The dynamic map for numbers that are not negative, from 0 to 1.
pub static UNSIGNED: [f32; 256] = dynamic(false);
/// NF4: quantiles of the normal distribution, from -1 to 1.
pub static NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The numbers halfway between two neighbours of a map. The last one is infinite.
pub const fn middles<const N: usize>(map: &[f32; N]) -> [f32; N] {
    let mut middles = [f32::INFINITY; N];
    let mut i = 0;
    while i + 1 < N {
        middles[i] = (map[i] + map[i + 1]) * 0.5;
        i += 1;
    }
    middles
}

/// Powers of ten, each with twice as many numbers as the one before, evenly spaced from 0.1 to 1
/// times the power.
const fn dynamic(signed: bool) -> [f32; 256] {
    const POWERS: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
    let mut map = [0.0; 256];
    // The first positive number's place, after 0.
    let mut at = if signed { 128 } else { 1 };
    let mut power = 0;
    while power < POWERS.len() {
        let n = if signed { 1 << power } else { 2 << power };
        let mut i = 0;
        while i < n {
            let middle = (spaced(i, n) + spaced(i + 1, n)) / 2.0;
            map[at] = POWERS[power] * middle;
            if signed {
                map[254 - at] = -map[at];
            }
            at += 1;
            i += 1;
        }
        power += 1;
    }
    map[255] = 1.0;
    map
}

/// Number `i` of `0.1..=1` in `n` steps, rounded as `torch.linspace` rounds it: counted from the
/// nearer end, with one rounding.
const fn spaced(i: usize, n: usize) -> f32 {
    let step = (1.0 - 0.1f32) / n as f32;
    let (from, steps) = if i < n.div_ceil(2) {
        (0.1f32, i as f64)
    } else {
        (1.0, -((n - i) as f64))
    };
    (from as f64 + step as f64 * steps) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The maps of bitsandbytes: `tests/data/quantize/gen_quantize.py` writes the file.
    #[test]
    fn maps_are_those_of_bitsandbytes() {
        let file = include_str!("maps.txt");
        let lines = file.lines().filter(|line| !line.starts_with('#'));
        let lines: Vec<Vec<u32>> = lines
            .map(|line| {
                let bits = line.split_whitespace().skip(1);
                bits.map(|x| u32::from_str_radix(x, 16).unwrap()).collect()
            })
            .collect();
        let bits = |map: &[f32]| map.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        assert_eq!(lines, [bits(&DYNAMIC), bits(&UNSIGNED), bits(&NF4)]);
    }
}
