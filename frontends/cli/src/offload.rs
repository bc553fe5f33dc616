//! `lighterage offload`: weight offloading as a separate problem.

use crate::args::{OffloadAlgorithm, OffloadArgs, OffloadCommand, OffloadSolveArgs};
use crate::failure::Failure;
use crate::model::read_text;
use crate::out;
use crate::size::{bytes, micros, short};
use papers::offload::validate::validate;
use papers::offload::{self, Error, Gap, Instance, Layer, Solution, Way, paper};
use papers::table::Table;
use serde::Deserialize;
use serde_json::json;
use std::fmt::Write;

/// More layers than this are a mistake, and would take minutes: the time grows with the square.
const MOST_LAYERS: usize = 1 << 12;

/// The largest percentage that is a figure for people.
const MOST_PERCENT: f64 = 1e9;

/// An instance in its file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// The link's bandwidth in each direction.
    link_bytes_per_second: f64,
    /// The device's memory.
    memory_bytes: u64,
    /// In the order of the forward.
    layers: Vec<FileLayer>,
}

/// Some equal layers, one after another.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileLayer {
    weight_bytes: u64,
    activation_bytes: u64,
    forward_micros: f64,
    backward_micros: f64,
    #[serde(default = "one")]
    count: usize,
}

fn one() -> usize {
    1
}

/// Runs the command.
pub(crate) fn run(args: &OffloadArgs) -> Result<(), Failure> {
    match &args.command {
        OffloadCommand::Solve(args) => solve(args),
        OffloadCommand::Table1(args) => print(paper::table_1(args.blocks), args.json),
        OffloadCommand::Figure4(args) => print(paper::table_of_figure_4(), args.json),
    }
}

/// Prints a table as Markdown, or as an array of objects. Numbers stay numbers.
fn print(table: Result<Table, Error>, json: bool) -> Result<(), Failure> {
    let table = table.map_err(|error| Failure::Bug(error.to_string()))?;
    if !json {
        out::text(&table.markdown());
        return Ok(());
    }
    let cell = |text: &String| match text.parse::<f64>() {
        Ok(number) => json!(number),
        Err(_) if text == "-" => serde_json::Value::Null,
        Err(_) => json!(text),
    };
    let object = |row: &Vec<String>| -> serde_json::Value {
        let cells = table.head.iter().cloned().zip(row.iter().map(cell));
        serde_json::Value::Object(cells.collect())
    };
    let rows: Vec<_> = table.rows.iter().map(object).collect();
    out::line(&json!(rows).to_string());
    Ok(())
}

fn solve(args: &OffloadSolveArgs) -> Result<(), Failure> {
    let instance = read(args)?;
    let path = args.instance.display();
    let failure = |error: Error| match &error {
        Error::Invalid(_) => Failure::Input(format!("{path}: {error}")),
        Error::TooSmall { needed_bytes, .. } => Failure::NoSchedule(
            format!("{error}\n  the smallest that fits: --memory {needed_bytes}"),
            Some(shortage(instance.memory_bytes, Some(*needed_bytes))),
        ),
        Error::Stuck(_) => Failure::NoSchedule(
            error.to_string(),
            Some(shortage(instance.memory_bytes, None)),
        ),
    };
    let algorithm = match args.algorithm {
        OffloadAlgorithm::Solve(algorithm) => algorithm,
        OffloadAlgorithm::Bound => {
            let bound = offload::bound(&instance).map_err(failure)?;
            let compute = instance.compute_micros();
            match args.json {
                true => out::line(
                    &json!({"compute_micros": compute, "bound_micros": bound}).to_string(),
                ),
                false => out::line(&format!(
                    "no step is shorter than {}: {} of operations",
                    micros(bound),
                    micros(compute)
                )),
            }
            return Ok(());
        }
    };
    let solution = offload::solve(&instance, algorithm).map_err(failure)?;
    // An independent check: it shares no code with the algorithms.
    let peak = validate(&instance, &solution.schedule)
        .map_err(|error| Failure::Bug(format!("a wrong schedule: {error}")))?;
    match args.json {
        true => out::line(&to_json(&instance, &solution, peak).to_string()),
        false => out::text(&report(&instance, &solution, peak)),
    }
    Ok(())
}

