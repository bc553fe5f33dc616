//! Random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
//! 2011). A block of four words is a function of a key, the seed, and a counter: the number of the
//! block, the op's stream, the step. An element's bits depend on nothing else: elements may be
//! computed in any order and any number of times. Steps and streams count modulo 2^32.

use super::Ran;
use super::math::Real;
use super::signature::{Checked, Signature, ensure, is_float};
use super::wide::{BLOCK, Wide, blocks_of, sink, source, wide_float};
use crate::kernel::Call;
use artifact::DType;

// --- checks ---

fn check_rng(s: &Signature<'_>, i: usize) -> Checked {
    s.expect(i, DType::I64)?;
    s.expect_shape(i, &[2])
}
pub(super) fn check_random(s: &Signature<'_>) -> Checked {
    check_rng(s, 0)?;
    s.int("stream")?;
    let dtype = s.dtype_attr("dtype")?;
    ensure(is_float(dtype), || format!("no kernel for {dtype:?}"))?;
    s.results(&[(dtype, &s.sizes("shape")?)])
}
pub(super) fn check_dropout(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    check_rng(s, 1)?;
    s.int("stream")?;
    check_probability(s)?;
    s.results(&[(s.dtype(0), s.shape(0)), (DType::Bool, s.shape(0))])
}
pub(super) fn check_dropout_key(s: &Signature<'_>) -> Checked {
    check_rng(s, 0)?;
    s.int("stream")?;
    check_probability(s)?;
    s.results(&[(DType::I64, &[4])])
}
fn check_probability(s: &Signature<'_>) -> Checked {
    let p = s.float("p")?;
    ensure((0.0..=1.0).contains(&p), || {
        format!("p={p} is not in 0..=1")
    })
}
pub(super) fn check_round_random(s: &Signature<'_>) -> Checked {
    s.expect(0, DType::F32)?;
    check_rng(s, 1)?;
    s.int("stream")?;
    s.results(&[(DType::BF16, s.shape(0))])
}
pub(super) fn check_dropout_bwd(s: &Signature<'_>) -> Checked {
    s.has_kernel(0, is_float)?;
    s.float("scale")?;
    s.expect(1, DType::Bool)?;
    s.expect_shape(1, s.shape(0))?;
    s.results(&[(s.dtype(0), s.shape(0))])
}
pub(super) fn check_rng_next(s: &Signature<'_>) -> Checked {
    check_rng(s, 0)?;
    s.results(&[(s.dtype(0), s.shape(0))])
}

// --- Philox ---

/// Blocks of four random words side by side: words 0 of all blocks, then words 1, 2 and 3. A word
/// is the lower half of a number: so products need no other lanes than sums, and what the upper
/// halves have does no harm.
#[inline(always)]
fn philox<const N: usize>(mut counter: [[u64; N]; 4], mut key: [u32; 2]) -> [[u64; N]; 4] {
    for round in 0..10 {
        if round != 0 {
            key = [
                key[0].wrapping_add(0x9E37_79B9),
                key[1].wrapping_add(0xBB67_AE85),
            ];
        }
        let [zero, one, two, three] = &mut counter;
        for i in 0..N {
            let product0 = (zero[i] & LOWER) * 0xD251_1F53;
            let product1 = (two[i] & LOWER) * 0xCD9E_8D57;
            zero[i] = (product1 >> 32) ^ one[i] ^ u64::from(key[0]);
            one[i] = product1;
            two[i] = (product0 >> 32) ^ three[i] ^ u64::from(key[1]);
            three[i] = product0;
        }
    }
    counter
}

/// The bits of a word.
const LOWER: u64 = 0xFFFF_FFFF;

/// The words of one op in one step.
struct Words {
    key: [u32; 2],
    stream: u32,
    step: u32,
}

