//! Parses PTX text into instructions with numbered registers. Anything unknown is an error that
//! names it.

use super::Error;
use std::collections::BTreeMap;

/// Types of values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ty {
    Pred,
    /// Bits or an unsigned number.
    U(u32),
    S(u32),
    F16,
    Bf16,
    F16x2,
    Bf16x2,
    F32x2,
    /// An f32 whose lower 13 bits do not count.
    Tf32,
    F32,
    F64,
}

impl Ty {
    fn parse(word: &str) -> Option<Ty> {
        Some(match word {
            "pred" => Ty::Pred,
            "b8" | "u8" => Ty::U(8),
            "b16" | "u16" => Ty::U(16),
            "b32" | "u32" => Ty::U(32),
            "b64" | "u64" => Ty::U(64),
            "s8" => Ty::S(8),
            "s16" => Ty::S(16),
            "s32" => Ty::S(32),
            "s64" => Ty::S(64),
            "f16" => Ty::F16,
            "bf16" => Ty::Bf16,
            "f16x2" => Ty::F16x2,
            "bf16x2" => Ty::Bf16x2,
            "tf32" => Ty::Tf32,
            "f32" => Ty::F32,
            "f32x2" => Ty::F32x2,
            "f64" => Ty::F64,
            _ => return None,
        })
    }
    pub(super) fn bits(self) -> u32 {
        match self {
            Ty::Pred => 1,
            Ty::U(bits) | Ty::S(bits) => bits,
            Ty::F16 | Ty::Bf16 => 16,
            Ty::F16x2 | Ty::Bf16x2 | Ty::Tf32 | Ty::F32 => 32,
            Ty::F64 | Ty::F32x2 => 64,
        }
    }
    pub(super) fn is_float(self) -> bool {
        !matches!(self, Ty::Pred | Ty::U(_) | Ty::S(_))
    }
    /// The type of each half of a pair.
    pub(super) fn half(self) -> Option<Ty> {
        match self {
            Ty::F16x2 => Some(Ty::F16),
            Ty::Bf16x2 => Some(Ty::Bf16),
            Ty::F32x2 => Some(Ty::F32),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Space {
    Param,
    Global,
    Shared,
    Local,
    Generic,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Special {
    Tid(usize),
    Ntid(usize),
    Ctaid(usize),
    Nctaid(usize),
    Lane,
    Warp,
}

#[derive(Clone, PartialEq, Debug)]
pub(super) enum Arg {
    Reg(usize),
    Const(u64),
    Special(Special),
    /// `[register + offset]`.
    At(Option<usize>, i64),
    Many(Vec<Arg>),
    /// `_`: an unused result.
    None,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Binary {
    Add,
    Sub,
    Mul,
    MulHigh,
    MulWide,
    Div,
    Rem,
    Min,
    Max,
    And,
    Or,
    Xor,
    Shl,
    Shr,
    CopySign,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unary {
    Neg,
    Abs,
    Not,
    Rcp,
    Sqrt,
    Rsqrt,
    Ex2,
    Lg2,
    Sin,
    Cos,
    Tanh,
    Popc,
    Clz,
    Brev,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Round {
    Even,
    Zero,
    Down,
    Up,
    /// To the nearest; ties away from zero.
    Away,
    /// To an integer; ties to even.
    IntEven,
    IntZero,
    IntDown,
    IntUp,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Shuffle {
    Bfly,
    Up,
    Down,
    Idx,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Vote {
    All,
    Any,
    Ballot,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Atom {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exch,
    Cas,
}

/// Comparisons: the result for less, equal, greater, unordered.
pub(super) type Compare = [bool; 4];

#[derive(Clone, PartialEq, Debug)]
pub(super) enum Op {
    Mov(Ty),
    Ld(Space, Ty),
    St(Space, Ty),
    Binary(Binary, Ty, Flags),
    Unary(Unary, Ty, Flags),
    /// a·b + c: the low half of the product, or the product as wide as c.
    Mad(Ty, bool),
    Fma(Ty, Flags),
    /// a·b + c, where a and b are halves and c is f32; or a ± c.
    FmaMixed(Ty),
    AddMixed(Ty, Binary),
    Setp(Compare, Option<Binary>, Ty, Flags),
    Selp(Ty),
    Cvt {
        to: Ty,
        from: Ty,
        round: Option<Round>,
        flags: Flags,
        saturate: bool,
    },
    /// Two floats to a pair of halves.
    CvtPair {
        to: Ty,
        relu: bool,
    },
    ToGeneric(Space),
    FromGeneric(Space),
    Bra(usize),
    /// By an operand, to one of the kernel's tables of targets.
    Brx(usize),
    Ret,
    Bar,
    WarpBar,
    Shfl(Shuffle),
    Vote(Vote),
    /// m16n8k16 of halves, added in f32.
    Mma(Ty),
    LdMatrix {
        n: usize,
        transposed: bool,
    },
    CpAsync {
        bytes: usize,
    },
    Commit,
    /// All groups except the latest N have arrived.
    Wait(usize),
    Atom(Atom, Ty, Space),
    Nothing,
    Trap,
    Prmt,
    Lop3,
    Bfe(Ty),
    Bfi(Ty),
    /// Funnel shift: to the left; counts are clamped, not wrapped.
    Shf(bool, bool),
}

/// Modifiers of arithmetic.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Flags {
    pub(super) ftz: bool,
    pub(super) nan: bool,
}

#[derive(Clone, PartialEq, Debug)]
pub(super) struct Instr {
    pub(super) op: Op,
    pub(super) args: Vec<Arg>,
    /// Runs if the register is true, or false.
    pub(super) guard: Option<(usize, bool)>,
    pub(super) text: String,
    pub(super) line: usize,
}

impl Instr {
    pub(super) fn at(&self) -> String {
        format!("line {}: {}", self.line, self.text)
    }
}

#[derive(Clone, PartialEq, Debug)]
pub(super) struct Kernel {
    pub(super) name: String,
    pub(super) instrs: Vec<Instr>,
    pub(super) n_regs: usize,
    /// Tables of places that instructions jump to.
    pub(super) targets: Vec<Vec<usize>>,
    /// Offset and bytes of each parameter.
    pub(super) params: Vec<(usize, usize)>,
    /// Bytes of shared memory without the dynamic part, which follows.
    pub(super) shared_bytes: usize,
    pub(super) local_bytes: usize,
    /// `.maxntid`.
    pub(super) max_threads: Option<u32>,
}

/// The start of shared and local memory in their spaces: 0 is not an address.
pub(super) const BASE: u64 = 1024;
/// Their start in generic addresses.
pub(super) const SHARED_WINDOW: u64 = 0x7f00_0000_0000;
pub(super) const LOCAL_WINDOW: u64 = 0x7e00_0000_0000;

fn error(what: impl Into<String>, at: impl Into<String>) -> Error {
    Error {
        what: what.into(),
        at: at.into(),
    }
}

/// A text without its comments, of the same lines.
fn uncommented(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("//").into_iter().chain(rest.find("/*")).min() {
        out.push_str(&rest[..at]);
        let end = match rest[at..].starts_with("//") {
            true => rest[at..].find('\n').map_or(rest.len(), |n| at + n),
            false => rest[at..].find("*/").map_or(rest.len(), |n| at + n + 2),
        };
        out.extend(rest[at..end].chars().filter(|&c| c == '\n'));
        rest = &rest[end..];
    }
    out + rest
}

/// Finds a kernel and reads it.
pub(super) fn kernel(text: &str, name: &str) -> Result<Kernel, Error> {
    let text = uncommented(text);
    match entries(&text).into_iter().find(|entry| entry.name == name) {
        Some(entry) => read(&text, &entry),
        None => Err(error("there is no such kernel", name)),
    }
}

/// Reads every kernel of a text, in its order.
pub(super) fn kernels(text: &str) -> Result<Vec<Kernel>, Error> {
    let text = uncommented(text);
    entries(&text)
        .iter()
        .map(|entry| read(&text, entry))
        .collect()
}

/// A kernel's position in a text.
pub(super) struct Entry<'a> {
    pub(super) name: &'a str,
    /// The byte after `.entry`.
    start: usize,
}

/// The kernels of a text, in its order.
pub(super) fn entries(text: &str) -> Vec<Entry<'_>> {
    let entry = |(at, word): (usize, &str)| {
        let start = at + word.len();
        let name = text[start..]
            .trim_start()
            .split(|c: char| c == '(' || c.is_whitespace())
            .next()
            .unwrap_or_default();
        Entry { name, start }
    };
    text.match_indices(".entry").map(entry).collect()
}

/// Reads a kernel of a text without comments.
fn read(text: &str, entry: &Entry<'_>) -> Result<Kernel, Error> {
    let &Entry { name, start } = entry;
    let no = |what: &str| error(format!("the kernel has no {what}"), name);
    let open = start + text[start..].find('(').ok_or_else(|| no("parameters"))?;
    let close = open
        + text[open..]
            .find(')')
            .ok_or_else(|| no("end of its parameters"))?;
    let body = close + text[close..].find('{').ok_or_else(|| no("body"))?;

    let mut reader = Reader::default();
    // Shared memory of the module, in the text before the first kernel or between two.
    for statement in text[..start]
        .split(';')
        .filter_map(|s| s.find(".shared ").map(|at| (s, at)))
    {
        let (before, rest) = statement;
        let extern_ = before[..rest].trim_end().ends_with(".extern");
        reader
            .array(&before[rest..], extern_)
            .map_err(|what| error(what, before.trim()))?;
    }
    for statement in text[..start].split(';') {
        let word = statement.rsplit('\n').next().unwrap_or(statement).trim();
        if [".global ", ".const ", ".visible .global", ".func"]
            .iter()
            .any(|s| word.starts_with(s))
        {
            return Err(error("memory and functions of modules are not known", word));
        }
    }
    for param in text[open + 1..close]
        .split(',')
        .map(str::trim)
        .filter(|p| !p.is_empty())
    {
        reader.param(param).map_err(|what| error(what, param))?;
    }
    let mut max_threads = None;
    for line in text[close + 1..body].lines().map(str::trim) {
        if let Some(counts) = line.strip_prefix(".maxntid") {
            let counts = counts.split(',').map(|n| n.trim().parse::<u32>());
            max_threads = Some(
                counts
                    .product::<Result<u32, _>>()
                    .map_err(|e| error(e.to_string(), line))?,
            );
        }
    }
    let first_line = text[..body].matches('\n').count() + 1;
    reader.body(&text[body + 1..], first_line)?;
    let Reader {
        mut instrs,
        registers,
        params,
        labels,
        jumps,
        tables,
        table_jumps,
        local_bytes,
        dynamic,
        shared_bytes,
        ..
    } = reader;
    for (instr, label) in jumps {
        let at = labels
            .get(&label)
            .ok_or_else(|| error(format!("no label {label}"), instrs[instr].at()))?;
        instrs[instr].op = Op::Bra(*at);
    }
    let mut targets = vec![];
    for (instr, table) in table_jumps {
        let places = tables.get(&table).map(|names| {
            let places = names.iter().map(|name| labels.get(name).copied());
            places.collect::<Option<Vec<usize>>>()
        });
        let places = places
            .flatten()
            .ok_or_else(|| error(format!("no targets {table}"), instrs[instr].at()))?;
        instrs[instr].op = Op::Brx(targets.len());
        targets.push(places);
    }
    // Dynamic memory lies after the rest: its address is known now.
    let shared_bytes = shared_bytes.next_multiple_of(1024);
    for instr in &mut instrs {
        for arg in &mut instr.args {
            match arg {
                Arg::Const(DYNAMIC) => *arg = Arg::Const(BASE + shared_bytes as u64),
                Arg::At(None, at) if dynamic && DYNAMIC as i64 <= *at => {
                    *at = *at - DYNAMIC as i64 + BASE as i64 + shared_bytes as i64;
                }
                _ => {}
            }
        }
    }
    let n_regs = registers.len();
    Ok(Kernel {
        name: name.into(),
        instrs,
        targets,
        n_regs,
        params,
        shared_bytes,
        local_bytes,
        max_threads,
    })
}

/// A placeholder for the address of dynamic shared memory until it is known.
const DYNAMIC: u64 = 0x6d00_0000_0000;

#[derive(Default)]
struct Reader {
    instrs: Vec<Instr>,
    registers: BTreeMap<String, usize>,
    /// Addresses of named memory: parameters, shared, local.
    symbols: BTreeMap<String, u64>,
    params: Vec<(usize, usize)>,
    labels: BTreeMap<String, usize>,
    jumps: Vec<(usize, String)>,
    /// The label that was read last: that of a table of targets stands before it.
    last_label: String,
    /// Tables of targets, and the jumps that use them.
    tables: BTreeMap<String, Vec<String>>,
    table_jumps: Vec<(usize, String)>,
    shared_bytes: usize,
    local_bytes: usize,
    dynamic: bool,
}

impl Reader {
    /// `.param .u64 .ptr .global .align 64 name`
    fn param(&mut self, text: &str) -> Result<(), String> {
        let mut words = text.split_whitespace();
        let name = words.next_back().unwrap_or_default();
        let ty = words
            .nth(1)
            .and_then(|word| Ty::parse(word.trim_start_matches('.')));
        let bytes = ty.ok_or("a parameter's type is not known")?.bits() as usize / 8;
        let end = self.params.last().map_or(0, |&(at, bytes)| at + bytes);
        let at = end.next_multiple_of(bytes);
        self.params.push((at, bytes));
        self.symbols.insert(name.into(), at as u64);
        Ok(())
    }

    /// `.shared .align 16 .b8 name[64]`
    fn array(&mut self, text: &str, is_extern: bool) -> Result<(), String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let align = words
            .iter()
            .position(|&w| w == ".align")
            .and_then(|i| words.get(i + 1)?.parse::<usize>().ok());
        let last = words.last().copied().unwrap_or_default();
        let (name, count) = last.split_once('[').unwrap_or((last, "1]"));
        let count = count.trim_end_matches(']');
        let ty = words
            .iter()
            .rev()
            .nth(1)
            .and_then(|w| Ty::parse(w.trim_start_matches('.')));
        let size = ty.ok_or("an array's type is not known")?.bits() as usize / 8;
        if is_extern {
            self.dynamic = true;
            self.symbols.insert(name.into(), DYNAMIC);
            return Ok(());
        }
        let bytes = size
            * count
                .parse::<usize>()
                .map_err(|e| format!("an array's length: {e}"))?;
        let total = match words[0] {
            ".shared" => &mut self.shared_bytes,
            ".local" => &mut self.local_bytes,
            _ => return Err("memory of a kind that is not known".into()),
        };
        let at = total.next_multiple_of(align.unwrap_or(size));
        *total = at + bytes;
        self.symbols.insert(name.into(), BASE + at as u64);
        Ok(())
    }

    fn body(&mut self, text: &str, mut line: usize) -> Result<(), Error> {
        let mut rest = text;
        let mut depth = 1;
        loop {
            let trimmed = rest.trim_start();
            line += rest[..rest.len() - trimmed.len()].matches('\n').count();
            rest = trimmed;
            let first = rest
                .chars()
                .next()
                .ok_or_else(|| error("the text ends in a kernel", format!("line {line}")))?;
            if first == '{' || first == '}' {
                depth = if first == '{' { depth + 1 } else { depth - 1 };
                if depth == 0 {
                    return Ok(());
                }
                rest = &rest[1..];
                continue;
            }
            let end = rest.find([';', ':']);
            let end = match end {
                // `::` is part of a modifier.
                Some(at) if rest[at..].starts_with("::") => rest.find(';'),
                end => end,
            };
            let end = end.ok_or_else(|| error("a statement has no end", format!("line {line}")))?;
            let statement = rest[..end].trim();
            if rest.as_bytes()[end] == b':' {
                self.labels.insert(statement.into(), self.instrs.len());
                self.last_label = statement.into();
            } else {
                let text = statement.split_whitespace().collect::<Vec<_>>().join(" ");
                self.statement(&text, line)
                    .map_err(|what| error(what, format!("line {line}: {text}")))?;
            }
            line += rest[..end].matches('\n').count();
            rest = &rest[end + 1..];
        }
    }

    fn statement(&mut self, text: &str, line: usize) -> Result<(), String> {
        if text.starts_with(".reg ") || text.starts_with(".pragma") || text.starts_with(".loc ") {
            return Ok(());
        }
        if let Some(names) = text.strip_prefix(".branchtargets") {
            let names = split(names).into_iter().map(|name| name.trim().to_string());
            self.tables.insert(self.last_label.clone(), names.collect());
            return Ok(());
        }
        if text.starts_with('.') {
            return self.array(text, false);
        }
        let (guard, rest) = match text.strip_prefix('@') {
            Some(rest) => {
                let (guard, rest) = rest
                    .split_once(' ')
                    .ok_or("no instruction behind a guard")?;
                let on = !guard.starts_with('!');
                (
                    Some((self.register(guard.trim_start_matches('!')), on)),
                    rest,
                )
            }
            None => (None, text),
        };
        let (word, args) = rest.split_once(' ').unwrap_or((rest, ""));
        let args = split(args);
        let instr = self.instrs.len();
        let mut mods = Mods {
            words: word.split('.').collect(),
        };
        let head = mods.words.remove(0);
        let op = decode(head, &mut mods)
            .ok_or_else(|| format!("the instruction {word} is not known"))?;
        if let Some(word) = mods.words.first() {
            return Err(format!("the modifier .{word} of {head} is not known"));
        }
        let args = match op {
            Op::Bra(_) => {
                self.jumps
                    .push((instr, args.first().ok_or("no label")?.to_string()));
                vec![]
            }
            Op::Brx(_) => {
                let table = args.get(1).ok_or("no targets")?.trim().to_string();
                self.table_jumps.push((instr, table));
                vec![self.arg(args[0])?]
            }
            _ => args
                .into_iter()
                .map(|arg| self.arg(arg))
                .collect::<Result<_, _>>()?,
        };
        let op = match (op, args.as_slice()) {
            (Op::Bar, [Arg::Const(0)]) => Op::Bar,
            (Op::Bar, _) => return Err("only barrier 0 of all threads is known".into()),
            (Op::Wait(_), [Arg::Const(n)]) => Op::Wait(*n as usize),
            (Op::CpAsync { .. }, [_, _, Arg::Const(n), ..]) => Op::CpAsync { bytes: *n as usize },
            (op, _) => op,
        };
        if let Some(n) = arity(&op)
            && !n.contains(&args.len())
        {
            return Err(format!("{} operands where {n:?} should be", args.len()));
        }
        self.instrs.push(Instr {
            op,
            args,
            guard,
            text: text.into(),
            line,
        });
        Ok(())
    }

    fn register(&mut self, name: &str) -> usize {
        let n = self.registers.len();
        *self.registers.entry(name.into()).or_insert(n)
    }

    fn arg(&mut self, text: &str) -> Result<Arg, String> {
        let text = text.trim();
        let bad = || format!("the operand {text} is not known");
        if let Some(list) = text.strip_prefix('{').and_then(|t| t.strip_suffix('}')) {
            return Ok(Arg::Many(
                split(list)
                    .into_iter()
                    .map(|arg| self.arg(arg))
                    .collect::<Result<_, _>>()?,
            ));
        }
        if let Some(inner) = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')) {
            let (base, offset) = match inner.rfind('+') {
                Some(at) => (
                    inner[..at].trim(),
                    inner[at + 1..].trim().parse::<i64>().map_err(|_| bad())?,
                ),
                None => (inner.trim(), 0),
            };
            return match self.arg(base)? {
                Arg::Reg(register) => Ok(Arg::At(Some(register), offset)),
                Arg::Const(at) => Ok(Arg::At(None, at as i64 + offset)),
                _ => Err(bad()),
            };
        }
        if text == "_" {
            return Ok(Arg::None);
        }
        if let Some(name) = text.strip_prefix('%') {
            let axis = |rest: &str| ["x", "y", "z"].iter().position(|&a| a == rest);
            let special = match name.split_once('.') {
                Some(("tid", rest)) => axis(rest).map(Special::Tid),
                Some(("ntid", rest)) => axis(rest).map(Special::Ntid),
                Some(("ctaid", rest)) => axis(rest).map(Special::Ctaid),
                Some(("nctaid", rest)) => axis(rest).map(Special::Nctaid),
                Some(_) => None,
                None if name == "laneid" => Some(Special::Lane),
                None if name == "warpid" => Some(Special::Warp),
                None if name.contains("mask") || name.contains("clock") => None,
                None => return Ok(Arg::Reg(self.register(text))),
            };
            return special.map(Arg::Special).ok_or_else(bad);
        }
        if let Some(&at) = self.symbols.get(text) {
            return Ok(Arg::Const(at));
        }
        let number = match text.get(..2) {
            Some("0f" | "0F" | "0d" | "0D") => u64::from_str_radix(&text[2..], 16).ok(),
            Some("0x" | "0X") => u64::from_str_radix(text[2..].trim_end_matches('U'), 16).ok(),
            _ => text
                .parse::<i64>()
                .map(|n| n as u64)
                .or_else(|_| text.parse::<u64>())
                .ok(),
        };
        match text {
            "true" => Ok(Arg::Const(1)),
            "false" => Ok(Arg::Const(0)),
            _ => number.map(Arg::Const).ok_or_else(bad),
        }
    }
}

/// The number of operands of an instruction, if it must be checked.
fn arity(op: &Op) -> Option<std::ops::RangeInclusive<usize>> {
    let n = match op {
        Op::Mov(_) | Op::Ld(..) | Op::St(..) | Op::Unary(..) | Op::Cvt { .. } => 2,
        Op::ToGeneric(_) | Op::FromGeneric(_) | Op::LdMatrix { .. } => 2,
        Op::Binary(..) | Op::AddMixed(..) | Op::CvtPair { .. } | Op::Vote(_) => 3,
        Op::Mad(..)
        | Op::Fma(..)
        | Op::FmaMixed(_)
        | Op::Selp(_)
        | Op::Mma(_)
        | Op::Prmt
        | Op::Bfe(_)
        | Op::Shf(..) => 4,
        Op::Lop3 | Op::Bfi(_) | Op::Shfl(_) => 5,
        Op::Setp(_, None, ..) => 3,
        Op::Setp(..) => 4,
        Op::CpAsync { .. } => return Some(3..=4),
        Op::Atom(..) => return Some(2..=4),
        Op::WarpBar | Op::Wait(_) => return Some(0..=1),
        _ => return None,
    };
    Some(n..=n)
}

/// A list's parts, at commas outside of braces and brackets.
fn split(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (vec![], 0, 0);
    for (at, c) in text.char_indices() {
        match c {
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    if !text[start..].trim().is_empty() {
        parts.push(text[start..].trim());
    }
    parts
}

/// The modifiers after an instruction's name; each is taken once, and none may be left.
struct Mods<'a> {
    words: Vec<&'a str>,
}

impl Mods<'_> {
    fn take(&mut self, word: &str) -> bool {
        let at = self.words.iter().position(|&w| w == word);
        at.map(|at| self.words.remove(at)).is_some()
    }
    fn any(&mut self, words: &[&str]) {
        for word in words {
            self.take(word);
        }
    }
    /// The last word, a type.
    fn ty(&mut self) -> Option<Ty> {
        Ty::parse(self.words.pop()?)
    }
    fn choose<T: Copy>(&mut self, of: &[(&str, T)]) -> Option<T> {
        of.iter()
            .find(|(word, _)| self.take(word))
            .map(|&(_, value)| value)
    }
    fn flags(&mut self) -> Flags {
        Flags {
            ftz: self.take("ftz"),
            nan: self.take("NaN"),
        }
    }
    fn space(&mut self) -> Space {
        let of = [
            ("param", Space::Param),
            ("global", Space::Global),
            ("shared", Space::Shared),
            ("shared::cta", Space::Shared),
            ("local", Space::Local),
        ];
        self.choose(&of).unwrap_or(Space::Generic)
    }
}

/// Modifiers that do not change the result of an access.
const ACCESS: [&str; 18] = [
    "volatile",
    "relaxed",
    "weak",
    "acquire",
    "release",
    "acq_rel",
    "gpu",
    "sys",
    "cta",
    "nc",
    "ca",
    "cg",
    "cs",
    "L1::no_allocate",
    "L1::evict_last",
    "L1::evict_first",
    "L2::128B",
    "L2::256B",
];

fn decode(head: &str, mods: &mut Mods<'_>) -> Option<Op> {
    const UNARY: [(&str, Unary); 14] = [
        ("neg", Unary::Neg),
        ("abs", Unary::Abs),
        ("not", Unary::Not),
        ("rcp", Unary::Rcp),
        ("sqrt", Unary::Sqrt),
        ("rsqrt", Unary::Rsqrt),
        ("ex2", Unary::Ex2),
        ("lg2", Unary::Lg2),
        ("sin", Unary::Sin),
        ("cos", Unary::Cos),
        ("tanh", Unary::Tanh),
        ("popc", Unary::Popc),
        ("clz", Unary::Clz),
        ("brev", Unary::Brev),
    ];
    if let Some(&(_, unary)) = UNARY.iter().find(|(word, _)| *word == head) {
        let ty = mods.ty()?;
        mods.any(if ty.is_float() {
            &["rn", "approx"]
        } else {
            &[]
        });
        return Some(Op::Unary(unary, ty, mods.flags()));
    }
    Some(match head {
        "mov" => Op::Mov(mods.ty()?),
        "ld" | "st" => {
            let ty = mods.ty()?;
            mods.any(&ACCESS);
            mods.any(&["v2", "v4", "v8"]);
            if head == "ld" {
                Op::Ld(mods.space(), ty)
            } else {
                Op::St(mods.space(), ty)
            }
        }
        "add" | "sub" | "div" | "min" | "max" => {
            let ty = mods.ty()?;
            mods.any(if ty.is_float() { &["rn"] } else { &[] });
            mods.any(if head == "div" {
                &["approx", "full"]
            } else {
                &[]
            });
            let binary = match head {
                "add" => Binary::Add,
                "sub" => Binary::Sub,
                "div" => Binary::Div,
                "min" => Binary::Min,
                _ => Binary::Max,
            };
            if matches!(binary, Binary::Add | Binary::Sub) && ty.bits() == 16 && mods.take("f32") {
                return Some(Op::AddMixed(ty, binary));
            }
            Op::Binary(binary, ty, mods.flags())
        }
        "mul" => {
            let ty = mods.ty()?;
            let part = mods.choose(&[
                ("hi", Binary::MulHigh),
                ("wide", Binary::MulWide),
                ("lo", Binary::Mul),
            ]);
            mods.any(if ty.is_float() { &["rn"] } else { &[] });
            Op::Binary(part.unwrap_or(Binary::Mul), ty, mods.flags())
        }
        "mad" => {
            let ty = mods.ty()?;
            match mods.choose(&[("wide", true), ("lo", false)]) {
                Some(wide) => Op::Mad(ty, wide),
                None if ty.is_float() && mods.take("rn") => Op::Fma(ty, mods.flags()),
                None => return None,
            }
        }
        "fma" => {
            let ty = mods.ty()?;
            if !mods.take("rn") {
                return None;
            }
            if mods.take("f32") {
                return Some(Op::FmaMixed(ty));
            }
            Op::Fma(ty, mods.flags())
        }
        "rem" => Op::Binary(Binary::Rem, mods.ty()?, Flags::default()),
        "and" => Op::Binary(Binary::And, mods.ty()?, Flags::default()),
        "or" => Op::Binary(Binary::Or, mods.ty()?, Flags::default()),
        "xor" => Op::Binary(Binary::Xor, mods.ty()?, Flags::default()),
        "shl" => Op::Binary(Binary::Shl, mods.ty()?, Flags::default()),
        "shr" => Op::Binary(Binary::Shr, mods.ty()?, Flags::default()),
        "copysign" => Op::Binary(Binary::CopySign, mods.ty()?, Flags::default()),
        "setp" => {
            let ty = mods.ty()?;
            let compare = compare(mods.words.first()?)?;
            mods.words.remove(0);
            let of = [
                ("and", Binary::And),
                ("or", Binary::Or),
                ("xor", Binary::Xor),
            ];
            Op::Setp(compare, mods.choose(&of), ty, mods.flags())
        }
        "selp" => Op::Selp(mods.ty()?),
        "cvt" => {
            let (from, to) = (mods.ty()?, mods.ty()?);
            let of = [
                ("rn", Round::Even),
                ("rz", Round::Zero),
                ("rm", Round::Down),
                ("rp", Round::Up),
                ("rni", Round::IntEven),
                ("rzi", Round::IntZero),
                ("rmi", Round::IntDown),
                ("rpi", Round::IntUp),
                ("rna", Round::Away),
            ];
            let round = mods.choose(&of);
            if to.half().is_some() {
                return (from == Ty::F32 && round == Some(Round::Even)).then(|| Op::CvtPair {
                    to,
                    relu: mods.take("relu"),
                });
            }
            let is_tf32 = to == Ty::Tf32 && from == Ty::F32;
            if is_tf32 != (round == Some(Round::Away)) {
                return None;
            }
            if to.is_float() && matches!(round, Some(Round::Zero | Round::Down | Round::Up)) {
                return None;
            }
            Op::Cvt {
                to,
                from,
                round,
                flags: mods.flags(),
                saturate: mods.take("sat"),
            }
        }
        "cvta" => {
            let ty = mods.ty()?;
            let to = mods.take("to");
            let space = mods.space();
            if ty != Ty::U(64) {
                return None;
            }
            if to {
                Op::FromGeneric(space)
            } else {
                Op::ToGeneric(space)
            }
        }
        "bra" => {
            mods.take("uni");
            Op::Bra(0)
        }
        "brx" => {
            mods.take("uni");
            mods.take("idx").then_some(Op::Brx(0))?
        }
        "ret" | "exit" => Op::Ret,
        "trap" => Op::Trap,
        "membar" | "fence" => {
            mods.words.clear();
            Op::Nothing
        }
        "bar" if mods.take("warp") => mods.take("sync").then_some(Op::WarpBar)?,
        "bar" => mods.take("sync").then_some(Op::Bar)?,
        "barrier" => {
            mods.any(&["cta", "aligned", "all"]);
            mods.take("sync").then_some(Op::Bar)?
        }
        "shfl" => {
            let of = [
                ("bfly", Shuffle::Bfly),
                ("up", Shuffle::Up),
                ("down", Shuffle::Down),
                ("idx", Shuffle::Idx),
            ];
            let shuffle = mods.choose(&of)?;
            (mods.take("sync") && mods.take("b32")).then_some(Op::Shfl(shuffle))?
        }
        "vote" => {
            let vote = mods.choose(&[
                ("all", Vote::All),
                ("any", Vote::Any),
                ("ballot", Vote::Ballot),
            ])?;
            mods.any(&["pred", "b32"]);
            mods.take("sync").then_some(Op::Vote(vote))?
        }
        "mma" => {
            let ty = match mods.words[..] {
                [
                    "sync",
                    "aligned",
                    "m16n8k16",
                    "row",
                    "col",
                    "f32",
                    "bf16",
                    "bf16",
                    "f32",
                ] => Ty::Bf16,
                [
                    "sync",
                    "aligned",
                    "m16n8k16",
                    "row",
                    "col",
                    "f32",
                    "f16",
                    "f16",
                    "f32",
                ] => Ty::F16,
                [
                    "sync",
                    "aligned",
                    "m16n8k8",
                    "row",
                    "col",
                    "f32",
                    "tf32",
                    "tf32",
                    "f32",
                ] => Ty::Tf32,
                _ => return None,
            };
            mods.words.clear();
            Op::Mma(ty)
        }
        "ldmatrix" => {
            mods.any(&["sync", "aligned", "m8n8", "shared", "shared::cta", "b16"]);
            let n = mods.choose(&[("x1", 1), ("x2", 2), ("x4", 4)])?;
            Op::LdMatrix {
                n,
                transposed: mods.take("trans"),
            }
        }
        "cp" => {
            if !mods.take("async") {
                return None;
            }
            match mods.words.first().copied()? {
                "commit_group" => {
                    mods.words.clear();
                    Op::Commit
                }
                "wait_group" => {
                    mods.words.clear();
                    Op::Wait(usize::MAX)
                }
                "wait_all" => {
                    mods.words.clear();
                    Op::Wait(0)
                }
                "ca" | "cg" => {
                    mods.any(&["ca", "cg", "global", "L2::64B", "L2::128B", "L2::256B"]);
                    mods.any(&["shared", "shared::cta"]);
                    Op::CpAsync { bytes: 0 }
                }
                _ => return None,
            }
        }
        "atom" | "red" => {
            let ty = mods.ty()?;
            mods.any(&ACCESS);
            let space = mods.space();
            let of = [
                ("add", Atom::Add),
                ("min", Atom::Min),
                ("max", Atom::Max),
                ("and", Atom::And),
                ("or", Atom::Or),
                ("xor", Atom::Xor),
                ("exch", Atom::Exch),
                ("cas", Atom::Cas),
            ];
            Op::Atom(mods.choose(&of)?, ty, space)
        }
        "prmt" => mods.take("b32").then_some(Op::Prmt)?,
        "lop3" => mods.take("b32").then_some(Op::Lop3)?,
        "bfe" => Op::Bfe(mods.ty()?),
        "bfi" => Op::Bfi(mods.ty()?),
        "shf" => {
            let left = mods.choose(&[("l", true), ("r", false)])?;
            let clamp = mods.choose(&[("clamp", true), ("wrap", false)])?;
            mods.take("b32").then_some(Op::Shf(left, clamp))?
        }
        _ => return None,
    })
}

fn compare(word: &str) -> Option<Compare> {
    Some(match word {
        "eq" => [false, true, false, false],
        "ne" => [true, false, true, false],
        "lt" | "lo" => [true, false, false, false],
        "le" | "ls" => [true, true, false, false],
        "gt" | "hi" => [false, false, true, false],
        "ge" | "hs" => [false, true, true, false],
        "equ" => [false, true, false, true],
        "neu" => [true, false, true, true],
        "ltu" => [true, false, false, true],
        "leu" => [true, true, false, true],
        "gtu" => [false, false, true, true],
        "geu" => [false, true, true, true],
        "num" => [true, true, true, false],
        "nan" => [false, false, false, true],
        _ => return None,
    })
}
