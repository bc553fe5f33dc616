//! The CUDA backend: a device's pool is one block of its memory, each stream a queue of the device,
//! and kernels are PTX. What stays on the host, an optimizer's updates say, is [`HostWork`]. The
//! host also copies to and from pools on a disk.
//!
//! Commands are submitted by the thread of their stream and run when the device gets there. An
//! event is recorded by a call, and a wait that is called before that waits for nothing. The
//! machine calls [`Backend::wait`] only after the [`Backend::record`] that it is for. Steps
//! overlap, so each event of the artifact has two of the driver's: one for even steps, one for odd
//! steps. A stream that is two steps ahead records one of them again. A wait for the older record
//! then waits for more than it must. It cannot wait in a circle: a stream submits what waits for
//! the host only after the host has done it, so submitted commands depend on submitted commands
//! alone.
//!
//! A stream may have work of the host and of the device. Work of the host begins when what the
//! stream submitted before is done, and is done when its call returns.
//!
//! Nothing is allocated after [`Backend::start`].

use super::backend::{
    Backend, CommandError, CommandId, Copy, EventId, Launch, LentPlace, Ran, StreamId,
};
use super::cuda_graphs::{Graphs, Start};
use super::cuda_indices::Indices;
use super::cuda_products::{Operands, ProductLibrary, Products};
use super::cuda_times::Times;
use super::host::{ForeignLaunch, HostWork, LentEnd, LentEnds, put};
use super::lent::{Holder, Lent};
use super::options::Options;
use crate::Error;
use crate::cuda::{
    Arguments, Cut, Device, DeviceBlock, DeviceRange, Driver, DriverError, Event, Function, Grid,
    Module, ModuleError, Priority, Product, Registered, Staging, Status, Stream, Transfer,
};
use crate::disk::{DiskCopy, Disks};
use crate::foreign::Foreign;
use crate::kernel::Tensor;
use crate::memory::{self, Borrowed};
use crate::sync::unpoisoned;
use artifact::{Attr, Code, Kernel, MemorySpace, Object, Operand, Place, Pool, Range, Sm, Target};
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Which driver and device, and how commands are submitted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CudaOptions {
    /// The driver's library; `None` for the one that `LIGHTERAGE_CUDA` names, and if it names none,
    /// `libcuda.so.1`.
    pub library: Option<PathBuf>,
    /// The device's number, from 0.
    pub device: u32,
    /// Waits for each command before the next is submitted, so that an error names the line that
    /// caused it. The default is whether the variable `LIGHTERAGE_CUDA_SYNC` is 1.
    pub synchronous: bool,
    /// A device that has something to do and reaches no event for so long counts as stuck. The
    /// default is what the variable `LIGHTERAGE_CUDA_TIMEOUT` says in seconds, or ten minutes.
    pub patience: Duration,
    /// Submits launches between which a stream has no event and no copy by one call, as graphs. A
    /// traced, shuffled or synchronous run has none. The default is whether the variable
    /// `LIGHTERAGE_CUDA_GRAPHS` is 1.
    pub graphs: bool,
    /// Copies are cut into pieces of at most so many bytes.
    pub copy_bytes: u64,
    /// Pools on the host are pinned in pieces of so many bytes.
    pub register_bytes: u64,
    /// Bytes of the host go to the device's pool, and come from there, by two pieces of pinned
    /// memory of so many bytes.
    pub staging_bytes: usize,
    /// Whether the library may round the factors of f32 products to TF32:
    /// [`artifact::Artifact::tf32`].
    pub tf32: bool,
    /// What computes products. The default is what the variable `LIGHTERAGE_CUBLASLT` says.
    pub products: ProductLibrary,
    /// The file that keeps the algorithms of cuBLASLt from one run to the next, if there is one.
    pub algorithms: Option<PathBuf>,
    /// The folder of pools that are on a disk.
    pub disk: Option<PathBuf>,
}

impl Default for CudaOptions {
    fn default() -> CudaOptions {
        CudaOptions {
            library: None,
            device: 0,
            synchronous: std::env::var_os("LIGHTERAGE_CUDA_SYNC").is_some_and(|value| value == "1"),
            graphs: std::env::var_os("LIGHTERAGE_CUDA_GRAPHS").is_some_and(|value| value == "1"),
            patience: patience(),
            // About a millisecond on PCIe 5, of which 10 µs are latency.
            copy_bytes: 64 << 20,
            // Single calls for 512 GiB fail on some systems.
            register_bytes: 64 << 30,
            staging_bytes: 1 << 20,
            tf32: false,
            products: ProductLibrary::of_environment(),
            algorithms: None,
            disk: None,
        }
    }
}

/// Longer than a step of any model that fits: events lie within steps.
const PATIENCE: Duration = Duration::from_secs(600);

/// The time that the environment names, if it names one.
fn patience() -> Duration {
    let named = std::env::var("LIGHTERAGE_CUDA_TIMEOUT").ok();
    let seconds = named.and_then(|text| text.trim().parse::<f64>().ok());
    let named = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    named.filter(|time| !time.is_zero()).unwrap_or(PATIENCE)
}

/// A GPU by NVIDIA's driver, and the processor beside it.
///
/// It runs what it is given: [`Machine`](crate::Machine) gives it commands of validated artifacts.
pub struct Cuda {
    // What the driver has goes before the memory that it may touch: fields are dropped in this
    // order.
    queues: Vec<Queue>,
    marks: Vec<Mark>,
    /// In a traced run, when the device ran commands.
    times: Option<Times>,
    /// Launches that are submitted together.
    graphs: Mutex<Graphs>,
    /// How often the host has waited for a stream until it was done.
    synchronized: AtomicU64,
    /// Looks at indices before launches that have some.
    indices: Indices,
    /// What reads or writes a tensor of the caller.
    lent: LentEnds,
    /// cuBLASLt, if it is used. Products that are prepared keep it.
    products: Products,
    /// Streams of waits, and what they wait for.
    waits: Vec<(CommandId, StreamId, EventId)>,
    /// By the command's number.
    work: Vec<Option<Work>>,
    /// By the kernel's number; `None` for those of the host.
    kernels: Vec<Option<DeviceKernel>>,
    /// By the object's number; `None` for those of the host.
    modules: Vec<Option<Arc<Module>>>,
    /// The way to the device's pools for the host, if there are any.
    staging: Option<Mutex<Staging>>,
    pools: Vec<Memory>,
    /// Those of another step, by number, which are allocated already.
    given: Vec<Memory>,
    host: HostWork,
    disks: Disks,
    /// Who can use the addresses of the device's memory.
    holder: Holder,
    /// Whether commands should end early.
    halted: AtomicBool,
    /// In a synchronous run, the command that was submitted last.
    running: AtomicUsize,
    /// Whether a command has failed. A synchronous run holds it during each command.
    has_failed: Mutex<bool>,
    device: Device,
    options: CudaOptions,
}

