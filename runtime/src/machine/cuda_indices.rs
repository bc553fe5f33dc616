//! Indices that are out of range, on a device.
//!
//! Kernels of a device do not stop for a wrong index: they read NaN for it and write nothing. So
//! before each launch that has indices among its operands, a small kernel looks at them. It notes
//! what it finds in pinned memory, which the host reads when it waits for the stream. A step
//! without wrong indices writes nothing there.

use super::backend::{CommandError, CommandId, Launch};
use super::cuda_graphs::Start;
use super::host::put;
use crate::cuda::{
    Arguments, Device, DriverError, Function, Grid, Module, ModuleError, Pinned, Stream,
};
use crate::kernels::{self, IndexOperand, Signature};
use crate::sync::unpoisoned;
use artifact::{Attr, DType};
use std::sync::{Arc, Mutex};

/// The kernel's text, for indices of either width.
const PTX: &str = include_str!("../cuda/indices.ptx");
/// Threads of a block, as in the text.
const THREADS: u32 = 256;
/// The most blocks: each thread of them looks at one index of 2^16, which is a large batch.
const MOST_BLOCKS: u64 = 256;
/// Bytes that a block may write: the smallest wrong index and the largest.
const BLOCK_BYTES: usize = 16;

/// What is looked at.
pub(super) struct Indices {
    checks: Vec<Check>,
    /// By the command's number: which checks precede it.
    by_command: Vec<Option<Vec<usize>>>,
    /// What the device finds, and its kernels; `None` until it is started.
    device: Option<OnDevice>,
}

/// An operand of a launch.
struct Check {
    command: CommandId,
    op: &'static kernels::Kernel,
    what: IndexOperand,
    is_wide: bool,
    address: u64,
    n: u64,
    /// Its first block's bytes in what the device finds.
    found: usize,
}

/// Arguments whose addresses may change between steps.
type Changing = Mutex<Arc<Arguments>>;

struct OnDevice {
    found: Pinned,
    launches: Vec<(Function, Grid, Changing)>,
}

impl Check {
    fn blocks(&self) -> u32 {
        self.n.div_ceil(THREADS.into()).clamp(1, MOST_BLOCKS) as u32
    }

    fn launch(&self, functions: &[Function; 2], found: usize) -> (Function, Grid, Changing) {
        let IndexOperand { size, ignored, .. } = self.what;
        let (low, span) = match self.what.from_end {
            true => ((size as i64).wrapping_neg(), 2 * size),
            false => (0, size),
        };
        // An index that is right is no loss.
        let ignored = ignored.unwrap_or(0);
        let address = (found + self.found) as u64;
        let arguments = [
            self.address,
            self.n,
            low as u64,
            span,
            ignored as u64,
            address,
        ];
        let grid = Grid {
            blocks: self.blocks(),
            threads: THREADS,
            shared_bytes: 0,
        };
        let function = functions[usize::from(self.is_wide)].clone();
        (
            function,
            grid,
            Mutex::new(Arc::new(Arguments::new(arguments))),
        )
    }
}

/// The text for 32-bit or 64-bit indices.
fn text(is_wide: bool) -> String {
    let (width, shift) = if is_wide { ("64", "3") } else { ("32", "2") };
    PTX.replace("WIDTH", width).replace("SHIFT", shift)
}

impl Indices {
    pub(super) fn new() -> Indices {
        Indices {
            checks: vec![],
            by_command: vec![],
            device: None,
        }
    }

    /// Adds what a launch of an op has to look at; `address` gives where an operand lies.
    pub(super) fn add(
        &mut self,
        command: CommandId,
        (op, attrs): (&str, &[(String, Attr)]),
        launch: &Launch<'_>,
        address: impl Fn(usize) -> u64,
    ) {
        let Some(op) = kernels::find(op) else {
            return;
        };
        let signature = Signature {
            attrs,
            ins: launch.ins,
            outs: launch.outs,
            // What the device's kernel needs is not what the processor's does.
            scratch: u64::MAX,
        };
        let mut own = vec![];
        for what in op.index_operands(&signature) {
            let operand = &launch.ins[what.operand];
            let n = operand.shape.iter().product();
            if n > 0 {
                own.push(self.checks.len());
                self.checks.push(Check {
                    command,
                    op,
                    what,
                    is_wide: operand.dtype == DType::I64,
                    address: address(what.operand),
                    n,
                    found: 0,
                });
            }
        }
        if !own.is_empty() {
            put(&mut self.by_command, command, own);
        }
    }

