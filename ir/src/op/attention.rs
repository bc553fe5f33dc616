//! The sizes of attention, and where each of its tensors lies. `sdpa` has heads that contain rows;
//! in `sdpa_rows` a row may contain heads, which may begin behind other heads.

use super::Misfit;
use super::attrs::AttentionRows;
use super::shape::{attribute, ensure, list};
use crate::types::{DType, TensorType};

/// The operands that may follow the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Beside {
    /// The number of the operand that is the mask.
    pub mask: Option<usize>,
    /// The same of the dropout key.
    pub key: Option<usize>,
}

impl Beside {
    /// Of the types of the operands from number `from` on. Only a dropout key is a row of integers.
    pub fn of<'a>(from: usize, types: impl IntoIterator<Item = &'a TensorType>) -> Beside {
        let mut beside = Beside {
            mask: None,
            key: None,
        };
        for (ty, i) in types.into_iter().zip(from..) {
            if ty.dtype() == DType::I64 && ty.shape() == [4] {
                beside.key = Some(i);
            } else if beside.key.is_none() && beside.mask.is_none() {
                beside.mask = Some(i);
            }
        }
        beside
    }
}

/// Sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sizes {
    /// Sequences.
    pub batch: u64,
    /// Heads of q.
    pub heads: u64,
    /// Heads of k and v. Divides the heads of q, unless both are 0.
    pub groups: u64,
    /// Rows of q.
    pub queries: u64,
    /// Rows of k and v.
    pub keys: u64,
    /// Numbers of a head's row of q and k.
    pub width: u64,
    /// The same of v.
    pub values: u64,
}

/// Where a tensor's heads and rows lie: distances between their first numbers, in numbers. A row's
/// numbers are next to each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// The first number.
    pub first: u64,
    /// From a sequence to the next.
    pub batch: u64,
    /// From a head to the next.
    pub head: u64,
    /// From a row to the next.
    pub row: u64,
}

impl Layout {
    /// Heads that contain rows: `[B,heads,rows,width]`.
    pub fn of_heads(heads: u64, rows: u64, width: u64) -> Layout {
        // No tensor has as many numbers that a product overflows.
        let head = rows.saturating_mul(width);
        Layout {
            first: 0,
            batch: heads.saturating_mul(head),
            head,
            row: width,
        }
    }
    /// Rows that contain heads: `[B,rows,heads,width]`, from head `first` on.
    pub fn of_rows(rows: u64, heads: u64, width: u64, first: u64) -> Layout {
        let row = heads.saturating_mul(width);
        Layout {
            first: first.saturating_mul(width),
            batch: rows.saturating_mul(row),
            head: width,
            row,
        }
    }
}

/// Sizes, and where the tensors lie. The gradients dout, dq, dk and dv are written here as the
/// tensors of which they are the gradients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attending {
    /// Sizes.
    pub sizes: Sizes,
    /// Operands q, k, v.
    pub qkv: [Layout; 3],
    /// The result out, and dout.
    pub out: Layout,
    /// The results dq, dk, dv.
    pub gradients: [Layout; 3],
    /// True if the three gradients are one result.
    pub is_joint: bool,
}

impl Attending {
    /// True if a GPU's tensor cores compute it, given the type of q and the operands beside:
    /// bf16 without a mask, heads of 64 or 128 numbers, and sizes that 32-bit integers count. If
    /// weights are dropped, four neighbours are of one query.
    pub fn on_tensor_cores(&self, dtype: DType, beside: Beside) -> bool {
        let s = &self.sizes;
        let fits = matches!(s.width, 64 | 128) && s.values == s.width && s.groups > 0;
        let heads = s.batch.checked_mul(s.heads);
        let numbers = heads.and_then(|heads| heads.checked_mul(s.queries.max(1)));
        let small = numbers.is_some_and(|n| n < 1 << 31) && s.queries.max(s.keys) < (1 << 31) - 64;
        let layouts = self.qkv.iter().chain(&self.gradients).chain([&self.out]);
        let narrow = layouts.map(|layout| layout.row).max() < Some(1 << 23);
        let by_four = beside.key.is_none() || s.keys.is_multiple_of(4);
        dtype == DType::BF16 && beside.mask.is_none() && by_four && fits && small && narrow
    }

