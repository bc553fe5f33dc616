//! Attention, a tile of keys and a block of a head's queries at a time, with the micro-kernels of
//! [`super::product`]: only the scores of one block and one tile exist, in a workspace of the
//! thread. Scores that `causal` forbids are computed only where a block crosses the diagonal. A
//! query that may use no key gives zeros, a logsumexp of 0 and no gradient, as in PyTorch. Weights
//! that are dropped are drawn where they are computed, forward and backward, and never stored.

use super::math::{self, Float, Real};
use super::product::{Left, Right, Tiled, tiles};
use super::random::Dropped;
use super::signature::{Checked, Signature, broadcast_shapes, ensure, is_float};
use super::strides::Broadcast;
use super::wide::{Scalar, Wide, floats};
use super::{Cut, Ran};
use crate::kernel::{Call, Element, UnitColumns, Window};
use artifact::DType;
use pulp::{Arch, Simd, WithSimd};
use std::ops::Range;

// --- checks ---

/// q, k, v at operands `q`.. and a mask at `mask`, if any. The largest width of a head. A thread's
/// workspace has a few hundred rows of this width.
const MOST_WIDTH: u64 = 1 << 16;

fn check_attention(s: &Signature<'_>, q: usize, mask: usize) -> Checked {
    s.has_kernel(q, is_float)?;
    s.bool("causal")?;
    s.float("scale")?;
    let (qs, ks, vs) = (s.shape(q), s.shape(q + 1), s.shape(q + 2));
    ensure([qs, ks, vs].iter().all(|s| s.len() == 4), || {
        "q, k, v should have rank 4".into()
    })?;
    let heads = qs[1] == ks[1] || (0 < ks[1] && qs[1].is_multiple_of(ks[1]));
    let fits = qs[0] == ks[0] && heads && qs[3] == ks[3] && ks[..3] == vs[..3];
    ensure(fits, || "q, k, v do not fit together".into())?;
    ensure(qs[3] <= MOST_WIDTH && vs[3] <= MOST_WIDTH, || {
        format!("a head is wider than {MOST_WIDTH}")
    })?;
    check_types(s, q, mask, [qs[0], qs[1], qs[2], ks[2]])
}
/// Element types, and a mask for scores of shape `full`.
fn check_types(s: &Signature<'_>, q: usize, from: usize, full: [u64; 4]) -> Checked {
    s.expect_dtype(q, q + 1)?;
    s.expect_dtype(q, q + 2)?;
    let (mask, key) = beside(from, s.ins.len(), |i| (s.dtype(i), s.rank(i)));
    if let Some(key) = key {
        s.expect_shape(key, &[4])?;
    }
    let n = from + usize::from(mask.is_some()) + usize::from(key.is_some());
    ensure(n == s.ins.len(), || {
        "the operand after a mask should be a dropout key".into()
    })?;
    let Some(mask) = mask else { return Ok(()) };
    if s.dtype(mask) == DType::I64 {
        let ([batch, _, queries, keys], shape) = (full, s.shape(mask));
        let fits = queries == keys && (*shape == [batch, keys] || *shape == [1, keys]);
        ensure(fits, || {
            format!("{shape:?} are no numbers of documents for scores of {full:?}")
        })?;
    } else {
        let fits = broadcast_shapes(s.shape(mask), &full)? == full;
        ensure(fits, || format!("the mask does not broadcast to {full:?}"))?;
        let dtype = s.dtype(mask);
        ensure(dtype == DType::Bool || dtype == s.dtype(q), || {
            "the mask should be bool, of q's type, or numbers of documents".into()
        })?;
    }
    Ok(())
}
/// Of the operands from number `from` on, up to number `n`: a mask, and a key by which weights are
/// dropped, which alone is a row of integers. `ty` gives an operand's element type and its rank.
fn beside(
    from: usize,
    n: usize,
    ty: impl Fn(usize) -> (DType, usize),
) -> (Option<usize>, Option<usize>) {
    let key = (from..n).find(|&i| ty(i) == (DType::I64, 1));
    let mask = (from < key.unwrap_or(n)).then_some(from);
    (mask, key)
}
pub(super) fn check_sdpa(s: &Signature<'_>) -> Checked {
    check_attention(s, 0, 3)?;
    let (q, v) = (s.shape(0), s.shape(2));
    s.results(&[
        (s.dtype(0), &[q[0], q[1], q[2], v[3]]),
        (DType::F32, &q[..3]),
    ])
}
pub(super) fn check_sdpa_bwd(s: &Signature<'_>) -> Checked {
    check_attention(s, 1, 6)?;
    let (q, v) = (s.shape(1), s.shape(3));
    for i in [0, 4] {
        s.expect_shape(i, &[q[0], q[1], q[2], v[3]])?;
        s.expect_dtype(i, 1)?;
    }
    s.expect_shape(5, &q[..3])?;
    s.expect(5, DType::F32)?;
    s.results(&[1, 2, 3].map(|i| (s.dtype(i), s.shape(i))))
}
/// The same for heads inside rows. Returns the heads of q and of k, the queries and the keys.
fn check_attention_rows(s: &Signature<'_>, q: usize, mask: usize) -> Result<[u64; 4], String> {
    s.has_kernel(q, is_float)?;
    s.bool("causal")?;
    s.float("scale")?;
    let (first, heads) = (s.list("first", 3, -1)?, s.list("heads", 2, 0)?);
    let [h, g] = [heads[0] as u64, heads[1] as u64];
    ensure(h == g || (0 < g && h.is_multiple_of(g)), || {
        format!("{g} heads do not divide {h}")
    })?;
    let mut rows = [0; 3];
    for (i, heads) in [h, g, g].into_iter().enumerate() {
        s.expect_rank(q + i, 4)?;
        let shape = s.shape(q + i);
        let inside = first[i] >= 0;
        rows[i] = shape[if inside { 1 } else { 2 }];
        let fits = match inside {
            true => first[i] as u64 + heads <= shape[2],
            false => heads == shape[1],
        };
        ensure(fits, || format!("operand {} has other heads", q + i))?;
    }
    let (qs, ks, vs) = (s.shape(q), s.shape(q + 1), s.shape(q + 2));
    let fits = qs[0] == ks[0] && ks[0] == vs[0] && qs[3] == ks[3] && rows[1] == rows[2];
    ensure(fits, || "q, k, v do not fit together".into())?;
    ensure(qs[3] <= MOST_WIDTH && vs[3] <= MOST_WIDTH, || {
        format!("a head is wider than {MOST_WIDTH}")
    })?;
    check_types(s, q, mask, [qs[0], h, rows[0], rows[1]])?;
    Ok([h, g, rows[0], rows[1]])
}
pub(super) fn check_sdpa_rows(s: &Signature<'_>) -> Checked {
    let [h, _, queries, _] = check_attention_rows(s, 0, 3)?;
    let (batch, values) = (s.shape(0)[0], s.shape(2)[3]);
    s.results(&[
        (s.dtype(0), &[batch, queries, h, values]),
        (DType::F32, &[batch, h, queries]),
    ])
}
pub(super) fn check_sdpa_rows_bwd(s: &Signature<'_>) -> Checked {
    let [h, g, queries, _] = check_attention_rows(s, 1, 6)?;
    let (batch, values) = (s.shape(1)[0], s.shape(3)[3]);
    for i in [0, 4] {
        s.expect_shape(i, &[batch, queries, h, values])?;
        s.expect_dtype(i, 1)?;
    }
    s.expect_shape(5, &[batch, h, queries])?;
    s.expect(5, DType::F32)?;
    let first = s.ints("first")?;
    let qkv = [1, 2, 3].map(|i| s.shape(i));
    if fill(first, [h, g, g], qkv) {
        return s.results(&[(s.dtype(1), qkv[0])]);
    }
    let mut shapes = qkv.map(<[u64]>::to_vec);
    for (i, heads) in [h, g, g].into_iter().enumerate() {
        if first[i] >= 0 {
            shapes[i][2] = heads;
        }
    }
    let [dq, dk, dv] = &shapes;
    s.results(&[dq, dk, dv].map(|shape| (s.dtype(1), &shape[..])))
}
/// True if q, k and v have rows of one shape, of which each head is in exactly one of them.
fn fill(first: &[i64], heads: [u64; 3], shapes: [&[u64]; 3]) -> bool {
    let [q, k, v] = shapes;
    let end = |i: usize| first[i] + heads[i] as i64;
    let apart = |i: usize, j: usize| end(i) <= first[j] || end(j) <= first[i];
    let inside = first.iter().all(|&first| first >= 0) && q == k && k == v;
    inside && apart(0, 1) && apart(0, 2) && apart(1, 2) && heads.iter().sum::<u64>() == q[2]
}

