//! One of the runtime's own kernels with its tensors, resolved to memory when an artifact is
//! loaded, so that a step needs no look-up and no allocation.

use crate::kernel::{Call, Tensor};
use crate::kernels::{self, Cut, KernelError};
use crate::team::{Parts, Team};
use artifact::Attr;
use std::sync::Arc;

/// A kernel and what it runs on.
#[derive(Clone)]
pub(crate) struct Launch {
    kernel: &'static kernels::Kernel,
    attrs: Arc<[(String, Attr)]>,
    ins: Box<[Tensor]>,
    outs: Box<[Tensor]>,
    scratch: Option<Tensor>,
    cut: Cut,
}

impl Launch {
    /// A launch of a checked kernel; the caller is responsible for the tensors, see [`Call::new`].
    pub(crate) fn new(
        kernel: &'static kernels::Kernel,
        attrs: Arc<[(String, Attr)]>,
        ins: Box<[Tensor]>,
        outs: Box<[Tensor]>,
        scratch: Option<Tensor>,
    ) -> Launch {
        let cut = kernel.cut(&Call::new(&attrs, &ins, &outs, scratch.as_ref()));
        Launch {
            kernel,
            attrs,
            ins,
            outs,
            scratch,
            cut,
        }
    }
    /// Has it find an operand, or a result, elsewhere from now on; the caller is responsible as in
    /// [`Launch::new`].
    pub(crate) fn point(&mut self, operand: usize, to: *mut u8) {
        let mut all = self.ins.iter_mut().chain(&mut self.outs);
        let tensor = all.nth(operand).expect("a launch should have its operands");
        tensor.data = to;
    }
    fn call(&self) -> Call<'_> {
        Call::new(&self.attrs, &self.ins, &self.outs, self.scratch.as_ref())
    }
    /// Makes this thread's workspace for the launch.
    pub(crate) fn prepare(&self) {
        // If this fails, the kernel reports it when it runs.
        let _ = self.kernel.prepare(&self.call());
    }
    /// True if threads can share it.
    pub(crate) fn is_split(&self) -> bool {
        self.cut.parts(2) > 1
    }
    /// Runs it: in parts on a team if there is one and the kernel can be cut, else as a whole.
    pub(crate) fn run(self: &Arc<Self>, team: Option<&Team>) -> Result<(), KernelError> {
        let parts = team.map_or(1, |team| self.cut.parts(team.threads()));
        match team {
            Some(team) if parts > 1 => {
                self.kernel.begin(&self.call())?;
                team.run(self.clone(), parts)?;
                self.kernel.end(&self.call())
            }
            _ => self.kernel.run(&self.call()),
        }
    }
}

impl Launch {
    /// Runs it in parts of `lengths` aligned units, in turn, the last part first. Returns the
    /// number of parts.
    pub(crate) fn run_in_parts(&self, lengths: &[usize]) -> Result<usize, KernelError> {
        let (units, align) = (self.cut.units, self.cut.align);
        let mut starts = vec![0];
        for length in lengths.iter().cycle() {
            let next = starts[starts.len() - 1] + length.max(&1) * align;
            if next >= units {
                break;
            }
            starts.push(next);
        }
        if starts.len() == 1 {
            return self.kernel.run(&self.call()).map(|()| 1);
        }
        self.kernel.begin(&self.call())?;
        let mut end = units;
        for &start in starts.iter().rev() {
            self.kernel.run_part(&self.call().only(units, start..end))?;
            end = start;
        }
        self.kernel.end(&self.call())?;
        Ok(starts.len())
    }
}

impl Parts for Launch {
    fn run(&self, part: usize, parts: usize) -> Result<(), KernelError> {
        self.kernel
            .run_part(&self.call().only(self.cut.units, self.cut.part(part, parts)))
    }
}