/// A stream of the artifact.
struct Queue {
    name: String,
    /// The device's part of it, if it has any.
    stream: Option<Stream>,
    /// What the host waits for in a step, for even steps and for odd ones, and the last step that
    /// recorded it.
    io: Option<[Event; 2]>,
    io_step: AtomicU64,
    /// Whether it has commands of the device, among them launches, and of the host.
    has_device: bool,
    has_launches: bool,
    has_host: bool,
    /// Its commands, to tell which one a stuck device does not finish.
    order: Vec<Item>,
}

/// A command of a stream.
enum Item {
    Work(CommandId),
    Record(EventId),
    Wait(EventId),
}

/// An event of the artifact.
struct Mark {
    recorder: StreamId,
    /// The last step that recorded it.
    step: AtomicU64,
    /// The driver's, for even steps and for odd ones; `None` if the host records it.
    slots: Option<[Event; 2]>,
}

/// Where a pool lies. A clone is the same memory.
#[derive(Clone)]
enum Memory {
    Device(Arc<DeviceBlock>),
    /// Pinned; the arena is the [`HostWork`]'s.
    Host(#[allow(dead_code, reason = "its drop is what it is kept for")] Arc<Registered>),
    /// It is one of the [`Disks`].
    Disk,
    /// It is the caller's, on the device: the [`HostWork`] knows its tensors.
    Lent,
}

/// A kernel of the artifact, resolved.
struct DeviceKernel {
    op: String,
    attrs: Vec<(String, Attr)>,
    phases: Arc<[(Function, Grid)]>,
    has_scratch: bool,
}

/// A launch or a copy of the artifact, resolved.
struct Work {
    stream: StreamId,
    does: Does,
}

enum Does {
    /// A kernel on the device: its phases take the same arguments.
    Launch(Arc<[(Function, Grid)]>, Mutex<Arc<Arguments>>),
    /// A product by cuBLASLt, and which operands of the launch are its own.
    Product(Box<Mutex<Product>>, Operands),
    /// A copy with an end on the device.
    Transfer(Transfer),
    /// A kernel on the host.
    HostLaunch,
    /// What the caller computes, on the device by queues of its own.
    Foreign(Mutex<ForeignLaunch>),
    /// A copy on the host.
    HostCopy { src: Tensor, dst: Tensor },
    /// A copy between the host and a disk, which the host runs.
    DiskCopy(DiskCopy),
}

impl Cuda {
    /// A backend without pools. Of the machine's options the number of threads counts, and whether
    /// the run is traced.
    ///
    /// # Errors
    /// There is no driver or no device, or the driver refuses.
    pub fn new(options: &Options, cuda: CudaOptions) -> Result<Cuda, Error> {
        let driver = Driver::open(cuda.library.as_deref()).map_err(|e| broken(&e))?;
        let device = Device::new(driver, cuda.device).map_err(|e| broken(&e))?;
        Cuda::of_device(device, options, cuda)
    }

    /// The same with the caller's functions for what has no kernel.
    pub(crate) fn calling(mut self, foreign: Option<Arc<dyn Foreign>>) -> Cuda {
        self.host.call(foreign);
        self
    }

    /// The same on a device that is known already.
    fn of_device(device: Device, options: &Options, cuda: CudaOptions) -> Result<Cuda, Error> {
        // A shuffled run fills bytes between commands.
        let graphs = cuda.graphs && options.shuffle.is_none();
        let cuda = CudaOptions { graphs, ..cuda };
        let times = match options.trace {
            true => Some(Times::new(&device).map_err(|e| broken(&e))?),
            false => None,
        };
        let other_driver = cuda.library.is_some() || Driver::is_named();
        let file = cuda.algorithms.as_deref();
        let products = Products::new(&device, &cuda.products, other_driver, (file, cuda.tf32))?;
        Ok(Cuda {
            products,
            queues: Vec::new(),
            marks: Vec::new(),
            times,
            graphs: Mutex::default(),
            synchronized: AtomicU64::new(0),
            indices: Indices::new(),
            waits: Vec::new(),
            work: Vec::new(),
            kernels: Vec::new(),
            modules: Vec::new(),
            staging: None,
            pools: Vec::new(),
            given: Vec::new(),
            host: HostWork::new(options.team()),
            lent: LentEnds::default(),
            disks: Disks::new(cuda.disk.as_deref()),
            holder: Holder::Gpu(cuda.device),
            halted: AtomicBool::new(false),
            running: AtomicUsize::new(usize::MAX),
            has_failed: Mutex::new(false),
            device,
            options: cuda,
        })
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cuda")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // Before the host's pools are freed the device is done with them: all that is submitted
        // ends by itself. A device that has failed is done too.
        let _ = self.device.bind().and_then(|()| self.device.synchronize());
    }
}

// --- loading ---

impl Cuda {
    /// Refuses code that this device or its driver cannot run.
    fn check_target(&self, sm: Sm, ptx: &[u8]) -> Result<(), Error> {
        let device = &self.device;
        if sm.0 > device.sm() {
            return Err(Error::Unsupported(format!(
                "the artifact's kernels are for {sm}; this GPU, {}, is sm_{}",
                device.name(),
                device.sm()
            )));
        }
        let version = isa(ptx);
        let needed = version.and_then(driver_of);
        match (version, needed) {
            (Some((major, minor)), Some(needed)) if needed > device.driver_version() => {
                let version = |version: u32| format!("{}.{}", version / 1000, version % 1000 / 10);
                Err(Error::Unsupported(format!(
                    "the artifact's kernels are PTX {major}.{minor}, which takes a driver for CUDA \
                     {} or later; this one is for CUDA {}",
                    version(needed),
                    version(device.driver_version())
                )))
            }
            _ => Ok(()),
        }
    }

