//! When a device ran each command of a traced run.
//!
//! A command is between two timed events of its stream. Each has a pair for even steps and one for
//! odd steps, as events of the artifact have. Before a pair is used again its times are read, so a
//! stream of a traced run is at most two steps ahead of the device.
//!
//! Events tell milliseconds between each other, in 24 bits. So there are [anchors](Anchor): events
//! of a stream of their own that the host waits for. A command's start is counted from an anchor of
//! its own time, which keeps it exact to microseconds in long runs.

use super::backend::{CommandId, Ran};
use super::host::put;
use crate::cuda::{Device, DriverError, Event, Priority, Stream};
use crate::sync::unpoisoned;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// An anchor is for so many steps.
const ANCHOR_STEPS: u64 = 16;
/// Number of anchors that exist at a time: streams are two steps apart, or a few more if nothing
/// orders them.
const ANCHORS: usize = 4;

/// The times of commands.
pub(super) struct Times {
    /// By the command's number.
    pairs: Vec<Option<[Mutex<Pair>; 2]>>,
    anchors: Mutex<[Anchor; ANCHORS]>,
    /// The anchors' stream.
    stream: Stream,
}

/// A command of one step.
struct Pair {
    start: Event,
    end: Event,
    /// The step whose times it has; `None` once they are told.
    step: Option<u64>,
}

/// A time by both clocks.
struct Anchor {
    event: Event,
    /// Which steps it is for, in units of [`ANCHOR_STEPS`], and its time by the host's clock.
    noted: Option<(u64, Instant)>,
}

impl Times {
    /// No commands yet.
    pub(super) fn new(device: &Device) -> Result<Times, DriverError> {
        let anchor = || -> Result<Anchor, DriverError> {
            let event = device.timed_event()?;
            Ok(Anchor { event, noted: None })
        };
        Ok(Times {
            pairs: vec![],
            anchors: Mutex::new([anchor()?, anchor()?, anchor()?, anchor()?]),
            stream: device.stream(Priority::High)?,
        })
    }

    /// The device will note when it runs this command.
    pub(super) fn add(&mut self, device: &Device, command: CommandId) -> Result<(), DriverError> {
        let pair = || -> Result<Mutex<Pair>, DriverError> {
            Ok(Mutex::new(Pair {
                start: device.timed_event()?,
                end: device.timed_event()?,
                step: None,
            }))
        };
        put(&mut self.pairs, command, [pair()?, pair()?]);
        Ok(())
    }

    fn pair(&self, command: CommandId, step: u64) -> Option<&Mutex<Pair>> {
        let pairs = self.pairs.get(command.0)?.as_ref()?;
        Some(&pairs[(step % 2) as usize])
    }

    /// Whether the device notes when it runs a command.
    pub(super) fn has(&self, command: CommandId) -> bool {
        self.pair(command, 0).is_some()
    }

    /// Before a command.
    pub(super) fn begin(
        &self,
        queue: &Stream,
        command: CommandId,
        step: u64,
    ) -> Result<(), DriverError> {
        let Some(pair) = self.pair(command, step) else {
            return Ok(());
        };
        self.anchor(step)?;
        queue.record(&unpoisoned(pair).start)
    }

    /// After a command.
    pub(super) fn end(
        &self,
        queue: &Stream,
        command: CommandId,
        step: u64,
    ) -> Result<(), DriverError> {
        let Some(pair) = self.pair(command, step) else {
            return Ok(());
        };
        let mut pair = unpoisoned(pair);
        queue.record(&pair.end)?;
        pair.step = Some(step);
        Ok(())
    }

    /// When the device ran a command of a step. Waits until it has.
    pub(super) fn ran(&self, command: CommandId, step: u64) -> Result<Option<Ran>, DriverError> {
        let Some(pair) = self.pair(command, step) else {
            return Ok(None);
        };
        let mut pair = unpoisoned(pair);
        if pair.step != Some(step) {
            return Ok(None);
        }
        pair.step = None;
        pair.end.synchronize()?;
        let anchors = unpoisoned(&self.anchors);
        let (number, anchor) = of_step(&anchors, step);
        let Some((_, at)) = anchor.noted.filter(|(noted, _)| *noted == number) else {
            // Its anchor is used again already: the streams were dozens of steps apart.
            return Ok(None);
        };
        let start = after(at, anchor.event.elapsed(&pair.start)?);
        let end = after(start, pair.start.elapsed(&pair.end)?);
        Ok(Some(Ran { start, end }))
    }

    /// Makes the anchor of a step, if that is not done.
    fn anchor(&self, step: u64) -> Result<(), DriverError> {
        let mut anchors = unpoisoned(&self.anchors);
        let number = step / ANCHOR_STEPS;
        let anchor = &mut anchors[number as usize % ANCHORS];
        if anchor.noted.is_none_or(|(noted, _)| noted < number) {
            // The device reaches it between the two.
            let before = Instant::now();
            self.stream.record(&anchor.event)?;
            anchor.event.synchronize()?;
            anchor.noted = Some((number, before + before.elapsed() / 2));
        }
        Ok(())
    }
}

/// The anchor for a step, and its number.
fn of_step(anchors: &[Anchor; ANCHORS], step: u64) -> (u64, &Anchor) {
    let number = step / ANCHOR_STEPS;
    (number, &anchors[number as usize % ANCHORS])
}

/// A time some milliseconds after another, or before it.
fn after(at: Instant, milliseconds: f32) -> Instant {
    let micros = f64::from(milliseconds) * 1e3;
    let away = Duration::from_nanos((micros.abs() * 1e3) as u64);
    let moved = match micros < 0.0 {
        true => at.checked_sub(away),
        false => at.checked_add(away),
    };
    moved.unwrap_or(at)
}
