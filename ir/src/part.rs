//! Parts of nodes: the elements that one line computes, and the bytes of values that it touches.

/// Elements `start..end` of a node whose results have an element for each of its operands'. They
/// are counted in memory order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Part {
    /// The first element.
    pub start: u64,
    /// One past the last element.
    pub end: u64,
}

impl Part {
    /// The number of elements.
    pub fn len(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The bytes of a value that a line touches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// The first byte, from the value's start.
    pub start: u64,
    /// How many.
    pub bytes: u64,
}
