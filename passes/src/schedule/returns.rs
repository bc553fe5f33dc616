//! Moves copies of states that the host has updated down, to where the update is complete.
//!
//! Before: each copy of a new value to the device is directly after the host's update. After: it is
//! where the host will have computed the value. The link is a queue: a copy that waits for the host
//! would let all copies behind it wait too, such as those of values that the backward reads.

use crate::cost::Cost;
use crate::plan::Problem;
use crate::plan::machine::{COMPUTE, D2H, H2D, ON_HOST};
use crate::schedule::prefetch::reorder;
use ir::schedule::{Access, InstrKind, Schedule, Why};
use ir::{Buffer, Graph, Id, Instr};
use std::collections::BTreeMap;

/// Reorders the lines.
pub fn run(problem: &Problem<'_>, schedule: &mut Schedule) {
    let is_return = |line: usize| {
        let data = &schedule.instrs[Instr::new(line)];
        data.stream == H2D && data.why == Why::Update
    };
    let n = schedule.instrs.len();
    let mut returns: Vec<(usize, usize)> = (0..n)
        .filter(|&line| is_return(line))
        .map(|line| (line, line))
        .collect();
    if returns.is_empty() {
        return;
    }
    let (starts, computed) = clocks(problem.graph, problem.cost, schedule);
    let ends = ends(problem.graph, schedule, &returns);
    for ((line, slot), end) in returns.iter_mut().zip(ends) {
        let ready = starts.partition_point(|&start| start < computed[*line]);
        *slot = ready.clamp(*line, end);
    }
    returns.sort_by_key(|&(line, slot)| (slot, line));
    let mut returns = returns.into_iter().peekable();
    let mut order = Vec::with_capacity(n);
    for line in 0..=n {
        while let Some((copy, _)) = returns.next_if(|&(_, slot)| slot <= line) {
            order.push(copy as u32);
        }
        if line < n && !is_return(line) {
            order.push(line as u32);
        }
    }
    if !order.is_sorted() {
        reorder(schedule, &order);
    }
}

/// When each line would start if only computing took time, and when the host will have done all
/// that it was given before each line, by the same clock.
fn clocks(graph: &Graph, cost: &dyn Cost, schedule: &Schedule) -> (Vec<f64>, Vec<f64>) {
    let (mut compute, mut out, mut host) = (0.0, 0.0f64, 0.0f64);
    let (mut starts, mut computed) = (vec![], vec![]);
    for (instr, data) in schedule.instrs.iter() {
        starts.push(compute);
        computed.push(host);
        let micros = || cost.line(graph, schedule, instr);
        match data.stream {
            COMPUTE => compute += micros(),
            D2H => out = out.max(compute) + micros(),
            ON_HOST => host = host.max(out) + micros(),
            _ => {}
        }
    }
    (starts, computed)
}

/// For each copy, the line before which it must be: the next one that writes what it reads, or
/// accesses what it writes; the number of lines if there is none.
fn ends(graph: &Graph, schedule: &Schedule, copies: &[(usize, usize)]) -> Vec<usize> {
    let n = schedule.instrs.len();
    // By buffer, the accesses of the lines that access a copy's source or target.
    let mut accesses: BTreeMap<Buffer, Vec<(usize, Access)>> = BTreeMap::new();
    let instr = |line: usize| Instr::new(line);
    for &(line, _) in copies {
        if let InstrKind::Copy { src, dst, .. } = schedule.instrs[instr(line)].kind {
            accesses.entry(src.buffer).or_default();
            accesses.entry(dst.buffer).or_default();
        }
    }
    for line in 0..n {
        schedule.each_access(graph, instr(line), |access| {
            if let Some(list) = accesses.get_mut(&access.loc.buffer) {
                list.push((line, access));
            }
        });
    }
    let end = |&(line, _): &(usize, usize)| {
        let mut end = n;
        schedule.each_access(graph, instr(line), |own| {
            let meets = |other: &Access| {
                let (a, b) = (own.loc.offset, other.loc.offset);
                a < b + other.bytes && b < a + own.bytes && (own.write || other.write)
            };
            let list = &accesses[&own.loc.buffer];
            let after = list.partition_point(|&(other, _)| other <= line);
            let next = list[after..].iter().find(|(_, other)| meets(other));
            end = next.map_or(end, |&(other, _)| end.min(other));
        });
        end
    };
    copies.iter().map(end).collect()
}
