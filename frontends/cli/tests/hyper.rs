//! Options of the optimizer that change from step to step and from parameter to parameter.

use crate::common::{Folder, floats, model, run};
use serde_json::Value;

const GPT2: &str = "gpt2-tiny/joint_core.pt2";

/// Five steps of SGD with these options.
fn train(rest: &str) -> String {
    let (model, batches) = (model(GPT2), model("gpt2-tiny/ref.safetensors"));
    let steps = if rest.contains("--steps") {
        ""
    } else {
        "--steps 5"
    };
    format!("train {model} --planner keep --batches {batches} {steps} --json {rest}")
}

/// A number of each step.
#[track_caller]
fn of_steps(rest: &str, key: &str) -> Vec<f64> {
    let lines = run(&train(rest)).expect(0).json();
    let steps = lines.iter().filter(|line| line["step"].is_u64());
    let numbers: Vec<f64> = steps.filter_map(|line| line[key].as_f64()).collect();
    assert_eq!(numbers.len(), 5, "{lines:?}");
    numbers
}

#[test]
fn a_rate_follows_its_schedule_and_steps_use_it() {
    let cosine = "--optimizer adamw --lr 0.01 --schedule cosine --warmup 2 --min-lr 0.001";
    let rates = of_steps(cosine, "lr");
    assert_eq!(rates[..3], [0.01 * (1.0 / 3.0), 0.01 * (2.0 / 3.0), 0.01]);
    assert!(
        rates[4] < rates[3] && rates[3] < rates[2] && 0.001 < rates[4],
        "{rates:?}"
    );
    // One step each, with these rates given by hand, would need states between; the first two
    // steps tell enough: the loss of the second one depends on the rate of the first alone.
    let first = of_steps(&format!("--optimizer adamw --lr {}", rates[0]), "loss");
    let scheduled = of_steps(cosine, "loss");
    assert_eq!(scheduled[..2], first[..2]);
    assert_ne!(scheduled[2..], first[2..]);
    // A schedule for more steps than the run has is cut.
    let longer = of_steps(
        "--optimizer sgd --lr 1 --schedule linear --schedule-steps 10",
        "lr",
    );
    assert_eq!(longer, [1.0, 0.9, 0.8, 0.7, 0.6]);
    for (bad, why) in [
        ("--optimizer sgd --warmup 5", "nothing is left after it"),
        (
            "--optimizer sgd --schedule one-cycle --warmup 1",
            "a rise of its own",
        ),
        ("--optimizer sgd --min-lr 0.1", "does not fall"),
        (
            "--optimizer sgd --schedule linear --min-lr -1",
            "a number from 0",
        ),
        ("--schedule linear", "no optimizer with a rate"),
        ("--optimizer sgd --schedule nope", "one-cycle"),
    ] {
        run(&train(bad)).expect(2).says(&[why]);
    }
}

