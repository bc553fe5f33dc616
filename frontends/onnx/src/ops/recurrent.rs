//! Recurrent layers, and attention and convolutions with a state.

use super::inputs::{Inputs, Row, flag, op};
use ir::DType;
use ir::op::OpKind;
use lower::{
    Call, Cell, CellWeights, Error, Function, Range, Recurrence, Ref, Result, Results, STEPS,
    Scalar, ensure, one,
};

pub(super) const OPS: &[Row] = &[
    op("RNN", |c, x| recurrent(c, x, Cell::Plain)),
    op("GRU", |c, x| {
        let linear_before_reset = flag(c, "linear_before_reset", false)?;
        let cell = Cell::Gated {
            gates: [0, 1],
            linear_before_reset,
        };
        recurrent(c, x, cell)
    }),
    op("LSTM", |c, x| {
        let coupled = flag(c, "input_forget", false)?;
        let cell = Cell::Memory {
            gates: [0, 1, 2, 3],
            coupled,
        };
        recurrent(c, x, cell)
    }),
    op("LinearAttention", linear_attention),
    op("CausalConvWithState", causal_convolution),
];

/// The names of a cell's functions, unless an attribute names others.
fn usual_functions(cell: Cell) -> &'static [&'static str] {
    match cell {
        Cell::Plain => &["Tanh"],
        Cell::Gated { .. } => &["Sigmoid", "Tanh"],
        Cell::Memory { .. } => &["Sigmoid", "Tanh", "Tanh"],
    }
}

fn function(name: &str) -> Result<Function> {
    match name.to_ascii_lowercase().as_str() {
        "tanh" => Ok(Function::Tanh),
        "sigmoid" => Ok(Function::Sigmoid),
        "relu" => Ok(Function::Relu),
        "hardsigmoid" => Ok(Function::HardSigmoid),
        other => Err(Error::from(format!("no activation {other}"))),
    }
}

/// The functions of each direction.
fn functions(c: &mut Call<'_>, cell: Cell, n_directions: usize) -> Result<Vec<Vec<Function>>> {
    let usual = usual_functions(cell);
    let mut names = c.texts_or("activations", usual)?;
    if names.len() == usual.len() {
        names = [&names[..]].repeat(n_directions).concat();
    }
    ensure(
        names.len() == usual.len() * n_directions,
        "has another number of activations",
    )?;
    let of_direction = |names: &[String]| {
        names
            .iter()
            .map(|name| function(name))
            .collect::<Result<_>>()
    };
    names.chunks(usual.len()).map(of_direction).collect()
}

fn recurrent(c: &mut Call<'_>, inputs: &Inputs<'_>, cell: Cell) -> Result<Results> {
    let by_batch = flag(c, "layout", false)?;
    c.ignore(&["hidden_size"]);
    let direction = c.string_or("direction", "forward")?;
    let reversed: &[bool] = match direction.as_str() {
        "forward" => &[false],
        "reverse" => &[true],
        "bidirectional" => &[false, true],
        other => return Err(format!("no direction {other}").into()),
    };
    let mut x = inputs.at(c, 0)?;
    if by_batch {
        x = c.permute(x, &[1, 0, 2])?;
    }
    let (w, r) = (inputs.at(c, 1)?, inputs.at(c, 2)?);
    let (&[_, batch, _], &[n, _, hidden]) = (&c.shape_of(x)[..], &c.shape_of(r)[..]) else {
        return Err("the operands do not have three dimensions".into());
    };
    ensure(
        n == reversed.len() as u64,
        "the weights have other directions",
    )?;
    let clip = c.opt_scalar("clip")?.map(Scalar::float);
    let functions = functions(c, cell, reversed.len())?;
    let lengths = match inputs.opt(c, 4)? {
        Some(lengths) => {
            let lengths = c.cast(lengths, DType::I64)?;
            Some(c.reshape(lengths, &[batch, 1])?)
        }
        None => None,
    };
    let bias = inputs.opt(c, 3)?;
    let is_memory = matches!(cell, Cell::Memory { .. });
    let (memory, peepholes) = match is_memory {
        true => (inputs.opt(c, 6)?, inputs.opt(c, 7)?),
        false => (None, None),
    };
    let states = [inputs.opt(c, 5)?, memory];
    let (mut rows, mut last) = (vec![], [vec![], vec![]]);
    for (i, (functions, &is_reversed)) in functions.into_iter().zip(reversed).enumerate() {
        let at = i as i64;
        let mut weights = CellWeights {
            input: c.select(w, 0, at)?,
            state: c.select(r, 0, at)?,
            biases: None,
            peepholes: part(c, peepholes, at)?,
        };
        if let Some(bias) = part(c, bias, at)? {
            let n = (cell.gates() * hidden) as i64;
            let of_input = c.slice(bias, 0, Range::new(0, n))?;
            weights.biases = Some([of_input, c.slice(bias, 0, Range::new(n, 2 * n))?]);
        }
        let mut before = [None, None];
        for (before, state) in before.iter_mut().zip(states) {
            *before = match state {
                Some(state) if by_batch => Some(c.select(state, 1, at)?),
                state => part(c, state, at)?,
            };
        }
        let recurrence = Recurrence {
            cell,
            functions,
            clip,
            lengths,
            is_reversed,
        };
        let (steps, after) = c.recurrence(x, weights, &recurrence, before)?;
        let dtype = c.dtype(x);
        rows.push(c.stack(steps, 0, dtype)?);
        for (last, after) in last.iter_mut().zip(after) {
            last.push(after);
        }
    }
    let (side, dtype) = (usize::from(by_batch), c.dtype(x));
    let y = c.stack(rows, 1, dtype)?;
    let y = if by_batch {
        c.permute(y, &[2, 0, 1, 3])?
    } else {
        y
    };
    let mut results = vec![y];
    for last in last.into_iter().take(1 + usize::from(is_memory)) {
        results.push(c.stack(last, side, dtype)?);
    }
    lower::all(results)
}

