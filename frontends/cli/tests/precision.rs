//! Precisions on the command line.

use crate::common::{Folder, mlp, model, run};
use serde_json::Value;

/// Steps of a small GPT-2, without the line of the summary.
fn steps(rest: &str) -> Vec<Value> {
    let (gpt2, batches) = (
        model("gpt2-tiny/joint_core.pt2"),
        model("gpt2-tiny/ref.safetensors"),
    );
    let arguments = format!("train {gpt2} --optimizer adamw --batches {batches} --json {rest}");
    let lines = run(&arguments).expect(0).json();
    lines
        .into_iter()
        .filter(|line| line.get("step").is_some())
        .collect()
}

fn numbers(steps: &[Value], name: &str) -> Vec<f64> {
    let number = |step: &Value| step[name].as_f64();
    let all: Option<Vec<f64>> = steps.iter().map(number).collect();
    all.unwrap_or_else(|| panic!("{name} should be a number in {steps:?}"))
}

/// A scale that is far too large halves until gradients are finite, and such steps update nothing;
/// then it doubles after two updates. Losses are those of f32 within the precision of float16, and
/// have the same bits at a smaller budget.
#[test]
fn fp16_trains_and_scales_its_loss() {
    let scaled =
        "--precision fp16 --loss-scale init=1e9,growth=2,backoff=0.5,interval=2 --steps 24";
    let half = steps(scaled);
    let (scales, overflows) = (numbers(&half, "loss_scale"), numbers(&half, "found_inf"));
    let first = overflows.iter().position(|&found| found == 0.0).unwrap();
    assert!(0 < first && first < 20, "{overflows:?}");
    for (k, pair) in scales.windows(2).enumerate() {
        if overflows[k + 1] == 1.0 {
            assert!(pair[1] <= pair[0], "{k}: {scales:?} {overflows:?}");
        }
    }
    assert!(scales.iter().any(|&scale| scale < 1e9), "{scales:?}");
    let losses = numbers(&half, "loss");
    let exact = numbers(&steps("--steps 24"), "loss");
    // Batches go round every four steps. A step without an update has the loss of the start.
    let (late, expected) = (losses[23], exact[23 - first / 4 * 4]);
    assert!(
        (losses[0] - exact[0]).abs() < 2e-3 && losses[23] < losses[3] - 0.01,
        "{late} {expected}: {losses:?}"
    );
    assert_eq!(
        numbers(&steps(&format!("{scaled} --budget 60%")), "loss"),
        losses
    );
    run(&format!("train {} --loss-scale init=1", mlp()))
        .expect(2)
        .says(&["--precision"]);
}

/// A profile in bf16 has the times of a plan in bf16, and of no other.
#[test]
fn a_profile_has_a_precision() {
    let folder = Folder::new("profile-precision");
    let (file, gpt2) = (folder.file("bf16.prof"), model("gpt2-tiny/joint_core.pt2"));
    run(&format!(
        "profile {gpt2} --precision bf16 -o {file} --repeat 1 --kernels plain"
    ))
    .expect(0);
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains("bf16["), "{text:.400}");
    let plan = |precision: &str| {
        run(&format!(
            "plan {gpt2} --precision {precision} --planner keep --kernels plain --profile {file}"
        ))
        .expect(0)
    };
    assert!(!plan("bf16").err.contains("guessed"));
    plan("f32").says(&["ops guessed"]);
}
