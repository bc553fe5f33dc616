//! The artifacts that `validate` refuses, and its messages.

use crate::common::*;
use artifact::*;
use lighterage_runtime::{Error, Machine, Options, validate};
use proptest::prelude::*;

fn refused(artifact: &Artifact) -> String {
    validate(artifact)
        .expect_err("the artifact should be refused")
        .to_string()
}

/// The artifact with a change.
fn with(change: impl FnOnce(&mut Artifact)) -> Artifact {
    let mut artifact = offloading();
    change(&mut artifact);
    artifact
}

/// The operands and results of the first launch.
fn first_launch(
    artifact: &mut Artifact,
) -> (&mut Vec<Operand>, &mut Vec<Operand>, &mut Option<Range>) {
    let launch = artifact
        .commands
        .iter_mut()
        .find_map(|command| match &mut command.kind {
            CommandKind::Launch {
                ins, outs, scratch, ..
            } => Some((ins, outs, scratch)),
            _ => None,
        });
    launch.unwrap()
}

#[test]
fn a_sound_artifact_passes() {
    validate(&offloading()).unwrap();
    validate(&Artifact::default()).unwrap();
}

/// `offloading` has only necessary waits, so losing any of them is a race, within the step or with
/// the next one.
#[test]
fn every_lost_wait_is_a_race() {
    let whole = offloading();
    let waits = |c: &Command| matches!(c.kind, CommandKind::Wait { .. });
    let mut told = Vec::new();
    for i in (0..whole.commands.len()).filter(|&i| waits(&whole.commands[i])) {
        let without = with(|a| drop(a.commands.remove(i)));
        told.push(refused(&without));
    }
    assert_eq!(told.len(), 4);
    assert_eq!(
        told[1],
        "invalid artifact: race: w -> w.host on d2h and the next step's w.host -> w on h2d both \
         touch bytes 64..128 of \
         pool host, one of them writes, and no event orders them"
    );
    assert!(told.iter().all(|t| t.contains("race: ")), "{told:#?}");
}

#[test]
fn a_race_of_partial_overlap_is_found() {
    let mut p = Plan::new(8, 0, &["a", "b"]);
    let mut wide = at(DEVICE, 2);
    wide.shape = vec![64];
    let mut from = at(DEVICE, 0);
    from.shape = vec![64];
    p.0.pools[0].bytes = 64 * 16;
    p.0.summary.planned_peak_bytes = 64 * 16;
    from.place.offset = 64 * 8;
    p.copy(0, "wide", "run", from, wide);
    p.copy(1, "narrow", "run", at(DEVICE, 4), at(DEVICE, 15));
    assert!(
        refused(&p.0).contains("race: wide on a and narrow on b both touch bytes 256..320"),
        "{}",
        refused(&p.0)
    );
}

#[test]
fn reads_do_not_race() {
    let mut p = Plan::new(3, 0, &["a", "b"]);
    p.run(
        0,
        "y",
        "add",
        &[at(DEVICE, 0), at(DEVICE, 0)],
        &[at(DEVICE, 1)],
    );
    p.run(
        1,
        "z",
        "add",
        &[at(DEVICE, 0), at(DEVICE, 0)],
        &[at(DEVICE, 2)],
    );
    p.input("x", at(DEVICE, 0));
    validate(&p.0).unwrap();
}

#[test]
fn places_outside_their_pools_are_refused() {
    let outside = with(|a| first_launch(a).0[0].place.offset = 256);
    assert_eq!(
        refused(&outside),
        "invalid artifact: line y: 64 bytes at 256 leave pool device, which has 256"
    );
    let odd = with(|a| first_launch(a).0[0].place.offset = 32);
    assert!(refused(&odd).contains("offset 32 in pool device is not a multiple of 64"));
    let no_pool = with(|a| first_launch(a).0[0].place.pool = 7);
    assert!(refused(&no_pool).contains("pool 7 of 2"));
    let wraps = with(|a| first_launch(a).0[0].place.offset = u64::MAX - 63);
    assert!(refused(&wraps).contains("leave pool device"));
    let huge = with(|a| first_launch(a).0[0].shape = vec![1 << 40, 1 << 40]);
    assert!(refused(&huge).contains("beyond any memory"));
    let hidden = with(|a| first_launch(a).0[0].shape = vec![1 << 40, 1 << 40, 0]);
    assert!(refused(&hidden).contains("beyond any memory"));
    let input = with(|a| a.inputs[0].operand.place.offset = 192);
    assert!(
        refused(&input).starts_with("invalid artifact: input x: 64 bytes at 192 leave pool host")
    );
}