// --- kernels ---

/// Sizes as in the compiler's table: q[B,H,S,D], k[B,G,T,D], v[B,G,T,E].
struct Sizes {
    batch: usize,
    heads: usize,
    groups: usize,
    queries: usize,
    keys: usize,
    width: usize,
    values: usize,
}

/// Where a tensor's heads and rows lie: the first number, and the distances from a sequence, a head
/// and a row to the next.
#[derive(Clone, Copy)]
struct Layout {
    first: usize,
    batch: usize,
    head: usize,
    row: usize,
}

impl Layout {
    /// `[B,heads,rows,width]`
    fn of_heads(rows: usize, heads: usize, width: usize) -> Layout {
        Layout {
            first: 0,
            batch: heads * rows * width,
            head: rows * width,
            row: width,
        }
    }
    /// `[B,rows,heads,width]`, from head `first` on.
    fn of_rows(rows: usize, heads: usize, width: usize, first: usize) -> Layout {
        Layout {
            first: first * width,
            batch: rows * heads * width,
            head: width,
            row: heads * width,
        }
    }
}

/// A call's sizes, and where its operands lie.
struct Form {
    sizes: Sizes,
    qkv: [Layout; 3],
    out: Layout,
    /// Of `sdpa_rows`: the places of q's, k's and v's first heads in their rows; -1 where heads
    /// contain rows.
    first: Option<[i64; 3]>,
}

