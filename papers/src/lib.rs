//! Algorithms of papers as separate problems, over plain figures: no graph, no machine, no
//! schedule. The compiler's planners translate a graph into such a problem and the solution into
//! decisions. Other algorithms are here for comparison.
//!
//! * [`offload`]: which weights of a chain leave the device, and when (Beaumont et al., 2022);
//! * [`protrain`]: four numbers that decide a step (ProTrain), with [`blocks_search`], which
//!   chooses for each block separately;
//! * [`remat`]: which nodes run again under a budget, with a lower bound;
//! * [`stalloc`]: addresses by STAlloc's rules;
//! * [`estimate`]: a model's memory from its sizes alone;
//! * [`table`]: figures of a paper and ours as Markdown.
//!
//! ```
//! use lighterage_papers::offload::{Algorithm, Instance, Layer, solve};
//!
//! let layer = Layer {
//!     weight_bytes: 100,
//!     activation_bytes: 10,
//!     forward_micros: 50.0,
//!     backward_micros: 100.0,
//! };
//! let instance = Instance {
//!     layers: vec![layer; 8],
//!     bytes_per_micro: 10.0,
//!     memory_bytes: 600,
//! };
//! let solution = solve(&instance, Algorithm::GreedyPlus).unwrap();
//! assert!(solution.away_bytes().iter().flatten().any(|&bytes| bytes > 0));
//! ```

pub mod blocks_search;
pub mod estimate;
pub mod offload;
pub mod packing;
pub mod protrain;
pub mod remat;
pub mod stalloc;
pub mod table;
