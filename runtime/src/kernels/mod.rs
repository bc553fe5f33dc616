//! Plain Rust kernels, one function an op.
