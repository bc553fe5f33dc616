//! The rows and columns over which a kernel runs.
//!
//! Before: steps and the types of their operands. After: a [`Space`], if one exists. It says over
//! which axes each value varies. A generated kernel runs over such a space row by row, and reads
//! operands at their places.
//!
//! The widest values of a body give the axes. These are their dimensions, split wherever one of the
//! values splits them: `[B,S,D]` and its reshape `[B*S,D]` both have the axes B, S and D. A
//! narrower value varies over some of the axes and is repeated along the others. The ops that use
//! it determine which. Then neighbouring axes are merged if the same values vary over them. The
//! last axis is the columns, and the others are the rows.

use super::Step;
use super::combine::{Combines, Rows, sums};
use crate::device::Processor;
use crate::op::{SpaceError, broadcast_shapes};
use crate::types::TensorType;

/// A set of axes, one bit per axis.
pub type Axes = u64;

/// Rows and columns, and the values that are computed over them.
///
/// An operand may be read in several ways, for example along rows by one step and along columns by
/// another. So each reading is a separate value. The values are the operands, the steps' results in
/// order, and the readings.
#[derive(Clone, PartialEq, Debug)]
pub struct Space {
    /// Sizes of the axes that make up the rows, outermost first, and the columns last.
    pub sizes: Vec<u64>,
    /// The steps that the results need. Their inputs are readings instead of operands.
    pub steps: Vec<Step>,
    /// The results' numbers.
    pub results: Vec<usize>,
    /// Types of all values.
    pub types: Vec<TensorType>,
    /// The readings: value and operand.
    pub reads: Vec<(usize, usize)>,
    /// Operands of which only single elements are read: options of optimizers, states of random
    /// numbers.
    pub tables: Vec<usize>,
    /// For each value: the axes over which it varies.
    varies: Vec<Axes>,
    /// For each value: whether it is a sum over rows. Such a value is known only after the last
    /// row.
    summed: Vec<bool>,
}

/// The most parts of sums over rows: each has a row of partial sums. A GPU with a hundred
/// multiprocessors or more reaches its memory's bandwidth if each of them runs several blocks.
const fn most_sums(processor: Processor) -> u64 {
    match processor {
        Processor::Cpu => 32,
        Processor::Gpu => 512,
    }
}
/// The fewest rows of such a part, except the last.
const SUMMED_ROWS: u64 = 16;

/// For sums over rows, the rows are cut into parts: the number of rows in each, and the number of
/// parts. Each part has its own sums, which are added up in order.
pub(crate) fn sum_parts(rows: u64, processor: Processor) -> (u64, u64) {
    let most = most_sums(processor);
    let each = rows.div_ceil((rows / SUMMED_ROWS).clamp(1, most)).max(1);
    (each, rows.div_ceil(each))
}

/// What an op combines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Along {
    /// Each row's elements become one.
    Rows,
    /// Each column's elements become one.
    Columns,
    /// Over dimensions of size 1, or over none.
    Nothing,
}

