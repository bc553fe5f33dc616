//! Runs every operator of the importer through the whole pipeline and compares the results with
//! PyTorch's: `tests/data/ops/gen_ops.py` writes the graph and the results.

use codegen::Data;
use ir::op::OpKind;
use passes::cost::Roofline;
use passes::pipeline::{self, Budget, Options};
use runtime::Machine;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, tensor::Metadata};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Elements as f64; NaN for a bit pattern of a NaN.
fn numbers(tensor: &TensorView<'_>, bytes: &[u8]) -> Vec<f64> {
    let chunks = |n| bytes.chunks_exact(n);
    match tensor.dtype() {
        Dtype::F32 => chunks(4)
            .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
            .collect(),
        Dtype::F64 => chunks(8)
            .map(|b| f64::from_le_bytes(b.try_into().unwrap()))
            .collect(),
        Dtype::BF16 => chunks(2)
            .map(|b| half::bf16::from_le_bytes(b.try_into().unwrap()).to_f64())
            .collect(),
        Dtype::F16 => chunks(2)
            .map(|b| half::f16::from_le_bytes(b.try_into().unwrap()).to_f64())
            .collect(),
        Dtype::I64 => chunks(8)
            .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64)
            .collect(),
        Dtype::I32 => chunks(4)
            .map(|b| f64::from(i32::from_le_bytes(b.try_into().unwrap())))
            .collect(),
        Dtype::BOOL | Dtype::U8 => bytes.iter().map(|&b| f64::from(b)).collect(),
        other => panic!("a tensor of {other:?} should be compared too"),
    }
}

/// Ops without an operator of PyTorch: only passes build them.
const ONLY_PASSES: &[OpKind] = &[
    OpKind::MatmulSum,
    OpKind::NllSum,
    OpKind::SdpaRows,
    OpKind::SdpaRowsBwd,
    OpKind::RoundRandom,
    OpKind::SumSquares,
    OpKind::ClipScale,
    OpKind::Adamw,
    OpKind::AdamwSplit,
    OpKind::Adamw8bit,
    OpKind::Nf4,
    OpKind::Sgd,
    OpKind::SgdMomentum,
    OpKind::Fused,
    OpKind::Extern,
];

/// Every op is computed in `ops.pt2` and compared with PyTorch's result, or is listed above.
#[test]
fn every_op_is_reached_or_only_passes_build_it() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/ops");
    let reached: BTreeSet<&str> = ["ops.pt2", "random.pt2"]
        .iter()
        .flat_map(|file| {
            let model = torch::read(&folder.join(file), &BTreeMap::new()).unwrap();
            let nodes: Vec<_> = model
                .graph
                .nodes
                .iter()
                .map(|(_, n)| n.op.kind().name())
                .collect();
            nodes
        })
        .collect();
    let listed: BTreeSet<&str> = ONLY_PASSES.iter().map(|kind| kind.name()).collect();
    let missing: Vec<&str> = OpKind::ALL
        .iter()
        .map(|kind| kind.name())
        .filter(|name| !reached.contains(name) && !listed.contains(name))
        .collect();
    assert!(
        missing.is_empty(),
        "no call in ops.pt2 reaches {}. If PyTorch has such an operator, add a call to \
         tests/data/ops/gen_ops.py and run it; if only passes build the op, add it to ONLY_PASSES \
         in tests/tests/ops.rs",
        missing.join(", ")
    );
    let needless: Vec<&&str> = listed.intersection(&reached).collect();
    assert!(
        needless.is_empty(),
        "a call in gen_ops.py reaches {needless:?}: take them out of ONLY_PASSES"
    );
}

/// A machine for a graph without a backward, and the names of its outputs.
fn machine(model: torch::Model) -> (Machine, Vec<String>) {
    assert!(model.unsupported.is_empty(), "{:?}", model.unsupported);
    let device = passes::devices::named("cpu").unwrap();
    let options = Options {
        budget: Budget::Share(1.0),
        ..Options::default()
    };
    let cost = Roofline::new(&device);
    let compiled = pipeline::compile(model.graph, &options, &device, &cost, &mut |_| ()).unwrap();
    let names: Vec<&str> = compiled
        .program
        .graph
        .states
        .values()
        .map(|s| s.path.as_str())
        .collect();
    let data: Data = model
        .tensors
        .into_iter()
        .filter(|(path, _)| names.contains(&path.as_str()))
        .map(|(path, tensor)| (path, tensor.data))
        .collect();
    let artifact = codegen::emit(&compiled, &data, codegen::Target::host()).unwrap();
    let outputs: Vec<String> = artifact
        .outputs
        .iter()
        .map(|output| output.name.clone())
        .collect();
    let machine = Machine::new(artifact, runtime::Options::default()).unwrap();
    (machine, outputs)
}

