//! What a kernel computes, as a graph of instructions: a node is one instruction of the dialects
//! `arith` and `math`, a load, or a sum over a row. Equal nodes are one, and a node's operands come
//! before it.

use crate::mlir::{self, Arith, Convert, Kind, Predicate, Type};
use ir::op::body::{Place, Space};
use std::collections::HashMap;
use std::panic::Location;

/// A node's number.
pub(super) type Id = usize;

/// The directions in which a value varies: rows, columns.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Span {
    pub(super) rows: bool,
    pub(super) columns: bool,
}

impl Span {
    /// The span of a value in a space.
    pub(super) fn of(space: &Space, v: usize) -> Span {
        let (rows, columns) = space.span(v);
        Span { rows, columns }
    }

    pub(super) fn and(self, other: Span) -> Span {
        Span {
            rows: self.rows || other.rows,
            columns: self.columns || other.columns,
        }
    }
}

/// How the elements of a row are combined.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Fold {
    Sum,
    /// The largest number; NaN if one of them is NaN.
    Max,
    /// The largest, of numbers; anything if one is NaN.
    MaxNumber,
    Min,
    Any,
}

/// An instruction.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) enum Prim {
    /// The element of an operand at this place.
    Load(usize, Place),
    /// One fixed element of an operand, for all rows and columns.
    LoadAt(usize, u64),
    /// A number by its bits.
    Const(u64),
    /// Operands and result of one type.
    Same(Arith),
    /// Two operands of one type; the result is a bit.
    Compare(Predicate),
    /// A bit and two values.
    Select,
    /// Converts one type to another.
    Convert(Convert),
    /// An F32 as the bits of the nearest bf16, by an instruction of GPUs.
    Bf16,
    /// The elements of a row as one number.
    Fold(Fold),
    /// A power: an F64 and an I64, the exponent. One number, not a vector.
    Power,
    /// Random words: the element's number selects one; operands are the seed and the step, I64
    /// both.
    Random(u32),
    /// The number of the element in its row.
    Column,
}

/// A node.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Node {
    pub(super) prim: Prim,
    pub(super) args: Vec<Id>,
    pub(super) kind: Kind,
    pub(super) span: Span,
    /// The number of passes over the row that must come before this can be computed.
    pub(super) stage: usize,
}

/// How exponentials, logarithms and similar functions are computed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) enum Functions {
    /// By polynomials: several instructions, the same bits on every machine.
    #[default]
    Polynomials,
    /// By the approximate instructions of GPUs, which cost no more than loading the result.
    Hardware,
}

/// Exponentials of a row below its largest element, and their sum.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exponentials {
    pub(super) max: Id,
    pub(super) e: Id,
    pub(super) sum: Id,
}

/// The graph.
#[derive(Default)]
pub(super) struct Dag {
    pub(super) nodes: Vec<Node>,
    pub(super) exponentials: Vec<Exponentials>,
    index: HashMap<Node, Id>,
    /// True for results of expensive functions. They are kept from pass to pass instead of computed
    /// again.
    pub(super) dear: Vec<bool>,
    /// How functions such as the exponential are computed.
    pub(super) functions: Functions,
    /// The first instruction that does not fit its operands.
    error: Option<mlir::Error>,
}

impl Dag {
    pub(super) fn new(functions: Functions) -> Dag {
        Dag {
            functions,
            ..Dag::default()
        }
    }

    /// The first instruction since the last call that does not fit its operands.
    pub(super) fn take_error(&mut self) -> Option<mlir::Error> {
        self.error.take()
    }

    pub(super) fn kind(&self, id: Id) -> Kind {
        self.nodes[id].kind
    }

    fn node(&mut self, node: Node) -> Id {
        if let Some(&id) = self.index.get(&node) {
            return id;
        }
        let id = self.nodes.len();
        self.index.insert(node.clone(), id);
        self.nodes.push(node);
        self.dear.push(false);
        id
    }

    /// Stores the first error. The instruction is still added, and the kernel is given up when its
    /// op is complete.
    #[track_caller]
    fn checked(&mut self, op: &'static str, check: Result<(), mlir::Mismatch>) {
        if let Err(why) = check {
            let place = Location::caller();
            self.error.get_or_insert(mlir::Error { op, why, place });
        }
    }

    fn types(&self, args: &[Id]) -> Vec<Type> {
        args.iter().map(|&a| Type::Scalar(self.kind(a))).collect()
    }

