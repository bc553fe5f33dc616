//! Convolution and its gradients. They are computed as products of weights and patches, see
//! [`columns`] and [`weights`]; those of few channels have direct loops, see [`direct`]. One
//! spatial dimension is treated as two, the first of size 1.

mod banded;
mod bands;
mod columns;
mod depthwise;
mod direct;
mod patches;
mod weights;

use super::math::Float;
use super::product::{Tile, Tiled};
use super::signature::{Checked, Signature, ensure, is_float};
use super::wide::floats;
use super::{Cut, ELEMENTS, Ran};
use crate::kernel::{Call, Window};
use artifact::DType;
use columns::{Grid, Product, Results, SUMS, Weights};
use patches::{Line, Patches};
use std::ops::Range;

// --- checks ---

/// Output size of a window along each spatial dimension.
pub(super) fn window(
    input: &[u64],
    kernel: &[u64],
    [stride, padding, dilation]: [&[i64]; 3],
    ceil: bool,
) -> Result<Vec<u64>, String> {
    let mut out = vec![];
    for i in 0..input.len() {
        // Sizes are below 2^50, the other numbers below 2^28 and 2^32: nothing overflows.
        let reach = dilation[i] * (kernel[i] as i64 - 1) + 1;
        let size = input[i] as i64;
        let room = size + 2 * padding[i] - reach;
        ensure(0 <= room, || {
            format!(
                "a window of {reach} does not fit into {size} + 2 * {}",
                padding[i]
            )
        })?;
        let mut n = if ceil {
            (room as u64).div_ceil(stride[i] as u64) as i64
        } else {
            room / stride[i]
        } + 1;
        // With `ceil`, the last window must start inside the input or the padding before it.
        if ceil && size + padding[i] <= (n - 1) * stride[i] {
            n -= 1;
        }
        out.push(n as u64);
    }
    Ok(out)
}
fn convolution_shape(s: &Signature<'_>, x: usize, w: usize) -> Result<Vec<u64>, String> {
    s.has_kernel(x, is_float)?;
    s.expect_dtype(x, w)?;
    let (xs, ws) = (s.shape(x), s.shape(w));
    ensure(xs.len() == ws.len() && (3..=4).contains(&xs.len()), || {
        "rank should be 3 or 4".into()
    })?;
    let (n, groups) = (xs.len() - 2, s.int("groups")?);
    let fits = 1 <= groups
        && Some(xs[1]) == ws[1].checked_mul(groups as u64)
        && ws[0].is_multiple_of(groups as u64)
        && ws[2..].iter().all(|k| (1..1 << 28).contains(k));
    ensure(fits, || "channels, groups or kernel do not fit".into())?;
    let windows = [
        s.list("stride", n, 1)?,
        s.list("padding", n, 0)?,
        s.list("dilation", n, 1)?,
    ];
    let mut shape = vec![xs[0], ws[0]];
    shape.extend(window(&xs[2..], &ws[2..], windows, false)?);
    Ok(shape)
}
pub(super) fn check_convolution(s: &Signature<'_>) -> Checked {
    let shape = convolution_shape(s, 0, 1)?;
    if s.ins.len() == 3 {
        s.expect_shape(2, &shape[1..2])?;
        s.expect_dtype(2, 0)?;
    }
    s.results(&[(s.dtype(0), &shape)])
}
pub(super) fn check_convolution_bwd(s: &Signature<'_>) -> Checked {
    let shape = convolution_shape(s, 1, 2)?;
    s.expect_shape(0, &shape)?;
    s.expect_dtype(0, 1)?;
    let dtype = s.dtype(0);
    s.masked_results(&[
        (dtype, s.shape(1)),
        (dtype, s.shape(2)),
        (dtype, &shape[1..2]),
    ])
}
// --- convolution ---

/// One spatial dimension: output `o` reads input `o * stride + k * dilation - padding` for each tap
/// `k`.
#[derive(Clone, Copy)]
pub(super) struct Axis {
    pub(super) input: usize,
    pub(super) output: usize,
    pub(super) taps: usize,
    pub(super) stride: usize,
    pub(super) padding: usize,
    pub(super) dilation: usize,
}

