//! How long lines take: a roofline from the device file, or times that [`profile`] measured. In a
//! roofline, a node takes the longer of its arithmetic and its memory traffic, plus the time to
//! start it. A copy takes its bytes divided by the link's bandwidth, plus the time to start it.

pub mod profile;

use ir::op::attention::Attending;
use ir::schedule::{InstrKind, Loc, MemorySpace, Schedule};
use ir::{DType, Device, Graph, Instr, Node, Op, Part, Table, TensorType, Value};
use std::collections::BTreeMap;

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
    /// One copy of `bytes` bytes between the host and the disk, while the other direction is idle.
    fn disk(&self, bytes: u64, reads: bool) -> f64 {
        self.link_way(bytes, reads)
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
            InstrKind::Run { node, part, .. } => {
                let all = match lane {
                    Lane::Host => self.host(graph, node),
                    Lane::Compute | Lane::In | Lane::Out | Lane::Load | Lane::Store => {
                        self.run(graph, node)
                    }
                };
                all * share(graph, node, part)
            }
            InstrKind::Copy { bytes, .. } => match lane {
                Lane::In | Lane::Out => self.link_way(bytes, lane == Lane::In),
                Lane::Load | Lane::Store => self.disk(bytes, lane == Lane::Load),
                Lane::Compute | Lane::Host => self.local(bytes),
            },
        }
    }
}

/// The share of a node that a line computes.
fn share(graph: &Graph, node: Node, part: Option<Part>) -> f64 {
    let all = graph.divisible(node).filter(|&n| n > 0);
    match (part, all) {
        (Some(part), Some(all)) => part.len() as f64 / all as f64,
        (_, None) | (None, _) => 1.0,
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
        /// The disk, towards the host.
        Load = "load",
        /// The disk, from the host.
        Store = "store",
    }
}

impl Lane {
    /// Those that a profile measures: it knows no disk.
    pub const MEASURED: [Lane; 4] = [Lane::Compute, Lane::In, Lane::Out, Lane::Host];
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
            (false, false) => match [src, dst].map(|loc| schedule.space(loc)) {
                [MemorySpace::Disk, _] => Lane::Load,
                [_, MemorySpace::Disk] => Lane::Store,
                [_, _] => Lane::Host,
            },
        },
    }
}

/// The number of lanes.
const LANES: usize = Lane::ALL.len();

/// What lines cost each other that run at the same time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Shares {
    /// `keeps[a][b]`: the share of its speed that lane `a` keeps while lane `b` is busy; 1 if they
    /// do not disturb each other. With several busy lanes, shares multiply.
    pub keeps: [[f64; LANES]; LANES],
    /// From the end of a line to the start of one on another stream that waits for it, µs.
    pub handoff: f64,
    /// The same in addition if one of the two lines runs on the host, µs.
    pub host_handoff: f64,
}

impl Shares {
    /// Sets what the link's directions and kernels cost each other, from a device's description.
    fn set_link(&mut self, device: &Device) {
        let [compute, inward, outward] = [Lane::Compute, Lane::In, Lane::Out].map(|l| l as usize);
        self.keeps[inward][outward] = device.duplex;
        self.keeps[outward][inward] = device.out_duplex.unwrap_or(device.duplex);
        self.keeps[compute][inward] = device.kernels_keep;
        self.keeps[compute][outward] = device.kernels_keep;
        self.keeps[inward][compute] = 1.0;
        self.keeps[outward][compute] = 1.0;
    }
}

impl Shares {
    /// Sets what the disk's directions and the host's cores cost each other.
    fn set_disk(&mut self, device: &Device) {
        let Some(disk) = &device.disk else {
            return;
        };
        let [load, store] = [Lane::Load, Lane::Store].map(|lane| lane as usize);
        self.keeps[load][store] = disk.read_keeps;
        self.keeps[store][load] = disk.write_keeps;
        // Without a GPU, the host's cores run all kernels.
        let on_cores = match device.sm {
            Some(_) => [Lane::Host, Lane::Host],
            None => [Lane::Host, Lane::Compute],
        };
        for lane in on_cores {
            self.keeps[lane as usize][load] = disk.kernels_keep;
            self.keeps[lane as usize][store] = disk.kernels_keep;
        }
    }
}

impl Default for Shares {
    fn default() -> Shares {
        Shares {
            keeps: [[1.0; LANES]; LANES],
            handoff: 0.0,
            host_handoff: 0.0,
        }
    }
}

