//! The calls of the driver, tested with a driver that needs no GPU.

#![allow(unsafe_code, reason = "the test asks the driver what is left")]

use lighterage_alloc::pool::Pool;
use lighterage_alloc::{Allocator, Cuda, Plan};
use std::path::PathBuf;
use std::process::Command;

/// Builds the driver's library. Each test has its own, because its state is the process's.
fn driver(name: &str) -> PathBuf {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/driver.c");
    let library = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    // The linker that Rust uses is a compiler of C, too.
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(source)
        .status();
    assert!(
        status.is_ok_and(|status| status.success()),
        "cc should make a library"
    );
    library
}

#[test]
fn a_driver_is_found_and_called() {
    let path = driver("libcalled.so");
    let path = path.to_str().unwrap();
    // SAFETY: the library is ours, and its initialisation does nothing.
    let library = unsafe { libloading::Library::new(path) }.unwrap();
    // SAFETY: this is its type in driver.c.
    let left = || unsafe {
        library
            .get::<unsafe extern "C" fn() -> i32>(b"cuLeft\0")
            .unwrap()()
    };

    let error = Cuda::new(0, Some("/nowhere/libcuda.so.1"))
        .err()
        .unwrap()
        .to_string();
    assert!(error.starts_with("/nowhere/libcuda.so.1: "), "{error}");
    let error = Cuda::new(3, Some(path)).err().unwrap().to_string();
    assert_eq!(error, "cuDeviceGet: CUDA_ERROR_NO_DEVICE (101)");

    let mut cuda = Cuda::new(0, Some(path)).unwrap();
    let address = cuda.allocate(1000).unwrap();
    assert_eq!(
        cuda.allocate(1 << 30).unwrap_err().to_string(),
        "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (2)"
    );
    let event = cuda.record(5).unwrap();
    assert_eq!((cuda.done(event), cuda.done(event)), (false, true));
    cuda.wait(6, event).unwrap();
    cuda.synchronize();
    assert_eq!(
        left(),
        101,
        "one block, one event, and no context left behind"
    );
    cuda.forget(event);
    cuda.free(address);
    assert_eq!(
        cuda.record(99).unwrap_err().to_string(),
        "cuEventRecord: unknown error (201)"
    );
    assert_eq!(left(), 0);

    // Two streams with the same bytes, and a third that only uses a block.
    let text = "lighterage-plan 1\npool 512 512\nrequests 2 0\ns 100 0 0 1\ns 200 1 0 2\nend\n";
    let mut allocator = Allocator::planned(Box::new(cuda), Plan::read(text).unwrap()).unwrap();
    for step in 1..4 {
        for (bytes, stream) in [(100, 0), (200, 8)] {
            let address = allocator.malloc(bytes, stream).unwrap();
            allocator.record_stream(address, 16);
            assert!(allocator.free(address));
        }
        // In a step, each request waits for the other stream and for the third; the first has no
        // earlier users.
        assert_eq!(allocator.stats().waits, 4 * step - 2);
    }
    assert_eq!(left(), 101, "the pool, and the event of the last block");
}

#[test]
fn memory_is_mapped() {
    const MIB: u64 = 1 << 20;
    let path = driver("libmapped.so");
    let path = path.to_str().unwrap();
    // SAFETY: the library is ours, and its initialisation does nothing.
    let library = unsafe { libloading::Library::new(path) }.unwrap();
    // SAFETY: this is its type in driver.c.
    let mapped = || unsafe {
        2 * library
            .get::<unsafe extern "C" fn() -> i32>(b"cuSteps\0")
            .unwrap()()
    };
    let cuda = Cuda::new(0, Some(path)).unwrap();
    let mut cache = Allocator::caching(Box::new(cuda));
    cache.expand().unwrap();
    assert_eq!(mapped(), 0, "what was tried out is given back");
    let block = cache.malloc(30 * MIB, 0).unwrap();
    assert_eq!(mapped(), 40);
    assert!(cache.free(block));
    assert_eq!(cache.malloc(50 * MIB, 0).unwrap(), block);
    assert_eq!(mapped(), 60);
    // 60 more would be more than the device has: the first step of them is given back.
    let error = cache.malloc(55 * MIB, 0).unwrap_err().to_string();
    assert!(
        error.starts_with("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2): 57671680 bytes were asked"),
        "{error}"
    );
    assert_eq!(mapped(), 60);
    assert!(cache.free(block));
    cache.trim();
    assert_eq!(mapped(), 0);
}
