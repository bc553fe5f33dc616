//! Simulates steps of PyTorch's FSDP on several devices near the limit of their memory: streams,
//! the host that runs ahead of them, and the caching allocator, whose retries follow from the
//! step's own requests. The times are those of the post "Faster PyTorch Training by Reducing Peak
//! Memory".
//!
//! A unit is a layer; the root is the unit of embeddings, head and last norm. As in PyTorch 2.0:
//! weights are gathered on a stream of their own; a gathered unit goes back when the layer that
//! reads it was issued, and its bytes serve other requests only after the device has passed that
//! layer; the host issues the next gather at once, or waits while two are in use
//! (`limit_all_gathers`); gradients are scattered on a third stream. The allocator shares nothing
//! between streams ([`Limited`]). A request that the device has no memory for is retried:
//! the host waits for the device, returns every cached segment, and asks again.
//!
//! All devices run the same program, and a collective starts when the last device has reached it.
//!
//! The same step with planned memory makes no request. A gather then waits on the device until the
//! bytes it takes were read, and [`trace`] has the step's tensors for a planner of addresses.

use crate::numbers::Random;
use addresses::caching::Limited;
use placement::trace::{Block, Origin, Trace};
use std::collections::{BTreeMap, VecDeque};

/// A LLaMA.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream, elements.
    pub width: u64,
    /// Width between the products of a feed-forward part, elements.
    pub hidden: u64,
}

/// Entries of LLaMA's vocabulary.
const VOCABULARY: u64 = 32_000;

impl Model {
    /// Parameters of a layer.
    pub fn layer(&self) -> u64 {
        4 * self.width * self.width + 3 * self.width * self.hidden
    }
    /// Parameters of the embeddings, and of the head.
    fn words(&self) -> u64 {
        VOCABULARY * self.width
    }
    /// All parameters.
    pub fn parameters(&self) -> u64 {
        self.layers as u64 * self.layer() + 2 * self.words()
    }
}

/// LLaMA 7B.
pub const LLAMA_7B: Model = Model {
    layers: 32,
    width: 4096,
    hidden: 11_008,
};
/// LLaMA 13B.
pub const LLAMA_13B: Model = Model {
    layers: 40,
    width: 5120,
    hidden: 13_824,
};

/// How fast everything is: one set for every row.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// Bytes of a device's memory for tensors.
    pub device_bytes: u64,
    /// Tokens that a device computes in a step.
    pub tokens: u64,
    /// Operations per second in a layer, with the kernels between its products.
    pub flops: f64,
    /// Bytes per second of a collective on each device.
    pub collective: f64,
    /// Parameters that a device updates in a second.
    pub updates: f64,
    /// Seconds of the host for half of a layer's forward; its backward takes twice as long.
    pub host_half_layer: f64,
    /// Seconds of the host for a collective.
    pub host_collective: f64,
    /// Seconds of a cudaMalloc or cudaFree, and seconds per byte.
    pub system_call: (f64, f64),
    /// Times of kernels and of the host vary by this share, evenly.
    pub noise: f64,
}

/// A100s with 40 GB, connected by NVLink.
pub const A100: Machine = Machine {
    // 40 GiB less 2 GB for the context, the collectives' buffers and the libraries.
    device_bytes: 41_000_000_000,
    // One sequence: with two, the activations alone do not fit on four devices.
    tokens: 2048,
    // A quarter of the peak. It is set by one row of the post: updates in the backward, 1.15 s.
    flops: 79e12,
    collective: 2e11,
    // 1.3 TB/s, 60 bytes: nine kernels of AdamW one after the other.
    updates: 1.3e12 / 60.0,
    host_half_layer: 5e-4,
    host_collective: 2e-4,
    // They are set by one row of the post: four devices without `foreach`, 7.2 s.
    system_call: (5e-3, 5e-12),
    noise: 0.05,
};

/// When the next unit's weights are gathered in the backward.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Prefetch {
    /// Before the current unit's gradients are computed: `BACKWARD_PRE`.
    Pre,
    /// After the current unit's gradients are computed, and its weights are freed:
    /// `BACKWARD_POST`.
    Post,
}

/// Who gives addresses to the step's tensors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Memory {
    /// PyTorch's caching allocator.
    Caching,
    /// A plan made before the first step. It has no allocation in a step.
    Planned,
}

