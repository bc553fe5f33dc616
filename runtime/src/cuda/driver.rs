//! The CUDA driver: the functions of it that the runtime uses, looked for when a program runs.
//!
//! The driver's interface and not CUDA's runtime library: its library has one name in every
//! version, and an installed driver is all that it needs. Nothing of CUDA is needed to build.
//!
//! **Invariants:** the type of each function is the one in cuda.h. A status is a number and no
//! enum, so that one of a newer driver is a status like any other. A [`Handle`] comes from the
//! driver, and only its owner destroys it: [`super::context`], [`super::stream`],
//! [`super::memory`] and [`super::module`] have the owners. The functions here do not check which
//! context is current: their callers do.

#![allow(unsafe_code, reason = "the driver is a C library")]

use crate::memory::Borrowed;
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::Duration;

/// The driver's name on every system that has one.
const LIBRARY: &str = "libcuda.so.1";
/// Names another file.
const VARIABLE: &str = "LIGHTERAGE_CUDA";

// Numbers of cuda.h.
/// A thread that waits for the device looks again and again: an edge between device and host costs
/// microseconds then.
const SCHEDULE_SPIN: c_uint = 1;
/// A stream that does not wait for the legacy default stream.
const NON_BLOCKING: c_uint = 1;
/// An event without a time stamp: cheaper to record.
const NO_TIMING: c_uint = 2;
/// Host memory that every context may copy asynchronously.
const PORTABLE: c_uint = 1;
const MAX_THREADS_OF_FUNCTION: c_int = 0;
const MAX_DYNAMIC_SHARED: c_int = 8;
const JIT_ERROR_LOG: c_int = 5;
const JIT_ERROR_LOG_BYTES: c_int = 6;

/// An attribute of a device, by its number in cuda.h.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Attribute {
    Major = 75,
    Minor = 76,
    /// Shared memory that a block may have if its function asks for it.
    MaxSharedOptIn = 97,
}

/// What a function of the driver returns: 0 is success.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Status(pub c_int);

impl Status {
    const SUCCESS: Status = Status(0);
    /// An argument means nothing to the function.
    pub const INVALID_VALUE: Status = Status(1);
    /// The device's primary context is in use, so that its flags cannot change.
    pub const CONTEXT_IS_ACTIVE: Status = Status(708);
    /// There is no more memory of the kind that was wanted.
    pub const OUT_OF_MEMORY: Status = Status(2);
    /// What was asked about is not done yet.
    const NOT_READY: Status = Status(600);

    /// True if the context can be used no more: a kernel's fault, a fault of the hardware, or what
    /// this program does not know. All later calls would only return it again.
    ///
    /// The others say of a call that it did nothing; their texts in cuda.h do not say that the
    /// process must be terminated.
    fn is_fatal(self) -> bool {
        let is_of_a_call = matches!(
            self.0,
            0..=3 | 34..=46 | 100..=102 | 200..=202 | 205..=213 | 215..=219 | 221..=225
                | 300..=304 | 400..=402 | 500 | 600 | 701 | 704 | 705 | 708 | 711..=713
                | 720 | 800..=802
        );
        !is_of_a_call
    }
}

/// Why the driver cannot be used, or refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DriverError {
    /// There is no such library, or it does not load.
    #[error("{}", cannot_load(library, why))]
    Library {
        /// The library.
        library: PathBuf,
        /// The system's reason.
        why: String,
    },
    /// The library is not a driver's, or that of an old one.
    #[error("{} has no function {symbol}: it is no CUDA driver, or too old", library.display())]
    Symbol {
        /// The library.
        library: PathBuf,
        /// The function.
        symbol: &'static str,
    },
    /// The device did nothing for so long that it counts as stuck.
    #[error("the device has not finished a command for {seconds} s")]
    Stuck {
        /// The time.
        seconds: u64,
    },
    /// cuBLASLt did not compute a product.
    #[error(transparent)]
    Product(Refused),
    /// A function returned a status.
    #[error("{call}: {name} ({}), {text}", status.0)]
    Call {
        /// The function.
        call: &'static str,
        /// What it returned.
        status: Status,
        /// The status's name in cuda.h.
        name: String,
        /// What it means.
        text: String,
    },
}

/// A function of cuBLASLt that returned a status.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{call}: cuBLAS status {status}")]
pub struct Refused {
    /// The function.
    pub call: &'static str,
    /// What it returned.
    pub status: c_int,
}

