//! Writes kernels for a GPU, their operands and the expected results, for a machine with a GPU: see
//! `lighterage_tests::gpu`.
//!
//! Here `cargo run -p lighterage-tests --example gpu_kernels -- sm_90 target/gpu`, there
//! `python3 benches/gpu_kernels.py target/gpu`.
#![allow(clippy::print_stderr, reason = "a program says what was wrong")]

use codegen::kernels::Target;
use lighterage_tests::gpu::{cases, timed, write};
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let targets = || Target::ALL.into_iter().filter(Target::is_gpu);
    let target = args
        .first()
        .and_then(|name| targets().find(|target| target.name() == name));
    let (Some(target), [_, folder]) = (target, &args[..]) else {
        let names: Vec<&str> = targets().map(|target| target.name()).collect();
        eprintln!("usage: gpu_kernels {} FOLDER", names.join("|"));
        return ExitCode::from(2);
    };
    match write(Path::new(folder), &target, &cases(&target), &timed(&target)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{folder}: {e}");
            ExitCode::FAILURE
        }
    }
}
