//! Updates of several nodes: Lion, Adafactor, Muon, and AdamW with moments in bf16.
//!
//! Numbers that all parameters of a group share, such as `1 - lr * decay`, are f64 nodes that are
//! computed once a step. What they multiply is computed in f32, or in f64 for f64 parameters; a
//! parameter in half precision is rounded once, at its end. With generated kernels the nodes of one
//! element become one kernel.

use super::rules::Update;
use ir::graph;
use ir::op::attrs::{Along, Cast, Clamp, Dims, Product, Reduction, Scalar, Sizes, Slice};
use ir::op::{Number, Op};
use ir::{DType, Value};

type Built = Result<Value, graph::Error>;
type Updated = Result<Vec<Value>, graph::Error>;

fn number(value: f64) -> Scalar {
    Scalar {
        value: Number::Float(value),
    }
}

impl Update<'_> {
    /// Adds a node with one result.
    fn op(&mut self, op: Op, inputs: &[Value]) -> Built {
        // The number of values so far is a number that no other has.
        let (parameter, n) = (
            &self.graph.values[self.parameter].name,
            self.graph.values.len(),
        );
        let of = if self.is_shared {
            "optimizer"
        } else {
            parameter
        };
        let name = format!("{of}.{}.{n}", op.name());
        Ok(self.node(op, inputs, &[name])?[0])
    }

    /// The type that a value is computed in: f64 stays, half precision becomes f32.
    fn real(&mut self, value: Value) -> Built {
        let dtype = self.graph.values[value].ty.dtype();
        match dtype {
            DType::F32 | DType::F64 => Ok(value),
            _ => self.cast(value, DType::F32),
        }
    }

    fn cast(&mut self, value: Value, dtype: DType) -> Built {
        if self.graph.values[value].ty.dtype() == dtype {
            return Ok(value);
        }
        self.op(Op::Cast(Cast { dtype }), &[value])
    }

    fn dtype(&self, value: Value) -> DType {
        self.graph.values[value].ty.dtype()
    }

    /// The gradient, clipped, in the type of the computation.
    fn gradient(&mut self) -> Built {
        let gradient = self.real(self.gradient)?;
        match self.scale {
            Some(scale) => {
                let scale = self.cast(scale, self.dtype(gradient))?;
                self.op(Op::Mul, &[gradient, scale])
            }
            None => Ok(gradient),
        }
    }

    /// A number of the group, f64, that is added once and shared by its parameters.
    fn shared(&mut self, name: &str, add: impl FnOnce(&mut Self) -> Built) -> Built {
        self.once((self.hyper, name.to_string()), add)
    }

    fn once(&mut self, key: (Value, String), add: impl FnOnce(&mut Self) -> Built) -> Built {
        if let Some(&known) = self.shared.get(&key) {
            return Ok(known);
        }
        let (module, was) = (std::mem::take(&mut self.module), self.is_shared);
        self.is_shared = true;
        let value = add(self);
        (self.module, self.is_shared) = (module, was);
        self.shared.insert(key, value.clone()?);
        value
    }

    /// An option, f64.
    fn option(&mut self, name: &str) -> Built {
        let at = self.options.iter().position(|(option, _)| *option == name);
        let at = at.expect("rules read their own options") as i64;
        self.shared(name, |update| {
            let (dim, start, end, step) = (0, at, at + 1, 1);
            let slice = Op::Slice(Slice {
                dim,
                end,
                start,
                step,
            });
            let one = update.op(slice, &[update.hyper])?;
            update.op(Op::Reshape(Sizes { shape: vec![] }), &[one])
        })
    }

    /// `1 - lr * weight_decay`, f64.
    fn kept(&mut self) -> Built {
        let (lr, decay) = (self.option("lr")?, self.option("weight_decay")?);
        self.shared("1 - lr * weight_decay", |update| {
            let decay = update.op(Op::Mul, &[lr, decay])?;
            update.op(Op::RsubScalar(number(1.0)), &[decay])
        })
    }

    /// `1 - option`, f64.
    fn rest(&mut self, name: &str) -> Built {
        let option = self.option(name)?;
        self.shared(&format!("1 - {name}"), |update| {
            update.op(Op::RsubScalar(number(1.0)), &[option])
        })
    }

    /// `value * factor`, where the factor is an f64 number of the group.
    fn times(&mut self, value: Value, factor: Value) -> Built {
        self.with(Op::Mul, value, factor)
    }

    /// A value and an f64 number of the group.
    fn with(&mut self, op: Op, value: Value, number: Value) -> Built {
        let dtype = self.dtype(value);
        let key = (number, dtype.name().to_string());
        let number = self.once(key, |update| update.cast(number, dtype))?;
        self.op(op, &[value, number])
    }

    /// `from + (to - from) * share`, where the share is an f64 number: PyTorch's `lerp` for shares
    /// below one half.
    fn between(&mut self, from: Value, to: Value, share: Value) -> Built {
        let difference = self.op(Op::Sub, &[to, from])?;
        let part = self.times(difference, share)?;
        self.op(Op::Add, &[from, part])
    }

    /// The parameter after its decay, in the type of the computation.
    fn decayed(&mut self) -> Built {
        let (parameter, kept) = (self.real(self.parameter)?, self.kept()?);
        self.times(parameter, kept)
    }

    /// `sqrt(sum of squares)`, f64.
    fn norm(&mut self, value: Value) -> Built {
        let squares = self.op(Op::SumSquares, &[value])?;
        self.op(Op::Sqrt, &[squares])
    }

    /// New values in the types of the parameter and its moments.
    fn rounded(&mut self, parameter: Value, moments: &[Value]) -> Updated {
        let olds: Vec<Value> = [&[self.parameter][..], &self.moments].concat();
        let news = [&[parameter][..], moments].concat();
        let pairs = olds.into_iter().zip(news);
        pairs
            .map(|(old, new)| self.cast(new, self.dtype(old)))
            .collect()
    }
}

