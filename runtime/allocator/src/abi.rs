//! The functions that PyTorch calls: `torch.cuda.memory.CUDAPluggableAllocator(path,
//! "lighterage_malloc", "lighterage_free")`.
//!
//! | variable | meaning |
//! |---|---|
//! | `LIGHTERAGE_ALLOC_MODE` | `plan`, `profile`, `cache`; default: `plan` if given, else `cache` |
//! | `LIGHTERAGE_ALLOC_PLAN` | the plan file; `%d` is the device, else it is for the first one |
//! | `LIGHTERAGE_ALLOC_TRACE` | where `profile` writes, likewise |
//! | `LIGHTERAGE_ALLOC_STATS` | where statistics go at exit, likewise; `-` is standard error |
//! | `LIGHTERAGE_ALLOC_CACHE` | how the cache gets memory: `segments` (default) or `expandable` |
//! | `LIGHTERAGE_ALLOC_POOL` | `cuda`, or `host` to try without a GPU |
//! | `LIGHTERAGE_ALLOC_CUDA` | the driver's library, if not `libcuda.so.1` |
//!
//! Failures are reported on standard error, because the C interface has no place for them. No panic
//! reaches the caller: after a panic, requests get 0.
//!
//! A process may fork while its threads use the allocator. The forking thread waits until no other
//! thread uses it, so that its state in the child is consistent. The child goes on with the blocks
//! that it has. It writes no trace and no statistics: the parent does.

#![allow(
    unsafe_code,
    reason = "C callers pass pointers, and find functions by name"
)]

use crate::{Allocator, Cuda, Host, Plan, Pool, Recorder};
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::{StderrLock, Write, stderr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError};

/// Devices that a process may have.
const DEVICES: usize = 64;

/// The server of a device.
#[allow(clippy::large_enum_variant, reason = "there is one for each device")]
enum Server {
    Allocate(Allocator),
    Record(Recorder),
}

/// A device's server; none if it could not be made, which was reported.
static SERVERS: [OnceLock<Option<Mutex<Server>>>; DEVICES] = [const { OnceLock::new() }; DEVICES];

/// True when a device uses the plan or trace without a device in its name.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// Held while a device's server is made: a child must not get an incomplete server.
static OPENING: Mutex<()> = Mutex::new(());

/// True in a process that was forked from the one that opened the first device.
static FORKED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" {
    fn atexit(call: extern "C" fn()) -> c_int;
    fn pthread_atfork(
        prepare: extern "C" fn(),
        parent: extern "C" fn(),
        child: extern "C" fn(),
    ) -> c_int;
}

/// The locks that a forking thread holds, so that no other thread holds them.
struct Held {
    _opening: MutexGuard<'static, ()>,
    servers: Vec<MutexGuard<'static, Server>>,
    _stderr: StderrLock<'static>,
}

thread_local! {
    static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
}

/// Before a fork: waits for the other threads. The buffered part of a trace is written, so that the
/// child has no copy of it.
extern "C" fn before_fork() {
    let _ = catch_unwind(|| {
        let opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
        let servers = SERVERS.iter().filter_map(|slot| slot.get()?.as_ref());
        let mut servers: Vec<_> = servers
            .map(|server| server.lock().unwrap_or_else(PoisonError::into_inner))
            .collect();
        for server in &mut servers {
            if let Server::Record(recorder) = &mut **server {
                recorder.write_out();
            }
        }
        let held = Held {
            _opening: opening,
            servers,
            _stderr: stderr().lock(),
        };
        HELD.with_borrow_mut(|slot| *slot = Some(held));
    });
}

/// After a fork, in the parent.
extern "C" fn after_fork() {
    let _ = catch_unwind(|| drop(HELD.take()));
}

/// After a fork, in the child, which has one thread: a copy of the forking thread.
extern "C" fn in_child() {
    let _ = catch_unwind(|| {
        FORKED.store(true, Ordering::Relaxed);
        if let Some(mut held) = HELD.take() {
            for server in &mut held.servers {
                if let Server::Record(recorder) = &mut **server {
                    recorder.stop_writing();
                }
            }
        }
    });
}

fn variable(name: &str) -> Option<String> {
    std::env::var(format!("LIGHTERAGE_ALLOC_{name}"))
        .ok()
        .filter(|value| !value.is_empty())
}

fn tell(message: &str) {
    // A closed or full standard error must not end the host: `eprintln!` would panic.
    let _ = writeln!(stderr(), "lighterage_alloc: {message}");
}

/// The file's name for a device; `None` if another device has it.
fn file(name: &str, device: c_int) -> Option<String> {
    match name.contains("%d") {
        true => Some(name.replace("%d", &device.to_string())),
        false => (!TAKEN.swap(true, Ordering::Relaxed)).then(|| name.to_string()),
    }
}

