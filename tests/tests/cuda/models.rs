//! Tiny models, planned for a GPU at several budgets, on a machine with one.

use super::machine::{Watched, none, standin, threads};
use super::products::library;
use super::steps::in_list_order;
use super::watched::Watch;
use crate::loss::Head;
use artifact::{Artifact, CommandKind, DType, StateKind};
use codegen::{Data, Target};
use lighterage_tests::evaluate::Tensors;
use passes::cost::Roofline;
use passes::devices;
use passes::graph::loss::Chunks;
use passes::graph::optimizer::{HYPER, Optimizer};
use passes::pipeline::{self, Budget, Compiled, Options};
use runtime::{CudaOptions, Machine, StateInit};
use safetensors::SafeTensors;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const INIT: StateInit = StateInit { seed: 7, std: None };

/// A model, what it starts from, and a batch.
struct Model {
    model: torch::Model,
    data: Data,
    reference: Vec<u8>,
}

impl Model {
    fn read(name: &str) -> Model {
        let folder: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("data/models")
            .join(name);
        let model = torch::read(&folder.join("joint_core.pt2"), &BTreeMap::new()).unwrap();
        let tensors = model.tensors.clone().into_iter();
        let data = tensors.map(|(path, tensor)| (path, tensor.data)).collect();
        let files = ["ref.safetensors", "batches.safetensors"].map(|file| folder.join(file));
        let file = files.into_iter().find(|file| file.exists());
        Model {
            model,
            data,
            reference: std::fs::read(file.unwrap()).unwrap(),
        }
    }

    fn compile(&self, device: &str, budget: Budget) -> Result<Compiled, pipeline::Error> {
        let device = devices::named(device).unwrap();
        let options = Options {
            optimizer: Optimizer::AdamW,
            budget,
            ..Options::default()
        };
        let graph = self.model.graph.clone();
        let cost = Roofline::new(&device);
        pipeline::compile(graph, &options, &device, &cost, &mut |_| ())
    }

    fn emit(&self, compiled: &Compiled, target: Target) -> Artifact {
        let states = compiled.program.graph.states.values();
        let paths: Vec<&str> = states.map(|s| s.path.as_str()).collect();
        let kept = self
            .data
            .iter()
            .filter(|(path, _)| paths.contains(&path.as_str()));
        let data = kept
            .map(|(path, bytes)| (path.clone(), bytes.clone()))
            .collect();
        codegen::emit(compiled, &data, Some(target)).unwrap_or_else(|e| panic!("{e}"))
    }

    fn feed(&self, artifact: &Artifact) -> Tensors {
        let file = SafeTensors::deserialize(&self.reference).unwrap();
        let inputs = artifact.inputs.iter().map(|input| {
            let bytes = if input.name == HYPER {
                let hyper = [f64::from(RATE), 0.9, 0.999, 1e-8, 0.01];
                hyper.iter().flat_map(|x| x.to_le_bytes()).collect()
            } else {
                let batch = file.tensor(&format!("batch.0.{}", input.name)).unwrap();
                batch.data().to_vec()
            };
            (input.name.clone(), bytes)
        });
        inputs.collect()
    }
}

/// Outputs and states after two steps.
pub(super) type Left = (Tensors, Tensors);

pub(super) const STEPS: usize = 2;
/// The learning rate of [`Model::feed`].
const RATE: f32 = 1e-3;
/// Shares of the memory that keeping everything needs.
const BUDGETS: [f64; 3] = [1.0, 0.6, 0.3];
/// The model whose steps take the least time on the interpreter.
const SMALLEST: &str = "dropout-tiny";

/// True if tests take what they can test, and not a sample of it.
fn is_long() -> bool {
    std::env::var_os("LIGHTERAGE_LONG_TESTS").is_some_and(|value| value == "1")
}

/// A model at a share of its memory, or with the least that works.
fn compiled(model: &Model, device: &str, share: f64) -> Compiled {
    match model.compile(device, Budget::Share(share)) {
        Ok(compiled) => compiled,
        Err(pipeline::Error::Infeasible(least)) => {
            let budget = Budget::Bytes(least.smallest);
            model
                .compile(device, budget)
                .expect("the least should work")
        }
        Err(error) => panic!("{error}"),
    }
}

/// Two steps on the stand-in. Nothing is touched that nothing orders, no stream waits in a circle,
/// and the measured peak is the planned one.
pub(super) fn run(artifact: &Artifact, feed: &Tensors, seed: u64) -> Left {
    run_with(
        &Watch::new(&standin(seed)),
        artifact,
        feed,
        CudaOptions::default(),
    )
}

