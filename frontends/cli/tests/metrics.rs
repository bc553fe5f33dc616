//! Files of metrics.

use crate::common::{Folder, model, run};
use serde_json::Value;

fn train(rest: &str) -> String {
    let (gpt2, batches) = (
        model("gpt2-tiny/joint_core.pt2"),
        model("gpt2-tiny/ref.safetensors"),
    );
    format!(
        "train {gpt2} --optimizer adamw --planner keep --kernels plain --batches {batches} \
         --eval {batches} --eval-every 2 --json {rest}"
    )
}

fn lines(path: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The fields of a protocol buffer: number, and the bytes of the value.
fn fields(mut data: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let varint = |data: &mut &[u8]| {
        let (mut value, mut shift) = (0u64, 0);
        loop {
            let (byte, rest) = data.split_first().unwrap();
            *data = rest;
            value |= u64::from(byte & 0x7F) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                return value;
            }
        }
    };
    let mut fields = vec![];
    while !data.is_empty() {
        let key = varint(&mut data);
        let length = match key & 7 {
            0 => {
                let value = varint(&mut data);
                fields.push(((key >> 3) as u8, value.to_le_bytes().to_vec()));
                continue;
            }
            1 => 8,
            2 => varint(&mut data) as usize,
            5 => 4,
            kind => panic!("{kind}"),
        };
        let (value, rest) = data.split_at(length);
        fields.push(((key >> 3) as u8, value.to_vec()));
        data = rest;
    }
    fields
}

/// Step, name and value of each scalar in an event file.
fn scalars(file: &[u8]) -> Vec<(u64, String, f32)> {
    let mut scalars = vec![];
    let mut at = 0;
    while at < file.len() {
        let length = u64::from_le_bytes(file[at..at + 8].try_into().unwrap()) as usize;
        let event = fields(&file[at + 12..][..length]);
        at += 8 + 4 + length + 4;
        let of = |number: u8| event.iter().find(|(n, _)| *n == number).map(|(_, v)| v);
        let Some(summary) = of(5) else {
            assert_eq!(of(3).unwrap(), b"brain.Event:2");
            continue;
        };
        let step = u64::from_le_bytes(of(2).unwrap()[..].try_into().unwrap());
        for (_, value) in fields(summary) {
            let value = fields(&value);
            let name = String::from_utf8(value[0].1.clone()).unwrap();
            let number = f32::from_le_bytes(value[1].1[..].try_into().unwrap());
            scalars.push((step, name, number));
        }
    }
    scalars
}

#[test]
fn each_step_and_evaluation_has_a_line_and_an_event() {
    let folder = Folder::new("metrics");
    let (file, board) = (folder.file("m.jsonl"), folder.file("board/run"));
    let rest = format!("--lr 0.002 --metrics {file} --tensorboard {board}");
    let printed = run(&train(&format!("--steps 4 {rest}"))).expect(0).json();
    let written = lines(&file);
    assert_eq!(written.len(), 6);
    // What is printed is what is written, without the summary.
    for (line, shown) in written.iter().zip(&printed) {
        assert_eq!(line["step"], shown["step"]);
        assert_eq!(line["loss"], shown["loss"]);
        assert_eq!(line["eval_loss"], shown["eval_loss"]);
    }
    let second = &written[1];
    assert_eq!((&second["step"], &second["lr"]), (&2.into(), &0.002.into()));
    // Four batches are an epoch.
    assert_eq!(second["epoch"], 0.5);
    let (ms, rate) = (&second["ms"], &second["tokens_per_second"]);
    let tokens = ms.as_f64().unwrap() * rate.as_f64().unwrap() / 1e3;
    assert!((tokens - 64.0).abs() < 1e-6, "{tokens}");

    // A run that goes on appends.
    run(&train(&format!("--steps 2 --start-step 4 {rest}"))).expect(0);
    let steps: Vec<u64> = lines(&file)
        .iter()
        .map(|l| l["step"].as_u64().unwrap())
        .collect();
    assert_eq!(steps, [1, 2, 2, 3, 4, 4, 5, 6, 6]);

    let files = std::fs::read_dir(&board).unwrap();
    let mut events: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    assert_eq!(events.len(), 2);
    events.sort_by_key(|path| std::fs::metadata(path).unwrap().len());
    let name = events[1].file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with("events.out.tfevents."), "{name}");
    let scalars = scalars(&std::fs::read(&events[1]).unwrap());
    for key in ["loss", "lr", "epoch", "eval_loss"] {
        let events = scalars.iter().filter(|(_, name, _)| name == key);
        let events: Vec<_> = events.map(|&(step, _, value)| (step, value)).collect();
        let lines = written.iter().filter(|line| line[key].is_number());
        let lines = lines.map(|l| (l["step"].as_u64().unwrap(), l[key].as_f64().unwrap() as f32));
        assert_eq!(events, lines.collect::<Vec<_>>(), "{key}");
        assert!(!events.is_empty());
    }
}

#[test]
fn targets_that_cannot_be_written_are_told() {
    let folder = Folder::new("no-metrics");
    let file = folder.write("file", "");
    for rest in [
        format!("--metrics {file}/m.jsonl"),
        format!("--tensorboard {file}"),
        "--metrics /".to_string(),
    ] {
        let option = rest.split(' ').next().unwrap().to_string();
        run(&train(&format!("--steps 1 {rest}")))
            .expect(2)
            .says(&[&option]);
    }
    // A full disk ends the run after what it has learned is saved.
    let saved = folder.file("s.safetensors");
    run(&train(&format!(
        "--steps 3 --metrics /dev/full --save {saved}"
    )))
    .expect(1)
    .says(&["/dev/full"]);
    assert!(std::path::Path::new(&saved).exists());
}
