//! The pipeline: from a traced graph to a proved program.
//!
//! [`crate::list`] has the passes, in order. Between graph and schedule passes, the variants of the
//! loss are made (`loss_variants`) and [`crate::decide`] chooses a plan. After the last pass
//! [`ir::check`] proves the program, in release builds too. The program's figures must equal those
//! of the chosen plan.

use crate::alloc;
use crate::blame::blamed;
use crate::cost::Cost;
use crate::decide::bound::{self, Certificate};
use crate::decide::{self, Decided, Outcome};
use crate::graph::microbatch::{self, MicrobatchError};
use crate::graph::reduction::Kind;
use crate::list::{GraphContext, SHARED, ScheduleContext, failed, schedule_passes};
use crate::loss_variants::{self, Problems, Slots, Stage};
use crate::manager::{self, Manager};
use crate::plan::machine::{DEVICE, HOST};
use crate::plan::{Extent, Problem};
use crate::realise::Finished;
use crate::schedule::lives::lives;
use crate::sim::{self, Timeline, simulate};
use ir::schedule::MemorySpace;
use ir::{Device, Graph, Pool, Program, Schedule, Table, text};
use papers::protrain::Fixed;
use std::time::Instant;

pub use crate::list::names;
pub use crate::manager::{Observer, Report};
pub use crate::plan::{Budget, Error, Kernels, Options, Planner};

/// A program that [`ir::check`] has proved, with its figures.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Graph, schedule, plan.
    pub program: Program,
    /// When each line runs.
    pub timeline: Timeline,
    /// What the user chose.
    pub options: Options,
    /// What the loss of several micro-batches is a function of.
    pub loss_kind: Kind,
    /// The number of chunks of rows of the loss; 1 if it is whole.
    pub loss_chunks: u64,
    /// The ways to compute the loss that were planned, including the chosen one.
    pub loss_variants: Vec<LossVariant>,
    /// The decisions of the program, and the plans for other budgets.
    pub decided: Decided,
    /// The lower bound of the step time; absent with [`Extent::Plan`].
    pub certificate: Option<Certificate>,
    /// Peak of the device's pool, bytes.
    pub planned_peak: u64,
    /// The most bytes alive on the device at one line: no plan of this schedule needs fewer.
    pub live_peak: u64,
    /// For each pool, the most bytes alive at once. A copied buffer counts until its copy ends. No
    /// places of these buffers have a lower peak.
    pub bounds: Table<Pool, u64>,
}

impl Compiled {
    /// The options of a step on smaller batches that runs on the memory and the states of this one,
    /// in turn with it. `options` are this one's. States stay where they are, and everything else
    /// is planned anew in what is left.
    pub fn beside(&self, options: &Options) -> Options {
        let Program {
            graph, schedule, ..
        } = &self.program;
        // The states come first.
        let places = graph.states.values().zip(&schedule.exit);
        let on_disk = places.filter(|(_, (_, home))| schedule.space(*home) == MemorySpace::Disk);
        let on_disk = on_disk.map(|(state, _)| state.path.clone()).collect();
        let homes = self.decided.decisions.homes(graph).with_disk(on_disk);
        let planner = match options.planner {
            // They choose homes themselves.
            Planner::Offload | Planner::Protrain if homes.has_hosted() => Planner::Auto,
            planner => planner,
        };
        Options {
            homes: Some(homes),
            budget: Budget::Bytes(self.planned_peak),
            planner,
            protrain: Fixed::default(),
            ..options.clone()
        }
    }

    /// The peak of the pools in a memory, bytes; `None` if it has no pool.
    pub fn peak_in(&self, space: MemorySpace) -> Option<u64> {
        let Program { schedule, plan, .. } = &self.program;
        let pool = schedule.pool_in(space)?;
        Some(plan.as_ref().map_or(0, |plan| plan.peak[pool]))
    }

    /// The pools behind the device's link: the host's, a disk's.
    pub fn pools_beyond(&self) -> impl Iterator<Item = Pool> {
        let spaces = [MemorySpace::Host, MemorySpace::Disk].into_iter();
        spaces.filter_map(|space| self.program.schedule.pool_in(space))
    }

