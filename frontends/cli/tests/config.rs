//! A model from its `config.json` alone.

use crate::common::{Folder, floats, model, run, view};
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use std::path::Path;

fn folder(family: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/data/config")
        .join(family);
    path.to_str().unwrap().to_string()
}

/// The batches of `frontends/python/tests/configurations.py`.
const DIMS: &str = "--dim batch=2 --dim sequence=12";

/// With the weights that transformers saved, each family has the losses of PyTorch.
#[test]
fn families_train_to_the_losses_of_transformers() {
    for family in config::families() {
        trains_to_the_losses_of(family, "reference", "--steps 4");
    }
}

/// Documents in a row have the losses that they have alone.
#[test]
fn documents_of_families_do_not_see_each_other() {
    // The rotary frequencies of Phi 3's fixture depend on the longest document.
    for family in config::families()
        .into_iter()
        .filter(|&family| family != "phi3")
    {
        trains_to_the_losses_of(family, "packed", "--steps 2 --packed");
    }
}

/// With dropout they are PyTorch's, when it drops the same elements.
#[test]
fn families_drop_what_transformers_drops() {
    for family in config::families() {
        let (file, losses) = ("dropout.json", "dropout");
        has_losses(family, file, losses, "--steps 4 --dropout", 1e-5);
    }
}

/// Attention draws what it drops again where it is recomputed, and where its backward runs.
#[test]
fn what_attention_drops_is_the_same_at_every_budget() {
    let at = folder("gpt2");
    let losses = |options: &str| -> Vec<f64> {
        let ran = run(&format!(
            "train {at}/dropout.json {DIMS} --optimizer adamw --kernels plain --steps 4 --dropout \
             --init {at}/model.safetensors --batches {at}/dropout.safetensors --json {options}"
        ))
        .expect(0);
        let lines = ran.json().into_iter();
        lines.filter_map(|line| line["loss"].as_f64()).collect()
    };
    for precision in ["", "--precision bf16", "--micro-batches 2"] {
        let [whole, less] = ["100%", "60%"].map(|b| losses(&format!("{precision} --budget {b}")));
        assert_eq!(whole.len(), 4);
        assert_eq!(whole, less, "{precision}");
    }
}

fn trains_to_the_losses_of(family: &str, batches: &str, options: &str) {
    has_losses(family, "config.json", batches, options, 4e-6);
}

/// The losses of a family's file `config` on `batches` are theirs, within an error.
fn has_losses(family: &str, config: &str, batches: &str, options: &str, most: f64) {
    let at = folder(family);
    let metrics = Folder::new(&format!("config-{family}-{batches}"));
    let out = metrics.file("run.jsonl");
    run(&format!(
        "train {at}/{config} {DIMS} --optimizer adamw --lr 1e-2 --weight-decay 0.01 \
         --kernels plain --planner keep --init {at}/model.safetensors \
         --batches {at}/{batches}.safetensors {options} --metrics {out}"
    ))
    .expect(0);
    let wanted = floats(&format!("{at}/{batches}.safetensors"), "losses");
    let lines = std::fs::read_to_string(&out).unwrap();
    let found = lines
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .filter_map(|line| line["loss"].as_f64());
    let found: Vec<f64> = found.collect();
    assert_eq!(found.len(), wanted.len(), "{family}: {lines}");
    for (found, wanted) in found.iter().zip(wanted) {
        let error = (found - f64::from(wanted)).abs();
        assert!(error < most, "{family}: {found}, wanted {wanted}");
    }
}

