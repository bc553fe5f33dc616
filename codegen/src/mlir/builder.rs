//! Functions, operation by operation.

use super::{Arith, Convert, Error, Kind, Mismatch, Predicate, Space, Special, Type, select};
use std::panic::Location;

/// The result of an operation, or a parameter. It is a number and a type, so it can be copied.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Value {
    pub(super) id: u32,
    pub(super) ty: Type,
}

impl Value {
    /// Its type.
    pub(crate) fn ty(self) -> Type {
        self.ty
    }
}

/// The distance between two addresses, in units.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    /// A number that is known when the kernel is generated.
    Known(u64),
    /// A 64-bit number.
    By(Value),
}

impl From<u64> for Step {
    fn from(n: u64) -> Step {
        Step::Known(n)
    }
}
impl From<u32> for Step {
    fn from(n: u32) -> Step {
        Step::Known(n.into())
    }
}
impl From<Value> for Step {
    fn from(value: Value) -> Step {
        Step::By(value)
    }
}

/// The caching of a copy from a GPU's main memory to its shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cache {
    /// It is kept in the first and the second cache.
    All,
    /// It is kept only in the second cache.
    Second,
}

/// The numbers that tensor cores multiply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Factors {
    /// 16 × 16 times 16 × 8 numbers, in pairs.
    Bf16,
    /// 16 × 8 times 8 × 8 numbers: f32 whose lower 13 bits do not count.
    Tf32,
}

/// How four 8 × 8 matrices are loaded from shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Layout {
    /// As they are stored.
    Rows,
    /// Transposed.
    Columns,
}

/// A function of a GPU that LLVM knows by name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Intrinsic {
    Ex2,
    Lg2,
    PairBf16,
    Tf32,
}

impl Intrinsic {
    pub(super) fn name(self) -> &'static str {
        match self {
            Intrinsic::Ex2 => "llvm.nvvm.ex2.approx.ftz.f32",
            Intrinsic::Lg2 => "llvm.nvvm.lg2.approx.ftz.f",
            Intrinsic::PairBf16 => "llvm.nvvm.ff2bf16x2.rn",
            Intrinsic::Tf32 => "llvm.nvvm.f2tf32.rna",
        }
    }
}

/// The operation; types are those of its operands and results.
#[derive(Debug)]
pub(super) enum Inst {
    /// Every element has these bits.
    Constant(u64),
    /// Each element has its own.
    Constants(Vec<u64>),
    Arith(Arith, Vec<Value>),
    Compare(Predicate, [Value; 2]),
    Select([Value; 3]),
    Convert(Convert, Value),
    Broadcast(Value),
    Extract(Value, u64),
    Insert([Value; 2], u64),
    /// The result's number of elements, from this one on.
    Slice(Value, u64),
    Shuffle([Value; 2], Vec<u64>),
    VectorBitcast(Value),
    Bitcast(Value),
    Undef,
    Offset {
        pointer: Value,
        step: Step,
        unit: Type,
    },
    Load {
        pointer: Value,
        align: Option<u64>,
    },
    Store {
        x: Value,
        pointer: Value,
        align: u64,
        nontemporal: bool,
    },
    Alloca {
        n: Value,
        kind: Kind,
        align: Option<u64>,
    },
    /// The address of the function's shared memory.
    Shared,
    Prefetch {
        pointer: Value,
        locality: usize,
    },
    Fence,
    Special(Special),
    Barrier,
    WarpBarrier(Value),
    /// All lanes, the number, the distance, the highest lane.
    Butterfly([Value; 4]),
    CopyAsync {
        to: Value,
        from: Value,
        bytes: u32,
        valid: Value,
        cache: Cache,
    },
    Commit,
    WaitAll,
    LoadMatrices(Value, Layout),
    Multiply {
        factors: Factors,
        a: [Value; 4],
        b: [Value; 2],
        c: [Value; 4],
    },
    Field(Value, u64),
    Intrinsic(Intrinsic, Vec<Value>),
    For(Box<For>),
    While(Box<While>),
    If {
        condition: Value,
        then: Block,
        otherwise: Option<Block>,
    },
}

/// A loop.
#[derive(Debug)]
pub(super) struct For {
    pub(super) at: Value,
    pub(super) bounds: [Value; 3],
    pub(super) starts: Vec<Value>,
    pub(super) carried: Vec<Value>,
    pub(super) body: Block,
    /// True if LLVM and ptxas must not unroll it.
    pub(super) rolled: bool,
}

/// A loop that continues while the comparison of its first value with a limit is true.
#[derive(Debug)]
pub(super) struct While {
    pub(super) by: Predicate,
    pub(super) limit: Value,
    pub(super) starts: Vec<Value>,
    /// The values in the comparison, and in the body.
    pub(super) compared: Vec<Value>,
    pub(super) carried: Vec<Value>,
    pub(super) body: Block,
}

