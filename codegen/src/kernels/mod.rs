//! Kernels made for a graph: from a [`Body`] and the types of its operands to MLIR text, and from
//! that to objects and PTX.
//!
//! # What a kernel is
//!
//! One function or two, its phases. A phase is cut into parts, at places that depend on shapes
//! alone: parts know nothing of each other, may run at the same time and in any order, and their
//! bits do not depend on who runs them. A phase starts when all parts of the one before are done.
//! The first phase computes; the second, if there is one, adds up what the parts of the first
//! summed over rows.
//!
//! For a CPU, a phase is `extern "C" fn(args: *const *mut u8, first: u64, end: u64)` and computes
//! the parts `first..end`. `args` points to the addresses of the operands, the results and, if the
//! kernel has any, the scratch, in that order. Each address is a multiple of 64, also of a tensor
//! without elements; tensors have the bytes that their types say; results are disjoint from each
//! other, from the scratch, and from operands, but that a result may lie exactly on one operand if
//! [`Generated::inplace`] has the pair. A function calls nothing and touches no other memory.
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
mod random;
mod rows;
mod target;

pub use cache::{Cache, compile_kernels};
pub use generator::{Generator, GeneratorError, Stage, find, run_all};
pub use target::{CpuTarget, GpuTarget, Target};

use crate::mlir::{self, Kind, Mismatch};
use cpu::Cpu;
use gpu::Gpu;
use ir::body::{self, Body, Space, Step};
use ir::op::Access;
use ir::{Op, TensorType};
use machine::Machine;
use sha2::{Digest, Sha256};
use std::fmt;

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
}

/// Why there is no kernel: the op's plain kernel has to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unsupported {
    /// The op; `fused` if it is none in particular.
    pub op: String,
    /// What about it.
    pub why: String,
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no kernel is generated for {}: {}", self.op, self.why)
    }
}

impl std::error::Error for Unsupported {}

/// Ops that are no steps of bodies and have kernels by themselves.
const WHOLE: [&str; 2] = ["reshape", "dropout"];

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
        .map_err(|why| Unsupported {
            op: op.name().into(),
            why,
        })?
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
    let whole = |why: String| {
        let op = if steps.len() == 1 {
            steps[0].op.name()
        } else {
            "fused"
        };
        Unsupported { op: op.into(), why }
    };
    for step in steps {
        if step.op.row().access == Access::Whole && !WHOLE.contains(&step.op.name()) {
            return Err(Unsupported {
                op: step.op.name().into(),
                why: "there is no vector code for it".into(),
            });
        }
    }
    let types = body::types(steps, operands).map_err(whole)?;
    if types.iter().any(|ty| ty.numel() == 0) {
        if results.iter().all(|&v| types[v].numel() == 0) {
            let mlir = "module {\n}\n".to_string();
            return Ok(Generated {
                name: "nothing".into(),
                phases: vec![],
                scratch_bytes: 0,
                inplace: vec![],
                mlir,
            });
        }
        return Err(whole("it makes something of no elements".into()));
    }
    let space = Space::new(steps, results, operands).map_err(whole)?;
    let functions = match target {
        Target::Cpu(_) => Cpu::FUNCTIONS,
        Target::Gpu(_) => Gpu::FUNCTIONS,
    };
    let mut lowering = lower::Lowering::new(functions, &space).map_err(whole)?;
    let mut at = operands.len();
    for step in &space.steps {
        let wrong = |why| Unsupported {
            op: step.op.name().into(),
            why,
        };
        lowering.step(step, at).map_err(wrong)?;
        if let Some(error) = lowering.dag.take_error() {
            return Err(wrong(mistyped(&error)));
        }
        at += step.outputs;
    }
    let out = |&v: &usize| emit::Out {
        value: v,
        ty: space.types[v].clone(),
        known: lowering.known(v),
    };
    let outs: Vec<emit::Out> = space.results.iter().map(out).collect();
    for out in &outs {
        if lower::storage(out.ty.dtype()).is_none() {
            return Err(whole(format!(
                "there are no kernels for {}",
                out.ty.dtype()
            )));
        }
    }
    let mut inplace = vec![];
    for (i, ty) in operands.iter().enumerate() {
        for (j, out) in outs.iter().enumerate() {
            let unlike = |&(v, operand): &(usize, usize)| {
                operand == i && space.axes(v) != space.axes(out.value)
            };
            if *ty == out.ty && !space.tables.contains(&i) && !space.reads.iter().any(unlike) {
                inplace.push((i, j));
            }
        }
    }
    let plan = emit::Plan {
        dag: &lowering.dag,
        space: &space,
        operands,
        results: &outs,
    };
    let emitted = match target {
        Target::Cpu(_) => emit::emit::<Cpu>(&plan),
        Target::Gpu(_) => emit::emit::<Gpu>(&plan),
    };
    let mut emitted = emitted.map_err(|error| whole(error.to_string()))?;
    // The name is a hash of the text, which has the name in it: so the text is printed with another
    // first.
    let name = name(&emitted.module.to_string());
    emitted.module.rename(emit::SYMBOL, &name);
    let phase = |f: emit::Function| Phase {
        symbol: f.symbol.replacen(emit::SYMBOL, &name, 1),
        parts: f.parts,
        threads: f.threads,
    };
    let phases = emitted.functions.into_iter().map(phase).collect();
    Ok(Generated {
        mlir: emitted.module.to_string(),
        phases,
        scratch_bytes: emitted.scratch_bytes,
        inplace,
        name,
    })
}

/// Why an op whose instructions do not fit each other has no kernel.
fn mistyped(error: &mlir::Error) -> String {
    let is_float = |ty: mlir::Type| ty.kind().is_some_and(Kind::is_float);
    match error.why {
        // The op's formula has a floating-point number in it, its operands are none.
        Mismatch::Different(a, b) if is_float(a) != is_float(b) => {
            format!("it is for floating-point numbers ({error})")
        }
        Mismatch::NotFloat(_) => format!("it is for floating-point numbers ({error})"),
        _ => error.to_string(),
    }
}

/// A short name for a text: `k` and the first eight bytes of its SHA-256.
fn name(text: &str) -> String {
    let hash = Sha256::digest(text);
    let digits: String = hash[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}{digits}", emit::SYMBOL)
}
