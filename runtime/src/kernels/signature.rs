//! A launch without its memory: attributes, types, scratch. The helpers here read and compare
//! without panicking, for any artifact.

use crate::kernel::attr;
use artifact::{Attr, DType, Operand};

/// The largest tensor, bytes, and the highest rank. With sizes of 0 counted as 1, products of sizes
/// fit 50 bits, and kernels keep strides in arrays on the stack.
const MAX_BYTES: u64 = 1 << 50;
/// The largest tensor without elements, bytes, with sizes of 0 counted as 1. Kernels may loop over
/// its other sizes, and make workspaces of these sizes.
const MAX_EMPTY_BYTES: u64 = 1 << 30;
pub(super) const MAX_RANK: usize = 16;

/// A launch as an artifact describes it. Places are not used.
pub struct Signature<'a> {
    /// The op's attributes.
    pub attrs: &'a [(String, Attr)],
    /// Operands.
    pub ins: &'a [Operand],
    /// Results.
    pub outs: &'a [Operand],
    /// Bytes of scratch.
    pub scratch: u64,
}

pub(super) type Checked = Result<(), String>;

pub(super) fn ensure(condition: bool, message: impl FnOnce() -> String) -> Checked {
    if condition { Ok(()) } else { Err(message()) }
}

pub(super) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}
pub(super) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}
pub(super) fn is_integer(dtype: DType) -> bool {
    matches!(
        dtype,
        DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64
    )
}
/// Statistics of half-precision tensors are kept in f32.
pub(super) fn statistics_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    }
}

/// The shape to which `a` and `b` broadcast.
pub(super) fn broadcast_shapes(a: &[u64], b: &[u64]) -> Result<Vec<u64>, String> {
    let rank = a.len().max(b.len());
    let at = |s: &[u64], i: usize| {
        if i + s.len() < rank {
            1
        } else {
            s[i + s.len() - rank]
        }
    };
    (0..rank)
        .map(|i| match (at(a, i), at(b, i)) {
            (x, y) if x == y => Ok(x),
            (1, y) => Ok(y),
            (x, 1) => Ok(x),
            _ => Err(format!("{a:?} and {b:?} do not broadcast")),
        })
        .collect()
}

