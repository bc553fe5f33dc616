//! Whole steps on a machine with a GPU: streams in any order, the host's kernels beside them,
//! failures.

use super::steps::{self, Step};
use super::watched::{Watch, WatchedCuda};
use artifact::{Artifact, CommandKind, MemorySpace, Object};
use lighterage_tests::evaluate::Tensors;
use lighterage_tests::run::{self, Peaks};
use runtime::{CudaOptions, Error, Machine, Options};
use std::collections::BTreeSet;
use std::sync::Arc;

const OPS: usize = 24;
/// Steps of a run: each overlaps the one before, and the third meets what both left.
const STEPS: u64 = 3;

pub(super) fn standin(seed: u64) -> standin::Options {
    standin::Options {
        seed,
        ..standin::Options::default()
    }
}

pub(super) fn threads() -> Options {
    Options {
        threads: Some(2),
        ..Options::default()
    }
}

/// A machine, and who watches it.
pub(super) struct Watched {
    watch: Arc<Watch>,
    pub(super) machine: Machine,
    artifact: Artifact,
    step: u64,
}

impl Watched {
    pub(super) fn new(
        watch: &Arc<Watch>,
        artifact: &Artifact,
        options: Options,
    ) -> Result<Watched, Error> {
        Watched::with(watch, artifact, options, CudaOptions::default())
    }
    pub(super) fn with(
        watch: &Arc<Watch>,
        artifact: &Artifact,
        options: Options,
        cuda: CudaOptions,
    ) -> Result<Watched, Error> {
        let backend = WatchedCuda::new(watch, &options, cuda)?;
        let machine = Machine::on(Box::new(backend), artifact.clone(), options)?;
        Ok(Watched {
            watch: watch.clone(),
            machine,
            artifact: artifact.clone(),
            step: 0,
        })
    }

    pub(super) fn write(&mut self, feed: &Tensors) -> Result<(), Error> {
        let mut inputs = self.artifact.inputs.iter();
        inputs.try_for_each(|input| self.machine.write_input(&input.name, &feed[&input.name]))
    }
    pub(super) fn launch(&mut self) -> Result<(), Error> {
        self.step += 1;
        self.watch.turn(self.step);
        self.machine.launch()
    }
    pub(super) fn read(&mut self) -> Result<Tensors, Error> {
        let outputs = self.artifact.outputs.iter();
        outputs
            .map(|o| Ok((o.name.clone(), self.machine.read_output(&o.name)?)))
            .collect()
    }
    pub(super) fn states(&mut self) -> Result<Tensors, Error> {
        let states = self.artifact.states.iter();
        states
            .map(|s| Ok((s.path.clone(), self.machine.read_state(&s.path)?)))
            .collect()
    }
}

/// What steps leave: outputs and states.
type Left = (Vec<Tensors>, Tensors);

/// Steps on one feed that are launched together.
fn together(watched: &mut Watched, feed: &Tensors) -> Result<Left, Error> {
    watched.write(feed)?;
    for _ in 0..STEPS {
        watched.launch()?;
    }
    watched.machine.wait()?;
    Ok((vec![watched.read()?], watched.states()?))
}

/// Steps where the host goes on as soon as it may.
fn overlapped(watched: &mut Watched, feed: &Tensors) -> Result<Left, Error> {
    let mut outputs = vec![];
    for _ in 0..STEPS {
        watched.write(feed)?;
        watched.launch()?;
        watched.machine.wait_io()?;
        outputs.push(watched.read()?);
    }
    watched.machine.wait()?;
    Ok((outputs, watched.states()?))
}

/// What the step means.
fn meaning(step: &Step) -> Left {
    let feeds = vec![step.feed.clone(); STEPS as usize];
    let outcome = run::plain(&step.graph, &step.start, &feeds);
    (outcome.outputs, outcome.states)
}

pub(super) fn none() -> Vec<String> {
    Vec::new()
}

