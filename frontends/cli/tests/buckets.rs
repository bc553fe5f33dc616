//! `--buckets`: steps for batches of several sizes on one memory and one set of states.

use crate::common::{Folder, Run, floats, model, run, view};
use safetensors::Dtype;
use std::collections::BTreeSet;

/// A file with batches of GPT-2: a number of rows for each.
fn batches(folder: &Folder, name: &str, rows: &[usize]) -> String {
    let mut number = 7_i64;
    let mut ids = |rows: usize| -> Vec<u8> {
        let mut next = || {
            number = number * 48_271 % 2_147_483_647;
            (number % 64).to_le_bytes()
        };
        (0..rows * 32).flat_map(|_| next()).collect()
    };
    let all: Vec<(String, usize, Vec<u8>)> = rows
        .iter()
        .enumerate()
        .flat_map(|(k, &rows)| {
            let bytes = ids(rows);
            ["input_ids", "labels"].map(|input| (format!("batch.{k}.{input}"), rows, bytes.clone()))
        })
        .collect();
    let views = all.iter().map(|(name, rows, bytes)| {
        let tensor = view(Dtype::I64, vec![*rows, 32], bytes);
        (name.as_str(), tensor)
    });
    folder.write(name, safetensors::serialize(views, None).unwrap())
}

const HOW: &str = "--optimizer adamw --kernels plain --json";

/// The losses of a run, and its summary.
fn losses(args: &str) -> (Vec<f64>, serde_json::Value) {
    let lines = run(args).expect(0).json();
    let loss = |line: &serde_json::Value| line["loss"].as_f64();
    let summary = lines.last().unwrap()["summary"].clone();
    (lines.iter().filter_map(loss).collect(), summary)
}

#[test]
fn steps_of_several_sizes_have_the_bits_of_separate_runs() {
    let folder = Folder::new("buckets");
    let dynamic = model("gpt2-dynbatch/joint_coarse.pt2");
    let sizes = [16, 4, 8, 8, 16, 4];
    let data = batches(&folder, "all.safetensors", &sizes);
    let start = folder.file("start.safetensors");
    run(&format!(
        "train {dynamic} --dim s72=4 {HOW} --steps 0 --init normal:0.02 --seed 3 --batches {} \
         --save {start}",
        batches(&folder, "four.safetensors", &[4])
    ))
    .expect(0);

    // Each step in a run of its own, which gets its states from a file.
    let (mut states, mut apart) = (start.clone(), vec![]);
    for (k, &size) in sizes.iter().enumerate() {
        let next = folder.file(&format!("after{k}.safetensors"));
        // The whole file has the numbers that this batch has in it.
        let one = one_of(&folder, &data, k);
        let (loss, _) = losses(&format!(
            "train {dynamic} --dim s72={size} {HOW} --steps 1 --init {states} --batches {one} \
             --save {next}"
        ));
        apart.extend(loss);
        states = next;
    }

    for (budget, options) in [("100%", ""), ("40%", ""), ("33%", "--shuffle 5")] {
        let end = folder.file("end.safetensors");
        let (together, summary) = losses(&format!(
            "train {dynamic} --buckets s72=8,16,4 {HOW} --budget {budget} --steps 6 --init {start} \
             --batches {data} --save {end} {options}"
        ));
        assert_eq!(together, apart, "{budget}");
        assert_eq!(
            std::fs::read(&end).unwrap(),
            std::fs::read(&states).unwrap()
        );
        assert_eq!(
            summary["measured_peak_bytes"],
            summary["planned_peak_bytes"]
        );
        assert_eq!(summary["padding"], 0.0);
        // The peak is that of the largest step alone.
        let plan = |how: &str| {
            let args = format!(
                "plan {dynamic} {how} --optimizer adamw --kernels plain --json --budget {budget}"
            );
            run(&args).expect(0).json()[0].clone()
        };
        let (largest, all) = (plan("--dim s72=16"), plan("--buckets 4,8,16"));
        assert_eq!(largest["planned_peak_bytes"], summary["planned_peak_bytes"]);
        let peaks = all["buckets"].as_array().unwrap();
        let peaks: Vec<u64> = peaks
            .iter()
            .map(|bucket| bucket["planned_peak_bytes"].as_u64().unwrap())
            .collect();
        assert_eq!(peaks.len(), 3);
        assert!(peaks[1..].iter().all(|&peak| peak <= peaks[0]), "{peaks:?}");
    }
}

