//! The batches that steps are fed with.

use crate::args::DataArgs;
use crate::data::{Batches, Data, Tokens, TokensOptions};
use crate::failure::Failure;
use crate::out;
use artifact::Operand;
use std::path::PathBuf;

/// The inputs of a batch: their names in data files, and their types.
pub(super) type Inputs = [(String, Operand)];

/// Opens what `--batches` or `--tokens` name.
pub(super) fn training(args: &DataArgs, inputs: &Inputs) -> Result<Data, Failure> {
    let seed = args.shuffle_data.then(|| args.data_seed.unwrap_or(0));
    if args.tokens.is_empty() {
        let batches = Batches::open(&args.batches, inputs)?;
        return Ok(Data::new(Box::new(batches), seed));
    }
    let tokens = tokens(args, &args.tokens, inputs)?;
    out::note(&tokens.note());
    Ok(Data::new(Box::new(tokens), seed))
}

/// Opens held-out data of the same kind, in the order of its files.
pub(super) fn held_out(
    args: &DataArgs,
    paths: &[PathBuf],
    inputs: &Inputs,
) -> Result<Data, Failure> {
    if args.tokens.is_empty() {
        let batches = Batches::open(paths, inputs)?;
        return Ok(Data::new(Box::new(batches), None));
    }
    let tokens = tokens(args, paths, inputs)?;
    Ok(Data::new(Box::new(tokens), None))
}

fn tokens(args: &DataArgs, paths: &[PathBuf], inputs: &Inputs) -> Result<Tokens, Failure> {
    let options = TokensOptions {
        token_type: args.token_type,
        labels: args.token_labels,
        ids: args.ids.clone(),
        labels_input: args.labels_input.clone(),
    };
    Tokens::open(paths, &options, inputs)
}
