//! Checkpoints while a run goes on: when they are due, the copy of the states from which a thread
//! writes them while steps run, and what happens if they cannot be written.
//!
//! A checkpoint has the states between two steps. They are copied to memory of the host, the
//! staging, and a thread writes the copy. If there is no memory for it, steps wait for the write.
//! One checkpoint is written at a time. Steps wait for it after a part of the interval, so a kill
//! loses little more than one interval.

use super::failure;
use crate::args::{Every, TrainArgs};
use crate::failure::Failure;
use crate::finite;
use crate::out::{self, out};
use crate::size::short;
use artifact::{Artifact, CommandKind, MemorySpace, Range, State, StateKind};
use checkpoint::{Checkpoint, Error, Kept, Manifest, Part, Saved, Store, Tensor};
use runtime::Machine;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The niceness of the thread that writes: the lowest priority.
const NICENESS: i32 = 19;
/// A checkpoint is written in the first of so many parts of the interval after it: then steps wait.
/// So a run that is killed goes on from a checkpoint that is no older than one interval and a
/// quarter.
const PARTS: u32 = 4;
/// The largest share of the memory that is free for the staging.
const MOST_OF_FREE: f64 = 0.5;

/// The states of a step, as they are written.
#[derive(Clone)]
pub(super) struct States {
    kinds: Arc<[StateKind]>,
    tensors: Arc<[Tensor]>,
    /// Where each lies in the staging; frozen ones are not there.
    offsets: Arc<[Option<usize>]>,
    staging_bytes: usize,
}

impl States {
    /// The states of a step.
    pub(super) fn of(artifact: &Artifact) -> States {
        let part = |state: &State| match (state.kind, is_written(artifact, state)) {
            (StateKind::Const, _) => Part::Constants,
            (StateKind::Param | StateKind::Buffer, false) => Part::Frozen,
            (StateKind::Param | StateKind::Buffer, true) => Part::Model,
            (StateKind::Moment | StateKind::Rng, _) => Part::Training,
        };
        let states = artifact.states.iter();
        let tensors: Vec<Tensor> = states
            .map(|state| Tensor {
                name: state.path.clone(),
                dtype: state.operand.dtype,
                shape: state.operand.shape.clone(),
                part: part(state),
            })
            .collect();
        let mut end = 0;
        let offsets = tensors.iter().map(|tensor| {
            let start = end;
            let is_staged = !tensor.part.is_frozen();
            end += if is_staged {
                tensor.bytes() as usize
            } else {
                0
            };
            is_staged.then_some(start)
        });
        let offsets = offsets.collect();
        States {
            kinds: artifact.states.iter().map(|state| state.kind).collect(),
            tensors: tensors.into(),
            offsets,
            staging_bytes: end,
        }
    }

    fn has_frozen(&self) -> bool {
        self.offsets.iter().any(Option::is_none)
    }

    /// Whether training can go on from bytes of a state.
    pub(super) fn is_sound(&self, number: usize, bytes: &[u8]) -> bool {
        finite::is_sound(self.kinds[number], self.tensors[number].dtype, bytes)
    }

    /// The tensors' names and types.
    pub(super) fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }
}

/// Whether a command of a step writes bytes of a state.
fn is_written(artifact: &Artifact, state: &State) -> bool {
    let place = state.operand.place;
    let end = place.offset + state.operand.bytes().unwrap_or(0);
    let overlaps = |range: Range| {
        let Range {
            place: other,
            bytes,
        } = range;
        other.pool == place.pool && other.offset < end && place.offset < other.offset + bytes
    };
    artifact.commands.iter().any(|command| match &command.kind {
        CommandKind::Launch { outs, scratch, .. } => {
            let outs = outs.iter().map(|out| Range {
                place: out.place,
                bytes: out.bytes().unwrap_or(0),
            });
            outs.chain(*scratch).any(overlaps)
        }
        &CommandKind::Copy { dst, bytes, .. } => overlaps(Range { place: dst, bytes }),
        CommandKind::Record { .. } | CommandKind::Wait { .. } => false,
    })
}

/// What a thread that has written a checkpoint returns.
struct Done {
    store: Store,
    staging: Vec<u8>,
    step: u64,
    result: Result<Saved, Unwritten>,
}