impl From<Refused> for DriverError {
    fn from(refused: Refused) -> DriverError {
        DriverError::Product(refused)
    }
}

/// The system names the file in some of its reasons.
fn cannot_load(library: &Path, why: &str) -> String {
    let library = library.display().to_string();
    match why.starts_with(&library) {
        true => why.to_string(),
        false => format!("{library}: {why}"),
    }
}

impl DriverError {
    fn unloadable(library: &Path, error: &libloading::Error) -> DriverError {
        // The system's reason begins with the library's name.
        let (why, name) = (error.to_string(), format!("{}: ", library.display()));
        DriverError::Library {
            library: library.into(),
            why: why.strip_prefix(&name).unwrap_or(&why).into(),
        }
    }
    /// The device did nothing for so long that it counts as stuck.
    pub fn stuck(after: Duration) -> DriverError {
        DriverError::Stuck {
            seconds: after.as_secs(),
        }
    }
    /// What a function returned, if that is the error.
    pub fn status(&self) -> Option<Status> {
        match self {
            DriverError::Call { status, .. } => Some(*status),
            DriverError::Library { .. }
            | DriverError::Symbol { .. }
            | DriverError::Product(_)
            | DriverError::Stuck { .. } => None,
        }
    }
    /// True if the context can be used no more.
    pub fn is_fatal(&self) -> bool {
        match self {
            DriverError::Call { status, .. } => status.is_fatal(),
            // What the device did is not known.
            DriverError::Stuck { .. } | DriverError::Product(_) => true,
            DriverError::Library { .. } | DriverError::Symbol { .. } => false,
        }
    }
}

/// Something of the driver's: a context, stream, event, module or function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Handle(*mut c_void);

// SAFETY: it is a number to us; the driver's functions may be called from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// Bytes of the device's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceRange {
    pub(super) address: u64,
    pub(super) bytes: u64,
}

impl Handle {
    /// For other libraries of the driver's maker.
    pub(super) fn raw(self) -> *mut c_void {
        self.0
    }
}

impl DeviceRange {
    /// Bytes of the device that no memory has been given for.
    pub(crate) fn nowhere(bytes: u64) -> DeviceRange {
        DeviceRange { address: 0, bytes }
    }
    /// Bytes from an offset on of memory of the caller, which is on the device. Panics if they are
    /// not in it.
    pub(crate) fn borrowed(memory: &Borrowed, offset: u64, bytes: u64) -> DeviceRange {
        DeviceRange {
            address: memory.at(offset, bytes).addr() as u64,
            bytes,
        }
    }
    /// Where it begins, for a kernel's arguments.
    pub fn address(&self) -> u64 {
        self.address
    }
    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
    /// Its bytes `from..from + bytes`, all of which it has.
    pub(super) fn part(&self, from: u64, bytes: u64) -> DeviceRange {
        DeviceRange {
            address: self.address + from,
            bytes,
        }
    }
}

/// The arguments of a kernel: 64-bit numbers, most of them addresses on the device.
#[derive(Debug)]
pub struct Arguments {
    /// Where each of `values` lies.
    pointers: Box<[*mut c_void]>,
    /// Never changed, so that nothing but reads happens behind the pointers.
    values: Box<[u64]>,
}

// SAFETY: the pointers point to what the same value owns, on the heap, and nothing writes there.
unsafe impl Send for Arguments {}
// SAFETY: as above.
unsafe impl Sync for Arguments {}

impl Arguments {
    /// Arguments in a kernel's order.
    pub fn new(values: impl IntoIterator<Item = u64>) -> Arguments {
        let values: Box<[u64]> = values.into_iter().collect();
        let pointer = |value: &u64| ptr::from_ref(value).cast_mut().cast();
        Arguments {
            pointers: values.iter().map(pointer).collect(),
            values,
        }
    }
    /// The numbers.
    pub fn values(&self) -> &[u64] {
        &self.values
    }
}

/// How a kernel is started, along one dimension.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grid {
    /// Blocks; at least 1.
    pub blocks: u32,
    /// Threads of a block; at least 1.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: u32,
}

