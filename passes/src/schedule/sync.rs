//! Writes `after`: which lines of other streams a line waits for. The only place that does.
//!
//! Before: a schedule and its plan. After: every two lines that touch the same bytes, one of them
//! writing, are ordered by streams and waits, in a step and from one step to the next. The list's
//! order decides which comes first; the reuse of an address is one more conflict.
//!
//! One vector clock a line says which lines of each stream are known to be done when it starts; a
//! wait is added only where the clock does not cover a conflict, latest first, so no pass is needed
//! that removes waits. The list is walked twice: in the second walk, conflicts with the first are
//! waits for the previous step. Accesses two steps apart need no look: the same line of the step
//! between touches the same bytes.

use ir::schedule::{Access, Dep, Schedule};
use ir::{Graph, Id, Instr, Plan, Pool, Table};
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;

/// One run of one line: its position in the list, plus the list's length in the second walk.
/// `NEVER` is before all.
type Moment = u32;
const NEVER: Moment = 0;
/// One moment a stream.
type Moments = SmallVec<[Moment; 4]>;

/// Who last wrote a range, and the latest reader of each stream since.
#[derive(Clone)]
struct Users {
    end: u64,
    writer: Moment,
    readers: Moments,
}

/// Users of one pool's bytes, by start of range. Ranges that no line has used are absent.
#[derive(Default)]
struct Ranges(BTreeMap<u64, Users>);

impl Ranges {
    /// Makes `at` a border of ranges.
    fn split(&mut self, at: u64) {
        if let Some((_, users)) = self.0.range_mut(..at).next_back()
            && at < users.end
        {
            let tail = users.clone();
            users.end = at;
            self.0.insert(at, tail);
        }
    }
    /// Calls `conflict` with every moment that `access` must come after, and records it.
    fn access(
        &mut self,
        (lo, hi): (u64, u64),
        write: bool,
        now: Moment,
        stream: usize,
        n_streams: usize,
        conflict: &mut Vec<Moment>,
    ) {
        self.split(lo);
        self.split(hi);
        let mut gaps = vec![];
        let mut at = lo;
        for (&start, users) in self.0.range_mut(lo..hi) {
            if at < start {
                gaps.push((at, start));
            }
            at = users.end;
            conflict.push(users.writer);
            if write {
                conflict.extend(users.readers.iter().copied());
            } else {
                users.readers[stream] = now;
            }
        }
        if write {
            // One range replaces all: the map stays as small as the buffers in use.
            while let Some((&start, _)) = self.0.range(lo..hi).next() {
                self.0.remove(&start);
            }
            self.0.insert(
                lo,
                Users {
                    end: hi,
                    writer: now,
                    readers: smallvec![NEVER; n_streams],
                },
            );
            return;
        }
        if at < hi {
            gaps.push((at, hi));
        }
        for (lo, hi) in gaps {
            let mut readers: Moments = smallvec![NEVER; n_streams];
            readers[stream] = now;
            self.0.insert(
                lo,
                Users {
                    end: hi,
                    writer: NEVER,
                    readers,
                },
            );
        }
    }
}

/// Writes every line's `after`.
pub fn run(graph: &Graph, schedule: &mut Schedule, plan: &Plan) {
    let n = schedule.instrs.len();
    let n_streams = schedule.streams.len();
    let accesses: Vec<SmallVec<[Access; 6]>> = schedule
        .instrs
        .ids()
        .map(|instr| {
            let mut accesses = SmallVec::new();
            schedule.each_access(graph, instr, |access| accesses.push(access));
            accesses
        })
        .collect();
    let streams: Vec<usize> = schedule
        .instrs
        .values()
        .map(|data| data.stream.index())
        .collect();
    let mut ranges: Table<Pool, Ranges> = schedule.pools.ids().map(|_| Ranges::default()).collect();
    // clock[moment][s]: the latest moment on stream s that is done when `moment` is done.
    let mut clocks: Vec<Moment> = vec![NEVER; (2 * n + 1) * n_streams];
    let mut last = vec![NEVER; n_streams];
    let mut conflicts = vec![];
    for walk in 0..2 {
        for line in 0..n {
            let now = (walk * n + line + 1) as Moment;
            let stream = streams[line];
            let mut clock =
                Moments::from_slice(&clocks[last[stream] as usize * n_streams..][..n_streams]);
            conflicts.clear();
            for access in &accesses[line] {
                let lo = plan.address(access.loc);
                let pool = schedule.buffers[access.loc.buffer].pool;
                let range = (lo, lo + access.bytes);
                ranges[pool].access(range, access.write, now, stream, n_streams, &mut conflicts);
            }
            // Most conflicts are with lines that are known to be done.
            let of = |moment: Moment| streams[(moment as usize - 1) % n];
            conflicts
                .retain(|&moment| moment != NEVER && moment != now && clock[of(moment)] < moment);
            conflicts.sort_unstable_by(|a, b| b.cmp(a));
            conflicts.dedup();
            let mut after = vec![];
            for &moment in &conflicts {
                let position = (moment as usize - 1) % n;
                if moment <= clock[of(moment)] {
                    continue;
                }
                after.push(Dep {
                    instr: Instr::new(position),
                    previous: walk == 1 && moment as usize <= n,
                });
                let theirs = &clocks[moment as usize * n_streams..][..n_streams];
                for (mine, &theirs) in clock.iter_mut().zip(theirs) {
                    *mine = (*mine).max(theirs);
                }
            }
            clock[stream] = now;
            clocks[now as usize * n_streams..][..n_streams].copy_from_slice(&clock);
            last[stream] = now;
            let data = &mut schedule.instrs[Instr::new(line)];
            if walk == 0 {
                data.after = after;
            } else {
                // The waits within the step stand already, and are the same; clocks only know more
                // in the second walk.
                data.after
                    .extend(after.into_iter().filter(|dep| dep.previous));
            }
            data.after
                .sort_unstable_by_key(|dep| (dep.previous, dep.instr));
        }
    }
}
