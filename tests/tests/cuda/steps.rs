//! Artifacts for a GPU: random steps of ops that act on each element, with kernels as PTX, and with
//! random decisions. Numbers are small integers, so that any right order gives the same bits.

use artifact::{Artifact, CommandKind};
use codegen::Target;
use ir::graph::Output;
use ir::op::{Attr, Op};
use ir::{DType, Graph, Id, Phase, State, StateKind, TensorType, Value};
use lighterage_tests::evaluate::Tensors;
use lighterage_tests::generate::mix;
use lighterage_tests::{forced, generate};
use passes::cost::Roofline;
use passes::decide::Problem;
use passes::devices;
use passes::graph::optimizer::HYPER;
use passes::pipeline::Kernels;
use passes::schedule::lives::Variant;

/// A step as the machine gets it, and what it starts from.
pub(super) struct Step {
    pub(super) graph: Graph,
    pub(super) artifact: Artifact,
    pub(super) start: Tensors,
    pub(super) feed: Tensors,
}

const COLUMNS: u64 = 16;
/// Rows of states and inputs in turn.
const ROWS: [u64; 3] = [8, 1, 24];
/// Magnitudes stay below this, far from where f32 stops being exact on integers.
const BOUND: f64 = 65536.0;
const SMALL: f64 = 8.0;
/// What a state reaches in a few steps, at most.
const STATE: f64 = 32.0;
const STATES: usize = 4;

struct Builder {
    graph: Graph,
    values: Vec<(Value, f64)>,
    random: u64,
}