impl Form {
    /// Of a call whose operand `q` is q.
    fn of(call: &Call<'_>, q: usize) -> Form {
        let [qs, ks, vs] = [q, q + 1, q + 2].map(|i| call.in_shape(i));
        let first = crate::kernel::attr(call.attrs, "first").map(|_| {
            let first = call.ints("first");
            [first[0], first[1], first[2]]
        });
        let rows = |i: usize, shape: &[usize]| match first {
            Some(first) if first[i] >= 0 => shape[1],
            _ => shape[2],
        };
        let (heads, groups) = match first {
            Some(_) => (
                call.ints("heads")[0] as usize,
                call.ints("heads")[1] as usize,
            ),
            None => (qs[1], vs[1]),
        };
        let sizes = Sizes {
            batch: qs[0],
            heads,
            groups,
            queries: rows(0, qs),
            keys: rows(2, vs),
            width: qs[3],
            values: vs[3],
        };
        let lies = |i: usize, shape: &[usize], heads: usize| match first {
            Some(first) if first[i] >= 0 => {
                Layout::of_rows(shape[1], shape[2], shape[3], first[i] as usize)
            }
            _ => Layout::of_heads(shape[2], heads, shape[3]),
        };
        let out = match first {
            Some(_) => Layout::of_rows(sizes.queries, heads, sizes.values, 0),
            None => Layout::of_heads(sizes.queries, heads, sizes.values),
        };
        Form {
            qkv: [lies(0, qs, heads), lies(1, ks, groups), lies(2, vs, groups)],
            out,
            first,
            sizes,
        }
    }
    /// Operands q, k and v, from operand `q` on.
    fn operands<'a, T: Float + Element>(&self, call: &Call<'a>, q: usize) -> [Rows<'a, T>; 3] {
        let s = &self.sizes;
        let of = |i: usize, heads, width| Rows {
            x: call.input(q + i),
            layout: self.qkv[i],
            heads,
            width,
        };
        let keys = s.groups;
        [
            of(0, s.heads, s.width),
            of(1, keys, s.width),
            of(2, keys, s.values),
        ]
    }
    /// Operand `i`, which lies like the result of the forward.
    fn like_out<'a, T: Float + Element>(&self, call: &Call<'a>, i: usize) -> Rows<'a, T> {
        Rows {
            x: call.input(i),
            layout: self.out,
            heads: self.sizes.heads,
            width: self.sizes.values,
        }
    }
    /// The result of the forward. A unit is a head.
    fn out<'a, T: Float + Element>(&self, call: &Call<'a>) -> Written<'a, T> {
        let s = &self.sizes;
        if self.first.is_none() {
            return Written::heads(call, 0, s.queries);
        }
        let (columns, whole) = (s.heads * s.values, 0..s.heads * s.values);
        let [all] = call.output_unit_columns(0, [s.batch, s.heads], [s.queries, columns], [whole]);
        Written::Rows(all)
    }
    /// dq, dk and dv. A unit is a head of k and the heads of q that use it.
    fn gradients<'a, T: Float + Element>(&self, call: &Call<'a>) -> [Written<'a, T>; 3] {
        let s = &self.sizes;
        let units = [s.batch, s.groups];
        let parts = [
            (s.queries, s.heads, s.width),
            (s.keys, s.groups, s.width),
            (s.keys, s.groups, s.values),
        ];
        if let (Some(first), 1) = (self.first, call.n_outputs()) {
            let heads = [0, 1, 2].map(|i| first[i] as usize..first[i] as usize + parts[i].1);
            let columns = heads.map(|heads| heads.start * s.width..heads.end * s.width);
            let all = [s.queries, call.in_shape(1)[2] * s.width];
            return call
                .output_unit_columns(0, units, all, columns)
                .map(Written::Rows);
        }
        [0, 1, 2].map(|j| {
            let (rows, heads, width) = parts[j];
            if self.first.is_none_or(|first| first[j] < 0) {
                return Written::heads(call, j, rows);
            }
            let (columns, whole) = (heads * width, 0..heads * width);
            let [all] = call.output_unit_columns(j, units, [rows, columns], [whole]);
            Written::Rows(all)
        })
    }
    /// The room for `n` rows of operand `i` of q, k and v.
    fn room<T: Float>(&self, i: usize, n: usize) -> usize {
        let s = &self.sizes;
        room::<T>(self.qkv[i], n, if i == 2 { s.values } else { s.width })
    }
    /// The room for `n` rows of out or dout.
    fn out_room<T: Float>(&self, n: usize) -> usize {
        room::<T>(self.out, n, self.sizes.values)
    }
}

/// The room for `n` rows, which must be next to each other.
fn room<T: Float>(layout: Layout, n: usize, width: usize) -> usize {
    if layout.row == width {
        T::room(n * width)
    } else {
        n * width
    }
}

/// An operand.
struct Rows<'a, T> {
    x: &'a [T],
    layout: Layout,
    /// The heads of a sequence.
    heads: usize,
    width: usize,
}

impl<'a, T: Float> Rows<'a, T> {
    /// `n` rows of a head, from row `first` on, next to each other; in `room` if they lie apart or
    /// must be widened.
    fn get<'r>(&self, head: usize, first: usize, n: usize, room: &'r mut [T::Wide]) -> &'r [T::Wide]
    where
        'a: 'r,
    {
        let (Layout { batch, row, .. }, width) = (self.layout, self.width);
        let head = head / self.heads * batch + head % self.heads * self.layout.head;
        let at = self.layout.first + head + first * row;
        if row == width {
            return T::widened(&self.x[at..][..n * width], room);
        }
        for i in 0..n {
            let to = &mut room[i * width..][..width];
            T::Wide::load(&self.x[at + i * row..][..width], to);
        }
        &room[..n * width]
    }
}

/// A result. Its matrices are numbered by units, and by the heads of a unit.
enum Written<'a, T> {
    /// The units' matrices of `rows` rows follow each other; the part begins at element `start`.
    Heads {
        y: &'a mut [T],
        start: usize,
        rows: usize,
    },
    /// Each unit has columns.
    Rows(UnitColumns<'a, T>),
}

