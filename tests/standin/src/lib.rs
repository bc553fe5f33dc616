//! A library that takes the place of a CUDA driver, `libcuda.so`, in tests.
//!
//! A program loads it by its path and calls the driver's functions. What differs from a GPU is that
//! mistakes do not stay silent:
//! * A stream is a queue. Each call lets the device run 0 to 2 commands of streams whose next
//!   command may run, drawn by a seed. So a program sees many of the orders that a GPU may take.
//! * Kernels are run by the interpreter of PTX ([`ptx`]), which reports the bytes that they really
//!   touch. Vector clocks over [blocks](BLOCK) of 64 bytes then show whether each access comes
//!   after those that it must come after: by a stream's order, an event, or a wait of a host
//!   thread.
//! * A wait for an event that was never recorded is reported. A GPU would not wait.
//! * An asynchronous copy from or to host memory that is not registered is reported. A GPU would
//!   copy it synchronously.
//! * Device memory is filled with NaN. An access outside of every allocation is reported, and the
//!   context is dead from then on, as on a GPU.
//! * If no stream can run and a thread waits, that is reported as a deadlock.
//! * The n-th call fails with any status, once or from then on ([`Options::fail_at`]).
//!
//! What is reported is a finding: [`Standin::findings`]. Absent: graphs and capture, host
//! functions, waits for values, virtual memory, the legacy default stream, and kernels that access
//! host memory. Kernels do not interleave: accesses of kernels that may run at the same time are
//! found by the clocks. Times are numbers of commands.
//!
//! Functions are those of cuda.h; what is not said about their arguments is said there. Vector
//! clocks are those of Fidge and Mattern (1988).

mod api;
mod facts;
mod host;
mod loaded;
mod options;
mod order;
mod status;
mod world;

pub use facts::Facts;
pub use loaded::Standin;
pub use options::Options;
pub use order::BLOCK;