fn pool(device: c_int) -> Result<Box<dyn Pool>, String> {
    match variable("POOL").as_deref() {
        None | Some("cuda") => {
            let cuda = Cuda::new(device, variable("CUDA").as_deref());
            Ok(Box::new(cuda.map_err(|error| error.to_string())?))
        }
        Some("host") => Ok(Box::<Host>::default()),
        Some(other) => Err(format!(
            "LIGHTERAGE_ALLOC_POOL={other} is neither cuda nor host"
        )),
    }
}

/// A server whose cache gets memory as the user wants.
fn cached(mut allocator: Allocator, device: c_int) -> Result<Server, String> {
    match variable("CACHE").as_deref() {
        None | Some("segments") => {}
        Some("expandable") => {
            if let Err(error) = allocator.expand() {
                tell(&format!(
                    "{error}; the cache of device {device} has segments"
                ));
            }
        }
        Some(other) => {
            return Err(format!(
                "LIGHTERAGE_ALLOC_CACHE={other} is neither segments nor expandable"
            ));
        }
    }
    Ok(Server::Allocate(allocator))
}

fn open(device: c_int) -> Result<Server, String> {
    static EXIT: Once = Once::new();
    // SAFETY: the functions take nothing and never unwind.
    EXIT.call_once(|| unsafe {
        atexit(report);
        pthread_atfork(before_fork, after_fork, in_child);
    });
    let (mode, plan) = (variable("MODE"), variable("PLAN"));
    let without_plan = || cached(Allocator::caching(pool(device)?), device);
    match mode
        .as_deref()
        .unwrap_or(if plan.is_some() { "plan" } else { "cache" })
    {
        "cache" => without_plan(),
        "profile" => {
            let name = variable("TRACE")
                .ok_or("LIGHTERAGE_ALLOC_TRACE should name the file to record to")?;
            let Some(path) = file(&name, device) else {
                tell(&format!(
                    "device {device} is not recorded: another one is; put %d into \
                     LIGHTERAGE_ALLOC_TRACE for all"
                ));
                return without_plan();
            };
            let out = std::fs::File::create(&path).map_err(|error| format!("{path}: {error}"))?;
            Ok(Server::Record(Recorder::new(
                pool(device)?,
                Box::new(std::io::BufWriter::with_capacity(1 << 16, out)),
            )))
        }
        "plan" => {
            let name = plan.ok_or("LIGHTERAGE_ALLOC_PLAN should name the plan to serve")?;
            let served = file(&name, device).map(|path| {
                let text =
                    std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
                let plan = Plan::read(&text).map_err(|error| format!("{path}: {error}"))?;
                Allocator::planned(pool(device)?, plan).map_err(|error| format!("{path}: {error}"))
            });
            match served {
                Some(Ok(allocator)) => cached(allocator, device),
                Some(Err(message)) => {
                    tell(&format!(
                        "{message}; device {device} goes on without a plan"
                    ));
                    without_plan()
                }
                None => without_plan(),
            }
        }
        other => Err(format!(
            "LIGHTERAGE_ALLOC_MODE={other} is none of plan, profile, cache"
        )),
    }
}

/// Calls a function with a device's server. `None` if there is no server, or after a panic.
#[inline]
fn serve<T>(device: c_int, what: impl FnOnce(&mut Server) -> T) -> Option<T> {
    let slot = SERVERS.get(usize::try_from(device).ok()?)?;
    let make = || {
        open(device)
            .map(Mutex::new)
            .map_err(|error| tell(&error))
            .ok()
    };
    let work = || {
        let server = match slot.get() {
            Some(server) => server,
            None => {
                let _opening = OPENING.lock().unwrap_or_else(PoisonError::into_inner);
                slot.get_or_init(make)
            }
        };
        let server = server.as_ref()?;
        // A panic may have left an incomplete change: this server serves nothing any more.
        server.lock().ok().map(|mut server| what(&mut server))
    };
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        tell("this is a bug: please report it with the message above");
        None
    })
}

/// Calls a function with the server of each device that has one.
fn each(mut what: impl FnMut(c_int, &mut Server)) {
    for device in (0..DEVICES).filter(|device| matches!(SERVERS[*device].get(), Some(Some(_)))) {
        serve(device as c_int, |server| what(device as c_int, server));
    }
}

/// Memory of a device for a stream; 0 if there is none, or if 0 bytes are requested.
#[unsafe(no_mangle)]
pub extern "C" fn lighterage_malloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    let Ok(bytes) = u64::try_from(size) else {
        return std::ptr::null_mut();
    };
    let address = serve(device, |server| match server {
        Server::Allocate(allocator) => {
            let address = allocator.malloc(bytes, stream as u64);
            address.map_err(|error| error.to_string())
        }
        Server::Record(recorder) => {
            let address = recorder.malloc(bytes, stream as u64);
            address.map_err(|error| error.to_string())
        }
    });
    match address {
        Some(Ok(address)) => address as *mut c_void,
        Some(Err(message)) => {
            tell(&format!("device {device} is out of memory: {message}"));
            std::ptr::null_mut()
        }
        None => std::ptr::null_mut(),
    }
}

