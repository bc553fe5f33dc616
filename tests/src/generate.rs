//! Random typed graphs, random data for them, and random decisions. Values are small integers in
//! floats, and every op is exact on them, so two computations of a step must agree bit for bit.

use crate::evaluate::Tensors;
use ir::graph::Output;
use ir::op::{Attr, Op};
use ir::{DType, Graph, Id, Phase, State, StateKind, TensorType, Value};
use passes::decide::{Decisions, Gap, Means, Problem, Reason};
use passes::graph::optimizer::HYPER;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// A configuration with `cases` cases, the same in every run. `PROPTEST_RNG_SEED` gives other
/// cases, `PROPTEST_CASES` another number.
pub fn config(cases: u32) -> ProptestConfig {
    let given = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() {
        given.cases
    } else {
        cases
    };
    let rng_seed = if given.rng_seed == RngSeed::Random {
        RngSeed::Fixed(0)
    } else {
        given.rng_seed
    };
    ProptestConfig {
        cases,
        rng_seed,
        failure_persistence: None,
        ..given
    }
}

/// One choice of the generator: the op, two operands, a variant.
pub type Choice = (u8, u16, u16, u8);

/// A graph's choices: its nodes, and its number of states and inputs.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// One for each node.
    pub nodes: Vec<Choice>,
    /// The number of states.
    pub n_states: usize,
    /// The number of inputs.
    pub n_inputs: usize,
}

/// Recipes of up to `most` nodes.
pub fn recipes(most: usize) -> impl Strategy<Value = Recipe> {
    (
        prop::collection::vec(any::<Choice>(), 1..most),
        1usize..5,
        1usize..4,
    )
        .prop_map(|(nodes, n_states, n_inputs)| Recipe {
            nodes,
            n_states,
            n_inputs,
        })
}

/// A graph under construction. Invariant: f32 values have four columns.
struct Builder {
    graph: Graph,
    /// Each f32 value with a bound on its magnitude.
    values: Vec<(Value, f64)>,
    phase: Phase,
    rng: Value,
}

/// Magnitudes stay below this, far from where f32 stops being exact on integers.
const BOUND: f64 = 65536.0;
/// The bound after a clamp.
const SMALL: f64 = 8.0;
/// States are at most 4 at the start; with a momentum of one and gradients of one they grow by at
/// most 5, 6, 7 in three steps.
const STATE: f64 = 22.0;
const N: u64 = 4;
/// The largest number of rows of a value.
const TALL: u64 = 16 * N;

/// The graph of a recipe.
pub fn graph(recipe: &Recipe) -> Graph {
    let mut graph = Graph::new("random");
    let f32s = |rows| TensorType::new(DType::F32, [rows, N]).expect("a small type");
    let mut values = vec![];
    for i in 0..recipe.n_inputs {
        // One odd shape, so that broadcasts and paddings happen.
        let rows = if i == 1 { 1 } else { N };
        values.push((graph.add_input(format!("x{i}"), f32s(rows)), SMALL));
    }
    let hyper = graph.add_input(
        HYPER,
        TensorType::new(DType::F64, [3]).expect("a small type"),
    );
    for i in 0..recipe.n_states {
        let rows = if i == 2 { 2 * N } else { N };
        values.push((
            graph.add_state(
                format!("s{i}"),
                format!("state.{i}"),
                StateKind::Param,
                f32s(rows),
            ),
            STATE,
        ));
    }
    let rng_type = TensorType::new(DType::I64, [2]).expect("a small type");
    let rng = graph.add_state("rng", "rng", StateKind::Rng, rng_type);
    let mut b = Builder {
        graph,
        values,
        phase: Phase::Forward,
        rng,
    };
    for (i, &choice) in recipe.nodes.iter().enumerate() {
        b.phase = if 2 * i < recipe.nodes.len() {
            Phase::Forward
        } else {
            Phase::Backward
        };
        b.step(choice, i);
    }
    b.phase = Phase::Optimizer;
    for i in 0..recipe.n_states {
        b.update(i, recipe, hyper);
    }
    let next = b.node("rng_next", &[], &[rng]);
    b.graph.states[State::new(recipe.n_states)].after = next;
    for k in 0..2 {
        let (value, _) = b.values[b.values.len() - 1 - (k * 3) % b.values.len()];
        b.graph.outputs.push(Output {
            name: format!("out{k}"),
            value,
        });
    }
    // An input, a state's value, or a value that is an output already can be an output as well.
    let seed = recipe.nodes.len();
    let odd = match seed % 4 {
        0 => b.graph.inputs[0],
        1 => b.graph.states[State::new(seed % recipe.n_states)].before,
        2 => b.graph.states[State::new(seed % recipe.n_states)].after,
        _ => b.graph.outputs[0].value,
    };
    b.graph.outputs.push(Output {
        name: "odd".into(),
        value: odd,
    });
    b.graph
}