/// Declares the driver's functions and how they are found.
macro_rules! functions {
    ($($name:ident = $symbol:literal ($($arg:ty),*);)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl Functions {
            fn find(path: &Path) -> Result<Functions, DriverError> {
                // SAFETY: initialising NVIDIA's driver library has no precondition; it is the user
                // who names another one.
                let library = unsafe { Library::new(path) };
                let library = library.map_err(|e| DriverError::unloadable(path, &e))?;
                // Never unloaded: a thread that called it may run code of it when it ends.
                let library = ManuallyDrop::new(library);
                $(
                    // SAFETY: the type is the one in cuda.h for this symbol.
                    let $name = unsafe {
                        library.get::<unsafe extern "C" fn($($arg),*) -> c_int>($symbol.as_bytes())
                    };
                    let $name = *$name.map_err(|_| DriverError::Symbol {
                        library: path.into(),
                        symbol: $symbol,
                    })?;
                )*
                Ok(Functions { $($name,)* })
            }
        }
    };
}

type Raw = *mut c_void;

functions! {
    init = "cuInit" (c_uint);
    version = "cuDriverGetVersion" (*mut c_int);
    device_count = "cuDeviceGetCount" (*mut c_int);
    device_get = "cuDeviceGet" (*mut c_int, c_int);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_bytes = "cuDeviceTotalMem_v2" (*mut usize, c_int);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    context_flags = "cuDevicePrimaryCtxSetFlags_v2" (c_int, c_uint);
    context_retain = "cuDevicePrimaryCtxRetain" (*mut Raw, c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2" (c_int);
    set_current = "cuCtxSetCurrent" (Raw);
    synchronize = "cuCtxSynchronize" ();
    memory_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    pointer_attribute = "cuPointerGetAttribute" (Raw, c_int, u64);
    allocate = "cuMemAlloc_v2" (*mut u64, usize);
    free = "cuMemFree_v2" (u64);
    host_allocate = "cuMemHostAlloc" (*mut Raw, usize, c_uint);
    host_free = "cuMemFreeHost" (Raw);
    host_register = "cuMemHostRegister_v2" (Raw, usize, c_uint);
    host_unregister = "cuMemHostUnregister" (Raw);
    copy_in = "cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, Raw);
    copy_out = "cuMemcpyDtoHAsync_v2" (Raw, u64, usize, Raw);
    copy_within = "cuMemcpyDtoDAsync_v2" (u64, u64, usize, Raw);
    fill = "cuMemsetD8Async" (u64, u8, usize, Raw);
    stream_create = "cuStreamCreateWithPriority" (*mut Raw, c_uint, c_int);
    stream_destroy = "cuStreamDestroy_v2" (Raw);
    stream_query = "cuStreamQuery" (Raw);
    stream_wait = "cuStreamWaitEvent" (Raw, Raw, c_uint);
    event_create = "cuEventCreate" (*mut Raw, c_uint);
    event_destroy = "cuEventDestroy_v2" (Raw);
    event_record = "cuEventRecord" (Raw, Raw);
    event_query = "cuEventQuery" (Raw);
    event_elapsed = "cuEventElapsedTime" (*mut f32, Raw, Raw);
    module_load = "cuModuleLoadDataEx" (
        *mut Raw, *const c_void, c_uint, *const c_int, *const *mut c_void
    );
    module_unload = "cuModuleUnload" (Raw);
    module_function = "cuModuleGetFunction" (*mut Raw, Raw, *const c_char);
    function_attribute = "cuFuncGetAttribute" (*mut c_int, c_int, Raw);
    set_function_attribute = "cuFuncSetAttribute" (Raw, c_int, c_int);
    launch = "cuLaunchKernel" (
        Raw, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Raw, *const Raw, *const Raw
    );
    graph_create = "cuGraphCreate" (*mut Raw, c_uint);
    graph_destroy = "cuGraphDestroy" (Raw);
    graph_kernel = "cuGraphAddKernelNode_v2" (
        *mut Raw, Raw, *const Raw, usize, *const KernelNode
    );
    graph_instantiate = "cuGraphInstantiateWithFlags" (*mut Raw, Raw, u64);
    graph_launch = "cuGraphLaunch" (Raw, Raw);
    graph_exec_destroy = "cuGraphExecDestroy" (Raw);
    error_name = "cuGetErrorName" (c_int, *mut *const c_char);
    error_text = "cuGetErrorString" (c_int, *mut *const c_char);
}

/// CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h.
#[repr(C)]
struct KernelNode {
    function: Raw,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    arguments: *const Raw,
    extra: *const Raw,
    /// What the function is of, if it is none of a module.
    kernel: Raw,
    /// The current context, if it is null.
    context: Raw,
}

/// A driver that is loaded and initialised.
pub struct Driver {
    functions: Functions,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}

// --- loading, errors ---

impl Driver {
    /// Whether the environment names a library in the place of the system's.
    pub(crate) fn is_named() -> bool {
        std::env::var_os(VARIABLE).is_some_and(|name| !name.is_empty())
    }

    /// Loads the driver: the library given, else the one that `LIGHTERAGE_CUDA` names, else
    /// `libcuda.so.1`.
    ///
    /// # Errors
    /// There is no such library, it is no driver, or it finds no device.
    pub fn open(library: Option<&Path>) -> Result<Driver, DriverError> {
        let named = || std::env::var_os(VARIABLE).filter(|name| !name.is_empty());
        let path = match library {
            Some(path) => path.to_path_buf(),
            None => named().map_or_else(|| PathBuf::from(LIBRARY), PathBuf::from),
        };
        let functions = Functions::find(&path)?;
        let driver = Driver { functions };
        // SAFETY: it has no precondition.
        driver.said("cuInit", unsafe { (driver.functions.init)(0) })?;
        Ok(driver)
    }

    fn said(&self, call: &'static str, status: c_int) -> Result<(), DriverError> {
        let status = Status(status);
        if status == Status::SUCCESS {
            return Ok(());
        }
        let Functions {
            error_name,
            error_text,
            ..
        } = self.functions;
        Err(DriverError::Call {
            call,
            status,
            name: words(error_name, status).unwrap_or_else(|| "a status without a name".into()),
            text: words(error_text, status).unwrap_or_else(|| "not known to this driver".into()),
        })
    }

    /// A call that gives something.
    fn given<T>(
        &self,
        call: &'static str,
        mut to: T,
        does: impl FnOnce(*mut T) -> c_int,
    ) -> Result<T, DriverError> {
        self.said(call, does(&raw mut to))?;
        Ok(to)
    }
    /// A call that gives a handle.
    fn handle(
        &self,
        call: &'static str,
        does: impl FnOnce(*mut Raw) -> c_int,
    ) -> Result<Handle, DriverError> {
        self.given(call, ptr::null_mut(), does).map(Handle)
    }
}

/// A text that the driver has for a status.
fn words(
    of: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
    status: Status,
) -> Option<String> {
    let mut text: *const c_char = ptr::null();
    // SAFETY: the out is valid for the call.
    let found = unsafe { of(status.0, &raw mut text) };
    if found != 0 || text.is_null() {
        return None;
    }
    // SAFETY: a text, if there is one, is a constant of the driver, which is still loaded.
    let text = unsafe { CStr::from_ptr(text) };
    Some(text.to_string_lossy().into_owned())
}

// --- devices and contexts ---

impl Driver {
    /// The newest version of CUDA that it serves: 12020 is 12.2.
    pub fn version(&self) -> Result<c_int, DriverError> {
        // SAFETY: the out is valid for the call.
        self.given("cuDriverGetVersion", 0, |to| unsafe {
            (self.functions.version)(to)
        })
    }
    pub(super) fn device_count(&self) -> Result<c_int, DriverError> {
        // SAFETY: the out is valid for the call.
        self.given("cuDeviceGetCount", 0, |to| unsafe {
            (self.functions.device_count)(to)
        })
    }
    /// All bytes of its memory.
    pub(super) fn device_bytes(&self, device: c_int) -> Result<u64, DriverError> {
        // SAFETY: the out is valid for the call.
        let bytes = self.given("cuDeviceTotalMem", 0, |to| unsafe {
            (self.functions.device_bytes)(to, device)
        })?;
        Ok(bytes as u64)
    }
    pub(super) fn device(&self, number: c_int) -> Result<c_int, DriverError> {
        // SAFETY: the out is valid for the call.
        self.given("cuDeviceGet", 0, |to| unsafe {
            (self.functions.device_get)(to, number)
        })
    }
    pub(super) fn device_name(&self, device: c_int) -> Result<String, DriverError> {
        let mut name: [c_char; 128] = [0; 128];
        // SAFETY: the out has the room that is told; the driver ends the text with a zero.
        let said =
            unsafe { (self.functions.device_name)(name.as_mut_ptr(), name.len() as c_int, device) };
        self.said("cuDeviceGetName", said)?;
        let bytes = name.map(|c| c as u8);
        let text = CStr::from_bytes_until_nul(&bytes);
        Ok(text.map_or_else(|_| "?".into(), |text| text.to_string_lossy().into_owned()))
    }
    pub(super) fn attribute(
        &self,
        device: c_int,
        attribute: Attribute,
    ) -> Result<c_int, DriverError> {
        // SAFETY: the out is valid for the call.
        self.given("cuDeviceGetAttribute", 0, |to| unsafe {
            (self.functions.device_attribute)(to, attribute as c_int, device)
        })
    }
    /// The device's primary context, which it has as long as it is retained.
    pub(super) fn retain(&self, device: c_int) -> Result<Handle, DriverError> {
        // SAFETY: plain numbers.
        let said = unsafe { (self.functions.context_flags)(device, SCHEDULE_SPIN) };
        // Another library of the process may have made the context, as PyTorch does.
        if Status(said) != Status::CONTEXT_IS_ACTIVE {
            self.said("cuDevicePrimaryCtxSetFlags", said)?;
        }
        // SAFETY: the out is valid for the call.
        self.handle("cuDevicePrimaryCtxRetain", |to| unsafe {
            (self.functions.context_retain)(to, device)
        })
    }
    /// Gives the primary context back; nothing of it is used from now on.
    pub(super) fn release(&self, device: c_int) -> Result<(), DriverError> {
        // SAFETY: plain numbers; no context at all is current afterwards.
        let said = unsafe { (self.functions.set_current)(ptr::null_mut()) };
        self.said("cuCtxSetCurrent", said)?;
        // SAFETY: the context was retained once; the owner of the last handle releases it.
        let said = unsafe { (self.functions.context_release)(device) };
        self.said("cuDevicePrimaryCtxRelease", said)
    }
    /// The calling thread's calls are for this context.
    pub(super) fn bind(&self, context: Handle) -> Result<(), DriverError> {
        // SAFETY: a handle lives as long as its owner.
        let said = unsafe { (self.functions.set_current)(context.0) };
        self.said("cuCtxSetCurrent", said)
    }
    /// Returns when the context has nothing more to do.
    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: it has no arguments.
        self.said("cuCtxSynchronize", unsafe {
            (self.functions.synchronize)()
        })
    }
    /// Bytes of device memory that are free, and all of them.
    pub(super) fn memory_info(&self) -> Result<(u64, u64), DriverError> {
        let mut total = 0;
        // SAFETY: the outs are valid for the call.
        let free = self.given("cuMemGetInfo", 0, |to| unsafe {
            (self.functions.memory_info)(to, &raw mut total)
        })?;
        Ok((free as u64, total as u64))
    }
}