impl<'a> Signature<'a> {
    /// Checks for every kernel: counts, ranks, sizes.
    pub(super) fn sane(&self, (least, most): (usize, usize)) -> Checked {
        let n = self.ins.len();
        ensure(least <= n && n <= most, || {
            format!("takes {least} to {most} operands, not {n}")
        })?;
        for t in self.ins.iter().chain(self.outs) {
            let bytes = t
                .shape
                .iter()
                .try_fold(t.dtype.bytes(), |bytes, &d| bytes.checked_mul(d.max(1)));
            let most = if t.shape.contains(&0) {
                MAX_EMPTY_BYTES
            } else {
                MAX_BYTES
            };
            let fits = t.shape.len() <= MAX_RANK && bytes.is_some_and(|b| b <= most);
            ensure(fits, || format!("{:?}{:?} is too large", t.dtype, t.shape))?;
        }
        Ok(())
    }
    pub(super) fn dtype(&self, i: usize) -> DType {
        self.ins[i].dtype
    }
    pub(super) fn shape(&self, i: usize) -> &'a [u64] {
        &self.ins[i].shape
    }
    pub(super) fn rank(&self, i: usize) -> usize {
        self.ins[i].shape.len()
    }

    // --- expectations ---

    /// The results are exactly these.
    pub(super) fn results(&self, expected: &[(DType, &[u64])]) -> Checked {
        let (n, want) = (self.outs.len(), expected.len());
        ensure(n == want, || format!("gives {want} results, not {n}"))?;
        for (j, (out, (dtype, shape))) in self.outs.iter().zip(expected).enumerate() {
            let fits = out.dtype == *dtype && out.shape == *shape;
            ensure(fits, || {
                format!(
                    "result {j} should be {dtype:?}{shape:?}, not {:?}{:?}",
                    out.dtype, out.shape
                )
            })?;
        }
        Ok(())
    }
    /// Operand `i` has an element type for which there is a kernel.
    pub(super) fn has_kernel(&self, i: usize, fits: fn(DType) -> bool) -> Checked {
        ensure(fits(self.dtype(i)), || {
            format!("no kernel for {:?}", self.dtype(i))
        })
    }
    pub(super) fn expect(&self, i: usize, dtype: DType) -> Checked {
        ensure(self.dtype(i) == dtype, || {
            format!("operand {i} should be {dtype:?}")
        })
    }
    pub(super) fn expect_index(&self, i: usize) -> Checked {
        let fits = matches!(self.dtype(i), DType::I64 | DType::I32);
        ensure(fits, || format!("operand {i} should be I64 or I32"))
    }
    pub(super) fn expect_dtype(&self, i: usize, j: usize) -> Checked {
        ensure(self.dtype(i) == self.dtype(j), || {
            format!("operands {i} and {j} should have one element type")
        })
    }
    pub(super) fn expect_shape(&self, i: usize, shape: &[u64]) -> Checked {
        ensure(self.shape(i) == shape, || {
            format!("operand {i} should have the shape {shape:?}")
        })
    }
    pub(super) fn expect_same(&self, i: usize, j: usize) -> Checked {
        self.expect_dtype(i, j)?;
        self.expect_shape(i, self.shape(j))
    }
    pub(super) fn expect_rank(&self, i: usize, rank: usize) -> Checked {
        ensure(self.rank(i) == rank, || {
            format!("operand {i} should have rank {rank}")
        })
    }

    // --- attributes ---

    fn attr(&self, key: &str) -> Result<&'a Attr, String> {
        attr(self.attrs, key).ok_or_else(|| format!("needs the attribute {key}"))
    }
    fn wrong<T>(key: &str, want: &str, has: &Attr) -> Result<T, String> {
        Err(format!("attribute {key} should be {want}, not {has:?}"))
    }
    pub(super) fn int(&self, key: &str) -> Result<i64, String> {
        match *self.attr(key)? {
            Attr::Int(i) => Ok(i),
            ref other => Self::wrong(key, "an Int", other),
        }
    }
    pub(super) fn float(&self, key: &str) -> Result<f64, String> {
        match *self.attr(key)? {
            Attr::Float(x) => Ok(x),
            Attr::Int(i) => Ok(i as f64),
            ref other => Self::wrong(key, "a number", other),
        }
    }
    /// A number that fits an element type: integers and bools take an Int.
    pub(super) fn number(&self, key: &str, dtype: DType) -> Checked {
        match self.attr(key)? {
            Attr::Int(_) => Ok(()),
            Attr::Float(_) if is_float(dtype) => Ok(()),
            other => Self::wrong(key, &format!("a number that fits {dtype:?}"), other),
        }
    }
    pub(super) fn bool(&self, key: &str) -> Result<bool, String> {
        match *self.attr(key)? {
            Attr::Bool(b) => Ok(b),
            ref other => Self::wrong(key, "a Bool", other),
        }
    }
    pub(super) fn ints(&self, key: &str) -> Result<&'a [i64], String> {
        match self.attr(key)? {
            Attr::Ints(v) => Ok(v),
            other => Self::wrong(key, "Ints", other),
        }
    }
    pub(super) fn dtype_attr(&self, key: &str) -> Result<DType, String> {
        match *self.attr(key)? {
            Attr::Type(d) => Ok(d),
            ref other => Self::wrong(key, "a Type", other),
        }
    }
    /// Attribute `key` as a dimension of operand `i`.
    pub(super) fn dim(&self, key: &str, i: usize) -> Result<usize, String> {
        let (dim, rank) = (self.int(key)?, self.rank(i));
        usize::try_from(dim)
            .ok()
            .filter(|&d| d < rank)
            .ok_or_else(|| format!("{key}={dim} is not below rank {rank}"))
    }
    /// Attribute `key` as distinct dimensions of operand `i`.
    pub(super) fn dims(&self, key: &str, i: usize) -> Result<Vec<usize>, String> {
        let rank = self.rank(i);
        let mut dims = vec![];
        for &d in self.ints(key)? {
            let d = usize::try_from(d)
                .ok()
                .filter(|&d| d < rank && !dims.contains(&d));
            dims.push(
                d.ok_or_else(|| format!("{key} should be distinct dimensions below rank {rank}"))?,
            );
        }
        Ok(dims)
    }
    /// Attribute `key` as a shape.
    pub(super) fn sizes(&self, key: &str) -> Result<Vec<u64>, String> {
        let sizes = self.ints(key)?.iter().map(|&d| u64::try_from(d));
        sizes
            .collect::<Result<_, _>>()
            .map_err(|_| format!("{key} has a negative size"))
    }
    /// Attribute `key` as `n` numbers, each at least `least`.
    pub(super) fn list(&self, key: &str, n: usize, least: i64) -> Result<&'a [i64], String> {
        let list = self.ints(key)?;
        let fits = list.len() == n && list.iter().all(|&x| least <= x && x < 1 << 32);
        ensure(fits, || {
            format!("{key} should be {n} numbers of at least {least}")
        })?;
        Ok(list)
    }
    /// Attribute `mask`, which says which of `n` results are computed.
    pub(super) fn mask(&self, n: usize) -> Result<&'a [i64], String> {
        let mask = self.ints("mask")?;
        let fits = mask.len() == n && mask.iter().all(|&m| m == 0 || m == 1) && mask.contains(&1);
        ensure(fits, || {
            format!("mask should be {n} numbers, 0 or 1, not all 0")
        })?;
        Ok(mask)
    }
    /// The results are the `expected` ones whose `mask` is 1.
    pub(super) fn masked_results(&self, expected: &[(DType, &[u64])]) -> Checked {
        let mask = self.mask(expected.len())?;
        let wanted: Vec<_> = expected
            .iter()
            .zip(mask)
            .filter(|&(_, &m)| m == 1)
            .map(|(&t, _)| t)
            .collect();
        self.results(&wanted)
    }
}
