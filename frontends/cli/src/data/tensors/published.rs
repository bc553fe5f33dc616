//! Tensors that a published file has in another form than the model: under other names, a tensor
//! for each expert of a mixture, or numbers of 4 or 8 bits. transformers and PyTorch have changed
//! the names of modules and kept those of files. [`four_bits`](super::four_bits) has the numbers of
//! bitsandbytes.

use super::{Entry, Piece, Stored, Tensors};
use half::{bf16, f16};
use safetensors::tensor::Dtype;

/// Parts of names: in models, and in files.
const RENAMED: [(&str, &str); 8] = [
    // GPT-NeoX.
    ("lm_head.", "embed_out."),
    // Mixtral, MiniMax.
    (".mlp.", ".block_sparse_moe."),
    // Granite.
    (".experts.gate_up_proj", ".input_linear.weight"),
    (".experts.down_proj", ".output_linear.weight"),
    (".router.weight", ".router.layer.weight"),
    // Ernie.
    (".gate.moe_statics.", ".moe_statics."),
    // BERT.
    ("LayerNorm.weight", "LayerNorm.gamma"),
    ("LayerNorm.bias", "LayerNorm.beta"),
];

/// For the tensor of all experts, by the end of its name: the tensors of one expert, whose rows
/// follow each other in it, by the names of either layout.
const EXPERTS: [(&str, [&[&str]; 2]); 2] = [
    (
        ".experts.gate_up_proj",
        [&["gate_proj", "up_proj"], &["w1", "w3"]],
    ),
    (".experts.down_proj", [&["down_proj"], &["w2"]]),
];

/// The numbers of 4 bits: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats
/// 1.0, section 5.3.3).
const FP4: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The ends of names of scales, which follow the name of a tensor of 8 bits: DeepSeek's and Qwen's,
/// and those of compressed-tensors.
const SCALES: [&str; 2] = ["_scale_inv", "_scale"];
/// A matrix of whole numbers of bitsandbytes (Dettmers et al., 2022, "LLM.int8()"): the name of the
/// largest magnitudes of rows beside that of the matrix, and the factor of a code.
const WHOLE: [&str; 2] = ["weight", "SCB"];
const OF_WHOLE: f32 = 7.874_016e-3;
/// Rows and columns of a block that shares a scale.
const BLOCK: u64 = 128;

/// A matrix of numbers of 8 bits. A number is the product of its code and of its block's scale.
#[derive(Clone)]
pub(super) struct EightBits {
    pub(super) codes: Piece,
    pub(super) scales: Piece,
    /// The types of codes and of scales.
    dtypes: [Dtype; 2],
    /// The factor of all scales.
    factor: f32,
    columns: u64,
    /// Rows and columns of a block.
    block: [u64; 2],
}

