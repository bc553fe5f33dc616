//! Matches requests with the plan's requests, and finds each new iteration without help from the
//! training code.
//!
//! Requests are compared with the plan in order, by bytes and stream. After the plan's last
//! request, the first one of the step is expected: this is how a new iteration is found. A request
//! that differs is searched for in this order:
//!
//! 1. among the skipped ones of the last [`WINDOW`] requests: threads may have swapped them;
//! 2. among the next [`WINDOW`] requests, across the step's end: the requests in between are
//!    skipped;
//! 3. if [`ANCHOR`] requests in a row were not found, but the plan has exactly this sequence at a
//!    single place: at this place. So a run that leaves the step, for an evaluation or a skipped
//!    update, gets back into it.
//!
//! Any other request is extra, and the position in the plan stays. A dynamic request of the plan
//! matches any number of bytes. A request with the bytes and stream of the next static request ends
//! a run of dynamic ones.

use crate::plan::{Place, Plan};
use std::collections::{HashMap, VecDeque};

/// The largest distance of requests that are out of order.
pub const WINDOW: usize = 32;
/// The number of requests in a row that identify a place in the plan.
pub const ANCHOR: usize = 8;

/// A request whose place is taken moves to other bytes of the plan if at most this many requests
/// come in its life. In the experiment of docs/allocator.md, 11 requests go to the cache with this
/// limit; with 4096 there are 5, but a search among long lives takes far longer.
const AHEAD: usize = 256;

/// No request.
pub(crate) const NONE: u32 = u32::MAX;

/// A request of the plan, in a form that is fast to serve: half a cache line.
#[derive(Clone, Copy)]
pub(crate) struct Item {
    /// Static: bytes.
    pub(crate) bytes: u64,
    /// Static: offset; dynamic: group.
    pub(crate) place: u64,
    pub(crate) stream: u32,
    /// Static: its cell in the table of offsets.
    pub(crate) cell: u32,
    /// Dynamic: the next static request.
    after: u32,
    /// A request of another stream may get bytes of this place.
    pub(crate) crosses: bool,
}

impl Item {
    pub(crate) fn is_dynamic(&self) -> bool {
        self.after != NONE
    }

    fn is(&self, bytes: u64, stream: u32) -> bool {
        self.bytes == bytes && self.stream == stream && !self.is_dynamic()
    }
}

/// The current state of a static request of the plan.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// It has no block.
    Idle,
    /// Its block is alive, as planned.
    Alive,
    /// Its block is alive but should have been freed.
    Late,
    /// Skipped; it may still come.
    Skipped,
    /// Skipped, and a request that is not in the plan came instead.
    Replaced,
}

/// The position at which a request was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    /// The expected one, or a later one.
    At(u32),
    /// One that was skipped.
    Skipped(u32),
    /// The expected one, but on another stream.
    OtherStream(u32),
    /// Nowhere.
    Nowhere,
}

/// The differences between the requests and the plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mismatches {
    /// Requests that came out of order.
    pub reordered: u64,
    /// Requests that the plan does not have.
    pub extra: u64,
    /// Requests of the plan that did not come.
    pub missing: u64,
    /// Requests that came with a different number of bytes.
    pub resized: u64,
    /// Requests that came on another stream.
    pub other_stream: u64,
    /// Dynamic requests that did not come.
    pub dynamic_missing: u64,
}

pub(crate) struct Sequence {
    pub(crate) items: Vec<Item>,
    pub(crate) state: Vec<State>,
    step: u32,
    /// The expected request.
    next: u32,
    /// `expired[expiry[i]..expiry[i + 1]]` should be free at request `i`.
    expiry: Vec<u32>,
    expired: Vec<u32>,
    /// The request before which each one's block is freed; `NONE`: never, or it is dynamic.
    ends: Vec<u32>,
    /// Skipped requests that may still come, and the number of requests that were passed by then.
    skipped: VecDeque<(u32, u64)>,
    passed: u64,
    /// The number of requests that were not found since the last found one, and the latest of them.
    strays: u32,
    trail: Vec<(u64, u32)>,
    /// The last request of each run of `ANCHOR`, by the run's hash; `NONE` if the run is at several
    /// places.
    anchors: HashMap<u64, u32>,
    mismatches: Mismatches,
    /// How often the end of the plan was passed.
    pub(crate) steps: u64,
}

