//! Training from the command line.

use crate::common::{Folder, floats, model, run};
use serde_json::Value;

const GPT2: &str = "gpt2-tiny/joint_core.pt2";

fn reference() -> String {
    model("gpt2-tiny/ref.safetensors")
}

fn train(rest: &str) -> String {
    format!(
        "train {} --optimizer adamw --batches {} {rest}",
        model(GPT2),
        reference()
    )
}

/// The same for tests that do not depend on the plan: `keep` is fast to plan.
fn train_kept(rest: &str) -> String {
    train(&format!("--planner keep {rest}"))
}

fn losses(lines: &[Value]) -> Vec<f64> {
    lines
        .iter()
        .filter_map(|line| line["loss"].as_f64())
        .collect()
}

#[test]
fn losses_are_those_of_pytorch_within_any_budget() {
    let expected = floats(&reference(), "losses");
    let mut all = vec![];
    for budget in ["100%", "50%", "25%"] {
        let lines = run(&train(&format!("--budget {budget} --steps 20 --json")))
            .expect(0)
            .json();
        assert_eq!(lines.len(), 21);
        assert_eq!(lines[0]["step"], 1);
        assert!(lines[0]["ms"].is_f64());
        let summary = &lines[20]["summary"];
        assert_eq!(
            summary["planned_peak_bytes"],
            summary["measured_peak_bytes"]
        );
        for key in [
            "keep_peak_bytes",
            "predicted_ms",
            "measured_ms",
            "swapped_bytes",
            "recomputed_ms",
        ] {
            assert!(summary[key].is_number(), "{key}: {summary}");
        }
        all.push(losses(&lines));
    }
    for (ours, theirs) in all[0].iter().zip(&expected) {
        assert!(
            (ours - f64::from(*theirs)).abs() < 1e-4,
            "{ours} should be {theirs}"
        );
        // The printed number is exactly an f32.
        assert_eq!(f64::from(*ours as f32), *ours);
    }
    assert_eq!(all[0], all[1]);
    assert_eq!(all[0], all[2]);
}

#[test]
fn an_artifact_trains_like_its_model_and_what_is_saved_goes_on() {
    let folder = Folder::new("artifact");
    let (lit, half, whole, rest) = (
        folder.file("s.lit"),
        folder.file("h.st"),
        folder.file("w.st"),
        folder.file("r.st"),
    );
    run(&format!(
        "compile {} --optimizer adamw --budget 50% -o {lit}",
        model(GPT2)
    ))
    .expect(0);
    let batches = reference();
    let args = format!("train {lit} --batches {batches} --json");
    let whole_losses = losses(
        &run(&format!("{args} --steps 8 --save {whole}"))
            .expect(0)
            .json(),
    );
    assert_eq!(
        whole_losses,
        losses(
            &run(&train("--budget 50% --steps 8 --json"))
                .expect(0)
                .json()
        )
    );
    run(&format!("{args} --steps 4 --save {half}")).expect(0);
    // The four batches repeat, so the second half uses the same ones.
    let rest_losses = losses(
        &run(&format!("{args} --steps 4 --init {half} --save {rest}"))
            .expect(0)
            .json(),
    );
    assert_eq!(whole_losses[4..], rest_losses);
    assert_eq!(
        std::fs::read(&whole).unwrap(),
        std::fs::read(&rest).unwrap()
    );
    let weight = "model.transformer.wpe.weight";
    assert!(floats(&whole, &format!("exp_avg.{weight}")).len() == floats(&whole, weight).len());
    assert_eq!(
        folder.names(),
        ["h.st", "r.st", "s.lit", "w.st"],
        "no temporary file should be left"
    );
}

#[test]
fn people_see_progress_and_a_summary() {
    let folder = Folder::new("people");
    let trace = folder.file("t.json");
    let out = run(&train_kept(&format!(
        "--steps 6 --shuffle 7 --trace {trace}"
    )))
    .expect(0)
    .out;
    assert!(
        out.contains("step     1/6") && out.contains("tokens/s"),
        "{out}"
    );
    for words in [
        "planned = measured",
        "keep",
        "predicted",
        "of swaps and states",
        "in 6 steps on 4 batches",
    ] {
        assert!(out.contains(words), "{words}:\n{out}");
    }
    let trace: Value = serde_json::from_slice(&std::fs::read(trace).unwrap()).unwrap();
    assert!(!trace["traceEvents"].as_array().unwrap().is_empty());
}

