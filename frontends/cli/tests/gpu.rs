//! Steps that are compiled for a GPU, trained on a library in the driver's place.

use crate::checkpoints::contents;
use crate::common::{Folder, Run, mlp, run, run_with, tensors, view};
use standin::{Options, Standin};
use std::collections::BTreeMap;
use std::path::Path;

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

/// Where cuBLASLt is, `train` says so, and keeps its choices beside the compiled step. A library
/// that is named must be there.
#[test]
fn evaluation_on_a_gpu_has_the_bits_of_a_step_and_leaves_no_trace() {
    let files = Files::new("gpu-evaluation");
    let lit = files.compile("g.lit", "");
    let standin = Standin::new(&Options::default()).unwrap();
    let driver = ("LIGHTERAGE_CUDA", standin.path().to_str().unwrap());
    let saved = ["with.st", "without.st"].map(|name| files.folder.file(name));
    let batches = &files.batches;
    let run = |rest: &str| {
        let args = files.train(&lit, &format!("--json {rest}"));
        run_with(&args, &[driver])
    };
    let with = format!("--save {} --eval {batches} --eval-every 1", saved[0]);
    let evaluated = run(&with).expect(0);
    let plain = run(&format!("--save {}", saved[1])).expect(0);
    assert_eq!(losses(&evaluated), losses(&plain));
    let bytes = saved.each_ref().map(|path| std::fs::read(path).unwrap());
    assert!(bytes[0] == bytes[1]);

    let lines = evaluated.json();
    let evaluated: Vec<f64> = lines
        .iter()
        .filter_map(|l| l["eval_loss"].as_f64())
        .collect();
    // The batch is that of all steps: its loss before the second one is the step's.
    assert_eq!(evaluated[0], losses(&plain)[1]);
    let args = format!(
        "train {lit} --batches {batches} --init {} --steps 1 --json",
        saved[0]
    );
    let next = run_with(&args, &[driver]).expect(0);
    assert_eq!(evaluated[1], losses(&next)[0]);

    let graphs = ("LIGHTERAGE_CUDA_GRAPHS", "1");
    run_with(&files.train(&lit, &with), &[driver, graphs])
        .expect(2)
        .says(&["LIGHTERAGE_CUDA_GRAPHS"]);
}

#[test]
fn a_run_on_a_gpu_goes_on_from_a_checkpoint_there_and_on_the_processor() {
    let files = Files::new("gpu-checkpoints");
    let [gpu, cpu] =
        [("g.lit", ""), ("c.lit", "--target cpu")].map(|(name, rest)| files.compile(name, rest));
    let standin = Standin::new(&Options::default()).unwrap();
    let driver = ("LIGHTERAGE_CUDA", standin.path().to_str().unwrap());
    let whole = files.folder.file("whole");
    let train = files.train(&gpu, &format!("--checkpoints {whole} --save-every 1"));
    run_with(&train, &[driver]).expect(0);
    for (name, lit) in [("gpu", &gpu), ("cpu", &cpu)] {
        let folder = files.folder.file(name);
        let (from, to) = [&whole, &folder]
            .map(|f| Path::new(f).join("step-00000001"))
            .into();
        std::fs::create_dir_all(&to).unwrap();
        for file in std::fs::read_dir(&from).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
        let train = files.train(lit, &format!("--checkpoints {folder} --resume {folder}"));
        run_with(&train, &[driver])
            .expect(0)
            .says(&["after step 1"]);
        let of = |folder: &str| contents(&Path::new(folder).join("step-00000002"));
        // Sums of a processor may be rounded otherwise.
        assert!(name == "cpu" || of(&folder) == of(&whole));
    }
}

