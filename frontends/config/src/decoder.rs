//! What a decoder is made of: blocks of attention and an MLP, and a head over the vocabulary.

use crate::Error;
use crate::dropout::Dropout;
use crate::experts::Mixture;
use crate::norm::Norm;
use crate::rotary::Rotary;

/// What a decoder is made of. Names are paths of modules; those of a block are relative to it.
pub(crate) struct Decoder {
    pub(crate) name: String,
    pub(crate) vocabulary: u64,
    pub(crate) width: u64,
    /// Queries' heads, keys' and values' heads, and elements of a head.
    pub(crate) heads: u64,
    pub(crate) shared_heads: u64,
    pub(crate) head: u64,
    /// The factor of attention's scores, and the bound that they approach if there is one.
    pub(crate) scale: f64,
    pub(crate) score_cap: Option<f64>,
    /// The bound of the elements of queries, keys and values.
    pub(crate) clip: Option<f64>,
    pub(crate) blocks: Vec<Block>,
    pub(crate) positions: Positions,
    /// The token whose embedding is not trained.
    pub(crate) padding: Option<u64>,
    /// The factor of the embeddings.
    pub(crate) embedding_scale: f64,
    pub(crate) norm: Norm,
    pub(crate) names: Names,
    pub(crate) projections: Projections,
    /// Whether queries, keys and values, and attention's result, have biases.
    pub(crate) biases: [bool; 2],
    pub(crate) head_norms: Option<HeadNorms>,
    /// A score of each head that takes part in the softmax and has no value.
    pub(crate) sinks: bool,
    pub(crate) mlp: Mlp,
    /// Columns inside the MLP.
    pub(crate) inner: u64,
    pub(crate) mlp_bias: bool,
    /// What blocks have that mix experts.
    pub(crate) mixture: Option<Mixture>,
    pub(crate) activation: Activation,
    /// Whether attention and MLP read the same input. Without a norm before the MLP it reads
    /// what attention reads.
    pub(crate) parallel: bool,
    /// The factor of what attention and MLP add.
    pub(crate) residual_scale: f64,
    /// Weights are `[in, out]`.
    pub(crate) conv: bool,
    /// Whether the head's weight is the table of embeddings, and whether the head has a bias.
    pub(crate) tied: bool,
    pub(crate) head_bias: bool,
    /// The factor of the logits, and the bound that they approach if there is one.
    pub(crate) logit_scale: f64,
    pub(crate) logit_cap: Option<f64>,
    pub(crate) dropout: Dropout,
}

/// What blocks differ in.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    /// How many positions a query sees, itself included; `None` for all before it.
    pub(crate) window: Option<u64>,
    /// Which rotary positions turn queries and keys, if any do.
    pub(crate) rotary: Option<usize>,
    /// Whether it has a mixture of experts in place of the MLP.
    pub(crate) mixes: bool,
}

/// The paths of a family's modules.
#[derive(Clone, Copy)]
pub(crate) struct Names {
    pub(crate) embeddings: &'static str,
    /// The norm of the embeddings.
    pub(crate) embedding_norm: Option<&'static str>,
    /// The list of blocks.
    pub(crate) blocks: &'static str,
    pub(crate) attention: &'static str,
    /// Attention's last product, in attention.
    pub(crate) output: &'static str,
    /// The MLP; empty if its products are in the block itself.
    pub(crate) mlp: &'static str,
    /// The norms of a block: before and after attention, before and after the MLP.
    pub(crate) norms: [Option<&'static str>; 4],
    pub(crate) last_norm: Option<&'static str>,
    /// The module with the frequencies of rotary positions.
    pub(crate) rotary: &'static str,
    pub(crate) head: &'static str,
}

/// How positions enter.
pub(crate) enum Positions {
    /// A table of this many rows is added to the embeddings. It begins behind rows that no position
    /// reads.
    Table {
        path: &'static str,
        rows: u64,
        first: u64,
    },
    /// Queries and keys are turned; blocks name the kind.
    Rotary(Vec<Rotary>),
    /// A score falls by the distance of query and key, times the slope of the head.
    Slopes(Vec<f32>),
}

/// Queries, keys and values by way of narrow rows. (DeepSeek-AI, DeepSeek-V2, 2024)
#[derive(Clone, Copy)]
pub(crate) struct Latent {
    /// The columns of the rows of queries; `None` if they are made at once.
    pub(crate) queries: Option<u64>,
    /// The columns of the rows of keys and values.
    pub(crate) keys: u64,
    /// Elements of a head of queries and keys that do not turn, and of those that do.
    pub(crate) plain: u64,
    pub(crate) turning: u64,
    /// Elements of a head of values.
    pub(crate) values: u64,
}

/// The products that make queries, keys and values.
#[derive(Clone, Copy)]
pub(crate) enum Projections {
    /// Three.
    Separate,
    /// Those of narrow rows.
    Latent(Latent),
    /// One. Its columns are so many groups of heads; a group's are queries, keys, values, or
    /// queries, values, keys.
    Joint {
        name: &'static str,
        groups: u64,
        values_first: bool,
    },
}

impl Projections {
    /// One product; its columns are all queries, all keys, all values.
    pub(crate) fn joint(name: &'static str) -> Projections {
        Projections::Joint {
            name,
            groups: 1,
            values_first: false,
        }
    }

    /// One product; its columns are queries, keys and values of a first group of heads, then of the
    /// next.
    pub(crate) fn by_group(name: &'static str, groups: u64) -> Projections {
        Projections::Joint {
            name,
            groups,
            values_first: false,
        }
    }
}

/// Norms of queries and keys.
#[derive(Clone, Copy)]
pub(crate) struct HeadNorms {
    pub(crate) names: [&'static str; 2],
    pub(crate) norm: Norm,
    pub(crate) over: Over,
    /// Whether they come after the turn by positions.
    pub(crate) turned: bool,
}

/// What a norm of queries or keys is over.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Over {
    /// Each head; all have the same weights.
    Head,
    /// Each head; each has its own weights.
    EachHead,
    /// The same, as a module for each head.
    HeadModules,
    /// All heads at once.
    Heads,
}

/// The products of the MLP.
#[derive(Clone, Copy)]
pub(crate) enum Mlp {
    /// `down(f(up(x)))`.
    Plain {
        up: &'static str,
        down: &'static str,
    },
    /// `down(f(gate(x)) up(x))`.
    Gated,
    /// The same with gate and up as one product.
    JointGate,
}

/// The MLP's function.
#[derive(Clone, Copy)]
pub(crate) enum Activation {
    Gelu {
        tanh: bool,
    },
    Silu,
    Relu,
    /// The square of ReLU.
    Relu2,
    /// Two curves with trained factors. (Huang and Schlag, xIELU, 2024)
    Xielu,
}

impl Activation {
    /// By transformers' name.
    pub(crate) fn parse(name: &str) -> Result<Activation, Error> {
        Ok(match name {
            "gelu" => Activation::Gelu { tanh: false },
            "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Activation::Gelu { tanh: true },
            "silu" | "swish" => Activation::Silu,
            "relu" => Activation::Relu,
            "relu2" => Activation::Relu2,
            "xielu" => Activation::Xielu,
            other => {
                let why = format!("the activation {other} is not known");
                let known = "known are gelu, gelu_new, silu, relu, relu2 and xielu";
                return Err(Error::new("", why).help(known));
            }
        })
    }
}