/// The same, where a launch that finds the bytes of an earlier one is not interpreted again.
fn run_again(watch: &Arc<Watch>, artifact: &Artifact, feed: &Tensors, seed: u64) -> Left {
    watch.standin.reset(&remembering(seed));
    run_with(watch, artifact, feed, CudaOptions::default())
}

fn remembering(seed: u64) -> standin::Options {
    standin::Options {
        remembers: 1,
        ..standin(seed)
    }
}

/// The same where cuBLASLt computes products.
fn run_by_library(watch: &Arc<Watch>, artifact: &Artifact, feed: &Tensors, seed: u64) -> Left {
    watch.standin.reset(&remembering(seed));
    let left = run_with(watch, artifact, feed, library(watch));
    assert!(watch.standin.calls_of("cublasLtMatmul") > 0);
    left
}

fn run_with(watch: &Arc<Watch>, artifact: &Artifact, feed: &Tensors, cuda: CudaOptions) -> Left {
    let mut watched = Watched::with(watch, artifact, threads(), cuda).unwrap();
    watched.machine.initialise(&INIT).unwrap();
    watched.write(feed).unwrap();
    (0..STEPS).for_each(|_| watched.launch().unwrap());
    watched.machine.wait().unwrap();
    let left = (watched.read().unwrap(), watched.states().unwrap());
    let case = &artifact.name;
    assert_eq!(watch.standin.findings(), none(), "{case}");
    let touched = watch.standin.facts().touched_bytes.next_multiple_of(64);
    assert_eq!(touched, artifact.summary.planned_peak_bytes, "{case}");
    left
}

/// The same on the processor.
fn on_cpu(model: &Model, feed: &Tensors) -> Left {
    let compiled = compiled(model, "cpu", 1.0);
    let host = Target::host().unwrap();
    let mut cpu = Machine::new(model.emit(&compiled, host), threads()).unwrap();
    cpu.initialise(&INIT).unwrap();
    for _ in 0..STEPS {
        let inputs = feed.iter();
        inputs.for_each(|(name, bytes)| cpu.write_input(name, bytes).unwrap());
        cpu.step().unwrap();
    }
    let outputs: Vec<String> = cpu.outputs().map(|o| o.name.clone()).collect();
    let outputs = outputs.into_iter();
    let outputs = outputs.map(|name| (name.clone(), cpu.read_output(&name).unwrap()));
    let outputs = outputs.collect();
    let states: Vec<String> = cpu.states().map(|s| s.path.clone()).collect();
    let states = states.into_iter();
    let states = states.map(|path| (path.clone(), cpu.read_state(&path).unwrap()));
    (outputs, states.collect())
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    let (chunks, _) = bytes.as_chunks::<4>();
    chunks.iter().map(|&b| f32::from_le_bytes(b))
}

/// The loss is that of the processor to 1e-4 of it. A parameter's number differs by at most what
/// updates in opposite directions make: a gradient that is nearly nothing may have either sign. All
/// but 1 % of the numbers are nearer than a tenth of an update.
fn assert_near(artifact: &Artifact, gpu: &Left, cpu: &Left) {
    let name = &artifact.name;
    let loss = |left: &Left| floats(&left.0["loss"]).next().unwrap();
    let (ours, theirs) = (loss(gpu), loss(cpu));
    assert!(
        (ours - theirs).abs() <= 1e-4 * theirs.abs(),
        "{name}: {ours}, not {theirs}"
    );
    let (mut n, mut far) = (0, 0);
    for state in &artifact.states {
        if state.kind != StateKind::Param || state.operand.dtype != DType::F32 {
            continue;
        }
        let pairs = floats(&gpu.1[&state.path]).zip(floats(&cpu.1[&state.path]));
        for (ours, theirs) in pairs {
            let apart = (ours - theirs).abs();
            let most = 2.1 * STEPS as f32 * RATE;
            assert!(
                apart <= most,
                "{name}, {}: {ours}, not {theirs}",
                state.path
            );
            n += 1;
            far += usize::from(apart > 0.1 * RATE);
        }
    }
    assert!(
        n > 0 && far * 100 <= n,
        "{name}: {far} of {n} numbers are far apart"
    );
}

