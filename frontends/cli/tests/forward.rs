//! Forwards of `torch.export`: `--differentiate` and its options.

use crate::common::{Folder, floats, model, run, view};
use safetensors::Dtype;

/// Files of `tests/data/forward`.
fn forward(file: &str) -> String {
    model(&format!("../forward/{file}"))
}

const NEXT_WORD: &str = "--differentiate --loss cross-entropy --shift";

fn losses(text: &str) -> Vec<f64> {
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let losses = lines.map(|line: serde_json::Value| line["loss"].as_f64());
    losses.flatten().collect()
}

#[test]
fn a_forward_is_imported_with_its_backward() {
    let file = forward("lm.pt2");
    let plain = run(&format!("import {file}")).expect(0).out;
    assert!(!plain.contains("  bwd "), "{plain}");
    assert!(
        plain.contains("fwd qkv "),
        "modules are the file's: {plain}"
    );
    let whole = run(&format!("import {file} {NEXT_WORD} --labels words"))
        .expect(0)
        .out;
    for words in [
        "  bwd up ",
        "input  %words : i64[3,8]",
        "output loss = ",
        "embedding_bwd",
        "padding=0",
        "gradient \"up.weight\" = ",
    ] {
        assert!(whole.contains(words), "{words}: {whole}");
    }
    assert!(
        !whole.contains("gradient \"out.bias\""),
        "it is frozen: {whole}"
    );
    assert_eq!(whole.matches("  output ").count(), 1);
}

/// The same losses from the file, from a compiled step, and from the text with its backward.
#[test]
fn it_trains_from_each_form() {
    let folder = Folder::new("forward");
    let (file, batches) = (forward("lm.pt2"), forward("lm.safetensors"));
    let (lit, ir, weights) = (
        folder.file("s.lit"),
        folder.file("s.ir"),
        folder.file("w.st"),
    );
    let train = format!("--batches {batches} --steps 4 --json");
    let adamw = "--optimizer adamw --kernels plain";
    let run_train = |model: &str, rest: &str| {
        let out = run(&format!("train {model} {train} {rest}")).expect(0).out;
        losses(&out)
    };
    let expected = run_train(&file, &format!("{NEXT_WORD} {adamw}"));
    assert_eq!(expected.len(), 4);
    for (found, eager) in expected.iter().zip(floats(&batches, "losses")) {
        assert!((found - f64::from(eager)).abs() < 1e-4, "{expected:?}");
    }

    run(&format!("compile {file} {NEXT_WORD} {adamw} -o {lit}")).expect(0);
    assert_eq!(run_train(&lit, ""), expected);
    run(&format!("train {lit} {train} --differentiate"))
        .expect(2)
        .says(&["--differentiate", "compiled already"]);

    // A rate of 0 leaves the weights as they are, to start from them.
    let still = format!("{NEXT_WORD} --optimizer sgd --lr 0 --kernels plain --save {weights}");
    run_train(&file, &still);
    run(&format!("import {file} {NEXT_WORD} -o {ir}")).expect(0);
    assert_eq!(
        run_train(&ir, &format!("{adamw} --init {weights}")),
        expected
    );
}

#[test]
fn plans_and_explanations_know_the_backward() {
    let file = forward("cnn.pt2");
    let options = "--differentiate --optimizer adamw --kernels plain --device cpu";
    let plan = run(&format!("plan {file} {options} --budget 70% --json")).expect(0);
    assert!(plan.json()[0]["keep_peak_bytes"].as_u64() > Some(0));
    let dump = format!("plan {file} {options} --dump-ir-after autodiff");
    let dump = run(&dump).expect(0).out;
    assert!(
        dump.contains("bwd second ") && dump.contains("convolution_bwd"),
        "{dump}"
    );
    let explained = run(&format!("explain {file} %relu_ {options}"))
        .expect(0)
        .out;
    assert!(
        explained.contains("relu_.bwd max_pool2d.bwd"),
        "{explained}"
    );
}

