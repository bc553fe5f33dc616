//! Tensors that a published file has in another form than the model: under other names, a tensor
//! for each expert of a mixture, or experts as numbers of 4 bits. transformers and PyTorch have
//! changed the names of modules and kept those of files.

use super::{Entry, Stored, Tensors};
use half::bf16;
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

impl Tensors {
    /// Gives these names of a model a tensor, where the file has it in another form.
    pub(crate) fn add_published<'a>(&mut self, names: impl Iterator<Item = &'a str>) {
        let outer = self.outer_module();
        let missing = names.filter(|name| !self.has(name));
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
        if let Some(entry) = self.entries.get(name) {
            return Some(entry.clone());
        }
        self.of_4_bits(name).or_else(|| self.joined(name))
    }

    /// The tensor of all experts, if the file has one for each.
    fn joined(&self, name: &str) -> Option<Entry> {
        let mut forms = EXPERTS.iter().filter_map(|(end, forms)| {
            let layer = name.strip_suffix(end)?;
            forms.iter().find_map(|parts| {
                let of = |expert: usize| {
                    let part = |part: &&str| format!("{layer}.experts.{expert}.{part}.weight");
                    let found = parts.iter().map(|name| self.entries.get(&part(name)));
                    found.collect::<Option<Vec<&Entry>>>()
                };
                let experts: Vec<Vec<&Entry>> = (0..).map_while(of).collect();
                let &[rows, columns] = &experts.first()?.first()?.shape[..] else {
                    return None;
                };
                let shape = vec![
                    experts.len() as u64,
                    rows.saturating_mul(parts.len() as u64),
                    columns,
                ];
                join(&experts.concat(), shape)
            })
        });
        forms.next()
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
fn join(parts: &[&Entry], shape: Vec<u64>) -> Option<Entry> {
    let first = parts.first()?;
    let mut pieces = vec![];
    for part in parts {
        match &part.stored {
            Stored::Pieces(of) if part.dtype == first.dtype && part.shape == first.shape => {
                pieces.extend_from_slice(of);
            }
            _ => return None,
        }
    }
    Some(Entry {
        dtype: first.dtype,
        shape,
        stored: Stored::Pieces(pieces),
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

#[cfg(test)]
mod tests {
    use super::*;
    use artifact::{DType, Operand, Place};
    use checkpoint::{Part, Tensor, tensors::write_all};
    use std::fs::{self, File};

    /// A file of bytes; those of each tensor are its number.
    fn file(name: &str, names: &[&str]) -> Tensors {
        let path = std::env::temp_dir().join(format!("lighterage-{name}-{}", std::process::id()));
        let list: Vec<Tensor> = names
            .iter()
            .map(|name| Tensor {
                name: name.to_string(),
                dtype: DType::U8,
                shape: vec![1, 2],
                part: Part::Model,
            })
            .collect();
        write_all(
            &mut File::create(&path).unwrap(),
            &list,
            &mut |number, _, bytes| {
                bytes.fill(number as u8);
                Ok(())
            },
        )
        .unwrap();
        let tensors = Tensors::open(&path).unwrap();
        fs::remove_file(path).unwrap();
        tensors
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
}
