//! The list of passes, in order.
//!
//! Graph passes come first: [`SHARED`] once, then [`PER_VARIANT`] once for each way to compute the
//! loss. Planning follows. The schedule passes, [`LINES`] and [`PLACES`], carry out the decisions.
//! The planner runs the schedule passes of this list on every proposal, so it judges the program
//! that is compiled in the end.

use crate::alloc::{self, Lifetime};
use crate::cost::Cost;
use crate::graph::precision::Precision;
use crate::graph::{
    accumulate, attention, autodiff, canonical, evaluation, fuse, logits, loss, microbatch,
    optimizer, precision, quantize, scale, simplify,
};
use crate::plan::machine::DEVICE;
use crate::plan::{Decisions, Error, Illegal, Kernels, Options, Problem};
use crate::schedule::lives::{Variant, lives};
use crate::schedule::{apply, inplace, order, prefetch, returns, spill, sync};
use ir::schedule::{Buffer, Schedule};
use ir::{Graph, Plan, Program, Table};

/// A pass over graphs.
pub struct GraphPass {
    /// Its name: `--dump-ir-after NAME`.
    pub name: &'static str,
    /// What it does.
    pub run: fn(&mut Graph, &GraphContext<'_>) -> Result<(), Error>,
}

/// What graph passes may read.
#[derive(Clone, Copy)]
pub struct GraphContext<'a> {
    /// What the user chose.
    pub options: &'a Options,
    /// Times.
    pub cost: &'a dyn Cost,
    /// The largest number of chunks in which this variant computes the loss; 1 leaves it whole.
    pub loss_chunks: u64,
}

/// A pass over schedules.
pub struct SchedulePass {
    /// Its name: `--dump-ir-after NAME`.
    pub name: &'static str,
    /// What it does.
    pub run: fn(&mut Scheduled, &ScheduleContext<'_>) -> Result<(), Illegal>,
}

impl SchedulePass {
    /// Runs the pass on the schedule and the plan of a program, whose graph is the problem's.
    pub fn run_on(
        &self,
        program: &mut Program,
        context: &ScheduleContext<'_>,
    ) -> Result<(), Illegal> {
        let mut scheduled = Scheduled {
            schedule: std::mem::take(&mut program.schedule),
            plan: program.plan.take(),
        };
        let result = (self.run)(&mut scheduled, context);
        (program.schedule, program.plan) = (scheduled.schedule, scheduled.plan);
        result
    }
}

/// What schedule passes change.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Scheduled {
    /// The lines.
    pub schedule: Schedule,
    /// The addresses, after `allocate`.
    pub plan: Option<Plan>,
}

/// What schedule passes may read.
#[derive(Clone, Copy)]
pub struct ScheduleContext<'a> {
    /// The graph on its machine.
    pub problem: &'a Problem<'a>,
    /// The decisions.
    pub decisions: &'a Decisions,
    /// How long buffers hold their bytes.
    pub variant: Variant,
    /// The lifetimes of the variant; `None` if they are not known yet.
    pub lives: Option<&'a Table<Buffer, Lifetime>>,
    /// The budget, bytes, which the schedule names as the limit of the device's pool.
    pub budget: Option<u64>,
    /// Whether buffers get names. Planners do not need them.
    pub named: bool,
}

