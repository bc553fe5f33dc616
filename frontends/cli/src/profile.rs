//! `lighterage profile`: measures the ops of a step, the link and their interference, for
//! `--profile`.

mod gpu;
mod known;

use crate::args::{Compiling, ProfileArgs};
use crate::data::{check_writable, save_atomically};
use crate::failure::Failure;
use crate::model;
use crate::observe::Dumps;
use crate::out::{self, out};
use crate::size::{micros, short};
use artifact::Object;
use codegen::kernels::{Generated, Target};
use indicatif::{ProgressBar, ProgressStyle};
use ir::graph::{Def, Phase};
use ir::schedule::{InstrKind, Why};
use ir::{Graph, Loc, StateKind, Value};
use passes::cost::profile::{LinkFigures, OpFigures, Profile, VERSION, key};
use passes::cost::{Cost, Lane, Roofline};
use passes::decide::Planner;
use passes::graph::optimizer::{HYPER, Optimizer};
use passes::graph::precision::Precision;
use passes::pipeline::{Budget, Compiled, Kernels};
use runtime::profile::{Content, Figures, Micros, Op, Replay, Times};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Rows of the report's tables.
const ROWS: usize = 12;
/// Default of `--memory`: four times a large last-level cache, so that operands which a replay
/// folds are cold in the step too.
const MEMORY: u64 = 256 << 20;
/// A profile is reported as disturbed if the sum of its medians is larger than the time of the
/// fastest round by this factor.
const DISTURBED: f64 = 1.15;
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

