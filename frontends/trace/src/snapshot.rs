//! Memory snapshots of PyTorch: the files of `torch.cuda.memory._dump_snapshot` after
//! `_record_memory_history`.
//!
//! A snapshot has, for each device, the allocator's events (`device_traces`) and its segments at
//! the end. Each device is a pool. A block lives from `alloc` to `free_completed`, with the
//! requested bytes. Blocks that are freed but were never requested, and blocks in segments without
//! an event, existed before the recording.
//!
//! Phases are derived from the Python frames of requests. A frame in `torch/optim` means the
//! optimizer. A frame called `backward`, a frame of autograd's engine, or no frame at all if other
//! requests have frames (autograd's threads run no Python) means a backward. A frame called
//! `forward` means a forward. Other requests belong to the previous phase. Consecutive requests of
//! the same phase form one phase.

use crate::pickle::{self, Id, Pickle, Value, kind};
use crate::recorder::{Asked, Recorder};
use crate::{Error, Pool};
use addresses::caching::{Event, History, Segment};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Reads a snapshot.
pub fn read(bytes: &[u8]) -> Result<Vec<Pool>, Error> {
    let pickle = pickle::read(bytes)?;
    let reader = &Reader { pickle: &pickle };
    let root = Item {
        reader,
        id: pickle.root(),
        place: "the pickle".into(),
    };
    let help = "a snapshot is what torch.cuda.memory._dump_snapshot writes";
    let traces = root.list("device_traces").map_err(|e| e.help(help))?;
    let mut segments = segments(&root.list("segments").map_err(|e| e.help(help))?, &pickle)?;
    if traces.len() > MOST_DEVICES {
        let message = format!("there are no more than {MOST_DEVICES} devices");
        return Err(Error::new("device_traces", message));
    }

    let mut n_events = 0;
    let mut events = vec![];
    for (device, trace) in traces.iter().enumerate() {
        n_events += trace.items()?.len();
        not_repeated(n_events, &pickle)?;
        events.push(trace.items()?.enumerate().map(move |(i, id)| Item {
            reader,
            id,
            place: format!("event {i} of device {device}"),
        }));
    }
    if events.iter().all(|events| events.len() == 0) {
        let help = "call torch.cuda.memory._record_memory_history() before what is to be recorded";
        return Err(Error::new("device_traces", "the snapshot has no events").help(help));
    }

    let with_segments = segments.keys().next_back().map_or(0, |last| last + 1);
    let n_devices = events.len().max(with_segments);
    let mut events = events.into_iter();
    let mut pools = vec![];
    for device in 0..n_devices {
        let segments = segments.remove(&device).unwrap_or_default();
        let events = events.next().into_iter().flatten();
        let events: Vec<Entry> = events
            .map(|event| event.event())
            .collect::<Result<_, _>>()?;
        let pool = device_pool(&format!("cuda:{device}"), reader, &segments, &events)?;
        if !pool.trace.blocks.is_empty() {
            pools.push(pool);
        }
    }
    Ok(pools)
}

/// The segments of each device.
fn segments<'a>(
    list: &[Item<'a>],
    pickle: &Pickle<'_>,
) -> Result<BTreeMap<usize, Vec<Item<'a>>>, Error> {
    let mut segments: BTreeMap<usize, Vec<Item<'a>>> = BTreeMap::new();
    for segment in list {
        let too_many = || segment.error(format!("there are no more than {MOST_DEVICES} devices"));
        let device = usize::try_from(segment.number("device")?).ok();
        let device = device.filter(|&device| device < MOST_DEVICES);
        let device = device.ok_or_else(too_many)?;
        segments.entry(device).or_default().push(segment.clone());
    }
    let mut n_blocks = 0;
    for segment in segments.values().flatten() {
        n_blocks += segment.get("blocks")?.items()?.len();
        not_repeated(n_blocks, pickle)?;
    }
    Ok(segments)
}

/// Shared values of a pickle could be visited more often than it has bytes. A snapshot shares no
/// events and no blocks, so `n` of them need at least `n` bytes.
fn not_repeated(n: usize, pickle: &Pickle<'_>) -> Result<(), Error> {
    if n <= pickle.len() {
        return Ok(());
    }
    let message = "it repeats itself: a snapshot has each event and each block once";
    Err(Error::new("the pickle", message))
}

/// More devices than this are a mistake.
const MOST_DEVICES: usize = 1024;

struct Reader<'a> {
    pickle: &'a Pickle<'a>,
}

/// A value, and its name in messages.
#[derive(Clone)]
struct Item<'a> {
    reader: &'a Reader<'a>,
    id: Id,
    place: String,
}

