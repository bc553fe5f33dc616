//! Updates of several nodes on a machine with a GPU, by the kernels that are generated for it.

use super::models::{STEPS, run};
use crate::optimizers::GRAPH;
use crate::precision::STEP;
use codegen::{Data, Target};
use ir::text::parse_graph;
use lighterage_tests::evaluate::Tensors;
use lighterage_tests::run as on_cpu;
use passes::cost::Roofline;
use passes::devices;
use passes::graph::optimizer::{HYPER, LOW, MASTER, Master, Optimizer};
use passes::graph::precision::Precision;
use passes::graph::scale::SCALE;
use passes::pipeline::{self, Compiled, Options};
use runtime::kernels::halves::join;

/// Numbers from -1 to 1 that are the same in every run.
fn noise(n: u64, seed: u64) -> Vec<u8> {
    let mix = |i: u64| (i * 7919 + seed).wrapping_mul(0xD6E8_FEB8_6659_FD93) >> 40;
    let numbers = (0..n).map(|i| mix(i + 1) as f32 / (1 << 23) as f32 - 1.0);
    numbers.flat_map(f32::to_le_bytes).collect()
}

/// A step for a GPU and for a processor.
fn compiled(graph: &str, options: &Options) -> [Compiled; 2] {
    ["h100", "cpu"].map(|device| {
        let device = devices::named(device).unwrap();
        let (graph, cost) = (parse_graph(graph).unwrap(), Roofline::new(&device));
        pipeline::compile(graph, options, &device, &cost, &mut |_| ()).unwrap()
    })
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let chunks = bytes.as_chunks().0.iter();
    chunks.map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn every_optimizer_does_on_a_gpu_what_it_does_on_a_processor() {
    for optimizer in Optimizer::ALL {
        if optimizer == Optimizer::None {
            continue;
        }
        let name = optimizer.name();
        let options = Options {
            optimizer,
            precision: Precision::Bf16,
            ..Options::default()
        };
        let [gpu, cpu] = compiled(GRAPH, &options);
        let states = gpu.program.graph.states.values();
        let numel = |value| gpu.program.graph.values[value].ty.numel();
        let start: Data = states
            .filter(|state| !state.path.contains('.'))
            .map(|state| (state.path.clone(), noise(numel(state.before), 1)))
            .collect();
        let hyper = optimizer.options().iter();
        let hyper: Vec<u8> = hyper.flat_map(|(_, value)| value.to_le_bytes()).collect();
        let inputs = gpu.program.graph.inputs.iter();
        let feed: Tensors = inputs
            .map(|&input| {
                let data = &gpu.program.graph.values[input];
                let bytes = match &*data.name {
                    HYPER => hyper.clone(),
                    _ => noise(data.ty.numel(), 77),
                };
                (data.name.clone(), bytes)
            })
            .collect();
        let artifact = codegen::emit(&gpu, &start, Some(Target::SM_90)).unwrap();
        let (_, ours) = run(&artifact, &feed, 3);
        let artifact = codegen::emit(&cpu, &start, Target::host()).unwrap();
        let feeds = vec![feed; STEPS];
        let options = runtime::Options::default();
        let (outcome, _) = on_cpu::compiled(&artifact, options, &feeds).unwrap();
        // Of Muon, products in bf16 that are added up in another order.
        let bound = if optimizer == Optimizer::Muon {
            2e-3
        } else {
            1e-6
        };
        for path in start.keys() {
            let (ours, theirs) = (floats(&ours[path]), floats(&outcome.states[path]));
            assert_ne!(ours, floats(&start[path]), "{name}: {path} stays");
            for (a, b) in ours.iter().zip(&theirs) {
                assert!((a - b).abs() <= bound, "{name}: {path}: {a}, not {b}");
            }
        }
    }
}

/// The states that the step of `data/fp16`, compiled for both machines, leaves on each.
fn left(
    compiled: &[Compiled; 2],
    start: &Data,
    optimizer: Optimizer,
    x: impl Iterator<Item = f32>,
) -> [Tensors; 2] {
    let [gpu, cpu] = compiled;
    let gpu = codegen::emit(gpu, start, Some(Target::SM_90)).unwrap();
    let cpu = codegen::emit(cpu, start, Target::host()).unwrap();
    let hyper = optimizer.options().iter();
    let hyper = hyper.flat_map(|(_, value)| value.to_le_bytes()).collect();
    let x = x.flat_map(f32::to_le_bytes).collect();
    let feed: Tensors = [("x", x), ("y", noise(4, 9)), (HYPER, hyper)]
        .map(|(name, bytes)| (name.to_string(), bytes))
        .into();
    let (_, on_gpu) = run(&gpu, &feed, 3);
    let feeds = vec![feed; STEPS];
    let (outcome, _) = on_cpu::compiled(&cpu, runtime::Options::default(), &feeds).unwrap();
    [on_gpu, outcome.states]
}

/// The f32 of a parameter in half precision: its master.
fn whole(states: &Tensors, path: &str) -> Vec<f32> {
    let words = |bytes: &[u8]| bytes.as_chunks().0.to_vec();
    match states.get(&format!("{LOW}.{path}")) {
        Some(low) => {
            let word = u16::from_le_bytes;
            let pairs = words(&states[path]).into_iter().zip(words(low));
            pairs.map(|(h, l)| join(word(h), word(l))).collect()
        }
        None => floats(&states[&format!("{MASTER}.{path}")]),
    }
}

/// Parameters in bf16 that the step reads in bf16 are updated with their masters as on a processor.
#[test]
fn masters_do_on_a_gpu_what_they_do_on_a_processor() {
    for (optimizer, master) in [
        (Optimizer::AdamW, Master::Split),
        (Optimizer::AdamW, Master::Full),
        (Optimizer::Sgd, Master::Full),
    ] {
        let options = Options {
            optimizer,
            master,
            precision: Precision::Bf16,
            ..Options::default()
        };
        let compiled = compiled(STEP, &options);
        let upper = noise(4, 1).chunks(4).flat_map(|x| [x[2], x[3]]).collect();
        let start: Data = ["first.weight", "second.weight"]
            .map(|path| (path.to_string(), Vec::clone(&upper)))
            .into();
        // Not negative, so that the function in the middle has derivatives.
        let x = floats(&noise(4, 5)).into_iter().map(f32::abs);
        let [ours, theirs] = left(&compiled, &start, optimizer, x);
        for path in start.keys() {
            let (a, b) = (whole(&ours, path), whole(&theirs, path));
            let as_whole = start[path].chunks(2).flat_map(|x| [0, 0, x[0], x[1]]);
            assert_ne!(a, floats(&as_whole.collect::<Vec<u8>>()), "{path} stays");
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6;
            assert!(a.iter().zip(&b).all(close), "{path}: {a:?}, not {b:?}");
        }
    }
}

/// In fp16 a GPU does what a processor does: updates, and what an overflow leaves out.
#[test]
fn fp16_does_on_a_gpu_what_it_does_on_a_processor() {
    let options = Options {
        optimizer: Optimizer::AdamW,
        precision: Precision::Fp16,
        ..Options::default()
    };
    let compiled = compiled(STEP, &options);
    let start: Data = ["first.weight", "second.weight"]
        .map(|path| (path.to_string(), noise(4, 1)))
        .into();
    for factor in [1.0, 1e30] {
        let x = floats(&noise(4, 5)).into_iter().map(|x| x * factor);
        let [ours, theirs] = left(&compiled, &start, options.optimizer, x);
        for path in start.keys() {
            let (ours, theirs) = (floats(&ours[path]), floats(&theirs[path]));
            assert_eq!(ours != floats(&start[path]), factor == 1.0, "{path}");
            for (a, b) in ours.iter().zip(&theirs) {
                assert!((a - b).abs() <= 1e-6, "{path}: {a}, not {b}");
            }
        }
        for path in ["optimizer.step", SCALE, "optimizer.growth_tracker"] {
            assert_eq!(ours[path], theirs[path], "{path}");
        }
        let scale = if factor == 1.0 { 65536.0 } else { 16384.0 };
        assert_eq!(floats(&ours[SCALE]), [scale]);
    }
}
