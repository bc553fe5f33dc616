//! Updates of several nodes against PyTorch's optimizers.

use codegen::Data;
use ir::text::parse_graph;
use lighterage_tests::evaluate::Tensors;
use lighterage_tests::run;
use passes::cost::Roofline;
use passes::decide::Planner;
use passes::devices;
use passes::graph::optimizer::{HYPER, Optimizer, STEP};
use passes::pipeline::{self, Kernels, Options};
use safetensors::SafeTensors;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A graph whose gradients are `p * x`.
pub(crate) const GRAPH: &str = r#"graph products {
  input  %x.a : f32[6,10]
  input  %x.b : f32[9,4]
  input  %x.c : f32[7]
  input  %x.d : f32[2,3,4]
  input  %x.e : f32[]
  input  %x.f : f32[2,2,3,2]
  state  param  %a -> %a : f32[6,10] "a"
  state  param  %b -> %b : f32[9,4] "b"
  state  param  %c -> %c : f32[7] "c"
  state  param  %d -> %d : f32[2,3,4] "d"
  state  param  %e -> %e : f32[] "e"
  state  param  %f -> %f : f32[2,2,3,2] "f"
  bwd m  %g.a = mul %a, %x.a : f32[6,10]
  bwd m  %g.b = mul %b, %x.b : f32[9,4]
  bwd m  %g.c = mul %c, %x.c : f32[7]
  bwd m  %g.d = mul %d, %x.d : f32[2,3,4]
  bwd m  %g.e = mul %e, %x.e : f32[]
  bwd m  %g.f = mul %f, %x.f : f32[2,2,3,2]
  fwd m  %loss = sum %x.c dims=[0] keepdim=false : f32[]
  output loss = %loss
  gradient "a" = %g.a
  gradient "b" = %g.b
  gradient "c" = %g.c
  gradient "d" = %g.d
  gradient "e" = %g.e
  gradient "f" = %g.f
}"#;

const STEPS: usize = 200;

/// The name of PyTorch's side, an optimizer, its options, the largest distance after one step and
/// after all steps, as a share of the largest number of a parameter, and the parameters that
/// PyTorch updates too.
type Case = (
    &'static str,
    Optimizer,
    &'static [(&'static str, f64)],
    [f64; 2],
    &'static [&'static str],
);

const CASES: [Case; 10] = [
    (
        "adamw",
        Optimizer::AdamW,
        &[("lr", 1e-2)],
        [1e-7, 1e-6],
        ALL,
    ),
    // Its moments have 8 bits of precision.
    (
        "adamw",
        Optimizer::AdamWBf16,
        &[("lr", 1e-2)],
        [1e-7, 2e-2],
        ALL,
    ),
    (
        "lion",
        Optimizer::Lion,
        &[("lr", 1e-3), ("weight_decay", 0.1)],
        [1e-7, 1e-6],
        ALL,
    ),
    (
        "adafactor",
        Optimizer::Adafactor,
        &[("weight_decay", 0.1)],
        [1e-6, 1e-5],
        ALL,
    ),
    (
        "adafactor-paper",
        Optimizer::AdafactorPaper,
        &[("weight_decay", 0.1)],
        [1e-6, 1e-5],
        ALL,
    ),
    // After 20,000 steps.
    (LATE, Optimizer::AdafactorPaper, &[], [1e-6, 1e-5], ALL),
    (
        "adafactor-paper-momentum",
        Optimizer::AdafactorPaperMomentum,
        &[("weight_decay", 0.1)],
        [1e-6, 1e-5],
        ALL,
    ),
    // Parameters hardly move.
    (
        "adafactor-paper-warmup",
        Optimizer::AdafactorPaper,
        &[("warmup_init", 1e-6)],
        [1e-7, 1e-6],
        ALL,
    ),
    (
        "adafactor-paper-fixed",
        Optimizer::AdafactorPaper,
        &[
            ("relative_step", 0.0),
            ("scale_parameter", 0.0),
            ("eps1", 1e-10),
            ("d", 0.9),
            ("beta2_decay", -0.7),
        ],
        [1e-6, 1e-5],
        ALL,
    ),
    // Products in bf16.
    (
        "muon",
        Optimizer::Muon,
        &[("lr", 1e-2)],
        [1e-3, 1e-2],
        &["a", "b"],
    ),
];

const ALL: &[&str] = &["a", "b", "c", "d", "e", "f"];

/// The case that begins after 20,000 steps.
const LATE: &str = "adafactor-paper-late";

fn floats(bytes: &[u8]) -> Vec<f32> {
    let chunks = bytes.as_chunks().0.iter();
    chunks.map(|b| f32::from_le_bytes(*b)).collect()
}

