//! From a path to a graph, and from a graph to a compiled step.

use crate::args::{Compiling, ForwardArgs, MicroBatches, Reading};
use crate::data::read_whole;
use crate::disk;
use crate::failure::Failure;
use crate::groups;
use crate::lora;
use crate::observe::{Dumps, Observer};
use crate::out;
use crate::page::PassTime;
use gpu::Here;
use ir::text::File;
use ir::{Device, Graph, Op, TensorType};
use onnx::Trainable;
use passes::cost::profile::{Profile, Profiled};
use passes::cost::{Cost, Roofline};
use passes::decide::{Extent, Planner};
use passes::devices;
use passes::graph::autodiff::AutodiffError;
use passes::graph::criterion::{self, Criterion, Loss};
use passes::graph::precision::Precision;
use passes::pipeline::{self, Compiled, Options};
use passes::plan::Cancel;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A model from its file.
#[derive(Default)]
pub(crate) struct Model {
    /// The step.
    pub(crate) graph: Graph,
    /// The file's values of states, by path.
    pub(crate) tensors: BTreeMap<String, (TensorType, Vec<u8>)>,
    /// Calls that can be planned but not run.
    pub(crate) unsupported: Vec<torch::Unsupported>,
    /// What the reader left out, or assumed.
    notes: Vec<String>,
    /// Paths that name one parameter.
    pub(crate) tied: Vec<Vec<String>>,
    /// The file, and how it was read.
    pub(crate) from: (PathBuf, Reading),
    /// How the forward became a step.
    pub(crate) forward: ForwardArgs,
}

/// A file's format, by its name, else by its first bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Format {
    /// An archive of PyTorch.
    Pt2,
    /// A forward in protobuf.
    Onnx,
    /// The sizes of a forward in JSON.
    Config,
    /// Text.
    Ir,
    /// A compiled step.
    Lit,
}

/// Finds a file's format.
pub(crate) fn format(path: &Path) -> Result<Format, Failure> {
    let metadata =
        std::fs::metadata(path).map_err(|e| Failure::Input(format!("{}: {e}", path.display())))?;
    if !metadata.is_file() {
        return Err(Failure::Input(format!("{}: not a file", path.display())));
    }
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("pt2") => return Ok(Format::Pt2),
        Some("onnx") => return Ok(Format::Onnx),
        Some("json") => return Ok(Format::Config),
        Some("ir") => return Ok(Format::Ir),
        Some("lit") => return Ok(Format::Lit),
        _ => {}
    }
    let mut start = vec![];
    let read = std::fs::File::open(path)
        .and_then(|file| std::io::Read::read_to_end(&mut std::io::Read::take(file, 4), &mut start));
    read.map_err(|e| Failure::Input(format!("{}: {e}", path.display())))?;
    Ok(match &start[..] {
        [b'P', b'K', ..] => Format::Pt2,
        [0x89, b'L', b'I', b'T'] => Format::Lit,
        // The first field of a model in protobuf is its version, a small number.
        [0x08, 1..0x80, ..] => Format::Onnx,
        [b'{', ..] => Format::Config,
        _ => Format::Ir,
    })
}

/// Sets the options of a forward that a file's format implies: a configuration is that of a causal
/// language model.
pub(crate) fn complete(path: &Path, forward: &mut ForwardArgs) {
    // Whoever reads the file reports what is wrong with it.
    if !forward.differentiate && format(path).is_ok_and(|format| format == Format::Config) {
        *forward = ForwardArgs {
            differentiate: true,
            loss: Some(Loss::CrossEntropy),
            shift: true,
            add_lora: forward.add_lora.clone(),
            ..ForwardArgs::default()
        };
    }
}

/// Reads a text file.
pub(crate) fn read_text(path: &Path) -> Result<String, Failure> {
    String::from_utf8(read_whole(path)?)
        .map_err(|_| Failure::Input(format!("{}: not a text file", path.display())))
}

