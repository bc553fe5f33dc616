//! Streams of tokens in files, from which sequences of the model's length are cut. The files follow
//! each other without a gap; sequence `i` begins with token `i` times the length.

use super::files::Input;
use super::span::{Integer, Part, Span, none};
use super::tensors::{dtype_name, type_name};
use super::{Batch, Source, Value, column, npy};
use crate::failure::Failure;
use artifact::{DType, Operand};
use std::path::{Path, PathBuf};

ir::named! {
    /// The type of a token in a `.bin` file.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) enum TokenType {
        /// 16 bits, as nanoGPT writes them.
        U16 = "u16",
        /// 32 bits, for vocabularies of more than 65,536 tokens.
        U32 = "u32",
    }
}

ir::named! {
    /// What labels are.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub(crate) enum Labels {
        /// The ids: the model shifts them, as those of Hugging Face do.
        Same = "same",
        /// The token after each id.
        Next = "next",
    }
}

/// Names of the input with the ids, in the order in which they are looked for.
const IDS: [&str; 7] = ["input_ids", "ids", "tokens", "idx", "x", "inputs", "input"];
/// Names of the input with the labels.
pub(crate) const LABELS: [&str; 5] = ["labels", "label", "targets", "target", "y"];

/// Names of the input with each token's position in its document.
const POSITIONS: [&str; 2] = ["position_ids", "positions"];
/// Names of the input with each token's document.
const SEGMENTS: [&str; 4] = ["segment_ids", "segments", "document_ids", "seq_idx"];
/// Names of the input that says which tokens a token sees.
const MASKS: [&str; 2] = ["attention_mask", "mask"];

/// How tokens become inputs.
#[derive(Clone, Debug)]
pub(crate) struct TokensOptions {
    /// The tokens of `.bin` files.
    pub(crate) token_type: TokenType,
    /// The column of Parquet and Arrow files, if it is not the usual one.
    pub(crate) column: Option<String>,
    /// What labels are.
    pub(crate) labels: Labels,
    /// The input with the ids, if its name is not a usual one.
    pub(crate) ids: Option<String>,
    /// The input with the labels, if its name is not a usual one.
    pub(crate) labels_input: Option<String>,
    /// Whether sequences consist of documents: one, or several.
    pub(crate) documents: Option<InRow>,
}

/// The documents in a sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InRow {
    One,
    Several,
}

/// An input of the model.
pub(super) struct Slot {
    name: String,
    dtype: DType,
    shape: Vec<u64>,
    pub(super) role: Role,
}

impl Slot {
    /// 1 for labels that are the next tokens, else 0.
    fn shift(&self) -> usize {
        usize::from(self.role == Role::Labels(Labels::Next))
    }
}

/// What an input gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    Ids,
    Labels(Labels),
    /// The position of each token in its document.
    Positions,
    /// The number of each token's document in its row.
    Segments,
    /// Which tokens a token sees: those of its document up to itself.
    Mask,
    /// Which tokens are of documents.
    Attended,
}

/// A stream of tokens.
pub(crate) struct Tokens {
    parts: Vec<Part>,
    pub(super) slots: Vec<Slot>,
    /// Tokens of a sequence.
    pub(super) length: u64,
    /// Sequences of a batch.
    pub(super) rows: u64,
    sequences: u64,
}

impl Tokens {
    /// Opens files for a model's inputs of one batch. An error if they do not hold a batch.
    pub(crate) fn open(
        paths: &[PathBuf],
        options: &TokensOptions,
        inputs: &[(String, Operand)],
    ) -> Result<Tokens, Failure> {
        let (slots, rows, length) = slots(options, inputs)?;
        let mut parts: Vec<Part> = vec![];
        for path in paths {
            let part = part(Input::open(path)?, options)?;
            let before = parts.last().map_or(0, |part| part.end);
            let end = before.checked_add(part.span.count).ok_or_else(|| {
                Failure::Input(format!(
                    "{}: more tokens than 64 bits count",
                    path.display()
                ))
            })?;
            parts.push(Part { end, ..part });
        }

        let total = parts.last().map_or(0, |part| part.end);
        let shift = slots.iter().map(|slot| slot.shift() as u64).max();
        let shift = shift.unwrap_or(0);
        let sequences = total.saturating_sub(shift) / length;
        if sequences < rows && options.documents.is_none() {
            let needed = rows.saturating_mul(length).saturating_add(shift);
            let files: Vec<String> = paths.iter().map(|p| p.display().to_string()).collect();
            return Err(Failure::Input(format!(
                "{}: {total} tokens, and a batch of {rows} sequences of {length} needs {needed}",
                files.join(", ")
            )));
        }
        Ok(Tokens {
            parts,
            slots,
            length,
            rows,
            sequences,
        })
    }