/// Operations in order, and the values that the block yields to its operation.
#[derive(Default, Debug)]
pub(super) struct Block {
    pub(super) ops: Vec<Op>,
    pub(super) yields: Vec<Value>,
}

/// An operation.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) results: Vec<Value>,
    pub(super) inst: Inst,
}

impl Inst {
    /// The values that it uses, other than inside its blocks.
    fn operands(&self) -> Vec<Value> {
        match self {
            Inst::Constant(_)
            | Inst::Constants(_)
            | Inst::Undef
            | Inst::Shared
            | Inst::Fence
            | Inst::Special(_)
            | Inst::Barrier
            | Inst::Commit
            | Inst::WaitAll => vec![],
            Inst::Arith(_, args) | Inst::Intrinsic(_, args) => args.clone(),
            Inst::Compare(_, args) | Inst::Insert(args, _) | Inst::Shuffle(args, _) => {
                args.to_vec()
            }
            Inst::Select(args) => args.to_vec(),
            Inst::Butterfly(args) => args.to_vec(),
            Inst::Convert(_, x)
            | Inst::Broadcast(x)
            | Inst::Extract(x, _)
            | Inst::Slice(x, _)
            | Inst::VectorBitcast(x)
            | Inst::Bitcast(x)
            | Inst::WarpBarrier(x)
            | Inst::LoadMatrices(x, _)
            | Inst::Field(x, _)
            | Inst::Load { pointer: x, .. }
            | Inst::Prefetch { pointer: x, .. }
            | Inst::Alloca { n: x, .. }
            | Inst::If { condition: x, .. }
            | Inst::Offset {
                pointer: x,
                step: Step::Known(_),
                ..
            } => vec![*x],
            Inst::Offset {
                pointer,
                step: Step::By(by),
                ..
            } => vec![*pointer, *by],
            Inst::Store { x, pointer, .. } => vec![*x, *pointer],
            Inst::CopyAsync {
                to, from, valid, ..
            } => vec![*to, *from, *valid],
            Inst::Multiply { a, b, c, .. } => [&a[..], b, c].concat(),
            Inst::For(inner) => [&inner.bounds[..], &inner.starts].concat(),
            Inst::While(inner) => [&[inner.limit], &inner.starts[..]].concat(),
        }
    }
}

/// A parameter of a function.
#[derive(Debug)]
pub(crate) struct Parameter {
    /// Its name in the text.
    pub(crate) name: String,
    /// Its type.
    pub(crate) ty: Type,
    /// For an address: its alignment.
    pub(crate) align: Option<u64>,
    /// For an address: no other pointer points to the same bytes.
    pub(crate) noalias: bool,
    /// For an address: nothing is written there.
    pub(crate) readonly: bool,
}

impl Parameter {
    /// A parameter of which only the type is known.
    pub(crate) fn new(name: impl Into<String>, ty: Type) -> Parameter {
        Parameter {
            name: name.into(),
            ty,
            align: None,
            noalias: false,
            readonly: false,
        }
    }
}

/// How a function is started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Body {
    /// Called on a CPU.
    Cpu,
    /// Started on a GPU.
    Gpu {
        /// Threads of a block.
        threads: u32,
        /// Blocks that a multiprocessor should hold at once.
        blocks: u32,
    },
}

/// Memory that a block of a GPU's threads shares.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) symbol: String,
    pub(crate) bytes: u64,
    pub(crate) align: u64,
    /// The size is given when the kernel is started.
    pub(crate) dynamic: bool,
}

/// A complete function.
#[derive(Debug)]
pub(crate) struct Function {
    pub(super) symbol: String,
    pub(super) parameters: Vec<Parameter>,
    pub(super) body: Body,
    pub(super) shared: Option<Shared>,
    pub(super) block: Block,
}

/// Functions, to be printed.
#[derive(Default, Debug)]
pub(crate) struct Module {
    pub(super) functions: Vec<Function>,
}

impl Module {
    /// Adds a function.
    pub(crate) fn push(&mut self, function: Function) {
        self.functions.push(function);
    }

    /// Replaces the first part of all symbols.
    pub(crate) fn rename(&mut self, from: &str, to: &str) {
        let rename = |symbol: &mut String| {
            if let Some(rest) = symbol.strip_prefix(from) {
                *symbol = format!("{to}{rest}");
            }
        };
        for function in &mut self.functions {
            rename(&mut function.symbol);
            if let Some(shared) = &mut function.shared {
                rename(&mut shared.symbol);
            }
        }
    }
}

/// A block to which operations are appended.
struct Open {
    /// Blocks are numbered as they are opened.
    number: u32,
    block: Block,
    owner: Owner,
}

