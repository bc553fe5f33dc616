//! Traces of memory: the blocks that a program requested, and when it freed them. One reader for
//! each format, and a writer of our own format and of plans.
//!
//! Files may come from anywhere: a reader gives blocks or an error that says where the file is
//! wrong. It does not panic, runs nothing, and takes memory in proportion to the file's size. The
//! result fulfils: a block ends after it starts; its gaps are within its life, ascending and
//! separate; alignments are powers of two; ids of a pool differ; sizes and alignments of a pool add
//! up to less than 2^62 bytes; a block in the bytes of another one fits there.
//!
//! [`events`] has our own format, [`table`] minimalloc's and that of plans, [`snapshot`] PyTorch's;
//! docs/alloc.md describes them all.

pub mod events;
pub mod pickle;
mod recorder;
pub mod snapshot;
mod stalloc;
pub mod table;

/// Why a file could not be read.
pub use lower::FileError as Error;

use addresses::caching::History;
use placement::trace::Trace;
use std::collections::BTreeMap;
use std::path::Path;

/// Memory with its own addresses: a device of a snapshot, or all memory of other formats.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// Its blocks.
    pub trace: Trace,
    /// Bytes that the recorded allocator reserved at the end, if the file says so.
    pub reserved_bytes: Option<u64>,
    /// The history of this allocator, if the file has it.
    pub history: Option<History>,
}

placement::named! {
    /// The format of a trace.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Format {
        /// Our own format: lines of events.
        Events = "events",
        /// A table with a header, like minimalloc's.
        Csv = "csv",
        /// Lines of start, end and size.
        Lines = "lines",
        /// A memory snapshot of PyTorch.
        Snapshot = "snapshot",
        /// The log of STAlloc's profiler.
        Stalloc = "stalloc",
    }
}

/// The name of the pool in a file without pool names.
pub const POOL: &str = "memory";

/// Reads a file. Without `format`, the content decides.
pub fn read(path: &Path, format: Option<Format>) -> Result<Vec<Pool>, Error> {
    let name = path.display().to_string();
    let failed = |e: std::io::Error| Error::new("", e.to_string()).of(&name);
    // Reading a named pipe could wait forever. The file of the shell's `<(..)` is open already.
    let is_open_already = path.starts_with("/dev/fd")
        || path.starts_with("/proc/self/fd")
        || path == Path::new("/dev/stdin");
    if !is_open_already && !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(Error::new("", "not a regular file".to_string()).of(&name));
    }
    let bytes = std::fs::read(path).map_err(failed)?;
    read_bytes(&bytes, format).map_err(|error| error.of(&name))
}

/// Reads a file's content.
pub fn read_bytes(bytes: &[u8], format: Option<Format>) -> Result<Vec<Pool>, Error> {
    let format = match format {
        Some(format) => format,
        None => sniff(bytes)?,
    };
    let pools = match format {
        Format::Snapshot => snapshot::read(bytes)?,
        Format::Events => events::read(text(bytes)?)?,
        Format::Csv => table::read(text(bytes)?)?,
        Format::Lines => table::read_lines(text(bytes)?)?,
        Format::Stalloc => stalloc::read(text(bytes)?)?,
    };
    if pools.iter().all(|pool| pool.trace.blocks.is_empty()) {
        return Err(Error::new("", "there is no block in it"));
    }
    Ok(pools)
}

fn text(bytes: &[u8]) -> Result<&str, Error> {
    let text = std::str::from_utf8(bytes).map_err(|e| {
        let line = 1 + bytes[..e.valid_up_to()]
            .iter()
            .filter(|&&byte| byte == b'\n')
            .count();
        Error::line(line, "not text (UTF-8)")
    })?;
    // Some editors put a byte order mark at the beginning.
    Ok(text.strip_prefix('\u{feff}').unwrap_or(text))
}

