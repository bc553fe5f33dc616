//! Values of matrices that a step stores in NF4, from the numbers of the matrix.

use artifact::DType;
use passes::graph::quantize::STATES;
use runtime::kernels::blocks::Nf4;
use runtime::kernels::owned::OwnedTensor;

/// The bytes of the four states of a matrix with their names, from its bytes.
pub(crate) fn stored(path: &str, dtype: DType, bytes: &[u8]) -> [(String, Vec<u8>); 4] {
    let n = bytes.len() / dtype.bytes() as usize;
    of_numbers(path, &OwnedTensor::from_bytes(dtype, &[n], bytes).to_f64s())
}

/// The same from its numbers.
pub(crate) fn of_numbers(path: &str, numbers: &[f64]) -> [(String, Vec<u8>); 4] {
    let numbers: Vec<f32> = numbers.iter().map(|&x| x as f32).collect();
    let stored = Nf4::of(&numbers);
    let largest = stored.largest.iter().flat_map(|x| x.to_le_bytes());
    let offset = stored.offset.to_le_bytes().to_vec();
    named(
        path,
        [stored.codes, stored.sizes, largest.collect(), offset],
    )
}

/// The states' bytes with their names.
pub(crate) fn named(path: &str, bytes: [Vec<u8>; 4]) -> [(String, Vec<u8>); 4] {
    let mut bytes = bytes.into_iter();
    STATES.map(|state| (format!("{state}.{path}"), bytes.next().unwrap_or_default()))
}
