//! Measures a machine with a GPU: copies from pinned memory and to it, alone and beside the step's
//! kernels and the host's updates, and how long the device and the host take to notice each other.
//!
//! The step's kernels need no replay: a traced run has their times by the device's clock.

use super::{Figures, Load, Update, draw, link_bandwidth, loads_alone_and_together, median};
use crate::cuda::{Device, DeviceBlock, Driver, DriverError, Event, Pinned, Priority, Stream};
use crate::kernels::{self, Signature};
use crate::memory::Arena;
use crate::sync::unpoisoned;
use crate::team::Team;
use crate::{Error, Machine, Options};
use artifact::{Artifact, CommandKind, DType};
use std::sync::Mutex;
use std::time::Instant;

/// The largest copy of a load: two thirds of a link's rate are reached at a megabyte.
const MOST_COPY: u64 = 4 << 20;
/// The smallest one, for the small devices of tests.
const LEAST_COPY: u64 = 64 << 10;
/// The largest copy on the device: larger than a GPU's last cache, which is 50 MB on an H100.
const MOST_WITHIN: u64 = 64 << 20;
/// Copies that are submitted together.
const BATCH: u64 = 4;
/// How often a fixed time is measured.
const ROUNDS: usize = 64;
/// Bytes of the host that are touched so that an update's own lie in no cache.
const EVICTING: u64 = 64 << 20;

/// The least size of a dimension that a step's indices select from: smaller numbers are right for
/// all of its indices. 1 if it has none.
pub fn index_bound(artifact: &Artifact) -> u64 {
    let launches = artifact.commands.iter().filter_map(|c| match &c.kind {
        CommandKind::Launch {
            kernel, ins, outs, ..
        } => Some((&artifact.kernels[*kernel as usize], ins, outs)),
        CommandKind::Copy { .. } | CommandKind::Record { .. } | CommandKind::Wait { .. } => None,
    });
    let bounds = launches.flat_map(|(kernel, ins, outs)| {
        let signature = Signature {
            attrs: &kernel.attrs,
            ins,
            outs,
            scratch: u64::MAX,
        };
        let found = kernels::find(&kernel.op);
        let operands = found.map(|op| op.index_operands(&signature));
        operands.into_iter().flatten().map(|operand| operand.size)
    });
    bounds.min().unwrap_or(1).max(1)
}

/// Bytes of numbers that a step accepts as an input: small ones, integers below a bound.
pub fn drawn(dtype: DType, bytes: usize, below: u64) -> Vec<u8> {
    let some = draw(dtype, below);
    some.iter().copied().cycle().take(bytes).collect()
}

/// Copies of one direction.
struct Copies {
    stream: Stream,
    host: Mutex<Pinned>,
    block: DeviceBlock,
    bytes: u64,
}

impl Copies {
    fn new(device: &Device, bytes: u64) -> Result<Copies, DriverError> {
        Ok(Copies {
            stream: device.stream(Priority::High)?,
            host: Mutex::new(Pinned::new(device, (BATCH * bytes) as usize)?),
            block: DeviceBlock::new(device, BATCH * bytes)?,
            bytes,
        })
    }

    /// Submits copies and waits for them.
    fn run(&self, way: Load) -> Result<(), DriverError> {
        for i in 0..BATCH {
            let range = self.block.range(i * self.bytes, self.bytes);
            let (mut host, offset) = (unpoisoned(&self.host), (i * self.bytes) as usize);
            match way {
                Load::Out => host.copy_out(&self.stream, offset, range)?,
                Load::In | Load::Compute | Load::Host => {
                    host.copy_in(&self.stream, offset, range)?;
                }
            }
        }
        self.stream.synchronize()
    }
}

/// How often a batch of copies is timed to find the link's rate.
const LINK_ROUNDS: usize = 9;

/// Bytes per second of the link in its slower direction, with pinned memory: the median of some
/// batches, which take about 10 ms on a GPU.
pub fn link(device: &Device) -> Result<f64, DriverError> {
    let (_, all) = device.memory()?;
    let bytes = (all / 4096).clamp(LEAST_COPY, MOST_COPY);
    let copies = Copies::new(device, bytes)?;
    let mut slower = f64::INFINITY;
    for way in [Load::In, Load::Out] {
        let mut rates = vec![];
        for _ in 0..LINK_ROUNDS {
            let began = Instant::now();
            copies.run(way)?;
            let seconds = began.elapsed().as_secs_f64().max(1e-9);
            rates.push((BATCH * bytes) as f64 / seconds);
        }
        slower = slower.min(median(&rates).unwrap_or(slower));
    }
    Ok(slower)
}

