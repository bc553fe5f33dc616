//! Shapes, parts, tensors put together, and sums.

use super::{Fold, Folding, indices, mapped, picked, place, small};
use crate::builder::SMALL;
use crate::tensor::{Elements, Numbers};
use ir::DType;
use lower::wrap;

pub(super) const OPS: &[(&str, Fold)] = &[
    ("Shape", shape),
    ("Size", |f| {
        let n = f.types.first().copied().flatten()?.numel();
        Some(vec![Numbers::ints(
            DType::I64,
            &[],
            vec![i64::try_from(n).ok()?],
        )?])
    }),
    ("Reshape", reshape),
    ("Flatten", flatten),
    ("Squeeze", squeeze),
    ("Unsqueeze", unsqueeze),
    ("Transpose", transpose),
    ("Expand", expand),
    ("Tile", tile),
    ("Slice", slice),
    ("Gather", gather),
    ("GatherND", gather_nd),
    ("Concat", concat),
    ("Split", split),
    ("Range", range),
    ("ConstantOfShape", constant_of_shape),
    ("NonZero", non_zero),
    ("Trilu", triangle),
    ("CumSum", running_sum),
    ("ReduceSum", |f| reduce(f, i64::checked_add, |a, b| a + b)),
    ("ReduceProd", |f| reduce(f, i64::checked_mul, |a, b| a * b)),
    ("ReduceMax", |f| reduce(f, |a, b| Some(a.max(b)), f64::max)),
    ("ReduceMin", |f| reduce(f, |a, b| Some(a.min(b)), f64::min)),
];

fn shape(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let shape = f.types.first().copied().flatten()?.shape();
    let n = shape.len() as i64;
    let bound = |name: &str, default: i64| {
        let at = f.attributes.int(name).unwrap_or(default);
        (if at < 0 { at.saturating_add(n) } else { at }).clamp(0, n) as usize
    };
    let (start, end) = (bound("start", 0), bound("end", n));
    let part = shape.get(start..end.max(start))?;
    let sizes: Vec<i64> = part.iter().map(|&d| d as i64).collect();
    Some(vec![Numbers::ints(
        DType::I64,
        &[sizes.len() as u64],
        sizes,
    )?])
}

fn as_shape(sizes: &[i64]) -> Option<Vec<u64>> {
    sizes.iter().map(|&d| u64::try_from(d).ok()).collect()
}

fn reshaped(x: &Numbers, shape: &[u64]) -> Option<Vec<Numbers>> {
    Some(vec![Numbers::of(x.ty.dtype(), shape, x.elements.clone())?])
}

fn reshape(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let (x, mut sizes) = (f.at(0)?, f.ints(1)?.to_vec());
    if f.attributes.int("allowzero").unwrap_or(0) == 0 {
        for (i, size) in sizes.iter_mut().enumerate().filter(|(_, size)| **size == 0) {
            *size = *x.ty.shape().get(i)? as i64;
        }
    }
    let known: i64 = sizes
        .iter()
        .filter(|&&d| d != -1)
        .try_fold(1i64, |n, &d| n.checked_mul(d))?;
    for size in sizes.iter_mut().filter(|size| **size == -1) {
        *size = (x.ty.numel() as i64).checked_div(known)?;
    }
    reshaped(x, &as_shape(&sizes)?)
}

fn flatten(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let x = f.at(0)?;
    let n = x.ty.rank();
    let axis = f.attributes.int("axis").unwrap_or(1);
    let axis = if axis == n as i64 {
        n
    } else {
        wrap(axis, n).ok()?
    };
    let (rows, columns) = x.ty.shape().split_at(axis);
    reshaped(x, &[lower::count(rows).ok()?, lower::count(columns).ok()?])
}

fn squeeze(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let x = f.at(0)?;
    let axes = f.axes(1, x.ty.rank())?;
    let is_kept = |&(d, size): &(usize, u64)| match &axes {
        Some(axes) => !axes.contains(&d),
        None => size != 1,
    };
    let shape = x.ty.shape().iter().copied().enumerate();
    reshaped(
        x,
        &shape
            .filter(is_kept)
            .map(|(_, size)| size)
            .collect::<Vec<u64>>(),
    )
}

fn unsqueeze(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let x = f.at(0)?;
    let n = if f.has(1) {
        f.ints(1)?.len()
    } else {
        f.attributes.ints("axes")?.len()
    };
    let mut shape = x.ty.shape().to_vec();
    for axis in f.axes(1, shape.len() + n)?? {
        if axis > shape.len() {
            return None;
        }
        shape.insert(axis, 1);
    }
    reshaped(x, &shape)
}

