//! The file format of a compiled step. The compiler and the runtime share only this. No compiler
//! type appears: an artifact has pools, streams, events, commands over places in pools, and the
//! initial data of states. It may have several steps, for batches of several sizes, which take
//! turns on the same pools and states: see [`sharing()`].

mod file;
mod replace;
mod sharing;
mod target;

pub use file::{
    FORMAT_VERSION, ReadError, Signature, Signed, UNSIGNED, fingerprint, read, read_file,
    read_signed_file, write, write_file, write_signed_file,
};
pub use replace::{replace_file, replace_file_with};
use serde::{Deserialize, Serialize};
pub use sharing::{Unshared, check_sharing, sharing};
pub use target::{Cpu, Sm, Target};

/// The number of terms of a product's sum that the runtime's kernels add up before they add them to
/// the result. If sums are cut at multiples of it, and each continues from the previous one, the
/// result is the same as for the whole sum: the compiler cuts the loss over a large vocabulary
/// there.
pub const PRODUCT_DEPTH: usize = 512;
/// Bytes of a page. Transfers past the system's cache take addresses and offsets that are multiples
/// of it. So the compiler places buffers at such multiples if a pool is a file.
pub const PAGE: usize = 4096;

/// The input that holds the optimizer's options, which are the same for all micro-batches.
pub const OPTIMIZER_INPUT: &str = "optimizer.hyper";

/// True for [`OPTIMIZER_INPUT`], and for those of further groups of parameters, which end in a
/// point and their number.
pub fn is_optimizer_input(name: &str) -> bool {
    let rest = name.strip_prefix(OPTIMIZER_INPUT);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// A compiled training step.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Artifact {
    /// The model's name.
    pub name: String,
    /// The device it was planned for.
    pub device: String,
    /// Whether a GPU's library may round the factors of f32 products to TF32, as the kernels do.
    pub tf32: bool,
    /// Pools, each one allocation of exactly `bytes`.
    pub pools: Vec<Pool>,
    /// Stream names.
    pub streams: Vec<String>,
    /// The number of events.
    pub events: u32,
    /// The kernels that launches run.
    pub kernels: Vec<Kernel>,
    /// Machine code of generated kernels.
    pub objects: Vec<Object>,
    /// The schedule's lines, for traces and messages.
    pub lines: Vec<Line>,
    /// The commands, in the schedule's order. Run in this order on one stream, they give the same
    /// results.
    pub commands: Vec<Command>,
    /// The number of commands before the pause, in a step of two parts that run one by one. Not in
    /// files.
    #[serde(skip)]
    pub pause: Option<u32>,
    /// Tensors that the host writes before each step.
    pub inputs: Vec<Binding>,
    /// Tensors that the host reads after each step.
    pub outputs: Vec<Binding>,
    /// Tensors that stay from step to step.
    pub states: Vec<State>,
    /// The plan's promises.
    pub summary: Summary,
    /// Initial bytes of states. Serde skips them: the file holds them raw, after the body.
    #[serde(skip)]
    pub data: Vec<u8>,
    /// Steps on smaller batches, largest first, which run on these pools and states. They have no
    /// data and no other steps. Serde skips them: the file holds them after this one.
    #[serde(skip)]
    pub others: Vec<Artifact>,
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

/// The memory that contains a pool.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub enum MemorySpace {
    /// The memory of the device with this number.
    Device(u32),
    /// The memory of the device's machine.
    Host,
    /// A file on a disk of that machine. Commands only copy to it and from it.
    Disk,
}

/// A pool of memory.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Pool {
    /// For messages: `device`, `host`, `disk`.
    pub name: String,
    /// The memory that contains it.
    pub space: MemorySpace,
    /// Its exact size.
    pub bytes: u64,
    /// True if it is no memory of the machine's: each state, input and output in it lies somewhere
    /// in memory of the caller, and nothing else is in it. Not in files.
    #[serde(skip)]
    pub lent: bool,
}

/// A kernel: an op's name and attributes, and, if it is generated, its machine code.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Kernel {
    /// The op.
    pub op: String,
    /// Its attributes, sorted by name.
    pub attrs: Vec<(String, Attr)>,
    /// Its code; without code, the runtime's own kernel runs.
    pub code: Option<Code>,
}

/// Machine code of a kernel, only for operands and results of these types.
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
    /// The number of its parts. On a GPU, the number of blocks.
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
    /// The machines that can run it. It also says the form of the bytes.
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
    /// Every element type.
    pub const ALL: [DType; 12] = [
        DType::Bool,
        DType::U8,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::F16,
        DType::BF16,
        DType::F32,
        DType::F64,
        DType::F8E4M3,
        DType::F8E5M2,
    ];

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
    /// The line as people write it: `h1`, `w1.host -> w1`.
    pub name: String,
    /// `run`, `rerun`, `swapin`, …
    pub why: String,
}

/// One command.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Command {
    /// Its stream: an index into `streams`.
    pub stream: u32,
    /// Its line: an index into `lines`.
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
        /// Results. A result may lie exactly on an operand if the op allows it; otherwise it
        /// overlaps no operand.
        outs: Vec<Operand>,
        /// Bytes that the kernel may use.
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
        /// True: waits for the previous step's record.
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

/// A tensor that stays from step to step.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct State {
    /// Its name outside.
    pub path: String,
    /// Its kind.
    pub kind: StateKind,
    /// Its place between steps.
    pub operand: Operand,
    /// Its initial value.
    pub initial: Initial,
}

/// The start of the path of an f32 that is updated instead of a parameter in half precision, before
/// the parameter's.
pub const MASTER: &str = "master";
/// The start of the path of the 16 bits that make a parameter in bf16 an f32, before the
/// parameter's.
pub const LOW: &str = "low";

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

/// The initial value of a state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Initial {
    /// Zeros.
    Zeros,
    /// These bytes of `data`.
    Data {
        /// The first byte.
        start: u64,
        /// The tensor's size.
        bytes: u64,
    },
    /// No value: the user initialises or loads it.
    Absent,
}

/// The plan's promises.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Summary {
    /// Planned peak bytes of the pool of device 0: the size of the pool.
    pub planned_peak_bytes: u64,
    /// Peak bytes of the `keep` plan.
    pub keep_peak_bytes: u64,
    /// The budget, if there was one.
    pub budget_bytes: Option<u64>,
    /// Simulated time of one step.
    pub predicted_ms: f64,
    /// Bytes that cross the link in one step because of swaps and hosted states.
    pub swapped_bytes: u64,
    /// Simulated time of the reruns in one step.
    pub recomputed_ms: f64,
    /// The number of batches of a step. If it is more than one, input `x` has the inputs `x.0`,
    /// `x.1`, …. 0 means 1.
    pub micro_batches: u64,
    /// The optimizer's name and default options, for the train command: `adamw`, lr, beta1, …
    pub optimizer: Option<(String, Vec<(String, f64)>)>,
    /// The options of groups of parameters: of group 1, which reads the input `optimizer.hyper.1`,
    /// and so on. Other options are those of group 0.
    pub groups: Vec<Vec<(String, f64)>>,
}
