//! The expected results of every kernel, element by element and in f64. The code follows the
//! definitions, shares nothing with the kernels, and may be slow.

use super::generate::{Case, broadcast};
use artifact::{Attr, DType};
use half::{bf16, f16};
use lighterage_runtime::kernels::owned::OwnedTensor;
use ops::maps::{DYNAMIC, NF4, UNSIGNED};

/// A number as an element keeps it, if its type is half precision.
fn stored(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => bf16::from_f32(x as f32).to_f64(),
        DType::F16 => f16::from_f32(x as f32).to_f64(),
        _ => x,
    }
}

/// A tensor of numbers.
#[derive(Clone, Debug)]
struct Nd {
    shape: Vec<usize>,
    data: Vec<f64>,
}

impl Nd {
    fn fill(shape: &[usize], f: impl FnMut(&[usize]) -> f64) -> Nd {
        Nd {
            shape: shape.to_vec(),
            data: coordinates(shape)
                .iter()
                .map(|c| c.as_slice())
                .map(f)
                .collect(),
        }
    }
    fn place(&self, c: &[usize]) -> usize {
        c.iter().zip(&self.shape).fold(0, |at, (&c, &d)| at * d + c)
    }
    fn at(&self, c: &[usize]) -> f64 {
        self.data[self.place(c)]
    }
    fn at_mut(&mut self, c: &[usize]) -> &mut f64 {
        let place = self.place(c);
        &mut self.data[place]
    }
    /// The element that broadcasts to `c` of a larger shape.
    fn from(&self, c: &[usize]) -> f64 {
        let c = &c[c.len() - self.shape.len()..];
        self.at(&c
            .iter()
            .zip(&self.shape)
            .map(|(&c, &d)| if d == 1 { 0 } else { c })
            .collect::<Vec<_>>())
    }
}

/// Every place of a shape, in order.
fn coordinates(shape: &[usize]) -> Vec<Vec<usize>> {
    shape.iter().fold(vec![vec![]], |all, &d| {
        all.iter()
            .flat_map(|c| (0..d).map(move |i| [&c[..], &[i]].concat()))
            .collect()
    })
}
fn with(c: &[usize], d: usize, i: usize) -> Vec<usize> {
    let mut c = c.to_vec();
    c[d] = i;
    c
}
fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
/// erf by its Taylor series; operands are below 4.
fn erf(x: f64) -> f64 {
    let (mut sum, mut term) = (x, x);
    for n in 1..120 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}
fn gelu(x: f64, tanh: bool) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    0.5 * x
        * (1.0
            + if tanh {
                inner.tanh()
            } else {
                erf(x / 2f64.sqrt())
            })
}
fn flag(b: bool) -> f64 {
    f64::from(u8::from(b))
}

