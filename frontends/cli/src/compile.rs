//! `lighterage compile`: the artifact.

use crate::args::{CompileArgs, Compiling};
use crate::data::{check_writable, file_size};
use crate::failure::Failure;
use crate::model::{self, Model};
use crate::observe::Dumps;
use crate::out::out;
use crate::size;
use artifact::Artifact;

/// Runs the command.
pub(crate) fn run(args: &CompileArgs) -> Result<(), Failure> {
    check_writable("--output", &args.output)?;
    let model = model::read(&args.model.model, &args.model.dim)?;
    // The report is a sentence: the dump may have standard output to itself.
    let to_stdout = args.compiling.dump_ir_after.is_some() && args.compiling.dump_dir.is_none();
    let artifact = artifact(model, &args.compiling, Dumps::Stdout)?;
    let path = &args.output;
    artifact::write_file(path, &artifact).map_err(|e| Failure::System(format!("{}: {e}", path.display())))?;
    let summary = &artifact.summary;
    let sentence = format!(
        "{}: {}, {} commands; peak {}, predicted {} a step",
        path.display(),
        file_size(path),
        artifact.commands.len(),
        size::bytes(summary.planned_peak_bytes),
        size::micros(summary.predicted_ms * 1e3)
    );
    if to_stdout {
        crate::out::note(&sentence);
    } else {
        out!("{sentence}");
    }
    Ok(())
}

/// Compiles a model to an artifact.
pub(crate) fn artifact(model: Model, compiling: &Compiling, dumps: Dumps) -> Result<Artifact, Failure> {
    // Known before any work: what cannot be run need not be planned.
    if !model.unsupported.is_empty() {
        return Err(Failure::Input(unsupported(&model.unsupported)));
    }
    let machine = model::machine(compiling)?;
    let compiled = model::compile(&model.graph, compiling, &machine, dumps)?;
    let data = model.tensors.into_iter().map(|(path, (_, bytes))| (path, bytes)).collect();
    let mut artifact = codegen::emit(&compiled, &data, model::options(compiling).optimizer).map_err(Failure::Input)?;
    artifact.summary.micro_batches = compiling.micro_batches.unwrap_or(1);
    Ok(artifact)
}

/// How many ops that cannot be run are named.
const NAMED: usize = 10;

fn unsupported(ops: &[torch::Unsupported]) -> String {
    let lines: Vec<String> =
        ops.iter().take(NAMED).map(|op| format!("Unsupported: {} (node {}): {}", op.target, op.node, op.why)).collect();
    let rest = ops.len().saturating_sub(NAMED);
    let rest = if rest == 0 { String::new() } else { format!("\n  and {rest} more") };
    format!("the model calls what has no kernel; it can be planned, not run\n  {}{rest}", lines.join("\n  "))
}
