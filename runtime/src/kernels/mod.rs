//! Plain Rust kernels, one function an op: the reference for every other machine, and what the CPU
//! machine runs.
//!
//! A kernel is found by its op's name when an artifact is loaded; `check` then refuses every
//! signature on which `run` could panic, so that an artifact with any shapes and attributes
//! whatsoever ends in an error or in an answer. What cannot be known before the data is there, an
//! index out of range, `run` reports. Kernels allocate only for such a message; a thread's first
//! product makes the thread's workspace.
//!
//! Element types: half-precision numbers are computed in f32 and rounded once, integers in i64 and
//! wrapped, bools are bytes (nonzero is true). Sums of floating-point numbers accumulate in f64 in
//! a fixed order, products in their own type. The results are the same bits from run to run.

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
mod pool;
mod product;
mod random;
mod reduce;
mod shape;
mod signature;
mod strides;
mod wide;

use crate::kernel::Call;
pub use signature::Signature;
use std::ops::Range;

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
    check: fn(&Signature<'_>) -> Result<(), String>,
    scratch: fn(&Signature<'_>) -> u64,
    /// Makes a thread's workspace.
    prepare: fn(&Call<'_>) -> Ran,
    /// How threads may share a run, and what comes before and after the parts.
    cut: fn(&Call<'_>) -> Cut,
    begin: fn(&Call<'_>) -> Ran,
    run: fn(&Call<'_>) -> Ran,
    end: fn(&Call<'_>) -> Ran,
}

/// How threads may share a run of a kernel. Units know nothing of each other: the bits depend
/// neither on where parts begin nor on how many there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cut {
    /// Of the results that parts write, unit `i` of `units` has the `i`-th of so many equal shares.
    /// At least 1.
    pub units: usize,
    /// Parts may begin at multiples of this.
    pub align: usize,
    /// How many units should be in a part at least, so that taking it costs nothing beside
    /// computing it.
    pub grain: usize,
    /// How many parts each thread should have: several, so that threads end together, or one where
    /// a part begins with work that others do again.
    pub per_thread: usize,
}

/// Elements that take some ten microseconds.
const ELEMENTS: usize = 1 << 14;

impl Cut {
    /// Not at all.
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
    /// How many parts there are for so many threads: equally many for each, if there are enough.
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

/// What comes before or after the parts of most kernels.
fn nothing(_: &Call<'_>) -> Ran {
    Ok(())
}

impl Kernel {
    const fn new(
        name: &'static str,
        inputs: (usize, usize),
        check: fn(&Signature<'_>) -> Result<(), String>,
        run: fn(&Call<'_>) -> Ran,
    ) -> Kernel {
        let cut = |_: &Call<'_>| Cut::NO;
        Kernel {
            name,
            inputs,
            inplace: &[],
            check,
            scratch: |_| 0,
            prepare: nothing,
            cut,
            begin: nothing,
            run,
            end: nothing,
        }
    }
    const fn inplace(self, inplace: &'static [(usize, usize)]) -> Kernel {
        Kernel { inplace, ..self }
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
    /// Refuses what the kernel cannot run: wrong counts, types, shapes, attributes, too little
    /// scratch. After it said yes, [`Kernel::run`] does not panic on operands and results of these
    /// types, disjoint but for in-place pairs.
    pub fn check(&self, signature: &Signature<'_>) -> Result<(), String> {
        let checked = signature
            .sane(self.inputs)
            .and_then(|()| (self.check)(signature))
            .and_then(|()| {
                let (needs, has) = ((self.scratch)(signature), signature.scratch);
                signature::ensure(needs <= has, || {
                    format!("needs {needs} bytes of scratch, has {has}")
                })
            });
        checked.map_err(|e| format!("{}: {e}", self.name))
    }
    /// The bytes of scratch that a checked signature needs.
    pub fn scratch_bytes(&self, signature: &Signature<'_>) -> u64 {
        (self.scratch)(signature)
    }
    /// Runs the kernel; an error says what its operands' data forbids: `index 300 is not in
    /// 0..257`.
    pub fn run(&self, call: &Call<'_>) -> Ran {
        self.begin(call)?;
        self.run_part(&call.again())?;
        self.end(&call.again())
    }
    /// How threads may share a run of a checked signature.
    pub(crate) fn cut(&self, call: &Call<'_>) -> Cut {
        (self.cut)(call)
    }
    /// Makes the workspace that this thread needs for a run, so that it allocates nothing.
    pub(crate) fn prepare(&self, call: &Call<'_>) -> Ran {
        (self.prepare)(call).map_err(|e| format!("{}: {e}", self.name))
    }
    /// What comes before the parts.
    pub(crate) fn begin(&self, call: &Call<'_>) -> Ran {
        (self.begin)(call).map_err(|e| format!("{}: {e}", self.name))
    }
    /// A part.
    pub(crate) fn run_part(&self, call: &Call<'_>) -> Ran {
        (self.run)(call).map_err(|e| format!("{}: {e}", self.name))
    }
    /// What comes after all parts.
    pub(crate) fn end(&self, call: &Call<'_>) -> Ran {
        (self.end)(call).map_err(|e| format!("{}: {e}", self.name))
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
    k("neg", (1, 1), elementwise::check_signed, elementwise::neg)
        .inplace(&[(0, 0)])
        .cut_by(Cut::elements),
    k("abs", (1, 1), elementwise::check_numbers, elementwise::abs)
        .inplace(&[(0, 0)])
        .cut_by(Cut::elements),
    k(
        "sign",
        (1, 1),
        elementwise::check_numbers,
        elementwise::sign,
    )
    .inplace(&[(0, 0)])
    .cut_by(Cut::elements),
    k("exp", (1, 1), elementwise::check_floats, elementwise::exp)
        .inplace(&[(0, 0)])
        .cut_by(Cut::elements),
    k("log", (1, 1), elementwise::check_floats, elementwise::log)
        .inplace(&[(0, 0)])
        .cut_by(Cut::elements),
    k("sqrt", (1, 1), elementwise::check_floats, elementwise::sqrt)
        .inplace(&[(0, 0)])
        .cut_by(Cut::elements),
    k(
        "rsqrt",
        (1, 1),
        elementwise::check_floats,
        elementwise::rsqrt,
    )
    .inplace(&[(0, 0)])
    .cut_by(Cut::elements),
    k(
        "reciprocal",
        (1, 1),
        elementwise::check_floats,
        elementwise::reciprocal,
    )
    .inplace(&[(0, 0)])
    .cut_by(Cut::elements),
    k("tanh", (1, 1), elementwise::check_floats, elementwise::tanh)
        .inplace(&[(0, 0)])
        .cut_by(Cut::elements),
    k(
        "sigmoid",
        (1, 1),
        elementwise::check_floats,
        elementwise::sigmoid,
    )
    .inplace(&[(0, 0)])
    .cut_by(Cut::elements),
    k("sin", (1, 1), elementwise::check_floats, elementwise::sin)
        .inplace(&[(0, 0)])
        .cut_by(Cut::elements),
    k("cos", (1, 1), elementwise::check_floats, elementwise::cos)
        .inplace(&[(0, 0)])
        .cut_by(Cut::elements),
    k("erf", (1, 1), elementwise::check_floats, elementwise::erf)
        .inplace(&[(0, 0)])
        .cut_by(Cut::elements),
    k(
        "relu",
        (1, 1),
        elementwise::check_numbers,
        elementwise::relu,
    )
    .inplace(&[(0, 0)])
    .cut_by(Cut::elements),
    k("silu", (1, 1), elementwise::check_floats, elementwise::silu)
        .inplace(&[(0, 0)])
        .cut_by(Cut::elements),
    k("gelu", (1, 1), elementwise::check_gelu, elementwise::gelu)
        .inplace(&[(0, 0)])
        .cut_by(Cut::elements),
    k(
        "bitwise_not",
        (1, 1),
        elementwise::check_bitwise,
        elementwise::bitwise_not,
    )
    .inplace(&[(0, 0)])
    .cut_by(Cut::elements),
    k(
        "logical_not",
        (1, 1),
        elementwise::check_predicate,
        elementwise::logical_not,
    )
    .cut_by(Cut::elements),
    k("cast", (1, 1), elementwise::check_cast, elementwise::cast).cut_by(Cut::elements),
    k(
        "clamp",
        (1, 1),
        elementwise::check_clamp,
        elementwise::clamp,
    )
    .inplace(&[(0, 0)])
    .cut_by(Cut::elements),
    k(
        "add_scalar",
        (1, 1),
        elementwise::check_scalar,
        elementwise::add_scalar,
    )
    .inplace(&[(0, 0)])
    .cut_by(Cut::elements),
    k(
        "mul_scalar",
        (1, 1),
        elementwise::check_scalar,
        elementwise::mul_scalar,
    )
    .inplace(&[(0, 0)])
    .cut_by(Cut::elements),
    k(
        "div_scalar",
        (1, 1),
        elementwise::check_float_scalar,
        elementwise::div_scalar,
    )
    .inplace(&[(0, 0)])
    .cut_by(Cut::elements),
    k(
        "rsub_scalar",
        (1, 1),
        elementwise::check_scalar,
        elementwise::rsub_scalar,
    )
    .inplace(&[(0, 0)])
    .cut_by(Cut::elements),
    k(
        "pow_scalar",
        (1, 1),
        elementwise::check_pow_scalar,
        elementwise::pow_scalar,
    )
    .inplace(&[(0, 0)])
    .cut_by(Cut::elements),
    k(
        "eq_scalar",
        (1, 1),
        elementwise::check_compare_scalar,
        elementwise::eq_scalar,
    )
    .cut_by(Cut::elements),
    k(
        "ne_scalar",
        (1, 1),
        elementwise::check_compare_scalar,
        elementwise::ne_scalar,
    )
    .cut_by(Cut::elements),
    k(
        "lt_scalar",
        (1, 1),
        elementwise::check_compare_scalar,
        elementwise::lt_scalar,
    )
    .cut_by(Cut::elements),
    k(
        "le_scalar",
        (1, 1),
        elementwise::check_compare_scalar,
        elementwise::le_scalar,
    )
    .cut_by(Cut::elements),
    k(
        "gt_scalar",
        (1, 1),
        elementwise::check_compare_scalar,
        elementwise::gt_scalar,
    )
    .cut_by(Cut::elements),
    k(
        "ge_scalar",
        (1, 1),
        elementwise::check_compare_scalar,
        elementwise::ge_scalar,
    )
    .cut_by(Cut::elements),
    k("add", (2, 2), elementwise::check_binary, elementwise::add)
        .inplace(&[(0, 0), (1, 0)])
        .cut_by(Cut::elements),
    k(
        "sub",
        (2, 2),
        elementwise::check_binary_numbers,
        elementwise::sub,
    )
    .inplace(&[(0, 0), (1, 0)])
    .cut_by(Cut::elements),
    k("mul", (2, 2), elementwise::check_binary, elementwise::mul)
        .inplace(&[(0, 0), (1, 0)])
        .cut_by(Cut::elements),
    k(
        "div",
        (2, 2),
        elementwise::check_binary_floats,
        elementwise::div,
    )
    .inplace(&[(0, 0), (1, 0)])
    .cut_by(Cut::elements),
    k(
        "pow",
        (2, 2),
        elementwise::check_binary_floats,
        elementwise::pow,
    )
    .inplace(&[(0, 0), (1, 0)])
    .cut_by(Cut::elements),
    k(
        "maximum",
        (2, 2),
        elementwise::check_binary,
        elementwise::maximum,
    )
    .inplace(&[(0, 0), (1, 0)])
    .cut_by(Cut::elements),
    k(
        "minimum",
        (2, 2),
        elementwise::check_binary,
        elementwise::minimum,
    )
    .inplace(&[(0, 0), (1, 0)])
    .cut_by(Cut::elements),
    k(
        "bitwise_and",
        (2, 2),
        elementwise::check_binary_bitwise,
        elementwise::bitwise_and,
    )
    .inplace(&[(0, 0), (1, 0)])
    .cut_by(Cut::elements),
    k(
        "bitwise_or",
        (2, 2),
        elementwise::check_binary_bitwise,
        elementwise::bitwise_or,
    )
    .inplace(&[(0, 0), (1, 0)])
    .cut_by(Cut::elements),
    k(
        "bitwise_xor",
        (2, 2),
        elementwise::check_binary_bitwise,
        elementwise::bitwise_xor,
    )
    .inplace(&[(0, 0), (1, 0)])
    .cut_by(Cut::elements),
    k("eq", (2, 2), elementwise::check_compare, elementwise::eq).cut_by(Cut::elements),
    k("ne", (2, 2), elementwise::check_compare, elementwise::ne).cut_by(Cut::elements),
    k("lt", (2, 2), elementwise::check_compare, elementwise::lt).cut_by(Cut::elements),
    k("le", (2, 2), elementwise::check_compare, elementwise::le).cut_by(Cut::elements),
    k("gt", (2, 2), elementwise::check_compare, elementwise::gt).cut_by(Cut::elements),
    k("ge", (2, 2), elementwise::check_compare, elementwise::ge).cut_by(Cut::elements),
    k(
        "logical_and",
        (2, 2),
        elementwise::check_compare,
        elementwise::logical_and,
    )
    .cut_by(Cut::elements),
    k(
        "logical_or",
        (2, 2),
        elementwise::check_compare,
        elementwise::logical_or,
    )
    .cut_by(Cut::elements),
    k(
        "where",
        (3, 3),
        elementwise::check_select,
        elementwise::select,
    )
    .inplace(&[(1, 0), (2, 0)])
    .cut_by(Cut::elements),
    k(
        "tanh_bwd",
        (2, 2),
        elementwise::check_derivative,
        elementwise::tanh_bwd,
    )
    .inplace(&[(0, 0), (1, 0)])
    .cut_by(Cut::elements),
    k(
        "sigmoid_bwd",
        (2, 2),
        elementwise::check_derivative,
        elementwise::sigmoid_bwd,
    )
    .inplace(&[(0, 0), (1, 0)])
    .cut_by(Cut::elements),
    k(
        "silu_bwd",
        (2, 2),
        elementwise::check_derivative,
        elementwise::silu_bwd,
    )
    .inplace(&[(0, 0), (1, 0)])
    .cut_by(Cut::elements),
    k(
        "gelu_bwd",
        (2, 2),
        elementwise::check_gelu_bwd,
        elementwise::gelu_bwd,
    )
    .inplace(&[(0, 0), (1, 0)])
    .cut_by(Cut::elements),
    k(
        "threshold_bwd",
        (2, 2),
        elementwise::check_threshold_bwd,
        elementwise::threshold_bwd,
    )
    .inplace(&[(0, 0), (1, 0)])
    .cut_by(Cut::elements),
    k("sum", (1, 1), reduce::check_numbers, reduce::sum).cut_by(reduce::cut),
    k("mean", (1, 1), reduce::check_floats, reduce::mean).cut_by(reduce::cut),
    k("amax", (1, 1), reduce::check_extreme, reduce::amax).cut_by(reduce::cut),
    k("amin", (1, 1), reduce::check_extreme, reduce::amin).cut_by(reduce::cut),
    k("any", (1, 1), reduce::check_any, reduce::any).cut_by(reduce::cut),
    k("cumsum", (1, 1), reduce::check_cumsum, reduce::cumsum).cut_by(reduce::cut_lines),
    k("topk", (1, 1), reduce::check_topk, reduce::topk).cut_by(reduce::cut_lines),
    k("softmax", (1, 1), norm::check_along, norm::softmax)
        .inplace(&[(0, 0)])
        .cut_by(norm::cut_lines),
    k("log_softmax", (1, 1), norm::check_along, norm::log_softmax)
        .inplace(&[(0, 0)])
        .cut_by(norm::cut_lines),
    k("softmax_bwd", (2, 2), norm::check_along, norm::softmax_bwd)
        .inplace(&[(0, 0), (1, 0)])
        .cut_by(norm::cut_lines),
    k(
        "log_softmax_bwd",
        (2, 2),
        norm::check_along,
        norm::log_softmax_bwd,
    )
    .inplace(&[(0, 0), (1, 0)])
    .cut_by(norm::cut_lines),
    k(
        "layer_norm",
        (1, 3),
        norm::check_layer_norm,
        norm::layer_norm,
    )
    .inplace(&[(0, 0)])
    .cut_by(norm::cut_rows),
    k(
        "layer_norm_bwd",
        (4, 5),
        norm::check_layer_norm_bwd,
        norm::layer_norm_bwd,
    )
    .inplace(&[(0, 0)])
    .scratch(norm::layer_norm_bwd_scratch)
    .cut_by(norm::cut_rows_bwd)
    .last(norm::layer_norm_bwd_sums),
    k(
        "batch_norm",
        (5, 5),
        norm::check_batch_norm,
        norm::batch_norm,
    )
    .inplace(&[(3, 3), (4, 4)])
    .cut_by(norm::cut_channels),
    k(
        "batch_norm_bwd",
        (5, 5),
        norm::check_batch_norm_bwd,
        norm::batch_norm_bwd,
    )
    .cut_by(norm::cut_channels),
    k("matmul", (2, 2), gemm::check_matmul, gemm::matmul)
        .scratch(gemm::scratch)
        .prepared(gemm::prepare)
        .cut_by(gemm::cut),
    k("addmm", (3, 3), gemm::check_addmm, gemm::addmm)
        .inplace(&[(0, 0)])
        .scratch(gemm::scratch)
        .prepared(gemm::prepare)
        .cut_by(gemm::cut),
    k(
        "convolution",
        (2, 3),
        conv::check_convolution,
        conv::convolution,
    )
    .prepared(conv::prepare)
    .cut_by(conv::cut),
    k(
        "convolution_bwd",
        (3, 3),
        conv::check_convolution_bwd,
        conv::convolution_bwd,
    )
    .prepared(conv::prepare)
    .cut_by(conv::cut_bwd),
    k(
        "max_pool2d",
        (1, 1),
        pool::check_max_pool2d,
        pool::max_pool2d,
    )
    .cut_by(pool::cut_planes),
    k(
        "max_pool2d_bwd",
        (2, 2),
        pool::check_max_pool2d_bwd,
        pool::max_pool2d_bwd,
    )
    .cut_by(pool::cut_planes),
    k("sdpa", (3, 4), attention::check_sdpa, attention::sdpa)
        .prepared(attention::prepare)
        .cut_by(attention::cut),
    k(
        "sdpa_bwd",
        (6, 7),
        attention::check_sdpa_bwd,
        attention::sdpa_bwd,
    )
    .prepared(attention::prepare_bwd)
    .cut_by(attention::cut_bwd),
    k(
        "embedding",
        (2, 2),
        index::check_embedding,
        index::embedding,
    )
    .cut_by(index::cut_embedding),
    k(
        "embedding_bwd",
        (2, 2),
        index::check_embedding_bwd,
        index::embedding_bwd,
    )
    .scratch(index::embedding_bwd_scratch)
    .first(index::embedding_bwd_chains)
    .cut_by(index::cut_embedding_bwd),
    k("nll_loss", (2, 2), loss::check_nll_loss, loss::nll_loss),
    k("nll_sum", (2, 3), loss::check_nll_sum, loss::nll_sum).inplace(&[(2, 0)]),
    k(
        "nll_loss_bwd",
        (3, 3),
        loss::check_nll_loss_bwd,
        loss::nll_loss_bwd,
    )
    .cut_by(loss::cut_bwd),
    k("gather", (2, 2), index::check_gather, index::gather),
    k("scatter", (3, 3), index::check_scatter, index::scatter).inplace(&[(0, 0)]),
    k(
        "scatter_add",
        (3, 3),
        index::check_scatter_add,
        index::scatter_add,
    )
    .inplace(&[(0, 0)]),
    k(
        "scatter_value",
        (2, 2),
        index::check_scatter_value,
        index::scatter_value,
    )
    .inplace(&[(0, 0)]),
    k("index", (2, 9), index::check_index, index::index).cut_by(index::cut_index),
    k(
        "index_put",
        (3, 10),
        index::check_index_put,
        index::index_put,
    )
    .inplace(&[(0, 0)]),
    k("permute", (1, 1), shape::check_permute, shape::permute).cut_by(shape::cut),
    k("expand", (1, 1), shape::check_expand, shape::expand).cut_by(shape::cut),
    k("flip", (1, 1), shape::check_flip, shape::flip).cut_by(shape::cut),
    k("slice", (1, 1), shape::check_slice, shape::slice).cut_by(shape::cut),
    k(
        "slice_scatter",
        (2, 2),
        shape::check_slice_scatter,
        shape::slice_scatter,
    )
    .inplace(&[(0, 0)]),
    k("cat", (1, 4096), shape::check_cat, shape::cat).cut_by(shape::cut_cat),
    k("pad", (1, 1), shape::check_pad, shape::pad),
    k("full", (0, 0), shape::check_full, shape::full).cut_by(Cut::elements),
    k("arange", (0, 0), shape::check_arange, shape::arange).cut_by(Cut::elements),
    k("rand", (1, 1), random::check_random, random::rand).cut_by(Cut::elements),
    k("randn", (1, 1), random::check_random, random::randn).cut_by(Cut::elements),
    k("dropout", (2, 2), random::check_dropout, random::dropout)
        .inplace(&[(0, 0)])
        .cut_by(Cut::elements),
    k(
        "dropout_bwd",
        (2, 2),
        random::check_dropout_bwd,
        random::dropout_bwd,
    )
    .inplace(&[(0, 0)])
    .cut_by(Cut::elements),
    k("rng_next", (1, 1), random::check_rng_next, random::rng_next).inplace(&[(0, 0)]),
    k(
        "sum_squares",
        (1, 1),
        optim::check_sum_squares,
        optim::sum_squares,
    ),
    k(
        "clip_scale",
        (1, 4096),
        optim::check_clip_scale,
        optim::clip_scale,
    ),
    k("adamw", (6, 7), optim::check_adamw, optim::adamw)
        .inplace(&[(0, 0), (2, 1), (3, 2)])
        .cut_by(Cut::elements),
    k(
        "adamw_split",
        (7, 8),
        optim::check_adamw_split,
        optim::adamw_split,
    )
    .inplace(&[(0, 0), (2, 1), (3, 2), (4, 3)])
    .cut_by(Cut::elements),
    k("sgd", (3, 4), optim::check_sgd, optim::sgd)
        .inplace(&[(0, 0)])
        .cut_by(Cut::elements),
    k(
        "sgd_momentum",
        (4, 5),
        optim::check_sgd_momentum,
        optim::sgd_momentum,
    )
    .inplace(&[(0, 0), (2, 1)])
    .cut_by(Cut::elements),
];

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_cover_all_units_once(
            units in 1usize..5000, align in 1usize..70, grain in 1usize..300, per_thread in 1usize..17, threads in 1usize..9,
        ) {
            let cut = Cut { units, align, grain, per_thread };
            let parts = cut.parts(threads);
            let ranges: Vec<Range<usize>> = (0..parts).map(|part| cut.part(part, parts)).collect();
            prop_assert!(ranges.iter().all(|range| !range.is_empty() && range.start.is_multiple_of(align)));
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            prop_assert_eq!((ranges[0].start, ranges[parts - 1].end), (0, units));
            prop_assert!(parts <= threads * per_thread);
            // But for the last one, which has what is left.
            prop_assert!(ranges[..parts - 1].iter().all(|range| grain <= range.len()));
        }
    }
}
