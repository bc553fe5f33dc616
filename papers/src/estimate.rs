//! Memory of a training step by formula, only from a model's sizes. It needs no graph.
//!
//! The formulas are those of the post "Memory Management for Optimizing LLMs" (2026): bytes per
//! parameter for weights, gradients and optimizer, a table of the tensors that a transformer layer
//! saves for its backward, and the memory that data, tensor and pipeline parallelism and ZeRO
//! divide. They are estimates of a common kind of model; a plan of a traced graph is exact.

pub mod peak;

use thiserror::Error;

ir::named! {
    /// The memory of an optimizer.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Optimizer {
        /// First and second moment.
        AdamW = "adamw",
        /// Nothing.
        Sgd = "sgd",
        /// A momentum buffer.
        Momentum = "momentum",
        /// Both moments in one byte each.
        AdamW8bit = "adamw8bit",
        /// The first moment in two bytes; the second is factored into rows and columns, and counts
        /// as zero.
        Adafactor = "adafactor",
        /// The factored second moment alone, as the paper has it.
        AdafactorPaper = "adafactor-paper",
        /// The same with a first moment in f32.
        AdafactorPaperMomentum = "adafactor-paper-momentum",
    }
}

impl Optimizer {
    /// Bytes per parameter of its own states, if a full-precision number takes `full` bytes.
    fn moments(self, full: u64) -> u64 {
        match self {
            Optimizer::AdamW => 2 * full,
            Optimizer::Sgd | Optimizer::AdafactorPaper => 0,
            Optimizer::Momentum => full,
            Optimizer::AdamW8bit | Optimizer::Adafactor => 2,
            Optimizer::AdafactorPaperMomentum => 4,
        }
    }
}

ir::named! {
    /// The precision of weights, gradients, activations and optimizer.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Precision {
        /// All in f32.
        F32 = "f32",
        /// All in bf16.
        Bf16 = "bf16",
        /// Weights, gradients and activations in bf16; the optimizer keeps an f32 copy of the
        /// weights, and its states in f32.
        Mixed = "mixed",
    }
}

impl Precision {
    /// Bytes of a weight, a gradient or an activation.
    fn width(self) -> u64 {
        if self == Precision::F32 { 4 } else { 2 }
    }
    /// Bytes of a moment in full precision.
    fn moment(self) -> u64 {
        if self == Precision::Bf16 { 2 } else { 4 }
    }
    /// Bytes per parameter of the optimizer's memory.
    fn optimizer(self, optimizer: Optimizer) -> u64 {
        let moments = optimizer.moments(self.moment());
        if self == Precision::Mixed {
            4 + moments
        } else {
            moments
        }
    }
}

ir::named! {
    /// What is computed again in the backward.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Recompute {
        /// Nothing.
        None = "none",
        /// The tensors of attention: scores, probabilities and their mask.
        Selective = "selective",
        /// Everything except the input of each layer.
        Full = "full",
    }
}

ir::named! {
    /// What attention saves for its backward.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Attention {
        /// Scores, probabilities and their mask.
        Scores = "scores",
        /// One f32 for each row of the scores: flash attention computes the rest again.
        Flash = "flash",
    }
}

/// The sizes of a transformer and of one micro-batch on one device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Layers of the whole model.
    pub layers: u64,
    /// The hidden size.
    pub width: u64,
    /// Attention heads.
    pub heads: u64,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Sequences that one device computes at a time: the micro-batch.
    pub batch: u64,
    /// Words of the vocabulary. With it the logits are counted.
    pub vocabulary: Option<u64>,
}

