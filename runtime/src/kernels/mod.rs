//! Plain Rust kernels, one function an op: the reference for every other machine, and what the CPU machine runs.
//!
//! A kernel is found by its op's name when an artifact is loaded; `check` then refuses every signature on which `run`
//! could panic, so that an artifact with any shapes and attributes whatsoever ends in an error or in an answer. What
//! cannot be known before the data is there, an index out of range, `run` reports. Kernels allocate only for such a
//! message; a thread's first product makes the thread's workspace.
//!
//! Element types: half-precision numbers are computed in f32 and rounded once, integers in i64 and wrapped, bools are
//! bytes (nonzero is true). Sums of floating-point numbers accumulate in f64 in a fixed order, products in their own
//! type. The results are the same bits from run to run.

mod attention;
mod conv;
mod elementwise;
mod gemm;
mod index;
mod loss;
mod math;
mod norm;
mod optim;
pub mod owned;
mod product;
mod random;
mod reduce;
mod shape;
mod signature;
mod strides;
mod wide;

use crate::kernel::Call;
pub use signature::Signature;

/// What a kernel answers: an error only for what its operands' data forbids.
pub type Ran = Result<(), String>;

/// A kernel.
pub struct Kernel {
    /// The op's name.
    pub name: &'static str,
    /// The least and the most number of operands.
    pub inputs: (usize, usize),
    /// The (operand, result) pairs that may share their bytes, if their types are equal.
    pub inplace: &'static [(usize, usize)],
    /// How threads may share a run.
    pub split: Split,
    check: fn(&Signature<'_>) -> Result<(), String>,
    scratch: fn(&Signature<'_>) -> u64,
    run: fn(&Call<'_>) -> Ran,
}

/// How threads may share a run of a kernel that takes no scratch. Its results have one size; a part computes a range of their
/// elements. The bits do not depend on where parts begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Split {
    /// They may not.
    No,
    /// A part sees its own elements of operands that have as many as a result, and other operands whole.
    Elements,
    /// A part is whole rows, along the last dimension, and sees operands whole.
    Rows,
}

impl Kernel {
    const fn new(
        name: &'static str,
        inputs: (usize, usize),
        check: fn(&Signature<'_>) -> Result<(), String>,
        run: fn(&Call<'_>) -> Ran,
    ) -> Kernel {
        Kernel { name, inputs, inplace: &[], split: Split::No, check, scratch: |_| 0, run }
    }
    const fn inplace(self, inplace: &'static [(usize, usize)]) -> Kernel {
        Kernel { inplace, ..self }
    }
    const fn split(self, split: Split) -> Kernel {
        Kernel { split, ..self }
    }
    const fn scratch(self, scratch: fn(&Signature<'_>) -> u64) -> Kernel {
        Kernel { scratch, ..self }
    }
    /// Refuses what the kernel cannot run: wrong counts, types, shapes, attributes, too little scratch. After it said
    /// yes, [`Kernel::run`] does not panic on operands and results of these types, disjoint but for in-place pairs.
    pub fn check(&self, signature: &Signature<'_>) -> Result<(), String> {
        let checked = signature.sane(self.inputs).and_then(|()| (self.check)(signature)).and_then(|()| {
            let (needs, has) = ((self.scratch)(signature), signature.scratch);
            signature::ensure(needs <= has, || format!("needs {needs} bytes of scratch, has {has}"))
        });
        checked.map_err(|e| format!("{}: {e}", self.name))
    }
    /// The bytes of scratch that a checked signature needs.
    pub fn scratch_bytes(&self, signature: &Signature<'_>) -> u64 {
        (self.scratch)(signature)
    }
    /// Runs the kernel; an error says what its operands' data forbids: `index 300 is not in 0..257`.
    pub fn run(&self, call: &Call<'_>) -> Ran {
        (self.run)(call).map_err(|e| format!("{}: {e}", self.name))
    }
}

/// The kernel of an op.
pub fn find(op: &str) -> Option<&'static Kernel> {
    KERNELS.iter().find(|kernel| kernel.name == op)
}

const fn k(
    name: &'static str,
    inputs: (usize, usize),
    check: fn(&Signature<'_>) -> Result<(), String>,
    run: fn(&Call<'_>) -> Ran,
) -> Kernel {
    Kernel::new(name, inputs, check, run)
}

/// Every kernel, in the order of the compiler's table of ops.
pub static KERNELS: &[Kernel] = &[
    k("neg", (1, 1), elementwise::check_signed, elementwise::neg).inplace(&[(0, 0)]),
    k("abs", (1, 1), elementwise::check_numbers, elementwise::abs).inplace(&[(0, 0)]),
    k("sign", (1, 1), elementwise::check_numbers, elementwise::sign).inplace(&[(0, 0)]),
    k("exp", (1, 1), elementwise::check_floats, elementwise::exp).inplace(&[(0, 0)]),
    k("log", (1, 1), elementwise::check_floats, elementwise::log).inplace(&[(0, 0)]),
    k("sqrt", (1, 1), elementwise::check_floats, elementwise::sqrt).inplace(&[(0, 0)]),
    k("rsqrt", (1, 1), elementwise::check_floats, elementwise::rsqrt).inplace(&[(0, 0)]),
    k("reciprocal", (1, 1), elementwise::check_floats, elementwise::reciprocal).inplace(&[(0, 0)]),
    k("tanh", (1, 1), elementwise::check_floats, elementwise::tanh).inplace(&[(0, 0)]),
    k("sigmoid", (1, 1), elementwise::check_floats, elementwise::sigmoid).inplace(&[(0, 0)]),
    k("sin", (1, 1), elementwise::check_floats, elementwise::sin).inplace(&[(0, 0)]),
    k("cos", (1, 1), elementwise::check_floats, elementwise::cos).inplace(&[(0, 0)]),
    k("erf", (1, 1), elementwise::check_floats, elementwise::erf).inplace(&[(0, 0)]),
    k("relu", (1, 1), elementwise::check_numbers, elementwise::relu).inplace(&[(0, 0)]),
    k("silu", (1, 1), elementwise::check_floats, elementwise::silu).inplace(&[(0, 0)]),
    k("gelu", (1, 1), elementwise::check_gelu, elementwise::gelu).inplace(&[(0, 0)]),
    k("bitwise_not", (1, 1), elementwise::check_bitwise, elementwise::bitwise_not).inplace(&[(0, 0)]),
    k("logical_not", (1, 1), elementwise::check_predicate, elementwise::logical_not),
    k("cast", (1, 1), elementwise::check_cast, elementwise::cast),
    k("clamp", (1, 1), elementwise::check_clamp, elementwise::clamp).inplace(&[(0, 0)]),
    k("add_scalar", (1, 1), elementwise::check_scalar, elementwise::add_scalar).inplace(&[(0, 0)]),
    k("mul_scalar", (1, 1), elementwise::check_scalar, elementwise::mul_scalar).inplace(&[(0, 0)]),
    k("div_scalar", (1, 1), elementwise::check_float_scalar, elementwise::div_scalar).inplace(&[(0, 0)]),
    k("rsub_scalar", (1, 1), elementwise::check_scalar, elementwise::rsub_scalar).inplace(&[(0, 0)]),
    k("pow_scalar", (1, 1), elementwise::check_pow_scalar, elementwise::pow_scalar).inplace(&[(0, 0)]),
    k("eq_scalar", (1, 1), elementwise::check_compare_scalar, elementwise::eq_scalar),
    k("ne_scalar", (1, 1), elementwise::check_compare_scalar, elementwise::ne_scalar),
    k("lt_scalar", (1, 1), elementwise::check_compare_scalar, elementwise::lt_scalar),
    k("le_scalar", (1, 1), elementwise::check_compare_scalar, elementwise::le_scalar),
    k("gt_scalar", (1, 1), elementwise::check_compare_scalar, elementwise::gt_scalar),
    k("ge_scalar", (1, 1), elementwise::check_compare_scalar, elementwise::ge_scalar),
    k("add", (2, 2), elementwise::check_binary, elementwise::add).inplace(&[(0, 0), (1, 0)]),
    k("sub", (2, 2), elementwise::check_binary_numbers, elementwise::sub).inplace(&[(0, 0), (1, 0)]),
    k("mul", (2, 2), elementwise::check_binary, elementwise::mul).inplace(&[(0, 0), (1, 0)]),
    k("div", (2, 2), elementwise::check_binary_floats, elementwise::div).inplace(&[(0, 0), (1, 0)]),
    k("pow", (2, 2), elementwise::check_binary_floats, elementwise::pow).inplace(&[(0, 0), (1, 0)]),
    k("maximum", (2, 2), elementwise::check_binary, elementwise::maximum).inplace(&[(0, 0), (1, 0)]),
    k("minimum", (2, 2), elementwise::check_binary, elementwise::minimum).inplace(&[(0, 0), (1, 0)]),
    k("bitwise_and", (2, 2), elementwise::check_binary_bitwise, elementwise::bitwise_and).inplace(&[(0, 0), (1, 0)]),
    k("bitwise_or", (2, 2), elementwise::check_binary_bitwise, elementwise::bitwise_or).inplace(&[(0, 0), (1, 0)]),
    k("bitwise_xor", (2, 2), elementwise::check_binary_bitwise, elementwise::bitwise_xor).inplace(&[(0, 0), (1, 0)]),
    k("eq", (2, 2), elementwise::check_compare, elementwise::eq),
    k("ne", (2, 2), elementwise::check_compare, elementwise::ne),
    k("lt", (2, 2), elementwise::check_compare, elementwise::lt),
    k("le", (2, 2), elementwise::check_compare, elementwise::le),
    k("gt", (2, 2), elementwise::check_compare, elementwise::gt),
    k("ge", (2, 2), elementwise::check_compare, elementwise::ge),
    k("logical_and", (2, 2), elementwise::check_compare, elementwise::logical_and),
    k("logical_or", (2, 2), elementwise::check_compare, elementwise::logical_or),
    k("where", (3, 3), elementwise::check_select, elementwise::select).inplace(&[(1, 0), (2, 0)]),
    k("tanh_bwd", (2, 2), elementwise::check_derivative, elementwise::tanh_bwd).inplace(&[(0, 0), (1, 0)]),
    k("sigmoid_bwd", (2, 2), elementwise::check_derivative, elementwise::sigmoid_bwd).inplace(&[(0, 0), (1, 0)]),
    k("silu_bwd", (2, 2), elementwise::check_derivative, elementwise::silu_bwd).inplace(&[(0, 0), (1, 0)]),
    k("gelu_bwd", (2, 2), elementwise::check_gelu_bwd, elementwise::gelu_bwd).inplace(&[(0, 0), (1, 0)]),
    k("threshold_bwd", (2, 2), elementwise::check_threshold_bwd, elementwise::threshold_bwd).inplace(&[(0, 0), (1, 0)]),
    k("sum", (1, 1), reduce::check_numbers, reduce::sum),
    k("mean", (1, 1), reduce::check_floats, reduce::mean),
    k("amax", (1, 1), reduce::check_extreme, reduce::amax),
    k("amin", (1, 1), reduce::check_extreme, reduce::amin),
    k("any", (1, 1), reduce::check_any, reduce::any),
    k("cumsum", (1, 1), reduce::check_cumsum, reduce::cumsum),
    k("topk", (1, 1), reduce::check_topk, reduce::topk),
    k("softmax", (1, 1), norm::check_along, norm::softmax).inplace(&[(0, 0)]),
    k("log_softmax", (1, 1), norm::check_along, norm::log_softmax).inplace(&[(0, 0)]),
    k("softmax_bwd", (2, 2), norm::check_along, norm::softmax_bwd).inplace(&[(0, 0), (1, 0)]),
    k("log_softmax_bwd", (2, 2), norm::check_along, norm::log_softmax_bwd).inplace(&[(0, 0), (1, 0)]),
    k("layer_norm", (1, 3), norm::check_layer_norm, norm::layer_norm).inplace(&[(0, 0)]),
    k("layer_norm_bwd", (4, 5), norm::check_layer_norm_bwd, norm::layer_norm_bwd).inplace(&[(0, 0)]),
    k("batch_norm", (5, 5), norm::check_batch_norm, norm::batch_norm).inplace(&[(3, 3), (4, 4)]),
    k("batch_norm_bwd", (5, 5), norm::check_batch_norm_bwd, norm::batch_norm_bwd),
    k("matmul", (2, 2), gemm::check_matmul, gemm::matmul).scratch(gemm::scratch).split(Split::Rows),
    k("addmm", (3, 3), gemm::check_addmm, gemm::addmm).scratch(gemm::scratch).split(Split::Rows),
    k("convolution", (2, 3), conv::check_convolution, conv::convolution),
    k("convolution_bwd", (3, 3), conv::check_convolution_bwd, conv::convolution_bwd),
    k("max_pool2d", (1, 1), conv::check_max_pool2d, conv::max_pool2d),
    k("max_pool2d_bwd", (2, 2), conv::check_max_pool2d_bwd, conv::max_pool2d_bwd),
    k("sdpa", (3, 4), attention::check_sdpa, attention::sdpa).scratch(attention::sdpa_scratch),
    k("sdpa_bwd", (6, 7), attention::check_sdpa_bwd, attention::sdpa_bwd).scratch(attention::sdpa_bwd_scratch),
    k("embedding", (2, 2), index::check_embedding, index::embedding),
    k("embedding_bwd", (2, 2), index::check_embedding_bwd, index::embedding_bwd).scratch(index::embedding_bwd_scratch),
    k("nll_loss", (2, 2), loss::check_nll_loss, loss::nll_loss),
    k("nll_loss_bwd", (3, 3), loss::check_nll_loss_bwd, loss::nll_loss_bwd),
    k("gather", (2, 2), index::check_gather, index::gather),
    k("scatter", (3, 3), index::check_scatter, index::scatter).inplace(&[(0, 0)]),
    k("scatter_add", (3, 3), index::check_scatter_add, index::scatter_add).inplace(&[(0, 0)]),
    k("scatter_value", (2, 2), index::check_scatter_value, index::scatter_value).inplace(&[(0, 0)]),
    k("index", (2, 9), index::check_index, index::index),
    k("index_put", (3, 10), index::check_index_put, index::index_put).inplace(&[(0, 0)]),
    k("permute", (1, 1), shape::check_permute, shape::permute),
    k("expand", (1, 1), shape::check_expand, shape::expand),
    k("flip", (1, 1), shape::check_flip, shape::flip),
    k("slice", (1, 1), shape::check_slice, shape::slice),
    k("slice_scatter", (2, 2), shape::check_slice_scatter, shape::slice_scatter).inplace(&[(0, 0)]),
    k("cat", (1, 4096), shape::check_cat, shape::cat),
    k("pad", (1, 1), shape::check_pad, shape::pad),
    k("full", (0, 0), shape::check_full, shape::full),
    k("arange", (0, 0), shape::check_arange, shape::arange),
    k("rand", (1, 1), random::check_random, random::rand),
    k("randn", (1, 1), random::check_random, random::randn),
    k("dropout", (2, 2), random::check_dropout, random::dropout).inplace(&[(0, 0)]),
    k("dropout_bwd", (2, 2), random::check_dropout_bwd, random::dropout_bwd).inplace(&[(0, 0)]),
    k("rng_next", (1, 1), random::check_rng_next, random::rng_next).inplace(&[(0, 0)]),
    k("sum_squares", (1, 1), optim::check_sum_squares, optim::sum_squares),
    k("clip_scale", (1, 4096), optim::check_clip_scale, optim::clip_scale),
    k("adamw", (6, 7), optim::check_adamw, optim::adamw).inplace(&[(0, 0), (2, 1), (3, 2)]).split(Split::Elements),
    k("adamw_split", (7, 8), optim::check_adamw_split, optim::adamw_split)
        .inplace(&[(0, 0), (2, 1), (3, 2), (4, 3)])
        .split(Split::Elements),
    k("sgd", (3, 4), optim::check_sgd, optim::sgd).inplace(&[(0, 0)]).split(Split::Elements),
    k("sgd_momentum", (4, 5), optim::check_sgd_momentum, optim::sgd_momentum)
        .inplace(&[(0, 0), (2, 1)])
        .split(Split::Elements),
];
