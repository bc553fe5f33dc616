//! Our own format: a line for each event, in order of time.
//!
//! ```text
//! lighterage-trace 1
//! # a comment
//! alloc w 4096 align=512 at=0        asks for block w, 4096 bytes, at a multiple of 512, at 0
//! phase fwd.0                        the forward of micro-batch 0 begins; `phase -` ends it
//! enter layers.0.mlp                 a module begins; modules nest
//! alloc 17 65536 stream=7 dyn        for stream 7; its size is known only now
//! free 17
//! leave layers.0.mlp
//! alloc 18 65536 in=17               made in the bytes of block 17, as by an operation in place
//! wait 0 7                           stream 0 waits for all that stream 7 has been asked to do
//! pool cuda:1                        what follows is asked of another pool
//! ```
//!
//! Each `alloc`, `free` and `wait` takes a tick, from 0 on. After a first line `tick N`, only such
//! lines change the tick. A block that is not freed lives to the end of its pool. An id is one word
//! without a comma, and names one block of a pool. `gaps=3-5/8-9` are ticks at which a block is not
//! needed. `phase=2` and `module=5` with an `alloc` or `free` name the second phase of the pool and
//! the fifth run of a module, instead of the current ones; 0 is none.

use crate::recorder::{Asked, Recorder};
use crate::{Error, POOL, Pool, shared, table};
use placement::trace::Trace;
use std::fmt::Write;

/// The first word of a file.
pub const MAGIC: &str = "lighterage-trace";
const VERSION: &str = "1";

/// More pools than this are a mistake.
const MOST_POOLS: usize = 1024;

/// Reads a trace.
pub fn read(text: &str) -> Result<Vec<Pool>, Error> {
    let lines = text
        .lines()
        .enumerate()
        .map(|(i, line)| (i + 1, line.trim()));
    let mut lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let (line, head) = lines.next().unwrap_or((1, ""));
    match head.split_ascii_whitespace().collect::<Vec<_>>()[..] {
        [MAGIC, VERSION] => {}
        [MAGIC, other] => {
            return Err(Error::line(
                line,
                format!("version {other:?}: only {VERSION} is known"),
            ));
        }
        _ => {
            return Err(Error::line(
                line,
                format!("the file does not begin with \"{MAGIC} {VERSION}\""),
            ));
        }
    }
    let mut pools: Vec<(String, Recorder<String>)> = vec![(POOL.into(), Recorder::new(POOL))];
    let mut at = 0;
    for (line, text) in lines {
        let done = match text.strip_prefix("pool ").map(str::trim) {
            Some(name) => word(name, "the pool's name").and_then(|name| {
                let known = pools.iter().position(|(known, _)| known == name);
                at = known.unwrap_or(pools.len());
                match known {
                    None if MOST_POOLS <= pools.len() => {
                        return Err(format!("more than {MOST_POOLS} pools"));
                    }
                    None => pools.push((name.into(), Recorder::new(name))),
                    Some(_) => {}
                }
                Ok(())
            }),
            None => event(text, &mut pools[at].1),
        };
        done.map_err(|message| Error::line(line, message))?;
    }
    let mut read = vec![];
    for (_, recorder) in pools {
        let pool = recorder.finish();
        check(&pool)?;
        if !pool.trace.blocks.is_empty() {
            read.push(pool);
        }
    }
    Ok(read)
}

/// Checks that need the whole pool: blocks within others, gaps, and phases and modules by number.
fn check(pool: &Pool) -> Result<(), Error> {
    shared(pool)?;
    let Trace {
        blocks,
        phases,
        modules,
        ..
    } = &pool.trace;
    for block in blocks {
        let place = format!("block {} of the pool {}", block.id, pool.name);
        let error = |message: String| Error::new(&place, message);
        table::within(block).map_err(error)?;
        let (phase, module) = (block.origin.phases, block.origin.modules);
        for (what, given, known) in [
            ("phase", phase.0.max(phase.1), phases.len()),
            ("module", module.0.max(module.1), modules.len()),
        ] {
            if given as usize >= known {
                let last = known - 1;
                let message = format!("{what} {given} is none of the {last} that the pool has");
                return Err(error(message));
            }
        }
    }
    Ok(())
}

