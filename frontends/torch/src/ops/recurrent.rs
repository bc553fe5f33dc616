//! Recurrent layers, of which each step becomes nodes.

use super::Family;
use ir::Attr;
use ir::op::OpKind;
use lower::{Call, Cell, CellWeights, Function, Recurrence, Ref, Result, Results, ensure};

pub(super) const OPS: Family = &[
    ("gru.input", |c| {
        let cell = Cell::Gated {
            gates: [1, 0],
            linear_before_reset: true,
        };
        layers(c, cell, &[Function::Sigmoid, Function::Tanh])
    }),
    ("lstm.input", |c| {
        let cell = Cell::Memory {
            gates: [0, 3, 1, 2],
            coupled: false,
        };
        layers(
            c,
            cell,
            &[Function::Sigmoid, Function::Tanh, Function::Tanh],
        )
    }),
    ("rnn_relu.input", |c| {
        layers(c, Cell::Plain, &[Function::Relu])
    }),
    ("rnn_tanh.input", |c| {
        layers(c, Cell::Plain, &[Function::Tanh])
    }),
];

/// Layers one on another, each in one or two directions. The results are those of the last layer,
/// and the states after the last step of all layers.
fn layers(c: &mut Call<'_>, cell: Cell, functions: &[Function]) -> Result<Results> {
    let mut x = c.tensor("input")?;
    let states = match cell {
        Cell::Memory { .. } => c.tensors("hx")?,
        _ => vec![c.tensor("hx")?],
    };
    let params = c.tensors("params")?;
    let has_biases = c.bool_or("has_biases", true)?;
    let n_layers = usize::try_from(c.int("num_layers")?).map_err(|_| "has no layers")?;
    let n_directions = 1 + usize::from(c.bool_or("bidirectional", false)?);
    let by_batch = c.bool_or("batch_first", false)?;
    let (train, p) = (c.bool_or("train", false)?, c.float_or("dropout", 0.0)?);
    let n_each = if has_biases { 4 } else { 2 };
    ensure(
        n_layers > 0 && n_layers.checked_mul(n_directions * n_each) == Some(params.len()),
        "projects its states",
    )?;
    let dtype = c.dtype(x);
    if by_batch {
        x = c.permute(x, &[1, 0, 2])?;
    }
    let mut last = [vec![], vec![]];
    for (layer, params) in params.chunks(n_directions * n_each).enumerate() {
        if layer > 0 && train && p > 0.0 {
            let attrs = [("p", Attr::Float(p)), ("stream", c.stream())];
            x = c.steps(OpKind::Dropout, &attrs, &[x, Ref::Rng])?[0];
        }
        let mut sides = vec![];
        for (direction, params) in params.chunks(n_each).enumerate() {
            let weights = CellWeights {
                input: params[0],
                state: params[1],
                biases: has_biases.then(|| [params[2], params[3]]),
                peepholes: None,
            };
            let recurrence = Recurrence {
                cell,
                functions: functions.to_vec(),
                clip: None,
                lengths: None,
                is_reversed: direction == 1,
            };
            let mut before = [None, None];
            for (before, &state) in before.iter_mut().zip(&states) {
                let at = (layer * n_directions + direction) as i64;
                *before = Some(c.select(state, 0, at)?);
            }
            let (steps, after) = c.recurrence(x, weights, &recurrence, before)?;
            sides.push(c.stack(steps, 0, dtype)?);
            for (last, after) in last.iter_mut().zip(after) {
                last.push(after);
            }
        }
        x = c.cat(&sides, 2)?;
    }
    if by_batch {
        x = c.permute(x, &[1, 0, 2])?;
    }
    let mut results = vec![x];
    for (i, last) in last.into_iter().take(states.len()).enumerate() {
        let state = c.stack(last, 0, dtype)?;
        // While torch.export traces an LSTM, its states have one dimension more.
        let shape = c.wanted(i + 1).map(|ty| ty.shape().to_vec());
        results.push(match shape {
            Some(shape) => c.reshape(state, &shape)?,
            None => state,
        });
    }
    lower::all(results)
}
