//! Planning from the command line: import, plan, explain, check, compile.

use crate::common::{Folder, command, mlp, model, run};
use std::io::Read;
use std::process::Stdio;

const GPT2: &str = "gpt2-tiny/joint_core.pt2";

#[test]
fn usage_errors_exit_with_2() {
    run("").expect(2);
    run("plan").expect(2).says(&["MODEL"]);
    run("nonsense").expect(2);
    let mlp = mlp();
    run(&format!("plan {mlp} --optimizr adamw"))
        .expect(2)
        .says(&["--optimizer"]);
    run(&format!("plan {mlp} --optimizer adam"))
        .expect(2)
        .says(&["adamw", "sgd-momentum"]);
    run(&format!("plan {mlp} --planner best"))
        .expect(2)
        .says(&["greedy"]);
    run(&format!("plan {mlp} --budget lots"))
        .expect(2)
        .says(&["20GiB"]);
    run(&format!("plan {mlp} --budget 0%")).expect(2);
    run(&format!("plan {mlp} --link fast"))
        .expect(2)
        .says(&["2GB/s"]);
    run(&format!("plan {mlp} --dump-ir-after nowhere"))
        .expect(2)
        .says(&["canonical", "sync"]);
    run(&format!("plan {mlp} --device abacus"))
        .expect(2)
        .says(&["abacus", "h200"]);
    run("plan missing.pt2").expect(2).says(&["missing.pt2"]);
    run("--help").expect(0);
    for name in ["import", "plan", "compile", "train", "explain", "check"] {
        assert!(
            run(&format!("{name} --help"))
                .expect(0)
                .out
                .contains("Example"),
            "{name}"
        );
    }
}

#[test]
fn what_the_compiler_does_is_logged() {
    let plan = format!("plan {} --optimizer adamw --budget 60%", mlp());
    let silent = run(&plan).expect(0);
    let said = run(&format!("-v {plan}")).expect(0);
    assert_eq!(said.out, silent.out);
    let mut passes = passes::pipeline::names();
    passes.push("check");
    for pass in passes {
        let line = format!("debug passes::manager: pass {pass}: ");
        assert!(said.err.contains(&line), "{pass}: {}", said.err);
        assert!(!silent.err.contains(&line), "{pass}: {}", silent.err);
    }
    assert!(
        said.err.contains("debug passes::decide::record: draft: "),
        "{}",
        said.err
    );

    let logged = |rules: &str| {
        let output = command(&plan)
            .env("LIGHTERAGE_LOG", rules)
            .output()
            .unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let (code, passes) = logged("passes::manager=debug");
    assert_eq!(code, Some(0), "{passes}");
    assert!(
        passes.contains("pass sync: ") && !passes.contains("draft: "),
        "{passes}"
    );
    let (code, error) = logged("passes=loud");
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("passes=loud"), "{error}");
}

#[test]
fn import_prints_a_graph_that_parses() {
    let text = run(&format!("import {}", model(GPT2))).expect(0).out;
    let graph = ir::text::parse_graph(&text).unwrap();
    assert!(
        graph
            .states
            .values()
            .any(|state| state.path == "model.lm_head.weight")
    );
    let folder = Folder::new("import");
    let file = folder.file("g.ir");
    run(&format!("import {} -o {file}", model(GPT2))).expect(0);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
    // The imported text is a model too.
    assert_eq!(run(&format!("import {file}")).expect(0).out, text);
}

#[test]
fn plan_tells_what_it_promises() {
    let object = &run(&format!(
        "plan {} --optimizer adamw --device cpu --budget 60% --json",
        model(GPT2)
    ))
    .expect(0)
    .json()[0];
    let bytes = |key: &str| {
        object[key]
            .as_u64()
            .unwrap_or_else(|| panic!("{key}: {object}"))
    };
    let (planned, keep) = (bytes("planned_peak_bytes"), bytes("keep_peak_bytes"));
    assert!(planned as f64 <= 0.6 * keep as f64);
    assert!(bytes("lower_bound_bytes") <= planned);
    assert!(bytes("smallest_feasible_bytes") <= planned);
    assert!(0.0 < object["predicted_ms"].as_f64().unwrap());
    for kind in ["kept", "swap", "recompute", "hosted_states"] {
        assert!(
            object["decisions"][kind]["count"].is_u64()
                && object["decisions"][kind]["bytes"].is_u64(),
            "{kind}"
        );
    }
    assert!(!object["curve"].as_array().unwrap().is_empty());
    assert_eq!(object["unsupported"], serde_json::json!([]));
}

