//! Files with hostile or accidental changes: each is refused with a message, or gives the same
//! results in every kind of run. None causes a panic, a hang, or a read of unwritten bytes.
//!
//! A run takes seconds; with `PROPTEST_CASES=20000 PROPTEST_RNG_SEED=7` it takes hours.

use artifact::{Artifact, Attr, Command, CommandKind, DType, Initial, Operand, Range};
use codegen::Data;
use ir::text::File;
use lighterage_tests::generate::config;
use lighterage_tests::numbers::Random;
use passes::cost::Roofline;
use passes::devices;
use passes::graph::optimizer::{HYPER, Optimizer};
use passes::pipeline::{self, Budget, Error, Kernels, Options};
use proptest::prelude::*;
use runtime::{Machine, StateInit, validate};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

/// Pools larger than this are not run.
const MOST_BYTES: u64 = 64 << 20;

/// Random choices with a seed.
struct Dice(Random);

impl Dice {
    fn new(seed: u64) -> Dice {
        Dice(Random(seed))
    }
    fn below(&mut self, n: usize) -> usize {
        (self.0.next() >> 33) as usize % n.max(1)
    }
    fn pick<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())].clone()
    }
    /// A place's offset in a pool, or one just outside.
    fn offset(&mut self, pool_bytes: u64) -> u64 {
        match self.below(8) {
            0 => pool_bytes,
            1 => u64::MAX - 63,
            2 => 32,
            _ => self.0.next() % (pool_bytes / 64 + 1) * 64,
        }
    }
}

// --- artifacts ---

fn compile(graph: ir::Graph, options: &Options, data: &Data) -> Result<Artifact, pipeline::Error> {
    let device = devices::named("cpu").unwrap();
    let cost = Roofline::new(&device);
    let compiled = pipeline::compile(graph, options, &device, &cost, &mut |_| ())?;
    Ok(codegen::emit(&compiled, data, codegen::Target::host()).unwrap())
}

/// Steps with swaps, reruns, updates and random numbers.
fn bases() -> &'static [Artifact] {
    static BASES: OnceLock<Vec<Artifact>> = OnceLock::new();
    BASES.get_or_init(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/models");
        let base = |(name, share)| {
            let model = torch::read(&folder.join(name), &BTreeMap::new()).unwrap();
            let options = Options {
                optimizer: Optimizer::AdamW,
                kernels: Kernels::Plain,
                budget: Budget::Share(share),
                ..Options::default()
            };
            let data = model.tensors.into_iter().map(|(k, t)| (k, t.data));
            compile(model.graph, &options, &data.collect()).unwrap()
        };
        [
            ("gpt2-tiny/joint_coarse.pt2", 0.4),
            ("dropout-tiny/joint_coarse.pt2", 0.7),
        ]
        .map(base)
        .into()
    })
}

const SIZES: [u64; 9] = [0, 1, 2, 5, 64, 1 << 20, 1 << 33, 1 << 49, u64::MAX];
const NUMBERS: [i64; 9] = [i64::MIN, -3, -1, 0, 1, 3, 1 << 28, 1 << 49, i64::MAX];
const DTYPES: [DType; 5] = [DType::Bool, DType::I64, DType::BF16, DType::F32, DType::F64];

fn change_attr(attr: &mut Attr, dice: &mut Dice) {
    match attr {
        Attr::Int(i) => *i = dice.pick(&NUMBERS),
        Attr::Float(x) => *x = dice.pick(&[f64::NAN, f64::INFINITY, -1.0, 0.0, 1e300]),
        Attr::Bool(b) => *b = !*b,
        Attr::Ints(list) if !list.is_empty() => {
            let i = dice.below(list.len());
            list[i] = dice.pick(&NUMBERS);
        }
        Attr::Ints(list) => list.push(dice.pick(&NUMBERS)),
        Attr::Type(dtype) => *dtype = dice.pick(&DTYPES),
        Attr::Str(_) => *attr = Attr::Int(1),
    }
}

