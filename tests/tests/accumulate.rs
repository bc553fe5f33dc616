//! Products that start from their summand compute the same sums.

use ir::graph::Output;
use ir::{Attr, DType, Graph, Op, Phase, TensorType, Value};
use lighterage_tests::evaluate::Tensors;
use lighterage_tests::{generate, run};
use passes::graph::{accumulate, canonical};
use proptest::prelude::*;

fn accumulated(graph: &Graph) -> Graph {
    let mut new = graph.clone();
    accumulate::run(&mut new);
    assert_eq!(ir::verify::graph(&new), vec![], "{new}");
    new
}

fn count(graph: &Graph, op: &str) -> usize {
    graph
        .order
        .iter()
        .filter(|&&node| graph.nodes[node].op.name() == op)
        .count()
}

/// The largest number of bytes of a graph's live values. A value lives from its node to its last
/// reader.
fn peak(graph: &Graph) -> u64 {
    let mut last = ir::Table::filled(graph.values.len(), 0);
    for (at, &node) in graph
        .order
        .iter()
        .enumerate()
        .filter(|(_, node)| !graph.nodes[**node].op.is_alias())
    {
        graph.nodes[node]
            .inputs
            .iter()
            .for_each(|&value| last[graph.root(value)] = at);
    }
    graph
        .wanted()
        .for_each(|value| last[graph.root(value)] = usize::MAX);
    let (mut live, mut most): (Vec<Value>, u64) = (vec![], 0);
    for (at, &node) in graph
        .order
        .iter()
        .enumerate()
        .filter(|(_, node)| !graph.nodes[**node].op.is_alias())
    {
        live.extend(&graph.nodes[node].outputs);
        most = most.max(
            live.iter()
                .map(|&value| graph.values[value].ty.bytes())
                .sum(),
        );
        live.retain(|&value| at < last[value]);
    }
    most
}

/// A graph of products and sums of 16 numbers each, as matrices or in three dimensions, from
/// choices: the op of a step, and its operands, counted back from the last value. Numbers stay
/// small enough for sums to be exact.
fn sums(choices: &[(u8, u8, u8)]) -> Graph {
    let mut graph = Graph::new("sums");
    let shapes = [vec![4i64, 4], vec![2, 2, 4]];
    let ty = || TensorType::new(DType::F32, [4, 4]).unwrap();
    // Each with a bound of its magnitude.
    let mut values: Vec<(Value, f64)> = (0..3)
        .map(|i| (graph.add_input(format!("x{i}"), ty()), 4.0))
        .collect();
    for (i, &(what, a, b)) in choices.iter().enumerate() {
        let phase = if 2 * i < choices.len() {
            Phase::Forward
        } else {
            Phase::Backward
        };
        let mut node = |op: &str, attrs: &[(&'static str, Attr)], inputs: &[Value]| {
            let name = format!("v{}", graph.values.len());
            graph
                .add_node(
                    Op::new(op, attrs.iter().cloned()).unwrap(),
                    inputs,
                    &[name],
                    phase,
                    "m",
                )
                .unwrap()[0]
        };
        let shaped = |to: usize| [("shape", Attr::Ints(shapes[to].clone()))];
        let pick = |at: u8| values[values.len() - 1 - usize::from(at) % values.len().min(4)];
        let ((x, x_bound), (y, y_bound)) = (pick(a), pick(b));
        values.push(match what % 5 {
            0 => {
                let [x, y] = [x, y].map(|value| {
                    let small = node(
                        "clamp",
                        &[("min", Attr::Float(-4.0)), ("max", Attr::Float(4.0))],
                        &[value],
                    );
                    node("reshape", &shaped(0), &[small])
                });
                let product = [
                    ("ta", Attr::Bool(a % 2 == 0)),
                    ("tb", Attr::Bool(b % 2 == 0)),
                ];
                let product = node("matmul", &product, &[x, y]);
                (
                    node("reshape", &shaped(usize::from(what / 5) % 2), &[product]),
                    64.0,
                )
            }
            1 => (node("neg", &[], &[x]), x_bound),
            _ if 65536.0 < x_bound + y_bound => (x, x_bound),
            _ => {
                let [x, y] = [x, y]
                    .map(|value| node("reshape", &shaped(usize::from(what / 5) % 2), &[value]));
                (node("add", &[], &[x, y]), x_bound + y_bound)
            }
        });
    }
    for (k, &(value, _)) in values.iter().rev().step_by(5).enumerate() {
        graph.outputs.push(Output {
            name: format!("out{k}"),
            value,
        });
    }
    graph
}

/// Checks the pass on a graph whose numbers are small integers; returns how many sums it moves into
/// products.
fn moved(mut graph: Graph, seed: u64) -> usize {
    canonical::run(&mut graph);
    let new = accumulated(&graph);
    let moved = count(&new, "addmm") - count(&graph, "addmm");
    assert_eq!(count(&graph, "matmul") - count(&new, "matmul"), moved);
    assert_eq!(
        count(&graph, "add") - count(&new, "add"),
        moved,
        "{graph}\n{new}"
    );
    assert!(peak(&new) <= peak(&graph), "{graph}\n{new}");
    assert!(accumulated(&new) == new, "once is enough\n{new}");
    let start: Tensors = generate::states(&graph, seed);
    let feeds: Vec<_> = (0..2)
        .map(|step| generate::feed(&graph, seed, step))
        .collect();
    assert!(
        run::plain(&new, &start, &feeds) == run::plain(&graph, &start, &feeds),
        "{graph}\n{new}"
    );
    moved
}

proptest! {
    #![proptest_config(generate::config(300))]
    #[test]
    fn sums_stay_what_they_are(
        choices in prop::collection::vec(any::<(u8, u8, u8)>(), 1..40),
        seed: u64,
    ) {
        moved(sums(&choices), seed);
    }
    #[test]
    fn random_graphs_keep_their_bits(recipe in generate::recipes(60), seed: u64) {
        moved(generate::graph(&recipe), seed);
    }
}

/// Random graphs have such sums.
#[test]
fn there_are_such_sums() {
    let choices = |seed: u64| (0..40).map(move |i| generate::mix(seed * 40 + i).to_le_bytes());
    let all: usize = (0..100)
        .map(|seed| {
            moved(
                sums(
                    &choices(seed)
                        .map(|b| (b[0], b[1], b[2]))
                        .collect::<Vec<_>>(),
                ),
                seed,
            )
        })
        .sum();
    assert!(50 <= all, "{all} in 100 graphs");
}
