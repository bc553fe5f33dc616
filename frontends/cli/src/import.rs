//! `lighterage import`: the graph as text.

use crate::args::ImportArgs;
use crate::data::{check_writable, save_atomically};
use crate::failure::Failure;
use crate::{model, out};
use passes::graph::autodiff;

/// The largest number of listed calls without a kernel.
const NAMED: usize = 20;

/// Runs the command.
pub(crate) fn run(args: &ImportArgs) -> Result<(), Failure> {
    if let Some(path) = &args.output {
        check_writable("--output", path)?;
    }
    let mut model = model::read(&args.model.model, &args.model.reading, &args.forward)?;
    if args.forward.differentiate {
        let differentiated = autodiff::run(&mut model.graph, true);
        differentiated.map_err(|e| Failure::Input(e.to_string()))?;
    }
    let text = ir::text::print_graph(&model.graph);
    for unsupported in model.unsupported.iter().take(NAMED) {
        out::note(&format!(
            "warning: {} (node {}): {}",
            unsupported.target, unsupported.node, unsupported.why
        ));
    }
    if NAMED < model.unsupported.len() {
        out::note(&format!(
            "warning: and {} more without a kernel",
            model.unsupported.len() - NAMED
        ));
    }
    match &args.output {
        Some(path) => save_atomically(path, &[text.as_bytes()]),
        None => {
            out::text(&text);
            Ok(())
        }
    }
}