/// The kind of an event.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Action {
    Alloc,
    FreeRequested,
    FreeCompleted,
    SegmentAlloc,
    SegmentFree,
    /// Pages of an expandable segment.
    Map,
    Other,
}

struct Entry {
    action: Action,
    address: u64,
    bytes: u64,
    stream: u64,
    frames: Option<Id>,
}

impl<'a> Item<'a> {
    fn error(&self, message: impl Into<String>) -> Error {
        Error::new(self.place.clone(), message)
    }

    fn get(&self, key: &str) -> Result<Item<'a>, Error> {
        let pickle = self.reader.pickle;
        match pickle.get(self.id, key) {
            Some(id) => Ok(Item {
                reader: self.reader,
                id,
                place: format!("{}: {key}", self.place),
            }),
            None if matches!(pickle.value(self.id), Value::Dict(_)) => {
                Err(self.error(format!("{key:?} is missing")))
            }
            None => Err(self.error(format!(
                "{}, and should be a dict",
                kind(pickle.value(self.id))
            ))),
        }
    }

    fn number(&self, key: &str) -> Result<u64, Error> {
        let item = self.get(key)?;
        match item.reader.pickle.value(item.id) {
            Value::Int(number) => u64::try_from(*number).map_err(|_| {
                item.error(format!("{number} is no number of 64 bits without a sign"))
            }),
            other => Err(item.error(format!("{}, and should be an int", kind(other)))),
        }
    }

    /// A number that may be absent.
    fn number_or(&self, key: &str, default: u64) -> Result<u64, Error> {
        match self.reader.pickle.get(self.id, key) {
            Some(_) => self.number(key),
            None => Ok(default),
        }
    }

    fn text(&self, key: &str) -> Result<&'a str, Error> {
        let item = self.get(key)?;
        let pickle = item.reader.pickle;
        pickle.text(item.id).ok_or_else(|| {
            item.error(format!(
                "{}, and should be a str",
                kind(pickle.value(item.id))
            ))
        })
    }

    fn items(&self) -> Result<impl ExactSizeIterator<Item = Id> + 'a, Error> {
        let pickle = self.reader.pickle;
        let items = pickle.items(self.id);
        let items = items.ok_or_else(|| {
            self.error(format!(
                "{}, and should be a list",
                kind(pickle.value(self.id))
            ))
        })?;
        Ok(items.iter().copied())
    }

    fn list(&self, key: &str) -> Result<Vec<Item<'a>>, Error> {
        let list = self.get(key)?;
        let item = |(i, id)| Item {
            reader: list.reader,
            id,
            place: format!("{key}[{i}]"),
        };
        Ok(list.items()?.enumerate().map(item).collect())
    }

    fn event(&self) -> Result<Entry, Error> {
        let action = match self.text("action")? {
            "alloc" => Action::Alloc,
            "free_requested" => Action::FreeRequested,
            // Before PyTorch 2.0, one event meant both.
            "free_completed" | "free" => Action::FreeCompleted,
            "segment_alloc" => Action::SegmentAlloc,
            "segment_free" => Action::SegmentFree,
            "segment_map" | "segment_unmap" => Action::Map,
            _ => Action::Other,
        };
        if action == Action::Other {
            return Ok(Entry {
                action,
                address: 0,
                bytes: 0,
                stream: 0,
                frames: None,
            });
        }
        let (address, bytes) = (self.number("addr")?, self.number("size")?);
        let stream = self.number_or("stream", 0)?;
        let frames = self.reader.pickle.get(self.id, "frames");
        Ok(Entry {
            action,
            address,
            bytes,
            stream,
            frames,
        })
    }
}

/// A part of a step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Forward,
    Backward,
    Optimizer,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Part::Forward => "fwd",
            Part::Backward => "bwd",
            Part::Optimizer => "opt",
        }
    }
}

/// Finds the part of a step from frames. Snapshots share frames, so each is read only once.
struct Parts<'a> {
    pickle: &'a Pickle<'a>,
    known: HashMap<Id, Option<Part>>,
    /// True if any request has frames.
    some: bool,
}