#[test]
fn results_lie_on_operands_only_as_the_kernel_allows() {
    let shifted = with(|a| {
        let (ins, outs, _) = first_launch(a);
        for x in ins.iter_mut().chain(outs) {
            x.shape = vec![32];
        }
    });
    assert!(
        refused(&shifted).contains("result 0 overlaps operand 1"),
        "{}",
        refused(&shifted)
    );
    let scratch = with(|a| {
        *first_launch(a).2 = Some(Range {
            place: Place {
                pool: 0,
                offset: 128,
            },
            bytes: 64,
        })
    });
    assert!(
        refused(&scratch).contains("scratch"),
        "{}",
        refused(&scratch)
    );
    let copy = with(|a| {
        let CommandKind::Copy { dst, src, .. } = &mut a.commands[1].kind else {
            panic!()
        };
        *dst = *src;
    });
    assert!(refused(&copy).contains("line x: copies bytes onto themselves"));
}

#[test]
fn events_are_recorded_once_and_before_they_are_awaited() {
    let unrecorded = with(|a| a.events += 1);
    assert_eq!(
        refused(&unrecorded),
        "invalid artifact: event 3 is never recorded"
    );
    let twice = with(|a| {
        a.commands.push(Command {
            stream: 0,
            line: 0,
            kind: CommandKind::Record { event: 0 },
        })
    });
    assert_eq!(
        refused(&twice),
        "invalid artifact: line x: event 0 is recorded twice"
    );
    let early = with(|a| {
        let CommandKind::Wait { previous, .. } = &mut a.commands[0].kind else {
            panic!()
        };
        *previous = false;
    });
    assert_eq!(
        refused(&early),
        "invalid artifact: line x: waits for event 1 before it is recorded"
    );
}

#[test]
fn bindings_name_one_thing_each() {
    let again = with(|a| a.inputs.push(a.inputs[0].clone()));
    assert_eq!(refused(&again), "invalid artifact: two inputs are called x");
    let shared = with(|a| a.inputs[0].operand.place.offset = 64);
    assert_eq!(
        refused(&shared),
        "invalid artifact: x and w share bytes between steps"
    );
    let short = with(|a| a.data.truncate(63));
    assert_eq!(
        refused(&short),
        "invalid artifact: state w has 64 bytes and starts from 64 at 0 of 63 bytes of data"
    );
}

#[test]
fn a_summary_that_lies_is_refused() {
    let lies = with(|a| a.summary.planned_peak_bytes -= 64);
    assert_eq!(
        refused(&lies),
        "invalid artifact: its summary promises a peak of 192 bytes, the device pool has 256"
    );
}

#[test]
fn ops_without_a_kernel_are_unsupported() {
    let named = with(|a| {
        a.kernels[0] = Kernel {
            op: "extern".into(),
            attrs: vec![("name".into(), Attr::Str("aten.foo".into()))],
            code: None,
        };
    });
    assert_eq!(
        validate(&named).unwrap_err(),
        Error::Unsupported(
            "aten.foo (line y): there is no kernel, so only the program that compiled the step can \
             run it"
                .into()
        )
    );
    let types = with(|a| first_launch(a).0[0].dtype = DType::I32);
    assert!(refused(&types).starts_with("invalid artifact: line y: add: "));
}

/// One byte range for each command: a check that would take quadratic time ends.
#[test]
fn fragments_without_end_are_refused() {
    let n = 20_000;
    let mut p = Plan::new(n, 2 * n, &["a"]);
    for i in 0..n {
        p.copy(0, "piece", "run", at(HOST, i), at(DEVICE, i));
    }
    let mut all = at(DEVICE, 0);
    all.shape = vec![16 * n];
    let mut to = at(HOST, n);
    to.shape = all.shape.clone();
    for _ in 0..n {
        p.copy(0, "all", "run", all.clone(), to.clone());
    }
    assert!(refused(&p.0).contains("too fragmented"));
}

