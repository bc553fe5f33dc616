//! Several steps on one set of states. Each is a whole step of its own, with commands and kernels
//! for batches of one size. They take turns: between two of them nothing is copied, because each
//! finds every state where the other one has left it.

use crate::{Artifact, Initial, MemorySpace, State, StateKind};

/// Why two steps cannot run on the same memory.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unshared {
    /// A state of one is no state of the other.
    #[error("state {0} is in one of the steps only")]
    Alone(String),
    /// A state has another type, kind or place.
    #[error("state {0} has another type or place in the other step")]
    Differs(String),
    /// A constant has another value, so it depends on the size of the batch.
    #[error("constant {0} has another value in the other step")]
    Value(String),
    /// The steps have other pools.
    #[error("the steps have other pools")]
    Pools,
    /// The other step has what only the first may have.
    #[error("a step that shares memory has steps of its own")]
    Nested,
}

/// The first step with the others in it. Its pools become as large as any of them needs. The others
/// lose their initial values, which the first one has.
///
/// # Errors
/// The steps cannot run on the same memory.
pub fn sharing(mut first: Artifact, others: Vec<Artifact>) -> Result<Artifact, Unshared> {
    for mut other in others {
        same_constants(&first, &other)?;
        for state in &mut other.states {
            state.initial = Initial::Absent;
        }
        other.data = vec![];
        for (pool, needs) in first.pools.iter_mut().zip(&other.pools) {
            // What a plan promises of a device is the size of its pool.
            if matches!(pool.space, MemorySpace::Host | MemorySpace::Disk) {
                pool.bytes = pool.bytes.max(needs.bytes);
            }
        }
        first.others.push(other);
    }
    first
        .others
        .iter()
        .try_for_each(|other| check_sharing(&first, other))?;
    Ok(first)
}

/// Checks that a step can run on the memory of another: it has the same states in the same places,
/// and pools that are no larger.
///
/// # Errors
/// It cannot.
pub fn check_sharing(first: &Artifact, other: &Artifact) -> Result<(), Unshared> {
    if !other.others.is_empty() {
        return Err(Unshared::Nested);
    }
    let fits = first.pools.len() == other.pools.len()
        && first.pools.iter().zip(&other.pools).all(|(pool, own)| {
            (pool.space, pool.lent) == (own.space, own.lent) && own.bytes <= pool.bytes
        });
    if !fits {
        return Err(Unshared::Pools);
    }
    let sorted = |artifact: &Artifact| -> Vec<State> {
        let mut states = artifact.states.clone();
        states.sort_by(|a, b| a.path.cmp(&b.path));
        states
    };
    let (all, own) = (sorted(first), sorted(other));
    for (one, two) in all.iter().zip(&own) {
        if one.path != two.path {
            return Err(Unshared::Alone(one.path.clone().min(two.path.clone())));
        }
        if one.kind != two.kind || one.operand != two.operand {
            return Err(Unshared::Differs(one.path.clone()));
        }
    }
    let common = all.len().min(own.len());
    match all[common..].first().or(own[common..].first()) {
        Some(state) => Err(Unshared::Alone(state.path.clone())),
        None => Ok(()),
    }
}

/// Checks that constants with the same path have the same value.
fn same_constants(first: &Artifact, other: &Artifact) -> Result<(), Unshared> {
    let value = |artifact: &Artifact, state: &State| match state.initial {
        Initial::Data { start, bytes } => {
            Some(artifact.data[start as usize..][..bytes as usize].to_vec())
        }
        Initial::Zeros | Initial::Absent => None,
    };
    let constants = other.states.iter().filter(|s| s.kind == StateKind::Const);
    for state in constants {
        let same = first.states.iter().find(|one| one.path == state.path);
        if same.is_some_and(|one| value(first, one) != value(other, state)) {
            return Err(Unshared::Value(state.path.clone()));
        }
    }
    Ok(())
}
