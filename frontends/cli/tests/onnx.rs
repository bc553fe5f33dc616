//! `.onnx` files on the command line.

use crate::common::{Folder, model, run};
use onnx::{BatchNorm, Model, Options};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

fn file(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/data/onnx")
        .join(name);
    path.to_str().unwrap().to_string()
}

#[test]
fn a_forward_is_imported_and_planned() {
    let gpt2 = file("gpt2.onnx");
    let import = run(&format!("import {gpt2}")).expect(0);
    assert!(ir::text::parse_graph(&import.out).is_ok(), "{}", import.out);
    assert_eq!(import.out, run(&format!("import {gpt2}")).expect(0).out);
    let plan = run(&format!("plan {gpt2} --budget 60% --json")).expect(0);
    assert_eq!(plan.json().len(), 1);
    run(&format!("plan {gpt2} --optimizer adamw"))
        .expect(2)
        .says(&["no gradient"]);
}

#[test]
fn a_file_is_known_by_its_first_bytes() {
    let folder = Folder::new("onnx-bytes");
    let copy = folder.write("model", std::fs::read(file("bert.onnx")).unwrap());
    run(&format!("import {copy}")).expect(0);
}

#[test]
fn the_choices_of_a_file_are_asked_for() {
    let folder = Folder::new("onnx-choices");
    let resnet = file("resnet.onnx");
    run(&format!("import {resnet}"))
        .expect(2)
        .says(&["has symbolic sizes: batch", "--dim batch="]);
    run(&format!("import {resnet} --dim batch=4"))
        .expect(2)
        .says(&[
            "BatchNormalization",
            "--batch-norm train",
            "--batch-norm frozen",
        ]);
    let step = folder.file("resnet.lit");
    let kernels = "--kernels plain";
    run(&format!(
        "compile {resnet} --dim batch=4 --batch-norm train {kernels} -o {step}"
    ))
    .expect(0);
    let frozen = run(&format!(
        "import {resnet} --dim batch=4 --batch-norm frozen"
    ))
    .expect(0);
    assert!(!frozen.out.contains("batch_norm"), "{}", frozen.out);
    let pattern = format!("import {resnet} --dim batch=4 --batch-norm train --trainable fc.*");
    let two = run(&pattern).expect(0);
    assert_eq!(two.out.matches("state  param").count(), 2, "{}", two.out);
}

#[test]
fn a_file_for_inference_is_told() {
    let inference = file("gpt2-inference.onnx");
    run(&format!("import {inference}"))
        .expect(0)
        .says(&["2 of the model's weights are constants", "optimize=False"]);
}

#[test]
fn options_of_onnx_files_are_refused_for_others() {
    let gpt2 = model("gpt2-tiny/joint_coarse.pt2");
    for option in ["--trainable all", "--batch-norm train"] {
        run(&format!("import {gpt2} {option}"))
            .expect(2)
            .says(&["only .onnx files have such a choice"]);
    }
}

/// A safetensors file of these tensors.
fn safe(tensors: &[(&str, Dtype, Vec<usize>, &[u8])]) -> Vec<u8> {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        let view = TensorView::new(*dtype, shape.clone(), data).unwrap();
        (name.to_string(), view)
    });
    safetensors::serialize(views, None).unwrap()
}

/// The batch on which a model was trained when its file was made: the inputs in `all`.
pub(crate) fn batches(folder: &Folder, name: &str, all: &Path) -> String {
    let bytes = std::fs::read(all).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let prefix = format!("{name}/in/");
    let own = all.iter().filter_map(|(path, view)| {
        let input = path.strip_prefix(&prefix)?;
        Some((format!("batch.0.{input}"), view))
    });
    let file = safetensors::serialize(own, None).unwrap();
    folder.write(&format!("{name}.batches.safetensors"), file)
}

fn read(path: &str) -> Model {
    let is_resnet = path.contains("resnet");
    let options = Options {
        dims: is_resnet
            .then(|| ("batch".to_string(), 4))
            .into_iter()
            .collect(),
        batch_norm: Some(BatchNorm::Train),
        ..Options::default()
    };
    onnx::read(path.as_ref(), &options).unwrap_or_else(|e| panic!("{e}"))
}

/// The files of a folder that a failed command left.
fn left(folder: &Folder) -> Vec<String> {
    let names = folder.names().into_iter();
    names.filter(|name| name.contains("out")).collect()
}

