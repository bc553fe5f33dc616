//! The models and machines of ProTrain's evaluation (section 5.1, tables 1, 2 and 4) as instances
//! for its search.
//!
//! The paper gives links and memories. It does not print its measured rates, so these are assumed:
//! products at 77 % (RTX 3090, FP16 with FP32 accumulation at 71 TFLOP/s) and 48 % (A100, 312
//! TFLOP/s) of the peak, PCIe at 66 and 79 % of its nominal bandwidth, collectives over PCIe
//! through the host at 5 GB/s, Adam at 30 bytes a parameter at the limit of the memory bandwidth,
//! also on the host. 93 % of the host's memory is for states: the rest is the system's and the
//! program's.
//! `tests/data/protrain` has a device file for each machine.

use papers::blocks_search::Choice;
use papers::protrain::{BlockCost, ChunkCost, Instance};
use passes::decide::chunks::{self, Packing};

/// A GPT-2: hidden size, blocks, heads; sequences of 1024 tokens, a vocabulary of 50257.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names are the documentation")]
pub struct Model {
    pub hidden: u64,
    pub blocks: usize,
    pub heads: u64,
}

/// GPT-2 with 1 billion parameters.
pub const GPT2_1B: Model = Model {
    hidden: 1600,
    blocks: 32,
    heads: 16,
};
/// GPT-2 with 10 billion parameters.
pub const GPT2_10B: Model = Model {
    hidden: 4096,
    blocks: 48,
    heads: 32,
};

/// Tokens of a sequence.
pub const SEQUENCE: u64 = 1024;
/// Tokens that exist.
pub const VOCABULARY: u64 = 50257;

impl Model {
    /// Parameters of embeddings, and of one block's matrices.
    fn parameters(&self) -> (u64, u64) {
        (
            (VOCABULARY + SEQUENCE) * self.hidden,
            12 * self.hidden * self.hidden + 13 * self.hidden,
        )
    }
    /// All parameters.
    pub fn total(&self) -> u64 {
        let (embeddings, block) = self.parameters();
        embeddings + self.blocks as u64 * block
    }
}

/// Several equal devices in one machine.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    /// Operations per second of one device, in products.
    pub flops: f64,
    /// Bytes per second and direction between a device and the host.
    pub link: f64,
    /// Bytes per second of collectives.
    pub collective: f64,
    /// True if collectives go over the link too.
    pub shared_link: bool,
    /// Bytes of each device's memory.
    pub device_bytes: u64,
    /// Bytes of the host's memory.
    pub host_bytes: u64,
    /// Bytes per second between a device and its memory, for elementwise kernels.
    pub memory_bandwidth: f64,
    /// Parameters that one device updates in a second.
    pub update_device: f64,
    /// Parameters that the host updates in a second, for all devices.
    pub update_host: f64,
}

/// RTX 3090: 24 GiB, PCIe 3 at 15.8 GB/s, no NVLink; host with 384 GiB.
pub const RTX3090: Machine = Machine {
    flops: 55e12,
    link: 10.5e9,
    collective: 5e9,
    shared_link: true,
    device_bytes: 24 << 30,
    host_bytes: (384 << 30) / 100 * 93,
    memory_bandwidth: 7.5e11,
    update_device: 2.5e10,
    update_host: 3e9,
};
/// A100: 80 GiB, PCIe 4 at 31.5 GB/s, NVLink at 300 GB/s; host with 1 TB.
pub const A100: Machine = Machine {
    flops: 150e12,
    link: 25e9,
    collective: 200e9,
    shared_link: false,
    device_bytes: 80 << 30,
    host_bytes: 930_000_000_000,
    memory_bandwidth: 1.5e12,
    update_device: 5e10,
    update_host: 1.2e10,
};

/// The chunks of a model in bf16: embeddings, blocks, final norm.
pub fn packing(model: &Model) -> Packing {
    let (embeddings, block) = model.parameters();
    let mut sizes = vec![vec![2 * embeddings]];
    sizes.extend(vec![vec![2 * block]; model.blocks]);
    sizes.push(vec![4 * model.hidden]);
    chunks::grid_search(&sizes, chunks::RANGE).expect("a model should have parameters")
}

/// The work of a device in a step of `batch` sequences on `world` devices. Mixed precision: 2 bytes
/// of parameter, 2 of gradient, 12 of master copy and moments, the latter divided among the devices
/// also for persistent chunks; the host holds the 12 bytes. Activations are those of Korthikanti et
/// al.: `sbh (34 + 5 as / h)` bytes a block; the logits take 8 bytes each: 2, a shifted copy of 2,
/// and 4 in f32. `alpha` is 1, because the paper does not state its own.
pub fn instance(model: &Model, machine: &Machine, batch: u64, world: u64) -> Instance {
    instance_of_length(model, machine, batch, world, SEQUENCE)
}

