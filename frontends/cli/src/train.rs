//! `lighterage train`: runs a step many times. After the last batch the first follows.

mod adapters;
mod buckets;
mod checkpoints;
mod eval_model;
mod evaluation;
mod events;
mod feeding;
mod hyper;
mod metrics;
mod number;
mod progress;
mod rates;
mod record;
mod resume;
mod schedule;
mod source;
mod states;
mod summary;

use crate::args::TrainArgs;
use crate::data::{Batch, Data, Feed, check_writable};
use crate::failure::Failure;
use crate::interrupt;
use crate::out::{self, out};
use crate::size::short;
use artifact::{Artifact, Attr, Binding, CommandKind, Initial, Operand, StateKind};
use buckets::Buckets;
use checkpoint::{Manifest, Store};
use checkpoints::{Checkpoints, Position, States};
use evaluation::Evaluator;
use hyper::Hyper;
use metrics::Metrics;
use number::Number;
use passes::graph::optimizer::{FOUND_INF, GRAD_NORM, LOSS_SCALE};
use progress::Progress;
use rates::{Items, Numbers, Run};
use record::Record;
use runtime::{Error, Files, Machine, Options, Steps};
use serde_json::json;
use source::Source;
use states::Init;
use std::collections::{BTreeMap, BTreeSet};
use summary::Summary;