/// Reads a model, attaches the loss to a forward, and tells what the reader left out.
pub(crate) fn read(
    path: &Path,
    reading: &Reading,
    forward: &ForwardArgs,
) -> Result<Model, Failure> {
    let model = read_silently(path, reading, forward)?;
    for note in &model.notes {
        out::note(&format!("note: {}: {note}", path.display()));
    }
    Ok(model)
}

/// The same without notes, for a model that is read once more.
pub(crate) fn read_silently(
    path: &Path,
    reading: &Reading,
    forward: &ForwardArgs,
) -> Result<Model, Failure> {
    let mut model = Model {
        from: (path.to_path_buf(), reading.clone()),
        forward: forward.clone(),
        ..read_as_it_is(path, reading)?
    };
    if let Some(added) = &forward.add_lora {
        let refused = |why: String| Failure::Input(format!("{}: {why}", path.display()));
        if !forward.differentiate && model.graph.gradients.is_empty() {
            let help = "a forward alone; for --add-lora, --differentiate adds a backward";
            return Err(refused(help.into()));
        }
        let matrices = lora::add(&mut model.graph, added);
        model
            .tensors
            .extend(matrices.map_err(|e| refused(e.to_string()))?);
    }
    if forward.differentiate {
        let criterion = Criterion {
            loss: forward.loss.unwrap_or_default(),
            logits: forward.logits.clone(),
            labels: forward.labels.clone(),
            shift: forward.shift,
        };
        let refused = |e: &dyn Error| Failure::Input(format!("{}: {e}", path.display()));
        if !model.graph.gradients.is_empty() {
            return Err(refused(&AutodiffError::HasGradients));
        }
        criterion::attach(&mut model.graph, &criterion).map_err(|e| refused(&e))?;
    }
    Ok(model)
}

/// An error if a symbolic size has two values.
fn check_once(dims: &[(String, u64)]) -> Result<(), Failure> {
    for (k, (name, size)) in dims.iter().enumerate() {
        if let Some((_, first)) = dims[..k].iter().find(|(other, _)| other == name) {
            return Err(Failure::Input(format!(
                "--dim {name}={first} --dim {name}={size}: a size has one value; leave one of the \
                 two out"
            )));
        }
    }
    Ok(())
}

fn read_as_it_is(path: &Path, reading: &Reading) -> Result<Model, Failure> {
    let format = format(path)?;
    if format != Format::Onnx {
        refuse_onnx_options(path, reading)?;
    }
    if format != Format::Config {
        refuse_config_options(path, reading)?;
    }
    let dims = &reading.dim;
    check_once(dims)?;
    match format {
        Format::Pt2 => {
            let spinner = out::spinner(format!("reading {}", path.display()));
            let dims: BTreeMap<String, u64> = dims.iter().cloned().collect();
            let model = torch::read(path, &dims).map_err(|e| Failure::Input(e.to_string()))?;
            drop(spinner);
            Ok(Model {
                graph: model.graph,
                tensors: tensors(model.tensors),
                unsupported: model.unsupported,
                tied: model.tied,
                ..Model::default()
            })
        }
        Format::Onnx => {
            let spinner = out::spinner(format!("reading {}", path.display()));
            let options = onnx::Options {
                dims: dims.iter().cloned().collect(),
                trainable: reading
                    .trainable
                    .as_deref()
                    .map_or(Trainable::default(), Trainable::parse),
                batch_norm: reading.batch_norm,
            };
            let model = onnx::read(path, &options).map_err(|e| Failure::Input(e.to_string()))?;
            drop(spinner);
            Ok(Model {
                graph: model.graph,
                tensors: tensors(model.tensors),
                unsupported: model.unsupported,
                notes: model.notes,
                ..Model::default()
            })
        }
        Format::Config => {
            let options = config::Options {
                dims: dims.iter().cloned().collect(),
                packed: reading.packed,
                dropout: reading.dropout,
            };
            let model = config::read(path, &options).map_err(|e| Failure::Input(e.to_string()))?;
            Ok(Model {
                graph: model.graph,
                tensors: tensors(model.tensors),
                notes: model.notes,
                ..Model::default()
            })
        }
        Format::Ir => {
            if let Some((name, _)) = dims.first() {
                let path = path.display();
                return Err(Failure::Input(format!(
                    "{path}: a text graph has no symbolic sizes; there is no {name} to set"
                )));
            }
            let text = read_text(path)?;
            let file = ir::text::parse_file(&text)
                .map_err(|e| Failure::Input(format!("{}: {e}", path.display())))?;
            let graph = match file {
                File::Graph(graph) => graph,
                File::Program(program) => program.graph,
            };
            let findings = ir::verify::graph(&graph);
            if !findings.is_empty() {
                let text = with_context(&ir::text::print_graph_with_findings(&graph, &findings));
                return Err(Failure::Input(format!(
                    "{}: {}\n{text}",
                    path.display(),
                    findings_count(findings.len())
                )));
            }
            let unsupported = externs(&graph);
            Ok(Model {
                graph,
                unsupported,
                ..Model::default()
            })
        }
        Format::Lit => {
            let path = path.display();
            Err(Failure::Input(format!(
                "{path}: a compiled step; only `train` and `inspect` take one. Give the model it \
                 was made of"
            )))
        }
    }
}

