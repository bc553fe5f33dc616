//! The document docs/papers.md: each figure and table of five papers that can be computed or
//! simulated, the paper's numbers beside ours. `make papers` writes it; a test compares the
//! sections that are the same on every machine.
//!
//! Nothing here was measured on a GPU. A section says whether it is computed from formulas,
//! simulated, or timed on the machine that wrote the document.

pub mod allocation;
pub mod backward;
pub mod estimates;
pub mod layouts;
mod offloading;
mod runs;
pub mod systems;

use std::fmt::Write;

/// Where a section's numbers come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Formulas.
    Computed,
    /// A simulator, or a planner with predicted times.
    Simulated,
    /// Clocks: the numbers differ between machines.
    Timed,
}

/// A figure or a table of a paper.
pub struct Section {
    /// Its name on the command line.
    pub name: &'static str,
    /// The figure or table, and what it shows.
    pub title: &'static str,
    /// Where its numbers come from.
    pub kind: Kind,
    /// The command of the product that gives them too, if there is one.
    pub command: Option<&'static str>,
    /// The tables.
    pub body: fn() -> String,
    /// What differs from the paper, and why.
    pub differs: &'static str,
    /// True if it takes less than half a second, so that each run of the tests compares it.
    pub quick: bool,
}

/// A paper with its sections.
pub struct Paper {
    /// Its title.
    pub title: &'static str,
    /// What its sections have in common.
    pub about: &'static str,
    /// Its figures and tables.
    pub sections: Vec<Section>,
}

/// All papers.
pub fn papers() -> Vec<Paper> {
    vec![
        layouts::paper(),
        offloading::paper(),
        allocation::paper(),
        estimates::paper(),
        backward::paper(),
    ]
}

/// A section as Markdown.
pub fn print(section: &Section) -> String {
    let kind = match section.kind {
        Kind::Computed => "Computed from formulas",
        Kind::Simulated => "Simulated",
        Kind::Timed => "Timed on the machine that wrote this page",
    };
    let mut command = format!("`make papers ONLY={}`", section.name);
    if let Some(other) = section.command {
        // Writing to a String cannot fail.
        let _ = write!(command, ", `{other}`");
    }
    let Section {
        title,
        body,
        differs,
        ..
    } = section;
    format!(
        "### {title}\n\n{kind}: {command}.\n\n{}\n{differs}\n",
        body()
    )
}

const HEAD: &str = "\
# The papers, and ours

`make papers` writes this page. For each figure and table of five papers that can be computed or
simulated, it has the paper's numbers beside ours, the command, and what differs. No GPU was used:
simulated means that a planner or a simulator predicts the numbers from a description of the
machine.
";

/// The whole document.
pub fn document() -> String {
    let mut text = HEAD.to_string();
    for paper in papers() {
        text += &format!("\n## {}\n\n{}\n", paper.title, paper.about);
        for section in &paper.sections {
            text += &format!("\n{}", print(section));
        }
    }
    text
}
