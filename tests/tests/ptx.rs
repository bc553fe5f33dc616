//! Checks generated GPU kernels without a GPU: NVIDIA's assembler accepts every kernel of every
//! model, for every GPU. No kernel has calls or spills registers, and kernels that only move
//! numbers move 16 bytes at a time.

use codegen::kernels::{self, Generated, Generator, Stage, Target};
use ir::op::{Attr, Op};
use ir::{DType, TensorType};
use lighterage_tests::gpu::{ops_for_gpus, ptxas};
use passes::graph::optimizer::{Attach, Optimizer};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

const GPUS: [Target; 3] = [Target::SM_80, Target::SM_90, Target::SM_100];

/// The PTX of several kernels as one module.
fn ptx(kernels: &[Generated], target: &Target) -> String {
    let body = |kernel: &Generated| {
        let inside = kernel
            .mlir
            .strip_prefix("module {\n")
            .and_then(|text| text.strip_suffix("}\n"));
        inside.expect("a kernel should be a module").to_string()
    };
    let module = format!(
        "module {{\n{}}}\n",
        kernels.iter().map(body).collect::<String>()
    );
    let mut generator = Generator::start(&kernels::find().expect("the generator should be there"))
        .expect("it should start");
    let ptx = generator
        .run("all", &module, target, Stage::Asm)
        .unwrap_or_else(|e| panic!("{target}: {e}"));
    String::from_utf8(ptx).expect("PTX should be text")
}

/// Assembles PTX; returns the registers of each kernel. Panics if a kernel has local memory.
fn assemble(ptxas: &Path, of: &str, ptx: &str, target: &Target) -> Vec<u32> {
    if *target == Target::SM_100 {
        // A driver compiles the text for later GPUs too.
        assemble_for(ptxas, of, ptx, "sm_120");
    }
    assemble_for(ptxas, of, ptx, target.cpu())
}

/// The same for GPUs of an architecture.
fn assemble_for(ptxas: &Path, of: &str, ptx: &str, arch: &str) -> Vec<u32> {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("{of}.{arch}.{}.ptx", std::process::id()));
    std::fs::write(&file, ptx).unwrap();
    let cubin = file.with_extension("cubin");
    let out = Command::new(ptxas)
        .arg(format!("-arch={arch}"))
        .arg("-v")
        .arg(&file)
        .arg("-o")
        .arg(&cubin)
        .output();
    let out = out.expect("ptxas should run");
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(
        out.status.success(),
        "{} for {arch}:\n{said}",
        file.display()
    );
    let mut registers = vec![];
    let mut function = "";
    for line in said.lines() {
        function = line
            .split_once("Function properties for ")
            .map_or(function, |(_, name)| name);
        if line.contains("spill") {
            let none =
                line.trim() == "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
            assert!(none, "{function} in {}: {line}", file.display());
        }
        if let Some((_, used)) = line.split_once("Used ") {
            registers.push(used.split(' ').next().unwrap().parse().unwrap());
        }
    }
    std::fs::remove_file(&file).unwrap();
    std::fs::remove_file(&cubin).unwrap();
    registers
}

#[test]
fn kernels_of_models_assemble() {
    let Some(ptxas) = ptxas() else { return };
    // The assembler is slow.
    std::thread::scope(|scope| {
        for target in GPUS {
            let ptxas = &ptxas;
            scope.spawn(move || assemble_models(ptxas, target));
        }
    });
}

