//! `lighterage compile`: the artifact, or the text of its kernels.

use crate::args::{CodeFor, CompileArgs, Compiling, Emit};
use crate::base;
use crate::buckets::{self, Sizes};
use crate::data::{check_writable, file_size, save_atomically};
use crate::failure::Failure;
use crate::halves;
use crate::micro_batches;
use crate::model::{self, Model};
use crate::observe::Dumps;
use crate::out::{self, out};
use crate::size;
use crate::trust;
use artifact::{Artifact, DType};
use codegen::kernels::Target;
use codegen::{Form, Listed, Listing, Plain};
use ir::{Device, TensorType};
use passes::graph::quantize::matrix_of;
use serde_json::{Value as Json, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Runs the command.
pub(crate) fn run(args: &CompileArgs) -> Result<(), Failure> {
    if let Some(path) = &args.output {
        check_writable("--output", path)?;
    }
    let (reading, sizes) = buckets::largest(&args.model.model, &args.model.reading, &args.buckets)?;
    let model = model::read(&args.model.model, &reading, &args.compiling.forward)?;
    let path = match (args.emit, &args.output) {
        (Some(emit), output) => return kernels(model, emit, args, output.as_deref()),
        (None, Some(path)) => path,
        (None, None) => {
            return Err(Failure::Input(
                "--output should name the file to write".into(),
            ));
        }
    };
    // The report is one sentence; it is left out if a dump goes to standard output.
    let to_stdout = args.compiling.dump_ir_after.is_some() && args.compiling.dump_dir.is_none();
    let dumps = if args.json {
        Dumps::Stderr
    } else {
        Dumps::Stdout
    };
    let artifact = artifact(model, sizes.as_ref(), &args.compiling, args.target, dumps)?;
    // The compiler accepts more types for an op than the kernels do.
    runtime::validate(&artifact).map_err(|e| {
        Failure::Input(format!(
            "{}: the step compiles, but it cannot be run: {e}",
            args.model.model.display()
        ))
    })?;
    if let Some(why) = trust::write(path, &artifact)? {
        out::note(&format!(
            "note: {} is not signed, so `train` runs it only with --trust: {why}",
            path.display()
        ));
    }
    let summary = &artifact.summary;
    if args.json {
        let (bytes, commands) = (
            std::fs::metadata(path).map_or(0, |data| data.len()),
            artifact.commands.len(),
        );
        out::line(
            &json!({"path": path, "bytes": bytes, "commands": commands, "summary": summary})
                .to_string(),
        );
        return Ok(());
    }
    let sentence = format!(
        "{}: {}, {} commands; peak {}, predicted {} a step",
        path.display(),
        file_size(path),
        artifact.commands.len(),
        size::bytes(summary.planned_peak_bytes),
        size::micros(summary.predicted_ms * 1e3)
    );
    if to_stdout {
        out::note(&sentence);
    } else {
        out!("{sentence}");
    }
    Ok(())
}

/// Writes the text of the kernels of a model's step.
fn kernels(
    model: Model,
    emit: Emit,
    args: &CompileArgs,
    output: Option<&Path>,
) -> Result<(), Failure> {
    let default = if emit == Emit::Ptx {
        Some(Target::SM_90)
    } else {
        Target::host()
    };
    let target = match args.target {
        Some(CodeFor::Named(target)) => Some(target),
        Some(CodeFor::ThisCpu) => Target::host(),
        None => default,
    };
    let target = target.ok_or_else(|| {
        Failure::Input(
            "no kernels are generated for this processor; --target names one that has some".into(),
        )
    })?;
    if emit == Emit::Ptx && !target.is_gpu() {
        let named = target.name();
        return Err(Failure::Input(format!(
            "--emit ptx is for GPUs, and {named} is none; --emit asm has its assembly"
        )));
    }
    let mut machine = model::machine(&args.compiling)?;
    machine.device.sm = target.sm();
    let (model, compiling) = micro_batches::decide(model, &args.compiling, &machine)?;
    let compiled = model::compile(&model.graph, &compiling, &machine, Dumps::Stderr)?;
    let form = match emit {
        Emit::Mlir => Form::Mlir,
        Emit::Llvm => Form::Llvm,
        Emit::Asm | Emit::Ptx => Form::Asm,
    };
    let listing = codegen::listing(&compiled.program, &target, form)?;
    let text = match args.json {
        true => format!("{}\n", listing_json(&listing, emit, &target)),
        false => listing.to_string(),
    };
    match output {
        Some(path) => save_atomically(path, &[text.as_bytes()]),
        None => {
            out::text(&text);
            Ok(())
        }
    }
}

fn listing_json(listing: &Listing, emit: Emit, target: &Target) -> Json {
    let kernel = |k: &Listed| {
        json!({"name": k.name, "op": k.op, "nodes": k.nodes,
        "parts": k.parts, "scratch_bytes": k.scratch_bytes, "text": k.text})
    };
    let plain = |p: &Plain| json!({"op": p.op, "nodes": p.nodes, "why": p.why});
    json!({
        "form": emit.name(),
        "target": target.name(),
        "kernels": listing.kernels.iter().map(kernel).collect::<Vec<_>>(),
        "plain": listing.plain.iter().map(plain).collect::<Vec<_>>(),
    })
}

/// The target of an artifact's kernels: the given one, else the planned device.
fn target(given: Option<CodeFor>, device: &Device) -> Result<Option<Target>, Failure> {
    match (given, device.sm) {
        (Some(CodeFor::Named(target)), _) => Ok(Some(target)),
        (Some(CodeFor::ThisCpu), _) | (None, None) => Ok(Target::host()),
        (None, Some(sm)) => match Target::gpu(sm) {
            Some(target) => Ok(Some(target)),
            None => Err(Failure::Input(format!(
                "device {}: no kernels are generated for sm = {sm}; --target names what they can \
                 be for",
                device.name
            ))),
        },
    }
}

/// Compiles a model to an artifact, for the given target, else for the planned device.
fn artifact(
    model: Model,
    sizes: Option<&Sizes>,
    compiling: &Compiling,
    code_for: Option<CodeFor>,
    dumps: Dumps,
) -> Result<Artifact, Failure> {
    artifact_on(
        model::machine(compiling)?,
        (model, sizes),
        compiling,
        code_for,
        dumps,
    )
}

/// The same on a machine that is known already. With sizes, the artifact has a step for each.
pub(crate) fn artifact_on(
    mut machine: model::Machine,
    (model, sizes): (Model, Option<&Sizes>),
    compiling: &Compiling,
    code_for: Option<CodeFor>,
    dumps: Dumps,
) -> Result<Artifact, Failure> {
    if !model.unsupported.is_empty() {
        return Err(Failure::Input(unsupported(&model.unsupported)));
    }
    let target = target(code_for, &machine.device)?;
    // Scratch differs by what runs the kernels.
    machine.device.sm = target.and_then(|target| target.sm());
    let (model, compiling) = micro_batches::decide(model, compiling, &machine)?;
    let compiled = model::compile(&model.graph, &compiling, &machine, dumps)?;
    let smaller = match sizes {
        Some(sizes) => sizes.compiled(&model, &compiled, &compiling, &machine)?,
        None => vec![],
    };
    let states = compiled.program.graph.states.values();
    let in_nf4: BTreeSet<String> = states
        .filter_map(|state| matrix_of(&state.path))
        .map(|(path, _)| path.to_string())
        .collect();
    let states = compiled.program.graph.states.values();
    let types: BTreeMap<&str, DType> = states
        .map(|state| {
            let ty = &compiled.program.graph.values[state.before].ty;
            (&*state.path, codegen::dtype(ty.dtype()))
        })
        .collect();
    let stored = |(path, (ty, bytes)): (String, (TensorType, Vec<u8>))| {
        let dtype = codegen::dtype(ty.dtype());
        if in_nf4.contains(&path) {
            return base::stored(&path, dtype, &bytes).to_vec();
        }
        let other = types.get(&*path).filter(|&&other| other != dtype);
        match other.and_then(|&other| Some((other, halves::numbers(dtype, &bytes)?))) {
            Some((other, numbers)) => {
                halves::stored(&path, other, &numbers, |path| types.contains_key(path))
            }
            None => vec![(path, bytes)],
        }
    };
    let data = model.tensors.into_iter().flat_map(stored).collect();
    let artifact = codegen::emit(&compiled, &data, target)?;
    let smaller = smaller
        .iter()
        .map(|(_, compiled)| codegen::emit(compiled, &data, target));
    let smaller = smaller.collect::<Result<_, _>>()?;
    artifact::sharing(artifact, smaller).map_err(|e| {
        let name = sizes.map_or("", |sizes| sizes.name());
        Failure::Input(format!(
            "--buckets: the model depends on {name} not only by the sizes of tensors: {e}"
        ))
    })
}

/// What a user can do about calls that have no kernel. Files of other frameworks have no other way.
pub(crate) fn instead(ops: &[torch::Unsupported]) -> Option<&'static str> {
    let is_torch = |op: &torch::Unsupported| op.target.starts_with("torch.");
    ops.iter().any(is_torch).then_some(
        "torch.export.export(..).run_decompositions() may replace them by simpler calls; a step of \
         the Python package has PyTorch compute them",
    )
}

/// The largest number of listed ops that cannot be run.
const NAMED: usize = 10;

fn unsupported(ops: &[torch::Unsupported]) -> String {
    let lines: Vec<String> = ops
        .iter()
        .take(NAMED)
        .map(|op| format!("Unsupported: {} (node {}): {}", op.target, op.node, op.why))
        .collect();
    let rest = ops.len().saturating_sub(NAMED);
    let rest = if rest == 0 {
        String::new()
    } else {
        format!("\n  and {rest} more")
    };
    let help = instead(ops).map_or_else(String::new, |help| format!("\n{help}"));
    format!(
        "the model calls what has no kernel; it can be planned, not run\n  {}{rest}{help}",
        lines.join("\n  ")
    )
}
