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

/// A parameter of 16 MiB, whose update as a whole needs four times as much.
const LARGE: &str = r#"graph large {
  input %x : f32[4,1048576]
  state param %w -> %w : f32[4,1048576] "w"
  fwd m %h = mul %x, %w : f32[4,1048576]
  fwd m %s = mul %h, %h : f32[4,1048576]
  fwd m %loss = sum %s dims=[0,1] keepdim=false : f32[]
  bwd m %dw = mul %h, %x : f32[4,1048576]
  output loss = %loss
  gradient "w" = %dw
}
"#;

/// The update of a large parameter runs in parts: in less memory than it needs as a whole, and with
/// the same bits.
#[test]
fn a_large_update_runs_in_parts() {
    let folder = Folder::new("disk-tier-parts");
    let model = folder.write("large.ir", LARGE);
    let x: Vec<u8> = (0..4 << 20)
        .flat_map(|i: u32| ((i % 1000) as f32 * 1e-3).to_le_bytes())
        .collect();
    let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![4, 1 << 20], &x);
    let batch = safetensors::serialize([("batch.0.x", view.unwrap())], None).unwrap();
    let data = folder.write("batches.safetensors", batch);
    let disk = folder.file("");
    let saved = |name: &str, options: &str| {
        let out = folder.file(name);
        let train = "--optimizer adamw --lr 1e-2 --kernels plain --init normal:0.1 --steps 3";
        run(&format!(
            "train {model} {train} --batches {data} --save {out} {options}"
        ))
        .expect(0);
        std::fs::read(out).unwrap()
    };
    let memory = saved("memory.safetensors", "");
    let options = format!("--budget 52MiB --disk {disk} --link 1GB/s");
    assert!(saved("disk.safetensors", &options) == memory);
    run(&format!(
        "plan {model} --optimizer adamw --kernels plain {options} --dump-ir-after sync --dump-dir {}",
        folder.file("dumps")
    ))
    .expect(0);
    let dumps = std::fs::read_dir(folder.file("dumps")).unwrap();
    let texts: Vec<String> = dumps
        .map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap())
        .collect();
    let parts = |text: &String| text.matches(" part start=").count();
    assert_eq!(texts.iter().map(parts).max(), Some(4));
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
