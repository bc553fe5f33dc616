//! Instructions of a [`Dag`] as MLIR: constants, loads, stores, and one operation for each
//! instruction. `rows` has the loops over a row's columns, `phases` the functions.
//!
//! Values that do not vary along a row are scalars, computed before the loop over its columns: an
//! operation is appended to the outermost block in which its operands are known. Tables store what
//! was emitted, so nothing is emitted twice.

use super::dag::{Dag, Fold, Id, Prim};
use super::lower::{Known, storage};
use super::machine::Machine;
use super::passes::{Buffer, Pass, Passes, kept_passes};
use super::plan::{Out, Plan};
use crate::mlir::{self, Builder, Convert, Emit, Kind, Module, Predicate, Type, Value};
use ir::op::body::Place;
use std::collections::{BTreeMap, HashMap};

/// A function of a kernel, as [`super::Phase`] has it.
pub(crate) struct Function {
    pub(crate) symbol: String,
    pub(crate) parts: u64,
    pub(crate) threads: u32,
    pub(crate) shared_bytes: u32,
}

/// The functions of a kernel, whose symbols begin with [`SYMBOL`].
pub(super) struct Emitted {
    pub(super) module: Module,
    pub(super) functions: Vec<Function>,
    pub(super) scratch_bytes: u64,
}

/// The temporary name of a kernel. Its final name is a hash of its text.
pub(crate) const SYMBOL: &str = "k";

/// Sums over rows of one result.
pub(super) struct Sums {
    pub(super) kind: Kind,
    /// The offset of its partial sums in the scratch.
    pub(super) offset: u64,
}

/// Emits the functions of a kernel.
pub(super) fn emit<M: Threads>(plan: &Plan<'_>) -> Result<Emitted, mlir::Error> {
    let passes = kept_passes::<M>(plan);
    let (mut scratch_bytes, mut sums) = (0, BTreeMap::new());
    for (j, out) in plan.results.iter().enumerate() {
        if let Known::Columns { of, .. } = out.known {
            let (kind, offset) = (plan.dag.kind(of), scratch_bytes);
            sums.insert(j, Sums { kind, offset });
            scratch_bytes += plan.space.partial_bytes(out.value, M::PROCESSOR);
        }
    }
    let (rows_each, sum_parts) = plan.space.parts(M::PROCESSOR);
    let (mut module, mut functions) = (Module::default(), vec![]);

    let mut emitter = Emitter::<M>::new(plan, &passes, &sums, scratch_bytes, 0);
    functions.push(emitter.main(rows_each, sum_parts));
    module.push(emitter.finish()?);
    if plan.results.iter().any(Out::is_sum) {
        let mut emitter = Emitter::<M>::new(plan, &passes, &sums, scratch_bytes, 1);
        functions.push(emitter.combine_parts(sum_parts));
        module.push(emitter.finish()?);
    }
    Ok(Emitted {
        module,
        functions,
        scratch_bytes,
    })
}

/// Emitted values that are reused.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Found {
    /// A 64-bit constant.
    Index(u64),
    /// The start of the row of an argument whose elements are at this place.
    Row(usize, Place),
    /// The distance in elements from the first row to this one, for these strides.
    Offset(Vec<i64>),
}

/// The elements of a row: the address of the first, their kind, and the address's alignment.
#[derive(Clone, Copy)]
pub(super) struct Elements {
    pub(super) pointer: Value,
    pub(super) kind: Kind,
    pub(super) align: u64,
}

/// Elements that a loop prefetches into the first or the second cache, in addition to those that it
/// computes with.
#[derive(Clone, Copy)]
pub(super) struct Fetched {
    pub(super) pointer: Value,
    pub(super) kind: Kind,
    pub(super) cache: usize,
}

/// Per-block scratch of a long row: `scales` holds the block's maximum, then the factor that
/// rescales its exponentials, exp(block's maximum - row's maximum); `sums` the block's sum of
/// exponentials.
#[derive(Clone, Copy)]
pub(super) struct Blocks {
    pub(super) scales: Value,
    pub(super) sums: Value,
}

/// What a thread keeps in registers, by its vector's number in the row.
#[derive(Default)]
pub(super) struct Held {
    /// The vector that is computed, if threads keep them.
    pub(super) slot: Option<u64>,
    /// The values of it that later passes need.
    pub(super) wanted: Vec<Id>,
    /// Values of this row.
    pub(super) values: BTreeMap<(Id, u64), Value>,
    /// Sums over the part's rows, by the result.
    pub(super) sums: BTreeMap<(usize, u64), Value>,
}

