//! Shapes: views, parts, and tensors put together.

use crate::dims::{count, dim_attr};
use crate::{Call, Error, Range, Ref, Result, Scalar, ensure, wrap};
use ir::op::OpKind;
use ir::{Attr, DType};

fn ints(key: &'static str, list: &[i64]) -> (&'static str, Attr) {
    (key, Attr::Ints(list.to_vec()))
}

/// Sizes of parts that are equal except for the last; `n` is the required number of parts.
fn equal_parts(size: i64, part: i64, n: usize) -> Result<Vec<i64>> {
    if size == 0 && n == 1 {
        return Ok(vec![0]);
    }
    ensure(
        part > 0 && (size / part) as usize + usize::from(size % part != 0) == n,
        "another number of results",
    )?;
    Ok((0..n as i64).map(|i| part.min(size - i * part)).collect())
}

/// What lies beside a tensor that is padded with its own elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Border {
    /// The last element, again and again.
    Edge,
    /// The elements before the last one, backwards.
    Reflect,
    /// The elements from the other end.
    Wrap,
}

impl Call<'_> {
    // --- views ---

    /// `x` with the given sizes. One may be -1: it is computed from the others.
    pub fn reshape_to(&mut self, x: Ref, sizes: &[i64]) -> Result<Ref> {
        let open = sizes.iter().filter(|&&d| d == -1).count();
        let known = sizes
            .iter()
            .filter(|&&d| d != -1)
            .try_fold(1u64, |n, &d| n.checked_mul(u64::try_from(d).ok()?));
        let known = known.ok_or("a size is negative or too large")?;
        ensure(open <= 1, "two sizes are left open")?;
        let rest = self.ty(x).numel().checked_div(known).unwrap_or(0);
        let size = |&d: &i64| if d == -1 { rest } else { d as u64 };
        let shape: Vec<u64> = sizes.iter().map(size).collect();
        self.reshape(x, &shape)
    }

    /// `x` broadcast to the given sizes; -1 keeps the size of a dimension.
    pub fn expand_to(&mut self, x: Ref, sizes: &[i64]) -> Result<Ref> {
        let more = sizes.len().checked_sub(self.rank(x));
        let more = more.ok_or("fewer dimensions than the operand has")?;
        let kept = |(i, &d): (usize, &i64)| match (d, i.checked_sub(more)) {
            (-1, Some(i)) => Ok(self.ty(x).shape()[i]),
            _ => u64::try_from(d).map_err(|_| Error::from(format!("the size {d} is negative"))),
        };
        let shape: Result<Vec<u64>> = sizes.iter().enumerate().map(kept).collect();
        self.expand(x, &shape?)
    }

    /// `x` repeated along each dimension, as often as `repeats` says.
    pub fn tile(&mut self, x: Ref, repeats: &[u64]) -> Result<Ref> {
        let more = repeats.len().checked_sub(self.rank(x));
        let more = more.ok_or("fewer dimensions than the operand has")?;
        let mut shape = vec![1; more];
        shape.extend(self.shape_of(x));
        // [a, b] -> [1, a, 1, b] -> [m, a, n, b] -> [m a, n b]
        let apart: Vec<u64> = shape.iter().flat_map(|&d| [1, d]).collect();
        let pairs = || shape.iter().zip(repeats);
        let wide: Vec<u64> = pairs().flat_map(|(&d, &n)| [n, d]).collect();
        let whole: Option<Vec<u64>> = pairs().map(|(&d, &n)| d.checked_mul(n)).collect();
        let x = self.reshape(x, &apart)?;
        let x = self.expand(x, &wide)?;
        self.reshape(x, &whole.ok_or("too large")?)
    }

    // --- parts ---

    /// `x[.., start:end:step, ..]` along a dimension.
    pub fn slice(&mut self, x: Ref, dim: usize, range: Range) -> Result<Ref> {
        match self.slice_attrs(x, dim, range)? {
            None => Ok(x),
            Some(attrs) => self.step(OpKind::Slice, &attrs, &[x]),
        }
    }

    /// The attributes of a slice; `None` if it is all of `x`.
    fn slice_attrs(
        &self,
        x: Ref,
        dim: usize,
        range: Range,
    ) -> Result<Option<[(&'static str, Attr); 4]>> {
        let size = self.ty(x).shape().get(dim);
        let size = *size.ok_or("no such dimension")? as i64;
        let clip = |i: i64| {
            if i < 0 {
                i.saturating_add(size).max(0)
            } else {
                i.min(size)
            }
        };
        let start = clip(range.start.unwrap_or(0));
        let end = clip(range.end.unwrap_or(size)).max(start);
        if (start, end, range.step) == (0, size, 1) {
            return Ok(None);
        }
        Ok(Some([
            dim_attr(dim),
            ("end", Attr::Int(end)),
            ("start", Attr::Int(start)),
            ("step", Attr::Int(range.step)),
        ]))
    }

    /// `x[.., at, ..]` along a dimension, which is removed.
    pub fn select(&mut self, x: Ref, dim: usize, at: i64) -> Result<Ref> {
        let mut shape = self.shape_of(x);
        let size = *shape.get(dim).ok_or("no such dimension")?;
        let at = wrap(at, size as usize)? as i64;
        shape.remove(dim);
        let y = self.slice(x, dim, Range::new(at, at + 1))?;
        self.reshape(y, &shape)
    }

    /// All parts of size 1 along a dimension, which is removed.
    pub fn unbind(&mut self, x: Ref, dim: usize) -> Result<Vec<Ref>> {
        let n = self.n_results();
        ensure(
            self.ty(x).shape()[dim] == n as u64,
            "another number of results",
        )?;
        (0..n).map(|i| self.select(x, dim, i as i64)).collect()
    }

    /// Neighbouring parts of these sizes along a dimension.
    pub fn split(&mut self, x: Ref, dim: usize, sizes: &[i64]) -> Result<Vec<Ref>> {
        const MISFIT: &str = "the parts do not fit the tensor";
        let size = self.ty(x).shape()[dim] as i64;
        let mut start = 0i64;
        let mut parts = vec![];
        for &length in sizes {
            let end = start.checked_add(length);
            let end = end.filter(|&end| start <= end && end <= size);
            let end = end.ok_or(MISFIT)?;
            parts.push(self.slice(x, dim, Range::new(start, end))?);
            start = end;
        }
        ensure(start == size, MISFIT)?;
        Ok(parts)
    }

    /// Neighbouring parts of this size, one for each result of the call; the last may be smaller.
    pub fn split_equally(&mut self, x: Ref, dim: usize, part: i64) -> Result<Vec<Ref>> {
        let sizes = equal_parts(self.ty(x).shape()[dim] as i64, part, self.n_results())?;
        self.split(x, dim, &sizes)
    }

    /// At most `n` parts, with the sizes of [`Call::split_equally`].
    pub fn chunk(&mut self, x: Ref, dim: usize, n: i64) -> Result<Vec<Ref>> {
        ensure(n > 0, "no chunks")?;
        let size = self.ty(x).shape()[dim] as i64;
        self.split_equally(x, dim, size / n + i64::from(size % n != 0))
    }

    // --- parts put in ---

    /// `x` with `source` in place of a part.
    pub fn slice_scatter(&mut self, x: Ref, source: Ref, dim: usize, range: Range) -> Result<Ref> {
        let source = self.cast(source, self.dtype(x))?;
        match self.slice_attrs(x, dim, range)? {
            // All of it is replaced.
            None => {
                let shape = self.shape_of(x);
                self.expand(source, &shape)
            }
            Some(attrs) => self.step(OpKind::SliceScatter, &attrs, &[x, source]),
        }
    }

    /// `x` with `source` in place of `x[.., at, ..]`.
    pub fn select_scatter(&mut self, x: Ref, source: Ref, dim: usize, at: i64) -> Result<Ref> {
        let mut shape = self.shape_of(x);
        let at = wrap(at, shape[dim] as usize)? as i64;
        shape[dim] = 1;
        let source = self.reshape(source, &shape)?;
        self.slice_scatter(x, source, dim, Range::new(at, at + 1))
    }

    // --- tensors put together ---

    /// The parts one after another.
    pub fn cat(&mut self, parts: &[Ref], dim: usize) -> Result<Ref> {
        match parts {
            &[x] => Ok(x),
            parts => self.step(OpKind::Cat, &[dim_attr(dim)], parts),
        }
    }

    /// The parts, of equal shapes, in `dtype` and along a new dimension.
    pub fn stack(&mut self, parts: Vec<Ref>, dim: usize, dtype: DType) -> Result<Ref> {
        let mut flat = vec![];
        for x in parts {
            let mut shape = self.shape_of(x);
            ensure(dim <= shape.len(), "the parts have fewer dimensions")?;
            shape.insert(dim, 1);
            let x = self.cast(x, dtype)?;
            flat.push(self.reshape(x, &shape)?);
        }
        self.cat(&flat, dim)
    }

    /// `x` rotated along dimensions.
    pub fn roll(&mut self, x: Ref, shifts: &[(i64, usize)]) -> Result<Ref> {
        let mut x = x;
        for &(shift, dim) in shifts {
            let size = self.ty(x).shape()[dim] as i64;
            if size == 0 || shift % size == 0 {
                continue;
            }
            let cut = size - shift.rem_euclid(size);
            let head = self.slice(x, dim, Range::new(0, cut))?;
            let tail = self.slice(x, dim, Range::new(cut, size))?;
            x = self.step(OpKind::Cat, &[dim_attr(dim)], &[tail, head])?;
        }
        Ok(x)
    }

    /// `x` with `value` around it. `pad` has the numbers of elements before and after, for each
    /// dimension from the innermost on; outer dimensions may be left out.
    pub fn pad(&mut self, x: Ref, pad: &[i64], value: Scalar) -> Result<Ref> {
        let rank = self.rank(x);
        ensure(
            pad.len().is_multiple_of(2) && pad.len() <= 2 * rank,
            "another number of paddings",
        )?;
        let mut full = vec![0; 2 * rank];
        for (i, pair) in pad.chunks(2).enumerate() {
            full[2 * (rank - 1 - i)..2 * (rank - i)].copy_from_slice(pair);
        }
        let value = value.attr(self.dtype(x))?;
        self.step(OpKind::Pad, &[ints("pad", &full), ("value", value)], &[x])
    }

    /// `x` with its own elements around it along a dimension. A negative number cuts.
    pub fn pad_with_itself(
        &mut self,
        x: Ref,
        axis: usize,
        (before, after): (i64, i64),
        border: Border,
    ) -> Result<Ref> {
        let size = self.shape_of(x)[axis] as i64;
        let (start, end) = ((-before).max(0), size - (-after).max(0));
        ensure(start <= end, "cuts more than the tensor has")?;
        let x = self.slice(x, axis, Range::new(start, end))?;
        let (before, after) = (before.max(0), after.max(0));
        if before == 0 && after == 0 {
            return Ok(x);
        }
        let size = self.shape_of(x)[axis] as i64;
        ensure(size > 0, "there is nothing to repeat")?;
        let (head, tail) = match border {
            Border::Edge => {
                let mut parts = vec![];
                for (at, n) in [(0, before), (size - 1, after)] {
                    let edge = self.slice(x, axis, Range::new(at, at + 1))?;
                    let mut shape = self.shape_of(x);
                    shape[axis] = n as u64;
                    parts.push(self.expand(edge, &shape)?);
                }
                (parts[0], parts[1])
            }
            Border::Reflect => {
                ensure(
                    before < size && after < size,
                    "reflects more than the tensor has",
                )?;
                let head = self.slice(x, axis, Range::new(1, before + 1))?;
                let tail = self.slice(x, axis, Range::new(size - 1 - after, size - 1))?;
                (self.flip(head, &[axis])?, self.flip(tail, &[axis])?)
            }
            Border::Wrap => {
                ensure(
                    before <= size && after <= size,
                    "wraps more than the tensor has",
                )?;
                let head = self.slice(x, axis, Range::new(size - before, size))?;
                (head, self.slice(x, axis, Range::new(0, after))?)
            }
        };
        let parts = [(before, head), (size, x), (after, tail)];
        let parts: Vec<Ref> = parts
            .into_iter()
            .filter(|(n, _)| *n > 0)
            .map(|(_, x)| x)
            .collect();
        self.cat(&parts, axis)
    }

    /// `x` reversed along dimensions.
    pub fn flip(&mut self, x: Ref, dims: &[usize]) -> Result<Ref> {
        let dims: Vec<i64> = dims.iter().map(|&d| d as i64).collect();
        self.step(OpKind::Flip, &[ints("dims", &dims)], &[x])
    }

    /// The triangle of each matrix on one side of a diagonal, zeros elsewhere: below it if `lower`.
    pub fn triangle(&mut self, x: Ref, lower: bool, diagonal: i64) -> Result<Ref> {
        let shape = self.shape_of(x);
        let [.., rows, columns] = shape[..] else {
            return Err("fewer than two dimensions".into());
        };
        let kept = self.diagonals(
            if lower { OpKind::Le } else { OpKind::Ge },
            rows,
            columns,
            diagonal,
        )?;
        self.masked(kept, x)
    }

    // --- blocks of images ---

    /// Images `x[N,C,H,W]` whose channels become blocks of rows and columns. `rows_first` says that
    /// a block's places are the outer part of the channels.
    pub fn depth_to_space(&mut self, x: Ref, block: u64, rows_first: bool) -> Result<Ref> {
        let [n, channels, h, w] = self.of_blocks(x, block)?;
        let area = block.checked_mul(block).ok_or("too large")?;
        ensure(channels.is_multiple_of(area), "the channels are no blocks")?;
        let (depth, b) = (channels / area, block);
        let (shape, order) = if rows_first {
            ([n, b, b, depth, h, w], [0, 3, 4, 1, 5, 2])
        } else {
            ([n, depth, b, b, h, w], [0, 1, 4, 2, 5, 3])
        };
        let x = self.reshape(x, &shape)?;
        let x = self.permute(x, &order)?;
        self.reshape(x, &[n, depth, count(&[h, b])?, count(&[w, b])?])
    }

    /// The reverse of [`Call::depth_to_space`].
    pub fn space_to_depth(&mut self, x: Ref, block: u64, rows_first: bool) -> Result<Ref> {
        let [n, channels, h, w] = self.of_blocks(x, block)?;
        let b = block;
        let fits = h.is_multiple_of(b) && w.is_multiple_of(b);
        ensure(fits, "the images are no blocks")?;
        let x = self.reshape(x, &[n, channels, h / b, b, w / b, b])?;
        let order = if rows_first {
            [0, 3, 5, 1, 2, 4]
        } else {
            [0, 1, 3, 5, 2, 4]
        };
        let x = self.permute(x, &order)?;
        self.reshape(x, &[n, count(&[channels, b, b])?, h / b, w / b])
    }

    fn of_blocks(&self, x: Ref, block: u64) -> Result<[u64; 4]> {
        let shape = <[u64; 4]>::try_from(self.shape_of(x));
        let shape = shape.map_err(|_| Error::from("is no batch of images"))?;
        ensure(block > 0, "a block has no elements")?;
        Ok(shape)
    }
}
