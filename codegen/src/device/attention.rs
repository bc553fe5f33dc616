//! Attention. For heads of 64 or 128 bf16 numbers without a mask: the kernels of
//! [`crate::attention`]. For other heads of up to 128 numbers, those of [`tiles`]. Otherwise (f64,
//! wider heads), a block of threads for each query, or for each key. It recomputes scores in every
//! pass and keeps the scores of some keys in shared memory.
//!
//! A query that may use no key gives zeros, a logsumexp of 0 and no gradient. Weights that are
//! dropped are drawn wherever they are computed.

mod tiles;

use super::Kernel;
use super::functions::{any_logarithm, exponential};
use super::grid::{Grid, Tensor};
use super::moves::broadcast;
use crate::attention::{self, How, Sizes};
use crate::kernels::wide;
use crate::mlir::{Arith, Convert, Emit, Kind, Predicate, Value};
use crate::philox::Drops;
use ir::op::attention::{Attending, Beside, Layout};
use ir::op::attrs::{Attention, AttentionRows};
use ir::{DType, TensorType};

/// The number of a block's threads, and of the keys or queries whose scores they keep.
const THREADS: u64 = 128;

/// Attributes, sizes and places of attention of either form.
struct Form {
    causal: bool,
    scale: f64,
    it: Attending,
}

impl Form {
    /// Of `sdpa` or its backward, whose operand `q` is q.
    fn plain(k: &Kernel<'_>, a: &Attention, q: usize) -> Form {
        Form {
            causal: a.causal,
            scale: a.scale,
            it: Attending::plain(k.operands[q].shape(), k.operands[q + 2].shape()),
        }
    }
    /// Of `sdpa_rows` or its backward.
    fn rows(k: &Kernel<'_>, a: &AttentionRows, q: usize) -> Form {
        let shapes = [q, q + 1, q + 2].map(|i| k.operands[i].shape());
        Form {
            causal: a.causal,
            scale: a.scale,
            it: Attending::rows(a, shapes, q).expect("a typed attention should have sizes"),
        }
    }
}

/// A tensor of attention. Out is dout too.
#[derive(Clone, Copy)]
enum Part {
    Q,
    K,
    V,
    Out,
    Dq,
    Dk,
    Dv,
}

/// Where a tensor lies, and its sizes: heads of a sequence, rows of a head, numbers of a row.
struct Place {
    layout: Layout,
    heads: u64,
    rows: u64,
    width: u64,
}

/// Data of all passes.
struct Call<'a> {
    form: &'a Form,
    /// Heads of q over the batch, and the number of them that share a head of k and v.
    heads: u64,
    group: u64,
    queries: u64,
    keys: u64,
    width: u64,
    values: u64,
    /// The number of operand q; k and v follow.
    q: usize,
    mask: Option<Mask>,
    /// The operand that is the dropout key.
    key: Option<usize>,
    /// The type of the computation.
    dtype: DType,
    heads_of_one: u64,
}

/// Numbers that are added to scores, or bools that say which scores count, with strides; or the
/// numbers of documents, whose strides are those of a row and of a token.
struct Mask {
    operand: usize,
    dtype: DType,
    steps: Vec<i64>,
}

