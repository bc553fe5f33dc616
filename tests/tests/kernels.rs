//! Compares generated kernels with plain ones: the same numbers, within the units in the last place
//! that a test allows, on shapes and numbers of every kind; the same bits for any cuts into parts,
//! and in place.

use codegen::kernels::{self, Cache, Generator, Stage, Target, compile_kernels};
use ir::op::body::{Body, Step};
use ir::op::{Access, Attr, Op, OpKind};
use ir::{DType, TensorType};
use lighterage_tests::code::{compile, plain};
use lighterage_tests::example;
use lighterage_tests::generate::config;
use lighterage_tests::numbers::{Close, Numbers, Random, shape_of, tensor};
use passes::graph::optimizer::{Attach, Optimizer};
use proptest::prelude::*;
use runtime::kernels::owned::OwnedTensor;

fn host() -> Target {
    Target::host().expect("these tests run where kernels do")
}

fn ty(dtype: DType, shape: &[u64]) -> TensorType {
    TensorType::new(dtype, shape).unwrap()
}
fn assert_close(
    ours: &OwnedTensor,
    plain: &OwnedTensor,
    ty: &TensorType,
    close: Close,
    what: &str,
) {
    if let Some(i) = close.first_off(ours, plain) {
        let (a, b) = (ours.to_f64s()[i], plain.to_f64s()[i]);
        panic!("{what}, element {i}: generated {a:e}, plain {b:e} of {ty}");
    }
}

/// Runs an op both ways and compares; generated code is also cut, run again, and run in place.
fn check_with(op: &Op, types: &[TensorType], ins: &[OwnedTensor], close: Close, cuts: &[u16]) {
    let refs: Vec<&TensorType> = types.iter().collect();
    let outs = op.infer(&refs).unwrap();
    let generated =
        kernels::generate_op(op, types, &host()).unwrap_or_else(|e| panic!("{e}: {types:?}"));
    let kernel = compile(generated, &host());
    let expected = plain(op, &ins.iter().collect::<Vec<_>>(), &outs).unwrap();
    let got = kernel.run(ins, &outs, &[], &[]);
    let what = format!("{op:?} of {types:?}");
    for ((got, expected), ty) in got.iter().zip(&expected).zip(&outs) {
        assert_close(got, expected, ty, close, &what);
    }
    let bits = |tensors: &[OwnedTensor]| tensors.iter().map(OwnedTensor::bytes).collect::<Vec<_>>();
    assert_eq!(
        bits(&kernel.run(ins, &outs, &[], cuts)),
        bits(&got),
        "{what}: cut"
    );
    for &pair in &kernel.generated.inplace {
        assert_eq!(
            bits(&kernel.run(ins, &outs, &[pair], cuts)),
            bits(&got),
            "{what}: {pair:?} in place"
        );
    }
}
fn check(op: &Op, types: &[TensorType], numbers: Numbers, close: Close, seed: u64) {
    let mut random = Random(seed);
    let ins: Vec<OwnedTensor> = types
        .iter()
        .map(|ty| tensor(ty, numbers, &mut random))
        .collect();
    let cuts: Vec<u16> = (0..3).map(|_| random.next() as u16).collect();
    check_with(op, types, &ins, close, &cuts);
}