impl Words {
    /// Operand `rng` is [seed, step].
    fn new(call: &Call<'_>, rng: usize) -> Words {
        Words::of(call.input(rng), call.int("stream"))
    }
    /// The seed and the step come first.
    fn of(rng: &[i64], stream: i64) -> Words {
        let (seed, step) = (rng[0] as u64, rng[1] as u32);
        Words {
            key: [seed as u32, (seed >> 32) as u32],
            stream: stream as u32,
            step,
        }
    }
    /// Block `i`.
    fn block(&self, i: usize) -> [u32; 4] {
        self.blocks::<1>(i).map(|[word]| word as u32)
    }
    /// Blocks from `first` on, side by side.
    #[inline(always)]
    fn blocks<const N: usize>(&self, first: usize) -> [[u64; N]; 4] {
        let [stream, step] = [self.stream, self.step].map(|word| [u64::from(word); N]);
        let low = std::array::from_fn(|i| (first + i) as u64);
        let high = low.map(|block| block >> 32);
        philox([low, high, stream, step], self.key)
    }
}

/// A number in `0..1` with `bits` random bits. The type must hold all of them: rounding could
/// give 1.
fn uniform(word: u32, bits: u32) -> f64 {
    f64::from(word >> (32 - bits)) / f64::from(1u32 << bits)
}
/// A number in `0..1` of 53 bits.
fn uniform53(high: u32, low: u32) -> f64 {
    ((u64::from(high) << 32 | u64::from(low)) >> 11) as f64 / (1u64 << 53) as f64
}
/// Two normal numbers from two uniform ones: Box and Muller's method. The first must not be 0.
fn normal(u: f64, v: f64) -> [f64; 2] {
    let (radius, angle) = ((-2.0 * u.ln()).sqrt(), std::f64::consts::TAU * v);
    [radius * angle.cos(), radius * angle.sin()]
}

/// Fills result 0 with `per` numbers a block of words.
fn fill<const PER: usize>(call: &Call<'_>, numbers: impl Fn([u32; 4]) -> [f64; PER]) {
    let (words, mut y) = (Words::new(call, 0), sink(call, 0));
    let mut ys = [0.0; BLOCK];
    for (at, len) in blocks_of(call.elements()) {
        for (i, part) in ys[..len].chunks_mut(PER).enumerate() {
            let numbers = numbers(words.block(at / PER + i));
            part.copy_from_slice(&numbers[..part.len()]);
        }
        y.store(at, &ys[..len]);
    }
}

pub(super) fn rand(call: &Call<'_>) -> Ran {
    match call.out_dtype(0) {
        DType::F64 => fill(call, |w| [uniform53(w[0], w[1]), uniform53(w[2], w[3])]),
        DType::F32 => fill(call, |w| w.map(|w| uniform(w, 24))),
        DType::F16 => fill(call, |w| w.map(|w| uniform(w, 11))),
        _ => fill(call, |w| w.map(|w| uniform(w, 8))),
    }
    Ok(())
}
pub(super) fn randn(call: &Call<'_>) -> Ran {
    match call.out_dtype(0) {
        // 1 - u is never 0.
        DType::F64 => fill(call, |w| {
            normal(1.0 - uniform53(w[0], w[1]), uniform53(w[2], w[3]))
        }),
        _ => fill(call, |w| {
            let [a, b] = normal(1.0 - uniform(w[0], 24), uniform(w[1], 24));
            let [c, d] = normal(1.0 - uniform(w[2], 24), uniform(w[3], 24));
            [a, b, c, d]
        }),
    }
    Ok(())
}

// --- dropout ---

/// Which elements are dropped.
pub(super) struct Dropped {
    words: Words,
    p: f64,
}

/// Blocks of words that are computed together: enough for vector registers.
const TOGETHER: usize = 16;

