//! Operations on numbers, and the types that they take.

use super::{Kind, Mismatch, Type};

/// An operation whose operands and result have one type.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Arith {
    Addi,
    Subi,
    Muli,
    Divui,
    Remui,
    Andi,
    Ori,
    Xori,
    Shli,
    Shrsi,
    Shrui,
    Minui,
    Minsi,
    Maxsi,
    Addf,
    Subf,
    Mulf,
    Divf,
    /// A quotient that may be the product with an approximate inverse.
    DivfApprox,
    Negf,
    /// The larger number; NaN if one of them is NaN.
    Maximumf,
    /// The larger number; if one of them is NaN, the other one.
    Maxnumf,
    Absf,
    Sqrt,
    /// `a * b + c`, rounded once.
    Fma,
    /// 2^x as the machine approximates it.
    Exp2,
}

impl Arith {
    /// MLIR's name of it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Arith::Addi => "arith.addi",
            Arith::Subi => "arith.subi",
            Arith::Muli => "arith.muli",
            Arith::Divui => "arith.divui",
            Arith::Remui => "arith.remui",
            Arith::Andi => "arith.andi",
            Arith::Ori => "arith.ori",
            Arith::Xori => "arith.xori",
            Arith::Shli => "arith.shli",
            Arith::Shrsi => "arith.shrsi",
            Arith::Shrui => "arith.shrui",
            Arith::Minui => "arith.minui",
            Arith::Minsi => "arith.minsi",
            Arith::Maxsi => "arith.maxsi",
            Arith::Addf => "arith.addf",
            Arith::Subf => "arith.subf",
            Arith::Mulf => "arith.mulf",
            Arith::Divf | Arith::DivfApprox => "arith.divf",
            Arith::Negf => "arith.negf",
            Arith::Maximumf => "arith.maximumf",
            Arith::Maxnumf => "arith.maxnumf",
            Arith::Absf => "math.absf",
            Arith::Sqrt => "math.sqrt",
            Arith::Fma => "math.fma",
            Arith::Exp2 => "math.exp2",
        }
    }

    /// MLIR's flags for inexact results.
    pub(super) fn fastmath(self) -> Option<&'static str> {
        match self {
            Arith::Exp2 => Some("afn"),
            Arith::DivfApprox => Some("arcp,afn"),
            _ => None,
        }
    }

    fn operands(self) -> usize {
        match self {
            Arith::Negf | Arith::Absf | Arith::Sqrt | Arith::Exp2 => 1,
            Arith::Fma => 3,
            _ => 2,
        }
    }

    fn is_float(self) -> bool {
        match self {
            Arith::Addi
            | Arith::Subi
            | Arith::Muli
            | Arith::Divui
            | Arith::Remui
            | Arith::Andi
            | Arith::Ori
            | Arith::Xori
            | Arith::Shli
            | Arith::Shrsi
            | Arith::Shrui
            | Arith::Minui
            | Arith::Minsi
            | Arith::Maxsi => false,
            Arith::Addf
            | Arith::Subf
            | Arith::Mulf
            | Arith::Divf
            | Arith::DivfApprox
            | Arith::Negf
            | Arith::Maximumf
            | Arith::Maxnumf
            | Arith::Absf
            | Arith::Sqrt
            | Arith::Fma
            | Arith::Exp2 => true,
        }
    }

    /// Whether it takes operands of these types.
    pub(crate) fn check(self, types: &[Type]) -> Result<(), Mismatch> {
        if types.len() != self.operands() {
            return Err(Mismatch::Count {
                wanted: self.operands(),
                given: types.len(),
            });
        }
        same(types)?;
        class(types[0], self.is_float())
    }
}

/// A comparison.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Predicate {
    Eq,
    Ne,
    Slt,
    Sle,
    Sgt,
    Ult,
    Ule,
    /// For floating-point numbers: false if one is NaN.
    Oeq,
    Olt,
    Ole,
    Ogt,
    /// True if one is NaN.
    Une,
    /// True only if one is NaN.
    Uno,
}

