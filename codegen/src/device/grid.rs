//! A GPU function under construction: a grid of threads, the numbers that each thread knows, and
//! elements in memory by their types. Numbers are computed in f32, f64 or i64, as in the plain
//! kernels.
//!
//! Indices are 64-bit integers. Sizes and strides are constants in a kernel, so divisions become
//! products.

use crate::kernels::{storage, wide};
use crate::mlir::{
    Arith, Body, Builder, Convert, Emit, Function, Kind, Parameter, Predicate, Shared, Space,
    Special, Type, Value,
};
use ir::op::Number;
use ir::{DType, TensorType};

/// Threads of a block in which each thread computes elements separately.
pub(super) const THREADS: u32 = 256;

/// A tensor, by its address, or memory that a block's threads share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Tensor {
    pub(super) pointer: Value,
    pub(super) dtype: DType,
}

/// A function that is being built.
pub(super) struct Grid {
    pub(super) b: Builder,
    /// Operands, then results.
    tensors: Vec<Tensor>,
    n_operands: usize,
    scratch: Option<Value>,
    symbol: String,
    pub(super) threads: u32,
    /// The thread's number in its block, the block's number, and the number of blocks.
    pub(super) thread: Value,
    block: Value,
    blocks: Value,
    /// Bytes of memory that the block's threads share, and whether the launch gives them.
    shared_bytes: u64,
    dynamic: bool,
}

impl Emit for Grid {
    /// Otherwise LLVM and ptxas unroll loops until registers run out.
    const ROLLED: bool = true;

    fn builder(&mut self) -> &mut Builder {
        &mut self.b
    }
}

impl Grid {
    /// Starts a function. Its arguments are the addresses of operands, of results, and of scratch,
    /// if any.
    pub(super) fn new(
        symbol: String,
        threads: u32,
        operands: &[TensorType],
        results: &[TensorType],
        has_scratch: bool,
    ) -> Grid {
        let n = operands.len() + results.len() + usize::from(has_scratch);
        let address = |i| Parameter {
            align: Some(64),
            ..Parameter::new(format!("a{i}"), Type::Pointer(Space::Global))
        };
        let body = Body::Gpu { threads, blocks: 1 };
        let parameters = (0..n).map(address).collect();
        let (mut b, arguments) = Builder::new(symbol.clone(), parameters, body);
        let [thread, block, blocks] =
            [Special::Thread, Special::Block, Special::Blocks].map(|which| {
                let x = b.special(which);
                b.wide(x)
            });
        let types = operands.iter().chain(results);
        let tensors = types.zip(&arguments).map(|(ty, &pointer)| Tensor {
            pointer,
            dtype: ty.dtype(),
        });
        Grid {
            tensors: tensors.collect(),
            b,
            n_operands: operands.len(),
            scratch: has_scratch.then(|| arguments[n - 1]),
            symbol,
            threads,
            thread,
            block,
            blocks,
            shared_bytes: 0,
            dynamic: false,
        }
    }

    /// The function, or the first instruction that does not fit its operands.
    pub(super) fn finish(mut self) -> Result<Function, crate::mlir::Error> {
        if self.shared_bytes > 0 {
            self.b.set_shared(Shared {
                symbol: format!("{}_shared", self.symbol),
                bytes: if self.dynamic { 0 } else { self.shared_bytes },
                align: if self.dynamic { 1024 } else { 16 },
                dynamic: self.dynamic,
            });
        }
        self.b.finish()
    }

    // --- tensors ---

    pub(super) fn operand(&self, i: usize) -> Tensor {
        self.tensors[i]
    }

    pub(super) fn result(&self, j: usize) -> Tensor {
        self.tensors[self.n_operands + j]
    }

    /// The scratch from a byte on.
    pub(super) fn scratch(&mut self, from: u64, dtype: DType) -> Tensor {
        let base = self
            .scratch
            .expect("a kernel should say that it has scratch");
        let pointer = self.b.offset(base, from, Kind::I8);
        Tensor { pointer, dtype }
    }

    /// Shared memory for `n` numbers of the block's threads, at a multiple of 16 bytes after the
    /// memory taken before.
    pub(super) fn shared(&mut self, n: u64, dtype: DType) -> Tensor {
        let from = self.shared_bytes;
        self.shared_bytes += (n * dtype.bytes()).next_multiple_of(16);
        let base = self.b.shared();
        let pointer = self.b.offset(base, from, Kind::I8);
        Tensor { pointer, dtype }
    }

