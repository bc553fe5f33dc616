//! Random runs of every kernel: small shapes, odd sizes and sizes of 0, broadcast operands, every
//! element type.

use artifact::{Attr, DType};
use lighterage_runtime::kernels::owned::OwnedTensor;

/// More scratch than any case needs.
pub(crate) const SCRATCH_BYTES: u64 = 1 << 22;

/// One run.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) op: &'static str,
    pub(crate) attrs: Vec<(String, Attr)>,
    pub(crate) ins: Vec<OwnedTensor>,
    pub(crate) outs: Vec<(DType, Vec<usize>)>,
}

impl Case {
    /// An attribute that is a list.
    pub(crate) fn list(&self, key: &str) -> Vec<i64> {
        match self.attrs.iter().find(|(name, _)| name == key) {
            Some((_, Attr::Ints(list))) => list.clone(),
            other => panic!("{key} should be a list, not {other:?}"),
        }
    }
}

/// Random numbers from a seed (splitmix64).
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    /// A number in `0..n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    pub(crate) fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }
    pub(crate) fn flag(&mut self) -> bool {
        self.below(2) == 1
    }
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
    fn size(&mut self) -> usize {
        // Now and then nothing, and now and then more than one block of 256.
        self.pick(&[0, 1, 1, 2, 2, 3, 3, 4, 5, 5, 7, 7, 9, 16, 17, 17, 300])
    }
    /// A shape of at most a few thousand elements.
    fn shape(&mut self, rank: usize) -> Vec<usize> {
        loop {
            let shape: Vec<usize> = (0..rank).map(|_| self.size()).collect();
            if shape.iter().product::<usize>() <= 4000 {
                return shape;
            }
        }
    }
    fn any_shape(&mut self) -> Vec<usize> {
        let rank = self.below(5);
        self.shape(rank)
    }
    /// A shape that broadcasts to `shape`.
    fn narrower(&mut self, shape: &[usize]) -> Vec<usize> {
        let cut = self.below(shape.len() + 1);
        let cut = if self.flag() { 0 } else { cut };
        shape[cut..]
            .iter()
            .map(|&d| if self.below(3) == 0 { 1 } else { d })
            .collect()
    }
    fn float(&mut self) -> DType {
        self.pick(&[DType::F32, DType::F32, DType::F64, DType::BF16, DType::F16])
    }
    fn integer(&mut self) -> DType {
        self.pick(&[DType::I64, DType::I32, DType::I16, DType::I8, DType::U8])
    }
    fn number(&mut self) -> DType {
        if self.flag() {
            self.float()
        } else {
            self.integer()
        }
    }
    fn any_type(&mut self) -> DType {
        if self.below(6) == 0 {
            DType::Bool
        } else {
            self.number()
        }
    }
    fn index_type(&mut self) -> DType {
        self.pick(&[DType::I64, DType::I32])
    }
    /// Floating-point numbers in -2..2, integers in -9..=9.
    pub(crate) fn tensor(&mut self, dtype: DType, shape: &[usize]) -> OwnedTensor {
        let n: usize = shape.iter().product();
        if is_float(dtype) {
            let numbers: Vec<f64> = (0..n).map(|_| 4.0 * self.unit() - 2.0).collect();
            return OwnedTensor::from_f64s(dtype, shape, &numbers);
        }
        let low = if matches!(dtype, DType::U8 | DType::Bool) {
            0
        } else {
            -9
        };
        let high = if dtype == DType::Bool { 1 } else { 9 };
        let numbers: Vec<i64> = (0..n)
            .map(|_| low + self.below((high - low + 1) as usize) as i64)
            .collect();
        OwnedTensor::from_i64s(dtype, shape, &numbers)
    }
    /// Numbers in 0.1..2.1.
    fn positive(&mut self, dtype: DType, shape: &[usize]) -> OwnedTensor {
        let numbers: Vec<f64> = (0..shape.iter().product())
            .map(|_| 2.0 * self.unit() + 0.1)
            .collect();
        OwnedTensor::from_f64s(dtype, shape, &numbers)
    }
    /// Integers in `0..n`.
    fn indices(&mut self, dtype: DType, shape: &[usize], n: usize) -> OwnedTensor {
        let numbers: Vec<i64> = (0..shape.iter().product())
            .map(|_| self.below(n) as i64)
            .collect();
        OwnedTensor::from_i64s(dtype, shape, &numbers)
    }
    /// A number that an element type can hold.
    fn scalar(&mut self, dtype: DType) -> Attr {
        match dtype {
            DType::Bool => Attr::Int(self.below(2) as i64),
            _ if is_float(dtype) => Attr::Float(self.pick(&[-1.5, 0.25, 0.5, 2.0])),
            DType::U8 => Attr::Int(self.below(9) as i64),
            _ => Attr::Int(self.below(9) as i64 - 4),
        }
    }
    /// Some distinct dimensions, sorted.
    fn dims(&mut self, rank: usize) -> Vec<i64> {
        (0..rank as i64).filter(|_| self.flag()).collect()
    }
}

pub(crate) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}
pub(crate) fn statistics(dtype: DType) -> DType {
    if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    }
}
fn ints(list: &[usize]) -> Attr {
    Attr::Ints(list.iter().map(|&d| d as i64).collect())
}

/// A run of a random kernel.
pub(crate) fn case(rng: &mut Rng) -> Case {
    let kernels = lighterage_runtime::kernels::KERNELS;
    let op = kernels[rng.below(kernels.len())].name;
    case_of(op, rng)
}

