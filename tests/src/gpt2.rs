//! GPT-2's training step at any size, as in a coarse trace of PyTorch: f32, tied embeddings,
//! attention as one op, GeLU with tanh as single ops. Without weights, to plan models that are too
//! large for files.

use crate::chain::Builder;
use ir::graph::Output;
use ir::op::Attr;
use ir::{DType, Graph, Phase, State, StateKind, TensorType, Value};

const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
const CUBE: f64 = 0.044_715;

/// Sizes for all parts.
#[derive(Clone, Copy)]
struct Sizes {
    width: u64,
    heads: u64,
    batch: u64,
    sequence: u64,
}

/// `layers` blocks of `width`, with `heads` heads, on `batch` sequences of `sequence` tokens out of
/// `vocabulary`. About 80 lines a block. Panics if `heads` does not divide `width`.
pub fn gpt2(
    layers: usize,
    width: u64,
    heads: u64,
    batch: u64,
    sequence: u64,
    vocabulary: u64,
) -> Graph {
    assert!(
        0 < heads && width.is_multiple_of(heads),
        "heads should divide the width"
    );
    let sizes = Sizes {
        width,
        heads,
        batch,
        sequence,
    };
    let name = format!("gpt2-{layers}x{width}-b{batch}");
    let mut b = Builder {
        graph: Graph::new(name),
        phase: Phase::Forward,
        module: String::new(),
    };
    let ids = TensorType::new(DType::I64, [batch, sequence]).expect("a small type");
    let (input_ids, labels) = (
        b.graph.add_input("input_ids", ids.clone()),
        b.graph.add_input("labels", ids),
    );
    let (wpe_at, wpe) = parameter(&mut b, "wpe.weight", &[sequence, width]);
    let (wte_at, wte) = parameter(&mut b, "wte.weight", &[vocabulary, width]);

    b.module = "wte".into();
    let tokens = b.node(
        "embedding",
        vec![("padding", Attr::Int(-1))],
        &[wte, input_ids],
    );
    b.module = "wpe".into();
    let range = vec![
        ("dtype", Attr::Type(DType::I64)),
        ("shape", ints(&[sequence])),
        ("start", Attr::Int(0)),
        ("step", Attr::Int(1)),
    ];
    let range = b.node("arange", range, &[]);
    let row = reshape(&mut b, range, &[1, sequence]);
    let positions = b.node("embedding", vec![("padding", Attr::Int(-1))], &[wpe, row]);
    b.module = "mask".into();
    let column = reshape(&mut b, range, &[sequence, 1]);
    let seen = b.node("le", vec![], &[row, column]);
    let seen = reshape(&mut b, seen, &[1, 1, sequence, sequence]);
    let zero = scalar(&mut b, 0.0);
    let never = scalar(&mut b, f64::NEG_INFINITY);
    let mask = b.node("where", vec![], &[seen, zero, never]);
    b.module = String::new();
    let mut x = b.node("add", vec![], &[tokens, positions]);
    let mut blocks = vec![];
    for i in 0..layers {
        let block = Block::forward(&mut b, i, sizes, x, mask);
        x = block.result;
        blocks.push(block);
    }
    b.module = "ln_f".into();
    let norm = Norm::forward(&mut b, "ln_f", width, x);
    b.module = "lm_head".into();
    let flat = reshape(&mut b, norm.results[0], &[batch * sequence, width]);
    let logits = b.matmul(flat, wte, false, true);
    b.module = String::new();
    let pad = vec![
        ("pad", Attr::Ints(vec![0, 0, 0, 1])),
        ("value", Attr::Int(-100)),
    ];
    let padded = b.node("pad", pad, &[labels]);
    let targets = slice(&mut b, padded, 1, 1, sequence + 1);
    let targets = reshape(&mut b, targets, &[batch * sequence]);
    let probabilities = b.node("log_softmax", vec![("dim", Attr::Int(1))], &[logits]);
    let reduction = vec![("ignore", Attr::Int(-100)), ("reduction", Attr::Int(1))];
    let loss = b.nodes("nll_loss", reduction, &[probabilities, targets], 2);
    b.graph.outputs.push(Output {
        name: "loss".into(),
        value: loss[0],
    });

    b.phase = Phase::Backward;
    let one = scalar(&mut b, 1.0);
    let attrs = vec![
        ("dtype", Attr::Type(DType::F32)),
        ("ignore", Attr::Int(-100)),
        ("reduction", Attr::Int(1)),
        ("shape", ints(&[batch * sequence, vocabulary])),
    ];
    let dy = b.node("nll_loss_bwd", attrs, &[one, targets, loss[1]]);
    let dy = b.node(
        "log_softmax_bwd",
        vec![("dim", Attr::Int(1))],
        &[dy, probabilities],
    );
    b.module = "lm_head".into();
    let dw = b.matmul(dy, flat, true, false);
    let dx = b.matmul(dy, wte, false, false);
    let dx = reshape(&mut b, dx, &[batch, sequence, width]);
    b.module = "ln_f".into();
    let mut dx = norm.backward(&mut b, dx);
    for block in blocks.into_iter().rev() {
        dx = block.backward(&mut b, sizes, dx, mask);
    }
    b.module = "wpe".into();
    let dp = b.node(
        "sum",
        vec![("dims", Attr::Ints(vec![0])), ("keepdim", Attr::Bool(true))],
        &[dx],
    );
    let table = |rows: u64| vec![("padding", Attr::Int(-1)), ("rows", Attr::Int(rows as i64))];
    let dp = b.node("embedding_bwd", table(sequence), &[dp, row]);
    b.module = "wte".into();
    let dt = b.node("embedding_bwd", table(vocabulary), &[dx, input_ids]);
    let dt = b.node("add", vec![], &[dw, dt]);
    b.graph.gradients.extend([(wpe_at, dp), (wte_at, dt)]);
    b.graph
}

