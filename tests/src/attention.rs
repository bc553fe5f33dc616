//! Attention by its definition: the reference for the GPU kernels.

use codegen::attention::{How, Sizes};
use codegen::kernels::Target;
use ir::op::{Attr, OpKind};
use ir::{DType, Op, TensorType};
use runtime::kernels::owned::OwnedTensor;

/// The generator's state and the stream of dropped weights.
const RNG: [i64; 2] = [0x1234_5678_9ABC, 7];
const STREAM: i64 = 5;

/// A case of attention.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Heads, queries, keys, the scale.
    pub sizes: Sizes,
    /// Numbers of a head.
    pub head_size: u32,
    /// Whether a query uses only the keys up to its own position.
    pub causal: bool,
    /// The probability that a weight is dropped.
    pub drops: Option<f64>,
    /// The GPU.
    pub target: &'static Target,
}

impl Case {
    /// For sm_80, with a scale of 1/8.
    pub fn new(
        heads: u32,
        group: u32,
        queries: u32,
        keys: u32,
        head_size: u32,
        causal: bool,
    ) -> Case {
        Case {
            sizes: Sizes {
                heads,
                group,
                queries,
                keys,
                scale: 0.125,
            },
            head_size,
            causal,
            drops: None,
            target: &Target::SM_80,
        }
    }
    /// The same with dropped weights.
    pub fn dropping(self, p: f64) -> Case {
        Case {
            drops: Some(p),
            ..self
        }
    }
    /// What the kernels have to do.
    pub fn how(&self) -> How {
        How {
            causal: self.causal,
            drops: self.drops.is_some(),
        }
    }
    /// The dropout key, if weights are dropped.
    pub fn key(&self) -> Option<[i64; 4]> {
        let p = self.drops?;
        Some([RNG[0], RNG[1], STREAM, p.to_bits() as i64])
    }
    /// For each weight its factor.
    fn factors(&self) -> Vec<f64> {
        let [heads, queries, keys] = self.rows();
        let shape = [heads, queries, keys];
        let n = heads * queries * keys;
        let ones = OwnedTensor::from_f64s(artifact::DType::F64, &shape, &vec![1.0; n]);
        let Some(p) = self.drops else {
            return ones.to_f64s();
        };
        let attrs = [("p", Attr::Float(p)), ("stream", Attr::Int(STREAM))];
        let attrs = attrs.map(|(key, attr)| (key.to_string(), attr));
        let op = Op::of(OpKind::Dropout, attrs.into()).expect("the attributes should be complete");
        let rng = OwnedTensor::from_i64s(artifact::DType::I64, &[2], &RNG);
        let ty = |dtype| {
            let shape = shape.map(|n| n as u64);
            TensorType::new(dtype, shape).expect("weights should be a type")
        };
        let results = [ty(DType::F64), ty(DType::Bool)];
        let dropped = crate::code::plain(&op, &[&ones, &rng], &results);
        dropped.expect("dropout should run")[0].to_f64s()
    }
    fn d(&self) -> usize {
        self.head_size as usize
    }
    /// Heads, queries, keys.
    pub fn rows(&self) -> [usize; 3] {
        let s = self.sizes;
        [s.heads, s.queries, s.keys].map(|n| n as usize)
    }
}

/// Numbers of bf16 between -2 and 2, the same for the same seed.
fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        half::bf16::from_f32((state >> 8) as f32 / 4_194_304.0 - 2.0).to_f32()
    };
    (0..n).map(|_| next()).collect()
}

/// Operands of the backward, including those of the forward.
pub struct Tensors {
    /// Queries.
    pub q: Vec<f32>,
    /// Keys.
    pub k: Vec<f32>,
    /// Values.
    pub v: Vec<f32>,
    /// The gradient of the result.
    pub dout: Vec<f32>,
}

impl Tensors {
    /// Numbers of bf16, the same in every run.
    pub fn new(case: &Case) -> Tensors {
        let ([heads, queries, keys], d) = (case.rows(), case.d());
        let (n_q, n_k) = (
            heads * queries * d,
            heads / case.sizes.group as usize * keys * d,
        );
        Tensors {
            q: numbers(n_q, 1),
            k: numbers(n_k, 2),
            v: numbers(n_k, 3),
            dout: numbers(n_q, 4),
        }
    }
}

