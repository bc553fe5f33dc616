//! The native module `lighterage._lighterage`: from a traced step to a plan, and from a plan to a
//! machine whose memory PyTorch shares.
//!
//! Python does the tracing and the bookkeeping of modules and optimizers (`python/lighterage`).
//! This module has no logic of its own: [`plan`] calls the compiler, [`machine`] the runtime,
//! [`parts`] runs forward and backward of a step one by one, [`foreign`] has PyTorch compute what
//! has no kernel, [`dlpack`] lends tensors, [`blocks`] has numbers as codes, [`profile`] has
//! measured times, [`errors`] has Python's exceptions. Every call that takes long leaves the GIL to
//! others, and [`interrupt`] lets Ctrl-C end it. After a fork, [`process`] refuses what needs
//! threads.

mod blocks;
mod dlpack;
mod errors;
mod foreign;
mod interrupt;
mod machine;
mod micro_batches;
mod noted;
mod openmp;
mod packing;
mod parts;
mod plan;
mod process;
mod profile;

use pyo3::prelude::*;

/// The native part of Lighterage.
#[pymodule]
fn _lighterage(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<plan::Plan>()?;
    module.add_class::<machine::Machine>()?;
    module.add_class::<dlpack::View>()?;
    module.add_class::<parts::Arenas>()?;
    module.add_class::<parts::Ticket>()?;
    module.add_function(wrap_pyfunction!(plan::compile, module)?)?;
    module.add_function(wrap_pyfunction!(
        micro_batches::fastest_micro_batches,
        module
    )?)?;
    module.add_function(wrap_pyfunction!(packing::first_fit_decreasing, module)?)?;
    module.add_function(wrap_pyfunction!(blocks::dynamic_map, module)?)?;
    module.add_function(wrap_pyfunction!(blocks::nf4, module)?)?;
    module.add_function(wrap_pyfunction!(blocks::nf4_numbers, module)?)?;
    module.add_function(wrap_pyfunction!(plan::devices, module)?)?;
    module.add_function(wrap_pyfunction!(plan::generator_at, module)?)?;
    module.add_function(wrap_pyfunction!(noted::have, module)?)?;
    module.add_function(wrap_pyfunction!(openmp::use_openmp, module)?)?;
    module.add_function(wrap_pyfunction!(noted::have_at, module)?)?;
    Ok(())
}
