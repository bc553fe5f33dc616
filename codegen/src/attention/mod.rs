//! Attention for NVIDIA's GPUs: forward and backward on tensor cores, without storing the matrix of
//! scores. The same kernels work for every GPU from sm_80 on.
//!
//! The kernels compute `sdpa` and `sdpa_bwd` of [`ir::op`] for bf16, without a mask or with the
//! causal one. q, out, dout, dq are [B, H, S, D], k, v, dk, dv are [B, G, T, D], where G divides H;
//! logsumexp and delta are f32 [B, H, S]. In `sdpa_rows` and its backward, rows contain heads.
//! Scores, sums and gradients are f32; probabilities and the gradients of scores are rounded to
//! bf16 before they are multiplied, as every implementation on tensor cores does. A query without
//! visible keys gives zeros and a logsumexp of 0.
//!
//! The method is FlashAttention-2's (Dao, 2023). Forward: a block has 64 queries and goes over the
//! keys, with a running maximum and sum. Backward: [`Kind::Delta`] computes the sums over dout ·
//! out. [`Kind::Keys`] has 64 keys per block, and goes over the queries of all heads of their
//! group. It computes scores transposed, so the second product needs no exchange through shared
//! memory. [`Kind::Queries`] is like the forward. Scores are computed twice. So no atomic additions
//! are needed, and results are the same bits in every run.

mod backward;
mod emit;
mod forward;
mod masks;

use crate::kernels::{Generator, GeneratorError, Stage, Target};
use crate::mlir::{self, Function, Module};
use emit::{Emitter, Operand, ROWS, THREADS};
use ir::op::attention::Attending;

ir::named! {
    /// The kernel. Each takes the addresses of tensors, bf16 unless f32 is stated, then
    /// [`Sizes::arguments`].
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Kind {
        /// q, k, v -> out, logsumexp (f32).
        Forward = "forward",
        /// dout, out -> delta (f32), which the other two kernels of the backward need.
        Delta = "delta",
        /// dout, q, k, v, logsumexp (f32), delta (f32) -> dk, dv.
        Keys = "keys",
        /// dout, q, k, v, logsumexp (f32), delta (f32) -> dq.
        Queries = "queries",
    }
}

impl Kind {
    /// Its tensors, results last.
    fn tensors(self) -> &'static [Tensor] {
        use Tensor::{Delta, Dk, Dout, Dq, Dv, K, Lse, Out, Q, V};
        match self {
            Kind::Forward => &[Q, K, V, Out, Lse],
            Kind::Delta => &[Dout, Out, Delta],
            Kind::Keys => &[Dout, Q, K, V, Lse, Delta, Dk, Dv],
            Kind::Queries => &[Dout, Q, K, V, Lse, Delta, Dq],
        }
    }

    /// See [`Kernel::blocks`].
    fn blocks(self, head_size: u32, sizes: &Sizes) -> u64 {
        let [heads, group, queries, keys] =
            [sizes.heads, sizes.group, sizes.queries, sizes.keys].map(u64::from);
        let rows = u64::from(ROWS);
        match self {
            Kind::Forward | Kind::Queries => heads * queries.div_ceil(rows),
            Kind::Keys => heads / group * keys.div_ceil(rows),
            Kind::Delta => (heads * queries).div_ceil(u64::from(THREADS / (head_size / 8))),
        }
    }

    fn n_results(self) -> usize {
        if matches!(self, Kind::Forward | Kind::Keys) {
            2
        } else {
            1
        }
    }
}

/// A tensor that kernels read or write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tensor {
    Q,
    K,
    V,
    Out,
    /// The logsumexp of each query, f32.
    Lse,
    Dout,
    /// The sum over dout · out of each query, f32.
    Delta,
    Dq,
    Dk,
    Dv,
}

impl Tensor {
    fn name(self) -> &'static str {
        match self {
            Tensor::Q => "q",
            Tensor::K => "k",
            Tensor::V => "v",
            Tensor::Out => "out",
            Tensor::Lse => "lse",
            Tensor::Dout => "dout",
            Tensor::Delta => "delta",
            Tensor::Dq => "dq",
            Tensor::Dk => "dk",
            Tensor::Dv => "dv",
        }
    }
}

/// Why a kernel is not available.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// Heads have another size.
    #[error("attention for GPUs has heads of 64 or 128 numbers, not {0}")]
    HeadSize(u32),
    /// A bug in the emitted kernel.
    #[error("attention's kernel {kernel}: {source}")]
    Emit {
        /// Its name.
        kernel: String,
        /// The error.
        source: mlir::Error,
    },
}

/// A kernel as MLIR text, and how it is started.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Kernel {
    /// The function's name.
    pub symbol: String,
    /// A module with the function.
    pub mlir: String,
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block; more than 48 KiB must be requested
    /// (`CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`).
    pub shared_bytes: u32,
    kind: Kind,
    head_size: u32,
}

/// The sizes of a call.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sizes {
    /// Heads of q, over the batch: B·H. Times the queries, below 2^32.
    pub heads: u32,
    /// Heads of q for each of k and v: H / G, at least 1.
    pub group: u32,
    /// Queries of a head; below 2^31 - 64.
    pub queries: u32,
    /// Keys of a head; below 2^31 - 64.
    pub keys: u32,
    /// The factor of scores before the exponential.
    pub scale: f32,
}

