//! `lighterage inspect`: describes a compiled step without running it.

use crate::args::InspectArgs;
use crate::data::{file_size, type_name};
use crate::failure::Failure;
use crate::out;
use crate::size;
use crate::trust;
use artifact::{Artifact, Attr, Initial, Operand, Signed, Sm, StateKind, Target};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// The largest number of listed tensors of one kind.
const NAMED: usize = 8;

/// Runs the command.
pub(crate) fn run(args: &InspectArgs) -> Result<(), Failure> {
    let (artifact, signed) = trust::read(&args.file)?;
    let inspected = Inspected {
        checked: runtime::validate(&artifact).map_err(|e| e.to_string()),
        kernels: Kernels::of(&artifact),
        artifact: &artifact,
        signed,
    };
    if args.json {
        out::line(&inspected.json(args).to_string());
    } else {
        out::text(&inspected.text(args));
    }
    Ok(())
}

/// How often the kernels of an artifact are launched.
struct Kernels {
    /// Launches of the runtime's own kernels, by op.
    own: BTreeMap<String, u64>,
    /// Launches of machine code, by op.
    code: BTreeMap<String, u64>,
    /// The processors of the machine code.
    processors: BTreeSet<String>,
}

impl Kernels {
    fn of(artifact: &Artifact) -> Kernels {
        let mut kernels = Kernels {
            own: BTreeMap::new(),
            code: BTreeMap::new(),
            processors: artifact
                .objects
                .iter()
                .map(|object| object.target.to_string())
                .collect(),
        };
        for command in &artifact.commands {
            let artifact::CommandKind::Launch { kernel, .. } = command.kind else {
                continue;
            };
            let Some(kernel) = artifact.kernels.get(kernel as usize) else {
                continue;
            };
            let by_op = if kernel.code.is_some() {
                &mut kernels.code
            } else {
                &mut kernels.own
            };
            // The attribute `name` has the name of an unknown op.
            let name = kernel.attrs.iter().find_map(|(key, attr)| match attr {
                Attr::Str(name) if key == "name" => Some(format!("{} {name}", kernel.op)),
                _ => None,
            });
            *by_op.entry(name.unwrap_or(kernel.op.clone())).or_default() += 1;
        }
        kernels
    }
}

struct Inspected<'a> {
    artifact: &'a Artifact,
    signed: Signed,
    kernels: Kernels,
    /// Why it cannot be run here; `Ok` if it can.
    checked: Result<(), String>,
}