#[test]
fn what_lies_at_the_peak_adds_up_to_it() {
    let object = &run(&format!(
        "plan {} --optimizer adamw --device test --budget 70% --json",
        mlp()
    ))
    .expect(0)
    .json()[0];
    let tensors = object["peak_tensors"].as_array().unwrap();
    assert!(tensors.len() < 10, "all of them should be listed");
    let sum: u64 = tensors
        .iter()
        .map(|tensor| tensor["bytes"].as_u64().unwrap())
        .sum();
    assert_eq!(sum, object["lower_bound_bytes"]);
    assert_eq!(sum, object["peak_in_use_bytes"]);
    let modules: Vec<_> = tensors.iter().map(|tensor| &tensor["module"]).collect();
    assert!(modules.contains(&&"fc1.weight".into()), "{modules:?}");
    assert!(tensors.iter().any(|tensor| tensor["class"] == "param"));
}

#[test]
fn plan_reports_to_people() {
    let report = run(&format!(
        "plan {} --optimizer adamw --device test --budget 70%",
        mlp()
    ))
    .expect(0)
    .out;
    for words in [
        "planned peak",
        "smallest feasible",
        "keep everything",
        "decisions",
        "at the peak",
        "predicted step",
        "proved",
    ] {
        assert!(report.contains(words), "{words}:\n{report}");
    }
}

#[test]
fn names_in_reports_are_names_that_explain_knows() {
    let args = format!(
        "{} --optimizer adamw --device cpu --budget 25%",
        model(GPT2)
    );
    let object = &run(&format!("plan {args} --json")).expect(0).json()[0];
    let tensors = object["peak_tensors"].as_array().unwrap();
    // One of each class, including a parameter that was copied in a chunk.
    let mut classes = std::collections::BTreeMap::new();
    for tensor in tensors {
        classes.insert(tensor["class"].as_str().unwrap(), &tensor["name"]);
    }
    assert!(classes.contains_key("param"));
    for name in classes.values() {
        run(&format!("explain {args} {}", name.as_str().unwrap())).expect(0);
    }
    let scratch = run(&format!("explain {args} index_put.scratch"))
        .expect(0)
        .out;
    assert!(scratch.contains("is scratch memory"), "{scratch}");
    let chunk = run(&format!("explain {args} c0.host")).expect(0).out;
    assert!(chunk.contains("lives on the host"), "{chunk}");
    assert!(!chunk.contains("kept"), "{chunk}");
    // A chunk is priced as a whole, by the name of either of its buffers; its states name it.
    assert!(chunk.contains("a chunk: ") && chunk.contains("gather  c0.host -> c0"));
    assert!(chunk.contains("on the device instead: "), "{chunk}");
    assert_eq!(run(&format!("explain {args} c0")).expect(0).out, chunk);
    let priced = &run(&format!("explain {args} c0 --json")).expect(0).json()[0];
    let copies = priced["copies"].as_array().unwrap();
    assert!(!copies.is_empty() && priced["places"].as_array().unwrap().len() == copies.len() + 1);
    assert!(priced["on_device"]["peak_bytes"].is_u64(), "{priced}");
    // The page and the object agree on where it is updated.
    let updated = priced["updated_there"].as_bool().unwrap();
    assert_eq!(
        chunk.contains("with this choice too, the host computes it"),
        updated,
        "{chunk}"
    );
    let state = priced["values"][0]["name"].as_str().unwrap();
    let state = run(&format!("explain {args} {state}")).expect(0).out;
    assert!(state.contains("it comes in chunk c0, with "), "{state}");
    // A moment that the host updates stays there.
    let moment = run(&format!(
        "explain {args} exp_avg.model.transformer.wpe.weight"
    ));
    let moment = moment.expect(0).out;
    assert!(moment.contains("it never comes to the device"), "{moment}");
    // The part of a state may stand behind its path, too.
    let behind = "model.transformer.wpe.weight.exp_avg";
    let behind = run(&format!("explain {args} {behind}")).expect(0).out;
    assert_eq!(behind, moment);
    // The candidates of `auto` are named.
    let found = object["found_by"].as_str().unwrap();
    let report = run(&format!("plan {args}")).expect(0).out;
    assert!(
        report.contains(&format!("planner auto ({found})")),
        "{report}"
    );
}