/// Why a checkpoint was not written.
enum Unwritten {
    /// Values of this state are NaN or infinite.
    NotFinite(String),
    Failed(Error),
}

/// The checkpoints of a run.
pub(super) struct Checkpoints {
    /// Absent while a thread writes.
    store: Option<Store>,
    busy: Option<JoinHandle<Done>>,
    states: States,
    /// What is the same in all checkpoints of the run.
    common: Manifest,
    /// Absent while a thread writes from it, and if steps wait.
    staging: Option<Vec<u8>>,
    every: Option<Every>,
    most_failures: Option<u64>,
    nonfinite: bool,
    json: bool,
    /// The step of the last checkpoint that was begun, and when.
    begun: u64,
    since: Instant,
    newest: Option<PathBuf>,
    /// In a row.
    failures: u64,
    report: Report,
}

/// What is told at the end.
#[derive(Default)]
struct Report {
    written: u64,
    failed: u64,
    waited: Duration,
    staging_bytes: u64,
}

/// What a checkpoint has beside the states: the position of a run.
#[derive(Clone, Default)]
pub(super) struct Position {
    /// Steps that are done.
    pub(super) step: u64,
    /// Batches that are read.
    pub(super) batches: u64,
    /// Numbers that the host keeps.
    pub(super) numbers: BTreeMap<String, u64>,
}

/// Opens the folder of checkpoints; none if the user names none.
pub(super) fn open_store(args: &TrainArgs) -> Result<Option<Store>, Failure> {
    let options = &args.checkpoints;
    let given = [
        ("--init", args.init.is_some()),
        ("--adapters", args.adapters.is_some()),
    ];
    let given = given.into_iter().find(|&(_, is_given)| is_given);
    if let (Some((option, _)), true) = (given, options.resume.is_some() && !options.may_begin()) {
        return Err(Failure::Input(format!(
            "{option}: a checkpoint has all values, so --resume takes none; --checkpoints with the \
             same folder lets a run begin if there is no checkpoint yet"
        )));
    }
    let Some(folder) = options.folder() else {
        return match options.needs_folder() {
            Some(option) => Err(Failure::Input(format!(
                "{option}: name a folder with --checkpoints DIR"
            ))),
            None => Ok(None),
        };
    };
    // The system would refuse, and what is wrong is the option.
    let existing = folder.ancestors().find(|path| path.exists());
    if let Some(file) = existing.filter(|path| !path.is_dir()) {
        return Err(Failure::Input(format!(
            "--checkpoints {}: {} is not a folder",
            folder.display(),
            file.display()
        )));
    }
    let kept = Kept {
        last: options.keep_last,
        every: options.keep_every,
    };
    let store = Store::open(&folder, kept).map_err(|e| match e {
        Error::Io { .. } => Failure::System(format!("--checkpoints {e}")),
        Error::Damaged { .. } | Error::Locked { .. } => {
            Failure::Input(format!("--checkpoints {e}"))
        }
    })?;
    let found = checkpoint::newest_first(&folder).map_err(system)?;
    if let (None, Some((_, path))) = (&options.resume, found.first()) {
        let folder = folder.display();
        return Err(Failure::Input(format!(
            "--checkpoints {folder}: {} is of an earlier run; --resume {folder} goes on with it, \
             or name another folder",
            path.display()
        )));
    }
    Ok(Some(store))
}

/// An error of a file as a failure.
pub(super) fn system(error: Error) -> Failure {
    match error {
        Error::Io { .. } => Failure::System(error.to_string()),
        Error::Damaged { .. } | Error::Locked { .. } => Failure::Input(error.to_string()),
    }
}

