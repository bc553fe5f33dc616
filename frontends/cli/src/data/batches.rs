//! Batches in safetensors files, the shards of a data set: batch `K` has a tensor `batch.K.INPUT`
//! for each input. The numbers go on from shard to shard, or each shard begins with 0.

use super::tensors::Tensors;
use super::{Batch, Source, Value};
use crate::failure::Failure;
use artifact::Operand;
use std::fs;
use std::path::{Path, PathBuf};

/// The ending of the files of a folder that are read.
const ENDING: &str = "safetensors";

/// A file with batches.
struct Shard {
    tensors: Tensors,
    /// The number of its first batch in the file's names.
    first: u64,
    /// One past the number of its last batch in the run.
    end: u64,
}

/// Batches in files.
pub(crate) struct Batches {
    shards: Vec<Shard>,
    inputs: Vec<(String, Operand)>,
    /// The dimensions of each input that may be smaller in a batch; of none if it is empty.
    varies: Vec<Vec<bool>>,
}

impl Batches {
    /// Opens files, and the `.safetensors` files of folders in the order of their names. Checks
    /// that every batch has every input, of the right type. `varies` says which dimensions of each
    /// input may be smaller; nothing varies if it is empty.
    pub(crate) fn open(
        paths: &[PathBuf],
        inputs: &[(String, Operand)],
        varies: &[Vec<bool>],
    ) -> Result<Batches, Failure> {
        let mut batches = Batches {
            shards: vec![],
            inputs: inputs.to_vec(),
            varies: varies.to_vec(),
        };
        for path in files(paths)? {
            let so_far = batches.units();
            let tensors = Tensors::open(&path)?;
            let (first, count) = numbers(&tensors, inputs, so_far)?;
            for number in first..first + count {
                for (i, (name, operand)) in inputs.iter().enumerate() {
                    let varies = varies.get(i).map_or(&[][..], |varies| varies);
                    tensors.check(&format!("batch.{number}.{name}"), operand, varies)?;
                }
            }
            batches.shards.push(Shard {
                tensors,
                first,
                end: so_far + count,
            });
        }
        Ok(batches)
    }
}

impl Source for Batches {
    fn units(&self) -> u64 {
        self.shards.last().map_or(0, |shard| shard.end)
    }

    fn units_per_batch(&self) -> u64 {
        1
    }

    fn with_rows(&self) -> Vec<bool> {
        let operands = self.inputs.iter().map(|(_, operand)| operand);
        operands.map(|operand| !operand.shape.is_empty()).collect()
    }

    fn batch(&self, units: &[u64]) -> Result<Batch, Failure> {
        let unit = units.first().copied().unwrap_or(0);
        let at = self.shards.partition_point(|shard| shard.end <= unit);
        let Some(shard) = self.shards.get(at) else {
            // A model without inputs has no batches.
            return Ok(vec![]);
        };
        let start = match at {
            0 => 0,
            _ => self.shards[at - 1].end,
        };
        let number = shard.first + (unit - start);
        let read = |(i, (name, operand)): (usize, &(String, Operand))| {
            let varies = self.varies.get(i).map_or(&[][..], |varies| varies);
            let name = format!("batch.{number}.{name}");
            let (shape, bytes) = shard.tensors.get_within(&name, operand, varies)?;
            Ok(Value { shape, bytes })
        };
        self.inputs.iter().enumerate().map(read).collect()
    }
}

/// The files, with those of folders.
fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let mut files = vec![];
    for path in paths {
        if path.is_dir() {
            files.extend(files_in(path)?);
        } else {
            files.push(path.clone());
        }
    }
    Ok(files)
}

/// The safetensors files of a folder, by name.
fn files_in(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let failed = |e: std::io::Error| Failure::Input(format!("{}: {e}", folder.display()));
    let mut files = vec![];
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|ending| ending == ENDING) {
            files.push(path);
        }
    }
    if files.is_empty() {
        let folder = folder.display();
        return Err(Failure::Input(format!(
            "{folder}: the folder has no .{ENDING} file"
        )));
    }
    files.sort_unstable();
    Ok(files)
}

/// The first number of a shard's batches, and how many it has. `so_far`: the batches of the shards
/// before.
fn numbers(
    tensors: &Tensors,
    inputs: &[(String, Operand)],
    so_far: u64,
) -> Result<(u64, u64), Failure> {
    let path = tensors.path().display();
    let mut numbers: Vec<u64> = tensors.names().filter_map(batch_number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    let Some((&lowest, &last)) = numbers.first().zip(numbers.last()) else {
        return match inputs.is_empty() {
            true => Ok((0, 0)),
            false => Err(no_batch(tensors, inputs)),
        };
    };

    let first = if lowest == 0 { 0 } else { so_far };
    let gap = numbers
        .iter()
        .zip(first..)
        .find_map(|(&number, k)| (number != k).then_some(k));
    if let Some(gap) = gap {
        let from = match so_far {
            0 => "from 0".to_string(),
            _ => format!("from 0, or from {so_far} after the files before,"),
        };
        return Err(Failure::Input(format!(
            "{path}: batches are numbered {from} without gaps: batch.{gap} is missing, \
             batch.{last} is there"
        )));
    }
    Ok((first, numbers.len() as u64))
}

fn no_batch(tensors: &Tensors, inputs: &[(String, Operand)]) -> Failure {
    let wanted = inputs.iter().map(|(name, _)| format!("batch.0.{name}"));
    let wanted = wanted.collect::<Vec<_>>().join(", ");
    let found: Vec<&str> = tensors.names().take(5).collect();
    let found = match found.is_empty() {
        true => "nothing".to_string(),
        false => found.join(", "),
    };
    let path = tensors.path().display();
    Failure::Input(format!(
        "{path}: there is no batch; expected {wanted}; found {found}"
    ))
}

/// `K` of `batch.K.NAME`.
fn batch_number(name: &str) -> Option<u64> {
    let (number, _) = name.strip_prefix("batch.")?.split_once('.')?;
    // "007" and "+7" are not batch numbers.
    number
        .parse()
        .ok()
        .filter(|parsed: &u64| parsed.to_string() == number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_numbered() {
        assert_eq!(batch_number("batch.12.input_ids"), Some(12));
        assert_eq!(batch_number("batch.0.a.b"), Some(0));
        for name in ["batch.x.a", "batch.1", "batch.+1.a", "batch.01.a", "loss"] {
            assert_eq!(batch_number(name), None, "{name}");
        }
    }
}
