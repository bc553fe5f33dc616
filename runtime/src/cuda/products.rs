//! Products of matrices by NVIDIA's library cuBLASLt, which is looked for when a program runs.
//!
//! The library's matrices have columns one after the other. A matrix with rows one after the other
//! is its own transpose there, so the result's transpose is computed: the right factor comes first.
//!
//! **Invariants:** the type of each function, and each number, is the one in cublasLt.h. The
//! library reads and writes only the matrices, the bias and the workspace that it is given.
//! Descriptions live as long as the [`Product`] that owns them.

#![allow(unsafe_code, reason = "cuBLASLt is a C library")]

use super::context::Context;
use super::device::Device;
use super::driver::{DeviceRange, DriverError, Refused};
use super::stream::Stream;
use libloading::Library;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;

// Numbers of cublasLt.h, cublas_api.h and library_types.h.
const COMPUTE_F32: c_int = 68;
/// Factors of f32 are rounded to TF32.
const COMPUTE_TF32: c_int = 77;
const BATCH_COUNT: c_int = 5;
const BATCH_OFFSET: c_int = 6;
const TRANSPOSE_A: c_int = 3;
const TRANSPOSE_B: c_int = 4;
const EPILOGUE: c_int = 7;
const BIAS_POINTER: c_int = 8;
const EPILOGUE_BIAS: u32 = 4;
const WORKSPACE_BYTES: c_int = 1;
const REDUCTIONS: c_int = 3;
/// Minimum alignments of the factors, the addend and the result.
const ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];
const NOT_SUPPORTED: c_int = 15;
/// Sums of a cut depth are added in order, never in place: those depend on which block comes first.
const IN_ORDER: u32 = 2 | 4;
/// Bytes by which every place of a plan is aligned.
const ALIGN: u32 = 64;
/// Bytes by which a workspace should be aligned.
const WORKSPACE_ALIGN: u64 = 256;
/// The first version whose numbers are those above: CUDA 12.0's.
const OLDEST: u64 = 120_000;

/// How a product is computed: 64 bytes that only the same version of the library understands.
pub type Algorithm = [u64; 8];

/// A type of numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Number {
    /// 32 bits.
    F32 = 0,
    /// The upper 16 bits of those.
    BF16 = 14,
}

/// What is added to a product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Addend {
    /// Nothing.
    Nothing,
    /// A number for each column.
    Bias,
    /// A matrix with the result's shape and type.
    Matrix,
}

/// A product of matrices `[batch,m,k]` and `[batch,k,n]`, each of which may lie transposed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Matrices of each tensor.
    pub batch: u64,
    /// Rows of the result.
    pub m: u64,
    /// Columns of the result.
    pub n: u64,
    /// Terms of a sum.
    pub k: u64,
    /// The left factor lies as `[k,m]`.
    pub ta: bool,
    /// The right factor lies as `[n,k]`.
    pub tb: bool,
    /// Factors of f32 may be rounded to TF32.
    pub tf32: bool,
    /// The factors' type.
    pub factors: Number,
    /// The result's and the addend's type.
    pub result: Number,
    /// What is added.
    pub addend: Addend,
    /// Bytes of the workspace.
    pub workspace: u64,
}

/// Where the tensors of a product begin on the device. Without an addend its address does not
/// count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Places {
    /// The left factor.
    pub left: u64,
    /// The right factor.
    pub right: u64,
    /// The addend; it may be the result.
    pub addend: u64,
    /// The result.
    pub result: u64,
}

/// Why the library cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProductError {
    /// There is no such library, or it does not load.
    #[error("{}: {why}", library.display())]
    Library {
        /// The library.
        library: PathBuf,
        /// The system's reason.
        why: String,
    },
    /// It is another library, or an old one.
    #[error("{} has no function {symbol}: it is no cuBLASLt, or too old", library.display())]
    Symbol {
        /// The library.
        library: PathBuf,
        /// The function.
        symbol: &'static str,
    },
    /// It is older than what is written here.
    #[error("{} is version {version}; at least {OLDEST} is needed", library.display())]
    Old {
        /// The library.
        library: PathBuf,
        /// Its version: 120100 is 12.1.
        version: u64,
    },
    /// It refuses the device.
    #[error("{}: {refused}", library.display())]
    Refused {
        /// The library.
        library: PathBuf,
        /// What it said.
        refused: Refused,
    },
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

