//! Refuses every artifact that could make a machine corrupt memory, deadlock, or compute results
//! that depend on timing.
//!
//! It runs when an artifact is loaded, and trusts nothing in it: a file with right checksums may
//! still come from anybody. It proves the facts that [`crate::memory`] and [`crate::kernel`] rely
//! on when they turn places into slices:
//!
//! * every index is in range, and every place lies in its pool, is aligned, and has a size that
//!   does not overflow;
//! * each command's results overlap neither its operands, nor each other, nor its scratch.
//!   Exception: a result may lie exactly on an operand of equal type if the kernel allows it. A
//!   copy's source and destination do not overlap;
//! * each launch is accepted by its kernel's own check, and ends in reasonable time ([`work`]);
//! * a GPU can start its kernels, whose tensors lie in its memory ([`gpu`]);
//! * in a pool of the caller's memory, each access lies in one state, input or output, and kernels
//!   only work on states ([`lent`]);
//! * every event is recorded once, and waits for this step's record come after it in the list. So
//!   everything can run in the order of the list, for any streams: nothing deadlocks;
//! * two accesses of the same bytes, one of them a write, are ordered by streams and events
//!   ([`races`]);
//! * bytes that a kernel or the host reads were written before, in this step or the previous one
//!   ([`written`]);
//! * the summary has numbers that its readers can compute with.
//!
//! The host needs no event: it touches pools only while no step runs. It also touches inputs and
//! outputs after all conflicting commands have run and before it launches others
//! ([`Machine::wait_io`](crate::Machine::wait_io) finds these commands by their accesses).

pub(crate) mod calls;
mod gpu;
mod lent;
mod races;
mod work;
mod written;

use crate::Error;
use crate::access::Access;
use crate::kernels::{self, Signature};
use artifact::{
    Artifact, Attr, Binding, Code, Command, CommandKind, DType, Initial, Kernel, MemorySpace,
    Operand, Place, Range, State, StateKind, Summary, Target, Type,
};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Places are multiples of this many bytes.
pub(crate) const ALIGN: u64 = 64;
/// A stream is a thread. Plans have three to twelve; this limit keeps a hostile file from starting
/// millions.
const MAX_STREAMS: usize = 64;
/// The largest number of results of a launch, see [`crate::kernel::Call`].
const MAX_RESULTS: usize = 62;

/// Proves that machines may run this artifact; an error says why not.
pub fn validate(artifact: &Artifact) -> Result<(), Error> {
    let steps = std::iter::once(artifact).chain(&artifact.others);
    let needed: Vec<_> = steps.flat_map(calls::needed).collect();
    if !needed.is_empty() {
        let call = |(name, line): &(&str, &str)| format!("{name} (line {line})");
        let calls: Vec<String> = needed.iter().map(call).collect();
        return Err(Error::Unsupported(format!(
            "{}: there is no kernel, so only the program that compiled the step can run it",
            calls.join(", ")
        )));
    }
    validate_calls(artifact)
}

/// The same for machines of a caller with functions for what has no kernel: see
/// [`Foreign`](crate::Foreign).
pub(crate) fn validate_calls(artifact: &Artifact) -> Result<(), Error> {
    whole(artifact)?;
    summary(&artifact.summary)?;
    bindings(artifact)?;
    micro_batches(artifact)?;
    for command in &artifact.commands {
        self::command(artifact, command)?;
    }
    lent::check(artifact)?;
    events(artifact)?;
    races::check(artifact)?;
    written::check(artifact)?;
    for other in &artifact.others {
        artifact::check_sharing(artifact, other)
            .map_err(|e| Error::Invalid(format!("a step on smaller batches: {e}")))?;
        // It has no steps of its own.
        validate_calls(other)?;
    }
    Ok(())
}

