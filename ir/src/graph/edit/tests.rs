use super::*;
use crate::graph::Output;
use crate::types::DType;
use crate::verify;

fn f32s(shape: &[u64]) -> TensorType {
    TensorType::new(DType::F32, shape).unwrap()
}

fn op(name: &str) -> Op {
    Op::new(name, []).unwrap()
}

/// `x -> y = exp(x) -> z = neg(y)`, with the output `z`.
fn chain() -> Graph {
    let mut graph = Graph::new("chain");
    let x = graph.add_input("x", f32s(&[4]));
    let add = |graph: &mut Graph, name: &str, input: Value, result: &str| {
        graph
            .add_node(op(name), &[input], &[result.into()], Phase::Forward, "m")
            .unwrap()[0]
    };
    let y = add(&mut graph, "exp", x, "y");
    let z = add(&mut graph, "neg", y, "z");
    graph.outputs.push(Output {
        name: "loss".into(),
        value: z,
    });
    graph
}

fn value(graph: &Graph, name: &str) -> Value {
    graph
        .values
        .ids()
        .find(|&v| graph.values[v].name == name)
        .unwrap()
}

/// The lines of the order: `result = op operands`.
fn lines(graph: &Graph) -> Vec<String> {
    assert_eq!(verify::graph(graph), []);
    let names = |values: &[Value]| {
        values
            .iter()
            .map(|&v| graph.values[v].name.as_str())
            .collect::<Vec<_>>()
            .join(" ")
    };
    let line = |&node: &Node| {
        let data = &graph.nodes[node];
        format!(
            "{} = {} {}",
            names(&data.outputs),
            data.op.name(),
            names(&data.inputs)
        )
    };
    graph.order.iter().map(line).collect()
}

#[test]
fn a_node_is_inserted_before_another() {
    let mut graph = chain();
    let (y, neg) = (value(&graph, "y"), graph.order[1]);
    let mut edit = graph.edit();
    let made = edit
        .insert_before(neg, op("sin"), &[y], &["s".into()])
        .unwrap();
    let s = edit.graph().nodes[made].outputs[0];
    edit.set_input(neg, 0, s);
    edit.finish();
    assert_eq!(lines(&graph), ["y = exp x", "s = sin y", "z = neg s"]);
    assert_eq!(graph.nodes[made].module, "m");
}

#[test]
fn uses_are_replaced_in_nodes_and_at_the_end() {
    let mut graph = chain();
    let (y, z) = (value(&graph, "y"), value(&graph, "z"));
    let mut edit = graph.edit();
    edit.replace_uses(z, y);
    edit.remove(edit.graph().def_node(z).unwrap());
    edit.finish();
    assert_eq!(lines(&graph), ["y = exp x"]);
    assert_eq!(graph.outputs[0].value, y);
}

#[test]
fn a_stolen_result_is_defined_by_its_new_node_alone() {
    let mut graph = chain();
    let (exp, x, y, z) = (
        graph.order[0],
        value(&graph, "x"),
        value(&graph, "y"),
        value(&graph, "z"),
    );
    let mut edit = graph.edit();
    edit.set_op(exp, op("tanh"), vec![x]);
    edit.steal_result(exp, 0, z);
    edit.finish();
    assert_eq!(lines(&graph), ["z = tanh x"]);
    assert_eq!(graph.def_node(z), Some(exp));
    assert_ne!(graph.def_node(y), Some(exp));
}

#[test]
fn values_can_be_computed_by_a_new_node() {
    let mut graph = chain();
    let (exp, y, z) = (graph.order[0], value(&graph, "y"), value(&graph, "z"));
    let node = graph.define(&[z], op("sqrt"), vec![y], Phase::Forward, "");
    assert_eq!(
        graph.ssa_fault().unwrap(),
        "%z is defined by another node than %z"
    );
    graph.set_order(vec![exp, node]);
    assert_eq!(lines(&graph), ["y = exp x", "z = sqrt y"]);
}

#[test]
fn faults_are_found() {
    let fault = |change: &dyn Fn(&mut Graph)| {
        let mut graph = chain();
        change(&mut graph);
        assert_ne!(verify::graph(&graph), []);
        graph.ssa_fault().expect("this should be a fault")
    };
    assert_eq!(chain().ssa_fault(), None);
    let swapped = fault(&|graph| graph.order.reverse());
    assert_eq!(swapped, "%z reads %y, which no line above defines");
    let twice = fault(&|graph| graph.order.push(graph.order[1]));
    assert_eq!(twice, "%z stands twice in the order");
    let lost = fault(&|graph| graph.order.truncate(1));
    assert_eq!(lost, "the step leaves %z, which no line defines");
}

#[test]
fn readers_are_by_root_and_in_order() {
    let mut graph = chain();
    let y = value(&graph, "y");
    let reshape = Op::new("reshape", [("shape", crate::Attr::Ints(vec![2, 2]))]).unwrap();
    let alias = graph
        .add_node(reshape, &[y], &["a".into()], Phase::Forward, "")
        .unwrap()[0];
    let square = graph
        .add_node(
            op("mul"),
            &[alias, alias],
            &["b".into()],
            Phase::Forward,
            "",
        )
        .unwrap();
    graph.outputs.push(Output {
        name: "b".into(),
        value: square[0],
    });
    let (readers, positions) = (graph.readers(), graph.positions());
    assert_eq!(readers[y], [Some(graph.order[1]), Some(graph.order[3])]);
    assert_eq!(readers[alias], []);
    assert_eq!(readers[square[0]], [None]);
    assert_eq!(positions[graph.order[3]], 3);
}
