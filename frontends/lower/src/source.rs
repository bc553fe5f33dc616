//! Tensors without operands, constant or random.

use crate::{Call, Ref, Result, Scalar, attr_ints, ensure};
use ir::op::OpKind;
use ir::{Attr, DType};

impl Call<'_> {
    /// `start + i step` for each `i` below `n`.
    pub fn arange(&mut self, dtype: DType, n: u64, start: Scalar, step: Scalar) -> Result<Ref> {
        let attrs = [
            ("dtype", Attr::Type(dtype)),
            ("shape", attr_ints(&[n])?),
            ("start", start.attr(dtype)?),
            ("step", step.attr(dtype)?),
        ];
        self.step(OpKind::Arange, &attrs, &[])
    }

    /// The numbers from `start` up to, but excluding, `end`.
    pub fn arange_to(
        &mut self,
        dtype: DType,
        start: Scalar,
        end: Scalar,
        step: Scalar,
    ) -> Result<Ref> {
        let n = match (start, end, step) {
            (Scalar::Int(start), Scalar::Int(end), Scalar::Int(step)) if step != 0 => {
                let (span, step) = (i128::from(end) - i128::from(start), i128::from(step));
                (span / step + i128::from(span % step != 0)) as f64
            }
            _ => ((end.float() - start.float()) / step.float()).ceil(),
        };
        ensure(
            (0.0..9e15).contains(&n),
            "the bounds and the step do not fit together",
        )?;
        self.arange(dtype, n as u64, start, step)
    }

    /// A mask of a matrix: `op` compares the column minus the row with `diagonal`. It is a triangle
    /// or a diagonal.
    pub fn diagonals(&mut self, op: OpKind, rows: u64, columns: u64, diagonal: i64) -> Result<Ref> {
        let one = Scalar::Int(1);
        // Element (r, c) is on diagonal c - r.
        let row = self.arange(DType::I64, rows, Scalar::Int(diagonal), one)?;
        let row = self.reshape(row, &[rows, 1])?;
        let column = self.arange(DType::I64, columns, Scalar::Int(0), one)?;
        let operands = if op == OpKind::Eq {
            [row, column]
        } else {
            [column, row]
        };
        self.step(op, &[], &operands)
    }

    /// Numbers of a distribution: `low + span x`, with `x` from `rand` or `randn`.
    pub fn random_between(
        &mut self,
        op: OpKind,
        dtype: DType,
        shape: &[u64],
        (low, span): (f64, f64),
    ) -> Result<Ref> {
        let x = self.random(op, dtype, shape)?;
        let x = self.scalar_step(OpKind::MulScalar, x, Scalar::Float(span))?;
        self.scalar_step(OpKind::AddScalar, x, Scalar::Float(low))
    }

    /// Exponentially distributed numbers.
    pub fn exponential(&mut self, dtype: DType, shape: &[u64], lambda: f64) -> Result<Ref> {
        let x = self.random(OpKind::Rand, dtype, shape)?;
        let x = self.scalar_step(OpKind::RsubScalar, x, Scalar::Float(1.0))?;
        let x = self.map(OpKind::Log, x)?;
        self.scalar_step(OpKind::DivScalar, x, Scalar::Float(-lambda))
    }

    /// Random integers from `low` up to, but excluding, `high`.
    pub fn random_integers(
        &mut self,
        dtype: DType,
        shape: &[u64],
        low: i64,
        high: i64,
    ) -> Result<Ref> {
        ensure(
            low < high && high.saturating_sub(low) < 1 << 50,
            "the range is empty or too large",
        )?;
        // In f64 no product rounds up to the excluded bound.
        let x = self.random(OpKind::Rand, DType::F64, shape)?;
        let x = self.scalar_step(OpKind::MulScalar, x, Scalar::Float((high - low) as f64))?;
        let x = self.cast(x, DType::I64)?;
        let x = self.scalar_step(OpKind::AddScalar, x, Scalar::Int(low))?;
        self.cast(x, dtype)
    }
}
