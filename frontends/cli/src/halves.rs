//! Values of parameters from numbers of another type: a file may have f32 where a step stores half
//! precision, with a master or without, or the reverse.

use crate::data::Tensors;
use crate::failure::Failure;
use artifact::{DType, Operand, State};
use half::{bf16, f16};
use passes::graph::optimizer::{LOW, MASTER};
use runtime::kernels::halves::{join, split};
use runtime::{Error, Machine};
use std::collections::BTreeSet;

/// The f32 numbers of a tensor in f32, bf16 or f16; `None` for another type.
pub(crate) fn numbers(dtype: DType, bytes: &[u8]) -> Option<Vec<f32>> {
    let wholes = bytes.as_chunks().0.iter();
    let halves = bytes.as_chunks().0.iter();
    Some(match dtype {
        DType::F32 => wholes.map(|x| f32::from_le_bytes(*x)).collect(),
        DType::BF16 => halves.map(|x| bf16::from_le_bytes(*x).to_f32()).collect(),
        DType::F16 => halves.map(|x| f16::from_le_bytes(*x).to_f32()).collect(),
        _ => return None,
    })
}

/// True for the types whose numbers are known here.
pub(crate) fn is_known(dtype: DType) -> bool {
    numbers(dtype, &[]).is_some()
}

/// The bytes of a parameter's states with their paths, from the tensor `name` of a file: of its
/// own, and of its master, if the step has one and the file has it in another form.
pub(crate) fn read(
    tensors: &Tensors,
    name: &str,
    state: &State,
    states: &BTreeSet<String>,
) -> Result<Vec<(String, Vec<u8>)>, Failure> {
    let State { path, operand, .. } = state;
    let has = |start: &str| tensors.has(&format!("{start}.{name}"));
    let lacks = |start: &str| states.contains(&format!("{start}.{path}")) && !has(start);
    let other_master = lacks(LOW) && has(MASTER) || lacks(MASTER) && has(LOW);
    let is_other = other_master || tensors.dtype(name) != Some(operand.dtype);
    let numbers = match is_other {
        true => in_file(tensors, name, operand)?,
        false => None,
    };
    Ok(match numbers {
        Some(numbers) => stored(path, operand.dtype, &numbers, |path| states.contains(path)),
        None => vec![(path.clone(), tensors.get(name, operand)?)],
    })
}

/// The numbers of a parameter in a file, if the file and the step have it in f32, bf16 or f16. They
/// are those of its master, if the file has one.
pub(crate) fn in_file(
    tensors: &Tensors,
    name: &str,
    operand: &Operand,
) -> Result<Option<Vec<f32>>, Failure> {
    let Some(dtype) = tensors.dtype(name).filter(|&dtype| is_known(dtype)) else {
        return Ok(None);
    };
    if !is_known(operand.dtype) {
        return Ok(None);
    }
    let of = |name: &str, dtype| {
        let operand = Operand {
            dtype,
            ..operand.clone()
        };
        tensors.get(name, &operand)
    };
    let (master, low) = (format!("{MASTER}.{name}"), format!("{LOW}.{name}"));
    if tensors.has(&master) {
        return Ok(numbers(DType::F32, &of(&master, DType::F32)?));
    }
    let bytes = of(name, dtype)?;
    if !(dtype == DType::BF16 && tensors.has(&low)) {
        return Ok(numbers(dtype, &bytes));
    }
    Ok(Some(joined(&bytes, &of(&low, DType::I16)?)))
}

/// The numbers of halves.
fn joined(high: &[u8], low: &[u8]) -> Vec<f32> {
    let word = |bytes: &[u8; 2]| u16::from_le_bytes(*bytes);
    let pairs = high.as_chunks().0.iter().zip(low.as_chunks().0);
    pairs
        .map(|(high, low)| join(word(high), word(low)))
        .collect()
}

/// The numbers of a parameter's master, if a machine has one. No step may be under way.
pub(crate) fn master_in(machine: &mut Machine, path: &str) -> Result<Option<Vec<f32>>, Error> {
    let (master, low) = (format!("{MASTER}.{path}"), format!("{LOW}.{path}"));
    let has = |path: &str| machine.states().any(|state| state.path == path);
    if has(&master) {
        return Ok(numbers(DType::F32, &machine.read_state(&master)?));
    }
    if !has(&low) {
        return Ok(None);
    }
    let high = machine.read_state(path)?;
    Ok(Some(joined(&high, &machine.read_state(&low)?)))
}

/// The numbers of a state in half precision, or of its master if a machine has one; `None` for
/// another type. No step may be under way.
pub(crate) fn widened(machine: &mut Machine, path: &str) -> Result<Option<Vec<f32>>, Error> {
    if let Some(master) = master_in(machine, path)? {
        return Ok(Some(master));
    }
    let state = machine.states().find(|state| state.path == path);
    match state.map(|state| state.operand.dtype) {
        Some(dtype @ (DType::BF16 | DType::F16)) => Ok(numbers(dtype, &machine.read_state(path)?)),
        _ => Ok(None),
    }
}

/// True if one of these states is the master of a parameter.
pub(crate) fn has_master<'a>(mut states: impl Iterator<Item = &'a State>, path: &str) -> bool {
    let masters = [MASTER, LOW].map(|start| format!("{start}.{path}"));
    states.any(|state| masters.contains(&state.path))
}

/// The bytes of a parameter's states with their paths: of its own, and of the master that the step
/// has of it, if any. An f32 that is no number of `dtype` is rounded.
pub(crate) fn stored(
    path: &str,
    dtype: DType,
    numbers: &[f32],
    has_state: impl Fn(&str) -> bool,
) -> Vec<(String, Vec<u8>)> {
    let (master, low) = (format!("{MASTER}.{path}"), format!("{LOW}.{path}"));
    let path = path.to_string();
    if dtype == DType::BF16 && has_state(&low) {
        let bytes = |half: fn((u16, u16)) -> u16| {
            numbers
                .iter()
                .flat_map(|&x| half(split(x)).to_le_bytes())
                .collect()
        };
        return vec![
            (path, bytes(|(high, _)| high)),
            (low, bytes(|(_, low)| low)),
        ];
    }
    let mut states = vec![(path, rounded(dtype, numbers))];
    if has_state(&master) {
        states.push((master, rounded(DType::F32, numbers)));
    }
    states
}

/// The bytes of numbers in f32, bf16 or f16.
pub(crate) fn rounded(dtype: DType, numbers: &[f32]) -> Vec<u8> {
    let numbers = numbers.iter();
    match dtype {
        DType::BF16 => numbers
            .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
            .collect(),
        DType::F16 => numbers
            .flat_map(|&x| f16::from_f32(x).to_le_bytes())
            .collect(),
        _ => numbers.flat_map(|x| x.to_le_bytes()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_parameter_keeps_all_bits() {
        let given = [1.5f32, -0.1, 3e-8, 1.0 + 1.0 / 256.0];
        let states = stored("w", DType::BF16, &given, |path| path == "low.w");
        let [(_, high), (name, low)] = &states[..] else {
            panic!("{states:?}");
        };
        assert_eq!(name, "low.w");
        assert_eq!(joined(high, low), given);
        // Half a bit of bf16 above 1: the parameter is the even neighbour only without halves.
        assert_eq!(numbers(DType::BF16, high).unwrap()[3], 1.007_812_5);
        let alone = stored("w", DType::BF16, &given, |_| false);
        assert_eq!(numbers(DType::BF16, &alone[0].1).unwrap()[3], 1.0);
    }
}
