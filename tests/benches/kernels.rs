//! Generated kernels compared with plain ones and with copying memory, in turn, the fastest of
//! several runs. The arguments are the number of threads (default: the number of cores) and names
//! of kernels (default: all): `cargo bench -p lighterage-tests --bench kernels -- 1 softmax`.
#![allow(clippy::print_stdout, reason = "a benchmark prints")]

use codegen::kernels::{self, Generator, Stage, Target};
use ir::op::{Attr, Op, OpKind};
use ir::{DType, TensorType};
use lighterage_tests::code::{self, compile};
use lighterage_tests::example;
use passes::graph::optimizer::{Attach, Optimizer};
use runtime::Team;
use runtime::kernels::owned::OwnedTensor;
use std::time::{Duration, Instant};

fn ty(dtype: DType, shape: &[u64]) -> TensorType {
    TensorType::new(dtype, shape).expect("the types should be small")
}

/// Memory to copy from one place to another.
struct Copy {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Copy {
    /// Reads half of the bytes and writes the other half.
    fn of(bytes: u64) -> Copy {
        Copy {
            from: vec![1; bytes as usize / 2],
            to: vec![2; bytes as usize / 2],
        }
    }
    fn time(&mut self, threads: usize) -> Duration {
        let piece = self.to.len().div_ceil(threads);
        let start = Instant::now();
        std::thread::scope(|scope| {
            for (to, from) in self.to.chunks_mut(piece).zip(self.from.chunks(piece)) {
                scope.spawn(|| to.copy_from_slice(std::hint::black_box(from)));
            }
        });
        start.elapsed()
    }
}

const ROUNDS: usize = 9;

fn op(name: &str, attrs: &[(&'static str, Attr)]) -> Op {
    Op::new(name, attrs.iter().cloned()).expect("there should be such an op")
}

fn main() {
    let target = Target::host().expect("kernels should run here");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let given: Vec<String> = std::env::args()
        .skip(1)
        .filter(|arg| !arg.starts_with('-'))
        .collect();
    let threads = given
        .iter()
        .find_map(|arg| arg.parse().ok())
        .unwrap_or(cores);
    let names: Vec<&str> = given
        .iter()
        .map(String::as_str)
        .filter(|arg| arg.parse::<usize>().is_err())
        .collect();
    speeds(&target, threads, &names);
    if names.is_empty() {
        compile_times(&target);
    }
}

fn speeds(target: &Target, threads: usize, names: &[&str]) {
    let f = DType::F32;
    let x = ty(f, &[4096, 3072]);
    let row = ty(f, &[16384, 768]);
    let (stat, w) = (ty(f, &[16384, 1]), ty(f, &[768]));
    let dims = |dims: Vec<i64>| [("dims", Attr::Ints(dims)), ("keepdim", Attr::Bool(false))];
    let p = ty(f, &[16 << 20]);
    let cases: Vec<(Op, Vec<TensorType>)> = vec![
        (op("add", &[]), vec![x.clone(), ty(f, &[3072])]),
        (op("gelu", &[("tanh", Attr::Bool(true))]), vec![x.clone()]),
        (op("gelu", &[("tanh", Attr::Bool(false))]), vec![x.clone()]),
        (
            op("gelu_bwd", &[("tanh", Attr::Bool(true))]),
            vec![x.clone(), x.clone()],
        ),
        (op("silu_bwd", &[]), vec![x.clone(), x.clone()]),
        (
            op("cast", &[("dtype", Attr::Type(DType::BF16))]),
            vec![x.clone()],
        ),
        (
            op(
                "layer_norm",
                &[("dims", Attr::Int(1)), ("eps", Attr::Float(1e-5))],
            ),
            vec![row.clone(), w.clone(), w.clone()],
        ),
        (
            op(
                "layer_norm_bwd",
                &[("dims", Attr::Int(1)), ("mask", Attr::Ints(vec![1, 1, 1]))],
            ),
            vec![row.clone(), row.clone(), stat.clone(), stat, w],
        ),
        (
            op("softmax", &[("dim", Attr::Int(1))]),
            vec![ty(f, &[512, 50304])],
        ),
        (
            op("log_softmax", &[("dim", Attr::Int(1))]),
            vec![ty(f, &[512, 50304])],
        ),
        (
            op("softmax", &[("dim", Attr::Int(1))]),
            vec![ty(f, &[98304, 256])],
        ),
        (op("sum", &dims(vec![0])), vec![x.clone()]),
        (op("sum", &dims(vec![1])), vec![x]),
        (
            op("adamw", &[]),
            vec![
                p.clone(),
                p.clone(),
                p.clone(),
                p.clone(),
                ty(DType::I64, &[]),
                ty(DType::F64, &[5]),
            ],
        ),
        (
            op(
                "dropout",
                &[("p", Attr::Float(0.1)), ("stream", Attr::Int(1))],
            ),
            vec![p, ty(DType::I64, &[2])],
        ),
    ];
    let others = names
        .iter()
        .filter(|name| !cases.iter().any(|(op, _)| op.name() == **name));
    let others: Vec<_> = others.map(|name| case_of(name)).collect();
    let cases = cases.into_iter().chain(others);
    let team = Team::new(threads).expect("threads should start");
    println!(
        "{threads} threads\nkernel                                   generated ms   plain ms   \
         plain/gen.   bandwidth/copy's"
    );
    for (op, types) in cases {
        if !names.is_empty() && !names.contains(&op.name()) {
            continue;
        }
        let refs: Vec<&TensorType> = types.iter().collect();
        let outs = op.infer(&refs).expect("types should fit");
        let kernel = compile(
            kernels::generate_op(&op, &types, target).expect("there should be a kernel"),
            target,
        );
        let fill = |ty: &TensorType| {
            let n = ty.numel() as usize;
            let shape: Vec<usize> = ty.shape().iter().map(|&d| d as usize).collect();
            let numbers: Vec<f64> = (0..n).map(|i| (i * 7919 % 1009) as f64 / 400.0).collect();
            OwnedTensor::from_f64s(codegen::dtype(ty.dtype()), &shape, &numbers)
        };
        let ins: Vec<OwnedTensor> = types.iter().map(fill).collect();
        let mut run = kernel.bind(&ins, &outs, threads);
        let refs: Vec<&OwnedTensor> = ins.iter().collect();
        let attrs = code::attrs(&op);
        let mut plain =
            code::bind_plain(&op, &attrs, &refs, &outs).expect("there should be a plain kernel");
        let mut copy = Copy::of(types.iter().chain(&outs).map(TensorType::bytes).sum());
        let (mut ours, mut theirs, mut copied) = (Duration::MAX, Duration::MAX, Duration::MAX);
        for _ in 0..ROUNDS {
            let start = Instant::now();
            run();
            ours = ours.min(start.elapsed());
            let mut marks = vec![];
            plain
                .run_on(Some(&team), || marks.push(Instant::now()))
                .expect("it should run");
            theirs = theirs.min(marks[1] - marks[0]);
            copied = copied.min(copy.time(threads));
        }
        let share = copied.as_secs_f64() / ours.as_secs_f64();
        let (ours, theirs) = (ours.as_secs_f64() * 1e3, theirs.as_secs_f64() * 1e3);
        let name = format!("{} {}", op.name(), types[0]);
        println!(
            "{name:40} {ours:12.2} {theirs:10.2} {:12.2} {share:18.2}",
            theirs / ours
        );
    }
}

/// A case for an op without one above.
fn case_of(name: &str) -> (Op, Vec<TensorType>) {
    let kind = OpKind::from_name(name).unwrap_or_else(|| panic!("there is no op {name}"));
    assert!(
        example::is_generated(kind),
        "no kernel is generated for {name}"
    );
    let case = example::example(kind, &ty(DType::F32, &[4096, 3072]));
    case.unwrap_or_else(|| panic!("{name} needs a case here"))
}

/// Compile times of the groups of a model.
fn compile_times(target: &Target) {
    let program = kernels::find().expect("the generator should have been built");
    let start = Instant::now();
    let mut generator = Generator::start(&program).expect("the generator should start");
    let nothing = "module {\n}\n";
    generator
        .run("nothing", nothing, target, Stage::Object)
        .expect("nothing should compile");
    println!(
        "start of a generator: {:.1} ms",
        start.elapsed().as_secs_f64() * 1e3
    );
    for name in ["gpt2-tiny", "llama-tiny", "bert-tiny", "dropout-tiny"] {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("data/models")
            .join(name);
        let model = torch::read(&folder.join("joint_core.pt2"), &Default::default())
            .expect("the model should be there");
        let mut graph = model.graph;
        passes::graph::canonical::run(&mut graph);
        let attach = Attach {
            optimizer: Optimizer::AdamW,
            ..Attach::default()
        };
        passes::graph::optimizer::run(&mut graph, attach).expect("an optimizer should fit");
        passes::graph::fuse::run(&mut graph);
        let (mut n, mut slowest) = (0, (Duration::ZERO, String::new()));
        let (mut text, mut all) = (Duration::ZERO, Duration::ZERO);
        let mut seen = std::collections::BTreeSet::new();
        for &node in &graph.order {
            let data = &graph.nodes[node];
            let types = graph.types(&data.inputs);
            let start = Instant::now();
            let Ok(kernel) = kernels::generate_op(&data.op, &types, target) else {
                continue;
            };
            text += start.elapsed();
            if kernel.phases.is_empty() || !seen.insert(kernel.name.clone()) {
                continue;
            }
            let start = Instant::now();
            generator
                .run(&kernel.name, &kernel.mlir, target, Stage::Object)
                .expect("the kernel should compile");
            let time = start.elapsed();
            all += time;
            n += 1;
            if slowest.0 < time {
                slowest = (
                    time,
                    format!("{} ({} lines)", data.op.name(), kernel.mlir.lines().count()),
                );
            }
        }
        println!(
            "{name}: {n} kernels, text {:.2} ms each, object {:.1} ms each; slowest {:.1} ms: {}",
            text.as_secs_f64() * 1e3 / f64::from(n),
            all.as_secs_f64() * 1e3 / f64::from(n),
            slowest.0.as_secs_f64() * 1e3,
            slowest.1
        );
    }
}
