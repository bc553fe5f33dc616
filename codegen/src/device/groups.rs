//! What the tiles of a product compute, if rows are in groups whose ends are data: the rows of the
//! result, each group of which has a right factor of its own, or the terms, each group of which has
//! a result of its own.
//!
//! A first phase writes a table to scratch, by one thread for each row of tiles or each group. So
//! blocks do not look for their group one by one.
//!
//! After: rows that tiles read or write exist, whatever the ends are. An end before the group's
//! first row is that row, and one behind the last row of all is the last row.

use super::Kernel;
use super::grid::{Grid, Tensor};
use crate::mlir::{Predicate, Value};
use ir::DType;
use ir::op::groups::Groups;

/// The operand that has the ends.
const ENDS: usize = 2;
/// The number of ends that a thread loads before it uses the first: their latencies overlap.
const TOGETHER: u64 = 8;

/// A number that is known when a kernel is written, or one that it computes.
#[derive(Clone, Copy)]
pub(super) enum Size {
    Known(u64),
    Found(Value),
}

impl Size {
    /// A bit that is true if `x` is below the size.
    pub(super) fn is_above(self, g: &mut Grid, x: Value) -> Value {
        match self {
            Size::Known(n) => g.below(x, n),
            Size::Found(n) => g.b.compare(Predicate::Ult, x, n),
        }
    }

    pub(super) fn value(self, g: &mut Grid) -> Value {
        match self {
            Size::Known(n) => g.b.long(n),
            Size::Found(n) => n,
        }
    }
}

/// What a row of tiles computes.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// The matrices of the left factor, of the right one, and of the result.
    pub(super) matrices: [Value; 3],
    /// The first row.
    pub(super) top: Value,
    /// Where rows end.
    pub(super) rows: Size,
    /// The first term, if it is not 0.
    pub(super) first: Option<Value>,
    /// Where terms end.
    pub(super) terms: Size,
}

impl Place {
    /// The term that comes so many terms after the first.
    pub(super) fn term(&self, g: &mut Grid, past: Value) -> Value {
        match self.first {
            Some(first) => g.b.addi(first, past),
            None => past,
        }
    }

    /// The number of steps of `depth` terms.
    pub(super) fn steps(&self, g: &mut Grid, depth: u64) -> Size {
        match self.terms {
            Size::Known(n) => Size::Known(n.div_ceil(depth)),
            Size::Found(end) => {
                let n = match self.first {
                    Some(first) => g.b.subi(end, first),
                    None => end,
                };
                Size::Found(rounded_up(g, n, depth))
            }
        }
    }
}

/// The quotient of an integer and a known number, rounded up.
fn rounded_up(g: &mut Grid, n: Value, by: u64) -> Value {
    let more = g.plus(n, by as i64 - 1);
    g.divided(more, by)[0]
}

/// What is in groups.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Over {
    Rows,
    Terms,
}

/// A product of groups.
#[derive(Clone, Copy)]
pub(super) struct Grouped {
    pub(super) over: Over,
    pub(super) groups: Groups,
}

impl Grouped {
    /// Bytes of scratch.
    pub(super) fn scratch_bytes(&self) -> u64 {
        match self.over {
            Over::Rows => self.groups.scratch_of_tiles(),
            Over::Terms => self.groups.scratch_of_groups(),
        }
    }

    /// The number of entries of the table for tiles of `tile` rows.
    fn entries(&self, tile: u64) -> u64 {
        match self.over {
            Over::Rows => self.groups.tiles(tile),
            Over::Terms => self.groups.groups,
        }
    }

    /// Adds the phase that writes the table.
    pub(super) fn write(&self, k: &mut Kernel<'_>, tile: u64) {
        let entries = self.entries(tile);
        k.elements(entries, |g, entry| {
            let found = self.find(g, entry, tile);
            for (column, x) in table(g, entries).into_iter().zip(found) {
                g.put(column, entry, x);
            }
        });
    }

