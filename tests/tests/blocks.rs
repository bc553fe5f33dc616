//! The blocks of traced models: by their modules' paths, and by repetition where paths are erased.

use ir::{Graph, Phase};
use passes::graph::optimizer::Optimizer;
use passes::graph::{canonical, optimizer};
use passes::plan::blocks::{Block, find};
use passes::schedule::order::{self, Update};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn read(path: &Path) -> Graph {
    torch::read(path, &BTreeMap::new())
        .unwrap_or_else(|error| panic!("{error}"))
        .graph
}

fn fixture(name: &str) -> Graph {
    read(
        &Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("data/models")
            .join(name),
    )
}

/// The graph after the passes before planning.
fn prepared(mut graph: Graph) -> Graph {
    canonical::run(&mut graph);
    optimizer::run(&mut graph, Optimizer::AdamW).unwrap();
    order::run(&mut graph, Update::Backward);
    graph
}

fn erased(mut graph: Graph) -> Graph {
    let nodes: Vec<_> = graph.nodes.ids().collect();
    for node in nodes {
        graph.nodes[node].module.clear();
    }
    graph
}

fn repeated(blocks: &[Block]) -> Vec<&Block> {
    blocks.iter().filter(|block| block.repeated).collect()
}

/// Every line of forward and backward is in one block, and every parameter that is read.
fn covers(graph: &Graph, blocks: &[Block]) {
    let lines = |phase| {
        let of_phase = |&&node: &&ir::Node| {
            graph.nodes[node].phase == phase && !graph.nodes[node].op.is_alias()
        };
        let mut lines: Vec<_> = graph.order.iter().filter(of_phase).copied().collect();
        lines.sort();
        lines
    };
    let all = |of: fn(&Block) -> &Vec<ir::Node>| {
        let mut all: Vec<_> = blocks.iter().flat_map(of).copied().collect();
        all.sort();
        all
    };
    assert_eq!(all(|block| &block.forward), lines(Phase::Forward));
    assert_eq!(all(|block| &block.backward), lines(Phase::Backward));
    let mut states: Vec<ir::State> = blocks
        .iter()
        .flat_map(|block| block.states.iter().copied())
        .collect();
    let n = states.len();
    states.sort_unstable();
    states.dedup();
    assert_eq!(states.len(), n, "a tied parameter is in one block");
    assert_eq!(
        n,
        graph
            .states
            .values()
            .filter(|state| state.kind == ir::StateKind::Param)
            .count()
    );
}

/// The number of blocks, which must be the same both ways; before and after the passes.
fn agree(name: &str, graph: Graph, expected: usize) {
    for (stage, graph) in [("traced", graph.clone()), ("prepared", prepared(graph))] {
        let blocks = find(&graph);
        covers(&graph, &blocks);
        let names: Vec<&str> = blocks.iter().map(|block| block.name.as_str()).collect();
        assert_eq!(
            repeated(&blocks).len(),
            expected,
            "{name} {stage} by modules: {names:?}"
        );
        let bare = erased(graph.clone());
        let found = find(&bare);
        covers(&bare, &found);
        let sizes: Vec<usize> = found.iter().map(|block| block.forward.len()).collect();
        assert_eq!(
            repeated(&found).len(),
            expected,
            "{name} {stage} by repetition: {sizes:?}"
        );
        assert_eq!(found, find(&bare), "{name}: the same twice");
        // The work in backward is assigned in the same way, except at borders.
        let of = |blocks: &[Block]| -> BTreeMap<ir::Node, usize> {
            let first = usize::from(!blocks[0].repeated);
            let each = blocks
                .iter()
                .enumerate()
                .flat_map(|(i, b)| b.backward.iter().map(move |&n| (n, i + 1 - first)));
            each.collect()
        };
        let (one, other) = (of(&blocks), of(&found));
        let same = one
            .iter()
            .filter(|(node, block)| other.get(node) == Some(block))
            .count();
        assert!(
            0.9 * one.len() as f64 <= same as f64,
            "{name} {stage}: {same} of {} backward nodes",
            one.len()
        );
    }
}

#[test]
fn paths_and_repetition_agree_on_traced_models() {
    for (name, blocks) in [
        ("gpt2-tiny/joint_core.pt2", 2),
        ("gpt2-tiny/joint_coarse.pt2", 2),
        ("llama-tiny/joint_core.pt2", 2),
        ("llama-tiny/joint_coarse.pt2", 2),
        ("bert-tiny/joint_core.pt2", 2),
        ("bert-tiny/joint_coarse.pt2", 2),
        ("dropout-tiny/joint_core.pt2", 2),
    ] {
        agree(name, fixture(name), blocks);
    }
}

#[test]
fn paths_and_repetition_agree_on_chains() {
    for blocks in [2, 3, 48] {
        agree("chain", lighterage_tests::chain::chain(blocks), blocks);
    }
}

