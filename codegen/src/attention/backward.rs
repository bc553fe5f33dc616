//! The backward: delta, dq, dk and dv.

use super::drops::{Columns, Drops, Kept, Rows};
use super::emit::{Emitter, Filler, Fragments, Lanes, Matrix, Quad, ROWS, Start, THREADS, quads};
use super::masks::{Limits, Mask, key_limits, key_tiles, masked, part};
use super::{How, LOG2_E, Tensor};
use crate::mlir::{Arith, Cache, Convert, Emit, Kind, Layout, Predicate, Special, Type, Value};

/// dout, out -> delta. Each thread has 16 bytes of a row. Returns the bytes of shared memory: none.
pub(super) fn delta(e: &mut Emitter) -> u32 {
    let thread = e.b.special(Special::Thread);
    let each = e.d / 8;
    let upper = e.with(Arith::Divui, thread, each);
    let chunk = e.with(Arith::Remui, thread, each);
    let block = e.b.special(Special::Block);
    let first = e.with(Arith::Muli, block, THREADS / each);
    let row = e.b.addi(first, upper);
    let n = e.b.muli(e.n_heads, e.n_queries);
    let inside = e.b.compare(Predicate::Ult, row, n);
    let last = e.with(Arith::Subi, n, 1);
    let read = e.b.select(inside, row, last);
    let offset = e.with(Arith::Shli, chunk, 4);
    let offset = e.b.wide(offset);
    let eight = Type::Vector(8, Kind::BF16);
    let rows = [Tensor::Dout, Tensor::Out].map(|tensor| {
        let at = e.of_query(tensor, read, e.pitch());
        let at = e.advance(at, offset);
        e.b.load(at, eight, 16)
    });
    let rows = rows.map(|x| e.b.convert(Convert::Extf, x, Kind::F32));
    let mut sum = e.b.float(0.0);
    for i in 0..8 {
        let [a, b] = rows.map(|x| e.b.extract(x, i));
        sum = e.b.fma(a, b, sum);
    }
    let mut distances = vec![1, 2, 4, 8];
    distances.retain(|&distance| distance < i64::from(each));
    let sum = e.over_lanes(Arith::Addf, sum, &distances);
    let zero = e.b.int(0);
    let leads = e.b.compare(Predicate::Eq, chunk, zero);
    let writes = e.b.andi(leads, inside);
    e.when(writes, |e| {
        let to = e.of_query(Tensor::Delta, row, e.delta_bytes);
        e.b.store(sum, to, 4);
    });
    0
}

/// Rows of the tiles in the loop: the number that fits into registers.
fn passing(e: &Emitter) -> u32 {
    if e.d == 64 { 64 } else { 32 }
}

/// p (dp - delta): the gradients of scores before scaling. The scale is applied at the end. dp is 0
/// for dropped weights, and larger by a factor for the others. `delta` is a function of a number's
/// index in its quad and its column.
fn score_gradients(
    e: &mut Emitter,
    p: &[Quad],
    dp: &[Quad],
    kept: Option<(&Drops, &Kept)>,
    delta: impl Fn(usize, usize) -> Value,
) -> Vec<Quad> {
    let dropped = kept.map(|(drops, kept)| {
        let dp = e.scaled(dp, drops.scale);
        kept.only(e, &dp)
    });
    let dp = dropped.as_deref().unwrap_or(dp);
    let mut ds = vec![];
    for (column, (p, dp)) in p.iter().zip(dp).enumerate() {
        ds.push(std::array::from_fn(|i| {
            let less = e.b.subf(dp[i], delta(i, column));
            e.b.mulf(p[i], less)
        }));
    }
    ds
}

/// Two to the power of scaled scores, shifted: probabilities. `shift` is a function of a number's
/// index in its quad and its column.
fn probabilities(
    e: &mut Emitter,
    scores: &[Quad],
    scale: Value,
    mut shift: impl FnMut(&mut Emitter, usize) -> [Value; 4],
) -> Vec<Quad> {
    let mut p = vec![];
    for (column, score) in scores.iter().enumerate() {
        let shifts = shift(e, column);
        p.push(std::array::from_fn(|i| {
            let power = e.b.fma(score[i], scale, shifts[i]);
            e.b.ex2(power)
        }));
    }
    p
}

