//! Estimating from the command line.

use crate::common::{Folder, model, run};
use serde_json::Value;

fn object(args: &str) -> Value {
    run(&format!("estimate {args} --json"))
        .expect(0)
        .json()
        .remove(0)
}

#[test]
fn seven_billion_parameters_take_112_gigabytes() {
    let object = object("--params 7B");
    assert_eq!(object["parameter_bytes"], 14_000_000_000u64);
    assert_eq!(object["optimizer_bytes"], 84_000_000_000u64);
    assert_eq!(object["gradient_bytes"], 14_000_000_000u64);
    assert_eq!(object["total_bytes"], 112_000_000_000u64);
    assert_eq!(object["checkpoint_bytes"], 84_000_000_000u64);
    assert_eq!(object["activation_bytes"], Value::Null);
    let fits = |name: &str| {
        let devices = object["devices"].as_array().unwrap();
        devices
            .iter()
            .find(|d| d["device"] == name)
            .unwrap_or_else(|| panic!("{name}"))["fits"]
            .as_bool()
    };
    // Without a shape the activations are not known: only that the states are too large is.
    assert_eq!(fits("h200"), None);
    assert_eq!(
        (fits("a100-80g"), fits("rtx3090")),
        (Some(false), Some(false))
    );
    let text = run("estimate --params 7B").expect(0).out;
    for words in [
        "14.0 GB",
        "84.0 GB",
        "112.0 GB",
        "does not fit",
        "left for activations",
    ] {
        assert!(text.contains(words), "{words:?} should be in:\n{text}");
    }
}

#[test]
fn seventy_billion_on_64_devices_take_21_9_gigabytes() {
    let parallel = "--tensor-parallel 8 --pipeline 4 --data-parallel 2 --zero 1";
    let object = object(&format!("--params 70B {parallel} --device a100-80g h100"));
    assert_eq!(object["gpus"], 64);
    assert_eq!(object["total_bytes"], 21_875_000_000u64);
    assert_eq!(object["devices"].as_array().unwrap().len(), 2);
    let text = run(&format!("estimate --params 70B {parallel}"))
        .expect(0)
        .out;
    for words in [
        "4.4 GB",
        "13.1 GB",
        "21.9 GB",
        "each of 64 devices",
        "42.9%",
    ] {
        assert!(text.contains(words), "{words:?} should be in:\n{text}");
    }
    for words in ["layers a stage", "to spare"] {
        assert!(!text.contains(words), "{words:?} should not be in:\n{text}");
    }
}

#[test]
fn a_shape_tells_activations_and_parameters() {
    let shape = "--layers 12 --width 768 --heads 12 --seq 1024 --batch 8 --vocab 50257";
    let of = |recompute: &str| object(&format!("{shape} --recompute {recompute}"));
    let none = of("none");
    assert_eq!(none["parameters"], 124_439_808);
    let (sbdl, logits) = (1024 * 8 * 768 * 12u64, 6 * 1024 * 8 * 50257u64);
    assert_eq!(
        none["activation_bytes"],
        sbdl * (34 + 5 * 12 * 1024 / 768) + logits
    );
    assert_eq!(of("selective")["activation_bytes"], sbdl * 34 + logits);
    assert_eq!(of("full")["activation_bytes"], sbdl * 2 + logits);
    assert_eq!(none["layer"].as_array().unwrap().len(), 15);
    let text = run(&format!("estimate {shape} --recompute full"))
        .expect(0)
        .out;
    assert!(
        text.contains("fits, ") && text.contains("to spare"),
        "{text}"
    );
    assert!(
        text.contains("attention probabilities") && text.contains("computed again"),
        "{text}"
    );
}

/// The example's plan has 112,898,112 bytes: `lighterage plan examples/gpt2/gpt2.pt2 --optimizer
/// adamw --planner keep`.
#[test]
fn the_peak_of_the_example_is_that_of_its_plan() {
    let shape = "--layers 4 --width 256 --heads 4 --seq 128 --batch 8 --vocab 256 --precision f32";
    let form = "--attention flash --no-dropout --update backward";
    let object = object(&format!("{shape} {form}"));
    let peak = object["peak"]["bytes"].as_u64().unwrap();
    assert!(peak.abs_diff(112_898_112) < 1_130_323, "{peak}");
    let terms = object["peak"]["terms"].as_array().unwrap();
    let sum: u64 = terms.iter().map(|t| t["bytes"].as_u64().unwrap()).sum();
    assert_eq!(sum, peak);
    let text = run(&format!("estimate {shape} {form}")).expect(0).out;
    for words in [
        "peak of a step, when",
        "gradient of the head",
        "sums of attention's rows",
    ] {
        assert!(text.contains(words), "{words:?} should be in:\n{text}");
    }
    assert!(!text.contains("attention probabilities"), "{text}");
    // Without a vocabulary the head is not known.
    run("estimate --params 7B --update after")
        .expect(2)
        .says(&["--update", "vocabulary"]);
}

