//! Records which threads touched each byte, and finds races by the definition: two accesses that
//! are not ordered.

use super::Access;

/// The thread of an access, and its time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Actor {
    pub(super) block: u32,
    pub(super) warp: u32,
    /// The thread in its block; [`WARP`] for a warp's threads together.
    pub(super) thread: u32,
    /// The number of the block's barriers that it has passed.
    pub(super) epoch: u32,
    /// The number of the warp's barriers that it has passed.
    pub(super) warp_epoch: u32,
}

/// All threads of a warp.
pub(super) const WARP: u32 = u32::MAX - 1;
/// Several threads, or warps, or blocks.
const MANY: u32 = u32::MAX;

/// The state of a byte.
#[derive(Clone, Copy, Debug)]
struct Cell {
    /// The byte has a value.
    written: bool,
    /// A thread has read it, or has written it.
    touched: Touched,
    /// The thread whose `cp.async` may write it at any time.
    pending: Option<u32>,
    writer: Option<Actor>,
    /// The readers since the last write. A field is [`MANY`] if they differ. A later epoch replaces
    /// an earlier one: any access that is ordered after the later one is also ordered after the
    /// earlier one.
    readers: Option<Actor>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Touched {
    reads: bool,
    writes: bool,
}

const FRESH: Cell = Cell {
    written: false,
    touched: Touched {
        reads: false,
        writes: false,
    },
    pending: None,
    writer: None,
    readers: None,
};

/// True if the access of `before` is ordered before `now`.
fn ordered(before: &Actor, now: &Actor) -> bool {
    let same = before.thread == now.thread && now.thread < WARP;
    let warp = before.warp == now.warp && (same || before.warp_epoch < now.warp_epoch);
    before.block == now.block && (before.epoch < now.epoch || warp)
}

fn who(actor: &Actor) -> String {
    match actor.thread {
        MANY => "other threads".into(),
        WARP => format!("warp {} of block {}", actor.warp, actor.block),
        thread => format!("thread {thread} of block {}", actor.block),
    }
}

/// Bytes of a page. A launch touches only a few bytes of all tensors, and a cell is much larger
/// than its bytes. So cells exist only for pages that were touched.
const PAGE: usize = 256;
/// A new page has a cell for this many bytes, as a power of two: the widest accesses have no more.
const WIDEST: u32 = 4;

/// The state of a page's bytes.
#[derive(Clone, Debug)]
struct Page {
    /// A cell is for this many bytes, as a power of two: bytes that were always accessed together
    /// have one state.
    shift: u32,
    cells: Box<[Cell]>,
}

impl Page {
    fn new(untouched: Cell) -> Page {
        Page {
            shift: WIDEST,
            cells: vec![untouched; PAGE >> WIDEST].into(),
        }
    }

    /// Makes cells for fewer bytes.
    fn split(&mut self, shift: u32) {
        let each = 1 << (self.shift - shift);
        let cells = self.cells.iter();
        self.cells = cells
            .flat_map(|&cell| (0..each).map(move |_| cell))
            .collect();
        self.shift = shift;
    }
}

/// The bytes of a tensor or of shared memory.
#[derive(Clone, Debug)]
pub(super) struct Shadow {
    /// The state of bytes in untouched pages.
    untouched: Cell,
    pages: Vec<Option<Page>>,
}

impl Shadow {
    /// Untouched bytes; `written` if they have a value.
    pub(super) fn new(bytes: usize, written: bool) -> Shadow {
        Shadow {
            untouched: Cell { written, ..FRESH },
            pages: vec![None; bytes.div_ceil(PAGE)],
        }
    }

    /// Gives `does` each cell of bytes; creates their pages.
    #[inline]
    fn each(
        &mut self,
        mut at: usize,
        n: usize,
        mut does: impl FnMut(&mut Cell) -> Result<(), String>,
    ) -> Result<(), String> {
        let end = at + n;
        while at < end {
            let until = end.min((at / PAGE + 1) * PAGE);
            let untouched = self.untouched;
            let page = self.pages[at / PAGE].get_or_insert_with(|| Page::new(untouched));
            let shift = (at | until).trailing_zeros();
            if shift < page.shift {
                page.split(shift);
            }
            let first = (at % PAGE) >> page.shift;
            let n = (until - at) >> page.shift;
            page.cells[first..first + n]
                .iter_mut()
                .try_for_each(&mut does)?;
            at = until;
        }
        Ok(())
    }