/// Means and squares of what random operators give, over 384 elements and more.
#[test]
fn random_operators_have_their_distributions() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/ops");
    let model = torch::read(&folder.join("random.pt2"), &BTreeMap::new()).unwrap();
    let (mut machine, outputs) = machine(model);
    machine
        .initialise(&runtime::StateInit { seed: 3, std: None })
        .unwrap();
    // Numbers with the mean 0 and the variance 1, and a deviation of 1.
    let x: Vec<u8> = (0..384)
        .flat_map(|i| f32::to_le_bytes(if i % 2 == 0 { 1.0 } else { -1.0 }))
        .collect();
    let p: Vec<u8> = (0..384).flat_map(|_| f32::to_le_bytes(1.0)).collect();
    machine.write_input("x", &x).unwrap();
    machine.write_input("p", &p).unwrap();
    machine.step().unwrap();
    // They are the last ones of the file.
    let names = &outputs[outputs.len() - 6..];
    let numbers: Vec<Vec<f64>> = names
        .iter()
        .map(|name| {
            let bytes = machine.read_output(name).unwrap();
            let floats = bytes.chunks_exact(4);
            floats
                .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
                .collect()
        })
        .collect();
    let mean = |list: &[f64]| list.iter().sum::<f64>() / list.len() as f64;
    let squares = |list: &[f64]| list.iter().map(|x| x * x).collect::<Vec<f64>>();
    let [attended, alpha, feature, both, normal] = &numbers[..5] else {
        panic!("five lists")
    };
    // Rows of weights with the sum 1, of which some are dropped.
    assert!((mean(attended) - 1.0).abs() < 0.1 && attended.iter().any(|x| (x - 1.0).abs() > 0.01));
    assert!(mean(alpha).abs() < 0.2 && (mean(&squares(alpha)) - 1.0).abs() < 0.3);
    let scale = 1.0 / 0.75;
    for dropped in feature.chunks(4) {
        assert!(dropped.iter().all(|&x| x == dropped[0]), "{dropped:?}");
        assert!(dropped[0] == 0.0 || (dropped[0] - scale).abs() < 1e-6);
    }
    assert!((mean(feature) - 1.0).abs() < 0.15);
    for dropped in both.chunks(4) {
        assert!(dropped.iter().all(|&x| x == dropped[0]), "{dropped:?}");
    }
    assert!(mean(&squares(normal)) > 2.5 && mean(&squares(normal)) < 6.0);
    let bytes = machine.read_output(&names[5]).unwrap();
    let mut order: Vec<i64> = bytes
        .chunks_exact(8)
        .map(|b| i64::from_le_bytes(b.try_into().unwrap()))
        .collect();
    assert!(!order.is_sorted());
    order.sort_unstable();
    assert!(order.into_iter().eq(0..64));
}

#[test]
fn every_operator_is_pytorchs() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/ops");
    let model = torch::read(&folder.join("ops.pt2"), &BTreeMap::new()).unwrap();
    let (mut machine, outputs) = machine(model);

    let bytes = std::fs::read(folder.join("ops.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (_, metadata): (usize, Metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let order = metadata.metadata().as_ref().unwrap()["order"].clone();
    for input in machine
        .inputs()
        .map(|input| input.name.clone())
        .collect::<Vec<_>>()
    {
        machine
            .write_input(&input, file.tensor(&format!("in.{input}")).unwrap().data())
            .unwrap();
    }
    machine.step().unwrap();
    let order: Vec<&str> = order.split_whitespace().collect();
    assert_eq!(order.len(), outputs.len());
    let mut wrong = vec![];
    for (name, output) in order.iter().zip(&outputs) {
        let expected = file.tensor(&format!("out.{name}")).unwrap();
        let got = numbers(&expected, &machine.read_output(output).unwrap());
        let expected_numbers = numbers(&expected, expected.data());
        assert_eq!(got.len(), expected_numbers.len(), "{name}");
        let tolerance = if matches!(expected.dtype(), Dtype::BF16 | Dtype::F16) {
            1e-2
        } else {
            2e-5
        };
        let largest = expected_numbers
            .iter()
            .filter(|x| x.is_finite())
            .fold(1.0f64, |m, x| m.max(x.abs()));
        let close = |(a, b): (&f64, &f64)| {
            a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance * largest
        };
        if !got.iter().zip(&expected_numbers).all(close) {
            wrong.push(format!("{name}: {got:?}, not {expected_numbers:?}"));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {} differ:\n{}",
        wrong.len(),
        order.len(),
        wrong.join("\n")
    );
}
