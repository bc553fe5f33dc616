//! Attaches an optimizer to a graph that computes gradients.
//!
//! Before: `graph.gradients` names the gradient of each trained parameter. After: each parameter's new value is computed
//! from its gradient; moments and the step count are states; the options (learning rate, …) are one small input, so that
//! they may change from step to step. Without an optimizer the gradients become outputs `grad.PATH`.

use ir::graph::Output;
use ir::op::{Attr, Op};
use ir::{DType, Graph, Phase, StateKind, TensorType, Value};

/// An optimizer and the defaults of its options; these are PyTorch's.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Optimizer {
    /// Gradients are outputs.
    #[default]
    None,
    /// Stochastic gradient descent.
    Sgd,
    /// The same with a momentum buffer for each parameter.
    SgdMomentum,
    /// Adam with decoupled weight decay.
    AdamW,
}

impl Optimizer {
    /// Every optimizer.
    pub const ALL: [Optimizer; 4] = [Optimizer::None, Optimizer::Sgd, Optimizer::SgdMomentum, Optimizer::AdamW];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Optimizer::None => "none",
            Optimizer::Sgd => "sgd",
            Optimizer::SgdMomentum => "sgd-momentum",
            Optimizer::AdamW => "adamw",
        }
    }
    /// The options in the order in which the `optimizer.hyper` input holds them, with their defaults.
    pub fn options(self) -> &'static [(&'static str, f64)] {
        match self {
            Optimizer::None => &[],
            Optimizer::Sgd => &[("lr", 1e-3), ("momentum", 0.0), ("weight_decay", 0.0)],
            Optimizer::SgdMomentum => &[("lr", 1e-3), ("momentum", 0.9), ("weight_decay", 0.0)],
            Optimizer::AdamW => {
                &[("lr", 1e-3), ("beta1", 0.9), ("beta2", 0.999), ("eps", 1e-8), ("weight_decay", 1e-2)]
            }
        }
    }
}

/// The input that holds the options.
pub const HYPER: &str = "optimizer.hyper";

/// Attaches `optimizer`.
pub fn run(graph: &mut Graph, optimizer: Optimizer) -> Result<(), String> {
    let gradients = std::mem::take(&mut graph.gradients);
    if optimizer == Optimizer::None {
        for (state, gradient) in gradients {
            let name = format!("grad.{}", graph.states[state].path);
            graph.outputs.push(Output { name, value: gradient });
        }
        return Ok(());
    }
    if gradients.is_empty() {
        return Err(format!("{} cannot be attached: the graph computes no gradient", optimizer.name()));
    }
    if let Some((_, v)) = graph.values.iter().find(|(_, v)| v.name == HYPER) {
        return Err(format!("%{} is there already: the graph has an optimizer", v.name));
    }
    let n_options = optimizer.options().len() as u64;
    let hyper = graph.add_input(HYPER, TensorType::new(DType::F64, [n_options])?);
    let step = match optimizer {
        Optimizer::AdamW => Some(step_count(graph)?),
        _ => None,
    };
    for (state, gradient) in gradients {
        let path = graph.states[state].path.clone();
        let parameter = graph.states[state].before;
        let name = graph.values[parameter].name.clone();
        let module = path.rsplit_once('.').map_or("", |(module, _)| module).to_string();
        let mut inputs = vec![parameter, gradient];
        let mut changed = vec![state];
        let moments: &[&str] = match optimizer {
            Optimizer::None | Optimizer::Sgd => &[],
            Optimizer::SgdMomentum => &["momentum_buffer"],
            Optimizer::AdamW => &["exp_avg", "exp_avg_sq"],
        };
        for moment in moments {
            let ty = graph.values[parameter].ty.clone();
            changed.push(graph.states.len());
            inputs.push(graph.add_state(format!("{moment}.{name}"), format!("{moment}.{path}"), StateKind::Moment, ty));
        }
        inputs.extend(step);
        inputs.push(hyper);
        let op = match optimizer {
            Optimizer::None | Optimizer::Sgd => "sgd",
            Optimizer::SgdMomentum => "sgd_momentum",
            Optimizer::AdamW => "adamw",
        };
        let names: Vec<String> =
            changed.iter().map(|&s| format!("{}'", graph.values[graph.states[s].before].name)).collect();
        let after = graph
            .add_node(Op::new(op, [])?, &inputs, &names, Phase::Optimizer, module)
            .map_err(|e| format!("{} cannot be attached to {path}: {e}", optimizer.name()))?;
        for (state, after) in changed.into_iter().zip(after) {
            graph.states[state].after = after;
        }
    }
    Ok(())
}

/// Adds the count of steps, a state; returns its new value.
fn step_count(graph: &mut Graph) -> Result<Value, String> {
    let state = graph.states.len();
    let ty = TensorType::new(DType::I64, [])?;
    let before = graph.add_state("optimizer.step", "optimizer.step", StateKind::Moment, ty);
    let op = Op::new("add_scalar", [("value", Attr::Int(1))])?;
    let after = graph.add_node(op, &[before], &["optimizer.step'".into()], Phase::Optimizer, "")?;
    graph.states[state].after = after[0];
    Ok(after[0])
}