impl Tensors {
    /// Gives these names of a model a tensor, where the file has it in another form.
    pub(crate) fn add_published<'a>(&mut self, names: impl Iterator<Item = &'a str>) {
        let outer = self.outer_module();
        let missing = names.filter(|name| !self.has(name) || self.in_codes(name).is_some());
        let found = missing.filter_map(|name| {
            let others = self.others(name, outer.as_deref());
            let entry = others.iter().find_map(|other| self.found(other))?;
            Some((name.to_string(), entry))
        });
        let found: Vec<(String, Entry)> = found.collect();
        self.entries.extend(found);
    }

    /// The module that all tensors are in, if there is one: `module` of a model that PyTorch
    /// distributed, `_orig_mod` of one that it compiled.
    fn outer_module(&self) -> Option<String> {
        let first = |name: &str| name.split_once('.').map(|(first, _)| first.to_string());
        let outer = first(self.names().next()?)?;
        let start = format!("{outer}.");
        self.names()
            .all(|name| name.starts_with(&start))
            .then_some(outer)
    }

    /// Names that a tensor of a model may have in the file.
    fn others(&self, name: &str, outer: Option<&str>) -> Vec<String> {
        let mut others = vec![name.to_string()];
        if let Some(outer) = outer {
            others.push(format!("{outer}.{name}"));
        }
        // A file of a model without its head lacks the name of the model's body.
        if let Some((body, rest)) = name.split_once('.') {
            let start = format!("{body}.");
            if !self.names().any(|name| name.starts_with(&start)) {
                others.push(rest.to_string());
            }
        }
        for (in_model, in_file) in RENAMED {
            for i in 0..others.len() {
                if others[i].contains(in_model) {
                    others.push(others[i].replacen(in_model, in_file, 1));
                }
            }
        }
        others
    }

    /// A tensor of the file, or several that make up one.
    fn found(&self, name: &str) -> Option<Entry> {
        let whole = self
            .in_codes(name)
            .or_else(|| self.entries.get(name).cloned());
        whole
            .or_else(|| self.of_4_bits(name))
            .or_else(|| self.joined(name))
    }

    /// The tensor of all experts, if the file has one for each.
    fn joined(&self, name: &str) -> Option<Entry> {
        let mut forms = EXPERTS.iter().filter_map(|(end, forms)| {
            let layer = name.strip_suffix(end)?;
            forms.iter().find_map(|parts| {
                let of = |expert: usize| {
                    let part = |part: &&str| format!("{layer}.experts.{expert}.{part}.weight");
                    let found = parts.iter().map(|name| {
                        let (name, entry) = self.entries.get_key_value(&part(name))?;
                        self.in_codes(name).or_else(|| Some(entry.clone()))
                    });
                    found.collect::<Option<Vec<Entry>>>()
                };
                let experts: Vec<Vec<Entry>> = (0..).map_while(of).collect();
                let &[rows, columns] = &experts.first()?.first()?.shape[..] else {
                    return None;
                };
                let shape = vec![
                    experts.len() as u64,
                    rows.saturating_mul(parts.len() as u64),
                    columns,
                ];
                join(experts.concat(), shape)
            })
        });
        forms.next()
    }

    /// What would help if the file's type is not the model's.
    pub(super) fn help(&self, name: &str, dtype: Dtype) -> String {
        match dtype {
            Dtype::U8 if self.has(&format!("{name}.absmax")) => format!(
                "; a matrix of 4 bits is read if the file has all that bitsandbytes stores with \
                 it: {name}.absmax, {name}.quant_map, and {name}{}",
                super::four_bits::STATES[0]
            ),
            Dtype::F8_E4M3 | Dtype::F8_E5M2 => format!(
                "; a matrix of 8 bits is read if the file has {name}_scale_inv or {name}_scale: \
                 one floating-point number, one for each row, or one for each block of {BLOCK} x \
                 {BLOCK}"
            ),
            _ => String::new(),
        }
    }

    /// A matrix of codes under its own name.
    fn in_codes(&self, name: &str) -> Option<Entry> {
        self.of_8_bits(name).or_else(|| self.of_bitsandbytes(name))
    }

    /// A matrix of numbers of 8 bits, if it has scales: one, one for each row, or one for each
    /// block of 128 rows and 128 columns.
    fn of_8_bits(&self, name: &str) -> Option<Entry> {
        let codes = self.entries.get(name)?;
        let is_whole = codes.dtype == Dtype::I8;
        let is_code = is_whole || matches!(codes.dtype, Dtype::F8_E4M3 | Dtype::F8_E5M2);
        let (true, &[rows, columns]) = (is_code, &codes.shape[..]) else {
            return None;
        };
        let found = |end| self.entries.get(&format!("{name}{end}"));
        let of_whole = || {
            let module = name.strip_suffix(WHOLE[0]).filter(|_| is_whole)?;
            self.entries.get(&format!("{module}{}", WHOLE[1]))
        };
        let (scales, factor) = match of_whole() {
            Some(largest) => (largest, OF_WHOLE),
            None => (SCALES.iter().find_map(found)?, 1.0),
        };
        let block = match scales.shape[..] {
            [] | [1] => [rows, columns],
            [n] => [shared(rows, n)?, columns],
            [n, m] => [shared(rows, n)?, shared(columns, m)?],
            _ => return None,
        };
        let is_scale = matches!(scales.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16);
        match (&codes.stored, &scales.stored) {
            (Stored::Pieces(of), Stored::Pieces(scale)) if is_scale => Some(Entry {
                dtype: Dtype::F32,
                shape: codes.shape.clone(),
                stored: Stored::EightBits(vec![EightBits {
                    codes: of.first()?.clone(),
                    scales: scale.first()?.clone(),
                    dtypes: [codes.dtype, scales.dtype],
                    factor,
                    columns,
                    block,
                }]),
            }),
            _ => None,
        }
    }

    /// A tensor of numbers of 4 bits, as gpt-oss stores experts: codes of `[experts, out, in / 32,
    /// 16]` and scales of `[experts, out, in / 32]` are a tensor of `[experts, in, out]`.
    fn of_4_bits(&self, name: &str) -> Option<Entry> {
        let [codes, scales] = ["blocks", "scales"].map(|part| {
            let entry = self.entries.get(&format!("{name}_{part}"))?;
            let Stored::Pieces(pieces) = &entry.stored else {
                return None;
            };
            (entry.dtype == Dtype::U8).then_some((&entry.shape[..], pieces.first()?))
        });
        let (codes, scales) = (codes?, scales?);
        let &[experts, rows, groups, 16] = codes.0 else {
            return None;
        };
        (*scales.0 == [experts, rows, groups]).then(|| Entry {
            dtype: Dtype::BF16,
            shape: vec![experts, groups.saturating_mul(32), rows],
            stored: Stored::Mxfp4 {
                codes: codes.1.clone(),
                scales: scales.1.clone(),
            },
        })
    }
}

