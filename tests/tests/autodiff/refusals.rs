//! What cannot be differentiated, and losses that do not fit.

use ir::{Graph, text};
use lighterage_tests::evaluate::{self, Tensors};
use passes::graph::autodiff::{self, AutodiffError};
use passes::graph::criterion::{self, Criterion, Loss};
use passes::graph::optimizer::{self, Optimizer};

/// A graph with two inputs and a parameter, from its nodes, outputs and gradients.
fn graph(rest: &str) -> Graph {
    let text = format!(
        "graph g {{\n  input %x : f32[2,3]\n  input %i : i64[2]\n  \
         state param %w -> %w : f32[2,3] \"w\"\n{rest}\n}}\n"
    );
    text::parse_graph(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

const LOSS: &str = "fwd m %y = mul %x, %w : f32[2,3]
                    fwd m %loss = sum %y dims=[0,1] keepdim=false : f32[]";

fn refused(rest: &str) -> String {
    let error = autodiff::run(&mut graph(rest), true).unwrap_err();
    error.to_string()
}

#[test]
fn graphs_that_have_no_derivative_are_refused() {
    assert_eq!(
        refused(LOSS),
        "the step has no output loss to differentiate"
    );
    let whole = format!("{LOSS}\noutput loss = %y");
    assert_eq!(
        refused(&whole),
        "the loss %y is f32[2,3]; a loss is one floating-point number, such as f32[]"
    );
    let gradient = format!("{LOSS}\noutput loss = %loss\ngradient \"w\" = %y");
    assert_eq!(
        autodiff::run(&mut graph(&gradient), true),
        Err(AutodiffError::HasGradients)
    );
    let independent = "fwd m %loss = sum %x dims=[0,1] keepdim=false : f32[]\noutput loss = %loss";
    assert_eq!(
        refused(independent),
        "the loss %loss depends on no parameter, so there is nothing to train"
    );
    let sign = "fwd m %y = sign %w : f32[2,3]
                fwd m %loss = sum %y dims=[0,1] keepdim=false : f32[]\noutput loss = %loss";
    assert!(refused(sign).contains("depends on no parameter"));
    let second = "fwd m %y = tanh_bwd %x, %w : f32[2,3]
                  fwd m %loss = sum %y dims=[0,1] keepdim=false : f32[]\noutput loss = %loss";
    assert_eq!(
        refused(second),
        "no gradient passes %y, tanh_bwd: it is a derivative itself, and there are no second \
         derivatives"
    );
    let unknown =
        "fwd m %y = extern %w name=\"a.sort\" node=\"y\" pure=true types=\"f32[2,3]\" : f32[2,3]
                   fwd m %loss = sum %y dims=[0,1] keepdim=false : f32[]\noutput loss = %loss";
    assert_eq!(
        refused(unknown),
        "no gradient passes %y, a.sort: the op is not known, so neither is its derivative"
    );
    let mean = "fwd m %y, %m, %r = layer_norm %w dims=1 eps=1e-5 : f32[2,3], f32[2,1], f32[2,1]
                fwd m %loss = sum %m dims=[0,1] keepdim=false : f32[]\noutput loss = %loss";
    assert!(refused(mean).contains("a result besides its first is used"));
}

/// An op without a derivative is no obstacle beside the way to the loss.
#[test]
fn what_the_loss_does_not_need_may_have_no_derivative() {
    let rest = format!(
        "{LOSS}
         fwd m %s = extern %w name=\"a.sort\" node=\"s\" pure=true types=\"f32[2,3]\" : f32[2,3]
         output loss = %loss\noutput sorted = %s"
    );
    let mut graph = graph(&rest);
    autodiff::run(&mut graph, true).unwrap();
    assert_eq!(graph.gradients.len(), 1);
}

/// A detached value counts as a constant, and is the value itself when gradients are known.
#[test]
fn no_gradient_passes_a_detached_value() {
    let rest = "fwd m %y = mul %w, %w : f32[2,3]
                fwd m %d = detach %y : f32[2,3]
                fwd m %z = mul %d, %w : f32[2,3]
                fwd m %loss = sum %z dims=[0,1] keepdim=false : f32[]\noutput loss = %loss";
    let mut graph = graph(rest);
    autodiff::run(&mut graph, true).unwrap();
    let text = text::print_graph(&graph);
    assert!(!text.contains("detach"), "{text}");
    optimizer::run(&mut graph, Optimizer::None).unwrap();
    let numbers = |xs: &[f32]| xs.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let w = [1.0, -2.0, 0.5, 3.0, 0.0, -1.0];
    let mut states = Tensors::from([("w".to_string(), numbers(&w))]);
    let inputs = Tensors::from([
        ("x".to_string(), vec![0; 24]),
        ("i".to_string(), vec![0; 16]),
    ]);
    let found = evaluate::step(&graph, &mut states, &inputs).unwrap();
    // w^2, not 3 w^2.
    assert_eq!(found["grad.w"], numbers(&w.map(|x| x * x)));
    let all = rest.replace("mul %d, %w", "mul %d, %d");
    assert!(refused(&all).contains("depends on no parameter"));
}

/// The backward stands before the update of the random numbers' state, in the phase `bwd`, and in
/// the module of its forward.
#[test]
fn nodes_know_their_phase_and_module() {
    let mut graph = text::parse_graph(
        r#"graph g {
             input  %x : f32[4]
             state  param %a -> %a : f32[4] "a"
             state  rng   %r -> %r2 : i64[2] "rng"
             fwd one  %p, %m = dropout %a, %r p=0.5 stream=0 : f32[4], bool[4]
             fwd two  %q = mul %p, %x : f32[4]
             fwd end  %loss = sum %q dims=[0] keepdim=false : f32[]
             opt -    %r2 = rng_next %r : i64[2]
             output loss = %loss
           }"#,
    )
    .unwrap();
    autodiff::run(&mut graph, true).unwrap();
    let backward = graph.order.iter().map(|&node| &graph.nodes[node]);
    let backward = backward.filter(|node| node.phase == ir::Phase::Backward);
    let mut modules: Vec<&str> = backward.map(|node| node.module.as_str()).collect();
    modules.dedup();
    assert_eq!(modules, ["end", "two", "one"]);
    let last = graph.order.last().map(|&node| graph.nodes[node].op.name());
    assert_eq!(last, Some("rng_next"));
}

fn attached(rest: &str, criterion: &Criterion) -> Result<Graph, String> {
    let mut graph = graph(rest);
    criterion::attach(&mut graph, criterion).map_err(|e| e.to_string())?;
    assert_eq!(ir::verify::graph(&graph), []);
    assert_eq!(graph.outputs.len(), 1);
    Ok(graph)
}

fn of(loss: Loss) -> Criterion {
    Criterion {
        loss,
        ..Criterion::default()
    }
}

#[test]
fn losses_that_do_not_fit_are_refused() {
    let one = format!("{LOSS}\noutput y = %y");
    let two = format!("{LOSS}\noutput y = %y\noutput z = %x\noutput loss = %loss");
    let error = |rest: &str, criterion: &Criterion| attached(rest, criterion).unwrap_err();
    assert_eq!(
        error(&one, &Criterion::default()),
        "the model gives no scalar, so it has no loss: name a loss with --loss; its outputs are y \
         f32[2,3]"
    );
    assert_eq!(
        error(&two, &of(Loss::Mse)),
        "several outputs may be meant: name one with --logits; they are y f32[2,3], z f32[2,3]"
    );
    let named = Criterion {
        logits: Some("q".into()),
        ..of(Loss::Mse)
    };
    assert_eq!(
        error(&one, &named),
        "the model has no output q; its outputs are y f32[2,3]"
    );
    let shifted = Criterion {
        shift: true,
        ..of(Loss::L1)
    };
    assert_eq!(
        error(&one, &shifted),
        "--shift is for --loss cross-entropy, not for l1"
    );
    let labelled = Criterion {
        labels: Some("t".into()),
        ..Criterion::default()
    };
    assert_eq!(
        error(&two, &labelled),
        "--labels: the loss is the model's own output; name a loss with --loss"
    );
    let taken = Criterion {
        labels: Some("x".into()),
        ..of(Loss::CrossEntropy)
    };
    assert_eq!(
        error(&one, &taken),
        "the model has %x already, f32[2,3]; the labels are i64[2]: name them with --labels"
    );
    let indices = "fwd m %j = add_scalar %i value=1 : i64[2]\noutput j = %j";
    assert_eq!(
        error(indices, &of(Loss::Mse)),
        "no output has floating-point elements that a loss could read; they are j i64[2]"
    );
}

/// An input of the right type is taken as the labels.
#[test]
fn labels_may_be_an_input_of_the_model() {
    let rest = format!("{LOSS}\noutput y = %y");
    let criterion = Criterion {
        labels: Some("i".into()),
        ..of(Loss::CrossEntropy)
    };
    assert_eq!(attached(&rest, &criterion).unwrap().inputs.len(), 2);
    assert_eq!(
        attached(&rest, &of(Loss::CrossEntropy))
            .unwrap()
            .inputs
            .len(),
        3
    );
}

/// Values and gradients of losses by PyTorch's formulas, with an element at 0.
#[test]
fn losses_have_their_values_and_gradients() {
    let x = [0.0f64, 1.5, -2.0, 30.0, -40.0, 0.25];
    let t = [0.0f64, 1.0, 0.25, 1.0, 0.0, 0.75];
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
    type Formula<'a> = &'a dyn Fn(f64, f64) -> f64;
    let cases: [(Loss, Formula<'_>, Formula<'_>); 3] = [
        (Loss::Mse, &|x, t| (x - t) * (x - t), &|x, t| 2.0 * (x - t)),
        (Loss::L1, &|x, t| (x - t).abs(), &|x, t| match x == t {
            true => 0.0,
            false => (x - t).signum(),
        }),
        (Loss::Bce, &|x, t| (1.0 - t) * x + softplus(-x), &|x, t| {
            sigmoid(x) - t
        }),
    ];
    for (loss, value, slope) in cases {
        let text = "graph g {\n  state param %w -> %w : f64[2,3] \"w\"\n  \
                    fwd m %y = mul_scalar %w value=2.0 : f64[2,3]\n  output y = %y\n}\n";
        let mut graph = text::parse_graph(text).unwrap();
        criterion::attach(&mut graph, &of(loss)).unwrap();
        autodiff::run(&mut graph, true).unwrap();
        optimizer::run(&mut graph, Optimizer::None).unwrap();
        let bytes = |numbers: &[f64]| numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        let half: Vec<f64> = x.iter().map(|x| x / 2.0).collect();
        let mut states = Tensors::from([("w".to_string(), bytes(&half))]);
        let inputs = Tensors::from([("labels".to_string(), bytes(&t))]);
        let found = evaluate::step(&graph, &mut states, &inputs).unwrap();
        let read = |name: &str| -> Vec<f64> {
            let numbers = found[name].chunks(8);
            numbers
                .map(|b| f64::from_le_bytes(b.try_into().unwrap()))
                .collect()
        };
        let pairs = || x.iter().zip(&t);
        let mean = pairs().map(|(&x, &t)| value(x, t)).sum::<f64>() / 6.0;
        assert!((read("loss")[0] - mean).abs() < 1e-12, "{loss:?}");
        for ((&x, &t), found) in pairs().zip(read("grad.w")) {
            let expected = 2.0 * slope(x, t) / 6.0;
            assert!(
                (found - expected).abs() < 1e-12,
                "{loss:?} at {x}: {found}, {expected}"
            );
        }
    }
}