#[test]
fn optimizers_are_pytorchs_over_200_steps() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/optimizers/optimizers.safetensors");
    let file = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let tensor = |name: &str| file.tensor(name).unwrap().data().to_vec();
    let graph = parse_graph(GRAPH).unwrap();
    let start = |name: &str| -> Data {
        let parameters = ALL.iter();
        let mut start: Data = parameters
            .map(|p| (p.to_string(), tensor(&format!("start.{p}"))))
            .collect();
        if name == LATE {
            start.insert(STEP.to_string(), 20_000i64.to_le_bytes().to_vec());
        }
        start
    };
    let device = devices::named("cpu").unwrap();
    for (name, optimizer, given, bounds, paths) in CASES {
        let hyper: Vec<u8> = optimizer
            .options()
            .iter()
            .map(|(option, value)| {
                given
                    .iter()
                    .find(|(name, _)| name == option)
                    .map_or(*value, |o| o.1)
            })
            .flat_map(f64::to_le_bytes)
            .collect();
        let feeds: Vec<Tensors> = (0..STEPS)
            .map(|step| {
                let input = |p: &&str| {
                    let all = tensor(&format!("x.{p}"));
                    let bytes = all.len() / STEPS;
                    (format!("x.{p}"), all[step * bytes..][..bytes].to_vec())
                };
                let hyper = [(HYPER.to_string(), hyper.clone())];
                ALL.iter().map(input).chain(hyper).collect()
            })
            .collect();
        for kernels in [Kernels::Plain, Kernels::Generated] {
            let options = Options {
                optimizer,
                kernels,
                planner: Planner::Keep,
                ..Options::default()
            };
            let cost = Roofline::new(&device);
            let compiled =
                pipeline::compile(graph.clone(), &options, &device, &cost, &mut |_| ()).unwrap();
            let artifact = codegen::emit(&compiled, &start(name), codegen::Target::host()).unwrap();
            let of = |steps: usize| {
                let runtime = runtime::Options::default();
                run::compiled(&artifact, runtime, &feeds[..steps])
                    .unwrap()
                    .0
                    .states
            };
            for (prefix, steps, bound) in [("first.", 1, bounds[0]), ("", STEPS, bounds[1])] {
                let states = of(steps);
                for path in paths {
                    let ours = floats(&states[*path]);
                    let theirs = floats(&tensor(&format!("{name}.{prefix}{path}")));
                    let largest = theirs.iter().fold(0f32, |most, x| most.max(x.abs()));
                    let distance = |(a, b): (&f32, &f32)| f64::from((a - b).abs() / largest);
                    let most = ours.iter().zip(&theirs).map(distance).fold(0.0, f64::max);
                    let (own, kernels) = (optimizer.name(), kernels.name());
                    let what = format!("{name}, {own}, {kernels} kernels, {path}, {steps} steps");
                    assert!(most <= bound, "{what}: {most:e}");
                }
            }
        }
    }
}

/// One kernel updates a parameter and its moments, and reads nothing that another one computes: no
/// update waits for the gradient of another. A parameter of one number is left out: the kernel of
/// the numbers that all share updates it.
#[test]
fn updates_are_one_kernel_each_and_independent() {
    let device = devices::named("cpu").unwrap();
    let of_one = ["%e", "x.e", "g.e"];
    let lines = GRAPH.lines();
    let text: Vec<&str> = lines
        .filter(|line| !of_one.iter().any(|name| line.contains(name)))
        .collect();
    let text = text.join("\n");
    for optimizer in [Optimizer::AdamW, Optimizer::AdamWBf16, Optimizer::Lion] {
        let options = Options {
            optimizer,
            planner: Planner::Keep,
            ..Options::default()
        };
        let (graph, cost) = (parse_graph(&text).unwrap(), Roofline::new(&device));
        let compiled = pipeline::compile(graph, &options, &device, &cost, &mut |_| ()).unwrap();
        let graph = &compiled.program.graph;
        let updates: BTreeMap<String, ir::Node> = graph
            .states
            .values()
            .map(|state| (state.path.clone(), graph.def_node(state.after).unwrap()))
            .filter(|(path, _)| path != "optimizer.step")
            .collect();
        let nodes: BTreeSet<ir::Node> = updates.values().copied().collect();
        for (path, node) in &updates {
            let parameter = path.rsplit('.').next().unwrap();
            assert_eq!(*node, updates[parameter], "{}: {path}", optimizer.name());
            for &input in &graph.nodes[*node].inputs {
                let maker = graph.def_node(graph.root(input));
                assert!(!maker.is_some_and(|maker| nodes.contains(&maker)), "{path}");
            }
        }
    }
}
