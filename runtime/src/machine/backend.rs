//! The seam between a machine and the hardware that it runs on: [`Backend`].

use super::Options;
use super::lent::Holder;
use crate::Error;
use crate::foreign::Foreign;
use crate::kernel::Tensor;
use crate::kernels::KernelError;
use crate::memory::Borrowed;
use artifact::{Kernel, Object, Operand, Place, Pool, Range};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A stream, by its number in the artifact.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StreamId(pub usize);

/// An event, by its number in the artifact.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct EventId(pub usize);

/// A command, by its position in the artifact's list. Records and waits have a position too, so
/// the launches and copies that are prepared have numbers with gaps.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CommandId(pub usize);

/// A launch to be prepared.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    /// The kernel's number in the artifact.
    pub kernel: usize,
    /// Operands.
    pub ins: &'a [Operand],
    /// Results. One may lie exactly on an operand where the kernel allows it.
    pub outs: &'a [Operand],
    /// Bytes that the kernel may use while it runs.
    pub scratch: Option<Range>,
}

impl Launch<'_> {
    /// The bytes of its operands, then those of its results.
    pub(crate) fn operands(&self) -> impl Iterator<Item = Range> {
        let all = self.ins.iter().chain(self.outs);
        all.map(|operand| Range {
            place: operand.place,
            bytes: operand.bytes().unwrap_or(0),
        })
    }
}

/// A copy to be prepared. The places' pools say which way it goes.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    /// From.
    pub src: Place,
    /// To.
    pub dst: Place,
    /// Number of bytes.
    pub bytes: u64,
}

impl Copy {
    /// The bytes of its source, then those of its destination.
    pub(crate) fn operands(&self) -> [Range; 2] {
        let bytes = self.bytes;
        [self.src, self.dst].map(|place| Range { place, bytes })
    }
}

/// A tensor in a pool that is the caller's memory.
#[derive(Clone, Copy, Debug)]
pub struct LentPlace {
    /// Where the plan has it.
    pub place: Place,
    /// Its size.
    pub bytes: u64,
    /// Its memory, if that is known when the step is loaded.
    pub memory: Option<Borrowed>,
}

/// When a command ran, by the host's clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ran {
    /// When it began.
    pub start: Instant,
    /// When it was done.
    pub end: Instant,
}

/// Why a command failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{why}")]
pub struct CommandError {
    /// For the user: an index that is out of range, a device's error.
    pub why: String,
    /// The command, if it is another than the one whose call returns the error.
    pub command: Option<CommandId>,
    /// The device's driver refused: the operands' data are no reason.
    pub of_device: bool,
}

impl CommandError {
    /// The same error, of a command unless it says of which.
    pub(crate) fn at(self, command: CommandId) -> CommandError {
        let command = self.command.or(Some(command));
        CommandError { command, ..self }
    }
}

impl From<String> for CommandError {
    fn from(why: String) -> CommandError {
        CommandError {
            why,
            command: None,
            of_device: false,
        }
    }
}

impl From<KernelError> for CommandError {
    fn from(error: KernelError) -> CommandError {
        CommandError::from(error.to_string())
    }
}