/// One row of the post.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The model.
    pub model: Model,
    /// The number of devices.
    pub devices: usize,
    /// AdamW updates all parameters at once, with temporaries for all of them.
    pub foreach: bool,
    /// At most two gathered units that the device has not yet passed.
    pub limit_gathers: bool,
    /// The update of a unit runs in the backward.
    pub in_backward: bool,
    /// The order of prefetch.
    pub prefetch: Prefetch,
    /// Where addresses come from.
    pub memory: Memory,
}

/// What several steps of a setup take.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Seconds of each step.
    pub seconds: Vec<f64>,
    /// Retries of each step, on all devices together.
    pub retries: Vec<usize>,
    /// Calls of cudaMalloc and cudaFree in each step, on all devices together.
    pub calls: Vec<usize>,
    /// The most bytes of tensors on a device, with those that wait for a stream.
    pub allocated: u64,
    /// The most bytes that a device's allocator had from the system.
    pub reserved: u64,
    /// The most bytes of gathered weights on a device.
    pub gathered: u64,
}

impl Figures {
    /// Mean seconds of a step.
    pub fn mean(&self) -> f64 {
        self.seconds.iter().sum::<f64>() / self.seconds.len() as f64
    }
    /// The standard deviation of the steps' times as a share of their mean.
    pub fn deviation(&self) -> f64 {
        let mean = self.mean();
        let squares = self.seconds.iter().map(|s| (s - mean) * (s - mean));
        (squares.sum::<f64>() / self.seconds.len() as f64).sqrt() / mean
    }
}

/// The device's memory is not enough, even without cached segments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfMemory;

/// Streams of a device, by which the allocator keeps its blocks apart.
const COMPUTE: u32 = 0;
/// Gathered weights.
pub const GATHER: u32 = 1;
const SCATTER: u32 = 2;

/// Bytes of an element in half and full precision.
const HALF: u64 = 2;
const FULL: u64 = 4;

/// Simulates `warm_up` steps that are not counted, and then `steps` that are.
pub fn run(
    setup: &Setup,
    machine: &Machine,
    warm_up: usize,
    steps: usize,
    seed: u64,
) -> Result<Figures, OutOfMemory> {
    let mut run = Run::new(setup, machine, seed)?;
    let mut figures = Figures::default();
    for step in 0..warm_up + steps {
        let (from, retries, calls) = (run.now(), run.retries(), run.calls());
        run.step()?;
        if step >= warm_up {
            figures.seconds.push(run.now() - from);
            figures.retries.push(run.retries() - retries);
            figures.calls.push(run.calls() - calls);
        }
    }
    let most = |of: fn(&Device) -> u64| run.devices.iter().map(of).max().unwrap_or(0);
    figures.allocated = most(|device| device.most_allocated);
    figures.reserved = most(|device| device.most_reserved);
    figures.gathered = most(|device| device.most_gathered);
    Ok(figures)
}

/// The order of prefetch, from the predicted seconds of a step with each; a step that does not fit
/// has none. To gather earlier hides more of a link that is slower than predicted, so the later
/// order must be 1 % faster.
pub fn choose(pre: Option<f64>, post: Option<f64>) -> Option<Prefetch> {
    match (pre, post) {
        (None, None) => None,
        (Some(pre), Some(post)) if pre <= 1.01 * post => Some(Prefetch::Pre),
        (Some(_), None) => Some(Prefetch::Pre),
        (_, Some(_)) => Some(Prefetch::Post),
    }
}

/// The tensors of a step on one device, in the order of its program. States are alive throughout.
pub fn trace(setup: &Setup, machine: &Machine) -> Trace {
    let setup = Setup {
        memory: Memory::Planned,
        ..*setup
    };
    let roomy = "without a limit, memory should suffice";
    let mut run = Run::new(&setup, machine, 0).expect(roomy);
    // Moments are made in the first step.
    run.step().expect(roomy);
    let mut log = Log::default();
    for unit in 0..=setup.model.layers {
        for _ in 0..3 {
            log.open(run.shard(unit), COMPUTE, None);
        }
    }
    run.log = Some(log);
    run.step().expect(roomy);
    run.log.take().map(|log| log.trace).unwrap_or_default()
}

