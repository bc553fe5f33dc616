//! Runs the node tests of the `onnx` package: each model is imported, compiled and run, and its
//! results are compared with the package's. `tests/data/onnx/gen_nodes.py` packs them.
//!
//! `tests/data/onnx/skipped.txt` lists every case that does not run, with the reason. A case that
//! is refused must be on the list with this reason, and all others must run and be right. After a
//! change, `BLESS=1 cargo test -p lighterage-tests onnx_nodes` writes the list anew.

use codegen::Data;
use onnx::{BatchNorm, Options};
use passes::cost::Roofline;
use passes::pipeline::{self, Budget, Kernels};
use rayon::prelude::*;
use runtime::Machine;
use safetensors::tensor::{Dtype, Metadata, TensorView};
use safetensors::{SafeTensorError, SafeTensors};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The tolerances of onnx's own runner. The absolute one counts for results of size 1: the package
/// computes some in f32, which leaves the rounding of the largest element where 0 is exact.
const RELATIVE: f64 = 1e-3;
const ABSOLUTE: f64 = 1e-7;

/// The number of cases that run at least. It may only rise.
const LEAST: usize = 1495;

pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/onnx")
}

/// Elements as f64.
pub(crate) fn numbers(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    fn all<const N: usize>(bytes: &[u8], convert: fn([u8; N]) -> f64) -> Vec<f64> {
        bytes
            .as_chunks::<N>()
            .0
            .iter()
            .map(|&b| convert(b))
            .collect()
    }
    match dtype {
        Dtype::F64 => all(bytes, f64::from_le_bytes),
        Dtype::F32 => all(bytes, |b| f32::from_le_bytes(b).into()),
        Dtype::F16 => all(bytes, |b| half::f16::from_le_bytes(b).to_f64()),
        Dtype::BF16 => all(bytes, |b| half::bf16::from_le_bytes(b).to_f64()),
        Dtype::I64 => all(bytes, |b| i64::from_le_bytes(b) as f64),
        Dtype::I32 => all(bytes, |b| i32::from_le_bytes(b).into()),
        Dtype::I16 => all(bytes, |b| i16::from_le_bytes(b).into()),
        Dtype::I8 => all(bytes, |[b]| f64::from(b as i8)),
        Dtype::U8 | Dtype::BOOL => all(bytes, |[b]| b.into()),
        // Their bits as a number, unless they are none.
        Dtype::F8_E4M3 => all(bytes, |[b]| match b & 0x7f {
            0x7f => f64::NAN,
            _ => b.into(),
        }),
        Dtype::F8_E5M2 => all(bytes, |[b]| match b & 0x7f {
            0x7d.. => f64::NAN,
            _ => b.into(),
        }),
        other => panic!("a tensor of {other:?} should not be packed"),
    }
}

/// The relative tolerance for elements of this type: two units in the last place of half precision,
/// which are more than onnx's.
fn relative(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::BF16 => 1.6e-2,
        Dtype::F16 => 2e-3,
        Dtype::F32 | Dtype::F64 => RELATIVE,
        _ => 0.0,
    }
}

/// The end of a case that did not run to the right results.
enum Failure {
    /// It was refused when it was read.
    Refused(String),
    /// It was read, but something is wrong with it.
    Wrong(String),
}

