//! Element types and tensor types. Tensors are row-major and contiguous: a value has `bytes()`
//! bytes.

use std::fmt;
use thiserror::Error;

crate::named! {
    /// The type of one element.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
    #[allow(missing_docs, reason = "the names are the documentation")]
    pub enum DType {
        Bool = "bool",
        U8 = "u8",
        I8 = "i8",
        I16 = "i16",
        I32 = "i32",
        I64 = "i64",
        F16 = "f16",
        BF16 = "bf16",
        F32 = "f32",
        F64 = "f64",
        F8E4M3 = "f8e4m3",
        F8E5M2 = "f8e5m2",
    }
}

impl DType {
    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            DType::Bool | DType::U8 | DType::I8 | DType::F8E4M3 | DType::F8E5M2 => 1,
            DType::I16 | DType::F16 | DType::BF16 => 2,
            DType::I32 | DType::F32 => 4,
            DType::I64 | DType::F64 => 8,
        }
    }
    /// The type that [`DType::name`] names.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == name)
    }
    /// True for floating-point types of 8 bits, which no kernel supports.
    pub fn is_eight_bit_float(self) -> bool {
        matches!(self, DType::F8E4M3 | DType::F8E5M2)
    }
    /// True for floating-point types.
    pub fn is_float(self) -> bool {
        matches!(
            self,
            DType::F16 | DType::BF16 | DType::F32 | DType::F64 | DType::F8E4M3 | DType::F8E5M2
        )
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a tensor type is impossible.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum TypeError {
    #[error("a tensor has at most {} dimensions, not {rank}", TensorType::MAX_RANK)]
    Rank { rank: usize },
    #[error(
        "tensor {dtype}{shape:?} is larger than {} bytes",
        TensorType::MAX_BYTES
    )]
    Size { dtype: DType, shape: Vec<u64> },
    #[error("{text} is not a type like f32[4,64]")]
    Text { text: String },
}

impl From<TypeError> for String {
    fn from(error: TypeError) -> String {
        error.to_string()
    }
}

/// Element type and shape of a value. Its size in bytes is at most [`TensorType::MAX_BYTES`].
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TensorType {
    dtype: DType,
    shape: Vec<u64>,
    /// Stored, because it is read more often than anything else.
    bytes: u64,
}

impl TensorType {
    /// The largest tensor: 2^50 bytes. Sums of many thousands of such sizes still fit into a `u64`.
    pub const MAX_BYTES: u64 = 1 << 50;

    /// The most dimensions: PyTorch's limit.
    pub const MAX_RANK: usize = 64;

    /// A tensor type; an error if it is larger than [`TensorType::MAX_BYTES`] or has more than
    /// [`TensorType::MAX_RANK`] dimensions.
    pub fn new(dtype: DType, shape: impl Into<Vec<u64>>) -> Result<TensorType, TypeError> {
        let shape = shape.into();
        if shape.len() > Self::MAX_RANK {
            return Err(TypeError::Rank { rank: shape.len() });
        }
        // Dimensions of size 0 count as 1 here: for a shape like [0, 2^63], products of strides
        // must not overflow.
        let mut bytes = dtype.bytes();
        for &d in &shape {
            bytes = bytes
                .checked_mul(d.max(1))
                .filter(|&b| b <= Self::MAX_BYTES)
                .ok_or_else(|| TypeError::Size {
                    dtype,
                    shape: shape.clone(),
                })?;
        }
        let bytes = shape.iter().product::<u64>() * dtype.bytes();
        Ok(TensorType {
            dtype,
            shape,
            bytes,
        })
    }
    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// The shape, outermost dimension first.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }
    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }
    /// The number of elements.
    pub fn numel(&self) -> u64 {
        self.shape.iter().product()
    }
    /// The number of bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (i, d) in self.shape.iter().enumerate() {
            write!(f, "{}{d}", if i == 0 { "" } else { "," })?;
        }
        f.write_str("]")
    }
}
