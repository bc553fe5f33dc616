//! Going on from a checkpoint: the newest whole one, all of its states, the position in the data.

use super::checkpoints::{States, system};
use super::failure;
use super::states::listed;
use crate::args::CheckpointArgs;
use crate::failure::Failure;
use crate::out;
use checkpoint::{Checkpoint, Error, MANIFEST, newest_first};
use runtime::Machine;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Gives the machine the states of the checkpoint that `--resume` means. `None` if the run begins:
/// without the option, or if its folder is the one that checkpoints are written to, and empty.
/// `options`: what results depend on.
pub(super) fn restore(
    args: &CheckpointArgs,
    machine: &mut Machine,
    states: &States,
    options: &BTreeMap<String, String>,
) -> Result<Option<Checkpoint>, Failure> {
    let Some(path) = &args.resume else {
        return Ok(None);
    };
    let found = match path.join(MANIFEST).exists() {
        true => vec![path.clone()],
        false => {
            let found = newest_first(path).map_err(|e| Failure::Input(format!("--resume {e}")))?;
            found.into_iter().map(|(_, path)| path).collect()
        }
    };
    if found.is_empty() && args.may_begin() {
        out::note(&format!(
            "note: {} has no checkpoint yet; the run begins",
            path.display()
        ));
        return Ok(None);
    }
    let mut skipped = BTreeSet::new();
    for path in &found {
        match load(args, path, machine, states, options) {
            Ok(checkpoint) => {
                check_is_last(args, &checkpoint, &skipped)?;
                out::note(&format!(
                    "note: goes on from {}, after step {}",
                    path.display(),
                    checkpoint.manifest().step
                ));
                return Ok(Some(checkpoint));
            }
            Err(Unusable::Damaged(error)) => {
                out::note(&format!("note: skipped a checkpoint: {error}"));
                skipped.insert(path.clone());
            }
            Err(Unusable::Refused(failure)) => return Err(failure),
        }
    }
    let path = path.display();
    Err(Failure::Input(match skipped.len() {
        0 => format!("--resume {path}: there is no checkpoint in it"),
        n => format!("--resume {path}: none of {n} checkpoints is whole"),
    }))
}

/// Why a checkpoint is not used.
enum Unusable {
    /// Another one may be whole.
    Damaged(Error),
    Refused(Failure),
}

impl From<Error> for Unusable {
    fn from(error: Error) -> Unusable {
        Unusable::Damaged(error)
    }
}

fn load(
    args: &CheckpointArgs,
    path: &Path,
    machine: &mut Machine,
    states: &States,
    options: &BTreeMap<String, String>,
) -> Result<Checkpoint, Unusable> {
    let checkpoint = Checkpoint::open(path)?;
    check_states(&checkpoint, states).map_err(Unusable::Refused)?;
    check_options(args, &checkpoint, options).map_err(Unusable::Refused)?;
    for tensor in states.tensors() {
        checkpoint.read(&tensor.name, |start, bytes| {
            let written = machine.write_state_part(&tensor.name, start, bytes);
            written.map_err(|e| Unusable::Refused(failure(e)))
        })?;
    }
    Ok(checkpoint)
}

/// An error unless the checkpoint has exactly the states of the step.
fn check_states(checkpoint: &Checkpoint, states: &States) -> Result<(), Failure> {
    let entries = checkpoint.entries();
    let mut missing = vec![];
    let mut other = vec![];
    for tensor in states.tensors() {
        match entries.get(&tensor.name) {
            None => missing.push(tensor.name.clone()),
            Some(entry) if (entry.dtype, &entry.shape) != (tensor.dtype, &tensor.shape) => {
                other.push(tensor.name.clone());
            }
            Some(_) => {}
        }
    }
    let names: BTreeSet<&str> = states.tensors().iter().map(|t| t.name.as_str()).collect();
    let extra = entries.keys().filter(|name| !names.contains(name.as_str()));
    let extra: Vec<String> = extra.cloned().collect();
    let differences = [
        ("it lacks", missing),
        ("another type have", other),
        ("the step lacks", extra),
    ];
    let mut lines = differences
        .into_iter()
        .filter(|(_, names)| !names.is_empty());
    let Some((what, names)) = lines.next() else {
        return Ok(());
    };
    Err(Failure::Input(format!(
        "--resume {}: it is of another step: {what} {}\n  --init {} takes the parameters alone",
        checkpoint.path().display(),
        listed(&names),
        checkpoint.path().display()
    )))
}

/// An error, or a note, about each option that differs.
fn check_options(
    args: &CheckpointArgs,
    checkpoint: &Checkpoint,
    options: &BTreeMap<String, String>,
) -> Result<(), Failure> {
    let before = &checkpoint.manifest().options;
    let names: BTreeSet<&String> = before.keys().chain(options.keys()).collect();
    let width = names.iter().map(|name| name.len()).max().unwrap_or(0);
    let of = |options: &BTreeMap<String, String>, name: &String| {
        options.get(name).map_or("none".to_string(), String::clone)
    };
    let mut lines = String::new();
    for name in names {
        let (then, now) = (of(before, name), of(options, name));
        if then != now {
            lines.push_str(&format!("\n  {name:<width$}  {then}, now {now}"));
        }
    }
    if lines.is_empty() {
        return Ok(());
    }
    let path = checkpoint.path().display();
    let text = format!("{path} was written with other options:{lines}");
    if args.allow_changes {
        out::note(&format!("note: {text}"));
        return Ok(());
    }
    Err(Failure::Input(format!(
        "--resume {text}\n  give the same options, or go on with these: --allow-changes"
    )))
}

/// An error if checkpoints of later steps would be taken for those of this run.
fn check_is_last(
    args: &CheckpointArgs,
    checkpoint: &Checkpoint,
    skipped: &BTreeSet<PathBuf>,
) -> Result<(), Failure> {
    let Some(folder) = args.folder() else {
        return Ok(());
    };
    let step = checkpoint.manifest().step;
    for (later, path) in newest_first(&folder).map_err(system)? {
        if later > step && !skipped.contains(&path) && Checkpoint::open(&path).is_ok() {
            return Err(Failure::Input(format!(
                "--resume {}: {} is later; move it, or name another folder with --checkpoints",
                checkpoint.path().display(),
                path.display()
            )));
        }
    }
    Ok(())
}
