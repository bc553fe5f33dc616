//! A library that takes the place of a CUDA driver, `libcuda.so`, in tests.
//!
//! A program loads it by its path and calls the driver's functions. Unlike a GPU, it reports
//! mistakes:
//! * A stream is a queue. In each call the device runs 0 to 2 commands of streams whose next
//!   command may run, chosen by a seed. So a program sees many orders that are possible on a GPU.
//! * The interpreter of PTX ([`ptx`]) runs kernels and reports the bytes that they really touch.
//!   Vector clocks over [blocks](BLOCK) of 64 bytes then show whether each access comes after all
//!   conflicting earlier accesses: by a stream's order, an event, or a wait of a host thread.
//! * A wait for an event that was never recorded is reported. A GPU would not wait.
//! * An asynchronous copy from or to host memory that is not registered is reported. A GPU would
//!   copy it synchronously.
//! * Device memory is filled with NaN. An access outside of every allocation is reported, and the
//!   context is unusable from then on, as on a GPU.
//! * If no stream can run and a thread waits, a deadlock is reported.
//! * The n-th call fails with a given status, once or from then on ([`Options::fail_at`]).
//! * The functions of cuBLASLt that the runtime uses compute products with sums in f64 that are
//!   rounded once. Matrices, workspaces and algorithms that do not fit are reported.
//!
//! With [`Options::unified`], device memory has addresses of the process: a program may then use it
//! as its own, such as PyTorch without a GPU.
//!
//! Each report is a finding: [`Standin::findings`]. Graphs are chains of kernels. Not supported:
//! other graphs, capture, host functions, waits for values, virtual memory, the legacy default
//! stream, and kernels that access host memory that the program registered. Kernels do not
//! interleave: the clocks find conflicting accesses of kernels that may run at the same time. Times
//! are numbers of commands.
//!
//! The functions are declared in cuda.h, which also describes their arguments. Vector clocks follow
//! Fidge and Mattern (1988).

mod api;
mod blas;
mod facts;
mod host;
mod loaded;
mod memo;
mod options;
mod order;
mod product;
mod status;
mod world;

pub use facts::Facts;
pub use loaded::Standin;
pub use options::Options;
pub use order::BLOCK;