impl Inspected<'_> {
    fn json(&self, args: &InspectArgs) -> serde_json::Value {
        let artifact = self.artifact;
        let tensor = |name: &str, operand: &Operand| {
            json!({
                "name": name,
                "type": operand_type(operand),
                "bytes": operand.bytes(),
                "pool": operand.place.pool,
            })
        };
        let bindings = |bindings: &[artifact::Binding]| -> Vec<_> {
            bindings
                .iter()
                .map(|binding| tensor(&binding.name, &binding.operand))
                .collect()
        };
        let states: Vec<_> = artifact
            .states
            .iter()
            .map(|state| {
                let mut json = tensor(&state.path, &state.operand);
                json["kind"] = kind_name(state.kind).into();
                json["initial"] = match state.initial {
                    Initial::Zeros => "zeros",
                    Initial::Data { .. } => "data",
                    Initial::Absent => "absent",
                }
                .into();
                json
            })
            .collect();
        json!({
            "path": args.file,
            "format": artifact::FORMAT_VERSION,
            "name": artifact.name,
            "device": artifact.device,
            "machine_code": trust::has_code(artifact),
            "tf32": artifact.tf32,
            "processors": self.kernels.processors,
            "signed": match self.signed {
                Signed::Yes => "here",
                Signed::Otherwise => "elsewhere",
                Signed::No => "no",
            },
            "runs": self.checked.is_ok(),
            "why_not": self.checked.as_ref().err(),
            "summary": artifact.summary,
            "pools": artifact.pools,
            "streams": artifact.streams,
            "events": artifact.events,
            "commands": artifact.commands.len(),
            "launches": { "own": self.kernels.own, "machine_code": self.kernels.code },
            "inputs": bindings(&artifact.inputs),
            "outputs": bindings(&artifact.outputs),
            "states": states,
            "data_bytes": artifact.data.len(),
            "others": artifact
                .others
                .iter()
                .map(|other| json!({
                    "inputs": bindings(&other.inputs),
                    "commands": other.commands.len(),
                    "summary": other.summary,
                }))
                .collect::<Vec<_>>(),
        })
    }

    fn text(&self, args: &InspectArgs) -> String {
        let artifact = self.artifact;
        let summary = &artifact.summary;
        let mut text = String::new();
        let mut row = |name: &str, value: String| {
            let _ = writeln!(text, "{name:<14}{value}");
        };
        row(
            "file",
            format!(
                "{}, {}, format {}",
                args.file.display(),
                file_size(&args.file),
                artifact::FORMAT_VERSION
            ),
        );
        row(
            "step",
            format!("{}, planned for {}", artifact.name, artifact.device),
        );
        row("machine code", self.code());
        if artifact.tf32 {
            row("f32 products", "factors may be rounded to TF32".into());
        }
        row(
            "runs here",
            match &self.checked {
                Ok(()) => match self.gpu() {
                    Some(sm) => format!("where there is a GPU of {sm} or later"),
                    None => "yes: every check of the runtime passes".into(),
                },
                Err(why) => format!("no: {why}"),
            },
        );
        let share = 100.0 * summary.planned_peak_bytes as f64 / summary.keep_peak_bytes as f64;
        row(
            "peak",
            if summary.keep_peak_bytes > 0 {
                let peak = size::bytes(summary.planned_peak_bytes);
                format!("{peak}, {share:.1}% of what keeping everything needs")
            } else {
                size::bytes(summary.planned_peak_bytes)
            },
        );
        for pool in &artifact.pools {
            row("pool", format!("{} {}", pool.name, size::bytes(pool.bytes)));
        }
        row("commands", self.commands());
        row("own kernels", launches(&self.kernels.own));
        for (name, bindings) in [("input", &artifact.inputs), ("output", &artifact.outputs)] {
            for binding in bindings.iter().take(NAMED) {
                let ty = operand_type(&binding.operand);
                row(name, format!("{} {ty}", binding.name));
            }
            if bindings.len() > NAMED {
                row("", format!("and {} more", bindings.len() - NAMED));
            }
        }
        for line in self.states() {
            row("states", line);
        }
        row("data", size::bytes(artifact.data.len() as u64));
        if let Some((name, options)) = &summary.optimizer {
            row("optimizer", format!("{name}: {}", listed(options)));
            for (i, group) in summary.groups.iter().enumerate() {
                row("group", format!("{}: {}", i + 1, listed(group)));
            }
        }
        if summary.micro_batches > 1 {
            row("micro-batches", summary.micro_batches.to_string());
        }
        for other in &artifact.others {
            let first = other.inputs.first().map_or(String::new(), |input| {
                format!("{} {}, ", input.name, operand_type(&input.operand))
            });
            let peak = size::bytes(other.summary.planned_peak_bytes);
            row(
                "smaller step",
                format!("{first}{} commands, peak {peak}", other.commands.len()),
            );
        }
        text
    }

    /// The GPU that the machine code needs, if any.
    fn gpu(&self) -> Option<Sm> {
        let objects = self.artifact.objects.iter();
        let mut gpus = objects.filter_map(|object| match object.target {
            Target::Gpu(sm) => Some(sm),
            Target::Cpu(_) => None,
        });
        gpus.next()
    }

    /// Whether there is machine code, and who signed it.
    fn code(&self) -> String {
        if !trust::has_code(self.artifact) {
            return "none: it runs the runtime's own kernels only".into();
        }
        let signed = match self.signed {
            Signed::Yes => "signed: you compiled it here",
            Signed::Otherwise => {
                "signed by another user or machine: `train` runs it only with --trust"
            }
            Signed::No => "not signed: `train` runs it only with --trust",
        };
        let processors: Vec<&str> = self.kernels.processors.iter().map(|p| &**p).collect();
        format!(
            "yes, for {}; {signed}\n{:<14}{}",
            processors.join(", "),
            "",
            launches(&self.kernels.code)
        )
    }

    fn commands(&self) -> String {
        let artifact = self.artifact;
        format!(
            "{} on {} streams ({}), {} events",
            artifact.commands.len(),
            artifact.streams.len(),
            artifact.streams.join(", "),
            artifact.events
        )
    }

    /// A line for each kind of state.
    fn states(&self) -> Vec<String> {
        let mut kinds: BTreeMap<&str, (u64, u64, u64)> = BTreeMap::new();
        for state in &self.artifact.states {
            let (count, bytes, absent) = kinds.entry(kind_name(state.kind)).or_default();
            *count += 1;
            *bytes = bytes.saturating_add(state.operand.bytes().unwrap_or(u64::MAX));
            *absent += u64::from(state.initial == Initial::Absent);
        }
        let line = |(kind, (count, bytes, absent)): (&str, (u64, u64, u64))| {
            let absent = if absent > 0 {
                format!("; {absent} without a value: `train` needs --init")
            } else {
                String::new()
            };
            format!("{count} of kind {kind}, {}{absent}", size::bytes(bytes))
        };
        kinds.into_iter().map(line).collect()
    }
}

/// `12 launches: add 3, mul 9`.
fn launches(by_op: &BTreeMap<String, u64>) -> String {
    if by_op.is_empty() {
        return "none".into();
    }
    let total: u64 = by_op.values().sum();
    let ops: Vec<String> = by_op.iter().map(|(op, n)| format!("{op} {n}")).collect();
    format!("{total} launches: {}", ops.join(", "))
}

fn operand_type(operand: &Operand) -> String {
    type_name(&format!("{:?}", operand.dtype), &operand.shape)
}

fn kind_name(kind: StateKind) -> &'static str {
    match kind {
        StateKind::Param => "parameter",
        StateKind::Buffer => "buffer",
        StateKind::Const => "constant",
        StateKind::Moment => "moment",
        StateKind::Rng => "random state",
    }
}

/// `lr 0.001, eps 1e-8`.
fn listed(options: &[(String, f64)]) -> String {
    let options = options.iter().map(|(key, value)| format!("{key} {value}"));
    options.collect::<Vec<_>>().join(", ")
}