/// Adapters that PEFT made have its losses, and are read back as it reads them.
#[test]
fn adapters_train_to_the_losses_of_peft() {
    for family in ["llama", "gpt2"] {
        let at = folder(family);
        let out = Folder::new(&format!("config-adapters-{family}"));
        let (metrics, saved) = (out.file("run.jsonl"), out.file("adapters"));
        let adapters = format!("{at}/adapters");
        let train = format!(
            "train {at}/config.json {DIMS} --optimizer adamw --lr 1e-2 --weight-decay 0.01 \
             --kernels plain --init {at}/model.safetensors \
             --batches {adapters}/reference.safetensors"
        );
        run(&format!(
            "{train} --steps 4 --add-lora {adapters} --adapters {adapters} --metrics {metrics} \
             --save-adapters {saved}"
        ))
        .expect(0);
        let lines = std::fs::read_to_string(&metrics).unwrap();
        let found: Vec<f64> = lines
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
            .filter_map(|line| line["loss"].as_f64())
            .collect();
        let wanted = floats(&format!("{adapters}/reference.safetensors"), "losses");
        assert_eq!(found.len(), wanted.len(), "{family}: {lines}");
        for (found, wanted) in found.iter().zip(&wanted) {
            let error = (found - f64::from(*wanted)).abs();
            assert!(error < 4e-6, "{family}: {found}, wanted {wanted}");
        }
        // What was saved is what was asked for, and goes on.
        let again = run(&format!(
            "{train} --steps 1 --add-lora {saved} --adapters {saved} --json"
        ));
        let after = again.expect(0).json().remove(0)["loss"].as_f64().unwrap();
        let others = "--add-lora r=2 --steps 1";
        run(&format!("{train} {others} --save-adapters {saved}"))
            .expect(2)
            .says(&["other adapters than --add-lora adds"]);
        assert!(after < found[0], "{family}: {after} after {found:?}");
    }
}

/// New adapters change nothing at first, and the base may be in 4 bits.
#[test]
fn new_adapters_begin_with_what_the_model_computes() {
    let at = folder("llama");
    let train = format!(
        "train {at}/config.json {DIMS} --optimizer adamw --kernels plain --steps 4 \
         --batches {at}/reference.safetensors --json"
    );
    let file = format!("--init {at}/model.safetensors");
    let losses = |options: &str| -> Vec<f64> {
        let ran = run(&format!("{train} {options}")).expect(0);
        let lines = ran.json().into_iter();
        lines.filter_map(|line| line["loss"].as_f64()).collect()
    };
    let first = f64::from(floats(&format!("{at}/reference.safetensors"), "losses")[0]);
    let whole = losses(&format!("{file} --lr 1e-2 --add-lora r=8,alpha=16"));
    assert!((whole[0] - first).abs() < 4e-6, "{whole:?}, wanted {first}");
    let [still, learns] = ["0", "1e-2"].map(|rate| {
        losses(&format!(
            "{file} --lr {rate} --add-lora r=8,alpha=16 --base nf4"
        ))
    });
    assert!((still[0] - first).abs() < 0.2, "{still:?}, wanted {first}");
    assert_eq!(still[0], learns[0]);
    assert_ne!(still[1], learns[1], "the adapters learn nothing");
    // A matrix of codes that nothing describes.
    let out = Folder::new("config-codes");
    let codes = |path: &str| {
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let name = "model.layers.0.self_attn.q_proj.weight";
        let tensors = file
            .tensors()
            .into_iter()
            .map(|(path, tensor)| match path == name {
                true => (path, view(Dtype::U8, vec![2304, 1], tensor.data())),
                false => (path, tensor),
            });
        safetensors::serialize(tensors, None).unwrap()
    };
    let codes = out.write(
        "codes.safetensors",
        codes(&format!("{at}/model.safetensors")),
    );
    run(&format!("{train} --init {codes} --add-lora r=8 --base nf4"))
        .expect(2)
        .says(&["q_proj.weight is u8[2304,1], and should be floating-point numbers"]);
    // Frozen weights that are drawn would be of no use.
    run(&format!("{train} --init normal:0.1 --add-lora r=8"))
        .expect(2)
        .says(&["frozen parameters and buffers need --init FILE"]);
}