impl<'a, T: Float + Element> Written<'a, T> {
    /// Result `j`, in which heads contain rows.
    fn heads(call: &Call<'a>, j: usize, rows: usize) -> Written<'a, T> {
        Written::Heads {
            start: call.output_start(j),
            y: call.output(j),
            rows,
        }
    }
    /// Lets `f` write rows of a head: head `head` of the `heads` of unit `unit`. If `adds`, `f`
    /// reads them first. `room` is for rows that lie apart or must be rounded. `f` is long, and
    /// each way to write calls it: if it were generic, each would hold a copy of it.
    fn write(
        &mut self,
        (unit, head, heads): (usize, usize, usize),
        (rows, width): (Range<usize>, usize),
        room: &mut [T::Wide],
        adds: bool,
        f: &mut dyn FnMut(&mut [T::Wide]),
    ) {
        match self {
            Written::Heads {
                y,
                start,
                rows: all,
            } => {
                let at = ((unit * heads + head) * *all + rows.start) * width - *start;
                T::rounded(&mut y[at..][..rows.len() * width], room, f);
            }
            Written::Rows(columns) => {
                let n = rows.len();
                let mut window = columns.window(unit);
                let mut window = window.part(rows, head * width..(head + 1) * width);
                if let Some(y) = window.whole() {
                    return T::rounded(y, room, f);
                }
                let room = &mut room[..n * width];
                if adds {
                    for (i, room) in room.chunks_mut(width.max(1)).enumerate() {
                        T::Wide::load(window.row(i), room);
                    }
                }
                f(room);
                for (i, room) in room.chunks(width.max(1)).enumerate() {
                    T::Wide::store(room, window.row(i));
                }
            }
        }
    }
}

impl Sizes {
    /// The head of k and v that head `head` of q uses, both counted over the batch.
    fn key_head(&self, head: usize) -> usize {
        head / self.heads * self.groups + head % self.heads / (self.heads / self.groups)
    }
    /// The number of heads of q that use one head of k and v.
    fn group(&self) -> usize {
        self.heads.checked_div(self.groups).unwrap_or(0)
    }
    /// The number of keys that query `i` may use.
    fn reach(&self, causal: bool, i: usize) -> usize {
        if causal {
            self.keys.min(i + 1)
        } else {
            self.keys
        }
    }
}

/// Numbers that are added to scores, bools that say which scores count, or the number of each
/// token's document: scores of two documents do not count.
enum Mask<'a, T> {
    None,
    Added(&'a [T], Broadcast),
    Bool(&'a [u8], Broadcast),
    Documents(Documents<'a>),
}

/// The numbers of the documents of a row's tokens.
struct Documents<'a> {
    numbers: &'a [i64],
    /// Tokens of a row, and queries of all heads of a row; 0 if all rows have the same numbers.
    length: usize,
    of_row: usize,
}

impl Documents<'_> {
    /// The numbers of the row that a query is in, which is counted over the batch and the heads.
    fn of(&self, query: usize) -> &[i64] {
        let row = query.checked_div(self.of_row).unwrap_or(0);
        &self.numbers[row * self.length..][..self.length]
    }
}

impl<'a, T: Scalar> Mask<'a, T> {
    /// The operand, if there is one.
    fn new(call: &Call<'a>, i: Option<usize>, s: &Sizes) -> Mask<'a, T> {
        let Some(i) = i else {
            return Mask::None;
        };
        let order = || Broadcast::new(call.in_shape(i), &[s.batch, s.heads, s.queries, s.keys]);
        match call.in_dtype(i) {
            DType::Bool => Mask::Bool(call.input(i), order()),
            DType::I64 => Mask::Documents(Documents {
                numbers: call.input(i),
                length: s.keys,
                of_row: match call.in_shape(i)[0] {
                    1 => 0,
                    _ => s.heads * s.queries,
                },
            }),
            _ => Mask::Added(call.input(i), order()),
        }
    }
    /// Applies the mask's elements, from `at` on, to scores.
    fn apply<W: Real>(&self, at: usize, scores: &mut [W]) {
        match self {
            Mask::None => {}
            Mask::Added(mask, order) => order.runs(at, scores.len(), |range, from, follow| {
                for (i, score) in scores[range].iter_mut().enumerate() {
                    *score = *score + W::of(mask[if follow { from + i } else { from }]);
                }
            }),
            Mask::Bool(mask, order) => order.runs(at, scores.len(), |range, from, follow| {
                for (i, score) in scores[range].iter_mut().enumerate() {
                    if mask[if follow { from + i } else { from }] == 0 {
                        *score = W::LOWEST;
                    }
                }
            }),
            Mask::Documents(documents) => {
                let (query, key) = (at / documents.length, at % documents.length);
                let numbers = documents.of(query);
                let own = numbers[query % documents.length];
                for (score, &number) in scores.iter_mut().zip(&numbers[key..]) {
                    if number != own {
                        *score = W::LOWEST;
                    }
                }
            }
        }
    }
    /// True if no query of some, which are counted over the batch and the heads and in one head,
    /// sees any of these keys: they are of other documents.
    fn forbids(&self, queries: Range<usize>, keys: Range<usize>) -> bool {
        let Mask::Documents(documents) = self else {
            return false;
        };
        let numbers = documents.of(queries.start);
        let first = queries.start % documents.length;
        let own = &numbers[first..][..queries.len()];
        let (least, most) = own.iter().fold((i64::MAX, i64::MIN), |(least, most), &n| {
            (least.min(n), most.max(n))
        });
        numbers[keys]
            .iter()
            .all(|number| !(least..=most).contains(number))
    }
}

/// The mask and what is dropped, which are the operands from number `from` on.
fn beside_of<'a, T: Scalar>(
    call: &Call<'a>,
    from: usize,
    s: &Sizes,
) -> (Mask<'a, T>, Option<Dropped>) {
    let ty = |i: usize| (call.in_dtype(i), call.in_shape(i).len());
    let (mask, key) = beside(from, call.n_inputs(), ty);
    let dropped = key.map(|key| Dropped::by(call, key));
    (Mask::new(call, mask, s), dropped)
}

/// Takes `n` elements off the front.
fn take<'a, W>(from: &mut &'a mut [W], n: usize) -> &'a mut [W] {
    let (taken, rest) = std::mem::take(from).split_at_mut(n);
    *from = rest;
    taken
}

