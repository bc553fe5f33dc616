//! The shape rules of the language and the kernels of the runtime accept the same signatures, with
//! the same results, and refuse the same. Both are written independently, and neither crate depends
//! on the other.
//!
//! Operands and attributes are drawn at random for each op of the declaration. Few draws fit an op
//! of many operands, so a draw is repaired by the rule's messages until it fits. Then it is changed
//! in one place, and both sides check it again.

use artifact::{Operand, Place};
use ir::op::{Attr, Kind, Misfit, Op, OpKind, attributes};
use ir::{DType, TensorType};
use lighterage_tests::code;
use lighterage_tests::example::{self, retype};
use lighterage_tests::numbers::{Random, shape_of};
use runtime::kernels::owned::{OwnedTensor, Run};
use runtime::kernels::{Kernel, KernelError, Signature, find};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The number of fitting signatures of each op, and of changes of each signature.
const CASES: usize = 60;
const CHANGES: usize = 20;
/// The number of draws for a case, and of repairs of a draw. A case of attention takes a few
/// hundred draws.
const DRAWS: usize = 4000;
const REPAIRS: usize = 24;

/// The largest drawn rank and size.
const MOST: u64 = 5;

/// Attributes and operands of an op.
#[derive(Clone, Debug)]
struct Case {
    kind: OpKind,
    attrs: BTreeMap<&'static str, Attr>,
    types: Vec<TensorType>,
}

impl Case {
    fn op(&self) -> Op {
        let attrs = self
            .attrs
            .iter()
            .map(|(&key, attr)| (key.to_string(), attr.clone()));
        Op::of(self.kind, attrs.collect()).expect("attributes should be of their kinds")
    }
    fn refs(&self) -> Vec<&TensorType> {
        self.types.iter().collect()
    }
    fn infer(&self) -> Result<Vec<TensorType>, Misfit> {
        self.op().infer(&self.refs()).map_err(|e| e.kind)
    }
}

// --- draws ---