/// One word that is allowed in a table.
fn word<'a>(word: &'a str, what: &str) -> Result<&'a str, String> {
    match word {
        "" => Err(format!("{what} is missing")),
        word if word.contains([',', ' ', '\t']) => Err(format!(
            "{what} is {word:?}: it must be one word without commas"
        )),
        word => Ok(word),
    }
}

fn number<T: std::str::FromStr>(what: &str, text: &str) -> Result<T, String> {
    text.parse().map_err(|_| {
        format!("{what} is {text:?}: it must be a whole number that is not negative, nor too large")
    })
}

fn event(text: &str, recorder: &mut Recorder<String>) -> Result<(), String> {
    let (verb, rest) = text.split_once([' ', '\t']).unwrap_or((text, ""));
    let rest = rest.trim();
    match verb {
        "alloc" => alloc(rest, recorder),
        "free" => {
            let mut words = rest.split_ascii_whitespace();
            let id = word(words.next().unwrap_or(""), "the id")?;
            let Some(block) = recorder.free(&id.to_string())? else {
                return Err(format!("there is no block {id} to free"));
            };
            for given in words {
                match given.split_once('=') {
                    Some(("phase", phase)) => block.origin.phases.1 = number("the phase", phase)?,
                    Some(("module", module)) => {
                        block.origin.modules.1 = number("the module", module)?
                    }
                    _ => {
                        return Err(format!(
                            "{given:?} is not known with free: phase=N, module=N are"
                        ));
                    }
                }
            }
            Ok(())
        }
        "phase" if rest == "-" => {
            recorder.phase(None);
            Ok(())
        }
        "phase" => word(rest, "the phase's name").map(|name| recorder.phase(Some(name.into()))),
        "enter" => word(rest, "the module's name").and_then(|name| recorder.enter(name.into())),
        "leave" => {
            let name = word(rest, "the module's name")?;
            if recorder.leave(name) {
                Ok(())
            } else {
                Err(format!("no module {name} runs"))
            }
        }
        "wait" => {
            let words: Vec<&str> = rest.split_ascii_whitespace().collect();
            let [stream, on] = words[..] else {
                return Err(
                    "wait has two streams: the one that waits, and the one that is waited for"
                        .into(),
                );
            };
            recorder.wait(number("the stream", stream)?, number("the stream", on)?)
        }
        "tick" => recorder.at(number("the tick", rest)?),
        _ => Err(format!(
            "{verb:?} is not known: alloc, free, wait, phase, enter, leave, tick and pool are"
        )),
    }
}

fn alloc(rest: &str, recorder: &mut Recorder<String>) -> Result<(), String> {
    let mut words = rest.split_ascii_whitespace();
    let id = word(words.next().unwrap_or(""), "the id")?;
    let mut asked = Asked {
        bytes: number("the size", words.next().unwrap_or(""))?,
        ..Asked::default()
    };
    let (mut phase, mut module, mut gaps) = (None, None, vec![]);
    for given in words {
        match given.split_once('=') {
            None if given == "dyn" => asked.dynamic = true,
            Some(("stream", stream)) => asked.stream = number("the stream", stream)?,
            Some(("align", alignment)) => asked.alignment = number("the alignment", alignment)?,
            Some(("at", offset)) => asked.offset = Some(number("the address", offset)?),
            Some(("in", other)) => asked.within = Some(recorder.find(other)?),
            Some(("phase", text)) => phase = Some(number("the phase", text)?),
            Some(("module", text)) => module = Some(number("the module", text)?),
            Some(("gaps", text)) => {
                for gap in text.split('/') {
                    let (start, end) = gap
                        .split_once('-')
                        .ok_or_else(|| format!("the gap {gap:?} is not START-END"))?;
                    gaps.push((
                        number("the gap's start", start)?,
                        number("the gap's end", end)?,
                    ));
                }
            }
            _ => {
                let known = "stream=N, align=BYTES, at=BYTES, in=ID, gaps=A-B/C-D, phase=N, \
                    module=N and dyn are";
                return Err(format!("{given:?} is not known with alloc: {known}"));
            }
        }
    }
    let block = recorder.alloc(id.into(), id.into(), asked)?;
    block.gaps = gaps;
    block.origin.phases.0 = phase.unwrap_or(block.origin.phases.0);
    block.origin.modules.0 = module.unwrap_or(block.origin.modules.0);
    Ok(())
}