fn assemble_models(ptxas: &Path, target: Target) {
    let mut kernels: BTreeMap<String, Generated> = BTreeMap::new();
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
            let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("data/models")
                .join(name);
            let model =
                torch::read(&folder.join(format!("joint_{level}.pt2")), &BTreeMap::new()).unwrap();
            let mut graph = model.graph;
            passes::graph::canonical::run(&mut graph);
            let attach = Attach {
                optimizer: Optimizer::AdamW,
                ..Attach::default()
            };
            passes::graph::optimizer::run(&mut graph, attach).unwrap();
            passes::graph::fuse::run(&mut graph);
            for &node in &graph.order {
                let data = &graph.nodes[node];
                let types = graph.types(&data.inputs);
                if data.op.is_alias() {
                    continue;
                }
                let scratch = graph.work(node).scratch.gpu;
                let kernel = codegen::kernel(&data.op, &types, &target, scratch);
                let kernel = kernel.unwrap_or_else(|e| panic!("{e}"));
                if !kernel.phases.is_empty() {
                    kernels.insert(kernel.name.clone(), kernel);
                }
            }
        }
    }
    let kernels: Vec<Generated> = kernels.into_values().collect();
    let text = ptx(&kernels, &target);
    assert!(!text.contains(".extern"), "{target}");
    let registers = assemble(ptxas, "models", &text, &target);
    let phases: usize = kernels.iter().map(|kernel| kernel.phases.len()).sum();
    assert_eq!(registers.len(), phases);
    let most = registers.iter().max().unwrap();
    eprintln!(
        "{}: {phases} kernels, at most {most} registers",
        target.cpu()
    );
}

/// The kernels that are written for GPUs, at the sizes that tests compare.
#[test]
fn kernels_of_ops_assemble() {
    let Some(ptxas) = ptxas() else { return };
    let target = Target::SM_90;
    let cases = ops_for_gpus(&target);
    let texts: BTreeSet<&str> = cases.iter().map(|case| &*case.ptx).collect();
    let is_directive = |line: &&str| {
        [".version", ".target", ".address_size"]
            .iter()
            .any(|word| line.starts_with(word))
    };
    let lines = texts.iter().flat_map(|text| text.lines());
    let lines = lines.filter(|line| !is_directive(line));
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    let head = format!(".version 8.0\n.target {}\n.address_size 64\n", target.cpu());
    let registers = assemble(&ptxas, "ops", &(head + &text), &target);
    assert!(registers.len() > 250, "{}", registers.len());
}

/// Attention over rows, for every size of heads that tensor cores compute, and the same in f32: q,
/// k and v share their rows or have their own, and heads of q share heads of k and v. Where heads
/// lie changes only numbers in the text, so only the first GPU assembles all places.
#[test]
fn attention_over_rows_assembles() {
    let Some(ptxas) = ptxas() else { return };
    std::thread::scope(|scope| {
        for (i, target) in GPUS.into_iter().enumerate() {
            let ptxas = &ptxas;
            scope.spawn(move || {
                let places = if i == 0 { 3 } else { 1 };
                let kernels = rows_of_heads(&target, places);
                let phases: usize = kernels.iter().map(|kernel| kernel.phases.len()).sum();
                let registers = assemble(ptxas, "rows", &ptx(&kernels, &target), &target);
                assert_eq!((registers.len(), phases), (28 * places, 28 * places));
            });
        }
    });
}

fn rows_of_heads(target: &Target, places: usize) -> Vec<Generated> {
    let [batch, rows]: [u64; 2] = [2, 130];
    // Heads of k and v, the first heads in rows, and heads in a row of q, and of k and v.
    let all = [
        (4, [0, 4, 8], [12, 12]),
        (2, [0, 0, 2], [4, 4]),
        (1, [0, 4, 5], [6, 6]),
    ];
    let mut kernels = vec![];
    for ((groups, first, of_rows), causal) in all[..places]
        .iter()
        .flat_map(|place| [(place, false), (place, true)])
    {
        for (width, dtype) in [64, 128]
            .into_iter()
            .flat_map(|width| [(width, DType::BF16), (width, DType::F32)])
        {
            let attrs = [
                ("causal", Attr::Bool(causal)),
                ("first", Attr::Ints(first.to_vec())),
                ("heads", Attr::Ints(vec![4, *groups])),
                ("scale", Attr::Float(0.3)),
            ];
            let of = |shape: &[u64]| TensorType::new(dtype, shape).unwrap();
            let q = of(&[batch, rows, of_rows[0], width]);
            let k = of(&[batch, rows, of_rows[1], width]);
            let forward = Op::new("sdpa_rows", attrs.clone()).unwrap();
            let ins = vec![q, k.clone(), k];
            let outs = forward.infer(&ins.iter().collect::<Vec<_>>()).unwrap();
            let backward = Op::new("sdpa_rows_bwd", attrs).unwrap();
            let operands = [&outs[..1], &ins[..], &outs[..]].concat();
            for (op, types) in [(forward, ins), (backward, operands)] {
                kernels.push(codegen::kernel(&op, &types, target, 0).unwrap());
            }
        }
    }
    kernels
}

