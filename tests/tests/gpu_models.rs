//! Steps of models for a GPU: every launch on the device has code in one module of PTX; every other
//! launch has code for this processor or the runtime's own kernel.

use artifact::{Artifact, CommandKind, MemorySpace, Sm, Target as Machine};
use codegen::kernels::Target;
use passes::cost::Roofline;
use passes::graph::optimizer::Optimizer;
use passes::pipeline::{self, Budget, Options};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A model's step, planned for an H100 whose link is slow enough that little is on the host.
fn step(name: &str, share: f64) -> Artifact {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data/models")
        .join(name)
        .join("joint_core.pt2");
    let model = torch::read(&path, &BTreeMap::new()).unwrap();
    let device = passes::devices::named("h100").unwrap();
    let options = Options {
        optimizer: Optimizer::AdamW,
        budget: Budget::Share(share),
        ..Options::default()
    };
    let costs = Roofline::new(&device);
    let compiled = pipeline::compile(model.graph, &options, &device, &costs, &mut |_| ()).unwrap();
    codegen::emit(&compiled, &BTreeMap::new(), Some(Target::SM_90)).unwrap()
}

#[test]
fn every_launch_on_a_gpu_has_code_for_it() {
    let models = [
        ("bert-tiny", 0.9),
        ("dropout-tiny", 0.6),
        ("gpt2-tiny", 0.6),
        ("llama-tiny", 1.0),
        ("moe-tiny", 0.8),
        ("resnet-tiny", 0.7),
    ];
    let mut on_the_host = 0;
    for (name, share) in models {
        let artifact = step(name, share);
        runtime::validate(&artifact).unwrap();
        let modules: Vec<usize> = (0..artifact.objects.len())
            .filter(|&i| artifact.objects[i].target == Machine::Gpu(Sm(90)))
            .collect();
        assert_eq!(modules, [0], "{name}");
        let text = String::from_utf8(artifact.objects[0].bytes.clone()).unwrap();
        assert_eq!(text.matches(".target").count(), 1, "{name}");
        let kernels = ptx::parse(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
        let symbols: BTreeSet<&str> = kernels.iter().map(|kernel| kernel.name()).collect();
        for command in &artifact.commands {
            let CommandKind::Launch { kernel, outs, .. } = &command.kind else {
                continue;
            };
            let kernel = &artifact.kernels[*kernel as usize];
            let on_gpu = kernel.code.as_ref().is_some_and(|code| code.object == 0);
            let pool = &artifact.pools[outs[0].place.pool as usize];
            assert_eq!(
                on_gpu,
                pool.space != MemorySpace::Host,
                "{name}: {}",
                kernel.op
            );
            on_the_host += usize::from(!on_gpu);
            let phases = kernel.code.iter().flat_map(|code| &code.phases);
            for phase in phases.filter(|_| on_gpu) {
                assert!(symbols.contains(&*phase.symbol), "{name}: {}", kernel.op);
                assert!(
                    phase.threads > 1 && phase.parts > 0,
                    "{name}: {}",
                    kernel.op
                );
            }
        }
    }
    assert!(on_the_host > 0, "no model has updates on the host");
}