    fn op(&mut self, prim: Prim, args: &[Id], kind: Kind) -> Id {
        let span = args
            .iter()
            .fold(Span::default(), |span, &a| span.and(self.nodes[a].span));
        let stage = args.iter().map(|&a| self.nodes[a].stage).max().unwrap_or(0);
        self.node(Node {
            prim,
            args: args.to_vec(),
            kind,
            span,
            stage,
        })
    }

    pub(super) fn load(&mut self, operand: usize, place: Place, kind: Kind, span: Span) -> Id {
        self.node(Node {
            prim: Prim::Load(operand, place),
            args: vec![],
            kind,
            span,
            stage: 0,
        })
    }

    /// A value that is given from outside.
    pub(super) fn outside(&mut self, kind: Kind, span: Span) -> Id {
        let place = Place {
            first: 0,
            strides: vec![],
        };
        self.load(0, place, kind, span)
    }

    pub(super) fn load_at(&mut self, operand: usize, at: u64, kind: Kind) -> Id {
        self.node(Node {
            prim: Prim::LoadAt(operand, at),
            args: vec![],
            kind,
            span: Span::default(),
            stage: 0,
        })
    }

    pub(super) fn bits(&mut self, bits: u64, kind: Kind) -> Id {
        self.node(Node {
            prim: Prim::Const(bits),
            args: vec![],
            kind,
            span: Span::default(),
            stage: 0,
        })
    }

    /// A number, rounded to a floating-point kind.
    pub(super) fn float(&mut self, x: f64, kind: Kind) -> Id {
        match kind {
            Kind::F32 => self.bits((x as f32).to_bits().into(), kind),
            _ => self.bits(x.to_bits(), Kind::F64),
        }
    }

    pub(super) fn int(&mut self, x: i64, kind: Kind) -> Id {
        let mask = if kind == Kind::I64 {
            u64::MAX
        } else {
            (1 << (8 * kind.bytes())) - 1
        };
        self.bits(x as u64 & mask, kind)
    }

    pub(super) fn bit(&mut self, x: bool) -> Id {
        self.bits(x.into(), Kind::I1)
    }

    /// An instruction on one type.
    #[track_caller]
    pub(super) fn same(&mut self, op: Arith, args: &[Id]) -> Id {
        self.checked(op.name(), op.check(&self.types(args)));
        self.op(Prim::Same(op), args, self.kind(args[0]))
    }

    #[track_caller]
    pub(super) fn compare(&mut self, by: Predicate, a: Id, b: Id) -> Id {
        let [x, y] = [a, b].map(|id| Type::Scalar(self.kind(id)));
        self.checked(by.op(), by.check(x, y));
        self.op(Prim::Compare(by), &[a, b], Kind::I1)
    }

    #[track_caller]
    pub(super) fn select(&mut self, c: Id, x: Id, y: Id) -> Id {
        if x == y {
            return x;
        }
        let [bit, a, b] = [c, x, y].map(|id| Type::Scalar(self.kind(id)));
        self.checked("arith.select", mlir::select(bit, a, b));
        self.op(Prim::Select, &[c, x, y], self.kind(x))
    }

    #[track_caller]
    pub(super) fn convert(&mut self, how: Convert, x: Id, to: Kind) -> Id {
        if self.kind(x) == to {
            return x;
        }
        let from = Type::Scalar(self.kind(x));
        self.checked(how.name(), how.check(from, to));
        self.op(Prim::Convert(how), &[x], to)
    }

    /// The bits of the bf16 nearest to an F32, by [`Prim::Bf16`].
    pub(super) fn bf16(&mut self, x: Id) -> Id {
        self.op(Prim::Bf16, &[x], Kind::I16)
    }

    pub(super) fn fold(&mut self, fold: Fold, x: Id) -> Id {
        let node = &self.nodes[x];
        let (kind, stage) = (node.kind, node.stage + 1);
        let span = Span {
            rows: true,
            columns: false,
        };
        self.node(Node {
            prim: Prim::Fold(fold),
            args: vec![x],
            kind,
            span,
            stage,
        })
    }

    pub(super) fn power(&mut self, x: Id, exponent: Id) -> Id {
        self.op(Prim::Power, &[x, exponent], Kind::F64)
    }

