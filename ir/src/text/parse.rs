//! Text to values: one function for each rule of the grammar in `docs/ir.md`, one token of
//! look-ahead.
//!
//! Statements have a fixed order, so one value has one text. Names are looked up when they are
//! read, except a state's value after the step, which a later line defines.

use super::lex::{Lexer, Token, shortened};
use super::print::runs;
use super::{File, ParseError};
use crate::graph::{Def, Graph, Output, Phase, State, StateKind, Value};
use crate::op::Op;
use crate::op::body::Step;
use crate::schedule::{
    Buffer, BufferData, Dep, Instr, InstrData, InstrKind, Loc, MemorySpace, Part, Pool, PoolData,
    Schedule, Stream, StreamData, Why,
};
use crate::table::{Id, Table};
use crate::types::{DType, TensorType};
use crate::{Attr, Body, Node, Plan, Program};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

type Result<T> = std::result::Result<T, ParseError>;

pub(super) fn graph_alone(text: &str) -> Result<Graph> {
    let mut parser = Parser {
        lexer: Lexer::new(text)?,
    };
    let (graph, _) = parser.graph()?;
    parser.end()?;
    Ok(graph)
}

pub(super) fn program_alone(text: &str) -> Result<Program> {
    let mut parser = Parser {
        lexer: Lexer::new(text)?,
    };
    let (graph, values) = parser.graph()?;
    let program = parser.program(graph, values)?;
    parser.end()?;
    Ok(program)
}

pub(super) fn file(text: &str) -> Result<File> {
    let mut parser = Parser {
        lexer: Lexer::new(text)?,
    };
    let (graph, values) = parser.graph()?;
    let file = match parser.at_word("schedule") {
        true => File::Program(parser.program(graph, values)?),
        false => File::Graph(graph),
    };
    parser.end()?;
    Ok(file)
}

/// A name with its position, so that an error can point at it.
struct Name {
    text: String,
    position: usize,
}

/// The values of a graph by their names.
type Values = HashMap<String, Value>;

struct Parser<'a> {
    lexer: Lexer<'a>,
}

// --- pieces ---

