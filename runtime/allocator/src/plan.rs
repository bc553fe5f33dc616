//! The plan file: the sequence of requests, and a place for each.
//!
//! ```text
//! lighterage-plan 1
//! pool 4096 512             bytes of the pool, alignment of every place
//! requests 5 1              how many follow; the first one of the step that repeats
//! space 1536:2000 2048:4096 group 0: what its dynamic requests may use
//! phase fwd.0               from here on; a name, for messages
//! module layers.0.mlp
//! s 512 0 0 -               static: bytes, stream, offset, request after its free; `-`: none
//! s 1000 0 512 3
//! d 0 0                     dynamic: group, stream; any number of bytes
//! s 2048 0 2048 6           freed before request 6, which is request 2 of the next step
//! s 100 0 512 5
//! end
//! ```
//! Requests are numbered from 0. After the last one, the sequence continues at the step's first
//! request; numbers after the last request mean this next round. Requests before the step come
//! once: weights, for example.
//!
//! Reading proves the facts that [`Allocator`](crate::Allocator) relies on: every place is inside
//! the pool and aligned; blocks that are alive at the same time, in the first round or any later
//! one, share no byte; and no group's space overlaps a block that is alive at a request of the
//! group.

use crate::spans::Spans;
use std::fmt;

/// One request of the sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Position in the trace's list of streams; 0 is the default stream.
    pub stream: u32,
    /// The place of its block.
    pub place: Place,
}

/// The place of a request's block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// A fixed place.
    Static {
        /// The number of requested bytes.
        bytes: u64,
        /// From the pool's start.
        offset: u64,
        /// It is freed before the request with this number, which may be in the next round; `None`:
        /// never.
        end: Option<u32>,
    },
    /// Somewhere in the space of a group.
    Dynamic {
        /// Position in [`Plan::spaces`].
        group: u32,
    },
}

/// The kind of a name in a [`Plan`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mark {
    /// Forward or backward of a micro-batch.
    Phase,
    /// A module of the model.
    Module,
}

/// A sequence of requests with a place for each. Only [`Plan::read`] makes one, so that every plan
/// has been checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    bytes: u64,
    align: u64,
    requests: Vec<Request>,
    step: u32,
    spaces: Vec<Vec<(u64, u64)>>,
    marks: Vec<(u32, Mark, String)>,
}

/// What is wrong with a plan, and where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    /// Line of the file, from 1; 0 for the whole file.
    pub line: usize,
    /// The error, as a sentence.
    pub message: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => f.write_str(&self.message),
            line => write!(f, "line {line}: {}", self.message),
        }
    }
}

impl std::error::Error for Error {}

/// Numbers of twice this many requests fit in 32 bits.
const MOST: usize = 1 << 30;

