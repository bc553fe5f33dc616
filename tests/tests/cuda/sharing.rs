//! Steps of two sizes that take turns on the memory of a GPU.

use super::machine::{none, standin};
use super::watched::Watch;
use artifact::Artifact;
use codegen::{Data, Target};
use lighterage_tests::evaluate::Tensors;
use lighterage_tests::{generate, run};
use passes::cost::Roofline;
use passes::devices;
use passes::graph::optimizer::Optimizer;
use passes::pipeline::{self, Budget, Compiled, Options};
use runtime::{Cuda, CudaOptions, Machine, Steps};

/// A step on batches of some rows. Its numbers stay small, so that any order of sums is exact.
fn graph(rows: u64) -> ir::Graph {
    let text = format!(
        r#"graph mlp {{
            input  %x : f32[{rows},8]
            state  param %w -> %w : f32[8,8] "fc.weight"
            fwd fc    %h = matmul %x, %w ta=false tb=false : f32[{rows},8]
            fwd loss  %loss = sum %h dims=[0,1] keepdim=false : f32[]
            bwd loss  %dh = full dtype=f32 shape=[{rows},8] value=1.0 : f32[{rows},8]
            bwd fc    %dw = matmul %x, %dh ta=true tb=false : f32[8,8]
            output loss = %loss
            gradient "fc.weight" = %dw
        }}"#
    );
    ir::text::parse_graph(&text).unwrap()
}

fn options(budget: Budget) -> Options {
    Options {
        optimizer: Optimizer::SgdMomentum,
        budget,
        ..Options::default()
    }
}

fn compiled(rows: u64, options: &Options) -> Compiled {
    let device = devices::named("h100").unwrap();
    let cost = Roofline::new(&device);
    pipeline::compile(graph(rows), options, &device, &cost, &mut |_| ()).unwrap()
}

#[test]
fn steps_of_two_sizes_take_turns_on_one_memory() {
    for budget in [Budget::Share(1.0), Budget::Share(0.6)] {
        let first = compiled(8, &options(budget));
        let second = compiled(4, &first.beside(&options(budget)));
        let emit = |compiled: &Compiled| -> Artifact {
            codegen::emit(compiled, &Data::new(), Some(Target::SM_90)).unwrap()
        };
        let all = [&first, &second];
        let mut artifact = artifact::sharing(emit(&first), vec![emit(&second)]).unwrap();
        let others = std::mem::take(&mut artifact.others);

        let watch = Watch::new(&standin(3));
        let cuda = CudaOptions {
            library: Some(watch.standin.path().into()),
            ..CudaOptions::default()
        };
        // On one thread, whose order the stand-in sees.
        let how = runtime::Options {
            shuffle: Some(5),
            ..runtime::Options::default()
        };
        let backend = Cuda::new(&how, cuda).unwrap();
        let machine = Machine::on(Box::new(backend), artifact, how).unwrap();
        let mut steps = Steps::new(machine, others, how).unwrap();

        let mut states: Tensors = generate::states(&first.program.graph, 1);
        for (path, bytes) in &states {
            steps.now().write_state(path, bytes).unwrap();
        }
        for (k, size) in [0, 1, 1, 0, 1].into_iter().enumerate() {
            let graph = &all[size].program.graph;
            let feed = generate::feed(graph, 7, k);
            let machine = steps.turn(size).unwrap();
            for (name, bytes) in &feed {
                machine.write_input(name, bytes).unwrap();
            }
            machine.launch().unwrap();
            machine.wait_io().unwrap();
            let loss = machine.read_output("loss").unwrap();
            let meant = run::plain(graph, &states, &[feed]);
            assert!(loss == meant.outputs[0]["loss"], "step {k}");
            states = meant.states;
        }
        let machine = steps.now();
        machine.wait().unwrap();
        for (path, bytes) in &states {
            assert!(machine.read_state(path).unwrap() == *bytes, "{path}");
        }
        assert_eq!(steps.measured_peak_bytes(), first.planned_peak);
        assert_eq!(watch.standin.findings(), none());
    }
}
