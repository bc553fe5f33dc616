//! Evaluation on held-out batches between steps.

use crate::common::{Folder, Run, model, run};
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::BTreeMap;

const GPT2: &str = "gpt2-tiny/joint_core.pt2";

fn reference() -> String {
    model("gpt2-tiny/ref.safetensors")
}

fn train(rest: &str) -> String {
    format!(
        "train {} --optimizer adamw --kernels plain --batches {} {rest}",
        model(GPT2),
        reference()
    )
}

fn numbers(run: &Run, key: &str) -> Vec<f64> {
    let lines = run.json();
    let numbers = lines.iter().filter_map(|line: &Value| line[key].as_f64());
    numbers.collect()
}

/// Files with one batch of the reference each, whose tokens are moved by one: batches that no step
/// learns from.
fn held_out(folder: &Folder) -> (String, Vec<String>) {
    let bytes = std::fs::read(reference()).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let all = folder.file("held");
    std::fs::create_dir(&all).unwrap();
    let mut files = vec![];
    for k in 0..3 {
        let mut tensors = vec![];
        for name in ["input_ids", "labels"] {
            let view = file.tensor(&format!("batch.{k}.{name}")).unwrap();
            let mut data = view.data().to_vec();
            data.rotate_left(8);
            tensors.push((format!("batch.0.{name}"), view.shape().to_vec(), data));
        }
        let views = tensors.iter().map(|(name, shape, data)| {
            let view = crate::common::view(safetensors::Dtype::I64, shape.clone(), data);
            (name.as_str(), view)
        });
        let bytes = safetensors::serialize(views, None).unwrap();
        files.push(folder.write(&format!("held/{k}.safetensors"), bytes));
    }
    (all, files)
}

/// The loss of a batch with saved parameters, by the step that keeps everything.
fn loss_of(batch: &str, saved: &str, rest: &str) -> f64 {
    let args = format!(
        "train {} --optimizer adamw --kernels plain --batches {batch} --init {saved} --steps 1 \
         --planner keep --json {rest}",
        model(GPT2)
    );
    numbers(&run(&args).expect(0), "loss")[0]
}

#[test]
fn evaluation_has_the_bits_of_a_step_and_leaves_no_trace() {
    let folder = Folder::new("evaluation");
    let (held, files) = held_out(&folder);
    let saved = |name: &str| folder.file(&format!("{name}.safetensors"));
    for (n, plan) in [
        "--budget 100%",
        "--budget 25%",
        "--budget 25% --shuffle 7",
        "--budget 40% --update after --threads 3",
        "--planner protrain --budget 50%",
        "--budget 60% --micro-batches 3",
    ]
    .into_iter()
    .enumerate()
    {
        let (with, without) = (saved(&format!("with{n}")), saved(&format!("without{n}")));
        let rest = format!("--steps 5 --json {plan}");
        let plain = run(&train(&format!("{rest} --save {without}"))).expect(0);
        let evaluated = run(&train(&format!(
            "{rest} --save {with} --eval {held} --eval-every 2"
        )))
        .expect(0);
        assert_eq!(
            numbers(&plain, "loss"),
            numbers(&evaluated, "loss"),
            "{plan}"
        );
        let bytes = [&with, &without].map(|path| std::fs::read(path).unwrap());
        assert!(bytes[0] == bytes[1], "{plan}");

        let losses = numbers(&evaluated, "eval_loss");
        assert_eq!(losses.len(), 3, "{plan}");
        let each: Vec<f64> = match plan.contains("--micro-batches") {
            // A step's loss is that of all its micro-batches.
            true => vec![loss_of(&held, &with, "--micro-batches 3")],
            false => files.iter().map(|f| loss_of(f, &with, "")).collect(),
        };
        let mean = each.iter().sum::<f64>() / each.len() as f64;
        assert_eq!(losses[2], mean, "{plan}");
        assert_ne!(losses[0], losses[2]);
    }
}