impl Builder {
    fn draw(&mut self, n: usize) -> usize {
        self.random = mix(self.random);
        (self.random % n as u64) as usize
    }
    fn nodes(
        &mut self,
        op: &str,
        attrs: &[(&'static str, Attr)],
        inputs: &[Value],
        phase: Phase,
    ) -> Vec<Value> {
        let op = Op::new(op, attrs.iter().cloned()).expect("there should be such an op");
        let types: Vec<_> = inputs.iter().map(|&v| &self.graph.values[v].ty).collect();
        let n = op.infer(&types).expect("the operands should fit").len();
        let name = format!("v{}", self.graph.values.len());
        let names: Vec<String> = (0..n).map(|j| format!("{name}.{j}")).collect();
        let added = self.graph.add_node(op, inputs, &names, phase, "block");
        added.expect("it was typed")
    }
    fn clamp(&mut self, value: Value, bound: f64, phase: Phase) -> Value {
        let attrs = [("min", Attr::Float(-bound)), ("max", Attr::Float(bound))];
        self.nodes("clamp", &attrs, &[value], phase)[0]
    }
    fn rows(&self, value: Value) -> u64 {
        self.graph.values[value].ty.shape()[0]
    }
    /// A value, late ones likelier, that broadcasts with this many rows.
    fn pick(&mut self, rows: Option<u64>) -> (Value, f64) {
        loop {
            let n = self.values.len();
            let back = self.draw(n).min(self.draw(n));
            let (value, bound) = self.values[n - 1 - back];
            let has = self.rows(value);
            if rows.is_none_or(|rows| has == rows || has == 1 || rows == 1) {
                return (value, bound);
            }
        }
    }

    fn step(&mut self, phase: Phase) {
        let (x, bx) = self.pick(None);
        let (y, by) = self.pick(Some(self.rows(x)));
        let (op, bound) = match self.draw(9) {
            0 | 1 => ("add", bx + by),
            2 => ("sub", bx + by),
            3 | 4 => ("mul", bx * by),
            5 => ("maximum", bx.max(by)),
            6 => ("relu", bx),
            7 => ("neg", bx),
            _ => ("sum", bx + bx * COLUMNS as f64),
        };
        let value = match op {
            "relu" | "neg" => self.nodes(op, &[], &[x], phase)[0],
            "sum" => {
                // Of each row, and added to its numbers. Sums of columns need scratch, which the
                // plan of plain kernels has not.
                let attrs = [("dims", Attr::Ints(vec![1])), ("keepdim", Attr::Bool(true))];
                let sum = self.nodes(op, &attrs, &[x], phase)[0];
                self.nodes("add", &[], &[x, sum], phase)[0]
            }
            _ => self.nodes(op, &[], &[x, y], phase)[0],
        };
        let small = match bound > BOUND {
            true => (self.clamp(value, SMALL, phase), SMALL),
            false => (value, bound),
        };
        self.values.push(small);
    }

    /// A state moves on: in place, by momentum, or to another value.
    fn update(&mut self, i: usize, hyper: Value) {
        let state = State::new(i);
        let before = self.graph.states[state].before;
        let rows = self.rows(before);
        let (source, _) = loop {
            let (value, bound) = self.pick(Some(rows));
            if self.rows(value) == rows {
                break (value, bound);
            }
        };
        let phase = Phase::Optimizer;
        self.graph.states[state].after = match i % 3 {
            0 => {
                let moment_state = self.graph.states.next_id();
                let ty = self.graph.values[before].ty.clone();
                let (name, path) = (format!("m{i}"), format!("moment.{i}"));
                let moment = self.graph.add_state(name, path, StateKind::Moment, ty);
                let gradient = self.clamp(source, 1.0, Phase::Backward);
                let inputs = [before, gradient, moment, hyper];
                let results = self.nodes("sgd_momentum", &[], &inputs, phase);
                self.graph.states[moment_state].after = results[1];
                results[0]
            }
            1 => {
                let sum = self.nodes("add", &[], &[before, source], phase)[0];
                self.clamp(sum, SMALL, phase)
            }
            _ => self.clamp(source, SMALL, phase),
        };
    }
}

/// A step of about this many ops.
fn graph(n_ops: usize, seed: u64) -> Graph {
    let mut graph = Graph::new("elements");
    let ty = |rows| TensorType::new(DType::F32, [rows, COLUMNS]).expect("a small type");
    let mut values = vec![];
    for (i, rows) in ROWS.into_iter().enumerate() {
        values.push((graph.add_input(format!("x{i}"), ty(rows)), SMALL));
    }
    let hyper = TensorType::new(DType::F64, [3]).expect("a small type");
    let hyper = graph.add_input(HYPER, hyper);
    for i in 0..STATES {
        let (name, path) = (format!("s{i}"), format!("state.{i}"));
        let state = graph.add_state(name, path, StateKind::Param, ty(ROWS[i % 3]));
        values.push((state, STATE));
    }
    let mut builder = Builder {
        graph,
        values,
        random: mix(seed),
    };
    for i in 0..n_ops {
        let phase = match 2 * i < n_ops {
            true => Phase::Forward,
            false => Phase::Backward,
        };
        builder.step(phase);
    }
    for i in 0..STATES {
        builder.update(i, hyper);
    }
    for k in 0..2 {
        let n = builder.values.len();
        let (value, _) = builder.values[n - 1 - 3 * k];
        let name = format!("out{k}");
        builder.graph.outputs.push(Output { name, value });
    }
    builder.graph
}

/// A step by a seed: swaps, reruns, states and updates on the host as the seed has it.
pub(super) fn step(n_ops: usize, seed: u64) -> Step {
    step_on(n_ops, seed, None)
}

/// The same in front of a disk: the host holds a share of what leaves the device.
pub(super) fn step_with_disk(n_ops: usize, seed: u64, share: f64) -> Step {
    step_on(n_ops, seed, Some(share))
}

fn step_on(n_ops: usize, seed: u64, share: Option<f64>) -> Step {
    let mut device = devices::named("test").expect("there should be a device for tests");
    device.disk = share.map(|_| forced::disk());
    device.sm = Some(90);
    let cost = Roofline::new(&device);
    let traced = graph(n_ops, seed);
    let mut graph = traced.clone();
    passes::graph::canonical::run(&mut graph);
    passes::schedule::order::run(&mut graph, Default::default());
    let graph = graph.compact();
    let start = generate::states(&traced, seed);
    let feed = generate::feed(&traced, seed, 0);
    let problem = Problem::new(&graph, &device, &cost);
    let choices: Vec<u8> = (0..200).map(|i| (mix(mix(seed) ^ i) >> 8) as u8).collect();
    let decisions = generate::decisions(&problem, &choices);
    let problem = match share {
        Some(share) => forced::with_little_host(problem, &decisions, share),
        None => problem,
    };
    let variant = Variant::ALL[(seed % 2) as usize];
    let mut compiled =
        forced::finish(&problem, decisions, variant).unwrap_or_else(|text| panic!("{text}"));
    compiled.options.kernels = Kernels::Generated;
    let artifact = codegen::emit(&compiled, &start, Some(Target::SM_90))
        .unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    Step {
        graph: traced,
        artifact,
        start,
        feed,
    }
}

/// The same step in list order: on one stream, without events.
pub(super) fn in_list_order(artifact: &Artifact) -> Artifact {
    let mut list = artifact.clone();
    list.streams = vec!["list".into()];
    list.events = 0;
    let runs =
        |kind: &CommandKind| matches!(kind, CommandKind::Launch { .. } | CommandKind::Copy { .. });
    list.commands.retain(|command| runs(&command.kind));
    list.commands
        .iter_mut()
        .for_each(|command| command.stream = 0);
    list
}
