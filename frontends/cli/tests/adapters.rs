//! Adapters of PEFT, and their frozen base in NF4.

use crate::common::{Folder, floats, run};

/// A layer with adapters, as text.
const LORA: &str = r#"graph lora {
  input  %x : f32[4,32]
  state  buffer %w -> %w : f32[64,32] "model.base_model.model.fc.base_layer.weight"
  state  param  %a -> %a : f32[2,32] "model.base_model.model.fc.lora_A.default.weight"
  state  param  %b -> %b : f32[64,2] "model.base_model.model.fc.lora_B.default.weight"
  fwd fc  %h = matmul %x, %w ta=false tb=true : f32[4,64]
  fwd fc  %l = matmul %x, %a ta=false tb=true : f32[4,2]
  fwd fc  %m = matmul %l, %b ta=false tb=true : f32[4,64]
  fwd fc  %s = add %h, %m : f32[4,64]
  fwd out %q = mul %s, %s : f32[4,64]
  fwd out %loss = sum %q dims=[0,1] keepdim=false : f32[]
  output loss = %loss
}"#;

/// A file of tensors of f32: name, shape, and a factor of their numbers.
fn tensors(folder: &Folder, file: &str, all: &[(&str, &[usize], f32)]) -> String {
    let data: Vec<(&str, &[usize], Vec<u8>)> = all
        .iter()
        .map(|&(name, shape, factor)| {
            let n: usize = shape.iter().product();
            let number = |i: usize| (i as f32 * 0.618).sin() * factor;
            (
                name,
                shape,
                (0..n).flat_map(|i| number(i).to_le_bytes()).collect(),
            )
        })
        .collect();
    let views = data.iter().map(|(name, shape, bytes)| {
        let dtype = safetensors::Dtype::F32;
        let view = safetensors::tensor::TensorView::new(dtype, shape.to_vec(), bytes);
        (*name, view.unwrap())
    });
    folder.write(file, safetensors::serialize(views, None).unwrap())
}

/// Adapters alone are saved under PEFT's names, and go on from there; the frozen base has no
/// moments, and in NF4 an eighth of the bytes. A folder without PEFT's configuration is refused.
#[test]
fn adapters_are_saved_alone_and_go_on() {
    let folder = Folder::new("adapters");
    let model = folder.write("lora.ir", LORA);
    let batches = tensors(&folder, "b.safetensors", &[("batch.0.x", &[4, 32], 1.0)]);
    let path = |name: &str| format!("model.base_model.model.fc.{name}.weight");
    let [base, a, b] = ["base_layer", "lora_A.default", "lora_B.default"].map(path);
    let init = tensors(
        &folder,
        "init.safetensors",
        &[
            (&base, &[64, 32], 0.1),
            (&a, &[2, 32], 0.1),
            (&b, &[64, 2], 0.1),
        ],
    );
    let adapters = folder.file("adapters");
    let train = format!(
        "train {model} --differentiate --optimizer adamw --lr 1e-2 --base nf4 --kernels plain \
         --batches {batches} --init {init} --json"
    );
    run(&format!("{train} --steps 1 --save-adapters {adapters}"))
        .expect(2)
        .says(&["no adapter_config.json", "save_pretrained"]);
    std::fs::create_dir(&adapters).unwrap();
    std::fs::write(format!("{adapters}/adapter_config.json"), "{}").unwrap();
    let all = folder.file("all.safetensors");
    run(&format!(
        "{train} --steps 3 --save-adapters {adapters} --save {all}"
    ))
    .expect(0);

    let file = format!("{adapters}/adapter_model.safetensors");
    let saved = std::fs::read(&file).unwrap();
    let saved = safetensors::SafeTensors::deserialize(&saved).unwrap();
    let mut names = saved.names();
    names.sort_unstable();
    let [saved_a, saved_b] = ["A", "B"].map(|x| format!("base_model.model.fc.lora_{x}.weight"));
    assert_eq!(names, [&saved_a, &saved_b]);
    for (name, path) in [(saved_a, a), (saved_b, b)] {
        assert_eq!(floats(&file, &name), floats(&all, &path), "{name}");
        assert_ne!(
            floats(&file, &name),
            floats(&init, &path),
            "{name} was not trained"
        );
    }
    let all = std::fs::read(&all).unwrap();
    let all = safetensors::SafeTensors::deserialize(&all).unwrap();
    let bytes = |prefix: &str| -> usize {
        let names = all.names();
        let names = names.iter().filter(|name| name.starts_with(prefix));
        names
            .map(|name| all.tensor(name).unwrap().data().len())
            .sum()
    };
    assert_eq!(bytes("exp_avg"), 8 * (2 * 32 + 64 * 2));
    assert_eq!(bytes("nf4"), 64 * 32 / 2 + 32 + 4 + 4);

    // From the saved adapters, the next step's loss is that of a step after all states.
    let first = |rest: &str| {
        let out = run(&format!("{train} --steps 1 {rest}")).expect(0);
        out.json()[0]["loss"].clone()
    };
    let all = folder.file("all.safetensors");
    let again = first(&format!("--adapters {adapters}"));
    let whole = run(&format!(
        "train {model} --differentiate --optimizer adamw --lr 1e-2 --base nf4 --kernels plain \
         --batches {batches} --init {all} --json --steps 1"
    ));
    assert_eq!(again, whole.expect(0).json()[0]["loss"]);
    assert_ne!(again, first(""));

    // A checkpoint has the adapters, as they were trained meanwhile: those of the option only
    // begin.
    let go_on = |checkpoints: &str, steps: u32| {
        let checkpoints = folder.file(checkpoints);
        let rest = format!("--checkpoints {checkpoints} --resume {checkpoints} --steps {steps}");
        let out = folder.file("resumed.safetensors");
        run(&format!(
            "{train} --adapters {adapters} {rest} --save {out}"
        ))
        .expect(0);
        std::fs::read(out).unwrap()
    };
    let whole = go_on("whole", 4);
    go_on("parts", 2);
    assert!(go_on("parts", 4) == whole);
    let checkpoints = folder.file("parts");
    let other = train.replace(&format!("--init {init}"), "");
    run(&format!(
        "{other} --adapters {adapters} --resume {checkpoints}/latest --steps 5"
    ))
    .expect(2)
    .says(&["--adapters", "--resume takes none"]);
}

