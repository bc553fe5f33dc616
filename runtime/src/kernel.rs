//! A kernel's view: operands and results as typed slices over pool memory.
//!
//! Kernels are safe code. The `unsafe` blocks here turn places in pools into slices. They rely on
//! [`crate::validate`], which refuses an artifact in which a command's results overlap its operands
//! (except exact in-place pairs), leave their pool, or are accessed by two streams without an event
//! between them.

#![allow(
    unsafe_code,
    reason = "pool memory is shared by streams; see the module's text"
)]

use artifact::{Attr, DType};
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;

/// Element types that a slice may have.
pub trait Element: Copy + Default + Send + Sync + 'static {
    /// The type's name in artifacts.
    const DTYPE: DType;
}
macro_rules! elements {
    ($($ty:ty = $dtype:ident),*) => {$(
        impl Element for $ty {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}
// Bools are bytes here: a pool may hold any byte, a Rust bool may not. Kernels write 0 or 1, and
// read any other byte than 0 as true.
elements!(
    u8 = U8,
    i8 = I8,
    i16 = I16,
    i32 = I32,
    i64 = I64,
    f32 = F32,
    f64 = F64,
    half::bf16 = BF16,
    half::f16 = F16
);

/// Unsigned integers as wide as an element, for kernels that only move elements.
pub trait Bits: Copy + Default + Send + Sync + 'static {}
impl Bits for u8 {}
impl Bits for u16 {}
impl Bits for u32 {}
impl Bits for u64 {}

/// One tensor of a launch, resolved to memory. Built when an artifact is loaded, so that a step
/// allocates nothing.
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

// SAFETY: a Tensor is an address; Call, which turns it into a slice, is responsible for the access,
// by `validate`'s ordering.
unsafe impl Send for Tensor {}
// SAFETY: as above.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// False for a tensor of the caller that has no memory yet.
    pub(crate) fn has_memory(&self) -> bool {
        !self.data.is_null()
    }

    /// Start of its bytes. The caller is responsible for the order of accesses, as `Call` is.
    pub fn start(&self) -> *mut u8 {
        self.data
    }
}

/// One run of a kernel, or one part of a run: some of the units of the kernel's
/// [`crate::kernels::Cut`].
pub struct Call<'a> {
    /// The op's attributes.
    pub attrs: &'a [(String, Attr)],
    /// The number of the kernel's units, and the units of this part; `None`: all.
    part: Option<(usize, Range<usize>)>,
    ins: &'a [Tensor],
    outs: &'a [Tensor],
    scratch: Option<&'a Tensor>,
    /// The results that have been taken, one bit each; the last bit is for the scratch.
    taken: Cell<u64>,
}

impl<'a> Call<'a> {
    /// A call over resolved tensors. The caller is responsible for everything that
    /// [`crate::validate`] proves: see the module's text.
    pub(crate) fn new(
        attrs: &'a [(String, Attr)],
        ins: &'a [Tensor],
        outs: &'a [Tensor],
        scratch: Option<&'a Tensor>,
    ) -> Call<'a> {
        assert!(
            outs.len() < 63,
            "a kernel should have fewer than 63 results"
        );
        Call {
            attrs,
            part: None,
            ins,
            outs,
            scratch,
            taken: Cell::new(0),
        }
    }
    /// The same for only some of the kernel's `units`. The caller makes sure that parts that run at
    /// the same time are disjoint.
    pub(crate) fn only(self, units: usize, part: Range<usize>) -> Call<'a> {
        assert!(
            part.start <= part.end && part.end <= units,
            "a part should be some of the units"
        );
        Call {
            part: Some((units, part)),
            ..self
        }
    }
    /// The same call; no result of it has been taken.
    pub(crate) fn again(&self) -> Call<'a> {
        Call {
            part: self.part.clone(),
            taken: Cell::new(0),
            ..*self
        }
    }
    /// The units of the kernel's `units` that this run computes. Panics if the kernel's cut has
    /// another number of units.
    pub fn part(&self, units: usize) -> Range<usize> {
        match &self.part {
            None => 0..units,
            Some((all, part)) => {
                assert!(
                    *all == units,
                    "a kernel should have the units of its cut: {all}, not {units}"
                );
                part.clone()
            }
        }
    }
    /// The elements of result 0 that this run computes. Units share them equally.
    pub fn elements(&self) -> Range<usize> {
        self.share(&self.outs[0])
    }
    /// The start and the number of this part's elements of a tensor. The tensor has equally many
    /// elements for each unit.
    fn share(&self, t: &Tensor) -> Range<usize> {
        let Some((units, part)) = &self.part else {
            return 0..t.numel();
        };
        let share = t.numel() / units;
        assert!(
            share * units == t.numel(),
            "units should share a tensor equally"
        );
        part.start * share..part.end * share
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
    /// The result that lies on operand `i`, if any: then the operand's elements are read from
    /// [`Call::output`].
    pub fn inplace(&self, i: usize) -> Option<usize> {
        let x = &self.ins[i];
        self.outs
            .iter()
            .position(|y| x.bytes > 0 && y.bytes > 0 && overlap(x, y))
    }
    /// Operand `i`'s elements. Panics if its type is not `T` (bools are `u8`), or if a result lies
    /// on it.
    pub fn input<T: Element>(&self, i: usize) -> &'a [T] {
        let x = &self.ins[i];
        assert!(
            self.inplace(i).is_none(),
            "operand {i} is in place; read it from the result"
        );
        expect_type::<T>(x);
        // SAFETY: `validate` proved that the range lies in its pool and is 64-byte aligned, and
        // that every write of it on another stream is ordered before or after this call. By the
        // assertion above, no result of this call overlaps it. Any bit pattern is a valid T.
        unsafe { std::slice::from_raw_parts(x.data.cast::<T>(), x.numel()) }
    }
    /// This part's elements of operand `i`. Every unit has equally many. Panics as [`Call::input`]
    /// does.
    pub fn input_part<T: Element>(&self, i: usize) -> &'a [T] {
        &self.input(i)[self.share(&self.ins[i])]
    }
    /// This part's elements of result `j`. Every unit has equally many. They hold the in-place
    /// operand's elements if one lies there, else any values. Panics if the result's type is not
    /// `T`, or if it was taken before.
    #[allow(
        clippy::mut_from_ref,
        reason = "each result is handed out once, see `taken`"
    )]
    pub fn output<T: Element>(&self, j: usize) -> &'a mut [T] {
        let y = &self.outs[j];
        self.take(j);
        expect_type::<T>(y);
        let Range { start, end } = self.share(y);
        // SAFETY: as for `input`; `take` hands out each result once, `validate` proved results
        // disjoint, and parts that run at the same time are disjoint.
        unsafe { std::slice::from_raw_parts_mut(y.data.cast::<T>().add(start), end - start) }
    }
    /// The position in result `j` at which the elements of [`Call::output`] begin.
    pub fn output_start(&self, j: usize) -> usize {
        self.share(&self.outs[j]).start
    }
    /// Some columns of result `j`, which consists of rows of `columns` elements: the columns of
    /// this part, where each column is a unit. Panics as [`Call::output`] does, and if the rows are
    /// not whole.
    pub fn output_columns<T: Element>(&self, j: usize, columns: usize) -> Window<'a, T> {
        let y = &self.outs[j];
        self.take(j);
        expect_type::<T>(y);
        let part = self.part(columns);
        let rows = y.numel().checked_div(columns).unwrap_or(0);
        assert!(rows * columns == y.numel(), "rows should be whole");
        // SAFETY: as for `output`. The first row's part begins within the tensor or at its end.
        let data = unsafe { y.data.cast::<T>().add(part.start.min(y.numel())) };
        Window {
            data,
            rows,
            columns: part.len(),
            stride: columns,
            of: PhantomData,
        }
    }
    /// This part's elements of result `j`, of which each of the kernel's `units` has `each`; the
    /// last may have fewer. Panics as [`Call::output`] does.
    #[allow(
        clippy::mut_from_ref,
        reason = "each result is handed out once, see `taken`"
    )]
    pub fn output_blocks<T: Element>(&self, j: usize, units: usize, each: usize) -> &'a mut [T] {
        let y = &self.outs[j];
        self.take(j);
        expect_type::<T>(y);
        let Range { start, end } = self.blocks(units, each, y.numel());
        // SAFETY: as for `output`; parts that are disjoint have disjoint blocks.
        unsafe { std::slice::from_raw_parts_mut(y.data.cast::<T>().add(start), end - start) }
    }
    /// This part's elements of operand `i`, as in [`Call::output_blocks`]. Panics as
    /// [`Call::input`] does.
    pub fn input_blocks<T: Element>(&self, i: usize, units: usize, each: usize) -> &'a [T] {
        let all = self.input(i);
        &all[self.blocks(units, each, all.len())]
    }
    /// The elements of this part's units, of `n`. Each unit has `each`, the last ones fewer.
    fn blocks(&self, units: usize, each: usize, n: usize) -> Range<usize> {
        let part = self.part(units);
        let first = |unit: usize| match unit == units {
            true => n,
            false => (unit * each).min(n),
        };
        first(part.start)..first(part.end)
    }
    /// This part's elements of result `j`, which consists of `items` of equal size. The units `of`
    /// share the items as equally as possible. Also returns the numbers of the items. Panics as
    /// [`Call::output`] does.
    #[allow(
        clippy::mut_from_ref,
        reason = "each result is handed out once, see `taken`"
    )]
    pub fn output_of<T: Element>(
        &self,
        j: usize,
        of: Range<usize>,
        items: usize,
    ) -> (Range<usize>, &'a mut [T]) {
        let y = &self.outs[j];
        self.take(j);
        expect_type::<T>(y);
        let items_of_part = self.share_of(of, items);
        let share = y.numel().checked_div(items).unwrap_or(0);
        assert!(share * items == y.numel(), "items should be of equal size");
        // SAFETY: as for `output`; parts that are disjoint have disjoint items.
        let elements = unsafe {
            std::slice::from_raw_parts_mut(
                y.data.cast::<T>().add(items_of_part.start * share),
                items_of_part.len() * share,
            )
        };
        (items_of_part, elements)
    }
    /// The items of this part. The units `of` share all `items` as equally as possible. Disjoint
    /// parts have disjoint items.
    fn share_of(&self, of: Range<usize>, items: usize) -> Range<usize> {
        let Some((_, part)) = &self.part else {
            return 0..items;
        };
        let first = |unit: usize| {
            let unit = unit.clamp(of.start, of.end) - of.start;
            (unit * items).checked_div(of.len()).unwrap_or(0)
        };
        first(part.start)..first(part.end)
    }
    /// Result `j` as planes; each has the same number of rows of `columns` numbers. The planes are
    /// counted in the order of a table of `outer` times `inner`, and lie in memory in the order of
    /// the transposed table. The units `of` share the columns of all planes, in this count, as
    /// equally as possible. Panics as [`Call::output`] does, and if the planes are not whole.
    pub fn output_planes<T: Element>(
        &self,
        j: usize,
        of: Range<usize>,
        [outer, inner, columns]: [usize; 3],
    ) -> Planes<'a, T> {
        let y = &self.outs[j];
        self.take(j);
        expect_type::<T>(y);
        let all = outer * inner * columns;
        let rows = y.numel().checked_div(all).unwrap_or(0);
        assert!(rows * all == y.numel(), "planes should be whole");
        Planes {
            data: y.data.cast::<T>(),
            order: [outer, inner],
            rows,
            columns,
            part: self.share_of(of, all),
            of: PhantomData,
        }
    }
    /// Parts of the columns of result `j`, which consists of `outer` times `rows` rows of `columns`
    /// elements. There are `outer` times `inner` units, in this order. In its
    /// rows, each unit has an equal share of each part's columns, in the order of `inner`. Panics
    /// as [`Call::output`] does, and if the parts overlap or cannot be shared equally.
    pub fn output_unit_columns<T: Element, const N: usize>(
        &self,
        j: usize,
        [outer, inner]: [usize; 2],
        [rows, columns]: [usize; 2],
        parts: [Range<usize>; N],
    ) -> [UnitColumns<'a, T>; N] {
        let y = &self.outs[j];
        self.take(j);
        expect_type::<T>(y);
        let units = self.part(outer * inner);
        assert!(outer * rows * columns == y.numel(), "rows should be whole");
        for (i, part) in parts.iter().enumerate() {
            let apart = |other: &Range<usize>| other.end <= part.start || part.end <= other.start;
            let fits = part.start <= part.end && part.end <= columns;
            assert!(
                fits && parts[..i].iter().all(apart),
                "columns should be a result's, and each in one part"
            );
            assert!(
                part.len() == part.len().checked_div(inner).unwrap_or(0) * inner,
                "units should share columns equally"
            );
        }
        parts.map(|part| UnitColumns {
            // A result without elements may begin past its end.
            data: y.data.cast::<T>().wrapping_add(part.start),
            inner,
            rows,
            share: part.len().checked_div(inner).unwrap_or(0),
            stride: columns,
            units: units.clone(),
            of: PhantomData,
        })
    }
    /// Operand `i`'s elements as bits. Panics if their width is not `T`'s, or if a result lies on
    /// the operand.
    pub fn input_bits<T: Bits>(&self, i: usize) -> &'a [T] {
        let x = &self.ins[i];
        assert!(
            self.inplace(i).is_none(),
            "operand {i} is in place; read it from the result"
        );
        expect_width::<T>(x);
        // SAFETY: as for `input`.
        unsafe { std::slice::from_raw_parts(x.data.cast::<T>(), x.numel()) }
    }
    /// Result `j`'s elements as bits. Panics if their width is not `T`'s, or if the result was
    /// taken before.
    #[allow(
        clippy::mut_from_ref,
        reason = "each result is handed out once, see `taken`"
    )]
    pub fn output_bits<T: Bits>(&self, j: usize) -> &'a mut [T] {
        let y = &self.outs[j];
        self.take(j);
        expect_width::<T>(y);
        let Range { start, end } = self.share(y);
        // SAFETY: as for `output`.
        unsafe { std::slice::from_raw_parts_mut(y.data.cast::<T>().add(start), end - start) }
    }
    /// The scratch as `T`s; empty if there is none. Panics if it was taken before, and in a part.
    #[allow(clippy::mut_from_ref, reason = "handed out once, see `taken`")]
    pub fn scratch<T: Element>(&self) -> &'a mut [T] {
        assert!(
            self.part.is_none(),
            "a part should take its part of the scratch"
        );
        self.scratch_from(0..usize::MAX)
    }
    /// This part's pieces of the scratch: one piece of `piece` `T`s for every `per_piece` of
    /// `units`; the last piece may have fewer units. Panics if the part does not begin and end
    /// between pieces, and as [`Call::scratch`] does.
    #[allow(clippy::mut_from_ref, reason = "handed out once, see `taken`")]
    pub fn scratch_part<T: Element>(
        &self,
        units: usize,
        per_piece: usize,
        piece: usize,
    ) -> &'a mut [T] {
        let part = self.part(units);
        let between = part.start.is_multiple_of(per_piece)
            && (part.end == units || part.end.is_multiple_of(per_piece));
        assert!(
            between,
            "parts should begin and end between pieces of the scratch"
        );
        self.scratch_from(part.start / per_piece * piece..part.end.div_ceil(per_piece) * piece)
    }
    /// The scratch, for parts that only read it.
    pub fn scratch_read<T: Element>(&self) -> &'a [T] {
        self.scratch_from(0..usize::MAX)
    }
    #[allow(clippy::mut_from_ref, reason = "handed out once, see `taken`")]
    fn scratch_from<T: Element>(&self, range: Range<usize>) -> &'a mut [T] {
        let Some(s) = self.scratch else {
            return &mut [];
        };
        self.take(63);
        let n = s.bytes / size_of::<T>();
        let end = if range.end == usize::MAX {
            n
        } else {
            range.end
        };
        assert!(
            range.start <= end && end <= n,
            "a part of the scratch should lie in it"
        );
        // SAFETY: as for `output`; scratch is validated like a result. The pieces of disjoint parts
        // are disjoint; the parts of a kernel either all have pieces or all only read.
        unsafe {
            std::slice::from_raw_parts_mut(s.data.cast::<T>().add(range.start), end - range.start)
        }
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

