//! The CPU backend: every pool is host memory, each command is done when its call returns, and
//! copies between a device's pool and the host's go over a [`Link`] that can be slowed. With
//! [`Cpu::on_disk`] the host's pool is a file, and the copies read and write it.

use super::backend::{Backend, CommandError, CommandId, Copy, Launch, LentPlace, StreamId};
use super::host::{HostWork, put};
use super::options::Options;
use crate::Error;
use crate::disk::Disk;
use crate::foreign::Foreign;
use crate::kernel::Tensor;
use crate::link::{Link, Pace, Way};
use crate::memory::{self, Borrowed};
use crate::sync::unpoisoned;
use artifact::{Kernel, MemorySpace, Object, Operand, Place, Pool, Range};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Host memory and threads.
pub(crate) struct Cpu {
    host: HostWork,
    /// The space of each pool.
    spaces: Vec<MemorySpace>,
    /// The folder for pools of the host, if they are files.
    folder: Option<PathBuf>,
    /// By the pool's number; `None` for pools in memory.
    disks: Vec<Option<Arc<Disk>>>,
    /// Those of another step.
    given: Vec<Option<Arc<Disk>>>,
    /// By the command's number.
    copies: Vec<Option<Mutex<Transfer>>>,
    /// The copies that read or write a tensor of the caller.
    lent: BTreeMap<Place, Vec<LentEnd>>,
    link: Link,
    halted: AtomicBool,
}

/// A copy, resolved.
enum Transfer {
    /// Within memory. `way` is `None` for a copy within a space, which takes no link.
    Memory {
        src: Tensor,
        dst: Tensor,
        way: Option<Way>,
    },
    /// From a pool on disk.
    Load { src: Place, dst: Tensor },
    /// To a pool on disk.
    Store { src: Tensor, dst: Place },
}

/// An end of a copy in memory of the caller.
struct LentEnd {
    copy: CommandId,
    is_source: bool,
    /// Where it begins in the tensor.
    offset: u64,
}

impl Cpu {
    /// A backend without pools. `foreign` computes what has no kernel. An error if the options ask
    /// for a link that cannot be played.
    pub(crate) fn new(options: &Options, foreign: Option<Arc<dyn Foreign>>) -> Result<Cpu, Error> {
        Ok(Cpu {
            host: HostWork::new(options.team()).calling(foreign),
            spaces: Vec::new(),
            folder: None,
            disks: Vec::new(),
            given: Vec::new(),
            copies: Vec::new(),
            lent: BTreeMap::new(),
            link: Link::new(pace(options)?),
            halted: AtomicBool::new(false),
        })
    }

