//! The model of `--eval-model`: the model that learns, as it was exported in eval mode. It has a
//! machine of its own, and gets the values of parameters and buffers before each evaluation.

use super::{failure, source};
use crate::args::{CodeFor, Compiling, ForwardArgs, TrainArgs};
use crate::buckets;
use crate::compile;
use crate::failure::Failure;
use crate::halves;
use crate::model::{self, Format};
use crate::observe::Dumps;
use crate::trust;
use artifact::{Artifact, DType, State, StateKind};
use runtime::Machine;
use std::path::Path;

/// The step to evaluate with: a compiled file, or a model that is compiled here and now, for the
/// device, the budget and the sizes of the step that learns. A budget in per cent is of what it
/// needs itself.
pub(super) fn artifact(args: &TrainArgs, path: &Path) -> Result<Artifact, Failure> {
    let artifact = if model::format(path)? == Format::Lit {
        let (artifact, signed) = trust::read(path)?;
        trust::require(path, &artifact, signed, args.trust)?;
        artifact
    } else {
        let compiling = Compiling {
            device: args.compiling.device.clone(),
            budget: args.compiling.budget,
            host: args.compiling.host,
            kernels: args.compiling.kernels,
            precision: args.compiling.precision,
            link: args.compiling.link,
            disk: args.compiling.disk.clone(),
            disk_rate: args.compiling.disk_rate,
            ..Compiling::default()
        };
        let (reading, sizes) = buckets::largest(path, &args.reading, &args.buckets)?;
        let model = model::read(path, &reading, &ForwardArgs::default())?;
        let gpu = source::gpu(args)?;
        let code_for = gpu.is_none().then_some(CodeFor::ThisCpu);
        let machine = model::machine_on(&compiling, gpu.map(|here| here.device))?;
        let model = (model, sizes.as_ref());
        compile::artifact_on(machine, model, &compiling, code_for, Dumps::Stderr)?
    };
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
pub(super) fn check_states(
    path: &Path,
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
                "--eval-model {}: {} {why}; export both from one model",
                path.display(),
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