// --- dq ---

/// State of the kernel for dq. Shared memory: 64 queries and their dout, and two tiles of keys and
/// values.
struct Queries {
    causal: bool,
    s: Start,
    head: Value,
    first: Value,
    k: Matrix,
    v: Matrix,
    filler: Filler,
    k_tiles: Value,
    v_tiles: Value,
    /// Rows of a tile of keys, and its bytes.
    rows: u32,
    small: u32,
    /// Tiles of keys.
    n: Value,
    /// The factor that turns scores into exponents of two.
    scale: Value,
    nothing: Value,
    /// For each of a thread's two rows: the number that is added to exponents, and delta.
    shifts: Vec<Value>,
    deltas: Vec<Value>,
    /// The offset of the warp's rows in tiles.
    mine: Value,
    q_fragments: Fragments,
    dout_fragments: Fragments,
    k_fragments: Fragments,
    v_fragments: Fragments,
    k_columns: Fragments,
    drops: Option<(Drops, Rows)>,
}

/// dout, q, k, v, logsumexp, delta -> dq. Returns the bytes of shared memory.
pub(super) fn queries(e: &mut Emitter, how: How) -> u32 {
    let this = Queries::begin(e, how);
    let starts = e.zeros().concat();
    let last = e.rounds(this.n, &starts, |e, round, values| {
        this.round(e, round, values)
    });
    let dq = e.scaled(&quads(&last), e.scale);
    let to = e.of_queries(Tensor::Dq, this.head);
    e.write(&this.s, &dq, this.s.tiles, to, this.first);
    2 * ROWS * e.pitch() + 4 * this.small
}

impl Queries {
    /// Fetches the queries and the first keys and values.
    fn begin(e: &mut Emitter, How { causal, drops }: How) -> Queries {
        let s = e.start();
        let (pitch, rows) = (e.pitch(), passing(e));
        let (tile, small) = (ROWS * pitch, rows * pitch);
        let (head, first) = part(e, e.n_queries, causal);
        let kv = e.b.divui(head, e.group);
        let [q, dout] = [Tensor::Q, Tensor::Dout].map(|tensor| e.of_queries(tensor, head));
        let [k, v] = [Tensor::K, Tensor::V].map(|tensor| e.of_keys(tensor, kv));
        let filler = e.filler(s.thread);
        let dout_tile = e.advance(s.tiles, tile);
        let k_tiles = e.advance(s.tiles, 2 * tile);
        let v_tiles = e.advance(s.tiles, 2 * tile + 2 * small);
        let n = key_tiles(e, first, rows, causal);
        let zero = e.b.int(0);
        e.fill(&filler, s.tiles, ROWS, q, first);
        e.fill(&filler, dout_tile, ROWS, dout, first);
        e.fill(&filler, k_tiles, rows, k, zero);
        e.fill(&filler, v_tiles, rows, v, zero);
        e.b.commit();

        let scale = e.exponents();
        let (shifts, deltas) = row_numbers(e, &s, head, first);
        e.arrive();
        let mine = e.own_tile_rows(&s);
        let drops = drops.then(|| {
            let drops = Drops::new(e);
            let rows = drops.rows(e, &s, head, first);
            (drops, rows)
        });
        Queries {
            causal,
            head,
            first,
            k,
            v,
            filler,
            k_tiles,
            v_tiles,
            rows,
            small,
            n,
            scale,
            nothing: e.b.float(0.0),
            shifts,
            deltas,
            mine,
            q_fragments: e.fragments(s.tiles, s.lane, Lanes::A),
            dout_fragments: e.fragments(dout_tile, s.lane, Lanes::A),
            k_fragments: e.fragments(k_tiles, s.lane, Lanes::B),
            v_fragments: e.fragments(v_tiles, s.lane, Lanes::B),
            k_columns: e.fragments(k_tiles, s.lane, Lanes::A),
            drops,
            s,
        }
    }