#[test]
fn a_compiled_step_evaluates_too_and_all_batches_count() {
    let folder = Folder::new("evaluated-lit");
    let (held, files) = held_out(&folder);
    let lit = folder.file("s.lit");
    run(&format!(
        "compile {} --optimizer adamw --kernels plain --budget 50% -o {lit}",
        model(GPT2)
    ))
    .expect(0);
    let args = format!("train {lit} --batches {} --steps 2 --json", reference());
    let of = |data: &str| {
        let run = run(&format!("{args} --eval {data}")).expect(0);
        // Without --eval-every: after the last step.
        assert_eq!(run.json()[2]["step"], 2);
        numbers(&run, "eval_loss")
    };
    let all = of(&held);
    let each: Vec<f64> = files.iter().flat_map(|file| of(file)).collect();
    assert_eq!(all, [each.iter().sum::<f64>() / 3.0]);
    assert_eq!(
        of(&format!("{} {}", files[0], files[1])),
        [(each[0] + each[1]) / 2.0]
    );
    assert_eq!(of(&format!("{held} --eval-batches 1")), [each[0]]);
    let saved = folder.file("s.st");
    assert_eq!(of(&format!("{held} --eval-batches 99 --save {saved}")), all);
    // Without a step, the states are evaluated as they are.
    let alone = args.replace(
        "--steps 2",
        &format!("--steps 0 --init {saved} --eval {held}"),
    );
    assert_eq!(numbers(&run(&alone).expect(0), "eval_loss"), all);
}

#[test]
fn what_has_no_model_in_evaluation_is_refused() {
    let folder = Folder::new("not-evaluated");
    let refused = |args: &str, batches: &str, words: &[&str]| {
        let args = format!("train {args} --steps 1 --batches {batches} --eval {batches}");
        run(&args).expect(2).says(words);
    };
    // A compiled step is what it is.
    let of = |name: &str, batches: &str, words: &[&str]| {
        let (pt2, lit) = (
            model(&format!("{name}/joint_core.pt2")),
            folder.file("step.lit"),
        );
        run(&format!("compile {pt2} --kernels plain -o {lit}")).expect(0);
        refused(
            &format!("{lit} --trust"),
            &model(&format!("{name}/{batches}")),
            words,
        );
    };
    let words = ["--eval", "random numbers (rng)", "model.eval()"];
    of("dropout-tiny", "batches.safetensors", &words);
    let words = ["--eval", "bn1.running_mean", "batch norm", "model.eval()"];
    of("resnet-tiny", "ref.safetensors", &words);

    let values = vec![0.5; 4096];
    let batch = BTreeMap::from([("batch.0.x", (vec![64, 64], values))]);
    let batch = folder.write("b.safetensors", crate::common::tensors(batch));
    let noisy = folder.write("noisy.ir", NOISY);
    let noisy = format!("{noisy} --init normal:0.1 --optimizer sgd");
    refused(
        &noisy,
        &batch,
        &["--eval", "random numbers (rng)", "model.eval()"],
    );
    let gpt2 = format!("{} --micro-batches 5 --kernels plain", model(GPT2));
    refused(
        &gpt2,
        &reference(),
        &["--eval", "4 batches", "a step takes 5"],
    );
}

/// PyTorch's, of the module in eval mode, after each of four steps of AdamW.
const RESNET: [f64; 4] = [
    2.499096393585205,
    2.48374080657959,
    2.4717034101486206,
    2.4572415351867676,
];