/// Runs the command.
pub(crate) fn run(args: &ProfileArgs) -> Result<(), Failure> {
    check_writable("--output", &args.output)?;
    let optimizer = args.optimizer.unwrap_or(Optimizer::AdamW);
    if let Some(number) = args.device.as_deref().and_then(::gpu::number) {
        return gpu::run(args, optimizer, number?);
    }
    let kernels = args.kernels.unwrap_or_default();
    let target = codegen::target(kernels)?;
    if args.precision == Some(Precision::Tf32) {
        let why = "--precision tf32: a profile has the times of f32 products; leave it out";
        return Err(Failure::Input(why.into()));
    }
    let compiling = Compiling {
        optimizer: Some(optimizer),
        precision: args.precision,
        update: args.update,
        kernels: Some(kernels),
        device: args.device.clone(),
        link: args.link,
        // Nothing has to fit: the plan only gives the order and the places of ops.
        planner: Some(Planner::Keep),
        budget: Some(Budget::Bytes(u64::MAX / 2)),
        host: Some(u64::MAX / 2),
        forward: args.forward.clone(),
        ..Compiling::default()
    };
    let machine = model::machine(&compiling)?;
    let model = model::read(&args.model.model, &args.model.reading, &args.forward)?;
    let step = Step::new(&model.graph, &compiling, &machine, target.as_ref())?;
    // Ops in groups are measured separately too: `fuse` needs to know which is faster.
    let plain = Compiling {
        kernels: Some(Kernels::Plain),
        ..compiling.clone()
    };
    let apart = target
        .as_ref()
        .map(|_| Step::new(&model.graph, &plain, &machine, target.as_ref()))
        .transpose()?;
    let known = args.reuse.as_deref();
    let known = known.map(|file| known::read(file, args, &machine.device));
    let known = known.transpose()?;
    let start = Instant::now();
    let roofline = Roofline::new(&machine.device);
    let mut found: BTreeMap<String, Found> = known.iter().flat_map(known::found).collect();
    let sample = Sample::new(&step, |key| found.contains_key(key));
    let rounds = sample.rounds(args.repeat, &step, &roofline, STEPS);
    // An op of a group that is also a line of the step is measured there.
    let in_step: BTreeSet<&String> = step.keys.iter().collect();
    let apart = apart.map(|apart| {
        let is_known = |key: &String| found.contains_key(key) || in_step.contains(key);
        let sample = Sample::new(&apart, is_known);
        let rounds = sample.rounds(args.repeat, &apart, &roofline, STEPS_APART);
        (sample, apart, rounds)
    });
    let n_runs = |sample: &Sample, rounds: u32| sample.ops.len() as u64 * (u64::from(rounds) + 1);
    let n_apart = apart
        .as_ref()
        .map_or(0, |(sample, _, rounds)| n_runs(sample, *rounds));
    let bar = bar(n_runs(&sample, rounds) + n_apart);
    let mut replayed = |sample: &Sample, step: &Step, rounds: u32| {
        let memory = args.memory.unwrap_or(MEMORY);
        let contents = contents(&step.compiled, optimizer);
        let ops: Vec<Op> = sample.ops.iter().map(|&i| step.ops[i].clone()).collect();
        let mut replay = Replay::new(&ops, &step.objects, &contents, memory).map_err(failure)?;
        let times = replay.run(rounds as usize, &mut || {
            if let Some(bar) = &bar {
                bar.inc(1);
            }
            true
        });
        sample.note(step, &times, &mut found);
        Ok::<_, Failure>((replay, step.times(times, &found)))
    };
    // The figures of the machine need the replay of the step, so it comes last.
    let apart = apart
        .map(|(sample, step, rounds)| {
            let (_, times) = replayed(&sample, &step, rounds)?;
            Ok::<_, Failure>((step, times))
        })
        .transpose()?;
    let (replay, times) = replayed(&sample, &step, rounds)?;
    let sum = |of: fn(&Micros) -> f64| times.micros.iter().flatten().map(of).sum::<f64>();
    let (median, fastest) = (sum(|op| op.median), sum(|op| op.fastest));
    let micros = if args.fastest { fastest } else { median };
    if let Some(bar) = &bar {
        bar.set_message("the machine");
    }
    let link = args.link.map(|bandwidth| {
        (
            bandwidth,
            Duration::from_secs_f64(machine.device.link_micros.min(1e6) / 1e6),
        )
    });
    let seconds = (micros / 1e6 / PART).clamp(SHORTEST, LONGEST);
    let figures = match &known {
        Some(known) => known::figures(known),
        None => runtime::profile::machine(&replay, &sample.lines(&step), link, seconds)
            .map_err(failure)?,
    };
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    let measured = Measured {
        args,
        step: &step,
        times: &times,
        apart,
        figures: &figures,
        micros,
        fastest,
        n_run: sample.ops.len(),
        rounds,
        known: known.as_ref(),
        host_is_device: true,
    };
    finish(&measured, &machine.device, start)
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

/// Writes the file and reports.
fn finish(measured: &Measured<'_>, device: &ir::Device, start: Instant) -> Result<(), Failure> {
    let &Measured {
        args,
        micros,
        fastest,
        ..
    } = measured;
    let profile = measured.profile(device, start.elapsed().as_secs_f64());
    let text = profile.to_toml().map_err(|e| Failure::Bug(e.to_string()))?;
    save_atomically(&args.output, &[text.as_bytes()])?;
    if DISTURBED * fastest < micros {
        let more = 100.0 * (micros / fastest.max(1e-3) - 1.0);
        out::note(&format!(
            "note: ops took {more:.0}% more than in the fastest round: the machine is busy, and \
             predictions will be as if it stayed so; --fastest predicts it undisturbed"
        ));
    }
    if args.json {
        out!("{}", measured.json(&profile));
    } else {
        out::text(&measured.report(&profile));
        out!(
            "\nwrote {}, {}",
            args.output.display(),
            crate::data::file_size(&args.output)
        );
    }
    Ok(())
}

fn failure(error: runtime::Error) -> Failure {
    Failure::System(error.to_string())
}

fn bar(n: u64) -> Option<ProgressBar> {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} ops  {msg}  {eta} left")
        .unwrap_or(ProgressStyle::default_bar());
    out::bar(ProgressBar::new(n).with_style(style))
}