/// Frees what `lighterage_malloc` gave. Size and stream are the request's; the server knows them
/// already.
#[unsafe(no_mangle)]
pub extern "C" fn lighterage_free(
    address: *mut c_void,
    _size: isize,
    device: c_int,
    _stream: *mut c_void,
) {
    serve(device, |server| match server {
        Server::Allocate(allocator) => allocator.free(address as u64),
        Server::Record(recorder) => recorder.free(address as u64),
    });
}

/// Says that another stream than the block's own uses it: for PyTorch's `set_record_stream_fn`.
#[unsafe(no_mangle)]
pub extern "C" fn lighterage_record_stream(address: *mut c_void, stream: *mut c_void) {
    // Devices have different addresses.
    each(|_, server| match server {
        Server::Allocate(allocator) => allocator.record_stream(address as u64, stream as u64),
        // The driver waits before it frees.
        Server::Record(_) => {}
    });
}

/// Gives unused memory back: for PyTorch's `set_reset_fn`, behind `torch.cuda.empty_cache`.
#[unsafe(no_mangle)]
pub extern "C" fn lighterage_empty_cache() {
    each(|_, server| match server {
        Server::Allocate(allocator) => allocator.trim(),
        Server::Record(_) => {}
    });
}

/// For a recorded trace: a computation phase begins, such as `fwd.0`.
///
/// # Safety
/// `name` is a string of C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lighterage_phase(name: *const c_char) {
    // SAFETY: the caller's promise.
    let name = unsafe { string(name) };
    recorders(|recorder| recorder.phase(&name));
}

/// For a recorded trace: a module begins; `dynamic` is not 0 if sizes depend on data there, as in
/// an expert.
///
/// # Safety
/// `name` is a string of C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lighterage_enter(name: *const c_char, dynamic: c_int) {
    // SAFETY: the caller's promise.
    let name = unsafe { string(name) };
    recorders(|recorder| recorder.enter(&name, dynamic != 0));
}

/// For a recorded trace: a module ends.
///
/// # Safety
/// `name` is a string of C.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lighterage_leave(name: *const c_char) {
    // SAFETY: the caller's promise.
    let name = unsafe { string(name) };
    recorders(|recorder| {
        recorder.leave(&name);
    });
}

/// Writes a device's statistics, an object of JSON, as a string of C; cut off at `len` bytes.
/// Returns the full length in bytes, or 0 if the device has no statistics.
///
/// # Safety
/// `out` has room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lighterage_stats(device: c_int, out: *mut c_char, len: usize) -> usize {
    let open = usize::try_from(device)
        .ok()
        .and_then(|at| SERVERS.get(at)?.get())
        .is_some();
    let text = if open {
        serve(device, |server| statistics(server)).flatten()
    } else {
        None
    };
    let Some(text) = text else { return 0 };
    if let Some(room) = len.checked_sub(1) {
        let n = room.min(text.len());
        // SAFETY: `n + 1 <= len`, and `out` has room for that by the caller's promise.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), out.cast(), n);
            *out.add(n) = 0;
        }
    }
    text.len() + 1
}

/// # Safety
/// `text` is a string of C, or null.
unsafe fn string(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

fn recorders(mut what: impl FnMut(&mut Recorder)) {
    each(|_, server| match server {
        Server::Record(recorder) => what(recorder),
        Server::Allocate(_) => {}
    });
}

fn statistics(server: &Server) -> Option<String> {
    match server {
        Server::Allocate(allocator) => Some(allocator.stats().to_string()),
        Server::Record(_) => None,
    }
}

/// At the program's end: writes traces and statistics to their files. Does not use the devices,
/// which may be gone.
extern "C" fn report() {
    if FORKED.load(Ordering::Relaxed) {
        return;
    }
    each(|device, server| {
        if let Server::Record(recorder) = server
            && let Err(error) = recorder.flush()
        {
            tell(&format!(
                "the trace of device {device} is not complete: {error}"
            ));
        }
        let (Some(text), Some(path)) = (statistics(server), variable("STATS")) else {
            return;
        };
        let path = path.replace("%d", &device.to_string());
        if path == "-" {
            tell(&format!("device {device}: {text}"));
        } else if let Err(error) = append(&path, &text) {
            tell(&format!("{path}: {error}"));
        }
    });
}

/// Appends a device's line.
fn append(path: &str, text: &str) -> std::io::Result<()> {
    use std::io::Write;
    let mut file = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)?;
    writeln!(file, "{text}")
}
