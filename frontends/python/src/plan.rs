//! A compiled step: its figures, its reports, and the way from it to a machine.

use crate::errors::{Call, error, refused};
use crate::foreign::Calls;
use crate::interrupt::interruptible;
use crate::machine::Machine;
use crate::openmp::Lasted;
use crate::parts::Arenas;
use crate::profile;
use artifact::Artifact;
use codegen::Target;
use codegen::kernels;
use ir::schedule::InstrKind;
use ir::{Device, Graph, Op, TensorType, Value};
use passes::cost::profile::Profiled;
use passes::cost::{Cost, Roofline};
use passes::decide::{Extent, Problem};
use passes::explain::{self, Named};
use passes::graph::optimizer::{Master, Optimizer, Rounding};
use passes::graph::precision::Precision;
use passes::graph::quantize::Base;
use passes::graph::reduction::Combination;
use passes::graph::scale::LossScale;
use passes::micro_batches;
use passes::pipeline::{self, Budget, Compiled, Kernels, Options, Planner};
use passes::plan::{Cancel, Parts};
use pyo3::prelude::*;
use report::page::{self, PassTime, Source};
use report::size::{bytes, micros, parse_budget, parse_bytes, short};
use report::{curve, explained};
use runtime::Foreign;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// The budget as Python gives it.
#[derive(FromPyObject)]
pub(crate) enum Given {
    /// Bytes.
    #[pyo3(transparent)]
    Bytes(u64),
    /// A share of what keeping everything needs.
    #[pyo3(transparent)]
    Share(f64),
    /// `60%` or `20GiB`.
    #[pyo3(transparent)]
    Text(String),
}

fn budget(given: Option<Given>) -> PyResult<Budget> {
    match given {
        None => Ok(Budget::Device),
        Some(Given::Bytes(bytes)) if bytes > 0 => Ok(Budget::Bytes(bytes)),
        Some(Given::Share(share)) if share.is_finite() && share > 0.0 => Ok(Budget::Share(share)),
        Some(Given::Bytes(_) | Given::Share(_)) => {
            Err(error("budget: it should be a positive number"))
        }
        Some(Given::Text(text)) => {
            parse_budget(&text).map_err(|e| error(format!("budget: {e}; a share is 60%")))
        }
    }
}

/// What a name stands for among the values of an option.
fn chosen<T: Copy>(
    option: &str,
    given: &str,
    all: &[T],
    name: impl Fn(T) -> &'static str,
) -> PyResult<T> {
    let found = all.iter().copied().find(|&value| name(value) == given);
    found.ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|&value| name(value)).collect();
        error(format!(
            "{option}: {given:?} is none of {}",
            names.join(", ")
        ))
    })
}

fn device(name: &str) -> PyResult<Device> {
    if let Some(number) = gpu::number(name) {
        let here = number.and_then(gpu::Here::find).map_err(error)?;
        return Ok(here.device);
    }
    if !name.ends_with(".toml") {
        return passes::devices::named(name).map_err(|e| error(format!("device: {e}")));
    }
    let text = std::fs::read_to_string(name).map_err(|e| error(format!("device {name}: {e}")))?;
    Device::from_toml(&text).map_err(|e| error(format!("device {name}: {}", e.to_string().trim())))
}

/// Names of the devices that come with Lighterage.
#[pyfunction]
pub(crate) fn devices() -> Vec<&'static str> {
    passes::devices::names()
}

/// Says where the kernel generator is, if `LIGHTERAGE_MLIR` does not.
#[pyfunction]
pub(crate) fn generator_at(program: PathBuf) {
    kernels::installed_at(program);
}

/// The kind of kernels. `auto` generates them if the generator is installed. A GPU has no others.
fn kind_of_kernels(given: &str, on_gpu: bool) -> PyResult<Kernels> {
    if let (true, Err(why)) = (on_gpu, kernels::find()) {
        return Err(error(format!(
            "kernels for a GPU are generated, and the package lighterage-kernels has what \
             generates them: {why}"
        )));
    }
    if given == "auto" {
        let generated = on_gpu || kernels::find().is_ok() && Target::host().is_some();
        return Ok(match generated {
            true => Kernels::Generated,
            false => Kernels::Plain,
        });
    }
    let all = [Kernels::Plain, Kernels::Generated];
    match chosen("kernels", given, &all, Kernels::name)? {
        Kernels::Plain if on_gpu => Err(error("kernels: a GPU has no plain ones; leave it out")),
        kind => Ok(kind),
    }
}