#[test]
fn what_does_not_fit_exits_with_3_and_says_what_would() {
    let args = format!("plan {} --optimizer adamw --device test", mlp());
    let refused = run(&format!("{args} --budget 1KiB"))
        .expect(3)
        .says(&["does not fit", "--budget"]);
    let smallest = refused.err.split_whitespace().last().unwrap().to_string();
    run(&format!("{args} --budget {smallest}")).expect(0);
    let bytes: u64 = smallest.parse().unwrap();
    run(&format!("{args} --budget {}", bytes - 1)).expect(3);
    let object = &run(&format!("{args} --budget 1KiB --json"))
        .expect(3)
        .json()[0];
    assert_eq!(object["smallest_feasible_bytes"], bytes);
    // Every command that plans says the same.
    let folder = Folder::new("does-not-fit");
    let output = folder.file("m.lit");
    let options = args.strip_prefix("plan ").unwrap();
    for command in [
        format!("compile {options} -o {output}"),
        format!("explain {options} fc1.weight"),
    ] {
        let refused = run(&format!("{command} --budget 1KiB --json")).expect(3);
        assert_eq!(&refused.json()[0], object, "{command}");
    }
}

/// The error says that `--host` is too small, whether no plan fits the host's pool at all or none
/// with this budget; what it names works.
#[test]
fn a_host_that_is_too_small_is_blamed() {
    let args = format!("plan {} --optimizer adamw --device test", mlp());
    let smallest = |options: &str| {
        let object = &run(&format!("{args} {options} --json")).expect(3).json()[0];
        object["smallest_feasible_bytes"].as_u64().unwrap()
    };
    let (budget, host) = (smallest("--budget 1KiB"), smallest("--host 1"));
    let too_small = format!("--budget {budget} --host {host}");
    for (options, pool) in [("--host 1", "the host's pool"), (&too_small, "the device")] {
        let refused = run(&format!("{args} {options}"))
            .expect(3)
            .says(&[&format!("does not fit {pool}"), "--host"]);
        let object = &run(&format!("{args} {options} --json")).expect(3).json()[0];
        let enough = object["host_bytes_that_fit"].as_u64().unwrap();
        assert!(
            refused.err.contains(&format!("fits: --host {enough}")),
            "{}",
            refused.err
        );
        // The given size is no advice.
        let given = options.rsplit_once("--host").unwrap().1;
        assert!(!refused.err.contains(&format!("--host{given}\n")));
        let before = options.rsplit_once("--host").unwrap().0;
        run(&format!("{args} {before} --host {enough}")).expect(0);
    }
    let budget = smallest(&too_small);
    run(&format!("{args} --budget {budget} --host {host}")).expect(0);
    // All of the host's memory would be too small: that is not the option's fault.
    let refused = run(&format!("{args} --budget 1KiB --host {host}")).expect(3);
    assert!(!refused.err.contains("--host"), "{}", refused.err);
}

#[test]
fn a_link_changes_what_is_predicted() {
    let predicted = |link: &str| {
        let object = run(&format!(
            "plan {} --optimizer adamw --budget 30% --json {link}",
            model(GPT2)
        ))
        .expect(0)
        .json();
        object[0]["predicted_ms"].as_f64().unwrap()
    };
    assert!(predicted("") < predicted("--link 10MB/s"));
}

