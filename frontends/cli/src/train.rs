//! `lighterage train`: runs a step many times. After the last batch the first follows.

use crate::args::{CodeFor, Compiling, HyperArgs, TrainArgs};
use crate::compile;
use crate::data::{Batches, Saved, Tensors, check_writable, save};
use crate::failure::Failure;
use crate::finite;
use crate::gpu::{self, Here};
use crate::interrupt;
use crate::model::{self, Format};
use crate::observe::Dumps;
use crate::out::{self, out};
use crate::page::update_name;
use crate::size::{bytes, micros, short};
use crate::trust;
use artifact::{Artifact, Binding, DType, Initial, Operand, StateKind};
use half::{bf16, f16};
use indicatif::{ProgressBar, ProgressStyle};
use passes::graph::optimizer::{HYPER, Optimizer};
use passes::pipeline::Kernels;
use runtime::{Error, Machine, Options, StateInit};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// The approximate number of progress lines without a terminal.
const LINES: u64 = 20;
/// The largest number of names in an error.
const NAMED: usize = 8;

/// Progress shows the median time of this many last steps. The summary has the median of all.
const RECENT: usize = 101;
/// More threads than this for each core make a step slower, because they wait for each other.
const THREADS_PER_CORE: usize = 4;
/// A name that is reserved in safetensors files.
const RESERVED: &str = "__metadata__";

/// Runs the command.
pub(crate) fn run(args: &TrainArgs) -> Result<(), Failure> {
    for (option, path) in [("--save", &args.save), ("--trace", &args.trace)] {
        if let Some(path) = path {
            check_writable(option, path)?;
        }
    }
    let init = Init::parse(args.init.as_deref())?;
    let Source {
        mut artifact,
        tied,
        link_latency,
    } = source(args)?;
    check_memory(args, &artifact)?;
    check_names(args, &artifact)?;
    note_threads(args);
    let hyper = hyper(&args.hyper, &artifact)?;
    let fed: Vec<_> = artifact
        .inputs
        .iter()
        .filter(|input| hyper.is_none() || input.name != HYPER)
        .cloned()
        .collect();
    let micro_batches = artifact.summary.micro_batches.max(1);
    let inputs = of_one_batch(&fed, micro_batches);
    let batches = Batches::open(&args.batches, &inputs)?;
    if let Init::Normal(_) = init {
        // Parameters with values in the file are drawn like the others.
        for state in artifact
            .states
            .iter_mut()
            .filter(|state| state.kind == StateKind::Param)
        {
            state.initial = Initial::Absent;
        }
    }
    let loss = Loss::find(&artifact);
    let items = Items::of(&inputs, micro_batches);
    let options = Options {
        link_bandwidth: args.compiling.link,
        link_latency,
        trace: args.trace.is_some(),
        shuffle: args.shuffle,
        threads: args.threads.map(usize::from),
        gpu: gpu_number(args)?.unwrap_or(0),
    };
    let choices = choices(args)?;
    let machine = Machine::beside(artifact, options, choices.as_deref());
    let mut machine = machine.map_err(failure)?;
    for note in machine.notes() {
        out::note(&format!("note: {note}"));
    }
    give_values(&mut machine, &init, args.seed, &tied)?;

    // From here on, Ctrl-C ends the run after the current step, so that the states can be saved;
    // before, it ends the process.
    interrupt::listen();
    let mut progress = Progress::new(args, &machine, items);
    let mut run = Run::default();
    // A batch that cannot be read ends the run like Ctrl-C: the states so far are saved.
    let mut unread = None;
    'steps: for step in 0..args.steps {
        if interrupt::pressed() || (out::closed() && args.save.is_none() && args.trace.is_none()) {
            break;
        }
        for (i, input) in fed.iter().enumerate() {
            // Micro-batch by micro-batch, the inputs of one batch.
            let (micro, (name, operand)) = (i / inputs.len(), &inputs[i % inputs.len()]);
            match batches.get(step * micro_batches + micro as u64, name, operand) {
                Ok(bytes) => machine.write_input(&input.name, &bytes).map_err(failure)?,
                Err(e) => {
                    unread = Some(e);
                    break 'steps;
                }
            }
        }
        if let Some(hyper) = &hyper {
            machine.write_input(HYPER, hyper).map_err(failure)?;
        }
        // Updates and offloads overlap the next step, except those of the last step.
        machine.launch().map_err(failure)?;
        let report = if step + 1 == args.steps {
            machine.wait()
        } else {
            machine.wait_io()
        }
        .map_err(failure)?;
        let value = match &loss {
            Some(loss) => loss.read(&mut machine)?,
            None => None,
        };
        run.add(report.ms, value);
        progress.step(&run);
    }
    machine.wait().map_err(failure)?;
    progress.finish();
    let not_finite = save_states(args, &mut machine)?;
    if let Some(path) = &args.trace {
        // Only writing the file can fail here.
        machine
            .write_trace(path)
            .map_err(|e| Failure::System(e.to_string()))?;
    }
    let report = Summary {
        machine: &machine,
        run: &run,
        items,
        batches: batches.count(),
    };
    if args.json {
        out!("{}", json!({"summary": report.json()}));
    } else {
        out::text(&report.text());
        let saved = args.save.as_ref().filter(|_| not_finite.is_none());
        for path in [saved, args.trace.as_ref()].into_iter().flatten() {
            out!(
                "wrote         {}, {}",
                path.display(),
                crate::data::file_size(path)
            );
        }
    }
    if let Some(message) = not_finite {
        return Err(Failure::NotFinite(message));
    }
    if let Some(unread) = unread {
        return Err(unread);
    }
    if interrupt::pressed() {
        let saved = args.save.as_ref().map_or(String::new(), |path| {
            format!("; saved to {}", path.display())
        });
        return Err(Failure::Interrupted(format!(
            "interrupted after step {}{saved}",
            run.millis.len()
        )));
    }
    Ok(())
}