impl Checkpoints {
    /// Checkpoints of a run that begins.
    pub(super) fn new(
        args: &TrainArgs,
        artifact: &Artifact,
        store: Store,
        states: States,
        common: Manifest,
    ) -> Checkpoints {
        let options = &args.checkpoints;
        note_space(store.folder(), &states);
        // In a short interval there is no time to write meanwhile.
        let is_short = match options.save_every {
            Some(Every::Steps(every)) => every < u64::from(PARTS),
            Some(Every::Time(_)) => false,
            None => true,
        };
        let staging = match options.save_sync || is_short {
            true => None,
            false => staging(args, artifact, states.staging_bytes),
        };
        let report = Report {
            staging_bytes: staging.as_ref().map_or(0, |staging| staging.len() as u64),
            ..Report::default()
        };
        Checkpoints {
            store: Some(store),
            busy: None,
            states,
            common,
            staging,
            every: options.save_every,
            most_failures: options.save_failures.map(u64::from),
            nonfinite: args.save_nonfinite,
            json: args.json,
            begun: 0,
            since: Instant::now(),
            newest: None,
            failures: 0,
            report,
        }
    }

    /// The run goes on from a checkpoint.
    pub(super) fn resumed(&mut self, from: &Checkpoint) -> Result<(), Failure> {
        let step = from.manifest().step;
        (self.begun, self.newest) = (step, Some(from.path().to_path_buf()));
        let Some(store) = &mut self.store else {
            return Ok(());
        };
        let folder = from.path().canonicalize().ok();
        let folder = folder.as_ref().and_then(|path| path.parent());
        match folder.is_some() && folder == store.folder().canonicalize().ok().as_deref() {
            true => store.resumed(from).map_err(system),
            false => Ok(()),
        }
    }

    /// After a step: writes a checkpoint if it is due, and tells of those that are written. An
    /// error ends the run.
    pub(super) fn after_step(
        &mut self,
        machine: &mut Machine,
        step: u64,
        position: impl FnOnce() -> Position,
    ) -> Result<(), Failure> {
        if self.busy.as_ref().is_some_and(JoinHandle::is_finished) {
            self.collect()?;
        }
        if self.is_late(step) {
            let start = Instant::now();
            self.collect()?;
            self.report.waited += start.elapsed();
        }
        let is_due = match self.every {
            Some(Every::Steps(every)) => step.is_multiple_of(every),
            Some(Every::Time(time)) => self.since.elapsed() >= time,
            None => false,
        };
        match is_due {
            true => self.save(machine, position()),
            false => Ok(()),
        }
    }

    /// Whether the checkpoint that is being written has taken its part of the interval.
    fn is_late(&self, step: u64) -> bool {
        let is_over = match self.every {
            Some(Every::Steps(every)) => {
                step.saturating_sub(self.begun) >= every / u64::from(PARTS)
            }
            Some(Every::Time(time)) => self.since.elapsed() >= time / PARTS,
            None => false,
        };
        is_over && self.busy.is_some()
    }

    /// After the last step: the last checkpoint, unless it is written already.
    pub(super) fn finish(
        &mut self,
        machine: &mut Machine,
        position: Position,
    ) -> Result<(), Failure> {
        // The last state is tried again even if there have been too many failures.
        let earlier = self.collect();
        if self.begun != position.step || self.failures > 0 {
            self.staging = None;
            self.most_failures = Some(1);
            return self.save(machine, position);
        }
        earlier
    }

    fn save(&mut self, machine: &mut Machine, position: Position) -> Result<(), Failure> {
        let start = Instant::now();
        self.collect()?;
        machine.wait().map_err(failure)?;
        (self.begun, self.since) = (position.step, Instant::now());
        let manifest = Manifest {
            step: position.step,
            batches: position.batches,
            numbers: position.numbers,
            ..self.common.clone()
        };
        let has_frozen = self.store.as_ref().is_some_and(Store::has_frozen);
        let is_staged = has_frozen || !self.states.has_frozen();
        let mut staging = self.staging.take_if(|_| is_staged);
        if let Some(staging) = &mut staging {
            self.copy(machine, staging)?;
        }
        let Some(store) = self.store.take() else {
            let why = "the thread that writes checkpoints could not be started, or failed";
            return Err(Failure::System(why.into()));
        };
        match staging {
            Some(staging) => self.write_aside(store, staging, manifest)?,
            None => self.write_now(store, machine, manifest)?,
        }
        self.report.waited += start.elapsed();
        Ok(())
    }

