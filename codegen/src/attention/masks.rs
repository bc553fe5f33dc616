//! The rows of a block of threads, the tiles that it processes, and the scores that it hides.

use super::emit::{Emitter, Quad, ROWS, Start, quads};
use crate::mlir::{Arith, Emit, Predicate, Special, Value};

/// A block's head and the first of its 64 rows. If `backwards`, the last rows of a head come first,
/// because with a causal mask they have the most work.
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

/// The number of tiles of `rows` keys that the queries from `first` on use.
pub(super) fn key_tiles(e: &mut Emitter, first: Value, rows: u32, causal: bool) -> Value {
    let mut end = e.n_keys;
    if causal {
        let reach = e.with(Arith::Addi, first, ROWS);
        end = e.b.minui(reach, end);
    }
    e.blocks(end, rows)
}

/// Which scores of a tile are visible. A thread has two rows of the tile, and its columns start at
/// its own place.
pub(super) struct Limits {
    /// Whether scores of the tile are hidden.
    pub(super) needed: Value,
    /// For each row, a column minus the thread's place.
    pub(super) columns: [Value; 2],
    /// True if the columns from there on are visible, false if the columns before it are.
    pub(super) from: bool,
}

/// Replaces hidden scores by `hidden`, in tiles that have some.
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

/// A tile of scores: its first query, its first key, the number of its keys, and whether query i
/// uses only the keys 0..=i.
#[derive(Clone, Copy)]
pub(super) struct Mask {
    pub(super) first: Value,
    pub(super) columns: Value,
    pub(super) rows: u32,
    pub(super) causal: bool,
}

/// For each of a thread's two rows, the first hidden column of a tile. Rows are queries, columns
/// are keys.
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