impl Shape {
    /// Parameters of a GPT of this shape, with biases, tied embeddings and a table of positions;
    /// without the embeddings if the vocabulary is not known.
    pub fn parameters(&self) -> Result<u64, SizeError> {
        let words = self.vocabulary.map_or(Ok(0), |v| {
            fits(Some(u128::from(v) + u128::from(self.sequence)))
        })?;
        let matrices = product(&[12, self.layers, self.width, self.width], 1)?;
        let (vectors, embeddings) = (
            product(&[13, self.layers, self.width], 1)?,
            product(&[words, self.width], 1)?,
        );
        let norm = product(&[2, self.width], 1)?;
        fits(Some(
            [matrices, vectors, embeddings, norm]
                .into_iter()
                .map(u128::from)
                .sum(),
        ))
    }
}

/// Low-rank adapters with frozen weights.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Adapters {
    /// Their parameters as a share of the model's: 0.02 is 2 %.
    pub share: f64,
    /// True if the frozen weights take four bits each.
    pub four_bit: bool,
}

/// How the work is divided among devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parallel {
    /// Devices that share each layer.
    pub tensor: u64,
    /// Devices that each have a part of the layers.
    pub pipeline: u64,
    /// Replicas of the model.
    pub data: u64,
    /// What replicas share: 0 nothing, 1 the optimizer's states, 2 also gradients, 3 also weights.
    pub zero: u8,
    /// Micro-batches of a step. A stage holds the activations of one micro-batch for itself and for
    /// each stage behind it (1F1B).
    pub micro_batches: u64,
}

impl Default for Parallel {
    fn default() -> Parallel {
        Parallel {
            tensor: 1,
            pipeline: 1,
            data: 1,
            zero: 0,
            micro_batches: 1,
        }
    }
}

impl Parallel {
    /// The number of all devices.
    pub fn devices(&self) -> u64 {
        self.tensor
            .saturating_mul(self.pipeline)
            .saturating_mul(self.data)
    }
    /// Devices that share one replica of the model.
    fn of_replica(&self) -> Result<u64, SizeError> {
        fits(u128::from(self.tensor).checked_mul(u128::from(self.pipeline)))
    }
    /// Devices that share what ZeRO divides among replicas from `stage` on.
    fn shards(&self, stage: u8) -> Result<u64, SizeError> {
        let model = self.of_replica()?;
        if stage <= self.zero {
            fits(Some(u128::from(model) * u128::from(self.data)))
        } else {
            Ok(model)
        }
    }
    /// The share of the time in which a device waits for the other stages of its pipeline: `(p - 1)
    /// / (m + p - 1)`.
    pub fn bubble(&self) -> f64 {
        let (p, m) = (self.pipeline as f64, self.micro_batches as f64);
        (p - 1.0) / (m + p - 1.0)
    }
}

/// What to estimate.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Setup {
    /// Parameters of the whole model.
    pub parameters: u64,
    /// Its shape; without it activations are not counted.
    pub shape: Option<Shape>,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The precision.
    pub precision: Precision,
    /// What is computed again.
    pub recompute: Recompute,
    /// What attention saves.
    pub attention: Attention,
    /// True if there is dropout, which saves masks.
    pub dropout: bool,
    /// True if the optimizer updates all parameters at once, as `foreach` does in PyTorch.
    pub foreach: bool,
    /// Adapters, if only these are trained.
    pub adapters: Option<Adapters>,
    /// How it is divided.
    pub parallel: Parallel,
}

/// A saved tensor of one layer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Saved {
    /// Its name.
    pub name: &'static str,
    /// Its shape, with s tokens, b sequences, d width, a heads, t-way tensor parallelism.
    pub shape: &'static str,
    /// Bytes on one device.
    pub bytes: u64,
    /// True if it is kept with the chosen recomputation.
    pub kept: bool,
}