/// The results of a case; none for random numbers.
pub(crate) fn results(case: &Case) -> Option<Vec<Vec<f64>>> {
    let ins: Vec<Nd> = case
        .ins
        .iter()
        .map(|t| Nd {
            shape: t.shape().to_vec(),
            data: t.to_f64s(),
        })
        .collect();
    let attr = |key: &str| {
        case.attrs
            .iter()
            .find(|(k, _)| k == key)
            .map(|(_, a)| a)
            .unwrap()
    };
    let number = |key: &str| match *attr(key) {
        Attr::Int(i) => i as f64,
        Attr::Float(x) => x,
        Attr::Bool(b) => flag(b),
        ref other => panic!("{key} is {other:?}"),
    };
    // Sums in place are stored after each term, as in PyTorch. An element may have many terms.
    let add = |y: &mut f64, term: f64| *y = stored(*y + term, case.outs[0].0);
    let list = |key: &str| match attr(key) {
        Attr::Ints(v) => v.clone(),
        other => panic!("{key} is {other:?}"),
    };
    let y_shape = &case.outs.first().unwrap().1;
    let boolean = case.ins.first().is_some_and(|x| x.dtype() == DType::Bool);
    let is_int = !super::generate::is_float(case.outs[0].0);
    let one =
        |f: &dyn Fn(f64) -> f64| vec![ins[0].data.iter().map(|&x| f(x)).collect::<Vec<f64>>()];
    let two = |f: &dyn Fn(f64, f64) -> f64| {
        vec![Nd::fill(y_shape, |c| f(ins[0].from(c), ins[1].from(c))).data]
    };
    let value = || number("value");
    Some(match case.op {
        "neg" => one(&|x| -x),
        "abs" => one(&|x| x.abs()),
        "sign" => one(&|x| if x > 0.0 { 1.0 } else { -flag(x < 0.0) }),
        "exp" => one(&|x| x.exp()),
        "log" => one(&|x| x.ln()),
        "sqrt" => one(&|x| x.sqrt()),
        "rsqrt" => one(&|x| 1.0 / x.sqrt()),
        "reciprocal" => one(&|x| 1.0 / x),
        "tanh" => one(&|x| x.tanh()),
        "sigmoid" => one(&sigmoid),
        "sin" => one(&|x| x.sin()),
        "cos" => one(&|x| x.cos()),
        "atan" => one(&|x| x.atan()),
        "erf" => one(&erf),
        "relu" => one(&|x| x.max(0.0)),
        "silu" => one(&|x| x * sigmoid(x)),
        "gelu" => one(&|x| gelu(x, number("tanh") != 0.0)),
        "bitwise_not" if boolean => one(&|x| 1.0 - x),
        "bitwise_not" => one(&|x| -1.0 - x),
        "logical_not" => one(&|x| flag(x == 0.0)),
        "cast" if case.outs[0].0 == DType::Bool => one(&|x| flag(x != 0.0)),
        "cast" => one(&|x| if is_int { x.trunc() } else { x }),
        "clamp" => one(&|x| x.max(number("min")).min(number("max"))),
        "add_scalar" => one(&|x| x + value()),
        "mul_scalar" => one(&|x| x * value()),
        "div_scalar" => one(&|x| x / value()),
        "rsub_scalar" => one(&|x| value() - x),
        "pow_scalar" => one(&|x| x.powf(value())),
        "eq_scalar" => one(&|x| flag(x == value())),
        "ne_scalar" => one(&|x| flag(x != value())),
        "lt_scalar" => one(&|x| flag(x < value())),
        "le_scalar" => one(&|x| flag(x <= value())),
        "gt_scalar" => one(&|x| flag(x > value())),
        "ge_scalar" => one(&|x| flag(x >= value())),
        "add" => two(&|a, b| a + b),
        "sub" => two(&|a, b| a - b),
        "mul" => two(&|a, b| a * b),
        "div" => two(&|a, b| a / b),
        "pow" => two(&|a, b| a.powf(b)),
        "maximum" => two(&|a, b| a.max(b)),
        "minimum" => two(&|a, b| a.min(b)),
        "bitwise_and" => two(&|a, b| (a as i64 & b as i64) as f64),
        "bitwise_or" => two(&|a, b| (a as i64 | b as i64) as f64),
        "bitwise_xor" => two(&|a, b| (a as i64 ^ b as i64) as f64),
        "eq" => two(&|a, b| flag(a == b)),
        "ne" => two(&|a, b| flag(a != b)),
        "lt" => two(&|a, b| flag(a < b)),
        "le" => two(&|a, b| flag(a <= b)),
        "gt" => two(&|a, b| flag(a > b)),
        "ge" => two(&|a, b| flag(a >= b)),
        "logical_and" => two(&|a, b| flag(a != 0.0 && b != 0.0)),
        "logical_or" => two(&|a, b| flag(a != 0.0 || b != 0.0)),
        "where" => {
            vec![
                Nd::fill(y_shape, |c| {
                    if ins[0].from(c) != 0.0 {
                        ins[1].from(c)
                    } else {
                        ins[2].from(c)
                    }
                })
                .data,
            ]
        }
        "tanh_bwd" => two(&|dy, y| dy * (1.0 - y * y)),
        "sigmoid_bwd" => two(&|dy, y| dy * y * (1.0 - y)),
        // Derivatives as difference quotients.
        "silu_bwd" => two(&|dy, x| dy * slope(x, &|x| x * sigmoid(x))),
        "gelu_bwd" => two(&|dy, x| dy * slope(x, &|x| gelu(x, number("tanh") != 0.0))),
        "threshold_bwd" => two(&|dy, x| if x > value() { dy } else { 0.0 }),
        "dropout_bwd" => two(&|dy, mask| dy * mask * number("scale")),
        "sum" | "mean" | "amax" | "amin" | "any" => {
            let dims = list("dims");
            let x = &ins[0];
            let squeezed: Vec<usize> = x
                .shape
                .iter()
                .enumerate()
                .map(|(d, &n)| if dims.contains(&(d as i64)) { 1 } else { n })
                .collect();
            let mut terms = Nd::fill(&squeezed, |_| 0.0)
                .data
                .iter()
                .map(|_| vec![])
                .collect::<Vec<Vec<f64>>>();
            let y = Nd::fill(&squeezed, |_| 0.0);
            for c in coordinates(&x.shape) {
                let to: Vec<usize> = c
                    .iter()
                    .zip(&squeezed)
                    .map(|(&c, &d)| if d == 1 { 0 } else { c })
                    .collect();
                terms[y.place(&to)].push(x.at(&c));
            }
            let fold = |t: &Vec<f64>| match case.op {
                "sum" => t.iter().sum(),
                "mean" => t.iter().sum::<f64>() / t.len() as f64,
                "amax" => t.iter().copied().fold(f64::NEG_INFINITY, f64::max),
                "amin" => t.iter().copied().fold(f64::INFINITY, f64::min),
                _ => flag(t.iter().any(|&x| x != 0.0)),
            };
            vec![terms.iter().map(fold).collect()]
        }
        "cumsum" => {
            let dim = number("dim") as usize;
            vec![
                Nd::fill(y_shape, |c| {
                    (0..=c[dim]).map(|i| ins[0].at(&with(c, dim, i))).sum()
                })
                .data,
            ]
        }
        "topk" => {
            let (dim, largest) = (number("dim") as usize, number("largest") != 0.0);
            let x = &ins[0];
            let sorted = |c: &[usize]| {
                let mut line: Vec<(f64, usize)> = (0..x.shape[dim])
                    .map(|i| (x.at(&with(c, dim, i)), i))
                    .collect();
                line.sort_by(|a, b| {
                    if largest {
                        b.0.total_cmp(&a.0)
                    } else {
                        a.0.total_cmp(&b.0)
                    }
                });
                line[c[dim]]
            };
            vec![
                Nd::fill(y_shape, |c| sorted(c).0).data,
                Nd::fill(y_shape, |c| sorted(c).1 as f64).data,
            ]
        }
        "softmax" | "log_softmax" | "softmax_bwd" | "log_softmax_bwd" => {
            let dim = number("dim") as usize;
            let n = ins[0].shape[dim];
            let line =
                |x: &Nd, c: &[usize]| (0..n).map(|i| x.at(&with(c, dim, i))).collect::<Vec<f64>>();
            let f = |c: &[usize]| {
                let x = line(&ins[0], c);
                let exp = || x.iter().map(|x| x.exp()).sum::<f64>();
                match case.op {
                    "softmax" => x[c[dim]].exp() / exp(),
                    "log_softmax" => x[c[dim]] - exp().ln(),
                    "softmax_bwd" => {
                        let y = line(&ins[1], c);
                        let dot: f64 = x.iter().zip(&y).map(|(dy, y)| dy * y).sum();
                        y[c[dim]] * (x[c[dim]] - dot)
                    }
                    _ => x[c[dim]] - ins[1].at(c).exp() * x.iter().sum::<f64>(),
                }
            };
            vec![Nd::fill(y_shape, f).data]
        }
        "layer_norm" => {
            let (x, n) = (&ins[0], norm_size(&ins[0], number("dims")));
            let (mut y, mut means, mut rstds) = (vec![], vec![], vec![]);
            for row in x.data.chunks(n) {
                let mean = row.iter().sum::<f64>() / n as f64;
                let var = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
                let rstd = 1.0 / (var + number("eps")).sqrt();
                means.push(mean);
                rstds.push(rstd);
                y.extend(row.iter().enumerate().map(|(i, x)| {
                    let w = ins.get(1).map_or(1.0, |w| w.data[i]);
                    (x - mean) * rstd * w + ins.get(2).map_or(0.0, |b| b.data[i])
                }));
            }
            vec![y, means, rstds]
        }
        "layer_norm_bwd" => {
            let (dy, x, n) = (&ins[0], &ins[1], norm_size(&ins[1], number("dims")));
            let (mut dx, mut dw, mut db) = (vec![], vec![0.0; n], vec![0.0; n]);
            for (row, (dy, x)) in dy.data.chunks(n).zip(x.data.chunks(n)).enumerate() {
                let (mean, rstd) = (ins[2].data[row], ins[3].data[row]);
                let normal: Vec<f64> = x.iter().map(|x| (x - mean) * rstd).collect();
                let g: Vec<f64> = (0..n)
                    .map(|i| dy[i] * ins.get(4).map_or(1.0, |w| w.data[i]))
                    .collect();
                let mean_g = g.iter().sum::<f64>() / n as f64;
                let mean_gx = (0..n).map(|i| g[i] * normal[i]).sum::<f64>() / n as f64;
                for i in 0..n {
                    dx.push(rstd * (g[i] - mean_g - normal[i] * mean_gx));
                    dw[i] += dy[i] * normal[i];
                    db[i] += dy[i];
                }
            }
            wanted([dx, dw, db], &list("mask"))
        }
        "batch_norm" => {
            let (x, channels) = (&ins[0], ins[0].shape[1]);
            let eps = number("eps");
            let (mut means, mut rstds, mut variances) = (vec![], vec![], vec![]);
            for c in 0..channels {
                let all: Vec<f64> = coordinates(&x.shape)
                    .iter()
                    .filter(|at| at[1] == c)
                    .map(|at| x.at(at))
                    .collect();
                let n = all.len() as f64;
                let mean = all.iter().sum::<f64>() / n;
                let squares: f64 = all.iter().map(|x| (x - mean).powi(2)).sum();
                means.push(mean);
                rstds.push(1.0 / (squares / n + eps).sqrt());
                variances.push(squares / (n - 1.0));
            }
            let y = Nd::fill(y_shape, |at| {
                (x.at(at) - means[at[1]]) * rstds[at[1]] * ins[1].data[at[1]] + ins[2].data[at[1]]
            });
            vec![y.data, means, rstds, variances]
        }
        "batch_norm_bwd" => {
            let (dy, x, w, mean, rstd) =
                (&ins[0], &ins[1], &ins[2].data, &ins[3].data, &ins[4].data);
            let channels = x.shape[1];
            let (mut dw, mut db) = (vec![0.0; channels], vec![0.0; channels]);
            let normal = |at: &[usize]| (x.at(at) - mean[at[1]]) * rstd[at[1]];
            for at in coordinates(&x.shape) {
                dw[at[1]] += dy.at(&at) * normal(&at);
                db[at[1]] += dy.at(&at);
            }
            let n = x.data.len() as f64 / channels as f64;
            let dx = Nd::fill(&x.shape, |at| {
                let c = at[1];
                w[c] * rstd[c] * (dy.at(at) - db[c] / n - normal(at) * dw[c] / n)
            });
            wanted([dx.data, dw, db], &list("mask"))
        }
        "matmul" | "addmm" | "matmul_sum" => {
            let (a, added) = match (case.op, case.ins.len()) {
                ("addmm", _) => (1, Some(0)),
                ("matmul_sum", 3) => (0, Some(2)),
                _ => (0, None),
            };
            let (x, w) = (&ins[a], &ins[a + 1]);
            let (ta, tb) = (number("ta") != 0.0, number("tb") != 0.0);
            let rank = x.shape.len();
            let inner = if ta {
                x.shape[rank - 2]
            } else {
                x.shape[rank - 1]
            };
            let pair = |c: &[usize], i, j, t: bool| {
                [&c[..rank - 2], &if t { [j, i] } else { [i, j] }].concat()
            };
            vec![
                Nd::fill(y_shape, |c| {
                    let (i, j) = (c[rank - 2], c[rank - 1]);
                    let start = added.map_or(0.0, |added| ins[added].from(c));
                    start
                        + (0..inner)
                            .map(|k| x.at(&pair(c, i, k, ta)) * w.at(&pair(c, k, j, tb)))
                            .sum::<f64>()
                })
                .data,
            ]
        }
        "grouped_matmul" | "grouped_outer" => {
            let (x, w) = (&ins[0], &ins[1]);
            let (mut group_of, mut next) = (vec![None; x.shape[0]], 0);
            for (g, &end) in ins[2].data.iter().enumerate() {
                let end = next.max(end as usize);
                group_of[next..end].fill(Some(g));
                next = end;
            }
            let y = match case.op {
                "grouped_outer" => Nd::fill(y_shape, |c| {
                    let rows = (0..x.shape[0]).filter(|&row| group_of[row] == Some(c[0]));
                    rows.map(|row| x.at(&[row, c[1]]) * w.at(&[row, c[2]]))
                        .sum()
                }),
                _ => Nd::fill(y_shape, |c| {
                    let Some(g) = group_of[c[0]] else {
                        return 0.0;
                    };
                    let of = |k| match number("tb") != 0.0 {
                        true => w.at(&[g, c[1], k]),
                        false => w.at(&[g, k, c[1]]),
                    };
                    (0..x.shape[1]).map(|k| x.at(&[c[0], k]) * of(k)).sum()
                }),
            };
            vec![y.data]
        }
        "convolution" | "convolution_bwd" => {
            convolution(case, &ins, &list, number("groups") as usize)
        }
        "max_pool2d" => {
            let x = &ins[0];
            let (kernel, stride) = (list("kernel"), list("stride"));
            let (padding, dilation) = (list("padding"), list("dilation"));
            let best = |c: &[usize]| {
                let mut best = (f64::NEG_INFINITY, usize::MAX);
                for ky in 0..kernel[0] {
                    for kx in 0..kernel[1] {
                        let y = c[2] as i64 * stride[0] + ky * dilation[0] - padding[0];
                        let z = c[3] as i64 * stride[1] + kx * dilation[1] - padding[1];
                        let inside =
                            0 <= y && y < x.shape[2] as i64 && 0 <= z && z < x.shape[3] as i64;
                        if inside && x.at(&[c[0], c[1], y as usize, z as usize]) > best.0 {
                            let (y, z) = (y as usize, z as usize);
                            best = (x.at(&[c[0], c[1], y, z]), y * x.shape[3] + z);
                        }
                    }
                }
                // No element is in the window: the kernel's own convention, which is not part of
                // the definition.
                if best.1 == usize::MAX {
                    (best.0, 0)
                } else {
                    best
                }
            };
            vec![
                Nd::fill(y_shape, |c| best(c).0).data,
                Nd::fill(y_shape, |c| best(c).1 as f64).data,
            ]
        }
        "max_pool2d_bwd" => {
            let mut dx = Nd::fill(y_shape, |_| 0.0);
            for c in coordinates(&ins[0].shape) {
                let place = ins[1].at(&c) as usize;
                *dx.at_mut(&[c[0], c[1], place / y_shape[3], place % y_shape[3]]) += ins[0].at(&c);
            }
            vec![dx.data]
        }
        "sdpa" | "sdpa_bwd" => attention(case, &ins, number("causal") != 0.0, number("scale")),
        "sdpa_rows" | "sdpa_rows_bwd" => {
            let places = [list("first"), list("heads")];
            attention_rows(case, &ins, places, number("causal") != 0.0, number("scale"))
        }
        "embedding" => {
            let rank = ins[1].shape.len();
            vec![
                Nd::fill(y_shape, |c| {
                    ins[0].at(&[ins[1].at(&c[..rank]) as usize, c[rank]])
                })
                .data,
            ]
        }
        "embedding_bwd" => {
            let (mut dw, rank) = (Nd::fill(y_shape, |_| 0.0), ins[1].shape.len());
            for c in coordinates(&ins[0].shape) {
                let row = ins[1].at(&c[..rank]);
                if row != number("padding") {
                    *dw.at_mut(&[row as usize, c[rank]]) += ins[0].at(&c);
                }
            }
            vec![dw.data]
        }
        "nll_loss" => {
            let targets = &ins[1].data;
            let counts: Vec<f64> = targets
                .iter()
                .map(|&t| flag(t != number("ignore")))
                .collect();
            let terms: Vec<f64> = (0..targets.len())
                .map(|i| {
                    if counts[i] == 0.0 {
                        0.0
                    } else {
                        -ins[0].at(&[i, targets[i] as usize])
                    }
                })
                .collect();
            let (sum, weight): (f64, f64) = (terms.iter().sum(), counts.iter().sum());
            let loss = match number("reduction") as i64 {
                0 => terms,
                1 => vec![sum / weight],
                _ => vec![sum],
            };
            vec![loss, vec![weight]]
        }
        "nll_sum" => {
            let counts = |i: &usize| ins[1].data[*i] != number("ignore");
            let terms = (0..ins[1].data.len())
                .filter(counts)
                .map(|i| -ins[0].at(&[i, ins[1].data[i] as usize]));
            vec![vec![
                ins.get(2).map_or(0.0, |before| before.data[0]) + terms.sum::<f64>(),
            ]]
        }
        "nll_loss_bwd" => {
            let mut dx = Nd::fill(y_shape, |_| 0.0);
            for (i, &t) in ins[1]
                .data
                .iter()
                .enumerate()
                .filter(|(_, t)| **t != number("ignore"))
            {
                *dx.at_mut(&[i, t as usize]) = match number("reduction") as i64 {
                    0 => -ins[0].data[i],
                    1 => -ins[0].data[0] / ins[2].data[0],
                    _ => -ins[0].data[0],
                };
            }
            vec![dx.data]
        }
        "gather" => {
            let dim = number("dim") as usize;
            vec![Nd::fill(y_shape, |c| ins[0].at(&with(c, dim, ins[1].at(c) as usize))).data]
        }
        "scatter" | "scatter_add" | "scatter_value" => {
            let (mut y, dim) = (ins[0].clone(), number("dim") as usize);
            for c in coordinates(&ins[1].shape) {
                let to = with(&c, dim, ins[1].at(&c) as usize);
                match case.op {
                    "scatter" => *y.at_mut(&to) = ins[2].at(&c),
                    "scatter_add" => add(y.at_mut(&to), ins[2].at(&c)),
                    _ => *y.at_mut(&to) = number("value"),
                }
            }
            vec![y.data]
        }
        "index" | "index_put" => {
            let first = if case.op == "index" { 1 } else { 2 };
            let (x, indices) = (&ins[0], &ins[first..]);
            let lead = broadcast(&indices.iter().map(|i| &i.shape[..]).collect::<Vec<_>>()).len();
            let place = |c: &[usize]| {
                let index = indices.iter().zip(&x.shape);
                let index =
                    index.map(|(i, &n)| (i.from(&c[..lead]) as i64).rem_euclid(n as i64) as usize);
                index
                    .chain(c[lead..].iter().copied())
                    .collect::<Vec<usize>>()
            };
            if case.op == "index" {
                return Some(vec![Nd::fill(y_shape, |c| x.at(&place(c))).data]);
            }
            let shape = [
                &broadcast(&indices.iter().map(|i| &i.shape[..]).collect::<Vec<_>>()),
                &x.shape[indices.len()..],
            ];
            let mut y = x.clone();
            for c in coordinates(&shape.concat()) {
                match number("accumulate") != 0.0 {
                    true => add(y.at_mut(&place(&c)), ins[1].from(&c)),
                    false => *y.at_mut(&place(&c)) = ins[1].from(&c),
                }
            }
            vec![y.data]
        }
        "permute" => {
            let dims = list("dims");
            let back = |c: &[usize]| {
                let mut from = vec![0; c.len()];
                dims.iter().zip(c).for_each(|(&d, &i)| from[d as usize] = i);
                from
            };
            vec![Nd::fill(y_shape, |c| ins[0].at(&back(c))).data]
        }
        "expand" => vec![Nd::fill(y_shape, |c| ins[0].from(c)).data],
        "flip" => {
            let dims = list("dims");
            let back = |c: &[usize]| -> Vec<usize> {
                let flipped = |d: usize| dims.contains(&(d as i64));
                c.iter()
                    .enumerate()
                    .map(|(d, &i)| if flipped(d) { y_shape[d] - 1 - i } else { i })
                    .collect()
            };
            vec![Nd::fill(y_shape, |c| ins[0].at(&back(c))).data]
        }
        "slice" | "slice_scatter" => {
            let (dim, start, step) = (
                number("dim") as usize,
                number("start") as usize,
                number("step") as usize,
            );
            let place = |c: &[usize]| with(c, dim, start + step * c[dim]);
            if case.op == "slice" {
                return Some(vec![Nd::fill(y_shape, |c| ins[0].at(&place(c))).data]);
            }
            let mut y = ins[0].clone();
            for c in coordinates(&ins[1].shape) {
                *y.at_mut(&place(&c)) = ins[1].at(&c);
            }
            vec![y.data]
        }
        "cat" => {
            let dim = number("dim") as usize;
            vec![
                Nd::fill(y_shape, |c| {
                    let mut at = c[dim];
                    for part in &ins {
                        if at < part.shape[dim] {
                            return part.at(&with(c, dim, at));
                        }
                        at -= part.shape[dim];
                    }
                    panic!("{c:?} is in no part")
                })
                .data,
            ]
        }
        "pad" => {
            let pad = list("pad");
            let f = |c: &[usize]| {
                let from: Vec<i64> = c
                    .iter()
                    .enumerate()
                    .map(|(d, &i)| i as i64 - pad[2 * d])
                    .collect();
                let inside = from
                    .iter()
                    .zip(&ins[0].shape)
                    .all(|(&i, &n)| 0 <= i && i < n as i64);
                if inside {
                    ins[0].at(&from.iter().map(|&i| i as usize).collect::<Vec<_>>())
                } else {
                    number("value")
                }
            };
            vec![Nd::fill(y_shape, f).data]
        }
        "full" => vec![Nd::fill(y_shape, |_| number("value")).data],
        "arange" => {
            vec![Nd::fill(y_shape, |c| number("start") + number("step") * c[0] as f64).data]
        }
        "rand" | "randn" | "dropout" | "dropout_key" | "round_random" => return None,
        "rng_next" => vec![vec![ins[0].data[0], ins[0].data[1] + 1.0]],
        "sum_squares" => vec![vec![ins[0].data.iter().map(|x| x * x).sum()]],
        "clip_scale" => {
            let norm = ins.iter().map(|sum| sum.data[0]).sum::<f64>().sqrt();
            vec![vec![(number("max_norm") / (norm + 1e-6)).min(1.0)]]
        }
        "adamw" => {
            let (step, scale) = (ins[4].data[0], scale(&ins, 6));
            let mut results = vec![vec![]; 3];
            for i in 0..ins[0].data.len() {
                let [p, g, m, v] = [0, 1, 2, 3].map(|k| ins[k].data[i]);
                let new = adamw([p, g * scale, m, v], step, &ins[5].data);
                results
                    .iter_mut()
                    .zip(new)
                    .for_each(|(list, x)| list.push(x));
            }
            results
        }
        "adamw_8bit" => {
            let (step, scale) = (ins[6].data[0], scale(&ins, 8));
            let mut results = vec![vec![], vec![], vec![], vec![], vec![]];
            for i in 0..ins[0].data.len() {
                let decoded = |map: &[f32], k: usize| {
                    let largest = ins[k + 2].data[i / 256] as f32;
                    f64::from(map[ins[k].data[i] as usize] * largest)
                };
                let (m, v) = (decoded(&DYNAMIC, 2), decoded(&UNSIGNED, 3));
                let [p, g] = [0, 1].map(|k| ins[k].data[i]);
                let [p, m, v] = adamw([p, g * scale, m, v], step, &ins[7].data);
                // A code depends on each bit of its number; see the tests of kernels/optim.rs.
                for (list, x) in results.iter_mut().zip([p, f64::NAN, f64::NAN]) {
                    list.push(x);
                }
                for (list, x) in results[3..].iter_mut().zip([m, v]) {
                    match list.get_mut(i / 256) {
                        Some(most) => *most = x.abs().max(*most),
                        None => list.push(x.abs()),
                    }
                }
            }
            results
        }
        "nf4" => {
            let n = case.outs[0].1.iter().product();
            let number = |i: usize| {
                let block = i / 64;
                let size = DYNAMIC[ins[1].data[block] as usize] * ins[2].data[block / 256] as f32;
                let byte = ins[0].data[i / 2] as usize;
                let code = if i.is_multiple_of(2) {
                    byte / 16
                } else {
                    byte % 16
                };
                f64::from(NF4[code] * (size + ins[3].data[0] as f32))
            };
            vec![(0..n).map(number).collect()]
        }
        "adamw_split" => {
            let (step, scale) = (ins[5].data[0], scale(&ins, 7));
            let mut results = vec![vec![]; 4];
            for i in 0..ins[0].data.len() {
                let [high, g, low, m, v] = [0, 1, 2, 3, 4].map(|k| ins[k].data[i]);
                let bits = (high as f32).to_bits().wrapping_add_signed(low as i32);
                let [p, m, v] = adamw(
                    [f32::from_bits(bits).into(), g * scale, m, v],
                    step,
                    &ins[6].data,
                );
                // The lower half depends on each bit of p; see the tests of kernels/optim.rs.
                results
                    .iter_mut()
                    .zip([p, f64::NAN, m, v])
                    .for_each(|(list, x)| list.push(x));
            }
            results
        }
        "sgd" => {
            let [lr, _, decay] = ins[2].data[..] else {
                panic!("three hyper-parameters")
            };
            let scale = scale(&ins, 3);
            two_lists(&ins, |p, g, _| (p - lr * (g * scale + decay * p), 0.0))
                .into_iter()
                .take(1)
                .collect()
        }
        "sgd_momentum" => {
            let [lr, momentum, decay] = ins[3].data[..] else {
                panic!("three hyper-parameters")
            };
            let scale = scale(&ins, 4);
            two_lists(&ins, |p, g, b| {
                let b = momentum * b + g * scale + decay * p;
                (p - lr * b, b)
            })
        }
        other => panic!("runtime/tests/kernels/reference.rs does not define {other}"),
    })
}

