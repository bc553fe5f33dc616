//! Recurrent cells: their steps one after the other, each a few nodes. So memory plans see the
//! steps, and a derivative needs no rule of its own.

use crate::{Call, Operand, Range, Ref, Result, Scalar, ensure};
use ir::DType;
use ir::op::OpKind;

/// The most steps of a sequence: each becomes nodes.
pub const STEPS: u64 = 1 << 12;

/// A recurrent cell. Weights have the rows of one gate after those of another; the positions of
/// gates say in which order.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Cell {
    /// `f(x w + h r + b)`
    Plain,
    /// GRU. The candidate comes after the two gates.
    Gated {
        /// The positions of update and reset, which are 0 and 1 in either order.
        gates: [i64; 2],
        /// The reset gate comes after the candidate's product with the state.
        linear_before_reset: bool,
    },
    /// LSTM.
    Memory {
        /// The positions of input, output, forget and candidate.
        gates: [i64; 4],
        /// The input gate is one minus the forget gate.
        coupled: bool,
    },
}

impl Cell {
    /// The number of gates, each with rows of the weights.
    pub fn gates(self) -> u64 {
        match self {
            Cell::Plain => 1,
            Cell::Gated { .. } => 3,
            Cell::Memory { .. } => 4,
        }
    }
}

/// A function of a cell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub enum Function {
    Tanh,
    Sigmoid,
    Relu,
    HardSigmoid,
}

/// What the steps of one direction of a layer share.
#[derive(Clone, PartialEq, Debug)]
pub struct Recurrence {
    /// The cell.
    pub cell: Cell,
    /// Its functions: of gates, of the candidate, and of the memory that is shown.
    pub functions: Vec<Function>,
    /// The largest size of what a function reads.
    pub clip: Option<f64>,
    /// The length of each sequence, `i64[batch, 1]`.
    pub lengths: Option<Ref>,
    /// The last step comes first.
    pub is_reversed: bool,
}

/// The weights of one direction of a layer.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct CellWeights {
    /// `[gates hidden, width]`
    pub input: Ref,
    /// `[gates hidden, hidden]`
    pub state: Ref,
    /// The biases beside both products, `[gates hidden]`.
    pub biases: Option<[Ref; 2]>,
    /// Of an LSTM's input, output and forget gate, `[3 hidden]`.
    pub peepholes: Option<Ref>,
}

/// One direction while its steps are planned.
struct Direction<'l> {
    recurrence: &'l Recurrence,
    n_steps: u64,
    batch: u64,
    hidden: u64,
    dtype: DType,
    /// `x w` with the biases that do not depend on the state, for all steps.
    given: Ref,
    state: Ref,
    /// The bias of the candidate's product with the state, if the reset gate comes after it.
    late_bias: Option<Ref>,
    peepholes: Option<Ref>,
}

impl Call<'_> {
    /// One direction of a layer over `x[steps, batch, width]`, from the states before its first
    /// step (zeros if absent): the result of each step, and the states after the last. The second
    /// state is an LSTM's memory.
    pub fn recurrence(
        &mut self,
        x: Ref,
        weights: CellWeights,
        recurrence: &Recurrence,
        before: [Option<Ref>; 2],
    ) -> Result<(Vec<Ref>, [Ref; 2])> {
        let (&[n_steps, batch, _], &[_, hidden]) =
            (&self.shape_of(x)[..], &self.shape_of(weights.state)[..])
        else {
            return Err("the operands have another number of dimensions".into());
        };
        ensure(n_steps <= STEPS, "has more than 4096 steps")?;
        let mut direction = Direction {
            recurrence,
            n_steps,
            batch,
            hidden,
            dtype: self.dtype(x),
            given: x,
            state: weights.state,
            late_bias: None,
            peepholes: weights.peepholes,
        };
        direction.start(self, x, weights)?;
        direction.run(self, before)
    }
}

/// A part of the last dimension that belongs to gates `from..to`.
fn gates(c: &mut Call<'_>, x: Ref, hidden: u64, from: i64, to: i64) -> Result<Ref> {
    let last = c.rank(x) - 1;
    let hidden = hidden as i64;
    c.slice(x, last, Range::new(from * hidden, to * hidden))
}

