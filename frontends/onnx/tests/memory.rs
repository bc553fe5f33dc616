//! How much memory reading needs: at most four times what a file warrants, which is its own size
//! and that of the model that it gives.

#![allow(
    unsafe_code,
    reason = "a global allocator is unsafe to implement; this one forwards to the system's"
)]

use crate::common::*;
use crate::hostile::{FILES, mutant, small};
use lighterage_onnx::Options;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// The bytes that this thread has allocated and not freed, and the most so far.
    static LIVE: Cell<(i64, i64)> = const { Cell::new((0, 0)) };
}

struct Counting;

fn count(bytes: i64) {
    // A thread that ends has no counter any more.
    let _ = LIVE.try_with(|live| {
        let (now, peak) = live.get();
        live.set((now + bytes, peak.max(now + bytes)));
    });
}

// SAFETY: forwards every call unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as i64 - layout.size() as i64);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What a small file may need beside.
const LEAST: i64 = 1 << 16;
/// What nodes and numbers of any file may need beside.
const FREE: i64 = 1 << 24;

/// The peak while bytes are read, and what they warrant.
fn measured(bytes: &[u8], options: &Options) -> (i64, i64) {
    let (before, _) = LIVE.get();
    LIVE.set((before, before));
    let read = lighterage_onnx::read_bytes(bytes, "x", options);
    let (after, peak) = LIVE.get();
    drop(read);
    (peak - before, bytes.len() as i64 + after - before)
}

/// Every mutant is nearly its original, so it warrants a model of the same size.
#[test]
fn mutants_take_four_times_what_their_files_warrant() {
    let is_long = std::env::var_os("LIGHTERAGE_LONG_TESTS").is_some_and(|value| value == "1");
    let rounds = if is_long { 10_000 } else { 30 };
    let mut numbers = Numbers(7);
    let files = FILES.map(|name| std::fs::read(data(&format!("{name}.onnx"))).unwrap());
    for file in files.into_iter().chain([small()]) {
        let options = sized(&file);
        let (peak, warranted) = measured(&file, &options);
        assert!(
            peak <= 4 * warranted + LEAST,
            "{peak} bytes for {warranted}"
        );
        for round in 0..rounds {
            let mutant = mutant(&file, if round % 2 == 0 { 2 } else { 4 }, &mut numbers);
            let more = mutant.len().saturating_sub(file.len()) as i64;
            let (peak, own) = measured(&mutant, &options);
            let warranted = own.max(warranted + more);
            assert!(
                peak <= 4 * warranted + LEAST,
                "{peak} bytes for {warranted}"
            );
        }
    }
}

/// Files of one small message or number many times, which become large when they are decoded.
#[test]
fn hostile_files_take_four_times_their_size() {
    let many = |bytes: &[u8], n: usize| bytes.repeat(n);
    let graph = |fields: &[u8]| model(&[fields.to_vec(), bytes(12, output("y"))], &[]);
    let in_node = |fields: &[u8]| graph(&bytes(1, fields));
    let in_tensor = |fields: &[u8]| graph(&bytes(5, fields));
    let n = 2_000_000;
    let empty = |field: u64| bytes(field, []);
    let files = [
        ("nodes", graph(&many(&empty(1), n))),
        ("tensors", graph(&many(&empty(5), n))),
        ("values", graph(&many(&empty(13), n))),
        ("attributes", in_node(&many(&empty(5), n))),
        ("names", in_node(&many(&empty(1), n))),
        ("entries", in_node(&many(&empty(9), n))),
        ("sizes", in_tensor(&many(&int(1, 1), n))),
        ("packed integers", in_tensor(&bytes(7, vec![1; 2 * n]))),
        (
            "packed narrow integers",
            in_tensor(&bytes(5, vec![1; 2 * n])),
        ),
        ("integers", in_node(&bytes(5, many(&int(8, 1), n)))),
        (
            "nodes with a name",
            graph(&many(&bytes(1, bytes(2, "z")), n / 4)),
        ),
        (
            "named nodes",
            graph(&many(&bytes(1, bytes(3, [b'x'; 60])), n / 16)),
        ),
    ];
    for (name, file) in files {
        let (peak, warranted) = measured(&file, &fixed());
        assert!(
            peak <= 4 * warranted + FREE,
            "{name}: {peak} bytes for {warranted}"
        );
    }
}

/// The sizes that a file leaves open.
fn sized(file: &[u8]) -> Options {
    let mut options = fixed();
    if let Err(error) = lighterage_onnx::read_bytes(file, "x", &options) {
        for dim in ["batch", "unk__15", "unk__45"] {
            if error.to_string().contains(dim) {
                options.dims.insert(dim.to_string(), 4);
            }
        }
    }
    options
}