impl Axis {
    /// The outputs in `lo..hi` whose tap `k` is inside the input.
    pub(super) fn outputs(&self, k: usize, lo: usize, hi: usize) -> std::ops::Range<usize> {
        let tap = k * self.dilation;
        // o * stride + tap - padding in 0..input.
        let first = self.padding.saturating_sub(tap).div_ceil(self.stride);
        let end = (self.input + self.padding)
            .saturating_sub(tap)
            .div_ceil(self.stride);
        let (first, end) = (first.max(lo), end.min(hi));
        first..end.max(first)
    }
    /// The input that output `o` reads at tap `k`. The tap must be inside.
    pub(super) fn input(&self, o: usize, k: usize) -> usize {
        o * self.stride + k * self.dilation - self.padding
    }
}

/// The inputs of a dimension whose numbers have the same remainder modulo the stride. The same taps
/// read them, so their gradient is a convolution of stride 1 over the result's gradient.
#[derive(Clone, Copy, Debug)]
struct Phase {
    remainder: usize,
    /// The number of inputs.
    places: usize,
    /// Taps `first + i * step` read them, for `i` below `taps`.
    first: usize,
    step: usize,
    taps: usize,
    /// Input `j` of the phase is read by output `j + offset - i * back`.
    offset: isize,
    back: isize,
}

impl Phase {
    fn new(axis: &Axis, remainder: usize) -> Phase {
        let (stride, dilation) = (axis.stride as isize, axis.dilation as isize);
        let at = (remainder + axis.padding) as isize;
        let common = common_divisor(axis.stride, axis.dilation);
        // Sizes are below 2^50, the other numbers below 2^32: nothing overflows.
        let step = axis.stride / common;
        let fits = |&k: &usize| (at - k as isize * dilation) % stride == 0;
        let first = (0..axis.taps.min(step)).find(fits);
        Phase {
            remainder,
            places: (axis.input.saturating_sub(remainder)).div_ceil(axis.stride),
            first: first.unwrap_or(0),
            step,
            taps: first.map_or(0, |first| (axis.taps - first).div_ceil(step)),
            offset: (at - first.unwrap_or(0) as isize * dilation) / stride,
            back: (axis.dilation / common) as isize,
        }
    }
    /// The phases of a dimension that have inputs.
    fn all(axis: Axis) -> impl Iterator<Item = Phase> {
        (0..axis.stride.min(axis.input)).map(move |remainder| Phase::new(&axis, remainder))
    }
    /// The elements that it reads of a dimension of the result's gradient.
    fn line(&self, axis: &Axis) -> Line {
        Line {
            size: axis.output,
            places: self.places,
            stride: 1,
            taps: self.taps,
            offset: self.offset,
            step: -self.back,
        }
    }
}

/// The greatest common divisor of two positive numbers.
fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// The sizes of a convolution.
struct Sizes {
    batch: usize,
    groups: usize,
    /// Channels of a group: read and written.
    inputs: usize,
    outputs: usize,
    y: Axis,
    x: Axis,
}

impl Sizes {
    fn new(call: &Call<'_>, image: &[usize], weight: &[usize], output: &[usize]) -> Sizes {
        let (stride, padding, dilation) = (
            call.ints("stride"),
            call.ints("padding"),
            call.ints("dilation"),
        );
        let axis = |d: usize| Axis {
            input: image[d + 2],
            output: output[d + 2],
            taps: weight[d + 2],
            stride: stride[d] as usize,
            padding: padding[d] as usize,
            dilation: dilation[d] as usize,
        };
        let one = Axis {
            input: 1,
            output: 1,
            taps: 1,
            stride: 1,
            padding: 0,
            dilation: 1,
        };
        let groups = call.int("groups") as usize;
        let (y, x) = if image.len() == 4 {
            (axis(0), axis(1))
        } else {
            (one, axis(0))
        };
        Sizes {
            batch: image[0],
            groups,
            inputs: weight[1],
            outputs: weight[0] / groups,
            y,
            x,
        }
    }
    /// The start of row `y` of channel `o` of group `g` of a result.
    fn output_row(&self, b: usize, g: usize, o: usize, y: usize) -> usize {
        (((b * self.groups + g) * self.outputs + o) * self.y.output + y) * self.x.output
    }
}

