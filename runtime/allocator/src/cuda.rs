//! A GPU's memory, through its driver, which is loaded when the program runs.
//!
//! It uses the driver's interface and not the CUDA runtime's: the driver's library has one name in
//! every version, and it takes the same streams. All calls are made in the device's primary
//! context, which PyTorch uses too.

#![allow(unsafe_code, reason = "the driver is a C library")]

use crate::pool::{Event, Pool, PoolError, Range};
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;

type Status = c_int;
type Handle = *mut c_void;

/// An event without time stamps (`CU_EVENT_DISABLE_TIMING`): cheaper to record.
const NO_TIMING: c_uint = 2;

/// The attribute of a device that can map memory.
const MAPS: c_int = 102;
/// Ordinary memory of a device (`CU_MEM_ALLOCATION_TYPE_PINNED`).
const ORDINARY: c_int = 1;
/// A place on a device (`CU_MEM_LOCATION_TYPE_DEVICE`).
const ON_DEVICE: c_int = 1;
const READ_AND_WRITE: c_int = 3;

/// `CUmemLocation`.
#[repr(C)]
struct Location {
    kind: c_int,
    device: c_int,
}

/// `CUmemAllocationProp`. What this crate does not use is 0.
#[repr(C)]
struct Kind {
    kind: c_int,
    exported: c_int,
    location: Location,
    security: Handle,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct Access {
    location: Location,
    flags: c_int,
}

/// Declares functions of the driver and how they are loaded.
macro_rules! functions {
    ($all:ident; $($name:ident = $symbol:literal ($($arg:ty),*);)*) => {
        struct $all {
            $($name: unsafe extern "C" fn($($arg),*) -> Status,)*
        }

        impl $all {
            fn load(library: &Library) -> Result<$all, libloading::Error> {
                $(
                    // SAFETY: the type is the one in cuda.h for this symbol.
                    let $name = unsafe {
                        *library.get::<unsafe extern "C" fn($($arg),*) -> Status>($symbol)?
                    };
                )*
                Ok($all { $($name,)* })
            }
        }
    };
}

functions! {
    Driver;
    init = b"cuInit\0" (c_uint);
    device_get = b"cuDeviceGet\0" (*mut c_int, c_int);
    retain = b"cuDevicePrimaryCtxRetain\0" (*mut Handle, c_int);
    push = b"cuCtxPushCurrent_v2\0" (Handle);
    pop = b"cuCtxPopCurrent_v2\0" (*mut Handle);
    synchronize = b"cuCtxSynchronize\0" ();
    allocate = b"cuMemAlloc_v2\0" (*mut u64, usize);
    free = b"cuMemFree_v2\0" (u64);
    event_create = b"cuEventCreate\0" (*mut Handle, c_uint);
    event_record = b"cuEventRecord\0" (Handle, Handle);
    event_query = b"cuEventQuery\0" (Handle);
    event_destroy = b"cuEventDestroy_v2\0" (Handle);
    stream_wait = b"cuStreamWaitEvent\0" (Handle, Handle, c_uint);
    error_name = b"cuGetErrorName\0" (Status, *mut *const c_char);
}

functions! {
    Mapping;
    attribute = b"cuDeviceGetAttribute\0" (*mut c_int, c_int, c_int);
    total = b"cuDeviceTotalMem_v2\0" (*mut usize, c_int);
    granularity = b"cuMemGetAllocationGranularity\0" (*mut usize, *const Kind, c_int);
    reserve = b"cuMemAddressReserve\0" (*mut u64, usize, usize, u64, u64);
    create = b"cuMemCreate\0" (*mut u64, usize, *const Kind, u64);
    map = b"cuMemMap\0" (u64, usize, usize, u64, u64);
    access = b"cuMemSetAccess\0" (u64, usize, *const Access, usize);
    unmap = b"cuMemUnmap\0" (u64, usize);
    release = b"cuMemRelease\0" (u64);
}

/// One GPU.
pub struct Cuda {
    driver: Driver,
    /// The functions that map memory, which old drivers lack.
    mapping: Option<Mapping>,
    context: Handle,
    device: c_int,
    // The library with the functions.
    _library: Library,
}

// SAFETY: the context is a handle of the driver, which any thread may use; nothing points into
// Rust's memory.
unsafe impl Send for Cuda {}

impl Cuda {
    /// The GPU with this number, by `libcuda.so.1` or the named library.
    ///
    /// # Errors
    /// There is no such library or device, or the driver refuses.
    pub fn new(device: i32, library: Option<&str>) -> Result<Cuda, PoolError> {
        let path = library.unwrap_or("libcuda.so.1");
        let missing = |source| PoolError::Library {
            library: path.to_string(),
            source,
        };
        // SAFETY: initialising NVIDIA's driver library has no precondition; only the user can name
        // another one.
        let library = unsafe { Library::new(path) }.map_err(missing)?;
        let mut cuda = Cuda {
            driver: Driver::load(&library).map_err(missing)?,
            mapping: Mapping::load(&library).ok(),
            context: ptr::null_mut(),
            device: 0,
            _library: library,
        };
        let (mut number, mut context) = (0, ptr::null_mut());
        // SAFETY: outs are valid for the call; `init` comes first.
        unsafe {
            cuda.said("cuInit", (cuda.driver.init)(0))?;
            cuda.said(
                "cuDeviceGet",
                (cuda.driver.device_get)(&raw mut number, device),
            )?;
            cuda.said(
                "cuDevicePrimaryCtxRetain",
                (cuda.driver.retain)(&raw mut context, number),
            )?;
        }
        (cuda.context, cuda.device) = (context, number);
        Ok(cuda)
    }