/// An error if an option is given that only a configuration has.
fn refuse_config_options(path: &Path, reading: &Reading) -> Result<(), Failure> {
    let why = match (reading.packed, reading.dropout) {
        (true, _) => "--packed: it adds inputs to the model of a config.json",
        (_, true) => "--dropout: it adds dropout to the model of a config.json",
        (false, false) => return Ok(()),
    };
    let path = path.display();
    Err(Failure::Input(format!(
        "{why}; {path} is what was exported"
    )))
}

/// An error if an option is given that only .onnx files have.
fn refuse_onnx_options(path: &Path, reading: &Reading) -> Result<(), Failure> {
    let given = [
        ("--trainable", reading.trainable.is_some()),
        ("--batch-norm", reading.batch_norm.is_some()),
    ];
    match given.iter().find(|(_, is_given)| *is_given) {
        Some((option, _)) => Err(Failure::Input(format!(
            "{option}: only .onnx files have such a choice; {} is another kind of file",
            path.display()
        ))),
        None => Ok(()),
    }
}

fn tensors(tensors: BTreeMap<String, torch::Tensor>) -> BTreeMap<String, (TensorType, Vec<u8>)> {
    let pair = |(path, tensor): (String, torch::Tensor)| (path, (tensor.ty, tensor.data));
    tensors.into_iter().map(pair).collect()
}

fn externs(graph: &Graph) -> Vec<torch::Unsupported> {
    let is_extern = graph
        .order
        .iter()
        .filter(|&&node| graph.nodes[node].op.is_extern());
    is_extern
        .map(|&node| torch::Unsupported {
            target: match &graph.nodes[node].op {
                Op::Extern(op) => op.name.clone(),
                op => op.name().into(),
            },
            node: graph.node_name(node).to_string(),
            why: "has no kernel".to_string(),
        })
        .collect()
}

/// `3 findings`.
pub(crate) fn findings_count(n: usize) -> String {
    if n == 1 {
        "1 finding".into()
    } else {
        format!("{n} findings")
    }
}

/// The number of lines shown around a finding. A short text is shown as a whole.
const CONTEXT: usize = 2;
const SHORT: usize = 60;
const SHOWN: usize = 40;

/// The lines of a text with findings, and the lines around them.
pub(crate) fn with_context(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    if lines.len() <= SHORT {
        return text.trim_end().to_string();
    }
    let found: Vec<usize> = (0..lines.len())
        .filter(|&i| lines[i].starts_with("  ; error:"))
        .collect();
    let mut shown: Vec<String> = vec![];
    let mut next = 0;
    for &i in found.iter().take(SHOWN) {
        let from = i.saturating_sub(CONTEXT).max(next);
        let to = (i + CONTEXT).min(lines.len());
        if next < from {
            shown.push("  ..".into());
        }
        shown.extend(lines[from.min(to)..to].iter().map(|line| line.to_string()));
        next = to.max(next);
    }
    if SHOWN < found.len() {
        shown.push(format!("  .. and {} more findings", found.len() - SHOWN));
    }
    shown.join("\n")
}