/// Bytes on one device.
#[derive(Clone, PartialEq, Debug)]
pub struct Estimate {
    /// Weights.
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// The optimizer's memory, including its copy of the weights if it has one.
    pub optimizer: u64,
    /// Temporary tensors of `foreach`: the root of the second moments and the quotient of the
    /// update, for all parameters at once. Without `foreach` they exist for one parameter at a
    /// time, and count as zero.
    pub temporaries: u64,
    /// Activations of the stage that holds most; `None` without a shape.
    pub activations: Option<u64>,
    /// The tensors that one layer saves for one micro-batch.
    pub layer: Vec<Saved>,
    /// Layers of the largest stage.
    pub stage_layers: u64,
    /// Micro-batches whose activations a stage holds at a time.
    pub in_flight: u64,
    /// A checkpoint of the whole model on disk: f32 weights if they exist, and the optimizer's
    /// states.
    pub checkpoint: u64,
}

impl Estimate {
    /// Everything except activations.
    pub fn states(&self) -> u64 {
        self.parameters
            .saturating_add(self.gradients)
            .saturating_add(self.optimizer)
    }
    /// Everything. The optimizer's temporaries exist when no activation does.
    pub fn total(&self) -> u64 {
        let activations = self.activations.unwrap_or(0);
        self.states()
            .saturating_add(activations.max(self.temporaries))
    }
}

/// Why sizes have no estimate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum SizeError {
    /// The bytes, or the parameters, do not fit in 64 bits.
    #[error("these sizes are beyond 2^64 bytes")]
    TooLarge,
    /// A size is 0.
    #[error("{size}: should be 1 or more")]
    Zero {
        /// The size's name.
        size: &'static str,
    },
    /// ZeRO has no such stage.
    #[error("ZeRO has the stages 0 to 3, not {0}")]
    NoStage(u8),
    /// The peak of a step has no formula for this.
    #[error(
        "the peak of a step has a formula for one device, a shape with a vocabulary, and training \
         without recomputation, adapters and foreach"
    )]
    NoPeak,
    /// The adapters' share of the parameters is no share.
    #[error("adapters: their share should be above 0 and at most 100%")]
    NoShare,
}

fn fits(bytes: Option<u128>) -> Result<u64, SizeError> {
    bytes
        .and_then(|bytes| u64::try_from(bytes).ok())
        .ok_or(SizeError::TooLarge)
}

/// The product of some sizes, divided among `parts` devices, rounded up.
fn product(sizes: &[u64], parts: u64) -> Result<u64, SizeError> {
    let all = sizes.iter().try_fold(1u128, |product, &size| {
        product.checked_mul(u128::from(size))
    });
    fits(all.map(|all| all.div_ceil(u128::from(parts))))
}

/// Estimates. An error if a size is zero, out of range, or the bytes do not fit in 64 bits.
pub fn estimate(setup: &Setup) -> Result<Estimate, SizeError> {
    setup.check()?;
    let (precision, parallel) = (setup.precision, setup.parallel);
    let of_optimizer = precision.optimizer(setup.optimizer);
    let (parameters, trained) = setup.weights()?;
    let gradients = product(&[precision.width(), trained], parallel.shards(2)?)?;
    let optimizer = product(&[of_optimizer, trained], parallel.shards(1)?)?;

    // Only AdamW's update has roots and quotients.
    let of_temporaries = if setup.foreach && setup.optimizer == Optimizer::AdamW {
        2 * precision.moment()
    } else {
        0
    };
    let temporaries = product(&[of_temporaries, trained], parallel.shards(1)?)?;

    let in_flight = parallel.pipeline.min(parallel.micro_batches);
    let (mut layer, mut stage_layers, mut activations) = (vec![], 0, None);
    if let Some(shape) = &setup.shape {
        layer = saved(shape, setup)?;
        stage_layers = shape.layers.div_ceil(parallel.pipeline);
        if stage_layers == 0 {
            return Err(SizeError::Zero { size: "layers" });
        }
        let of_layers = product(&[kept(&layer)?, stage_layers, in_flight], 1)?;
        let of_logits = logits(shape, precision, parallel.tensor)?;
        activations = Some(fits(Some(u128::from(of_layers) + u128::from(of_logits)))?);
    }

    // In mixed precision the optimizer has the f32 weights.
    let weight = if precision == Precision::Mixed {
        0
    } else {
        precision.width()
    };
    let checkpoint = product(&[weight + of_optimizer, trained], 1)?;
    Ok(Estimate {
        parameters,
        gradients,
        optimizer,
        temporaries,
        activations,
        layer,
        stage_layers,
        in_flight,
        checkpoint,
    })
}