impl Parts<'_> {
    fn part(&mut self, frames: Option<Id>) -> Option<Part> {
        let frames = frames?;
        if let Some(&known) = self.known.get(&frames) {
            return known;
        }
        let items = self.pickle.items(frames)?;
        let mut part = None;
        for &frame in items {
            let found = match self.known.get(&frame) {
                Some(&known) => known,
                None => {
                    let found = self.frame(frame);
                    self.known.insert(frame, found);
                    found
                }
            };
            // A forward within a backward is a recomputation.
            part = match (part, found) {
                (Some(Part::Optimizer), _) | (_, Some(Part::Optimizer)) => Some(Part::Optimizer),
                (Some(Part::Backward), _) | (_, Some(Part::Backward)) => Some(Part::Backward),
                (part, found) => found.or(part),
            };
        }
        if items.is_empty() && self.some {
            part = Some(Part::Backward);
        }
        self.known.insert(frames, part);
        part
    }

    fn frame(&self, frame: Id) -> Option<Part> {
        let text = |key| {
            self.pickle
                .get(frame, key)
                .and_then(|id| self.pickle.text(id))
                .unwrap_or("")
        };
        let (name, file) = (text("name"), text("filename"));
        if file.contains("torch/optim/") || file.contains("torch\\optim\\") {
            return Some(Part::Optimizer);
        }
        match name {
            "backward" | "_engine_run_backward" => Some(Part::Backward),
            name if name.starts_with("torch::autograd::") && name.contains("Engine::") => {
                Some(Part::Backward)
            }
            "forward" => Some(Part::Forward),
            _ => None,
        }
    }
}

/// Blocks and history of one device.
fn device_pool(
    name: &str,
    reader: &Reader<'_>,
    segments: &[Item<'_>],
    events: &[Entry],
) -> Result<Pool, Error> {
    let mut device = Device::new(name, reader, events);
    let mut before = device.before_events(events);
    for segment in segments {
        device.segment(segment, &mut before)?;
    }
    for (&address, &asked) in &before.blocks {
        let id = device.next_id();
        let placed = device.recorder.was_there(address, id, asked);
        placed.map_err(|message| Error::new(format!("segments of {name}"), message))?;
    }
    for (i, entry) in events.iter().enumerate() {
        let error = |message: String| Error::new(format!("event {i} of {name}"), message);
        device.blocks(entry).map_err(error)?;
        device.history(entry);
    }
    let mut pool = device.recorder.finish();
    pool.reserved_bytes = Some(device.reserved);
    pool.history = device.is_plain.then_some(device.history);
    Ok(pool)
}

/// Blocks that lived before the first event.
struct Before {
    /// Addresses of blocks at the end that events requested.
    came: BTreeSet<u64>,
    /// Addresses of freed blocks that no event requested.
    gone: BTreeSet<u64>,
    /// All blocks that lived before the first event, by address.
    blocks: BTreeMap<u64, Asked>,
}

/// A device while its events are read.
struct Device<'a> {
    reader: &'a Reader<'a>,
    recorder: Recorder<u64>,
    /// Numbers of streams by handle.
    streams: HashMap<u64, u32>,
    history: History,
    /// False if a feature was used that our simulator of the allocator does not have.
    is_plain: bool,
    /// Bytes of all segments.
    reserved: u64,
    parts: Parts<'a>,
    /// The current part of the step, and how many times each part has begun.
    part: Option<Part>,
    runs: [u64; 3],
    /// Blocks whose free was requested but not completed so far.
    leaving: BTreeSet<u64>,
    n_ids: u64,
}