/// Tensors of one type and shape behind each other.
fn join(parts: Vec<Entry>, shape: Vec<u64>) -> Option<Entry> {
    let mut parts = parts.into_iter();
    let first = parts.next()?;
    let (dtype, of_part, mut stored) = (first.dtype, first.shape, first.stored);
    for part in parts {
        if (part.dtype, &part.shape) != (dtype, &of_part) {
            return None;
        }
        match (&mut stored, part.stored) {
            (Stored::Pieces(all), Stored::Pieces(more)) => all.extend(more),
            (Stored::EightBits(all), Stored::EightBits(more)) => all.extend(more),
            _ => return None,
        }
    }
    Some(Entry {
        dtype,
        shape,
        stored,
    })
}

/// The numbers of [`Stored::Mxfp4`] in bf16, which has all of them. Two codes are in a byte, the
/// first in its lower half.
pub(super) fn numbers_of_4_bits(shape: &[u64], codes: &[u8], scales: &[u8]) -> Vec<u8> {
    let &[_, columns, rows] = shape else {
        return vec![];
    };
    let [columns, rows] = [columns, rows].map(|size| size as usize);
    let mut numbers = vec![bf16::ZERO; 2 * codes.len()];
    for (group, &scale) in scales.iter().enumerate() {
        let (row, start) = (group / (columns / 32), group % (columns / 32) * 32);
        let (expert, row) = (row / rows, row % rows);
        let scale = 2f32.powi(i32::from(scale) - 127);
        for i in 0..32 {
            let code = codes[group * 16 + i / 2] >> (i % 2 * 4) & 15;
            let size = FP4[usize::from(code & 7)] * scale;
            let number = if code & 8 == 0 { size } else { -size };
            numbers[(expert * columns + start + i) * rows + row] = bf16::from_f32(number);
        }
    }
    numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect()
}

/// How many of `n` rows or columns share a scale, if there are so many scales.
fn shared(n: u64, scales: u64) -> Option<u64> {
    match scales {
        1 => Some(n),
        _ if scales == n => Some(1),
        _ => (n.div_ceil(BLOCK) == scales).then_some(BLOCK),
    }
}