impl<'a> Call<'a> {
    /// `q` is the number of operand q, and `from` of the first operand beside the others.
    fn new(k: &Kernel<'_>, form: &'a Form, q: usize, from: usize) -> Call<'a> {
        let s = &form.it.sizes;
        let full = [s.batch, s.heads, s.queries, s.keys];
        let Beside { mask, key } = beside(k, from);
        let mask = mask.map(|operand| {
            let ty: &TensorType = &k.operands[operand];
            Mask {
                operand,
                dtype: ty.dtype(),
                steps: match (ty.dtype(), ty.shape()) {
                    (DType::I64, [1, _]) => vec![0, 1],
                    (DType::I64, _) => vec![s.keys as i64, 1],
                    (_, shape) => broadcast(shape, &full),
                },
            }
        });
        let dtype = match wide(k.operands[q].dtype()) {
            Kind::F64 => DType::F64,
            _ => DType::F32,
        };
        Call {
            form,
            heads: s.batch * s.heads,
            group: s.heads.checked_div(s.groups).unwrap_or(1),
            queries: s.queries,
            keys: s.keys,
            width: s.width,
            values: s.values,
            q,
            mask,
            key,
            dtype,
            heads_of_one: s.heads,
        }
    }

    /// What drops weights, and the factor of the weights that are kept.
    fn drops(&self, g: &mut Grid) -> Option<(Drops, Value)> {
        let of = g.operand(self.key?);
        let numbers = [0, 1, 2, 3].map(|at| {
            let at = g.b.long(at);
            g.get(of, at)
        });
        let drops = Drops::new(&mut g.b, numbers);
        let scale = match self.kind() {
            Kind::F64 => drops.scale,
            _ => g.b.convert(Convert::Truncf, drops.scale, Kind::F32),
        };
        Some((drops, scale))
    }

    /// The factor of a weight: 0 if it is dropped. Both are row numbers, over all heads of q and
    /// of k.
    fn factor(&self, g: &mut Grid, (drops, scale): &(Drops, Value), at: [Value; 2]) -> Value {
        let [query, key] = at;
        let [_, column] = g.divided(key, self.keys);
        let first = g.times(query, self.keys);
        let at = g.b.addi(first, column);
        let keeps = drops.keeps_element(&mut g.b, at);
        let zero = g.float(0.0, self.kind());
        g.b.select(keeps, *scale, zero)
    }

    /// Where a tensor lies.
    fn place(&self, part: Part) -> Place {
        let it = &self.form.it;
        let (layout, is_of_keys, width) = match part {
            Part::Q => (it.qkv[0], false, self.width),
            Part::K => (it.qkv[1], true, self.width),
            Part::V => (it.qkv[2], true, self.values),
            Part::Out => (it.out, false, self.values),
            Part::Dq => (it.gradients[0], false, self.width),
            Part::Dk => (it.gradients[1], true, self.width),
            Part::Dv => (it.gradients[2], true, self.values),
        };
        let (heads, rows) = match is_of_keys {
            true => (it.sizes.groups, self.keys),
            false => (it.sizes.heads, self.queries),
        };
        Place {
            layout,
            heads,
            rows,
            width,
        }
    }

    /// The first number of a row, which is counted over all heads.
    fn at(&self, g: &mut Grid, part: Part, row: Value) -> Value {
        let Place {
            layout,
            heads,
            rows,
            width,
        } = self.place(part);
        if layout == Layout::of_heads(heads, rows, width) {
            return g.times(row, width);
        }
        let [head, row] = g.divided(row, rows);
        let [batch, head] = g.divided(head, heads);
        let steps = [layout.batch, layout.head, layout.row].map(|step| step as i64);
        g.offset(&[batch, head, row], &steps, layout.first as i64)
    }

    /// Results dq, dk and dv.
    fn gradient(&self, g: &Grid, i: usize) -> Tensor {
        g.result(if self.form.it.is_joint { 0 } else { i })
    }

    fn kind(&self) -> Kind {
        wide(self.dtype)
    }

    /// The product of two rows of `n` numbers.
    fn dot(&self, g: &mut Grid, [x, y]: [(Tensor, Value); 2], n: u64) -> Value {
        let start = g.float(0.0, self.kind());
        let sum = g.count(n, &[start], |g, i, sum| {
            let [x, y] = [x, y].map(|(of, first)| {
                let at = g.b.addi(first, i);
                g.get(of, at)
            });
            vec![g.b.fma(x, y, sum[0])]
        });
        sum[0]
    }

    /// The score of a query and a key, and whether the score counts. Both are row numbers, over all
    /// heads of q and of k.
    fn score(&self, g: &mut Grid, query: Value, key: Value) -> Value {
        let (q, k) = (g.operand(self.q), g.operand(self.q + 1));
        let (from_q, from_k) = (self.at(g, Part::Q, query), self.at(g, Part::K, key));
        let score = self.dot(g, [(q, from_q), (k, from_k)], self.width);
        let scale = g.float(self.form.scale, self.kind());
        let score = g.mul(score, scale);
        let Some(mask) = &self.mask else {
            return score;
        };
        let [head, row] = g.divided(query, self.queries);
        let [batch, head] = g.divided(head, self.heads_of_one);
        let [_, column] = g.divided(key, self.keys);
        let of = g.operand(mask.operand);
        if mask.dtype == DType::I64 {
            let [own, other] = [row, column].map(|token| {
                let at = g.offset(&[batch, token], &mask.steps, 0);
                g.get(of, at)
            });
            let lowest = self.lowest(g);
            let is_same = g.b.compare(Predicate::Eq, own, other);
            return g.b.select(is_same, score, lowest);
        }
        let at = g.offset(&[batch, head, row, column], &mask.steps, 0);
        let given = g.get(of, at);
        if mask.dtype == DType::Bool {
            let (zero, lowest) = (g.b.long(0), self.lowest(g));
            let takes_part = g.b.compare(Predicate::Ne, given, zero);
            return g.b.select(takes_part, score, lowest);
        }
        g.add(score, given)
    }

    fn lowest(&self, g: &mut Grid) -> Value {
        g.float(f64::NEG_INFINITY, self.kind())
    }

    /// e^x; 0 of minus infinity.
    fn exp(&self, g: &mut Grid, x: Value) -> Value {
        if self.dtype == DType::F64 {
            return exponential(g, x);
        }
        let x = g.double(x);
        let y = exponential(g, x);
        g.rounded(y, self.dtype)
    }

    /// The number of keys that a query may use.
    fn reach(&self, g: &mut Grid, query: Value) -> Value {
        let keys = g.b.long(self.keys);
        if !self.form.causal {
            return keys;
        }
        let [_, row] = g.divided(query, self.queries);
        let own = g.plus(row, 1);
        g.b.minui(own, keys)
    }

    /// The first row of k for a query's head.
    fn first_key(&self, g: &mut Grid, query: Value) -> Value {
        let [head, _] = g.divided(query, self.queries);
        let [head, _] = g.divided(head, self.group);
        g.times(head, self.keys)
    }

    /// The number of rounds for a thread's columns of `n`.
    fn rounds(n: u64) -> u64 {
        n.div_ceil(THREADS)
    }

    /// Adds the products of `some` numbers in shared memory and rows of a tensor to a thread's
    /// columns of `n`. Number `i` has the row `row`.
    fn gathered(
        &self,
        g: &mut Grid,
        sums: &[Value],
        (factors, of, part): (Tensor, Tensor, Part),
        n: u64,
        some: Value,
        row: impl FnOnce(&mut Grid, Value) -> Value,
    ) -> Vec<Value> {
        let [zero, one] = [0, 1].map(|i| g.b.long(i));
        g.repeat([zero, some, one], sums, |g, i, sums| {
            let (factor, row) = (g.get(factors, i), row(g, i));
            let first = self.at(g, part, row);
            let mut next = vec![];
            for (round, &sum) in sums.iter().enumerate() {
                let column = g.plus(g.thread, (round as u64 * THREADS) as i64);
                let inside = g.below(column, n);
                let sum = g.choose(inside, &[sum], |g| {
                    let at = g.b.addi(first, column);
                    let x = g.get(of, at);
                    vec![g.b.fma(factor, x, sum)]
                });
                next.push(sum[0]);
            }
            next
        })
    }

    /// Writes a thread's columns of a row of `n`, times a factor.
    fn write(
        &self,
        g: &mut Grid,
        sums: &[Value],
        (to, part, row): (Tensor, Part, Value),
        n: u64,
        factor: Value,
    ) {
        let first = self.at(g, part, row);
        for (round, &sum) in sums.iter().enumerate() {
            let column = g.plus(g.thread, (round as u64 * THREADS) as i64);
            let inside = g.below(column, n);
            let x = g.mul(sum, factor);
            g.when(inside, |g| {
                let at = g.b.addi(first, column);
                g.put(to, at, x);
            });
        }
    }

    fn zeros(&self, g: &mut Grid, n: u64) -> Vec<Value> {
        let zero = g.float(0.0, self.kind());
        vec![zero; Self::rounds(n) as usize]
    }
}

