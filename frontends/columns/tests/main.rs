//! Tests of the crate: `columns`, files that other programs wrote; `hostile`, files that are cut
//! or changed.

mod columns;
mod common;
mod hostile;
