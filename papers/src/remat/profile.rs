//! The memory of a set of reruns, updated while reruns are added and removed one at a time.
//!
//! Bytes are stored per step: a step is a run of a node, `(line, node)`, and steps are ordered as
//! pairs. A line's steps are a short list. Above the lines there is a tree of maxima with pending
//! additions, so adding bytes to a range of steps takes logarithmic time. A rerun changes only the
//! last read of its operands' copies, and splits its results' copies in two.
//!
//! Invariant: [`Profile::peak`] equals the peak that [`evaluate`](super::evaluate) computes.

use super::{Problem, Rerun};

/// A step as one number: line, then node.
pub(super) type Step = u64;

/// The step at which a node runs before a line, or on its own line.
pub(super) fn step(line: u32, node: u32) -> Step {
    u64::from(line) << 32 | u64::from(node)
}
/// The line of a step.
pub(super) fn line_of(step: Step) -> u32 {
    (step >> 32) as u32
}
/// The node of a step.
pub(super) fn node_of(step: Step) -> u32 {
    step as u32
}

/// See the module.
pub(super) struct Profile<'a> {
    problem: &'a Problem,
    /// The lines before which each node runs, ascending, with the place of each rerun in `reruns`;
    /// its own line comes first.
    runs: Vec<Vec<(u32, u32)>>,
    /// The steps that read each value, ascending.
    reads: Vec<Vec<Step>>,
    /// Each line's runs in order, with their bytes minus the additions in the tree.
    steps: Vec<Vec<(u32, i64)>>,
    /// Maxima. The root is at 1, and the lines start at `first_leaf`. Each includes its own
    /// addition, but not the additions of its ancestors.
    most: Vec<i64>,
    more: Vec<i64>,
    first_leaf: usize,
    /// The reruns in no particular order.
    reruns: Vec<Rerun>,
    /// Time of all reruns, µs.
    micros: f64,
}

