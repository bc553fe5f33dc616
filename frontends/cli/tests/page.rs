//! The commands of docs/training.md run, one after the other.

use crate::common::{Folder, command};

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
    let folder = Folder::new("page");
    let example = "../../examples/gpt2/";
    for name in ["gpt2.pt2", "batches.safetensors"] {
        std::fs::copy(format!("{example}{name}"), folder.file(name)).unwrap();
    }
    // What the lines in Python write.
    let text = std::fs::read(format!("{example}text.txt")).unwrap();
    let (train, held) = text.split_at(100_000);
    folder.write("train.npy", npy(train));
    folder.write("held.npy", npy(held));

    let page = std::fs::read_to_string("../../docs/training.md").unwrap();
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
        let plain = match line.starts_with("compile") {
            true => " --kernels plain",
            false => "",
        };
        let output = command(&format!("{line}{plain}"))
            .current_dir(folder.file(""))
            .output()
            .unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{line}\n{err}");
        notes.push_str(&err);
    }
    // What the page says that the command says.
    let note = page.lines().find(|line| line.starts_with("note: "));
    assert!(notes.contains(note.unwrap()), "{notes}");
    assert!(folder.names().contains(&"run.jsonl".to_string()));
    let saved = ["half.safetensors", "runs"];
    assert!(
        saved
            .iter()
            .all(|name| folder.names().contains(&name.to_string()))
    );
}
