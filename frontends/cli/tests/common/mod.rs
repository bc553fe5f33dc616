//! Shared code of the command's tests: running it, its files, a temporary folder.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A run of the command that has ended.
pub(crate) struct Run {
    /// Its exit code.
    pub(crate) code: i32,
    /// Its standard output.
    pub(crate) out: String,
    /// Its standard error.
    pub(crate) err: String,
}

impl Run {
    /// Checks that the run ended with `code`.
    #[track_caller]
    pub(crate) fn expect(self, code: i32) -> Run {
        assert_eq!(
            self.code, code,
            "stdout:\n{}\nstderr:\n{}",
            self.out, self.err
        );
        assert!(!self.err.contains("internal error"), "{}", self.err);
        self
    }
    /// The lines of standard output that are JSON objects.
    #[track_caller]
    pub(crate) fn json(&self) -> Vec<serde_json::Value> {
        self.out
            .lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
            .collect()
    }
    /// The same, by reference.
    #[track_caller]
    pub(crate) fn says_all(&self, words: &[&str]) {
        for word in words {
            assert!(self.err.contains(word), "{word:?}: {}", self.err);
        }
    }
    /// Checks that standard error has all of these words.
    #[track_caller]
    pub(crate) fn says(self, words: &[&str]) -> Run {
        for word in words {
            assert!(
                self.err.contains(word),
                "{word:?} should be in:\n{}",
                self.err
            );
        }
        self
    }
}

/// The command with these arguments, separated by spaces.
pub(crate) fn command(args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lighterage"));
    command.args(args.split_whitespace());
    command
}

/// Runs the command.
pub(crate) fn run(args: &str) -> Run {
    run_with(args, &[])
}

/// Runs the command with variables of the environment.
pub(crate) fn run_with(args: &str, variables: &[(&str, &str)]) -> Run {
    let mut command = command(args);
    command.envs(variables.iter().copied());
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Run {
        code: status.code().unwrap_or(-1),
        out: text(stdout),
        err: text(stderr),
    }
}

/// A file of the models that all tests use.
pub(crate) fn model(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/data/models")
        .join(name);
    path.to_str().unwrap().to_string()
}

/// The small text graph.
pub(crate) fn mlp() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/mlp.ir")
        .to_str()
        .unwrap()
        .to_string()
}

/// A folder that is removed when the test ends.
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// A new, empty folder; `name` is the test's.
    pub(crate) fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("lighterage-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
    /// A file in it.
    pub(crate) fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_string()
    }
    /// Writes a file in it.
    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        std::fs::write(self.0.join(name), bytes).unwrap();
        self.file(name)
    }
    /// The names of its files, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let mut names: Vec<String> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The f32s of a tensor in a safetensors file.
pub(crate) fn floats(path: &str, name: &str) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let data = file.tensor(name).unwrap().data().to_vec();
    data.chunks_exact(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
        .collect()
}

/// A safetensors file of f32s: shape and values by name.
pub(crate) fn tensors(
    tensors: std::collections::BTreeMap<&str, (Vec<usize>, Vec<f32>)>,
) -> Vec<u8> {
    let bytes: Vec<(&str, Vec<usize>, Vec<u8>)> = tensors
        .into_iter()
        .map(|(name, (shape, values))| {
            let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            (name, shape, bytes)
        })
        .collect();
    let views = bytes
        .iter()
        .map(|(name, shape, bytes)| (*name, view(safetensors::Dtype::F32, shape.clone(), bytes)));
    safetensors::serialize(views, None).unwrap()
}

/// A tensor for a safetensors file.
pub(crate) fn view(
    dtype: safetensors::Dtype,
    shape: Vec<usize>,
    bytes: &[u8],
) -> safetensors::tensor::TensorView<'_> {
    safetensors::tensor::TensorView::new(dtype, shape, bytes).unwrap()
}