/// Lion (Chen et al., 2023, algorithm 2): the sign of an average of gradients.
pub(super) fn lion(it: &mut Update<'_>) -> Updated {
    let (gradient, before) = (it.gradient()?, it.real(it.moments[0])?);
    let (fast, slow, lr) = (it.rest("beta1")?, it.rest("beta2")?, it.option("lr")?);
    let decayed = it.decayed()?;
    let direction = it.between(before, gradient, fast)?;
    let sign = it.op(Op::Sign, &[direction])?;
    let change = it.times(sign, lr)?;
    let parameter = it.op(Op::Sub, &[decayed, change])?;
    let moment = it.between(before, gradient, slow)?;
    it.rounded(parameter, &[moment])
}

/// AdamW whose moments have other types than the parameter: bf16, or f32 beside half precision.
pub(super) fn adamw_of_other_types(it: &mut Update<'_>) -> Updated {
    let parameter = it.real(it.parameter)?;
    let (gradient, dtype) = (it.real(it.gradient)?, it.dtype(parameter));
    let mut inputs = vec![parameter, gradient];
    for moment in it.moments.clone() {
        inputs.push(it.cast(moment, dtype)?);
    }
    inputs.extend(it.step);
    inputs.push(it.hyper);
    inputs.extend(it.scale);
    let name = it.graph.values[it.parameter].name.clone();
    let names = ["adamw", "exp_avg", "exp_avg_sq"].map(|part| format!("{name}.{part}"));
    let new = it.node(Op::Adamw, &inputs, &names)?;
    it.rounded(new[0], &new[1..])
}

