//! Traced runs: when the device ran each command, by its own clock.

use super::machine::{Watched, none, standin, threads};
use super::steps::{self, Step};
use super::watched::Watch;
use artifact::{Artifact, CommandKind};
use lighterage_tests::run;
use runtime::{Options, Span};
use std::collections::{BTreeMap, BTreeSet};

const OPS: usize = 24;
/// One anchor of the device's clock is for all of them: the stand-in's clock counts commands, and
/// is not the host's.
const STEPS: u64 = 8;

fn traced(options: Options) -> Options {
    Options {
        trace: true,
        ..options
    }
}

/// A span without its texts.
#[derive(Clone, Debug)]
struct Ran {
    is_wait: bool,
    stream: String,
    command: u32,
    step: u64,
    start: f64,
    end: f64,
}

impl Ran {
    fn of(span: &Span<'_>) -> Ran {
        Ran {
            is_wait: span.why == "wait",
            stream: span.stream.into(),
            command: span.command,
            step: span.step,
            start: span.start_us,
            end: span.start_us + span.duration_us,
        }
    }
}

/// The trace of steps that are launched together, in groups of that many.
fn spans(step: &Step, seed: u64, options: Options, groups: &[u64]) -> Vec<Ran> {
    let watch = Watch::new(&standin(seed));
    let mut watched = Watched::new(&watch, &step.artifact, options).unwrap();
    for n in groups {
        watched.write(&step.feed).unwrap();
        (0..*n).for_each(|_| watched.launch().unwrap());
        watched.machine.wait().unwrap();
    }
    let n = groups.iter().sum::<u64>() as usize;
    let meant = run::plain(&step.graph, &step.start, &vec![step.feed.clone(); n]);
    assert!(watched.states().unwrap() == meant.states, "seed {seed}");
    assert_eq!(watch.standin.findings(), none(), "seed {seed}");
    let spans = watched.machine.trace().unwrap();
    spans.iter().map(Ran::of).collect()
}

/// Each launch and copy of each step has one span, as on a processor.
fn assert_complete(artifact: &Artifact, spans: &[Ran], steps: u64) {
    let mut found = BTreeSet::new();
    for span in spans.iter().filter(|span| !span.is_wait) {
        assert!(found.insert((span.command, span.step)), "{span:?} twice");
    }
    let runs = |kind: &CommandKind| match kind {
        CommandKind::Launch { .. } | CommandKind::Copy { .. } => true,
        CommandKind::Record { .. } | CommandKind::Wait { .. } => false,
    };
    let commands = (0..).zip(&artifact.commands);
    let commands = commands.filter(|(_, command)| runs(&command.kind));
    let all = commands.flat_map(|(i, _)| (1..=steps).map(move |step| (i, step)));
    assert_eq!(found, all.collect());
}

/// Streams of the device: what none of them does belongs to another clock.
fn on_device(artifact: &Artifact) -> BTreeSet<String> {
    let names = artifact.streams.iter().filter(|name| *name != "host");
    names.cloned().collect()
}