#[test]
fn parameters_are_drawn_by_seed() {
    let first = |rest: &str| {
        losses(
            &run(&train_kept(&format!("--steps 2 --json {rest}")))
                .expect(0)
                .json(),
        )
    };
    assert_eq!(
        first("--init normal:0.02 --seed 1"),
        first("--init normal:0.02 --seed 1")
    );
    assert_ne!(
        first("--init normal:0.02 --seed 1"),
        first("--init normal:0.02 --seed 2")
    );
    assert_ne!(first("--init normal:0.02"), first(""));
    for init in ["normal:x", "normal:-1", "normal:", "nothing"] {
        run(&train_kept(&format!("--steps 1 --init {init}")))
            .expect(2)
            .says(&["--init"]);
    }
}

#[test]
fn options_of_the_optimizer_are_heard() {
    let last = |rest: &str| {
        let args = format!(
            "train {} --planner keep --batches {} --steps 4 --json {rest}",
            model(GPT2),
            reference()
        );
        losses(&run(&args).expect(0).json()).pop().unwrap()
    };
    let plain = last("--optimizer adamw");
    assert_eq!(
        plain,
        last("--optimizer adamw --lr 1e-3 --betas 0.9,0.999 --eps 1e-8 --weight-decay 0.01")
    );
    for changed in [
        "--lr 1e-2",
        "--betas 0.5,0.999",
        "--betas 0.9,0.9",
        "--eps 1e-2",
        "--weight-decay 0.9",
    ] {
        assert_ne!(
            plain,
            last(&format!("--optimizer adamw {changed}")),
            "{changed}"
        );
    }
    assert_eq!(
        last("--optimizer sgd --momentum 0.9"),
        last("--optimizer sgd-momentum")
    );
    run(&train_kept("--steps 1 --momentum 0.9"))
        .expect(2)
        .says(&["--momentum", "beta1"]);
    run(&train_kept("--steps 1 --lr -1"))
        .expect(2)
        .says(&["--lr"]);
    run(&train_kept("--steps 1 --betas 0.9,1"))
        .expect(2)
        .says(&["--betas"]);
    let none = format!(
        "train {} --planner keep --batches {} --steps 1",
        model(GPT2),
        reference()
    );
    run(&format!("{none} --lr 1"))
        .expect(2)
        .says(&["no optimizer"]);
    run(&none).expect(0);
}

#[test]
fn what_was_compiled_cannot_be_chosen_again() {
    let folder = Folder::new("again");
    let lit = folder.file("s.lit");
    run(&format!(
        "compile {} --optimizer sgd --planner keep -o {lit}",
        model(GPT2)
    ))
    .expect(0);
    let args = format!("train {lit} --batches {} --steps 1", reference());
    run(&format!("{args} --budget 10%"))
        .expect(2)
        .says(&["--budget", "compiled already"]);
    run(&format!("{args} --optimizer adamw"))
        .expect(2)
        .says(&["--optimizer", "sgd"]);
    run(&format!("{args} --momentum 0.9"))
        .expect(2)
        .says(&["sgd-momentum"]);
    run(&format!("{args} --optimizer sgd --link 1GB/s --lr 0.1")).expect(0);
    run(&format!("plan {lit}")).expect(2).says(&["train"]);
}

