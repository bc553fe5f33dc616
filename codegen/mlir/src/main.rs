//! MLIR text in, objects and PTX out: the only program of Lighterage that links LLVM. LLVM ends the
//! process when it cannot select an instruction. So it runs in a separate process, which the
//! compiler starts (`codegen::kernels::generator`) and can lose without harm.
//!
//! Standard input has requests, one after the other. Each is a line of words, then the module's
//! text:
//!
//! ```text
//! NAME STAGE TRIPLE CPU FEATURES BYTES\n
//!     STAGE: object, asm (PTX for a GPU), llvm; FEATURES: `-` for none
//! the module, BYTES bytes
//! ```
//!
//! The answer to each on standard output is `ok BYTES\n` or `error BYTES\n`, then BYTES bytes: the
//! result, or a message. The end of the input ends the process. The same request has the same
//! answer, byte for byte.

mod llvm;
mod lower;

use std::io::{self, BufRead, Read, Write};

fn main() -> io::Result<()> {
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    let mut lowering = lower::Lowering::new();
    let mut line = String::new();
    loop {
        line.clear();
        if input.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let request = Request::parse(&line)?;
        let mut text = vec![0; request.bytes];
        input.read_exact(&mut text)?;
        // LLVM's last output before it ends the process is what the compiler reports.
        let answer = String::from_utf8(text)
            .map_err(|e| e.to_string())
            .and_then(|text| {
                lowering
                    .run(&text, &request)
                    .map_err(|e| format!("{}: {e}", request.name))
            });
        let (word, bytes) = match answer {
            Ok(bytes) => ("ok", bytes),
            Err(message) => ("error", message.into_bytes()),
        };
        writeln!(output, "{word} {}", bytes.len())?;
        output.write_all(&bytes)?;
        output.flush()?;
    }
}

/// The first line of a request.
struct Request {
    name: String,
    stage: Stage,
    target: llvm::Target,
    bytes: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Object,
    Asm,
    Llvm,
}

impl Request {
    fn parse(line: &str) -> io::Result<Request> {
        let bad = |what: &str| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{what} in the request {line:?}"),
            )
        };
        let words: Vec<&str> = line.split_whitespace().collect();
        let &[name, stage, triple, cpu, features, bytes] = &words[..] else {
            return Err(bad("not six words"));
        };
        let stage = match stage {
            "object" => Stage::Object,
            "asm" => Stage::Asm,
            "llvm" => Stage::Llvm,
            _ => return Err(bad("no such stage")),
        };
        let features = if features == "-" { "" } else { features };
        let target = llvm::Target {
            triple: triple.into(),
            cpu: cpu.into(),
            features: features.into(),
        };
        Ok(Request {
            name: name.into(),
            stage,
            target,
            bytes: bytes.parse().map_err(|_| bad("no number of bytes"))?,
        })
    }
}
