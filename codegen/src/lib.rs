//! A proved program to an [`Artifact`]: commands over addresses, and the data that states start
//! from.
//!
//! Line `i` of the schedule is one group of commands: its waits, itself, and, if another stream
//! waits for it, a record of its event. Nothing is decided here.
//!
//! A launch gets code by where its operands lie: in a device's memory, code for the device; in the
//! host's, for the processor that compiles.

pub mod attention;
mod device;
mod error;
pub mod kernels;
mod listing;
pub mod mlir;
mod objects;
mod philox;

use artifact::{
    Artifact, Binding, Code, Command, CommandKind, Initial, Kernel, Line, Operand, Place, Range,
    State, Summary,
};
pub use error::{Error, Missing};
use ir::op::Access;
use ir::schedule::{InstrKind, Loc};
use ir::{Graph, Id, Instr, Node, Op, Part, Program, StateKind, Table, TensorType, Value, text};
pub use kernels::Target;
use kernels::{Generated, Unsupported};
pub use listing::{Form, Listed, Listing, Plain, listing};
pub use objects::objects;
use passes::pipeline::{Compiled, Kernels, Options};
use passes::plan::Cancel;
use passes::plan::machine::{BACKWARD, FORWARD};
use passes::plan::parts::is_lent;
use std::collections::{BTreeMap, HashMap};

/// Bytes that states start from, by path; row-major, as long as the state's type.
pub type Data = BTreeMap<String, Vec<u8>>;

/// Builds the whole artifact of a compiled step: callers change nothing in it. `target` is what the
/// generated kernels of the device run on, for instance [`Target::host`]; with [`Kernels::Plain`]
/// there are none. An error names the ops that have no kernel, `Unsupported: aten.foo (node bar)`,
/// or data that does not fit its state.
pub fn emit(compiled: &Compiled, data: &Data, target: Option<Target>) -> Result<Artifact, Error> {
    emit_step(compiled, data, target, false)
}

/// The same for a program that computes ops without a kernel itself: their launches are in the
/// artifact, and only such a program can run it.
pub fn emit_calling(
    compiled: &Compiled,
    data: &Data,
    target: Option<Target>,
) -> Result<Artifact, Error> {
    emit_step(compiled, data, target, true)
}

fn emit_step(
    compiled: &Compiled,
    data: &Data,
    target: Option<Target>,
    may_call: bool,
) -> Result<Artifact, Error> {
    let program = &compiled.program;
    let (graph, schedule) = (&program.graph, &program.schedule);
    planned_for(schedule.sm, target)?;
    let targets = Targets::new(compiled.options.kernels, target)?;
    let mut emitter = Emitter {
        program,
        targets,
        tf32: compiled.options.tf32,
        cancel: &compiled.options.cancel,
        may_call,
        kernels: BTreeMap::new(),
        like: HashMap::new(),
        generated: vec![],
        missing: vec![],
        artifact: Artifact::default(),
    };
    let plan = program.plan.as_ref().ok_or(Error::NoPlan)?;

    emitter.lines()?;
    if !emitter.missing.is_empty() {
        return Err(Error::NoDeviceCode(emitter.missing));
    }
    emitter.compile()?;

    let mut artifact = emitter.artifact.clone();
    artifact.name.clone_from(&graph.name);
    artifact.device.clone_from(&schedule.device);
    artifact.tf32 = compiled.options.tf32 && targets.device.is_some_and(|target| target.is_gpu());
    artifact.pools = schedule
        .pools
        .iter()
        .map(|(pool, data)| artifact::Pool {
            name: data.name.clone(),
            space: memory_space(data.space),
            bytes: plan.peak[pool],
            lent: is_lent(schedule, pool),
        })
        .collect();
    artifact.streams = schedule.streams.values().map(|s| s.name.clone()).collect();
    let (states, inputs) = schedule.entry.split_at(graph.states.len());
    for (state, &(value, loc)) in graph.states.values().zip(states) {
        let operand = emitter.operand(value, loc);
        let initial = initial(
            state,
            graph.values[value].ty.bytes(),
            data,
            &mut artifact.data,
        )?;
        artifact.states.push(State {
            path: state.path.clone(),
            kind: state_kind(state.kind),
            operand,
            initial,
        });
    }
    let binding = |name: &str, value, loc| Binding {
        name: name.into(),
        operand: emitter.operand(value, loc),
    };
    artifact.inputs = inputs
        .iter()
        .map(|&(v, loc)| binding(&graph.values[v].name, v, loc))
        .collect();
    let outputs = &schedule.exit[graph.states.len()..];
    artifact.outputs = graph
        .outputs
        .iter()
        .zip(outputs)
        .map(|(o, &(v, loc))| binding(&o.name, v, loc))
        .collect();
    artifact.summary = summary(compiled);
    artifact.pause = pause(&artifact, &compiled.options)?;
    Ok(artifact)
}

