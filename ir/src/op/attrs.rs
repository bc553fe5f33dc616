//! Attributes of ops: a struct for each set of attributes, and their form in text.
//!
//! Attributes are complete (no defaults) and normalised by the builder of the op: dimensions count
//! from the front, sizes are resolved. Fields are sorted by name, as in text.

use super::body::Body;
use crate::types::DType;
use std::collections::BTreeMap;
use std::sync::Arc;
use thiserror::Error;

/// An attribute's value, as text and files have it.
#[derive(Clone, PartialEq, Debug)]
pub enum Attr {
    /// `dim=1`
    Int(i64),
    /// `eps=1e-5`
    Float(f64),
    /// `keepdim=true`
    Bool(bool),
    /// `dims=[0,1]`
    Ints(Vec<i64>),
    /// `dtype=f32`
    Type(DType),
    /// `name="aten.foo"`
    Str(String),
    /// `body={%2 = add %0, %1 | %3 = relu %2 | %3}`
    Body(Arc<Body>),
}

/// An attribute's kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Kind {
    Int,
    Float,
    /// Int or Float, for a number that is used like an operand. Int for integer tensors.
    Number,
    Bool,
    Ints,
    Type,
    Str,
    Body,
}

/// Attributes as text and files have them, in the order of their names.
pub type Attrs = BTreeMap<&'static str, Attr>;

/// A number that is used like an operand: an integer for integer tensors.
#[derive(Clone, Copy, PartialEq, Debug)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Number {
    Int(i64),
    Float(f64),
}

impl Number {
    /// The number as `f64`; a large integer is rounded.
    pub fn to_f64(self) -> f64 {
        match self {
            Number::Int(i) => i as f64,
            Number::Float(x) => x,
        }
    }
}

/// The type of a field of attributes.
trait Field: Sized {
    const KIND: Kind;
    fn to_attr(&self) -> Attr;
    fn from_attr(attr: &Attr) -> Option<Self>;
    /// Equality by bits: NaN equals itself, and -0.0 is not 0.0.
    fn same(&self, other: &Self) -> bool;
}

macro_rules! field {
    ($ty:ty, $kind:ident, $attr:ident) => {
        field!($ty, $kind, $attr, |a, b| a == b);
    };
    ($ty:ty, $kind:ident, $attr:ident, $same:expr) => {
        impl Field for $ty {
            const KIND: Kind = Kind::$kind;
            fn to_attr(&self) -> Attr {
                Attr::$attr(self.clone())
            }
            fn from_attr(attr: &Attr) -> Option<Self> {
                match attr {
                    Attr::$attr(value) => Some(value.clone()),
                    _ => None,
                }
            }
            fn same(&self, other: &Self) -> bool {
                let same: fn(&Self, &Self) -> bool = $same;
                same(self, other)
            }
        }
    };
}

field!(i64, Int, Int);
field!(f64, Float, Float, |a, b| a.to_bits() == b.to_bits());
field!(bool, Bool, Bool);
field!(Vec<i64>, Ints, Ints);
field!(DType, Type, Type);
field!(String, Str, Str);
field!(Arc<Body>, Body, Body);

impl Field for Number {
    const KIND: Kind = Kind::Number;
    fn to_attr(&self) -> Attr {
        match *self {
            Number::Int(i) => Attr::Int(i),
            Number::Float(x) => Attr::Float(x),
        }
    }
    fn from_attr(attr: &Attr) -> Option<Number> {
        match *attr {
            Attr::Int(i) => Some(Number::Int(i)),
            Attr::Float(x) => Some(Number::Float(x)),
            _ => None,
        }
    }
    fn same(&self, other: &Number) -> bool {
        match (self, other) {
            (Number::Int(a), Number::Int(b)) => a == b,
            (Number::Float(a), Number::Float(b)) => a.same(b),
            _ => false,
        }
    }
}

/// Why attributes are wrong.
#[derive(Clone, PartialEq, Debug, Error)]
#[allow(missing_docs, reason = "the messages are the documentation")]
pub enum AttrError {
    #[error("there is no op {name}")]
    NoOp { name: String },
    #[error("{op} needs the attribute {key}")]
    Missing { op: &'static str, key: &'static str },
    #[error("{op} has no attribute {key}")]
    Unknown { op: &'static str, key: String },
    #[error("{op}: attribute {key} should be of kind {kind:?}, not {given:?}")]
    Kind {
        op: &'static str,
        key: &'static str,
        kind: Kind,
        given: Attr,
    },
}

impl From<AttrError> for String {
    fn from(error: AttrError) -> String {
        error.to_string()
    }
}

/// A set of attributes. An op without attributes has `()`.
pub(super) trait Attributes: Sized {
    /// Names and kinds, sorted by name.
    const KEYS: &'static [(&'static str, Kind)];
    fn to_attrs(&self) -> Attrs;
    /// Removes the op's attributes from `given`, and returns them.
    fn take(op: &'static str, given: &mut BTreeMap<String, Attr>) -> Result<Self, AttrError>;
    fn same(&self, other: &Self) -> bool;
}