#[test]
fn products_by_the_library_train_the_same() {
    let files = Files::new("gpu-products");
    let step = files.compile("p.lit", "");
    let standin = Standin::new(&Options::default()).unwrap();
    let path = standin.path().to_str().unwrap();
    let (driver, library) = (("LIGHTERAGE_CUDA", path), ("LIGHTERAGE_CUBLASLT", path));
    let ours = losses(&run_with(&files.train(&step, "--json"), &[driver]).expect(0));

    let command = files.train(&step, "--json");
    let first = run_with(&command, &[driver, library]).expect(0);
    assert!(
        first.err.contains("note: cuBLASLt 130100 of"),
        "{}",
        first.err
    );
    let choices = std::fs::read_to_string(format!("{step}.algorithms")).unwrap();
    assert!(
        choices.starts_with("cublaslt 130100 stand-in\nF32-F32-"),
        "{choices}"
    );
    let theirs = losses(&first);
    for (ours, theirs) in ours.iter().zip(&theirs) {
        let near = 1e-5 * theirs.abs().max(1.0);
        assert!((ours - theirs).abs() < near, "{ours} should be {theirs}");
    }
    let again = run_with(&command, &[driver, library]).expect(0);
    assert_eq!(losses(&again), theirs);

    let missing = ("LIGHTERAGE_CUBLASLT", "/nowhere/libcublasLt.so.13");
    let refused = run_with(&command, &[driver, missing]).expect(2).err;
    assert!(
        refused.contains("/nowhere/libcublasLt.so.13: "),
        "{refused}"
    );
    assert!(refused.contains("LIGHTERAGE_CUBLASLT=0"), "{refused}");
}

/// `train --device cuda` plans for the GPU that is there, and runs there: a text graph with the
/// losses of the processor, at any budget, and says what the plan does not count.
/// With `--precision tf32` the file says so, and the library is asked for it; a profile has no such
/// times.
#[test]
fn tf32_is_an_option_of_the_step() {
    let files = Files::new("gpu-tf32");
    let [exact, rounded] = [("e.lit", ""), ("r.lit", "--precision tf32")]
        .map(|(name, rest)| files.compile(name, rest));
    let about = |step: &str| run(&format!("inspect {step} --json")).expect(0).json()[0].clone();
    assert_eq!(
        (&about(&exact)["tf32"], &about(&rounded)["tf32"]),
        (&false.into(), &true.into())
    );
    let text = run(&format!("inspect {rounded}")).expect(0).out;
    assert!(text.contains("may be rounded to TF32"), "{text}");

    let standin = Standin::new(&Options::default()).unwrap();
    let path = standin.path().to_str().unwrap();
    let (driver, library) = (("LIGHTERAGE_CUDA", path), ("LIGHTERAGE_CUBLASLT", path));
    let theirs = losses(&run_with(&files.train(&rounded, "--json"), &[driver, library]).expect(0));
    let choices = std::fs::read_to_string(format!("{rounded}.algorithms")).unwrap();
    assert!(
        choices.lines().skip(1).all(|line| line.contains("-tf32 ")),
        "{choices}"
    );
    let ours = losses(&run_with(&files.train(&rounded, "--json"), &[driver]).expect(0));
    let exact = losses(&run_with(&files.train(&exact, "--json"), &[driver]).expect(0));
    let apart = |a: &[f64], b: &[f64]| (a[0] - b[0]).abs() / b[0].abs();
    assert!(apart(&ours, &theirs) < 1e-6, "{ours:?}, {theirs:?}");
    assert!(
        (1e-9..1e-2).contains(&apart(&ours, &exact)),
        "{ours:?}, {exact:?}"
    );

    // A processor has no TF32, so its step is that of f32.
    let step = files.compile("c.lit", "--precision tf32 --target cpu");
    assert_eq!(about(&step)["tf32"], false);
    let profile = files.folder.write("p.prof", "");
    let graph = &files.graph;
    let refused = run(&format!(
        "plan {graph} --device h100 --precision tf32 --profile {profile}"
    ));
    assert!(
        refused
            .expect(2)
            .err
            .contains("--precision tf32: the products that --profile measured")
    );
}

/// Without cuBLASLt, `train` says what computes products, and why.
#[test]
fn without_the_library_train_says_why() {
    let files = Files::new("gpu-no-library");
    let step = files.compile("n.lit", "");
    let standin = Standin::new(&Options::default()).unwrap();
    // The driver is found by its name. What is found as the library is none.
    let folder = files.folder.file("found");
    std::fs::create_dir(&folder).unwrap();
    std::fs::copy(standin.path(), format!("{folder}/libcuda.so.1")).unwrap();
    for name in ["libcublasLt.so.13", "libcublasLt.so.12"] {
        std::fs::write(format!("{folder}/{name}"), "").unwrap();
    }
    let found = [("LD_LIBRARY_PATH", folder.as_str())];
    let said = run_with(&files.train(&step, ""), &found).expect(0).err;
    let note = "note: products run on kernels of Lighterage, which are slower than cuBLASLt's: ";
    assert!(
        said.contains(note) && said.contains("libcublasLt.so.13"),
        "{said}"
    );
}