fn op(name: &str, attrs: &[(&'static str, Attr)]) -> Op {
    Op::new(name, attrs.iter().cloned()).unwrap()
}

const FLOATS: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::F64];
const ANY: [DType; 10] = [
    DType::F32,
    DType::BF16,
    DType::F16,
    DType::F64,
    DType::Bool,
    DType::U8,
    DType::I8,
    DType::I16,
    DType::I32,
    DType::I64,
];

fn sizes() -> impl Strategy<Value = Vec<u64>> {
    let size = prop_oneof![
        Just(1u64),
        Just(2),
        Just(3),
        Just(4),
        Just(7),
        Just(16),
        Just(17),
        Just(48),
        Just(100)
    ];
    prop_oneof![4 => prop::collection::vec(size, 1..4), 1 => (1u64..40_000).prop_map(|n| vec![n])]
}

/// A shape that broadcasts to another: some dimensions are 1, some leading ones are left out.
fn narrowed(shape: &[u64], bits: u64) -> Vec<u64> {
    let skip = (bits % 4) as usize;
    let skip = if skip <= shape.len() && bits & 4 != 0 {
        skip
    } else {
        0
    };
    shape[skip..]
        .iter()
        .enumerate()
        .map(|(i, &d)| if bits >> (3 + i) & 1 == 1 { 1 } else { d })
        .collect()
}

/// Every group that the pass `fuse` makes of a graph has a kernel on every target.
fn assert_groups_have_kernels(graph: &mut ir::Graph) -> Vec<kernels::Generated> {
    passes::graph::fuse::run(graph);
    let mut all = vec![];
    for &node in &graph.order {
        let data = &graph.nodes[node];
        if data.op.body().is_some() {
            let types = graph.types(&data.inputs);
            for target in Target::ALL {
                let kernel = kernels::generate_op(&data.op, &types, &target);
                let kernel = kernel
                    .unwrap_or_else(|e| panic!("{e}: {types:?}\n{}", ir::text::print_op(&data.op)));
                assert!(
                    kernel.scratch_bytes <= graph.work(node).scratch.cpu,
                    "{}",
                    ir::text::print_op(&data.op)
                );
                if target == Target::AVX2 {
                    all.push(kernel);
                }
            }
        }
    }
    all
}

#[test]
fn groups_of_models_have_kernels() {
    for name in [
        "bert-tiny",
        "gpt2-tiny",
        "llama-tiny",
        "resnet-tiny",
        "moe-tiny",
        "dropout-tiny",
    ] {
        for level in ["core", "coarse"]
            .into_iter()
            .filter(|&level| (name, level) != ("moe-tiny", "coarse"))
        {
            let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("data/models")
                .join(name);
            let model = torch::read(
                &folder.join(format!("joint_{level}.pt2")),
                &Default::default(),
            )
            .unwrap();
            let mut graph = model.graph;
            passes::graph::canonical::run(&mut graph);
            let attach = Attach {
                optimizer: Optimizer::AdamW,
                ..Attach::default()
            };
            passes::graph::optimizer::run(&mut graph, attach).unwrap();
            assert!(
                !assert_groups_have_kernels(&mut graph).is_empty(),
                "{name} {level}"
            );
        }
    }
}

/// Groups of ops on small integers. All ops are exact on them, so a group and its single ops agree
/// bit for bit. Each of the `choices` has an op and two operands.
fn check_body(lead: &[u64], columns: u64, choices: &[(u8, u16, u16)], seed: u64) {
    let full = [lead, &[columns]].concat();
    let dtype = DType::F32;
    let row = [lead, &[1]].concat();
    let last = lead.len() as i64;
    let repeated: Vec<u64> = full
        .iter()
        .enumerate()
        .map(|(i, &d)| if i == 0 { 1 } else { d })
        .collect();
    let reversed: Vec<u64> = lead.iter().rev().chain([&columns]).copied().collect();
    let wider = [lead, &[2 * columns + 1]].concat();
    let operands = [
        ty(dtype, &full),
        ty(dtype, &full),
        ty(dtype, &row),
        ty(dtype, &[columns]),
        ty(dtype, &repeated),
        ty(dtype, &[]),
        ty(dtype, &reversed),
        ty(dtype, &wider),
    ];
    let mut types = operands.to_vec();
    let mut steps: Vec<Step> = vec![];
    // Values that later steps may read, and values that may become results.
    let mut open: Vec<usize> = (0..6).collect();
    let mut results = vec![];
    let mut push = |types: &mut Vec<TensorType>, op: Op, inputs: Vec<usize>| {
        let refs: Vec<&TensorType> = inputs.iter().map(|&v| &types[v]).collect();
        let outs = op.infer(&refs).unwrap();
        steps.push(Step {
            op,
            inputs,
            outputs: outs.len(),
        });
        types.extend(outs);
        types.len() - 1
    };
    // Views: some rows of an operand that is also read as it is, other orders and parts of rows.
    let turned = op("flip", &[("dims", Attr::Ints(vec![0]))]);
    open.push(push(&mut types, turned, vec![0]));
    let order = Attr::Ints((0..last).rev().chain([last]).collect());
    open.push(push(&mut types, op("permute", &[("dims", order)]), vec![6]));
    let part = |start: u64| {
        let [dim, start, end] = [last as u64, start, start + columns].map(|i| Attr::Int(i as i64));
        let step = Attr::Int(1);
        let attrs = [("dim", dim), ("end", end), ("start", start), ("step", step)];
        op("slice", &attrs)
    };
    for start in [0, columns + 1] {
        open.push(push(&mut types, part(start), vec![7]));
    }
    let small = || {
        op(
            "clamp",
            &[("max", Attr::Float(8.0)), ("min", Attr::Float(-8.0))],
        )
    };
    for &(which, a, b) in choices {
        let (a, b) = (open[a as usize % open.len()], open[b as usize % open.len()]);
        let whole = types[a].shape() == full;
        let rows = |name| {
            op(
                name,
                &[
                    ("dims", Attr::Ints(vec![last])),
                    ("keepdim", Attr::Bool(true)),
                ],
            )
        };
        // A number for each row and a number for each column would together make a whole value;
        // this is allowed only if a whole value exists, which defines the kernel's space.
        let fits = whole || types[b].shape() == full || types[a].shape() == types[b].shape();
        let value = match which % 10 {
            0 if fits => push(&mut types, op("add", &[]), vec![a, b]),
            1 if fits => push(&mut types, op("mul", &[]), vec![a, b]),
            2 if fits => push(&mut types, op("maximum", &[]), vec![b, a]),
            3 if fits => {
                let less = push(&mut types, op("lt", &[]), vec![a, b]);
                push(&mut types, op("where", &[]), vec![less, b, a])
            }
            4 if whole => push(&mut types, rows("sum"), vec![a]),
            5 if whole => push(&mut types, rows("amax"), vec![a]),
            6 if whole => {
                let dims = Attr::Ints((0..last).collect());
                let sum = op("sum", &[("dims", dims), ("keepdim", Attr::Bool(false))]);
                results.push(push(&mut types, sum, vec![a]));
                continue;
            }
            7 => {
                let narrow = push(
                    &mut types,
                    op("cast", &[("dtype", Attr::Type(DType::BF16))]),
                    vec![a],
                );
                let twice = push(&mut types, op("add", &[]), vec![narrow, narrow]);
                push(
                    &mut types,
                    op("cast", &[("dtype", Attr::Type(dtype))]),
                    vec![twice],
                )
            }
            8 if whole && seed & 1 == 1 => {
                let flat = Attr::Ints(vec![lead.iter().product::<u64>() as i64, columns as i64]);
                let flat = push(&mut types, op("reshape", &[("shape", flat)]), vec![a]);
                let flat = push(&mut types, op("relu", &[]), vec![flat]);
                let shape = Attr::Ints(full.iter().map(|&d| d as i64).collect());
                push(&mut types, op("reshape", &[("shape", shape)]), vec![flat])
            }
            _ => push(&mut types, op("neg", &[]), vec![a]),
        };
        let value = push(&mut types, small(), vec![value]);
        open.push(value);
        if types[value].shape() == full || types[value].shape() == row {
            results.push(value);
        }
    }
    // All of them become results, or the last three.
    let keep = if seed & 2 == 0 { results.len() } else { 3 };
    let results: Vec<usize> = results.into_iter().rev().take(keep).collect();
    if !results.iter().any(|&v| types[v].shape() == full) || 1 == columns {
        return;
    }
    let mut random = Random(seed);
    let mut ints = |ty: &TensorType| {
        let numbers: Vec<f64> = (0..ty.numel())
            .map(|_| (random.next() % 9) as f64 - 4.0)
            .collect();
        OwnedTensor::from_f64s(codegen::dtype(ty.dtype()), &shape_of(ty), &numbers)
    };
    let ins: Vec<OwnedTensor> = operands.iter().map(&mut ints).collect();
    let body = Body::new(operands.len(), steps.clone(), results.clone()).unwrap();
    let outs: Vec<TensorType> = results.iter().map(|&v| types[v].clone()).collect();
    let mut values = ins.clone();
    for step in &steps {
        let inputs: Vec<&OwnedTensor> = step.inputs.iter().map(|&v| &values[v]).collect();
        let out = &types[values.len()..values.len() + 1];
        let value = match step.op.is_alias() {
            true => inputs[0].reshape(&shape_of(&out[0])),
            false => plain(&step.op, &inputs, out).unwrap().remove(0),
        };
        values.push(value);
    }
    let generated =
        kernels::generate(&body, &operands, &host()).unwrap_or_else(|e| panic!("{e}: {body:?}"));
    let kernel = compile(generated, &host());
    let check = |pairs: &[(usize, usize)], cuts: &[u16]| {
        for ((got, &v), ty) in kernel
            .run(&ins, &outs, pairs, cuts)
            .iter()
            .zip(&results)
            .zip(&outs)
        {
            assert_close(
                got,
                &values[v],
                ty,
                Close::Ulps(0.0),
                &format!("{pairs:?} {cuts:?} {body:?}"),
            );
        }
    };
    check(&[], &[]);
    check(&[], &[seed as u16, (seed >> 16) as u16]);
    for pair in &kernel.generated.inplace {
        check(&[*pair], &[seed as u16]);
    }
}

fn gelus(n: u64) -> Vec<kernels::Generated> {
    let gelu = op("gelu", &[("tanh", Attr::Bool(true))]);
    (1..=n)
        .map(|i| kernels::generate_op(&gelu, &[ty(DType::F32, &[i, 5])], &host()).unwrap())
        .collect()
}

#[test]
fn compiled_kernels_are_kept() {
    let folder = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("cache{}", std::process::id()));
    let cache = Cache::at(&folder);
    let kernels = gelus(9);
    let kernels: Vec<_> = kernels.iter().collect();
    let fresh = compile_kernels(&kernels, &host(), &Cache::off()).unwrap();
    assert_eq!(compile_kernels(&kernels, &host(), &cache).unwrap(), fresh);
    let files = || -> Vec<_> {
        let mut files: Vec<_> = std::fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        files
    };
    assert_eq!(files().len(), 9);
    // Broken, cut off, empty: each is compiled and stored again.
    let whole: Vec<Vec<u8>> = files()
        .iter()
        .map(|file| std::fs::read(file).unwrap())
        .collect();
    let mut broken = whole[0].clone();
    broken[100] ^= 1;
    std::fs::write(&files()[0], &broken).unwrap();
    std::fs::write(&files()[1], &whole[1][..200]).unwrap();
    std::fs::write(&files()[2], []).unwrap();
    assert_eq!(compile_kernels(&kernels, &host(), &cache).unwrap(), fresh);
    assert_eq!(
        files()
            .iter()
            .map(|file| std::fs::read(file).unwrap())
            .collect::<Vec<_>>(),
        whole
    );
    // Stored files are used unchecked: a kernel under another's name is returned.
    std::fs::write(&files()[0], &whole[1]).unwrap();
    assert_ne!(compile_kernels(&kernels, &host(), &cache).unwrap(), fresh);
    // If there is too much, the last used files stay.
    let size = |file: &std::path::PathBuf| std::fs::metadata(file).unwrap().len();
    let bytes: u64 = files().iter().map(size).sum();
    compile_kernels(&kernels, &host(), &cache).unwrap();
    let (old, new) = (&kernels[..1], &gelus(10)[9]);
    compile_kernels(old, &host(), &cache).unwrap();
    compile_kernels(&[new], &host(), &cache.clone().of_bytes(bytes)).unwrap();
    let left = files();
    let kept: u64 = left.iter().map(size).sum();
    assert!(0 < kept && kept <= bytes / 2, "{kept} of {bytes}");
    compile_kernels(old, &host(), &cache).unwrap();
    assert_eq!(
        files(),
        left,
        "the kernel that was used last should be there still"
    );
    std::fs::remove_dir_all(&folder).unwrap();
    // No folder can be made in the place of a file: this is not an error.
    std::fs::write(&folder, "").unwrap();
    assert_eq!(compile_kernels(&kernels, &host(), &cache).unwrap(), fresh);
    std::fs::remove_file(&folder).unwrap();
}

