//! `lighterage train`.
use crate::args::TrainArgs;
use crate::failure::Failure;
pub(crate) fn run(_: &TrainArgs) -> Result<(), Failure> { Err(Failure::Input("later".into())) }