/// A step to be replayed.
struct Step {
    compiled: Compiled,
    /// The ops of the plan in order.
    ops: Vec<Op>,
    /// Their nodes.
    nodes: Vec<ir::Node>,
    /// What says that two of them are equal.
    keys: Vec<String>,
    /// Objects of generated kernels.
    objects: Vec<Object>,
}

impl Step {
    /// Compiles a step; kernels are generated if a target is given.
    fn new(
        graph: &Graph,
        compiling: &Compiling,
        machine: &model::Machine,
        target: Option<&Target>,
    ) -> Result<Step, Failure> {
        let compiled = model::compile(graph, compiling, machine, Dumps::Stderr)?;
        let (graph, schedule) = (&compiled.program.graph, &compiled.program.schedule);
        let plan = compiled
            .program
            .plan
            .as_ref()
            .expect("a compiled program should have a plan");
        let place = |loc: Loc| artifact::Place {
            pool: 0,
            offset: plan.address(loc),
        };
        let operand = |(&value, &loc): (&Value, &Loc)| {
            let ty = &graph.values[value].ty;
            artifact::Operand {
                place: place(loc),
                dtype: codegen::dtype(ty.dtype()),
                shape: ty.shape().to_vec(),
            }
        };
        let (mut ops, mut nodes) = (vec![], vec![]);
        let mut generated: Vec<Generated> = vec![];
        let mut objects: BTreeMap<String, usize> = BTreeMap::new();
        for data in schedule.instrs.values() {
            let InstrKind::Run {
                node,
                args,
                outs,
                scratch,
                ..
            } = &data.kind
            else {
                continue;
            };
            let op = &graph.nodes[*node];
            let attrs = op
                .op
                .attrs()
                .iter()
                .map(|(&key, attr)| (key.to_string(), codegen::attr(attr)))
                .collect();
            let scratch = scratch.map(|loc| artifact::Range {
                place: place(loc),
                bytes: schedule.buffers[loc.buffer].bytes - loc.offset,
            });
            let bytes = scratch.map_or(0, |scratch| scratch.bytes);
            let kernel = codegen::generated(graph, *node, bytes, target, false)?;
            let code = kernel.map(|kernel| {
                let object = *objects
                    .entry(kernel.name.clone())
                    .or_insert(generated.len());
                let [ins, outs] = [&op.inputs, &op.outputs].map(|values| graph.types(values));
                let code = codegen::code(&kernel, &ins, &outs, object);
                if object == generated.len() {
                    generated.push(kernel);
                }
                code
            });
            nodes.push(*node);
            ops.push(Op {
                kernel: artifact::Kernel {
                    op: op.op.name().into(),
                    attrs,
                    code,
                },
                ins: op.inputs.iter().zip(args).map(operand).collect(),
                outs: op.outputs.iter().zip(outs).map(operand).collect(),
                scratch,
            });
        }
        let objects = match target {
            Some(target) => {
                let generated: Vec<_> = generated.iter().collect();
                codegen::objects(&generated, target, &compiled.options.cancel)?
            }
            None => vec![],
        };
        let keys = nodes.iter().map(|&node| key(graph, node)).collect();
        Ok(Step {
            compiled,
            ops,
            nodes,
            keys,
            objects,
        })
    }

    /// The times of all ops, from those of a sample and what was known before.
    fn times(&self, sample: Times, found: &BTreeMap<String, Found>) -> Times {
        let none = || Err("it was not run".to_string());
        let micros = |key: &String| found.get(key).cloned().unwrap_or_else(none);
        Times {
            micros: self.keys.iter().map(micros).collect(),
            ..sample
        }
    }
}

