//! What a step answers to wrong data and to a device that does not go on.

use super::machine::{Watched, none, standin, threads};
use super::steps;
use super::watched::Watch;
use artifact::{Artifact, CommandKind};
use codegen::Target;
use ir::text;
use lighterage_tests::evaluate::Tensors;
use lighterage_tests::run;
use passes::cost::Roofline;
use passes::devices;
use passes::graph::optimizer::Optimizer;
use passes::pipeline::{self, Options};
use runtime::{CudaOptions, Error, Machine};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

// --- indices ---

/// A graph of one op that has indices, `i`, and what else it reads, `x` and `s`.
struct Case {
    inputs: &'static str,
    node: &'static str,
    /// Elements of `i`, of `x` and of `s`.
    n: [usize; 3],
    is_wide: bool,
    /// An index that is right, and one that is not.
    right: i64,
    wrong: i64,
}

const CASES: [Case; 12] = [
    Case {
        inputs: "input %x : f32[8,4]\n input %i : i64[6]",
        node: "%y = embedding %x, %i padding=-1 : f32[6,4]",
        n: [6, 32, 0],
        is_wide: true,
        right: 7,
        wrong: 8,
    },
    Case {
        inputs: "input %x : f32[300,4]\n input %i : i32[1000]",
        node: "%y = embedding %x, %i padding=-1 : f32[1000,4]",
        n: [1000, 1200, 0],
        is_wide: false,
        right: 299,
        wrong: -1,
    },
    Case {
        inputs: "input %x : f32[6,4]\n input %i : i64[6]",
        node: "%y = embedding_bwd %x, %i padding=-1 rows=8 : f32[8,4]",
        n: [6, 24, 0],
        is_wide: true,
        right: 7,
        wrong: 9,
    },
    Case {
        inputs: "input %x : f32[5,4]\n input %i : i64[5,2]",
        node: "%y = gather %x, %i dim=1 : f32[5,2]",
        n: [10, 20, 0],
        is_wide: true,
        right: 3,
        wrong: 4,
    },
    Case {
        inputs: "input %x : f32[5,4]\n input %i : i64[5,2]\n input %s : f32[5,2]",
        node: "%y = scatter %x, %i, %s dim=1 : f32[5,4]",
        n: [10, 20, 10],
        is_wide: true,
        right: 3,
        wrong: -2,
    },
    Case {
        inputs: "input %x : f32[5,4]\n input %i : i64[5,2]\n input %s : f32[5,2]",
        node: "%y = scatter_add %x, %i, %s dim=0 : f32[5,4]",
        n: [10, 20, 10],
        is_wide: true,
        right: 4,
        wrong: 5,
    },
    Case {
        inputs: "input %x : f32[5,4]\n input %i : i64[5,2]",
        node: "%y = scatter_value %x, %i dim=1 value=2.0 : f32[5,4]",
        n: [10, 20, 0],
        is_wide: true,
        right: 0,
        wrong: 77,
    },
    Case {
        inputs: "input %x : f32[8,4]\n input %i : i64[6]",
        node: "%y = index %x, %i : f32[6,4]",
        n: [6, 32, 0],
        is_wide: true,
        right: -8,
        wrong: -9,
    },
    Case {
        inputs: "input %x : f32[8,4]\n input %s : f32[6,4]\n input %i : i64[6]",
        node: "%y = index_put %x, %s, %i accumulate=true : f32[8,4]",
        n: [6, 32, 24],
        is_wide: true,
        right: -8,
        wrong: 8,
    },
    Case {
        inputs: "input %x : f32[6,4]\n input %i : i64[6]",
        node: "%y, %n = nll_loss %x, %i ignore=-100 reduction=1 : f32[], f32[]",
        n: [6, 24, 0],
        is_wide: true,
        right: -100,
        wrong: 4,
    },
    Case {
        inputs: "input %x : f32[5,4]\n input %i : i64[2]\n input %s : f32[2,4,3]",
        node: "%y = grouped_matmul %x, %s, %i tb=false : f32[5,3]",
        n: [2, 20, 24],
        is_wide: true,
        right: 5,
        wrong: 6,
    },
    Case {
        inputs: "input %x : f32[5,4]\n input %i : i32[2]\n input %s : f32[5,3]",
        node: "%y = grouped_outer %x, %s, %i : f32[2,4,3]",
        n: [2, 20, 15],
        is_wide: false,
        right: 5,
        wrong: -1,
    },
];

