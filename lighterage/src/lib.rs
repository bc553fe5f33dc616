//! A compiler that plans the memory of a training step. Input: a traced step and a memory budget.
//! Output: a program with every operation, copy and address fixed. Its peak is known and within the
//! budget, and its results are the same bits at every budget.
//!
//! ```
//! use lighterage::{Budget, Options, Optimizer, compile, device, graph};
//!
//! let step = graph(
//!     r#"graph mlp {
//!        input  %x : f32[64,32]
//!        state  param  %w -> %w : f32[32,32] "fc.weight"
//!        fwd fc    %h = matmul %x, %w ta=false tb=false : f32[64,32]
//!        fwd loss  %s = mul %h, %h : f32[64,32]
//!        fwd loss  %loss = sum %s dims=[0,1] keepdim=false : f32[]
//!        bwd loss  %dh = mul_scalar %h value=2.0 : f32[64,32]
//!        bwd fc    %dw = matmul %x, %dh ta=true tb=false : f32[32,32]
//!        output loss = %loss
//!        gradient "fc.weight" = %dw
//!      }"#,
//! )?;
//! let options = Options {
//!     optimizer: Optimizer::Sgd,
//!     budget: Budget::Share(0.9),
//!     ..Options::default()
//! };
//! let compiled = compile(&step, &device("cpu")?, &options)?;
//! assert!(compiled.planned_peak <= compiled.decided.budget.unwrap());
//! println!("{:.1} us a step", compiled.timeline.micros);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`compile`] is the whole pipeline. Its stages are in [`passes`], the language of graphs and
//! schedules in [`ir`]. Optional features: `emit` turns a compiled program into an artifact for the
//! runtime, `trace` plans addresses for traces of other programs, `papers` has algorithms of papers
//! over plain figures.

pub use ir::{self, Device, Graph, Program};
pub use passes::cost::{Cost, Roofline};
pub use passes::graph::optimizer::{Master, Optimizer};
pub use passes::pipeline::{Budget, Compiled, Error, Kernels, Options};
pub use passes::plan::{Extent, HostTooSmall, Infeasible, Planner};
pub use passes::{self, devices};

#[cfg(feature = "emit")]
pub use codegen::{self, emit};
#[cfg(feature = "papers")]
pub use papers;
#[cfg(feature = "trace")]
pub use placement;
#[cfg(feature = "trace")]
pub use trace;

/// Plans and schedules a training step for a device, with times from the device's figures.
///
/// # Errors
/// The graph cannot be compiled with these options, or no plan fits the budget:
/// [`Error::Infeasible`] names the smallest budget that does, [`Error::HostTooSmall`] also a larger
/// limit of the host's memory.
pub fn compile(graph: &Graph, device: &Device, options: &Options) -> Result<Compiled, Error> {
    let cost = Roofline::new(device).with_tf32(options.tf32);
    passes::pipeline::compile(graph.clone(), options, device, &cost, &mut |_| ())
}

/// The built-in machine with this name, such as `cpu` or `a100-80g`.
///
/// # Errors
/// There is no such machine; the error lists the names.
pub fn device(name: &str) -> Result<Device, devices::NamedError> {
    devices::named(name)
}

/// Parses the text of a graph; `docs/ir.md` describes the language.
///
/// # Errors
/// The text is not a graph; the error says where.
pub fn graph(text: &str) -> Result<Graph, ir::text::ParseError> {
    ir::text::parse_graph(text)
}
