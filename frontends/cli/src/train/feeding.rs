//! The batches that steps are fed with.

use super::buckets::Buckets;
use crate::args::DataArgs;
use crate::data::{Batches, Data, Documents, InRow, Packed, Source, Tokens, TokensOptions};
use crate::failure::Failure;
use crate::out;
use artifact::Operand;
use std::path::PathBuf;

/// The inputs of a batch: their names in data files, and their types.
pub(super) type Inputs = [(String, Operand)];

/// Opens what `--batches` or `--tokens` name.
pub(super) fn training(args: &DataArgs, buckets: &Buckets) -> Result<Data, Failure> {
    let seed = args.shuffle_data.then(|| args.data_seed.unwrap_or(0));
    if args.tokens.is_empty() {
        return batches(&args.batches, buckets, seed);
    }
    let (source, note) = tokens(args, &args.tokens, buckets)?;
    out::note(&note);
    Ok(Data::new(source, seed))
}

/// Opens held-out data of the same kind, in the order of its files.
pub(super) fn held_out(
    args: &DataArgs,
    paths: &[PathBuf],
    buckets: &Buckets,
) -> Result<Data, Failure> {
    if args.tokens.is_empty() {
        return batches(paths, buckets, None);
    }
    let (source, _) = tokens(args, paths, buckets)?;
    Ok(Data::new(source, None))
}

/// Batches in files: those of the model, or those of a step, with the rows of all its batches.
fn batches(paths: &[PathBuf], buckets: &Buckets, seed: Option<u64>) -> Result<Data, Failure> {
    let (inputs, n) = (buckets.inputs(), buckets.micro_batches());
    let error = match Batches::open(paths, inputs, buckets.varies()) {
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
    match Batches::open(paths, &of_step, buckets.varies()) {
        Ok(batches) if n > 1 && !buckets.vary_in_rows() => {
            Ok(Data::new(Box::new(batches), seed).in_parts(n))
        }
        _ => Err(error),
    }
}

/// A stream of tokens, or the documents in it; and what the user should know of it.
fn tokens(
    args: &DataArgs,
    paths: &[PathBuf],
    buckets: &Buckets,
) -> Result<(Box<dyn Source>, String), Failure> {
    let documents = match (args.pack, args.documents) {
        (Some(end), _) => Some((end, InRow::Several)),
        (_, Some(end)) => Some((end, InRow::One)),
        (None, None) => None,
    };
    let options = TokensOptions {
        token_type: args.token_type,
        column: args.token_column.clone(),
        labels: args.token_labels,
        ids: args.ids.clone(),
        labels_input: args.labels_input.clone(),
        documents: documents.map(|(_, in_row)| in_row),
    };
    let tokens = Tokens::open(paths, &options, buckets.inputs())?;
    match documents {
        Some((end, InRow::One)) => {
            let lengths = buckets.lengths(tokens.ids())?;
            let documents = Documents::of(tokens, end, &lengths)?;
            let note = documents.note();
            Ok((Box::new(documents), note))
        }
        _ if buckets.are_several() => Err(Failure::Input(
            "--tokens: sequences that are cut from a stream, and rows of --pack, have one length, \
             and the step has several (--buckets); --documents TOKEN takes a document in each row"
                .into(),
        )),
        Some((end, InRow::Several)) => {
            let packed = Packed::of(tokens, end)?;
            let note = packed.note();
            Ok((Box::new(packed), note))
        }
        None => {
            let note = tokens.note();
            Ok((Box::new(tokens), note))
        }
    }
}