/// Changes a launch: sizes, types, places, scratch, attributes, its op.
fn change_launch(artifact: &mut Artifact, at: usize, dice: &mut Dice) {
    let pools: Vec<u64> = artifact.pools.iter().map(|pool| pool.bytes).collect();
    let next_kernel = artifact.kernels.len() as u32;
    let CommandKind::Launch {
        kernel,
        ins,
        outs,
        scratch,
    } = &mut artifact.commands[at].kind
    else {
        return;
    };
    let n_ins = ins.len();
    let mut operands: Vec<&mut Operand> = ins.iter_mut().chain(outs.iter_mut()).collect();
    let which = dice.below(operands.len());
    match dice.below(8) {
        0 => {
            // One size, in all places.
            let sizes: Vec<u64> = operands.iter().flat_map(|x| x.shape.clone()).collect();
            if sizes.is_empty() {
                return;
            }
            let (from, to) = (dice.pick(&sizes), dice.pick(&SIZES));
            for size in operands.iter_mut().flat_map(|x| &mut x.shape) {
                *size = if *size == from { to } else { *size };
            }
        }
        1 => {
            let (from, to) = (operands[which].dtype, dice.pick(&DTYPES));
            for x in operands {
                x.dtype = if x.dtype == from { to } else { x.dtype };
            }
        }
        2 | 3 => {
            let place = &mut operands[which].place;
            place.offset = dice.offset(pools[place.pool as usize]);
        }
        4 if n_ins > 0 && operands.len() > n_ins => {
            let (from, to) = (
                dice.below(n_ins),
                n_ins + dice.below(operands.len() - n_ins),
            );
            operands[to].place = operands[from].place;
        }
        5 => {
            let bytes = 1 << dice.below(20);
            let place = artifact::Place {
                pool: 0,
                offset: dice.offset(pools[0]),
            };
            *scratch = Some(Range { place, bytes });
        }
        6 => {
            let all = runtime::kernels::KERNELS;
            let op = all[dice.below(all.len())].name;
            let mut other = artifact.kernels[*kernel as usize].clone();
            other.op = op.into();
            *kernel = next_kernel;
            artifact.kernels.push(other);
        }
        _ => {
            let mut other = artifact.kernels[*kernel as usize].clone();
            if !other.attrs.is_empty() {
                let i = dice.below(other.attrs.len());
                change_attr(&mut other.attrs[i].1, dice);
                *kernel = next_kernel;
                artifact.kernels.push(other);
            }
        }
    }
}

/// Changes a command that is not a launch.
fn change_order(artifact: &mut Artifact, at: usize, dice: &mut Dice) {
    let pools: Vec<u64> = artifact.pools.iter().map(|pool| pool.bytes).collect();
    let n_events = artifact.events as usize;
    match &mut artifact.commands[at].kind {
        CommandKind::Copy { src, dst, bytes } => match dice.below(4) {
            0 => *bytes = dice.pick(&[0, 1, *bytes + 1, *bytes * 2, u64::MAX]),
            1 => src.offset = dice.offset(pools[src.pool as usize]),
            2 => dst.offset = dice.offset(pools[dst.pool as usize]),
            _ => std::mem::swap(src, dst),
        },
        CommandKind::Wait { event, previous } => {
            if dice.below(2) == 0 {
                *previous = !*previous;
            } else {
                *event = dice.below(n_events + 1) as u32;
            }
        }
        CommandKind::Record { event } => *event = dice.below(n_events + 1) as u32,
        CommandKind::Launch { .. } => {}
    }
}