#[test]
fn errors_of_the_generator_are_errors() {
    let program = kernels::find().unwrap();
    let mut generator = Generator::start(&program).unwrap();
    let refused = generator
        .run(
            "k1",
            "module { llvm.func @f() { foo } }",
            &host(),
            Stage::Object,
        )
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("k1") && refused.contains("refused"),
        "{refused}"
    );
    // It goes on after that.
    let kernel = &gelus(1)[0];
    assert!(
        generator
            .run(&kernel.name, &kernel.mlir, &host(), Stage::Object)
            .is_ok()
    );
    // LLVM has no GPU instruction for this, and ends the process.
    let fatal = "module { llvm.func @f(%p: !llvm.ptr<1>) attributes {nvvm.kernel} {
        %x = llvm.load %p : !llvm.ptr<1> -> f32
        %y = math.tanh %x : f32
        llvm.store %y, %p : f32, !llvm.ptr<1>
        llvm.return
    } }";
    let stopped = generator
        .run("k2", fatal, &Target::SM_90, Stage::Asm)
        .unwrap_err()
        .to_string();
    assert!(
        stopped.starts_with("the kernel generator stopped: LLVM ERROR")
            && stopped.contains("kernel k2"),
        "{stopped}"
    );
    let missing = Generator::start(std::path::Path::new("/nowhere/lighterage-mlir"))
        .err()
        .unwrap()
        .to_string();
    assert!(
        missing.contains("/nowhere/lighterage-mlir does not start"),
        "{missing}"
    );
}