/// The number of queries whose scores are computed together. It is so small that the scores and
/// probabilities stay in the second cache, and that few scores are computed that `causal` forbids.
/// Whole tiles.
const QUERIES: usize = 48;
/// The number of queries that use a tile of keys before the next tile: a tile is packed once for
/// all of them.
const ROWS: usize = 512;
/// The number of keys in a tile.
const KEYS: usize = 512;

/// The sizes of a run's rooms in a thread's workspace, in numbers.
struct Rooms<const N: usize>([usize; N]);

impl<const N: usize> Rooms<N> {
    /// Lends them. Each begins at a cache line.
    fn lend<W: Real>(self, f: impl FnOnce([&mut [W]; N])) {
        let whole = |n: usize| n.next_multiple_of(16);
        let all = self.0.iter().map(|&n| whole(n)).sum();
        W::with_space(all, |mut space| {
            f(self.0.map(|n| &mut take(&mut space, whole(n))[..n]))
        });
    }
}

/// By heads of all the batch.
pub(super) fn cut(call: &Call<'_>) -> Cut {
    let s = Form::of(call, 0).sizes;
    Cut::of(
        s.batch * s.heads,
        s.queries * s.keys * (s.width + s.values) / 16,
    )
}
fn rooms<T: Float>(form: &Form) -> Rooms<9> {
    let s = &form.sizes;
    let tile = T::Wide::tile();
    let (rows, keys, queries) = (
        ROWS.min(s.queries),
        KEYS.min(s.keys),
        QUERIES.min(s.queries),
    );
    let v_room = if tile.reads(s.values) {
        0
    } else {
        Right::room(&tile, keys, s.values)
    };
    Rooms([
        queries * keys,
        Right::room(&tile, s.width, keys),
        v_room,
        rows,
        rows,
        form.room::<T>(1, keys),
        form.room::<T>(2, keys),
        form.room::<T>(0, queries),
        form.out_room::<T>(rows),
    ])
}
pub(super) fn prepare(call: &Call<'_>) -> Ran {
    let form = Form::of(call, 0);
    if form.sizes.batch == 0 {
        return Ok(());
    }
    floats!(call.out_dtype(0), T => rooms::<T>(&form).lend::<<T as Float>::Wide>(|_| {}));
    Ok(())
}
pub(super) fn sdpa(call: &Call<'_>) -> Ran {
    // Without a batch there is nothing to write, and no need for a workspace.
    if call.in_shape(0)[0] > 0 {
        floats!(call.out_dtype(0), T => sdpa_of::<T>(call));
    }
    Ok(())
}
/// A tile of keys at a time (Dao et al., "FlashAttention", 2022): probabilities are relative to the
/// largest score so far, and results are scaled down when this score grows.
fn sdpa_of<T: Float>(call: &Call<'_>) {
    let form = Form::of(call, 0);
    let s = &form.sizes;
    let [all_q, all_k, all_v] = form.operands::<T>(call, 0);
    let (mask, dropped) = beside_of::<T>(call, 3, s);
    let (mut all_out, logsumexp) = (form.out::<T>(call), call.output::<f32>(1));
    let (causal, scale) = (call.bool("causal"), T::Wide::of_f64(call.float("scale")));
    let (d, e, tile) = (s.width, s.values, T::Wide::tile());
    let heads = call.part(s.batch * s.heads);
    rooms::<T>(&form).lend::<T::Wide>(
        |[
            scores,
            k_packed,
            v_packed,
            maxima,
            sums,
            k_room,
            v_room,
            q_room,
            out_room,
        ]| {
            for (head, top) in heads
                .clone()
                .flat_map(|head| (0..s.queries).step_by(ROWS).map(move |top| (head, top)))
            {
                let (kv, rows) = (s.key_head(head), ROWS.min(s.queries - top));
                let (maxima, sums) = (&mut maxima[..rows], &mut sums[..rows]);
                maxima.fill(T::Wide::LOWEST);
                sums.fill(T::Wide::ZERO);
                // The number of the first row: counted over the batch and the heads, and within
                // this part.
                let first = head * s.queries + top;
                let own = first - heads.start * s.queries;
                let these = (top..top + rows, e);
                all_out.write((head, 0, 1), these, out_room, false, &mut |out| {
                    if s.keys == 0 {
                        out.fill(T::Wide::ZERO);
                    }
                    for left in (0..s.keys)
                        .step_by(KEYS)
                        .take_while(|&left| !causal || left < top + rows)
                    {
                        let n_keys = KEYS.min(s.keys - left);
                        let k = all_k.get(kv, left, n_keys, k_room);
                        let k = Right::packed(&tile, k_packed, (n_keys, d), (d, 1), k);
                        let v = all_v.get(kv, left, n_keys, v_room);
                        let v = Right::rows(&tile, v_packed, v, (n_keys, e));
                        for low in (0..rows).step_by(QUERIES) {
                            let n = QUERIES.min(rows - low);
                            let reach = if causal {
                                n_keys.min((top + low + n).saturating_sub(left))
                            } else {
                                n_keys
                            };
                            let out = &mut out[low * e..][..n * e];
                            let (row, keys) = (first + low, left..left + reach);
                            if reach == 0 || mask.forbids(row..row + n, keys) {
                                if left == 0 {
                                    out.fill(T::Wide::ZERO);
                                }
                                continue;
                            }
                            let q = all_q.get(head, top + low, n, q_room);
                            let p = &mut scores[..n * reach];
                            let (q, mut window) =
                                (Left::rows(&tile, q, d), Window::new(p, n, reach));
                            tiles(&tile, d, q, k, scale, &mut window, false);
                            Arch::new().dispatch(Exponentials {
                                sizes: s,
                                mask: &mask,
                                dropped: dropped.as_ref(),
                                row: first + low,
                                left,
                                causal,
                                scores: p,
                                maxima: &mut maxima[low..][..n],
                                sums: &mut sums[low..][..n],
                                out,
                            });
                            let p = Left::rows(&tile, p, reach);
                            tiles(
                                &tile,
                                reach,
                                p,
                                v,
                                T::Wide::ONE,
                                &mut Window::new(out, n, e),
                                0 < left,
                            );
                        }
                    }
                    for i in 0..rows {
                        let none = maxima[i] == T::Wide::LOWEST;
                        let inverse = if none {
                            T::Wide::ZERO
                        } else {
                            T::Wide::ONE / sums[i]
                        };
                        out[i * e..][..e]
                            .iter_mut()
                            .for_each(|out| *out = *out * inverse);
                        logsumexp[own + i] = if none {
                            0.0
                        } else {
                            (maxima[i].to_f64() + sums[i].to_f64().ln()) as f32
                        };
                    }
                });
            }
        },
    );
}