    /// What was found, for the user: a wrong choice of inputs or labels must show.
    pub(crate) fn note(&self) -> String {
        format!(
            "note: {}: {} batches of {} sequences of {}; {}",
            self.amount(),
            self.sequences / self.rows,
            self.rows,
            self.length,
            self.inputs()
        )
    }

    /// The name of the input with the ids.
    pub(crate) fn ids(&self) -> &str {
        let ids = self.slots.iter().find(|slot| slot.role == Role::Ids);
        ids.map_or("", |slot| &slot.name)
    }

    /// The number of all tokens.
    pub(super) fn total(&self) -> u64 {
        self.parts.last().map_or(0, |part| part.end)
    }

    /// The positions where documents end, as far as files say them, ascending; some more than once.
    pub(super) fn documents(&self) -> impl Iterator<Item = u64> {
        let parts = self.parts.iter().filter(|part| !part.documents.is_empty());
        let ends = parts.flat_map(|part| {
            // No document goes on from the file before.
            let start = part.end - part.span.count;
            let ends = part.documents.iter().map(move |end| start + end);
            std::iter::once(start).chain(ends)
        });
        ends.filter(|&end| end > 0)
    }

    /// `1000 tokens in 2 files`.
    pub(super) fn amount(&self) -> String {
        let files = match self.parts.len() {
            1 => "1 file".to_string(),
            n => format!("{n} files"),
        };
        format!("{} tokens in {files}", self.total())
    }

    /// What each input gets.
    pub(super) fn inputs(&self) -> String {
        let inputs = self.slots.iter().map(|slot| {
            let what = match slot.role {
                Role::Ids | Role::Labels(Labels::Same) => "tokens",
                Role::Labels(Labels::Next) => "next tokens",
                Role::Positions => "positions in documents",
                Role::Segments => "numbers of documents",
                Role::Mask => "earlier tokens of the document",
                Role::Attended => "tokens of the document",
            };
            format!("{} = {what}", slot.name)
        });
        inputs.collect::<Vec<_>>().join(", ")
    }

    /// The inputs of a batch from their bytes.
    pub(super) fn values(&self, bytes: Vec<Vec<u8>>) -> Batch {
        let value = |(slot, bytes): (&Slot, Vec<u8>)| Value {
            shape: slot.shape.clone(),
            bytes,
        };
        self.slots.iter().zip(bytes).map(value).collect()
    }

    /// Reads tokens from a position in the stream, across the borders of files.
    pub(super) fn read(&self, mut from: u64, count: u64) -> Result<Vec<i64>, Failure> {
        let mut tokens = Vec::with_capacity(count as usize);
        let end = from + count;
        while from < end {
            let at = self.parts.partition_point(|part| part.end <= from);
            let Some(part) = self.parts.get(at) else {
                let why = "a sequence is beyond the last token";
                return Err(Failure::Bug(why.into()));
            };
            let Integer { bytes, .. } = part.span.integer;
            let until = part.end.min(end);
            let skipped = from - (part.end - part.span.count);
            let start = part.span.start + skipped * bytes as u64;
            let length = (until - from) as usize * bytes;
            let path = part.input.path().display();
            let read = part.input.read(start, length).map_err(|e| {
                Failure::System(format!("{path}: token {skipped} cannot be read: {e}"))
            })?;
            for (number, token) in (skipped..).zip(read.chunks_exact(bytes)) {
                tokens.push(part.span.integer.value(token).ok_or_else(|| {
                    Failure::Input(format!("{path}: token {number} is larger than 63 bits"))
                })?);
            }
            from = until;
        }
        Ok(tokens)
    }
}

impl Source for Tokens {
    fn units(&self) -> u64 {
        self.sequences
    }

    fn units_per_batch(&self) -> u64 {
        self.rows
    }

    fn with_rows(&self) -> Vec<bool> {
        vec![true; self.slots.len()]
    }

    fn batch(&self, units: &[u64]) -> Result<Batch, Failure> {
        let shift = self.slots.iter().map(Slot::shift).max().unwrap_or(0);
        let mut inputs = vec![vec![]; self.slots.len()];
        for &unit in units {
            let tokens = self.read(unit * self.length, self.length + shift as u64)?;
            for (slot, bytes) in self.slots.iter().zip(&mut inputs) {
                let row = &tokens[slot.shift()..][..self.length as usize];
                write_row(row, slot, bytes)?;
            }
        }
        Ok(self.values(inputs))
    }
}

