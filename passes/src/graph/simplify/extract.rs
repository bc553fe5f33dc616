//! Chooses the terms of the new graph among equal terms: the choice with the smallest sum of costs.
//! A shared term counts once.
//!
//! A class of equal terms offers alternatives. A chosen alternative needs its children. The classes
//! that every choice needs are found first. Then obvious choices are fixed: a class with one
//! alternative, and an alternative that is the cheapest and needs nothing new. The classes that
//! stay open fall into groups without a common class, such as the attention of one layer. Branch
//! and bound solves each group exactly, within a number of steps. Groups with a cycle of classes
//! are joined, so that no choice can close a cycle over two groups.
//!
//! Of terms with equal costs the traced one is chosen.

use super::Allowed;
use super::term::{Head, Term, Terms, single};
use egg::{Id, Language};
use ir::TensorType;
use std::collections::{BTreeMap, BTreeSet};

/// Steps of branch and bound for one group; then the best so far is taken. Most groups need fewer
/// than 10. Attention with its gradient needs more, because a sum over 70 classes must be proved
/// the smallest. There the first answer has always been the best.
const STEPS: usize = 64;

/// The most classes of a group for which the first answer considers sharing.
const MOST: usize = 300;

/// The cost of starting a kernel, in picoseconds: 3 µs, as on GPUs. Costs are those of one fixed
/// machine, similar to an A100, so a graph gets the same form for every device.
const LAUNCH: u64 = 3_000_000;
/// Picoseconds for a byte: 1.5 TB/s.
const BYTE: f64 = 1.0 / 1.5;
/// Picoseconds for a floating-point operation of a product: 100 TFLOP/s.
const FLOP: f64 = 0.01;

/// The cost of a term without its operands, picoseconds; none if no kernel computes it.
fn cost(terms: &Terms, term: &Term, types: &[TensorType]) -> Option<u64> {
    match term.head {
        Head::Leaf(_) | Head::Literal(_) | Head::Result(_) => return Some(0),
        Head::Step(_) => return None,
        Head::Op(_) => {}
    }
    let op = term.op(terms)?;
    // A reshape needs no kernel, but fewer reshapes are better.
    if op.is_alias() {
        return Some(100);
    }
    let operands: Vec<&TensorType> = term
        .operands(terms)
        .map(|id| single(terms, id))
        .collect::<Option<_>>()?;
    let bytes: u64 = operands
        .iter()
        .map(|ty| ty.bytes())
        .chain(types.iter().map(TensorType::bytes))
        .sum();
    // Computing random numbers takes about as long as writing them.
    let bytes = if op.facts().is_random {
        2 * bytes
    } else {
        bytes
    };
    let work = op.work(&operands, types);
    let arithmetic = if work.matrix { work.flops * FLOP } else { 0.0 };
    Some(LAUNCH + arithmetic.max(bytes as f64 * BYTE) as u64)
}

/// A way to compute a class.
#[derive(Clone, Debug)]
struct Choice {
    term: Term,
    cost: u64,
    /// The classes it reads, once each.
    needs: Vec<usize>,
}

/// Classes that may be needed, numbered from 0 without gaps.
struct Problem {
    ids: Vec<Id>,
    choices: Vec<Vec<Choice>>,
}

