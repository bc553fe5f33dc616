//! The stand-in as a library next to a test program, for tests without unsafe code.

#![allow(unsafe_code, reason = "the library is loaded when a test runs")]

use crate::facts::Facts;
use crate::options::Options;
use libloading::Library;
use std::io;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// A loaded copy of the library. Each copy has its own device, so tests do not affect each other.
#[derive(Debug)]
pub struct Standin {
    /// `None` once it is dropped.
    copy: Option<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    /// Never unloaded: a thread that called it runs its code when the thread ends.
    library: ManuallyDrop<Library>,
    path: PathBuf,
}

/// Copies that nobody uses. A process has keys for the threads' data of at most 1,024 copies, and
/// tests take more, so they are used again.
static IDLE: Mutex<Vec<Loaded>> = Mutex::new(vec![]);

impl Standin {
    /// A copy of the library that nobody uses, after a reset.
    ///
    /// # Errors
    /// The library cannot be found, copied or loaded.
    pub fn new(options: &Options) -> io::Result<Standin> {
        let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let copy = match idle {
            Some(copy) => copy,
            None => Loaded::new()?,
        };
        let standin = Standin { copy: Some(copy) };
        standin.reset(options);
        Ok(standin)
    }

    fn copy(&self) -> &Loaded {
        self.copy.as_ref().expect("it is not dropped")
    }

    /// The path of the copy, by which a program loads its driver.
    pub fn path(&self) -> &Path {
        &self.copy().path
    }

    /// Resets everything: no memory, no streams, no findings, no calls.
    pub fn reset(&self, options: &Options) {
        type Reset = unsafe extern "C" fn(*const Options);
        // SAFETY: the type is the one in api.rs, and the reference is valid for the call.
        unsafe {
            self.symbol::<Reset>("standin_reset")(options);
        }
    }

    /// The counts so far.
    pub fn facts(&self) -> Facts {
        type Ask = unsafe extern "C" fn(*mut Facts);
        let mut facts = Facts::default();
        // SAFETY: the type is the one in api.rs, and the reference is valid for the call.
        unsafe {
            self.symbol::<Ask>("standin_facts")(&raw mut facts);
        }
        facts
    }

    /// Calls of one function so far, by its name in cuda.h with its version: `cuMemAlloc_v2`.
    pub fn calls_of(&self, name: &str) -> u64 {
        type Ask = unsafe extern "C" fn(*const u8, usize) -> u64;
        // SAFETY: the type is the one in api.rs, and the text is valid for the call.
        unsafe { self.symbol::<Ask>("standin_calls_of")(name.as_ptr(), name.len()) }
    }

    /// Addresses and sizes of the host memory that the program registered, by rising addresses.
    pub fn registered(&self) -> Vec<[u64; 2]> {
        type Ask = unsafe extern "C" fn(*mut [u64; 2], usize) -> usize;
        let mut ranges = vec![[0; 2]; 1 << 10];
        // SAFETY: the type is the one in api.rs; the room is the vector's.
        let n =
            unsafe { self.symbol::<Ask>("standin_registered")(ranges.as_mut_ptr(), ranges.len()) };
        ranges.truncate(n);
        ranges
    }

    /// The findings.
    pub fn findings(&self) -> Vec<String> {
        type Findings = unsafe extern "C" fn(*mut u8, usize) -> usize;
        let mut text = vec![0; 1 << 16];
        // SAFETY: the type is the one in api.rs; the room is the vector's.
        let n =
            unsafe { self.symbol::<Findings>("standin_findings")(text.as_mut_ptr(), text.len()) };
        text.truncate(n);
        let text = String::from_utf8_lossy(&text);
        text.lines().map(str::to_string).collect()
    }

    /// The calling thread is about to read or write bytes of the host, from an address on, that the
    /// device copies.
    pub fn host_access(&self, address: u64, bytes: u64, write: bool) {
        type Access = extern "C" fn(u64, u64, u32);
        let access = "standin_host_access";
        // SAFETY: the type is the one in api.rs.
        unsafe {
            self.symbol::<Access>(access)(address, bytes, write.into());
        }
    }

    /// The calling thread publishes its clock under a number.
    pub fn publish(&self, signal: u64) {
        // SAFETY: the type is the one in api.rs.
        unsafe { self.symbol::<extern "C" fn(u64)>("standin_publish")(signal) }
    }

    /// The calling thread takes the clock published under a number.
    pub fn acquire(&self, signal: u64) {
        // SAFETY: the type is the one in api.rs.
        unsafe { self.symbol::<extern "C" fn(u64)>("standin_acquire")(signal) }
    }

    /// A function of the library.
    ///
    /// # Safety
    /// `T` is the function's type.
    unsafe fn symbol<T: Copy>(&self, name: &str) -> T {
        // SAFETY: by this function's contract.
        let symbol = unsafe { self.copy().library.get::<T>(name.as_bytes()) };
        *symbol.expect("the library should have its own functions")
    }
}

impl Loaded {
    /// Copies the library, which cargo builds next to the test programs, and loads the copy.
    fn new() -> io::Result<Loaded> {
        static COPIES: AtomicU64 = AtomicU64::new(0);
        let program = std::env::current_exe()?;
        let folder = program.parent().unwrap_or(Path::new("."));
        let built = folder.join("liblighterage_standin.so");
        let number = COPIES.fetch_add(1, Ordering::Relaxed);
        let name = format!("standin-{}-{number}.so", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::copy(&built, &path)
            .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", built.display())))?;
        // SAFETY: the library is this crate, whose initialisation does nothing.
        let library = unsafe { Library::new(&path) }.map_err(io::Error::other)?;
        let library = ManuallyDrop::new(library);
        Ok(Loaded { library, path })
    }
}

impl Drop for Standin {
    /// The copy's file stays: a few in the folder for temporary files do no harm.
    fn drop(&mut self) {
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        idle.extend(self.copy.take());
    }
}
