//! What a planner returns: [`Decisions`], plain data with the reason for each.

use super::homes::Homes;
use super::problem::Problem;
use ir::graph::Def;
use ir::{Graph, Node, State, Value};
use papers::protrain::Config;
use std::collections::{BTreeMap, BTreeSet};

/// A gap in a value's life: from its access number `gap` (the definition is number 0 of a computed
/// value) to the next.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Gap {
    /// The value; a root.
    pub value: Value,
    /// The number of the access before the gap.
    pub gap: u32,
}

/// How a value outlives a gap without device memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Means {
    /// Its bytes wait on the host.
    Swap,
    /// Its node runs again.
    Recompute,
}

/// Why a decision was made: the figures that `explain` prints.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Reason {
    /// Bytes that it frees.
    pub bytes: u64,
    /// The estimated time that a swap adds to the step, µs; `None` if the planner priced none.
    pub swap: Option<f64>,
    /// The estimated time that a recompute adds to the step, µs; `None` if the planner priced
    /// none.
    pub recompute: Option<f64>,
    /// The line that caused the decision: memory was short there, or the value is read again there.
    pub line: u32,
}

/// What a planner returns.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Decisions {
    /// Gaps over which a value leaves the device. Every other value is kept from its first access
    /// to its last.
    pub cuts: BTreeMap<Gap, (Means, Reason)>,
    /// States that live on the host. They are copied in for their uses.
    pub hosted: BTreeMap<State, Reason>,
    /// Hosted states that lie next to each other on the host and come to the device in one copy. A
    /// state is in at most one chunk. A state without a chunk comes alone.
    pub chunks: Vec<Vec<State>>,
    /// Gradients for the host's updates of a chunk go there in one copy, when the last of them is
    /// complete. Otherwise each goes alone, when it is complete.
    pub gradients_by_chunk: bool,
    /// Nodes that the host runs, in its own memory: updates of hosted states.
    pub on_host: BTreeSet<Node>,
    /// Nodes that run again before a line, by the line's position in [`Problem::lines`], in order.
    /// Readers take the latest result.
    pub reruns: BTreeMap<u32, Vec<Node>>,
    /// Bytes above the peak of the lines that early copies may take.
    pub ahead: u64,
    /// ProTrain's four numbers, if these are its decisions for them.
    pub layout: Option<Config>,
}

impl Decisions {
    /// Where the states of a step live, for other steps on its memory.
    pub fn homes(&self, graph: &Graph) -> Homes {
        let path = |state: &State| graph.states[*state].path.clone();
        let name = |node: &Node| graph.node_name(*node).to_string();
        let chunk = |chunk: &Vec<State>| chunk.iter().map(path).collect();
        Homes {
            hosted: self.hosted.keys().map(path).collect(),
            chunks: self.chunks.iter().map(chunk).collect(),
            on_host: self.on_host.iter().map(name).collect(),
            ..Homes::default()
        }
    }

    /// The number of cut gaps plus the number of hosted states.
    pub fn count(&self) -> usize {
        self.cuts.len() + self.hosted.len()
    }
    /// Lets states of the host live on the device. Where they are updated stays the same.
    pub fn bring_home(&mut self, graph: &Graph, states: &[State]) {
        self.layout = None;
        for state in states {
            let before = graph.states[*state].before;
            self.hosted.remove(state);
            self.cuts.retain(|gap, _| gap.value != before);
        }
        for chunk in &mut self.chunks {
            chunk.retain(|state| !states.contains(state));
        }
        self.chunks.retain(|chunk| !chunk.is_empty());
    }

    /// Cuts the chunk that begins with a state into two of about the same size. Each comes later
    /// and leaves earlier than the whole, with one more copy.
    pub fn halve(&mut self, graph: &Graph, first: State) {
        let Some(at) = self
            .chunks
            .iter()
            .position(|chunk| chunk.first() == Some(&first))
        else {
            return;
        };
        let (front, back) = Decisions::halves(graph, &self.chunks[at]);
        let halves = [front.to_vec(), back.to_vec()];
        self.chunks.splice(at..=at, halves);
        self.chunks.retain(|chunk| 1 < chunk.len());
        self.layout = None;
    }

