//! How long things take: a roofline from the device file. A node takes the longer of its arithmetic and its memory
//! traffic, and the time to start it; a copy takes its bytes over the link, and the time to start it.

use ir::schedule::{InstrKind, Schedule};
use ir::{DType, Device, Graph, Instr, Node, Table, TensorType};

/// Times in µs. A planner sees costs only through this.
pub trait Cost: Sync {
    /// One run of a node.
    fn run(&self, graph: &Graph, node: Node) -> f64;
    /// One copy of `bytes` bytes between the device and the host.
    fn link(&self, bytes: u64) -> f64;
    /// One copy of `bytes` bytes within the device.
    fn local(&self, bytes: u64) -> f64;

    /// One line of a schedule. Pool 0 is the device's; every other pool is beyond the link.
    fn line(&self, graph: &Graph, schedule: &Schedule, instr: Instr) -> f64 {
        match schedule.instrs[instr].kind {
            InstrKind::Run { node, .. } => self.run(graph, node),
            InstrKind::Copy { src, dst, bytes } => {
                let pool = |buffer| schedule.buffers[buffer].pool;
                if pool(src.buffer) == pool(dst.buffer) { self.local(bytes) } else { self.link(bytes) }
            }
        }
    }
}

/// The roofline of a device.
#[derive(Clone, Debug)]
pub struct Roofline {
    device: Device,
}

impl Roofline {
    /// The roofline of `device`.
    pub fn new(device: &Device) -> Roofline {
        Roofline { device: device.clone() }
    }
}

impl Cost for Roofline {
    fn run(&self, graph: &Graph, node: Node) -> f64 {
        let data = &graph.nodes[node];
        if data.op.is_alias() {
            return 0.0;
        }
        let ty = |&v: &ir::Value| &graph.values[v].ty;
        let inputs: Vec<&TensorType> = data.inputs.iter().map(ty).collect();
        let outputs: Vec<TensorType> = data.outputs.iter().map(|v| ty(v).clone()).collect();
        let work = data.op.work(&inputs, &outputs);
        let half = outputs.first().is_some_and(|t| matches!(t.dtype(), DType::BF16 | DType::F16));
        let rate = if work.matrix && half { self.device.bf16_flops } else { self.device.f32_flops };
        let bytes = inputs.iter().map(|t| t.bytes()).sum::<u64>() + outputs.iter().map(|t| t.bytes()).sum::<u64>();
        let memory = bytes as f64 / self.device.memory_bandwidth;
        let arithmetic = if work.matrix { work.flops / rate } else { 0.0 };
        self.device.launch_micros + 1e6 * arithmetic.max(memory)
    }
    fn link(&self, bytes: u64) -> f64 {
        self.device.link_micros + 1e6 * bytes as f64 / self.device.link_bandwidth
    }
    fn local(&self, bytes: u64) -> f64 {
        self.device.launch_micros + 2e6 * bytes as f64 / self.device.memory_bandwidth
    }
}

/// A cost with every node's time computed once: planners ask many times.
pub struct Tabled<'a> {
    cost: &'a dyn Cost,
    nodes: Table<Node, f64>,
}

impl<'a> Tabled<'a> {
    /// Tables `cost` for the nodes of `graph`.
    pub fn new(cost: &'a dyn Cost, graph: &Graph) -> Tabled<'a> {
        Tabled { cost, nodes: graph.nodes.ids().map(|node| cost.run(graph, node)).collect() }
    }
}

impl Cost for Tabled<'_> {
    fn run(&self, _: &Graph, node: Node) -> f64 {
        self.nodes[node]
    }
    fn link(&self, bytes: u64) -> f64 {
        self.cost.link(bytes)
    }
    fn local(&self, bytes: u64) -> f64 {
        self.cost.local(bytes)
    }
}