/// The gradient's factor: the optional operand `i`.
fn scale(ins: &[Nd], i: usize) -> f64 {
    ins.get(i).map_or(1.0, |scale| scale.data[0])
}
/// An element's new parameter and moments.
fn adamw([p, g, m, v]: [f64; 4], step: f64, hyper: &[f64]) -> [f64; 3] {
    let &[lr, beta1, beta2, eps, decay] = hyper else {
        panic!("five hyper-parameters")
    };
    let (m, v) = (
        beta1 * m + (1.0 - beta1) * g,
        beta2 * v + (1.0 - beta2) * g * g,
    );
    let (m_hat, v_hat) = (m / (1.0 - beta1.powf(step)), v / (1.0 - beta2.powf(step)));
    [p - lr * decay * p - lr * m_hat / (v_hat.sqrt() + eps), m, v]
}

/// The slope of `f` at `x`, by a difference of fourth order.
fn slope(x: f64, f: &dyn Fn(f64) -> f64) -> f64 {
    let h = 1e-3;
    (8.0 * (f(x + h) - f(x - h)) - (f(x + 2.0 * h) - f(x - 2.0 * h))) / (12.0 * h)
}
fn two_lists(ins: &[Nd], f: impl Fn(f64, f64, f64) -> (f64, f64)) -> Vec<Vec<f64>> {
    let n = ins[0].data.len();
    let third = |i: usize| ins[2].data.get(i).copied().unwrap_or(0.0);
    let (a, b) = (0..n)
        .map(|i| f(ins[0].data[i], ins[1].data[i], third(i)))
        .unzip();
    vec![a, b]
}
/// The number of elements of the last `dims` dimensions.
fn norm_size(x: &Nd, dims: f64) -> usize {
    x.shape[x.shape.len() - dims as usize..]
        .iter()
        .product::<usize>()
        .max(1)
}
fn wanted(all: [Vec<f64>; 3], mask: &[i64]) -> Vec<Vec<f64>> {
    all.into_iter()
        .zip(mask)
        .filter(|(_, m)| **m == 1)
        .map(|(x, _)| x)
        .collect()
}