/// Sums side by side: enough for vector registers, and the order of additions is fixed.
const LANES: usize = 16;

/// Turns the scores of a block of queries and a tile of keys into exponentials relative to the
/// largest score so far. Scales the sums and results so far to the same score.
struct Exponentials<'a, 'b, T, W> {
    sizes: &'a Sizes,
    mask: &'a Mask<'b, T>,
    dropped: Option<&'a Dropped>,
    /// The first query, counted over the batch and the heads.
    row: usize,
    /// The first key.
    left: usize,
    causal: bool,
    scores: &'a mut [W],
    maxima: &'a mut [W],
    sums: &'a mut [W],
    out: &'a mut [W],
}

impl<T: Scalar, W: Real> WithSimd for Exponentials<'_, '_, T, W> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Exponentials {
            sizes: s,
            mask,
            dropped,
            row,
            left,
            causal,
            scores,
            maxima,
            sums,
            out,
        } = self;
        let (n, e) = (maxima.len(), s.values);
        let reach = scores.len() / n;
        for i in 0..n {
            let scores = &mut scores[i * reach..][..reach];
            let seen = s
                .reach(causal, (row + i) % s.queries)
                .saturating_sub(left)
                .min(reach);
            let (scores, beyond) = scores.split_at_mut(seen);
            beyond.fill(W::ZERO);
            mask.apply((row + i) * s.keys + left, scores);
            let max = folded(scores, W::LOWEST, |max, score| max.larger(score)).larger(maxima[i]);
            if max == W::LOWEST {
                scores.fill(W::ZERO);
                continue;
            }
            scores
                .iter_mut()
                .for_each(|score| *score = math::exp(*score - max));
            let sum = folded(scores, W::ZERO, |sum, score| sum + score);
            if let Some(dropped) = dropped {
                let scale = W::of_f64(dropped.scale());
                let at = (row + i) * s.keys + left;
                dropped.kept(at, seen, |part, kept: &[W]| {
                    for (score, &kept) in scores[part].iter_mut().zip(kept) {
                        *score = *score * kept * scale;
                    }
                });
            }
            if 0 < left {
                let factor = math::exp(maxima[i] - max);
                sums[i] = sums[i] * factor + sum;
                out[i * e..][..e]
                    .iter_mut()
                    .for_each(|out| *out = *out * factor);
            } else {
                sums[i] = sum;
            }
            maxima[i] = max;
        }
    }
}

/// Combines numbers, [`LANES`] at a time.
#[inline(always)]
fn folded<W: Real>(numbers: &[W], start: W, combine: impl Fn(W, W) -> W) -> W {
    let mut lanes = [start; LANES];
    let (whole, rest) = numbers.as_chunks::<LANES>();
    for numbers in whole {
        (0..LANES).for_each(|i| lanes[i] = combine(lanes[i], numbers[i]));
    }
    lanes
        .iter_mut()
        .zip(rest)
        .for_each(|(lane, &number)| *lane = combine(*lane, number));
    lanes.into_iter().fold(start, combine)
}

