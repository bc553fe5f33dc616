//! The device and the driver: memory, streams, events, kernels, and findings.
//!
//! A command has the clock of the host thread that submitted it. When it runs, its stream's clock
//! joins this clock. A record stores the clock of its stream; a wait for the record joins it.

use crate::facts::Facts;
use crate::host::Pinned;
use crate::memo::Memo;
use crate::options::Options;
use crate::order::{Actor, Clock, Conflict, Ledger};
use crate::product::Call;
use crate::status::Status;
use ptx::{Kernel, Launch, Memory, Param};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::thread::{self, ThreadId};

pub(crate) type Done<T> = Result<T, Status>;

/// The start of device memory: far from the addresses of this process, and from the windows of
/// shared and local memory.
const DEVICE_BASE: u64 = 0x10_0000_0000;
/// The alignment of allocations, which the CUDA programming guide promises.
const ALIGN: u64 = 256;
/// The largest number of stored findings: the first ones matter.
const MOST_FINDINGS: usize = 100;
/// Dynamic shared memory of a launch unless the function's attribute permits more.
const DEFAULT_SHARED_BYTES: u32 = 48 << 10;

/// A call of `cuEventRecord`, and the time at which its stream reached it.
#[derive(Default, Debug)]
pub(crate) struct Record {
    reached: OnceLock<Reached>,
}

#[derive(Debug)]
struct Reached {
    clock: Clock,
    /// The number of commands that had run.
    commands: u64,
}

/// A command of a stream.
pub(crate) enum Command {
    /// Host memory to device memory.
    CopyIn {
        to: u64,
        from: u64,
        bytes: usize,
    },
    /// Device memory to host memory.
    CopyOut {
        to: u64,
        from: u64,
        bytes: usize,
    },
    /// Device memory to device memory.
    CopyWithin {
        to: u64,
        from: u64,
        bytes: usize,
    },
    Fill {
        at: u64,
        value: u8,
        bytes: usize,
    },
    Launch {
        kernel: Arc<Kernel>,
        /// A number of its text.
        id: u64,
        launch: Launch,
        params: Vec<Param>,
    },
    /// A product by cuBLASLt.
    Product(Box<Call>),
    Record(Arc<Record>),
    Wait(Arc<Record>),
}

impl Command {
    fn name(&self) -> String {
        match self {
            Command::CopyIn { .. } => "the copy from the host".into(),
            Command::CopyOut { .. } => "the copy to the host".into(),
            Command::CopyWithin { .. } => "the copy on the device".into(),
            Command::Fill { .. } => "the fill".into(),
            Command::Launch { kernel, .. } => format!("kernel {}", kernel.name()),
            Command::Product(_) => "the product".into(),
            Command::Record(_) => "the record".into(),
            Command::Wait(_) => "the wait".into(),
        }
    }
}

/// A queue of commands, each with the clock of the thread that submitted it.
struct Stream {
    actor: Actor,
    clock: Clock,
    queue: VecDeque<(Command, Clock)>,
}

struct Event {
    timed: bool,
    last: Option<Arc<Record>>,
}

/// Kernels that are launched together, each after all before it.
#[derive(Clone, Default)]
struct Graph {
    nodes: Vec<u64>,
    launches: Vec<(u64, Launch, Vec<Param>)>,
}

struct Function {
    kernel: Arc<Kernel>,
    /// A number of its text.
    id: u64,
    /// The largest dynamic shared memory of a launch.
    shared_bytes: u32,
}

