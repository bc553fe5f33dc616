//! Pools in memory of the caller: each state, input and output has its own address there. So an
//! access must lie in one of them, and inputs and outputs, whose addresses change from step to
//! step, are only copied.

use super::invalid;
use crate::Error;
use crate::access::{Access, accesses};
use artifact::{Artifact, CommandKind, Operand};
use std::collections::BTreeMap;

/// The end of each tensor, and whether it is a state, by its pool and start.
type Tensors = BTreeMap<(usize, u64), (u64, bool)>;

/// Refuses accesses of lent pools that are in no tensor, and a pause that is not in the list.
pub(super) fn check(artifact: &Artifact) -> Result<(), Error> {
    let n = artifact.commands.len();
    if artifact.pause.is_some_and(|pause| pause as usize > n) {
        return invalid(format!("it pauses after more than its {n} commands"));
    }
    let is_lent = |pool: usize| artifact.pools.get(pool).is_some_and(|pool| pool.lent);
    let mut tensors = Tensors::new();
    let states = artifact.states.iter().map(|state| (&state.operand, true));
    let io = artifact.inputs.iter().chain(&artifact.outputs);
    let io = io.map(|binding| (&binding.operand, false));
    for (operand, is_state) in states.chain(io) {
        if let Some(access) = in_lent(operand, is_lent) {
            add(&mut tensors, access, is_state)?;
        }
    }
    for command in &artifact.commands {
        let launches = matches!(command.kind, CommandKind::Launch { .. });
        for access in accesses(command)
            .iter()
            .filter(|access| is_lent(access.pool))
        {
            let line = || &artifact.lines[command.line as usize].name;
            let found = tensors.range(..=(access.pool, access.start)).next_back();
            let found =
                found.filter(|((pool, _), (end, _))| *pool == access.pool && access.end <= *end);
            match found {
                Some((_, (_, is_state))) if *is_state || !launches => {}
                Some(_) => {
                    let line = line();
                    return invalid(format!("line {line}: a kernel works on an input or output"));
                }
                None => {
                    let line = line();
                    return invalid(format!("line {line}: leaves the tensors of the caller"));
                }
            }
        }
    }
    Ok(())
}

fn in_lent(operand: &Operand, is_lent: impl Fn(usize) -> bool) -> Option<Access> {
    Access::of(operand, true).filter(|access| is_lent(access.pool))
}

fn add(tensors: &mut Tensors, access: Access, is_state: bool) -> Result<(), Error> {
    let Access {
        pool, start, end, ..
    } = access;
    let before = tensors.range(..(pool, end)).next_back();
    if before.is_some_and(|(&(p, _), &(last, _))| p == pool && start < last) {
        return invalid("two tensors of the caller share bytes".into());
    }
    tensors.insert((pool, start), (end, is_state));
    Ok(())
}