/// By heads of keys of all the batch.
pub(super) fn cut_bwd(call: &Call<'_>) -> Cut {
    let s = Form::of(call, 1).sizes;
    Cut::of(
        s.batch * s.groups,
        s.group() * s.queries * s.keys * (s.width + s.values) / 8,
    )
}
/// Gradients of queries in half precision are rounded once, so a tile has all keys.
fn tile_keys<T: Float>(s: &Sizes) -> usize {
    if T::room(1) == 0 {
        KEYS.min(s.keys)
    } else {
        s.keys
    }
}
fn rooms_bwd<T: Float>(form: &Form) -> Rooms<15> {
    let s = &form.sizes;
    let tile = T::Wide::tile();
    let (d, e, keys, queries) = (s.width, s.values, tile_keys::<T>(s), QUERIES.min(s.queries));
    let packed = |depth, columns| {
        if tile.reads(columns) {
            0
        } else {
            Right::room(&tile, depth, columns)
        }
    };
    Rooms([
        queries * keys,
        queries * keys,
        Right::room(&tile, d, keys),
        Right::room(&tile, e, keys),
        packed(keys, d),
        packed(queries, d),
        packed(queries, e),
        form.room::<T>(1, keys),
        form.room::<T>(2, keys),
        form.room::<T>(1, s.keys),
        form.room::<T>(2, s.keys),
        form.room::<T>(0, queries),
        form.room::<T>(0, queries),
        form.out_room::<T>(queries),
        form.out_room::<T>(queries),
    ])
}
pub(super) fn prepare_bwd(call: &Call<'_>) -> Ran {
    let form = Form::of(call, 1);
    if form.sizes.batch == 0 {
        return Ok(());
    }
    floats!(call.in_dtype(1), T => rooms_bwd::<T>(&form).lend::<<T as Float>::Wide>(|_| {}));
    Ok(())
}
pub(super) fn sdpa_bwd(call: &Call<'_>) -> Ran {
    if call.in_shape(1)[0] > 0 {
        floats!(call.in_dtype(1), T => sdpa_bwd_of::<T>(call));
    }
    Ok(())
}
/// With p = exp(scores - logsumexp): dv = pᵀ dout, dp = dout vᵀ, ds = p (dp - Σ dout out) scale, dq
/// = ds k, dk = dsᵀ q. If weights are dropped, f are their factors, dv = (f p)ᵀ dout, and dp = f
/// (dout vᵀ).
fn sdpa_bwd_of<T: Float>(call: &Call<'_>) {
    let form = Form::of(call, 1);
    let s = &form.sizes;
    let [all_q, all_k, all_v] = form.operands::<T>(call, 1);
    let [all_dout, all_out] = [0, 4].map(|i| form.like_out::<T>(call, i));
    let logsumexp = call.input::<f32>(5);
    let (mask, dropped) = beside_of::<T>(call, 6, s);
    let [mut all_dq, mut all_dk, mut all_dv] = form.gradients::<T>(call);
    let (causal, scale) = (call.bool("causal"), T::Wide::of_f64(call.float("scale")));
    let (d, e, tile, most) = (s.width, s.values, T::Wide::tile(), tile_keys::<T>(s).max(1));
    let (one, group, part) = (T::Wide::ONE, s.group(), call.part(s.batch * s.groups));
    rooms_bwd::<T>(&form).lend::<T::Wide>(|rooms| {
        let [
            all_p,
            all_dp,
            k_packed,
            v_packed,
            k_rows,
            q_rows,
            dout_rows,
            rooms @ ..,
        ] = rooms;
        let [
            k_room,
            v_room,
            dk_room,
            dv_room,
            q_room,
            dq_room,
            out_room,
            dout_room,
        ] = rooms;
        for kv in part {
            let blocks = (0..s.queries).step_by(QUERIES);
            let blocks = blocks.map(|low| low..s.queries.min(low + QUERIES));
            if s.keys == 0 {
                for (head, rows) in (0..group).flat_map(|i| blocks.clone().map(move |b| (i, b))) {
                    let mut zeros = |dq: &mut [T::Wide]| dq.fill(T::Wide::ZERO);
                    all_dq.write((kv, head, group), (rows, d), dq_room, false, &mut zeros);
                }
            }
            // Sums over all queries of all heads of the group.
            all_dk.write((kv, 0, 1), (0..s.keys, d), dk_room, false, &mut |dk| {
                all_dv.write((kv, 0, 1), (0..s.keys, e), dv_room, false, &mut |dv| {
                    dk.fill(T::Wide::ZERO);
                    dv.fill(T::Wide::ZERO);
                    for left in (0..s.keys).step_by(most) {
                        let n_keys = most.min(s.keys - left);
                        let k = all_k.get(kv, left, n_keys, k_room);
                        let v = all_v.get(kv, left, n_keys, v_room);
                        let k_columns = Right::packed(&tile, k_packed, (n_keys, d), (d, 1), k);
                        let v_columns = Right::packed(&tile, v_packed, (n_keys, e), (e, 1), v);
                        let k = Right::rows(&tile, k_rows, k, (n_keys, d));
                        for head in kv * group..(kv + 1) * group {
                            for rows in blocks.clone() {
                                let (low, n) = (rows.start, rows.len());
                                let row = head * s.queries + low;
                                let reach = if causal {
                                    n_keys.min((low + n).saturating_sub(left))
                                } else {
                                    n_keys
                                };
                                let keys = left..left + reach;
                                if reach == 0 || mask.forbids(row..row + n, keys) {
                                    if left == 0 {
                                        let of = (kv, head - kv * group, group);
                                        let mut zeros = |dq: &mut [T::Wide]| dq.fill(T::Wide::ZERO);
                                        all_dq.write(of, (rows, d), dq_room, false, &mut zeros);
                                    }
                                    continue;
                                }
                                let q = all_q.get(head, low, n, q_room);
                                let out = all_out.get(head, low, n, out_room);
                                let dout = all_dout.get(head, low, n, dout_room);
                                let (p, dp) = (&mut all_p[..n * reach], &mut all_dp[..n * reach]);
                                let x = Left::rows(&tile, q, d);
                                tiles(
                                    &tile,
                                    d,
                                    x,
                                    k_columns,
                                    scale,
                                    &mut Window::new(p, n, reach),
                                    false,
                                );
                                let x = Left::rows(&tile, dout, e);
                                tiles(
                                    &tile,
                                    e,
                                    x,
                                    v_columns,
                                    one,
                                    &mut Window::new(dp, n, reach),
                                    false,
                                );
                                let logsumexp = &logsumexp[row..][..n];
                                let gradients = Gradients {
                                    sizes: s,
                                    mask: &mask,
                                    dropped: dropped.as_ref(),
                                    row,
                                    left,
                                    causal,
                                    scale,
                                    p,
                                    dp,
                                    logsumexp,
                                    out,
                                    dout,
                                };
                                Arch::new().dispatch(gradients);
                                let keys = left..left + reach;
                                let dout = Right::rows(&tile, dout_rows, dout, (n, e));
                                let dv = &mut Window::new(
                                    &mut dv[keys.start * e..keys.end * e],
                                    reach,
                                    e,
                                );
                                tiles(
                                    &tile,
                                    n,
                                    Left::transposed(&tile, p, reach),
                                    dout,
                                    one,
                                    dv,
                                    true,
                                );
                                let q = Right::rows(&tile, q_rows, q, (n, d));
                                let dk = &mut Window::new(
                                    &mut dk[keys.start * d..keys.end * d],
                                    reach,
                                    d,
                                );
                                tiles(
                                    &tile,
                                    n,
                                    Left::transposed(&tile, dp, reach),
                                    q,
                                    one,
                                    dk,
                                    true,
                                );
                                let of = (kv, head - kv * group, group);
                                all_dq.write(of, (rows, d), dq_room, 0 < left, &mut |dq| {
                                    let dq = &mut Window::new(dq, n, d);
                                    tiles(
                                        &tile,
                                        reach,
                                        Left::rows(&tile, dp, reach),
                                        k,
                                        one,
                                        dq,
                                        0 < left,
                                    );
                                });
                            }
                        }
                    }
                });
            });
        }
    });
}