/// The artifact as a whole: the number of streams, pools that fit the address space, a correct
/// summary.
fn whole(artifact: &Artifact) -> Result<(), Error> {
    if MAX_STREAMS < artifact.streams.len() {
        return invalid(format!(
            "{} streams; {MAX_STREAMS} at most",
            artifact.streams.len()
        ));
    }
    let total = artifact
        .pools
        .iter()
        .try_fold(0_u64, |sum, pool| sum.checked_add(pool.bytes));
    if total.is_none_or(|total| isize::MAX as u64 <= total) {
        return invalid("its pools are larger than any memory".into());
    }
    gpu::pools(artifact).map_err(Error::Unsupported)?;
    let (planned, pool) = (
        artifact.summary.planned_peak_bytes,
        artifact
            .pool_in(MemorySpace::Device(0))
            .map_or(0, |p| p.bytes),
    );
    if planned != pool {
        return invalid(format!(
            "its summary promises a peak of {planned} bytes, the device pool has {pool}"
        ));
    }
    match artifact.events as usize <= artifact.commands.len() {
        true => Ok(()),
        false => invalid(format!(
            "{} events and only {} commands",
            artifact.events,
            artifact.commands.len()
        )),
    }
}

/// A summary's numbers are printed and used as divisors.
fn summary(summary: &Summary) -> Result<(), Error> {
    for (what, ms) in [
        ("a step", summary.predicted_ms),
        ("reruns", summary.recomputed_ms),
    ] {
        if !(ms.is_finite() && ms >= 0.0) {
            return invalid(format!("its summary promises {what} of {ms} ms"));
        }
    }
    Ok(())
}

/// With `n` micro-batches, the inputs are those of batch 0, those of batch 1, and so on: `x.0`,
/// `y.0`, `x.1`, `y.1`. The optimizer's options are not among them.
fn micro_batches(artifact: &Artifact) -> Result<(), Error> {
    let n = artifact.summary.micro_batches.max(1);
    if n == 1 {
        return Ok(());
    }
    let inputs: Vec<_> = artifact
        .inputs
        .iter()
        .filter(|input| !artifact::is_optimizer_input(&input.name))
        .collect();
    let each = inputs.len() as u64 / n;
    let has_batches = each > 0 && inputs.len() as u64 == each * n;
    let is_named = |(i, input): (usize, &&Binding)| {
        let (batch, which) = (i as u64 / each, (i as u64 % each) as usize);
        let first = inputs[which];
        let name = first.name.strip_suffix(".0");
        name.is_some_and(|name| input.name == format!("{name}.{batch}"))
            && input.operand.dtype == first.operand.dtype
            && input.operand.shape == first.operand.shape
    };
    if has_batches && inputs.iter().enumerate().all(is_named) {
        return Ok(());
    }
    invalid(format!(
        "its summary promises {n} micro-batches, and its {} inputs are not theirs",
        inputs.len()
    ))
}

/// Inputs, outputs and states: tensors in their pools, unique names, initial data that exist.
/// Inputs and states share no byte: to write one would destroy the other.
fn bindings(artifact: &Artifact) -> Result<(), Error> {
    let mut entry: Vec<(Access, &str)> = Vec::new();
    let mut names = BTreeSet::new();
    for input in &artifact.inputs {
        tensor(artifact, &input.operand)
            .or_else(|e| invalid(format!("input {}: {e}", input.name)))?;
        entry.extend(Access::of(&input.operand, true).map(|access| (access, &*input.name)));
        if !names.insert(&*input.name) {
            return invalid(format!("two inputs are called {}", input.name));
        }
    }
    names.clear();
    for output in &artifact.outputs {
        tensor(artifact, &output.operand)
            .or_else(|e| invalid(format!("output {}: {e}", output.name)))?;
        if !names.insert(&*output.name) {
            return invalid(format!("two outputs are called {}", output.name));
        }
    }
    names.clear();
    for state in &artifact.states {
        let path = &*state.path;
        let bytes =
            tensor(artifact, &state.operand).or_else(|e| invalid(format!("state {path}: {e}")))?;
        entry.extend(Access::of(&state.operand, true).map(|access| (access, path)));
        if !names.insert(path) {
            return invalid(format!("two states are called {path}"));
        }
        initial_data(artifact, state, bytes)?;
        if state.kind == StateKind::Rng
            && (state.operand.dtype != DType::I64 || state.operand.shape != [2])
        {
            return invalid(format!(
                "state {path} is a random state and should be i64[2]: seed and step"
            ));
        }
    }
    entry.sort_by_key(|(access, _)| (access.pool, access.start));
    match entry.windows(2).find(|pair| pair[0].0.overlaps(&pair[1].0)) {
        Some(pair) => invalid(format!(
            "{} and {} share bytes between steps",
            pair[0].1, pair[1].1
        )),
        None => Ok(()),
    }
}

