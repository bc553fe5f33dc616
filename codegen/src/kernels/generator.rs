//! Runs the program `lighterage-mlir` as a child process, because LLVM ends its process when it
//! cannot translate code. One child answers one request after the other. Several children share a
//! list of kernels.

use super::{Generated, Target};
use passes::plan::Cancel;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The name of the program.
const PROGRAM: &str = "lighterage-mlir";

/// The requested result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// An ELF object, for a CPU.
    Object,
    /// Assembly; for a GPU, PTX.
    Asm,
    /// LLVM's text, after its passes.
    Llvm,
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Stage::Object => "object",
            Stage::Asm => "asm",
            Stage::Llvm => "llvm",
        }
    }
}

/// Why no code was generated.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum GeneratorError {
    /// The program does not exist.
    #[error("{0}")]
    Missing(String),
    /// The system could not start the program or a thread.
    #[error("{0}")]
    System(String),
    /// The program ended while it worked on a kernel: its last message, and the kernel's name.
    #[error("the kernel generator stopped: {0} (kernel {1})")]
    Stopped(String, String),
    /// The program refused a kernel: its message.
    #[error("the kernel generator refused a kernel: {0}")]
    Refused(String),
}

/// Folders in which cargo puts tests, benches and examples, below the folder of programs.
const CARGO_FOLDERS: [&str; 2] = ["deps", "examples"];

/// Where the program was installed, if the running program is an interpreter that loaded us.
static INSTALLED: OnceLock<PathBuf> = OnceLock::new();

/// Says where the program was installed. Only the first call counts.
pub fn installed_at(program: PathBuf) {
    INSTALLED.get_or_init(|| program);
}

/// The path of the program: `LIGHTERAGE_MLIR`, what [`installed_at`] was told, or the folder of the
/// running program. A test of cargo finds it in the folder above. No other folder above is
/// searched, because another user might write to it.
pub fn find() -> Result<PathBuf, GeneratorError> {
    if let Some(path) = std::env::var_os("LIGHTERAGE_MLIR") {
        let path = PathBuf::from(path);
        if path.is_file() {
            return Ok(path);
        }
        return Err(GeneratorError::Missing(format!(
            "LIGHTERAGE_MLIR is {}, which is not a file",
            path.display()
        )));
    }
    if let Some(path) = INSTALLED.get().filter(|path| path.is_file()) {
        return Ok(path.clone());
    }
    let running = std::env::current_exe().map_err(|e| {
        GeneratorError::Missing(format!(
            "the path of the running program is unknown: {e}; LIGHTERAGE_MLIR can say where \
             {PROGRAM} is"
        ))
    })?;
    find_beside(&running).ok_or_else(|| {
        GeneratorError::Missing(format!(
            "the kernel generator {PROGRAM} is not beside {}; `./make build` builds it, --kernels \
             plain does without, or LIGHTERAGE_MLIR can say where it is",
            running.display()
        ))
    })
}

/// The generator next to a running program.
fn find_beside(running: &Path) -> Option<PathBuf> {
    let program = format!("{PROGRAM}{}", std::env::consts::EXE_SUFFIX);
    let folder = running.parent()?;
    let of_cargo = folder
        .file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| CARGO_FOLDERS.contains(&name));
    let above = if of_cargo { folder.parent() } else { None };
    [Some(folder), above]
        .into_iter()
        .flatten()
        .map(|folder| folder.join(&program))
        .find(|path| path.is_file())
}

/// A running kernel generator.
pub struct Generator {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    /// The last line on standard error.
    said: Arc<Mutex<String>>,
    listener: Option<std::thread::JoinHandle<()>>,
}

impl Generator {
    /// Starts the program at a path: see [`find`].
    pub fn start(program: &Path) -> Result<Generator, GeneratorError> {
        let refused = |e: io::Error| {
            GeneratorError::System(format!("{} does not start: {e}", program.display()))
        };
        let mut child = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(refused)?;
        let (Some(to), Some(from), Some(errors)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(refused(io::Error::other("it has no pipes")));
        };
        let said = Arc::new(Mutex::new(String::new()));
        let heard = said.clone();
        let listen = move || {
            // LLVM's first line is the reason; a list of calls follows.
            for line in BufReader::new(errors).lines().map_while(Result::ok) {
                let mut said = heard.lock().unwrap_or_else(PoisonError::into_inner);
                if said.is_empty() || line.contains("LLVM ERROR") {
                    *said = line;
                }
            }
        };
        let listener = std::thread::Builder::new().spawn(listen).map_err(|e| {
            let _ = child.kill();
            let _ = child.wait();
            refused(e)
        })?;
        Ok(Generator {
            child,
            to,
            from: BufReader::new(from),
            said,
            listener: Some(listener),
        })
    }

