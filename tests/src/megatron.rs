//! Traces of a rank's allocations in a training step of a Megatron-like pipeline, to compare
//! address planners: the configurations of STAlloc's section 9 (1F1B and virtual pipelines,
//! recomputation, ZeRO, offloading, mixtures of experts).
//!
//! Sizes are those of a transformer's tensors in bf16 with main gradients and optimizer states in
//! f32; attention keeps no scores (flash). Every request and free has its own tick, so the trace
//! has the program's order.

use placement::trace::{Block, Origin, Span, Trace};

/// A rank's work.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Layers of the whole model.
    pub layers: usize,
    /// Width of the residual stream, elements.
    pub width: u64,
    /// Width between the two products of a feed-forward part, elements.
    pub hidden: u64,
    /// Entries of the vocabulary.
    pub vocabulary: u64,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Sequences of a micro-batch.
    pub batch: u64,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Pipeline stages.
    pub stages: usize,
    /// This rank's stage, from 0.
    pub rank: usize,
    /// The number of parts of the model on each rank: 1 is 1F1B.
    pub virtual_stages: usize,
    /// Layers keep their input and run again in the backward.
    pub recompute: bool,
    /// Ranks over which gradients' and optimizer's states are divided: 1 is none (ZeRO).
    pub zero: u64,
    /// Results of a forward go to the host and come back for the backward; the optimizer's states
    /// stay on the host, and updates run there (ZeRO-Offload).
    pub offload: bool,
    /// Experts of each feed-forward part; 0: none. A token goes to `top` of them.
    pub experts: usize,
    /// Experts that a token goes to.
    pub top: u64,
    /// The seed of the routing.
    pub seed: u64,
}

impl Setup {
    /// GPT-2 of 345 million parameters on 8 devices, 4 stages.
    pub fn gpt2() -> Setup {
        Setup {
            layers: 24,
            width: 1024,
            hidden: 4096,
            batch: 32,
            ..Setup::llama2()
        }
        .with_sequence(1024)
    }
    /// Llama2-7B on 8 devices, 4 stages.
    pub fn llama2() -> Setup {
        Setup {
            layers: 32,
            width: 4096,
            hidden: 11008,
            vocabulary: 32000,
            sequence: 4096,
            batch: 4,
            micro_batches: 16,
            stages: 4,
            rank: 0,
            virtual_stages: 1,
            recompute: false,
            zero: 1,
            offload: false,
            experts: 0,
            top: 0,
            seed: 0,
        }
    }
    /// Qwen1.5-MoE-A2.7B on 8 devices, 4 stages.
    pub fn qwen_moe() -> Setup {
        Setup {
            layers: 24,
            width: 2048,
            hidden: 1408,
            batch: 8,
            experts: 60,
            top: 4,
            ..Setup::llama2()
        }
        .with_sequence(2048)
    }
    fn with_sequence(self, sequence: u64) -> Setup {
        Setup { sequence, ..self }
    }

    /// The trace of one step.
    pub fn trace(&self) -> Trace {
        let mut writer = Writer {
            setup: self,
            clock: 0,
            trace: Trace::default(),
            phase: 0,
            module: 0,
            draws: self.seed,
        };
        writer.trace.phases.push(Span::default());
        writer.trace.modules.push(Span::default());
        writer.step();
        writer.trace
    }
}

/// Bytes of an element of bf16 and of f32.
const HALF: u64 = 2;
const FULL: u64 = 4;

struct Writer<'a> {
    setup: &'a Setup,
    clock: u64,
    trace: Trace,
    phase: u32,
    module: u32,
    draws: u64,
}

/// A live block.
type Live = usize;

/// The blocks that a layer's forward leaves for its backward: its input, and kept blocks, the
/// latest last.
struct Saved {
    input: Tensor,
    kept: Vec<Tensor>,
}

/// A tensor that is on the device, or on the host.
#[derive(Clone, Copy)]
enum Tensor {
    Here(Live),
    Away { bytes: u64, dynamic: bool },
}