    /// The kind of memory that is mapped.
    fn kind(&self) -> Kind {
        Kind {
            kind: ORDINARY,
            exported: 0,
            location: Location {
                kind: ON_DEVICE,
                device: self.device,
            },
            security: ptr::null_mut(),
            flags: [0; 8],
        }
    }

    fn said(&self, call: &'static str, status: Status) -> Result<(), PoolError> {
        if status == 0 {
            return Ok(());
        }
        let mut name: *const c_char = ptr::null();
        // SAFETY: the out is valid for the call; a name, if there is one, is a constant of the
        // driver.
        let name = unsafe {
            (self.driver.error_name)(status, &raw mut name);
            if name.is_null() {
                "unknown error".to_string()
            } else {
                CStr::from_ptr(name).to_string_lossy().into_owned()
            }
        };
        Err(PoolError::Driver { call, name, status })
    }

    /// Calls the driver in the device's context; afterwards the thread has its old context.
    fn within<T>(
        &self,
        call: impl FnOnce(&Driver) -> Result<T, (&'static str, Status)>,
    ) -> Result<T, PoolError> {
        // SAFETY: the context was retained and is never released.
        self.said("cuCtxPushCurrent", unsafe {
            (self.driver.push)(self.context)
        })?;
        let result = call(&self.driver);
        let mut old = ptr::null_mut();
        // SAFETY: the out is valid for the call.
        let popped = unsafe { (self.driver.pop)(&raw mut old) };
        let result = result.map_err(|(what, status)| {
            self.said(what, status).expect_err("the status is an error")
        })?;
        self.said("cuCtxPopCurrent", popped)?;
        Ok(result)
    }
}

fn check(what: &'static str, status: Status) -> Result<(), (&'static str, Status)> {
    if status == 0 {
        Ok(())
    } else {
        Err((what, status))
    }
}

impl Pool for Cuda {
    fn allocate(&mut self, bytes: u64) -> Result<u64, PoolError> {
        let bytes = usize::try_from(bytes)?;
        let mut address = 0;
        self.within(|driver| {
            // SAFETY: the out is valid for the call.
            check("cuMemAlloc", unsafe {
                (driver.allocate)(&raw mut address, bytes)
            })
        })?;
        Ok(address)
    }

    fn free(&mut self, address: u64) {
        // SAFETY: the address came from `allocate`; the driver waits for work on it. An error comes
        // from earlier work, and later calls report it.
        let _ = self.within(|driver| check("cuMemFree", unsafe { (driver.free)(address) }));
    }