/// Compiles a traced step, the bytes of a joint `.pt2` file.
/// `groups`: the group of options of a parameter, by its path. `parts`: names of the inputs that
/// come at the pause of a step in two parts, and of the outputs that leave there. `calls`: for a
/// step that is to run. It gets the calls without a kernel (operator, node, module, reason), and
/// raises an exception or returns the function that computes them,
/// `compute(node, operands, results)`. Without it the step is planned for the device. `loss_scale`:
/// of fp16, the first scale, its growth, its backoff, and the updates until it grows. `beside`: the
/// step on larger batches in whose memory this one is to run. `gpu`: the number of the GPU that
/// runs the step; without it, the processor does. `profile`: the file of a profile, by whose times
/// it is planned.
#[pyfunction]
#[pyo3(signature = (pt2, *, optimizer, budget=None, device="cpu", host=None, kernels="auto",
    planner="auto", clip_norm=None, groups=None, parts=None, calls=None, precision="f32",
    loss_scale=None, micro_batches=None, reduction="auto", master="none", rounding="nearest",
    base="whole", whole_groups=None, beside=None, gpu=None, profile=None, command=""))]
#[expect(
    clippy::too_many_arguments,
    reason = "Python's keyword arguments; its callers name each"
)]
pub(crate) fn compile(
    py: Python<'_>,
    pt2: Vec<u8>,
    optimizer: &str,
    budget: Option<Given>,
    device: &str,
    host: Option<&str>,
    kernels: &str,
    planner: &str,
    clip_norm: Option<f64>,
    groups: Option<BTreeMap<String, usize>>,
    parts: Option<(BTreeSet<String>, BTreeSet<String>)>,
    calls: Option<Bound<'_, PyAny>>,
    precision: &str,
    loss_scale: Option<(f64, f64, f64, u32)>,
    micro_batches: Option<usize>,
    reduction: &str,
    master: &str,
    rounding: &str,
    base: &str,
    whole_groups: Option<BTreeSet<usize>>,
    beside: Option<PyRef<'_, Plan>>,
    gpu: Option<u32>,
    profile: Option<PathBuf>,
    command: &str,
) -> PyResult<Plan> {
    let host = host.map(|text| parse_bytes(text).map_err(|e| error(format!("host: {e}"))));
    let precision = chosen("precision", precision, &Precision::ALL, Precision::name)?;
    let loss_scale = loss_scale.map(|(init, growth, backoff, interval)| LossScale {
        init,
        growth,
        backoff,
        interval,
    });
    let options = Options {
        optimizer: chosen("optimizer", optimizer, &Optimizer::ALL, Optimizer::name)?,
        budget: self::budget(budget)?,
        host: host.transpose()?,
        kernels: kind_of_kernels(kernels, gpu.is_some())?,
        planner: chosen("planner", planner, &Planner::ALL, Planner::name)?,
        clip_norm,
        groups: groups.unwrap_or_default(),
        grad_norm: false,
        group_options: vec![],
        whole_groups: whole_groups.unwrap_or_default(),
        parts: parts.map(|(late, early)| Parts {
            late,
            early,
            on_device: gpu.is_some(),
        }),
        extent: Extent::Plan,
        precision,
        loss_scale: loss_scale.unwrap_or_default(),
        tf32: precision == Precision::Tf32,
        micro_batches,
        reduction: chosen("reduction", reduction, &Combination::ALL, Combination::name)?,
        master: chosen("master", master, &Master::ALL, Master::name)?,
        rounding: chosen("rounding", rounding, &Rounding::ALL, Rounding::name)?,
        base: chosen("base", base, &Base::ALL, Base::name)?,
        ..Options::default()
    };
    let in_half = matches!(options.precision, Precision::Bf16 | Precision::Fp16);
    if in_half && options.master != Master::None {
        let why = format!(
            "master: with precision={:?} the model's parameters stay in f32, and need no masters; \
             for parameters in half precision convert the model, as model.bfloat16() does, and \
             leave precision out",
            options.precision.name()
        );
        return Err(error(why));
    }
    let options = match &beside {
        Some(first) => first.compiled.beside(&options),
        None => options,
    };
    drop(beside);
    let mut device = self::device(device)?;
    match gpu {
        Some(_) if device.sm.is_none() => {
            let why = format!(
                "device: {} is no GPU, and the step is to run on one",
                device.name
            );
            return Err(error(why));
        }
        // Scratch differs by what runs the kernels.
        None if calls.is_some() => device.sm = None,
        Some(_) | None => {}
    }
    let profile = profile.map(|file| profile::read(&file, &options, &device));
    let profile = profile.transpose()?;
    let command = command.to_string();
    let model = py.detach(|| torch::read_bytes(&pt2, "step", &BTreeMap::new()));
    let model = model.map_err(error)?;
    let compute = match calls {
        Some(calls) if !model.unsupported.is_empty() => {
            let lacking = self::calls(&model.graph, &model.unsupported);
            Some(calls.call1((lacking,))?.unbind())
        }
        Some(_) | None => None,
    };
    interruptible(py, move |cancel| {
        let options = Options {
            cancel: cancel.clone(),
            ..options
        };
        let machine = Where {
            device,
            gpu,
            profile,
        };
        planned(model, options, machine, compute, command)
    })
}