/// A layer norm, for its backward.
struct Norm {
    x: Value,
    w: (State, Value),
    b: State,
    /// The result, mean and the reciprocal of the deviation.
    results: Vec<Value>,
}

impl Norm {
    fn forward(b: &mut Builder, path: &str, width: u64, x: Value) -> Norm {
        let w = parameter(b, &format!("{path}.weight"), &[width]);
        let bias = parameter(b, &format!("{path}.bias"), &[width]);
        let attrs = vec![("dims", Attr::Int(1)), ("eps", Attr::Float(1e-5))];
        let results = b.nodes("layer_norm", attrs, &[x, w.1, bias.1], 3);
        Norm {
            x,
            w,
            b: bias.0,
            results,
        }
    }
    fn backward(&self, b: &mut Builder, dy: Value) -> Value {
        let attrs = vec![("dims", Attr::Int(1)), ("mask", Attr::Ints(vec![1, 1, 1]))];
        let inputs = [dy, self.x, self.results[1], self.results[2], self.w.1];
        let results = b.nodes("layer_norm_bwd", attrs, &inputs, 3);
        b.graph
            .gradients
            .extend([(self.w.0, results[1]), (self.b, results[2])]);
        results[0]
    }
}

/// `x w + b` on rows.
struct Linear {
    x: Value,
    w: (State, Value),
    b: State,
    result: Value,
}

impl Linear {
    fn forward(b: &mut Builder, path: &str, (inner, columns): (u64, u64), x: Value) -> Linear {
        let w = parameter(b, &format!("{path}.weight"), &[inner, columns]);
        let bias = parameter(b, &format!("{path}.bias"), &[columns]);
        let attrs = vec![("ta", Attr::Bool(false)), ("tb", Attr::Bool(false))];
        let result = b.node("addmm", attrs, &[bias.1, x, w.1]);
        Linear {
            x,
            w,
            b: bias.0,
            result,
        }
    }
    fn backward(&self, b: &mut Builder, dy: Value) -> Value {
        let dx = b.matmul(dy, self.w.1, false, true);
        let dw = b.matmul(self.x, dy, true, false);
        let db = b.sum(dy, &[0]);
        b.graph.gradients.extend([(self.w.0, dw), (self.b, db)]);
        dx
    }
}

