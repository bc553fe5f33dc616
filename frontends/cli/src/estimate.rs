//! `lighterage estimate`: the memory that training needs on each device, by formula or from a
//! model's graph, and the devices with enough memory.

mod model;

use crate::args::EstimateArgs;
use crate::failure::Failure;
use crate::model::device;
use crate::out;
use ir::Device;
use papers::estimate::peak::{self, Peak, Term};
use papers::estimate::{self, Adapters, Estimate, Parallel, Setup, Shape};
use passes::devices;
use serde_json::json;
use std::fmt::Write;

/// Runs the command.
pub(crate) fn run(args: &EstimateArgs) -> Result<(), Failure> {
    let machines = machines(args)?;
    if let Some(path) = &args.model {
        return model::run(args, path, &machines);
    }
    let setup = setup(args).map_err(Failure::Input)?;
    let estimate = estimate::estimate(&setup).map_err(|e| Failure::Input(e.to_string()))?;
    let peak = args
        .update
        .map(|update| peak::peak(&setup, update))
        .transpose()
        .map_err(|e| Failure::Input(format!("--update: {e}")))?;
    if args.json {
        out::line(&object(&setup, &estimate, peak.as_ref(), &machines).to_string());
        return Ok(());
    }
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = report(&mut text, &setup, &estimate, peak.as_ref(), &machines);
    out::text(&text);
    Ok(())
}

/// The machines to compare with.
fn machines(args: &EstimateArgs) -> Result<Vec<Device>, Failure> {
    let names: Vec<&str> = match args.device.is_empty() {
        // `test` has round numbers and is not a real machine.
        true => devices::names()
            .into_iter()
            .filter(|&name| name != "test")
            .collect(),
        false => args.device.iter().map(String::as_str).collect(),
    };
    names.into_iter().map(device).collect()
}

fn setup(args: &EstimateArgs) -> Result<Setup, String> {
    let shape = match (args.layers, args.width, args.heads, args.seq) {
        (None, None, None, None) => None,
        (Some(layers), Some(width), Some(heads), Some(sequence)) => Some(Shape {
            layers,
            width,
            heads,
            sequence,
            batch: args.batch,
            vocabulary: args.vocab,
        }),
        _ => return Err("a shape is --layers, --width, --heads and --seq together".into()),
    };
    let parameters = match (args.params, shape) {
        (Some(parameters), _) => parameters,
        (None, Some(shape)) => shape.parameters().map_err(|e| e.to_string())?,
        (None, None) => {
            return Err("--params COUNT says how large the model is; or give its shape".into());
        }
    };
    let adapters = |percent: f64, four_bit| Adapters {
        share: percent / 100.0,
        four_bit,
    };
    Ok(Setup {
        parameters,
        shape,
        optimizer: args.optimizer,
        precision: args.precision,
        recompute: args.recompute,
        attention: args.attention,
        dropout: !args.no_dropout,
        foreach: args.foreach,
        adapters: args
            .lora
            .map(|p| adapters(p, false))
            .or(args.qlora.map(|p| adapters(p, true))),
        parallel: Parallel {
            tensor: args.tensor_parallel,
            pipeline: args.pipeline,
            data: args.data_parallel,
            zero: args.zero,
            micro_batches: args.micro_batches.unwrap_or(args.pipeline),
        },
    })
}

fn object(
    setup: &Setup,
    estimate: &Estimate,
    peak: Option<&Peak>,
    machines: &[Device],
) -> serde_json::Value {
    let of_peak = peak.map(|peak| {
        let terms = peak.terms.iter();
        let terms: Vec<_> = terms
            .map(|term| json!({"name": term.name, "bytes": term.bytes}))
            .collect();
        json!({"moment": peak.moment, "bytes": peak.bytes, "terms": terms})
    });
    let layer = estimate.layer.iter();
    let layer: Vec<_> = layer
        .map(|saved| {
            json!({"name": saved.name, "shape": saved.shape, "bytes": saved.bytes,
            "kept": saved.kept})
        })
        .collect();
    let fit = machines.iter().map(|device| {
        json!({
            "device": device.name,
            "device_bytes": device.device_bytes,
            "fits": fits(estimate, peak, device.device_bytes),
        })
    });
    json!({
        "parameters": setup.parameters,
        "optimizer": setup.optimizer.name(),
        "precision": setup.precision.name(),
        "recompute": setup.recompute.name(),
        "gpus": setup.parallel.devices(),
        "zero": setup.parallel.zero,
        "bubble": setup.parallel.bubble(),
        "parameter_bytes": estimate.parameters,
        "gradient_bytes": estimate.gradients,
        "optimizer_bytes": estimate.optimizer,
        "temporary_bytes": estimate.temporaries,
        "activation_bytes": estimate.activations,
        "peak": of_peak,
        "total_bytes": estimate.total(),
        "checkpoint_bytes": estimate.checkpoint,
        "layer": layer,
        "stage_layers": estimate.stage_layers,
        "micro_batches_in_flight": estimate.in_flight,
        "devices": fit.collect::<Vec<_>>(),
    })
}

/// Whether an estimate fits; `None` if only its states do and its activations are not known.
fn fits(estimate: &Estimate, peak: Option<&Peak>, device_bytes: u64) -> Option<bool> {
    let holds = needs(estimate, peak) <= device_bytes;
    (estimate.activations.is_some() || !holds).then_some(holds)
}