#[test]
fn bad_batches_are_told_by_name_type_and_what_was_found() {
    let folder = Folder::new("batches");
    let tensor = |name: &str, dtype: &str, shape: &str, range: &str| {
        format!("{name:?}:{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":{range}}}")
    };
    let file = |entries: &[String], bytes: usize| {
        let header = format!("{{{}}}", entries.join(","));
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.resize(file.len() + bytes, 0);
        file
    };
    let args = |path: &str| {
        format!(
            "train {} --optimizer adamw --planner keep --batches {path} --steps 1",
            model(GPT2)
        )
    };
    let ids = tensor("batch.0.input_ids", "I64", "[2,32]", "[0,512]");
    let missing = folder.write("missing.safetensors", file(std::slice::from_ref(&ids), 512));
    run(&args(&missing))
        .expect(2)
        .says(&["batch.0.labels", "i64[2,32]"]);
    let labels = tensor("batch.0.labels", "I32", "[2,32]", "[512,768]");
    let dtype = folder.write("dtype.safetensors", file(&[ids.clone(), labels], 768));
    run(&args(&dtype))
        .expect(2)
        .says(&["batch.0.labels", "i64[2,32]", "i32[2,32]"]);
    let labels = tensor("batch.0.labels", "I64", "[2,16]", "[512,768]");
    let shape = folder.write("shape.safetensors", file(&[ids.clone(), labels], 768));
    run(&args(&shape))
        .expect(2)
        .says(&["i64[2,32]", "i64[2,16]"]);
    let gap = tensor("batch.2.input_ids", "I64", "[2,32]", "[512,1024]");
    let gap = folder.write("gap.safetensors", file(&[ids, gap], 1024));
    run(&args(&gap)).expect(2).says(&["batch.1 is missing"]);
    let none = folder.write("none.safetensors", file(&[], 0));
    run(&args(&none)).expect(2).says(&["batch.0.input_ids"]);
    run(&args(&folder.file("absent")))
        .expect(2)
        .says(&["absent"]);
    let whole = std::fs::read(reference()).unwrap();
    for n in [0, 7, 100, whole.len() - 1] {
        let cut = folder.write("cut.safetensors", &whole[..n]);
        run(&args(&cut)).expect(2).says(&["cut.safetensors"]);
    }
}

#[test]
fn damaged_artifacts_are_refused() {
    let folder = Folder::new("lit");
    let lit = folder.file("s.lit");
    run(&format!(
        "compile {} --optimizer sgd --planner keep -o {lit}",
        model(GPT2)
    ))
    .expect(0);
    let whole = std::fs::read(&lit).unwrap();
    let args = |path: &str| format!("train {path} --batches {} --steps 1", reference());
    for n in [0, 3, 63, 64, 5000, whole.len() - 1] {
        run(&args(&folder.write("cut.lit", &whole[..n])))
            .expect(2)
            .says(&["cut.lit"]);
    }
    for at in [9, 40, 100, whole.len() / 2, whole.len() - 1] {
        let mut flipped = whole.clone();
        flipped[at] ^= 1;
        run(&args(&folder.write("flipped.lit", flipped)))
            .expect(2)
            .says(&["flipped.lit"]);
    }
}

#[test]
fn values_that_are_lacking_are_listed() {
    let coarse = model("gpt2-tiny/joint_coarse.pt2");
    let args = format!(
        "train {coarse} --optimizer adamw --planner keep --batches {} --steps 2 --json",
        reference()
    );
    run(&args)
        .expect(2)
        .says(&["no value for", "model.transformer.wpe.weight", "--init"]);
    run(&format!("{args} --init normal:0.02")).expect(0);
    run(&format!("{args} --init {}", reference()))
        .expect(2)
        .says(&["no tensor for", "model.transformer.wpe.weight"]);
    // The coarse graph can use the core graph's saved weights: the paths are the same.
    let folder = Folder::new("weights");
    let saved = folder.file("w.safetensors");
    run(&train_kept(&format!("--steps 0 --save {saved}"))).expect(0);
    let ours = losses(&run(&format!("{args} --weights {saved}")).expect(0).json());
    let theirs = losses(&run(&train_kept("--steps 2 --json")).expect(0).json());
    for (a, b) in ours.iter().zip(&theirs) {
        assert!((a - b).abs() < 1e-4, "{a} {b}");
    }
}