/// Hardware that runs commands.
///
/// A [`Machine`](crate::Machine) knows the artifact: which commands each stream runs, in which
/// order, which events they wait for, which bytes the host may touch when. It knows no address, no
/// kernel and no driver. A [`Backend`] knows those, and nothing of the order.
///
/// # What a backend can rely on
///
/// The artifact is validated before anything is loaded, so every index and every place is right,
/// and accesses that conflict are ordered by streams and events.
///
/// Loading happens once, on one thread, in this order: streams, events, objects, kernels, pools,
/// commands, [`Backend::start`]. A backend resolves all that it can there, so that a step looks up
/// nothing and allocates nothing. Pools, streams, objects and so on are numbered from 0 in the
/// order in which they are loaded.
///
/// Then each stream's commands arrive in their order: [`launch`](Backend::launch),
/// [`copy`](Backend::copy), [`record`](Backend::record), [`wait`](Backend::wait). These calls come
/// one after the other for one stream, from one thread; those for different streams may come at the
/// same time. The machine calls `wait` for an event only after the `record` that it waits for has
/// returned; the first step has no waits for the step before it. So a backend that does each
/// command before it returns (as the CPU does) has nothing to do in `record`, `wait` and the
/// functions that synchronise: their defaults do nothing. A backend that only submits commands to a
/// device's queues does the device's part of each there. It keeps the stream of each command from
/// its preparation: `launch` and `copy` do not name it.
///
/// The functions that synchronise may come from another thread than the stream's commands: in
/// [`Machine::wait_io`](crate::Machine::wait_io) the host waits while streams still submit.
///
/// After the first error in a step the machine submits no more commands. It calls
/// [`halt`](Backend::halt), and may still synchronise. It reports the error's text, with the line
/// whose command failed. An error while loading ends the loading, without `halt`.
///
/// The host's functions ([`read`](Backend::read), [`write`](Backend::write),
/// [`fill`](Backend::fill)) touch bytes only while no command does: the machine synchronises first.
pub trait Backend: Send + Sync {
    // --- loading ---

    /// Allocates a pool: one block of exactly its bytes. What is in them has no meaning: the proof
    /// is that nothing reads a byte that was not written.
    fn allocate(&mut self, pool: &Pool) -> Result<(), Error>;

    /// The next pool is the caller's memory: `lent` has the tensors in it.
    fn borrow(&mut self, _pool: &Pool, _lent: &[LentPlace]) -> Result<(), Error> {
        Err(Error::Unsupported(
            "this device runs no step on memory of its caller".into(),
        ))
    }

    /// A backend for another step that runs in turn with this one; `foreign` computes what has no
    /// kernel. The pools that it is told to allocate are those of this backend, by number, and no
    /// larger.
    fn sharing(
        &self,
        _options: &Options,
        _foreign: Option<Arc<dyn Foreign>>,
    ) -> Result<Box<dyn Backend>, Error> {
        Err(Error::Unsupported(
            "on this device no two steps share their memory".into(),
        ))
    }

    /// Gives a tensor in a lent pool its memory from now on, while nothing runs.
    fn point(&self, _place: Place, _to: Borrowed) -> Result<(), Error> {
        Err(Error::Unsupported(
            "this device runs no step on memory of its caller".into(),
        ))
    }

    /// Makes a queue for a stream's commands. `name` is for messages.
    fn create_stream(&mut self, _stream: StreamId, _name: &str) -> Result<(), Error> {
        Ok(())
    }

    /// Makes an event, which `stream` records.
    fn create_event(&mut self, _event: EventId, _stream: StreamId) -> Result<(), Error> {
        Ok(())
    }

    /// Loads machine code. Refuses a target that this hardware is not.
    fn load_object(&mut self, object: &Object) -> Result<(), Error>;

    /// Finds a kernel's functions, in an object or among the backend's own.
    fn load_kernel(&mut self, kernel: &Kernel) -> Result<(), Error>;

    /// Resolves a launch.
    fn prepare_launch(
        &mut self,
        command: CommandId,
        stream: StreamId,
        launch: Launch<'_>,
    ) -> Result<(), Error>;

    /// Resolves a copy.
    fn prepare_copy(
        &mut self,
        command: CommandId,
        stream: StreamId,
        copy: Copy,
    ) -> Result<(), Error>;

    /// Resolves a stream's wait for an event.
    fn prepare_wait(
        &mut self,
        _command: CommandId,
        _stream: StreamId,
        _event: EventId,
    ) -> Result<(), Error> {
        Ok(())
    }

    /// Resolves the record of an event.
    fn prepare_record(
        &mut self,
        _command: CommandId,
        _stream: StreamId,
        _event: EventId,
    ) -> Result<(), Error> {
        Ok(())
    }

