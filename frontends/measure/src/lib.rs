//! Measures the ops of a step, the link and their interference: the profile by which times are
//! predicted (`--profile` of the command line, `profile=` of Python).

mod gpu;
mod known;
mod step;

pub use gpu::gpu;

use ir::graph::Phase;
use ir::{Device, Graph};
use passes::cost::profile::{LinkFigures, OpFigures, Profile, VERSION, key};
use passes::cost::{Cost, Lane, Roofline};
use passes::decide::Planner;
use passes::pipeline::{self, Budget, Kernels, Options};
use runtime::profile::{Figures, Micros, Op, Replay, Times};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use step::Step;
use thiserror::Error;

/// Default of [`Request::memory`]: four times a large last-level cache, so that operands which a
/// replay folds are cold in the step too.
const MEMORY: u64 = 256 << 20;
/// The shortest and the longest measurement of the machine, seconds. A measurement takes a part of
/// a step's time, within these limits. There are about sixty.
const SHORTEST: f64 = 0.006;
const LONGEST: f64 = 0.1;
const PART: f64 = 120.0;
/// The fewest and the most rounds, if the user gives no number. In between, ops take as long as
/// this many steps, and the ops of groups, measured apart, as this many.
const ROUNDS: (u32, u32) = (2, 3);
const STEPS: f64 = 2.0;
const STEPS_APART: f64 = 0.7;

/// What to measure, and how.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The model's graph, before any pass.
    pub graph: &'a Graph,
    /// The options of the plans that the profile is for. Those that choose a plan are not read:
    /// nothing has to fit, and a plan only gives the order and the places of ops.
    pub options: Options,
    /// The machine that the profile describes.
    pub device: &'a Device,
    /// Slows copies between device and host down to this rate in each direction, bytes per second.
    pub link: Option<f64>,
    /// How often each op runs; `None`: so often that all takes about as long as four steps.
    pub repeat: Option<u32>,
    /// The times are those of the fastest round, not medians over rounds.
    pub fastest: bool,
    /// Memory limit for the measured ops, bytes; `None`: 256 MiB.
    pub memory: Option<u64>,
    /// A profile of this machine: what it has is not measured again.
    pub known: Option<&'a Profile>,
}

impl Request<'_> {
    /// The options of the measured step: everything is kept on the device, in memory of its own.
    fn options(&self, kernels: Kernels) -> Options {
        Options {
            parts: None,
            homes: None,
            planner: Planner::Keep,
            budget: Budget::Bytes(u64::MAX / 2),
            host: Some(u64::MAX / 2),
            kernels,
            ..self.options.clone()
        }
    }
}

/// Why nothing was measured.
#[derive(Debug, Error)]
pub enum Error {
    /// The step was not compiled.
    #[error(transparent)]
    Compile(Box<pipeline::Error>),
    /// Its kernels were not generated.
    #[error(transparent)]
    Emit(#[from] codegen::Error),
    /// It did not run.
    #[error(transparent)]
    Run(#[from] runtime::Error),
    /// The request is not possible.
    #[error("{0}")]
    Request(String),
}

impl From<pipeline::Error> for Error {
    fn from(error: pipeline::Error) -> Error {
        Error::Compile(Box::new(error))
    }
}

/// How far a measurement has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// This many runs of ops begin.
    Runs(u64),
    /// An op has run.
    Ran,
    /// The link and the interference are measured.
    Machine,
}

/// A profile, and what reports say beside it.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The profile.
    pub profile: Profile,
    /// Lines of the measured step.
    pub n_lines: usize,
    /// How many ops of the step were run.
    pub n_run: usize,
    /// Ops that could not be run, each once, with the reason.
    pub refused: BTreeMap<String, String>,
    /// The time of the step's ops in the fastest round, µs.
    pub fastest_micros: f64,
    /// Memory of the ops, and of the largest alone, bytes.
    pub window_bytes: u64,
    /// The largest op's memory, bytes.
    pub largest_op_bytes: u64,
    /// Memory of the copies and the updates, bytes.
    pub machine_bytes: u64,
}