#[test]
fn foreach_needs_two_more_tensors_for_each_parameter() {
    let object = object("--params 7B --foreach");
    assert_eq!(object["temporary_bytes"], 56_000_000_000u64);
    assert_eq!(object["total_bytes"], 168_000_000_000u64);
}

#[test]
fn adapters_and_optimizers_are_counted() {
    assert_eq!(
        object("--params 10B --qlora 2")["total_bytes"],
        8_200_000_000u64
    );
    for (optimizer, bytes) in [
        ("adamw", 12u64),
        ("sgd", 4),
        ("momentum", 8),
        ("adamw8bit", 6),
        ("adafactor", 6),
        ("adafactor-paper", 4),
        ("adafactor-paper-momentum", 8),
    ] {
        let object = object(&format!("--params 1B --optimizer {optimizer}"));
        assert_eq!(
            object["optimizer_bytes"],
            bytes * 1_000_000_000,
            "{optimizer}"
        );
    }
    assert_eq!(
        object("--params 7B --data-parallel 8 --zero 1")["optimizer_bytes"],
        10_500_000_000u64
    );
}

#[test]
fn what_cannot_be_is_refused() {
    run("estimate").expect(2).says(&["--params"]);
    run("estimate --params 7apples").expect(2).says(&["350M"]);
    run("estimate --params 7B --layers 32")
        .expect(2)
        .says(&["--heads"]);
    run("estimate --params 7B --layers 32 --width 0 --heads 8 --seq 128")
        .expect(2)
        .says(&["width"]);
    run("estimate --params 7B --zero 4").expect(2);
    run("estimate --params 7B --pipeline 0")
        .expect(2)
        .says(&["pipeline"]);
    run("estimate --params 7B --lora 200")
        .expect(2)
        .says(&["100%"]);
    run("estimate --params 7B --lora 2 --qlora 2").expect(2);
    run("estimate --params 7B --device abacus")
        .expect(2)
        .says(&["abacus", "h200"]);
    run("estimate --params 9000000000000000000")
        .expect(2)
        .says(&["2^64"]);
    assert!(run("estimate --help").expect(0).out.contains("Example"));
    let folder = Folder::new("estimate");
    let file = folder.write("bad.toml", "name = 1");
    run(&format!("estimate --params 7B --device {file}"))
        .expect(2)
        .says(&["bad.toml"]);
}

/// An estimate of a file is the peak of its plan: to the byte on the machine whose kernels it
/// takes, and within 1 % on a processor, whose kernels need other scratch memory.
#[test]
fn estimates_of_every_fixture_are_those_of_its_plan() {
    for name in [
        "bert-tiny/joint_core.pt2",
        "dropout-tiny/joint_core.pt2",
        "gpt2-tiny/joint_core.pt2",
        "gpt2-tiny/joint_coarse.pt2",
        "llama-tiny/joint_core.pt2",
        "moe-tiny/joint_core.pt2",
        "resnet-tiny/joint_core.pt2",
        "gpt2-dynbatch/joint_coarse.pt2 --dim s72=4",
    ] {
        let model = model(name);
        let estimate = object(&format!("{model} --precision f32"));
        let estimate = estimate["peak"]["bytes"].as_u64().unwrap();
        for (device, most) in [("h100", 0.0), ("cpu", 0.01)] {
            let plan = run(&format!(
                "plan {model} --optimizer adamw --planner keep --device {device} --json"
            ))
            .expect(0);
            let planned = plan.json()[0]["planned_peak_bytes"].as_u64().unwrap();
            assert!(
                estimate.abs_diff(planned) as f64 <= most * planned as f64,
                "{name} on {device}: {estimate} estimated, {planned} planned"
            );
        }
    }
}