fn change(artifact: &mut Artifact, dice: &mut Dice) {
    let n = artifact.commands.len();
    let at = dice.below(n);
    match dice.below(16) {
        0..6 => change_launch(artifact, at, dice),
        6..9 => change_order(artifact, at, dice),
        9 => drop(artifact.commands.remove(at)),
        10 => artifact.commands.swap(at, dice.below(n)),
        11 => {
            let command: Command = artifact.commands[at].clone();
            artifact.commands.insert(dice.below(n), command);
        }
        12 => artifact.commands[at].stream = dice.pick(&[0, 1, 2, 63, u32::MAX]),
        13 => {
            let i = dice.below(artifact.states.len());
            let state = &mut artifact.states[i];
            let bytes = artifact.pools[state.operand.place.pool as usize].bytes;
            match dice.below(3) {
                0 => state.operand.place.offset = dice.offset(bytes),
                1 => {
                    state.initial = Initial::Data {
                        start: u64::MAX,
                        bytes: 64,
                    }
                }
                _ => state.operand.shape.push(dice.pick(&SIZES)),
            }
        }
        14 => {
            let i = dice.below(artifact.outputs.len());
            let place = &mut artifact.outputs[i].operand.place;
            place.offset = dice.offset(artifact.pools[place.pool as usize].bytes);
        }
        _ => artifact.summary.micro_batches = dice.pick(&[0, 2, 3, 1 << 40, u64::MAX]),
    }
}

/// A way to run an artifact.
#[derive(Clone, Copy)]
struct Way {
    options: runtime::Options,
    overlap: bool,
}

/// The outputs of three steps and the states after them, or the machine's error.
fn run(artifact: &Artifact, way: Way) -> Result<Vec<Vec<u8>>, runtime::Error> {
    let mut machine = Machine::new(artifact.clone(), way.options)?;
    machine.initialise(&StateInit {
        seed: 3,
        std: Some(0.05),
    })?;
    for state in &artifact.states {
        if !machine.has_state(&state.path) {
            let bytes = state.operand.bytes().unwrap() as usize;
            machine.write_state(&state.path, &vec![0; bytes])?;
        }
    }
    let mut all = vec![];
    for _ in 0..3 {
        for input in &artifact.inputs {
            let bytes = input.operand.bytes().unwrap() as usize;
            let hyper = [1e-3f64, 0.9, 0.999, 1e-8, 0.01]
                .map(f64::to_le_bytes)
                .concat();
            let given = if input.name == HYPER && hyper.len() == bytes {
                hyper
            } else {
                vec![0; bytes]
            };
            machine.write_input(&input.name, &given)?;
        }
        machine.launch()?;
        if way.overlap {
            machine.wait_io()?;
        } else {
            machine.wait()?;
        }
        for output in &artifact.outputs {
            all.push(machine.read_output(&output.name)?);
        }
    }
    machine.wait()?;
    for state in &artifact.states {
        all.push(machine.read_state(&state.path)?);
    }
    Ok(all)
}

fn threads(threads: usize, overlap: bool) -> Way {
    let options = runtime::Options {
        threads: Some(threads),
        ..runtime::Options::default()
    };
    Way { options, overlap }
}

fn shuffled(seed: u64) -> Way {
    let options = runtime::Options {
        shuffle: Some(seed),
        ..runtime::Options::default()
    };
    Way {
        options,
        overlap: false,
    }
}

/// Runs an accepted artifact in several ways, which must agree bit for bit.
fn agrees(artifact: &Artifact) -> Result<(), TestCaseError> {
    let total: u64 = artifact.pools.iter().map(|pool| pool.bytes).sum();
    if total > MOST_BYTES {
        return Ok(());
    }
    let first = run(artifact, threads(2, true));
    if let Err(e) = &first {
        prop_assert!(!e.to_string().contains("panicked"), "{e}");
    }
    for way in [threads(1, false), shuffled(0), shuffled(1)] {
        if let (Ok(first), Ok(other)) = (&first, &run(artifact, way)) {
            prop_assert!(first == other, "the ways to run it differ");
        }
    }
    Ok(())
}

#[test]
fn unchanged_artifacts_agree() {
    for base in bases() {
        validate(base).unwrap();
        agrees(base).unwrap();
        run(base, threads(1, false)).unwrap();
    }
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn changed_artifacts_are_refused_or_agree(seed in any::<u64>()) {
        let mut dice = Dice::new(seed);
        let mut artifact = dice.pick(bases());
        for _ in 0..1 + dice.below(3) {
            change(&mut artifact, &mut dice);
        }
        // As read from a file.
        let artifact = artifact::read(&artifact::write(&artifact)).unwrap();
        if validate(&artifact).is_ok() {
            agrees(&artifact)?;
        }
    }
}

