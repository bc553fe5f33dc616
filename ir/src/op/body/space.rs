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

use super::combine::{Combines, Rows, sums};
use super::{Step, View};
use crate::device::Processor;
use crate::op::{BodyError, SpaceError, broadcast_shapes};
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
    /// The readings.
    pub reads: Vec<Read>,
    /// Operands of which only single elements are read: options of optimizers, states of random
    /// numbers.
    pub tables: Vec<usize>,
    /// For each value: the axes over which it varies.
    varies: Vec<Axes>,
    /// For each value: whether it is a sum over rows. Such a value is known only after the last
    /// row.
    summed: Vec<bool>,
}

/// A reading of an operand.
#[derive(Clone, PartialEq, Debug)]
pub struct Read {
    /// The value's number.
    pub value: usize,
    /// The operand's number.
    pub operand: usize,
    /// The view of the operand that is read; none if it is read as it is.
    view: Option<View>,
    /// The places of the view's elements, once the axes are known.
    place: Option<Place>,
}

/// The places of a value's elements in its tensor, in elements.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Place {
    /// The place of the first element.
    pub first: i64,
    /// The strides along the axes of the rows; 0 where the value is repeated. Along the columns it
    /// is 1.
    pub strides: Vec<i64>,
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
        let views = views(steps, operands)?;
        if let Some(&value) = results.iter().find(|&&v| views[v].is_some()) {
            return Err(BodyError::WritesView { value }.into());
        }
        let Needed {
            mut steps,
            results,
            views,
        } = needed(steps, results, views, n);
        let viewed = n + steps.iter().map(|step| step.outputs).sum::<usize>();
        let mut types = types(&steps, operands, &views)?;
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
            .filter(|v| (**v < n || viewed <= **v) && !tables.contains(v))
        {
            let view = v.checked_sub(viewed).map(|i| &views[i]);
            let (operand, ty) = match view {
                Some(view) => (view.operand, view.ty.clone()),
                None => (*v, operands[*v].clone()),
            };
            *v = types.len();
            types.push(ty);
            reads.push(Read {
                value: *v,
                operand,
                view: view.map(|view| view.view.clone()),
                place: None,
            });
        }
        let (sizes, varies) = find(&steps, &types, &tables, n, &mut reads)?;
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
    /// The places of the elements of value `v`.
    pub fn place(&self, v: usize) -> Place {
        let read = self.reads.iter().find(|read| read.value == v);
        if let Some(place) = read.and_then(|read| read.place.clone()) {
            return place;
        }
        let axes = self.varies[v];
        let last = self.sizes.len() - 1;
        let mut stride = if axes >> last & 1 == 1 {
            self.columns() as i64
        } else {
            1
        };
        let mut strides = vec![0; self.sizes.len() - 1];
        for i in (0..strides.len()).rev() {
            if axes >> i & 1 == 1 {
                strides[i] = stride;
                stride *= self.sizes[i] as i64;
            }
        }
        Place { first: 0, strides }
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

/// A value that is a view of an operand.
#[derive(Clone)]
struct Viewed {
    operand: usize,
    view: View,
    ty: TensorType,
}

/// For each value, the view of an operand that it is. Operands as they are, and their reshapes, are
/// not among them.
fn views(steps: &[Step], operands: &[TensorType]) -> Result<Vec<Option<Viewed>>, SpaceError> {
    let n = operands.len();
    let moved = super::moved(steps, n)?;
    if moved.iter().all(Option::is_none) {
        return Ok(vec![None; moved.len()]);
    }
    let types = super::types(steps, operands)?;
    let mut all: Vec<Option<Viewed>> = Vec::with_capacity(types.len());
    all.extend(operands.iter().enumerate().map(|(operand, ty)| {
        Some(Viewed {
            operand,
            view: View::whole(ty.shape()),
            ty: ty.clone(),
        })
    }));
    for step in steps {
        let at = all.len();
        let of = step.inputs.first().and_then(|&x| all[x].clone());
        match of.filter(|_| View::is_made_by(&step.op)) {
            Some(of) => {
                let ty = types[at].clone();
                let view = of.view.then(&step.op, ty.shape());
                let operand = of.operand;
                all.push(view.map(|view| Viewed { operand, view, ty }));
            }
            // A reshape may join dimensions that are at no equal distances.
            None if moved[at].is_some() && !step.op.is_alias() => {
                return Err(SpaceError::NoStrides);
            }
            None => all.extend(vec![None; step.outputs]),
        }
    }
    for (viewed, moved) in all.iter_mut().zip(&moved) {
        viewed.take_if(|_| moved.is_none());
    }
    Ok(all)
}

/// The steps of a kernel.
struct Needed {
    /// The steps that the results need. They use views by their numbers in `views`, after the
    /// numbers of all other values.
    steps: Vec<Step>,
    /// The results' new numbers.
    results: Vec<usize>,
    views: Vec<Viewed>,
}

/// The steps that the results need, without those that make views.
fn needed(
    steps: &[Step],
    results: &[usize],
    views: Vec<Option<Viewed>>,
    operands: usize,
) -> Needed {
    let values = views.len();
    let mut wanted = vec![false; values];
    results.iter().for_each(|&v| wanted[v] = true);
    let mut at = values;
    for step in steps.iter().rev() {
        at -= step.outputs;
        if wanted[at..at + step.outputs].contains(&true) {
            wanted[at..at + step.outputs].fill(true);
            if views[at].is_none() {
                step.inputs.iter().for_each(|&v| wanted[v] = true);
            }
        }
    }
    let mut number: Vec<usize> = (0..values).collect();
    let (mut kept, mut at, mut next) = (vec![], operands, operands);
    for step in steps {
        if wanted[at] && views[at].is_none() {
            (0..step.outputs).for_each(|i| number[at + i] = next + i);
            next += step.outputs;
            kept.push(step);
        }
        at += step.outputs;
    }
    let mut read = vec![];
    for (v, view) in views.into_iter().enumerate() {
        if let Some(view) = view.filter(|_| wanted[v]) {
            number[v] = next + read.len();
            read.push(view);
        }
    }
    let renumbered = |step: &Step| Step {
        inputs: step.inputs.iter().map(|&v| number[v]).collect(),
        ..step.clone()
    };
    Needed {
        steps: kept.into_iter().map(renumbered).collect(),
        results: results.iter().map(|&v| number[v]).collect(),
        views: read,
    }
}

/// The types of the operands and of the results of all steps, which use views by their numbers
/// after these.
fn types(
    steps: &[Step],
    operands: &[TensorType],
    views: &[Viewed],
) -> Result<Vec<TensorType>, SpaceError> {
    let viewed = operands.len() + steps.iter().map(|step| step.outputs).sum::<usize>();
    let mut types: Vec<TensorType> = operands.to_vec();
    for (i, step) in steps.iter().enumerate() {
        let ty = |&v: &usize| match v.checked_sub(viewed) {
            Some(view) => &views[view].ty,
            None => &types[v],
        };
        let inputs: Vec<&TensorType> = step.inputs.iter().map(ty).collect();
        let results = super::step_types(i, step, &inputs)?;
        types.extend(results);
    }
    Ok(types)
}

/// The sizes of the axes, and the axes over which each value varies.
fn find(
    steps: &[Step],
    types: &[TensorType],
    tables: &[usize],
    operands: usize,
    reads: &mut [Read],
) -> Result<(Vec<u64>, Vec<Axes>), SpaceError> {
    // Operands are read through readings, which are separate values.
    let full = types[operands..].iter().map(TensorType::numel).max();
    let full = full.unwrap_or(1);
    let axes = axes(types[operands..].iter().filter(|t| t.numel() == full))?;
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
    for read in reads.iter_mut() {
        if let Some(view) = &read.view {
            let place = placed(view, &axes, varies[read.value]);
            read.place = Some(place.ok_or(SpaceError::NoStrides)?);
        }
    }
    merged(&axes, &varies, cut, reads)
}

/// The places of a view that varies over some of the axes, along all of them.
fn placed(view: &View, axes: &[u64], varies: Axes) -> Option<Place> {
    let own = (0..axes.len()).filter(|i| varies >> i & 1 == 1);
    let own: Vec<usize> = own.collect();
    let sizes: Vec<u64> = own.iter().map(|&i| axes[i]).collect();
    let view = view.reshaped(&sizes)?;
    let mut strides = vec![0; axes.len()];
    for (&i, dim) in own.iter().zip(&view.dims) {
        strides[i] = dim.stride;
    }
    let first = view.first;
    Some(Place { first, strides })
}

/// Merges neighbouring axes if the same values vary over them, and if views have equal strides
/// along them, but not across the start of the columns. Returns sizes, and the merged axes over
/// which each value varies.
fn merged(
    axes: &[u64],
    varies: &[Axes],
    cut: Option<usize>,
    reads: &mut [Read],
) -> Result<(Vec<u64>, Vec<Axes>), SpaceError> {
    let follows = |place: &Place, i: usize| {
        let inner = place.strides[i + 1].wrapping_mul(axes[i + 1] as i64);
        place.strides[i] == inner
    };
    let same = |i: usize| {
        let mut places = reads.iter().filter_map(|read| read.place.as_ref());
        varies.iter().all(|v| (v >> i & 1) == (v >> (i + 1) & 1)) && places.all(|p| follows(p, i))
    };
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
    for place in reads.iter_mut().filter_map(|read| read.place.as_mut()) {
        // An axis has the stride of the innermost that it was merged from.
        let inner = |group: &(u64, Axes)| place.strides[group.1.ilog2() as usize];
        let mut strides: Vec<i64> = groups.iter().map(inner).collect();
        if strides
            .pop()
            .is_some_and(|column| column != 0 && column != 1)
        {
            return Err(SpaceError::ScatteredColumns);
        }
        place.strides = strides;
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
    use super::Read;
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
        let read = |read: &Read| {
            let place = space.place(read.value);
            let strides = place.strides.iter().map(i64::to_string);
            let column = space.span(read.value).1.then(|| "c".to_string());
            let operand = match place.first {
                0 => read.operand.to_string(),
                first => format!("{}+{first}", read.operand),
            };
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
    fn views_are_read_at_their_places() {
        let of = |a: &str, types: &str, body: &str| {
            space(&format!(
                "graph g {{\n input %a : f32[{a}]\n input %b : f32[4]\n fwd - %y = fused %a, %b \
                 body={{{body}}} : f32[{types}]\n output y = %y\n}}"
            ))
        };
        let heads = "%2 = reshape %0 shape=[2,3,5,4] | %3 = permute %2 dims=[0,2,1,3]";
        assert_eq!(
            of("6,20", "2,5,3,4", &format!("{heads} | %4 = neg %3 | %4")),
            "2x5x3x4 %0:60.4.20.c"
        );
        let part = "%2 = slice %0 dim=1 end=6 start=2 step=1 | %3 = add %2, %1";
        assert_eq!(
            of("3,7", "3,4", &format!("{part} | %3")),
            "3x4 %0+2:7.c %1:0.c"
        );
        let exchanged = "%2 = reshape %0 shape=[3,2,4] | %3 = flip %2 dims=[1] | %4 = add %3, %1";
        assert_eq!(
            of("3,8", "3,2,4", &format!("{exchanged} | %4")),
            "3x2x4 %0+4:8.-4.c %1:0.0.c"
        );
        // The rows of a slice of whole rows are one row.
        let rows = "%2 = slice %0 dim=0 end=3 start=1 step=1 | %3 = neg %2 | %3";
        assert_eq!(of("4,4", "2,4", rows), "8 %0+4:c");
        let scattered = "%2 = permute %0 dims=[1,0] | %3 = neg %2 | %3";
        let error = "neighbours in a row of a view are not neighbours in its operand";
        assert_eq!(of("3,8", "8,3", scattered), error);
        let joined = "%2 = permute %0 dims=[1,0,2] | %3 = reshape %2 shape=[24]";
        let one = format!("{joined} | %4 = neg %3 | %4");
        assert_eq!(of("2,3,4", "24", &one), "3x2x4 %0:4.12.c");
        let two = format!("{joined} | %4 = flip %3 dims=[0] | %5 = neg %4 | %5");
        let error = "the elements of a view are at no equal distances";
        assert_eq!(of("2,3,4", "24", &two), error);
        let computed = "%2 = neg %0 | %3 = flip %2 dims=[0] | %4 = neg %3 | %4";
        let error = of("3,8", "3,8", computed);
        assert!(error.ends_with("flip is a view of an operand, not of a computed value"));
        let left = of("3,8", "3,8", "%2 = flip %0 dims=[0] | %2");
        assert!(left.ends_with("%2 is a view of an operand, and no kernel writes views"));
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