/// The number of commands before the pause of a step that has one: up to the last command that
/// writes an output of the first part.
fn pause(artifact: &Artifact, options: &Options) -> Result<Option<u32>, Error> {
    if options.parts.is_none() {
        return Ok(None);
    }
    let copies = |command: &Command| match command.kind {
        CommandKind::Copy { src, dst, .. } => Some([src, dst].map(|place| place.pool as usize)),
        _ => None,
    };
    let commands = artifact.commands.iter();
    let last = commands
        .clone()
        .rposition(|command| copies(command).is_some_and(|[_, to]| to == FORWARD.index()));
    // The record of the last output's line belongs to it.
    let line = last.map(|last| artifact.commands[last].line);
    let pause = commands
        .clone()
        .take_while(|command| line.is_some_and(|line| command.line <= line))
        .count();
    let is_late =
        |command: &Command| copies(command).is_some_and(|pools| pools.contains(&BACKWARD.index()));
    match artifact.commands[..pause]
        .iter()
        .find(|command| is_late(command))
    {
        Some(command) => Err(Error::BeforePause {
            line: artifact.lines[command.line as usize].name.clone(),
        }),
        None => Ok(Some(pause as u32)),
    }
}

/// An error if a schedule for a GPU is to run on a processor, or the other way round.
fn planned_for(sm: Option<u32>, target: Option<Target>) -> Result<(), Error> {
    let gpu = target.filter(Target::is_gpu);
    if sm.is_some() == gpu.is_some() {
        return Ok(());
    }
    let name = |sm: Option<u32>| sm.map_or("a processor".to_string(), |sm| format!("sm_{sm}"));
    Err(Error::Planned {
        planned: name(sm),
        target: name(gpu.and_then(|gpu| gpu.sm())),
    })
}

/// What kernels are generated for; `None` if the runtime has them all.
#[derive(Clone, Copy)]
struct Targets {
    /// Of launches on a device.
    device: Option<Target>,
    /// Of launches on the host.
    host: Option<Target>,
}

impl Targets {
    fn new(kernels: Kernels, target: Option<Target>) -> Result<Targets, Error> {
        let device = match kernels {
            Kernels::Plain => match target.filter(Target::is_gpu) {
                Some(gpu) => return Err(Error::PlainOnGpu(gpu.name())),
                None => None,
            },
            Kernels::Generated => Some(target.ok_or(Error::NoTarget)?),
        };
        let host = match device {
            Some(target) if target.is_gpu() => Target::host(),
            same => same,
        };
        Ok(Targets { device, host })
    }

    fn of(self, space: ir::schedule::MemorySpace) -> Option<Target> {
        match space {
            ir::schedule::MemorySpace::Device(_) => self.device,
            ir::schedule::MemorySpace::Host => self.host,
            // `verify` has refused lines that run there.
            ir::schedule::MemorySpace::Disk => None,
        }
    }
}

/// What kernels are alike by: the op, its operands, the bytes of scratch, and what they run on.
type Likeness = (String, Vec<TensorType>, u64, Option<Target>);

/// A kernel that is to be compiled.
struct Pending {
    /// An index into the artifact's kernels.
    kernel: usize,
    generated: Generated,
    target: Target,
}

struct Emitter<'a> {
    program: &'a Program,
    targets: Targets,
    /// See [`passes::pipeline::Options::tf32`].
    tf32: bool,
    /// See [`passes::pipeline::Options::cancel`].
    cancel: &'a Cancel,
    /// Whether ops without a kernel may be launched.
    may_call: bool,
    /// Kernels by their text: equal ones are one.
    kernels: BTreeMap<(Option<Target>, String), u32>,
    like: HashMap<Likeness, u32>,
    /// Kernels that are to be compiled, each with an index into the artifact's.
    generated: Vec<Pending>,
    /// Ops without code for the device.
    missing: Vec<Missing>,
    artifact: Artifact,
}