/// Large traces are not in the repository; `LIGHTERAGE_MODELS` may name a folder with some.
#[test]
fn paths_and_repetition_agree_on_large_models() {
    let Some(folder) = std::env::var_os("LIGHTERAGE_MODELS").map(PathBuf::from) else {
        eprintln!("skipped: LIGHTERAGE_MODELS names no folder of large models");
        return;
    };
    for (name, blocks) in [
        ("gpt2-10b_coarse_fused.pt2", 48),
        ("llama-34b_coarse_fused.pt2", 48),
    ] {
        let path = folder.join(name);
        if path.exists() {
            agree(name, read(&path), blocks);
        }
    }
}

#[test]
fn blocks_of_gpt2_are_what_they_are_called() {
    let graph = prepared(fixture("gpt2-tiny/joint_core.pt2"));
    let blocks = find(&graph);
    let names: Vec<&str> = blocks.iter().map(|block| block.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "before",
            "model.transformer.h.0",
            "model.transformer.h.1",
            "after"
        ]
    );
    let path = |&state: &ir::State| graph.states[state].path.as_str();
    // The embedding is tied to the head: it belongs to the block of its first use.
    assert_eq!(
        blocks[0].states.iter().map(path).collect::<Vec<_>>(),
        ["model.lm_head.weight", "model.transformer.wpe.weight"]
    );
    let first: Vec<&str> = blocks[1].states.iter().map(path).collect();
    assert!(
        first[0].ends_with("h.0.ln_1.weight") && first.len() == 12,
        "{first:?}"
    );
    assert_eq!(
        blocks[3].states.iter().map(path).collect::<Vec<_>>(),
        [
            "model.transformer.ln_f.weight",
            "model.transformer.ln_f.bias"
        ]
    );
}

#[test]
fn stages_are_refined_to_their_blocks() {
    // Two stages with one block each: nothing finer than `stages.0` and `stages.1`.
    let graph = prepared(fixture("resnet-tiny/joint_coarse.pt2"));
    let blocks = find(&graph);
    covers(&graph, &blocks);
    assert_eq!(repeated(&blocks).len(), 2);
    // Six blocks in two stages of three.
    let mut graph = lighterage_tests::chain::chain(6);
    let nodes: Vec<_> = graph.nodes.ids().collect();
    for node in nodes {
        let module = &mut graph.nodes[node].module;
        if let Some(number) = module
            .strip_prefix("blocks.")
            .and_then(|n| n.parse::<usize>().ok())
        {
            *module = format!("model.stages.{}.{}.body", number / 3, number % 3);
        }
    }
    let blocks = find(&graph);
    let names: Vec<&str> = repeated(&blocks)
        .iter()
        .map(|block| block.name.as_str())
        .collect();
    assert_eq!(
        names[..4],
        [
            "model.stages.0.0",
            "model.stages.0.1",
            "model.stages.0.2",
            "model.stages.1.0"
        ]
    );
    assert_eq!(names.len(), 6);
}

/// One layer: its experts repeat.
#[test]
fn experts_are_blocks_where_there_is_one_layer() {
    let graph = prepared(fixture("moe-tiny/joint_core.pt2"));
    let blocks = find(&graph);
    covers(&graph, &blocks);
    assert!(
        repeated(&blocks)
            .iter()
            .all(|block| block.name.contains("experts"))
    );
    assert_eq!(repeated(&blocks).len(), 4);
}

#[test]
fn a_model_without_repetition_is_one_block() {
    let graph = erased(lighterage_tests::chain::chain(1));
    let blocks = find(&graph);
    covers(&graph, &blocks);
    assert_eq!(blocks.len(), 1);
    assert!(!blocks[0].repeated);
}

/// Parameters are in the order of their first use, whatever order declares them; one that is used
/// twice is there once.
#[test]
fn parameters_are_in_the_order_of_their_use() {
    let mut text = String::from("graph order {\n  input %x : f32[4,8]\n");
    // Declared in the order of their names: used first, the shared one, then backwards.
    for name in ["a_head", "b2", "b1", "b0", "z_first"] {
        text += &format!("  state param %{name} : f32[8,8] \"{name}\"\n");
    }
    let mut last = "x".to_string();
    for (i, weight) in ["z_first", "b0", "b1", "b2", "z_first"].iter().enumerate() {
        let dot = format!("matmul %{last}, %{weight} ta=false tb=false");
        text += &format!("  fwd - %m{i} = {dot} : f32[4,8]\n");
        last = format!("m{i}");
    }
    text += &format!("  output y = %{last}\n}}\n");
    let graph = ir::text::parse_graph(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let states = find(&graph).into_iter().flat_map(|block| block.states);
    let used: Vec<String> = states
        .map(|state| graph.states[state].path.clone())
        .collect();
    assert_eq!(used, ["z_first", "b0", "b1", "b2"]);
}