/// Some columns of a matrix whose rows lie `stride` elements apart.
pub struct Window<'a, T> {
    data: *mut T,
    rows: usize,
    columns: usize,
    stride: usize,
    of: PhantomData<&'a mut [T]>,
}

impl<'a, T> Window<'a, T> {
    /// All columns of a matrix. Panics if the rows are not whole.
    pub fn new(all: &'a mut [T], rows: usize, columns: usize) -> Window<'a, T> {
        assert!(all.len() == rows * columns, "rows should be whole");
        Window {
            data: all.as_mut_ptr(),
            rows,
            columns,
            stride: columns,
            of: PhantomData,
        }
    }
    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// How many columns.
    pub fn columns(&self) -> usize {
        self.columns
    }
    /// The distance from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }
    /// A part of the rows and columns.
    pub fn part(&mut self, rows: Range<usize>, columns: Range<usize>) -> Window<'_, T> {
        assert!(
            rows.start <= rows.end && rows.end <= self.rows,
            "a window's part should have some of its rows"
        );
        assert!(
            columns.start <= columns.end && columns.end <= self.columns,
            "and some of its columns"
        );
        let data = self
            .data
            .wrapping_add(rows.start * self.stride + columns.start);
        Window {
            data,
            rows: rows.len(),
            columns: columns.len(),
            stride: self.stride,
            of: PhantomData,
        }
    }
    /// Row `i`'s elements. Panics if there is no such row.
    pub fn row(&mut self, i: usize) -> &mut [T] {
        assert!(i < self.rows, "a window should have row {i}");
        // SAFETY: the code that made the window promised that its rows and columns exist and that
        // nothing else uses them.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(i * self.stride), self.columns) }
    }
    /// All elements, if the rows follow each other.
    pub fn whole(&mut self) -> Option<&mut [T]> {
        // SAFETY: as for `row`; no other element lies between the rows.
        (self.stride == self.columns)
            .then(|| unsafe { std::slice::from_raw_parts_mut(self.data, self.rows * self.columns) })
    }
    /// The first element.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut T {
        self.data
    }
}