impl Direction<'_> {
    /// The products that do not depend on the state.
    fn start(&mut self, c: &mut Call<'_>, x: Ref, weights: CellWeights) -> Result<()> {
        let rows = (self.recurrence.cell.gates() * self.hidden) as i64;
        let mut early = None;
        if let Some([of_input, mut of_state]) = weights.biases {
            if let Cell::Gated {
                linear_before_reset: true,
                ..
            } = self.recurrence.cell
            {
                let start = rows - self.hidden as i64;
                self.late_bias = Some(c.slice(of_state, 0, Range::new(start, rows))?);
                let gates = c.slice(of_state, 0, Range::new(0, start))?;
                of_state = c.pad(gates, &[0, self.hidden as i64], Scalar::Int(0))?;
            }
            early = Some(c.step(OpKind::Add, &[], &[of_input, of_state])?);
        }
        self.given = c.linear(x, weights.input, early)?;
        Ok(())
    }

    /// All steps: the results of each, and the states after the last.
    fn run(&self, c: &mut Call<'_>, before: [Option<Ref>; 2]) -> Result<(Vec<Ref>, [Ref; 2])> {
        let zeros = c.full(Scalar::Int(0), self.dtype, &[self.batch, self.hidden])?;
        let mut state = before.map(|state| state.unwrap_or(zeros));
        let mut rows = vec![];
        let is_reversed = self.recurrence.is_reversed;
        for i in 0..self.n_steps as i64 {
            let at = if is_reversed {
                self.n_steps as i64 - 1 - i
            } else {
                i
            };
            let given = c.select(self.given, 0, at)?;
            let after = match self.recurrence.cell {
                Cell::Plain => [self.plain(c, given, state[0])?, state[1]],
                Cell::Gated {
                    gates,
                    linear_before_reset,
                } => {
                    let h = self.gated(c, given, state[0], gates, linear_before_reset)?;
                    [h, state[1]]
                }
                Cell::Memory { gates, coupled } => self.memory(c, given, state, gates, coupled)?,
            };
            // Beyond the end of a sequence the state stays, and results are zeros.
            let Some(lengths) = self.recurrence.lengths else {
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
        Ok((rows, state))
    }

    /// Function `i` of the cell.
    fn function(&self, c: &mut Call<'_>, i: usize, x: Ref) -> Result<Ref> {
        let mut x = x;
        if let Some(clip) = self.recurrence.clip {
            let (low, high) = (Scalar::Float(-clip), Scalar::Float(clip));
            x = c.clamp(x, Some(low), Some(high), self.dtype)?;
        }
        match self.recurrence.functions[i] {
            Function::Tanh => c.map(OpKind::Tanh, x),
            Function::Sigmoid => c.map(OpKind::Sigmoid, x),
            Function::Relu => c.map(OpKind::Relu, x),
            Function::HardSigmoid => c.hard_sigmoid(x, 0.2, 0.5),
        }
    }

    /// The state times the rows of the recurrence that belong to gates `from..to`.
    fn product(&self, c: &mut Call<'_>, state: Ref, from: i64, to: i64) -> Result<Ref> {
        let hidden = self.hidden as i64;
        let rows = Range::new(from * hidden, to * hidden);
        let rows = c.slice(self.state, 0, rows)?;
        c.linear(state, rows, None)
    }

    fn plain(&self, c: &mut Call<'_>, given: Ref, state: Ref) -> Result<Ref> {
        let kept = self.product(c, state, 0, 1)?;
        let sum = c.step(OpKind::Add, &[], &[given, kept])?;
        self.function(c, 0, sum)
    }

    fn gated(
        &self,
        c: &mut Call<'_>,
        given: Ref,
        state: Ref,
        [update, reset]: [i64; 2],
        is_late: bool,
    ) -> Result<Ref> {
        let hidden = self.hidden;
        let kept = self.product(c, state, 0, 2)?;
        let both = gates(c, given, hidden, 0, 2)?;
        let both = c.step(OpKind::Add, &[], &[both, kept])?;
        let z = gates(c, both, hidden, update, update + 1)?;
        let r = gates(c, both, hidden, reset, reset + 1)?;
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
        c.lerp(candidate, state, Operand::Tensor(z), self.dtype)
    }

    /// The states are the result and the memory.
    fn memory(
        &self,
        c: &mut Call<'_>,
        given: Ref,
        [state, memory]: [Ref; 2],
        [at_input, at_output, at_forget, at_candidate]: [i64; 4],
        is_coupled: bool,
    ) -> Result<[Ref; 2]> {
        let hidden = self.hidden;
        let kept = self.product(c, state, 0, 4)?;
        let all = c.step(OpKind::Add, &[], &[given, kept])?;
        // Peepholes have the order input, output, forget.
        let gate = |c: &mut Call<'_>, at: i64, hole: Option<(i64, Ref)>| {
            let x = gates(c, all, hidden, at, at + 1)?;
            match (hole, self.peepholes) {
                (Some((hole, memory)), Some(peepholes)) => {
                    let peephole = gates(c, peepholes, hidden, hole, hole + 1)?;
                    let seen = c.step(OpKind::Mul, &[], &[memory, peephole])?;
                    c.step(OpKind::Add, &[], &[x, seen])
                }
                _ => Ok(x),
            }
        };
        let forget = gate(c, at_forget, Some((2, memory)))?;
        let forget = self.function(c, 0, forget)?;
        let input = if is_coupled {
            c.scalar_step(OpKind::RsubScalar, forget, Scalar::Int(1))?
        } else {
            let input = gate(c, at_input, Some((0, memory)))?;
            self.function(c, 0, input)?
        };
        let candidate = gate(c, at_candidate, None)?;
        let candidate = self.function(c, 1, candidate)?;
        let old = c.step(OpKind::Mul, &[], &[forget, memory])?;
        let new = c.step(OpKind::Mul, &[], &[input, candidate])?;
        let memory = c.step(OpKind::Add, &[], &[old, new])?;
        let output = gate(c, at_output, Some((1, memory)))?;
        let output = self.function(c, 0, output)?;
        let shown = self.function(c, 2, memory)?;
        let state = c.step(OpKind::Mul, &[], &[output, shown])?;
        Ok([state, memory])
    }
}