/// Adafactor (Shazeer and Stern, 2018) as `torch.optim.Adafactor` has it. Matrices have their mean
/// squares by row and by column; vectors have them by element.
pub(super) fn adafactor(it: &mut Update<'_>) -> Updated {
    let (gradient, parameter) = (it.gradient()?, it.real(it.parameter)?);
    let shape = it.graph.values[it.parameter].ty.shape().to_vec();
    // Of the parameter's type, as PyTorch has it.
    let least = match it.dtype(it.parameter) {
        DType::F64 => f64::EPSILON,
        DType::BF16 => 2f64.powi(-7),
        DType::F16 => 2f64.powi(-10),
        _ => f64::from(f32::EPSILON),
    };

    let lr = it.option("lr")?;
    let (step, share) = step_and_share(it)?;
    let rho = it.shared("rho", |it| {
        let root = it.op(Op::Rsqrt, &[step])?;
        it.op(Op::Minimum, &[lr, root])
    })?;

    let squares = it.op(Op::Mul, &[gradient, gradient])?;
    let mut moments = vec![];
    let variance = if let [.., _, _] = shape[..] {
        let last = shape.len() as i64 - 1;
        for (place, dim) in [(0, last), (1, last - 1)] {
            let before = it.real(it.moments[place])?;
            let now = it.op(mean(dim, true), &[squares])?;
            moments.push(it.between(before, now, share)?);
        }
        let outer = it.op(Op::Mul, &[moments[0], moments[1]])?;
        let all = it.op(mean(last - 1, true), &[moments[0]])?;
        let all = it.op(at_least(least), &[all])?;
        it.op(Op::Div, &[outer, all])?
    } else {
        let before = it.real(it.moments[0])?;
        moments.push(it.between(before, squares, share)?);
        moments[0]
    };
    let variance = it.op(at_least(least * least), &[variance])?;
    let root = it.op(Op::Rsqrt, &[variance])?;
    let update = it.op(Op::Mul, &[root, gradient])?;

    let size = size_of(it, parameter)?;
    let alpha = it.op(Op::Mul, &[size, rho])?;
    let change = clipped(it, update, alpha)?;
    let decayed = it.decayed()?;
    let parameter = it.op(Op::Sub, &[decayed, change])?;
    it.rounded(parameter, &moments)
}

/// Adafactor as the paper has it, algorithms 4 to 6, and as transformers has it, whose weight decay
/// and first moment the paper leaves open. A first moment is the last one.
pub(super) fn adafactor_paper(it: &mut Update<'_>, has_first: bool) -> Updated {
    let (gradient, parameter) = (it.gradient()?, it.real(it.parameter)?);
    let shape = it.graph.values[it.parameter].ty.shape().to_vec();
    let (step, share) = step_and_share(it)?;
    let rho = relative_step(it, step)?;

    let least = it.option("eps1")?;
    let squares = it.op(Op::Mul, &[gradient, gradient])?;
    let squares = it.with(Op::Add, squares, least)?;
    let mut moments = vec![];
    let update = if let [ref outer @ .., rows, columns] = shape[..] {
        let last = shape.len() as i64 - 1;
        for (place, dim) in [(0, last), (1, last - 1)] {
            let before = it.real(it.moments[place])?;
            let now = it.op(mean(dim, false), &[squares])?;
            moments.push(it.between(before, now, share)?);
        }
        let all = it.op(mean(last - 1, true), &[moments[0]])?;
        let of_rows = it.op(Op::Div, &[moments[0], all])?;
        // The root of each factor, not of their product: both may be as small as eps1.
        let root = |it: &mut Update<'_>, factor, last: [u64; 2]| {
            let shape = outer.iter().chain(&last).map(|&size| size as i64);
            let shape = shape.collect();
            let root = it.op(Op::Rsqrt, &[factor])?;
            it.op(Op::Reshape(Sizes { shape }), &[root])
        };
        let of_rows = root(it, of_rows, [rows, 1])?;
        let of_columns = root(it, moments[1], [1, columns])?;
        let both = it.op(Op::Mul, &[of_rows, of_columns])?;
        it.op(Op::Mul, &[both, gradient])?
    } else {
        let before = it.real(it.moments[0])?;
        moments.push(it.between(before, squares, share)?);
        let root = it.op(Op::Rsqrt, &[moments[0]])?;
        it.op(Op::Mul, &[root, gradient])?
    };

    // alpha = max(eps2, rms(p)) ^ scale_parameter * rho.
    let (exponent, decay) = (it.option("scale_parameter")?, it.option("weight_decay")?);
    let size = size_of(it, parameter)?;
    let size = it.op(Op::Pow, &[size, exponent])?;
    let alpha = it.op(Op::Mul, &[size, rho])?;
    let mut change = clipped(it, update, alpha)?;
    if has_first {
        let before = it.real(it.moments[moments.len()])?;
        let rest = it.rest("beta1")?;
        change = it.between(before, change, rest)?;
        moments.push(change);
    }
    let lost = it.op(Op::Mul, &[decay, alpha])?;
    let lost = it.cast(lost, it.dtype(parameter))?;
    let lost = it.op(Op::Mul, &[parameter, lost])?;
    let decayed = it.op(Op::Sub, &[parameter, lost])?;
    let parameter = it.op(Op::Sub, &[decayed, change])?;
    it.rounded(parameter, &moments)
}

