//! `lighterage alloc generate`: the trace of a training run that did not take place.

use crate::args::AllocGenerateArgs;
use crate::data::{check_writable, save_atomically};
use crate::failure::Failure;
use crate::out;
use crate::size::bytes;
use addresses::generate::Setup;
use addresses::stats::{Stats, stats};
use serde_json::json;
use trace::{POOL, Pool, events};

/// Runs the command.
pub(crate) fn run(args: &AllocGenerateArgs) -> Result<(), Failure> {
    if let Some(path) = &args.output {
        check_writable("--output", path)?;
    }
    let setup = setup(args);
    let trace = setup
        .trace()
        .map_err(|error| Failure::Input(format!("{}: {error}", args.model.name())))?;
    let pool = Pool {
        name: POOL.into(),
        trace,
        ..Pool::default()
    };
    let text = events::write(std::slice::from_ref(&pool));
    let Some(path) = &args.output else {
        out::text(&text);
        return Ok(());
    };
    save_atomically(path, &[text.as_bytes()])?;
    let Stats {
        blocks,
        live_peak_bytes,
        phases,
        ..
    } = stats(&pool.trace);
    if args.json {
        let json = json!({"model": args.model.name(), "buffers": blocks, "phases": phases,
            "live_peak_bytes": live_peak_bytes, "seed": args.seed});
        out::line(&json.to_string());
    } else {
        out::line(&format!(
            "{}: {blocks} requests in {phases} phases, at most {} alive at once",
            path.display(),
            bytes(live_peak_bytes)
        ));
    }
    Ok(())
}

/// The rank of the options.
fn setup(args: &AllocGenerateArgs) -> Setup {
    let shape = args.model.shape();
    Setup {
        shape,
        sequence: args.sequence.unwrap_or(shape.sequence),
        batch: args.micro_batch,
        micro_batches: args.micro_batches as usize,
        pipeline: args.pipeline.into(),
        stage: args.stage.into(),
        virtual_pipeline: args.virtual_pipeline.into(),
        tensor: args.tensor_parallel.into(),
        sequence_parallel: args.sequence_parallel,
        expert: args.expert_parallel.into(),
        recompute: args.recompute,
        zero: args.zero.into(),
        offload: args.offload,
        steps: args.steps.into(),
        evaluate: args.evaluate.into(),
        vary: args.vary,
        holds_collectives: args.hold_collectives,
        seed: args.seed,
    }
}
