//! Recurrent cells: their steps one after the other, each a few nodes. So memory plans see the
//! steps, and a derivative needs no rule of its own.

use super::inputs::{Inputs, Row, flag, op};
use ir::DType;
use ir::op::OpKind;
use lower::{Call, Error, Operand, Range, Ref, Result, Results, Scalar, ensure, one};

pub(super) const OPS: &[Row] = &[
    op("RNN", |c, x| recurrent(c, x, Cell::Plain)),
    op("GRU", |c, x| {
        let linear_before_reset = flag(c, "linear_before_reset", false)?;
        recurrent(
            c,
            x,
            Cell::Gated {
                linear_before_reset,
            },
        )
    }),
    op("LSTM", |c, x| {
        let coupled = flag(c, "input_forget", false)?;
        recurrent(c, x, Cell::Memory { coupled })
    }),
    op("LinearAttention", linear_attention),
    op("CausalConvWithState", causal_convolution),
];

/// The most steps of a sequence: each becomes nodes.
const STEPS: u64 = 1 << 12;

#[derive(Clone, Copy, PartialEq)]
enum Cell {
    Plain,
    /// With the reset gate after the product with the state if `linear_before_reset`.
    Gated {
        linear_before_reset: bool,
    },
    /// Where the input gate is one minus the forget gate if `coupled`.
    Memory {
        coupled: bool,
    },
}

impl Cell {
    /// The number of gates, each with rows of the weights.
    fn gates(self) -> u64 {
        match self {
            Cell::Plain => 1,
            Cell::Gated { .. } => 3,
            Cell::Memory { .. } => 4,
        }
    }
    /// The names of its functions, unless an attribute names others.
    fn functions(self) -> &'static [&'static str] {
        match self {
            Cell::Plain => &["Tanh"],
            Cell::Gated { .. } => &["Sigmoid", "Tanh"],
            Cell::Memory { .. } => &["Sigmoid", "Tanh", "Tanh"],
        }
    }
}

/// What all directions share.
struct Layer {
    cell: Cell,
    /// The functions of all directions.
    functions: Vec<String>,
    clip: Option<f64>,
    /// The length of each sequence, `i64[batch, 1]`.
    lengths: Option<Ref>,
    n_steps: u64,
    batch: u64,
    hidden: u64,
    dtype: DType,
}

/// The weights of one direction, and the state before its first step.
struct Direction<'l> {
    layer: &'l Layer,
    functions: &'l [String],
    /// `x w` with the biases that do not depend on the state, for all steps.
    given: Ref,
    recurrence: Ref,
    /// The bias of the candidate's product with the state, if the reset gate comes after it.
    late_bias: Option<Ref>,
    peepholes: Option<Ref>,
}

fn recurrent(c: &mut Call<'_>, inputs: &Inputs<'_>, cell: Cell) -> Result<Results> {
    let by_batch = flag(c, "layout", false)?;
    c.ignore(&["hidden_size"]);
    let direction = c.string_or("direction", "forward")?;
    let (n_directions, mut is_reversed) = match direction.as_str() {
        "forward" => (1, vec![false]),
        "reverse" => (1, vec![true]),
        "bidirectional" => (2, vec![false, true]),
        other => return Err(format!("no direction {other}").into()),
    };
    let mut x = inputs.at(c, 0)?;
    if by_batch {
        x = c.permute(x, &[1, 0, 2])?;
    }
    let (w, r) = (inputs.at(c, 1)?, inputs.at(c, 2)?);
    let (&[n_steps, batch, _], &[n, _, hidden]) = (&c.shape_of(x)[..], &c.shape_of(r)[..]) else {
        return Err("the operands do not have three dimensions".into());
    };
    ensure(n == n_directions, "the weights have other directions")?;
    ensure(n_steps <= STEPS, "has more than 4096 steps")?;
    let clip = c.opt_scalar("clip")?.map(Scalar::float);
    let mut functions = c.texts_or("activations", cell.functions())?;
    if functions.len() == cell.functions().len() {
        functions = [&functions[..]].repeat(n_directions as usize).concat();
    }
    let n_functions = cell.functions().len() * n_directions as usize;
    ensure(
        functions.len() == n_functions,
        "has another number of activations",
    )?;
    let lengths = match inputs.opt(c, 4)? {
        Some(lengths) => {
            let lengths = c.cast(lengths, DType::I64)?;
            Some(c.reshape(lengths, &[batch, 1])?)
        }
        None => None,
    };
    let dtype = c.dtype(x);
    let layer = Layer {
        cell,
        functions,
        clip,
        lengths,
        n_steps,
        batch,
        hidden,
        dtype,
    };
    let bias = inputs.opt(c, 3)?;
    let is_memory = matches!(cell, Cell::Memory { .. });
    let (memory, peepholes) = match is_memory {
        true => (inputs.opt(c, 6)?, inputs.opt(c, 7)?),
        false => (None, None),
    };
    let states = [inputs.opt(c, 5)?, memory];
    let (mut rows, mut last) = (vec![], [vec![], vec![]]);
    for (i, is_reversed) in is_reversed.drain(..).enumerate() {
        let part = |c: &mut Call<'_>, x: Option<Ref>| match x {
            Some(x) => c.select(x, 0, i as i64).map(Some),
            None => Ok(None),
        };
        let weights = [c.select(w, 0, i as i64)?, c.select(r, 0, i as i64)?];
        let (bias, peepholes) = (part(c, bias)?, part(c, peepholes)?);
        let direction = layer.direction(c, x, weights, [bias, peepholes], i)?;
        let mut before = [None, None];
        for (before, state) in before.iter_mut().zip(states) {
            *before = match state {
                Some(state) if by_batch => Some(c.select(state, 1, i as i64)?),
                state => part(c, state)?,
            };
        }
        let (row, after) = direction.run(c, before, is_reversed)?;
        rows.push(row);
        for (last, after) in last.iter_mut().zip(after) {
            last.push(after);
        }
    }
    let side = usize::from(by_batch);
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