/// In any order that events permit, on threads and shuffled, steps leave the bits that they leave
/// in list order, which are the bits that the graph means. Nothing is touched that nothing orders,
/// and nothing is allocated once the machine is loaded.
#[test]
fn any_order_leaves_the_same_bits() {
    let (mut on_host, mut waits) = (0, 0);
    for seed in 0..20 {
        let step = steps::step(OPS, seed);
        let meant = meaning(&step);
        let list = Watch::new(&standin(seed));
        let in_list = steps::in_list_order(&step.artifact);
        let mut in_list = Watched::new(&list, &in_list, threads()).unwrap();
        assert!(
            overlapped(&mut in_list, &step.feed).unwrap() == meant,
            "seed {seed}"
        );
        assert_eq!(
            list.standin.findings(),
            none(),
            "in list order, seed {seed}"
        );

        for options in [threads(), run::shuffled(seed)] {
            let watch = Watch::new(&standin(seed));
            let case = format!("seed {seed}, {options:?}");
            let mut watched = Watched::new(&watch, &step.artifact, options).unwrap();
            let made = watch.standin.facts().made;
            let (outputs, states) = together(&mut watched, &step.feed).unwrap();
            assert_eq!(watch.standin.findings(), none(), "{case}");
            assert!(outputs.last() == meant.0.last(), "{case}");
            assert!(states == meant.1, "{case}");
            let facts = watch.standin.facts();
            assert_eq!(facts.made, made, "{case}");
            assert_eq!(watch.standin.calls_of("cuMemAlloc_v2"), 1, "{case}");
            if options.shuffle.is_none() {
                let planned = step.artifact.summary.planned_peak_bytes;
                let touched = facts.touched_bytes.next_multiple_of(64);
                assert_eq!(touched, planned, "{case}");
                assert_eq!(watched.machine.measured_peak_bytes(), planned, "{case}");
            }
            drop(watched);
            let facts = watch.standin.facts();
            assert_eq!((facts.exist, facts.device_bytes), (0, 0), "{case}");
            on_host += watch.told();

            let watch = Watch::new(&standin(seed));
            let mut watched = Watched::new(&watch, &step.artifact, options).unwrap();
            assert!(
                overlapped(&mut watched, &step.feed).unwrap() == meant,
                "{case}"
            );
            assert_eq!(watch.standin.findings(), none(), "{case}");
        }
        let is_wait = |kind: &CommandKind| matches!(kind, CommandKind::Wait { .. });
        let kinds = step.artifact.commands.iter().map(|command| &command.kind);
        waits += kinds.filter(|kind| is_wait(kind)).count();
    }
    // The steps had work of the host, and waits.
    assert!(
        on_host > 1000 && waits > 200,
        "{on_host} on the host, {waits} waits"
    );
}

/// Behind the host is a disk, and the host holds little: the bits are the same, whatever order the
/// streams take.
#[test]
fn a_disk_behind_the_host_changes_no_bit() {
    let cuda = CudaOptions {
        disk: Some(std::env::temp_dir()),
        ..CudaOptions::default()
    };
    let mut copied = 0;
    for seed in 0..12 {
        let step = steps::step_with_disk(OPS, seed, (seed % 3) as f64 / 3.0);
        let meant = meaning(&step);
        let disk = step
            .artifact
            .pools
            .iter()
            .position(|pool| pool.space == MemorySpace::Disk);
        let disk = disk.unwrap() as u32;
        let is_disk = |kind: &CommandKind| match kind {
            CommandKind::Copy { src, dst, .. } => src.pool == disk || dst.pool == disk,
            _ => false,
        };
        let kinds = step.artifact.commands.iter().map(|command| &command.kind);
        copied += kinds.filter(|kind| is_disk(kind)).count();
        for options in [threads(), run::shuffled(seed)] {
            let case = format!("seed {seed}, {options:?}");
            let watch = Watch::new(&standin(seed));
            let made = Watched::with(&watch, &step.artifact, options, cuda.clone());
            let mut watched = made.unwrap();
            assert!(
                overlapped(&mut watched, &step.feed).unwrap() == meant,
                "{case}"
            );
            assert_eq!(watch.standin.findings(), none(), "{case}");
            let planned = Peaks::planned(&step.artifact);
            assert_eq!(Peaks::measured(&watched.machine), planned, "{case}");
        }
    }
    assert!(copied > 100, "{copied} copies");
}

/// Each wait of a step in turn is left out of what the driver gets. Every one is needed, so each is
/// found, by whatever order the device takes.
#[test]
fn each_wait_that_is_left_out_is_found() {
    let mut n_waits = 0;
    for seed in 0..6 {
        let step = steps::step(OPS, seed);
        let waits: BTreeSet<(usize, usize)> = (step.artifact.commands.iter())
            .filter_map(|command| match command.kind {
                CommandKind::Wait { event, .. } => Some((command.stream as usize, event as usize)),
                _ => None,
            })
            .collect();
        for wait in waits {
            let watch = Watch::without(&standin(seed), Some(wait));
            let mut watched = Watched::new(&watch, &step.artifact, threads()).unwrap();
            let _ = together(&mut watched, &step.feed);
            assert_ne!(watch.standin.findings(), none(), "seed {seed}, {wait:?}");
            n_waits += 1;
        }
    }
    assert!(n_waits > 90, "{n_waits}");
}