/// The term of each class that `roots` need, by class. `traced` are the graph's own terms; others
/// are chosen only if their op is `allowed`.
pub(super) fn extract(
    terms: &Terms,
    roots: &[Id],
    traced: &BTreeSet<Term>,
    allowed: Allowed,
) -> BTreeMap<Id, Term> {
    let (mut problem, roots) = problem(terms, roots, traced, allowed);
    let mut needed = vec![false; problem.ids.len()];
    roots.iter().for_each(|&c| needed[c] = true);
    // A constant is computed once for the whole graph. It costs nothing here, because otherwise it
    // would join all layers to one group.
    (0..needed.len())
        .filter(|&c| problem.choices[c].iter().any(|way| way.needs.is_empty()))
        .for_each(|c| needed[c] = true);
    loop {
        let before: usize = needed.iter().filter(|&&n| n).count() + problem.n_choices();
        spread(&problem, &mut needed);
        problem.fix(&needed);
        if before == needed.iter().filter(|&&n| n).count() + problem.n_choices() {
            break;
        }
    }
    let component = problem.components();
    let mut solved: BTreeMap<Group, Ways> = BTreeMap::new();
    for open in problem.groups(&needed, &component) {
        let (group, classes) = problem.group(&open, &needed, &component);
        let ways = solved.entry(group).or_insert_with_key(Group::solve);
        for (&class, way) in classes.iter().zip(&*ways) {
            if let Some(way) = *way {
                problem.choices[class] = vec![problem.choices[class][way].clone()];
            }
        }
    }
    // The chosen terms need fewer classes than all possible choices.
    let mut chosen = BTreeMap::new();
    let mut stack: Vec<(usize, bool)> = roots.into_iter().map(|class| (class, false)).collect();
    let (mut open, mut done) = (
        vec![false; problem.ids.len()],
        vec![false; problem.ids.len()],
    );
    while let Some((class, is_over)) = stack.pop() {
        if is_over {
            done[class] = true;
        } else if !std::mem::replace(&mut open[class], true) {
            let choice = &problem.choices[class][0];
            chosen.insert(problem.ids[class], choice.term.clone());
            stack.push((class, true));
            stack.extend(choice.needs.iter().map(|&c| (c, false)));
        } else {
            // Visited before: from below itself, or from another reader.
            assert!(
                done[class],
                "no chosen term should need itself: {:?}",
                problem.choices[class][0]
            );
        }
    }
    chosen
}

fn problem(
    terms: &Terms,
    roots: &[Id],
    traced: &BTreeSet<Term>,
    allowed: Allowed,
) -> (Problem, Vec<usize>) {
    let mut number: BTreeMap<Id, usize> = BTreeMap::new();
    let mut ids: Vec<Id> = vec![];
    let mut of = |id: Id, ids: &mut Vec<Id>| {
        let id = terms.find(id);
        *number.entry(id).or_insert_with(|| {
            ids.push(id);
            ids.len() - 1
        })
    };
    let roots: Vec<usize> = roots.iter().map(|&id| of(id, &mut ids)).collect();
    let mut choices = vec![];
    while choices.len() < ids.len() {
        let class = &terms[ids[choices.len()]];
        let mut ways: Vec<Choice> = vec![];
        for term in class.nodes.iter().filter(|term| term.is_real()) {
            let term = term.clone().map_children(|id| terms.find(id));
            let Some(cost) = cost(terms, &term, &class.data.types) else {
                continue;
            };
            let is_traced = traced.contains(&term);
            let op = term.op(terms).map(|op| op.kind());
            if !is_traced && op.is_some_and(|op| !allowed(op)) {
                continue;
            }
            let cost = cost + u64::from(!is_traced);
            let children = term
                .children
                .iter()
                .filter(|&&id| terms[id].data.literal.is_none());
            let mut needs: Vec<usize> = children.map(|&id| of(id, &mut ids)).collect();
            needs.sort_unstable();
            needs.dedup();
            if !needs.contains(&choices.len()) {
                ways.push(Choice { term, cost, needs });
            }
        }
        // Cheap ones first. A way that costs more than another and needs at least the same classes
        // is dropped.
        ways.sort_by_key(|way| (way.cost, way.needs.len()));
        let mut kept: Vec<Choice> = vec![];
        for way in ways {
            if !kept
                .iter()
                .any(|k| k.needs.iter().all(|c| way.needs.contains(c)))
            {
                kept.push(way);
            }
        }
        choices.push(kept);
    }
    let mut problem = Problem { ids, choices };
    problem.drop_impossible();
    (problem, roots)
}

