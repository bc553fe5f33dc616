//! Files: what training reads, batch by batch, and what commands write.

mod batches;
mod column;
mod documents;
mod feed;
mod files;
mod npy;
mod order;
mod packed;
mod span;
mod tensors;
mod tokens;

use crate::failure::Failure;
pub(crate) use batches::Batches;
pub(crate) use documents::Documents;
pub(crate) use feed::{Data, Feed};
pub(crate) use files::{check_writable, file_size, read_whole, save_atomically};
pub(crate) use order::Order;
pub(crate) use packed::{IGNORED, Packed};
pub(crate) use tensors::{Tensors, type_name};
pub(crate) use tokens::{InRow, LABELS, Labels, TokenType, Tokens, TokensOptions};

/// The value of an input for one batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Value {
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: Vec<u8>,
}

/// The values of the model's inputs, in their order, for one batch.
pub(crate) type Batch = Vec<Value>;

/// What training reads. A source has units, which may be read in any order; a batch consists of
/// one or several.
pub(crate) trait Source: Send {
    /// The number of units: batches of a file with batches, sequences of a stream of tokens.
    fn units(&self) -> u64;

    /// The number of units of a batch, at least 1.
    fn units_per_batch(&self) -> u64;

    /// Which of the model's inputs have rows, a sample in each.
    fn with_rows(&self) -> Vec<bool>;

    /// A batch of these units.
    fn batch(&self, units: &[u64]) -> Result<Batch, Failure>;
}
