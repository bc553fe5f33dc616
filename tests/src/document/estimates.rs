//! Memory by formula: what lives on the GPU, a layer's tensors, parallelism.

use super::{Kind, Paper, Section};
use crate::gpt2;
use ir::graph::Phase;
use ir::op::OpKind;
use ir::{Graph, Value};
use papers::estimate::peak::{self, Update};
use papers::estimate::{
    Adapters, Attention, Estimate, Optimizer, Parallel, Precision, Recompute, Saved, Setup, Shape,
    estimate,
};
use papers::table::Table;
use passes::cost::Roofline;
use passes::decide::{Extent, Planner};
use passes::graph;
use passes::pipeline::{self, Options};
use passes::schedule::order;
use std::collections::BTreeMap;
use std::path::Path;

pub(super) fn paper() -> Paper {
    Paper {
        title: "Memory Management for Optimizing LLMs (2026)",
        about: "`lighterage estimate` has the post's formulas: [estimate.md](estimate.md).",
        sections: vec![
            Section {
                name: "estimate-states",
                title: "What lives on the GPU: 7 billion parameters, GB",
                kind: Kind::Computed,
                command: Some("lighterage estimate --params 7B"),
                body: states,
                differs: "Equal, except QLoRA: the post's 0.78 bytes per parameter omit the \
                          adapters' own weights.",
                quick: true,
            },
            Section {
                name: "estimate-layer",
                title: "The tensors that a layer saves",
                kind: Kind::Computed,
                command: Some(
                    "lighterage estimate --params 7B --layers 32 --width 4096 --heads 32 --seq \
                     2048 --batch 1",
                ),
                body: layer,
                differs: "Equal: `sbd (10 + 24/t + 5as/(dt))` bytes. In units of sbd, for s = \
                          2048, d = 4096, a = 32, t = 1.",
                quick: true,
            },
            Section {
                name: "estimate-graph",
                title: "What a traced layer saves, tensor by tensor",
                kind: Kind::Computed,
                command: Some("lighterage import tests/data/block/block.pt2"),
                body: traced,
                differs: "A layer of the post, traced by PyTorch in bf16 (`tests/data/block`): \
                          each value that the forward makes and the backward reads, without \
                          parameters and inputs. Fifteen tensors, as many bytes in each as in \
                          the formula, and so `sbd (10 + 24/t + 5as/(dt))` in all, here with s = \
                          24, b = 2, d = 32, a = 4, t = 1. But three of the post's names are not \
                          what a graph keeps. The backward never reads attention's and the MLP's \
                          output, because a sum needs neither for its gradient; it reads the \
                          results of the two norms, which are the inputs of the products. It \
                          does not read the scores before the softmax either, but the \
                          probabilities after dropout. The formula leaves out the norms' \
                          statistics.",
                quick: true,
            },
            Section {
                name: "estimate-peak",
                title: "The peak of a step: the formula against the compiled plan, bytes",
                kind: Kind::Simulated,
                command: Some("lighterage estimate … --attention flash --update after"),
                body: peaks,
                differs: "Plans of the planner `keep` for the example, a fixture with dropout, and \
                          GPT-2s without files. The sum of states, gradients and activations is \
                          more than a step needs: gradients are made while activations go. The \
                          formula takes the largest of three moments, and is within 1 % where the \
                          model has its form: f32, pre-norm, an MLP four times as wide, tied \
                          embeddings, flash attention. It omits gradients of vectors, alignment, \
                          and what an update in the backward still holds.",
                quick: true,
            },
            Section {
                name: "estimate-recompute",
                title: "Gradient checkpointing",
                kind: Kind::Computed,
                command: Some("lighterage estimate … --recompute full"),
                body: recompute,
                differs: "The post says 5 to 10 times. Its own formulas give 17 times without \
                          attention's three tensors, and more with them.",
                quick: true,
            },
            Section {
                name: "estimate-parallel",
                title: "ZeRO, and three kinds of parallelism at once, GB on a device",
                kind: Kind::Computed,
                command: Some(
                    "lighterage estimate --params 70B --tensor-parallel 8 --pipeline 4 \
                     --data-parallel 2 --zero 1",
                ),
                body: parallel,
                differs: "Equal.",
                quick: true,
            },
        ],
    }
}

