//! The data of `train`: shards, streams of tokens, orders, and files that are wrong.

use crate::common::{Folder, Run, floats, model, run, view};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::io::{BufRead, BufReader};

const GPT2: &str = "gpt2-tiny/joint_core.pt2";
/// Tokens of a batch of the model: 2 sequences of 32.
const BATCH: usize = 64;
/// Tokens of a sequence.
const LENGTH: usize = 32;

fn train(rest: &str) -> String {
    format!(
        "train {} --optimizer adamw --planner keep --kernels plain {rest}",
        model(GPT2)
    )
}

fn losses(run: &Run) -> Vec<f64> {
    let lines = run.json();
    let losses = lines
        .iter()
        .filter_map(|line: &Value| line["loss"].as_f64());
    losses.collect()
}

/// Tokens that differ from each other enough.
fn tokens(count: usize) -> Vec<u16> {
    (0..count)
        .map(|i| ((i * i * 7 + i * 13) % 61) as u16)
        .collect()
}

fn bytes<const N: usize>(tokens: &[u16], of: impl Fn(u16) -> [u8; N]) -> Vec<u8> {
    tokens.iter().flat_map(|&token| of(token)).collect()
}

fn raw(tokens: &[u16]) -> Vec<u8> {
    bytes(tokens, u16::to_le_bytes)
}

