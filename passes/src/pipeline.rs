//! THE list of passes, in order, and the manager that runs it.
//!
//! For every pass the manager measures the time, finds out whether anything changed by comparing
//! values (a pass is not asked, so it cannot be wrong), verifies, and tells the observer, which
//! dumps. After the last pass [`ir::check`] proves the program, in release builds too.

use crate::alloc;
use crate::cost::{Cost, Tabled};
use crate::decide::bound::{self, Certificate};
use crate::decide::{self, Decided, NOTHING, Outcome};
use crate::graph::loss::Chunks;
use crate::graph::{accumulate, canonical, fuse, loss, microbatch, optimizer, simplify};
use crate::plan::machine::{DEVICE, HOST};
pub use crate::plan::{Budget, Error, Kernels, Options};
use crate::plan::{Decisions, Extent, Problem};
use crate::realise;
use crate::schedule::{apply, inplace, order, prefetch, sync};
use crate::sim::{self, Timeline, simulate};
use ir::finding::Finding;
use ir::{Device, Graph, Pool, Program, Schedule, Table, text};
use std::time::{Duration, Instant};

/// A pass over `S`.
pub struct Pass<S> {
    /// Its name: `--dump-ir-after NAME`.
    pub name: &'static str,
    /// What it does.
    pub run: fn(&mut S, &Context<'_>) -> Result<(), Error>,
}

/// Graph passes. Order matters; each line says why it stands where it stands.
pub const GRAPH: &[Pass<Graph>] = &[
    // First: whatever traced the graph, the passes after it meet one form.
    Pass {
        name: "canonical",
        run: |graph, _| {
            canonical::run(graph);
            Ok(())
        },
    },
    // After canonical: it matches fewer forms. Before microbatch: what is chosen once holds for
    // every batch.
    Pass {
        name: "simplify",
        run: |graph, c| {
            if !c.options.without_simplify {
                simplify::run(graph);
            }
            Ok(())
        },
    },
    // After simplify, which finds the loss; canonical would make one of what chunks count alike.
    // Before microbatch: each batch's loss is cut alike.
    Pass {
        name: "loss",
        run: |graph, c| match c.options.loss_chunks {
            Chunks::Auto => Ok(()),
            Chunks::Of(n) => loss::run(graph, n).map_err(Error::Input),
        },
    },
    // After loss, which looks for the products of the head. Before microbatch: a gradient over
    // several batches is the sum of theirs, bit by bit. Before decide: in which order numbers are
    // added up is the same at every budget.
    Pass {
        name: "accumulate",
        run: |graph, _| {
            accumulate::run(graph);
            Ok(())
        },
    },
    // After canonical, which would merge what two micro-batches compute alike and so keep it from
    // one to the next.
    Pass {
        name: "microbatch",
        run: |graph, c| {
            microbatch::run(graph, c.options.micro_batches.unwrap_or(1)).map_err(Error::Input)
        },
    },
    // After canonical: it removes what nothing needs, and without an optimizer nothing needs a
    // gradient's last touch. After microbatch: one update a step.
    Pass {
        name: "optimizer",
        run: |graph, c| optimizer::run(graph, c.options.attach()).map_err(Error::Input),
    },
    // After optimizer, so that all there is to group exists; before order, which places what is
    // left.
    Pass {
        name: "fuse",
        run: |graph, c| {
            if c.options.kernels == Kernels::Generated {
                fuse::run_where_faster(graph, c.cost);
            }
            Ok(())
        },
    },
    // Last: updates have a place only once they exist.
    Pass {
        name: "order",
        run: |graph, c| {
            order::run(graph, c.options.update);
            Ok(())
        },
    },
];

/// Schedule passes, which act on what `decide` answered.
pub const SCHEDULE: &[Pass<Program>] = &[
    // The only place that inserts copies and reruns.
    Pass {
        name: "apply",
        run: apply_pass,
    },
    // Before prefetch: what shares bytes leaves more room to copy in early.
    Pass {
        name: "inplace",
        run: |p, _| {
            inplace::run(&p.graph, &mut p.schedule);
            Ok(())
        },
    },
    // Before allocate: a buffer lives from where its copy starts.
    Pass {
        name: "prefetch",
        run: |p, c| {
            let ahead = c.decided.map_or(0, |(decisions, _)| decisions.ahead);
            prefetch::run(&p.graph, &mut p.schedule, c.cost, ahead);
            Ok(())
        },
    },
    // Before sync: reuse of bytes is a conflict like any other.
    Pass {
        name: "allocate",
        run: |p, c| {
            allocate_pass(p, c);
            Ok(())
        },
    },
    // Last: the only place that writes `after`.
    Pass {
        name: "sync",
        run: |p, _| {
            sync_pass(p);
            Ok(())
        },
    },
];

/// Names of all passes, in order.
pub fn names() -> Vec<&'static str> {
    let graph = GRAPH.iter().map(|p| p.name);
    graph
        .chain(["decide"])
        .chain(SCHEDULE.iter().map(|p| p.name))
        .collect()
}