    /// Their peaks in words: `host peak 1.5 GiB, disk peak 3.0 GiB`. `bytes` says how numbers are
    /// written.
    pub fn peaks_beyond(&self, bytes: &dyn Fn(u64) -> String) -> String {
        let Program { schedule, plan, .. } = &self.program;
        let words = |pool: Pool| {
            let peak = plan.as_ref().map_or(0, |plan| plan.peak[pool]);
            format!("{} peak {}", schedule.pools[pool].name, bytes(peak))
        };
        self.pools_beyond()
            .map(words)
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// The planner for reports, with the search that found the plan: `auto (greedy)`.
    pub fn planner(&self) -> String {
        match self.options.planner {
            Planner::Auto => format!("auto ({})", self.decided.origin.name()),
            planner => planner.name().to_string(),
        }
    }
}

/// A way to compute the loss.
#[derive(Clone, PartialEq, Debug)]
pub struct LossVariant {
    /// The number of chunks of rows; 1 is whole.
    pub chunks: u64,
    /// The figures of its plans.
    pub outcome: Outcome,
}

/// Runs the pipeline.
pub fn compile(
    mut graph: Graph,
    options: &Options,
    device: &Device,
    cost: &dyn Cost,
    observer: &mut Observer<'_>,
) -> Result<Compiled, Error> {
    let mut manager = Manager::new(observer);
    manager::verify_graph("import", &graph)?;
    let context = GraphContext {
        options,
        cost,
        loss_chunks: 1,
    };
    manager.run_graph(&SHARED, &mut graph, &context)?;
    let loss_kind = match options.micro_batches {
        Some(2..) => {
            microbatch::whole(&graph, options.reduction)
                .map_err(|e| failed("microbatch", MicrobatchError::from(e)))?
                .kind
        }
        _ => Kind::default(),
    };

    let mut start = Instant::now();
    let (slots, problems) = (Slots::new(), Problems::new());
    let stage = Stage {
        graph: &graph,
        options,
        device,
        cost,
        slots: &slots,
        problems: &problems,
    };
    let taken = stage.run(&mut manager)?;
    let variants = loss_variants::taken(&slots, &taken);
    let problems = loss_variants::problems(problems, &taken);
    if let [_] = problems[..] {
        // The passes of a single variant have their own times.
        start = Instant::now();
    }
    let planned = decide::decide_among(&problems, options.planner, options.budget, options.extent);
    // If nothing fits, the dump shows the last variant, which needs least.
    let chosen = planned
        .as_ref()
        .map_or(problems.len() - 1, |(chosen, ..)| *chosen);
    let time = start.elapsed();
    for ran in &variants[chosen].passes {
        manager.tell(ran);
    }
    let (_, decided, outcomes) = match planned {
        Ok(planned) => planned,
        Err(error) => return Err(blamed(error, problems, options)),
    };
    let problem = &problems[chosen];
    let lines = problem.graph.nodes.len();
    manager::trace("decide", decided.decisions.count() > 0, time, lines);
    manager.report("decide", true, time, &|| {
        decided.decisions.print(problem.graph)
    });

    let program = build(problem, &decided, &mut manager)?;
    let loss_variants = variants
        .iter()
        .zip(outcomes)
        .map(|(variant, outcome)| LossVariant {
            chunks: variant.chunks,
            outcome,
        })
        .collect();
    let mut compiled = measured(problem, program, decided);
    same_figures(&compiled)?;
    // The bound counts states on the device, and a step in parts has none there.
    if options.extent == Extent::Curve && options.parts.is_none() {
        let budget = compiled.decided.budget.unwrap_or(u64::MAX);
        let micros = compiled.timeline.micros;
        compiled.certificate = Some(bound::certificate(problem, budget, micros));
    }
    Ok(Compiled {
        options: options.clone(),
        loss_kind,
        loss_chunks: variants[chosen].chunks,
        loss_variants,
        ..compiled
    })
}

/// Runs the schedule passes on the chosen decisions, and proves the program.
fn build(
    problem: &Problem<'_>,
    decided: &Decided,
    manager: &mut Manager<'_, '_>,
) -> Result<Program, Error> {
    let context = ScheduleContext {
        variant: decided.variant,
        budget: decided.budget,
        ..ScheduleContext::new(problem, &decided.decisions)
    };
    let mut program = Program {
        graph: problem.graph.clone(),
        schedule: Schedule::default(),
        plan: None,
    };
    let timed = |program: &Program| {
        let timeline = simulate(&program.graph, &program.schedule, problem.cost);
        sim::print(program, &timeline)
    };
    for pass in schedule_passes() {
        // Before `sync` adds waits, the time of a line means nothing.
        let print: &dyn Fn(&Program) -> String = if pass.name == "sync" {
            &timed
        } else {
            &text::print_program
        };
        manager.run_schedule(pass, &mut program, &context, print)?;
    }
    let start = Instant::now();
    manager::check(&program)?;
    manager::trace(
        "check",
        false,
        start.elapsed(),
        program.schedule.instrs.len(),
    );
    manager.report("check", false, start.elapsed(), &|| {
        text::print_program(&program)
    });
    Ok(program)
}

/// The figures of a program: its times, peaks and bounds.
fn measured(problem: &Problem<'_>, program: Program, decided: Decided) -> Compiled {
    let Program {
        graph,
        schedule,
        plan,
    } = &program;
    let timeline = simulate(graph, schedule, problem.cost);
    let planned_peak = plan.as_ref().map_or(0, |plan| plan.peak[DEVICE]);
    let live_peak = alloc::live_peak(schedule, &alloc::lifetimes(schedule), DEVICE);
    let lives = lives(problem, schedule, decided.variant);
    let bounds = schedule
        .pools
        .ids()
        .map(|pool| alloc::live_peak(schedule, &lives, pool))
        .collect();
    Compiled {
        program,
        timeline,
        options: Options::default(),
        loss_kind: Kind::default(),
        loss_chunks: 1,
        loss_variants: vec![],
        decided,
        certificate: None,
        planned_peak,
        live_peak,
        bounds,
    }
}

/// An error if the program's figures differ from those of the chosen plan. The planner ran the same
/// passes, so a difference is a bug, and the program might exceed the budget.
fn same_figures(compiled: &Compiled) -> Result<(), Error> {
    let planned = compiled.decided.figures;
    let peak = |pool| {
        let plan = compiled.program.plan.as_ref();
        plan.map_or(0, |plan| plan.peak[pool])
    };
    let found = Finished {
        peak: peak(DEVICE),
        host: peak(HOST),
        micros: compiled.timeline.micros,
    };
    if planned == found {
        return Ok(());
    }
    Err(Error::Diverged {
        planned: planned.peak,
        compiled: found.peak,
        planned_micros: planned.micros,
        compiled_micros: found.micros,
    })
}
