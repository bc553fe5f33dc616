//! When each command ran. Each stream records its commands in its own buffer, allocated at load. A
//! full buffer overwrites its oldest entries. Written in Chrome's trace format, which Perfetto
//! (<https://ui.perfetto.dev>) opens: one process for each machine, one row for each stream.

use crate::machine::backend::Ran;
use crate::machine::program::{Action, Program};
use crate::sync::unpoisoned;
use artifact::Line;
use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

/// A stream's buffer holds this many steps, if that is no more than `MAX_SPANS`.
const STEPS: usize = 64;
/// 24 bytes each.
const MAX_SPANS: usize = 1 << 20;

/// One command of one step.
#[derive(Clone, PartialEq, Debug)]
pub struct Span<'a> {
    /// The schedule's line.
    pub line: &'a str,
    /// The line's purpose: `run`, `rerun`, `swapin`, …; `wait` for a wait.
    pub why: &'a str,
    /// The stream.
    pub stream: &'a str,
    /// The command's position in the artifact's list.
    pub command: u32,
    /// The step, counted from 1.
    pub step: u64,
    /// Its start, counted from the machine's start, microseconds.
    pub start_us: f64,
    /// Its duration, microseconds.
    pub duration_us: f64,
    /// The bytes that it reads and writes.
    pub bytes: u64,
}

/// A span as it is recorded.
struct Noted {
    /// A position in the stream's program.
    at: u32,
    step: u64,
    start: Instant,
    end: Instant,
}

/// A stream's buffer. When it is full, it is a ring.
pub(crate) struct Ring {
    noted: Vec<Noted>,
    next: usize,
}

impl Ring {
    /// Notes that the instruction at a position ran.
    pub(crate) fn note(&mut self, at: usize, step: u64, Ran { start, end }: Ran) {
        let noted = Noted {
            at: at as u32,
            step,
            start,
            end,
        };
        if self.noted.len() < self.noted.capacity() {
            self.noted.push(noted);
        } else if let Some(oldest) = self.noted.get_mut(self.next) {
            *oldest = noted;
            self.next = (self.next + 1) % self.noted.len();
        }
    }
}

/// All streams' buffers.
pub(crate) struct Trace {
    began: Instant,
    rings: Box<[Mutex<Ring>]>,
}

impl Trace {
    pub(crate) fn new(programs: &[Program]) -> Trace {
        let ring = |program: &Program| {
            let capacity = program.len().saturating_mul(STEPS).min(MAX_SPANS);
            Mutex::new(Ring {
                noted: Vec::with_capacity(capacity),
                next: 0,
            })
        };
        Trace {
            began: Instant::now(),
            rings: programs.iter().map(ring).collect(),
        }
    }

    /// A stream's buffer. Only the stream's thread holds it while a step runs.
    pub(crate) fn ring(&self, stream: usize) -> MutexGuard<'_, Ring> {
        unpoisoned(&self.rings[stream])
    }

    /// When the machine started.
    pub(crate) fn began(&self) -> Instant {
        self.began
    }

    /// All spans, stream by stream, in the order of time. Their starts are counted from `began`.
    pub(crate) fn spans<'a>(
        &self,
        programs: &[Program],
        lines: &'a [Line],
        streams: &'a [String],
        began: Instant,
    ) -> Vec<Span<'a>> {
        let mut spans = Vec::new();
        for (s, (program, ring)) in programs.iter().zip(&self.rings).enumerate() {
            let ring = unpoisoned(ring);
            let (newer, older) = ring.noted.split_at(ring.next);
            // What a device ran is noted later than what the host did.
            let mut noted: Vec<&Noted> = older.iter().chain(newer).collect();
            noted.sort_by_key(|noted| noted.start);
            for noted in noted {
                let instruction = &program[noted.at as usize];
                let line = &lines[instruction.line as usize];
                let micros = |from: Instant, to: Instant| {
                    to.saturating_duration_since(from).as_secs_f64() * 1e6
                };
                spans.push(Span {
                    line: &line.name,
                    why: if matches!(instruction.action, Action::Wait { .. }) {
                        "wait"
                    } else {
                        &line.why
                    },
                    stream: &streams[s],
                    command: instruction.command.0 as u32,
                    step: noted.step,
                    start_us: micros(began, noted.start),
                    duration_us: micros(noted.start, noted.end),
                    bytes: instruction.bytes,
                });
            }
        }
        spans
    }
}

/// A machine in a trace.
pub(crate) struct Process<'a> {
    pub(crate) name: String,
    pub(crate) streams: &'a [String],
    pub(crate) spans: Vec<Span<'a>>,
}

/// Writes a Chrome trace.
pub(crate) fn write(processes: &[Process<'_>], out: &mut impl Write) -> io::Result<()> {
    write!(out, "{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    let mut separator = "\n";
    for (pid, process) in processes.iter().enumerate() {
        let named = |kind: &str, name: &str| {
            let name = quoted(name);
            format!("\"name\":\"{kind}_name\",\"args\":{{\"name\":{name}}}}}")
        };
        let name = named("process", &process.name);
        write!(out, "{separator}{{\"ph\":\"M\",\"pid\":{pid},{name}")?;
        separator = ",\n";
        for (tid, stream) in process.streams.iter().enumerate() {
            let name = named("thread", stream);
            write!(
                out,
                "{separator}{{\"ph\":\"M\",\"pid\":{pid},\"tid\":{tid},{name}"
            )?;
        }
        for span in &process.spans {
            let mut streams = process.streams.iter();
            let tid = streams.position(|s| s == span.stream).unwrap_or(0);
            let (name, cat) = (quoted(span.line), quoted(span.why));
            write!(
                out,
                "{separator}{{\"ph\":\"X\",\"pid\":{pid},\"tid\":{tid},\"name\":{name},\
                 \"cat\":{cat},\"ts\":{:.3},\"dur\":{:.3},\
                 \"args\":{{\"bytes\":{},\"step\":{},\"command\":{}}}}}",
                span.start_us, span.duration_us, span.bytes, span.step, span.command
            )?;
        }
    }
    writeln!(out, "\n]}}")
}

/// A JSON string.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c < ' ' => quoted.push_str(&format!("\\u{:04x}", c as u32)),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}
