//! The loss in chunks of rows: no bit of the loss, its gradients or the trained parameters depends
//! on the number of chunks.

use artifact::PRODUCT_DEPTH;
use codegen::Data;
use ir::graph::Output;
use ir::op::Attr;
use ir::{DType, Graph, Op, Phase, StateKind, TensorType, Value};
use lighterage_tests::evaluate::{self, Tensors};
use lighterage_tests::generate::config;
use lighterage_tests::gpt2::gpt2;
use passes::cost::Roofline;
use passes::decide::{Extent, Planner};
use passes::devices;
use passes::graph::loss::{self, Chunks};
use passes::graph::optimizer::{HYPER, Optimizer};
use passes::pipeline::{self, Budget, Compiled, Error, Kernels, Options};
use proptest::prelude::*;
use runtime::{Machine, StateInit};
use std::collections::BTreeMap;
use std::path::Path;

const DEPTH: u64 = PRODUCT_DEPTH as u64;
const IGNORED: i64 = -100;

/// A head and its loss, with properties that differ between models.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    pub(crate) rows: u64,
    pub(crate) width: u64,
    pub(crate) vocabulary: u64,
    pub(crate) dtype: DType,
    pub(crate) mean: bool,
    /// Every `ignored`-th target does not count; 1: no target counts.
    pub(crate) ignored: usize,
    /// A constant added to every logit, as an operand of the product.
    pub(crate) bias: bool,
    /// A factor of the logits.
    pub(crate) scale: Option<f64>,
    /// The weight is transposed, and its gradient too.
    pub(crate) transposed: bool,
    pub(crate) seed: u64,
}

fn heads() -> impl Strategy<Value = Head> {
    let sizes = (
        DEPTH + 1..4 * DEPTH,
        1u64..12,
        12u64..40,
        prop::sample::select(vec![DType::F32, DType::F64, DType::BF16, DType::F16]),
        any::<bool>(),
    );
    let forms = (
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
        1usize..9,
        any::<u64>(),
    );
    (sizes, forms).prop_map(
        |((rows, width, vocabulary, dtype, mean), (bias, scaled, transposed, ignored, seed))| {
            Head {
                rows,
                width,
                vocabulary,
                dtype,
                mean,
                ignored,
                bias,
                scale: scaled.then_some(0.37),
                transposed,
                seed,
            }
        },
    )
}

impl Head {
    pub(crate) fn graph(&self) -> Graph {
        let mut graph = Graph::new("head");
        let Head {
            rows,
            width,
            vocabulary,
            dtype,
            ..
        } = *self;
        let ty = |shape: &[u64]| TensorType::new(dtype, shape).unwrap();
        let targets = graph.add_input("t", TensorType::new(DType::I64, [rows]).unwrap());
        let factor = graph.add_input("factor", ty(&[]));
        let x = graph.add_input("x", ty(&[rows, width]));
        let shape = if self.transposed {
            [width, vocabulary]
        } else {
            [vocabulary, width]
        };
        let w = graph.add_input("w", ty(&shape));
        let bias = graph.add_input("bias", ty(&[vocabulary]));
        let flags = |ta, tb| vec![("ta", Attr::Bool(ta)), ("tb", Attr::Bool(tb))];
        let dim = vec![("dim", Attr::Int(1))];
        let reduction = Attr::Int(if self.mean { 1 } else { 2 });
        let common = vec![("ignore", Attr::Int(IGNORED)), ("reduction", reduction)];
        let (fwd, bwd) = (Phase::Forward, Phase::Backward);
        let mut logits = match self.bias {
            true => node(
                &mut graph,
                "addmm",
                flags(false, !self.transposed),
                &[bias, x, w],
                fwd,
            )[0],
            false => node(
                &mut graph,
                "matmul",
                flags(false, !self.transposed),
                &[x, w],
                fwd,
            )[0],
        };
        let scale = |graph: &mut Graph, value, phase| match self.scale {
            Some(s) => node(
                graph,
                "mul_scalar",
                vec![("value", Attr::Float(s))],
                &[value],
                phase,
            )[0],
            None => value,
        };
        logits = scale(&mut graph, logits, fwd);
        let logp = node(&mut graph, "log_softmax", dim.clone(), &[logits], fwd)[0];
        let loss = node(
            &mut graph,
            "nll_loss",
            common.clone(),
            &[logp, targets],
            fwd,
        );
        let sizes = Attr::Ints(vec![rows as i64, vocabulary as i64]);
        let more = [("dtype", Attr::Type(dtype)), ("shape", sizes)];
        let attrs = common.into_iter().chain(more).collect();
        let dlogp = node(
            &mut graph,
            "nll_loss_bwd",
            attrs,
            &[factor, targets, loss[1]],
            bwd,
        )[0];
        let dlogits = node(&mut graph, "log_softmax_bwd", dim, &[dlogp, logp], bwd)[0];
        let dlogits = scale(&mut graph, dlogits, bwd);
        let factors = if self.transposed {
            [x, dlogits]
        } else {
            [dlogits, x]
        };
        let dw = node(&mut graph, "matmul", flags(true, false), &factors, bwd)[0];
        let dx = node(
            &mut graph,
            "matmul",
            flags(false, self.transposed),
            &[dlogits, w],
            bwd,
        )[0];
        for (name, value) in [
            ("loss", loss[0]),
            ("weight", loss[1]),
            ("dw", dw),
            ("dx", dx),
        ] {
            graph.outputs.push(Output {
                name: name.into(),
                value,
            });
        }
        graph
    }

