//! `lighterage profile`, and the other commands with its file.

use crate::common::{Folder, mlp, run};
use std::process::Command;

#[test]
fn a_profile_is_planned_with() {
    let folder = Folder::new("profile");
    let file = folder.file("cpu.prof");
    let object = &run(&format!("profile {} -o {file} --repeat 2 --json", mlp()))
        .expect(0)
        .json()[0];
    assert_eq!(object["refused"].as_object().unwrap().len(), 0);
    assert!(0 < object["distinct_ops"].as_u64().unwrap());
    assert!(object["largest_op_bytes"].as_u64().unwrap() <= object["peak_bytes"].as_u64().unwrap());

    // Everything was measured, and the keep schedule takes at least the time of its ops.
    let plan = run(&format!(
        "plan {} --optimizer adamw --planner keep --profile {file} --json",
        mlp()
    ))
    .expect(0);
    assert!(!plan.err.contains("guessed"), "{}", plan.err);
    let (predicted, sum) = (
        plan.json()[0]["predicted_ms"].as_f64().unwrap(),
        object["step_ms"].as_f64().unwrap(),
    );
    assert!(0.99 * sum <= predicted, "{predicted} {sum}");

    // Another optimizer's updates were not measured.
    let plan = run(&format!("plan {} --optimizer sgd --profile {file}", mlp())).expect(0);
    plan.says(&["ops guessed", "sgd f32"]);

    // Copies were measured at full speed.
    let slow = format!("plan {} --profile {file} --link 1GB/s", mlp());
    let unlike = "its copies were not measured with this --link";
    run(&slow).expect(0).says(&[unlike]);

    let report = run(&format!(
        "profile {} -o {file} --repeat 1 --link 1GB/s --memory 0",
        mlp()
    ))
    .expect(0)
    .out;
    for words in [
        "one step",
        "profiling took",
        "slowed to 1.00 GB/s",
        "speed kept beside",
        "wrote",
    ] {
        assert!(report.contains(words), "{words}:\n{report}");
    }
    assert!(!run(&slow).expect(0).err.contains(unlike));
    let compiled = folder.file("step.lit");
    run(&format!("compile {} --profile {file} -o {compiled}", mlp())).expect(0);
    run(&format!("explain {} --profile {file} %y", mlp())).says(&[]);
}

#[test]
fn generated_kernels_are_measured_together_and_apart() {
    let folder = Folder::new("profile-generated");
    let file = folder.file("cpu.prof");
    let arguments = format!(
        "profile {} --kernels generated -o {file} --repeat 2 --json",
        mlp()
    );
    let object = &run(&arguments).expect(0).json()[0];
    assert_eq!(object["kernels"], "generated");
    assert_eq!(object["refused"].as_object().unwrap().len(), 0);
    // The step runs no op that was only measured separately.
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(
        text.contains("kernels = \"generated\"")
            && text.contains("fused body=")
            && text.contains("count = 0")
    );

    let with = |kernels: &str| {
        format!(
            "plan {} --optimizer adamw --planner keep --kernels {kernels} --profile",
            mlp()
        )
    };
    let plan = run(&format!("{} {file} --json", with("generated"))).expect(0);
    assert!(!plan.err.contains("guessed"), "{}", plan.err);
    run(&format!("{} {file}", with("plain")))
        .expect(2)
        .says(&["measured generated kernels", "--kernels plain"]);

    // A group is made only if it is faster.
    let graph = |name: &str, group: &str, op: &str| {
        let file = folder.write(name, timed(&text, group, op));
        run(&format!(
            "{} {file} --dump-ir-after fuse",
            with("generated")
        ))
        .expect(0)
        .out
    };
    assert!(graph("fast.prof", "1.0", "1000.0").contains(" fused "));
    assert!(!graph("slow.prof", "1000.0", "1.0").contains(" fused "));
}

/// A profile in which groups and all other ops take the given times.
fn timed(text: &str, group: &str, op: &str) -> String {
    let mut is_group = false;
    let line = |line: &str| {
        if line.starts_with('[') {
            is_group = line.contains("fused body=");
        }
        match line.starts_with("least_micros = ") {
            true => format!("least_micros = {}\n", if is_group { group } else { op }),
            false => format!("{line}\n"),
        }
    };
    text.lines().map(line).collect()
}

#[test]
fn a_profile_that_cannot_be_used_is_refused() {
    let folder = Folder::new("profile-refused");
    let file = folder.file("cpu.prof");
    run(&format!("profile {} -o {file} --repeat 1", mlp())).expect(0);
    run(&format!("plan {} --device h100 --profile {file}", mlp()))
        .expect(2)
        .says(&["measured for cpu"]);
    run(&format!(
        "plan {} --profile {}",
        mlp(),
        folder.file("none.prof")
    ))
    .expect(2)
    .says(&["none.prof"]);
    let text = std::fs::read_to_string(&file).unwrap();
    let other = folder.write("other.prof", text.replace("version = 1", "version = 9"));
    run(&format!("plan {} --profile {other}", mlp()))
        .expect(2)
        .says(&["version 9", "profile again"]);
    let half = folder.write("half.prof", &text[..text.len() / 2]);
    run(&format!("plan {} --profile {half}", mlp()))
        .expect(2)
        .says(&["half.prof"]);
    run(&format!(
        "profile {} -o {} --repeat 0",
        mlp(),
        folder.file("x.prof")
    ))
    .expect(2)
    .says(&["--repeat"]);
}