/// The time from the runtime to a function of PyTorch's and back, µs: the interpreter's lock,
/// tensors over the plan's memory, PyTorch's own way to its kernel.
const CALL_MICROS: f64 = 30.0;

/// The roofline of a device.
#[derive(Clone, Debug)]
pub struct Roofline {
    device: Device,
    tf32: bool,
}

impl Roofline {
    /// The roofline of `device`.
    pub fn new(device: &Device) -> Roofline {
        Roofline {
            device: device.clone(),
            tf32: false,
        }
    }
    /// With `tf32`, products of f32 have the rate of TF32 on a GPU: see
    /// [`tf32`](crate::plan::Options::tf32).
    pub fn with_tf32(self, tf32: bool) -> Roofline {
        Roofline { tf32, ..self }
    }
    /// Operations per second.
    fn rate(&self, product: Product) -> f64 {
        /// Instructions for each multiply-add of a GPU's kernel whose threads compute where every
        /// number lies.
        const SIMPLE: f64 = 16.0;
        let device = &self.device;
        let of_type = match product.is_half {
            true => device.bf16_flops,
            false => device.f32_flops,
        };
        let (is_gpu, is_attention) = (device.sm.is_some(), product.is_attention);
        match product.on_tensor_cores {
            // Attention with a mask, or with other numbers or heads, does not use tensor cores.
            Some(false) if is_gpu && is_attention => device.f32_flops,
            Some(false) if is_gpu => device.f32_flops / SIMPLE,
            Some(true) if is_gpu && !is_attention => device.convolution_flops.unwrap_or(of_type),
            _ if is_attention => device.attention_flops.unwrap_or(of_type),
            None if is_gpu && self.tf32 && product.is_single => {
                device.tf32_flops.unwrap_or(of_type)
            }
            _ => of_type,
        }
    }

    /// Operations of attention that take as long as a random word: on a GPU some 20 instructions
    /// beside its tensor cores, on a processor some two in vectors.
    fn draw_flops(&self) -> f64 {
        match self.device.sm {
            Some(_) => 400.0,
            None => 40.0,
        }
    }
}

impl Cost for Roofline {
    fn run(&self, graph: &Graph, node: Node) -> f64 {
        let data = &graph.nodes[node];
        if data.op.is_alias() {
            return 0.0;
        }
        let memory = operand_bytes(graph, node) as f64 / self.device.memory_bandwidth;
        let arithmetic = product(graph, node).map_or(0.0, |product| {
            (product.flops + product.draws * self.draw_flops()) / self.rate(product)
        });
        let call = match data.op.is_extern() {
            true => CALL_MICROS,
            false => 0.0,
        };
        self.device.launch_micros + call + 1e6 * arithmetic.max(memory)
    }
    fn host(&self, graph: &Graph, node: Node) -> f64 {
        self.device.launch_micros
            + 1e6 * operand_bytes(graph, node) as f64 / self.device.host_bandwidth
    }
    fn link(&self, bytes: u64) -> f64 {
        let slower = self.device.link_way(true).min(self.device.link_way(false));
        self.device.link_micros + 1e6 * bytes as f64 / slower
    }
    fn link_way(&self, bytes: u64, to_device: bool) -> f64 {
        self.device.link_micros + 1e6 * bytes as f64 / self.device.link_way(to_device)
    }
    fn local(&self, bytes: u64) -> f64 {
        self.device.launch_micros + 2e6 * bytes as f64 / self.device.memory_bandwidth
    }
    fn shares(&self) -> Shares {
        let mut shares = Shares {
            host_handoff: self.device.host_micros,
            ..Shares::default()
        };
        shares.set_link(&self.device);
        shares.set_disk(&self.device);
        shares
    }
    fn disk(&self, bytes: u64, reads: bool) -> f64 {
        let Some(disk) = &self.device.disk else {
            return self.link_way(bytes, reads);
        };
        disk.micros + 1e6 * bytes as f64 / disk.way(reads)
    }
}