// --- memory ---

/// CU_POINTER_ATTRIBUTE_MEMORY_TYPE of cuda.h, and its value for memory of the host.
const MEMORY_TYPE: c_int = 2;
const HOST_MEMORY: c_uint = 1;

impl Driver {
    /// Whether an address, which the driver knows, is one of the host's memory.
    pub(super) fn is_of_host(&self, address: u64) -> Result<bool, DriverError> {
        // SAFETY: the out is valid for the call, and has the type of the attribute.
        let kind: c_uint = self.given("cuPointerGetAttribute", 0, |to| unsafe {
            (self.functions.pointer_attribute)(to.cast(), MEMORY_TYPE, address)
        })?;
        Ok(kind == HOST_MEMORY)
    }
    pub(super) fn allocate(&self, bytes: usize) -> Result<u64, DriverError> {
        // SAFETY: the out is valid for the call.
        self.given("cuMemAlloc", 0, |to| unsafe {
            (self.functions.allocate)(to, bytes)
        })
    }
    /// Frees what [`Driver::allocate`] gave; the driver waits for work on it.
    pub(super) fn free(&self, address: u64) -> Result<(), DriverError> {
        // SAFETY: a wrong address of the device is an error and no harm to the host's memory.
        self.said("cuMemFree", unsafe { (self.functions.free)(address) })
    }
    /// Host memory that is pinned.
    pub(super) fn host_allocate(&self, bytes: usize) -> Result<*mut u8, DriverError> {
        // SAFETY: the out is valid for the call.
        let given = self.given("cuMemHostAlloc", ptr::null_mut(), |to| unsafe {
            (self.functions.host_allocate)(to, bytes, PORTABLE)
        });
        given.map(<*mut c_void>::cast)
    }
    /// # Safety
    /// The address is one that [`Driver::host_allocate`] gave, and nothing uses the memory.
    pub(super) unsafe fn host_free(&self, address: *mut u8) -> Result<(), DriverError> {
        // SAFETY: by this function's contract.
        let said = unsafe { (self.functions.host_free)(address.cast()) };
        self.said("cuMemFreeHost", said)
    }

