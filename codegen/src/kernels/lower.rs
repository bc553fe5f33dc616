//! A body's ops as instructions. Each formula is the formula of the op's plain kernel in
//! `runtime::kernels`, in the same order. Intermediate values are rounded to their element types.
//! So a kernel of several ops computes the same as the separate ops.

use super::Step;
use super::dag::{Dag, Exponentials, Fold, Functions, Id, Span};
use crate::mlir::{Arith, Convert, Kind, Predicate};
use ir::op::Number;
use ir::op::attrs::{Dropout, Full, LayerNorm, LayerNormBwd, NllLoss, NllLossBwd, Reduction};
use ir::op::body::{Along, Space};
use ir::{DType, Op, TensorType};

/// How a body's value is available.
#[derive(Clone, Copy, Debug)]
pub(super) enum Known {
    /// An instruction's result, of the element type's kind.
    Node(Id),
    /// The sums over the rows of a value, divided by a number.
    Columns { of: Id, divisor: Option<u64> },
}

/// Why an op cannot be in a generated kernel.
pub(super) const NO_CODE: &str = "there is no vector code for it";

/// The kind of an element type in memory; none if no kernels support it. A bool in a register is a
/// bit.
pub(crate) fn storage(dtype: DType) -> Option<Kind> {
    Some(match dtype {
        DType::Bool | DType::U8 | DType::I8 => Kind::I8,
        DType::I16 | DType::BF16 => Kind::I16,
        DType::I32 => Kind::I32,
        DType::I64 => Kind::I64,
        DType::F16 => Kind::F16,
        DType::F32 => Kind::F32,
        DType::F64 => Kind::F64,
        DType::F8E4M3 | DType::F8E5M2 => return None,
    })
}
/// The kind that kernels compute an element type in.
pub(crate) fn wide(dtype: DType) -> Kind {
    match dtype {
        DType::F64 => Kind::F64,
        DType::F32 | DType::BF16 | DType::F16 => Kind::F32,
        _ => Kind::I64,
    }
}

pub(super) struct Lowering<'a> {
    pub(super) dag: Dag,
    pub(super) space: &'a Space,
    types: &'a [TensorType],
    known: Vec<Option<Known>>,
}

type Lowered<T> = Result<T, String>;