#[test]
fn a_device_may_be_a_file() {
    let folder = Folder::new("device");
    let text = "name = \"mine\"\ndevice_bytes = 200000\nhost_bytes = 1000000\nf32_flops = \
        1e9\nbf16_flops = 1e9\n\
                memory_bandwidth = 1e9\nlaunch_micros = 1.0\nlink_bandwidth = 1e9\nduplex = \
                1.0\nlink_micros = 1.0\n\
                host_bandwidth = 1e9\n";
    let device = folder.write("mine.toml", text);
    let object = &run(&format!("plan {} --device {device} --json", mlp()))
        .expect(0)
        .json()[0];
    assert_eq!(
        (&object["device"], &object["budget_bytes"]),
        (&"mine".into(), &200_000.into())
    );
    let broken = folder.write(
        "broken.toml",
        text.replace("launch_micros = 1.0", "launch_micros = -1.0"),
    );
    run(&format!("plan {} --device {broken}", mlp()))
        .expect(2)
        .says(&["launch_micros"]);
    run(&format!(
        "plan {} --device {}",
        mlp(),
        folder.file("none.toml")
    ))
    .expect(2)
    .says(&["none.toml"]);
}

#[test]
fn dumps_stand_where_they_were_asked_for() {
    let folder = Folder::new("dumps");
    let args = format!(
        "plan {} --optimizer adamw --device test --budget 60%",
        mlp()
    );
    let dumped = run(&format!("{args} --dump-ir-after sync")).expect(0);
    assert!(
        dumped.out.starts_with("; after sync\ngraph mlp {"),
        "{}",
        dumped.out
    );
    assert!(
        dumped.out.contains(" us\n"),
        "lines should have their times:\n{}",
        dumped.out
    );
    assert!(dumped.err.contains("planned peak"));
    run(&format!("{args} --dump-dir {}", folder.file("d"))).expect(0);
    let names: Vec<String> = std::fs::read_dir(folder.file("d"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(
        names.iter().any(|name| name == "00-import.ir")
            && names.iter().any(|name| name.ends_with("-sync.ir")),
        "{names:?}"
    );
    // What ends in `.ir` is IR: each file is checked, or refused only because it is not finished.
    for name in names.iter().filter(|name| name.ends_with(".ir")) {
        let checked = run(&format!("check {}", folder.file(&format!("d/{name}"))));
        assert!(!checked.err.contains("expected"), "{name}: {}", checked.err);
    }
    assert!(names.iter().any(|name| name.ends_with("-decide.txt")));
    let sync = names
        .iter()
        .find(|name| name.ends_with("-sync.ir"))
        .unwrap();
    let text = std::fs::read_to_string(folder.file(&format!("d/{sync}"))).unwrap();
    assert_eq!(format!("; after sync\n{text}"), dumped.out);
    let times = run(&format!("{args} --time-passes")).expect(0).err;
    assert!(
        times.contains("decide") && times.contains("changed"),
        "{times}"
    );
}

#[test]
fn a_dump_after_sync_is_proved_and_a_changed_one_is_not() {
    let folder = Folder::new("check");
    for (source, optimizer) in [(mlp(), "sgd"), (model(GPT2), "adamw")] {
        let dump = run(&format!(
            "plan {source} --optimizer {optimizer} --budget 70% --dump-ir-after sync"
        ))
        .expect(0)
        .out;
        let file = folder.write("sync.ir", &dump);
        assert!(
            run(&format!("check {file}"))
                .expect(0)
                .out
                .contains("proved")
        );
        assert_eq!(
            run(&format!("check {file} --json")).expect(0).json()[0]["proved"],
            true
        );
        // The first copy to the device loses its necessary wait.
        let waits = dump.find(" after i").unwrap() + 1;
        let end = waits + dump[waits..].find(" ;").unwrap();
        let broken = folder.write("broken.ir", format!("{}{}", &dump[..waits], &dump[end..]));
        let refused = run(&format!("check {broken}")).expect(2).says(&["refused"]);
        assert!(refused.out.contains("; error:"), "{}", refused.out);
        assert_eq!(
            run(&format!("check {broken} --json")).expect(2).json()[0]["proved"],
            false
        );
    }
    run(&format!("check {}", mlp()))
        .expect(2)
        .says(&["no schedule"]);
    let unplanned = run(&format!("plan {} --dump-ir-after apply", mlp()))
        .expect(0)
        .out;
    run(&format!("check {}", folder.write("apply.ir", unplanned)))
        .expect(2)
        .says(&["no plan"]);
    run(&format!("check {}", folder.write("no.ir", "graph {")))
        .expect(2)
        .says(&["line 1"]);
    run(&format!(
        "check {}",
        folder.write("binary.ir", [0xFF, 0xFE])
    ))
    .expect(2)
    .says(&["not a text file"]);
}

#[test]
fn the_same_command_gives_the_same_bytes() {
    let folder = Folder::new("same");
    let args = format!("{} --optimizer adamw --budget 40%", model(GPT2));
    for file in ["a.lit", "b.lit"] {
        run(&format!("compile {args} -o {}", folder.file(file))).expect(0);
    }
    assert_eq!(
        std::fs::read(folder.file("a.lit")).unwrap(),
        std::fs::read(folder.file("b.lit")).unwrap()
    );
    assert_eq!(
        folder.names(),
        ["a.lit", "b.lit"],
        "no temporary file should be left"
    );
    let plan = || run(&format!("plan {args} --json")).expect(0).out;
    assert_eq!(plan(), plan());
}

#[test]
fn explain_says_why_and_what_else_would_cost() {
    let args = format!("explain {} --optimizer adamw --budget 40%", model(GPT2));
    let object = &run(&format!("{args} %addmm_2 --json")).expect(0).json()[0];
    assert_eq!(
        (&object["name"], &object["class"]),
        (&"addmm_2".into(), &"activation".into())
    );
    assert!(!object["events"].as_array().unwrap().is_empty());
    let gaps = object["gaps"].as_array().unwrap();
    assert!(!gaps.is_empty());
    for gap in gaps {
        assert_eq!(gap["alternatives"].as_array().unwrap().len(), 2, "{gap}");
    }
    // Names without the sign; a reshape; a state's path; a module.
    assert!(
        run(&format!("{args} addmm_2"))
            .expect(0)
            .out
            .contains("instead: step")
    );
    assert!(
        run(&format!("{args} view_20"))
            .expect(0)
            .out
            .contains("shares the bytes")
    );
    assert!(
        run(&format!("{args} model.transformer.wpe.weight"))
            .expect(0)
            .out
            .contains("as a state")
    );
    assert!(
        run(&format!("{args} model.transformer.h.0.attn"))
            .expect(0)
            .out
            .contains("values")
    );
    run(&format!("{args} %addmm_2x"))
        .expect(2)
        .says(&["addmm_2"]);
    let removed = run(&format!("explain {} %flat --device test", mlp()))
        .expect(0)
        .out;
    assert!(
        removed.contains("not in the compiled step") && removed.contains("%a :"),
        "{removed}"
    );
    // A value that the compiler cut into rows is found by the model's name, its parts by their own
    // names.
    let head = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/filetests/loss/rows-in-turn.ir"
    );
    let cut = |name: &str| {
        run(&format!(
            "explain {head} --device test --loss-chunks 2 {name}"
        ))
        .expect(0)
        .out
    };
    let parts = cut("logits");
    assert!(
        parts.contains("logits: 2 values") && parts.contains("%logits.1"),
        "{parts}"
    );
    assert!(
        cut("logits.1").contains("%logits.1 = matmul"),
        "{}",
        cut("logits.1")
    );
}

#[test]
fn damaged_files_are_refused() {
    let folder = Folder::new("damaged");
    let whole = std::fs::read(model(GPT2)).unwrap();
    for n in [0, 1, 10, 1000, whole.len() / 2, whole.len() - 1] {
        let cut = folder.write("cut.pt2", &whole[..n]);
        run(&format!("plan {cut}")).expect(2).says(&["cut.pt2"]);
    }
    let wrong = folder.write(
        "wrong.ir",
        "graph g {\n  input %x : f32[4]\n  fwd - %y = relu %z : f32[4]\n}\n",
    );
    run(&format!("plan {wrong}")).expect(2).says(&["line 3"]);
    let unsound = folder.write(
        "unsound.ir",
        "graph g {\n  input  %x : f32[4]\n  output loss = %x\n  output loss = %x\n}\n",
    );
    run(&format!("plan {unsound}")).expect(2).says(&["error:"]);
}

#[test]
fn sizes_that_are_symbols_are_asked_for() {
    let dynamic = model("gpt2-dynbatch/joint_coarse.pt2");
    run(&format!("plan {dynamic}"))
        .expect(2)
        .says(&["s72", "--dim"]);
    let peak = |dim: &str| {
        run(&format!("plan {dynamic} --dim s72={dim} --json"))
            .expect(0)
            .json()[0]["planned_peak_bytes"]
            .as_u64()
            .unwrap()
    };
    assert!(peak("2") < peak("8"));
    run(&format!("plan {dynamic} --dim q=4"))
        .expect(2)
        .says(&["q"]);
    run(&format!("plan {} --dim q=4", mlp()))
        .expect(2)
        .says(&["q"]);
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let mut child = command(&format!("import {}", model(GPT2)))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 5];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let end = child.wait_with_output().unwrap();
    assert_eq!(&first, b"graph");
    assert!(end.status.success());
    assert!(
        end.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&end.stderr)
    );
}

