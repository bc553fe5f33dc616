//! Threads that share one kernel's run.
//!
//! Before: a kernel's run, cut into independent parts, so that bits do not depend on the number of
//! threads. After: every part has run once, on any free thread.
//!
//! A team's threads are started once, and the machines of a process share them. A thread takes a
//! part by a compare-and-swap of a ticket. The ticket has the number of the work and its next part,
//! so that a late thread takes no part of the next work. The calling thread also runs parts, and
//! returns when the last part is done. An idle thread polls for work for a short while, then
//! sleeps: kernels follow each other within microseconds, and waking a thread takes tens of them.
//! Nothing is allocated after [`Team::new`]. A panic in a part is an error like any other.

use crate::Error;
use crate::float::Standard;
use crate::kernels::KernelError;
use crate::sync::unpoisoned;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Condvar, Mutex, PoisonError, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// Work in parts, numbered from 0.
pub(crate) trait Parts: Send + Sync {
    /// Runs part number `part` of `parts`.
    fn run(&self, part: usize, parts: usize) -> Result<(), KernelError>;
}

/// Threads that wait for work. Dropping it ends them.
pub struct Team {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    /// Held while work runs: a team has one work at a time.
    turn: Mutex<()>,
}

/// How long a thread polls for work, or for its end, before it sleeps. Measured on two cores of an
/// EPYC under KVM: a polling thread begins 0.3 µs after the work exists, a sleeping thread after 26
/// µs at best and often after more than 100.
const LOOK: Duration = Duration::from_micros(200);

/// The teams that machines share, by process and number of threads.
static TEAMS: Mutex<BTreeMap<(u32, usize), Weak<Team>>> = Mutex::new(BTreeMap::new());

/// A function that runs on each thread: none takes a second part before all have one.
struct Each<F> {
    run: F,
    all: Barrier,
}

impl<F: Fn() + Send + Sync> Parts for Each<F> {
    fn run(&self, _part: usize, _parts: usize) -> Result<(), KernelError> {
        let ran = caught(|| {
            (self.run)();
            Ok(())
        });
        self.all.wait();
        ran
    }
}

/// A work's number, the work, and the number of its parts.
type Work = (u32, Arc<dyn Parts>, usize);

#[derive(Default)]
struct Shared {
    /// The number of the work, from 1, in the high half; in the low half the first part that no
    /// thread has taken.
    ticket: AtomicU64,
    /// The work that the ticket names.
    work: Mutex<Option<Work>>,
    /// The number of parts that have run.
    done: AtomicUsize,
    /// The lowest part that failed, and its error.
    failure: Mutex<Option<(usize, KernelError)>>,
    /// Threads sleep under this lock.
    sleep: Mutex<()>,
    /// Signals new work, or the end; and the number of threads that sleep until then.
    begin: Condvar,
    asleep: AtomicUsize,
    /// Signals that the last part is done, or that a thread has started; and whether a thread
    /// sleeps until then.
    end: Condvar,
    waiting: AtomicBool,
    /// The number of threads that run. The system allocates for a thread until it runs.
    started: AtomicUsize,
    over: AtomicBool,
}

impl Team {
    /// The team of so many threads that the machines of a process have together: threads of their
    /// own would take cores from each other. Each of its threads runs `prepare` first.
    pub(crate) fn shared(
        threads: usize,
        prepare: impl Fn() + Clone + Send + Sync + 'static,
    ) -> Result<Arc<Team>, Error> {
        // A fork has none of the threads.
        let key = (std::process::id(), threads);
        let mut teams = unpoisoned(&TEAMS);
        if let Some(team) = teams.get(&key).and_then(Weak::upgrade) {
            drop(teams);
            team.each(prepare);
            return Ok(team);
        }
        let team = Arc::new(Team::prepared(threads, prepare)?);
        teams.insert(key, Arc::downgrade(&team));
        Ok(team)
    }

    /// Runs a function on each thread.
    fn each(&self, run: impl Fn() + Send + Sync + 'static) {
        let parts = self.threads();
        let all = Barrier::new(parts);
        // What panics is reported by the kernel that needs it.
        let _ = self.run(Arc::new(Each { run, all }), parts);
    }