impl Setup {
    /// Refuses sizes that are zero, stages that ZeRO does not have, and too many devices.
    fn check(&self) -> Result<(), SizeError> {
        let positive = [
            ("parameters", self.parameters),
            ("tensor parallelism", self.parallel.tensor),
            ("pipeline stages", self.parallel.pipeline),
            ("data parallelism", self.parallel.data),
            ("micro-batches", self.parallel.micro_batches),
        ];
        if let Some((size, _)) = positive.into_iter().find(|&(_, size)| size == 0) {
            return Err(SizeError::Zero { size });
        }
        if self.parallel.zero > 3 {
            return Err(SizeError::NoStage(self.parallel.zero));
        }
        self.parallel.of_replica().map(drop)
    }

    /// Bytes of the weights on one device, and how many parameters of the whole model are trained.
    fn weights(&self) -> Result<(u64, u64), SizeError> {
        let width = self.precision.width();
        let Some(Adapters { share, four_bit }) = self.adapters else {
            let weights = product(&[width, self.parameters], self.parallel.shards(3)?)?;
            return Ok((weights, self.parameters));
        };
        if !(share > 0.0 && share <= 1.0) {
            return Err(SizeError::NoShare);
        }
        let trained = (share * self.parameters as f64).ceil() as u64;
        // Four bits are half a byte.
        let base = if four_bit {
            self.parameters.div_ceil(2)
        } else {
            product(&[width, self.parameters], 1)?
        };
        let all = u128::from(base) + u128::from(product(&[width, trained], 1)?);
        let weights = fits(Some(all.div_ceil(u128::from(self.parallel.shards(3)?))))?;
        Ok((weights, trained))
    }
}

/// Bytes of a layer's tensors that are kept for the backward.
fn kept(layer: &[Saved]) -> Result<u64, SizeError> {
    let kept = layer.iter().filter(|saved| saved.kept);
    fits(Some(kept.map(|saved| u128::from(saved.bytes)).sum()))
}

/// Bytes of the logits, and of their softmax in f32, on one of `t` devices; 0 if the vocabulary is
/// not known.
fn logits(shape: &Shape, precision: Precision, t: u64) -> Result<u64, SizeError> {
    let of_logit = precision.width() + 4;
    let vocabulary = shape.vocabulary.unwrap_or(0);
    product(&[of_logit, shape.sequence, shape.batch, vocabulary], t)
}