/// An argument that follows the addresses.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Argument {
    /// 32 bits.
    U32(u32),
    /// 32 bits.
    F32(f32),
}

impl Sizes {
    /// The arguments that follow the addresses, in order.
    pub fn arguments(&self) -> [Argument; 5] {
        [
            Argument::U32(self.heads),
            Argument::U32(self.group),
            Argument::U32(self.queries),
            Argument::U32(self.keys),
            Argument::F32(self.scale),
        ]
    }
}

impl Kernel {
    /// The number of blocks for these sizes, below 2^31, along x. If it is 0, nothing must be
    /// started. Without keys the forward still writes its zeros.
    pub fn blocks(&self, sizes: &Sizes) -> u64 {
        self.kind.blocks(self.head_size, sizes)
    }
    /// Its PTX for a GPU.
    pub fn ptx(
        &self,
        generator: &mut Generator,
        target: &Target,
    ) -> Result<String, GeneratorError> {
        let text = generator.run(&self.symbol, &self.mlir, target, Stage::Asm)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

/// A kernel for heads of 64 or 128 numbers. With `causal`, query i uses only the keys 0..=i.
pub fn kernel(kind: Kind, head_size: u32, causal: bool) -> Result<Kernel, Error> {
    if ![64, 128].contains(&head_size) {
        return Err(Error::HeadSize(head_size));
    }
    let mask = if causal && kind != Kind::Delta {
        "_causal"
    } else {
        ""
    };
    let symbol = format!("attention_{}_{head_size}{mask}", kind.name());
    let n_reads = kind.tensors().len() - kind.n_results();
    let mut emitter = Emitter::new(&symbol, &operands(kind.tensors(), n_reads), head_size, None);
    let shared_bytes = write(&mut emitter, kind, causal);
    let function = emitter.finish().map_err(|source| Error::Emit {
        kernel: symbol.clone(),
        source,
    })?;
    let mut module = Module::default();
    module.push(function);
    Ok(Kernel {
        symbol,
        mlir: module.to_string(),
        threads: THREADS,
        shared_bytes,
        kind,
        head_size,
    })
}

fn operands(tensors: &[Tensor], n_reads: usize) -> Vec<Operand> {
    let operand = |(i, &tensor)| Operand {
        tensor,
        is_result: i >= n_reads,
    };
    tensors.iter().enumerate().map(operand).collect()
}

/// Writes a kernel; bytes of shared memory.
fn write(e: &mut Emitter, kind: Kind, causal: bool) -> u32 {
    match kind {
        Kind::Forward => forward::forward(e, causal),
        Kind::Delta => backward::delta(e),
        Kind::Keys => backward::keys(e, causal),
        Kind::Queries => backward::queries(e, causal),
    }
}

/// A kernel as a phase of `sdpa` or `sdpa_bwd`: its arguments are all operands and results of the
/// op, and sizes are constants. It needs exactly as many blocks as it says.
pub(crate) struct Phase {
    pub(crate) function: Result<Function, mlir::Error>,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
    pub(crate) blocks: u64,
}

/// The phases of `sdpa`, or of `sdpa_bwd` if `backward`; their symbols are numbered.
pub(crate) fn phases(
    backward: bool,
    head_size: u32,
    (causal, it): (bool, &Attending),
    sizes: &Sizes,
    symbol: impl Fn(usize) -> String,
) -> Vec<Phase> {
    use Tensor::{Dk, Dout, Dq, Dv, K, Lse, Out, Q, V};
    let (kinds, tensors, n_reads): (&[Kind], &[Tensor], usize) = if backward {
        let kinds = &[Kind::Delta, Kind::Keys, Kind::Queries];
        let tensors = &[Dout, Q, K, V, Out, Lse, Dq, Dk, Dv];
        // Gradients that are one result are one argument.
        let n = tensors.len() - if it.is_joint { 2 } else { 0 };
        (kinds, &tensors[..n], 6)
    } else {
        (&[Kind::Forward], &[Q, K, V, Out, Lse], 3)
    };
    let s = &it.sizes;
    let q = [s.batch, s.heads, s.queries, s.width];
    let v = [s.batch, s.groups, s.keys, s.values];
    let has_heads_in_rows = *it != Attending::plain(&q, &v);
    let phase = |(number, &kind)| {
        let operands = operands(tensors, n_reads);
        let mut emitter = Emitter::new(&symbol(number), &operands, head_size, Some(sizes));
        if has_heads_in_rows {
            emitter.place(it);
        }
        if backward {
            emitter.keep_delta_in_dq();
        }
        let shared_bytes = write(&mut emitter, kind, causal);
        Phase {
            function: emitter.finish(),
            threads: THREADS,
            shared_bytes,
            blocks: kind.blocks(head_size, sizes),
        }
    };
    kinds.iter().enumerate().map(phase).collect()
}

/// 1 / ln 2 and ln 2.
const LOG2_E: f32 = std::f32::consts::LOG2_E;
const LN_2: f32 = std::f32::consts::LN_2;