/// The operands of attention from number `from` on.
fn beside(k: &Kernel<'_>, from: usize) -> Beside {
    Beside::of(from, &k.operands[from..])
}

/// The size of heads and the other sizes, if kernels for tensor cores exist.
fn by_tensor_cores(k: &Kernel<'_>, form: &Form, q: usize, from: usize) -> Option<(u32, Sizes)> {
    let s = &form.it.sizes;
    let fits = form
        .it
        .on_tensor_cores(k.operands[q].dtype(), beside(k, from));
    fits.then(|| {
        let sizes = Sizes {
            heads: (s.batch * s.heads) as u32,
            group: (s.heads / s.groups) as u32,
            queries: s.queries as u32,
            keys: s.keys as u32,
            scale: form.scale as f32,
        };
        (s.width as u32, sizes)
    })
}

pub(super) fn sdpa(k: &mut Kernel<'_>, a: &Attention) {
    let form = Form::plain(k, a, 0);
    attend(k, &form);
}

pub(super) fn sdpa_rows(k: &mut Kernel<'_>, a: &AttentionRows) {
    let form = Form::rows(k, a, 0);
    attend(k, &form);
}

fn attend(k: &mut Kernel<'_>, form: &Form) {
    if let Some((head_size, sizes)) = by_tensor_cores(k, form, 0, 3) {
        let how = How {
            causal: form.causal,
            drops: beside(k, 3).key.is_some(),
        };
        let phases = attention::phases(false, head_size, (how, &form.it), &sizes, super::symbol);
        return k.attend(phases);
    }
    let call = Call::new(k, form, 0, 3);
    if tiles::fit(&call) {
        return tiles::attend(k, &call);
    }
    let parts = call.heads * call.queries;
    k.phase(THREADS as u32, parts, |g| {
        g.parts(parts, |g, query| forward(g, &call, query));
    });
}

