//! q, k, v -> out, logsumexp.

use super::drops::{Drops, Rows};
use super::emit::{Emitter, Filler, Fragments, Lanes, Matrix, Quad, ROWS, Start, quads};
use super::masks::{Mask, key_limits, key_tiles, masked, part};
use super::{How, LN_2, LOG2_E, Tensor};
use crate::mlir::{Arith, Emit, Kind, Layout, Predicate, Type, Value};

/// State of the kernel. Shared memory: 64 queries, and two tiles of 64 keys and values.
struct Forward {
    causal: bool,
    s: Start,
    /// The block's head of q, and its first query.
    head: Value,
    first: Value,
    k: Matrix,
    v: Matrix,
    filler: Filler,
    k_tiles: Value,
    v_tiles: Value,
    /// Tiles of keys.
    n: Value,
    /// Bytes of a tile.
    tile: u32,
    /// The factor that turns scores into exponents of two; positive.
    scale: Value,
    /// The queries as left factors, one for each 16 numbers of a row.
    q: Vec<Quad>,
    k_fragments: Fragments,
    v_fragments: Fragments,
    lowest: Value,
    nothing: Value,
    drops: Option<(Drops, Rows)>,
}

/// Emits the kernel. Returns the bytes of shared memory.
pub(super) fn forward(e: &mut Emitter, how: How) -> u32 {
    let this = Forward::begin(e, how);
    // Loop values: 16 × D numbers of the result; for each of two rows, the maximum, and this
    // thread's part of the sum.
    let mut starts = e.zeros().concat();
    starts.extend([this.lowest, this.lowest, this.nothing, this.nothing]);
    let last = e.rounds(this.n, &starts, |e, round, values| {
        this.round(e, round, values)
    });
    this.end(e, &last);
    5 * this.tile
}

impl Forward {
    /// Fetches the queries and the first keys and values.
    fn begin(e: &mut Emitter, How { causal, drops }: How) -> Forward {
        let s = e.start();
        let tile = ROWS * e.pitch();
        let (head, first) = part(e, e.n_queries, causal);
        let kv = e.b.divui(head, e.group);
        let q = e.of_queries(Tensor::Q, head);
        let [k, v] = [Tensor::K, Tensor::V].map(|tensor| e.of_keys(tensor, kv));
        let filler = e.filler(s.thread);
        let k_tiles = e.advance(s.tiles, tile);
        let v_tiles = e.advance(s.tiles, 3 * tile);
        let n = key_tiles(e, first, ROWS, causal);
        let zero = e.b.int(0);
        e.fill(&filler, s.tiles, ROWS, q, first);
        e.fill(&filler, k_tiles, ROWS, k, zero);
        e.fill(&filler, v_tiles, ROWS, v, zero);
        e.b.commit();
        e.arrive();

        let (scale, signs) = magnitude(e);
        let mine = e.own_tile_rows(&s);
        let fragments = e.fragments(s.tiles, s.lane, Lanes::A);
        let steps = 0..e.steps();
        let q = steps.map(|step| {
            let q = e.load(&fragments, mine, 0, step, Layout::Rows);
            q.map(|pair| e.b.xori(pair, signs))
        });
        let q = q.collect();
        let k_fragments = e.fragments(k_tiles, s.lane, Lanes::B);
        let v_fragments = e.fragments(v_tiles, s.lane, Lanes::A);
        let drops = drops.then(|| {
            let drops = Drops::new(e);
            let rows = drops.rows(e, &s, head, first);
            (drops, rows)
        });
        Forward {
            causal,
            s,
            head,
            first,
            k,
            v,
            filler,
            k_tiles,
            v_tiles,
            n,
            tile,
            scale,
            q,
            k_fragments,
            v_fragments,
            lowest: e.b.float(f32::NEG_INFINITY),
            nothing: e.b.float(0.0),
            drops,
        }
    }

    /// Begins to fetch the next keys and values, if there are any.
    fn fetch_next(&self, e: &mut Emitter, round: Value) {
        let next_round = e.with(Arith::Addi, round, 1);
        let more = e.b.compare(Predicate::Slt, next_round, self.n);
        e.when(more, |e| {
            let next = e.turn(next_round, self.tile);
            let k_tile = e.advance(self.k_tiles, next);
            let v_tile = e.advance(self.v_tiles, next);
            let at = e.with(Arith::Muli, next_round, ROWS);
            e.fill(&self.filler, k_tile, ROWS, self.k, at);
            e.fill(&self.filler, v_tile, ROWS, self.v, at);
        });
        e.b.commit();
    }