/// Turns scores into probabilities, and gradients of probabilities into gradients of scores before
/// scaling.
struct Gradients<'a, 'b, T, W> {
    sizes: &'a Sizes,
    mask: &'a Mask<'b, T>,
    dropped: Option<&'a Dropped>,
    /// The first query, counted over the batch and the heads.
    row: usize,
    /// The first key.
    left: usize,
    causal: bool,
    scale: W,
    p: &'a mut [W],
    dp: &'a mut [W],
    logsumexp: &'a [f32],
    out: &'a [W],
    dout: &'a [W],
}

impl<T: Scalar, W: Real + Scalar> WithSimd for Gradients<'_, '_, T, W> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Gradients {
            sizes: s,
            mask,
            dropped,
            row,
            left,
            causal,
            scale,
            p,
            dp,
            logsumexp,
            out,
            dout,
        } = self;
        let (n, e) = (logsumexp.len(), s.values);
        let reach = p.len() / n;
        for i in 0..n {
            let seen = s
                .reach(causal, (row + i) % s.queries)
                .saturating_sub(left)
                .min(reach);
            let (p, beyond) = p[i * reach..][..reach].split_at_mut(seen);
            beyond.fill(W::ZERO);
            let (dp, beyond) = dp[i * reach..][..reach].split_at_mut(seen);
            beyond.fill(W::ZERO);
            mask.apply((row + i) * s.keys + left, p);
            // The weight of the only key that a query sees is 1, whatever its score is. Otherwise
            // its gradient would be a rounding error, of which Adam makes a whole step.
            let scale = if s.reach(causal, (row + i) % s.queries) == 1 {
                W::ZERO
            } else {
                scale
            };
            let (shift, delta) = (
                W::of(logsumexp[i]),
                dot(&dout[i * e..][..e], &out[i * e..][..e]),
            );
            let Some(dropped) = dropped else {
                for (p, dp) in p.iter_mut().zip(dp) {
                    *p = math::exp(*p - shift);
                    *dp = *p * (*dp - delta) * scale;
                }
                continue;
            };
            let (factor, at) = (W::of_f64(dropped.scale()), (row + i) * s.keys + left);
            dropped.kept(at, seen, |part, kept: &[W]| {
                let pairs = p[part.clone()].iter_mut().zip(&mut dp[part]);
                for ((p, dp), &kept) in pairs.zip(kept) {
                    let (all, factor) = (math::exp(*p - shift), kept * factor);
                    *p = all * factor;
                    *dp = all * (*dp * factor - delta) * scale;
                }
            });
        }
    }
}
#[inline(always)]
fn dot<W: Real>(a: &[W], b: &[W]) -> W {
    let mut lanes = [W::ZERO; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        (0..LANES).for_each(|i| lanes[i] = lanes[i] + a[i] * b[i]);
    }
    lanes
        .iter_mut()
        .zip(a_rest)
        .zip(b_rest)
        .for_each(|((lane, &a), &b)| *lane = *lane + a * b);
    W::of_f64(lanes.into_iter().map(Wide::to_f64).sum())
}