/// Tensors of the first device as they come and go.
#[derive(Default)]
struct Log {
    trace: Trace,
    clock: u64,
    /// Blocks of tensors that are alive, by address.
    alive: BTreeMap<u64, usize>,
    /// Gradients that are being scattered while the next unit computes.
    scattering: Option<u64>,
}

impl Log {
    fn open(&mut self, bytes: u64, stream: u32, address: Option<u64>) {
        self.clock += 1;
        if let Some(address) = address {
            self.alive.insert(address, self.trace.blocks.len());
        }
        self.trace.blocks.push(Block {
            start: if address.is_some() { self.clock } else { 0 },
            end: u64::MAX,
            bytes,
            origin: Origin {
                stream,
                ..Origin::default()
            },
            ..Block::default()
        });
    }

    fn close(&mut self, address: u64) {
        self.clock += 1;
        if let Some(block) = self.alive.remove(&address) {
            self.trace.blocks[block].end = self.clock;
        }
    }
}

/// A block that was given back while another stream still reads it.
struct Waiting {
    until: f64,
    tensor: (u64, u64),
    is_gathered: bool,
}

/// A device and the process that drives it. Times are seconds since the start.
struct Device {
    cache: Limited,
    /// When the host issues what comes next.
    host: f64,
    /// When the compute stream has done what was issued.
    compute: f64,
    waiting: Vec<Waiting>,
    /// When the device passes the units whose weights were given back, oldest first.
    passes: VecDeque<f64>,
    allocated: u64,
    gathered: u64,
    most_allocated: u64,
    most_reserved: u64,
    most_gathered: u64,
    retries: usize,
    calls: usize,
    random: Random,
}

impl Device {
    /// Frees what streams have read by now.
    fn settle(&mut self, now: f64) {
        if self.waiting.iter().all(|block| block.until > now) {
            return;
        }
        let (done, waiting) = std::mem::take(&mut self.waiting)
            .into_iter()
            .partition(|block| block.until <= now);
        self.waiting = waiting;
        for block in done {
            self.free(block.tensor);
            if block.is_gathered {
                self.gathered -= block.tensor.1;
            }
        }
    }

    fn free(&mut self, (address, bytes): (u64, u64)) {
        self.allocated -= bytes;
        self.cache.free(address);
    }

    /// The time of a call of the system about `bytes`.
    fn call(&mut self, machine: &Machine, bytes: u64) {
        let (each, per_byte) = machine.system_call;
        self.host += each + per_byte * bytes as f64;
        self.calls += 1;
    }
}

/// A tensor on each device: addresses, and bytes on one.
struct Tensor {
    at: Vec<u64>,
    bytes: u64,
}

/// What a layer's forward leaves for its backward.
struct Layer {
    input: Tensor,
    norm: Tensor,
    qkv: [Tensor; 3],
    attention: Tensor,
    middle: Tensor,
    second_norm: Tensor,
    gate: Tensor,
    up: Tensor,
    silu: Tensor,
    product: Tensor,
}

struct Run<'a> {
    setup: &'a Setup,
    machine: &'a Machine,
    devices: Vec<Device>,
    /// When the collectives that were issued have ended, on all devices.
    link: f64,
    /// Moments of each unit; they exist after its first update. The root is the last unit.
    moments: Vec<Option<[Tensor; 2]>>,
    log: Option<Log>,
}