    /// The touched bytes, if the first byte has this address. Neighbours with the same access are
    /// one entry.
    pub(super) fn accesses(&self, address: u64) -> Vec<Access> {
        let mut accesses: Vec<Access> = vec![];
        for (number, page) in self.pages.iter().enumerate() {
            let Some(Page { shift, cells }) = page else {
                continue;
            };
            let bytes = 1 << shift;
            let first = address + (number * PAGE) as u64;
            for (at, cell) in (first..).step_by(bytes).zip(cells) {
                let Touched { reads, writes } = cell.touched;
                match accesses.last_mut() {
                    _ if !reads && !writes => {}
                    Some(last)
                        if last.address + last.bytes == at
                            && (last.reads, last.writes) == (reads, writes) =>
                    {
                        last.bytes += bytes as u64;
                    }
                    _ => accesses.push(Access {
                        address: at,
                        bytes: bytes as u64,
                        reads,
                        writes,
                    }),
                }
            }
        }
        accesses
    }

    /// Bytes are read.
    pub(super) fn read(&mut self, at: usize, n: usize, now: Actor) -> Result<(), String> {
        self.each(at, n, |cell| {
            if let Some(thread) = cell.pending {
                return Err(format!(
                    "reads what cp.async of thread {thread} may still write"
                ));
            }
            if !cell.written {
                return Err("reads shared memory that nobody wrote".into());
            }
            if let Some(writer) = cell.writer.filter(|writer| !ordered(writer, &now)) {
                return Err(format!(
                    "a race: reads what {} writes, without a barrier between",
                    who(&writer)
                ));
            }
            cell.touched.reads = true;
            cell.readers = Some(match cell.readers {
                None => now,
                Some(before) if before.block != now.block => Actor {
                    block: MANY,
                    thread: MANY,
                    ..now
                },
                Some(before) if before.epoch < now.epoch => now,
                Some(before) if before.warp != now.warp => Actor {
                    warp: MANY,
                    thread: MANY,
                    ..now
                },
                Some(before) if before.warp_epoch < now.warp_epoch => now,
                Some(before) if before.thread != now.thread => Actor {
                    thread: MANY,
                    ..now
                },
                Some(before) => before,
            });
            Ok(())
        })
    }

    /// Bytes are written; `same` if the value does not change. A warp's threads may write one value
    /// together: by the programming guide, one of them writes, and it does not matter which.
    pub(super) fn write(
        &mut self,
        at: usize,
        n: usize,
        now: Actor,
        same: bool,
    ) -> Result<(), String> {
        self.each(at, n, |cell| {
            if let Some(thread) = cell.pending {
                return Err(format!(
                    "writes where cp.async of thread {thread} may still write"
                ));
            }
            let together =
                |writer: &Actor| same && writer.block == now.block && writer.warp == now.warp;
            let writer = cell.writer.filter(|writer| !together(writer));
            for (before, does) in [(writer, "writes"), (cell.readers, "reads")] {
                if let Some(before) = before.filter(|before| !ordered(before, &now)) {
                    return Err(format!(
                        "a race: writes what {} {does}, without a barrier between",
                        who(&before)
                    ));
                }
            }
            *cell = Cell {
                written: true,
                touched: Touched {
                    writes: true,
                    ..cell.touched
                },
                pending: None,
                writer: Some(now),
                readers: None,
            };
            Ok(())
        })
    }

    /// An atomic changes bytes. It is not checked for races.
    pub(super) fn update(&mut self, at: usize, n: usize) {
        let marked = self.each(at, n, |cell| {
            cell.touched = Touched {
                reads: true,
                writes: true,
            };
            Ok(())
        });
        marked.expect("a mark is no error");
    }

