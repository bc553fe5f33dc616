//! The lines between the host and the disk, and their places in the list.
//!
//! As in `prefetch`, each load is moved up to where the disk must start it to end in time, but not
//! higher than the host has room. Each store is moved down to where it ends, so that the lines in
//! between do not wait for its bytes; stores may take half of the room.

use super::held::{Held, Visit};
use super::tier::{Clock, Tier};
use crate::alloc::{lifetimes, live_bytes};
use crate::plan::Problem;
use crate::plan::machine::HOST;
use ir::schedule::{Buffer, BufferData, InstrData, InstrKind, Loc, Schedule, Why};
use std::collections::{BTreeMap, BTreeSet};

/// A schedule in which buffers have their homes on the disk. At most `most` bytes of the host are
/// alive because of copies that move.
pub(super) fn spilled(
    problem: &Problem<'_>,
    schedule: &Schedule,
    (tier, clock): (&Tier, &Clock),
    held: &[Held],
    most: u64,
) -> Schedule {
    let visits: Vec<Visit> = held.iter().flat_map(Held::visits).collect();
    let times: Vec<[f64; 2]> = visits
        .iter()
        .map(|visit| visit.micros(problem.cost))
        .collect();
    let busy = [0, 1].map(|way| times.iter().map(|time| time[way]).sum::<f64>());
    let clock = clock.slowed(busy[0].max(busy[1]));
    let mut spilled = schedule.clone();
    let staged = buffers(&mut spilled, tier, held, &visits);
    let mut of: BTreeMap<Buffer, Vec<(&Visit, Buffer)>> = BTreeMap::new();
    for (visit, &buffer) in visits.iter().zip(&staged) {
        of.entry(visit.buffer).or_default().push((visit, buffer));
    }
    for (line, data) in spilled.instrs.values_mut().enumerate() {
        rename(data, line, &of);
    }
    let live = live_bytes(&spilled, &lifetimes(&spilled), HOST);
    let slots = slots(&clock, &visits, &times, live, most);
    insert(&mut spilled, tier, &visits, &staged, &slots);
    spilled
}

/// Moves the homes of buffers to the disk, and adds a buffer of the host for each visit.
fn buffers(schedule: &mut Schedule, tier: &Tier, held: &[Held], visits: &[Visit]) -> Vec<Buffer> {
    let names = schedule.buffers.values().map(|data| data.name.clone());
    let mut taken: BTreeSet<String> = names.filter(|name| !name.is_empty()).collect();
    let mut fresh = |name: &str, suffix: &str| {
        if name.is_empty() {
            return String::new();
        }
        let (stem, rest) = name.rsplit_once(".host").unwrap_or((name, ""));
        let wanted = format!("{stem}.{suffix}{rest}");
        let mut numbered = (2..).map(|n| format!("{wanted}.{n}"));
        let mut name = wanted.clone();
        while !taken.insert(name.clone()) {
            name = numbered.next().expect("there is no last number");
        }
        name
    };
    let staged = visits.iter().map(|visit| {
        let name = fresh(&schedule.buffers[visit.buffer].name, "staged");
        BufferData {
            name,
            pool: HOST,
            bytes: visit.size(),
        }
    });
    let staged: Vec<BufferData> = staged.collect();
    for one in held {
        let home = &mut schedule.buffers[one.buffer];
        home.name = fresh(&home.name, "disk");
        home.pool = tier.pool;
    }
    staged
        .into_iter()
        .map(|data| schedule.buffers.push(data))
        .collect()
}

/// Lets a line touch the visits' buffers instead of their homes.
fn rename(data: &mut InstrData, line: usize, visits: &BTreeMap<Buffer, Vec<(&Visit, Buffer)>>) {
    for loc in data.kind.places_mut() {
        let of = visits.get(&loc.buffer).into_iter().flatten();
        let mut here = of.filter(|(visit, _)| {
            (visit.first..visit.last + 1).contains(&line) && visit.bytes.contains(&loc.offset)
        });
        if let Some(&(visit, buffer)) = here.next() {
            *loc = Loc {
                buffer,
                offset: loc.offset - visit.bytes.start,
            };
        }
    }
}

/// Before which line each visit's load and store stand.
struct Slots {
    load: Vec<usize>,
    store: Vec<usize>,
}