impl Layer {
    fn direction<'l>(
        &'l self,
        c: &mut Call<'_>,
        x: Ref,
        [w, recurrence]: [Ref; 2],
        [bias, peepholes]: [Option<Ref>; 2],
        i: usize,
    ) -> Result<Direction<'l>> {
        let rows = (self.cell.gates() * self.hidden) as i64;
        let (mut early, mut late_bias) = (None, None);
        if let Some(bias) = bias {
            let of_input = c.slice(bias, 0, Range::new(0, rows))?;
            let mut of_state = c.slice(bias, 0, Range::new(rows, 2 * rows))?;
            let late = Cell::Gated {
                linear_before_reset: true,
            };
            if self.cell == late {
                let start = rows - self.hidden as i64;
                late_bias = Some(c.slice(of_state, 0, Range::new(start, rows))?);
                let gates = c.slice(of_state, 0, Range::new(0, start))?;
                of_state = c.pad(gates, &[0, self.hidden as i64], Scalar::Int(0))?;
            }
            early = Some(c.step(OpKind::Add, &[], &[of_input, of_state])?);
        }
        let n = self.functions.len() / self.cell.functions().len().max(1);
        let n = self.functions.len() / n.max(1);
        Ok(Direction {
            layer: self,
            functions: &self.functions[i * n..(i + 1) * n],
            given: c.linear(x, w, early)?,
            recurrence,
            late_bias,
            peepholes,
        })
    }

    /// A number of rows of the state's size.
    fn zeros(&self, c: &mut Call<'_>) -> Result<Ref> {
        c.full(Scalar::Int(0), self.dtype, &[self.batch, self.hidden])
    }
}

/// A part of the last dimension that belongs to gates `from..to`.
fn gates(c: &mut Call<'_>, x: Ref, hidden: u64, from: i64, to: i64) -> Result<Ref> {
    let last = c.rank(x) - 1;
    let hidden = hidden as i64;
    c.slice(x, last, Range::new(from * hidden, to * hidden))
}