fn transpose(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let x = f.at(0)?;
    let n = x.ty.rank();
    let order: Vec<usize> = match f.attributes.ints("perm") {
        Some(perm) => perm
            .iter()
            .map(|&d| wrap(d, n).ok())
            .collect::<Option<_>>()?,
        None => (0..n).rev().collect(),
    };
    let is_order = order.len() == n && (0..n).all(|d| order.contains(&d));
    let shape: Vec<u64> = order.iter().map(|&d| x.ty.shape()[d]).collect();
    let source = |index: &[u64]| {
        let mut from = vec![0; n];
        for (&d, &i) in order.iter().zip(index) {
            from[d] = i;
        }
        Some(from)
    };
    Some(vec![
        is_order.then(|| mapped(x, &shape, &source)).flatten()?,
    ])
}

fn expand(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let (x, sizes) = (f.at(0)?, as_shape(f.ints(1)?)?);
    let shape = ir::op::broadcast_shapes(x.ty.shape(), &sizes).ok()?;
    Some(vec![mapped(x, &shape, &|index| Some(index.to_vec()))?])
}

fn tile(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let (x, repeats) = (f.at(0)?, as_shape(f.ints(1)?)?);
    let old = x.ty.shape();
    if repeats.len() != old.len() {
        return None;
    }
    let shape: Option<Vec<u64>> = old
        .iter()
        .zip(&repeats)
        .map(|(d, n)| d.checked_mul(*n))
        .collect();
    let source = |index: &[u64]| Some(index.iter().zip(old).map(|(i, d)| i % d).collect());
    Some(vec![mapped(x, &shape?, &source)?])
}

fn slice(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let mut x = f.at(0)?.clone();
    let (starts, ends) = (f.ints(1)?, f.ints(2)?);
    let steps = if f.has(4) {
        f.ints(4)?.to_vec()
    } else {
        vec![1; starts.len()]
    };
    let axes = if f.has(3) {
        f.ints(3)?.to_vec()
    } else {
        (0..starts.len() as i64).collect()
    };
    for (i, &axis) in axes.iter().enumerate() {
        let axis = wrap(axis, x.ty.rank()).ok()?;
        let (start, end, step) = (*starts.get(i)?, *ends.get(i)?, *steps.get(i)?);
        let size = x.ty.shape()[axis] as i64;
        let from_front = |at: i64| if at < 0 { at.saturating_add(size) } else { at };
        let (least, most) = if step > 0 { (0, size) } else { (-1, size - 1) };
        let start = from_front(start).clamp(least, most);
        let span = from_front(end).clamp(least, most) - start;
        let n = count_steps(span.into(), step.into())?;
        let mut shape = x.ty.shape().to_vec();
        shape[axis] = u64::try_from(n).ok()?;
        let source = |index: &[u64]| {
            let mut from = index.to_vec();
            from[axis] = u64::try_from(start + from[axis] as i64 * step).ok()?;
            Some(from)
        };
        x = mapped(&x, &shape, &source)?;
    }
    Some(vec![x])
}

/// The number of steps over a span; 0 if they lead away from its end.
fn count_steps(span: i128, step: i128) -> Option<i128> {
    let n = span.checked_div(step)? + i128::from(span.checked_rem(step)? != 0);
    Some(if (span > 0) == (step > 0) { n } else { 0 })
}

fn gather(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let (x, index) = (f.at(0)?, f.at(1)?);
    let axis = wrap(f.attributes.int("axis").unwrap_or(0), x.ty.rank()).ok()?;
    let (at, lead) = (index.as_ints()?, index.ty.shape());
    let old = x.ty.shape();
    let shape = [&old[..axis], lead, &old[axis + 1..]].concat();
    let source = |to: &[u64]| {
        let middle = &to[axis..axis + lead.len()];
        let i = *at.get(place(lead, middle)?)?;
        let i = if i < 0 { i + old[axis] as i64 } else { i };
        let i = u64::try_from(i).ok().filter(|&i| i < old[axis])?;
        Some([&to[..axis], &[i], &to[axis + lead.len()..]].concat())
    };
    Some(vec![mapped(x, &shape, &source)?])
}

