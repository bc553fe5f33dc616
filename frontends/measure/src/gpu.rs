//! A profile of a GPU: the step runs there, traced, and the device's clock gives the time of each
//! op. The rest of the machine is measured beside the step.

use crate::step::Step;
use crate::{Error, Measured, ROUNDS, Request, Timed, known, seconds, sums};
use ::gpu::Here;
use artifact::Artifact;
use codegen::kernels::Target;
use ir::schedule::{InstrKind, Why};
use ir::{Id, Instr};
use passes::cost::Roofline;
use passes::decide::Planner;
use passes::graph::optimizer::{HYPER, Optimizer};
use passes::pipeline::{self, Budget, Compiled, Kernels, Options};
use runtime::profile::{self, Micros, Times};
use runtime::{Machine, StateInit};
use std::collections::BTreeMap;
use std::time::Instant;

/// Values of states that matter to no time.
const INIT: StateInit = StateInit {
    seed: 1,
    std: Some(0.02),
};

/// Measures a GPU of this machine, whose device is that of the request. All ops are measured, at
/// once; a known profile adds those that the step lacks.
///
/// # Errors
/// The step cannot be compiled or run, the known profile is of another machine, or the request asks
/// for what no GPU has: plain kernels, a slower link.
pub fn gpu(request: &Request<'_>, here: &Here) -> Result<Measured, Error> {
    let refused = |why: &str| Err(Error::Request(why.into()));
    if request.options.kernels == Kernels::Plain {
        return refused("plain kernels do not run on a GPU: only generated ones do");
    }
    if request.link.is_some() {
        return refused("the link of a GPU is measured as it is: it cannot be slowed down");
    }
    let known = request.known;
    known.map_or(Ok(()), |profile| known::check(profile, request))?;
    let start = Instant::now();
    let rounds = request.repeat.unwrap_or(ROUNDS.1);
    // Ops in groups are measured separately too, and before: two steps may not fit at a time.
    let apart = {
        let mut apart = Traced::new(request, here, Kernels::Plain)?;
        let times = apart.times(rounds)?;
        (apart.step(), times)
    };
    let mut whole = Traced::new(request, here, Kernels::Generated)?;
    let times = whole.times(rounds)?;
    let (micros, _) = sums(&times, request.fastest);
    whole.write()?;
    let figures = profile::gpu(&mut whole.machine, here.found.number, seconds(micros))?;
    let all = Timed {
        request,
        step: &whole.step(),
        times: &times,
        apart: Some(apart),
        figures: &figures,
        rounds,
        is_processor: false,
    };
    Ok(all.measured(times.micros.len(), start))
}

/// A step on the GPU.
struct Traced {
    compiled: Compiled,
    machine: Machine,
    /// The device's launches that are no repetition: the command's number and the node.
    launches: Vec<(u32, ir::Node)>,
    /// What is written before each step.
    inputs: Vec<(String, Vec<u8>)>,
    pool_bytes: u64,
}

impl Traced {
    fn new(request: &Request<'_>, here: &Here, kernels: Kernels) -> Result<Traced, Error> {
        let optimizer = request.options.optimizer;
        let cost = Roofline::new(&here.device);
        let compile = |planner: Planner| {
            let options = Options {
                budget: Budget::Device,
                host: None,
                planner,
                ..request.options(kernels)
            };
            let graph = request.graph.clone();
            pipeline::compile(graph, &options, &here.device, &cost, &mut |_| ())
        };
        // Only if not everything fits on the device is another plan measured: it may run updates on
        // the host, whose time on the device is then unknown.
        let mut compiled = match compile(Planner::Keep) {
            Err(pipeline::Error::Infeasible(_)) => compile(Planner::Auto),
            compiled => compiled,
        }?;
        // The graph has no groups then, but its ops still run by generated kernels.
        compiled.options.kernels = Kernels::Generated;
        let target = here.device.sm.and_then(Target::gpu);
        let artifact = codegen::emit(&compiled, &BTreeMap::new(), target)?;
        let launches = launches(&compiled, &artifact);
        let inputs = inputs(&artifact, optimizer);
        let pool_bytes = artifact.pools.iter().map(|pool| pool.bytes).sum();
        let options = runtime::Options {
            trace: true,
            gpu: here.found.number,
            ..runtime::Options::default()
        };
        let mut machine = Machine::new(artifact, options)?;
        machine.initialise(&INIT)?;
        Ok(Traced {
            compiled,
            machine,
            launches,
            inputs,
            pool_bytes,
        })
    }

