//! Threads that share one kernel's elements.
//!
//! Before: a kernel's run, cut into parts at places that depend on the number of elements alone. After: every part has run
//! once, on whichever thread was free; parts are disjoint and know nothing of each other, so that bits do not depend on the
//! number of threads.
//!
//! A team's threads are started once and sleep between runs. The thread that asks works along, and returns when the last
//! part is done. Parts are taken under a lock, one at a time: a part is some hundred microseconds of work. Nothing is
//! allocated after [`Team::new`]. A part that panics is a failure like any other.

use crate::Error;
use crate::sync::unpoisoned;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

/// Work in parts, numbered from 0.
pub(crate) trait Parts: Send + Sync {
    /// How many parts there are.
    fn parts(&self) -> usize;
    /// Runs one part.
    fn run(&self, part: usize) -> Result<(), String>;
}

/// Threads that wait for work. Dropping it ends them.
pub struct Team {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    /// Held while work runs: a team has one work at a time.
    turn: Mutex<()>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// There is work, or the end.
    begin: Condvar,
    /// The last part is done, or a thread has started.
    end: Condvar,
}

#[derive(Default)]
struct State {
    work: Option<Arc<dyn Parts>>,
    /// The first part that nobody has taken.
    next: usize,
    /// How many parts have run.
    done: usize,
    /// The failure of the first part, by number, that failed.
    failure: Option<(usize, String)>,
    /// Threads that run: the system allocates on their behalf until they do.
    started: usize,
    over: bool,
}

impl Team {
    /// A team of `threads` threads, counting the one that asks: one less are started. An error if the system refuses.
    pub fn new(threads: usize) -> Result<Team, Error> {
        let mut team = Team { shared: Arc::default(), handles: Vec::new(), turn: Mutex::new(()) };
        for i in 1..threads {
            let shared = team.shared.clone();
            let handle = Builder::new().name(format!("team {i}")).spawn(move || shared.serve());
            team.handles.push(handle.map_err(|e| Error::Resources(format!("no thread for a team: {e}")))?);
        }
        let mut state = unpoisoned(&team.shared.state);
        while state.started < team.handles.len() {
            state = team.shared.end.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        Ok(team)
    }

    /// How many threads work, counting the one that asks.
    pub fn threads(&self) -> usize {
        self.handles.len() + 1
    }

    /// Runs every part and returns when all are done; the failure of the lowest part that failed, if one did.
    pub(crate) fn run(&self, work: Arc<dyn Parts>) -> Result<(), String> {
        let parts = work.parts();
        let _turn = unpoisoned(&self.turn);
        let mut state = unpoisoned(&self.shared.state);
        *state = State { work: Some(work), ..State::default() };
        self.shared.begin.notify_all();
        state = self.shared.take_parts(state);
        while state.done < parts {
            state = self.shared.end.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.work = None;
        state.failure.take().map_or(Ok(()), |(_, why)| Err(why))
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        unpoisoned(&self.shared.state).over = true;
        self.shared.begin.notify_all();
        for handle in self.handles.drain(..) {
            // Parts do not unwind out of a thread, so there is nothing that it could say.
            let _ = handle.join();
        }
    }
}

impl Shared {
    /// A thread of the team.
    fn serve(&self) {
        let mut state = unpoisoned(&self.state);
        state.started += 1;
        self.end.notify_one();
        while !state.over {
            state = self.take_parts(state);
            if !state.over {
                state = self.begin.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Runs parts until none is left to be taken. The lock is given up while a part runs.
    fn take_parts<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        while let Some(work) = state.work.clone().filter(|work| state.next < work.parts()) {
            let part = state.next;
            state.next += 1;
            drop(state);
            let outcome = caught(|| work.run(part));
            state = unpoisoned(&self.state);
            if let Err(why) = outcome
                && state.failure.as_ref().is_none_or(|&(other, _)| part < other)
            {
                state.failure = Some((part, why));
            }
            state.done += 1;
            if state.done == work.parts() {
                self.end.notify_one();
            }
        }
        state
    }
}

/// Runs a kernel; its panic, a bug in it, is an error, so that nobody waits for it forever.
pub(crate) fn caught(run: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Err(format!("its kernel panicked: {text}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    struct Counted {
        runs: Vec<AtomicUsize>,
        fails: fn(usize) -> Result<(), String>,
    }

    impl Parts for Counted {
        fn parts(&self) -> usize {
            self.runs.len()
        }
        fn run(&self, part: usize) -> Result<(), String> {
            self.runs[part].fetch_add(1, Ordering::SeqCst);
            (self.fails)(part)
        }
    }

    fn counted(parts: usize, fails: fn(usize) -> Result<(), String>) -> Arc<Counted> {
        Arc::new(Counted { runs: (0..parts).map(|_| AtomicUsize::new(0)).collect(), fails })
    }

    #[test]
    fn every_part_runs_once() {
        for threads in [1, 2, 5] {
            let team = Team::new(threads).expect("threads should start");
            assert_eq!(team.threads(), threads);
            for parts in (0..40).chain([1000]) {
                let work = counted(parts, |_| Ok(()));
                assert_eq!(team.run(work.clone()), Ok(()));
                assert!(work.runs.iter().all(|runs| runs.load(Ordering::SeqCst) == 1), "{threads} threads, {parts}");
            }
        }
    }

    #[test]
    fn the_first_failure_is_told_and_the_team_goes_on() {
        let team = Team::new(3).expect("threads should start");
        for _ in 0..50 {
            let fails = |part: usize| match part {
                20 => panic!("a bug in part {part}"),
                21 => Err("part 21".to_string()),
                _ => Ok(()),
            };
            assert_eq!(team.run(counted(40, fails)), Err("its kernel panicked: a bug in part 20".to_string()));
            assert_eq!(team.run(counted(40, |_| Ok(()))), Ok(()));
        }
    }

    #[test]
    fn several_threads_may_ask() {
        let team = Team::new(2).expect("threads should start");
        let works: Vec<_> = (0..4).map(|_| counted(100, |_| Ok(()))).collect();
        std::thread::scope(|scope| {
            for work in &works {
                scope.spawn(|| team.run(work.clone()));
            }
        });
        assert!(works.iter().flat_map(|work| &work.runs).all(|runs| runs.load(Ordering::SeqCst) == 1));
    }
}
