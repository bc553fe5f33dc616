//! Steps that are compiled for a GPU, trained on a library in the driver's place.

use crate::common::{Folder, Run, mlp, run, run_with, tensors};
use standin::{Options, Standin};
use std::collections::BTreeMap;

/// Of the bytes of keeping everything: some of the moments lie on the host.
const BUDGET: &str = "60%";

/// The small graph with narrower layers, as its kernels are interpreted, and batches for it.
struct Files {
    folder: Folder,
    graph: String,
    batches: String,
}

impl Files {
    fn new(name: &str) -> Files {
        let folder = Folder::new(name);
        let wide = std::fs::read_to_string(mlp()).unwrap();
        let narrow = wide.replace("64,64", "16,16").replace("4096", "256");
        let graph = folder.write("mlp.ir", narrow);
        let values = (0..256).map(|i| (i % 7) as f32 / 7.0).collect();
        let batch = BTreeMap::from([("batch.0.x", (vec![16, 16], values))]);
        let batches = folder.write("b.st", tensors(batch));
        Files {
            folder,
            graph,
            batches,
        }
    }

    /// Compiles the graph for a GPU's plan.
    fn compile(&self, name: &str, options: &str) -> String {
        let path = self.folder.file(name);
        run(&format!(
            "compile {} --optimizer adamw --device h100 --budget {BUDGET} {options} -o {path}",
            self.graph
        ))
        .expect(0);
        path
    }

    fn train(&self, lit: &str, rest: &str) -> String {
        let batches = &self.batches;
        format!("train {lit} --batches {batches} --init normal:0.1 --threads 1 --steps 2 {rest}")
    }
}

/// The losses of a run.
fn losses(run: &Run) -> Vec<f64> {
    let lines = run.json();
    let summary = &lines.last().unwrap()["summary"];
    assert_eq!(
        summary["planned_peak_bytes"],
        summary["measured_peak_bytes"]
    );
    lines
        .iter()
        .filter_map(|line| line["loss"].as_f64())
        .collect()
}

#[test]
fn a_step_for_a_gpu_trains_like_that_of_the_processor() {
    let files = Files::new("gpu");
    let [gpu, cpu] =
        [("g.lit", ""), ("c.lit", "--target cpu")].map(|(name, rest)| files.compile(name, rest));
    let standin = Standin::new(&Options::default()).unwrap();
    let driver = ("LIGHTERAGE_CUDA", standin.path().to_str().unwrap());

    let ours = run_with(&files.train(&gpu, "--json"), &[driver]).expect(0);
    // Without a driver: the processor's step needs none.
    let missing = ("LIGHTERAGE_CUDA", "/nowhere/libcuda.so.1");
    let theirs = run_with(&files.train(&cpu, "--json"), &[missing]).expect(0);
    let (ours, theirs) = (losses(&ours), losses(&theirs));
    assert_eq!((ours.len(), theirs.len()), (2, 2));
    for (ours, theirs) in ours.iter().zip(&theirs) {
        let near = 1e-4 * theirs.abs().max(1.0);
        assert!((ours - theirs).abs() < near, "{ours} should be {theirs}");
    }
    assert!(ours[0] != ours[1], "{ours:?}: a step should change it");

    let seeded = [driver, ("STANDIN_SEED", "7")];
    let text = run_with(&files.train(&gpu, ""), &seeded).expect(0).out;
    assert!(text.contains("planned = measured"), "{text}");
}

#[test]
fn a_step_for_a_gpu_says_which() {
    let files = Files::new("gpu-inspect");
    let gpu = files.compile("g.lit", "");
    let text = run(&format!("inspect {gpu}")).expect(0).out;
    for words in ["planned for h100", "yes, for sm_90", "a GPU of sm_90"] {
        assert!(text.contains(words), "{words}:\n{text}");
    }
    let object = &run(&format!("inspect {gpu} --json")).expect(0).json()[0];
    let processors = object["processors"].as_array().unwrap();
    assert!(processors.contains(&"sm_90".into()), "{object}");
    assert_eq!(object["runs"], true);
}

/// What keeps a step from being run is one line, told before anything is written.
#[test]
fn without_its_gpu_a_step_is_refused() {
    let files = Files::new("gpu-missing");
    let gpu = files.compile("g.lit", "");
    let before = files.folder.names();
    let standin = Standin::new(&Options::default()).unwrap();
    let driver = ("LIGHTERAGE_CUDA", standin.path().to_str().unwrap());
    let outputs = ["s.safetensors", "t.json"].map(|name| files.folder.file(name));
    let args = files.train(
        &gpu,
        &format!("--save {} --trace {}", outputs[0], outputs[1]),
    );
    let refused = |variables: &[(&str, &str)], code: i32, words: &[&str]| {
        let run = run_with(&args, variables).expect(code).says(words);
        assert_eq!(run.err.trim_end().lines().count(), 1, "{}", run.err);
        assert_eq!(run.out, "");
        assert_eq!(files.folder.names(), before);
    };
    let missing = ("LIGHTERAGE_CUDA", "/nowhere/libcuda.so.1");
    refused(&[missing], 2, &["/nowhere/libcuda.so.1"]);
    refused(
        &[driver, ("STANDIN_SM", "80")],
        2,
        &["are for sm_90", "is sm_80"],
    );
    refused(
        &[driver, ("STANDIN_BYTES", "1024")],
        1,
        &["device memory", "--budget 1024"],
    );
}