#[test]
fn a_batch_norm_has_its_running_statistics() {
    let batches = model("resnet-tiny/ref.safetensors");
    for (kernels, rest) in [("plain", ""), ("generated", "--budget 60%")] {
        let args = format!(
            "train {} --kernels {kernels} {rest} --optimizer adamw --lr 1e-3 --batches {batches} \
             --steps 4 --json",
            model("resnet-tiny/joint_core.pt2")
        );
        let evaluated = run(&format!("{args} --eval {batches} --eval-every 1")).expect(0);
        let losses = numbers(&evaluated, "eval_loss");
        let near = losses
            .iter()
            .zip(RESNET)
            .all(|(a, b)| (a - b).abs() < 2e-6 * b);
        assert!(losses.len() == 4 && near, "{losses:?}");
        let alone = numbers(&run(&args).expect(0), "loss");
        assert_eq!(numbers(&evaluated, "loss"), alone);
    }
}

#[test]
fn buffers_that_stay_are_no_reason_to_refuse() {
    let batches = model("bert-tiny/ref.safetensors");
    let bert = model("bert-tiny/joint_core.pt2");
    for budget in ["100%", "30%"] {
        let args = format!("train {bert} --optimizer adamw --kernels plain --budget {budget}");
        let evaluated = run(&format!(
            "{args} --batches {batches} --eval {batches} --steps 1 --json"
        ))
        .expect(0);
        assert_eq!(numbers(&evaluated, "eval_loss").len(), 1);
    }
}

#[test]
fn a_run_ends_when_the_loss_on_held_out_data_stays() {
    let folder = Folder::new("patience");
    let (held, _) = held_out(&folder);
    let saved = folder.file("s.safetensors");
    let still = "--planner keep --lr 0 --weight-decay 0 --json";
    let patience = format!("--eval {held} --eval-every 2 --patience 3 --save {saved}");
    let ended = run(&train(&format!("{still} --steps 100 {patience}"))).expect(0);
    // The first evaluation, and three that are no lower.
    assert_eq!(numbers(&ended, "loss").len(), 8);
    assert_eq!(numbers(&ended, "eval_loss").len(), 4);
    ended.says_all(&[
        "ended after step 8",
        "has not fallen below",
        "3 evaluations",
    ]);
    assert!(std::path::Path::new(&saved).exists());
    run(&train("--steps 1 --patience 3"))
        .expect(2)
        .says(&["--eval-every"]);
}

