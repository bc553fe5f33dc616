//! The CUDA backend on the stand-in, which is told what it cannot see: what the host's kernels and
//! the host itself touch, and what the machine's threads tell each other.
//!
//! The stand-in knows what comes after what by the driver's calls. Threads of a machine also wait
//! for each other: for a record before the wait that it is for, for the host before a step, and the
//! host for them. Each of these is a signal here, with the step it is about, and nothing more. So
//! an order that only happened is no order.

use artifact::{Kernel, MemorySpace, Object, Operand, Place, Pool, Range};
use runtime::{
    Backend, CommandError, CommandId, Copy, Cuda, CudaOptions, Error, EventId, Launch, Options,
    Ran, StreamId,
};
use standin::Standin;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What a test and the backend share.
pub(super) struct Watch {
    pub(super) standin: Standin,
    /// A wait that is left out: a stream and an event.
    skipped: Option<(usize, usize)>,
    /// Host accesses that were told.
    told: AtomicU64,
}

/// What threads tell each other.
#[derive(Clone, Copy)]
enum Signal {
    /// The host has had its turn before a step.
    Turn,
    /// An event is recorded by a step.
    Event(usize),
    /// A stream has submitted what touches inputs and outputs in a step.
    Io(usize),
    /// A stream has submitted all of its commands so far.
    Done(usize),
}

impl Watch {
    pub(super) fn new(options: &standin::Options) -> Arc<Watch> {
        Watch::without(options, None)
    }
    /// The same where the waits of a stream for an event are left out.
    pub(super) fn without(
        options: &standin::Options,
        skipped: Option<(usize, usize)>,
    ) -> Arc<Watch> {
        let standin = Standin::new(options).expect("the stand-in should have been built");
        Arc::new(Watch {
            standin,
            skipped,
            told: AtomicU64::new(0),
        })
    }

    /// The host is going to launch a step.
    pub(super) fn turn(&self, step: u64) {
        self.publish(Signal::Turn, step);
    }
    /// How many accesses of the host were told.
    pub(super) fn told(&self) -> u64 {
        self.told.load(Ordering::SeqCst)
    }

    fn publish(&self, signal: Signal, step: u64) {
        self.standin.publish(number(signal, step));
    }
    fn acquire(&self, signal: Signal, step: u64) {
        self.standin.acquire(number(signal, step));
    }
}

/// A signal's number, which no other has.
fn number(signal: Signal, step: u64) -> u64 {
    let (kind, which) = match signal {
        Signal::Turn => (0, 0),
        Signal::Event(event) => (1, event),
        Signal::Io(stream) => (2, stream),
        Signal::Done(stream) => (3, stream),
    };
    kind << 56 | (which as u64) << 32 | step
}

/// Bytes of the host that a command touches.
struct Touch {
    address: u64,
    bytes: u64,
    write: bool,
}

/// A launch or copy.
struct Watched {
    stream: usize,
    /// What it does on the host.
    host: Vec<Touch>,
}

/// The backend.
pub(super) struct WatchedCuda {
    watch: Arc<Watch>,
    inner: Cuda,
    /// Where each pool of the host begins; 0 for a device's.
    pools: Vec<u64>,
    on_device: Vec<bool>,
    commands: BTreeMap<usize, Watched>,
    /// Launches and copies of a stream, and how many it has submitted.
    streams: Mutex<BTreeMap<usize, (u64, u64)>>,
}

impl WatchedCuda {
    pub(super) fn new(
        watch: &Arc<Watch>,
        options: &Options,
        cuda: CudaOptions,
    ) -> Result<WatchedCuda, Error> {
        let cuda = CudaOptions {
            library: Some(watch.standin.path().into()),
            ..cuda
        };
        Ok(WatchedCuda {
            watch: watch.clone(),
            inner: Cuda::new(options, cuda)?,
            pools: vec![],
            on_device: vec![],
            commands: BTreeMap::new(),
            streams: Mutex::default(),
        })
    }