impl Direction<'_> {
    /// All steps: the results of each, and the states after the last.
    fn run(
        &self,
        c: &mut Call<'_>,
        before: [Option<Ref>; 2],
        is_reversed: bool,
    ) -> Result<(Ref, [Ref; 2])> {
        let layer = self.layer;
        let zeros = layer.zeros(c)?;
        let mut state = before.map(|state| state.unwrap_or(zeros));
        let mut rows = vec![];
        for i in 0..layer.n_steps as i64 {
            let at = if is_reversed {
                layer.n_steps as i64 - 1 - i
            } else {
                i
            };
            let given = c.select(self.given, 0, at)?;
            let after = match layer.cell {
                Cell::Plain => [self.plain(c, given, state[0])?, state[1]],
                Cell::Gated {
                    linear_before_reset,
                } => {
                    let h = self.gated(c, given, state[0], linear_before_reset)?;
                    [h, state[1]]
                }
                Cell::Memory { coupled } => self.memory(c, given, state, coupled)?,
            };
            // Beyond the end of a sequence the state stays, and results are zeros.
            let Some(lengths) = layer.lengths else {
                state = after;
                rows.push(state[0]);
                continue;
            };
            let goes_on = c.scalar_step(OpKind::GtScalar, lengths, Scalar::Int(at))?;
            rows.push(c.step(OpKind::Where, &[], &[goes_on, after[0], zeros])?);
            for (state, after) in state.iter_mut().zip(after) {
                *state = c.step(OpKind::Where, &[], &[goes_on, after, *state])?;
            }
        }
        if is_reversed {
            rows.reverse();
        }
        ensure(!rows.is_empty(), "has no steps")?;
        Ok((c.stack(rows, 0, layer.dtype)?, state))
    }

    /// Function `i` of the cell.
    fn function(&self, c: &mut Call<'_>, i: usize, x: Ref) -> Result<Ref> {
        let mut x = x;
        if let Some(clip) = self.layer.clip {
            let (low, high) = (Scalar::Float(-clip), Scalar::Float(clip));
            x = c.clamp(x, Some(low), Some(high), self.layer.dtype)?;
        }
        match self.functions[i].to_ascii_lowercase().as_str() {
            "tanh" => c.map(OpKind::Tanh, x),
            "sigmoid" => c.map(OpKind::Sigmoid, x),
            "relu" => c.map(OpKind::Relu, x),
            "hardsigmoid" => super::unary::hard_sigmoid(c, x, 0.2, 0.5),
            other => Err(Error::from(format!("no activation {other}"))),
        }
    }

    /// The state times the rows of the recurrence that belong to gates `from..to`.
    fn product(&self, c: &mut Call<'_>, state: Ref, from: i64, to: i64) -> Result<Ref> {
        let hidden = self.layer.hidden as i64;
        let rows = Range::new(from * hidden, to * hidden);
        let rows = c.slice(self.recurrence, 0, rows)?;
        c.linear(state, rows, None)
    }

    /// `f(x w + h r + b)`
    fn plain(&self, c: &mut Call<'_>, given: Ref, state: Ref) -> Result<Ref> {
        let kept = self.product(c, state, 0, 1)?;
        let sum = c.step(OpKind::Add, &[], &[given, kept])?;
        self.function(c, 0, sum)
    }

    /// Gates z (update), r (reset) and h (candidate).
    fn gated(&self, c: &mut Call<'_>, given: Ref, state: Ref, is_late: bool) -> Result<Ref> {
        let hidden = self.layer.hidden;
        let kept = self.product(c, state, 0, 2)?;
        let both = gates(c, given, hidden, 0, 2)?;
        let both = c.step(OpKind::Add, &[], &[both, kept])?;
        let (z, r) = (gates(c, both, hidden, 0, 1)?, gates(c, both, hidden, 1, 2)?);
        let (z, r) = (self.function(c, 0, z)?, self.function(c, 0, r)?);
        let kept = if is_late {
            let mut kept = self.product(c, state, 2, 3)?;
            if let Some(bias) = self.late_bias {
                kept = c.step(OpKind::Add, &[], &[kept, bias])?;
            }
            c.step(OpKind::Mul, &[], &[r, kept])?
        } else {
            let state = c.step(OpKind::Mul, &[], &[r, state])?;
            self.product(c, state, 2, 3)?
        };
        let candidate = gates(c, given, hidden, 2, 3)?;
        let candidate = c.step(OpKind::Add, &[], &[candidate, kept])?;
        let candidate = self.function(c, 1, candidate)?;
        // (1 - z) candidate + z state
        c.lerp(candidate, state, Operand::Tensor(z), self.layer.dtype)
    }

    /// Gates i (input), o (output), f (forget) and c (candidate); the states are the result and
    /// the memory.
    fn memory(
        &self,
        c: &mut Call<'_>,
        given: Ref,
        [state, memory]: [Ref; 2],
        is_coupled: bool,
    ) -> Result<[Ref; 2]> {
        let hidden = self.layer.hidden;
        let kept = self.product(c, state, 0, 4)?;
        let all = c.step(OpKind::Add, &[], &[given, kept])?;
        let gate = |c: &mut Call<'_>, i: i64, hole: Option<(i64, Ref)>| {
            let x = gates(c, all, hidden, i, i + 1)?;
            match (hole, self.peepholes) {
                (Some((hole, memory)), Some(peepholes)) => {
                    let peephole = gates(c, peepholes, hidden, hole, hole + 1)?;
                    let seen = c.step(OpKind::Mul, &[], &[memory, peephole])?;
                    c.step(OpKind::Add, &[], &[x, seen])
                }
                _ => Ok(x),
            }
        };
        let forget = gate(c, 2, Some((2, memory)))?;
        let forget = self.function(c, 0, forget)?;
        let input = if is_coupled {
            c.scalar_step(OpKind::RsubScalar, forget, Scalar::Int(1))?
        } else {
            let input = gate(c, 0, Some((0, memory)))?;
            self.function(c, 0, input)?
        };
        let candidate = gate(c, 3, None)?;
        let candidate = self.function(c, 1, candidate)?;
        let old = c.step(OpKind::Mul, &[], &[forget, memory])?;
        let new = c.step(OpKind::Mul, &[], &[input, candidate])?;
        let memory = c.step(OpKind::Add, &[], &[old, new])?;
        let output = gate(c, 1, Some((1, memory)))?;
        let output = self.function(c, 0, output)?;
        let shown = self.shown(c, memory)?;
        let state = c.step(OpKind::Mul, &[], &[output, shown])?;
        Ok([state, memory])
    }

    /// The last function, which is not clipped.
    fn shown(&self, c: &mut Call<'_>, memory: Ref) -> Result<Ref> {
        self.function(c, 2, memory)
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
    let attrs = super::window::attrs(&[1], &[1], &[0], channels as i64);
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
