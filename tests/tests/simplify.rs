//! The pass `simplify`: each rule is right, and a graph of decomposed ops becomes as good as a
//! graph of whole ops.

use ir::{DType, Graph, TensorType};
use lighterage_tests::evaluate::{Tensors, step};
use passes::graph::simplify::{Close, rules, sample};
use passes::graph::{canonical, simplify};
use std::collections::BTreeMap;
use std::path::Path;

/// Random numbers with a seed: xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33
    }
    /// Bytes of a tensor; with `all`, floats of every kind.
    fn tensor(&mut self, ty: &TensorType, all: bool) -> Vec<u8> {
        const ODD: [f64; 8] = [
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
            -0.0,
            0.0,
            1e-40,
            3e38,
            -1.0,
        ];
        let mut bytes = vec![];
        for _ in 0..ty.numel() {
            let odd = all && self.next().is_multiple_of(2);
            let uniform = (self.next() % 4096) as f64 / 1024.0 - 2.0;
            let x = if odd {
                ODD[(self.next() % 8) as usize]
            } else {
                uniform
            };
            match ty.dtype() {
                DType::F32 => bytes.extend((x as f32).to_le_bytes()),
                DType::F64 => bytes.extend(x.to_le_bytes()),
                DType::BF16 => bytes.extend(half::bf16::from_f64(x).to_le_bytes()),
                DType::I64 => bytes.extend(((self.next() % 4) as i64).to_le_bytes()),
                DType::I32 => bytes.extend((self.next() as i32 - (1 << 30)).to_le_bytes()),
                DType::Bool => bytes.push((self.next() % 2) as u8),
                other => panic!("no random {other} tensors"),
            }
        }
        bytes
    }
}

fn floats(bytes: &[u8], dtype: DType) -> Vec<f64> {
    match dtype {
        DType::F32 => bytes
            .chunks(4)
            .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
            .collect(),
        DType::F64 => bytes
            .chunks(8)
            .map(|b| f64::from_le_bytes(b.try_into().unwrap()))
            .collect(),
        DType::BF16 => bytes
            .chunks(2)
            .map(|b| half::bf16::from_le_bytes(b.try_into().unwrap()).to_f64())
            .collect(),
        _ => bytes.iter().map(|&b| f64::from(b)).collect(),
    }
}

fn output(graph: &Graph, inputs: &Tensors) -> Vec<f64> {
    assert_eq!(ir::verify::graph(graph), vec![]);
    let out = step(graph, &mut Tensors::new(), inputs).unwrap();
    floats(&out["out"], graph.values[graph.outputs[0].value].ty.dtype())
}

/// Every rule, at every sample: the two sides are as close as the rule states, and egg finds and
/// applies the rule.
#[test]
fn rules_hold_at_their_samples() {
    let mut failures = vec![];
    let mut names = BTreeMap::new();
    for rule in rules::all() {
        *names.entry(rule.name).or_insert(0) += 1;
        let cases = match sample::cases(rule) {
            Ok(cases) => cases,
            Err(e) => {
                failures.push(e.to_string());
                continue;
            }
        };
        for case in cases {
            for seed in 1..=20 {
                let mut random = Random(seed);
                let all = case.close == Close::Exact;
                let tensor = |v: &ir::Value| {
                    let data = &case.left.values[*v];
                    (data.name.clone(), random.tensor(&data.ty, all))
                };
                let inputs: Tensors = case.left.inputs.iter().map(tensor).collect();
                let (left, right) = (output(&case.left, &inputs), output(&case.right, &inputs));
                let scale = left.iter().fold(1.0f64, |max, x| max.max(x.abs()));
                let close = |(&a, &b): (&f64, &f64)| match case.close {
                    Close::Exact => a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()),
                    Close::Within(share) => (a - b).abs() <= share * scale,
                };
                assert_eq!(left.len(), right.len());
                if let Some((a, b)) = left.iter().zip(&right).find(|&pair| !close(pair)) {
                    failures.push(format!("{} (seed {seed}): {a:e} became {b:e}", case.what));
                    break;
                }
            }
        }
    }
    assert!(
        names.values().all(|&n| n == 1),
        "rules of the same name: {names:?}"
    );
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn fixture(name: &str, level: &str) -> Graph {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("data/models/{name}/joint_{level}.pt2"));
    let mut graph = torch::read(&path, &BTreeMap::new()).unwrap().graph;
    canonical::run(&mut graph);
    graph
}