impl Attributes for () {
    const KEYS: &'static [(&'static str, Kind)] = &[];
    fn to_attrs(&self) -> Attrs {
        Attrs::new()
    }
    fn take(_: &'static str, _: &mut BTreeMap<String, Attr>) -> Result<(), AttrError> {
        Ok(())
    }
    fn same(&self, (): &()) -> bool {
        true
    }
}

fn take<T: Field>(
    op: &'static str,
    key: &'static str,
    given: &mut BTreeMap<String, Attr>,
) -> Result<T, AttrError> {
    let given = given.remove(key).ok_or(AttrError::Missing { op, key })?;
    T::from_attr(&given).ok_or(AttrError::Kind {
        op,
        key,
        kind: T::KIND,
        given,
    })
}

macro_rules! attributes {
    ($($(#[$doc:meta])* $name:ident { $($(#[$about:meta])* $field:ident: $ty:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $name {
            $($(#[$about])* pub $field: $ty,)*
        }

        impl Attributes for $name {
            const KEYS: &'static [(&'static str, Kind)] =
                &[$((stringify!($field), <$ty as Field>::KIND)),*];
            fn to_attrs(&self) -> Attrs {
                Attrs::from([$((stringify!($field), self.$field.to_attr())),*])
            }
            fn take(
                op: &'static str,
                given: &mut BTreeMap<String, Attr>,
            ) -> Result<$name, AttrError> {
                $(let $field = take(op, stringify!($field), given)?;)*
                Ok($name { $($field),* })
            }
            fn same(&self, other: &$name) -> bool {
                $(self.$field.same(&other.$field))&&*
            }
        }

        impl PartialEq for $name {
            fn eq(&self, other: &$name) -> bool {
                self.same(other)
            }
        }
    )*};
}

