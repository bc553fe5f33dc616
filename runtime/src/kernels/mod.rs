//! Plain Rust kernels, one function for each op: the CPU machine runs them, and they are the
//! reference for every other machine.
//!
//! A kernel is found by its op's name when an artifact is loaded. Then `check` refuses every
//! signature on which `run` could panic, so any shapes and attributes give an error or a result.
//! Errors that depend on the data (an index out of range) are reported by `run`. Kernels allocate
//! only for such a message; a thread's first product makes the thread's workspace.
//!
//! Element types: half-precision numbers are computed in f32 and rounded once, integers in i64 and
//! wrapped, bools are bytes (nonzero is true). Sums of floating-point numbers accumulate in f64 in
//! a fixed order, products in their own type. The results are the same bits from run to run.

mod attention;
pub mod blocks;
mod conv;
mod convert;
mod elementwise;
mod error;
mod factor;
mod gemm;
mod grouped;
pub mod halves;
mod index;
mod loss;
mod math;
mod norm;
mod optim;
pub mod owned;
mod pool;
mod product;
mod random;
mod reduce;
mod shape;
mod signature;
mod strides;
mod vectors;
mod wide;

use crate::kernel::Call;
pub use error::{DataError, KernelError};
pub(crate) use index::IndexOperand;
use ops::OpKind;
use signature::Checked;
pub use signature::Signature;
use std::ops::Range;

/// A kernel's result: an error only if its operands' data are wrong.
type Ran = Result<(), DataError>;