/// A number that a hostile file may have anywhere.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..8_u64,
        (0..8_u64).prop_map(|n| 64 * n),
        Just(u64::MAX),
        Just(u64::MAX - 63),
        Just(1 << 62),
        any::<u64>()
    ]
}

/// Changes one field.
fn mutate(a: &mut Artifact, what: usize, at: usize, n: u64) {
    fn pick<T>(v: &mut [T], at: usize) -> Option<&mut T> {
        let len = v.len();
        if len == 0 { None } else { v.get_mut(at % len) }
    }
    fn operand(x: &mut Operand, what: usize, at: usize, n: u64) {
        match what % 5 {
            0 => x.place.pool = n as u32,
            1 => x.place.offset = n,
            2 => {
                x.dtype = [
                    DType::F32,
                    DType::Bool,
                    DType::I64,
                    DType::BF16,
                    DType::F8E4M3,
                ][at % 5]
            }
            3 => x.shape.push(n),
            _ => x.shape.iter_mut().for_each(|d| *d = n),
        }
    }
    let (deeper, part) = (what / 11, at / 7);
    match what % 11 {
        0 if deeper % 4 == 3 => {
            let spaces = [
                MemorySpace::Device(0),
                MemorySpace::Device(1),
                MemorySpace::Host,
            ];
            let pool = pick(&mut a.pools, at);
            pool.into_iter()
                .for_each(|p| p.space = spaces[n as usize % 3]);
        }
        0 => pick(&mut a.pools, at).into_iter().for_each(|p| p.bytes = n),
        1 => a.events = n as u32,
        2 => drop((!a.commands.is_empty()).then(|| a.commands.remove(at % a.commands.len()))),
        3 => pick(&mut a.commands, at)
            .into_iter()
            .for_each(|c| c.stream = n as u32),
        4 => pick(&mut a.commands, at)
            .into_iter()
            .for_each(|c| c.line = n as u32),
        5 => {
            let (i, j) = (
                at % a.commands.len().max(1),
                n as usize % a.commands.len().max(1),
            );
            if !a.commands.is_empty() {
                a.commands.swap(i, j);
            }
        }
        6 | 7 => match pick(&mut a.commands, at).map(|c| &mut c.kind) {
            Some(CommandKind::Launch {
                kernel,
                ins,
                outs,
                scratch,
            }) => match deeper % 4 {
                0 => *kernel = n as u32,
                1 => pick(ins, part)
                    .into_iter()
                    .for_each(|x| operand(x, deeper / 4, part, n)),
                2 => pick(outs, part)
                    .into_iter()
                    .for_each(|x| operand(x, deeper / 4, part, n)),
                _ => {
                    *scratch = Some(Range {
                        place: Place {
                            pool: n as u32 % 3,
                            offset: n,
                        },
                        bytes: n,
                    })
                }
            },
            Some(CommandKind::Copy { src, dst, bytes }) => match deeper % 5 {
                0 => src.offset = n,
                1 => dst.offset = n,
                2 => src.pool = n as u32,
                3 => dst.pool = n as u32,
                _ => *bytes = n,
            },
            Some(CommandKind::Record { event }) => *event = n as u32,
            Some(CommandKind::Wait { event, previous }) => match deeper % 2 {
                0 => *event = n as u32,
                _ => *previous = !*previous,
            },
            None => {}
        },
        8 => pick(&mut a.inputs, at)
            .into_iter()
            .for_each(|b| operand(&mut b.operand, deeper, part, n)),
        9 => pick(&mut a.outputs, at)
            .into_iter()
            .for_each(|b| operand(&mut b.operand, deeper, part, n)),
        _ => match pick(&mut a.states, at) {
            Some(state) if deeper % 3 == 0 => state.initial = Initial::Data { start: n, bytes: n },
            Some(state) => operand(&mut state.operand, deeper / 3, part, n),
            None => {}
        },
    }
}

