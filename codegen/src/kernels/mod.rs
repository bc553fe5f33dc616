//! Kernels made for a graph: from a [`Body`] and the types of its operands to MLIR text, and from
//! that to objects and PTX.
//!
//! # What a kernel is
//!
//! One function or two, its phases. A phase is cut into parts, at places that depend on shapes
//! alone: parts know nothing of each other, may run at the same time and in any order, and their
//! bits do not depend on the thread that runs them. A phase starts when all parts of the one before
//! are done. The first phase computes; the second, if there is one, adds up what the parts of the
//! first summed over rows.
//!
//! For a CPU, a phase is `extern "C" fn(args: *const *mut u8, first: u64, end: u64)` and computes
//! the parts `first..end`. `args` points to the addresses of the operands, the results and, if the
//! kernel has any, the scratch, in that order. Each address is a multiple of 64, also of a tensor
//! without elements; tensors have the bytes that their types say; results are disjoint from each
//! other, from the scratch, and from operands. One exception: a result may lie exactly on one
//! operand if [`Generated::inplace`] has the pair. A function calls nothing and touches no other
//! memory.
//!
//! For a GPU, a phase is a kernel that takes the same addresses as its arguments, with blocks of
//! [`Phase::threads`] threads and any number of blocks, at best [`Phase::parts`].
//!
//! # What it computes
//!
//! What the ops' plain kernels compute one by one: the same formulas in the same order,
//! intermediate values rounded to their element types. Exponentials, `tanh` and `erf` use fused
//! multiply-adds and differ by a few units in the last place; sums over rows and columns of f32 and
//! half-precision numbers are taken in f32, 16 at a time and by halves at the end.

mod cache;
mod cpu;
mod dag;
mod emit;
mod generator;
mod gpu;
mod lower;
mod machine;
mod math;
mod passes;
mod phases;
mod plan;
pub mod private;
mod random;
mod rows;
mod target;
#[cfg(test)]
mod tests;

pub use cache::{Cache, compile_kernels, compile_kernels_until};
pub(crate) use emit::{Function, SYMBOL};
pub use generator::{Generator, GeneratorError, Stage, find, installed_at, run_all};
pub(crate) use lower::{storage, wide};
pub use target::{CpuTarget, GpuTarget, Target};

use crate::mlir::{self, Kind, Mismatch, Module};
use cpu::Cpu;
use gpu::Gpu;
use ir::op::OpKind;
use ir::op::body::{self, Body, Read, Space, Step, View};
use ir::{Op, TensorType};
use machine::Machine;
use plan::{Out, Plan};
use sha2::{Digest, Sha256};

/// A kernel as MLIR text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Generated {
    /// Its name, which its phases' symbols begin with: a hash of what it computes.
    pub name: String,
    /// Its phases, in order. A kernel without elements has none.
    pub phases: Vec<Phase>,
    /// Bytes of scratch.
    pub scratch_bytes: u64,
    /// The (operand, result) pairs that may share their bytes.
    pub inplace: Vec<(usize, usize)>,
    /// A module with a function for each phase.
    pub mlir: String,
}

/// A function of a kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Phase {
    /// The function's name.
    pub symbol: String,
    /// How many parts there are.
    pub parts: u64,
    /// Threads of a block, on a GPU; 1 on a CPU.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: u32,
}

/// Why no kernel is generated for an op, `fused` if it is none in particular: the op's plain kernel
/// is used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unsupported {
    /// There is no code for it, for these types or shapes.
    #[error("no kernel is generated for {op}: {why}")]
    Op {
        /// The op.
        op: String,
        /// What about it.
        why: String,
    },
    /// Its formula mixes floating-point numbers with its operands, which are integers.
    #[error("no kernel is generated for {op}: it is for floating-point numbers ({source})")]
    Real {
        /// The op.
        op: String,
        /// The instruction that shows it.
        source: mlir::Error,
    },
    /// An instruction of it does not fit its operands.
    #[error("no kernel is generated for {op}: {source}")]
    Mistyped {
        /// The op.
        op: String,
        /// The instruction.
        source: mlir::Error,
    },
}

impl Unsupported {
    pub(crate) fn op(op: &str, why: impl Into<String>) -> Unsupported {
        Unsupported::Op {
            op: op.into(),
            why: why.into(),
        }
    }

    /// An op whose instructions do not fit each other.
    pub(crate) fn mistyped(op: &str, source: mlir::Error) -> Unsupported {
        let op = op.into();
        let is_float = |ty: mlir::Type| ty.kind().is_some_and(Kind::is_float);
        match source.why {
            // The formula has a floating-point number in it, the operands are none.
            Mismatch::Different(a, b) if is_float(a) != is_float(b) => {
                Unsupported::Real { op, source }
            }
            Mismatch::NotFloat(_) => Unsupported::Real { op, source },
            _ => Unsupported::Mistyped { op, source },
        }
    }
}

/// The kernel of a body over operands of the given types.
pub fn generate(
    body: &Body,
    operands: &[TensorType],
    target: &Target,
) -> Result<Generated, Unsupported> {
    kernel(body.steps(), body.results(), operands, target)
}

