//! Random typed graphs and random decisions. Values are small integers in floats and every op is exact on them, so that
//! two ways of computing a step must agree bit for bit.

use ir::graph::Output;
use ir::op::{Attr, Op};
use ir::{DType, Graph, Phase, StateKind, TensorType, Value};
use passes::decide::{Decisions, Gap, Means, Problem, Reason};
use proptest::prelude::*;

/// One choice of the generator: which op, which operands, which way.
pub type Choice = (u8, u16, u16, u8);

/// A graph's choices: its nodes, and its number of states and inputs.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// One a node.
    pub nodes: Vec<Choice>,
    /// How many states.
    pub n_states: usize,
    /// How many inputs.
    pub n_inputs: usize,
}

/// Recipes of up to `most` nodes.
pub fn recipes(most: usize) -> impl Strategy<Value = Recipe> {
    (prop::collection::vec(any::<Choice>(), 1..most), 1usize..5, 1usize..4)
        .prop_map(|(nodes, n_states, n_inputs)| Recipe { nodes, n_states, n_inputs })
}

/// A graph as it grows.
struct Builder {
    graph: Graph,
    /// Each f32 value with a bound on its magnitude.
    values: Vec<(Value, f64)>,
    phase: Phase,
}

/// Magnitudes stay below this, far from where f32 stops being exact on integers.
const BOUND: f64 = 65536.0;
const N: u64 = 4;

/// The graph of a recipe.
pub fn graph(recipe: &Recipe) -> Graph {
    let mut b = Builder { graph: Graph::new("random"), values: vec![], phase: Phase::Forward };
    for i in 0..recipe.n_inputs {
        // One odd shape, so that broadcasts and paddings happen.
        let shape = if i == 1 { vec![1, N] } else { vec![N, N] };
        let ty = TensorType::new(DType::F32, shape).expect("a small type");
        let value = b.graph.add_input(format!("x{i}"), ty);
        b.values.push((value, 8.0));
    }
    for i in 0..recipe.n_states {
        let ty = TensorType::new(DType::F32, [N, N]).expect("a small type");
        let value = b.graph.add_state(format!("s{i}"), format!("state.{i}"), StateKind::Param, ty);
        b.values.push((value, 8.0));
    }
    let rng_type = TensorType::new(DType::I64, [2]).expect("a small type");
    let rng = b.graph.add_state("rng", "rng", StateKind::Rng, rng_type);
    for (i, &choice) in recipe.nodes.iter().enumerate() {
        b.phase = if 2 * i < recipe.nodes.len() { Phase::Forward } else { Phase::Backward };
        b.step(choice, rng, i);
    }
    // States move on from late values, in several ways: in place, by another op, not at all.
    for i in 0..recipe.n_states {
        let before = b.graph.states[i].before;
        b.phase = Phase::Optimizer;
        let (source, _) = b.values[b.values.len() - 1 - i % b.values.len()];
        let after = match (recipe.nodes.len() + i) % 4 {
            0 => before,
            1 => {
                let source = b.squared(source);
                let sum = b.node("add", &[], &[before, source]);
                b.node("clamp", &[("min", Attr::Float(-8.0)), ("max", Attr::Float(8.0))], &[sum])
            }
            2 => {
                let source = b.squared(source);
                let half = b.node("minimum", &[], &[source, before]);
                b.node("clamp", &[("min", Attr::Float(-8.0)), ("max", Attr::Float(8.0))], &[half])
            }
            _ => {
                let source = b.squared(source);
                b.node("clamp", &[("min", Attr::Float(-8.0)), ("max", Attr::Float(8.0))], &[source])
            }
        };
        b.graph.states[i].after = after;
    }
    let next = b.node("rng_next", &[], &[rng]);
    b.graph.states[recipe.n_states].after = next;
    for k in 0..2 {
        let (value, _) = b.values[b.values.len() - 1 - (k * 3) % b.values.len()];
        b.graph.outputs.push(Output { name: format!("out{k}"), value });
    }
    b.graph
}