/// What one profile has, the next one does not measure: an op's times are the same digits, and the
/// machine's figures too. Ops of the other model are added.
#[test]
fn an_op_is_measured_once() {
    let folder = Folder::new("profile-reuse");
    let (first, both) = (folder.file("first.prof"), folder.file("both.prof"));
    run(&format!("profile {} -o {first} --repeat 2", mlp())).expect(0);
    let again = format!(
        "profile {} --optimizer sgd --reuse {first} -o {both} --json",
        mlp()
    );
    let object = &run(&again).expect(0).json()[0];
    assert_eq!(object["refused"].as_object().unwrap().len(), 0);
    let [old, new] = [&first, &both].map(|file| {
        let text = std::fs::read_to_string(file).unwrap();
        text.parse::<toml::Table>().unwrap()
    });
    let ops = |profile: &toml::Table| profile["ops"].as_table().unwrap().clone();
    let is_update = |key: &str, name: &str| key.starts_with(&format!("{name} "));
    for (key, op) in ops(&old) {
        assert_eq!(ops(&new)[&key]["micros"], op["micros"], "{key}");
    }
    assert!(ops(&old).keys().any(|key| is_update(key, "adamw")));
    assert!(!ops(&old).keys().any(|key| is_update(key, "sgd")));
    assert!(ops(&new).keys().any(|key| is_update(key, "sgd")));
    for figure in ["handoff_micros", "host_bandwidth", "link", "keeps"] {
        assert_eq!(old[figure], new[figure], "{figure}");
    }
    // With nothing left to measure, the step is the same sum.
    let same = format!("profile {} --reuse {first} -o {both} --json", mlp());
    let object = &run(&same).expect(0).json()[0];
    let step = old["step_micros"].as_float().unwrap() / 1e3;
    assert!((object["step_ms"].as_f64().unwrap() / step - 1.0).abs() < 1e-9);
    assert_eq!(object["peak_bytes"], 0);
    for (options, why) in [
        ("--kernels plain", "its kernels are generated"),
        ("--device h100", "it describes cpu, not h100"),
        ("--link 1GB/s", "leave out --link"),
    ] {
        run(&format!(
            "profile {} --reuse {first} -o {both} {options}",
            mlp()
        ))
        .expect(2)
        .says(&["--reuse", why]);
    }
}

/// Equal ops are run once: a step of many equal layers takes no more runs than one of three.
#[test]
fn equal_ops_are_sampled() {
    let folder = Folder::new("profile-sampled");
    let file = folder.file("cpu.prof");
    let layers = |n: usize| {
        let mut graph =
            String::from("graph deep {\n  input %y0 : f32[8,16]\n  input %w : f32[16,16]\n");
        for i in 1..=n {
            let before = i - 1;
            graph +=
                &format!("  fwd - %a{i} = matmul %y{before}, %w ta=false tb=false : f32[8,16]\n");
            graph += &format!("  fwd - %y{i} = tanh %a{i} : f32[8,16]\n");
        }
        graph + &format!("  output y = %y{n}\n}}\n")
    };
    let profiled = |n: usize| {
        let model = folder.write(&format!("deep{n}.ir"), layers(n));
        let command =
            format!("profile {model} --optimizer none --kernels plain --repeat 1 -o {file} --json");
        run(&command).expect(0).json()[0].clone()
    };
    let (few, many) = (profiled(3), profiled(60));
    assert_eq!((&many["lines"], &few["lines"]), (&120.into(), &6.into()));
    assert_eq!(few["distinct_ops"], many["distinct_ops"]);
    // The matmul and the tanh of one layer, and the tanh before.
    assert_eq!((&few["ops_run"], &many["ops_run"]), (&3.into(), &3.into()));
}

/// Weights of 4 GiB are profiled by a process that may have 1.5 GiB: the ops lie in a window as
/// large as the largest of them.
#[cfg(target_os = "linux")]
#[test]
fn a_model_larger_than_memory_is_measured() {
    let folder = Folder::new("profile-large");
    let mut graph = String::from("graph large {\n  input %y0 : f32[2,4096]\n");
    let n = 64;
    for i in 1..=n {
        graph += &format!("  state param %w{i} : f32[4096,4096] \"layer.{i}\"\n");
    }
    for i in 1..=n {
        let operands = format!("%y{}, %w{i}", i - 1);
        graph += &format!("  fwd - %a{i} = matmul {operands} ta=false tb=false : f32[2,4096]\n");
        graph += &format!("  fwd - %y{i} = tanh %a{i} : f32[2,4096]\n");
    }
    let model = folder.write("large.ir", graph + &format!("  output y = %y{n}\n}}\n"));
    let file = folder.file("large.prof");
    let arguments = format!(
        "profile {model} --optimizer none --kernels plain --repeat 1 --memory 1 -o {file} --json"
    );
    let limited = format!(
        "ulimit -v 1572864; exec {} {arguments}",
        env!("CARGO_BIN_EXE_lighterage")
    );
    let output = Command::new("sh").args(["-c", &limited]).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(object["lines"], 2 * n);
    assert_eq!(object["refused"].as_object().unwrap().len(), 0);
    // The largest op has a weight. Copies and updates are measured in 68 MiB of their own.
    let bytes = |key: &str| object[key].as_u64().unwrap();
    let (largest, all) = (bytes("largest_op_bytes"), bytes("peak_bytes"));
    assert!((64 << 20..65 << 20).contains(&largest), "{largest}");
    assert!((largest..=largest + (69 << 20)).contains(&all), "{all}");
}