#[test]
fn scratch_is_that_of_what_runs_the_kernels() {
    let folder = Folder::new("scratch");
    let graph = folder.write(
        "half.ir",
        "graph half {\n  input %x : bf16[64,64]\n  \
         fwd - %y = matmul %x, %x ta=false tb=false : bf16[64,64]\n  output y = %y\n}\n",
    );
    let dump = |device: &str| {
        let args = format!("plan {graph} --device {device} --dump-ir-after sync");
        let text = run(&args).expect(0).out;
        run(&format!("check {}", folder.write("dump.ir", &text))).expect(0);
        text
    };
    let (gpu, cpu) = (dump("h100"), dump("cpu"));
    assert!(
        gpu.contains("on h100 sm_90 {") && !gpu.contains(" scratch "),
        "{gpu}"
    );
    assert!(
        cpu.contains("on cpu {") && cpu.contains(" scratch "),
        "{cpu}"
    );
    // It is found at the peak, and explain knows it by its name there.
    let object = &run(&format!("plan {graph} --device cpu --json"))
        .expect(0)
        .json()[0];
    let tensors = object["peak_tensors"].as_array().unwrap();
    let scratch = tensors.iter().find(|tensor| tensor["class"] == "scratch");
    let name = scratch.expect("scratch at the peak")["name"].as_str();
    let explained = run(&format!("explain {graph} --device cpu {}", name.unwrap())).expect(0);
    assert!(
        explained.out.contains("is scratch memory"),
        "{}",
        explained.out
    );
}

