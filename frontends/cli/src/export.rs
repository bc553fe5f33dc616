//! `lighterage export`: writes trained values back into the .onnx file that they came from.

use crate::args::ExportArgs;
use crate::data::{Tensors, check_writable, file_size, save_atomically};
use crate::failure::Failure;
use crate::halves;
use crate::model::{Format, format};
use crate::out::out;
use artifact::{Operand, Place};
use onnx::Original;
use passes::graph::optimizer;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// States of a step that no model has.
const OF_THE_STEP: [&str; 2] = [optimizer::STEP, "rng"];

/// Runs the command.
pub(crate) fn run(args: &ExportArgs) -> Result<(), Failure> {
    let (model, output) = (&args.model, &args.output);
    check_writable("-o", output)?;
    if format(model)? != Format::Onnx {
        let why = "not an .onnx file; values are written back into .onnx files only";
        return Err(Failure::Input(format!("{}: {why}", model.display())));
    }
    let refused = |e: onnx::Error| Failure::Input(e.to_string());
    let states = Tensors::open_states(&args.states)?;
    let original = Original::open(model).map_err(refused)?;
    let values = values(&original, &states, model)?;

    // The new data file lies beside the new model, as PyTorch's exporter writes it.
    let mut beside = output.clone().into_os_string();
    beside.push(".data");
    let beside = PathBuf::from(beside);
    let name = beside.file_name().unwrap_or_default().to_string_lossy();
    let written = original.with(&values, &name).map_err(refused)?;

    // Checked when all inputs are known.
    let mut read = written.read;
    read.extend([model.clone(), args.states.clone()]);
    check_is_new(output, &read)?;
    if let Some(data) = &written.data {
        check_is_new(&beside, &read)?;
        // Before the model, which needs it.
        save_atomically(&beside, &[data])?;
        out!("wrote         {}, {}", beside.display(), file_size(&beside));
    }
    save_atomically(output, &[&written.model])?;
    out!("wrote         {}, {}", output.display(), file_size(output));
    out!(
        "values        of {} tensors, from {}",
        values.len(),
        args.states.display()
    );
    Ok(())
}

/// The new values of initializers, by name. A tensor that belongs to neither the model nor the
/// step is an error.
fn values(
    original: &Original,
    states: &Tensors,
    model: &Path,
) -> Result<BTreeMap<String, Vec<u8>>, Failure> {
    let initializers = original.initializers();
    let results = original.results();
    let mut values = BTreeMap::new();
    let mut foreign = vec![];
    for name in states.names() {
        if let Some(ty) = initializers.get(name) {
            let operand = Operand {
                place: Place { pool: 0, offset: 0 },
                dtype: codegen::dtype(ty.dtype()),
                shape: ty.shape().to_vec(),
            };
            let bytes = match halves::in_file(states, name, &operand)? {
                Some(numbers) => halves::rounded(operand.dtype, &numbers),
                None => states.get(name, &operand)?,
            };
            values.insert(name.to_string(), bytes);
            continue;
        }
        let parameters = optimizer::parameters_of(name);
        let is_moment = parameters
            .iter()
            .any(|path| initializers.contains_key(path));
        if !is_moment && !OF_THE_STEP.contains(&name) && !is_constant(name, &results) {
            foreign.push((parameters.len(), name));
        }
    }
    // Rather a parameter than a moment, which has a parameter's name in its own.
    if let Some((_, name)) = foreign.iter().min() {
        let near = passes::explain::nearest(name, initializers.keys().copied());
        let near = match near.is_empty() {
            true => "it is of another model".to_string(),
            false => format!("which has {}", near.join(", ")),
        };
        let (states, model) = (states.path().display(), model.display());
        let message = format!("{states}: there is no initializer {name} in {model}; {near}");
        return Err(Failure::Input(message));
    }
    if values.is_empty() {
        let (states, model) = (states.path().display(), model.display());
        let message = format!("{states}: has no value of an initializer of {model}");
        return Err(Failure::Input(message));
    }
    Ok(values)
}

/// True for a constant within the file, which no step changes. A second one of the same name has a
/// number.
fn is_constant(name: &str, results: &BTreeSet<&str>) -> bool {
    let is_number = |text: &str| text.parse::<u64>().is_ok();
    let first = name
        .rsplit_once('.')
        .filter(|(_, number)| is_number(number));
    results.contains(name) || first.is_some_and(|(first, _)| results.contains(first))
}

/// An error if a file to write is one that was read.
fn check_is_new(path: &Path, read: &BTreeSet<PathBuf>) -> Result<(), Failure> {
    let Ok(whole) = path.canonicalize() else {
        // There is no such file.
        return Ok(());
    };
    let is_same = |other: &PathBuf| other.canonicalize().is_ok_and(|other| other == whole);
    match read.iter().find(|other| is_same(other)) {
        None => Ok(()),
        Some(other) => Err(Failure::Input(format!(
            "-o {}: would replace {}, which is read; name another file",
            path.display(),
            other.display()
        ))),
    }
}