/// Bytes that a node reads and writes. An op that takes some elements of its first operand reads
/// only those, a kernel only those of its views, and attention only its own heads of rows.
fn operand_bytes(graph: &Graph, node: Node) -> u64 {
    let data = &graph.nodes[node];
    let ty = |&v: &Value| &graph.values[v].ty;
    let bytes = |v: &Value| ty(v).bytes();
    let all: u64 = data.inputs.iter().chain(&data.outputs).map(bytes).sum();
    // All bytes, if of these tensors only so many elements are read.
    let reading = |types: &[&TensorType], read: &[u64]| {
        let parts = types.iter().zip(read);
        parts.fold(all, |all, (ty, n)| {
            all - ty.bytes() + n * ty.dtype().bytes()
        })
    };
    match (&data.op, &data.inputs[..], &data.outputs[..]) {
        (Op::Slice(_) | Op::Embedding(_) | Op::Gather(_) | Op::Index, [from, ..], [taken]) => {
            all - bytes(from) + bytes(taken)
        }
        (Op::Fused(fused), inputs, _) => {
            let types: Vec<&TensorType> = inputs.iter().map(ty).collect();
            reading(&types, &fused.body.read(&types))
        }
        (Op::SdpaRows(a), [q, k, v, ..], _) | (Op::SdpaRowsBwd(a), [_, q, k, v, ..], _) => {
            let types = [q, k, v].map(ty);
            let it = Attending::rows(a, types.map(TensorType::shape), 0);
            let read = it.expect("typed attention should have sizes").numbers();
            reading(&types, &read)
        }
        _ => all,
    }
}

/// Whether a node runs at the rate of products.
pub fn is_product(graph: &Graph, node: Node) -> bool {
    product(graph, node).is_some()
}

ir::named! {
    /// A kind of product with a rate of its own.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    pub enum ProductKind {
        /// Products of bf16 or f16.
        Half = "bf16",
        /// Products of other numbers.
        Single = "f32",
        /// Attention.
        Attention = "attention",
    }
}

/// A node that runs at the rate of products.
#[derive(Clone, Copy)]
struct Product {
    flops: f64,
    /// Random words.
    draws: f64,
    is_half: bool,
    /// f32.
    is_single: bool,
    is_attention: bool,
    /// Of a convolution or attention: whether a GPU's tensor cores compute it.
    on_tensor_cores: Option<bool>,
}

impl Product {
    fn kind(self) -> ProductKind {
        match (self.is_attention, self.is_half) {
            (true, _) => ProductKind::Attention,
            (false, true) => ProductKind::Half,
            (false, false) => ProductKind::Single,
        }
    }
}

/// A node's product; none if it does not run at the rate of products.
fn product(graph: &Graph, node: Node) -> Option<Product> {
    let data = &graph.nodes[node];
    let work = graph.work(node);
    // The result may be wider than the factors.
    let is_half = |&v: &Value| matches!(graph.values[v].ty.dtype(), DType::BF16 | DType::F16);
    let ty = |&v: &Value| &graph.values[v].ty;
    work.matrix.then(|| Product {
        on_tensor_cores: data.op.on_tensor_cores(
            &data.inputs.iter().map(ty).collect::<Vec<_>>(),
            &data
                .outputs
                .iter()
                .map(|v| ty(v).clone())
                .collect::<Vec<_>>(),
        ),
        flops: work.flops,
        draws: work.draws,
        is_half: data.inputs.first().is_some_and(is_half),
        is_single: data
            .outputs
            .first()
            .is_some_and(|v| ty(v).dtype() == DType::F32),
        is_attention: matches!(
            data.op,
            Op::Sdpa(_) | Op::SdpaBwd(_) | Op::SdpaRows(_) | Op::SdpaRowsBwd(_)
        ),
    })
}

/// What one run of all products of a kind takes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ProductRate {
    /// The kind.
    pub kind: ProductKind,
    /// Operations of all of them.
    pub flops: f64,
    /// Their time, µs.
    pub micros: f64,
}

impl ProductRate {
    /// Operations per second.
    pub fn per_second(&self) -> f64 {
        1e6 * self.flops / self.micros
    }
}