pub(crate) struct World {
    pub(crate) options: Options,
    /// State of the generator that draws streams.
    random: u64,
    calls: u64,
    /// Calls of each function.
    calls_of: BTreeMap<&'static str, u64>,
    /// Calls that made an object.
    made: u64,
    /// One past the last byte of device memory that a command touched.
    touched: u64,
    /// The status of all calls after a sticky error.
    dead: Option<Status>,
    pub(crate) findings: Vec<String>,
    /// Names of actors: streams and threads.
    actors: Vec<String>,
    threads: HashMap<ThreadId, (Actor, Clock)>,
    /// Threads that have the context.
    bound: HashSet<ThreadId>,
    /// Clocks that host threads published, by their numbers.
    signals: BTreeMap<u64, Clock>,
    pub(crate) memory: Memory,
    next_address: u64,
    /// By the address of an allocation, where its memory begins, if that is before it.
    starts: BTreeMap<u64, u64>,
    free_bytes: u64,
    pub(crate) pinned: Pinned,
    ledger: Ledger,
    next_handle: u64,
    streams: BTreeMap<u64, Stream>,
    events: BTreeMap<u64, Event>,
    /// Each with a number of its text.
    modules: BTreeMap<u64, (u64, Vec<Arc<Kernel>>)>,
    functions: BTreeMap<u64, Function>,
    graphs: BTreeMap<u64, Graph>,
    pub(crate) memo: Memo,
    /// The number of commands that ran: the clock of timed events.
    commands: u64,
    /// The stream whose next command never ends.
    hung: Option<u64>,
}

// --- calls ---

impl World {
    pub(crate) fn new(options: Options) -> World {
        World {
            options,
            random: options.seed,
            calls: 0,
            calls_of: BTreeMap::new(),
            made: 0,
            touched: DEVICE_BASE,
            dead: None,
            findings: vec![],
            actors: vec![],
            threads: HashMap::new(),
            bound: HashSet::new(),
            signals: BTreeMap::new(),
            memory: Memory::new(),
            next_address: DEVICE_BASE,
            starts: BTreeMap::new(),
            free_bytes: options.device_bytes,
            pinned: Pinned::default(),
            ledger: Ledger::default(),
            next_handle: 0x1000,
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            modules: BTreeMap::new(),
            functions: BTreeMap::new(),
            graphs: BTreeMap::new(),
            memo: Memo::default(),
            commands: 0,
            hung: None,
        }
    }

    /// A call begins. It fails if the options say so, after a sticky error, or if it needs a
    /// context and has none.
    pub(crate) fn enter(&mut self, name: &'static str, needs_context: bool) -> Done<()> {
        self.calls += 1;
        *self.calls_of.entry(name).or_default() += 1;
        let fails = self.calls == self.options.fail_at;
        if fails && self.options.sticky != 0 {
            self.dead = Some(Status(self.options.fail_with));
        }
        if let Some(status) = self.dead {
            return Err(status);
        }
        if fails {
            return Err(Status(self.options.fail_with));
        }
        if needs_context && !self.bound.contains(&thread::current().id()) {
            return Err(Status::ERROR_INVALID_CONTEXT);
        }
        Ok(())
    }
    pub(crate) fn facts(&self) -> Facts {
        let pending = self.streams.values().map(|stream| stream.queue.len());
        let exist = self.streams.len()
            + self.events.len()
            + self.modules.len()
            + self.graphs.len()
            + self.pinned.len();
        Facts {
            calls: self.calls,
            made: self.made,
            pending: pending.sum::<usize>() as u64,
            touched_bytes: self.touched - DEVICE_BASE,
            device_bytes: self.options.device_bytes - self.free_bytes,
            exist: exist as u64,
        }
    }
    pub(crate) fn calls_of(&self, name: &str) -> u64 {
        self.calls_of.get(name).copied().unwrap_or(0)
    }
    /// A call made an object.
    pub(crate) fn make(&mut self) {
        self.made += 1;
    }
    /// Binds the context to the calling thread, or unbinds it.
    pub(crate) fn bind(&mut self, bound: bool) {
        let id = thread::current().id();
        if bound {
            self.bound.insert(id);
        } else {
            self.bound.remove(&id);
        }
    }
    pub(crate) fn is_bound(&self) -> bool {
        self.bound.contains(&thread::current().id())
    }

    pub(crate) fn find(&mut self, what: String) {
        if self.findings.len() < MOST_FINDINGS {
            self.findings.push(what);
        }
    }
    fn handle(&mut self) -> u64 {
        self.next_handle += 16;
        self.next_handle
    }
    fn actor(&mut self, name: String) -> Actor {
        self.actors.push(name);
        Actor(self.actors.len() - 1)
    }