#[test]
fn trained_values_go_back_into_the_file() {
    let folder = Folder::new("onnx-export");
    for (name, options, n_updated) in [
        ("gpt2", "", 28),
        // Eight parameters and four running statistics.
        ("resnet", "--dim batch=4 --batch-norm train", 12),
    ] {
        let original = file(&format!("{name}.onnx"));
        let batches = batches(&folder, name, file("models.safetensors").as_ref());
        let states = folder.file(&format!("{name}.safetensors"));
        run(&format!(
            "train {original} {options} --differentiate --optimizer adamw --kernels plain \
             --batches {batches} --steps 3 --save {states}"
        ))
        .expect(0);
        let out = folder.file(&format!("{name}.onnx"));
        run(&format!("export {original} --states {states} -o {out}")).expect(0);

        let (before, after) = (read(&original), read(&out));
        assert_eq!(
            ir::text::print_graph(&before.graph),
            ir::text::print_graph(&after.graph)
        );
        let saved = std::fs::read(&states).unwrap();
        let saved = SafeTensors::deserialize(&saved).unwrap();
        let mut n_changed = 0;
        for (path, tensor) in &after.tensors {
            assert_eq!(tensor.data, saved.tensor(path).unwrap().data(), "{path}");
            assert_eq!(tensor.ty, before.tensors[path].ty);
            n_changed += usize::from(*tensor != before.tensors[path]);
        }
        assert_eq!(n_changed, n_updated, "{name}");
    }
    // Training goes on from the written file as from the saved states.
    let (out, states) = (folder.file("gpt2.onnx"), folder.file("gpt2.safetensors"));
    let steps = format!(
        "--differentiate --kernels plain --json --steps 1 --batches {}",
        folder.file("gpt2.batches.safetensors")
    );
    let loss = |run: crate::common::Run| run.expect(0).json()[0]["loss"].clone();
    assert_eq!(
        loss(run(&format!("train {out} {steps}"))),
        loss(run(&format!(
            "train {} --init {states} {steps}",
            file("gpt2.onnx")
        )))
    );
}

/// A Python with ONNX Runtime: that of `PYTHON`, of `make venv`, or the system's.
fn python() -> Option<String> {
    let venv = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/bin/python");
    let found = [
        std::env::var("PYTHON").ok(),
        Some(venv.to_str().unwrap().into()),
        Some("python3".into()),
    ];
    let has_all = |python: &String| {
        let import = ["-c", "import numpy, onnxruntime, safetensors"];
        let run = Command::new(python).args(import).output();
        run.is_ok_and(|run| run.status.success())
    };
    found.into_iter().flatten().find(has_all)
}

/// Models of torch, Keras and tf2onnx are trained and written back, and ONNX Runtime gives the
/// written files the losses that Lighterage computes.
#[test]
fn onnx_runtime_gives_written_files_their_losses() {
    let Some(python) = python() else {
        eprintln!("skipped: no Python has onnxruntime and safetensors; `make venv` installs them");
        return;
    };
    let folder = Folder::new("onnx-runtime");
    let cross = "--trainable all --loss cross-entropy";
    for (name, options, train, check) in [
        ("gpt2", "", "", ""),
        ("llama", "", "", ""),
        ("bert", "", "", ""),
        // For ONNX Runtime, a batch is normalised by the stored statistics.
        (
            "resnet",
            "--dim batch=4",
            "--batch-norm train",
            "--batch-norm frozen",
        ),
        ("keras-mlp", "--dim unk__15=8", cross, cross),
        ("keras-cnn", "--dim unk__45=8", cross, cross),
        ("tf2onnx-mlp", "", cross, cross),
        ("tf2onnx-cnn", "", cross, cross),
    ] {
        let all = if name.contains('-') {
            "keras"
        } else {
            "models"
        };
        let all = file(&format!("{all}.safetensors"));
        let batches = batches(&folder, name, all.as_ref());
        let steps = format!("{options} --differentiate --kernels plain --batches {batches}");
        let (original, out) = (
            file(&format!("{name}.onnx")),
            folder.file(&format!("{name}.onnx")),
        );
        let states = folder.file(&format!("{name}.safetensors"));
        run(&format!(
            "train {original} {steps} {train} --optimizer adamw --lr 1e-2 --steps 3 --save {states}"
        ))
        .expect(0);
        run(&format!("export {original} --states {states} -o {out}")).expect(0);
        let step = run(&format!("train {out} {steps} {check} --steps 1 --json")).expect(0);
        let step = folder.write(&format!("{name}.json"), &step.out);
        let checked = Command::new(&python)
            .args([&file("check_out.py"), &out, &batches, &step])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&[checked.stdout, checked.stderr].concat()).into_owned();
        assert!(checked.status.success(), "{name}: {said}");
    }
}

