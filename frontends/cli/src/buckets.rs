//! `--buckets`: a step for each of several sizes of batches, on one memory and one set of states.
//!
//! The step of the largest size is planned freely. The others keep its homes of the states, and
//! plan everything else in its memory. So the peak of all is that of the largest.

use crate::args::{Buckets, BucketsArgs, Compiling, Reading};
use crate::failure::Failure;
use crate::model::{self, Format, Machine, Model};
use passes::pipeline::Compiled;
use std::path::Path;

/// A symbolic size and its values.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    name: String,
    largest: u64,
    /// The smaller values, largest first.
    smaller: Vec<u64>,
}

/// How the model of the largest size is read, and the other sizes; none without `--buckets`.
pub(crate) fn largest(
    path: &Path,
    reading: &Reading,
    args: &BucketsArgs,
) -> Result<(Reading, Option<Sizes>), Failure> {
    let Some(buckets) = &args.buckets else {
        return Ok((reading.clone(), None));
    };
    let refused = |why: String| Failure::Input(format!("--buckets: {why}"));
    let name = match &buckets.name {
        Some(name) => name.clone(),
        None => only_symbol(path, reading, buckets)?,
    };
    if reading.dim.iter().any(|(given, _)| *given == name) {
        return Err(refused(format!(
            "--dim {name} gives the same size one value; leave one of the two out"
        )));
    }
    let (&largest, smaller) = buckets.sizes.split_first().expect("it should have a size");
    let mut reading = reading.clone();
    reading.dim.push((name.clone(), largest));
    let smaller = smaller.to_vec();
    let sizes = Sizes {
        name,
        largest,
        smaller,
    };
    Ok((reading, Some(sizes)))
}

/// The symbolic size that has no value.
fn only_symbol(path: &Path, reading: &Reading, buckets: &Buckets) -> Result<String, Failure> {
    let format = model::format(path)?;
    let mut names = match format {
        Format::Config => vec!["sequence".to_string()],
        Format::Pt2 => torch::symbols(path).map_err(|e| Failure::Input(e.to_string()))?,
        Format::Onnx | Format::Ir | Format::Lit => vec![],
    };
    names.retain(|name| reading.dim.iter().all(|(given, _)| given != name));
    if let [name] = &names[..] {
        return Ok(name.clone());
    }
    let sizes: Vec<String> = buckets.sizes.iter().map(u64::to_string).collect();
    let found = match (names.is_empty(), format) {
        // The names in an .onnx file are not known here.
        (true, Format::Onnx) => String::new(),
        (true, _) => {
            return Err(Failure::Input(format!(
                "--buckets: {}: it has no symbolic size without a value, so all its batches have \
                 one size; leave --buckets out, or export the model with a symbolic size \
                 (dynamic_shapes of torch.export)",
                path.display()
            )));
        }
        (false, _) => format!(" ({})", names.join(", ")),
    };
    Err(Failure::Input(format!(
        "--buckets: {}: which symbolic size{found} has these values? --buckets NAME={}; --dim \
         gives others theirs",
        path.display(),
        sizes.join(",")
    )))
}

impl Sizes {
    /// The symbolic size's name.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Its largest value.
    pub(crate) fn largest(&self) -> u64 {
        self.largest
    }

    /// The steps of the smaller sizes, with these. `first` is the step of the largest, `model` its
    /// model.
    pub(crate) fn compiled(
        &self,
        model: &Model,
        first: &Compiled,
        compiling: &Compiling,
        machine: &Machine,
    ) -> Result<Vec<(u64, Compiled)>, Failure> {
        let (_, reading) = &model.from;
        let is_cut = |(name, size): &(String, u64)| *name == self.name && *size < self.largest;
        if reading.dim.iter().any(is_cut) {
            return Err(Failure::Input(format!(
                "--buckets: {} is the batch that --micro-batches auto cuts; give the number of \
                 micro-batches",
                self.name
            )));
        }
        // Dumps are those of the first step.
        let compiling = Compiling {
            dump_ir_after: None,
            dump_dir: None,
            time_passes: false,
            ..compiling.clone()
        };
        let one = |&size: &u64| {
            let graph = model::graph_with(model, &self.name, size)?;
            let beside = model::compile_beside(&graph, &compiling, machine, first);
            let compiled = beside.map_err(|failure| match failure {
                Failure::NoFit(infeasible) => Failure::Input(format!(
                    "--buckets: the step of {}={size} does not fit into the memory of the largest \
                     with the states where it has them: {infeasible}",
                    self.name
                )),
                other => other,
            })?;
            Ok((size, compiled))
        };
        self.smaller.iter().map(one).collect()
    }
}