    /// A phase of a kernel, as the device starts it.
    fn phase(
        &self,
        module: &Arc<Module>,
        code: &Code,
        phase: &artifact::Phase,
    ) -> Result<(Function, Grid), Error> {
        let function = module.function(&phase.symbol, phase.shared_bytes);
        let function = function.map_err(|e| {
            let text = format!("function {} of object {}: {e}", phase.symbol, code.object);
            match e {
                ModuleError::Driver { .. } | ModuleError::Shared(_) => Error::Unsupported(text),
                ModuleError::NotText | ModuleError::Name(_) => Error::Invalid(text),
            }
        })?;
        if phase.threads > function.most_threads() {
            return Err(Error::Unsupported(format!(
                "{} runs in blocks of {} threads; this GPU, {}, takes at most {} of it",
                phase.symbol,
                phase.threads,
                self.device.name(),
                function.most_threads()
            )));
        }
        // Kernels that no line launches are not validated.
        let blocks = u32::try_from(phase.parts)
            .map_err(|_| Error::Invalid(format!("{} has {} blocks", phase.symbol, phase.parts)))?;
        let grid = Grid {
            blocks,
            threads: phase.threads,
            shared_bytes: phase.shared_bytes,
        };
        Ok((function, grid))
    }

    fn allocate_device(&mut self, pool: &Pool) -> Result<DeviceBlock, Error> {
        let (free, all) = self.device.memory().map_err(|e| broken(&e))?;
        let too_large = || {
            // What is free now is free without the context, which is there already.
            let budget = match free >> 20 {
                0 => free.to_string(),
                mib => format!("{mib}MiB"),
            };
            Error::Resources(format!(
                "the plan needs {} of device memory, free are {} of {}; compile it with --budget \
                 {budget}",
                Size(pool.bytes),
                Size(free),
                Size(all)
            ))
        };
        if pool.bytes > free {
            return Err(too_large());
        }
        DeviceBlock::new(&self.device, pool.bytes).map_err(|e| match e.status() {
            Some(Status::OUT_OF_MEMORY) => too_large(),
            _ => broken(&e),
        })
    }

    fn allocate_host(&mut self, pool: &Pool, number: u32) -> Result<Registered, Error> {
        self.host.allocate(pool)?;
        let arena = self.host.arena(Place {
            pool: number,
            offset: 0,
        });
        Registered::new(&self.device, arena, self.options.register_bytes.max(1)).map_err(|e| {
            Error::Resources(format!(
                "pool {} of {} on the host cannot be pinned: {e}; pinned memory counts for `ulimit \
                 -l` and for a container's limit",
                pool.name,
                Size(pool.bytes)
            ))
        })
    }

    /// Bytes of a pool of the device.
    fn device_range(&self, place: Place, bytes: u64) -> Option<DeviceRange> {
        match &self.pools[place.pool as usize] {
            Memory::Device(block) => Some(block.range(place.offset, bytes)),
            Memory::Lent => {
                let (lent, offset) = self.host.lent(place)?;
                Some(match &lent.memory {
                    Some(memory) => DeviceRange::borrowed(memory, offset, bytes),
                    None => DeviceRange::nowhere(bytes),
                })
            }
            Memory::Host(_) | Memory::Disk => None,
        }
    }

    /// An error if memory of the caller is not the device's.
    fn knows(&self, memory: &Borrowed) -> Result<(), Error> {
        let range = DeviceRange::borrowed(memory, 0, memory.bytes() as u64);
        match self.device.knows(range).map_err(|e| broken(&e))? {
            true => Ok(()),
            false => Err(Error::Host(
                "a state of the caller is not in the GPU's memory".into(),
            )),
        }
    }

    /// A tensor in a pool of the device.
    fn device_tensor(&self, operand: &Operand) -> (Tensor, Holder) {
        let bytes = operand.bytes().unwrap_or(0);
        let range = self.device_range(operand.place, bytes);
        let range = range.expect("a device's tensor should lie in its pools");
        let shape = operand.shape.iter().map(|&d| d as usize);
        let tensor = Tensor {
            dtype: operand.dtype,
            shape: shape.collect(),
            data: std::ptr::with_exposed_provenance_mut(range.address() as usize),
            bytes: bytes as usize,
        };
        (tensor, self.holder)
    }

    /// A tensor for what the caller computes, with what keeps its memory.
    fn lend(&self, operand: &Operand) -> Lent {
        let block = match &self.pools[operand.place.pool as usize] {
            Memory::Host(_) | Memory::Disk => return self.host.lend(operand),
            Memory::Device(block) => Some(block.clone()),
            Memory::Lent => None,
        };
        Lent::new(self.device_tensor(operand), Arc::new(block))
    }

    /// A device's launch of a kernel.
    fn device_launch(
        &self,
        kernel: &DeviceKernel,
        launch: &Launch<'_>,
    ) -> (Arc<[(Function, Grid)]>, Arguments) {
        let operands = launch.ins.iter().chain(launch.outs);
        let scratch = launch.scratch.filter(|_| kernel.has_scratch);
        let places = operands
            .map(|operand| operand.place)
            .chain(scratch.map(|range| range.place));
        let address = |place| {
            let range = self.device_range(place, 0);
            let range = range.expect("a device's kernel should stay in its pools");
            range.address()
        };
        (kernel.phases.clone(), Arguments::new(places.map(address)))
    }