    /// `cp.async` begins to write bytes: from now on until [`Shadow::arrive`].
    pub(super) fn begin(&mut self, at: usize, n: usize, now: Actor) -> Result<(), String> {
        self.write(at, n, now, false)?;
        self.each(at, n, |cell| {
            cell.pending = Some(now.thread);
            Ok(())
        })
    }
    /// The bytes of a `cp.async` have arrived.
    pub(super) fn arrive(&mut self, at: usize, n: usize, now: Actor) {
        let marked = self.each(at, n, |cell| {
            cell.pending = None;
            cell.writer = Some(now);
            Ok(())
        });
        marked.expect("a mark is no error");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn actor(block: u32, thread: u32, epoch: u32, warp_epoch: u32) -> Actor {
        Actor {
            block,
            warp: thread / 32,
            thread,
            epoch,
            warp_epoch,
        }
    }
    fn fresh() -> Shadow {
        Shadow::new(4, true)
    }

    #[test]
    fn a_barrier_orders_a_block_and_a_warps_barrier_a_warp() {
        let mut shadow = fresh();
        shadow.write(0, 4, actor(0, 0, 0, 0), false).unwrap();
        assert!(
            shadow.clone().read(0, 4, actor(0, 0, 0, 0)).is_ok(),
            "the writer itself"
        );
        assert!(shadow.clone().read(3, 1, actor(0, 1, 0, 0)).is_err());
        assert!(
            shadow.clone().read(3, 1, actor(0, 1, 0, 1)).is_ok(),
            "the same warp, later"
        );
        assert!(
            shadow.clone().read(3, 1, actor(0, 32, 0, 1)).is_err(),
            "another warp"
        );
        assert!(shadow.clone().read(3, 1, actor(0, 32, 1, 0)).is_ok());
        assert!(
            shadow.clone().read(3, 1, actor(1, 0, 1, 0)).is_err(),
            "another block"
        );
        assert!(
            shadow
                .clone()
                .write(0, 1, actor(0, 5, 0, 0), false)
                .is_err()
        );
        assert!(
            shadow.clone().write(0, 1, actor(0, 5, 0, 0), true).is_ok(),
            "one value, by one warp"
        );
        assert!(shadow.write(0, 1, actor(0, 35, 0, 0), true).is_err());
    }

    #[test]
    fn a_writer_waits_for_every_reader() {
        let mut shadow = fresh();
        shadow.read(0, 1, actor(0, 0, 0, 0)).unwrap();
        assert!(
            shadow.clone().write(0, 1, actor(0, 0, 0, 0), false).is_ok(),
            "the reader itself"
        );
        assert!(
            shadow
                .clone()
                .write(0, 1, actor(0, 1, 0, 0), false)
                .is_err()
        );
        assert!(shadow.clone().write(0, 1, actor(0, 1, 0, 1), false).is_ok());
        shadow.read(0, 1, actor(0, 40, 0, 0)).unwrap();
        assert!(
            shadow
                .clone()
                .write(0, 1, actor(0, 0, 0, 1), false)
                .is_err(),
            "a reader in another warp"
        );
        assert!(shadow.clone().write(0, 1, actor(0, 0, 1, 0), false).is_ok());
        shadow.read(0, 1, actor(0, 40, 1, 0)).unwrap();
        assert!(
            shadow
                .clone()
                .write(0, 1, actor(0, 40, 1, 0), false)
                .is_ok(),
            "the first epoch's readers are done"
        );
        shadow.read(0, 1, actor(1, 40, 9, 0)).unwrap();
        assert!(
            shadow.write(0, 1, actor(1, 40, 10, 0), false).is_err(),
            "a reader in another block"
        );
    }

    #[test]
    fn neighbours_touched_alike_are_one_access() {
        let mut shadow = Shadow::new(4 * PAGE, true);
        // Across the border of two pages; then one of these bytes is also written.
        let border = 2 * PAGE;
        shadow.read(border - 4, 8, actor(0, 0, 0, 0)).unwrap();
        shadow.write(border, 1, actor(0, 0, 0, 0), false).unwrap();
        shadow.update(3 * PAGE, 4);
        let access = |offset: usize, bytes, reads, writes| Access {
            address: 4096 + offset as u64,
            bytes,
            reads,
            writes,
        };
        let expected = [
            access(border - 4, 4, true, false),
            access(border, 1, true, true),
            access(border + 1, 3, true, false),
            access(3 * PAGE, 4, true, true),
        ];
        assert_eq!(shadow.accesses(4096), expected);
        assert!(shadow.pages[0].is_none(), "no cells for untouched pages");
    }

    #[test]
    fn what_a_copy_may_write_is_nobodys() {
        let mut shadow = Shadow::new(4, false);
        assert!(
            shadow.clone().read(0, 1, actor(0, 0, 0, 0)).is_err(),
            "nobody wrote it"
        );
        shadow.begin(0, 4, actor(0, 0, 0, 0)).unwrap();
        assert!(shadow.clone().read(0, 1, actor(0, 0, 5, 0)).is_err());
        assert!(
            shadow
                .clone()
                .write(0, 1, actor(0, 0, 5, 0), false)
                .is_err()
        );
        shadow.arrive(0, 4, actor(0, 0, 1, 0));
        assert!(
            shadow.clone().read(0, 1, actor(0, 1, 1, 0)).is_err(),
            "only the thread that waited may"
        );
        assert!(shadow.read(0, 1, actor(0, 1, 2, 0)).is_ok());
    }
}