/// Finds the format of the content.
fn sniff(bytes: &[u8]) -> Result<Format, Error> {
    let help = format!(
        "a trace is one of {}; --format says which",
        Format::ALL.map(Format::name).join(", ")
    );
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err(Error::new("", "the file is empty").help(help));
    }
    if bytes.starts_with(&[0x80]) {
        return Ok(Format::Snapshot);
    }
    if bytes.starts_with(b"PK") || bytes.starts_with(&[0x1f, 0x8b]) {
        return Err(Error::new("", "a compressed file").help("unpack it first"));
    }
    let text = text(bytes).map_err(|error| error.help(help.clone()))?;
    let first = text
        .lines()
        .map(str::trim)
        .find(|line| !line.is_empty() && !line.starts_with('#'))
        .unwrap_or("");
    let words: Vec<&str> = first.split_ascii_whitespace().collect();
    let is_number = |word: &&str| word.parse::<i128>().is_ok();
    match words.as_slice() {
        [word, ..] if *word == events::MAGIC => Ok(Format::Events),
        ["Iteration", "Index", ..] | ["micro-batch", ..] => Ok(Format::Stalloc),
        ["0" | "1", address, _, _] if address.starts_with("0x") => Ok(Format::Stalloc),
        [_, "Layer", ":", ..] => Ok(Format::Stalloc),
        [_, _, _] if words.iter().all(is_number) => Ok(Format::Lines),
        _ if table::is_header(first) => Ok(Format::Csv),
        _ => {
            let start: String = first.chars().take(40).collect();
            Err(Error::new("", format!("no known format: it begins with {start:?}")).help(help))
        }
    }
}

/// Checks that blocks that should lie in the bytes of others can do so.
fn shared(pool: &Pool) -> Result<(), Error> {
    placement::roots(&pool.trace.blocks)
        .map(|_| ())
        .map_err(|e| Error::new(format!("pool {}", pool.name), e.message))
}

/// Sizes and alignments of a pool add up to less than this.
const MOST_BYTES: u64 = 1 << 62;

/// Checks each block when it is read, so that users of the trace need no checks.
#[derive(Default)]
struct Gate {
    /// Blocks in order.
    ids: BTreeMap<String, usize>,
    bytes: u64,
}

impl Gate {
    /// Checks that the pool's total size can still be planned with this block.
    fn size(&mut self, bytes: u64, alignment: u64) -> Result<(), String> {
        if alignment > 1 && !alignment.is_power_of_two() {
            return Err(format!("the alignment {alignment} is not a power of two"));
        }
        let sum = self
            .bytes
            .checked_add(bytes)
            .and_then(|sum| sum.checked_add(alignment));
        match sum.filter(|&sum| sum < MOST_BYTES) {
            Some(sum) => {
                self.bytes = sum;
                Ok(())
            }
            None => Err(format!(
                "with its {bytes} bytes the sizes add up to 2^62 bytes or more"
            )),
        }
    }

    /// Checks that no other block has this id.
    fn id(&mut self, id: &str) -> Result<(), String> {
        match self.ids.insert(id.to_string(), self.ids.len()) {
            None => Ok(()),
            Some(_) => Err(format!("there are two blocks with the id {id}")),
        }
    }

    /// The position of the block with this id.
    fn find(&self, id: &str) -> Result<usize, String> {
        self.ids
            .get(id)
            .copied()
            .ok_or_else(|| format!("there is no block {id} whose bytes it could share"))
    }

    /// Checks that a fixed address leaves room for the block.
    fn offset(&self, offset: u64, bytes: u64) -> Result<(), String> {
        match offset.checked_add(bytes).filter(|&end| end < MOST_BYTES) {
            Some(_) => Ok(()),
            None => Err(format!("the offset {offset} is too large")),
        }
    }
}

/// A trace without blocks, phases and modules.
fn empty() -> Trace {
    let unknown = || vec![placement::trace::Span::default()];
    Trace {
        phases: unknown(),
        modules: unknown(),
        ..Trace::default()
    }
}