/// Launches that are submitted together leave the same bits; nothing is allocated for them once the
/// machine is loaded, and each wait that is left out is found as without.
#[test]
fn graphs_change_no_bit() {
    let cuda = CudaOptions {
        graphs: true,
        ..CudaOptions::default()
    };
    let (mut launches, mut fewer) = (0, 0);
    for seed in 0..10 {
        let step = steps::step(OPS, seed);
        let meant = meaning(&step);
        for options in [threads(), run::shuffled(seed)] {
            let watch = Watch::new(&standin(seed));
            let made = Watched::with(&watch, &step.artifact, options, cuda.clone());
            let mut watched = made.unwrap();
            let made = watch.standin.facts().made;
            assert!(
                overlapped(&mut watched, &step.feed).unwrap() == meant,
                "seed {seed}"
            );
            assert_eq!(watch.standin.findings(), none(), "seed {seed}, {options:?}");
            assert_eq!(watch.standin.facts().made, made, "seed {seed}");
            let graphs = watch.standin.calls_of("cuGraphLaunch");
            assert!(options.shuffle.is_none() || graphs == 0);
            launches += graphs;
            fewer += watch.standin.calls_of("cuLaunchKernel");
            drop(watched);
            let facts = watch.standin.facts();
            assert_eq!((facts.exist, facts.device_bytes), (0, 0), "seed {seed}");
        }
        let waits = step
            .artifact
            .commands
            .iter()
            .filter_map(|command| match command.kind {
                CommandKind::Wait { event, .. } => Some((command.stream as usize, event as usize)),
                _ => None,
            });
        for wait in waits.step_by(7) {
            let watch = Watch::without(&standin(seed), Some(wait));
            let made = Watched::with(&watch, &step.artifact, threads(), cuda.clone());
            let _ = together(&mut made.unwrap(), &step.feed);
            assert_ne!(watch.standin.findings(), none(), "seed {seed}, {wait:?}");
        }
    }
    assert!(launches > 50, "{launches} graphs, {fewer} other launches");
}

/// Copies are cut, pools are pinned in pieces, and bytes of the host come in small ones: the same
/// bits, and no copy across a border.
#[test]
fn pieces_change_no_bit() {
    let step = steps::step(OPS, 5);
    let meant = meaning(&step);
    let cuda = CudaOptions {
        copy_bytes: 100,
        register_bytes: 640,
        staging_bytes: 48,
        ..CudaOptions::default()
    };
    let watch = Watch::new(&standin(1));
    let copies = |watch: &Watch| watch.standin.calls_of("cuMemcpyHtoDAsync_v2");
    let mut watched = Watched::with(&watch, &step.artifact, threads(), cuda).unwrap();
    assert!(watch.standin.registered().len() > 3);
    assert!(overlapped(&mut watched, &step.feed).unwrap() == meant);
    assert_eq!(watch.standin.findings(), none());
    let whole = Watch::new(&standin(1));
    let mut watched = Watched::new(&whole, &step.artifact, threads()).unwrap();
    overlapped(&mut watched, &step.feed).unwrap();
    assert!(copies(&watch) > copies(&whole));
}

/// `wait_io` returns while commands of the step are still to run, and what the host writes then is
/// the next step's.
#[test]
fn the_host_goes_on_while_the_rest_of_a_step_runs() {
    let mut pending = 0;
    for seed in 0..20 {
        let step = steps::step(OPS, seed);
        let feeds: Vec<Tensors> = (0..STEPS as usize)
            .map(|i| lighterage_tests::generate::feed(&step.graph, seed, i))
            .collect();
        let meant = run::plain(&step.graph, &step.start, &feeds);
        let watch = Watch::new(&standin(seed));
        let mut watched = Watched::new(&watch, &step.artifact, threads()).unwrap();
        let mut outputs = vec![];
        for feed in &feeds {
            watched.write(feed).unwrap();
            watched.launch().unwrap();
            watched.machine.wait_io().unwrap();
            pending += u64::from(watch.standin.facts().pending > 0);
            outputs.push(watched.read().unwrap());
        }
        watched.machine.wait().unwrap();
        assert!(outputs == meant.outputs, "seed {seed}");
        assert!(watched.states().unwrap() == meant.states, "seed {seed}");
        assert_eq!(watch.standin.findings(), none(), "seed {seed}");
    }
    // How often depends on the threads of this machine: about a third to a half of the times.
    assert!(pending > 0, "never of {} times", 20 * STEPS);
}

