//! Which rows a block of threads has, which tiles it goes over, and which scores it hides.

use super::emit::{Emitter, Quad, ROWS, Start, quads};
use crate::mlir::{Arith, Emit, Predicate, Special, Value};

/// A block's head and the first of its 64 rows. The last rows of a head come first if `backwards`:
/// with a causal mask they have the most to do.
pub(super) fn part(e: &mut Emitter, rows: Value, backwards: bool) -> (Value, Value) {
    let block = e.b.special(Special::Block);
    let n = e.blocks(rows, ROWS);
    let (head, mut at) = e.divide(block, n);
    if backwards {
        let last = e.with(Arith::Subi, n, 1);
        at = e.b.subi(last, at);
    }
    (head, e.with(Arith::Muli, at, ROWS))
}

/// How many tiles of `rows` keys the queries from `first` on look at.
pub(super) fn key_tiles(e: &mut Emitter, first: Value, rows: u32, causal: bool) -> Value {
    let mut end = e.n_keys;
    if causal {
        let reach = e.with(Arith::Addi, first, ROWS);
        end = e.b.minui(reach, end);
    }
    e.blocks(end, rows)
}

/// Which scores of a tile are visible. A thread has two rows of it, and its
/// columns start at its own place.
pub(super) struct Limits {
    /// Whether scores of the tile are hidden.
    pub(super) needed: Value,
    /// For each row a column, less the thread's place.
    pub(super) columns: [Value; 2],
    /// Columns from there on are visible; else those before.
    pub(super) from: bool,
}

/// Replaces scores that a mask hides by `hidden`, in tiles that have any.
pub(super) fn masked(
    e: &mut Emitter,
    scores: &[Quad],
    limits: &Limits,
    hidden: Value,
) -> Vec<Quad> {
    let all: Vec<Value> = scores.concat();
    let values = e.choose(limits.needed, &all, |e| {
        let mut values = vec![];
        for (i, &score) in all.iter().enumerate() {
            let column = e.b.int((i / 4 * 8 + i % 2) as i64);
            let limit = limits.columns[i % 4 / 2];
            let visible = if limits.from {
                e.b.compare(Predicate::Sle, limit, column)
            } else {
                e.b.compare(Predicate::Slt, column, limit)
            };
            values.push(e.b.select(visible, score, hidden));
        }
        values
    });
    quads(&values)
}

/// A tile of scores: its first query, its first key, how many keys it has, and whether query i
/// looks at the keys 0..=i alone.
#[derive(Clone, Copy)]
pub(super) struct Mask {
    pub(super) first: Value,
    pub(super) columns: Value,
    pub(super) rows: u32,
    pub(super) causal: bool,
}

/// Of each of a thread's two rows, the first column of a tile that it does not look at: rows are
/// queries, columns keys.
pub(super) fn key_limits(e: &mut Emitter, s: &Start, mask: Mask) -> Limits {
    let (first_query, first_key) = (mask.first, mask.columns);
    let place = e.with(Arith::Shli, s.place, 1);
    let at = e.b.addi(first_key, place);
    let left = e.b.subi(e.n_keys, at);
    let end = e.with(Arith::Addi, first_key, mask.rows);
    let tail = e.b.compare(Predicate::Slt, e.n_keys, end);
    if !mask.causal {
        return Limits {
            needed: tail,
            columns: [left, left],
            from: false,
        };
    }
    let query = e.own_row(s, first_query);
    let reach = e.b.subi(query, at);
    let columns = [1, 9].map(|more| {
        let reach = e.with(Arith::Addi, reach, more);
        e.b.minsi(reach, left)
    });
    let diagonal = e.b.compare(Predicate::Slt, first_query, end);
    Limits {
        needed: e.b.ori(tail, diagonal),
        columns,
        from: false,
    }
}