/// Adapters that learn in halves are saved and read as f32. Their frozen base is stored in half
/// precision, and starts from a file in f32.
#[test]
fn adapters_in_halves_are_saved_whole() {
    let folder = Folder::new("adapters-halves");
    let model = folder.write("lora.ir", LORA);
    let batches = tensors(&folder, "b.safetensors", &[("batch.0.x", &[4, 32], 1.0)]);
    let path = |name: &str| format!("model.base_model.model.fc.{name}.weight");
    let [base, a, b] = ["base_layer", "lora_A.default", "lora_B.default"].map(path);
    let sizes: [(&str, &[usize], f32); 3] = [
        (&base, &[64, 32], 0.1),
        (&a, &[2, 32], 0.1),
        (&b, &[64, 2], 0.1),
    ];
    let init = tensors(&folder, "init.safetensors", &sizes);
    let all = folder.file("all.safetensors");
    let train = |options: &str, adapters: &str| {
        let adapters = folder.file(adapters);
        std::fs::create_dir_all(&adapters).unwrap();
        std::fs::write(format!("{adapters}/adapter_config.json"), "{}").unwrap();
        let run = run(&format!(
            "train {model} --differentiate --optimizer adamw --lr 1e-2 --precision bf16 --kernels \
             plain --batches {batches} --init {init} --json --steps 3 --save-adapters {adapters} \
             --save {all} {options} --eval {batches} --eval-model {model} --eval-every 3"
        ));
        let lines = run.expect(0).json();
        let losses = lines
            .iter()
            .flat_map(|line| ["loss", "eval_loss"].map(|key| &line[key]));
        let losses: Vec<f64> = losses.filter_map(|loss| loss.as_f64()).collect();
        assert_eq!(losses.len(), 4);
        losses
    };
    let bytes_of_base = || {
        let file = std::fs::read(&all).unwrap();
        let file = safetensors::SafeTensors::deserialize(&file).unwrap();
        file.tensor(&base).unwrap().data().len()
    };
    let whole = train("", "whole");
    assert_eq!(bytes_of_base(), 4 * 64 * 32);
    assert_eq!(train("--master split", "halves"), whole);
    assert_eq!(bytes_of_base(), 2 * 64 * 32);
    for x in ["A", "B"] {
        let name = format!("base_model.model.fc.lora_{x}.weight");
        let [whole, halves] = ["whole", "halves"].map(|adapters| {
            floats(
                &folder.file(&format!("{adapters}/adapter_model.safetensors")),
                &name,
            )
        });
        assert_eq!(whole, halves, "{name}");
    }
    let read = format!("--adapters {}", folder.file("whole"));
    assert_eq!(
        train(&format!("{read} --master split"), "again"),
        train(&read, "again")
    );
    assert_ne!(train(&read, "again"), whole);
}
