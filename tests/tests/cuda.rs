//! The runtime's part for GPUs on a library in the driver's place (`standin`), which finds what a
//! GPU would do silently wrong: here by hand, through streams and events, and in `machine` by whole
//! steps.

mod answers;
mod hostile;
mod joined;
mod machine;
mod models;
mod products;
mod sharing;
mod steps;
mod traced;
mod updates;
mod watched;

use runtime::cuda::{
    Arguments, Device, DeviceBlock, Driver, DriverError, Event, Grid, Module, ModuleError, Pinned,
    Priority, Staging, Status, Stream,
};
use standin::{Options, Standin};
use std::collections::BTreeSet;

/// Numbers of a tensor.
const N: usize = 64;
/// Its bytes.
const BYTES: u64 = 4 * N as u64;
const STEPS: usize = 20;

/// `c = a + b`, a thread for each number.
const ADD: &str = "
.version 8.0
.target sm_90
.address_size 64

.visible .entry add(
	.param .u64 .ptr .align 1 add_param_0,
	.param .u64 .ptr .align 1 add_param_1,
	.param .u64 .ptr .align 1 add_param_2
)
{
	.reg .b32 	%r<5>;
	.reg .f32 	%f<4>;
	.reg .b64 	%rd<8>;

	ld.param.b64 	%rd1, [add_param_0];
	ld.param.b64 	%rd2, [add_param_1];
	ld.param.b64 	%rd3, [add_param_2];
	mov.u32 	%r1, %ctaid.x;
	mov.u32 	%r2, %ntid.x;
	mov.u32 	%r3, %tid.x;
	mad.lo.s32 	%r4, %r1, %r2, %r3;
	mul.wide.s32 	%rd4, %r4, 4;
	add.s64 	%rd5, %rd1, %rd4;
	add.s64 	%rd6, %rd2, %rd4;
	add.s64 	%rd7, %rd3, %rd4;
	ld.global.b32 	%f1, [%rd5];
	ld.global.b32 	%f2, [%rd6];
	add.rn.f32 	%f3, %f1, %f2;
	st.global.b32 	[%rd7], %f3;
	ret;
}
";

/// What a run leaves out or does wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mutant {
    None,
    /// The host writes an input before the last copy from there is done.
    HostBeforeCopyIn,
    CopyInBeforeKernels,
    KernelsBeforeCopyIn,
    KernelsBeforeCopyOut,
    CopyOutBeforeKernels,
    /// The host reads before the copies to there are done.
    HostBeforeCopyOut,
    ShiftedOperand,
    ShiftedResult,
    FewerBlocks,
    NoCopy,
}

const MUTANTS: [Mutant; 10] = [
    Mutant::HostBeforeCopyIn,
    Mutant::CopyInBeforeKernels,
    Mutant::KernelsBeforeCopyIn,
    Mutant::KernelsBeforeCopyOut,
    Mutant::CopyOutBeforeKernels,
    Mutant::HostBeforeCopyOut,
    Mutant::ShiftedOperand,
    Mutant::ShiftedResult,
    Mutant::FewerBlocks,
    Mutant::NoCopy,
];

fn options(seed: u64) -> Options {
    Options {
        seed,
        ..Options::default()
    }
}

fn device(standin: &Standin) -> Result<Device, DriverError> {
    Device::new(Driver::open(Some(standin.path()))?, 0)
}