fn setup(billions: u64) -> Setup {
    Setup {
        parameters: billions * 1_000_000_000,
        shape: None,
        optimizer: Optimizer::AdamW,
        precision: Precision::Mixed,
        recompute: Recompute::None,
        attention: Attention::Scores,
        dropout: true,
        foreach: false,
        adapters: None,
        parallel: Parallel::default(),
    }
}

fn of(setup: &Setup) -> Estimate {
    estimate(setup).expect("sizes within range")
}

fn gb(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / 1e9)
}

fn states() -> String {
    let mut table = Table::new([
        "training",
        "weights",
        "gradients",
        "optimizer",
        "ours",
        "the post",
    ]);
    let with = |optimizer| Setup {
        optimizer,
        ..setup(7)
    };
    let adapters = |four_bit| Setup {
        adapters: Some(Adapters {
            share: 0.02,
            four_bit,
        }),
        ..setup(7)
    };
    // Bytes per parameter in the post, times seven.
    for (name, setup, theirs) in [
        ("AdamW", with(Optimizer::AdamW), "112"),
        ("8-bit AdamW", with(Optimizer::AdamW8bit), "70"),
        ("Adafactor", with(Optimizer::Adafactor), "70"),
        ("SGD with momentum", with(Optimizer::Momentum), "84"),
        ("QLoRA, 2 %", adapters(true), "5.46"),
    ] {
        let estimate = of(&setup);
        table.push(vec![
            name.into(),
            gb(estimate.parameters),
            gb(estimate.gradients),
            gb(estimate.optimizer),
            gb(estimate.total()),
            theirs.into(),
        ]);
    }
    table.markdown()
}

const SHAPE: Shape = Shape {
    layers: 32,
    width: 4096,
    heads: 32,
    sequence: 2048,
    batch: 1,
    vocabulary: None,
};

fn layer() -> String {
    // The post's bytes in units of sbd. The last three are 2, 2 and 1 times a s / d.
    const THEIRS: [f64; 15] = [
        2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 8.0, 8.0, 32.0, 32.0, 16.0,
    ];
    let mut table = Table::new(["tensor", "shape", "ours", "the post"]);
    let estimate = of(&Setup {
        shape: Some(SHAPE),
        ..setup(7)
    });
    let sbd = SHAPE.sequence * SHAPE.batch * SHAPE.width;
    for (saved, theirs) in estimate.layer.iter().zip(THEIRS) {
        table.push(vec![
            saved.name.into(),
            format!("`{}`", saved.shape),
            format!("{}", saved.bytes as f64 / sbd as f64),
            format!("{theirs}"),
        ]);
    }
    let sum: u64 = estimate.layer.iter().map(|saved| saved.bytes).sum();
    table.push(vec![
        "all".into(),
        String::new(),
        format!("{}", sum as f64 / sbd as f64),
        format!("{}", THEIRS.iter().sum::<f64>()),
    ]);
    table.markdown()
}

/// The traced layer, with its sizes.
pub const BLOCK: &[u8] = include_bytes!("../../data/block/block.pt2");
/// Sizes of [`BLOCK`].
pub const BLOCK_SHAPE: Shape = Shape {
    layers: 1,
    width: 32,
    heads: 4,
    sequence: 24,
    batch: 2,
    vocabulary: None,
};

/// What [`BLOCK`] saves for each row of the post's table: the value's name, and what it is.
pub const BLOCK_VALUES: [(&str, &str); 15] = [
    ("embedding", "first norm's input"),
    ("add", "second norm's input"),
    ("getitem", "first norm's result"),
    ("getitem_7", "second norm's result"),
    ("getitem_6", "mask"),
    ("getitem_11", "mask"),
    ("addmm", "queries"),
    ("addmm_1", "keys"),
    ("addmm_2", "values"),
    ("bmm_1", "attention over values"),
    ("addmm_4", "MLP's first product"),
    ("gelu", "GeLU"),
    ("getitem_3", "probabilities after dropout"),
    ("_softmax", "softmax"),
    ("getitem_4", "mask"),
];

