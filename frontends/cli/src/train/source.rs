//! The step to run: a compiled file, or a model that is compiled here and now; and what is refused
//! before it runs.

use crate::args::{CodeFor, Compiling, Reading, TrainArgs};
use crate::buckets::{self, Sizes};
use crate::compile;
use crate::failure::Failure;
use crate::model::{self, Format};
use crate::observe::Dumps;
use crate::out;
use crate::page::update_name;
use crate::size::bytes;
use crate::trust;
use artifact::{Artifact, MemorySpace, Pool};
use gpu::Here;
use passes::graph::optimizer::Optimizer;
use passes::pipeline::Kernels;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// More threads than this for each core make a step slower, because they wait for each other.
const THREADS_PER_CORE: usize = 4;
/// A name that is reserved in safetensors files.
const RESERVED: &str = "__metadata__";

/// The file beside a compiled step that keeps what a GPU's libraries choose for it.
pub(super) fn choices(args: &TrainArgs) -> Result<Option<PathBuf>, Failure> {
    if model::format(&args.model)? != Format::Lit {
        return Ok(None);
    }
    let mut name = args.model.clone().into_os_string();
    name.push(".algorithms");
    Ok(Some(name.into()))
}

/// The step to run.
pub(super) struct Source {
    pub(super) artifact: Artifact,
    /// Paths that name one parameter; known only for a model.
    pub(super) tied: Vec<Vec<String>>,
    /// The fixed time of a copy.
    pub(super) link_latency: Duration,
}

pub(super) fn of(args: &TrainArgs) -> Result<Source, Failure> {
    if model::format(&args.model)? == Format::Lit {
        let (artifact, signed) = trust::read(&args.model)?;
        refuse_compiling(args, &artifact)?;
        trust::require(&args.model, &artifact, signed, args.trust)?;
        return Ok(Source {
            artifact,
            tied: vec![],
            link_latency: Duration::ZERO,
        });
    }
    if args.trust {
        return Err(Failure::Input(format!(
            "--trust: {} is compiled here and now; the option is for .lit files",
            args.model.display()
        )));
    }
    let (reading, sizes) = reading(args, &args.model)?;
    let model = model::read(&args.model, &reading, &args.compiling.forward)?;
    let tied = model.tied.clone();
    let mut compiling = args.compiling.clone();
    // Found once, so that the plan and the run are for the same memory.
    let gpu = gpu(args)?;
    let machine = model::machine_on(&compiling, gpu.as_ref().map(|here| here.device.clone()))?;
    if compiling.optimizer == Some(Optimizer::Sgd)
        && args.hyper.momentum.is_some_and(|momentum| momentum != 0.0)
    {
        compiling.optimizer = Some(Optimizer::SgdMomentum);
    }
    let learns = compiling
        .optimizer
        .is_some_and(|optimizer| optimizer != Optimizer::None);
    let has_gradients = !model.graph.gradients.is_empty() || compiling.forward.differentiate;
    if !learns && has_gradients {
        out::note(
            "note: no optimizer, so nothing is learned; --optimizer adamw or sgd attaches one",
        );
    }
    let name = machine.device.name.clone();
    let link_latency = Duration::from_secs_f64(machine.device.link_micros.clamp(0.0, 1e6) / 1e6);
    // A plan for another machine's GPU runs on this CPU, too.
    let code_for = match gpu {
        Some(_) => None,
        None => Some(CodeFor::ThisCpu),
    };
    let model = (model, sizes.as_ref());
    let artifact = compile::artifact_on(machine, model, &compiling, code_for, Dumps::Stderr)?;
    match &gpu {
        Some(here) => out::note(&here.note()),
        None if name != "cpu" => out::note(&format!(
            "note: planned for {name}, run on this CPU: predicted times are the former's; --device \
             cuda plans for this machine's GPU and runs there"
        )),
        None => {}
    }
    Ok(Source {
        artifact,
        tied,
        link_latency,
    })
}

/// How a model is read, and the other sizes of its step.
pub(super) fn reading(args: &TrainArgs, path: &Path) -> Result<(Reading, Option<Sizes>), Failure> {
    let mut reading = args.reading.clone();
    // Documents in rows need inputs that say where they begin.
    reading.packed |= args.data.pack.is_some() && model::format(path)? == Format::Config;
    buckets::largest(path, &reading, &args.buckets)
}

/// The GPU of this machine that `--device` names, if it names one.
pub(super) fn gpu(args: &TrainArgs) -> Result<Option<Here>, Failure> {
    match gpu_number(args)? {
        Some(number) => Ok(Some(Here::find(number)?)),
        None => Ok(None),
    }
}

pub(super) fn gpu_number(args: &TrainArgs) -> Result<Option<u32>, Failure> {
    let name = args.compiling.device.as_deref();
    Ok(name.and_then(gpu::number).transpose()?)
}