/// Checks the initial data of a state of `bytes` bytes, if it has any: all of the data must lie
/// within the artifact's.
fn initial_data(artifact: &Artifact, state: &State, bytes: u64) -> Result<(), Error> {
    let Initial::Data {
        start,
        bytes: given,
    } = state.initial
    else {
        return Ok(());
    };
    let has = artifact.data.len() as u64;
    let is_within = start.checked_add(given).is_some_and(|end| end <= has);
    if given == bytes && is_within {
        return Ok(());
    }
    invalid(format!(
        "state {} has {bytes} bytes and starts from {given} at {start} of {has} bytes of data",
        state.path
    ))
}

/// Checks one command alone.
fn command(artifact: &Artifact, command: &Command) -> Result<(), Error> {
    let Some(line) = artifact.lines.get(command.line as usize) else {
        return invalid(format!(
            "a command belongs to line {} of {}",
            command.line,
            artifact.lines.len()
        ));
    };
    let at = |e: String| Error::Invalid(format!("line {}: {e}", line.name));
    if artifact.streams.len() <= command.stream as usize {
        return Err(at(format!(
            "stream {} of {}",
            command.stream,
            artifact.streams.len()
        )));
    }
    match &command.kind {
        CommandKind::Launch {
            kernel,
            ins,
            outs,
            scratch,
        } => {
            let Some(kernel) = artifact.kernels.get(*kernel as usize) else {
                return Err(at(format!("kernel {kernel} of {}", artifact.kernels.len())));
            };
            if calls::is_foreign(kernel) {
                return call(artifact, kernel, ins, outs, *scratch).map_err(at);
            }
            launch(artifact, &line.name, kernel, ins, outs, *scratch)
        }
        &CommandKind::Copy { src, dst, bytes } => {
            place(artifact, src, bytes).map_err(at)?;
            place(artifact, dst, bytes).map_err(at)?;
            if [src, dst].iter().all(|&place| is_on_disk(artifact, place)) {
                return Err(at("copies from the disk to the disk".into()));
            }
            match (
                Access::new(src, bytes, false),
                Access::new(dst, bytes, true),
            ) {
                (Some(src), Some(dst)) if src.overlaps(&dst) => {
                    Err(at("copies bytes onto themselves".into()))
                }
                _ => Ok(()),
            }
        }
        &CommandKind::Record { event } | &CommandKind::Wait { event, .. } => {
            match event < artifact.events {
                true => Ok(()),
                false => Err(at(format!("event {event} of {}", artifact.events))),
            }
        }
    }
}

/// Whether the caller's functions may be called for a launch on these places. What they do with
/// the operands is not known, so nothing is in place.
fn call(
    artifact: &Artifact,
    kernel: &Kernel,
    ins: &[Operand],
    outs: &[Operand],
    scratch: Option<Range>,
) -> Result<(), String> {
    places(artifact, ins, outs, scratch)?;
    calls::check(kernel, outs)?;
    disjoint(ins, outs, scratch, |_| false)
}

