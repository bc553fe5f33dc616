//! The file format of a compiled step, and the only thing that compiler and runtime share. No
//! compiler type appears: an artifact is pools, streams, events and commands over places in pools,
//! and the data that states start from.

mod file;
mod replace;
mod target;

pub use file::{
    FORMAT_VERSION, ReadError, Signature, Signed, UNSIGNED, read, read_file, read_signed_file,
    write, write_file, write_signed_file,
};
pub use replace::replace_file;
use serde::{Deserialize, Serialize};
pub use target::{Cpu, Sm, Target};

/// How many terms of a product's sums the runtime's kernels add up before they add them to the
/// result. Sums that are cut at multiples of it, each continued from the one before, come out as
/// the whole sum: the compiler cuts the loss over a large vocabulary there.
pub const PRODUCT_DEPTH: usize = 512;

/// The input that holds the optimizer's options, which are the same for all micro-batches.
pub const OPTIMIZER_INPUT: &str = "optimizer.hyper";

/// A compiled training step.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Artifact {
    /// The model's name.
    pub name: String,
    /// The device it was planned for.
    pub device: String,
    /// Pools, each one allocation of exactly `bytes`.
    pub pools: Vec<Pool>,
    /// Stream names.
    pub streams: Vec<String>,
    /// How many events there are.
    pub events: u32,
    /// What a launch may run.
    pub kernels: Vec<Kernel>,
    /// Machine code of generated kernels.
    pub objects: Vec<Object>,
    /// The schedule's lines, for traces and messages.
    pub lines: Vec<Line>,
    /// What runs, in the schedule's order. Run top to bottom on one stream it means the same.
    pub commands: Vec<Command>,
    /// What the host writes before each step.
    pub inputs: Vec<Binding>,
    /// What the host reads after each step.
    pub outputs: Vec<Binding>,
    /// What a step finds and leaves.
    pub states: Vec<State>,
    /// What the plan promises.
    pub summary: Summary,
    /// Bytes that states start from. Serde skips them: the file holds them raw, behind the body.
    #[serde(skip)]
    pub data: Vec<u8>,
}

impl Artifact {
    /// The first pool in a space.
    pub fn pool_in(&self, space: MemorySpace) -> Option<&Pool> {
        self.pools.iter().find(|pool| pool.space == space)
    }

    /// The least GPU that runs it; `None` if it has no code for one.
    pub fn gpu(&self) -> Option<Sm> {
        let sm = |object: &Object| match object.target {
            Target::Cpu(_) => None,
            Target::Gpu(sm) => Some(sm),
        };
        self.objects.iter().filter_map(sm).max()
    }
}

/// The memory that a pool is a part of.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum MemorySpace {
    /// The memory of the device with this number.
    Device(u32),
    /// The memory of the machine that the device is attached to.
    Host,
}

/// A pool of memory.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Pool {
    /// For messages: `device`, `host`.
    pub name: String,
    /// The memory that it is a part of.
    pub space: MemorySpace,
    /// Its exact size.
    pub bytes: u64,
}

/// A kernel: an op's name and attributes, and, if it is generated, its machine code.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Kernel {
    /// The op.
    pub op: String,
    /// Its attributes, sorted by name.
    pub attrs: Vec<(String, Attr)>,
    /// Its code; without, the runtime's own kernel runs.
    pub code: Option<Code>,
}

/// Machine code of a kernel, for operands and results of these types alone.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Code {
    /// An index into `objects`.
    pub object: u32,
    /// Functions that run one after the other.
    pub phases: Vec<Phase>,
    /// Types of the operands.
    pub ins: Vec<Type>,
    /// Types of the results.
    pub outs: Vec<Type>,
    /// The (operand, result) pairs that may share their bytes.
    pub inplace: Vec<(u32, u32)>,
    /// Bytes of scratch that it needs.
    pub scratch: u64,
}

/// A function of a kernel. Its parts may run at the same time, in any order; the next phase starts
/// when all have run.
///
/// On a CPU, in C: `void symbol(void *const *tensors, uint64_t first, uint64_t end)`, which runs
/// the parts `first..end`; `tensors` are the operands, the results, and the scratch if there is
/// any. On a GPU, a kernel whose arguments are those addresses, one by one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Phase {
    /// The function's name in the object.
    pub symbol: String,
    /// How many parts it has. On a GPU, the number of blocks.
    pub parts: u64,
    /// Threads that compute a part together: 1 on a CPU.
    pub threads: u32,
    /// Bytes of memory that a part's threads share: 0 on a CPU.
    pub shared_bytes: u32,
}

/// A tensor's type.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Type {
    /// Its element type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<u64>,
}

