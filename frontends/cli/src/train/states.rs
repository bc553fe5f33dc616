//! Where the states' values come from, and where they are saved.

use super::checkpoints::States;
use super::{adapters, failure};
use crate::args::TrainArgs;
use crate::base;
use crate::data::Tensors;
use crate::failure::Failure;
use crate::halves;
use artifact::StateKind;
use checkpoint::tensors;
use passes::graph::quantize::matrix_of;
use runtime::{Machine, StateInit};
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

/// The largest number of names in an error.
const NAMED: usize = 8;

/// Where parameters come from.
pub(super) enum Init {
    /// From the model's file.
    File,
    /// Drawn, with this deviation.
    Normal(f64),
    /// From another file.
    Tensors(Tensors),
}

impl Init {
    pub(super) fn parse(text: Option<&str>) -> Result<Init, Failure> {
        let Some(text) = text else {
            return Ok(Init::File);
        };
        let Some(std) = text.strip_prefix("normal:") else {
            let path = PathBuf::from(text);
            return match path.extension() {
                None if !path.exists() => Err(Failure::Input(format!(
                    "--init {text}: neither normal:STD, as in normal:0.02, nor a file"
                ))),
                _ => Ok(Init::Tensors(Tensors::open_states(&path)?)),
            };
        };
        match std.parse::<f64>() {
            Ok(std) if std.is_finite() && 0.0 <= std => Ok(Init::Normal(std)),
            _ => Err(Failure::Input(format!(
                "--init {text}: {std:?} is not a deviation; write normal:0.02"
            ))),
        }
    }
}

/// Gives every state its value; an error lists the states without a value.
pub(super) fn give(
    machine: &mut Machine,
    init: &mut Init,
    seed: u64,
    tied: &[Vec<String>],
) -> Result<(), Failure> {
    let std = match init {
        Init::Normal(std) => Some(*std),
        Init::File | Init::Tensors(_) => None,
    };
    machine
        .initialise(&StateInit { seed, std })
        .map_err(failure)?;
    let states: Vec<artifact::State> = machine.states().cloned().collect();
    if let Init::Tensors(tensors) = init {
        let of_model =
            |state: &&artifact::State| !matches!(state.kind, StateKind::Moment | StateKind::Rng);
        let paths = states.iter().filter(of_model).map(|state| &*state.path);
        let paths = paths.map(|path| matrix_of(path).map_or(path, |(path, _)| path));
        tensors.add_published(paths.chain(tied.iter().flatten().map(String::as_str)));
    }
    // The matrices that the step stores in NF4, and that have values of their own.
    let in_nf4 = states.iter().filter_map(|state| {
        let (path, place) = matrix_of(&state.path)?;
        (place == 0).then_some((path, state))
    });
    for (path, codes) in in_nf4 {
        let stored = match init {
            Init::File => None,
            Init::Normal(_) => {
                let n = 2 * codes.operand.shape.iter().product::<u64>();
                let init = StateInit { seed, std };
                Some(base::of_numbers(path, &init.drawn(path, n)))
            }
            Init::Tensors(tensors) => match name_in(tensors, path, tied) {
                Some(name) => match tensors.in_nf4(name)? {
                    Some(bytes) => Some(base::named(path, bytes)),
                    None => {
                        let (dtype, bytes) = tensors.floats(name)?;
                        Some(base::stored(path, dtype, &bytes))
                    }
                },
                None => None,
            },
        };
        for (path, bytes) in stored.into_iter().flatten() {
            machine.write_state(&path, &bytes).map_err(failure)?;
        }
    }
    if let Init::Tensors(tensors) = init {
        let mut missing = vec![];
        let paths = states.iter().map(|state| state.path.clone()).collect();
        let mut given = BTreeSet::new();
        for state in &states {
            let (path, operand) = (&state.path, &state.operand);
            match name_in(tensors, path, tied) {
                Some(name) => {
                    let values = match state.kind {
                        StateKind::Param | StateKind::Buffer => {
                            halves::read(tensors, name, state, &paths)?
                        }
                        _ => vec![(path.clone(), tensors.get(name, operand)?)],
                    };
                    for (path, bytes) in values {
                        machine.write_state(&path, &bytes).map_err(failure)?;
                        given.insert(path);
                    }
                }
                None if given.contains(path) => {}
                // Adapters begin with the values that they were added with.
                None if adapters::has(path) && machine.has_state(path) => {}
                None if state.kind == StateKind::Param => missing.push(state.path.clone()),
                None => {}
            }
        }
        if !missing.is_empty() {
            let has: Vec<&str> = tensors.names().take(3).collect();
            let has = if has.is_empty() {
                "nothing".to_string()
            } else {
                has.join(", ")
            };
            let packed = missing.iter().find_map(|path| {
                let packed = path.replace("weight", "qweight");
                tensors
                    .has(&packed)
                    .then(|| format!("; {packed} is a form of GPTQ or AWQ, which is not read"))
            });
            return Err(Failure::Input(format!(
                "{}: no tensor for {}; the file has {has}, ..{}",
                tensors.path().display(),
                listed(&missing),
                packed.unwrap_or_default()
            )));
        }
    }
    let lacking: Vec<String> = machine
        .states()
        .map(|state| state.path.clone())
        .filter(|path| !machine.has_state(path))
        .collect();
    if lacking.is_empty() {
        return Ok(());
    }
    let help = match std {
        Some(_) => {
            "--init normal draws what is trained; frozen parameters and buffers need --init \
             FILE.safetensors with a tensor for each"
        }
        None => {
            "the model's file has no values for them; give --init normal:0.02, or --init \
             FILE.safetensors with a tensor for each"
        }
    };
    Err(Failure::Input(format!(
        "no value for {}; {help}",
        listed(&lacking)
    )))
}