impl Sizes {
    /// Elements of a channel of the result, and of the image.
    fn planes(&self) -> (usize, usize) {
        (self.y.output * self.x.output, self.y.input * self.x.input)
    }
    /// The number of weights of an output channel.
    fn depth(&self) -> usize {
        self.inputs * self.y.taps * self.x.taps
    }
    fn of_forward(call: &Call<'_>) -> Sizes {
        Sizes::new(call, call.in_shape(0), call.in_shape(1), call.out_shape(0))
    }
    fn of_backward(call: &Call<'_>) -> Sizes {
        Sizes::new(call, call.in_shape(1), call.in_shape(2), call.in_shape(0))
    }
    /// Columns of a product: places of the result in all images, for each group.
    fn columns(&self) -> usize {
        (self.groups * self.batch * self.planes().0).max(1)
    }
    /// Whether so many units share the rows of a product and not its columns. Then each part packs
    /// its own weights and all patches. A number of a patch takes longer to pack than a weight.
    fn shares_rows(&self, (rows, columns): (usize, usize), units: usize) -> bool {
        columns * PATCH < rows && (self.groups * rows).is_multiple_of(units)
    }
}

/// Makes the workspaces of a thread.
pub(super) fn prepare(call: &Call<'_>) -> Ran {
    fn room<R: Tiled>() {
        R::with_room(|_| {});
        R::with_space(SUMS, |_| {});
    }
    match call.in_dtype(0) {
        DType::F64 => room::<f64>(),
        _ => room::<f32>(),
    }
    Ok(())
}

/// The smallest number of columns of a product that a thread should compute: the columns of a tile.
const LEAST_COLUMNS: usize = 64;
/// A number of a patch takes as long to pack as so many weights.
const PATCH: usize = 4;
/// The smallest number of rows of a product that a thread should compute.
const LEAST_ROWS: usize = 32;
/// Products of fewer columns have fewer parts, because each part reads all weights.
const MANY_COLUMNS: usize = 4096;

/// The units are columns of the product, or its rows.
pub(super) fn cut(call: &Call<'_>) -> Cut {
    let s = Sizes::of_forward(call);
    let (units, others, least) = units(&s);
    // At least about ten microseconds of work.
    let long = (ELEMENTS * 32).div_ceil((s.depth() * others).max(1));
    Cut {
        units,
        align: 1,
        grain: least.max(long),
        per_thread: if s.columns() < MANY_COLUMNS { 2 } else { 4 },
    }
}

/// The units of the forward: columns of the products, or rows. Then the number of the others in a
/// group, and the fewest units for a thread.
fn units(s: &Sizes) -> (usize, usize, usize) {
    let (rows, columns) = (s.outputs, s.batch * s.planes().0);
    match s.shares_rows((rows, columns), s.groups * rows) {
        true => (s.groups * rows, columns, LEAST_ROWS),
        false => (s.columns(), s.outputs, LEAST_COLUMNS),
    }
}

pub(super) fn convolution(call: &Call<'_>) -> Ran {
    floats!(call.out_dtype(0), T => forward::<T>(call));
    Ok(())
}

fn forward<T: Float>(call: &Call<'_>) {
    let s = Sizes::of_forward(call);
    let (x, w) = (call.input::<T>(0), call.input::<T>(1));
    let bias = (call.n_inputs() == 3).then(|| call.input::<T>(2));
    let (tile, units) = (T::Wide::tile(), 0..units(&s).0);
    // Panics if the kernel's cut has another number of units.
    call.part(units.end);
    let lines = (Line::forward(&s.y), Line::forward(&s.x));
    let product = |group: usize| Product {
        tile: &tile,
        rows: s.outputs,
        weights: Weights::new(&s, w, group, None),
        patches: Patches::new(&s, x, (group, s.inputs), lines),
        bias: bias.map(|bias| &bias[group * s.outputs..][..s.outputs]),
        grid: Grid::whole(s.y.output, s.x.output),
        plane: group * s.batch,
    };
    whole(call, &s, lines, (0, units), &product);
}

