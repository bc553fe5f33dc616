//! Tests of the reader.

mod common;
mod docs;
mod hostile;
mod memory;
mod read;
mod write;
