//! Groups of ops compute the same bits as their ops one by one, on random graphs and on real
//! models.

use codegen::Data;
use codegen::kernels::{Target, generate_op};
use ir::{Graph, Node, TensorType};
use lighterage_tests::evaluate::{Tensors, step};
use lighterage_tests::{generate, run};
use passes::cost::Cost;
use passes::cost::profile::key;
use passes::graph::optimizer::{self, Attach, HYPER, Optimizer};
use passes::graph::{canonical, fuse};
use proptest::prelude::*;
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Runs the pass and checks the graph before and after it.
fn fused(graph: &Graph) -> Graph {
    let mut fused = graph.clone();
    fuse::run(&mut fused);
    assert_eq!(ir::verify::graph(&fused), vec![], "{fused}");
    let text = ir::text::print_graph(&fused);
    assert_eq!(ir::text::parse_graph(&text).as_ref(), Ok(&fused), "{text}");
    let again = {
        let mut again = graph.clone();
        fuse::run(&mut again);
        again
    };
    assert!(
        again == fused,
        "the same graph should be grouped in the same way"
    );
    for &node in &fused.order {
        let data = &fused.nodes[node];
        if data.op.body().is_none() {
            continue;
        }
        let (ins, outs) = (fused.types(&data.inputs), fused.types(&data.outputs));
        let scratch = fused.work(node).scratch.cpu;
        for target in Target::ALL {
            let kernel = generate_op(&data.op, &ins, &target);
            let kernel = kernel.unwrap_or_else(|e| panic!("{e}\n{}", fused.node_name(node)));
            assert!(
                kernel.scratch_bytes <= scratch,
                "{} needs more scratch\n{fused}",
                fused.node_name(node)
            );
            for &(i, j) in data
                .op
                .inplace()
                .iter()
                .filter(|&&(i, j)| ins[i] == outs[j])
            {
                assert!(
                    kernel.inplace.contains(&(i, j)),
                    "{}: {i} -> {j}\n{fused}",
                    fused.node_name(node)
                );
            }
        }
    }
    fused
}

/// Times of kernels by their key; everything else takes no time.
struct Measured<F>(F);

impl<F: Fn(&str) -> Option<f64> + Sync> Cost for Measured<F> {
    fn run(&self, graph: &Graph, node: Node) -> f64 {
        self.least(graph, node).unwrap_or_default()
    }
    fn least(&self, graph: &Graph, node: Node) -> Option<f64> {
        (self.0)(&key(graph, node))
    }
    fn host(&self, _: &Graph, _: Node) -> f64 {
        0.0
    }
    fn link(&self, _: u64) -> f64 {
        0.0
    }
    fn local(&self, _: u64) -> f64 {
        0.0
    }
}

/// The number of kernels of a graph.
fn kernels(graph: &Graph) -> usize {
    graph
        .order
        .iter()
        .filter(|&&node| !graph.nodes[node].op.is_alias())
        .count()
}

/// Bytes of all results of kernels.
fn bytes(graph: &Graph) -> u64 {
    let results = graph
        .order
        .iter()
        .map(|&node| &graph.nodes[node])
        .filter(|data| !data.op.is_alias());
    results
        .flat_map(|data| &data.outputs)
        .map(|&v| graph.values[v].ty.bytes())
        .sum()
}