#[test]
fn a_slow_link_slows_the_step() {
    let millis = |rest: &str| {
        let lines = run(&train(&format!("--budget 30% --steps 3 --json {rest}")))
            .expect(0)
            .json();
        (
            losses(&lines),
            lines[3]["summary"]["measured_ms"].as_f64().unwrap(),
            lines[3]["summary"]["swapped_bytes"].as_u64().unwrap(),
        )
    };
    let fast = millis("");
    let slow = millis("--link 20MB/s");
    assert_eq!(fast.0, slow.0);
    // The plan may differ, but bytes over the link take their time; at best both directions run at
    // once.
    assert!(slow.2 as f64 / 2.0 / 20e6 * 1e3 <= slow.1, "{slow:?}");
}

#[test]
fn targets_that_cannot_be_written_are_told_at_once() {
    for option in ["--save", "--trace"] {
        run(&train_kept(&format!("--steps 1 {option} /nowhere/at/all")))
            .expect(2)
            .says(&[option, "/nowhere/at"]);
        run(&train_kept(&format!("--steps 1 {option} /")))
            .expect(2)
            .says(&[option]);
    }
    // The input is not read before: it does not exist.
    for command in ["compile", "import", "alloc convert"] {
        for output in ["/nowhere/at/all", "/"] {
            run(&format!("{command} /nowhere.in -o {output}"))
                .expect(2)
                .says(&["--output"]);
        }
    }
}

#[test]
fn ops_without_a_kernel_can_be_planned_and_not_run() {
    let folder = Folder::new("extern");
    let text = "graph g {\n  input  %x : f32[4]\n  fwd - %y = extern %x name=\"aten.foo\" \
        node=\"y\" pure=false types=\"f32[4]\" : f32[4]\n  output loss = %y\n}\n";
    let graph = folder.write("g.ir", text);
    assert_eq!(
        run(&format!("plan {graph} --json")).expect(0).json()[0]["unsupported"][0]["op"],
        "aten.foo"
    );
    run(&format!("compile {graph} -o {}", folder.file("g.lit")))
        .expect(2)
        .says(&["Unsupported: aten.foo", "node y"]);
}

