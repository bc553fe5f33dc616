//! Plans for people: the page of `plan --report`, the curve of step time against budget, and sizes
//! and times as text. The command and the Python package show the same.
//!
//! Nothing is decided or measured here: everything is read from a compiled step.

pub mod curve;
pub mod explained;
pub mod module;
pub mod page;
pub mod size;
pub mod svg;
