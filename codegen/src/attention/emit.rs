//! MLIR text of attention's kernels: what they share. Tiles lie in shared memory, go through tensor
//! cores by `ldmatrix` and `mma.sync`, and come from global memory by `cp.async`.
//!
//! A tile has rows of D numbers of bf16. The 16-byte chunk `c` of row `r` lies at chunk `c ^ (r %
//! 8)` of the row: the eight rows of a matrix that `ldmatrix` reads then lie in different banks,
//! without padding (CUTLASS's 128-byte swizzle).

use std::fmt::{Display, Write};

/// Threads of a block: four warps, each with 16 rows of a tile of 64.
pub(super) const THREADS: u32 = 128;
/// Rows of the tile that stays.
pub(super) const ROWS: u32 = 64;

/// An SSA value's name.
pub(super) type V = String;

/// Writes instructions.
pub(super) struct Emitter {
    pub(super) text: String,
    n_values: usize,
    /// Numbers in a row of a tile.
    pub(super) d: u32,
}

/// A thread of a kernel with tiles.
pub(super) struct Start {
    pub(super) thread: V,
    pub(super) warp: V,
    pub(super) lane: V,
    /// A lane's group of four, and its place in it: rows and columns of results.
    pub(super) group: V,
    pub(super) place: V,
    /// Shared memory.
    pub(super) tiles: V,
}

/// How the lanes of a warp address 16 × 16 numbers for `ldmatrix.x4`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Lanes {
    /// Lane `l` has row `l % 16` and half `l / 16`: the left factor; transposed, the right factor
    /// whose rows are summed over.
    A,
    /// Lane `l` has row `l % 8 + 8 (l / 16)` and half `l / 8 % 2`: the right factor whose columns
    /// are summed over.
    B,
}

/// Addresses of a tile for `ldmatrix`, one for each 16 numbers of a row.
pub(super) struct Fragments {
    addresses: Vec<V>,
}

impl Emitter {
    pub(super) fn new(d: u32) -> Emitter {
        Emitter {
            text: String::new(),
            n_values: 0,
            d,
        }
    }
    /// Bytes of a row.
    pub(super) fn pitch(&self) -> u32 {
        2 * self.d
    }
    /// Steps of 16 numbers over a row.
    pub(super) fn steps(&self) -> u32 {
        self.d / 16
    }

    // --- text ---