#[test]
fn protrains_numbers_are_shown_and_taken() {
    let model = model("llama-tiny/joint_core.pt2");
    let plan = format!("plan {model} --optimizer adamw --device rtx3090 --budget 1GiB");
    let kept = run(&format!("{plan} --planner keep --json"))
        .expect(0)
        .json()
        .remove(0);
    assert_eq!(kept["protrain"], serde_json::Value::Null);
    let given = run(&format!("{plan} --protrain n_persist=0,n_ckpt=1 --json"))
        .expect(0)
        .json()
        .remove(0);
    assert_eq!(
        (&given["planner"], &given["found_by"]),
        (&"protrain".into(), &"protrain".into())
    );
    let told = &given["protrain"];
    assert_eq!(
        (&told["n_persist"], &told["n_ckpt"]),
        (&0.into(), &1.into())
    );
    let chunks = told["chunks"].as_str().unwrap();
    assert_eq!(chunks.len() as u64, told["n_chunk"].as_u64().unwrap());
    assert!(chunks.len() > 1 && !chunks.contains('P'), "{chunks}");
    assert_eq!(told["blocks"].as_str().unwrap().matches('R').count(), 1);
    let text = run(&format!("{plan} --protrain n_persist=0,n_ckpt=1"))
        .expect(0)
        .out;
    for words in [
        "protrain             n_persist=0,n_buffer=",
        "N_chunk",
        "N_interval",
        "by formula",
    ] {
        assert!(text.contains(words), "{words:?} should be in:\n{text}");
    }
    for (option, code, words) in [
        ("--protrain n_persist=x", 2, "n_persist=N"),
        ("--protrain n_ckpt=99", 2, "n_ckpt=99: the model has"),
        ("--protrain n_ckpt=0 --planner greedy", 2, "--planner"),
        (
            "--protrain n_ckpt=0 --budget 4KiB",
            3,
            "the smallest that fits",
        ),
    ] {
        let plan = format!("plan {model} --optimizer adamw --device rtx3090 {option}");
        run(&plan).expect(code).says(&[words]);
    }
}