    /// Begins to fetch the next keys and values, if there are any.
    fn fetch_next(&self, e: &mut Emitter, round: Value) {
        let next_round = e.with(Arith::Addi, round, 1);
        let more = e.b.compare(Predicate::Slt, next_round, self.n);
        e.when(more, |e| {
            let next = e.turn(next_round, self.small);
            let k_tile = e.advance(self.k_tiles, next);
            let v_tile = e.advance(self.v_tiles, next);
            let at = e.with(Arith::Muli, next_round, self.rows);
            e.fill(&self.filler, k_tile, self.rows, self.k, at);
            e.fill(&self.filler, v_tile, self.rows, self.v, at);
        });
        e.b.commit();
    }

    /// Computes a tile of keys. Returns the sums for dq.
    fn round(&self, e: &mut Emitter, round: Value, values: &[Value]) -> Vec<Value> {
        let mut dq = quads(values);
        let now = e.turn(round, self.small);
        self.fetch_next(e, round);

        let q = |e: &mut Emitter, step| e.load(&self.q_fragments, self.mine, 0, step, Layout::Rows);
        let scores = e.times_transposed(q, &self.k_fragments, now, self.rows);
        let p = probabilities(e, &scores, self.scale, |_, _| {
            std::array::from_fn(|i| self.shifts[i / 2])
        });
        let first_key = e.with(Arith::Muli, round, self.rows);
        let mask = Mask {
            first: self.first,
            columns: first_key,
            rows: self.rows,
            causal: self.causal,
        };
        let limits = key_limits(e, &self.s, mask);
        let p = masked(e, &p, &limits, self.nothing);
        let dout =
            |e: &mut Emitter, step| e.load(&self.dout_fragments, self.mine, 0, step, Layout::Rows);
        let dp = e.times_transposed(dout, &self.v_fragments, now, self.rows);
        let kept = self.drops.as_ref().map(|(drops, rows)| {
            let kept = drops.of_keys(e, rows, first_key, dp.len());
            (drops, kept)
        });
        let kept = kept.as_ref().map(|(drops, kept)| (*drops, kept));
        let ds = score_gradients(e, &p, &dp, kept, |i, _| self.deltas[i / 2]);
        let ds = e.packed(&ds);
        e.times(&ds, &self.k_columns, now, &mut dq);
        e.arrive();
        dq.concat()
    }
}

/// For each of a thread's two rows: the number that is added to exponents of two, from the
/// logsumexp, and delta.
fn row_numbers(e: &mut Emitter, s: &Start, head: Value, first: Value) -> (Vec<Value>, Vec<Value>) {
    let row = e.own_row(s, first);
    let last_row = e.with(Arith::Subi, e.n_queries, 1);
    let log2_e = e.b.float(-LOG2_E);
    let (mut shifts, mut deltas) = (vec![], vec![]);
    for lower in [0, 8] {
        // Rows after the last are computed with the last row's numbers, and are not written.
        let row = e.with(Arith::Addi, row, lower);
        let row = e.b.minsi(row, last_row);
        let [lse, delta] = [Tensor::Lse, Tensor::Delta].map(|tensor| {
            let numbers = e.numbers(tensor, head);
            let at = e.row(numbers.at, row, e.number_bytes(tensor));
            e.b.load(at, Type::Scalar(Kind::F32), 4)
        });
        shifts.push(e.b.mulf(lse, log2_e));
        deltas.push(delta);
    }
    (shifts, deltas)
}

// --- dk and dv ---

/// State of the kernel for dk and dv. Scores are computed transposed: rows are keys, columns are
/// queries. Shared memory: 64 keys and values, and two tiles of queries with their dout, logsumexp
/// and delta.
struct Keys {
    causal: bool,
    s: Start,
    /// The block's head of k and v, and its first key.
    kv: Value,
    first: Value,
    filler: Filler,
    v_tile: Value,
    /// Rows of a tile of queries, and its bytes.
    rows: u32,
    small: u32,
    queries: Fetched,
    /// Tiles of queries: the end in each head, the first one in each head, and their total number.
    all: Value,
    begin: Value,
    n: Value,
    first_head: Value,
    drops: Option<(Drops, Columns)>,
}

