//! Numbers as codes of a map and the largest magnitude of each block ([`ir::op::maps`]): AdamW with
//! such moments, and the numbers of NF4. A block of threads has a block of numbers.
//!
//! The maps are in shared memory: constants that the first thread writes, once for all blocks of
//! numbers.

use super::Kernel;
use super::grid::{Grid, Tensor};
use crate::kernels::wide;
use crate::mlir::{Arith, Convert, Emit, Kind, Predicate, Value};
use ir::DType;
use ir::op::maps::{BLOCK_8BIT, BLOCK_NF4, DYNAMIC, NF4, UNSIGNED};

/// A map, in shared memory.
fn map(g: &mut Grid, numbers: &[f32]) -> Tensor {
    let table = g.shared(numbers.len() as u64, DType::F32);
    g.once(|g| {
        for (i, &number) in numbers.iter().enumerate() {
            let (at, number) = (g.b.long(i as u64), g.float(number.into(), Kind::F32));
            g.put(table, at, number);
        }
    });
    table
}

/// The number of a code in a block whose largest magnitude is known, f32.
fn decoded(g: &mut Grid, map: Tensor, code: Value, largest: Value) -> Value {
    let number = g.get(map, code);
    g.mul(number, largest)
}

/// The code of `x`, which is at most 1 in magnitude: the number of middles between neighbours of
/// the map that are below it.
fn code(g: &mut Grid, map: Tensor, x: Value) -> Value {
    let half = g.float(0.5, Kind::F32);
    let mut place = g.b.long(0);
    for step in [128, 64, 32, 16, 8, 4, 2, 1] {
        let further = g.plus(place, step);
        let below = g.plus(further, -1);
        let (a, b) = (g.get(map, below), g.get(map, further));
        let middle = g.add(a, b);
        let middle = g.mul(middle, half);
        let is_above = g.less(middle, x);
        place = g.b.select(is_above, further, place);
    }
    place
}

/// `x` to a power of at least 0, by squaring.
fn power(g: &mut Grid, x: Value, exponent: Value) -> Value {
    let (zero, bit, one) = (g.b.long(0), g.b.long(1), g.float(1.0, Kind::F64));
    let last = g.repeat_while(Predicate::Sgt, zero, &[exponent, x, one], |g, values| {
        let &[rest, square, product] = values else {
            unreachable!("the loop has three values")
        };
        let odd = g.b.andi(rest, bit);
        let odd = g.equal(odd, bit);
        let more = g.mul(product, square);
        let product = g.b.select(odd, more, product);
        vec![g.b.shrui(rest, bit), g.mul(square, square), product]
    });
    last[2]
}

/// AdamW's coefficients in the kind in which the parameter is computed, as in the plain kernel.
struct Coefficients {
    keep: Value,
    weight: Value,
    /// `weight - 1`.
    behind: Value,
    near: Value,
    beta2: Value,
    rest2: Value,
    eps: Value,
    correction2: Value,
    step_size: Value,
    scale: Option<Value>,
}

impl Coefficients {
    /// From the operands at which the count of steps and the options are, and perhaps a factor of
    /// the gradient.
    fn new(g: &mut Grid, dtype: DType, [step, hyper]: [Tensor; 2], scale: Option<Tensor>) -> Self {
        let zero = g.b.long(0);
        let step = g.get(step, zero);
        let [lr, beta1, beta2, eps, decay] = [0, 1, 2, 3, 4].map(|i| {
            let at = g.b.long(i);
            g.get(hyper, at)
        });
        let (one, half) = (g.float(1.0, Kind::F64), g.float(0.5, Kind::F64));
        let (power1, power2) = (power(g, beta1, step), power(g, beta2, step));
        let (rest1, rest2) = (g.sub(one, beta1), g.sub(one, beta2));
        let corrected = g.sub(one, power1);
        let step_size = g.b.divf(lr, corrected);
        let step_size = g.b.arith(Arith::Negf, &[step_size]);
        let corrected = g.sub(one, power2);
        let correction2 = g.b.arith(Arith::Sqrt, &[corrected]);
        let decayed = g.mul(lr, decay);
        let keep = g.sub(one, decayed);
        let near = g.less(rest1, half);
        let weight = g.rounded(rest1, dtype);
        let one = g.float(1.0, wide(dtype));
        let behind = g.sub(weight, one);
        let mut of = |x| g.rounded(x, dtype);
        Coefficients {
            keep: of(keep),
            weight,
            behind,
            near,
            beta2: of(beta2),
            rest2: of(rest2),
            eps: of(eps),
            correction2: of(correction2),
            step_size: of(step_size),
            scale: scale.map(|scale| g.get(scale, zero)),
        }
    }