impl<'a> Lowering<'a> {
    /// Starts with the readings of operands.
    pub(super) fn new(functions: Functions, space: &'a Space) -> Lowered<Lowering<'a>> {
        let types = &space.types[..];
        let mut dag = Dag::new(functions);
        let mut known = vec![None; types.len()];
        for read in &space.reads {
            let v = read.value;
            let dtype = types[v].dtype();
            let kind = storage(dtype).ok_or_else(|| format!("there are no kernels for {dtype}"))?;
            let mut id = dag.load(read.operand, space.place(v), kind, Span::of(space, v));
            if dtype == DType::Bool {
                let zero = dag.int(0, Kind::I8);
                id = dag.differs(id, zero);
            }
            known[v] = Some(Known::Node(id));
        }
        Ok(Lowering {
            dag,
            space,
            types,
            known,
        })
    }

    /// The form of a value that an earlier step has computed.
    pub(super) fn known(&self, v: usize) -> Known {
        self.known[v].expect("values should be computed before they are used")
    }

    fn node(&self, v: usize) -> Lowered<Id> {
        match self.known(v) {
            Known::Node(id) => Ok(id),
            Known::Columns { .. } => {
                Err("it uses sums over rows, which are known at the kernel's end alone".into())
            }
        }
    }
    fn dtype(&self, v: usize) -> DType {
        self.types[v].dtype()
    }
    /// A value in the type in which it is computed.
    fn wide(&mut self, v: usize) -> Lowered<Id> {
        let (id, dtype) = (self.node(v)?, self.dtype(v));
        let d = &mut self.dag;
        Ok(match dtype {
            DType::Bool | DType::U8 => d.convert(Convert::Extui, id, Kind::I64),
            DType::I8 | DType::I16 | DType::I32 => d.convert(Convert::Extsi, id, Kind::I64),
            DType::F16 => d.convert(Convert::Extf, id, Kind::F32),
            DType::BF16 => d.widened_bf16(id),
            _ => id,
        })
    }
    /// A computed number rounded to an element type; integers wrap.
    fn narrow(&mut self, x: Id, dtype: DType) -> Id {
        let d = &mut self.dag;
        match dtype {
            DType::Bool if d.kind(x) == Kind::I1 => x,
            DType::Bool => self.truth(x),
            DType::U8 | DType::I8 => d.convert(Convert::Trunci, x, Kind::I8),
            DType::I16 => d.convert(Convert::Trunci, x, Kind::I16),
            DType::I32 => d.convert(Convert::Trunci, x, Kind::I32),
            DType::F16 => d.convert(Convert::Truncf, x, Kind::F16),
            DType::BF16 => d.rounded_bf16(x),
            _ => x,
        }
    }
    fn zero(&mut self, kind: Kind) -> Id {
        if kind.is_float() {
            self.dag.float(0.0, kind)
        } else {
            self.dag.int(0, kind)
        }
    }
    fn one(&mut self, kind: Kind) -> Id {
        if kind.is_float() {
            self.dag.float(1.0, kind)
        } else {
            self.dag.int(1, kind)
        }
    }
    /// A bit: true if the number is not zero.
    fn truth(&mut self, x: Id) -> Id {
        let zero = self.zero(self.dag.kind(x));
        self.dag.differs(x, zero)
    }
    /// A bit as a number.
    fn flag(&mut self, bit: Id, kind: Kind) -> Id {
        let (zero, one) = (self.zero(kind), self.one(kind));
        self.dag.select(bit, one, zero)
    }
    /// A number attribute in a wide type; a number that does not fit into an integer becomes the
    /// nearest one.
    fn number(&mut self, number: Number, kind: Kind) -> Id {
        match (number, kind) {
            (Number::Int(i), Kind::I64) => self.dag.int(i, kind),
            (Number::Int(i), Kind::F32) => self.dag.float((i as f32).into(), kind),
            (_, Kind::I64) => self.dag.int(number.to_f64() as i64, kind),
            _ => self.dag.float(number.to_f64(), kind),
        }
    }
    /// A wide number in another wide type, like Rust's `as`.
    fn widened(&mut self, x: Id, to: Kind) -> Id {
        let d = &mut self.dag;
        match (d.kind(x), to) {
            (from, _) if from == to => x,
            (Kind::F32, Kind::F64) => d.convert(Convert::Extf, x, to),
            (Kind::F64, Kind::F32) => d.convert(Convert::Truncf, x, to),
            (Kind::I64, _) => d.convert(Convert::Sitofp, x, to),
            (from, _) => {
                // NaN becomes 0. A number that is too large or too small becomes the largest or
                // smallest.
                let (lo, hi) = (
                    d.float(-(2f64.powi(63)), from),
                    d.float(2f64.powi(63), from),
                );
                let zero = d.float(0.0, from);
                let (low, high) = (d.less(x, lo), d.at_most(hi, x));
                let (nan, out) = (d.differs(x, x), d.same(Arith::Ori, &[low, high]));
                let out = d.same(Arith::Ori, &[nan, out]);
                let inside = d.select(out, zero, x);
                let y = d.convert(Convert::Fptosi, inside, Kind::I64);
                let (least, most) = (d.int(i64::MIN, Kind::I64), d.int(i64::MAX, Kind::I64));
                let y = d.select(low, least, y);
                d.select(high, most, y)
            }
        }
    }

    /// Computes a step's results; `at` is the number of the first.
    pub(super) fn step(&mut self, step: &Step, at: usize) -> Lowered<()> {
        let results: Vec<Known> = match &step.op {
            Op::LayerNorm(norm) => self.layer_norm(step, norm)?,
            Op::LayerNormBwd(norm) => self.layer_norm_bwd(step, norm)?,
            Op::Sum(a) => vec![self.reduction(step, at, Fold::Sum, a)?],
            Op::Mean(a) => vec![self.reduction(step, at, Fold::Sum, a)?],
            Op::Amax(a) => vec![self.reduction(step, at, Fold::Max, a)?],
            Op::Amin(a) => vec![self.reduction(step, at, Fold::Min, a)?],
            Op::Any(a) => vec![self.reduction(step, at, Fold::Any, a)?],
            Op::Reshape(_) | Op::Detach | Op::Expand(_) => vec![self.known(step.inputs[0])],
            Op::Full(full) => vec![self.full(full)],
            Op::Adamw => self.adamw(step)?,
            Op::AdamwSplit => self.adamw_split(step)?,
            Op::Sgd => self.sgd(step)?,
            Op::SgdMomentum => self.sgd_momentum(step)?,
            Op::Dropout(dropout) => self.dropout(step, dropout)?,
            Op::RoundRandom(a) => self.round_random(step, a.stream as u32)?,
            Op::NllLossBwd(loss) => vec![self.nll_loss_bwd(step, loss)?],
            Op::Where => {
                // Elements are only chosen, so their bits stay the same.
                let [c, x, y] = [
                    self.node(step.inputs[0])?,
                    self.node(step.inputs[1])?,
                    self.node(step.inputs[2])?,
                ];
                vec![Known::Node(self.dag.select(c, x, y))]
            }
            _ => {
                let x = self.element(step, self.dtype(at))?;
                vec![Known::Node(self.narrow(x, self.dtype(at)))]
            }
        };
        for (known, result) in self.known[at..].iter_mut().zip(results) {
            *known = Some(result);
        }
        Ok(())
    }

    fn full(&mut self, full: &Full) -> Known {
        let value = match full.dtype {
            DType::Bool => self.dag.bit(full.value.to_f64() != 0.0),
            dtype => self.number(full.value, wide(dtype)),
        };
        Known::Node(self.narrow(value, full.dtype))
    }

    /// An op with one result that combines at most the elements of a row.
    fn element(&mut self, step: &Step, result: DType) -> Lowered<Id> {
        let op = &step.op;
        let args = step
            .inputs
            .iter()
            .map(|&v| self.wide(v))
            .collect::<Lowered<Vec<Id>>>()?;
        let &x = args.first().ok_or(NO_CODE)?;
        let kind = self.dag.kind(x);
        let real = kind.is_float();
        // The derivative of softmax takes the exponentials as an operand.
        let is_function = op.facts().is_function && !matches!(op, Op::SoftmaxBwd(_));
        if is_function && kind != Kind::F32 {
            return Err(format!("there is no vector function for {result}"));
        }
        // The other operand, or the number in its place.
        let y = match op {
            Op::AddScalar(a)
            | Op::MulScalar(a)
            | Op::DivScalar(a)
            | Op::RsubScalar(a)
            | Op::EqScalar(a)
            | Op::NeScalar(a)
            | Op::LtScalar(a)
            | Op::LeScalar(a)
            | Op::GtScalar(a)
            | Op::GeScalar(a) => self.number(a.value, kind),
            _ => args.get(1).copied().unwrap_or(x),
        };
        Ok(match op {
            Op::Neg if real => self.dag.same(Arith::Negf, &[x]),
            Op::Neg => {
                let minus = self.dag.int(-1, kind);
                self.dag.mul(x, minus)
            }
            Op::Abs if real => self.dag.same(Arith::Absf, &[x]),
            Op::Abs => {
                let zero = self.zero(kind);
                let (below, minus) = (self.dag.less(x, zero), self.dag.sub(zero, x));
                self.dag.select(below, minus, x)
            }
            Op::Sign => {
                let zero = self.zero(kind);
                let (above, below) = (self.dag.less(zero, x), self.dag.less(x, zero));
                let (a, b) = (self.flag(above, kind), self.flag(below, kind));
                self.dag.sub(a, b)
            }
            Op::Relu => {
                let zero = self.zero(kind);
                let below = self.dag.less(x, zero);
                self.dag.select(below, zero, x)
            }
            Op::Sqrt => self.dag.sqrt(x),
            Op::Rsqrt => {
                let (one, root) = (self.one(kind), self.dag.sqrt(x));
                self.dag.div(one, root)
            }
            Op::Reciprocal => {
                let one = self.one(kind);
                self.dag.div(one, x)
            }
            Op::Exp => self.dag.exp(x),
            Op::Log => self.dag.log(x),
            Op::Tanh => self.dag.tanh(x),
            Op::Erf => self.dag.erf(x),
            Op::Sigmoid => self.dag.sigmoid(x),
            Op::Silu => self.dag.silu(x),
            Op::Gelu(a) if a.tanh => self.dag.gelu_tanh(x),
            Op::Gelu(_) => self.dag.gelu(x),
            Op::SiluBwd => self.dag.silu_bwd(x, y),
            Op::GeluBwd(a) if a.tanh => self.dag.gelu_tanh_bwd(x, y),
            Op::GeluBwd(_) => self.dag.gelu_bwd(x, y),
            Op::TanhBwd => {
                let (one, square) = (self.one(kind), self.dag.mul(y, y));
                let slope = self.dag.sub(one, square);
                self.dag.mul(x, slope)
            }
            Op::SigmoidBwd => {
                let one = self.one(kind);
                let rest = self.dag.sub(one, y);
                let dy = self.dag.mul(x, rest);
                self.dag.mul(dy, y)
            }
            Op::ThresholdBwd(a) => {
                let (value, zero) = (self.number(a.value, kind), self.zero(kind));
                let below = self.dag.at_most(y, value);
                self.dag.select(below, zero, x)
            }
            Op::BitwiseNot if self.dtype(step.inputs[0]) == DType::Bool => {
                let one = self.one(kind);
                self.dag.sub(one, x)
            }
            Op::BitwiseNot => {
                let ones = self.dag.int(-1, kind);
                self.dag.same(Arith::Xori, &[x, ones])
            }
            Op::LogicalNot => {
                let zero = self.zero(kind);
                self.dag.equal(x, zero)
            }
            Op::Cast(_) if result == DType::Bool => self.truth(x),
            Op::Cast(_) => self.widened(x, wide(result)),
            Op::Clamp(a) => {
                let (lo, hi) = (self.number(a.min, kind), self.number(a.max, kind));
                if real {
                    self.dag.within(x, lo, hi)
                } else {
                    let x = self.dag.extreme(true, x, lo);
                    self.dag.extreme(false, x, hi)
                }
            }
            Op::PowScalar(a) => self.power(a.value, x)?,
            Op::Add | Op::AddScalar(_) => self.dag.add(x, y),
            Op::Sub => self.dag.sub(x, y),
            Op::RsubScalar(_) => self.dag.sub(y, x),
            Op::Mul | Op::MulScalar(_) => self.dag.mul(x, y),
            Op::Div | Op::DivScalar(_) => self.dag.div(x, y),
            Op::Eq | Op::EqScalar(_) => self.dag.equal(x, y),
            Op::Ne | Op::NeScalar(_) => self.dag.differs(x, y),
            Op::Lt | Op::LtScalar(_) => self.dag.less(x, y),
            Op::Le | Op::LeScalar(_) => self.dag.at_most(x, y),
            Op::Gt | Op::GtScalar(_) => self.dag.less(y, x),
            Op::Ge | Op::GeScalar(_) => self.dag.at_most(y, x),
            Op::Maximum => self.dag.extreme(true, x, y),
            Op::Minimum => self.dag.extreme(false, x, y),
            Op::BitwiseAnd => self.dag.same(Arith::Andi, &[x, y]),
            Op::BitwiseOr => self.dag.same(Arith::Ori, &[x, y]),
            Op::BitwiseXor => self.dag.same(Arith::Xori, &[x, y]),
            Op::LogicalAnd => {
                let (a, b) = (self.truth(x), self.truth(y));
                self.dag.same(Arith::Andi, &[a, b])
            }
            Op::LogicalOr => {
                let (a, b) = (self.truth(x), self.truth(y));
                self.dag.same(Arith::Ori, &[a, b])
            }
            Op::DropoutBwd(a) => {
                let bit = self.truth(y);
                let (mask, scale) = (self.flag(bit, kind), self.dag.float(a.scale, kind));
                let dy = self.dag.mul(x, mask);
                self.dag.mul(dy, scale)
            }
            Op::Softmax(_) => {
                let (e, sum) = self.exponentials(x).1;
                let one = self.one(kind);
                let share = self.dag.div(one, sum);
                self.dag.mul(e, share)
            }
            Op::LogSoftmax(_) => {
                let (below, (_, sum)) = self.exponentials(x);
                let log = self.dag.log(sum);
                self.dag.sub(below, log)
            }
            Op::SoftmaxBwd(_) => {
                let product = self.dag.mul(x, y);
                let sum = self.dag.fold(Fold::Sum, product);
                let rest = self.dag.sub(x, sum);
                self.dag.mul(rest, y)
            }
            Op::LogSoftmaxBwd(_) => {
                let (sum, e) = (self.dag.fold(Fold::Sum, x), self.dag.exp(y));
                let share = self.dag.mul(e, sum);
                self.dag.sub(x, share)
            }

            Op::LayerNorm(_)
            | Op::LayerNormBwd(_)
            | Op::Sum(_)
            | Op::Mean(_)
            | Op::Amax(_)
            | Op::Amin(_)
            | Op::Any(_)
            | Op::Reshape(_)
            | Op::Detach
            | Op::Expand(_)
            | Op::Full(_)
            | Op::Adamw
            | Op::AdamwSplit
            | Op::Sgd
            | Op::SgdMomentum
            | Op::Dropout(_)
            | Op::RoundRandom(_)
            | Op::NllLossBwd(_)
            | Op::Where => unreachable!("{} should be lowered by itself", op.name()),

            // No kernels are generated for these ops: they are `Whole` in the table.
            Op::Sin
            | Op::Cos
            | Op::Atan
            | Op::Pow
            | Op::Cumsum(_)
            | Op::TopK(_)
            | Op::BatchNorm(_)
            | Op::BatchNormBwd(_)
            | Op::Matmul(_)
            | Op::Addmm(_)
            | Op::MatmulSum(_)
            | Op::GroupedMatmul(_)
            | Op::GroupedOuter
            | Op::Convolution(_)
            | Op::ConvolutionBwd(_)
            | Op::MaxPool2d(_)
            | Op::MaxPool2dBwd(_)
            | Op::Sdpa(_)
            | Op::SdpaBwd(_)
            | Op::SdpaRows(_)
            | Op::SdpaRowsBwd(_)
            | Op::Embedding(_)
            | Op::EmbeddingBwd(_)
            | Op::NllLoss(_)
            | Op::NllSum(_)
            | Op::Gather(_)
            | Op::Scatter(_)
            | Op::ScatterAdd(_)
            | Op::ScatterValue(_)
            | Op::Index
            | Op::IndexPut(_)
            | Op::Permute(_)
            | Op::Flip(_)
            | Op::Slice(_)
            | Op::SliceScatter(_)
            | Op::Cat(_)
            | Op::Pad(_)
            | Op::Arange(_)
            | Op::Rand(_)
            | Op::Randn(_)
            | Op::DropoutKey(_)
            | Op::RngNext
            | Op::SumSquares
            | Op::ClipScale(_)
            | Op::Adamw8bit
            | Op::Nf4(_)
            | Op::Fused(_)
            | Op::Extern(_) => return Err(NO_CODE.into()),
        })
    }
    fn power(&mut self, exponent: Number, x: Id) -> Lowered<Id> {
        let kind = self.dag.kind(x);
        if !kind.is_float() {
            let Number::Int(mut exponent) = exponent else {
                return Err("an integer's power should be an integer".into());
            };
            let (mut base, mut y) = (x, self.one(kind));
            while 0 < exponent {
                if exponent & 1 == 1 {
                    y = self.dag.mul(y, base);
                }
                exponent >>= 1;
                if 0 < exponent {
                    base = self.dag.mul(base, base);
                }
            }
            return Ok(y);
        }
        let one = self.one(kind);
        let value = exponent.to_f64();
        if value.abs() == 0.5 {
            let root = self.dag.sqrt(x);
            return Ok(if value < 0.0 {
                self.dag.div(one, root)
            } else {
                root
            });
        }
        if value.fract() != 0.0 || 64.0 < value.abs() {
            return Err(format!("there is no vector function for the power {value}"));
        }
        // By squares, from the highest bit: x^3 is x^2 x.
        let exponent = value.abs() as u32;
        let mut y = one;
        for bit in (0..32 - exponent.leading_zeros()).rev() {
            y = if y == one { x } else { self.dag.mul(y, y) };
            if exponent >> bit & 1 == 1 && y != x {
                y = self.dag.mul(y, x);
            }
        }
        Ok(if value < 0.0 { self.dag.div(one, y) } else { y })
    }

    // --- rows ---

    /// A row minus its largest element, the exponentials of this, and their sum.
    fn exponentials(&mut self, x: Id) -> (Id, (Id, Id)) {
        // If a number is NaN, the sum is NaN.
        let max = self.dag.fold(Fold::MaxNumber, x);
        let below = self.dag.sub(x, max);
        let e = self.dag.exp_below(below);
        let sum = self.dag.fold(Fold::Sum, e);
        self.dag.exponentials.push(Exponentials { max, e, sum });
        (below, (e, sum))
    }
    /// The mean of a row of `n`.
    fn mean(&mut self, x: Id, n: u64) -> Id {
        let sum = self.dag.fold(Fold::Sum, x);
        let n = self.dag.float(n as f64, self.dag.kind(x));
        self.dag.div(sum, n)
    }
    fn reduction(
        &mut self,
        step: &Step,
        at: usize,
        fold: Fold,
        attrs: &Reduction,
    ) -> Lowered<Known> {
        let x = step.inputs[0];
        let along = self.space.along(step, at);
        let shape = self.types[x].shape();
        let n: u64 = attrs.dims.iter().map(|&d| shape[d as usize]).product();
        let is_mean = matches!(step.op, Op::Mean(_));
        let dtype = self.dtype(at);
        let wide = self.wide(x)?;
        let element = if fold == Fold::Any {
            self.truth(wide)
        } else {
            wide
        };
        let sum = match along {
            Along::Nothing => element,
            Along::Rows => self.dag.fold(fold, element),
            Along::Columns => {
                // Small integers wrap at the end, so intermediate sums may wrap too.
                let narrow = self.dag.kind(element) == Kind::I64 && dtype.bytes() < 8;
                let element = if narrow {
                    self.dag.convert(Convert::Trunci, element, Kind::I32)
                } else {
                    element
                };
                let divisor = is_mean.then_some(n);
                return Ok(Known::Columns {
                    of: element,
                    divisor,
                });
            }
        };
        let y = if is_mean {
            let n = self.dag.float(n as f64, self.dag.kind(sum));
            self.dag.div(sum, n)
        } else {
            sum
        };
        Ok(Known::Node(self.narrow(y, dtype)))
    }
    fn layer_norm(&mut self, step: &Step, norm: &LayerNorm) -> Lowered<Vec<Known>> {
        let v = step.inputs[0];
        let (dtype, x) = (self.dtype(v), self.wide(v)?);
        let shape = self.types[v].shape();
        let n: u64 = shape[shape.len() - norm.dims as usize..].iter().product();
        let kind = self.dag.kind(x);
        let mean = self.mean(x, n);
        let below = self.dag.sub(x, mean);
        let square = self.dag.mul(below, below);
        let variance = self.mean(square, n);
        let (eps, one) = (self.dag.float(norm.eps, kind), self.one(kind));
        let variance = self.dag.add(variance, eps);
        let root = self.dag.sqrt(variance);
        let rstd = self.dag.div(one, root);
        let mut y = self.dag.mul(below, rstd);
        if let Some(&w) = step.inputs.get(1) {
            let w = self.wide(w)?;
            y = self.dag.mul(y, w);
        }
        if let Some(&b) = step.inputs.get(2) {
            let b = self.wide(b)?;
            y = self.dag.add(y, b);
        }
        Ok([self.narrow(y, dtype), mean, rstd]
            .map(Known::Node)
            .to_vec())
    }
    fn layer_norm_bwd(&mut self, step: &Step, norm: &LayerNormBwd) -> Lowered<Vec<Known>> {
        let v = step.inputs[1];
        let dtype = self.dtype(v);
        let [dy, x, mean, rstd] = [
            self.wide(step.inputs[0])?,
            self.wide(v)?,
            self.wide(step.inputs[2])?,
            self.wide(step.inputs[3])?,
        ];
        let shape = self.types[v].shape();
        let n: u64 = shape[shape.len() - norm.dims as usize..].iter().product();
        let below = self.dag.sub(x, mean);
        let normal = self.dag.mul(below, rstd);
        let mask = &norm.mask;
        let mut results = vec![];
        if mask[0] == 1 {
            let mut g = dy;
            if let Some(&w) = step.inputs.get(4) {
                let w = self.wide(w)?;
                g = self.dag.mul(dy, w);
            }
            let mean_g = self.mean(g, n);
            let product = self.dag.mul(g, normal);
            let mean_gx = self.mean(product, n);
            let share = self.dag.mul(normal, mean_gx);
            let rest = self.dag.sub(g, mean_g);
            let rest = self.dag.sub(rest, share);
            let dx = self.dag.mul(rstd, rest);
            results.push(Known::Node(self.narrow(dx, dtype)));
        }
        if mask[1] == 1 {
            let product = self.dag.mul(dy, normal);
            results.push(Known::Columns {
                of: product,
                divisor: None,
            });
        }
        if mask[2] == 1 {
            results.push(Known::Columns {
                of: dy,
                divisor: None,
            });
        }
        Ok(results)
    }

    // --- optimizers ---

    /// Element `at` of an operand of options.
    fn option(&mut self, v: usize, at: u64) -> Id {
        self.dag.load_at(v, at, Kind::F64)
    }
    /// A coefficient, computed in f64, in the type of the update's computation.
    fn coefficient(&mut self, x: Id, kind: Kind) -> Id {
        self.widened(x, kind)
    }
    /// The gradient, scaled by operand `i` if that exists.
    fn gradient(&mut self, step: &Step, g: Id, i: usize) -> Id {
        let Some(&scale) = step.inputs.get(i) else {
            return g;
        };
        let scale = self.dag.load_at(scale, 0, self.dag.kind(g));
        self.dag.mul(g, scale)
    }
    /// AdamW of wide numbers: p', m', v'.
    fn adamw_of(&mut self, step: &Step, [p, g, m, v]: [Id; 4], at: usize) -> [Id; 3] {
        let kind = self.dag.kind(p);
        let g = self.gradient(step, g, at + 2);
        let hyper = step.inputs[at + 1];
        let count = self.dag.load_at(step.inputs[at], 0, Kind::I64);
        let [lr, beta1, beta2, eps, decay] = [0, 1, 2, 3, 4].map(|i| self.option(hyper, i));
        let d = &mut self.dag;
        let (one, half) = (d.float(1.0, Kind::F64), d.float(0.5, Kind::F64));
        let (power1, power2) = (d.power(beta1, count), d.power(beta2, count));
        let (rest1, rest2) = (d.sub(one, beta1), d.sub(one, beta2));
        let corrected = d.sub(one, power1);
        let step_size = d.div(lr, corrected);
        let step_size = d.same(Arith::Negf, &[step_size]);
        let corrected = d.sub(one, power2);
        let correction2 = d.sqrt(corrected);
        let decayed = d.mul(lr, decay);
        let keep = d.sub(one, decayed);
        let near = d.less(rest1, half);
        let wide = [keep, rest1, beta2, rest2, eps, correction2, step_size];
        let [keep, weight, beta2, rest2, eps, correction2, step_size] =
            wide.map(|x| self.coefficient(x, kind));
        let d = &mut self.dag;
        // PyTorch's lerp counts from the nearer end.
        let one = d.float(1.0, kind);
        let behind = d.sub(weight, one);
        let (share, start) = (d.select(near, weight, behind), d.select(near, m, g));
        let far = d.sub(g, m);
        let m = d.fma(share, far, start);
        let square = d.mul(rest2, g);
        let v = d.mul(v, beta2);
        let v = d.fma(square, g, v);
        let root = d.sqrt(v);
        let below = d.div(root, correction2);
        let below = d.add(below, eps);
        let change = d.mul(step_size, m);
        let change = d.div(change, below);
        let p = d.mul(p, keep);
        [d.add(p, change), m, v]
    }
    fn adamw(&mut self, step: &Step) -> Lowered<Vec<Known>> {
        let dtype = self.dtype(step.inputs[0]);
        let [p, g, m, v] = [0, 1, 2, 3].map(|i| self.wide(step.inputs[i]));
        let new = self.adamw_of(step, [p?, g?, m?, v?], 4);
        Ok(new.map(|x| Known::Node(self.narrow(x, dtype))).to_vec())
    }
    /// AdamW of numbers in two halves: see `runtime::kernels::optim`.
    fn adamw_split(&mut self, step: &Step) -> Lowered<Vec<Known>> {
        let [high, low] = [self.node(step.inputs[0])?, self.node(step.inputs[2])?];
        let [g, m, v] = [
            self.wide(step.inputs[1])?,
            self.wide(step.inputs[3])?,
            self.wide(step.inputs[4])?,
        ];
        let d = &mut self.dag;
        let (high, low) = (
            d.convert(Convert::Extui, high, Kind::I32),
            d.convert(Convert::Extui, low, Kind::I32),
        );
        let (fifteen, sixteen) = (d.int(15, Kind::I32), d.int(16, Kind::I32));
        let below = d.same(Arith::Shrui, &[low, fifteen]);
        let high = d.sub(high, below);
        let high = d.same(Arith::Shli, &[high, sixteen]);
        let master = d.same(Arith::Ori, &[high, low]);
        let master = d.convert(Convert::Bitcast, master, Kind::F32);
        let [p, m, v] = self.adamw_of(step, [master, g, m, v], 5);
        let d = &mut self.dag;
        let bits = d.convert(Convert::Bitcast, p, Kind::I32);
        let (upper, quiet, half) = (
            d.int(0xFFFF_0000, Kind::I32),
            d.int(0x0040_0000, Kind::I32),
            d.int(0x8000, Kind::I32),
        );
        let nan = d.same(Arith::Andi, &[bits, upper]);
        let nan = d.same(Arith::Ori, &[nan, quiet]);
        let is_nan = d.differs(p, p);
        let bits = d.select(is_nan, nan, bits);
        let rounded = d.add(bits, half);
        let rounded = d.same(Arith::Shrui, &[rounded, sixteen]);
        let (high, low) = (
            d.convert(Convert::Trunci, rounded, Kind::I16),
            d.convert(Convert::Trunci, bits, Kind::I16),
        );
        Ok([high, low, m, v].map(Known::Node).to_vec())
    }
    /// `p - lr * direction`, rounded once.
    fn moved(&mut self, p: Id, lr: Id, direction: Id) -> Id {
        let back = self.dag.same(Arith::Negf, &[lr]);
        self.dag.fma(back, direction, p)
    }
    fn sgd(&mut self, step: &Step) -> Lowered<Vec<Known>> {
        let (dtype, hyper) = (self.dtype(step.inputs[0]), step.inputs[2]);
        let [p, g] = [self.wide(step.inputs[0])?, self.wide(step.inputs[1])?];
        let kind = self.dag.kind(p);
        let [lr, decay] = [0, 2]
            .map(|i| self.option(hyper, i))
            .map(|x| self.coefficient(x, kind));
        let g = self.gradient(step, g, 3);
        let g = self.dag.fma(decay, p, g);
        let p = self.moved(p, lr, g);
        Ok(vec![Known::Node(self.narrow(p, dtype))])
    }
    fn sgd_momentum(&mut self, step: &Step) -> Lowered<Vec<Known>> {
        let (dtype, hyper) = (self.dtype(step.inputs[0]), step.inputs[3]);
        let [p, g, b] = [
            self.wide(step.inputs[0])?,
            self.wide(step.inputs[1])?,
            self.wide(step.inputs[2])?,
        ];
        let kind = self.dag.kind(p);
        let [lr, momentum, decay] = [0, 1, 2]
            .map(|i| self.option(hyper, i))
            .map(|x| self.coefficient(x, kind));
        let g = self.gradient(step, g, 4);
        let g = self.dag.fma(decay, p, g);
        let b = self.dag.mul(momentum, b);
        let b = self.dag.add(b, g);
        let p = self.moved(p, lr, b);
        Ok([p, b].map(|x| Known::Node(self.narrow(x, dtype))).to_vec())
    }

    // --- the loss ---

    /// `-dloss / weight`, computed in f64, in the target's column of each row that counts.
    fn nll_loss_bwd(&mut self, step: &Step, loss: &NllLossBwd) -> Lowered<Known> {
        let columns = self.space.columns();
        if i32::try_from(columns).is_err() {
            return Err("its rows have too many elements".into());
        }
        let [dloss, target, weight] = [0, 1, 2].map(|i| step.inputs[i]);
        let (dloss, target, weight) = (self.wide(dloss)?, self.wide(target)?, self.wide(weight)?);
        let kind = wide(loss.dtype);
        let slope = self.widened(dloss, Kind::F64);
        let mut slope = self.dag.same(Arith::Negf, &[slope]);
        if loss.reduction == NllLoss::MEAN {
            let weight = self.widened(weight, Kind::F64);
            slope = self.dag.div(slope, weight);
        }
        let slope = self.widened(slope, kind);

        let [ignored, classes, none] =
            [loss.ignore, columns as i64, -1].map(|x| self.dag.int(x, Kind::I64));
        let counts = self.dag.differs(target, ignored);
        let inside = self.dag.compare(Predicate::Ult, target, classes);
        let counts = self.dag.same(Arith::Andi, &[counts, inside]);
        let place = self.dag.select(counts, target, none);
        let place = self.dag.convert(Convert::Trunci, place, Kind::I32);
        let dx = self.dag.placed(slope, place);
        Ok(Known::Node(self.narrow(dx, loss.dtype)))
    }

    // --- random numbers ---

    /// A word for each element, from the state at operand 1.
    fn random(&mut self, step: &Step, stream: u32) -> Lowered<Id> {
        if self.types[step.inputs[0]].numel() != self.space.rows() * self.space.columns() {
            return Err("its elements are not numbered as the kernel's".into());
        }
        let at = |dag: &mut Dag, i| dag.load_at(step.inputs[1], i, Kind::I64);
        let (seed, count) = (at(&mut self.dag, 0), at(&mut self.dag, 1));
        Ok(self.dag.random(seed, count, stream))
    }

    fn round_random(&mut self, step: &Step, stream: u32) -> Lowered<Vec<Known>> {
        let (x, word) = (self.wide(step.inputs[0])?, self.random(step, stream)?);
        let d = &mut self.dag;
        let bits = d.convert(Convert::Bitcast, x, Kind::I32);
        let (places, exponent) = (d.int(16, Kind::I32), d.int(0x7F80_0000, Kind::I32));
        let word = d.same(Arith::Shrui, &[word, places]);
        let sum = d.add(bits, word);
        let sum = d.same(Arith::Shrui, &[sum, places]);
        let sum = d.convert(Convert::Trunci, sum, Kind::I16);
        let same = d.rounded_bf16(x);
        let found = d.same(Arith::Andi, &[bits, exponent]);
        let is_finite = d.differs(found, exponent);
        Ok(vec![Known::Node(d.select(is_finite, sum, same))])
    }

    fn dropout(&mut self, step: &Step, dropout: &Dropout) -> Lowered<Vec<Known>> {
        let (v, rng) = (step.inputs[0], step.inputs[1]);
        let (dtype, x) = (self.dtype(v), self.wide(v)?);
        if self.types[v].numel() != self.space.rows() * self.space.columns() {
            return Err("its elements are not numbered as the kernel's".into());
        }
        let kind = self.dag.kind(x);
        let p = dropout.p;
        let (seed, count) = (
            self.dag.load_at(rng, 0, Kind::I64),
            self.dag.load_at(rng, 1, Kind::I64),
        );
        // A word below this number of 2^32ths drops its element.
        let kept = match u32::try_from((p * 4_294_967_296.0) as u64) {
            Ok(threshold) => {
                let word = self.dag.random(seed, count, dropout.stream as u32);
                let threshold = self.dag.int(threshold.into(), Kind::I32);
                self.dag.compare(Predicate::Ule, threshold, word)
            }
            Err(_) => self.dag.bit(false),
        };
        let scale = if p == 1.0 { 0.0 } else { 1.0 / (1.0 - p) };
        let (flag, scale) = (self.flag(kept, kind), self.dag.float(scale, kind));
        let y = self.dag.mul(x, flag);
        let y = self.dag.mul(y, scale);
        Ok(vec![Known::Node(self.narrow(y, dtype)), Known::Node(kept)])
    }
}