/// An object for a CPU has functions that one thread calls; only GPUs have blocks of threads.
#[test]
fn a_kernel_is_launched_as_its_target_can() {
    let with = |threads, shared_bytes| {
        let mut artifact = offloading();
        let ty = Type {
            dtype: DType::F32,
            shape: vec![16],
        };
        artifact.kernels[0].code = Some(Code {
            object: 0,
            phases: vec![Phase {
                symbol: "k".into(),
                parts: 1,
                threads,
                shared_bytes,
            }],
            ins: vec![ty.clone(), ty.clone()],
            outs: vec![ty],
            inplace: vec![],
            scratch: 0,
        });
        artifact.objects = vec![Object {
            target: Target::Cpu(Cpu::X86_64V3),
            bytes: vec![],
        }];
        validate(&artifact).map_err(|e| e.to_string())
    };
    assert_eq!(with(1, 0), Ok(()));
    for (threads, shared) in [(0, 0), (128, 0), (1, 64)] {
        assert_eq!(
            with(threads, shared),
            Err(format!(
                "invalid artifact: line y: k has {threads} threads in a part and {shared} shared \
                 bytes, which x86-64-v3 has not"
            ))
        );
    }
}

// --- code for a GPU ---

/// `offloading` with kernels for a GPU, which are a function each, and something changed.
fn on_gpu(sm: u32, change: impl FnOnce(&mut Artifact)) -> Artifact {
    with(|artifact| {
        let ty = Type {
            dtype: DType::F32,
            shape: vec![16],
        };
        for kernel in &mut artifact.kernels {
            kernel.code = Some(Code {
                object: 0,
                phases: vec![Phase {
                    symbol: "k".into(),
                    parts: 1,
                    threads: 128,
                    shared_bytes: 0,
                }],
                ins: vec![ty.clone(), ty.clone()],
                outs: vec![ty.clone()],
                inplace: vec![(0, 0), (1, 0)],
                scratch: 0,
            });
        }
        artifact.objects = vec![Object {
            target: Target::Gpu(Sm(sm)),
            bytes: vec![],
        }];
        change(artifact);
    })
}

#[test]
fn a_gpus_kernel_is_launched_as_one_can() {
    let with = |sm, parts, threads, shared_bytes| {
        let artifact = on_gpu(sm, |artifact| {
            let code = artifact.kernels[0].code.as_mut().unwrap();
            code.phases[0].parts = parts;
            code.phases[0].threads = threads;
            code.phases[0].shared_bytes = shared_bytes;
        });
        validate(&artifact).map_err(|e| e.to_string())
    };
    let most_blocks = (1 << 31) - 1;
    assert_eq!(with(90, 1, 1, 0), Ok(()));
    assert_eq!(with(90, most_blocks, 1024, 227 << 10), Ok(()));
    let refused = |said: &str| Err(format!("invalid artifact: line y: k has {said}"));
    let threads = |n: u32| refused(&format!("{n} threads in a block; a GPU has 1 to 1024"));
    assert_eq!(with(90, 1, 0, 0), threads(0));
    assert_eq!(with(90, 1, 1025, 0), threads(1025));
    let blocks = |n: u64| refused(&format!("{n} blocks; a GPU starts 1 to {most_blocks}"));
    assert_eq!(with(90, 0, 128, 0), blocks(0));
    assert_eq!(with(90, most_blocks + 1, 128, 0), blocks(most_blocks + 1));
    let shared = |sm, most: u32| {
        let text = format!("{} shared bytes in a block; sm_{sm} has {most}", most + 1);
        (with(sm, 1, 128, most), with(sm, 1, 128, most + 1)) == (Ok(()), refused(&text))
    };
    assert!(shared(90, 227 << 10) && shared(80, 163 << 10) && shared(89, 99 << 10));
}