/// Whether a kernel may be launched on these places.
pub(crate) fn launch(
    artifact: &Artifact,
    line: &str,
    kernel: &Kernel,
    ins: &[Operand],
    outs: &[Operand],
    scratch: Option<Range>,
) -> Result<(), Error> {
    let op = &*kernel.op;
    let at = |e: String| Error::Invalid(format!("line {line}: {e}"));
    places(artifact, ins, outs, scratch).map_err(at)?;
    let operands = ins.iter().chain(outs).map(|operand| operand.place);
    let all = operands.chain(scratch.map(|range| range.place));
    gpu::places(artifact, kernel, all).map_err(at)?;
    if let Some(code) = &kernel.code {
        return launch_code(artifact, code, ins, outs, scratch).map_err(at);
    }
    let Some(found) = kernels::find(op) else {
        let name = kernel.attrs.iter().find_map(|(key, attr)| match attr {
            Attr::Str(name) if key == "name" => Some(&**name),
            _ => None,
        });
        let called = name.map_or_else(|| op.to_string(), |name| format!("{op} {name}"));
        return Err(Error::Unsupported(format!(
            "{called} (line {line}): there is no kernel for it"
        )));
    };
    // A file may have any shapes and attributes: a check that panics on them must not end the
    // process.
    let signature = Signature {
        attrs: &kernel.attrs,
        ins,
        outs,
        scratch: scratch.map_or(0, |range| range.bytes),
    };
    let checked = catch_unwind(AssertUnwindSafe(|| found.check(&signature)));
    match checked {
        Ok(checked) => checked.map_err(|e| at(e.to_string()))?,
        Err(_) => return Err(at("its check panicked".into())),
    }

    work::check(kernel, ins, outs).map_err(at)?;

    disjoint(ins, outs, scratch, |pair| found.inplace.contains(&pair)).map_err(at)
}

/// Whether a generated kernel may be launched on these places, which lie in their pools.
fn launch_code(
    artifact: &Artifact,
    code: &Code,
    ins: &[Operand],
    outs: &[Operand],
    scratch: Option<Range>,
) -> Result<(), String> {
    let same = |operands: &[Operand], types: &[Type]| {
        let same = |(x, ty): (&Operand, &Type)| x.dtype == ty.dtype && x.shape == ty.shape;
        operands.len() == types.len() && operands.iter().zip(types).all(same)
    };
    if !same(ins, &code.ins) || !same(outs, &code.outs) {
        return Err("its kernel was made for other types".into());
    }
    let has = scratch.map_or(0, |range| range.bytes);
    if has < code.scratch {
        return Err(format!(
            "its kernel needs {} bytes of scratch, has {has}",
            code.scratch
        ));
    }
    let Some(object) = artifact.objects.get(code.object as usize) else {
        let n_objects = artifact.objects.len();
        return Err(format!("object {} of {n_objects}", code.object));
    };
    for phase in &code.phases {
        match object.target {
            Target::Cpu(_) if phase.threads == 1 && phase.shared_bytes == 0 => {}
            Target::Cpu(_) => {
                return Err(format!(
                    "{} has {} threads in a part and {} shared bytes, which {} has not",
                    phase.symbol, phase.threads, phase.shared_bytes, object.target
                ));
            }
            Target::Gpu(sm) => gpu::phase(sm, phase)?,
        }
    }
    disjoint(ins, outs, scratch, |(i, j)| {
        code.inplace.contains(&(i as u32, j as u32))
    })
}

/// Whether operands, results and scratch lie in their pools.
fn places(
    artifact: &Artifact,
    ins: &[Operand],
    outs: &[Operand],
    scratch: Option<Range>,
) -> Result<(), String> {
    if MAX_RESULTS < outs.len() {
        return Err(format!("{} results; {MAX_RESULTS} at most", outs.len()));
    }
    for operand in ins.iter().chain(outs) {
        tensor(artifact, operand)?;
    }
    if let Some(Range { place, bytes }) = scratch {
        self::place(artifact, place, bytes)?;
    }
    let operands = ins.iter().chain(outs).map(|operand| operand.place);
    let mut all = operands.chain(scratch.map(|range| range.place));
    match all.any(|place| is_on_disk(artifact, place)) {
        true => Err("a tensor of it lies on a disk".into()),
        false => Ok(()),
    }
}

/// Whether a valid place is on a disk.
fn is_on_disk(artifact: &Artifact, place: Place) -> bool {
    artifact.pools[place.pool as usize].space == MemorySpace::Disk
}