/// The kernel of one op.
pub fn generate_op(
    op: &Op,
    operands: &[TensorType],
    target: &Target,
) -> Result<Generated, Unsupported> {
    if let Some(body) = op.body() {
        return generate(body, operands, target);
    }
    let types: Vec<&TensorType> = operands.iter().collect();
    let outputs = op
        .infer(&types)
        .map_err(|why| Unsupported::op(op.name(), why.to_string()))?
        .len();
    let n = operands.len();
    let step = Step {
        op: op.clone(),
        inputs: (0..n).collect(),
        outputs,
    };
    kernel(
        &[step],
        &(n..n + outputs).collect::<Vec<_>>(),
        operands,
        target,
    )
}

fn kernel(
    steps: &[Step],
    results: &[usize],
    operands: &[TensorType],
    target: &Target,
) -> Result<Generated, Unsupported> {
    let name = match steps {
        [step] => step.op.name(),
        _ => OpKind::Fused.name(),
    };
    for step in steps {
        if !step.op.facts().may_be_generated() && !View::is_made_by(&step.op) {
            return Err(Unsupported::op(step.op.name(), lower::NO_CODE));
        }
    }
    let types = body::types(steps, operands).map_err(|e| Unsupported::op(name, e.to_string()))?;
    if types.iter().any(|ty| ty.numel() == 0) {
        if results.iter().all(|&v| types[v].numel() == 0) {
            return Ok(nothing());
        }
        return Err(Unsupported::op(name, "it makes something of no elements"));
    }
    let space =
        Space::new(steps, results, operands).map_err(|e| Unsupported::op(name, e.to_string()))?;
    let lowering = lowered(name, &space, operands.len(), target)?;
    let out = |&v: &usize| Out {
        value: v,
        ty: space.types[v].clone(),
        known: lowering.known(v),
    };
    let outs: Vec<Out> = space.results.iter().map(out).collect();
    for out in &outs {
        let dtype = out.ty.dtype();
        if lower::storage(dtype).is_none() {
            let why = format!("there are no kernels for {dtype}");
            return Err(Unsupported::op(name, why));
        }
    }
    let plan = Plan {
        dag: &lowering.dag,
        space: &space,
        operands,
        results: &outs,
    };
    let emitted = match target {
        Target::Cpu(_) => emit::emit::<Cpu>(&plan),
        Target::Gpu(_) => emit::emit::<Gpu>(&plan),
    };
    let emitted = emitted.map_err(|error| Unsupported::mistyped(name, error))?;
    let inplace = inplace(&plan);
    Ok(named(
        emitted.module,
        emitted.functions,
        emitted.scratch_bytes,
        inplace,
    ))
}

/// The kernel of something without elements.
pub(crate) fn nothing() -> Generated {
    Generated {
        name: "nothing".into(),
        phases: vec![],
        scratch_bytes: 0,
        inplace: vec![],
        mlir: "module {\n}\n".into(),
    }
}

/// The steps of a kernel as instructions.
fn lowered<'a>(
    name: &str,
    space: &'a Space,
    n_operands: usize,
    target: &Target,
) -> Result<lower::Lowering<'a>, Unsupported> {
    let functions = match target {
        Target::Cpu(_) => Cpu::FUNCTIONS,
        Target::Gpu(_) => Gpu::FUNCTIONS,
    };
    let lowering = lower::Lowering::new(functions, space);
    let mut lowering = lowering.map_err(|why| Unsupported::op(name, why))?;
    let mut at = n_operands;
    for step in &space.steps {
        let op = step.op.name();
        lowering
            .step(step, at)
            .map_err(|why| Unsupported::op(op, why))?;
        if let Some(error) = lowering.dag.take_error() {
            return Err(Unsupported::mistyped(op, error));
        }
        at += step.outputs;
    }
    Ok(lowering)
}

/// The (operand, result) pairs that may share their bytes: of one type, where each element is read
/// before its place is written.
fn inplace(plan: &Plan<'_>) -> Vec<(usize, usize)> {
    let space = plan.space;
    let mut pairs = vec![];
    for (i, ty) in plan.operands.iter().enumerate() {
        for (j, out) in plan.results.iter().enumerate() {
            let unlike = |read: &Read| {
                let elements = |v: usize| (space.axes(v), space.place(v));
                read.operand == i && elements(read.value) != elements(out.value)
            };
            if *ty == out.ty && !space.tables.contains(&i) && !space.reads.iter().any(unlike) {
                pairs.push((i, j));
            }
        }
    }
    pairs
}

/// A kernel with its name: a hash of its text, in which the name is [`SYMBOL`] until then.
pub(crate) fn named(
    mut module: Module,
    functions: Vec<Function>,
    scratch_bytes: u64,
    inplace: Vec<(usize, usize)>,
) -> Generated {
    let name = name(&module.to_string());
    module.rename(SYMBOL, &name);
    let phase = |f: Function| Phase {
        symbol: f.symbol.replacen(SYMBOL, &name, 1),
        parts: f.parts,
        threads: f.threads,
        shared_bytes: f.shared_bytes,
    };
    Generated {
        phases: functions.into_iter().map(phase).collect(),
        mlir: module.to_string(),
        scratch_bytes,
        inplace,
        name,
    }
}

/// A short name for a text: `k` and the first eight bytes of its SHA-256.
fn name(text: &str) -> String {
    let hash = Sha256::digest(text);
    let digits: String = hash[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{SYMBOL}{digits}")
}