impl Sequence {
    /// `crosses` says whether streams other than the given one may get bytes of a static place.
    pub(crate) fn new(
        plan: &Plan,
        crosses: impl Fn(u64, u64, u32) -> bool,
        mut cell: impl FnMut(u64) -> u32,
    ) -> Sequence {
        let (n, step) = (plan.requests().len(), plan.step() as usize);
        let mut items: Vec<Item> = vec![];
        let mut ends = vec![];
        for (i, request) in plan.requests().iter().enumerate() {
            let stream = request.stream;
            items.push(match request.place {
                Place::Static { bytes, offset, end } => {
                    if let Some(end) = end.map(|end| end as usize) {
                        ends.push((if end < n { end } else { end - n + step }, i as u32));
                    }
                    let crosses = crosses(offset, offset + bytes, stream);
                    Item {
                        bytes,
                        place: offset,
                        stream,
                        cell: cell(offset),
                        after: NONE,
                        crosses,
                    }
                }
                Place::Dynamic { group } => Item {
                    bytes: 0,
                    place: group.into(),
                    stream,
                    cell: 0,
                    after: 0,
                    crosses: true,
                },
            });
        }
        // Backwards over the step twice, so that a run at the step's end finds the static request
        // at its beginning.
        let mut after = step as u32;
        for i in (step..n).rev().chain((0..n).rev()) {
            match items[i].is_dynamic() {
                true => items[i].after = after,
                false => after = i as u32,
            }
        }
        let mut end_of = vec![NONE; n];
        ends.iter()
            .for_each(|&(end, i)| end_of[i as usize] = end as u32);
        let mut expiry = vec![0; n + 1];
        ends.iter().for_each(|(end, _)| expiry[end + 1] += 1);
        (0..n).for_each(|i| expiry[i + 1] += expiry[i]);
        ends.sort_unstable();
        let expired = ends.into_iter().map(|(_, i)| i).collect();
        let mut anchors = HashMap::new();
        for (last, run) in (ANCHOR - 1..).zip(items.windows(ANCHOR)) {
            if run.iter().all(|item| !item.is_dynamic()) {
                let hash = hash(run.iter().map(|item| (item.bytes, item.stream)));
                anchors
                    .entry(hash)
                    .and_modify(|at| *at = NONE)
                    .or_insert(last as u32);
            }
        }
        Sequence {
            state: vec![State::Idle; n],
            items,
            step: step as u32,
            next: 0,
            expiry,
            expired,
            ends: end_of,
            skipped: VecDeque::new(),
            passed: 0,
            strays: 0,
            trail: vec![],
            anchors,
            mismatches: Mismatches::default(),
            steps: 0,
        }
    }

    /// The expected request.
    pub(crate) fn next(&self) -> u32 {
        self.next
    }

    /// The differences until now. A skipped request that may still come counts as missing.
    pub(crate) fn mismatches(&self) -> Mismatches {
        let mut mismatches = self.mismatches;
        self.skipped
            .iter()
            .for_each(|&(i, _)| give_up(self.state[i as usize], &mut mismatches));
        mismatches
    }

    /// The places of the plan's next requests, up to the one before which the block of request `i`
    /// is freed; `None` if these are more than [`AHEAD`].
    pub(crate) fn places_until_end(&self, i: u32) -> Option<Vec<(u64, u64)>> {
        let (mut at, end) = (self.next, self.ends[i as usize]);
        let mut places = vec![];
        while at != end {
            let item = &self.items[at as usize];
            if places.len() == AHEAD {
                return None;
            }
            places.push((item.place, item.place + item.bytes));
            at = self.following(at);
        }
        Some(places)
    }

    /// The places of blocks that are there now.
    pub(crate) fn places_in_use(&self) -> impl Iterator<Item = (u64, u64)> {
        let is_there = |state: &State| matches!(state, State::Alive | State::Late);
        let items = self.items.iter().zip(&self.state);
        items
            .filter(move |(_, state)| is_there(state))
            .map(|(item, _)| (item.place, item.place + item.bytes))
    }

    fn following(&self, i: u32) -> u32 {
        if i as usize + 1 < self.items.len() {
            i + 1
        } else {
            self.step
        }
    }

    /// Finds the request of the plan. Does not change the position in the plan.
    #[inline]
    pub(crate) fn find(&mut self, bytes: u64, stream: u32) -> Found {
        let item = &self.items[self.next as usize];
        if item.is(bytes, stream) {
            Found::At(self.next)
        } else {
            self.search(bytes, stream)
        }
    }

    fn search(&mut self, bytes: u64, stream: u32) -> Found {
        let expected = self.items[self.next as usize];
        if expected.is_dynamic() && expected.stream == stream {
            // A step may have only dynamic requests; then its `after` is dynamic, too.
            let ends_run = self.items[expected.after as usize].is(bytes, stream);
            return Found::At(if ends_run { expected.after } else { self.next });
        }
        while let Some(&(i, passed)) = self.skipped.front()
            && passed + (WINDOW as u64) < self.passed
        {
            self.skipped.pop_front();
            give_up(self.state[i as usize], &mut self.mismatches);
            self.state[i as usize] = State::Idle;
        }
        if let Some(&(i, _)) = self
            .skipped
            .iter()
            .find(|(i, _)| self.items[*i as usize].is(bytes, stream))
        {
            return Found::Skipped(i);
        }
        let mut at = self.next;
        for _ in 0..WINDOW.min(self.items.len() - 1) {
            let item = &self.items[at as usize];
            at = if item.is_dynamic() {
                item.after
            } else {
                self.following(at)
            };
            if self.items[at as usize].is(bytes, stream) {
                return Found::At(at);
            }
        }
        if !expected.is_dynamic() && expected.bytes == bytes {
            return Found::OtherStream(self.next);
        }
        self.anchor(bytes, stream).map_or(Found::Nowhere, Found::At)
    }

