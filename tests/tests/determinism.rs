//! The same input compiles to the same bytes: in two threads at once, and in two processes, whose
//! hash seeds and addresses differ.

use lighterage_tests::generate;
use passes::cost::Roofline;
use passes::devices;
use passes::graph::optimizer::Optimizer;
use passes::pipeline::{self, Budget, Options};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The artifact of a traced GPT-2 at a tight budget, and some of random graphs.
fn files() -> Vec<Vec<u8>> {
    let compile = |graph, optimizer, share, device: &str| {
        let device = devices::named(device).unwrap();
        let options = Options {
            optimizer,
            budget: Budget::Share(share),
            ..Options::default()
        };
        let compiled = pipeline::compile(
            graph,
            &options,
            &device,
            &Roofline::new(&device),
            &mut |_| (),
        )
        .unwrap();
        artifact::write(
            &codegen::emit(&compiled, &BTreeMap::new(), codegen::Target::host()).unwrap(),
        )
    };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/models/gpt2-tiny/joint_core.pt2");
    let model = torch::read(&path, &BTreeMap::new()).unwrap();
    let mut files = vec![compile(model.graph, Optimizer::AdamW, 0.7, "cpu")];
    let mut runner = TestRunner::deterministic();
    for _ in 0..10 {
        let recipe = generate::recipes(60)
            .new_tree(&mut runner)
            .unwrap()
            .current();
        files.push(compile(
            generate::graph(&recipe),
            Optimizer::None,
            1.0,
            "test",
        ));
    }
    files
}

#[test]
fn two_threads_compile_the_same_bytes() {
    let [one, other] = [(), ()]
        .map(|()| std::thread::spawn(files))
        .map(|thread| thread.join().unwrap());
    assert!(one == other);
}

/// The folder in which a process of this test writes its files.
const FOLDER: &str = "LIGHTERAGE_TEST_FOLDER";

#[test]
fn two_processes_compile_the_same_bytes() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        for (i, file) in files().iter().enumerate() {
            std::fs::write(PathBuf::from(&folder).join(i.to_string()), file).unwrap();
        }
        return;
    }
    let expected = files();
    let folder =
        std::env::temp_dir().join(format!("lighterage-determinism-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut process = Command::new(std::env::current_exe().unwrap());
    process
        .args([
            "--exact",
            "determinism::two_processes_compile_the_same_bytes",
        ])
        .env(FOLDER, &folder);
    let output = process.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stdout)
    );
    for (i, expected) in expected.iter().enumerate() {
        assert!(
            std::fs::read(folder.join(i.to_string())).unwrap() == *expected,
            "file {i} differs"
        );
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