/// Marks the classes that every choice of a needed class needs, to any depth.
fn spread(problem: &Problem, needed: &mut [bool]) {
    // First one level deep: most classes have one way, and chains of them are long.
    let mut stack: Vec<usize> = (0..needed.len()).filter(|&c| needed[c]).collect();
    while let Some(class) = stack.pop() {
        let (first, others) = problem.choices[class]
            .split_first()
            .expect("a class should have a way");
        for &c in first
            .needs
            .iter()
            .filter(|c| others.iter().all(|way| way.needs.contains(c)))
        {
            if !std::mem::replace(&mut needed[c], true) {
                stack.push(c);
            }
        }
    }
    let mut sets: Vec<Option<Vec<usize>>> = vec![None; needed.len()];
    let mut open = vec![false; needed.len()];
    for class in 0..needed.len() {
        if needed[class] && 1 < problem.choices[class].len() {
            below(problem, class, needed, &mut sets, &mut open, 0)
                .into_iter()
                .for_each(|c| needed[c] = true);
        }
    }
}

/// The depth of two searches: for the classes that every way needs, and for the cost of a way. A
/// smaller depth finds less, but nothing wrong.
const DEPTH: usize = 100;

/// The unmarked classes, other than itself, that every way to compute `class` needs. A way around a
/// cycle is impossible, so it counts as needing everything.
fn below(
    problem: &Problem,
    class: usize,
    needed: &[bool],
    sets: &mut Vec<Option<Vec<usize>>>,
    open: &mut Vec<bool>,
    depth: usize,
) -> Vec<usize> {
    if depth == DEPTH {
        return vec![];
    }
    if let Some(set) = &sets[class] {
        return set.clone();
    }
    open[class] = true;
    let mut all: Option<Vec<usize>> = None;
    for choice in &problem.choices[class] {
        let mut set: Vec<usize> = vec![];
        if choice.needs.iter().any(|&c| open[c]) {
            continue;
        }
        for &c in choice.needs.iter().filter(|&&c| !needed[c]) {
            set.push(c);
            set.extend(below(problem, c, needed, sets, open, depth + 1));
        }
        set.sort_unstable();
        set.dedup();
        all = Some(match all {
            None => set,
            Some(all) => all
                .into_iter()
                .filter(|c| set.binary_search(c).is_ok())
                .collect(),
        });
    }
    open[class] = false;
    let all = all.unwrap_or_default();
    sets[class] = Some(all.clone());
    all
}

impl Problem {
    fn n_choices(&self) -> usize {
        self.choices.iter().map(Vec::len).sum()
    }

    /// Removes choices that need a class without choices.
    fn drop_impossible(&mut self) {
        let mut possible = vec![false; self.ids.len()];
        loop {
            let mut changed = false;
            // Mostly from the leaves up: numbers grow away from the roots.
            for class in (0..self.ids.len()).rev() {
                let can = |choice: &Choice| choice.needs.iter().all(|&c| possible[c]);
                if !possible[class] && self.choices[class].iter().any(can) {
                    (possible[class], changed) = (true, true);
                }
            }
            if !changed {
                break;
            }
        }
        self.choices
            .iter_mut()
            .for_each(|ways| ways.retain(|way| way.needs.iter().all(|&c| possible[c])));
    }

    /// Fixes obvious choices: for a needed class, the cheapest choice if it needs nothing new.
    fn fix(&mut self, needed: &[bool]) {
        let component = self.components();
        for class in (0..self.ids.len()).filter(|&c| needed[c]) {
            let ways = &mut self.choices[class];
            // Ways are sorted by cost. In a cycle of classes, a needed class may be computed from
            // this one.
            let free = |way: &Choice| {
                way.needs
                    .iter()
                    .all(|&c| needed[c] && component[c] != component[class])
            };
            if let Some(first) = ways.iter().position(free) {
                ways.truncate(first + 1);
                if ways.iter().all(|way| ways[first].cost <= way.cost) {
                    ways.drain(..first);
                }
            }
        }
    }