    /// The new parameter and moments.
    fn update(&self, g: &mut Grid, [p, gradient, m, v]: [Value; 4]) -> [Value; 3] {
        let gradient = match self.scale {
            Some(scale) => g.mul(gradient, scale),
            None => gradient,
        };
        // PyTorch's lerp counts from the nearer end.
        let far = g.sub(gradient, m);
        let share = g.b.select(self.near, self.weight, self.behind);
        let start = g.b.select(self.near, m, gradient);
        let m = g.b.fma(share, far, start);
        let square = g.mul(self.rest2, gradient);
        let v = g.mul(v, self.beta2);
        let v = g.b.fma(square, gradient, v);
        let root = g.b.arith(Arith::Sqrt, &[v]);
        let below = g.b.divf(root, self.correction2);
        let below = g.add(below, self.eps);
        let change = g.mul(self.step_size, m);
        let change = g.b.divf(change, below);
        let p = g.mul(p, self.keep);
        [g.add(p, change), m, v]
    }
}

/// An f32 in the kind in which kernels compute a type.
fn widened(g: &mut Grid, x: Value, dtype: DType) -> Value {
    match wide(dtype) {
        Kind::F64 => g.double(x),
        _ => x,
    }
}

/// AdamW whose moments are decoded, and encoded again after the update.
pub(super) fn adamw_8bit(k: &mut Kernel<'_>) {
    let (n, dtype, has_scale) = (k.x().numel(), k.x().dtype(), k.operands.len() > 8);
    let blocks = n.div_ceil(BLOCK_8BIT);
    k.phase(BLOCK_8BIT as u32, blocks, |g| {
        let maps = [&DYNAMIC, &UNSIGNED].map(|numbers| map(g, numbers));
        g.b.barrier();
        let options = [6, 7].map(|i| g.operand(i));
        let scale = has_scale.then(|| g.operand(8));
        let coefficients = Coefficients::new(g, dtype, options, scale);
        let room = g.shared(BLOCK_8BIT, DType::F32);
        g.parts(blocks, |g, block| {
            let first = g.times(block, BLOCK_8BIT);
            let (i, end) = (g.b.addi(first, g.thread), g.b.long(n));
            let inside = g.less(i, end);
            let nothing = g.float(0.0, Kind::F32);
            let moments = g.choose(inside, &[nothing, nothing], |g| {
                let [p, gradient] = [0, 1].map(|k| {
                    let tensor = g.operand(k);
                    g.get(tensor, i)
                });
                let [m, v] = [0, 1].map(|k| {
                    let (codes, largest) = (g.operand(2 + k), g.operand(4 + k));
                    let (code, largest) = (g.get(codes, i), g.get(largest, block));
                    let number = decoded(g, maps[k], code, largest);
                    widened(g, number, dtype)
                });
                let [p, m, v] = coefficients.update(g, [p, gradient, m, v]);
                let to = g.result(0);
                g.put(to, i, p);
                let narrow = |g: &mut Grid, x: Value| match x.ty().kind() {
                    Some(Kind::F64) => g.b.convert(Convert::Truncf, x, Kind::F32),
                    _ => x,
                };
                vec![narrow(g, m), narrow(g, v)]
            });
            for (k, number) in moments.into_iter().enumerate() {
                let size = g.b.arith(Arith::Absf, &[number]);
                // NaN counts as nothing.
                let counts = g.less(nothing, size);
                let size = g.b.select(counts, size, nothing);
                let largest = g.fold(size, room, 1, |g, a, b| {
                    let is_larger = g.less(a, b);
                    g.b.select(is_larger, b, a)
                });
                let x = g.b.divf(number, largest);
                let code = code(g, maps[k], x);
                let (codes, sizes) = (g.result(1 + k), g.result(3 + k));
                g.when(inside, |g| g.put(codes, i, code));
                g.once(|g| g.put(sizes, block, largest));
            }
        });
    });
}

/// A thread has a byte, whose codes are two numbers.
pub(super) fn nf4(k: &mut Kernel<'_>) {
    let (n, dtype) = (k.y().numel(), k.y().dtype());
    let bytes = n.div_ceil(2);
    let threads = super::THREADS;
    k.phase(threads, bytes.div_ceil(threads.into()), |g| {
        let (numbers, dynamic) = (map(g, &NF4), map(g, &DYNAMIC));
        g.b.barrier();
        g.elements(bytes, |g, at| {
            let [codes, sizes, largest, offset] = [0, 1, 2, 3].map(|i| g.operand(i));
            let [block, _] = g.divided(at, BLOCK_NF4 / 2);
            let [of, _] = g.divided(block, BLOCK_8BIT);
            let (size, largest) = (g.get(sizes, block), g.get(largest, of));
            let size = decoded(g, dynamic, size, largest);
            let (zero, four, low) = (g.b.long(0), g.b.long(4), g.b.long(15));
            let offset = g.get(offset, zero);
            let size = g.add(size, offset);
            let (byte, y, first) = (g.get(codes, at), g.result(0), g.times(at, 2));
            let put = |g: &mut Grid, code: Value, to: Value| {
                let number = decoded(g, numbers, code, size);
                let number = widened(g, number, dtype);
                g.put(y, to, number);
            };
            let code = g.b.shrui(byte, four);
            put(g, code, first);
            let (to, end) = (g.plus(first, 1), g.b.long(n));
            let inside = g.less(to, end);
            let code = g.b.andi(byte, low);
            g.when(inside, |g| put(g, code, to));
        });
    });
}
