//! The driver's functions, and the stand-in's own: `standin_…`, which tests call through
//! [`crate::Standin`].

#![allow(unsafe_code, reason = "a C interface")]
#![allow(non_snake_case, reason = "the names are the driver's")]

use crate::facts::Facts;
use crate::options::Options;
use crate::status::Status;
use crate::world::{Command, Done, World};
use ptx::{Launch, Param};
use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ptr;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

type Handle = *mut c_void;

/// The handle of the one context.
const CONTEXT: Handle = ptr::without_provenance_mut(0x2000);

// Numbers of cuda.h: attributes of devices and functions, options of the JIT, flags.
const MAX_THREADS_PER_BLOCK: c_int = 1;
const MAX_SHARED_PER_BLOCK: c_int = 8;
const WARP_SIZE: c_int = 10;
const MULTIPROCESSOR_COUNT: c_int = 16;
const ASYNC_ENGINE_COUNT: c_int = 40;
const UNIFIED_ADDRESSING: c_int = 41;
const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
const COMPUTE_CAPABILITY_MINOR: c_int = 76;
const MAX_SHARED_PER_BLOCK_OPTIN: c_int = 97;
const FUNC_MAX_DYNAMIC_SHARED: c_int = 8;
const JIT_ERROR_LOG: c_int = 5;
const JIT_ERROR_LOG_BYTES: c_int = 6;
const MEMORY_TYPE: c_int = 2;
const HOST_MEMORY: c_uint = 1;
const DEVICE_MEMORY: c_uint = 2;
const EVENT_DISABLE_TIMING: c_uint = 2;

pub(crate) fn world() -> MutexGuard<'static, World> {
    static WORLD: LazyLock<Mutex<World>> = LazyLock::new(|| {
        let options = Options::of(|name| std::env::var(name).ok());
        Mutex::new(World::new(options))
    });
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

fn call(name: &'static str, needs_context: bool, does: impl FnOnce(&mut World) -> Done<()>) -> u32 {
    let mut world = world();
    let done = world
        .enter(name, needs_context)
        .and_then(|()| does(&mut world));
    done.err().unwrap_or(Status::SUCCESS).0
}

/// Writes a result to the caller's pointer.
///
/// # Safety
/// The pointer is null or valid for a write.
unsafe fn give<T>(to: *mut T, value: T) -> Done<()> {
    if to.is_null() {
        return Err(Status::ERROR_INVALID_VALUE);
    }
    // SAFETY: by this function's contract.
    unsafe { to.write(value) };
    Ok(())
}

/// Declares functions of the driver. Their first argument is the world, which the caller does not
/// pass.
macro_rules! driver {
    ($needs_context:literal: $(
        fn $name:ident($world:ident $(, $arg:ident: $ty:ty)*) $body:block
    )*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> u32 {
            call(stringify!($name), $needs_context, |$world| {
                // SAFETY: the caller follows cuda.h: results have room, texts end with a zero, host
                // memory is valid until the copy has run.
                #[allow(unused_unsafe, reason = "some functions take no pointer")]
                unsafe { $body }
            })
        }
    )*};
}

// --- before a context exists ---