/// Some columns of the planes of a result: see [`Call::output_planes`].
pub struct Planes<'a, T> {
    data: *mut T,
    order: [usize; 2],
    rows: usize,
    columns: usize,
    /// The columns, counted through all planes.
    part: Range<usize>,
    of: PhantomData<&'a mut [T]>,
}

impl<T> Planes<'_, T> {
    /// The columns of this part: number `j` of plane `p` is `p * columns + j`.
    pub fn part(&self) -> Range<usize> {
        self.part.clone()
    }
    /// Some rows and columns of a plane. Panics if the columns are not this part's.
    pub fn window(
        &mut self,
        plane: usize,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Window<'_, T> {
        let [outer, inner] = self.order;
        let first = plane * self.columns;
        let ours = plane < outer * inner
            && rows.start <= rows.end
            && rows.end <= self.rows
            && columns.start <= columns.end
            && columns.end <= self.columns
            && self.part.start <= first + columns.start
            && first + columns.end <= self.part.end;
        assert!(ours, "a window should be of this part's columns");
        let place = plane % inner * outer + plane / inner;
        let at = (place * self.rows + rows.start) * self.columns + columns.start;
        Window {
            // The window may be empty, and begin past the end.
            data: self.data.wrapping_add(at),
            rows: rows.len(),
            columns: columns.len(),
            stride: self.columns,
            of: PhantomData,
        }
    }
}

/// Some columns of a result, shared by units: see [`Call::output_unit_columns`].
pub struct UnitColumns<'a, T> {
    data: *mut T,
    inner: usize,
    rows: usize,
    share: usize,
    stride: usize,
    units: Range<usize>,
    of: PhantomData<&'a mut [T]>,
}

impl<T> UnitColumns<'_, T> {
    /// The rows and columns of a unit. Panics if the unit is not this part's.
    pub fn window(&mut self, unit: usize) -> Window<'_, T> {
        assert!(self.units.contains(&unit), "a unit should be this part's");
        let first = unit / self.inner * self.rows * self.stride;
        Window {
            data: self
                .data
                .wrapping_add(first + unit % self.inner * self.share),
            rows: self.rows,
            columns: self.share,
            stride: self.stride,
            of: PhantomData,
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
    assert!(
        fits,
        "a slice of {:?} was asked of a tensor of {:?}",
        T::DTYPE,
        t.dtype
    );
}

fn expect_width<T: Bits>(t: &Tensor) {
    let fits = t.dtype.bytes() == size_of::<T>() as u64;
    assert!(
        fits,
        "a slice of {} bytes an element was asked of a tensor of {:?}",
        size_of::<T>(),
        t.dtype
    );
}
