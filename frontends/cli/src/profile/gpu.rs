//! A profile of a GPU: the step runs there, traced, and the device's clock gives the time of each
//! op. The rest of the machine is measured beside the step.

use super::{LONGEST, Measured, PART, ROUNDS, SHORTEST, Step, failure, finish};
use crate::args::{Compiling, ProfileArgs};
use crate::failure::Failure;
use crate::model::{self, Model};
use crate::observe::Dumps;
use artifact::Artifact;
use codegen::Target;
use gpu::Here;
use ir::schedule::{InstrKind, Why};
use ir::{Id, Instr};
use passes::graph::optimizer::{HYPER, Optimizer};
use passes::pipeline::{Compiled, Kernels};
use runtime::profile::{self, Micros, Times};
use runtime::{Machine, Options, StateInit};
use std::collections::BTreeMap;
use std::time::Instant;

/// Values of states that matter to no time.
const INIT: StateInit = StateInit {
    seed: 1,
    std: Some(0.02),
};

/// Measures a GPU of this machine.
pub(super) fn run(args: &ProfileArgs, optimizer: Optimizer, number: u32) -> Result<(), Failure> {
    if args.kernels == Some(Kernels::Plain) {
        return Err(Failure::Input(
            "--kernels plain: only generated kernels run on a GPU".into(),
        ));
    }
    if args.reuse.is_some() {
        return Err(Failure::Input(
            "--reuse: the ops of a GPU are measured in a step, all at once".into(),
        ));
    }
    if args.link.is_some() {
        return Err(Failure::Input(
            "--link: the link of a GPU is measured as it is".into(),
        ));
    }
    let here = Here::find(number)?;
    let model = model::read(&args.model.model, &args.model.reading, &args.forward)?;
    let start = Instant::now();
    let rounds = args.repeat.unwrap_or(ROUNDS.1);
    let on = |kernels: Kernels| Traced::new(args, optimizer, &model, &here, kernels);
    // Ops in groups are measured separately too, and before: two steps may not fit at a time.
    let apart = {
        let mut apart = on(Kernels::Plain)?;
        let times = apart.times(rounds)?;
        (apart.step(), times)
    };
    let mut whole = on(Kernels::Generated)?;
    let times = whole.times(rounds)?;
    let sum = |of: fn(&Micros) -> f64| times.micros.iter().flatten().map(of).sum::<f64>();
    let (median, fastest) = (sum(|op| op.median), sum(|op| op.fastest));
    let micros = if args.fastest { fastest } else { median };
    let seconds = (micros / 1e6 / PART).clamp(SHORTEST, LONGEST);
    whole.write()?;
    let figures = profile::gpu(&mut whole.machine, number, seconds).map_err(failure)?;
    let measured = Measured {
        args,
        step: &whole.step(),
        times: &times,
        apart: Some(apart),
        figures: &figures,
        micros,
        fastest,
        n_run: times.micros.len(),
        rounds,
        known: None,
        host_is_device: false,
    };
    finish(&measured, &here.device, start)
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
    fn new(
        args: &ProfileArgs,
        optimizer: Optimizer,
        model: &Model,
        here: &Here,
        kernels: Kernels,
    ) -> Result<Traced, Failure> {
        let compiling = Compiling {
            optimizer: Some(optimizer),
            precision: args.precision,
            update: args.update,
            kernels: Some(kernels),
            forward: args.forward.clone(),
            ..Compiling::default()
        };
        let machine = model::machine_on(&compiling, Some(here.device.clone()))?;
        let mut compiled = model::compile(&model.graph, &compiling, &machine, Dumps::Stderr)?;
        // The graph has no groups then, but its ops still run by generated kernels.
        compiled.options.kernels = Kernels::Generated;
        let target = here.device.sm.and_then(Target::gpu);
        let artifact = codegen::emit(&compiled, &BTreeMap::new(), target)?;
        let launches = launches(&compiled, &artifact);
        let inputs = inputs(&artifact, optimizer);
        let pool_bytes = artifact.pools.iter().map(|pool| pool.bytes).sum();
        let options = Options {
            trace: true,
            gpu: here.found.number,
            ..Options::default()
        };
        let mut machine = Machine::new(artifact, options).map_err(failure)?;
        machine.initialise(&INIT).map_err(failure)?;
        Ok(Traced {
            compiled,
            machine,
            launches,
            inputs,
            pool_bytes,
        })
    }

    fn write(&mut self) -> Result<(), Failure> {
        let mut inputs = self.inputs.iter();
        let written = inputs.try_for_each(|(name, bytes)| self.machine.write_input(name, bytes));
        written.map_err(failure)
    }

    /// The times of the launches, after one step to warm up.
    fn times(&mut self, rounds: u32) -> Result<Times, Failure> {
        let mut rows: Vec<Vec<f64>> = vec![vec![]; self.launches.len()];
        let mut largest_op = 0;
        for round in 0..=rounds {
            self.write()?;
            let step = self.machine.step().map_err(failure)?.step;
            if round == 0 {
                continue;
            }
            let spans = self.machine.trace().map_err(failure)?;
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