/// Options that were decided when the file was written cannot be chosen again.
fn refuse_compiling(args: &TrainArgs, artifact: &Artifact) -> Result<(), Failure> {
    let attached = artifact
        .summary
        .optimizer
        .as_ref()
        .map_or("none", |(name, _)| name);
    // Without `..`: a new option must be refused or used here.
    let Compiling {
        optimizer,
        master,
        rounding,
        clip_norm,
        grad_norm,
        group,
        no_decay,
        freeze,
        micro_batches,
        reduction,
        loss_chunks,
        update,
        device,
        budget,
        host,
        planner,
        protrain,
        kernels,
        precision,
        loss_scale,
        base,
        // The running machine simulates the link, and has the disk.
        link: _,
        disk: _,
        disk_rate: _,
        profile,
        without,
        dump_ir_after,
        dump_dir,
        time_passes,
        forward,
        evaluate: _,
    } = &args.compiling;
    let other_optimizer = optimizer.is_some_and(|optimizer| optimizer.name() != attached);
    // A GPU's number says where a step for GPUs runs.
    let chosen = |name: &str| artifact.gpu().is_some() && gpu::number(name).is_some();
    let other_device = device
        .as_ref()
        .is_some_and(|device| *device != artifact.device && !chosen(device));
    let other_update = update.map(update_name).is_some();
    let made_of = if trust::has_code(artifact) {
        Kernels::Generated
    } else {
        Kernels::Plain
    };
    let other_kernels = kernels.is_some_and(|kernels| kernels != made_of);
    let given = [
        ("--optimizer", other_optimizer),
        ("--master", master.is_some()),
        ("--rounding", rounding.is_some()),
        ("--clip-norm", clip_norm.is_some()),
        ("--grad-norm", *grad_norm),
        ("--group", !group.is_empty()),
        ("--no-decay", *no_decay),
        ("--freeze", !freeze.is_empty()),
        ("--micro-batches", micro_batches.is_some()),
        ("--reduction", reduction.is_some()),
        ("--loss-chunks", loss_chunks.is_some()),
        ("--update", other_update),
        ("--device", other_device),
        ("--budget", budget.is_some()),
        ("--host", host.is_some()),
        ("--planner", planner.is_some()),
        ("--protrain", protrain.is_some()),
        ("--kernels", other_kernels),
        ("--precision", precision.is_some()),
        ("--loss-scale", loss_scale.is_some()),
        ("--base", base.is_some()),
        ("--without", without.is_some()),
        ("--profile", profile.is_some()),
        ("--dim", !args.reading.dim.is_empty()),
        ("--buckets", args.buckets.buckets.is_some()),
        ("--packed", args.reading.packed),
        ("--dropout", args.reading.dropout),
        ("--trainable", args.reading.trainable.is_some()),
        ("--batch-norm", args.reading.batch_norm.is_some()),
        ("--dump-ir-after", dump_ir_after.is_some()),
        ("--dump-dir", dump_dir.is_some()),
        ("--time-passes", *time_passes),
        ("--differentiate", forward.differentiate),
        ("--add-lora", forward.add_lora.is_some()),
    ];
    match given.iter().find(|(_, given)| *given) {
        Some((option, _)) => Err(Failure::Input(format!(
            "{option}: {} is compiled already, for {} with optimizer {attached} and {} kernels; \
             compile the model again to change that",
            args.model.display(),
            artifact.device,
            made_of.name()
        ))),
        None => Ok(()),
    }
}

/// Refuses pools that are larger than the user permits.
pub(super) fn check_memory(args: &TrainArgs, artifact: &Artifact) -> Result<(), Failure> {
    let Some(most) = args.most_memory else {
        return Ok(());
    };
    let in_memory = |pool: &&Pool| pool.space != MemorySpace::Disk;
    let pools = artifact.pools.iter().filter(in_memory);
    let pools = pools.map(|pool| pool.bytes);
    let total = pools.fold(0, u64::saturating_add);
    if total <= most {
        return Ok(());
    }
    Err(Failure::Input(format!(
        "{}: its pools take {}, and --most-memory permits {}",
        args.model.display(),
        bytes(total),
        bytes(most)
    )))
}

/// Before the first step, refuses names under which no reader would find a saved state.
pub(super) fn check_names(args: &TrainArgs, artifact: &Artifact) -> Result<(), Failure> {
    let reserved = artifact.states.iter().any(|state| state.path == RESERVED);
    let given = [
        ("--save", args.save.is_some()),
        ("--checkpoints", args.checkpoints.folder().is_some()),
    ];
    let option = given.into_iter().find(|(_, given)| *given);
    if let Some((option, _)) = option.filter(|_| reserved) {
        return Err(Failure::Input(format!(
            "{option}: a state is called {RESERVED}, which safetensors files keep for themselves; \
             rename it in the model"
        )));
    }
    Ok(())
}

/// Warns about more threads than cores.
pub(super) fn note_threads(args: &TrainArgs) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let Some(threads) = args.threads.map(usize::from) else {
        return;
    };
    if threads > cores * THREADS_PER_CORE {
        out::note(&format!(
            "note: --threads {threads} on {cores} cores: threads that wait for a core make a step \
             slower; results do not depend on them"
        ));
    }
}
