//! `lighterage profile`: measures the ops of a step, the link and their interference, for
//! `--profile`.

use crate::args::{Compiling, ProfileArgs};
use crate::data::{check_writable, save_atomically};
use crate::failure::Failure;
use crate::model::{self, read_text};
use crate::out::{self, out};
use crate::size::{micros, short};
use gpu::Here;
use indicatif::{ProgressBar, ProgressStyle};
use measure::{Error, Measured, Progress, Request};
use passes::cost::Lane;
use passes::cost::profile::{OpFigures, Profile};
use passes::graph::optimizer::Optimizer;
use passes::graph::precision::Precision;
use passes::pipeline::Kernels;
use serde_json::json;
use std::path::Path;

/// Rows of the report's tables.
const ROWS: usize = 12;
/// A profile is reported as disturbed if the sum of its medians is larger than the time of the
/// fastest round by this factor.
const DISTURBED: f64 = 1.15;

/// Runs the command.
pub(crate) fn run(args: &ProfileArgs) -> Result<(), Failure> {
    check_writable("--output", &args.output)?;
    if args.precision == Some(Precision::Tf32) {
        let why = "--precision tf32: a profile has the times of f32 products; leave it out";
        return Err(Failure::Input(why.into()));
    }
    let compiling = Compiling {
        optimizer: Some(args.optimizer.unwrap_or(Optimizer::AdamW)),
        precision: args.precision,
        master: args.master,
        update: args.update,
        kernels: args.kernels,
        device: args.device.clone(),
        link: args.link,
        forward: args.forward.clone(),
        ..Compiling::default()
    };
    let number = args.device.as_deref().and_then(gpu::number).transpose()?;
    let here = number.map(Here::find).transpose()?;
    if here.is_some() {
        check_gpu(args)?;
    }
    let known = args.reuse.as_deref().map(read).transpose()?;
    let device = here.as_ref().map(|here| here.device.clone());
    let machine = model::machine_on(&compiling, device)?;
    let model = model::read(&args.model.model, &args.model.reading, &args.forward)?;
    model::start_threads()?;
    let request = Request {
        graph: &model.graph,
        options: model::options(&compiling),
        device: &machine.device,
        link: args.link,
        repeat: args.repeat,
        fastest: args.fastest,
        memory: args.memory,
        known: known.as_ref(),
    };
    let mut bar: Option<ProgressBar> = None;
    let mut see = |progress| match (progress, &bar) {
        (Progress::Runs(n), _) => bar = self::bar(n),
        (Progress::Ran, Some(bar)) => bar.inc(1),
        (Progress::Machine, Some(bar)) => bar.set_message("the machine"),
        (Progress::Ran | Progress::Machine, None) => {}
    };
    let measured = match &here {
        Some(here) => measure::gpu(&request, here),
        None => measure::processor(&request, &mut see),
    };
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    finish(args, &measured.map_err(|error| failure(args, error))?)
}

/// Refuses what no GPU has.
fn check_gpu(args: &ProfileArgs) -> Result<(), Failure> {
    let why = if args.kernels == Some(Kernels::Plain) {
        "--kernels plain: only generated kernels run on a GPU"
    } else if args.reuse.is_some() {
        "--reuse: the ops of a GPU are measured in a step, all at once"
    } else if args.link.is_some() {
        "--link: the link of a GPU is measured as it is"
    } else {
        return Ok(());
    };
    Err(Failure::Input(why.into()))
}

/// Reads an earlier profile.
fn read(file: &Path) -> Result<Profile, Failure> {
    let text = read_text(file)?;
    Profile::from_toml(&text)
        .map_err(|e| Failure::Input(format!("--reuse {}: {e}", file.display())))
}

fn failure(args: &ProfileArgs, error: Error) -> Failure {
    match error {
        Error::Compile(error) => model::refused(*error),
        Error::Emit(error) => error.into(),
        Error::Run(error) => Failure::System(error.to_string()),
        Error::Request(why) => match &args.reuse {
            Some(file) => Failure::Input(format!("--reuse {}: {why}", file.display())),
            None => Failure::Input(why),
        },
    }
}

/// Writes the file and reports.
fn finish(args: &ProfileArgs, measured: &Measured) -> Result<(), Failure> {
    let profile = &measured.profile;
    let text = profile.to_toml().map_err(|e| Failure::Bug(e.to_string()))?;
    save_atomically(&args.output, &[text.as_bytes()])?;
    let (micros, fastest) = (profile.step_micros, measured.fastest_micros);
    if DISTURBED * fastest < micros {
        let more = 100.0 * (micros / fastest.max(1e-3) - 1.0);
        out::note(&format!(
            "note: ops took {more:.0}% more than in the fastest round: the machine is busy, and \
             predictions will be as if it stayed so; --fastest predicts it undisturbed"
        ));
    }
    if args.json {
        out!("{}", json(measured));
    } else {
        out::text(&report(measured));
        out!(
            "\nwrote {}, {}",
            args.output.display(),
            crate::data::file_size(&args.output)
        );
    }
    Ok(())
}

fn bar(n: u64) -> Option<ProgressBar> {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} ops  {msg}  {eta} left")
        .unwrap_or(ProgressStyle::default_bar());
    out::bar(ProgressBar::new(n).with_style(style))
}