    /// Pins memory of the program.
    ///
    /// # Safety
    /// The bytes are one allocation's, or a part of it, until [`Driver::host_unregister`].
    pub(super) unsafe fn host_register(
        &self,
        address: *mut u8,
        bytes: usize,
    ) -> Result<(), DriverError> {
        // SAFETY: by this function's contract.
        let said = unsafe { (self.functions.host_register)(address.cast(), bytes, PORTABLE) };
        self.said("cuMemHostRegister", said)
    }
    /// Undoes [`Driver::host_register`] of the same address.
    pub(super) fn host_unregister(&self, address: *mut u8) -> Result<(), DriverError> {
        // SAFETY: what is not registered is an error and no harm.
        let said = unsafe { (self.functions.host_unregister)(address.cast()) };
        self.said("cuMemHostUnregister", said)
    }

    /// Copies bytes to the device when the stream gets there.
    ///
    /// # Safety
    /// The bytes on the host can be read, and nothing writes them, until the copy has run.
    pub(super) unsafe fn copy_in(
        &self,
        to: u64,
        from: *const u8,
        bytes: usize,
        stream: Handle,
    ) -> Result<(), DriverError> {
        // SAFETY: by this function's contract; handles live as long as their owners.
        let said = unsafe { (self.functions.copy_in)(to, from.cast(), bytes, stream.0) };
        self.said("cuMemcpyHtoDAsync", said)
    }
    /// Copies bytes from the device when the stream gets there.
    ///
    /// # Safety
    /// The bytes on the host can be written, and nothing else touches them, until the copy has run.
    pub(super) unsafe fn copy_out(
        &self,
        to: *mut u8,
        from: u64,
        bytes: usize,
        stream: Handle,
    ) -> Result<(), DriverError> {
        // SAFETY: by this function's contract; handles live as long as their owners.
        let said = unsafe { (self.functions.copy_out)(to.cast(), from, bytes, stream.0) };
        self.said("cuMemcpyDtoHAsync", said)
    }
    /// Copies bytes on the device when the stream gets there.
    pub(super) fn copy_within(
        &self,
        to: u64,
        from: u64,
        bytes: usize,
        stream: Handle,
    ) -> Result<(), DriverError> {
        // SAFETY: the host's memory is not touched; handles live as long as their owners.
        let said = unsafe { (self.functions.copy_within)(to, from, bytes, stream.0) };
        self.said("cuMemcpyDtoDAsync", said)
    }
    /// Sets bytes on the device when the stream gets there.
    pub(super) fn fill(
        &self,
        at: u64,
        byte: u8,
        bytes: usize,
        stream: Handle,
    ) -> Result<(), DriverError> {
        // SAFETY: the host's memory is not touched; handles live as long as their owners.
        let said = unsafe { (self.functions.fill)(at, byte, bytes, stream.0) };
        self.said("cuMemsetD8Async", said)
    }
}