    /// A number below `n`, by SplitMix64.
    fn draw(&mut self, n: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ z >> 31) % n
    }
}

// --- host threads ---

impl World {
    /// The calling thread takes a step; returns its actor and its new clock.
    fn step(&mut self) -> (Actor, Clock) {
        let id = thread::current().id();
        if !self.threads.contains_key(&id) {
            let actor = self.actor(format!("host thread {}", self.threads.len() + 1));
            self.threads.insert(id, (actor, Clock::default()));
        }
        let (actor, clock) = self.threads.get_mut(&id).expect("it was inserted");
        clock.tick(*actor);
        (*actor, clock.clone())
    }
    /// The calling thread's clock joins a clock.
    fn learn(&mut self, clock: &Clock) {
        self.step();
        if let Some((_, mine)) = self.threads.get_mut(&thread::current().id()) {
            mine.join(clock);
        }
    }
    /// The calling thread reads or writes host memory.
    pub(crate) fn host_access(&mut self, bytes: Range<u64>, write: bool) {
        let (actor, clock) = self.step();
        self.access(actor, &clock, "the host", bytes, write);
    }
    /// The calling thread publishes its clock.
    pub(crate) fn publish(&mut self, signal: u64) {
        let (_, clock) = self.step();
        self.signals.entry(signal).or_default().join(&clock);
    }
    /// The calling thread joins a published clock.
    pub(crate) fn acquire(&mut self, signal: u64) {
        let clock = self.signals.get(&signal).cloned().unwrap_or_default();
        self.learn(&clock);
    }

    fn access(&mut self, actor: Actor, clock: &Clock, by: &str, bytes: Range<u64>, write: bool) {
        if self.memory.slice(bytes.start, 1).is_some() {
            self.touched = self.touched.max(bytes.end);
        }
        let conflict = self.ledger.access(actor, clock, bytes, write);
        let Some(Conflict {
            address,
            earlier,
            wrote,
        }) = conflict
        else {
            return;
        };
        let does = if write { "writes" } else { "reads" };
        let did = if wrote { "write" } else { "read" };
        let [actor, earlier] = [actor, earlier].map(|actor| &self.actors[actor.0]);
        self.find(format!(
            "{by} on {actor} {does} the block at {address:#x} without waiting for the {did} by \
             {earlier}"
        ));
    }
}

// --- memory ---

impl World {
    pub(crate) fn allocate(&mut self, bytes: usize) -> Done<u64> {
        if bytes == 0 {
            return Err(Status::ERROR_INVALID_VALUE);
        }
        // An aligned address of the process needs room before it.
        let before = if self.is_unified() { ALIGN as usize } else { 0 };
        let memory = vec![0xFF; bytes + before];
        let rounded = (memory.len() as u64).next_multiple_of(ALIGN);
        self.free_bytes = self
            .free_bytes
            .checked_sub(rounded)
            .ok_or(Status::ERROR_OUT_OF_MEMORY)?;
        self.make();
        if self.is_unified() {
            let start = memory.as_ptr().expose_provenance() as u64;
            let address = start.next_multiple_of(ALIGN);
            self.memory.place(start, memory);
            self.starts.insert(address, start);
            return Ok(address);
        }
        let address = self.next_address;
        // A gap follows each allocation, and no address is used twice.
        self.next_address += rounded + ALIGN;
        self.memory.place(address, memory);
        Ok(address)
    }
    /// Whether addresses of device memory are addresses of the process.
    pub(crate) fn is_unified(&self) -> bool {
        self.options.unified != 0
    }
    /// Frees an allocation after all commands have run, like the driver.
    pub(crate) fn free(&mut self, address: u64) -> Done<()> {
        self.synchronize()?;
        let start = self.starts.remove(&address).unwrap_or(address);
        let bytes = self.memory.remove(start);
        let bytes = bytes.ok_or(Status::ERROR_INVALID_VALUE)?.len() as u64;
        self.free_bytes += bytes.next_multiple_of(ALIGN);
        self.ledger.forget(start..start + bytes);
        Ok(())
    }
    /// The number of free bytes.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.free_bytes
    }
    /// Checks that the bytes lie in one allocation.
    fn in_device(&self, address: u64, bytes: usize) -> Done<()> {
        let found = self.memory.slice(address, bytes);
        found.map(|_| ()).ok_or(Status::ERROR_INVALID_VALUE)
    }
    /// Host memory can no longer be copied asynchronously; commands that use it have run.
    pub(crate) fn unpin(&mut self, address: u64, ours: bool) -> Done<()> {
        self.synchronize()?;
        let removed = self.pinned.remove(address, ours);
        removed
            .then_some(())
            .ok_or(Status::ERROR_HOST_MEMORY_NOT_REGISTERED)
    }
}

