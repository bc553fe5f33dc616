//! Uses of allocation traces other than placing them: simulators of PyTorch's caching allocator and
//! its variants ([`caching`]), figures of a trace ([`stats`]), idle bytes for requests that are not
//! planned ([`dynamic`]), plan files of recorded steps ([`serve`]), and generated traces of
//! training steps ([`generate`]).
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
pub mod generate;
pub mod serve;
pub mod stats;