/// What a step is planned for, the GPU that runs it, if one does, and measured times.
struct Where {
    device: Device,
    gpu: Option<u32>,
    profile: Option<Profiled>,
}

impl Where {
    /// The times to plan with.
    fn cost(&self, options: &Options) -> Box<dyn Cost> {
        match &self.profile {
            Some(profile) => Box::new(profile.clone()),
            None => Box::new(Roofline::new(&self.device).with_tf32(options.tf32)),
        }
    }
}

fn planned(
    model: torch::Model,
    options: Options,
    machine: Where,
    compute: Option<Py<PyAny>>,
    command: String,
) -> PyResult<Plan> {
    let mut times: Vec<PassTime> = vec![];
    let compiled = pipeline::compile(
        model.graph.clone(),
        &options,
        &machine.device,
        &*machine.cost(&options),
        &mut |report| times.push((report.name, report.time, report.changed)),
    );
    let tensors = model.tensors.into_iter();
    Ok(Plan {
        compiled: compiled.map_err(refused)?,
        all: OnceLock::new(),
        traced: model.graph,
        tied: model.tied,
        unsupported: model.unsupported,
        compute,
        data: tensors.map(|(path, tensor)| (path, tensor.data)).collect(),
        machine,
        times,
        command,
    })
}

/// Calls without a kernel, with the modules of their nodes.
fn calls(graph: &Graph, unsupported: &[torch::Unsupported]) -> Vec<Call> {
    let module = |name: &str| {
        let mut nodes = graph.order.iter().map(|&node| &graph.nodes[node]);
        let found = nodes.find(|data| match &data.op {
            Op::Extern(call) => call.node == name,
            _ => false,
        });
        found.map_or(String::new(), |data| data.module.clone())
    };
    let call = |u: &torch::Unsupported| {
        let operator = u.target.trim_start_matches("torch.ops.").to_string();
        (operator, u.node.clone(), module(&u.node), u.why.clone())
    };
    unsupported.iter().map(call).collect()
}

/// A compiled step.
#[pyclass(frozen, module = "lighterage")]
pub(crate) struct Plan {
    compiled: Compiled,
    /// The same with the plans for all budgets, from the first time that they are asked for.
    all: OnceLock<Compiled>,
    /// The graph before any pass.
    traced: Graph,
    tied: Vec<Vec<String>>,
    unsupported: Vec<torch::Unsupported>,
    /// Computes the calls that have no kernel, if the step is to run.
    compute: Option<Py<PyAny>>,
    data: codegen::Data,
    machine: Where,
    times: Vec<PassTime>,
    command: String,
}

#[pymethods]
impl Plan {
    /// Bytes of the device's memory that a step needs: parameters, moments, everything.
    #[getter]
    fn peak(&self) -> u64 {
        self.compiled.planned_peak
    }

    /// Bytes that a step needs if nothing is swapped or recomputed.
    #[getter]
    fn keep_peak(&self) -> u64 {
        self.compiled.decided.keep_peak
    }

    /// The smallest budget for which a plan was found, bytes. The first use plans for all budgets.
    #[getter]
    fn smallest(&self, py: Python<'_>) -> PyResult<u64> {
        let smallest = self.all(py)?.decided.smallest;
        Ok(smallest.unwrap_or(self.compiled.planned_peak))
    }

    /// The budget, bytes.
    #[getter]
    fn budget(&self) -> Option<u64> {
        self.compiled.decided.budget
    }

    /// The predicted time of a step, µs.
    #[getter]
    fn micros(&self) -> f64 {
        self.compiled.timeline.micros
    }

    /// The time of the kernels of the forward and the backward, µs, if each runs once.
    #[getter]
    fn kernel_micros(&self) -> f64 {
        micro_batches::kernel_micros(&self.compiled, &*self.cost())
    }

