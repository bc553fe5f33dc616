//! Attention for NVIDIA's GPUs: forward and backward without the matrix of scores, by tensor cores;
//! one text for every GPU from sm_80 on.
//!
//! What is computed is `sdpa` and `sdpa_bwd` of [`ir::op`] for bf16, without a mask but the causal
//! one: q, out, dout, dq are [B, H, S, D], k, v, dk, dv are [B, G, T, D], where G divides H;
//! logsumexp and delta are f32 [B, H, S]. Scores, sums and gradients are f32; probabilities and the
//! gradients of scores are rounded to bf16 before they are multiplied, as every implementation on
//! tensor cores does. A query that may look at nothing gives zeros and a logsumexp of 0.
//!
//! The method is FlashAttention-2's (Dao, 2023). Forward: a block has 64 queries and goes over the
//! keys, with a running maximum and sum. Backward: [`Kind::Delta`] is the sums over dout · out;
//! [`Kind::Keys`] has 64 keys to a block, goes over the queries of all heads of their group and
//! computes scores transposed, so that they need not go through shared memory before they are
//! multiplied again; [`Kind::Queries`] is like the forward. Scores are computed twice, and in
//! return nothing is added up by atomics: results are the same bits in every run.

mod emit;

use crate::kernels::{Generator, GeneratorError, Stage, Target};
use emit::{Emitter, Lanes, ROWS, Start, THREADS, V};
use std::fmt;

ir::named! {
    /// Which kernel. Each takes the addresses of bf16 tensors unless it says f32, then
    /// [`Sizes::arguments`].
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Kind {
        /// q, k, v -> out, logsumexp (f32).
        Forward = "forward",
        /// dout, out -> delta (f32): what the other two of the backward need.
        Delta = "delta",
        /// dout, q, k, v, logsumexp (f32), delta (f32) -> dk, dv.
        Keys = "keys",
        /// dout, q, k, v, logsumexp (f32), delta (f32) -> dq.
        Queries = "queries",
    }
}

impl Kind {
    /// Its tensors, results last; true where they are f32.
    fn tensors(self) -> &'static [(&'static str, bool)] {
        match self {
            Kind::Forward => &[
                ("q", false),
                ("k", false),
                ("v", false),
                ("out", false),
                ("lse", true),
            ],
            Kind::Delta => &[("dout", false), ("out", false), ("delta", true)],
            Kind::Keys => &[
                ("dout", false),
                ("q", false),
                ("k", false),
                ("v", false),
                ("lse", true),
                ("delta", true),
                ("dk", false),
                ("dv", false),
            ],
            Kind::Queries => &[
                ("dout", false),
                ("q", false),
                ("k", false),
                ("v", false),
                ("lse", true),
                ("delta", true),
                ("dq", false),
            ],
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

/// A kernel that there is not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NoSuchHead(pub u32);

impl fmt::Display for NoSuchHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "attention for GPUs has heads of 64 or 128 numbers, not {}",
            self.0
        )
    }
}

impl std::error::Error for NoSuchHead {}

/// A kernel as MLIR text, and how it is started.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Kernel {
    /// The function's name.
    pub symbol: String,
    /// A module with the function.
    pub mlir: String,
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block; more than 48 KiB have to be asked for
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
    /// What scores are multiplied by, before the exponential.
    pub scale: f32,
}

/// An argument behind the addresses.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Argument {
    /// 32 bits.
    U32(u32),
    /// 32 bits.
    F32(f32),
}

