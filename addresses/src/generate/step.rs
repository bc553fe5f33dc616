//! The steps of a rank: the weights and states, the schedule of micro-batches (1F1B, or the
//! interleaved one of a virtual pipeline), the ends of the pipeline, and the optimizer.

use super::layer::{Kept, Part, Rank};
use super::setup::{Error, Setup};
use super::writer::{Live, Writer, draw};
use super::{FULL, HALF};
use placement::trace::Trace;
use std::collections::BTreeMap;

/// Lengths of shorter sequences are multiples of this for each rank of a product.
const LENGTHS: u64 = 64;
/// The stream of copies from the host. A block belongs to the stream that requested it.
const COPIES: u32 = 1;
/// Bytes of a number in a batch's tokens, labels and positions.
const INDEX: u64 = 8;

impl Setup {
    /// The trace of the steps. Errors: the setup makes no sense, or has too many requests.
    pub fn trace(&self) -> Result<Trace, Error> {
        self.check()?;
        let mut run = Run {
            rank: Rank {
                setup: self,
                writer: Writer::new(self.holds_collectives),
                sequence: self.sequence,
                number: 0,
            },
            step: 0,
            gathered: None,
        };
        run.all();
        Ok(run.rank.writer.finish())
    }

    /// Elements of each weight of this rank.
    fn weights(&self) -> Vec<u64> {
        let shape = &self.shape;
        let tensor = self.tensor;
        let width = shape.width;
        let queries = shape.heads / tensor * shape.head;
        let keys = (shape.key_heads / tensor).max(1) * shape.head;
        let widths = 1 + u64::from(shape.gated);
        let feed_forward = |hidden: u64, over: u64| {
            let one = hidden * width / over;
            [widths * one, one]
        };
        let mut sizes = vec![];
        for _ in 0..self.part() * self.virtual_pipeline {
            sizes.extend([width, (queries + 2 * keys) * width, queries * width, width]);
            if shape.experts == 0 {
                sizes.extend(feed_forward(shape.hidden, tensor));
                continue;
            }
            sizes.push(shape.experts as u64 * width);
            for _ in 0..self.own_experts() {
                sizes.extend(feed_forward(shape.hidden, 1));
            }
            if shape.shared > 0 {
                sizes.extend(feed_forward(shape.shared, tensor));
            }
        }
        // The first stage embeds, the last has the head; a pipeline of one stage ties them.
        if self.stage == 0 || self.is_last() {
            sizes.push(shape.vocabulary.div_ceil(tensor) * width);
        }
        sizes
    }

    fn is_last(&self) -> bool {
        self.stage + 1 == self.pipeline
    }
}

/// What the forward of one part of the model leaves.
struct Left {
    /// For each layer.
    saved: Vec<Saved>,
    /// What the head keeps.
    head: Vec<(Part, Live)>,
    /// Labels and positions.
    batch: Vec<Live>,
}

/// The blocks that a layer's forward leaves for its backward.
struct Saved {
    input: Tensor,
    kept: Vec<(Part, Tensor)>,
}

/// A tensor that is on the device, or on the host.
#[derive(Clone, Copy)]
enum Tensor {
    Here(Live),
    Away { bytes: u64, dynamic: bool },
}

/// A layer's input and kept tensors on the device.
type Fetched = (Live, Vec<(Part, Live)>);

struct Run<'a> {
    rank: Rank<'a>,
    step: usize,
    /// The buffer for tensors of all ranks of a product.
    gathered: Option<Live>,
}