    /// A team of `threads` threads, including the caller's: one fewer is started. An error if the
    /// system refuses.
    pub fn new(threads: usize) -> Result<Team, Error> {
        Team::prepared(threads, || {})
    }
    /// The same; each started thread runs `prepare` first.
    fn prepared(
        threads: usize,
        prepare: impl Fn() + Clone + Send + 'static,
    ) -> Result<Team, Error> {
        let mut team = Team {
            shared: Arc::default(),
            handles: Vec::new(),
            turn: Mutex::new(()),
        };
        for i in 1..threads {
            let (shared, prepare) = (team.shared.clone(), prepare.clone());
            let thread = move || {
                let _standard = Standard::enter();
                prepare();
                drop(prepare);
                shared.serve();
            };
            let handle = Builder::new().name(format!("team {i}")).spawn(thread);
            team.handles
                .push(handle.map_err(|e| Error::Resources(format!("no thread for a team: {e}")))?);
        }
        let all = team.handles.len();
        team.shared
            .wait_end(|shared| shared.started.load(Ordering::SeqCst) == all);
        Ok(team)
    }

    /// The number of threads that work, including the caller's.
    pub fn threads(&self) -> usize {
        self.handles.len() + 1
    }

    /// Runs every part and returns when all are done. The error is that of the lowest part that
    /// failed.
    pub(crate) fn run(&self, work: Arc<dyn Parts>, parts: usize) -> Result<(), KernelError> {
        let _turn = unpoisoned(&self.turn);
        let shared = &*self.shared;
        let number = ((shared.ticket.load(Ordering::SeqCst) >> 32) as u32).wrapping_add(1);
        // No thread touches the count: all parts of the previous work are done.
        shared.done.store(0, Ordering::SeqCst);
        *unpoisoned(&shared.work) = Some((number, work.clone(), parts));
        shared
            .ticket
            .store(u64::from(number) << 32, Ordering::SeqCst);
        if shared.asleep.load(Ordering::SeqCst) > 0 {
            // A thread that is counted as asleep holds the lock until it sleeps, and has checked
            // the ticket after it was counted.
            drop(unpoisoned(&shared.sleep));
            shared.begin.notify_all();
        }
        shared.take_parts(number, &*work, parts);
        shared.wait_end(|shared| shared.done.load(Ordering::SeqCst) == parts);
        *unpoisoned(&shared.work) = None;
        unpoisoned(&shared.failure)
            .take()
            .map_or(Ok(()), |(_, why)| Err(why))
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
        drop(unpoisoned(&self.shared.sleep));
        self.shared.begin.notify_all();
        for handle in self.handles.drain(..) {
            // A panic in a part does not leave its thread, so there is no error here.
            let _ = handle.join();
        }
    }
}

/// Polls a condition for a while; returns whether it became true.
fn look(condition: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..32 {
            if condition() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > LOOK {
            return false;
        }
        // Other threads of the step, such as a copy's, may wait for this core.
        std::thread::yield_now();
    }
}

impl Shared {
    /// A thread of the team.
    fn serve(&self) {
        self.started.fetch_add(1, Ordering::SeqCst);
        self.tell_end();
        let mut last = 0;
        loop {
            self.wait_begin(last);
            if self.over.load(Ordering::SeqCst) {
                return;
            }
            last = (self.ticket.load(Ordering::SeqCst) >> 32) as u32;
            let work = unpoisoned(&self.work).clone();
            // If there is no work, it ended before this thread took part. If it is other work, the
            // ticket will soon name it.
            if let Some((number, work, parts)) = work {
                self.take_parts(number, &*work, parts);
            }
        }
    }

