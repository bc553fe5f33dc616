//! Kernels for CPUs: a call computes some of a phase's parts, one after the other, with vectors of
//! 16 elements.

use super::dag::{Fold, Functions, Prim};
use super::emit::{Emitter, Threads};
use super::machine::Machine;
use super::plan::Plan;
use crate::mlir::{Body, Builder, Kind, Parameter, Space, Step, Type, Value};
use ir::Processor;

/// Elements of a vector. It does not depend on the width of the processor's registers, so results
/// are the same bits on every CPU.
pub(super) const LANES: u64 = 16;
/// The approximate number of elements of a part: enough that starting a part costs nothing.
const PART: u64 = 16384;
/// Columns of a part of a combining phase.
const COMBINED: u64 = 1024;

/// Results of at least this many bytes are in no cache when they are read next: bypassing the
/// caches saves reading their lines first.
const STREAMED: u64 = 32 << 20;

/// A CPU, and the arguments that a function gets from its caller.
pub(super) struct Cpu {
    lanes: u64,
    /// The parts to compute, a half-open range.
    parts: Option<[Value; 2]>,
}

impl Machine for Cpu {
    const PROCESSOR: Processor = Processor::Cpu;
    const MOST_ALIGN: u64 = 64;
    const FUNCTIONS: Functions = Functions::Polynomials;
    const UNROLLS: bool = true;
    const ROLLED: bool = false;
    const CACHES: bool = true;
    const PARTS_FOLLOW: bool = true;
    const SUMS_AT_ONCE: u64 = 1;

    fn new(plan: &Plan<'_>) -> Cpu {
        let draws = |prim: &Prim| matches!(prim, Prim::Random(_));
        // The rounds of a random number depend on each other. Two vectors at a time keep the
        // multipliers busy.
        let lanes = if plan.dag.nodes.iter().any(|node| draws(&node.prim)) {
            2 * LANES
        } else {
            LANES
        };
        Cpu { lanes, parts: None }
    }

    fn lanes(&self) -> u64 {
        self.lanes
    }

    fn threads(&self) -> u64 {
        1
    }

    fn slots(&self) -> Option<u64> {
        None
    }

    fn rows_at_once(&self) -> u64 {
        1
    }

    fn part(&self) -> u64 {
        PART
    }

    fn combined(&self) -> u64 {
        COMBINED
    }

    /// A result bypasses the caches if it is large and its rows begin at the alignment of a vector.
    fn streams(plan: &Plan<'_>, result: usize) -> bool {
        let out = &plan.results[result];
        let strides = plan.space.place(out.value).strides;
        out.ty.bytes() >= STREAMED && strides.iter().all(|s| s % LANES as i64 == 0)
    }

    fn one_round(&self, _elements: u64) -> bool {
        false
    }
}

impl Threads for Cpu {
    fn begin(&mut self, symbol: &str, n: usize) -> (Builder, Vec<Value>) {
        let pointer = Type::Pointer(Space::Generic);
        let mut addresses = Parameter::new("args", pointer);
        addresses.noalias = true;
        let [first, end] =
            ["first", "end"].map(|name| Parameter::new(name, Type::Scalar(Kind::I64)));
        let (mut b, values) = Builder::new(symbol, vec![addresses, first, end], Body::Cpu);
        self.parts = Some([values[1], values[2]]);
        let arguments = (0..n as u64).map(|i| {
            let at = b.offset_by(values[0], Step::Known(i), pointer);
            b.load(at, pointer, None)
        });
        let arguments = arguments.collect();
        (b, arguments)
    }

    fn parts(e: &mut Emitter<'_, Cpu>, _parts: u64) -> [Value; 3] {
        let one = e.index(1);
        let [first, end] = e.machine.parts.expect("a function should have begun");
        [first, end, one]
    }

    fn share(e: &mut Emitter<'_, Cpu>, from: Value, step: u64, _each: u64) -> [Value; 2] {
        [from, e.index(step)]
    }

    fn across(_: &mut Emitter<'_, Cpu>, _: Fold, x: Value, _: u64) -> Value {
        x
    }

    fn row_of_part(_: &mut Emitter<'_, Cpu>) -> Option<Value> {
        None
    }

    fn synchronize(_: &mut Emitter<'_, Cpu>) {}

    fn leads(_: &mut Emitter<'_, Cpu>) -> Option<Value> {
        None
    }

    fn end(&self, _: &str, _: &mut Builder) {}
}
