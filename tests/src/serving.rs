//! Serves a recorded trace by the run-time allocator, from a plan of one of its steps or from its
//! cache, on addresses without memory.

use addresses::serve;
use lighterage_alloc::pool::{Event, Pool, PoolError, Range};
use lighterage_alloc::{Allocator, Plan};
use placement::trace::Trace;
use placement::{Effort, Options, place};

/// Addresses without memory, for pools that no machine has. Streams never wait.
struct Endless(u64);

impl Pool for Endless {
    fn allocate(&mut self, bytes: u64) -> Result<u64, PoolError> {
        assert!(bytes < 1 << 50, "a pool of {bytes} bytes");
        self.0 += 1 << 50;
        Ok(self.0)
    }
    fn free(&mut self, _: u64) {}
    fn reserve(&mut self, step: u64) -> Result<Range, PoolError> {
        let bytes = (1 << 49) / step * step;
        self.allocate(bytes).map(|address| Range {
            address,
            bytes,
            step,
        })
    }
    fn map(&mut self, _: Range, _: u64, _: u64) -> Result<(), PoolError> {
        Ok(())
    }
    fn record(&mut self, _: u64) -> Result<Event, PoolError> {
        Ok(Event(0))
    }
    fn done(&mut self, _: Event) -> bool {
        true
    }
    fn wait(&mut self, _: u64, _: Event) -> Result<(), PoolError> {
        Ok(())
    }
    fn forget(&mut self, _: Event) {}
    fn synchronize(&mut self) {}
}

/// The plan of the step that a trace repeats. Panics if it has none.
pub fn plan(trace: &Trace) -> Plan {
    let text = serve::plan(trace, 512, |trace| {
        let options = Options {
            effort: Effort::Fast,
            align: 512,
            ..Options::default()
        };
        place(trace, &options, &mut |_, _| ()).map(|placement| placement.offsets)
    });
    let text = text.expect("a trace should have a plan");
    Plan::read(&text).unwrap_or_else(|error| panic!("{error}"))
}

/// An allocator that serves a plan.
pub fn allocator(plan: Plan) -> Allocator {
    Allocator::planned(Box::new(Endless(0)), plan).expect("addresses should not end")
}

/// The most bytes that the cache takes from a device to serve a trace without a plan.
pub fn cached(trace: &Trace, expandable: bool) -> u64 {
    let mut allocator = Allocator::caching(Box::new(Endless(0)));
    if expandable {
        allocator.expand().expect("addresses should not end");
    }
    serve_from(&mut allocator, trace, &calls(trace));
    allocator.stats().peak_cache_bytes
}

/// Makes the calls of a trace.
pub fn serve_from(allocator: &mut Allocator, trace: &Trace, calls: &[Call]) {
    let mut addresses = vec![0; trace.blocks.len()];
    for call in calls {
        let block = &trace.blocks[call.block];
        if call.comes {
            let address = allocator.malloc(block.bytes, block.origin.stream.into());
            addresses[call.block] = address.expect("addresses should not end");
        } else {
            allocator.free(addresses[call.block]);
        }
    }
}

/// A request or a free of a block, in the order of the program.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Call {
    /// When.
    pub tick: u64,
    /// True if the block is requested.
    pub comes: bool,
    /// The block.
    pub block: usize,
}

/// The program's calls.
pub fn calls(trace: &Trace) -> Vec<Call> {
    let of = |(block, data): (usize, &placement::trace::Block)| {
        [(data.start, true), (data.end, false)].map(|(tick, comes)| Call { tick, comes, block })
    };
    let mut calls: Vec<Call> = trace.blocks.iter().enumerate().flat_map(of).collect();
    calls.sort_unstable();
    calls
}
