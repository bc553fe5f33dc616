//! Which operations exist, and what is known of each: one declaration, in `table.rs`, that the
//! compiler and the runtime share. It is plain data; this crate depends on nothing.
//!
//! * [`OpKind`] is an op's identity. Code that treats ops differently matches on it (or on
//!   `ir::Op`, which also has the attributes), and lists every op: then a new op does not compile
//!   until each such place says what to do with it.
//! * [`Facts`] is what passes may ask of an op without knowing which op it is.
//!
//! The macro [`ops!`] hands the declaration to another macro. The language (`ir`) makes its typed
//! ops from it; this crate makes [`OpKind`] and the facts.

mod table;

use Access::{Element, Row, Whole};
use Elements::{Bits, Computed, Floats, Numbers};

/// What may be assumed of a repeated run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purity {
    /// The same operands give the same bits. Random ops are pure: the state of their generator is
    /// an operand.
    Pure,
    /// Unknown: never run again, never removed.
    Opaque,
}

/// Which elements of its operands a result's element is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// The elements at its own place, broadcast, and single elements of options.
    Element,
    /// The elements of its own row, along the last dimensions, or, in sums, of its own column.
    Row,
    /// Any elements: the op is a kernel by itself.
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

/// What is known of an op, whatever its attributes and operands are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Facts {
    /// The op's name in text.
    pub name: &'static str,
    /// The least and the most number of operands.
    pub inputs: (usize, usize),
    /// The (operand, result) pairs that may share their bytes, if their types are equal. Then the
    /// kernel reads each element of the operand before it writes that element of the result, and no
    /// other element of the operand after that.
    pub inplace: &'static [(usize, usize)],
    /// What may be assumed of a repeated run.
    pub purity: Purity,
    /// What an element of a result is made of. An op that is not [`Access::Whole`] may be a step of
    /// a generated kernel.
    pub access: Access,
    /// True if code can be generated for the op by itself, although it is [`Access::Whole`] and no
    /// step of other kernels.
    pub is_generated: bool,
    /// The element types that operand 0 may have. The shape rule says what the other operands need.
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
    /// True if the op is for floating-point numbers only.
    pub const fn is_real(&self) -> bool {
        matches!(self.elements, Elements::Floats)
    }
    /// True if a generated kernel may compute the op.
    pub const fn may_be_generated(&self) -> bool {
        self.is_generated || !matches!(self.access, Whole)
    }
}

// How the table says what an op is. Everything not said is the most careful answer.

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
/// One operand, element by element, to a result of its type.
const fn unary() -> Facts {
    takes(1, 1).inplace(&[(0, 0)]).access(Element).on(Numbers)
}
/// One operand, element by element, to a result of another type.
const fn converts() -> Facts {
    takes(1, 1).access(Element).on(Computed)
}
/// Two operands, broadcast, to a result of their element type.
const fn binary() -> Facts {
    takes(2, 2)
        .on(Computed)
        .inplace(&[(0, 0), (1, 0)])
        .access(Element)
        .broadcasts()
}
/// Two operands, broadcast, to bools.
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

            /// What is known of the op.
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
        // Some hundred names, compared once for each op of a text or a file.
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
