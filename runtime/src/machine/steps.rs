//! Several steps that take turns on one memory and one set of states: see [`Artifact::others`].

use super::{Machine, Memory, Options, Slot, write_traces};
use crate::foreign::Foreign;
use crate::{Error, validate};
use artifact::{Artifact, Initial, MemorySpace, State, StateKind, Unshared};
use std::path::Path;
use std::sync::Arc;

/// A machine for each step of an artifact. One of them has its turn; the others are idle.
#[derive(Debug)]
pub struct Steps {
    machines: Vec<Machine>,
    turn: usize,
}

impl Steps {
    /// The machine of the first step, and those of its other steps, which are loaded here on the
    /// memory of the first.
    ///
    /// # Errors
    /// A step cannot be loaded.
    pub fn new(first: Machine, others: Vec<Artifact>, options: Options) -> Result<Steps, Error> {
        let mut machines = vec![first];
        for other in others {
            let machine = machines[0].another(other, options, None)?;
            machines.push(machine);
        }
        Ok(Steps { machines, turn: 0 })
    }

    /// The machine that has its turn. All states can be reached by it.
    pub fn now(&mut self) -> &mut Machine {
        &mut self.machines[self.turn]
    }

    /// Gives a step its turn, by its number; the first is 0. Nothing is copied. The step before is
    /// finished first.
    ///
    /// # Errors
    /// The step before has failed.
    pub fn turn(&mut self, step: usize) -> Result<&mut Machine, Error> {
        if step != self.turn {
            self.now().wait()?;
            let values: Vec<(String, bool)> = self.now().values();
            self.turn = step;
            self.now().take_values(&values);
        }
        Ok(self.now())
    }

    /// All machines, for what is known of them.
    pub fn machines(&self) -> &[Machine] {
        &self.machines
    }

    /// Writes what ran when, in Chrome's format: each step is a process of its own, and all are on
    /// one clock.
    ///
    /// # Errors
    /// Steps are running, or the file cannot be written.
    pub fn write_trace(&mut self, path: impl AsRef<Path>) -> Result<(), Error> {
        write_traces(&self.machines, path.as_ref())
    }

    /// One past the last byte of the device's pool that any step touched.
    pub fn measured_peak_bytes(&self) -> u64 {
        self.measured_in(MemorySpace::Device(0))
    }

    /// The same of any pool.
    pub fn measured_in(&self, space: MemorySpace) -> u64 {
        let peaks = self.machines.iter().map(|m| m.measured_in(space));
        peaks.max().unwrap_or(0)
    }
}

impl Machine {
    /// Loads another step, which runs on the memory and the states of this one, in turn with it:
    /// while one of them runs, the other does nothing. The caller sees to that; [`Steps`] does.
    /// `foreign` computes ops that have no kernel.
    ///
    /// # Errors
    /// The step has other states, states in other places, or constants with other values; or it
    /// cannot be loaded.
    pub fn another(
        &self,
        mut artifact: Artifact,
        options: Options,
        foreign: Option<Arc<dyn Foreign>>,
    ) -> Result<Machine, Error> {
        self.idle()?;
        match foreign {
            Some(_) => validate::validate_calls(&artifact)?,
            None => validate::validate(&artifact)?,
        }
        let refused = |e| Error::Invalid(format!("another step on the same states: {e}"));
        artifact::check_sharing(&self.artifact_of_states(), &artifact).map_err(refused)?;
        for state in &mut artifact.states {
            if let (StateKind::Const, Initial::Data { start, bytes }) = (state.kind, state.initial)
            {
                let value = &artifact.data[start as usize..][..bytes as usize];
                if super::read(&self.core, &state.operand)? != value {
                    return Err(refused(Unshared::Value(state.path.clone())));
                }
            }
            state.initial = Initial::Absent;
        }
        let backend = self.core.backend.sharing(&options, foreign)?;
        let mut machine = Machine::validated(backend, artifact, options, Memory::Shared)?;
        machine.take_values(&self.values());
        Ok(machine)
    }

    /// What another step must agree with.
    fn artifact_of_states(&self) -> Artifact {
        Artifact {
            pools: self.pools.clone(),
            states: self.states.iter().map(|slot| slot.what.clone()).collect(),
            ..Artifact::default()
        }
    }

    /// Which states have values.
    fn values(&self) -> Vec<(String, bool)> {
        let value = |slot: &Slot<State>| (slot.what.path.clone(), slot.has_value);
        self.states.iter().map(value).collect()
    }

    fn take_values(&mut self, values: &[(String, bool)]) {
        for slot in &mut self.states {
            let value = values.iter().find(|(path, _)| *path == slot.what.path);
            slot.has_value = value.is_some_and(|(_, has_value)| *has_value);
        }
        // The step before may have used their bytes.
        for slot in &mut self.inputs {
            slot.has_value = false;
        }
    }
}