    /// The same with the host's pool as a file in a folder.
    pub(crate) fn on_disk(self, folder: &Path) -> Cpu {
        Cpu {
            folder: Some(folder.into()),
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

impl Cpu {
    /// The pool of a place, if it is on disk.
    fn disk(&self, place: Place) -> Option<&Disk> {
        self.disks.get(place.pool as usize)?.as_deref()
    }

    /// The pool of a place that is on disk.
    fn file(&self, place: Place) -> &Disk {
        self.disk(place).expect("the pool should be on disk")
    }

    /// A copy with an end on disk, if one is there.
    fn with_disk(&self, copy: &Copy) -> Result<Option<Transfer>, Error> {
        let Copy { src, dst, bytes } = *copy;
        let memory = |place: Place| self.host.range(Range { place, bytes });
        match (self.disk(src), self.disk(dst)) {
            (None, None) => Ok(None),
            (Some(_), None) => {
                let dst = memory(dst);
                Ok(Some(Transfer::Load { src, dst }))
            }
            (None, Some(_)) => {
                let src = memory(src);
                Ok(Some(Transfer::Store { src, dst }))
            }
            (Some(_), Some(_)) => {
                let why = "a copy from the disk to the disk";
                Err(Error::Unsupported(why.into()))
            }
        }
    }
}

/// An error of the disk, for the user.
fn of_disk(e: std::io::Error) -> String {
    format!("the disk: {e}")
}

impl Backend for Cpu {
    fn allocate(&mut self, pool: &Pool) -> Result<(), Error> {
        self.spaces.push(pool.space);
        let folder = match pool.space {
            MemorySpace::Host => self.folder.as_ref(),
            MemorySpace::Device(_) => None,
        };
        let Some(folder) = folder else {
            self.disks.push(None);
            return self.host.allocate(pool);
        };
        let disk = match self.given.get(self.disks.len()) {
            Some(Some(disk)) => disk.clone(),
            Some(None) | None => Arc::new(Disk::new(folder, pool.bytes).map_err(|e| {
                let (bytes, folder) = (pool.bytes, folder.display());
                Error::Resources(format!("{folder}: no file of {bytes} bytes: {e}"))
            })?),
        };
        self.disks.push(Some(disk));
        self.host.skip_pool();
        Ok(())
    }

    fn borrow(&mut self, pool: &Pool, lent: &[LentPlace]) -> Result<(), Error> {
        self.spaces.push(pool.space);
        self.disks.push(None);
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
        other.folder.clone_from(&self.folder);
        other.given.clone_from(&self.disks);
        Ok(Box::new(other))
    }

    fn point(&self, place: Place, to: Borrowed) -> Result<(), Error> {
        for end in self.lent.get(&place).map_or(&[][..], |ends| ends) {
            let transfer = self.copies[end.copy.0].as_ref();
            let transfer = transfer.expect("a copy should be prepared before it runs");
            let mut transfer = unpoisoned(transfer);
            let tensor = match &mut *transfer {
                Transfer::Memory { src, .. } if end.is_source => src,
                Transfer::Store { src, .. } => src,
                Transfer::Memory { dst, .. } | Transfer::Load { dst, .. } => dst,
            };
            tensor.data = to.at(end.offset, tensor.bytes as u64);
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
        let operands = launch.ins.iter().chain(launch.outs);
        let places = operands.map(|operand| operand.place);
        let mut places = places.chain(launch.scratch.map(|scratch| scratch.place));
        if places.any(|place| self.disk(place).is_some()) {
            let why = "a kernel of this step works in the host's memory, a disk here; plan \
                       the step for a disk";
            return Err(Error::Unsupported(why.into()));
        }
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
        let transfer = match self.with_disk(&copy)? {
            Some(transfer) => transfer,
            None => Transfer::Memory {
                src: self.host.range(Range { place: src, bytes }),
                dst: self.host.range(Range { place: dst, bytes }),
                way: self.way(&copy),
            },
        };
        for (place, is_source) in [(src, true), (dst, false)] {
            if let Some((lent, offset)) = self.host.lent(place) {
                let ends = self.lent.entry(lent.place).or_default();
                ends.push(LentEnd {
                    copy: command,
                    is_source,
                    offset,
                });
            }
        }
        put(&mut self.copies, command, Mutex::new(transfer));
        Ok(())
    }

    fn start(&mut self) -> Result<(), Error> {
        self.host.start()
    }

    fn write(&self, to: Place, bytes: &[u8]) -> Result<(), Error> {
        if let Some(disk) = self.disk(to) {
            let written = disk.write(to.offset, bytes);
            return written.map_err(|e| Error::Resources(of_disk(e)));
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
        if let Some(disk) = self.disk(from) {
            let read = disk.read(from.offset, bytes);
            return read.map_err(|e| Error::Resources(of_disk(e)));
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

    fn fill(&self, Range { place, bytes }: Range, byte: u8) -> Result<(), Error> {
        if let Some(disk) = self.disk(place) {
            let filled = disk.fill(place.offset, bytes, byte);
            return filled.map_err(|e| Error::Resources(of_disk(e)));
        }
        self.host.arena(place).fill(place.offset, bytes, byte);
        Ok(())
    }

    fn tensor(&self, operand: &Operand) -> Option<Tensor> {
        match self.disk(operand.place) {
            Some(_) => None,
            None => Some(self.host.tensor(operand)),
        }
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
            Transfer::Memory { src, dst, .. } if !src.has_memory() || !dst.has_memory() => {
                return Err("the caller gave no memory for it".to_string().into());
            }
            Transfer::Memory { src, dst, way } => match way {
                Some(way) => self.link.copy(*way, src, dst, stopped),
                None => memory::copy(src, dst, 0, src.bytes),
            },
            Transfer::Load { src, dst } => {
                let loaded = self.file(*src).load(src.offset, dst, stopped);
                loaded.map_err(of_disk)?;
            }
            Transfer::Store { src, dst } => {
                let stored = self.file(*dst).store(src, dst.offset, stopped);
                stored.map_err(of_disk)?;
            }
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