/// The part of an operand that belongs to one direction.
fn part(c: &mut Call<'_>, x: Option<Ref>, at: i64) -> Result<Option<Ref>> {
    match x {
        Some(x) => c.select(x, 0, at).map(Some),
        None => Ok(None),
    }
}

// --- attention with a state instead of scores ---

/// A linear attention's heads.
struct Heads {
    batch: u64,
    steps: u64,
    /// The heads of keys and values; each has several of queries.
    heads: u64,
    queries: u64,
}

impl Heads {
    /// `x[batch, steps, heads * size]` of step `i` as `[batch * heads, ..size]`.
    fn step(&self, c: &mut Call<'_>, x: Ref, i: u64, size: [u64; 2]) -> Result<Ref> {
        let at = c.select(x, 1, i as i64)?;
        c.reshape(at, &[self.batch * self.heads, size[0], size[1]])
    }
}

/// A state `[key, value]` for each head, which each step scales by `exp(decay)`, writes to and
/// reads from. With `beta`, it writes what the state does not give for the key so far.
fn linear_attention(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    c.ignore(&["chunk_size"]);
    let rule = c.string_or("update_rule", "gated_delta")?;
    let (n_queries, n_heads) = (c.int("q_num_heads")?, c.int("kv_num_heads")?);
    let scale = c.float_or("scale", 0.0)?;
    let queries = inputs.at(c, 0)?;
    let (keys, values) = (inputs.at(c, 1)?, inputs.at(c, 2)?);
    let shapes = [c.shape_of(queries), c.shape_of(keys), c.shape_of(values)];
    let (&[batch, steps, _], &[_, _, key], &[_, _, value]) =
        (&shapes[0][..], &shapes[1][..], &shapes[2][..])
    else {
        return Err("the operands do not have three dimensions".into());
    };
    let fits = n_heads > 0 && n_queries > 0 && n_queries % n_heads == 0;
    ensure(fits, "the numbers of heads do not fit together")?;
    ensure(
        (1..=STEPS).contains(&steps),
        "has no step, or more than 4096",
    )?;
    let (n_queries, n_heads) = (n_queries as u64, n_heads as u64);
    let (key, value) = (key / n_heads, value / n_heads);
    let heads = Heads {
        batch,
        steps,
        heads: n_heads,
        queries: n_queries / n_heads,
    };
    let (decay, beta) = match rule.as_str() {
        "linear" => (None, None),
        "gated" => (Some(inputs.at(c, 4)?), None),
        "delta" => (None, Some(inputs.at(c, 5)?)),
        "gated_delta" => (Some(inputs.at(c, 4)?), Some(inputs.at(c, 5)?)),
        other => return Err(format!("no rule {other}").into()),
    };
    let wide = |c: &mut Call<'_>, x: Ref| match c.dtype(x) {
        DType::F64 => Ok(x),
        _ => c.cast(x, DType::F32),
    };
    let dtype = c.dtype(queries);
    let past = inputs.opt(c, 3)?;
    let state_dtype = past.map_or(dtype, |past| c.dtype(past));
    let queries = wide(c, queries)?;
    let (keys, values) = (wide(c, keys)?, wide(c, values)?);
    let flat = [batch * n_heads, key, value];
    let mut state = match past {
        Some(past) => {
            let past = c.reshape(past, &flat)?;
            wide(c, past)?
        }
        None => c.full(Scalar::Int(0), c.dtype(queries), &flat)?,
    };
    let decay = match decay {
        Some(decay) => {
            let decay = wide(c, decay)?;
            Some(c.map(OpKind::Exp, decay)?)
        }
        None => None,
    };
    let beta = match beta {
        Some(beta) => {
            let beta = wide(c, beta)?;
            Some(c.expand(beta, &[batch, steps, n_heads])?)
        }
        None => None,
    };
    let scale = if scale == 0.0 {
        (key as f64).sqrt().recip()
    } else {
        scale
    };
    let queries = c.scalar_step(OpKind::MulScalar, queries, Scalar::Float(scale))?;
    let mut rows = vec![];
    for i in 0..heads.steps {
        if let Some(decay) = decay {
            let per_key = c.shape_of(decay)[2] / n_heads;
            let decay = heads.step(c, decay, i, [per_key, 1])?;
            state = c.step(OpKind::Mul, &[], &[state, decay])?;
        }
        let key_now = heads.step(c, keys, i, [key, 1])?;
        let mut value_now = heads.step(c, values, i, [1, value])?;
        if let Some(beta) = beta {
            let sides = lower::transposed(true, false);
            let known = c.step(OpKind::Matmul, &sides, &[key_now, state])?;
            let new = c.step(OpKind::Sub, &[], &[value_now, known])?;
            let beta = heads.step(c, beta, i, [1, 1])?;
            value_now = c.step(OpKind::Mul, &[], &[beta, new])?;
        }
        let written = c.product(key_now, value_now)?;
        state = c.step(OpKind::Add, &[], &[state, written])?;
        let query = heads.step(c, queries, i, [heads.queries, key])?;
        let read = c.product(query, state)?;
        rows.push(c.reshape(read, &[batch, n_queries * value])?);
    }
    let y = c.stack(rows, 1, dtype)?;
    let state = c.reshape(state, &[batch, n_heads, key, value])?;
    lower::all(vec![y, c.cast(state, state_dtype)?])
}