#[test]
fn a_text_graph_may_be_a_forward() {
    let folder = Folder::new("forward-text");
    let text = "graph g {\n  input %x : f32[4,3]\n  state param %w -> %w : f32[3,2] \"w\"\n  \
                fwd m %y = matmul %x, %w ta=false tb=false : f32[4,2]\n  output y = %y\n}\n";
    let file = folder.write("g.ir", text);
    let out = run(&format!("import {file} --differentiate --loss mse"))
        .expect(0)
        .out;
    assert!(out.contains("input  %labels : f32[4,2]"), "{out}");
    assert!(out.contains("gradient \"w\" = "), "{out}");
}

/// The loss is the sum of y times the detached mean of y, so the gradient of the layer's bias is
/// the number of rows times the mean.
#[test]
fn no_gradient_passes_what_is_detached() {
    let detached = forward("detached.pt2");
    let import = run(&format!("import {detached} --differentiate")).expect(0);
    let lines = || import.out.lines().map(str::trim);
    let forward = lines().filter(|line| line.starts_with("fwd"));
    assert!(forward.clone().any(|line| line.contains("mean")));
    let backward: Vec<&str> = lines().filter(|line| line.starts_with("bwd")).collect();
    assert!(!backward.is_empty());
    assert!(
        !import.out.contains("detach ") && !backward.iter().any(|line| line.contains("%mean.bwd")),
        "{}",
        import.out
    );

    let folder = Folder::new("detached");
    let x: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let batch = [("batch.0.x", view(Dtype::F32, vec![3, 2], &x))];
    let data = folder.write(
        "x.safetensors",
        safetensors::serialize(batch, None).unwrap(),
    );
    let [before, after] = ["before", "after"].map(|name| folder.file(name));
    let train = |start: &str, steps: u32, save: &str| {
        let how = "--differentiate --optimizer sgd --lr 1 --kernels plain --json";
        run(&format!(
            "train {detached} {how} --init {start} --batches {data} --steps {steps} --save {save}"
        ))
        .expect(0)
        .json()
    };
    train("normal:0.5", 0, &before);
    let loss = train(&before, 1, &after)[0]["loss"].as_f64().unwrap();
    let bias = |file: &str| floats(file, "layer.bias");
    for (old, new) in bias(&before).iter().zip(bias(&after)) {
        // The loss is six times the mean, squared.
        let gradient = 3.0 * (loss / 6.0).sqrt();
        let moved = f64::from(old - new).abs();
        assert!(
            (moved - gradient).abs() <= 1e-5 * gradient,
            "{moved} {gradient}"
        );
    }
}

#[test]
fn what_does_not_fit_is_refused_in_one_line() {
    let (lm, cnn) = (forward("lm.pt2"), forward("cnn.pt2"));
    let joint = model("gpt2-tiny/joint_core.pt2");
    for (args, words) in [
        (
            format!("import {lm} --differentiate"),
            "name a loss with --loss",
        ),
        (
            format!("import {cnn} --differentiate --logits x"),
            "has no output x; its outputs are",
        ),
        (
            format!("import {cnn} --differentiate --loss mse --shift"),
            "--shift is for",
        ),
        (
            format!("import {lm} --differentiate --loss mse --labels ids"),
            "the model has %ids already",
        ),
        (
            format!("import {joint} --differentiate"),
            "has a backward already",
        ),
        (
            format!("plan {lm} --optimizer adamw"),
            "--differentiate adds the backward",
        ),
    ] {
        let run = run(&args).expect(2);
        assert!(run.err.contains(words), "{args}: {}", run.err);
        assert_eq!(run.err.trim_end().lines().count(), 1, "{args}: {}", run.err);
    }
    run(&format!("import {lm} --loss mse"))
        .expect(2)
        .says(&["--differentiate"]);
}