#[test]
fn a_model_trains_on_the_gpu_that_is_there() {
    let files = Files::new("gpu-here");
    let standin = Standin::new(&Options::default()).unwrap();
    let driver = ("LIGHTERAGE_CUDA", standin.path().to_str().unwrap());
    let train = |device: &str, rest: &str| {
        let options = format!("--optimizer adamw {device} {rest} --json");
        run_with(&files.train(&files.graph, &options), &[driver]).expect(0)
    };
    let whole = train("--device cuda", "");
    whole.says_all(&[
        "cuda:0 is stand-in",
        "times are those of h",
        "beside the plan",
        "copies to the host and from it run at",
    ]);
    let tight = train("--device cuda:0", "--budget 60%");
    let cpu = train("", "");
    assert_eq!(losses(&whole), losses(&tight));
    for (ours, theirs) in losses(&whole).iter().zip(&losses(&cpu)) {
        let near = 1e-4 * theirs.abs().max(1.0);
        assert!((ours - theirs).abs() < near, "{ours} should be {theirs}");
    }
    // A compiled step says where it runs as well.
    let lit = files.compile("g.lit", "");
    let chosen = files.train(&lit, "--device cuda:0");
    run_with(&chosen, &[driver]).expect(0);
    let cpu = files.compile("c.lit", "--target cpu");
    let refused = files.train(&cpu, "--device cuda:0");
    run_with(&refused, &[driver]).expect(2).says(&["--device"]);
}

/// What `--device cuda` needs and this machine lacks is told in one line.
#[test]
fn without_a_gpu_there_is_none_to_plan_for() {
    let files = Files::new("gpu-nowhere");
    let standin = Standin::new(&Options::default()).unwrap();
    let driver = ("LIGHTERAGE_CUDA", standin.path().to_str().unwrap());
    let missing = ("LIGHTERAGE_CUDA", "/nowhere/libcuda.so.1");
    let refused = |device: &str, variables: &[(&str, &str)], words: &[&str]| {
        let args = files.train(&files.graph, &format!("--device {device}"));
        let run = run_with(&args, variables).expect(2).says(words);
        assert_eq!(run.err.trim_end().lines().count(), 1, "{}", run.err);
    };
    refused(
        "cuda",
        &[missing],
        &["--device cuda:0", "/nowhere/libcuda.so.1"],
    );
    refused("cuda:1", &[driver], &["this machine has 1 GPUs"]);
    refused("cuda:x", &[driver], &["cuda:0 is the first GPU"]);
    refused(
        "cuda",
        &[driver, ("STANDIN_SM", "75")],
        &["no kernels", "sm_75"],
    );
    let plan = format!("plan {} --optimizer adamw --device cuda", files.graph);
    let text = run_with(&plan, &[driver]).expect(0).out;
    assert!(text.contains("64.0 MiB"), "{text}");
}

/// A trace of a GPU's run has the form of a processor's: what each stream of the device ran, by the
/// device's clock.
#[test]
fn a_trace_tells_what_the_device_ran() {
    let files = Files::new("gpu-trace");
    let gpu = files.compile("g.lit", "");
    let standin = Standin::new(&Options::default()).unwrap();
    let driver = ("LIGHTERAGE_CUDA", standin.path().to_str().unwrap());
    let trace = files.folder.file("t.json");
    run_with(&files.train(&gpu, &format!("--trace {trace}")), &[driver]).expect(0);
    let text = std::fs::read_to_string(&trace).unwrap();
    let all: serde_json::Value = serde_json::from_str(&text).unwrap();
    let events = all["traceEvents"].as_array().unwrap();
    let names = events.iter().filter(|event| event["ph"] == "M");
    let streams: BTreeMap<&str, &serde_json::Value> = names
        .map(|event| (event["args"]["name"].as_str().unwrap(), &event["tid"]))
        .collect();
    for stream in ["compute", "h2d", "d2h"] {
        let own = events.iter().filter(|event| {
            let is_work = event["ph"] == "X" && event["cat"] != "wait";
            is_work && event["tid"] == *streams[stream]
        });
        // The stand-in's clock counts commands, of which a start and an end are two.
        let times: Vec<f64> = own.map(|event| event["dur"].as_f64().unwrap()).collect();
        assert!(times.len() > 2, "{stream}: {times:?}");
        assert!(
            times.iter().all(|&micros| micros >= 1.9),
            "{stream}: {times:?}"
        );
    }
}