/// Measures this machine's processor. `progress` is told how far it has come.
///
/// # Errors
/// The step cannot be compiled or run, or the known profile is of another machine.
pub fn processor(
    request: &Request<'_>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Measured, Error> {
    let kernels = request.options.kernels;
    let target = codegen::target(kernels)?;
    let known = request.known;
    known.map_or(Ok(()), |profile| known::check(profile, request))?;
    let target = target.as_ref();
    let step = Step::new(request, kernels, target)?;
    // Ops in groups are measured separately too: `fuse` needs to know which is faster.
    let apart = target.map(|target| Step::new(request, Kernels::Plain, Some(target)));
    let apart = apart.transpose()?;
    let start = Instant::now();
    let roofline = Roofline::new(request.device);
    let mut found: BTreeMap<String, Found> = known.into_iter().flat_map(known::found).collect();
    let sample = Sample::new(&step, |key| found.contains_key(key));
    let rounds = sample.rounds(request.repeat, &step, &roofline, STEPS);
    // An op of a group that is also a line of the step is measured there.
    let in_step: BTreeSet<&String> = step.keys.iter().collect();
    let apart = apart.map(|apart| {
        let is_known = |key: &String| found.contains_key(key) || in_step.contains(key);
        let sample = Sample::new(&apart, is_known);
        let rounds = sample.rounds(request.repeat, &apart, &roofline, STEPS_APART);
        (sample, apart, rounds)
    });
    let n_runs = |sample: &Sample, rounds: u32| sample.ops.len() as u64 * (u64::from(rounds) + 1);
    let n_apart = apart
        .as_ref()
        .map_or(0, |(sample, _, rounds)| n_runs(sample, *rounds));
    progress(Progress::Runs(n_runs(&sample, rounds) + n_apart));
    let mut replayed = |sample: &Sample, step: &Step, rounds: u32| {
        let memory = request.memory.unwrap_or(MEMORY);
        let ops: Vec<Op> = sample.ops.iter().map(|&i| step.ops[i].clone()).collect();
        let mut replay = Replay::new(&ops, &step.objects, &step.contents(), memory)?;
        let times = replay.run(rounds as usize, &mut || {
            progress(Progress::Ran);
            true
        });
        sample.note(step, &times, &mut found);
        Ok::<_, Error>((replay, step.times(times, &found)))
    };
    // The figures of the machine need the replay of the step, so it comes last.
    let apart = apart
        .map(|(sample, step, rounds)| {
            let (_, times) = replayed(&sample, &step, rounds)?;
            Ok::<_, Error>((step, times))
        })
        .transpose()?;
    let (replay, times) = replayed(&sample, &step, rounds)?;
    progress(Progress::Machine);
    let link = request.link.map(|bandwidth| {
        let micros = request.device.link_micros.min(1e6);
        (bandwidth, Duration::from_secs_f64(micros / 1e6))
    });
    let (micros, _) = sums(&times, request.fastest);
    let figures = match known {
        Some(known) => known::figures(known),
        None => runtime::profile::machine(&replay, &sample.lines(&step), link, seconds(micros))?,
    };
    let all = Timed {
        request,
        step: &step,
        times: &times,
        apart,
        figures: &figures,
        rounds,
        is_processor: true,
    };
    Ok(all.measured(sample.ops.len(), start))
}

/// The sums of the ops' times in a step, µs: of the chosen times, and of the fastest round.
fn sums(times: &Times, fastest: bool) -> (f64, f64) {
    let sum = |of: fn(&Micros) -> f64| times.micros.iter().flatten().map(of).sum::<f64>();
    let least = sum(|op| op.fastest);
    let chosen = if fastest { least } else { sum(|op| op.median) };
    (chosen, least)
}

/// How long each figure of the machine is measured, beside a step of so many µs.
fn seconds(micros: f64) -> f64 {
    (micros / 1e6 / PART).clamp(SHORTEST, LONGEST)
}

/// What is known of an op, by its key: its time, or why it could not be run.
type Found = Result<Micros, String>;

