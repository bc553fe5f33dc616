//! The options of `train` about data: where batches come from, and in which order.

use super::named;
use crate::data::{Labels, TokenType};
use clap::Args;
use std::path::PathBuf;

/// Where batches come from.
#[derive(Args, Debug)]
#[command(next_help_heading = "Data")]
pub(crate) struct DataArgs {
    /// Files with batches, tensors batch.K.INPUT, or folders of them. A folder's files are read in
    /// the order of their names; numbers go on from file to file, or begin with 0 in each
    #[arg(long, value_name = "DATA.safetensors|DIR", num_args = 1..,
        required_unless_present = "tokens", conflicts_with = "tokens")]
    pub(crate) batches: Vec<PathBuf>,
    /// Files with a stream of tokens, from which sequences are cut: .bin is raw, .npy is a NumPy
    /// array of integers of one dimension, .parquet, .arrow and .feather have a column of integers
    /// or of lists of them
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub(crate) tokens: Vec<PathBuf>,
    /// The type of a token in .bin files, little-endian
    #[arg(long, default_value = "u16", hide_possible_values = true, value_name = "u16|u32",
        conflicts_with = "batches",
        value_parser = named(&TokenType::ALL, TokenType::name))]
    pub(crate) token_type: TokenType,
    /// The column of Parquet and Arrow files that has the tokens [default: input_ids, or the only
    /// one of integers or lists of integers]
    #[arg(long, value_name = "NAME", conflicts_with = "batches")]
    pub(crate) token_column: Option<String>,
    /// Labels of tokens. same: the ids, for a model that shifts them itself, as those of Hugging
    /// Face do. next: the token after each id, for a model that does not, such as nanoGPT
    #[arg(long, default_value = "same", hide_possible_values = true, value_name = "same|next",
        conflicts_with = "batches",
        value_parser = named(&Labels::ALL, Labels::name))]
    pub(crate) token_labels: Labels,
    /// Documents end with this token, and with each list of a column. They are packed into the
    /// model's sequences, first-fit decreasing; none sees another one. The model has an input
    /// position_ids, segment_ids or attention_mask
    #[arg(long, value_name = "TOKEN", conflicts_with = "batches",
        value_parser = clap::value_parser!(i64).range(0..))]
    pub(crate) pack: Option<i64>,
    /// Documents end with this token, and with each list of a column. Each is a row of its own,
    /// padded to the smallest of --buckets that holds it; a batch has documents of one bucket
    #[arg(long, value_name = "TOKEN", conflicts_with_all = ["batches", "pack"],
        value_parser = clap::value_parser!(i64).range(0..))]
    pub(crate) documents: Option<i64>,
    /// The model's input that gets the tokens [default: input_ids, ids, tokens, idx, x, inputs or
    /// input]
    #[arg(long, value_name = "NAME", conflicts_with = "batches")]
    pub(crate) ids: Option<String>,
    /// The model's input that gets the labels [default: labels, label, targets, target or y]
    #[arg(long, value_name = "NAME", conflicts_with = "batches")]
    pub(crate) labels_input: Option<String>,
    /// Read batches, or sequences of tokens, in a random order, another one in each epoch
    #[arg(long)]
    pub(crate) shuffle_data: bool,
    /// Seed of --shuffle-data [default: 0]
    #[arg(long, value_name = "SEED", requires = "shuffle_data")]
    pub(crate) data_seed: Option<u64>,
    /// Begin with the data of the step after this many, to go on with a run that was saved
    #[arg(long, value_name = "N", default_value_t = 0,
        value_parser = clap::value_parser!(u64).range(..1 << 40))]
    pub(crate) start_step: u64,
    /// How many batches are read before they are needed, while steps run
    #[arg(long, value_name = "N", default_value_t = 2,
        value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub(crate) prefetch: u16,
}
