//! Shared parts of attention's kernels. Tiles are in shared memory. `cp.async` copies them from
//! global memory, and `ldmatrix` and `mma.sync` use them on tensor cores.
//!
//! A tile has rows of D numbers of bf16. The 16-byte chunk `c` of row `r` is at chunk `c ^ (r % 8)`
//! of the row. Then the eight rows of a matrix that `ldmatrix` reads are in different banks,
//! without padding (CUTLASS's 128-byte swizzle).

use super::{Argument, LOG2_E, Sizes, Tensor};
use crate::mlir::{
    self, Arith, Body, Builder, Cache, Emit, Function, Kind, Layout, Parameter, Predicate, Shared,
    Space, Special, Step, Type, Value,
};
use ir::op::attention::{Attending, Layout as Place};

/// Threads of a block: four warps, each with 16 rows of a tile of 64.
pub(super) const THREADS: u32 = 128;
/// Rows of the tile that a block keeps.
pub(super) const ROWS: u32 = 64;
/// Blocks that a multiprocessor should hold at once. With two, each thread has all of its 255
/// registers. Without this limit ptxas uses 128 registers and spills.
const BLOCKS: u32 = 2;

/// A thread's four numbers of a result of 16 × 8, or four registers of a factor of 16 × 16.
pub(super) type Quad = [Value; 4];

/// A tensor that kernels read or write.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub(super) tensor: Tensor,
    pub(super) is_result: bool,
}

/// Emits one kernel.
pub(super) struct Emitter {
    pub(super) b: Builder,
    /// Numbers in a row of a tile.
    pub(super) d: u32,
    tensors: Vec<(Tensor, Value)>,
    /// Where tensors lie, if heads are inside rows.
    places: Option<Attending>,
    /// Bytes from one query's delta to the next.
    pub(super) delta_bytes: u32,
    /// Heads of q over the batch, and how many of them share a head of k and v.
    pub(super) n_heads: Value,
    pub(super) group: Value,
    pub(super) n_queries: Value,
    pub(super) n_keys: Value,
    pub(super) scale: Value,
}

/// The positions of a thread in a kernel with tiles.
pub(super) struct Start {
    pub(super) thread: Value,
    pub(super) warp: Value,
    pub(super) lane: Value,
    /// A lane's group of four, and its place in it: rows and columns of results.
    pub(super) group: Value,
    pub(super) place: Value,
    /// Shared memory.
    pub(super) tiles: Value,
}

/// A matrix in global memory whose rows are copied to tiles, or written from them.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    /// Its first row.
    pub(super) at: Value,
    /// How many rows it has.
    pub(super) rows: Value,
    /// Bytes from one row to the next.
    pitch: u32,
}

/// How the lanes of a warp address 16 × 16 numbers for `ldmatrix.x4`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Lanes {
    /// Lane `l` has row `l % 16` and half `l / 16`: for the left factor; transposed, for a right
    /// factor whose rows are summed over.
    A,
    /// Lane `l` has row `l % 8 + 8 (l / 16)` and half `l / 8 % 2`: for a right factor whose columns
    /// are summed over.
    B,
}

/// Addresses of a tile for `ldmatrix`, one for each 16 numbers of a row.
pub(super) struct Fragments {
    addresses: Vec<Value>,
}

/// A thread's part in filling tiles.
pub(super) struct Filler {
    /// Its first row in the tile.
    row: Value,
    /// Its chunk's place in the tile, 64 bits.
    place: Value,
    /// Its chunk's place in a row, in bytes, 32 bits.
    chunk: Value,
    /// Rows that all threads fill at once: a multiple of 8, so that a thread's chunk has the same
    /// place in all of its rows.
    step: u32,
}

impl Emit for Emitter {
    fn builder(&mut self) -> &mut Builder {
        &mut self.b
    }
}