/// Attributes of a run, in any order.
type Attrs = Vec<(&'static str, Attr)>;
/// Types of a run's results.
type Outs = Vec<(DType, Vec<usize>)>;

/// The parts of a run.
struct Drawn {
    attrs: Attrs,
    ins: Vec<OwnedTensor>,
    outs: Outs,
}

/// A run of kernel `op`.
pub(crate) fn case_of(op: &'static str, rng: &mut Rng) -> Case {
    let mut drawn = match op {
        "log" | "sqrt" | "rsqrt" | "reciprocal" => positive_functions(rng),
        "exp" | "tanh" | "sigmoid" | "sin" | "cos" | "atan" | "erf" | "silu" | "gelu"
        | "div_scalar" => functions(op, rng),
        "neg" | "abs" | "sign" | "relu" | "clamp" | "add_scalar" | "mul_scalar" | "rsub_scalar" => {
            signed_functions(op, rng)
        }
        "pow_scalar" => power(rng),
        "bitwise_not" => bitwise_not(rng),
        "logical_not" | "eq_scalar" | "ne_scalar" | "lt_scalar" | "le_scalar" | "gt_scalar"
        | "ge_scalar" => comparisons_with_a_number(op, rng),
        "cast" => cast(rng),
        "add" | "mul" | "sub" | "maximum" | "minimum" | "div" | "pow" | "bitwise_and"
        | "bitwise_or" | "bitwise_xor" | "eq" | "ne" | "lt" | "le" | "gt" | "ge"
        | "logical_and" | "logical_or" => two_operands(op, rng),
        "where" => choice(rng),
        "tanh_bwd" | "sigmoid_bwd" | "silu_bwd" | "gelu_bwd" | "threshold_bwd" => {
            derivatives(op, rng)
        }
        "sum" | "mean" | "amax" | "amin" | "any" => reductions(op, rng),
        "cumsum" | "softmax" | "log_softmax" | "softmax_bwd" | "log_softmax_bwd" | "topk" => {
            along_a_dimension(op, rng)
        }
        "layer_norm" | "layer_norm_bwd" => layer_norm(op, rng),
        "batch_norm" | "batch_norm_bwd" => batch_norm(op, rng),
        "matmul" | "addmm" | "matmul_sum" => product(op, rng),
        "grouped_matmul" | "grouped_outer" => grouped(op, rng),
        "convolution" | "convolution_bwd" => convolution(op, rng),
        "max_pool2d" => max_pool(rng),
        "max_pool2d_bwd" => max_pool_bwd(rng),
        "sdpa" | "sdpa_bwd" | "sdpa_rows" | "sdpa_rows_bwd" => {
            let sizes = [2, 2, 40, 7, 19, 18].map(|n| 1 + rng.below(n));
            return attention(op, rng, sizes);
        }
        "embedding" | "embedding_bwd" => embedding(op, rng),
        "nll_sum" => nll_sum(rng),
        "nll_loss" | "nll_loss_bwd" => nll_loss(op, rng),
        "gather" | "scatter" | "scatter_add" | "scatter_value" => gather_and_scatter(op, rng),
        "index" | "index_put" => index(op, rng),
        "permute" | "flip" | "expand" => rearranged(op, rng),
        "slice" | "slice_scatter" => slice(op, rng),
        "cat" => cat(rng),
        "pad" => pad(rng),
        "full" => full(rng),
        "arange" => arange(rng),
        "rand" | "randn" => random(rng),
        "dropout" => dropout(rng),
        "dropout_key" => dropout_key(rng),
        "round_random" => round_random(rng),
        "dropout_bwd" => dropout_bwd(rng),
        "rng_next" => rng_next(rng),
        "sum_squares" => sum_squares(rng),
        "clip_scale" => clip_scale(rng),
        "adamw" | "adamw_split" | "adamw_8bit" => adamw(op, rng),
        "nf4" => nf4(rng),
        "sgd" | "sgd_momentum" => sgd(op, rng),
        other => panic!("runtime/tests/kernels/generate.rs draws no operands for {other}"),
    };
    let is_update = op.starts_with("adamw") || op.starts_with("sgd");
    if is_update && rng.flag() {
        let wide = statistics(drawn.outs[0].0);
        drawn.ins.push(OwnedTensor::from_f64s(wide, &[], &[0.375]));
    }
    drawn.attrs.sort_by_key(|(key, _)| *key);
    Case {
        op,
        attrs: drawn
            .attrs
            .into_iter()
            .map(|(k, a)| (k.to_string(), a))
            .collect(),
        ins: drawn.ins,
        outs: drawn.outs,
    }
}

/// The results that a mask asks for.
fn wanted(all: [(DType, Vec<usize>); 3], mask: [usize; 3]) -> Outs {
    let results = all.into_iter().zip(mask);
    results
        .filter(|(_, m)| *m == 1)
        .map(|(out, _)| out)
        .collect()
}

fn positive_functions(rng: &mut Rng) -> Drawn {
    let (t, s) = (rng.float(), rng.any_shape());
    let ins: Vec<OwnedTensor> = vec![rng.positive(t, &s)];
    let outs: Outs = vec![(t, s)];
    Drawn {
        attrs: vec![],
        ins,
        outs,
    }
}

fn functions(op: &str, rng: &mut Rng) -> Drawn {
    let mut attrs: Attrs = vec![];
    let (t, s) = (rng.float(), rng.any_shape());
    match op {
        "gelu" => attrs.push(("tanh", Attr::Bool(rng.flag()))),
        "div_scalar" => attrs.push(("value", rng.scalar(t))),
        _ => {}
    }
    let ins: Vec<OwnedTensor> = vec![rng.tensor(t, &s)];
    let outs: Outs = vec![(t, s)];
    Drawn { attrs, ins, outs }
}

fn signed_functions(op: &str, rng: &mut Rng) -> Drawn {
    let mut attrs: Attrs = vec![];
    let (t, s) = (rng.number(), rng.any_shape());
    match op {
        "clamp" if is_float(t) => {
            attrs = vec![("max", Attr::Float(0.5)), ("min", Attr::Float(-1.0))]
        }
        "clamp" => attrs = vec![("max", Attr::Float(f64::INFINITY)), ("min", Attr::Int(3))],
        _ if op.ends_with("scalar") => attrs.push(("value", rng.scalar(t))),
        _ => {}
    }
    let ins: Vec<OwnedTensor> = vec![rng.tensor(t, &s)];
    let outs: Outs = vec![(t, s)];
    Drawn { attrs, ins, outs }
}

fn power(rng: &mut Rng) -> Drawn {
    let (t, s) = (rng.number(), rng.any_shape());
    let power = rng.pick(&[2.0, 3.0, 0.5, -0.5, -1.0, -2.0, 1.3, 0.0]);
    let integer = Attr::Int(rng.below(5) as i64);
    let ins: Vec<OwnedTensor> = vec![if is_float(t) {
        rng.positive(t, &s)
    } else {
        rng.tensor(t, &s)
    }];
    let attrs: Attrs = vec![(
        "value",
        if is_float(t) {
            Attr::Float(power)
        } else {
            integer
        },
    )];
    let outs: Outs = vec![(t, s)];
    Drawn { attrs, ins, outs }
}

fn bitwise_not(rng: &mut Rng) -> Drawn {
    let t = if rng.flag() {
        DType::Bool
    } else {
        rng.integer()
    };
    let s = rng.any_shape();
    let ins: Vec<OwnedTensor> = vec![rng.tensor(t, &s)];
    let outs: Outs = vec![(t, s)];
    Drawn {
        attrs: vec![],
        ins,
        outs,
    }
}

fn comparisons_with_a_number(op: &str, rng: &mut Rng) -> Drawn {
    let mut attrs: Attrs = vec![];
    let (t, s) = (rng.any_type(), rng.any_shape());
    if op != "logical_not" {
        attrs.push(("value", rng.scalar(t)));
    }
    let ins: Vec<OwnedTensor> = vec![rng.tensor(t, &s)];
    let outs: Outs = vec![(DType::Bool, s)];
    Drawn { attrs, ins, outs }
}

fn cast(rng: &mut Rng) -> Drawn {
    let (from, to, s) = (rng.any_type(), rng.any_type(), rng.any_shape());
    let attrs: Attrs = vec![("dtype", Attr::Type(to))];
    // Negative numbers do not fit u8.
    let ins: Vec<OwnedTensor> = vec![if is_float(from) {
        rng.positive(from, &s)
    } else {
        rng.tensor(from, &s)
    }];
    let outs: Outs = vec![(to, s)];
    Drawn { attrs, ins, outs }
}

fn two_operands(op: &str, rng: &mut Rng) -> Drawn {
    let t = match op {
        "sub" => rng.number(),
        "div" | "pow" => rng.float(),
        _ if op.starts_with("bitwise") => rng.pick(&[DType::Bool, DType::U8, DType::I32]),
        _ => rng.any_type(),
    };
    let s = rng.any_shape();
    let (mut a, mut b) = (rng.narrower(&s), rng.narrower(&s));
    if rng.flag() {
        (a, b) = (s.clone(), if rng.flag() { s.clone() } else { b });
    }
    let ins: Vec<OwnedTensor> = match op {
        "pow" => vec![rng.positive(t, &a), rng.tensor(t, &b)],
        "div" => vec![rng.tensor(t, &a), rng.positive(t, &b)],
        _ => vec![rng.tensor(t, &a), rng.tensor(t, &b)],
    };
    let boolean = matches!(
        op,
        "eq" | "ne" | "lt" | "le" | "gt" | "ge" | "logical_and" | "logical_or"
    );
    let outs: Outs = vec![(if boolean { DType::Bool } else { t }, broadcast(&[&a, &b]))];
    Drawn {
        attrs: vec![],
        ins,
        outs,
    }
}

fn choice(rng: &mut Rng) -> Drawn {
    let (t, s) = (rng.any_type(), rng.any_shape());
    let shapes = [
        rng.narrower(&s),
        rng.narrower(&s),
        if rng.flag() {
            s.clone()
        } else {
            rng.narrower(&s)
        },
    ];
    let ins: Vec<OwnedTensor> = vec![
        rng.tensor(DType::Bool, &shapes[0]),
        rng.tensor(t, &shapes[1]),
        rng.tensor(t, &shapes[2]),
    ];
    let outs: Outs = vec![(t, broadcast(&[&shapes[0], &shapes[1], &shapes[2]]))];
    Drawn {
        attrs: vec![],
        ins,
        outs,
    }
}

fn derivatives(op: &str, rng: &mut Rng) -> Drawn {
    let mut attrs: Attrs = vec![];
    let (t, s) = (rng.float(), rng.any_shape());
    match op {
        "gelu_bwd" => attrs.push(("tanh", Attr::Bool(rng.flag()))),
        "threshold_bwd" => attrs.push(("value", Attr::Float(0.5))),
        _ => {}
    }
    let ins: Vec<OwnedTensor> = vec![rng.tensor(t, &s), rng.tensor(t, &s)];
    let outs: Outs = vec![(t, s)];
    Drawn { attrs, ins, outs }
}

fn reductions(op: &str, rng: &mut Rng) -> Drawn {
    let t = match op {
        "sum" => rng.number(),
        "mean" => rng.float(),
        _ => rng.any_type(),
    };
    let mut s = rng.any_shape();
    if op.starts_with("am") {
        s.iter_mut().for_each(|d| *d = (*d).max(1));
    }
    let (dims, keep) = (rng.dims(s.len()), rng.flag());
    let kept =
        s.iter()
            .enumerate()
            .filter_map(|(d, &size)| match (dims.contains(&(d as i64)), keep) {
                (false, _) => Some(size),
                (true, true) => Some(1),
                (true, false) => None,
            });
    let outs: Outs = vec![(if op == "any" { DType::Bool } else { t }, kept.collect())];
    let attrs: Attrs = vec![("dims", Attr::Ints(dims)), ("keepdim", Attr::Bool(keep))];
    let ins: Vec<OwnedTensor> = vec![rng.tensor(t, &s)];
    Drawn { attrs, ins, outs }
}

fn along_a_dimension(op: &str, rng: &mut Rng) -> Drawn {
    let t = if matches!(op, "cumsum" | "topk") {
        rng.number()
    } else {
        rng.float()
    };
    let rank = 1 + rng.below(3);
    let mut s = rng.shape(rank);
    let dim = rng.below(rank);
    let mut attrs: Attrs = vec![("dim", Attr::Int(dim as i64))];
    let mut ins: Vec<OwnedTensor> = vec![rng.tensor(t, &s)];
    if op.ends_with("bwd") {
        ins.push(rng.tensor(t, &s));
    }
    let outs: Outs = if op == "topk" {
        let k = rng.below(s[dim] + 1);
        attrs.extend([
            ("k", Attr::Int(k as i64)),
            ("largest", Attr::Bool(rng.flag())),
        ]);
        s[dim] = k;
        vec![(t, s.clone()), (DType::I64, s)]
    } else {
        vec![(t, s)]
    };
    Drawn { attrs, ins, outs }
}

fn layer_norm(op: &str, rng: &mut Rng) -> Drawn {
    let mut ins: Vec<OwnedTensor> = vec![];
    let t = rng.float();
    let rank = 1 + rng.below(3);
    let mut s = rng.shape(rank);
    let dims = 1 + rng.below(rank);
    s[rank - dims..].iter_mut().for_each(|d| *d = (*d).max(1));
    let (lead, norm) = s.split_at(rank - dims);
    let stats: Vec<usize> = lead.iter().copied().chain(norm.iter().map(|_| 1)).collect();
    let mut attrs: Attrs = vec![("dims", Attr::Int(dims as i64))];
    let parameters = rng.below(3);
    let outs: Outs = if op == "layer_norm" {
        attrs.push(("eps", Attr::Float(1e-2)));
        ins.push(rng.tensor(t, &s));
        (0..parameters).for_each(|_| ins.push(rng.tensor(t, norm)));
        vec![
            (t, s.clone()),
            (statistics(t), stats.clone()),
            (statistics(t), stats),
        ]
    } else {
        let mask = rng.pick(&[[1, 1, 1], [1, 0, 0], [0, 1, 1], [0, 0, 1], [1, 0, 1]]);
        attrs.push(("mask", ints(&mask)));
        ins = vec![rng.tensor(t, &s), rng.tensor(t, &s)];
        ins.extend([
            rng.tensor(statistics(t), &stats),
            rng.positive(statistics(t), &stats),
        ]);
        if parameters != 0 {
            ins.push(rng.tensor(t, norm));
        }
        let all = [(t, s.clone()), (t, norm.to_vec()), (t, norm.to_vec())];
        wanted(all, mask)
    };
    Drawn { attrs, ins, outs }
}

fn batch_norm(op: &str, rng: &mut Rng) -> Drawn {
    let mut attrs: Attrs = vec![];
    let mut ins: Vec<OwnedTensor> = vec![];
    let t = rng.float();
    let rank = 2 + rng.below(3);
    let mut s = rng.shape(rank);
    s[0] += 2;
    let c = vec![s[1]];
    let outs: Outs = if op == "batch_norm" {
        attrs = vec![("eps", Attr::Float(1e-2))];
        ins.push(rng.tensor(t, &s));
        (1..3).for_each(|_| ins.push(rng.positive(t, &c)));
        vec![(t, s), (t, c.clone()), (t, c.clone()), (t, c)]
    } else {
        let mask = rng.pick(&[[1, 1, 1], [1, 0, 0], [0, 1, 1], [0, 1, 0]]);
        attrs.push(("mask", ints(&mask)));
        ins = vec![rng.tensor(t, &s), rng.tensor(t, &s)];
        (2..5).for_each(|_| ins.push(rng.positive(t, &c)));
        let all = [(t, s.clone()), (t, c.clone()), (t, c)];
        wanted(all, mask)
    };
    Drawn { attrs, ins, outs }
}

fn product(op: &str, rng: &mut Rng) -> Drawn {
    let mut ins: Vec<OwnedTensor> = vec![];
    let is_sum = op == "matmul_sum";
    let t = if is_sum {
        rng.pick(&[DType::BF16, DType::F16])
    } else {
        rng.number()
    };
    let sizes = [0, 1, 1, 2, 3, 5, 8, 13, 17];
    let [m, k, n] = std::array::from_fn(|_| rng.pick(&sizes));
    let batch: Vec<usize> = if rng.flag() {
        vec![rng.below(4)]
    } else {
        vec![]
    };
    let (ta, tb) = (rng.flag(), rng.flag());
    let with = |pair: [usize; 2]| batch.iter().copied().chain(pair).collect::<Vec<usize>>();
    let (a, b) = (
        with(if ta { [k, m] } else { [m, k] }),
        with(if tb { [n, k] } else { [k, n] }),
    );
    let y = with([m, n]);
    let attrs: Attrs = vec![("ta", Attr::Bool(ta)), ("tb", Attr::Bool(tb))];
    if op == "addmm" {
        let c = rng.narrower(&y);
        ins.push(rng.tensor(t, &c));
    }
    ins.extend([rng.tensor(t, &a), rng.tensor(t, &b)]);
    if is_sum && rng.flag() {
        ins.push(rng.tensor(DType::F32, &y));
    }
    let outs: Outs = vec![(if is_sum { DType::F32 } else { t }, y)];
    Drawn { attrs, ins, outs }
}

/// Ends need not rise, and rows may lie behind the last group.
fn grouped(op: &str, rng: &mut Rng) -> Drawn {
    let (t, groups, rows) = (rng.float(), rng.below(5), rng.below(40));
    let sizes = [0, 1, 2, 5, 8, 17];
    let [k, n] = std::array::from_fn(|_| rng.pick(&sizes));
    let index_type = rng.index_type();
    let ends = rng.indices(index_type, &[groups], rows + 1);
    let x = rng.tensor(t, &[rows, k]);
    if op == "grouped_outer" {
        let ins = vec![x, rng.tensor(t, &[rows, n]), ends];
        return Drawn {
            attrs: vec![],
            ins,
            outs: vec![(t, vec![groups, k, n])],
        };
    }
    let tb = rng.flag();
    let w = if tb { [groups, n, k] } else { [groups, k, n] };
    Drawn {
        attrs: vec![("tb", Attr::Bool(tb))],
        ins: vec![x, rng.tensor(t, &w), ends],
        outs: vec![(t, vec![rows, n])],
    }
}

fn convolution(op: &str, rng: &mut Rng) -> Drawn {
    let mut ins: Vec<OwnedTensor> = vec![];
    let t = rng.float();
    let spatial = 1 + rng.below(2);
    let groups = 1 + rng.below(3);
    // A few channels have direct loops, more are products.
    let (n, c, o) = (rng.below(3), 1 + rng.below(5), 1 + rng.below(5));
    let [taps, stride, padding, dilation, input, output] = windows(rng, spatial, false);
    let with = |a: usize, b: usize, s: &[usize]| [&[a, b], s].concat();
    let (x, w) = (with(n, c * groups, &input), with(o * groups, c, &taps));
    let y = with(n, o * groups, &output);
    let mut attrs: Attrs = vec![
        ("dilation", ints(&dilation)),
        ("groups", Attr::Int(groups as i64)),
    ];
    attrs.extend([("padding", ints(&padding)), ("stride", ints(&stride))]);
    let outs: Outs = if op == "convolution" {
        ins = vec![rng.tensor(t, &x), rng.tensor(t, &w)];
        if rng.flag() {
            ins.push(rng.tensor(t, &[o * groups]));
        }
        vec![(t, y)]
    } else {
        let mask = rng.pick(&[[1, 1, 1], [1, 0, 0], [0, 1, 1], [0, 1, 0]]);
        attrs.push(("mask", ints(&mask)));
        ins = vec![rng.tensor(t, &y), rng.tensor(t, &x), rng.tensor(t, &w)];
        let all = [(t, x), (t, w), (t, vec![o * groups])];
        wanted(all, mask)
    };
    Drawn { attrs, ins, outs }
}

/// Attributes of a maximum, and the shapes of its operand and its result.
fn pool(rng: &mut Rng) -> (Attrs, [Vec<usize>; 2]) {
    let [kernel, stride, padding, dilation, input, output] = windows(rng, 2, true);
    let (n, c) = (rng.below(3), 1 + rng.below(2));
    let mut attrs: Attrs = vec![
        ("ceil", Attr::Bool(false)),
        ("dilation", ints(&dilation)),
        ("kernel", ints(&kernel)),
    ];
    attrs.extend([("padding", ints(&padding)), ("stride", ints(&stride))]);
    let shapes = [input, output].map(|image| [&[n, c], &image[..]].concat());
    (attrs, shapes)
}

fn max_pool(rng: &mut Rng) -> Drawn {
    let t = rng.number();
    let (attrs, [x, y]) = pool(rng);
    let ins: Vec<OwnedTensor> = vec![rng.tensor(t, &x)];
    let outs: Outs = vec![(t, y.clone()), (DType::I64, y)];
    Drawn { attrs, ins, outs }
}

fn max_pool_bwd(rng: &mut Rng) -> Drawn {
    let t = rng.float();
    let (mut attrs, [x, y]) = pool(rng);
    attrs.push(("shape", ints(&x)));
    let ins: Vec<OwnedTensor> = vec![rng.tensor(t, &y), rng.indices(DType::I64, &y, x[2] * x[3])];
    let outs: Outs = vec![(t, x)];
    Drawn { attrs, ins, outs }
}

fn embedding(op: &str, rng: &mut Rng) -> Drawn {
    let is_forward = op == "embedding";
    let t = if is_forward {
        rng.any_type()
    } else {
        rng.float()
    };
    let (rows, width, index_type) = (1 + rng.below(9), rng.size(), rng.index_type());
    let rank = rng.below(3);
    let index = rng.shape(rank).iter().map(|d| d % 8).collect::<Vec<_>>();
    let long = [&index[..], &[width]].concat();
    let table = vec![rows, width];
    let (read, made) = if is_forward {
        (table, long)
    } else {
        (long, table)
    };
    let attrs = if is_forward {
        vec![]
    } else {
        let padding = rng.below(rows + 1) as i64 - 1;
        vec![
            ("padding", Attr::Int(padding)),
            ("rows", Attr::Int(rows as i64)),
        ]
    };
    Drawn {
        attrs,
        ins: vec![rng.tensor(t, &read), rng.indices(index_type, &index, rows)],
        outs: vec![(t, made)],
    }
}

fn nll_sum(rng: &mut Rng) -> Drawn {
    let (n, c, t, index_type) = (
        1 + rng.below(7),
        2 + rng.below(7),
        rng.float(),
        rng.index_type(),
    );
    let attrs: Attrs = vec![("ignore", Attr::Int(1))];
    let mut ins: Vec<OwnedTensor> = vec![rng.tensor(t, &[n, c]), rng.indices(index_type, &[n], c)];
    if rng.below(2) == 1 {
        ins.push(rng.tensor(DType::F64, &[]));
    }
    let outs: Outs = vec![(DType::F64, vec![])];
    Drawn { attrs, ins, outs }
}

fn nll_loss(op: &str, rng: &mut Rng) -> Drawn {
    let t = rng.float();
    let (n, c, reduction) = (1 + rng.below(7), 2 + rng.below(7), rng.below(3));
    let index_type = rng.index_type();
    let targets = rng.indices(index_type, &[n], c);
    let mut attrs: Attrs = vec![
        ("ignore", Attr::Int(1)),
        ("reduction", Attr::Int(reduction as i64)),
    ];
    let loss = if reduction == 0 { vec![n] } else { vec![] };
    if op == "nll_loss" {
        return Drawn {
            attrs,
            ins: vec![rng.tensor(t, &[n, c]), targets],
            outs: vec![(t, loss), (t, vec![])],
        };
    }
    attrs.extend([("dtype", Attr::Type(t)), ("shape", ints(&[n, c]))]);
    Drawn {
        attrs,
        ins: vec![rng.tensor(t, &loss), targets, rng.positive(t, &[])],
        outs: vec![(t, vec![n, c])],
    }
}

fn gather_and_scatter(op: &str, rng: &mut Rng) -> Drawn {
    let t = if op == "scatter_add" {
        rng.number()
    } else {
        rng.any_type()
    };
    let rank = 1 + rng.below(3);
    let x: Vec<usize> = (0..rank).map(|_| 1 + rng.below(5)).collect();
    let dim = rng.below(rank);
    let index: Vec<usize> = x
        .iter()
        .enumerate()
        .map(|(d, &n)| {
            if d == dim {
                rng.below(7)
            } else {
                rng.below(n + 1)
            }
        })
        .collect();
    let index_type = rng.index_type();
    let mut attrs: Attrs = vec![("dim", Attr::Int(dim as i64))];
    let mut ins: Vec<OwnedTensor> =
        vec![rng.tensor(t, &x), rng.indices(index_type, &index, x[dim])];
    match op {
        "scatter" | "scatter_add" => {
            let source: Vec<usize> = index.iter().map(|d| d + rng.below(2)).collect();
            ins.push(rng.tensor(t, &source));
        }
        "scatter_value" => attrs.push(("value", rng.scalar(t))),
        _ => {}
    }
    let outs: Outs = vec![(t, if op == "gather" { index } else { x })];
    Drawn { attrs, ins, outs }
}

fn index(op: &str, rng: &mut Rng) -> Drawn {
    let mut attrs: Attrs = vec![];
    let t = if op == "index" {
        rng.any_type()
    } else {
        rng.number()
    };
    let rank = 1 + rng.below(3);
    let x: Vec<usize> = (0..rank).map(|_| 1 + rng.below(5)).collect();
    let n = 1 + rng.below(rank);
    let lead = rng.any_shape().iter().map(|d| d % 6).collect::<Vec<_>>();
    let shapes: Vec<Vec<usize>> = (0..n).map(|_| rng.narrower(&lead)).collect();
    let broadcast = broadcast(&shapes.iter().map(|s| &s[..]).collect::<Vec<_>>());
    let long = [&broadcast[..], &x[n..]].concat();
    let mut ins: Vec<OwnedTensor> = vec![rng.tensor(t, &x)];
    if op == "index_put" {
        let accumulate = rng.flag();
        attrs.push(("accumulate", Attr::Bool(accumulate)));
        let values = rng.narrower(&long);
        let may_be_half = accumulate && t == DType::F32;
        let of = match may_be_half && rng.flag() {
            true => rng.pick(&[DType::BF16, DType::F16]),
            false => t,
        };
        ins.push(rng.tensor(of, &values));
    }
    for (k, shape) in shapes.iter().enumerate() {
        let index_type = rng.index_type();
        let mut numbers = rng.indices(DType::I64, shape, 2 * x[k]).to_i64s();
        numbers.iter_mut().for_each(|i| *i -= x[k] as i64);
        ins.push(OwnedTensor::from_i64s(index_type, shape, &numbers));
    }
    let outs: Outs = vec![(t, if op == "index" { long } else { x })];
    Drawn { attrs, ins, outs }
}

fn rearranged(op: &str, rng: &mut Rng) -> Drawn {
    let (t, s) = (rng.any_type(), rng.any_shape());
    let (attr, from, to) = match op {
        "permute" => {
            let mut dims: Vec<usize> = (0..s.len()).collect();
            (0..s.len()).for_each(|i| dims.swap(i, rng.below(s.len())));
            let to = dims.iter().map(|&d| s[d]).collect();
            (("dims", ints(&dims)), s, to)
        }
        "flip" => (("dims", Attr::Ints(rng.dims(s.len()))), s.clone(), s),
        _ => (("shape", ints(&s)), rng.narrower(&s), s),
    };
    Drawn {
        attrs: vec![attr],
        ins: vec![rng.tensor(t, &from)],
        outs: vec![(t, to)],
    }
}

fn slice(op: &str, rng: &mut Rng) -> Drawn {
    let t = rng.any_type();
    let rank = 1 + rng.below(3);
    let s = rng.shape(rank);
    let dim = rng.below(rank);
    let start = rng.below(s[dim] + 1);
    let end = start + rng.below(s[dim] - start + 1);
    let step = rng.pick(&[1, 1, 2, 3, 1 << 40]);
    let mut part = s.clone();
    part[dim] = (end - start).div_ceil(step);
    let mut attrs: Attrs = vec![
        ("dim", Attr::Int(dim as i64)),
        ("end", Attr::Int(end as i64)),
    ];
    attrs.extend([
        ("start", Attr::Int(start as i64)),
        ("step", Attr::Int(step as i64)),
    ]);
    let mut ins: Vec<OwnedTensor> = vec![rng.tensor(t, &s)];
    if op == "slice_scatter" {
        ins.push(rng.tensor(t, &part));
    }
    let outs: Outs = vec![(t, if op == "slice" { part } else { s })];
    Drawn { attrs, ins, outs }
}

fn cat(rng: &mut Rng) -> Drawn {
    let mut ins: Vec<OwnedTensor> = vec![];
    let t = rng.any_type();
    let rank = 1 + rng.below(3);
    let mut s = rng.shape(rank);
    let dim = rng.below(rank);
    s[dim] = 0;
    for _ in 0..1 + rng.below(4) {
        let mut part = s.clone();
        part[dim] = rng.below(4);
        ins.push(rng.tensor(t, &part));
    }
    s[dim] = ins.iter().map(|x| x.shape()[dim]).sum();
    let attrs: Attrs = vec![("dim", Attr::Int(dim as i64))];
    let outs: Outs = vec![(t, s)];
    Drawn { attrs, ins, outs }
}

fn pad(rng: &mut Rng) -> Drawn {
    let (t, s) = (rng.any_type(), rng.any_shape());
    let mut pad = vec![];
    let mut y = vec![];
    for &d in &s {
        let before = rng.below(4) as i64 - (d as i64).min(2);
        let after = rng.below(4) as i64 - (d as i64 + before).min(1);
        pad.extend([before, after]);
        y.push((d as i64 + before + after) as usize);
    }
    let attrs: Attrs = vec![("pad", Attr::Ints(pad)), ("value", rng.scalar(t))];
    let ins: Vec<OwnedTensor> = vec![rng.tensor(t, &s)];
    let outs: Outs = vec![(t, y)];
    Drawn { attrs, ins, outs }
}

fn full(rng: &mut Rng) -> Drawn {
    let (t, s) = (rng.any_type(), rng.any_shape());
    let attrs: Attrs = vec![
        ("dtype", Attr::Type(t)),
        ("shape", ints(&s)),
        ("value", rng.scalar(t)),
    ];
    let outs: Outs = vec![(t, s)];
    Drawn {
        attrs,
        ins: vec![],
        outs,
    }
}

fn arange(rng: &mut Rng) -> Drawn {
    let (t, n) = (rng.number(), rng.size());
    let mut attrs: Attrs = vec![
        ("dtype", Attr::Type(t)),
        ("shape", ints(&[n])),
        ("start", rng.scalar(t)),
    ];
    attrs.push((
        "step",
        if is_float(t) {
            Attr::Float(0.25)
        } else {
            Attr::Int(1)
        },
    ));
    let outs: Outs = vec![(t, vec![n])];
    Drawn {
        attrs,
        ins: vec![],
        outs,
    }
}

fn random(rng: &mut Rng) -> Drawn {
    let (t, s) = (rng.float(), rng.any_shape());
    let attrs: Attrs = vec![
        ("dtype", Attr::Type(t)),
        ("shape", ints(&s)),
        ("stream", Attr::Int(3)),
    ];
    let ins: Vec<OwnedTensor> = vec![rng.tensor(DType::I64, &[2])];
    let outs: Outs = vec![(t, s)];
    Drawn { attrs, ins, outs }
}

fn dropout(rng: &mut Rng) -> Drawn {
    let (t, s) = (rng.float(), rng.any_shape());
    let attrs: Attrs = vec![
        ("p", Attr::Float(rng.pick(&[0.0, 0.3, 1.0]))),
        ("stream", Attr::Int(3)),
    ];
    let ins: Vec<OwnedTensor> = vec![rng.tensor(t, &s), rng.tensor(DType::I64, &[2])];
    let outs: Outs = vec![(t, s.clone()), (DType::Bool, s)];
    Drawn { attrs, ins, outs }
}

fn dropout_key(rng: &mut Rng) -> Drawn {
    let attrs: Attrs = vec![("p", Attr::Float(0.3)), ("stream", Attr::Int(3))];
    let ins: Vec<OwnedTensor> = vec![rng.tensor(DType::I64, &[2])];
    let outs: Outs = vec![(DType::I64, vec![4])];
    Drawn { attrs, ins, outs }
}

fn round_random(rng: &mut Rng) -> Drawn {
    let s = rng.any_shape();
    let attrs: Attrs = vec![("stream", Attr::Int(3))];
    let ins: Vec<OwnedTensor> = vec![rng.tensor(DType::F32, &s), rng.tensor(DType::I64, &[2])];
    let outs: Outs = vec![(DType::BF16, s)];
    Drawn { attrs, ins, outs }
}

fn dropout_bwd(rng: &mut Rng) -> Drawn {
    let (t, s) = (rng.float(), rng.any_shape());
    let attrs: Attrs = vec![("scale", Attr::Float(1.25))];
    let ins: Vec<OwnedTensor> = vec![rng.tensor(t, &s), rng.tensor(DType::Bool, &s)];
    let outs: Outs = vec![(t, s)];
    Drawn { attrs, ins, outs }
}

fn rng_next(rng: &mut Rng) -> Drawn {
    let ins: Vec<OwnedTensor> = vec![rng.tensor(DType::I64, &[2])];
    let outs: Outs = vec![(DType::I64, vec![2])];
    Drawn {
        attrs: vec![],
        ins,
        outs,
    }
}

fn sum_squares(rng: &mut Rng) -> Drawn {
    let (t, s) = (rng.float(), rng.any_shape());
    let ins: Vec<OwnedTensor> = vec![rng.tensor(t, &s)];
    let outs: Outs = vec![(DType::F64, vec![])];
    Drawn {
        attrs: vec![],
        ins,
        outs,
    }
}

fn clip_scale(rng: &mut Rng) -> Drawn {
    let dtype = rng.pick(&[DType::F32, DType::F64]);
    let attrs: Attrs = vec![
        ("dtype", Attr::Type(dtype)),
        ("max_norm", Attr::Float(rng.pick(&[0.0, 0.5, 3.0]))),
    ];
    let ins: Vec<OwnedTensor> = (0..1 + rng.below(4))
        .map(|_| rng.positive(DType::F64, &[]))
        .collect();
    let outs: Outs = vec![(dtype, vec![])];
    Drawn { attrs, ins, outs }
}

fn adamw(op: &str, rng: &mut Rng) -> Drawn {
    let mut ins: Vec<OwnedTensor> = vec![];
    let s = rng.any_shape();
    let outs: Outs = if op == "adamw" {
        let t = rng.float();
        ins = vec![
            rng.tensor(t, &s),
            rng.tensor(t, &s),
            rng.tensor(t, &s),
            rng.positive(t, &s),
        ];
        vec![(t, s.clone()), (t, s.clone()), (t, s)]
    } else if op == "adamw_8bit" {
        let (t, n) = (rng.float(), s.iter().product::<usize>());
        let blocks = vec![n.div_ceil(256)];
        ins = vec![
            rng.tensor(t, &s),
            rng.tensor(t, &s),
            rng.indices(DType::U8, &s, 256),
            rng.indices(DType::U8, &s, 256),
            rng.positive(DType::F32, &blocks),
            rng.positive(DType::F32, &blocks),
        ];
        let (codes, largest) = ((DType::U8, s.clone()), (DType::F32, blocks));
        vec![(t, s), codes.clone(), codes, largest.clone(), largest]
    } else {
        let gradient = [DType::BF16, DType::F32][usize::from(rng.flag())];
        ins = [DType::BF16, gradient, DType::I16, DType::F32]
            .map(|t| rng.tensor(t, &s))
            .into();
        ins.push(rng.positive(DType::F32, &s));
        [DType::BF16, DType::I16, DType::F32, DType::F32]
            .map(|t| (t, s.clone()))
            .into()
    };
    ins.push(OwnedTensor::from_i64s(
        DType::I64,
        &[],
        &[1 + rng.below(5) as i64],
    ));
    ins.push(OwnedTensor::from_f64s(
        DType::F64,
        &[5],
        &[0.01, rng.pick(&[0.9, 0.3]), 0.95, 1e-6, 0.1],
    ));
    Drawn {
        attrs: vec![],
        ins,
        outs,
    }
}

fn nf4(rng: &mut Rng) -> Drawn {
    let (t, s) = (rng.float(), rng.any_shape());
    let n: usize = s.iter().product();
    let blocks = n.div_ceil(64);
    let ins = vec![
        rng.indices(DType::U8, &[n.div_ceil(2)], 256),
        rng.indices(DType::U8, &[blocks], 256),
        rng.positive(DType::F32, &[blocks.div_ceil(256)]),
        rng.positive(DType::F32, &[]),
    ];
    let shape = s.iter().map(|&d| d as i64).collect();
    Drawn {
        attrs: vec![("dtype", Attr::Type(t)), ("shape", Attr::Ints(shape))],
        ins,
        outs: vec![(t, s)],
    }
}

fn sgd(op: &str, rng: &mut Rng) -> Drawn {
    let mut ins: Vec<OwnedTensor> = vec![];
    let (t, s) = (rng.float(), rng.any_shape());
    let n = if op == "sgd" { 2 } else { 3 };
    (0..n).for_each(|_| ins.push(rng.tensor(t, &s)));
    ins.push(OwnedTensor::from_f64s(DType::F64, &[3], &[0.1, 0.9, 0.01]));
    let outs: Outs = vec![(t, s); n - 1];
    Drawn {
        attrs: vec![],
        ins,
        outs,
    }
}

/// Taps, stride, padding, dilation, input and output sizes of a window that fits.
fn windows(rng: &mut Rng, spatial: usize, pool: bool) -> [Vec<usize>; 6] {
    let mut all: [Vec<usize>; 6] = Default::default();
    for _ in 0..spatial {
        let [taps, stride, dilation] = [3, 3, 2].map(|n| 1 + rng.below(n));
        let padding = if pool {
            rng.below(taps / 2 + 1)
        } else {
            rng.below(4)
        };
        let reach = dilation * (taps - 1) + 1;
        let input = reach.saturating_sub(2 * padding).max(1) + rng.below(6);
        let output = (input + 2 * padding - reach) / stride + 1;
        for (list, x) in all
            .iter_mut()
            .zip([taps, stride, padding, dilation, input, output])
        {
            list.push(x);
        }
    }
    all
}

/// The shape to which shapes broadcast.
pub(crate) fn broadcast(shapes: &[&[usize]]) -> Vec<usize> {
    let rank = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let mut shape = vec![1; rank];
    for s in shapes {
        for (d, &size) in s.iter().enumerate() {
            if size != 1 {
                shape[rank - s.len() + d] = size;
            }
        }
    }
    shape
}

/// Attention of a batch, groups of heads, queries, keys, and the widths of keys and of values. If
/// rows contain heads, q, k and v may share rows: then keys and values have the sizes of queries.
pub(crate) fn attention(
    op: &'static str,
    rng: &mut Rng,
    [b, g, s, keys, d, e]: [usize; 6],
) -> Case {
    let t = rng.float();
    let h = g * (1 + rng.below(2));
    let of_rows = op.starts_with("sdpa_rows");
    let share = of_rows && rng.below(3) == 0;
    let (keys, e) = if share { (s, d) } else { (keys, e) };
    let parts = [(h, s, d), (g, keys, d), (g, keys, e)];
    let mut first = [-1; 3];
    let [mut q, mut k, mut v] = parts.map(|(heads, rows, width)| vec![b, heads, rows, width]);
    let mut gradients = vec![q.clone(), k.clone(), v.clone()];
    if share {
        // In any order.
        let start = rng.below(3);
        let mut end = 0;
        for i in [start, (start + 1) % 3, (start + 2) % 3] {
            first[i] = end as i64;
            end += parts[i].0;
        }
        q = vec![b, s, end, d];
        (k, v) = (q.clone(), q.clone());
        gradients = vec![q.clone()];
    } else if of_rows {
        for (i, x) in [&mut q, &mut k, &mut v].into_iter().enumerate() {
            let (heads, rows, width) = parts[i];
            let others = [rng.below(3), rng.below(2)];
            if others != [0, 0] {
                first[i] = others[1] as i64;
                *x = vec![b, rows, others[1] + heads + rng.below(2), width];
                gradients[i] = vec![b, rows, heads, width];
            }
        }
    }
    let mut attrs = vec![
        ("causal".into(), Attr::Bool(rng.flag())),
        ("scale".into(), Attr::Float(0.3)),
    ];
    let mut out = vec![b, h, s, e];
    if of_rows {
        attrs.insert(1, ("first".into(), Attr::Ints(first.to_vec())));
        attrs.insert(2, ("heads".into(), Attr::Ints(vec![h as i64, g as i64])));
        out = vec![b, s, h, e];
    }
    let qkv = [rng.tensor(t, &q), rng.tensor(t, &k), rng.tensor(t, &v)];
    let mask = match rng.below(4) {
        0 => vec![],
        3 if s == keys => {
            let rows = if rng.flag() { b } else { 1 };
            vec![rng.indices(DType::I64, &[rows, s], 3)]
        }
        n => {
            let shape = rng.narrower(&[b, h, s, keys]);
            vec![rng.tensor(if n == 1 { DType::Bool } else { t }, &shape)]
        }
    };
    let mut beside = mask;
    if rng.below(3) == 0 {
        let p: f64 = rng.pick(&[0.0, 0.1, 0.5, 1.0]);
        let key = [rng.next() as i64, 3, 1 << 33 | 5, p.to_bits() as i64];
        beside.push(OwnedTensor::from_i64s(DType::I64, &[4], &key));
    }
    let results = vec![(t, out.clone()), (DType::F32, vec![b, h, s])];
    let forward: Vec<OwnedTensor> = qkv.iter().chain(&beside).cloned().collect();
    let forward_op = op.trim_end_matches("_bwd");
    if op == forward_op {
        return Case {
            op,
            attrs,
            ins: forward,
            outs: results,
        };
    }
    // The derivative's operands are results of a run.
    let refs: Vec<&OwnedTensor> = forward.iter().collect();
    let ran = lighterage_runtime::kernels::owned::run_op(
        forward_op,
        &attrs,
        &refs,
        &results,
        SCRATCH_BYTES,
    )
    .unwrap();
    let dout = rng.tensor(t, &out);
    let ins = [dout]
        .into_iter()
        .chain(qkv)
        .chain(ran)
        .chain(beside)
        .collect();
    Case {
        op,
        attrs,
        ins,
        outs: gradients.into_iter().map(|shape| (t, shape)).collect(),
    }
}
