//! Canonical ids: the ids in the order of the text. Values are numbered as inputs, then states,
//! then the nodes' results; nodes in order; buffers by first mention. Rows that no line mentions
//! are dropped. Only buffers are kept, at the end.
//!
//! Before: `verify` has no finding. After: the same meaning, and [`print`](super::print_program)
//! then [`parse`](super::parse_program) gives an equal value.

use crate::Program;
use crate::graph::{Def, Graph, Node, NodeData, Output, StateData, Value, ValueData};
use crate::schedule::{Buffer, InstrData, InstrKind, Loc, Schedule};
use crate::table::{Id, Table};

/// The new id of each row of a table; `None` if it was dropped.
pub type Moved<K> = Table<K, Option<K>>;

fn moved<K: Id>(map: &Moved<K>, id: K) -> K {
    map.get(id)
        .copied()
        .flatten()
        .unwrap_or_else(|| panic!("{id:?} should be part of the step: verify first"))
}

impl Graph {
    /// The same graph with canonical ids and without values and nodes that are not part of the
    /// step. Panics if a line uses one of these; [`verify::graph`](crate::verify::graph) finds such
    /// lines.
    pub fn compact(&self) -> Graph {
        self.compact_with_maps().0
    }

    /// The same, with the new id of each value and each node. It is for callers that store ids of
    /// the graph.
    pub fn compact_with_maps(&self) -> (Graph, Moved<Value>, Moved<Node>) {
        let mut values: Moved<Value> = Table::filled(self.values.len(), None);
        let mut nodes: Moved<Node> = Table::filled(self.nodes.len(), None);
        let mut graph = Graph::new(self.name.clone());
        let mut add = |graph: &mut Graph, value: Value, def: Def| {
            let data = &self.values[value];
            let new = graph.values.push(ValueData {
                name: data.name.clone(),
                ty: data.ty.clone(),
                def,
            });
            assert!(
                values[value].replace(new).is_none(),
                "{value:?} should have one definition: verify first"
            );
            new
        };
        for (i, &value) in self.inputs.iter().enumerate() {
            let new = add(&mut graph, value, Def::Input(i));
            graph.inputs.push(new);
        }
        let befores: Vec<Value> = self
            .states
            .iter()
            .map(|(state, data)| add(&mut graph, data.before, Def::State(state)))
            .collect();
        let mut results: Vec<Vec<Value>> = vec![];
        for (i, &node) in self.order.iter().enumerate() {
            let new = Node::new(i);
            assert!(
                nodes[node].replace(new).is_none(),
                "{node:?} should stand once in the order: verify first"
            );
            let outputs = self.nodes[node].outputs.iter().enumerate();
            results.push(
                outputs
                    .map(|(k, &v)| add(&mut graph, v, Def::Node(new, k)))
                    .collect(),
            );
        }
        for (&node, outputs) in self.order.iter().zip(results) {
            let data = &self.nodes[node];
            let new = graph.nodes.push(NodeData {
                op: data.op.clone(),
                inputs: data.inputs.iter().map(|&v| moved(&values, v)).collect(),
                outputs,
                phase: data.phase,
                module: data.module.clone(),
            });
            graph.order.push(new);
        }
        for (state, before) in self.states.values().zip(befores) {
            let after = moved(&values, state.after);
            graph.states.push(StateData {
                path: state.path.clone(),
                kind: state.kind,
                before,
                after,
            });
        }
        for output in &self.outputs {
            graph.outputs.push(Output {
                name: output.name.clone(),
                value: moved(&values, output.value),
            });
        }
        graph.gradients = self
            .gradients
            .iter()
            .map(|&(state, v)| (state, moved(&values, v)))
            .collect();
        (graph, values, nodes)
    }
}

impl Program {
    /// The same program with canonical ids: the ids of [`Graph::compact`], and buffers in the order
    /// of their first mention.
    pub fn compact(&self) -> Program {
        let (graph, values, nodes) = self.graph.compact_with_maps();
        let mut buffers = Table::new();
        let mut from: Table<Buffer, Buffer> = Table::new();
        let mut map: Moved<Buffer> = Table::filled(self.schedule.buffers.len(), None);
        let mut mention = |buffer: Buffer| {
            *map[buffer].get_or_insert_with(|| {
                from.push(buffer);
                buffers.push(self.schedule.buffers[buffer].clone())
            })
        };
        let mut place = |loc: Loc| Loc {
            buffer: mention(loc.buffer),
            offset: loc.offset,
        };
        let entry = self
            .schedule
            .entry
            .iter()
            .map(|&(v, loc)| (moved(&values, v), place(loc)))
            .collect();
        let instrs = self.schedule.instrs.values().map(|data| {
            let kind = match &data.kind {
                InstrKind::Run {
                    node,
                    args,
                    outs,
                    scratch,
                    part,
                } => InstrKind::Run {
                    node: moved(&nodes, *node),
                    args: args.iter().map(|&loc| place(loc)).collect(),
                    outs: outs.iter().map(|&loc| place(loc)).collect(),
                    scratch: scratch.map(&mut place),
                    part: *part,
                },
                &InstrKind::Copy { src, dst, bytes } => InstrKind::Copy {
                    src: place(src),
                    dst: place(dst),
                    bytes,
                },
            };
            InstrData {
                kind,
                ..data.clone()
            }
        });
        let instrs = instrs.collect();
        let exit = self
            .schedule
            .exit
            .iter()
            .map(|&(v, loc)| (moved(&values, v), place(loc)))
            .collect();
        for buffer in self.schedule.buffers.ids() {
            mention(buffer);
        }
        let plan = self.plan.as_ref().map(|plan| crate::Plan {
            offset: from.values().map(|&buffer| plan.offset[buffer]).collect(),
            peak: plan.peak.clone(),
        });
        let Schedule {
            name,
            device,
            sm,
            pools,
            streams,
            ..
        } = self.schedule.clone();
        Program {
            graph,
            schedule: Schedule {
                name,
                device,
                sm,
                pools,
                streams,
                buffers,
                instrs,
                entry,
                exit,
            },
            plan,
        }
    }
}