#[test]
fn a_step_with_calls_of_python_is_described_and_not_run() {
    let folder = Folder::new("calls");
    let text = "graph g {\n  state param %x : f32[4] \"x\"\n  fwd - %y = neg %x : f32[4]\n  \
        output loss = %y\n}\n";
    let (graph, lit) = (folder.write("g.ir", text), folder.file("g.lit"));
    run(&format!("compile {graph} --kernels plain -o {lit}")).expect(0);
    // As the Python package has it in memory; nothing writes such files.
    let mut artifact = artifact::read_file(&lit).unwrap();
    let text = |text: &str| artifact::Attr::Str(text.into());
    artifact.kernels[0].op = "extern".into();
    artifact.kernels[0].attrs = vec![
        ("name".into(), text("torch.ops.aten.sinh.default")),
        ("node".into(), text("sinh_3")),
        ("pure".into(), artifact::Attr::Bool(true)),
        ("types".into(), text("f32[4]")),
    ];
    artifact::write_file(&lit, &artifact).unwrap();
    let batches = folder.write("none", "\u{2}\0\0\0\0\0\0\0{}");
    run(&format!("train {lit} --batches {batches} --steps 1"))
        .expect(2)
        .says(&["torch.ops.aten.sinh.default (line y)", "no kernel"]);
    let inspected = run(&format!("inspect {lit}")).expect(0).out;
    for words in ["extern torch.ops.aten.sinh.default", "no kernel"] {
        assert!(inspected.contains(words), "{words}:\n{inspected}");
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_after_the_step_that_runs_and_saves() {
    use std::io::{BufRead, BufReader};
    let folder = Folder::new("interrupt");
    let saved = folder.file("o.safetensors");
    let args = train_kept(&format!("--steps 100000000 --json --save {saved}"));
    let command = crate::common::command(&args);
    // The command leaves a signal alone that its parent ignores, as jobs in the background do.
    let mut child = std::process::Command::new("env")
        .arg("--default-signal=INT")
        .arg(command.get_program())
        .args(command.get_args())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.next().unwrap().unwrap();
    // The shell's built-in kill: a minimal Debian has no other.
    let kill = format!("kill -INT {}", child.id());
    let killed = std::process::Command::new("sh")
        .args(["-c", &kill])
        .status()
        .unwrap();
    assert!(killed.success());
    let last: Value = serde_json::from_str(&lines.last().unwrap().unwrap()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    // The saved state is the state after the last reported step.
    assert!(1 <= last["summary"]["steps"].as_u64().unwrap());
    assert!(!floats(&saved, "model.transformer.wpe.weight").is_empty());
    assert_eq!(folder.names(), ["o.safetensors"]);
}

#[test]
fn a_tied_parameter_goes_by_either_name() {
    let folder = Folder::new("tied");
    let (saved, renamed) = (folder.file("w.safetensors"), folder.file("r.safetensors"));
    run(&train_kept(&format!("--steps 0 --save {saved}"))).expect(0);
    let bytes = std::fs::read(&saved).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.iter().map(|(name, view)| {
        (
            name.replace("model.lm_head.weight", "model.transformer.wte.weight"),
            view,
        )
    });
    std::fs::write(&renamed, safetensors::serialize(tensors, None).unwrap()).unwrap();
    let of = |file: &str| {
        losses(
            &run(&train_kept(&format!("--steps 2 --json --init {file}")))
                .expect(0)
                .json(),
        )
    };
    assert_eq!(of(&saved), of(&renamed));
}

#[test]
fn a_reader_that_leaves_ends_a_run_that_leaves_nothing() {
    let mut child = crate::common::command(&train_kept("--steps 100000000 --json"))
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn micro_batches_are_consecutive_batches() {
    let still = "--lr 0 --weight-decay 0 --json";
    let each = losses(
        &run(&train_kept(&format!("{still} --steps 4")))
            .expect(0)
            .json(),
    );
    // Each batch has another number of labels that count.
    let counts = [58.0, 59.0, 56.0, 55.0];
    let of_pair = |k: usize| {
        let (a, b) = (counts[k], counts[k + 1]);
        (each[k] * a + each[k + 1] * b) / (a + b)
    };
    let mean = [of_pair(0), of_pair(2)];
    let lines = run(&train_kept(&format!("{still} --micro-batches 2 --steps 2")))
        .expect(0)
        .json();
    let close = |losses: &[f64]| losses.iter().zip(&mean).all(|(a, b)| (a - b).abs() < 1e-6);
    assert!(close(&losses(&lines)), "{mean:?}");
    // The same from a file as from its model, with the same number of tokens a step.
    let folder = Folder::new("micro");
    let lit = folder.file("s.lit");
    run(&format!(
        "compile {} --optimizer adamw --planner keep --micro-batches 2 -o {lit}",
        model(GPT2)
    ))
    .expect(0);
    let args = format!("train {lit} --batches {} {still} --steps 2", reference());
    assert!(close(&losses(&run(&args).expect(0).json())), "{mean:?}");
    run(&format!("{args} --micro-batches 2"))
        .expect(2)
        .says(&["--micro-batches", "compiled already"]);
    for n in ["0", "-1", "x", "5000"] {
        run(&train_kept(&format!("--steps 1 --micro-batches={n}")))
            .expect(2)
            .says(&["--micro-batches"]);
    }
}

#[test]
fn clipping_and_threads_are_heard() {
    let all = |rest: &str| {
        losses(
            &run(&train_kept(&format!("--steps 4 --json {rest}")))
                .expect(0)
                .json(),
        )
    };
    let plain = all("--threads 1");
    assert_eq!(plain, all("--threads 3"), "threads change nothing");
    assert_eq!(
        plain,
        all("--clip-norm 1e30"),
        "a norm below the bound changes nothing"
    );
    assert_ne!(plain, all("--clip-norm 1e-9"));
    run(&train_kept("--steps 1 --clip-norm 0"))
        .expect(2)
        .says(&["norm of 0", "positive"]);
    run(&train_kept("--steps 1 --master split"))
        .expect(2)
        .says(&["bf16"]);
    run(&train_kept("--steps 1 --threads 0"))
        .expect(2)
        .says(&["--threads"]);
}

#[test]
fn a_step_is_compiled_for_the_gpu_that_it_is_planned_for() {
    let folder = Folder::new("gpu");
    let file = folder.file("step.lit");
    let compile = format!(
        "compile {} --optimizer adamw --device h100 -o {file}",
        model(GPT2)
    );
    run(&compile).expect(0);
    let text = run(&format!("inspect {file}")).expect(0).out;
    for part in ["planned for h100", "for sm_90", "a GPU of sm_90", "matmul"] {
        assert!(text.contains(part), "{part:?} should be in:\n{text}");
    }
    run(&format!("{compile} --target sm_86")).expect(0);
    run(&format!("{compile} --kernels plain")).expect(2).says(&[
        "--kernels plain",
        "sm_90",
        "--target cpu",
    ]);
    run(&format!("{compile} --target cpu")).expect(0);
    let text = run(&format!("inspect {file}")).expect(0).out;
    assert!(text.contains("planned for h100"), "{text}");
    assert!(!text.contains("sm_90"), "{text}");
}

#[test]
fn generated_kernels_are_shown_as_text() {
    let compile = |rest: &str| format!("compile {} --planner keep {rest}", model(GPT2));
    let mlir = run(&compile("--emit mlir --target neon")).expect(0).out;
    for part in [
        "// nodes ",
        "llvm.func @k",
        "no kernel is generated for addmm",
    ] {
        assert!(mlir.contains(part), "{part:?} should be in:\n{mlir}");
    }
    let folder = Folder::new("emit");
    let ptx = folder.file("kernels.ptx");
    run(&compile(&format!("--emit ptx -o {ptx}"))).expect(0);
    let ptx = std::fs::read_to_string(ptx).unwrap();
    assert!(
        ptx.contains(".target sm_90") && !ptx.contains(".extern"),
        "{ptx}"
    );
    assert!(
        run(&compile("--emit llvm --target avx2"))
            .expect(0)
            .out
            .contains("define void @k")
    );
    assert!(
        run(&compile("--emit asm --target neon"))
            .expect(0)
            .out
            .contains("fmla")
    );
    run(&compile("--emit ptx --target avx2"))
        .expect(2)
        .says(&["--emit ptx", "avx2"]);
    let json = run(&compile("--emit mlir --target neon --json"))
        .expect(0)
        .json()
        .remove(0);
    let texts: Vec<&str> = json["kernels"]
        .as_array()
        .unwrap()
        .iter()
        .map(|k| k["text"].as_str().unwrap())
        .collect();
    assert!(texts.iter().all(|text| mlir.contains(text)));
    assert!(mlir.len() / 2 < texts.iter().map(|text| text.len()).sum());
    assert!(
        json["plain"]
            .to_string()
            .contains("no kernel is generated for addmm")
            && json["target"] == "neon"
    );
    let file = folder.file("step.lit");
    let json = run(&compile(&format!("--json -o {file}")))
        .expect(0)
        .json()
        .remove(0);
    assert_eq!(json["bytes"], std::fs::metadata(&file).unwrap().len());
    assert!(json["summary"]["planned_peak_bytes"].as_u64() > Some(0));
    run(&compile("")).expect(2).says(&["--output"]);
}

#[test]
fn the_page_about_ops_runs_its_graph() {
    let page = std::fs::read_to_string("../../docs/adding-an-op.md").unwrap();
    let start = page.find("graph try {").unwrap();
    let graph = &page[start..start + page[start..].find("```").unwrap()];
    let folder = Folder::new("try");
    let file = folder.write("try.ir", graph);
    let none = folder.write("none.safetensors", b"\x02\0\0\0\0\0\0\0{}");
    let loss = |kernels: &str| {
        let args = format!("train {file} --batches {none} --init normal:1 --steps 1 --json");
        let lines = run(&format!("{args} --kernels {kernels}")).expect(0).json();
        losses(&lines)[0]
    };
    assert!((loss("plain") - loss("generated")).abs() < 1e-5);
}
