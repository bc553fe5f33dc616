//! `lighterage fit`: on which machines a model's step fits, by which means, and how fast it would
//! be.

use crate::args::{Compiling, FitArgs, MicroBatches};
use crate::failure::Failure;
use crate::model;
use crate::observe::Dumps;
use crate::out::{self, out};
use crate::size::{micros, short};
use ir::Graph;
use passes::graph::optimizer::Optimizer;
use passes::pipeline::Compiled;
use serde_json::{Value as Json, json};

/// Runs the command.
pub(crate) fn run(args: &FitArgs) -> Result<(), Failure> {
    let model = model::read(&args.model.model, &args.model.reading, &args.forward)?;
    let names = match args.device.is_empty() {
        true => gpu::known().into_iter().map(|device| device.name).collect(),
        false => args.device.clone(),
    };
    let mut rows = vec![];
    for name in names {
        let spinner = out::spinner(format!("planning for {name}"));
        let row = Row::new(&model.graph, args, name)?;
        drop(spinner);
        rows.push(row);
    }
    // Machines on which the step fits come first, the fastest at the top.
    rows.sort_by(|a, b| a.key().total_cmp(&b.key()));
    if args.json {
        let rows: Vec<Json> = rows.iter().map(Row::json).collect();
        out!("{}", json!({"model": model.graph.name, "devices": rows}));
        return Ok(());
    }
    out!(
        "{:<14} {:>10}  {:>10}  {:>12}  by",
        "device",
        "memory",
        "peak",
        "step"
    );
    rows.iter().for_each(|row| out!("{}", row.text()));
    Ok(())
}

/// A machine.
struct Row {
    device: String,
    memory: u64,
    outcome: Outcome,
}

enum Outcome {
    Fits(Box<Fit>),
    /// It would need so many bytes of a pool, the device's or the host's.
    Needs(u64, String),
}

struct Fit {
    peak: u64,
    micros: f64,
    recomputed: f64,
    moved: u64,
}

impl Row {
    fn new(graph: &Graph, args: &FitArgs, device: String) -> Result<Row, Failure> {
        let compiling = Compiling {
            optimizer: Some(args.optimizer.unwrap_or(Optimizer::AdamW)),
            precision: args.precision,
            master: args.master,
            micro_batches: args.micro_batches.map(MicroBatches::Of),
            host: args.host,
            device: Some(device.clone()),
            forward: args.forward.clone(),
            ..Compiling::default()
        };
        let machine = model::machine(&compiling)?;
        let outcome = match model::compile(graph, &compiling, &machine, Dumps::Stderr) {
            Ok(compiled) => Outcome::Fits(Box::new(Fit::of(&compiled))),
            Err(Failure::NoFit(infeasible)) => Outcome::Needs(infeasible.smallest, infeasible.pool),
            Err(Failure::HostTooSmall(small)) => Outcome::Needs(small.enough, small.pool),
            Err(other) => return Err(other),
        };
        Ok(Row {
            device,
            memory: machine.device.device_bytes,
            outcome,
        })
    }

    fn key(&self) -> f64 {
        match &self.outcome {
            Outcome::Fits(fit) => fit.micros,
            Outcome::Needs(..) => f64::INFINITY,
        }
    }

    fn text(&self) -> String {
        let (peak, step, by) = match &self.outcome {
            Outcome::Fits(fit) => (short(fit.peak), micros(fit.micros), fit.means()),
            Outcome::Needs(bytes, pool) => {
                let by = format!("nothing: it needs {} of {pool} memory", short(*bytes));
                ("-".into(), "-".into(), by)
            }
        };
        let memory = short(self.memory);
        format!(
            "{:<14} {memory:>10}  {peak:>10}  {step:>12}  {by}",
            self.device
        )
    }

    fn json(&self) -> Json {
        let mut row = json!({"device": self.device, "memory_bytes": self.memory});
        match &self.outcome {
            Outcome::Fits(fit) => {
                row["fits"] = true.into();
                row["planned_peak_bytes"] = fit.peak.into();
                row["predicted_ms"] = (fit.micros / 1e3).into();
                row["swapped_bytes"] = fit.moved.into();
                row["recomputed_ms"] = (fit.recomputed / 1e3).into();
            }
            Outcome::Needs(bytes, pool) => {
                row["fits"] = false.into();
                row["pool"] = pool.clone().into();
                row["smallest_feasible_bytes"] = (*bytes).into();
            }
        }
        row
    }
}

impl Fit {
    fn of(compiled: &Compiled) -> Fit {
        let timeline = &compiled.timeline;
        Fit {
            peak: compiled.planned_peak,
            micros: timeline.micros,
            recomputed: timeline.recomputed,
            moved: timeline.swapped_bytes,
        }
    }

    fn means(&self) -> String {
        let mut means = vec![];
        if 0 < self.moved {
            means.push(format!("{} moved", short(self.moved)));
        }
        if 0.0 < self.recomputed {
            means.push(format!("{} recomputed", micros(self.recomputed)));
        }
        match means.is_empty() {
            true => "keeping everything".into(),
            false => format!("{} a step", means.join(", ")),
        }
    }
}