/// The inputs of one batch, with their names in data files; `fed` has the inputs of every
/// micro-batch, in order.
fn of_one_batch(fed: &[Binding], micro_batches: u64) -> Vec<(String, Operand)> {
    let name = |name: &str| match micro_batches {
        1 => name.to_string(),
        _ => name.strip_suffix(".0").unwrap_or(name).to_string(),
    };
    let first = &fed[..fed.len() / micro_batches as usize];
    first
        .iter()
        .map(|input| (name(&input.name), input.operand.clone()))
        .collect()
}

fn failure(error: Error) -> Failure {
    match error {
        Error::Resources(message) => Failure::System(message),
        device @ Error::Device { .. } => Failure::System(device.to_string()),
        other => Failure::Input(other.to_string()),
    }
}

// --- source ---

/// The file beside a compiled step that keeps what a GPU's libraries choose for it.
fn choices(args: &TrainArgs) -> Result<Option<PathBuf>, Failure> {
    if model::format(&args.model)? != Format::Lit {
        return Ok(None);
    }
    let mut name = args.model.clone().into_os_string();
    name.push(".algorithms");
    Ok(Some(name.into()))
}

/// The step to run.
struct Source {
    artifact: Artifact,
    /// Paths that name one parameter; known only for a model.
    tied: Vec<Vec<String>>,
    /// The fixed time of a copy.
    link_latency: Duration,
}

