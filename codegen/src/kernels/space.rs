//! The space that a kernel walks through: rows and columns, and over which of them each value of a body varies.
//!
//! The widest values of a body give the axes: their dimensions, cut where any of them is cut, so that `[B,S,D]` and its
//! reshape `[B*S,D]` are B, S and D both. A value that is not the widest varies over some of the axes and is repeated along
//! the others: which, follows from the ops that it takes part in. Then neighbouring axes over which the same values vary
//! become one, the last is the columns, and the others are the rows.

use super::Step;
use super::dag::Span;
use ir::TensorType;

/// A set of axes, a bit each.
pub(super) type Axes = u64;

/// Rows and columns.
#[derive(Debug)]
pub(super) struct Space {
    /// Sizes of the axes that make up the rows, outermost first, and the columns last.
    pub(super) sizes: Vec<u64>,
    /// For each value of the body: over which axes it varies.
    varies: Vec<Axes>,
}

/// What an op does along a row or a column.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Along {
    Rows,
    Columns,
    /// Over dimensions of size 1.
    Nothing,
}

impl Space {
    /// Finds the space of a body whose values have the given types. The message says what does not fit into one.
    pub(super) fn new(steps: &[Step], types: &[TensorType], operands: usize) -> Result<Space, String> {
        let tables = tables(steps);
        let full = types.iter().enumerate().filter(|(v, _)| !tables.contains(v)).map(|(_, t)| t.numel()).max();
        let full = full.unwrap_or(1);
        let axes = axes(types.iter().filter(|t| t.numel() == full))?;
        if 60 < axes.len() {
            return Err("too many dimensions".into());
        }
        let all: Axes = (1 << axes.len()) - 1;
        let mut finder = Finder { axes: &axes, all, types, varies: vec![None; types.len()] };
        for (v, ty) in types.iter().enumerate() {
            if v < operands || tables.contains(&v) {
                // Operands are read as values of their own.
                finder.varies[v] = Some(0);
            } else if ty.numel() == full {
                finder.varies[v] = Some(all);
            } else if ty.numel() == 1 {
                finder.varies[v] = Some(0);
            }
        }
        // Each round settles a value, or is the last. What takes part in nothing wide varies as it would there.
        loop {
            while finder.round(steps, operands)? {}
            if !finder.guess()? {
                break;
            }
        }
        let varies: Option<Vec<Axes>> = finder.varies.iter().copied().collect();
        let varies = varies.ok_or("a value is repeated along the others in a way that rows and columns do not show")?;

        // Where the columns begin, if an op says so.
        let mut cut = None;
        let mut at = operands;
        for step in steps {
            if let Some((along, first)) = finder.fold(step, at)?
                && along != Along::Nothing
            {
                if cut.is_some_and(|cut| cut != first) {
                    return Err("ops combine elements of different rows".into());
                }
                cut = Some(first);
            }
            at += step.outputs;
        }
        // Neighbours that the same values vary over become one.
        let same = |i: usize| varies.iter().all(|v| (v >> i & 1) == (v >> (i + 1) & 1));
        let mut groups: Vec<(u64, Axes)> = vec![];
        for (i, &size) in axes.iter().enumerate() {
            match groups.last_mut() {
                Some(last) if same(i - 1) && cut != Some(i) => {
                    last.0 *= size;
                    last.1 |= 1 << i;
                }
                _ => groups.push((size, 1 << i)),
            }
        }
        let begins = groups.last().map(|last| last.1.trailing_zeros() as usize);
        if cut.is_some() && cut != begins {
            return Err("an operand is repeated within the rows that an op combines".into());
        }
        let varies = varies
            .iter()
            .map(|v| groups.iter().enumerate().fold(0, |set, (g, group)| set | Axes::from(v & group.1 != 0) << g))
            .collect();
        let sizes = groups.iter().map(|g| g.0).collect();
        Ok(Space { sizes, varies })
    }

