//! Kernels for GPUs with operands and expected results: for the interpreter of PTX here, and, in a
//! folder, for `benches/gpu_kernels.py` on a machine with a GPU and without Lighterage.
//!
//! A folder has two files. `kernels.bin` has the tensors' bytes; `kernels.json` the rest: `target`,
//! `modules` of PTX, `cases` that are compared, and `timed` cases that are not. A case has its
//! `module`, by its position in the list, and its `launches`, which run in turn: `symbol`,
//! `blocks`, `threads` of a block, `shared_bytes` of dynamic shared memory. Each launch takes the
//! addresses of the `operands`, of the `results` and, unless `scratch_bytes` is 0, of the scratch,
//! then the `scalars`: `["u32", 3]`, `["f32", 0.5]`. Addresses are multiples of 64. Tensors have a
//! `dtype`, a `shape`, and `at`, the position of their bytes in `kernels.bin`. Results may have
//! `bounds`, the position of the allowed errors of all numbers as f32; without `bounds`, results
//! must be exact. An operand of a timed case without `at` may have any numbers. `inplace` has pairs
//! of an operand and a result that may share an address. If `any_blocks` is true, the number of
//! blocks may be changed.

use crate::attention::{self, Expected as Attention, Tensors};
use crate::code::compile_all;
use crate::example;
use crate::gpu_ops;
use crate::numbers::{Close, Numbers, Random, near, shape_of, tensor};
use codegen::attention::{Argument, Kind, Sizes};
use codegen::kernels::{self, Generated, Generator, Stage, Target};
use ir::op::{Access, Attr, Op};
use ir::{DType, TensorType};
use passes::graph::optimizer::{Attach, Optimizer};
use runtime::kernels::owned::OwnedTensor;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

/// A start of a kernel.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Its name in the PTX.
    pub symbol: String,
    /// Blocks, along x.
    pub blocks: u64,
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
}

/// An operand.
#[derive(Clone, Debug)]
pub struct Operand {
    /// Its type.
    pub ty: TensorType,
    /// Its bytes; none if any numbers may be used.
    pub bytes: Option<Vec<u8>>,
}

/// A result.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Its type.
    pub ty: TensorType,
    /// The expected numbers, if it is compared.
    pub expected: Option<Expected>,
}

/// The expected numbers of a result.
#[derive(Clone, Debug)]
pub struct Expected {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// The allowed error of each number.
    pub bounds: Vec<f64>,
}

/// A kernel and its expected results.
#[derive(Clone, Debug)]
pub struct Case {
    /// A description of the computation.
    pub name: String,
    /// A module with all of its functions.
    pub ptx: String,
    /// The launches, in order.
    pub launches: Vec<Launch>,
    /// Operands, in order.
    pub operands: Vec<Operand>,
    /// Results, in order.
    pub results: Vec<Outcome>,
    /// Bytes of scratch.
    pub scratch_bytes: u64,
    /// Arguments after the addresses.
    pub scalars: Vec<Argument>,
    /// (operand, result) pairs that may share their bytes.
    pub inplace: Vec<(usize, usize)>,
    /// Whether the results are the same for any number of blocks.
    pub any_blocks: bool,
    /// Floating-point operations of products.
    pub flops: f64,
}

/// The assembler for GPUs; if it is not available, none, and a line that says why.
pub fn ptxas() -> Option<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/ptxas.sh");
    let out = Command::new("sh")
        .arg(script)
        .output()
        .expect("a shell should run");
    if !out.status.success() {
        eprintln!("skipped: {}", String::from_utf8_lossy(&out.stderr).trim());
        return None;
    }
    Some(PathBuf::from(String::from_utf8_lossy(&out.stdout).trim()))
}

// --- cases ---

/// An op on tensors, and the allowed error of its results.
pub(crate) struct Wanted {
    pub(crate) op: Op,
    pub(crate) ins: Vec<(TensorType, OwnedTensor)>,
    pub(crate) close: Close,
}

