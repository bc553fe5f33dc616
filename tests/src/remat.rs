//! Training graphs in JSON for recompute: the files of `tests/data/remat`.
//!
//! They are GPT-2-like joint graphs of 2, 4 and 12 layers with bytes and roofline times of an A100.
//! A node has one result; `outs` are the results that remain after a step.

use papers::remat::{Node, Problem, Value};
use serde_json::Value as Json;
use std::path::PathBuf;

/// A graph as read.
#[derive(Clone, Debug)]
pub struct Listed {
    /// Bytes, µs and operands of each node.
    pub nodes: Vec<(u64, f64, Vec<u32>)>,
    /// The nodes whose results remain after a step.
    pub outs: Vec<u32>,
}

/// Reads `tests/data/remat/NAME.json`.
///
/// # Errors
/// The file does not exist, or is not such a graph.
pub fn read(name: &str) -> Result<Listed, String> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("data/remat")
        .join(format!("{name}.json"));
    let text =
        std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let json: Json =
        serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
    let numbers = |json: &Json| -> Option<Vec<u32>> {
        json.as_array()?
            .iter()
            .map(|n| n.as_u64().and_then(|n| u32::try_from(n).ok()))
            .collect()
    };
    let node = |json: &Json| {
        Some((
            json["bytes"].as_u64()?,
            json["us"].as_f64()?,
            numbers(&json["deps"])?,
        ))
    };
    let nodes = json["nodes"]
        .as_array()
        .and_then(|nodes| nodes.iter().map(node).collect::<Option<Vec<_>>>());
    match (nodes, numbers(&json["outs"])) {
        (Some(nodes), Some(outs)) => Ok(Listed { nodes, outs }),
        _ => Err(format!("{}: not a graph", path.display())),
    }
}

impl Listed {
    /// The graph as a problem. Any node may run again.
    ///
    /// # Errors
    /// If the graph is not in order.
    pub fn problem(&self) -> Result<Problem, String> {
        let mut values: Vec<Value> = vec![];
        let mut nodes = vec![];
        for (i, (bytes, micros, deps)) in self.nodes.iter().enumerate() {
            values.push(Value {
                bytes: *bytes,
                maker: i as u32,
                kept: false,
            });
            nodes.push(Node {
                micros: *micros,
                scratch: 0,
                reads: deps.clone(),
                until: u32::MAX,
            });
        }
        for &out in &self.outs {
            values
                .get_mut(out as usize)
                .ok_or("an output should be a node")?
                .kept = true;
        }
        Problem::new(nodes, values, vec![]).map_err(|e| e.to_string())
    }

    /// The same model with more layers: layers between the first and the last are copies of a
    /// middle layer.
    ///
    /// # Panics
    /// If the graph is not one of those in `tests/data/remat`.
    pub fn deeper(&self, n_layers: u32) -> Listed {
        let old = Shape {
            n_layers: (self.nodes.len() as u32 - HEAD - MIDDLE - TAIL) / (FORWARD + BACKWARD),
        };
        let new = Shape { n_layers };
        let mut nodes = vec![];
        let mut outs = vec![];
        for i in 0..new.len() {
            let (part, at) = new.place(i);
            let layer = part.layer().unwrap_or(0);
            let like = if layer == 0 || n_layers == 1 {
                0
            } else if layer == n_layers - 1 {
                old.n_layers - 1
            } else {
                old.n_layers / 2
            };
            let from = old.index(part.with_layer(like), at);
            let (bytes, micros, deps) = &self.nodes[from as usize];
            let moved = |dep: &u32| {
                let (dep_part, dep_at) = old.place(*dep);
                // A layer depends on itself or on a neighbour; other nodes depend on the first or
                // the last layer.
                let dep_layer = match (part.layer(), dep_part.layer()) {
                    (Some(_), Some(dep_layer)) => layer + dep_layer - like,
                    (None, Some(0)) => 0,
                    _ => n_layers - 1,
                };
                new.index(dep_part.with_layer(dep_layer), dep_at)
            };
            nodes.push((*bytes, *micros, deps.iter().map(moved).collect()));
            if self.outs.contains(&from) {
                outs.push(i);
            }
        }
        Listed { nodes, outs }
    }
}

/// Nodes before the first layer, of a layer's forward, between the last layer's forward and
/// backward, of a layer's backward, and after the first layer's backward.
const HEAD: u32 = 4;
const FORWARD: u32 = 17;
const MIDDLE: u32 = 15;
const BACKWARD: u32 = 27;
const TAIL: u32 = 3;

#[derive(Clone, Copy)]
enum Part {
    Head,
    Forward(u32),
    Middle,
    Backward(u32),
    Tail,
}

impl Part {
    fn layer(self) -> Option<u32> {
        match self {
            Part::Forward(layer) | Part::Backward(layer) => Some(layer),
            Part::Head | Part::Middle | Part::Tail => None,
        }
    }
    fn with_layer(self, layer: u32) -> Part {
        match self {
            Part::Forward(_) => Part::Forward(layer),
            Part::Backward(_) => Part::Backward(layer),
            other => other,
        }
    }
}

/// The positions of the parts.
struct Shape {
    n_layers: u32,
}

impl Shape {
    fn len(&self) -> u32 {
        HEAD + MIDDLE + TAIL + self.n_layers * (FORWARD + BACKWARD)
    }
    fn start(&self, part: Part) -> u32 {
        let middle = HEAD + self.n_layers * FORWARD;
        match part {
            Part::Head => 0,
            Part::Forward(layer) => HEAD + layer * FORWARD,
            Part::Middle => middle,
            Part::Backward(layer) => middle + MIDDLE + (self.n_layers - 1 - layer) * BACKWARD,
            Part::Tail => self.len() - TAIL,
        }
    }
    fn index(&self, part: Part, at: u32) -> u32 {
        self.start(part) + at
    }
    /// A node's part, and its number in this part.
    fn place(&self, i: u32) -> (Part, u32) {
        let layers =
            (0..self.n_layers).flat_map(|layer| [Part::Forward(layer), Part::Backward(layer)]);
        let parts = [Part::Head, Part::Middle, Part::Tail]
            .into_iter()
            .chain(layers);
        let part = parts
            .filter(|&part| self.start(part) <= i)
            .max_by_key(|&part| self.start(part));
        let part = part.expect("a graph should begin with its head");
        (part, i - self.start(part))
    }
}
