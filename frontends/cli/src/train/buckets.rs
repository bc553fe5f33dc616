//! Steps for batches of several sizes: which of them takes a batch, and what fills the rest of its
//! inputs.

use super::feeding::Inputs;
use super::{fed, of_one_batch};
use crate::data::{Batch, IGNORED, LABELS, Value};
use crate::failure::Failure;
use artifact::{Artifact, Binding, DType, Operand};

/// The inputs of the steps, largest first. A step without `--buckets` is the only one.
pub(super) struct Buckets {
    /// Of each step, the inputs of all its batches.
    fed: Vec<Vec<Binding>>,
    /// Of each step, those of one batch.
    of_one: Vec<Vec<(String, Operand)>>,
    micro_batches: u64,
    /// The dimensions of each input that differ among the steps.
    varies: Vec<Vec<bool>>,
    /// The input with labels.
    labels: Option<usize>,
    /// Elements of the first input: those of the data, and with what was filled.
    given: u64,
    filled: u64,
}

impl Buckets {
    pub(super) fn of(artifact: &Artifact, labels_input: Option<&str>) -> Buckets {
        let micro_batches = artifact.summary.micro_batches.max(1);
        let steps = || std::iter::once(artifact).chain(&artifact.others);
        let fed: Vec<_> = steps().map(fed).collect();
        let of_one: Vec<_> = fed
            .iter()
            .map(|fed| of_one_batch(fed, micro_batches))
            .collect();
        let varies = |(i, (_, largest)): (usize, &(String, Operand))| {
            let dimensions = 0..largest.shape.len();
            let differs = |d: usize| {
                let mut sizes = of_one.iter().map(|inputs| inputs[i].1.shape.get(d));
                sizes.any(|size| size != largest.shape.get(d))
            };
            dimensions.map(differs).collect()
        };
        let varies: Vec<Vec<bool>> = of_one[0].iter().enumerate().map(varies).collect();
        let is_labels = |(name, _): &(String, Operand)| match labels_input {
            Some(given) => name == given,
            None => LABELS.contains(&name.as_str()),
        };
        Buckets {
            labels: of_one[0].iter().position(is_labels),
            fed,
            micro_batches,
            varies: if of_one.len() > 1 { varies } else { vec![] },
            of_one,
            given: 0,
            filled: 0,
        }
    }

    /// Whether there are several steps.
    pub(super) fn are_several(&self) -> bool {
        self.fed.len() > 1
    }

    /// The inputs of one batch of the largest step.
    pub(super) fn inputs(&self) -> &Inputs {
        &self.of_one[0]
    }

    /// The inputs of one batch of a step.
    pub(super) fn inputs_of(&self, step: usize) -> &Inputs {
        &self.of_one[step]
    }

    /// The number of batches of a step.
    pub(super) fn micro_batches(&self) -> u64 {
        self.micro_batches
    }

    /// The dimensions of each input that may be smaller in a batch; of none if it is empty.
    pub(super) fn varies(&self) -> &[Vec<bool>] {
        &self.varies
    }

    /// Whether the number of rows is what varies.
    pub(super) fn vary_in_rows(&self) -> bool {
        self.varies
            .iter()
            .any(|varies| varies.first() == Some(&true))
    }

    /// The lengths of rows, ascending, of the input with the ids.
    pub(super) fn lengths(&self, ids: &str) -> Result<Vec<u64>, Failure> {
        if self.vary_in_rows() {
            return Err(Failure::Input(
                "--documents: the rows of all steps should be equally many, and their lengths \
                 differ: --buckets gives the lengths"
                    .into(),
            ));
        }
        let at = self.inputs().iter().position(|(name, _)| name == ids);
        let length = |inputs: &Vec<(String, Operand)>| {
            let shape = at.map(|at| &inputs[at].1.shape);
            shape.and_then(|shape| shape.last()).copied().unwrap_or(0)
        };
        Ok(self.of_one.iter().rev().map(length).collect())
    }