/// The tensors that one layer saves for the backward of one micro-batch, on one of `t` devices:
/// `sbd (10 + 24 / t + 5 a s / (d t))` bytes in 16 bits. Masks have one byte per element. With full
/// recompute only the input of the first norm is kept; with selective recompute everything except
/// the last three. Flash attention saves one row of sums instead of these. Without dropout there
/// are no masks.
fn saved(shape: &Shape, setup: &Setup) -> Result<Vec<Saved>, SizeError> {
    let &Shape {
        width: d,
        heads: a,
        sequence: s,
        batch: b,
        ..
    } = shape;
    for (name, size) in [
        ("width", d),
        ("heads", a),
        ("sequence length", s),
        ("batch", b),
    ] {
        if size == 0 {
            return Err(SizeError::Zero { size: name });
        }
    }
    let (w, t) = (setup.precision.width(), setup.parallel.tensor);
    let (whole, split, four, square) =
        ("[s, b, d]", "[s, b, d/t]", "[s, b, 4d/t]", "[b, a/t, s, s]");
    let rows: [(&str, &str, &[u64], u64, Part); 16] = [
        (
            "norm's input before attention",
            whole,
            &[w, s, b, d],
            1,
            Part::Layer,
        ),
        (
            "norm's input before MLP",
            whole,
            &[w, s, b, d],
            1,
            Part::Layer,
        ),
        ("attention's output", whole, &[w, s, b, d], 1, Part::Layer),
        ("MLP's output", whole, &[w, s, b, d], 1, Part::Layer),
        (
            "dropout's mask after attention",
            whole,
            &[s, b, d],
            1,
            Part::Mask,
        ),
        ("dropout's mask after MLP", whole, &[s, b, d], 1, Part::Mask),
        ("queries", split, &[w, s, b, d], t, Part::Layer),
        ("keys", split, &[w, s, b, d], t, Part::Layer),
        ("values", split, &[w, s, b, d], t, Part::Layer),
        (
            "attention over values",
            split,
            &[w, s, b, d],
            t,
            Part::Layer,
        ),
        (
            "MLP's first product",
            four,
            &[w, 4, s, b, d],
            t,
            Part::Layer,
        ),
        ("GeLU", four, &[w, 4, s, b, d], t, Part::Layer),
        (
            "attention scores",
            square,
            &[w, b, a, s, s],
            t,
            Part::Scores,
        ),
        (
            "attention probabilities",
            square,
            &[w, b, a, s, s],
            t,
            Part::Scores,
        ),
        (
            "dropout's mask in attention",
            square,
            &[b, a, s, s],
            t,
            Part::ScoresMask,
        ),
        (
            "sums of attention's rows",
            "[b, a/t, s]",
            &[4, b, a, s],
            t,
            Part::Sums,
        ),
    ];
    let exist = rows.into_iter().filter(|&(.., part)| part.exists(setup));
    let rows = exist.enumerate();
    rows.map(|(i, (name, shape, sizes, parts, part))| {
        let kept = match setup.recompute {
            Recompute::None => true,
            Recompute::Selective => !matches!(part, Part::Scores | Part::ScoresMask),
            Recompute::Full => i == 0,
        };
        Ok(Saved {
            name,
            shape,
            bytes: product(sizes, parts)?,
            kept,
        })
    })
    .collect()
}

/// What a saved tensor belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    /// The layer.
    Layer,
    /// A dropout of the layer.
    Mask,
    /// Attention by its parts.
    Scores,
    /// The dropout in attention by its parts.
    ScoresMask,
    /// Flash attention.
    Sums,
}

