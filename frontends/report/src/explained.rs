//! What was decided about the tensors of a module, as a table.

use crate::size::{bytes, short};
use ir::{Graph, Value};
use passes::decide::Problem;
use passes::explain;
use passes::pipeline::Compiled;
use std::fmt::Write;

/// Tensors that are listed.
const LISTED: usize = 60;

/// A value of a module, in a line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// What it is to the step.
    pub class: &'static str,
    /// What was decided about it.
    pub what: String,
}

/// A row for each value.
pub fn rows(compiled: &Compiled, problem: &Problem<'_>, values: &[Value]) -> Vec<Row> {
    let row = |&value: &Value| {
        let data = &problem.graph.values[value];
        Row {
            name: data.name.clone(),
            bytes: data.ty.bytes(),
            class: explain::class(problem.graph, value).name(),
            what: explain::decided(&compiled.decided.decisions, problem, value),
        }
    };
    values.iter().map(row).collect()
}

/// The rows as text, largest first.
pub fn table(rows: &[Row]) -> String {
    let mut sorted: Vec<&Row> = rows.iter().collect();
    sorted.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    let listed = || sorted.iter().take(LISTED);
    let width = listed().map(|r| r.name.chars().count()).max().unwrap_or(0);
    let mut out = String::new();
    for row in listed() {
        let (name, size) = (&row.name, short(row.bytes));
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "  %{name:<width$}  {size:>10}  {:<10}  {}",
            row.class, row.what
        );
    }
    if LISTED < sorted.len() {
        let rest: u64 = sorted[LISTED..].iter().map(|r| r.bytes).sum();
        let _ = writeln!(out, "  and {} more, {}", sorted.len() - LISTED, bytes(rest));
    }
    out + "\nname one of them for its figures\n"
}

/// The path that the graph has for a parameter that has several, if `asked` is one of them.
pub fn known_path<'a>(tied: &'a [Vec<String>], graph: &Graph, asked: &str) -> Option<&'a str> {
    let mut groups = tied.iter();
    let group = groups.find(|group| group.iter().any(|path| path == asked))?;
    let mut paths = group.iter().map(String::as_str);
    paths.find(|path| graph.states.values().any(|state| state.path == *path))
}