/// Computes result `j`, whose planes are products with a column for each of their elements.
fn whole<'a, T: Float>(
    call: &Call<'_>,
    s: &Sizes,
    lines: (Line, Line),
    (j, units): (usize, Range<usize>),
    product: &dyn Fn(usize) -> Product<'a, T>,
) {
    let shape = [s.groups, s.batch, lines.0.places * lines.1.places];
    // All groups have the same sizes.
    let first = product(0);
    if s.is_depthwise() {
        let shape = [1, s.batch * s.groups, shape[2]];
        let mut planes = call.output_planes::<T>(j, units, shape);
        depthwise::products(product, lines, &mut planes, (s.groups, shape[2]));
    } else if s.shares_rows((first.rows, shape[1] * shape[2]), units.len()) {
        let sizes = (first.rows, shape[2]);
        by_rows(call, s, (j, units), sizes, &|group, run| {
            run(product(group))
        });
    } else if let Some(banded) = first.banded() {
        let mut planes = call.output_planes::<T>(j, units, shape);
        for (group, columns) in by_group(planes.part(), shape[1] * shape[2]) {
            product(group).by_bands(banded, columns, &mut planes);
        }
    } else if first.is_direct() {
        let mut planes = call.output_planes::<T>(j, units, shape);
        for (group, columns) in by_group(planes.part(), shape[1] * shape[2]) {
            product(group).directly(columns, &mut planes);
        }
    } else if first.in_place() {
        let mut planes = call.output_planes::<T::Wide>(j, units, shape);
        for (group, columns) in by_group(planes.part(), shape[1] * shape[2]) {
            product(group).run((0..first.rows, columns), Results::There(&mut planes));
        }
    } else {
        let mut planes = call.output_planes::<T>(j, units, shape);
        for (group, columns) in by_group(planes.part(), shape[1] * shape[2]) {
            product(group).run((0..first.rows, columns), Results::Stored(&mut planes));
        }
    }
}