fn source(args: &TrainArgs) -> Result<Source, Failure> {
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
    let model = model::read(&args.model, &args.reading)?;
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
    if !learns && !model.graph.gradients.is_empty() {
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

/// The GPU of this machine that `--device` names, if it names one.
fn gpu(args: &TrainArgs) -> Result<Option<Here>, Failure> {
    match gpu_number(args)? {
        Some(number) => Here::find(number).map(Some),
        None => Ok(None),
    }
}

fn gpu_number(args: &TrainArgs) -> Result<Option<u32>, Failure> {
    let name = args.compiling.device.as_deref();
    name.and_then(gpu::number).transpose()
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
        clip_norm,
        micro_batches,
        loss_chunks,
        update,
        device,
        budget,
        host,
        planner,
        protrain,
        kernels,
        tf32,
        // The running machine simulates the link.
        link: _,
        profile,
        without,
        dump_ir_after,
        dump_dir,
        time_passes,
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
        ("--clip-norm", clip_norm.is_some()),
        ("--micro-batches", micro_batches.is_some()),
        ("--loss-chunks", loss_chunks.is_some()),
        ("--update", other_update),
        ("--device", other_device),
        ("--budget", budget.is_some()),
        ("--host", host.is_some()),
        ("--planner", planner.is_some()),
        ("--protrain", protrain.is_some()),
        ("--kernels", other_kernels),
        ("--tf32", *tf32 && !artifact.tf32),
        ("--without", without.is_some()),
        ("--profile", profile.is_some()),
        ("--dim", !args.reading.dim.is_empty()),
        ("--trainable", args.reading.trainable.is_some()),
        ("--batch-norm", args.reading.batch_norm.is_some()),
        ("--dump-ir-after", dump_ir_after.is_some()),
        ("--dump-dir", dump_dir.is_some()),
        ("--time-passes", *time_passes),
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
fn check_memory(args: &TrainArgs, artifact: &Artifact) -> Result<(), Failure> {
    let Some(most) = args.most_memory else {
        return Ok(());
    };
    let pools = artifact.pools.iter().map(|pool| pool.bytes);
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
fn check_names(args: &TrainArgs, artifact: &Artifact) -> Result<(), Failure> {
    let reserved = artifact.states.iter().any(|state| state.path == RESERVED);
    if args.save.is_some() && reserved {
        return Err(Failure::Input(format!(
            "--save: a state is called {RESERVED}, which safetensors files keep for themselves; \
             rename it in the model"
        )));
    }
    Ok(())
}

/// Warns about more threads than cores.
fn note_threads(args: &TrainArgs) {
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

// --- values ---

/// Options of optimizers: an option's name in the artifact, its flag, the given value, and the
/// value's upper bound.
fn given(args: &HyperArgs) -> [(&'static str, &'static str, Option<f64>, f64); 6] {
    let (beta1, beta2) = args.betas.unzip();
    [
        ("lr", "--lr", args.lr, f64::MAX),
        ("beta1", "--betas", beta1, 1.0),
        ("beta2", "--betas", beta2, 1.0),
        ("eps", "--eps", args.eps, f64::MAX),
        (
            "weight_decay",
            "--weight-decay",
            args.weight_decay,
            f64::MAX,
        ),
        ("momentum", "--momentum", args.momentum, f64::MAX),
    ]
}

/// The optimizers' names: `adamw, sgd or sgd-momentum`.
fn optimizers() -> String {
    let all = Optimizer::ALL.into_iter();
    let mut names: Vec<&str> = all
        .filter(|&optimizer| optimizer != Optimizer::None)
        .map(Optimizer::name)
        .collect();
    names.sort_unstable();
    let last = names.pop().expect("there are optimizers");
    format!("{} or {last}", names.join(", "))
}

/// The bytes of the optimizer's options; none if the step takes none.
fn hyper(args: &HyperArgs, artifact: &Artifact) -> Result<Option<Vec<u8>>, Failure> {
    let given = given(args);
    for (_, option, value, below) in given {
        if let Some(value) = value.filter(|value| !(0.0 <= *value && *value < below)) {
            let below = if below == 1.0 {
                "from 0 up to, but not including, 1"
            } else {
                "a number that is not negative"
            };
            return Err(Failure::Input(format!(
                "{option} should be {below}, not {value}"
            )));
        }
    }
    let (name, defaults): (&str, &[(String, f64)]) = match &artifact.summary.optimizer {
        Some((name, defaults)) => (name, defaults),
        None => ("none", &[]),
    };
    let mut values: Vec<f64> = defaults.iter().map(|&(_, value)| value).collect();
    for (key, option, value, _) in given {
        let Some(value) = value else { continue };
        match defaults.iter().position(|(default, _)| default == key) {
            Some(position) => values[position] = value,
            None if name == "none" => {
                return Err(Failure::Input(format!(
                    "{option}: the step has no optimizer; compile the model with --optimizer {}",
                    optimizers()
                )));
            }
            None => {
                let has: Vec<&str> = defaults.iter().map(|(key, _)| key.as_str()).collect();
                return Err(Failure::Input(format!(
                    "{option}: {name} has no such option; it has {}",
                    has.join(", ")
                )));
            }
        }
    }
    if name == "sgd" && args.momentum.is_some_and(|momentum| momentum != 0.0) {
        let help = "compile the model with --optimizer sgd-momentum";
        return Err(Failure::Input(format!(
            "--momentum: the step was compiled without momentum; {help}"
        )));
    }
    let takes = artifact.inputs.iter().any(|input| input.name == HYPER);
    Ok((takes && !defaults.is_empty()).then(|| {
        values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect()
    }))
}

/// Where parameters come from.
enum Init {
    /// From the model's file.
    File,
    /// Drawn, with this deviation.
    Normal(f64),
    /// From another file.
    Tensors(Tensors),
}

impl Init {
    fn parse(text: Option<&str>) -> Result<Init, Failure> {
        let Some(text) = text else {
            return Ok(Init::File);
        };
        let Some(std) = text.strip_prefix("normal:") else {
            let path = PathBuf::from(text);
            return match path.extension() {
                None if !path.exists() => Err(Failure::Input(format!(
                    "--init {text}: neither normal:STD, as in normal:0.02, nor a file"
                ))),
                _ => Ok(Init::Tensors(Tensors::open(&path)?)),
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
fn give_values(
    machine: &mut Machine,
    init: &Init,
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
    if let Init::Tensors(tensors) = init {
        let states: Vec<artifact::State> = machine.states().cloned().collect();
        let mut missing = vec![];
        for state in &states {
            match name_in(tensors, &state.path, tied) {
                Some(name) => {
                    machine
                        .write_state(&state.path, &tensors.get(name, &state.operand)?)
                        .map_err(failure)?;
                }
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
            return Err(Failure::Input(format!(
                "{}: no tensor for {}; the file has {has}, ..",
                tensors.path().display(),
                listed(&missing)
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
    let help = "the model's file has no values for them; give --init normal:0.02, or --init \
        FILE.safetensors with a tensor for each";
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
fn listed(names: &[String]) -> String {
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
/// message; an existing file is then not replaced.
fn save_states(args: &TrainArgs, machine: &mut Machine) -> Result<Option<String>, Failure> {
    let Some(path) = &args.save else {
        return Ok(None);
    };
    let saved = states(machine)?;
    let kinds: BTreeMap<String, StateKind> = machine
        .states()
        .map(|state| (state.path.clone(), state.kind))
        .collect();
    let broken: Vec<String> = saved
        .iter()
        .filter(|(path, state)| !finite::is_sound(kinds[*path], state.dtype, &state.bytes))
        .map(|(path, _)| path.clone())
        .collect();
    if broken.is_empty() || args.save_nonfinite {
        save(path, saved)?;
        return Ok(None);
    }
    let found = format!("NaN or infinite values in {}", listed(&broken));
    if path.exists() {
        return Ok(Some(format!(
            "{found}\n  {} is left as it was; --save-nonfinite replaces it",
            path.display()
        )));
    }
    save(path, saved)?;
    Ok(Some(format!("{found}\n  they are in {}", path.display())))
}

/// All states by path.
fn states(machine: &mut Machine) -> Result<BTreeMap<String, Saved>, Failure> {
    let states: Vec<artifact::State> = machine.states().cloned().collect();
    let mut saved = BTreeMap::new();
    for state in states {
        let bytes = machine.read_state(&state.path).map_err(failure)?;
        let shape = state.operand.shape.iter().map(|&d| d as usize).collect();
        saved.insert(
            state.path,
            Saved {
                dtype: state.operand.dtype,
                shape,
                bytes,
            },
        );
    }
    Ok(saved)
}

// --- the loss ---

/// The output that is reported: `loss`, or the first that is one number.
struct Loss {
    name: String,
    dtype: DType,
}

impl Loss {
    fn find(artifact: &Artifact) -> Option<Loss> {
        let is_number = |o: &Operand| {
            let float = matches!(o.dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
            float && o.shape.iter().product::<u64>() == 1
        };
        let mut numbers = artifact
            .outputs
            .iter()
            .filter(|output| is_number(&output.operand));
        let named = numbers.clone().find(|output| output.name == "loss");
        named.or_else(|| numbers.next()).map(|output| Loss {
            name: output.name.clone(),
            dtype: output.operand.dtype,
        })
    }

    /// Its value after a step. An f32 is widened to f64; its shortest decimal form reads back to
    /// the same f32.
    fn read(&self, machine: &mut Machine) -> Result<Option<f64>, Failure> {
        let bytes = machine.read_output(&self.name).map_err(failure)?;
        Ok(match self.dtype {
            DType::F64 => bytes.first_chunk().map(|b| f64::from_le_bytes(*b)),
            DType::F32 => bytes
                .first_chunk()
                .map(|b| f64::from(f32::from_le_bytes(*b))),
            DType::F16 => bytes.first_chunk().map(|b| f16::from_le_bytes(*b).to_f64()),
            DType::BF16 => bytes
                .first_chunk()
                .map(|b| bf16::from_le_bytes(*b).to_f64()),
            _ => None,
        })
    }
}

/// The items that a step consumes, for rates.
#[derive(Clone, Copy)]
struct Items {
    count: u64,
    word: &'static str,
}

impl Items {
    /// Tokens if the first input is a matrix of integers, else samples.
    fn of(inputs: &[(String, Operand)], micro_batches: u64) -> Items {
        let Items { count, word } = Items::of_one_batch(inputs);
        Items {
            count: count * micro_batches,
            word,
        }
    }

    fn of_one_batch(inputs: &[(String, Operand)]) -> Items {
        let Some((_, first)) = inputs.first() else {
            return Items {
                count: 1,
                word: "steps",
            };
        };
        let integer = matches!(
            first.dtype,
            DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64
        );
        match (integer, &first.shape[..]) {
            (true, [rows, columns]) => Items {
                count: rows * columns,
                word: "tokens",
            },
            (_, [samples, ..]) => Items {
                count: *samples,
                word: "samples",
            },
            (_, []) => Items {
                count: 1,
                word: "samples",
            },
        }
    }

    fn rate(&self, millis: f64) -> String {
        format!(
            "{:.0} {}/s",
            self.count as f64 * 1e3 / millis.max(1e-6),
            self.word
        )
    }
}

/// Steps so far.
#[derive(Default)]
struct Run {
    millis: Vec<f64>,
    losses: Vec<Option<f64>>,
}

impl Run {
    fn add(&mut self, millis: f64, loss: Option<f64>) {
        self.millis.push(millis);
        self.losses.push(loss);
    }

    /// The median time of the steps, without the first, which uses cold memory.
    fn median(&self) -> Option<f64> {
        let warm = &self.millis[self.millis.len().min(1)..];
        if warm.is_empty() {
            median(&self.millis)
        } else {
            median(warm)
        }
    }

    /// The median time of the last steps; none before the second step. Its cost does not grow with
    /// the run.
    fn recent(&self) -> Option<f64> {
        let from = self.millis.len().saturating_sub(RECENT).max(1);
        median(self.millis.get(from..).unwrap_or_default())
    }

    fn last_loss(&self) -> String {
        self.losses
            .last()
            .copied()
            .flatten()
            .map_or("-".into(), |loss| format!("{loss:.4}"))
    }
}

fn median(millis: &[f64]) -> Option<f64> {
    let mut millis = millis.to_vec();
    millis.sort_by(f64::total_cmp);
    match millis.len() {
        0 => None,
        n if n % 2 == 1 => Some(millis[n / 2]),
        n => Some((millis[n / 2 - 1] + millis[n / 2]) / 2.0),
    }
}

/// `nan`, `inf` or `-inf`, for a number that JSON cannot hold.
fn nonfinite_name(value: f64) -> Option<&'static str> {
    if value.is_nan() {
        Some("nan")
    } else if value.is_infinite() {
        Some(if value > 0.0 { "inf" } else { "-inf" })
    } else {
        None
    }
}

// --- progress ---

/// The progress display: a bar on a terminal, else lines; objects for programs.
struct Progress {
    bar: Option<ProgressBar>,
    json: bool,
    steps: u64,
    items: Items,
    peak: String,
    noted_nan: bool,
}

impl Progress {
    fn new(args: &TrainArgs, machine: &Machine, items: Items) -> Progress {
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {eta} left")
            .unwrap_or(ProgressStyle::default_bar());
        let bar = out::bar(ProgressBar::new(args.steps).with_style(style));
        Progress {
            bar,
            json: args.json,
            steps: args.steps,
            items,
            peak: short(machine.device_pool_bytes()),
            noted_nan: false,
        }
    }

    fn step(&mut self, run: &Run) {
        let (step, millis) = (run.millis.len() as u64, run.millis[run.millis.len() - 1]);
        let loss = run.losses.last().copied().flatten();
        let message = || {
            // The first step's time ends at its loss, so the time of a whole step is not known yet.
            let rate = run
                .recent()
                .map_or(String::new(), |ms| self.items.rate(ms) + "  ");
            format!("loss {}  {rate}peak {}", run.last_loss(), self.peak)
        };
        if self.json {
            let mut line = json!({"step": step, "loss": loss, "ms": millis});
            if let Some(name) = loss.and_then(nonfinite_name) {
                line["nonfinite"] = name.into();
            }
            out!("{line}");
        } else if self.bar.is_none()
            && (step == 1 || step == self.steps || step.is_multiple_of(self.steps.div_ceil(LINES)))
        {
            out!("step {step:>5}/{}  {}", self.steps, message());
        }
        if let Some(bar) = &self.bar {
            bar.set_message(message());
            bar.set_position(step);
        }
        if loss.is_some_and(|loss| !loss.is_finite())
            && !std::mem::replace(&mut self.noted_nan, true)
        {
            out::note(&format!(
                "warning: the loss of step {step} is {}",
                run.last_loss()
            ));
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The summary at the end.
struct Summary<'a> {
    machine: &'a Machine,
    run: &'a Run,
    items: Items,
    batches: u64,
}

impl Summary<'_> {
    /// The first step whose loss was not finite, from 1.
    fn first_nonfinite_step(&self) -> Option<usize> {
        let is_broken = |loss: &Option<f64>| loss.is_some_and(|loss| !loss.is_finite());
        self.run.losses.iter().position(is_broken).map(|i| i + 1)
    }

    fn json(&self) -> serde_json::Value {
        let planned = self.machine.summary();
        let losses = &self.run.losses;
        json!({
            "planned_peak_bytes": planned.planned_peak_bytes,
            "measured_peak_bytes": self.machine.measured_peak_bytes(),
            "keep_peak_bytes": planned.keep_peak_bytes,
            "budget_bytes": planned.budget_bytes,
            "predicted_ms": planned.predicted_ms,
            "measured_ms": self.run.median(),
            "swapped_bytes": planned.swapped_bytes,
            "recomputed_ms": planned.recomputed_ms,
            "steps": self.run.millis.len(),
            "batches": self.batches,
            "first_loss": losses.first().copied().flatten(),
            "last_loss": losses.last().copied().flatten(),
            "first_nonfinite_step": self.first_nonfinite_step(),
            format!("{}_per_second", self.items.word): self.run.median()
                .map(|ms| self.items.count as f64 * 1e3 / ms.max(1e-6)),
        })
    }

    fn text(&self) -> String {
        let planned = self.machine.summary();
        let measured = self.machine.measured_peak_bytes();
        let peak = match measured == planned.planned_peak_bytes {
            true => format!("{}, planned = measured", bytes(measured)),
            false => format!(
                "planned {}, measured {}",
                bytes(planned.planned_peak_bytes),
                bytes(measured)
            ),
        };
        let share =
            100.0 * planned.planned_peak_bytes as f64 / planned.keep_peak_bytes.max(1) as f64;
        let predicted = micros(planned.predicted_ms * 1e3);
        let step = match self.run.median() {
            Some(ms) => {
                let rate = self.items.rate(ms);
                format!(
                    "{} measured (median), {predicted} predicted; {rate}",
                    micros(ms * 1e3)
                )
            }
            None => format!("{predicted} predicted"),
        };
        let first = self
            .run
            .losses
            .first()
            .copied()
            .flatten()
            .map_or("-".into(), |loss| format!("{loss:.4}"));
        let steps = self.run.millis.len();
        let moved = format!(
            "{} of swaps and states, {} recomputed a step",
            short(planned.swapped_bytes),
            micros(planned.recomputed_ms * 1e3)
        );
        format!(
            "peak          {peak}\nkeep          {}: the peak is {share:.1}% of it\nstep          \
             {step}\nmoved         {moved}\nloss          \
             {first} -> {} in {steps} steps on {} batches\n",
            bytes(planned.keep_peak_bytes),
            self.run.last_loss(),
            self.batches
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_of_an_optimizer_has_a_flag() {
        let keys = given(&HyperArgs::default()).map(|(key, ..)| key);
        for optimizer in Optimizer::ALL {
            for (option, _) in optimizer.options() {
                assert!(
                    keys.contains(option),
                    "`given` has no flag for {option} of {}",
                    optimizer.name()
                );
            }
        }
    }

    #[test]
    fn times_while_steps_run_are_those_of_the_last_ones() {
        let mut run = Run::default();
        run.add(1e6, None);
        assert_eq!((run.recent(), run.median()), (None, Some(1e6)));
        run.add(2.0, None);
        assert_eq!((run.recent(), run.median()), (Some(2.0), Some(2.0)));
        for _ in 0..RECENT {
            run.add(8.0, None);
        }
        (0..RECENT / 2).for_each(|_| run.add(4.0, None));
        assert_eq!(run.recent(), Some(8.0));
        run.add(4.0, None);
        assert_eq!(run.recent(), Some(4.0));
        assert_eq!(run.median(), Some(8.0));
    }
}