/// Runs the command.
pub(crate) fn run(args: &TrainArgs) -> Result<(), Failure> {
    let written = [
        ("--save", &args.save),
        ("--trace", &args.trace),
        ("--metrics", &args.metrics.metrics),
    ];
    for (option, path) in written {
        if let Some(path) = path {
            check_writable(option, path)?;
        }
    }
    if let Some(folder) = &args.save_adapters {
        adapters::check_folder(folder, args.compiling.forward.add_lora.as_ref())?;
    }
    let mut init = Init::parse(args.init.as_deref())?;
    let (store, source) = begin(args)?;
    let Source {
        mut artifact,
        tied,
        link_latency,
    } = source;
    source::check_names(args, &artifact)?;
    source::note_threads(args);
    let hyper = Hyper::new(
        &args.hyper,
        &artifact,
        args.data.start_step.saturating_add(args.steps),
    )?;
    let mut buckets = Buckets::of(&artifact, args.data.labels_input.as_deref());
    let micro_batches = buckets.micro_batches();
    let data = feeding::training(&args.data, &buckets)?;
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
    let loss = Number::loss(&artifact);
    let named = [GRAD_NORM, LOSS_SCALE, FOUND_INF].map(|name| Number::named(&artifact, name));
    let items = |step| Items::of(buckets.inputs_of(step), micro_batches);
    let n_steps = 1 + artifact.others.len();
    let items: Vec<Items> = (0..n_steps).map(items).collect();
    let options = Options {
        link_bandwidth: args.compiling.link,
        link_latency,
        trace: args.trace.is_some(),
        shuffle: args.shuffle,
        threads: args.threads.map(usize::from),
        gpu: source::gpu_number(args)?.unwrap_or(0),
    };
    let mut evaluator = Evaluator::open(args, &artifact, options)?;
    let states = States::of(&artifact);
    let common = Manifest {
        model: artifact.name.clone(),
        plan: format!("{:08x}", artifact::fingerprint(&artifact)),
        options: results_depend_on(args, &artifact, hyper.as_ref(), &data),
        ..Manifest::default()
    };
    let mut checkpoints =
        store.map(|store| Checkpoints::new(args, &artifact, store, states.clone(), common.clone()));
    let others = std::mem::take(&mut artifact.others);
    let choices = source::choices(args)?;
    let files = Files {
        choices: choices.as_deref(),
        disk: args.compiling.disk.as_ref().map(|disk| &*disk.folder),
    };
    let mut machine = Machine::beside(artifact, options, files).map_err(failure)?;
    for note in machine.notes() {
        out::note(&format!("note: {note}"));
    }
    let resumed = resume::restore(&args.checkpoints, &mut machine, &states, &common.options)?;
    let mut start = Position {
        step: args.data.start_step,
        batches: args.data.start_step.saturating_mul(micro_batches),
        ..Position::default()
    };
    // With --resume, --steps are those of the whole run.
    let mut steps = args.steps;
    match &resumed {
        None => {
            states::give(&mut machine, &mut init, args.seed, &tied)?;
            if let Some(folder) = &args.adapters {
                adapters::read(folder, &mut machine)?;
            }
        }
        Some(from) => {
            let Manifest { step, batches, .. } = *from.manifest();
            (start.step, start.batches) = (step, batches);
            steps = args.steps.saturating_sub(step);
            if let Some(evaluator) = &mut evaluator {
                evaluator.go_on(&from.manifest().numbers);
            }
            if let Some(checkpoints) = &mut checkpoints {
                checkpoints.resumed(from)?;
            }
        }
    }
    let goes_on = resumed.is_some();
    drop(resumed);
    let mut machines = Steps::new(machine, others, options).map_err(failure)?;

    // From here on, Ctrl-C ends the run after the current step, so that the states can be saved;
    // before, it ends the process.
    interrupt::listen();
    let batches = data.batches();
    let mut record = Record {
        metrics: Metrics::open(&args.metrics, goes_on.then_some(start.step))?,
        evaluator,
        items: items[0],
        epoch: data.epoch() as f64 / micro_batches as f64,
        json: args.json,
    };
    let end = (start.batches).saturating_add(steps.saturating_mul(micro_batches));
    let mut feed = Feed::start(data, start.batches, end, usize::from(args.data.prefetch))?;
    let mut progress = Progress::new(args, machines.now(), items[0], (start.step, steps));
    let mut run = Run {
        before: start.step,
        ..Run::default()
    };
    let position = |run: &Run, record: &Record| Position {
        step: run.step(),
        batches: start.batches + (run.step() - start.step) * micro_batches,
        numbers: record.numbers(),
    };
    // A batch that cannot be read, or a measure that cannot be written, ends the run like Ctrl-C:
    // the states so far are saved.
    let mut broken = None;
    'steps: for step in 0..steps {
        if interrupt::pressed() || (out::closed() && !leaves_files(args)) {
            break;
        }
        let mut batches = vec![];
        for _ in 0..micro_batches {
            match feed.next() {
                Ok(batch) => batches.push(batch),
                Err(e) => {
                    broken = Some(e);
                    break 'steps;
                }
            }
        }
        let size = buckets.choose(&batches)?;
        let machine = machines.turn(size).map_err(failure)?;
        write(machine, &mut buckets, size, batches)?;
        (record.items, progress.items) = (items[size], items[size]);
        if let Some(hyper) = &hyper {
            hyper.write(machine, run.before + step)?;
        }
        // Updates and offloads overlap the next step, except those of the last step.
        machine.launch().map_err(failure)?;
        let report = if step + 1 == steps {
            machine.wait()
        } else {
            machine.wait_io()
        };
        let report = report.map_err(|error| match failure(error) {
            // An index of the data, say: the states may be half new, and are not saved.
            Failure::Input(why) => Failure::Input(format!("step {}: {why}", run.step() + 1)),
            other => other,
        })?;
        let mut read = |number: &Option<Number>| match number {
            Some(number) => number.read(machine),
            None => Ok(None),
        };
        run.add(report.ms, read(&loss)?, items[size].count);
        let [grad_norm, loss_scale, found_inf] = &named;
        let numbers = Numbers {
            lr: hyper.as_ref().map(|hyper| hyper.rate(run.before + step)),
            grad_norm: read(grad_norm)?,
            loss_scale: read(loss_scale)?,
            found_inf: read(found_inf)?,
        };
        run.skipped += u64::from(numbers.found_inf == Some(1.0));
        progress.step(&run, numbers);
        let is_last = step + 1 == steps;
        let recorded = record.step(&run, numbers);
        let evaluated = recorded.and_then(|()| record.evaluate(&mut machines, &run, is_last));
        let saved = match (&evaluated, &mut checkpoints) {
            (Ok(_), Some(checkpoints)) => {
                checkpoints.after_step(machines.now(), run.step(), || position(&run, &record))
            }
            _ => Ok(()),
        };
        match saved.and(evaluated) {
            Ok(None) => {}
            Ok(Some(why)) => {
                out::note(&format!("note: ended after step {}: {why}", run.step()));
                break;
            }
            Err(e) => {
                broken = Some(e);
                break;
            }
        }
    }
    if steps == 0 {
        // Only an evaluation of the states as they are.
        broken = record.evaluate(&mut machines, &run, true).err();
    }
    machines.now().wait().map_err(failure)?;
    progress.finish();
    // Both are tried before an error of one is told.
    let last = match &mut checkpoints {
        Some(checkpoints) => checkpoints.finish(machines.now(), position(&run, &record)),
        None => Ok(()),
    };
    let not_finite = states::save(args, machines.now(), &states)?;
    let adapters = args.save_adapters.as_ref();
    let adapters = adapters.map(|folder| adapters::save(folder, machines.now()));
    let adapters = adapters.transpose()?;
    if let Some(path) = &args.trace {
        // Only writing the file can fail here.
        machines
            .write_trace(path)
            .map_err(|e| Failure::System(e.to_string()))?;
    }
    let report = Summary {
        machine: &machines.machines()[0],
        peaks: summary::peaks(&machines),
        run: &run,
        word: items[0].word,
        batches,
        padding: buckets.padding(),
    };
    if args.json {
        let mut summary = report.json();
        if let Some(checkpoints) = &checkpoints {
            summary["checkpoints"] = checkpoints.json();
        }
        summary["most_resident_bytes"] = summary::most_resident().into();
        out!("{}", json!({"summary": summary}));
    } else {
        out::text(&report.text());
        if args.compiling.disk.is_some()
            && let Some(most) = summary::most_resident()
        {
            let beside = most.saturating_sub(machines.machines()[0].summary().planned_peak_bytes);
            let (most, beside) = (short(most), short(beside));
            out!("process       {most} resident at most: {beside} beside the device's pool");
        }
        if let Some(checkpoints) = &checkpoints {
            out::text(&checkpoints.text());
        }
        let saved = args.save.as_ref().filter(|_| not_finite.is_none());
        for path in [saved, adapters.as_ref(), args.trace.as_ref()]
            .into_iter()
            .flatten()
        {
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
    if let Some(broken) = broken {
        return Err(broken);
    }
    last?;
    if interrupt::pressed() {
        let newest = checkpoints.as_ref().and_then(Checkpoints::newest);
        let saved = newest.or(args.save.as_ref());
        let saved = saved.map_or(String::new(), |path| {
            format!("; saved to {}", path.display())
        });
        return Err(Failure::Interrupted(format!(
            "interrupted after step {}{saved}",
            run.step()
        )));
    }
    Ok(())
}

/// What results depend on beside the states and the step, as text by name. The budget, the kernels
/// and the threads are not there.
fn results_depend_on(
    args: &TrainArgs,
    artifact: &Artifact,
    hyper: Option<&Hyper>,
    data: &Data,
) -> BTreeMap<String, String> {
    let optimizer = artifact.summary.optimizer.as_ref();
    let mut options: BTreeMap<String, String> = [
        (
            "optimizer",
            optimizer.map_or("none".into(), |(name, _)| name.clone()),
        ),
        (
            "micro-batches",
            artifact.summary.micro_batches.max(1).to_string(),
        ),
        ("seed", args.seed.to_string()),
        ("data", data.order()),
    ]
    .map(|(name, value)| (name.to_string(), value))
    .into();
    options.extend(hyper.into_iter().flat_map(Hyper::described));
    options.extend(compiled_with(artifact));
    options
}

/// Opens the folder of checkpoints and reads the model. The folder comes first: hours may be spent
/// before it turns out that it cannot be written, or that another process writes there. If the
/// model cannot be read, no new folder stays.
fn begin(args: &TrainArgs) -> Result<(Option<Store>, Source), Failure> {
    let folder = args.checkpoints.folder();
    let is_new = folder.is_some_and(|folder| !folder.exists());
    let store = checkpoints::open_store(args)?;
    let source = source::of(args).and_then(|source| {
        source::check_memory(args, &source.artifact)?;
        Ok(source)
    });
    match source {
        Ok(source) => Ok((store, source)),
        Err(failure) => {
            if let Some(store) = store.filter(|_| is_new) {
                store.abandon();
            }
            Err(failure)
        }
    }
}

/// The options of compiling that results depend on, as far as a compiled step shows them: another
/// number type or another clipping leaves the states' types as they are.
fn compiled_with(artifact: &Artifact) -> BTreeMap<String, String> {
    let mut products = BTreeSet::new();
    let mut clip = None;
    for command in &artifact.commands {
        let CommandKind::Launch { kernel, ins, .. } = &command.kind else {
            continue;
        };
        let kernel = &artifact.kernels[*kernel as usize];
        if kernel.op.starts_with("matmul")
            && let Some(factor) = ins.first()
        {
            products.insert(format!("{:?}", factor.dtype).to_lowercase());
        }
        if kernel.op == "clip_scale" {
            let norm = kernel.attrs.iter().find(|(name, _)| name == "max_norm");
            if let Some((_, Attr::Float(norm))) = norm {
                clip = Some(norm.to_string());
            }
        }
    }
    let products: Vec<String> = products.into_iter().collect();
    let products = (!products.is_empty()).then(|| products.join(" and "));
    [("products in", products), ("clip-norm", clip)]
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_string(), value?)))
        .collect()
}