/// A `.npy` file.
fn npy(descr: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n");
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

/// A safetensors file with batches `from`, `from + 1`, ... of these tokens.
fn batches(from: usize, ids: &[u16], labels: &[u16]) -> Vec<u8> {
    batches_of(BATCH / LENGTH, from, ids, labels)
}

/// The same with this number of sequences in a batch.
fn batches_of(rows: usize, from: usize, ids: &[u16], labels: &[u16]) -> Vec<u8> {
    let batch = rows * LENGTH;
    let wide = |tokens: &[u16]| bytes(tokens, |token| i64::from(token).to_le_bytes());
    let mut parts = vec![];
    let pairs = ids.chunks_exact(batch).zip(labels.chunks_exact(batch));
    for (k, (ids, labels)) in pairs.enumerate() {
        parts.push((format!("batch.{}.input_ids", from + k), wide(ids)));
        parts.push((format!("batch.{}.labels", from + k), wide(labels)));
    }
    let views = parts.iter().map(|(name, bytes)| {
        let shape = vec![rows, LENGTH];
        (name.as_str(), view(Dtype::I64, shape, bytes))
    });
    safetensors::serialize(views, None).unwrap()
}

#[test]
fn streams_of_tokens_are_batches_cut_from_them() {
    let folder = Folder::new("tokens");
    // 4 batches, and a rest that fills none.
    let all = tokens(4 * BATCH + 40);
    let of = |data: &str| losses(&run(&train(&format!("{data} --steps 6 --json"))).expect(0));
    let same = folder.write("same.safetensors", batches(0, &all, &all));
    let same = of(&format!("--batches {same}"));
    let next = folder.write("next.safetensors", batches(0, &all, &all[1..]));
    let next = of(&format!("--batches {next}"));
    assert_eq!(same.len(), 6);
    assert_ne!(same, next);

    let bin = folder.write("t.bin", raw(&all));
    let u32s = folder.write("u32.bin", bytes(&all, |t| u32::from(t).to_le_bytes()));
    let count = format!("({},)", all.len());
    let int64s = bytes(&all, |t| i64::from(t).to_le_bytes());
    let int64s = folder.write("i64.npy", npy("'<i8'", &count, &int64s));
    let uint8s = bytes(&all, |t| [t as u8]);
    let uint8s = folder.write("u8.npy", npy("'|u1'", &count, &uint8s));
    // The border of two files is within a sequence.
    let (a, b) = all.split_at(100);
    let a = folder.write("a.bin", raw(a));
    let b = folder.write("b.npy", npy("'<u2'", &format!("({},)", b.len()), &raw(b)));
    for data in [
        format!("--tokens {bin}"),
        format!("--tokens {bin} --ids input_ids --labels-input labels --prefetch 0"),
        format!("--tokens {u32s} --token-type u32"),
        format!("--tokens {int64s}"),
        format!("--tokens {uint8s} --prefetch 9"),
        format!("--tokens {a} {b}"),
    ] {
        assert_eq!(of(&data), same, "{data}");
        assert_eq!(of(&format!("{data} --token-labels next")), next, "{data}");
    }
    run(&train(&format!(
        "--tokens {bin} --token-labels next --steps 1"
    )))
    .expect(0)
    .says(&[
        "296 tokens in 1 file: 4 batches of 2 sequences of 32",
        "labels = next tokens",
    ]);
}

/// A file of the crate that reads columns. Most have the tokens `tokens(4 * BATCH + 40)`.
fn column_file(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../columns/tests/data");
    format!("{folder}/{name}")
}

#[test]
fn columns_of_files_are_streams_of_tokens() {
    let folder = Folder::new("columns");
    let all = tokens(4 * BATCH + 40);
    let bin = folder.write("t.bin", raw(&all));
    let (half, whole, rest) = (
        folder.file("half.st"),
        folder.file("whole.st"),
        folder.file("rest.st"),
    );
    let of = |data: &str, rest: &str| {
        let args = format!("--tokens {data} --shuffle-data --json {rest}");
        losses(&run(&train(&args)).expect(0))
    };
    let expected = of(&bin, &format!("--steps 10 --save {whole}"));
    assert_eq!(expected.len(), 10);
    for name in [
        "plain.parquet",
        "dictionary.parquet",
        "snappy.parquet",
        "gzip_v2.parquet",
        "lz4.parquet",
        "zstd_delta.parquet",
        "split_v2.parquet",
        "stream.arrow",
        "others.arrow",
        "stream_zstd.arrow",
        "flat.arrow",
        "fixed_lz4.arrow",
    ] {
        let found = of(&column_file(name), "--steps 10");
        assert_eq!(found, expected, "{name}");
    }
    // A run goes on at any position, and files of all kinds follow each other.
    let parquet = column_file("snappy.parquet");
    of(&parquet, &format!("--steps 6 --save {half}"));
    let go_on = format!("--steps 4 --start-step 6 --init {half} --save {rest}");
    assert_eq!(of(&parquet, &go_on), expected[6..]);
    let read = |path: &str| std::fs::read(path).unwrap();
    assert_eq!(read(&whole), read(&rest));
    let mixed = format!("{bin} {parquet} {}", column_file("flat.arrow"));
    assert_eq!(
        of(&mixed, "--steps 30"),
        of(&format!("{bin} {bin} {bin}"), "--steps 30")
    );

    // Another column, and held-out data.
    let args = format!("--tokens {parquet} --token-column attention_mask --steps 1");
    let held = format!("{args} --eval {parquet}");
    run(&train(&held)).expect(0).says(&["296 tokens in 1 file"]);
}

#[test]
fn lists_of_a_column_are_documents() {
    let folder = Folder::new("column-documents");
    let text = "graph g {
  input  %input_ids : i64[2,8]
  input  %position_ids : i64[2,8]
  fwd - %a = mul_scalar %position_ids value=1000 : i64[2,8]
  fwd - %c = add %a, %input_ids : i64[2,8]
  fwd - %f = cast %c dtype=f32 : f32[2,8]
  fwd - %loss = sum %f dims=[0,1] keepdim=false : f32[]
  output loss = %loss
}";
    let graph = folder.write("g.ir", text);
    // The documents of `documents_are_packed_into_rows`, and a list without tokens.
    let tokens = [1, 2, 0, 3, 4, 5, 6, 0, 7, 0, 8, 8, 8, 8, 8, 8, 0];
    let bin = folder.write("t.bin", raw(&tokens));
    let of = |data: &str, end: &str| {
        let args = format!("train {graph} --kernels plain --tokens {data} {end} --steps 2 --json");
        run(&args).expect(0)
    };
    for name in ["documents.parquet", "documents.arrow"] {
        let lists = column_file(name);
        // Where lists end, documents end anyhow.
        let found = of(&lists, "--pack 0");
        found.says_all(&["4 documents in 3 rows of 8, 29.2 % padding"]);
        let of_bin = losses(&of(&bin, "--pack 0"));
        assert_eq!(losses(&found), of_bin);
        // No token ends a document, and the seven of the padding are others.
        let found = of(&format!("{bin} {lists}"), "--pack 9");
        found.says_all(&["34 tokens in 2 files: 5 documents (2 cuts"]);
        let found = of(&lists, "--pack 9");
        found.says_all(&["4 documents in 3 rows of 8"]);
        assert!(losses(&found)[0] > of_bin[0]);
        assert_eq!((losses(&found)[0] - of_bin[0]) % 9.0, 0.0);
        // A token within a list ends a document, too.
        of(&lists, "--pack 6").says_all(&["5 documents"]);
        of(&lists, "--documents 9").says_all(&["4 documents in 2 batches of 2"]);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn tokens_of_columns_leave_nothing_and_say_that_a_disk_is_full() {
    let folder = Folder::new("spool");
    let temporary = folder.file("tmp");
    std::fs::create_dir(&temporary).unwrap();
    let parquet = column_file("plain.parquet");
    let args = train(&format!("--tokens {parquet} --steps 1"));
    let variables = [("TMPDIR", &*temporary)];
    crate::common::run_with(&args, &variables).expect(0);
    let is_empty = || std::fs::read_dir(&temporary).unwrap().next().is_none();
    assert!(is_empty());
    let mut child = endless_with(&format!("--tokens {parquet}"), 2, &variables);
    assert!(is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(is_empty());

    crate::common::run_with(&args, &[("TMPDIR", &folder.file("absent"))])
        .expect(1)
        .says(&["plain.parquet", "absent", "TMPDIR"]);
    let mut shim = crate::checkpoints::shim(&folder, &temporary);
    shim.push(("TMPDIR", temporary.clone()));
    shim.push(("DISK_FAULT", "write:28:1:1".into()));
    let shim: Vec<(&str, &str)> = shim.iter().map(|(k, v)| (*k, v.as_str())).collect();
    crate::common::run_with(&args, &shim).expect(1).says(&[
        "plain.parquet",
        "No space left on device",
        "TMPDIR",
    ]);
}

#[test]
fn batches_may_be_in_several_files() {
    let folder = Folder::new("shards");
    let all = tokens(5 * BATCH);
    let of = |data: &str| {
        let args = train(&format!("--batches {data} --steps 7 --json"));
        losses(&run(&args).expect(0))
    };
    let whole = of(&folder.write("whole.st", batches(0, &all, &all)));
    let (first, rest) = all.split_at(2 * BATCH);
    std::fs::create_dir(folder.file("dir")).unwrap();
    let a = folder.write("dir/a.safetensors", batches(0, first, first));
    let b = folder.write("dir/b.safetensors", batches(2, rest, rest));
    folder.write("dir/readme.txt", "not data");
    let from_0 = folder.write("own.st", batches(0, rest, rest));
    for data in [
        format!("{a} {b}"),
        folder.file("dir"),
        format!("{a} {from_0}"),
    ] {
        assert_eq!(of(&data), whole, "{data}");
    }
    assert_ne!(of(&format!("{from_0} {a}")), whole);

    let refused = |data: &str, words: &[&str]| {
        let args = train(&format!("--batches {data} --steps 1"));
        run(&args).expect(2).says(words);
    };
    let gap = folder.write("gap.st", batches(3, rest, rest));
    refused(
        &format!("{a} {gap}"),
        &["gap.st", "from 0, or from 2", "batch.2 is missing"],
    );
    let name = b"batch.1.labels";
    let mut renamed = batches(0, rest, rest);
    let at = renamed.windows(name.len()).position(|bytes| bytes == name);
    renamed[at.unwrap()] = b'c';
    let typed = folder.write("typed.st", renamed);
    refused(&format!("{a} {typed}"), &["typed.st", "batch.1.labels"]);
    std::fs::create_dir(folder.file("none")).unwrap();
    refused(
        &folder.file("none"),
        &["the folder has no .safetensors file"],
    );
}

#[test]
fn a_shuffled_run_is_found_again_at_any_position() {
    let folder = Folder::new("shuffled");
    let all = tokens(9 * BATCH + 40);
    let bin = folder.write("t.bin", raw(&all));
    let st = folder.write("b.st", batches(0, &all, &all));
    let (half, whole, rest) = (
        folder.file("half.st"),
        folder.file("whole.st"),
        folder.file("rest.st"),
    );
    for data in [format!("--tokens {bin}"), format!("--batches {st}")] {
        let of = |rest: &str| {
            let args = train(&format!("{data} --shuffle-data --json {rest}"));
            run(&args).expect(0)
        };
        // 20 steps: more than two epochs.
        let all = losses(&of(&format!("--steps 20 --save {whole}")));
        assert_eq!(all, losses(&of("--steps 20 --data-seed 0 --prefetch 0")));
        assert_ne!(all, losses(&of("--steps 20 --data-seed 1")));
        let begun = losses(&of(&format!("--steps 13 --save {half}")));
        let gone_on = of(&format!(
            "--steps 7 --start-step 13 --init {half} --save {rest}"
        ));
        assert_eq!([begun, losses(&gone_on)].concat(), all);
        let steps: Vec<Value> = gone_on.json();
        assert_eq!(steps[0]["step"], 14);
        let read = |path: &str| std::fs::read(path).unwrap();
        assert_eq!(read(&whole), read(&rest));
    }
}

#[test]
fn each_epoch_has_every_sequence_once() {
    let folder = Folder::new("epochs");
    // Sequence k is 32 times k, so the mean loss tells which sequences were read.
    let all: Vec<u16> = (0..8 * LENGTH).map(|i| (i / LENGTH) as u16).collect();
    let bin = folder.write("t.bin", raw(&all));
    let still = "--lr 0 --weight-decay 0 --json";
    let of = |rest: &str| {
        let args = train(&format!("--tokens {bin} {still} {rest}"));
        losses(&run(&args).expect(0))
    };
    let sum = |losses: &[f64]| losses.iter().sum::<f64>();
    let plain = of("--steps 4");
    let shuffled = of("--steps 8 --shuffle-data");
    assert_ne!(plain, shuffled[..4]);
    assert_ne!(shuffled[..4], shuffled[4..]);
    for epoch in shuffled.chunks(4) {
        assert!((sum(epoch) - sum(&plain)).abs() < 1e-4);
    }
    // Micro-batches go on in the same order.
    let pairs = of("--steps 2 --micro-batches 2 --shuffle-data");
    for (pair, mean) in shuffled.chunks(2).zip(pairs) {
        assert!((sum(pair) / 2.0 - mean).abs() < 1e-5);
    }
}

/// The batch of a file is cut into the number of micro-batches that is fastest with the budget; the
/// losses are those of the whole batch.
#[test]
fn a_batch_is_cut_into_micro_batches() {
    let folder = Folder::new("cut");
    let all = tokens(2 * 16 * LENGTH);
    let file = folder.write("b.safetensors", batches_of(16, 0, &all, &all));
    let dynamic = model("gpt2-dynbatch/joint_coarse.pt2");
    let of = |rest: &str| {
        let data = format!("--batches {file} --steps 4 --json --init normal:0.02");
        run(&format!(
            "train {dynamic} --dim s72=16 --optimizer adamw --kernels plain {data} {rest}"
        ))
    };
    let whole = losses(&of("").expect(0));
    let cut = of("--micro-batches auto --budget 1032KiB").expect(0);
    cut.says_all(&["micro-batches: 2 of 8 (1 of 16:", "8 of 2:"]);
    let losses = losses(&cut);
    assert_eq!(losses.len(), 4);
    for (whole, cut) in whole.iter().zip(losses) {
        assert!((whole - cut).abs() < 1e-5, "{whole} {cut}");
    }
    assert!(whole[3] < whole[0]);

    run(&format!("plan {} --micro-batches auto", model(GPT2)))
        .expect(2)
        .says(&[
            "the batch cannot be cut",
            "dynamic_shapes",
            "--micro-batches N",
        ]);
    run(&format!(
        "plan {dynamic} --dim s72=16 --micro-batches auto --budget 1KiB"
    ))
    .expect(3)
    .says(&["does not fit"]);
    // The file's sizes begin with 2, so nothing smaller than a batch of 3 divides it.
    run(&format!("plan {dynamic} --dim s72=3 --micro-batches auto"))
        .expect(0)
        .says(&[
            "the batch of 3 cannot be cut",
            "s72",
            "micro-batches: 1 of 3",
        ]);
    run(&format!("plan {dynamic} --dim s72=3 --dim s72=8"))
        .expect(2)
        .says(&["--dim s72=3 --dim s72=8"]);
}

#[test]
fn documents_are_packed_into_rows() {
    let folder = Folder::new("pack");
    let graph = |inputs: &str| {
        let text = format!(
            "graph g {{\n  input  %input_ids : i64[2,8]\n  input  %labels : i64[2,8]\n{inputs}\n  \
             fwd - %a = mul_scalar %{last} value=1000 : i64[2,8]\n  fwd - %b = add %input_ids, \
             %labels : i64[2,8]\n  fwd - %c = add %a, %b : i64[2,8]\n  fwd - %f = cast %c \
             dtype=f32 : f32[2,8]\n  fwd - %loss = sum %f dims=[0,1] keepdim=false : f32[]\n  \
             output loss = %loss\n}}\n",
            last = if inputs.is_empty() {
                "labels"
            } else {
                "position_ids"
            }
        );
        folder.write(&format!("g{}.ir", inputs.len()), text)
    };
    // Rows: the document of 7 tokens; those of 5 and 3; that of 2. A batch has two rows.
    let file = folder.write(
        "t.bin",
        raw(&[1, 2, 0, 3, 4, 5, 6, 0, 7, 0, 8, 8, 8, 8, 8, 8, 0]),
    );
    let train = |graph: &str, rest: &str| {
        run(&format!(
            "train {graph} --kernels plain --tokens {file} {rest} --steps 1 --json"
        ))
    };
    let packed = graph("  input  %position_ids : i64[2,8]");
    let run = train(&packed, "--pack 0").expect(0);
    run.says_all(&[
        "17 tokens in 1 file: 4 documents in 3 rows of 8, 29.2 % padding",
        "39.3 %",
    ]);
    let (ids, positions, labels) = (48 + 21, 21 + 13, -160 - 183);
    assert_eq!(losses(&run), [f64::from(ids + 1000 * positions + labels)]);

    train(&packed, "")
        .expect(2)
        .says(&["position_ids", "--pack"]);
    train(&graph(""), "--pack 0")
        .expect(2)
        .says(&["would see each other", "position_ids or segment_ids"]);
    // One document, cut into three pieces.
    train(&packed, "--pack 9")
        .expect(0)
        .says_all(&["1 documents (2 cuts", "3 rows of 8"]);
}

#[test]
fn files_that_hold_no_tokens_are_told_by_name() {
    let folder = Folder::new("bad-tokens");
    let all = tokens(4 * BATCH);
    let data = raw(&all);
    let refused = |args: &str, words: &[&str]| {
        let args = train(&format!("--steps 1 --tokens {args}"));
        run(&args).expect(2).says(words);
    };
    let write = |name: &str, bytes: &[u8]| folder.write(name, bytes);
    refused(&write("e.bin", b""), &["e.bin", "no tokens"]);
    refused(
        &write("odd.bin", &data[1..]),
        &["odd.bin", "511 bytes", "u16", "--token-type"],
    );
    let few = write("few.bin", &data[..126]);
    refused(
        &few,
        &["few.bin", "63 tokens", "2 sequences of 32 needs 64"],
    );
    let just = write("just.bin", &data[..128]);
    refused(
        &format!("{just} --token-labels next"),
        &["64 tokens", "needs 65"],
    );
    run(&train(&format!("--steps 1 --tokens {just}"))).expect(0);

    let whole = npy("'<u2'", "(256,)", &data);
    for n in [0, 5, 9, 40, whole.len() - 1] {
        refused(&write("cut.npy", &whole[..n]), &["cut.npy", "not a"]);
    }
    refused(
        &write("f.npy", &npy("'<f4'", "(128,)", &data)),
        &["f.npy", "'<f4'", "integers"],
    );
    refused(
        &write("be.npy", &npy("'>u2'", "(256,)", &data)),
        &["'>u2'", "little-endian"],
    );
    refused(
        &write("2d.npy", &npy("'<u2'", "(2, 128)", &data)),
        &["(2, 128)", "reshape(-1)"],
    );
    let huge = npy("'<u8'", "(9999999999999999999,)", &data);
    refused(&write("huge.npy", &huge), &["huge.npy", "not a whole .npy"]);
    refused(&write("not.npy", &data), &["not.npy", "not a .npy file"]);
    refused(
        &write("t.parquet", b"PAR1"),
        &["t.parquet", "not a whole Parquet file"],
    );
    refused(
        &write("t.arrow", b"ARROW1\0\0"),
        &["not a whole Arrow file"],
    );
    refused(&write("v1.feather", b"FEA1...."), &["version 1"]);
    refused(&write("x.arrow", b"nothing"), &["x.arrow", "neither"]);
    refused(
        &column_file("several.parquet"),
        &["several.parquet", "--token-column", "a (int64)", "b (lists"],
    );
    refused(
        &format!("{} --token-column text", column_file("snappy.parquet")),
        &["the column text", "input_ids (lists of int32)"],
    );
    refused(
        &column_file("null_row.arrow"),
        &["null_row.arrow: row 2 of input_ids is null"],
    );
    refused(
        &write("t.csv", b"1"),
        &["t.csv", ".bin", ".npy", ".parquet"],
    );
    refused(&write("t.safetensors", b""), &["--batches"]);
    refused(&folder.file("absent.bin"), &["absent.bin"]);
    let negative = npy("'<u8'", "(64,)", &[0xFF; 512]);
    refused(
        &write("neg.npy", &negative),
        &["neg.npy", "token 0", "63 bits"],
    );

    refused(
        &format!("{just} --ids nothing"),
        &["--ids", "nothing", "input_ids, labels"],
    );
    refused(
        &format!("{just} --ids labels"),
        &["no values for the input input_ids"],
    );
    refused(&format!("{just} --token-type u8"), &["--token-type"]);
    let st = folder.write("b.st", batches(0, &all, &all));
    refused(&format!("{just} --batches {st}"), &["cannot be used with"]);
    run(&train("--steps 1")).expect(2).says(&["--batches"]);
    run(&train(&format!("--batches {st} --steps 1 --data-seed 1")))
        .expect(2)
        .says(&["--shuffle-data"]);
    for option in [
        "--token-labels next",
        "--token-type u32",
        "--token-column x",
        "--ids x",
        "--labels-input x",
    ] {
        run(&train(&format!("--batches {st} --steps 1 {option}")))
            .expect(2)
            .says(&["cannot be used with", "--batches"]);
    }
}

#[test]
fn a_pipe_of_tokens_is_read_and_a_named_one_refused() {
    let folder = Folder::new("token-pipe");
    let bin = folder.write("t.bin", raw(&tokens(4 * BATCH)));
    let steps = "--steps 2 --json";
    let output = crate::common::command(&train(&format!("--tokens /dev/stdin {steps}")))
        .stdin(std::fs::File::open(&bin).unwrap())
        .output()
        .unwrap();
    assert!(output.status.success());
    let piped = Run {
        code: 0,
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::new(),
    };
    let named = run(&train(&format!("--tokens {bin} {steps}"))).expect(0);
    assert_eq!(losses(&piped), losses(&named));
    let pipe = folder.file("p.bin");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success());
    run(&train(&format!("--tokens {pipe} --steps 1")))
        .expect(2)
        .says(&["not a regular file"]);
}

/// Starts an endless run, and returns after its first steps.
fn endless(rest: &str, steps: usize) -> std::process::Child {
    endless_with(rest, steps, &[])
}

/// The same with variables of the environment.
fn endless_with(rest: &str, steps: usize, variables: &[(&str, &str)]) -> std::process::Child {
    let args = train(&format!("{rest} --steps 100000000 --json"));
    let mut child = crate::common::command(&args)
        .envs(variables.iter().copied())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.as_mut().unwrap());
    for _ in 0..steps {
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        assert!(line.contains("loss"), "{line}");
    }
    child
}

#[test]
fn a_file_that_shrinks_ends_the_run_and_what_was_learned_is_saved() {
    let folder = Folder::new("shrinks");
    let bin = folder.write("t.bin", raw(&tokens(4 * BATCH)));
    let saved = folder.file("s.safetensors");
    let child = endless(&format!("--tokens {bin} --save {saved}"), 2);
    let file = std::fs::File::options().write(true).open(&bin).unwrap();
    file.set_len(100).unwrap();
    let output = child.wait_with_output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(
        err.contains("t.bin") && err.contains("cannot be read"),
        "{err}"
    );
    assert!(!floats(&saved, "model.transformer.wpe.weight").is_empty());
    SafeTensors::deserialize(&std::fs::read(&saved).unwrap()).unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn memory_does_not_grow_with_the_file() {
    let folder = Folder::new("large-tokens");
    let peak = |data: &str| {
        let mut child = endless(&format!("--tokens {data} --shuffle-data"), 200);
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let line = status
            .lines()
            .find_map(|l| l.strip_prefix("VmHWM:"))
            .unwrap();
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
        kib << 10
    };
    let zeros = |name: &str, bytes: u64| {
        let bin = folder.write(name, raw(&tokens(BATCH)));
        // The rest is zeros, which take no disk.
        let file = std::fs::File::options().write(true).open(&bin).unwrap();
        file.set_len(bytes).unwrap();
        bin
    };
    let small = peak(&zeros("s.bin", 1 << 10));
    // The batches of a stream of Arrow once more, between its schema and its end.
    let stream = std::fs::read(column_file("stream.arrow")).unwrap();
    let schema = 8 + u32::from_le_bytes(stream[4..8].try_into().unwrap()) as usize;
    let (schema, rest) = stream.split_at(schema);
    let (batches, end) = rest.split_at(rest.len() - 8);
    let stream = [schema, &batches.repeat(20_000), end].concat();
    let stream = folder.write("l.arrow", stream);
    // A GiB of tokens, or a file of 40 MB, takes no more than the differences between two runs.
    for large in [zeros("l.bin", 1 << 30), stream] {
        let large = peak(&large);
        assert!(
            large < small + (16 << 20),
            "{large} bytes instead of {small}"
        );
    }
}
