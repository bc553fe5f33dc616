//! What can be done with traces of allocations besides placing them: PyTorch's caching allocator
//! and its variants as simulators ([`caching`]), figures of a trace ([`stats`]), idle bytes for
//! requests that no plan knows ([`dynamic`]), and plan files of recorded steps ([`serve`]).
//!
//! ```
//! use lighterage_addresses::stats::live_bytes;
//! use placement::trace::{Block, Trace};
//!
//! let block = |start, end, bytes| Block { start, end, bytes, ..Block::default() };
//! let trace = Trace {
//!     blocks: vec![block(0, 2, 64), block(1, 3, 32)],
//!     ..Trace::default()
//! };
//! let most = live_bytes(&trace).iter().map(|&(_, bytes)| bytes).max();
//! assert_eq!(most, Some(96));
//! ```

pub mod caching;
pub mod dynamic;
pub mod serve;
pub mod stats;