    /// In a traced run: makes what notes when the device runs commands, which are kernels, copies,
    /// and waits of its streams for each other.
    fn time_commands(&mut self) -> Result<(), DriverError> {
        let Some(times) = &mut self.times else {
            return Ok(());
        };
        for (number, work) in self.work.iter().enumerate() {
            match work.as_ref().map(|work| &work.does) {
                Some(Does::Launch(..) | Does::Product(..) | Does::Transfer(_)) => {
                    times.add(&self.device, CommandId(number))?;
                }
                Some(
                    Does::HostLaunch | Does::Foreign(_) | Does::HostCopy { .. } | Does::DiskCopy(_),
                )
                | None => {}
            }
        }
        for &(command, stream, event) in &self.waits {
            let on_device = self.queues[stream.0].stream.is_some();
            if on_device && self.marks[event.0].slots.is_some() {
                times.add(&self.device, command)?;
            }
        }
        Ok(())
    }

    /// Makes graphs of launches that follow each other in a stream.
    fn make_graphs(&self) -> Result<(), DriverError> {
        let mut graphs = Graphs::default();
        for queue in &self.queues {
            let mut run: Vec<CommandId> = vec![];
            for item in &queue.order {
                match item {
                    Item::Work(command) if self.is_device_launch(*command) => run.push(*command),
                    Item::Work(_) | Item::Record(_) | Item::Wait(_) => {
                        graphs.add(&self.device, &run, &self.starts(&run))?;
                        run.clear();
                    }
                }
            }
            graphs.add(&self.device, &run, &self.starts(&run))?;
        }
        *unpoisoned(&self.graphs) = graphs;
        Ok(())
    }

    fn is_device_launch(&self, command: CommandId) -> bool {
        let does = self.work[command.0].as_ref().map(|work| &work.does);
        matches!(does, Some(Does::Launch(..)))
    }

    /// The kernels of launches on the device.
    fn starts(&self, run: &[CommandId]) -> Vec<Start<'_>> {
        let mut starts = vec![];
        for &command in run {
            let work = self.work[command.0].as_ref();
            if let Some(Does::Launch(phases, arguments)) = work.map(|work| &work.does) {
                starts.extend(self.indices.starts(command));
                let arguments = unpoisoned(arguments);
                let phases = phases.iter();
                starts.extend(phases.map(|(f, grid)| (f, *grid, arguments.clone())));
            }
        }
        starts
    }

    /// The device's part of a stream.
    fn make_queue(&self, queue: &mut Queue) -> Result<(), DriverError> {
        let priority = match queue.has_launches {
            true => Priority::Usual,
            // Kernels wait for copies more often than copies for them.
            false => Priority::High,
        };
        queue.stream = Some(self.device.stream(priority)?);
        queue.io = Some([self.device.event()?, self.device.event()?]);
        Ok(())
    }
}

/// What an error is while an artifact is loaded, unless more is known.
fn broken(error: &DriverError) -> Error {
    match error.status() {
        Some(Status::OUT_OF_MEMORY) => Error::Resources(error.to_string()),
        _ => Error::Unsupported(error.to_string()),
    }
}

/// The version that PTX says it has.
fn isa(ptx: &[u8]) -> Option<(u32, u32)> {
    let text = std::str::from_utf8(ptx).ok()?;
    let mut lines = text.lines().map(str::trim);
    let version = lines.find_map(|line| line.strip_prefix(".version"))?;
    let (major, minor) = version.trim().split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The CUDA version whose driver takes a version of PTX first, as drivers write it: 12020 is 12.2.
/// PTX ISA, "Release Notes". `None` for what every driver that has our functions takes, and for
/// what is not known: the driver says more of that.
fn driver_of((major, minor): (u32, u32)) -> Option<u32> {
    match (major, minor) {
        (8, 0..=5) => Some(12_000 + 10 * minor),
        // CUDA 12.6 brought no version of its own.
        (8, 6..=8) => Some(12_010 + 10 * minor),
        (9, _) => Some(13_000 + 10 * minor),
        _ => None,
    }
}

/// A number of bytes, for messages.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Size(bytes) = *self;
        let of = |unit: u64| bytes as f64 / unit as f64;
        match bytes {
            0x4000_0000.. => write!(f, "{:.1} GiB", of(1 << 30)),
            0x10_0000.. => write!(f, "{:.1} MiB", of(1 << 20)),
            _ => write!(f, "{bytes} bytes"),
        }
    }
}

// --- running ---

impl Cuda {
    /// Waits for what the stream submitted, so that the host may go on.
    fn host_turn(&self, stream: StreamId) -> Result<(), CommandError> {
        match &self.queues[stream.0].stream {
            Some(queue) => queue.synchronize().map_err(|e| self.failed(&e)),
            None => Ok(()),
        }
    }

    /// In a synchronous run: a command while no other runs. After one has failed, others do
    /// nothing and report nothing: the device is dead for all streams, and only the line of the
    /// command that failed is the cause.
    fn alone(&self, does: impl FnOnce() -> Result<(), CommandError>) -> Result<(), CommandError> {
        if !self.options.synchronous {
            return does();
        }
        let mut has_failed = unpoisoned(&self.has_failed);
        if *has_failed {
            return Ok(());
        }
        let done = does();
        *has_failed = done.is_err();
        done
    }

    /// After a command: waits for it, if the options say so.
    fn submitted(&self, stream: &Stream) -> Result<(), DriverError> {
        match self.options.synchronous {
            true => stream.synchronize(),
            false => Ok(()),
        }
    }

    /// Why a command failed. The device tells of a kernel's fault at a later call.
    fn failed(&self, error: &DriverError) -> CommandError {
        let hint = match error.is_fatal() && !self.options.synchronous {
            true => {
                "; a command before it may be the cause: with LIGHTERAGE_CUDA_SYNC=1 the line is \
                 exact"
            }
            false => "",
        };
        CommandError {
            of_device: true,
            ..CommandError::from(format!("{error}{hint}"))
        }
    }

    /// Has the device note a time.
    fn note(
        &self,
        does: impl FnOnce(&Times) -> Result<(), DriverError>,
    ) -> Result<(), CommandError> {
        let Some(times) = &self.times else {
            return Ok(());
        };
        self.alone(|| does(times).map_err(|e| self.failed(&e)))
    }

