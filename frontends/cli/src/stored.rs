//! `lighterage checkpoint`: lists, verifies and converts checkpoints.

use crate::args::CheckpointCommand;
use crate::data::check_writable;
use crate::failure::Failure;
use crate::out::{self, out};
use crate::size::{bytes, short};
use checkpoint::{Checkpoint, Error, LATEST, MANIFEST, Part, Tensor, newest_first, tensors};
use serde_json::json;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Runs the command.
pub(crate) fn run(command: &CheckpointCommand) -> Result<(), Failure> {
    match command {
        CheckpointCommand::List { path, json } => list(path, *json),
        CheckpointCommand::Verify { path, json } => verify(path, *json),
        CheckpointCommand::Convert {
            path,
            output,
            states,
            json,
        } => convert(path, output, *states, *json),
    }
}

fn failure(error: Error) -> Failure {
    match error {
        // A path that is wrong is the user's.
        Error::Io { ref source, .. }
            if !matches!(
                source.kind(),
                ErrorKind::NotFound | ErrorKind::NotADirectory
            ) =>
        {
            Failure::System(error.to_string())
        }
        Error::Io { .. } | Error::Damaged { .. } | Error::Locked { .. } => {
            Failure::Input(error.to_string())
        }
    }
}

/// A checkpoint, or those of a folder, the newest first; at least one.
fn all(path: &Path) -> Result<Vec<PathBuf>, Failure> {
    if path.join(MANIFEST).exists() {
        return Ok(vec![path.to_path_buf()]);
    }
    let found = newest_first(path).map_err(failure)?;
    if found.is_empty() {
        let path = path.display();
        return Err(Failure::Input(format!(
            "{path}: there is no checkpoint in it; `train --checkpoints {path}` writes some"
        )));
    }
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

fn list(path: &Path, json: bool) -> Result<(), Failure> {
    let latest = fs::read_link(path.join(LATEST)).ok();
    for path in all(path)?.iter().rev() {
        let name = path.file_name().unwrap_or_default();
        let is_latest = latest.as_deref() == Some(Path::new(name));
        let shown = path.display().to_string();
        match Checkpoint::open(path) {
            Ok(checkpoint) => {
                let manifest = checkpoint.manifest();
                let (tensors, size) = (checkpoint.entries().len(), checkpoint.file_bytes());
                if json {
                    out!(
                        "{}",
                        json!({
                            "path": shown, "step": manifest.step, "batches": manifest.batches,
                            "model": manifest.model, "bytes": size, "tensors": tensors,
                            "latest": is_latest, "plan": manifest.plan,
                            "options": manifest.options,
                        })
                    );
                } else {
                    let mark = if is_latest { ", the latest" } else { "" };
                    out!("{shown}  {tensors} tensors, {}{mark}", short(size));
                }
            }
            Err(error) if json => out!("{}", json!({"path": shown, "damaged": error.to_string()})),
            Err(error) => out!("{shown}  damaged: {error}"),
        }
    }
    Ok(())
}

fn verify(path: &Path, json: bool) -> Result<(), Failure> {
    let mut damaged = vec![];
    for path in all(path)?.iter().rev() {
        let spinner = out::spinner(format!("reading {}", path.display()));
        let result = Checkpoint::open(path).and_then(|checkpoint| {
            checkpoint.verify()?;
            Ok(checkpoint.file_bytes())
        });
        if let Some(spinner) = spinner {
            spinner.finish_and_clear();
        }
        let shown = path.display().to_string();
        match &result {
            Ok(size) if json => out!("{}", json!({"path": shown, "whole": true, "bytes": size})),
            Ok(size) => out!("{shown}  whole, {}", bytes(*size)),
            Err(e) if json => {
                out!(
                    "{}",
                    json!({"path": shown, "whole": false, "damaged": e.to_string()})
                );
            }
            Err(e) => out!("{shown}  damaged: {e}"),
        }
        damaged.extend(result.err().map(|error| error.to_string()));
    }
    match damaged.is_empty() {
        true => Ok(()),
        false => Err(Failure::Input(damaged.join("\n  "))),
    }
}

fn convert(path: &Path, output: &Path, states: bool, json: bool) -> Result<(), Failure> {
    let is_file = output.extension().is_some_and(|name| name == "safetensors");
    if is_file {
        check_writable("-o", output)?;
    } else if output.exists() {
        let output = output.display();
        return Err(Failure::Input(format!(
            "-o {output}: exists; name a new folder, or a file OUT.safetensors"
        )));
    } else if states {
        let help = "--states: a folder has parameters and buffers only; name a file \
            OUT.safetensors";
        return Err(Failure::Input(help.into()));
    }
    let found = all(path)?;
    let path = found.first().expect("there is at least one");
    let checkpoint = Checkpoint::open(path).map_err(failure)?;
    checkpoint.verify().map_err(failure)?;

    let entries = checkpoint.entries().iter();
    let taken = entries.filter(|(_, entry)| states || entry.part.is_model());
    let list: Vec<Tensor> = taken
        .map(|(name, entry)| Tensor {
            name: name.clone(),
            dtype: entry.dtype,
            shape: entry.shape.clone(),
            part: Part::Model,
        })
        .collect();
    let mut source = |number: usize, start: u64, bytes: &mut [u8]| {
        checkpoint.read_part(&list[number].name, start, bytes)
    };
    if is_file {
        artifact::replace_file_with(output, |file| tensors::write_all(file, &list, &mut source))
            .map_err(|e| Failure::System(format!("{}: {e}", output.display())))?;
    } else {
        checkpoint::write_model(output, &list, &mut source).map_err(failure)?;
    }
    let size: u64 = list.iter().map(Tensor::bytes).sum();
    let (from, to) = (path.display().to_string(), output.display().to_string());
    if json {
        let object = json!({"from": from, "output": to, "tensors": list.len(), "bytes": size});
        out!("{object}");
    } else {
        out!(
            "wrote         {to}, {} tensors of {from}, {}",
            list.len(),
            short(size)
        );
    }
    Ok(())
}