/// Bytes per second of copies on the device, by its clock: a copy is shorter than a call.
fn within(device: &Device, bytes: u64) -> Result<f64, DriverError> {
    let (block, stream) = (
        DeviceBlock::new(device, 2 * bytes)?,
        device.stream(Priority::Usual)?,
    );
    let events: [Event; 2] = [device.timed_event()?, device.timed_event()?];
    let mut millis = vec![];
    for _ in 0..ROUNDS {
        stream.record(&events[0])?;
        stream.copy(block.range(bytes, bytes), block.range(0, bytes))?;
        stream.record(&events[1])?;
        stream.synchronize()?;
        millis.push(f64::from(events[0].elapsed(&events[1])?));
    }
    // The grain of the device's clock is half a microsecond.
    let seconds = median(&millis).unwrap_or(0.0).max(5e-4) * 1e-3;
    Ok(bytes as f64 / seconds)
}

/// Measures the machine with a step that can run, whose inputs survive; each measurement takes
/// about `seconds`.
pub fn gpu(step: &mut Machine, number: u32, seconds: f64) -> Result<Figures, Error> {
    let refused = |e: DriverError| Error::Resources(format!("copies cannot be measured: {e}"));
    let driver = Driver::open(None).map_err(refused)?;
    let device = Device::new(driver, number).map_err(refused)?;
    let (_, all) = device.memory().map_err(refused)?;
    let bytes = (all / 4096).clamp(LEAST_COPY, MOST_COPY);
    let inwards = Copies::new(&device, bytes).map_err(refused)?;
    let outwards = Copies::new(&device, bytes).map_err(refused)?;
    let update = Update::new().map_err(Error::Host)?;
    let team = Team::new(Options::default().team())?;
    let host_bytes = update.bytes();
    let lacking = || Error::Resources("no memory to measure updates in".into());
    let others = Arena::new(EVICTING).ok_or_else(lacking)?;

    let step = Mutex::new(step);
    // A load that fails ends the profile: it is no slow load.
    let copies = |does: &dyn Fn() -> Result<(), DriverError>, work: u64| {
        device.bind().and_then(|()| does()).map_err(refused)?;
        Ok(work as f64)
    };
    let compute = |_: usize| unpoisoned(&step).step().map(|_| 1.0);
    let to_device = |_: usize| copies(&|| inwards.run(Load::In), BATCH * bytes);
    let to_host = |_: usize| copies(&|| outwards.run(Load::Out), BATCH * bytes);
    let updating = |_: usize| Ok(update.run(&team));
    let (rates, keeps) =
        loads_alone_and_together([&compute, &to_device, &to_host, &updating], seconds)?;
    let near = (all / 1024).clamp(LEAST_COPY, MOST_WITHIN);
    let copy_bandwidth = within(&device, near).map_err(refused)?;
    let (link_micros, handoff) = fixed(&device, &inwards).map_err(refused)?;
    Ok(Figures {
        link_bandwidth: link_bandwidth(&rates, bytes as f64, link_micros),
        link_micros,
        copy_bandwidth,
        host_bandwidth: update.rate_from_memory(&team, || others.fill(0, EVICTING, 1)),
        keeps,
        handoff,
        bytes: 4 * BATCH * bytes + 2 * near + host_bytes + EVICTING,
    })
}

/// The fixed time of a copy on its stream, and the time from a call until the host sees its end
/// beyond that; medians, µs.
fn fixed(device: &Device, copies: &Copies) -> Result<(f64, f64), DriverError> {
    let events: [Event; 2] = [device.timed_event()?, device.timed_event()?];
    let (mut on_device, mut seen) = (vec![], vec![]);
    for _ in 0..ROUNDS {
        let began = Instant::now();
        copies.stream.record(&events[0])?;
        let range = copies.block.range(0, 64);
        unpoisoned(&copies.host).copy_in(&copies.stream, 0, range)?;
        copies.stream.record(&events[1])?;
        copies.stream.synchronize()?;
        let micros = began.elapsed().as_secs_f64() * 1e6;
        let taken = f64::from(events[0].elapsed(&events[1])?) * 1e3;
        on_device.push(taken);
        seen.push((micros - taken).max(0.0));
    }
    let of = |times: &[f64]| median(times).unwrap_or(0.0);
    Ok((of(&on_device), of(&seen)))
}