/// A file with batch `k` of another as its only one.
fn one_of(folder: &Folder, data: &str, k: usize) -> String {
    let bytes = std::fs::read(data).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensors = ["input_ids", "labels"].map(|input| {
        let tensor = file.tensor(&format!("batch.{k}.{input}")).unwrap();
        (format!("batch.0.{input}"), tensor)
    });
    folder.write(
        "one.safetensors",
        safetensors::serialize(tensors, None).unwrap(),
    )
}

#[test]
fn a_smaller_batch_is_filled_and_what_is_filled_does_not_count() {
    let folder = Folder::new("buckets-fill");
    let dynamic = model("gpt2-dynbatch/joint_coarse.pt2");
    let data = batches(&folder, "all.safetensors", &[5, 3]);
    let step = folder.file("step.lit");
    run(&format!(
        "compile {dynamic} --buckets 8,4 --optimizer adamw --kernels plain --budget 50% -o {step}"
    ))
    .expect(0);
    run(&format!("inspect {step}")).expect(0);
    let (filled, summary) = losses(&format!(
        "train {step} --json --steps 2 --init normal:0.02 --batches {data}"
    ));
    assert_eq!(summary["padding"].as_f64(), Some(4.0 / 12.0));
    let one = one_of(&folder, &data, 0);
    let (exact, _) = losses(&format!(
        "train {dynamic} --dim s72=5 {HOW} --steps 1 --init normal:0.02 --batches {one}"
    ));
    assert!((filled[0] - exact[0]).abs() < 1e-5, "{filled:?} {exact:?}");
    // Held-out batches are filled in the same way.
    let eval = run(&format!(
        "train {step} --json --steps 0 --init normal:0.02 --batches {data} --eval {one}"
    ))
    .expect(0);
    assert_eq!(eval.json()[0]["eval_loss"].as_f64(), Some(filled[0]));

    let large = batches(&folder, "large.safetensors", &[9]);
    run(&format!(
        "train {step} --steps 1 --init normal:0.02 --batches {large}"
    ))
    .expect(2)
    .says(&["batch.0.input_ids", "or smaller"]);
    run(&format!(
        "train {step} --buckets 4 --steps 1 --batches {data}"
    ))
    .expect(2)
    .says(&["--buckets", "compiled already"]);
    let fixed = model("gpt2-tiny/joint_core.pt2");
    run(&format!("plan {fixed} --buckets 4,8"))
        .expect(2)
        .says(&["it has no symbolic size"]);
}

#[test]
fn a_model_in_eval_mode_has_the_sizes_too_and_a_trace_has_all_steps() {
    let folder = Folder::new("buckets-eval");
    let dynamic = model("gpt2-dynbatch/joint_coarse.pt2");
    let data = batches(&folder, "all.safetensors", &[16, 4, 8, 4]);
    let (lit, trace) = (folder.file("eval.lit"), folder.file("trace.json"));
    run(&format!(
        "compile {dynamic} --buckets 16,8,4 --kernels plain -o {lit}"
    ))
    .expect(0);
    let how = format!(
        "train {dynamic} --buckets 16,8,4 {HOW} --steps 4 --init normal:0.02 --batches {data} \
         --eval {data} --eval-every 2"
    );
    let of = |rest: &str| {
        let lines = run(&format!("{how} {rest}")).expect(0).json();
        let numbers = |key: &str| -> Vec<f64> {
            lines.iter().filter_map(|line| line[key].as_f64()).collect()
        };
        (numbers("loss"), numbers("eval_loss"))
    };
    let own = of("");
    assert_eq!((own.0.len(), own.1.len()), (4, 2));
    assert_eq!(of(&format!("--eval-model {dynamic} --trace {trace}")), own);
    assert_eq!(of(&format!("--eval-model {lit}")), own);

    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let spans = events.iter().filter(|event| event["ph"] == "X");
    let steps: BTreeSet<(u64, u64)> = spans
        .map(|span| (&span["pid"], &span["args"]["step"]))
        .map(|(process, step)| (process.as_u64().unwrap(), step.as_u64().unwrap()))
        .collect();
    // The smallest runs twice.
    assert_eq!(steps, BTreeSet::from([(0, 1), (1, 1), (2, 1), (2, 2)]));
    let mut names = events
        .iter()
        .filter(|event| event["name"] == "process_name");
    assert!(names.any(|event| {
        let name = event["args"]["name"].as_str().unwrap();
        name.contains("input_ids [8, 32]")
    }));
}

