//! The front end for PyTorch: reads a .pt2 file with a joint training step into an [`ir::Graph`]
//! and its tensors.
//!
//! ```no_run
//! let dims = std::collections::BTreeMap::from([("s72".to_string(), 8)]);
//! let model = lighterage_torch::read("gpt2.pt2".as_ref(), &dims)?;
//! assert!(model.unsupported.is_empty());
//! # Ok::<(), lighterage_torch::Error>(())
//! ```
//!
//! A damaged or hostile file gives an [`Error`]: reading never panics, and allocates in proportion
//! to the file.

mod archive;
mod arguments;
mod attribution;
mod import;
mod names;
mod ops;
mod regions;
mod schema;
mod symbols;
mod zip;

use ir::Graph;
/// Why a file could not be read.
pub use lower::FileError as Error;
pub use lower::{Tensor, Unsupported};
use std::collections::BTreeMap;
use std::io::{BufReader, Cursor};
use std::path::Path;

/// A training step with the initial values of its states.
#[derive(Clone, PartialEq, Debug)]
pub struct Model {
    /// The step.
    pub graph: Graph,
    /// Tensors by the path of their state. Absent if the file has no weights.
    pub tensors: BTreeMap<String, Tensor>,
    /// Calls that became `extern` nodes: such a graph can be planned but not run.
    pub unsupported: Vec<Unsupported>,
    /// Paths that name one parameter, each group sorted. The graph has one of them as a state.
    pub tied: Vec<Vec<String>>,
}

/// Reads a file. `dims` gives symbolic sizes their values; the graph takes the file's stem as its
/// name.
pub fn read(path: &Path, dims: &BTreeMap<String, u64>) -> Result<Model, Error> {
    let named = |error: Error| error.of(path.display().to_string());
    let io = |e: std::io::Error| named(Error::new("", format!("cannot be opened ({e})")));
    let file = std::fs::File::open(path).map_err(io)?;
    let meta = file.metadata().map_err(io)?;
    if !meta.is_file() {
        return Err(named(Error::new("", "is not a file")));
    }
    let name = path
        .file_stem()
        .map(|stem| stem.to_string_lossy())
        .unwrap_or_default();
    import::model(BufReader::new(file), meta.len(), &name, dims).map_err(named)
}

/// The names of a file's symbolic sizes.
pub fn symbols(path: &Path) -> Result<Vec<String>, Error> {
    let named = |error: Error| error.of(path.display().to_string());
    let io = |e: std::io::Error| named(Error::new("", format!("cannot be opened ({e})")));
    let file = std::fs::File::open(path).map_err(io)?;
    let bytes = file.metadata().map_err(io)?.len();
    import::symbols(BufReader::new(file), bytes).map_err(named)
}

/// Reads a file's bytes; `name` is the graph's name, also in errors.
pub fn read_bytes(bytes: &[u8], name: &str, dims: &BTreeMap<String, u64>) -> Result<Model, Error> {
    let named = |error: Error| error.of(name);
    import::model(Cursor::new(bytes), bytes.len() as u64, name, dims).map_err(named)
}
