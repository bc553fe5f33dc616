//! Attention's kernels for GPUs: run by an interpreter and compared with plain loops in f64;
//! assembled by ptxas if it is available.

use codegen::attention::{Argument, How, Kernel, Kind, kernel};
use codegen::kernels::{Generator, Target, find};
use lighterage_tests::attention::{Case, Expected, Tensors};
use lighterage_tests::gpu::ptxas;
use proptest::prelude::*;
use ptx::{Launch, Memory, Param, Stats};
use std::collections::BTreeMap;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// A kernel's PTX, made once by a generator that the tests share.
fn ptx_of(kernel: &Kernel, target: &Target) -> String {
    static SHARED: Mutex<Option<(Generator, BTreeMap<String, String>)>> = Mutex::new(None);
    let mut guard = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    let (generator, texts) = guard.get_or_insert_with(|| {
        let program =
            find().expect("lighterage-mlir should have been built: cargo build -p lighterage-mlir");
        (
            Generator::start(&program).expect("the generator should start"),
            BTreeMap::new(),
        )
    });
    let make = || {
        kernel
            .ptx(generator, target)
            .unwrap_or_else(|e| panic!("{e}\n{}", kernel.mlir))
    };
    texts
        .entry(format!("{} {target}", kernel.symbol))
        .or_insert_with(make)
        .clone()
}

fn compare(what: &str, case: &Case, found: &[f32], expected: &[(f64, f64)]) {
    assert_eq!(found.len(), expected.len());
    for (i, (&found, &(expected, bound))) in found.iter().zip(expected).enumerate() {
        let off = (f64::from(found) - expected).abs();
        assert!(
            off <= bound,
            "{what}[{i}] of {case:?}: {found}, not {expected}: off by {off:.2e}, at most \
             {bound:.2e}"
        );
    }
}

/// Runs a kernel over a case's grid by the interpreter.
fn run(kind: Kind, case: &Case, tensors: &[u64], memory: &mut Memory) -> Stats {
    let kernel = kernel(kind, case.head_size, case.how()).unwrap();
    let text = ptx_of(&kernel, case.target);
    run_text(&text, &kernel, case, tensors, memory)
        .unwrap_or_else(|e| panic!("{} of {case:?}: {e}", kernel.symbol))
}
fn run_text(
    text: &str,
    kernel: &Kernel,
    case: &Case,
    tensors: &[u64],
    memory: &mut Memory,
) -> Result<Stats, ptx::Error> {
    let blocks = kernel.blocks(&case.sizes);
    if blocks == 0 {
        return Ok(Stats::default());
    }
    let launch = Launch {
        shared_bytes: kernel.shared_bytes,
        ..Launch::new(blocks as u32, kernel.threads)
    };
    let mut params: Vec<Param> = tensors.iter().map(|&at| Param::U64(at)).collect();
    params.extend(case.sizes.arguments().map(|argument| match argument {
        Argument::U32(n) => Param::U32(n),
        Argument::F32(x) => Param::F32(x),
    }));
    ptx::run(text, &kernel.symbol, &launch, &params, memory)
}

/// A kernel's tensors, with the dropout key behind those that it reads.
fn with_key(case: &Case, memory: &mut Memory, reads: &[u64], results: &[u64]) -> Vec<u64> {
    let key = case.key().map(|key| {
        let bytes = key.iter().flat_map(|x| x.to_le_bytes());
        memory.add(bytes.collect())
    });
    let tensors = reads.iter().copied().chain(key);
    tensors.chain(results.iter().copied()).collect()
}

fn forward(case: Case) -> Stats {
    let t = Tensors::new(&case);
    let e = Expected::new(&case, &t);
    let mut memory = Memory::new();
    let [q, k, v] = [&t.q, &t.k, &t.v].map(|x| memory.add_bf16(x));
    let (out, lse) = (memory.room(2 * t.q.len()), memory.room(4 * e.lse.len()));
    let tensors = with_key(&case, &mut memory, &[q, k, v], &[out, lse]);
    let stats = run(Kind::Forward, &case, &tensors, &mut memory);
    compare("out", &case, &memory.bf16(out), &e.out);
    compare("lse", &case, &memory.f32(lse), &e.lse);
    stats
}