    /// How many micro-batches a step has.
    #[getter]
    fn micro_batches(&self) -> usize {
        self.compiled.options.micro_batches.unwrap_or(1)
    }

    /// What the loss is a function of, if a step has several batches: `mean`, `sum` or `mixed`.
    #[getter]
    fn loss_kind(&self) -> &'static str {
        self.compiled.loss_kind.name()
    }

    /// The part of it in which something is computed again, µs.
    #[getter]
    fn recomputed_micros(&self) -> f64 {
        self.compiled.timeline.recomputed
    }

    /// Bytes that a step moves over the link, both ways.
    #[getter]
    fn swapped_bytes(&self) -> u64 {
        self.compiled.timeline.swapped_bytes
    }

    /// The plans that no other beats in both memory and time: (bytes, µs), fastest first. The first
    /// use plans for all budgets.
    #[getter]
    fn curve(&self, py: Python<'_>) -> PyResult<Vec<(u64, f64)>> {
        Ok(self.all(py)?.decided.curve.clone())
    }

    /// `generated` or `plain`.
    #[getter]
    fn kernels(&self) -> &'static str {
        self.compiled.options.kernels.name()
    }

    /// The optimizer's options, in the order of the step's input.
    #[getter]
    fn options(&self) -> Vec<&'static str> {
        let options = self.compiled.options.optimizer.options();
        options.iter().map(|&(name, _)| name).collect()
    }

    /// Names of one parameter, for each parameter with several.
    #[getter]
    fn tied(&self) -> Vec<Vec<String>> {
        self.tied.clone()
    }

    /// Calls that have no kernel: operator, node, module, reason. PyTorch computes them if the step
    /// runs.
    #[getter]
    fn unsupported(&self) -> Vec<Call> {
        calls(&self.traced, &self.unsupported)
    }

    /// What PyTorch computes in a step: operator, node, module, how often, bytes of the results.
    #[getter]
    fn externs(&self) -> Vec<(String, String, String, usize, u64)> {
        let found = self.extern_calls().into_iter().map(|call| {
            let name = call.op.trim_start_matches("torch.ops.").to_string();
            (
                name,
                call.node.into(),
                call.module.into(),
                call.runs,
                call.bytes,
            )
        });
        found.collect()
    }

    /// Ops that the profile lacks, each once: their times are guesses. Empty without a profile.
    #[getter]
    fn guessed(&self) -> Vec<String> {
        let profile = self.machine.profile.as_ref();
        profile.map_or(vec![], |profile| {
            profile.guesses(&self.compiled.program.graph).0
        })
    }

    /// Measures the step's ops and this machine, and writes the times to a file. What a file that
    /// is there has stays in it. `repeat`: how often each op is run, by default as long as few
    /// steps take. `fastest`: the times are those of the fastest round, not medians.
    #[pyo3(signature = (file, *, repeat=None, fastest=false))]
    fn profile(
        &self,
        py: Python<'_>,
        file: PathBuf,
        repeat: Option<i64>,
        fastest: bool,
    ) -> PyResult<profile::Summary> {
        interruptible(py, |cancel| {
            let options = Options {
                cancel: cancel.clone(),
                ..self.compiled.options.clone()
            };
            let Where { device, gpu, .. } = &self.machine;
            let step = (&self.traced, &options);
            profile::measure(&file, (repeat, fastest), step, device, *gpu)
        })
    }

    /// Why a tensor is where it is, and what the alternatives would cost; for a module, what was
    /// decided about each of its tensors. `name`: a value, a state's path, or a module's.
    fn explain(&self, py: Python<'_>, name: &str) -> PyResult<String> {
        py.detach(|| self.explained(name))
    }

    /// A page for the browser that shows the whole plan, as HTML.
    fn html(&self, py: Python<'_>) -> PyResult<String> {
        let all = self.all(py)?;
        Ok(py.detach(|| self.page(all)))
    }

    /// The step, loaded on this machine's processor or its GPU: pools are allocated, kernels
    /// compiled.
    /// `threads`: how many share a kernel, by default all of the process.
    /// `beside`: the machine in whose memory it runs.
    #[pyo3(signature = (threads=None, beside=None))]
    fn load(
        &self,
        py: Python<'_>,
        threads: Option<usize>,
        beside: Option<Py<Machine>>,
    ) -> PyResult<Machine> {
        let beside = beside.as_ref().map(Py::get);
        interruptible(py, |cancel| {
            let (artifact, calls) = self.emitted(cancel)?;
            let lasted = Lasted::of(&artifact);
            let options = self.running(threads);
            let foreign = calls.clone().map(|calls| calls as Arc<dyn Foreign>);
            let machine = match (beside, foreign) {
                (Some(first), foreign) => first.another(artifact, options, foreign),
                (None, Some(calls)) => runtime::Machine::calling(artifact, options, calls),
                (None, None) => runtime::Machine::new(artifact, options),
            };
            Machine::new(machine.map_err(error)?, lasted, calls)
        })
    }

    /// The machines of a step in two parts.
    #[pyo3(signature = (threads=None))]
    fn arenas(&self, py: Python<'_>, threads: Option<usize>) -> PyResult<Arenas> {
        interruptible(py, |cancel| {
            let (artifact, calls) = self.emitted(cancel)?;
            Arenas::new(artifact, self.running(threads), calls)
        })
    }

    fn __repr__(&self) -> String {
        let row = |(name, value): (&str, String)| format!("\n  {name:<16} {value}");
        let rows: String = self.figures().into_iter().map(row).collect();
        format!("Plan of a step on {}{rows}", self.machine.device.name)
    }

    fn _repr_html_(&self, py: Python<'_>) -> PyResult<String> {
        let row = |(name, value): (&str, String)| {
            format!("<tr><th style=\"text-align:left\">{name}</th><td>{value}</td></tr>")
        };
        let rows: String = self.figures().into_iter().map(row).collect();
        let points = curve::points(self.all(py)?);
        let drawing = curve::svg_file(&points, self.compiled.decided.budget);
        Ok(format!("<div><table>{rows}</table>{drawing}</div>"))
    }
}