impl Emitter {
    /// Begins a kernel for heads of `d` numbers. Sizes that are not known are arguments behind the
    /// addresses.
    pub(super) fn new(
        symbol: &str,
        arguments: &[Operand],
        d: u32,
        sizes: Option<&Sizes>,
    ) -> Emitter {
        let address = |argument: &Operand| Parameter {
            align: Some(64),
            noalias: true,
            readonly: !argument.is_result,
            ..Parameter::new(argument.tensor.name(), Type::Pointer(Space::Global))
        };
        let mut parameters: Vec<Parameter> = arguments.iter().map(address).collect();
        if sizes.is_none() {
            for name in ["n_heads", "group", "n_queries", "n_keys"] {
                parameters.push(Parameter::new(name, Type::Scalar(Kind::I32)));
            }
            parameters.push(Parameter::new("scale", Type::Scalar(Kind::F32)));
        }
        let body = Body::Gpu {
            threads: THREADS,
            blocks: BLOCKS,
        };
        let (mut b, values) = Builder::new(symbol, parameters, body);
        b.set_shared(Shared {
            symbol: match sizes {
                Some(_) => format!("{symbol}_tiles"),
                None => "tiles".into(),
            },
            bytes: 0,
            align: 1024,
            dynamic: true,
        });
        let n = arguments.len();
        let [n_heads, group, n_queries, n_keys, scale] = match sizes {
            Some(sizes) => sizes.arguments().map(|argument| match argument {
                Argument::U32(n) => b.int(n.into()),
                Argument::F32(x) => b.float(x),
            }),
            None => std::array::from_fn(|i| values[n + i]),
        };
        let tensors = arguments.iter().map(|argument| argument.tensor);
        Emitter {
            b,
            d,
            tensors: tensors.zip(values.iter().copied()).collect(),
            places: None,
            delta_bytes: 4,
            n_heads,
            group,
            n_queries,
            n_keys,
            scale,
        }
    }

    /// Heads are inside rows. If the gradients are one result, it is the argument dq.
    pub(super) fn place(&mut self, it: &Attending) {
        self.places = Some(*it);
        if it.is_joint && self.tensors.iter().any(|(of, _)| *of == Tensor::Dq) {
            let dq = self.tensor(Tensor::Dq);
            self.tensors.extend([(Tensor::Dk, dq), (Tensor::Dv, dq)]);
        }
    }

    /// Each query's delta lies where its row of dq begins, which is written when it has been read.
    pub(super) fn keep_delta_in_dq(&mut self) {
        let dq = self.tensor(Tensor::Dq);
        self.tensors.push((Tensor::Delta, dq));
        self.delta_bytes = match self.place_of(Tensor::Dq) {
            Some((place, _)) => 2 * place.row as u32,
            None => self.pitch(),
        };
    }

    /// The kernel, complete.
    pub(super) fn finish(self) -> Result<Function, mlir::Error> {
        self.b.finish()
    }

    /// The address of a tensor.
    pub(super) fn tensor(&self, tensor: Tensor) -> Value {
        let found = self.tensors.iter().find(|(of, _)| *of == tensor);
        found.expect("a kernel should have its tensors").1
    }

    /// True if heads are inside rows.
    pub(super) fn has_places(&self) -> bool {
        self.places.is_some()
    }

    /// Where a tensor lies, and the heads of a sequence; none if heads contain rows.
    fn place_of(&self, tensor: Tensor) -> Option<(Place, u64)> {
        let it = self.places.as_ref()?;
        let [q, kv] = [it.sizes.heads, it.sizes.groups];
        let (place, heads) = match tensor {
            Tensor::Q => (it.qkv[0], q),
            Tensor::K => (it.qkv[1], kv),
            Tensor::V => (it.qkv[2], kv),
            Tensor::Out | Tensor::Dout => (it.out, q),
            // Delta lies in dq.
            Tensor::Dq | Tensor::Delta => (it.gradients[0], q),
            Tensor::Dk => (it.gradients[1], kv),
            Tensor::Dv => (it.gradients[2], kv),
            Tensor::Lse | Tensor::Key => return None,
        };
        Some((place, heads))
    }

    /// Bytes of a row.
    pub(super) fn pitch(&self) -> u32 {
        2 * self.d
    }