fn backward(case: Case) -> [Stats; 3] {
    let t = Tensors::new(&case);
    let e = Expected::new(&case, &t);
    let mut memory = Memory::new();
    let [q, k, v, dout, out] = [&t.q, &t.k, &t.v, &t.dout, &e.rounded].map(|x| memory.add_bf16(x));
    let lse = memory.add_f32(&e.lse.iter().map(|x| x.0 as f32).collect::<Vec<_>>());
    let delta = memory.room(4 * e.delta.len());
    let [dq, dk, dv] = [&t.q, &t.k, &t.v].map(|x| memory.room(2 * x.len()));
    let first = run(Kind::Delta, &case, &[dout, out, delta], &mut memory);
    compare("delta", &case, &memory.f32(delta), &e.delta);
    let reads = [dout, q, k, v, lse, delta];
    let tensors = with_key(&case, &mut memory, &reads, &[dq]);
    let queries = run(Kind::Queries, &case, &tensors, &mut memory);
    compare("dq", &case, &memory.bf16(dq), &e.dq);
    let tensors = with_key(&case, &mut memory, &reads, &[dk, dv]);
    let keys = run(Kind::Keys, &case, &tensors, &mut memory);
    compare("dk", &case, &memory.bf16(dk), &e.dk);
    compare("dv", &case, &memory.bf16(dv), &e.dv);
    [first, queries, keys]
}

#[test]
fn forward_of_one_tile() {
    let stats = forward(Case::new(1, 1, 64, 64, 64, false));
    // Rows of q, k and v are read once, 16 bytes at a time, and the result is written in the same
    // way.
    assert_eq!((stats.wide_loads, stats.narrow_loads), (3 * 64 * 8, 0));
    assert_eq!((stats.wide_stores, stats.narrow_stores), (64 * 8, 64));
    assert_eq!(stats.bank_conflicts, 0);
    // Two products of 64 × 64 × 64, in units of 16 × 8 × 16.
    assert_eq!(stats.mmas, 2 * 64 * 64 * 64 / (16 * 8 * 16));
}

#[test]
fn forward_at_every_length() {
    for n in [1, 17, 100, 130] {
        for causal in [false, true] {
            forward(Case::new(2, 1, n, n, 64, causal));
        }
    }
}

#[test]
fn forward_of_wide_heads() {
    for (queries, keys, causal) in [
        (64, 64, false),
        (1, 1, true),
        (100, 100, true),
        (17, 130, false),
    ] {
        let stats = forward(Case::new(1, 1, queries, keys, 128, causal));
        assert_eq!(stats.bank_conflicts, 0);
    }
}

#[test]
fn forward_of_groups_and_unequal_lengths() {
    forward(Case::new(6, 3, 70, 33, 64, true));
    forward(Case::new(6, 3, 33, 150, 64, true));
    forward(Case::new(4, 2, 5, 65, 128, true));
    forward(Case::new(4, 4, 65, 1, 64, false));
}

/// The weights that the plain kernel drops, whichever lane computes their words.
#[test]
fn dropped_weights() {
    for p in [0.3, 0.0, 1.0] {
        let case = Case::new(2, 1, 70, 72, 64, true).dropping(p);
        let stats = forward(case);
        assert_eq!(stats.bank_conflicts, 0);
        backward(case);
    }
    forward(Case::new(4, 2, 33, 132, 128, false).dropping(0.5));
    for case in [
        Case::new(4, 2, 20, 132, 64, false),
        Case::new(2, 2, 68, 68, 128, true),
        Case::new(2, 1, 130, 4, 64, false),
    ] {
        backward(case.dropping(0.5));
    }
}

