//! Walking tensors by strides, with arrays on the stack. Dimensions of size 1 are dropped, and
//! neighbours are merged if their strides allow it. So the innermost dimension, which kernels
//! process as a slice, is long.

use super::signature::MAX_RANK;

/// A nest of loops over up to [`MAX_RANK`] dimensions with `N` offsets, each with its own strides.
#[derive(Clone, Copy)]
pub(super) struct Nest<const N: usize> {
    rank: usize,
    sizes: [usize; MAX_RANK],
    strides: [[isize; N]; MAX_RANK],
}

impl<const N: usize> Nest<N> {
    pub(super) fn new() -> Nest<N> {
        Nest {
            rank: 0,
            sizes: [1; MAX_RANK],
            strides: [[0; N]; MAX_RANK],
        }
    }
    /// Adds a dimension inside the others.
    pub(super) fn push(&mut self, size: usize, strides: [isize; N]) {
        if size == 1 {
            return;
        }
        if let Some(last) = self.rank.checked_sub(1) {
            let merges = (0..N).all(|i| self.strides[last][i] == strides[i] * size as isize);
            if merges {
                self.sizes[last] *= size;
                self.strides[last] = strides;
                return;
            }
        }
        self.sizes[self.rank] = size;
        self.strides[self.rank] = strides;
        self.rank += 1;
    }
    /// The number of points.
    pub(super) fn points(&self) -> usize {
        self.sizes[..self.rank].iter().product()
    }
    /// The offsets of point `i`.
    pub(super) fn point(&self, mut i: usize) -> [isize; N] {
        let mut offsets = [0; N];
        for d in (0..self.rank).rev() {
            let at = (i % self.sizes[d]) as isize;
            i /= self.sizes[d];
            (0..N).for_each(|k| offsets[k] += at * self.strides[d][k]);
        }
        offsets
    }
    /// Removes the innermost dimension and returns its size and strides. A nest of one point gives
    /// size 1.
    pub(super) fn pop(&mut self) -> (usize, [isize; N]) {
        match self.rank.checked_sub(1) {
            Some(last) => {
                self.rank = last;
                (self.sizes[last], self.strides[last])
            }
            None => (1, [0; N]),
        }
    }
    /// The strides of the innermost dimension; zeros if there is none.
    pub(super) fn inner_strides(&self) -> [isize; N] {
        self.rank
            .checked_sub(1)
            .map_or([0; N], |last| self.strides[last])
    }
    /// Calls `f` with the offsets of each point, the last dimension running fastest.
    pub(super) fn each(&self, start: [isize; N], f: impl FnMut([isize; N])) {
        self.each_here(start, f);
    }
    /// The same in the calling function, for the instructions that it may use.
    #[inline(always)]
    pub(super) fn each_here(&self, start: [isize; N], mut f: impl FnMut([isize; N])) {
        if self.points() == 0 {
            return;
        }
        let mut at = [0; MAX_RANK];
        let mut offsets = start;
        loop {
            f(offsets);
            let mut d = self.rank;
            loop {
                let Some(next) = d.checked_sub(1) else { return };
                d = next;
                at[d] += 1;
                if at[d] < self.sizes[d] {
                    (0..N).for_each(|i| offsets[i] += self.strides[d][i]);
                    break;
                }
                let back = self.sizes[d] as isize - 1;
                at[d] = 0;
                (0..N).for_each(|i| offsets[i] -= self.strides[d][i] * back);
            }
        }
    }
}

/// Row-major strides of a shape.
pub(super) fn contiguous(shape: &[usize]) -> [isize; MAX_RANK] {
    let mut strides = [0; MAX_RANK];
    let mut stride = 1;
    for (d, &size) in shape.iter().enumerate().rev() {
        strides[d] = stride;
        stride *= size as isize;
    }
    strides
}

/// The product of sizes.
pub(super) fn count(shape: &[usize]) -> usize {
    shape.iter().product()
}

/// Before, at and after dimension `dim`: the tensor as three dimensions.
pub(super) fn around(shape: &[usize], dim: usize) -> (usize, usize, usize) {
    (count(&shape[..dim]), shape[dim], count(&shape[dim + 1..]))
}

/// An operand's elements in the order of a result to whose shape it broadcasts.
pub(super) struct Broadcast {
    /// True if this is the operand's own order.
    pub(super) whole: bool,
    rank: usize,
    sizes: [usize; MAX_RANK],
    strides: [usize; MAX_RANK],
}

impl Broadcast {
    pub(super) fn new(from: &[usize], to: &[usize]) -> Broadcast {
        let mut nest = Nest::<1>::new();
        let own = contiguous(from);
        for (d, &size) in to.iter().enumerate() {
            let stride = match (d + from.len()).checked_sub(to.len()) {
                Some(i) if from[i] != 1 => own[i],
                _ => 0,
            };
            nest.push(size, [stride]);
        }
        let mut strides = [0; MAX_RANK];
        (0..nest.rank).for_each(|d| strides[d] = nest.strides[d][0] as usize);
        let whole = nest.rank == 0 || (nest.rank == 1 && strides[0] == 1);
        Broadcast {
            whole,
            rank: nest.rank,
            sizes: nest.sizes,
            strides,
        }
    }
    /// Splits the elements `at..at + n` of the result into runs: calls `f` with a range of the `n`,
    /// the operand's offset at its start, and true if the operand's elements follow each other,
    /// false if one repeats.
    pub(super) fn runs(
        &self,
        at: usize,
        n: usize,
        mut f: impl FnMut(std::ops::Range<usize>, usize, bool),
    ) {
        if n == 0 {
            return;
        }
        let Some(last) = self.rank.checked_sub(1) else {
            return f(0..n, 0, false);
        };
        let mut coordinates = [0; MAX_RANK];
        let (mut rest, mut offset) = (at, 0);
        for d in (0..self.rank).rev() {
            coordinates[d] = rest % self.sizes[d];
            rest /= self.sizes[d];
            offset += coordinates[d] * self.strides[d];
        }
        let mut done = 0;
        loop {
            let len = (self.sizes[last] - coordinates[last]).min(n - done);
            f(done..done + len, offset, self.strides[last] != 0);
            done += len;
            if done == n {
                return;
            }
            offset -= coordinates[last] * self.strides[last];
            coordinates[last] = 0;
            for d in (0..last).rev() {
                coordinates[d] += 1;
                offset += self.strides[d];
                if coordinates[d] < self.sizes[d] {
                    break;
                }
                offset -= coordinates[d] * self.strides[d];
                coordinates[d] = 0;
            }
        }
    }
}