impl Plan {
    /// Reads and checks a plan file.
    ///
    /// # Errors
    /// The first wrong line, or the requests whose blocks overlap.
    pub fn read(text: &str) -> Result<Plan, Error> {
        let mut plan = Plan {
            bytes: 0,
            align: 1,
            requests: vec![],
            step: 0,
            spaces: vec![],
            marks: vec![],
        };
        let mut lines = text
            .lines()
            .zip(1..)
            .filter(|(line, _)| !line.trim().is_empty());
        let mut head = |word: &str| {
            let (line, number) = lines.next().ok_or_else(|| cut_off(word))?;
            let mut words = Words {
                rest: line,
                line: number,
            };
            if words.word() != Some(word) {
                return words.error(format!("`{word}` should stand here"));
            }
            Ok(words)
        };
        let mut words = head("lighterage-plan")?;
        if words.number("a version")? != 1 {
            return words.error(
                "this program reads version 1 of plans; plan again with a compiler of its age",
            );
        }
        words.finish()?;
        let mut words = head("pool")?;
        (plan.bytes, plan.align) = (
            words.number("the pool's bytes")?,
            words.number("the alignment")?,
        );
        if !plan.align.is_power_of_two() {
            return words.error(format!("the alignment {} is no power of two", plan.align));
        }
        words.finish()?;
        let mut words = head("requests")?;
        let (n, step) = (
            words.number("how many requests")?,
            words.number("the first request of the step")?,
        );
        if n <= step || MOST as u64 <= n {
            return words.error(format!(
                "a step that begins at request {step} of {n} has none, or too many"
            ));
        }
        words.finish()?;
        plan.step = step as u32;
        let n = n as usize;
        // A request takes a line, so a hostile number reserves no more than the file's length.
        plan.requests.reserve(n.min(text.len() / 4));

        let mut ended = false;
        for (line, number) in lines {
            let mut words = Words {
                rest: line,
                line: number,
            };
            if ended {
                return words.error("nothing should follow `end`");
            }
            match words.word() {
                Some("space") => plan.spaces.push(words.space(plan.bytes)?),
                Some("phase") => {
                    plan.marks
                        .push((plan.requests.len() as u32, Mark::Phase, words.text()))
                }
                Some("module") => {
                    plan.marks
                        .push((plan.requests.len() as u32, Mark::Module, words.text()))
                }
                Some(kind @ ("s" | "d")) => {
                    if plan.requests.len() == n {
                        return words.error(format!("more than {n} requests"));
                    }
                    let request = if kind == "s" {
                        words.fixed(&plan, n)?
                    } else {
                        words.dynamic(&plan)?
                    };
                    plan.requests.push(request);
                }
                Some("end") => ended = true,
                word => {
                    return words.error(format!(
                        "`{}` begins no line of a plan",
                        word.unwrap_or_default()
                    ));
                }
            }
            words.finish()?;
        }
        if plan.requests.len() < n {
            return Err(cut_off(&format!("request {} of {n}", plan.requests.len())));
        }
        if !ended {
            return Err(cut_off("`end`"));
        }
        plan.check()?;
        Ok(plan)
    }

    /// Bytes of the pool.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Every place is a multiple of this.
    pub fn align(&self) -> u64 {
        self.align
    }

    /// The sequence.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Number of the first request of the step that repeats.
    pub fn step(&self) -> u32 {
        self.step
    }

    /// For each group of dynamic requests, the ranges of the pool that they may use, ascending.
    pub fn spaces(&self) -> &[Vec<(u64, u64)>] {
        &self.spaces
    }

    /// The phase or module of a request, if the plan names it.
    pub fn name(&self, mark: Mark, request: u32) -> Option<&str> {
        let before = self.marks.partition_point(|(at, _, _)| *at <= request);
        self.marks[..before]
            .iter()
            .rev()
            .find(|(_, kind, _)| *kind == mark)
            .map(|(_, _, name)| name.as_str())
    }