/// Runs something with each product of a group.
type EachProduct<'a, 'b, T> = dyn Fn(usize, &mut dyn FnMut(Product<'a, T>)) + 'b;

/// Computes some rows of the products of all groups.
fn by_rows<T: Float>(
    call: &Call<'_>,
    s: &Sizes,
    (j, units): (usize, Range<usize>),
    (rows, plane): (usize, usize),
    products: &EachProduct<'_, '_, T>,
) {
    // Each row of an image is a plane.
    let shape = [s.groups * rows, s.batch, plane];
    let mut planes = call.output_planes::<T>(j, units, shape);
    let (part, of_row) = (planes.part(), (s.batch * plane).max(1));
    for (group, rows) in by_group(part.start / of_row..part.end / of_row, rows) {
        products(group, &mut |product| {
            let columns = 0..product.patches.columns();
            product.run((rows.clone(), columns), Results::Rows(&mut planes));
        });
    }
}

/// The groups that have columns of a part, and these columns within the group, which has `all`.
fn by_group(part: Range<usize>, all: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let groups = match part.is_empty() {
        true => 0..0,
        false => part.start / all..part.end.div_ceil(all),
    };
    groups.map(move |group| {
        let first = group * all;
        let columns = part.start.max(first) - first..part.end.min(first + all) - first;
        (group, columns)
    })
}

/// The number of units of each of the backward's two products. Threads take several at once.
const SHARES: usize = 64;

/// The units that compute dx, and the units that compute dw and db. Both are products with the same
/// number of multiplications.
fn units_bwd(call: &Call<'_>) -> [Range<usize>; 2] {
    let mask = call.ints("mask");
    let dx = if mask[0] == 1 { SHARES } else { 0 };
    let dw = if mask[1] + mask[2] > 0 { SHARES } else { 0 };
    [0..dx, dx..dx + dw]
}

pub(super) fn cut_bwd(call: &Call<'_>) -> Cut {
    let s = Sizes::of_backward(call);
    let units = units_bwd(call)[1].end;
    let columns = s.columns();
    let multiplications = columns * s.outputs * s.depth() / SHARES;
    Cut {
        units,
        align: 1,
        grain: (ELEMENTS * 16).div_ceil(multiplications.max(1)).min(units),
        per_thread: if columns < MANY_COLUMNS { 2 } else { 4 },
    }
}

pub(super) fn convolution_bwd(call: &Call<'_>) -> Ran {
    floats!(call.in_dtype(0), T => backward::<T>(call));
    Ok(())
}

fn backward<T: Float>(call: &Call<'_>) {
    let mask = call.ints("mask");
    let result = |i: usize| (mask[i] == 1).then(|| mask[..i].iter().sum::<i64>() as usize);
    let s = Sizes::of_backward(call);
    let (dy, x, w) = (call.input::<T>(0), call.input::<T>(1), call.input::<T>(2));
    let [of_dx, of_dw] = units_bwd(call);
    // Panics if the kernel's cut has another number of units.
    call.part(of_dw.end);

    if let Some(j) = result(0) {
        backward_input(call, &s, (j, of_dx), dy, w);
    }
    if let Some(j) = result(1) {
        backward_weights(call, &s, (j, of_dw.clone()), dy, x);
    }
    if let Some(j) = result(2) {
        let (channels, db) = call.output_of::<T>(j, of_dw, s.groups * s.outputs);
        backward_bias(&s, dy, channels, db);
    }
}

/// The gradient of the input: for each phase, a product of its weights and patches of dy.
fn backward_input<T: Float>(
    call: &Call<'_>,
    s: &Sizes,
    (j, units): (usize, Range<usize>),
    dy: &[T],
    w: &[T],
) {
    let tile = T::Wide::tile();
    let plane = s.planes().1;
    let lines = |[y, x]: [Phase; 2]| (y.line(&s.y), x.line(&s.x));
    if (s.y.stride, s.x.stride) == (1, 1) {
        let phases = [Phase::new(&s.y, 0), Phase::new(&s.x, 0)];
        let grid = Grid::whole(s.y.input, s.x.input);
        let product = |group| input_product(s, &tile, (dy, w), group, phases, grid);
        return whole(call, s, lines(phases), (j, units), &product);
    }

    let grid = |y: Phase, x: Phase| Grid {
        places: (y.places, x.places),
        first: (y.remainder, x.remainder),
        step: (s.y.stride, s.x.stride),
        width: s.x.input,
    };
    let product = |group, y, x| input_product(s, &tile, (dy, w), group, [y, x], grid(y, x));
    let phases = || Phase::all(s.y).flat_map(|y| Phase::all(s.x).map(move |x| (y, x)));
    if s.is_depthwise() {
        let mut planes = call.output_planes::<T>(j, units, [1, s.batch * s.groups, plane]);
        for (y, x) in phases() {
            let product = |group| product(group, y, x);
            depthwise::products(&product, lines([y, x]), &mut planes, (s.groups, plane));
        }
        return;
    }
    let columns = s.batch * plane / (s.y.stride * s.x.stride);
    if s.shares_rows((s.inputs, columns), units.len()) {
        return by_rows(call, s, (j, units), (s.inputs, plane), &|group, run| {
            phases().for_each(|(y, x)| run(product(group, y, x)));
        });
    }
    let shape = [s.groups, s.batch, plane];
    let mut planes = call.output_planes::<T>(j, units, shape);
    for (group, elements) in by_group(planes.part(), shape[1] * shape[2]) {
        for (y, x) in phases() {
            let product = product(group, y, x);
            let before = |element| product.grid.columns_before(element, plane);
            let columns = before(elements.start)..before(elements.end);
            if let Some(banded) = product.banded() {
                product.by_bands(banded, columns, &mut planes);
            } else if product.is_direct() {
                product.directly(columns, &mut planes);
            } else {
                product.run((0..s.inputs, columns), Results::Stored(&mut planes));
            }
        }
    }
}

fn input_product<'a, T: Float>(
    s: &Sizes,
    tile: &'a Tile<T::Wide>,
    (dy, w): (&'a [T], &'a [T]),
    group: usize,
    phases: [Phase; 2],
    grid: Grid,
) -> Product<'a, T> {
    let lines = (phases[0].line(&s.y), phases[1].line(&s.x));
    Product {
        tile,
        rows: s.inputs,
        weights: Weights::new(s, w, group, Some(phases)),
        patches: Patches::new(s, dy, (group, s.outputs), lines),
        bias: None,
        grid,
        plane: group * s.batch,
    }
}