impl Part {
    /// Whether a layer of this kind saves it.
    fn exists(self, setup: &Setup) -> bool {
        let flash = setup.attention == Attention::Flash;
        match self {
            Part::Layer => true,
            Part::Mask => setup.dropout,
            Part::Scores => !flash,
            Part::ScoresMask => !flash && setup.dropout,
            Part::Sums => flash,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    fn setup(billions: u64) -> Setup {
        Setup {
            parameters: billions * GB,
            shape: None,
            optimizer: Optimizer::AdamW,
            precision: Precision::Mixed,
            recompute: Recompute::None,
            attention: Attention::Scores,
            dropout: true,
            foreach: false,
            adapters: None,
            parallel: Parallel::default(),
        }
    }

    fn parts(setup: &Setup) -> (u64, u64, u64) {
        let estimate = estimate(setup).unwrap();
        (estimate.parameters, estimate.optimizer, estimate.gradients)
    }

    const SHAPE: Shape = Shape {
        layers: 32,
        width: 4096,
        heads: 32,
        sequence: 2048,
        batch: 3,
        vocabulary: None,
    };

    fn activations(
        shape: Shape,
        recompute: Recompute,
        precision: Precision,
        parallel: Parallel,
    ) -> u64 {
        let setup = Setup {
            shape: Some(shape),
            recompute,
            precision,
            parallel,
            ..setup(7)
        };
        estimate(&setup).unwrap().activations.unwrap()
    }

    #[test]
    fn seven_billion_take_14_84_and_14_gigabytes() {
        assert_eq!(parts(&setup(7)), (14 * GB, 84 * GB, 14 * GB));
        assert_eq!(estimate(&setup(7)).unwrap().total(), 112 * GB);
        assert_eq!(estimate(&setup(70)).unwrap().total(), 1120 * GB);
    }

    #[test]
    fn optimizers_have_their_bytes() {
        let bytes = |precision, optimizer| {
            parts(&Setup {
                optimizer,
                precision,
                ..setup(1)
            })
            .1 / GB
        };
        let all = |precision| Optimizer::ALL.map(|optimizer| bytes(precision, optimizer));
        // AdamW, SGD, momentum, 8-bit AdamW, Adafactor; the post has 12, 8, 6 and about 6. Then
        // Adafactor of the paper.
        assert_eq!(all(Precision::Mixed), [12, 4, 8, 6, 6, 4, 8]);
        assert_eq!(all(Precision::F32), [8, 0, 4, 2, 2, 0, 4]);
        assert_eq!(all(Precision::Bf16), [4, 0, 2, 2, 2, 0, 4]);
    }

    /// The post's "4P saved" are weights and gradients. The optimizer's copy of the weights takes
    /// the same 4P.
    #[test]
    fn mixed_precision_halves_weights_and_gradients() {
        let full = parts(&Setup {
            precision: Precision::F32,
            ..setup(7)
        });
        let mixed = parts(&setup(7));
        assert_eq!((full.0 + full.2) - (mixed.0 + mixed.2), 4 * 7 * GB);
        assert_eq!(mixed.1 - full.1, 4 * 7 * GB);
    }

    #[test]
    fn seventy_billion_on_64_devices() {
        let parallel = Parallel {
            tensor: 8,
            pipeline: 4,
            data: 2,
            zero: 1,
            micro_batches: 8,
        };
        assert_eq!(parallel.devices(), 64);
        let (parameters, optimizer, gradients) = parts(&Setup {
            parallel,
            ..setup(70)
        });
        assert_eq!(
            (parameters, optimizer, gradients),
            (4_375_000_000, 13_125_000_000, 4_375_000_000)
        );
        let total = parameters + optimizer + gradients;
        assert_eq!((total as f64 / 1e8).round() / 10.0, 21.9);
        assert!((parallel.bubble() - 3.0 / 11.0).abs() < 1e-12);
        assert_eq!(Parallel::default().bubble(), 0.0);
    }

    #[test]
    fn zero_divides_what_its_stage_says() {
        let of = |zero| {
            parts(&Setup {
                parallel: Parallel {
                    data: 8,
                    zero,
                    ..Parallel::default()
                },
                ..setup(7)
            })
        };
        assert_eq!(of(0), (14 * GB, 84 * GB, 14 * GB));
        assert_eq!(of(1), (14 * GB, 10_500_000_000, 14 * GB));
        assert_eq!(of(2), (14 * GB, 10_500_000_000, 1_750_000_000));
        assert_eq!(of(3), (1_750_000_000, 10_500_000_000, 1_750_000_000));
        let states = |parallel| {
            estimate(&Setup {
                parallel,
                ..setup(7)
            })
            .unwrap()
            .states()
        };
        assert_eq!(
            states(Parallel {
                data: 8,
                zero: 3,
                ..Parallel::default()
            }),
            14 * GB
        );
        assert_eq!(
            states(Parallel {
                tensor: 8,
                ..Parallel::default()
            }),
            14 * GB
        );
        assert_eq!(
            states(Parallel {
                pipeline: 7,
                ..Parallel::default()
            }),
            16 * GB
        );
    }

    #[test]
    fn activations_follow_the_formula() {
        let Shape {
            layers,
            width: d,
            heads: a,
            sequence: s,
            batch: b,
            ..
        } = SHAPE;
        let sbd = s * b * d;
        for t in [1, 2, 8] {
            let parallel = Parallel {
                tensor: t,
                ..Parallel::default()
            };
            let of = |recompute| activations(SHAPE, recompute, Precision::Mixed, parallel);
            assert_eq!(
                of(Recompute::None),
                layers * (sbd * 10 + sbd * 24 / t + 5 * b * a * s * s / t)
            );
            assert_eq!(of(Recompute::Selective), layers * (sbd * 10 + sbd * 24 / t));
            assert_eq!(of(Recompute::Full), 2 * sbd * layers);
        }
        // Six whole tensors, six divided ones, three of attention.
        let setup = Setup {
            shape: Some(SHAPE),
            ..setup(7)
        };
        let layer = estimate(&setup).unwrap().layer;
        let group = |from, to| layer[from..to].iter().map(|saved| saved.bytes).sum::<u64>();
        assert_eq!(
            (group(0, 6), group(6, 12), group(12, 15)),
            (10 * sbd, 24 * sbd, 5 * b * a * s * s)
        );
        // In f32 masks stay bytes.
        let full = activations(SHAPE, Recompute::None, Precision::F32, Parallel::default());
        assert_eq!(full, layers * (sbd * (4 * 4 + 2 + 48) + 9 * b * a * s * s));
    }

    /// The post says that full recompute reduces activations 5 to 10 times. Its own formula gives
    /// at least 17 times.
    #[test]
    fn full_recompute_saves_more_than_the_post_says() {
        let of = |recompute| activations(SHAPE, recompute, Precision::Mixed, Parallel::default());
        assert!(17 * of(Recompute::Full) <= of(Recompute::Selective));
        assert_eq!(of(Recompute::None) / of(Recompute::Full), 57);
    }

    #[test]
    fn long_sequences_are_mostly_attention() {
        let shape = Shape {
            sequence: 8192,
            batch: 1,
            ..SHAPE
        };
        let all = activations(
            shape,
            Recompute::None,
            Precision::Mixed,
            Parallel::default(),
        );
        let rest = activations(
            shape,
            Recompute::Selective,
            Precision::Mixed,
            Parallel::default(),
        );
        let sbdl = shape.sequence * shape.width * shape.layers;
        assert_eq!((all - rest, rest), (320 * sbdl, 34 * sbdl));
    }

    #[test]
    fn stages_hold_some_layers_of_some_micro_batches() {
        let of = |pipeline, micro_batches| {
            let parallel = Parallel {
                pipeline,
                micro_batches,
                ..Parallel::default()
            };
            activations(SHAPE, Recompute::None, Precision::Mixed, parallel)
        };
        assert_eq!(of(4, 1), of(1, 1) / 4);
        assert_eq!(of(4, 16), of(1, 1));
        let with_logits = Shape {
            vocabulary: Some(50257),
            ..SHAPE
        };
        let logits = activations(
            with_logits,
            Recompute::None,
            Precision::Mixed,
            Parallel::default(),
        ) - of(1, 1);
        assert_eq!(logits, 6 * 2048 * 3 * 50257);
    }

    #[test]
    fn shapes_have_their_parameters() {
        let gpt2 = Shape {
            layers: 12,
            width: 768,
            heads: 12,
            sequence: 1024,
            batch: 1,
            vocabulary: Some(50257),
        };
        assert_eq!(gpt2.parameters(), Ok(124_439_808));
        assert!(
            Shape {
                layers: u64::MAX,
                width: u64::MAX / 2,
                ..gpt2
            }
            .parameters()
            .is_err()
        );
    }

    /// The post's 0.78 bytes per parameter omit the adapters' own weights, 2 bytes of 2 %.
    #[test]
    fn qlora_takes_eight_tenths_of_a_byte() {
        let of = |four_bit| {
            let adapters = Some(Adapters {
                share: 0.02,
                four_bit,
            });
            estimate(&Setup {
                adapters,
                ..setup(10)
            })
            .unwrap()
        };
        let qlora = of(true);
        assert_eq!(
            (qlora.parameters, qlora.gradients, qlora.optimizer),
            (5_400_000_000, 400_000_000, 2_400_000_000)
        );
        assert_eq!(qlora.total(), 8_200_000_000);
        assert_eq!(of(false).parameters, 20_400_000_000);
    }

    /// `foreach` has two tensors as large as the moments at once. They come after the activations.
    #[test]
    fn foreach_takes_another_eight_bytes_a_parameter() {
        let with = |foreach| {
            estimate(&Setup {
                foreach,
                shape: Some(SHAPE),
                ..setup(7)
            })
            .unwrap()
        };
        assert_eq!(
            (with(false).temporaries, with(true).temporaries),
            (0, 56 * GB)
        );
        let (states, activations) = (112 * GB, with(true).activations.unwrap());
        assert_eq!(with(true).total(), states + activations.max(56 * GB));
        assert_eq!(with(false).total(), states + activations);
    }

    /// Flash attention saves a number for each row; without dropout no mask is left.
    #[test]
    fn flash_attention_saves_rows() {
        let of = |attention, dropout| {
            let setup = Setup {
                attention,
                dropout,
                shape: Some(SHAPE),
                ..setup(7)
            };
            estimate(&setup).unwrap().activations.unwrap()
        };
        let sbdl = 2048 * 3 * 4096 * 32;
        let squares = 3 * 32 * 2048 * 2048 * 32;
        let rows = 4 * 3 * 32 * 2048 * 32;
        assert_eq!(of(Attention::Scores, true), 34 * sbdl + 5 * squares);
        assert_eq!(of(Attention::Scores, false), 32 * sbdl + 4 * squares);
        assert_eq!(of(Attention::Flash, true), 34 * sbdl + rows);
        assert_eq!(of(Attention::Flash, false), 32 * sbdl + rows);
    }

    #[test]
    fn checkpoints_have_twelve_bytes_a_parameter() {
        assert_eq!(estimate(&setup(7)).unwrap().checkpoint, 84 * GB);
        assert_eq!(estimate(&setup(70)).unwrap().checkpoint, 840 * GB);
        let full = Setup {
            precision: Precision::F32,
            ..setup(7)
        };
        assert_eq!(estimate(&full).unwrap().checkpoint, 84 * GB);
    }

    #[test]
    fn impossible_sizes_are_refused() {
        let with = |parallel| {
            estimate(&Setup {
                parallel,
                ..setup(7)
            })
        };
        assert!(
            with(Parallel {
                tensor: 0,
                ..Parallel::default()
            })
            .is_err()
        );
        assert!(
            with(Parallel {
                zero: 4,
                ..Parallel::default()
            })
            .is_err()
        );
        assert!(
            with(Parallel {
                tensor: u64::MAX,
                pipeline: u64::MAX,
                ..Parallel::default()
            })
            .is_err()
        );
        assert!(
            estimate(&Setup {
                parameters: u64::MAX,
                ..setup(7)
            })
            .is_err()
        );
        let shape = Some(Shape { heads: 0, ..SHAPE });
        assert_eq!(
            estimate(&Setup { shape, ..setup(7) }),
            Err(SizeError::Zero { size: "heads" })
        );
        let shape = Some(Shape {
            sequence: u64::MAX,
            ..SHAPE
        });
        assert!(estimate(&Setup { shape, ..setup(7) }).is_err());
        for share in [0.0, -1.0, 1.5, f64::NAN] {
            assert!(
                estimate(&Setup {
                    adapters: Some(Adapters {
                        share,
                        four_bit: true
                    }),
                    ..setup(7)
                })
                .is_err()
            );
        }
    }
}