/// `min(lr, warmup_init * t, 1 / sqrt(t))`, f64. Without `relative_step` the last two are infinite.
fn relative_step(it: &mut Update<'_>, step: Value) -> Built {
    let (lr, warmup) = (it.option("lr")?, it.option("warmup_init")?);
    let relative = it.option("relative_step")?;
    it.shared("rho", |it| {
        let root = it.op(Op::Rsqrt, &[step])?;
        let rising = it.op(Op::Mul, &[warmup, step])?;
        let most = it.op(Op::Minimum, &[rising, root])?;
        let most = it.op(Op::Div, &[most, relative])?;
        it.op(Op::Minimum, &[lr, most])
    })
}

/// The number of the step, and the share of its squares in a mean: `t ^ beta2_decay`. Both f64.
fn step_and_share(it: &mut Update<'_>) -> Result<(Value, Value), graph::Error> {
    let decay = it.option("beta2_decay")?;
    let step = it.step.expect("adafactor counts steps");
    let step = it.shared("step", |it| it.cast(step, DType::F64))?;
    let share = it.shared("step ^ beta2_decay", |it| it.op(Op::Pow, &[step, decay]))?;
    Ok((step, share))
}

fn mean(dim: i64, keepdim: bool) -> Op {
    Op::Mean(Reduction {
        dims: vec![dim],
        keepdim,
    })
}

/// `max(eps2, rms(parameter))`, f64.
fn size_of(it: &mut Update<'_>, parameter: Value) -> Built {
    let floor = it.option("eps2")?;
    let root = (it.graph.values[parameter].ty.numel() as f64).sqrt();
    let norm = it.norm(parameter)?;
    let size = it.op(Op::DivScalar(number(root)), &[norm])?;
    it.op(Op::Maximum, &[floor, size])
}

/// `update * alpha / max(1, rms(update) / d)`.
fn clipped(it: &mut Update<'_>, update: Value, alpha: Value) -> Built {
    let d = it.option("d")?;
    let root = (it.graph.values[update].ty.numel() as f64).sqrt();
    let norm = it.norm(update)?;
    let allowed = it.op(Op::MulScalar(number(root)), &[d])?;
    let excess = it.op(Op::Div, &[norm, allowed])?;
    let excess = it.op(at_least(1.0), &[excess])?;
    let size = it.op(Op::Div, &[alpha, excess])?;
    let size = it.cast(size, it.dtype(update))?;
    it.op(Op::Mul, &[update, size])
}

fn at_least(min: f64) -> Op {
    Op::Clamp(Clamp {
        max: Number::Float(f64::INFINITY),
        min: Number::Float(min),
    })
}