/// Finds the slots. `live` has the bytes of the host at each line.
fn slots(
    clock: &Clock,
    visits: &[Visit],
    times: &[[f64; 2]],
    mut live: Vec<u64>,
    most: u64,
) -> Slots {
    let n = clock.starts.len();
    let at = |line: usize| clock.at(line);
    let same = |a: usize, b: usize| visits[a].buffer == visits[b].buffer;

    // Stores, first to last.
    let fullest = live.iter().copied().max().unwrap_or(0);
    let most_stored = fullest.max(fullest.midpoint(most));
    let mut store: Vec<usize> = visits.iter().map(|visit| visit.last + 1).collect();
    let mut by_line: Vec<usize> = (0..visits.len()).collect();
    by_line.sort_by_key(|&k| visits[k].stores);
    let mut free = 0.0_f64;
    for &k in &by_line {
        let Some(written) = visits[k].stores else {
            continue;
        };
        let next = (k + 1 < visits.len() && same(k, k + 1)).then(|| visits[k + 1].first);
        let (end, size) = (next.unwrap_or(n), visits[k].size());
        free = free.max(at(written + 1)) + times[k][1];
        let mut slot = written + 1;
        while slot < end && at(slot) < free {
            if slot > visits[k].last {
                if live[slot] + size > most_stored {
                    break;
                }
                live[slot] += size;
            }
            slot += 1;
        }
        store[k] = slot;
    }

    // Loads, last to first.
    let most = fullest.max(most);
    let mut load: Vec<usize> = visits.iter().map(|visit| visit.first).collect();
    by_line.sort_by_key(|&k| visits[k].first);
    let mut free = f64::INFINITY;
    for &k in by_line.iter().rev().filter(|&&k| visits[k].loads) {
        let stored = (0..k).rev().take_while(|&before| same(before, k));
        let stored = stored.filter(|&before| visits[before].stores.is_some());
        let lowest = stored.map(|before| store[before]).max().unwrap_or(0);
        let wanted = at(load[k]).min(free) - times[k][0];
        let mut slot = load[k];
        while lowest < slot && wanted < at(slot) && live[slot - 1] + visits[k].size() <= most {
            slot -= 1;
            live[slot] += visits[k].size();
        }
        load[k] = slot;
        free = wanted.max(at(slot));
    }
    // The disk is a queue: a load that is needed later must not come before one that is needed
    // sooner.
    let mut latest = 0;
    for &k in by_line.iter().filter(|&&k| visits[k].loads) {
        latest = latest.max(load[k]);
        load[k] = latest;
    }
    Slots { load, store }
}

/// Puts the loads and stores into the list.
fn insert(
    schedule: &mut Schedule,
    tier: &Tier,
    visits: &[Visit],
    staged: &[Buffer],
    slots: &Slots,
) {
    let copy = |k: usize, loads: bool| {
        let visit = &visits[k];
        let home = Loc {
            buffer: visit.buffer,
            offset: visit.bytes.start,
        };
        let (src, dst) = match loads {
            true => (home, staged[k].into()),
            false => (staged[k].into(), home),
        };
        let bytes = visit.bytes.end - visit.bytes.start;
        InstrData {
            kind: InstrKind::Copy { src, dst, bytes },
            stream: if loads { tier.load } else { tier.store },
            after: vec![],
            why: if loads { Why::Load } else { Why::Store },
        }
    };
    let all = 0..visits.len();
    let stores = all.clone().filter(|&k| visits[k].stores.is_some());
    let loads = all.filter(|&k| visits[k].loads);
    // At one place, stores come first: a load may read what they write.
    let mut added: Vec<(usize, bool, usize, usize)> = stores
        .map(|k| (slots.store[k], false, visits[k].stores.unwrap_or(0), k))
        .chain(loads.map(|k| (slots.load[k], true, visits[k].first, k)))
        .collect();
    added.sort_unstable();
    let mut added = added.into_iter().peekable();
    let old = std::mem::take(&mut schedule.instrs);
    let n = old.len();
    for (line, data) in old.into_values().enumerate() {
        while let Some((_, loads, _, k)) = added.next_if(|add| add.0 <= line) {
            schedule.instrs.push(copy(k, loads));
        }
        schedule.instrs.push(data);
    }
    debug_assert!(
        added.clone().all(|add| add.0 == n),
        "a slot should be in the list"
    );
    for (_, loads, _, k) in added {
        schedule.instrs.push(copy(k, loads));
    }
}