/// Products of f32 by TF32, products of groups of rows, and convolutions of ResNet-50 in bf16: the
/// first, which has 3 channels; windows of 3 × 3 and of 1 × 1, with strides, and planes whose lines
/// are not multiples of 16 bytes. The assembler is slow, so only one GPU has all of them.
#[test]
fn tensor_cores_assemble() {
    let Some(ptxas) = ptxas() else { return };
    std::thread::scope(|scope| {
        for target in GPUS {
            let ptxas = &ptxas;
            scope.spawn(move || {
                let kernels = by_tensor_cores(&target);
                let text = ptx(&kernels, &target);
                let registers = assemble(ptxas, "tensor", &text, &target);
                let phases: usize = kernels.iter().map(|kernel| kernel.phases.len()).sum();
                assert_eq!(registers.len(), phases);
                eprintln!("{}: {registers:?} registers", target.cpu());
            });
        }
    });
}

fn by_tensor_cores(target: &Target) -> Vec<Generated> {
    // Images, the windows' shape, padding, and stride.
    let all: [([u64; 4], [u64; 4], i64, i64); 5] = [
        ([8, 3, 224, 224], [64, 3, 7, 7], 3, 2),
        ([8, 128, 56, 56], [128, 128, 3, 3], 1, 2),
        ([8, 64, 56, 56], [64, 64, 3, 3], 1, 1),
        ([8, 256, 56, 56], [512, 256, 1, 1], 0, 2),
        ([8, 512, 7, 7], [512, 512, 3, 3], 1, 1),
    ];
    let mut kernels = vec![];
    let n = if *target == Target::SM_90 { 5 } else { 2 };
    for (x, w, padding, stride) in all.into_iter().take(n) {
        let attrs = [
            ("dilation", Attr::Ints(vec![1, 1])),
            ("groups", Attr::Int(1)),
            ("padding", Attr::Ints(vec![padding; 2])),
            ("stride", Attr::Ints(vec![stride; 2])),
        ];
        let [x, w] = [x, w].map(|shape| TensorType::new(DType::BF16, shape).unwrap());
        let bias = TensorType::new(DType::BF16, [w.shape()[0]]).unwrap();
        let forward = Op::new("convolution", attrs.clone()).unwrap();
        let y = forward.infer(&[&x, &w]).unwrap().remove(0);
        let mask = ("mask", Attr::Ints(vec![1, 1, 0]));
        let backward = attrs.into_iter().chain([mask]);
        let backward = Op::new("convolution_bwd", backward).unwrap();
        for (op, types) in [
            (forward, vec![x.clone(), w.clone(), bias]),
            (backward, vec![y, x, w]),
        ] {
            let operands: Vec<&TensorType> = types.iter().collect();
            let outs = op.infer(&operands).unwrap();
            assert_eq!(op.on_tensor_cores(&operands, &outs), Some(true));
            let scratch = op.work(&operands, &outs).scratch.gpu;
            let kernel = codegen::kernel(&op, &types, target, scratch).unwrap();
            assert!(kernel.mlir.contains("nvvm.mma.sync"), "{}", kernel.name);
            kernels.push(kernel);
        }
    }
    for (ta, tb) in [(false, false), (true, false), (false, true), (true, true)] {
        let product = Op::new("matmul", [("ta", Attr::Bool(ta)), ("tb", Attr::Bool(tb))]).unwrap();
        let x = TensorType::new(DType::F32, [1000, 1000]).unwrap();
        let kernel = codegen::kernel_as(&product, &[x.clone(), x], target, 0, true).unwrap();
        assert!(kernel.mlir.contains("nvvm.mma_type<tf32>"));
        kernels.push(kernel);
    }
    for dtype in [DType::BF16, DType::F32] {
        kernels.extend(of_groups(dtype, target));
    }
    kernels
}