/// An event at a tick. Events of one tick are written in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Happens {
    Leave(usize),
    PhaseEnds(usize),
    Phase(usize),
    Enter(usize),
    Free(usize),
    Wait(usize),
    /// The last of the block and the blocks that contain it, their number, and the block: the
    /// containing blocks come first.
    Alloc(usize, usize, usize),
}

/// Writes pools. Reading them again gives the same blocks, in order of their start. Blanks and
/// commas in names, which other formats allow, become `_`.
pub fn write(pools: &[Pool]) -> String {
    let mut out = format!("{MAGIC} {VERSION}\n");
    for pool in pools {
        if pool.name != POOL || pools.len() > 1 {
            // Writing to a String cannot fail.
            let _ = writeln!(out, "pool {}", joined(&pool.name));
        }
        write_pool(&mut out, &pool.trace);
    }
    out
}

fn write_pool(out: &mut String, trace: &Trace) {
    let mut happens = happenings(trace);
    let end = trace.blocks.iter().map(|block| block.end).max();
    let stays = |what: &Happens| stays(trace, end.unwrap_or(0), what);
    let ticks = ticks(end.unwrap_or(0), &happens, stays);
    if ticks == Ticks::ByEventButLast {
        happens.retain(|(_, what)| !stays(what));
    }
    let mut writer = Writer {
        out,
        trace,
        phase: 0,
        modules: vec![],
    };
    let mut now = None;
    for (tick, what) in happens {
        if ticks == Ticks::Given && now != Some(tick) {
            writer.line(format_args!("tick {tick}"));
            now = Some(tick);
        }
        writer.happening(what);
    }
}

/// True if a phase ends because the next one begins.
fn next_begins(trace: &Trace, phase: usize) -> bool {
    let next = trace.phases.get(phase + 1);
    next.is_some_and(|next| next.start == trace.phases[phase].end)
}

/// All events, in order of time.
fn happenings(trace: &Trace) -> Vec<(u64, Happens)> {
    let mut happens: Vec<(u64, Happens)> = vec![];
    for (i, span) in trace.phases.iter().enumerate().skip(1) {
        happens.push((span.start, Happens::Phase(i)));
        if span.start < span.end && !next_begins(trace, i) {
            happens.push((span.end, Happens::PhaseEnds(i)));
        }
    }
    for (i, span) in trace.modules.iter().enumerate().skip(1) {
        happens.push((span.start, Happens::Enter(i)));
        if span.start < span.end {
            happens.push((span.end, Happens::Leave(i)));
        }
    }
    for (i, block) in trace.blocks.iter().enumerate() {
        let shared =
            std::iter::successors(Some(i), |&i| trace.blocks[i].within).take(trace.blocks.len());
        let (depth, last) =
            shared.fold((0, i), |(depth, last), other| (depth + 1, other.max(last)));
        happens.push((block.start, Happens::Alloc(last, depth, i)));
        happens.push((block.end, Happens::Free(i)));
    }
    let waits = trace.waits.iter().enumerate();
    happens.extend(waits.map(|(i, wait)| (wait.tick, Happens::Wait(i))));
    happens.sort_unstable();
    happens
}

/// How a file gives the time of its events.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ticks {
    /// Each event has its own tick.
    ByEvent,
    /// The same, if blocks that stay to the end are not freed.
    ByEventButLast,
    /// By lines `tick N`.
    Given,
}

/// True for the end of a block that stays to the end of its pool: it needs no line.
fn stays(trace: &Trace, end: u64, what: &Happens) -> bool {
    let Happens::Free(i) = what else {
        return false;
    };
    let origin = trace.blocks[*i].origin;
    trace.blocks[*i].end == end && origin.phases.1 == 0 && origin.modules.1 == 0
}

fn ticks(end: u64, happens: &[(u64, Happens)], stays: impl Fn(&Happens) -> bool) -> Ticks {
    if are_consecutive(happens, |_| true) {
        return Ticks::ByEvent;
    }
    let goes = |what: &Happens| !stays(what);
    let events = happens
        .iter()
        .filter(|(_, what)| what.takes_a_tick() && goes(what));
    if events.count() as u64 == end && are_consecutive(happens, goes) {
        Ticks::ByEventButLast
    } else {
        Ticks::Given
    }
}