    /// The strongly connected component of each class.
    fn components(&self) -> Vec<usize> {
        // Tarjan's algorithm with an explicit stack, because chains of thousands of classes are
        // normal.
        let n = self.ids.len();
        let (mut index, mut low, mut component) =
            (vec![usize::MAX; n], vec![0; n], vec![usize::MAX; n]);
        let (mut stack, mut next) = (vec![], 0);
        for start in 0..n {
            let mut calls: Vec<(usize, usize)> = if index[start] == usize::MAX {
                vec![(start, 0)]
            } else {
                vec![]
            };
            while let Some((class, at)) = calls.pop() {
                if at == 0 {
                    (index[class], low[class]) = (next, next);
                    next += 1;
                    stack.push(class);
                }
                let child = self.choices[class]
                    .iter()
                    .flat_map(|way| &way.needs)
                    .nth(at)
                    .copied();
                if let Some(child) = child {
                    calls.push((class, at + 1));
                    if index[child] == usize::MAX {
                        calls.push((child, 0));
                    } else if component[child] == usize::MAX {
                        low[class] = low[class].min(index[child]);
                    }
                } else {
                    if low[class] == index[class] {
                        while let Some(top) = stack.pop() {
                            component[top] = class;
                            if top == class {
                                break;
                            }
                        }
                    }
                    if let Some(&(parent, _)) = calls.last()
                        && component[class] == usize::MAX
                    {
                        low[parent] = low[parent].min(low[class]);
                    }
                }
            }
        }
        component
    }

    /// Open needed classes, in groups. Two groups share only classes that are needed anyway.
    fn groups(&self, needed: &[bool], component: &[usize]) -> Vec<Vec<usize>> {
        let mut union: Vec<usize> = (0..2 * self.ids.len()).collect();
        fn root(union: &mut [usize], mut c: usize) -> usize {
            while union[c] != c {
                union[c] = union[union[c]];
                c = union[c];
            }
            c
        }
        let open: Vec<usize> = (0..self.ids.len())
            .filter(|&c| needed[c] && 1 < self.choices[c].len())
            .collect();
        for &class in &open {
            let mut seen = BTreeSet::new();
            let mut stack = vec![class];
            while let Some(c) = stack.pop() {
                // Each component has its own entry among the sets.
                for other in [c, self.ids.len() + component[c]] {
                    let (a, b) = (root(&mut union, class), root(&mut union, other));
                    union[a] = b;
                }
                let free = self.choices[c]
                    .iter()
                    .flat_map(|way| &way.needs)
                    .filter(|&&c| !needed[c]);
                stack.extend(free.filter(|&&c| seen.insert(c)));
            }
        }
        let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for class in open {
            groups
                .entry(root(&mut union, class))
                .or_default()
                .push(class);
        }
        groups.into_values().collect()
    }

    /// A separate group with classes numbered from 0, and the problem's number of each.
    fn group(&self, open: &[usize], needed: &[bool], component: &[usize]) -> (Group, Vec<usize>) {
        let mut classes: Vec<usize> = open.to_vec();
        let mut number: BTreeMap<usize, usize> =
            classes.iter().enumerate().map(|(i, &c)| (c, i)).collect();
        let mut ways = vec![];
        while ways.len() < classes.len() {
            let class = classes[ways.len()];
            let mut own = vec![];
            for way in &self.choices[class] {
                let mut needs = vec![];
                // A class that is needed anyway matters only if it may be computed from this class.
                for &c in way
                    .needs
                    .iter()
                    .filter(|&&c| !needed[c] || component[c] == component[class])
                {
                    needs.push(*number.entry(c).or_insert_with(|| {
                        classes.push(c);
                        classes.len() - 1
                    }));
                }
                own.push(Way {
                    cost: way.cost,
                    needs,
                });
            }
            ways.push(own);
        }
        let free = classes
            .iter()
            .enumerate()
            .map(|(i, &c)| open.len() <= i && needed[c])
            .collect();
        (
            Group {
                n_open: open.len(),
                free,
                ways,
            },
            classes,
        )
    }
}

/// A separate group. The layers of a model have equal groups, which are solved once.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Group {
    /// The first `n_open` classes must be computed.
    n_open: usize,
    /// Classes that are computed anyway, at no cost.
    free: Vec<bool>,
    ways: Vec<Vec<Way>>,
}

/// A way to compute a class of a group.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Way {
    cost: u64,
    needs: Vec<usize>,
}