/// Every product of an input, a weight and an output, once; its derivatives are the same products.
fn convolution(
    case: &Case,
    ins: &[Nd],
    list: &dyn Fn(&str) -> Vec<i64>,
    groups: usize,
) -> Vec<Vec<f64>> {
    let backward = case.op == "convolution_bwd";
    let (x, w) = if backward {
        (&ins[1], &ins[2])
    } else {
        (&ins[0], &ins[1])
    };
    let y_shape = if backward {
        ins[0].shape.clone()
    } else {
        case.outs[0].1.clone()
    };
    let (stride, padding, dilation) = (list("stride"), list("padding"), list("dilation"));
    let mut y = Nd::fill(&y_shape, |c| {
        if !backward && ins.len() == 3 {
            ins[2].data[c[1]]
        } else {
            0.0
        }
    });
    let (mut dx, mut dw) = (Nd::fill(&x.shape, |_| 0.0), Nd::fill(&w.shape, |_| 0.0));
    let outputs = w.shape[0] / groups;
    for c in coordinates(&y_shape) {
        for k in coordinates(&w.shape[1..]) {
            let mut from = vec![c[0], c[1] / outputs * w.shape[1] + k[0]];
            let at: Vec<i64> = (0..c.len() - 2)
                .map(|d| c[d + 2] as i64 * stride[d] + k[d + 1] as i64 * dilation[d] - padding[d])
                .collect();
            if at
                .iter()
                .zip(&x.shape[2..])
                .any(|(&i, &n)| i < 0 || n as i64 <= i)
            {
                continue;
            }
            from.extend(at.iter().map(|&i| i as usize));
            let tap = [&[c[1]], &k[..]].concat();
            *y.at_mut(&c) += x.at(&from) * w.at(&tap);
            if backward {
                *dx.at_mut(&from) += ins[0].at(&c) * w.at(&tap);
                *dw.at_mut(&tap) += ins[0].at(&c) * x.at(&from);
            }
        }
    }
    if !backward {
        return vec![y.data];
    }
    let mut db = vec![0.0; y_shape[1]];
    coordinates(&y_shape)
        .iter()
        .for_each(|c| db[c[1]] += ins[0].at(c));
    wanted([dx.data, dw.data, db], &list("mask"))
}

