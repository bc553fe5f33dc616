//! Changes to a graph that keep it in SSA form: each value is defined once, before its readers.
//!
//! Passes do not write `def`, `outputs` or `order` themselves. [`Graph::edit`] collects inserted
//! and removed nodes and rebuilds the order once. [`Graph::define`] adds a node that computes
//! values which the graph already has. [`Graph::set_order`] replaces the order. In debug builds
//! each of them ends with [`Graph::ssa_fault`]. So a pass that forgets to remove a node fails
//! there, and not in a later pass.

use super::{Def, Error, Graph, Node, NodeData, Phase, Value, ValueData};
use crate::op::Op;
use crate::table::Table;
use crate::types::TensorType;
use std::collections::{BTreeMap, BTreeSet};

/// Unfinished changes to a graph. The graph keeps its old order until [`Edit::finish`].
#[derive(Debug)]
pub struct Edit<'g> {
    graph: &'g mut Graph,
    /// New nodes, by the node before which they are inserted.
    before: BTreeMap<Node, Vec<Node>>,
    removed: BTreeSet<Node>,
}

impl Graph {
    /// Starts to change nodes.
    pub fn edit(&mut self) -> Edit<'_> {
        Edit {
            graph: self,
            before: BTreeMap::new(),
            removed: BTreeSet::new(),
        }
    }

    /// Adds a node that computes `values`, which other nodes have computed so far. The new node is
    /// not in the order yet. The old nodes of the values must leave the order.
    ///
    /// # Panics
    /// In debug builds if the op's results would have other types.
    pub fn define(
        &mut self,
        values: &[Value],
        op: Op,
        inputs: Vec<Value>,
        phase: Phase,
        module: impl Into<String>,
    ) -> Node {
        debug_assert_eq!(
            self.result_types(&op, &inputs),
            Ok(self.types(values)),
            "{} should compute values of these types",
            op.name()
        );
        let node = self.nodes.push(NodeData {
            op,
            inputs,
            outputs: values.to_vec(),
            phase,
            module: module.into(),
        });
        for (i, &value) in values.iter().enumerate() {
            self.values[value].def = Def::Node(node, i);
        }
        node
    }

    /// Replaces the order. Nodes that are left out are no longer part of the step.
    ///
    /// # Panics
    /// In debug builds if a value would be read before its definition, or is not defined by the
    /// node that it names.
    pub fn set_order(&mut self, order: Vec<Node>) {
        self.order = order;
        self.debug_assert_ssa();
    }

    /// The first error in the definitions of the values that nodes of the order read or compute.
    /// [`crate::verify::graph`] checks more, and returns all errors.
    pub fn ssa_fault(&self) -> Option<String> {
        let mut seen = Table::filled(self.nodes.len(), false);
        for &node in &self.order {
            let Some(data) = self.nodes.get(node) else {
                return Some(format!("the order names {node:?}, which does not exist"));
            };
            let name = self.node_name(node);
            let missing = data
                .inputs
                .iter()
                .find(|&&input| match self.values[input].def {
                    Def::Node(def, _) => !seen[def],
                    Def::Input(_) | Def::State(_) => false,
                });
            if let Some(&input) = missing {
                let input = &self.values[input].name;
                return Some(format!(
                    "%{name} reads %{input}, which no line above defines"
                ));
            }
            if std::mem::replace(&mut seen[node], true) {
                return Some(format!("%{name} stands twice in the order"));
            }
            for (i, &output) in data.outputs.iter().enumerate() {
                let output = &self.values[output];
                if output.def != Def::Node(node, i) {
                    let output = &output.name;
                    return Some(format!("%{output} is defined by another node than %{name}"));
                }
            }
        }
        let lost = self
            .wanted()
            .find(|&value| self.def_node(value).is_some_and(|n| !seen[n]))?;
        let lost = &self.values[lost].name;
        Some(format!("the step leaves %{lost}, which no line defines"))
    }

    /// Panics in debug builds if the graph is not in SSA form: see [`Graph::ssa_fault`]. It is for
    /// passes that build an order node by node.
    pub fn debug_assert_ssa(&self) {
        if cfg!(debug_assertions)
            && let Some(fault) = self.ssa_fault()
        {
            panic!("a graph should stay in SSA form: {fault}");
        }
    }

    /// The types of an op's results on these operands.
    pub(super) fn result_types(&self, op: &Op, inputs: &[Value]) -> Result<Vec<TensorType>, Error> {
        let types: Vec<&TensorType> = inputs.iter().map(|&v| &self.values[v].ty).collect();
        Ok(op.infer(&types)?)
    }

    /// Adds a node and its results. It is not in the order yet.
    pub(super) fn add_unordered(
        &mut self,
        op: Op,
        inputs: &[Value],
        names: &[String],
        phase: Phase,
        module: String,
    ) -> Result<Node, Error> {
        let results = self.result_types(&op, inputs)?;
        if results.len() != names.len() {
            return Err(Error::Results {
                op: op.name(),
                results: results.len(),
                names: names.len(),
            });
        }
        let node = self.nodes.push(NodeData {
            op,
            inputs: inputs.to_vec(),
            outputs: vec![],
            phase,
            module,
        });
        for (i, (ty, name)) in results.into_iter().zip(names).enumerate() {
            let value = self.values.push(ValueData {
                name: name.clone(),
                ty,
                def: Def::Node(node, i),
            });
            self.nodes[node].outputs.push(value);
        }
        Ok(node)
    }
}