/// [`instance`] with sequences of another length.
pub fn instance_of_length(
    model: &Model,
    machine: &Machine,
    batch: u64,
    world: u64,
    sequence: u64,
) -> Instance {
    let &Model {
        hidden: h,
        blocks,
        heads,
    } = model;
    let tokens = (batch.div_ceil(world) * sequence) as f64;
    let (hf, wf) = (h as f64, world as f64);
    let scores = sequence as f64 / (6.0 * hf);
    let forward = 1e6 * 24.0 * tokens * hf * hf * (1.0 + scores) / machine.flops;
    let activation = tokens * hf * (34.0 + 5.0 * (heads * sequence) as f64 / hf);
    let head = 1e6 * 2.0 * tokens * hf * VOCABULARY as f64 / machine.flops;
    let swap = 1e6 * activation / machine.link;
    let packing = packing(model);
    let chunk_of: Vec<usize> = packing
        .chunk_of(blocks + 2)
        .into_iter()
        .map(|c| c.expect("every part has some"))
        .collect();
    let block = |i: usize| BlockCost {
        repeated: true,
        chunk: chunk_of[i],
        forward,
        backward: 2.0 * forward,
        recompute: forward,
        activation: activation as u64,
        input: (2.0 * tokens * hf) as u64,
        transient: 0,
        swap_out: swap,
        swap_in: swap,
    };
    let mut costs = vec![BlockCost {
        chunk: chunk_of[0],
        ..BlockCost::default()
    }];
    costs.extend((1..=blocks).map(block));
    costs.push(BlockCost {
        chunk: chunk_of[blocks + 1],
        forward: head,
        backward: 2.0 * head,
        activation: (8.0 * tokens * VOCABULARY as f64) as u64,
        ..BlockCost::default()
    });
    let chunks = packing.chunks.iter().map(|chunk| {
        let parameters = chunk.bytes as f64 / 2.0;
        let shard = 1e6 * chunk.bytes as f64 / wf / machine.link;
        let collective = 1e6 * chunk.bytes as f64 * (wf - 1.0) / wf / machine.collective;
        ChunkCost {
            upload: shard,
            offload: shard,
            gather: collective,
            reduce: collective,
            update_device: 1e6 * parameters / wf / machine.update_device,
            update_host: 1e6 * parameters / machine.update_host,
            persistent_bytes: (parameters * (4.0 + 12.0 / wf)) as u64,
            host_bytes: 12 * chunk.bytes / 2,
            buffer_bytes: packing.capacity,
            tied_bytes: 0,
            // The paper does not say where gradients wait.
            waiting_bytes: 0,
        }
    });
    Instance {
        blocks: costs,
        chunks: chunks.collect(),
        base: 0,
        capacity: machine.device_bytes,
        host_capacity: Some(machine.host_bytes),
        shared_link: machine.shared_link,
        gradients_by_chunk: true,
        alpha: 1.0,
    }
}

/// Ways to keep each block of [`instance`]: all of it; without attention's scores, `34 sbh`; also
/// without GeLU's and the norms' results, `22 sbh`, at the cost of their memory traffic; only its
/// input.
pub fn choices(model: &Model, machine: &Machine, batch: u64, world: u64) -> Vec<Vec<Choice>> {
    let tokens_width = (batch.div_ceil(world) * SEQUENCE * model.hidden) as f64;
    let scores = SEQUENCE as f64 / (6.0 * model.hidden as f64);
    let of_block = |block: &BlockCost| {
        let keep = Choice {
            held: block.activation,
            extra: 0.0,
        };
        if !block.repeated {
            return vec![keep];
        }
        let attention = block.forward * scores / (1.0 + scores);
        let traffic = 1e6 * 3.0 * 12.0 * tokens_width / machine.memory_bandwidth;
        vec![
            keep,
            Choice {
                held: (34.0 * tokens_width) as u64,
                extra: attention,
            },
            Choice {
                held: (22.0 * tokens_width) as u64,
                extra: attention + traffic,
            },
            Choice {
                held: block.input,
                extra: block.forward,
            },
        ]
    };
    instance(model, machine, batch, world)
        .blocks
        .iter()
        .map(of_block)
        .collect()
}