/// A machine and its times.
pub(crate) struct Machine {
    /// The machine.
    pub(crate) device: Device,
    /// Its times.
    pub(crate) cost: Box<dyn Cost>,
    /// Its times, if they were measured.
    profiled: Option<Profiled>,
}

/// The machine that the options name.
pub(crate) fn machine(compiling: &Compiling) -> Result<Machine, Failure> {
    machine_on(compiling, None)
}

/// The same for a device that is known already.
pub(crate) fn machine_on(compiling: &Compiling, known: Option<Device>) -> Result<Machine, Failure> {
    let mut device = match known {
        Some(device) => device,
        None => device(compiling.device.as_deref().unwrap_or("cpu"))?,
    };
    if let Some(link) = compiling.link {
        device.link_bandwidth = link;
    }
    if let Some(disk) = &compiling.disk {
        let (rate, host) = (compiling.disk_rate, compiling.host);
        disk::add(&mut device, disk, rate, host, compiling.budget)?;
    }
    let Some(path) = &compiling.profile else {
        let cost = Box::new(Roofline::new(&device).with_tf32(compiling.is_tf32()));
        return Ok(Machine {
            device,
            cost,
            profiled: None,
        });
    };
    if compiling.is_tf32() {
        let why = "--precision tf32: the products that --profile measured were of f32; leave out \
            one of the two";
        return Err(Failure::Input(why.into()));
    }
    let text = read_text(path)?;
    let refused =
        |e: String| Failure::Input(format!("--profile {}: {}", path.display(), e.trim_end()));
    let profile = Profile::from_toml(&text).map_err(|e| refused(e.to_string()))?;
    let (measured, asked) = (profile.kernels, compiling.kernels.unwrap_or_default());
    if measured != asked {
        let (measured, asked) = (measured.name(), asked.name());
        return Err(refused(format!(
            "it measured {measured} kernels; profile again with --kernels {asked}"
        )));
    }
    if compiling.link.is_some() && compiling.link != profile.link.paced {
        out::note(&format!(
            "note: --profile {}: its copies were not measured with this --link, so how much they \
             and kernels slow each other is estimated; profile again with --link",
            path.display()
        ));
    }
    let profiled =
        Profiled::new(profile, &device, compiling.link).map_err(|e| refused(e.to_string()))?;
    Ok(Machine {
        device,
        cost: Box::new(profiled.clone()),
        profiled: Some(profiled),
    })
}

/// The largest number of listed ops that a profile lacks.
const GUESSED: usize = 5;

/// Reports the times that are guesses, if any.
fn tell_guesses(profiled: &Profiled, graph: &Graph) {
    let (guesses, n) = profiled.guesses(graph);
    if guesses.is_empty() {
        return;
    }
    let named: Vec<&str> = guesses.iter().take(GUESSED).map(String::as_str).collect();
    let rest = guesses.len() - named.len();
    let rest = if rest == 0 {
        String::new()
    } else {
        format!("\n  and {rest} more")
    };
    let named = named.join("\n  ");
    out::note(&format!(
        "note: {} of {n} ops guessed: the profile lacks\n  {named}{rest}",
        guesses.len()
    ));
}

/// The device of a name, of a file, or of this machine's GPU.
pub(crate) fn device(name: &str) -> Result<Device, Failure> {
    if name.ends_with(".toml") || name.contains(std::path::MAIN_SEPARATOR) {
        let text = read_text(Path::new(name))?;
        return Device::from_toml(&text)
            .map_err(|e| Failure::Input(format!("{name}: {}", e.to_string().trim_end())));
    }
    if let Some(number) = gpu::number(name) {
        return Ok(Here::find(number?)?.device);
    }
    devices::named(name).map_err(|e| Failure::Input(e.to_string()))
}