/// A convolution along a sequence for each channel, which sees what came before; its last elements
/// are the state.
fn causal_convolution(c: &mut Call<'_>, inputs: &Inputs<'_>) -> Result<Results> {
    let activation = c.string_or("activation", "none")?;
    let (x, w) = (inputs.at(c, 0)?, inputs.at(c, 1)?);
    let (&[batch, channels, _], &[_, _, n]) = (&c.shape_of(x)[..], &c.shape_of(w)[..]) else {
        return Err("the operands do not have three dimensions".into());
    };
    ensure(n > 0, "a window has no size")?;
    let past = match inputs.opt(c, 3)? {
        Some(past) => past,
        None => c.full(Scalar::Int(0), c.dtype(x), &[batch, channels, n - 1])?,
    };
    let whole = c.cat(&[past, x], 2)?;
    let attrs = lower::convolution_attrs(&[1], &[1], &[0], channels as i64);
    let bias = inputs.opt(c, 2)?;
    let operands: Vec<Ref> = [whole, w].into_iter().chain(bias).collect();
    let mut y = c.step(OpKind::Convolution, &attrs, &operands)?;
    match activation.as_str() {
        "none" => (),
        "silu" | "swish" => y = c.map(OpKind::Silu, y)?,
        other => return Err(format!("no activation {other}").into()),
    }
    if !inputs.wants(1) {
        return one(y);
    }
    let size = c.shape_of(whole)[2] as i64;
    let state = c.slice(whole, 2, Range::new(size - n as i64 + 1, size))?;
    lower::all(vec![y, state])
}