/// The ops of a step that are run: of equal ones the middle one, and what runs before each, because
/// it leaves its results in the cache.
struct Sample {
    /// Their numbers in the step, in order.
    ops: Vec<usize>,
    /// Whether each counts.
    is_chosen: Vec<bool>,
}

impl Sample {
    /// The sample of what is not known yet.
    fn new(step: &Step, is_known: impl Fn(&String) -> bool) -> Sample {
        let mut of_key: BTreeMap<&String, Vec<usize>> = BTreeMap::new();
        let keys = step.keys.iter().enumerate();
        for (i, key) in keys.filter(|(_, key)| !is_known(key)) {
            of_key.entry(key).or_default().push(i);
        }
        let chosen: BTreeSet<usize> = of_key.values().map(|ops| ops[ops.len() / 2]).collect();
        let before = chosen.iter().filter_map(|i| i.checked_sub(1));
        let ops: BTreeSet<usize> = chosen.iter().copied().chain(before).collect();
        Sample {
            is_chosen: ops.iter().map(|i| chosen.contains(i)).collect(),
            ops: ops.into_iter().collect(),
        }
    }

    /// How many rounds take about as long as `steps` steps, one more to warm up included.
    fn rounds(&self, given: Option<u32>, step: &Step, roofline: &Roofline, steps: f64) -> u32 {
        let graph = &step.compiled.program.graph;
        let time = |i: usize| roofline.run(graph, step.nodes[i]);
        let whole: f64 = (0..step.nodes.len()).map(time).sum();
        let share = self.ops.iter().map(|&i| time(i)).sum::<f64>() / whole.max(1e-9);
        let most = (steps / share.max(1e-9) - 1.0) as u32;
        given.unwrap_or(most.clamp(ROUNDS.0, ROUNDS.1))
    }

    /// Adds the times of a replay to what is known.
    fn note(&self, step: &Step, times: &Times, found: &mut BTreeMap<String, Found>) {
        for ((&i, &is_chosen), micros) in self.ops.iter().zip(&self.is_chosen).zip(&times.micros) {
            if is_chosen {
                found.insert(step.keys[i].clone(), micros.clone());
            }
        }
    }

    /// The lines of the step, as numbers of the sample's ops.
    fn lines(&self, step: &Step) -> Vec<usize> {
        let of_key: BTreeMap<&str, usize> = self
            .ops
            .iter()
            .enumerate()
            .map(|(at, &i)| (step.keys[i].as_str(), at))
            .collect();
        let lines = step.keys.iter();
        lines
            .filter_map(|key| of_key.get(key.as_str()).copied())
            .collect()
    }
}

/// Everything that was measured.
struct Timed<'a> {
    request: &'a Request<'a>,
    step: &'a Step,
    times: &'a Times,
    /// The step without groups.
    apart: Option<(Step, Times)>,
    figures: &'a Figures,
    /// How often each op ran.
    rounds: u32,
    /// The measured device is this machine's processor.
    is_processor: bool,
}

