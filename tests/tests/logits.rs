//! A loss over logits in half precision that stores nothing in f32 is the same loss.

use ir::text::parse_graph;
use ir::{Graph, Op};
use lighterage_tests::evaluate::{self, Tensors};
use lighterage_tests::numbers::{Close, Random};
use passes::graph::logits;
use runtime::kernels::owned::OwnedTensor;

const ROWS: usize = 24;
const CLASSES: usize = 40;
const IGNORED: i64 = -100;

/// The loss of 24 rows of 40 classes, and its gradient; `reduction` is 1 for the mean and 2 for the
/// sum.
fn graph(dtype: &str, reduction: u32) -> Graph {
    let text = format!(
        "graph loss {{
  input  %x : {dtype}[{ROWS},{CLASSES}]
  input  %t : i64[{ROWS}]
  fwd m  %wide = cast %x dtype=f32 : f32[{ROWS},{CLASSES}]
  fwd m  %logs = log_softmax %wide dim=1 : f32[{ROWS},{CLASSES}]
  fwd m  %loss, %n = nll_loss %logs, %t ignore={IGNORED} reduction={reduction} : f32[], f32[]
  bwd m  %one = full dtype=f32 shape=[] value=3.0 : f32[]
  bwd m  %d = nll_loss_bwd %one, %t, %n dtype=f32 ignore={IGNORED} reduction={reduction} \
         shape=[{ROWS},{CLASSES}] : f32[{ROWS},{CLASSES}]
  bwd m  %dwide = log_softmax_bwd %d, %logs dim=1 : f32[{ROWS},{CLASSES}]
  bwd m  %dx = cast %dwide dtype={dtype} : {dtype}[{ROWS},{CLASSES}]
  output loss = %loss
  output n = %n
  output dx = %dx
}}"
    );
    parse_graph(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// Logits of all sizes, some of them minus infinity, and rows of large logits whose differences are
/// small: there the order of subtractions matters. Each row's target counts with this chance.
fn inputs(graph: &Graph, random: &mut Random, counts: f64) -> Tensors {
    let dtype = codegen::dtype(graph.values[graph.inputs[0]].ty.dtype());
    let mut targets = vec![];
    let mut logits = vec![];
    for _ in 0..ROWS {
        let target = random.next() as usize % CLASSES;
        let counted = random.unit().abs() < counts;
        targets.push(if counted { target as i64 } else { IGNORED });
        let hidden = random.next() as usize % CLASSES;
        let (least, size) = [(0.0, 3.0), (0.0, 20.0), (1000.0, 12.0)][random.next() as usize % 3];
        logits.extend((0..CLASSES).map(|class| match class {
            _ if class == hidden && class != target => f64::NEG_INFINITY,
            _ => least + size * random.unit(),
        }));
    }
    let logits = OwnedTensor::from_f64s(dtype, &[ROWS, CLASSES], &logits);
    let targets = OwnedTensor::from_i64s(codegen::dtype(ir::DType::I64), &[ROWS], &targets);
    Tensors::from([("x".into(), logits.bytes()), ("t".into(), targets.bytes())])
}

#[test]
fn the_loss_and_its_gradient_are_the_same() {
    let mut random = Random(7);
    for dtype in ["bf16", "f16"] {
        for (reduction, counts) in [(1, 1.1), (1, 0.6), (1, 0.0), (2, 0.6), (2, 0.0)] {
            let before = graph(dtype, reduction);
            let mut after = before.clone();
            logits::run(&mut after);
            assert_eq!(ir::verify::graph(&after), vec![], "{after}");
            let stays = |node: &ir::Node| matches!(after.nodes[*node].op, Op::LogSoftmax(_));
            assert!(!after.order.iter().any(stays), "{after}");

            let inputs = inputs(&before, &mut random, counts);
            let [expected, found] = [&before, &after]
                .map(|graph| evaluate::step(graph, &mut Tensors::new(), &inputs).unwrap());
            for output in &before.outputs {
                let ty = &before.values[output.value].ty;
                let shape = lighterage_tests::numbers::shape_of(ty);
                let tensor = |all: &Tensors| {
                    OwnedTensor::from_bytes(codegen::dtype(ty.dtype()), &shape, &all[&output.name])
                };
                let off = Close::OfSums(1.0, 1e-6).first_off(&tensor(&found), &tensor(&expected));
                assert_eq!(
                    off, None,
                    "{} of {dtype}, {reduction}, {counts}",
                    output.name
                );
            }
        }
    }
}
