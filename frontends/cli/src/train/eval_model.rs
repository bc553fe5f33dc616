//! A model that only evaluates: the file of `--eval-model`, or the model that learns as it is in
//! evaluation. It has a machine of its own, and gets the values of parameters and buffers before
//! each evaluation.

use super::{failure, source};
use crate::args::{CodeFor, Compiling, TrainArgs};
use crate::compile;
use crate::failure::Failure;
use crate::halves;
use crate::model::{self, Format};
use crate::observe::Dumps;
use crate::trust;
use artifact::{Artifact, DType, State, StateKind};
use passes::pipeline::Budget;
use runtime::Machine;
use std::path::Path;

/// The step of a file: a compiled one, or a model that is compiled here and now, for the device,
/// the memory and the sizes of the step that is `learning`.
pub(super) fn of_file(
    args: &TrainArgs,
    path: &Path,
    learning: &Artifact,
) -> Result<Artifact, Failure> {
    if model::format(path)? != Format::Lit {
        return compiled(args, path, learning, Compiling::default());
    }
    let (artifact, signed) = trust::read(path)?;
    trust::require(path, &artifact, signed, args.trust)?;
    source::check_memory(args, &artifact)?;
    Ok(artifact)
}

/// The same for the model that learns, as it is in evaluation. Frozen matrices are stored as it
/// stores them.
pub(super) fn of_training(args: &TrainArgs, learning: &Artifact) -> Result<Artifact, Failure> {
    let compiling = Compiling {
        evaluate: true,
        forward: args.compiling.forward.clone(),
        freeze: args.compiling.freeze.clone(),
        base: args.compiling.base,
        ..Compiling::default()
    };
    compiled(args, &args.model, learning, compiling)
}

fn compiled(
    args: &TrainArgs,
    path: &Path,
    learning: &Artifact,
    compiling: Compiling,
) -> Result<Artifact, Failure> {
    let compiling = Compiling {
        device: args.compiling.device.clone(),
        budget: match args.compiling.budget {
            // It needs less than the step that learns, so a share of that would be another budget.
            Some(Budget::Share(_)) => Some(Budget::Bytes(learning.summary.planned_peak_bytes)),
            budget => budget,
        },
        host: args.compiling.host,
        kernels: args.compiling.kernels,
        precision: args.compiling.precision,
        link: args.compiling.link,
        disk: args.compiling.disk.clone(),
        disk_rate: args.compiling.disk_rate,
        ..compiling
    };
    let (mut reading, sizes) = source::reading(args, path)?;
    // A configuration is read as in evaluation.
    reading.dropout = false;
    // The notes on the model that learns are printed already.
    let read = match compiling.evaluate {
        true => model::read_silently,
        false => model::read,
    };
    let model = read(path, &reading, &compiling.forward)?;
    let gpu = source::gpu(args)?;
    let code_for = gpu.is_none().then_some(CodeFor::ThisCpu);
    let machine = model::machine_on(&compiling, gpu.map(|here| here.device))?;
    let model = (model, sizes.as_ref());
    let artifact = compile::artifact_on(machine, model, &compiling, code_for, Dumps::Stderr)?;
    source::check_memory(args, &artifact)?;
    Ok(artifact)
}

/// Whether a state gets its value from the machine that learns.
fn is_copied(state: &State) -> bool {
    match state.kind {
        StateKind::Param | StateKind::Buffer => true,
        StateKind::Const | StateKind::Moment | StateKind::Rng => false,
    }
}

/// An error if a parameter or a buffer is not one of the model that learns.
/// `option`: what names the model.
pub(super) fn check_states(
    option: &str,
    own: &Artifact,
    learning: &Artifact,
) -> Result<(), Failure> {
    for state in own.states.iter().filter(|state| is_copied(state)) {
        let same = learning
            .states
            .iter()
            .find(|other| other.path == state.path);
        let fits = same.is_some_and(|other| {
            let (a, b) = (&state.operand, &other.operand);
            let is_frozen = other.kind == StateKind::Buffer && halves::is_known(b.dtype);
            let has_master = || halves::has_master(learning.states.iter(), &state.path);
            let is_wider = || a.dtype == DType::F32 && (is_frozen || has_master());
            a.shape == b.shape && (a.dtype == b.dtype || is_wider())
        });
        if !fits {
            let why = match same {
                Some(_) => "has another type in the model that is trained",
                None => "is not in the model that is trained",
            };
            return Err(Failure::Input(format!(
                "{option}: {} {why}; export both from one model",
                state.path
            )));
        }
    }
    Ok(())
}

/// Gives a machine the values of the machine that learns, which has no step under way. An f32 here
/// may be in half precision there: it gets the master of a parameter, and the numbers of a buffer.
pub(super) fn copy_states(learning: &mut Machine, own: &mut Machine) -> Result<(), Failure> {
    let states: Vec<State> = own.states().filter(|s| is_copied(s)).cloned().collect();
    for State { path, operand, .. } in &states {
        let numbers = match operand.dtype {
            DType::F32 => halves::widened(learning, path).map_err(failure)?,
            _ => None,
        };
        let bytes = match numbers {
            Some(numbers) => halves::rounded(DType::F32, &numbers),
            None => learning.read_state(path).map_err(failure)?,
        };
        own.write_state(path, &bytes).map_err(failure)?;
    }
    Ok(())
}