type Raw = *mut c_void;

/// cublasLtMatmulHeuristicResult_t of cublasLt.h.
#[repr(C)]
#[derive(Default)]
struct Choice {
    algorithm: Algorithm,
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// Declares the library's functions and how they are found.
macro_rules! functions {
    ($($name:ident = $symbol:literal ($($arg:ty),*) -> $out:ty;)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($arg),*) -> $out,)*
        }

        impl Functions {
            fn find(path: &Path) -> Result<Functions, ProductError> {
                // SAFETY: initialising the library has no precondition; it is the user who names
                // another one.
                let library = unsafe { Library::new(path) };
                let library = library.map_err(|e| ProductError::Library {
                    library: path.into(),
                    why: e.to_string(),
                })?;
                // Never unloaded: a thread that called it may run code of it when it ends.
                let library = ManuallyDrop::new(library);
                $(
                    // SAFETY: the type is the one in cublasLt.h for this symbol.
                    let $name = unsafe {
                        library.get::<unsafe extern "C" fn($($arg),*) -> $out>($symbol.as_bytes())
                    };
                    let $name = *$name.map_err(|_| ProductError::Symbol {
                        library: path.into(),
                        symbol: $symbol,
                    })?;
                )*
                Ok(Functions { $($name,)* })
            }
        }
    };
}

functions! {
    version = "cublasLtGetVersion" () -> usize;
    create = "cublasLtCreate" (*mut Raw) -> c_int;
    destroy = "cublasLtDestroy" (Raw) -> c_int;
    layout_create = "cublasLtMatrixLayoutCreate" (*mut Raw, c_int, u64, u64, i64) -> c_int;
    layout_set = "cublasLtMatrixLayoutSetAttribute" (Raw, c_int, *const c_void, usize) -> c_int;
    layout_destroy = "cublasLtMatrixLayoutDestroy" (Raw) -> c_int;
    operation_create = "cublasLtMatmulDescCreate" (*mut Raw, c_int, c_int) -> c_int;
    operation_set = "cublasLtMatmulDescSetAttribute" (Raw, c_int, *const c_void, usize) -> c_int;
    operation_destroy = "cublasLtMatmulDescDestroy" (Raw) -> c_int;
    preference_create = "cublasLtMatmulPreferenceCreate" (*mut Raw) -> c_int;
    preference_set = "cublasLtMatmulPreferenceSetAttribute" (
        Raw, c_int, *const c_void, usize
    ) -> c_int;
    preference_destroy = "cublasLtMatmulPreferenceDestroy" (Raw) -> c_int;
    choose = "cublasLtMatmulAlgoGetHeuristic" (
        Raw, Raw, Raw, Raw, Raw, Raw, Raw, c_int, *mut Choice, *mut c_int
    ) -> c_int;
    check = "cublasLtMatmulAlgoCheck" (
        Raw, Raw, Raw, Raw, Raw, Raw, *const Algorithm, *mut Choice
    ) -> c_int;
    multiply = "cublasLtMatmul" (
        Raw, Raw, *const c_void, *const c_void, Raw, *const c_void, Raw, *const c_void,
        *const c_void, Raw, *mut c_void, Raw, *const Algorithm, *mut c_void, usize, Raw
    ) -> c_int;
}

/// The library, for a device.
pub struct Products {
    inner: Arc<Inner>,
}

struct Inner {
    functions: Functions,
    context: Arc<Context>,
    handle: Described,
    version: u64,
    path: PathBuf,
}

/// Something that the library made: a number to us. It may be used on any thread.
#[derive(Clone, Copy)]
struct Described(Raw);

// SAFETY: cuBLASLt's handles and descriptions may be used on any thread; none is changed after it
// was made.
unsafe impl Send for Described {}
// SAFETY: as above.
unsafe impl Sync for Described {}

