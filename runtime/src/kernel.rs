//! What a kernel sees: operands and results as typed slices over pool memory.
//!
//! Kernels are safe code. The two `unsafe` blocks here turn places in pools into slices; they lean on
//! [`crate::validate`], which refuses an artifact in which a command's results overlap its operands (but for exact
//! in-place pairs), leave their pool, or are accessed by two streams without an event between them.

#![allow(unsafe_code, reason = "pool memory is shared by streams; see the module's text")]

use crate::kernels::Split;
use artifact::{Attr, DType};
use std::cell::Cell;
use std::ops::Range;

/// Element types that a slice may have.
pub trait Element: Copy + Send + Sync + 'static {
    /// The type's name in artifacts.
    const DTYPE: DType;
}
macro_rules! elements {
    ($($ty:ty = $dtype:ident),*) => {$(impl Element for $ty { const DTYPE: DType = DType::$dtype; })*};
}
// Bools are bytes here: a pool may hold any byte, a Rust bool may not. Kernels write 0 or 1 and read zero or not.
elements!(u8 = U8, i8 = I8, i16 = I16, i32 = I32, i64 = I64, f32 = F32, f64 = F64, half::bf16 = BF16, half::f16 = F16);

/// Unsigned integers as wide as an element, for kernels that move elements and do not look at them.
pub trait Bits: Copy + Default + Send + Sync + 'static {}
impl Bits for u8 {}
impl Bits for u16 {}
impl Bits for u32 {}
impl Bits for u64 {}

/// One tensor of a launch, resolved to memory. Built when an artifact is loaded, so that a step allocates nothing.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Box<[usize]>,
    /// Start of its bytes; a multiple of 64.
    pub(crate) data: *mut u8,
    /// Number of bytes.
    pub(crate) bytes: usize,
}

// SAFETY: a Tensor is an address; who turns it into a slice (Call) answers for the access, by `validate`'s ordering.
unsafe impl Send for Tensor {}
// SAFETY: as above.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// One run of a kernel, or one part of a run.
pub struct Call<'a> {
    /// The op's attributes.
    pub attrs: &'a [(String, Attr)],
    /// The elements of the results that this part computes; `None`: all.
    part: Option<Range<usize>>,
    /// Whether operands as large as a result are seen whole by a part.
    whole: bool,
    ins: &'a [Tensor],
    outs: &'a [Tensor],
    scratch: Option<&'a Tensor>,
    /// Which results have been taken, one bit each; the last bit is the scratch.
    taken: Cell<u64>,
}