impl<'a> Run<'a> {
    /// Devices with their shares of the f32 weights.
    fn new(setup: &'a Setup, machine: &'a Machine, seed: u64) -> Result<Run<'a>, OutOfMemory> {
        let device = |i| Device {
            // A plan has the memory it needs from the start, and only its peak counts.
            cache: Limited::new(match setup.memory {
                Memory::Caching => machine.device_bytes,
                Memory::Planned => u64::MAX / 4,
            }),
            host: 0.0,
            compute: 0.0,
            waiting: vec![],
            passes: VecDeque::new(),
            allocated: 0,
            gathered: 0,
            most_allocated: 0,
            most_reserved: 0,
            most_gathered: 0,
            retries: 0,
            calls: 0,
            random: Random(seed.wrapping_mul(1000).wrapping_add(i)),
        };
        let mut run = Run {
            setup,
            machine,
            devices: (0..setup.devices as u64).map(device).collect(),
            link: 0.0,
            moments: (0..=setup.model.layers).map(|_| None).collect(),
            log: None,
        };
        for unit in 0..=setup.model.layers {
            // The weights stay for ever.
            run.alloc(run.shard(unit), COMPUTE)?;
        }
        Ok(run)
    }

    /// Parameters of a unit.
    fn unit(&self, unit: usize) -> u64 {
        if unit == self.setup.model.layers {
            2 * self.setup.model.words()
        } else {
            self.setup.model.layer()
        }
    }
    /// Bytes of a device's share of a unit in f32.
    fn shard(&self, unit: usize) -> u64 {
        FULL * self.unit(unit).div_ceil(self.setup.devices as u64)
    }
    /// Bytes of a tensor of half precision with `width` elements for each token.
    fn rows(&self, width: u64) -> u64 {
        HALF * self.machine.tokens * width
    }
    fn now(&self) -> f64 {
        self.devices.iter().map(|d| d.host).fold(0.0, f64::max)
    }
    fn retries(&self) -> usize {
        self.devices.iter().map(|device| device.retries).sum()
    }
    fn calls(&self) -> usize {
        self.devices.iter().map(|device| device.calls).sum()
    }

    /// Requests a tensor on each device.
    fn alloc(&mut self, bytes: u64, stream: u32) -> Result<Tensor, OutOfMemory> {
        let mut at = vec![];
        for device in &mut self.devices {
            device.settle(device.host);
            let mut served = device.cache.alloc(bytes, stream);
            if served.is_none() {
                device.retries += 1;
                // The host waits for everything that it has issued.
                device.host = device.host.max(device.compute).max(self.link);
                device.settle(f64::INFINITY);
                for bytes in device.cache.release_cached() {
                    device.call(self.machine, bytes);
                }
                served = device.cache.alloc(bytes, stream);
            }
            let served = served.ok_or(OutOfMemory)?;
            if served.reserved_bytes > 0 && self.setup.memory == Memory::Caching {
                device.call(self.machine, served.reserved_bytes);
            }
            device.allocated += bytes;
            if stream == GATHER {
                device.gathered += bytes;
            }
            device.most_gathered = device.most_gathered.max(device.gathered);
            device.most_allocated = device.most_allocated.max(device.allocated);
            device.most_reserved = device.most_reserved.max(device.cache.reserved_bytes());
            at.push(served.address);
        }
        if let Some(log) = &mut self.log {
            log.open(bytes, stream, at.first().copied());
        }
        Ok(Tensor { at, bytes })
    }

    /// Frees a tensor that only its own stream reads.
    fn free(&mut self, tensor: Tensor) {
        if let Some(log) = &mut self.log {
            log.close(tensor.at[0]);
        }
        for (device, &address) in self.devices.iter_mut().zip(&tensor.at) {
            device.free((address, tensor.bytes));
        }
    }

    /// Frees gathered weights when the compute stream has passed what was issued.
    fn reshard(&mut self, weights: Tensor) {
        if let Some(log) = &mut self.log {
            log.close(weights.at[0]);
        }
        for (device, &address) in self.devices.iter_mut().zip(&weights.at) {
            device.waiting.push(Waiting {
                until: device.compute,
                tensor: (address, weights.bytes),
                is_gathered: true,
            });
            device.passes.push_back(device.compute);
        }
    }

    /// Issues a kernel, or several, on each device.
    fn compute(&mut self, seconds: f64, host: f64) {
        let noise = self.machine.noise;
        for device in &mut self.devices {
            device.host += host * (1.0 + noise * device.random.unit());
            let seconds = seconds * (1.0 + noise * device.random.unit());
            device.compute = device.compute.max(device.host) + seconds;
        }
    }

    /// Issues a collective on `bytes` that starts when each device has issued it, and has computed
    /// what it reads if it reads something computed. Returns its end.
    fn collective(&mut self, bytes: u64, after_compute: bool) -> f64 {
        let n = self.setup.devices as f64;
        for device in &mut self.devices {
            device.host += self.machine.host_collective;
            self.link = self.link.max(device.host);
            if after_compute {
                self.link = self.link.max(device.compute);
            }
        }
        self.link += bytes as f64 * (n - 1.0) / n / self.machine.collective;
        self.link
    }

    /// Gathers a unit's weights in half precision. Returns them, and when they are complete.
    fn gather(&mut self, unit: usize) -> Result<(Tensor, f64), OutOfMemory> {
        for device in &mut self.devices {
            if !self.setup.limit_gathers || device.passes.len() < 2 {
                continue;
            }
            let pass = device.passes.pop_front().unwrap_or(0.0);
            match self.setup.memory {
                Memory::Caching => device.host = device.host.max(pass),
                // The device waits for the bytes, and the host goes on.
                Memory::Planned => self.link = self.link.max(pass),
            }
        }
        let bytes = HALF * self.unit(unit);
        let weights = self.alloc(bytes, GATHER)?;
        Ok((weights, self.collective(bytes, false)))
    }

    /// The compute stream waits.
    fn wait(&mut self, until: f64) {
        for device in &mut self.devices {
            device.compute = device.compute.max(until);
        }
    }

    /// Seconds of half a layer's forward: products, and attention's two products of a causal mask.
    fn half_layer(&self) -> f64 {
        let (t, model) = (self.machine.tokens, self.setup.model);
        let products = 2 * t * model.layer() + 2 * t * t * model.width;
        products as f64 / self.machine.flops / 2.0
    }

    /// One step: forward, backward, updates. The host reads the loss at the end.
    fn step(&mut self) -> Result<(), OutOfMemory> {
        let root = self.setup.model.layers;
        let (root_weights, ready) = self.gather(root)?;
        self.wait(ready);
        let mut x = self.alloc(self.rows(self.setup.model.width), COMPUTE)?;
        let mut layers = vec![];
        for unit in 0..root {
            let (weights, ready) = self.gather(unit)?;
            self.wait(ready);
            let (layer, result) = self.forward(x)?;
            self.reshard(weights);
            layers.push(layer);
            x = result;
        }
        let head = self.alloc(HALF * self.setup.model.words(), COMPUTE)?;
        let mut dx = self.head(x)?;
        let mut shards: Vec<Option<Tensor>> = (0..=root).map(|_| None).collect();
        let mut next = Some(self.gather(root - 1)?);
        // A unit whose gradients are scattered, and when they are: its update is the next.
        let mut scattered: Option<(usize, f64)> = None;
        for unit in (0..root).rev() {
            let (weights, ready) = next.take().expect("the unit should be gathered");
            if self.setup.prefetch == Prefetch::Pre && unit > 0 {
                next = Some(self.gather(unit - 1)?);
            }
            self.wait(ready);
            let layer = layers.pop().expect("each layer should have a forward");
            let (result, gradients) = self.backward(layer, dx)?;
            dx = result;
            self.reshard(weights);
            if self.setup.prefetch == Prefetch::Post && unit > 0 {
                next = Some(self.gather(unit - 1)?);
            }
            let end = self.scatter(unit, gradients, &mut shards)?;
            if self.setup.in_backward {
                self.update_scattered(scattered.replace((unit, end)), &mut shards)?;
            }
        }
        self.free(dx);
        self.finish(root_weights, head, scattered, shards)
    }

    /// The gradients of the root, and the updates that are left.
    fn finish(
        &mut self,
        root_weights: Tensor,
        head: Tensor,
        scattered: Option<(usize, f64)>,
        mut shards: Vec<Option<Tensor>>,
    ) -> Result<(), OutOfMemory> {
        let root = self.setup.model.layers;
        let words = self.alloc(head.bytes, COMPUTE)?;
        let gradients = self.alloc(2 * head.bytes, COMPUTE)?;
        self.compute(0.0, self.machine.host_half_layer);
        self.free(words);
        self.free(head);
        self.reshard(root_weights);
        let end = self.scatter(root, gradients, &mut shards)?;
        self.update_scattered(scattered, &mut shards)?;
        self.wait(end);
        if self.setup.foreach {
            self.update_all(&mut shards)?;
        } else {
            for unit in 0..=root {
                self.update(unit, &mut shards)?;
            }
        }
        for device in &mut self.devices {
            device.host = device.host.max(device.compute).max(self.link);
            device.settle(device.host);
            device.passes.clear();
        }
        Ok(())
    }

    /// A layer's forward. Returns what it keeps, and its result.
    fn forward(&mut self, input: Tensor) -> Result<(Layer, Tensor), OutOfMemory> {
        let Model { width, hidden, .. } = self.setup.model;
        let (narrow, wide) = (self.rows(width), self.rows(hidden));
        let norm = self.alloc(narrow, COMPUTE)?;
        let joint = self.alloc(3 * narrow, COMPUTE)?;
        let qkv = [
            self.alloc(narrow, COMPUTE)?,
            self.alloc(narrow, COMPUTE)?,
            self.alloc(narrow, COMPUTE)?,
        ];
        self.free(joint);
        let attention = self.alloc(narrow, COMPUTE)?;
        let projected = self.alloc(narrow, COMPUTE)?;
        let middle = self.alloc(narrow, COMPUTE)?;
        self.free(projected);
        self.compute(self.half_layer(), self.machine.host_half_layer);
        let second_norm = self.alloc(narrow, COMPUTE)?;
        let gate = self.alloc(wide, COMPUTE)?;
        let silu = self.alloc(wide, COMPUTE)?;
        let up = self.alloc(wide, COMPUTE)?;
        let product = self.alloc(wide, COMPUTE)?;
        let down = self.alloc(narrow, COMPUTE)?;
        let result = self.alloc(narrow, COMPUTE)?;
        self.free(down);
        self.compute(self.half_layer(), self.machine.host_half_layer);
        let layer = Layer {
            input,
            norm,
            qkv,
            attention,
            middle,
            second_norm,
            gate,
            up,
            silu,
            product,
        };
        Ok((layer, result))
    }

    /// The head, the loss, and their backward. Returns the gradient of the last layer's result.
    fn head(&mut self, x: Tensor) -> Result<Tensor, OutOfMemory> {
        let logits = self.rows(VOCABULARY);
        let flops = 6.0 * self.machine.tokens as f64 * self.setup.model.words() as f64;
        let norm = self.alloc(self.rows(self.setup.model.width), COMPUTE)?;
        let half = self.alloc(logits, COMPUTE)?;
        let full = self.alloc(2 * logits, COMPUTE)?;
        let softmax = self.alloc(2 * logits, COMPUTE)?;
        let d_softmax = self.alloc(2 * logits, COMPUTE)?;
        let d_full = self.alloc(2 * logits, COMPUTE)?;
        self.free(d_softmax);
        self.free(softmax);
        self.free(full);
        let d_half = self.alloc(logits, COMPUTE)?;
        self.free(d_full);
        self.free(half);
        let dx = self.alloc(self.rows(self.setup.model.width), COMPUTE)?;
        self.free(d_half);
        self.free(norm);
        self.free(x);
        self.compute(flops / self.machine.flops, self.machine.host_half_layer);
        Ok(dx)
    }

    /// A layer's backward. Returns the gradients of its input and of its weights.
    fn backward(&mut self, layer: Layer, dy: Tensor) -> Result<(Tensor, Tensor), OutOfMemory> {
        let Model { width, hidden, .. } = self.setup.model;
        let (narrow, wide) = (self.rows(width), self.rows(hidden));
        let matrix = HALF * width * hidden;
        let square = HALF * width * width;

        let d_product = self.alloc(wide, COMPUTE)?;
        let w_down = self.alloc(matrix, COMPUTE)?;
        self.free(layer.product);
        let d_up = self.alloc(wide, COMPUTE)?;
        let d_silu = self.alloc(wide, COMPUTE)?;
        self.free(d_product);
        self.free(layer.up);
        self.free(layer.silu);
        let w_up = self.alloc(matrix, COMPUTE)?;
        let d_norm = self.alloc(narrow, COMPUTE)?;
        self.free(d_up);
        let d_gate = self.alloc(wide, COMPUTE)?;
        self.free(d_silu);
        self.free(layer.gate);
        let w_gate = self.alloc(matrix, COMPUTE)?;
        let d_more = self.alloc(narrow, COMPUTE)?;
        self.free(d_gate);
        self.free(layer.second_norm);
        self.free(d_more);
        let d_middle = self.alloc(narrow, COMPUTE)?;
        self.free(d_norm);
        self.free(layer.middle);
        self.free(dy);
        self.compute(2.0 * self.half_layer(), 2.0 * self.machine.host_half_layer);

        let w_out = self.alloc(square, COMPUTE)?;
        let d_attention = self.alloc(narrow, COMPUTE)?;
        let parts = [
            self.alloc(narrow, COMPUTE)?,
            self.alloc(narrow, COMPUTE)?,
            self.alloc(narrow, COMPUTE)?,
        ];
        self.free(d_attention);
        self.free(layer.attention);
        layer.qkv.into_iter().for_each(|part| self.free(part));
        let joint = self.alloc(3 * narrow, COMPUTE)?;
        parts.into_iter().for_each(|part| self.free(part));
        let w_qkv = self.alloc(3 * square, COMPUTE)?;
        let d_norm = self.alloc(narrow, COMPUTE)?;
        self.free(joint);
        self.free(layer.norm);
        let dx = self.alloc(narrow, COMPUTE)?;
        self.free(d_norm);
        self.free(layer.input);
        self.free(d_middle);
        self.compute(2.0 * self.half_layer(), 2.0 * self.machine.host_half_layer);

        // The gradients of the matrices are joined to one of the unit.
        let gradients = self.alloc(HALF * self.setup.model.layer(), COMPUTE)?;
        for part in [w_down, w_up, w_gate, w_out, w_qkv] {
            self.free(part);
        }
        Ok((dx, gradients))
    }

    /// Scatters the sum of a unit's gradients. Each device's share is then in f32. Returns when it
    /// is complete.
    fn scatter(
        &mut self,
        unit: usize,
        gradients: Tensor,
        shards: &mut [Option<Tensor>],
    ) -> Result<f64, OutOfMemory> {
        let half = self.alloc(self.shard(unit) / 2, SCATTER)?;
        let end = self.collective(gradients.bytes, true);
        let full = self.alloc(self.shard(unit), SCATTER)?;
        self.free(half);
        if let Some(log) = &mut self.log
            && let Some(before) = log.scattering.replace(gradients.at[0])
        {
            log.close(before);
        }
        for (device, &address) in self.devices.iter_mut().zip(&gradients.at) {
            device.waiting.push(Waiting {
                until: end,
                tensor: (address, gradients.bytes),
                is_gathered: false,
            });
        }
        shards[unit] = Some(full);
        Ok(end)
    }

    fn update_scattered(
        &mut self,
        scattered: Option<(usize, f64)>,
        shards: &mut [Option<Tensor>],
    ) -> Result<(), OutOfMemory> {
        if let Some((unit, end)) = scattered {
            self.wait(end);
            self.update(unit, shards)?;
        }
        Ok(())
    }

    /// Moments of a unit, which are made before its first update.
    fn make_moments(&mut self, unit: usize) -> Result<(), OutOfMemory> {
        if self.moments[unit].is_none() {
            let bytes = self.shard(unit);
            self.moments[unit] = Some([self.alloc(bytes, COMPUTE)?, self.alloc(bytes, COMPUTE)?]);
        }
        Ok(())
    }

    fn seconds_of_update(&self, unit: usize) -> f64 {
        self.unit(unit) as f64 / self.setup.devices as f64 / self.machine.updates
    }

    /// AdamW on one unit, if its gradient exists: two temporaries.
    fn update(&mut self, unit: usize, shards: &mut [Option<Tensor>]) -> Result<(), OutOfMemory> {
        let Some(gradient) = shards[unit].take() else {
            return Ok(());
        };
        self.make_moments(unit)?;
        let root = self.alloc(gradient.bytes, COMPUTE)?;
        let quotient = self.alloc(gradient.bytes, COMPUTE)?;
        self.compute(self.seconds_of_update(unit), self.machine.host_collective);
        self.free(root);
        self.free(quotient);
        self.free(gradient);
        Ok(())
    }

    /// AdamW on all units at once: two temporaries for each.
    fn update_all(&mut self, shards: &mut [Option<Tensor>]) -> Result<(), OutOfMemory> {
        let units = 0..shards.len();
        for unit in units.clone() {
            self.make_moments(unit)?;
        }
        let mut temporaries = vec![];
        for _ in 0..2 {
            for unit in units.clone() {
                temporaries.push(self.alloc(self.shard(unit), COMPUTE)?);
            }
        }
        let seconds = units.map(|unit| self.seconds_of_update(unit)).sum();
        self.compute(seconds, self.machine.host_collective);
        for tensor in temporaries {
            self.free(tensor);
        }
        for shard in shards.iter_mut().filter_map(Option::take) {
            self.free(shard);
        }
        Ok(())
    }
}