impl Products {
    /// Loads the library from one path.
    ///
    /// # Errors
    /// There is no such library, it is another or an old one, or it refuses the device.
    pub fn open(device: &Device, path: &Path) -> Result<Products, ProductError> {
        let functions = Functions::find(path)?;
        // SAFETY: it has no arguments.
        let version = unsafe { (functions.version)() } as u64;
        if version < OLDEST {
            return Err(ProductError::Old {
                library: path.into(),
                version,
            });
        }
        let context = device.context().clone();
        context.alive()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the out is valid for the call; the device is bound to this thread.
        let created = done("cublasLtCreate", unsafe {
            (functions.create)(&raw mut handle)
        });
        created.map_err(|refused| ProductError::Refused {
            library: path.into(),
            refused,
        })?;
        Ok(Products {
            inner: Arc::new(Inner {
                functions,
                context,
                handle: Described(handle),
                version,
                path: path.into(),
            }),
        })
    }

    /// Its version: 130100 is 13.1.
    pub fn version(&self) -> u64 {
        self.inner.version
    }
    /// The library's file.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// Prepares a product: by a known algorithm if the library still takes it, else by the one
    /// that it thinks fastest of those that give the same bits each time. `None` if it computes no
    /// such product.
    ///
    /// # Errors
    /// The driver has failed.
    pub fn product(
        &self,
        shape: &Shape,
        places: Places,
        workspace: Option<DeviceRange>,
        known: Option<Algorithm>,
    ) -> Result<Option<Product>, DriverError> {
        let inner = &self.inner;
        inner.context.alive()?;
        let mut product = Product {
            inner: inner.clone(),
            operation: Described(ptr::null_mut()),
            layouts: [Described(ptr::null_mut()); 3],
            algorithm: Algorithm::default(),
            places,
            has_addend: shape.addend == Addend::Matrix,
            has_bias: shape.addend == Addend::Bias,
            workspace: workspace.map_or((0, 0), |range| aligned(range.address, range.bytes)),
        };
        // While a step is loaded, what the library refuses is computed without it.
        if product.describe(shape).is_err() {
            return Ok(None);
        }
        let kept = known.filter(|known| product.takes(known));
        let chosen = kept.or_else(|| product.choose().ok().flatten());
        Ok(chosen.map(|algorithm| {
            product.algorithm = algorithm;
            product
        }))
    }
}

impl fmt::Debug for Products {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Products")
            .field("path", &self.inner.path)
            .field("version", &self.inner.version)
            .finish()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let (functions, handle) = (&self.functions, self.handle);
        self.context.destroy(|_| {
            // SAFETY: its owner calls, once; nothing that needs it is left.
            done("cublasLtDestroy", unsafe { (functions.destroy)(handle.0) })?;
            Ok(())
        });
    }
}

/// The part of a workspace from an aligned address on: the address and its bytes.
fn aligned(address: u64, bytes: u64) -> (u64, u64) {
    let start = address.next_multiple_of(WORKSPACE_ALIGN);
    (start, bytes.saturating_sub(start - address))
}

/// What a function returned.
fn done(call: &'static str, status: c_int) -> Result<(), Refused> {
    match status {
        0 => Ok(()),
        status => Err(Refused { call, status }),
    }
}

/// A product, ready to be computed.
pub struct Product {
    inner: Arc<Inner>,
    operation: Described,
    /// Of the library's first and second factor, and of the result.
    layouts: [Described; 3],
    algorithm: Algorithm,
    places: Places,
    has_addend: bool,
    has_bias: bool,
    workspace: (u64, u64),
}

impl fmt::Debug for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Product")
            .field("algorithm", &self.algorithm)
            .finish_non_exhaustive()
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        if self.inner.context.alive().is_err() {
            return;
        }
        let functions = &self.inner.functions;
        for layout in self.layouts {
            if !layout.0.is_null() {
                // SAFETY: its owner calls, once.
                unsafe { (functions.layout_destroy)(layout.0) };
            }
        }
        if !self.operation.0.is_null() {
            // SAFETY: its owner calls, once.
            unsafe { (functions.operation_destroy)(self.operation.0) };
        }
    }
}

impl Product {
    /// How it is computed.
    pub fn algorithm(&self) -> &Algorithm {
        &self.algorithm
    }

    /// Where its factors, its addend and its result lie.
    pub fn places(&self) -> Places {
        self.places
    }

    /// Says where they lie from now on, while the product is not being computed.
    ///
    /// # Errors
    /// The library refuses.
    pub fn point(&mut self, places: Places) -> Result<(), Refused> {
        self.places = places;
        match self.has_bias {
            true => self.set(BIAS_POINTER, &places.addend.to_ne_bytes()),
            false => Ok(()),
        }
    }