/// The tiles of queries in the loop, and how a thread fills them.
struct Fetched {
    q_tiles: Value,
    dout_tiles: Value,
    /// The logsumexp of a tile's queries, then their delta, for two tiles.
    numbers: Value,
    number_bytes: u32,
    /// Whether the thread copies one of these numbers, whether it is a delta, from which tensor,
    /// the bytes from one to the next there, its row in the tile, and its place in the tile in
    /// bytes.
    copies: Value,
    is_delta: Value,
    from: Value,
    apart: Value,
    row: Value,
    place: Value,
}

/// Factors, as the lanes of a warp read them.
struct Factors {
    /// The offset of the warp's rows in the tiles of keys and values.
    mine: Value,
    k: Fragments,
    v: Fragments,
    q: Fragments,
    dout: Fragments,
    q_columns: Fragments,
    dout_columns: Fragments,
    /// The offset of the numbers of a thread's columns, in bytes.
    place: Value,
    /// A thread's first key.
    key: Value,
    scale: Value,
    nothing: Value,
    log2_e: Value,
}

/// dout, q, k, v, logsumexp, delta -> dk, dv. Returns the bytes of shared memory.
pub(super) fn keys(e: &mut Emitter, how: How) -> u32 {
    let this = Keys::begin(e, how);
    let factors = this.factors(e);
    // Loop values: 16 × D numbers of dk and of dv, the head and the tile of its queries.
    let mut starts = [e.zeros(), e.zeros()].concat().concat();
    starts.extend([this.first_head, this.begin]);
    let last = e.rounds(this.n, &starts, |e, round, values| {
        this.round(e, &factors, round, values)
    });

    let d = e.d as usize;
    let dk = e.scaled(&quads(&last[..d / 2]), e.scale);
    let to = e.of_keys(Tensor::Dk, this.kv);
    e.write(&this.s, &dk, this.s.tiles, to, this.first);
    let to = e.of_keys(Tensor::Dv, this.kv);
    let mut dv = quads(&last[d / 2..d]);
    if let Some((drops, _)) = &this.drops {
        dv = e.scaled(&dv, drops.scale);
    }
    e.write(&this.s, &dv, this.v_tile, to, this.first);
    2 * ROWS * e.pitch() + 4 * this.small + 2 * this.queries.number_bytes
}

impl Fetched {
    fn new(e: &mut Emitter, s: &Start, rows: u32) -> Fetched {
        let (tile, small) = (ROWS * e.pitch(), rows * e.pitch());
        // Threads below 2·rows each copy one number of logsumexp or delta.
        let row = e.with(Arith::Remui, s.thread, rows);
        let second = e.with(Arith::Divui, s.thread, rows);
        let is_delta = e.b.convert(Convert::Trunci, second, Kind::I1);
        let limit = e.b.int((2 * rows).into());
        let copies = e.b.compare(Predicate::Ult, s.thread, limit);
        let [delta, lse] = [Tensor::Delta, Tensor::Lse].map(|tensor| e.tensor(tensor));
        let from = e.b.select(is_delta, delta, lse);
        let [delta, lse] = [Tensor::Delta, Tensor::Lse].map(|tensor| e.number_bytes(tensor));
        let [delta, lse] = [delta, lse].map(|bytes| e.b.long(bytes.into()));
        let apart = e.b.select(is_delta, delta, lse);
        let place = e.with(Arith::Shli, s.thread, 2);
        Fetched {
            q_tiles: e.advance(s.tiles, 2 * tile),
            dout_tiles: e.advance(s.tiles, 2 * tile + 2 * small),
            numbers: e.advance(s.tiles, 2 * tile + 4 * small),
            number_bytes: 2 * 4 * rows,
            copies,
            is_delta,
            from,
            apart,
            row,
            place: e.b.wide(place),
        }
    }
}

impl Fetched {
    /// The address of the thread's number of a query.
    fn number(&self, e: &mut Emitter, head: Value, row: Value) -> Value {
        if e.has_places() {
            let [delta, lse] = [Tensor::Delta, Tensor::Lse].map(|of| e.numbers(of, head).at);
            let first = e.b.select(self.is_delta, delta, lse);
            let row = e.b.wide(row);
            let offset = e.b.muli(row, self.apart);
            return e.advance(first, offset);
        }
        let [head, n, row] = [head, e.n_queries, row].map(|x| e.b.wide(x));
        let first = e.b.muli(head, n);
        let number = e.b.addi(first, row);
        let offset = e.b.muli(number, self.apart);
        e.advance(self.from, offset)
    }
}