    fn write(&mut self) -> Result<(), Error> {
        let mut inputs = self.inputs.iter();
        let written = inputs.try_for_each(|(name, bytes)| self.machine.write_input(name, bytes));
        Ok(written?)
    }

    /// The times of the launches, after one step to warm up.
    fn times(&mut self, rounds: u32) -> Result<Times, Error> {
        let mut rows: Vec<Vec<f64>> = vec![vec![]; self.launches.len()];
        let mut largest_op = 0;
        for round in 0..=rounds {
            self.write()?;
            let step = self.machine.step()?.step;
            if round == 0 {
                continue;
            }
            let spans = self.machine.trace()?;
            let now = spans.iter().filter(|span| span.step == step);
            let taken: BTreeMap<u32, (f64, u64)> = now
                .map(|span| (span.command, (span.duration_us, span.bytes)))
                .collect();
            for ((command, _), row) in self.launches.iter().zip(&mut rows) {
                if let Some((micros, bytes)) = taken.get(command) {
                    row.push(*micros);
                    largest_op = largest_op.max(*bytes);
                }
            }
        }
        let n_rounds = rows.iter().map(Vec::len).min().unwrap_or(0);
        let sum = |round: usize| rows.iter().map(|row| row[round]).sum::<f64>();
        let fastest = (0..n_rounds).min_by(|&a, &b| sum(a).total_cmp(&sum(b)));
        let micros = |row: &Vec<f64>| match fastest {
            Some(fastest) => Ok(Micros {
                median: median(row),
                fastest: row[fastest],
                least: row.iter().copied().fold(f64::INFINITY, f64::min),
            }),
            None => Err("it was not run".to_string()),
        };
        Ok(Times {
            micros: rows.iter().map(micros).collect(),
            bytes: self.pool_bytes,
            largest_op,
        })
    }

    /// What the report needs of it.
    fn step(&self) -> Step {
        Step {
            compiled: self.compiled.clone(),
            ops: vec![],
            nodes: self.launches.iter().map(|&(_, node)| node).collect(),
            keys: vec![],
            objects: vec![],
        }
    }
}

/// The commands that run a node on the device for the first time in a step. A command's line is the
/// schedule's.
fn launches(compiled: &Compiled, artifact: &Artifact) -> Vec<(u32, ir::Node)> {
    let schedule = &compiled.program.schedule;
    let node = |(number, command): (u32, &artifact::Command)| {
        let is_launch = matches!(command.kind, artifact::CommandKind::Launch { .. });
        let data = &schedule.instrs[Instr::new(command.line as usize)];
        let stream = &artifact.streams[command.stream as usize];
        match &data.kind {
            InstrKind::Run { node, .. }
                if is_launch && data.why != Why::Recompute && stream == "compute" =>
            {
                Some((number, *node))
            }
            InstrKind::Run { .. } | InstrKind::Copy { .. } => None,
        }
    };
    (0..).zip(&artifact.commands).filter_map(node).collect()
}

/// Numbers that the step accepts.
fn inputs(artifact: &Artifact, optimizer: Optimizer) -> Vec<(String, Vec<u8>)> {
    let below = profile::index_bound(artifact);
    let bytes = |input: &artifact::Binding| match input.name.as_str() {
        HYPER => {
            let options = optimizer.options().iter();
            options.flat_map(|(_, value)| value.to_le_bytes()).collect()
        }
        _ => {
            let bytes = input.operand.bytes().unwrap_or(0) as usize;
            profile::drawn(input.operand.dtype, bytes, below)
        }
    };
    let inputs = artifact.inputs.iter();
    inputs
        .map(|input| (input.name.clone(), bytes(input)))
        .collect()
}

/// The median of some times; 0 if there are none.
fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    match times.len() {
        0 => 0.0,
        n => (times[(n - 1) / 2] + times[n / 2]) / 2.0,
    }
}