fn gather_nd(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let (x, index) = (f.at(0)?, f.at(1)?);
    let (&n, lead) = index.ty.shape().split_last()?;
    let (at, old, n) = (index.as_ints()?, x.ty.shape(), usize::try_from(n).ok()?);
    if f.attributes.int("batch_dims").unwrap_or(0) != 0 || n > old.len() {
        return None;
    }
    let shape = [lead, &old[n..]].concat();
    let source = |to: &[u64]| {
        let first = place(lead, &to[..lead.len()])? * n;
        let mut from = vec![];
        for (&i, &size) in at.get(first..first + n)?.iter().zip(old) {
            let i = if i < 0 { i + size as i64 } else { i };
            from.push(u64::try_from(i).ok().filter(|&i| i < size)?);
        }
        from.extend(&to[lead.len()..]);
        Some(from)
    };
    Some(vec![mapped(x, &shape, &source)?])
}

fn concat(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let parts: Vec<&Numbers> = f.inputs.iter().copied().collect::<Option<_>>()?;
    let first = parts.first()?;
    let axis = wrap(f.attributes.int("axis")?, first.ty.rank()).ok()?;
    let mut shape = first.ty.shape().to_vec();
    shape[axis] = 0;
    let mut starts = vec![];
    for part in &parts {
        let fits = part.ty.dtype() == first.ty.dtype()
            && part.ty.rank() == shape.len()
            && (0..shape.len()).all(|d| d == axis || part.ty.shape()[d] == shape[d]);
        if !fits {
            return None;
        }
        starts.push(shape[axis]);
        shape[axis] += part.ty.shape()[axis];
    }
    let (mut ints, mut floats) = (vec![], vec![]);
    for mut index in indices(&shape)? {
        let i = starts
            .partition_point(|&start| start <= index[axis])
            .checked_sub(1)?;
        index[axis] -= starts[i];
        match picked(&parts[i].elements, &[place(parts[i].ty.shape(), &index)?])? {
            Elements::Ints(one) => ints.extend(one),
            Elements::Floats(one) => floats.extend(one),
        }
    }
    let elements = if first.ty.dtype().is_float() {
        Elements::Floats(floats)
    } else {
        Elements::Ints(ints)
    };
    Some(vec![Numbers::of(first.ty.dtype(), &shape, elements)?])
}

fn split(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let x = f.at(0)?;
    let axis = wrap(f.attributes.int("axis").unwrap_or(0), x.ty.rank()).ok()?;
    let size = x.ty.shape()[axis] as i64;
    let sizes = if f.has(1) {
        f.ints(1)?.to_vec()
    } else {
        let n = f.n_results as i64;
        let part = size.checked_add(n - 1)?.checked_div(n)?;
        (0..n).map(|i| (size - i * part).clamp(0, part)).collect()
    };
    let mut start = 0u64;
    let mut parts = vec![];
    for size in as_shape(&sizes)? {
        let mut shape = x.ty.shape().to_vec();
        shape[axis] = size;
        let source = |index: &[u64]| {
            let mut from = index.to_vec();
            from[axis] += start;
            Some(from)
        };
        parts.push(mapped(x, &shape, &source)?);
        start = start.checked_add(size)?;
    }
    (start == x.ty.shape()[axis]).then_some(parts)
}

fn range(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let dtype = f.at(0)?.ty.dtype();
    if !dtype.is_float() {
        let (start, end, step) = (f.int(0)?, f.int(1)?, f.int(2)?);
        let n = count_steps(i128::from(end) - i128::from(start), step.into())?;
        let n = usize::try_from(n).ok().filter(|&n| n as u64 <= SMALL)?;
        let list = (0..n)
            .map(|i| start.wrapping_add((i as i64).wrapping_mul(step)))
            .collect();
        return Some(vec![Numbers::ints(dtype, &[n as u64], list)?]);
    }
    let number = |i: usize| f.at(i)?.to_floats().first().copied();
    let (start, end, step) = (number(0)?, number(1)?, number(2)?);
    let n = ((end - start) / step).ceil().max(0.0);
    if n > SMALL as f64 {
        return None;
    }
    let list = (0..n as usize).map(|i| start + i as f64 * step).collect();
    Some(vec![Numbers::floats(dtype, &[n as u64], list)?])
}

fn constant_of_shape(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let (shape, n) = (as_shape(f.ints(0)?)?, small(&as_shape(f.ints(0)?)?)?);
    let Some(value) = f.attributes.tensor("value") else {
        return Some(vec![Numbers::floats(DType::F32, &shape, vec![0.0; n])?]);
    };
    let ty = crate::tensor::tensor_type(value)
        .ok()
        .filter(|ty| ty.numel() == 1)?;
    let data = crate::tensor::inline(value, &ty)?;
    let one = Numbers::from_bytes(&ty, &data)?;
    Some(vec![Numbers::of(
        ty.dtype(),
        &shape,
        picked(&one.elements, &vec![0; n])?,
    )?])
}

