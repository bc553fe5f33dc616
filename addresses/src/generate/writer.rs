//! Writes a trace in the order of the program: each request, free, begin and end takes a tick.

use placement::trace::{Block, Origin, Span, Trace};
use std::collections::{BTreeSet, VecDeque};

/// The most launches by which the host can be ahead of an NVIDIA device: its queue has 1024. A
/// request stands for a launch: most kernels write a tensor.
const QUEUE: usize = 1024;

/// A live block: its position in the trace.
pub(super) type Live = usize;

pub(super) struct Writer {
    clock: u64,
    trace: Trace,
    phase: u32,
    module: u32,
    /// If tensors of collectives are held: those that another stream has used.
    used_elsewhere: Option<BTreeSet<Live>>,
    /// Freed by the program, and held until the device has done the work: blocks, with the number
    /// of requests at that time.
    held: VecDeque<(Live, usize)>,
}

impl Writer {
    pub(super) fn new(holds_collectives: bool) -> Writer {
        let mut trace = Trace::default();
        // The first phase and module are those that are not known.
        trace.phases.push(Span::default());
        trace.modules.push(Span::default());
        Writer {
            clock: 0,
            trace,
            phase: 0,
            module: 0,
            used_elsewhere: holds_collectives.then(BTreeSet::new),
            held: VecDeque::new(),
        }
    }

    /// The trace. Blocks that are still alive live to its end.
    pub(super) fn finish(mut self) -> Trace {
        self.synchronize();
        self.used_elsewhere = None;
        for block in 0..self.trace.blocks.len() {
            if self.trace.blocks[block].end == u64::MAX {
                self.free(block);
            }
        }
        self.trace
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    pub(super) fn get(&mut self, bytes: u64) -> Live {
        self.request(bytes, false, 0)
    }

    /// A block whose size is known only at run time.
    pub(super) fn get_dynamic(&mut self, bytes: u64) -> Live {
        self.request(bytes, true, 0)
    }

    pub(super) fn request(&mut self, bytes: u64, dynamic: bool, stream: u32) -> Live {
        let n_requests = self.trace.blocks.len();
        while let Some(&(block, since)) = self.held.front()
            && since + QUEUE <= n_requests
        {
            self.held.pop_front();
            self.end(block);
        }
        let start = self.tick();
        let origin = Origin {
            phases: (self.phase, 0),
            modules: (self.module, 0),
            stream,
            dynamic,
        };
        let id = self.trace.blocks.len().to_string();
        self.trace.blocks.push(Block {
            id,
            start,
            end: u64::MAX,
            bytes: bytes.max(1),
            origin,
            ..Block::default()
        });
        self.trace.blocks.len() - 1
    }

    /// A collective reads or writes the block on a stream of its own.
    pub(super) fn collective(&mut self, block: Live) {
        if let Some(used) = &mut self.used_elsewhere {
            used.insert(block);
        }
    }

    pub(super) fn free(&mut self, block: Live) {
        let used = self.used_elsewhere.as_mut();
        match used.is_some_and(|used| used.remove(&block)) {
            true => {
                // Its bytes are not needed from here on.
                let tick = self.tick();
                self.trace.blocks[block].gaps = vec![(tick, u64::MAX)];
                self.held.push_back((block, self.trace.blocks.len()));
            }
            false => self.end(block),
        }
    }

    /// The host waits for the device: held blocks are free.
    pub(super) fn synchronize(&mut self) {
        for (block, _) in std::mem::take(&mut self.held) {
            self.end(block);
        }
    }

    fn end(&mut self, block: Live) {
        let end = self.tick();
        let block = &mut self.trace.blocks[block];
        block.end = end;
        block.gaps.iter_mut().for_each(|gap| gap.1 = end);
        block.origin.phases.1 = self.phase;
        block.origin.modules.1 = self.module;
    }

    /// A block that is needed only by the next kernel.
    pub(super) fn touch(&mut self, bytes: u64) {
        let block = self.get(bytes);
        self.free(block);
    }

    pub(super) fn block(&self, block: Live) -> &Block {
        &self.trace.blocks[block]
    }

    pub(super) fn begin_phase(&mut self, name: String) {
        let start = self.tick();
        self.trace.phases.push(open(name, start));
        self.phase = self.trace.phases.len() as u32 - 1;
    }

    pub(super) fn end_phase(&mut self) {
        self.trace.phases[self.phase as usize].end = self.tick();
        self.phase = 0;
    }

    pub(super) fn begin_module(&mut self, name: String) {
        let start = self.tick();
        self.trace.modules.push(open(name, start));
        self.module = self.trace.modules.len() as u32 - 1;
    }

    pub(super) fn end_module(&mut self) {
        self.trace.modules[self.module as usize].end = self.tick();
        self.module = 0;
    }
}

fn open(name: String, start: u64) -> Span {
    Span {
        name,
        start,
        end: u64::MAX,
    }
}

/// SplitMix64 of several numbers: a draw that depends on nothing else, so that a layer that runs
/// again gets the same numbers.
pub(super) fn draw(of: &[u64]) -> u64 {
    of.iter().fold(0, |state, &number| {
        let mut z = (state ^ number).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}