    pub(super) fn line(&mut self, text: impl Display) {
        writeln!(self.text, "    {text}").expect("a string takes any text");
    }
    pub(super) fn fresh(&mut self) -> V {
        self.n_values += 1;
        format!("%v{}", self.n_values)
    }
    pub(super) fn def(&mut self, what: impl Display) -> V {
        let name = self.fresh();
        self.line(format_args!("{name} = {what}"));
        name
    }
    pub(super) fn int(&mut self, value: i64) -> V {
        self.def(format_args!("arith.constant {value} : i32"))
    }
    pub(super) fn float(&mut self, value: f32) -> V {
        self.def(format_args!(
            "arith.constant 0x{:08X} : f32",
            value.to_bits()
        ))
    }
    pub(super) fn i32(&mut self, op: &str, a: &str, b: &str) -> V {
        self.def(format_args!("arith.{op} {a}, {b} : i32"))
    }
    /// An integer operation with a number that is known.
    pub(super) fn i32c(&mut self, op: &str, a: &str, b: i64) -> V {
        let b = self.int(b);
        self.i32(op, a, &b)
    }
    pub(super) fn compare(&mut self, how: &str, a: &str, b: &str) -> V {
        self.def(format_args!("arith.cmpi {how}, {a}, {b} : i32"))
    }
    pub(super) fn select(&mut self, condition: &str, a: &str, b: &str, ty: &str) -> V {
        self.def(format_args!("arith.select {condition}, {a}, {b} : {ty}"))
    }
    pub(super) fn f32(&mut self, op: &str, a: &str, b: &str) -> V {
        self.def(format_args!("arith.{op} {a}, {b} : f32"))
    }
    pub(super) fn fma(&mut self, a: &str, b: &str, c: &str) -> V {
        self.def(format_args!("math.fma {a}, {b}, {c} : f32"))
    }
    pub(super) fn intrinsic(&mut self, name: &str, x: &str) -> V {
        self.def(format_args!(
            "llvm.call_intrinsic \"{name}\"({x}) : (f32) -> f32"
        ))
    }
    pub(super) fn ex2(&mut self, x: &str) -> V {
        self.intrinsic("llvm.nvvm.ex2.approx.ftz.f32", x)
    }
    /// The rest of a division by a number that is no constant is as much work as the division:
    /// both.
    pub(super) fn divide(&mut self, a: &str, b: &str) -> (V, V) {
        let quotient = self.i32("divui", a, b);
        let product = self.i32("muli", &quotient, b);
        let rest = self.i32("subi", a, &product);
        (quotient, rest)
    }
    /// a / b, rounded up.
    pub(super) fn blocks(&mut self, a: &str, b: u32) -> V {
        let sum = self.i32c("addi", a, i64::from(b) - 1);
        self.i32c("divui", &sum, i64::from(b))
    }
    /// The pointer `bytes` bytes behind another; `bytes` is 64 bits wide, or a number.
    pub(super) fn behind(&mut self, pointer: &str, bytes: &str, space: u32) -> V {
        let ty = if bytes.starts_with('%') { "i64" } else { "" };
        let operands = if ty.is_empty() {
            String::new()
        } else {
            format!(", {ty}")
        };
        let p = format!("!llvm.ptr<{space}>");
        self.def(format_args!(
            "llvm.getelementptr {pointer}[{bytes}] : ({p}{operands}) -> {p}, i8"
        ))
    }
    pub(super) fn wide(&mut self, x: &str) -> V {
        self.def(format_args!("arith.extui {x} : i32 to i64"))
    }
    /// The pointer to row `row` of rows of `bytes` bytes.
    pub(super) fn row(&mut self, pointer: &str, row: &str, bytes: u32, space: u32) -> V {
        let row = self.wide(row);
        let bytes = self.def(format_args!("arith.constant {bytes} : i64"));
        let offset = self.def(format_args!("arith.muli {row}, {bytes} : i64"));
        self.behind(pointer, &offset, space)
    }
    /// The pointer to matrix `i` of `rows` rows of `bytes` bytes.
    pub(super) fn matrix(&mut self, pointer: &str, i: &str, rows: &str, bytes: u32) -> V {
        let (i, rows) = (self.wide(i), self.wide(rows));
        let at = self.def(format_args!("arith.muli {i}, {rows} : i64"));
        let bytes = self.def(format_args!("arith.constant {bytes} : i64"));
        let offset = self.def(format_args!("arith.muli {at}, {bytes} : i64"));
        self.behind(pointer, &offset, 1)
    }
    /// Runs `then` where a condition holds; it writes instructions and gives the values of the
    /// whole, which are `others` elsewhere.
    pub(super) fn when(
        &mut self,
        condition: &str,
        others: &[V],
        then: impl FnOnce(&mut Emitter) -> Vec<V>,
    ) -> Vec<V> {
        let types = vec!["f32"; others.len()].join(", ");
        let name = self.fresh();
        match others.is_empty() {
            true => self.line(format_args!("scf.if {condition} {{")),
            false => self.line(format_args!(
                "{name}:{} = scf.if {condition} -> ({types}) {{",
                others.len()
            )),
        }
        let values = then(self);
        if others.is_empty() {
            self.line("}");
            return vec![];
        }
        self.line(format_args!("scf.yield {} : {types}", values.join(", ")));
        self.line("} else {");
        self.line(format_args!("scf.yield {} : {types}", others.join(", ")));
        self.line("}");
        (0..others.len()).map(|i| format!("{name}#{i}")).collect()
    }
    /// A loop from 0 to `n`; `body` gets the number of the round and the values that rounds hand
    /// on, and gives the next.
    pub(super) fn repeat(
        &mut self,
        n: &str,
        first: &[(V, &str)],
        body: impl FnOnce(&mut Emitter, &str, &[V]) -> Vec<V>,
    ) -> Vec<V> {
        let (zero, one, name, at) = (self.int(0), self.int(1), self.fresh(), self.fresh());
        let names: Vec<V> = first.iter().map(|_| self.fresh()).collect();
        let types: Vec<&str> = first.iter().map(|&(_, ty)| ty).collect();
        let types = types.join(", ");
        let pairs: Vec<String> = names
            .iter()
            .zip(first)
            .map(|(name, (value, _))| format!("{name} = {value}"))
            .collect();
        self.line(format_args!(
            "{name}:{} = scf.for {at} = {zero} to {n} step {one} iter_args({}) -> ({types}) : i32 \
             {{",
            first.len(),
            pairs.join(", ")
        ));
        let values = body(self, &at, &names);
        self.line(format_args!("scf.yield {} : {types}", values.join(", ")));
        self.line("}");
        (0..first.len()).map(|i| format!("{name}#{i}")).collect()
    }