/// The gradient of the weights.
fn backward_weights<T: Float>(
    call: &Call<'_>,
    s: &Sizes,
    (j, units): (usize, Range<usize>),
    dy: &[T],
    x: &[T],
) {
    let tile = T::Wide::tile();
    let lines = (Line::forward(&s.y), Line::forward(&s.x));
    let gradients = |group| weights::Gradients {
        tile: &tile,
        patches: Patches::new(s, x, (group, s.inputs), lines),
        dy,
        channels: (s.groups * s.outputs, s.outputs),
        first: group * s.outputs,
        plane: s.planes().0,
    };
    let compute = |group, part: (_, Range<usize>), mut to: Window<'_, T>| {
        if part.1.is_empty() {
            // There are no channels.
            return;
        }
        let gradients = gradients(group);
        if let Some(banded) = gradients.banded() {
            gradients.by_bands(banded, part, &mut to);
        } else if gradients.is_direct() {
            gradients.directly(part, &mut to);
        } else {
            gradients.run(part, &mut to);
        }
    };
    let depth = s.depth();
    if s.is_depthwise() {
        let mut planes = call.output_planes::<T>(j, units, [s.groups, 1, depth]);
        depthwise::gradients(&gradients, lines, &mut planes, s.batch);
    } else if depth < s.outputs {
        // Units share the output channels, so that each of these is read by one.
        let (channels, mut dw) = call.output_of::<T>(j, units, s.groups * s.outputs);
        for (group, outputs) in by_group(channels, s.outputs) {
            let ours = dw.split_off_mut(..outputs.len() * depth);
            let ours = ours.expect("each channel should have weights");
            let to = Window::new(ours, outputs.len(), depth);
            compute(group, (outputs, 0..depth), to);
        }
    } else {
        // Units share the weights of an output channel.
        let mut planes = call.output_planes::<T>(j, units, [s.groups, 1, depth]);
        for (group, weights) in by_group(planes.part(), depth) {
            let to = planes.window(group, 0..s.outputs, weights.clone());
            compute(group, (0..s.outputs, weights), to);
        }
    }
}

/// The gradient of the bias: sums over images and places, in f64.
fn backward_bias<T: Float>(s: &Sizes, dy: &[T], channels: Range<usize>, db: &mut [T]) {
    let plane = s.planes().0;
    for (c, db) in channels.zip(db) {
        let (g, o) = (c / s.outputs, c % s.outputs);
        let sum: f64 = (0..s.batch)
            .map(|b| total(&dy[s.output_row(b, g, o, 0)..][..plane]))
            .sum();
        *db = T::cast_f64(sum);
    }
}

/// A sum in several lanes: the order of additions is fixed.
fn total<T: Float>(xs: &[T]) -> f64 {
    /// Enough for vector registers.
    const LANES: usize = 16;
    let mut lanes = [0.0; LANES];
    let (whole, rest) = xs.as_chunks::<LANES>();
    for part in whole {
        for (lane, &x) in lanes.iter_mut().zip(part) {
            *lane += x.f64();
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += x.f64();
    }
    lanes.iter().sum()
}
