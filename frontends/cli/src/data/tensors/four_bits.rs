//! Matrices as bitsandbytes stores them: codes of 4 bits, the largest magnitude of each block of
//! numbers, in f32 or in 8 bits, and a description in JSON (Dettmers et al., 2023, "QLoRA").

use super::published::of_bytes;
use super::{Entry, Piece, Stored, Tensors};
use ops::maps::{BLOCK_8BIT, BLOCK_NF4, DYNAMIC, NF4};
use safetensors::tensor::Dtype;
use serde::Deserialize;

/// The ends of the names of descriptions, which follow the name of the matrix.
pub(super) const STATES: [&str; 2] = [
    ".quant_state.bitsandbytes__nf4",
    ".quant_state.bitsandbytes__fp4",
];

/// The description of a matrix, as far as its numbers depend on it.
#[derive(Deserialize)]
struct State {
    shape: Vec<u64>,
    /// Numbers that share a size.
    blocksize: usize,
    /// Sizes that share the largest of them.
    nested_blocksize: Option<usize>,
    /// What is added to sizes.
    nested_offset: Option<f64>,
}

/// A matrix of codes of 4 bits.
#[derive(Clone)]
pub(super) struct FourBits {
    /// Two to a byte, the first in its upper half.
    codes: Piece,
    /// The numbers of the 16 codes.
    map: Piece,
    sizes: Piece,
    block: usize,
    nested: Option<Nested>,
    /// How many numbers there are.
    n: usize,
}

/// Sizes in 8 bits.
#[derive(Clone)]
struct Nested {
    /// The numbers of the 256 codes.
    map: Piece,
    largest: Piece,
    block: usize,
    offset: f32,
}

impl Tensors {
    /// A matrix of codes of 4 bits, if the file describes it and has all of it.
    pub(super) fn of_bitsandbytes(&self, name: &str) -> Option<Entry> {
        let part = |end: &str, dtype: Dtype| {
            let entry = self.entries.get(&format!("{name}{end}"))?;
            let Stored::Pieces(pieces) = &entry.stored else {
                return None;
            };
            (entry.dtype == dtype).then_some(pieces.first()?)
        };
        let codes = part("", Dtype::U8)?;
        let state = STATES.iter().find_map(|end| part(end, Dtype::U8))?;
        let state: State = serde_json::from_slice(&self.piece(name, state).ok()?).ok()?;
        let n = state
            .shape
            .iter()
            .try_fold(1, |n: u64, &size| n.checked_mul(size))?;
        let n = usize::try_from(n).ok()?;
        // How many values of so many bytes each a piece has.
        let has = |piece: &Piece, values: usize, bytes: usize| {
            Some(piece.bytes.end - piece.bytes.start) == (values as u64).checked_mul(bytes as u64)
        };
        let groups = |n: usize, block: usize| (block > 0).then(|| n.div_ceil(block));
        let blocks = groups(n, state.blocksize)?;
        let nested = match state.nested_blocksize {
            None => None,
            Some(block) => Some(Nested {
                map: part(".nested_quant_map", Dtype::F32)?.clone(),
                largest: part(".nested_absmax", Dtype::F32)?.clone(),
                block,
                offset: state.nested_offset? as f32,
            }),
        };
        let (sizes, is_whole) = match &nested {
            None => {
                let sizes = part(".absmax", Dtype::F32)?;
                (sizes, has(sizes, blocks, 4))
            }
            Some(nested) => {
                let sizes = part(".absmax", Dtype::U8)?;
                let largest = has(&nested.largest, groups(blocks, nested.block)?, 4);
                (
                    sizes,
                    has(sizes, blocks, 1) && largest && has(&nested.map, 256, 4),
                )
            }
        };
        let map = part(".quant_map", Dtype::F32)?;
        (is_whole && has(codes, n.div_ceil(2), 1) && has(map, 16, 4)).then(|| Entry {
            dtype: Dtype::F32,
            shape: state.shape,
            stored: Stored::FourBits(FourBits {
                codes: codes.clone(),
                map: map.clone(),
                sizes: sizes.clone(),
                block: state.blocksize,
                nested,
                n,
            }),
        })
    }
}

/// The bytes of a matrix of codes.
pub(super) struct Bytes {
    codes: Vec<u8>,
    map: Vec<f32>,
    sizes: Vec<u8>,
    /// The map and the largest of nested sizes.
    nested: Option<[Vec<f32>; 2]>,
}

impl FourBits {
    /// Reads the parts of the matrix.
    pub(super) fn bytes<E>(&self, read: impl Fn(&Piece) -> Result<Vec<u8>, E>) -> Result<Bytes, E> {
        let floats = |piece: &Piece| Ok(of_bytes(&read(piece)?, f32::from_le_bytes));
        Ok(Bytes {
            codes: read(&self.codes)?,
            map: floats(&self.map)?,
            sizes: read(&self.sizes)?,
            nested: match &self.nested {
                Some(nested) => Some([floats(&nested.map)?, floats(&nested.largest)?]),
                None => None,
            },
        })
    }