/// What a machine does until it is dropped; the states of the host after it.
fn life(watch: &Arc<Watch>, step: &Step, options: Options) -> Result<Left, Error> {
    let mut watched = Watched::new(watch, &step.artifact, options)?;
    let left = overlapped(&mut watched, &step.feed);
    if left.is_err() {
        let _ = watched.machine.wait();
        // What lies on the host can be read, whatever the device does.
        for state in &step.artifact.states {
            let pool = &step.artifact.pools[state.operand.place.pool as usize];
            let read = watched.machine.read_state(&state.path);
            match pool.space {
                MemorySpace::Host | MemorySpace::Disk => assert!(read.is_ok(), "{read:?}"),
                MemorySpace::Device(_) => {}
            }
        }
        // A failed step stops it for good.
        let is_stopped = watched.machine.launch().is_err();
        assert!(
            is_stopped || !matches!(left, Err(Error::Device { .. })),
            "{left:?}"
        );
    }
    left
}

/// Each call of the driver in turn fails: the machine returns an error that names the call and the
/// status, and after a fatal one calls nothing any more. The process goes on with the processor.
#[test]
fn each_call_that_fails_stops_the_machine() {
    let step = steps::step(4, 2);
    let options = run::shuffled(1);
    let watch = Watch::new(&standin(1));
    let right = life(&watch, &step, options).unwrap();
    let all = watch.standin.facts().calls;
    for (status, sticky, name, is_fatal) in [
        (1, 0, "CUDA_ERROR_INVALID_VALUE", false),
        (2, 0, "CUDA_ERROR_OUT_OF_MEMORY", false),
        (2, 1, "CUDA_ERROR_OUT_OF_MEMORY", false),
        (700, 1, "CUDA_ERROR_ILLEGAL_ADDRESS", true),
        (719, 0, "CUDA_ERROR_LAUNCH_FAILED", true),
        (214, 1, "CUDA_ERROR_ECC_UNCORRECTABLE", true),
    ] {
        let mut failed = BTreeSet::new();
        for fail_at in 1..=all {
            watch.standin.reset(&standin::Options {
                fail_at,
                fail_with: status,
                sticky,
                ..standin(1)
            });
            let case = format!("{name}, call {fail_at} of {all}, sticky {sticky}");
            match life(&watch, &step, options) {
                Ok(left) => assert!(left == right, "{case}: it was while freeing"),
                Err(error) => {
                    let text = error.to_string();
                    // Too little memory for the plan is said in the plan's words.
                    let is_named = text.contains(name) || text.starts_with("the plan needs");
                    assert!(is_named, "{case}: {text}");
                    assert!(!text.contains('\n'), "{case}: {text}");
                    failed.insert(text);
                }
            }
            let facts = watch.standin.facts();
            if is_fatal {
                assert_eq!(facts.calls, fail_at, "{case}");
            }
        }
        assert!(failed.len() > 20, "{name}: {failed:?}");
    }
}

/// The same on threads, which may be in a call each while one of them fails.
#[test]
fn threads_stop_when_a_call_fails() {
    let step = steps::step(OPS, 7);
    let watch = Watch::new(&standin(1));
    let right = life(&watch, &step, threads()).unwrap();
    let n_streams = step.artifact.streams.len() as u64;
    let all = watch.standin.facts().calls;
    for fail_at in (1..=all).step_by(7) {
        for (status, sticky) in [(1, 0), (719, 1)] {
            watch.standin.reset(&standin::Options {
                fail_at,
                fail_with: status,
                sticky,
                ..standin(fail_at)
            });
            if let Ok(left) = life(&watch, &step, threads()) {
                assert!(left == right, "call {fail_at}");
            }
            let calls = watch.standin.facts().calls;
            if sticky == 1 {
                let more = calls.saturating_sub(fail_at);
                assert!(more <= n_streams, "call {fail_at}: {more} more");
            }
        }
    }
}

