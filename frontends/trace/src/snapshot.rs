//! Memory snapshots of PyTorch: what `torch.cuda.memory._dump_snapshot` writes after
//! `_record_memory_history`.
//!
//! A snapshot has, for each device, the allocator's events (`device_traces`) and the segments it
//! holds at the end. Each device is a pool. A block lives from `alloc` to `free_completed`, with
//! the bytes that were asked for. Blocks that are freed and were never asked for, and those in
//! segments of which no event speaks, were there before the recording.
//!
//! Phases are read off the Python frames of requests: a frame in `torch/optim` is the optimizer;
//! one called `backward`, one of autograd's engine, or no frame at all where others have some
//! (autograd's threads run no Python), is a backward; one called `forward` is a forward. Requests
//! that tell nothing belong to the phase before. Each run of equal phases is one.

use crate::pickle::{self, Id, Pickle, Value, kind};
use crate::recorder::{Asked, Recorder};
use crate::{Error, Pool};
use passes::alloc::caching::{Event, History, Segment};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Reads a snapshot.
pub fn read(bytes: &[u8]) -> Result<Vec<Pool>, Error> {
    let pickle = pickle::read(bytes)?;
    let reader = &Reader { pickle: &pickle };
    let help = "a snapshot is what torch.cuda.memory._dump_snapshot writes";
    let root = Item {
        reader,
        id: pickle.root(),
        place: "the pickle".into(),
    };
    let traces = root
        .list("device_traces")
        .map_err(|error| error.help(help))?;
    let mut segments: BTreeMap<usize, Vec<Item<'_>>> = BTreeMap::new();
    for segment in root.list("segments").map_err(|error| error.help(help))? {
        let device = segment.number("device")?;
        let device = usize::try_from(device)
            .ok()
            .filter(|&device| device < MOST_DEVICES);
        let device = device.ok_or_else(|| {
            segment.error(format!("there are no more than {MOST_DEVICES} devices"))
        })?;
        segments.entry(device).or_default().push(segment);
    }
    // What a pickle shares could be visited more often than it has bytes; a snapshot shares no
    // events and no blocks.
    let repeats = |n: usize| match n <= pickle.len() {
        true => Ok(()),
        false => Err(Error::new(
            "the pickle",
            "it repeats itself: a snapshot has each event and each block once",
        )),
    };
    let mut n_blocks = 0;
    for segment in segments.values().flatten() {
        n_blocks += segment.get("blocks")?.items()?.len();
        repeats(n_blocks)?;
    }
    if MOST_DEVICES < traces.len() {
        return Err(Error::new(
            "device_traces",
            format!("there are no more than {MOST_DEVICES} devices"),
        ));
    }
    let mut n_events = 0;
    let mut events = vec![];
    for (device, trace) in traces.iter().enumerate() {
        n_events += trace.items()?.len();
        repeats(n_events)?;
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
    let devices = events
        .len()
        .max(segments.keys().next_back().map_or(0, |last| last + 1));
    let mut events = events.into_iter();
    let mut pools = vec![];
    for device in 0..devices {
        let segments = segments.remove(&device).unwrap_or_default();
        let events = match events.next() {
            Some(events) => events
                .map(|event| event.event())
                .collect::<Result<Vec<_>, _>>()?,
            None => vec![],
        };
        let pool = device_pool(&format!("cuda:{device}"), reader, &segments, &events)?;
        if !pool.trace.blocks.is_empty() {
            pools.push(pool);
        }
    }
    Ok(pools)
}

/// More devices than this are a mistake.
const MOST_DEVICES: usize = 1024;

struct Reader<'a> {
    pickle: &'a Pickle<'a>,
}

/// A value, and what it is called in messages.
struct Item<'a> {
    reader: &'a Reader<'a>,
    id: Id,
    place: String,
}

/// What an event says.
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
            // Before 2.0 there was one event for both.
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
        let stream = self
            .reader
            .pickle
            .get(self.id, "stream")
            .map_or(Ok(0), |_| self.number("stream"))?;
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