impl<'a> Profile<'a> {
    /// The profile without reruns.
    pub(super) fn new(problem: &'a Problem) -> Profile<'a> {
        let n_lines = problem.nodes.len();
        let mut reads = vec![vec![]; problem.values.len()];
        let mut last: Vec<u32> = problem.values.iter().map(|v| v.maker).collect();
        for (line, node) in problem.nodes.iter().enumerate() {
            let line = line as u32;
            for &value in &node.reads {
                reads[value as usize].push(step(line, line));
                last[value as usize] = line;
            }
        }
        let mut change = vec![0i64; n_lines + 1];
        for (value, &last) in problem.values.iter().zip(&last) {
            let last = if value.kept {
                n_lines - 1
            } else {
                last as usize
            };
            change[value.maker as usize] += value.bytes as i64;
            change[last + 1] -= value.bytes as i64;
        }
        let mut live = 0;
        let first_leaf = n_lines.next_power_of_two();
        let mut most = vec![0; 2 * first_leaf];
        let mut steps = Vec::with_capacity(n_lines);
        for line in 0..n_lines {
            live += change[line];
            let bytes = live + (problem.fixed[line] + problem.nodes[line].scratch) as i64;
            steps.push(vec![(line as u32, bytes)]);
            most[first_leaf + line] = bytes;
        }
        for k in (1..first_leaf).rev() {
            most[k] = most[2 * k].max(most[2 * k + 1]);
        }
        let more = vec![0; 2 * first_leaf];
        let runs = (0..n_lines as u32)
            .map(|line| vec![(line, u32::MAX)])
            .collect();
        Profile {
            problem,
            runs,
            reads,
            steps,
            most,
            more,
            first_leaf,
            reruns: vec![],
            micros: 0.0,
        }
    }

    /// The most bytes at any step.
    pub(super) fn peak(&self) -> i64 {
        self.most[1]
    }
    /// The first step at which the most bytes are in memory.
    pub(super) fn peak_step(&self) -> Step {
        let mut k = 1;
        while k < self.first_leaf {
            k = if self.most[2 * k + 1] <= self.most[2 * k] {
                2 * k
            } else {
                2 * k + 1
            };
        }
        let line = k - self.first_leaf;
        let bytes = self.most[k] - self.more[k];
        let steps = &self.steps[line];
        let at = steps
            .iter()
            .position(|s| s.1 == bytes)
            .expect("a line's maximum should be one of its steps'");
        step(line as u32, steps[at].0)
    }
    /// Bytes at a step.
    pub(super) fn bytes_at(&self, at: Step) -> i64 {
        let steps = &self.steps[line_of(at) as usize];
        let place = steps.partition_point(|s| s.0 < node_of(at));
        steps[place].1 + self.added(line_of(at))
    }
    /// Time of all reruns, µs.
    pub(super) fn micros(&self) -> f64 {
        self.micros
    }
    /// The reruns in no particular order.
    pub(super) fn reruns(&self) -> &[Rerun] {
        &self.reruns
    }
    /// True if the node runs again before the line.
    pub(super) fn has(&self, rerun: Rerun) -> bool {
        self.runs[rerun.node as usize]
            .binary_search_by_key(&rerun.line, |r| r.0)
            .is_ok()
    }
    /// The reruns of a node, ascending.
    pub(super) fn reruns_of(&self, node: u32) -> impl Iterator<Item = Rerun> + '_ {
        self.runs[node as usize][1..]
            .iter()
            .map(move |&(line, _)| Rerun { line, node })
    }
    /// The nodes that run again before a line, ascending.
    pub(super) fn before(&self, line: u32) -> impl Iterator<Item = u32> + '_ {
        let steps = &self.steps[line as usize];
        steps[..steps.len() - 1].iter().map(|s| s.0)
    }

    /// The next read of a copy that is idle at a step; `None` if no copy exists, or if the step
    /// makes or reads it. A value that the step must leave counts as read by the last line.
    pub(super) fn idle(&self, value: u32, at: Step) -> Option<Step> {
        let data = &self.problem.values[value as usize];
        if line_of(at) <= data.maker || data.maker == node_of(at) {
            return None;
        }
        let reads = &self.reads[value as usize];
        // Most values are dead or not yet made, so check this first.
        if !data.kept && reads.last().is_none_or(|&last| last <= at) {
            return None;
        }
        let next = reads.partition_point(|&read| read <= at);
        if 0 < next && reads[next - 1] == at {
            return None;
        }
        let last_line = self.problem.nodes.len() as u32 - 1;
        let read = reads
            .get(next)
            .copied()
            .unwrap_or(step(last_line, last_line));
        let runs = &self.runs[data.maker as usize];
        let run = runs.partition_point(|&(line, _)| step(line, data.maker) <= at);
        (runs
            .get(run)
            .is_none_or(|&(line, _)| read < step(line, data.maker)))
        .then_some(read)
    }
    /// The last step of the copy that a read at a step would take. Its producer runs before the
    /// step.
    pub(super) fn end_for(&self, value: u32, at: Step) -> Step {
        let maker = self.problem.values[value as usize].maker;
        let runs = &self.runs[maker as usize];
        let run = runs.partition_point(|&(line, _)| line <= line_of(at)) - 1;
        self.end(value, run)
    }

    /// The last step of the copy that run number `run` of its maker makes.
    fn end(&self, value: u32, run: usize) -> Step {
        let data = &self.problem.values[value as usize];
        let runs = &self.runs[data.maker as usize];
        let reads = &self.reads[value as usize];
        let (next, is_last) = match runs.get(run + 1) {
            Some(&(line, _)) => (
                reads.partition_point(|&read| read < step(line, data.maker)),
                false,
            ),
            None => (reads.len(), true),
        };
        if is_last && data.kept {
            let last = self.problem.nodes.len() as u32 - 1;
            return step(last, last);
        }
        let made = step(runs[run].0, data.maker);
        if 0 < next {
            reads[next - 1].max(made)
        } else {
            made
        }
    }

    /// Adds a rerun, or removes it if it exists.
    pub(super) fn toggle(&mut self, rerun: Rerun) {
        if self.has(rerun) {
            self.remove(rerun)
        } else {
            self.insert(rerun)
        }
    }

    fn insert(&mut self, rerun: Rerun) {
        let problem = self.problem;
        let Rerun { line, node } = rerun;
        let at = step(line, node);
        // The next step starts with these bytes.
        let steps = &mut self.steps[line as usize];
        let place = steps.partition_point(|s| s.0 < node);
        let (next, bytes) = steps[place];
        let bytes = bytes - made_by(problem, next) + problem.nodes[node as usize].scratch as i64;
        steps.insert(place, (node, bytes));
        self.refresh(line);
        let runs = &mut self.runs[node as usize];
        let run = runs.partition_point(|&(l, _)| l < line);
        runs.insert(run, (line, self.reruns.len() as u32));
        self.reruns.push(rerun);
        self.micros += problem.nodes[node as usize].micros;
        for &value in &problem.results[node as usize] {
            let bytes = problem.values[value as usize].bytes as i64;
            let end = self.end(value, run - 1);
            if at < self.end(value, run) || self.is_kept_from(value, run) {
                self.add(end + 1, at, -bytes);
            } else {
                self.add(at, at + 1, bytes);
            }
        }
        for &value in &problem.nodes[node as usize].reads {
            let end = self.end_for(value, at);
            let reads = &mut self.reads[value as usize];
            let place = reads.partition_point(|&read| read < at);
            reads.insert(place, at);
            if end < at {
                self.add(end + 1, at + 1, problem.values[value as usize].bytes as i64);
            }
        }
    }

    fn remove(&mut self, rerun: Rerun) {
        let problem = self.problem;
        let Rerun { line, node } = rerun;
        let at = step(line, node);
        for &value in &problem.nodes[node as usize].reads {
            let reads = &mut self.reads[value as usize];
            let place = reads.partition_point(|&read| read < at);
            reads.remove(place);
            let end = self.end_for(value, at);
            if end < at {
                self.add(
                    end + 1,
                    at + 1,
                    -(problem.values[value as usize].bytes as i64),
                );
            }
        }
        let run = self.runs[node as usize].partition_point(|&(l, _)| l < line);
        for &value in &problem.results[node as usize] {
            if at < self.end(value, run) || self.is_kept_from(value, run) {
                self.add(
                    self.end(value, run - 1) + 1,
                    at,
                    problem.values[value as usize].bytes as i64,
                );
            }
        }
        let (_, place) = self.runs[node as usize].remove(run);
        self.reruns.swap_remove(place as usize);
        if let Some(&moved) = self.reruns.get(place as usize) {
            let runs = &mut self.runs[moved.node as usize];
            let run = runs.partition_point(|&(l, _)| l < moved.line);
            runs[run].1 = place;
        }
        self.micros -= problem.nodes[node as usize].micros;
        let steps = &mut self.steps[line as usize];
        let place = steps.partition_point(|s| s.0 < node);
        steps.remove(place);
        self.refresh(line);
    }

    /// True if the step leaves the copy of this run.
    fn is_kept_from(&self, value: u32, run: usize) -> bool {
        let data = &self.problem.values[value as usize];
        data.kept && run + 1 == self.runs[data.maker as usize].len()
    }

    /// The bytes that the tree adds to a line's steps.
    fn added(&self, line: u32) -> i64 {
        let mut k = self.first_leaf + line as usize;
        let mut sum = 0;
        while 0 < k {
            sum += self.more[k];
            k /= 2;
        }
        sum
    }

    /// Adds bytes to the steps from `from` to before `to`.
    fn add(&mut self, from: Step, to: Step, bytes: i64) {
        if to <= from || bytes == 0 {
            return;
        }
        let (first, last) = (line_of(from), line_of(to));
        if first == last {
            self.add_in_line(first, node_of(from), node_of(to), bytes);
            return;
        }
        self.add_in_line(first, node_of(from), u32::MAX, bytes);
        self.add_to_lines(first as usize + 1, last as usize, bytes);
        self.add_in_line(last, 0, node_of(to), bytes);
    }

    /// Adds bytes to a line's runs of the nodes from `from` to before `to`.
    fn add_in_line(&mut self, line: u32, from: u32, to: u32, bytes: i64) {
        let Some(steps) = self.steps.get_mut(line as usize) else {
            return;
        };
        let mut changed = false;
        for (node, at) in steps.iter_mut() {
            if from <= *node && *node < to {
                *at += bytes;
                changed = true;
            }
        }
        if changed {
            self.refresh(line);
        }
    }

    fn add_to_lines(&mut self, from: usize, to: usize, bytes: i64) {
        if to <= from {
            return;
        }
        let (mut low, mut high) = (self.first_leaf + from, self.first_leaf + to);
        let (first, last) = (low, high - 1);
        while low < high {
            if low % 2 == 1 {
                self.most[low] += bytes;
                self.more[low] += bytes;
                low += 1;
            }
            if high % 2 == 1 {
                high -= 1;
                self.most[high] += bytes;
                self.more[high] += bytes;
            }
            low /= 2;
            high /= 2;
        }
        self.pull(first);
        self.pull(last);
    }

    /// Updates a line's maximum.
    fn refresh(&mut self, line: u32) {
        let most = self.steps[line as usize]
            .iter()
            .map(|s| s.1)
            .max()
            .expect("a line should have its own step");
        let leaf = self.first_leaf + line as usize;
        if self.most[leaf] != most + self.more[leaf] {
            self.most[leaf] = most + self.more[leaf];
            self.pull(leaf);
        }
    }

    /// Updates the maxima above a place of the tree.
    fn pull(&mut self, mut k: usize) {
        while 1 < k {
            k /= 2;
            self.most[k] = self.most[2 * k].max(self.most[2 * k + 1]) + self.more[k];
        }
    }
}

/// The bytes that a run of a node adds to memory.
fn made_by(problem: &Problem, node: u32) -> i64 {
    let results = problem.results[node as usize]
        .iter()
        .map(|&value| problem.values[value as usize].bytes);
    (results.sum::<u64>() + problem.nodes[node as usize].scratch) as i64
}