impl Emitter<'_> {
    /// Writes the commands of every line.
    fn lines(&mut self) -> Result<(), Error> {
        let schedule = &self.program.schedule;
        // A line has an event if a line of another stream waits for it.
        let mut events: Table<Instr, Option<u32>> = Table::filled(schedule.instrs.len(), None);
        for dep in schedule.instrs.values().flat_map(|data| &data.after) {
            if events[dep.instr].is_none() {
                events[dep.instr] = Some(self.artifact.events);
                self.artifact.events += 1;
            }
        }
        for (instr, line) in schedule.instrs.iter() {
            let mut kinds = vec![];
            for dep in &line.after {
                let event = events[dep.instr];
                kinds.push(CommandKind::Wait {
                    event: event.expect("a line that is waited for should have an event"),
                    previous: dep.previous,
                });
            }
            kinds.push(self.command(instr)?);
            kinds.extend(events[instr].map(|event| CommandKind::Record { event }));
            let (stream, number) = (line.stream.index() as u32, instr.index() as u32);
            let commands = kinds.into_iter().map(|kind| Command {
                stream,
                line: number,
                kind,
            });
            self.artifact.commands.extend(commands);
            self.artifact.lines.push(Line {
                name: self.line_name(instr),
                why: line.why.name().into(),
            });
        }
        Ok(())
    }

    fn command(&mut self, instr: Instr) -> Result<CommandKind, Error> {
        let (graph, schedule) = (&self.program.graph, &self.program.schedule);
        match &schedule.instrs[instr].kind {
            InstrKind::Run {
                node,
                args,
                outs,
                scratch,
                part,
            } => {
                let data = &graph.nodes[*node];
                if let (Op::Extern(op), false) = (&data.op, self.may_call) {
                    return Err(Error::Unsupported {
                        op: op.name.clone(),
                        node: graph.node_name(*node).to_string(),
                    });
                }
                let place = outs.iter().chain(args).next();
                let place = place.expect("a node should have operands or results");
                let pool = schedule.buffers[place.buffer].pool;
                let target = self.targets.of(schedule.pools[pool].space);
                let kernel = self.kernel((*node, *part), *scratch, target)?;
                let scratch = scratch.map(|loc| Range {
                    place: self.place(loc),
                    bytes: schedule.buffers[loc.buffer].bytes - loc.offset,
                });
                let operands = |values: &[Value], locs: &[Loc]| -> Vec<Operand> {
                    values
                        .iter()
                        .zip(locs)
                        .map(|(&v, &loc)| self.operand_of(self.ty_of((*node, *part), v), loc))
                        .collect()
                };
                Ok(CommandKind::Launch {
                    kernel,
                    ins: operands(&data.inputs, args),
                    outs: operands(&data.outputs, outs),
                    scratch,
                })
            }
            &InstrKind::Copy { src, dst, bytes } => Ok(CommandKind::Copy {
                src: self.place(src),
                dst: self.place(dst),
                bytes,
            }),
        }
    }

    /// The kernel of a node: one generated for `target` if there may be, else the runtime's.
    fn kernel(
        &mut self,
        (node, part): (Node, Option<Part>),
        scratch: Option<Loc>,
        target: Option<Target>,
    ) -> Result<u32, Error> {
        let graph = &self.program.graph;
        let data = &graph.nodes[node];
        let types = |values: &[Value]| -> Vec<TensorType> {
            let types = values.iter();
            types.map(|&v| self.ty_of((node, part), v)).collect()
        };
        let (ins, outs) = (types(&data.inputs), types(&data.outputs));
        let scratch = scratch.map_or(0, |loc| {
            self.program.schedule.buffers[loc.buffer].bytes - loc.offset
        });
        let mut key = text::print_op(&data.op);
        // Layers are alike, and generating takes longer than asking.
        let like = (key.clone(), ins.clone(), scratch, target);
        if let Some(&index) = self.like.get(&like) {
            return Ok(index);
        }
        let generated = generated_for(graph, (node, &ins), scratch, target.as_ref(), self.tf32)?;
        let is_called = matches!(data.op, Op::Extern(_));
        if let (None, Some(gpu), false) = (&generated, target.filter(Target::is_gpu), is_called) {
            self.lacks(node, gpu);
        }
        let on_gpu = target.as_ref().is_some_and(Target::is_gpu);
        // The runtime's own kernel is the same for all types.
        let mut of = None;
        if generated.is_some() {
            of = target;
            ins.iter().for_each(|ty| key.push_str(&format!(" {ty}")));
        }
        let next = self.artifact.kernels.len() as u32;
        let index = *self.kernels.entry((of, key)).or_insert(next);
        self.like.insert(like, index);
        if index < next {
            return Ok(index);
        }
        let attrs = match &generated {
            // What it computes is in its code. A device's machine looks at the indices of ops that
            // have some, and the attributes say which are right.
            Some(_) if !(on_gpu && data.op.facts().access == Access::Whole) => vec![],
            Some(_) | None => data
                .op
                .attrs()
                .iter()
                .map(|(&key, value)| (key.to_string(), attr(value)))
                .collect(),
        };
        let code = generated.map(|kernel| {
            // Objects are numbered when they are made.
            let code = code(&kernel, &ins, &outs, 0);
            self.generated.push(Pending {
                kernel: next as usize,
                generated: kernel,
                target: target.expect("a generated kernel should have a target"),
            });
            code
        });
        self.artifact.kernels.push(Kernel {
            op: data.op.name().into(),
            attrs,
            code,
        });
        Ok(index)
    }

    /// Notes that a node's op has no code for a GPU; the first node of each op.
    fn lacks(&mut self, node: Node, gpu: Target) {
        let graph = &self.program.graph;
        let op = graph.nodes[node].op.name();
        if self.missing.iter().all(|missing| missing.op != op) {
            self.missing.push(Missing {
                op,
                gpu: gpu.name(),
                node: graph.node_name(node).to_string(),
            });
        }
    }

    /// Has the generated kernels compiled. Those of the device come first.
    fn compile(&mut self) -> Result<(), Error> {
        let Targets { device, host } = self.targets;
        let mut targets: Vec<Target> = device.into_iter().chain(host).collect();
        targets.dedup();
        for target in targets {
            let mine = |pending: &&Pending| pending.target == target;
            let pending: Vec<&Pending> = self.generated.iter().filter(mine).collect();
            let kernels: Vec<&Generated> = pending.iter().map(|p| &p.generated).collect();
            let first = self.artifact.objects.len() as u32;
            let objects = objects::objects(&kernels, &target, self.cancel)?;
            // A GPU's kernels are one object.
            for (number, pending) in pending.iter().enumerate() {
                let code = self.artifact.kernels[pending.kernel].code.as_mut();
                let code = code.expect("a kernel to be compiled should have code");
                code.object = first + number.min(objects.len() - 1) as u32;
            }
            self.artifact.objects.extend(objects);
        }
        Ok(())
    }

    fn place(&self, loc: Loc) -> Place {
        let plan = self
            .program
            .plan
            .as_ref()
            .expect("a program to emit should have a plan");
        let pool = self.program.schedule.buffers[loc.buffer].pool;
        Place {
            pool: pool.index() as u32,
            offset: plan.address(loc),
        }
    }

    /// The type of an operand or a result of a line. A part of a value has one dimension.
    fn ty_of(&self, (node, part): (Node, Option<Part>), value: Value) -> TensorType {
        let graph = &self.program.graph;
        let ty = &graph.values[value].ty;
        let bytes = graph.extent(node, part, value).bytes;
        if part.is_none() || bytes == ty.bytes() {
            return ty.clone();
        }
        let n = bytes / ty.dtype().bytes();
        TensorType::new(ty.dtype(), [n]).expect("a part of a type should be a type")
    }

    fn operand(&self, value: Value, loc: Loc) -> Operand {
        self.operand_of(self.program.graph.values[value].ty.clone(), loc)
    }

    fn operand_of(&self, ty: TensorType, loc: Loc) -> Operand {
        Operand {
            place: self.place(loc),
            dtype: dtype(ty.dtype()),
            shape: ty.shape().to_vec(),
        }
    }

    /// A line as a person knows it.
    fn line_name(&self, instr: Instr) -> String {
        let (graph, schedule) = (&self.program.graph, &self.program.schedule);
        match schedule.instrs[instr].kind {
            InstrKind::Run { node, .. } => graph.node_name(node).to_string(),
            InstrKind::Copy { src, dst, .. } => {
                format!(
                    "{} -> {}",
                    schedule.buffers[src.buffer].name, schedule.buffers[dst.buffer].name
                )
            }
        }
    }
}

