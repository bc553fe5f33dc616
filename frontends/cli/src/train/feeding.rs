//! The batches that steps are fed with.

use crate::args::DataArgs;
use crate::data::{Batches, Data, Packed, Source, Tokens, TokensOptions};
use crate::failure::Failure;
use crate::out;
use artifact::Operand;
use std::path::PathBuf;

/// The inputs of a batch: their names in data files, and their types.
pub(super) type Inputs = [(String, Operand)];

/// Opens what `--batches` or `--tokens` name.
/// A step takes `n` batches.
pub(super) fn training(args: &DataArgs, inputs: &Inputs, n: u64) -> Result<Data, Failure> {
    let seed = args.shuffle_data.then(|| args.data_seed.unwrap_or(0));
    if args.tokens.is_empty() {
        return batches(&args.batches, inputs, n, seed);
    }
    let (source, note) = tokens(args, &args.tokens, inputs)?;
    out::note(&note);
    Ok(Data::new(source, seed))
}

/// Opens held-out data of the same kind, in the order of its files.
pub(super) fn held_out(
    args: &DataArgs,
    paths: &[PathBuf],
    inputs: &Inputs,
    n: u64,
) -> Result<Data, Failure> {
    if args.tokens.is_empty() {
        return batches(paths, inputs, n, None);
    }
    let (source, _) = tokens(args, paths, inputs)?;
    Ok(Data::new(source, None))
}

/// Batches in files: those of the model, or those of a step, with the rows of `n` of them.
fn batches(paths: &[PathBuf], inputs: &Inputs, n: u64, seed: Option<u64>) -> Result<Data, Failure> {
    let error = match Batches::open(paths, inputs) {
        Ok(batches) => return Ok(Data::new(Box::new(batches), seed)),
        Err(error) => error,
    };
    let rows_of_all = |(name, operand): &(String, Operand)| {
        let mut operand = operand.clone();
        if let Some(rows) = operand.shape.first_mut() {
            *rows = rows.saturating_mul(n);
        }
        (name.clone(), operand)
    };
    let of_step: Vec<_> = inputs.iter().map(rows_of_all).collect();
    match Batches::open(paths, &of_step) {
        Ok(batches) if n > 1 => Ok(Data::new(Box::new(batches), seed).in_parts(n)),
        _ => Err(error),
    }
}

/// A stream of tokens, or the documents in it; and what the user should know of it.
fn tokens(
    args: &DataArgs,
    paths: &[PathBuf],
    inputs: &Inputs,
) -> Result<(Box<dyn Source>, String), Failure> {
    let options = TokensOptions {
        token_type: args.token_type,
        labels: args.token_labels,
        ids: args.ids.clone(),
        labels_input: args.labels_input.clone(),
        packs: args.pack.is_some(),
    };
    let tokens = Tokens::open(paths, &options, inputs)?;
    let Some(end) = args.pack else {
        let note = tokens.note();
        return Ok((Box::new(tokens), note));
    };
    let packed = Packed::of(tokens, end)?;
    let note = packed.note();
    Ok((Box::new(packed), note))
}