/// Values that are known inside a row or block, and are dropped after it.
#[derive(Clone, Default)]
pub(super) struct Tables {
    /// Scalars by their instruction.
    pub(super) scalars: BTreeMap<Id, Value>,
    /// Scalars as vectors, by the vector's width.
    spread: BTreeMap<(Id, u64), Value>,
    found: HashMap<Found, Value>,
}

/// The differences between the instructions of CPUs and of GPUs: how functions are started, which
/// threads compute which part of a row, and how a row's sums are combined.
pub(super) trait Threads: Machine {
    /// Starts a function of `n` addresses. Returns the addresses.
    fn begin(&mut self, symbol: &str, n: usize) -> (Builder, Vec<Value>);
    /// The loop over the parts that a call computes, out of `parts`: from, to and step.
    fn parts(e: &mut Emitter<'_, Self>, parts: u64) -> [Value; 3];
    /// The start of a thread's share of a loop, and the step. In a round all threads take `step`
    /// elements, and one thread takes `each`.
    fn share(e: &mut Emitter<'_, Self>, from: Value, step: u64, each: u64) -> [Value; 2];
    /// Combines the numbers of all threads for a row to one, which all threads then know; `slot` is
    /// the number of the fold among the row's folds.
    fn across(e: &mut Emitter<'_, Self>, fold: Fold, x: Value, slot: u64) -> Value;
    /// The number of the thread's row among those that a block computes at the same time; none if
    /// there is one.
    fn row_of_part(e: &mut Emitter<'_, Self>) -> Option<Value>;
    /// Waits until every thread of a row has read the bytes that others may overwrite.
    fn synchronize(e: &mut Emitter<'_, Self>);
    /// A bit that is true for the thread that writes a number known to all threads; none if there
    /// is only one thread.
    fn leads(e: &mut Emitter<'_, Self>) -> Option<Value>;
    /// Completes a function.
    fn end(&self, symbol: &str, builder: &mut Builder);
}

/// Emits one function.
pub(super) struct Emitter<'a, M> {
    pub(super) plan: &'a Plan<'a>,
    pub(super) passes: &'a Passes,
    pub(super) sums: &'a BTreeMap<usize, Sums>,
    pub(super) machine: M,
    pub(super) b: Builder,
    pub(super) symbol: String,
    /// The addresses of operands, results and scratch.
    pub(super) arguments: Vec<Value>,
    pub(super) tables: Tables,
    /// The depth of the block in which a row is computed, and the row's number.
    pub(super) row_depth: usize,
    pub(super) row: Value,
    /// The prefetches of the current loop.
    pub(super) fetched: Vec<Fetched>,
    /// Buffers on the stack, by their number.
    pub(super) buffers: BTreeMap<usize, Value>,
    pub(super) blocks: Option<Blocks>,
    /// The place of a part's sums of a result.
    pub(super) partial: BTreeMap<usize, Value>,
    pub(super) held: Held,
    /// A kept value that must be multiplied with a number: the number as a scalar and as a vector.
    pub(super) scale: Option<(Id, [Value; 2])>,
    /// Whether a store bypasses the caches. Others may read it only after a fence.
    pub(super) fenced: bool,
    /// Elements of a vector.
    pub(super) lanes: u64,
}

impl<M: Threads> Emit for Emitter<'_, M> {
    const ROLLED: bool = M::ROLLED;

    fn builder(&mut self) -> &mut Builder {
        &mut self.b
    }
}

impl<'a, M: Threads> Emitter<'a, M> {
    /// Begins the function of a phase.
    fn new(
        plan: &'a Plan<'a>,
        passes: &'a Passes,
        sums: &'a BTreeMap<usize, Sums>,
        scratch_bytes: u64,
        phase: usize,
    ) -> Emitter<'a, M> {
        let symbol = if phase == 0 {
            SYMBOL.to_string()
        } else {
            format!("{SYMBOL}_{phase}")
        };
        let mut machine = M::new(plan);
        let n = plan.operands.len() + plan.results.len() + usize::from(scratch_bytes != 0);
        let (mut b, arguments) = machine.begin(&symbol, n);
        let zero = b.long(0);
        let mut tables = Tables::default();
        tables.found.insert(Found::Index(0), zero);
        Emitter {
            plan,
            passes,
            sums,
            lanes: machine.lanes(),
            machine,
            b,
            symbol,
            arguments,
            tables,
            row_depth: 0,
            row: zero,
            fetched: vec![],
            buffers: BTreeMap::new(),
            blocks: None,
            partial: BTreeMap::new(),
            held: Held::default(),
            scale: None,
            fenced: false,
        }
    }

    fn finish(mut self) -> Result<mlir::Function, mlir::Error> {
        if self.fenced {
            self.b.fence();
        }
        self.machine.end(&self.symbol, &mut self.b);
        self.b.finish()
    }

    /// How the function is started.
    pub(super) fn function(&self, parts: u64) -> Function {
        Function {
            symbol: self.symbol.clone(),
            parts,
            threads: (self.machine.threads() * self.machine.rows_at_once()) as u32,
            shared_bytes: 0,
        }
    }

    // --- memory ---

    /// A known 64-bit number.
    pub(super) fn index(&mut self, i: u64) -> Value {
        if let Some(&value) = self.tables.found.get(&Found::Index(i)) {
            return value;
        }
        let value = self.b.outside(0, |b| b.long(i));
        self.tables.found.insert(Found::Index(i), value);
        value
    }

    /// The row's elements of an operand or result.
    pub(super) fn row_elements(&mut self, argument: usize, place: &Place, kind: Kind) -> Elements {
        let Place { first, strides } = place;
        let distances = strides.iter().chain([first]).map(|d| d.unsigned_abs());
        let bytes = distances.fold(self.lanes, gcd) * kind.bytes();
        let align = aligned::<M>(bytes);
        let mut base = self.arguments[argument];
        let elements = |pointer| Elements {
            pointer,
            kind,
            align,
        };
        let key = Found::Row(argument, place.clone());
        if let Some(&pointer) = self.tables.found.get(&key) {
            return elements(pointer);
        }
        if *first != 0 {
            let first = self.index(*first as u64);
            base = self.b.outside(0, |b| b.offset(base, first, kind));
        }
        if strides.iter().all(|&s| s == 0) {
            return elements(base);
        }
        let offset = self.row_offset(strides);
        let depth = self.row_depth;
        let pointer = self.b.outside(depth, |b| b.offset(base, offset, kind));
        self.tables.found.insert(key, pointer);
        elements(pointer)
    }

    /// Σ index of axis × stride.
    fn row_offset(&mut self, strides: &[i64]) -> Value {
        let key = Found::Offset(strides.to_vec());
        if let Some(&value) = self.tables.found.get(&key) {
            return value;
        }
        let sizes = &self.plan.space.sizes;
        let (depth, row) = (self.row_depth, self.row);
        let regular = (1..strides.len()).all(|i| strides[i - 1] == strides[i] * sizes[i] as i64);
        let offset = if regular {
            let stride = self.index(strides[strides.len() - 1] as u64);
            self.b.outside(depth, |b| b.muli(row, stride))
        } else {
            let mut sum = self.index(0);
            let mut below = 1;
            for i in (0..strides.len()).rev() {
                if strides[i] != 0 {
                    let stride = strides[i] as u64;
                    let [unit, size, stride] = [below, sizes[i], stride].map(|i| self.index(i));
                    sum = self.b.outside(depth, |b| {
                        let at = b.divui(row, unit);
                        let at = b.remui(at, size);
                        let at = b.muli(at, stride);
                        b.addi(sum, at)
                    });
                }
                below *= sizes[i];
            }
            sum
        };
        self.tables.found.insert(key, offset);
        offset
    }

    /// `width` elements from `at` on.
    pub(super) fn load(&mut self, from: Elements, at: Value, width: u64) -> Value {
        let pointer = self.b.offset(from.pointer, at, from.kind);
        let align = if width == 1 {
            from.kind.bytes()
        } else {
            from.align
        };
        self.b.load(pointer, Type::of(from.kind, width), align)
    }

    /// Stores elements from `at` on.
    pub(super) fn store(&mut self, x: Value, to: Elements, at: Value) {
        self.store_as(x, to, at, false);
    }

    /// The same; bypasses the caches if `nontemporal`.
    fn store_as(&mut self, x: Value, to: Elements, at: Value, nontemporal: bool) {
        let pointer = self.b.offset(to.pointer, at, to.kind);
        let align = match x.ty() {
            Type::Vector(..) => to.align,
            _ => to.kind.bytes(),
        };
        self.b.store_as(x, pointer, align, nontemporal);
    }

    /// The place of a value that is kept for later passes.
    pub(super) fn buffer(&mut self, id: Id) -> Elements {
        let kind = self.plan.dag.kind(id);
        match self.passes.buffers[&id] {
            Buffer::Stack(n) => Elements {
                pointer: self.buffers[&n],
                kind,
                align: (self.lanes * kind.bytes()).min(M::MOST_ALIGN),
            },
            Buffer::Result(j) => {
                let place = self.plan.space.place(self.plan.results[j].value);
                self.row_elements(self.plan.operands.len() + j, &place, kind)
            }
        }
    }

    /// The row of a result.
    pub(super) fn result(&mut self, j: usize) -> Elements {
        let place = self.plan.space.place(self.plan.results[j].value);
        self.row_elements(self.plan.operands.len() + j, &place, self.memory(j))
    }

    /// The kind that a result's elements have in memory.
    pub(super) fn memory(&self, j: usize) -> Kind {
        storage(self.plan.results[j].ty.dtype()).unwrap_or(Kind::I8)
    }

    /// The place of a part's sums of a result.
    pub(super) fn partial(&self, j: usize) -> Elements {
        let kind = self.sums[&j].kind;
        Elements {
            pointer: self.partial[&j],
            kind,
            align: self.sum_align(kind),
        }
    }

    pub(super) fn sum_align(&self, kind: Kind) -> u64 {
        aligned::<M>(gcd(self.lanes, self.plan.space.columns()) * kind.bytes())
    }

    /// Stores elements of a result.
    pub(super) fn store_result(&mut self, j: usize, x: Value, at: Value) {
        let to = self.result(j);
        // A bool is a bit in registers and a byte in memory.
        let x = if x.ty().kind() == Some(Kind::I1) {
            self.b.convert(Convert::Extui, x, to.kind)
        } else {
            x
        };
        let vector = matches!(x.ty(), Type::Vector(..));
        let streamed = vector && M::streams(self.plan, j);
        self.fenced |= streamed;
        self.store_as(x, to, at, streamed);
    }

    // --- instructions ---

    /// A number by its bits, `width` times.
    pub(super) fn constant(&mut self, bits: u64, kind: Kind, width: u64) -> Value {
        self.b
            .outside(0, |b| b.constant(bits, Type::of(kind, width)))
    }

    /// A value that does not vary along the row, as a scalar.
    pub(super) fn scalar(&mut self, id: Id) -> Value {
        if let Some(&value) = self.tables.scalars.get(&id) {
            return value;
        }
        let dag = self.plan.dag;
        let node = &dag.nodes[id];
        let depth = self.depth(id);
        let (ty, align) = (Type::Scalar(node.kind), node.kind.bytes());
        let value = match node.prim {
            Prim::Const(bits) => self.constant(bits, node.kind, 1),
            Prim::Load(i, ref place) => {
                let from = self.row_elements(i, place, node.kind);
                self.b.outside(depth, |b| b.load(from.pointer, ty, align))
            }
            Prim::LoadAt(i, at) => {
                let (at, base) = (self.index(at), self.arguments[i]);
                self.b.outside(0, |b| {
                    let pointer = b.offset(base, at, node.kind);
                    b.load(pointer, ty, align)
                })
            }
            Prim::Power => {
                let [x, n] = [0, 1].map(|i| self.scalar(node.args[i]));
                self.power(x, n)
            }
            _ => {
                let args: Vec<Value> = node.args.iter().map(|&a| self.scalar(a)).collect();
                self.b.outside(depth, |b| instruction(b, dag, id, &args))
            }
        };
        self.tables.scalars.insert(id, value);
        value
    }

    /// The depth at which a value that does not vary along the row is known.
    fn depth(&self, id: Id) -> usize {
        if self.plan.dag.nodes[id].span.rows {
            self.row_depth
        } else {
            0
        }
    }

    /// A value that does not vary along the row, as a vector.
    fn spread(&mut self, id: Id, width: u64) -> Value {
        if width == 1 {
            return self.scalar(id);
        }
        if let Some(&value) = self.tables.spread.get(&(id, width)) {
            return value;
        }
        let node = &self.plan.dag.nodes[id];
        let value = if let Prim::Const(bits) = node.prim {
            self.constant(bits, node.kind, width)
        } else {
            let (x, depth) = (self.scalar(id), self.depth(id));
            let ty = Type::of(node.kind, width);
            self.b.outside(depth, |b| b.broadcast(x, ty))
        };
        self.tables.spread.insert((id, width), value);
        value
    }

    /// x^n by squares. The loop has a round for each bit that n may have.
    fn power(&mut self, x: Value, n: Value) -> Value {
        let [zero, one, bits] = [0, 1, 64].map(|i| self.index(i));
        self.b.outside(0, |b| {
            let unit = b.constant(1f64.to_bits(), Type::Scalar(Kind::F64));
            let negative = b.compare(Predicate::Slt, n, zero);
            let minus = b.subi(zero, n);
            let n = b.select(negative, minus, n);
            let last = b.repeat([zero, bits, one], &[unit, x, n], |b, _, values| {
                let [product, base, rest] = [values[0], values[1], values[2]];
                let bit = b.andi(rest, one);
                let bit = b.compare(Predicate::Ne, bit, zero);
                let next = b.mulf(product, base);
                let product = b.select(bit, next, product);
                let square = b.mulf(base, base);
                let rest = b.shrui(rest, one);
                vec![product, square, rest]
            });
            let inverse = b.divf(unit, last[0]);
            b.select(negative, inverse, last[0])
        })
    }

    /// The elements `at..at + width` of all values that a pass needs.
    pub(super) fn elements(&mut self, pass: &Pass, at: Value, width: u64) -> BTreeMap<Id, Value> {
        let dag = self.plan.dag;
        let mut known: BTreeMap<Id, Value> = BTreeMap::new();
        for &id in &pass.needs {
            let node = &dag.nodes[id];
            let slot = self.held.slot;
            let held = slot.and_then(|slot| self.held.values.get(&(id, slot)).copied());
            let value = match (held, &node.prim) {
                (Some(x), _) => x,
                _ if pass.kept.contains(&id) => self.kept(id, at, width),
                (_, Prim::Load(i, place)) => {
                    let from = self.row_elements(*i, place, node.kind);
                    self.load(from, at, width)
                }
                (_, &Prim::Random(stream)) => {
                    let [seed, step] = [0, 1].map(|i| self.scalar(node.args[i]));
                    self.random([seed, step], stream, at, width)
                }
                (_, Prim::Column) => self.columns(at, width),
                _ => {
                    let arg = |&a: &Id| self.element(a, width, &known);
                    let args: Vec<Value> = node.args.iter().map(arg).collect();
                    instruction(&mut self.b, dag, id, &args)
                }
            };
            known.insert(id, value);
        }
        known
    }

    /// The numbers `at..at + width`.
    fn columns(&mut self, at: Value, width: u64) -> Value {
        let first = self.b.convert(Convert::Trunci, at, Kind::I32);
        if width == 1 {
            return first;
        }
        let lanes = self.b.outside(0, |b| {
            let lanes = b.longs((0..width).collect());
            b.convert(Convert::Trunci, lanes, Kind::I32)
        });
        let first = self.b.broadcast(first, lanes.ty());
        self.b.addi(first, lanes)
    }

    /// Elements that an earlier pass kept.
    fn kept(&mut self, id: Id, at: Value, width: u64) -> Value {
        let from = self.buffer(id);
        let x = self.load(from, at, width);
        match self.scale {
            Some((of, [scalar, vector])) if of == id => {
                let scale = if width == 1 { scalar } else { vector };
                self.b.mulf(x, scale)
            }
            _ => x,
        }
    }

    /// An operand's elements.
    pub(super) fn element(&mut self, id: Id, width: u64, known: &BTreeMap<Id, Value>) -> Value {
        if self.plan.dag.nodes[id].span.columns {
            known[&id]
        } else {
            self.spread(id, width)
        }
    }

    // --- folds ---

    /// The start of a fold: combining a number with it does not change the number.
    pub(super) fn start(&mut self, fold: Fold, kind: Kind, width: u64) -> Value {
        let bits = match (fold, kind) {
            (Fold::Sum | Fold::Any, _) => 0,
            (Fold::Max | Fold::MaxNumber, Kind::F32) => f32::NEG_INFINITY.to_bits().into(),
            (Fold::Min, Kind::F32) => f32::INFINITY.to_bits().into(),
            (Fold::Max | Fold::MaxNumber, Kind::F64) => f64::NEG_INFINITY.to_bits(),
            (Fold::Min, Kind::F64) => f64::INFINITY.to_bits(),
            (Fold::Max | Fold::MaxNumber, _) => i64::MIN as u64,
            (Fold::Min, _) => i64::MAX as u64,
        };
        self.constant(bits, kind, width)
    }

    /// Combines two numbers, or two vectors, to one.
    pub(super) fn combine(&mut self, fold: Fold, a: Value, b: Value) -> Value {
        let real = a.ty().kind().is_some_and(Kind::is_float);
        let most = fold != Fold::Min;
        let wins = match fold {
            Fold::Sum if real => return self.b.addf(a, b),
            Fold::Sum => return self.b.addi(a, b),
            Fold::Any => return self.b.ori(a, b),
            Fold::MaxNumber if real => self.b.compare(Predicate::Ogt, a, b),
            Fold::Max | Fold::MaxNumber | Fold::Min if real => {
                let by = if most { Predicate::Ogt } else { Predicate::Olt };
                let wins = self.b.compare(by, a, b);
                let nan = self.b.compare(Predicate::Uno, a, a);
                self.b.ori(wins, nan)
            }
            Fold::Max | Fold::MaxNumber | Fold::Min => {
                let by = if most { Predicate::Sgt } else { Predicate::Slt };
                self.b.compare(by, a, b)
            }
        };
        self.b.select(wins, a, b)
    }

    /// Combines a vector's elements to one number, by halves.
    pub(super) fn across_lanes(&mut self, fold: Fold, mut x: Value) -> Value {
        while let Type::Vector(width, _) = x.ty() {
            let half = u64::from(width) / 2;
            let mut halves = [0, half].map(|at| self.b.slice(x, at, half));
            if half == 1 {
                halves = halves.map(|half| self.b.extract(half, 0));
            }
            x = self.combine(fold, halves[0], halves[1]);
        }
        x
    }

    /// Emits another graph in which the value `from` is `x`. Returns its value `to`.
    pub(super) fn apart(&mut self, dag: &Dag, from: Id, x: Value, to: Id) -> Value {
        let mut known: BTreeMap<Id, Value> = BTreeMap::from([(from, x)]);
        for (id, node) in dag.nodes.iter().enumerate() {
            if id == from {
                continue;
            }
            let value = if let Prim::Const(bits) = node.prim {
                let ty = x.ty().with(node.kind);
                self.b.outside(0, |b| b.constant(bits, ty))
            } else {
                let args: Vec<Value> = node.args.iter().map(|a| known[a]).collect();
                instruction(&mut self.b, dag, id, &args)
            };
            known.insert(id, value);
        }
        known[&to]
    }
}

/// One operation for one instruction.
fn instruction(b: &mut Builder, dag: &Dag, id: Id, args: &[Value]) -> Value {
    let node = &dag.nodes[id];
    match node.prim {
        Prim::Same(op) => b.arith(op, args),
        Prim::Compare(by) => b.compare(by, args[0], args[1]),
        Prim::Select => b.select(args[0], args[1], args[2]),
        Prim::Convert(how) => b.convert(how, args[0], node.kind),
        Prim::Bf16 => bf16(b, args[0]),
        ref other => unreachable!("{other:?} should be emitted by itself"),
    }
}

/// F32 numbers as the bits of bf16, two by one instruction.
fn bf16(b: &mut Builder, x: Value) -> Value {
    let Type::Vector(width, _) = x.ty() else {
        let both = b.pair(x, x);
        return b.convert(Convert::Trunci, both, Kind::I16);
    };
    let pairs = u64::from(width) / 2;
    let mut words = b.undef(Type::Vector(pairs as u32, Kind::I32));
    for i in 0..pairs {
        let [low, high] = [2 * i, 2 * i + 1].map(|at| b.extract(x, at));
        let pair = b.pair(low, high);
        words = b.insert(pair, words, i);
    }
    b.vector_bitcast(words, Type::Vector(width, Kind::I16))
}

/// The alignment that loads and stores state for an address that is a multiple of `bytes`.
fn aligned<M: Machine>(bytes: u64) -> u64 {
    (1 << bytes.trailing_zeros()).min(M::MOST_ALIGN)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
