//! What a rank does: the model, how it is divided, and how many steps run.

use super::{Model, Shape};

/// The largest number of requests of a generated trace: about 1 GiB of memory.
pub const MOST_REQUESTS: u64 = 5_000_000;

/// A rank of a Megatron-LM run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Setup {
    /// The model.
    pub shape: Shape,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Sequences of a micro-batch.
    pub batch: u64,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Pipeline stages.
    pub pipeline: usize,
    /// This rank's stage, from 0.
    pub stage: usize,
    /// The number of parts of the model on each rank: 1 is 1F1B, more is a virtual pipeline.
    pub virtual_pipeline: usize,
    /// Ranks over which each product is divided.
    pub tensor: u64,
    /// Tensors between the products are divided over these ranks too, by tokens.
    pub sequence_parallel: bool,
    /// Ranks over which the experts of a layer are divided.
    pub expert: usize,
    /// Layers keep their input and run again in the backward.
    pub recompute: bool,
    /// Ranks over which the optimizer's states are divided: 1 is none (ZeRO, Megatron's
    /// distributed optimizer).
    pub zero: u64,
    /// Results of a forward go to the host and come back for the backward; the optimizer's states
    /// stay on the host, and updates run there (ZeRO-Offload).
    pub offload: bool,
    /// Steps. With 1, the optimizer's moments exist from the start, as in a later step. With more,
    /// they are allocated at the end of the first step, as in a run from its beginning.
    pub steps: usize,
    /// Micro-batches that run only forward after each step. 0: no evaluation.
    pub evaluate: usize,
    /// Sequences are up to this many percent shorter. 0: all have the same length.
    pub vary: u64,
    /// Tensors of collectives are held after they are freed. PyTorch's allocator holds a block that
    /// NCCL's stream has used (`record_stream`) until the device has done the work, and counts it
    /// as free. In the trace, such a block lives until then, and has a gap. The host runs ahead of
    /// the device: up to the length of the device's queue, or to the end of a phase, where 1F1B
    /// waits for the other stages.
    pub holds_collectives: bool,
    /// The seed of lengths and of the routing to experts.
    pub seed: u64,
}

/// Why a setup has no trace.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// A number is 0.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// The layers do not divide over the parts of the pipeline.
    #[error(
        "{layers} layers do not divide into {parts} parts (pipeline times virtual pipeline); {fits}"
    )]
    Layers {
        /// Layers of the model.
        layers: usize,
        /// Parts of the pipeline.
        parts: usize,
        /// Numbers of parts that divide it.
        fits: String,
    },
    /// The stage does not exist.
    #[error("stage {stage} does not exist: the pipeline has {pipeline}, and the first is 0")]
    Stage {
        /// The stage.
        stage: usize,
        /// Stages.
        pipeline: usize,
    },
    /// The virtual pipeline has no schedule.
    #[error(
        "a virtual pipeline of {pipeline} stages needs at least 2 stages, and a multiple of \
         {pipeline} micro-batches; {micro_batches} were given"
    )]
    Virtual {
        /// Stages.
        pipeline: usize,
        /// Micro-batches.
        micro_batches: usize,
    },
    /// Something does not divide over the ranks.
    #[error("{count} {what} do not divide over {ranks} ranks; {fits}")]
    Ranks {
        /// How many.
        count: u64,
        /// Of what.
        what: &'static str,
        /// Ranks.
        ranks: u64,
        /// Numbers of ranks that divide it.
        fits: String,
    },
    /// Experts are divided, and the model has none.
    #[error("the model has no experts that {0} ranks could divide")]
    NoExperts(usize),
    /// Lengths cannot vary so much.
    #[error("sequences cannot be up to {0} % shorter; at most 90 are possible")]
    Vary(u64),
    /// The trace would be too long.
    #[error(
        "the trace would have about {0} requests, and at most {MOST_REQUESTS} are written; fewer \
         micro-batches or steps help"
    )]
    Long(u64),
    /// A tensor is so large that all blocks together could have more bytes than readers accept.
    #[error(
        "the largest tensor would have 512 GiB or more; smaller micro-batches or sequences help"
    )]
    Large,
}

