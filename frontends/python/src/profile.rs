//! Measured times: the file of a profile, and how it is made.

use crate::errors::{error, refused};
use codegen::kernels;
use ir::{Device, Graph};
use measure::{Error, Progress, Request};
use passes::cost::profile::{Profile, Profiled};
use passes::pipeline::{Kernels, Options};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

/// What was measured, as a dict of Python.
#[derive(IntoPyObject)]
pub(crate) struct Summary {
    /// The number of ops in the file.
    ops: usize,
    /// The time of a step, and the same in the fastest round, µs.
    micros: f64,
    fastest_micros: f64,
    /// How long it was measured, s.
    seconds: f64,
    /// Ops that could not be run, with the reasons.
    refused: BTreeMap<String, String>,
}

fn open(file: &Path) -> PyResult<Profile> {
    let refused = |why: String| error(format!("profile {}: {}", file.display(), why.trim_end()));
    let text = std::fs::read_to_string(file).map_err(|e| refused(e.to_string()))?;
    Profile::from_toml(&text).map_err(|e| refused(e.to_string()))
}

/// The measured times of a file, for a step with these options.
pub(crate) fn read(file: &Path, options: &Options, device: &Device) -> PyResult<Profiled> {
    let refused = |why: String| error(format!("profile {}: {why}", file.display()));
    if options.tf32 {
        return Err(refused(
            "its products are of f32; with precision=\"tf32\" there is no profile".into(),
        ));
    }
    let profile = open(file)?;
    let (measured, asked) = (profile.kernels.name(), options.kernels.name());
    if measured != asked {
        return Err(refused(format!(
            "it measured {measured} kernels, and the step has {asked} ones: give \
             kernels=\"{measured}\", or profile the step",
        )));
    }
    Profiled::new(profile, device, None).map_err(|e| refused(e.to_string()))
}

/// Measures the ops of a step and the machine that runs it, and writes the file. `repeat`: the
/// number of rounds. `fastest`: the times are those of the fastest round.
pub(crate) fn measure(
    file: &Path,
    (repeat, fastest): (Option<i64>, bool),
    (graph, options): (&Graph, &Options),
    device: &Device,
    gpu: Option<u32>,
) -> PyResult<Summary> {
    if options.tf32 {
        return Err(error(
            "profile: it has the times of f32 products; plan without precision=\"tf32\"",
        ));
    }
    let repeat = match repeat.map(u32::try_from) {
        None => None,
        Some(Ok(n @ 1..=1000)) => Some(n),
        Some(_) => return Err(error("profile: repeat is a number from 1 to 1000")),
    };
    if options.kernels == Kernels::Generated {
        kernels::find().map_err(error)?;
    }
    let folder = file.parent().filter(|folder| *folder != Path::new(""));
    if file.is_dir() || folder.is_some_and(|folder| !folder.is_dir()) {
        let why = "no file can be written there: name a file in a folder that exists";
        return Err(error(format!("profile {}: {why}", file.display())));
    }
    let known = file.exists().then(|| open(file)).transpose()?;
    let request = Request {
        graph,
        options: options.clone(),
        device,
        link: None,
        repeat,
        fastest,
        memory: None,
        known: known.as_ref(),
    };
    let mut look = |_: Progress| options.cancel.look();
    let measured = match gpu {
        Some(number) => gpu::Here::find(number)
            .map_err(error)
            .and_then(|here| measure::gpu(&request, &here).map_err(|e| failure(file, e))),
        None => measure::processor(&request, &mut look).map_err(|e| failure(file, e)),
    }?;
    let profile = &measured.profile;
    let text = profile.to_toml().map_err(error)?;
    artifact::replace_file(file, &[text.as_bytes()])
        .map_err(|e| error(format!("profile {}: {e}", file.display())))?;
    Ok(Summary {
        ops: profile.ops.len(),
        micros: profile.step_micros,
        fastest_micros: measured.fastest_micros,
        seconds: profile.profiling_seconds,
        refused: measured.refused,
    })
}

fn failure(file: &Path, failed: Error) -> PyErr {
    match failed {
        Error::Compile(error) => refused(*error),
        Error::Request(why) => error(format!("profile {}: {why}", file.display())),
        other @ (Error::Emit(_) | Error::Run(_)) => error(other),
    }
}