impl Run<'_> {
    fn all(&mut self) {
        let setup = self.rank.setup;
        let weights = setup.weights();
        for &n in &weights {
            self.rank.writer.get(n * HALF);
        }
        // All gradients are one buffer.
        self.rank.writer.get(weights.iter().sum::<u64>() * FULL);
        let is_whole_run = setup.steps > 1;
        if !setup.offload {
            // The optimizer's copies of the weights.
            self.states(&weights, 1);
            if !is_whole_run {
                self.states(&weights, 2);
            }
        }
        if !is_whole_run {
            self.gather();
        }
        for step in 0..setup.steps {
            self.step = step;
            self.schedule();
            self.optimizer(&weights, is_whole_run && step == 0);
            self.evaluate();
        }
    }

    /// States of the optimizer in f32, `each` for each weight.
    fn states(&mut self, weights: &[u64], each: usize) {
        for &n in weights {
            for _ in 0..each {
                let bytes = n.div_ceil(self.rank.setup.zero) * FULL;
                self.rank.writer.get(bytes);
            }
        }
    }

    /// Megatron-LM keeps the buffer from its first use on.
    fn gather(&mut self) {
        if self.rank.setup.sequence_parallel && self.gathered.is_none() {
            let bytes = self.rank.whole_stream();
            self.gathered = Some(self.rank.writer.get(bytes));
        }
    }

    /// A phase's name: with several steps, the step comes first.
    fn name(&self, kind: &str, number: usize, part: usize) -> String {
        let setup = self.rank.setup;
        let step = match setup.steps {
            1 => String::new(),
            _ => format!("{}.", self.step),
        };
        match setup.virtual_pipeline {
            1 => format!("{step}{kind}.{number}"),
            _ => format!("{step}{kind}.{number}.{part}"),
        }
    }

    /// Makes a micro-batch the one that runs.
    fn begin(&mut self, kind: &str, number: usize, part: usize) {
        let setup = self.rank.setup;
        let of_run = (self.step * (setup.micro_batches + setup.evaluate) + number) as u64;
        let least = setup.sequence - setup.sequence * setup.vary / 100;
        let unit = LENGTHS * setup.tensor;
        let drawn = least + draw(&[setup.seed, of_run]) % (setup.sequence - least + 1);
        self.rank.number = of_run;
        self.rank.sequence = match setup.vary {
            0 => setup.sequence,
            _ => drawn.next_multiple_of(unit).min(setup.sequence),
        };
        let name = self.name(kind, number, part);
        self.rank.writer.begin_phase(name);
    }

    /// The micro-batch and the part of the k-th forward. In a virtual pipeline, `pipeline`
    /// micro-batches go through one part, then through the next.
    fn at(&self, k: usize) -> (usize, usize) {
        let Setup {
            pipeline,
            virtual_pipeline,
            ..
        } = *self.rank.setup;
        if virtual_pipeline == 1 {
            return (k, 0);
        }
        let (round, within) = (
            k / (pipeline * virtual_pipeline),
            k % (pipeline * virtual_pipeline),
        );
        (round * pipeline + within % pipeline, within / pipeline)
    }

    /// One step's forwards and backwards (Narayanan et al., SC 2021, section 2.2).
    fn schedule(&mut self) {
        let Setup {
            pipeline,
            stage,
            virtual_pipeline,
            micro_batches,
            ..
        } = *self.rank.setup;
        let total = micro_batches * virtual_pipeline;
        let warm_up = match virtual_pipeline {
            1 => pipeline - stage - 1,
            _ if micro_batches == pipeline => total,
            _ => 2 * (pipeline - stage - 1) + (virtual_pipeline - 1) * pipeline,
        };
        let mut waiting = BTreeMap::new();
        let (mut forwards, mut backwards) = (0, 0);
        while backwards < total {
            if forwards < total && forwards <= warm_up + backwards {
                let (number, part) = self.at(forwards);
                let left = self.forward("fwd", number, part, true);
                waiting.insert((number, part), left);
                forwards += 1;
                continue;
            }
            let (number, part) = self.at(backwards);
            let part = virtual_pipeline - 1 - part;
            let left = waiting
                .remove(&(number, part))
                .expect("a backward should have a forward");
            self.backward(number, part, left);
            backwards += 1;
        }
    }

    /// Forwards without backwards.
    fn evaluate(&mut self) {
        let setup = self.rank.setup;
        for k in 0..setup.evaluate * setup.virtual_pipeline {
            let (number, part) = self.at(k);
            // The last round may have fewer micro-batches than stages.
            let number = number.min(setup.evaluate - 1);
            self.forward("eval", setup.micro_batches + number, part, false);
        }
    }

    /// True if this rank embeds tokens in this part.
    fn embeds(&self, part: usize) -> bool {
        self.rank.setup.stage == 0 && part == 0
    }

    /// True if this rank computes the loss in this part.
    fn has_head(&self, part: usize) -> bool {
        let setup = self.rank.setup;
        setup.is_last() && part + 1 == setup.virtual_pipeline
    }

    fn forward(&mut self, kind: &str, number: usize, part: usize, trains: bool) -> Left {
        let setup = self.rank.setup;
        self.begin(kind, number, part);
        self.gather();
        let (stream, indices) = (self.rank.stream(), self.rank.tokens() * INDEX);
        let n_indices = match (self.embeds(part), self.has_head(part)) {
            (false, false) => 0,
            // Tokens, labels, positions, and which losses count.
            _ => 4,
        };
        let mut batch: Vec<Live> = (0..n_indices)
            .map(|_| self.rank.writer.get(indices))
            .collect();
        let keep = trains && !setup.recompute;
        let mut x = match self.embeds(part) {
            true => self.rank.summed(),
            false => self.rank.writer.get(stream),
        };
        self.crosses_stages(x);
        let mut saved = vec![];
        // Blocks that go to the host while the next layer runs.
        let mut leaving: Vec<Live> = vec![];
        for layer in 0..setup.part() {
            let (kept, y) = self.rank.layer(layer, keep);
            if !trains {
                self.rank.writer.free(x);
                x = y;
                continue;
            }
            if setup.offload {
                leaving
                    .drain(..)
                    .for_each(|block| self.rank.writer.free(block));
                leaving.extend(kept.iter().map(|&(_, block)| block).chain([x]));
            }
            saved.push(Saved {
                input: self.left(x),
                kept: kept
                    .into_iter()
                    .map(|(part, block)| (part, self.left(block)))
                    .collect(),
            });
            x = y;
        }
        leaving
            .into_iter()
            .for_each(|block| self.rank.writer.free(block));
        let head = match self.has_head(part) {
            true => self.head(x, trains),
            false => {
                // Megatron-LM sends the result to the next stage, and frees it here.
                self.crosses_stages(x);
                self.rank.writer.free(x);
                vec![]
            }
        };
        if !trains {
            batch
                .drain(..)
                .for_each(|block| self.rank.writer.free(block));
        }
        self.end_phase();
        Left { saved, head, batch }
    }

    /// A tensor comes from another stage or goes there, unless it is the only one.
    fn crosses_stages(&mut self, block: Live) {
        if self.rank.setup.pipeline > 1 {
            self.rank.writer.collective(block);
        }
    }

    /// A phase ends. Stages exchange tensors between phases. Megatron-LM's host waits for the
    /// device then, except in a virtual pipeline, where exchanges and work overlap.
    fn end_phase(&mut self) {
        let setup = self.rank.setup;
        if setup.pipeline > 1 && setup.virtual_pipeline == 1 {
            self.rank.writer.synchronize();
        }
        self.rank.writer.end_phase();
    }

    /// Bytes of the logits in bf16.
    fn logits(&self) -> u64 {
        let setup = self.rank.setup;
        self.rank.tokens() * setup.shape.vocabulary.div_ceil(setup.tensor) * HALF
    }

    /// The last norm, the logits, and the loss in f32.
    fn head(&mut self, x: Live, trains: bool) -> Vec<(Part, Live)> {
        let logits = self.logits();
        let mut kept = Kept {
            keep: trains,
            blocks: vec![],
        };
        let normed = self.rank.norm(&mut kept, 2);
        let rank = &mut self.rank;
        rank.gathers(normed);
        rank.done(&mut kept, Part::Residual, x);
        let half = rank.writer.get(logits);
        rank.done(&mut kept, Part::Normed(2), normed);
        let full = rank.writer.get(2 * logits);
        rank.writer.free(half);
        let losses = [0; 3].map(|_| rank.writer.get(rank.tokens() * FULL));
        for block in losses {
            rank.writer.free(block);
        }
        // The exponentials are computed in place.
        rank.done(&mut kept, Part::Inner, full);
        kept.blocks
    }

    /// The gradient of the head's input.
    fn head_backward(&mut self, mut kept: Vec<(Part, Live)>) -> Live {
        let setup = self.rank.setup;
        let logits = self.logits();
        let weights = setup.shape.vocabulary.div_ceil(setup.tensor) * setup.shape.width;
        let of_logits = self.rank.writer.get(logits);
        let rank = &mut self.rank;
        rank.drop(&mut kept, Part::Inner);
        let whole = rank.whole_stream();
        let of_normed = rank.product_backward(whole, weights, &mut kept, Some(Part::Normed(2)));
        rank.writer.free(of_logits);
        let gradient = rank.writer.get(rank.stream());
        rank.writer.free(of_normed);
        kept.into_iter()
            .for_each(|(_, block)| rank.writer.free(block));
        gradient
    }

    /// A block that a forward leaves, on the device or on the host.
    fn left(&self, block: Live) -> Tensor {
        if !self.rank.setup.offload {
            return Tensor::Here(block);
        }
        let block = self.rank.writer.block(block);
        Tensor::Away {
            bytes: block.bytes,
            dynamic: block.origin.dynamic,
        }
    }

    /// Copies the blocks of a layer's forward to the device.
    fn fetch(&mut self, Saved { input, kept }: Saved) -> Fetched {
        let mut here = |tensor| match tensor {
            Tensor::Here(block) => block,
            Tensor::Away { bytes, dynamic } => self.rank.writer.request(bytes, dynamic, COPIES),
        };
        let input = here(input);
        let kept = kept.into_iter().map(|(part, tensor)| (part, here(tensor)));
        (input, kept.collect())
    }

    fn backward(&mut self, number: usize, part: usize, left: Left) {
        let Left {
            mut saved,
            head,
            batch,
        } = left;
        self.begin("bwd", number, part);
        let mut gradient = match self.has_head(part) {
            true => self.head_backward(head),
            false => self.rank.writer.get(self.rank.stream()),
        };
        self.crosses_stages(gradient);
        let mut next = saved.pop().map(|last| self.fetch(last));
        while let Some((input, mut kept)) = next {
            let layer = saved.len();
            // The blocks of the layer below are copied while this one runs.
            next = saved.pop().map(|below| self.fetch(below));
            let mut result = None;
            if self.rank.setup.recompute {
                let (again, y) = self.rank.layer(layer, true);
                kept = again;
                result = Some(y);
            }
            gradient = self.rank.layer_backward(layer, input, kept, gradient);
            result
                .into_iter()
                .for_each(|block| self.rank.writer.free(block));
        }
        if self.embeds(part) {
            let shape = &self.rank.setup.shape;
            let weights = shape.vocabulary.div_ceil(self.rank.setup.tensor) * shape.width;
            self.rank.writer.touch(weights * HALF);
        }
        self.crosses_stages(gradient);
        self.rank.writer.free(gradient);
        batch
            .into_iter()
            .for_each(|block| self.rank.writer.free(block));
        self.end_phase();
    }

    fn optimizer(&mut self, weights: &[u64], makes_moments: bool) {
        let setup = self.rank.setup;
        let name = match setup.steps {
            1 => "optimizer".into(),
            _ => format!("{}.optimizer", self.step),
        };
        self.rank.writer.begin_phase(name);
        // Norms of the gradients, to clip them.
        self.rank.writer.touch(weights.len() as u64 * FULL);
        // The host reads the norm.
        self.rank.writer.synchronize();
        if setup.offload {
            self.update_on_host(weights);
        } else if makes_moments {
            self.states(weights, 2);
        }
        self.rank.writer.end_phase();
    }

    /// Gradients go to the host, and weights come back. One gradient is being copied while the next
    /// one is prepared.
    fn update_on_host(&mut self, weights: &[u64]) {
        let writer = &mut self.rank.writer;
        let zero = self.rank.setup.zero;
        let mut leaving: Option<Live> = None;
        for &n in weights {
            let gradient = writer.get(n.div_ceil(zero) * FULL);
            let weight = writer.request(n.div_ceil(zero) * HALF, false, COPIES);
            if let Some(before) = leaving.replace(gradient) {
                writer.free(before);
            }
            writer.free(weight);
        }
        leaving.into_iter().for_each(|block| writer.free(block));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Model, Setup};
    use crate::caching::{Segments, simulate};
    use placement::lower_bound;
    use placement::trace::Trace;

    fn small(model: Model) -> Setup {
        Setup {
            micro_batches: 8,
            ..Setup::new(model)
        }
    }

    fn peak(setup: &Setup) -> u64 {
        lower_bound(&setup.trace().unwrap(), 1)
    }

    fn setups() -> Vec<Setup> {
        let base = small(Model::Gpt2);
        let with = |change: fn(&mut Setup)| {
            let mut setup = base.clone();
            change(&mut setup);
            setup
        };
        vec![
            base.clone(),
            with(|setup| (setup.virtual_pipeline, setup.recompute) = (2, true)),
            with(|setup| (setup.offload, setup.recompute, setup.zero) = (true, true, 2)),
            with(|setup| (setup.steps, setup.evaluate, setup.vary) = (3, 3, 30)),
            with(|setup| setup.stage = 3),
            with(|setup| (setup.holds_collectives, setup.recompute) = (true, true)),
            Setup {
                zero: 2,
                offload: true,
                ..small(Model::QwenMoe)
            },
            Setup {
                recompute: true,
                stage: 3,
                virtual_pipeline: 2,
                ..small(Model::QwenMoe)
            },
        ]
    }

    #[test]
    fn every_block_is_freed_and_every_tick_is_used_once() {
        for setup in setups() {
            let trace = setup.trace().unwrap();
            let mut ticks: Vec<u64> = trace
                .blocks
                .iter()
                .flat_map(|block| [block.start, block.end])
                .collect();
            ticks.extend(
                trace
                    .blocks
                    .iter()
                    .flat_map(|block| &block.gaps)
                    .map(|gap| gap.0),
            );
            let spans = trace
                .phases
                .iter()
                .skip(1)
                .chain(trace.modules.iter().skip(1));
            ticks.extend(spans.flat_map(|span| [span.start, span.end]));
            let n = ticks.len();
            ticks.sort_unstable();
            ticks.dedup();
            assert_eq!(ticks.len(), n);
            assert!(ticks.last() < Some(&u64::MAX));
            assert!(trace.blocks.iter().all(|block| block.start < block.end));
        }
    }

    /// Only weights, states and buffers live longer than a step's last backward.
    #[test]
    fn activations_are_freed_by_their_backward() {
        for setup in setups() {
            let trace = setup.trace().unwrap();
            let stays = trace
                .blocks
                .iter()
                .filter(|block| block.origin.phases.1 == 0);
            let gathered = usize::from(setup.sequence_parallel);
            let moments = if setup.offload { 0 } else { 3 };
            assert_eq!(
                stays.count(),
                setup.weights().len() * (1 + moments) + 1 + gathered
            );
        }
    }

    /// Recomputation, ZeRO, offloading and ranks of a product take less memory, virtual stages
    /// more.
    #[test]
    fn optimizations_do_what_they_are_for() {
        let base = small(Model::Llama2);
        let less = |what: fn(&mut Setup)| {
            let mut setup = base.clone();
            what(&mut setup);
            assert!(peak(&setup) < peak(&base), "{setup:?}");
        };
        less(|setup| setup.recompute = true);
        less(|setup| setup.zero = 2);
        less(|setup| setup.offload = true);
        less(|setup| setup.tensor = 4);
        less(|setup| setup.stage = 2);
        let more = |what: fn(&mut Setup)| {
            let mut setup = base.clone();
            what(&mut setup);
            assert!(peak(&base) < peak(&setup), "{setup:?}");
        };
        more(|setup| setup.virtual_pipeline = 2);
        more(|setup| setup.sequence_parallel = false);
        let moe = small(Model::QwenMoe);
        let divided = Setup {
            expert: 4,
            ..moe.clone()
        };
        assert!(peak(&divided) < peak(&moe));
    }

    /// The program frees the same blocks; some of them are available later.
    #[test]
    fn held_blocks_live_longer() {
        let setup = Setup {
            recompute: true,
            ..small(Model::Llama2)
        };
        let free = setup.trace().unwrap();
        let held = Setup {
            holds_collectives: true,
            ..setup
        }
        .trace()
        .unwrap();
        let sizes =
            |trace: &Trace| -> Vec<u64> { trace.blocks.iter().map(|block| block.bytes).collect() };
        assert_eq!(sizes(&free), sizes(&held));
        let reserved = |trace: &Trace| simulate(trace, Segments::Expandable).reserved_bytes;
        assert!(reserved(&free) * 5 / 4 < reserved(&held));
        // Their bytes are not needed after the free.
        assert_eq!(lower_bound(&free, 512), lower_bound(&held, 512));
    }

    /// The first part of a virtual pipeline runs `pipeline` micro-batches before the second one.
    #[test]
    fn a_virtual_pipeline_goes_round_by_round() {
        let setup = Setup {
            virtual_pipeline: 2,
            ..small(Model::Gpt2)
        };
        let trace = setup.trace().unwrap();
        let names: Vec<&str> = trace.phases[1..14]
            .iter()
            .map(|phase| &phase.name[..])
            .collect();
        let forwards = [
            "0.0", "1.0", "2.0", "3.0", "0.1", "1.1", "2.1", "3.1", "4.0", "5.0",
        ];
        let forwards = forwards.map(|name| format!("fwd.{name}"));
        assert_eq!(names[..10], forwards);
        assert_eq!(names[10..], ["fwd.6.0", "bwd.0.1", "fwd.7.0"]);
    }

    #[test]
    fn a_setup_that_makes_no_sense_is_an_error() {
        let base = Setup::new(Model::Gpt2);
        for (what, words) in [
            (
                Setup {
                    pipeline: 5,
                    ..base.clone()
                },
                "1, 2, 3, 4, 6, 8, 12, 24",
            ),
            (
                Setup {
                    stage: 4,
                    ..base.clone()
                },
                "stage 4",
            ),
            (
                Setup {
                    virtual_pipeline: 2,
                    micro_batches: 6,
                    ..base.clone()
                },
                "multiple of 4",
            ),
            (
                Setup {
                    tensor: 3,
                    ..base.clone()
                },
                "16 heads",
            ),
            (
                Setup {
                    expert: 2,
                    ..base.clone()
                },
                "no experts",
            ),
            (
                Setup {
                    micro_batches: 0,
                    ..base.clone()
                },
                "micro-batches",
            ),
            (
                Setup {
                    micro_batches: usize::MAX,
                    ..base.clone()
                },
                "requests",
            ),
            (
                Setup {
                    batch: u64::MAX,
                    ..base.clone()
                },
                "512 GiB",
            ),
            (
                Setup {
                    vary: 91,
                    ..base.clone()
                },
                "90",
            ),
            (
                Setup {
                    pipeline: usize::MAX,
                    virtual_pipeline: 2,
                    ..base.clone()
                },
                "parts",
            ),
        ] {
            let error = what.trace().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