/// A node that PyTorch computes.
struct ExternCall<'a> {
    op: &'a str,
    node: &'a str,
    module: &'a str,
    /// How often a step runs it.
    runs: usize,
    /// Bytes of its results.
    bytes: u64,
}

impl Plan {
    /// The times that it was planned with.
    fn cost(&self) -> Box<dyn Cost> {
        self.machine.cost(&self.compiled.options)
    }

    /// How it runs.
    fn running(&self, threads: Option<usize>) -> runtime::Options {
        runtime::Options {
            threads,
            gpu: self.machine.gpu.unwrap_or(0),
            ..runtime::Options::default()
        }
    }

    /// What its kernels are for. An error if no kernels are generated for the GPU.
    fn target(&self) -> PyResult<Option<Target>> {
        if self.machine.gpu.is_none() {
            return Ok(Target::host());
        }
        let target = self.machine.device.sm.and_then(Target::gpu);
        let why = || {
            format!(
                "device {}: no kernels are generated for it",
                self.machine.device.name
            )
        };
        target.map(Some).ok_or_else(|| error(why()))
    }

    /// The artifact, and what computes the calls in it that have no kernel.
    fn emitted(&self, cancel: &Cancel) -> PyResult<(Artifact, Option<Arc<Calls>>)> {
        let (mut compiled, data) = (self.compiled.clone(), &self.data);
        compiled.options.cancel = cancel.clone();
        let compiled = &compiled;
        let target = self.target()?;
        let Some(compute) = &self.compute else {
            let artifact = codegen::emit(compiled, data, target);
            return Ok((artifact.map_err(error)?, None));
        };
        let artifact = codegen::emit_calling(compiled, data, target).map_err(error)?;
        let calls = Python::attach(|py| Calls::new(compute.clone_ref(py)));
        Ok((artifact, Some(Arc::new(calls))))
    }