    fn describe(&mut self, s: &Shape) -> Result<(), Refused> {
        self.operate(s)?;
        // Rows and columns of matrices whose columns follow each other.
        let right = if s.tb { [s.k, s.n] } else { [s.n, s.k] };
        let left = if s.ta { [s.m, s.k] } else { [s.k, s.m] };
        let of = [
            (right, s.factors),
            (left, s.factors),
            ([s.n, s.m], s.result),
        ];
        for (i, (sizes, number)) in of.into_iter().enumerate() {
            self.layouts[i] = self.layout(sizes, number, s.batch)?;
        }
        Ok(())
    }

    fn operate(&mut self, s: &Shape) -> Result<(), Refused> {
        let functions = &self.inner.functions;
        let mut operation = ptr::null_mut();
        // SAFETY: the out is valid for the call.
        let made = unsafe {
            let scale = Number::F32 as c_int;
            let compute = if s.tf32 { COMPUTE_TF32 } else { COMPUTE_F32 };
            (functions.operation_create)(&raw mut operation, compute, scale)
        };
        done("cublasLtMatmulDescCreate", made)?;
        self.operation = Described(operation);
        self.set(TRANSPOSE_A, &c_int::from(s.tb).to_ne_bytes())?;
        self.set(TRANSPOSE_B, &c_int::from(s.ta).to_ne_bytes())?;
        if self.has_bias {
            self.set(EPILOGUE, &EPILOGUE_BIAS.to_ne_bytes())?;
            self.set(BIAS_POINTER, &self.places.addend.to_ne_bytes())?;
        }
        Ok(())
    }

    /// Sets an attribute of the operation.
    fn set(&self, attribute: c_int, value: &[u8]) -> Result<(), Refused> {
        let (operation, bytes) = (self.operation.0, value.as_ptr().cast());
        let set = self.inner.functions.operation_set;
        // SAFETY: the operation is this product's, if it was made; the value has the bytes that
        // are told, and is valid for the call.
        let set = unsafe { set(operation, attribute, bytes, value.len()) };
        done("cublasLtMatmulDescSetAttribute", set)
    }

    fn layout(
        &self,
        [rows, columns]: [u64; 2],
        number: Number,
        batch: u64,
    ) -> Result<Described, Refused> {
        let functions = &self.inner.functions;
        let mut layout = ptr::null_mut();
        // SAFETY: the out is valid for the call.
        let made = unsafe {
            let create = functions.layout_create;
            create(&raw mut layout, number as c_int, rows, columns, rows as i64)
        };
        done("cublasLtMatrixLayoutCreate", made)?;
        let set = |attribute, value: &[u8]| {
            let bytes = value.as_ptr().cast();
            // SAFETY: the value has the bytes that are told, and is valid for the call.
            let set = unsafe { (functions.layout_set)(layout, attribute, bytes, value.len()) };
            done("cublasLtMatrixLayoutSetAttribute", set)
        };
        if batch > 1 {
            let count = c_int::try_from(batch).unwrap_or(c_int::MAX);
            set(BATCH_COUNT, &count.to_ne_bytes())?;
            set(BATCH_OFFSET, &((rows * columns) as i64).to_ne_bytes())?;
        }
        Ok(Described(layout))
    }

    /// True if the library computes the product by an algorithm, in this workspace.
    fn takes(&self, algorithm: &Algorithm) -> bool {
        let Inner {
            functions, handle, ..
        } = &*self.inner;
        let [right, left, result] = self.layouts.map(|layout| layout.0);
        let mut choice = Choice::default();
        // SAFETY: the out and the algorithm are valid for the call; descriptions live as long as
        // this product.
        let status = unsafe {
            let (operation, algorithm) = (self.operation.0, ptr::from_ref(algorithm));
            let choice = &raw mut choice;
            (functions.check)(
                handle.0, operation, right, left, result, result, algorithm, choice,
            )
        };
        status == 0 && choice.state == 0 && choice.workspace as u64 <= self.workspace.1
    }

