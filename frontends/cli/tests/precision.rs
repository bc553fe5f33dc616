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
/// it doubles after two updates in a row. Losses have the same bits at a smaller budget.
#[test]
fn fp16_trains_and_scales_its_loss() {
    let scaled = "--steps 24 --precision fp16 --loss-scale \
                  init=1e9,growth=2,backoff=0.5,interval=2";
    let half = steps(scaled);
    let [losses, scales, overflows] =
        ["loss", "loss_scale", "found_inf"].map(|name| numbers(&half, name));
    let (mut scale, mut updates) = (1e9, 0);
    for k in 0..24 {
        assert_eq!(scales[k], scale, "step {k}: {scales:?} {overflows:?}");
        if overflows[k] == 1.0 {
            (scale, updates) = (scale / 2.0, 0);
        } else if updates == 1 {
            (scale, updates) = (scale * 2.0, 0);
        } else {
            updates += 1;
        }
    }
    // There are four batches. Before the first update each has its first loss again.
    let first = overflows.iter().position(|&found| found == 0.0).unwrap();
    assert!((5..20).contains(&first), "{overflows:?}");
    assert_eq!(losses[4..=first], losses[..=first - 4]);
    let exact = numbers(&steps("--steps 1"), "loss");
    assert!((losses[0] - exact[0]).abs() < 2e-3, "{losses:?} {exact:?}");
    assert!(losses[23] < losses[3] - 0.5, "{losses:?}");

    let small = steps(&format!("{scaled} --budget 60%"));
    assert_eq!(numbers(&small, "loss"), losses);
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
    // A step with masters has other updates.
    run(&format!(
        "plan {gpt2} --optimizer adamw --master split --precision bf16 --planner keep --kernels \
         plain --profile {file}"
    ))
    .expect(0)
    .says(&["ops guessed"]);
    let masters = folder.file("masters.prof");
    run(&format!(
        "profile {gpt2} --precision bf16 --master split -o {masters} --repeat 1 --kernels plain"
    ))
    .expect(0);
    let plan_with_masters = run(&format!(
        "plan {gpt2} --optimizer adamw --master split --precision bf16 --planner keep --kernels \
         plain --profile {masters}"
    ));
    assert!(!plan_with_masters.expect(0).err.contains("guessed"));
    let plan = |precision: &str| {
        run(&format!(
            "plan {gpt2} --precision {precision} --planner keep --kernels plain --profile {file}"
        ))
        .expect(0)
    };
    assert!(!plan("bf16").err.contains("guessed"));
    plan("f32").says(&["ops guessed"]);
}

/// With masters, parameters of an f32 model are stored in bf16. Files of either kind of step start
/// the other: a master keeps the f32 bit by bit.
#[test]
fn parameters_in_halves_have_the_losses_of_f32() {
    let folder = Folder::new("halves");
    let masters = ["", "--master split", "--master full"];
    let files = ["whole", "split", "full"].map(|name| folder.file(&format!("{name}.safetensors")));
    let first = |master: &str, file: &String| {
        let run = steps(&format!(
            "--precision bf16 --steps 1 {master} --save {file}"
        ));
        numbers(&run, "loss")
    };
    let wanted = first(masters[0], &files[0]);
    assert_eq!(first(masters[1], &files[1]), wanted);
    assert_eq!(first(masters[2], &files[2]), wanted);
    let bytes = |file: &String| std::fs::metadata(file).unwrap().len();
    assert!(
        bytes(&files[1]).abs_diff(bytes(&files[0])) < 10_000,
        "12 bytes for each parameter"
    );
    assert!(bytes(&files[0]) < bytes(&files[2]), "14 bytes");

    let after = |master: &str, file: &String| {
        let options = format!("--precision bf16 --steps 1 {master} --init {file} --start-step 1");
        numbers(&steps(&options), "loss")
    };
    let wanted = after("", &files[0]);
    for (master, file) in [
        (1, 0),
        (2, 0),
        (0, 1),
        (1, 1),
        (2, 1),
        (0, 2),
        (1, 2),
        (2, 2),
    ] {
        let found = after(masters[master], &files[file]);
        assert_eq!(found, wanted, "{:?} from {}", masters[master], files[file]);
    }
    // Weights as they are published: in bf16, without masters.
    let bytes = std::fs::read(&files[2]).unwrap();
    let all = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let weights = all.iter().filter(|(name, _)| name.starts_with("model."));
    let weights = folder.write(
        "bf16.safetensors",
        safetensors::serialize(weights, None).unwrap(),
    );
    let [whole, split, full] = masters.map(|master| {
        let options = format!("--precision bf16 --steps 1 {master} --init {weights}");
        numbers(&steps(&options), "loss")
    });
    assert_eq!((&split, &full), (&whole, &whole));
    run(&format!(
        "plan {} --precision fp16 --optimizer adamw --master split",
        mlp()
    ))
    .expect(2)
    .says(&["--master split", "bf16"]);
}