impl Sizes {
    /// What kernels take behind the addresses, in their order.
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
    /// How many blocks there are for some sizes, below 2^31; they lie along x. With none, nothing
    /// is to be started; without keys the forward still writes its zeros.
    pub fn blocks(&self, sizes: &Sizes) -> u64 {
        let [heads, group, queries, keys] =
            [sizes.heads, sizes.group, sizes.queries, sizes.keys].map(u64::from);
        let rows = u64::from(ROWS);
        match self.kind {
            Kind::Forward | Kind::Queries => heads * queries.div_ceil(rows),
            Kind::Keys => heads / group * keys.div_ceil(rows),
            Kind::Delta => (heads * queries).div_ceil(u64::from(THREADS / (self.head_size / 8))),
        }
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

/// A kernel for heads of 64 or 128 numbers. `causal`: query i looks at the keys 0..=i alone.
pub fn kernel(kind: Kind, head_size: u32, causal: bool) -> Result<Kernel, NoSuchHead> {
    if ![64, 128].contains(&head_size) {
        return Err(NoSuchHead(head_size));
    }
    let mask = if causal && kind != Kind::Delta {
        "_causal"
    } else {
        ""
    };
    let symbol = format!("attention_{}_{head_size}{mask}", kind.name());
    let mut emitter = Emitter::new(head_size);
    let shared_bytes = match kind {
        Kind::Forward => forward(&mut emitter, causal),
        Kind::Delta => delta(&mut emitter),
        Kind::Keys => keys(&mut emitter, causal),
        Kind::Queries => queries(&mut emitter, causal),
    };
    let tensors = kind.tensors();
    let parameter = |(i, (name, _)): (usize, &(&str, bool))| {
        let reads = if i + kind.n_results() < tensors.len() {
            ", llvm.readonly"
        } else {
            ""
        };
        format!("%{name}: !llvm.ptr<1> {{llvm.align = 64 : i64, llvm.noalias{reads}}}, ")
    };
    let parameters: String = tensors.iter().enumerate().map(parameter).collect();
    let mlir = format!(
        "module {{\n  llvm.mlir.global external @tiles() {{addr_space = 3 : i32, alignment = 1024 \
         : i64}} : \
         !llvm.array<0 x i8>\n  llvm.func @{symbol}({parameters}%n_heads: i32, %group: i32, \
         %n_queries: i32, \
         %n_keys: i32, %scale: f32) attributes {{nvvm.kernel, nvvm.maxntid = array<i32: \
         {THREADS}, 1, 1>, \
         nvvm.minctasm = {BLOCKS} : i32}} {{\n{}    llvm.return\n  }}\n}}\n",
        emitter.text
    );
    Ok(Kernel {
        symbol,
        mlir,
        threads: THREADS,
        shared_bytes,
        kind,
        head_size,
    })
}

/// Blocks that a multiprocessor should hold at once. Two leave each thread all of its 255
/// registers; unless told, ptxas takes 128 and spills.
const BLOCKS: u32 = 2;
/// 1 / ln 2 and ln 2.
const LOG2_E: f32 = std::f32::consts::LOG2_E;
const LN_2: f32 = std::f32::consts::LN_2;

/// A block's head and the first of its 64 rows. The last rows of a head come first if `backwards`:
/// with a causal mask they have the most to do.
fn part(e: &mut Emitter, rows: &str, backwards: bool) -> (V, V) {
    let (block, n) = (e.block(), e.blocks(rows, ROWS));
    let (head, mut at) = e.divide(&block, &n);
    if backwards {
        let last = e.i32c("subi", &n, 1);
        at = e.i32("subi", &last, &at);
    }
    (head, e.i32c("muli", &at, i64::from(ROWS)))
}

/// How many tiles of `rows` keys the queries from `first` on look at.
fn key_tiles(e: &mut Emitter, first: &str, rows: u32, causal: bool) -> V {
    let mut end = "%n_keys".to_string();
    if causal {
        let reach = e.i32c("addi", first, i64::from(ROWS));
        end = e.i32("minui", &reach, &end);
    }
    e.blocks(&end, rows)
}

/// The offset of one of two tiles, 64 bits: those of even rounds and those of odd.
fn turn(e: &mut Emitter, round: &str, bytes: u32) -> V {
    let odd = e.i32c("andi", round, 1);
    let offset = e.i32c("muli", &odd, i64::from(bytes));
    e.wide(&offset)
}

fn zeros(e: &mut Emitter) -> Vec<[V; 4]> {
    let zero = e.float(0.0);
    vec![std::array::from_fn(|_| zero.clone()); e.d as usize / 8]
}

fn quads(values: &[V]) -> Vec<[V; 4]> {
    values.as_chunks::<4>().0.to_vec()
}

/// Replaces scores that a mask hides by `hidden`, in tiles where there are any. A row of a result
/// looks at the columns `range` of its tile: below the first number, or, if `from`, from it on;
/// there are two rows to a thread.
fn masked(
    e: &mut Emitter,
    scores: &[[V; 4]],
    needed: &str,
    limits: [&str; 2],
    from: bool,
    hidden: &str,
) -> Vec<[V; 4]> {
    let all: Vec<V> = scores.concat();
    let values = e.when(needed, &all, |e| {
        let mut values = vec![];
        for (i, score) in all.iter().enumerate() {
            let column = e.int((i / 4 * 8 + i % 2) as i64);
            let limit = limits[i % 4 / 2];
            let visible = if from {
                e.compare("sle", limit, &column)
            } else {
                e.compare("slt", &column, limit)
            };
            values.push(e.select(&visible, score, hidden, "f32"));
        }
        values
    });
    quads(&values)
}

/// Of each of a thread's two rows, the first column of a tile that it does not look at, less the
/// thread's own: rows are queries, columns keys. And whether there are any such columns in the
/// tile.
fn key_limits(
    e: &mut Emitter,
    s: &Start,
    first_query: &str,
    first_key: &str,
    rows: u32,
    causal: bool,
) -> ([V; 2], V) {
    let place = e.i32c("shli", &s.place, 1);
    let at = e.i32("addi", first_key, &place);
    let left = e.i32("subi", "%n_keys", &at);
    let end = e.i32c("addi", first_key, i64::from(rows));
    let tail = e.compare("slt", "%n_keys", &end);
    if !causal {
        return ([left.clone(), left], tail);
    }
    let start = e.i32c("muli", &s.warp, 16);
    let row = e.i32("addi", &start, &s.group);
    let query = e.i32("addi", first_query, &row);
    let reach = e.i32("subi", &query, &at);
    let limits = [1, 9].map(|more| {
        let reach = e.i32c("addi", &reach, more);
        e.i32("minsi", &reach, &left)
    });
    let diagonal = e.compare("slt", first_query, &end);
    let needed = e.def(format_args!("arith.ori {tail}, {diagonal} : i1"));
    (limits, needed)
}

/// q, k, v -> out, logsumexp. Shared memory: 64 queries, twice 64 keys and values.
fn forward(e: &mut Emitter, causal: bool) -> u32 {
    let s = e.start();
    let tile = ROWS * e.pitch();
    let (head, first) = part(e, "%n_queries", causal);
    let kv = e.i32("divui", &head, "%group");
    let (pitch, d) = (e.pitch(), e.d as usize);
    let q = e.matrix("%q", &head, "%n_queries", pitch);
    let (k, v) = (
        e.matrix("%k", &kv, "%n_keys", pitch),
        e.matrix("%v", &kv, "%n_keys", pitch),
    );
    let filler = e.filler(&s.thread);
    let k_tiles = e.behind(&s.tiles, &tile.to_string(), 3);
    let v_tiles = e.behind(&s.tiles, &(3 * tile).to_string(), 3);
    let n = key_tiles(e, &first, ROWS, causal);
    let zero = e.int(0);
    e.fill(&filler, &s.tiles, ROWS, &q, &first, "%n_queries");
    e.fill(&filler, &k_tiles, ROWS, &k, &zero, "%n_keys");
    e.fill(&filler, &v_tiles, ROWS, &v, &zero, "%n_keys");
    e.commit();
    e.arrive();

    // The maximum is taken of scores before they are scaled: a negative scale changes the queries'
    // signs. A scale of 0 counts as the smallest there is, so that hidden scores stay at minus
    // infinity.
    let bits = e.def("llvm.bitcast %scale : f32 to i32");
    let negative = e.compare("slt", &bits, &zero);
    let (signs, none) = (e.int(-0x7fff_8000), e.int(0));
    let signs = e.select(&negative, &signs, &none, "i32");
    let size = e.def("math.absf %scale : f32");
    let log2_e = e.float(LOG2_E);
    let size = e.f32("mulf", &size, &log2_e);
    let least = e.float(f32::MIN_POSITIVE);
    let scale = e.f32("maximumf", &size, &least);

    let mine = e.i32c("muli", &s.warp, i64::from(16 * pitch));
    let mine = e.wide(&mine);
    let q = e.fragments(&s.tiles, &s.lane, Lanes::A);
    let q: Vec<[V; 4]> = (0..e.steps())
        .map(|step| {
            let q = e.load(&q, Some(&mine), 0, step, false);
            q.map(|pair| e.i32("xori", &pair, &signs))
        })
        .collect();
    let k_fragments = e.fragments(&k_tiles, &s.lane, Lanes::B);
    let v_fragments = e.fragments(&v_tiles, &s.lane, Lanes::A);
    let lowest = e.float(f32::NEG_INFINITY);
    let nothing = e.float(0.0);

    // Handed on: 16 × D numbers of the result; of each of two rows the maximum, and the sum of what
    // this thread has of it.
    let mut first_values: Vec<(V, &str)> =
        zeros(e).concat().into_iter().map(|v| (v, "f32")).collect();
    first_values.extend([&lowest, &lowest, &nothing, &nothing].map(|v| (v.clone(), "f32")));
    let last = e.repeat(&n, &first_values, |e, round, values| {
        let mut out = quads(&values[..d / 2]);
        let (max, sum) = (&values[d / 2..d / 2 + 2], &values[d / 2 + 2..]);
        let now = turn(e, round, tile);
        let next_round = e.i32c("addi", round, 1);
        let more = e.compare("slt", &next_round, &n);
        e.when(&more, &[], |e| {
            let next = turn(e, &next_round, tile);
            let (k_tile, v_tile) = (e.behind(&k_tiles, &next, 3), e.behind(&v_tiles, &next, 3));
            let at = e.i32c("muli", &next_round, i64::from(ROWS));
            e.fill(&filler, &k_tile, ROWS, &k, &at, "%n_keys");
            e.fill(&filler, &v_tile, ROWS, &v, &at, "%n_keys");
            vec![]
        });
        e.commit();

        let scores =
            e.times_transposed(|_, step| q[step as usize].clone(), &k_fragments, &now, ROWS);
        let first_key = e.i32c("muli", round, i64::from(ROWS));
        let (limits, needed) = key_limits(e, &s, &first, &first_key, ROWS, causal);
        let scores = masked(
            e,
            &scores,
            &needed,
            [&limits[0], &limits[1]],
            false,
            &lowest,
        );

        let mut handed = vec![];
        let (mut shifts, mut shrinks) = (vec![], vec![]);
        for row in 0..2 {
            let mut largest = max[row].clone();
            for score in scores.iter().flat_map(|score| &score[2 * row..2 * row + 2]) {
                largest = e.f32("maxnumf", &largest, score);
            }
            let largest = e.over_lanes("maxnumf", &largest, &[1, 2]);
            // Of nothing but hidden scores: nothing is subtracted, and every exponential is 0.
            let hidden = e.def(format_args!("arith.cmpf oeq, {largest}, {lowest} : f32"));
            let shift = e.select(&hidden, &nothing, &largest, "f32");
            let less = e.f32("subf", &max[row], &shift);
            let less = e.f32("mulf", &less, &scale);
            shrinks.push(e.ex2(&less));
            let shift = e.def(format_args!("arith.negf {shift} : f32"));
            shifts.push(e.f32("mulf", &shift, &scale));
            handed.push(largest);
        }
        let mut sums: Vec<V> = (0..2)
            .map(|row| e.f32("mulf", &sum[row], &shrinks[row]))
            .collect();
        let mut p = vec![];
        for score in &scores {
            p.push(std::array::from_fn(|i| {
                let power = e.fma(&score[i], &scale, &shifts[i / 2]);
                let power = e.ex2(&power);
                sums[i / 2] = e.f32("addf", &sums[i / 2], &power);
                power
            }));
        }
        let p = e.packed(&p);
        for numbers in &mut out {
            *numbers = std::array::from_fn(|i| e.f32("mulf", &numbers[i], &shrinks[i / 2]));
        }
        e.times(&p, &v_fragments, &now, &mut out);
        e.arrive();
        [out.concat(), handed, sums].concat()
    });

    let mut out = quads(&last[..d / 2]);
    let (max, sum) = (&last[d / 2..d / 2 + 2], &last[d / 2 + 2..]);
    let mut logs = vec![];
    let (one, ln_2) = (e.float(1.0), e.float(LN_2));
    let mut inverses = vec![];
    for row in 0..2 {
        let sum = e.over_lanes("addf", &sum[row], &[1, 2]);
        let none = e.def(format_args!("arith.cmpf oeq, {sum}, {nothing} : f32"));
        let inverse = e.def(format_args!(
            "arith.divf {one}, {sum} fastmath<arcp,afn> : f32"
        ));
        inverses.push(e.select(&none, &nothing, &inverse, "f32"));
        let log = e.intrinsic("llvm.nvvm.lg2.approx.ftz.f", &sum);
        let log = e.fma(&max[row], &scale, &log);
        let log = e.f32("mulf", &log, &ln_2);
        logs.push(e.select(&none, &nothing, &log, "f32"));
    }
    for numbers in &mut out {
        *numbers = std::array::from_fn(|i| e.f32("mulf", &numbers[i], &inverses[i / 2]));
    }
    let to = e.matrix("%out", &head, "%n_queries", pitch);
    // Without keys no barrier lies between the loads of the queries and the writes to their tile.
    e.warp_barrier();
    e.write(&s, &out, &s.tiles, &to, &first, "%n_queries");
    let leads = e.compare("eq", &s.place, &zero);
    let lse = e.matrix("%lse", &head, "%n_queries", 4);
    let start = e.i32c("muli", &s.warp, 16);
    let row = e.i32("addi", &start, &s.group);
    let row = e.i32("addi", &first, &row);
    for (log, lower) in logs.iter().zip([0, 8]) {
        let row = e.i32c("addi", &row, lower);
        let inside = e.compare("slt", &row, "%n_queries");
        let writes = e.def(format_args!("arith.andi {leads}, {inside} : i1"));
        e.when(&writes, &[], |e| {
            let to = e.row(&lse, &row, 4, 1);
            e.line(format_args!(
                "llvm.store {log}, {to} {{alignment = 4 : i64}} : f32, !llvm.ptr<1>"
            ));
            vec![]
        });
    }
    5 * tile
}

/// dout, out -> delta: 16 bytes of a row to a thread.
fn delta(e: &mut Emitter) -> u32 {
    let thread = e.thread();
    let each = i64::from(e.d / 8);
    let (upper, chunk) = (
        e.i32c("divui", &thread, each),
        e.i32c("remui", &thread, each),
    );
    let block = e.block();
    let first = e.i32c("muli", &block, i64::from(THREADS) / each);
    let row = e.i32("addi", &first, &upper);
    let n = e.i32("muli", "%n_heads", "%n_queries");
    let inside = e.compare("ult", &row, &n);
    let last = e.i32c("subi", &n, 1);
    let read = e.select(&inside, &row, &last, "i32");
    let offset = e.i32c("shli", &chunk, 4);
    let offset = e.wide(&offset);
    let [a, b] = ["%dout", "%out"].map(|tensor| {
        let at = e.row(tensor, &read, e.pitch(), 1);
        let at = e.behind(&at, &offset, 1);
        e.def(format_args!(
            "llvm.load {at} {{alignment = 16 : i64}} : !llvm.ptr<1> -> vector<8xbf16>"
        ))
    });
    let [a, b] = [a, b].map(|x| {
        e.def(format_args!(
            "arith.extf {x} : vector<8xbf16> to vector<8xf32>"
        ))
    });
    let mut sum = e.float(0.0);
    for i in 0..8 {
        let [a, b] = [&a, &b].map(|x| {
            e.def(format_args!(
                "vector.extract {x}[{i}] : f32 from vector<8xf32>"
            ))
        });
        sum = e.fma(&a, &b, &sum);
    }
    let distances: Vec<i64> = [1, 2, 4, 8].into_iter().filter(|&d| d < each).collect();
    let sum = e.over_lanes("addf", &sum, &distances);
    let zero = e.int(0);
    let leads = e.compare("eq", &chunk, &zero);
    let writes = e.def(format_args!("arith.andi {leads}, {inside} : i1"));
    e.when(&writes, &[], |e| {
        let to = e.row("%delta", &row, 4, 1);
        e.line(format_args!(
            "llvm.store {sum}, {to} {{alignment = 4 : i64}} : f32, !llvm.ptr<1>"
        ));
        vec![]
    });
    0
}

/// Rows of the tiles that pass by in the backward: as many as registers hold.
fn passing(e: &Emitter) -> u32 {
    if e.d == 64 { 64 } else { 32 }
}

/// What makes a score the exponent of a power of two.
fn exponents(e: &mut Emitter) -> V {
    let log2_e = e.float(LOG2_E);
    e.f32("mulf", "%scale", &log2_e)
}

/// Gradients of scores before they were scaled: the scale is left to the end.
fn scaled(e: &mut Emitter, c: &[[V; 4]]) -> Vec<[V; 4]> {
    let scaled = c
        .iter()
        .map(|numbers| std::array::from_fn(|i| e.f32("mulf", &numbers[i], "%scale")));
    scaled.collect()
}

/// p (dp - delta); `delta` of a number's index in its quad and its column.
fn score_gradients(
    e: &mut Emitter,
    p: &[[V; 4]],
    dp: &[[V; 4]],
    delta: impl Fn(usize, usize) -> V,
) -> Vec<[V; 4]> {
    let mut ds = vec![];
    for (column, (p, dp)) in p.iter().zip(dp).enumerate() {
        ds.push(std::array::from_fn(|i| {
            let less = e.f32("subf", &dp[i], &delta(i, column));
            e.f32("mulf", &p[i], &less)
        }));
    }
    ds
}

/// dout, q, k, v, logsumexp, delta -> dq. Shared memory: 64 queries and their dout, twice some keys
/// and values.
fn queries(e: &mut Emitter, causal: bool) -> u32 {
    let s = e.start();
    let (pitch, d, rows) = (e.pitch(), e.d as usize, passing(e));
    let (tile, small) = (ROWS * pitch, rows * pitch);
    let (head, first) = part(e, "%n_queries", causal);
    let kv = e.i32("divui", &head, "%group");
    let q = e.matrix("%q", &head, "%n_queries", pitch);
    let dout = e.matrix("%dout", &head, "%n_queries", pitch);
    let (k, v) = (
        e.matrix("%k", &kv, "%n_keys", pitch),
        e.matrix("%v", &kv, "%n_keys", pitch),
    );
    let filler = e.filler(&s.thread);
    let dout_tile = e.behind(&s.tiles, &tile.to_string(), 3);
    let k_tiles = e.behind(&s.tiles, &(2 * tile).to_string(), 3);
    let v_tiles = e.behind(&s.tiles, &(2 * tile + 2 * small).to_string(), 3);
    let n = key_tiles(e, &first, rows, causal);
    let zero = e.int(0);
    e.fill(&filler, &s.tiles, ROWS, &q, &first, "%n_queries");
    e.fill(&filler, &dout_tile, ROWS, &dout, &first, "%n_queries");
    e.fill(&filler, &k_tiles, rows, &k, &zero, "%n_keys");
    e.fill(&filler, &v_tiles, rows, &v, &zero, "%n_keys");
    e.commit();

    let scale = exponents(e);
    let nothing = e.float(0.0);
    let start = e.i32c("muli", &s.warp, 16);
    let row = e.i32("addi", &start, &s.group);
    let row = e.i32("addi", &first, &row);
    let last_row = e.i32c("subi", "%n_queries", 1);
    let log2_e = e.float(-LOG2_E);
    let (mut shifts, mut deltas) = (vec![], vec![]);
    for lower in [0, 8] {
        // Rows behind the last are computed with its numbers and written nowhere.
        let row = e.i32c("addi", &row, lower);
        let row = e.i32("minsi", &row, &last_row);
        let [lse, delta] = ["%lse", "%delta"].map(|tensor| {
            let at = e.matrix(tensor, &head, "%n_queries", 4);
            let at = e.row(&at, &row, 4, 1);
            e.def(format_args!(
                "llvm.load {at} {{alignment = 4 : i64}} : !llvm.ptr<1> -> f32"
            ))
        });
        shifts.push(e.f32("mulf", &lse, &log2_e));
        deltas.push(delta);
    }
    e.arrive();
    let mine = e.i32c("muli", &s.warp, i64::from(16 * pitch));
    let mine = e.wide(&mine);
    let q_fragments = e.fragments(&s.tiles, &s.lane, Lanes::A);
    let dout_fragments = e.fragments(&dout_tile, &s.lane, Lanes::A);
    let k_fragments = e.fragments(&k_tiles, &s.lane, Lanes::B);
    let v_fragments = e.fragments(&v_tiles, &s.lane, Lanes::B);
    let k_columns = e.fragments(&k_tiles, &s.lane, Lanes::A);

    let first_values: Vec<(V, &str)> = zeros(e).concat().into_iter().map(|v| (v, "f32")).collect();
    let last = e.repeat(&n, &first_values, |e, round, values| {
        let mut dq = quads(&values[..d / 2]);
        let now = turn(e, round, small);
        let next_round = e.i32c("addi", round, 1);
        let more = e.compare("slt", &next_round, &n);
        e.when(&more, &[], |e| {
            let next = turn(e, &next_round, small);
            let (k_tile, v_tile) = (e.behind(&k_tiles, &next, 3), e.behind(&v_tiles, &next, 3));
            let at = e.i32c("muli", &next_round, i64::from(rows));
            e.fill(&filler, &k_tile, rows, &k, &at, "%n_keys");
            e.fill(&filler, &v_tile, rows, &v, &at, "%n_keys");
            vec![]
        });
        e.commit();

        let scores = e.times_transposed(
            |e, step| e.load(&q_fragments, Some(&mine), 0, step, false),
            &k_fragments,
            &now,
            rows,
        );
        let mut p = vec![];
        for score in &scores {
            p.push(std::array::from_fn(|i| {
                let power = e.fma(&score[i], &scale, &shifts[i / 2]);
                e.ex2(&power)
            }));
        }
        let first_key = e.i32c("muli", round, i64::from(rows));
        let (limits, needed) = key_limits(e, &s, &first, &first_key, rows, causal);
        let p = masked(e, &p, &needed, [&limits[0], &limits[1]], false, &nothing);
        let dp = e.times_transposed(
            |e, step| e.load(&dout_fragments, Some(&mine), 0, step, false),
            &v_fragments,
            &now,
            rows,
        );
        let ds = score_gradients(e, &p, &dp, |i, _| deltas[i / 2].clone());
        let ds = e.packed(&ds);
        e.times(&ds, &k_columns, &now, &mut dq);
        e.arrive();
        dq.concat()
    });
    let dq = scaled(e, &quads(&last));
    let to = e.matrix("%dq", &head, "%n_queries", pitch);
    e.write(&s, &dq, &s.tiles, &to, &first, "%n_queries");
    2 * tile + 4 * small
}

/// dout, q, k, v, logsumexp, delta -> dk, dv. Scores are computed transposed: rows are keys,
/// columns queries. Shared memory: 64 keys and values, twice some queries and their dout, logsumexp
/// and delta.
fn keys(e: &mut Emitter, causal: bool) -> u32 {
    let s = e.start();
    let (pitch, d, rows) = (e.pitch(), e.d as usize, passing(e));
    let (tile, small) = (ROWS * pitch, rows * pitch);
    let (kv, first) = part(e, "%n_keys", false);
    let (k, v) = (
        e.matrix("%k", &kv, "%n_keys", pitch),
        e.matrix("%v", &kv, "%n_keys", pitch),
    );
    let filler = e.filler(&s.thread);
    let v_tile = e.behind(&s.tiles, &tile.to_string(), 3);
    let q_tiles = e.behind(&s.tiles, &(2 * tile).to_string(), 3);
    let dout_tiles = e.behind(&s.tiles, &(2 * tile + 2 * small).to_string(), 3);
    // The logsumexp of a tile's queries, then their delta.
    let row_tiles = e.behind(&s.tiles, &(2 * tile + 4 * small).to_string(), 3);
    let row_bytes = 2 * 4 * rows;
    let all = e.blocks("%n_queries", rows);
    let zero = e.int(0);
    // With a causal mask the queries before the first key do not look at it.
    let begin = if causal {
        e.i32c("divui", &first, i64::from(rows))
    } else {
        zero.clone()
    };
    let each = e.i32("subi", &all, &begin);
    let each = e.i32("maxsi", &each, &zero);
    let n = e.i32("muli", &each, "%group");

    // Threads below 2·rows each copy one number of logsumexp or delta.
    let number = e.i32c("remui", &s.thread, i64::from(rows));
    let second = e.i32c("divui", &s.thread, i64::from(rows));
    let is_delta = e.def(format_args!("arith.trunci {second} : i32 to i1"));
    let limit = e.int(i64::from(2 * rows));
    let copies = e.compare("ult", &s.thread, &limit);
    let numbers = e.def(format_args!(
        "arith.select {is_delta}, %delta, %lse : !llvm.ptr<1>"
    ));
    let number_place = e.i32c("shli", &s.thread, 2);
    let number_place = e.wide(&number_place);
    let fill = |e: &mut Emitter, round: &str, head: &str, at: &str| {
        let q = e.matrix("%q", head, "%n_queries", pitch);
        let dout = e.matrix("%dout", head, "%n_queries", pitch);
        let to = turn(e, round, small);
        let (q_tile, dout_tile) = (e.behind(&q_tiles, &to, 3), e.behind(&dout_tiles, &to, 3));
        let at = e.i32c("muli", at, i64::from(rows));
        e.fill(&filler, &q_tile, rows, &q, &at, "%n_queries");
        e.fill(&filler, &dout_tile, rows, &dout, &at, "%n_queries");
        e.when(&copies, &[], |e| {
            let from = e.matrix(&numbers, head, "%n_queries", 4);
            let row = e.i32("addi", &at, &number);
            let inside = e.compare("slt", &row, "%n_queries");
            let from = e.row(&from, &row, 4, 1);
            let to = turn(e, round, row_bytes);
            let to = e.behind(&row_tiles, &to, 3);
            let to = e.behind(&to, &number_place, 3);
            let (bytes, none) = (e.int(4), e.int(0));
            let bytes = e.select(&inside, &bytes, &none, "i32");
            e.line(format_args!(
                "nvvm.cp.async.shared.global {to}, {from}, 4, cache = ca, {bytes} : !llvm.ptr<3>, \
                 !llvm.ptr<1>, i32"
            ));
            vec![]
        });
    };
    let first_head = e.i32("muli", &kv, "%group");
    e.fill(&filler, &s.tiles, ROWS, &k, &first, "%n_keys");
    e.fill(&filler, &v_tile, ROWS, &v, &first, "%n_keys");
    let any = e.compare("slt", &zero, &n);
    e.when(&any, &[], |e| {
        fill(e, &zero, &first_head, &begin);
        vec![]
    });
    e.commit();
    e.arrive();

    let scale = exponents(e);
    let nothing = e.float(0.0);
    let log2_e = e.float(-LOG2_E);
    let mine = e.i32c("muli", &s.warp, i64::from(16 * pitch));
    let mine = e.wide(&mine);
    let k_fragments = e.fragments(&s.tiles, &s.lane, Lanes::A);
    let v_fragments = e.fragments(&v_tile, &s.lane, Lanes::A);
    let q_fragments = e.fragments(&q_tiles, &s.lane, Lanes::B);
    let dout_fragments = e.fragments(&dout_tiles, &s.lane, Lanes::B);
    let q_columns = e.fragments(&q_tiles, &s.lane, Lanes::A);
    let dout_columns = e.fragments(&dout_tiles, &s.lane, Lanes::A);
    let place = e.i32c("shli", &s.place, 3);
    let place = e.wide(&place);
    let start = e.i32c("muli", &s.warp, 16);
    let row = e.i32("addi", &start, &s.group);
    let key = e.i32("addi", &first, &row);

    // Handed on: 16 × D numbers of dk and of dv, the head and the tile of its queries.
    let zeros = [zeros(e), zeros(e)].concat().concat();
    let mut first_values: Vec<(V, &str)> = zeros.into_iter().map(|v| (v, "f32")).collect();
    first_values.extend([(first_head.clone(), "i32"), (begin.clone(), "i32")]);
    let last = e.repeat(&n, &first_values, |e, round, values| {
        let (mut dk, mut dv) = (quads(&values[..d / 2]), quads(&values[d / 2..d]));
        let (head, at) = (&values[d], &values[d + 1]);
        let next_at = e.i32c("addi", at, 1);
        let ends = e.compare("eq", &next_at, &all);
        let next_at = e.select(&ends, &begin, &next_at, "i32");
        let next_head = e.i32c("addi", head, 1);
        let next_head = e.select(&ends, &next_head, head, "i32");
        let next_round = e.i32c("addi", round, 1);
        let more = e.compare("slt", &next_round, &n);
        e.when(&more, &[], |e| {
            fill(e, &next_round, &next_head, &next_at);
            vec![]
        });
        e.commit();

        let now = turn(e, round, small);
        let row_tile = turn(e, round, row_bytes);
        let row_tile = e.behind(&row_tiles, &row_tile, 3);
        let row_tile = e.behind(&row_tile, &place, 3);
        // Two neighbouring queries of each 8.
        let of_queries = |e: &mut Emitter, which: u32| -> Vec<[V; 2]> {
            let mut numbers = vec![];
            for column in 0..rows / 8 {
                let at = e.behind(&row_tile, &(4 * rows * which + 32 * column).to_string(), 3);
                let two = e.def(format_args!(
                    "llvm.load {at} {{alignment = 8 : i64}} : !llvm.ptr<3> -> vector<2xf32>"
                ));
                numbers.push([0, 1].map(|i| {
                    e.def(format_args!(
                        "vector.extract {two}[{i}] : f32 from vector<2xf32>"
                    ))
                }));
            }
            numbers
        };
        let scores = e.times_transposed(
            |e, step| e.load(&k_fragments, Some(&mine), 0, step, false),
            &q_fragments,
            &now,
            rows,
        );
        let logs = of_queries(e, 0);
        let mut p = vec![];
        for (score, logs) in scores.iter().zip(&logs) {
            let shifts = [0, 1].map(|i| e.f32("mulf", &logs[i], &log2_e));
            p.push(std::array::from_fn(|i| {
                let power = e.fma(&score[i], &scale, &shifts[i % 2]);
                e.ex2(&power)
            }));
        }
        let first_query = e.i32c("muli", at, i64::from(rows));
        if causal {
            // A key's row looks from the column of the same number on.
            let place = e.i32c("shli", &s.place, 1);
            let less = e.i32("addi", &first_query, &place);
            let limit = e.i32("subi", &key, &less);
            let second = e.i32c("addi", &limit, 8);
            let end = e.i32c("addi", &first, i64::from(ROWS));
            let needed = e.compare("slt", &first_query, &end);
            p = masked(e, &p, &needed, [&limit, &second], true, &nothing);
        }
        let packed = e.packed(&p);
        e.times(&packed, &dout_columns, &now, &mut dv);
        let dp = e.times_transposed(
            |e, step| e.load(&v_fragments, Some(&mine), 0, step, false),
            &dout_fragments,
            &now,
            rows,
        );
        let deltas = of_queries(e, 1);
        let ds = score_gradients(e, &p, &dp, |i, column| deltas[column][i % 2].clone());
        let ds = e.packed(&ds);
        e.times(&ds, &q_columns, &now, &mut dk);
        e.arrive();
        [dk.concat(), dv.concat(), vec![next_head, next_at]].concat()
    });
    let dk = scaled(e, &quads(&last[..d / 2]));
    let to = e.matrix("%dk", &kv, "%n_keys", pitch);
    e.write(&s, &dk, &s.tiles, &to, &first, "%n_keys");
    let to = e.matrix("%dv", &kv, "%n_keys", pitch);
    e.write(&s, &quads(&last[d / 2..d]), &v_tile, &to, &first, "%n_keys");
    2 * tile + 4 * small + 2 * row_bytes
}