/// Tells parts of a step from frames. Snapshots share them, so each is looked at once.
struct Parts<'a> {
    pickle: &'a Pickle<'a>,
    known: HashMap<Id, Option<Part>>,
    /// Some request has frames.
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
    let mut recorder: Recorder<u64> = Recorder::new(name);
    let mut streams: HashMap<u64, u32> = HashMap::from([(0, 0)]);
    let mut stream = |handle: u64| {
        let next = streams.len() as u32;
        *streams.entry(handle).or_insert(next)
    };
    // What was there before: what goes and did not come, and what is in use at the end and did not
    // come either.
    let mut came: BTreeSet<u64> = BTreeSet::new();
    let mut before: BTreeMap<u64, Asked> = BTreeMap::new();
    for entry in events {
        match entry.action {
            Action::Alloc => {
                came.insert(entry.address);
            }
            Action::FreeCompleted if !came.remove(&entry.address) => {
                let asked = Asked {
                    bytes: entry.bytes,
                    stream: stream(entry.stream),
                    ..Asked::default()
                };
                before.entry(entry.address).or_insert(asked);
            }
            _ => {}
        }
    }
    let gone: BTreeSet<u64> = before.keys().copied().collect();
    let mut history = History::default();
    let mut plain = !events.iter().any(|entry| entry.action == Action::Map);
    let mut reserved = 0u64;
    for item in segments {
        let (address, bytes) = (item.number("address")?, item.number("total_size")?);
        let too_large = || item.error("the segments' sizes add up to 2^64 bytes or more");
        reserved = reserved.checked_add(bytes).ok_or_else(too_large)?;
        let is_true = |key| {
            reader
                .pickle
                .get(item.id, key)
                .map(|id| reader.pickle.value(id))
                == Some(&Value::Bool(true))
        };
        plain &= !is_true("is_expandable");
        // Graphs' pools are apart from others.
        let pool = reader
            .pickle
            .get(item.id, "segment_pool_id")
            .and_then(|id| reader.pickle.items(id))
            .unwrap_or(&[]);
        plain &= pool
            .iter()
            .take(2)
            .all(|&id| *reader.pickle.value(id) == Value::Int(0));
        let stream = stream(item.number("stream")?);
        let small = item.text("segment_type")? == "small";
        let mut used = vec![];
        let mut at = address;
        for block in item.list("blocks")? {
            let size = block.number("size")?;
            // Older snapshots give no addresses: blocks follow each other.
            let here = reader
                .pickle
                .get(block.id, "address")
                .map_or(Ok(at), |_| block.number("address"))?;
            at = here
                .checked_add(size)
                .ok_or_else(|| block.error("it ends beyond all addresses"))?;
            if !block.text("state")?.starts_with("active") {
                continue;
            }
            used.push((here, size));
            if !came.contains(&here) && !gone.contains(&here) {
                let asked = reader
                    .pickle
                    .get(block.id, "requested_size")
                    .map_or(Ok(size), |_| block.number("requested_size"));
                before.insert(
                    here,
                    Asked {
                        bytes: asked?,
                        stream,
                        ..Asked::default()
                    },
                );
            }
        }
        history.segments.push(Segment {
            address,
            bytes,
            stream,
            small,
            used,
        });
    }
    let mut id = (0u64..).map(|n| n.to_string());
    let mut next_id = || id.next().expect("numbers should not end");
    for (&address, &asked) in &before {
        let placed = recorder.was_there(address, next_id(), asked);
        placed.map_err(|message| Error::new(format!("segments of {name}"), message))?;
    }
    let some = events
        .iter()
        .filter_map(|entry| reader.pickle.items(entry.frames?))
        .any(|frames| !frames.is_empty());
    let mut parts = Parts {
        pickle: reader.pickle,
        known: HashMap::new(),
        some,
    };
    let (mut part, mut runs) = (None, [0u64; 3]);
    let mut leaving: BTreeSet<u64> = BTreeSet::new();
    for (i, entry) in events.iter().enumerate() {
        let error = |message: String| Error::new(format!("event {i} of {name}"), message);
        let &Entry {
            action,
            address,
            bytes,
            ..
        } = entry;
        match action {
            Action::Alloc => {
                if let Some(now) = parts.part(entry.frames).filter(|&now| part != Some(now)) {
                    part = Some(now);
                    let run = &mut runs[now as usize];
                    recorder.phase(Some(format!("{}.{run}", now.name())));
                    *run += 1;
                }
                // Its end was not recorded, but it was asked to go.
                if leaving.remove(&address) {
                    recorder.free(&address).map_err(error)?;
                }
                let asked = Asked {
                    bytes,
                    stream: stream(entry.stream),
                    ..Asked::default()
                };
                let told = |message: String| error(format!("address {address:#x}: {message}"));
                recorder.alloc(address, next_id(), asked).map_err(told)?;
            }
            Action::FreeRequested => {
                leaving.insert(address);
            }
            Action::FreeCompleted => {
                leaving.remove(&address);
                let freed = recorder.free(&address).map_err(error)?;
                freed.ok_or_else(|| error(format!("address {address:#x} is freed twice")))?;
            }
            Action::SegmentAlloc | Action::SegmentFree | Action::Map | Action::Other => {}
        }
        let stream = stream(entry.stream);
        history.events.extend(match action {
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
    let mut pool = recorder.finish();
    pool.reserved_bytes = Some(reserved);
    pool.history = plain.then_some(history);
    Ok(pool)
}