/// Whether results and scratch share no bytes with each other, and with operands only where the
/// kernel allows it.
fn disjoint(
    ins: &[Operand],
    outs: &[Operand],
    scratch: Option<Range>,
    inplace: impl Fn((usize, usize)) -> bool,
) -> Result<(), String> {
    let scratch = scratch.and_then(|Range { place, bytes }| Access::new(place, bytes, true));
    let mut written: Vec<Access> = scratch.into_iter().collect();
    for (j, y) in outs.iter().enumerate() {
        let Some(write) = Access::of(y, true) else {
            continue;
        };
        if written.iter().any(|other| other.overlaps(&write)) {
            return Err(format!("result {j} overlaps another result or the scratch"));
        }
        written.push(write);
        for (i, x) in ins.iter().enumerate() {
            let overlaps = Access::of(x, false).is_some_and(|read| read.overlaps(&write));
            if overlaps && !(x == y && inplace((i, j))) {
                return Err(format!(
                    "result {j} overlaps operand {i}, and they are no in-place pair"
                ));
            }
        }
    }
    let reads = ins.iter().filter_map(|x| Access::of(x, false));
    match scratch {
        Some(scratch) if reads.into_iter().any(|read| read.overlaps(&scratch)) => {
            Err("the scratch overlaps an operand".into())
        }
        _ => Ok(()),
    }
}

/// Each event has one record, and waits for this step's record come after it.
fn events(artifact: &Artifact) -> Result<(), Error> {
    let mut recorded = vec![false; artifact.events as usize];
    for command in &artifact.commands {
        let line = || &artifact.lines[command.line as usize].name;
        match command.kind {
            CommandKind::Record { event } if recorded[event as usize] => {
                return invalid(format!("line {}: event {event} is recorded twice", line()));
            }
            CommandKind::Record { event } => recorded[event as usize] = true,
            CommandKind::Wait {
                event,
                previous: false,
            } if !recorded[event as usize] => {
                return invalid(format!(
                    "line {}: waits for event {event} before it is recorded",
                    line()
                ));
            }
            _ => {}
        }
    }
    match recorded.iter().position(|recorded| !recorded) {
        Some(event) => invalid(format!("event {event} is never recorded")),
        None => Ok(()),
    }
}

/// A tensor's size in bytes, if it lies in its pool.
fn tensor(artifact: &Artifact, operand: &Operand) -> Result<u64, String> {
    // Kernels multiply dimensions in other orders too, and a zero must not hide that the product of
    // the others overflows.
    let ones = operand
        .shape
        .iter()
        .try_fold(operand.dtype.bytes(), |bytes, &d| {
            bytes.checked_mul(d.max(1))
        });
    if ones.is_none_or(|ones| isize::MAX as u64 <= ones) {
        return Err(format!(
            "a shape of {:?} is beyond any memory",
            operand.shape
        ));
    }
    let bytes = operand
        .bytes()
        .ok_or_else(|| format!("a shape of {:?} is beyond any memory", operand.shape))?;
    place(artifact, operand.place, bytes)?;
    Ok(bytes)
}

/// Whether `bytes` bytes at a place lie in its pool.
fn place(artifact: &Artifact, place: Place, bytes: u64) -> Result<(), String> {
    let Place { pool, offset } = place;
    let Some(pool) = artifact.pools.get(pool as usize) else {
        return Err(format!("pool {pool} of {}", artifact.pools.len()));
    };
    if !offset.is_multiple_of(ALIGN) {
        return Err(format!(
            "offset {offset} in pool {} is not a multiple of {ALIGN}",
            pool.name
        ));
    }
    match offset.checked_add(bytes) {
        Some(end) if end <= pool.bytes => Ok(()),
        _ => Err(format!(
            "{bytes} bytes at {offset} leave pool {}, which has {}",
            pool.name, pool.bytes
        )),
    }
}

fn invalid<T>(why: String) -> Result<T, Error> {
    Err(Error::Invalid(why))
}
