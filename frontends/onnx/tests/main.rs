//! Tests of the reader.

mod common;
mod docs;
mod hostile;
mod read;
mod write;