/// The polynomial of a step of Newton-Schulz, `a x + b x^3 + c x^5`, and the number of steps.
const NEWTON_SCHULZ: [f64; 3] = [3.4445, -4.7750, 2.0315];
const NEWTON_SCHULZ_STEPS: usize = 5;
/// The least norm that a matrix is divided by.
const LEAST_NORM: f64 = 1e-7;

/// Muon (Jordan et al., 2024) as `torch.optim.Muon` has it, with its defaults: Nesterov's momentum,
/// made orthogonal in bf16. For matrices; other parameters have AdamW.
pub(super) fn muon(it: &mut Update<'_>) -> Updated {
    let shape = it.graph.values[it.parameter].ty.shape().to_vec();
    let [rows, columns] = shape[..] else {
        return adamw_with(it, &["lr", "beta1", "beta2", "eps", "weight_decay"]);
    };
    let (gradient, before) = (it.gradient()?, it.real(it.moments[0])?);
    let (rest, lr) = (it.rest("momentum")?, it.option("lr")?);
    let moment = it.between(before, gradient, rest)?;
    let ahead = it.between(moment, gradient, rest)?;

    let mut x = it.cast(ahead, DType::BF16)?;
    let swap = |it: &mut Update<'_>, x| {
        let transposed = Op::Permute(Dims { dims: vec![1, 0] });
        it.op(transposed, &[x])
    };
    if columns < rows {
        x = swap(it, x)?;
    }
    let wide = it.cast(x, DType::F32)?;
    let norm = it.norm(wide)?;
    let norm = it.op(at_least(LEAST_NORM), &[norm])?;
    let norm = it.cast(norm, DType::F32)?;
    let unit = it.op(Op::Div, &[wide, norm])?;
    x = it.cast(unit, DType::BF16)?;
    let [a, b, c] = NEWTON_SCHULZ;
    let product = |ta, tb| Product { ta, tb };
    for _ in 0..NEWTON_SCHULZ_STEPS {
        let gram = it.op(Op::Matmul(product(false, true)), &[x, x])?;
        let square = it.op(Op::MatmulSum(product(false, false)), &[gram, gram])?;
        let polynomial = weighted(it, gram, b, square, c)?;
        let higher = it.op(Op::MatmulSum(product(false, false)), &[polynomial, x])?;
        x = weighted(it, x, a, higher, 1.0)?;
    }
    if columns < rows {
        x = swap(it, x)?;
    }
    let direction = it.cast(x, it.dtype(before))?;

    // sqrt(max(1, rows / columns)).
    let tall = (rows as f64 / columns as f64).max(1.0).sqrt();
    let rate = it.op(Op::MulScalar(number(tall)), &[lr])?;
    let change = it.times(direction, rate)?;
    let decayed = it.decayed()?;
    let parameter = it.op(Op::Sub, &[decayed, change])?;
    it.rounded(parameter, &[moment])
}

/// `p * x + q * y` in bf16, where x is bf16 and y is f32.
fn weighted(it: &mut Update<'_>, x: Value, p: f64, y: Value, q: f64) -> Built {
    let x = it.cast(x, DType::F32)?;
    let x = it.op(Op::MulScalar(number(p)), &[x])?;
    let y = match q {
        1.0 => y,
        _ => it.op(Op::MulScalar(number(q)), &[y])?,
    };
    let sum = it.op(Op::Add, &[x, y])?;
    it.cast(sum, DType::BF16)
}

/// AdamW with these options of another optimizer.
fn adamw_with(it: &mut Update<'_>, options: &[&str]) -> Updated {
    let hyper = it.shared("adamw", |it| {
        let mut rows = vec![];
        for option in options {
            let number = it.option(option)?;
            rows.push(it.op(Op::Reshape(Sizes { shape: vec![1] }), &[number])?);
        }
        it.op(Op::Cat(Along { dim: 0 }), &rows)
    })?;
    let before = std::mem::replace(&mut it.hyper, hyper);
    let updated = it.single(Op::Adamw);
    it.hyper = before;
    updated
}
