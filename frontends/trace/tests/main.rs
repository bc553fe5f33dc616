//! Traces of every format: accepted and refused ones.

mod common;
mod hostile;
mod read;