/// What passes may look at.
pub struct Context<'a> {
    /// What the user chose.
    pub options: &'a Options,
    /// The machine.
    pub device: &'a Device,
    /// Times.
    pub cost: &'a dyn Cost,
    /// What was decided; absent before `decide`.
    pub decided: Option<(&'a Decisions, usize)>,
    /// The budget in bytes, once it is known.
    pub budget: Option<u64>,
}

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
    /// The text after it; made only when asked for.
    pub text: &'a dyn Fn() -> String,
}

/// Sees each pass as it ends.
pub type Observer<'a> = dyn FnMut(&Report<'_>) + 'a;

/// A program that [`ir::check`] has proved, and what is known of it.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Graph, schedule, plan.
    pub program: Program,
    /// When each line runs.
    pub timeline: Timeline,
    /// What the user chose.
    pub options: Options,
    /// In how many chunks of rows the loss is computed; 1 if it is whole.
    pub loss_chunks: u64,
    /// What the ways to compute the loss come to, the one that was taken among them.
    pub ways: Vec<Way>,
    /// The decisions behind it, and what else could be had.
    pub decided: Decided,
    /// How fast a step could be at the budget; absent if only the plan was asked for.
    pub certificate: Option<Certificate>,
    /// Peak of the device's pool, bytes.
    pub planned_peak: u64,
    /// The most bytes alive on the device at one line: no plan of this schedule needs fewer.
    pub live_peak: u64,
    /// Of each pool, the most bytes alive at once, a copy's until it is over: no places of these
    /// buffers have a lower peak.
    pub bounds: Table<Pool, u64>,
}

/// A way to compute the loss.
#[derive(Clone, PartialEq, Debug)]
pub struct Way {
    /// In how many chunks of rows.
    pub chunks: u64,
    /// What plans of it come to.
    pub outcome: Outcome,
}

/// Runs the pipeline.
pub fn compile(
    graph: Graph,
    options: &Options,
    device: &Device,
    cost: &dyn Cost,
    observer: &mut Observer<'_>,
) -> Result<Compiled, Error> {
    let mut manager = Manager {
        observer,
        position: 0,
    };
    let mut graph = graph;
    let context = Context {
        options,
        device,
        cost,
        decided: None,
        budget: None,
    };
    manager.verify_graph("import", &graph)?;
    let (first, rest) = halves();
    manager.graph(first, &mut graph, &context)?;
    let start = Instant::now();
    let mut ways = ways(&graph, &context)?;
    if ways.is_empty() {
        let chunks = if let Chunks::Of(n) = options.loss_chunks {
            loss::chunks(&graph, n)
        } else {
            1
        };
        manager.graph(rest, &mut graph, &context)?;
        ways.push(Finished {
            chunks,
            graph: graph.compact(),
            passes: vec![],
        });
    }
    let start = if 1 < ways.len() {
        start
    } else {
        Instant::now()
    };
    let tables: Vec<Tabled> = ways
        .iter()
        .map(|way| Tabled::new(cost, &way.graph))
        .collect();
    let problems: Vec<Problem<'_>> = ways
        .iter()
        .zip(&tables)
        .map(|(Finished { graph, .. }, tabled)| Problem {
            host_limit: Some(options.host.unwrap_or(device.host_bytes)),
            ..Problem::new(graph, device, tabled)
        })
        .collect();
    let decided = decide::decide_among(&problems, options.planner, options.budget, options.extent);
    // Where nothing fits, the one that needs least is shown.
    let chosen = decided
        .as_ref()
        .map_or(ways.len() - 1, |(chosen, ..)| *chosen);
    let (way, tabled, problem) = (&ways[chosen], &tables[chosen], &problems[chosen]);
    let (loss_chunks, time) = (way.chunks, start.elapsed());
    for Ran {
        name,
        changed,
        time,
        graph,
    } in &way.passes
    {
        manager.report(name, *changed, *time, &|| text::print_graph(graph));
    }
    let (_, decided, outcomes) = decided?;
    let graph = problem.graph;
    manager.report("decide", true, time, &|| decided.decisions.print(graph));

    let context = Context {
        options,
        device,
        cost: tabled,
        decided: Some((&decided.decisions, decided.variant)),
        budget: decided.budget,
    };
    let mut program = Program {
        graph: graph.clone(),
        schedule: Schedule::default(),
        plan: None,
    };
    let timed = |program: &Program| {
        sim::print(
            program,
            &simulate(&program.graph, &program.schedule, tabled),
        )
    };
    for pass in SCHEDULE {
        // Before there are waits, a line's time means nothing.
        let print: &dyn Fn(&Program) -> String = if pass.name == "sync" {
            &timed
        } else {
            &text::print_program
        };
        if manager.run(pass, &mut program, &context, print)? {
            manager.verify_program(pass.name, &program, graph)?;
        }
    }
    let start = Instant::now();
    manager.check(&program)?;
    manager.report("check", false, start.elapsed(), &|| {
        text::print_program(&program)
    });

    let timeline = simulate(&program.graph, &program.schedule, tabled);
    let pool = DEVICE;
    let planned_peak = program.plan.as_ref().map_or(0, |plan| plan.peak[pool]);
    let lives = alloc::lifetimes(&program.schedule);
    let live_peak = alloc::live_peak(&program.schedule, &lives, pool);
    let lives = realise::lives(&program.graph, &program.schedule, tabled, decided.variant);
    let bounds = program
        .schedule
        .pools
        .ids()
        .map(|pool| alloc::live_peak(&program.schedule, &lives, pool))
        .collect();
    let budget = decided.budget.unwrap_or(u64::MAX);
    let asked = options.extent == Extent::Curve;
    let certificate = asked.then(|| bound::certificate(problem, budget, timeline.micros));
    let ways = ways
        .iter()
        .zip(outcomes)
        .map(|(way, outcome)| Way {
            chunks: way.chunks,
            outcome,
        })
        .collect();
    Ok(Compiled {
        program,
        timeline,
        options: options.clone(),
        loss_chunks,
        ways,
        decided,
        certificate,
        planned_peak,
        live_peak,
        bounds,
    })
}

