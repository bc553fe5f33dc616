//! The cost of a planned request, through the library and through the C interface with its lock.
//!
//! `cargo bench -p lighterage-alloc --bench request -- REQUESTS STEPS` runs STEPS steps of REQUESTS
//! requests: it makes 64 requests, then frees 64 earlier blocks, and so on. Prints a line of JSON
//! for reading and proving the plan, and one for each interface: nanoseconds of a request and of a
//! free, the median over groups of 64 by the clock. The first step is not counted.

#![allow(clippy::print_stdout, reason = "a benchmark's output is its purpose")]

use lighterage_alloc::{Allocator, Host, Plan, abi};
use std::fmt::Write;
use std::time::Instant;

const GROUP: usize = 64;

fn main() {
    // Cargo passes `--bench` along.
    let given: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| arg != "--bench")
        .collect();
    let number = |i: usize, default| {
        given
            .get(i)
            .and_then(|arg| arg.parse().ok())
            .unwrap_or(default)
    };
    let (n, steps) = (
        number(0, 20_000usize)
            .max(2 * GROUP)
            .next_multiple_of(GROUP),
        number(1, 50usize),
    );
    let (sizes, text) = plan(n);
    if given.get(2).is_some_and(|arg| arg == "abi") {
        let malloc =
            |bytes: u64| abi::lighterage_malloc(bytes as isize, 0, std::ptr::null_mut()) as u64;
        let free =
            |address: u64| abi::lighterage_free(address as *mut _, 0, 0, std::ptr::null_mut());
        play("c", &sizes, steps, malloc, free);
        return;
    }
    let start = Instant::now();
    let plan = Plan::read(&text).expect("the plan should be right");
    let read_ms = start.elapsed().as_secs_f64() * 1e3;
    println!(
        "{{\"plan_requests\": {n}, \"plan_bytes\": {}, \"read_ms\": {read_ms:.1}}}",
        text.len()
    );
    let allocator =
        Allocator::planned(Box::<Host>::default(), plan).expect("the host should have the memory");
    let allocator = std::cell::RefCell::new(allocator);
    let malloc = |bytes| {
        allocator
            .borrow_mut()
            .malloc(bytes, 0)
            .expect("the place should be free")
    };
    play("rust", &sizes, steps, malloc, |address| {
        allocator.borrow_mut().free(address);
    });
    let stats = allocator.borrow().stats();
    assert_eq!(
        (stats.planned, stats.native),
        (((steps + 1) * n) as u64, 1),
        "{stats}"
    );

    // The C interface reads the environment, which a process cannot change safely for itself.
    let path = std::env::temp_dir().join(format!("lighterage-request-{}.plan", std::process::id()));
    std::fs::write(&path, text).expect("the directory for temporary files should take one");
    let status = std::process::Command::new(
        std::env::current_exe().expect("this program should have a path"),
    )
    .args([n.to_string(), steps.to_string(), "abi".into()])
    .envs([
        ("LIGHTERAGE_ALLOC_POOL", "host"),
        ("LIGHTERAGE_ALLOC_STATS", "-"),
    ])
    .env("LIGHTERAGE_ALLOC_PLAN", &path)
    .status();
    // Nothing else needs this file.
    let _ = std::fs::remove_file(&path);
    assert!(
        status.is_ok_and(|status| status.success()),
        "the C interface should run"
    );
}

/// A step in which each block lives for 64 to 128 requests, with sizes like a model's. Blocks lie
/// in two halves in turn.
fn plan(n: usize) -> (Vec<u64>, String) {
    let sizes: Vec<u64> = (0..n)
        .map(|i| [512u64, 2048, 8192, 65_536, 1000][(i * i + i / 7) % 5])
        .collect();
    let half = |group: &[u64]| {
        group
            .iter()
            .map(|bytes| bytes.next_multiple_of(512))
            .sum::<u64>()
    };
    let most = sizes.chunks(GROUP).map(half).max().unwrap_or(0);
    let mut text = format!("lighterage-plan 1\npool {} 512\nrequests {n} 0\n", 3 * most);
    for (g, group) in sizes.chunks(GROUP).enumerate() {
        let mut offset = (g % 3) as u64 * most;
        for bytes in group {
            // Writing to a string does not fail.
            let _ = writeln!(text, "s {bytes} 0 {offset} {}", ((g + 2) * GROUP).min(n));
            offset += bytes.next_multiple_of(512);
        }
    }
    text.push_str("end\n");
    (sizes, text)
}

fn play(name: &str, sizes: &[u64], steps: usize, malloc: impl Fn(u64) -> u64, free: impl Fn(u64)) {
    let (mut mallocs, mut frees) = (vec![], vec![]);
    let (mut before, mut now): (Vec<u64>, Vec<u64>) = (vec![], vec![]);
    for step in 0..=steps {
        for group in sizes.chunks(GROUP) {
            let start = Instant::now();
            now.extend(group.iter().map(|&bytes| malloc(bytes)));
            let middle = Instant::now();
            before.drain(..).for_each(&free);
            if 0 < step {
                mallocs.push((middle - start).as_nanos() as f64 / GROUP as f64);
                frees.push(middle.elapsed().as_nanos() as f64 / GROUP as f64);
            }
            std::mem::swap(&mut before, &mut now);
        }
        before.drain(..).for_each(&free);
    }
    for times in [&mut mallocs, &mut frees] {
        times.sort_by(f64::total_cmp);
    }
    let median = |times: &[f64]| times.get(times.len() / 2).copied().unwrap_or(0.0);
    println!(
        "{{\"interface\": \"{name}\", \"requests\": {}, \"malloc_ns\": {:.1}, \"free_ns\": {:.1}}}",
        mallocs.len() * GROUP,
        median(&mallocs),
        median(&frees)
    );
}