fn json(measured: &Measured) -> serde_json::Value {
    let profile = &measured.profile;
    json!({
        "model": profile.model,
        "kernels": profile.kernels.name(),
        "device": profile.device,
        "cpu": profile.cpu,
        "cores": profile.cores,
        "lines": measured.n_lines,
        "distinct_ops": profile.ops.len(),
        "ops_run": measured.n_run,
        "refused": measured.refused,
        "step_ms": profile.step_micros / 1e3,
        "step_fastest_ms": measured.fastest_micros / 1e3,
        "rounds": profile.repeat,
        "profiling_ms": profile.profiling_seconds * 1e3,
        "peak_bytes": profile.peak_bytes,
        "window_bytes": measured.window_bytes,
        "largest_op_bytes": measured.largest_op_bytes,
        "link": {
            "in_bytes_per_second": profile.link.in_bandwidth,
            "out_bytes_per_second": profile.link.out_bandwidth,
            "copy_us": profile.link.micros,
        },
        "copy_bytes_per_second": profile.link.copy_bandwidth,
        "host_bytes_per_second": profile.host_bandwidth,
        "handoff_us": profile.handoff_micros,
        "keeps": profile.keeps,
    })
}

fn report(measured: &Measured) -> String {
    let profile = &measured.profile;
    let mut text = format!(
        "{} on {} ({}, {} cores): {} distinct ops in {} lines\n\n",
        profile.model,
        profile.device,
        profile.cpu,
        profile.cores,
        profile.ops.len(),
        measured.n_lines
    );
    for (name, value) in machine_figures(measured) {
        text.push_str(&format!("  {name:<16} {value}\n"));
    }
    text.push('\n');
    text.push_str(&kept_speeds(profile));
    text.push('\n');
    text.push_str(&dearest_ops(profile));
    let refused = &measured.refused;
    if !refused.is_empty() {
        text.push_str(&format!(
            "\n{} ops could not be run; their times will be guesses:\n",
            refused.len()
        ));
        for (key, why) in refused.iter().take(ROWS) {
            text.push_str(&format!("  {key}: {why}\n"));
        }
    }
    text
}

/// The figures of the step and of the machine, with their names.
fn machine_figures(measured: &Measured) -> [(&'static str, String); 7] {
    let profile = &measured.profile;
    let rate = |bytes: f64| format!("{:.2} GB/s", bytes / 1e9);
    let steps = profile.profiling_seconds * 1e6 / profile.step_micros.max(1e-3);
    let link = &profile.link;
    let paced = link.paced.map_or(String::new(), |paced| {
        format!(", slowed to {}", rate(paced))
    });
    [
        (
            "one step",
            format!("{}, the sum of its ops", micros(profile.step_micros)),
        ),
        (
            "profiling took",
            format!(
                "{}: {steps:.1} steps",
                micros(profile.profiling_seconds * 1e6)
            ),
        ),
        (
            "memory",
            format!(
                "{}: ops {}, the largest alone {}; copies and updates {}",
                short(profile.peak_bytes),
                short(measured.window_bytes),
                short(measured.largest_op_bytes),
                short(measured.machine_bytes)
            ),
        ),
        (
            "link",
            format!(
                "{} in, {} out, {} a copy{paced}",
                rate(link.in_bandwidth),
                rate(link.out_bandwidth),
                micros(link.micros)
            ),
        ),
        ("copies", rate(link.copy_bandwidth)),
        ("updates on host", rate(profile.host_bandwidth)),
        ("handoff", micros(profile.handoff_micros)),
    ]
}

/// The table of the speed that each lane keeps while another one runs.
fn kept_speeds(profile: &Profile) -> String {
    let mut text = String::from("speed kept beside  ");
    for lane in Lane::MEASURED {
        text.push_str(&format!("{:>8}", lane.name()));
    }
    for lane in Lane::MEASURED {
        text.push_str(&format!("\n  {:<16} ", lane.name()));
        for other in Lane::MEASURED {
            let share = if lane == other {
                "-".into()
            } else {
                format!("{:.0}%", 100.0 * profile.kept(lane, other))
            };
            text.push_str(&format!("{share:>8}"));
        }
    }
    text + "\n"
}

/// The table of the ops with the largest shares of a step.
fn dearest_ops(profile: &Profile) -> String {
    let mut ops: Vec<(&String, &OpFigures)> = profile.ops.iter().collect();
    let total = |op: &OpFigures| op.micros * f64::from(op.count);
    ops.sort_by(|a, b| total(b.1).total_cmp(&total(a.1)).then_with(|| a.0.cmp(b.0)));
    let mut text = String::from("  share      a run  runs  op\n");
    for (key, op) in ops.iter().take(ROWS) {
        let share = 100.0 * total(op) / profile.step_micros.max(1e-3);
        text.push_str(&format!(
            "  {share:4.1}%  {:>9}  {:>4}  {key}\n",
            micros(op.micros),
            op.count
        ));
    }
    if ROWS < ops.len() {
        text.push_str(&format!("  and {} more\n", ops.len() - ROWS));
    }
    text
}