#[test]
fn tensors_without_a_trained_value_stay() {
    let folder = Folder::new("onnx-export-stay");
    // The file's own values change nothing.
    let gpt2 = read(&file("gpt2.onnx"));
    let own: Vec<_> = gpt2
        .trained
        .iter()
        .map(|&state| {
            let path = gpt2.graph.states[state].path.as_str();
            let tensor = &gpt2.tensors[path];
            let shape = tensor.ty.shape().iter().map(|&d| d as usize).collect();
            (path, Dtype::F32, shape, &tensor.data[..])
        })
        .collect();
    let states = folder.write("own.safetensors", safe(&own));
    let out = folder.file("gpt2.onnx");
    run(&format!(
        "export {} --states {states} -o {out}",
        file("gpt2.onnx")
    ))
    .expect(0);
    assert!(std::fs::read(&out).unwrap() == std::fs::read(file("gpt2.onnx")).unwrap());

    let bias = [7; 40];
    let states = safe(&[("fc.bias", Dtype::F32, vec![10], &bias)]);
    let states = folder.write("bias.safetensors", states);
    let out = folder.file("resnet.onnx");
    run(&format!(
        "export {} --states {states} -o {out}",
        file("resnet.onnx")
    ))
    .expect(0);
    let mut wanted: BTreeMap<_, _> = read(&file("resnet.onnx")).tensors;
    wanted.get_mut("fc.bias").unwrap().data = bias.to_vec();
    assert_eq!(read(&out).tensors, wanted);
}

#[test]
fn values_that_do_not_belong_to_the_file_are_refused() {
    let folder = Folder::new("onnx-export-refused");
    let resnet = file("resnet.onnx");
    let zeros = [0; 40];
    let of = |name: &str, dtype, shape: Vec<usize>| safe(&[(name, dtype, shape, &zeros)]);
    let out = folder.file("out.onnx");
    for (tensors, why) in [
        (
            of("fc.bias", Dtype::F32, vec![2, 5]),
            "fc.bias is f32[2,5], it should be f32[10]",
        ),
        (
            of("fc.bias", Dtype::I32, vec![10]),
            "fc.bias is i32[10], it should be f32[10]",
        ),
        (
            of("fc.bios", Dtype::F32, vec![10]),
            "no initializer fc.bios",
        ),
        (
            of("exp_avg.h.weight", Dtype::F32, vec![10]),
            "no initializer exp_avg.h.weight",
        ),
        (
            of("exp_avg.fc.bias", Dtype::F32, vec![10]),
            "has no value of an initializer",
        ),
        (b"text".to_vec(), "not a whole safetensors file"),
    ] {
        let states = folder.write("states.safetensors", tensors);
        run(&format!("export {resnet} --states {states} -o {out}"))
            .expect(2)
            .says(&[why]);
        assert!(left(&folder).is_empty());
    }
    let states = folder.write("states.safetensors", of("fc.bias", Dtype::F32, vec![10]));
    for (model, why) in [
        (folder.file("missing.onnx"), "No such file"),
        (model("gpt2-tiny/joint_coarse.pt2"), "not an .onnx file"),
        (folder.write("text.onnx", "text"), "is no ONNX file"),
    ] {
        run(&format!("export {model} --states {states} -o {out}"))
            .expect(2)
            .says(&[why]);
    }
    run(&format!(
        "export {resnet} --states missing.safetensors -o {out}"
    ))
    .expect(2);
    assert!(left(&folder).is_empty());

    // What is read is not replaced, neither the model nor its data.
    run(&format!("export {resnet} --states {states} -o {out}")).expect(0);
    let replaced = "would replace";
    run(&format!("export {out} --states {states} -o {out}"))
        .expect(2)
        .says(&[replaced]);
    run(&format!("export {out} --states {states} -o {states}"))
        .expect(2)
        .says(&[replaced]);
    let moved = folder.file("moved.onnx");
    std::fs::rename(&out, &moved).unwrap();
    run(&format!("export {moved} --states {states} -o {out}"))
        .expect(2)
        .says(&[replaced, "out.onnx.data"]);
    assert_eq!(left(&folder), ["out.onnx.data"]);
}

/// What a run learned of statistics is what a frozen batch norm has with its values, although all
/// statistics of the file are 0 or 1.
#[test]
fn a_frozen_batch_norm_has_the_statistics_that_are_given() {
    let folder = Folder::new("onnx-statistics");
    let batches = batches(&folder, "resnet", file("models.safetensors").as_ref());
    let states = folder.file("states.safetensors");
    let loss = |options: &str| {
        let args = format!(
            "train {} --dim batch=4 --differentiate --kernels plain --batches {batches} --eval \
             {batches} --json {options}",
            file("resnet.onnx")
        );
        let lines = run(&args).expect(0).json();
        let mut losses = lines.iter().filter_map(|line| line["eval_loss"].as_f64());
        losses.next().unwrap()
    };
    let learned = loss(&format!(
        "--batch-norm train --optimizer adamw --lr 1e-2 --steps 3 --save {states}"
    ));
    let given = loss(&format!("--batch-norm frozen --init {states} --steps 0"));
    assert_eq!(learned, given);
}