/// Draws related shapes and attributes.
struct Draw {
    random: Random,
    /// The shape from which others are made.
    shape: Vec<u64>,
    /// The element type of most operands.
    dtype: DType,
}

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        (self.random.next() % n as u64) as usize
    }
    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
    fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
    fn size(&mut self) -> u64 {
        if self.one_in(8) {
            0
        } else {
            1 + self.random.next() % MOST
        }
    }
    fn any_shape(&mut self) -> Vec<u64> {
        let rank = self.below(MOST as usize + 1);
        (0..rank).map(|_| self.size()).collect()
    }
    fn any_dtype(&mut self) -> DType {
        let i = self.below(DType::ALL.len());
        DType::ALL
            .into_iter()
            .nth(i)
            .expect("the place should be one of the list's")
    }
    fn start(&mut self) {
        self.shape = self.any_shape();
        self.dtype = self.any_dtype();
    }

    /// The shape, a part of it, or another.
    fn shape(&mut self) -> Vec<u64> {
        let mut shape = self.shape.clone();
        let cut = self.below(shape.len() + 1);
        match self.below(8) {
            0..4 => {}
            4 => shape.truncate(cut),
            5 => drop(shape.drain(..cut)),
            6 if !shape.is_empty() => {
                let d = self.below(shape.len());
                shape[d] = if self.one_in(2) { 1 } else { self.size() };
            }
            _ => return self.any_shape(),
        }
        shape
    }
    fn ty(&mut self) -> TensorType {
        let dtype = if self.one_in(4) {
            self.any_dtype()
        } else {
            self.dtype
        };
        let shape = self.shape();
        TensorType::new(dtype, shape).expect("sizes should be small")
    }

    fn int(&mut self) -> i64 {
        self.pick(&[0, 0, 1, 1, 1, 2, 2, 3, 4, 5, -1, -2])
    }
    fn float(&mut self) -> f64 {
        self.pick(&[0.0, 0.1, 0.5, 1.0, 1.0, 2.0, -1.0, f64::INFINITY, f64::NAN])
    }
    /// A list of numbers: a shape, dimensions, a mask, or any.
    fn ints(&mut self) -> Vec<i64> {
        let rank = self.shape.len();
        match self.below(6) {
            0 => self.shape().into_iter().map(|d| d as i64).collect(),
            1 => {
                let mut dims: Vec<i64> = (0..rank as i64).collect();
                for i in (1..rank).rev() {
                    let j = self.below(i + 1);
                    dims.swap(i, j);
                }
                let n = if self.one_in(2) {
                    rank
                } else {
                    self.below(rank + 1)
                };
                dims.truncate(n);
                dims
            }
            2 => (0..3).map(|_| self.below(2) as i64).collect(),
            3 => (0..2 * rank).map(|_| self.int()).collect(),
            _ => {
                let n = self.below(4);
                (0..n).map(|_| self.int()).collect()
            }
        }
    }
    fn attr(&mut self, kind: Kind) -> Attr {
        match kind {
            Kind::Int => Attr::Int(self.int()),
            Kind::Float => Attr::Float(self.float()),
            Kind::Number if self.one_in(2) => Attr::Int(self.int()),
            Kind::Number => Attr::Float(self.float()),
            Kind::Bool => Attr::Bool(self.one_in(2)),
            Kind::Ints => Attr::Ints(self.ints()),
            Kind::Type if self.one_in(2) => Attr::Type(self.dtype),
            Kind::Type => Attr::Type(self.any_dtype()),
            Kind::Str | Kind::Body => unreachable!("no op with a kernel has such an attribute"),
        }
    }
    fn case(&mut self, kind: OpKind) -> Case {
        let (least, most) = kind.facts().inputs;
        let n = least + self.below((most - least).min(2) + 1);
        let attrs = attributes(kind).iter();
        Case {
            kind,
            attrs: attrs.map(|&(key, kind)| (key, self.attr(kind))).collect(),
            types: (0..n).map(|_| self.ty()).collect(),
        }
    }

    // --- repairs and changes ---

    fn redraw_attr(&mut self, case: &mut Case, key: &str) {
        let attrs = attributes(case.kind).iter();
        for &(found, kind) in attrs.filter(|(found, _)| *found == key) {
            case.attrs.insert(found, self.attr(kind));
        }
    }
    /// Draws an operand or an attribute again.
    fn redraw(&mut self, case: &mut Case) {
        let (n_types, keys) = (case.types.len(), attributes(case.kind));
        if n_types + keys.len() == 0 {
            return;
        }
        match self.below(n_types + keys.len()) {
            i if i < n_types => case.types[i] = self.ty(),
            i => self.redraw_attr(case, keys[i - n_types].0),
        }
    }
    /// Changes the misfit, as the rule says or by another draw.
    fn repair(&mut self, case: &mut Case, misfit: &Misfit) {
        if example::repair(&mut case.types, misfit) {
            return;
        }
        match misfit {
            Misfit::NoKernel { .. } => {
                // Operands that must have the same type get the same new type.
                let to = self.any_dtype();
                case.types.iter_mut().for_each(|ty| retype(ty, to));
            }
            &Misfit::Rank { operand, .. } | &Misfit::Operand { operand, .. } => {
                let dtype = case.types[operand].dtype();
                case.types[operand] = self.ty();
                retype(&mut case.types[operand], dtype);
            }
            Misfit::Attribute { key, .. } => self.redraw_attr(case, key),
            _ => self.redraw(case),
        }
    }
    /// A case that the shape rule accepts, with its results.
    fn fitting(&mut self, kind: OpKind) -> Option<(Case, Vec<TensorType>)> {
        for _ in 0..DRAWS {
            self.start();
            let mut case = self.case(kind);
            for _ in 0..REPAIRS {
                match case.infer() {
                    Ok(results) => return Some((case, results)),
                    Err(misfit) => self.repair(&mut case, &misfit),
                }
            }
        }
        None
    }
    /// The case with a change in one place, and possible results.
    fn changed(&mut self, case: &Case, results: &[TensorType]) -> (Case, Vec<TensorType>) {
        let (mut case, mut results) = (case.clone(), results.to_vec());
        if self.one_in(3) {
            // One element type is replaced everywhere: then only the type itself can be wrong.
            let all = case.types.iter().chain(&results).map(TensorType::dtype);
            let all: Vec<DType> = all.collect();
            let (from, to) = (self.pick(&all), self.any_dtype());
            let types = case.types.iter_mut().chain(&mut results);
            types
                .filter(|ty| ty.dtype() == from)
                .for_each(|ty| retype(ty, to));
            for attr in case.attrs.values_mut() {
                if *attr == Attr::Type(from) {
                    *attr = Attr::Type(to);
                }
            }
        } else {
            self.redraw(&mut case);
        }
        (case, results)
    }
    /// Other results: one is of another type or shape, missing, or there is one more.
    fn other_results(&mut self, results: &[TensorType]) -> Vec<TensorType> {
        let mut results = results.to_vec();
        let i = self.below(results.len());
        match self.below(4) {
            0 => results[i] = self.ty(),
            1 => drop(results.pop()),
            2 => results.push(results[i].clone()),
            _ => {
                let to = self.any_dtype();
                retype(&mut results[i], to);
            }
        }
        results
    }
}