/// Kernels for a GPU have all their tensors there, and kernels for the processor none; copies may
/// go any way, but to no second GPU.
#[test]
fn tensors_lie_where_their_kernel_runs() {
    let place = |pool| Place {
        pool,
        offset: 64 * 3,
    };
    let larger = |artifact: &mut Artifact| artifact.pools[HOST as usize].bytes = 64 * 6;
    let on_host = |change: &dyn Fn(&mut Artifact)| {
        refused(&on_gpu(90, |artifact| {
            larger(artifact);
            change(artifact);
        }))
    };
    let text = "invalid artifact: line y: add runs on the GPU, and a tensor of it lies in pool \
                host, on the host";
    assert_eq!(on_host(&|a| first_launch(a).0[1].place = place(HOST)), text);
    assert_eq!(on_host(&|a| first_launch(a).1[0].place = place(HOST)), text);
    let scratch = Range {
        place: place(HOST),
        bytes: 64,
    };
    assert_eq!(on_host(&|a| *first_launch(a).2 = Some(scratch)), text);
    // The processor's own kernel, and a generated one.
    let text = "invalid artifact: line y: add has no code for the GPU, and a tensor of it lies in \
                pool device, on the device";
    assert_eq!(on_host(&|a| a.kernels[0].code = None), text);
    let generated = |a: &mut Artifact| {
        a.objects.push(Object {
            target: Target::Cpu(Cpu::X86_64V3),
            bytes: vec![],
        });
        let code = a.kernels[0].code.as_mut().unwrap();
        code.object = 1;
        code.phases[0].threads = 1;
    };
    assert_eq!(on_host(&generated), text);

    // A kernel of the processor on the host's tensors, and a copy from the host to itself.
    let both = on_gpu(90, |artifact| {
        larger(artifact);
        let mut plan = Plan(std::mem::take(artifact));
        let (x, y) = (at(HOST, 3), at(HOST, 4));
        plan.input("z", x.clone());
        plan.run(3, "u", "add", &[x.clone(), x], std::slice::from_ref(&y));
        plan.copy(3, "u -> v", "copy", y, at(HOST, 5));
        *artifact = plan.0;
        artifact.streams.push("host".into());
    });
    validate(&both).unwrap();
    let elsewhere = on_gpu(90, |artifact| {
        artifact.pools[1].space = MemorySpace::Device(1)
    });
    assert_eq!(
        refused(&elsewhere),
        "unsupported: pool host is in the memory of device 1; one GPU runs a step, device 0"
    );
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 3000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Any file gives an error, or a machine that runs. Threaded and shuffled runs then agree: an
    /// accepted plan does not depend on timing.
    #[test]
    fn hostile_artifacts_are_refused_or_run(
        changes in prop::collection::vec((any::<usize>(), any::<usize>(), number()), 0..4),
    ) {
        let mut artifact = offloading();
        for (what, at, n) in changes {
            mutate(&mut artifact, what, at, n);
        }
        let device = artifact.pool_in(MemorySpace::Device(0));
        artifact.summary.planned_peak_bytes = device.map_or(0, |pool| pool.bytes);
        let small = artifact.pools.iter().all(|pool| pool.bytes <= 1 << 20);
        if validate(&artifact).is_ok() && small {
            let run = |shuffle| -> Option<Vec<Vec<u8>>> {
                let mut machine = Machine::new(
                    artifact.clone(),
                    Options {
                        shuffle,
                        ..Options::default()
                    },
                )
                .unwrap();
                for step in 0..3 {
                    for input in &artifact.inputs {
                        let bytes = input.operand.bytes().unwrap() as usize;
                        machine
                            .write_input(&input.name, &vec![step; bytes])
                            .unwrap();
                    }
                    machine.step().ok()?;
                }
                Some(
                    artifact
                        .outputs
                        .iter()
                        .map(|o| machine.read_output(&o.name).unwrap())
                        .collect(),
                )
            };
            let threaded = run(None);
            for seed in 0..3 {
                let shuffled = run(Some(seed));
                prop_assert_eq!(threaded.is_some(), shuffled.is_some());
                // Equal unless the plan reads unwritten bytes.
                let nan = shuffled.iter().flatten().any(|o| {
                    o.chunks(4).any(|w| {
                        w == [0xFF; 4] || w == [0, 0, 0xC0, 0x7F] || w == [0xFF, 0xFF, 0xFF, 0x7F]
                    })
                });
                if !nan {
                    prop_assert_eq!(&threaded, &shuffled);
                }
            }
        }
    }
}

// --- what is read was written ---

