//! What each line of a step adds to the device's memory.

use crate::alloc;
use crate::pipeline::Compiled;
use crate::plan::machine::DEVICE;
use ir::schedule::InstrKind;
use ir::{Buffer, Id, Instr, Phase};
use std::collections::BTreeSet;

/// The device's bytes around a line: those of buffers that are in use, in the order of the list.
#[derive(Clone, PartialEq, Debug)]
pub struct LineBytes {
    /// The line.
    pub instr: Instr,
    /// The phase of its node; none if it is a copy.
    pub phase: Option<Phase>,
    /// The module of its node; empty if it is a copy.
    pub module: String,
    /// In use just before it.
    pub before: u64,
    /// What it needs in addition while it runs: results and scratch. ProTrain's intra-operator
    /// memory delta (Yao et al., section 3.2).
    pub delta: u64,
    /// In use after it.
    pub after: u64,
}

/// The bytes around each line. The most of `before + delta` is the lower bound of the peak.
pub fn lines(compiled: &Compiled) -> Vec<LineBytes> {
    let program = &compiled.program;
    let schedule = &program.schedule;
    let lives = alloc::lifetimes(schedule);
    let live = alloc::live_bytes(schedule, &lives, DEVICE);
    let (mut begins, mut ends) = (vec![0; live.len() + 1], vec![0; live.len() + 1]);
    for (buffer, life) in lives.iter() {
        let data = &schedule.buffers[buffer];
        if data.pool == DEVICE {
            begins[life.start as usize] += data.bytes;
            ends[life.end as usize] += data.bytes;
        }
    }
    // What is there at the entry is no line's delta.
    let found: BTreeSet<Buffer> = schedule.entry.iter().map(|(_, loc)| loc.buffer).collect();
    let found = found.into_iter().map(|buffer| &schedule.buffers[buffer]);
    let found = found.filter(|data| data.pool == DEVICE);
    begins[0] -= found.map(|data| data.bytes).sum::<u64>();
    let of = |instr: Instr| {
        let at = instr.index();
        let node = match schedule.instrs[instr].kind {
            InstrKind::Run { node, .. } => Some(&program.graph.nodes[node]),
            InstrKind::Copy { .. } => None,
        };
        LineBytes {
            instr,
            phase: node.map(|node| node.phase),
            module: node.map(|node| node.module.clone()).unwrap_or_default(),
            before: live[at] - begins[at],
            delta: begins[at],
            after: live[at] - ends[at + 1],
        }
    };
    schedule.instrs.ids().map(of).collect()
}
