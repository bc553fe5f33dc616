//! Items of an op in the order of their keys: [`Sorting`] as phases of a kernel. If keys are
//! destinations, a thread for each destination then processes its items one after the other, in
//! their own order.
//!
//! Each pass has three phases. Blocks count the digits of their tiles, a thread for each digit. One
//! block adds the counts up to places, digit by digit and tile by tile. Then blocks move their
//! items to these places.

use super::Kernel;
use super::grid::{Grid, Tensor};
use crate::mlir::{Emit, Predicate, Value};
use ir::DType;
use ir::op::sorting::{Sorting, TILE};

/// The number of items that a thread loads before it uses the first: their latencies overlap.
const TOGETHER: usize = 8;

/// Sorted items. They lie in the kernel's scratch.
#[derive(Clone, Copy)]
pub(super) struct Sorted {
    sorting: Sorting,
}

impl Sorted {
    /// Adds the phases. `key` gives an item's key. The kernel has the scratch of `sorting` before
    /// its first phase.
    pub(super) fn new(
        k: &mut Kernel<'_>,
        sorting: Sorting,
        key: impl Fn(&mut Grid, Value) -> Value,
    ) -> Sorted {
        for number in 0..sorting.passes() {
            let pass = Pass {
                sorting,
                number,
                key: &key,
            };
            pass.count(k);
            pass.add_up(k);
            pass.place(k);
        }
        Sorted { sorting }
    }

    fn arrays(&self, g: &mut Grid) -> [Tensor; 2] {
        arrays(g, &self.sorting, self.sorting.passes() - 1)
    }

    /// The key at a place.
    pub(super) fn key(&self, g: &mut Grid, at: Value) -> Value {
        let [keys, _] = self.arrays(g);
        g.get(keys, at)
    }

    /// The item at a place.
    pub(super) fn item(&self, g: &mut Grid, at: Value) -> Value {
        let [_, items] = self.arrays(g);
        g.get(items, at)
    }

    /// Whether a place is the first of its key, which is not the key for no destination.
    pub(super) fn is_first(&self, g: &mut Grid, at: Value, key: Value) -> Value {
        let (start, before) = (g.b.long(0), g.plus(at, -1));
        let before = g.b.maxsi(before, start);
        let is_start = g.equal(at, start);
        self.is_end(g, before, key, is_start)
    }

    /// Whether a place is the last of its key, which is not the key for no destination.
    pub(super) fn is_last(&self, g: &mut Grid, at: Value, key: Value) -> Value {
        let (end, after) = (g.b.long(self.sorting.items - 1), g.plus(at, 1));
        let after = g.b.minsi(after, end);
        let is_end = g.equal(at, end);
        self.is_end(g, after, key, is_end)
    }

    fn is_end(&self, g: &mut Grid, neighbour: Value, key: Value, is_border: Value) -> Value {
        let other = self.key(g, neighbour);
        let differs = g.b.compare(Predicate::Ne, other, key);
        let ends = g.b.ori(differs, is_border);
        let exists = g.below(key, self.sorting.keys);
        g.b.andi(ends, exists)
    }

    /// Folds what `load` gives for the items with the key at place `first`, in their order.
    pub(super) fn fold(
        &self,
        g: &mut Grid,
        [first, key]: [Value; 2],
        start: Value,
        load: impl Fn(&mut Grid, Value) -> Value,
        add: impl Fn(&mut Grid, Value, Value) -> Value,
    ) -> Value {
        let end = g.b.long(self.sorting.items - 1);
        let [no, yes] = [0, 1].map(|bit| g.b.long(bit));
        let folded = g.repeat_while(Predicate::Ne, no, &[yes, first, start], |g, values| {
            let (mut places, mut takes) = (vec![], vec![]);
            for i in 0..TOGETHER {
                let at = g.plus(values[1], i as i64);
                let place = g.b.minsi(at, end);
                let (other, exists) = (self.key(g, place), g.below(at, self.sorting.items));
                let same = g.equal(other, key);
                places.push(place);
                takes.push(g.b.andi(same, exists));
            }
            let items: Vec<Value> = places.iter().map(|&place| self.item(g, place)).collect();
            let numbers: Vec<Value> = items.iter().map(|&item| load(g, item)).collect();
            let mut sum = values[2];
            for (&take, &x) in takes.iter().zip(&numbers) {
                let with = add(g, sum, x);
                sum = g.b.select(take, with, sum);
            }
            let goes_on = g.b.select(takes[TOGETHER - 1], yes, no);
            vec![goes_on, g.plus(values[1], TOGETHER as i64), sum]
        });
        folded[2]
    }
}

/// The keys and the items after a pass.
fn arrays(g: &mut Grid, sorting: &Sorting, pass: u32) -> [Tensor; 2] {
    let (bytes, dtype) = (sorting.items * sorting.dtype().bytes(), sorting.dtype());
    [0, 1].map(|which| g.scratch((2 * u64::from(pass % 2) + which) * bytes, dtype))
}

/// How many items with each digit the tiles have; then, where the first of them goes. Tile by tile.
fn counts(g: &mut Grid, sorting: &Sorting) -> Tensor {
    let dtype = sorting.dtype();
    g.scratch(4 * sorting.items * dtype.bytes(), dtype)
}

/// A pass over the items.
struct Pass<'a, K> {
    sorting: Sorting,
    number: u32,
    /// The key of an item.
    key: &'a K,
}

