//! Operations: an op's identity with its attributes.
//!
//! The table of ops is one declaration, in the crate `ops`. From it come [`OpKind`] (identity
//! without attributes), its [`Facts`], and here [`Op`]: an enum with a variant for each op, which
//! holds the op's attributes as a struct of [`attrs`]. A new op appears in all of them at once.
//! Matches on them do not compile until they handle it.
//!
//! All values are row-major and contiguous.

pub mod attention;
pub mod attrs;
pub mod body;
mod error;
pub mod groups;
mod shape;
pub mod sorting;
mod tensor_cores;
pub mod windows;
mod work;

use crate::device::Processor;
use crate::types::TensorType;
use attrs::Attributes;
pub use attrs::{Attr, AttrError, Attrs, Kind, Number};
use body::Body;
pub use error::{BodyError, Misfit, ShapeError, SpaceError};
pub use ops::{Access, Elements, Facts, OpKind, Purity, maps};
use shape::Call;
pub use shape::{broadcast_shapes, nf4_operands, parse_type};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
pub use work::square_parts;

/// A pattern or type in place of the attributes, for an op that has some.
macro_rules! bound {
    ($attrs:ident, $name:ident) => {
        $name
    };
}
/// The attributes bound to a name, `()` for an op without.
macro_rules! bound_attrs {
    ($name:ident) => {
        &()
    };
    ($name:ident, $attrs:ident) => {
        $name
    };
}
/// The type of an op's attributes.
macro_rules! attrs_type {
    () => {
        ()
    };
    ($attrs:ident) => {
        attrs::$attrs
    };
}
/// An op with its attributes.
macro_rules! made {
    ($kind:ident, $given:expr) => {{
        let () = $given;
        Op::$kind
    }};
    ($kind:ident, $given:expr, $attrs:ident) => {
        Op::$kind($given)
    };
}
/// An op's work: elementwise if the table gives none.
macro_rules! work_of {
    () => {
        work::elementwise
    };
    ($work:ident) => {
        work::$work
    };
}

macro_rules! define {
    ($(
        $kind:ident $(($attrs:ident))? $name:literal: $facts:expr
            => $shape:ident $(, $work:ident)?;
    )*) => {
        /// An operation with its attributes.
        #[derive(Clone)]
        #[allow(missing_docs, reason = "the table says what each op computes")]
        pub enum Op {
            $($kind $((attrs::$attrs))?,)*
        }

        impl Op {
            /// The op's identity.
            pub fn kind(&self) -> OpKind {
                match self {
                    $(Op::$kind { .. } => OpKind::$kind,)*
                }
            }
            /// The attributes as text and files have them.
            pub fn attrs(&self) -> Attrs {
                match self {
                    $(Op::$kind $((bound!($attrs, a)))? => {
                        Attributes::to_attrs(bound_attrs!(a $(, $attrs)?))
                    })*
                }
            }
            fn take(
                kind: OpKind,
                given: &mut BTreeMap<String, Attr>,
            ) -> Result<Op, AttrError> {
                Ok(match kind {
                    $(OpKind::$kind => {
                        made!($kind, Attributes::take($name, given)? $(, $attrs)?)
                    })*
                })
            }
            fn same(&self, other: &Op) -> bool {
                match (self, other) {
                    $((Op::$kind $((bound!($attrs, a)))?, Op::$kind $((bound!($attrs, b)))?) => {
                        Attributes::same(
                            bound_attrs!(a $(, $attrs)?),
                            bound_attrs!(b $(, $attrs)?),
                        )
                    })*
                    _ => false,
                }
            }
            fn shapes(&self, call: &Call<'_>) -> shape::Shapes {
                match self {
                    $(Op::$kind $((bound!($attrs, a)))? => {
                        shape::$shape(bound_attrs!(a $(, $attrs)?), call)
                    })*
                }
            }
            fn work_of(&self, call: &Call<'_>, outputs: &[TensorType]) -> Work {
                match self {
                    $(Op::$kind $((bound!($attrs, a)))? => {
                        work_of!($($work)?)(bound_attrs!(a $(, $attrs)?), call, outputs)
                    })*
                }
            }
        }

        /// Names and kinds of an op's attributes, sorted by name. All are required.
        pub fn attributes(kind: OpKind) -> &'static [(&'static str, Kind)] {
            match kind {
                $(OpKind::$kind => <attrs_type!($($attrs)?) as Attributes>::KEYS,)*
            }
        }
    };
}

ops::ops!(define);