impl Dropped {
    /// Operand `key` is what [`dropout_key`] writes.
    pub(super) fn by(call: &Call<'_>, key: usize) -> Dropped {
        let key = call.input::<i64>(key);
        Dropped {
            words: Words::of(key, key[2]),
            p: f64::from_bits(key[3] as u64),
        }
    }
    /// The factor of the elements that are kept.
    pub(super) fn scale(&self) -> f64 {
        if self.p == 1.0 {
            0.0
        } else {
            1.0 / (1.0 - self.p)
        }
    }
    /// A word below this threshold, in units of 2^-32, drops its element.
    fn threshold(&self) -> u64 {
        (self.p * 4_294_967_296.0) as u64
    }
    /// Lets `f` have, for elements from `at` on, pieces of `numbers` and of the factors 1 or 0 of
    /// their elements.
    #[inline(always)]
    pub(super) fn kept<R: Real>(
        &self,
        at: usize,
        n: usize,
        mut f: impl FnMut(std::ops::Range<usize>, &[R]),
    ) {
        let threshold = self.threshold();
        let (mut skipped, mut done) = (at % 4, 0);
        let mut kept = [R::ZERO; 4 * TOGETHER];
        for first in (at / 4..(at + n).div_ceil(4)).step_by(TOGETHER) {
            let words = self.words.blocks::<TOGETHER>(first);
            for i in 0..TOGETHER {
                for j in 0..4 {
                    kept[4 * i + j] = R::flag(threshold <= words[j][i] & LOWER);
                }
            }
            let some = (kept.len() - skipped).min(n - done);
            f(done..done + some, &kept[skipped..][..some]);
            (skipped, done) = (0, done + some);
        }
    }
}

pub(super) fn dropout_key(call: &Call<'_>) -> Ran {
    let (rng, p) = (call.input::<i64>(0), call.float("p"));
    let key = [rng[0], rng[1], call.int("stream"), p.to_bits() as i64];
    call.output::<i64>(0).copy_from_slice(&key);
    Ok(())
}
pub(super) fn dropout(call: &Call<'_>) -> Ran {
    wide_float!(call.out_dtype(0), W => dropout_of::<W>(call));
    Ok(())
}
fn dropout_of<R: Real>(call: &Call<'_>) {
    let dropped = Dropped {
        words: Words::new(call, 1),
        p: call.float("p"),
    };
    let (x, mut y, mut mask) = (source(call, 0), sink(call, 0), sink(call, 1));
    let scale = R::of_f64(dropped.scale());
    let mut xs = [R::ZERO; BLOCK];
    for (at, len) in blocks_of(call.elements()) {
        x.load(&y, at, &mut xs[..len]);
        dropped.kept(at, len, |part, kept: &[R]| {
            mask.store(at + part.start, kept);
            for (x, &kept) in xs[part].iter_mut().zip(kept) {
                *x = *x * kept * scale;
            }
        });
        y.store(at, &xs[..len]);
    }
}
pub(super) fn dropout_bwd(call: &Call<'_>) -> Ran {
    wide_float!(call.out_dtype(0), W => {
        let scale = W::of_f64(call.float("scale"));
        super::wide::map(call, |[dy, mask]: [W; 2]| dy * mask * scale)
    })
}

// --- rounding ---

/// A finite number becomes the bf16 below or above it; the others stay what they are.
fn rounded(x: f32, word: u32) -> f32 {
    match x.is_finite() {
        true => f32::from_bits(x.to_bits().wrapping_add(word >> 16) & 0xFFFF_0000),
        false => x,
    }
}
pub(super) fn round_random(call: &Call<'_>) -> Ran {
    let (words, x, mut y) = (Words::new(call, 1), source(call, 0), sink(call, 0));
    let mut xs = [0f32; BLOCK];
    for (at, len) in blocks_of(call.elements()) {
        x.load(&y, at, &mut xs[..len]);
        for (i, part) in xs[..len].chunks_mut(4).enumerate() {
            let words = words.block(at / 4 + i);
            part.iter_mut()
                .zip(words)
                .for_each(|(x, word)| *x = rounded(*x, word));
        }
        y.store(at, &xs[..len]);
    }
    Ok(())
}

pub(super) fn rng_next(call: &Call<'_>) -> Ran {
    let next = call.output::<i64>(0);
    if call.inplace(0).is_none() {
        next.copy_from_slice(call.input(0));
    }
    next[1] = next[1].wrapping_add(1);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::philox;

    /// The known answers of the authors' Random123 library.
    #[test]
    fn philox_gives_the_known_answers() {
        let philox = |counter: [u32; 4], key| {
            philox(counter.map(|word| [word.into()]), key).map(|[word]| word as u32)
        };
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(
            philox(pi, [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }
}