    /// The device's part of a stream that has work there.
    fn stream(&self, stream: StreamId) -> &Stream {
        let queue = self.queues[stream.0].stream.as_ref();
        queue.expect("a stream with work of the device should have its part there")
    }

    fn run(&self, command: CommandId) -> Result<(), CommandError> {
        self.running.store(command.0, Ordering::SeqCst);
        let work = self.work[command.0].as_ref();
        let Work { stream, does } = work.expect("a command should be prepared before it runs");
        match does {
            Does::Launch(phases, arguments) => {
                let queue = self.stream(*stream);
                if self.options.graphs {
                    let submitted = unpoisoned(&self.graphs).submit(queue, command);
                    if submitted.map_err(|e| self.failed(&e))? {
                        return Ok(());
                    }
                }
                let arguments = unpoisoned(arguments);
                let launch =
                    |(function, grid): &(Function, Grid)| queue.launch(function, *grid, &arguments);
                let done = self.indices.submit(queue, command);
                done.and_then(|()| phases.iter().try_for_each(launch))
                    .and_then(|()| self.submitted(queue))
                    .map_err(|e| self.failed(&e))?;
                match self.options.synchronous {
                    true => self.indices.found(),
                    false => Ok(()),
                }
            }
            Does::Product(product, _) => {
                let queue = self.stream(*stream);
                let done = queue.multiply(&unpoisoned(product));
                done.and_then(|()| self.submitted(queue))
                    .map_err(|e| self.failed(&e))
            }
            Does::Transfer(transfer) if !transfer.has_memory() => {
                Err("the caller gave no memory for it".to_string().into())
            }
            Does::Transfer(transfer) => {
                let queue = self.stream(*stream);
                let done = transfer.submit(queue);
                done.and_then(|()| self.submitted(queue))
                    .map_err(|e| self.failed(&e))
            }
            Does::HostLaunch => {
                self.host_turn(*stream)?;
                self.host.launch(command)
            }
            Does::Foreign(launch) => {
                self.host_turn(*stream)?;
                unpoisoned(launch).run()
            }
            Does::HostCopy { src, dst } => {
                self.host_turn(*stream)?;
                memory::copy(src, dst, 0, src.bytes);
                Ok(())
            }
            Does::DiskCopy(copy) => {
                self.host_turn(*stream)?;
                let stopped = || self.halted.load(Ordering::SeqCst);
                Ok(self.disks.run(copy, stopped)?)
            }
        }
    }

    /// Has the host move bytes of a device's pool.
    fn stage(
        &self,
        does: impl FnOnce(&mut Staging) -> Result<(), DriverError>,
    ) -> Result<(), Error> {
        let staging = self.staging.as_ref();
        let staging = staging.expect("a device's pool should have a way to it");
        let staged = self
            .device
            .bind()
            .and_then(|()| does(&mut unpoisoned(staging)));
        staged.map_err(|e| {
            Error::Host(format!(
                "the device's memory cannot be reached: {e}; what only it had is lost, so go back \
                 to the last checkpoint"
            ))
        })
    }
}

impl Backend for Cuda {
    fn create_stream(&mut self, _stream: StreamId, name: &str) -> Result<(), Error> {
        self.queues.push(Queue {
            name: name.into(),
            stream: None,
            io: None,
            io_step: AtomicU64::new(0),
            has_device: false,
            has_launches: false,
            has_host: false,
            order: Vec::new(),
        });
        Ok(())
    }

    fn create_event(&mut self, _event: EventId, stream: StreamId) -> Result<(), Error> {
        self.marks.push(Mark {
            recorder: stream,
            step: AtomicU64::new(0),
            slots: None,
        });
        Ok(())
    }

    fn load_object(&mut self, object: &Object) -> Result<(), Error> {
        let sm = match object.target {
            Target::Cpu(_) => {
                self.modules.push(None);
                return self.host.load_object(object);
            }
            Target::Gpu(sm) => sm,
        };
        self.check_target(sm, &object.bytes)?;
        let number = self.modules.len();
        let module = Module::load(&self.device, &object.bytes).map_err(|e| {
            let text = format!("object {number}: {e}");
            match e.driver() {
                Some(_) => Error::Unsupported(text),
                None => Error::Invalid(text),
            }
        })?;
        self.modules.push(Some(module));
        self.host.skip_object();
        Ok(())
    }

    fn load_kernel(&mut self, kernel: &Kernel) -> Result<(), Error> {
        let code = kernel.code.as_ref();
        let object = code.and_then(|code| self.modules.get(code.object as usize));
        let module = object.and_then(Option::as_ref);
        let (Some(code), Some(module)) = (code, module) else {
            self.kernels.push(None);
            return self.host.load_kernel(kernel);
        };
        let phases = code
            .phases
            .iter()
            .map(|phase| self.phase(module, code, phase))
            .collect::<Result<_, _>>()?;
        self.kernels.push(Some(DeviceKernel {
            op: kernel.op.clone(),
            attrs: kernel.attrs.clone(),
            phases,
            has_scratch: code.scratch > 0,
        }));
        self.host.skip_kernel();
        Ok(())
    }

    fn sharing(
        &self,
        options: &Options,
        foreign: Option<Arc<dyn Foreign>>,
    ) -> Result<Box<dyn Backend>, Error> {
        // The calling thread may be another than the one that loaded this step.
        self.device.bind().map_err(|e| broken(&e))?;
        let other = Cuda::of_device(self.device.clone(), options, self.options.clone())?;
        let mut other = other.calling(foreign);
        other.host.share(&self.host);
        other.given.clone_from(&self.pools);
        other.holder = self.holder;
        other.disks = self.disks.sharing();
        Ok(Box::new(other))
    }

