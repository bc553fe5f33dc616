//! What the tests share: a generator of graphs and decisions, and a plain evaluator.

pub mod forced;
pub mod generate;