impl Timed<'_> {
    fn measured(&self, n_run: usize, start: Instant) -> Measured {
        let (micros, fastest_micros) = sums(self.times, self.request.fastest);
        Measured {
            profile: self.profile(micros, start.elapsed().as_secs_f64()),
            n_lines: self.step.nodes.len(),
            n_run,
            refused: self.refused(),
            fastest_micros,
            window_bytes: self.times.bytes,
            largest_op_bytes: self.times.largest_op,
            machine_bytes: self.figures.bytes,
        }
    }

    fn profile(&self, micros: f64, seconds: f64) -> Profile {
        let device = self.request.device;
        let graph = &self.step.compiled.program.graph;
        let mut ops = self.figures_of(self.step, self.times);
        let roofline = Roofline::new(device);
        // Measured and roofline times: of products, and of everything else.
        let mut sums = [[0.0; 2]; 2];
        for (&node, micros) in self.step.nodes.iter().zip(&self.times.micros) {
            let Ok(micros) = micros else { continue };
            let class = usize::from(!passes::cost::is_product(graph, node));
            sums[class][0] += self.taken(micros);
            sums[class][1] += roofline.run(graph, node);
        }
        for (key, figures) in self
            .apart
            .iter()
            .flat_map(|(step, times)| self.figures_of(step, times))
        {
            ops.entry(key).or_insert(OpFigures {
                count: 0,
                ..figures
            });
        }
        for (key, figures) in self.request.known.iter().flat_map(|known| &known.ops) {
            let figures = OpFigures {
                count: 0,
                ..*figures
            };
            ops.entry(key.clone()).or_insert(figures);
        }
        let factor = |[measured, modelled]: [f64; 2]| match 0.0 < measured && 0.0 < modelled {
            true => (measured / modelled).clamp(1e-6, 1e6),
            false => 1.0,
        };
        let figures = self.figures;
        let mut keeps: BTreeMap<String, BTreeMap<String, f64>> = BTreeMap::new();
        for (a, lane) in Lane::MEASURED.into_iter().enumerate() {
            for (b, other) in Lane::MEASURED
                .into_iter()
                .enumerate()
                .filter(|&(b, _)| a != b)
            {
                keeps
                    .entry(lane.name().into())
                    .or_default()
                    .insert(other.name().into(), figures.keeps[a][b]);
            }
        }
        Profile {
            version: VERSION,
            device: device.name.clone(),
            machine: first_line("/proc/sys/kernel/hostname").unwrap_or_else(|| "unknown".into()),
            cpu: cpu(),
            cores: cores(),
            model: graph.name.clone(),
            kernels: self.request.options.kernels,
            repeat: self.rounds,
            profiling_seconds: seconds,
            step_micros: micros,
            peak_bytes: self.times.bytes + figures.bytes,
            guess_factor: sums.map(factor),
            handoff_micros: figures.handoff,
            host_bandwidth: figures.host_bandwidth.max(1.0),
            link: LinkFigures {
                paced: self.request.link,
                in_bandwidth: figures.link_bandwidth[0],
                out_bandwidth: figures.link_bandwidth[1],
                micros: figures.link_micros,
                copy_bandwidth: figures.copy_bandwidth,
            },
            keeps,
            ops,
        }
    }

    /// The chosen time of an op.
    fn taken(&self, micros: &Micros) -> f64 {
        if self.request.fastest {
            micros.fastest
        } else {
            micros.median
        }
    }

    /// Each op's figures.
    fn figures_of(&self, step: &Step, times: &Times) -> BTreeMap<String, OpFigures> {
        let graph = &step.compiled.program.graph;
        let mut ops: BTreeMap<String, OpFigures> = BTreeMap::new();
        for (&node, micros) in step.nodes.iter().zip(&times.micros) {
            let Ok(micros) = micros else { continue };
            let none = OpFigures {
                micros: 0.0,
                least_micros: Some(0.0),
                host_micros: None,
                count: 0,
            };
            let op = ops.entry(key(graph, node)).or_insert(none);
            // The mean, so that the sum over the step's lines is the step's time.
            op.count += 1;
            let n = f64::from(op.count);
            op.micros += (self.taken(micros) - op.micros) / n;
            op.least_micros = op
                .least_micros
                .map(|least| least + (micros.least - least) / n);
            let is_update = graph.nodes[node].phase == Phase::Optimizer;
            op.host_micros = (self.is_processor && is_update).then_some(op.micros);
        }
        ops
    }

    /// Ops that could not be run, each once, with the reason.
    fn refused(&self) -> BTreeMap<String, String> {
        let graph = &self.step.compiled.program.graph;
        let ops = self.step.nodes.iter().zip(&self.times.micros);
        ops.filter_map(|(&node, micros)| Some((key(graph, node), micros.as_ref().err()?.clone())))
            .collect()
    }
}

fn first_line(path: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.lines().next()?.trim().to_string())
}

fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| n.get() as u32)
}

fn cpu() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    model.map_or_else(
        || std::env::consts::ARCH.to_string(),
        |(_, model)| model.trim().to_string(),
    )
}