/// A query: the largest of its scores, then exponentials and their products with values.
fn forward(g: &mut Grid, call: &Call<'_>, query: Value) {
    let room = g.shared(THREADS, call.dtype);
    let (reach, first) = (call.reach(g, query), call.first_key(g, query));
    let (lowest, threads) = (call.lowest(g), g.b.long(THREADS));
    let largest = g.repeat([g.thread, reach, threads], &[lowest], |g, i, most| {
        let key = g.b.addi(first, i);
        let score = call.score(g, query, key);
        vec![larger(g, most[0], score)]
    });
    let max = g.fold(largest[0], room, 1, larger);
    let none = g.equal(max, lowest);
    let zero = g.float(0.0, call.kind());
    let shift = g.b.select(none, zero, max);

    let drops = call.drops(g);
    let starts = [call.zeros(g, call.values), vec![zero]].concat();
    let from = g.b.long(0);
    let last = g.repeat([from, reach, threads], &starts, |g, at, values| {
        let (own, keys) = (g.b.addi(at, g.thread), g.b.subi(reach, at));
        let inside = g.less(own, reach);
        let both = g.choose(inside, &[zero, zero], |g| {
            let key = g.b.addi(first, own);
            let score = call.score(g, query, key);
            let below = g.sub(score, shift);
            let p = call.exp(g, below);
            let used = match &drops {
                Some(drops) => {
                    let factor = call.factor(g, drops, [query, key]);
                    g.mul(p, factor)
                }
                None => p,
            };
            vec![p, used]
        });
        let [p, used] = [both[0], both[1]];
        g.put(room, g.thread, used);
        g.b.barrier();
        let (sums, sum) = values.split_at(values.len() - 1);
        let (some, v) = (g.b.minui(keys, threads), g.operand(2));
        let mut next = call.gathered(g, sums, (room, v, Part::V), call.values, some, |g, i| {
            let key = g.b.addi(at, i);
            g.b.addi(first, key)
        });
        g.b.barrier();
        next.push(g.add(sum[0], p));
        next
    });
    let (sums, sum) = last.split_at(last.len() - 1);
    let sum = g.total(sum[0], room);
    let one = g.float(1.0, call.kind());
    let inverse = g.b.divf(one, sum);
    let inverse = g.b.select(none, zero, inverse);
    let out = g.result(0);
    call.write(g, sums, (out, Part::Out, query), call.values, inverse);
    g.once(|g| {
        let [sum, max] = [sum, max].map(|x| g.double(x));
        let log = any_logarithm(g, sum);
        let log = g.add(max, log);
        let log = g.rounded(log, DType::F32);
        let nothing = g.float(0.0, Kind::F32);
        let log = g.b.select(none, nothing, log);
        let lse = g.result(1);
        g.put(lse, query, log);
    });
}