    pub(crate) fn data(&self, graph: &Graph) -> Tensors {
        let mut state = self.seed;
        let mut next = || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            state >> 33
        };
        let mut tensors = Tensors::new();
        for &input in &graph.inputs {
            let data = &graph.values[input];
            let mut bytes = vec![];
            for i in 0..data.ty.numel() as usize {
                let number = next() as f64 / 2f64.powi(30) - 1.0;
                match data.ty.dtype() {
                    DType::I64 => {
                        let counts = !i.is_multiple_of(self.ignored);
                        let target = if counts {
                            (next() % self.vocabulary) as i64
                        } else {
                            IGNORED
                        };
                        bytes.extend(target.to_le_bytes());
                    }
                    DType::F32 => bytes.extend((number as f32).to_le_bytes()),
                    DType::BF16 => bytes.extend(half::bf16::from_f64(number).to_le_bytes()),
                    DType::F16 => bytes.extend(half::f16::from_f64(number).to_le_bytes()),
                    _ => bytes.extend(number.to_le_bytes()),
                }
            }
            tensors.insert(data.name.clone(), bytes);
        }
        tensors
    }
}

fn node(
    graph: &mut Graph,
    op: &str,
    attrs: Vec<(&'static str, Attr)>,
    inputs: &[Value],
    phase: Phase,
) -> Vec<Value> {
    let op = Op::new(op, attrs).unwrap();
    let n = if op.name() == "nll_loss" { 2 } else { 1 };
    let names: Vec<String> = (0..n)
        .map(|i| format!("v{}.{i}", graph.values.len()))
        .collect();
    graph.add_node(op, inputs, &names, phase, "head").unwrap()
}

proptest! {
    #![proptest_config(config(32))]

    /// Loss, weight and gradients have the same bits in any number of chunks.
    #[test]
    fn chunks_change_no_bit(head in heads(), n in 2u64..9) {
        let graph = head.graph();
        let inputs = head.data(&graph);
        let expected = evaluate::step(&graph, &mut Tensors::new(), &inputs).unwrap();
        let mut cut = graph.clone();
        loss::run(&mut cut, n).map_err(|e| TestCaseError::fail(e.to_string()))?;
        prop_assert_eq!(ir::verify::graph(&cut), vec![]);
        let outputs = evaluate::step(&cut, &mut Tensors::new(), &inputs).unwrap();
        for (name, bytes) in &expected {
            prop_assert!(outputs[name] == *bytes, "{} differs in {} chunks of {:?}", name, n, head);
        }
        let widest = |graph: &Graph| {
            let sizes = graph.order.iter().flat_map(|&node| &graph.nodes[node].outputs);
            let shapes = sizes.map(|&v| graph.values[v].ty.shape());
            let logits = shapes.filter(|shape| shape.get(1) == Some(&head.vocabulary));
            logits.map(|shape| shape[0]).max()
        };
        // The gradient of a transposed weight has a column for each word; it may be wider than a
        // chunk.
        let chunk = head.rows.div_ceil(n).next_multiple_of(DEPTH);
        prop_assert!(widest(&cut) <= Some(chunk.max(head.width).max(head.vocabulary)), "logits \
            are whole");
    }
}

fn head() -> Head {
    Head {
        rows: 4 * DEPTH,
        width: 4,
        vocabulary: 8,
        dtype: DType::F32,
        mean: true,
        ignored: 5,
        bias: false,
        scale: None,
        transposed: false,
        seed: 1,
    }
}

/// A loss whose bits would change is not cut, and the error names the reason.
#[test]
fn what_cannot_be_cut_is_named() {
    let why = |graph: &Graph| loss::run(&mut graph.clone(), 2).unwrap_err().to_string();
    let few = Head {
        rows: DEPTH,
        ..head()
    }
    .graph();
    assert!(
        why(&few).contains("rows, and chunks are multiples of"),
        "{}",
        why(&few)
    );

    let named = |graph: &Graph, op: &str| {
        let found = graph
            .order
            .iter()
            .find(|&&node| graph.nodes[node].op.name() == op);
        graph.nodes[*found.unwrap()].outputs[0]
    };
    // A bias's gradient is a sum over rows, which kernels may cut anywhere.
    let mut bias = Head {
        bias: true,
        ..head()
    }
    .graph();
    let dlogits = named(&bias, "log_softmax_bwd");
    let sum = vec![
        ("dims", Attr::Ints(vec![0])),
        ("keepdim", Attr::Bool(false)),
    ];
    let value = node(&mut bias, "sum", sum, &[dlogits], Phase::Backward)[0];
    bias.outputs.push(Output {
        name: "db".into(),
        value,
    });
    assert!(
        why(&bias).contains("sum, reads what would be cut"),
        "{}",
        why(&bias)
    );
    // The logits are an output.
    let mut whole = head().graph();
    let value = named(&whole, "matmul");
    whole.outputs.push(Output {
        name: "logits".into(),
        value,
    });
    assert!(
        why(&whole).contains("is to leave the step whole"),
        "{}",
        why(&whole)
    );
    // The gradient's factor depends on the loss.
    let mut late = head().graph();
    let (loss, dlogp) = (named(&late, "nll_loss"), named(&late, "nll_loss_bwd"));
    let at = late.def_node(dlogp).unwrap();
    late.nodes[at].inputs[0] = loss;
    assert!(
        why(&late).contains("waits for the whole of it"),
        "{}",
        why(&late)
    );
    let mut none = Graph::new("none");
    none.add_state(
        "s",
        "s",
        StateKind::Param,
        TensorType::new(DType::F32, [4]).unwrap(),
    );
    assert!(why(&none).contains("no mean or sum"), "{}", why(&none));
    assert_eq!(loss::chunks(&whole, 8), 1);
    assert_eq!(loss::chunks(&head().graph(), 8), 4);
}

// --- whole steps ---

fn compile(graph: &Graph, options: &Options) -> Result<Compiled, Error> {
    let device = devices::named("cpu").unwrap();
    pipeline::compile(
        graph.clone(),
        options,
        &device,
        &Roofline::new(&device),
        &mut |_| (),
    )
}

#[derive(PartialEq)]
struct Trained {
    outputs: Vec<Tensors>,
    states: Tensors,
}

/// Some steps on tokens below `vocabulary`; also the measured peak.
fn train(compiled: &Compiled, vocabulary: u64, options: runtime::Options) -> (Trained, u64) {
    let artifact = codegen::emit(compiled, &Data::new(), codegen::Target::host()).unwrap();
    let mut machine = Machine::new(artifact.clone(), options).unwrap();
    machine
        .initialise(&StateInit {
            seed: 7,
            std: Some(0.1),
        })
        .unwrap();
    let mut outputs = vec![];
    for step in 0..2u64 {
        for input in &artifact.inputs {
            let bytes: Vec<u8> = if input.name == HYPER {
                [1e-3f64, 0.9, 0.999, 1e-8, 0.01]
                    .iter()
                    .flat_map(|x| x.to_le_bytes())
                    .collect()
            } else {
                let n: u64 = input.operand.shape.iter().product();
                let token =
                    |i: u64| (i * i + 7 * i + step * 31 + input.name.len() as u64) % vocabulary;
                (0..n).flat_map(|i| token(i).to_le_bytes()).collect()
            };
            machine.write_input(&input.name, &bytes).unwrap();
        }
        machine.step().unwrap();
        let read = |o: &artifact::Binding| (o.name.clone(), machine.read_output(&o.name).unwrap());
        outputs.push(artifact.outputs.iter().map(read).collect());
    }
    let states = artifact
        .states
        .iter()
        .map(|s| (s.path.clone(), machine.read_state(&s.path).unwrap()))
        .collect();
    (Trained { outputs, states }, machine.measured_peak_bytes())
}

/// A real model: gradients, losses and trained parameters, with plain and generated kernels, on one
/// thread and two.
#[test]
fn a_model_trains_alike_in_any_number_of_chunks() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/gpt2/gpt2.pt2");
    let model = torch::read(&file, &BTreeMap::new()).unwrap();
    let ways = Kernels::ALL
        .map(|kernels| (kernels, Optimizer::None))
        .into_iter();
    for (kernels, optimizer) in ways.chain([(Kernels::Generated, Optimizer::AdamW)]) {
        let options = Options {
            kernels,
            optimizer,
            planner: Planner::Keep,
            ..Options::default()
        };
        let [whole, cut] = [1, 4].map(|chunks| {
            let options = Options {
                loss_chunks: Chunks::Of(chunks),
                // Each micro-batch reads the number of targets of all.
                micro_batches: (optimizer == Optimizer::AdamW).then_some(2),
                ..options.clone()
            };
            let compiled = compile(&model.graph, &options).unwrap();
            // Of 1024 rows.
            assert_eq!(
                compiled.loss_chunks,
                chunks.min(1024 / DEPTH),
                "{kernels:?}"
            );
            let threads = runtime::Options {
                threads: Some(if chunks == 1 { 1 } else { 2 }),
                ..Default::default()
            };
            let (trained, peak) = train(&compiled, 256, threads);
            assert_eq!(peak, compiled.planned_peak);
            trained
        });
        assert!(whole == cut, "{kernels:?}, {optimizer:?}");
    }
}

