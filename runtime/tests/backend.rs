//! A backend that only counts the calls of a machine. It is also the smallest example of a backend.

use crate::common::*;
use artifact::{Kernel, Object, Place, Pool, Range};
use lighterage_runtime::{
    Backend, CommandError, CommandId, Copy, Error, EventId, Launch, Machine, Options, StreamId,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

/// The recorded calls.
#[derive(Default)]
struct Calls {
    count: BTreeMap<&'static str, u64>,
    /// Events that were recorded, with their steps.
    recorded: BTreeSet<(EventId, u64)>,
    /// Bytes of each pool.
    pools: Vec<u64>,
}

/// Counts calls, and fails in one function if a test asks for it.
#[derive(Clone, Default)]
struct Counting {
    calls: Arc<Mutex<Calls>>,
    fails: Option<&'static str>,
}

impl Counting {
    fn count(&self, what: &'static str) -> bool {
        *self.calls.lock().unwrap().count.entry(what).or_default() += 1;
        self.fails == Some(what)
    }
    fn load(&self, what: &'static str) -> Result<(), Error> {
        match self.count(what) {
            true => Err(Error::Unsupported(what.into())),
            false => Ok(()),
        }
    }
    fn run(&self, what: &'static str) -> Result<(), CommandError> {
        match self.count(what) {
            true => Err(CommandError::from(what.to_string())),
            false => Ok(()),
        }
    }
}

impl Backend for Counting {
    fn allocate(&mut self, pool: &Pool) -> Result<(), Error> {
        self.calls.lock().unwrap().pools.push(pool.bytes);
        self.load("allocate")
    }
    fn create_stream(&mut self, _: StreamId, _: &str) -> Result<(), Error> {
        self.load("create_stream")
    }
    fn create_event(&mut self, _: EventId, _: StreamId) -> Result<(), Error> {
        self.load("create_event")
    }
    fn load_object(&mut self, _: &Object) -> Result<(), Error> {
        self.load("load_object")
    }
    fn load_kernel(&mut self, _: &Kernel) -> Result<(), Error> {
        self.load("load_kernel")
    }
    fn prepare_launch(&mut self, _: CommandId, _: StreamId, _: Launch<'_>) -> Result<(), Error> {
        self.load("prepare_launch")
    }
    fn prepare_copy(&mut self, _: CommandId, _: StreamId, _: Copy) -> Result<(), Error> {
        self.load("prepare_copy")
    }
    fn start(&mut self) -> Result<(), Error> {
        self.load("start")
    }
    fn write(&self, _: Place, _: &[u8]) -> Result<(), Error> {
        self.load("write")
    }
    fn read(&self, _: Place, _: &mut [u8]) -> Result<(), Error> {
        self.load("read")
    }
    fn fill(&self, _: Range, _: u8) -> Result<(), Error> {
        self.load("fill")
    }
    fn enter(&self, _: StreamId) {
        self.count("enter");
    }
    fn launch(&self, _: CommandId) -> Result<(), CommandError> {
        self.run("launch")
    }
    fn copy(&self, _: CommandId) -> Result<(), CommandError> {
        self.run("copy")
    }
    fn record(&self, _: StreamId, event: EventId, step: u64) -> Result<(), CommandError> {
        self.calls.lock().unwrap().recorded.insert((event, step));
        self.run("record")
    }
    fn wait(&self, _: StreamId, event: EventId, step: u64) -> Result<(), CommandError> {
        let is_recorded = self.calls.lock().unwrap().recorded.contains(&(event, step));
        assert!(is_recorded, "a wait should come after its record");
        self.run("wait")
    }
    fn mark_io(&self, _: StreamId, _: u64) -> Result<(), CommandError> {
        self.run("mark_io")
    }
    fn synchronize_io(&self, _: StreamId, _: u64) -> Result<(), CommandError> {
        self.run("synchronize_io")
    }
    fn synchronize(&self, _: StreamId) -> Result<(), CommandError> {
        self.run("synchronize")
    }
    fn halt(&self) {
        self.count("halt");
    }
}

/// Steps of `offloading` on a counting backend; waits for the whole last step.
fn steps(backend: &Counting, n: u64, options: Options) -> Result<(), Error> {
    let mut machine = Machine::on(Box::new(backend.clone()), offloading(), options)?;
    for step in 1..=n {
        machine.write_input("x", &floats(1.0))?;
        machine.launch()?;
        let report = if step < n {
            machine.wait_io()?
        } else {
            machine.wait()?
        };
        assert_eq!(report.step, step);
        machine.read_output("out")?;
    }
    Ok(())
}

fn shuffled(seed: u64) -> Options {
    Options {
        shuffle: Some(seed),
        ..Options::default()
    }
}

#[test]
fn a_backend_is_asked_for_each_command_once() {
    let n = 5;
    for options in [Options::default(), shuffled(1)] {
        let backend = Counting::default();
        steps(&backend, n, options).unwrap();
        let calls = backend.calls.lock().unwrap();
        let count = |what| calls.count.get(what).copied().unwrap_or(0);
        assert_eq!(calls.pools, [4 * 64, 3 * 64]);
        for (what, expected) in [
            ("create_stream", 3),
            ("create_event", 3),
            ("load_object", 0),
            ("load_kernel", 3),
            ("prepare_launch", 3),
            ("prepare_copy", 4),
            ("start", 1),
            ("enter", 3),
            // The state's value, then an input for each step.
            ("write", 1 + n),
            ("read", n),
            ("launch", 3 * n),
            ("copy", 4 * n),
            ("record", 3 * n),
            // The first step has no waits for a previous step.
            ("wait", 4 * n - 2),
            // The copy in reads the input, the copy out writes the output.
            ("mark_io", 2 * n),
            ("synchronize_io", 3 * (n - 1)),
        ] {
            assert_eq!(count(what), expected, "{what}, {options:?}");
        }
        // Only a shuffled run fills dead bytes, after a synchronisation.
        assert_eq!(count("fill") > 0, options.shuffle.is_some());
    }
}

#[test]
fn what_a_backend_refuses_is_told() {
    for options in [Options::default(), shuffled(2)] {
        let error = |fails| {
            let backend = Counting {
                fails: Some(fails),
                ..Counting::default()
            };
            let error = steps(&backend, 2, options).unwrap_err();
            let halted = backend.calls.lock().unwrap().count.contains_key("halt");
            (error.to_string(), halted)
        };
        for fails in [
            "allocate",
            "create_event",
            "load_kernel",
            "prepare_copy",
            "start",
        ] {
            assert_eq!(error(fails), (format!("unsupported: {fails}"), false));
        }
        assert_eq!(error("launch"), ("line y failed: launch".into(), true));
        assert_eq!(error("copy"), ("line x failed: copy".into(), true));
        for fails in ["record", "wait", "mark_io", "synchronize_io", "synchronize"] {
            let (message, halted) = error(fails);
            assert!(message.starts_with("line "), "{message}");
            assert!(message.ends_with(&format!(" failed: {fails}")), "{message}");
            assert!(halted);
        }
    }
}
