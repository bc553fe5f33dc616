//! Runs passes. For every pass it measures the time, compares the values before and after (so a
//! pass cannot report a wrong answer), verifies, and calls the observer, which writes dumps.

use crate::list::{GraphContext, GraphPass, ScheduleContext, SchedulePass};
use crate::plan::Error;
use ir::finding::Finding;
use ir::{Graph, Program, text};
use std::time::{Duration, Instant};

/// What a pass did, for the observer.
pub struct Report<'a> {
    /// The pass.
    pub name: &'static str,
    /// Its position in the pipeline.
    pub position: usize,
    /// Whether the text changed.
    pub changed: bool,
    /// How long it took.
    pub time: Duration,
    /// Makes the text after the pass.
    pub text: &'a dyn Fn() -> String,
}

/// Called for each pass when it ends.
pub type Observer<'a> = dyn FnMut(&Report<'_>) + 'a;

/// A graph pass that has ended, with the graph after it.
pub(crate) struct Ran {
    name: &'static str,
    changed: bool,
    time: Duration,
    graph: Graph,
}

/// Runs graph passes, verifies after each, and passes each to `ended`.
pub(crate) fn run_graph(
    passes: &[GraphPass],
    graph: &mut Graph,
    context: &GraphContext<'_>,
    ended: &mut dyn FnMut(Ran),
) -> Result<(), Error> {
    for pass in passes {
        context.options.cancel.look();
        let before = graph.clone();
        let start = Instant::now();
        (pass.run)(graph, context)?;
        let time = start.elapsed();
        let changed = *graph != before;
        trace(pass.name, changed, time, graph.nodes.len());
        if changed {
            verify_graph(pass.name, graph)?;
        }
        ended(Ran {
            name: pass.name,
            changed,
            time,
            graph: graph.clone(),
        });
    }
    Ok(())
}

/// An error if the graph that a pass left is not well-formed.
pub(crate) fn verify_graph(pass: &'static str, graph: &Graph) -> Result<(), Error> {
    broken(pass, ir::verify::graph(graph), |f| {
        text::print_graph_with_findings(graph, f)
    })
}

/// An error if [`ir::check`] does not prove the program.
pub(crate) fn check(program: &Program) -> Result<(), Error> {
    let findings = ir::check::check(program).err().unwrap_or_default();
    broken("check", findings, |f| {
        text::print_program_with_findings(program, f)
    })
}

/// Counts passes and reports each to the observer.
pub(crate) struct Manager<'a, 'b> {
    observer: &'a mut Observer<'b>,
    position: usize,
}

impl<'a, 'b> Manager<'a, 'b> {
    pub(crate) fn new(observer: &'a mut Observer<'b>) -> Manager<'a, 'b> {
        Manager {
            observer,
            position: 0,
        }
    }

    /// Runs graph passes and reports each when it ends.
    pub(crate) fn run_graph(
        &mut self,
        passes: &[GraphPass],
        graph: &mut Graph,
        context: &GraphContext<'_>,
    ) -> Result<(), Error> {
        run_graph(passes, graph, context, &mut |ran| self.tell(&ran))
    }

    /// Reports a graph pass.
    pub(crate) fn tell(&mut self, ran: &Ran) {
        self.report(ran.name, ran.changed, ran.time, &|| {
            text::print_graph(&ran.graph)
        });
    }

    /// Runs a schedule pass on a program of the context's graph, verifies, and reports the pass.
    pub(crate) fn run_schedule(
        &mut self,
        pass: &SchedulePass,
        program: &mut Program,
        context: &ScheduleContext<'_>,
        print: &dyn Fn(&Program) -> String,
    ) -> Result<(), Error> {
        context.problem.cancel.look();
        let before = (program.schedule.clone(), program.plan.clone());
        let start = Instant::now();
        pass.run_on(program, context)?;
        let time = start.elapsed();
        let changed = (&program.schedule, &program.plan) != (&before.0, &before.1);
        trace(pass.name, changed, time, program.schedule.instrs.len());
        if changed {
            broken(pass.name, ir::verify::schedule(program), |f| {
                text::print_program_with_findings(program, f)
            })?;
        }
        self.report(pass.name, changed, time, &|| print(program));
        Ok(())
    }

    /// Reports a pass to the observer.
    pub(crate) fn report(
        &mut self,
        name: &'static str,
        changed: bool,
        time: Duration,
        text: &dyn Fn() -> String,
    ) {
        (self.observer)(&Report {
            name,
            position: self.position,
            changed,
            time,
            text,
        });
        self.position += 1;
    }
}

/// Logs a pass with the number of lines after it: nodes of a graph, or instructions of a schedule.
pub(crate) fn trace(pass: &str, changed: bool, time: Duration, lines: usize) {
    let changed = if changed { "changed" } else { "unchanged" };
    let millis = time.as_secs_f64() * 1e3;
    log::debug!("pass {pass}: {changed}, {millis:.1} ms, {lines} lines");
}

fn broken(
    pass: &'static str,
    findings: Vec<Finding>,
    print: impl Fn(&[Finding]) -> String,
) -> Result<(), Error> {
    let Some(first) = findings.first() else {
        return Ok(());
    };
    let summary = format!("{} findings, first: {first}", findings.len());
    Err(Error::Broken {
        pass,
        summary,
        text: print(&findings),
    })
}