    // --- threads ---

    /// What kernels with tiles begin with.
    pub(super) fn start(&mut self) -> Start {
        let thread = self.thread();
        let (warp, lane) = (
            self.i32c("divui", &thread, 32),
            self.i32c("remui", &thread, 32),
        );
        let (group, place) = (self.i32c("divui", &lane, 4), self.i32c("remui", &lane, 4));
        let tiles = self.def("llvm.mlir.addressof @tiles : !llvm.ptr<3>");
        Start {
            thread,
            warp,
            lane,
            group,
            place,
            tiles,
        }
    }
    pub(super) fn thread(&mut self) -> V {
        self.def("nvvm.read.ptx.sreg.tid.x : i32")
    }
    pub(super) fn block(&mut self) -> V {
        self.def("nvvm.read.ptx.sreg.ctaid.x : i32")
    }
    pub(super) fn barrier(&mut self) {
        self.line("nvvm.barrier0");
    }
    pub(super) fn warp_barrier(&mut self) {
        let all = self.int(-1);
        self.line(format_args!("nvvm.bar.warp.sync {all} : i32"));
    }
    /// Combines the numbers of lanes whose numbers differ in the bits `distances`.
    pub(super) fn over_lanes(&mut self, op: &str, x: &str, distances: &[i64]) -> V {
        let (all, clamp) = (self.int(-1), self.int(31));
        distances.iter().fold(x.to_string(), |x, &distance| {
            let distance = self.int(distance);
            let other = self.def(format_args!(
                "nvvm.shfl.sync bfly {all}, {x}, {distance}, {clamp} : f32 -> f32"
            ));
            self.f32(op, &x, &other)
        })
    }

    // --- tiles ---