    /// Writes the copy of the states by a thread.
    fn write_aside(
        &mut self,
        mut store: Store,
        staging: Vec<u8>,
        manifest: Manifest,
    ) -> Result<(), Failure> {
        let (states, nonfinite) = (self.states.clone(), self.nonfinite);
        let step = manifest.step;
        let write = move || {
            // A lower priority is a wish.
            let _ = rustix::process::setpriority_process(None, NICENESS);
            let from = |number: usize, start: u64, bytes: &mut [u8]| {
                let offset = states.offsets[number];
                let offset = offset.ok_or_else(|| io::Error::other("it is not in the copy"))?;
                let from = offset + start as usize;
                bytes.copy_from_slice(&staging[from..from + bytes.len()]);
                Ok(())
            };
            let result = write(&mut store, manifest, &states, nonfinite, from);
            Done {
                store,
                staging,
                step,
                result,
            }
        };
        let thread = thread::Builder::new().name("checkpoint".into());
        let thread = thread
            .spawn(write)
            .map_err(|e| Failure::System(format!("the thread that writes checkpoints: {e}")))?;
        self.busy = Some(thread);
        Ok(())
    }

    /// Writes the states themselves.
    fn write_now(
        &mut self,
        mut store: Store,
        machine: &mut Machine,
        manifest: Manifest,
    ) -> Result<(), Failure> {
        let (states, step) = (self.states.clone(), manifest.step);
        let from = |number: usize, start: u64, bytes: &mut [u8]| {
            let name = &states.tensors[number].name;
            let read = machine.read_state_part(name, start, bytes);
            read.map_err(|e| io::Error::other(e.to_string()))
        };
        let result = write(&mut store, manifest, &states, self.nonfinite, from);
        self.store = Some(store);
        self.tell(step, result)
    }

    /// Copies the states to the staging.
    fn copy(&self, machine: &mut Machine, staging: &mut [u8]) -> Result<(), Failure> {
        let States {
            tensors, offsets, ..
        } = &self.states;
        for (tensor, offset) in tensors.iter().zip(offsets.iter()) {
            let Some(offset) = *offset else { continue };
            let bytes = &mut staging[offset..offset + tensor.bytes() as usize];
            machine
                .read_state_part(&tensor.name, 0, bytes)
                .map_err(failure)?;
        }
        Ok(())
    }

    /// Waits for the thread that writes, if there is one.
    fn collect(&mut self) -> Result<(), Failure> {
        let Some(thread) = self.busy.take() else {
            return Ok(());
        };
        let Ok(done) = thread.join() else {
            return Err(Failure::Bug(
                "the thread that writes checkpoints failed".into(),
            ));
        };
        (self.store, self.staging) = (Some(done.store), Some(done.staging));
        self.tell(done.step, done.result)
    }

    fn tell(&mut self, step: u64, result: Result<Saved, Unwritten>) -> Result<(), Failure> {
        let why = match result {
            Ok(Saved { path, not_done }) => {
                if let Some(error) = not_done {
                    out::note(&format!(
                        "warning: after the checkpoint of step {step}: {error}; older ones may be \
                         left"
                    ));
                }
                let path_text = path.display().to_string();
                match self.json {
                    true => out!("{}", json!({"step": step, "checkpoint": path_text})),
                    false => out!("saved {step:>4}  {path_text}"),
                }
                self.report.written += 1;
                (self.failures, self.newest) = (0, Some(path));
                return Ok(());
            }
            Err(why) => why,
        };
        self.failures += 1;
        self.report.failed += 1;
        let newest = match &self.newest {
            Some(path) => format!("the newest is {}", path.display()),
            None => "there is none yet".to_string(),
        };
        let count = match self.failures {
            1 => String::new(),
            n => format!(" ({n} in a row)"),
        };
        let (is_finite, why) = match why {
            Unwritten::NotFinite(name) => (false, format!("NaN or infinite values in {name}")),
            Unwritten::Failed(error) => (true, error.to_string()),
        };
        let text = format!("no checkpoint after step {step}{count}: {why}\n  {newest}");
        if self.most_failures.is_none_or(|most| self.failures < most) {
            out::note(&format!("warning: {text}"));
            return Ok(());
        }
        Err(match is_finite {
            true => Failure::System(text),
            false => Failure::NotFinite(format!("{text}; --save-nonfinite writes them")),
        })
    }