impl Writer<'_> {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn get(&mut self, bytes: u64, dynamic: bool) -> Live {
        let start = self.tick();
        let origin = Origin {
            phases: (self.phase, 0),
            modules: (self.module, 0),
            stream: 0,
            dynamic,
        };
        let id = self.trace.blocks.len().to_string();
        self.trace.blocks.push(Block {
            id,
            start,
            end: u64::MAX,
            bytes: bytes.max(1),
            origin,
            ..Block::default()
        });
        self.trace.blocks.len() - 1
    }

    fn free(&mut self, block: Live) {
        let end = self.tick();
        let (phase, module) = (self.phase, self.module);
        let block = &mut self.trace.blocks[block];
        block.end = end;
        block.origin.phases.1 = phase;
        block.origin.modules.1 = module;
    }

    fn bytes(&self, block: Live) -> u64 {
        self.trace.blocks[block].bytes
    }

    fn begin_phase(&mut self, name: String) {
        let start = self.tick();
        self.trace.phases.push(Span {
            name,
            start,
            end: u64::MAX,
        });
        self.phase = self.trace.phases.len() as u32 - 1;
    }
    fn end_phase(&mut self) {
        self.trace.phases[self.phase as usize].end = self.tick();
        self.phase = 0;
    }
    fn begin_module(&mut self, name: String) {
        let start = self.tick();
        self.trace.modules.push(Span {
            name,
            start,
            end: u64::MAX,
        });
        self.module = self.trace.modules.len() as u32 - 1;
    }
    fn end_module(&mut self) {
        self.trace.modules[self.module as usize].end = self.tick();
        self.module = 0;
    }

    fn step(&mut self) {
        let Setup {
            layers,
            width,
            hidden,
            vocabulary,
            micro_batches,
            stages,
            rank,
            virtual_stages,
            zero,
            ..
        } = *self.setup;
        let own = layers / stages;
        // Weights in bf16, gradients in f32, and the optimizer's three f32; they exist for the
        // whole step.
        let mut sizes = vec![];
        for _ in 0..own {
            let n_experts = self.setup.experts.max(1) as u64;
            sizes.extend([width, width, 3 * width * width, width * width, width]);
            sizes.extend([2 * hidden * width * n_experts, hidden * width * n_experts]);
        }
        if rank == 0 || rank + 1 == stages {
            sizes.push(vocabulary * width);
        }
        let mut persistent = vec![];
        for &n in &sizes {
            persistent.push(self.get(n * HALF, false));
            persistent.push(self.get(n * FULL / zero, false));
        }
        for &n in sizes.iter().filter(|_| !self.setup.offload) {
            for _ in 0..3 {
                persistent.push(self.get(n * FULL / zero, false));
            }
        }
        let total = micro_batches * virtual_stages;
        let warm_up = match virtual_stages {
            1 => stages - rank - 1,
            _ => 2 * (stages - rank - 1) + (virtual_stages - 1) * stages,
        };
        let mut waiting = std::collections::VecDeque::new();
        let (mut forwards, mut backwards) = (0, 0);
        while backwards < total {
            if forwards < total && forwards < warm_up + backwards + 1 {
                waiting.push_back(self.forward(forwards, own / virtual_stages));
                forwards += 1;
            } else {
                let saved = waiting
                    .pop_front()
                    .expect("a backward should have a forward");
                self.backward(backwards, saved);
                backwards += 1;
            }
        }
        self.begin_phase("optimizer".into());
        // The block that is being copied to the host while the next one is prepared.
        let mut leaving: Option<Live> = None;
        for &n in &sizes {
            // The update's temporaries; with updates on the host, the gradient that goes there and
            // the weight that comes back.
            let (a, b) = match self.setup.offload {
                false => (
                    self.get(n * FULL / zero, false),
                    self.get(n * FULL / zero, false),
                ),
                true => {
                    let gradient = self.get(n * FULL / zero, false);
                    (
                        self.get(n * HALF / zero, false),
                        leaving.replace(gradient).unwrap_or(gradient),
                    )
                }
            };
            // With ZeRO the weight is gathered.
            let gathered = (1 < zero).then(|| self.get(n * HALF, false));
            gathered.into_iter().for_each(|block| self.free(block));
            self.free(a);
            if leaving != Some(b) {
                self.free(b);
            }
        }
        leaving.into_iter().for_each(|block| self.free(block));
        self.end_phase();
        persistent.into_iter().for_each(|block| self.free(block));
    }

    /// Bytes of the residual stream.
    fn stream(&self) -> u64 {
        self.setup.sequence * self.setup.batch * self.setup.width * HALF
    }

    fn forward(&mut self, number: usize, layers: usize) -> (Vec<Saved>, Live) {
        self.begin_phase(format!("fwd.{number}"));
        let mut x = self.get(self.stream(), false);
        let mut saved = vec![];
        // Blocks that go to the host while the next layer runs.
        let mut leaving: Vec<Live> = vec![];
        for layer in 0..layers {
            let (mut kept, y) = self.layer(layer);
            if self.setup.recompute {
                kept.drain(..).rev().for_each(|block| self.free(block));
            }
            if self.setup.offload {
                leaving.drain(..).for_each(|block| self.free(block));
                leaving.extend(std::iter::once(x).chain(kept.iter().copied()));
            }
            saved.push(Saved {
                input: self.left(x),
                kept: kept.into_iter().map(|block| self.left(block)).collect(),
            });
            x = y;
        }
        leaving.into_iter().for_each(|block| self.free(block));
        self.end_phase();
        (saved, x)
    }

    /// A block that a forward leaves, on the device or on the host.
    fn left(&self, block: Live) -> Tensor {
        let dynamic = self.trace.blocks[block].origin.dynamic;
        if self.setup.offload {
            Tensor::Away {
                bytes: self.bytes(block),
                dynamic,
            }
        } else {
            Tensor::Here(block)
        }
    }

    /// Copies the blocks of a layer's forward to the device.
    fn fetch(&mut self, Saved { input, kept }: Saved) -> (Live, Vec<Live>) {
        let mut here = |tensor| match tensor {
            Tensor::Here(block) => block,
            Tensor::Away { bytes, dynamic } => self.get(bytes, dynamic),
        };
        (here(input), kept.into_iter().map(here).collect())
    }

    fn backward(&mut self, number: usize, (mut saved, output): (Vec<Saved>, Live)) {
        self.begin_phase(format!("bwd.{number}"));
        let mut gradient = self.get(self.stream(), false);
        self.free(output);
        let mut next = saved.pop().map(|last| self.fetch(last));
        while let Some((input, mut kept)) = next {
            let layer = saved.len();
            // The blocks of the layer below are copied while this one runs.
            next = saved.pop().map(|below| self.fetch(below));
            if self.setup.recompute {
                let (again, y) = self.layer(layer);
                self.free(y);
                kept = again;
            }
            self.begin_module(format!("layers.{layer}.backward"));
            let of_input = self.get(self.stream(), false);
            while let Some(block) = kept.pop() {
                let dynamic = self.trace.blocks[block].origin.dynamic;
                let of_block = self.get(self.bytes(block), dynamic);
                let of_weight = self.get(self.setup.width * 1024, false);
                self.free(block);
                self.free(of_weight);
                self.free(of_block);
            }
            self.free(gradient);
            self.free(input);
            gradient = of_input;
            self.end_module();
        }
        self.free(gradient);
        self.end_phase();
    }

    /// A layer's forward: the kept blocks, and its result.
    fn layer(&mut self, layer: usize) -> (Vec<Live>, Live) {
        self.begin_module(format!("layers.{layer}"));
        let (stream, tokens) = (self.stream(), self.setup.sequence * self.setup.batch);
        let heads = self.setup.width / 128;
        let mut kept = vec![];
        let normed = self.get(stream, false);
        kept.extend([tokens * FULL, tokens * FULL].map(|bytes| self.get(bytes, false)));
        let qkv = self.get(3 * stream, false);
        self.free(normed);
        let parts = [stream; 3].map(|bytes| self.get(bytes, false));
        self.free(qkv);
        kept.extend([stream, tokens * heads * FULL].map(|bytes| self.get(bytes, false)));
        let workspace = self.get(tokens * heads * 64, false);
        self.free(workspace);
        kept.extend(parts);
        let projected = self.get(stream, false);
        let residual = self.get(stream, false);
        self.free(projected);
        let normed = self.get(stream, false);
        let statistics = self.get(tokens * FULL, false);
        kept.extend([residual, normed, statistics]);
        let out = if self.setup.experts == 0 {
            self.feed_forward(tokens, &mut kept)
        } else {
            self.mixture(tokens, layer, &mut kept)
        };
        let y = self.get(stream, false);
        self.free(out);
        self.end_module();
        (kept, y)
    }

    fn feed_forward(&mut self, tokens: u64, kept: &mut Vec<Live>) -> Live {
        let hidden = tokens * self.setup.hidden * HALF;
        kept.extend([2 * hidden, hidden].map(|bytes| self.get(bytes, false)));
        self.get(self.stream(), false)
    }

    fn mixture(&mut self, tokens: u64, layer: usize, kept: &mut Vec<Live>) -> Live {
        let Setup {
            experts,
            top,
            width,
            hidden,
            ..
        } = *self.setup;
        let scores = [tokens * experts as u64 * FULL; 2].map(|bytes| self.get(bytes, false));
        self.free(scores[0]);
        let permuted = self.get(self.stream() * top, false);
        kept.extend([scores[1], permuted]);
        self.end_module();
        self.begin_module(format!("layers.{layer}.experts"));
        let mut results = vec![];
        let mut sum = 0;
        for _ in 0..experts {
            let n = self.routed(tokens * top / experts as u64);
            sum += n;
            let [inner, product] =
                [2 * n * hidden * HALF, n * hidden * HALF].map(|bytes| self.get(bytes, true));
            kept.extend([inner, product]);
            results.push(self.get(n * width * HALF, true));
        }
        let joined = self.get(sum * width * HALF, true);
        results.into_iter().for_each(|block| self.free(block));
        self.end_module();
        self.begin_module(format!("layers.{layer}.combine"));
        let out = self.get(self.stream(), false);
        self.free(joined);
        out
    }

    /// The tokens of an expert: between half and one and a half times the mean.
    fn routed(&mut self, mean: u64) -> u64 {
        // SplitMix64.
        self.draws = self.draws.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.draws;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mean / 2 + (z ^ (z >> 31)) % (mean + 1)).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use placement::lower_bound;

    #[test]
    fn every_block_is_freed_and_every_tick_is_used_once() {
        for setup in [
            Setup {
                micro_batches: 6,
                ..Setup::gpt2()
            },
            Setup {
                micro_batches: 6,
                virtual_stages: 2,
                recompute: true,
                ..Setup::gpt2()
            },
            Setup {
                micro_batches: 4,
                zero: 2,
                offload: true,
                ..Setup::qwen_moe()
            },
            Setup {
                micro_batches: 4,
                zero: 2,
                offload: true,
                recompute: true,
                ..Setup::gpt2()
            },
        ] {
            let trace = setup.trace();
            let mut ticks: Vec<u64> = trace
                .blocks
                .iter()
                .flat_map(|block| [block.start, block.end])
                .collect();
            ticks.extend(
                trace
                    .phases
                    .iter()
                    .chain(&trace.modules)
                    .skip(1)
                    .flat_map(|span| [span.start, span.end]),
            );
            ticks.retain(|&tick| tick != 0);
            let n = ticks.len();
            ticks.sort_unstable();
            ticks.dedup();
            assert_eq!(ticks.len(), n);
            assert!(
                trace
                    .blocks
                    .iter()
                    .all(|block| block.start < block.end && block.end < u64::MAX)
            );
        }
    }

    /// Recomputation, ZeRO and offloading take less memory, virtual stages more.
    #[test]
    fn optimizations_do_what_they_are_for() {
        let base = Setup {
            micro_batches: 8,
            ..Setup::gpt2()
        };
        let peak = |setup: Setup| lower_bound(&setup.trace(), 1);
        assert!(
            peak(Setup {
                recompute: true,
                ..base.clone()
            }) < peak(base.clone())
        );
        assert!(
            peak(Setup {
                zero: 2,
                ..base.clone()
            }) < peak(base.clone())
        );
        for recompute in [false, true] {
            let kept = Setup {
                recompute,
                zero: 2,
                ..base.clone()
            };
            assert!(
                peak(Setup {
                    offload: true,
                    ..kept.clone()
                }) < peak(kept)
            );
        }
        assert!(
            peak(base.clone())
                < peak(Setup {
                    virtual_stages: 2,
                    ..base.clone()
                })
        );
    }
}
