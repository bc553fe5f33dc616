//! Numbers for kernels, and allowed errors of their results.

use ir::{DType, TensorType};
use runtime::kernels::owned::OwnedTensor;

/// Random numbers with a seed (splitmix64).
pub struct Random(pub u64);

impl Random {
    /// 64 bits.
    #[expect(clippy::should_implement_trait, reason = "it never ends")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    /// In -1..1.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// The kind of numbers of a tensor.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Numbers {
    /// Around zero, some farther from zero.
    Plain,
    /// Within -3..3.
    Small,
    /// Sometimes NaN, an infinity, a zero, a subnormal or a very large number.
    Wild,
}

/// A type's shape, for tensors.
pub fn shape_of(ty: &TensorType) -> Vec<usize> {
    ty.shape().iter().map(|&d| d as usize).collect()
}

/// A tensor of such numbers; integers are small, and booleans are equally likely.
pub fn tensor(ty: &TensorType, numbers: Numbers, random: &mut Random) -> OwnedTensor {
    let wild = [
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        0.0,
        -0.0,
        1e-40,
        -1e-41,
        3e38,
        -3e38,
        88.8,
        -103.5,
        1e-8,
    ];
    let n = ty.numel() as usize;
    let dtype = codegen::dtype(ty.dtype());
    if !ty.dtype().is_float() {
        let bool = ty.dtype() == DType::Bool;
        let ints = (0..n).map(|_| match (random.next() % 8, bool) {
            (r, true) => (r & 1) as i64,
            (0, _) if numbers == Numbers::Wild => random.next() as i64,
            _ => random.next() as i64 % 8,
        });
        return OwnedTensor::from_i64s(dtype, &shape_of(ty), &ints.collect::<Vec<_>>());
    }
    let floats = (0..n).map(|_| match random.next() % 16 {
        0 | 1 if numbers == Numbers::Wild => wild[(random.next() % wild.len() as u64) as usize],
        2 if numbers != Numbers::Small => random.unit() * 40.0,
        _ => random.unit() * 3.0,
    });
    OwnedTensor::from_f64s(dtype, &shape_of(ty), &floats.collect::<Vec<_>>())
}

/// The allowed error of results.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Close {
    /// In units in the last place of the expected number's type.
    Ulps(f64),
    /// In units in the last place of the largest finite number of the tensor.
    OfLargest(f64),
    /// This error for all numbers, plus the rounding to the type.
    Absolute(f64),
    /// Both: units in the last place of the largest finite number, and an error for all numbers.
    OfSums(f64, f64),
}

impl Close {
    /// The allowed error of each number; 0 for integers, booleans and infinities.
    pub fn bounds(self, expected: &OwnedTensor) -> Vec<f64> {
        let dtype = expected.dtype();
        let numbers = expected.to_f64s();
        let largest = numbers
            .iter()
            .filter(|x| x.is_finite())
            .fold(0f64, |m, x| m.max(x.abs()));
        let unit = |x: f64| epsilon(dtype) * x.abs().max(smallest(dtype));
        let bound = |&x: &f64| match self {
            _ if epsilon(dtype) == 0.0 || !x.is_finite() => 0.0,
            Close::Ulps(n) => n * unit(x),
            Close::OfLargest(n) => n * unit(largest),
            Close::Absolute(most) => most + unit(x),
            Close::OfSums(n, most) => n * unit(largest) + most,
        };
        numbers.iter().map(bound).collect()
    }
    /// The first element that is too far from an expected one.
    pub fn first_off(self, found: &OwnedTensor, expected: &OwnedTensor) -> Option<usize> {
        if epsilon(expected.dtype()) == 0.0 {
            let (a, b) = (found.to_i64s(), expected.to_i64s());
            return (0..b.len()).find(|&i| a[i] != b[i]);
        }
        let (a, b, bounds) = (found.to_f64s(), expected.to_f64s(), self.bounds(expected));
        (0..b.len()).find(|&i| !near(a[i], b[i], bounds[i]))
    }
}

/// True for equal numbers, for two NaNs, and for numbers with a difference of at most `bound`.
/// Rounding may make the largest number an infinity.
pub fn near(found: f64, expected: f64, bound: f64) -> bool {
    let both_nan = found.is_nan() && expected.is_nan();
    let one_infinite =
        found.is_infinite() != expected.is_infinite() && found.signum() == expected.signum();
    let overflowed = one_infinite && 3.4e38 < found.abs().min(expected.abs());
    found == expected || both_nan || overflowed || (found - expected).abs() <= bound
}

/// The distance from 1 to the next number; 0 for integers.
fn epsilon(dtype: artifact::DType) -> f64 {
    use artifact::DType;
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f32::EPSILON.into(),
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        _ => 0.0,
    }
}
/// The smallest normal number.
fn smallest(dtype: artifact::DType) -> f64 {
    use artifact::DType;
    match dtype {
        DType::F64 => f64::MIN_POSITIVE,
        DType::F16 => 2f64.powi(-14),
        _ => f32::MIN_POSITIVE.into(),
    }
}
