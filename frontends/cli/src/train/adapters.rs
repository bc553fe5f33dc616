//! Adapters in the layout of PEFT: a folder with `adapter_config.json`, which PEFT writes before a
//! model is exported, and `adapter_model.safetensors`.
//!
//! The path of an adapter's parameter in a model is `..base_model.MODULE.lora_A.default.weight`,
//! where `default` is the adapter's name. In the file it is `base_model.MODULE.lora_A.weight`.

use super::failure;
use crate::args::{AddLora, PEFT_CONFIG as CONFIG};
use crate::data::{self, Tensors};
use crate::failure::Failure;
use crate::finite;
use crate::halves;
use artifact::{DType, State, StateKind};
use checkpoint::tensors::{self, Part, Tensor};
use runtime::Machine;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

const FILE: &str = "adapter_model.safetensors";

/// The name of a parameter in a file of adapters; `None` if it belongs to no adapter.
fn name_of(path: &str) -> Option<String> {
    let mut parts: Vec<&str> = path.split('.').collect();
    let base = parts.iter().position(|part| *part == "base_model");
    parts.drain(..base.unwrap_or(0));
    if let Some(at) = parts.iter().position(|part| *part == "modules_to_save") {
        // A whole module that is trained beside adapters.
        (at + 2 < parts.len()).then(|| parts.drain(at..at + 2))?;
    } else {
        let at = parts.iter().position(|part| part.starts_with("lora_"))?;
        let is_named = at + 1 < parts.len();
        is_named.then(|| parts.remove(at + 1))?;
        if parts[at] == "lora_magnitude_vector" {
            parts.truncate(at + 1);
        }
    }
    Some(parts.join("."))
}

/// True for the matrices of an adapter, and not for whole modules that are trained beside it.
pub(super) fn has(path: &str) -> bool {
    path.split('.').any(|part| part.starts_with("lora_"))
}

/// The parameters of adapters, with their names in a file.
fn adapters(machine: &Machine) -> Result<Vec<(String, State)>, Failure> {
    let states = machine
        .states()
        .filter(|state| state.kind == StateKind::Param);
    let found: Vec<(String, State)> = states
        .filter_map(|state| Some((name_of(&state.path)?, state.clone())))
        .collect();
    match found.is_empty() {
        false => Ok(found),
        true => Err(Failure::Input(
            "the step has no adapters: adapters of PEFT have paths with lora_A and lora_B; --save \
             writes all states"
                .into(),
        )),
    }
}

/// Checks that a folder can take adapters. It gets the file that says what they are, if they were
/// added here.
pub(super) fn check_folder(folder: &Path, added: Option<&AddLora>) -> Result<(), Failure> {
    let config = folder.join(CONFIG);
    if let Some(added) = added.filter(|_| config.is_file()) {
        let known = AddLora::parse(&config.to_string_lossy()).map_err(Failure::Input)?;
        if known.to_graph() != added.to_graph() {
            return Err(Failure::Input(format!(
                "--save-adapters {}: its {CONFIG} is that of other adapters than --add-lora adds; \
                 name another folder",
                folder.display()
            )));
        }
    } else if let Some(added) = added {
        let failed = |e: io::Error| Failure::System(format!("{}: {e}", config.display()));
        std::fs::create_dir_all(folder).map_err(failed)?;
        let write = |file: &mut File| file.write_all(added.to_peft().as_bytes());
        artifact::replace_file_with(&config, write).map_err(failed)?;
    }
    if !config.is_file() {
        return Err(Failure::Input(format!(
            "--save-adapters {}: there is no {CONFIG} in it; save_pretrained({0:?}) of the model \
             in PEFT writes it, before or after the export",
            folder.display()
        )));
    }
    data::check_writable("--save-adapters", &folder.join(FILE))
}

/// Gives adapters the values of a folder.
pub(super) fn read(folder: &Path, machine: &mut Machine) -> Result<(), Failure> {
    let tensors = Tensors::open(&folder.join(FILE))?;
    let paths = machine.states().map(|state| state.path.clone()).collect();
    for (name, state) in adapters(machine)? {
        for (path, bytes) in halves::read(&tensors, &name, &state, &paths)? {
            machine.write_state(&path, &bytes).map_err(failure)?;
        }
    }
    Ok(())
}

/// Writes the adapters alone; returns the file.
pub(super) fn save(folder: &Path, machine: &mut Machine) -> Result<PathBuf, Failure> {
    let path = folder.join(FILE);
    let adapters = adapters(machine)?;
    let listed: Vec<Tensor> = adapters
        .iter()
        .map(|(name, state)| Tensor {
            name: name.clone(),
            dtype: match halves::has_master(machine.states(), &state.path) {
                true => DType::F32,
                false => state.operand.dtype,
            },
            shape: state.operand.shape.clone(),
            part: Part::Model,
        })
        .collect();
    let mut broken = None;
    let written = artifact::replace_file_with(&path, |file| {
        let mut source = |number: usize, start: u64, bytes: &mut [u8]| {
            let state = &adapters[number].1;
            let failed = |e: runtime::Error| io::Error::other(e.to_string());
            match halves::master_in(machine, &state.path).map_err(failed)? {
                Some(master) => {
                    let master = halves::rounded(DType::F32, &master);
                    bytes.copy_from_slice(&master[start as usize..][..bytes.len()]);
                }
                None => {
                    let read = machine.read_state_part(&state.path, start, bytes);
                    read.map_err(failed)?;
                }
            }
            match finite::is_sound(state.kind, listed[number].dtype, bytes) {
                true => Ok(()),
                false => {
                    broken = Some(state.path.clone());
                    Err(io::Error::other("NaN or infinite values"))
                }
            }
        };
        tensors::write_all(file, &listed, &mut source)
    });
    match (written, broken) {
        (Ok(()), _) => Ok(path),
        (Err(_), Some(broken)) => Err(Failure::NotFinite(format!(
            "NaN or infinite values in {broken}\n  {} is left as it was",
            path.display()
        ))),
        (Err(e), None) => Err(Failure::System(format!("{}: {e}", path.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_peft() {
        for (path, name) in [
            (
                "model.base_model.model.h.0.q_proj.lora_A.default.weight",
                Some("base_model.model.h.0.q_proj.lora_A.weight"),
            ),
            (
                "base_model.model.wte.lora_embedding_B.mine",
                Some("base_model.model.wte.lora_embedding_B"),
            ),
            (
                "base_model.model.q.lora_magnitude_vector.default.weight",
                Some("base_model.model.q.lora_magnitude_vector"),
            ),
            (
                "base_model.model.head.modules_to_save.default.weight",
                Some("base_model.model.head.weight"),
            ),
            ("base_model.model.q.base_layer.weight", None),
            ("lora_A", None),
        ] {
            assert_eq!(name_of(path).as_deref(), name, "{path}");
        }
    }
}