impl<'a> Call<'a> {
    /// A call over resolved tensors. The caller answers for what [`crate::validate`] proves: see the module's text.
    pub(crate) fn new(
        attrs: &'a [(String, Attr)],
        ins: &'a [Tensor],
        outs: &'a [Tensor],
        scratch: Option<&'a Tensor>,
    ) -> Call<'a> {
        assert!(outs.len() < 63, "a kernel should have fewer than 63 results");
        Call { attrs, part: None, whole: false, ins, outs, scratch, taken: Cell::new(0) }
    }
    /// The same for the elements `part` of the results alone, and of operands as `split` says. All results have one size, and
    /// there is no scratch. The caller answers for parts that run at the same time being disjoint. Panics if the part is not in
    /// the result.
    pub(crate) fn part(self, split: Split, part: Range<usize>) -> Call<'a> {
        let whole = self.outs[0].numel();
        let fits = part.start <= part.end && part.end <= whole && self.outs.iter().all(|y| y.numel() == whole);
        let fits = fits && self.scratch.is_none() && split != Split::No;
        assert!(fits, "a part should be one of a kernel that may be split");
        Call { part: Some(part), whole: split == Split::Rows, ..self }
    }
    /// Which elements of the results this run computes.
    pub fn part_of_result(&self) -> Range<usize> {
        self.part.clone().unwrap_or(0..self.outs[0].numel())
    }
    /// How many elements of result 0 this run computes.
    pub fn elements(&self) -> usize {
        self.part_of_result().len()
    }
    /// Where the elements of an operand that this run sees begin, and how many they are.
    fn seen(&self, x: &Tensor) -> (usize, usize) {
        match &self.part {
            Some(part) if !self.whole && x.numel() == self.outs[0].numel() => (part.start, part.len()),
            _ => (0, x.numel()),
        }
    }
    /// Where the elements of a result that this run computes begin, and how many they are.
    fn computed(&self, y: &Tensor) -> (usize, usize) {
        self.part.as_ref().map_or((0, y.numel()), |part| (part.start, part.len()))
    }
    /// The number of operands.
    pub fn n_inputs(&self) -> usize {
        self.ins.len()
    }
    /// The number of results.
    pub fn n_outputs(&self) -> usize {
        self.outs.len()
    }
    /// Operand `i`'s element type.
    pub fn in_dtype(&self, i: usize) -> DType {
        self.ins[i].dtype
    }
    /// Operand `i`'s shape.
    pub fn in_shape(&self, i: usize) -> &'a [usize] {
        &self.ins[i].shape
    }
    /// Result `j`'s element type.
    pub fn out_dtype(&self, j: usize) -> DType {
        self.outs[j].dtype
    }
    /// Result `j`'s shape.
    pub fn out_shape(&self, j: usize) -> &'a [usize] {
        &self.outs[j].shape
    }
    /// The result that lies on operand `i`, if one does: then the operand's elements are read from [`Call::output`].
    pub fn inplace(&self, i: usize) -> Option<usize> {
        let x = &self.ins[i];
        self.outs.iter().position(|y| 0 < x.bytes && 0 < y.bytes && overlap(x, y))
    }
    /// Operand `i`'s elements. Panics if its type is not `T` (bools are `u8`), or if a result lies on it.
    pub fn input<T: Element>(&self, i: usize) -> &'a [T] {
        let x = &self.ins[i];
        assert!(self.inplace(i).is_none(), "operand {i} is in place; read it from the result");
        expect_type::<T>(x);
        let (start, n) = self.seen(x);
        // SAFETY: `validate` proved that the range lies in its pool and is 64-byte aligned, that whatever writes it on
        // another stream is ordered before or after this call, and the assertion above that no result of this call
        // overlaps it. `seen` is within its elements. Any bit pattern is a valid T.
        unsafe { std::slice::from_raw_parts(x.data.cast::<T>().add(start), n) }
    }
    /// Result `j`'s elements, which hold the in-place operand's where there is one, and anything otherwise. Panics if
    /// its type is not `T`, or if it was taken before.
    #[allow(clippy::mut_from_ref, reason = "each result is handed out once, see `taken`")]
    pub fn output<T: Element>(&self, j: usize) -> &'a mut [T] {
        let y = &self.outs[j];
        self.take(j);
        expect_type::<T>(y);
        let (start, n) = self.computed(y);
        // SAFETY: as for `input`; `take` hands out each result once, `validate` proved results disjoint, and parts that
        // run at the same time are disjoint.
        unsafe { std::slice::from_raw_parts_mut(y.data.cast::<T>().add(start), n) }
    }
    /// Operand `i`'s elements as bits of their width. Panics if that is not `T`'s, or if a result lies on it.
    pub fn input_bits<T: Bits>(&self, i: usize) -> &'a [T] {
        let x = &self.ins[i];
        assert!(self.inplace(i).is_none(), "operand {i} is in place; read it from the result");
        expect_width::<T>(x);
        let (start, n) = self.seen(x);
        // SAFETY: as for `input`.
        unsafe { std::slice::from_raw_parts(x.data.cast::<T>().add(start), n) }
    }
    /// Result `j`'s elements as bits of their width. Panics if that is not `T`'s, or if it was taken before.
    #[allow(clippy::mut_from_ref, reason = "each result is handed out once, see `taken`")]
    pub fn output_bits<T: Bits>(&self, j: usize) -> &'a mut [T] {
        let y = &self.outs[j];
        self.take(j);
        expect_width::<T>(y);
        let (start, n) = self.computed(y);
        // SAFETY: as for `output`.
        unsafe { std::slice::from_raw_parts_mut(y.data.cast::<T>().add(start), n) }
    }
    /// The scratch as `T`s; empty if there is none. Panics if it was taken before.
    #[allow(clippy::mut_from_ref, reason = "handed out once, see `taken`")]
    pub fn scratch<T: Element>(&self) -> &'a mut [T] {
        let Some(s) = self.scratch else { return &mut [] };
        self.take(63);
        // SAFETY: as for `output`; scratch is validated like a result.
        unsafe { std::slice::from_raw_parts_mut(s.data.cast::<T>(), s.bytes / size_of::<T>()) }
    }
    fn take(&self, bit: usize) {
        let taken = self.taken.get();
        assert!(taken & (1 << bit) == 0, "result {bit} was taken before");
        self.taken.set(taken | (1 << bit));
    }
    /// Attribute `key`. Panics if there is none: kernels check theirs when they are loaded.
    pub fn attr(&self, key: &str) -> &'a Attr {
        attr(self.attrs, key).unwrap_or_else(|| panic!("a kernel should have the attribute {key}"))
    }
    /// An Int attribute.
    pub fn int(&self, key: &str) -> i64 {
        match *self.attr(key) {
            Attr::Int(i) => i,
            ref other => panic!("{key} should be an Int, is {other:?}"),
        }
    }
    /// A Float or Int attribute as a float.
    pub fn float(&self, key: &str) -> f64 {
        match *self.attr(key) {
            Attr::Float(x) => x,
            Attr::Int(i) => i as f64,
            ref other => panic!("{key} should be a number, is {other:?}"),
        }
    }
    /// A Bool attribute.
    pub fn bool(&self, key: &str) -> bool {
        match *self.attr(key) {
            Attr::Bool(b) => b,
            ref other => panic!("{key} should be a Bool, is {other:?}"),
        }
    }
    /// An Ints attribute.
    pub fn ints(&self, key: &str) -> &'a [i64] {
        match self.attr(key) {
            Attr::Ints(v) => v,
            other => panic!("{key} should be Ints, is {other:?}"),
        }
    }
}

/// The value of attribute `key`.
pub fn attr<'a>(attrs: &'a [(String, Attr)], key: &str) -> Option<&'a Attr> {
    attrs.iter().find(|(k, _)| k == key).map(|(_, v)| v)
}

fn overlap(x: &Tensor, y: &Tensor) -> bool {
    let (a, b) = (x.data.addr(), y.data.addr());
    a < b + y.bytes && b < a + x.bytes
}

fn expect_type<T: Element>(t: &Tensor) {
    let fits = t.dtype == T::DTYPE || (t.dtype == DType::Bool && T::DTYPE == DType::U8);
    assert!(fits, "a slice of {:?} was asked of a tensor of {:?}", T::DTYPE, t.dtype);
}

fn expect_width<T: Bits>(t: &Tensor) {
    let fits = t.dtype.bytes() == size_of::<T>() as u64;
    assert!(fits, "a slice of {} bytes an element was asked of a tensor of {:?}", size_of::<T>(), t.dtype);
}