    /// The states at the start of a chunk that have about half of its bytes, and the others.
    pub(crate) fn halves<'a>(graph: &Graph, chunk: &'a [State]) -> (&'a [State], &'a [State]) {
        let bytes = |state: &State| graph.values[graph.states[*state].before].ty.bytes();
        let all: u64 = chunk.iter().map(bytes).sum();
        let mut sum = 0;
        let front = chunk.iter().take_while(|state| {
            sum += bytes(state);
            2 * sum <= all
        });
        let n_front = front.count().clamp(1, chunk.len() - 1);
        chunk.split_at(n_front)
    }

    /// True if the host computes a state's new value.
    pub fn is_updated_on_host(&self, graph: &Graph, state: State) -> bool {
        let maker = graph.def_node(graph.root(graph.states[state].after));
        maker.is_some_and(|node| self.on_host.contains(&node))
    }

    /// The gaps after which one of [`Decisions::reruns`] computes a value again, with the bytes
    /// that this frees and its cost. If a value is computed again after its last access, for
    /// another rerun, its gap has the number of that access.
    pub fn solved(&self, problem: &Problem<'_>) -> BTreeMap<Gap, Reason> {
        let graph = problem.graph;
        let mut solved = BTreeMap::new();
        for (&position, nodes) in &self.reruns {
            for &node in nodes {
                let recompute = Some(problem.cost.run(graph, node));
                for &value in &graph.nodes[node].outputs {
                    let before = problem.accesses[value].partition_point(|&at| at < position);
                    let gap = Gap {
                        value,
                        gap: before.saturating_sub(1) as u32,
                    };
                    let bytes = graph.values[value].ty.bytes();
                    solved.insert(
                        gap,
                        Reason {
                            bytes,
                            swap: None,
                            recompute,
                            line: position,
                        },
                    );
                }
            }
        }
        solved
    }

    /// The decisions as text, for dumps.
    pub fn print(&self, graph: &Graph) -> String {
        let micros = |t: Option<f64>| t.map_or("impossible".into(), |t| format!("{t:.1} us"));
        let why = |r: &Reason| {
            format!(
                "; frees {} at line {}, swap {}, recompute {}",
                r.bytes,
                r.line,
                micros(r.swap),
                micros(r.recompute)
            )
        };
        let mut text = String::from("decisions {\n");
        for (&state, reason) in &self.hosted {
            text += &format!(
                "  host %{} {}\n",
                graph.values[graph.states[state].before].name,
                why(reason)
            );
        }
        if let Some(config) = self.layout {
            text += &format!("  protrain {config}\n");
        }
        if 0 < self.ahead {
            text += &format!("  ahead {}\n", self.ahead);
        }
        for (k, chunk) in self.chunks.iter().enumerate() {
            let names: Vec<String> = chunk
                .iter()
                .map(|&state| format!("%{}", graph.values[graph.states[state].before].name))
                .collect();
            text += &format!("  chunk c{k} {}\n", names.join(" "));
        }
        if self.gradients_by_chunk {
            text += "  gradients leave by chunk\n";
        }
        for &node in &self.on_host {
            text += &format!("  update %{} on the host\n", graph.node_name(node));
        }
        for (&position, nodes) in &self.reruns {
            let names: Vec<String> = nodes
                .iter()
                .map(|&node| format!("%{}", graph.node_name(node)))
                .collect();
            let line = graph
                .order
                .iter()
                .filter(|&&n| !graph.nodes[n].op.is_alias())
                .nth(position as usize);
            let before = line.map_or("", |&node| graph.node_name(node));
            text += &format!("  rerun {} before %{before}\n", names.join(" "));
        }
        for (gap, (means, reason)) in &self.cuts {
            let data = &graph.values[gap.value];
            let why = match data.def {
                // It lies on the host anyway, and no node computes it.
                Def::Input(_) => format!(
                    "; frees {} at line {}, a second copy in {}",
                    reason.bytes,
                    reason.line,
                    micros(reason.swap)
                ),
                Def::State(_) | Def::Node(..) => why(reason),
            };
            let word = match means {
                Means::Swap => "swap",
                Means::Recompute => "recompute",
            };
            let (name, gap) = (&data.name, gap.gap);
            text += &format!("  {word} %{name} after access {gap} {why}\n");
        }
        text + "}\n"
    }
}
