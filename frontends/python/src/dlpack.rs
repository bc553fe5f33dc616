//! Tensors of a machine as DLPack capsules, which `torch.from_dlpack` makes tensors of without a
//! copy. The layout is that of `dlpack.h`, version 0.8 (dmlc/dlpack).
//!
//! A capsule owns a loan of the pool's memory. Its consumer ends the loan, on any thread and
//! without the GIL, so nothing of Python is touched then.

#![allow(
    unsafe_code,
    reason = "the capsule is C's: Python and its consumer call its functions with raw pointers"
)]

use artifact::DType;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use runtime::{Borrowed, Holder, Lent};
use std::ffi::{CStr, c_void};

/// The name of a capsule that nobody has taken yet.
const FRESH: &CStr = c"dltensor";
/// A kind of device, and the number of one: `kDLCPU`.
pub(crate) const CPU: (i32, i32) = (1, 0);
/// `kDLCUDA`.
const CUDA: i32 = 2;

/// What can use a lent tensor's address.
fn place(lent: &Lent) -> (i32, i32) {
    match lent.holder() {
        Holder::Host => CPU,
        Holder::Gpu(number) => (CUDA, number as i32),
    }
}

#[repr(C)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// What a capsule's pointers point into.
struct Context {
    shape: Vec<i64>,
    strides: Vec<i64>,
    _owner: Box<dyn Send + Sync>,
}

/// A tensor in the memory of a machine, for `torch.from_dlpack`.
#[pyclass(frozen, module = "lighterage._lighterage")]
pub(crate) struct View {
    lent: Lent,
    dtype: DataType,
}

impl View {
    /// An error if DLPack, or torch, does not know the element type.
    pub(crate) fn new(lent: Lent) -> PyResult<View> {
        let dtype = lent.tensor().dtype;
        let dtype = data_type(dtype)
            .ok_or_else(|| PyBufferError::new_err(format!("{dtype:?} has no DLPack type")))?;
        Ok(View { lent, dtype })
    }
}

fn data_type(dtype: DType) -> Option<DataType> {
    // `kDLInt`, `kDLUInt`, `kDLFloat`, `kDLBfloat`, `kDLBool`.
    let (code, bits) = match dtype {
        DType::I8 => (0, 8),
        DType::I16 => (0, 16),
        DType::I32 => (0, 32),
        DType::I64 => (0, 64),
        DType::U8 => (1, 8),
        DType::F16 => (2, 16),
        DType::F32 => (2, 32),
        DType::F64 => (2, 64),
        DType::BF16 => (4, 16),
        DType::Bool => (6, 8),
        DType::F8E4M3 | DType::F8E5M2 => return None,
    };
    Some(DataType {
        code,
        bits,
        lanes: 1,
    })
}

#[pymethods]
impl View {
    /// The capsule. Whoever lends has waited for the step, also on a GPU. So the protocol's
    /// options, such as the consumer's stream, say nothing here.
    #[pyo3(signature = (**_options))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        _options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.capsule().into_python(py)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        place(&self.lent)
    }
}

/// A tensor for the consumer of a capsule.
pub(crate) struct Capsule(Box<Managed>);

impl Capsule {
    /// A tensor `i64[1]` at `number`, which `owner` keeps where it is.
    pub(crate) fn number(number: &i64, owner: Box<dyn Send + Sync>) -> Capsule {
        let start: *const i64 = number;
        let dtype = DataType {
            code: 0,
            bits: 64,
            lanes: 1,
        };
        Capsule::new((start.cast_mut().cast(), CPU), dtype, vec![1], owner)
    }

    /// The capsule as Python's object.
    pub(crate) fn into_python(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        let managed = Box::into_raw(self.0);
        // SAFETY: the capsule gets a valid pointer, a static name and a destructor that expects
        // both. On failure the pointer is still ours.
        unsafe {
            let capsule = ffi::PyCapsule_New(managed.cast(), FRESH.as_ptr(), Some(drop_capsule));
            if capsule.is_null() {
                delete(managed);
            }
            Bound::from_owned_ptr_or_err(py, capsule)
        }
    }

    fn new(
        (data, (kind, id)): (*mut c_void, (i32, i32)),
        dtype: DataType,
        shape: Vec<i64>,
        owner: Box<dyn Send + Sync>,
    ) -> Capsule {
        let mut strides = vec![1; shape.len()];
        for i in (1..shape.len()).rev() {
            strides[i - 1] = strides[i] * shape[i];
        }
        let mut context = Box::new(Context {
            shape,
            strides,
            _owner: owner,
        });
        Capsule(Box::new(Managed {
            tensor: Tensor {
                data,
                device: Device { kind, id },
                ndim: context.shape.len() as i32,
                dtype,
                // The vectors' elements stay where they are when the box moves.
                shape: context.shape.as_mut_ptr(),
                strides: context.strides.as_mut_ptr(),
                byte_offset: 0,
            },
            context: Box::into_raw(context).cast(),
            deleter: Some(delete),
        }))
    }
}

impl View {
    pub(crate) fn capsule(&self) -> Capsule {
        let tensor = self.lent.tensor();
        let shape = tensor.shape.iter().map(|&d| d as i64).collect();
        let dtype = DataType { ..self.dtype };
        let owner = Box::new(self.lent.clone());
        let start = (tensor.start().cast(), place(&self.lent));
        Capsule::new(start, dtype, shape, owner)
    }
}

/// The memory of a tensor of PyTorch's, by its address; `None` for an empty one, which has none.
pub(crate) fn borrowed(address: usize, bytes: usize) -> Option<Borrowed> {
    // SAFETY: `lighterage.backend` gives addresses of tensors that it holds while a part runs, with
    // the types that the plan has. A machine for states at addresses that hold others by now is
    // dropped before it runs: `Arenas::take` compares the addresses.
    unsafe { Borrowed::new(std::ptr::with_exposed_provenance_mut(address), bytes) }
}

/// Ends the loan.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: the consumer calls this once, with the pointer that `managed` made; both boxes were
    // leaked there.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.context.cast::<Context>()));
    }
}

/// Ends the loan of a capsule that nobody took. A consumer renames the capsule that it takes.
unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: Python calls this with the capsule that it drops; under the fresh name its pointer is
    // the one that `__dlpack__` put there.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, FRESH.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, FRESH.as_ptr()).cast());
        }
    }
}