/// Appends tokens in the type of an input.
pub(super) fn write_row(row: &[i64], slot: &Slot, bytes: &mut Vec<u8>) -> Result<(), Failure> {
    if slot.dtype == DType::Bool {
        bytes.extend(row.iter().map(|&token| u8::from(token != 0)));
        return Ok(());
    }
    let width = integer_bytes(slot.dtype).unwrap_or(8);
    let signed = slot.dtype != DType::U8;
    let bits = 8 * width as u32 - u32::from(signed);
    for &token in row {
        let lowest = if signed { -1 } else { 0 };
        if bits < u64::BITS - 1 && !(lowest..=0).contains(&(token >> bits)) {
            let (name, dtype) = (&slot.name, dtype_name(slot.dtype));
            return Err(Failure::Input(format!(
                "token {token} does not fit into the input {name}, which is {dtype}"
            )));
        }
        bytes.extend_from_slice(&token.to_le_bytes()[..width]);
    }
    Ok(())
}

/// The bytes of an integer type; `None` for other types.
fn integer_bytes(dtype: DType) -> Option<usize> {
    match dtype {
        DType::U8 | DType::I8 => Some(1),
        DType::I16 => Some(2),
        DType::I32 => Some(4),
        DType::I64 => Some(8),
        DType::Bool
        | DType::F16
        | DType::BF16
        | DType::F32
        | DType::F64
        | DType::F8E4M3
        | DType::F8E5M2 => None,
    }
}

/// What each input gets, the sequences of a batch, and their length.
fn slots(
    options: &TokensOptions,
    inputs: &[(String, Operand)],
) -> Result<(Vec<Slot>, u64, u64), Failure> {
    let ids = find(inputs, ("--ids", options.ids.as_deref()), &IDS)?;
    let has = || {
        let types = inputs
            .iter()
            .map(|(name, o)| format!("{name} {}", shown(o)));
        types.collect::<Vec<_>>().join(", ")
    };
    let Some((ids_name, first)) = ids else {
        return Err(Failure::Input(format!(
            "--tokens: none of the model's inputs is called {}; it has {}; name the one with the \
             ids: --ids NAME",
            IDS[..3].join(", "),
            has()
        )));
    };
    let labels = ("--labels-input", options.labels_input.as_deref());
    let labels = find(inputs, labels, &LABELS)?;

    let mut slots = vec![];
    for (name, operand) in inputs {
        let is_labels = labels.is_some_and(|(labels, _)| labels == name);
        let of_documents = options.documents.and_then(|in_row| {
            let role = role_in_documents(name)?;
            // A document alone in its row needs a mask of no pairs.
            let is_row = role == Role::Mask && operand.shape == first.shape;
            let is_alone = is_row && in_row == InRow::One;
            Some(if is_alone { Role::Attended } else { role })
        });
        let role = if name == ids_name {
            Role::Ids
        } else if is_labels {
            Role::Labels(options.labels)
        } else if let Some(role) = of_documents {
            role
        } else {
            return Err(Failure::Input(format!(
                "--tokens: no values for the input {name} {}: tokens are values for ids and \
                 labels; use --batches, or export the model without it (a wrong guess? --ids, \
                 --labels-input{})",
                shown(operand),
                if role_in_documents(name).is_some() {
                    ", --pack, --documents"
                } else {
                    ""
                }
            )));
        };
        if role == Role::Mask {
            check_mask(name, operand, first)?;
        } else if !holds(operand.dtype, role) || operand.shape != first.shape {
            return Err(Failure::Input(format!(
                "--tokens: the input {name} is {}; ids and labels are integers of one shape",
                shown(operand)
            )));
        }
        slots.push(Slot {
            name: name.clone(),
            dtype: operand.dtype,
            shape: operand.shape.clone(),
            role,
        });
    }
    let sees_documents = |slot: &Slot| !matches!(slot.role, Role::Ids | Role::Labels(_));
    if options.documents == Some(InRow::Several) && !slots.iter().any(sees_documents) {
        return Err(Failure::Input(format!(
            "--pack: documents in a row would see each other, because none of the model's inputs \
             says where they begin; it has {}; export it with an input position_ids or segment_ids \
             of the ids' shape, or with attention_mask bool[rows,1,length,length]; a config.json \
             gets both with --packed",
            has()
        )));
    }
    let (&length, rows) = first.shape.split_last().unwrap_or((&0, &[]));
    let rows = rows.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
    // A shape whose bytes do not fit into 64 bits has no batch either.
    let rows = rows.filter(|_| first.bytes().is_some()).unwrap_or(0);
    if rows == 0 || length == 0 {
        return Err(Failure::Input(format!(
            "--tokens: the input {ids_name} is {}, which holds no sequences",
            shown(first)
        )));
    }
    Ok((slots, rows, length))
}

/// Whether an input of this type can hold its values.
fn holds(dtype: DType, role: Role) -> bool {
    integer_bytes(dtype).is_some() || (role == Role::Attended && dtype == DType::Bool)
}

