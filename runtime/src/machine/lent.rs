//! Tensors of a machine that the host reads and writes where they lie, without a copy.

use crate::kernel::Tensor;
use std::sync::Arc;

/// A tensor that the host reaches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Port<'a> {
    /// An input, by its name.
    Input(&'a str),
    /// An output, by its name.
    Output(&'a str),
    /// A state, by its path.
    State(&'a str),
}

/// Whose memory a lent tensor lies in, and so who can use its address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Holder {
    /// This process.
    Host,
    /// The GPU of that number, from 0.
    Gpu(u32),
}

/// A tensor in a pool, lent to the host. The pool's memory stays until the last loan has ended,
/// even if the machine is dropped before.
///
/// Its bytes may be touched only when [`Machine`](super::Machine) would let the host read or write
/// the tensor: for a state while no step runs; for an input or an output also after
/// [`Machine::wait_io`](super::Machine::wait_io); for an operand or a result of a
/// [`Foreign`](crate::Foreign), during its call. Whoever turns its address into a reference is
/// responsible for that.
#[derive(Clone)]
pub struct Lent {
    tensor: Tensor,
    holder: Holder,
    _memory: Arc<dyn Send + Sync>,
}

impl Lent {
    pub(crate) fn new((tensor, holder): (Tensor, Holder), memory: Arc<dyn Send + Sync>) -> Lent {
        Lent {
            tensor,
            holder,
            _memory: memory,
        }
    }

    /// Where it lies, its element type and its shape; row-major.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Says that it lies elsewhere from now on.
    pub(crate) fn point(&mut self, to: *mut u8) {
        self.tensor.data = to;
    }

    /// Whose memory that is.
    pub fn holder(&self) -> Holder {
        self.holder
    }
}

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.tensor.fmt(f)
    }
}