impl Space {
    /// The space of the steps that the results need, for operands of these types. The error says
    /// what does not fit.
    pub fn new(
        steps: &[Step],
        results: &[usize],
        operands: &[TensorType],
    ) -> Result<Space, SpaceError> {
        let n = operands.len();
        let (mut steps, results) = needed(steps, results, n);
        let mut types = super::types(&steps, operands)?;
        if types.iter().any(|ty| ty.numel() == 0) {
            return Err(SpaceError::NoElements);
        }
        let tables = tables(&steps);
        if tables.iter().any(|&v| n <= v) {
            return Err(SpaceError::OptionsComputed);
        }
        let mut reads = vec![];
        for v in steps
            .iter_mut()
            .flat_map(|step| &mut step.inputs)
            .filter(|v| **v < n && !tables.contains(v))
        {
            reads.push((types.len(), *v));
            types.push(operands[*v].clone());
            *v = types.len() - 1;
        }
        let (sizes, varies) = find(&steps, &types, &tables, n)?;
        let mut space = Space {
            sizes,
            steps,
            results,
            types,
            reads,
            tables,
            varies,
            summed: vec![],
        };
        space.summed = space.sums(n)?;
        match space
            .results
            .iter()
            .find(|&&v| !space.summed[v] && !space.each_row(v))
        {
            Some(&value) => Err(SpaceError::SameInRows { value }),
            None => Ok(space),
        }
    }
    /// Which values are sums over rows; an error if a step uses one.
    fn sums(&self, operands: usize) -> Result<Vec<bool>, SpaceError> {
        let mut summed = vec![false; self.types.len()];
        let mut at = operands;
        for step in &self.steps {
            if let Some(&value) = step.inputs.iter().find(|&&v| summed[v]) {
                let op = step.op.name();
                return Err(SpaceError::UsesSum { op, value });
            }
            match Combines::of(&step.op) {
                Combines::Rows {
                    kind: Rows::Backward { mask },
                    ..
                } => {
                    let skip = usize::from(mask[0] == 1);
                    summed[at + skip..at + step.outputs].fill(true);
                }
                _ => summed[at] = self.along(step, at) == Along::Columns,
            }
            at += step.outputs;
        }
        Ok(summed)
    }
    /// For sums over rows, the number of rows in each part, and the number of parts.
    pub fn parts(&self, processor: Processor) -> (u64, u64) {
        sum_parts(self.rows(), processor)
    }
    /// Bytes of the parts' sums for one result: a multiple of 64. Sums of half precision and of
    /// small integers have 4 bytes.
    pub fn partial_bytes(&self, v: usize, processor: Processor) -> u64 {
        let bytes = if self.types[v].dtype().bytes() == 8 {
            8
        } else {
            4
        };
        (self.parts(processor).1 * self.columns() * bytes).next_multiple_of(64)
    }
    /// Bytes of all parts' sums.
    pub fn scratch_bytes(&self, processor: Processor) -> u64 {
        self.results
            .iter()
            .filter(|&&v| self.summed[v])
            .map(|&v| self.partial_bytes(v, processor))
            .sum()
    }
    /// The number of columns.
    pub fn columns(&self) -> u64 {
        self.sizes[self.sizes.len() - 1]
    }
    /// The number of rows.
    pub fn rows(&self) -> u64 {
        self.sizes[..self.sizes.len() - 1].iter().product()
    }
    /// Whether value `v` differs from row to row, and from column to column.
    pub fn span(&self, v: usize) -> (bool, bool) {
        let last = self.sizes.len() - 1;
        (
            self.varies[v] & ((1 << last) - 1) != 0,
            self.varies[v] >> last & 1 == 1,
        )
    }
    /// True if value `v` has an element for each row.
    fn each_row(&self, v: usize) -> bool {
        let last = self.sizes.len() - 1;
        let rows: Axes = (1 << last) - 1;
        self.varies[v] & rows == rows
    }
    /// The axes over which value `v` varies.
    pub fn axes(&self, v: usize) -> Axes {
        self.varies[v]
    }
    /// The strides along the axes of the rows, in elements, of a value that varies over `axes`; 0
    /// where it is repeated.
    pub fn strides(&self, axes: Axes) -> Vec<u64> {
        let last = self.sizes.len() - 1;
        let mut stride = if axes >> last & 1 == 1 {
            self.columns()
        } else {
            1
        };
        let mut strides = vec![0; self.sizes.len() - 1];
        for i in (0..strides.len()).rev() {
            if axes >> i & 1 == 1 {
                strides[i] = stride;
                stride *= self.sizes[i];
            }
        }
        strides
    }
    /// What a step that combines elements combines.
    pub fn along(&self, step: &Step, result: usize) -> Along {
        match Combines::of(&step.op) {
            Combines::Dims(_) => {
                let gone = self.varies[step.inputs[0]] & !self.varies[result];
                let last = self.sizes.len() - 1;
                match gone {
                    0 => Along::Nothing,
                    _ if gone >> last & 1 == 1 => Along::Rows,
                    _ => Along::Columns,
                }
            }
            Combines::Line { .. } | Combines::Rows { .. } => Along::Rows,
            Combines::Places | Combines::Nothing => Along::Nothing,
        }
    }
}