    /// Compiles a module. After an error other than a refusal the generator cannot be used again.
    pub fn run(
        &mut self,
        name: &str,
        mlir: &str,
        target: &Target,
        stage: Stage,
    ) -> Result<Vec<u8>, GeneratorError> {
        match self.ask(name, mlir, target, stage) {
            Ok(answer) => answer.map_err(GeneratorError::Refused),
            Err(e) => {
                // It has ended, or its answer is invalid. Its last message is complete when its
                // output has ended.
                let _ = self.child.kill();
                let _ = self.child.wait();
                if let Some(listener) = self.listener.take() {
                    let _ = listener.join();
                }
                let said = self
                    .said
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .clone();
                Err(GeneratorError::Stopped(
                    if said.is_empty() { e.to_string() } else { said },
                    name.into(),
                ))
            }
        }
    }

    fn ask(
        &mut self,
        name: &str,
        mlir: &str,
        target: &Target,
        stage: Stage,
    ) -> io::Result<Result<Vec<u8>, String>> {
        writeln!(self.to, "{name} {} {target} {}", stage.name(), mlir.len())?;
        self.to.write_all(mlir.as_bytes())?;
        self.to.flush()?;
        let mut line = String::new();
        self.from.read_line(&mut line)?;
        let bad = || {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("its answer is {line:?}"),
            )
        };
        let (word, bytes) = line.trim_end().split_once(' ').ok_or_else(bad)?;
        let mut answer = vec![0; bytes.parse().map_err(|_| bad())?];
        self.from.read_exact(&mut answer)?;
        match word {
            "ok" => Ok(Ok(answer)),
            "error" => Ok(Err(String::from_utf8_lossy(&answer).into_owned())),
            _ => Err(bad()),
        }
    }
}

impl Drop for Generator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Compiles several kernels, with one generator for each core. The results have the kernels' order.
pub fn run_all(
    kernels: &[&Generated],
    target: &Target,
    stage: Stage,
) -> Result<Vec<Vec<u8>>, GeneratorError> {
    run_all_until(kernels, target, stage, &Cancel::default())
}

/// The same, with a look at `cancel` before each kernel.
pub(super) fn run_all_until(
    kernels: &[&Generated],
    target: &Target,
    stage: Stage,
    cancel: &Cancel,
) -> Result<Vec<Vec<u8>>, GeneratorError> {
    if kernels.is_empty() {
        return Ok(vec![]);
    }
    let program = find()?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // Starting a generator takes as long as two kernels.
    let n = cores.min(kernels.len().div_ceil(4));
    let share = |worker: usize| -> Result<Vec<Vec<u8>>, GeneratorError> {
        let mut generator = Generator::start(&program)?;
        let mine = kernels.iter().skip(worker).step_by(n);
        mine.map(|kernel| {
            cancel.look();
            generator.run(&kernel.name, &kernel.mlir, target, stage)
        })
        .collect()
    };

    let shares: Vec<Result<Vec<Vec<u8>>, GeneratorError>> = std::thread::scope(|scope| {
        let start = |worker| std::thread::Builder::new().spawn_scoped(scope, move || share(worker));
        // This thread does the first share, and the shares whose thread could not be started.
        let workers: Vec<_> = (1..n).map(start).collect();
        let first = share(0);
        let others = workers.into_iter().enumerate().map(|(i, worker)| {
            let Ok(worker) = worker else {
                return share(i + 1);
            };
            worker
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        });
        std::iter::once(first).chain(others).collect()
    });

    let mut shares = shares
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?
        .into_iter()
        .map(Vec::into_iter)
        .collect::<Vec<_>>();
    Ok((0..kernels.len())
        .map(|i| shares[i % n].next().unwrap_or_default())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_generator_above_is_found_by_tests_of_cargo_alone() {
        let root = std::env::temp_dir().join(format!("lighterage-find-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let program = format!("{PROGRAM}{}", std::env::consts::EXE_SUFFIX);
        for folder in ["unpacked", "deps"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        fs::write(root.join(&program), "").unwrap();

        let planted = find_beside(&root.join("unpacked").join("lighterage"));
        let of_cargo = find_beside(&root.join("deps").join("test-1f"));
        let beside = find_beside(&root.join("lighterage"));
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(planted, None);
        assert_eq!(of_cargo, Some(root.join(&program)));
        assert_eq!(beside, Some(root.join(&program)));
    }
}
