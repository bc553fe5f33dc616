//! Files of PyTorch: accepted and refused ones.

mod common;
mod hostile;
mod import;