/// The steps that the results need, and the results' new numbers.
fn needed(steps: &[Step], results: &[usize], operands: usize) -> (Vec<Step>, Vec<usize>) {
    let values = operands + steps.iter().map(|step| step.outputs).sum::<usize>();
    let mut wanted = vec![false; values];
    results.iter().for_each(|&v| wanted[v] = true);
    let mut at = values;
    for step in steps.iter().rev() {
        at -= step.outputs;
        if wanted[at..at + step.outputs].contains(&true) {
            wanted[at..at + step.outputs].fill(true);
            step.inputs.iter().for_each(|&v| wanted[v] = true);
        }
    }
    let mut number: Vec<usize> = (0..values).collect();
    let (mut kept, mut at, mut next) = (vec![], operands, operands);
    for step in steps {
        if wanted[at] {
            (0..step.outputs).for_each(|i| number[at + i] = next + i);
            next += step.outputs;
            kept.push(Step {
                inputs: step.inputs.iter().map(|&v| number[v]).collect(),
                ..step.clone()
            });
        }
        at += step.outputs;
    }
    (kept, results.iter().map(|&v| number[v]).collect())
}

/// The sizes of the axes, and the axes over which each value varies.
fn find(
    steps: &[Step],
    types: &[TensorType],
    tables: &[usize],
    operands: usize,
) -> Result<(Vec<u64>, Vec<Axes>), SpaceError> {
    let full = types
        .iter()
        .enumerate()
        .filter(|(v, _)| !tables.contains(v))
        .map(|(_, t)| t.numel())
        .max();
    let full = full.unwrap_or(1);
    let axes = axes(types.iter().filter(|t| t.numel() == full))?;
    if 60 < axes.len() {
        return Err(SpaceError::ManyDimensions);
    }
    let all: Axes = (1 << axes.len()) - 1;
    let mut finder = Finder {
        axes: &axes,
        all,
        types,
        varies: vec![None; types.len()],
    };
    for (v, ty) in types.iter().enumerate() {
        if v < operands || tables.contains(&v) {
            // Operands are read through readings, which are separate values.
            finder.varies[v] = Some(0);
        } else if ty.numel() == full {
            finder.varies[v] = Some(all);
        } else if ty.numel() == 1 {
            finder.varies[v] = Some(0);
        }
    }
    // Each round settles a value, or is the last. A value that no wide value depends on is settled
    // as if it were broadcast.
    loop {
        while finder.round(steps, operands)? {}
        if !finder.guess()? {
            break;
        }
    }
    let varies: Option<Vec<Axes>> = finder.varies.iter().copied().collect();
    let varies = varies.ok_or(SpaceError::Unsettled)?;

    let cut = finder.cut(steps, operands)?;
    merged(&axes, &varies, cut)
}

/// Merges neighbouring axes if the same values vary over them, but not across the start of the
/// columns. Returns sizes, and the merged axes over which each value varies.
fn merged(
    axes: &[u64],
    varies: &[Axes],
    cut: Option<usize>,
) -> Result<(Vec<u64>, Vec<Axes>), SpaceError> {
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
        return Err(SpaceError::RepeatedInRows);
    }
    let varies = varies
        .iter()
        .map(|v| {
            groups
                .iter()
                .enumerate()
                .fold(0, |set, (g, group)| set | Axes::from(v & group.1 != 0) << g)
        })
        .collect();
    Ok((groups.iter().map(|g| g.0).collect(), varies))
}

/// Values of which only single elements are read: options of optimizers, states of random numbers.
pub(super) fn tables(steps: &[Step]) -> Vec<usize> {
    let mut tables = vec![];
    for step in steps {
        if let Some(first) = step.op.facts().options_from {
            tables.extend(step.inputs.iter().skip(first));
        }
    }
    tables
}

