//! Attention for NVIDIA's GPUs: forward and backward on tensor cores, without storing the matrix of
//! scores. The same kernels work for every GPU from sm_80 on.
//!
//! The kernels compute `sdpa` and `sdpa_bwd` of [`ir::op`] for bf16, without a mask or with the
//! causal one; weights may be dropped. q, out, dout, dq are [B, H, S, D], k, v, dk, dv are
//! [B, G, T, D], where G divides H; logsumexp and delta are f32 [B, H, S]. In `sdpa_rows` and its
//! backward, rows contain heads.
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
mod drops;
mod emit;
mod forward;
mod masks;

use crate::kernels::{Generator, GeneratorError, Stage, Target};
use crate::mlir::{self, Function, Module};
use emit::{Emitter, Operand, ROWS, THREADS};
use ir::op::attention::Attending;

ir::named! {
    /// The kernel. Each takes the addresses of tensors, bf16 unless f32 is stated, then
    /// [`Sizes::arguments`]. If weights are dropped, the address of the dropout key, i64 [4],
    /// follows the tensors that a kernel reads, except that of `Delta`.
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
    fn tensors(self, drops: bool) -> Vec<Tensor> {
        use Tensor::{Delta, Dk, Dout, Dq, Dv, K, Lse, Out, Q, V};
        let (reads, results): (&[Tensor], &[Tensor]) = match self {
            Kind::Forward => (&[Q, K, V], &[Out, Lse]),
            Kind::Delta => return vec![Dout, Out, Delta],
            Kind::Keys => (&[Dout, Q, K, V, Lse, Delta], &[Dk, Dv]),
            Kind::Queries => (&[Dout, Q, K, V, Lse, Delta], &[Dq]),
        };
        let key: &[Tensor] = if drops { &[Tensor::Key] } else { &[] };
        [reads, key, results].concat()
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
    /// The dropout key, i64.
    Key,
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
            Tensor::Key => "key",
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

/// Which weights a kernel has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct How {
    /// Query i uses only the keys 0..=i.
    pub causal: bool,
    /// A dropout key says which weights are dropped. The number of keys is a multiple of 4.
    pub drops: bool,
}

/// A kernel for heads of 64 or 128 numbers.
pub fn kernel(kind: Kind, head_size: u32, how: How) -> Result<Kernel, Error> {
    if ![64, 128].contains(&head_size) {
        return Err(Error::HeadSize(head_size));
    }
    let mut symbol = format!("attention_{}_{head_size}", kind.name());
    if kind != Kind::Delta {
        symbol += if how.causal { "_causal" } else { "" };
        symbol += if how.drops { "_drops" } else { "" };
    }
    let tensors = kind.tensors(how.drops);
    let n_reads = tensors.len() - kind.n_results();
    let mut emitter = Emitter::new(&symbol, &operands(&tensors, n_reads), head_size, None);
    let shared_bytes = write(&mut emitter, kind, how);
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
fn write(e: &mut Emitter, kind: Kind, how: How) -> u32 {
    match kind {
        Kind::Forward => forward::forward(e, how),
        Kind::Delta => backward::delta(e),
        Kind::Keys => backward::keys(e, how),
        Kind::Queries => backward::queries(e, how),
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
    (how, it): (How, &Attending),
    sizes: &Sizes,
    symbol: impl Fn(usize) -> String,
) -> Vec<Phase> {
    use Tensor::{Dk, Dout, Dq, Dv, K, Key, Lse, Out, Q, V};
    let (kinds, reads, results): (&[Kind], &[Tensor], &[Tensor]) = if backward {
        let kinds = &[Kind::Delta, Kind::Keys, Kind::Queries];
        // Gradients that are one result are one argument.
        let n = if it.is_joint { 1 } else { 3 };
        (kinds, &[Dout, Q, K, V, Out, Lse], &[Dq, Dk, Dv][..n])
    } else {
        (&[Kind::Forward], &[Q, K, V], &[Out, Lse])
    };
    let key: &[Tensor] = if how.drops { &[Key] } else { &[] };
    let n_reads = reads.len() + key.len();
    let tensors = [reads, key, results].concat();
    let s = &it.sizes;
    let q = [s.batch, s.heads, s.queries, s.width];
    let v = [s.batch, s.groups, s.keys, s.values];
    let has_heads_in_rows = *it != Attending::plain(&q, &v);
    let phase = |(number, &kind)| {
        let operands = operands(&tensors, n_reads);
        let mut emitter = Emitter::new(&symbol(number), &operands, head_size, Some(sizes));
        if has_heads_in_rows {
            emitter.place(it);
        }
        if backward {
            emitter.keep_delta_in_dq();
        }
        let shared_bytes = write(&mut emitter, kind, how);
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