/// The larger; NaN if one is NaN.
fn larger(g: &mut Grid, a: Value, b: Value) -> Value {
    g.b.arith(Arith::Maximumf, &[a, b])
}

pub(super) fn sdpa_bwd(k: &mut Kernel<'_>, a: &Attention) {
    let form = Form::plain(k, a, 1);
    derive(k, &form);
}

pub(super) fn sdpa_rows_bwd(k: &mut Kernel<'_>, a: &AttentionRows) {
    let form = Form::rows(k, a, 1);
    derive(k, &form);
}

fn derive(k: &mut Kernel<'_>, form: &Form) {
    if let Some((head_size, sizes)) = by_tensor_cores(k, form, 1, 6) {
        let how = How {
            causal: form.causal,
            drops: beside(k, 6).key.is_some(),
        };
        let phases = attention::phases(true, head_size, (how, &form.it), &sizes, super::symbol);
        return k.attend(phases);
    }
    let call = Call::new(k, form, 1, 6);
    if tiles::fit(&call) {
        return tiles::derive(k, &call);
    }
    let parts = call.heads * call.queries;
    k.phase(THREADS as u32, parts, |g| {
        g.parts(parts, |g, query| of_query(g, &call, query));
    });
    let parts = call.heads / call.group * call.keys;
    k.phase(THREADS as u32, parts, |g| {
        g.parts(parts, |g, key| of_key(g, &call, key));
    });
}

impl Call<'_> {
    /// The weight of a query's key, as values are multiplied with it, and the gradient of their
    /// unscaled score. `delta` is the sum over the query's dout · out.
    fn gradients(
        &self,
        g: &mut Grid,
        drops: Option<&(Drops, Value)>,
        [query, key]: [Value; 2],
        delta: Value,
    ) -> [Value; 2] {
        let (dout, v, lse) = (g.operand(0), g.operand(3), g.operand(5));
        let score = self.score(g, query, key);
        let log = g.get(lse, query);
        let log = if self.dtype == DType::F64 {
            g.double(log)
        } else {
            log
        };
        let below = g.sub(score, log);
        let p = self.exp(g, below);
        let (from_out, from_v) = (self.at(g, Part::Out, query), self.at(g, Part::V, key));
        let mut dp = self.dot(g, [(dout, from_out), (v, from_v)], self.values);
        let mut used = p;
        if let Some(drops) = drops {
            let factor = self.factor(g, drops, [query, key]);
            [used, dp] = [p, dp].map(|x| g.mul(x, factor));
        }
        let less = g.sub(dp, delta);
        [used, g.mul(p, less)]
    }

    /// The sum over a query's dout · out.
    fn delta(&self, g: &mut Grid, query: Value) -> Value {
        let (dout, out) = (g.operand(0), g.operand(4));
        let from = self.at(g, Part::Out, query);
        self.dot(g, [(dout, from), (out, from)], self.values)
    }
}