    /// Steps of 16 numbers over a row.
    pub(super) fn steps(&self) -> u32 {
        self.d / 16
    }

    // --- numbers ---

    /// An integer operation with a known number.
    #[track_caller]
    pub(super) fn with(&mut self, op: Arith, a: Value, b: impl Into<i64>) -> Value {
        let b = self.b.int(b.into());
        self.b.arith(op, &[a, b])
    }

    /// The quotient and the rest of a division by a number that is not constant. Computing the rest
    /// separately would cost as much as the division.
    pub(super) fn divide(&mut self, a: Value, b: Value) -> (Value, Value) {
        let quotient = self.b.divui(a, b);
        let product = self.b.muli(quotient, b);
        let rest = self.b.subi(a, product);
        (quotient, rest)
    }

    /// a / b, rounded up.
    pub(super) fn blocks(&mut self, a: Value, b: u32) -> Value {
        let sum = self.with(Arith::Addi, a, b - 1);
        self.with(Arith::Divui, sum, b)
    }

    /// The factor that turns a score into an exponent of two.
    pub(super) fn exponents(&mut self) -> Value {
        let log2_e = self.b.float(LOG2_E);
        self.b.mulf(self.scale, log2_e)
    }

    // --- addresses ---

    /// An address plus a number of bytes.
    #[track_caller]
    pub(super) fn advance(&mut self, pointer: Value, bytes: impl Into<Step>) -> Value {
        self.b.offset(pointer, bytes, Kind::I8)
    }

    /// The address of row `row` of rows of `bytes` bytes.
    pub(super) fn row(&mut self, pointer: Value, row: Value, bytes: u32) -> Value {
        let row = self.b.wide(row);
        let bytes = self.b.long(bytes.into());
        let offset = self.b.muli(row, bytes);
        self.advance(pointer, offset)
    }

    /// Head `i` of a tensor with `rows` rows; `bytes` is the distance between rows of a tensor in
    /// which heads contain rows.
    fn matrix(&mut self, tensor: Tensor, i: Value, rows: Value, bytes: u32) -> Matrix {
        let pointer = self.tensor(tensor);
        let Some((place, heads)) = self.place_of(tensor) else {
            let (i, n) = (self.b.wide(i), self.b.wide(rows));
            let at = self.b.muli(i, n);
            let long = self.b.long(bytes.into());
            let offset = self.b.muli(at, long);
            return Matrix {
                at: self.advance(pointer, offset),
                rows,
                pitch: bytes,
            };
        };
        let sequence = self.with(Arith::Divui, i, heads as u32);
        let head = self.with(Arith::Remui, i, heads as u32);
        let mut at = self.advance(pointer, (2 * place.first) as u32);
        for (i, step) in [(sequence, place.batch), (head, place.head)] {
            let (i, bytes) = (self.b.wide(i), self.b.long(2 * step));
            let offset = self.b.muli(i, bytes);
            at = self.advance(at, offset);
        }
        Matrix {
            at,
            rows,
            pitch: 2 * place.row as u32,
        }
    }

    /// A head's matrix of a tensor with a row for each query.
    pub(super) fn of_queries(&mut self, tensor: Tensor, head: Value) -> Matrix {
        self.matrix(tensor, head, self.n_queries, self.pitch())
    }

    /// A head's matrix of a tensor with a row for each key.
    pub(super) fn of_keys(&mut self, tensor: Tensor, head: Value) -> Matrix {
        self.matrix(tensor, head, self.n_keys, self.pitch())
    }

    /// The address of a query's row, or of its number; queries are counted over all heads.
    pub(super) fn of_query(&mut self, tensor: Tensor, query: Value, bytes: u32) -> Value {
        if self.place_of(tensor).is_none() {
            let pointer = self.tensor(tensor);
            return self.row(pointer, query, bytes);
        }
        let (head, row) = self.divide(query, self.n_queries);
        let matrix = self.matrix(tensor, head, self.n_queries, bytes);
        self.row(matrix.at, row, matrix.pitch)
    }