    pub(super) fn random(&mut self, seed: Id, step: Id, stream: u32) -> Id {
        let span = Span {
            rows: true,
            columns: true,
        };
        self.node(Node {
            prim: Prim::Random(stream),
            args: vec![seed, step],
            kind: Kind::I32,
            span,
            stage: 0,
        })
    }

    pub(super) fn column(&mut self) -> Id {
        let span = Span {
            rows: false,
            columns: true,
        };
        self.node(Node {
            prim: Prim::Column,
            args: vec![],
            kind: Kind::I32,
            span,
            stage: 0,
        })
    }

    /// `value` in the column whose number is `place`, and 0 in the row's other columns. `place` is
    /// -1 for a row of zeros.
    pub(super) fn placed(&mut self, value: Id, place: Id) -> Id {
        let column = self.column();
        let is_here = self.compare(Predicate::Eq, column, place);
        let zero = self.bits(0, self.kind(value));
        self.select(is_here, value, zero)
    }

    /// Marks a value that should be kept instead of computed again.
    pub(super) fn keep(&mut self, id: Id) -> Id {
        self.dear[id] = self.functions == Functions::Polynomials;
        id
    }

    #[track_caller]
    pub(super) fn add(&mut self, a: Id, b: Id) -> Id {
        self.same(
            if self.kind(a).is_float() {
                Arith::Addf
            } else {
                Arith::Addi
            },
            &[a, b],
        )
    }

    #[track_caller]
    pub(super) fn sub(&mut self, a: Id, b: Id) -> Id {
        self.same(
            if self.kind(a).is_float() {
                Arith::Subf
            } else {
                Arith::Subi
            },
            &[a, b],
        )
    }

    #[track_caller]
    pub(super) fn mul(&mut self, a: Id, b: Id) -> Id {
        self.same(
            if self.kind(a).is_float() {
                Arith::Mulf
            } else {
                Arith::Muli
            },
            &[a, b],
        )
    }

    #[track_caller]
    pub(super) fn div(&mut self, a: Id, b: Id) -> Id {
        self.same(Arith::Divf, &[a, b])
    }

    /// `a * b + c`, rounded once.
    #[track_caller]
    pub(super) fn fma(&mut self, a: Id, b: Id, c: Id) -> Id {
        self.same(Arith::Fma, &[a, b, c])
    }

    #[track_caller]
    pub(super) fn sqrt(&mut self, x: Id) -> Id {
        self.same(Arith::Sqrt, &[x])
    }

    /// `a < b`; false if one is NaN.
    #[track_caller]
    pub(super) fn less(&mut self, a: Id, b: Id) -> Id {
        self.compare(
            if self.kind(a).is_float() {
                Predicate::Olt
            } else {
                Predicate::Slt
            },
            a,
            b,
        )
    }

    /// `a <= b`; false if one is NaN.
    #[track_caller]
    pub(super) fn at_most(&mut self, a: Id, b: Id) -> Id {
        self.compare(
            if self.kind(a).is_float() {
                Predicate::Ole
            } else {
                Predicate::Sle
            },
            a,
            b,
        )
    }

    #[track_caller]
    pub(super) fn equal(&mut self, a: Id, b: Id) -> Id {
        self.compare(
            if self.kind(a).is_float() {
                Predicate::Oeq
            } else {
                Predicate::Eq
            },
            a,
            b,
        )
    }

    #[track_caller]
    pub(super) fn differs(&mut self, a: Id, b: Id) -> Id {
        self.compare(
            if self.kind(a).is_float() {
                Predicate::Une
            } else {
                Predicate::Ne
            },
            a,
            b,
        )
    }

    /// The larger (`most`) or the smaller number; NaN if one of them is NaN.
    #[track_caller]
    pub(super) fn extreme(&mut self, most: bool, a: Id, b: Id) -> Id {
        let wins = if most {
            self.less(b, a)
        } else {
            self.less(a, b)
        };
        if !self.kind(a).is_float() {
            return self.select(wins, a, b);
        }
        let nan = self.differs(a, a);
        let wins = self.same(Arith::Ori, &[wins, nan]);
        self.select(wins, a, b)
    }

    /// `x` within `lo..=hi`; NaN stays.
    #[track_caller]
    pub(super) fn within(&mut self, x: Id, lo: Id, hi: Id) -> Id {
        let below = self.less(x, lo);
        let x = self.select(below, lo, x);
        let above = self.less(hi, x);
        self.select(above, hi, x)
    }
}