/// The number of nodes that become lines, by op.
fn lines(graph: &Graph) -> BTreeMap<&'static str, usize> {
    let mut lines = BTreeMap::new();
    for op in graph
        .order
        .iter()
        .map(|&node| &graph.nodes[node].op)
        .filter(|op| !op.is_alias())
    {
        *lines.entry(op.name()).or_insert(0) += 1;
    }
    lines
}

/// After simplification, a graph at the level of core ATen has at most 10 % more lines than a graph
/// with attention, normalisations and losses as single ops.
#[test]
fn core_graphs_become_as_good_as_coarse_ones() {
    for name in [
        "bert-tiny",
        "gpt2-tiny",
        "llama-tiny",
        "resnet-tiny",
        "dropout-tiny",
    ] {
        let [core, coarse] = ["core", "coarse"].map(|level| {
            let mut graph = fixture(name, level);
            let before = lines(&graph);
            simplify::run(&mut graph);
            let after = lines(&graph);
            let (n_before, n_after) = (
                before.values().sum::<usize>(),
                after.values().sum::<usize>(),
            );
            eprintln!("{name} {level}: {n_before} -> {n_after}");
            for op in before
                .keys()
                .chain(after.keys())
                .collect::<std::collections::BTreeSet<_>>()
            {
                let of = |lines: &BTreeMap<&str, usize>| lines.get(op).copied().unwrap_or(0);
                if of(&before) != of(&after) {
                    eprintln!("    {op} {} -> {}", of(&before), of(&after));
                }
            }
            assert!(n_after <= n_before);
            (n_after, after)
        });
        assert!(
            10 * core.0 <= 11 * coarse.0,
            "{name}: {} lines at core, {} at coarse",
            core.0,
            coarse.0
        );
        // No decomposed op is left.
        for op in [
            "sdpa",
            "sdpa_bwd",
            "layer_norm_bwd",
            "batch_norm_bwd",
            "nll_loss",
            "nll_loss_bwd",
            "gelu_bwd",
            "silu_bwd",
        ] {
            assert_eq!(core.1.get(op), coarse.1.get(op), "{name}: {op}");
        }
    }
}

/// A second run of the pass changes nothing.
#[test]
fn simplify_ends() {
    for (name, level) in [
        ("gpt2-tiny", "core"),
        ("llama-tiny", "coarse"),
        ("moe-tiny", "core"),
        ("resnet-tiny", "core"),
    ] {
        let mut graph = fixture(name, level);
        simplify::run(&mut graph);
        let once = graph.clone();
        simplify::run(&mut graph);
        assert_eq!(lines(&graph), lines(&once), "{name} {level}");
    }
}

/// Each graph of the filetests computes the same before and after the pass, on random tensors.
#[test]
fn filetests_compute_the_same() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("filetests/simplify");
    let mut n_graphs = 0;
    for path in std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
    {
        let text = std::fs::read_to_string(&path).unwrap();
        // An extern has no kernel.
        if path.extension().is_none_or(|e| e != "ir") || text.contains("extern") {
            continue;
        }
        let before = ir::text::parse_graph(&text).unwrap();
        let mut after = before.clone();
        simplify::run(&mut after);
        for seed in 1..=3 {
            let mut random = Random(seed);
            let mut tensor = |v: ir::Value| random.tensor(&before.values[v].ty, false);
            let inputs: Tensors = before
                .inputs
                .iter()
                .map(|&v| (before.values[v].name.clone(), tensor(v)))
                .collect();
            let states: Tensors = before
                .states
                .values()
                .map(|s| (s.path.clone(), tensor(s.before)))
                .collect();
            let [expected, computed] =
                [&before, &after].map(|g| step(g, &mut states.clone(), &inputs).unwrap());
            for output in &before.outputs {
                let dtype = before.values[output.value].ty.dtype();
                let [a, b] = [&expected, &computed].map(|out| floats(&out[&output.name], dtype));
                let scale = a.iter().fold(1.0f64, |max, x| max.max(x.abs()));
                let off = a
                    .iter()
                    .zip(&b)
                    .map(|(a, b)| (a - b).abs())
                    .fold(0.0, f64::max);
                assert!(
                    off <= 2e-5 * scale,
                    "{}: {} is off by {off:e}",
                    path.display(),
                    output.name
                );
            }
        }
        n_graphs += 1;
    }
    assert!(10 <= n_graphs);
}