fn run(file: &SafeTensors<'_>, case: &str) -> Result<(), Failure> {
    let wrong = |e: &dyn std::fmt::Display| Failure::Wrong(e.to_string());
    let tensor = |name: String| -> Result<TensorView<'_>, SafeTensorError> { file.tensor(&name) };
    let bytes = tensor(format!("{case}/model"))
        .map_err(|e| wrong(&e))?
        .data()
        .to_vec();
    let options = options();
    let model = onnx::read_bytes(&bytes, case, &options).map_err(|error| {
        Failure::Refused(
            error
                .to_string()
                .trim_start_matches(case)
                .trim_start_matches(": ")
                .into(),
        )
    })?;
    if let Some(unsupported) = model.unsupported.first() {
        return Err(Failure::Refused(unsupported.why.clone()));
    }
    let findings = ir::verify::graph(&model.graph);
    if let Some(finding) = findings.first() {
        return Err(wrong(finding));
    }
    let again = onnx::read_bytes(&bytes, case, &options).map_err(|e| wrong(&e))?;
    if ir::text::print_graph(&again.graph) != ir::text::print_graph(&model.graph) {
        return Err(Failure::Wrong(
            "a second reading gives another graph".into(),
        ));
    }

    let device = passes::devices::named("cpu").map_err(|e| wrong(&e))?;
    let plain = pipeline::Options {
        budget: Budget::Share(1.0),
        kernels: Kernels::Plain,
        ..pipeline::Options::default()
    };
    let cost = Roofline::new(&device);
    let compiled = pipeline::compile(model.graph, &plain, &device, &cost, &mut |_| ());
    let compiled = compiled.map_err(|e| wrong(&e))?;
    let states = &compiled.program.graph.states;
    let data: Data = states
        .values()
        .filter_map(|s| Some((s.path.clone(), model.tensors.get(&s.path)?.data.clone())))
        .collect();
    let artifact = codegen::emit(&compiled, &data, codegen::Target::host());
    let artifact = artifact.map_err(|e| wrong(&e))?;
    let outputs: Vec<String> = artifact.outputs.iter().map(|o| o.name.clone()).collect();
    let mut machine = Machine::new(artifact, runtime::Options::default()).map_err(|e| wrong(&e))?;
    let inputs: Vec<String> = machine.inputs().map(|input| input.name.clone()).collect();
    for input in inputs {
        let given = tensor(format!("{case}/in/{input}")).map_err(|e| wrong(&e))?;
        machine
            .write_input(&input, given.data())
            .map_err(|e| wrong(&e))?;
    }
    machine.step().map_err(|e| wrong(&e))?;

    for name in outputs {
        let expected = tensor(format!("{case}/out/{name}")).map_err(|e| wrong(&e))?;
        let dtype = expected.dtype();
        let made = machine.read_output(&name).map_err(|e| wrong(&e))?;
        let (got, wanted) = (numbers(dtype, &made), numbers(dtype, expected.data()));
        let finite = wanted.iter().filter(|x| x.is_finite());
        let largest = finite.fold(1.0, |most: f64, x| most.max(x.abs()));
        let close = |(a, b): (&f64, &f64)| {
            let slack = if relative(dtype) == 0.0 {
                0.0
            } else {
                ABSOLUTE * largest
            };
            a == b
                || (a.is_nan() && b.is_nan())
                || (a - b).abs() <= slack + relative(dtype) * b.abs()
        };
        if got.len() != wanted.len() || !got.iter().zip(&wanted).all(close) {
            let first = got
                .iter()
                .zip(&wanted)
                .position(|pair| !close(pair))
                .unwrap_or(0);
            return Err(Failure::Wrong(format!(
                "{name}: {} elements, not {}; element {first} is {:?}, not {:?}",
                got.len(),
                wanted.len(),
                got.get(first),
                wanted.get(first)
            )));
        }
    }
    Ok(())
}

/// The file of all cases.
pub(crate) fn packed() -> Vec<u8> {
    let packed = std::fs::read(folder().join("nodes.safetensors.gz")).unwrap();
    let mut bytes = vec![];
    let mut decoder = flate2::read::GzDecoder::new(&packed[..]);
    decoder.read_to_end(&mut bytes).unwrap();
    bytes
}

/// The names of all cases, and the reasons why some are not packed.
pub(crate) fn cases(packed: &[u8]) -> (Vec<String>, BTreeMap<String, String>) {
    let (_, metadata): (usize, Metadata) = SafeTensors::read_metadata(packed).unwrap();
    let metadata = metadata.metadata().as_ref().unwrap();
    let cases = metadata["cases"].split_whitespace().map(String::from);
    let reasons = serde_json::from_str(&metadata["reasons"]).unwrap();
    (cases.collect(), reasons)
}

/// Checks that a list of cases with reasons is the one in a file, or writes it.
pub(crate) fn is_listed(file: &str, found: &str) {
    let path = folder().join(file);
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, found).unwrap();
    }
    let listed = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = listed.lines().zip(found.lines());
    let differs = differs.into_iter().find(|(old, new)| old != new);
    assert_eq!(differs, None, "a line of {file}, and what is found now");
    assert_eq!(
        listed.lines().count(),
        found.lines().count(),
        "lines of {file}"
    );
}

/// What a case is read with.
pub(crate) fn options() -> Options {
    Options {
        batch_norm: Some(BatchNorm::Frozen),
        ..Options::default()
    }
}

#[test]
fn node_tests_of_onnx_are_right_or_listed() {
    let bytes = packed();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (cases, reasons) = cases(&bytes);
    let outcome = |case: &String| match reasons.get(case) {
        Some(reason) => Err(Failure::Refused(format!("not packed: {reason}"))),
        None => run(&file, case),
    };
    let outcomes: Vec<Result<(), Failure>> = cases.par_iter().map(outcome).collect();
    let (mut skipped, mut wrong) = (String::new(), vec![]);
    for (case, outcome) in cases.iter().zip(outcomes) {
        match outcome {
            Ok(()) => (),
            Err(Failure::Refused(why)) => skipped.push_str(&format!("{case}: {why}\n")),
            Err(Failure::Wrong(why)) => wrong.push(format!("{case}: {why}")),
        }
    }
    let n_run = cases.len() - skipped.lines().count() - wrong.len();
    assert!(
        wrong.is_empty(),
        "{} are wrong ({n_run} are right):\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    is_listed("skipped.txt", &skipped);
    assert!(n_run >= LEAST, "{n_run} of {} cases are right", cases.len());
}
