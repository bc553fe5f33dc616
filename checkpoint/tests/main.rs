//! Tests of checkpoints on disk.

mod folder;