/// A block, for its backward.
struct Block {
    path: String,
    norms: [Norm; 2],
    qkv: Linear,
    heads: [Value; 3],
    attention: Vec<Value>,
    projection: Linear,
    up: Linear,
    gelu: Gelu,
    down: Linear,
    result: Value,
}

impl Block {
    fn forward(b: &mut Builder, i: usize, s: Sizes, x: Value, mask: Value) -> Block {
        let Sizes {
            width,
            heads,
            batch,
            sequence,
        } = s;
        let path = format!("h.{i}");
        let rows = [batch * sequence, width];
        let cube = [batch, sequence, width];
        b.module = format!("{path}.ln_1");
        let first = Norm::forward(b, &b.module.clone(), width, x);
        b.module = format!("{path}.attn");
        let flat = reshape(b, first.results[0], &rows);
        let qkv = Linear::forward(b, &format!("{path}.attn.c_attn"), (width, 3 * width), flat);
        let joint = reshape(b, qkv.result, &[batch, sequence, 3 * width]);
        let parts = [0, 1, 2].map(|k| slice(b, joint, 2, k * width, (k + 1) * width));
        let split = parts.map(|part| {
            let part = reshape(b, part, &[batch, sequence, heads, width / heads]);
            permute(b, part)
        });
        let scale = 1.0 / ((width / heads) as f64).sqrt();
        let attrs = vec![("causal", Attr::Bool(false)), ("scale", Attr::Float(scale))];
        let attention = b.nodes("sdpa", attrs, &[split[0], split[1], split[2], mask], 2);
        let joined = permute(b, attention[0]);
        let joined = reshape(b, joined, &rows);
        let projection = Linear::forward(b, &format!("{path}.attn.c_proj"), (width, width), joined);
        let out = reshape(b, projection.result, &cube);
        let middle = b.node("add", vec![], &[out, x]);
        b.module = format!("{path}.ln_2");
        let second = Norm::forward(b, &b.module.clone(), width, middle);
        b.module = format!("{path}.mlp");
        let flat = reshape(b, second.results[0], &rows);
        let up = Linear::forward(b, &format!("{path}.mlp.c_fc"), (width, 4 * width), flat);
        let gelu = Gelu::forward(b, up.result);
        let down = Linear::forward(
            b,
            &format!("{path}.mlp.c_proj"),
            (4 * width, width),
            gelu.result,
        );
        let out = reshape(b, down.result, &cube);
        let result = b.node("add", vec![], &[middle, out]);
        Block {
            path,
            norms: [first, second],
            qkv,
            heads: split,
            attention,
            projection,
            up,
            gelu,
            down,
            result,
        }
    }

    fn backward(&self, b: &mut Builder, s: Sizes, dy: Value, mask: Value) -> Value {
        let Sizes {
            width,
            heads,
            batch,
            sequence,
        } = s;
        let (rows, cube) = ([batch * sequence, width], [batch, sequence, width]);
        b.module = format!("{}.mlp", self.path);
        let flat = reshape(b, dy, &rows);
        let d = self.down.backward(b, flat);
        let d = self.gelu.backward(b, d);
        let d = self.up.backward(b, d);
        b.module = format!("{}.ln_2", self.path);
        let d = reshape(b, d, &cube);
        let d = self.norms[1].backward(b, d);
        let middle = b.node("add", vec![], &[dy, d]);
        b.module = format!("{}.attn", self.path);
        let flat = reshape(b, middle, &rows);
        let d = self.projection.backward(b, flat);
        let d = reshape(b, d, &[batch, sequence, heads, width / heads]);
        let d = permute(b, d);
        let scale = 1.0 / ((width / heads) as f64).sqrt();
        let attrs = vec![("causal", Attr::Bool(false)), ("scale", Attr::Float(scale))];
        let [q, k, v] = self.heads;
        let inputs = [d, q, k, v, self.attention[0], self.attention[1], mask];
        let parts = b.nodes("sdpa_bwd", attrs, &inputs, 3);
        let parts: Vec<Value> = parts
            .into_iter()
            .map(|part| {
                let part = permute(b, part);
                reshape(b, part, &cube)
            })
            .collect();
        let d = b.node("cat", vec![("dim", Attr::Int(2))], &parts);
        let d = reshape(b, d, &[batch * sequence, 3 * width]);
        let d = self.qkv.backward(b, d);
        b.module = format!("{}.ln_1", self.path);
        let d = reshape(b, d, &cube);
        let d = self.norms[0].backward(b, d);
        b.node("add", vec![], &[middle, d])
    }
}