driver! { false:
    fn cuInit(_world, _flags: c_uint) { Ok(()) }
    fn cuDriverGetVersion(world, version: *mut c_int) {
        give(version, world.options.driver as c_int)
    }
    fn cuDeviceGetCount(_world, count: *mut c_int) { give(count, 1) }
    fn cuDeviceGet(_world, device: *mut c_int, number: c_int) {
        give(device, number)?;
        if number == 0 { Ok(()) } else { Err(Status::ERROR_INVALID_DEVICE) }
    }
    fn cuDeviceGetName(_world, name: *mut c_char, room: c_int, _device: c_int) {
        write_text(name, usize::try_from(room).unwrap_or(0), "stand-in")
    }
    fn cuDeviceTotalMem_v2(world, bytes: *mut usize, _device: c_int) {
        give(bytes, world.options.device_bytes as usize)
    }
    fn cuDeviceGetAttribute(world, value: *mut c_int, attribute: c_int, _device: c_int) {
        let sm = world.options.sm as c_int;
        give(value, match attribute {
            MAX_THREADS_PER_BLOCK => 1024,
            MAX_SHARED_PER_BLOCK => 48 << 10,
            WARP_SIZE => 32,
            MULTIPROCESSOR_COUNT => 4,
            ASYNC_ENGINE_COUNT => 3,
            UNIFIED_ADDRESSING => 1,
            COMPUTE_CAPABILITY_MAJOR => sm / 10,
            COMPUTE_CAPABILITY_MINOR => sm % 10,
            MAX_SHARED_PER_BLOCK_OPTIN => world.most_shared_bytes() as c_int,
            _ => return Err(Status::ERROR_INVALID_VALUE),
        })
    }
    fn cuDevicePrimaryCtxSetFlags_v2(_world, _device: c_int, _flags: c_uint) { Ok(()) }
    fn cuDevicePrimaryCtxRetain(_world, context: *mut Handle, _device: c_int) {
        give(context, CONTEXT)
    }
    fn cuDevicePrimaryCtxRelease_v2(world, _device: c_int) { world.synchronize() }
    fn cuCtxSetCurrent(world, context: Handle) {
        world.bind(!context.is_null());
        Ok(())
    }
    fn cuCtxGetCurrent(world, context: *mut Handle) {
        give(context, if world.is_bound() { CONTEXT } else { ptr::null_mut() })
    }
}

// --- memory ---

driver! { true:
    fn cuCtxSynchronize(world) { world.synchronize() }
    fn cuMemGetInfo_v2(world, free: *mut usize, total: *mut usize) {
        give(free, world.free_bytes() as usize)?;
        give(total, world.options.device_bytes as usize)
    }
    fn cuPointerGetAttribute(
        world,
        value: *mut c_uint,
        attribute: c_int,
        address: u64
    ) {
        match attribute {
            MEMORY_TYPE if world.memory.slice(address, 1).is_none() => {
                Err(Status::ERROR_INVALID_VALUE)
            }
            MEMORY_TYPE if world.is_unified() => give(value, HOST_MEMORY),
            MEMORY_TYPE => give(value, DEVICE_MEMORY),
            _ => Err(Status::ERROR_INVALID_VALUE),
        }
    }
    fn cuMemAlloc_v2(world, address: *mut u64, bytes: usize) {
        give(address, world.allocate(bytes)?)
    }
    fn cuMemFree_v2(world, address: u64) { world.free(address) }
    fn cuMemHostAlloc(world, address: *mut Handle, bytes: usize, _flags: c_uint) {
        let allocated = world.pinned.allocate(bytes).ok_or(Status::ERROR_OUT_OF_MEMORY)?;
        world.make();
        give(address, allocated as Handle)
    }
    fn cuMemFreeHost(world, address: Handle) { world.unpin(address as u64, true) }
    fn cuMemHostRegister_v2(world, address: Handle, bytes: usize, _flags: c_uint) {
        if address.is_null() || bytes == 0 {
            return Err(Status::ERROR_INVALID_VALUE);
        }
        let registered = world.pinned.register(address as u64, bytes as u64);
        world.make();
        registered.then_some(()).ok_or(Status::ERROR_HOST_MEMORY_ALREADY_REGISTERED)
    }
    fn cuMemHostUnregister(world, address: Handle) { world.unpin(address as u64, false) }
    fn cuMemcpyHtoDAsync_v2(world, to: u64, from: *const c_void, bytes: usize, stream: Handle) {
        let from = from as u64;
        copy(world, stream as u64, from, bytes, Command::CopyIn { to, from, bytes })
    }
    fn cuMemcpyDtoHAsync_v2(world, to: Handle, from: u64, bytes: usize, stream: Handle) {
        let to = to as u64;
        copy(world, stream as u64, to, bytes, Command::CopyOut { to, from, bytes })
    }
    fn cuMemcpyDtoDAsync_v2(world, to: u64, from: u64, bytes: usize, stream: Handle) {
        world.submit(stream as u64, Command::CopyWithin { to, from, bytes })
    }
    fn cuMemsetD8Async(world, at: u64, value: u8, bytes: usize, stream: Handle) {
        world.submit(stream as u64, Command::Fill { at, value, bytes })
    }
}

