//! In which order, on which stream, in which buffers: the second noun. The meaning of a schedule is
//! the result of running it from top to bottom; streams only permit overlap. Buffers are bytes.
//! [`check`](crate::check) proves what a buffer holds at a line, and nothing stores it.

use crate::device::Processor;
use crate::graph::{Node, Value};
use crate::ids;
pub use crate::part::{Extent, Part};
use crate::table::Table;

ids! {
    /// A pool of memory: the device's, the host's, a disk's.
    Pool = "pool";
    /// A queue of lines that run in order.
    Stream = "stream";
    /// A range of bytes in a pool.
    Buffer = "buffer";
    /// A line of a schedule; its id is its position in the list.
    Instr = "i";
}

/// Every buffer starts at a multiple of this number of bytes: a cache line, and the widest vector
/// load.
pub const ALIGN: u64 = 64;

/// The memory that contains a pool. Streams of copies connect spaces.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum MemorySpace {
    /// The memory of the device with this number. Budgets limit it.
    Device(u32),
    /// The memory of the machine to which the device is attached.
    Host,
    /// A file on a disk of that machine. Lines only copy to it and from it.
    Disk,
}

impl MemorySpace {
    /// The word in text: `device` for device 0, `device1`, `host`, `disk`.
    pub fn name(self) -> String {
        match self {
            MemorySpace::Device(0) => "device".into(),
            MemorySpace::Device(n) => format!("device{n}"),
            MemorySpace::Host => "host".into(),
            MemorySpace::Disk => "disk".into(),
        }
    }
    /// The space that [`MemorySpace::name`] names.
    pub fn from_name(name: &str) -> Option<MemorySpace> {
        let space = match name {
            "device" => MemorySpace::Device(0),
            "host" => MemorySpace::Host,
            "disk" => MemorySpace::Disk,
            _ => MemorySpace::Device(name.strip_prefix("device")?.parse().ok()?),
        };
        // `device01` and `device0` are wrong spellings of a name.
        (space.name() == name).then_some(space)
    }
    /// The space of a pool whose text names no space: the space with the pool's name, or else the
    /// device.
    pub fn of_pool_named(name: &str) -> MemorySpace {
        MemorySpace::from_name(name).unwrap_or(MemorySpace::Device(0))
    }
    /// True for a device's memory.
    pub fn is_device(self) -> bool {
        matches!(self, MemorySpace::Device(_))
    }
}

/// A step as a list of lines over buffers.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Schedule {
    /// The graph's name.
    pub name: String,
    /// The device it is planned for.
    pub device: String,
    /// The device's architecture if it is a GPU: 90 is `sm_90`.
    pub sm: Option<u32>,
    /// Pools.
    pub pools: Table<Pool, PoolData>,
    /// Streams.
    pub streams: Table<Stream, StreamData>,
    /// Buffers.
    pub buffers: Table<Buffer, BufferData>,
    /// The lines, in order.
    pub instrs: Table<Instr, InstrData>,
    /// Values at the start of the step, with their places: states, inputs.
    pub entry: Vec<(Value, Loc)>,
    /// Values at the end of the step, with their places: states, outputs. A state has the same
    /// place as at the start.
    pub exit: Vec<(Value, Loc)>,
}

/// A pool's name, space and limit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolData {
    /// Unique in its schedule: `device`, `host`, `disk`.
    pub name: String,
    /// The memory that contains it.
    pub space: MemorySpace,
    /// The budget, bytes; `None` means unlimited.
    pub limit: Option<u64>,
}

/// A stream's name and what it does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StreamData {
    /// `compute`, `h2d`, `d2h`.
    pub name: String,
}

/// A buffer's name, pool and size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BufferData {
    /// Unique in its schedule.
    pub name: String,
    /// Where it lies.
    pub pool: Pool,
    /// Its size; at least one byte.
    pub bytes: u64,
}

/// A place: `offset` bytes into a buffer. A chunk is a buffer with several places in use.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Loc {
    /// The buffer.
    pub buffer: Buffer,
    /// Bytes from its start.
    pub offset: u64,
}

impl From<Buffer> for Loc {
    fn from(buffer: Buffer) -> Loc {
        Loc { buffer, offset: 0 }
    }
}

/// One line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InstrData {
    /// What it does.
    pub kind: InstrKind,
    /// Where it queues.
    pub stream: Stream,
    /// The lines that must be done before it, in addition to the lines before it on its stream.
    /// Only `sync` writes this.
    pub after: Vec<Dep>,
    /// Why the line exists.
    pub why: Why,
}

/// A line that another waits for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Dep {
    /// The line.
    pub instr: Instr,
    /// True for the line of the previous step. Steps overlap: step k+1 starts before step k has
    /// ended.
    pub previous: bool,
}

/// What a line does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum InstrKind {
    /// Runs a node of the graph.
    Run {
        /// The node.
        node: Node,
        /// A place for each input.
        args: Vec<Loc>,
        /// A place for each output.
        outs: Vec<Loc>,
        /// Bytes that the kernel may use while it runs; present if and only if the op needs some.
        scratch: Option<Loc>,
        /// The elements that the line computes; `None` for all. Several lines then compute the
        /// node, each a part of it: see [`Graph::divisible`](crate::Graph::divisible).
        part: Option<Part>,
    },
    /// Copies `bytes` bytes.
    Copy {
        /// The source.
        src: Loc,
        /// The destination.
        dst: Loc,
        /// How many bytes.
        bytes: u64,
    },
}