impl Setup {
    /// The paper's step of a model (section 9.2: 8 devices, the largest micro-batch that fits 80
    /// GB), as far as it is stated: 4 stages of 2 ranks.
    pub fn new(model: Model) -> Setup {
        let shape = model.shape();
        let (batch, tensor, expert) = match model {
            Model::Gpt2 => (128, 2, 1),
            Model::Llama2 => (4, 2, 1),
            Model::QwenMoe => (8, 1, 2),
            Model::Qwen7b | Model::Qwen14b | Model::Qwen32b | Model::Qwen72b => (1, 2, 1),
        };
        Setup {
            shape,
            sequence: shape.sequence,
            batch,
            micro_batches: 16,
            pipeline: 4,
            stage: 0,
            virtual_pipeline: 1,
            tensor,
            sequence_parallel: tensor > 1,
            expert,
            recompute: false,
            zero: 1,
            offload: false,
            steps: 1,
            evaluate: 0,
            vary: 0,
            holds_collectives: false,
            seed: 0,
        }
    }

    /// Layers of a part of the pipeline.
    pub(super) fn part(&self) -> usize {
        self.shape.layers / self.pipeline / self.virtual_pipeline
    }

    /// Experts on this rank.
    pub(super) fn own_experts(&self) -> usize {
        self.shape.experts / self.expert
    }

    /// Checks that the model divides as asked, and that the trace has a bearable length.
    pub fn check(&self) -> Result<(), Error> {
        let Setup {
            shape,
            pipeline,
            virtual_pipeline,
            micro_batches,
            tensor,
            ..
        } = *self;
        let numbers = [
            ("the sequence", self.sequence),
            ("the micro-batch", self.batch),
            ("the number of micro-batches", micro_batches as u64),
            ("the pipeline", pipeline as u64),
            ("the virtual pipeline", virtual_pipeline as u64),
            ("the number of ranks for tensors", tensor),
            ("the number of ranks for experts", self.expert as u64),
            ("the number of ranks for states", self.zero),
            ("the number of steps", self.steps as u64),
        ];
        if let Some(&(what, _)) = numbers.iter().find(|&&(_, number)| number == 0) {
            return Err(Error::Zero(what));
        }
        let layers = shape.layers;
        match pipeline.checked_mul(virtual_pipeline) {
            Some(parts) if layers.is_multiple_of(parts) => {}
            parts => {
                return Err(Error::Layers {
                    layers,
                    parts: parts.unwrap_or(usize::MAX),
                    fits: divisors(layers as u64),
                });
            }
        }
        if self.stage >= pipeline {
            return Err(Error::Stage {
                stage: self.stage,
                pipeline,
            });
        }
        if virtual_pipeline > 1 && (pipeline < 2 || !micro_batches.is_multiple_of(pipeline)) {
            return Err(Error::Virtual {
                pipeline,
                micro_batches,
            });
        }
        if self.vary > 90 {
            return Err(Error::Vary(self.vary));
        }
        self.check_ranks()?;
        self.check_length()
    }

    fn check_ranks(&self) -> Result<(), Error> {
        let Shape { heads, experts, .. } = self.shape;
        if self.expert > 1 && experts == 0 {
            return Err(Error::NoExperts(self.expert));
        }
        let mut divided = vec![("heads", heads, self.tensor)];
        if self.sequence_parallel {
            divided.push(("tokens of a sequence", self.sequence, self.tensor));
        }
        if self.expert > 1 {
            divided.push(("experts", experts as u64, self.expert as u64));
        }
        match divided
            .into_iter()
            .find(|&(_, count, ranks)| !count.is_multiple_of(ranks))
        {
            None => Ok(()),
            Some((what, count, ranks)) => Err(Error::Ranks {
                count,
                what,
                ranks,
                fits: divisors(count),
            }),
        }
    }

    fn check_length(&self) -> Result<(), Error> {
        let runs = (self.micro_batches as u64).saturating_add(self.evaluate as u64);
        // A layer requests about 50 blocks, and 12 for each expert; a rank has a few beside its
        // layers.
        let layer = 50 + 12 * self.own_experts() as u64;
        let own = (self.shape.layers / self.pipeline) as u64;
        let requests = runs
            .saturating_mul(self.steps as u64)
            .saturating_mul(layer * own + 20 * self.virtual_pipeline as u64);
        if requests > MOST_REQUESTS {
            return Err(Error::Long(requests));
        }
        // The largest tensor has logits or a hidden part. Readers of traces accept 2^62 bytes in
        // all, which are 2^23 blocks of 2^39.
        let widest = self.shape.vocabulary.max(2 * self.shape.hidden) * super::FULL;
        let largest = self
            .sequence
            .saturating_mul(self.batch)
            .saturating_mul(widest);
        if largest >= 1 << 39 {
            return Err(Error::Large);
        }
        Ok(())
    }
}

/// The numbers that divide `count`, as a hint.
fn divisors(count: u64) -> String {
    let all: Vec<String> = (1..=count.min(256))
        .filter(|&by| count.is_multiple_of(by))
        .map(|by| by.to_string())
        .collect();
    format!("possible are {}", all.join(", "))
}