    /// All shared memory of the block, for tiles: more than a kernel can have by itself.
    pub(super) fn tiles(&mut self, bytes: u64) -> Value {
        (self.shared_bytes, self.dynamic) = (bytes, true);
        self.b.shared()
    }

    /// Bytes of shared memory that a launch gives.
    pub(super) fn dynamic_bytes(&self) -> u64 {
        if self.dynamic { self.shared_bytes } else { 0 }
    }

    // --- control ---

    /// A loop over the parts of `n` that a block computes.
    pub(super) fn parts(&mut self, n: u64, body: impl FnOnce(&mut Grid, Value)) {
        let bounds = [self.block, self.b.long(n), self.blocks];
        self.repeat(bounds, &[], |g, part, _| {
            body(g, part);
            vec![]
        });
    }

    /// A loop over the elements of `n` that a thread computes. Each part has [`THREADS`] elements.
    pub(super) fn elements(&mut self, n: u64, body: impl FnOnce(&mut Grid, Value)) {
        let threads = u64::from(self.threads);
        self.parts(n.div_ceil(threads), |g, part| {
            let first = g.times(part, threads);
            let i = g.b.addi(first, g.thread);
            let end = g.b.long(n);
            let inside = g.less(i, end);
            g.when(inside, |g| body(g, i));
        });
    }