    /// The newest checkpoint.
    pub(super) fn newest(&self) -> Option<&PathBuf> {
        self.newest.as_ref()
    }

    /// What is told at the end, as text.
    pub(super) fn text(&self) -> String {
        let Report {
            written,
            failed,
            waited,
            staging_bytes,
        } = self.report;
        let failed = match failed {
            0 => String::new(),
            n => format!(", {n} failed"),
        };
        let ms = waited.as_secs_f64() * 1e3;
        let staging = match staging_bytes {
            0 => String::new(),
            bytes => format!("; {} of the host's memory beside the pools", short(bytes)),
        };
        format!("checkpoints   {written} written{failed}, steps waited {ms:.1} ms{staging}\n")
    }

    /// The same, for programs.
    pub(super) fn json(&self) -> Value {
        json!({
            "written": self.report.written,
            "failed": self.report.failed,
            "waited_ms": self.report.waited.as_secs_f64() * 1e3,
            "staging_bytes": self.report.staging_bytes,
            "newest": self.newest.as_ref().map(|path| path.display().to_string()),
        })
    }
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        // A run that ends with an error lets the last checkpoint become whole.
        let _ = self.collect();
    }
}

/// Writes a checkpoint whose bytes come from `read`.
fn write(
    store: &mut Store,
    manifest: Manifest,
    states: &States,
    nonfinite: bool,
    mut read: impl FnMut(usize, u64, &mut [u8]) -> io::Result<()>,
) -> Result<Saved, Unwritten> {
    let mut broken = None;
    let mut source = |number: usize, start: u64, bytes: &mut [u8]| {
        read(number, start, bytes)?;
        if !nonfinite && !states.is_sound(number, bytes) {
            broken = Some(states.tensors[number].name.clone());
            return Err(io::Error::other("NaN or infinite values"));
        }
        Ok(())
    };
    let saved = store.save(manifest, &states.tensors, &mut source);
    saved.map_err(|error| match broken {
        Some(name) => Unwritten::NotFinite(name),
        None => Unwritten::Failed(error),
    })
}

/// Warns about a disk that has no room for a checkpoint.
fn note_space(folder: &Path, states: &States) {
    let Ok(disk) = rustix::fs::statvfs(folder) else {
        return;
    };
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    let bytes = states.tensors.iter().map(Tensor::bytes).sum::<u64>();
    if free < bytes {
        out::note(&format!(
            "warning: a checkpoint takes {}, and {} has {} left",
            short(bytes),
            folder.display(),
            short(free)
        ));
    }
}

/// Memory for a copy of the states; `None`, with a note, if there is not enough.
fn staging(args: &TrainArgs, artifact: &Artifact, bytes: usize) -> Option<Vec<u8>> {
    let pools = |space: Option<MemorySpace>| -> u64 {
        let pools = artifact.pools.iter();
        let pools = pools.filter(|pool| space.is_none_or(|space| pool.space == space));
        pools.map(|pool| pool.bytes).sum()
    };
    let limits = [
        (
            "--host",
            args.compiling.host,
            pools(Some(MemorySpace::Host)),
        ),
        ("--most-memory", args.most_memory, pools(None)),
    ];
    let size = short(bytes as u64);
    let refused = |why: String| {
        out::note(&format!(
            "note: steps wait while a checkpoint is written: a copy of the states takes {size}, \
             and {why}"
        ));
        None
    };
    if args.compiling.disk.is_some() {
        return refused("--disk saves memory".into());
    }
    for (option, limit, used) in limits {
        if let Some(limit) = limit.filter(|&limit| used + bytes as u64 > limit) {
            let left = short(limit.saturating_sub(used));
            return refused(format!("{option} leaves {left}"));
        }
    }
    if let Some(free) = free_memory().filter(|&free| bytes as f64 > MOST_OF_FREE * free as f64) {
        return refused(format!("{} are free", short(free)));
    }
    let mut staging = vec![];
    if staging.try_reserve_exact(bytes).is_err() {
        return refused("the system refuses".into());
    }
    // Not zeros: the system gives memory when it is written, and a step should not wait for that.
    staging.resize(bytes, 1);
    Some(staging)
}

/// The memory that the system can give, if it says so.
fn free_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