// --- streams and events ---

impl World {
    pub(crate) fn create_stream(&mut self) -> u64 {
        let handle = self.handle();
        let actor = self.actor(format!("stream {handle:#x}"));
        let stream = Stream {
            actor,
            clock: Clock::default(),
            queue: VecDeque::new(),
        };
        self.streams.insert(handle, stream);
        self.make();
        handle
    }
    pub(crate) fn destroy_stream(&mut self, handle: u64) -> Done<()> {
        self.wait_for_stream(handle)?;
        self.streams.remove(&handle);
        Ok(())
    }
    fn stream(&self, handle: u64) -> Done<&Stream> {
        self.streams
            .get(&handle)
            .ok_or(Status::ERROR_INVALID_HANDLE)
    }
    fn is_idle(&self, handle: u64) -> bool {
        self.streams
            .get(&handle)
            .is_none_or(|stream| stream.queue.is_empty())
    }
    /// Success if all commands of a stream have run.
    pub(crate) fn query_stream(&mut self, handle: u64) -> Done<()> {
        self.stream(handle)?;
        self.run_some()?;
        if !self.is_idle(handle) {
            self.check_deadlock()?;
            return Err(Status::ERROR_NOT_READY);
        }
        self.wait_for_stream(handle)
    }
    /// A host thread asks about something that is not done: it may ask for ever.
    fn check_deadlock(&mut self) -> Done<()> {
        if self.hung.is_none() && self.ready().is_empty() {
            self.deadlock();
        }
        self.dead.map_or(Ok(()), Err)
    }
    /// No stream can run, and a host thread waits.
    fn deadlock(&mut self) {
        let waiting = self.streams.values().filter(|s| !s.queue.is_empty());
        let names: Vec<&str> = waiting.map(|s| &*self.actors[s.actor.0]).collect();
        let text = format!("deadlock: no stream can run: {}", names.join(", "));
        self.find(text);
        self.dead = Some(Status::ERROR_LAUNCH_TIMEOUT);
    }
    /// The streams whose next command may run.
    fn ready(&self) -> Vec<u64> {
        let can_run = |stream: &Stream| match stream.queue.front() {
            Some((Command::Wait(record), _)) => record.reached.get().is_some(),
            other => other.is_some(),
        };
        let ready = self.streams.iter().filter(|(_, stream)| can_run(stream));
        let ready = ready.map(|(&handle, _)| handle);
        ready.filter(|handle| self.hung != Some(*handle)).collect()
    }
    pub(crate) fn wait_for_stream(&mut self, handle: u64) -> Done<()> {
        self.stream(handle)?;
        self.run_until(|world| world.is_idle(handle))?;
        let clock = self.stream(handle)?.clock.clone();
        self.learn(&clock);
        Ok(())
    }
    /// Waits until all commands have run.
    pub(crate) fn synchronize(&mut self) -> Done<()> {
        let handles: Vec<u64> = self.streams.keys().copied().collect();
        handles
            .into_iter()
            .try_for_each(|handle| self.wait_for_stream(handle))
    }

