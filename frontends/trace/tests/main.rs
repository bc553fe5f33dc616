//! Traces of every format: those that are read, and those that are refused.

mod common;
mod hostile;
mod read;