/// Whatever the budget and the order of streams, two steps leave the same bits, which are also
/// those of list order, and numbers near the processor's. The same holds for cuBLASLt's products.
fn check(name: &str) {
    let model = Model::read(name);
    let (mut all, mut by_library): (Vec<Left>, Vec<Left>) = (vec![], vec![]);
    let watch = Watch::new(&remembering(0));
    for (share, seed) in BUDGETS.into_iter().zip(1..) {
        let artifact = model.emit(&compiled(&model, "h100", share), Target::SM_90);
        let feed = model.feed(&artifact);
        all.push(run_again(&watch, &artifact, &feed, seed));
        if share == BUDGETS[2] {
            all.push(run_again(&watch, &in_list_order(&artifact), &feed, seed));
        }
        if is_long() {
            all.extend((10..15).map(|seed| run_again(&watch, &artifact, &feed, seed)));
        }
        if share != BUDGETS[1] {
            by_library.push(run_by_library(&watch, &artifact, &feed, seed));
        }
        if share == 1.0 {
            let cpu = on_cpu(&model, &feed);
            assert_near(&artifact, &all[0], &cpu);
            assert_near(&artifact, &by_library[0], &cpu);
        }
    }
    assert!(by_library[0] == by_library[1], "{name}");
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{name}");
}

#[test]
fn bert_leaves_the_same_bits_at_any_budget_and_order() {
    check("bert-tiny");
}

#[test]
fn dropout_leaves_the_same_bits_at_any_budget_and_order() {
    check("dropout-tiny");
}

#[test]
fn gpt2_leaves_the_same_bits_at_any_budget_and_order() {
    check("gpt2-tiny");
}

#[test]
fn llama_leaves_the_same_bits_at_any_budget_and_order() {
    check("llama-tiny");
}

#[test]
fn moe_leaves_the_same_bits_at_any_budget_and_order() {
    check("moe-tiny");
}

#[test]
fn resnet_leaves_the_same_bits_at_any_budget_and_order() {
    check("resnet-tiny");
}

/// The smallest model at every budget, each in twenty orders: the same bits.
#[test]
fn the_smallest_model_in_twenty_orders_at_every_budget() {
    let model = Model::read(SMALLEST);
    let mut all: Vec<Left> = vec![];
    for share in BUDGETS {
        let artifact = model.emit(&compiled(&model, "h100", share), Target::SM_90);
        let feed = model.feed(&artifact);
        let watch = Watch::new(&remembering(0));
        for seed in 100..120 {
            let left = run_again(&watch, &artifact, &feed, seed);
            all.truncate(1);
            all.push(left);
            assert!(all[0] == all[all.len() - 1], "{share}, seed {seed}");
        }
    }
}

/// Waits of the smallest model that are left out are found; all of them, or a few.
#[test]
fn each_wait_of_the_smallest_model_is_needed() {
    let model = Model::read(SMALLEST);
    let artifact = model.emit(&compiled(&model, "h100", 0.3), Target::SM_90);
    let feed = model.feed(&artifact);
    let waits = artifact
        .commands
        .iter()
        .filter_map(|command| match command.kind {
            CommandKind::Wait { event, .. } => Some((command.stream as usize, event as usize)),
            CommandKind::Launch { .. } | CommandKind::Copy { .. } | CommandKind::Record { .. } => {
                None
            }
        });
    let waits: BTreeSet<(usize, usize)> = waits.collect();
    let each = if is_long() { 1 } else { waits.len() / 3 };
    for &wait in waits.iter().step_by(each) {
        let watch = Watch::without(&standin(1), Some(wait));
        let mut watched = Watched::new(&watch, &artifact, threads()).unwrap();
        watched.machine.initialise(&INIT).unwrap();
        watched.write(&feed).unwrap();
        (0..STEPS).for_each(|_| watched.launch().unwrap());
        let _ = watched.machine.wait();
        assert_ne!(watch.standin.findings(), none(), "{wait:?}");
    }
}

/// Two steps of whatever kernels.
fn without_checks(
    watch: &Arc<Watch>,
    artifact: &Artifact,
    feed: &Tensors,
) -> Result<Left, runtime::Error> {
    let mut watched = Watched::new(watch, artifact, threads())?;
    watched.machine.initialise(&INIT)?;
    watched.write(feed)?;
    (0..STEPS).try_for_each(|_| watched.launch())?;
    watched.machine.wait()?;
    Ok((watched.read()?, watched.states()?))
}