    /// How many columns.
    pub(super) fn columns(&self) -> u64 {
        self.sizes[self.sizes.len() - 1]
    }
    /// How many rows.
    pub(super) fn rows(&self) -> u64 {
        self.sizes[..self.sizes.len() - 1].iter().product()
    }
    /// Over what value `v` varies.
    pub(super) fn span(&self, v: usize) -> Span {
        let last = self.sizes.len() - 1;
        Span { rows: self.varies[v] & ((1 << last) - 1) != 0, columns: self.varies[v] >> last & 1 == 1 }
    }
    /// True if value `v` has an element for each row.
    pub(super) fn each_row(&self, v: usize) -> bool {
        let last = self.sizes.len() - 1;
        let rows: Axes = (1 << last) - 1;
        self.varies[v] & rows == rows
    }
    /// Over which axes value `v` varies.
    pub(super) fn axes(&self, v: usize) -> Axes {
        self.varies[v]
    }
    /// The strides of what varies over these axes along those of the rows, in elements; 0 where it is repeated.
    pub(super) fn strides(&self, axes: Axes) -> Vec<u64> {
        let last = self.sizes.len() - 1;
        let mut stride = if axes >> last & 1 == 1 { self.columns() } else { 1 };
        let mut strides = vec![0; self.sizes.len() - 1];
        for i in (0..strides.len()).rev() {
            if axes >> i & 1 == 1 {
                strides[i] = stride;
                stride *= self.sizes[i];
            }
        }
        strides
    }
    /// What a step that combines elements goes along.
    pub(super) fn along(&self, step: &Step, x: usize, result: usize) -> Along {
        match step.op.name() {
            "sum" | "mean" | "amax" | "amin" | "any" => {
                let gone = self.varies[x] & !self.varies[result];
                let last = self.sizes.len() - 1;
                match gone {
                    0 => Along::Nothing,
                    _ if gone >> last & 1 == 1 => Along::Rows,
                    _ => Along::Columns,
                }
            }
            _ => Along::Rows,
        }
    }
}

/// Values of which single elements are read: options of optimizers, states of random numbers.
pub(super) fn tables(steps: &[Step]) -> Vec<usize> {
    let mut tables = vec![];
    for step in steps {
        let from = match step.op.name() {
            "adamw" => 4,
            "adamw_split" => 5,
            "sgd" => 2,
            "sgd_momentum" => 3,
            "dropout" => 1,
            _ => continue,
        };
        tables.extend(&step.inputs[from..]);
    }
    tables
}

/// The sizes, outermost first, into which all of these shapes can be cut.
fn axes<'a>(types: impl Iterator<Item = &'a TensorType>) -> Result<Vec<u64>, String> {
    // How many elements there are from a cut on.
    let mut cuts = std::collections::BTreeSet::from([1]);
    for ty in types {
        let mut product = 1;
        for &d in ty.shape().iter().rev() {
            product *= d;
            cuts.insert(product);
        }
    }
    let cuts: Vec<u64> = cuts.into_iter().collect();
    if cuts.windows(2).any(|pair| pair[1] % pair[0] != 0) {
        return Err("a reshape cuts rows where they were not cut".into());
    }
    let axes: Vec<u64> = cuts.windows(2).rev().map(|pair| pair[1] / pair[0]).collect();
    Ok(if axes.is_empty() { vec![1] } else { axes })
}

struct Finder<'a> {
    axes: &'a [u64],
    all: Axes,
    types: &'a [TensorType],
    varies: Vec<Option<Axes>>,
}