/// The initial data that the step cannot replace by random numbers: the optimizer's options, and
/// moments.
fn contents(compiled: &Compiled, optimizer: Optimizer) -> BTreeMap<u64, Content> {
    let (graph, schedule) = (&compiled.program.graph, &compiled.program.schedule);
    let plan = compiled
        .program
        .plan
        .as_ref()
        .expect("a compiled program should have a plan");
    let mut contents = BTreeMap::new();
    for &(value, loc) in &schedule.entry {
        match graph.values[value].def {
            Def::State(state) if graph.states[state].kind == StateKind::Moment => {
                contents.insert(plan.address(loc), Content::Zeros);
            }
            Def::Input(_) if graph.values[value].name == HYPER => {
                let options = optimizer
                    .options()
                    .iter()
                    .flat_map(|(_, value)| value.to_le_bytes())
                    .collect();
                let fed = schedule
                    .instrs
                    .values()
                    .filter(|data| data.why == Why::Feed);
                for data in fed {
                    if let InstrKind::Copy { src, dst, .. } = data.kind
                        && src == loc
                    {
                        contents.insert(plan.address(dst), Content::Bytes(options));
                        break;
                    }
                }
            }
            _ => {}
        }
    }
    contents
}

struct Measured<'a> {
    args: &'a ProfileArgs,
    step: &'a Step,
    times: &'a Times,
    /// The step without groups.
    apart: Option<(Step, Times)>,
    figures: &'a Figures,
    /// The sum of the ops' times, of the chosen times and of the fastest round, µs.
    micros: f64,
    fastest: f64,
    /// How many ops of the step were run, and how often each.
    n_run: usize,
    rounds: u32,
    /// An earlier profile, whose ops are taken over.
    known: Option<&'a Profile>,
    /// The measured device is this machine's processor.
    host_is_device: bool,
}