/// The graph passes before `loss`, and from there on.
fn halves() -> (&'static [Pass<Graph>], &'static [Pass<Graph>]) {
    GRAPH.split_at(
        GRAPH
            .iter()
            .position(|pass| pass.name == "loss")
            .unwrap_or(GRAPH.len()),
    )
}

/// A graph after its last pass.
struct Finished {
    /// In how many chunks the loss is computed.
    chunks: u64,
    /// The graph, compact.
    graph: Graph,
    /// The passes from `loss` on, if they were not run in the open: it is not known yet which graph
    /// is taken.
    passes: Vec<Ran>,
}

/// A pass that has ended, with the graph after it.
struct Ran {
    name: &'static str,
    changed: bool,
    time: Duration,
    graph: Graph,
}

/// The ways to compute the loss among which planning decides: the graphs that the passes from
/// `loss` on leave with it whole and in chunks. None if there is nothing to choose.
///
/// More chunks make more lines and save fewer bytes each. So there is one other way beside the
/// whole loss: the fewest chunks, by doubling, of which twice as many would save nothing to speak
/// of, neither of what keeping everything needs nor of what the neediest line does, which no plan
/// goes below. No budget is looked at: see [`decide`] on why peaks are monotone.
fn ways(graph: &Graph, context: &Context<'_>) -> Result<Vec<Finished>, Error> {
    let most = if context.options.loss_chunks == Chunks::Auto {
        loss::chunks(graph, MOST_CHUNKS)
    } else {
        1
    };
    let finish = |chunks: u64| -> Result<(Finished, [u64; 2]), Error> {
        let options = Options {
            loss_chunks: Chunks::Of(chunks),
            ..context.options.clone()
        };
        let context = Context {
            options: &options,
            ..*context
        };
        let chunks = loss::chunks(graph, chunks);
        let (mut graph, mut passes) = (graph.clone(), vec![]);
        let mut silent = Manager {
            observer: &mut |_| (),
            position: 0,
        };
        for pass in halves().1 {
            let start = Instant::now();
            let changed = silent.graph(std::slice::from_ref(pass), &mut graph, &context)?;
            passes.push(Ran {
                name: pass.name,
                changed,
                time: start.elapsed(),
                graph: graph.clone(),
            });
        }
        let graph = graph.compact();
        let problem = Problem::new(&graph, context.device, context.cost);
        let schedule = realise::unnamed(&problem, &Decisions::default()).map_err(Error::Input)?;
        let device = DEVICE;
        let keep = alloc::live_peak(&schedule, &alloc::lifetimes(&schedule), device);
        let needs = [keep, alloc::neediest(&schedule, device)];
        Ok((
            Finished {
                chunks,
                graph,
                passes,
            },
            needs,
        ))
    };
    if most < 2 {
        return Ok(vec![]);
    }
    let most = 1 << most.ilog2();
    let (whole, last) = rayon::join(|| finish(1), || finish(most));
    let ((whole, needs), mut last) = (whole?, last?);
    let enough = |needs: [u64; 2], least: [u64; 2]| {
        needs
            .iter()
            .zip(least)
            .all(|(&needs, least)| needs as f64 <= least as f64 * (1.0 + NOTHING))
    };
    let least = last.1;
    if enough(needs, least) {
        return Ok(vec![]);
    }
    let mut chunks = most;
    while 2 < chunks {
        let fewer = finish(chunks / 2)?;
        if !enough(fewer.1, least) {
            break;
        }
        (chunks, last) = (chunks / 2, fewer);
    }
    Ok(vec![whole, last.0])
}
/// The most chunks that are tried.
const MOST_CHUNKS: u64 = 64;