impl<'a> ScheduleContext<'a> {
    /// The first variant of decisions, without a budget, with names.
    pub fn new(problem: &'a Problem<'a>, decisions: &'a Decisions) -> ScheduleContext<'a> {
        ScheduleContext {
            problem,
            decisions,
            variant: Variant::default(),
            lives: None,
            budget: None,
            named: true,
        }
    }
}

/// Graph passes before the loss has variants. The order matters; each entry gives the reason for
/// its place.
pub static SHARED: [GraphPass; 6] = [
    // First: the backward is brought into one form and simplified like the forward. It does so to
    // the forward itself, before it differentiates it: fewer ops, which save less.
    GraphPass {
        name: "autodiff",
        run: |graph, c| {
            if !c.options.differentiate {
                return Ok(());
            }
            let simplified = !c.options.without_simplify;
            autodiff::run(graph, simplified).map_err(|e| failed("autodiff", e))
        },
    },
    // After autodiff, whose backward it scales too. Before canonical and simplify, after which the
    // start of the backward may be part of another constant.
    GraphPass {
        name: "scale",
        run: |graph, c| match c.options.precision {
            Precision::Fp16 if !c.options.evaluate => {
                scale::run(graph, &c.options.loss_scale).map_err(|e| failed("scale", e))
            }
            Precision::Fp16 | Precision::F32 | Precision::Tf32 | Precision::Bf16 => Ok(()),
        },
    },
    // Before all others: later passes see one form, whatever traced the graph.
    GraphPass {
        name: "canonical",
        run: |graph, _| {
            canonical::run(graph);
            Ok(())
        },
    },
    // After canonical, so it matches fewer forms. Before microbatch, so one choice holds for every
    // batch.
    GraphPass {
        name: "simplify",
        run: |graph, c| {
            if !c.options.without_simplify {
                simplify::run(graph);
            }
            Ok(())
        },
    },
    // After simplify, which recognises dropout and batch norm. Before attention, so it looks at
    // what is left.
    GraphPass {
        name: "evaluate",
        run: |graph, c| {
            if !c.options.evaluate {
                return Ok(());
            }
            evaluation::run(graph).map_err(|e| failed("evaluate", e))
        },
    },
    // After simplify, which recognises attention and its masks in its other form. Before
    // microbatch, so it looks at each attention once.
    GraphPass {
        name: "attention",
        run: |graph, _| {
            attention::run(graph);
            Ok(())
        },
    },
];

/// Graph passes from the loss on.
pub static PER_VARIANT: [GraphPass; 9] = [
    // After simplify, which recognises the loss. After canonical, which would merge equal nodes of
    // two chunks. Before microbatch, so the loss of each batch is cut in the same way.
    GraphPass {
        name: "loss",
        run: |graph, c| loss::run(graph, c.loss_chunks).map_err(|e| failed("loss", e)),
    },
    // After simplify and loss, which recognise formulas without casts. Before microbatch, which has
    // parameters of its own for each batch, so that each parameter is cast once.
    GraphPass {
        name: "precision",
        run: |graph, c| {
            precision::run(graph, c.options.precision, c.options.master)
                .map_err(|e| failed("precision", e))
        },
    },
    // After loss, which looks for the products of the head. Before microbatch: a gradient over
    // several batches is the sum of theirs, bit by bit. Before decide: the order of additions is
    // the same at every budget.
    GraphPass {
        name: "accumulate",
        run: |graph, _| {
            accumulate::run(graph);
            Ok(())
        },
    },
    // After canonical, which would merge equal values of two micro-batches, and so keep them from
    // one to the next.
    GraphPass {
        name: "microbatch",
        run: |graph, c| {
            let n = c.options.micro_batches.unwrap_or(1);
            microbatch::run(graph, n, c.options.reduction).map_err(|e| failed("microbatch", e))
        },
    },
    // After precision, which has the logits in half precision. After microbatch, which recognises
    // the loss. Only where kernels are generated: one kernel for each op would store more.
    GraphPass {
        name: "logits",
        run: |graph, c| {
            if c.options.kernels == Kernels::Generated {
                logits::run(graph);
            }
            Ok(())
        },
    },
    // After microbatch and precision, so that each product of each micro-batch has numbers of its
    // own, in its type. Before optimizer, which takes the gradients that say what is frozen.
    GraphPass {
        name: "quantize",
        run: |graph, c| {
            let evaluates = c.options.evaluate;
            quantize::run(graph, c.options.base, evaluates).map_err(|e| failed("quantize", e))
        },
    },
    // After canonical, which removes unused nodes: without an optimizer the last step of a gradient
    // is unused. After microbatch: there is one update per step.
    GraphPass {
        name: "optimizer",
        run: |graph, c| {
            optimizer::run(graph, c.options.attach()).map_err(|e| failed("optimizer", e))
        },
    },
    // After optimizer, when all nodes exist. Before order, which places what is left.
    GraphPass {
        name: "fuse",
        run: |graph, c| {
            if c.options.kernels == Kernels::Generated {
                fuse::run_where_faster(graph, c.cost);
            }
            Ok(())
        },
    },
    // Last: updates have a place only once they exist.
    GraphPass {
        name: "order",
        run: |graph, c| {
            order::run(graph, c.options.update);
            if let Some(parts) = &c.options.parts {
                order::in_parts(graph, parts);
            }
            Ok(())
        },
    },
];

/// Schedule passes up to the point where places are needed.
pub static LINES: [SchedulePass; 5] = [
    // The only place that inserts reruns, and copies from and to the device.
    SchedulePass {
        name: "apply",
        run: |s, c| {
            s.schedule = apply::run(c.problem, c.decisions, c.named)?;
            s.schedule.pools[DEVICE].limit = c.budget;
            Ok(())
        },
    },
    // Before prefetch: shared bytes leave more room to copy in early.
    SchedulePass {
        name: "inplace",
        run: |s, c| {
            inplace::run(c.problem.graph, &mut s.schedule);
            Ok(())
        },
    },
    // Before prefetch: copies in pass none that is before them in the queue.
    SchedulePass {
        name: "returns",
        run: |s, c| {
            returns::run(c.problem, &mut s.schedule);
            Ok(())
        },
    },
    // Before allocate: a buffer lives from the start of its copy.
    SchedulePass {
        name: "prefetch",
        run: |s, c| {
            prefetch::run(c.problem, c.decisions, &mut s.schedule);
            Ok(())
        },
    },
    // After prefetch: when a value leaves the host follows from when its copy to the device begins.
    SchedulePass {
        name: "spill",
        run: |s, c| spill::run(c.problem, &mut s.schedule),
    },
];

/// Schedule passes that assign places. They never fail.
pub static PLACES: [SchedulePass; 2] = [
    // Before sync: reuse of bytes is a conflict like any other.
    SchedulePass {
        name: "allocate",
        run: |s, c| {
            let Problem { graph, unit, .. } = *c.problem;
            let plan = match c.lives {
                Some(lives) => alloc::allocate_at(&s.schedule, lives, unit),
                None => {
                    let lives = lives(c.problem, &s.schedule, c.variant);
                    alloc::allocate_at(&s.schedule, &lives, unit)
                }
            };
            s.plan = Some(alloc::states_first(graph, &s.schedule, &plan, unit));
            Ok(())
        },
    },
    // Last: the only place that writes `after`.
    SchedulePass {
        name: "sync",
        run: |s, c| {
            let plan = s.plan.as_ref().expect("sync should come after allocate");
            sync::run(c.problem.graph, &mut s.schedule, plan);
            Ok(())
        },
    },
];

/// All graph passes, in order.
pub fn graph_passes() -> impl Iterator<Item = &'static GraphPass> {
    SHARED.iter().chain(&PER_VARIANT)
}

/// All schedule passes, in order.
pub fn schedule_passes() -> impl Iterator<Item = &'static SchedulePass> {
    LINES.iter().chain(&PLACES)
}

/// Names of all passes, in order, `decide` among them.
pub fn names() -> Vec<&'static str> {
    graph_passes()
        .map(|pass| pass.name)
        .chain(["decide"])
        .chain(schedule_passes().map(|pass| pass.name))
        .collect()
}

pub(crate) fn failed(pass: &'static str, error: impl ToString) -> Error {
    Error::Graph {
        pass,
        message: error.to_string(),
    }
}
