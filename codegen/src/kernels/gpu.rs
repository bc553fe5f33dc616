//! Kernels for NVIDIA's GPUs: a block of threads computes one part at a time, and its threads share
//! rows. Vectors have 16 bytes.

use super::dag::{Fold, Functions, Prim};
use super::emit::{Emitter, Threads};
use super::machine::Machine;
use super::plan::{Out, Plan};
use crate::mlir::{
    Body, Builder, Convert, Kind, Parameter, Predicate, Shared, Space, Special, Type, Value,
};
use ir::Processor;

/// Bytes of a thread's load or store.
const VECTOR: u64 = 16;
/// Vectors that a thread computes in a part, if rows have no sums.
const VECTORS: u64 = 4;
/// The most vectors of a row that a thread keeps, and the registers for them.
const MOST_SLOTS: u64 = 8;
const KEPT: u64 = 64;
/// The most threads of a block whose rows have no folds: sums over rows reach most of the memory's
/// rate with 64 to 256 of them.
const SUMMING: u64 = 128;
/// The most threads of a block with rows that are kept. Measured on an H100, longer rows are
/// faster if each pass reads them again, from the second cache.
const KEEPING: u64 = 512;
/// The threads of a block with longer rows: as few rows as possible are in work, so that the second
/// cache has all of them.
const MOST_THREADS: u64 = 1024;
/// Short rows that a block computes at the same time.
const SHORT: u64 = 4;
/// Threads of a block whose rows are shorter than what a warp reads at once.
const TOGETHER: u64 = 256;
/// Threads of a warp.
const WARP: u64 = 32;
/// Bytes of shared memory for one fold: a number of 8 bytes from each warp of the largest block.
const SLOT: u64 = 256;

/// A GPU, and the numbers that a thread of a kernel knows.
pub(super) struct Gpu {
    lanes: u64,
    threads: u64,
    /// The number of a row's vectors that a thread keeps in registers.
    slots: Option<u64>,
    /// The number of rows that a block computes at the same time, each by a warp or, without folds,
    /// by a part of one.
    rows: u64,
    shared_bytes: u64,
    thread: Option<Thread>,
}

/// 64-bit numbers: of the thread among those of its row, of this row in the block if there are
/// several, of the block, and the number of blocks.
#[derive(Clone, Copy)]
struct Thread {
    number: Value,
    row: Option<Value>,
    block: Value,
    blocks: Value,
}

impl Gpu {
    fn thread(&self) -> Thread {
        self.thread.expect("a function should have begun")
    }

    /// Combines the numbers of a warp's threads to one, which all of them then know.
    fn across_warp(e: &mut Emitter<'_, Gpu>, fold: Fold, mut x: Value) -> Value {
        let (all, clamp) = (e.b.int(-1), e.b.int(31));
        for distance in [16, 8, 4, 2, 1] {
            let distance = e.b.int(distance);
            let other = exchanged(&mut e.b, x, all, distance, clamp);
            x = e.combine(fold, x, other);
        }
        x
    }

    /// Combines the numbers of a block's warps to one, through shared memory.
    fn across_warps(e: &mut Emitter<'_, Gpu>, fold: Fold, x: Value, slot: u64) -> Value {
        e.machine.shared_bytes = e.machine.shared_bytes.max((slot + 1) * SLOT);
        let base = e.b.shared();
        let (five, start) = (e.index(5), e.index(slot * WARP));
        let thread = e.machine.thread().number;
        let warp = e.b.shrui(thread, five);
        let at = e.b.addi(warp, start);
        let to = e.b.offset(base, at, Kind::I64);
        // Every thread of a warp has the same number.
        e.b.store(x, to, 8);
        e.b.barrier();

        let warps = e.machine.threads / WARP;
        let numbers: Vec<u64> = (slot * WARP..slot * WARP + warps).collect();
        let mut total = None;
        for at in numbers {
            let from = e.b.offset(base, at, Kind::I64);
            let one = e.b.load(from, x.ty(), 8);
            total = Some(match total {
                None => one,
                Some(total) => e.combine(fold, total, one),
            });
        }
        total.unwrap_or(x)
    }
}