impl Measured<'_> {
    fn profile(&self, device: &ir::Device, seconds: f64) -> Profile {
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
        for (key, figures) in self.known.iter().flat_map(|known| &known.ops) {
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
            kernels: self.args.kernels.unwrap_or_default(),
            repeat: self.rounds,
            profiling_seconds: seconds,
            step_micros: self.micros,
            peak_bytes: self.times.bytes + figures.bytes,
            guess_factor: sums.map(factor),
            handoff_micros: figures.handoff,
            host_bandwidth: figures.host_bandwidth.max(1.0),
            link: LinkFigures {
                paced: self.args.link,
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
        if self.args.fastest {
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
            op.host_micros = (self.host_is_device && is_update).then_some(op.micros);
        }
        ops
    }

    /// Ops that could not be run, each once, with the reason.
    fn refused(&self) -> BTreeMap<String, &str> {
        let graph = &self.step.compiled.program.graph;
        let ops = self.step.nodes.iter().zip(&self.times.micros);
        ops.filter_map(|(&node, micros)| Some((key(graph, node), micros.as_ref().err()?.as_str())))
            .collect()
    }

    fn json(&self, profile: &Profile) -> serde_json::Value {
        json!({
            "model": profile.model,
            "kernels": profile.kernels.name(),
            "device": profile.device,
            "cpu": profile.cpu,
            "cores": profile.cores,
            "lines": self.step.nodes.len(),
            "distinct_ops": profile.ops.len(),
            "ops_run": self.n_run,
            "refused": self.refused(),
            "step_ms": profile.step_micros / 1e3,
            "step_fastest_ms": self.fastest / 1e3,
            "rounds": profile.repeat,
            "profiling_ms": profile.profiling_seconds * 1e3,
            "peak_bytes": profile.peak_bytes,
            "window_bytes": self.times.bytes,
            "largest_op_bytes": self.times.largest_op,
            "link": {
                "in_bytes_per_second": profile.link.in_bandwidth,
                "out_bytes_per_second": profile.link.out_bandwidth,
                "copy_us": profile.link.micros,
            },
            "copy_bytes_per_second": profile.link.copy_bandwidth,
            "host_bytes_per_second": profile.host_bandwidth,
            "handoff_us": profile.handoff_micros,
            "keeps": profile.keeps,
        })
    }

    fn report(&self, profile: &Profile) -> String {
        let mut text = format!(
            "{} on {} ({}, {} cores): {} distinct ops in {} lines\n\n",
            profile.model,
            profile.device,
            profile.cpu,
            profile.cores,
            profile.ops.len(),
            self.step.nodes.len()
        );
        for (name, value) in self.machine_figures(profile) {
            text.push_str(&format!("  {name:<16} {value}\n"));
        }
        text.push('\n');
        text.push_str(&self.kept_speeds());
        text.push('\n');
        text.push_str(&dearest_ops(profile));
        let refused = self.refused();
        if !refused.is_empty() {
            text.push_str(&format!(
                "\n{} ops could not be run; their times will be guesses:\n",
                refused.len()
            ));
            for (key, why) in refused.iter().take(ROWS) {
                text.push_str(&format!("  {key}: {why}\n"));
            }
        }
        text
    }

    /// The figures of the step and of the machine, with their names.
    fn machine_figures(&self, profile: &Profile) -> [(&'static str, String); 7] {
        let rate = |bytes: f64| format!("{:.2} GB/s", bytes / 1e9);
        let steps = profile.profiling_seconds * 1e6 / profile.step_micros.max(1e-3);
        let link = &profile.link;
        let paced = link.paced.map_or(String::new(), |paced| {
            format!(", slowed to {}", rate(paced))
        });
        [
            (
                "one step",
                format!("{}, the sum of its ops", micros(profile.step_micros)),
            ),
            (
                "profiling took",
                format!(
                    "{}: {steps:.1} steps",
                    micros(profile.profiling_seconds * 1e6)
                ),
            ),
            (
                "memory",
                format!(
                    "{}: ops {}, the largest alone {}; copies and updates {}",
                    short(profile.peak_bytes),
                    short(self.times.bytes),
                    short(self.times.largest_op),
                    short(self.figures.bytes)
                ),
            ),
            (
                "link",
                format!(
                    "{} in, {} out, {} a copy{paced}",
                    rate(link.in_bandwidth),
                    rate(link.out_bandwidth),
                    micros(link.micros)
                ),
            ),
            ("copies", rate(link.copy_bandwidth)),
            ("updates on host", rate(profile.host_bandwidth)),
            ("handoff", micros(profile.handoff_micros)),
        ]
    }

    /// The table of the speed that each lane keeps while another one runs.
    fn kept_speeds(&self) -> String {
        let mut text = String::from("speed kept beside  ");
        for lane in Lane::MEASURED {
            text.push_str(&format!("{:>8}", lane.name()));
        }
        for (a, lane) in Lane::MEASURED.iter().enumerate() {
            text.push_str(&format!("\n  {:<16} ", lane.name()));
            for b in 0..Lane::MEASURED.len() {
                let share = if a == b {
                    "-".into()
                } else {
                    format!("{:.0}%", 100.0 * self.figures.keeps[a][b])
                };
                text.push_str(&format!("{share:>8}"));
            }
        }
        text + "\n"
    }
}

/// The table of the ops with the largest shares of a step.
fn dearest_ops(profile: &Profile) -> String {
    let mut ops: Vec<(&String, &OpFigures)> = profile.ops.iter().collect();
    let total = |op: &OpFigures| op.micros * f64::from(op.count);
    ops.sort_by(|a, b| total(b.1).total_cmp(&total(a.1)).then_with(|| a.0.cmp(b.0)));
    let mut text = String::from("  share      a run  runs  op\n");
    for (key, op) in ops.iter().take(ROWS) {
        let share = 100.0 * total(op) / profile.step_micros.max(1e-3);
        text.push_str(&format!(
            "  {share:4.1}%  {:>9}  {:>4}  {key}\n",
            micros(op.micros),
            op.count
        ));
    }
    if ROWS < ops.len() {
        text.push_str(&format!("  and {} more\n", ops.len() - ROWS));
    }
    text
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