/// The object that says that no schedule fits. `smallest`: what would fit, if that is known.
fn shortage(memory: u64, smallest: Option<u64>) -> serde_json::Value {
    json!({
        "error": "does not fit",
        "pool": "device",
        "budget_bytes": memory,
        "smallest_feasible_bytes": smallest,
    })
}

/// The instance that the options specify.
fn read(args: &OffloadSolveArgs) -> Result<Instance, Failure> {
    let path = args.instance.display();
    let file: File = serde_json::from_str(&read_text(&args.instance)?)
        .map_err(|error| Failure::Input(format!("{path}: not an offloading problem: {error}")))?;
    let n_layers = file
        .layers
        .iter()
        .fold(0usize, |sum, layer| sum.saturating_add(layer.count));
    if MOST_LAYERS < n_layers {
        return Err(Failure::Input(format!(
            "{path}: {n_layers} layers are more than {MOST_LAYERS}"
        )));
    }
    let layers = file.layers.iter().flat_map(|layer| {
        let &FileLayer {
            weight_bytes,
            activation_bytes,
            forward_micros,
            backward_micros,
            count,
        } = layer;
        std::iter::repeat_n(
            Layer {
                weight_bytes,
                activation_bytes,
                forward_micros,
                backward_micros,
            },
            count,
        )
    });
    Ok(Instance {
        layers: layers.collect(),
        bytes_per_micro: file.link_bytes_per_second / 1e6,
        memory_bytes: args.memory.unwrap_or(file.memory_bytes),
    })
}

/// By how many percent `a` exceeds `b`; 0 if both are 0.
fn percent(a: f64, b: f64) -> f64 {
    if a <= b { 0.0 } else { 100.0 * (a / b - 1.0) }
}

/// `12.34% over`. Of operations that take no time, a percentage would be infinite.
fn over(a: f64, b: f64) -> String {
    match percent(a, b) {
        percent if percent <= MOST_PERCENT => format!("{percent:.2}% over"),
        _ => "far over".into(),
    }
}

fn gap_name(gap: Gap) -> &'static str {
    match gap {
        Gap::BackwardToForward => "backward to forward",
        Gap::ForwardToBackward => "forward to backward",
    }
}

fn to_json(instance: &Instance, solution: &Solution, peak: u64) -> serde_json::Value {
    let schedule = &solution.schedule;
    let layers = solution
        .away_bytes()
        .into_iter()
        .zip(&instance.layers)
        .map(|(away, layer)| {
            json!({
                "weight_bytes": layer.weight_bytes,
                "away_backward_to_forward_bytes": away[Gap::BackwardToForward as usize],
                "away_forward_to_backward_bytes": away[Gap::ForwardToBackward as usize],
            })
        });
    let n_layers = instance.layers.len();
    let operations = schedule
        .starts
        .iter()
        .enumerate()
        .map(|(j, start)| match j < n_layers {
            true => json!({"layer": n_layers - 1 - j, "op": "backward", "start_micros": start}),
            false => json!({"layer": j - n_layers, "op": "forward", "start_micros": start}),
        });
    let transfers = schedule.transfers.iter().map(|transfer| {
        json!({
            "layer": transfer.layer,
            "way": match transfer.way { Way::ToDevice => "to device", Way::ToHost => "to host" },
            "bytes": [transfer.bytes.start, transfer.bytes.end],
            "start_micros": transfer.start,
            "end_micros": transfer.end,
        })
    });
    let absences = schedule.absences.iter().map(|absence| {
        json!({
            "layer": absence.layer,
            "gap": gap_name(absence.gap),
            "bytes": [absence.bytes.start, absence.bytes.end],
            "from_micros": absence.from,
            "until_micros": absence.until,
        })
    });
    json!({
        "algorithm": solution.algorithm.name(),
        "step_micros": schedule.period,
        "compute_micros": solution.compute_micros,
        "overhead_percent": percent(schedule.period, solution.compute_micros),
        "bound_micros": solution.bound_micros,
        "gap_percent": percent(schedule.period, solution.bound_micros),
        "memory_bytes": instance.memory_bytes,
        "peak_bytes": peak,
        "floor_bytes": instance.floor_bytes(),
        "keep_bytes": instance.keep_bytes(),
        "to_host_bytes": solution.moved_bytes(Way::ToHost),
        "to_device_bytes": solution.moved_bytes(Way::ToDevice),
        "layers": layers.collect::<Vec<_>>(),
        "operations": operations.collect::<Vec<_>>(),
        "transfers": transfers.collect::<Vec<_>>(),
        "absences": absences.collect::<Vec<_>>(),
    })
}