    /// Bytes from one query's number to the next, of the logsumexp or of delta.
    pub(super) fn number_bytes(&self, tensor: Tensor) -> u32 {
        if tensor == Tensor::Delta {
            self.delta_bytes
        } else {
            4
        }
    }

    /// A head's f32 for each query.
    pub(super) fn numbers(&mut self, tensor: Tensor, head: Value) -> Matrix {
        self.matrix(tensor, head, self.n_queries, self.number_bytes(tensor))
    }

    /// The offset of one of two tiles, 64 bits: the first for even rounds, the second for odd
    /// rounds.
    pub(super) fn turn(&mut self, round: Value, bytes: u32) -> Value {
        let odd = self.with(Arith::Andi, round, 1);
        let offset = self.with(Arith::Muli, odd, bytes);
        self.b.wide(offset)
    }

    // --- loops ---

    /// A loop from 0 to `n`.
    pub(super) fn rounds(
        &mut self,
        n: Value,
        starts: &[Value],
        body: impl FnOnce(&mut Emitter, Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let (zero, one) = (self.b.int(0), self.b.int(1));
        self.repeat([zero, n, one], starts, body)
    }

    // --- threads ---

    /// The start of kernels with tiles.
    pub(super) fn start(&mut self) -> Start {
        let thread = self.b.special(Special::Thread);
        let warp = self.with(Arith::Divui, thread, 32);
        let lane = self.with(Arith::Remui, thread, 32);
        let group = self.with(Arith::Divui, lane, 4);
        let place = self.with(Arith::Remui, lane, 4);
        Start {
            thread,
            warp,
            lane,
            group,
            place,
            tiles: self.b.shared(),
        }
    }

    /// The number of a thread's first row among all rows. Its second row is 8 rows later. A warp
    /// has 16 rows.
    pub(super) fn own_row(&mut self, s: &Start, first: Value) -> Value {
        let start = self.with(Arith::Muli, s.warp, 16);
        let row = self.b.addi(start, s.group);
        self.b.addi(first, row)
    }

    /// The offset of the warp's 16 rows in a tile, in bytes, 64 bits.
    pub(super) fn own_tile_rows(&mut self, s: &Start) -> Value {
        let bytes = self.with(Arith::Muli, s.warp, 16 * self.pitch());
        self.b.wide(bytes)
    }

    /// The offset of two f32 for a thread's columns among those of 8 columns, in bytes, 64 bits.
    pub(super) fn own_pair(&mut self, s: &Start) -> Value {
        let bytes = self.with(Arith::Shli, s.place, 3);
        self.b.wide(bytes)
    }

    /// Combines the numbers of lanes whose numbers differ in the bits `distances`.
    pub(super) fn over_lanes(&mut self, op: Arith, mut x: Value, distances: &[i64]) -> Value {
        let (all, clamp) = (self.b.int(-1), self.b.int(31));
        for &distance in distances {
            let distance = self.b.int(distance);
            let other = self.b.butterfly(all, x, distance, clamp);
            x = self.b.arith(op, &[x, other]);
        }
        x
    }

    // --- tiles ---

    /// The place of a thread's chunk in a tile that all threads fill, and its source.
    pub(super) fn filler(&mut self, thread: Value) -> Filler {
        let chunks = self.d / 8;
        let row = self.with(Arith::Divui, thread, chunks);
        let chunk = self.with(Arith::Remui, thread, chunks);
        let place = self.swizzled(row, chunk);
        let place = self.b.wide(place);
        Filler {
            row,
            place,
            chunk: self.with(Arith::Shli, chunk, 4),
            step: THREADS / chunks,
        }
    }

    /// The offset of a chunk of a row.
    fn swizzled(&mut self, row: Value, chunk: Value) -> Value {
        let low = self.with(Arith::Andi, row, 7);
        let moved = self.b.xori(chunk, low);
        let moved = self.with(Arith::Shli, moved, 4);
        let start = self.with(Arith::Muli, row, self.pitch());
        self.b.addi(start, moved)
    }

    /// Starts to fill a tile of `rows` rows with the rows of a matrix from `first` on. Rows after
    /// its last are zeros.
    pub(super) fn fill(
        &mut self,
        filler: &Filler,
        tile: Value,
        rows: u32,
        matrix: Matrix,
        first: Value,
    ) {
        let at = self.row(matrix.at, first, matrix.pitch);
        let start = self.with(Arith::Muli, filler.row, matrix.pitch);
        let start = self.b.addi(start, filler.chunk);
        let start = self.b.wide(start);
        let from = self.advance(at, start);
        let to = self.advance(tile, filler.place);
        let left = self.b.subi(matrix.rows, first);
        let (all, none) = (self.b.int(16), self.b.int(0));
        for i in 0..rows / filler.step {
            let row = self.with(Arith::Addi, filler.row, i * filler.step);
            let inside = self.b.compare(Predicate::Slt, row, left);
            let bytes = self.b.select(inside, all, none);
            let row = i * filler.step;
            let to = self.advance(to, row * self.pitch());
            let from = self.advance(from, row * matrix.pitch);
            self.b.copy_async(to, from, 16, bytes, Cache::Second);
        }
    }

    /// Waits until every copy of every thread has arrived.
    pub(super) fn arrive(&mut self) {
        self.b.wait_all();
        self.b.barrier();
    }

    /// Addresses in a tile, as the lanes of a warp use them.
    pub(super) fn fragments(&mut self, tile: Value, lane: Value, lanes: Lanes) -> Fragments {
        let (row, half) = match lanes {
            Lanes::A => (
                self.with(Arith::Remui, lane, 16),
                self.with(Arith::Divui, lane, 16),
            ),
            Lanes::B => {
                let low = self.with(Arith::Remui, lane, 8);
                let high = self.with(Arith::Divui, lane, 16);
                let high = self.with(Arith::Shli, high, 3);
                let half = self.with(Arith::Divui, lane, 8);
                (self.b.addi(low, high), self.with(Arith::Remui, half, 2))
            }
        };
        let first = self.swizzled(row, half);
        // A step of 16 numbers is two chunks, and flips the same bits in every row.
        let addresses = (0..self.steps()).map(|step| {
            let offset = self.with(Arith::Xori, first, step << 5);
            let offset = self.b.wide(offset);
            self.advance(tile, offset)
        });
        Fragments {
            addresses: addresses.collect(),
        }
    }

    /// The four 8 × 8 matrices of 16 rows from `row` on and 16 numbers of each; `offset` (64 bits)
    /// is added to the tile.
    pub(super) fn load(
        &mut self,
        of: &Fragments,
        offset: Value,
        row: u32,
        step: u32,
        layout: Layout,
    ) -> Quad {
        let at = self.advance(of.addresses[step as usize], offset);
        let at = self.advance(at, row * self.pitch());
        self.b.load_matrices(at, layout)
    }

    // --- products ---

    /// a·bᵀ: `a` gives a step's left factor, `b` has `rows` rows, the columns of the result.
    pub(super) fn times_transposed(
        &mut self,
        mut a: impl FnMut(&mut Emitter, u32) -> Quad,
        b: &Fragments,
        offset: Value,
        rows: u32,
    ) -> Vec<Quad> {
        let zero = self.b.float(0.0);
        let mut c = vec![[zero; 4]; rows as usize / 8];
        for step in 0..self.steps() {
            let a = a(self, step);
            for pair in 0..rows / 16 {
                let b = self.load(b, offset, 16 * pair, step, Layout::Rows);
                self.add_product(a, b, &mut c[2 * pair as usize..]);
            }
        }
        c
    }

    /// c + a·b: `a` are 16 rows of a result of [`Emitter::times_transposed`], packed, `b` has their
    /// columns as rows.
    pub(super) fn times(&mut self, a: &[Quad], b: &Fragments, offset: Value, c: &mut [Quad]) {
        for (k, a) in a.iter().enumerate() {
            for step in 0..self.steps() {
                let b = self.load(b, offset, 16 * k as u32, step, Layout::Columns);
                self.add_product(*a, b, &mut c[2 * step as usize..]);
            }
        }
    }

    /// Adds the product of 16 × 16 and 16 × 16 numbers to the first two of `c`.
    fn add_product(&mut self, a: Quad, b: Quad, c: &mut [Quad]) {
        c[0] = self.b.multiply(a, [b[0], b[1]], c[0]);
        c[1] = self.b.multiply(a, [b[2], b[3]], c[1]);
    }

    /// A result of products as left factors, which have the same layout.
    pub(super) fn packed(&mut self, c: &[Quad]) -> Vec<Quad> {
        let pairs = c.chunks(2).map(|two| {
            let [first, second] = [two[0], two[1]];
            [
                self.b.pair(first[0], first[1]),
                self.b.pair(first[2], first[3]),
                self.b.pair(second[0], second[1]),
                self.b.pair(second[2], second[3]),
            ]
        });
        pairs.collect()
    }

    /// Every number times another.
    pub(super) fn scaled(&mut self, c: &[Quad], by: Value) -> Vec<Quad> {
        let scaled = c.iter().map(|quad| quad.map(|x| self.b.mulf(x, by)));
        scaled.collect()
    }

    /// Zeros for a warp's 16 rows of D numbers.
    pub(super) fn zeros(&mut self) -> Vec<Quad> {
        let zero = self.b.float(0.0);
        vec![[zero; 4]; self.d as usize / 8]
    }

    // --- results ---

    /// Writes a warp's 16 rows of a result to rows of a matrix from `first` on, 16 bytes at a time,
    /// through rows of a tile that only this warp reads. There should be a barrier after those
    /// reads.
    pub(super) fn write(&mut self, s: &Start, c: &[Quad], tile: Value, to: Matrix, first: Value) {
        let start = self.with(Arith::Muli, s.warp, 16);
        self.write_tile(s, c, tile, start);
        self.b.warp_barrier();
        let chunks = self.d / 8;
        let upper = self.with(Arith::Divui, s.lane, chunks);
        let chunk = self.with(Arith::Remui, s.lane, chunks);
        let offset = self.with(Arith::Shli, chunk, 4);
        let offset = self.b.wide(offset);
        let numbers = Type::Vector(4, Kind::I32);
        for i in 0..16 * chunks / 32 {
            let row = self.b.addi(start, upper);
            let row = self.with(Arith::Addi, row, i * 32 / chunks);
            let at = self.swizzled(row, chunk);
            let at = self.b.wide(at);
            let from = self.advance(tile, at);
            let row = self.b.addi(first, row);
            let inside = self.b.compare(Predicate::Slt, row, to.rows);
            self.when(inside, |e| {
                let numbers = e.b.load(from, numbers, 16);
                let at = e.row(to.at, row, to.pitch);
                let to = e.advance(at, offset);
                e.b.store(numbers, to, 16);
            });
        }
    }

    /// Writes a warp's 16 rows of a result to its rows of a tile.
    fn write_tile(&mut self, s: &Start, c: &[Quad], tile: Value, start: Value) {
        let byte = self.with(Arith::Shli, s.place, 2);
        for lower in [0, 8] {
            let row = self.b.addi(start, s.group);
            let row = self.with(Arith::Addi, row, lower);
            for (chunk, numbers) in c.iter().enumerate() {
                let chunk = self.b.int(chunk as i64);
                let at = self.swizzled(row, chunk);
                let at = self.b.addi(at, byte);
                let at = self.b.wide(at);
                let to = self.advance(tile, at);
                let pair = if lower == 0 {
                    self.b.pair(numbers[0], numbers[1])
                } else {
                    self.b.pair(numbers[2], numbers[3])
                };
                self.b.store(pair, to, 4);
            }
        }
    }
}

/// Numbers in fours.
pub(super) fn quads(values: &[Value]) -> Vec<Quad> {
    values.as_chunks::<4>().0.to_vec()
}
