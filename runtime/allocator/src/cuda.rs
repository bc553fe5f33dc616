//! A GPU's memory, through its driver, which is loaded when the program runs.
//!
//! It uses the driver's interface and not the CUDA runtime's: the driver's library has one name in
//! every version, and it takes the same streams. All calls are made in the device's primary
//! context, which PyTorch uses too.

#![allow(unsafe_code, reason = "the driver is a C library")]

use crate::pool::{Event, Pool, PoolError};
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;

type Status = c_int;
type Handle = *mut c_void;

/// An event without time stamps (`CU_EVENT_DISABLE_TIMING`): cheaper to record.
const NO_TIMING: c_uint = 2;

/// Declares the driver's functions and how they are loaded.
macro_rules! driver {
    ($($name:ident = $symbol:literal ($($arg:ty),*);)*) => {
        struct Driver {
            $($name: unsafe extern "C" fn($($arg),*) -> Status,)*
            // The library with the functions.
            _library: Library,
        }

        impl Driver {
            fn load(path: &str) -> Result<Driver, libloading::Error> {
                // SAFETY: initialising NVIDIA's driver library has no precondition; only the user
                // can name another one.
                let library = unsafe { Library::new(path)? };
                $(
                    // SAFETY: the type is the one in cuda.h for this symbol.
                    let $name = unsafe {
                        *library.get::<unsafe extern "C" fn($($arg),*) -> Status>($symbol)?
                    };
                )*
                Ok(Driver { $($name,)* _library: library })
            }
        }
    };
}

driver! {
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

/// One GPU.
pub struct Cuda {
    driver: Driver,
    context: Handle,
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
        let driver = Driver::load(path).map_err(|source| PoolError::Library {
            library: path.to_string(),
            source,
        })?;
        let mut cuda = Cuda {
            driver,
            context: ptr::null_mut(),
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
        cuda.context = context;
        Ok(cuda)
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
