//! A disk in place of the host's memory, or behind it.

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

/// The states that a training saves. Each pool's measured peak is the planned one, to the byte.
fn saved(folder: &Folder, name: &str, train: &str) -> Vec<u8> {
    let out = folder.file(name);
    let lines = run(&format!("{train} --save {out} --json"))
        .expect(0)
        .json();
    let summary = &lines.last().unwrap()["summary"];
    for pool in ["peak", "host_peak", "disk_peak"] {
        let [planned, measured] = ["planned", "measured"].map(|kind| {
            let bytes = summary[format!("{kind}_{pool}_bytes")].as_u64();
            bytes.unwrap_or_else(|| panic!("{kind} {pool} should be in {summary}"))
        });
        assert_eq!(measured, planned, "{pool}, {name}");
        let has_pool = match pool {
            "host_peak" => !train.contains("--disk ") || train.contains("--host "),
            "disk_peak" => train.contains("--disk "),
            _ => true,
        };
        assert_eq!(planned > 0, has_pool, "{pool}, {name}");
    }
    std::fs::read(out).unwrap()
}

/// States and activations that lie on the disk have the bits that they have in memory, and no file
/// stays.
#[test]
fn a_step_on_disk_has_the_bits_of_one_in_memory() {
    let folder = Folder::new("disk-tier");
    let (gpt2, data) = (model(GPT2), batches(&folder));
    let files = Folder::new("disk-tier-files");
    let disk = files.file("");
    let train = format!("train {gpt2} {TRAIN} --batches {data}");
    let saved = |name: &str, options: &str| saved(&folder, name, &format!("{train} {options}"));
    let memory = saved("memory.safetensors", "");
    for (name, budget) in [("half.safetensors", "50%"), ("least.safetensors", "30%")] {
        let options = format!("--budget {budget} --disk {disk} --disk-rate 1GB/s");
        assert!(saved(name, &options) == memory, "{budget}");
    }
    assert!(files.names().is_empty(), "{:?}", files.names());

    // A compiled step runs there, too; one with updates in the host's memory does not.
    let step = folder.file("step.lit");
    let compile = "--optimizer adamw --kernels plain --budget 30%";
    run(&format!(
        "compile {gpt2} {compile} --disk {disk} --disk-rate 1GB/s -o {step}"
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
    let train = format!(
        "train {model} --optimizer adamw --lr 1e-2 --kernels plain --init normal:0.1 --steps 3 \
         --batches {data}"
    );
    let saved = |name: &str, options: &str| saved(&folder, name, &format!("{train} {options}"));
    let memory = saved("memory.safetensors", "");
    let options = format!("--budget 52MiB --disk {disk} --disk-rate 1GB/s");
    assert!(saved("disk.safetensors", &options) == memory);
    run(&format!(
        "plan {model} --optimizer adamw --kernels plain {options} --dump-ir-after sync \
         --dump-dir {}",
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

/// Three levels: a device's pool, a host that holds a part of what leaves it, and a disk. The bits
/// are those of the run in memory.
#[test]
fn a_disk_behind_the_host_changes_no_bit() {
    let folder = Folder::new("disk-tier-three");
    let (gpt2, data) = (model(GPT2), batches(&folder));
    let files = Folder::new("disk-tier-three-files");
    let disk = files.file("");
    let train = format!("train {gpt2} {TRAIN} --batches {data}");
    let saved = |name: &str, options: &str| saved(&folder, name, &format!("{train} {options}"));
    let memory = saved("memory.safetensors", "");
    for (name, host) in [
        ("some.safetensors", "600KiB"),
        ("least.safetensors", "300KiB"),
    ] {
        let levels = format!("--budget 30% --host {host} --disk {disk} --disk-rate 1GB/s");
        assert!(saved(name, &levels) == memory, "{host}");
        let plan = format!("plan {gpt2} --optimizer adamw --kernels plain {levels} --json");
        let plan = run(&plan).expect(0).json();
        let bytes = |key: &str| plan[0][key].as_u64().unwrap();
        let limit = host.trim_end_matches("KiB").parse::<u64>().unwrap() << 10;
        assert!(
            (limit / 2..=limit).contains(&bytes("host_peak_bytes")),
            "{host}"
        );
        assert!(bytes("disk_peak_bytes") > 100 << 10, "{host}");
        assert!(
            bytes("disk_bytes") > 2 * bytes("disk_peak_bytes") * 9 / 10,
            "{host}"
        );
        for stream in ["disk2h", "h2disk"] {
            assert!(plan[0]["link_busy_ms"][stream].as_f64().unwrap() > 0.0);
        }
    }
    assert!(files.names().is_empty(), "{:?}", files.names());

    // A compiled step knows its disk, and asks for one.
    let step = folder.file("step.lit");
    let levels = format!("--budget 30% --host 300KiB --disk {disk} --disk-rate 1GB/s");
    run(&format!(
        "compile {gpt2} --optimizer adamw --kernels plain {levels} -o {step}"
    ))
    .expect(0);
    let out = folder.file("lit.safetensors");
    let train =
        format!("train {step} --lr 1e-2 --init normal:0.1 --steps 5 --batches {data} --save {out}");
    run(&train).expect(2).says(&["--disk DIR"]);
    let trained = run(&format!("{train} --disk {disk}")).expect(0);
    assert!(std::fs::read(out).unwrap() == memory);
    for pool in ["peak  ", "host peak  ", "disk peak  "] {
        let mut lines = trained.out.lines();
        let line = lines.find(|line| line.starts_with(pool)).unwrap();
        assert!(line.ends_with(", planned = measured"), "{line}");
    }
}

/// The report, `explain` and the dumps name all three levels.
#[test]
fn a_plan_shows_its_three_levels() {
    let folder = Folder::new("disk-tier-shown");
    let gpt2 = model(GPT2);
    let disk = folder.file("");
    let levels = format!(
        "--optimizer adamw --kernels plain --budget 30% --host 300KiB --disk {disk} \
         --disk-rate 1GB/s"
    );
    let page = folder.file("plan.html");
    let plan = run(&format!(
        "plan {gpt2} {levels} --report {page} --dump-ir-after sync"
    ))
    .expect(0);
    for text in [
        "pool disk",
        "stream disk2h",
        "stream h2disk",
        " load ",
        " store ",
    ] {
        assert!(plan.out.contains(text), "{text}");
    }
    plan.says_all(&["host peak", "disk peak", "disk at work", "disk x2"]);
    let page = std::fs::read_to_string(page).unwrap();
    for text in ["<h3>Host memory</h3>", "<h3>Disk</h3>", "disk peak"] {
        assert!(page.contains(text), "{text}");
    }
    let mut lines = plan.out.lines();
    let state = lines.find_map(|line| {
        let (name, place) = line.trim().strip_prefix("entry %")?.split_once(" = ")?;
        place.contains("@disk").then_some(name)
    });
    let explained = run(&format!("explain {gpt2} {} {levels}", state.unwrap())).expect(0);
    assert!(
        explained.out.contains("it lives on the disk"),
        "{}",
        explained.out
    );

    // A host that is too small: the error says which one is large enough.
    let small = levels.replace("300KiB", "20KiB");
    run(&format!("plan {gpt2} {small}")).expect(3).says(&[
        "a reason is the limit of the host's pool, 20.0 KiB (20480 bytes)",
        "fits: --host ",
    ]);
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
    // A pool that the disk has no space for.
    run(&format!("{plan} --disk {disk}:1KiB --disk-rate 1GB/s"))
        .expect(3)
        .says(&["the disk's pool", "--disk DIR:"]);
}

/// A disk that is too small is named with what it would need, behind the host and in its place; and
/// what the error names is enough.
#[test]
fn a_disk_that_is_too_small_is_blamed() {
    let folder = Folder::new("disk-tier-small");
    let disk = folder.file("");
    let plan = format!(
        "plan {} --optimizer adamw --kernels plain --budget 30% --disk-rate 1GB/s",
        model(GPT2)
    );
    for (levels, small) in [("--host 300KiB", 500 << 10), ("", 300 << 10)] {
        let on_disk = |bytes: u64| format!("{plan} {levels} --disk {disk}:{bytes}");
        let refused = run(&format!("{} --json", on_disk(small))).expect(3);
        let object = &refused.json()[0];
        assert_eq!(object["disk_limit_bytes"], small, "{levels}");
        let enough = object["disk_bytes_that_fit"].as_u64().unwrap();
        refused.says_all(&[
            "does not fit the device",
            "a reason is the limit of the disk's pool",
            &format!("({small} bytes)"),
            &format!("with this budget fits: --disk DIR:{enough}"),
        ]);
        run(&on_disk(enough)).expect(0);
        // With the small disk, the larger budget that the error names is enough, too.
        let smallest = object["smallest_feasible_bytes"].as_u64().unwrap();
        run(&on_disk(small).replace("30%", &smallest.to_string())).expect(0);
    }
}