/// The rates at which a graph's products run, for each kind that it has.
pub fn product_rates(graph: &Graph, cost: &dyn Cost) -> Vec<ProductRate> {
    let mut all: BTreeMap<ProductKind, ProductRate> = BTreeMap::new();
    for &node in &graph.order {
        let Some(product) = product(graph, node).filter(|product| product.flops > 0.0) else {
            continue;
        };
        let kind = product.kind();
        let rate = all.entry(kind).or_insert(ProductRate {
            kind,
            flops: 0.0,
            micros: 0.0,
        });
        rate.flops += product.flops;
        rate.micros += cost.run(graph, node);
    }
    all.into_values().collect()
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
    fn disk(&self, bytes: u64, reads: bool) -> f64 {
        self.cost.disk(bytes, reads)
    }
    fn local(&self, bytes: u64) -> f64 {
        self.cost.local(bytes)
    }
    fn shares(&self) -> Shares {
        self.cost.shares()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices;
    use ir::text::parse_graph;

    fn times(device: &Device, nodes: &str) -> (Graph, Vec<f64>) {
        let text = format!("graph g {{\n  input %x : f32[1000,10]\n{nodes}\n  output y = %y\n}}");
        let graph = parse_graph(&text).unwrap();
        let roofline = Roofline::new(device);
        let times = graph
            .order
            .iter()
            .map(|&node| roofline.run(&graph, node))
            .collect();
        (graph, times)
    }

    /// A byte takes a nanosecond, a start a microsecond.
    #[test]
    fn a_slice_reads_what_it_takes() {
        let slice = "  fwd - %y = slice %x dim=0 end=10 start=0 step=1 : f32[10,10]";
        let test = devices::named("test").unwrap();
        let nanos = |nodes| (1e3 * times(&test, nodes).1[0]).round();
        assert_eq!(nanos(slice), 1000.0 + 2.0 * 400.0);
        let all = "  fwd - %y = neg %x : f32[1000,10]";
        assert_eq!(nanos(all), 1000.0 + 2.0 * 40_000.0);
    }

    /// Two halves of a row are two views of one operand, which also may be read as a whole.
    #[test]
    fn a_kernel_reads_its_views() {
        let halves = "%1 = slice %0 dim=1 end=5 start=0 step=1 | \
            %2 = slice %0 dim=1 end=10 start=5 step=1 | %3 = mul %1, %2";
        let row = "%1 = slice %0 dim=0 end=1 start=0 step=1";
        let test = devices::named("test").unwrap();
        let nanos = |body: &str, shape: &str| {
            let node = format!("  fwd - %y = fused %x body={{{body}}} : f32[{shape}]");
            (1e3 * times(&test, &node).1[0]).round() - 1000.0
        };
        let written = 20_000.0;
        assert_eq!(
            nanos(&format!("{halves} | %3"), "1000,5"),
            40_000.0 + written
        );
        let one = format!("{row} | %2 = tanh %1 | %3 = neg %1 | %4 = mul %2, %3 | %4");
        assert_eq!(nanos(&one, "1,10"), 2.0 * 40.0);
        let all = format!("{row} | %2 = neg %0 | %3 = mul %1, %2 | %3");
        assert_eq!(nanos(&all, "1000,10"), 2.0 * 40_000.0);
        // The square of the number of elements is no number of 64 bits.
        let text = "graph g {
  input %x : f32[65536,65536]
  fwd - %y = fused %x body={%1 = neg %0 | %2 = exp %1 | %2} : f32[65536,65536]
  output y = %y
}";
        let graph = parse_graph(text).unwrap();
        let micros = Roofline::new(&test).run(&graph, graph.order[0]);
        assert_eq!((micros - 1.0) * 1e3, 2.0 * 4.0 * (1_u64 << 32) as f64);
    }

    /// Attention reads three of the five heads of its rows.
    #[test]
    fn attention_reads_its_heads() {
        let nodes = "  fwd - %r = reshape %x shape=[1000,1,5,2] : f32[1000,1,5,2]
  fwd - %y, %l = sdpa_rows %r, %r, %r causal=false first=[0,2,4] heads=[1,1] scale=1.0 : \
            f32[1000,1,1,2], f32[1000,1,1]";
        let test = Device {
            attention_flops: Some(1e30),
            ..devices::named("test").unwrap()
        };
        let nanos = (1e3 * times(&test, nodes).1[1]).round();
        assert_eq!(nanos, 1000.0 + 4.0 * (3.0 * 2000.0 + 2000.0 + 1000.0));
    }

    /// Attention has a rate of its own, and the sum of a product in half precision has the rate of
    /// its factors.
    #[test]
    fn products_have_rates_by_kind() {
        let nodes = [
            "%q = cast %x dtype=bf16 : bf16[1000,10]",
            "%a = matmul_sum %q, %q ta=true tb=false : f32[10,10]",
            "%b = matmul %x, %x ta=true tb=false : f32[10,10]",
            "%h = reshape %q shape=[1,1,1000,10] : bf16[1,1,1000,10]",
            "%s, %l = sdpa %h, %h, %h causal=true scale=1.0 : bf16[1,1,1000,10], f32[1,1,1000]",
            "%y = add %a, %b : f32[10,10]",
        ];
        let nodes = nodes.map(|node| format!("  fwd - {node}")).join("\n");
        let device = Device {
            attention_flops: Some(4e9),
            launch_micros: 0.0,
            ..devices::named("test").unwrap()
        };
        let (graph, _) = times(&device, &nodes);
        let rates = product_rates(&graph, &Roofline::new(&device));
        let rates: Vec<_> = rates.iter().map(|r| (r.kind, r.per_second())).collect();
        let (half, single) = (device.bf16_flops, device.f32_flops);
        let expected = [
            (ProductKind::Half, half),
            (ProductKind::Single, single),
            (ProductKind::Attention, 4e9),
        ];
        let near = |(a, b): (&(_, f64), &(_, f64))| a.0 == b.0 && (a.1 / b.1 - 1.0).abs() < 1e-9;
        assert!(
            rates.len() == 3 && rates.iter().zip(&expected).all(near),
            "{rates:?}"
        );
    }

    /// Only convolutions and attention that tensor cores compute have their rates on a GPU.
    #[test]
    fn a_gpu_s_rates_are_those_of_its_kernels() {
        let of = |dtype: &str, groups: u64, heads: u64| {
            let channels = 64 / groups;
            let lists = "dilation=[1,1] groups=";
            let nodes = [
                "%i = reshape %x shape=[1,64,10,50] : f32[1,64,10,50]".to_string(),
                format!("%c = cast %i dtype={dtype} : {dtype}[1,64,10,50]"),
                "%f = reshape %x shape=[500,64,1,1] : f32[500,64,1,1]".to_string(),
                format!(
                    "%g = slice %f dim=1 end={channels} start=0 step=1 : f32[500,{channels},1,1]"
                ),
                format!("%w = cast %g dtype={dtype} : {dtype}[500,{channels},1,1]"),
                format!(
                    "%y = convolution %c, %w {lists}{groups} padding=[0,0] stride=[1,1] : \
                     {dtype}[1,500,10,50]"
                ),
                format!(
                    "%h = reshape %c shape=[1,1,{},{heads}] : {dtype}[1,1,{},{heads}]",
                    32000 / heads,
                    32000 / heads
                ),
                format!(
                    "%s, %l = sdpa %h, %h, %h causal=true scale=1.0 : \
                     {dtype}[1,1,{},{heads}], f32[1,1,{}]",
                    32000 / heads,
                    32000 / heads
                ),
            ];
            let nodes = nodes.map(|node| format!("  fwd - {node}\n")).concat();
            let outputs = "output y = %y\n  output s = %s";
            let text = format!("graph g {{\n  input %x : f32[500,64]\n{nodes}\n  {outputs}\n}}");
            let device = Device {
                sm: Some(90),
                f32_flops: 16e3,
                bf16_flops: 8e3,
                attention_flops: Some(4e3),
                convolution_flops: Some(2e3),
                ..devices::named("test").unwrap()
            };
            let graph = parse_graph(&text).unwrap();
            let rate = |node| product(&graph, node).map(|it| Roofline::new(&device).rate(it));
            graph
                .order
                .iter()
                .filter_map(|&node| rate(node))
                .collect::<Vec<_>>()
        };
        assert_eq!(of("bf16", 1, 64), [2e3, 4e3]);
        assert_eq!(of("bf16", 2, 32), [1e3, 16e3]);
        assert_eq!(of("f32", 1, 64), [1e3, 16e3]);
    }

    /// Only products of matrices of f32 use TF32, and only on a GPU that is asked to.
    #[test]
    fn tf32_is_for_products_of_f32() {
        let nodes = "  fwd - %q = cast %x dtype=bf16 : bf16[1000,10]
  fwd - %a = matmul %x, %x ta=true tb=false : f32[10,10]
  fwd - %b = matmul %q, %q ta=true tb=false : bf16[10,10]
  fwd - %c = cast %b dtype=f32 : f32[10,10]
  fwd - %y = add %a, %c : f32[10,10]";
        let gpu = Device {
            sm: Some(90),
            f32_flops: 1e3,
            tf32_flops: Some(8e3),
            bf16_flops: 16e3,
            ..devices::named("test").unwrap()
        };
        let (graph, _) = times(&gpu, nodes);
        let rates = |device: &Device, tf32| {
            let roofline = Roofline::new(device).with_tf32(tf32);
            let rate = |&node: &Node| product(&graph, node).map(|it| roofline.rate(it));
            graph.order.iter().filter_map(rate).collect::<Vec<_>>()
        };
        assert_eq!(rates(&gpu, false), [1e3, 16e3]);
        assert_eq!(rates(&gpu, true), [8e3, 16e3]);
        let processor = Device { sm: None, ..gpu };
        assert_eq!(rates(&processor, true), [1e3, 16e3]);
    }
}
