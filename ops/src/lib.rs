//! Which operations exist, and the facts about each: one declaration, in `table.rs`, that the
//! compiler and the runtime share. It is plain data. This crate has no dependencies.
//!
//! * [`OpKind`] is an op's identity. Code that distinguishes ops matches on it (or on `ir::Op`,
//!   which also has the attributes), and lists every op. So a new op does not compile until each
//!   such place handles it.
//! * [`Facts`] are what passes may use without knowing which op it is.
//!
//! The macro [`ops!`] passes the declaration to another macro. The language (`ir`) makes its typed
//! ops from it; this crate makes [`OpKind`] and the facts.

pub mod maps;
mod table;

use Access::{Element, Row, Whole};
use Elements::{Bits, Computed, Floats, Numbers};

/// Whether a repeated run gives the same bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purity {
    /// The same operands give the same bits. Random ops are pure, because the state of their
    /// generator is an operand.
    Pure,
    /// Unknown: never run again, never removed.
    Opaque,
}

/// The elements of the operands on which an element of a result depends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// The elements at its own place, broadcast, and single elements of options.
    Element,
    /// The elements of its own row, along the last dimensions, or, in sums, of its own column.
    Row,
    /// Any elements: the op has its own kernel.
    Whole,
}

/// The element types that an op takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Elements {
    /// Every type: the elements are only moved.
    Any,
    /// Bools, integers, and floating-point numbers of 16 bits or more.
    Computed,
    /// Integers, and floating-point numbers of 16 bits or more.
    Numbers,
    /// Bools and integers.
    Bits,
    /// Floating-point numbers of 16 bits or more.
    Floats,
}

/// Facts about an op that do not depend on its attributes and operands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Facts {
    /// The op's name in text.
    pub name: &'static str,
    /// The smallest and the largest number of operands.
    pub inputs: (usize, usize),
    /// The (operand, result) pairs that may share their bytes, if their types are equal. Then the
    /// kernel reads each element of the operand before it writes that element of the result, and no
    /// other element of the operand after that.
    pub inplace: &'static [(usize, usize)],
    /// Whether a repeated run gives the same bits.
    pub purity: Purity,
    /// The elements on which an element of a result depends. An op that is not [`Access::Whole`]
    /// may be a step of a generated kernel.
    pub access: Access,
    /// True if a kernel can be generated for this op alone. Such an op is [`Access::Whole`], and
    /// cannot be a step of other kernels.
    pub is_generated: bool,
    /// The element types that operand 0 may have. The shape rule checks the other operands.
    pub elements: Elements,
    /// True if the op computes an exponential, a logarithm, or a function made from one. Generated
    /// kernels have these for f32 only.
    pub is_function: bool,
    /// True if the op draws random numbers.
    pub is_random: bool,
    /// True if the operands broadcast against each other to the shape of the result.
    pub broadcasts: bool,
    /// The first operand of which only single elements are read, at fixed places: options of an
    /// optimizer, the state of a random number generator. The operands after it are of this kind
    /// too.
    pub options_from: Option<usize>,
    /// True if the runtime has a kernel for the op.
    pub has_kernel: bool,
}

impl Facts {
    /// True if the op supports only floating-point numbers.
    pub const fn is_real(&self) -> bool {
        matches!(self.elements, Elements::Floats)
    }
    /// True if a generated kernel may compute the op.
    pub const fn may_be_generated(&self) -> bool {
        self.is_generated || !matches!(self.access, Whole)
    }
}

// Functions for the table. A fact that the table does not state has the most careful value.