struct Manager<'a, 'b> {
    observer: &'a mut Observer<'b>,
    position: usize,
}

impl Manager<'_, '_> {
    /// Runs a pass; true if it changed something.
    fn run<S>(
        &mut self,
        pass: &Pass<S>,
        value: &mut S,
        context: &Context<'_>,
        print: &dyn Fn(&S) -> String,
    ) -> Result<bool, Error>
    where
        S: Clone + PartialEq,
    {
        let before = value.clone();
        let start = Instant::now();
        (pass.run)(value, context)?;
        let time = start.elapsed();
        let changed = *value != before;
        log::debug!(
            "{}: {}changed, {:.1} ms",
            pass.name,
            if changed { "" } else { "un" },
            time.as_secs_f64() * 1e3
        );
        self.report(pass.name, changed, time, &|| print(value));
        Ok(changed)
    }

    /// Runs passes over a graph; true if they changed something.
    fn graph(
        &mut self,
        passes: &[Pass<Graph>],
        graph: &mut Graph,
        context: &Context<'_>,
    ) -> Result<bool, Error> {
        let mut changed = false;
        for pass in passes {
            if self.run(pass, graph, context, &text::print_graph)? {
                self.verify_graph(pass.name, graph)?;
                changed = true;
            }
        }
        Ok(changed)
    }

    fn report(
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

    fn verify_graph(&self, pass: &'static str, graph: &Graph) -> Result<(), Error> {
        broken(pass, ir::verify::graph(graph), |f| {
            text::print_graph_with_findings(graph, f)
        })
    }
    /// Verifies a program; `right` is a graph that is.
    fn verify_program(
        &self,
        pass: &'static str,
        program: &Program,
        right: &Graph,
    ) -> Result<(), Error> {
        let verify = if program.graph == *right {
            ir::verify::schedule
        } else {
            ir::verify::program
        };
        broken(pass, verify(program), |f| {
            text::print_program_with_findings(program, f)
        })
    }
    fn check(&self, program: &Program) -> Result<(), Error> {
        let findings = ir::check::check(program).err().unwrap_or_default();
        broken("check", findings, |f| {
            text::print_program_with_findings(program, f)
        })
    }
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

fn apply_pass(program: &mut Program, context: &Context<'_>) -> Result<(), Error> {
    let problem = Problem {
        host_limit: None,
        ..Problem::new(&program.graph, context.device, context.cost)
    };
    let (decisions, _) = context.decided.expect("apply should come after decide");
    let mut schedule = apply::run(&problem, decisions).map_err(Error::Input)?;
    schedule.pools[DEVICE].limit = context.budget;
    schedule.pools[HOST].limit = Some(context.options.host.unwrap_or(context.device.host_bytes));
    program.schedule = schedule;
    Ok(())
}

fn allocate_pass(program: &mut Program, context: &Context<'_>) {
    let (_, variant) = context.decided.expect("allocate should come after decide");
    let lives = realise::lives(&program.graph, &program.schedule, context.cost, variant);
    program.plan = Some(alloc::allocate(&program.schedule, &lives));
}

fn sync_pass(program: &mut Program) {
    let plan = program
        .plan
        .clone()
        .expect("sync should come after allocate");
    sync::run(&program.graph, &mut program.schedule, &plan);
}