attributes! {
    /// Of `gelu` and its derivative.
    Gelu {
        /// True for the approximation with tanh.
        tanh: bool,
    }
    /// Of `cast`.
    Cast {
        /// The element type of the result.
        dtype: DType,
    }
    /// Of `clamp`.
    Clamp {
        /// The largest element of the result.
        max: Number,
        /// The smallest.
        min: Number,
    }
    /// Of ops of a tensor and a number.
    Scalar {
        /// The number.
        value: Number,
    }
    /// Of reductions.
    Reduction {
        /// Dimensions to reduce: sorted, distinct, never empty.
        dims: Vec<i64>,
        /// True if they stay, with size 1.
        keepdim: bool,
    }
    /// Of ops along one dimension.
    Along {
        /// The dimension.
        dim: i64,
    }
    /// Of `topk`.
    TopK {
        /// The dimension to choose along.
        dim: i64,
        /// How many elements to choose.
        k: i64,
        /// True for the largest, false for the smallest.
        largest: bool,
    }
    /// Of `layer_norm`.
    LayerNorm {
        /// How many of the last dimensions are normalised.
        dims: i64,
        /// Added to the variance.
        eps: f64,
    }
    /// Of `layer_norm_bwd`.
    LayerNormBwd {
        /// How many of the last dimensions were normalised.
        dims: i64,
        /// 1 for each result that is needed, else 0: dx, dw, db.
        mask: Vec<i64>,
    }
    /// Of `batch_norm`.
    BatchNorm {
        /// Added to the variance.
        eps: f64,
    }
    /// Of `batch_norm_bwd`.
    BatchNormBwd {
        /// 1 for each result that is needed, else 0: dx, dw, db.
        mask: Vec<i64>,
    }
    /// Of products.
    Product {
        /// True if the last two dimensions of the left factor are read transposed.
        ta: bool,
        /// The same for the right factor.
        tb: bool,
    }
    /// Of `grouped_matmul`.
    GroupedProduct {
        /// True if the last two dimensions of the matrices are read transposed.
        tb: bool,
    }
    /// Of `convolution`. The lists have a number for each spatial dimension.
    Convolution {
        /// Distance between the kernel's elements.
        dilation: Vec<i64>,
        /// How many groups the channels are divided into.
        groups: i64,
        /// Zeros at each border.
        padding: Vec<i64>,
        /// Distance between windows.
        stride: Vec<i64>,
    }
    /// Of `convolution_bwd`.
    ConvolutionBwd {
        /// As in [`Convolution`].
        dilation: Vec<i64>,
        /// As in [`Convolution`].
        groups: i64,
        /// 1 for each result that is needed, else 0: dx, dw, db.
        mask: Vec<i64>,
        /// As in [`Convolution`].
        padding: Vec<i64>,
        /// As in [`Convolution`].
        stride: Vec<i64>,
    }
    /// Of `max_pool2d`. The lists have two numbers.
    Pool {
        /// True if the last window may reach beyond the border.
        ceil: bool,
        /// Distance between a window's elements.
        dilation: Vec<i64>,
        /// Size of a window.
        kernel: Vec<i64>,
        /// Elements at each border that never are the maximum.
        padding: Vec<i64>,
        /// Distance between windows.
        stride: Vec<i64>,
    }
    /// Of `max_pool2d_bwd`: those of `max_pool2d`, and the shape of its operand.
    PoolBwd {
        /// True if the last window may reach beyond the border.
        ceil: bool,
        /// Distance between a window's elements.
        dilation: Vec<i64>,
        /// Size of a window.
        kernel: Vec<i64>,
        /// Elements at each border that never are the maximum.
        padding: Vec<i64>,
        /// The shape.
        shape: Vec<i64>,
        /// Distance between windows.
        stride: Vec<i64>,
    }
    /// Of ops with the shape of their result as an attribute.
    Sizes {
        /// The shape.
        shape: Vec<i64>,
    }
    /// Of attention.
    Attention {
        /// True if a query uses only the keys up to its own position.
        causal: bool,
        /// The factor of the scores.
        scale: f64,
    }
    /// Of attention with heads inside rows.
    AttentionRows {
        /// True if a query uses only the keys up to its own position.
        causal: bool,
        /// The places of the first heads of q, k and v in their rows; -1 if heads contain rows.
        first: Vec<i64>,
        /// The number of heads of q, and of k and v.
        heads: Vec<i64>,
        /// The factor of the scores.
        scale: f64,
    }
    /// Of `embedding`.
    Embedding {
        /// The index whose row is not trained; -1 for none.
        padding: i64,
    }
    /// Of `embedding_bwd`.
    EmbeddingBwd {
        /// The index whose row gets no gradient; -1 for none.
        padding: i64,
        /// Rows of the table.
        rows: i64,
    }
    /// Of `nll_loss`.
    NllLoss {
        /// The target that does not count.
        ignore: i64,
        /// One of the constants [`NllLoss::NONE`], [`NllLoss::MEAN`], [`NllLoss::SUM`].
        reduction: i64,
    }
    /// Of `nll_sum`.
    NllSum {
        /// The target that does not count.
        ignore: i64,
    }
    /// Of `nll_loss_bwd`.
    NllLossBwd {
        /// The element type of the result.
        dtype: DType,
        /// The target that does not count.
        ignore: i64,
        /// As in [`NllLoss`].
        reduction: i64,
        /// The shape of the result.
        shape: Vec<i64>,
    }
    /// Of `scatter_value`.
    ScatterValue {
        /// The dimension to write along.
        dim: i64,
        /// What is written.
        value: Number,
    }
    /// Of `index_put`.
    IndexPut {
        /// True if values are added, false if they replace.
        accumulate: bool,
    }
    /// Of `permute` and `flip`.
    Dims {
        /// The dimensions.
        dims: Vec<i64>,
    }
    /// Of `slice` and `slice_scatter`: `start:end:step` of a dimension.
    Slice {
        /// The dimension.
        dim: i64,
        /// The end, which is not part of the slice.
        end: i64,
        /// The first index.
        start: i64,
        /// Distance between indices.
        step: i64,
    }
    /// Of `pad`.
    Pad {
        /// Elements before and after, for each dimension, outermost first. Negative ones cut.
        pad: Vec<i64>,
        /// The value of new elements.
        value: Number,
    }
    /// Of `full`.
    Full {
        /// The element type.
        dtype: DType,
        /// The shape.
        shape: Vec<i64>,
        /// The value of each element.
        value: Number,
    }
    /// Of `nf4`.
    Decoded {
        /// The element type.
        dtype: DType,
        /// The shape.
        shape: Vec<i64>,
    }
    /// Of `arange`.
    Arange {
        /// The element type.
        dtype: DType,
        /// The shape, of one dimension.
        shape: Vec<i64>,
        /// The first element.
        start: Number,
        /// The difference between elements.
        step: Number,
    }
    /// Of random tensors.
    Random {
        /// The element type.
        dtype: DType,
        /// The shape.
        shape: Vec<i64>,
        /// Distinguishes the random ops of a graph.
        stream: i64,
    }
    /// Of `dropout` and `dropout_key`.
    Dropout {
        /// The probability that an element becomes 0.
        p: f64,
        /// Distinguishes the random ops of a graph.
        stream: i64,
    }
    /// Of `round_random`.
    Stream {
        /// Distinguishes the random ops of a graph.
        stream: i64,
    }
    /// Of `dropout_bwd`.
    DropoutBwd {
        /// The factor of the elements that were kept.
        scale: f64,
    }
    /// Of `clip_scale`.
    ClipScale {
        /// The element type of the result, `f32` or `f64`.
        dtype: DType,
        /// The largest norm of all gradients together.
        max_norm: f64,
    }
    /// Of `fused`.
    Fused {
        /// The ops of the kernel.
        body: Arc<Body>,
    }
    /// Of `extern`.
    Extern {
        /// The operator's name where it was traced.
        name: String,
        /// The call's name there, by which the program that runs it finds its arguments.
        node: String,
        /// True if a repeated run gives the same bits.
        pure: bool,
        /// Types of the results, separated by spaces: `f32[4,4] i64[4]`.
        types: String,
    }
}

impl NllLoss {
    /// `reduction`: a loss for each row.
    pub const NONE: i64 = 0;
    /// `reduction`: the mean of the losses of rows that count.
    pub const MEAN: i64 = 1;
    /// `reduction`: the sum.
    pub const SUM: i64 = 2;
}