    fn prepared(&mut self, command: CommandId, stream: StreamId, host: Vec<Touch>) {
        let stream = stream.0;
        self.streams.lock().unwrap().entry(stream).or_default().0 += 1;
        self.commands.insert(command.0, Watched { stream, host });
    }

    /// Bytes of the host, unless they are a device's.
    fn touch(&self, place: Place, bytes: u64, write: bool) -> Option<Touch> {
        let pool = place.pool as usize;
        (!self.on_device[pool] && bytes > 0).then(|| Touch {
            address: self.pools[pool] + place.offset,
            bytes,
            write,
        })
    }

    fn tell(&self, touch: &Touch) {
        self.watch.told.fetch_add(1, Ordering::SeqCst);
        let Touch {
            address,
            bytes,
            write,
        } = *touch;
        self.watch.standin.host_access(address, bytes, write);
    }

    /// Around a command: the first one of a step comes after the host's turn.
    fn around(
        &self,
        command: CommandId,
        run: impl FnOnce() -> Result<(), CommandError>,
    ) -> Result<(), CommandError> {
        let Watched { stream, host } = &self.commands[&command.0];
        let step = {
            let mut streams = self.streams.lock().unwrap();
            let (each, submitted) = streams.get_mut(stream).unwrap();
            let is_first = submitted.is_multiple_of(*each);
            *submitted += 1;
            is_first.then_some((*submitted - 1) / *each + 1)
        };
        if let Some(step) = step {
            self.watch.acquire(Signal::Turn, step);
        }
        let done = run();
        host.iter().for_each(|touch| self.tell(touch));
        self.watch.publish(Signal::Done(*stream), 0);
        done
    }

    fn skips(&self, stream: StreamId, event: EventId) -> bool {
        self.watch.skipped == Some((stream.0, event.0))
    }
}

impl Backend for WatchedCuda {
    fn create_stream(&mut self, stream: StreamId, name: &str) -> Result<(), Error> {
        self.inner.create_stream(stream, name)
    }
    fn create_event(&mut self, event: EventId, stream: StreamId) -> Result<(), Error> {
        self.inner.create_event(event, stream)
    }
    fn load_object(&mut self, object: &Object) -> Result<(), Error> {
        self.inner.load_object(object)
    }
    fn load_kernel(&mut self, kernel: &Kernel) -> Result<(), Error> {
        self.inner.load_kernel(kernel)
    }

    fn allocate(&mut self, pool: &Pool) -> Result<(), Error> {
        let before = self.watch.standin.registered();
        self.inner.allocate(pool)?;
        let after = self.watch.standin.registered();
        let new = after.iter().find(|range| !before.contains(range));
        self.pools.push(new.map_or(0, |[address, _]| *address));
        self.on_device.push(pool.space != MemorySpace::Host);
        Ok(())
    }

    fn prepare_launch(
        &mut self,
        command: CommandId,
        stream: StreamId,
        launch: Launch<'_>,
    ) -> Result<(), Error> {
        self.inner.prepare_launch(command, stream, launch)?;
        let all = |operands: &[Operand], write| -> Vec<Touch> {
            let touch = |x: &Operand| self.touch(x.place, x.bytes().unwrap(), write);
            operands.iter().filter_map(touch).collect()
        };
        let scratch = launch
            .scratch
            .and_then(|r| self.touch(r.place, r.bytes, true));
        let mut host = all(launch.ins, false);
        host.extend(all(launch.outs, true));
        host.extend(scratch);
        self.prepared(command, stream, host);
        Ok(())
    }

    fn prepare_copy(
        &mut self,
        command: CommandId,
        stream: StreamId,
        copy: Copy,
    ) -> Result<(), Error> {
        self.inner.prepare_copy(command, stream, copy)?;
        let ends = [
            self.touch(copy.src, copy.bytes, false),
            self.touch(copy.dst, copy.bytes, true),
        ];
        // What the device copies, the stand-in sees.
        let on_host = ends.iter().all(Option::is_some);
        let host = ends.into_iter().flatten().filter(|_| on_host).collect();
        self.prepared(command, stream, host);
        Ok(())
    }