// --- streams and events ---

impl Driver {
    /// A lower number is a higher priority; 0 is the usual one.
    pub(super) fn stream_create(&self, priority: c_int) -> Result<Handle, DriverError> {
        // SAFETY: the out is valid for the call.
        self.handle("cuStreamCreateWithPriority", |to| unsafe {
            (self.functions.stream_create)(to, NON_BLOCKING, priority)
        })
    }
    pub(super) fn stream_destroy(&self, stream: Handle) -> Result<(), DriverError> {
        // SAFETY: its owner calls, once.
        let said = unsafe { (self.functions.stream_destroy)(stream.0) };
        self.said("cuStreamDestroy", said)
    }
    /// Whether all commands of a stream so far are done.
    pub(super) fn stream_query(&self, stream: Handle) -> Result<bool, DriverError> {
        // SAFETY: handles live as long as their owners.
        let said = unsafe { (self.functions.stream_query)(stream.0) };
        self.ready("cuStreamQuery", said)
    }
    /// What a query returned.
    fn ready(&self, call: &'static str, status: c_int) -> Result<bool, DriverError> {
        match Status(status) {
            Status::NOT_READY => Ok(false),
            _ => self.said(call, status).map(|()| true),
        }
    }
    pub(super) fn stream_wait(&self, stream: Handle, event: Handle) -> Result<(), DriverError> {
        // SAFETY: handles live as long as their owners.
        let said = unsafe { (self.functions.stream_wait)(stream.0, event.0, 0) };
        self.said("cuStreamWaitEvent", said)
    }
    /// An event, which has a time if it is `timed`.
    pub(super) fn event_create(&self, timed: bool) -> Result<Handle, DriverError> {
        let flags = if timed { 0 } else { NO_TIMING };
        // SAFETY: the out is valid for the call.
        self.handle("cuEventCreate", |to| unsafe {
            (self.functions.event_create)(to, flags)
        })
    }
    /// Milliseconds between two timed events that are reached.
    pub(super) fn event_elapsed(&self, from: Handle, to: Handle) -> Result<f32, DriverError> {
        // SAFETY: the out is valid for the call; handles live as long as their owners.
        self.given("cuEventElapsedTime", 0.0, |milliseconds| unsafe {
            (self.functions.event_elapsed)(milliseconds, from.0, to.0)
        })
    }
    pub(super) fn event_destroy(&self, event: Handle) -> Result<(), DriverError> {
        // SAFETY: its owner calls, once; the driver keeps it until its waiters have gone on.
        let said = unsafe { (self.functions.event_destroy)(event.0) };
        self.said("cuEventDestroy", said)
    }
    pub(super) fn event_record(&self, event: Handle, stream: Handle) -> Result<(), DriverError> {
        // SAFETY: handles live as long as their owners.
        let said = unsafe { (self.functions.event_record)(event.0, stream.0) };
        self.said("cuEventRecord", said)
    }
    /// Whether the last record of an event is reached.
    pub(super) fn event_query(&self, event: Handle) -> Result<bool, DriverError> {
        // SAFETY: handles live as long as their owners.
        let said = unsafe { (self.functions.event_query)(event.0) };
        self.ready("cuEventQuery", said)
    }
}