impl Builder {
    fn nodes(&mut self, op: &str, attrs: &[(&'static str, Attr)], inputs: &[Value]) -> Vec<Value> {
        let name = format!("v{}", self.graph.values.len());
        let op = Op::new(op, attrs.iter().cloned()).expect("the generator should build ops right");
        let outputs = {
            let types: Vec<_> = inputs.iter().map(|&v| &self.graph.values[v].ty).collect();
            op.infer(&types)
                .expect("the generator should type ops right")
                .len()
        };
        let names: Vec<String> = (0..outputs)
            .map(|j| {
                if j == 0 {
                    name.clone()
                } else {
                    format!("{name}.{j}")
                }
            })
            .collect();
        self.graph
            .add_node(op, inputs, &names, self.phase, "block")
            .expect("typed above")
    }

    fn node(&mut self, op: &str, attrs: &[(&'static str, Attr)], inputs: &[Value]) -> Value {
        self.nodes(op, attrs, inputs)[0]
    }

    fn push(&mut self, value: Value, bound: f64) {
        let (value, bound) = if BOUND < bound {
            (self.small(value), SMALL)
        } else {
            (value, bound)
        };
        self.values.push((value, bound));
    }

    /// The value clamped to small magnitudes.
    fn small(&mut self, value: Value) -> Value {
        self.clamp(value, SMALL)
    }

    fn clamp(&mut self, value: Value, bound: f64) -> Value {
        self.node(
            "clamp",
            &[("min", Attr::Float(-bound)), ("max", Attr::Float(bound))],
            &[value],
        )
    }

    /// Two values whose product is exact, and also a sum of four such products.
    fn factors(&mut self, x: (Value, f64), y: (Value, f64)) -> ((Value, f64), (Value, f64)) {
        if 4.0 * x.1 * y.1 <= BOUND {
            (x, y)
        } else {
            ((self.small(x.0), SMALL), (self.small(y.0), SMALL))
        }
    }

    fn rows(&self, value: Value) -> u64 {
        self.graph.values[value].ty.shape()[0]
    }

    /// The value with `rows` rows: broadcast, cut, or repeated.
    fn with_rows(&mut self, value: Value, rows: u64) -> Value {
        let has = self.rows(value);
        if has == rows {
            value
        } else if has == 1 {
            self.node("expand", &[("shape", ints(&[rows, N]))], &[value])
        } else if rows < has {
            self.slice(value, 0, rows)
        } else {
            let twice = self.node("cat", &[("dim", Attr::Int(0))], &[value, value]);
            self.with_rows(twice, rows)
        }
    }

    fn squared(&mut self, value: Value) -> Value {
        self.with_rows(value, N)
    }

    fn slice(&mut self, value: Value, start: u64, end: u64) -> Value {
        let attrs = [
            ("dim", 0),
            ("start", start as i64),
            ("end", end as i64),
            ("step", 1),
        ];
        self.node("slice", &attrs.map(|(k, v)| (k, Attr::Int(v))), &[value])
    }

    fn transposed(&mut self, value: Value) -> Value {
        self.node("permute", &[("dims", ints(&[1, 0]))], &[value])
    }

    fn cast(&mut self, value: Value, dtype: DType) -> Value {
        self.node("cast", &[("dtype", Attr::Type(dtype))], &[value])
    }

    /// An op of two operands with broadcast.
    fn binary(&mut self, op: &str, x: Value, y: Value) -> Value {
        let (rows_x, rows_y) = (self.rows(x), self.rows(y));
        let y = if rows_x == 1 || rows_y == 1 {
            y
        } else {
            self.with_rows(y, rows_x)
        };
        self.node(op, &[], &[x, y])
    }

    fn step(&mut self, (kind, a, b, way): Choice, index: usize) {
        // Late values are more likely, so that graphs become deep.
        let pick = |k: u16, values: &[(Value, f64)]| {
            let n = values.len();
            let back = (k as usize % n).min((k as usize / n) % n);
            values[n - 1 - back]
        };
        let ((x, bx), (y, by)) = (pick(a, &self.values), pick(b, &self.values));
        let (value, bound) = match kind % 18 {
            0 => (self.binary("add", x, y), bx + by),
            1 => (self.binary("sub", x, y), bx + by),
            2 => {
                let ((x, bx), (y, by)) = self.factors((x, bx), (y, by));
                (self.binary("mul", x, y), bx * by)
            }
            3 => (self.binary("maximum", x, y), bx.max(by)),
            4 => (self.node("relu", &[], &[x]), bx),
            5 | 6 => {
                let ((x, bx), (y, by)) = self.factors((x, bx), (y, by));
                let (x, y) = (
                    if way & 1 == 1 { self.squared(x) } else { x },
                    self.squared(y),
                );
                let x = if way & 5 == 5 { self.transposed(x) } else { x };
                let attrs = [
                    ("ta", Attr::Bool(way & 1 == 1)),
                    ("tb", Attr::Bool(way & 2 == 2)),
                ];
                let v = self.node("matmul", &attrs, &[x, y]);
                let v = if way & 8 == 8 && self.rows(v) == N {
                    self.transposed(v)
                } else {
                    v
                };
                (v, 4.0 * bx * by)
            }
            7 => {
                let attrs = [("dims", ints(&[0])), ("keepdim", Attr::Bool(true))];
                (self.node("sum", &attrs, &[x]), self.rows(x) as f64 * bx)
            }
            8 => {
                let x = self.squared(x);
                let flat = self.node("reshape", &[("shape", ints(&[2, 2 * N]))], &[x]);
                let flat = if way & 1 == 0 {
                    flat
                } else {
                    self.node("neg", &[], &[flat])
                };
                (
                    self.node("reshape", &[("shape", ints(&[N, N]))], &[flat]),
                    bx,
                )
            }
            9 => {
                let x = self.squared(x);
                (self.transposed(x), bx)
            }
            10 => {
                // Of two rows, or of none: a tensor may have no bytes.
                let x = self.squared(x);
                let rows = self.slice(x, 1, if way & 1 == 0 { 3 } else { 1 });
                let rest = if way & 1 == 0 { rows } else { x };
                (
                    self.node("cat", &[("dim", Attr::Int(0))], &[rows, rest]),
                    bx,
                )
            }
            11 => {
                // Scale 2: exact. Two results, one of them bool.
                let attrs = [("p", Attr::Float(0.5)), ("stream", Attr::Int(index as i64))];
                let [y, mask] = self.nodes("dropout", &attrs, &[x, self.rng])[..] else {
                    unreachable!("two results")
                };
                if way & 1 == 1 {
                    self.values.push((y, 2.0 * bx));
                    (
                        self.node("dropout_bwd", &[("scale", Attr::Float(2.0))], &[x, mask]),
                        2.0 * bx,
                    )
                } else {
                    (y, 2.0 * bx)
                }
            }
            12 => {
                let attrs = [
                    ("dtype", Attr::Type(DType::F32)),
                    ("shape", ints(&[self.rows(x), N])),
                    ("value", Attr::Float(1.0)),
                ];
                let ones = self.node("full", &attrs, &[]);
                (self.node("add", &[], &[ones, x]), bx + 1.0)
            }
            13 => (
                self.node("mul_scalar", &[("value", Attr::Float(-1.0))], &[x]),
                bx,
            ),
            14 | 15 => {
                // Sizes differ, so that allocation is not trivial.
                let rows = (self.rows(x).max(N) * if way & 1 == 0 { 2 } else { 4 }).min(TALL);
                (self.with_rows(x, rows), bx)
            }
            16 => {
                // Sums of four products of at most 64: exact in eight bits of mantissa. The product
                // needs scratch.
                let (x, y) = (self.small(x), self.small(y));
                let (x, y) = (self.cast(x, DType::BF16), self.cast(y, DType::BF16));
                let y = self.squared(y);
                let attrs = [("ta", Attr::Bool(false)), ("tb", Attr::Bool(way & 1 == 1))];
                let v = self.node("matmul", &attrs, &[x, y]);
                (self.cast(v, DType::F32), 4.0 * SMALL * SMALL)
            }
            _ => {
                // Two results, of which one is often not read.
                let attrs = [
                    ("dim", Attr::Int(1)),
                    ("k", Attr::Int(N as i64)),
                    ("largest", Attr::Bool(way & 1 == 0)),
                ];
                let [sorted, places] = self.nodes("topk", &attrs, &[x])[..] else {
                    unreachable!("two results")
                };
                if way & 2 == 2 {
                    self.values.push((sorted, bx));
                    (
                        self.node("gather", &[("dim", Attr::Int(1))], &[x, places]),
                        bx,
                    )
                } else {
                    (sorted, bx)
                }
            }
        };
        self.push(value, bound);
    }

    /// States change to late values in several ways: no change, in place, by copy, or to another
    /// state's old value.
    fn update(&mut self, i: usize, recipe: &Recipe, hyper: Value) {
        let state = State::new(i);
        let before = self.graph.states[state].before;
        let rows = self.rows(before);
        let (source, _) = self.values[self.values.len() - 1 - i % self.values.len()];
        let source = self.with_rows(source, rows);
        self.graph.states[state].after = match (recipe.nodes.len() + 3 * i) % 7 {
            0 => before,
            1 => {
                let sum = self.node("add", &[], &[before, source]);
                self.small(sum)
            }
            2 => {
                let source = self.small(source);
                self.node("minimum", &[], &[source, before])
            }
            3 => self.small(source),
            4 => {
                // Two states swap, or one follows another.
                let other = self.graph.states[State::new((i + 1) % recipe.n_states)].before;
                if self.rows(other) == rows {
                    other
                } else {
                    before
                }
            }
            5 => {
                let source = self.small(source);
                let flat = self.node("reshape", &[("shape", ints(&[rows * N]))], &[source]);
                self.node("reshape", &[("shape", ints(&[rows, N]))], &[flat])
            }
            _ => {
                // Both results may lie on operands.
                let ty = self.graph.values[before].ty.clone();
                let moment_state = self.graph.states.next_id();
                let moment = self.graph.add_state(
                    format!("m{i}"),
                    format!("moment.{i}"),
                    StateKind::Moment,
                    ty,
                );
                let gradient = self.clamp(source, 1.0);
                let [after, buffer] =
                    self.nodes("sgd_momentum", &[], &[before, gradient, moment, hyper])[..]
                else {
                    unreachable!("two results")
                };
                self.graph.states[moment_state].after = buffer;
                after
            }
        };
    }
}

fn ints(list: &[u64]) -> Attr {
    Attr::Ints(list.iter().map(|&i| i as i64).collect())
}

/// The initial states of a generated graph.
pub fn states(graph: &Graph, seed: u64) -> Tensors {
    graph
        .states
        .values()
        .map(|s| {
            (
                s.path.clone(),
                integers(&graph.values[s.before].ty, seed, &s.path),
            )
        })
        .collect()
}

/// The inputs of step `step` of a generated graph.
pub fn feed(graph: &Graph, seed: u64, step: usize) -> Tensors {
    let bytes = |name: &str, ty| match name {
        // Rate and momentum of one, no decay: exact.
        HYPER => [1.0f64, 1.0, 0.0]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect(),
        _ => integers(ty, seed + step as u64, name),
    };
    let inputs = graph.inputs.iter().map(|&v| &graph.values[v]);
    inputs
        .map(|data| (data.name.clone(), bytes(&data.name, &data.ty)))
        .collect()
}

/// Integers of magnitude at most 4, drawn from a seed and a name.
fn integers(ty: &TensorType, seed: u64, name: &str) -> Vec<u8> {
    let key = name
        .bytes()
        .fold(seed, |key, byte| mix(key ^ u64::from(byte)));
    let draw = |i: u64| (mix(key ^ i) % 9) as i64 - 4;
    let encode = |x: i64| match ty.dtype() {
        DType::F32 => (x as f32).to_le_bytes().to_vec(),
        DType::I64 => x.unsigned_abs().to_le_bytes().to_vec(),
        other => panic!("a generated graph should start from no {other}"),
    };
    (0..ty.numel()).flat_map(|i| encode(draw(i))).collect()
}

/// SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014).
pub fn mix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Random numbers for [`decisions`].
pub fn choices() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 1..200)
}

/// Decisions drawn from `choices`: each gap of each value, each state's home and chunk, each node's
/// machine.
pub fn decisions(problem: &Problem<'_>, choices: &[u8]) -> Decisions {
    let reason = Reason {
        bytes: 0,
        swap: None,
        recompute: None,
        line: 0,
    };
    let graph = problem.graph;
    let mut decisions = Decisions::default();
    let mut next = choices.iter().copied().cycle();
    let mut draw = || next.next().unwrap_or(0);
    for state in graph.states.ids() {
        if draw() % 2 == 0 {
            decisions.hosted.insert(state, reason);
        }
    }
    for &state in decisions.hosted.keys() {
        match draw() % 5 {
            0 => {}
            1 => decisions.chunks.push(vec![state]),
            _ => match decisions.chunks.last_mut() {
                Some(chunk) => chunk.push(state),
                None => decisions.chunks.push(vec![state]),
            },
        }
    }
    decisions.on_host = problem
        .lines
        .iter()
        .copied()
        .filter(|_| draw() % 5 == 0)
        .collect();
    for value in graph.values.ids().filter(|&v| graph.root(v) == v) {
        for gap in 0..problem.accesses[value].len().saturating_sub(1) as u32 {
            let computed = graph.def_node(value).is_some();
            let means = match draw() % 4 {
                0 => continue,
                1 | 2 if computed => Means::Recompute,
                _ => Means::Swap,
            };
            decisions.cuts.insert(Gap { value, gap }, (means, reason));
        }
    }
    // Random reruns of earlier nodes.
    for position in 1..problem.lines.len() as u32 {
        if draw() % 6 == 0 {
            let node = problem.lines[draw() as usize % position as usize];
            let data = &graph.nodes[node];
            if data.op.is_pure() && data.phase != ir::Phase::Optimizer {
                decisions.reruns.entry(position).or_default().push(node);
            }
        }
    }
    decisions.ahead = u64::from(draw()) * 16;
    decisions
}
