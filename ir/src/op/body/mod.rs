//! What one kernel computes: a list of ops over the kernel's operands. Intermediate values have no
//! bytes. A [`Body`] is the attribute of the op `fused`.
//!
//! Values are numbered: first the operands, then the results of all steps in order. A step uses
//! only values with lower numbers.
//!
//! Permutations, slices and flips of operands may be steps too: a kernel reads such a view from the
//! operand's own bytes.

mod combine;
mod space;
mod view;

use super::{Access, BodyError, Op, Scratch, SpaceError, Work};
use crate::device::Processor;
use crate::types::TensorType;
pub use combine::Combines;
pub(crate) use space::sum_parts;
pub use space::{Along, Axes, Place, Read, Space};
pub use view::{Strided, View};

/// A list of ops. Invariant: each step uses only values before it, and its op is allowed in a body.
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
    /// The number of its results.
    pub outputs: usize,
}

/// The most results of a kernel.
pub const MOST_RESULTS: usize = 62;

impl Body {
    /// A body over this number of operands. It is an error if a step uses a later value, if an op
    /// may not be part of a kernel, or if a result is not computed by a step or is listed twice.
    pub fn new(operands: usize, steps: Vec<Step>, results: Vec<usize>) -> Result<Body, BodyError> {
        if results.len() > MOST_RESULTS {
            let (most, given) = (MOST_RESULTS, results.len());
            return Err(BodyError::ManyResults { most, given });
        }
        let (mut values, mut summed) = (operands, vec![]);
        let moved = moved(&steps, operands)?;
        for (i, step) in steps.iter().enumerate() {
            step.check(i, values)?;
            let first = combine::first_sum(&step.op).unwrap_or(step.outputs);
            summed.extend(values + first..values + step.outputs);
            values += step.outputs;
        }

        for (i, &value) in results.iter().enumerate() {
            if !(operands..values).contains(&value) {
                return Err(BodyError::NoResult { value });
            }
            if results[..i].contains(&value) {
                return Err(BodyError::Twice { value });
            }
            if moved[value].is_some() {
                return Err(BodyError::WritesView { value });
            }
        }
        if results.is_empty() {
            return Err(BodyError::NoResults);
        }

        // A sum over rows is written at the end, by another part of the kernel than the part that
        // reads operands of its size.
        let elementwise = (0..results.len()).filter(|&j| !summed.contains(&results[j]));
        let tables = space::tables(&steps);
        let read = (0..operands)
            .filter(|i| !tables.contains(i) && !moved.contains(&Some(*i)))
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
    /// The number of operands.
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
    /// of a result is written after the operands' elements at its place were read. Options are not
    /// among the pairs, because every element reads all options, and neither are operands of which
    /// views are read, because these have other places.
    pub fn inplace(&self) -> &[(usize, usize)] {
        &self.inplace
    }
    /// Types of all values, by number, from the types of the operands.
    pub fn types(&self, operands: &[&TensorType]) -> Result<Vec<TensorType>, BodyError> {
        if operands.len() != self.operands {
            return Err(BodyError::Operands {
                has: self.operands,
                given: operands.len(),
            });
        }
        types(&self.steps, operands.iter().copied())
    }
    /// The number of elements that the kernel reads of each operand. Of an operand of which only
    /// views are read, these are the elements of the views; what two views have in common counts
    /// twice, up to all elements. The types should fit.
    pub fn read(&self, operands: &[&TensorType]) -> Vec<u64> {
        let whole = operands.iter().map(|ty| ty.numel());
        let Ok(types) = self.types(operands) else {
            return whole.collect();
        };
        let mut read = vec![0_u64; self.operands];
        // The operand of which a value is an alias or a view, until a step has read it.
        let mut unread: Vec<Option<usize>> = (0..self.operands).map(Some).collect();
        for step in &self.steps {
            let is_view = View::is_made_by(&step.op);
            for &v in step.inputs.iter().filter(|_| !is_view) {
                if let Some(operand) = unread[v].take() {
                    read[operand] += types[v].numel();
                }
            }
            let of = step.inputs.first().filter(|_| is_view);
            let operand = of.and_then(|&v| unread[v]);
            unread.extend(vec![operand; step.outputs]);
        }
        read.iter().zip(whole).map(|(&n, all)| n.min(all)).collect()
    }
    /// The rows and columns of its kernel, for operands of these types.
    pub fn space(&self, operands: &[&TensorType]) -> Result<Space, SpaceError> {
        Space::new(
            &self.steps,
            &self.results,
            &operands.iter().map(|&ty| ty.clone()).collect::<Vec<_>>(),
        )
    }
    /// Types of the results. It is also an error if no kernel can process such values row by row.
    pub fn infer(&self, operands: &[&TensorType]) -> Result<Vec<TensorType>, BodyError> {
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
        let space = self.space(operands);
        let scratch = |processor| {
            let bytes = |space: &Space| space.scratch_bytes(processor);
            space.as_ref().map_or(0, bytes)
        };
        Work {
            flops,
            scratch: Scratch {
                cpu: scratch(Processor::Cpu),
                gpu: scratch(Processor::Gpu),
            },
            ..Work::default()
        }
    }
}

/// For each value, the operand of which it is a view with elements at other places than the
/// operand's; none if it is another value. It is an error if a step makes a view of a computed
/// value.
fn moved(steps: &[Step], operands: usize) -> Result<Vec<Option<usize>>, BodyError> {
    let mut moved: Vec<Option<usize>> = vec![None; operands];
    // The operand of which a value is an alias or a view.
    let mut of: Vec<Option<usize>> = (0..operands).map(Some).collect();
    for (i, step) in steps.iter().enumerate() {
        let is_view = View::is_made_by(&step.op);
        let x = step.inputs.first().filter(|_| is_view);
        let root = x.and_then(|&x| of.get(x).copied().flatten());
        let is_moved = x.is_some_and(|&x| moved.get(x).copied().flatten().is_some());
        if is_view && !step.op.is_alias() && root.is_none() {
            let op = step.op.name();
            return Err(BodyError::ViewOfComputed { step: i, op });
        }
        let result = root.filter(|_| is_moved || !step.op.is_alias());
        moved.extend(vec![result; step.outputs]);
        of.extend(vec![root; step.outputs]);
    }
    Ok(moved)
}

impl Step {
    /// Checks that this may be step `step` of a body, with `before` values before it.
    fn check(&self, step: usize, before: usize) -> Result<(), BodyError> {
        let op = self.op.name();
        if self.op.facts().access == Access::Whole && !View::is_made_by(&self.op) {
            return Err(BodyError::Whole { step, op });
        }
        if let Some(&value) = self.inputs.iter().find(|&&v| v >= before) {
            return Err(BodyError::Later {
                step,
                op,
                value,
                before,
            });
        }
        if self.outputs == 0 {
            return Err(BodyError::Nothing { step, op });
        }
        Ok(())
    }
}

/// Types of the operands and of the results of all steps, in order.
pub fn types<'a>(
    steps: &[Step],
    operands: impl IntoIterator<Item = &'a TensorType>,
) -> Result<Vec<TensorType>, BodyError> {
    let mut types: Vec<TensorType> = operands.into_iter().cloned().collect();
    for (i, step) in steps.iter().enumerate() {
        let inputs: Vec<&TensorType> = step.inputs.iter().map(|&v| &types[v]).collect();
        let results = step_types(i, step, &inputs)?;
        types.extend(results);
    }
    Ok(types)
}

/// Types of the results of step `i`.
fn step_types(i: usize, step: &Step, inputs: &[&TensorType]) -> Result<Vec<TensorType>, BodyError> {
    let results = step
        .op
        .infer(inputs)
        .map_err(|source| BodyError::Step { step: i, source })?;
    if results.len() != step.outputs {
        return Err(BodyError::Results {
            step: i,
            op: step.op.name(),
            has: results.len(),
            given: step.outputs,
        });
    }
    Ok(results)
}