    /// The position of the latest requests in the plan, if there is only one.
    fn anchor(&mut self, bytes: u64, stream: u32) -> Option<u32> {
        if self.trail.len() == ANCHOR {
            self.trail.remove(0);
        }
        self.trail.push((bytes, stream));
        if self.trail.len() < ANCHOR {
            return None;
        }
        let last = *self
            .anchors
            .get(&hash(self.trail.iter().copied()))
            .filter(|last| **last != NONE)?;
        let run = &self.items[last as usize + 1 - ANCHOR..=last as usize];
        let same = run
            .iter()
            .zip(&self.trail)
            .all(|(item, &(bytes, stream))| item.is(bytes, stream));
        // Requests before the step do not come again.
        let ahead = self.step <= last || self.next <= last;
        (same && ahead).then_some(last)
    }

    /// Counts a request that was not found.
    pub(crate) fn stray(&mut self) {
        self.mismatches.extra += 1;
        self.strays += 1;
    }

    /// Request `i` came, but on another stream: it has no block.
    pub(crate) fn other_stream(&mut self, i: u32, late: impl FnMut(u32, &Item)) {
        self.mismatches.other_stream += 1;
        self.advance(i, late);
    }

    /// A skipped request came after all. Its block is not late: skipped requests are forgotten
    /// before that.
    pub(crate) fn reorder(&mut self, i: u32) {
        self.mismatches.reordered += 1;
        self.state[i as usize] = State::Idle;
        self.skipped.retain(|(skipped, _)| *skipped != i);
    }

    /// Moves to request `i` and past it. Calls `late` for each block that should be free by now but
    /// is not.
    #[inline]
    pub(crate) fn advance(&mut self, i: u32, mut late: impl FnMut(u32, &Item)) {
        if self.next != i {
            self.skip(i, &mut late);
        }
        self.expire(i, &mut late);
        self.strays = 0;
        self.trail.clear();
        self.pass(i);
    }

    fn pass(&mut self, i: u32) {
        self.next = self.following(i);
        self.passed += 1;
        self.steps += u64::from(self.next <= i);
    }

    fn skip(&mut self, to: u32, late: &mut impl FnMut(u32, &Item)) {
        while self.next != to {
            let i = self.next;
            self.expire(i, late);
            self.pass(i);
            let k = i as usize;
            if self.items[k].is_dynamic() {
                self.mismatches.dynamic_missing += 1;
                continue;
            }
            let state = if 0 < self.strays {
                State::Replaced
            } else {
                State::Skipped
            };
            self.strays = self.strays.saturating_sub(1);
            // The block of an earlier round may still live.
            if self.state[k] != State::Idle {
                give_up(state, &mut self.mismatches);
                continue;
            }
            if self.skipped.len() == WINDOW
                && let Some((first, _)) = self.skipped.pop_front()
            {
                give_up(self.state[first as usize], &mut self.mismatches);
                self.state[first as usize] = State::Idle;
            }
            self.state[k] = state;
            self.skipped.push_back((i, self.passed));
        }
    }

    #[inline]
    fn expire(&mut self, i: u32, late: &mut impl FnMut(u32, &Item)) {
        let (first, last) = (
            self.expiry[i as usize] as usize,
            self.expiry[i as usize + 1] as usize,
        );
        for k in first..last {
            let old = self.expired[k];
            let state = self.state[old as usize];
            match state {
                State::Idle | State::Late => {}
                State::Alive => {
                    self.state[old as usize] = State::Late;
                    late(old, &self.items[old as usize]);
                }
                State::Skipped | State::Replaced => {
                    give_up(state, &mut self.mismatches);
                    self.state[old as usize] = State::Idle;
                    self.skipped.retain(|(skipped, _)| *skipped != old);
                }
            }
        }
    }
}

/// A skipped request does not come any more.
fn give_up(state: State, mismatches: &mut Mismatches) {
    match state {
        State::Skipped => mismatches.missing += 1,
        State::Replaced => {
            mismatches.resized += 1;
            mismatches.extra -= 1;
        }
        State::Idle | State::Alive | State::Late => {}
    }
}

/// FNV-1a over whole words.
fn hash(run: impl Iterator<Item = (u64, u32)>) -> u64 {
    let words = run.flat_map(|(bytes, stream)| [bytes, stream.into()]);
    words.fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        (hash ^ word).wrapping_mul(0x0100_0000_01b3)
    })
}
