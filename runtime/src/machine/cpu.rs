//! The CPU backend: every pool is host memory, each command is done when its call returns, and
//! copies between a device's pool and the host's go over a [`Link`] that can be slowed. A pool on a
//! disk is a file, and copies read and write it.

use super::backend::{Backend, CommandError, CommandId, Copy, Launch, LentPlace, StreamId};
use super::host::{Ends, HostWork, LentEnds, put};
use super::lent::Holder;
use super::options::Options;
use crate::Error;
use crate::disk::{DiskCopy, Disks};
use crate::foreign::Foreign;
use crate::kernel::Tensor;
use crate::link::{Link, Pace, Way};
use crate::memory::{self, Borrowed};
use crate::sync::unpoisoned;
use artifact::{Kernel, MemorySpace, Object, Operand, Place, Pool, Range};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Host memory and threads.
pub(crate) struct Cpu {
    host: HostWork,
    /// The space of each pool.
    spaces: Vec<MemorySpace>,
    disks: Disks,
    /// By the command's number.
    copies: Vec<Option<Mutex<Transfer>>>,
    /// What reads or writes a tensor of the caller.
    lent: LentEnds,
    link: Link,
    /// See [`Backend::is_inline`].
    is_inline: bool,
    halted: AtomicBool,
}

/// A copy, resolved.
enum Transfer {
    /// Within memory. `way` is `None` for a copy within a space, which takes no link.
    Memory { ends: Arc<Ends>, way: Option<Way> },
    /// From a pool on a disk, or to one.
    Disk(DiskCopy),
}

impl Cpu {
    /// A backend without pools. `foreign` computes what has no kernel. An error if the options ask
    /// for a link that cannot be played.
    pub(crate) fn new(options: &Options, foreign: Option<Arc<dyn Foreign>>) -> Result<Cpu, Error> {
        let mut host = HostWork::new(options.team());
        host.call(foreign);
        Ok(Cpu {
            host,
            spaces: Vec::new(),
            disks: Disks::default(),
            copies: Vec::new(),
            lent: LentEnds::default(),
            link: Link::new(pace(options)?),
            is_inline: false,
            halted: AtomicBool::new(false),
        })
    }

    /// The same with pools on disks as files in a folder.
    pub(crate) fn with_disk(self, folder: Option<&Path>) -> Cpu {
        Cpu {
            disks: Disks::new(folder),
            ..self
        }
    }

    fn way(&self, copy: &Copy) -> Option<Way> {
        let is_device =
            |place: Place| matches!(self.spaces[place.pool as usize], MemorySpace::Device(_));
        match (is_device(copy.src), is_device(copy.dst)) {
            (false, true) => Some(Way::ToDevice),
            (true, false) => Some(Way::FromDevice),
            (true, true) | (false, false) => None,
        }
    }
}

impl Backend for Cpu {
    fn allocate(&mut self, pool: &Pool) -> Result<(), Error> {
        self.spaces.push(pool.space);
        match self.disks.allocate(pool)? {
            true => self.host.skip_pool(),
            false => self.host.allocate(pool)?,
        }
        Ok(())
    }

    fn borrow(&mut self, pool: &Pool, lent: &[LentPlace]) -> Result<(), Error> {
        self.spaces.push(pool.space);
        self.disks.skip();
        self.host.borrow(lent);
        Ok(())
    }

    fn sharing(
        &self,
        options: &Options,
        foreign: Option<Arc<dyn Foreign>>,
    ) -> Result<Box<dyn Backend>, Error> {
        let mut other = Cpu::new(options, foreign)?;
        other.host.share(&self.host);
        other.disks = self.disks.sharing();
        Ok(Box::new(other))
    }

    fn point(&self, place: Place, to: Borrowed) -> Result<(), Error> {
        self.host.lend_at(place, to);
        for end in self.lent.of(place) {
            let Some(transfer) = self.copies.get(end.command.0).and_then(Option::as_ref) else {
                self.host.point(end, &to);
                continue;
            };
            let mut transfer = unpoisoned(transfer);
            let tensor = match &mut *transfer {
                Transfer::Memory { ends, .. } if end.operand == 0 => &mut Arc::make_mut(ends).src,
                Transfer::Memory { ends, .. } => &mut Arc::make_mut(ends).dst,
                Transfer::Disk(copy) => copy.memory_mut(),
            };
            tensor.data = to.at(end.offset, end.bytes);
        }
        Ok(())
    }

    fn load_object(&mut self, object: &Object) -> Result<(), Error> {
        self.host.load_object(object)
    }

    fn load_kernel(&mut self, kernel: &Kernel) -> Result<(), Error> {
        self.host.load_kernel(kernel)
    }