/// A kernel without one of its phases leaves other bits, or the step fails. All phases, or a few
/// of kernels that have several, and of the others.
#[test]
fn each_phase_that_is_left_out_is_found() {
    let model = Model::read(SMALLEST);
    let artifact = model.emit(&compiled(&model, "h100", 1.0), Target::SM_90);
    let feed = model.feed(&artifact);
    let right = run(&artifact, &feed, 1);
    let on_gpu = |object: u32| {
        let target = &artifact.objects[object as usize].target;
        matches!(target, artifact::Target::Gpu(_))
    };
    let (mut several, mut single) = (vec![], vec![]);
    for (i, kernel) in artifact.kernels.iter().enumerate() {
        let code = kernel.code.as_ref().filter(|code| on_gpu(code.object));
        let n = code.map_or(0, |code| code.phases.len());
        let phases = (0..n).map(|phase| (i, phase));
        if n > 1 {
            several.extend(phases)
        } else {
            single.extend(phases)
        }
    }
    assert!(several.len() > 4, "{several:?}");
    let each = |all: usize, few: usize| if is_long() { 1 } else { all.div_ceil(few) };
    let (often, seldom) = (each(several.len(), 8), each(single.len(), 4));
    let chosen = several.iter().step_by(often);
    for &(kernel, phase) in chosen.chain(single.iter().step_by(seldom)) {
        let mut without = artifact.clone();
        let name = without.kernels[kernel].op.clone();
        let code = without.kernels[kernel].code.as_mut();
        code.expect("the kernel should have code")
            .phases
            .remove(phase);
        let left = without_checks(&Watch::new(&standin(1)), &without, &feed);
        // Kernels may fail on what was not written.
        assert!(left.ok() != Some(right.clone()), "{name}, phase {phase}");
    }
}

/// A kernel that reads elsewhere than it should is refused, or is found in what it touches or
/// leaves: operands of launches on the device are shifted by one element, and by 64 bytes, which
/// keeps them aligned.
#[test]
fn each_operand_that_is_shifted_is_found() {
    let model = Model::read(SMALLEST);
    let artifact = model.emit(&compiled(&model, "h100", 1.0), Target::SM_90);
    let feed = model.feed(&artifact);
    let right = run(&artifact, &feed, 1);
    let of_device = |place: artifact::Place| {
        let space = artifact.pools[place.pool as usize].space;
        matches!(space, artifact::MemorySpace::Device(_))
    };
    let launches = artifact.commands.iter().enumerate();
    let launches = launches.filter_map(|(at, command)| match &command.kind {
        CommandKind::Launch { ins, .. } if of_device(ins.first()?.place) => Some((at, &ins[0])),
        _ => None,
    });
    let launches: Vec<(usize, u64)> = launches
        .filter_map(|(at, operand)| Some((at, operand.bytes()?)))
        .filter(|&(_, bytes)| bytes > 64)
        .collect();
    assert!(launches.len() > 20, "{}", launches.len());
    let each = if is_long() { 1 } else { launches.len() / 6 };
    for &(at, _) in launches.iter().step_by(each) {
        for bytes in [4, 64] {
            let mut shifted = artifact.clone();
            let CommandKind::Launch { ins, kernel, .. } = &mut shifted.commands[at].kind else {
                panic!("it was a launch");
            };
            ins[0].place.offset += bytes;
            let op = &artifact.kernels[*kernel as usize].op;
            let watch = Watch::new(&standin(1));
            let left = without_checks(&watch, &shifted, &feed);
            let is_found = watch.standin.findings() != none() || left.ok().as_ref() != Some(&right);
            assert!(is_found, "line {at}, {op}, by {bytes} bytes");
        }
    }
}

/// Sums over rows are continued from chunk to chunk on tensor cores, and rounded at the end.
#[test]
fn a_loss_of_bf16_in_chunks_leaves_the_same_bits() {
    let head = Head {
        rows: 2 * artifact::PRODUCT_DEPTH as u64 + 70,
        width: 16,
        vocabulary: 136,
        dtype: ir::DType::BF16,
        mean: true,
        ignored: 7,
        bias: false,
        scale: None,
        transposed: false,
        seed: 3,
    };
    let (graph, device) = (head.graph(), devices::named("h100").unwrap());
    let feed = head.data(&graph);
    let outputs = [1, 3].map(|chunks| {
        let options = Options {
            loss_chunks: Chunks::Of(chunks),
            ..Options::default()
        };
        let cost = Roofline::new(&device);
        let compiled =
            pipeline::compile(graph.clone(), &options, &device, &cost, &mut |_| ()).unwrap();
        assert_eq!(compiled.loss_chunks, chunks);
        let artifact = codegen::emit(&compiled, &Data::new(), Some(Target::SM_90)).unwrap();
        let watch = Watch::new(&standin(chunks));
        let mut watched = Watched::new(&watch, &artifact, threads()).unwrap();
        watched.write(&feed).unwrap();
        watched.launch().unwrap();
        watched.machine.wait().unwrap();
        assert_eq!(watch.standin.findings(), none(), "{chunks} chunks");
        watched.read().unwrap()
    });
    assert!(outputs[0] == outputs[1]);
    let bits = outputs[0]["dw"].chunks(2);
    assert!(bits.clone().any(|pair| pair != [0, 0]), "dw is zero");
}
