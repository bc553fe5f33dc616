//! The `lighterage` command: one file for each subcommand, and shared code.
//!
//! Exit codes: 0; 1 the system refused (a full disk); 2 bad usage or bad input; 3 no plan fits; 4
//! training computed values that are not finite; 101 our bug; 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP.

mod alloc;
mod args;
mod base;
mod buckets;
mod check;
mod compile;
mod data;
mod devices;
mod disk;
mod estimate;
mod explain;
mod export;
mod failure;
mod finite;
mod fit;
mod generate;
mod groups;
mod halves;
mod import;
mod inspect;
mod interrupt;
mod logger;
mod lora;
mod memory;
mod micro_batches;
mod model;
mod observe;
mod offload;
mod out;
mod picture;
mod plan;
mod profile;
mod stored;
mod train;
mod trust;

use args::{Cli, Command};
use clap::Parser;
use failure::Failure;
use report::{curve, module, page, size, svg};
use std::process::ExitCode;

fn main() -> ExitCode {
    memory::exit_where_it_ends();
    std::panic::set_hook(Box::new(|panic| {
        memory::panicked();
        let payload = panic.payload();
        let message = payload.downcast_ref::<String>().map(String::as_str);
        let message = message
            .or_else(|| payload.downcast_ref::<&str>().copied())
            .unwrap_or("no message");
        let place = panic
            .location()
            .map(|place| format!(" ({}:{})", place.file(), place.line()))
            .unwrap_or_default();
        out::note(&format!(
            "internal error: {message}{place}; this is a bug of lighterage, please report it"
        ));
    }));
    let outcome = std::panic::catch_unwind(|| {
        let cli = Cli::parse();
        out::start();
        logger::start(cli.verbose).map_err(Failure::Input)?;
        run(cli.command)
    });
    let failure = match outcome {
        Ok(Ok(())) if out::failed() => return ExitCode::FAILURE,
        Ok(Ok(())) => return ExitCode::SUCCESS,
        Ok(Err(failure)) => failure,
        // The panic hook has reported it.
        Err(_) => return ExitCode::from(101),
    };
    out::note(&failure.to_string());
    ExitCode::from(failure.code())
}

fn run(mut command: Command) -> Result<(), Failure> {
    if let Some((path, forward)) = command.forward() {
        model::complete(path, forward);
    }
    let json = command.prints_json();
    let done = match command {
        Command::Import(args) => import::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Compile(args) => compile::run(&args),
        Command::Train(args) => train::run(&args),
        Command::Checkpoint(args) => stored::run(&args.command),
        Command::Export(args) => export::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Profile(args) => profile::run(&args),
        Command::Fit(args) => fit::run(&args),
        Command::Devices(args) => devices::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Estimate(args) => estimate::run(&args),
        Command::Offload(args) => offload::run(&args),
        Command::Alloc(args) => alloc::run(&args),
    };
    done.inspect_err(|failure| {
        if let (true, Some(object)) = (json, failure.json()) {
            out::line(&object.to_string());
        }
    })
}