impl Builder {
    fn node(&mut self, op: &str, attrs: &[(&'static str, Attr)], inputs: &[Value]) -> Value {
        let name = format!("v{}", self.graph.values.len());
        let op = Op::new(op, attrs.iter().cloned()).expect("the generator should build ops right");
        let outputs = {
            let types: Vec<_> = inputs.iter().map(|&v| &self.graph.values[v].ty).collect();
            op.infer(&types).expect("the generator should type ops right").len()
        };
        let names: Vec<String> = (0..outputs).map(|j| if j == 0 { name.clone() } else { format!("{name}.{j}") }).collect();
        self.graph.add_node(op, inputs, &names, self.phase, "block").expect("typed above")[0]
    }

    fn push(&mut self, value: Value, bound: f64) {
        let (value, bound) = if BOUND < bound {
            (self.node("clamp", &[("min", Attr::Float(-8.0)), ("max", Attr::Float(8.0))], &[value]), 8.0)
        } else {
            (value, bound)
        };
        self.values.push((value, bound));
    }

    /// The value as a square matrix.
    fn squared(&mut self, value: Value) -> Value {
        let shape = self.graph.values[value].ty.shape().to_vec();
        if shape == [N, N] {
            return value;
        }
        self.node("expand", &[("shape", Attr::Ints(vec![N as i64, N as i64]))], &[value])
    }

    fn step(&mut self, (kind, a, b, way): Choice, rng: Value, index: usize) {
        // Late values are likelier, so that graphs grow deep.
        let pick = |k: u16, values: &[(Value, f64)]| {
            let n = values.len();
            let back = (k as usize % n).min((k as usize / n) % n);
            values[n - 1 - back]
        };
        let ((x, bx), (y, by)) = (pick(a, &self.values), pick(b, &self.values));
        match kind % 14 {
            0 => {
                let v = self.node("add", &[], &[x, y]);
                self.push(v, bx + by);
            }
            1 => {
                let v = self.node("sub", &[], &[x, y]);
                self.push(v, bx + by);
            }
            2 => {
                let v = self.node("mul", &[], &[x, y]);
                self.push(v, bx * by);
            }
            3 => {
                let v = self.node("maximum", &[], &[x, y]);
                self.push(v, bx.max(by));
            }
            4 => {
                let v = self.node("relu", &[], &[x]);
                self.push(v, bx);
            }
            5 | 6 => {
                let (x, y) = (self.squared(x), self.squared(y));
                let (x, y) = if way & 4 == 0 { (x, y) } else { (self.transposed(x), y) };
                let attrs = [("ta", Attr::Bool(way & 1 == 1)), ("tb", Attr::Bool(way & 2 == 2))];
                let v = self.node("matmul", &attrs, &[x, y]);
                let v = if way & 8 == 0 { v } else { self.transposed(v) };
                self.push(v, 4.0 * bx * by);
            }
            7 => {
                let dims = Attr::Ints(vec![0]);
                let v = self.node("sum", &[("dims", dims), ("keepdim", Attr::Bool(true))], &[x]);
                self.push(v, 4.0 * bx);
            }
            8 => {
                let x = self.squared(x);
                let flat = self.node("reshape", &[("shape", Attr::Ints(vec![2, 2 * N as i64]))], &[x]);
                let flat = if way & 1 == 0 { flat } else { self.node("neg", &[], &[flat]) };
                let v = self.node("reshape", &[("shape", Attr::Ints(vec![N as i64, N as i64]))], &[flat]);
                self.push(v, bx);
            }
            9 => {
                let x = self.squared(x);
                let v = self.transposed(x);
                self.push(v, bx);
            }
            10 => {
                let x = self.squared(x);
                let attrs = [("dim", 0), ("start", 1), ("end", 3), ("step", 1)].map(|(k, v)| (k, Attr::Int(v)));
                let rows = self.node("slice", &attrs, &[x]);
                let v = self.node("cat", &[("dim", Attr::Int(0))], &[rows, rows]);
                self.push(v, bx);
            }
            11 => {
                // Scale 2: exact. Two results, one of them bool.
                let attrs = [("p", Attr::Float(0.5)), ("stream", Attr::Int(index as i64))];
                let v = self.node("dropout", &attrs, &[x, rng]);
                self.push(v, 2.0 * bx);
            }
            12 => {
                let shape = self.graph.values[x].ty.shape().iter().map(|&d| d as i64).collect();
                let attrs = [("dtype", Attr::Type(DType::F32)), ("shape", Attr::Ints(shape)), ("value", Attr::Float(1.0))];
                let ones = self.node("full", &attrs, &[]);
                let v = self.node("add", &[], &[ones, x]);
                self.push(v, bx + 1.0);
            }
            _ => {
                let v = self.node("mul_scalar", &[("value", Attr::Float(-1.0))], &[x]);
                self.push(v, bx);
            }
        }
    }

    fn transposed(&mut self, value: Value) -> Value {
        self.node("permute", &[("dims", Attr::Ints(vec![1, 0]))], &[value])
    }
}

/// Decisions drawn from `choices`: each gap of each value, and each state's home.
pub fn decisions(problem: &Problem<'_>, choices: &[u8]) -> Decisions {
    let reason = Reason { bytes: 0, swap: None, recompute: None, line: 0 };
    let graph = problem.graph;
    let mut decisions = Decisions::default();
    let mut next = choices.iter().copied().cycle();
    let mut draw = || next.next().unwrap_or(0);
    for (i, state) in graph.states.iter().enumerate() {
        if draw() % 2 == 0 {
            decisions.hosted.insert(i, reason);
        }
        let _ = state;
    }
    for value in graph.values.ids().filter(|&v| graph.root(v) == v) {
        for gap in 0..problem.accesses(value).len().saturating_sub(1) as u32 {
            let computed = graph.def_node(value).is_some();
            let means = match draw() % 4 {
                0 => continue,
                1 | 2 if computed => Means::Recompute,
                _ => Means::Swap,
            };
            decisions.cuts.insert(Gap { value, gap }, (means, reason));
        }
    }
    decisions
}