/// What an input with a usual name gets if sequences consist of documents.
fn role_in_documents(name: &str) -> Option<Role> {
    let roles: [(&[&str], Role); 3] = [
        (&POSITIONS, Role::Positions),
        (&SEGMENTS, Role::Segments),
        (&MASKS, Role::Mask),
    ];
    let found = roles.iter().find(|(names, _)| names.contains(&name));
    found.map(|&(_, role)| role)
}

/// A mask has a number for each two tokens of a row.
fn check_mask(name: &str, operand: &Operand, ids: &Operand) -> Result<(), Failure> {
    let (&length, rows) = ids.shape.split_last().unwrap_or((&0, &[]));
    let rows: u64 = rows.iter().product();
    let fits = [vec![rows, 1, length, length], vec![rows, length, length]];
    if operand.dtype == DType::Bool && fits.contains(&operand.shape) {
        return Ok(());
    }
    Err(Failure::Input(format!(
        "--pack: the input {name} is {}; a mask that keeps documents apart is \
         bool[{rows},1,{length},{length}]",
        shown(operand)
    )))
}

/// The input that an option names, or the first with a usual name.
fn find<'a>(
    inputs: &'a [(String, Operand)],
    (option, given): (&str, Option<&str>),
    usual: &[&str],
) -> Result<Option<(&'a str, &'a Operand)>, Failure> {
    let named = |wanted: &str| {
        let found = inputs.iter().find(|(name, _)| name == wanted);
        found.map(|(name, operand)| (name.as_str(), operand))
    };
    let Some(given) = given else {
        return Ok(usual.iter().find_map(|name| named(name)));
    };
    let found = named(given).ok_or_else(|| {
        let names: Vec<&str> = inputs.iter().map(|(name, _)| name.as_str()).collect();
        let names = names.join(", ");
        Failure::Input(format!(
            "{option}: the model has no input {given}; it has {names}"
        ))
    })?;
    Ok(Some(found))
}

fn shown(operand: &Operand) -> String {
    type_name(&dtype_name(operand.dtype), &operand.shape)
}

/// The tokens of a file. The end of its name says what it is; a pipe has raw tokens.
fn part(input: Input, options: &TokensOptions) -> Result<Part, Failure> {
    let path = input.path();
    let ending = path.extension().and_then(|ending| ending.to_str());
    let is_pipe = path.starts_with("/dev") || path.starts_with("/proc");
    let span = match ending {
        Some("npy") => npy::span(&input)?,
        Some("bin") => raw(&input, options.token_type)?,
        None if is_pipe => raw(&input, options.token_type)?,
        Some("parquet" | "arrow" | "arrows" | "feather" | "ipc") => {
            let with_documents = options.documents.is_some();
            return column::part(&input, options.column.as_deref(), with_documents);
        }
        _ => return Err(unknown(path, ending)),
    };
    match span.count {
        0 => Err(none(path)),
        _ => Ok(Part::of(input, span, vec![])),
    }
}

fn unknown(path: &Path, ending: Option<&str>) -> Failure {
    let help = match ending {
        Some("safetensors") => "; a safetensors file with batches is for --batches",
        _ => "",
    };
    Failure::Input(format!(
        "{}: token files are .bin (raw, see --token-type), .npy, .parquet or .arrow{help}",
        path.display()
    ))
}

/// A file of nothing but tokens.
fn raw(input: &Input, token_type: TokenType) -> Result<Span, Failure> {
    let integer = match token_type {
        TokenType::U16 => Integer::new(2, false),
        TokenType::U32 => Integer::new(4, false),
    };
    let (length, bytes) = (input.length(), integer.bytes as u64);
    if !length.is_multiple_of(bytes) {
        return Err(Failure::Input(format!(
            "{}: {length} bytes are not a whole number of {} tokens; is it cut, or is --token-type \
             another?",
            input.path().display(),
            token_type.name()
        )));
    }
    Ok(Span {
        start: 0,
        count: length / bytes,
        integer,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_an_input_cannot_hold_are_refused() {
        let write = |token: i64, dtype| {
            let slot = Slot {
                name: "ids".into(),
                dtype,
                shape: vec![1],
                role: Role::Ids,
            };
            let mut bytes = vec![];
            write_row(&[token], &slot, &mut bytes).map(|()| bytes).ok()
        };
        assert_eq!(write(255, DType::U8), Some(vec![255]));
        assert_eq!(write(256, DType::U8), None);
        assert_eq!(write(-1, DType::U8), None);
        assert_eq!(write(-100, DType::I8), Some(vec![156]));
        assert_eq!(write(128, DType::I8), None);
        assert_eq!(write(32_767, DType::I16), Some(vec![255, 127]));
        assert_eq!(write(32_768, DType::I16), None);
        assert_eq!(
            write(i64::MIN, DType::I64),
            Some(i64::MIN.to_le_bytes().into())
        );
    }
}