/// The same with heads inside rows: `sdpa` of permuted heads.
fn attention_rows(
    case: &Case,
    ins: &[Nd],
    [first, heads]: [Vec<i64>; 2],
    causal: bool,
    scale: f64,
) -> Vec<Vec<f64>> {
    let swapped = |x: &Nd, first: usize, heads: usize| {
        let shape = [x.shape[0], heads, x.shape[1], x.shape[3]];
        Nd::fill(&shape, |c| x.at(&[c[0], c[2], first + c[1], c[3]]))
    };
    let backward = case.op.ends_with("_bwd");
    let q = usize::from(backward);
    let mut plain = ins.to_vec();
    let n_heads = [heads[0], heads[1], heads[1]].map(|n| n as usize);
    for i in 0..3 {
        if first[i] >= 0 {
            plain[q + i] = swapped(&ins[q + i], first[i] as usize, n_heads[i]);
        }
    }
    if backward {
        for i in [0, 4] {
            plain[i] = swapped(&ins[i], 0, n_heads[0]);
        }
    }
    let sizes = [0, 1, 2].map(|i| plain[q + i].shape.clone());
    let out_shape = [sizes[0][0], sizes[0][1], sizes[0][2], sizes[2][3]];
    let found = attention(case, &plain, causal, scale);
    let nd = |data: &Vec<f64>, shape: &[usize]| Nd {
        shape: shape.to_vec(),
        data: data.clone(),
    };
    if !backward {
        let out = nd(&found[0], &out_shape);
        return vec![swapped(&out, 0, out_shape[2]).data, found[1].clone()];
    }
    let gradients = [0, 1, 2].map(|i| nd(&found[i], &sizes[i]));
    if case.outs.len() == 1 {
        let mut all = Nd::fill(&case.outs[0].1, |_| 0.0);
        for (i, x) in gradients.iter().enumerate() {
            for c in coordinates(&x.shape) {
                *all.at_mut(&[c[0], c[2], first[i] as usize + c[1], c[3]]) = x.at(&c);
            }
        }
        return vec![all.data];
    }
    let written = |(i, x): (usize, &Nd)| match first[i] {
        -1 => x.data.clone(),
        _ => swapped(x, 0, x.shape[2]).data,
    };
    gradients.iter().enumerate().map(written).collect()
}