#[test]
fn held_out_tokens_are_cut_like_those_for_training() {
    let folder = Folder::new("held-tokens");
    let tokens = |n: u16| -> Vec<u8> {
        let tokens = (0..n).map(|i| i.wrapping_mul(i) % 61);
        tokens.flat_map(u16::to_le_bytes).collect()
    };
    let (bin, held) = (
        folder.write("t.bin", tokens(300)),
        folder.write("h.bin", tokens(200)),
    );
    let gpt2 = model(GPT2);
    let args = format!("train {gpt2} --kernels plain --planner keep --steps 1 --json");
    let evaluated = run(&format!("{args} --tokens {bin} --eval {held}")).expect(0);
    // The batch of the step is the first held-out one; nothing is learned.
    let first = numbers(&evaluated, "loss");
    let only = run(&format!(
        "{args} --tokens {bin} --eval {held} --eval-batches 1"
    ))
    .expect(0);
    assert_eq!(numbers(&only, "eval_loss"), first);
    assert_ne!(numbers(&evaluated, "eval_loss"), first);
    let text = run(&args.replace(" --json", &format!(" --tokens {bin} --eval {held}"))).expect(0);
    assert!(text.out.contains("on 3 batches"), "{}", text.out);
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_an_evaluation_too() {
    use std::io::{BufRead, BufReader, Read};
    let folder = Folder::new("interrupted-evaluation");
    let saved = folder.file("s.safetensors");
    // Zeros that take no disk: millions of batches.
    let bin = folder.write("t.bin", [0; 256]);
    let file = std::fs::File::options().write(true).open(&bin).unwrap();
    file.set_len(1 << 30).unwrap();
    let args = format!(
        "train {} --kernels plain --planner keep --tokens {bin} --eval {bin} --eval-every 1 \
         --steps 9 --json --save {saved}",
        model(GPT2)
    );
    let command = crate::common::command(&args);
    let mut child = std::process::Command::new("env")
        .arg("--default-signal=INT")
        .arg(command.get_program())
        .args(command.get_args())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut first = String::new();
    out.read_line(&mut first).unwrap();
    assert!(first.contains("\"loss\""), "{first}");
    let kill = format!("kill -INT {}", child.id());
    let killed = std::process::Command::new("sh")
        .args(["-c", &kill])
        .status();
    assert!(killed.unwrap().success());
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(
        !rest.contains("eval_loss") && rest.contains("summary"),
        "{rest}"
    );
    assert!(std::path::Path::new(&saved).exists());
}

#[test]
fn a_model_in_eval_mode_has_the_parameters_of_the_one_that_learns() {
    let folder = Folder::new("eval-model");
    let (held, _) = held_out(&folder);
    let (lit, saved) = (folder.file("eval.lit"), folder.file("s.st"));
    let gpt2 = model(GPT2);
    run(&format!("compile {gpt2} --kernels plain -o {lit}")).expect(0);
    let of = |rest: &str| {
        let rest = format!("--budget 40% --steps 3 --json --save {saved} {rest}");
        let evaluated = run(&train(&format!("{rest} --eval {held} --eval-every 1"))).expect(0);
        let losses = ["loss", "eval_loss"].map(|key| numbers(&evaluated, key));
        (losses, std::fs::read(&saved).unwrap())
    };
    let same = of("");
    assert!(of(&format!("--eval-model {gpt2}")) == same);
    assert!(of(&format!("--eval-model {lit}")) == same);

    // Parameters that learn in halves are f32 in the other model. (A half between two numbers of
    // bf16 may be rounded differently: the first steps have none.)
    let in_bf16 =
        |rest: &str| of(&format!("--precision bf16 {rest} --eval-model {gpt2}")).0[1].clone();
    let (halves, whole) = (in_bf16("--master split"), in_bf16(""));
    assert_eq!(halves[..2], whole[..2]);
    assert_ne!(halves[..2], same.0[1][..2]);

    let llama = model("llama-tiny/joint_core.pt2");
    run(&train(&format!(
        "--planner keep --steps 1 --eval {held} --eval-model {llama}"
    )))
    .expect(2)
    .says(&["--eval-model", "is not in the model that is trained"]);
}

/// A layer whose results are multiplied by random numbers while it learns.
const NOISY: &str = r#"graph noisy {
  input  %x : f32[64,64]
  state  param %w : f32[64,64] "w"
  state  rng %rng -> %next : i64[2] "rng"
  fwd - %h = matmul %x, %w ta=false tb=false : f32[64,64]
  fwd - %noise = rand %rng dtype=f32 shape=[64,64] stream=0 : f32[64,64]
  fwd - %n = mul %h, %noise : f32[64,64]
  fwd - %loss = sum %n dims=[0,1] keepdim=false : f32[]
  bwd - %dw = matmul %x, %noise ta=true tb=false : f32[64,64]
  opt - %next = rng_next %rng : i64[2]
  output loss = %loss
  gradient "w" = %dw
}"#;

/// The same in eval mode.
const STILL: &str = r#"graph still {
  input  %x : f32[64,64]
  state  param %w : f32[64,64] "w"
  fwd - %h = matmul %x, %w ta=false tb=false : f32[64,64]
  fwd - %loss = sum %h dims=[0,1] keepdim=false : f32[]
  output loss = %loss
}"#;

