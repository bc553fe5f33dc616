//! GPU kernels of ops that no other generated kernel computes: ops whose results depend on any
//! elements of their operands, and reductions and softmax for dimensions, or without scratch, that
//! other kernels do not support.
//!
//! Each is written for its shapes as a list of phases, with the interface of generated kernels
//! ([`crate::kernels`]): any number of blocks computes the same bits (except attention by tensor
//! cores), and the in-place pairs of the op's facts are permitted. There are no atomic additions,
//! so bits do not depend on the order of threads. Sequential sums have the order of the runtime's
//! plain kernels; sums over a block's threads are computed by halves.
//!
//! An index that is out of range reads bits that are all ones (NaN in floating-point numbers), and
//! writes nothing.

mod attention;
mod blocks;
mod functions;
mod grid;
mod groups;
mod lines;
mod loss;
mod moves;
mod norms;
mod product;
mod random;
mod reduce;
mod softmax;
mod sorted;
mod tables;
mod tensor;
mod tensor_windows;
mod topk;
mod windows;

use crate::kernels::{Function, Generated, Unsupported, named, nothing};
use crate::mlir::{self, Module, Value};
use grid::{Grid, THREADS};
use ir::{Op, TensorType};
use reduce::Fold;

/// The kernel of an op over operands of the given types. With `tf32`, products of f32 may round
/// their factors to TF32.
pub(crate) fn kernel(
    op: &Op,
    operands: &[TensorType],
    tf32: bool,
) -> Result<Generated, Unsupported> {
    let types: Vec<&TensorType> = operands.iter().collect();
    let results = op
        .infer(&types)
        .map_err(|why| Unsupported::op(op.name(), why.to_string()))?;
    if results.iter().all(|ty| ty.numel() == 0) {
        return Ok(nothing());
    }
    let mut kernel = Kernel {
        tf32,
        ..Kernel::new(op, operands, results)
    };
    write(&mut kernel, op).map_err(|why| Unsupported::op(op.name(), why))?;
    kernel.finish()
}

/// Writes the phases of an op. The match lists the ops that have a kernel here. The declaration
/// says whether an op needs one: kernels made from instructions compute all ops that are not
/// `Whole`. Reductions and softmax have both.
fn write(k: &mut Kernel<'_>, op: &Op) -> Result<(), &'static str> {
    match op {
        Op::Permute(a) => moves::permute(k, a),
        Op::Flip(a) => moves::flip(k, a),
        Op::Slice(a) => moves::slice(k, a),
        Op::SliceScatter(a) => moves::slice_scatter(k, a),
        Op::Cat(a) => moves::cat(k, a),
        Op::Pad(a) => moves::pad(k, a),
        Op::Arange(a) => moves::arange(k, a),
        Op::Sin => functions::sin(k),
        Op::Cos => functions::cos(k),
        Op::Atan => functions::atan(k),
        Op::Pow => functions::pow(k),
        Op::NllLoss(a) => loss::nll_loss(k, a),
        Op::NllSum(a) => loss::nll_sum(k, a),
        Op::SumSquares => loss::sum_squares(k),
        Op::ClipScale(a) => loss::clip_scale(k, a),
        Op::Adamw8bit => blocks::adamw_8bit(k),
        Op::Nf4(_) => blocks::nf4(k),
        Op::Rand(a) => random::rand(k, a),
        Op::Randn(a) => random::randn(k, a),
        Op::DropoutKey(a) => random::dropout_key(k, a),
        Op::RngNext => random::rng_next(k),
        Op::Embedding(_) => tables::embedding(k),
        Op::EmbeddingBwd(a) => tables::embedding_bwd(k, a),
        Op::Gather(a) => tables::gather(k, a),
        Op::Scatter(a) => tables::scatter(k, a),
        Op::ScatterAdd(a) => tables::scatter_add(k, a),
        Op::ScatterValue(a) => tables::scatter_value(k, a),
        Op::Index => tables::index(k),
        Op::IndexPut(a) => tables::index_put(k, a),

        Op::Softmax(a) => softmax::softmax(k, a, false),
        Op::LogSoftmax(a) => softmax::softmax(k, a, true),
        Op::SoftmaxBwd(a) => softmax::softmax_bwd(k, a, false),
        Op::LogSoftmaxBwd(a) => softmax::softmax_bwd(k, a, true),
        Op::Sum(a) => reduce::reduce(k, a, Fold::Sum),
        Op::Mean(a) => reduce::reduce(k, a, Fold::Mean),
        Op::Amax(a) => reduce::reduce(k, a, Fold::Largest),
        Op::Amin(a) => reduce::reduce(k, a, Fold::Smallest),
        Op::Any(a) => reduce::reduce(k, a, Fold::Any),
        Op::Cumsum(a) => lines::cumsum(k, a),
        Op::TopK(a) => topk::topk(k, a),
        Op::BatchNorm(a) => norms::batch_norm(k, a),
        Op::BatchNormBwd(a) => norms::batch_norm_bwd(k, a),
        Op::Matmul(a) => product::matmul(k, a),
        Op::Addmm(a) => product::addmm(k, a),
        Op::MatmulSum(a) => product::matmul_sum(k, a),
        Op::GroupedMatmul(a) => product::grouped_matmul(k, a),
        Op::GroupedOuter => product::grouped_outer(k),
        Op::Convolution(a) => windows::convolution(k, a),
        Op::ConvolutionBwd(a) => windows::convolution_bwd(k, a),
        Op::MaxPool2d(a) => windows::max_pool2d(k, a),
        Op::MaxPool2dBwd(a) => windows::max_pool2d_bwd(k, a),
        Op::Sdpa(a) => attention::sdpa(k, a),
        Op::SdpaBwd(a) => attention::sdpa_bwd(k, a),
        Op::SdpaRows(a) => attention::sdpa_rows(k, a),
        Op::SdpaRowsBwd(a) => attention::sdpa_rows_bwd(k, a),

        // Other kernels compute these.
        _ if op.facts().may_be_generated() => return Err("it is made from instructions"),
        _ if !op.facts().has_kernel => return Err("it has no kernel of its own"),
        // The test `every_op_has_a_kernel_for_gpus` names an op without an arm.
        _ => return Err("it should have an arm in codegen/src/device/mod.rs"),
    }
    Ok(())
}

/// The symbol of a phase until its kernel has a name.
fn symbol(number: usize) -> String {
    match number {
        0 => crate::kernels::SYMBOL.to_string(),
        n => format!("{}_{n}", crate::kernels::SYMBOL),
    }
}

/// A kernel under construction.
struct Kernel<'a> {
    operands: &'a [TensorType],
    results: Vec<TensorType>,
    op: &'a Op,
    /// Whether products of f32 may round their factors to TF32.
    tf32: bool,
    scratch_bytes: u64,
    module: Module,
    functions: Vec<Function>,
    error: Option<mlir::Error>,
}