/// A token that the table does not have ends training with the processor's error.
#[test]
fn a_wrong_index_is_named() {
    let folder = Folder::new("gpu-index");
    let graph = folder.write("g.ir", EMBEDDING);
    let indices: Vec<u8> = [1i64, 9, 3].iter().flat_map(|i| i.to_le_bytes()).collect();
    let view = view(safetensors::Dtype::I64, vec![3], &indices);
    let batch = safetensors::serialize([("batch.0.i", view)], None).unwrap();
    let batches = folder.write("b.st", batch);
    let standin = Standin::new(&Options::default()).unwrap();
    let driver = ("LIGHTERAGE_CUDA", standin.path().to_str().unwrap());
    let error = |name: &str, rest: &str| {
        let lit = folder.file(name);
        run(&format!(
            "compile {graph} --optimizer sgd --device h100 {rest} -o {lit}"
        ))
        .expect(0);
        let args = format!("train {lit} --batches {batches} --init normal:0.1 --steps 1 --lr 0.1");
        let run = run_with(&args, &[driver]).expect(2);
        run.says(&["embedding: index 9 is not in 0..8"]).err
    };
    assert_eq!(error("g.lit", ""), error("c.lit", "--target cpu"));
}

const EMBEDDING: &str = r#"
graph table {
  input  %i : i64[3]
  state  param  %w : f32[8,4] "w"
  fwd words      %x = embedding %w, %i padding=-1 : f32[3,4]
  fwd -          %loss = sum %x dims=[0,1] keepdim=false : f32[]
  bwd -          %dx = full dtype=f32 shape=[3,4] value=1.0 : f32[3,4]
  bwd words      %dw = embedding_bwd %dx, %i padding=-1 rows=8 : f32[8,4]
  output loss = %loss
  gradient "w" = %dw
}
"#;

/// A fault of the device is no mistake of the user: exit code 1, and one line.
#[test]
fn a_fault_of_the_device_is_told_in_one_line() {
    let files = Files::new("gpu-fault");
    let gpu = files.compile("g.lit", "");
    let standin = Standin::new(&Options::default()).unwrap();
    let variables = [
        ("LIGHTERAGE_CUDA", standin.path().to_str().unwrap()),
        ("STANDIN_FAIL_AT", "400"),
        ("STANDIN_FAIL_WITH", "700"),
    ];
    let args = files.train(&gpu, "").replace("--steps 2", "--steps 20");
    let run = run_with(&args, &variables)
        .expect(1)
        .says(&["line ", "CUDA_ERROR_ILLEGAL_ADDRESS (700)"]);
    assert_eq!(run.err.trim_end().lines().count(), 1, "{}", run.err);
}

/// The command needs no newer GLIBC than docs/cuda.md says: a machine with a GPU may be older than
/// the one that built it.
#[test]
fn the_command_runs_on_older_systems() {
    let bytes = std::fs::read(env!("CARGO_BIN_EXE_lighterage")).unwrap();
    let version = |at: usize| {
        let text = &bytes[at + NEEDS.len()..];
        let digits = text.iter().take_while(|byte| byte.is_ascii_digit());
        let digits = digits.fold(0u32, |n, byte| 10 * n + u32::from(byte - b'0'));
        // Other texts may begin like this.
        (digits > 0).then_some(digits)
    };
    const NEEDS: &[u8] = b"\0GLIBC_2.";
    let starts = bytes.windows(NEEDS.len()).enumerate();
    let starts = starts.filter(|(_, window)| *window == NEEDS);
    let newest = starts.filter_map(|(at, _)| version(at)).max();
    assert!(
        newest.is_some_and(|minor| minor <= 34),
        "GLIBC 2.{newest:?}"
    );
}

