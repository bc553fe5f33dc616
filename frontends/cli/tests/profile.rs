//! `lighterage profile`, and what the other commands make of its file.

mod common;

use common::{Folder, mlp, run};

#[test]
fn a_profile_is_planned_with() {
    let folder = Folder::new("profile");
    let file = folder.file("cpu.prof");
    let object = &run(&format!("profile {} -o {file} --repeat 2 --json", mlp())).expect(0).json()[0];
    assert_eq!(object["refused"].as_object().unwrap().len(), 0);
    assert!(0 < object["distinct_ops"].as_u64().unwrap());
    assert!(object["largest_op_bytes"].as_u64().unwrap() <= object["peak_bytes"].as_u64().unwrap());

    // Everything was measured, and the keep schedule takes what its ops took, and handing over.
    let plan = run(&format!("plan {} --optimizer adamw --planner keep --profile {file} --json", mlp())).expect(0);
    assert!(!plan.err.contains("guessed"), "{}", plan.err);
    let (predicted, sum) = (plan.json()[0]["predicted_ms"].as_f64().unwrap(), object["step_ms"].as_f64().unwrap());
    assert!(0.99 * sum <= predicted, "{predicted} {sum}");

    // Another optimizer's updates were not.
    let plan = run(&format!("plan {} --optimizer sgd --profile {file}", mlp())).expect(0);
    plan.says(&["ops guessed", "sgd f32"]);

    let report = run(&format!("profile {} -o {file} --repeat 1 --link 1GB/s --memory 0", mlp())).expect(0).out;
    for words in ["one step", "profiling took", "slowed to 1.00 GB/s", "speed kept beside", "wrote"] {
        assert!(report.contains(words), "{words}:\n{report}");
    }
    let compiled = folder.file("step.lit");
    run(&format!("compile {} --profile {file} -o {compiled}", mlp())).expect(0);
    run(&format!("explain {} --profile {file} %y", mlp())).says(&[]);
}

#[test]
fn a_profile_that_cannot_be_used_is_refused() {
    let folder = Folder::new("profile-refused");
    let file = folder.file("cpu.prof");
    run(&format!("profile {} -o {file} --repeat 1", mlp())).expect(0);
    run(&format!("plan {} --device h100 --profile {file}", mlp())).expect(2).says(&["measured for cpu"]);
    run(&format!("plan {} --profile {}", mlp(), folder.file("none.prof"))).expect(2).says(&["none.prof"]);
    let text = std::fs::read_to_string(&file).unwrap();
    let other = folder.write("other.prof", text.replace("version = 1", "version = 9"));
    run(&format!("plan {} --profile {other}", mlp())).expect(2).says(&["version 9", "profile again"]);
    let half = folder.write("half.prof", &text[..text.len() / 2]);
    run(&format!("plan {} --profile {half}", mlp())).expect(2).says(&["half.prof"]);
    run(&format!("profile {} -o {} --repeat 0", mlp(), folder.file("x.prof"))).expect(2).says(&["--repeat"]);
}
