//! Attention reads and writes heads inside rows with the bits that it has with slices, permutations
//! and concatenations around it.

use ir::graph::Output;
use ir::{Attr, DType, Graph, Op, Phase, TensorType, Value};
use lighterage_tests::{generate, run};
use passes::graph::{attention, canonical};
use proptest::prelude::*;

/// The mask of attention.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Masked {
    No,
    Added,
    /// Tokens are of one document; there are as many queries as keys.
    ByDocument,
}

/// What a random graph has.
#[derive(Clone, Copy, Debug)]
struct Recipe {
    /// Sequences, heads of q for each of k and v, heads of k and v, queries, keys, widths.
    sizes: [u64; 7],
    /// Where q, k and v come from: see [`Builder::source`].
    sources: [u8; 3],
    /// q, k and v are parts of one value, in this order.
    order: Option<u8>,
    is_half: bool,
    is_causal: bool,
    mask: Masked,
    /// Weights are dropped.
    drops: bool,
    /// The result and dq are read head by head too.
    reads_heads: bool,
    /// One concatenation reads the gradients.
    joins: bool,
}

struct Builder {
    graph: Graph,
    dtype: DType,
}

impl Builder {
    fn node(&mut self, op: &str, attrs: &[(&'static str, Attr)], ins: &[Value]) -> Vec<Value> {
        let op = Op::new(op, attrs.iter().cloned()).expect("attributes should be the op's");
        let types = self.graph.types(ins);
        let n = op
            .infer(&types.iter().collect::<Vec<_>>())
            .map(|all| all.len());
        let first = self.graph.values.len();
        let names = (0..n.expect("operands should fit")).map(|i| format!("v{}", first + i));
        let names: Vec<String> = names.collect();
        let made = self.graph.add_node(op, ins, &names, Phase::Forward, "m");
        made.expect("a node should be typed")
    }
    fn input(&mut self, shape: &[u64]) -> Value {
        let name = format!("x{}", self.graph.values.len());
        let ty = TensorType::new(DType::F32, shape).expect("sizes should be small");
        let x = self.graph.add_input(name, ty);
        if self.dtype == DType::F32 {
            return x;
        }
        self.node("cast", &[("dtype", Attr::Type(self.dtype))], &[x])[0]
    }
    fn reshape(&mut self, x: Value, shape: &[u64]) -> Value {
        let shape = shape.iter().map(|&n| n as i64).collect();
        self.node("reshape", &[("shape", Attr::Ints(shape))], &[x])[0]
    }
    fn swap(&mut self, x: Value) -> Value {
        self.node("permute", &[("dims", Attr::Ints(vec![0, 2, 1, 3]))], &[x])[0]
    }
    fn slice(&mut self, x: Value, dim: i64, [start, end]: [u64; 2]) -> Value {
        let attrs = [
            ("dim", Attr::Int(dim)),
            ("end", Attr::Int(end as i64)),
            ("start", Attr::Int(start as i64)),
            ("step", Attr::Int(1)),
        ];
        self.node("slice", &attrs, &[x])[0]
    }
    fn want(&mut self, value: Value) {
        let name = format!("out{}", self.graph.outputs.len());
        self.graph.outputs.push(Output { name, value });
    }
    /// Heads that contain rows: computed so, or a view of rows, or of a part of rows.
    fn source(&mut self, from: u8, [b, h, s, d]: [u64; 4]) -> Value {
        match from % 4 {
            0 => {
                let x = self.input(&[b, h, s, d]);
                self.node("neg", &[], &[x])[0]
            }
            1 => {
                let x = self.input(&[b * s, h * d]);
                let rows = self.reshape(x, &[b, s, h, d]);
                self.swap(rows)
            }
            2 => {
                let x = self.input(&[b * s, (h + 2) * d]);
                let part = self.slice(x, 1, [d, (h + 1) * d]);
                let rows = self.reshape(part, &[b, s, h, d]);
                self.swap(rows)
            }
            // A part that begins inside a head.
            _ => {
                let x = self.input(&[b, s, h * d + 1]);
                let part = self.slice(x, 2, [1, h * d + 1]);
                let rows = self.reshape(part, &[b, s, h, d]);
                self.swap(rows)
            }
        }
    }
}

fn graph(recipe: &Recipe) -> Graph {
    let [b, group, g, s, mut t, d, mut e] = recipe.sizes;
    if recipe.order.is_some() {
        (t, e) = (s, d);
    }
    if recipe.mask == Masked::ByDocument {
        t = s;
    }
    let h = group * g;
    let dtype = if recipe.is_half {
        DType::BF16
    } else {
        DType::F32
    };
    let mut x = Builder {
        graph: Graph::new("attention"),
        dtype,
    };
    let shapes = [[b, h, s, d], [b, g, t, d], [b, g, t, e]];
    let mut qkv = vec![];
    let order = recipe
        .order
        .map(|first| [0, 1, 2].map(|i| (i + usize::from(first)) % 3));
    if let Some(order) = order {
        let all = x.input(&[b, s, (h + 2 * g) * d]);
        let mut start = 0;
        let mut parts = [all; 3];
        for i in order {
            let end = start + shapes[i][1] * d;
            let part = x.slice(all, 2, [start, end]);
            let rows = x.reshape(part, &[b, s, shapes[i][1], d]);
            parts[i] = x.swap(rows);
            start = end;
        }
        qkv.extend(parts);
    } else {
        qkv.extend([0, 1, 2].map(|i| x.source(recipe.sources[i], shapes[i])));
    }
    let mask = match recipe.mask {
        Masked::No => None,
        Masked::Added => Some(x.input(&[s, t])),
        Masked::ByDocument => {
            let ty = TensorType::new(DType::I64, [b, s]).expect("sizes should be small");
            let documents = x.graph.add_input("documents", ty);
            let [queries, keys] = [[b, 1, s, 1], [b, 1, 1, s]].map(|to| x.reshape(documents, &to));
            Some(x.node("eq", &[], &[queries, keys])[0])
        }
    };
    let attrs = [
        ("causal", Attr::Bool(recipe.is_causal)),
        ("scale", Attr::Float(0.5)),
    ];
    let key = recipe.drops.then(|| {
        let attrs = [
            ("dtype", Attr::Type(DType::I64)),
            ("shape", Attr::Ints(vec![2])),
            ("start", Attr::Int(7)),
            ("step", Attr::Int(-4)),
        ];
        let rng = x.node("arange", &attrs, &[])[0];
        let attrs = [("p", Attr::Float(0.5)), ("stream", Attr::Int(1))];
        x.node("dropout_key", &attrs, &[rng])[0]
    });
    let operands: Vec<Value> = qkv.iter().copied().chain(mask).chain(key).collect();
    let results = x.node("sdpa", &attrs, &operands);
    let rows = x.swap(results[0]);
    let flat = x.reshape(rows, &[b * s, h * e]);
    x.want(flat);
    let dout = x.source(u8::from(recipe.sources[0] % 2 == 1), [b, h, s, e]);
    let operands: Vec<Value> = [dout]
        .into_iter()
        .chain(qkv)
        .chain(results.iter().copied())
        .chain(mask)
        .chain(key)
        .collect();
    let gradients = x.node("sdpa_bwd", &attrs, &operands);
    let mut parts = vec![];
    for (i, &dx) in gradients.iter().enumerate() {
        let [b, h, s, d] = shapes[i];
        let rows = x.swap(dx);
        parts.push(x.reshape(rows, &[b, s, h * d]));
    }
    match order.filter(|_| recipe.joins) {
        Some(order) => {
            let parts = order.map(|i| parts[i]);
            let all = x.node("cat", &[("dim", Attr::Int(2))], &parts)[0];
            x.want(all);
        }
        None => parts.into_iter().for_each(|part| x.want(part)),
    }
    if recipe.reads_heads {
        x.want(results[0]);
        x.want(gradients[0]);
    }
    x.want(results[1]);
    x.graph
}

fn count(graph: &Graph, ops: &[&str]) -> usize {
    let nodes = graph.order.iter().map(|&node| graph.nodes[node].op.name());
    nodes.filter(|name| ops.contains(name)).count()
}

/// Checks the pass on a graph; returns the graph after it.
fn checked(mut graph: Graph, seed: u64) -> Graph {
    canonical::run(&mut graph);
    let mut new = graph.clone();
    attention::run(&mut new);
    assert_eq!(ir::verify::graph(&new), vec![], "{new}");
    let mut again = new.clone();
    attention::run(&mut again);
    assert!(again == new, "once is enough\n{new}");
    let start = generate::states(&graph, seed);
    let feeds = [generate::feed(&graph, seed, 0)];
    assert!(
        run::plain(&new, &start, &feeds) == run::plain(&graph, &start, &feeds),
        "{graph}\n{new}"
    );
    new
}

fn recipes() -> impl Strategy<Value = Recipe> {
    let sizes = [1..3u64, 1..3, 1..4, 1..6, 1..6, 1..5, 1..5];
    let flags = any::<[bool; 5]>();
    let order = prop::option::of(0..3u8);
    let all = (sizes, any::<[u8; 3]>(), order, flags, 0..3u8);
    all.prop_map(|(sizes, sources, order, flags, mask)| Recipe {
        sizes,
        sources,
        order,
        is_half: flags[0],
        is_causal: flags[1],
        mask: [Masked::No, Masked::Added, Masked::ByDocument][usize::from(mask)],
        reads_heads: flags[2],
        joins: flags[3],
        drops: flags[4],
    })
}

proptest! {
    #![proptest_config(generate::config(300))]
    #[test]
    fn attention_keeps_its_bits(recipe in recipes(), seed: u64) {
        let new = checked(graph(&recipe), seed);
        // Numbers of documents are compared inside of attention.
        if 1 < recipe.sizes[3] {
            prop_assert_eq!(count(&new, &["eq"]), 0);
        }
        // A permutation of one head or one row is a reshape, and no copy.
        let [_, group, g, s, ..] = recipe.sizes;
        if 1 < group * g && 1 < s {
            prop_assert_eq!(count(&new, &["sdpa", "sdpa_bwd"]), 0);
        }
    }
}

/// Nothing is moved beside attention if q, k and v share rows, and if they have their own.
#[test]
fn nothing_stands_beside_attention() {
    let one = Recipe {
        sizes: [2, 2, 2, 5, 4, 3, 2],
        sources: [1, 2, 1],
        order: None,
        is_half: false,
        is_causal: true,
        mask: Masked::Added,
        drops: true,
        reads_heads: false,
        joins: true,
    };
    for order in [None, Some(0), Some(1), Some(2)] {
        let new = checked(graph(&Recipe { order, ..one }), 1);
        let moves = ["permute", "cat"];
        assert_eq!(count(&new, &moves), 0, "{new}");
        assert_eq!(count(&new, &["slice"]), 0, "{new}");
    }
}

/// A file may have more views of views than a stack has room for.
#[test]
fn a_long_chain_of_views_is_read() {
    let mut b = Builder {
        graph: Graph::new("chain"),
        dtype: DType::F32,
    };
    let mut q = b.input(&[1, 4, 2, 8]);
    for _ in 0..50_001 {
        q = b.swap(q);
    }
    let attrs = [("causal", Attr::Bool(true)), ("scale", Attr::Float(0.5))];
    let out = b.node("sdpa", &attrs, &[q, q, q])[0];
    let out = b.swap(out);
    b.want(out);
    attention::run(&mut b.graph);
    assert_eq!(count(&b.graph, &["sdpa_rows"]), 1);
    assert_eq!(count(&b.graph, &["permute"]), 0);
}