    /// Simulates the first round and a later one, with every block at its planned place.
    fn check(&self) -> Result<(), Error> {
        let n = self.requests.len();
        let period = n - self.step as usize;
        let mut ends: Vec<Vec<u64>> = vec![vec![]; n + period];
        let mut live: Spans<usize> = Spans::new();
        let mut seen: std::collections::BTreeSet<(usize, u32)> = std::collections::BTreeSet::new();
        // A space that has not changed since its last check is not checked again: groups often have
        // many requests in a row.
        let mut round = 0;
        for at in 0..n + period {
            for offset in std::mem::take(&mut ends[at]) {
                live.remove(offset);
                round += 1;
            }
            let i = if at < n { at } else { at - period };
            match self.requests[i].place {
                Place::Static { bytes, offset, end } => {
                    if let Some((_, _, other)) = live.first_meeting(offset, offset + bytes) {
                        let message =
                            format!("requests {other} and {i} share bytes while both are alive");
                        return Err(Error { line: 0, message });
                    }
                    live.insert(offset, offset + bytes, i);
                    round += 1;
                    if let Some(end) = end
                        .map(|end| end as usize + (at - i))
                        .filter(|end| *end < n + period)
                    {
                        ends[end].push(offset);
                    }
                }
                Place::Dynamic { group } => {
                    if !seen.insert((round, group)) {
                        continue;
                    }
                    for &(lo, hi) in &self.spaces[group as usize] {
                        if let Some((_, _, other)) = live.first_meeting(lo, hi) {
                            let message = format!(
                                "the space of group {group} meets request {other}, which is alive \
                                 at request {i} of the group"
                            );
                            return Err(Error { line: 0, message });
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

fn cut_off(missing: &str) -> Error {
    Error {
        line: 0,
        message: format!("the plan is cut off: {missing} is missing"),
    }
}

/// A line, word by word.
struct Words<'a> {
    rest: &'a str,
    line: usize,
}

impl<'a> Words<'a> {
    fn error<T>(&self, message: impl Into<String>) -> Result<T, Error> {
        Err(Error {
            line: self.line,
            message: message.into(),
        })
    }

    fn word(&mut self) -> Option<&'a str> {
        let line = self.rest.trim_start();
        let (word, rest) = line.split_at(line.find(char::is_whitespace).unwrap_or(line.len()));
        self.rest = rest;
        (!word.is_empty()).then_some(word)
    }

    /// The rest of the line.
    fn text(&mut self) -> String {
        std::mem::take(&mut self.rest).trim().to_string()
    }

    fn finish(&mut self) -> Result<(), Error> {
        match self.word() {
            Some(word) => self.error(format!("`{word}` is one word too many")),
            None => Ok(()),
        }
    }

    fn number(&mut self, what: &str) -> Result<u64, Error> {
        let word = self.word();
        self.parse(word.unwrap_or_default(), what)
    }

    fn parse(&self, word: &str, what: &str) -> Result<u64, Error> {
        match word.parse() {
            // Sums of two do not overflow.
            Ok(number) if number < 1 << 62 => Ok(number),
            _ => self.error(format!(
                "`{word}` is not {what}: a whole number below 2^62 should stand here"
            )),
        }
    }

    fn stream(&mut self) -> Result<u32, Error> {
        match self.number("a stream")? {
            stream if stream < 1 << 16 => Ok(stream as u32),
            stream => self.error(format!(
                "a stream's number is below 65536, and not {stream}"
            )),
        }
    }

    fn space(&mut self, pool: u64) -> Result<Vec<(u64, u64)>, Error> {
        let mut space: Vec<(u64, u64)> = vec![];
        while let Some(word) = self.word() {
            let (lo, hi) = word.split_once(':').unwrap_or((word, ""));
            let (lo, hi) = (
                self.parse(lo, "a range's start")?,
                self.parse(hi, "a range's end")?,
            );
            if hi <= lo || pool < hi || space.last().is_some_and(|(_, last)| lo < *last) {
                return self.error(format!(
                    "the range {lo}:{hi} is empty, outside the pool, or not behind the one before"
                ));
            }
            space.push((lo, hi));
        }
        Ok(space)
    }

    fn fixed(&mut self, plan: &Plan, n: usize) -> Result<Request, Error> {
        let bytes = self.number("a number of bytes")?;
        let stream = self.stream()?;
        let offset = self.number("an offset")?;
        if bytes == 0 || plan.bytes < offset + bytes {
            return self.error(format!(
                "{bytes} bytes at {offset} are none, or outside the pool of {}",
                plan.bytes
            ));
        }
        if !offset.is_multiple_of(plan.align) {
            return self.error(format!(
                "the offset {offset} is no multiple of {}",
                plan.align
            ));
        }
        let (i, step) = (plan.requests.len(), plan.step as usize);
        let last = if i < step { n } else { i + (n - step) };
        let end = match self.word() {
            Some("-") if i < step => None,
            Some("-") => {
                return self.error("what the step asks for has to be freed before it asks again");
            }
            word => Some(self.parse(
                word.unwrap_or_default(),
                "the request before which it is freed",
            )?),
        };
        if let Some(end) = end
            && (end <= i as u64 || (last as u64) < end)
        {
            return self.error(format!(
                "request {i} is freed before one of {} to {last}, and not {end}",
                i + 1
            ));
        }
        Ok(Request {
            stream,
            place: Place::Static {
                bytes,
                offset,
                end: end.map(|end| end as u32),
            },
        })
    }

    fn dynamic(&mut self, plan: &Plan) -> Result<Request, Error> {
        let group = self.number("a group")?;
        if plan.spaces.len() as u64 <= group {
            return self.error(format!("group {group} has no `space` line before this"));
        }
        Ok(Request {
            stream: self.stream()?,
            place: Place::Dynamic {
                group: group as u32,
            },
        })
    }
}