#[test]
fn any_scale() {
    for (scale, causal) in [(-0.3, true), (0.0, true), (0.0, false), (4.0, false)] {
        let mut case = Case::new(1, 1, 20, 70, 64, causal);
        case.sizes.scale = scale;
        forward(case);
        backward(case);
    }
}

#[test]
fn without_keys_there_is_nothing() {
    let case = Case::new(2, 1, 3, 0, 64, true);
    forward(case);
    backward(case);
    forward(Case::new(2, 1, 0, 5, 64, true));
}

/// Masked scores have no effect even if all other scores are minus infinity; NaNs have an effect.
#[test]
fn infinities_and_nan() {
    let mut memory = Memory::new();
    let case = Case::new(1, 1, 64, 2, 64, true);
    let mut q = vec![0.0; 64 * 64];
    q[0] = -1.0;
    q[64] = f32::NAN;
    let mut k = vec![0.0; 128];
    k[0] = f32::INFINITY;
    let [q, k, v] = [&q, &k, &vec![1.0; 128]].map(|x| memory.add_bf16(x));
    let (out, lse) = (memory.room(2 * 64 * 64), memory.room(4 * 64));
    run(Kind::Forward, &case, &[q, k, v, out, lse], &mut memory);
    let out = memory.bf16(out);
    assert_eq!(
        (out[0], memory.f32(lse)[0]),
        (0.0, 0.0),
        "the only score is minus infinity"
    );
    assert!(out[64].is_nan());
}

#[test]
fn backward_at_every_length() {
    for n in [1, 17, 100, 130] {
        for causal in [false, true] {
            let [delta, queries, keys] = backward(Case::new(1, 1, n, n, 64, causal));
            assert_eq!((queries.bank_conflicts, keys.bank_conflicts), (0, 0));
            assert_eq!(
                (
                    queries.narrow_stores,
                    keys.narrow_stores,
                    delta.narrow_loads
                ),
                (0, 0, 0)
            );
        }
    }
}

#[test]
fn backward_of_wide_heads() {
    for (queries, keys, causal) in [
        (64, 64, false),
        (1, 1, true),
        (100, 100, true),
        (17, 70, false),
    ] {
        backward(Case::new(1, 1, queries, keys, 128, causal));
    }
}

#[test]
fn backward_of_groups_and_unequal_lengths() {
    backward(Case::new(6, 3, 70, 33, 64, true));
    backward(Case::new(3, 3, 33, 150, 64, true));
    backward(Case::new(4, 2, 5, 65, 128, true));
    backward(Case::new(4, 4, 65, 1, 64, false));
}

/// Without any one of its barriers or waits a kernel is refused: each is needed, and none is
/// missing.
#[test]
fn every_barrier_is_needed() {
    for kind in [Kind::Forward, Kind::Queries, Kind::Keys] {
        let case = Case::new(1, 1, 130, 130, 64, true);
        let kernel = kernel(kind, 64, case.how()).unwrap();
        let text = ptx_of(&kernel, case.target);
        let lines: Vec<&str> = text.lines().collect();
        let mut n_mutants = 0;
        for (i, line) in lines.iter().enumerate() {
            if !line.contains("bar.sync")
                && !line.contains("wait_group")
                && !line.contains("bar.warp.sync")
            {
                continue;
            }
            // The first is for queries without keys.
            let first = line.contains("bar.warp.sync")
                && !lines[..i].iter().any(|line| line.contains("bar.warp.sync"));
            let without_keys = Case::new(1, 1, 64, 0, 64, true);
            let case = if first && kind == Kind::Forward {
                without_keys
            } else {
                case
            };
            let mutant = [&lines[..i], &lines[i + 1..]].concat().join("\n");
            let mut memory = Memory::new();
            let t = Tensors::new(&case);
            let [q, k, v, dout] = [&t.q, &t.k, &t.v, &t.dout].map(|x| memory.add_bf16(x));
            let [lse, delta] = [0, 1].map(|_| memory.add_f32(&vec![0.0; case.rows()[1]]));
            let [a, b] = [0, 1].map(|_| memory.room(2 * t.q.len()));
            let tensors = match kind {
                Kind::Forward => vec![q, k, v, a, lse],
                Kind::Queries => vec![dout, q, k, v, lse, delta, a],
                _ => vec![dout, q, k, v, lse, delta, a, b],
            };
            let found = run_text(&mutant, &kernel, &case, &tensors, &mut memory);
            assert!(
                found.is_err(),
                "{} without line {}: {line}",
                kernel.symbol,
                i + 1
            );
            n_mutants += 1;
        }
        assert!(
            5 <= n_mutants,
            "{}: {n_mutants} barriers and waits",
            kernel.symbol
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, failure_persistence: None,
        ..ProptestConfig::default() })]

    /// For any sizes.
    #[test]
    fn any_sizes(
        (groups, group) in (1..3u32, 1..4u32),
        (queries, keys) in (1..150u32, 1..150u32),
        wide in any::<bool>(),
        causal in any::<bool>(),
        drops in proptest::option::of(0.0..1.0),
    ) {
        // Four neighbouring keys are of one query.
        let keys = if drops.is_some() { keys.next_multiple_of(4) } else { keys };
        let case = Case::new(groups * group, group, queries, keys, if wide { 128 } else { 64 },
            causal);
        let case = Case { drops, ..case };
        forward(case);
        backward(case);
    }
}

