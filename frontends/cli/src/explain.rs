//! `lighterage explain`: why a tensor is where it is, and what the alternatives would cost.

use crate::args::ExplainArgs;
use crate::failure::Failure;
use crate::model;
use crate::observe::Dumps;
use crate::out::{self, out};
use crate::size::{bytes, micros, short};
use ir::{Graph, Value};
use passes::decide::Problem;
use passes::explain::{
    self, Choice, ChunkExplanation, Event, Explanation, Hosted, Named, Outcome, Stay,
};
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
    let asked = args.value.strip_prefix('%').unwrap_or(&args.value);
    let name = known_path(&model.tied, graph, asked).unwrap_or(&args.value);
    let explain = |value: Value| {
        let spinner = out::spinner(format!("simulating the alternatives for {name}"));
        let explanation = explain::explain(&compiled, &problem, value);
        if let Some(spinner) = &spinner {
            spinner.finish_and_clear();
        }
        explanation
    };
    match explain::named(&compiled.program, &model.graph, name) {
        Named::Value(value) => show(args, None, &explain(value)),
        Named::Removed(Some(value)) => {
            let note = format!(
                "%{asked} is not in the compiled step: `canonical` put %{} in its place, which \
                 has the same elements",
                graph.values[value].name
            );
            show(args, Some(note), &explain(value));
        }
        Named::Removed(None) => {
            let note = format!(
                "%{asked} is not in the compiled step: no state, output or gradient needs it"
            );
            no_value(
                args,
                json!({"asked": asked, "removed": true, "note": note}),
                &note,
            );
        }
        Named::Scratch(instr) => {
            let line = ir::text::print_instr(graph, &compiled.program.schedule, instr);
            let note = format!("{asked} is scratch memory, which only one line uses: {line}");
            no_value(
                args,
                json!({"asked": asked, "scratch": true, "note": note}),
                &note,
            );
        }
        Named::Chunk(chunk) => {
            let explanation = explain::explain_chunk(&compiled, &problem, &chunk);
            let values = chunk.states.iter().map(|&state| graph.states[state].before);
            let rows: Vec<Row> = values
                .map(|value| row(&compiled, &problem, value))
                .collect();
            show_chunk(args, &explanation, &rows);
        }
        Named::Module(values) | Named::Buffer(values) => {
            let rows: Vec<Row> = values
                .iter()
                .map(|&value| row(&compiled, &problem, value))
                .collect();
            list(args, asked, &rows);
        }
        Named::Unknown(near) => {
            let near = match near.is_empty() {
                true => "`plan --dump-ir-after sync` prints all names".to_string(),
                false => format!("near: {}", near.join(", ")),
            };
            return Err(Failure::Input(format!(
                "there is no value, state or module {asked:?}; {near}"
            )));
        }
    }
    Ok(())
}

/// Says why there is nothing to explain.
fn no_value(args: &ExplainArgs, object: Json, note: &str) {
    if args.json {
        out!("{object}");
    } else {
        out!("{note}");
    }
}

/// The path that the graph has for a parameter that has several, if `asked` is one of them.
fn known_path<'a>(tied: &'a [Vec<String>], graph: &Graph, asked: &str) -> Option<&'a str> {
    let mut groups = tied.iter();
    let group = groups.find(|group| group.iter().any(|path| path == asked))?;
    let mut paths = group.iter().map(String::as_str);
    paths.find(|path| graph.states.values().any(|state| state.path == *path))
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
        out!("{}", json!({"module": module, "values": rows_json(rows)}));
        return;
    }
    out!("{module}: {} values", rows.len());
    print_rows(rows);
}

