//! A stack of linear layers with its gradients, like a trace of `torch.nn.Sequential` of
//! `torch.nn.Linear` with the mean squared error. It tests the memory of updates. Parameters and
//! gradients are in the order of the layers.

use ir::graph::Output;
use ir::op::{Attr, Op};
use ir::{DType, Graph, Phase, State, StateKind, TensorType, Value};

/// `layers` layers of `width` by `width` on `batch` rows; inputs `x` and `t`.
pub fn linears(layers: usize, width: u64, batch: u64) -> Graph {
    let mut graph = Graph::new(format!("linears{layers}"));
    let ty = |shape: &[u64]| TensorType::new(DType::F32, shape).expect("a small type");
    let x = graph.add_input("x", ty(&[batch, width]));
    let t = graph.add_input("t", ty(&[batch, width]));
    let path = |i: usize, part: &str| format!("{i}.{part}");
    let parameters: Vec<[(State, Value); 2]> = (0..layers)
        .map(|i| {
            let mut state = |part, shape: &[u64]| {
                let (path, ty) = (path(i, part), ty(shape));
                let state = graph.states.next_id();
                (
                    state,
                    graph.add_state(path.clone(), path, StateKind::Param, ty),
                )
            };
            [state("weight", &[width, width]), state("bias", &[width])]
        })
        .collect();
    let product = |tb: bool| vec![("ta", Attr::Bool(!tb)), ("tb", Attr::Bool(tb))];
    let dims = |dims: &[i64]| {
        vec![
            ("dims", Attr::Ints(dims.to_vec())),
            ("keepdim", Attr::Bool(false)),
        ]
    };

    let mut kept = vec![x];
    for (i, &[(_, w), (_, b)]) in parameters.iter().enumerate() {
        let y = node(
            &mut graph,
            Phase::Forward,
            i,
            "addmm",
            product(true),
            &[b, kept[i], w],
        );
        kept.push(y);
    }
    let error = node(
        &mut graph,
        Phase::Forward,
        layers,
        "sub",
        vec![],
        &[kept[layers], t],
    );
    let square = node(
        &mut graph,
        Phase::Forward,
        layers,
        "mul",
        vec![],
        &[error, error],
    );
    let loss = node(
        &mut graph,
        Phase::Forward,
        layers,
        "mean",
        dims(&[0, 1]),
        &[square],
    );
    graph.outputs.push(Output {
        name: "loss".into(),
        value: loss,
    });

    let slope = vec![("value", Attr::Float(2.0 / (batch * width) as f64))];
    let mut dy = node(
        &mut graph,
        Phase::Backward,
        layers,
        "mul_scalar",
        slope,
        &[error],
    );
    let mut gradients = vec![];
    for (i, &[(weight, w), (bias, _)]) in parameters.iter().enumerate().rev() {
        let dw = node(
            &mut graph,
            Phase::Backward,
            i,
            "matmul",
            product(false),
            &[dy, kept[i]],
        );
        let db = node(&mut graph, Phase::Backward, i, "sum", dims(&[0]), &[dy]);
        gradients.extend([(bias, db), (weight, dw)]);
        if 0 < i {
            let plain = vec![("ta", Attr::Bool(false)), ("tb", Attr::Bool(false))];
            dy = node(&mut graph, Phase::Backward, i, "matmul", plain, &[dy, w]);
        }
    }
    gradients.reverse();
    graph.gradients = gradients;
    graph
}

fn node(
    graph: &mut Graph,
    phase: Phase,
    layer: usize,
    op: &str,
    attrs: Vec<(&'static str, Attr)>,
    inputs: &[Value],
) -> Value {
    let name = format!("{op}_{}", graph.values.len());
    let op = Op::new(op, attrs).expect("the stack should build ops right");
    graph
        .add_node(op, inputs, &[name], phase, layer.to_string())
        .expect("the stack should type ops right")[0]
}