#[test]
fn machines_are_compared() {
    let folder = Folder::new("fit");
    let toml = include_str!("../../../docs/mlp.toml");
    let small = folder.file("small.toml");
    let less = toml.replace("device_bytes = 1073741824", "device_bytes = 4096");
    assert_ne!(less, toml);
    std::fs::write(&small, less).unwrap();
    let model = mlp();
    let args = format!("fit {model} --optimizer sgd --device {small} --device h100");
    let found = run(&format!("{args} --json")).expect(0).json();
    let rows = found[0]["devices"].as_array().unwrap();
    // The one that fits is the first.
    assert_eq!(
        (&rows[0]["device"], &rows[0]["fits"]),
        (&"h100".into(), &true.into())
    );
    let plan = format!("plan {model} --optimizer sgd --device h100 --json");
    let plan = run(&plan).expect(0).json();
    for key in ["planned_peak_bytes", "predicted_ms", "swapped_bytes"] {
        assert_eq!(rows[0][key], plan[0][key], "{key}");
    }
    assert_eq!(rows[1]["fits"], false);
    assert!(4096 < rows[1]["smallest_feasible_bytes"].as_u64().unwrap());
    let text = run(&args).expect(0).out;
    assert!(text.contains("nothing: it needs"), "{text}");
    run(&format!("{args} --device nope"))
        .expect(2)
        .says(&["nope"]);
}

/// The table of lines has what each line adds. Together they explain the peak: the most bytes
/// before a line and during it are the lower bound of the plan, and what is in use after a line is
/// in use before the next.
#[test]
fn lines_say_what_they_add() {
    let folder = Folder::new("plan-lines");
    let table = folder.file("lines.csv");
    let model = model("gpt2-tiny/joint_core.pt2");
    for budget in ["100%", "60%"] {
        let plan = format!("plan {model} --optimizer adamw --device cpu --budget {budget}");
        let json = run(&format!("{plan} --lines {table} --json"))
            .expect(0)
            .json()
            .remove(0);
        let text = std::fs::read_to_string(&table).unwrap();
        let mut lines = text.lines();
        let head = lines.next().unwrap();
        assert!(
            head.contains("before_bytes,delta_bytes,after_bytes"),
            "{head}"
        );
        // The columns up to the module, which is quoted, and those behind it.
        let bytes = |line: &str| -> Vec<u64> {
            let (_, rest) = line.split_once("\",").unwrap();
            rest.split(',')
                .take(3)
                .map(|n| n.parse().unwrap())
                .collect()
        };
        let rows: Vec<Vec<u64>> = lines.map(bytes).collect();
        assert_eq!(rows.len() as u64, json["lines"].as_u64().unwrap());
        let most = rows.iter().map(|row| row[0] + row[1]).max();
        assert_eq!(most, json["lower_bound_bytes"].as_u64());
        for pair in rows.windows(2) {
            assert_eq!(pair[0][2], pair[1][0]);
        }
        assert!(rows.iter().any(|row| row[1] == 0) && rows.iter().any(|row| row[1] > 0));
    }
}