/// What kernels are generated for on this machine, if they are.
pub fn target(kernels: Kernels) -> Result<Option<Target>, Error> {
    match kernels {
        Kernels::Plain => Ok(None),
        Kernels::Generated => Target::host().map(Some).ok_or(Error::NoTarget),
    }
}

/// The kernel that is generated for a node with `scratch` bytes of scratch; `None` if the runtime's
/// own kernel is used.
pub fn generated(
    graph: &Graph,
    node: Node,
    scratch: u64,
    target: Option<&Target>,
    tf32: bool,
) -> Result<Option<Generated>, Error> {
    let types = graph.types(&graph.nodes[node].inputs);
    generated_for(graph, (node, &types), scratch, target, tf32)
}

/// The same for a line whose operands have these types.
fn generated_for(
    graph: &Graph,
    (node, types): (Node, &[TensorType]),
    scratch: u64,
    target: Option<&Target>,
    tf32: bool,
) -> Result<Option<Generated>, Error> {
    let data = &graph.nodes[node];
    let is_group = data.op.body().is_some();
    let name = || graph.node_name(node).to_string();
    let Some(target) = target else {
        return if is_group {
            Err(Error::Group { node: name() })
        } else {
            Ok(None)
        };
    };
    match kernel_as(&data.op, types, target, scratch, tf32) {
        Ok(kernel) if kernel.scratch_bytes <= scratch => Ok(Some(kernel)),
        Ok(kernel) if is_group => Err(Error::Scratch {
            node: name(),
            needs: kernel.scratch_bytes,
            has: scratch,
        }),
        Err(source) if is_group => Err(Error::NoKernel {
            node: name(),
            source,
        }),
        _ => Ok(None),
    }
}