/// The sizes, outermost first, into which all of these shapes can be cut.
fn axes<'a>(types: impl Iterator<Item = &'a TensorType>) -> Result<Vec<u64>, SpaceError> {
    // The number of elements after each cut.
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
        return Err(SpaceError::CutRows);
    }
    let axes: Vec<u64> = cuts
        .windows(2)
        .rev()
        .map(|pair| pair[1] / pair[0])
        .collect();
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
    fn settle(&mut self, v: usize, axes: Axes) -> Result<bool, SpaceError> {
        match self.varies[v] {
            None => {
                self.varies[v] = Some(axes);
                Ok(true)
            }
            Some(known) if known == axes => Ok(false),
            Some(_) => Err(SpaceError::RowsAndColumns),
        }
    }
    /// Settles the axes of `v`, which is broadcast to the widest shape `to`.
    fn broadcast(&mut self, v: usize, to: &[u64]) -> Result<bool, SpaceError> {
        let dims = self.dims(to);
        let shape = self.types[v].shape();
        let missing = to
            .len()
            .checked_sub(shape.len())
            .ok_or(SpaceError::MoreDimensions)?;
        let axes = shape
            .iter()
            .enumerate()
            .filter(|&(_, &d)| d != 1)
            .fold(0, |set, (i, _)| set | dims[missing + i]);
        self.settle(v, axes)
    }
    /// Settles a value that is not settled yet, as if it were broadcast to a widest value. True if
    /// one was settled.
    fn guess(&mut self) -> Result<bool, SpaceError> {
        let types = self.types;
        let Some(v) = self.varies.iter().position(Option::is_none) else {
            return Ok(false);
        };
        let full = |w: &usize| self.varies[*w] == Some(self.all);
        let fits = |w: &usize| {
            broadcast_shapes(types[v].shape(), types[*w].shape())
                .is_ok_and(|shape| shape == types[*w].shape())
        };
        match (0..types.len()).filter(full).find(fits) {
            Some(w) => self.broadcast(v, types[w].shape()),
            None => Ok(false),
        }
    }
    /// Processes all steps; true if a value was settled.
    fn round(&mut self, steps: &[Step], operands: usize) -> Result<bool, SpaceError> {
        let mut news = false;
        let mut at = operands;
        for step in steps {
            news |= self.step(step, at)?;
            at += step.outputs;
        }
        Ok(news)
    }
    fn is_full(&self, v: usize) -> bool {
        self.varies[v] == Some(self.all)
    }
    /// Settles what a step determines about its operands and results. `at` is its first result.
    fn step(&mut self, step: &Step, at: usize) -> Result<bool, SpaceError> {
        match Combines::of(&step.op) {
            Combines::Dims(reduction) => {
                let x = step.inputs[0];
                if !self.is_full(x) {
                    return Err(SpaceError::CombinesParts);
                }
                let dims = self.dims(self.types[x].shape());
                let gone = reduction.dims.iter();
                let gone = gone.fold(0, |set, &d| set | dims[d as usize]);
                self.settle(at, self.all & !gone)
            }
            Combines::Rows {
                dims,
                operand,
                kind,
            } => self.normalisation(step, at, dims, operand, kind),
            Combines::Places => self.places(step, at),
            _ if step.op.is_alias() => {
                let (x, y) = (step.inputs[0], at);
                match (self.varies[x], self.varies[y]) {
                    (Some(axes), _) => self.settle(y, axes),
                    (None, Some(axes)) => self.settle(x, axes),
                    (None, None) => Ok(false),
                }
            }
            Combines::Line { .. } | Combines::Nothing => self.elements(step, at),
        }
    }
    fn normalisation(
        &mut self,
        step: &Step,
        at: usize,
        dims: i64,
        operand: usize,
        kind: Rows<'_>,
    ) -> Result<bool, SpaceError> {
        let x = step.inputs[operand];
        if !self.is_full(x) {
            return Err(SpaceError::NormalisesParts);
        }
        let shape = self.types[x].shape();
        let axes = self.dims(shape);
        let lead = shape.len() - dims as usize;
        let rows = axes[..lead].iter().fold(0, |set, d| set | d);
        let columns = self.all & !rows;

        let results = at..at + step.outputs;
        let mut news = false;
        match kind {
            Rows::Forward => {
                for &v in &step.inputs[1..] {
                    news |= self.settle(v, columns)?;
                }
                for v in results.skip(1) {
                    news |= self.settle(v, rows)?;
                }
            }
            Rows::Backward { mask } => {
                for &v in &step.inputs[2..4] {
                    news |= self.settle(v, rows)?;
                }
                for &v in &step.inputs[4..] {
                    news |= self.settle(v, columns)?;
                }
                for v in results.skip(usize::from(mask[0] == 1)) {
                    news |= self.settle(v, columns)?;
                }
            }
        }
        Ok(news)
    }
    /// A step whose operands have an element for each row of its result, or a single one.
    fn places(&mut self, step: &Step, at: usize) -> Result<bool, SpaceError> {
        if !self.is_full(at) {
            return Err(SpaceError::CombinesParts);
        }
        let types = self.types;
        let columns = self.last_dim(at);
        let mut news = false;
        for &v in step.inputs.iter().filter(|&&v| 1 < types[v].numel()) {
            news |= self.settle(v, self.all & !columns)?;
        }
        Ok(news)
    }
    /// The axes of a widest value's last dimension.
    fn last_dim(&self, v: usize) -> Axes {
        let dims = self.dims(self.types[v].shape());
        dims.last().copied().unwrap_or(0)
    }
    /// A step whose operands are broadcast to its results.
    fn elements(&mut self, step: &Step, at: usize) -> Result<bool, SpaceError> {
        let types = self.types;
        let mut news = false;
        let inputs = step.inputs.iter().copied();
        if self.is_full(at) {
            for v in inputs.filter(|&v| 1 < types[v].numel()) {
                if self.varies[v].is_some_and(|axes| axes == 0 || axes == self.all) {
                    continue;
                }
                news |= self.broadcast(v, types[at].shape())?;
            }
            return Ok(news);
        }
        // For a step that is narrower than the widest, all values vary over the same axes, or over
        // none.
        let n = types[at].numel();
        let group: Vec<usize> = inputs
            .chain(at..at + step.outputs)
            .filter(|&v| 1 < types[v].numel())
            .collect();
        if group.iter().any(|&v| types[v].numel() != n) {
            return Err(SpaceError::RepeatedTwice);
        }
        if let Some(axes) = group.iter().find_map(|&v| self.varies[v]) {
            for v in group {
                news |= self.settle(v, axes)?;
            }
        }
        Ok(news)
    }
    /// The axis at which the columns begin, if a step determines it. All such steps should agree.
    fn cut(&self, steps: &[Step], operands: usize) -> Result<Option<usize>, SpaceError> {
        let mut cut = None;
        let mut at = operands;
        for step in steps {
            if let Some(first) = self.columns(step, at)? {
                if cut.is_some_and(|cut| cut != first) {
                    return Err(SpaceError::DifferentRows);
                }
                cut = Some(first);
            }
            at += step.outputs;
        }
        Ok(cut)
    }
    /// The first axis of the columns for a step that combines whole rows or whole columns. `None`
    /// if it combines nothing.
    fn columns(&self, step: &Step, at: usize) -> Result<Option<usize>, SpaceError> {
        let x = step.inputs.first().copied();
        let shape = |x: Option<usize>| self.types[x.expect("it should have operands")].shape();
        let gone = match Combines::of(&step.op) {
            Combines::Nothing => return Ok(None),
            Combines::Places => self.last_dim(at),
            Combines::Dims(_) => {
                let kept = self.varies[at].expect("the result should have been settled");
                self.all & !kept
            }
            Combines::Line { dim } => {
                if x.is_some_and(|x| self.varies[x] != Some(self.all)) {
                    return Err(SpaceError::CombinesParts);
                }
                self.dims(shape(x))[dim as usize]
            }
            Combines::Rows { dims, .. } => {
                let shape = shape(x);
                let lead = shape.len() - dims as usize;
                self.dims(shape)[lead..].iter().fold(0, |set, d| set | d)
            }
        };
        if gone == 0 {
            return match Combines::of(&step.op) {
                Combines::Dims(_) => Ok(None),
                _ => Err(SpaceError::SingleElements),
            };
        }
        // The last axes, or the first.
        let first = gone.trailing_zeros() as usize;
        if gone == self.all & !((1 << first) - 1) {
            return Ok(Some(first));
        }
        let kept = gone.trailing_ones() as usize;
        if sums(&step.op) && first == 0 && gone == (1 << kept) - 1 {
            return Ok(Some(kept));
        }
        Err(SpaceError::NeitherRowsNorColumns)
    }
}