    fn allocate(&mut self, pool: &Pool) -> Result<(), Error> {
        self.disks.allocate(pool)?;
        if let Some(memory) = self.given.get(self.pools.len()) {
            match memory {
                Memory::Device(_) | Memory::Disk | Memory::Lent => self.host.skip_pool(),
                Memory::Host(_) => self.host.allocate(pool)?,
            }
            self.pools.push(memory.clone());
            return Ok(());
        }
        let memory = match pool.space {
            MemorySpace::Device(_) => {
                self.host.skip_pool();
                let block = self.allocate_device(pool)?;
                if block.is_of_host() {
                    self.holder = Holder::Host;
                }
                Memory::Device(Arc::new(block))
            }
            MemorySpace::Host => {
                let number = self.pools.len() as u32;
                Memory::Host(Arc::new(self.allocate_host(pool, number)?))
            }
            MemorySpace::Disk => {
                self.host.skip_pool();
                Memory::Disk
            }
        };
        self.pools.push(memory);
        Ok(())
    }

    fn borrow(&mut self, pool: &Pool, lent: &[LentPlace]) -> Result<(), Error> {
        match pool.space {
            MemorySpace::Device(_) => {}
            MemorySpace::Host | MemorySpace::Disk => {
                let why = format!("pool {} of the caller is not on the device", pool.name);
                return Err(Error::Unsupported(why));
            }
        }
        let mut known = lent.iter().filter_map(|lent| lent.memory.as_ref());
        known.try_for_each(|memory| self.knows(memory))?;
        self.disks.skip();
        self.host.borrow(lent);
        self.pools.push(Memory::Lent);
        Ok(())
    }

    fn point(&self, place: Place, to: Borrowed) -> Result<(), Error> {
        let ends = self.lent.of(place);
        let does = |end: &LentEnd| self.work[end.command.0].as_ref().map(|work| &work.does);
        // Kernels read what copies only carry.
        if !ends
            .iter()
            .all(|end| matches!(does(end), Some(Does::Transfer(_))))
        {
            self.knows(&to)?;
        }
        self.host.lend_at(place, to);
        for end in ends {
            let address = DeviceRange::borrowed(&to, end.offset, end.bytes).address();
            match does(end) {
                Some(Does::Transfer(copy)) => copy.point(end.operand == 0, &to, end.offset),
                Some(Does::Launch(_, arguments)) => {
                    let mut arguments = unpoisoned(arguments);
                    let values = arguments.values().iter().copied().enumerate();
                    let values = values.map(|(i, v)| if i == end.operand { address } else { v });
                    *arguments = Arc::new(Arguments::new(values));
                    self.indices.point(end.command, end.operand, address);
                    // They have the old addresses.
                    *unpoisoned(&self.graphs) = Graphs::default();
                }
                Some(Does::Product(product, operands)) => {
                    let pointed = operands.point(&mut unpoisoned(product), end.operand, address);
                    pointed.map_err(|e| broken(&e.into()))?;
                }
                Some(Does::Foreign(launch)) => {
                    let address = std::ptr::with_exposed_provenance_mut(address as usize);
                    unpoisoned(launch).point(end.operand, address);
                }
                Some(Does::HostLaunch | Does::HostCopy { .. } | Does::DiskCopy(_)) | None => {
                    unreachable!("what is in the device's memory should be used on the device")
                }
            }
        }
        Ok(())
    }

    fn prepare_launch(
        &mut self,
        command: CommandId,
        stream: StreamId,
        launch: Launch<'_>,
    ) -> Result<(), Error> {
        let does = match &self.kernels[launch.kernel] {
            Some(kernel) => {
                let (phases, arguments) = self.device_launch(kernel, &launch);
                let address = |operand: usize| arguments.values()[operand];
                let op = (&*kernel.op, &*kernel.attrs);
                self.indices.add(command, op, &launch, address);
                let workspace = launch.scratch;
                let workspace =
                    workspace.and_then(|range| self.device_range(range.place, range.bytes));
                let product = self.products.product(op, &launch, address, workspace);
                let does = match product.map_err(|e| broken(&e))? {
                    Some((product, its)) => Does::Product(Box::new(Mutex::new(product)), its),
                    None => Does::Launch(phases, Mutex::new(Arc::new(arguments))),
                };
                let queue = &mut self.queues[stream.0];
                (queue.has_device, queue.has_launches) = (true, true);
                does
            }
            None => {
                self.queues[stream.0].has_host = true;
                match self.host.foreign(&launch, |operand| self.lend(operand)) {
                    Some(foreign) => Does::Foreign(Mutex::new(foreign)),
                    None => {
                        self.host.prepare(command, launch);
                        Does::HostLaunch
                    }
                }
            }
        };
        self.lent.add(&self.host, command, launch.operands());
        self.queues[stream.0].order.push(Item::Work(command));
        put(&mut self.work, command, Work { stream, does });
        Ok(())
    }

    fn prepare_copy(
        &mut self,
        command: CommandId,
        stream: StreamId,
        copy: Copy,
    ) -> Result<(), Error> {
        let Copy { src, dst, bytes } = copy;
        let cut = Cut {
            copy_bytes: self.options.copy_bytes.max(1),
            register_bytes: self.options.register_bytes.max(1),
        };
        if let Some(copy) = self.disks.copy(&copy, |range| self.host.range(range)) {
            let does = Does::DiskCopy(copy);
            self.queues[stream.0].order.push(Item::Work(command));
            put(&mut self.work, command, Work { stream, does });
            return Ok(());
        }
        let host = |place| self.host.range(Range { place, bytes });
        let ends = (self.device_range(src, bytes), self.device_range(dst, bytes));
        let does = match ends {
            (None, Some(to)) => Does::Transfer(Transfer::copy_in(host(src), src.offset, to, cut)),
            (Some(from), None) => {
                Does::Transfer(Transfer::copy_out(from, host(dst), dst.offset, cut))
            }
            (Some(from), Some(to)) => Does::Transfer(Transfer::within(from, to)),
            (None, None) => Does::HostCopy {
                src: host(src),
                dst: host(dst),
            },
        };
        self.lent.add(&self.host, command, copy.operands());
        let queue = &mut self.queues[stream.0];
        match does {
            Does::Transfer(_) => queue.has_device = true,
            Does::Launch(..)
            | Does::Product(..)
            | Does::HostLaunch
            | Does::Foreign(_)
            | Does::HostCopy { .. }
            | Does::DiskCopy(_) => {}
        }
        queue.order.push(Item::Work(command));
        put(&mut self.work, command, Work { stream, does });
        Ok(())
    }