impl Finder<'_> {
    /// The axes of each dimension of a widest value.
    fn dims(&self, shape: &[u64]) -> Vec<Axes> {
        let mut axis = self.axes.len();
        let mut dims = vec![0; shape.len()];
        for (d, &size) in shape.iter().enumerate().rev() {
            let mut product = 1;
            while product < size {
                axis -= 1;
                product *= self.axes[axis];
                dims[d] |= 1 << axis;
            }
        }
        dims
    }
    fn settle(&mut self, v: usize, axes: Axes) -> Result<bool, String> {
        match self.varies[v] {
            None => {
                self.varies[v] = Some(axes);
                Ok(true)
            }
            Some(known) if known == axes => Ok(false),
            Some(_) => Err("a value is repeated along rows here and along columns there".into()),
        }
    }
    /// Settles what `v` varies over where it is broadcast to the widest shape `to`.
    fn broadcast(&mut self, v: usize, to: &[u64]) -> Result<bool, String> {
        let dims = self.dims(to);
        let shape = self.types[v].shape();
        let missing = to.len() - shape.len();
        let axes = shape.iter().enumerate().filter(|&(_, &d)| d != 1).fold(0, |set, (i, _)| set | dims[missing + i]);
        self.settle(v, axes)
    }
    /// Settles a value that is not, as if it were broadcast to one of the widest; true if there was one.
    fn guess(&mut self) -> Result<bool, String> {
        let types = self.types;
        let Some(v) = self.varies.iter().position(Option::is_none) else { return Ok(false) };
        let full = |w: &usize| self.varies[*w] == Some(self.all);
        let fits = |w: &usize| {
            ir::op::broadcast_shapes(types[v].shape(), types[*w].shape()).as_deref() == Ok(types[*w].shape())
        };
        match (0..types.len()).filter(full).find(fits) {
            Some(w) => self.broadcast(v, types[w].shape()),
            None => Ok(false),
        }
    }
    /// Goes through the steps; true if a value was settled.
    fn round(&mut self, steps: &[Step], operands: usize) -> Result<bool, String> {
        let types = self.types;
        let full = |v: usize, finder: &Finder<'_>| finder.varies[v] == Some(finder.all);
        let mut news = false;
        let mut at = operands;
        for step in steps {
            let results = at..at + step.outputs;
            at += step.outputs;
            match step.op.name() {
                "sum" | "mean" | "amax" | "amin" | "any" => {
                    let x = step.inputs[0];
                    if full(x, self) {
                        let dims = self.dims(types[x].shape());
                        let gone = step.op.ints("dims").iter().fold(0, |set, &d| set | dims[d as usize]);
                        news |= self.settle(results.start, self.all & !gone)?;
                    } else {
                        return Err("it combines elements of what is not whole".into());
                    }
                }
                "layer_norm" | "layer_norm_bwd" => {
                    let backward = step.op.name() == "layer_norm_bwd";
                    let x = step.inputs[usize::from(backward)];
                    if !full(x, self) {
                        return Err("it normalises what is not whole".into());
                    }
                    let shape = types[x].shape();
                    let dims = self.dims(shape);
                    let lead = shape.len() - step.op.int("dims") as usize;
                    let rows = dims[..lead].iter().fold(0, |set, d| set | d);
                    let columns = self.all & !rows;
                    if backward {
                        for &v in &step.inputs[2..4] {
                            news |= self.settle(v, rows)?;
                        }
                        for &v in &step.inputs[4..] {
                            news |= self.settle(v, columns)?;
                        }
                        let skip = usize::from(step.op.ints("mask")[0] == 1);
                        for v in results.skip(skip) {
                            news |= self.settle(v, columns)?;
                        }
                    } else {
                        for &v in &step.inputs[1..] {
                            news |= self.settle(v, columns)?;
                        }
                        for v in results.skip(1) {
                            news |= self.settle(v, rows)?;
                        }
                    }
                }
                "reshape" => {
                    let (x, y) = (step.inputs[0], results.start);
                    match (self.varies[x], self.varies[y]) {
                        (Some(axes), _) => news |= self.settle(y, axes)?,
                        (None, Some(axes)) => news |= self.settle(x, axes)?,
                        (None, None) => {}
                    }
                }
                _ => {
                    let y = results.start;
                    let inputs = step.inputs.iter().copied();
                    if full(y, self) {
                        for v in inputs.filter(|&v| 1 < types[v].numel()) {
                            if self.varies[v].is_some_and(|axes| axes == 0 || axes == self.all) {
                                continue;
                            }
                            news |= self.broadcast(v, types[y].shape())?;
                        }
                        continue;
                    }
                    // Narrower than the widest: all its values vary over the same axes, or over none.
                    let n = types[y].numel();
                    let group: Vec<usize> = inputs.chain(results).filter(|&v| 1 < types[v].numel()).collect();
                    if group.iter().any(|&v| types[v].numel() != n) {
                        return Err("it repeats a value that is itself repeated".into());
                    }
                    if let Some(axes) = group.iter().find_map(|&v| self.varies[v]) {
                        for v in group {
                            news |= self.settle(v, axes)?;
                        }
                    }
                }
            }
        }
        Ok(news)
    }
    /// What a step combines: rows or columns, and the first axis of the columns. `None` if it combines nothing.
    fn fold(&self, step: &Step, at: usize) -> Result<Option<(Along, usize)>, String> {
        let x = || step.inputs[0];
        let gone = match step.op.name() {
            "sum" | "mean" | "amax" | "amin" | "any" => {
                let kept = self.varies[at].expect("the result should have been settled");
                self.all & !kept
            }
            "softmax" | "log_softmax" | "softmax_bwd" | "log_softmax_bwd" => {
                if self.varies[x()] != Some(self.all) {
                    return Err("it combines elements of what is not whole".into());
                }
                self.dims(self.types[x()].shape())[step.op.int("dim") as usize]
            }
            "layer_norm" | "layer_norm_bwd" => {
                let shape = self.types[x()].shape();
                let lead = shape.len() - step.op.int("dims") as usize;
                self.dims(shape)[lead..].iter().fold(0, |set, d| set | d)
            }
            _ => return Ok(None),
        };
        let n = self.axes.len();
        let first = gone.trailing_zeros() as usize;
        if gone == 0 {
            return match step.op.name() {
                "sum" | "mean" | "amax" | "amin" | "any" => Ok(Some((Along::Nothing, n))),
                _ => Err("its rows have one element".into()),
            };
        }
        // The last axes, or the first.
        let sums = matches!(step.op.name(), "sum" | "mean");
        if gone == self.all & !((1 << first) - 1) {
            return Ok(Some((Along::Rows, first)));
        }
        let kept = gone.trailing_ones() as usize;
        if sums && first == 0 && gone == (1 << kept) - 1 {
            return Ok(Some((Along::Columns, kept)));
        }
        Err("it combines neither whole rows nor whole columns".into())
    }
}