fn bytes(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// What step `step` reads: whole numbers, so that sums are exact.
fn input(step: usize) -> Vec<f32> {
    (0..N).map(|i| ((i * 7 + step * 3) % 32) as f32).collect()
}

/// The results of each step: `y = x + w`, then `w = w + x`, from `w` of ones.
fn expected(steps: usize) -> Vec<u8> {
    let mut w = vec![1.0; N];
    let mut all = vec![];
    for step in 1..=steps {
        let x = input(step);
        all.extend(bytes(x.iter().zip(&w).map(|(x, w)| x + w)));
        w.iter_mut().zip(&x).for_each(|(w, x)| *w += x);
    }
    all
}

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Module(#[from] ModuleError),
}

/// Streams, each event twice: for even steps and for odd ones.
struct Queues {
    h2d: Stream,
    compute: Stream,
    d2h: Stream,
    arrived: [Event; 2],
    computed: [Event; 2],
    left: [Event; 2],
}

impl Queues {
    fn new(device: &Device) -> Result<Queues, DriverError> {
        let pair = || Ok::<_, DriverError>([device.event()?, device.event()?]);
        Ok(Queues {
            h2d: device.stream(Priority::High)?,
            compute: device.stream(Priority::Usual)?,
            d2h: device.stream(Priority::High)?,
            arrived: pair()?,
            computed: pair()?,
            left: pair()?,
        })
    }
}

/// Copies inputs in, computes, copies results out, all of it overlapping as far as events permit;
/// the results of all steps.
fn run(standin: &Standin, steps: usize, mutant: Mutant) -> Result<Vec<u8>, Failure> {
    let device = device(standin)?;
    let module = Module::load(&device, ADD.as_bytes())?;
    let add = module.function("add", 0)?;
    let block = DeviceBlock::new(&device, 3 * BYTES)?;
    let [x, w, y] = [0, 1, 2].map(|i| block.range(i * BYTES, BYTES));
    Staging::new(&device, 100)?.write(w, &bytes([1.0; N]))?;

    let queues = Queues::new(&device)?;
    let mut inputs = Pinned::new(&device, 2 * BYTES as usize)?;
    let mut results = Pinned::new(&device, steps * BYTES as usize)?;
    let shifted = |address: u64, on: Mutant| address + if mutant == on { 4 } else { 0 };
    let first = Arguments::new([
        shifted(x.address(), Mutant::ShiftedOperand),
        w.address(),
        shifted(y.address(), Mutant::ShiftedResult),
    ]);
    let second = Arguments::new([w.address(), x.address(), w.address()]);
    let grid = Grid {
        blocks: if mutant == Mutant::FewerBlocks { 1 } else { 2 },
        threads: N as u32 / 2,
        shared_bytes: 0,
    };
    for step in 1..=steps {
        let (now, before) = (step % 2, (step + 1) % 2);
        // An input's place is used by every second step.
        if step > 2 && mutant != Mutant::HostBeforeCopyIn {
            queues.arrived[now].synchronize()?;
        }
        let at = now * BYTES as usize;
        standin.host_access((inputs.address() + at) as u64, BYTES, true);
        inputs.write(at, &bytes(input(step)));

        if step > 1 && mutant != Mutant::CopyInBeforeKernels {
            queues.h2d.wait(&queues.computed[before])?;
        }
        if mutant != Mutant::NoCopy || step != 1 {
            inputs.copy_in(&queues.h2d, at, x)?;
        }
        queues.h2d.record(&queues.arrived[now])?;

        if mutant != Mutant::KernelsBeforeCopyIn {
            queues.compute.wait(&queues.arrived[now])?;
        }
        if step > 1 && mutant != Mutant::KernelsBeforeCopyOut {
            queues.compute.wait(&queues.left[before])?;
        }
        queues.compute.launch(&add, grid, &first)?;
        queues.compute.launch(&add, grid, &second)?;
        queues.compute.record(&queues.computed[now])?;

        if mutant != Mutant::CopyOutBeforeKernels {
            queues.d2h.wait(&queues.computed[now])?;
        }
        results.copy_out(&queues.d2h, (step - 1) * BYTES as usize, y)?;
        queues.d2h.record(&queues.left[now])?;
    }
    if mutant != Mutant::HostBeforeCopyOut {
        queues.left[steps % 2].synchronize()?;
    }
    let mut found = vec![0; steps * BYTES as usize];
    standin.host_access(results.address() as u64, found.len() as u64, false);
    results.read(0, &mut found);
    Ok(found)
}

#[test]
fn steps_overlap_and_their_numbers_are_right() {
    for seed in 0..5 {
        let standin = Standin::new(&options(seed)).unwrap();
        let found = run(&standin, STEPS, Mutant::None).unwrap();
        assert_eq!(standin.findings(), Vec::<String>::new(), "seed {seed}");
        assert!(found == expected(STEPS), "seed {seed}");
        let facts = standin.facts();
        assert_eq!((facts.exist, facts.device_bytes), (0, 0), "all is freed");
        assert_eq!(facts.touched_bytes, 3 * BYTES);
        assert_eq!(standin.calls_of("cuMemAlloc_v2"), 1);
    }
}

#[test]
fn every_mutant_is_found_at_every_seed() {
    for mutant in MUTANTS {
        for seed in 0..5 {
            let standin = Standin::new(&options(seed)).unwrap();
            let right = match run(&standin, STEPS, mutant) {
                Ok(found) => found == expected(STEPS),
                Err(_) => false,
            };
            let findings = standin.findings();
            assert!(!right || !findings.is_empty(), "{mutant:?}, seed {seed}");
            // What is not ordered is found even if it came out right.
            let orders = [
                Mutant::ShiftedOperand,
                Mutant::ShiftedResult,
                Mutant::FewerBlocks,
                Mutant::NoCopy,
            ];
            if !orders.contains(&mutant) {
                assert!(!findings.is_empty(), "{mutant:?}, seed {seed}");
            }
        }
    }
}

/// Each call in turn returns each status: an error that names it, no panic, no hang. After a fatal
/// one nothing is called; after another one everything is freed.
#[test]
fn each_call_that_fails_is_an_error() {
    let standin = Standin::new(&options(1)).unwrap();
    const FEW: usize = 3;
    run(&standin, FEW, Mutant::None).unwrap();
    let all = standin.facts().calls;
    for (status, name, is_fatal) in [
        (1, "CUDA_ERROR_INVALID_VALUE", false),
        (2, "CUDA_ERROR_OUT_OF_MEMORY", false),
        (700, "CUDA_ERROR_ILLEGAL_ADDRESS", true),
        (719, "CUDA_ERROR_LAUNCH_FAILED", true),
        (214, "CUDA_ERROR_ECC_UNCORRECTABLE", true),
        (4242, "a status without a name (4242)", true),
    ] {
        let mut calls = BTreeSet::new();
        for (fail_at, sticky) in (1..=all).flat_map(|n| [(n, 0), (n, 1)]) {
            standin.reset(&Options {
                fail_at,
                fail_with: status,
                sticky,
                ..options(1)
            });
            let found = run(&standin, FEW, Mutant::None);
            let facts = standin.facts();
            let case = format!("{name}, call {fail_at} of {all}, sticky {sticky}");
            match found {
                Ok(found) => assert!(found == expected(FEW), "{case}: it was while freeing"),
                Err(error) => {
                    let text = error.to_string();
                    assert!(text.contains(name), "{case}: {text}");
                    calls.insert(text.split(':').next().unwrap_or("").to_string());
                    if !is_fatal && sticky == 0 {
                        assert_eq!((facts.exist, facts.device_bytes), (0, 0), "{case}: {text}");
                    }
                }
            }
            if is_fatal {
                // The first calls come before there is a context that could be dead.
                assert!(facts.calls == fail_at, "{case}: {} calls", facts.calls);
            }
        }
        // Every function that a run needs was the one that failed.
        assert!(calls.len() > 20, "{name}: {calls:?}");
    }
}

#[test]
fn staging_moves_any_number_of_bytes() {
    let standin = Standin::new(&options(3)).unwrap();
    let device = device(&standin).unwrap();
    let block = DeviceBlock::new(&device, 4096).unwrap();
    let mut staging = Staging::new(&device, 64).unwrap();
    for n in [0, 1, 63, 64, 65, 128, 129, 1000, 4000] {
        let sent: Vec<u8> = (0..n).map(|i| (i % 251) as u8).collect();
        let range = block.range(96, n as u64);
        staging.write(range, &sent).unwrap();
        let mut back = vec![0; n];
        staging.read(range, &mut back).unwrap();
        assert!(back == sent, "{n} bytes");
    }
    staging.fill(block.range(0, 4096), 7).unwrap();
    let mut back = vec![0; 4096];
    staging.read(block.range(0, 4096), &mut back).unwrap();
    assert!(back.iter().all(|&byte| byte == 7));
    assert_eq!(standin.findings(), Vec::<String>::new());
}

#[test]
fn a_kernels_fault_is_the_last_call() {
    let standin = Standin::new(&options(1)).unwrap();
    let device = device(&standin).unwrap();
    let module = Module::load(&device, ADD.as_bytes()).unwrap();
    let add = module.function("add", 0).unwrap();
    let block = DeviceBlock::new(&device, BYTES).unwrap();
    let stream = device.stream(Priority::Usual).unwrap();
    let grid = Grid {
        blocks: 1,
        threads: 32,
        shared_bytes: 0,
    };
    let address = block.range(0, BYTES).address();
    let outside = Arguments::new([address, address, address + BYTES]);
    // The call that returns it is that one or a later one.
    let failed = stream
        .launch(&add, grid, &outside)
        .and_then(|()| stream.synchronize())
        .unwrap_err();
    assert_eq!(failed.status(), Some(Status(719)));
    assert_eq!(device.alive(), Err(failed.clone()));
    let calls = standin.facts().calls;
    assert_eq!(stream.synchronize(), Err(failed.clone()));
    assert_eq!(device.memory(), Err(failed.clone()));
    drop((stream, block, add, module, device));
    assert_eq!(standin.facts().calls, calls);
    assert_eq!(
        failed.to_string().split_once(": ").unwrap().1,
        "CUDA_ERROR_LAUNCH_FAILED (719), unspecified launch failure"
    );
}

#[test]
fn modules_say_what_is_wrong_with_them() {
    let standin = Standin::new(&Options {
        sm: 80,
        ..options(1)
    })
    .unwrap();
    let device = device(&standin).unwrap();
    assert_eq!((device.sm(), device.driver_version()), (80, 13000));
    assert_eq!(
        (device.name(), device.shared_bytes()),
        ("stand-in", 163 << 10)
    );
    let refused = |ptx: &[u8]| Module::load(&device, ptx).unwrap_err().to_string();
    assert_eq!(
        refused(ADD.as_bytes()),
        "cuModuleLoadDataEx: CUDA_ERROR_INVALID_PTX (218), a PTX JIT compilation failed; the PTX \
         is for sm_90, the device is sm_80"
    );
    assert_eq!(refused(b"a\0b"), "is no PTX: a zero byte is in it");
    let module = Module::load(&device, ADD.replace("sm_90", "sm_80").as_bytes()).unwrap();
    let function = |name: &str, shared| module.function(name, shared).map(|f| f.most_threads());
    assert_eq!(function("add", 163 << 10), Ok(1024));
    let refused = |name, shared| function(name, shared).unwrap_err().to_string();
    assert!(refused("sub", 0).starts_with("cuModuleGetFunction: CUDA_ERROR_NOT_FOUND"));
    assert!(refused("add", (163 << 10) + 1).starts_with("cuFuncSetAttribute: CUDA_ERROR_INVALID"));
    assert!(refused("add", u32::MAX).contains("more than any device has"));
    assert!(refused("a\0", 0).contains("no kernel's name"));
}

#[test]
fn memory_that_is_not_there_is_an_error_and_the_device_goes_on() {
    let standin = Standin::new(&Options {
        device_bytes: 4096,
        ..options(1)
    })
    .unwrap();
    let device = device(&standin).unwrap();
    assert_eq!(device.memory(), Ok((4096, 4096)));
    let error = DeviceBlock::new(&device, 4097).unwrap_err();
    assert_eq!(error.status(), Some(Status::OUT_OF_MEMORY));
    let block = DeviceBlock::new(&device, 4096).unwrap();
    assert_eq!((block.bytes(), device.memory()), (4096, Ok((0, 4096))));
    drop(block);
    assert_eq!(device.memory(), Ok((4096, 4096)));
    // A block without bytes is none.
    assert_eq!(DeviceBlock::new(&device, 0).unwrap().bytes(), 0);
    assert_eq!(standin.calls_of("cuMemAlloc_v2"), 2);
}

/// A thread uses the device once it is bound to it; what was made of the device outlives it, and is
/// freed on any thread.
#[test]
fn threads_are_bound_to_a_device() {
    let standin = Standin::new(&options(1)).unwrap();
    let device = device(&standin).unwrap();
    let stream = device.stream(Priority::Usual).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let error = stream.synchronize().unwrap_err();
            assert_eq!(error.status(), Some(Status(201)));
            device.bind().unwrap();
            stream.synchronize().unwrap();
        });
    });
    drop(device);
    std::thread::spawn(move || drop(stream)).join().unwrap();
    assert_eq!(standin.facts().exist, 0);
    assert_eq!(standin.calls_of("cuDevicePrimaryCtxRelease_v2"), 1);
}