    /// The group of an entry, its first row, and where its rows end. Behind the last group the
    /// group is the number of groups, and behind all rows the first row does not exist.
    fn find(&self, g: &mut Grid, entry: Value, tile: u64) -> [Value; 3] {
        let groups = self.groups.groups;
        let [zero, none] = [0, groups].map(|n| g.b.long(n));
        let starts = [zero, entry, none, zero, zero];
        let rounds = groups.div_ceil(TOGETHER);
        let walked = g.count(rounds, &starts, |g, round, state| {
            let mut state = state.to_vec();
            let first = g.times(round, TOGETHER);
            let numbers: Vec<Value> = (0..TOGETHER).map(|i| g.plus(first, i as i64)).collect();
            // The last end again is an empty group.
            let last = g.b.long(groups.saturating_sub(1));
            let ends: Vec<Value> = numbers
                .iter()
                .map(|&number| {
                    let (at, ends) = (g.b.minui(number, last), g.operand(ENDS));
                    g.get(ends, at)
                })
                .collect();
            for (&number, &end) in numbers.iter().zip(&ends) {
                state = self.pass(g, [number, end], &state, tile);
            }
            state
        });
        let [start, left, group, first, end] = walked[..] else {
            unreachable!("a walk should have five numbers");
        };
        let (was_found, all) = (g.less(left, zero), g.b.long(self.groups.rows));
        let behind = self.first(g, start, left, tile);
        let first = g.b.select(was_found, first, behind);
        [group, first, g.b.select(was_found, end, all)]
    }

    /// Passes a group: the state is the next group's first row, the number of entries before the
    /// one that is looked for, and what was found.
    fn pass(
        &self,
        g: &mut Grid,
        [number, end]: [Value; 2],
        state: &[Value],
        tile: u64,
    ) -> Vec<Value> {
        let (start, left, all) = (state[0], state[1], g.b.long(self.groups.rows));
        let end = g.b.minsi(end, all);
        let end = g.b.maxsi(end, start);
        let entries = match self.over {
            Over::Rows => {
                let rows = g.b.subi(end, start);
                rounded_up(g, rows, tile)
            }
            Over::Terms => g.b.long(1),
        };
        // Once the entry is found, what is left is negative.
        let is_here = g.b.compare(Predicate::Ult, left, entries);
        let first = self.first(g, start, left, tile);
        let left = g.b.subi(left, entries);
        let mut next = vec![end, left];
        for (here, &before) in [number, first, end].into_iter().zip(&state[2..]) {
            next.push(g.b.select(is_here, here, before));
        }
        next
    }

    /// The first row of an entry, from that of its group.
    fn first(&self, g: &mut Grid, start: Value, left: Value, tile: u64) -> Value {
        match self.over {
            Over::Rows => {
                let past = g.times(left, tile);
                g.b.addi(start, past)
            }
            Over::Terms => start,
        }
    }

    /// What a row of tiles computes: the one with number `row` of result `batch`. There are `m`
    /// rows and `k` terms without groups.
    pub(super) fn place(
        &self,
        g: &mut Grid,
        [batch, row]: [Value; 2],
        [m, k]: [u64; 2],
        tile: u64,
    ) -> Place {
        let entry = match self.over {
            Over::Rows => row,
            Over::Terms => batch,
        };
        let columns = table(g, self.entries(tile));
        let [group, first, end] = columns.map(|column| g.get(column, entry));
        let none = g.b.long(0);
        match self.over {
            Over::Rows => {
                let (exists, all) = (g.below(group, self.groups.groups), g.b.long(k));
                Place {
                    matrices: [none, group, none],
                    top: first,
                    rows: Size::Found(end),
                    first: None,
                    terms: Size::Found(g.b.select(exists, all, none)),
                }
            }
            Over::Terms => Place {
                matrices: [none, none, batch],
                top: g.times(row, tile),
                rows: Size::Known(m),
                first: Some(first),
                terms: Size::Found(end),
            },
        }
    }
}

/// The columns of the table.
fn table(g: &mut Grid, entries: u64) -> [Tensor; 3] {
    [0, 1, 2].map(|i| g.scratch(i * 8 * entries, DType::I64))
}