// --- graphs ---

impl Driver {
    pub(super) fn graph_create(&self) -> Result<Handle, DriverError> {
        // SAFETY: the out is valid for the call.
        self.handle("cuGraphCreate", |to| unsafe {
            (self.functions.graph_create)(to, 0)
        })
    }
    pub(super) fn graph_destroy(&self, graph: Handle) -> Result<(), DriverError> {
        // SAFETY: its owner calls, once.
        let said = unsafe { (self.functions.graph_destroy)(graph.0) };
        self.said("cuGraphDestroy", said)
    }
    /// Adds a kernel to a graph, after another node of it.
    pub(super) fn graph_kernel(
        &self,
        graph: Handle,
        after: Option<Handle>,
        function: Handle,
        grid: Grid,
        arguments: &Arguments,
    ) -> Result<Handle, DriverError> {
        let node = KernelNode {
            function: function.0,
            grid: [grid.blocks, 1, 1],
            block: [grid.threads, 1, 1],
            shared_bytes: grid.shared_bytes,
            arguments: arguments.pointers.as_ptr(),
            extra: ptr::null(),
            kernel: ptr::null_mut(),
            context: ptr::null_mut(),
        };
        let before: Vec<Raw> = after.into_iter().map(|handle| handle.0).collect();
        // SAFETY: the out, the list with its length and the node are valid for the call, which
        // copies the arguments, as many as the kernel has; handles live as long as their owners.
        self.handle("cuGraphAddKernelNode", |to| unsafe {
            let add = self.functions.graph_kernel;
            add(to, graph.0, before.as_ptr(), before.len(), &raw const node)
        })
    }
    /// A graph that can be launched; later changes of the graph do not change it.
    pub(super) fn graph_instantiate(&self, graph: Handle) -> Result<Handle, DriverError> {
        // SAFETY: the out is valid for the call; handles live as long as their owners.
        self.handle("cuGraphInstantiate", |to| unsafe {
            (self.functions.graph_instantiate)(to, graph.0, 0)
        })
    }
    pub(super) fn graph_exec_destroy(&self, graph: Handle) -> Result<(), DriverError> {
        // SAFETY: its owner calls, once.
        let said = unsafe { (self.functions.graph_exec_destroy)(graph.0) };
        self.said("cuGraphExecDestroy", said)
    }
    /// Starts all kernels of a graph when the stream gets there.
    pub(super) fn graph_launch(&self, graph: Handle, stream: Handle) -> Result<(), DriverError> {
        // SAFETY: handles live as long as their owners.
        let said = unsafe { (self.functions.graph_launch)(graph.0, stream.0) };
        self.said("cuGraphLaunch", said)
    }
}

// --- modules and launches ---

/// Bytes of the compiler's messages that are kept.
const LOG_BYTES: usize = 4096;