#[test]
fn adapters_that_cannot_be_added_are_named() {
    let config = format!("{}/config.json", folder("llama"));
    let out = Folder::new("config-no-adapters");
    let dora = out.write(
        "adapter_config.json",
        r#"{"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "use_dora": true}"#,
    );
    let traced = model("llama-tiny/joint_coarse.pt2");
    for (plan, words) in [
        (
            format!("{config} {DIMS} --add-lora r=0"),
            "rank is 1 or more",
        ),
        (
            format!("{config} {DIMS} --add-lora rank=4"),
            "r=16,alpha=32",
        ),
        (format!("{config} {DIMS} --add-lora r=99"), "rank 99 of"),
        (
            format!("{config} {DIMS} --add-lora targets=query"),
            "\"query\" is no module with a matrix of its own; there are down_proj, gate_proj",
        ),
        (
            format!("{config} {DIMS} --add-lora {dora}"),
            "use_dora: true",
        ),
        (
            format!("{traced} --add-lora r=4"),
            "the model has a backward",
        ),
    ] {
        run(&format!("plan {plan} --optimizer adamw"))
            .expect(2)
            .says(&[words]);
    }
}

#[test]
fn a_configuration_is_planned_without_further_options() {
    let llama = format!("{}/config.json", folder("llama"));
    let plan = run(&format!("plan {llama} {DIMS} --optimizer adamw --json")).expect(0);
    assert!(plan.json()[0]["planned_peak_bytes"].as_u64().unwrap() > 0);
    run(&format!("plan {llama} --optimizer adamw"))
        .expect(2)
        .says(&["config.json", "--dim sequence="]);
    let import = run(&format!("import {llama} {DIMS}")).expect(0);
    let graph = ir::text::parse_graph(&import.out).unwrap();
    assert!(!graph.gradients.is_empty());
}

/// A published file has a tensor for each expert; one without the third has two behind each other.
#[test]
fn a_file_that_lacks_an_expert_is_refused() {
    let at = folder("mixtral");
    let apart = Folder::new("config-experts");
    let file = apart.file("model.safetensors");
    let mut bytes = std::fs::read(format!("{at}/model.safetensors")).unwrap();
    let name = b"layers.1.block_sparse_moe.experts.2.w1.weight";
    let place = bytes.windows(name.len()).position(|part| part == name);
    bytes[place.unwrap() + "layers.1.block_sparse_moe.experts.".len()] = b'9';
    std::fs::write(&file, bytes).unwrap();
    run(&format!(
        "train {at}/config.json {DIMS} --optimizer adamw --kernels plain --steps 1 --init {file} \
         --batches {at}/reference.safetensors"
    ))
    .expect(2)
    .says(&["model.layers.1.mlp.experts.gate_up_proj is f32[2,24,16], it should be f32[4,24,16]"]);
}

/// The estimate from a graph is the plan; and a configuration needs what the traced model needs.
#[test]
fn an_estimate_is_the_plan_that_keeps_everything() {
    let folder = Folder::new("config-estimate");
    let llama = folder.write(
        "config.json",
        r#"{"model_type": "llama", "hidden_size": 32, "intermediate_size": 80,
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
            "vocab_size": 129, "tie_word_embeddings": false}"#,
    );
    let written = format!("{llama} --dim batch=2 --dim sequence=32");
    let traced = model("llama-tiny/joint_coarse.pt2");
    let peak = |model: &str, precision: &str| {
        let estimate = run(&format!("estimate {model} --precision {precision} --json")).expect(0);
        let object = estimate.json().remove(0);
        assert_eq!(object["parameters"], 29920);
        object["peak"]["bytes"].as_u64().unwrap()
    };
    for (precision, planned) in [("f32", "f32"), ("mixed", "bf16")] {
        let plan = run(&format!(
            "plan {traced} --optimizer adamw --planner keep --device h100 --precision {planned} \
             --json"
        ))
        .expect(0);
        let planned = plan.json()[0]["planned_peak_bytes"].as_u64().unwrap();
        let (a, b) = (peak(&traced, precision), peak(&written, precision));
        assert_eq!(a, planned, "{precision}");
        assert!(
            a.abs_diff(b) * 100 <= a,
            "{precision}: traced {a}, written {b}"
        );
    }
    run(&format!("estimate {traced} --recompute full"))
        .expect(2)
        .says(&["--recompute full", "--budget"]);
    let text = run(&format!("estimate {traced}")).expect(0).out;
    for words in ["moment", "activation", "h100", "to spare"] {
        assert!(text.contains(words), "{words:?} should be in:\n{text}");
    }
}
