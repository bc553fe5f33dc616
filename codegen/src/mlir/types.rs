//! Types of values.

use std::fmt;

/// The type of one number. Integers have no sign; operations define it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// A bit.
    I1,
    /// 8 bits.
    I8,
    /// 16 bits.
    I16,
    /// 32 bits.
    I32,
    /// 64 bits.
    I64,
    /// The upper half of an f32.
    BF16,
    /// IEEE's half precision.
    F16,
    /// IEEE's single precision.
    F32,
    /// IEEE's double precision.
    F64,
}

impl Kind {
    /// MLIR's name of it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::I1 => "i1",
            Kind::I8 => "i8",
            Kind::I16 => "i16",
            Kind::I32 => "i32",
            Kind::I64 => "i64",
            Kind::BF16 => "bf16",
            Kind::F16 => "f16",
            Kind::F32 => "f32",
            Kind::F64 => "f64",
        }
    }

    /// Bytes in memory.
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Kind::I1 | Kind::I8 => 1,
            Kind::I16 | Kind::BF16 | Kind::F16 => 2,
            Kind::I32 | Kind::F32 => 4,
            Kind::I64 | Kind::F64 => 8,
        }
    }

    /// Bits in a register.
    pub(crate) fn bits(self) -> u64 {
        if self == Kind::I1 {
            1
        } else {
            8 * self.bytes()
        }
    }

    /// True for floating-point numbers.
    pub(crate) fn is_float(self) -> bool {
        matches!(self, Kind::BF16 | Kind::F16 | Kind::F32 | Kind::F64)
    }
}

/// The memory that a pointer points into.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Space {
    /// A CPU's.
    Generic,
    /// A GPU's main memory.
    Global,
    /// The memory of a block of a GPU's threads.
    Shared,
}

/// The type of a value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Type {
    /// One number.
    Scalar(Kind),
    /// Several numbers; a vector of one is not a scalar.
    Vector(u32, Kind),
    /// An address.
    Pointer(Space),
    /// A struct of several fields of one type, which some operations return.
    Struct(u32, Kind),
}

impl Type {
    /// `width` numbers: a scalar if `width` is 1.
    pub(crate) fn of(kind: Kind, width: u64) -> Type {
        if width == 1 {
            Type::Scalar(kind)
        } else {
            Type::Vector(width as u32, kind)
        }
    }

    /// The type of its numbers; none for addresses and structs.
    pub(crate) fn kind(self) -> Option<Kind> {
        match self {
            Type::Scalar(kind) | Type::Vector(_, kind) => Some(kind),
            Type::Pointer(_) | Type::Struct(..) => None,
        }
    }

    /// The same number of elements of another kind.
    pub(crate) fn with(self, kind: Kind) -> Type {
        match self {
            Type::Vector(n, _) => Type::Vector(n, kind),
            _ => Type::Scalar(kind),
        }
    }

    /// Bits in a register; none for addresses and structs.
    pub(crate) fn bits(self) -> Option<u64> {
        match self {
            Type::Scalar(kind) => Some(kind.bits()),
            Type::Vector(n, kind) => Some(u64::from(n) * kind.bits()),
            Type::Pointer(_) | Type::Struct(..) => None,
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Type::Scalar(kind) => f.write_str(kind.name()),
            Type::Vector(n, kind) => write!(f, "vector<{n}x{}>", kind.name()),
            Type::Pointer(Space::Generic) => f.write_str("!llvm.ptr"),
            Type::Pointer(Space::Global) => f.write_str("!llvm.ptr<1>"),
            Type::Pointer(Space::Shared) => f.write_str("!llvm.ptr<3>"),
            Type::Struct(n, kind) => {
                let fields = vec![kind.name(); *n as usize];
                write!(f, "!llvm.struct<({})>", fields.join(", "))
            }
        }
    }
}