/// A copy from or to host memory. Host memory that is not registered is a finding; the copy is then
/// done when the call returns.
///
/// # Safety
/// The bytes of the host may be read or written until the copy has run.
unsafe fn copy(
    world: &mut World,
    stream: u64,
    host: u64,
    bytes: usize,
    command: Command,
) -> Done<()> {
    if world.pinned.contains(host, bytes) {
        return world.submit(stream, command);
    }
    world.find("an asynchronous copy uses host memory that is not registered".into());
    // SAFETY: the bytes are valid until the copy has run, which is before `unpin`.
    if !unsafe { world.pinned.register(host, bytes as u64) } {
        return Err(Status::ERROR_INVALID_VALUE);
    }
    let done = world
        .submit(stream, command)
        .and_then(|()| world.wait_for_stream(stream));
    world.pinned.remove(host, false);
    done
}

// --- streams and events ---

driver! { true:
    fn cuStreamCreate(world, stream: *mut Handle, _flags: c_uint) {
        give(stream, world.create_stream() as Handle)
    }
    fn cuStreamCreateWithPriority(world, stream: *mut Handle, _flags: c_uint, _priority: c_int) {
        give(stream, world.create_stream() as Handle)
    }
    fn cuStreamDestroy_v2(world, stream: Handle) { world.destroy_stream(stream as u64) }
    fn cuStreamQuery(world, stream: Handle) { world.query_stream(stream as u64) }
    fn cuStreamSynchronize(world, stream: Handle) { world.wait_for_stream(stream as u64) }
    fn cuStreamWaitEvent(world, stream: Handle, event: Handle, _flags: c_uint) {
        world.wait_event(stream as u64, event as u64)
    }
    fn cuEventCreate(world, event: *mut Handle, flags: c_uint) {
        give(event, world.create_event(flags & EVENT_DISABLE_TIMING == 0) as Handle)
    }
    fn cuEventDestroy_v2(world, event: Handle) { world.destroy_event(event as u64) }
    fn cuEventRecord(world, event: Handle, stream: Handle) {
        world.record(event as u64, stream as u64)
    }
    fn cuEventQuery(world, event: Handle) { world.query_event(event as u64) }
    fn cuEventSynchronize(world, event: Handle) { world.wait_for_event(event as u64) }
    fn cuEventElapsedTime(world, milliseconds: *mut f32, from: Handle, to: Handle) {
        give(milliseconds, world.elapsed(from as u64, to as u64)?)
    }
}

// --- modules and launches ---

driver! { true:
    fn cuModuleLoadData(world, module: *mut Handle, image: *const c_void) {
        let loaded = load(world, CStr::from_ptr(image.cast()));
        give(module, loaded.map_err(|(status, _)| status)? as Handle)
    }
    fn cuModuleLoadDataEx(
        world,
        module: *mut Handle,
        image: *const c_void,
        n_options: c_uint,
        options: *const c_int,
        values: *const *mut c_void
    ) {
        let (status, log) = match load(world, CStr::from_ptr(image.cast())) {
            Ok(loaded) => return give(module, loaded as Handle),
            Err(refused) => refused,
        };
        let (mut buffer, mut room) = (ptr::null_mut(), 0);
        for i in 0..n_options as usize {
            match *options.add(i) {
                JIT_ERROR_LOG => buffer = *values.add(i),
                JIT_ERROR_LOG_BYTES => room = *values.add(i) as usize,
                _ => {}
            }
        }
        if !buffer.is_null() {
            write_text(buffer.cast(), room, &log)?;
        }
        Err(status)
    }
    fn cuModuleUnload(world, module: Handle) { world.unload(module as u64) }
    fn cuModuleGetFunction(world, function: *mut Handle, module: Handle, name: *const c_char) {
        let name = CStr::from_ptr(name).to_string_lossy();
        give(function, world.get_function(module as u64, &name)? as Handle)
    }
    fn cuFuncGetAttribute(world, value: *mut c_int, attribute: c_int, function: Handle) {
        let kernel = world.kernel(function as u64)?;
        give(value, match attribute {
            0 => 1024,
            1 => kernel.shared_bytes() as c_int,
            // The interpreter has no registers to spill: no local bytes.
            3 => 0,
            _ => return Err(Status::ERROR_INVALID_VALUE),
        })
    }
    fn cuFuncSetAttribute(world, function: Handle, attribute: c_int, value: c_int) {
        let bytes = u32::try_from(value).map_err(|_| Status::ERROR_INVALID_VALUE)?;
        match attribute {
            FUNC_MAX_DYNAMIC_SHARED => world.permit_shared(function as u64, bytes),
            _ => Err(Status::ERROR_NOT_SUPPORTED),
        }
    }
    fn cuLaunchKernel(
        world,
        function: Handle,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint,
        stream: Handle,
        params: *const *const c_void,
        extra: *const *const c_void
    ) {
        if !extra.is_null() {
            return Err(Status::ERROR_NOT_SUPPORTED);
        }
        let params = parameters(world, function, params)?;
        let launch = Launch {
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            shared_bytes,
        };
        world.launch(function as u64, stream as u64, launch, params)
    }
}

/// CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h.
#[repr(C)]
struct KernelNode {
    function: Handle,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    params: *const *const c_void,
    extra: *const *const c_void,
    kernel: Handle,
    context: Handle,
}

// --- graphs ---

driver! { true:
    fn cuGraphCreate(world, graph: *mut Handle, _flags: c_uint) {
        give(graph, world.create_graph() as Handle)
    }
    fn cuGraphDestroy(world, graph: Handle) { world.destroy_graph(graph as u64) }
    fn cuGraphAddKernelNode_v2(
        world,
        to: *mut Handle,
        graph: Handle,
        before: *const Handle,
        n_before: usize,
        node: *const KernelNode
    ) {
        let node = &*node;
        if !node.extra.is_null() {
            return Err(Status::ERROR_NOT_SUPPORTED);
        }
        let before = (0..n_before).map(|i| *before.add(i) as u64).collect();
        let params = parameters(world, node.function, node.params)?;
        let launch = Launch {
            grid: node.grid,
            block: node.block,
            shared_bytes: node.shared_bytes,
        };
        let added = world.add_node(graph as u64, before, node.function as u64, launch, params)?;
        give(to, added as Handle)
    }
    fn cuGraphInstantiateWithFlags(world, to: *mut Handle, graph: Handle, _flags: u64) {
        give(to, world.instantiate(graph as u64)? as Handle)
    }
    fn cuGraphExecDestroy(world, graph: Handle) { world.destroy_graph(graph as u64) }
    fn cuGraphLaunch(world, graph: Handle, stream: Handle) {
        world.launch_graph(graph as u64, stream as u64)
    }
}

/// The arguments of a kernel.
///
/// # Safety
/// As many as the kernel has parameters are there.
unsafe fn parameters(
    world: &World,
    function: Handle,
    params: *const *const c_void,
) -> Done<Vec<Param>> {
    let widths = world.kernel(function as u64)?.parameter_bytes().enumerate();
    // SAFETY: by this function's contract.
    let read = |(i, bytes): (usize, usize)| unsafe {
        match bytes {
            8 => Ok(Param::U64((*params.add(i)).cast::<u64>().read())),
            4 => Ok(Param::U32((*params.add(i)).cast::<u32>().read())),
            _ => Err(Status::ERROR_NOT_SUPPORTED),
        }
    };
    widths.map(read).collect()
}

/// Parses a module's PTX; its handle, or the status and the JIT's log.
fn load(world: &mut World, text: &CStr) -> Result<u64, (Status, String)> {
    let text = text.to_string_lossy();
    let directive = |name: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(name));
        line.map_or("", str::trim)
    };
    let invalid = |log: String| Err((Status::ERROR_INVALID_PTX, log));
    let sm = directive(".target sm_");
    let sm: u32 = match sm.trim_end_matches('a').parse() {
        Ok(sm) => sm,
        Err(_) => return invalid(format!(".target sm_{sm} is not known")),
    };
    if sm > world.options.sm {
        return invalid(format!(
            "the PTX is for sm_{sm}, the device is sm_{}",
            world.options.sm
        ));
    }
    // PTX 8.0 came with CUDA 12.0, and 9.0 with 13.0. From 8.6 on, the minor version of CUDA is one
    // higher.
    let version = directive(".version");
    let needed = version.split_once('.').and_then(|(major, minor)| {
        Some((major.parse::<u32>().ok()? + 4) * 1000 + minor.parse::<u32>().ok()? * 10)
    });
    match needed {
        None => return invalid(format!(".version {version} is not known")),
        Some(needed) if needed > world.options.driver => {
            let log = format!("PTX {version} is newer than the driver");
            return Err((Status::ERROR_UNSUPPORTED_PTX_VERSION, log));
        }
        Some(_) => {}
    }
    let mut names = BTreeSet::new();
    if let Some(again) = ptx::kernels(&text)
        .into_iter()
        .find(|name| !names.insert(*name))
    {
        return invalid(format!("Duplicate definition of function '{again}'"));
    }
    match ptx::parse(&text) {
        Ok(kernels) => {
            let mut hasher = DefaultHasher::new();
            text.hash(&mut hasher);
            Ok(world.add_module(kernels, hasher.finish()))
        }
        Err(error) => invalid(error.to_string()),
    }
}