/// The most operands of a kernel on a GPU: its arguments have 4352 bytes in PTX before 8.1, and a
/// group of updates has about as many results as operands.
const MOST_OPERANDS: usize = 256;

/// The kernel of one op for a target: made from instructions; or, for a GPU, one that is written
/// for the op, if there is no other that does with `scratch` bytes of scratch.
pub fn kernel(
    op: &Op,
    operands: &[TensorType],
    target: &Target,
    scratch: u64,
) -> Result<Generated, Unsupported> {
    kernel_as(op, operands, target, scratch, false)
}

/// The same. With `tf32`, a GPU's products of f32 may round their factors to TF32.
pub fn kernel_as(
    op: &Op,
    operands: &[TensorType],
    target: &Target,
    scratch: u64,
    tf32: bool,
) -> Result<Generated, Unsupported> {
    if target.is_gpu() && operands.len() > MOST_OPERANDS {
        let why = format!("a kernel for GPUs has at most {MOST_OPERANDS} operands");
        return Err(Unsupported::op(op.name(), why));
    }
    let made = kernels::generate_op(op, operands, target);
    let fits = made
        .as_ref()
        .is_ok_and(|made| made.scratch_bytes <= scratch);
    if fits || !target.is_gpu() || op.body().is_some() {
        return made;
    }
    device::kernel(op, operands, tf32).or(made)
}

/// A kernel as artifacts have it, whose object has a number, for operands and results of given
/// types.
pub fn code(kernel: &Generated, ins: &[TensorType], outs: &[TensorType], object: usize) -> Code {
    let ty = |ty: &TensorType| artifact::Type {
        dtype: dtype(ty.dtype()),
        shape: ty.shape().to_vec(),
    };
    let phase = |phase: &kernels::Phase| artifact::Phase {
        symbol: phase.symbol.clone(),
        parts: phase.parts,
        threads: phase.threads,
        shared_bytes: phase.shared_bytes,
    };
    Code {
        object: object as u32,
        phases: kernel.phases.iter().map(phase).collect(),
        ins: ins.iter().map(ty).collect(),
        outs: outs.iter().map(ty).collect(),
        inplace: kernel
            .inplace
            .iter()
            .map(|&(i, j)| (i as u32, j as u32))
            .collect(),
        scratch: kernel.scratch_bytes,
    }
}