    /// The smallest step that holds all these batches.
    pub(super) fn choose(&self, batches: &[Batch]) -> Result<usize, Failure> {
        let holds = |inputs: &Vec<(String, Operand)>| {
            let fits = |(i, (value, (_, operand))): (usize, (&Value, &(String, Operand)))| {
                let sizes = value.shape.iter().zip(&operand.shape).enumerate();
                let varies = |d: usize| self.varies.get(i).is_some_and(|varies| varies[d]);
                let mut sizes =
                    sizes.map(|(d, (own, most))| own == most || varies(d) && own < most);
                sizes.all(|fits| fits)
            };
            let mut all = batches
                .iter()
                .map(|batch| batch.iter().zip(inputs).enumerate());
            all.all(|mut batch| batch.all(fits))
        };
        self.of_one.iter().rposition(holds).ok_or_else(|| {
            Failure::Input("a batch is larger than the largest step (--buckets)".into())
        })
    }

    /// The inputs of a step's batches, one batch after the other.
    pub(super) fn fed(&self, step: usize) -> impl Iterator<Item = &[Binding]> {
        self.fed[step].chunks(self.of_one[step].len().max(1))
    }

    /// A batch in the size of a step: labels are filled with -100, everything else with zeros.
    pub(super) fn filled(&mut self, step: usize, batch: Batch) -> Result<Vec<Vec<u8>>, Failure> {
        let inputs = &self.of_one[step];
        if let (Some(value), Some((_, operand))) = (batch.first(), inputs.first()) {
            self.given += value.shape.iter().product::<u64>();
            self.filled += operand.shape.iter().product::<u64>();
        }
        let is_whole =
            |(value, (_, operand)): (&Value, &(String, Operand))| value.shape == operand.shape;
        if batch.iter().zip(inputs).all(is_whole) {
            return Ok(batch.into_iter().map(|value| value.bytes).collect());
        }
        if self.labels.is_none() {
            return Err(Failure::Input(
                "a batch is smaller than every step, and what fills the rest would count in the \
                 loss: none of the model's inputs has labels, which say what does not count; \
                 --labels-input names it"
                    .into(),
            ));
        }
        let one = |(i, (value, (_, operand))): (usize, (Value, &(String, Operand)))| {
            let number = if self.labels == Some(i) { IGNORED } else { 0 };
            let element = element(operand.dtype, number);
            widened(&value, &operand.shape, &element)
        };
        Ok(batch.into_iter().zip(inputs).enumerate().map(one).collect())
    }

    /// What share of the first input's elements was filled, if steps have several sizes.
    pub(super) fn padding(&self) -> Option<f64> {
        let has_run = self.are_several() && self.filled > 0;
        has_run.then(|| (self.filled - self.given) as f64 / self.filled as f64)
    }
}

/// The bytes of an element with this number; zeros for numbers that are not integers.
fn element(dtype: DType, number: i64) -> Vec<u8> {
    let is_integer = matches!(dtype, DType::I8 | DType::I16 | DType::I32 | DType::I64);
    let number = if is_integer { number } else { 0 };
    number.to_le_bytes()[..dtype.bytes() as usize].to_vec()
}

/// A tensor at the start of a larger one, which is filled with an element.
fn widened(value: &Value, shape: &[u64], element: &[u8]) -> Vec<u8> {
    let n: u64 = shape.iter().product();
    let mut bytes = element.repeat(n as usize);
    let (Some(&row), Some(&wide_row)) = (value.shape.last(), shape.last()) else {
        return value.bytes.clone();
    };
    let row_bytes = row as usize * element.len();
    if row_bytes == 0 {
        return bytes;
    }
    let (outer, wide_outer) = (
        &value.shape[..value.shape.len() - 1],
        &shape[..shape.len() - 1],
    );
    for (number, from) in value.bytes.chunks_exact(row_bytes).enumerate() {
        // The row's coordinates in the smaller tensor are those in the larger one.
        let (mut rest, mut at, mut stride) = (number as u64, 0, 1);
        for (&size, &wide) in outer.iter().zip(wide_outer).rev() {
            at += rest % size * stride;
            (rest, stride) = (rest / size, stride * wide);
        }
        let start = (at * wide_row) as usize * element.len();
        bytes[start..][..row_bytes].copy_from_slice(from);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_smaller_tensor_lies_at_the_start_of_a_larger_one() {
        let value = Value {
            shape: vec![2, 1, 2],
            bytes: vec![1, 2, 3, 4],
        };
        let wide = widened(&value, &[3, 2, 3], &[9]);
        assert_eq!(wide, [1, 2, 9, 9, 9, 9, 3, 4, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]);
        assert_eq!(element(DType::I16, IGNORED), [156, 255]);
        assert_eq!(element(DType::F32, IGNORED), [0; 4]);
    }
}