impl Keys {
    /// Fetches the keys, the values and the first queries.
    fn begin(e: &mut Emitter, How { causal, drops }: How) -> Keys {
        let s = e.start();
        let rows = passing(e);
        let (kv, first) = part(e, e.n_keys, false);
        let [k, v] = [Tensor::K, Tensor::V].map(|tensor| e.of_keys(tensor, kv));
        let filler = e.filler(s.thread);
        let v_tile = e.advance(s.tiles, ROWS * e.pitch());
        let all = e.blocks(e.n_queries, rows);
        let zero = e.b.int(0);
        // With a causal mask the queries before the first key do not use it.
        let begin = if causal {
            e.with(Arith::Divui, first, rows)
        } else {
            zero
        };
        let each = e.b.subi(all, begin);
        let each = e.b.maxsi(each, zero);
        let n = e.b.muli(each, e.group);
        let queries = Fetched::new(e, &s, rows);
        let first_head = e.b.muli(kv, e.group);
        let drops = drops.then(|| {
            let drops = Drops::new(e);
            let columns = drops.columns(e, &s, first);
            (drops, columns)
        });
        e.fill(&filler, s.tiles, ROWS, k, first);
        e.fill(&filler, v_tile, ROWS, v, first);
        let this = Keys {
            causal,
            s,
            kv,
            first,
            filler,
            v_tile,
            rows,
            small: rows * e.pitch(),
            queries,
            all,
            begin,
            n,
            first_head,
            drops,
        };
        let any = e.b.compare(Predicate::Slt, zero, n);
        e.when(any, |e| this.fetch(e, zero, first_head, begin));
        e.b.commit();
        e.arrive();
        this
    }

    fn factors(&self, e: &mut Emitter) -> Factors {
        let (s, queries) = (&self.s, &self.queries);
        Factors {
            scale: e.exponents(),
            nothing: e.b.float(0.0),
            log2_e: e.b.float(-LOG2_E),
            mine: e.own_tile_rows(s),
            k: e.fragments(s.tiles, s.lane, Lanes::A),
            v: e.fragments(self.v_tile, s.lane, Lanes::A),
            q: e.fragments(queries.q_tiles, s.lane, Lanes::B),
            dout: e.fragments(queries.dout_tiles, s.lane, Lanes::B),
            q_columns: e.fragments(queries.q_tiles, s.lane, Lanes::A),
            dout_columns: e.fragments(queries.dout_tiles, s.lane, Lanes::A),
            place: e.own_pair(s),
            key: e.own_row(s, self.first),
        }
    }

    /// Starts to fetch tile `at` of a head's queries for a round.
    fn fetch(&self, e: &mut Emitter, round: Value, head: Value, at: Value) {
        let queries = &self.queries;
        let [q, dout] = [Tensor::Q, Tensor::Dout].map(|tensor| e.of_queries(tensor, head));
        let to = e.turn(round, self.small);
        let q_tile = e.advance(queries.q_tiles, to);
        let dout_tile = e.advance(queries.dout_tiles, to);
        let at = e.with(Arith::Muli, at, self.rows);
        e.fill(&self.filler, q_tile, self.rows, q, at);
        e.fill(&self.filler, dout_tile, self.rows, dout, at);
        e.when(queries.copies, |e| {
            let row = e.b.addi(at, queries.row);
            let inside = e.b.compare(Predicate::Slt, row, e.n_queries);
            let from = queries.number(e, head, row);
            let to = e.turn(round, queries.number_bytes);
            let to = e.advance(queries.numbers, to);
            let to = e.advance(to, queries.place);
            let (bytes, none) = (e.b.int(4), e.b.int(0));
            let bytes = e.b.select(inside, bytes, none);
            e.b.copy_async(to, from, 4, bytes, Cache::All);
        });
    }