/// The values that a graph's forward makes and its backward reads, by name, with their bytes.
/// Reshapes and permutations are views, as in PyTorch: what counts is the value that they show.
pub fn saved(graph: &Graph) -> BTreeMap<String, u64> {
    let backward = graph.order.iter().map(|&node| &graph.nodes[node]);
    let backward = backward.filter(|data| data.phase == Phase::Backward);
    let mut saved = BTreeMap::new();
    for &read in backward.flat_map(|data| &data.inputs) {
        let value = shown(graph, read);
        let maker = graph.def_node(value).map(|node| graph.nodes[node].phase);
        if maker == Some(Phase::Forward) {
            let data = &graph.values[value];
            saved.insert(data.name.clone(), data.ty.bytes());
        }
    }
    saved
}

/// The value whose elements a chain of views shows. A cast of a norm's statistics to the type of
/// its input is not a view.
fn shown(graph: &Graph, value: Value) -> Value {
    let root = graph.root(value);
    match graph.def_node(root).map(|node| &graph.nodes[node]) {
        Some(data) if data.op.kind() == OpKind::Permute => shown(graph, data.inputs[0]),
        _ => root,
    }
}

/// The rows of the formula for [`BLOCK_SHAPE`], in bf16.
pub fn block_rows() -> Vec<Saved> {
    let setup = Setup {
        shape: Some(BLOCK_SHAPE),
        ..setup(1)
    };
    of(&setup).layer
}

/// Reads [`BLOCK`].
pub fn block() -> Graph {
    let model = torch::read_bytes(BLOCK, "block", &BTreeMap::new());
    model.expect("the file should be a model").graph
}

fn traced() -> String {
    let mut table = Table::new([
        "the post's tensor",
        "the graph's value",
        "its bytes",
        "formula",
    ]);
    let mut saved = saved(&block());
    let (mut graphs, mut formulas) = (0, 0);
    for (row, (name, what)) in block_rows().iter().zip(BLOCK_VALUES) {
        let bytes = saved.remove(name);
        graphs += bytes.unwrap_or(0);
        formulas += row.bytes;
        table.push(vec![
            row.name.into(),
            format!("`%{name}`, {what}"),
            bytes.map_or("not saved".into(), |bytes| bytes.to_string()),
            row.bytes.to_string(),
        ]);
    }
    table.push(vec![
        "all".into(),
        String::new(),
        graphs.to_string(),
        formulas.to_string(),
    ]);
    for (name, bytes) in saved {
        table.push(vec![
            String::new(),
            format!("`%{name}`, norm's statistics"),
            bytes.to_string(),
            "left out".into(),
        ]);
    }
    table.markdown()
}

/// A model whose plan is compared with the formula.
pub struct Planned {
    /// Its name.
    pub name: &'static str,
    /// Its sizes.
    pub shape: Shape,
    /// True if it has dropout.
    pub dropout: bool,
    /// Its step.
    pub graph: Graph,
}

/// Models of the formula's form.
pub fn planned_models() -> Vec<Planned> {
    let file = |path: &str| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let model = torch::read(&root.join(path), &BTreeMap::new());
        model.expect("the file should be a model").graph
    };
    let shape = |layers, width, heads, sequence, batch, vocabulary| Shape {
        layers,
        width,
        heads,
        sequence,
        batch,
        vocabulary: Some(vocabulary),
    };
    let built = |name, shape: Shape| Planned {
        name,
        shape,
        dropout: false,
        graph: gpt2::gpt2(
            shape.layers as usize,
            shape.width,
            shape.heads,
            shape.batch,
            shape.sequence,
            shape.vocabulary.unwrap_or(0),
        ),
    };
    vec![
        Planned {
            name: "examples/gpt2",
            shape: shape(4, 256, 4, 128, 8, 256),
            dropout: false,
            graph: file("examples/gpt2/gpt2.pt2"),
        },
        Planned {
            name: "dropout-tiny",
            shape: shape(2, 32, 2, 16, 2, 61),
            dropout: true,
            graph: file("tests/data/models/dropout-tiny/joint_coarse.pt2"),
        },
        built("large vocabulary", shape(2, 64, 4, 64, 4, 4096)),
        built("short sequences", shape(12, 128, 4, 16, 1, 256)),
    ]
}