    /// The matrix in f32.
    pub(super) fn numbers(&self, bytes: &Bytes) -> Vec<u8> {
        let sizes: Vec<f32> = match (&self.nested, &bytes.nested) {
            (Some(nested), Some([map, largest])) => {
                let codes = bytes.sizes.chunks(nested.block).zip(largest);
                let size = |(codes, &largest): (&[u8], &f32)| -> Vec<f32> {
                    let size = |&code: &u8| map[usize::from(code)] * largest + nested.offset;
                    codes.iter().map(size).collect()
                };
                codes.flat_map(size).collect()
            }
            _ => of_bytes(&bytes.sizes, f32::from_le_bytes),
        };
        let mut numbers = Vec::with_capacity(4 * self.n);
        for i in 0..self.n {
            let code = bytes.codes[i / 2] >> (4 * (1 - i % 2)) & 15;
            let number = bytes.map[usize::from(code)] * sizes[i / self.block];
            numbers.extend_from_slice(&number.to_le_bytes());
        }
        numbers
    }

    /// Whether blocks are those of NF4 as a step stores it.
    pub(super) fn has_blocks_of_nf4(&self) -> bool {
        let nested = self.nested.as_ref().map_or(0, |nested| nested.block);
        [self.block, nested].map(|n| n as u64) == [BLOCK_NF4, BLOCK_8BIT]
    }

    /// The codes, the sizes, the largest of them and the offset, if the maps are those of NF4, too.
    pub(super) fn in_nf4(&self, bytes: Bytes) -> Option<[Vec<u8>; 4]> {
        let (nested, [map, largest]) = (self.nested.as_ref()?, bytes.nested?);
        let is_ours = bytes.map == NF4 && map == DYNAMIC;
        let largest = largest.iter().flat_map(|x| x.to_le_bytes()).collect();
        let offset = nested.offset.to_le_bytes().to_vec();
        is_ours.then_some([bytes.codes, bytes.sizes, largest, offset])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Failure;
    use artifact::{DType, Operand, Place};
    use runtime::kernels::blocks::Nf4;
    use std::path::Path;

    /// What bitsandbytes stored: `tests/data/quantize/gen_quantize.py`.
    fn stored() -> Tensors {
        let path = "../../tests/data/quantize/stored.safetensors";
        Tensors::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
    }

    fn get(tensors: &Tensors, name: &str, shape: &[u64]) -> Result<Vec<u8>, Failure> {
        let operand = Operand {
            dtype: DType::F32,
            shape: shape.to_vec(),
            place: Place { pool: 0, offset: 0 },
        };
        tensors.get(name, &operand)
    }

    #[test]
    fn numbers_are_those_of_bitsandbytes() {
        let mut tensors = stored();
        let names = ["a.weight", "b.weight", "c.weight", "d.weight"];
        tensors.add_published(names.into_iter());
        for (name, shape) in [
            ("a", [200, 90]),
            ("b", [200, 90]),
            ("c", [200, 90]),
            ("d", [20, 30]),
        ] {
            let [found, wanted] = ["weight", "again"]
                .map(|part| get(&tensors, &format!("{name}.{part}"), &shape).unwrap());
            assert!(found == wanted, "{name}");
        }
    }

    /// Codes that a step stores alike are taken as they are: rounded again, sizes would change.
    #[test]
    fn codes_are_kept() {
        let mut tensors = stored();
        tensors.add_published(["a.weight", "b.weight", "c.weight"].into_iter());
        let [codes, sizes, largest, offset] = tensors.in_nf4("a.weight").unwrap().unwrap();
        let nf4 = Nf4 {
            codes,
            sizes,
            largest: of_bytes(&largest, f32::from_le_bytes),
            offset: of_bytes(&offset, f32::from_le_bytes)[0],
        };
        let wanted = get(&tensors, "a.again", &[200, 90]).unwrap();
        assert_eq!(
            nf4.numbers(18000).unwrap(),
            of_bytes(&wanted, f32::from_le_bytes)
        );
        for other in ["b.weight", "c.weight", "d.weight"] {
            assert!(tensors.in_nf4(other).unwrap().is_none(), "{other}");
        }
    }

    #[test]
    fn a_matrix_that_lacks_a_part_stays_what_it_is() {
        for part in [
            "",
            ".absmax",
            ".quant_map",
            ".nested_absmax",
            ".nested_quant_map",
        ] {
            let mut tensors = stored();
            let entry = tensors.entries.get_mut(&format!("a.weight{part}")).unwrap();
            let Stored::Pieces(pieces) = &mut entry.stored else {
                panic!("a part should be stored as it is");
            };
            pieces[0].bytes.end -= 4;
            tensors.add_published(["a.weight"].into_iter());
            let Err(Failure::Input(message)) = get(&tensors, "a.weight", &[200, 90]) else {
                panic!("a.weight was read without all of {part:?}");
            };
            assert!(message.contains("a.weight is u8[9000,1]"), "{message}");
            assert!(message.contains("a.weight.quant_map"), "{message}");
        }
    }
}