/// The name of a state in a file: its path, or a tied path.
fn name_in<'a>(tensors: &Tensors, path: &'a str, tied: &'a [Vec<String>]) -> Option<&'a str> {
    let group = tied
        .iter()
        .find(|group| group.iter().any(|name| name == path));
    let others = group.into_iter().flatten().map(String::as_str);
    std::iter::once(path)
        .chain(others)
        .find(|name| tensors.has(name))
}

/// `5 states: a, b, c and 2 more`.
pub(super) fn listed(names: &[String]) -> String {
    let shown = names
        .iter()
        .take(NAMED)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    let rest = names.len().saturating_sub(NAMED);
    let count = if names.len() == 1 {
        "1 state".to_string()
    } else {
        format!("{} states", names.len())
    };
    if rest == 0 {
        format!("{count}: {shown}")
    } else {
        format!("{count}: {shown} and {rest} more")
    }
}

/// Saves all states, if the user names a file. If parameters or moments are not finite, returns a
/// message; an existing file is then not replaced. The states are read in pieces.
pub(super) fn save(
    args: &TrainArgs,
    machine: &mut Machine,
    states: &States,
) -> Result<Option<String>, Failure> {
    let Some(path) = &args.save else {
        return Ok(None);
    };
    let is_replaced = path.exists();
    let mut broken: Vec<String> = vec![];
    let written = artifact::replace_file_with(path, |file| {
        let mut source = |number: usize, start: u64, bytes: &mut [u8]| {
            let name = &states.tensors()[number].name;
            let read = machine.read_state_part(name, start, bytes);
            read.map_err(|e| io::Error::other(e.to_string()))?;
            if !states.is_sound(number, bytes) && broken.last() != Some(name) {
                broken.push(name.clone());
            }
            Ok(())
        };
        tensors::write_all(file, states.tensors(), &mut source)?;
        match broken.is_empty() || args.save_nonfinite || !is_replaced {
            true => Ok(()),
            false => Err(io::Error::other("NaN or infinite values")),
        }
    });
    broken.sort();
    let found = format!("NaN or infinite values in {}", listed(&broken));
    let is_broken = !broken.is_empty() && !args.save_nonfinite;
    match written {
        Err(_) if is_broken && is_replaced => Ok(Some(format!(
            "{found}\n  {} is left as it was; --save-nonfinite replaces it",
            path.display()
        ))),
        Err(e) => Err(Failure::System(format!("{}: {e}", path.display()))),
        Ok(()) if is_broken => Ok(Some(format!("{found}\n  they are in {}", path.display()))),
        Ok(()) => Ok(None),
    }
}