#[cfg(test)]
mod tests {
    use crate::text::parse_graph;

    /// The space of the only node of a graph, as text: sizes, then each reading's strides along the
    /// rows, and `c` if it has an element for each column; or the error.
    fn space(text: &str) -> String {
        let graph = match parse_graph(text) {
            Ok(graph) => graph,
            Err(e) => return e.message[e.message.find(": ").map_or(0, |at| at + 2)..].into(),
        };
        let node = &graph.nodes[graph.order[0]];
        let body = node.op.body().expect("a fused op should have a body");
        let types: Vec<_> = node.inputs.iter().map(|&v| &graph.values[v].ty).collect();
        let space = body
            .space(&types)
            .expect("the shape rule should have asked for the space");
        let read = |&(v, operand): &(usize, usize)| {
            let strides = space
                .strides(space.axes(v))
                .into_iter()
                .map(|stride| stride.to_string());
            let column = space.span(v).1.then(|| "c".to_string());
            format!(
                "%{operand}:{}",
                strides.chain(column).collect::<Vec<_>>().join(".")
            )
        };
        let sizes: Vec<String> = space.sizes.iter().map(u64::to_string).collect();
        let reads: Vec<String> = space.reads.iter().map(read).collect();
        format!("{} {}", sizes.join("x"), reads.join(" "))
    }