/// Products of tokens sorted by expert.
fn of_groups(dtype: DType, target: &Target) -> Vec<Generated> {
    let [tokens, width, hidden, experts] = [16_384, 2048, 1000, 128];
    let ty = |dtype, shape: &[u64]| TensorType::new(dtype, shape).unwrap();
    let (x, y) = (ty(dtype, &[tokens, width]), ty(dtype, &[tokens, hidden]));
    let ends = ty(DType::I32, &[experts]);
    let forward = |tb, shape| {
        let op = Op::new("grouped_matmul", [("tb", Attr::Bool(tb))]).unwrap();
        (op, vec![x.clone(), ty(dtype, shape), ends.clone()])
    };
    let all = [
        forward(false, &[experts, width, hidden]),
        forward(true, &[experts, hidden, width]),
        (
            Op::new("grouped_outer", []).unwrap(),
            vec![x.clone(), y, ends.clone()],
        ),
    ];
    let kernels = all.iter().map(|(op, types)| {
        let operands: Vec<&TensorType> = types.iter().collect();
        let outs = op.infer(&operands).unwrap();
        let scratch = op.work(&operands, &outs).scratch.gpu;
        let kernel = codegen::kernel_as(op, types, target, 0, true).unwrap();
        assert!(kernel.mlir.contains("nvvm.mma.sync"), "{}", kernel.name);
        assert!(kernel.scratch_bytes <= scratch, "{}", kernel.name);
        kernel
    });
    kernels.collect()
}

#[test]
fn memory_is_accessed_by_16_bytes() {
    let op =
        |name: &str, attrs: &[(&'static str, Attr)]| Op::new(name, attrs.iter().cloned()).unwrap();
    let ty = |dtype, shape: &[u64]| TensorType::new(dtype, shape).unwrap();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (x, w) = (ty(dtype, &[512, 768]), ty(dtype, &[768]));
        let statistic = ty(DType::F32, &[512, 1]);
        let moments = [
            x.clone(),
            x.clone(),
            x.clone(),
            x.clone(),
            ty(DType::I64, &[]),
            ty(DType::F64, &[5]),
        ];
        let norm = [("dims", Attr::Int(1)), ("eps", Attr::Float(1e-5))];
        let norm_bwd = [("dims", Attr::Int(1)), ("mask", Attr::Ints(vec![1, 1, 1]))];
        let cases: [(Op, Vec<TensorType>); 6] = [
            (op("add", &[]), vec![x.clone(), w.clone()]),
            (op("gelu", &[("tanh", Attr::Bool(true))]), vec![x.clone()]),
            (
                op("layer_norm", &norm),
                vec![x.clone(), w.clone(), w.clone()],
            ),
            (
                op("layer_norm_bwd", &norm_bwd),
                vec![x.clone(), x.clone(), statistic.clone(), statistic, w],
            ),
            (op("softmax", &[("dim", Attr::Int(1))]), vec![x]),
            (op("adamw", &[]), moments.to_vec()),
        ];
        for target in GPUS {
            for (op, types) in &cases {
                let text = ptx(
                    &[kernels::generate_op(op, types, &target).unwrap()],
                    &target,
                );
                let narrow = |line: &str| {
                    let wide = line.contains(".v4.b32")
                        || line.contains(".v2.b64")
                        || line.contains(".v4.f32");
                    let wider = line.contains(".v8.") || line.contains(".v4.b64");
                    !wide && !wider
                };
                // The rest are numbers of a row, options, and writes of a single thread. In a
                // second phase, which adds up the sums of parts, a thread has one column.
                let rows = text.match_indices(".entry").nth(1);
                let accesses: Vec<&str> = text[..rows.map_or(text.len(), |(at, _)| at)]
                    .lines()
                    .filter(|line| line.contains("ld.global") || line.contains("st.global"))
                    .collect();
                let few = accesses.iter().filter(|line| narrow(line)).count();
                let most = match op.name() {
                    "adamw" => 6,
                    "layer_norm" | "layer_norm_bwd" => 2,
                    _ => 0,
                };
                assert!(
                    few <= most && few < accesses.len(),
                    "{} of {dtype} for {target}:\n{}",
                    op.name(),
                    accesses.join("\n")
                );
            }
        }
    }
}