/// A layer some of whose results are dropped while it learns.
fn dropping() -> String {
    let noise = NOISY
        .lines()
        .find(|line| line.contains("%noise ="))
        .unwrap();
    let product = NOISY.lines().find(|line| line.contains("%n =")).unwrap();
    let dropout = "fwd - %n, %noise = dropout %h, %rng p=0.3 stream=0 : f32[64,64], bool[64,64]";
    let backward = "bwd - %dn = full value=1.0 dtype=f32 shape=[64,64] : f32[64,64]
        bwd - %dh = dropout_bwd %dn, %noise scale=1.4285714285714286 : f32[64,64]";
    let text = NOISY.replace(noise, dropout).replace(product, "");
    let text = text.replace(
        "bwd - %dw = matmul %x, %noise",
        &format!("{backward}\n bwd - %dw = matmul %x, %dh"),
    );
    text.replace("graph noisy", "graph dropping")
}

#[test]
fn a_dropout_drops_nothing() {
    let folder = Folder::new("dropping");
    let dropping = folder.write("d.ir", dropping());
    is_evaluated_as_still(&folder, &dropping, "");
}

#[test]
fn a_model_may_have_another_in_eval_mode() {
    let folder = Folder::new("noisy");
    let (noisy, still) = (folder.write("n.ir", NOISY), folder.write("other.ir", STILL));
    is_evaluated_as_still(&folder, &noisy, &format!("--eval-model {still}"));
}

/// A model's held-out losses are those of [`STILL`] with its parameters, and it learns as without
/// evaluations.
fn is_evaluated_as_still(folder: &Folder, model: &str, rest: &str) {
    let still = folder.write("s.ir", STILL);
    let values = (0..4096).map(|i| (i % 13) as f32 / 13.0).collect();
    let batch = BTreeMap::from([("batch.0.x", (vec![64, 64], values))]);
    let batch = folder.write("b.safetensors", crate::common::tensors(batch));
    let saved = folder.file("saved.safetensors");
    let args = format!(
        "train {model} --optimizer sgd --lr 1e-4 --kernels plain --batches {batch} --init \
         normal:0.1 --steps 4 --json"
    );
    let evaluated = run(&format!(
        "{args} --save {saved} --eval {batch} {rest} --eval-every 2"
    ))
    .expect(0);
    assert_eq!(
        numbers(&evaluated, "loss"),
        numbers(&run(&args).expect(0), "loss")
    );
    let args = format!("train {still} --kernels plain --batches {batch} --init {saved}");
    let last = numbers(&run(&format!("{args} --steps 1 --json")).expect(0), "loss");
    let losses = numbers(&evaluated, "eval_loss");
    assert_eq!(losses[1..], last);
    assert!(losses[1] < losses[0]);
}

/// Configurations and adapters drop while they learn, and an evaluation has all of them: base
/// matrices in 4 bits, and a budget.
#[test]
fn adapters_with_dropout_are_evaluated_without() {
    let at = format!(
        "{}/../../tests/data/config/gpt2",
        env!("CARGO_MANIFEST_DIR")
    );
    let evaluated = |rest: &str| {
        let args = format!(
            "train {at}/dropout.json --dim batch=2 --dim sequence=12 --optimizer adamw --lr 1e-2 \
             --kernels plain --init {at}/model.safetensors --batches {at}/reference.safetensors \
             --eval {at}/reference.safetensors --json {rest}"
        );
        numbers(&run(&args).expect(0), "eval_loss")
    };
    for options in [
        "",
        "--add-lora r=2,dropout=0.5",
        "--add-lora r=2,dropout=0.5 --base nf4",
    ] {
        // Without dropout, the step that learns evaluates.
        let plain = options.replace(",dropout=0.5", "");
        let [first] = evaluated(&format!("{plain} --steps 0"))[..] else {
            panic!("an evaluation should have a loss")
        };
        let dropped = format!("{options} --dropout --budget 80%");
        assert_eq!(
            evaluated(&format!("{dropped} --steps 0")),
            [first],
            "{options}"
        );
        let learned = evaluated(&format!("{dropped} --steps 4"))[0];
        assert!(
            learned.is_finite() && learned != first,
            "{options}: {learned}, {first}"
        );
    }
}
