//! `lighterage import`: the graph as text.

use crate::args::ImportArgs;
use crate::data::save_atomically;
use crate::failure::Failure;
use crate::{model, out};

/// Runs the command.
pub(crate) fn run(args: &ImportArgs) -> Result<(), Failure> {
    let model = model::read(&args.model.model, &args.model.dim)?;
    let text = ir::text::print_graph(&model.graph);
    for unsupported in &model.unsupported {
        out::note(&format!("warning: {} (node {}): {}", unsupported.target, unsupported.node, unsupported.why));
    }
    match &args.output {
        Some(path) => save_atomically(path, &[text.as_bytes()]),
        None => {
            out::text(&text);
            Ok(())
        }
    }
}