/// Another library of the process, such as PyTorch, may have made the context before.
#[test]
fn a_context_that_is_there_keeps_its_flags() {
    let standin = Standin::new(&options(1)).unwrap();
    drop(device(&standin).unwrap());
    let all = standin.facts().calls;
    let works = |fail_at: u64, status: Status| {
        standin.reset(&Options {
            fail_at,
            fail_with: status.0 as u32,
            sticky: 0,
            ..options(1)
        });
        device(&standin).is_ok()
    };
    let mut differ = (1..=all).filter(|&call| {
        let [kept, other] = [Status::CONTEXT_IS_ACTIVE, Status::INVALID_VALUE];
        works(call, kept) != works(call, other)
    });
    let call = differ
        .next()
        .expect("the call that sets the flags may fail so");
    assert!(works(call, Status::CONTEXT_IS_ACTIVE) && differ.next().is_none());
}

#[test]
fn memory_says_who_can_use_its_addresses() {
    for unified in [0, 1] {
        let standin = Standin::new(&Options {
            unified,
            ..options(1)
        })
        .unwrap();
        let device = device(&standin).unwrap();
        let block = DeviceBlock::new(&device, BYTES).unwrap();
        assert_eq!(block.is_of_host(), unified == 1);
        let range = block.range(0, BYTES);
        assert!(range.address().is_multiple_of(256) && device.knows(range).unwrap());
        drop(block);
        assert!(!device.knows(range).unwrap(), "it was freed");
    }
}