/// A command begins after those before it in its stream, and after those that it waits for.
fn assert_ordered(artifact: &Artifact, spans: &[Ran]) {
    // Fractions of microseconds are rounded to nanoseconds.
    const SLACK: f64 = 0.01;
    let device = on_device(artifact);
    // A wait for the host is one of the thread that submits.
    let recorder = |event: u32| {
        let mut all = artifact.commands.iter();
        let record = all.find(|c| matches!(c.kind, CommandKind::Record { event: e } if e == event));
        &artifact.streams[record.unwrap().stream as usize]
    };
    let by_device = |span: &&Ran| {
        let kind = &artifact.commands[span.command as usize].kind;
        let for_host =
            matches!(kind, CommandKind::Wait { event, .. } if recorder(*event) == "host");
        device.contains(&span.stream) && !for_host
    };
    let by: BTreeMap<(u32, u64), &Ran> = spans
        .iter()
        .filter(by_device)
        .map(|span| ((span.command, span.step), span))
        .collect();
    let mut last: BTreeMap<(u32, u64), &Ran> = BTreeMap::new();
    let mut recorded: BTreeMap<u32, u32> = BTreeMap::new();
    let mut waits = 0;
    for step in 1..=STEPS {
        for (i, command) in (0..).zip(&artifact.commands) {
            let before = last.get(&(command.stream, step)).copied();
            let own = by.get(&(i, step)).copied();
            if let (Some(before), Some(own)) = (before, own) {
                assert!(before.end <= own.start + SLACK, "{before:?}, {own:?}");
            }
            match command.kind {
                CommandKind::Record { event } => {
                    recorded.insert(event, command.stream);
                    if let Some(before) = before {
                        last.insert((1000 + event, step), before);
                    }
                }
                CommandKind::Wait { event, previous } => {
                    let step = step - u64::from(previous);
                    let awaited = last.get(&(1000 + event, step));
                    if let (Some(awaited), Some(own)) = (awaited, own) {
                        assert!(awaited.end <= own.end + SLACK, "{awaited:?}, {own:?}");
                        waits += 1;
                    }
                }
                CommandKind::Launch { .. } | CommandKind::Copy { .. } => {}
            }
            if let Some(own) = own {
                last.insert((command.stream, step), own);
            }
        }
    }
    assert!(waits > 0);
}

/// A trace of a device has the form of a processor's: each command of each step, by the device's
/// clock, in an order that its events permit.
#[test]
fn a_trace_tells_when_the_device_ran_each_command() {
    let mut copies_beside_kernels = 0;
    for seed in 0..8 {
        let step = steps::step(OPS, seed);
        let ran = spans(&step, seed, traced(threads()), &[STEPS - 3, 1, 2]);
        assert_complete(&step.artifact, &ran, STEPS);
        assert_ordered(&step.artifact, &ran);
        assert!(ran.iter().all(|span| span.end >= span.start), "seed {seed}");
        let compute = ran.iter().filter(|span| span.stream == "compute");
        let compute: Vec<&Ran> = compute.collect();
        let meets = |span: &&Ran| {
            let device = span.stream == "h2d" || span.stream == "d2h";
            let beside = |other: &&&Ran| other.start < span.end && span.start < other.end;
            device && compute.iter().any(|other| beside(&other))
        };
        copies_beside_kernels += ran.iter().filter(meets).count();
        let ran = spans(&step, seed, traced(run::shuffled(seed)), &[2, 1]);
        assert_complete(&step.artifact, &ran, 3);
    }
    assert!(copies_beside_kernels > 20, "{copies_beside_kernels}");
}

/// Anchors are renewed in long runs.
#[test]
fn a_trace_of_many_steps_is_complete() {
    let step = steps::step(4, 2);
    let ran = spans(&step, 1, traced(threads()), &[40, 30]);
    // A trace keeps the last 64 steps.
    let late: Vec<Ran> = ran.iter().filter(|span| span.step > 66).cloned().collect();
    let steps: BTreeSet<u64> = late.iter().map(|span| span.step).collect();
    assert_eq!(steps, (67..=70).collect());
}

/// Without a trace nothing is timed.
#[test]
fn an_ordinary_run_notes_no_times() {
    let step = steps::step(OPS, 3);
    let calls = |options: Options| {
        let watch = Watch::new(&standin(1));
        let mut watched = Watched::new(&watch, &step.artifact, options).unwrap();
        watched.write(&step.feed).unwrap();
        watched.launch().unwrap();
        watched.machine.wait().unwrap();
        let of = |name| watch.standin.calls_of(name);
        (
            of("cuEventElapsedTime"),
            of("cuEventRecord"),
            watch.standin.facts().made,
        )
    };
    let (elapsed, records, made) = calls(threads());
    let (traced_elapsed, traced_records, traced_made) = calls(traced(threads()));
    assert_eq!(elapsed, 0);
    let waits = step.artifact.commands.iter();
    let records_of_plan = waits.filter(|c| matches!(c.kind, CommandKind::Record { .. }));
    assert!(records <= (records_of_plan.count() + step.artifact.streams.len()) as u64 + 10);
    assert!(traced_elapsed > 0 && traced_records > records && traced_made > made);
}