impl<'a> Kernel<'a> {
    fn new(op: &'a Op, operands: &'a [TensorType], results: Vec<TensorType>) -> Kernel<'a> {
        Kernel {
            operands,
            results,
            op,
            tf32: false,
            scratch_bytes: 0,
            module: Module::default(),
            functions: vec![],
            error: None,
        }
    }

    /// The type of the first operand.
    fn x(&self) -> &'a TensorType {
        &self.operands[0]
    }

    /// The type of the first result.
    fn y(&self) -> &TensorType {
        &self.results[0]
    }

    /// Adds a phase with `parts` parts and `threads` threads in a block.
    fn phase(&mut self, threads: u32, parts: u64, body: impl FnOnce(&mut Grid)) {
        // A phase without elements is not added.
        if parts == 0 {
            return;
        }
        let symbol = symbol(self.functions.len());
        let has_scratch = self.scratch_bytes > 0;
        let mut grid = Grid::new(
            symbol.clone(),
            threads,
            self.operands,
            &self.results,
            has_scratch,
        );
        body(&mut grid);
        let shared_bytes = grid.dynamic_bytes() as u32;
        match grid.finish() {
            Ok(function) => self.module.push(function),
            Err(error) => drop(self.error.get_or_insert(error)),
        }
        self.functions.push(Function {
            symbol,
            parts,
            threads,
            shared_bytes,
        });
    }

    /// Adds the phases of attention by tensor cores.
    fn attend(&mut self, phases: Vec<crate::attention::Phase>) {
        for (number, phase) in phases.into_iter().enumerate() {
            // A phase without elements is not started.
            if phase.blocks == 0 {
                continue;
            }
            match phase.function {
                Ok(function) => self.module.push(function),
                Err(error) => drop(self.error.get_or_insert(error)),
            }
            self.functions.push(Function {
                symbol: symbol(number),
                parts: phase.blocks,
                threads: phase.threads,
                shared_bytes: phase.shared_bytes,
            });
        }
    }

    /// Adds a phase in which each thread computes elements of `n`.
    fn elements(&mut self, n: u64, body: impl FnOnce(&mut Grid, Value)) {
        self.phase(THREADS, n.div_ceil(THREADS.into()), |g| g.elements(n, body));
    }

    fn finish(self) -> Result<Generated, Unsupported> {
        if let Some(error) = self.error {
            return Err(Unsupported::mistyped(self.op.name(), error));
        }
        let same = |&&(i, j): &&(usize, usize)| {
            let operand = self.operands.get(i);
            operand.is_some() && operand == self.results.get(j)
        };
        let inplace = self.op.facts().inplace.iter().filter(same).copied();
        let inplace = inplace.collect();
        Ok(named(
            self.module,
            self.functions,
            self.scratch_bytes,
            inplace,
        ))
    }
}