    fn prepare_wait(
        &mut self,
        command: CommandId,
        stream: StreamId,
        event: EventId,
    ) -> Result<(), Error> {
        self.waits.push((command, stream, event));
        self.queues[stream.0].order.push(Item::Wait(event));
        Ok(())
    }

    fn prepare_record(
        &mut self,
        _command: CommandId,
        stream: StreamId,
        event: EventId,
    ) -> Result<(), Error> {
        self.queues[stream.0].order.push(Item::Record(event));
        Ok(())
    }

    fn notes(&self) -> Vec<String> {
        self.products.note().into_iter().collect()
    }

    fn start(&mut self) -> Result<(), Error> {
        self.products.save();
        let mut queues = std::mem::take(&mut self.queues);
        let mut with_device = queues.iter_mut().filter(|queue| queue.has_device);
        let made = with_device.try_for_each(|queue| self.make_queue(queue));
        self.queues = queues;
        made.map_err(|e| broken(&e))?;
        for mark in &mut self.marks {
            if self.queues[mark.recorder.0].has_device {
                let slot = || self.device.event().map_err(|e| broken(&e));
                mark.slots = Some([slot()?, slot()?]);
            }
        }
        self.time_commands().map_err(|e| broken(&e))?;
        self.indices
            .start(&self.device)
            .map_err(|e| Error::Unsupported(format!("the kernel that looks at indices: {e}")))?;
        let apart = self.times.is_some() || self.options.synchronous;
        if self.options.graphs && !apart {
            self.make_graphs().map_err(|e| broken(&e))?;
        }
        if self
            .pools
            .iter()
            .any(|pool| matches!(pool, Memory::Device(_)))
        {
            let staging = Staging::new(&self.device, self.options.staging_bytes);
            self.staging = Some(Mutex::new(staging.map_err(|e| broken(&e))?));
        }
        self.host.start()
    }

    fn write(&self, to: Place, bytes: &[u8]) -> Result<(), Error> {
        if let Some(written) = self.disks.write(to, bytes) {
            return written;
        }
        match self.device_range(to, bytes.len() as u64) {
            Some(range) => self.stage(|staging| staging.write(range, bytes)),
            None => {
                self.host.arena(to).write(to.offset, bytes);
                Ok(())
            }
        }
    }

    fn read(&self, from: Place, bytes: &mut [u8]) -> Result<(), Error> {
        if let Some(read) = self.disks.read(from, bytes) {
            return read;
        }
        match self.device_range(from, bytes.len() as u64) {
            Some(range) => self.stage(|staging| staging.read(range, bytes)),
            None => {
                self.host.arena(from).read(from.offset, bytes);
                Ok(())
            }
        }
    }

    fn tensor(&self, operand: &Operand) -> Option<(Tensor, Holder)> {
        match self.pools[operand.place.pool as usize] {
            Memory::Host(_) => Some((self.host.tensor(operand), Holder::Host)),
            Memory::Device(_) | Memory::Lent => Some(self.device_tensor(operand)),
            Memory::Disk => None,
        }
    }

    fn fill(&self, range: Range, byte: u8) -> Result<(), Error> {
        if let Some(filled) = self.disks.fill(range, byte) {
            return filled;
        }
        let Range { place, bytes } = range;
        match self.device_range(place, bytes) {
            Some(range) => self.stage(|staging| staging.fill(range, byte)),
            None => {
                self.host.arena(place).fill(place.offset, bytes, byte);
                Ok(())
            }
        }
    }

    fn halt(&self) {
        self.halted.store(true, Ordering::SeqCst);
    }

    fn enter(&self, stream: StreamId) {
        // If the driver refuses, the thread's first call says so.
        let _ = self.device.bind();
        if self.queues[stream.0].has_host {
            self.host.enter();
        }
    }

    fn launch(&self, command: CommandId) -> Result<(), CommandError> {
        self.alone(|| self.run(command))
    }

    fn copy(&self, command: CommandId) -> Result<(), CommandError> {
        self.alone(|| self.run(command))
    }

    fn submits_alone(&self) -> bool {
        !self.options.graphs
    }

    fn record(&self, stream: StreamId, event: EventId, step: u64) -> Result<(), CommandError> {
        let mark = &self.marks[event.0];
        match &mark.slots {
            Some(slots) => {
                let slot = &slots[(step % 2) as usize];
                self.alone(|| {
                    let recorded = self.stream(stream).record(slot);
                    recorded.map_err(|e| self.failed(&e))
                })?;
                mark.step.store(step, Ordering::SeqCst);
                Ok(())
            }
            // The host has done all that comes before it.
            None => Ok(()),
        }
    }

    fn wait(&self, stream: StreamId, event: EventId, step: u64) -> Result<(), CommandError> {
        let Some(slots) = &self.marks[event.0].slots else {
            return Ok(());
        };
        let slot = &slots[(step % 2) as usize];
        self.alone(|| {
            let waited = match &self.queues[stream.0].stream {
                Some(queue) => queue.wait(slot),
                None => slot.synchronize(),
            };
            waited.map_err(|e| self.failed(&e))
        })
    }

    fn is_queued(&self, command: CommandId) -> bool {
        self.times.as_ref().is_some_and(|times| times.has(command))
    }

    fn begin(&self, stream: StreamId, command: CommandId, step: u64) -> Result<(), CommandError> {
        self.note(|times| times.begin(self.stream(stream), command, step))
    }

    fn end(&self, stream: StreamId, command: CommandId, step: u64) -> Result<(), CommandError> {
        self.note(|times| times.end(self.stream(stream), command, step))
    }

    fn ran(&self, command: CommandId, step: u64) -> Result<Option<Ran>, CommandError> {
        let Some(times) = &self.times else {
            return Ok(None);
        };
        times.ran(command, step).map_err(|e| self.failed(&e))
    }