impl<'a> Parser<'a> {
    fn expected<T>(&self, what: &str) -> Result<T> {
        Err(self
            .lexer
            .error(format!("expected {what}, found {}", self.lexer.token)))
    }
    fn error_at<T>(&self, position: usize, message: impl Into<String>) -> Result<T> {
        Err(self.lexer.error_at(position, message))
    }
    fn at_word(&self, word: &str) -> bool {
        matches!(self.lexer.token, Token::Word(found) if found == word)
    }
    fn at_sign(&self, sign: char) -> bool {
        matches!(self.lexer.token, Token::Sign(found) if found == sign)
    }
    /// Skips this word if it is the next token.
    fn take_word(&mut self, word: &str) -> Result<bool> {
        let found = self.at_word(word);
        if found {
            self.lexer.advance()?;
        }
        Ok(found)
    }
    /// `sm_90`, if it stands here.
    fn architecture(&mut self) -> Result<Option<u32>> {
        let Token::Word(word) = self.lexer.token else {
            return Ok(None);
        };
        let Some(sm) = word.strip_prefix("sm_").and_then(|sm| sm.parse().ok()) else {
            return self.expected("an architecture like sm_90, or `{`");
        };
        self.lexer.advance()?;
        Ok(Some(sm))
    }
    fn take_sign(&mut self, sign: char) -> Result<bool> {
        let found = self.at_sign(sign);
        if found {
            self.lexer.advance()?;
        }
        Ok(found)
    }
    fn word(&mut self, word: &str) -> Result<()> {
        if self.take_word(word)? {
            Ok(())
        } else {
            self.expected(&format!("`{word}`"))
        }
    }
    fn sign(&mut self, sign: char) -> Result<()> {
        if self.take_sign(sign)? {
            Ok(())
        } else {
            self.expected(&format!("`{sign}`"))
        }
    }
    fn arrow(&mut self) -> Result<()> {
        match self.lexer.token {
            Token::Arrow => self.lexer.advance(),
            _ => self.expected("`->`"),
        }
    }
    fn newline(&mut self, what: &str) -> Result<()> {
        match self.lexer.token {
            Token::Newline => self.lexer.advance(),
            _ => self.expected(what),
        }
    }
    /// The end of the text; empty lines and comments may come before it.
    fn end(&mut self) -> Result<()> {
        match self.lexer.token {
            Token::End => Ok(()),
            _ => self.expected("the end of the text"),
        }
    }
    /// A bare word that is not a name: a number, a keyword.
    fn bare(&mut self, what: &str) -> Result<&'a str> {
        match self.lexer.token {
            Token::Word(word) => {
                self.lexer.advance()?;
                Ok(word)
            }
            _ => self.expected(what),
        }
    }
    /// A name, bare or quoted.
    fn name(&mut self, what: &str) -> Result<Name> {
        let position = self.lexer.position();
        let text = match &mut self.lexer.token {
            Token::Word(word) => word.to_string(),
            Token::Quoted(text) => std::mem::take(text),
            _ => return self.expected(what),
        };
        self.lexer.advance()?;
        Ok(Name { text, position })
    }
    fn value_name(&mut self) -> Result<Name> {
        if !self.take_sign('%')? {
            return self.expected("a value like %x");
        }
        self.name("a value's name")
    }
    fn number(&mut self, what: &str) -> Result<u64> {
        let position = self.lexer.position();
        let word = self.bare(what)?;
        match digits(word) {
            Some(number) => Ok(number),
            None => self.error_at(
                position,
                format!("expected {what}, found {}", shortened(word)),
            ),
        }
    }
    fn bytes(&mut self) -> Result<u64> {
        let position = self.lexer.position();
        let word = self.bare("a number of bytes like 64, 4K, 2M or 1G")?;
        let (number, shift) = match word.as_bytes().last() {
            Some(b'K') => (&word[..word.len() - 1], 10),
            Some(b'M') => (&word[..word.len() - 1], 20),
            Some(b'G') => (&word[..word.len() - 1], 30),
            _ => (word, 0),
        };
        let bytes = digits(number).and_then(|n| n.checked_mul(1 << shift));
        match bytes {
            Some(bytes) => Ok(bytes),
            None => {
                let word = shortened(word);
                self.error_at(
                    position,
                    format!("expected a number of bytes below 2^64, like 4K, found {word}"),
                )
            }
        }
    }
    /// Items between commas, at least one.
    fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let mut items = vec![item(self)?];
        while self.take_sign(',')? {
            items.push(item(self)?);
        }
        Ok(items)
    }
    /// Items between commas, in brackets.
    fn bracketed<T>(&mut self, item: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        self.sign('[')?;
        let items = if self.at_sign(']') {
            vec![]
        } else {
            self.list(item)?
        };
        if self.take_sign(']')? {
            Ok(items)
        } else {
            self.expected("`,` or `]`")
        }
    }
    fn tensor_type(&mut self) -> Result<TensorType> {
        let position = self.lexer.position();
        let word = self.bare("a type like f32[4,64]")?;
        let Some(dtype) = DType::from_name(word) else {
            return self.error_at(
                position,
                format!("expected a type like f32[4,64], found {}", shortened(word)),
            );
        };
        let shape = self.bracketed(|parser| parser.number("a size"))?;
        TensorType::new(dtype, shape).or_else(|e| self.error_at(position, e))
    }
    /// An attribute of an op. With the number of operands of a node, it may also be a body.
    fn attr(&mut self, operands: Option<usize>) -> Result<Attr> {
        let position = self.lexer.position();
        let what =
            "a number, a list like [0,1], a type, true, false, a quoted text or a body in braces";
        let word = match &mut self.lexer.token {
            Token::Quoted(text) => {
                let text = std::mem::take(text);
                self.lexer.advance()?;
                return Ok(Attr::Str(text));
            }
            Token::Sign('[') => {
                let item = |parser: &mut Self| {
                    let position = parser.lexer.position();
                    let word = parser.bare("an integer")?;
                    let integer = word.parse::<i64>().ok();
                    integer.map_or_else(
                        || {
                            parser.error_at(
                                position,
                                format!("expected an integer, found {}", shortened(word)),
                            )
                        },
                        Ok,
                    )
                };
                return Ok(Attr::Ints(self.bracketed(item)?));
            }
            Token::Sign('{') if operands.is_some() => {
                let body = self.body(operands.unwrap_or(0))?;
                return Ok(Attr::Body(Arc::new(body)));
            }
            _ => self.bare(what)?,
        };
        match attr_word(word) {
            Some(attr) => Ok(attr),
            None => self.error_at(
                position,
                format!("expected {what}, found {}", shortened(word)),
            ),
        }
    }
    /// Attributes, up to the sign that follows them.
    fn attrs(
        &mut self,
        operands: Option<usize>,
        end: char,
        then: &str,
    ) -> Result<BTreeMap<String, Attr>> {
        let mut attrs: BTreeMap<String, Attr> = BTreeMap::new();
        while !self.at_sign(end) {
            let key = self.name(&format!(
                "an attribute like key=value, or `{end}` and {then}"
            ))?;
            self.sign('=')?;
            let attr = self.attr(operands)?;
            if attrs.insert(key.text.clone(), attr).is_some() {
                return self.error_at(
                    key.position,
                    format!("the attribute {} stands twice", shortened(&key.text)),
                );
            }
        }
        Ok(attrs)
    }
    /// What a kernel over `operands` operands computes: `{%2 = add %0, %1 | %3 = relu %2 | %3}`.
    /// Bodies do not nest, so there is one level of recursion.
    fn body(&mut self, operands: usize) -> Result<Body> {
        let start = self.lexer.position();
        self.sign('{')?;
        let (mut steps, mut next) = (vec![], operands);
        loop {
            let (position, numbers) = (self.lexer.position(), self.numbers()?);
            if !self.take_sign('=')? {
                self.sign('}')?;
                return Body::new(operands, steps, numbers).or_else(|e| self.error_at(start, e));
            }
            if numbers.iter().copied().ne(next..next + numbers.len()) {
                return self.error_at(
                    position,
                    format!("expected %{next}: results are numbered in order"),
                );
            }
            next += numbers.len();
            let name = self.name("an op's name")?;
            if name.text == "fused" {
                return self.error_at(name.position, "fused may not be part of a kernel");
            }
            let inputs = if self.at_sign('%') {
                self.numbers()?
            } else {
                vec![]
            };
            let attrs = self.attrs(None, '|', "the next op or the results")?;
            let op =
                Op::from_text(&name.text, attrs).or_else(|e| self.error_at(name.position, e))?;
            steps.push(Step {
                op,
                inputs,
                outputs: numbers.len(),
            });
            self.sign('|')?;
        }
    }
    /// Values of a body: `%0, %3`
    fn numbers(&mut self) -> Result<Vec<usize>> {
        self.list(|parser| {
            parser.sign('%')?;
            let position = parser.lexer.position();
            let number = parser.number("a value's number")?;
            let small = u32::try_from(number).ok().map(|n| n as usize);
            small.map_or_else(|| parser.error_at(position, "a body has fewer values"), Ok)
        })
    }
}