    #[test]
    fn operands_are_broadcast() {
        let of = |b: &str| {
            space(&format!(
                "graph g {{\n input %a : f32[2,3,4]\n input %b : f32[{b}]\n fwd - %y = fused %a, \
                 %b body={{%2 = add %0, %1 | %2}} : f32[2,3,4]\n output y = %y\n}}"
            ))
        };
        assert_eq!(of("2,3,4"), "24 %0:c %1:c");
        assert_eq!(of("4"), "6x4 %0:4.c %1:0.c");
        assert_eq!(of("3,4"), "2x12 %0:12.c %1:0.c");
        assert_eq!(of("3,1"), "2x3x4 %0:12.4.c %1:0.1");
        assert_eq!(of("2,1,4"), "2x3x4 %0:12.4.c %1:4.0.c");
        assert_eq!(of("2,3,1"), "6x4 %0:4.c %1:1");
        assert_eq!(of("1"), "24 %0:c %1:");
    }

    #[test]
    fn rows_and_sums() {
        let head = "graph g {\n input %a : f32[2,3,4]\n input %w : f32[4]\n";
        let of = |types: &str, body: &str| {
            space(&format!(
                "{head} fwd - %y = fused %a, %w body={{{body}}} : {types}\n output y = %y\n}}"
            ))
        };
        let normed = "%2, %3, %4 = layer_norm %0, %1 dims=1 eps=1e-5 | %5 = mul %2, %3";
        assert_eq!(
            of("f32[2,3,4]", &format!("{normed} | %5")),
            "6x4 %0:4.c %1:0.c"
        );
        let mean = "%2 = mean %0 dims=[2] keepdim=true | %3 = add_scalar %2 value=1.0";
        assert_eq!(
            of("f32[2,3,4]", &format!("{mean} | %4 = sub %0, %3 | %4")),
            "6x4 %0:4.c %0:4.c"
        );
        let sum = "%2 = mul %0, %1 | %3 = sum %2 dims=[0,1] keepdim=false";
        assert_eq!(of("f32[4]", &format!("{sum} | %3")), "6x4 %0:4.c %1:0.c");
        let used = of("f32[4]", &format!("{sum} | %4 = add %3, %1 | %4"));
        assert_eq!(
            used,
            "add uses %3, which is a sum over rows and known after the last one alone"
        );
        let other = of("f32[2,4]", "%2 = sum %0 dims=[1] keepdim=false | %2");
        assert_eq!(other, "it combines neither whole rows nor whole columns");
        let flat = "%2 = reshape %0 shape=[6,4] | %3 = add %2, %1 | %3";
        assert_eq!(of("f32[6,4]", flat), "6x4 %0:4.c %1:0.c");
    }

    #[test]
    fn a_row_is_not_read_as_columns() {
        // Row sums [3] of [3,3] are added to [3,3] as if they were a row. The graph is right, but
        // no kernel can compute it in one pass over rows.
        let text = "graph g {\n input %a : f32[3,3]\n fwd - %y = fused %a body={%1 = sum %0 \
            dims=[1] keepdim=false | %2 = add %0, %1 | %2} : f32[3,3]\n output y = %y\n}";
        assert_eq!(
            space(text),
            "a value is repeated along rows here and along columns there"
        );
    }
}
