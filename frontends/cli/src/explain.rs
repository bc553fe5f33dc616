//! `lighterage explain`: why a tensor is where it is, and what the alternatives would cost.

use crate::args::ExplainArgs;
use crate::failure::Failure;
use crate::micro_batches;
use crate::model;
use crate::observe::Dumps;
use crate::out::{self, out};
use crate::size::{micros, short};
use ir::Value;
use passes::decide::Problem;
use passes::explain::{
    self, Choice, ChunkExplanation, Event, Explanation, Hosted, Named, Outcome, Stay,
};
use report::explained::{Row, known_path, rows, table};
use serde_json::{Value as Json, json};

/// Runs the command.
pub(crate) fn run(args: &ExplainArgs) -> Result<(), Failure> {
    let model = model::read(
        &args.model.model,
        &args.model.reading,
        &args.compiling.forward,
    )?;
    let machine = model::machine(&args.compiling)?;
    let (model, compiling) = micro_batches::decide(model, &args.compiling, &machine)?;
    let compiled = model::compile(&model.graph, &compiling, &machine, Dumps::Stderr)?;
    let graph = &compiled.program.graph;
    let host = compiling.host.filter(|&bytes| bytes > 0);
    let host = host.unwrap_or(machine.device.host_bytes);
    let problem = Problem::new(graph, &machine.device, &*machine.cost).with_host_limit(host);
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
            let values: Vec<Value> = values.collect();
            show_chunk(args, &explanation, &rows(&compiled, &problem, &values));
        }
        Named::Module(values) | Named::Buffer(values) => {
            list(args, asked, &rows(&compiled, &problem, &values));
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

fn list(args: &ExplainArgs, module: &str, rows: &[Row]) {
    if args.json {
        out!("{}", json!({"module": module, "values": rows_json(rows)}));
        return;
    }
    out!("{module}: {} values", rows.len());
    out::text(&table(rows));
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
    out::text(&table(rows));
}

fn rows_json(rows: &[Row]) -> Vec<Json> {
    rows.iter()
        .map(|r| json!({"name": r.name, "bytes": r.bytes, "class": r.class, "decided": r.what}))
        .collect()
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
    json!({"pool": hosted.pool, "comes": hosted.comes, "updated_there": hosted.updated_there,
        "chunk": chunk})
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