    /// The algorithm that the library thinks fastest; `None` if it has none.
    fn choose(&self) -> Result<Option<Algorithm>, Refused> {
        let Inner {
            functions, handle, ..
        } = &*self.inner;
        let mut preference = ptr::null_mut();
        // SAFETY: the out is valid for the call.
        let made = unsafe { (functions.preference_create)(&raw mut preference) };
        done("cublasLtMatmulPreferenceCreate", made)?;
        let set = |attribute, value: &[u8]| {
            let bytes = value.as_ptr().cast();
            // SAFETY: the value has the bytes that are told, and is valid for the call.
            let set =
                unsafe { (functions.preference_set)(preference, attribute, bytes, value.len()) };
            done("cublasLtMatmulPreferenceSetAttribute", set)
        };
        let preferred = set(WORKSPACE_BYTES, &self.workspace.1.to_ne_bytes())
            .and_then(|()| set(REDUCTIONS, &IN_ORDER.to_ne_bytes()))
            .and_then(|()| {
                let mut all = ALIGNMENTS.into_iter();
                all.try_for_each(|which| set(which, &ALIGN.to_ne_bytes()))
            });
        let [right, left, result] = self.layouts.map(|layout| layout.0);
        let (mut choice, mut n) = (Choice::default(), 0);
        let status = preferred.map(|()| {
            let (choice, n) = (&raw mut choice, &raw mut n);
            // SAFETY: the outs are valid for the call, which gives at most the one choice that is
            // asked for; descriptions live as long as this product.
            unsafe {
                let operation = self.operation.0;
                (functions.choose)(
                    handle.0, operation, right, left, result, result, preference, 1, choice, n,
                )
            }
        });
        // SAFETY: it was made here, and is not used again.
        unsafe { (functions.preference_destroy)(preference) };
        match status? {
            NOT_SUPPORTED => Ok(None),
            0 if n < 1 || choice.state != 0 => Ok(None),
            status => {
                done("cublasLtMatmulAlgoGetHeuristic", status).map(|()| Some(choice.algorithm))
            }
        }
    }
}

impl Stream {
    /// Computes a product when the stream gets there.
    pub fn multiply(&self, product: &Product) -> Result<(), DriverError> {
        let Inner {
            functions, handle, ..
        } = &*product.inner;
        let (one, zero) = (1_f32, 0_f32);
        let beta = if product.has_addend { &one } else { &zero };
        let [right, left, result] = product.layouts.map(|layout| layout.0);
        let address = |at: u64| ptr::without_provenance_mut::<c_void>(at as usize);
        let at = product.places;
        let addend = match product.has_addend {
            true => at.addend,
            false => at.result,
        };
        let (workspace, bytes) = product.workspace;
        product.inner.context.call(|_| {
            // SAFETY: the factors of 1 and 0 are valid for the call, which reads them before it
            // returns; addresses are the device's, of tensors with these layouts; descriptions and
            // the stream live as long as their owners.
            let status = unsafe {
                (functions.multiply)(
                    handle.0,
                    product.operation.0,
                    ptr::from_ref(&one).cast(),
                    address(at.right),
                    right,
                    address(at.left),
                    left,
                    ptr::from_ref(beta).cast(),
                    address(addend),
                    result,
                    address(at.result),
                    result,
                    ptr::from_ref(&product.algorithm),
                    address(workspace),
                    bytes as usize,
                    self.handle().raw(),
                )
            };
            done("cublasLtMatmul", status)?;
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workspace_begins_at_a_multiple_of_256() {
        assert_eq!(aligned(0x1040, 1000), (0x1100, 1000 - 0xc0));
        assert_eq!(aligned(0x1100, 1000), (0x1100, 1000));
        assert_eq!(aligned(0x1040, 64), (0x1100, 0));
    }

    #[test]
    fn a_choice_has_the_size_of_the_header() {
        assert_eq!(size_of::<Choice>(), 96);
    }

    #[test]
    fn another_library_is_named() {
        let error = Functions::find(Path::new("/nowhere/libcublasLt.so"))
            .err()
            .unwrap();
        assert!(
            error.to_string().starts_with("/nowhere/libcublasLt.so: "),
            "{error}"
        );
        let error = Functions::find(Path::new("libc.so.6")).err().unwrap();
        assert!(error.to_string().contains("cublasLtGetVersion"), "{error}");
    }
}
