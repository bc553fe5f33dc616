//! The commands of docs/training.md and docs/onnx.md run, one after the other.

use crate::common::{Folder, command};
use std::path::Path;

/// A `.npy` file of bytes.
fn npy(data: &[u8]) -> Vec<u8> {
    let header = format!(
        "{{'descr': '|u1', 'fortran_order': False, 'shape': ({},), }}\n",
        data.len()
    );
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

#[test]
fn commands_about_training_run() {
    let folder = Folder::new("page-training");
    let example = "../../examples/gpt2/";
    for name in ["gpt2.pt2", "batches.safetensors"] {
        std::fs::copy(format!("{example}{name}"), folder.file(name)).unwrap();
    }
    // What the lines in Python write.
    let text = std::fs::read(format!("{example}text.txt")).unwrap();
    let (train, held) = text.split_at(100_000);
    folder.write("train.npy", npy(train));
    folder.write("held.npy", npy(held));

    let (page, notes) = run_page(&folder, "training.md");
    // What the page says that the command says.
    let note = page.lines().find(|line| line.starts_with("note: "));
    assert!(notes.contains(note.unwrap()), "{notes}");
    assert!(folder.names().contains(&"run.jsonl".to_string()));
}

#[test]
fn commands_about_onnx_files_run() {
    let folder = Folder::new("page-onnx");
    let data = Path::new("../../tests/data/onnx");
    for name in [
        "gpt2.onnx",
        "resnet.onnx",
        "resnet.weights",
        "keras-mlp.onnx",
    ] {
        std::fs::copy(data.join(name), folder.file(name)).unwrap();
    }
    for name in ["gpt2", "resnet", "keras-mlp"] {
        let file = if name == "keras-mlp" {
            "keras"
        } else {
            "models"
        };
        let file = data.join(format!("{file}.safetensors"));
        let batches = crate::onnx::batches(&folder, name, &file);
        std::fs::rename(batches, folder.file(&format!("{name}.safetensors"))).unwrap();
    }
    let (page, notes) = run_page(&folder, "onnx.md");
    assert!(
        page.contains("lighterage export") && !notes.contains("constants"),
        "{notes}"
    );
    let written = [
        "gpt2-trained.onnx",
        "resnet-trained.onnx",
        "resnet-trained.onnx.data",
    ];
    for name in written {
        assert!(folder.names().contains(&name.to_string()), "{name}");
    }
}

/// Runs the commands of a page in a folder. Returns the page, and what they wrote to standard
/// error.
fn run_page(folder: &Folder, name: &str) -> (String, String) {
    let page = std::fs::read_to_string(format!("../../docs/{name}")).unwrap();
    let blocks = page.split("```sh\n").skip(1);
    let lines = blocks.flat_map(|block| block.split("```").next().unwrap_or("").lines());
    let commands: Vec<&str> = lines
        .filter_map(|line| line.strip_prefix("lighterage "))
        .collect();
    assert!(commands.len() > 5);
    let mut notes = String::new();
    for line in commands {
        // A step takes a second here.
        let line = line.replace("--steps 4", "--steps 1");
        let line = line.replace("--eval-batches 8", "--eval-batches 1");
        // Kernels that are generated take long to compile.
        let plain = match line.starts_with("compile") || line.contains("--differentiate") {
            true if !line.starts_with("import") => " --kernels plain",
            _ => "",
        };
        let output = command(&format!("{line}{plain}"))
            .current_dir(folder.file(""))
            .output()
            .unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{line}\n{err}");
        notes.push_str(&err);
    }
    (page, notes)
}