/// The inputs that data are written to: all but the optimizer's options.
fn fed(artifact: &Artifact) -> Vec<Binding> {
    let optimizer = artifact.summary.optimizer.as_ref();
    let has_options = optimizer.is_some_and(|(_, options)| !options.is_empty());
    let inputs = artifact.inputs.iter();
    inputs
        .filter(|input| !has_options || !artifact::is_optimizer_input(&input.name))
        .cloned()
        .collect()
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

/// Whether the run writes files, so that it goes on if nobody reads what it prints.
fn leaves_files(args: &TrainArgs) -> bool {
    let metrics = [&args.metrics.metrics, &args.metrics.tensorboard];
    let files = [&args.save, &args.save_adapters, &args.trace];
    let files = files.into_iter().chain(metrics);
    files.flatten().next().is_some() || args.checkpoints.folder().is_some()
}

/// Writes the batches of a step, which is that of a size.
fn write(
    machine: &mut Machine,
    buckets: &mut Buckets,
    size: usize,
    batches: Vec<Batch>,
) -> Result<(), Failure> {
    let filled = batches.into_iter().map(|batch| buckets.filled(size, batch));
    let filled = filled.collect::<Result<Vec<_>, _>>()?;
    for (inputs, batch) in buckets.fed(size).zip(filled) {
        for (input, bytes) in inputs.iter().zip(batch) {
            machine.write_input(&input.name, &bytes).map_err(failure)?;
        }
    }
    Ok(())
}

fn failure(error: Error) -> Failure {
    match error {
        Error::Resources(message) => Failure::System(message),
        device @ Error::Device { .. } => Failure::System(device.to_string()),
        other => Failure::Input(other.to_string()),
    }
}