#[test]
fn other_heads_are_refused() {
    let refused = kernel(Kind::Forward, 80, How::default()).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "attention for GPUs has heads of 64 or 128 numbers, not 80"
    );
}

/// Every kernel.
fn kernels() -> Vec<Kernel> {
    let mut all = vec![];
    for kind in Kind::ALL {
        for head_size in [64, 128] {
            for [causal, drops] in [[false; 2], [true, false], [false, true], [true; 2]] {
                if !((causal || drops) && kind == Kind::Delta) {
                    all.push(kernel(kind, head_size, How { causal, drops }).unwrap());
                }
            }
        }
    }
    all
}

/// One text of MLIR for every GPU; LLVM generates each GPU's instructions.
#[test]
fn on_every_gpu() {
    for target in [&Target::SM_90, &Target::SM_100] {
        for case in [
            Case::new(2, 2, 70, 70, 64, true),
            Case::new(1, 1, 33, 70, 128, true),
        ] {
            let case = Case { target, ..case };
            forward(case);
            backward(case);
        }
    }
}

/// ptxas refuses everything that a GPU would refuse. Prints registers for docs/attention.md.
#[test]
fn ptxas_takes_every_kernel_without_spills() {
    let Some(ptxas) = ptxas() else { return };
    let folder = std::env::temp_dir().join(format!("lighterage-ptxas-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for kernel in kernels() {
        let mut registers = vec![];
        for (target, arch) in [
            (Target::SM_80, "sm_80"),
            (Target::SM_90, "sm_90"),
            (Target::SM_100, "sm_100"),
            // A driver compiles the text for later GPUs too.
            (Target::SM_100, "sm_120"),
        ] {
            let file = folder.join(format!("{}_{arch}.ptx", kernel.symbol));
            std::fs::write(&file, ptx_of(&kernel, &target)).unwrap();
            let output = Command::new(&ptxas)
                .args(["-v", "-arch", arch, "-o", "/dev/null"])
                .arg(&file)
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(
                output.status.success(),
                "{} for {arch}: {said}",
                kernel.symbol
            );
            assert!(
                said.contains("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"),
                "{said}"
            );
            let used = said
                .split("Used ")
                .nth(1)
                .and_then(|rest| rest.split(' ').next());
            registers.push(
                used.unwrap_or_else(|| panic!("ptxas should say how many registers: {said}"))
                    .to_string(),
            );
        }
        eprintln!(
            "| `{}` | {} | {} |",
            kernel.symbol,
            registers.join(" | "),
            kernel.shared_bytes
        );
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
