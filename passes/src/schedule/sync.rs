//! Writes `after`: the lines of other streams for which a line waits. No other place writes it.
//!
//! Before: a schedule and its plan. After: if two lines touch the same bytes, and one of them
//! writes, then streams and waits order them, within a step and from one step to the next. They
//! have the order of the list. The reuse of an address is a conflict like any other.
//!
//! Each line has a vector clock: for each stream, the last line that is known to be done when the
//! line starts. A wait is added only for a conflict that the clock does not cover, latest first. So
//! no pass must remove waits. The list is walked twice. In the second walk, conflicts with lines of
//! the first walk are waits for the previous step. Accesses that are two steps apart need no check:
//! the same line in the step between touches the same bytes.

use ir::schedule::{Access, Dep, Schedule};
use ir::{Graph, Id, Instr, Plan, Pool, Table};
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;

/// One run of one line: its position in the list plus 1, and in the second walk plus the list's
/// length. `NEVER` is before all.
type Moment = u32;
const NEVER: Moment = 0;
/// One moment for each stream.
type Moments = SmallVec<[Moment; 4]>;

/// The last writer of a range, and the latest reader of each stream since then.
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
            // One range replaces all, so the map is never larger than the number of buffers in use.
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
            // Most conflicts are with lines that are already known to be done.
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
                // The waits within the step were written in the first walk. In the second walk,
                // clocks only cover more.
                data.after
                    .extend(after.into_iter().filter(|dep| dep.previous));
            }
            data.after
                .sort_unstable_by_key(|dep| (dep.previous, dep.instr));
        }
    }
}