/// A random word of an element: Philox4x32-10 as its paper has it. The key is [seed, step, stream,
/// ..], and a block of four words is counted by [block, stream, step].
fn word(key: &[i64], element: usize) -> u32 {
    let (seed, block) = (key[0] as u64, element as u64 / 4);
    let [mut k0, mut k1] = [seed as u32, (seed >> 32) as u32];
    let [low, high] = [block as u32, (block >> 32) as u32];
    let mut x = [low, high, key[2] as u32, key[1] as u32];
    for _ in 0..10 {
        let a = u64::from(x[0]) * 0xD251_1F53;
        let b = u64::from(x[2]) * 0xCD9E_8D57;
        let [a1, b1] = [a, b].map(|product| (product >> 32) as u32);
        x = [b1 ^ x[1] ^ k0, b as u32, a1 ^ x[3] ^ k1, a as u32];
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    x[element % 4]
}

fn attention(case: &Case, ins: &[Nd], causal: bool, scale: f64) -> Vec<Vec<f64>> {
    let backward = case.op.ends_with("_bwd");
    let (q, k, v) = if backward {
        (&ins[1], &ins[2], &ins[3])
    } else {
        (&ins[0], &ins[1], &ins[2])
    };
    let from = if backward { 6 } else { 3 };
    let is_key = |t: &&OwnedTensor| t.dtype() == DType::I64 && *t.shape() == [4];
    let key = case.ins[from..].last().filter(is_key);
    let key = key.map(OwnedTensor::to_i64s);
    let mask = ins[..ins.len() - usize::from(key.is_some())].get(from);
    let dtype = case.ins[from.min(case.ins.len() - 1)].dtype();
    let is_bool = dtype == DType::Bool;
    // Numbers of documents.
    let number = |m: &Nd, c: &[usize], t: usize| m.at(&[c[0].min(m.shape[0] - 1), t]);
    let (heads, groups, keys) = (q.shape[1], k.shape[1], k.shape[2]);
    let group = |h: usize| h / (heads / groups);
    // Probabilities and the logsumexp of a query.
    let row = |c: &[usize]| {
        let score = |t: usize| {
            let dot: f64 = (0..q.shape[3])
                .map(|d| q.at(&[c[0], c[1], c[2], d]) * k.at(&[c[0], group(c[1]), t, d]))
                .sum();
            let of_documents =
                |m: &&Nd| dtype == DType::I64 && number(m, c, c[2]) != number(m, c, t);
            if mask.filter(of_documents).is_some() {
                return f64::NEG_INFINITY;
            }
            let mask = mask.filter(|_| dtype != DType::I64);
            let mask = mask.map_or(0.0, |m| match (m.from(&[c[0], c[1], c[2], t]), is_bool) {
                (1.0, true) => 0.0,
                (_, true) => f64::NEG_INFINITY,
                (x, false) => x,
            });
            if causal && c[2] < t {
                f64::NEG_INFINITY
            } else {
                dot * scale + mask
            }
        };
        let scores: Vec<f64> = (0..keys).map(score).collect();
        let sum: f64 = scores.iter().map(|s| s.exp()).sum();
        // A query that may use no key.
        let sum = if sum == 0.0 { 1.0 } else { sum };
        (
            scores.iter().map(|s| s.exp() / sum).collect::<Vec<f64>>(),
            sum.ln(),
        )
    };
    // The factor of a weight: 1, or, if some are dropped, 0 or one for all that are kept.
    let factor = |c: &[usize], t: usize| {
        let Some(key) = &key else { return 1.0 };
        let p = f64::from_bits(key[3] as u64);
        let place = ((c[0] * heads + c[1]) * q.shape[2] + c[2]) * keys + t;
        let kept = p <= f64::from(word(key, place)) / 4_294_967_296.0;
        if kept { 1.0 / (1.0 - p) } else { 0.0 }
    };
    if !backward {
        let out = Nd::fill(&[q.shape[0], heads, q.shape[2], v.shape[3]], |c| {
            row(c)
                .0
                .iter()
                .enumerate()
                .map(|(t, p)| p * factor(c, t) * v.at(&[c[0], group(c[1]), t, c[3]]))
                .sum()
        });
        return vec![out.data, Nd::fill(&case.outs[1].1, |c| row(c).1).data];
    }
    let dout = &ins[0];
    let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| Nd::fill(&x.shape, |_| 0.0));
    for c in coordinates(&q.shape[..3]) {
        let (p, g) = (row(&c).0, group(c[1]));
        let dp: Vec<f64> = (0..keys)
            .map(|t| {
                let sum: f64 = (0..v.shape[3])
                    .map(|e| dout.at(&[&c[..], &[e]].concat()) * v.at(&[c[0], g, t, e]))
                    .sum();
                factor(&c, t) * sum
            })
            .collect();
        let delta: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
        for t in 0..keys {
            let ds = p[t] * (dp[t] - delta) * scale;
            for d in 0..q.shape[3] {
                *dq.at_mut(&[&c[..], &[d]].concat()) += ds * k.at(&[c[0], g, t, d]);
                *dk.at_mut(&[c[0], g, t, d]) += ds * q.at(&[&c[..], &[d]].concat());
            }
            for e in 0..v.shape[3] {
                *dv.at_mut(&[c[0], g, t, e]) +=
                    factor(&c, t) * p[t] * dout.at(&[&c[..], &[e]].concat());
            }
        }
    }
    vec![dq.data, dk.data, dv.data]
}
