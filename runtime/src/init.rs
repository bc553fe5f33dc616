//! Values of states without data in the artifact.

use crate::Error;
use crate::kernels::halves::split;
use crate::machine::backend::Backend;
use artifact::{DType, LOW, MASTER, Operand, Place, Range, State, StateKind};
use half::{bf16, f16};
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::thread::Builder;

/// How to give values to states without a value.
///
/// * A random state becomes `(seed, 0)`, whatever it was.
/// * A moment becomes zeros.
/// * With `std`, a parameter without data in the artifact becomes normal with that deviation. But a
///   parameter with a single dimension becomes ones if its name ends in `weight` (a norm's gain),
///   and zeros if it ends in `bias`. Numbers are drawn as f32, then rounded. A master of the
///   parameter ([`MASTER`], [`LOW`]) has the f32.
/// * Everything else stays without a value, and the first step asks for it by name.
///
/// A value depends on the seed, the state's path and the element's index alone, not on the order of
/// states or on other states.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct StateInit {
    /// The seed of everything.
    pub seed: u64,
    /// The deviation of parameters.
    pub std: Option<f64>,
}

impl StateInit {
    /// The numbers that a parameter of two or more dimensions would get; empty without `std`.
    pub fn drawn(&self, path: &str, n: u64) -> Vec<f64> {
        let key = mix(self.seed ^ hash(path));
        let numbers = self.std.into_iter();
        numbers
            .flat_map(|std| (0..n).map(move |i| std * normal(key, i)))
            .collect()
    }

    /// The numbers of a parameter; `None` without `std`.
    fn numbers(&self, path: &str, shape: &[u64]) -> Option<Box<dyn Fn(u64) -> f64 + Sync>> {
        let std = self.std?;
        let last = path.rsplit('.').next().unwrap_or(path);
        let key = mix(self.seed ^ hash(path));
        Some(match (last, shape) {
            ("bias", [_]) => Box::new(|_| 0.0),
            ("weight", [_]) => Box::new(|_| 1.0),
            // With zeros in one of its two factors, an adapter adds nothing at first.
            _ if path.contains(".lora_B.") => Box::new(|_| 0.0),
            _ => Box::new(move |i| std * normal(key, i)),
        })
    }
}

/// What a state stores of the numbers that are drawn for a parameter.
#[derive(Clone, Copy)]
pub(crate) enum Stored<'a> {
    /// Its own numbers, if it is a parameter.
    Own,
    /// The upper halves of its own numbers.
    High,
    /// The lower halves of the numbers of the parameter with this path.
    LowOf(&'a str),
    /// The numbers of the parameter with this path.
    MasterOf(&'a str),
}

impl<'a> Stored<'a> {
    /// What a state stores, of a machine with states of these paths, and these parameters whose
    /// numbers are drawn.
    pub(crate) fn of(
        state: &State,
        paths: &BTreeSet<String>,
        drawn: &'a BTreeSet<String>,
    ) -> Stored<'a> {
        let parameter = |start: &str| {
            let rest = state.path.strip_prefix(start)?.strip_prefix('.')?;
            drawn.get(rest).filter(|_| state.kind == StateKind::Moment)
        };
        if let Some(path) = parameter(LOW) {
            return Stored::LowOf(path);
        }
        if let Some(path) = parameter(MASTER) {
            return Stored::MasterOf(path);
        }
        match drawn.contains(&state.path) && paths.contains(&format!("{LOW}.{}", state.path)) {
            true => Stored::High,
            false => Stored::Own,
        }
    }
}

/// Gives a state its value; false if it gets no value, an error if its type cannot hold the value.
pub(crate) fn initialise(
    init: &StateInit,
    state: &State,
    stored: Stored<'_>,
    has_value: bool,
    backend: &dyn Backend,
) -> Result<bool, Error> {
    let shape = &state.operand.shape;
    let numbers = match stored {
        Stored::LowOf(path) | Stored::MasterOf(path) => init.numbers(path, shape),
        Stored::Own | Stored::High if state.kind == StateKind::Param && !has_value => {
            init.numbers(&state.path, shape)
        }
        Stored::Own | Stored::High => None,
    };
    match (state.kind, numbers) {
        (StateKind::Rng, _) => {
            let mut words = [0; 16];
            words[..8].copy_from_slice(&init.seed.to_le_bytes());
            backend.write(state.operand.place, &words)?;
            Ok(true)
        }
        (_, Some(numbers)) => floats(state, stored, backend, numbers).map(|()| true),
        _ if has_value => Ok(true),
        (StateKind::Moment, None) => zeros(state, backend).map(|()| true),
        (StateKind::Param | StateKind::Buffer | StateKind::Const, None) => Ok(false),
    }
}

fn zeros(state: &State, backend: &dyn Backend) -> Result<(), Error> {
    let place = state.operand.place;
    let bytes = bytes(&state.operand);
    backend.fill(Range { place, bytes }, 0)
}

fn bytes(operand: &Operand) -> u64 {
    operand
        .bytes()
        .expect("a validated tensor should have a size")
}