/// True if the kept events have ticks 0, 1, 2 .., and no event follows the last.
fn are_consecutive(happens: &[(u64, Happens)], kept: impl Fn(&Happens) -> bool) -> bool {
    let events = happens
        .iter()
        .filter(|(_, what)| what.takes_a_tick() && kept(what))
        .map(|&(tick, _)| tick);
    let n = events.clone().count() as u64;
    let last = happens.last().map_or(0, |&(tick, _)| tick);
    events.eq(0..n) && last <= n
}

impl Happens {
    /// True for events that take a tick if no ticks are given.
    fn takes_a_tick(&self) -> bool {
        match self {
            Happens::Alloc(..) | Happens::Free(_) | Happens::Wait(_) => true,
            Happens::Leave(_) | Happens::PhaseEnds(_) | Happens::Phase(_) | Happens::Enter(_) => {
                false
            }
        }
    }
}

/// A pool while it is written.
struct Writer<'a> {
    out: &'a mut String,
    trace: &'a Trace,
    /// The current phase.
    phase: u32,
    /// Modules that run, the innermost last.
    modules: Vec<usize>,
}

/// ` key=value`, or nothing if a reader assumes the value.
fn said(key: &str, value: u32, assumed: u32) -> String {
    if value == assumed {
        String::new()
    } else {
        format!(" {key}={value}")
    }
}

impl Writer<'_> {
    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.out, "{line}");
    }

    /// The current module.
    fn module(&self) -> u32 {
        self.modules.last().map_or(0, |&module| module as u32)
    }

    fn happening(&mut self, what: Happens) {
        let trace = self.trace;
        match what {
            Happens::Leave(i) => {
                self.modules.retain(|&module| module != i);
                self.line(format_args!("leave {}", joined(&trace.modules[i].name)));
            }
            Happens::PhaseEnds(_) => {
                self.phase = 0;
                self.line(format_args!("phase -"));
            }
            Happens::Phase(i) => {
                let span = &trace.phases[i];
                self.line(format_args!("phase {}", joined(&span.name)));
                self.phase = i as u32;
                if span.start == span.end && !next_begins(trace, i) {
                    self.phase = 0;
                    self.line(format_args!("phase -"));
                }
            }
            Happens::Enter(i) => {
                let (span, name) = (&trace.modules[i], joined(&trace.modules[i].name));
                self.line(format_args!("enter {name}"));
                if span.start < span.end {
                    self.modules.push(i);
                } else {
                    self.line(format_args!("leave {name}"));
                }
            }
            Happens::Free(i) => {
                let block = &trace.blocks[i];
                let phase = said("phase", block.origin.phases.1, self.phase);
                let module = said("module", block.origin.modules.1, self.module());
                self.line(format_args!("free {}{phase}{module}", joined(&block.id)));
            }
            Happens::Wait(i) => {
                let wait = trace.waits[i];
                self.line(format_args!("wait {} {}", wait.stream, wait.on));
            }
            Happens::Alloc(.., i) => self.alloc(i),
        }
    }

    fn alloc(&mut self, i: usize) {
        let block = &self.trace.blocks[i];
        let origin = block.origin;
        let mut line = format!("alloc {} {}", joined(&block.id), block.bytes);
        line += &said("stream", origin.stream, 0);
        if block.alignment > 0 {
            line += &format!(" align={}", block.alignment);
        }
        if let Some(offset) = block.offset {
            line += &format!(" at={offset}");
        }
        if let Some(other) = block.within {
            line += &format!(" in={}", joined(&self.trace.blocks[other].id));
        }
        if !block.gaps.is_empty() {
            let gap = |(start, end): &(u64, u64)| format!("{start}-{end}");
            let gaps: Vec<String> = block.gaps.iter().map(gap).collect();
            line += &format!(" gaps={}", gaps.join("/"));
        }
        line += if origin.dynamic { " dyn" } else { "" };
        line += &said("phase", origin.phases.0, self.phase);
        line += &said("module", origin.modules.0, self.module());
        self.line(format_args!("{line}"));
    }
}

/// A name as one word: not that of no phase, and not empty.
fn joined(name: &str) -> String {
    let words = name.split(|c: char| c == ',' || c.is_whitespace());
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    match words[..] {
        [] | ["-"] => "_".into(),
        _ => words.join("_"),
    }
}
