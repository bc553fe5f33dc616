//! Runs a step, plain or compiled, to compare the results bit for bit.

use crate::evaluate::{self, Tensors};
use artifact::{Artifact, MemorySpace};
use ir::Graph;
use runtime::{Error, Files, Machine, Options};

/// The results of some steps.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// The outputs of each step, by name.
    pub outputs: Vec<Tensors>,
    /// The states after the last step, by path.
    pub states: Tensors,
}

/// Evaluates a graph, one step for each of `feeds`.
pub fn plain(graph: &Graph, start: &Tensors, feeds: &[Tensors]) -> Outcome {
    let mut states = start.clone();
    let step = |feed| {
        evaluate::step(graph, &mut states, feed).expect("the graph's kernels should take its data")
    };
    Outcome {
        outputs: feeds.iter().map(step).collect(),
        states,
    }
}

/// A machine, with a folder for pools on a disk.
fn machine(artifact: &Artifact, options: Options) -> Result<Machine, Error> {
    let folder = std::env::temp_dir();
    let files = Files {
        disk: Some(&folder),
        ..Files::default()
    };
    Machine::beside(artifact.clone(), options, files)
}

/// Bytes of each pool that a run touched, or that a plan has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Peaks {
    /// Of the device.
    pub device: u64,
    /// Of the host.
    pub host: u64,
    /// Of the disk.
    pub disk: u64,
}

impl Peaks {
    fn new(of: impl Fn(MemorySpace) -> u64) -> Peaks {
        Peaks {
            device: of(MemorySpace::Device(0)),
            host: of(MemorySpace::Host),
            disk: of(MemorySpace::Disk),
        }
    }

    /// Those of an artifact's plan.
    pub fn planned(artifact: &Artifact) -> Peaks {
        Peaks::new(|space| artifact.pool_in(space).map_or(0, |pool| pool.bytes))
    }

    /// Those that a machine has measured.
    pub fn measured(machine: &Machine) -> Peaks {
        Peaks::new(|space| machine.measured_in(space))
    }

    /// True if no pool has more than in the other.
    pub fn within(&self, other: &Peaks) -> bool {
        self.device <= other.device && self.host <= other.host && self.disk <= other.disk
    }
}

/// Runs an artifact on a machine, one step for each of `feeds`. Also returns the measured peaks.
pub fn compiled(
    artifact: &Artifact,
    options: Options,
    feeds: &[Tensors],
) -> Result<(Outcome, Peaks), Error> {
    let mut machine = machine(artifact, options)?;
    let mut outputs = vec![];
    for feed in feeds {
        write(&mut machine, artifact, feed)?;
        machine.step()?;
        outputs.push(read(&mut machine, artifact)?);
    }
    Ok((
        Outcome {
            outputs,
            states: states(&mut machine, artifact)?,
        },
        Peaks::measured(&machine),
    ))
}

/// The same, but the host continues as soon as a step has read its inputs and written its outputs:
/// the rest of the step overlaps the next one.
pub fn overlapped(
    artifact: &Artifact,
    options: Options,
    feeds: &[Tensors],
) -> Result<Outcome, Error> {
    let mut machine = machine(artifact, options)?;
    let mut outputs = vec![];
    for feed in feeds {
        write(&mut machine, artifact, feed)?;
        machine.launch()?;
        machine.wait_io()?;
        outputs.push(read(&mut machine, artifact)?);
    }
    machine.wait()?;
    Ok(Outcome {
        outputs,
        states: states(&mut machine, artifact)?,
    })
}

/// The same with `n` steps on one feed that are launched together, so that they overlap; only the
/// last step's outputs can be read.
pub fn together(
    artifact: &Artifact,
    options: Options,
    feed: &Tensors,
    n: usize,
) -> Result<Outcome, Error> {
    let mut machine = machine(artifact, options)?;
    write(&mut machine, artifact, feed)?;
    for _ in 0..n {
        machine.launch()?;
    }
    machine.wait()?;
    Ok(Outcome {
        outputs: vec![read(&mut machine, artifact)?],
        states: states(&mut machine, artifact)?,
    })
}

/// A machine that runs in a random permitted order and overwrites dead bytes.
pub fn shuffled(seed: u64) -> Options {
    Options {
        shuffle: Some(seed),
        ..Options::default()
    }
}

fn write(machine: &mut Machine, artifact: &Artifact, feed: &Tensors) -> Result<(), Error> {
    artifact
        .inputs
        .iter()
        .try_for_each(|input| machine.write_input(&input.name, &feed[&input.name]))
}

fn read(machine: &mut Machine, artifact: &Artifact) -> Result<Tensors, Error> {
    artifact
        .outputs
        .iter()
        .map(|o| Ok((o.name.clone(), machine.read_output(&o.name)?)))
        .collect()
}

fn states(machine: &mut Machine, artifact: &Artifact) -> Result<Tensors, Error> {
    artifact
        .states
        .iter()
        .map(|s| Ok((s.path.clone(), machine.read_state(&s.path)?)))
        .collect()
}