fn non_zero(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let x = f.at(0)?;
    let all = indices(x.ty.shape())?;
    let is_set = |(_, value): &(&Vec<u64>, f64)| *value != 0.0;
    let found: Vec<&Vec<u64>> = all
        .iter()
        .zip(x.to_floats())
        .filter(is_set)
        .map(|(index, _)| index)
        .collect();
    let places = (0..x.ty.rank()).flat_map(|d| found.iter().map(move |index| index[d] as i64));
    let shape = [x.ty.rank() as u64, found.len() as u64];
    Some(vec![Numbers::ints(DType::I64, &shape, places.collect())?])
}

fn triangle(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let x = f.at(0)?;
    let upper = f.attributes.int("upper").unwrap_or(1) != 0;
    let k = if f.has(1) { f.int(1)? } else { 0 };
    let rank = x.ty.rank().checked_sub(2)?;
    let all = indices(x.ty.shape())?;
    let is_kept = |index: &Vec<u64>| {
        let distance = index[rank + 1] as i64 - index[rank] as i64;
        if upper { distance >= k } else { distance <= k }
    };
    let kept: Vec<bool> = all.iter().map(is_kept).collect();
    let elements = match &x.elements {
        Elements::Ints(list) => Elements::Ints(
            list.iter()
                .zip(&kept)
                .map(|(&x, &k)| if k { x } else { 0 })
                .collect(),
        ),
        Elements::Floats(list) => {
            let both = list.iter().zip(&kept);
            Elements::Floats(both.map(|(&x, &k)| if k { x } else { 0.0 }).collect())
        }
    };
    Some(vec![Numbers::of(x.ty.dtype(), x.ty.shape(), elements)?])
}

fn running_sum(f: &Folding<'_, '_>) -> Option<Vec<Numbers>> {
    let x = f.at(0)?;
    let axis = wrap(f.int(1)?, x.ty.rank()).ok()?;
    let is_plain = |name: &str| f.attributes.int(name).unwrap_or(0) == 0;
    if !is_plain("exclusive") || !is_plain("reverse") {
        return None;
    }
    let mut list = x.as_ints()?.to_vec();
    let shape = x.ty.shape();
    for index in indices(shape)?.into_iter().filter(|index| index[axis] > 0) {
        let mut before = index.clone();
        before[axis] -= 1;
        let (at, before) = (place(shape, &index)?, place(shape, &before)?);
        list[at] = list[at].checked_add(list[before])?;
    }
    Some(vec![Numbers::ints(x.ty.dtype(), shape, list)?])
}

fn reduce(
    f: &Folding<'_, '_>,
    int: fn(i64, i64) -> Option<i64>,
    float: fn(f64, f64) -> f64,
) -> Option<Vec<Numbers>> {
    let x = f.at(0)?;
    let rank = x.ty.rank();
    let axes = f.axes(1, rank)?.filter(|axes| !axes.is_empty());
    let axes = match axes {
        Some(axes) => axes,
        None if f.attributes.int("noop_with_empty_axes").unwrap_or(0) != 0 => vec![],
        None => (0..rank).collect(),
    };
    let keeps = f.attributes.int("keepdims").unwrap_or(1) != 0;
    let old = x.ty.shape();
    let wide: Vec<u64> = (0..rank)
        .map(|d| if axes.contains(&d) { 1 } else { old[d] })
        .collect();
    let shape: Vec<u64> = (0..rank)
        .filter(|d| keeps || !axes.contains(d))
        .map(|d| wide[d])
        .collect();
    let n = small(&wide)?;
    if x.ty.numel() == 0 {
        return None;
    }
    let places: Option<Vec<usize>> = indices(old)?
        .iter()
        .map(|index| place(&wide, index))
        .collect();
    let places = places?;
    let elements = match &x.elements {
        Elements::Ints(list) => {
            let mut sums: Vec<Option<i64>> = vec![None; n];
            for (&at, &x) in places.iter().zip(list) {
                sums[at] = Some(match sums[at] {
                    None => x,
                    Some(sum) => int(sum, x)?,
                });
            }
            Elements::Ints(sums.into_iter().collect::<Option<_>>()?)
        }
        Elements::Floats(list) => {
            let mut sums: Vec<Option<f64>> = vec![None; n];
            for (&at, &x) in places.iter().zip(list) {
                sums[at] = Some(sums[at].map_or(x, |sum| float(sum, x)));
            }
            Elements::Floats(sums.into_iter().collect::<Option<_>>()?)
        }
    };
    Some(vec![Numbers::of(x.ty.dtype(), &shape, elements)?])
}