/// A number of decimal digits, no sign.
fn digits(word: &str) -> Option<u64> {
    if word.bytes().all(|b| b.is_ascii_digit()) {
        word.parse().ok()
    } else {
        None
    }
}

fn attr_word(word: &str) -> Option<Attr> {
    match word {
        "true" => return Some(Attr::Bool(true)),
        "false" => return Some(Attr::Bool(false)),
        "inf" => return Some(Attr::Float(f64::INFINITY)),
        "-inf" => return Some(Attr::Float(f64::NEG_INFINITY)),
        "nan" => return Some(Attr::Float(f64::NAN)),
        _ => {}
    }
    if let Some(dtype) = DType::from_name(word) {
        return Some(Attr::Type(dtype));
    }
    if let Some(bits) = word.strip_prefix("nan.") {
        // The bits of another NaN.
        let bits = u64::from_str_radix(bits, 16).ok().map(f64::from_bits);
        return bits.filter(|x| x.is_nan()).map(Attr::Float);
    }
    let numeric = |b: u8| b.is_ascii_digit() || matches!(b, b'-' | b'.' | b'e');
    if !word.bytes().all(numeric) {
        return None;
    }
    match word.contains(['.', 'e']) {
        // Only finite numbers: a number that is too large for f64 must not become infinity
        // silently.
        true => word
            .parse::<f64>()
            .ok()
            .filter(|x| x.is_finite())
            .map(Attr::Float),
        false => word.parse().ok().map(Attr::Int),
    }
}

