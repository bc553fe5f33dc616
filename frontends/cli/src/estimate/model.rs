//! `lighterage estimate MODEL`: the bytes of a model's step if everything is kept, from its graph.
//! They are those of the plan.

use super::{count, gigabytes, verdict};
use crate::args::{Compiling, EstimateArgs};
use crate::failure::Failure;
use crate::model;
use crate::observe::Dumps;
use crate::out;
use ir::{Device, Graph, StateKind};
use papers::estimate::{self as formula, peak};
use passes::decide::Planner;
use passes::explain;
use passes::graph::optimizer::Optimizer;

use passes::graph::precision::Precision;
use passes::schedule::order::Update;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// The device whose kernels decide which scratch memory they need. Its own size does not count.
const MACHINE: &str = "h100";

/// The bytes of a step.
struct Step {
    name: String,
    parameters: u64,
    peak: u64,
    /// Bytes at the peak, by kind of tensor.
    kinds: BTreeMap<explain::Class, u64>,
}

/// Runs the command for a model's file.
pub(super) fn run(args: &EstimateArgs, path: &Path, machines: &[Device]) -> Result<(), Failure> {
    let compiling = compiling(args)?;
    let model = model::read(path, &args.reading, &args.forward)?;
    let step = Step::new(&model.graph, &compiling)?;
    if args.json {
        out::line(&step.object(args, machines).to_string());
        return Ok(());
    }
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = step.write(&mut text, args, machines);
    out::text(&text);
    Ok(())
}

/// The options of the plan. An error if a formula has no plan.
fn compiling(args: &EstimateArgs) -> Result<Compiling, Failure> {
    let no_plan = |option: &str, value: &str, instead: &str| {
        Err(Failure::Input(format!(
            "{option} {value}: only the formulas know it; for a model's file, {instead}"
        )))
    };
    let optimizer = match args.optimizer {
        formula::Optimizer::AdamW => Optimizer::AdamW,
        formula::Optimizer::Sgd => Optimizer::Sgd,
        formula::Optimizer::Momentum => Optimizer::SgdMomentum,
        formula::Optimizer::Adafactor => Optimizer::Adafactor,
        formula::Optimizer::AdafactorPaper => Optimizer::AdafactorPaper,
        formula::Optimizer::AdafactorPaperMomentum => Optimizer::AdafactorPaperMomentum,
        other => return no_plan("--optimizer", other.name(), "`fit --optimizer` has more"),
    };
    let precision = match args.precision {
        formula::Precision::F32 => Precision::F32,
        formula::Precision::Mixed => Precision::Bf16,
        formula::Precision::Bf16 => {
            return no_plan("--precision", "bf16", "take mixed or f32");
        }
    };
    if args.recompute != formula::Recompute::None {
        let name = args.recompute.name();
        return no_plan("--recompute", name, "`plan --budget` chooses");
    }
    Ok(Compiling {
        optimizer: Some(optimizer),
        precision: Some(precision),
        update: args.update.map(|update| match update {
            peak::Update::Backward => Update::Backward,
            peak::Update::After => Update::After,
        }),
        planner: Some(Planner::Keep),
        forward: args.forward.clone(),
        ..Compiling::default()
    })
}

impl Step {
    fn new(graph: &Graph, compiling: &Compiling) -> Result<Step, Failure> {
        let mut device = model::device(MACHINE)?;
        device.device_bytes = u64::MAX / 4;
        let machine = model::machine_on(compiling, Some(device))?;
        let compiled = model::compile(graph, compiling, &machine, Dumps::Stderr)?;
        let mut kinds = BTreeMap::new();
        let tensors = explain::peak(&compiled).tensors;
        for tensor in &tensors {
            *kinds.entry(tensor.class).or_default() += tensor.bytes;
        }
        let states = graph.states.values();
        Ok(Step {
            name: graph.name.clone(),
            parameters: states
                .filter(|state| state.kind == StateKind::Param)
                .map(|state| graph.values[state.before].ty.numel())
                .sum(),
            peak: compiled.planned_peak,
            kinds,
        })
    }

    fn object(&self, args: &EstimateArgs, machines: &[Device]) -> serde_json::Value {
        let kinds = self.kinds.iter();
        let terms: Vec<_> = kinds
            .map(|(kind, bytes)| json!({"name": kind.name(), "bytes": bytes}))
            .collect();
        let devices = machines.iter().map(|device| {
            json!({
                "device": device.name,
                "device_bytes": device.device_bytes,
                "fits": self.peak <= device.device_bytes,
            })
        });
        json!({
            "model": self.name,
            "parameters": self.parameters,
            "optimizer": args.optimizer.name(),
            "precision": args.precision.name(),
            "peak": {"bytes": self.peak, "terms": terms},
            "devices": devices.collect::<Vec<_>>(),
        })
    }

    fn write(
        &self,
        out: &mut String,
        args: &EstimateArgs,
        machines: &[Device],
    ) -> std::fmt::Result {
        writeln!(
            out,
            "{}: {} parameters, {}, {} precision: bytes at the peak of a step that keeps \
             everything\n",
            self.name,
            count(self.parameters),
            args.optimizer.name(),
            args.precision.name()
        )?;
        let named: u64 = self.kinds.values().sum();
        let rest = ("gaps", self.peak.saturating_sub(named));
        let kinds = self.kinds.iter().map(|(kind, &bytes)| (kind.name(), bytes));
        let rows = kinds
            .chain([rest, ("peak", self.peak)])
            .filter(|&(_, bytes)| bytes > 0);
        for (name, bytes) in rows {
            let share = 100.0 * bytes as f64 / self.peak.max(1) as f64;
            writeln!(out, "  {name:<18} {:>12}  {share:5.1}%", gigabytes(bytes))?;
        }
        writeln!(out, "\n  {:<18} {:>12}", "device", "memory")?;
        for device in machines {
            let (name, bytes) = (&device.name, device.device_bytes);
            let says = verdict(bytes, self.peak);
            writeln!(out, "  {name:<18} {:>12}  {says}", gigabytes(bytes))?;
        }
        writeln!(
            out,
            "\n`lighterage fit` plans a step for devices with less memory"
        )
    }
}