    fn mark_io(&self, stream: StreamId, step: u64) -> Result<(), CommandError> {
        let queue = &self.queues[stream.0];
        if let (Some(stream), Some(io)) = (&queue.stream, &queue.io) {
            self.alone(|| {
                let recorded = stream.record(&io[(step % 2) as usize]);
                recorded.map_err(|e| self.failed(&e))
            })?;
            queue.io_step.store(step, Ordering::SeqCst);
        }
        Ok(())
    }

    fn synchronize_io(&self, stream: StreamId, step: u64) -> Result<(), CommandError> {
        let queue = &self.queues[stream.0];
        match &queue.io {
            Some(io) if queue.io_step.load(Ordering::SeqCst) >= step => {
                let slot = &io[(step % 2) as usize];
                let waited = self.device.bind().and_then(|()| slot.synchronize());
                waited.map_err(|e| self.on(queue, &e))?;
                self.indices.found()
            }
            // No command of it touches inputs or outputs, or none of the device does. What streams
            // that do wait for has run.
            _ => self.indices.found(),
        }
    }

    fn patience(&self) -> Option<Duration> {
        Some(self.options.patience)
    }

    fn progress(&self) -> Option<u64> {
        self.device.bind().ok()?;
        self.busy().next()?;
        let reached = |(number, mark): (usize, &Mark)| match self.is_reached(EventId(number)) {
            true => mark.step.load(Ordering::SeqCst),
            false => 0,
        };
        let reached: u64 = self.marks.iter().enumerate().map(reached).sum();
        // Commands that run alone reach no event.
        Some(reached.wrapping_add(self.synchronized.load(Ordering::SeqCst)))
    }

    fn diagnose(&self) -> CommandError {
        let stream = self.busy().next();
        let depth = self.queues.len();
        let (command, hint) = match self.options.synchronous {
            true => (Some(CommandId(self.running.load(Ordering::SeqCst))), ""),
            false => (
                stream.and_then(|stream| self.stands_at(stream, depth)),
                "it may be a later one, up to the next that another stream waits for; with \
                 LIGHTERAGE_CUDA_SYNC=1 the line is exact, and ",
            ),
        };
        let hint = format!("{hint}LIGHTERAGE_CUDA_TIMEOUT is the time in seconds");
        let error = DriverError::stuck(self.options.patience);
        CommandError {
            why: format!("{error}; {hint}"),
            command,
            of_device: true,
        }
    }

    fn give_up(&self) {
        self.device.give_up(self.options.patience);
    }

    fn synchronize(&self, stream: StreamId) -> Result<(), CommandError> {
        let queue = &self.queues[stream.0];
        let Some(part) = &queue.stream else {
            return Ok(());
        };
        let waited = self.device.bind().and_then(|()| part.synchronize());
        waited.map_err(|e| self.on(queue, &e))?;
        self.synchronized.fetch_add(1, Ordering::SeqCst);
        self.indices.found()
    }
}

// --- a stuck device ---

impl Cuda {
    /// Whether the device has reached what an event's recorder recorded last.
    fn is_reached(&self, event: EventId) -> bool {
        let mark = &self.marks[event.0];
        let step = mark.step.load(Ordering::SeqCst);
        match &mark.slots {
            Some(slots) if step > 0 => {
                let slot = &slots[(step % 2) as usize];
                slot.is_reached().unwrap_or(false)
            }
            _ => true,
        }
    }

    /// The command at which a stream stands: the first one behind the last event that it has
    /// reached in the step of the first one that it has not; or that of the stream for whose event
    /// it waits.
    fn stands_at(&self, stream: usize, depth: usize) -> Option<CommandId> {
        let order = &self.queues[stream].order;
        let step = |event: &EventId| self.marks[event.0].step.load(Ordering::SeqCst);
        let missing = order
            .iter()
            .enumerate()
            .filter_map(|(at, item)| match item {
                Item::Record(event) if !self.is_reached(*event) => Some((step(event), at)),
                Item::Record(_) | Item::Work(_) | Item::Wait(_) => None,
            });
        let end = missing.min().map_or(order.len(), |(_, at)| at);
        let is_record = |item: &Item| matches!(item, Item::Record(_));
        let begin = order[..end]
            .iter()
            .rposition(is_record)
            .map_or(0, |at| at + 1);
        for item in &order[begin..end] {
            match item {
                Item::Work(command) => return Some(*command),
                Item::Wait(event) if depth > 0 && !self.is_reached(*event) => {
                    return self.stands_at(self.marks[event.0].recorder.0, depth - 1);
                }
                Item::Wait(_) | Item::Record(_) => {}
            }
        }
        None
    }

    /// Streams that have not done what they were given.
    fn busy(&self) -> impl Iterator<Item = usize> {
        let is_busy = |queue: &Queue| {
            let stream = queue.stream.as_ref();
            stream.is_some_and(|stream| matches!(stream.is_done(), Ok(false)))
        };
        let queues = self.queues.iter().enumerate();
        queues
            .filter(move |(_, queue)| is_busy(queue))
            .map(|(at, _)| at)
    }
}

impl Cuda {
    /// Why a wait of the host failed.
    fn on(&self, queue: &Queue, error: &DriverError) -> CommandError {
        let failed = self.failed(error);
        CommandError {
            why: format!("on stream {}: {}", queue.name, failed.why),
            ..failed
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptx_says_which_driver_it_takes() {
        let driver = |ptx: &str| isa(ptx.as_bytes()).and_then(driver_of);
        assert_eq!(driver("//\n.version 8.0\n.target sm_80\n"), Some(12_000));
        assert_eq!(driver(".version 8.5"), Some(12_050));
        assert_eq!(driver("  .version 8.6"), Some(12_070));
        assert_eq!(driver(".version 8.8"), Some(12_090));
        assert_eq!(driver(".version 9.1"), Some(13_010));
        for unknown in ["", ".version 7.8", ".version 8", ".version x.1"] {
            assert_eq!(driver(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn sizes_are_readable() {
        let sizes = [64, 3 << 20, 123 << 29].map(|bytes| Size(bytes).to_string());
        assert_eq!(sizes, ["64 bytes", "3.0 MiB", "61.5 GiB"]);
    }
}