    fn reserve(&mut self, step: u64) -> Result<Range, PoolError> {
        let mapping = self.mapping.as_ref().ok_or(PoolError::NoMapping)?;
        let kind = self.kind();
        let (mut maps, mut total, mut unit, mut address) = (0, 0, 0, 0);
        let (mut bytes, mut step) = (0, usize::try_from(step)?);
        self.within(|_| {
            // SAFETY: the outs and the kind are valid for the calls.
            unsafe {
                let attribute = (mapping.attribute)(&raw mut maps, MAPS, self.device);
                check("cuDeviceGetAttribute", attribute)?;
                if maps == 0 {
                    return Ok(());
                }
                let size = (mapping.total)(&raw mut total, self.device);
                check("cuDeviceTotalMem", size)?;
                let granularity = (mapping.granularity)(&raw mut unit, &raw const kind, 0);
                check("cuMemGetAllocationGranularity", granularity)?;
                step = step.next_multiple_of(unit.max(1));
                // Twice the memory: free blocks may lie between the used ones.
                bytes = (2 * total).next_multiple_of(step);
                let reserved = (mapping.reserve)(&raw mut address, bytes, 0, 0, 0);
                check("cuMemAddressReserve", reserved)
            }
        })?;
        if maps == 0 {
            return Err(PoolError::NoMapping);
        }
        Ok(Range {
            address,
            bytes: bytes as u64,
            step: step as u64,
        })
    }

    fn map(&mut self, range: Range, address: u64, bytes: u64) -> Result<(), PoolError> {
        let mapping = self.mapping.as_ref().ok_or(PoolError::NoMapping)?;
        let (size, step) = (usize::try_from(bytes)?, usize::try_from(range.step)?);
        let kind = self.kind();
        let access = Access {
            location: self.kind().location,
            flags: READ_AND_WRITE,
        };
        let mut mapped = 0;
        let result = self.within(|_| {
            // SAFETY: the outs, the kind and the access are valid for the calls. The addresses are
            // a part of a range of `reserve`, and nothing is mapped there.
            unsafe {
                while mapped < bytes {
                    let mut memory = 0;
                    let create = (mapping.create)(&raw mut memory, step, &raw const kind, 0);
                    check("cuMemCreate", create)?;
                    let map = (mapping.map)(address + mapped, step, 0, memory, 0);
                    // Mapped memory stays until it is unmapped.
                    (mapping.release)(memory);
                    check("cuMemMap", map)?;
                    mapped += range.step;
                }
                let access = (mapping.access)(address, size, &raw const access, 1);
                check("cuMemSetAccess", access)
            }
        });
        if result.is_err() {
            self.unmap(range, address, mapped);
        }
        result
    }

    fn unmap(&mut self, range: Range, address: u64, bytes: u64) {
        let Some(mapping) = &self.mapping else {
            return;
        };
        let step = range.step as usize;
        for at in (address..address + bytes).step_by(step) {
            // SAFETY: `map` has mapped this step, and no work uses it. An error comes from earlier
            // work, and later calls report it.
            let _ = self.within(|_| check("cuMemUnmap", unsafe { (mapping.unmap)(at, step) }));
        }
    }

    fn record(&mut self, stream: u64) -> Result<Event, PoolError> {
        let mut event = ptr::null_mut();
        self.within(|driver| {
            // SAFETY: the out is valid for the call; the stream is the caller's, of this context.
            unsafe {
                check(
                    "cuEventCreate",
                    (driver.event_create)(&raw mut event, NO_TIMING),
                )?;
                let recorded = check(
                    "cuEventRecord",
                    (driver.event_record)(event, stream as Handle),
                );
                if recorded.is_err() {
                    (driver.event_destroy)(event);
                }
                recorded
            }
        })?;
        Ok(Event(event as u64))
    }

    fn done(&mut self, event: Event) -> bool {
        self.within(|driver| {
            // SAFETY: the event came from `record` and is not forgotten.
            check("cuEventQuery", unsafe {
                (driver.event_query)(event.0 as Handle)
            })
        })
        .is_ok()
    }

    fn wait(&mut self, stream: u64, event: Event) -> Result<(), PoolError> {
        // SAFETY: the event came from `record` and is not forgotten; the stream is the caller's, of
        // this context.
        let wait = |driver: &Driver| unsafe {
            (driver.stream_wait)(stream as Handle, event.0 as Handle, 0)
        };
        self.within(|driver| check("cuStreamWaitEvent", wait(driver)))
    }

    fn forget(&mut self, event: Event) {
        let _ = self.within(|driver| {
            // SAFETY: the event came from `record`; the driver keeps it until its waiters have
            // continued.
            check("cuEventDestroy", unsafe {
                (driver.event_destroy)(event.0 as Handle)
            })
        });
    }

    fn synchronize(&mut self) {
        // SAFETY: it has no arguments.
        let _ = self.within(|driver| check("cuCtxSynchronize", unsafe { (driver.synchronize)() }));
    }
}