pub(crate) fn ty(dtype: DType, shape: &[u64]) -> TensorType {
    TensorType::new(dtype, shape).expect("the types should be small")
}
pub(crate) fn op(name: &str, attrs: &[(&'static str, Attr)]) -> Op {
    Op::new(name, attrs.iter().cloned()).expect("there should be such an op")
}
pub(crate) fn ints(ints: &[i64]) -> Attr {
    Attr::Ints(ints.to_vec())
}

/// Collects ops with their operands.
struct Wishes {
    all: Vec<Wanted>,
    random: Random,
}

impl Wishes {
    fn push(&mut self, op: Op, types: &[TensorType], numbers: Numbers, close: Close) {
        let ins = types
            .iter()
            .map(|ty| (ty.clone(), tensor(ty, numbers, &mut self.random)))
            .collect();
        self.all.push(Wanted { op, ins, close });
    }
}

/// Single ops for each kind of instruction, loop and sum: at sizes that do not fill a vector, a
/// warp or a block, and at sizes that do.
fn ops() -> Vec<Wanted> {
    use Numbers::{Plain, Small, Wild};
    let mut wishes = Wishes {
        all: vec![],
        random: Random(5),
    };
    let exact = Close::Ulps(0.0);
    let floats = [DType::F32, DType::BF16, DType::F16];
    let is_half = |dtype: DType| dtype.bytes() == 2;
    // A GPU's exponential rounds the product in the exponent, a CPU's splits it in two: an error of
    // 2^-24 of up to 127.
    let near = |dtype| Close::Ulps(if is_half(dtype) { 2.0 } else { 64.0 });
    let of_largest = |dtype| Close::OfLargest(if is_half(dtype) { 2.0 } else { 64.0 });
    for dtype in floats {
        let (x, even) = (ty(dtype, &[7, 11, 13]), ty(dtype, &[6, 64]));
        for name in ["neg", "abs", "sign", "sqrt", "rsqrt", "reciprocal", "relu"] {
            wishes.push(op(name, &[]), std::slice::from_ref(&x), Wild, exact);
        }
        for name in ["exp", "log", "tanh", "sigmoid", "erf", "silu"] {
            wishes.push(op(name, &[]), std::slice::from_ref(&x), Wild, near(dtype));
        }
        for tanh in [false, true] {
            let tanh = [("tanh", Attr::Bool(tanh))];
            wishes.push(
                op("gelu", &tanh),
                std::slice::from_ref(&even),
                Plain,
                of_largest(dtype),
            );
            wishes.push(
                op("gelu_bwd", &tanh),
                &[x.clone(), x.clone()],
                Small,
                of_largest(dtype),
            );
        }
        wishes.push(
            op("silu_bwd", &[]),
            &[x.clone(), x.clone()],
            Plain,
            of_largest(dtype),
        );
        let (w, column) = (ty(dtype, &[13]), ty(dtype, &[11, 1]));
        for name in ["add", "sub", "mul", "div", "maximum", "minimum"] {
            wishes.push(op(name, &[]), &[x.clone(), w.clone()], Wild, exact);
        }
        wishes.push(op("mul", &[]), &[column, x.clone()], Wild, exact);
        // A part is a piece of a row.
        let long = ty(dtype, &[if is_half(dtype) { 16_411 } else { 10_007 }]);
        wishes.push(op("add", &[]), &[long.clone(), long], Plain, exact);
        wishes.push(op("le", &[]), &[x.clone(), x.clone()], Wild, exact);
        wishes.push(
            op("where", &[]),
            &[ty(DType::Bool, &[7, 1, 13]), x.clone(), w],
            Wild,
            exact,
        );
        for shape in [[3, 2055], [37, 33], [9, 256]] {
            let x = ty(dtype, &shape);
            let last = [("dims", ints(&[1])), ("keepdim", Attr::Bool(true))];
            for name in ["sum", "mean"] {
                wishes.push(
                    op(name, &last),
                    std::slice::from_ref(&x),
                    Small,
                    of_largest(dtype),
                );
            }
            for name in ["amax", "amin"] {
                wishes.push(op(name, &last), std::slice::from_ref(&x), Wild, exact);
            }
            let along = [("dim", Attr::Int(1))];
            for name in ["softmax", "log_softmax"] {
                wishes.push(
                    op(name, &along),
                    std::slice::from_ref(&x),
                    Plain,
                    of_largest(dtype),
                );
                let backward = op(&format!("{name}_bwd"), &along);
                wishes.push(backward, &[x.clone(), x.clone()], Small, of_largest(dtype));
            }
            let (w, statistic) = (ty(dtype, &shape[1..]), ty(DType::F32, &[shape[0], 1]));
            let norm = op(
                "layer_norm",
                &[("dims", Attr::Int(1)), ("eps", Attr::Float(1e-3))],
            );
            wishes.push(
                norm,
                &[x.clone(), w.clone(), w.clone()],
                Small,
                of_largest(dtype),
            );
            let backward = op(
                "layer_norm_bwd",
                &[("dims", Attr::Int(1)), ("mask", ints(&[1, 1, 1]))],
            );
            let types = [x.clone(), x, statistic.clone(), statistic, w];
            wishes.push(
                backward,
                &types,
                Small,
                Close::OfLargest(if is_half(dtype) { 2.0 } else { 256.0 }),
            );
        }
        // A row whose vectors the threads of one warp keep, and one that is too long to be kept.
        let along = [("dim", Attr::Int(1))];
        let mut kept = vec![[2, 1024]];
        if dtype == DType::F32 {
            kept.push([1, 16_601]);
        }
        for shape in kept {
            let types = [ty(dtype, &shape)];
            wishes.push(op("softmax", &along), &types, Plain, of_largest(dtype));
        }
        // The last one is cut into pieces of rows, with columns after the last whole vector.
        for shape in [[701, 33], [130, 256], [33, 1051]] {
            let first = [("dims", ints(&[0])), ("keepdim", Attr::Bool(false))];
            wishes.push(
                op("sum", &first),
                &[ty(dtype, &shape)],
                Small,
                of_largest(dtype),
            );
        }
        let dropout = op(
            "dropout",
            &[("p", Attr::Float(0.1)), ("stream", Attr::Int(3))],
        );
        wishes.push(dropout, &[x.clone(), ty(DType::I64, &[2])], Wild, exact);
        if dtype == DType::F32 {
            let round = op("round_random", &[("stream", Attr::Int(3))]);
            wishes.push(round, &[x.clone(), ty(DType::I64, &[2])], Wild, exact);
        }
        wishes.push(
            op("dropout_bwd", &[("scale", Attr::Float(1.25))]),
            &[x, ty(DType::Bool, &[7, 11, 13])],
            Wild,
            exact,
        );
    }
    let mut casts = vec![
        (DType::BF16, DType::F16),
        (DType::F16, DType::BF16),
        (DType::I64, DType::U8),
    ];
    for other in [
        DType::BF16,
        DType::F16,
        DType::F64,
        DType::Bool,
        DType::U8,
        DType::I16,
        DType::I32,
        DType::I64,
    ] {
        casts.extend([(DType::F32, other), (other, DType::F32)]);
    }
    for (from, to) in casts {
        wishes.push(
            op("cast", &[("dtype", Attr::Type(to))]),
            &[ty(from, &[5, 37])],
            Small,
            exact,
        );
    }
    for dtype in [DType::I32, DType::I64, DType::U8] {
        let x = ty(dtype, &[5, 37]);
        wishes.push(op("mul", &[]), &[x.clone(), x.clone()], Wild, exact);
        wishes.push(
            op(
                "amax",
                &[("dims", ints(&[1])), ("keepdim", Attr::Bool(false))],
            ),
            &[x],
            Wild,
            exact,
        );
    }
    let double = ty(DType::F64, &[9, 37]);
    wishes.push(
        op("div", &[]),
        &[double.clone(), double.clone()],
        Wild,
        exact,
    );
    wishes.push(
        op(
            "sum",
            &[("dims", ints(&[1])), ("keepdim", Attr::Bool(true))],
        ),
        &[double],
        Small,
        Close::OfLargest(64.0),
    );
    wishes.push(
        op(
            "any",
            &[("dims", ints(&[1])), ("keepdim", Attr::Bool(true))],
        ),
        &[ty(DType::Bool, &[9, 100])],
        Small,
        exact,
    );
    for dtype in floats {
        updates(&mut wishes, dtype);
    }
    others(&mut wishes);
    wishes.all
}

/// Every op with a generated kernel that has no case so far.
fn others(wishes: &mut Wishes) {
    let x = ty(DType::F32, &[7, 11, 13]);
    // `ops_for_gpus` has cases with indices.
    let drawn = |kind| example::is_generated(kind) && !example::reads_indices(kind);
    for kind in example::ops_that(drawn) {
        if wishes.all.iter().any(|wanted| wanted.op.kind() == kind) {
            continue;
        }
        let example = example::example(kind, &x);
        let (op, types) =
            example.unwrap_or_else(|| panic!("{} needs a case for GPUs here", kind.name()));
        let is_exact = op.facts().access == Access::Element && !op.facts().is_function;
        let close = Close::OfLargest(if is_exact { 0.0 } else { 64.0 });
        wishes.push(op, &types, Numbers::Small, close);
    }
}

/// Optimizers.
fn updates(wishes: &mut Wishes, dtype: DType) {
    for n in [10_007, 512] {
        let p = ty(dtype, &[n]);
        let mut kinds = vec![
            ("adamw", vec![p.clone(); 4]),
            ("sgd", vec![p.clone(); 2]),
            ("sgd_momentum", vec![p.clone(); 3]),
        ];
        if dtype == DType::BF16 {
            let wide = ty(DType::F32, &[n]);
            kinds.push((
                "adamw_split",
                vec![p.clone(), p, ty(DType::I16, &[n]), wide.clone(), wide],
            ));
        }
        for (name, types) in kinds {
            let random = &mut wishes.random;
            let mut ins: Vec<(TensorType, OwnedTensor)> = types
                .iter()
                .map(|ty| (ty.clone(), tensor(ty, Numbers::Plain, random)))
                .collect();
            let is_adamw = name.starts_with("adamw");
            if is_adamw && let Some((v, moment)) = ins.last_mut() {
                // Second moments are not negative.
                let squares: Vec<f64> = moment.to_f64s().iter().map(|x| x * x).collect();
                *moment = OwnedTensor::from_f64s(codegen::dtype(v.dtype()), &shape_of(v), &squares);
                ins.push((
                    ty(DType::I64, &[]),
                    OwnedTensor::from_i64s(artifact::DType::I64, &[], &[7]),
                ));
            }
            let hyper: &[f64] = if is_adamw {
                &[1e-3, 0.9, 0.999, 1e-8, 0.01]
            } else {
                &[1e-3, 0.9, 0.01]
            };
            ins.push((
                ty(DType::F64, &[hyper.len() as u64]),
                OwnedTensor::from_f64s(artifact::DType::F64, &[hyper.len()], hyper),
            ));
            wishes.all.push(Wanted {
                op: op(name, &[]),
                ins,
                close: Close::Ulps(0.0),
            });
        }
    }
}

/// Shapes of operands, the shape of the result, and the body.
type Viewing<'a> = (&'a [&'a [u64]], &'a [u64], String);

/// Kernels that read views of their operands: permutations, parts and flips of rows, with and
/// without combining them, and rows of which a warp computes several.
fn views() -> Vec<Wanted> {
    let mut wishes = Wishes {
        all: vec![],
        random: Random(11),
    };
    let heads = "%1 = reshape %0 shape=[2,5,3,64] | %2 = permute %1 dims=[0,2,1,3]";
    let of_heads = |body: &str| format!("{heads} | {body}");
    let cases: Vec<Viewing<'_>> = vec![
        (
            &[&[10, 96], &[1, 1, 5, 32], &[1, 1, 5, 32], &[2, 1]],
            &[2, 3, 5, 32],
            "%4 = reshape %0 shape=[2,5,3,32] | %5 = permute %4 dims=[0,2,1,3] \
             | %6 = reshape %5 shape=[2,3,5,2,16] | %7 = flip %6 dims=[3] | %8 = mul %7, %3 \
             | %9 = reshape %8 shape=[2,3,5,32] | %10 = mul %9, %2 | %11 = mul %5, %1 \
             | %12 = add %11, %10 | %12"
                .into(),
        ),
        (
            &[&[7, 45]],
            &[7, 22],
            "%1 = slice %0 dim=1 end=23 start=1 step=1 | %2 = slice %0 dim=1 end=45 start=23 \
             step=1 | %3 = silu %1 | %4 = mul %3, %2 | %4"
                .into(),
        ),
        (
            &[&[300, 6]],
            &[300, 3],
            "%1 = slice %0 dim=1 end=4 start=1 step=1 | %2 = neg %1 | %2".into(),
        ),
        (
            &[&[10, 192]],
            &[2, 3, 5, 64],
            of_heads("%3 = softmax %2 dim=3 | %3"),
        ),
        (
            &[&[10, 192]],
            &[64],
            of_heads("%3 = reshape %2 shape=[30,64] | %4 = sum %3 dims=[0] keepdim=false | %4"),
        ),
        (
            &[&[40, 136], &[136]],
            &[40, 136],
            "%2 = flip %0 dims=[0] | %3 = add %2, %1 | %4 = add %3, %0 | %4".into(),
        ),
    ];
    for (i, (shapes, result, body_text)) in cases.iter().enumerate() {
        // The first two in both types.
        let both = [DType::F32, DType::BF16];
        let one = if i < 2 {
            &both[..]
        } else {
            &both[i % 2..][..1]
        };
        for &dtype in one {
            let types: Vec<TensorType> = shapes.iter().map(|shape| ty(dtype, shape)).collect();
            let op = body(&types, &ty(dtype, result), body_text);
            let close = Close::OfLargest(if dtype.bytes() == 2 { 2.0 } else { 64.0 });
            wishes.push(op, &types, Numbers::Small, close);
        }
    }
    wishes.all
}

/// A fused op with one result, from the text of its body.
fn body(operands: &[TensorType], result: &TensorType, text: &str) -> Op {
    let inputs = operands.iter().enumerate();
    let inputs: Vec<String> = inputs
        .map(|(i, ty)| format!("input %a{i} : {ty}"))
        .collect();
    let names: Vec<String> = (0..operands.len()).map(|i| format!("%a{i}")).collect();
    let text = format!(
        "graph g {{\n{}\nfwd - %y = fused {} body={{{text}}} : {result}\noutput y = %y\n}}",
        inputs.join("\n"),
        names.join(", "),
    );
    let graph = ir::text::parse_graph(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
    graph.nodes[graph.order[0]].op.clone()
}

/// A rotary embedding as autocast computes it: x [B,S,H,D] to [B,H,S,D], both in bf16, with
/// cosines and sines [1,1,S,D] and the signs of the halves.
fn rotary([b, s, h, d]: [u64; 4]) -> (Op, Vec<TensorType>) {
    let angles = ty(DType::F32, &[1, 1, s, d]);
    let types = vec![
        ty(DType::BF16, &[b, s, h, d]),
        angles.clone(),
        angles,
        ty(DType::BF16, &[2, 1]),
    ];
    let half = d / 2;
    let text = format!(
        "%4 = permute %0 dims=[0,2,1,3] | %5 = reshape %4 shape=[{b},{h},{s},2,{half}] \
         | %6 = flip %5 dims=[3] | %7 = cast %4 dtype=f32 | %8 = mul %7, %1 | %9 = mul %6, %3 \
         | %10 = reshape %9 shape=[{b},{h},{s},{d}] | %11 = cast %10 dtype=f32 \
         | %12 = mul %11, %2 | %13 = add %8, %12 | %14 = cast %13 dtype=bf16 | %14"
    );
    let op = body(&types, &ty(DType::BF16, &[b, h, s, d]), &text);
    (op, types)
}

/// Groups that `fuse` makes from traced models, each kernel once.
fn groups(target: &Target) -> Vec<Wanted> {
    let mut wishes = Wishes {
        all: vec![],
        random: Random(9),
    };
    let mut seen = std::collections::BTreeSet::new();
    for name in [
        "bert-tiny",
        "gpt2-tiny",
        "llama-tiny",
        "resnet-tiny",
        "moe-tiny",
        "dropout-tiny",
    ] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("data/models")
            .join(name);
        let model = torch::read(&folder.join("joint_core.pt2"), &BTreeMap::new())
            .expect("the model should be there");
        let mut graph = model.graph;
        passes::graph::canonical::run(&mut graph);
        passes::graph::simplify::run(&mut graph);
        let attach = Attach {
            optimizer: Optimizer::Sgd,
            ..Attach::default()
        };
        passes::graph::optimizer::run(&mut graph, attach).expect("an optimizer should fit");
        passes::graph::fuse::run(&mut graph);
        for &node in graph
            .order
            .iter()
            .filter(|&&node| graph.nodes[node].op.body().is_some())
        {
            let data = &graph.nodes[node];
            let types = graph.types(&data.inputs);
            let kernel =
                kernels::generate_op(&data.op, &types, target).expect("groups should have kernels");
            if seen.insert(kernel.name) {
                // Sums in another order; numbers may cancel.
                wishes.push(
                    data.op.clone(),
                    &types,
                    Numbers::Small,
                    Close::OfLargest(1024.0),
                );
            }
        }
    }
    wishes.all
}

/// Cases for the ops with kernels written for GPUs. Those of a target are made once.
pub fn ops_for_gpus(target: &Target) -> Arc<[Case]> {
    static MADE: Mutex<BTreeMap<Target, Arc<[Case]>>> = Mutex::new(BTreeMap::new());
    let mut made = MADE.lock().expect("no thread should panic here");
    let of_target = made.entry(*target);
    of_target
        .or_insert_with(|| gpu_ops::cases(target).into())
        .clone()
}

/// Every case that is compared: ops, groups of models, attention.
pub fn cases(target: &Target) -> Vec<Case> {
    let host = Target::host().expect("results should be computed where kernels run");
    let wanted = ops().into_iter().chain(views()).chain(groups(target));
    let wanted: Vec<Wanted> = wanted.collect();
    let generated: Vec<Generated> = wanted
        .iter()
        .map(|wanted| generate(&wanted.op, &types(wanted), target))
        .collect();
    let here = wanted
        .iter()
        .map(|wanted| generate(&wanted.op, &types(wanted), &host))
        .collect();
    let here = compile_all(here, &host);
    let mut cases = vec![];
    for (((wanted, here), generated), ptx) in wanted
        .iter()
        .zip(&here)
        .zip(&generated)
        .zip(ptx(&generated, target))
    {
        let outs = results(&wanted.op, &types(wanted));
        let ins: Vec<OwnedTensor> = wanted
            .ins
            .iter()
            .map(|(_, tensor)| tensor.clone())
            .collect();
        let found = here.run(&ins, &outs, &[], &[]);
        cases.push(case(wanted, generated, ptx, &outs, &found));
    }
    cases.extend_from_slice(&ops_for_gpus(target));
    let mut generator = generator();
    for (heads, group, queries, keys) in [(1, 1, 64, 64), (2, 2, 70, 99), (3, 3, 33, 5)] {
        for (head_size, causal) in [(64, false), (64, true), (128, false), (128, true)] {
            let case = attention::Case::new(heads, group, queries, keys, head_size, causal);
            cases.extend(attention_cases(&case, target, &mut generator));
        }
    }
    cases
}

pub(crate) fn types(wanted: &Wanted) -> Vec<TensorType> {
    wanted.ins.iter().map(|(ty, _)| ty.clone()).collect()
}
pub(crate) fn results(op: &Op, types: &[TensorType]) -> Vec<TensorType> {
    op.infer(&types.iter().collect::<Vec<_>>())
        .expect("types should fit")
}
fn generate(op: &Op, types: &[TensorType], target: &Target) -> Generated {
    kernels::generate_op(op, types, target).unwrap_or_else(|e| panic!("{e}: {types:?}"))
}
fn generator() -> Generator {
    Generator::start(&kernels::find().expect("the generator should have been built"))
        .expect("the generator should start")
}
pub(crate) fn ptx(kernels: &[Generated], target: &Target) -> Vec<String> {
    let texts = kernels::run_all(&kernels.iter().collect::<Vec<_>>(), target, Stage::Asm);
    let text = |bytes| String::from_utf8(bytes).expect("PTX should be text");
    texts
        .expect("kernels should compile")
        .into_iter()
        .map(text)
        .collect()
}
/// A case of an op with its expected results.
pub(crate) fn case(
    wanted: &Wanted,
    generated: &Generated,
    ptx: String,
    outs: &[TensorType],
    expected: &[OwnedTensor],
) -> Case {
    let outcome = |(ty, tensor): (&TensorType, &OwnedTensor)| Outcome {
        ty: ty.clone(),
        expected: Some(Expected {
            bytes: tensor.bytes(),
            bounds: wanted.close.bounds(tensor),
        }),
    };
    let operand = |(ty, tensor): &(TensorType, OwnedTensor)| Operand {
        ty: ty.clone(),
        bytes: Some(tensor.bytes()),
    };
    let operands = wanted.ins.iter().map(operand).collect();
    let results = outs.iter().zip(expected).map(outcome).collect();
    case_of(&wanted.op, generated, ptx, operands, results)
}
/// A case of a generated kernel.
fn case_of(
    op: &Op,
    generated: &Generated,
    ptx: String,
    operands: Vec<Operand>,
    results: Vec<Outcome>,
) -> Case {
    let of = operands
        .iter()
        .map(|operand| operand.ty.to_string())
        .collect::<Vec<_>>()
        .join(", ");
    let launch = |phase: &kernels::Phase| Launch {
        symbol: phase.symbol.clone(),
        blocks: phase.parts,
        threads: phase.threads,
        shared_bytes: phase.shared_bytes,
    };
    Case {
        name: format!("{} of {of}", ir::text::print_op(op)),
        ptx,
        launches: generated.phases.iter().map(launch).collect(),
        operands,
        results,
        scratch_bytes: generated.scratch_bytes,
        scalars: vec![],
        inplace: generated.inplace.clone(),
        // Attention by tensor cores has a tile for each block.
        any_blocks: generated.phases.iter().all(|phase| phase.shared_bytes == 0),
        flops: 0.0,
    }
}

/// The four kernels of attention at some sizes, compared with the definition.
fn attention_cases(of: &attention::Case, target: &Target, generator: &mut Generator) -> Vec<Case> {
    let t = Tensors::new(of);
    let e = Attention::new(of, &t);
    let lse: Vec<f32> = e.lse.iter().map(|x| x.0 as f32).collect();
    let delta: Vec<f32> = e.delta.iter().map(|x| x.0 as f32).collect();
    let ([heads, queries, keys], d) = (of.rows(), u64::from(of.head_size));
    let (h, s, t_keys) = (heads as u64, queries as u64, keys as u64);
    let (g, q, row) = (
        h / u64::from(of.sizes.group),
        ty(DType::BF16, &[h, s, d]),
        ty(DType::F32, &[h, s]),
    );
    let k = ty(DType::BF16, &[g, t_keys, d]);
    let half = |ty: &TensorType, numbers: &[f32]| Operand {
        ty: ty.clone(),
        bytes: Some(
            numbers
                .iter()
                .flat_map(|&x| half::bf16::from_f32(x).to_le_bytes())
                .collect(),
        ),
    };
    let wide = |numbers: &[f32]| Operand {
        ty: row.clone(),
        bytes: Some(numbers.iter().flat_map(|x| x.to_le_bytes()).collect()),
    };
    let outcome = |ty: &TensorType, numbers: &[(f64, f64)]| Outcome {
        ty: ty.clone(),
        expected: Some(Expected {
            bytes: match ty.dtype() {
                DType::BF16 => numbers
                    .iter()
                    .flat_map(|x| half::bf16::from_f64(x.0).to_le_bytes())
                    .collect(),
                _ => numbers
                    .iter()
                    .flat_map(|x| (x.0 as f32).to_le_bytes())
                    .collect(),
            },
            // The expected number is rounded, too.
            bounds: numbers
                .iter()
                .map(|x| {
                    x.1 + x.0.abs()
                        * if ty.dtype() == DType::BF16 {
                            1.0 / 512.0
                        } else {
                            1e-7
                        }
                })
                .collect(),
        }),
    };
    let backward = || {
        vec![
            half(&q, &t.dout),
            half(&q, &t.q),
            half(&k, &t.k),
            half(&k, &t.v),
            wide(&lse),
            wide(&delta),
        ]
    };
    let kinds = [
        (
            Kind::Forward,
            vec![half(&q, &t.q), half(&k, &t.k), half(&k, &t.v)],
            vec![outcome(&q, &e.out), outcome(&row, &e.lse)],
        ),
        (
            Kind::Delta,
            vec![half(&q, &t.dout), half(&q, &e.rounded)],
            vec![outcome(&row, &e.delta)],
        ),
        (
            Kind::Keys,
            backward(),
            vec![outcome(&k, &e.dk), outcome(&k, &e.dv)],
        ),
        (Kind::Queries, backward(), vec![outcome(&q, &e.dq)]),
    ];
    kinds
        .into_iter()
        .map(|(kind, operands, results)| {
            attention_case(kind, of, target, generator, operands, results)
        })
        .collect()
}
fn attention_case(
    kind: Kind,
    of: &attention::Case,
    target: &Target,
    generator: &mut Generator,
    operands: Vec<Operand>,
    results: Vec<Outcome>,
) -> Case {
    let kernel = codegen::attention::kernel(kind, of.head_size, of.how())
        .expect("there should be such heads");
    let ptx = kernel
        .ptx(generator, target)
        .expect("kernels should compile");
    let Sizes {
        heads,
        group,
        queries,
        keys,
        ..
    } = of.sizes;
    Case {
        name: format!(
            "{} of {heads} heads in groups of {group}, {queries} queries, {keys} keys",
            kernel.symbol
        ),
        ptx,
        launches: vec![Launch {
            symbol: kernel.symbol.clone(),
            blocks: kernel.blocks(&of.sizes),
            threads: kernel.threads,
            shared_bytes: kernel.shared_bytes,
        }],
        operands,
        results,
        scratch_bytes: 0,
        scalars: of.sizes.arguments().to_vec(),
        inplace: vec![],
        any_blocks: false,
        flops: 0.0,
    }
}

// --- speed ---

/// Kernels at sizes that are larger than a GPU's caches: kernels limited by memory, and attention.
pub fn timed(target: &Target) -> Vec<Case> {
    let mut wanted: Vec<(Op, Vec<TensorType>)> = vec![];
    let (scalar, rng) = (ty(DType::I64, &[]), ty(DType::I64, &[2]));
    for dtype in [DType::F32, DType::BF16] {
        let (x, row) = (ty(dtype, &[32768, 3072]), ty(dtype, &[131_072, 768]));
        let (w, statistic) = (ty(dtype, &[768]), ty(DType::F32, &[131_072, 1]));
        let (tanh, along) = ([("tanh", Attr::Bool(true))], [("dim", Attr::Int(1))]);
        let sum = |dim| {
            op(
                "sum",
                &[("dims", ints(&[dim])), ("keepdim", Attr::Bool(false))],
            )
        };
        let norm = op(
            "layer_norm",
            &[("dims", Attr::Int(1)), ("eps", Attr::Float(1e-5))],
        );
        let norm_bwd = op(
            "layer_norm_bwd",
            &[("dims", Attr::Int(1)), ("mask", ints(&[1, 1, 1]))],
        );
        let p = ty(dtype, &[64 << 20]);
        wanted.extend([
            (op("add", &[]), vec![x.clone(), ty(dtype, &[3072])]),
            (op("gelu", &tanh), vec![x.clone()]),
            (op("gelu_bwd", &tanh), vec![x.clone(), x.clone()]),
            (op("silu_bwd", &[]), vec![x.clone(), x.clone()]),
            (norm, vec![row.clone(), w.clone(), w.clone()]),
            (
                norm_bwd,
                vec![row.clone(), row, statistic.clone(), statistic, w],
            ),
            (op("softmax", &along), vec![ty(dtype, &[2048, 50304])]),
            (op("softmax", &along), vec![ty(dtype, &[393_216, 256])]),
            (sum(0), vec![x.clone()]),
            (sum(1), vec![x]),
            (
                op(
                    "dropout",
                    &[("p", Attr::Float(0.1)), ("stream", Attr::Int(1))],
                ),
                vec![p.clone(), rng.clone()],
            ),
        ]);
        let (wide, half) = (ty(DType::F32, &[64 << 20]), ty(DType::I16, &[64 << 20]));
        let hyper = ty(DType::F64, &[5]);
        wanted.push(match dtype {
            DType::F32 => (
                op("adamw", &[]),
                vec![p.clone(), p.clone(), p.clone(), p, scalar.clone(), hyper],
            ),
            _ => (
                op("adamw_split", &[]),
                vec![
                    p.clone(),
                    p,
                    half,
                    wide.clone(),
                    wide,
                    scalar.clone(),
                    hyper,
                ],
            ),
        });
    }
    let cast = op("cast", &[("dtype", Attr::Type(DType::BF16))]);
    wanted.push((cast, vec![ty(DType::F32, &[64 << 20])]));
    wanted.push(rotary([8, 2048, 32, 128]));
    let generated: Vec<Generated> = wanted
        .iter()
        .map(|(op, types)| generate(op, types, target))
        .collect();
    let mut cases = vec![];
    for (((op, types), generated), ptx) in
        wanted.iter().zip(&generated).zip(ptx(&generated, target))
    {
        let operands = types
            .iter()
            .map(|ty| Operand {
                ty: ty.clone(),
                bytes: options(ty),
            })
            .collect();
        let results = results(op, types)
            .into_iter()
            .map(|ty| Outcome { ty, expected: None })
            .collect();
        cases.push(case_of(op, generated, ptx, operands, results));
    }
    let mut generator = generator();
    let n: u64 = 4096;
    for (head_size, causal) in [(64, false), (64, true), (128, false), (128, true)] {
        let of = attention::Case::new(64, 1, n as u32, n as u32, head_size, causal);
        let (x, row) = (
            ty(DType::BF16, &[64, n, head_size.into()]),
            ty(DType::F32, &[64, n]),
        );
        let backward = [vec![&x; 4], vec![&row; 2]].concat();
        // The number of products of queries and keys, or of the same size, in each kernel.
        for (kind, ins, outs, n_products) in [
            (Kind::Forward, vec![&x; 3], vec![&x, &row], 2),
            (Kind::Keys, backward.clone(), vec![&x; 2], 4),
            (Kind::Queries, backward, vec![&x], 3),
        ] {
            let operands = ins
                .into_iter()
                .map(|ty| Operand {
                    ty: ty.clone(),
                    bytes: None,
                })
                .collect();
            let results = outs
                .into_iter()
                .map(|ty| Outcome {
                    ty: ty.clone(),
                    expected: None,
                })
                .collect();
            let product =
                (2 * 64 * n * n * u64::from(head_size)) as f64 * if causal { 0.5 } else { 1.0 };
            let mut case = attention_case(kind, &of, target, &mut generator, operands, results);
            case.flops = f64::from(n_products) * product;
            cases.push(case);
        }
    }
    cases
}

/// The bytes of options: an optimizer's, a generator's, a count of steps. None for other tensors.
fn options(ty: &TensorType) -> Option<Vec<u8>> {
    let hyper = [1e-3, 0.9, 0.999, 1e-8, 0.01];
    match (ty.dtype(), ty.numel()) {
        (DType::F64, 5) => Some(hyper.iter().flat_map(|x: &f64| x.to_le_bytes()).collect()),
        (DType::I64, n @ 1..=2) => Some((0..n).flat_map(|i| (7 + i).to_le_bytes()).collect()),
        _ => None,
    }
}

// --- interpreter ---

impl Case {
    /// Runs the case by the interpreter and returns the results' bytes. Kernels for any number of
    /// blocks run with `blocks`, others with their own number. An operand and a result may share an
    /// address.
    pub fn interpret(
        &self,
        blocks: Option<u64>,
        inplace: Option<(usize, usize)>,
    ) -> Result<Vec<Vec<u8>>, ptx::Error> {
        let mut memory = ptx::Memory::new();
        let bytes = |operand: &Operand| {
            operand
                .bytes
                .clone()
                .expect("a case to run should have its operands")
        };
        let operands: Vec<u64> = self
            .operands
            .iter()
            .map(|operand| memory.add(bytes(operand)))
            .collect();
        let result = |(j, result): (usize, &Outcome)| match inplace {
            Some((i, of)) if of == j => operands[i],
            _ => memory.room(result.ty.bytes() as usize),
        };
        let results: Vec<u64> = self.results.iter().enumerate().map(result).collect();
        let mut arguments: Vec<ptx::Param> = operands
            .iter()
            .chain(&results)
            .map(|&address| ptx::Param::U64(address))
            .collect();
        if self.scratch_bytes != 0 {
            arguments.push(ptx::Param::U64(memory.room(self.scratch_bytes as usize)));
        }
        arguments.extend(self.scalars.iter().map(|scalar| match *scalar {
            Argument::U32(n) => ptx::Param::U32(n),
            Argument::F32(x) => ptx::Param::F32(x),
        }));
        let kernels = ptx::parse(&self.ptx)?;
        for launch in &self.launches {
            let kernel = kernels
                .iter()
                .find(|kernel| kernel.name() == launch.symbol)
                .expect("a launch should name a kernel of its text");
            let blocks = blocks.filter(|_| self.any_blocks).unwrap_or(launch.blocks);
            let grid = ptx::Launch {
                shared_bytes: launch.shared_bytes,
                ..ptx::Launch::new(u32::try_from(blocks).unwrap_or(u32::MAX), launch.threads)
            };
            kernel.run(&grid, &arguments, &mut memory)?;
        }
        Ok(results
            .iter()
            .map(|&address| memory.bytes(address).to_vec())
            .collect())
    }

    /// Compares results; returns the first wrong number of each.
    pub fn compare(&self, found: &[Vec<u8>]) -> Vec<String> {
        let mut wrong = vec![];
        for (j, (result, found)) in self.results.iter().zip(found).enumerate() {
            let Some(expected) = &result.expected else {
                continue;
            };
            if !result.ty.dtype().is_float() {
                let off = found.iter().zip(&expected.bytes).position(|(a, b)| a != b);
                wrong.extend(off.map(|at| {
                    format!(
                        "result {j}, byte {at}: {}, not {}",
                        found[at], expected.bytes[at]
                    )
                }));
                continue;
            }
            let tensor = |bytes| {
                OwnedTensor::from_bytes(
                    codegen::dtype(result.ty.dtype()),
                    &shape_of(&result.ty),
                    bytes,
                )
                .to_f64s()
            };
            let (found, wanted) = (tensor(found), tensor(&expected.bytes));
            if let Some(i) =
                (0..wanted.len()).find(|&i| !near(found[i], wanted[i], expected.bounds[i]))
            {
                let (found, wanted, bound) = (found[i], wanted[i], expected.bounds[i]);
                wrong.push(format!(
                    "result {j}, element {i}: {found:e}, not {wanted:e}, within {bound:e}"
                ));
            }
        }
        wrong
    }
}

// --- folder ---

/// Bytes of tensors, one after the other, and texts, each once.
#[derive(Default)]
struct Data {
    bytes: Vec<u8>,
    places: BTreeMap<Vec<u8>, usize>,
    modules: Vec<String>,
}

impl Data {
    /// Adds bytes, if they are new; returns their position.
    fn add(&mut self, bytes: &[u8]) -> usize {
        if let Some(&at) = self.places.get(bytes) {
            return at;
        }
        let at = self.bytes.len();
        self.bytes.extend_from_slice(bytes);
        self.places.insert(bytes.to_vec(), at);
        at
    }
    /// The number of a module, which is written without comments, empty lines and tabs.
    fn module(&mut self, ptx: &str) -> usize {
        let lines = ptx.lines().map(|line| {
            let code = line.split("//").next().unwrap_or_default();
            code.split_whitespace().collect::<Vec<_>>().join(" ")
        });
        let ptx: String = lines
            .filter(|line| !line.is_empty())
            .map(|line| line + "\n")
            .collect();
        self.modules
            .iter()
            .position(|module| *module == ptx)
            .unwrap_or_else(|| {
                self.modules.push(ptx);
                self.modules.len() - 1
            })
    }
    fn case(&mut self, case: &Case) -> Value {
        let shape = |ty: &TensorType| json!({ "dtype": ty.dtype().name(), "shape": ty.shape() });
        let with = |mut value: Value, key: &str, at: usize| {
            value[key] = at.into();
            value
        };
        let operand = |operand: &Operand, data: &mut Data| match &operand.bytes {
            Some(bytes) => with(shape(&operand.ty), "at", data.add(bytes)),
            None => shape(&operand.ty),
        };
        let result = |result: &Outcome, data: &mut Data| {
            let Some(expected) = &result.expected else {
                return shape(&result.ty);
            };
            let value = with(shape(&result.ty), "at", data.add(&expected.bytes));
            if expected.bounds.iter().all(|&bound| bound == 0.0) {
                return value;
            }
            // Rounded up.
            let bounds = expected
                .bounds
                .iter()
                .map(|&bound| (bound as f32).next_up());
            with(
                value,
                "bounds",
                data.add(&bounds.flat_map(f32::to_le_bytes).collect::<Vec<u8>>()),
            )
        };
        let scalar = |scalar: &Argument| match *scalar {
            Argument::U32(n) => json!(["u32", n]),
            Argument::F32(x) => json!(["f32", x]),
        };
        let launch = |l: &Launch| {
            json!({ "symbol": l.symbol, "blocks": l.blocks,
            "threads": l.threads, "shared_bytes": l.shared_bytes })
        };
        json!({
            "name": case.name,
            "module": self.module(&case.ptx),
            "launches": case.launches.iter().map(launch).collect::<Vec<_>>(),
            "operands": case.operands.iter().map(|x| operand(x, self)).collect::<Vec<_>>(),
            "results": case.results.iter().map(|y| result(y, self)).collect::<Vec<_>>(),
            "scratch_bytes": case.scratch_bytes,
            "scalars": case.scalars.iter().map(scalar).collect::<Vec<_>>(),
            "inplace": case.inplace,
            "any_blocks": case.any_blocks,
            "flops": case.flops,
        })
    }
}

/// Writes a folder for `benches/gpu_kernels.py`.
pub fn write(
    folder: &Path,
    target: &Target,
    cases: &[Case],
    timed: &[Case],
) -> std::io::Result<()> {
    let mut data = Data::default();
    let cases: Vec<Value> = cases.iter().map(|case| data.case(case)).collect();
    let timed: Vec<Value> = timed.iter().map(|case| data.case(case)).collect();
    let text =
        json!({ "target": target.name(), "modules": data.modules, "cases": cases, "timed": timed })
            .to_string();
    fs::create_dir_all(folder)?;
    fs::write(folder.join("kernels.json"), text)?;
    fs::write(folder.join("kernels.bin"), data.bytes)
}