    /// Loads what looks at indices, if there are any.
    pub(super) fn start(&mut self, device: &Device) -> Result<(), ModuleError> {
        let mut bytes = 0;
        for check in &mut self.checks {
            check.found = bytes;
            bytes += BLOCK_BYTES * check.blocks() as usize;
        }
        if bytes == 0 {
            return Ok(());
        }
        let function = |is_wide| {
            let module: Arc<Module> = Module::load(device, text(is_wide).as_bytes())?;
            let name = if is_wide { "indices_64" } else { "indices_32" };
            module.function(name, 0)
        };
        let functions = [function(false)?, function(true)?];
        let mut found = Pinned::new(device, bytes)?;
        // No block has found anything: its smallest is above its largest.
        for block in 0..bytes / BLOCK_BYTES {
            let nothing = [i64::MAX.to_le_bytes(), i64::MIN.to_le_bytes()].concat();
            found.write(block * BLOCK_BYTES, &nothing);
        }
        let at = found.address();
        let launches = self.checks.iter().map(|check| check.launch(&functions, at));
        self.device = Some(OnDevice {
            launches: launches.collect(),
            found,
        });
        Ok(())
    }

    /// Before a launch: looks at its indices.
    pub(super) fn submit(&self, stream: &Stream, command: CommandId) -> Result<(), DriverError> {
        let (Some(device), Some(own)) = (&self.device, self.of(command)) else {
            return Ok(());
        };
        own.iter().try_for_each(|&check| {
            let (function, grid, arguments) = &device.launches[check];
            stream.launch(function, *grid, &unpoisoned(arguments))
        })
    }

    /// What [`Indices::submit`] starts.
    pub(super) fn starts(&self, command: CommandId) -> impl Iterator<Item = Start<'_>> {
        let own = self.of(command).map_or(&[][..], Vec::as_slice);
        let launches = self.device.iter().flat_map(|device| &device.launches);
        let launches: Vec<_> = launches.collect();
        own.iter().map(move |&check| {
            let (function, grid, arguments) = launches[check];
            (function, *grid, unpoisoned(arguments).clone())
        })
    }

    /// Says where an operand of a launch lies from now on.
    pub(super) fn point(&self, command: CommandId, operand: usize, to: u64) {
        let (Some(device), Some(own)) = (&self.device, self.of(command)) else {
            return;
        };
        let own = own
            .iter()
            .filter(|&&i| self.checks[i].what.operand == operand);
        for &i in own {
            let mut arguments = unpoisoned(&device.launches[i].2);
            let rest = arguments.values()[1..].iter().copied();
            *arguments = Arc::new(Arguments::new(std::iter::once(to).chain(rest)));
        }
    }

    fn of(&self, command: CommandId) -> Option<&Vec<usize>> {
        self.by_command.get(command.0)?.as_ref()
    }

    /// The first command that had a wrong index, of those that the device has run.
    pub(super) fn found(&self) -> Result<(), CommandError> {
        let Some(device) = &self.device else {
            return Ok(());
        };
        self.checks
            .iter()
            .try_for_each(|check| match check.wrong(&device.found) {
                None => Ok(()),
                Some(index) => Err(CommandError {
                    command: Some(check.command),
                    ..check.op.wrong_index(&check.what, index).into()
                }),
            })
    }
}

impl Check {
    /// A wrong index, if there was one: the largest, or if none is too large, the smallest.
    fn wrong(&self, found: &Pinned) -> Option<i64> {
        let (mut smallest, mut largest) = (i64::MAX, i64::MIN);
        for block in 0..self.blocks() as usize {
            let words = [0, 8].map(|word| {
                let mut bytes = [0; 8];
                found.read(self.found + BLOCK_BYTES * block + word, &mut bytes);
                i64::from_le_bytes(bytes)
            });
            smallest = smallest.min(words[0]);
            largest = largest.max(words[1]);
        }
        let is_above = largest >= 0 && largest as u64 >= self.what.size;
        match smallest <= largest {
            true if is_above => Some(largest),
            true => Some(smallest),
            false => None,
        }
    }
}