impl EightBits {
    /// Appends the matrix in f32.
    pub(super) fn decode(&self, codes: &[u8], scales: &[u8], to: &mut Vec<u8>) {
        let scales: Vec<f32> = match self.dtypes[1] {
            Dtype::F32 => of_bytes(scales, f32::from_le_bytes),
            Dtype::BF16 => of_bytes(scales, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            _ => of_bytes(scales, |bytes| f16::from_le_bytes(bytes).to_f32()),
        };
        let number = match self.dtypes[0] {
            Dtype::F8_E4M3 => number_of_e4m3,
            Dtype::I8 => |code| f32::from(code as i8),
            // The upper half of an f16.
            _ => |code| f16::from_bits(u16::from(code) << 8).to_f32(),
        };
        let numbers: Vec<f32> = (0..=u8::MAX).map(number).collect();
        let [height, width] = self.block.map(|size| size.max(1) as usize);
        let columns = self.columns.max(1) as usize;
        for (row, codes) in codes.chunks(columns).enumerate() {
            let first = row / height * columns.div_ceil(width);
            for (codes, scale) in codes.chunks(width).zip(&scales[first..]) {
                for &code in codes {
                    let number = numbers[usize::from(code)] * (scale * self.factor);
                    to.extend_from_slice(&number.to_le_bytes());
                }
            }
        }
    }
}

pub(super) fn of_bytes<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f32) -> Vec<f32> {
    bytes.as_chunks().0.iter().copied().map(number).collect()
}