proptest! {
    #![proptest_config(generate::config(300))]
    #[test]
    fn random_graphs_keep_their_bits(recipe in generate::recipes(60), seed: u64) {
        let mut graph = generate::graph(&recipe);
        canonical::run(&mut graph);
        let fused = fused(&graph);
        prop_assert!(kernels(&fused) <= kernels(&graph));
        let start: Data = generate::states(&graph, seed);
        let feeds: Vec<_> = (0..2)
            .map(|step| generate::feed(&graph, seed, step))
            .collect();
        let expected = run::plain(&graph, &start, &feeds);
        prop_assert!(
            run::plain(&fused, &start, &feeds) == expected,
            "{}\n{}",
            graph,
            fused
        );
        // Any groups may be slower.
        let drawn = |key: &str| {
            key.bytes().fold(seed, |x, byte| {
                (x ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            })
        };
        let mut apart = graph.clone();
        fuse::run_where_faster(
            &mut apart,
            &Measured(|key: &str| Some((drawn(key) >> 40) as f64)),
        );
        prop_assert_eq!(ir::verify::graph(&apart), vec![], "{}", &apart);
        prop_assert!(
            run::plain(&apart, &start, &feeds) == expected,
            "{}\n{}",
            graph,
            apart
        );
    }
}

/// A group is made, unless it and all its ops were measured and the group is slower.
#[test]
fn slow_groups_stay_apart() {
    let text = "graph g {\n  input  %x : f32[4,8]\n  fwd - %y = relu %x : f32[4,8]\n  fwd - %z = \
        neg %y : f32[4,8]\n  \
        fwd - %s = sum %z dims=[0] keepdim=false : f32[8]\n  output s = %s\n}\n";
    let n_kernels = |times: &dyn Fn(&str) -> Option<f64>| {
        // Other threads may read the times, so they are in a table.
        let table: BTreeMap<&str, Option<f64>> = ["relu", "neg", "sum", "fused"]
            .map(|op| (op, times(op)))
            .into();
        let mut graph = ir::text::parse_graph(text).unwrap();
        fuse::run_where_faster(
            &mut graph,
            &Measured(|key: &str| table[key.split(' ').next().unwrap()]),
        );
        kernels(&graph)
    };
    assert_eq!(
        n_kernels(&|op| Some(if op == "fused" { 2.9 } else { 1.0 })),
        1
    );
    assert_eq!(
        n_kernels(&|op| Some(if op == "fused" { 3.0 } else { 1.0 })),
        1
    );
    assert_eq!(
        n_kernels(&|op| Some(if op == "fused" { 3.1 } else { 1.0 })),
        3
    );
    for unknown in ["relu", "neg", "sum", "fused"] {
        assert_eq!(
            n_kernels(&|op| (op != unknown).then_some(if op == "fused" { 3.1 } else { 1.0 })),
            1
        );
    }
}

fn model(name: &str, level: &str) -> (Graph, Tensors, Tensors) {
    let folder: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data/models")
        .join(name);
    let read = |level: &str| {
        torch::read(&folder.join(format!("joint_{level}.pt2")), &BTreeMap::new()).unwrap()
    };
    let mut graph = read(level).graph;
    canonical::run(&mut graph);
    let attach = Attach {
        optimizer: Optimizer::AdamW,
        ..Attach::default()
    };
    optimizer::run(&mut graph, attach).unwrap();
    let files = ["ref.safetensors", "batches.safetensors"].map(|f| folder.join(f));
    let file = std::fs::read(files.iter().find(|f| f.exists()).unwrap()).unwrap();
    let batches = SafeTensors::deserialize(&file).unwrap();
    let given = |name: &str| match name {
        HYPER => [1e-3f64, 0.9, 0.999, 1e-8, 0.01]
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect(),
        _ => batches
            .tensor(&format!("batch.0.{name}"))
            .unwrap()
            .data()
            .to_vec(),
    };
    let names = graph.inputs.iter().map(|&v| graph.values[v].name.clone());
    let inputs = names.map(|name| (name.clone(), given(&name))).collect();
    let weights = read("core").tensors;
    let zeros = |ty: &TensorType| vec![0; ty.bytes() as usize];
    let state = |path: &str, ty: &TensorType| {
        weights
            .get(path)
            .map_or_else(|| zeros(ty), |t| t.data.clone())
    };
    let states = graph
        .states
        .values()
        .map(|s| (s.path.clone(), state(&s.path, &graph.values[s.before].ty)));
    let states = states.collect();
    (graph, states, inputs)
}

#[test]
fn models_keep_their_bits() {
    for name in [
        "bert-tiny",
        "gpt2-tiny",
        "llama-tiny",
        "resnet-tiny",
        "moe-tiny",
        "dropout-tiny",
    ] {
        for level in ["core", "coarse"]
            .into_iter()
            .filter(|&level| (name, level) != ("moe-tiny", "coarse"))
        {
            let (graph, states, inputs) = model(name, level);
            let fused = fused(&graph);
            let (mut plain, mut grouped) = (states.clone(), states);
            let outputs = step(&graph, &mut plain, &inputs).unwrap();
            assert!(
                step(&fused, &mut grouped, &inputs).unwrap() == outputs,
                "{name} {level}"
            );
            assert!(plain == grouped, "{name} {level}");
            assert!(
                kernels(&fused) < kernels(&graph) && bytes(&fused) < bytes(&graph),
                "{name} {level}"
            );
        }
    }
}