#[test]
fn documents_have_rows_of_the_smallest_size_that_holds_them() {
    let folder = Folder::new("buckets-documents");
    let config = folder.write(
        "config.json",
        r#"{"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32,
            "vocab_size": 32}"#,
    );
    // Two documents of 3 tokens, two of 7, one of 8, three of 20.
    let lengths = [3, 20, 7, 3, 8, 20, 7, 20];
    let tokens: Vec<u8> = lengths
        .iter()
        .flat_map(|&n| (1..n).map(|i| i % 31 + 1).chain([0]))
        .flat_map(|token: u16| token.to_le_bytes())
        .collect();
    let tokens = folder.write("tokens.bin", tokens);
    let train_rows = |rows: u64, more: &str| {
        run(&format!(
            "train {config} --dim batch={rows} --optimizer adamw --kernels plain --json --steps 4 \
             --init normal:0.02 --tokens {tokens} {more}"
        ))
    };
    let train = |more: &str| train_rows(2, more);
    // Batches of [3, 3], [7, 7], [8, 20] and [20, 20], in rows of 4, 8 and 32.
    let run = train("--buckets 4,8,32 --documents 0").expect(0);
    assert_eq!(run.json().len(), 5);
    let all = 2.0 * (4 + 8 + 32 + 32) as f64;
    let share = 100.0 * (all - 88.0) / all;
    let words = format!("8 documents in 4 batches of 2, {share:.1} % padding");
    let run = run.says(&[&words]);
    let summary = &run.json()[4]["summary"];
    assert_eq!(
        summary["measured_peak_bytes"],
        summary["planned_peak_bytes"]
    );

    // The number of micro-batches that is best for the largest is that of all.
    let losses = |run: Run| -> Vec<f64> {
        let lines = run.expect(0).json();
        lines
            .iter()
            .filter_map(|line| line["loss"].as_f64())
            .collect()
    };
    let cut = "--buckets 4,8,32 --documents 0 --budget 60% --micro-batches";
    let chosen = train(&format!("{cut} auto")).expect(0);
    let (n, rows) = match chosen.err.contains("micro-batches: 1 of 2") {
        true => (1, 2),
        false => (2, 1),
    };
    chosen.says_all(&[&format!("micro-batches: {n} of {rows}")]);
    let given = train_rows(rows, &format!("{cut} {n}"));
    assert_eq!(losses(chosen), losses(given));

    train("--buckets 4,8,32").expect(2).says(&["--documents"]);
    train("--buckets a=4,8 --documents 0")
        .expect(2)
        .says(&["a"]);
    train("--buckets 4,0").expect(2).says(&["NAME=SIZE"]);
    train("--buckets sequence=8 --dim sequence=8")
        .expect(2)
        .says(&["sequence"]);
}

/// A row of several documents computes what a row for each computes: loss and gradients.
#[test]
fn documents_of_a_configuration_in_one_row_do_not_see_each_other() {
    let folder = Folder::new("packed-config");
    // Four documents that fill two rows of 8, or four rows.
    let tokens: Vec<u8> = [5_u16, 2, 3, 6]
        .iter()
        .flat_map(|&n| (1..n).map(move |i| i * 7 % 31 + n).chain([0]))
        .flat_map(u16::to_le_bytes)
        .collect();
    let tokens = folder.write("tokens.bin", tokens);
    for family in ["gpt2", "llama", "mistral", "qwen3", "gpt_neox"] {
        let config = model(&format!("../config/{family}/config.json"));
        let how = format!(
            "train {config} --optimizer sgd --lr 1 --kernels plain --json --steps 1 --init \
             normal:0.1 --tokens {tokens}"
        );
        let (packed, apart) = (
            folder.file("packed.safetensors"),
            folder.file("apart.safetensors"),
        );
        let one = run(&format!(
            "{how} --dim batch=2 --dim sequence=8 --pack 0 --save {packed}"
        ))
        .expect(0)
        .says(&["0.0 % padding"]);
        let four = run(&format!(
            "{how} --dim batch=4 --buckets 8 --documents 0 --save {apart}"
        ))
        .expect(0);
        let loss = |run: &Run| run.json()[0]["loss"].as_f64().unwrap();
        assert!((loss(&one) - loss(&four)).abs() < 1e-6, "{family}");
        let read = |path: &str| std::fs::read(path).unwrap();
        let bytes = read(&packed);
        for name in safetensors::SafeTensors::deserialize(&bytes)
            .unwrap()
            .names()
        {
            let pairs = floats(&packed, name).into_iter().zip(floats(&apart, name));
            let most = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(most <= 1e-6, "{family} {name}: {most}");
        }
    }
    run(&format!(
        "plan {} --packed",
        model("gpt2-dynbatch/joint_coarse.pt2")
    ))
    .expect(2)
    .says(&["--packed", "config.json"]);
}