/// The bytes to compare with a device: the peak where it is known.
fn needs(estimate: &Estimate, peak: Option<&Peak>) -> u64 {
    peak.map_or(estimate.total(), |peak| peak.bytes)
}

/// `13.1 GB`, `4.2 MB`, in powers of 1000 as in papers.
fn gigabytes(bytes: u64) -> String {
    if bytes >= 1_000_000_000 || bytes == 0 {
        format!("{:.1} GB", bytes as f64 / 1e9)
    } else {
        format!("{:.1} MB", bytes as f64 / 1e6)
    }
}

/// `7B`, `124.44M`.
fn count(parameters: u64) -> String {
    let (amount, unit) = if parameters < 1_000_000_000 {
        (1e6, "M")
    } else {
        (1e9, "B")
    };
    let digits = format!("{:.2}", parameters as f64 / amount);
    format!(
        "{}{unit}",
        digits.trim_end_matches('0').trim_end_matches('.')
    )
}

fn report(
    out: &mut String,
    setup: &Setup,
    estimate: &Estimate,
    peak: Option<&Peak>,
    machines: &[Device],
) -> std::fmt::Result {
    let Setup {
        parameters,
        optimizer,
        precision,
        recompute,
        parallel,
        ..
    } = setup;
    let devices = match parallel.devices() {
        1 => "one device".to_string(),
        n => format!("each of {n} devices"),
    };
    writeln!(
        out,
        "{} parameters, {}, {} precision, recompute {}: bytes on {devices}\n",
        count(*parameters),
        optimizer.name(),
        precision.name(),
        recompute.name()
    )?;
    write_total(out, estimate)?;
    if 1 < parallel.pipeline {
        let layers = match estimate.activations {
            Some(_) => format!("{} layers a stage, ", estimate.stage_layers),
            None => String::new(),
        };
        writeln!(
            out,
            "\npipeline: {layers}activations of {} micro-batches, {:.1}% of the time in the \
             bubble",
            estimate.in_flight,
            100.0 * parallel.bubble()
        )?;
    }
    write_layer(out, estimate)?;
    if let Some(peak) = peak {
        write_peak(out, peak)?;
    }
    writeln!(
        out,
        "\na checkpoint on disk has {}\n",
        gigabytes(estimate.checkpoint)
    )?;
    write_machines(out, estimate, peak, machines)
}

/// Writes the peak of a step by its terms.
fn write_peak(out: &mut String, peak: &Peak) -> std::fmt::Result {
    writeln!(out, "\npeak of a step, when {}", peak.moment)?;
    let sum = Term {
        name: "peak",
        bytes: peak.bytes,
    };
    for Term { name, bytes } in peak.terms.iter().chain([&sum]) {
        writeln!(out, "  {name:<36} {:>12}", gigabytes(*bytes))?;
    }
    Ok(())
}

/// Writes the bytes by purpose.
fn write_total(out: &mut String, estimate: &Estimate) -> std::fmt::Result {
    let total = estimate.total();
    let mut row = |name: &str, bytes: u64| {
        let share = 100.0 * bytes as f64 / total.max(1) as f64;
        writeln!(out, "  {name:<18} {:>12}  {share:5.1}%", gigabytes(bytes))
    };
    row("parameters", estimate.parameters)?;
    row("gradients", estimate.gradients)?;
    row("optimizer", estimate.optimizer)?;
    if let Some(bytes) = estimate.activations {
        row("activations", bytes)?;
    }
    if estimate.temporaries > 0 {
        row("foreach's tensors", estimate.temporaries)?;
    }
    row("total", total)?;
    if estimate.activations.is_none() {
        writeln!(
            out,
            "\nwithout activations: --layers, --width, --heads and --seq tell their sizes"
        )?;
    }
    Ok(())
}

/// Writes the activations that a layer saves for its backward.
fn write_layer(out: &mut String, estimate: &Estimate) -> std::fmt::Result {
    if estimate.layer.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nsaved by a layer for a micro-batch")?;
    for saved in &estimate.layer {
        let again = if saved.kept { "" } else { "  computed again" };
        writeln!(
            out,
            "  {:<31} {:<15} {:>10.3} GB{again}",
            saved.name,
            saved.shape,
            saved.bytes as f64 / 1e9
        )?;
    }
    Ok(())
}

/// Writes which machines have enough bytes.
fn write_machines(
    out: &mut String,
    estimate: &Estimate,
    peak: Option<&Peak>,
    machines: &[Device],
) -> std::fmt::Result {
    let total = needs(estimate, peak);
    writeln!(out, "  {:<18} {:>12}", "device", "memory")?;
    for device in machines {
        let says = match device.device_bytes.checked_sub(total) {
            Some(rest) if estimate.activations.is_none() => {
                format!("{} left for activations", gigabytes(rest))
            }
            _ => verdict(device.device_bytes, total),
        };
        writeln!(
            out,
            "  {:<18} {:>12}  {says}",
            device.name,
            gigabytes(device.device_bytes)
        )?;
    }
    Ok(())
}

/// Whether `needed` bytes fit in a device.
fn verdict(device_bytes: u64, needed: u64) -> String {
    match device_bytes.checked_sub(needed) {
        Some(rest) => format!("fits, {} to spare", gigabytes(rest)),
        None => format!(
            "does not fit, {} too much",
            gigabytes(needed - device_bytes)
        ),
    }
}