/// Results, and the allowed error of each number: the error of rounding probabilities, gradients of
/// scores and results to bf16, relative to the sum of the summands' absolute values.
pub struct Expected {
    /// The result.
    pub out: Vec<(f64, f64)>,
    /// The logarithm of the sum of exponentials.
    pub lse: Vec<(f64, f64)>,
    /// Sums over dout · out.
    pub delta: Vec<(f64, f64)>,
    /// Gradients of queries.
    pub dq: Vec<(f64, f64)>,
    /// Gradients of keys.
    pub dk: Vec<(f64, f64)>,
    /// Gradients of values.
    pub dv: Vec<(f64, f64)>,
    /// The result rounded to bf16, the backward's operand.
    pub rounded: Vec<f32>,
}

/// Two roundings to bf16's 8 bits, each with an error of at most 2⁻⁸, plus the errors of f32 and of
/// approximate exponentials.
const UNIT: f64 = 1.03 * 2.0 / 256.0;
/// The error of sums in f32.
const SUM: f64 = 1e-5;

impl Expected {
    /// Attention by its definition, in f64.
    pub fn new(case: &Case, t: &Tensors) -> Expected {
        let ([heads, queries, keys], d) = (case.rows(), case.d());
        let scale = f64::from(case.sizes.scale);
        let row = |x: &[f32], i: usize| {
            x[i * d..][..d]
                .iter()
                .map(|&x| f64::from(x))
                .collect::<Vec<f64>>()
        };
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let zeros = |n: usize| vec![(0.0, 0.0); n];
        let mut e = Expected {
            out: zeros(t.q.len()),
            lse: zeros(heads * queries),
            delta: zeros(heads * queries),
            dq: zeros(t.q.len()),
            dk: zeros(t.k.len()),
            dv: zeros(t.k.len()),
            rounded: vec![],
        };
        let add = |to: &mut [(f64, f64)], factor: f64, x: &[f64]| {
            for (to, x) in to.iter_mut().zip(x) {
                *to = (to.0 + factor * x, to.1 + (factor * x).abs());
            }
        };
        let factors = case.factors();
        for head in 0..heads {
            let kv = head / case.sizes.group as usize * keys;
            for i in 0..queries {
                let at = head * queries + i;
                let (q, dout) = (row(&t.q, at), row(&t.dout, at));
                let reach = if case.causal { keys.min(i + 1) } else { keys };
                let scores: Vec<f64> = (0..reach)
                    .map(|j| scale * dot(&q, &row(&t.k, kv + j)))
                    .collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                e.lse[at] = (
                    if reach == 0 { 0.0 } else { max + sum.ln() },
                    1e-5 * (1.0 + max.abs()),
                );
                let p: Vec<f64> = scores.iter().map(|s| (s - max).exp() / sum).collect();
                let factors = &factors[at * keys..];
                for ((j, &p), f) in p.iter().enumerate().zip(factors) {
                    add(&mut e.out[at * d..][..d], f * p, &row(&t.v, kv + j));
                }
                let out = &e.out[at * d..][..d];
                let rounded: Vec<f32> = out
                    .iter()
                    .map(|x| half::bf16::from_f64(x.0).to_f32())
                    .collect();
                let delta: f64 = rounded
                    .iter()
                    .zip(&dout)
                    .map(|(&out, dout)| f64::from(out) * dout)
                    .sum();
                e.delta[at] = (delta, SUM * (1.0 + delta.abs()));
                e.rounded.extend(rounded);
                for ((j, &p), f) in p.iter().enumerate().zip(factors) {
                    let (k, v) = (row(&t.k, kv + j), row(&t.v, kv + j));
                    let ds = scale * p * (f * dot(&dout, &v) - delta);
                    add(&mut e.dq[at * d..][..d], ds, &k);
                    add(&mut e.dk[(kv + j) * d..][..d], ds, &q);
                    add(&mut e.dv[(kv + j) * d..][..d], f * p, &dout);
                }
            }
        }
        for tensor in [&mut e.out, &mut e.dq, &mut e.dk, &mut e.dv] {
            tensor
                .iter_mut()
                .for_each(|(_, bound)| *bound = UNIT * *bound + SUM);
        }
        e
    }
}