/// Writes a text and a zero, cut to the room.
///
/// # Safety
/// The pointer is valid for as many bytes as there is room.
unsafe fn write_text(to: *mut c_char, room: usize, text: &str) -> Done<()> {
    let n = text
        .len()
        .min(room.checked_sub(1).ok_or(Status::ERROR_INVALID_VALUE)?);
    // SAFETY: n + 1 bytes are at most the room.
    unsafe {
        ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), n);
        to.add(n).write(0);
    }
    Ok(())
}

// --- texts of statuses, which work after an error too ---

/// Writes a text of a status.
///
/// # Safety
/// The pointer is null or valid for a write.
unsafe fn give_words(to: *mut *const c_char, words: Option<&'static CStr>) -> u32 {
    let text = words.map_or(ptr::null(), CStr::as_ptr);
    // SAFETY: by this function's contract.
    let given = unsafe { give(to, text) };
    match words {
        Some(_) => given.err().unwrap_or(Status::SUCCESS).0,
        None => Status::ERROR_INVALID_VALUE.0,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(status: u32, text: *mut *const c_char) -> u32 {
    // SAFETY: the caller follows cuda.h.
    unsafe { give_words(text, Status(status).words().map(|(name, _)| name)) }
}
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(status: u32, text: *mut *const c_char) -> u32 {
    // SAFETY: the caller follows cuda.h.
    unsafe { give_words(text, Status(status).words().map(|(_, text)| text)) }
}

// --- the stand-in's own ---

/// Resets everything: no memory, no streams, no findings.
#[unsafe(no_mangle)]
unsafe extern "C" fn standin_reset(options: *const Options) {
    // SAFETY: `Standin` passes a reference.
    let options = unsafe { *options };
    let mut world = world();
    let memo = std::mem::take(&mut world.memo);
    *world = World::new(options);
    world.memo = memo;
}
#[unsafe(no_mangle)]
unsafe extern "C" fn standin_facts(to: *mut Facts) {
    // SAFETY: `Standin` passes a reference.
    unsafe { to.write(world().facts()) };
}
/// Calls of the function with this name.
#[unsafe(no_mangle)]
unsafe extern "C" fn standin_calls_of(name: *const u8, bytes: usize) -> u64 {
    // SAFETY: `Standin` passes a text and its length.
    let name = unsafe { std::slice::from_raw_parts(name, bytes) };
    std::str::from_utf8(name).map_or(0, |name| world().calls_of(name))
}
/// Writes the addresses and sizes of the ranges that the program registered, by rising addresses;
/// returns their number.
#[unsafe(no_mangle)]
unsafe extern "C" fn standin_registered(to: *mut [u64; 2], room: usize) -> usize {
    let ranges = world().pinned.registered();
    let n = ranges.len().min(room);
    // SAFETY: `Standin` passes a vector of this length.
    unsafe { ptr::copy_nonoverlapping(ranges.as_ptr(), to, n) };
    ranges.len()
}
/// Writes the findings, one for each line; returns the number of bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn standin_findings(to: *mut u8, room: usize) -> usize {
    let text = world().findings.join("\n");
    // SAFETY: `Standin` passes a vector of this length.
    unsafe { ptr::copy_nonoverlapping(text.as_ptr(), to, text.len().min(room)) };
    text.len()
}
#[unsafe(no_mangle)]
extern "C" fn standin_host_access(address: u64, bytes: u64, write: u32) {
    world().host_access(address..address + bytes, write != 0);
}
#[unsafe(no_mangle)]
extern "C" fn standin_publish(signal: u64) {
    world().publish(signal);
}
#[unsafe(no_mangle)]
extern "C" fn standin_acquire(signal: u64) {
    world().acquire(signal);
}