/// `x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))`, written out.
struct Gelu {
    x: Value,
    half: Value,
    tanh: Value,
    more: Value,
    result: Value,
}

impl Gelu {
    fn forward(b: &mut Builder, x: Value) -> Gelu {
        let half = by(b, "mul_scalar", x, 0.5);
        let cube = by(b, "pow_scalar", x, 3.0);
        let cube = by(b, "mul_scalar", cube, CUBE);
        let inner = b.node("add", vec![], &[x, cube]);
        let inner = by(b, "mul_scalar", inner, SQRT_2_OVER_PI);
        let tanh = b.node("tanh", vec![], &[inner]);
        let more = by(b, "add_scalar", tanh, 1.0);
        let result = b.node("mul", vec![], &[half, more]);
        Gelu {
            x,
            half,
            tanh,
            more,
            result,
        }
    }
    fn backward(&self, b: &mut Builder, dy: Value) -> Value {
        let d_more = b.node("mul", vec![], &[dy, self.half]);
        let d_half = b.node("mul", vec![], &[dy, self.more]);
        let d = b.node("tanh_bwd", vec![], &[d_more, self.tanh]);
        let d = by(b, "mul_scalar", d, SQRT_2_OVER_PI);
        let d_cube = by(b, "mul_scalar", d, CUBE);
        let square = by(b, "pow_scalar", self.x, 2.0);
        let square = by(b, "mul_scalar", square, 3.0);
        let d_cube = b.node("mul", vec![], &[d_cube, square]);
        let d = b.node("add", vec![], &[d, d_cube]);
        let d_half = by(b, "mul_scalar", d_half, 0.5);
        b.node("add", vec![], &[d, d_half])
    }
}

fn ints(list: &[u64]) -> Attr {
    Attr::Ints(list.iter().map(|&i| i as i64).collect())
}

fn parameter(b: &mut Builder, path: &str, shape: &[u64]) -> (State, Value) {
    let ty = TensorType::new(DType::F32, shape).expect("a parameter's size should fit");
    let state = b.graph.states.next_id();
    (state, b.graph.add_state(path, path, StateKind::Param, ty))
}

fn reshape(b: &mut Builder, x: Value, shape: &[u64]) -> Value {
    b.node("reshape", vec![("shape", ints(shape))], &[x])
}

/// Swaps the two middle dimensions of four.
fn permute(b: &mut Builder, x: Value) -> Value {
    b.node("permute", vec![("dims", ints(&[0, 2, 1, 3]))], &[x])
}

fn slice(b: &mut Builder, x: Value, dim: i64, start: u64, end: u64) -> Value {
    let attrs = [
        ("dim", dim),
        ("start", start as i64),
        ("end", end as i64),
        ("step", 1),
    ];
    b.node(
        "slice",
        attrs.map(|(key, i)| (key, Attr::Int(i))).to_vec(),
        &[x],
    )
}

fn scalar(b: &mut Builder, value: f64) -> Value {
    let attrs = vec![
        ("dtype", Attr::Type(DType::F32)),
        ("shape", ints(&[])),
        ("value", Attr::Float(value)),
    ];
    b.node("full", attrs, &[])
}

fn by(b: &mut Builder, op: &str, x: Value, value: f64) -> Value {
    b.node(op, vec![("value", Attr::Float(value))], &[x])
}