/// An op with this many operands, at least and at most.
const fn takes(least: usize, most: usize) -> Facts {
    Facts {
        name: "",
        inputs: (least, most),
        inplace: &[],
        purity: Purity::Pure,
        access: Whole,
        is_generated: false,
        elements: Elements::Any,
        is_function: false,
        is_random: false,
        broadcasts: false,
        options_from: None,
        has_kernel: true,
    }
}
/// One operand, element by element, with a result of the same type.
const fn unary() -> Facts {
    takes(1, 1).inplace(&[(0, 0)]).access(Element).on(Numbers)
}
/// One operand, element by element, with a result of another type.
const fn converts() -> Facts {
    takes(1, 1).access(Element).on(Computed)
}
/// Two operands, broadcast, with a result of their element type.
const fn binary() -> Facts {
    takes(2, 2)
        .on(Computed)
        .inplace(&[(0, 0), (1, 0)])
        .access(Element)
        .broadcasts()
}
/// Two operands, broadcast, with bools as result.
const fn compare() -> Facts {
    takes(2, 2).access(Element).on(Computed).broadcasts()
}
/// The derivative of an elementwise function.
const fn derivative() -> Facts {
    takes(2, 2)
        .inplace(&[(0, 0), (1, 0)])
        .access(Element)
        .real()
}
/// A softmax or its logarithm.
const fn softmax() -> Facts {
    takes(1, 1).inplace(&[(0, 0)]).access(Row).real().function()
}
/// The derivative of one of them.
const fn softmax_bwd() -> Facts {
    softmax().inplace(&[(0, 0), (1, 0)]).inputs(2, 2)
}
/// A reduction over some dimensions.
const fn reduction() -> Facts {
    takes(1, 1).access(Row).on(Numbers)
}

impl Facts {
    const fn inputs(self, least: usize, most: usize) -> Facts {
        Facts {
            inputs: (least, most),
            ..self
        }
    }
    const fn inplace(self, inplace: &'static [(usize, usize)]) -> Facts {
        Facts { inplace, ..self }
    }
    const fn access(self, access: Access) -> Facts {
        Facts { access, ..self }
    }
    const fn opaque(self) -> Facts {
        Facts {
            purity: Purity::Opaque,
            ..self
        }
    }
    const fn generated(self) -> Facts {
        Facts {
            is_generated: true,
            ..self
        }
    }
    const fn on(self, elements: Elements) -> Facts {
        Facts { elements, ..self }
    }
    const fn real(self) -> Facts {
        self.on(Floats)
    }
    const fn function(self) -> Facts {
        Facts {
            is_function: true,
            ..self
        }
    }
    const fn random(self) -> Facts {
        Facts {
            is_random: true,
            ..self
        }
    }
    const fn broadcasts(self) -> Facts {
        Facts {
            broadcasts: true,
            ..self
        }
    }
    const fn options_from(self, first: usize) -> Facts {
        Facts {
            options_from: Some(first),
            ..self
        }
    }
    const fn no_kernel(self) -> Facts {
        Facts {
            has_kernel: false,
            ..self
        }
    }
    const fn named(self, name: &'static str) -> Facts {
        Facts { name, ..self }
    }
}

macro_rules! kinds {
    ($($kind:ident $(($attrs:ident))? $name:literal: $facts:expr =>
        $shape:ident $(, $work:ident)?;)*) => {
        /// An op's identity, in the order of the table.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[allow(missing_docs, reason = "the table says what each op computes")]
        #[repr(u16)]
        pub enum OpKind {
            $($kind),*
        }

        impl OpKind {
            /// Every op.
            pub const ALL: &'static [OpKind] = &[$(OpKind::$kind),*];

            /// The facts about the op.
            pub const fn facts(self) -> &'static Facts {
                const FACTS: &[Facts] = &[$($facts.named($name)),*];
                &FACTS[self as usize]
            }
        }
    };
}

ops!(kinds);

impl OpKind {
    /// The op's name in text.
    pub const fn name(self) -> &'static str {
        self.facts().name
    }
    /// The op of a name.
    pub fn from_name(name: &str) -> Option<OpKind> {
        // A linear search: about a hundred names, once for each op of a text or a file.
        OpKind::ALL.iter().copied().find(|kind| kind.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        for &kind in OpKind::ALL {
            assert_eq!(OpKind::from_name(kind.name()), Some(kind), "{kind:?}");
        }
    }

    #[test]
    fn facts_fit_together() {
        for &kind in OpKind::ALL {
            let (facts, name) = (kind.facts(), kind.name());
            let (least, most) = facts.inputs;
            assert!(least <= most, "{name}: {least} to {most} operands");
            for &(operand, _) in facts.inplace {
                assert!(operand < most, "{name}: operand {operand} in place");
            }
            if let Some(first) = facts.options_from {
                assert!(first < most, "{name}: options from operand {first}");
                let data = facts.inplace.iter().all(|&(operand, _)| operand < first);
                assert!(data, "{name}: an operand of options in place");
            }
            let alone = !facts.is_generated || facts.access == Whole;
            assert!(
                alone,
                "{name} is a step of kernels: `generated` says nothing"
            );
        }
    }
}