/// The way of each class of a group; `None` if it has none.
type Ways = Vec<Option<usize>>;

impl Group {
    /// The ways with the smallest sum, for the open classes and everything that they need.
    fn solve(&self) -> Ways {
        let none: Ways = vec![None; self.ways.len()];
        let mut search = Search {
            group: self,
            chosen: none.clone(),
            best: none,
            best_cost: u64::MAX,
            steps: STEPS,
        };
        search.by_trees();
        if self.ways.len() <= MOST {
            search.greedy();
        }
        search.run(&mut (0..self.n_open).collect(), 0);
        log::trace!(
            "{} open classes of {}: {} steps",
            self.n_open,
            self.ways.len(),
            STEPS - search.steps
        );
        search.best
    }
    fn cost(&self, ways: &Ways) -> u64 {
        ways.iter()
            .enumerate()
            .filter_map(|(class, way)| Some(self.ways[class][(*way)?].cost))
            .sum()
    }
}

/// Branch and bound over a group.
struct Search<'a> {
    group: &'a Group,
    chosen: Ways,
    best: Ways,
    best_cost: u64,
    steps: usize,
}

impl Search<'_> {
    /// A good first answer: for one class after the other, the cheapest way. Classes that were
    /// chosen before are free.
    fn greedy(&mut self) {
        for class in 0..self.group.n_open {
            let Some(set) = self.cheapest(class) else {
                return;
            };
            self.chosen
                .iter_mut()
                .zip(set)
                .for_each(|(chosen, way)| *chosen = chosen.or(way));
        }
        let n = self.chosen.len();
        let acyclic =
            !(0..n).any(|class| self.chosen[class].is_some() && self.closes_a_cycle(class));
        let chosen = std::mem::replace(&mut self.chosen, vec![None; n]);
        let cost = self.group.cost(&chosen);
        if acyclic && cost < self.best_cost {
            (self.best_cost, self.best) = (cost, chosen);
        }
    }

    /// A first answer that is never cyclic: for each class, the cheapest way if nothing is shared.
    fn by_trees(&mut self) {
        let group = self.group;
        let mut cost = vec![u64::MAX; group.ways.len()];
        // One more for each class, so that a class costs more than any class below it, even if
        // costs are 0.
        let of = |class: usize, way: &Way, cost: &[u64]| {
            let own = if group.free[class] { 1 } else { way.cost + 1 };
            way.needs
                .iter()
                .fold(own, |sum, &c| sum.saturating_add(cost[c]))
        };
        let mut changed = true;
        while std::mem::take(&mut changed) {
            for class in (0..cost.len()).rev() {
                let least = group.ways[class]
                    .iter()
                    .map(|way| of(class, way, &cost))
                    .min()
                    .unwrap_or(u64::MAX);
                changed |= least < cost[class];
                cost[class] = cost[class].min(least);
            }
        }
        let mut stack: Vec<usize> = (0..group.n_open).collect();
        while let Some(class) = stack.pop() {
            if self.best[class].is_none() && !group.free[class] {
                let way = (0..group.ways[class].len())
                    .min_by_key(|&i| of(class, &group.ways[class][i], &cost));
                self.best[class] = way;
                stack.extend(way.map_or(&[][..], |i| &group.ways[class][i].needs));
            }
        }
        self.best_cost = group.cost(&self.best);
    }

    /// The ways to compute `class`; shared ones count once. Each class takes the way with the
    /// smallest sum over the union of its children's ways, until nothing improves.
    fn cheapest(&self, class: usize) -> Option<Ways> {
        let group = self.group;
        let free = |c: usize| group.free[c] || self.chosen[c].is_some();
        let mut best: Vec<Option<(u64, Ways)>> = vec![None; group.ways.len()];
        if free(class) {
            return Some(vec![None; group.ways.len()]);
        }
        loop {
            let mut changed = false;
            // Mostly from the leaves up: numbers grow away from the open classes.
            for c in (0..group.ways.len()).rev().filter(|&c| !free(c)) {
                for (i, way) in group.ways[c].iter().enumerate() {
                    let mut set: Ways = vec![None; group.ways.len()];
                    set[c] = Some(i);
                    let complete =
                        way.needs
                            .iter()
                            .filter(|&&n| !free(n))
                            .all(|&n| match &best[n] {
                                Some((_, below)) if below[c].is_none() => {
                                    set.iter_mut()
                                        .zip(below)
                                        .for_each(|(way, below)| *way = way.or(*below));
                                    true
                                }
                                _ => false,
                            });
                    if complete {
                        let cost = group.cost(&set);
                        if best[c].as_ref().is_none_or(|(least, _)| cost < *least) {
                            best[c] = Some((cost, set));
                            changed = true;
                        }
                    }
                }
            }
            if !changed {
                return best[class].take().map(|(_, set)| set);
            }
        }
    }

    /// Chooses a way for the first class of `open`; `spent` is the cost of the choices so far.
    fn run(&mut self, open: &mut BTreeSet<usize>, spent: u64) {
        if self.best_cost <= spent + self.least(open)
            || (self.steps == 0 && self.best_cost < u64::MAX)
        {
            return;
        }
        self.steps = self.steps.saturating_sub(1);
        let Some(class) = open.pop_first() else {
            (self.best_cost, self.best) = (spent, self.chosen.clone());
            return;
        };
        let group = self.group;
        for (i, way) in group.ways[class].iter().enumerate() {
            self.chosen[class] = Some(i);
            if !self.closes_a_cycle(class) {
                let is_new = |c: &&usize| {
                    !group.free[**c] && self.chosen[**c].is_none() && !open.contains(*c)
                };
                let new: Vec<usize> = way.needs.iter().filter(is_new).copied().collect();
                open.extend(&new);
                self.run(open, spent + way.cost);
                new.iter().for_each(|c| {
                    open.remove(c);
                });
            }
        }
        self.chosen[class] = None;
        open.insert(class);
    }

    /// A lower bound of the cost of the open classes. Each costs at least its cheapest way. Below
    /// one of them, a chain of classes adds costs that are not counted yet.
    fn least(&self, open: &BTreeSet<usize>) -> u64 {
        let mut below = vec![None; self.group.ways.len()];
        let cheapest: u64 = open.iter().map(|&c| self.group.ways[c][0].cost).sum();
        cheapest
            + open
                .iter()
                .map(|&c| self.chain(c, open, &mut below, 0))
                .max()
                .unwrap_or(0)
    }

    /// The least cost of a chain of classes from `class` down, in addition to the cheapest ways of
    /// open classes.
    fn chain(
        &self,
        class: usize,
        open: &BTreeSet<usize>,
        below: &mut [Option<u64>],
        depth: usize,
    ) -> u64 {
        if let Some(cost) = below[class] {
            return cost;
        }
        // For a cycle nothing is known.
        below[class] = Some(0);
        if depth == DEPTH || self.group.free[class] || self.chosen[class].is_some() {
            return 0;
        }
        let ways = &self.group.ways[class];
        let paid = if open.contains(&class) {
            ways[0].cost
        } else {
            0
        };
        let chain = |way: &Way| {
            let chain = way
                .needs
                .iter()
                .map(|&c| self.chain(c, open, below, depth + 1))
                .max()
                .unwrap_or(0);
            way.cost - paid + chain
        };
        let least = ways.iter().map(chain).min().unwrap_or(0);
        below[class] = Some(least);
        least
    }

    /// Whether the choices so far compute `class` from itself.
    fn closes_a_cycle(&self, class: usize) -> bool {
        let needs = |c: usize| {
            let way = if self.group.free[c] {
                Some(0)
            } else {
                self.chosen[c]
            };
            way.map_or(&[][..], |way| &self.group.ways[c][way].needs)
        };
        let mut seen = vec![false; self.chosen.len()];
        let mut stack: Vec<usize> = needs(class).to_vec();
        while let Some(c) = stack.pop() {
            if c == class {
                return true;
            }
            if !std::mem::replace(&mut seen[c], true) {
                stack.extend(needs(c));
            }
        }
        false
    }
}
