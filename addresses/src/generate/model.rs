//! The shapes of the models of STAlloc's evaluation (section 9.1), from their published
//! configurations.

ir::named! {
    /// A model.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Model {
        /// GPT-2 with 345 million parameters, as Megatron-LM trains it.
        Gpt2 = "gpt2-345m",
        /// Llama2 with 7 billion parameters.
        Llama2 = "llama2-7b",
        /// Qwen2.5 with 7 billion parameters.
        Qwen7b = "qwen2.5-7b",
        /// Qwen2.5 with 14 billion parameters.
        Qwen14b = "qwen2.5-14b",
        /// Qwen2.5 with 32 billion parameters.
        Qwen32b = "qwen2.5-32b",
        /// Qwen2.5 with 72 billion parameters.
        Qwen72b = "qwen2.5-72b",
        /// Qwen1.5-MoE-A2.7B: 14 billion parameters, of which a token uses 2.7.
        QwenMoe = "qwen1.5-moe",
    }
}

/// The numbers of a transformer that decide its tensors' sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream, elements.
    pub width: u64,
    /// Width between the two products of a feed-forward part, or of an expert, elements.
    pub hidden: u64,
    /// Heads of queries.
    pub heads: u64,
    /// Heads of keys and values. Fewer than `heads`: grouped-query attention.
    pub key_heads: u64,
    /// Width of a head, elements.
    pub head: u64,
    /// Entries of the vocabulary.
    pub vocabulary: u64,
    /// Tokens of a sequence in the paper's steps.
    pub sequence: u64,
    /// The first product is twice as wide, and one half gates the other (SwiGLU); norms have no
    /// mean; positions are rotations; there is no dropout. Otherwise as in GPT-2.
    pub gated: bool,
    /// Experts of a layer. 0: none.
    pub experts: usize,
    /// Experts that a token goes to.
    pub top: u64,
    /// Hidden width of the expert that every token goes to, elements. 0: none.
    pub shared: u64,
}

impl Model {
    /// Its shape.
    pub fn shape(self) -> Shape {
        let llama = Shape {
            layers: 32,
            width: 4096,
            hidden: 11008,
            heads: 32,
            key_heads: 32,
            head: 128,
            vocabulary: 32000,
            sequence: 4096,
            gated: true,
            experts: 0,
            top: 0,
            shared: 0,
        };
        let qwen = |layers, width, hidden, heads, key_heads| Shape {
            layers,
            width,
            hidden,
            heads,
            key_heads,
            vocabulary: 152_064,
            ..llama
        };
        match self {
            // Megatron-LM pads the vocabulary to a multiple of 128.
            Model::Gpt2 => Shape {
                layers: 24,
                width: 1024,
                hidden: 4096,
                heads: 16,
                key_heads: 16,
                head: 64,
                vocabulary: 50_304,
                sequence: 1024,
                gated: false,
                ..llama
            },
            Model::Llama2 => llama,
            Model::Qwen7b => qwen(28, 3584, 18_944, 28, 4),
            Model::Qwen14b => qwen(48, 5120, 13_824, 40, 8),
            Model::Qwen32b => qwen(64, 5120, 27_648, 40, 8),
            Model::Qwen72b => qwen(80, 8192, 29_568, 64, 8),
            Model::QwenMoe => Shape {
                experts: 60,
                top: 4,
                shared: 5632,
                vocabulary: 151_936,
                sequence: 2048,
                ..qwen(24, 2048, 1408, 16, 16)
            },
        }
    }
}