/// A sign, four bits of exponent, three of mantissa; the largest code is no number (Micikevicius et
/// al., FP8 formats for deep learning, section 3).
fn number_of_e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = match (exponent, code & 7) {
        (0, _) => mantissa * 2f32.powi(-9),
        (15, 7) => f32::NAN,
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if code & 128 == 0 { size } else { -size }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Failure;
    use artifact::{DType, Operand, Place};
    use checkpoint::{Part, Tensor, tensors::write_all};
    use std::fs::{self, File};

    /// A file of tensors of some types and shapes.
    fn file_of(
        file: &str,
        tensors: &[(&str, DType, &[u64])],
        bytes: impl Fn(usize, &mut [u8]),
    ) -> Tensors {
        let path = std::env::temp_dir().join(format!("lighterage-{file}-{}", std::process::id()));
        let list: Vec<Tensor> = tensors
            .iter()
            .map(|&(name, dtype, shape)| Tensor {
                name: name.to_string(),
                dtype,
                shape: shape.to_vec(),
                part: Part::Model,
            })
            .collect();
        write_all(
            &mut File::create(&path).unwrap(),
            &list,
            &mut |number, _, to| {
                bytes(number, to);
                Ok(())
            },
        )
        .unwrap();
        let tensors = Tensors::open(&path).unwrap();
        fs::remove_file(path).unwrap();
        tensors
    }

    /// A file of bytes; those of each tensor are its number.
    fn file(name: &str, names: &[&str]) -> Tensors {
        let tensors: Vec<_> = names
            .iter()
            .map(|&name| (name, DType::U8, &[1, 2][..]))
            .collect();
        file_of(name, &tensors, |number, bytes| bytes.fill(number as u8))
    }

    fn f32s(tensors: &Tensors, name: &str, shape: &[u64]) -> Vec<f32> {
        let operand = Operand {
            dtype: DType::F32,
            shape: shape.to_vec(),
            place: Place { pool: 0, offset: 0 },
        };
        of_bytes(&tensors.get(name, &operand).unwrap(), f32::from_le_bytes)
    }

    fn bytes(tensors: &Tensors, name: &str, shape: &[u64]) -> Vec<u8> {
        let operand = Operand {
            dtype: DType::U8,
            shape: shape.to_vec(),
            place: Place { pool: 0, offset: 0 },
        };
        tensors.get(name, &operand).unwrap()
    }

    #[test]
    fn a_model_may_be_inside_of_another() {
        let mut tensors = file("inside", &["module.a.weight", "module.b.weight"]);
        tensors.add_published(["b.weight", "c.weight"].into_iter());
        assert_eq!(bytes(&tensors, "b.weight", &[1, 2]), [1, 1]);
        assert!(!tensors.has("c.weight"));
    }

    #[test]
    fn a_file_may_lack_the_name_of_the_body() {
        let mut tensors = file("body", &["h.0.weight", "wte.weight"]);
        let names = ["transformer.h.0.weight", "transformer.wte.weight"];
        tensors.add_published(names.into_iter());
        let read = names.map(|name| bytes(&tensors, name, &[1, 2]));
        assert_eq!(read, [[0, 0], [1, 1]]);
        // A file that has the body has all of it.
        let mut tensors = file("whole", &["a.weight", "weight"]);
        tensors.add_published(["b.weight", "a.a.weight"].into_iter());
        assert!(tensors.has("b.weight") && !tensors.has("a.a.weight"));
    }

    #[test]
    fn experts_lie_behind_each_other() {
        let parts = ["gate_proj", "up_proj"].map(|part| {
            [0, 1].map(|expert| format!("a.block_sparse_moe.experts.{expert}.{part}.weight"))
        });
        let names: Vec<&str> = parts.iter().flatten().map(String::as_str).collect();
        let mut tensors = file("experts", &names);
        tensors.add_published(["a.mlp.experts.gate_up_proj"].into_iter());
        let joined = bytes(&tensors, "a.mlp.experts.gate_up_proj", &[2, 2, 2]);
        assert_eq!(joined, [0, 0, 2, 2, 1, 1, 3, 3]);
    }

    #[test]
    fn blocks_of_8_bits_have_a_scale_each() {
        let list = [
            ("a.weight", DType::F8E4M3, &[129, 130][..]),
            ("a.weight_scale_inv", DType::F32, &[2, 2]),
            ("b.weight", DType::F8E5M2, &[2, 3]),
            ("b.weight_scale", DType::BF16, &[2, 1]),
            ("c.weight", DType::F8E4M3, &[1, 6]),
            ("c.weight_scale", DType::F32, &[]),
            ("d.weight", DType::F8E4M3, &[129, 1]),
            ("d.weight_scale", DType::F32, &[3, 1]),
        ];
        let mut tensors = file_of("eight", &list, |number, bytes| match number {
            0 => bytes.fill(0x38),
            1 => {
                let scales = [1f32, 2.0, 3.0, 4.0].map(f32::to_le_bytes);
                bytes.copy_from_slice(scales.as_flattened());
            }
            2 => bytes.copy_from_slice(&[0x3c, 0xbc, 0x7b, 0x3c, 0x01, 0x00]),
            3 => bytes.copy_from_slice(
                [0.5, 2.0]
                    .map(bf16::from_f32)
                    .map(|x| x.to_le_bytes())
                    .as_flattened(),
            ),
            4 => bytes.copy_from_slice(&[0x7e, 0xfe, 0x01, 0x08, 0x00, 0x7f]),
            5 => bytes.copy_from_slice(&1f32.to_le_bytes()),
            _ => bytes.fill(0),
        });
        tensors.add_published(["a.weight", "b.weight", "c.weight", "d.weight"].into_iter());
        let a = f32s(&tensors, "a.weight", &[129, 130]);
        let at = |row: usize, column: usize| a[row * 130 + column];
        assert_eq!([at(0, 0), at(127, 127), at(127, 128)], [1.0, 1.0, 2.0]);
        assert_eq!([at(128, 127), at(128, 129)], [3.0, 4.0]);
        let b = f32s(&tensors, "b.weight", &[2, 3]);
        assert_eq!(b, [0.5, -0.5, 28672.0, 2.0, 2f32.powi(-15), 0.0]);
        let c = f32s(&tensors, "c.weight", &[1, 6]);
        assert_eq!(c[..5], [448.0, -448.0, 2f32.powi(-9), 2f32.powi(-6), 0.0]);
        assert!(c[5].is_nan());
        // Not as many scales as rows or blocks of rows.
        let operand = Operand {
            dtype: DType::F32,
            shape: vec![129, 1],
            place: Place { pool: 0, offset: 0 },
        };
        let Err(Failure::Input(message)) = tensors.get("d.weight", &operand) else {
            panic!("numbers without scales were read");
        };
        assert!(
            message.contains("one for each block of 128 x 128"),
            "{message}"
        );
    }
}