    fn prepare_launch(
        &mut self,
        command: CommandId,
        _stream: StreamId,
        launch: Launch<'_>,
    ) -> Result<(), Error> {
        self.lent.add(&self.host, command, launch.operands());
        self.host.prepare(command, launch);
        Ok(())
    }

    fn prepare_copy(
        &mut self,
        command: CommandId,
        _stream: StreamId,
        copy: Copy,
    ) -> Result<(), Error> {
        let Copy { src, dst, bytes } = copy;
        let transfer = match self.disks.copy(&copy, |range| self.host.range(range)) {
            Some(copy) => Transfer::Disk(copy),
            None => {
                let ends = Ends {
                    src: self.host.range(Range { place: src, bytes }),
                    dst: self.host.range(Range { place: dst, bytes }),
                };
                Transfer::Memory {
                    ends: Arc::new(ends),
                    way: self.way(&copy),
                }
            }
        };
        self.lent.add(&self.host, command, copy.operands());
        put(&mut self.copies, command, Mutex::new(transfer));
        Ok(())
    }

    fn start(&mut self) -> Result<(), Error> {
        // What the caller computes has threads of its own: it gets one that runs nothing else.
        self.is_inline =
            self.link.is_unlimited() && self.disks.is_empty() && !self.host.has_foreign();
        self.host.start()
    }

    fn write(&self, to: Place, bytes: &[u8]) -> Result<(), Error> {
        if let Some(written) = self.disks.write(to, bytes) {
            return written;
        }
        if let Some(arena) = self.host.own(to) {
            arena.write(to.offset, bytes);
            return Ok(());
        }
        let to = self.host.range(Range {
            place: to,
            bytes: bytes.len() as u64,
        });
        memory::write(&to, bytes);
        Ok(())
    }

    fn read(&self, from: Place, bytes: &mut [u8]) -> Result<(), Error> {
        if let Some(read) = self.disks.read(from, bytes) {
            return read;
        }
        if let Some(arena) = self.host.own(from) {
            arena.read(from.offset, bytes);
            return Ok(());
        }
        let from = self.host.range(Range {
            place: from,
            bytes: bytes.len() as u64,
        });
        memory::read(&from, bytes);
        Ok(())
    }

    fn fill(&self, range: Range, byte: u8) -> Result<(), Error> {
        if let Some(filled) = self.disks.fill(range, byte) {
            return filled;
        }
        let Range { place, bytes } = range;
        self.host.arena(place).fill(place.offset, bytes, byte);
        Ok(())
    }

    fn tensor(&self, operand: &Operand) -> Option<(Tensor, Holder)> {
        match self.disks.has(operand.place) {
            true => None,
            false => Some((self.host.tensor(operand), Holder::Host)),
        }
    }

    fn is_inline(&self) -> bool {
        self.is_inline
    }

    fn enter(&self, _stream: StreamId) {
        self.host.enter();
    }

    fn launch(&self, command: CommandId) -> Result<(), CommandError> {
        self.host.launch(command)
    }

    fn copy(&self, command: CommandId) -> Result<(), CommandError> {
        let transfer = self.copies[command.0].as_ref();
        let transfer = unpoisoned(transfer.expect("a copy should be prepared before it runs"));
        let stopped = || self.halted.load(Ordering::SeqCst);
        match &*transfer {
            Transfer::Memory { ends, .. } if !ends.have_memory() => {
                return Err("the caller gave no memory for it".to_string().into());
            }
            Transfer::Memory { ends, .. } if self.is_inline => self.host.copy(ends)?,
            Transfer::Memory { ends, way } => match way {
                Some(way) => self.link.copy(*way, &ends.src, &ends.dst, stopped),
                None => memory::copy(&ends.src, &ends.dst, 0, ends.src.bytes),
            },
            Transfer::Disk(copy) => self.disks.run(copy, stopped)?,
        }
        Ok(())
    }

    fn halt(&self) {
        self.halted.store(true, Ordering::SeqCst);
    }
}

/// How fast the link is played; `None` for as fast as memory copies.
fn pace(options: &Options) -> Result<Option<Pace>, Error> {
    let Some(bandwidth) = options.link_bandwidth else {
        return Ok(None);
    };
    let latency = options.link_latency;
    // From a byte a second to the largest finite number: no time computed from it leaves a clock's
    // range.
    let is_rate = bandwidth.is_finite() && bandwidth >= 1.0;
    if !is_rate || latency > Duration::from_secs(1) {
        return Err(Error::Host(format!(
            "a link of {bandwidth} bytes per second and {latency:?} latency cannot be played: at \
             least 1 byte per second, at most 1 s"
        )));
    }
    Ok(Some(Pace { bandwidth, latency }))
}