    pub(crate) fn create_event(&mut self, timed: bool) -> u64 {
        let handle = self.handle();
        self.events.insert(handle, Event { timed, last: None });
        self.make();
        handle
    }
    pub(crate) fn destroy_event(&mut self, handle: u64) -> Done<()> {
        let event = self.events.remove(&handle);
        event.map(|_| ()).ok_or(Status::ERROR_INVALID_HANDLE)
    }
    fn event(&mut self, handle: u64) -> Done<&mut Event> {
        self.events
            .get_mut(&handle)
            .ok_or(Status::ERROR_INVALID_HANDLE)
    }
    pub(crate) fn record(&mut self, event: u64, stream: u64) -> Done<()> {
        self.stream(stream)?;
        let record = Arc::new(Record::default());
        self.event(event)?.last = Some(Arc::clone(&record));
        self.submit(stream, Command::Record(record))
    }
    /// A stream waits for the last recorded call; a missing record is a finding.
    pub(crate) fn wait_event(&mut self, stream: u64, event: u64) -> Done<()> {
        self.stream(stream)?;
        match self.event(event)?.last.clone() {
            Some(record) => self.submit(stream, Command::Wait(record)),
            None => {
                self.find("a stream waits for an event that was never recorded".into());
                Ok(())
            }
        }
    }
    pub(crate) fn query_event(&mut self, event: u64) -> Done<()> {
        self.run_some()?;
        let Some(record) = self.event(event)?.last.clone() else {
            self.find("a host thread asks for an event that was never recorded".into());
            return Ok(());
        };
        match record.reached.get() {
            Some(reached) => self.learn(&reached.clock),
            None => {
                self.check_deadlock()?;
                return Err(Status::ERROR_NOT_READY);
            }
        }
        Ok(())
    }
    pub(crate) fn wait_for_event(&mut self, event: u64) -> Done<()> {
        let Some(record) = self.event(event)?.last.clone() else {
            self.find("a host thread waits for an event that was never recorded".into());
            return Ok(());
        };
        self.run_until(|_| record.reached.get().is_some())?;
        if let Some(reached) = record.reached.get() {
            self.learn(&reached.clock);
        }
        Ok(())
    }
    /// Commands that ran between two timed events, as milliseconds: a command takes 1 µs.
    pub(crate) fn elapsed(&mut self, from: u64, to: u64) -> Done<f32> {
        let mut at = |event: u64| -> Done<u64> {
            let Event {
                timed: true,
                last: Some(record),
            } = self.event(event)?
            else {
                return Err(Status::ERROR_INVALID_HANDLE);
            };
            let reached = record.reached.get().ok_or(Status::ERROR_NOT_READY)?;
            Ok(reached.commands)
        };
        let (from, to) = (at(from)?, at(to)?);
        Ok((to as f32 - from as f32) / 1000.0)
    }
}

// --- kernels ---