/// Machine code. It refers to nothing outside itself.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Object {
    /// What can run it. Says also which form the bytes have.
    pub target: Target,
    /// The object file.
    pub bytes: Vec<u8>,
}

/// An attribute's value.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Attr {
    Int(i64),
    Float(f64),
    Bool(bool),
    Ints(Vec<i64>),
    Type(DType),
    Str(String),
}

/// Element types.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum DType {
    Bool,
    U8,
    I8,
    I16,
    I32,
    I64,
    F16,
    BF16,
    F32,
    F64,
    F8E4M3,
    F8E5M2,
}

impl DType {
    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            DType::Bool | DType::U8 | DType::I8 | DType::F8E4M3 | DType::F8E5M2 => 1,
            DType::I16 | DType::F16 | DType::BF16 => 2,
            DType::I32 | DType::F32 => 4,
            DType::I64 | DType::F64 => 8,
        }
    }
}

/// A line of the schedule.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Line {
    /// The line as a person knows it: `h1`, `w1.host -> w1`.
    pub name: String,
    /// `run`, `rerun`, `swapin`, …
    pub why: String,
}

/// One command.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Command {
    /// Where it queues: an index into `streams`.
    pub stream: u32,
    /// The line it belongs to: an index into `lines`.
    pub line: u32,
    /// What it does.
    pub kind: CommandKind,
}

/// What a command does.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum CommandKind {
    /// Runs a kernel.
    Launch {
        /// An index into `kernels`.
        kernel: u32,
        /// Operands.
        ins: Vec<Operand>,
        /// Results. A result may lie exactly on an operand where the op allows it, and overlaps
        /// none otherwise.
        outs: Vec<Operand>,
        /// Bytes the kernel may use.
        scratch: Option<Range>,
    },
    /// Copies `bytes` bytes.
    Copy {
        /// From.
        src: Place,
        /// To.
        dst: Place,
        /// How many.
        bytes: u64,
    },
    /// Marks an event of this step as reached. Each event has one record.
    Record {
        /// Which.
        event: u32,
    },
    /// Waits for an event.
    Wait {
        /// Which.
        event: u32,
        /// True: as reached by the step before this one.
        previous: bool,
    },
}

/// An address: a pool and an offset, bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Place {
    /// An index into `pools`.
    pub pool: u32,
    /// Bytes from its start; a multiple of 64.
    pub offset: u64,
}

/// A place and a size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Range {
    /// Where it starts.
    pub place: Place,
    /// How many bytes.
    pub bytes: u64,
}

/// A tensor in a pool, row-major.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Operand {
    /// Where it starts.
    pub place: Place,
    /// Its element type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Vec<u64>,
}

impl Operand {
    /// Its size in bytes; `None` if that overflows.
    pub fn bytes(&self) -> Option<u64> {
        self.shape
            .iter()
            .try_fold(self.dtype.bytes(), |bytes, &d| bytes.checked_mul(d))
    }
}

/// A tensor that the host writes or reads, by name.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Binding {
    /// Its name outside.
    pub name: String,
    /// Where it is.
    pub operand: Operand,
}

/// A tensor that a step finds and leaves.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct State {
    /// Its name outside.
    pub path: String,
    /// Its kind.
    pub kind: StateKind,
    /// Where it is between steps.
    pub operand: Operand,
    /// What it starts from.
    pub initial: Initial,
}

/// The kind of a state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum StateKind {
    Param,
    Buffer,
    Const,
    Moment,
    Rng,
}

/// What a state starts from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Initial {
    /// Zeros.
    Zeros,
    /// These bytes of `data`.
    Data {
        /// From here.
        start: u64,
        /// As many as the tensor has.
        bytes: u64,
    },
    /// Nothing: the user initialises or loads it.
    Absent,
}

/// What the plan promises.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Summary {
    /// Peak bytes of the pool of device 0, as planned: the bytes that the pool has.
    pub planned_peak_bytes: u64,
    /// What the `keep` plan needs.
    pub keep_peak_bytes: u64,
    /// The budget, if there was one.
    pub budget_bytes: Option<u64>,
    /// Simulated time of one step.
    pub predicted_ms: f64,
    /// Bytes that cross the link in one step because of swaps and hosted states.
    pub swapped_bytes: u64,
    /// Simulated time of the reruns in one step.
    pub recomputed_ms: f64,
    /// How many batches a step takes: if more than one, those of input `x` are the inputs `x.0`,
    /// `x.1`, …. 0 is 1.
    pub micro_batches: u64,
    /// The optimizer's name and default options, for the train command: `adamw`, lr, beta1, …
    pub optimizer: Option<(String, Vec<(String, f64)>)>,
}