impl Driver {
    /// Compiles PTX; on an error also what the driver's compiler says.
    pub(super) fn module_load(&self, ptx: &CStr) -> Result<Handle, (DriverError, String)> {
        let mut log = [0_u8; LOG_BYTES];
        let options = [JIT_ERROR_LOG, JIT_ERROR_LOG_BYTES];
        // Numbers are passed in the place of pointers.
        let room = ptr::without_provenance_mut(LOG_BYTES);
        let values: [Raw; 2] = [log.as_mut_ptr().cast(), room];
        // SAFETY: the text ends with a zero; there are two options, whose values are what cuda.h
        // says: a buffer, which is valid for the call, and its size.
        let loaded = self.handle("cuModuleLoadDataEx", |to| unsafe {
            let (options, values) = (options.as_ptr(), values.as_ptr());
            (self.functions.module_load)(to, ptx.as_ptr().cast(), 2, options, values)
        });
        loaded.map_err(|error| {
            let said = log.split(|&byte| byte == 0).next().unwrap_or(&[]);
            (error, String::from_utf8_lossy(said).trim().to_string())
        })
    }
    pub(super) fn module_unload(&self, module: Handle) -> Result<(), DriverError> {
        // SAFETY: its owner calls, once, when no function of it can be launched any more.
        let said = unsafe { (self.functions.module_unload)(module.0) };
        self.said("cuModuleUnload", said)
    }
    /// A function of a module, which lives as long as the module.
    pub(super) fn module_function(
        &self,
        module: Handle,
        name: &CString,
    ) -> Result<Handle, DriverError> {
        // SAFETY: the out is valid for the call, the name ends with a zero.
        self.handle("cuModuleGetFunction", |to| unsafe {
            (self.functions.module_function)(to, module.0, name.as_ptr())
        })
    }
    /// The most threads that a block of the function may have, for its registers.
    pub(super) fn most_threads(&self, function: Handle) -> Result<c_int, DriverError> {
        // SAFETY: the out is valid for the call; a function lives as long as its module.
        self.given("cuFuncGetAttribute", 0, |to| unsafe {
            (self.functions.function_attribute)(to, MAX_THREADS_OF_FUNCTION, function.0)
        })
    }
    /// Lets launches of the function have dynamic shared memory of this many bytes.
    pub(super) fn permit_shared(&self, function: Handle, bytes: c_int) -> Result<(), DriverError> {
        let set = self.functions.set_function_attribute;
        // SAFETY: a function lives as long as its module.
        let said = unsafe { set(function.0, MAX_DYNAMIC_SHARED, bytes) };
        self.said("cuFuncSetAttribute", said)
    }
    /// Starts a kernel when the stream gets there.
    ///
    /// That the kernel takes these arguments and touches no bytes but those of its tensors is its
    /// compiler's promise, as for generated kernels on the host ([`crate::code`]).
    pub(super) fn launch(
        &self,
        function: Handle,
        grid: Grid,
        arguments: &Arguments,
        stream: Handle,
    ) -> Result<(), DriverError> {
        let Grid {
            blocks,
            threads,
            shared_bytes,
        } = grid;
        // SAFETY: handles live as long as their owners; the driver reads the arguments before it
        // returns, as many as the kernel has, which its compiler promises to be these.
        let said = unsafe {
            (self.functions.launch)(
                function.0,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                shared_bytes,
                stream.0,
                arguments.pointers.as_ptr(),
                ptr::null(),
            )
        };
        self.said("cuLaunchKernel", said)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_says_that_the_process_must_end_is_fatal() {
        let fatal = [
            4, 203, 214, 220, 226, 700, 702, 710, 714, 716, 717, 718, 719, 999, 12_345,
        ];
        for status in fatal {
            assert!(Status(status).is_fatal(), "{status}");
        }
        for status in [1, 2, 100, 201, 218, 222, 400, 500, 600, 701, 712, 801] {
            assert!(!Status(status).is_fatal(), "{status}");
        }
    }

    #[test]
    fn a_missing_library_and_one_that_is_no_driver_are_named() {
        let missing = Path::new("/nowhere/libcuda.so.1");
        let error = Driver::open(Some(missing)).unwrap_err().to_string();
        assert!(error.starts_with("/nowhere/libcuda.so.1: "), "{error}");
        // A library that every system with libloading has, and that is no driver.
        if let Err(error) = Driver::open(Some(Path::new("libc.so.6"))) {
            let error = error.to_string();
            assert!(error.contains("libc.so.6"), "{error}");
        } else {
            panic!("libc should be no driver");
        }
    }
}