impl World {
    pub(crate) fn add_module(&mut self, kernels: Vec<Kernel>, id: u64) -> u64 {
        let handle = self.handle();
        let kernels = kernels.into_iter().map(Arc::new).collect();
        self.modules.insert(handle, (id, kernels));
        self.make();
        handle
    }
    pub(crate) fn unload(&mut self, module: u64) -> Done<()> {
        let removed = self.modules.remove(&module);
        removed.map(|_| ()).ok_or(Status::ERROR_INVALID_HANDLE)
    }
    pub(crate) fn get_function(&mut self, module: u64, name: &str) -> Done<u64> {
        let (id, kernels) = self
            .modules
            .get(&module)
            .ok_or(Status::ERROR_INVALID_HANDLE)?;
        let kernel = kernels.iter().find(|kernel| kernel.name() == name);
        let kernel = Arc::clone(kernel.ok_or(Status::ERROR_NOT_FOUND)?);
        let mut hasher = DefaultHasher::new();
        (id, name).hash(&mut hasher);
        let id = hasher.finish();
        let shared_bytes = DEFAULT_SHARED_BYTES.saturating_sub(kernel.shared_bytes() as u32);
        let handle = self.handle();
        self.functions.insert(
            handle,
            Function {
                kernel,
                id,
                shared_bytes,
            },
        );
        Ok(handle)
    }
    pub(crate) fn kernel(&self, function: u64) -> Done<&Kernel> {
        let function = self.functions.get(&function);
        Ok(&function.ok_or(Status::ERROR_INVALID_HANDLE)?.kernel)
    }
    /// The largest dynamic shared memory of a block, in bytes, for functions that request it.
    pub(crate) fn most_shared_bytes(&self) -> u32 {
        // CUDA programming guide, "Technical Specifications per Compute Capability".
        match self.options.sm {
            90.. => 227 << 10,
            86 | 89 => 99 << 10,
            _ => 163 << 10,
        }
    }
    pub(crate) fn permit_shared(&mut self, function: u64, bytes: u32) -> Done<()> {
        let most = self.most_shared_bytes();
        let function = self.functions.get_mut(&function);
        let function = function.ok_or(Status::ERROR_INVALID_HANDLE)?;
        if bytes + function.kernel.shared_bytes() as u32 > most {
            return Err(Status::ERROR_INVALID_VALUE);
        }
        function.shared_bytes = bytes;
        Ok(())
    }
    pub(crate) fn launch(
        &mut self,
        function: u64,
        stream: u64,
        launch: Launch,
        params: Vec<Param>,
    ) -> Done<()> {
        let function = self.functions.get(&function);
        let function = function.ok_or(Status::ERROR_INVALID_HANDLE)?;
        // No product of counts exceeds 64 bits, because the first two are compared first.
        let [_, y, z] = launch.grid;
        let threads = launch.block.iter().try_fold(1u32, |n, &m| n.checked_mul(m));
        let fits = threads.is_some_and(|n| (1..=1024).contains(&n))
            && launch.grid.iter().all(|&n| n > 0)
            && y.max(z) <= 65_535
            && launch.shared_bytes <= function.shared_bytes;
        if !fits {
            return Err(Status::ERROR_INVALID_VALUE);
        }
        let (kernel, id) = (Arc::clone(&function.kernel), function.id);
        self.submit(
            stream,
            Command::Launch {
                kernel,
                id,
                launch,
                params,
            },
        )
    }
}

// --- graphs ---

impl World {
    pub(crate) fn create_graph(&mut self) -> u64 {
        let handle = self.handle();
        self.graphs.insert(handle, Graph::default());
        self.make();
        handle
    }
    pub(crate) fn destroy_graph(&mut self, graph: u64) -> Done<()> {
        let removed = self.graphs.remove(&graph);
        removed.map(|_| ()).ok_or(Status::ERROR_INVALID_HANDLE)
    }
    fn graph(&mut self, graph: u64) -> Done<&mut Graph> {
        let found = self.graphs.get_mut(&graph);
        found.ok_or(Status::ERROR_INVALID_HANDLE)
    }
    /// Adds a kernel to a graph. Nodes without an order between them are not supported: each comes
    /// after the one before.
    pub(crate) fn add_node(
        &mut self,
        graph: u64,
        before: Vec<u64>,
        function: u64,
        launch: Launch,
        params: Vec<Param>,
    ) -> Done<u64> {
        self.kernel(function)?;
        let handle = self.handle();
        let graph = self.graph(graph)?;
        if graph.nodes.last().copied().into_iter().collect::<Vec<_>>() != before {
            return Err(Status::ERROR_NOT_SUPPORTED);
        }
        graph.nodes.push(handle);
        graph.launches.push((function, launch, params));
        Ok(handle)
    }
    /// A copy that can be launched.
    pub(crate) fn instantiate(&mut self, graph: u64) -> Done<u64> {
        let copy = self.graph(graph)?.clone();
        let handle = self.create_graph();
        self.graphs.insert(handle, copy);
        Ok(handle)
    }
    pub(crate) fn launch_graph(&mut self, graph: u64, stream: u64) -> Done<()> {
        let launches = self.graph(graph)?.launches.clone();
        let mut launches = launches.into_iter();
        launches.try_for_each(|(function, launch, params)| {
            self.launch(function, stream, launch, params)
        })
    }
}

// --- commands ---