/// dq of a query.
fn of_query(g: &mut Grid, call: &Call<'_>, query: Value) {
    let room = g.shared(THREADS, call.dtype);
    let (reach, first) = (call.reach(g, query), call.first_key(g, query));
    let (delta, drops) = (call.delta(g, query), call.drops(g));
    let (zero, threads) = (g.float(0.0, call.kind()), g.b.long(THREADS));
    let (from, starts) = (g.b.long(0), call.zeros(g, call.width));
    let sums = g.repeat([from, reach, threads], &starts, |g, at, sums| {
        let (own, keys) = (g.b.addi(at, g.thread), g.b.subi(reach, at));
        let inside = g.less(own, reach);
        let ds = g.choose(inside, &[zero], |g| {
            let key = g.b.addi(first, own);
            vec![call.gradients(g, drops.as_ref(), [query, key], delta)[1]]
        });
        g.put(room, g.thread, ds[0]);
        g.b.barrier();
        let (some, k) = (g.b.minui(keys, threads), g.operand(2));
        let sums = call.gathered(g, sums, (room, k, Part::K), call.width, some, |g, i| {
            let key = g.b.addi(at, i);
            g.b.addi(first, key)
        });
        g.b.barrier();
        sums
    });
    let (scale, dq) = (g.float(call.form.scale, call.kind()), call.gradient(g, 0));
    call.write(g, &sums, (dq, Part::Dq, query), call.width, scale);
}

/// dk and dv of a key: over the queries of all heads that use it.
fn of_key(g: &mut Grid, call: &Call<'_>, key: Value) {
    let rooms = [(); 2].map(|()| g.shared(THREADS, call.dtype));
    let [head, column] = g.divided(key, call.keys);
    let n = call.group * call.queries;
    let first = g.times(head, n);
    let zero = g.float(0.0, call.kind());
    let starts = [call.zeros(g, call.width), call.zeros(g, call.values)].concat();
    let n_keys = Call::rounds(call.width) as usize;
    let [from, all, threads] = [0, n, THREADS].map(|i| g.b.long(i));
    let drops = call.drops(g);
    let sums = g.repeat([from, all, threads], &starts, |g, at, sums| {
        let (own, left) = (g.b.addi(at, g.thread), g.b.subi(all, at));
        let mut inside = g.less(own, all);
        let query = g.b.addi(first, own);
        if call.form.causal {
            let [_, row] = g.divided(query, call.queries);
            let sees = g.b.compare(Predicate::Sle, column, row);
            inside = g.b.andi(inside, sees);
        }
        let [p, ds] = {
            let both = g.choose(inside, &[zero, zero], |g| {
                let delta = call.delta(g, query);
                call.gradients(g, drops.as_ref(), [query, key], delta)
                    .to_vec()
            });
            [both[0], both[1]]
        };
        g.put(rooms[0], g.thread, ds);
        g.put(rooms[1], g.thread, p);
        g.b.barrier();
        let (some, q, dout) = (g.b.minui(left, threads), g.operand(1), g.operand(0));
        let row = |g: &mut Grid, i| {
            let query = g.b.addi(at, i);
            g.b.addi(first, query)
        };
        let (dk, dv) = sums.split_at(n_keys);
        let dk = call.gathered(g, dk, (rooms[0], q, Part::Q), call.width, some, row);
        let dv = call.gathered(g, dv, (rooms[1], dout, Part::Out), call.values, some, row);
        g.b.barrier();
        [dk, dv].concat()
    });
    let (dk, dv) = sums.split_at(n_keys);
    let [scale, one] = [call.form.scale, 1.0].map(|x| g.float(x, call.kind()));
    let [to_k, to_v] = [1, 2].map(|j| call.gradient(g, j));
    call.write(g, dk, (to_k, Part::Dk, key), call.width, scale);
    call.write(g, dv, (to_v, Part::Dv, key), call.values, one);
}
