//! `lighterage check`: only the proof, on a dumped schedule.

use crate::args::CheckArgs;
use crate::failure::Failure;
use crate::model::{findings_count, read_text};
use crate::out::out;
use crate::{out as output, size};
use ir::check::Proof;
use ir::text::{self, File};
use ir::{Finding, Program};
use serde_json::json;

/// Runs the command.
pub(crate) fn run(args: &CheckArgs) -> Result<(), Failure> {
    let program = read(args)?;
    let path = args.schedule.display();
    let mut findings = ir::verify::program(&program);
    if findings.is_empty() && program.plan.is_none() {
        let help = "its buffers have no addresses; dump it after `sync`";
        return Err(Failure::Input(format!(
            "{path}: the schedule has no plan: {help}"
        )));
    }
    let proof = match findings.is_empty() {
        true => ir::check::check(&program)
            .map_err(|found| findings = found)
            .ok(),
        false => None,
    };
    let Some(proof) = proof else {
        return Err(refuse(
            args,
            &findings,
            &text::print_program_with_findings(&program, &findings),
        ));
    };
    match args.json {
        true => out!("{}", proof_json(&program, &proof)),
        false => print_proof(&program, &proof),
    }
    Ok(())
}

/// The schedule in the file.
fn read(args: &CheckArgs) -> Result<Program, Failure> {
    let path = args.schedule.display();
    let parsed = text::parse_file(&read_text(&args.schedule)?)
        .map_err(|e| Failure::Input(format!("{path}: {e}")))?;
    let graph = match parsed {
        File::Program(program) => return Ok(program),
        File::Graph(graph) => graph,
    };
    let findings = ir::verify::graph(&graph);
    if !findings.is_empty() {
        return Err(refuse(
            args,
            &findings,
            &text::print_graph_with_findings(&graph, &findings),
        ));
    }
    let help = "there is no schedule to prove; `plan --dump-ir-after sync` prints one";
    Err(Failure::Input(format!("{path}: a graph alone: {help}")))
}

fn proof_json(program: &Program, proof: &Proof) -> serde_json::Value {
    let pools = program.schedule.pools.values().zip(proof.peak.values());
    let peaks: serde_json::Map<String, serde_json::Value> = pools
        .map(|(pool, &peak)| (pool.name.clone(), json!(peak)))
        .collect();
    json!({
        "proved": true,
        "lines": proof.lines,
        "waits": proof.waits,
        "reads": proof.reads,
        "conflicts": proof.conflicts,
        "copied_bytes": proof.copied_bytes,
        "peak_bytes": peaks,
    })
}

fn print_proof(program: &Program, proof: &Proof) {
    out!("proved: {}", program.schedule.name);
    out!("  lines      {}", proof.lines);
    out!("  waits      {}", proof.waits);
    out!(
        "  reads      {}, each found whole at its address",
        proof.reads
    );
    out!(
        "  conflicts  {}, each ordered, this step's and the next one's",
        proof.conflicts
    );
    out!("  copied     {} a step", size::bytes(proof.copied_bytes));
    for (pool, &peak) in program.schedule.pools.values().zip(proof.peak.values()) {
        let limit = pool
            .limit
            .map_or(String::new(), |limit| format!(" of {}", size::short(limit)));
        out!("  {:<9}  {}{limit}", pool.name, size::bytes(peak));
    }
}

fn refuse(args: &CheckArgs, findings: &[Finding], text: &str) -> Failure {
    if args.json {
        let findings: Vec<String> = findings.iter().map(Finding::to_string).collect();
        out!("{}", json!({"proved": false, "findings": findings}));
    } else {
        output::text(text);
        // The listing is long, and its findings are somewhere in it.
        for finding in findings {
            out!("{finding}");
        }
    }
    Failure::Input(format!(
        "{}: refused, {}",
        args.schedule.display(),
        findings_count(findings.len())
    ))
}