impl World {
    /// Puts a command at the end of a stream. On return the device may have run any number of
    /// commands.
    pub(crate) fn submit(&mut self, stream: u64, command: Command) -> Done<()> {
        self.stream(stream)?;
        match &command {
            Command::CopyIn { to, bytes, .. } => self.in_device(*to, *bytes)?,
            Command::CopyOut { from, bytes, .. } => self.in_device(*from, *bytes)?,
            Command::CopyWithin { to, from, bytes } => {
                self.in_device(*to, *bytes)?;
                self.in_device(*from, *bytes)?;
            }
            Command::Fill { at, bytes, .. } => self.in_device(*at, *bytes)?,
            Command::Product(call) => {
                for (range, _) in call.ranges() {
                    self.in_device(range.start, (range.end - range.start) as usize)?;
                }
            }
            Command::Launch { .. } | Command::Record(_) | Command::Wait(_) => {}
        }
        let (_, clock) = self.step();
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.queue.push_back((command, clock));
        }
        self.run_some()
    }

    /// Runs 0 to 2 commands.
    fn run_some(&mut self) -> Done<()> {
        for _ in 0..self.draw(3) {
            self.run_one();
        }
        self.dead.map_or(Ok(()), Err)
    }

    /// Runs commands until a condition holds.
    fn run_until(&mut self, holds: impl Fn(&World) -> bool) -> Done<()> {
        while !holds(self) {
            if self.dead.is_none() && !self.run_one() {
                self.deadlock();
            }
            self.dead.map_or(Ok(()), Err)?;
        }
        self.dead.map_or(Ok(()), Err)
    }

    /// Runs the next command of a random stream; false if no stream can run.
    fn run_one(&mut self) -> bool {
        let ready = self.ready();
        if ready.is_empty() || self.dead.is_some() {
            return false;
        }
        let drawn = ready[self.draw(ready.len() as u64) as usize];
        if self.hung.is_none() && self.commands + 1 == self.options.hang_at {
            self.hung = Some(drawn);
            return true;
        }
        let Some(stream) = self.streams.get_mut(&drawn) else {
            return false;
        };
        let Some((command, submitted)) = stream.queue.pop_front() else {
            return false;
        };
        stream.clock.join(&submitted);
        stream.clock.tick(stream.actor);
        self.commands += 1;
        let (actor, mut clock) = (stream.actor, stream.clock.clone());
        self.run(&command, actor, &mut clock);
        if let Some(stream) = self.streams.get_mut(&drawn) {
            stream.clock = clock;
        }
        true
    }

    /// Runs a kernel. It also sees the host memory of the driver to whose addresses its parameters
    /// point, like a kernel on a GPU with unified addressing.
    fn run_kernel(
        &mut self,
        (id, kernel): (u64, &Kernel),
        launch: &Launch,
        params: &[Param],
    ) -> Result<Vec<ptx::Access>, ptx::Error> {
        let mut seen = vec![];
        for param in params {
            if let &Param::U64(address) = param
                && let Some(start) = self.pinned.of_driver(address)
                && !seen.contains(&start)
            {
                self.memory.place(start, self.pinned.bytes(start));
                seen.push(start);
            }
        }
        let ran = match self.options.remembers {
            0 => kernel
                .run(launch, params, &mut self.memory)
                .map(|(_, accesses)| accesses),
            _ => self
                .memo
                .run((id, kernel), launch, params, &mut self.memory),
        };
        for start in seen {
            let bytes = self.memory.remove(start).expect("it was placed");
            self.pinned.write(start, &bytes);
        }
        ran
    }

    /// Runs a command, with its accesses. All bytes are in bounds: `submit` and `free` ensure this
    /// for device memory, `unpin` for host memory.
    fn run(&mut self, command: &Command, actor: Actor, clock: &mut Clock) {
        let name = command.name();
        let range = |at: u64, bytes: usize| at..at + bytes as u64;
        match *command {
            Command::CopyIn { to, from, bytes } => {
                self.access(actor, clock, &name, range(from, bytes), false);
                self.access(actor, clock, &name, range(to, bytes), true);
                let to = self.memory.slice_mut(to, bytes).expect("it is allocated");
                self.pinned.read(from, to);
            }
            Command::CopyOut { to, from, bytes } => {
                self.access(actor, clock, &name, range(from, bytes), false);
                self.access(actor, clock, &name, range(to, bytes), true);
                let from = self.memory.slice(from, bytes).expect("it is allocated");
                self.pinned.write(to, from);
            }
            Command::CopyWithin { to, from, bytes } => {
                self.access(actor, clock, &name, range(from, bytes), false);
                self.access(actor, clock, &name, range(to, bytes), true);
                let copy = self
                    .memory
                    .slice(from, bytes)
                    .expect("it is allocated")
                    .to_vec();
                let to = self.memory.slice_mut(to, bytes).expect("it is allocated");
                to.copy_from_slice(&copy);
            }
            Command::Fill { at, value, bytes } => {
                self.access(actor, clock, &name, range(at, bytes), true);
                self.memory
                    .slice_mut(at, bytes)
                    .expect("it is allocated")
                    .fill(value);
            }
            Command::Launch {
                ref kernel,
                id,
                launch,
                ref params,
            } => match self.run_kernel((id, kernel), &launch, params) {
                Ok(accesses) => {
                    for access in accesses {
                        let bytes = access.address..access.address + access.bytes;
                        self.access(actor, clock, &name, bytes, access.writes);
                    }
                }
                Err(error) => {
                    self.find(format!("{name}: {error}"));
                    self.dead = Some(Status::ERROR_LAUNCH_FAILED);
                }
            },
            Command::Product(ref call) => {
                for (bytes, writes) in call.ranges() {
                    self.access(actor, clock, &name, bytes, writes);
                }
                call.run(&mut self.memory);
            }
            Command::Record(ref record) => {
                let (clock, commands) = (clock.clone(), self.commands);
                let fresh = record.reached.set(Reached { clock, commands });
                fresh.expect("a record is submitted once");
            }
            Command::Wait(ref record) => {
                let reached = record.reached.get().expect("the wait can run");
                clock.join(&reached.clock);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_that_can_never_run_are_a_deadlock() {
        let mut world = World::new(Options::default());
        let stream = world.create_stream();
        // No stream has the record. Calls of the driver cannot cause this.
        let wait = Command::Wait(Arc::new(Record::default()));
        world.submit(stream, wait).unwrap();
        assert_eq!(
            world.wait_for_stream(stream),
            Err(Status::ERROR_LAUNCH_TIMEOUT)
        );
        assert!(
            world.findings[0].starts_with("deadlock"),
            "{:?}",
            world.findings
        );
    }

    #[test]
    fn a_wait_means_the_record_that_was_called_last_before_it() {
        for seed in 0..20 {
            let mut world = World::new(Options {
                seed,
                ..Options::default()
            });
            let address = world.allocate(64).unwrap();
            let [a, b] = [world.create_stream(), world.create_stream()];
            let event = world.create_event(false);
            let fill = |value| Command::Fill {
                at: address,
                value,
                bytes: 64,
            };
            world.record(event, a).unwrap();
            world.wait_event(b, event).unwrap();
            world.submit(a, fill(1)).unwrap();
            // This record comes after the fill; the wait was called before it and means the first
            // record.
            world.record(event, a).unwrap();
            world.submit(b, fill(2)).unwrap();
            world.synchronize().unwrap();
            assert_eq!(world.findings.len(), 1, "{:?}", world.findings);
        }
    }

    #[test]
    fn out_of_memory_and_freed_memory_are_errors() {
        let mut world = World::new(Options {
            device_bytes: 1024,
            ..Options::default()
        });
        let address = world.allocate(1000).unwrap();
        assert_eq!(world.allocate(1), Err(Status::ERROR_OUT_OF_MEMORY));
        let stream = world.create_stream();
        let fill = || Command::Fill {
            at: address + 990,
            value: 0,
            bytes: 11,
        };
        assert_eq!(
            world.submit(stream, fill()),
            Err(Status::ERROR_INVALID_VALUE)
        );
        world.free(address).unwrap();
        assert_eq!(world.free_bytes(), 1024);
        assert_eq!(world.free(address), Err(Status::ERROR_INVALID_VALUE));
    }
}
