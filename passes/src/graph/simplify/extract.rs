//! Which of the equal terms make the graph: those of the least sum of costs, a shared term counted once.
//!
//! A class of equal terms offers alternatives, and to choose one is to need its children. What every choice needs is found
//! first, and what is then obvious is fixed: a class without an alternative, an alternative that needs nothing new and is
//! the cheapest. What stays open falls into groups that have no class in common, a layer's attention or so, and each is
//! solved exactly by branch and bound, within a number of steps. Groups with a cycle of classes are joined, so that no
//! choice can close a cycle over two groups.
//!
//! Of terms with equal costs the traced one stays.

use super::term::{Head, Term, Terms, single};
use egg::{Id, Language};
use ir::TensorType;
use std::collections::{BTreeMap, BTreeSet};

/// Steps of branch and bound for one group; then the best so far is taken. 20 000 take about 10 ms.
const STEPS: usize = 20_000;

/// What a kernel costs before it does anything, in picoseconds: 3 µs, as of GPUs. Costs are those of one fixed machine,
/// about an A100, so that a graph becomes the same on every device.
const LAUNCH: u64 = 3_000_000;
/// Picoseconds for a byte: 1.5 TB/s.
const BYTE: f64 = 1.0 / 1.5;
/// Picoseconds for a floating-point operation of a product: 100 TFLOP/s.
const FLOP: f64 = 0.01;

/// The cost of a term by itself, picoseconds; none if no kernel computes it.
fn cost(terms: &Terms, term: &Term, types: &[TensorType]) -> Option<u64> {
    match term.head {
        Head::Leaf(_) | Head::Literal(_) | Head::Result(_) => return Some(0),
        Head::Step(_) => return None,
        Head::Op(_) => {}
    }
    let op = term.op(terms)?;
    // A reshape is no kernel, but one less to read is better.
    if op.is_alias() {
        return Some(100);
    }
    let operands: Vec<&TensorType> = term.operands(terms).map(|id| single(terms, id)).collect::<Option<_>>()?;
    let bytes: u64 = operands.iter().map(|ty| ty.bytes()).chain(types.iter().map(TensorType::bytes)).sum();
    // Random numbers take about as long as the bytes.
    let bytes = if op.attrs().contains_key("stream") { 2 * bytes } else { bytes };
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

/// Classes that may be needed, densely numbered.
struct Problem {
    ids: Vec<Id>,
    choices: Vec<Vec<Choice>>,
}

/// The term of each class that `roots` need, by class. `traced` are the graph's own terms.
pub(super) fn extract(terms: &Terms, roots: &[Id], traced: &BTreeSet<Term>) -> BTreeMap<Id, Term> {
    let (mut problem, roots) = problem(terms, roots, traced);
    let mut needed = vec![false; problem.ids.len()];
    roots.iter().for_each(|&c| needed[c] = true);
    // A constant is computed once for the whole graph: it counts nothing, or all layers would be one group.
    (0..needed.len()).filter(|&c| problem.choices[c].iter().any(|way| way.needs.is_empty())).for_each(|c| needed[c] = true);
    loop {
        let before: usize = needed.iter().filter(|&&n| n).count() + problem.n_choices();
        spread(&problem, &mut needed);
        problem.fix(&needed);
        if before == needed.iter().filter(|&&n| n).count() + problem.n_choices() {
            break;
        }
    }
    let component = problem.components();
    for group in problem.groups(&needed, &component) {
        problem.solve(&group, &needed, &component);
    }
    // What is chosen needs less than what might have been.
    let mut chosen = BTreeMap::new();
    let mut stack = roots;
    while let Some(class) = stack.pop() {
        let choice = &problem.choices[class][0];
        if chosen.insert(problem.ids[class], choice.term.clone()).is_none() {
            stack.extend(choice.needs.iter().copied());
        }
    }
    chosen
}

fn problem(terms: &Terms, roots: &[Id], traced: &BTreeSet<Term>) -> (Problem, Vec<usize>) {
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
            let Some(cost) = cost(terms, &term, &class.data.types) else { continue };
            let cost = cost + u64::from(!traced.contains(&term));
            let children = term.children.iter().filter(|&&id| terms[id].data.literal.is_none());
            let mut needs: Vec<usize> = children.map(|&id| of(id, &mut ids)).collect();
            needs.sort_unstable();
            needs.dedup();
            if !needs.contains(&choices.len()) {
                ways.push(Choice { term, cost, needs });
            }
        }
        // Cheap ones first; one that needs what another needs and costs more is no choice.
        ways.sort_by_key(|way| (way.cost, way.needs.len()));
        let mut kept: Vec<Choice> = vec![];
        for way in ways {
            if !kept.iter().any(|k| k.needs.iter().all(|c| way.needs.contains(c))) {
                kept.push(way);
            }
        }
        choices.push(kept);
    }
    let mut problem = Problem { ids, choices };
    problem.drop_impossible();
    (problem, roots)
}