    /// Starts to fetch the next tile of queries. Returns its head and its number there.
    fn fetch_next(&self, e: &mut Emitter, round: Value, head: Value, at: Value) -> [Value; 2] {
        let next_at = e.with(Arith::Addi, at, 1);
        let ends = e.b.compare(Predicate::Eq, next_at, self.all);
        let next_at = e.b.select(ends, self.begin, next_at);
        let next_head = e.with(Arith::Addi, head, 1);
        let next_head = e.b.select(ends, next_head, head);
        let next_round = e.with(Arith::Addi, round, 1);
        let more = e.b.compare(Predicate::Slt, next_round, self.n);
        e.when(more, |e| self.fetch(e, next_round, next_head, next_at));
        e.b.commit();
        [next_head, next_at]
    }

    /// Computes a tile of queries. Returns the loop values.
    fn round(
        &self,
        e: &mut Emitter,
        factors: &Factors,
        round: Value,
        values: &[Value],
    ) -> Vec<Value> {
        let (d, rows) = (e.d as usize, self.rows);
        let (mut dk, mut dv) = (quads(&values[..d / 2]), quads(&values[d / 2..d]));
        let (head, at) = (values[d], values[d + 1]);
        let next = self.fetch_next(e, round, head, at);

        let now = e.turn(round, self.small);
        let numbers = e.turn(round, self.queries.number_bytes);
        let numbers = e.advance(self.queries.numbers, numbers);
        let numbers = e.advance(numbers, factors.place);
        let k = |e: &mut Emitter, step| e.load(&factors.k, factors.mine, 0, step, Layout::Rows);
        let scores = e.times_transposed(k, &factors.q, now, rows);
        let logs = self.of_columns(e, numbers, 0);
        let mut p = probabilities(e, &scores, factors.scale, |e, column| {
            let shifts = logs[column].map(|log| e.b.mulf(log, factors.log2_e));
            std::array::from_fn(|i| shifts[i % 2])
        });
        let first_query = e.with(Arith::Muli, at, rows);
        if self.causal {
            let limits = self.query_limits(e, factors, first_query);
            p = masked(e, &p, &limits, factors.nothing);
        }
        let kept = self.drops.as_ref().map(|(drops, columns)| {
            let kept = drops.of_queries(e, columns, (head, first_query), p.len());
            (drops, kept)
        });
        let packed = match &kept {
            Some((_, kept)) => {
                let used = kept.only(e, &p);
                e.packed(&used)
            }
            None => e.packed(&p),
        };
        e.times(&packed, &factors.dout_columns, now, &mut dv);
        let v = |e: &mut Emitter, step| e.load(&factors.v, factors.mine, 0, step, Layout::Rows);
        let dp = e.times_transposed(v, &factors.dout, now, rows);
        let deltas = self.of_columns(e, numbers, 1);
        let kept = kept.as_ref().map(|(drops, kept)| (*drops, kept));
        let ds = score_gradients(e, &p, &dp, kept, |i, column| deltas[column][i % 2]);
        let ds = e.packed(&ds);
        e.times(&ds, &factors.q_columns, now, &mut dk);
        e.arrive();
        [dk.concat(), dv.concat(), next.to_vec()].concat()
    }

    /// The first (logsumexp) or second (delta) numbers of a thread's two neighbouring queries of
    /// each 8.
    fn of_columns(&self, e: &mut Emitter, numbers: Value, which: u32) -> Vec<[Value; 2]> {
        let columns = 0..self.rows / 8;
        let columns = columns.map(|column| {
            let at = e.advance(numbers, 4 * self.rows * which + 32 * column);
            let two = e.b.load(at, Type::Vector(2, Kind::F32), 8);
            [0, 1].map(|i| e.b.extract(two, i))
        });
        columns.collect()
    }

    /// With a causal mask, the visible columns of a key's row start at the column with the same
    /// number.
    fn query_limits(&self, e: &mut Emitter, factors: &Factors, first_query: Value) -> Limits {
        let place = e.with(Arith::Shli, self.s.place, 1);
        let less = e.b.addi(first_query, place);
        let limit = e.b.subi(factors.key, less);
        let second = e.with(Arith::Addi, limit, 8);
        let end = e.with(Arith::Addi, self.first, ROWS);
        Limits {
            needed: e.b.compare(Predicate::Slt, first_query, end),
            columns: [limit, second],
            from: true,
        }
    }
}