/// The number of another thread of the warp.
fn exchanged(b: &mut Builder, x: Value, all: Value, distance: Value, clamp: Value) -> Value {
    if x.ty().bits() == Some(32) {
        return b.butterfly(all, x, distance, clamp);
    }
    // Threads exchange 32 bits at a time.
    let words = Type::Vector(2, Kind::I32);
    let halves = b.bitcast(x, words);
    let mut moved = b.undef(words);
    for i in 0..2 {
        let half = b.extract(halves, i);
        let half = b.butterfly(all, half, distance, clamp);
        moved = b.insert(half, moved, i);
    }
    b.bitcast(moved, x.ty())
}

impl Machine for Gpu {
    const PROCESSOR: Processor = Processor::Gpu;
    const MOST_ALIGN: u64 = VECTOR;
    const FUNCTIONS: Functions = Functions::Hardware;
    const UNROLLS: bool = false;
    const ROLLED: bool = true;
    const CACHES: bool = false;
    const PARTS_FOLLOW: bool = false;
    const SUMS_AT_ONCE: u64 = 32;

    fn new(plan: &Plan<'_>) -> Gpu {
        let lanes = lanes(plan);
        let Shares {
            threads,
            slots,
            rows,
        } = Shares::of(plan, lanes);
        Gpu {
            lanes,
            threads,
            slots,
            rows,
            shared_bytes: 0,
            thread: None,
        }
    }

    fn lanes(&self) -> u64 {
        self.lanes
    }

    fn threads(&self) -> u64 {
        self.threads
    }

    fn slots(&self) -> Option<u64> {
        self.slots
    }

    fn rows_at_once(&self) -> u64 {
        self.rows
    }

    fn part(&self) -> u64 {
        self.lanes * self.threads * VECTORS
    }

    fn combined(&self) -> u64 {
        self.threads
    }

    fn streams(_: &Plan<'_>, _: usize) -> bool {
        false
    }

    fn one_round(&self, elements: u64) -> bool {
        elements == self.lanes * self.threads
    }
}

impl Threads for Gpu {
    fn begin(&mut self, symbol: &str, n: usize) -> (Builder, Vec<Value>) {
        let address = |i| Parameter {
            align: Some(64),
            ..Parameter::new(format!("a{i}"), Type::Pointer(Space::Global))
        };
        let body = Body::Gpu {
            threads: (self.threads * self.rows) as u32,
            blocks: 1,
        };
        let (mut b, arguments) = Builder::new(symbol, (0..n).map(address).collect(), body);
        let [number, block, blocks] =
            [Special::Thread, Special::Block, Special::Blocks].map(|which| {
                let x = b.special(which);
                b.wide(x)
            });
        let (mut number, mut row) = (number, None);
        if self.rows > 1 {
            let digits = self.threads.ilog2().into();
            let [of_row, digits] = [self.threads - 1, digits].map(|i| b.long(i));
            row = Some(b.shrui(number, digits));
            number = b.andi(number, of_row);
        }
        self.thread = Some(Thread {
            number,
            row,
            block,
            blocks,
        });
        (b, arguments)
    }

    fn parts(e: &mut Emitter<'_, Gpu>, parts: u64) -> [Value; 3] {
        let Thread { block, blocks, .. } = e.machine.thread();
        [block, e.index(parts), blocks]
    }

    fn share(e: &mut Emitter<'_, Gpu>, from: Value, step: u64, each: u64) -> [Value; 2] {
        let each = e.index(each);
        let thread = e.machine.thread().number;
        let at = e.b.muli(thread, each);
        let from = e.b.addi(from, at);
        [from, e.index(step * e.machine.threads)]
    }

    fn across(e: &mut Emitter<'_, Gpu>, fold: Fold, x: Value, slot: u64) -> Value {
        // Bits are exchanged as integers.
        let bit = x.ty() == Type::Scalar(Kind::I1);
        let mut total = if bit {
            e.b.convert(Convert::Extui, x, Kind::I32)
        } else {
            x
        };
        total = Gpu::across_warp(e, fold, total);
        if e.machine.threads > WARP {
            total = Gpu::across_warps(e, fold, total, slot);
        }
        if bit {
            total = e.b.convert(Convert::Trunci, total, Kind::I1);
        }
        total
    }

    fn row_of_part(e: &mut Emitter<'_, Gpu>) -> Option<Value> {
        e.machine.thread().row
    }

