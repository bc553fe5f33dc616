//! The text form: every level prints, and printed text parses back to an equal value. The grammar
//! is in `docs/ir.md`.
//!
//! Before: any value prints, also a broken one, so a finding can be shown under its line. After: a
//! value that [`verify`](crate::verify) accepts parses back to its compact form
//! ([`Graph::compact`], [`Program::compact`]). Text has names where tables have ids. So ids are
//! numbered in the order of the text, and rows that no line mentions are dropped.
//!
//! The parser reads one token at a time, in linear time and without recursion. It refuses text
//! whose types do not follow from the op's shape rule, so an error in a dump is found at its place.
//! Everything else is left to `verify`.

mod compact;
mod lex;
mod parse;
mod print;

pub use compact::Moved;

use crate::finding::Finding;
use crate::graph::Graph;
use crate::schedule::{Instr, Schedule};
use crate::{Attr, Op, Program};
use std::fmt;

/// The content of a file.
#[derive(Clone, PartialEq, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "one is made for each file; a Box would be in every reader's way"
)]
pub enum File {
    /// A graph block.
    Graph(Graph),
    /// A graph block and a schedule block.
    Program(Program),
}

impl File {
    /// The graph of either.
    pub fn graph(&self) -> &Graph {
        match self {
            File::Graph(graph) => graph,
            File::Program(program) => &program.graph,
        }
    }
}

/// Where text does not follow the grammar, and what was expected there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParseError {
    /// The line, from 1.
    pub line: usize,
    /// The character in the line, from 1.
    pub column: usize,
    /// What was expected, and what was found.
    pub message: String,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "line {}, column {}: {}",
            self.line, self.column, self.message
        )
    }
}

impl std::error::Error for ParseError {}

/// The text of a graph.
pub fn print_graph(graph: &Graph) -> String {
    print::graph(graph, &[])
}

/// The text of a program: its graph, then its schedule, with addresses if it has a plan.
pub fn print_program(program: &Program) -> String {
    print::program(program, &|_| None, &[])
}

/// The same, with a comment after each line for which `comment` has one: the simulator's times.
pub fn print_program_with(program: &Program, comment: &dyn Fn(Instr) -> Option<String>) -> String {
    print::program(program, comment, &[])
}

/// The text of a graph, each finding under its line as `; error: message`. Findings about lines
/// that are not printed are under the first line.
pub fn print_graph_with_findings(graph: &Graph, findings: &[Finding]) -> String {
    print::graph(graph, findings)
}

/// The text of a program, each finding under its line as `; error: message`.
pub fn print_program_with_findings(program: &Program, findings: &[Finding]) -> String {
    print::program(program, &|_| None, findings)
}

/// The text of one line of a schedule, without its indent. Buffers have names, but no places.
pub fn print_instr(graph: &Graph, schedule: &Schedule, instr: Instr) -> String {
    print::instr_alone(graph, schedule, instr)
}

/// An op's name and attributes as in a node's line.
pub fn print_op(op: &Op) -> String {
    print::op_alone(op)
}

/// An attribute's value as in a node's line.
pub fn print_attr(attr: &Attr) -> String {
    print::attr_text(attr)
}

/// Reads a graph; only comments may follow it.
pub fn parse_graph(text: &str) -> Result<Graph, ParseError> {
    parse::graph_alone(text)
}

/// Reads a graph and its schedule.
pub fn parse_program(text: &str) -> Result<Program, ParseError> {
    parse::program_alone(text)
}

/// Reads a graph and, if one follows, its schedule.
pub fn parse_file(text: &str) -> Result<File, ParseError> {
    parse::file(text)
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&print_graph(self))
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&print_program(self))
    }
}

/// True for characters of a bare word.
fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'\'' | b'$' | b'/' | b'-')
}

/// Words that may follow a buffer's name in a line; a name that is one of them is quoted. `-` is
/// the empty module.
const RESERVED: [&str; 4] = ["after", "scratch", "part", "-"];