/// The future owner of an open block.
enum Owner {
    Function,
    For {
        at: Value,
        bounds: [Value; 3],
        starts: Vec<Value>,
        carried: Vec<Value>,
        rolled: bool,
    },
    While {
        by: Predicate,
        limit: Value,
        starts: Vec<Value>,
        compared: Vec<Value>,
        carried: Vec<Value>,
    },
    If {
        condition: Value,
    },
}

/// Builds a function: appends operations to the innermost open block, or, within
/// [`Builder::outside`], to a block further out.
pub(crate) struct Builder {
    symbol: String,
    parameters: Vec<Parameter>,
    body: Body,
    shared: Option<Shared>,
    open: Vec<Open>,
    blocks: u32,
    /// The block that defines each value.
    homes: Vec<u32>,
    error: Option<Error>,
}

/// A type that emits operations. It contains a builder and perhaps more state. Blocks are emitted
/// by closures that get it.
pub(crate) trait Emit: Sized {
    /// True if loops are not unrolled.
    const ROLLED: bool = false;

    /// The builder.
    fn builder(&mut self) -> &mut Builder;

    /// A loop from `from` to `to` by `step`. `body` gets the counter and the loop values, and
    /// returns the next loop values. The last ones are the results.
    #[track_caller]
    fn repeat(
        &mut self,
        bounds: [Value; 3],
        starts: &[Value],
        body: impl FnOnce(&mut Self, Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let (at, carried) = self.builder().open_for(bounds, starts, Self::ROLLED);
        let next = body(self, at, &carried);
        self.builder().close_for(next)
    }

    /// A loop that continues while the comparison of its first value with `limit` is true. `body`
    /// gets the loop values, and returns the next ones. The last ones are the results.
    #[track_caller]
    fn repeat_while(
        &mut self,
        by: Predicate,
        limit: Value,
        starts: &[Value],
        body: impl FnOnce(&mut Self, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let carried = self.builder().open_while(by, limit, starts);
        let next = body(self, &carried);
        self.builder().close_while(next)
    }

    /// Runs `then` if a condition holds.
    #[track_caller]
    fn when(&mut self, condition: Value, then: impl FnOnce(&mut Self)) {
        self.builder().open_if(condition);
        then(self);
        self.builder().close_if(vec![], &[]);
    }

    /// The values that `then` returns if a condition holds, otherwise `others`.
    #[track_caller]
    fn choose(
        &mut self,
        condition: Value,
        others: &[Value],
        then: impl FnOnce(&mut Self) -> Vec<Value>,
    ) -> Vec<Value> {
        self.builder().open_if(condition);
        let values = then(self);
        self.builder().close_if(values, others)
    }
}

impl Emit for Builder {
    fn builder(&mut self) -> &mut Builder {
        self
    }
}

const BIT: Type = Type::Scalar(Kind::I1);
const WORD: Type = Type::Scalar(Kind::I32);
const LONG: Type = Type::Scalar(Kind::I64);
const FLOAT: Type = Type::Scalar(Kind::F32);
const SHARED: Type = Type::Pointer(Space::Shared);

/// Methods for operations of two operands.
macro_rules! binary {
    ($($name:ident $op:ident),* $(,)?) => {$(
        #[track_caller]
        pub(crate) fn $name(&mut self, a: Value, b: Value) -> Value {
            self.arith(Arith::$op, &[a, b])
        }
    )*};
}

impl Builder {
    /// Starts a function. Returns its parameters as values.
    pub(crate) fn new(
        symbol: impl Into<String>,
        parameters: Vec<Parameter>,
        body: Body,
    ) -> (Builder, Vec<Value>) {
        let mut builder = Builder {
            symbol: symbol.into(),
            parameters: vec![],
            body,
            shared: None,
            open: vec![],
            blocks: 0,
            homes: vec![],
            error: None,
        };
        builder.open(Owner::Function);
        let values = parameters.iter().map(|p| builder.fresh(p.ty)).collect();
        builder.parameters = parameters;
        (builder, values)
    }

    /// The function, or the first operation that did not fit its operands.
    pub(crate) fn finish(mut self) -> Result<Function, Error> {
        let n = self.open.len();
        if n != 1 {
            self.fail("llvm.func", Mismatch::Open(n));
        }
        if let Some(error) = self.error {
            return Err(error);
        }
        Ok(Function {
            symbol: self.symbol,
            parameters: self.parameters,
            body: self.body,
            shared: self.shared,
            block: self.open.remove(0).block,
        })
    }

    /// Sets the number of blocks that a GPU's multiprocessor should hold at once.
    pub(crate) fn set_blocks(&mut self, n: u32) {
        if let Body::Gpu { blocks, .. } = &mut self.body {
            *blocks = n;
        }
    }

    /// Sets the shared memory.
    pub(crate) fn set_shared(&mut self, shared: Shared) {
        self.shared = Some(shared);
    }

    /// The number of open blocks around the innermost.
    pub(crate) fn depth(&self) -> usize {
        self.open.len() - 1
    }

    /// Appends operations to a block further out, before the operation whose block is open inside
    /// it.
    pub(crate) fn outside<T>(&mut self, depth: usize, f: impl FnOnce(&mut Builder) -> T) -> T {
        let inner = self.open.split_off(depth + 1);
        let result = f(self);
        self.open.extend(inner);
        result
    }

    // --- blocks ---

    fn open(&mut self, owner: Owner) {
        self.open.push(Open {
            number: self.blocks,
            block: Block::default(),
            owner,
        });
        self.blocks += 1;
    }

    /// Opens a loop's body. Returns the counter and the loop values. A loop that is `rolled` is not
    /// unrolled.
    #[track_caller]
    pub(crate) fn open_for(
        &mut self,
        bounds: [Value; 3],
        starts: &[Value],
        rolled: bool,
    ) -> (Value, Vec<Value>) {
        let ty = bounds[0].ty;
        for bound in bounds {
            self.wants("scf.for", "one type of integers", bound.ty, bound.ty == ty);
        }
        self.visible("scf.for", &bounds);
        self.visible("scf.for", starts);
        self.open(Owner::Function);
        let at = self.fresh(ty);
        let carried: Vec<Value> = starts.iter().map(|start| self.fresh(start.ty)).collect();
        if let Some(open) = self.open.last_mut() {
            open.owner = Owner::For {
                at,
                bounds,
                starts: starts.to_vec(),
                carried: carried.clone(),
                rolled,
            };
        }
        (at, carried)
    }

    /// Ends a loop's body with the values for the next round. Returns the results.
    #[track_caller]
    pub(crate) fn close_for(&mut self, next: Vec<Value>) -> Vec<Value> {
        self.visible("scf.yield", &next);
        let n = self.open.len();
        let Some(Open {
            mut block,
            owner:
                Owner::For {
                    at,
                    bounds,
                    starts,
                    carried,
                    rolled,
                },
            ..
        }) = self.open.pop()
        else {
            self.fail("scf.for", Mismatch::Open(n));
            return next;
        };
        self.alike(&starts, &next);
        block.yields = next;
        let types: Vec<Type> = starts.iter().map(|start| start.ty).collect();
        let inner = For {
            at,
            bounds,
            starts,
            carried,
            body: block,
            rolled,
        };
        self.push("scf.for", Inst::For(Box::new(inner)), &types)
    }

    #[track_caller]
    fn open_while(&mut self, by: Predicate, limit: Value, starts: &[Value]) -> Vec<Value> {
        let op = "scf.while";
        match starts.first() {
            Some(first) => self.check(op, by.check(first.ty, limit.ty)),
            None => self.fail(
                op,
                Mismatch::Count {
                    wanted: 1,
                    given: 0,
                },
            ),
        }
        self.visible(op, &[limit]);
        self.visible(op, starts);
        self.open(Owner::Function);
        let [compared, carried] = [(); 2].map(|()| {
            starts
                .iter()
                .map(|start| self.fresh(start.ty))
                .collect::<Vec<_>>()
        });
        if let Some(open) = self.open.last_mut() {
            open.owner = Owner::While {
                by,
                limit,
                starts: starts.to_vec(),
                compared,
                carried: carried.clone(),
            };
        }
        carried
    }

    #[track_caller]
    fn close_while(&mut self, next: Vec<Value>) -> Vec<Value> {
        self.visible("scf.yield", &next);
        let n = self.open.len();
        let Some(Open {
            mut block,
            owner:
                Owner::While {
                    by,
                    limit,
                    starts,
                    compared,
                    carried,
                },
            ..
        }) = self.open.pop()
        else {
            self.fail("scf.while", Mismatch::Open(n));
            return next;
        };
        self.alike(&starts, &next);
        block.yields = next;
        let types: Vec<Type> = starts.iter().map(|start| start.ty).collect();
        let inner = While {
            by,
            limit,
            starts,
            compared,
            carried,
            body: block,
        };
        self.push("scf.while", Inst::While(Box::new(inner)), &types)
    }

    #[track_caller]
    fn open_if(&mut self, condition: Value) {
        self.wants("scf.if", "a bit", condition.ty, condition.ty == BIT);
        self.visible("scf.if", &[condition]);
        self.open(Owner::If { condition });
    }

    #[track_caller]
    fn close_if(&mut self, values: Vec<Value>, others: &[Value]) -> Vec<Value> {
        self.visible("scf.yield", &values);
        let n = self.open.len();
        let Some(Open {
            block: mut then,
            owner: Owner::If { condition },
            ..
        }) = self.open.pop()
        else {
            self.fail("scf.if", Mismatch::Open(n));
            return values;
        };
        self.alike(others, &values);
        self.visible("scf.yield", others);
        let types: Vec<Type> = others.iter().map(|other| other.ty).collect();
        then.yields = values;
        let otherwise = (!others.is_empty()).then(|| Block {
            ops: vec![],
            yields: others.to_vec(),
        });
        let inst = Inst::If {
            condition,
            then,
            otherwise,
        };
        self.push("scf.if", inst, &types)
    }

    // --- checks ---

    #[track_caller]
    fn fail(&mut self, op: &'static str, why: Mismatch) {
        let place = Location::caller();
        self.error.get_or_insert(Error { op, why, place });
    }

    #[track_caller]
    fn check(&mut self, op: &'static str, check: Result<(), Mismatch>) {
        if let Err(why) = check {
            self.fail(op, why);
        }
    }

    #[track_caller]
    fn wants(&mut self, op: &'static str, wanted: &'static str, given: Type, fits: bool) {
        if !fits {
            self.fail(op, Mismatch::Wants { wanted, given });
        }
    }

    /// A value is visible in the block that defines it, after its operation, and in the blocks
    /// inside. An operation that is appended to an outer block comes before the operation whose
    /// block is open there. So all values of open blocks are defined before it.
    #[track_caller]
    fn visible(&mut self, op: &'static str, values: &[Value]) {
        for value in values {
            let home = self.homes[value.id as usize];
            if !self.open.iter().any(|open| open.number == home) {
                self.fail(op, Mismatch::Hidden(value.id));
            }
        }
    }

    #[track_caller]
    fn alike(&mut self, wanted: &[Value], given: &[Value]) {
        if wanted.len() != given.len() {
            let (wanted, given) = (wanted.len(), given.len());
            self.fail("scf.yield", Mismatch::Count { wanted, given });
        }
        for (a, b) in wanted.iter().zip(given) {
            if a.ty != b.ty {
                self.fail("scf.yield", Mismatch::Different(a.ty, b.ty));
            }
        }
    }

    fn fresh(&mut self, ty: Type) -> Value {
        let id = self.homes.len() as u32;
        let home = self.open.last().map_or(0, |open| open.number);
        self.homes.push(home);
        Value { id, ty }
    }

    #[track_caller]
    fn push(&mut self, op: &'static str, inst: Inst, types: &[Type]) -> Vec<Value> {
        self.visible(op, &inst.operands());
        let results: Vec<Value> = types.iter().map(|&ty| self.fresh(ty)).collect();
        let made = Op {
            results: results.clone(),
            inst,
        };
        if let Some(open) = self.open.last_mut() {
            open.block.ops.push(made);
        }
        results
    }

    #[track_caller]
    fn define(&mut self, op: &'static str, inst: Inst, ty: Type) -> Value {
        self.push(op, inst, &[ty])[0]
    }

    #[track_caller]
    fn run(&mut self, op: &'static str, inst: Inst) {
        self.push(op, inst, &[]);
    }

    // --- numbers ---

    /// A number by its bits, or a vector with this number in all elements.
    #[track_caller]
    pub(crate) fn constant(&mut self, bits: u64, ty: Type) -> Value {
        self.wants(
            "arith.constant",
            "a type of numbers",
            ty,
            ty.kind().is_some(),
        );
        self.define("arith.constant", Inst::Constant(bits), ty)
    }

    /// A 32-bit integer.
    pub(crate) fn int(&mut self, x: i64) -> Value {
        self.constant(x as u32 as u64, WORD)
    }

    /// A 64-bit integer.
    pub(crate) fn long(&mut self, x: u64) -> Value {
        self.constant(x, LONG)
    }

    /// An f32.
    pub(crate) fn float(&mut self, x: f32) -> Value {
        self.constant(x.to_bits().into(), FLOAT)
    }

    /// A vector of these 64-bit integers.
    pub(crate) fn longs(&mut self, numbers: Vec<u64>) -> Value {
        let ty = Type::Vector(numbers.len() as u32, Kind::I64);
        self.define("arith.constant", Inst::Constants(numbers), ty)
    }

    /// An operation whose operands and result have one type.
    #[track_caller]
    pub(crate) fn arith(&mut self, op: Arith, args: &[Value]) -> Value {
        let types: Vec<Type> = args.iter().map(|arg| arg.ty).collect();
        self.check(op.name(), op.check(&types));
        self.define(op.name(), Inst::Arith(op, args.to_vec()), types[0])
    }

    binary!(
        addi Addi, subi Subi, muli Muli, divui Divui, remui Remui, andi Andi, ori Ori, xori Xori,
        shrui Shrui, minui Minui, minsi Minsi, maxsi Maxsi,
        addf Addf, subf Subf, mulf Mulf, divf Divf,
    );

    /// `a * b + c`, rounded once.
    #[track_caller]
    pub(crate) fn fma(&mut self, a: Value, b: Value, c: Value) -> Value {
        self.arith(Arith::Fma, &[a, b, c])
    }

    /// A bit for each pair of elements.
    #[track_caller]
    pub(crate) fn compare(&mut self, by: Predicate, a: Value, b: Value) -> Value {
        self.check(by.op(), by.check(a.ty, b.ty));
        self.define(by.op(), Inst::Compare(by, [a, b]), a.ty.with(Kind::I1))
    }

    /// `a` if the condition holds, otherwise `b`.
    #[track_caller]
    pub(crate) fn select(&mut self, condition: Value, a: Value, b: Value) -> Value {
        self.check("arith.select", select(condition.ty, a.ty, b.ty));
        self.define("arith.select", Inst::Select([condition, a, b]), a.ty)
    }

    /// The elements in another kind.
    #[track_caller]
    pub(crate) fn convert(&mut self, how: Convert, x: Value, to: Kind) -> Value {
        self.check(how.name(), how.check(x.ty, to));
        self.define(how.name(), Inst::Convert(how, x), x.ty.with(to))
    }

    /// A 32-bit number extended to 64 bits with zeros.
    #[track_caller]
    pub(crate) fn wide(&mut self, x: Value) -> Value {
        self.convert(Convert::Extui, x, Kind::I64)
    }

    // --- vectors ---

    /// A vector with one number in all elements.
    #[track_caller]
    pub(crate) fn broadcast(&mut self, x: Value, to: Type) -> Value {
        let fits = matches!((x.ty, to), (Type::Scalar(a), Type::Vector(_, b)) if a == b);
        self.wants(
            "vector.broadcast",
            "a number of the vector's kind",
            x.ty,
            fits,
        );
        self.define("vector.broadcast", Inst::Broadcast(x), to)
    }

    /// An element.
    #[track_caller]
    pub(crate) fn extract(&mut self, x: Value, at: u64) -> Value {
        let fits = matches!(x.ty, Type::Vector(n, _) if at < n.into());
        self.wants("vector.extract", "a vector with that element", x.ty, fits);
        let ty = Type::Scalar(x.ty.kind().unwrap_or(Kind::I64));
        self.define("vector.extract", Inst::Extract(x, at), ty)
    }

    /// The vector with another element.
    #[track_caller]
    pub(crate) fn insert(&mut self, x: Value, into: Value, at: u64) -> Value {
        let fits = matches!((x.ty, into.ty), (Type::Scalar(a), Type::Vector(n, b))
            if a == b && at < n.into());
        self.wants("vector.insert", "a vector with that element", into.ty, fits);
        self.define("vector.insert", Inst::Insert([x, into], at), into.ty)
    }

    /// `width` elements from `at` on.
    #[track_caller]
    pub(crate) fn slice(&mut self, x: Value, at: u64, width: u64) -> Value {
        let op = "vector.extract_strided_slice";
        let fits = matches!(x.ty, Type::Vector(n, _) if at + width <= n.into());
        self.wants(op, "a vector with those elements", x.ty, fits);
        let ty = Type::Vector(width as u32, x.ty.kind().unwrap_or(Kind::I64));
        self.define(op, Inst::Slice(x, at), ty)
    }

    /// The elements of two vectors that `order` names.
    #[track_caller]
    pub(crate) fn shuffle(&mut self, a: Value, b: Value, order: Vec<u64>) -> Value {
        let op = "vector.shuffle";
        let fits = matches!((a.ty, b.ty), (Type::Vector(n, x), Type::Vector(m, y))
            if x == y && order.iter().all(|&i| i < u64::from(n + m)));
        self.wants(op, "two vectors with those elements", b.ty, fits);
        let kind = a.ty.kind().unwrap_or(Kind::I64);
        let ty = Type::Vector(order.len() as u32, kind);
        self.define(op, Inst::Shuffle([a, b], order), ty)
    }

    /// A vector's bits as another vector's.
    #[track_caller]
    pub(crate) fn vector_bitcast(&mut self, x: Value, to: Type) -> Value {
        let vectors = matches!((x.ty, to), (Type::Vector(..), Type::Vector(..)));
        let fits = vectors && x.ty.bits() == to.bits();
        self.wants("vector.bitcast", "as many bits in vectors", x.ty, fits);
        self.define("vector.bitcast", Inst::VectorBitcast(x), to)
    }

    /// A number's or vector's bits as another type.
    #[track_caller]
    pub(crate) fn bitcast(&mut self, x: Value, to: Type) -> Value {
        let fits = x.ty.bits().is_some() && x.ty.bits() == to.bits();
        self.wants("llvm.bitcast", "as many bits", x.ty, fits);
        self.define("llvm.bitcast", Inst::Bitcast(x), to)
    }

    /// Any bits.
    pub(crate) fn undef(&mut self, ty: Type) -> Value {
        self.define("llvm.mlir.undef", Inst::Undef, ty)
    }

    // --- memory ---

    #[track_caller]
    fn pointer(&mut self, op: &'static str, pointer: Value) {
        let fits = matches!(pointer.ty, Type::Pointer(_));
        self.wants(op, "an address", pointer.ty, fits);
    }

    /// An address plus a number of elements of a kind.
    #[track_caller]
    pub(crate) fn offset(&mut self, pointer: Value, step: impl Into<Step>, unit: Kind) -> Value {
        self.offset_by(pointer, step.into(), Type::Scalar(unit))
    }

    /// An address plus a number of units.
    #[track_caller]
    pub(crate) fn offset_by(&mut self, pointer: Value, step: Step, unit: Type) -> Value {
        let op = "llvm.getelementptr";
        self.pointer(op, pointer);
        if let Step::By(by) = step {
            self.wants(op, "a 64-bit number", by.ty, by.ty == LONG);
        }
        let inst = Inst::Offset {
            pointer,
            step,
            unit,
        };
        self.define(op, inst, pointer.ty)
    }

    /// Loads from an address that is a multiple of `align`; without `align`, of the type's own
    /// alignment.
    #[track_caller]
    pub(crate) fn load(
        &mut self,
        pointer: Value,
        ty: Type,
        align: impl Into<Option<u64>>,
    ) -> Value {
        self.pointer("llvm.load", pointer);
        let align = align.into();
        self.define("llvm.load", Inst::Load { pointer, align }, ty)
    }

    /// Writes to an address that is a multiple of `align`.
    #[track_caller]
    pub(crate) fn store(&mut self, x: Value, pointer: Value, align: u64) {
        self.store_as(x, pointer, align, false);
    }

    /// The same; bypasses the caches if `nontemporal`.
    #[track_caller]
    pub(crate) fn store_as(&mut self, x: Value, pointer: Value, align: u64, nontemporal: bool) {
        self.pointer("llvm.store", pointer);
        let inst = Inst::Store {
            x,
            pointer,
            align,
            nontemporal,
        };
        self.run("llvm.store", inst);
    }

    /// Room for `n` elements on the stack.
    #[track_caller]
    pub(crate) fn alloca(&mut self, n: Value, kind: Kind, align: Option<u64>) -> Value {
        self.wants("llvm.alloca", "a 64-bit number", n.ty, n.ty == LONG);
        let ty = Type::Pointer(Space::Generic);
        self.define("llvm.alloca", Inst::Alloca { n, kind, align }, ty)
    }

    /// Prefetches an address into a cache: a larger `locality` (0 to 3) means a nearer cache.
    #[track_caller]
    pub(crate) fn prefetch(&mut self, pointer: Value, locality: usize) {
        let op = "llvm.intr.prefetch";
        self.pointer(op, pointer);
        self.run(op, Inst::Prefetch { pointer, locality });
    }

    /// Makes stores that bypassed the caches visible before all later stores.
    pub(crate) fn fence(&mut self) {
        self.run("llvm.fence", Inst::Fence);
    }

    // --- GPUs ---

    /// The address of shared memory: see [`Builder::set_shared`].
    pub(crate) fn shared(&mut self) -> Value {
        self.define("llvm.mlir.addressof", Inst::Shared, SHARED)
    }

    /// A number that each thread knows, 32 bits.
    pub(crate) fn special(&mut self, which: Special) -> Value {
        self.define(which.name(), Inst::Special(which), WORD)
    }

    /// Waits for all threads of the block.
    pub(crate) fn barrier(&mut self) {
        self.run("nvvm.barrier0", Inst::Barrier);
    }

    /// Waits for all threads of the warp.
    pub(crate) fn warp_barrier(&mut self) {
        let all = self.int(-1);
        self.run("nvvm.bar.warp.sync", Inst::WarpBarrier(all));
    }

    /// The value of the lane whose number differs in the bits `distance`; `all` and `clamp` are the
    /// mask of lanes and the highest lane.
    #[track_caller]
    pub(crate) fn butterfly(
        &mut self,
        all: Value,
        x: Value,
        distance: Value,
        clamp: Value,
    ) -> Value {
        let op = "nvvm.shfl.sync";
        let fits = matches!(x.ty, Type::Scalar(Kind::I32 | Kind::F32));
        self.wants(op, "32 bits", x.ty, fits);
        for word in [all, distance, clamp] {
            self.wants(op, "a 32-bit integer", word.ty, word.ty == WORD);
        }
        self.define(op, Inst::Butterfly([all, x, distance, clamp]), x.ty)
    }

    /// Starts to copy `bytes` bytes to shared memory: the first `valid` of them, then zeros.
    #[track_caller]
    pub(crate) fn copy_async(
        &mut self,
        to: Value,
        from: Value,
        bytes: u32,
        valid: Value,
        cache: Cache,
    ) {
        let op = "nvvm.cp.async.shared.global";
        self.wants(op, "an address of shared memory", to.ty, to.ty == SHARED);
        let global = from.ty == Type::Pointer(Space::Global);
        self.wants(op, "an address of main memory", from.ty, global);
        self.wants(op, "a 32-bit integer", valid.ty, valid.ty == WORD);
        let inst = Inst::CopyAsync {
            to,
            from,
            bytes,
            valid,
            cache,
        };
        self.run(op, inst);
    }

    /// Ends a group of copies, for which threads can wait together.
    pub(crate) fn commit(&mut self) {
        self.run("nvvm.cp.async.commit.group", Inst::Commit);
    }

    /// Waits for all copies that this thread started.
    pub(crate) fn wait_all(&mut self) {
        self.run("nvvm.cp.async.wait.group", Inst::WaitAll);
    }

    /// Four 8 × 8 matrices of 16-bit numbers. The lanes of the warp give the addresses of their
    /// rows.
    #[track_caller]
    pub(crate) fn load_matrices(&mut self, row: Value, layout: Layout) -> [Value; 4] {
        let op = "nvvm.ldmatrix";
        self.wants(op, "an address of shared memory", row.ty, row.ty == SHARED);
        let ty = Type::Struct(4, Kind::I32);
        let all = self.define(op, Inst::LoadMatrices(row, layout), ty);
        self.fields(all, Kind::I32)
    }

    /// `c + a·b` on tensor cores: 16 × 16 times 16 × 8 numbers of bf16, in pairs, with f32 results.
    #[track_caller]
    pub(crate) fn multiply(&mut self, a: [Value; 4], b: [Value; 2], c: [Value; 4]) -> [Value; 4] {
        self.multiply_as(Factors::Bf16, a, b, c)
    }

    /// `c + a·b` on tensor cores, with f32 results.
    #[track_caller]
    pub(crate) fn multiply_as(
        &mut self,
        factors: Factors,
        a: [Value; 4],
        b: [Value; 2],
        c: [Value; 4],
    ) -> [Value; 4] {
        let op = "nvvm.mma.sync";
        for x in a.iter().chain(&b) {
            self.wants(op, "factors in 32-bit integers", x.ty, x.ty == WORD);
        }
        for x in c {
            self.wants(op, "f32", x.ty, x.ty == FLOAT);
        }
        let ty = Type::Struct(4, Kind::F32);
        let inst = Inst::Multiply { factors, a, b, c };
        let all = self.define(op, inst, ty);
        self.fields(all, Kind::F32)
    }

    fn fields(&mut self, all: Value, kind: Kind) -> [Value; 4] {
        let ty = Type::Scalar(kind);
        std::array::from_fn(|i| self.define("llvm.extractvalue", Inst::Field(all, i as u64), ty))
    }

    #[track_caller]
    fn intrinsic(&mut self, which: Intrinsic, args: &[Value], ty: Type) -> Value {
        for arg in args {
            self.wants(which.name(), "f32", arg.ty, arg.ty == FLOAT);
        }
        self.define(which.name(), Inst::Intrinsic(which, args.to_vec()), ty)
    }

    /// 2^x, approximately.
    #[track_caller]
    pub(crate) fn ex2(&mut self, x: Value) -> Value {
        self.intrinsic(Intrinsic::Ex2, &[x], FLOAT)
    }

    /// The logarithm to base 2, approximately.
    #[track_caller]
    pub(crate) fn lg2(&mut self, x: Value) -> Value {
        self.intrinsic(Intrinsic::Lg2, &[x], FLOAT)
    }

    /// The bits of an f32 rounded to the 11 bits of a TF32 number.
    #[track_caller]
    pub(crate) fn tf32(&mut self, x: Value) -> Value {
        self.intrinsic(Intrinsic::Tf32, &[x], WORD)
    }

    /// Two floats as a pair of bf16 in a 32-bit integer, the first in the lower half.
    #[track_caller]
    pub(crate) fn pair(&mut self, low: Value, high: Value) -> Value {
        let pair = Type::Vector(2, Kind::BF16);
        let pair = self.intrinsic(Intrinsic::PairBf16, &[high, low], pair);
        self.bitcast(pair, WORD)
    }
}