    /// Computes a tile of keys. Returns the loop values.
    fn round(&self, e: &mut Emitter, round: Value, values: &[Value]) -> Vec<Value> {
        let d = e.d as usize;
        let mut out = quads(&values[..d / 2]);
        let (max, sum) = (&values[d / 2..d / 2 + 2], &values[d / 2 + 2..]);
        let now = e.turn(round, self.tile);
        self.fetch_next(e, round);

        let q = |_: &mut Emitter, step: u32| self.q[step as usize];
        let scores = e.times_transposed(q, &self.k_fragments, now, ROWS);
        let first_key = e.with(Arith::Muli, round, ROWS);
        let mask = Mask {
            first: self.first,
            columns: first_key,
            rows: ROWS,
            causal: self.causal,
        };
        let limits = key_limits(e, &self.s, mask);
        let scores = masked(e, &scores, &limits, self.lowest);

        let (mut maxima, mut shifts, mut shrinks) = (vec![], vec![], vec![]);
        for (row, &old) in max.iter().enumerate().take(2) {
            let (largest, shift, shrink) = self.maximum(e, &scores, row, old);
            maxima.push(largest);
            shifts.push(shift);
            shrinks.push(shrink);
        }
        let mut sums = vec![];
        for row in 0..2 {
            sums.push(e.b.mulf(sum[row], shrinks[row]));
        }
        let mut p = vec![];
        for score in &scores {
            p.push(std::array::from_fn(|i| {
                let power = e.b.fma(score[i], self.scale, shifts[i / 2]);
                let power = e.b.ex2(power);
                sums[i / 2] = e.b.addf(sums[i / 2], power);
                power
            }));
        }
        if let Some((drops, rows)) = &self.drops {
            let kept = drops.of_keys(e, rows, first_key, p.len());
            p = kept.only(e, &p);
        }
        let p = e.packed(&p);
        for numbers in &mut out {
            *numbers = std::array::from_fn(|i| e.b.mulf(numbers[i], shrinks[i / 2]));
        }
        e.times(&p, &self.v_fragments, now, &mut out);
        e.arrive();
        [out.concat(), maxima, sums].concat()
    }

    /// The largest score so far of one of a thread's two rows; the number that is added to scaled
    /// scores before the exponential; and the factor for results with smaller maxima.
    fn maximum(
        &self,
        e: &mut Emitter,
        scores: &[Quad],
        row: usize,
        before: Value,
    ) -> (Value, Value, Value) {
        let mut largest = before;
        for score in scores.iter().flat_map(|score| &score[2 * row..2 * row + 2]) {
            largest = e.b.arith(Arith::Maxnumf, &[largest, *score]);
        }
        let largest = e.over_lanes(Arith::Maxnumf, largest, &[1, 2]);
        // If all scores are hidden, nothing is subtracted, and every exponential is 0.
        let hidden = e.b.compare(Predicate::Oeq, largest, self.lowest);
        let shift = e.b.select(hidden, self.nothing, largest);
        let less = e.b.subf(before, shift);
        let less = e.b.mulf(less, self.scale);
        let shrink = e.b.ex2(less);
        let shift = e.b.arith(Arith::Negf, &[shift]);
        (largest, e.b.mulf(shift, self.scale), shrink)
    }

    /// Writes the results.
    fn end(&self, e: &mut Emitter, last: &[Value]) {
        let d = e.d as usize;
        let mut out = quads(&last[..d / 2]);
        let (max, sum) = (&last[d / 2..d / 2 + 2], &last[d / 2 + 2..]);
        let (mut logs, mut inverses) = (vec![], vec![]);
        let (one, ln_2) = (e.b.float(1.0), e.b.float(LN_2));
        for row in 0..2 {
            let sum = e.over_lanes(Arith::Addf, sum[row], &[1, 2]);
            let none = e.b.compare(Predicate::Oeq, sum, self.nothing);
            let inverse = e.b.arith(Arith::DivfApprox, &[one, sum]);
            let mut inverse = e.b.select(none, self.nothing, inverse);
            if let Some((drops, _)) = &self.drops {
                inverse = e.b.mulf(inverse, drops.scale);
            }
            inverses.push(inverse);
            let log = e.b.lg2(sum);
            let log = e.b.fma(max[row], self.scale, log);
            let log = e.b.mulf(log, ln_2);
            logs.push(e.b.select(none, self.nothing, log));
        }
        for numbers in &mut out {
            *numbers = std::array::from_fn(|i| e.b.mulf(numbers[i], inverses[i / 2]));
        }
        let to = e.of_queries(Tensor::Out, self.head);
        // Without keys no barrier lies between the loads of the queries and the writes to their
        // tile.
        e.b.warp_barrier();
        e.write(&self.s, &out, self.s.tiles, to, self.first);
        self.write_logs(e, &logs);
    }

    /// Writes the logsumexp of a thread's two rows.
    fn write_logs(&self, e: &mut Emitter, logs: &[Value]) {
        let zero = e.b.int(0);
        let leads = e.b.compare(Predicate::Eq, self.s.place, zero);
        let lse = e.numbers(Tensor::Lse, self.head);
        let row = e.own_row(&self.s, self.first);
        for (&log, lower) in logs.iter().zip([0, 8]) {
            let row = e.with(Arith::Addi, row, lower);
            let inside = e.b.compare(Predicate::Slt, row, lse.rows);
            let writes = e.b.andi(leads, inside);
            e.when(writes, |e| {
                let to = e.row(lse.at, row, 4);
                e.b.store(log, to, 4);
            });
        }
    }
}

/// The factor that turns scores into exponents of two, and the bits that change the queries' signs.
///
/// The maximum is taken of scores before they are scaled, so a negative scale changes the queries'
/// signs. A scale of 0 becomes the smallest positive number, so that hidden scores stay at minus
/// infinity.
fn magnitude(e: &mut Emitter) -> (Value, Value) {
    let bits = e.b.bitcast(e.scale, Type::Scalar(Kind::I32));
    let zero = e.b.int(0);
    let negative = e.b.compare(Predicate::Slt, bits, zero);
    let signs = e.b.int(-0x7fff_8000);
    let signs = e.b.select(negative, signs, zero);
    let size = e.b.arith(Arith::Absf, &[e.scale]);
    let log2_e = e.b.float(LOG2_E);
    let size = e.b.mulf(size, log2_e);
    let least = e.b.float(f32::MIN_POSITIVE);
    (e.b.arith(Arith::Maximumf, &[size, least]), signs)
}