    /// Everything is loaded: starts what the first step needs.
    fn start(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// What a person should know of how it runs what it was given.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    // --- the host's turn ---

    /// Writes bytes of a pool from the host, and returns when they are there. The place need not be
    /// aligned.
    fn write(&self, to: Place, bytes: &[u8]) -> Result<(), Error>;

    /// Reads bytes of a pool to the host.
    fn read(&self, from: Place, bytes: &mut [u8]) -> Result<(), Error>;

    /// Sets each byte of a range.
    fn fill(&self, range: Range, byte: u8) -> Result<(), Error>;

    /// The tensor of an operand, if its memory has addresses, and whose memory that is.
    fn tensor(&self, _operand: &Operand) -> Option<(Tensor, Holder)> {
        None
    }

    // --- a step ---

    /// Whether a thread may run the commands of all streams in turn without loss: each is done when
    /// its call returns, and none waits for anything but the processor. Then nobody calls
    /// [`record`](Backend::record) and [`wait`](Backend::wait).
    fn is_inline(&self) -> bool {
        false
    }

    /// The calling thread is going to submit this stream's commands.
    fn enter(&self, _stream: StreamId) {}

    /// Runs a prepared launch, or submits it to its stream.
    fn launch(&self, command: CommandId) -> Result<(), CommandError>;

    /// Runs a prepared copy, or submits it to its stream.
    fn copy(&self, command: CommandId) -> Result<(), CommandError>;

    /// Whether a launch submits nothing but itself, so that a part of a step can run.
    fn submits_alone(&self) -> bool {
        true
    }

    /// Marks an event as reached by this step.
    fn record(&self, _stream: StreamId, _event: EventId, _step: u64) -> Result<(), CommandError> {
        Ok(())
    }

    /// Makes the stream wait until the given step has reached an event.
    fn wait(&self, _stream: StreamId, _event: EventId, _step: u64) -> Result<(), CommandError> {
        Ok(())
    }

    /// In a traced run: whether the device notes when it runs a command. Such a command is between
    /// calls of [`begin`](Backend::begin) and [`end`](Backend::end). The others run while their
    /// calls do, and the machine takes the time.
    fn is_queued(&self, _command: CommandId) -> bool {
        false
    }

    /// The device notes when it begins a command of a step.
    fn begin(
        &self,
        _stream: StreamId,
        _command: CommandId,
        _step: u64,
    ) -> Result<(), CommandError> {
        Ok(())
    }

    /// The device notes when a command of a step is done.
    fn end(&self, _stream: StreamId, _command: CommandId, _step: u64) -> Result<(), CommandError> {
        Ok(())
    }

    /// When the device ran a queued command of a step, unless it has told already. Returns after it
    /// ran. It is asked before the command begins in the second step after that one.
    fn ran(&self, _command: CommandId, _step: u64) -> Result<Option<Ran>, CommandError> {
        Ok(None)
    }

    /// The stream's commands so far are all of this step that touch inputs or outputs.
    fn mark_io(&self, _stream: StreamId, _step: u64) -> Result<(), CommandError> {
        Ok(())
    }

    /// Returns when the commands before [`Backend::mark_io`] of that step are done; at once for a
    /// stream without such a mark.
    fn synchronize_io(&self, _stream: StreamId, _step: u64) -> Result<(), CommandError> {
        Ok(())
    }

    /// Returns when all commands of the stream so far are done.
    fn synchronize(&self, _stream: StreamId) -> Result<(), CommandError> {
        Ok(())
    }

    /// For how long nothing may move before a device counts as stuck: see [`Backend::progress`].
    /// `None` if every command is done when its call returns.
    fn patience(&self) -> Option<Duration> {
        None
    }

    /// What the device has done, as a number that is another one once it has done more. `None` if
    /// it has nothing to do. Called from a thread of its own while steps run.
    fn progress(&self) -> Option<u64> {
        None
    }

    /// Why the device counts as stuck, with the command that it does not finish, if that is known.
    fn diagnose(&self) -> CommandError {
        CommandError::from("the device is stuck".to_string())
    }

    /// The device is stuck: calls that wait for it return from now on, with an error.
    fn give_up(&self) {}

    /// The machine stops: no command will start. What runs may end early. Called by any thread, and
    /// possibly more than once: after an error, and when the machine's threads end. A backend with
    /// queues waits for them before it frees its memory.
    fn halt(&self) {}
}