/// A machine may be dropped while steps run: the device is done with the host's memory before that
/// is freed.
#[test]
fn a_machine_may_be_dropped_while_steps_run() {
    let mut pending = 0;
    // How many machines are dropped in time depends on the threads: there are many tries.
    for seed in 0..40 {
        let step = steps::step(OPS, seed);
        let watch = Watch::new(&standin(seed));
        let mut watched = Watched::new(&watch, &step.artifact, threads()).unwrap();
        watched.write(&step.feed).unwrap();
        watched.launch().unwrap();
        watched.machine.wait_io().unwrap();
        pending += u64::from(watch.standin.facts().pending > 0);
        drop(watched);
        let facts = watch.standin.facts();
        assert_eq!(
            (facts.exist, facts.device_bytes, facts.pending),
            (0, 0, 0),
            "seed {seed}"
        );
        assert_eq!(watch.standin.findings(), none(), "seed {seed}");
    }
    assert!(pending > 3, "{pending}");
}

/// A kernel's fault stops the machine. With a wait behind each command the line is exact. What lies
/// on the host can be read; what lies on the device is lost, and the message says what to do.
#[test]
fn a_fault_names_its_line_and_what_is_lost() {
    let step = steps::step(OPS, 1);
    let mut artifact = step.artifact.clone();
    let is_gpu = |object: &Object| matches!(object.target, artifact::Target::Gpu(_));
    let module = artifact.objects.iter().position(is_gpu).unwrap();
    let text = String::from_utf8(artifact.objects[module].bytes.clone()).unwrap();
    let launches = artifact.commands.iter().find_map(|command| {
        let CommandKind::Launch { kernel, .. } = command.kind else {
            return None;
        };
        let code = artifact.kernels[kernel as usize].code.as_ref()?;
        let symbol = code.phases[0].symbol.clone();
        (code.object as usize == module).then_some((command.line as usize, symbol))
    });
    let (line, symbol) = launches.unwrap();
    let line = artifact.lines[line].name.clone();
    // The first store of that kernel goes to the address 0.
    let start = text.find(&format!(".entry {symbol}")).unwrap();
    let store = start + text[start..].find("st.global").unwrap();
    let open = store + text[store..].find('[').unwrap();
    let close = open + text[open..].find(']').unwrap();
    let broken = format!("{}[0{}", &text[..open], &text[close..]);
    artifact.objects[module].bytes = broken.into_bytes();

    let cuda = CudaOptions {
        synchronous: true,
        ..CudaOptions::default()
    };
    let watch = Watch::new(&standin(1));
    let mut watched = Watched::with(&watch, &artifact, threads(), cuda).unwrap();
    let error = together(&mut watched, &step.feed).unwrap_err();
    let Error::Device { line: failed, why } = &error else {
        panic!("{error:?}");
    };
    assert!(
        *failed == line && why.contains("CUDA_ERROR_LAUNCH_FAILED"),
        "{error}"
    );
    // The other streams' threads stop by themselves, after the error is told.
    watched.machine.wait().unwrap_err();
    let mut lost = 0;
    for state in &artifact.states {
        let pool = &artifact.pools[state.operand.place.pool as usize];
        let read = watched.machine.read_state(&state.path);
        if pool.space == MemorySpace::Host {
            assert!(read.is_ok(), "{read:?}");
        } else {
            let text = read.unwrap_err().to_string();
            assert!(text.contains("go back to the last checkpoint"), "{text}");
            lost += 1;
        }
    }
    assert!(lost > 0);

    // Without the waits an error says that another line may have caused it.
    let watch = Watch::new(&standin(1));
    let mut watched = Watched::new(&watch, &artifact, threads()).unwrap();
    let text = together(&mut watched, &step.feed).unwrap_err().to_string();
    assert!(text.contains("LIGHTERAGE_CUDA_SYNC=1"), "{text}");
}