impl Edit<'_> {
    /// The graph, with the changes so far in its nodes and values, but not in its order.
    pub fn graph(&self) -> &Graph {
        self.graph
    }

    /// Adds a node before `at`, after earlier insertions at the same place. It has the phase and
    /// the module of `at`. `names` are the results' names.
    pub fn insert_before(
        &mut self,
        at: Node,
        op: Op,
        inputs: &[Value],
        names: &[String],
    ) -> Result<Node, Error> {
        let NodeData { phase, module, .. } = &self.graph.nodes[at];
        let (phase, module) = (*phase, module.clone());
        let node = self.graph.add_unordered(op, inputs, names, phase, module)?;
        self.before.entry(at).or_default().push(node);
        Ok(node)
    }

    /// Changes a node's op and operands. Its results stay, and their types must not change.
    ///
    /// # Panics
    /// In debug builds if the types of the results change.
    pub fn set_op(&mut self, node: Node, op: Op, inputs: Vec<Value>) {
        let graph = &mut *self.graph;
        debug_assert_eq!(
            graph.result_types(&op, &inputs),
            Ok(graph.types(&graph.nodes[node].outputs)),
            "{} should have results of the same types as before",
            op.name()
        );
        let data = &mut graph.nodes[node];
        data.op = op;
        data.inputs = inputs;
    }

    /// Replaces operand `index` of a node by another value.
    pub fn set_input(&mut self, node: Node, index: usize, value: Value) {
        self.graph.nodes[node].inputs[index] = value;
    }

    /// Replaces `from` by `to` in all readers: nodes, and the end of the step.
    ///
    /// # Panics
    /// In debug builds if the two differ in type.
    pub fn replace_uses(&mut self, from: Value, to: Value) {
        let graph = &mut *self.graph;
        debug_assert_eq!(
            graph.values[from].ty, graph.values[to].ty,
            "types should be equal"
        );
        let replace = |value: &mut Value| {
            if *value == from {
                *value = to;
            }
        };
        let new = self.before.values().flatten();
        for &node in graph.order.iter().chain(new) {
            graph.nodes[node].inputs.iter_mut().for_each(replace);
        }
        graph
            .states
            .values_mut()
            .for_each(|state| replace(&mut state.after));
        graph
            .outputs
            .iter_mut()
            .for_each(|output| replace(&mut output.value));
        graph
            .gradients
            .iter_mut()
            .for_each(|(_, gradient)| replace(gradient));
    }

    /// Makes `value`, a result of another node, result `index` of `node`, and removes the other
    /// node. The old result `index` must have no readers.
    ///
    /// # Panics
    /// If the other node has more results than this one.
    pub fn steal_result(&mut self, node: Node, index: usize, value: Value) {
        let Def::Node(other, 0) = self.graph.values[value].def else {
            panic!("only the result of a node can be stolen");
        };
        assert_eq!(
            self.graph.nodes[other].outputs.len(),
            1,
            "no other result should be lost"
        );
        // The two values are exchanged, so each is still defined once.
        let old = std::mem::replace(&mut self.graph.nodes[node].outputs[index], value);
        self.graph.values[value].def = Def::Node(node, index);
        self.graph.nodes[other].outputs = vec![old];
        self.graph.values[old].def = Def::Node(other, 0);
        self.remove(other);
    }

    /// Removes a node from the order.
    pub fn remove(&mut self, node: Node) {
        self.removed.insert(node);
    }

    /// Rebuilds the order.
    ///
    /// # Panics
    /// In debug builds if the graph is not in SSA form.
    pub fn finish(mut self) {
        let old = std::mem::take(&mut self.graph.order);
        let mut order = Vec::with_capacity(old.len());
        for node in old {
            order.extend(self.before.remove(&node).unwrap_or_default());
            if !self.removed.contains(&node) {
                order.push(node);
            }
        }
        self.graph.set_order(order);
    }
}

#[cfg(test)]
mod tests;