/// A step that adds an input to `w`, with one result.
fn adding() -> Plan {
    let mut p = Plan::new(4, 0, &["compute"]);
    let (x, w, y) = (at(DEVICE, 0), at(DEVICE, 1), at(DEVICE, 2));
    p.input("x", x.clone());
    p.state("w", StateKind::Param, w.clone(), Initial::Zeros);
    p.run(0, "y", "add", &[x, w], std::slice::from_ref(&y));
    p.output("y", y);
    p
}

#[test]
fn reads_of_bytes_that_nobody_wrote_are_refused() {
    validate(&adding().0).unwrap();
    let mut p = adding();
    p.run(
        0,
        "z",
        "add",
        &[at(DEVICE, 0), at(DEVICE, 3)],
        &[at(DEVICE, 0)],
    );
    let told = refused(&p.0);
    assert!(
        told.contains("line z: reads bytes 192..256 of pool device"),
        "{told}"
    );
    assert!(told.contains("nothing has written byte 192"), "{told}");

    let mut p = adding();
    p.output("z", at(DEVICE, 3));
    assert!(refused(&p.0).contains("output z after the step: reads bytes 192..256"));
}

/// A copy moves unwritten bytes too, so buffers may be copied with their padding.
#[test]
fn copies_are_as_written_as_their_source() {
    let mut wide = at(DEVICE, 2);
    wide.shape = vec![32];
    let with = |read: Operand| {
        let mut p = adding();
        p.0.pools[0].bytes = 64 * 16;
        p.0.summary.planned_peak_bytes = 64 * 16;
        p.copy(0, "c", "run", wide.clone(), at(DEVICE, 8));
        p.run(0, "z", "add", &[read.clone(), read], &[at(DEVICE, 12)]);
        p.0
    };
    validate(&with(at(DEVICE, 8))).unwrap();
    assert!(refused(&with(at(DEVICE, 9))).contains("nothing has written byte 576"));
}

#[test]
fn scratch_is_no_value_in_this_step_or_the_next() {
    let scratch_at = |p: &mut Plan, place: u64| {
        let last = p.0.commands.last_mut().unwrap();
        let CommandKind::Launch { scratch, .. } = &mut last.kind else {
            unreachable!("the last command should be a launch");
        };
        *scratch = Some(Range {
            place: at(DEVICE, place).place,
            bytes: 64,
        });
    };
    // Over a value that a later line reads.
    let mut p = adding();
    p.0.pools[0].bytes = 64 * 8;
    p.0.summary.planned_peak_bytes = 64 * 8;
    p.run(
        0,
        "a",
        "add",
        &[at(DEVICE, 0), at(DEVICE, 0)],
        &[at(DEVICE, 3)],
    );
    scratch_at(&mut p, 2);
    assert!(
        refused(&p.0).contains("output y after the step"),
        "{}",
        refused(&p.0)
    );
    // Over a state, which the next step reads.
    scratch_at(&mut p, 1);
    assert!(
        refused(&p.0).contains("state w after the step"),
        "{}",
        refused(&p.0)
    );
    // Over bytes without a value.
    scratch_at(&mut p, 5);
    validate(&p.0).unwrap();
}

// --- summaries, work, workspaces ---

#[test]
fn summaries_that_cannot_be_counted_with_are_refused() {
    for (n, fits) in [
        (0, true),
        (1, true),
        (2, false),
        (3, false),
        (u64::MAX, false),
    ] {
        let artifact = with(|a| a.summary.micro_batches = n);
        assert_eq!(validate(&artifact).is_ok(), fits, "{n}");
    }
    let told = refused(&with(|a| a.summary.micro_batches = 2));
    assert!(
        told.contains("promises 2 micro-batches, and its 1 inputs are not theirs"),
        "{told}"
    );
    for ms in [f64::NAN, f64::INFINITY, -1.0] {
        let told = refused(&with(|a| a.summary.predicted_ms = ms));
        assert!(told.contains("its summary promises a step of"), "{told}");
    }
}