impl InstrKind {
    /// Every place that the line names: the arguments, the results, the scratch; or source and
    /// destination. Unlike [`Schedule::accesses`], these include places of zero bytes.
    pub fn places(&self) -> impl Iterator<Item = Loc> + '_ {
        let (args, outs, scratch, ends): (&[Loc], &[Loc], _, _) = match self {
            InstrKind::Run {
                args,
                outs,
                scratch,
                ..
            } => (args, outs, *scratch, None),
            &InstrKind::Copy { src, dst, .. } => (&[], &[], None, Some([src, dst])),
        };
        let run = args.iter().chain(outs).copied().chain(scratch);
        run.chain(ends.into_iter().flatten())
    }

    /// The same places, to be changed.
    pub fn places_mut(&mut self) -> impl Iterator<Item = &mut Loc> {
        let (args, outs, scratch, ends): (&mut [Loc], &mut [Loc], _, _) = match self {
            InstrKind::Run {
                args,
                outs,
                scratch,
                ..
            } => (args, outs, scratch.as_mut(), None),
            InstrKind::Copy { src, dst, .. } => (&mut [], &mut [], None, Some([src, dst])),
        };
        let run = args.iter_mut().chain(outs).chain(scratch);
        run.chain(ends.into_iter().flatten())
    }
}

crate::named! {
    /// Why a line exists.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    pub enum Why {
        /// The model's own computation.
        Model = "run",
        /// The same node runs again, because its value was dropped.
        Recompute = "rerun",
        /// An activation leaves for the host.
        SwapOut = "swapout",
        /// An activation comes back.
        SwapIn = "swapin",
        /// A state that lives on the host is copied in for its use.
        Gather = "gather",
        /// A state that lives on the host is copied back, updated.
        Offload = "offload",
        /// A state's new value takes the place of the old one.
        Update = "update",
        /// An input comes from the host.
        Feed = "feed",
        /// An output goes to the host.
        Fetch = "fetch",
        /// What waits on the disk comes to the host.
        Load = "load",
        /// What waits on the disk goes there from the host.
        Store = "store",
    }
}

impl Why {
    /// The reason that [`Why::name`] names.
    pub fn from_name(name: &str) -> Option<Why> {
        Why::ALL.into_iter().find(|w| w.name() == name)
    }
}

/// One access of a line: a place, the number of bytes, and whether they are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// Where.
    pub loc: Loc,
    /// How many bytes.
    pub bytes: u64,
    /// True if the line writes them.
    pub write: bool,
}

impl Schedule {
    /// The space of a place.
    pub fn space(&self, loc: Loc) -> MemorySpace {
        self.pools[self.buffers[loc.buffer].pool].space
    }

    /// What runs a line whose operands and results lie in a pool.
    pub fn processor(&self, pool: Pool) -> Processor {
        match (self.sm, self.pools.get(pool).map(|data| data.space)) {
            (Some(_), Some(MemorySpace::Device(_))) => Processor::Gpu,
            _ => Processor::Cpu,
        }
    }
    /// What runs a line: its operands and results are all in one space.
    pub fn runs_on(&self, args: &[Loc], outs: &[Loc]) -> Processor {
        let buffer = outs
            .iter()
            .chain(args)
            .find_map(|loc| self.buffers.get(loc.buffer));
        buffer.map_or(Processor::Cpu, |data| self.processor(data.pool))
    }

    /// The place of a whole value, of which a line touches a part at `loc`; `None` if only a part
    /// of the value lies in the buffer.
    pub fn whole_place(
        &self,
        graph: &crate::Graph,
        (node, part): (Node, Option<Part>),
        value: Value,
        loc: Loc,
    ) -> Option<Loc> {
        if part.is_none() {
            return Some(loc);
        }
        let offset = loc
            .offset
            .checked_sub(graph.extent(node, part, value).start)?;
        let end = offset.checked_add(graph.values[value].ty.bytes())?;
        (end <= self.buffers[loc.buffer].bytes).then_some(Loc { offset, ..loc })
    }

    /// The first pool in a space.
    pub fn pool_in(&self, space: MemorySpace) -> Option<Pool> {
        let mut pools = self.pools.iter();
        pools
            .find(|(_, data)| data.space == space)
            .map(|(pool, _)| pool)
    }

    /// What a line reads and writes: the arguments, then the results, then the scratch. Only this
    /// function defines it.
    pub fn accesses(&self, graph: &crate::Graph, instr: Instr) -> Vec<Access> {
        let mut accesses = vec![];
        self.each_access(graph, instr, |access| accesses.push(access));
        accesses
    }

    /// The same, without building a list.
    pub fn each_access(&self, graph: &crate::Graph, instr: Instr, mut each: impl FnMut(Access)) {
        let mut touch = |loc: Loc, bytes: u64, write: bool| {
            if bytes > 0 {
                each(Access { loc, bytes, write });
            }
        };
        match &self.instrs[instr].kind {
            InstrKind::Run {
                node,
                args,
                outs,
                scratch,
                part,
            } => {
                let data = &graph.nodes[*node];
                let bytes = |v: Value| graph.extent(*node, *part, v).bytes;
                args.iter()
                    .zip(&data.inputs)
                    .for_each(|(&loc, &v)| touch(loc, bytes(v), false));
                outs.iter()
                    .zip(&data.outputs)
                    .for_each(|(&loc, &v)| touch(loc, bytes(v), true));
                scratch
                    .iter()
                    .for_each(|&loc| touch(loc, self.buffers[loc.buffer].bytes - loc.offset, true));
            }
            &InstrKind::Copy { src, dst, bytes } => {
                touch(src, bytes, false);
                touch(dst, bytes, true);
            }
        }
    }
}

/// A buffer's size for `bytes` bytes of content: never zero, so that every buffer has its own
/// address.
pub fn buffer_bytes(bytes: u64) -> u64 {
    bytes.max(1).next_multiple_of(ALIGN)
}
