//! The C interface, called as PyTorch does. The environment is read only once, so each case is a
//! separate process: the test starts itself again.

#![allow(unsafe_code, reason = "C callers pass pointers")]

use lighterage_alloc::abi::*;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::ptr::null_mut;

fn malloc(bytes: isize, device: i32, stream: usize) -> usize {
    lighterage_malloc(bytes, device, stream as *mut _) as usize
}

fn free(address: usize, device: i32) {
    lighterage_free(address as *mut _, 0, device, null_mut());
}

fn stats(device: i32) -> String {
    let mut text = vec![0u8; 2000];
    // SAFETY: the buffer has the given number of bytes.
    let len = unsafe { lighterage_stats(device, text.as_mut_ptr().cast(), text.len()) };
    text.truncate(len.saturating_sub(1));
    String::from_utf8(text).unwrap()
}

fn directory(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir(&directory).unwrap();
    directory
}

type Settings<'a> = &'a [(&'a str, &'a Path)];

/// Runs a test of this file again, as a child process.
fn again(test: &str, settings: Settings<'_>) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .env("LIGHTERAGE_ALLOC_POOL", "host")
        .env("CHILD", "1");
    for (name, value) in settings {
        command.env(format!("LIGHTERAGE_ALLOC_{name}"), value);
    }
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

fn is_child() -> bool {
    std::env::var_os("CHILD").is_some()
}

#[test]
fn a_plan_is_served() {
    if !is_child() {
        let directory = directory("served");
        let (plan, told) = (directory.join("plan"), directory.join("stats-%d"));
        std::fs::write(
            &plan,
            "lighterage-plan 1\npool 1000 512\nrequests 2 0\ns 100 0 0 1\ns 200 0 512 2\nend\n",
        )
        .unwrap();
        again(
            "abi::a_plan_is_served",
            &[("PLAN", &plan), ("STATS", &told)],
        );
        let told = std::fs::read_to_string(directory.join("stats-0")).unwrap();
        assert!(
            told.starts_with("{\"requests\": 20, \"planned\": 20, ") && told.ends_with("}\n"),
            "{told}"
        );
        let told = std::fs::read_to_string(directory.join("stats-1")).unwrap();
        assert!(
            told.starts_with("{\"requests\": 1, \"planned\": 0, "),
            "{told}"
        );
        return;
    }
    assert_eq!(stats(0), "");
    let mut blocks = vec![];
    for i in 0..20 {
        let bytes = [100, 200][i % 2];
        // Autograd allocates from another thread.
        let address = std::thread::spawn(move || malloc(bytes, 0, 0))
            .join()
            .unwrap();
        blocks.push(address);
        free(address, 0);
    }
    assert!(
        blocks
            .chunks(2)
            .all(|pair| pair[1] - pair[0] == 512 && pair[0] == blocks[0])
    );
    assert!(stats(0).contains("\"planned\": 20"), "{}", stats(0));
    // The plan belongs to the first device.
    free(malloc(100, 1, 0), 1);
    lighterage_record_stream(blocks[0] as *mut _, null_mut());
    lighterage_empty_cache();
    // A cut-off result is a string, too.
    let mut text = [7; 4];
    // SAFETY: the buffer has the given number of bytes.
    let len = unsafe { lighterage_stats(0, text.as_mut_ptr(), 3) };
    assert_eq!(
        (len, text.map(|c| c as u8)),
        (stats(0).len() + 1, [b'{', b'"', 0, 7])
    );
    // Invalid arguments have no effect.
    assert_eq!(
        [
            malloc(0, 0, 0),
            malloc(-5, 0, 0),
            malloc(1, -1, 0),
            malloc(1, 64, 0),
            malloc(isize::MAX, 1, 0)
        ],
        [0; 5]
    );
    free(0, 0);
    free(blocks[0], 0);
    free(12345, 63);
    assert_eq!(stats(-1), "");
}

#[test]
fn a_trace_is_recorded() {
    if !is_child() {
        let trace = directory("recorded").join("trace");
        again(
            "abi::a_trace_is_recorded",
            &[("MODE", Path::new("profile")), ("TRACE", &trace)],
        );
        let lines = "lighterage-trace 1\nphase fwd.0\nalloc 0 100 stream=0\nenter moe,\nalloc 1 3 \
            stream=1 dyn\nfree 0\n\
                     leave moe,\nalloc 2 5 stream=0\nphase _\nfree 1\nfree 2\n";
        assert_eq!(
            std::fs::read_to_string(trace).unwrap(),
            lines.replace("moe,", "moe_")
        );
        return;
    }
    // SAFETY: all are strings of C, or null.
    unsafe {
        // Nothing records yet.
        lighterage_phase(c"init".as_ptr());
        free(0, 0);
        lighterage_phase(c"fwd.0".as_ptr());
        let first = malloc(100, 0, 0);
        lighterage_enter(c"moe,".as_ptr(), 1);
        let second = malloc(3, 0, 4096);
        free(first, 0);
        free(first, 0);
        lighterage_leave(c"attention".as_ptr());
        lighterage_leave(c"moe,".as_ptr());
        let third = malloc(5, 0, 0);
        lighterage_phase(std::ptr::null());
        free(second, 0);
        free(third, 0);
        assert_eq!(stats(0), "");
    }
}

#[test]
fn what_is_wrong_is_told() {
    if is_child() {
        let address = malloc(100, 0, 0);
        eprintln!("{}", if address == 0 { "nothing" } else { "served" });
        free(address, 0);
        return;
    }
    let directory = directory("wrong");
    let plan = directory.join("plan");
    std::fs::write(&plan, "lighterage-plan 1\npool -1 512\n").unwrap();
    let path = Path::new;
    let cases: [(Settings<'_>, &str, &str); 9] = [
        (
            &[("PLAN", &plan)],
            "served",
            "plan: line 2: `-1` is not the pool's bytes",
        ),
        (
            &[("PLAN", path("/nowhere"))],
            "served",
            "/nowhere: No such file",
        ),
        (
            &[("MODE", path("plan"))],
            "nothing",
            "LIGHTERAGE_ALLOC_PLAN should name the plan",
        ),
        (
            &[("MODE", path("profile"))],
            "nothing",
            "LIGHTERAGE_ALLOC_TRACE should name the file",
        ),
        (
            &[("MODE", path("fast"))],
            "nothing",
            "LIGHTERAGE_ALLOC_MODE=fast is none of",
        ),
        (
            &[("CACHE", path("large"))],
            "nothing",
            "LIGHTERAGE_ALLOC_CACHE=large is neither segments nor expandable",
        ),
        (
            &[("CACHE", path("expandable"))],
            "served",
            "the device cannot map memory; the cache of device 0 has segments",
        ),
        (
            &[("POOL", path("tpu"))],
            "nothing",
            "LIGHTERAGE_ALLOC_POOL=tpu is neither cuda nor host",
        ),
        (
            &[
                ("POOL", path("cuda")),
                ("CUDA", path("/nowhere/libcuda.so")),
            ],
            "nothing",
            "/nowhere/libcuda.so: ",
        ),
    ];
    for (settings, result, message) in cases {
        let output = again("abi::what_is_wrong_is_told", settings);
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(
            told.contains(result) && told.contains("lighterage_alloc: ") && told.contains(message),
            "{told}"
        );
    }
}

unsafe extern "C" {
    fn fork() -> i32;
    fn waitpid(child: i32, status: *mut i32, options: i32) -> i32;
    fn alarm(seconds: u32) -> u32;
    fn exit(code: i32) -> !;
    fn _exit(code: i32) -> !;
}

/// Forks; the child runs `work` and ends by `end`. Returns the child's status, 0 if it ended well.
fn forked(work: impl FnOnce(), end: unsafe extern "C" fn(i32) -> !) -> i32 {
    // SAFETY: the child calls only functions that are allowed after a fork, and ends.
    unsafe {
        let child = fork();
        if child == 0 {
            // The signal ends a child that waits for a thread that it does not have.
            alarm(10);
            work();
            end(0);
        }
        let mut status = -1;
        waitpid(child, &mut status, 0);
        status
    }
}

#[test]
fn a_full_standard_error_ends_nobody() {
    if is_child() {
        assert_eq!(malloc(1 << 50, 0, 0), 0, "there is no such memory");
        assert_ne!(malloc(100, 0, 0), 0, "a small request is served after that");
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let full = std::fs::File::options().write(true).open("/dev/full");
    let status = command
        .args(["--exact", "abi::a_full_standard_error_ends_nobody"])
        .env("LIGHTERAGE_ALLOC_POOL", "host")
        .env("CHILD", "1")
        .stderr(full.unwrap())
        .status();
    assert!(status.unwrap().success());
}

#[test]
fn a_process_may_fork_while_others_ask() {
    if !is_child() {
        again("abi::a_process_may_fork_while_others_ask", &[]);
        return;
    }
    free(malloc(1, 0, 0), 0);
    static STOP: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
    let asking = std::thread::spawn(|| {
        while !STOP.load(std::sync::atomic::Ordering::Relaxed) {
            free(malloc(100_000, 0, 0), 0);
        }
    });
    for _ in 0..50 {
        assert_eq!(forked(|| free(malloc(5000, 0, 0), 0), _exit), 0);
    }
    STOP.store(true, std::sync::atomic::Ordering::Relaxed);
    asking.join().unwrap();
}

#[test]
fn a_forked_child_leaves_the_trace_alone() {
    if !is_child() {
        let trace = directory("forked").join("trace");
        let settings: Settings<'_> = &[("MODE", Path::new("profile")), ("TRACE", &trace)];
        again("abi::a_forked_child_leaves_the_trace_alone", settings);
        assert_eq!(
            std::fs::read_to_string(trace).unwrap(),
            "lighterage-trace 1\nalloc 0 100 stream=0\nalloc 1 7 stream=0\n"
        );
        return;
    }
    malloc(100, 0, 0);
    assert_eq!(forked(|| free(malloc(5000, 0, 0), 0), exit), 0);
    malloc(7, 0, 0);
}
