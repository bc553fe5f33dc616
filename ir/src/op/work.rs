//! Arithmetic and scratch of one run of an op, from its attributes and the types of its operands
//! and results. Before: the types fit.

use super::attention::{Beside, Sizes};
use super::attrs::*;
use super::body::sum_parts;
use super::groups::Groups;
use super::shape::{Call, attending, points, product};
use super::sorting::Sorting;
use super::windows::Windows;
use super::{Scratch, Work};
use crate::device::Processor;
use crate::types::{DType, TensorType};

/// Products, which need no scratch.
fn matrix(flops: f64) -> Work {
    Work {
        flops,
        matrix: true,
        ..Work::default()
    }
}
/// Bytes are moved, nothing is computed.
pub(super) fn no_work<A>(_: &A, _: &Call<'_>, _: &[TensorType]) -> Work {
    Work::default()
}
/// A few operations for each element: the memory decides the time, not the arithmetic.
pub(super) fn elementwise<A>(_: &A, c: &Call<'_>, outputs: &[TensorType]) -> Work {
    let types = c.types.iter().copied().chain(outputs);
    let elements = types.map(TensorType::numel).max().unwrap_or(0);
    Work {
        flops: 8.0 * elements as f64,
        ..Work::default()
    }
}
pub(super) fn adamw_work(_: &(), c: &Call<'_>, _: &[TensorType]) -> Work {
    Work {
        flops: 16.0 * c.at(0).numel() as f64,
        ..Work::default()
    }
}
/// Two searches of a code in addition.
pub(super) fn adamw_8bit_work(_: &(), c: &Call<'_>, _: &[TensorType]) -> Work {
    Work {
        flops: 64.0 * c.at(0).numel() as f64,
        ..Work::default()
    }
}
pub(super) fn nf4_work(_: &Decoded, _: &Call<'_>, outputs: &[TensorType]) -> Work {
    Work {
        flops: 2.0 * outputs[0].numel() as f64,
        ..Work::default()
    }
}
/// Scratch: the indices of each row, so that a row is summed and written once. A processor chains
/// them, a GPU sorts them.
pub(super) fn embedding_bwd_work(a: &EmbeddingBwd, c: &Call<'_>, outputs: &[TensorType]) -> Work {
    let (keys, items) = (outputs[0].shape()[0], c.at(1).numel());
    let sorting = Sorting {
        items,
        keys,
        lines: 1,
    };
    Work {
        scratch: Scratch {
            cpu: 4 * (keys + items),
            gpu: sorting.scratch_bytes(),
        },
        ..elementwise(a, c, outputs)
    }
}
/// Scratch on a GPU, which sorts the points by the rows that they index.
pub(super) fn index_put_work(a: &IndexPut, c: &Call<'_>, outputs: &[TensorType]) -> Work {
    let points = points(c, 2).expect("typed indices should broadcast");
    let sorting = Sorting {
        items: points.iter().product(),
        keys: c.shape(0)[..c.types.len() - 2].iter().product(),
        lines: 1,
    };
    Work {
        scratch: Scratch {
            cpu: 0,
            gpu: sorting.scratch_bytes(),
        },
        ..elementwise(a, c, outputs)
    }
}
/// Scratch on a processor: the indices of a line. Lines that follow each other are sorted where
/// their indices go. Scratch on a GPU: that of a sort, if lines are long.
pub(super) fn topk_work(a: &TopK, c: &Call<'_>, outputs: &[TensorType]) -> Work {
    let shape = outputs[1].shape();
    let dim = c.dim("dim", a.dim, 0).expect("a typed dim should be one");
    let inner: u64 = shape[dim + 1..].iter().product();
    let sorting = Sorting::of_lines(c.at(0), dim, shape[dim]);
    Work {
        scratch: Scratch {
            cpu: if inner <= 1 {
                0
            } else {
                8 * shape[..=dim].iter().product::<u64>()
            },
            gpu: sorting.map_or(0, |sorting| sorting.scratch_bytes()),
        },
        ..elementwise(a, c, outputs)
    }
}
pub(super) fn matmul_work(a: &Product, c: &Call<'_>, outputs: &[TensorType]) -> Work {
    let ([m, k, n], flops) = sizes(a, c, c.types.len() - 2);
    // A processor widens half-precision factors to f32, one matrix of the batch at a time. A GPU
    // multiplies them as they are.
    let is_half = matches!(outputs[0].dtype(), DType::BF16 | DType::F16);
    Work {
        scratch: Scratch {
            cpu: if is_half {
                4 * (m * k + k * n + m * n)
            } else {
                0
            },
            gpu: workspace(outputs[0].dtype(), flops),
        },
        ..matrix(flops)
    }
}
/// On a processor, no scratch: it widens the factors in a workspace of each thread.
pub(super) fn matmul_sum_work(a: &Product, c: &Call<'_>, outputs: &[TensorType]) -> Work {
    let flops = sizes(a, c, 0).1;
    Work {
        scratch: Scratch {
            cpu: 0,
            gpu: workspace(outputs[0].dtype(), flops),
        },
        ..matrix(flops)
    }
}
/// Every row is in a group. No scratch on a processor, which widens rows in a workspace of each
/// thread; on a GPU, a table of the tiles.
pub(super) fn grouped_matmul_work(_: &GroupedProduct, c: &Call<'_>, y: &[TensorType]) -> Work {
    Work {
        scratch: Scratch {
            cpu: 0,
            gpu: groups(c).scratch_of_tiles(),
        },
        ..matrix(2.0 * y[0].numel() as f64 * c.shape(0)[1] as f64)
    }
}
/// The same; on a GPU, the table is of the groups.
pub(super) fn grouped_outer_work(_: &(), c: &Call<'_>, _: &[TensorType]) -> Work {
    Work {
        scratch: Scratch {
            cpu: 0,
            gpu: groups(c).scratch_of_groups(),
        },
        ..matrix(2.0 * c.at(0).numel() as f64 * c.shape(1)[1] as f64)
    }
}
fn groups(c: &Call<'_>) -> Groups {
    Groups {
        rows: c.shape(0)[0],
        groups: c.shape(2)[0],
    }
}
/// Bytes that a GPU's library may use for a product: NVIDIA's advice for cuBLASLt on Hopper, and
/// room to align them to 256. They do not depend on the plan, so the library's choice does not
/// either. A product of less than about 10 µs has none.
fn workspace(dtype: DType, flops: f64) -> u64 {
    /// Operations from which a product has a workspace.
    const FEWEST: f64 = (1_u64 << 30) as f64;
    let is_of_library = matches!(dtype, DType::F32 | DType::BF16);
    match is_of_library && flops >= FEWEST {
        true => (32 << 20) + 192,
        false => 0,
    }
}
/// Rows, inner and columns of a product of operands `first` and `first + 1`, and the operations of
/// the whole batch.
fn sizes(a: &Product, c: &Call<'_>, first: usize) -> ([u64; 3], f64) {
    let (batch, m, k, n) = product(a, c, first).expect("a typed product should have dimensions");
    let batch: u64 = batch.iter().product();
    (
        [m, k, n],
        2.0 * batch as f64 * m as f64 * k as f64 * n as f64,
    )
}
/// A product for each element of the result `y` and each tap of the kernel `w`.
fn taps(y: &TensorType, w: &[u64]) -> f64 {
    let taps: u64 = w[1..].iter().product();
    y.numel() as f64 * taps as f64
}
pub(super) fn convolution_work(_: &Convolution, c: &Call<'_>, outputs: &[TensorType]) -> Work {
    matrix(2.0 * taps(&outputs[0], c.shape(1)))
}
/// The operands are dy, x, w. Each of dx and dw is as much work as the forward. Scratch on a GPU:
/// the sums of the parts of dw.
pub(super) fn convolution_bwd_work(a: &ConvolutionBwd, c: &Call<'_>, _: &[TensorType]) -> Work {
    let products = a.mask[..2].iter().sum::<i64>() as f64;
    let windows = Windows::backward(a, [c.at(1), c.at(2), c.at(0)]);
    let in_parts = a.mask[1] == 1 && windows.on_tensor_cores();
    Work {
        scratch: Scratch {
            cpu: 0,
            gpu: if in_parts {
                windows.weight_scratch()
            } else {
                0
            },
        },
        ..matrix(2.0 * products * taps(c.at(0), c.shape(2)))
    }
}
/// Pairs of a query and a key, for each head of each batch.
fn pairs(q: &[u64], v: &[u64]) -> f64 {
    q[0] as f64 * q[1] as f64 * q[2] as f64 * v[2] as f64
}
/// No scratch: tiles of keys and blocks of queries are in a workspace of each thread.
pub(super) fn sdpa_work(_: &Attention, c: &Call<'_>, _: &[TensorType]) -> Work {
    let (q, v) = (c.shape(0), c.shape(2));
    attention(c, 0, pairs(q, v), q[3] + v[3])
}
pub(super) fn sdpa_bwd_work(_: &Attention, c: &Call<'_>, _: &[TensorType]) -> Work {
    let (q, v) = (c.shape(1), c.shape(3));
    attention(c, 1, pairs(q, v), 3 * q[3] + 2 * v[3])
}
pub(super) fn sdpa_rows_work(a: &AttentionRows, c: &Call<'_>, _: &[TensorType]) -> Work {
    attention_rows(a, c, 0, |s| s.width + s.values)
}
pub(super) fn sdpa_rows_bwd_work(a: &AttentionRows, c: &Call<'_>, _: &[TensorType]) -> Work {
    attention_rows(a, c, 1, |s| 3 * s.width + 2 * s.values)
}
/// Twice `each` operations for each pair of a query and a key, and a random word if weights are
/// dropped. A backward draws two: a GPU's computes the weights in two kernels, and a processor's
/// takes longer for each. Operand `q` is q.
fn attention(c: &Call<'_>, q: usize, pairs: f64, each: u64) -> Work {
    let from = if q == 0 { 3 } else { 6 };
    let beside = Beside::of(from, c.types[from..].iter().copied());
    let words = if q == 0 { 1.0 } else { 2.0 };
    Work {
        draws: beside.key.map_or(0.0, |_| words * pairs),
        ..matrix(2.0 * pairs * each as f64)
    }
}
fn attention_rows(a: &AttentionRows, c: &Call<'_>, q: usize, each: impl Fn(&Sizes) -> u64) -> Work {
    let s = attending(a, c, q)
        .expect("typed attention should have sizes")
        .sizes;
    let pairs = s.batch as f64 * s.heads as f64 * s.queries as f64 * s.keys as f64;
    attention(c, q, pairs, each(&s))
}
/// Scratch: the sums over rows of the gradients of weight and bias. On a processor, f64, of at most
/// 32 chunks of rows; on a GPU, those of the generated kernel.
pub(super) fn layer_norm_bwd_work(a: &LayerNormBwd, c: &Call<'_>, outputs: &[TensorType]) -> Work {
    let shape = c.shape(1);
    let (lead, norm) = shape.split_at(shape.len() - a.dims as usize);
    let (rows, n): (u64, u64) = (lead.iter().product(), norm.iter().product());
    let chunks = rows.div_ceil(rows.div_ceil(32).max(64));
    let sums = a.mask[1..]
        .iter()
        .filter(|&&is_needed| is_needed == 1)
        .count() as u64;
    let (_, parts) = sum_parts(rows, Processor::Gpu);
    let bytes = if outputs[0].dtype() == DType::F64 {
        8
    } else {
        4
    };
    Work {
        scratch: Scratch {
            cpu: if sums > 0 { 16 * n * chunks } else { 0 },
            gpu: sums * (parts * n * bytes).next_multiple_of(64),
        },
        ..elementwise(a, c, outputs)
    }
}
/// The number of parts whose squares a GPU sums separately. It does not depend on the GPU, so the
/// sum is the same on each.
pub fn square_parts(elements: u64) -> u64 {
    /// Enough that a block's start costs little.
    const FEWEST: u64 = 1 << 14;
    (elements / FEWEST).clamp(1, 512)
}
/// Scratch: the parts' sums.
pub(super) fn sum_squares_work(a: &(), c: &Call<'_>, outputs: &[TensorType]) -> Work {
    let parts = square_parts(c.at(0).numel());
    Work {
        scratch: Scratch {
            cpu: 0,
            gpu: if parts > 1 {
                (8 * parts).next_multiple_of(64)
            } else {
                0
            },
        },
        ..elementwise(a, c, outputs)
    }
}
pub(super) fn fused_work(a: &Fused, c: &Call<'_>, _: &[TensorType]) -> Work {
    a.body.work(c.types)
}
