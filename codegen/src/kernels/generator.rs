//! The program `lighterage-mlir` as a child: LLVM ends the process when it finds code that it
//! cannot translate, and may do so there. One child answers one request after the other; several
//! share a list of kernels.

use super::{Generated, Target};
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

/// The name of the program.
const PROGRAM: &str = "lighterage-mlir";

/// What is asked for.
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

/// Why there is no code.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GeneratorError {
    /// The program is not there, or does not start.
    Missing(String),
    /// The program ended while it worked on a kernel: the last that it said, and the kernel's name.
    Stopped(String, String),
    /// The program refused a kernel: its message.
    Refused(String),
}

impl fmt::Display for GeneratorError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GeneratorError::Missing(why) => f.write_str(why),
            GeneratorError::Stopped(said, kernel) => {
                write!(f, "the kernel generator stopped: {said} (kernel {kernel})")
            }
            GeneratorError::Refused(why) => {
                write!(f, "the kernel generator refused a kernel: {why}")
            }
        }
    }
}

impl std::error::Error for GeneratorError {}

/// Where the program is: `LIGHTERAGE_MLIR`, or beside the running program, or in the folder above,
/// where cargo puts it for tests.
pub fn find() -> Result<PathBuf, GeneratorError> {
    if let Some(path) = std::env::var_os("LIGHTERAGE_MLIR") {
        let path = PathBuf::from(path);
        return match path.is_file() {
            true => Ok(path),
            false => Err(GeneratorError::Missing(format!(
                "LIGHTERAGE_MLIR is {}, and no file",
                path.display()
            ))),
        };
    }
    let running =
        std::env::current_exe().map_err(|e| GeneratorError::Missing(format!("where am I? {e}")))?;
    let program = format!("{PROGRAM}{}", std::env::consts::EXE_SUFFIX);
    let folders = running.ancestors().skip(1).take(2);
    folders.map(|folder| folder.join(&program)).find(|path| path.is_file()).ok_or_else(|| {
        GeneratorError::Missing(format!(
            "the kernel generator {PROGRAM} is not beside {}; `./make build` builds it, --kernels \
             plain does without, or LIGHTERAGE_MLIR may say where it is",
            running.display()
        ))
    })
}

/// A kernel generator that runs.
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
        let missing = |e: io::Error| {
            GeneratorError::Missing(format!("{} does not start: {e}", program.display()))
        };
        let mut child = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(missing)?;
        let (Some(to), Some(from), Some(errors)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(missing(io::Error::other("it has no pipes")));
        };
        let said = Arc::new(Mutex::new(String::new()));
        let heard = said.clone();
        let listener = std::thread::spawn(move || {
            // What LLVM says first is why it stops; a list of calls follows.
            for line in BufReader::new(errors).lines().map_while(Result::ok) {
                let mut said = heard.lock().unwrap_or_else(PoisonError::into_inner);
                if said.is_empty() || line.contains("LLVM ERROR") {
                    *said = line;
                }
            }
        });
        Ok(Generator {
            child,
            to,
            from: BufReader::new(from),
            said,
            listener: Some(listener),
        })
    }

    /// What a module becomes. After an error other than a refusal the generator is of no more use.
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
                // It has ended, or speaks nonsense. What it said last is complete when its end was
                // heard.
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

/// What each of some kernels becomes, by as many generators as there are cores. The answers are in
/// the kernels' order.
pub fn run_all(
    kernels: &[&Generated],
    target: &Target,
    stage: Stage,
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
        mine.map(|kernel| generator.run(&kernel.name, &kernel.mlir, target, stage))
            .collect()
    };
    let shares: Vec<Result<Vec<Vec<u8>>, GeneratorError>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..n)
            .map(|worker| scope.spawn(move || share(worker)))
            .collect();
        let joined = workers.into_iter().map(|worker| worker.join());
        joined
            .map(|share| share.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
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
