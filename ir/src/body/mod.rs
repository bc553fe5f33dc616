//! What one kernel computes: ops in a line over the kernel's operands, whose intermediate values
//! have no bytes of their own. A [`Body`] is the attribute of the op `fused`.
//!
//! Values are numbered: the operands, then every step's results in order. A step uses values of
//! lower numbers alone.

mod space;

use crate::op::{Access, Op, Work};
use crate::types::TensorType;
pub use space::{Along, Axes, Space};

/// A line of ops. Invariant: each step uses values before it, and its op may stand in a body.
#[derive(Clone, PartialEq, Debug)]
pub struct Body {
    operands: usize,
    steps: Vec<Step>,
    results: Vec<usize>,
    inplace: Vec<(usize, usize)>,
}

/// One op of a body.
#[derive(Clone, PartialEq, Debug)]
pub struct Step {
    /// The op.
    pub op: Op,
    /// Numbers of its operands.
    pub inputs: Vec<usize>,
    /// How many results it has.
    pub outputs: usize,
}

/// The most results of a kernel.
pub const MOST_RESULTS: usize = 62;

impl Body {
    /// A body over so many operands. An error says which step is none: one that uses what comes
    /// later, an op that may not be part of a kernel, a result that no step computes or that stands
    /// twice.
    pub fn new(operands: usize, steps: Vec<Step>, results: Vec<usize>) -> Result<Body, String> {
        if MOST_RESULTS < results.len() {
            return Err(format!(
                "a body may have {MOST_RESULTS} results, not {}",
                results.len()
            ));
        }
        let (mut values, mut summed) = (operands, vec![]);
        for (i, step) in steps.iter().enumerate() {
            let (name, row) = (step.op.name(), step.op.row());
            if row.access == Access::Whole && !step.op.is_alias() {
                return Err(format!("step {i}: {name} may not be part of a kernel"));
            }
            if let Some(&later) = step.inputs.iter().find(|&&v| values <= v) {
                return Err(format!(
                    "step {i}: {name} uses %{later}, and {values} values come before it"
                ));
            }
            if step.outputs == 0 {
                return Err(format!("step {i}: {name} should have a result"));
            }
            let first = match name {
                "sum" | "mean" if step.op.ints("dims").first() == Some(&0) => 0,
                "layer_norm_bwd" => step.op.ints("mask").first().map_or(0, |&dx| dx as usize),
                _ => step.outputs,
            };
            summed.extend(values + first..values + step.outputs);
            values += step.outputs;
        }
        for (i, &v) in results.iter().enumerate() {
            if !(operands..values).contains(&v) {
                return Err(format!("%{v} is no step's result"));
            }
            if results[..i].contains(&v) {
                return Err(format!("%{v} stands twice among the results"));
            }
        }
        if results.is_empty() {
            return Err("a body should have a result".into());
        }
        // A sum over rows is written at the end, by another part of the kernel than what reads
        // operands of its size.
        let elementwise = (0..results.len()).filter(|&j| !summed.contains(&results[j]));
        let tables = space::tables(&steps);
        let read = (0..operands)
            .filter(|i| !tables.contains(i))
            .collect::<Vec<_>>();
        let inplace = elementwise
            .flat_map(|j| read.iter().map(move |&i| (i, j)))
            .collect();
        Ok(Body {
            operands,
            inplace,
            steps,
            results,
        })
    }
    /// How many operands it has.
    pub fn operands(&self) -> usize {
        self.operands
    }
    /// The steps, in order.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }
    /// Numbers of the values that leave the kernel.
    pub fn results(&self) -> &[usize] {
        &self.results
    }
    /// The (operand, result) pairs that may share their bytes, if their types are equal: an element
    /// of a result is written after the operands' elements at its place were read. Options, of
    /// which every element needs the same, are none of these.
    pub fn inplace(&self) -> &[(usize, usize)] {
        &self.inplace
    }
    /// Types of all values, by number, from those of the operands; the error says which step does
    /// not fit.
    pub fn types(&self, operands: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        if operands.len() != self.operands {
            return Err(format!(
                "the body has {} operands, not {}",
                self.operands,
                operands.len()
            ));
        }
        types(&self.steps, operands.iter().copied())
    }
    /// Where its kernel runs, over operands of these types.
    pub fn space(&self, operands: &[&TensorType]) -> Result<Space, String> {
        Space::new(
            &self.steps,
            &self.results,
            &operands.iter().map(|&ty| ty.clone()).collect::<Vec<_>>(),
        )
    }
    /// Types of the results; an error too if no kernel goes over such values row by row.
    pub fn infer(&self, operands: &[&TensorType]) -> Result<Vec<TensorType>, String> {
        let types = self.types(operands)?;
        self.space(operands)?;
        Ok(self.results.iter().map(|&v| types[v].clone()).collect())
    }
    /// Arithmetic of all steps, and the kernel's scratch. The types should fit.
    pub fn work(&self, operands: &[&TensorType]) -> Work {
        let Ok(types) = self.types(operands) else {
            return Work::default();
        };
        let mut flops = 0.0;
        let mut at = self.operands;
        for step in &self.steps {
            let inputs: Vec<&TensorType> = step.inputs.iter().map(|&v| &types[v]).collect();
            flops += step.op.work(&inputs, &types[at..at + step.outputs]).flops;
            at += step.outputs;
        }
        let scratch = self
            .space(operands)
            .map_or(0, |space| space.scratch_bytes());
        Work {
            flops,
            matrix: false,
            scratch,
        }
    }
}

/// Types of operands and of all steps' results, in order; the error says which step does not fit.
pub fn types<'a>(
    steps: &[Step],
    operands: impl IntoIterator<Item = &'a TensorType>,
) -> Result<Vec<TensorType>, String> {
    let mut types: Vec<TensorType> = operands.into_iter().cloned().collect();
    for (i, step) in steps.iter().enumerate() {
        let inputs: Vec<&TensorType> = step.inputs.iter().map(|&v| &types[v]).collect();
        let results = step
            .op
            .infer(&inputs)
            .map_err(|e| format!("step {i}: {e}"))?;
        if results.len() != step.outputs {
            let (name, n) = (step.op.name(), results.len());
            return Err(format!(
                "step {i}: {name} has {n} results, not {}",
                step.outputs
            ));
        }
        types.extend(results);
    }
    Ok(types)
}