/// The compiler's options.
pub(crate) fn options(compiling: &Compiling) -> Options {
    Options {
        optimizer: compiling.optimizer.unwrap_or_default(),
        master: compiling.master.unwrap_or_default(),
        rounding: compiling.rounding.unwrap_or_default(),
        clip_norm: compiling.clip_norm,
        grad_norm: compiling.grad_norm,
        groups: BTreeMap::new(),
        group_options: vec![],
        whole_groups: BTreeSet::new(),
        micro_batches: match compiling.micro_batches {
            Some(MicroBatches::Of(n)) => Some(n as usize),
            // It is decided before a step is compiled.
            Some(MicroBatches::Auto) | None => None,
        },
        reduction: compiling.reduction.unwrap_or_default(),
        loss_chunks: compiling.loss_chunks.unwrap_or_default(),
        update: compiling.update.unwrap_or_default(),
        budget: compiling.budget.unwrap_or_default(),
        // Without room on the host, the disk takes its place.
        host: compiling
            .host
            .filter(|&bytes| bytes > 0 || compiling.disk.is_none()),
        planner: match compiling.protrain {
            Some(_) => Planner::Protrain,
            None => compiling.planner.unwrap_or_default(),
        },
        protrain: compiling.protrain.unwrap_or_default(),
        kernels: compiling.kernels.unwrap_or_default(),
        homes: None,
        parts: None,
        precision: compiling.precision.unwrap_or_default(),
        loss_scale: compiling.loss_scale.unwrap_or_default(),
        base: compiling.base.unwrap_or_default(),
        tf32: compiling.is_tf32(),
        differentiate: compiling.forward.differentiate,
        evaluate: compiling.evaluate,
        without_simplify: compiling.without.is_some(),
        extent: Extent::default(),
        // Ctrl-C ends the process.
        cancel: Cancel::default(),
    }
}

/// Compiles a graph for its budget only: the result has no smallest budget and no other budgets.
pub(crate) fn compile(
    graph: &Graph,
    compiling: &Compiling,
    machine: &Machine,
    dumps: Dumps,
) -> Result<Compiled, Failure> {
    run(graph, compiling, machine, dumps, Extent::Plan).map(|(compiled, _)| compiled)
}

/// Compiles a graph of smaller batches, for the memory and the states of another step.
pub(crate) fn compile_beside(
    graph: &Graph,
    compiling: &Compiling,
    machine: &Machine,
    first: &Compiled,
) -> Result<Compiled, Failure> {
    run_beside(
        graph,
        compiling,
        machine,
        Dumps::Stderr,
        (Extent::Plan, Some(first)),
    )
    .map(|(compiled, _)| compiled)
}

/// The model's step with another value of a symbolic size.
pub(crate) fn graph_with(model: &Model, symbol: &str, size: u64) -> Result<Graph, Failure> {
    let (path, mut reading) = model.from.clone();
    for (name, value) in &mut reading.dim {
        if name == symbol {
            *value = size;
        }
    }
    Ok(read_silently(&path, &reading, &model.forward)?.graph)
}

/// Compiles a graph with all information for reports, and with the time of each pass.
pub(crate) fn plan(
    graph: &Graph,
    compiling: &Compiling,
    machine: &Machine,
    dumps: Dumps,
) -> Result<(Compiled, Vec<PassTime>), Failure> {
    run(graph, compiling, machine, dumps, Extent::Curve)
}

/// More micro-batches than this take long to compile. The time grows in proportion to them: 64, 128
/// and 256 of a small model take 3.5, 7.9 and 14.5 s of a core.
const MANY_MICRO_BATCHES: u64 = 128;