/// A kernel.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// The op's name.
    pub name: &'static str,
    /// The smallest and the largest number of operands, as in the table of ops.
    pub inputs: (usize, usize),
    /// The (operand, result) pairs that may share their bytes, if their types are equal, as in the
    /// table of ops.
    pub inplace: &'static [(usize, usize)],
    check: fn(&Signature<'_>) -> Checked,
    scratch: fn(&Signature<'_>) -> u64,
    /// Operands that are indices, of a checked signature.
    indices: fn(&Signature<'_>) -> Vec<IndexOperand>,
    /// Makes a thread's workspace.
    prepare: fn(&Call<'_>) -> Ran,
    /// How threads may share a run, and the functions that run before and after the parts.
    cut: fn(&Call<'_>) -> Cut,
    begin: fn(&Call<'_>) -> Ran,
    run: fn(&Call<'_>) -> Ran,
    end: fn(&Call<'_>) -> Ran,
}

/// How threads may share a run of a kernel. Units are independent: the bits depend neither on where
/// parts begin nor on the number of parts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cut {
    /// The number of units, at least 1. They share the results that parts write equally, or as
    /// equally as possible, in an order that the kernel knows.
    pub units: usize,
    /// Parts may begin at multiples of this.
    pub align: usize,
    /// A part should have at least this many units, so that taking the part costs little compared
    /// with computing it.
    pub grain: usize,
    /// The number of parts for each thread: several, so that threads end together; or one, if each
    /// part begins with work that other parts repeat.
    pub per_thread: usize,
}

/// Elements that take about ten microseconds.
const ELEMENTS: usize = 1 << 14;

impl Cut {
    /// The run is not shared.
    pub(crate) const NO: Cut = Cut {
        units: 1,
        align: 1,
        grain: 1,
        per_thread: 1,
    };

    /// Units that read or write `elements` each, and may begin anywhere.
    pub(crate) fn of(units: usize, elements: usize) -> Cut {
        Cut {
            units: units.max(1),
            align: 1,
            grain: (ELEMENTS / elements.max(1)).max(1),
            per_thread: 4,
        }
    }
    /// Result 0's elements. Four random words are made at a time.
    pub(crate) fn elements(call: &Call<'_>) -> Cut {
        Cut {
            align: 4,
            ..Cut::of(strides::count(call.out_shape(0)), 1)
        }
    }
    fn each(self, parts: usize) -> usize {
        self.units
            .div_ceil(parts.max(1))
            .next_multiple_of(self.align)
    }
    /// The number of parts for a number of threads: the same for each thread, if there are enough.
    pub(crate) fn parts(self, threads: usize) -> usize {
        if threads < 2 {
            return 1;
        }
        let most = (self.units / self.grain.max(self.align)).clamp(1, threads * self.per_thread);
        let even = if most < threads {
            most
        } else {
            most / threads * threads
        };
        self.units.div_ceil(self.each(even))
    }
    /// The units of a part.
    pub(crate) fn part(self, part: usize, parts: usize) -> Range<usize> {
        let each = self.each(parts);
        (part * each).min(self.units)..((part + 1) * each).min(self.units)
    }
}

/// For most kernels nothing runs before or after the parts.
fn nothing(_: &Call<'_>) -> Ran {
    Ok(())
}

impl Kernel {
    const fn new(check: fn(&Signature<'_>) -> Checked, run: fn(&Call<'_>) -> Ran) -> Kernel {
        let cut = |_: &Call<'_>| Cut::NO;
        Kernel {
            name: "",
            inputs: (0, 0),
            inplace: &[],
            check,
            scratch: |_| 0,
            indices: |_| vec![],
            prepare: nothing,
            cut,
            begin: nothing,
            run,
            end: nothing,
        }
    }
    /// The same kernel with the facts from the table of ops.
    const fn of(self, op: OpKind) -> Kernel {
        let facts = op.facts();
        Kernel {
            name: facts.name,
            inputs: facts.inputs,
            inplace: facts.inplace,
            ..self
        }
    }
    const fn cut_by(self, cut: fn(&Call<'_>) -> Cut) -> Kernel {
        Kernel { cut, ..self }
    }
    const fn prepared(self, prepare: fn(&Call<'_>) -> Ran) -> Kernel {
        Kernel { prepare, ..self }
    }
    const fn first(self, begin: fn(&Call<'_>) -> Ran) -> Kernel {
        Kernel { begin, ..self }
    }
    const fn last(self, end: fn(&Call<'_>) -> Ran) -> Kernel {
        Kernel { end, ..self }
    }
    const fn scratch(self, scratch: fn(&Signature<'_>) -> u64) -> Kernel {
        Kernel { scratch, ..self }
    }
    const fn indices(self, indices: fn(&Signature<'_>) -> Vec<IndexOperand>) -> Kernel {
        Kernel { indices, ..self }
    }
    /// Refuses signatures that the kernel cannot run: wrong counts, types, shapes, attributes, too
    /// little scratch. For an accepted signature, [`Kernel::run`] does not panic if operands and
    /// results have these types and are disjoint, except for in-place pairs.
    pub fn check(&self, signature: &Signature<'_>) -> Result<(), KernelError> {
        let checked = signature
            .sane(self.inputs)
            .and_then(|()| (self.check)(signature))
            .and_then(|()| {
                let (needs, has) = ((self.scratch)(signature), signature.scratch);
                signature::ensure(needs <= has, || {
                    format!("needs {needs} bytes of scratch, has {has}")
                })
            });
        let op = self.name;
        checked.map_err(|why| KernelError::Refused { op, why })
    }
    /// The bytes of scratch that a checked signature needs.
    pub fn scratch_bytes(&self, signature: &Signature<'_>) -> u64 {
        (self.scratch)(signature)
    }
    /// The operands that are indices, and which indices [`Kernel::run`] takes: for machines whose
    /// kernels do not look. None for a signature that the kernel cannot run.
    pub(crate) fn index_operands(&self, signature: &Signature<'_>) -> Vec<IndexOperand> {
        match self.check(signature) {
            Ok(()) => (self.indices)(signature),
            Err(_) => vec![],
        }
    }
    /// The error of an index that an operand cannot have.
    pub(crate) fn wrong_index(&self, operand: &IndexOperand, index: i64) -> KernelError {
        self.stopped(operand.wrong(index))
    }
    /// Runs the kernel; an error says what is wrong with its operands' data: `index 300 is not in
    /// 0..257`.
    pub fn run(&self, call: &Call<'_>) -> Result<(), KernelError> {
        self.begin(call)?;
        self.run_part(&call.again())?;
        self.end(&call.again())
    }
    /// How threads may share a run of a checked signature.
    pub(crate) fn cut(&self, call: &Call<'_>) -> Cut {
        (self.cut)(call)
    }
    fn stopped(&self, source: DataError) -> KernelError {
        let op = self.name;
        KernelError::Stopped { op, source }
    }
    /// Makes the workspace that this thread needs for a run, so that it allocates nothing.
    pub(crate) fn prepare(&self, call: &Call<'_>) -> Result<(), KernelError> {
        (self.prepare)(call).map_err(|source| self.stopped(source))
    }
    /// Runs before the parts.
    pub(crate) fn begin(&self, call: &Call<'_>) -> Result<(), KernelError> {
        (self.begin)(call).map_err(|source| self.stopped(source))
    }
    /// Runs one part.
    pub(crate) fn run_part(&self, call: &Call<'_>) -> Result<(), KernelError> {
        (self.run)(call).map_err(|source| self.stopped(source))
    }
    /// Runs after all parts.
    pub(crate) fn end(&self, call: &Call<'_>) -> Result<(), KernelError> {
        (self.end)(call).map_err(|source| self.stopped(source))
    }
}

/// The kernel of an op. This match lists every op, so an op without a kernel does not compile.
const fn kernel(op: OpKind) -> Option<Kernel> {
    let kernel = match op {
        // A reshape shares its operand's bytes, a group of ops has generated code, and an unknown
        // op never runs.
        OpKind::Reshape | OpKind::Detach | OpKind::Fused | OpKind::Extern => return None,
        OpKind::Neg => k(elementwise::check_signed, elementwise::neg).cut_by(Cut::elements),
        OpKind::Abs => k(elementwise::check_numbers, elementwise::abs).cut_by(Cut::elements),
        OpKind::Sign => k(elementwise::check_numbers, elementwise::sign).cut_by(Cut::elements),
        OpKind::Exp => k(elementwise::check_floats, elementwise::exp).cut_by(Cut::elements),
        OpKind::Log => k(elementwise::check_floats, elementwise::log).cut_by(Cut::elements),
        OpKind::Sqrt => k(elementwise::check_floats, elementwise::sqrt).cut_by(Cut::elements),
        OpKind::Rsqrt => k(elementwise::check_floats, elementwise::rsqrt).cut_by(Cut::elements),
        OpKind::Reciprocal => {
            k(elementwise::check_floats, elementwise::reciprocal).cut_by(Cut::elements)
        }
        OpKind::Tanh => k(elementwise::check_floats, elementwise::tanh).cut_by(Cut::elements),
        OpKind::Sigmoid => k(elementwise::check_floats, elementwise::sigmoid).cut_by(Cut::elements),
        OpKind::Sin => k(elementwise::check_floats, elementwise::sin).cut_by(Cut::elements),
        OpKind::Cos => k(elementwise::check_floats, elementwise::cos).cut_by(Cut::elements),
        OpKind::Atan => k(elementwise::check_floats, elementwise::atan).cut_by(Cut::elements),
        OpKind::Erf => k(elementwise::check_floats, elementwise::erf).cut_by(Cut::elements),
        OpKind::Relu => k(elementwise::check_numbers, elementwise::relu).cut_by(Cut::elements),
        OpKind::Silu => k(elementwise::check_floats, elementwise::silu).cut_by(Cut::elements),
        OpKind::Gelu => k(elementwise::check_gelu, elementwise::gelu).cut_by(Cut::elements),
        OpKind::BitwiseNot => {
            k(elementwise::check_bitwise, elementwise::bitwise_not).cut_by(Cut::elements)
        }
        OpKind::LogicalNot => {
            k(elementwise::check_predicate, elementwise::logical_not).cut_by(Cut::elements)
        }
        OpKind::Cast => k(elementwise::check_cast, elementwise::cast).cut_by(Cut::elements),
        OpKind::Clamp => k(elementwise::check_clamp, elementwise::clamp).cut_by(Cut::elements),
        OpKind::AddScalar => {
            k(elementwise::check_scalar, elementwise::add_scalar).cut_by(Cut::elements)
        }
        OpKind::MulScalar => {
            k(elementwise::check_scalar, elementwise::mul_scalar).cut_by(Cut::elements)
        }
        OpKind::DivScalar => {
            k(elementwise::check_float_scalar, elementwise::div_scalar).cut_by(Cut::elements)
        }
        OpKind::RsubScalar => {
            k(elementwise::check_scalar, elementwise::rsub_scalar).cut_by(Cut::elements)
        }
        OpKind::PowScalar => {
            k(elementwise::check_pow_scalar, elementwise::pow_scalar).cut_by(Cut::elements)
        }
        OpKind::EqScalar => {
            k(elementwise::check_compare_scalar, elementwise::eq_scalar).cut_by(Cut::elements)
        }
        OpKind::NeScalar => {
            k(elementwise::check_compare_scalar, elementwise::ne_scalar).cut_by(Cut::elements)
        }
        OpKind::LtScalar => {
            k(elementwise::check_compare_scalar, elementwise::lt_scalar).cut_by(Cut::elements)
        }
        OpKind::LeScalar => {
            k(elementwise::check_compare_scalar, elementwise::le_scalar).cut_by(Cut::elements)
        }
        OpKind::GtScalar => {
            k(elementwise::check_compare_scalar, elementwise::gt_scalar).cut_by(Cut::elements)
        }
        OpKind::GeScalar => {
            k(elementwise::check_compare_scalar, elementwise::ge_scalar).cut_by(Cut::elements)
        }
        OpKind::Add => k(elementwise::check_binary, elementwise::add).cut_by(Cut::elements),
        OpKind::Sub => k(elementwise::check_binary_numbers, elementwise::sub).cut_by(Cut::elements),
        OpKind::Mul => k(elementwise::check_binary, elementwise::mul).cut_by(Cut::elements),
        OpKind::Div => k(elementwise::check_binary_floats, elementwise::div).cut_by(Cut::elements),
        OpKind::Pow => k(elementwise::check_binary_floats, elementwise::pow).cut_by(Cut::elements),
        OpKind::Maximum => k(elementwise::check_binary, elementwise::maximum).cut_by(Cut::elements),
        OpKind::Minimum => k(elementwise::check_binary, elementwise::minimum).cut_by(Cut::elements),
        OpKind::BitwiseAnd => {
            k(elementwise::check_binary_bitwise, elementwise::bitwise_and).cut_by(Cut::elements)
        }
        OpKind::BitwiseOr => {
            k(elementwise::check_binary_bitwise, elementwise::bitwise_or).cut_by(Cut::elements)
        }
        OpKind::BitwiseXor => {
            k(elementwise::check_binary_bitwise, elementwise::bitwise_xor).cut_by(Cut::elements)
        }
        OpKind::Eq => k(elementwise::check_compare, elementwise::eq).cut_by(Cut::elements),
        OpKind::Ne => k(elementwise::check_compare, elementwise::ne).cut_by(Cut::elements),
        OpKind::Lt => k(elementwise::check_compare, elementwise::lt).cut_by(Cut::elements),
        OpKind::Le => k(elementwise::check_compare, elementwise::le).cut_by(Cut::elements),
        OpKind::Gt => k(elementwise::check_compare, elementwise::gt).cut_by(Cut::elements),
        OpKind::Ge => k(elementwise::check_compare, elementwise::ge).cut_by(Cut::elements),
        OpKind::LogicalAnd => {
            k(elementwise::check_compare, elementwise::logical_and).cut_by(Cut::elements)
        }
        OpKind::LogicalOr => {
            k(elementwise::check_compare, elementwise::logical_or).cut_by(Cut::elements)
        }
        OpKind::Where => k(elementwise::check_select, elementwise::select).cut_by(Cut::elements),
        OpKind::TanhBwd => {
            k(elementwise::check_derivative, elementwise::tanh_bwd).cut_by(Cut::elements)
        }
        OpKind::SigmoidBwd => {
            k(elementwise::check_derivative, elementwise::sigmoid_bwd).cut_by(Cut::elements)
        }
        OpKind::SiluBwd => {
            k(elementwise::check_derivative, elementwise::silu_bwd).cut_by(Cut::elements)
        }
        OpKind::GeluBwd => {
            k(elementwise::check_gelu_bwd, elementwise::gelu_bwd).cut_by(Cut::elements)
        }
        OpKind::ThresholdBwd => {
            k(elementwise::check_threshold_bwd, elementwise::threshold_bwd).cut_by(Cut::elements)
        }
        OpKind::Sum => k(reduce::check_numbers, reduce::sum).cut_by(reduce::cut),
        OpKind::Mean => k(reduce::check_floats, reduce::mean).cut_by(reduce::cut),
        OpKind::Amax => k(reduce::check_extreme, reduce::amax).cut_by(reduce::cut),
        OpKind::Amin => k(reduce::check_extreme, reduce::amin).cut_by(reduce::cut),
        OpKind::Any => k(reduce::check_any, reduce::any).cut_by(reduce::cut),
        OpKind::Cumsum => k(reduce::check_cumsum, reduce::cumsum).cut_by(reduce::cut_lines),
        OpKind::TopK => k(reduce::check_topk, reduce::topk)
            .cut_by(reduce::cut_lines)
            .scratch(reduce::topk_scratch),
        OpKind::Softmax => k(norm::check_along, norm::softmax).cut_by(norm::cut_lines),
        OpKind::LogSoftmax => k(norm::check_along, norm::log_softmax).cut_by(norm::cut_lines),
        OpKind::SoftmaxBwd => k(norm::check_along, norm::softmax_bwd).cut_by(norm::cut_lines),
        OpKind::LogSoftmaxBwd => {
            k(norm::check_along, norm::log_softmax_bwd).cut_by(norm::cut_lines)
        }
        OpKind::LayerNorm => k(norm::check_layer_norm, norm::layer_norm).cut_by(norm::cut_rows),
        OpKind::LayerNormBwd => k(norm::check_layer_norm_bwd, norm::layer_norm_bwd)
            .scratch(norm::layer_norm_bwd_scratch)
            .cut_by(norm::cut_rows_bwd)
            .last(norm::layer_norm_bwd_sums),
        OpKind::BatchNorm => k(norm::check_batch_norm, norm::batch_norm).cut_by(norm::cut_channels),
        OpKind::BatchNormBwd => {
            k(norm::check_batch_norm_bwd, norm::batch_norm_bwd).cut_by(norm::cut_channels)
        }
        OpKind::Matmul => k(gemm::check_matmul, gemm::matmul)
            .prepared(factor::prepare)
            .cut_by(gemm::cut),
        OpKind::Addmm => k(gemm::check_addmm, gemm::addmm)
            .prepared(factor::prepare)
            .cut_by(gemm::cut),
        OpKind::MatmulSum => k(gemm::check_matmul_sum, gemm::matmul_sum)
            .prepared(factor::prepare)
            .cut_by(gemm::cut_sum),
        OpKind::GroupedMatmul => k(grouped::check_matmul, grouped::products)
            .indices(grouped::ends)
            .prepared(factor::prepare)
            .cut_by(grouped::cut_matmul),
        OpKind::GroupedOuter => k(grouped::check_outer, grouped::products)
            .indices(grouped::ends)
            .prepared(factor::prepare)
            .cut_by(grouped::cut_outer),
        OpKind::Convolution => k(conv::check_convolution, conv::convolution)
            .prepared(conv::prepare)
            .cut_by(conv::cut),
        OpKind::ConvolutionBwd => k(conv::check_convolution_bwd, conv::convolution_bwd)
            .prepared(conv::prepare)
            .cut_by(conv::cut_bwd),
        OpKind::MaxPool2d => k(pool::check_max_pool2d, pool::max_pool2d).cut_by(pool::cut_planes),
        OpKind::MaxPool2dBwd => {
            k(pool::check_max_pool2d_bwd, pool::max_pool2d_bwd).cut_by(pool::cut_planes)
        }
        OpKind::Sdpa => k(attention::check_sdpa, attention::sdpa)
            .prepared(attention::prepare)
            .cut_by(attention::cut),
        OpKind::SdpaBwd => k(attention::check_sdpa_bwd, attention::sdpa_bwd)
            .prepared(attention::prepare_bwd)
            .cut_by(attention::cut_bwd),
        OpKind::SdpaRows => k(attention::check_sdpa_rows, attention::sdpa)
            .prepared(attention::prepare)
            .cut_by(attention::cut),
        OpKind::SdpaRowsBwd => k(attention::check_sdpa_rows_bwd, attention::sdpa_bwd)
            .prepared(attention::prepare_bwd)
            .cut_by(attention::cut_bwd),
        OpKind::Embedding => k(index::check_embedding, index::embedding)
            .indices(index::of_rows)
            .cut_by(index::cut_embedding),
        OpKind::EmbeddingBwd => k(index::check_embedding_bwd, index::embedding_bwd)
            .scratch(index::embedding_bwd_scratch)
            .indices(index::of_result_rows)
            .first(index::embedding_bwd_chains)
            .cut_by(index::cut_embedding_bwd),
        OpKind::NllLoss => k(loss::check_nll_loss, loss::nll_loss).indices(loss::targets),
        OpKind::NllSum => k(loss::check_nll_sum, loss::nll_sum).indices(loss::targets),
        OpKind::NllLossBwd => k(loss::check_nll_loss_bwd, loss::nll_loss_bwd)
            .indices(loss::result_targets)
            .cut_by(loss::cut_bwd),
        OpKind::Gather => k(index::check_gather, index::gather)
            .cut_by(index::cut_gather)
            .indices(index::along),
        OpKind::Scatter => k(index::check_scatter, index::scatter).indices(index::along),
        OpKind::ScatterAdd => k(index::check_scatter_add, index::scatter_add).indices(index::along),
        OpKind::ScatterValue => {
            k(index::check_scatter_value, index::scatter_value).indices(index::along)
        }
        OpKind::Index => k(index::check_index, index::index)
            .indices(index::from_1)
            .cut_by(index::cut_index),
        OpKind::IndexPut => k(index::check_index_put, index::index_put).indices(index::from_2),
        OpKind::Permute => k(shape::check_permute, shape::permute).cut_by(shape::cut),
        OpKind::Expand => k(shape::check_expand, shape::expand).cut_by(shape::cut),
        OpKind::Flip => k(shape::check_flip, shape::flip).cut_by(shape::cut),
        OpKind::Slice => k(shape::check_slice, shape::slice).cut_by(shape::cut),
        OpKind::SliceScatter => k(shape::check_slice_scatter, shape::slice_scatter),
        OpKind::Cat => k(shape::check_cat, shape::cat).cut_by(shape::cut_cat),
        OpKind::Pad => k(shape::check_pad, shape::pad),
        OpKind::Full => k(shape::check_full, shape::full).cut_by(Cut::elements),
        OpKind::Arange => k(shape::check_arange, shape::arange).cut_by(Cut::elements),
        OpKind::Rand => k(random::check_random, random::rand).cut_by(Cut::elements),
        OpKind::Randn => k(random::check_random, random::randn).cut_by(Cut::elements),
        OpKind::Dropout => k(random::check_dropout, random::dropout).cut_by(Cut::elements),
        OpKind::DropoutKey => k(random::check_dropout_key, random::dropout_key),
        OpKind::RoundRandom => {
            k(random::check_round_random, random::round_random).cut_by(Cut::elements)
        }
        OpKind::DropoutBwd => {
            k(random::check_dropout_bwd, random::dropout_bwd).cut_by(Cut::elements)
        }
        OpKind::RngNext => k(random::check_rng_next, random::rng_next),
        OpKind::SumSquares => k(optim::check_sum_squares, optim::sum_squares),
        OpKind::ClipScale => k(optim::check_clip_scale, optim::clip_scale),
        OpKind::Adamw => k(optim::check_adamw, optim::adamw).cut_by(Cut::elements),
        OpKind::AdamwSplit => k(optim::check_adamw_split, optim::adamw_split).cut_by(Cut::elements),
        OpKind::Adamw8bit => {
            k(optim::check_adamw_8bit, optim::adamw_8bit).cut_by(optim::cut_blocks)
        }
        OpKind::Nf4 => k(blocks::check_nf4, blocks::nf4).cut_by(blocks::cut_nf4),
        OpKind::Sgd => k(optim::check_sgd, optim::sgd).cut_by(Cut::elements),
        OpKind::SgdMomentum => {
            k(optim::check_sgd_momentum, optim::sgd_momentum).cut_by(Cut::elements)
        }
    };
    Some(kernel.of(op))
}

/// The number of ops with a kernel.
const COUNT: usize = {
    let (mut i, mut n) = (0, 0);
    while i < OpKind::ALL.len() {
        n += kernel(OpKind::ALL[i]).is_some() as usize;
        i += 1;
    }
    n
};

const fn table() -> [Kernel; COUNT] {
    let mut kernels = [k(elementwise::check_signed, elementwise::neg); COUNT];
    let (mut i, mut n) = (0, 0);
    while i < OpKind::ALL.len() {
        if let Some(kernel) = kernel(OpKind::ALL[i]) {
            kernels[n] = kernel;
            n += 1;
        }
        i += 1;
    }
    kernels
}

/// Every kernel, in the order of the table of ops.
pub static KERNELS: &[Kernel] = &table();

/// The kernel of an op, by name. `None` if no op has this name, or if the op never runs by itself.
pub fn find(op: &str) -> Option<&'static Kernel> {
    KERNELS.iter().find(|kernel| kernel.name == op)
}

const fn k(check: fn(&Signature<'_>) -> Checked, run: fn(&Call<'_>) -> Ran) -> Kernel {
    Kernel::new(check, run)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_cover_all_units_once(
            units in 1usize..5000, align in 1usize..70, grain in 1usize..300,
                per_thread in 1usize..17, threads in 1usize..9,
        ) {
            let cut = Cut { units, align, grain, per_thread };
            let parts = cut.parts(threads);
            let ranges: Vec<Range<usize>> = (0..parts).map(|part| cut.part(part, parts)).collect();
            prop_assert!(ranges.iter().all(|range| !range.is_empty()
                && range.start.is_multiple_of(align)));
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            prop_assert_eq!((ranges[0].start, ranges[parts - 1].end), (0, units));
            prop_assert!(parts <= threads * per_thread);
            // All except the last, which has the rest.
            prop_assert!(ranges[..parts - 1].iter().all(|range| grain <= range.len()));
        }
    }
}