/// What a state starts from; its bytes are appended to `blob`.
fn initial(
    state: &ir::graph::StateData,
    bytes: u64,
    data: &Data,
    blob: &mut Vec<u8>,
) -> Result<Initial, Error> {
    if let Some(given) = data.get(&state.path) {
        if given.len() as u64 != bytes {
            return Err(Error::Data {
                path: state.path.clone(),
                bytes,
                given: given.len() as u64,
            });
        }
        let start = blob.len() as u64;
        blob.extend_from_slice(given);
        return Ok(Initial::Data { start, bytes });
    }
    Ok(match state.kind {
        StateKind::Moment | StateKind::Rng => Initial::Zeros,
        StateKind::Param | StateKind::Buffer | StateKind::Const => Initial::Absent,
    })
}

fn summary(compiled: &Compiled) -> Summary {
    let Options {
        optimizer,
        micro_batches,
        ref group_options,
        ..
    } = compiled.options;
    let options = optimizer.options();
    Summary {
        planned_peak_bytes: compiled.planned_peak,
        keep_peak_bytes: compiled.decided.keep_peak,
        budget_bytes: compiled.decided.budget,
        predicted_ms: compiled.timeline.micros / 1e3,
        swapped_bytes: compiled.timeline.swapped_bytes,
        recomputed_ms: compiled.timeline.recomputed / 1e3,
        micro_batches: micro_batches.unwrap_or(1) as u64,
        groups: group_options.clone(),
        optimizer: (!options.is_empty()).then(|| {
            (
                optimizer.name().into(),
                options
                    .iter()
                    .map(|&(key, value)| (key.into(), value))
                    .collect(),
            )
        }),
    }
}

fn memory_space(space: ir::schedule::MemorySpace) -> artifact::MemorySpace {
    match space {
        ir::schedule::MemorySpace::Device(n) => artifact::MemorySpace::Device(n),
        ir::schedule::MemorySpace::Host => artifact::MemorySpace::Host,
        ir::schedule::MemorySpace::Disk => artifact::MemorySpace::Disk,
    }
}

fn state_kind(kind: StateKind) -> artifact::StateKind {
    match kind {
        StateKind::Param => artifact::StateKind::Param,
        StateKind::Buffer => artifact::StateKind::Buffer,
        StateKind::Const => artifact::StateKind::Const,
        StateKind::Moment => artifact::StateKind::Moment,
        StateKind::Rng => artifact::StateKind::Rng,
    }
}

/// An attribute in the artifact's types.
pub fn attr(attr: &ir::Attr) -> artifact::Attr {
    match attr {
        ir::Attr::Int(i) => artifact::Attr::Int(*i),
        ir::Attr::Float(x) => artifact::Attr::Float(*x),
        ir::Attr::Bool(b) => artifact::Attr::Bool(*b),
        ir::Attr::Ints(v) => artifact::Attr::Ints(v.clone()),
        ir::Attr::Type(d) => artifact::Attr::Type(dtype(*d)),
        ir::Attr::Str(s) => artifact::Attr::Str(s.clone()),
        ir::Attr::Body(_) => artifact::Attr::Str(text::print_attr(attr)),
    }
}

/// An element type in the artifact's types.
pub fn dtype(dtype: ir::DType) -> artifact::DType {
    use artifact::DType as To;
    use ir::DType as From;
    match dtype {
        From::Bool => To::Bool,
        From::U8 => To::U8,
        From::I8 => To::I8,
        From::I16 => To::I16,
        From::I32 => To::I32,
        From::I64 => To::I64,
        From::F16 => To::F16,
        From::BF16 => To::BF16,
        From::F32 => To::F32,
        From::F64 => To::F64,
        From::F8E4M3 => To::F8E4M3,
        From::F8E5M2 => To::F8E5M2,
    }
}