    fn prepare_wait(
        &mut self,
        command: CommandId,
        stream: StreamId,
        event: EventId,
    ) -> Result<(), Error> {
        self.inner.prepare_wait(command, stream, event)
    }

    fn prepare_record(
        &mut self,
        command: CommandId,
        stream: StreamId,
        event: EventId,
    ) -> Result<(), Error> {
        self.inner.prepare_record(command, stream, event)
    }

    fn notes(&self) -> Vec<String> {
        self.inner.notes()
    }
    fn start(&mut self) -> Result<(), Error> {
        self.inner.start()
    }

    fn write(&self, to: Place, bytes: &[u8]) -> Result<(), Error> {
        if let Some(touch) = self.touch(to, bytes.len() as u64, true) {
            self.tell(&touch);
        }
        self.inner.write(to, bytes)
    }
    fn read(&self, from: Place, bytes: &mut [u8]) -> Result<(), Error> {
        if let Some(touch) = self.touch(from, bytes.len() as u64, false) {
            self.tell(&touch);
        }
        self.inner.read(from, bytes)
    }
    fn fill(&self, range: Range, byte: u8) -> Result<(), Error> {
        if let Some(touch) = self.touch(range.place, range.bytes, true) {
            self.tell(&touch);
        }
        self.inner.fill(range, byte)
    }

    fn enter(&self, stream: StreamId) {
        self.inner.enter(stream);
    }
    fn launch(&self, command: CommandId) -> Result<(), CommandError> {
        self.around(command, || self.inner.launch(command))
    }
    fn copy(&self, command: CommandId) -> Result<(), CommandError> {
        self.around(command, || self.inner.copy(command))
    }
    fn record(&self, stream: StreamId, event: EventId, step: u64) -> Result<(), CommandError> {
        self.inner.record(stream, event, step)?;
        self.watch.publish(Signal::Event(event.0), step);
        Ok(())
    }
    fn wait(&self, stream: StreamId, event: EventId, step: u64) -> Result<(), CommandError> {
        if self.skips(stream, event) {
            return Ok(());
        }
        self.watch.acquire(Signal::Event(event.0), step);
        self.inner.wait(stream, event, step)
    }
    fn is_queued(&self, command: CommandId) -> bool {
        self.inner.is_queued(command)
    }
    fn begin(&self, stream: StreamId, command: CommandId, step: u64) -> Result<(), CommandError> {
        self.inner.begin(stream, command, step)
    }
    fn end(&self, stream: StreamId, command: CommandId, step: u64) -> Result<(), CommandError> {
        self.inner.end(stream, command, step)
    }
    fn ran(&self, command: CommandId, step: u64) -> Result<Option<Ran>, CommandError> {
        self.inner.ran(command, step)
    }
    fn mark_io(&self, stream: StreamId, step: u64) -> Result<(), CommandError> {
        self.inner.mark_io(stream, step)?;
        self.watch.publish(Signal::Io(stream.0), step);
        Ok(())
    }
    fn synchronize_io(&self, stream: StreamId, step: u64) -> Result<(), CommandError> {
        self.watch.acquire(Signal::Io(stream.0), step);
        self.inner.synchronize_io(stream, step)
    }
    fn synchronize(&self, stream: StreamId) -> Result<(), CommandError> {
        self.watch.acquire(Signal::Done(stream.0), 0);
        self.inner.synchronize(stream)
    }
    fn patience(&self) -> Option<Duration> {
        self.inner.patience()
    }
    fn progress(&self) -> Option<u64> {
        self.inner.progress()
    }
    fn diagnose(&self) -> CommandError {
        self.inner.diagnose()
    }

    fn give_up(&self) {
        self.inner.give_up();
    }
    fn halt(&self) {
        self.inner.halt();
    }
}