    /// Of `sdpa`, for shapes that fit.
    pub fn plain(q: &[u64], v: &[u64]) -> Attending {
        let sizes = Sizes {
            batch: q[0],
            heads: q[1],
            groups: v[1],
            queries: q[2],
            keys: v[2],
            width: q[3],
            values: v[3],
        };
        let qkv = forms(&sizes).map(|[heads, rows, width]| Layout::of_heads(heads, rows, width));
        Attending {
            sizes,
            qkv,
            out: Layout::of_heads(sizes.heads, sizes.queries, sizes.values),
            gradients: qkv,
            is_joint: false,
        }
    }

    /// Of `sdpa_rows`, for the shapes of q, k and v, the first of which is operand `operand`.
    pub fn rows(
        a: &AttentionRows,
        shapes: [&[u64]; 3],
        operand: usize,
    ) -> Result<Attending, Misfit> {
        let first = list("first", &a.first, 3, -1)?;
        let heads = list("heads", &a.heads, 2, 0)?;
        let [n_heads, groups] = [heads[0] as u64, heads[1] as u64];
        let divides = n_heads == groups || (0 < groups && n_heads.is_multiple_of(groups));
        ensure(divides, || {
            attribute("heads", ": the second should divide the first")
        })?;
        for (i, shape) in shapes.iter().enumerate() {
            let operand = operand + i;
            ensure(shape.len() == 4, || Misfit::Rank {
                operand,
                wanted: "4",
            })?;
            let heads = if i == 0 { n_heads } else { groups };
            let mut wanted = shape.to_vec();
            match u64::try_from(first[i]) {
                Ok(first) => wanted[2] = wanted[2].max(first + heads),
                Err(_) => wanted[1] = heads,
            }
            ensure(*shape == wanted, || Misfit::Shape { operand, wanted })?;
        }
        let rows = |i: usize| shapes[i][if first[i] < 0 { 2 } else { 1 }];
        let [q, k, v] = shapes;
        let fits = q[0] == k[0] && k[0] == v[0] && q[3] == k[3] && rows(1) == rows(2);
        ensure(fits, || {
            Misfit::Operands("q, k, v do not fit together".into())
        })?;
        let sizes = Sizes {
            batch: q[0],
            heads: n_heads,
            groups,
            queries: rows(0),
            keys: rows(1),
            width: q[3],
            values: v[3],
        };
        Ok(Attending::of_rows(sizes, shapes, first))
    }

    /// How many numbers q, k and v have. Their operands may have more.
    pub fn numbers(&self) -> [u64; 3] {
        forms(&self.sizes).map(|[heads, rows, width]| self.sizes.batch * heads * rows * width)
    }

    fn of_rows(sizes: Sizes, shapes: [&[u64]; 3], first: &[i64]) -> Attending {
        let forms = forms(&sizes);
        let layout = |i: usize, all: Option<u64>| {
            let [heads, rows, width] = forms[i];
            match (u64::try_from(first[i]), all) {
                (Err(_), _) => Layout::of_heads(heads, rows, width),
                (Ok(first), Some(all)) => Layout::of_rows(rows, all, width, first),
                (Ok(_), None) => Layout::of_rows(rows, heads, width, 0),
            }
        };
        let own = |i: usize| layout(i, Some(shapes[i][2]));
        let qkv = [own(0), own(1), own(2)];
        let is_joint = fills(&forms.map(|[heads, ..]| heads), shapes, first);
        let gradients = match is_joint {
            true => qkv,
            false => [0, 1, 2].map(|i| layout(i, None)),
        };
        Attending {
            sizes,
            qkv,
            out: Layout::of_rows(sizes.queries, sizes.heads, sizes.values, 0),
            gradients,
            is_joint,
        }
    }
}

/// Heads, rows and width of q, k and v.
fn forms(sizes: &Sizes) -> [[u64; 3]; 3] {
    let of_keys = |width| [sizes.groups, sizes.keys, width];
    let of_q = [sizes.heads, sizes.queries, sizes.width];
    [of_q, of_keys(sizes.width), of_keys(sizes.values)]
}

/// True if q, k and v have rows of one shape, and their heads are all heads of such a row, each
/// once.
fn fills(heads: &[u64; 3], shapes: [&[u64]; 3], first: &[i64]) -> bool {
    let [q, k, v] = shapes;
    let mut order = [0, 1, 2];
    order.sort_by_key(|&i| (first[i], heads[i]));
    let mut end = 0;
    let follow = order.iter().all(|&i| {
        let follows = first[i] == end as i64;
        end += heads[i];
        follows
    });
    q == k && k == v && follow && end == q[2]
}