    fn synchronize(e: &mut Emitter<'_, Gpu>) {
        // The warps of other rows may be at another place.
        if e.machine.rows > 1 {
            e.b.warp_barrier();
        } else {
            e.b.barrier();
        }
    }

    fn leads(e: &mut Emitter<'_, Gpu>) -> Option<Value> {
        let zero = e.index(0);
        let thread = e.machine.thread().number;
        Some(e.b.compare(Predicate::Eq, thread, zero))
    }

    fn end(&self, symbol: &str, builder: &mut Builder) {
        if self.shared_bytes != 0 {
            builder.set_shared(Shared {
                symbol: format!("{symbol}_shared"),
                bytes: self.shared_bytes,
                align: 16,
                dynamic: false,
            });
        }
    }
}

/// Elements of a vector: 16 bytes of the narrowest type that is read or written for each element.
fn lanes(plan: &Plan<'_>) -> u64 {
    let loads = plan
        .dag
        .nodes
        .iter()
        .filter(|node| node.span.columns && matches!(node.prim, Prim::Load(..)));
    let results = plan
        .results
        .iter()
        .filter(|out| plan.space.span(out.value).1);
    let bytes = loads
        .map(|node| node.kind.bytes())
        .chain(results.map(|out| out.ty.dtype().bytes()));
    let narrowest = bytes.filter(|&b| b > 1).min().unwrap_or(4);
    (VECTOR / narrowest).clamp(2, 8)
}

/// How the threads of a block share rows.
struct Shares {
    /// Threads of a row.
    threads: u64,
    /// The vectors of a row that each of them keeps.
    slots: Option<u64>,
    /// Rows at the same time.
    rows: u64,
}

impl Shares {
    /// Rows with folds are read once, if registers have room for them: by one warp if it has room,
    /// so that no thread waits for another warp, else by as few threads as possible. The sums over
    /// rows of other rows need a vector of each thread.
    fn of(plan: &Plan<'_>, lanes: u64) -> Shares {
        let one = |threads: u64, slots: Option<u64>| Shares {
            threads,
            slots,
            rows: 1,
        };
        let vectors = plan.space.columns() / lanes;
        let nodes = || plan.dag.nodes.iter();
        let folds = nodes().any(|node| matches!(node.prim, Prim::Fold(_)));
        let sums = plan.results.iter().filter(|out| out.is_sum()).count() as u64;
        let busy = |elements: u64| elements.max(1).next_power_of_two();
        if vectors == 0 || (!folds && sums == 0) {
            // The number of threads that a row can keep busy.
            let threads = match vectors {
                0 => busy(plan.space.columns()),
                _ => busy(vectors),
            };
            let spans = |out: &Out| plan.space.span(out.value).1;
            let is_short = threads < WARP && !folds && sums == 0 && plan.space.rows() > 1;
            if is_short && plan.results.iter().all(spans) {
                return Shares {
                    threads,
                    slots: None,
                    rows: TOGETHER / threads,
                };
            }
            return one(threads.clamp(WARP, 256), None);
        }
        let threads = |slots: u64| vectors.div_ceil(slots).next_multiple_of(WARP);
        if !folds {
            // The pieces of a row should be full.
            let pieces = vectors.div_ceil(SUMMING);
            return one(threads(pieces), Some(1));
        }
        let loads = nodes().filter(|node| {
            matches!(node.prim, Prim::Load(..)) && node.span.columns && node.span.rows
        });
        let loaded: u64 = loads.map(|node| node.kind.bytes().max(4)).sum();
        let registers = (lanes * (loaded + 4 * sums) / 4).max(1);
        let most = (KEPT / registers).clamp(1, MOST_SLOTS);
        let full = (1..=most).rev().find(|&n| threads(n) * n == vectors);
        let slots = full.unwrap_or_else(|| most.min(vectors.div_ceil(WARP)));
        if threads(slots) > KEEPING {
            return one(MOST_THREADS, None);
        }
        // A multiprocessor has room for 64 warps and for 32 blocks: a warp with little to load
        // should not be a block of its own. Warps without a row would read a number of the whole
        // tensor while the row's warp writes a result in its place.
        let is_short = threads(slots) == WARP && slots == 1 && sums == 0;
        let is_short = is_short && plan.space.rows() >= SHORT;
        Shares {
            threads: threads(slots),
            slots: Some(slots),
            rows: if is_short { SHORT } else { 1 },
        }
    }
}