#[test]
fn groups_have_options_of_their_own() {
    let all = of_steps("--optimizer adamw --lr 0.02 --weight-decay 0.5", "loss");
    // Options for all parameters are the same, however they are said.
    let grouped = "--optimizer adamw --group *:lr=0.02,weight-decay=0.5";
    assert_eq!(of_steps(grouped, "loss"), all);
    // The last one wins.
    let later = "--optimizer adamw --weight-decay 0.5 --group *:lr=7 --group *:lr=0.02";
    assert_eq!(of_steps(later, "loss"), all);
    // Weight decay of vectors by a flag, and by patterns.
    let vectors =
        "--optimizer adamw --lr 0.02 --weight-decay 0.5 --group *.bias|*.ln*:weight-decay=0";
    let flag = "--optimizer adamw --lr 0.02 --weight-decay 0.5 --no-decay";
    let undecayed = of_steps(flag, "loss");
    assert_ne!(undecayed, all);
    assert_eq!(of_steps(vectors, "loss"), undecayed);
    // Moments in f32 instead of codes.
    let adamw = of_steps("--optimizer adamw --lr 0.02", "loss");
    let whole = "--optimizer adamw-8bit --lr 0.02 --group *:bits=32";
    assert_eq!(of_steps(whole, "loss"), adamw);
    for (bad, why) in [
        (
            "--optimizer adamw --group nope:lr=1",
            "no trained parameter matches",
        ),
        (
            "--optimizer adamw --group *:momentum=1",
            "adamw has no option momentum",
        ),
        (
            "--optimizer adamw --group *:bits=32",
            "adamw has no option bits",
        ),
        (
            "--optimizer adamw-8bit --group *:bits=16",
            "moments have 8 or 32 bits, not 16",
        ),
        ("--optimizer sgd --group *:lr", "PATTERN:OPTION=VALUE"),
        ("--group *:lr=1", "--optimizer names one"),
        ("--no-decay", "no weight decay"),
        ("--optimizer sgd --freeze *", "no parameter is left"),
    ] {
        run(&train(bad)).expect(2).says(&[why]);
    }
}

#[test]
fn compiled_steps_keep_their_groups() {
    let folder = Folder::new("groups");
    let (lit, batches) = (folder.file("s.lit"), model("gpt2-tiny/ref.safetensors"));
    let options = "--optimizer adamw --no-decay --group *ln*:lr=0.5 --grad-norm";
    run(&format!("compile {} {options} -o {lit}", model(GPT2))).expect(0);
    let args = format!("--batches {batches} --steps 5 --json --weight-decay 0.3");
    let numbers = |lines: &[Value]| -> Vec<(f64, f64)> {
        let steps = lines.iter().filter(|line| line["step"].is_u64());
        let number = |line: &Value, key: &str| line[key].as_f64().unwrap();
        steps
            .map(|line| (number(line, "loss"), number(line, "grad_norm")))
            .collect()
    };
    let compiled = run(&format!("train {lit} {args}")).expect(0).json();
    let model = run(&format!("train {} {options} {args}", model(GPT2)))
        .expect(0)
        .json();
    assert_eq!(numbers(&compiled), numbers(&model));
    let again = run(&format!("train {lit} {args} --no-decay")).expect(2);
    again.says(&["--no-decay", "is compiled already"]);
}

#[test]
fn frozen_parameters_stay_and_have_no_moments() {
    let folder = Folder::new("frozen");
    let (before, after) = (folder.file("a.st"), folder.file("b.st"));
    let adamw = "--optimizer adamw --save";
    run(&train(&format!("{adamw} {before} --steps 0"))).expect(0);
    run(&train(&format!(
        "{adamw} {after} --freeze *.c_*.weight|*wte*"
    )))
    .expect(0);
    let (start, end) = (
        std::fs::read(&before).unwrap(),
        std::fs::read(&after).unwrap(),
    );
    let (start, end) = (header(&start), header(&end));
    let mut n_frozen = 0;
    for path in start.keys().filter(|path| !path.contains("exp_avg")) {
        let is_frozen = path.contains("wte") || (path.contains(".c_") && path.ends_with("weight"));
        let is_trained = path.contains("weight") || path.contains("bias");
        let moment = format!("exp_avg.{path}");
        if is_frozen && start.contains_key(&moment) {
            n_frozen += 1;
            assert_eq!(floats(&before, path), floats(&after, path), "{path}");
            assert!(!end.contains_key(&moment), "{moment}");
        } else if is_trained && start.contains_key(&moment) {
            assert_ne!(floats(&before, path), floats(&after, path), "{path}");
            assert!(end.contains_key(&moment), "{moment}");
        }
    }
    assert!(4 < n_frozen, "{:?}", start.keys());
}

/// The tensors of a safetensors file.
fn header(file: &[u8]) -> serde_json::Map<String, Value> {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
    header.as_object().unwrap().clone()
}
