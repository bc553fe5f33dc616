//! The lighterage command.
fn main() {}