/// If logits take most of the memory, a lower budget computes the loss in chunks; peaks stay below
/// the budget, the smallest budget has a plan, and every bit is the same.
#[test]
fn budgets_choose_chunks() {
    let vocabulary = 1024;
    let graph = gpt2(1, 16, 2, 4 * DEPTH / 64, 64, vocabulary);
    for kernels in Kernels::ALL {
        let options = Options {
            kernels,
            optimizer: Optimizer::AdamW,
            extent: Extent::Curve,
            ..Options::default()
        };
        let with = |budget, loss_chunks| {
            compile(
                &graph,
                &Options {
                    budget,
                    loss_chunks,
                    ..options.clone()
                },
            )
        };
        let whole = with(Budget::Share(1.0), Chunks::Of(1)).unwrap();
        let roomy = with(Budget::Share(1.0), Chunks::Auto).unwrap();
        let (keep, smallest) = (roomy.decided.keep_peak, roomy.decided.smallest.unwrap());
        assert_eq!(
            keep, whole.decided.keep_peak,
            "a share is one of the whole loss"
        );
        let least = whole.decided.smallest.unwrap();
        assert!(2 * smallest < least, "{smallest}, whole {least}");
        let (expected, _) = train(&whole, vocabulary, Default::default());
        let mut higher = u64::MAX;
        let mut chunks = 1;
        const BUDGETS: u64 = 3;
        for k in 0..=BUDGETS {
            let budget = smallest + (keep - smallest) * (BUDGETS - k) / BUDGETS;
            let compiled = with(Budget::Bytes(budget), Chunks::Auto).unwrap();
            let peak = compiled.planned_peak;
            assert!(
                peak <= budget && peak <= higher,
                "{peak} planned for {budget}, {higher} for more"
            );
            assert_eq!(
                compiled.decided.curve, roomy.decided.curve,
                "the curve is that of every budget"
            );
            higher = peak;
            chunks = compiled.loss_chunks;
            let (trained, measured) = train(&compiled, vocabulary, Default::default());
            assert_eq!(measured, peak);
            assert!(
                trained == expected,
                "{kernels:?}: {chunks} chunks at {budget}"
            );
        }
        assert_eq!(higher, smallest, "the smallest budget is met exactly");
        assert!(1 < chunks, "the least budget needs chunks");
        assert!(matches!(
            with(Budget::Bytes(smallest - 1), Chunks::Auto),
            Err(Error::Infeasible(_))
        ));
        let [one, several] = &roomy.loss_variants[..] else {
            panic!("two variants, not {:?}", roomy.loss_variants)
        };
        assert_eq!((one.chunks, several.chunks), (1, chunks));
        assert_eq!(one.outcome.keep.0, keep, "both are told");
        assert!(several.outcome.keep.0 < keep && several.outcome.smallest == Some(smallest));
    }
}