// --- graph ---

/// Statements are in sections; returning to an earlier section is an error.
struct Sections<T> {
    at: T,
}

impl<T: Ord + Copy> Sections<T> {
    fn enter(&mut self, parser: &Parser<'_>, section: T, order: &str) -> Result<()> {
        if section < self.at {
            return parser.error_at(
                parser.lexer.position(),
                format!("expected the order {order}"),
            );
        }
        self.at = section;
        Ok(())
    }
}

const GRAPH_ORDER: &str = "input, state, fwd | bwd | opt, output, gradient";
const SCHEDULE_ORDER: &str = "pool, stream, entry, lines i0 i1 .., exit, buffer";

impl Parser<'_> {
    fn graph(&mut self) -> Result<(Graph, Values)> {
        self.word("graph")?;
        let mut graph = Graph::new(self.name("the graph's name")?.text);
        let mut values = Values::new();
        let mut paths: HashMap<String, State> = HashMap::new();
        let mut afters: Vec<(State, Name)> = vec![];
        let mut sections = Sections { at: 0 };
        self.sign('{')?;
        self.newline("the end of the line")?;
        while !self.take_sign('}')? {
            let Token::Word(word) = self.lexer.token else {
                return self.expected("input, state, fwd, bwd, opt, output, gradient or `}`");
            };
            let phase = Phase::ALL.into_iter().find(|phase| phase.name() == word);
            match (word, phase) {
                ("input", _) => {
                    sections.enter(self, 0, GRAPH_ORDER)?;
                    self.lexer.advance()?;
                    let name = self.new_value(&values)?;
                    self.sign(':')?;
                    let ty = self.tensor_type()?;
                    let value = graph.add_input(name.clone(), ty);
                    values.insert(name, value);
                }
                ("state", _) => {
                    sections.enter(self, 1, GRAPH_ORDER)?;
                    self.lexer.advance()?;
                    self.state(&mut graph, &mut values, &mut paths, &mut afters)?;
                }
                (_, Some(phase)) => {
                    sections.enter(self, 2, GRAPH_ORDER)?;
                    self.lexer.advance()?;
                    self.node(&mut graph, &mut values, phase)?;
                }
                ("output", _) => {
                    sections.enter(self, 3, GRAPH_ORDER)?;
                    self.lexer.advance()?;
                    let name = self.name("the output's name")?.text;
                    self.sign('=')?;
                    let value = self.value(&values)?;
                    graph.outputs.push(Output { name, value });
                }
                ("gradient", _) => {
                    sections.enter(self, 4, GRAPH_ORDER)?;
                    self.lexer.advance()?;
                    let path = self.name("a state's path")?;
                    let Some(&state) = paths.get(&path.text) else {
                        return self.error_at(
                            path.position,
                            format!("there is no state {:?}", shortened(&path.text)),
                        );
                    };
                    self.sign('=')?;
                    let value = self.value(&values)?;
                    graph.gradients.push((state, value));
                }
                _ => return self.expected("input, state, fwd, bwd, opt, output, gradient or `}`"),
            }
            self.newline("the end of the line")?;
        }
        for (state, name) in afters {
            graph.states[state].after = self.lookup(&values, &name)?;
        }
        if self.lexer.token == Token::Newline {
            self.lexer.advance()?;
        }
        Ok((graph, values))
    }

    fn state(
        &mut self,
        graph: &mut Graph,
        values: &mut Values,
        paths: &mut HashMap<String, State>,
        afters: &mut Vec<(State, Name)>,
    ) -> Result<()> {
        let position = self.lexer.position();
        let what = "a state's kind: param, buffer, const, moment or rng";
        let word = self.bare(what)?;
        let Some(kind) = StateKind::ALL.into_iter().find(|kind| kind.name() == word) else {
            return self.error_at(
                position,
                format!("expected {what}, found {}", shortened(word)),
            );
        };
        let before = self.new_value(values)?;
        let state = graph.states.next_id();
        if self.lexer.token == Token::Arrow {
            self.lexer.advance()?;
            afters.push((state, self.value_name()?));
        }
        self.sign(':')?;
        let ty = self.tensor_type()?;
        let path = self.name("the state's path")?;
        if paths.insert(path.text.clone(), state).is_some() {
            return self.error_at(
                path.position,
                format!("there is a state {:?} already", shortened(&path.text)),
            );
        }
        let value = graph.add_state(before.clone(), path.text, kind, ty);
        values.insert(before, value);
        Ok(())
    }

    fn node(&mut self, graph: &mut Graph, values: &mut Values, phase: Phase) -> Result<()> {
        let module = match self.take_word("-")? {
            true => String::new(),
            false => self.name("a module's path, or `-`")?.text,
        };
        let mut names: Vec<String> = vec![];
        let positions = self.list(|parser| {
            let position = parser.lexer.position();
            names.push(parser.new_value(values)?);
            Ok(position)
        })?;
        self.sign('=')?;
        let op_name = self.name("an op's name")?;
        let operands = match self.at_sign('%') {
            true => self.list(|parser| parser.value(values))?,
            false => vec![],
        };
        let attrs = self.attrs(Some(operands.len()), ':', "the types")?;
        self.sign(':')?;
        let types_position = self.lexer.position();
        let types = self.list(|parser| Ok((parser.lexer.position(), parser.tensor_type()?)))?;
        let op = Op::from_text(&op_name.text, attrs);
        let op = op.or_else(|e| self.error_at(op_name.position, e))?;
        let results = graph.add_node(op, &operands, &names, phase, module);
        let results = results.or_else(|e| self.error_at(op_name.position, e))?;
        if types.len() != results.len() {
            let message = format!("expected {} types, found {}", results.len(), types.len());
            return self.error_at(types_position, message);
        }
        for (&value, (position, ty)) in results.iter().zip(&types) {
            let follows = &graph.values[value].ty;
            if follows != ty {
                let message = format!(
                    "expected {follows}, the type that follows from the operands, found {ty}"
                );
                return self.error_at(*position, message);
            }
        }
        for ((name, value), position) in names.into_iter().zip(results).zip(positions) {
            // Two names of one line may be equal; names of earlier lines were compared before.
            if let Some(_earlier) = values.insert(name, value) {
                return self.error_at(position, "this value is defined twice");
            }
        }
        Ok(())
    }

    /// The name of a value that no line has defined yet.
    fn new_value(&mut self, values: &Values) -> Result<String> {
        let name = self.value_name()?;
        match values.contains_key(&name.text) {
            true => self.error_at(
                name.position,
                format!("%{} is defined already", shortened(&name.text)),
            ),
            false => Ok(name.text),
        }
    }

    fn value(&mut self, values: &Values) -> Result<Value> {
        let name = self.value_name()?;
        self.lookup(values, &name)
    }

    fn lookup(&self, values: &Values, name: &Name) -> Result<Value> {
        match values.get(&name.text) {
            Some(&value) => Ok(value),
            None => self.error_at(
                name.position,
                format!("no line defines %{}", shortened(&name.text)),
            ),
        }
    }
}