fn show_chunk(args: &ExplainArgs, chunk: &ChunkExplanation, rows: &[Row]) {
    if args.json {
        let copies = chunk.copies.iter().map(event_json);
        out!(
            "{}",
            json!({
                "chunk": chunk.name,
                "bytes": chunk.bytes,
                "places": chunk.stays.iter().map(stay_json).collect::<Vec<_>>(),
                "copies": copies.collect::<Vec<_>>(),
                "updated_there": chunk.updated_there,
                "step_us": chunk.micros,
                "on_device": outcome_json(&chunk.at_home, chunk.micros),
                "values": rows_json(rows),
            })
        );
        return;
    }
    out::text(&chunk.print(&short, &micros));
    out!("\nits {} states", rows.len());
    print_rows(rows);
}

fn rows_json(rows: &[Row]) -> Vec<Json> {
    rows.iter()
        .map(|r| json!({"name": r.name, "bytes": r.bytes, "class": r.class, "decided": r.what}))
        .collect()
}

/// The values of a module or a buffer, largest first.
fn print_rows(rows: &[Row]) {
    let mut sorted: Vec<&Row> = rows.iter().collect();
    sorted.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    let listed = || sorted.iter().take(LISTED);
    let width = listed().map(|r| r.name.chars().count()).max().unwrap_or(0);
    for row in listed() {
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

fn stay_json(s: &Stay) -> Json {
    json!({"buffer": s.buffer, "pool": s.pool, "address": s.address,
        "from": line_name(s.from), "to": line_name(s.to)})
}

fn event_json(event: &Event) -> Json {
    json!({
        "line": format!("{:?}", event.instr),
        "text": event.text,
        "start_us": event.start,
        "end_us": event.end,
    })
}

fn to_json(e: &Explanation) -> Json {
    let events = e.events.iter().map(event_json);
    let gaps = e.gaps.iter().map(|gap| {
        let mut object = choice_json(&gap.choice, e.micros);
        if let Some(object) = object.as_object_mut() {
            object.insert("after_access".into(), json!(gap.gap));
            object.insert("from".into(), json!(line_name(gap.from)));
            object.insert("to".into(), json!(line_name(gap.to)));
            object.insert("idle_us".into(), json!(gap.micros));
        }
        object
    });
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
        "events": events.collect::<Vec<_>>(),
        "places": e.stays.iter().map(stay_json).collect::<Vec<_>>(),
        "state": e.home.as_ref().map(|home| choice_json(home, e.micros)),
        "on_host": e.hosted.as_ref().map(hosted_json),
        "gaps": gaps.collect::<Vec<_>>(),
    })
}

fn hosted_json(hosted: &Hosted) -> Json {
    let chunk = hosted.chunk.as_ref().map(|chunk| {
        json!({"name": chunk.name, "states": chunk.states, "bytes": chunk.bytes,
            "copy_us": chunk.micros})
    });
    json!({"comes": hosted.comes, "updated_there": hosted.updated_there, "chunk": chunk})
}

fn line_name(instr: Option<ir::Instr>) -> Option<String> {
    instr.map(|instr| format!("{instr:?}"))
}

/// A choice in a step that takes `step` µs.
fn choice_json(choice: &Choice, step: f64) -> Json {
    let others: Vec<Json> = choice
        .others
        .iter()
        .map(|(way, outcome)| {
            let mut object = outcome_json(outcome, step);
            if let Some(object) = object.as_object_mut() {
                object.insert("way".into(), json!(way.name()));
            }
            object
        })
        .collect();
    let reason = choice.reason.map(|r| {
        json!({"frees_bytes": r.bytes, "swap_us": r.swap, "recompute_us": r.recompute,
            "line": r.line})
    });
    json!({"decided": choice.way.name(), "reason": reason, "alternatives": others})
}

/// What a step comes to with another decision; it takes `step` µs as planned.
fn outcome_json(outcome: &Result<Outcome, String>, step: f64) -> Json {
    match outcome {
        Ok(o) => json!({
            "step_us": o.micros,
            "adds_us": o.micros - step,
            "peak_bytes": o.peak,
            "fits": o.fits,
        }),
        Err(why) => json!({"why_not": why}),
    }
}