/// What keeps a machine from being made is one line that names what is needed and what there is.
#[test]
fn what_is_missing_is_one_line() {
    let step = steps::step(OPS, 1);
    let on = |options: standin::Options| {
        let watch = Watch::new(&options);
        let made = Watched::new(&watch, &step.artifact, threads());
        let text = made.err().expect("it should be refused").to_string();
        assert!(!text.contains('\n'), "{text}");
        let facts = watch.standin.facts();
        assert_eq!((facts.exist, facts.device_bytes), (0, 0), "{text}");
        text
    };
    assert_eq!(
        on(standin::Options {
            sm: 80,
            ..standin(1)
        }),
        "unsupported: the artifact's kernels are for sm_90; this GPU, stand-in, is sm_80"
    );
    assert_eq!(
        on(standin::Options {
            driver: 11_080,
            ..standin(1)
        }),
        "unsupported: the artifact's kernels are PTX 8.0, which takes a driver for CUDA 12.0 or \
         later; this one is for CUDA 11.8"
    );
    let needed = step.artifact.summary.planned_peak_bytes;
    let text = on(standin::Options {
        device_bytes: 1024,
        ..standin(1)
    });
    assert_eq!(
        text,
        format!(
            "the plan needs {needed} bytes of device memory, free are 1024 bytes of 1024 bytes; \
             compile it with --budget 1024"
        )
    );
    let open = |library: &str| {
        let cuda = CudaOptions {
            library: Some(library.into()),
            ..CudaOptions::default()
        };
        let made = runtime::Cuda::new(&threads(), cuda);
        made.expect_err("it is no driver").to_string()
    };
    assert_eq!(
        open("/nowhere/libcuda.so.1"),
        "unsupported: /nowhere/libcuda.so.1: cannot open shared object file: No such file or \
         directory"
    );
    assert_eq!(
        open("libc.so.6"),
        "unsupported: libc.so.6 has no function cuInit: it is no CUDA driver, or too old"
    );
    let cuda = CudaOptions {
        device: 1,
        ..CudaOptions::default()
    };
    let watch = Watch::new(&standin(1));
    let made = Watched::with(&watch, &step.artifact, threads(), cuda);
    let text = made.err().unwrap().to_string();
    assert!(
        text.contains("cuDeviceGet: CUDA_ERROR_INVALID_DEVICE (101)"),
        "{text}"
    );
}

/// Memory that cannot be pinned is told with its pool.
#[test]
fn memory_that_cannot_be_pinned_is_named() {
    let step = steps::step(OPS, 1);
    let watch = Watch::new(&standin(1));
    drop(Watched::new(&watch, &step.artifact, threads()).unwrap());
    let all = watch.standin.facts().calls;
    let refused = (1..=all).find_map(|fail_at| {
        watch.standin.reset(&standin::Options {
            fail_at,
            fail_with: 2,
            sticky: 0,
            ..standin(1)
        });
        let made = Watched::new(&watch, &step.artifact, threads());
        let text = made.err()?.to_string();
        text.contains("cuMemHostRegister").then_some(text)
    });
    let text = refused.expect("one call should register memory");
    let says = ["pool host of ", "on the host cannot be pinned", "ulimit -l"];
    assert!(says.iter().all(|what| text.contains(what)), "{text}");
}

const CHILD: &str = "LIGHTERAGE_TEST_CHILD";

/// A machine runs an artifact with code for a GPU by the driver that the environment names. A
/// process of its own has that environment.
#[test]
fn the_environment_names_the_driver() {
    let step = steps::step(OPS, 6);
    if std::env::var_os(CHILD).is_some() {
        let mut machine = Machine::new(step.artifact.clone(), threads()).unwrap();
        for input in &step.artifact.inputs {
            machine
                .write_input(&input.name, &step.feed[&input.name])
                .unwrap();
        }
        machine.step().unwrap();
        let meant = run::plain(&step.graph, &step.start, std::slice::from_ref(&step.feed));
        for output in &step.artifact.outputs {
            let found = machine.read_output(&output.name).unwrap();
            assert!(found == meant.outputs[0][&output.name]);
        }
        return;
    }
    let standin = standin::Standin::new(&standin(1)).unwrap();
    let run = |library: &std::path::Path, sm: &str| {
        let test = "cuda::machine::the_environment_names_the_driver";
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env("LIGHTERAGE_CUDA", library)
            .env("STANDIN_SM", sm)
            .env(CHILD, "1")
            .output();
        let out = child.unwrap();
        let said = [out.stdout, out.stderr].concat();
        (
            out.status.success(),
            String::from_utf8_lossy(&said).into_owned(),
        )
    };
    let (right, said) = run(standin.path(), "90");
    assert!(right && said.contains("1 passed"), "{said}");
    let (right, said) = run(standin.path(), "80");
    assert!(
        !right && said.contains("this GPU, stand-in, is sm_80"),
        "{said}"
    );
    let (right, said) = run(std::path::Path::new("/nowhere/libcuda.so"), "90");
    assert!(!right, "{said}");
    assert!(
        said.contains("the artifact's kernels are for sm_90, a GPU"),
        "{said}"
    );
}