    /// A loop over `0..n`; see [`Emit::repeat`].
    pub(super) fn count(
        &mut self,
        n: u64,
        starts: &[Value],
        body: impl FnOnce(&mut Grid, Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let bounds = [0, n, 1].map(|i| self.b.long(i));
        self.repeat(bounds, starts, body)
    }

    /// A loop over this thread's numbers of `0..n` in the block.
    pub(super) fn share(
        &mut self,
        n: u64,
        starts: &[Value],
        body: impl FnOnce(&mut Grid, Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let [end, step] = [n, self.threads.into()].map(|i| self.b.long(i));
        self.repeat([self.thread, end, step], starts, body)
    }

    /// Runs `then` in the first thread of the block.
    pub(super) fn once(&mut self, then: impl FnOnce(&mut Grid)) {
        let zero = self.b.long(0);
        let first = self.equal(self.thread, zero);
        self.when(first, then);
    }

    /// Combines the numbers of the block's threads, by halves, to `left` numbers: each combines the
    /// numbers of threads with the same remainder modulo `left`. Every thread gets its combined
    /// number. `room` is memory for a number of each thread; the number of threads and `left` are
    /// powers of two.
    pub(super) fn fold(
        &mut self,
        x: Value,
        room: Tensor,
        left: u64,
        combine: impl Fn(&mut Grid, Value, Value) -> Value,
    ) -> Value {
        self.put(room, self.thread, x);
        let mut half = u64::from(self.threads) / 2;
        while half >= left {
            self.b.barrier();
            let end = self.b.long(half);
            let lower = self.less(self.thread, end);
            self.when(lower, |g| {
                let other = g.plus(g.thread, half as i64);
                let [a, b] = [g.thread, other].map(|at| g.get(room, at));
                let x = combine(g, a, b);
                g.put(room, g.thread, x);
            });
            half /= 2;
        }
        self.b.barrier();
        let [_, own] = self.divided(self.thread, left);
        let x = self.get(room, own);
        // The room may be written again only when all threads have read it.
        self.b.barrier();
        x
    }

    /// [`Grid::fold`] of sums.
    pub(super) fn total(&mut self, x: Value, room: Tensor) -> Value {
        self.fold(x, room, 1, |g, a, b| g.add(a, b))
    }

    // --- numbers ---

    pub(super) fn add(&mut self, a: Value, b: Value) -> Value {
        let op = by_kind(a, Arith::Addf, Arith::Addi);
        self.b.arith(op, &[a, b])
    }

    pub(super) fn sub(&mut self, a: Value, b: Value) -> Value {
        let op = by_kind(a, Arith::Subf, Arith::Subi);
        self.b.arith(op, &[a, b])
    }

    pub(super) fn mul(&mut self, a: Value, b: Value) -> Value {
        let op = by_kind(a, Arith::Mulf, Arith::Muli);
        self.b.arith(op, &[a, b])
    }

    /// Compares signed integers.
    pub(super) fn less(&mut self, a: Value, b: Value) -> Value {
        let by = by_kind(a, Predicate::Olt, Predicate::Slt);
        self.b.compare(by, a, b)
    }

    pub(super) fn equal(&mut self, a: Value, b: Value) -> Value {
        let by = by_kind(a, Predicate::Oeq, Predicate::Eq);
        self.b.compare(by, a, b)
    }

    /// A bit that is true if `x` is one of `0..n`.
    pub(super) fn below(&mut self, x: Value, n: u64) -> Value {
        let n = self.b.long(n);
        self.b.compare(Predicate::Ult, x, n)
    }

    /// An integer times a known number.
    pub(super) fn times(&mut self, x: Value, n: u64) -> Value {
        if n == 1 {
            return x;
        }
        let n = self.b.long(n);
        self.b.muli(x, n)
    }

    /// An integer plus a known number.
    pub(super) fn plus(&mut self, x: Value, n: i64) -> Value {
        if n == 0 {
            return x;
        }
        let n = self.b.long(n as u64);
        self.b.addi(x, n)
    }

    /// The quotient of an integer and a known number, and the remainder.
    pub(super) fn divided(&mut self, x: Value, n: u64) -> [Value; 2] {
        if n <= 1 {
            return [x, self.b.long(0)];
        }
        let by = self.b.long(n);
        [self.b.divui(x, by), self.b.remui(x, by)]
    }

    /// The coordinates of element `i` of a tensor.
    pub(super) fn coordinates(&mut self, i: Value, sizes: &[u64]) -> Vec<Value> {
        let mut rest = i;
        let mut found = vec![];
        for (d, &size) in sizes.iter().enumerate().rev() {
            if d == 0 {
                found.push(rest);
            } else {
                let [above, at] = self.divided(rest, size);
                found.push(at);
                rest = above;
            }
        }
        found.reverse();
        found
    }

    /// The sum of coordinates times strides.
    pub(super) fn offset(&mut self, coordinates: &[Value], strides: &[i64], start: i64) -> Value {
        let mut sum = self.b.long(start as u64);
        for (&at, &stride) in coordinates.iter().zip(strides) {
            if stride != 0 {
                let step = self.times(at, stride as u64);
                sum = self.b.addi(sum, step);
            }
        }
        sum
    }

    /// A floating-point number of a kind.
    pub(super) fn float(&mut self, x: f64, kind: Kind) -> Value {
        let bits = match kind {
            Kind::F32 => (x as f32).to_bits().into(),
            _ => x.to_bits(),
        };
        self.b.constant(bits, Type::Scalar(kind))
    }

    /// An attribute's number as a kind in which kernels compute.
    pub(super) fn number(&mut self, x: Number, kind: Kind) -> Value {
        match x {
            Number::Int(i) if kind == Kind::I64 => self.b.long(i as u64),
            _ if kind == Kind::I64 => self.b.long(x.to_f64() as i64 as u64),
            _ => self.float(x.to_f64(), kind),
        }
    }

    /// An attribute's number as an element of a type, in the kind in which kernels compute it.
    pub(super) fn value(&mut self, x: Number, dtype: DType) -> Value {
        match dtype {
            DType::Bool => self.b.long((x.to_f64() != 0.0).into()),
            _ => self.number(x, wide(dtype)),
        }
    }

    /// A wide number as f64.
    pub(super) fn double(&mut self, x: Value) -> Value {
        match x.ty().kind() {
            Some(Kind::F64) => x,
            Some(Kind::F32) => self.b.convert(Convert::Extf, x, Kind::F64),
            _ => self.b.convert(Convert::Sitofp, x, Kind::F64),
        }
    }

    /// An f64 in the floating-point kind in which kernels compute a type.
    pub(super) fn rounded(&mut self, x: Value, dtype: DType) -> Value {
        match wide(dtype) {
            Kind::F32 => self.b.convert(Convert::Truncf, x, Kind::F32),
            _ => x,
        }
    }

    // --- memory ---

    /// The element at a place, in the kind in which kernels compute its type.
    pub(super) fn get(&mut self, of: Tensor, at: Value) -> Value {
        let kind = kind_of(of.dtype);
        let pointer = self.b.offset(of.pointer, at, kind);
        let x = self.b.load(pointer, Type::Scalar(kind), kind.bytes());
        self.widened(x, of.dtype)
    }

    /// Writes an element, given in the kind in which kernels compute its type.
    pub(super) fn put(&mut self, of: Tensor, at: Value, x: Value) {
        let kind = kind_of(of.dtype);
        let x = self.narrowed(x, of.dtype);
        let pointer = self.b.offset(of.pointer, at, kind);
        self.b.store(x, pointer, kind.bytes());
    }

    /// The bits of a tensor at a place: of one element, or of several elements together.
    pub(super) fn bits(&mut self, of: Tensor, at: Value, unit: Unit) -> Value {
        let pointer = self.b.offset_by(of.pointer, at.into(), unit.ty());
        self.b.load(pointer, unit.ty(), unit.0)
    }

    /// Writes such bits.
    pub(super) fn put_bits(&mut self, of: Tensor, at: Value, x: Value, unit: Unit) {
        let pointer = self.b.offset_by(of.pointer, at.into(), unit.ty());
        self.b.store(x, pointer, unit.0);
    }

    /// An element of memory as a number.
    pub(super) fn widened(&mut self, x: Value, dtype: DType) -> Value {
        let b = &mut self.b;
        match dtype {
            DType::Bool => {
                let zero = b.constant(0, x.ty());
                let bit = b.compare(Predicate::Ne, x, zero);
                b.convert(Convert::Extui, bit, Kind::I64)
            }
            DType::U8 => b.convert(Convert::Extui, x, Kind::I64),
            DType::I8 | DType::I16 | DType::I32 => b.convert(Convert::Extsi, x, Kind::I64),
            DType::F16 => b.convert(Convert::Extf, x, Kind::F32),
            DType::BF16 => {
                let wide = b.convert(Convert::Extui, x, Kind::I32);
                let places = b.int(16);
                let bits = b.arith(Arith::Shli, &[wide, places]);
                b.convert(Convert::Bitcast, bits, Kind::F32)
            }
            _ => x,
        }
    }

    /// A number as it is read after it was written as an element of a type.
    pub(super) fn stored(&mut self, x: Value, dtype: DType) -> Value {
        let x = self.narrowed(x, dtype);
        self.widened(x, dtype)
    }

    /// A number as an element of memory.
    pub(super) fn narrowed(&mut self, x: Value, dtype: DType) -> Value {
        let b = &mut self.b;
        match dtype {
            DType::Bool => {
                let zero = b.constant(0, x.ty());
                let by = by_kind(x, Predicate::Une, Predicate::Ne);
                let bit = b.compare(by, x, zero);
                b.convert(Convert::Extui, bit, Kind::I8)
            }
            DType::U8 | DType::I8 => b.convert(Convert::Trunci, x, Kind::I8),
            DType::I16 => b.convert(Convert::Trunci, x, Kind::I16),
            DType::I32 => b.convert(Convert::Trunci, x, Kind::I32),
            DType::F16 => b.convert(Convert::Truncf, x, Kind::F16),
            DType::BF16 => rounded_bf16(b, x),
            _ => x,
        }
    }
}

/// The bits of the bf16 nearest to an f32, the even one if two are equally near; NaN stays.
fn rounded_bf16(b: &mut Builder, x: Value) -> Value {
    let bits = b.convert(Convert::Bitcast, x, Kind::I32);
    let [places, one, below, quiet] = [16, 1, 0x7fff, 0x40].map(|i| b.int(i));
    let high = b.shrui(bits, places);
    let odd = b.andi(high, one);
    let round = b.addi(odd, below);
    let round = b.addi(bits, round);
    let round = b.shrui(round, places);
    let nan = b.ori(high, quiet);
    let is_nan = b.compare(Predicate::Uno, x, x);
    let chosen = b.select(is_nan, nan, round);
    b.convert(Convert::Trunci, chosen, Kind::I16)
}

/// Bytes that are moved at once: 1, 2, 4, 8 or 16.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Unit(pub(super) u64);

impl Unit {
    /// The largest unit that divides these numbers of bytes.
    pub(super) fn dividing(bytes: impl IntoIterator<Item = u64>) -> Unit {
        let all = bytes.into_iter().fold(16, |all, n| all | n);
        Unit(1 << all.trailing_zeros().min(4))
    }

    /// A type of this size.
    pub(super) fn ty(self) -> Type {
        match self.0 {
            1 => Type::Scalar(Kind::I8),
            2 => Type::Scalar(Kind::I16),
            4 => Type::Scalar(Kind::I32),
            8 => Type::Scalar(Kind::I64),
            _ => Type::Vector(4, Kind::I32),
        }
    }
}

/// The kind of an element in memory.
pub(super) fn kind_of(dtype: DType) -> Kind {
    storage(dtype).unwrap_or(Kind::I8)
}

/// The choice for floating-point numbers, or the one for integers.
fn by_kind<T>(x: Value, float: T, integer: T) -> T {
    match x.ty().kind().is_some_and(Kind::is_float) {
        true => float,
        false => integer,
    }
}