    /// Returns when there is work other than `last`, or at the end.
    fn wait_begin(&self, last: u32) {
        let ready = || {
            (self.ticket.load(Ordering::SeqCst) >> 32) as u32 != last
                || self.over.load(Ordering::SeqCst)
        };
        if look(ready) {
            return;
        }
        let mut lock = unpoisoned(&self.sleep);
        self.asleep.fetch_add(1, Ordering::SeqCst);
        while !ready() {
            lock = self
                .begin
                .wait(lock)
                .unwrap_or_else(PoisonError::into_inner);
        }
        self.asleep.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns when the condition holds. [`Shared::tell_end`] signals a change.
    fn wait_end(&self, condition: impl Fn(&Shared) -> bool) {
        if look(|| condition(self)) {
            return;
        }
        let mut lock = unpoisoned(&self.sleep);
        self.waiting.store(true, Ordering::SeqCst);
        while !condition(self) {
            lock = self.end.wait(lock).unwrap_or_else(PoisonError::into_inner);
        }
        self.waiting.store(false, Ordering::SeqCst);
    }

    fn tell_end(&self) {
        if self.waiting.load(Ordering::SeqCst) {
            drop(unpoisoned(&self.sleep));
            self.end.notify_all();
        }
    }

    /// Runs parts of a work until all are taken.
    fn take_parts(&self, number: u32, work: &dyn Parts, parts: usize) {
        loop {
            let ticket = self.ticket.load(Ordering::SeqCst);
            let part = ticket as u32 as usize;
            if (ticket >> 32) as u32 != number || parts <= part {
                return;
            }
            if self
                .ticket
                .compare_exchange(ticket, ticket + 1, Ordering::SeqCst, Ordering::SeqCst)
                .is_err()
            {
                continue;
            }
            if let Err(why) = caught(|| work.run(part, parts)) {
                let mut failure = unpoisoned(&self.failure);
                if failure.as_ref().is_none_or(|&(other, _)| part < other) {
                    *failure = Some((part, why));
                }
            }
            if self.done.fetch_add(1, Ordering::SeqCst) + 1 == parts {
                self.tell_end();
            }
        }
    }
}

/// Runs a kernel. A panic, which is a bug in the kernel, becomes an error, so that no thread waits
/// forever.
pub(crate) fn caught<E: From<KernelError>>(run: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or("no message");
        Err(KernelError::Panicked(text.to_string()).into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    struct Counted {
        runs: Vec<AtomicUsize>,
        fails: fn(usize) -> Result<(), KernelError>,
    }

    impl Parts for Counted {
        fn run(&self, part: usize, _: usize) -> Result<(), KernelError> {
            self.runs[part].fetch_add(1, Ordering::SeqCst);
            (self.fails)(part)
        }
    }

    fn counted(parts: usize, fails: fn(usize) -> Result<(), KernelError>) -> Arc<Counted> {
        Arc::new(Counted {
            runs: (0..parts).map(|_| AtomicUsize::new(0)).collect(),
            fails,
        })
    }

    #[test]
    fn every_part_runs_once() {
        for threads in [1, 2, 5] {
            let team = Team::new(threads).expect("threads should start");
            assert_eq!(team.threads(), threads);
            for parts in (0..40).chain([1000]) {
                let work = counted(parts, |_| Ok(()));
                assert_eq!(team.run(work.clone(), parts), Ok(()));
                assert!(
                    work.runs
                        .iter()
                        .all(|runs| runs.load(Ordering::SeqCst) == 1),
                    "{threads} threads, {parts}"
                );
            }
        }
    }

    #[test]
    fn the_first_failure_is_told_and_the_team_goes_on() {
        let team = Team::new(3).expect("threads should start");
        for _ in 0..50 {
            let fails = |part: usize| match part {
                20 => panic!("a bug in part {part}"),
                21 => Err(KernelError::NoKernel("part 21".to_string())),
                _ => Ok(()),
            };
            assert_eq!(
                team.run(counted(40, fails), 40),
                Err(KernelError::Panicked("a bug in part 20".to_string()))
            );
            assert_eq!(team.run(counted(40, |_| Ok(())), 40), Ok(()));
        }
    }

    #[test]
    fn machines_share_a_team_whose_threads_are_prepared() {
        const THREADS: usize = 7; // as no machine of these tests has
        let prepared = Arc::new(Mutex::new(vec![]));
        let note = {
            let prepared = prepared.clone();
            move || unpoisoned(&prepared).push(std::thread::current().id())
        };
        let first = Team::shared(THREADS, note.clone()).expect("threads should start");
        let once = unpoisoned(&prepared).len();
        assert_eq!(once, THREADS - 1);
        let second = Team::shared(THREADS, note).expect("threads should start");
        assert!(Arc::ptr_eq(&first, &second));
        let mut again = unpoisoned(&prepared).split_off(once);
        again.sort_by_key(|id| format!("{id:?}"));
        again.dedup();
        assert_eq!(again.len(), THREADS);
        let last = Arc::downgrade(&first);
        drop((first, second));
        assert_eq!(last.strong_count(), 0);
    }

    #[test]
    fn several_threads_may_ask() {
        let team = Team::new(2).expect("threads should start");
        let works: Vec<_> = (0..4).map(|_| counted(100, |_| Ok(()))).collect();
        std::thread::scope(|scope| {
            for work in &works {
                scope.spawn(|| team.run(work.clone(), 100));
            }
        });
        assert!(
            works
                .iter()
                .flat_map(|work| &work.runs)
                .all(|runs| runs.load(Ordering::SeqCst) == 1)
        );
    }
}