/// Every kind of kernel and element type compiles also for other processors than this machine's.
#[test]
fn kernels_compile_for_other_processors() {
    for target in [Target::AVX512, Target::NEON] {
        let mut kernels = vec![];
        for dtype in ANY {
            let (x, w) = (ty(dtype, &[40, 37]), ty(dtype, &[37]));
            let last = [("dims", Attr::Ints(vec![1])), ("keepdim", Attr::Bool(true))];
            let first = [("dims", Attr::Ints(vec![0])), ("keepdim", Attr::Bool(true))];
            let along = [("dim", Attr::Int(1))];
            let norm = [("dims", Attr::Int(1)), ("eps", Attr::Float(1e-5))];
            let cast = |to| op("cast", &[("dtype", Attr::Type(to))]);
            let mut cases = vec![
                (op("add", &[]), vec![x.clone(), w.clone()]),
                (op("amax", &last), vec![x.clone()]),
                (op("sum", &first), vec![x.clone()]),
                (op("gelu", &[("tanh", Attr::Bool(false))]), vec![x.clone()]),
                (op("log_softmax", &along), vec![x.clone()]),
                (op("layer_norm", &norm), vec![x.clone(), w.clone(), w]),
            ];
            cases.extend(ANY.map(|to| (cast(to), vec![x.clone()])));
            let dropout = op(
                "dropout",
                &[("p", Attr::Float(0.1)), ("stream", Attr::Int(1))],
            );
            cases.push((dropout, vec![x.clone(), ty(DType::I64, &[2])]));
            if dtype == DType::F32 {
                let round = op("round_random", &[("stream", Attr::Int(1))]);
                cases.push((round, vec![x.clone(), ty(DType::I64, &[2])]));
            }
            let moments = [
                x.clone(),
                x.clone(),
                x.clone(),
                x,
                ty(DType::I64, &[]),
                ty(DType::F64, &[5]),
            ];
            cases.push((op("adamw", &[]), moments.to_vec()));
            // Not every op supports every type.
            kernels.extend(
                cases
                    .iter()
                    .filter_map(|(op, types)| kernels::generate_op(op, types, &target).ok()),
            );
        }
        assert!(140 < kernels.len());
        let objects =
            compile_kernels(&kernels.iter().collect::<Vec<_>>(), &target, &Cache::off()).unwrap();
        if cfg!(target_arch = "x86_64") && target == Target::AVX512 {
            for (object, kernel) in objects.iter().zip(&kernels) {
                let loaded =
                    runtime::Loaded::new(object).unwrap_or_else(|e| panic!("{e}\n{}", kernel.mlir));
                assert!(
                    kernel
                        .phases
                        .iter()
                        .all(|phase| loaded.function(&phase.symbol).is_some())
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(config(24))]

    #[test]
    fn groups_have_kernels(recipe in lighterage_tests::generate::recipes(60)) {
        let mut graph = lighterage_tests::generate::graph(&recipe);
        passes::graph::canonical::run(&mut graph);
        assert_groups_have_kernels(&mut graph);
    }

    #[test]
    fn functions_of_one_operand(shape in sizes(), kind in select(example::is_function),
        dtype in 0usize..4, seed in any::<u64>()) {
        let dtype = FLOATS[dtype];
        let types = [ty(dtype, &shape)];
        if !kind.facts().is_function {
            check(&plain_op(kind), &types, Numbers::Wild, Close::Ulps(0.0), seed);
        } else if dtype != DType::F64 {
            let ulps = Close::Ulps(if dtype == DType::F32 { 6.0 } else { 1.0 });
            check(&plain_op(kind), &types, Numbers::Wild, ulps, seed);
        }
    }

    #[test]
    fn gelus_of_any_shape(shape in sizes(), tanh in any::<bool>(), dtype in 0usize..3,
        seed in any::<u64>()) {
        // 1 + tanh loses digits if tanh is near -1: errors have the size of x there, and gelu is
        // small. So there are enough numbers that some are positive.
        let shape = [&[16], &shape[..]].concat();
        let close = Close::OfLargest(if dtype == 0 { 4.0 } else { 1.0 });
        let gelu = op("gelu", &[("tanh", Attr::Bool(tanh))]);
        check(&gelu, &[ty(FLOATS[dtype], &shape)], Numbers::Plain, close, seed);
    }

    #[test]
    fn functions_of_integers(
        shape in sizes(),
        kind in select(|kind| example::is_function(kind) && !kind.facts().is_real()),
        dtype in 5usize..10, seed in any::<u64>(),
    ) {
        let types = [ty(ANY[dtype], &shape)];
        check(&plain_op(kind), &types, Numbers::Wild, Close::Ulps(0.0), seed);
    }

    #[test]
    fn two_operands(
        shape in sizes(), kind in select(example::is_binary), dtype in 0usize..10,
        bits in any::<u64>(), seed in any::<u64>(),
    ) {
        let (a, b) = (ty(ANY[dtype], &shape), ty(ANY[dtype], &narrowed(&shape, bits)));
        let types = if bits >> 60 & 1 == 1 { [b, a] } else { [a, b] };
        // Not every op supports every type.
        if plain_op(kind).infer(&[&types[0], &types[1]]).is_ok() {
            check(&plain_op(kind), &types, Numbers::Wild, Close::Ulps(0.0), seed);
        }
    }

    #[test]
    fn an_operand_and_a_number(shape in sizes(), kind in select(example::takes_a_number),
        dtype in 0usize..4, seed in any::<u64>()) {
        let types = [ty(FLOATS[dtype], &shape)];
        // Only some powers have code.
        let value = [-2.0, 0.5, 2.0, 3.0, -1.0][(seed % 5) as usize];
        let op = op(kind.name(), &[("value", Attr::Float(value))]);
        check(&op, &types, Numbers::Wild, Close::Ulps(0.0), seed);
    }

    #[test]
    fn bounds(shape in sizes(), dtype in 0usize..4, seed in any::<u64>()) {
        let x = ty(FLOATS[dtype], &shape);
        let bounds = op("clamp", &[("max", Attr::Float(2.0)), ("min", Attr::Int(-1))]);
        check(&bounds, std::slice::from_ref(&x), Numbers::Wild, Close::Ulps(0.0), seed);
        let threshold = op("threshold_bwd", &[("value", Attr::Float(0.5))]);
        check(&threshold, &[x.clone(), x], Numbers::Wild, Close::Ulps(0.0), seed);
    }

    #[test]
    fn bits_and_choices(shape in sizes(), which in 0usize..3, dtype in 4usize..10,
        bits in any::<u64>(), seed in any::<u64>()) {
        let close = Close::Ulps(0.0);
        match which {
            0 => check(&Op::BitwiseNot, &[ty(ANY[dtype], &shape)], Numbers::Wild, close, seed),
            1 => check(&Op::LogicalNot, &[ty(ANY[dtype], &shape)], Numbers::Wild, close, seed),
            _ => {
                let dtype = ANY[(seed % 10) as usize];
                let (c, x) = (ty(DType::Bool, &narrowed(&shape, bits >> 8)), ty(dtype, &shape));
                check(&Op::Where, &[c, x, ty(dtype, &narrowed(&shape, bits))],
                    Numbers::Wild, close, seed);
            }
        }
    }

    #[test]
    fn casts(shape in sizes(), from in 0usize..10, to in 0usize..10, seed in any::<u64>()) {
        let op = op("cast", &[("dtype", Attr::Type(ANY[to]))]);
        check(&op, &[ty(ANY[from], &shape)], Numbers::Wild, Close::Ulps(0.0), seed);
    }

    #[test]
    fn derivatives(shape in sizes(), which in 0usize..5, dtype in 0usize..3, seed in any::<u64>()) {
        let x = ty(FLOATS[dtype], &shape);
        let types = [x.clone(), x];
        let half = dtype != 0;
        let close = Close::OfLargest(if half { 1.0 } else { 16.0 });
        match which {
            0 => check(&op("tanh_bwd", &[]), &types, Numbers::Wild, Close::Ulps(0.0), seed),
            1 => check(&op("sigmoid_bwd", &[]), &types, Numbers::Wild, Close::Ulps(0.0), seed),
            2 => check(&op("silu_bwd", &[]), &types, Numbers::Plain, close, seed),
            // The error of 1 - tanh^2 is multiplied by squares of x.
            n => check(&op("gelu_bwd", &[("tanh", Attr::Bool(n == 3))]), &types, Numbers::Small,
                close, seed),
        }
    }

    #[test]
    fn reductions(
        shape in prop::collection::vec(1u64..20, 0..3), columns in columns(),
            kind in select(example::is_reduction), dtype in 0usize..4,
        dims in 1usize..3, keep in any::<bool>(), seed in any::<u64>(),
    ) {
        let shape = [shape, vec![columns]].concat();
        let first = shape.len().saturating_sub(dims) as i64;
        let dims: Vec<i64> = (first..shape.len() as i64).collect();
        let n: u64 = shape[first as usize..].iter().product();
        let attrs = [("dims", Attr::Ints(dims)), ("keepdim", Attr::Bool(keep))];
        let dtype = FLOATS[dtype];
        let x = [ty(dtype, &shape)];
        let (numbers, close) = match kind {
            OpKind::Sum | OpKind::Mean => {
                // Sums in f32, of numbers of about 4.
                let bound = if dtype == DType::F64 { 1e-10 } else { 4.0 * n as f64 * 1e-7 };
                let bound = if kind == OpKind::Sum { bound } else { bound / n as f64 };
                (Numbers::Plain, Close::Absolute(bound))
            }
            _ => (Numbers::Wild, Close::Ulps(0.0)),
        };
        check(&op(kind.name(), &attrs), &x, numbers, close, seed);
    }

    #[test]
    fn reductions_of_integers(
        shape in prop::collection::vec(1u64..20, 1..4),
        kind in select(|kind| example::is_reduction(kind) && !kind.facts().is_real()),
        dtype in 5usize..10, seed in any::<u64>(),
    ) {
        let last = shape.len() as i64 - 1;
        let attrs = [("dims", Attr::Ints(vec![last])), ("keepdim", Attr::Bool(true))];
        let op = op(kind.name(), &attrs);
        check(&op, &[ty(ANY[dtype], &shape)], Numbers::Wild, Close::Ulps(0.0), seed);
    }

    #[test]
    fn sums_over_rows(
        rows in 2u64..700, shape in prop::collection::vec(1u64..50, 1..3), dtype in 0usize..10,
            keep in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let dtype = ANY[dtype];
        if dtype != DType::Bool && shape != [1] {
            let x = ty(dtype, &[&[rows][..], &shape].concat());
            let op = op("sum", &[("dims", Attr::Ints(vec![0])), ("keepdim", Attr::Bool(keep))]);
            let bound = if dtype == DType::F64 { 1e-10 } else { 4.0 * rows as f64 * 1e-7 };
            check(&op, &[x], Numbers::Plain, Close::Absolute(bound), seed);
        }
    }

    #[test]
    fn softmaxes(rows in 1u64..40, columns in columns(), which in 0usize..4, dtype in 0usize..3,
        seed in any::<u64>()) {
        if 1 < columns {
            let half = dtype != 0;
            let x = ty(FLOATS[dtype], &[rows, columns]);
            let along = |name| op(name, &[("dim", Attr::Int(1))]);
            let close = Close::OfLargest(if half { 1.0 } else { 16.0 });
            match which {
                0 => check(&along("softmax"), &[x], Numbers::Wild, close, seed),
                1 => check(&along("log_softmax"), &[x], Numbers::Wild, close, seed),
                n => {
                    let name = ["softmax_bwd", "log_softmax_bwd"][n - 2];
                    let bound = 100.0 * columns as f64 * 1e-6;
                    check(&along(name), &[x.clone(), x], Numbers::Small, Close::Absolute(bound),
                        seed);
                }
            }
        }
    }

    /// Rows are processed in blocks with different largest elements: some rise, and a part, or
    /// everything, is masked out.
    #[test]
    fn softmaxes_of_long_rows(
        rows in 1u64..4,
        columns in prop_oneof![4096u64..9000, Just(8192u64), Just(70_000u64)],
        (log, dtype, rising) in (any::<bool>(), 0usize..3, any::<bool>()),
        (from, to) in (0.0..1.0, 0.0..1.3),
        seed in any::<u64>(),
    ) {
        let x = ty(FLOATS[dtype], &[rows, columns]);
        let mut numbers = tensor(&x, Numbers::Small, &mut Random(seed)).to_f64s();
        for (i, number) in numbers.iter_mut().enumerate() {
            let place = (i as u64 % columns) as f64 / columns as f64;
            *number += if rising { 60.0 * place } else { 0.0 };
            if from <= place && place < to {
                *number = f64::NEG_INFINITY;
            }
        }
        let ins = [OwnedTensor::from_f64s(codegen::dtype(x.dtype()), &shape_of(&x), &numbers)];
        let op = op(if log { "log_softmax" } else { "softmax" }, &[("dim", Attr::Int(1))]);
        check_with(&op, &[x], &ins, Close::OfLargest(if dtype == 0 { 16.0 } else { 1.0 }),
            &[9000, 40000]);
    }

    #[test]
    fn layer_norms(
        lead in prop::collection::vec(1u64..12, 0..3),
            norm in prop::collection::vec(2u64..40, 1..3), operands in 1usize..4,
        dtype in 0usize..4, seed in any::<u64>(),
    ) {
        let dtype = FLOATS[dtype];
        let (x, w) = (ty(dtype, &[&lead[..], &norm].concat()), ty(dtype, &norm));
        let op = op("layer_norm", &[("dims", Attr::Int(norm.len() as i64)),
            ("eps", Attr::Float(1e-3))]);
        let close = Close::OfLargest(if dtype.bytes() == 2 { 2.0 } else { 64.0 });
        check(&op, &[x, w.clone(), w][..operands], Numbers::Small, close, seed);
    }

    #[test]
    fn layer_norms_backwards(
        rows in 1u64..300, norm in prop::collection::vec(2u64..30, 1..3),
            weighted in any::<bool>(), mask in 1i64..8,
        dtype in 0usize..4, seed in any::<u64>(),
    ) {
        let dtype = FLOATS[dtype];
        let x = ty(dtype, &[&[rows][..], &norm].concat());
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let statistics = ty(wide, &[&[rows][..], &vec![1; norm.len()]].concat());
        let mask = Attr::Ints(vec![mask & 1, mask >> 1 & 1, mask >> 2 & 1]);
        let op = op("layer_norm_bwd", &[("dims", Attr::Int(norm.len() as i64)), ("mask", mask)]);
        let mut types = vec![x.clone(), x, statistics.clone(), statistics];
        if weighted {
            types.push(ty(dtype, &norm));
        }
        // Products of five numbers of about 3, sums of up to 900 of them.
        let bound = if dtype == DType::F64 { 1e-9 } else { 2e-2 };
        let close = if dtype.bytes() == 2 { Close::OfLargest(2.0) } else { Close::Absolute(bound) };
        check(&op, &types, Numbers::Small, close, seed);
    }

    #[test]
    fn losses_backwards(
        rows in 1u64..60, columns in columns(), reduction in 0i64..3, dtype in 0usize..4,
        seed in any::<u64>(),
    ) {
        let (dtype, random) = (FLOATS[dtype], &mut Random(seed));
        let (shape, of_rows) = ([rows as i64, columns as i64], [rows]);
        let loss = op("nll_loss_bwd", &[
            ("dtype", Attr::Type(dtype)),
            ("ignore", Attr::Int(0)),
            ("reduction", Attr::Int(reduction)),
            ("shape", Attr::Ints(shape.to_vec())),
        ]);
        let one = ty(dtype, &[]);
        let dloss = if reduction == 0 { ty(dtype, &of_rows) } else { one.clone() };
        let types = [dloss, ty(DType::I64, &of_rows), one];
        let targets: Vec<i64> = (0..rows).map(|_| (random.next() % columns) as i64).collect();
        let ins = [
            tensor(&types[0], Numbers::Plain, random),
            OwnedTensor::from_i64s(artifact::DType::I64, &[rows as usize], &targets),
            OwnedTensor::from_f64s(codegen::dtype(dtype), &[], &[3.0]),
        ];
        check_with(&loss, &types, &ins, Close::Ulps(0.0), &[30000]);
    }

    #[test]
    fn optimizers(n in 1u64..40_000, dtype in 0usize..4, scaled in any::<bool>(),
        step in 1i64..5000, seed in any::<u64>()) {
        for kind in example::ops_that(example::is_update) {
            check_update(kind, &ty(FLOATS[dtype], &[n]), scaled, step, seed);
        }
    }

    #[test]
    fn groups(
        lead in prop::collection::vec(2u64..9, 1..3), columns in 2u64..80, seed in any::<u64>(),
        choices in prop::collection::vec((any::<u8>(), any::<u16>(), any::<u16>()), 1..14),
    ) {
        check_body(&lead, columns, &choices, seed);
    }

    #[test]
    fn dropouts(shape in sizes(), dtype in 0usize..4, p in 0usize..4, seed in any::<u64>()) {
        let mut random = Random(seed);
        let types = [ty(FLOATS[dtype], &shape), ty(DType::I64, &[2])];
        let rng = OwnedTensor::from_i64s(artifact::DType::I64, &[2],
            &[random.next() as i64, random.next() as i64]);
        let x = tensor(&types[0], Numbers::Wild, &mut random);
        let dropout = op("dropout", &[("p", Attr::Float([0.0, 0.1, 0.5, 1.0][p])),
            ("stream", Attr::Int(3))]);
        check_with(&dropout, &types, &[x, rng.clone()], Close::Ulps(0.0), &[30000]);
        let types = [ty(DType::F32, &shape), ty(DType::I64, &[2])];
        let x = tensor(&types[0], Numbers::Wild, &mut random);
        let round = op("round_random", &[("stream", Attr::Int(3))]);
        check_with(&round, &types, &[x, rng], Close::Ulps(0.0), &[30000]);
        let types = [ty(FLOATS[dtype], &shape), ty(DType::Bool, &shape)];
        check(&op("dropout_bwd", &[("scale", Attr::Float(1.25))]), &types, Numbers::Wild,
            Close::Ulps(0.0), seed);
    }
}

/// An update of parameters of the type of `p`, or of the op's own types.
fn check_update(kind: OpKind, p: &TensorType, scaled: bool, step: i64, seed: u64) {
    let (op, facts, random) = (plain_op(kind), kind.facts(), &mut Random(seed));
    let operands = facts.inputs.0 + usize::from(scaled);
    let types = example::fitting(&op, vec![p.clone(); operands]);
    let types = types.unwrap_or_else(|| panic!("{} needs a case here", kind.name()));
    let mut ins: Vec<OwnedTensor> = types
        .iter()
        .map(|ty| tensor(ty, Numbers::Plain, random))
        .collect();
    let options = facts.options_from.unwrap();
    let beta1 = if seed & 1 == 0 { 0.9 } else { 0.3 };
    for i in options..operands {
        ins[i] = match (types[i].dtype(), types[i].shape()) {
            (DType::I64, []) => OwnedTensor::from_i64s(artifact::DType::I64, &[], &[step]),
            (DType::F64, [5]) => {
                let hyper = [1e-3, beta1, 0.999, 1e-8, 0.01];
                OwnedTensor::from_f64s(artifact::DType::F64, &[5], &hyper)
            }
            (DType::F64, [3]) => {
                OwnedTensor::from_f64s(artifact::DType::F64, &[3], &[1e-3, 0.9, 0.01])
            }
            (dtype @ (DType::F32 | DType::F64), []) => {
                OwnedTensor::from_f64s(codegen::dtype(dtype), &[], &[0.25])
            }
            _ => panic!(
                "{} takes options that are not here: {}",
                kind.name(),
                types[i]
            ),
        };
    }
    if types[options].dtype() == DType::I64 {
        // An op that counts steps has second moments last. They are not negative.
        let squares: Vec<f64> = ins[options - 1].to_f64s().iter().map(|x| x * x).collect();
        let v = &types[options - 1];
        ins[options - 1] =
            OwnedTensor::from_f64s(codegen::dtype(v.dtype()), &shape_of(v), &squares);
    }
    // The last bit of a power may differ, and so the last bit of a coefficient. For numbers in
    // halves, the difference of the halves is not the difference of the numbers.
    let is_exact = types[0].dtype() != DType::F64;
    let close = if is_exact {
        Close::Ulps(0.0)
    } else {
        Close::OfLargest(64.0)
    };
    check_with(&op, &types, &ins, close, &[9000, 40000]);
}

/// Every op with a generated kernel, including ops that no other test of this file draws.
#[test]
fn every_generated_op_equals_its_plain_kernel() {
    let x = ty(DType::F32, &[7, 11, 13]);
    let drawn = |kind| {
        example::is_generated(kind) && !example::is_update(kind) && !example::reads_indices(kind)
    };
    for kind in example::ops_that(drawn) {
        let example = example::example(kind, &x);
        let (op, types) = example.unwrap_or_else(|| panic!("{} needs a case here", kind.name()));
        let is_exact = kind.facts().access == Access::Element && !kind.facts().is_function;
        let close = Close::OfLargest(if is_exact { 0.0 } else { 64.0 });
        check(&op, &types, Numbers::Small, close, 1);
    }
}

/// An op without attributes.
fn plain_op(kind: OpKind) -> Op {
    op(kind.name(), &[])
}

/// One of the ops of which `holds` is true.
fn select(holds: impl Fn(OpKind) -> bool) -> impl Strategy<Value = OpKind> {
    prop::sample::select(example::ops_that(holds))
}

fn columns() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 1u64..70, 1 => Just(384u64), 1 => Just(1000u64), 1 => Just(9001u64)]
}