    /// The nodes that PyTorch computes, in the order of the step.
    fn extern_calls(&self) -> Vec<ExternCall<'_>> {
        let (graph, schedule) = (
            &self.compiled.program.graph,
            &self.compiled.program.schedule,
        );
        let mut found: Vec<ExternCall<'_>> = vec![];
        for line in schedule.instrs.values() {
            let InstrKind::Run { node, .. } = line.kind else {
                continue;
            };
            let data = &graph.nodes[node];
            let Op::Extern(op) = &data.op else {
                continue;
            };
            match found.iter_mut().find(|call| call.node == op.node) {
                Some(call) => call.runs += 1,
                None => found.push(ExternCall {
                    op: &op.name,
                    node: &op.node,
                    module: &data.module,
                    runs: 1,
                    bytes: graph
                        .types(&data.outputs)
                        .iter()
                        .map(TensorType::bytes)
                        .sum(),
                }),
            }
        }
        found
    }

    /// The step with the plans for all budgets, which take several times as long as one.
    fn all(&self, py: Python<'_>) -> PyResult<&Compiled> {
        interruptible(py, |cancel| {
            Ok(self.all.get_or_init(|| {
                let options = Options {
                    extent: Extent::Curve,
                    cancel: cancel.clone(),
                    ..self.compiled.options.clone()
                };
                let cost = self.cost();
                let graph = self.traced.clone();
                pipeline::compile(graph, &options, &self.machine.device, &*cost, &mut |_| ())
                    .expect("a step that was compiled should compile again")
            }))
        })
    }

    /// The figures of short reports. Neither names nor values hold markup.
    fn figures(&self) -> Vec<(&'static str, String)> {
        let decided = &self.compiled.decided;
        let share = |part: f64, whole: f64| 100.0 * part / whole.max(f64::MIN_POSITIVE);
        let keep = decided.keep_peak as f64;
        let of_keep = |n: u64| format!("{}, {:.1}% of keep", bytes(n), share(n as f64, keep));
        let timeline = &self.compiled.timeline;
        let recomputed = share(timeline.recomputed, timeline.micros);
        let calls = self.extern_calls();
        let n_calls: usize = calls.iter().map(|call| call.runs).sum();
        let largest = calls.iter().map(|call| call.bytes).max();
        let by_torch = largest.map(|largest| {
            let largest = short(largest);
            let text = format!("{n_calls} calls a step, results of {largest} at most");
            ("by PyTorch", text)
        });
        let mut figures = vec![
            ("peak", of_keep(self.compiled.planned_peak)),
            ("budget", decided.budget.map_or("none".into(), bytes)),
            ("keep everything", bytes(decided.keep_peak)),
            ("predicted step", micros(timeline.micros)),
            (
                "recomputed",
                format!("{}, {recomputed:.1}% of it", micros(timeline.recomputed)),
            ),
            ("moved a step", short(timeline.swapped_bytes)),
            ("kernels", self.compiled.options.kernels.name().to_string()),
        ];
        figures.extend(by_torch);
        figures
    }

    fn page(&self, all: &Compiled) -> String {
        let cost = self.cost();
        let problem = Problem::new(&all.program.graph, &self.machine.device, &*cost);
        page::page(&Source {
            compiled: all,
            problem: &problem,
            options: all.options.clone(),
            tally: explain::tally(&problem, &all.decided.decisions),
            peak: &explain::peak(all),
            curve: &curve::points(all),
            times: &self.times,
            command: self.command.clone(),
            unsupported: &self.unsupported,
        })
    }

    fn explained(&self, asked: &str) -> PyResult<String> {
        let graph = &self.compiled.program.graph;
        let cost = self.cost();
        let problem = Problem::new(graph, &self.machine.device, &*cost);
        let name = explained::known_path(&self.tied, graph, asked).unwrap_or(asked);
        let rows = |values: &[Value]| explained::rows(&self.compiled, &problem, values);
        let value = |value: Value| {
            let explanation = explain::explain(&self.compiled, &problem, value);
            explanation.print(&short, &micros)
        };
        match explain::named(&self.compiled.program, &self.traced, name) {
            Named::Value(found) => Ok(value(found)),
            Named::Removed(Some(found)) => Ok(format!(
                "%{} has the same elements and took its place\n\n{}",
                graph.values[found].name,
                value(found)
            )),
            Named::Removed(None) => Ok(format!(
                "%{name} is not in the compiled step: no state, output or gradient needs it"
            )),
            Named::Scratch(instr) => {
                let line = ir::text::print_instr(graph, &self.compiled.program.schedule, instr);
                Ok(format!("scratch memory, which only one line uses: {line}"))
            }
            Named::Chunk(chunk) => {
                let text = explain::explain_chunk(&self.compiled, &problem, &chunk);
                let states = chunk.states.iter();
                let values: Vec<Value> = states.map(|&s| graph.states[s].before).collect();
                let text = text.print(&short, &micros);
                Ok(format!("{text}\n{}", explained::table(&rows(&values))))
            }
            Named::Module(values) | Named::Buffer(values) => {
                let table = explained::table(&rows(&values));
                Ok(format!("{name}: {} values\n{table}", values.len()))
            }
            Named::Unknown(near) => Err(error(match near.is_empty() {
                true => format!("there is no value, state or module {asked:?}"),
                false => format!(
                    "there is no value, state or module {asked:?}; near: {}",
                    near.join(", ")
                ),
            })),
        }
    }
}
