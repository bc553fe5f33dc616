//! Memory by formula: what lives on the GPU, a layer's tensors, parallelism.

use super::{Kind, Paper, Section};
use papers::estimate::{
    Adapters, Estimate, Optimizer, Parallel, Precision, Recompute, Setup, Shape, estimate,
};
use papers::table::Table;

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