impl Case {
    fn artifact(&self, device: &str, target: Target) -> Artifact {
        let Case { inputs, node, .. } = self;
        let text = format!("graph one {{\n {inputs}\n fwd there {node}\n output y = %y\n}}\n");
        let graph = text::parse_graph(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        let device = devices::named(device).unwrap();
        let options = Options {
            optimizer: Optimizer::None,
            ..Options::default()
        };
        let cost = Roofline::new(&device);
        let compiled = pipeline::compile(graph, &options, &device, &cost, &mut |_| ()).unwrap();
        codegen::emit(&compiled, &BTreeMap::new(), Some(target)).unwrap()
    }

    /// Zeros as indices, except for one of them.
    fn feed(&self, artifact: &Artifact, index: i64) -> Tensors {
        let [n, x, s] = self.n;
        let mut indices = vec![0; n];
        indices[n - 2] = index;
        let floats = |n: usize| {
            vec![1.0f32; n]
                .into_iter()
                .flat_map(f32::to_le_bytes)
                .collect()
        };
        let bytes = |name: &str| match name {
            "i" if self.is_wide => indices.iter().flat_map(|i: &i64| i.to_le_bytes()).collect(),
            "i" => indices
                .iter()
                .flat_map(|&i| (i as i32).to_le_bytes())
                .collect(),
            "x" => floats(x),
            _ => floats(s),
        };
        let inputs = artifact.inputs.iter();
        inputs
            .map(|input| (input.name.clone(), bytes(&input.name)))
            .collect()
    }
}

/// A wrong index ends the step with the processor's error, which names the op, the index, the size
/// and the line. A right one does not, and neither does one that stands for none.
#[test]
fn a_wrong_index_is_the_processors_error() {
    for case in &CASES {
        let gpu = case.artifact("h100", Target::SM_90);
        let cpu = case.artifact("cpu", Target::host().unwrap());
        let on_cpu = |index: i64| -> Result<(), Error> {
            let mut machine = Machine::new(cpu.clone(), threads())?;
            for (name, bytes) in case.feed(&cpu, index) {
                machine.write_input(&name, &bytes)?;
            }
            machine.step().map(|_| ())
        };
        let on_gpu = |index: i64, cuda: CudaOptions| -> Result<(), Error> {
            let watch = Watch::new(&standin(3));
            let mut watched = Watched::with(&watch, &gpu, threads(), cuda)?;
            watched.write(&case.feed(&gpu, index))?;
            watched.launch()?;
            let done = watched.machine.wait_io();
            assert_eq!(watch.standin.findings(), none(), "{}", case.node);
            // Once it has failed it stays so.
            assert_eq!(done.is_ok(), watched.machine.launch().is_ok());
            let _ = watched.machine.wait();
            done.map(|_| ())
        };
        on_cpu(case.right).unwrap();
        on_gpu(case.right, CudaOptions::default()).unwrap();
        let expected = on_cpu(case.wrong).expect_err(case.node).to_string();
        for synchronous in [false, true] {
            let cuda = CudaOptions {
                synchronous,
                ..CudaOptions::default()
            };
            let found = on_gpu(case.wrong, cuda).expect_err(case.node).to_string();
            assert_eq!(found, expected, "{}", case.node);
        }
    }
}

// --- a device that is stuck ---

const PATIENCE: Duration = Duration::from_millis(400);

/// A command that never ends stops the machine: an error that names a line of the device, soon
/// after the time is over. What lies on the host can be read, no further call is begun, and the
/// machine may be dropped.
#[test]
fn a_command_that_never_ends_stops_the_machine() {
    let cuda = CudaOptions {
        patience: PATIENCE,
        ..CudaOptions::default()
    };
    let mut stuck = 0;
    for hang_at in (40..120).step_by(7) {
        let step = steps::step(24, hang_at);
        let watch = Watch::new(&standin::Options {
            hang_at,
            ..standin(hang_at)
        });
        // The stream may be the host's when states are read: then nothing of a step is stuck.
        let made = Watched::with(&watch, &step.artifact, threads(), cuda.clone());
        let mut watched = made.unwrap();
        watched.write(&step.feed).unwrap();
        for _ in 0..3 {
            watched.launch().unwrap();
        }
        let began = Instant::now();
        let Err(error) = watched.machine.wait() else {
            continue;
        };
        assert!(began.elapsed() < 20 * PATIENCE, "{:?}", began.elapsed());
        let Error::Device { line, why } = &error else {
            panic!("{error:?}");
        };
        assert!(
            why.contains("has not finished a command for 0 s"),
            "{error}"
        );
        assert!(why.contains("LIGHTERAGE_CUDA_TIMEOUT"), "{error}");
        let lines = step.artifact.commands.iter().filter(|command| {
            let stream = &step.artifact.streams[command.stream as usize];
            stream != "host"
                && match command.kind {
                    CommandKind::Launch { .. } | CommandKind::Copy { .. } => true,
                    CommandKind::Record { .. } | CommandKind::Wait { .. } => false,
                }
        });
        let mut lines = lines.map(|command| &step.artifact.lines[command.line as usize].name);
        assert!(lines.any(|name| name == line), "{error}");
        let calls = watch.standin.facts().calls;
        assert!(watched.machine.launch().is_err());
        drop(watched);
        // Each stream's thread may have been in a call when the device was given up.
        let later = watch.standin.facts().calls - calls;
        assert!(later <= step.artifact.streams.len() as u64, "{later} calls");
        assert_eq!(watch.standin.findings(), none(), "{error}");
        stuck += 1;
    }
    assert!(stuck > 8, "{stuck}");
}

/// A device that goes on, however slowly, is not stuck, and neither is one that waits for the host.
#[test]
fn a_device_without_work_is_not_stuck() {
    let cuda = CudaOptions {
        patience: Duration::from_millis(50),
        ..CudaOptions::default()
    };
    let step = steps::step(24, 5);
    let watch = Watch::new(&standin(1));
    let mut watched = Watched::with(&watch, &step.artifact, threads(), cuda).unwrap();
    for _ in 0..3 {
        watched.write(&step.feed).unwrap();
        watched.launch().unwrap();
        watched.machine.wait().unwrap();
        std::thread::sleep(Duration::from_millis(200));
    }
    let meant = run::plain(&step.graph, &step.start, &vec![step.feed.clone(); 3]);
    assert!(watched.states().unwrap() == meant.states);
}