impl Op {
    /// An op by name. An error if there is no such op, or if the attributes are not the op's.
    pub fn new(
        name: &str,
        attrs: impl IntoIterator<Item = (&'static str, Attr)>,
    ) -> Result<Op, AttrError> {
        let attrs = attrs.into_iter().map(|(key, attr)| (key.to_string(), attr));
        Op::from_text(name, attrs.collect())
    }
    /// The same, for attribute names that come from text.
    pub fn from_text(name: &str, given: BTreeMap<String, Attr>) -> Result<Op, AttrError> {
        let kind = OpKind::from_name(name).ok_or_else(|| AttrError::NoOp { name: name.into() })?;
        Op::of(kind, given)
    }
    /// An op of a kind. An error if the attributes are not the op's.
    pub fn of(kind: OpKind, mut given: BTreeMap<String, Attr>) -> Result<Op, AttrError> {
        let op = Op::take(kind, &mut given)?;
        match given.into_keys().next() {
            Some(key) => Err(AttrError::Unknown {
                op: kind.name(),
                key,
            }),
            None => Ok(op),
        }
    }

    /// The op's name.
    pub fn name(&self) -> &'static str {
        self.kind().name()
    }
    /// Facts about the op that do not depend on its attributes.
    pub fn facts(&self) -> &'static Facts {
        self.kind().facts()
    }
    /// An attribute by name. Code that knows the op matches on it instead.
    pub fn attr(&self, key: &str) -> Option<Attr> {
        self.attrs().remove(key)
    }

    /// Result types from operand types; the error says what does not fit.
    pub fn infer(&self, types: &[&TensorType]) -> Result<Vec<TensorType>, ShapeError> {
        let (least, most) = self.facts().inputs;
        let shapes = if (least..=most).contains(&types.len()) {
            let call = Call { types };
            // The rule comes first, because its message about an operand is more precise.
            self.shapes(&call)
                .and_then(|shapes| call.expect_elements(self.facts().elements).map(|()| shapes))
        } else {
            Err(Misfit::Count {
                least,
                most,
                given: types.len(),
            })
        };
        shapes.map_err(|kind| ShapeError {
            op: self.kind(),
            operands: types.iter().map(|&ty| ty.clone()).collect(),
            kind,
        })
    }
    /// Arithmetic and scratch of one run. The types should fit.
    pub fn work(&self, inputs: &[&TensorType], outputs: &[TensorType]) -> Work {
        self.work_of(&Call { types: inputs }, outputs)
    }

    /// True if the result shares the operand's bytes: it never becomes a line.
    pub fn is_alias(&self) -> bool {
        matches!(self, Op::Reshape(_) | Op::Detach)
    }
    /// True if a repeated run gives the same bits.
    pub fn is_pure(&self) -> bool {
        match self {
            Op::Extern(call) => call.pure,
            _ => self.facts().purity == Purity::Pure,
        }
    }
    /// True if no kernel exists for the op: it is planned, and a program outside computes it.
    pub fn is_extern(&self) -> bool {
        matches!(self, Op::Extern(_))
    }
    /// The (operand, result) pairs that may share their bytes.
    pub fn inplace(&self) -> &[(usize, usize)] {
        match self {
            Op::Fused(fused) => fused.body.inplace(),
            _ => self.facts().inplace,
        }
    }
    /// What a kernel of several ops computes.
    pub fn body(&self) -> Option<&Arc<Body>> {
        match self {
            Op::Fused(fused) => Some(&fused.body),
            _ => None,
        }
    }
}

/// Arithmetic and scratch of one run.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Work {
    /// Floating-point operations; a multiply-add is two.
    pub flops: f64,
    /// True if the operations are products that run at the machine's matrix rate.
    pub matrix: bool,
    /// Random words that a product draws: those by which attention drops weights.
    pub draws: f64,
    /// Bytes that the kernel needs while it runs, in addition to operands and results.
    pub scratch: Scratch,
}

/// Bytes of scratch. They differ by what runs the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Scratch {
    /// The runtime's kernel, or a generated one, on a processor.
    pub cpu: u64,
    /// A kernel on a GPU.
    pub gpu: u64,
}

impl Scratch {
    /// The same everywhere.
    pub fn both(bytes: u64) -> Scratch {
        Scratch {
            cpu: bytes,
            gpu: bytes,
        }
    }
    /// Bytes on a kind of hardware.
    pub fn on(self, processor: Processor) -> u64 {
        match processor {
            Processor::Cpu => self.cpu,
            Processor::Gpu => self.gpu,
        }
    }
}

impl PartialEq for Op {
    /// Floating-point attributes are compared by bits: NaN equals itself, and -0.0 is not 0.0.
    fn eq(&self, other: &Op) -> bool {
        self.same(other)
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.name(), self.attrs())
    }
}

#[cfg(test)]
mod tests {
    use super::attrs::Product;
    use super::*;

    #[test]
    fn attributes_are_sorted() {
        for &kind in OpKind::ALL {
            assert!(
                attributes(kind).is_sorted_by_key(|a| a.0),
                "{}",
                kind.name()
            );
        }
    }

    #[test]
    fn types_read_back() {
        for text in ["f32[4,64]", "i64[]", "bool[0]"] {
            assert_eq!(parse_type(text).unwrap().to_string(), text);
        }
        for text in ["f32", "f32[4,]", "f32[-1]", "f9[1]", "f32[4"] {
            assert!(parse_type(text).is_err(), "{text}");
        }
        assert!(parse_type("f32[4294967296,4294967296]").is_err());
    }

    #[test]
    fn ops_take_the_elements_that_kernels_take() {
        let t = |s: &str| parse_type(s).unwrap();
        let error = |op: Op, ty: &str| op.infer(&[&t(ty)]).unwrap_err().to_string();
        assert_eq!(
            error(Op::Exp, "i64[16]"),
            "exp of i64[16]: operand 0 should hold floating-point numbers of 16 bits or more"
        );
        assert_eq!(
            error(Op::Neg, "bool[16]"),
            "neg of bool[16]: operand 0 should hold integers or floating-point numbers of 16 bits \
             or more"
        );
        let two = Op::AddScalar(attrs::Scalar {
            value: Number::Float(2.0),
        });
        assert_eq!(
            error(two, "i64[16]"),
            "add_scalar of i64[16]: value should be an integer, as the elements are i64"
        );
    }

    #[test]
    fn shapes_follow() {
        let t = |s: &str| parse_type(s).unwrap();
        let op = Op::Matmul(Product {
            ta: true,
            tb: false,
        });
        assert_eq!(
            op.infer(&[&t("f32[2,3]"), &t("f32[2,5]")]).unwrap(),
            [t("f32[3,5]")]
        );
        assert!(op.infer(&[&t("f32[3,2]"), &t("f32[2,5]")]).is_err());
        assert!(Op::new("matmul", []).is_err());
    }
}