impl<K: Fn(&mut Grid, Value) -> Value> Pass<'_, K> {
    fn threads(&self) -> u32 {
        self.sorting.digits() as u32
    }

    /// The key at a place before the pass.
    fn before(&self, g: &mut Grid, at: Value) -> Value {
        match self.number {
            0 => (self.key)(g, at),
            number => {
                let [keys, _] = arrays(g, &self.sorting, number - 1);
                g.get(keys, at)
            }
        }
    }

    /// The item at a place before the pass.
    fn item(&self, g: &mut Grid, at: Value) -> Value {
        match self.number {
            0 => at,
            number => {
                let [_, items] = arrays(g, &self.sorting, number - 1);
                g.get(items, at)
            }
        }
    }

    /// The digit of what is at a place before the pass.
    fn digit(&self, g: &mut Grid, at: Value) -> Value {
        let (number, place) = match self.number.checked_sub(self.sorting.key_passes()) {
            None => (self.before(g, at), self.number),
            Some(place) => {
                let item = self.item(g, at);
                let [line, _] = g.divided(item, self.sorting.length());
                (line, place)
            }
        };
        let [from, _] = g.divided(number, 1 << (place * self.sorting.digit_bits()));
        let [_, digit] = g.divided(from, self.sorting.digits());
        digit
    }

    /// Writes the digits of a tile to shared memory. Returns them, the tile's first place and the
    /// number of its items.
    fn digits(&self, g: &mut Grid, tile: Value) -> (Tensor, Value, Value) {
        let digits = g.shared(TILE, DType::I32);
        let first = g.times(tile, TILE);
        let (all, most) = (g.b.long(self.sorting.items), g.b.long(TILE));
        let left = g.b.subi(all, first);
        let n = g.b.minsi(left, most);
        self.together(g, n, |g, i| {
            let at = g.b.addi(first, i);
            let digit = self.digit(g, at);
            g.put(digits, i, digit);
        });
        g.b.barrier();
        (digits, first, n)
    }

    /// A loop over `0..n` that the block's threads share.
    fn together(&self, g: &mut Grid, n: Value, body: impl FnOnce(&mut Grid, Value)) {
        let step = g.b.long(self.threads().into());
        g.repeat([g.thread, n, step], &[], |g, i, _| {
            body(g, i);
            vec![]
        });
    }

    /// A loop over a tile's digits. A thread gets the places of its own digit, and a number that
    /// rises with them.
    fn own(
        &self,
        g: &mut Grid,
        digits: Tensor,
        n: Value,
        start: Value,
        body: impl FnOnce(&mut Grid, Value, Value),
    ) -> Value {
        let bounds = [g.b.long(0), n, g.b.long(1)];
        let last = g.repeat(bounds, &[start], |g, i, number| {
            let digit = g.get(digits, i);
            let is_own = g.equal(digit, g.thread);
            g.when(is_own, |g| body(g, i, number[0]));
            let next = g.plus(number[0], 1);
            vec![g.b.select(is_own, next, number[0])]
        });
        last[0]
    }

    /// The place of this thread's digit in a tile's counts.
    fn place_of(&self, g: &mut Grid, tile: Value) -> Value {
        let first = g.times(tile, self.sorting.digits());
        g.b.addi(first, g.thread)
    }

    fn count(&self, k: &mut Kernel<'_>) {
        let tiles = self.sorting.tiles();
        k.phase(self.threads(), tiles, |g| {
            g.parts(tiles, |g, tile| {
                let (digits, _, n) = self.digits(g, tile);
                let zero = g.b.long(0);
                let count = self.own(g, digits, n, zero, |_, _, _| ());
                let (counts, place) = (counts(g, &self.sorting), self.place_of(g, tile));
                g.put(counts, place, count);
                // The next tile's digits take the place of these.
                g.b.barrier();
            });
        });
    }

    fn add_up(&self, k: &mut Kernel<'_>) {
        let tiles = self.sorting.tiles();
        k.phase(self.threads(), tiles.min(1), |g| {
            g.parts(1, |g, _| {
                let totals = g.shared(self.sorting.digits(), DType::I64);
                let (counts, zero) = (counts(g, &self.sorting), g.b.long(0));
                let total = g.count(tiles, &[zero], |g, tile, sum| {
                    let place = self.place_of(g, tile);
                    let count = g.get(counts, place);
                    vec![g.add(sum[0], count)]
                });
                g.put(totals, g.thread, total[0]);
                g.b.barrier();
                let bounds = [zero, g.thread, g.b.long(1)];
                let start = g.repeat(bounds, &[zero], |g, lower, sum| {
                    let total = g.get(totals, lower);
                    vec![g.add(sum[0], total)]
                });
                g.count(tiles, &start, |g, tile, sum| {
                    let place = self.place_of(g, tile);
                    let count = g.get(counts, place);
                    g.put(counts, place, sum[0]);
                    vec![g.add(sum[0], count)]
                });
            });
        });
    }

    fn place(&self, k: &mut Kernel<'_>) {
        let (tiles, dtype) = (self.sorting.tiles(), self.sorting.dtype());
        k.phase(self.threads(), tiles, |g| {
            g.parts(tiles, |g, tile| {
                let (digits, first, n) = self.digits(g, tile);
                let places = g.shared(TILE, dtype);
                let (counts, place) = (counts(g, &self.sorting), self.place_of(g, tile));
                let start = g.get(counts, place);
                self.own(g, digits, n, start, |g, i, place| g.put(places, i, place));
                g.b.barrier();
                self.together(g, n, |g, i| {
                    let (at, to) = (g.b.addi(first, i), g.get(places, i));
                    let key = self.before(g, at);
                    let item = self.item(g, at);
                    let [keys, items] = arrays(g, &self.sorting, self.number);
                    g.put(keys, to, key);
                    g.put(items, to, item);
                });
                g.b.barrier();
            });
        });
    }
}