/// Writes one number for each element, in blocks: a parameter may be larger than what is left of
/// the memory. All cores compute the numbers of a block; a large model has billions of them.
fn floats(
    state: &State,
    stored: Stored<'_>,
    backend: &dyn Backend,
    value: impl Fn(u64) -> f64 + Sync,
) -> Result<(), Error> {
    let Operand { place, dtype, .. } = state.operand;
    let encode: fn(f64, &mut [u8]) = match (stored, dtype) {
        (Stored::High, DType::BF16) => {
            |x, bytes| bytes.copy_from_slice(&split(x as f32).0.to_le_bytes())
        }
        (Stored::LowOf(_), DType::I16) => {
            |x, bytes| bytes.copy_from_slice(&split(x as f32).1.to_le_bytes())
        }
        (_, DType::F64) => |x, bytes| bytes.copy_from_slice(&x.to_le_bytes()),
        (_, DType::F32) => |x, bytes| bytes.copy_from_slice(&(x as f32).to_le_bytes()),
        (_, DType::F16) => |x, bytes| bytes.copy_from_slice(&f16::from_f32(x as f32).to_le_bytes()),
        (_, DType::BF16) => {
            |x, bytes| bytes.copy_from_slice(&bf16::from_f32(x as f32).to_le_bytes())
        }
        (_, other) => {
            return Err(Error::Host(format!(
                "state {}: there is no rule for values of type {other:?}; write it",
                state.path
            )));
        }
    };
    const BLOCK: u64 = 1 << 20;
    let width = dtype.bytes() as usize;
    let n = bytes(&state.operand) / dtype.bytes();
    let mut block = vec![0; n.min(BLOCK) as usize * width];
    let mut from = 0;
    while from < n {
        let to = (from + BLOCK).min(n);
        let block = &mut block[..(to - from) as usize * width];
        on_all_cores(block, width, from, |i, bytes| encode(value(i), bytes));
        let place = Place {
            offset: place.offset + from * dtype.bytes(),
            ..place
        };
        backend.write(place, block)?;
        from = to;
    }
    Ok(())
}

/// Writes the elements of a block, of `width` bytes each, by their numbers from `from` on.
fn on_all_cores(block: &mut [u8], width: usize, from: u64, write: impl Fn(u64, &mut [u8]) + Sync) {
    /// Fewer elements are not worth a thread.
    const PART: usize = 1 << 14;
    let (n, cores) = (
        block.len() / width,
        std::thread::available_parallelism().map_or(1, |n| n.get()),
    );
    let part = n.div_ceil(cores).max(PART);
    let parts = (from..).step_by(part).zip(block.chunks_mut(part * width));
    let parts = Mutex::new(parts);
    let next = || parts.lock().expect("no part should panic").next();
    let fill = || {
        while let Some((first, bytes)) = next() {
            (first..)
                .zip(bytes.chunks_exact_mut(width))
                .for_each(|(i, bytes)| write(i, bytes));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..n.div_ceil(part) {
            // Without more threads, this one fills all parts.
            if Builder::new().spawn_scoped(scope, fill).is_err() {
                break;
            }
        }
        fill();
    });
}

/// Normal number `i` of a key, by Box and Muller's method: two numbers at a time.
pub(crate) fn normal(key: u64, i: u64) -> f64 {
    let uniform = |n: u64| {
        (mix(key.wrapping_add(n.wrapping_mul(GOLDEN))) >> 11) as f64 / (1_u64 << 53) as f64
    };
    let pair = i & !1;
    let radius = (-2.0 * (1.0 - uniform(pair)).ln()).sqrt();
    let angle = std::f64::consts::TAU * uniform(pair + 1);
    radius * if i == pair { angle.cos() } else { angle.sin() }
}

/// SplitMix64's increment.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014).
pub(crate) fn mix(z: u64) -> u64 {
    let z = z.wrapping_add(GOLDEN);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// FNV-1a.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |h, b| {
        (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01B3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_write_each_element_once_by_its_number() {
        for n in [0, 1, 1 << 14, (1 << 16) + 1] {
            let mut block = vec![0; 8 * n];
            on_all_cores(&mut block, 8, 1000, |i, bytes| {
                let before = u64::from_le_bytes((&*bytes).try_into().unwrap());
                bytes.copy_from_slice(&(before + i).to_le_bytes());
            });
            let numbers = block.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b));
            assert!(numbers.eq(1000..1000 + n as u64), "{n}");
        }
    }

    /// A new adapter adds nothing, and a gain changes nothing.
    #[test]
    fn some_parameters_are_not_drawn() {
        let init = StateInit {
            seed: 1,
            std: Some(0.02),
        };
        let first = |path: &str, shape: &[u64]| init.numbers(path, shape).unwrap()(0);
        assert_eq!(first("a.lora_B.default.weight", &[4, 2]), 0.0);
        assert_eq!(first("a.bias", &[4]), 0.0);
        assert_eq!(first("a.weight", &[4]), 1.0);
        assert!(![0.0, 1.0].contains(&first("a.lora_A.default.weight", &[2, 4])));
    }

    #[test]
    fn normal_numbers_are_normal() {
        let n = 100_000;
        let xs: Vec<f64> = (0..n).map(|i| normal(mix(7), i)).collect();
        let mean = xs.iter().sum::<f64>() / n as f64;
        let variance = xs.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        let within = xs.iter().filter(|x| x.abs() < 1.0).count() as f64 / n as f64;
        // Five standard errors.
        assert!(mean.abs() < 0.016, "mean {mean}");
        assert!((variance - 1.0).abs() < 0.023, "variance {variance}");
        assert!(
            (within - 0.6827).abs() < 0.008,
            "within one deviation: {within}"
        );
    }
}
