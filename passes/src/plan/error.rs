//! Why there is no program.

use super::options::Planner;
use std::fmt;

/// Why there is no program.
#[derive(Clone, PartialEq, Debug)]
pub enum Error {
    /// The user's graph or options.
    Input(String),
    /// No plan fits.
    Infeasible(Box<Infeasible>),
    /// A pass broke the program: our fault. The text has the findings under their lines.
    Broken {
        /// The pass.
        pass: &'static str,
        /// How many findings there are, and the first.
        summary: String,
        /// The program, with all findings.
        text: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Input(message) => f.write_str(message),
            Error::Infeasible(infeasible) => infeasible.fmt(f),
            Error::Broken { pass, summary, .. } => {
                write!(
                    f,
                    "pass {pass} left a program that is not right ({summary}); this is a bug of \
                     lighterage"
                )
            }
        }
    }
}

impl std::error::Error for Error {}

/// No plan fits.
#[derive(Clone, PartialEq, Debug)]
pub struct Infeasible {
    /// The budget, bytes.
    pub budget: u64,
    /// The smallest budget that would do, bytes.
    pub smallest: u64,
    /// The line of the smallest plan that needs most.
    pub line: String,
    /// What is in memory there: name, bytes; largest first.
    pub live: Vec<(String, u64)>,
    /// `device` or `host`.
    pub pool: String,
    /// Who decided.
    pub planner: Planner,
}

impl fmt::Display for Infeasible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let largest: Vec<String> = self
            .live
            .iter()
            .take(6)
            .map(|(name, bytes)| format!("{name} {bytes}"))
            .collect();
        write!(
            f,
            "does not fit: {} needs {} bytes at `{}`; the budget is {} bytes. Largest there: {}. \
             `--budget {}` fits",
            self.pool,
            self.smallest,
            self.line,
            self.budget,
            largest.join(", "),
            self.smallest
        )
    }
}
