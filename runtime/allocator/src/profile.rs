//! Records a trace: every block from the device itself, every request a line.
//!
//! Blocks come one by one from the device, so a run fits if its total fits: no memory is lost to
//! fragmentation (STAlloc, section 8).

use crate::pool::{Pool, PoolError};
use std::collections::HashMap;
use std::io::{self, Write};

/// One line of the trace.
enum Line<'a> {
    Head,
    Alloc {
        id: u64,
        bytes: u64,
        stream: usize,
        dynamic: bool,
    },
    Free {
        id: u64,
    },
    Phase(&'a str),
    Enter(&'a str),
    Leave(&'a str),
}

/// Writes the event format. A block has the number of its request.
fn write(out: &mut dyn Write, line: &Line<'_>) -> io::Result<()> {
    match line {
        Line::Head => writeln!(out, "lighterage-trace 1"),
        Line::Alloc {
            id,
            bytes,
            stream,
            dynamic: false,
        } => writeln!(out, "alloc {id} {bytes} stream={stream}"),
        Line::Alloc {
            id,
            bytes,
            stream,
            dynamic: true,
        } => writeln!(out, "alloc {id} {bytes} stream={stream} dyn"),
        Line::Free { id } => writeln!(out, "free {id}"),
        Line::Phase(name) => writeln!(out, "phase {name}"),
        Line::Enter(name) => writeln!(out, "enter {name}"),
        Line::Leave(name) => writeln!(out, "leave {name}"),
    }
}

/// Serves requests from the device and records them.
pub struct Recorder {
    pool: Box<dyn Pool>,
    out: Box<dyn Write + Send>,
    /// Numbers of the blocks in use, by address.
    blocks: HashMap<u64, u64>,
    streams: Vec<u64>,
    requests: u64,
    /// Modules that run, the innermost last, and whether their sizes depend on data.
    modules: Vec<(String, bool)>,
    /// The first line that could not be written.
    error: Option<io::Error>,
}

impl Recorder {
    /// Writes to `out`, which should be buffered.
    pub fn new(pool: Box<dyn Pool>, out: Box<dyn Write + Send>) -> Recorder {
        let (blocks, streams, modules) = (HashMap::new(), vec![0], vec![]);
        let mut recorder = Recorder {
            pool,
            out,
            blocks,
            streams,
            requests: 0,
            modules,
            error: None,
        };
        recorder.line(&Line::Head);
        recorder
    }

    /// Memory from the device; 0 if `bytes` is 0.
    ///
    /// # Errors
    /// The device's error.
    pub fn malloc(&mut self, bytes: u64, stream: u64) -> Result<u64, PoolError> {
        if bytes == 0 {
            return Ok(0);
        }
        let address = self.pool.allocate(bytes)?;
        let stream = self
            .streams
            .iter()
            .position(|known| *known == stream)
            .unwrap_or_else(|| {
                self.streams.push(stream);
                self.streams.len() - 1
            });
        let (id, dynamic) = (
            self.requests,
            self.modules.iter().any(|(_, dynamic)| *dynamic),
        );
        self.requests += 1;
        self.blocks.insert(address, id);
        self.line(&Line::Alloc {
            id,
            bytes,
            stream,
            dynamic,
        });
        Ok(address)
    }

    /// Gives the block back to the device. False if there is no such block.
    pub fn free(&mut self, address: u64) -> bool {
        let Some(id) = self.blocks.remove(&address) else {
            return address == 0;
        };
        self.line(&Line::Free { id });
        self.pool.free(address);
        true
    }

    /// A computation phase begins: `fwd.0`.
    pub fn phase(&mut self, name: &str) {
        self.line(&Line::Phase(&one_word(name)));
    }

    /// A module begins within the current modules. `dynamic` if the sizes of its requests depend on
    /// data.
    pub fn enter(&mut self, name: &str, dynamic: bool) {
        let name = one_word(name);
        self.line(&Line::Enter(&name));
        self.modules.push((name, dynamic));
    }

    /// The innermost module with this name ends. False if there is none.
    pub fn leave(&mut self, name: &str) -> bool {
        let name = one_word(name);
        let Some(at) = self.modules.iter().rposition(|(known, _)| *known == name) else {
            return false;
        };
        self.modules.remove(at);
        self.line(&Line::Leave(&name));
        true
    }

    /// Writes the buffer.
    ///
    /// # Errors
    /// The first failure since the trace began: then lines are missing.
    pub fn flush(&mut self) -> io::Result<()> {
        match self.error.take() {
            Some(error) => Err(error),
            None => self.out.flush(),
        }
    }

    /// Writes the buffer. A failure is kept for [`Recorder::flush`].
    pub(crate) fn write_out(&mut self) {
        if self.error.is_none() {
            self.error = self.out.flush().err();
        }
    }

    /// Writes nothing from now on: the file belongs to the parent of this forked process.
    pub(crate) fn stop_writing(&mut self) {
        let out = std::mem::replace(&mut self.out, Box::new(io::sink()));
        // A drop would write the buffer.
        std::mem::forget(out);
    }

    fn line(&mut self, line: &Line<'_>) {
        if self.error.is_none() {
            self.error = write(&mut self.out, line).err();
        }
    }
}

fn one_word(name: &str) -> String {
    let name = name.replace(
        |c: char| c.is_whitespace() || c.is_control() || c == ',',
        "_",
    );
    // `-` alone is no phase.
    if name.is_empty() || name == "-" {
        "_".to_string()
    } else {
        name
    }
}