/// Starts the threads that share the compiler's work. If the system has no threads, this thread
/// does all work; the result is the same.
pub(crate) fn start_threads() -> Result<(), Failure> {
    static STARTED: OnceLock<Result<(), String>> = OnceLock::new();
    let start = || {
        // If making the global pool fails, it cannot be tried again; a separate pool can.
        let has_threads = rayon::ThreadPoolBuilder::new().build().is_ok();
        let builder = rayon::ThreadPoolBuilder::new();
        let builder = if has_threads {
            builder
        } else {
            out::note("note: the system has no more threads to give; compiling with one");
            builder.num_threads(1).use_current_thread()
        };
        builder.build_global().map_err(|e| e.to_string())
    };
    STARTED
        .get_or_init(start)
        .clone()
        .map_err(|e| Failure::System(format!("no threads to compile with: {e}")))
}

fn run(
    graph: &Graph,
    compiling: &Compiling,
    machine: &Machine,
    dumps: Dumps,
    extent: Extent,
) -> Result<(Compiled, Vec<PassTime>), Failure> {
    run_beside(graph, compiling, machine, dumps, (extent, None))
}

fn run_beside(
    graph: &Graph,
    compiling: &Compiling,
    machine: &Machine,
    dumps: Dumps,
    (extent, first): (Extent, Option<&Compiled>),
) -> Result<(Compiled, Vec<PassTime>), Failure> {
    start_threads()?;
    let other = compiling.planner.filter(|&p| p != Planner::Protrain);
    if let (Some(planner), Some(_)) = (other, compiling.protrain) {
        return Err(Failure::Input(format!(
            "--protrain gives numbers of the planner protrain, not of {}: leave --planner out",
            planner.name()
        )));
    }
    if compiling.loss_scale.is_some() && compiling.precision != Some(Precision::Fp16) {
        let why = "--loss-scale: the loss is scaled in fp16 alone: give --precision fp16, or leave \
            it out";
        return Err(Failure::Input(why.into()));
    }
    if let Some(MicroBatches::Of(n)) = compiling.micro_batches
        && n > MANY_MICRO_BATCHES
    {
        out::note(&format!(
            "note: each of the {n} micro-batches has lines of its own, and compiling takes time in \
             proportion to them; -v prints its progress"
        ));
    }
    let mut graph = graph.clone();
    groups::freeze(&mut graph, compiling)?;
    let groups = groups::of(&graph, compiling)?;
    let mut observer = Observer::new(compiling, dumps, &graph)?;
    let options = Options {
        extent,
        groups: groups.of,
        group_options: groups.options,
        whole_groups: groups.whole,
        ..options(compiling)
    };
    let options = match first {
        Some(first) => first.beside(&options),
        None => options,
    };
    let compiled = pipeline::compile(
        graph,
        &options,
        &machine.device,
        &*machine.cost,
        &mut |report| observer.see(report),
    );
    let times = observer.finish()?;
    if let (Some(profiled), Ok(compiled)) = (&machine.profiled, &compiled) {
        tell_guesses(profiled, &compiled.program.graph);
    }
    compiled.map(|compiled| (compiled, times)).map_err(refused)
}

/// A step that the compiler refused.
pub(crate) fn refused(error: pipeline::Error) -> Failure {
    match error {
        pipeline::Error::Graph { message, .. } => Failure::Input(message),
        pipeline::Error::Illegal(illegal) => Failure::Input(illegal.to_string()),
        pipeline::Error::Infeasible(infeasible) => Failure::NoFit(infeasible),
        pipeline::Error::HostTooSmall(host) => Failure::HostTooSmall(host),
        pipeline::Error::Broken {
            pass,
            summary,
            text,
        } => Failure::Bug(format!(
            "pass {pass} left a program that is not right ({summary})\n{}\n",
            with_context(&text)
        )),
        pipeline::Error::Diverged {
            planned,
            compiled,
            planned_micros,
            compiled_micros,
        } => Failure::Bug(format!(
            "the chosen plan needs {planned} bytes and {planned_micros} us, the compiled program \
             {compiled} bytes and {compiled_micros} us"
        )),
    }
}
