//! How long lines take: a roofline from the device file, or times that [`profile`] measured. In a
//! roofline, a node takes the longer of its arithmetic and its memory traffic, plus the time to
//! start it. A copy takes its bytes divided by the link's bandwidth, plus the time to start it.

pub mod profile;

use ir::schedule::{InstrKind, Loc, Schedule};
use ir::{DType, Device, Graph, Instr, Node, Table, TensorType};

/// Times in µs. A planner reads costs only through this trait.
pub trait Cost: Sync {
    /// One run of a node on the device.
    fn run(&self, graph: &Graph, node: Node) -> f64;
    /// The shortest run of a node that was measured, if any was.
    fn least(&self, graph: &Graph, node: Node) -> Option<f64> {
        let _ = (graph, node);
        None
    }
    /// One run of a node on the host's cores, with all its operands and results in the host's
    /// memory.
    fn host(&self, graph: &Graph, node: Node) -> f64;
    /// One copy of `bytes` bytes between the device and the host, while the other direction is
    /// idle.
    fn link(&self, bytes: u64) -> f64;
    /// The same in one direction, because the two directions may differ.
    fn link_way(&self, bytes: u64, to_device: bool) -> f64 {
        let _ = to_device;
        self.link(bytes)
    }
    /// One copy of `bytes` bytes within the device.
    fn local(&self, bytes: u64) -> f64;

    /// What lines cost each other that run at the same time.
    fn shares(&self) -> Shares {
        Shares::default()
    }

    /// One line of a schedule that runs alone.
    fn line(&self, graph: &Graph, schedule: &Schedule, instr: Instr) -> f64 {
        let lane = lane(schedule, instr);
        match schedule.instrs[instr].kind {
            InstrKind::Run { node, .. } if lane == Lane::Host => self.host(graph, node),
            InstrKind::Run { node, .. } => self.run(graph, node),
            InstrKind::Copy { bytes, .. } if matches!(lane, Lane::In | Lane::Out) => {
                self.link_way(bytes, lane == Lane::In)
            }
            InstrKind::Copy { bytes, .. } => self.local(bytes),
        }
    }
}

ir::named! {
    /// What a line occupies while it runs.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Lane {
        /// The device's processor.
        Compute = "compute",
        /// The link, towards the device.
        In = "in",
        /// The link, towards the host.
        Out = "out",
        /// The host's cores.
        Host = "host",
    }
}

/// The lane of a line. A run belongs to the memory of its results: all its places are in one space.
pub fn lane(schedule: &Schedule, instr: Instr) -> Lane {
    let on_device = |loc: Loc| schedule.space(loc).is_device();
    match &schedule.instrs[instr].kind {
        InstrKind::Run { args, outs, .. } => {
            let mut places = outs.iter().chain(args);
            if places.next().is_none_or(|&loc| on_device(loc)) {
                Lane::Compute
            } else {
                Lane::Host
            }
        }
        &InstrKind::Copy { src, dst, .. } => match (on_device(src), on_device(dst)) {
            (true, true) => Lane::Compute,
            (false, true) => Lane::In,
            (true, false) => Lane::Out,
            (false, false) => Lane::Host,
        },
    }
}

/// What lines cost each other that run at the same time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Shares {
    /// `keeps[a][b]`: the share of its speed that lane `a` keeps while lane `b` is busy; 1 if they
    /// do not disturb each other. With several busy lanes, shares multiply.
    pub keeps: [[f64; 4]; 4],
    /// From the end of a line to the start of one on another stream that waits for it, µs.
    pub handoff: f64,
}

impl Default for Shares {
    fn default() -> Shares {
        Shares {
            keeps: [[1.0; 4]; 4],
            handoff: 0.0,
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
        Roofline {
            device: device.clone(),
        }
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
        let half = outputs
            .first()
            .is_some_and(|t| matches!(t.dtype(), DType::BF16 | DType::F16));
        let rate = if work.matrix && half {
            self.device.bf16_flops
        } else {
            self.device.f32_flops
        };
        let memory = operand_bytes(graph, node) as f64 / self.device.memory_bandwidth;
        let arithmetic = if work.matrix { work.flops / rate } else { 0.0 };
        self.device.launch_micros + 1e6 * arithmetic.max(memory)
    }
    fn host(&self, graph: &Graph, node: Node) -> f64 {
        self.device.launch_micros
            + 1e6 * operand_bytes(graph, node) as f64 / self.device.host_bandwidth
    }
    fn link(&self, bytes: u64) -> f64 {
        self.device.link_micros + 1e6 * bytes as f64 / self.device.link_bandwidth
    }
    fn local(&self, bytes: u64) -> f64 {
        self.device.launch_micros + 2e6 * bytes as f64 / self.device.memory_bandwidth
    }
    fn shares(&self) -> Shares {
        let mut shares = Shares::default();
        shares.keeps[Lane::In as usize][Lane::Out as usize] = self.device.duplex;
        shares.keeps[Lane::Out as usize][Lane::In as usize] = self.device.duplex;
        shares
    }
}

/// Bytes that a node reads and writes.
fn operand_bytes(graph: &Graph, node: Node) -> u64 {
    let data = &graph.nodes[node];
    data.inputs
        .iter()
        .chain(&data.outputs)
        .map(|&v| graph.values[v].ty.bytes())
        .sum()
}

/// Whether a node runs at the rate of products.
pub fn is_product(graph: &Graph, node: Node) -> bool {
    let data = &graph.nodes[node];
    let ty = |&v: &ir::Value| &graph.values[v].ty;
    let outputs: Vec<TensorType> = data.outputs.iter().map(|v| ty(v).clone()).collect();
    data.op
        .work(&data.inputs.iter().map(ty).collect::<Vec<_>>(), &outputs)
        .matrix
}

/// A cost with every node's time computed once, because planners read it many times.
pub struct Tabled<'a> {
    cost: &'a dyn Cost,
    nodes: Table<Node, f64>,
    hosts: Table<Node, f64>,
}

impl<'a> Tabled<'a> {
    /// Tables `cost` for the nodes of `graph`.
    pub fn new(cost: &'a dyn Cost, graph: &Graph) -> Tabled<'a> {
        Tabled {
            cost,
            nodes: graph
                .nodes
                .ids()
                .map(|node| cost.run(graph, node))
                .collect(),
            hosts: graph
                .nodes
                .ids()
                .map(|node| cost.host(graph, node))
                .collect(),
        }
    }
}

impl Cost for Tabled<'_> {
    fn run(&self, _: &Graph, node: Node) -> f64 {
        self.nodes[node]
    }
    fn least(&self, graph: &Graph, node: Node) -> Option<f64> {
        self.cost.least(graph, node)
    }
    fn host(&self, _: &Graph, node: Node) -> f64 {
        self.hosts[node]
    }
    fn link(&self, bytes: u64) -> f64 {
        self.cost.link(bytes)
    }
    fn link_way(&self, bytes: u64, to_device: bool) -> f64 {
        self.cost.link_way(bytes, to_device)
    }
    fn local(&self, bytes: u64) -> f64 {
        self.cost.local(bytes)
    }
    fn shares(&self) -> Shares {
        self.cost.shares()
    }
}