impl<'a> Device<'a> {
    fn new(name: &str, reader: &'a Reader<'a>, events: &[Entry]) -> Device<'a> {
        let has_frames = events
            .iter()
            .filter_map(|entry| reader.pickle.items(entry.frames?))
            .any(|frames| !frames.is_empty());
        Device {
            reader,
            recorder: Recorder::new(name),
            streams: HashMap::from([(0, 0)]),
            history: History::default(),
            is_plain: !events.iter().any(|entry| entry.action == Action::Map),
            reserved: 0,
            parts: Parts {
                pickle: reader.pickle,
                known: HashMap::new(),
                some: has_frames,
            },
            part: None,
            runs: [0; 3],
            leaving: BTreeSet::new(),
            n_ids: 0,
        }
    }

    fn stream(&mut self, handle: u64) -> u32 {
        let next = self.streams.len() as u32;
        *self.streams.entry(handle).or_insert(next)
    }

    fn next_id(&mut self) -> String {
        self.n_ids += 1;
        (self.n_ids - 1).to_string()
    }

    /// Finds blocks that lived before the first event: they are freed but were never requested.
    fn before_events(&mut self, events: &[Entry]) -> Before {
        let mut came: BTreeSet<u64> = BTreeSet::new();
        let mut blocks: BTreeMap<u64, Asked> = BTreeMap::new();
        for entry in events {
            match entry.action {
                Action::Alloc => {
                    came.insert(entry.address);
                }
                Action::FreeCompleted if !came.remove(&entry.address) => {
                    let asked = Asked {
                        bytes: entry.bytes,
                        stream: self.stream(entry.stream),
                        ..Asked::default()
                    };
                    blocks.entry(entry.address).or_insert(asked);
                }
                _ => {}
            }
        }
        let gone = blocks.keys().copied().collect();
        Before { came, gone, blocks }
    }

    /// A segment of the allocator at the end. Its used blocks that no event requested also lived
    /// before the first event.
    fn segment(&mut self, item: &Item<'_>, before: &mut Before) -> Result<(), Error> {
        let pickle = self.reader.pickle;
        let (address, bytes) = (item.number("address")?, item.number("total_size")?);
        let too_large = || item.error("the segments' sizes add up to 2^64 bytes or more");
        self.reserved = self.reserved.checked_add(bytes).ok_or_else(too_large)?;
        self.is_plain &= is_plain(pickle, item);
        let stream = self.stream(item.number("stream")?);
        let small = item.text("segment_type")? == "small";
        let mut used = vec![];
        let mut at = address;
        for block in item.list("blocks")? {
            let size = block.number("size")?;
            // Older snapshots give no addresses: blocks follow each other.
            let here = block.number_or("address", at)?;
            let beyond = || block.error("it ends beyond all addresses");
            at = here.checked_add(size).ok_or_else(beyond)?;
            if !block.text("state")?.starts_with("active") {
                continue;
            }
            used.push((here, size));
            if !before.came.contains(&here) && !before.gone.contains(&here) {
                let asked = Asked {
                    bytes: block.number_or("requested_size", size)?,
                    stream,
                    ..Asked::default()
                };
                before.blocks.insert(here, asked);
            }
        }
        self.history.segments.push(Segment {
            address,
            bytes,
            stream,
            small,
            used,
        });
        Ok(())
    }

    /// Applies an event to the blocks.
    fn blocks(&mut self, entry: &Entry) -> Result<(), String> {
        let address = entry.address;
        match entry.action {
            Action::Alloc => {
                self.begin_part(entry);
                // The end of its free was not recorded, but the request was.
                if self.leaving.remove(&address) {
                    self.recorder.free(&address)?;
                }
                let asked = Asked {
                    bytes: entry.bytes,
                    stream: self.stream(entry.stream),
                    ..Asked::default()
                };
                let id = self.next_id();
                let told = |message: String| format!("address {address:#x}: {message}");
                self.recorder.alloc(address, id, asked).map_err(told)?;
            }
            Action::FreeRequested => {
                self.leaving.insert(address);
            }
            Action::FreeCompleted => {
                self.leaving.remove(&address);
                let freed = self.recorder.free(&address)?;
                freed.ok_or_else(|| format!("address {address:#x} is freed twice"))?;
            }
            Action::SegmentAlloc | Action::SegmentFree | Action::Map | Action::Other => {}
        }
        Ok(())
    }

    /// Begins a phase if a request comes from another part of the step than the previous request.
    fn begin_part(&mut self, entry: &Entry) {
        let Some(now) = self.parts.part(entry.frames) else {
            return;
        };
        if self.part != Some(now) {
            self.part = Some(now);
            let run = &mut self.runs[now as usize];
            self.recorder.phase(Some(format!("{}.{run}", now.name())));
            *run += 1;
        }
    }

    /// Adds an event to the allocator's history.
    fn history(&mut self, entry: &Entry) {
        let stream = self.stream(entry.stream);
        let (address, bytes) = (entry.address, entry.bytes);
        self.history.events.extend(match entry.action {
            Action::Alloc => Some(Event::Alloc {
                address,
                bytes,
                stream,
            }),
            Action::FreeCompleted => Some(Event::Free { address, bytes }),
            Action::SegmentAlloc => Some(Event::Reserve {
                address,
                bytes,
                stream,
            }),
            Action::SegmentFree => Some(Event::Release {
                address,
                bytes,
                stream,
            }),
            Action::FreeRequested | Action::Map | Action::Other => None,
        });
    }
}

/// True for a segment that cannot grow and does not belong to the pool of a CUDA graph.
fn is_plain(pickle: &Pickle<'_>, segment: &Item<'_>) -> bool {
    let value = |key: &str| pickle.get(segment.id, key);
    let expandable = value("is_expandable").map(|id| pickle.value(id));
    let pool = value("segment_pool_id").and_then(|id| pickle.items(id));
    let is_zero = |&id: &Id| *pickle.value(id) == Value::Int(0);
    expandable != Some(&Value::Bool(true)) && pool.unwrap_or(&[]).iter().take(2).all(is_zero)
}