impl Predicate {
    /// The name of the operation that compares by it.
    pub(crate) fn op(self) -> &'static str {
        if self.is_float() {
            "arith.cmpf"
        } else {
            "arith.cmpi"
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Predicate::Eq => "eq",
            Predicate::Ne => "ne",
            Predicate::Slt => "slt",
            Predicate::Sle => "sle",
            Predicate::Sgt => "sgt",
            Predicate::Ult => "ult",
            Predicate::Ule => "ule",
            Predicate::Oeq => "oeq",
            Predicate::Olt => "olt",
            Predicate::Ole => "ole",
            Predicate::Ogt => "ogt",
            Predicate::Une => "une",
            Predicate::Uno => "uno",
        }
    }

    fn is_float(self) -> bool {
        matches!(
            self,
            Predicate::Oeq
                | Predicate::Olt
                | Predicate::Ole
                | Predicate::Ogt
                | Predicate::Une
                | Predicate::Uno
        )
    }

    /// Whether it compares numbers of these types.
    pub(crate) fn check(self, a: Type, b: Type) -> Result<(), Mismatch> {
        same(&[a, b])?;
        class(a, self.is_float())
    }
}

/// A conversion, element by element.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Convert {
    /// To a wider integer, with zeros.
    Extui,
    /// To a wider integer, with the sign.
    Extsi,
    /// To a narrower integer: its low bits.
    Trunci,
    /// To a wider floating-point number.
    Extf,
    /// To a narrower floating-point number, rounded.
    Truncf,
    /// A signed integer to a floating-point number.
    Sitofp,
    /// A floating-point number to a signed integer.
    Fptosi,
    /// The same bits.
    Bitcast,
}

impl Convert {
    /// MLIR's name of it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Convert::Extui => "arith.extui",
            Convert::Extsi => "arith.extsi",
            Convert::Trunci => "arith.trunci",
            Convert::Extf => "arith.extf",
            Convert::Truncf => "arith.truncf",
            Convert::Sitofp => "arith.sitofp",
            Convert::Fptosi => "arith.fptosi",
            Convert::Bitcast => "arith.bitcast",
        }
    }

    /// Whether it converts between these kinds.
    pub(crate) fn check(self, from: Type, to: Kind) -> Result<(), Mismatch> {
        let wrong = Mismatch::Conversion(from, from.with(to));
        let Some(kind) = from.kind() else {
            return Err(wrong);
        };
        let (floats, wider) = ((kind.is_float(), to.is_float()), kind.bits() < to.bits());
        let narrower = kind.bits() > to.bits();
        let fits = match self {
            Convert::Extui | Convert::Extsi => floats == (false, false) && wider,
            Convert::Trunci => floats == (false, false) && narrower,
            Convert::Extf => floats == (true, true) && wider,
            Convert::Truncf => floats == (true, true) && narrower,
            Convert::Sitofp => floats == (false, true),
            Convert::Fptosi => floats == (true, false),
            Convert::Bitcast => kind.bits() == to.bits(),
        };
        if fits { Ok(()) } else { Err(wrong) }
    }
}

/// Whether one of two values can be chosen by bits: one for both, or, for vectors, one for each
/// element.
pub(crate) fn select(condition: Type, a: Type, b: Type) -> Result<(), Mismatch> {
    same(&[a, b])?;
    if condition == Type::Scalar(Kind::I1) || condition == a.with(Kind::I1) {
        return Ok(());
    }
    Err(Mismatch::Wants {
        wanted: "bits to choose by",
        given: condition,
    })
}

/// A number that each thread of a GPU knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Special {
    /// The thread's number in its block.
    Thread,
    /// The block's number.
    Block,
    /// The number of started blocks.
    Blocks,
}

impl Special {
    pub(super) fn name(self) -> &'static str {
        match self {
            Special::Thread => "nvvm.read.ptx.sreg.tid.x",
            Special::Block => "nvvm.read.ptx.sreg.ctaid.x",
            Special::Blocks => "nvvm.read.ptx.sreg.nctaid.x",
        }
    }
}

fn same(types: &[Type]) -> Result<(), Mismatch> {
    match types.iter().find(|&&ty| ty != types[0]) {
        Some(&other) => Err(Mismatch::Different(types[0], other)),
        None => Ok(()),
    }
}

fn class(ty: Type, float: bool) -> Result<(), Mismatch> {
    match ty.kind() {
        Some(kind) if kind.is_float() == float => Ok(()),
        _ if float => Err(Mismatch::NotFloat(ty)),
        _ => Err(Mismatch::NotInteger(ty)),
    }
}