// --- the runtime ---

fn operands(types: &[TensorType]) -> Vec<Operand> {
    let operand = |ty: &TensorType| Operand {
        place: Place { pool: 0, offset: 0 },
        dtype: codegen::dtype(ty.dtype()),
        shape: ty.shape().to_vec(),
    };
    types.iter().map(operand).collect()
}

/// The kernel's check of a case with these results.
fn check(kernel: &Kernel, case: &Case, results: &[TensorType], scratch: u64) -> Said {
    let (op, ins, outs) = (case.op(), operands(&case.types), operands(results));
    let signature = Signature {
        attrs: &code::attrs(&op),
        ins: &ins,
        outs: &outs,
        scratch,
    };
    catch_unwind(AssertUnwindSafe(|| kernel.check(&signature))).map_err(|_| "panics".into())
}

/// The kernel's result, or a panic's message.
type Said = Result<Result<(), KernelError>, String>;

/// Runs the kernel on zeros. It may refuse them.
fn run(case: &Case, results: &[TensorType], scratch: u64) -> Said {
    let zeros = |ty: &TensorType| OwnedTensor::zeros(codegen::dtype(ty.dtype()), &shape_of(ty));
    let ins: Vec<OwnedTensor> = case.types.iter().map(zeros).collect();
    let outs = results
        .iter()
        .map(|ty| (codegen::dtype(ty.dtype()), shape_of(ty)));
    let outs: Vec<(artifact::DType, Vec<usize>)> = outs.collect();
    let op = case.op();
    let run = AssertUnwindSafe(|| {
        let (attrs, ins) = (code::attrs(&op), ins.iter().collect::<Vec<_>>());
        Run::new(op.name(), &attrs, &ins, &outs, scratch, &[])?.run()
    });
    catch_unwind(run).map_err(|_| "panics while it runs".into())
}

/// True if both sides accept a case, false if both refuse it; an error if they disagree. `results`
/// are possible results of a case that the shape rule refuses.
fn agree(kernel: &Kernel, case: &Case, results: &[TensorType]) -> Result<bool, String> {
    match case.infer() {
        Ok(results) => {
            let scratch = case.op().work(&case.refs(), &results).scratch.cpu;
            check(kernel, case, &results, scratch)?
                .map_err(|e| format!("refuses what the shape rule accepts: {e}"))?;
            run(case, &results, scratch)?.or(Ok(())).map(|()| true)
        }
        Err(misfit) => match check(kernel, case, results, 1 << 30)? {
            Ok(()) => Err(format!("accepts what the shape rule refuses: {misfit}")),
            Err(_) => Ok(false),
        },
    }
}

/// A disagreement of the two sides of an op, with the operands.
fn disagreement(draw: &mut Draw, kernel: &Kernel, kind: OpKind) -> Result<(), String> {
    let shown = |case: &Case, results: &[TensorType]| {
        let text = |types: &[TensorType]| -> String {
            let texts: Vec<String> = types.iter().map(TensorType::to_string).collect();
            texts.join(", ")
        };
        format!(
            "{:?} of {} to {}",
            case.op(),
            text(&case.types),
            text(results)
        )
    };
    let mut n_refused = 0;
    for _ in 0..CASES {
        let fitting = draw.fitting(kind);
        let (case, results) =
            fitting.ok_or_else(|| format!("no operands are found that fit {}", kind.name()))?;
        let at = |e: String| format!("{}: the kernel {e}", shown(&case, &results));
        agree(kernel, &case, &results).map_err(at)?;
        for _ in 0..CHANGES {
            let (changed, might) = draw.changed(&case, &results);
            let agrees = agree(kernel, &changed, &might);
            let at = |e: String| format!("{}: the kernel {e}", shown(&changed, &might));
            n_refused += usize::from(!agrees.map_err(at)?);

            let other = draw.other_results(&results);
            if other != results && check(kernel, &case, &other, 1 << 30)?.is_ok() {
                return Err(format!(
                    "{}: the kernel accepts other results",
                    shown(&case, &other)
                ));
            }
        }
    }
    let refuses = n_refused > 0;
    refuses
        .then_some(())
        .ok_or_else(|| format!("nothing was drawn that {} refuses", kind.name()))
}

#[test]
fn shape_rules_and_kernels_accept_the_same() {
    let mut draw = Draw {
        random: Random(1),
        shape: vec![],
        dtype: DType::F32,
    };
    let wrong: Vec<String> = OpKind::ALL
        .iter()
        .filter_map(|&kind| disagreement(&mut draw, find(kind.name())?, kind).err())
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
