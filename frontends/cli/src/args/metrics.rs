//! The options of `train` about what it measures: files of metrics, and evaluation.

use clap::Args;
use std::path::PathBuf;

/// Files for metrics.
#[derive(Args, Debug)]
#[command(next_help_heading = "Metrics")]
pub(crate) struct MetricsArgs {
    /// Append one JSON object per step and per evaluation to a file
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) metrics: Option<PathBuf>,
    /// Write the metrics as events for TensorBoard to a folder
    #[arg(long, value_name = "DIR")]
    pub(crate) tensorboard: Option<PathBuf>,
}

/// Evaluation on held-out batches.
#[derive(Args, Debug)]
#[command(next_help_heading = "Evaluation")]
pub(crate) struct EvalArgs {
    /// Held-out data, of the same kind as the training data: files for --batches or for --tokens
    #[arg(long, value_name = "FILE|DIR", num_args = 1..)]
    pub(crate) eval: Vec<PathBuf>,
    /// The model to evaluate with, exported after model.eval(). It takes memory of its own. By
    /// default it is the one that is trained; where that has dropout or batch norm, the same in
    /// evaluation, if it is no .lit file
    #[arg(long, value_name = "EVAL.pt2|EVAL.lit", requires = "eval")]
    pub(crate) eval_model: Option<PathBuf>,
    /// Compute the mean loss on the held-out data after every N steps, and after the last one
    /// [default: after the last one]
    #[arg(long, value_name = "N", requires = "eval",
        value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) eval_every: Option<u64>,
    /// Use at most the first N batches of the held-out data
    #[arg(long, value_name = "N", requires = "eval",
        value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) eval_batches: Option<u64>,
    /// End the run when the evaluation loss has not fallen for N evaluations
    #[arg(long, value_name = "N", requires = "eval_every",
        value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) patience: Option<u64>,
}
