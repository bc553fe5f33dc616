//! A real step in steady state allocates nothing, in any thread. The test is alone in its binary,
//! because the counter counts every thread.

#[path = "../../runtime/tests/counting/mod.rs"]
mod counting;

use counting::ALLOCATIONS;
use passes::cost::Roofline;
use passes::devices;
use passes::graph::optimizer::{HYPER, Optimizer};
use passes::pipeline::{self, Budget, Options};
use runtime::{Machine, StateInit};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;

/// Training of GPT-2 with half of the memory of `keep`, with swaps, reruns and hosted moments.
#[test]
fn a_real_step_allocates_nothing() {
    for level in ["core", "coarse"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join(format!("data/models/gpt2-tiny/joint_{level}.pt2"));
        let model = torch::read(&path, &BTreeMap::new()).unwrap();
        let device = devices::named("cpu").unwrap();
        let options = Options {
            optimizer: Optimizer::AdamW,
            budget: Budget::Share(0.65),
            ..Options::default()
        };
        let cost = Roofline::new(&device);
        let compiled =
            pipeline::compile(model.graph, &options, &device, &cost, &mut |_| ()).unwrap();
        assert!(
            !compiled.decided.decisions.cuts.is_empty()
                || !compiled.decided.decisions.hosted.is_empty()
        );
        let data = model
            .tensors
            .into_iter()
            .map(|(path, tensor)| (path, tensor.data));
        let artifact = codegen::emit(&compiled, &data.collect(), codegen::Target::host()).unwrap();
        let mut machine = Machine::new(artifact.clone(), runtime::Options::default()).unwrap();
        machine
            .initialise(&StateInit {
                seed: 1,
                std: Some(0.02),
            })
            .unwrap();
        let feed: Vec<(&str, Vec<u8>)> = artifact
            .inputs
            .iter()
            .map(|input| match &*input.name {
                HYPER => (
                    HYPER,
                    [1e-3f64, 0.9, 0.999, 1e-8, 0.01]
                        .iter()
                        .flat_map(|x| x.to_le_bytes())
                        .collect(),
                ),
                // Tokens and targets: zeros are valid.
                name => (name, vec![0; input.operand.bytes().unwrap() as usize]),
            })
            .collect();
        let mut loss = [0; 4];
        let mut step = || {
            for (name, bytes) in &feed {
                machine.write_input(name, bytes).unwrap();
            }
            machine.step().unwrap();
            machine.read_output_into("loss", &mut loss).unwrap();
        };
        // The first step may allocate: threads set up what they keep.
        step();
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        (0..3).for_each(|_| step());
        assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - before, 0, "{level}");
    }
}