/// Marks what every choice of a needed class needs, to any depth.
fn spread(problem: &Problem, needed: &mut [bool]) {
    // One step deep: most classes have one way, and chains of them are long.
    let mut stack: Vec<usize> = (0..needed.len()).filter(|&c| needed[c]).collect();
    while let Some(class) = stack.pop() {
        let (first, others) = problem.choices[class].split_first().expect("a class should have a way");
        for &c in first.needs.iter().filter(|c| others.iter().all(|way| way.needs.contains(c))) {
            if !std::mem::replace(&mut needed[c], true) {
                stack.push(c);
            }
        }
    }
    let mut sets: Vec<Option<Vec<usize>>> = vec![None; needed.len()];
    let mut open = vec![false; needed.len()];
    for class in 0..needed.len() {
        if needed[class] && 1 < problem.choices[class].len() {
            below(problem, class, needed, &mut sets, &mut open, 0).into_iter().for_each(|c| needed[c] = true);
        }
    }
}

/// How deep to look for what every way needs, and what a way costs: further away, less is known, and nothing is wrong.
const DEPTH: usize = 100;

/// The classes not yet marked that every way to compute `class` needs, itself aside. A way around a cycle counts as
/// needing everything: it is none.
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
            Some(all) => all.into_iter().filter(|c| set.binary_search(c).is_ok()).collect(),
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

    /// Removes choices that need a class without any.
    fn drop_impossible(&mut self) {
        let mut possible = vec![false; self.ids.len()];
        loop {
            let mut changed = false;
            for class in 0..self.ids.len() {
                let can = |choice: &Choice| choice.needs.iter().all(|&c| possible[c]);
                if !possible[class] && self.choices[class].iter().any(can) {
                    (possible[class], changed) = (true, true);
                }
            }
            if !changed {
                break;
            }
        }
        self.choices.iter_mut().for_each(|ways| ways.retain(|way| way.needs.iter().all(|&c| possible[c])));
    }

    /// Fixes what is obvious: of a needed class, the cheapest choice if it needs nothing new.
    fn fix(&mut self, needed: &[bool]) {
        let component = self.components();
        for class in (0..self.ids.len()).filter(|&c| needed[c]) {
            let ways = &mut self.choices[class];
            // They are sorted by cost. In a cycle of classes, what is needed may yet be computed from this one.
            let free = |way: &Choice| way.needs.iter().all(|&c| needed[c] && component[c] != component[class]);
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
        // Tarjan's algorithm, with a stack of its own: chains of thousands of classes are ordinary.
        let n = self.ids.len();
        let (mut index, mut low, mut component) = (vec![usize::MAX; n], vec![0; n], vec![usize::MAX; n]);
        let (mut stack, mut next) = (vec![], 0);
        for start in 0..n {
            let mut calls: Vec<(usize, usize)> = if index[start] == usize::MAX { vec![(start, 0)] } else { vec![] };
            while let Some((class, at)) = calls.pop() {
                if at == 0 {
                    (index[class], low[class]) = (next, next);
                    next += 1;
                    stack.push(class);
                }
                let child = self.choices[class].iter().flat_map(|way| &way.needs).nth(at).copied();
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

    /// Open needed classes, in groups that share no class which is not needed anyway.
    fn groups(&self, needed: &[bool], component: &[usize]) -> Vec<Vec<usize>> {
        let mut union: Vec<usize> = (0..2 * self.ids.len()).collect();
        fn root(union: &mut [usize], mut c: usize) -> usize {
            while union[c] != c {
                union[c] = union[union[c]];
                c = union[c];
            }
            c
        }
        let open: Vec<usize> = (0..self.ids.len()).filter(|&c| needed[c] && 1 < self.choices[c].len()).collect();
        for &class in &open {
            let mut seen = BTreeSet::new();
            let mut stack = vec![class];
            while let Some(c) = stack.pop() {
                // A component has a place of its own among the sets.
                for other in [c, self.ids.len() + component[c]] {
                    let (a, b) = (root(&mut union, class), root(&mut union, other));
                    union[a] = b;
                }
                let free = self.choices[c].iter().flat_map(|way| &way.needs).filter(|&&c| !needed[c]);
                stack.extend(free.filter(|&&c| seen.insert(c)));
            }
        }
        let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for class in open {
            groups.entry(root(&mut union, class)).or_default().push(class);
        }
        groups.into_values().collect()
    }

    /// Leaves each class of a group, and those it needs, the one choice of the least sum.
    fn solve(&mut self, group: &[usize], needed: &[bool], component: &[usize]) {
        let mut search = Search {
            problem: self,
            needed,
            chosen: BTreeMap::new(),
            best: BTreeMap::new(),
            best_cost: u64::MAX,
            steps: STEPS,
            tree: BTreeMap::new(),
            component,
        };
        search.greedy(group);
        search.run(&mut group.iter().copied().collect(), 0);
        log::trace!("group of {} open classes: {} steps", group.len(), STEPS - search.steps);
        if std::env::var("ZZ").is_ok() { eprintln!("group of {} open classes: {} steps, {} chosen", group.len(), STEPS - search.steps, search.best.len()); }
        let best = search.best;
        assert!(!best.is_empty(), "a group of classes should have a choice");
        for (class, way) in best {
            self.choices[class] = vec![self.choices[class][way].clone()];
        }
    }
}

/// Branch and bound over a group.
struct Search<'a> {
    problem: &'a Problem,
    needed: &'a [bool],
    chosen: BTreeMap<usize, usize>,
    best: BTreeMap<usize, usize>,
    best_cost: u64,
    steps: usize,
    /// Costs of classes as if nothing were shared: the order in which choices are tried.
    tree: BTreeMap<usize, u64>,
    /// Cycles lie within one.
    component: &'a [usize],
}

impl Search<'_> {
    /// A good first answer: for one class after the other the cheapest way by itself, what is chosen already being free.
    fn greedy(&mut self, group: &[usize]) {
        let mut chosen: BTreeMap<usize, usize> = BTreeMap::new();
        for &class in group {
            let Some(set) = self.cheapest(class, &chosen) else { return };
            chosen.extend(set);
        }
        self.chosen = chosen;
        let acyclic = !self.chosen.keys().any(|&class| self.closes_a_cycle(class));
        let chosen = std::mem::take(&mut self.chosen);
        if acyclic {
            self.best_cost = self.cost(&chosen);
            self.best = chosen;
        }
    }

    fn cost(&self, chosen: &BTreeMap<usize, usize>) -> u64 {
        chosen.iter().map(|(&class, &way)| self.problem.choices[class][way].cost).sum()
    }

    /// The classes with their ways by which `class` is computed, shared ones counted once: each class takes the way with the
    /// least sum over the union of what its children took, until nothing gets better.
    fn cheapest(&self, class: usize, chosen: &BTreeMap<usize, usize>) -> Option<BTreeMap<usize, usize>> {
        let free = |c: &usize| self.needed[*c] && *c != class || chosen.contains_key(c);
        if chosen.contains_key(&class) {
            return Some(BTreeMap::new());
        }
        let mut all = BTreeSet::from([class]);
        let mut stack = vec![class];
        while let Some(c) = stack.pop() {
            let needs = self.problem.choices[c].iter().flat_map(|way| &way.needs);
            stack.extend(needs.filter(|c| !free(c) && all.insert(**c)));
        }
        let mut best: BTreeMap<usize, (u64, BTreeMap<usize, usize>)> = BTreeMap::new();
        loop {
            let mut changed = false;
            // From the leaves up, mostly: numbers grow away from the roots.
            for &c in all.iter().rev() {
                for (i, way) in self.problem.choices[c].iter().enumerate() {
                    let mut set = BTreeMap::from([(c, i)]);
                    let complete = way.needs.iter().filter(|n| !free(n)).all(|n| match best.get(n) {
                        Some((_, below)) if !below.contains_key(&c) => {
                            set.extend(below);
                            true
                        }
                        _ => false,
                    });
                    let cost = self.cost(&set);
                    if complete && best.get(&c).is_none_or(|(least, _)| cost < *least) {
                        best.insert(c, (cost, set));
                        changed = true;
                    }
                }
            }
            if !changed {
                return best.remove(&class).map(|(_, set)| set);
            }
        }
    }

    /// Chooses for the last of `open`; `spent` is the cost of what is chosen.
    fn run(&mut self, open: &mut BTreeSet<usize>, spent: u64) {
        // Every open class costs at least its cheapest choice.
        let least: u64 = open.iter().map(|&c| self.problem.choices[c][0].cost).sum();
        if self.best_cost <= spent + least || (self.steps == 0 && self.best_cost < u64::MAX) {
            return;
        }
        self.steps = self.steps.saturating_sub(1);
        let Some(class) = open.pop_first() else {
            (self.best_cost, self.best) = (spent, self.chosen.clone());
            return;
        };
        let ways = &self.problem.choices[class];
        let mut order: Vec<usize> = (0..ways.len()).collect();
        let mut on_path = BTreeSet::new();
        order.sort_by_cached_key(|&way| self.tree_cost(class, way, &mut on_path));
        for way in order {
            let choice = &self.problem.choices[class][way];
            self.chosen.insert(class, way);
            if !self.closes_a_cycle(class) {
                let new: Vec<usize> = choice
                    .needs
                    .iter()
                    .copied()
                    .filter(|c| !self.needed[*c] && !self.chosen.contains_key(c) && open.insert(*c))
                    .collect();
                self.run(open, spent + choice.cost);
                new.iter().for_each(|c| {
                    open.remove(c);
                });
            }
            self.chosen.remove(&class);
        }
        open.insert(class);
    }

    fn tree_cost(&mut self, class: usize, way: usize, on_path: &mut BTreeSet<usize>) -> u64 {
        let problem = self.problem;
        let choice = &problem.choices[class][way];
        on_path.insert(class);
        let mut sum = choice.cost;
        for &c in &choice.needs {
            if self.needed[c] || self.chosen.contains_key(&c) {
                continue;
            }
            let cost = if on_path.contains(&c) {
                u64::MAX / 4
            } else if on_path.len() == DEPTH {
                problem.choices[c][0].cost
            } else if let Some(&cost) = self.tree.get(&c) {
                cost
            } else {
                let n = problem.choices[c].len();
                let cost = (0..n).map(|way| self.tree_cost(c, way, on_path)).min().unwrap_or(u64::MAX / 4);
                self.tree.insert(c, cost);
                cost
            };
            sum = sum.saturating_add(cost);
        }
        on_path.remove(&class);
        sum
    }

    /// Whether what is chosen computes `class` from itself.
    fn closes_a_cycle(&self, class: usize) -> bool {
        let ways = &self.problem.choices;
        let needs = |c: usize| {
            let way = match self.chosen.get(&c) {
                Some(&way) => Some(way),
                None => (ways[c].len() == 1).then_some(0),
            };
            way.map_or(&[][..], |way| &ways[c][way].needs)
        };
        let within = |c: &&usize| self.component[**c] == self.component[class];
        let mut seen = BTreeSet::new();
        let mut stack: Vec<usize> = needs(class).iter().filter(within).copied().collect();
        while let Some(c) = stack.pop() {
            if c == class {
                return true;
            }
            if seen.insert(c) {
                stack.extend(needs(c).iter().filter(within));
            }
        }
        false
    }
}