/// The report for people.
fn report(instance: &Instance, solution: &Solution, peak: u64) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write_report(&mut out, instance, solution, peak);
    out
}

fn write_report(
    out: &mut String,
    instance: &Instance,
    solution: &Solution,
    peak: u64,
) -> std::fmt::Result {
    let (step, compute, bound) = (
        solution.schedule.period,
        solution.compute_micros,
        solution.bound_micros,
    );
    writeln!(
        out,
        "{} layers, {}: checked\n",
        instance.layers.len(),
        solution.algorithm.name()
    )?;
    writeln!(
        out,
        "  step         {:>10}  {} its operations, {}",
        micros(step),
        over(step, compute),
        micros(compute)
    )?;
    writeln!(
        out,
        "  lower bound  {:>10}  the step is {} it",
        micros(bound),
        over(step, bound)
    )?;
    write_bytes(out, instance, solution, peak)?;
    let away = solution.away_bytes();
    if away.iter().flatten().all(|&bytes| bytes == 0) {
        return Ok(());
    }
    write_away(out, instance, &away)
}

/// Writes the bytes that the schedule needs, and the bytes that it moves.
fn write_bytes(
    out: &mut String,
    instance: &Instance,
    solution: &Solution,
    peak: u64,
) -> std::fmt::Result {
    writeln!(
        out,
        "  memory       {:>10}  at most, of {}",
        short(peak),
        bytes(instance.memory_bytes)
    )?;
    let (floor, keep) = (instance.floor_bytes(), instance.keep_bytes());
    writeln!(
        out,
        "               {:>10}  the least for any schedule; {} and nothing moves",
        short(floor),
        short(keep)
    )?;
    for (name, way) in [("to the host", Way::ToHost), ("and back", Way::ToDevice)] {
        let transfers = solution.schedule.transfers.iter();
        writeln!(
            out,
            "  {name:<11}  {:>10}  a step, in {} transfers",
            short(solution.moved_bytes(way)),
            transfers.filter(|transfer| transfer.way == way).count()
        )?;
    }
    Ok(())
}

/// Writes how much of each layer's weights is on the host in each gap. Consecutive layers with
/// equal results share one line.
fn write_away(out: &mut String, instance: &Instance, away: &[[u64; 2]]) -> std::fmt::Result {
    writeln!(
        out,
        "\n  away                   backward to forward   forward to backward"
    )?;
    let share = |layer: usize, gap: Gap| match (
        away[layer][gap as usize],
        instance.layers[layer].weight_bytes,
    ) {
        (0, _) => "-".to_string(),
        (bytes, whole) if bytes == whole => "all".to_string(),
        (bytes, whole) => format!(
            "{:.0}%",
            (100.0 * bytes as f64 / whole as f64).clamp(1.0, 99.0)
        ),
    };
    let fate = |layer: usize| {
        (
            share(layer, Gap::BackwardToForward),
            share(layer, Gap::ForwardToBackward),
        )
    };
    let mut first = 0;
    while first < away.len() {
        let end = (first..away.len())
            .find(|&layer| fate(layer) != fate(first))
            .unwrap_or(away.len());
        let name = match end - first {
            1 => format!("layer {first}"),
            _ => format!("layers {first} to {}", end - 1),
        };
        let (late, early) = fate(first);
        writeln!(out, "    {name:<19}  {late:>19}   {early:>19}")?;
        first = end;
    }
    Ok(())
}
