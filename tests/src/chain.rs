//! A residual network of any depth, with its gradients, for tests that depend on a graph's size.

use ir::graph::Output;
use ir::op::{Attr, Op};
use ir::{DType, Graph, Phase, State, StateKind, TensorType, Value};

const BATCH: u64 = 64;
const WIDTH: u64 = 64;

/// A graph under construction.
pub(crate) struct Builder {
    pub(crate) graph: Graph,
    pub(crate) phase: Phase,
    pub(crate) module: String,
}

impl Builder {
    pub(crate) fn nodes(
        &mut self,
        op: &str,
        attrs: Vec<(&'static str, Attr)>,
        inputs: &[Value],
        n: usize,
    ) -> Vec<Value> {
        let base = self.graph.values.len();
        let names: Vec<String> = (0..n).map(|i| format!("{op}_{}", base + i)).collect();
        let op = Op::new(op, attrs).expect("the chain should build ops right");
        self.graph
            .add_node(op, inputs, &names, self.phase, self.module.clone())
            .expect("the chain should type ops right")
    }
    pub(crate) fn node(
        &mut self,
        op: &str,
        attrs: Vec<(&'static str, Attr)>,
        inputs: &[Value],
    ) -> Value {
        self.nodes(op, attrs, inputs, 1)[0]
    }
    pub(crate) fn matmul(&mut self, a: Value, b: Value, ta: bool, tb: bool) -> Value {
        self.node(
            "matmul",
            vec![("ta", Attr::Bool(ta)), ("tb", Attr::Bool(tb))],
            &[a, b],
        )
    }
    pub(crate) fn sum(&mut self, x: Value, dims: &[i64]) -> Value {
        self.node(
            "sum",
            vec![
                ("dims", Attr::Ints(dims.to_vec())),
                ("keepdim", Attr::Bool(false)),
            ],
            &[x],
        )
    }
    pub(crate) fn parameter(&mut self, path: String, shape: &[u64]) -> (State, Value) {
        let ty = TensorType::new(DType::F32, shape).expect("a small type");
        let state = self.graph.states.next_id();
        let value = self
            .graph
            .add_state(path.clone(), path, StateKind::Param, ty);
        (state, value)
    }
}

/// `x + W2 gelu(W1 norm(x))`, `blocks` times; the loss is the sum. About 20 nodes a block with
/// AdamW attached.
pub fn chain(blocks: usize) -> Graph {
    let mut b = Builder {
        graph: Graph::new(format!("chain{blocks}")),
        phase: Phase::Forward,
        module: String::new(),
    };
    let x = b.graph.add_input(
        "x",
        TensorType::new(DType::F32, [BATCH, WIDTH]).expect("a small type"),
    );
    let mut kept = vec![];
    let mut at = x;
    for i in 0..blocks {
        b.module = format!("blocks.{i}");
        let name = |part: &str| format!("blocks.{i}.{part}");
        let (norm, w) = b.parameter(name("norm.weight"), &[WIDTH]);
        let (fc1, w1) = b.parameter(name("fc1.weight"), &[WIDTH, 4 * WIDTH]);
        let (fc2, w2) = b.parameter(name("fc2.weight"), &[4 * WIDTH, WIDTH]);
        let y = b.nodes(
            "layer_norm",
            vec![("dims", Attr::Int(1)), ("eps", Attr::Float(1e-5))],
            &[at, w],
            3,
        );
        let h = b.matmul(y[0], w1, false, false);
        let g = b.node("gelu", vec![("tanh", Attr::Bool(true))], &[h]);
        let z = b.matmul(g, w2, false, false);
        let next = b.node("add", vec![], &[at, z]);
        kept.push((at, y, h, g, [(norm, w), (fc1, w1), (fc2, w2)]));
        at = next;
    }
    let loss = b.sum(at, &[0, 1]);
    b.graph.outputs.push(Output {
        name: "loss".into(),
        value: loss,
    });
    b.phase = Phase::Backward;
    let full = vec![
        ("dtype", Attr::Type(DType::F32)),
        ("shape", Attr::Ints(vec![BATCH as i64, WIDTH as i64])),
        ("value", Attr::Float(1.0)),
    ];
    let mut dy = b.node("full", full, &[]);
    for (i, (x, y, h, g, [(norm, w), (fc1, w1), (fc2, w2)])) in kept.into_iter().enumerate().rev() {
        b.module = format!("blocks.{i}");
        let dw2 = b.matmul(g, dy, true, false);
        let dg = b.matmul(dy, w2, false, true);
        let dh = b.node("gelu_bwd", vec![("tanh", Attr::Bool(true))], &[dg, h]);
        let dw1 = b.matmul(y[0], dh, true, false);
        let dn = b.matmul(dh, w1, false, true);
        let attrs = vec![("dims", Attr::Int(1)), ("mask", Attr::Ints(vec![1, 1, 0]))];
        let dx = b.nodes("layer_norm_bwd", attrs, &[dn, x, y[1], y[2], w], 2);
        dy = b.node("add", vec![], &[dy, dx[0]]);
        b.graph
            .gradients
            .extend([(fc2, dw2), (fc1, dw1), (norm, dx[1])]);
    }
    b.graph
}
