//! Files of PyTorch: those that are read, and those that are refused.

mod common;
mod hostile;
mod import;