#[test]
fn micro_batches_are_inputs_of_equal_types_in_order() {
    let with_names = |names: [&str; 5], n: u64| {
        let mut p = Plan::new(8, 0, &["compute"]);
        for (i, name) in names.into_iter().enumerate() {
            p.input(name, at(DEVICE, i as u64));
        }
        p.0.summary.micro_batches = n;
        p.0
    };
    let names = ["x.0", "y.0", "x.1", "y.1", OPTIMIZER_INPUT];
    validate(&with_names(names, 2)).unwrap();
    let mut other_type = with_names(names, 2);
    other_type.inputs[2].operand.dtype = DType::I32;
    assert!(validate(&other_type).is_err());
    for names in [
        ["x.0", "x.1", "y.0", "y.1", OPTIMIZER_INPUT],
        ["x.0", "y.0", "x.1", "z.1", OPTIMIZER_INPUT],
        ["x.0", "y.0", "x.1", "y.1", "z"],
    ] {
        assert!(validate(&with_names(names, 2)).is_err(), "{names:?}");
    }
}

/// A launch of one op on tensors of these shapes at the start of a pool.
fn launch(op: &str, attrs: &[(&str, Attr)], ins: &[(DType, &[u64])], out: &[u64]) -> Artifact {
    let mut p = Plan::new(1, 0, &["compute"]);
    let operand = |&(dtype, shape): &(DType, &[u64])| Operand {
        place: at(DEVICE, 0).place,
        dtype,
        shape: shape.to_vec(),
    };
    let ins: Vec<Operand> = ins.iter().map(operand).collect();
    let outs = match op {
        "sdpa" => vec![(DType::F32, out), (DType::F32, &out[..3])],
        _ => vec![(DType::F32, out)],
    };
    let outs: Vec<Operand> = outs.iter().map(operand).collect();
    p.run(0, op, op, &ins, &outs);
    p.0.kernels[0].attrs = attrs
        .iter()
        .map(|(k, v)| (k.to_string(), v.clone()))
        .collect();
    p.0
}

/// These would run for years, or need terabytes for a thread.
#[test]
fn small_files_ask_for_no_endless_work_and_no_endless_workspace() {
    use DType::F32;
    let dim = [("dim", Attr::Int(1))];
    for op in ["softmax", "log_softmax"] {
        let lines = [1 << 40, 0];
        let told = refused(&launch(op, &dim, &[(F32, &lines)], &lines));
        assert!(told.contains("is too large"), "{told}");
        let few = [1 << 20, 0];
        validate(&launch(op, &dim, &[(F32, &few)], &few)).unwrap();
    }

    let attention = |width: u64| {
        let attrs = [("causal", Attr::Bool(false)), ("scale", Attr::Float(1.0))];
        let (q, k, v) = ([0, 1, 1, width], [0, 1, 512, width], [0, 1, 512, 16]);
        let ins: [(DType, &[u64]); 3] = [(F32, &q), (F32, &k), (F32, &v)];
        launch("sdpa", &attrs, &ins, &[0, 1, 1, 16])
    };
    assert!(validate(&attention(1 << 40)).is_err());
    assert!(refused(&attention(1 << 18)).contains("wider than 65536"));
    validate(&attention(1 << 10)).unwrap();

    let index_put = |n: u64| {
        let mut p = Plan::new(4, 0, &["compute"]);
        p.0.pools[0].bytes = 256 + 16 * n;
        p.0.summary.planned_peak_bytes = 256 + 16 * n;
        let operand = |offset: u64, dtype, shape: &[u64]| Operand {
            place: Place { pool: 0, offset },
            dtype,
            shape: shape.to_vec(),
        };
        let ins = [
            operand(0, F32, &[1, 1]),
            operand(64, F32, &[1]),
            operand(256, DType::I64, &[n, 1]),
            operand(256 + 8 * n, DType::I64, &[1, n]),
        ];
        let names = ["x", "v", "i", "j"];
        names
            .iter()
            .zip(&ins)
            .for_each(|(name, x)| p.input(name, x.clone()));
        p.run(0, "put", "index_put", &ins, &[operand(128, F32, &[1, 1])]);
        p.0.kernels[0].attrs = vec![("accumulate".into(), Attr::Bool(false))];
        p.0
    };
    assert!(refused(&index_put(1 << 18)).contains("the indexed tensor is too large"));
    validate(&index_put(1 << 10)).unwrap();
}