/// The peak that keeping everything needs, by the compiler.
pub fn kept(graph: Graph, optimizer: graph::optimizer::Optimizer, update: order::Update) -> u64 {
    let device = passes::devices::named("cpu").expect("a known device");
    let options = Options {
        optimizer,
        update,
        planner: Planner::Keep,
        extent: Extent::Plan,
        ..Options::default()
    };
    let roofline = Roofline::new(&device);
    let compiled = pipeline::compile(graph, &options, &device, &roofline, &mut |_| ());
    compiled.expect("everything should fit").planned_peak
}

/// The formula's setup of a model.
pub fn formula(model: &Planned, optimizer: Optimizer) -> Setup {
    Setup {
        parameters: model.shape.parameters().expect("sizes within range"),
        shape: Some(model.shape),
        optimizer,
        precision: Precision::F32,
        attention: Attention::Flash,
        dropout: model.dropout,
        ..setup(1)
    }
}

/// Optimizers and orders of updates, by both names.
pub const WAYS: [(
    Optimizer,
    graph::optimizer::Optimizer,
    Update,
    order::Update,
); 3] = [
    (
        Optimizer::AdamW,
        graph::optimizer::Optimizer::AdamW,
        Update::Backward,
        order::Update::Backward,
    ),
    (
        Optimizer::AdamW,
        graph::optimizer::Optimizer::AdamW,
        Update::After,
        order::Update::After,
    ),
    (
        Optimizer::Sgd,
        graph::optimizer::Optimizer::Sgd,
        Update::After,
        order::Update::After,
    ),
];

fn peaks() -> String {
    let mut table = Table::new([
        "model",
        "optimizer",
        "updates",
        "plan",
        "formula",
        "error",
        "the sum",
        "error",
        "peak when",
    ]);
    for model in planned_models() {
        for (optimizer, ours, update, order) in WAYS {
            let plan = kept(model.graph.clone(), ours, order);
            let setup = formula(&model, optimizer);
            let peak = peak::peak(&setup, update).expect("the setup has a formula");
            let error = |bytes: u64| {
                let tenths = (1000.0 * (bytes as f64 / plan as f64 - 1.0)).round();
                // The sum of zeros is not negative.
                format!("{:+.1} %", tenths / 10.0 + 0.0)
            };
            let sum = of(&setup).total();
            table.push(vec![
                model.name.into(),
                optimizer.name().into(),
                update.name().into(),
                plan.to_string(),
                peak.bytes.to_string(),
                error(peak.bytes),
                sum.to_string(),
                error(sum),
                peak.moment.into(),
            ]);
        }
    }
    table.markdown()
}

fn recompute() -> String {
    let mut table = Table::new(["recomputed", "activations, in sbd a layer", "times less"]);
    let units = |recompute| {
        let estimate = of(&Setup {
            shape: Some(SHAPE),
            recompute,
            ..setup(7)
        });
        let sbd = SHAPE.sequence * SHAPE.batch * SHAPE.width * SHAPE.layers;
        estimate.activations.unwrap_or(0) as f64 / sbd as f64
    };
    let none = units(Recompute::None);
    for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
        let units = units(recompute);
        table.push(vec![
            recompute.name().into(),
            format!("{units}"),
            format!("{:.1}", none / units),
        ]);
    }
    table.markdown()
}

fn parallel() -> String {
    let mut table = Table::new(["", "weights", "gradients", "optimizer", "sum", "the post"]);
    let zero = |zero| Setup {
        parallel: Parallel {
            data: 8,
            zero,
            ..Parallel::default()
        },
        ..setup(7)
    };
    let all = Setup {
        parallel: Parallel {
            tensor: 8,
            pipeline: 4,
            data: 2,
            zero: 1,
            micro_batches: 4,
        },
        ..setup(70)
    };
    for (name, setup, theirs) in [
        ("7B on 8, no ZeRO", zero(0), "112"),
        ("7B on 8, ZeRO-1", zero(1), "38.5"),
        ("7B on 8, ZeRO-2", zero(2), "26.25"),
        ("7B on 8, ZeRO-3", zero(3), "14"),
        ("70B on 64: t 8, p 4, d 2, ZeRO-1", all, "21.9"),
    ] {
        let estimate = of(&setup);
        table.push(vec![
            name.into(),
            gb(estimate.parameters),
            gb(estimate.gradients),
            gb(estimate.optimizer),
            gb(estimate.total()),
            theirs.into(),
        ]);
    }
    table.markdown()
}