/// A profile of a GPU has the same form as a processor's, and plans for that GPU take it.
#[test]
fn a_gpu_is_profiled() {
    let files = Files::new("gpu-profile");
    let standin = Standin::new(&Options::default()).unwrap();
    let driver = ("LIGHTERAGE_CUDA", standin.path().to_str().unwrap());
    let profile = files.folder.file("g.prof");
    let args = format!(
        "profile {} --device cuda:0 --repeat 2 -o {profile} --json",
        files.graph
    );
    let json = &run_with(&args, &[driver]).expect(0).json()[0];
    let positive = |name: &str| json[name].as_f64().is_some_and(|x| x > 0.0);
    for name in [
        "step_ms",
        "distinct_ops",
        "copy_bytes_per_second",
        "host_bytes_per_second",
    ] {
        assert!(positive(name), "{name}: {json}");
    }
    for name in ["in_bytes_per_second", "out_bytes_per_second", "copy_us"] {
        assert!(
            json["link"][name].as_f64().is_some_and(|x| x > 0.0),
            "{name}: {json}"
        );
    }
    assert_eq!(json["refused"], serde_json::json!({}));
    let text = std::fs::read_to_string(&profile).unwrap();
    assert!(
        text.contains("matmul") && !text.contains("host_micros"),
        "{text}"
    );
    let plan = format!(
        "plan {} --optimizer adamw --device cuda --profile {profile}",
        files.graph
    );
    let planned = run_with(&plan, &[driver]).expect(0);
    assert!(!planned.err.contains("guessed"), "{}", planned.err);
    // A profile in another precision has that precision's ops.
    let half = format!("{} --precision bf16", files.graph);
    let args = format!("profile {half} --device cuda:0 --repeat 2 -o {profile}");
    run_with(&args, &[driver]).expect(0);
    let plan = format!("plan {half} --optimizer adamw --device cuda --profile {profile}");
    let planned = run_with(&plan, &[driver]).expect(0);
    assert!(!planned.err.contains("guessed"), "{}", planned.err);
    for (option, word) in [("--kernels plain", "--kernels"), ("--link 1GB/s", "--link")] {
        let args = format!(
            "profile {} --device cuda {option} -o {profile}",
            files.graph
        );
        run_with(&args, &[driver]).expect(2).says(&[word]);
    }
}

/// A call that fails while the machine is measured ends the profile: the rate of a load that failed
/// would be that of a slow machine.
#[test]
fn a_load_that_fails_is_no_slow_load() {
    let files = Files::new("gpu-profile-fails");
    let standin = Standin::new(&Options::default()).unwrap();
    let profile = files.folder.file("g.prof");
    let args = format!(
        "profile {} --device cuda:0 --repeat 2 -o {profile}",
        files.graph
    );
    for call in ["1700", "5000"] {
        let variables = [
            ("LIGHTERAGE_CUDA", standin.path().to_str().unwrap()),
            ("STANDIN_FAIL_AT", call),
            ("STANDIN_FAIL_WITH", "700"),
            // Only that call: those after it work again.
            ("STANDIN_STICKY", "0"),
        ];
        run_with(&args, &variables)
            .expect(1)
            .says(&["CUDA_ERROR_ILLEGAL_ADDRESS (700)"]);
        assert!(!std::path::Path::new(&profile).exists());
    }
}

/// What a machine with a GPU is asked, asked of the library in the driver's place.
#[test]
fn the_script_for_a_machine_with_a_gpu_runs() {
    let folder = Folder::new("gpu-script");
    let standin = Standin::new(&Options::default()).unwrap();
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/gpu.sh");
    let out = folder.file("gpu.json");
    let done = std::process::Command::new("sh")
        .arg(script)
        .args(["--dry", &out])
        .env("GPU_FOLDER", folder.file("carried"))
        .env("LIGHTERAGE", env!("CARGO_BIN_EXE_lighterage"))
        .env("STANDIN", standin.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned();
    assert!(done.status.success(), "{said}");
    let text = std::fs::read_to_string(&out).unwrap();
    let all: serde_json::Value = serde_json::from_str(&text).unwrap();
    let sections = all["sections"].as_object().unwrap();
    for name in ["machine", "tiny", "large", "link", "profile", "faults"] {
        let section = &sections[name];
        let ran = section.get("error").is_none() && section.get("skipped").is_none();
        assert!(ran, "{name}: {section}\n{said}");
    }
}

/// A device that does not go on ends the process with an error that names a line.
#[test]
fn a_stuck_device_ends_the_process() {
    let files = Files::new("gpu-stuck");
    let gpu = files.compile("g.lit", "");
    let standin = Standin::new(&Options::default()).unwrap();
    let variables = [
        ("LIGHTERAGE_CUDA", standin.path().to_str().unwrap()),
        ("LIGHTERAGE_CUDA_TIMEOUT", "0.5"),
        ("STANDIN_HANG_AT", "200"),
    ];
    let args = files.train(&gpu, "").replace("--steps 2", "--steps 20");
    let run = run_with(&args, &variables).expect(1);
    run.says(&[
        "line ",
        "has not finished a command",
        "LIGHTERAGE_CUDA_TIMEOUT",
    ]);
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
