//! Two tables over the lines of a schedule: which lines are above a target, and the most bytes
//! alive.

/// Lines `from..to` and a number of bytes.
pub(crate) type Stretch = (usize, usize, u64);

/// Which lines have more bytes alive than the target.
pub(crate) struct Above {
    /// How many lines before each line are above the target.
    before: Vec<u32>,
}

impl Above {
    /// `live` has the bytes alive at each line.
    pub(crate) fn new(live: &[u64], target: u64) -> Above {
        let mut count = 0;
        let mut before = vec![0];
        before.extend(live.iter().map(|&bytes| {
            count += u32::from(bytes > target);
            count
        }));
        Above { before }
    }

    /// True if one of lines `from..to` is above the target.
    pub(crate) fn any(&self, from: usize, to: usize) -> bool {
        let last = self.before.len() - 1;
        from < to && self.before[from.min(last)] < self.before[to.min(last)]
    }
}

/// Bytes alive at each line: a segment tree with range add and range maximum.
pub(crate) struct MaxTree {
    leaves: usize,
    max: Vec<i64>,
    add: Vec<i64>,
}

/// A node of the tree and the lines `lo..hi` below it.
#[derive(Clone, Copy)]
struct Subtree {
    node: usize,
    lo: usize,
    hi: usize,
}

impl Subtree {
    fn halves(self) -> [Subtree; 2] {
        let Subtree { node, lo, hi } = self;
        let mid = (lo + hi) / 2;
        let left = Subtree {
            node: 2 * node,
            lo,
            hi: mid,
        };
        let right = Subtree {
            node: 2 * node + 1,
            lo: mid,
            hi,
        };
        [left, right]
    }
}

impl MaxTree {
    pub(crate) fn new(values: &[u64]) -> MaxTree {
        let leaves = values.len().next_power_of_two().max(1);
        let mut max = vec![0; 2 * leaves];
        for (i, &value) in values.iter().enumerate() {
            max[leaves + i] = value as i64;
        }
        for node in (1..leaves).rev() {
            max[node] = max[2 * node].max(max[2 * node + 1]);
        }
        MaxTree {
            leaves,
            max,
            add: vec![0; 2 * leaves],
        }
    }

    /// Subtracts the bytes of the stretches.
    pub(crate) fn free(&mut self, stretches: &[Stretch]) {
        for &(from, to, bytes) in stretches {
            self.add_below(self.root(), from, to, -(bytes as i64));
        }
    }

    /// Adds the bytes of the stretches again.
    pub(crate) fn restore(&mut self, stretches: &[Stretch]) {
        for &(from, to, bytes) in stretches {
            self.add_below(self.root(), from, to, bytes as i64);
        }
    }

    /// True if no line of the stretches is above the target.
    pub(crate) fn is_within(&self, stretches: &[Stretch], target: u64) -> bool {
        stretches
            .iter()
            .all(|&(from, to, _)| self.max(from, to) <= target)
    }

    /// The maximum over all lines. Those beyond the last are 0.
    pub(crate) fn most(&self) -> u64 {
        self.max[1].max(0) as u64
    }

    fn max(&self, from: usize, to: usize) -> u64 {
        let max = self.max_below(self.root(), from, to);
        max.unwrap_or(0).max(0) as u64
    }

    fn root(&self) -> Subtree {
        Subtree {
            node: 1,
            lo: 0,
            hi: self.leaves,
        }
    }

    fn add_below(&mut self, tree: Subtree, from: usize, to: usize, amount: i64) {
        let Subtree { node, lo, hi } = tree;
        if to <= lo || hi <= from {
            return;
        }
        if from <= lo && hi <= to {
            self.max[node] += amount;
            self.add[node] += amount;
            return;
        }
        for half in tree.halves() {
            self.add_below(half, from, to, amount);
        }
        self.max[node] = self.add[node] + self.max[2 * node].max(self.max[2 * node + 1]);
    }

    fn max_below(&self, tree: Subtree, from: usize, to: usize) -> Option<i64> {
        let Subtree { node, lo, hi } = tree;
        if to <= lo || hi <= from {
            return None;
        }
        if from <= lo && hi <= to {
            return Some(self.max[node]);
        }
        let [left, right] = tree.halves().map(|half| self.max_below(half, from, to));
        left.max(right).map(|max| max + self.add[node])
    }
}