// --- schedule ---

/// The names in the schedule's lines so far.
#[derive(Default)]
struct Names {
    pools: HashMap<String, Pool>,
    streams: HashMap<String, Stream>,
    buffers: HashMap<String, Buffer>,
    /// Each buffer's offset, if it has one.
    offsets: Vec<Option<u64>>,
    /// The position where each buffer is named first.
    positions: Vec<usize>,
    /// Peaks in the text of pools, with their positions.
    peaks: Vec<(Pool, u64, usize)>,
}

impl Parser<'_> {
    fn program(&mut self, graph: Graph, values: Values) -> Result<Program> {
        self.word("schedule")?;
        let mut schedule = Schedule {
            name: self.name("the schedule's name")?.text,
            ..Schedule::default()
        };
        self.word("on")?;
        schedule.device = self.name("the device's name")?.text;
        schedule.sm = self.architecture()?;
        let mut names = Names::default();
        let mut sections = Sections { at: 0 };
        self.sign('{')?;
        self.newline("the end of the line")?;
        while !self.take_sign('}')? {
            let what = "pool, stream, entry, a line like i0, exit, buffer or `}`";
            let Token::Word(word) = self.lexer.token else {
                return self.expected(what);
            };
            match word {
                "pool" => {
                    sections.enter(self, 0, SCHEDULE_ORDER)?;
                    self.lexer.advance()?;
                    self.pool(&mut schedule, &mut names)?;
                }
                "stream" => {
                    sections.enter(self, 1, SCHEDULE_ORDER)?;
                    self.lexer.advance()?;
                    let name = self.name("the stream's name")?;
                    let stream = schedule.streams.push(StreamData {
                        name: name.text.clone(),
                    });
                    if names.streams.insert(name.text, stream).is_some() {
                        return self.error_at(name.position, "this stream is declared already");
                    }
                }
                "entry" | "exit" => {
                    let entry = word == "entry";
                    sections.enter(self, if entry { 2 } else { 4 }, SCHEDULE_ORDER)?;
                    self.lexer.advance()?;
                    let value = self.value(&values)?;
                    self.sign('=')?;
                    let loc = self.loc(&mut schedule, &mut names)?;
                    if entry {
                        schedule.entry.push((value, loc))
                    } else {
                        schedule.exit.push((value, loc))
                    }
                }
                "buffer" => {
                    sections.enter(self, 5, SCHEDULE_ORDER)?;
                    self.lexer.advance()?;
                    let position = self.lexer.position();
                    let n_buffers = schedule.buffers.len();
                    let loc = self.loc(&mut schedule, &mut names)?;
                    if schedule.buffers.len() == n_buffers || loc.offset != 0 {
                        return self.error_at(
                            position,
                            "expected a buffer that no line above names: name@pool:size",
                        );
                    }
                }
                _ => {
                    let Some(number) = word
                        .strip_prefix('i')
                        .filter(|n| !n.is_empty())
                        .and_then(digits)
                    else {
                        return self.expected(what);
                    };
                    sections.enter(self, 3, SCHEDULE_ORDER)?;
                    let next = schedule.instrs.len();
                    if number != next as u64 {
                        return self.expected(&format!("the line i{next}"));
                    }
                    self.lexer.advance()?;
                    self.instr(&graph, &values, &mut schedule, &mut names)?;
                }
            }
            self.newline("the end of the line")?;
        }
        if self.lexer.token == Token::Newline {
            self.lexer.advance()?;
        }
        let plan = self.plan(&schedule, &names)?;
        Ok(Program {
            graph,
            schedule,
            plan,
        })
    }

    fn pool(&mut self, schedule: &mut Schedule, names: &mut Names) -> Result<()> {
        let name = self.name("the pool's name")?;
        let space = if self.take_word("in")? {
            self.space()?
        } else {
            MemorySpace::of_pool_named(&name.text)
        };
        let limit = if self.take_word("limit")? {
            Some(self.bytes()?)
        } else {
            None
        };
        let pool = schedule.pools.push(PoolData {
            name: name.text.clone(),
            space,
            limit,
        });
        if names.pools.insert(name.text, pool).is_some() {
            return self.error_at(name.position, "this pool is declared already");
        }
        if self.take_word("peak")? {
            let position = self.lexer.position();
            names.peaks.push((pool, self.bytes()?, position));
        }
        Ok(())
    }

    /// A pool's space, if it is not the space with the pool's name.
    fn space(&mut self) -> Result<MemorySpace> {
        let name = self.name("the pool's space")?;
        match MemorySpace::from_name(&name.text) {
            Some(space) => Ok(space),
            None => {
                let message = format!(
                    "{} is no space: expected device, device1, …, host or disk",
                    shortened(&name.text)
                );
                self.error_at(name.position, message)
            }
        }
    }

    /// `name@pool+offset:size` at the first mention of a buffer, later `name`; `+offset` is a place
    /// inside it.
    fn loc(&mut self, schedule: &mut Schedule, names: &mut Names) -> Result<Loc> {
        let name = self.name("a buffer's name")?;
        let known = names.buffers.get(&name.text).copied();
        let buffer = match (known, self.take_sign('@')?) {
            (Some(buffer), false) => buffer,
            (Some(_), true) => {
                let message = format!("a line above says where {} lies", shortened(&name.text));
                return self.error_at(name.position, message);
            }
            (None, false) => {
                let name_text = shortened(&name.text);
                let message = format!(
                    "no line above says where {name_text} lies: expected {name_text}@pool:size"
                );
                return self.error_at(name.position, message);
            }
            (None, true) => {
                let pool_name = self.name("a pool's name")?;
                let Some(&pool) = names.pools.get(&pool_name.text) else {
                    let message = format!("there is no pool {}", shortened(&pool_name.text));
                    return self.error_at(pool_name.position, message);
                };
                let offset = if self.take_sign('+')? {
                    Some(self.bytes()?)
                } else {
                    None
                };
                self.sign(':')?;
                let bytes = self.bytes()?;
                if offset.unwrap_or(0).checked_add(bytes).is_none() {
                    return self.error_at(name.position, "this buffer ends above 2^64");
                }
                let buffer = schedule.buffers.push(BufferData {
                    name: name.text.clone(),
                    pool,
                    bytes,
                });
                names.buffers.insert(name.text, buffer);
                names.offsets.push(offset);
                names.positions.push(name.position);
                buffer
            }
        };
        let offset = if self.take_sign('+')? {
            self.bytes()?
        } else {
            0
        };
        Ok(Loc { buffer, offset })
    }

    fn instr(
        &mut self,
        graph: &Graph,
        values: &Values,
        schedule: &mut Schedule,
        names: &mut Names,
    ) -> Result<()> {
        let stream_name = self.name("a stream's name")?;
        let Some(&stream) = names.streams.get(&stream_name.text) else {
            let message = format!("there is no stream {}", shortened(&stream_name.text));
            return self.error_at(stream_name.position, message);
        };
        let position = self.lexer.position();
        let words = Why::ALL.map(Why::name).join(", ");
        let word = self.bare(&format!("one of {words}"))?;
        let Some(why) = Why::from_name(word) else {
            return self.error_at(
                position,
                format!("expected one of {words}, found {}", shortened(word)),
            );
        };
        let mut is_run = runs(why);
        if self.take_sign(':')? {
            is_run = match (self.take_word("run")?, self.take_word("copy")?) {
                (true, _) => true,
                (_, true) => false,
                _ => return self.expected("`run` or `copy`"),
            };
        }
        let kind = if is_run {
            self.run(graph, values, schedule, names)?
        } else {
            self.copy(schedule, names)?
        };
        let mut after = vec![];
        if self.take_word("after")? {
            while after.is_empty()
                || self.at_sign('^')
                || matches!(self.lexer.token, Token::Word(_))
            {
                after.push(self.dep()?);
            }
        }
        schedule.instrs.push(InstrData {
            kind,
            stream,
            after,
            why,
        });
        Ok(())
    }

    fn run(
        &mut self,
        graph: &Graph,
        values: &Values,
        schedule: &mut Schedule,
        names: &mut Names,
    ) -> Result<InstrKind> {
        let name = self.name("a node's name: that of its first result")?;
        let node = values
            .get(&name.text)
            .and_then(|&value| first_result(graph, value));
        let Some(node) = node else {
            let message = format!("no node has the first result %{}", shortened(&name.text));
            return self.error_at(name.position, message);
        };
        let args = match self.lexer.token {
            Token::Arrow => vec![],
            _ => self.list(|parser| parser.loc(schedule, names))?,
        };
        self.arrow()?;
        let none = matches!(self.lexer.token, Token::Newline)
            || self.at_word("scratch")
            || self.at_word("part")
            || self.at_word("after");
        let outs = if none {
            vec![]
        } else {
            self.list(|parser| parser.loc(schedule, names))?
        };
        let scratch = if self.take_word("scratch")? {
            Some(self.loc(schedule, names)?)
        } else {
            None
        };
        let part = match self.take_word("part")? {
            true => Some(Part {
                start: self.amount("start")?,
                end: self.amount("end")?,
            }),
            false => None,
        };
        Ok(InstrKind::Run {
            node,
            args,
            outs,
            scratch,
            part,
        })
    }

    /// `NAME=AMOUNT`.
    fn amount(&mut self, name: &str) -> Result<u64> {
        let position = self.lexer.position();
        if !self.take_word(name)? {
            return self.error_at(position, format!("expected `{name}=`"));
        }
        self.sign('=')?;
        self.bytes()
    }

    fn copy(&mut self, schedule: &mut Schedule, names: &mut Names) -> Result<InstrKind> {
        let src = self.loc(schedule, names)?;
        self.arrow()?;
        let dst = self.loc(schedule, names)?;
        let bytes = match self.take_word("bytes")? {
            true => {
                self.sign('=')?;
                self.bytes()?
            }
            false => schedule.buffers[dst.buffer].bytes,
        };
        Ok(InstrKind::Copy { src, dst, bytes })
    }

    fn dep(&mut self) -> Result<Dep> {
        let previous = self.take_sign('^')?;
        let position = self.lexer.position();
        let word = self.bare("a line like i3 or ^i3")?;
        let number = word
            .strip_prefix('i')
            .filter(|n| !n.is_empty())
            .and_then(digits);
        match number.and_then(|n| u32::try_from(n).ok()) {
            Some(number) => Ok(Dep {
                instr: Instr::new(number as usize),
                previous,
            }),
            None => self.error_at(
                position,
                format!("expected a line like i3 or ^i3, found {}", shortened(word)),
            ),
        }
    }

    /// The plan, if offsets or peaks were given: then every buffer needs an offset.
    fn plan(&self, schedule: &Schedule, names: &Names) -> Result<Option<Plan>> {
        if names.peaks.is_empty() && names.offsets.iter().all(Option::is_none) {
            return Ok(None);
        }
        let mut offset = Table::new();
        for (given, &position) in names.offsets.iter().zip(&names.positions) {
            match given {
                Some(given) => offset.push(*given),
                None => {
                    return self.error_at(
                        position,
                        "this buffer has no offset: expected name@pool+offset:size",
                    );
                }
            };
        }
        let plan = Plan::new(schedule, offset);
        for &(pool, given, position) in &names.peaks {
            if given != plan.peak[pool] {
                let message = format!(
                    "the buffers of this pool end at {}, not at {given}",
                    plan.peak[pool]
                );
                return self.error_at(position, message);
            }
        }
        Ok(Some(plan))
    }
}

fn first_result(graph: &Graph, value: Value) -> Option<Node> {
    match graph.values[value].def {
        Def::Node(node, 0) => Some(node),
        _ => None,
    }
}
