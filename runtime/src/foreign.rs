//! Ops that the runtime has no kernel for. A program that has functions for them gives the machine
//! one [`Foreign`], which computes their launches: the Python package does, with PyTorch's.
//!
//! Such an op is an `extern` of the language. Its kernel in an artifact has no code and four
//! attributes: the operator's `name` and the call's `node` where they were traced, whether the op
//! is `pure`, and the `types` of the results. What the function allocates is no part of the plan.

use crate::kernel::Tensor;
use crate::machine::{Holder, Lent};
use crate::memory;

/// Functions of the program that runs a machine.
pub trait Foreign: Send + Sync {
    /// Computes one launch: reads the operands and writes every element of the results, which
    /// overlap nothing. It is called on the thread of the launch's stream, possibly on two at the
    /// same time, and may touch the tensors until it returns. The error is for the user.
    fn compute(&self, call: &ForeignCall<'_>) -> Result<(), String>;
}

/// A launch for [`Foreign`].
#[derive(Clone, Copy, Debug)]
pub struct ForeignCall<'a> {
    /// The operator's name where it was traced.
    pub name: &'a str,
    /// The call's name there.
    pub node: &'a str,
    /// Operands, row-major.
    pub ins: &'a [Lent],
    /// Results, row-major.
    pub outs: &'a [Lent],
}

impl ForeignCall<'_> {
    /// A copy of operand `i`'s bytes. Panics if there is none, or if it is in a GPU's memory.
    pub fn read(&self, i: usize) -> Vec<u8> {
        let tensor = on_host(&self.ins[i]);
        let mut bytes = vec![0; tensor.bytes];
        memory::read(tensor, &mut bytes);
        bytes
    }
    /// Writes result `j`. Panics if there is none, if it has another number of bytes, or if it is
    /// in a GPU's memory.
    pub fn write(&self, j: usize, bytes: &[u8]) {
        memory::write(on_host(&self.outs[j]), bytes);
    }
}

/// A tensor whose address is the host's.
fn on_host(lent: &Lent) -> &Tensor {
    assert_eq!(
        lent.holder(),
        Holder::Host,
        "bytes of a GPU's memory should be copied by its driver"
    );
    lent.tensor()
}