    /// Where a thread's chunk lies in a tile that all threads fill, and where it comes from: its
    /// row, its place in the tile and its place in the rows, in bytes.
    pub(super) fn filler(&mut self, thread: &str) -> Filler {
        let chunks = i64::from(self.d / 8);
        let row = self.i32c("divui", thread, chunks);
        let chunk = self.i32c("remui", thread, chunks);
        let place = self.swizzled(&row, &chunk);
        let place = self.wide(&place);
        let start = self.i32c("muli", &row, i64::from(self.pitch()));
        let chunk = self.i32c("shli", &chunk, 4);
        let from = self.i32("addi", &start, &chunk);
        let from = self.wide(&from);
        Filler {
            row,
            place,
            from,
            step: THREADS / (self.d / 8),
        }
    }
    /// The offset of a chunk of a row.
    pub(super) fn swizzled(&mut self, row: &str, chunk: &str) -> V {
        let low = self.i32c("andi", row, 7);
        let moved = self.i32("xori", chunk, &low);
        let moved = self.i32c("shli", &moved, 4);
        let start = self.i32c("muli", row, i64::from(self.pitch()));
        self.i32("addi", &start, &moved)
    }
    /// Begins to fill a tile of `rows` rows with those from `first` on of a matrix that has
    /// `count`; zeros lie behind.
    pub(super) fn fill(
        &mut self,
        filler: &Filler,
        tile: &str,
        rows: u32,
        matrix: &str,
        first: &str,
        count: &str,
    ) {
        let at = self.row(matrix, first, self.pitch(), 1);
        let from = self.behind(&at, &filler.from, 1);
        let to = self.behind(tile, &filler.place, 3);
        let left = self.i32("subi", count, first);
        let (all, none) = (self.int(16), self.int(0));
        for i in 0..rows / filler.step {
            let row = self.i32c("addi", &filler.row, i64::from(i * filler.step));
            let inside = self.compare("slt", &row, &left);
            let bytes = self.select(&inside, &all, &none, "i32");
            let offset = (i * filler.step * self.pitch()).to_string();
            let (to, from) = (self.behind(&to, &offset, 3), self.behind(&from, &offset, 1));
            self.line(format_args!(
                "nvvm.cp.async.shared.global {to}, {from}, 16, cache = cg, {bytes} : \
                 !llvm.ptr<3>, !llvm.ptr<1>, i32"
            ));
        }
    }
    pub(super) fn commit(&mut self) {
        self.line("nvvm.cp.async.commit.group");
    }
    /// Waits until all that was begun is there, for all threads.
    pub(super) fn arrive(&mut self) {
        self.line("nvvm.cp.async.wait.group 0");
        self.barrier();
    }
    /// Addresses in a tile, as the lanes of a warp use them.
    pub(super) fn fragments(&mut self, tile: &str, lane: &str, lanes: Lanes) -> Fragments {
        let (row, half) = match lanes {
            Lanes::A => (self.i32c("remui", lane, 16), self.i32c("divui", lane, 16)),
            Lanes::B => {
                let low = self.i32c("remui", lane, 8);
                let high = self.i32c("divui", lane, 16);
                let high = self.i32c("shli", &high, 3);
                let half = self.i32c("divui", lane, 8);
                (self.i32("addi", &low, &high), self.i32c("remui", &half, 2))
            }
        };
        let first = self.swizzled(&row, &half);
        // A step of 16 numbers is two chunks, and flips the same bits whatever the row.
        let addresses = (0..self.steps()).map(|step| {
            let offset = self.i32c("xori", &first, i64::from(step) << 5);
            let offset = self.wide(&offset);
            self.behind(tile, &offset, 3)
        });
        Fragments {
            addresses: addresses.collect(),
        }
    }
    /// The four 8 × 8 matrices of 16 rows from `row` on and 16 numbers of them; `offset` (64 bits)
    /// is added to the tile.
    pub(super) fn load(
        &mut self,
        of: &Fragments,
        offset: Option<&str>,
        row: u32,
        step: u32,
        transposed: bool,
    ) -> [V; 4] {
        let mut at = of.addresses[step as usize].clone();
        if let Some(offset) = offset {
            at = self.behind(&at, offset, 3);
        }
        let at = self.behind(&at, &(row * self.pitch()).to_string(), 3);
        let layout = if transposed { "col" } else { "row" };
        let all = self.def(format_args!(
            "nvvm.ldmatrix {at} {{num = 4 : i32, layout = #nvvm.mma_layout<{layout}>, \
             shape = #nvvm.ld_st_matrix_shape<m = 8, n = 8>, eltType = \
             #nvvm.ld_st_matrix_elt_type<b16>}} : \
             (!llvm.ptr<3>) -> !llvm.struct<(i32, i32, i32, i32)>"
        ));
        std::array::from_fn(|i| {
            self.def(format_args!(
                "llvm.extractvalue {all}[{i}] : !llvm.struct<(i32, i32, i32, i32)>"
            ))
        })
    }
    /// c + a·b for 16 × 8 numbers.
    pub(super) fn mma(&mut self, a: &[V; 4], b: [&V; 2], c: &[V; 4]) -> [V; 4] {
        let d = self.def(format_args!(
            "nvvm.mma.sync A[{}] B[{}, {}] C[{}] {{layoutA = #nvvm.mma_layout<row>, layoutB = \
             #nvvm.mma_layout<col>, \
             multiplicandAPtxType = #nvvm.mma_type<bf16>, multiplicandBPtxType = \
             #nvvm.mma_type<bf16>, \
             shape = #nvvm.shape<m = 16, n = 8, k = 16>}} : (i32, i32, f32) -> !llvm.struct<(f32, \
             f32, f32, f32)>",
            a.join(", "),
            b[0],
            b[1],
            c.join(", ")
        ));
        std::array::from_fn(|i| {
            self.def(format_args!(
                "llvm.extractvalue {d}[{i}] : !llvm.struct<(f32, f32, f32, f32)>"
            ))
        })
    }
    /// a·bᵀ: `a` gives a step's left factor, `b` has `rows` rows, the columns of the result.
    pub(super) fn times_transposed(
        &mut self,
        mut a: impl FnMut(&mut Emitter, u32) -> [V; 4],
        b: &Fragments,
        offset: &str,
        rows: u32,
    ) -> Vec<[V; 4]> {
        let zero = self.float(0.0);
        let mut c: Vec<[V; 4]> = vec![std::array::from_fn(|_| zero.clone()); rows as usize / 8];
        for step in 0..self.steps() {
            let a = a(self, step);
            for pair in 0..rows / 16 {
                let b = self.load(b, Some(offset), 16 * pair, step, false);
                let (i, j) = (2 * pair as usize, 2 * pair as usize + 1);
                c[i] = self.mma(&a, [&b[0], &b[1]], &c[i]);
                c[j] = self.mma(&a, [&b[2], &b[3]], &c[j]);
            }
        }
        c
    }
    /// c + a·b: `a` are 16 rows of a result of [`Emitter::times_transposed`], packed, `b` has their
    /// columns as rows.
    pub(super) fn times(&mut self, a: &[[V; 4]], b: &Fragments, offset: &str, c: &mut [[V; 4]]) {
        for (k, a) in a.iter().enumerate() {
            for step in 0..self.steps() {
                let b = self.load(b, Some(offset), 16 * k as u32, step, true);
                let (i, j) = (2 * step as usize, 2 * step as usize + 1);
                c[i] = self.mma(a, [&b[0], &b[1]], &c[i]);
                c[j] = self.mma(a, [&b[2], &b[3]], &c[j]);
            }
        }
    }
    /// Two floats as a pair of bf16, the first in the lower half.
    pub(super) fn pair(&mut self, low: &str, high: &str) -> V {
        let pair = self.def(format_args!(
            "llvm.call_intrinsic \"llvm.nvvm.ff2bf16x2.rn\"({high}, {low}) : (f32, f32) -> \
             vector<2xbf16>"
        ));
        self.def(format_args!("llvm.bitcast {pair} : vector<2xbf16> to i32"))
    }
    /// A result of `mma` as left factors: its layout is theirs.
    pub(super) fn packed(&mut self, c: &[[V; 4]]) -> Vec<[V; 4]> {
        let pairs = c.chunks(2).map(|two| {
            let [first, second] = [&two[0], &two[1]];
            [
                self.pair(&first[0], &first[1]),
                self.pair(&first[2], &first[3]),
                self.pair(&second[0], &second[1]),
                self.pair(&second[2], &second[3]),
            ]
        });
        pairs.collect()
    }
    /// Writes a warp's 16 rows of a result to rows of a matrix, 16 bytes at a time, by way of a
    /// tile's rows that only this warp reads: a barrier should lie behind those reads. `first` is
    /// the matrix's row of the tile's first, `count` how many rows the matrix has.
    pub(super) fn write(
        &mut self,
        s: &Start,
        c: &[[V; 4]],
        tile: &str,
        matrix: &str,
        first: &str,
        count: &str,
    ) {
        let start = self.i32c("muli", &s.warp, 16);
        let byte = self.i32c("shli", &s.place, 2);
        for lower in [0, 8] {
            let row = self.i32("addi", &start, &s.group);
            let row = self.i32c("addi", &row, lower);
            for (chunk, numbers) in c.iter().enumerate() {
                let chunk = self.int(chunk as i64);
                let at = self.swizzled(&row, &chunk);
                let at = self.i32("addi", &at, &byte);
                let at = self.wide(&at);
                let to = self.behind(tile, &at, 3);
                let half = if lower == 0 {
                    &numbers[..2]
                } else {
                    &numbers[2..]
                };
                let pair = self.pair(&half[0], &half[1]);
                self.line(format_args!(
                    "llvm.store {pair}, {to} {{alignment = 4 : i64}} : i32, !llvm.ptr<3>"
                ));
            }
        }
        self.warp_barrier();
        let chunks = self.d / 8;
        let upper = self.i32c("divui", &s.lane, i64::from(chunks));
        let chunk = self.i32c("remui", &s.lane, i64::from(chunks));
        let offset = self.i32c("shli", &chunk, 4);
        let offset = self.wide(&offset);
        for i in 0..16 * chunks / 32 {
            let row = self.i32("addi", &start, &upper);
            let row = self.i32c("addi", &row, i64::from(i * 32 / chunks));
            let at = self.swizzled(&row, &chunk);
            let at = self.wide(&at);
            let from = self.behind(tile, &at, 3);
            let row = self.i32("addi", first, &row);
            let inside = self.compare("slt", &row, count);
            self.when(&inside, &[], |e| {
                let numbers = e.def(format_args!(
                    "llvm.load {from} {{alignment = 16 : i64}} : !llvm.ptr<3> \
                        -> vector<4xi32>"
                ));
                let to = e.row(matrix, &row, e.pitch(), 1);
                let to = e.behind(&to, &offset, 1);
                e.line(format_args!(
                    "llvm.store {numbers}, {to} {{alignment = 16 : i64}} : vector<4xi32>, \
                     !llvm.ptr<1>"
                ));
                vec![]
            });
        }
    }
}

/// A thread's part in filling tiles.
pub(super) struct Filler {
    /// Its first row in the tile.
    row: V,
    /// Its chunk's place in the tile, 64 bits.
    place: V,
    /// Its chunk's place in the matrix, from the tile's first row on.
    from: V,
    /// Rows that all threads fill at once: a multiple of 8, so that a thread's chunks lie alike in
    /// all of its rows.
    step: u32,
}
