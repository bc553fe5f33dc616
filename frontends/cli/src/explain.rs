//! `lighterage explain`: why a tensor is where it is, and what the alternatives would cost.

use crate::args::ExplainArgs;
use crate::failure::Failure;
use crate::model;
use crate::observe::Dumps;
use crate::out::{self, out};
use crate::size::{bytes, micros, short};
use ir::Value;
use passes::decide::Problem;
use passes::explain::{self, Choice, Explanation, Named, Stay};
use serde_json::{Value as Json, json};

/// Members of a module that are listed.
const LISTED: usize = 60;

/// Runs the command.
pub(crate) fn run(args: &ExplainArgs) -> Result<(), Failure> {
    let model = model::read(&args.model.model, &args.model.dim)?;
    let machine = model::machine(&args.compiling)?;
    let compiled = model::compile(&model.graph, &args.compiling, &machine, Dumps::Stderr)?;
    let graph = &compiled.program.graph;
    let problem = Problem::new(graph, &machine.device, &*machine.cost);
    let planner = model::options(&args.compiling).planner.name();
    let asked = args.value.strip_prefix('%').unwrap_or(&args.value);
    // One parameter may have several paths; the graph has one of them.
    let tied = model
        .tied
        .iter()
        .find(|group| group.iter().any(|path| path == asked));
    let path = tied.and_then(|group| {
        group
            .iter()
            .find(|path| graph.states.iter().any(|state| state.path == **path))
    });
    let name = path.map_or(args.value.as_str(), String::as_str);
    let explain = |value: Value| explain::explain(&compiled, &problem, value, planner);
    let spinner = out::spinner(format!("simulating the alternatives for {name}"));
    let stop = || {
        if let Some(spinner) = &spinner {
            spinner.finish_and_clear();
        }
    };
    match explain::named(graph, &model.graph, name) {
        Named::Value(value) => {
            let explanation = explain(value);
            stop();
            show(args, None, &explanation);
        }
        Named::Removed(Some(value)) => {
            let explanation = explain(value);
            stop();
            let note = format!(
                "%{asked} is not in the compiled step: `canonical` put %{} in its place, which \
                 has the same elements",
                graph.values[value].name
            );
            show(args, Some(note), &explanation);
        }
        Named::Removed(None) => {
            stop();
            let note = format!(
                "%{asked} is not in the compiled step: no state, output or gradient needs it"
            );
            if args.json {
                out!("{}", json!({"asked": asked, "removed": true, "note": note}));
            } else {
                out!("{note}");
            }
        }
        Named::Module(values) => {
            stop();
            let rows: Vec<Row> = values
                .iter()
                .map(|&value| row(&compiled, &problem, value))
                .collect();
            list(args, asked, &rows);
        }
        Named::Unknown(near) => {
            stop();
            let near = match near.is_empty() {
                true => "`import` prints all names".to_string(),
                false => format!("near: {}", near.join(", ")),
            };
            return Err(Failure::Input(format!(
                "there is no value, state or module {asked}; {near}"
            )));
        }
    }
    Ok(())
}

fn show(args: &ExplainArgs, note: Option<String>, explanation: &Explanation) {
    if args.json {
        let mut object = to_json(explanation);
        if let (Some(note), Some(object)) = (note, object.as_object_mut()) {
            object.insert("note".into(), json!(note));
        }
        out!("{object}");
        return;
    }
    if let Some(note) = note {
        out!("{note}\n");
    }
    out::text(&explanation.print(&short, &micros));
}

/// A value of a module, in a line.
struct Row {
    name: String,
    bytes: u64,
    class: &'static str,
    what: String,
}

fn row(compiled: &passes::pipeline::Compiled, problem: &Problem<'_>, value: Value) -> Row {
    let data = &problem.graph.values[value];
    Row {
        name: data.name.clone(),
        bytes: data.ty.bytes(),
        class: explain::class(problem.graph, value).name(),
        what: explain::decided(&compiled.decided.decisions, problem, value),
    }
}

fn list(args: &ExplainArgs, module: &str, rows: &[Row]) {
    if args.json {
        let rows: Vec<Json> = rows
            .iter()
            .map(|r| json!({"name": r.name, "bytes": r.bytes, "class": r.class, "decided": r.what}))
            .collect();
        out!("{}", json!({"module": module, "values": rows}));
        return;
    }
    out!("{module}: {} values", rows.len());
    let mut sorted: Vec<&Row> = rows.iter().collect();
    sorted.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    let width = sorted
        .iter()
        .take(LISTED)
        .map(|r| r.name.chars().count())
        .max()
        .unwrap_or(0);
    for row in sorted.iter().take(LISTED) {
        out!(
            "  %{:<width$}  {:>10}  {:<10}  {}",
            row.name,
            short(row.bytes),
            row.class,
            row.what
        );
    }
    if LISTED < sorted.len() {
        let rest: u64 = sorted[LISTED..].iter().map(|r| r.bytes).sum();
        out!("  and {} more, {}", sorted.len() - LISTED, bytes(rest));
    }
    out!("\nname one of them for its figures");
}

fn to_json(e: &Explanation) -> Json {
    let instr = |instr: Option<ir::Instr>| instr.map(|instr| format!("{instr:?}"));
    let choice = |choice: &Choice| {
        let others: Vec<Json> = choice
            .others
            .iter()
            .map(|(way, outcome)| match outcome {
                Ok(o) => json!({
                    "way": way.name(),
                    "step_us": o.micros,
                    "adds_us": o.micros - e.micros,
                    "peak_bytes": o.peak,
                    "fits": o.fits,
                }),
                Err(why) => json!({"way": way.name(), "why_not": why}),
            })
            .collect();
        let reason = choice.reason.map(|r| {
            json!({"frees_bytes": r.bytes, "swap_us": r.swap, "recompute_us": r.recompute,
                "line": r.line})
        });
        json!({"decided": choice.way.name(), "reason": reason, "alternatives": others})
    };
    let stay = |s: &Stay| {
        json!({"buffer": s.buffer, "pool": s.pool, "address": s.address,
        "from": instr(s.from), "to": instr(s.to)})
    };
    let gaps: Vec<Json> = e
        .gaps
        .iter()
        .map(|gap| {
            let mut object = choice(&gap.choice);
            if let Some(object) = object.as_object_mut() {
                object.insert("after_access".into(), json!(gap.gap));
                object.insert("from".into(), json!(instr(gap.from)));
                object.insert("to".into(), json!(instr(gap.to)));
                object.insert("idle_us".into(), json!(gap.micros));
            }
            object
        })
        .collect();
    json!({
        "name": e.name,
        "type": e.ty.to_string(),
        "bytes": e.ty.bytes(),
        "class": e.class.name(),
        "module": e.module,
        "defined": e.defined,
        "shares_bytes_of": e.shares.get(1..).unwrap_or(&[]),
        "at_peak": e.at_peak,
        "peak_line": e.peak_line,
        "planner": e.planner,
        "budget_bytes": e.budget,
        "step_us": e.micros,
        "events": e.events.iter().map(|event| json!({
            "line": format!("{:?}", event.instr),
            "text": event.text,
            "start_us": event.start,
            "end_us": event.end,
        })).collect::<Vec<_>>(),
        "places": e.stays.iter().map(stay).collect::<Vec<_>>(),
        "state": e.home.as_ref().map(choice),
        "gaps": gaps,
    })
}