// --- text ---

/// Programs with addresses and graphs.
fn texts() -> &'static [String] {
    static TEXTS: OnceLock<Vec<String>> = OnceLock::new();
    TEXTS.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
        let example = read("ir/tests/example.ir");
        let graph = example.split("\n}\n").next().unwrap().to_string() + "\n}\n";
        vec![example, graph, read("frontends/cli/tests/data/mlp.ir")]
    })
}

/// Changes words, numbers and lines of a text.
fn change_text(text: &str, dice: &mut Dice) -> String {
    let mut lines: Vec<String> = text.lines().map(String::from).collect();
    let at = dice.below(lines.len());
    match dice.below(6) {
        0 => drop(lines.remove(at)),
        1 => lines.swap(at, dice.below(text.lines().count())),
        2 => {
            let line = lines[at].clone();
            lines.insert(dice.below(text.lines().count()), line);
        }
        3 => {
            let words: Vec<&str> = text.split_whitespace().collect();
            let mut line: Vec<&str> = lines[at].split(' ').collect();
            let word = dice.below(line.len());
            line[word] = dice.pick(&words);
            lines[at] = line.join(" ");
        }
        4 => {
            let numbers = [
                "0",
                "1",
                "63",
                "64",
                "1099511627776",
                "18446744073709551615",
            ];
            let is_digit = |c: char| c.is_ascii_digit();
            if let Some(start) = lines[at].find(is_digit) {
                let rest = &lines[at][start..];
                let end = start + rest.find(|c| !is_digit(c)).unwrap_or(rest.len());
                lines[at].replace_range(start..end, dice.pick(&numbers));
            }
        }
        _ => {
            let junk = dice.pick(&["[", "{", "%", "\"", "f32[4,", "((", "\u{202e}", "-"]);
            let many = junk.repeat(dice.pick(&[1, 10, 20_000]));
            lines[at].push_str(&many);
        }
    }
    lines.join("\n") + "\n"
}

/// Compiles a graph, and runs it if it can be run.
fn compiles(graph: ir::Graph, dice: &mut Dice) -> Result<(), TestCaseError> {
    let options = Options {
        optimizer: dice.pick(&[Optimizer::AdamW, Optimizer::None]),
        kernels: Kernels::Plain,
        budget: Budget::Share(dice.pick(&[1.0, 0.5, 0.2])),
        ..Options::default()
    };
    let device = devices::named("cpu").unwrap();
    let cost = Roofline::new(&device);
    let compiled = match pipeline::compile(graph, &options, &device, &cost, &mut |_| ()) {
        Ok(compiled) => compiled,
        Err(e @ Error::Broken { .. }) => return Err(TestCaseError::fail(e.to_string())),
        Err(_) => return Ok(()),
    };
    prop_assert!(ir::check::check(&compiled.program).is_ok());
    let Ok(artifact) = codegen::emit(&compiled, &Data::new(), None) else {
        return Ok(());
    };
    if validate(&artifact).is_ok() {
        agrees(&artifact)?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(config(300))]

    #[test]
    fn changed_texts_are_refused_or_mean_something(seed in any::<u64>()) {
        let mut dice = Dice::new(seed);
        let mut text = dice.pick(texts());
        for _ in 0..1 + dice.below(2) {
            text = change_text(&text, &mut dice);
        }
        match ir::text::parse_file(&text) {
            Err(e) => prop_assert!(!e.to_string().is_empty()),
            Ok(File::Program(program)) => {
                if ir::verify::program(&program).is_empty() && program.plan.is_some() {
                    let _ = ir::check::check(&program);
                }
            }
            Ok(File::Graph(graph)) => {
                if ir::verify::graph(&graph).is_empty() {
                    compiles(graph, &mut dice)?;
                }
            }
        }
    }
}
