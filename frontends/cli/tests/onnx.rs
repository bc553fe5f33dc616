//! `.onnx` files on the command line.

use crate::common::{Folder, model, run};
use std::path::Path;

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
        .says(&["1 of the model's weights are constants", "optimize=False"]);
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
