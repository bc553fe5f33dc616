//! A disk in place of the host's memory.

use crate::common::{Folder, model, run};

const GPT2: &str = "gpt2-tiny/joint_coarse.pt2";
const TRAIN: &str = "--optimizer adamw --lr 1e-2 --kernels plain --init normal:0.1 --steps 5";

fn batches(folder: &Folder) -> String {
    let pair = |i: usize| {
        ["input_ids", "labels"].map(|name| {
            let ids = (0..64).flat_map(|j: i64| ((j * 7 + i as i64) % 50).to_le_bytes());
            let ids: Vec<u8> = ids.collect();
            (format!("batch.{i}.{name}"), ids)
        })
    };
    let tensors: Vec<(String, Vec<u8>)> = (0..2).flat_map(pair).collect();
    let views = tensors.iter().map(|(name, bytes)| {
        let view =
            safetensors::tensor::TensorView::new(safetensors::Dtype::I64, vec![2, 32], bytes);
        (name.as_str(), view.unwrap())
    });
    folder.write(
        "batches.safetensors",
        safetensors::serialize(views, None).unwrap(),
    )
}

/// States and activations that lie on the disk have the bits that they have in memory, and no file
/// stays.
#[test]
fn a_step_on_disk_has_the_bits_of_one_in_memory() {
    let folder = Folder::new("disk-tier");
    let (gpt2, data) = (model(GPT2), batches(&folder));
    let files = Folder::new("disk-tier-files");
    let disk = files.file("");
    let saved = |name: &str, options: &str| {
        let out = folder.file(name);
        let train = format!("train {gpt2} {TRAIN} --batches {data} --save {out} {options}");
        run(&train).expect(0);
        std::fs::read(out).unwrap()
    };
    let memory = saved("memory.safetensors", "");
    for (name, budget) in [("half.safetensors", "50%"), ("least.safetensors", "30%")] {
        let options = format!("--budget {budget} --disk {disk} --link 1GB/s");
        assert!(saved(name, &options) == memory, "{budget}");
    }
    assert!(files.names().is_empty(), "{:?}", files.names());

    // A compiled step runs there, too; one with updates in the host's memory does not.
    let step = folder.file("step.lit");
    let compile = "--optimizer adamw --kernels plain --budget 30%";
    run(&format!(
        "compile {gpt2} {compile} --disk {disk} --link 1GB/s -o {step}"
    ))
    .expect(0);
    let out = folder.file("lit.safetensors");
    let options = "--lr 1e-2 --init normal:0.1 --steps 5";
    run(&format!(
        "train {step} {options} --batches {data} --save {out} --disk {disk}"
    ))
    .expect(0);
    assert!(std::fs::read(out).unwrap() == memory);
}

#[test]
fn what_a_disk_cannot_do_is_said() {
    let folder = Folder::new("disk-tier-refused");
    let gpt2 = model(GPT2);
    let plan = format!("plan {gpt2} --optimizer adamw");
    run(&format!("{plan} --disk /no/such/folder"))
        .expect(2)
        .says(&["--disk /no/such/folder", "No such file"]);
    let disk = folder.file("");
    run(&format!("{plan} --disk {disk} --device h100"))
        .expect(2)
        .says(&["only steps on the processor"]);
    // A pool that the disk has no space for.
    run(&format!("{plan} --disk {disk} --link 1GB/s --host 1KiB"))
        .expect(3)
        .says(&["host"]);
}
